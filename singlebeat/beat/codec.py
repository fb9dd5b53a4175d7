"""JSON of an entry in Redis: RedBeat's, read generously."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

from celery.exceptions import ImproperlyConfigured
from celery.schedules import BaseSchedule, crontab, schedule, solar
from celery.utils.saferepr import saferepr
from dateutil.rrule import weekday, weekdays
from redbeat.decoder import RedBeatJSONDecoder, RedBeatJSONEncoder
from redbeat.schedules import rrule

from ..errors import EntryError
from ..locks import time_to_start
from .clocked import clocked
from .recurrence import is_known

__all__ = ("Encoder", "Meta", "decode_definition", "encode_definition", "loads_object")

DATETIME_FIELDS = ("year", "month", "day", "hour", "minute", "second", "microsecond")
CRONTAB_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
DATE_PARTS = ("bysetpos", "bymonth", "bymonthday", "byyearday", "byeaster", "byweekno", "byweekday")
RRULE_FIELDS = ("freq", "interval", "wkst", "count", *DATE_PARTS, "byhour", "byminute", "bysecond")

#: The type of a schedule that the configuration alone can give: an object of a user's own class.
GIVEN = "given"


class _Decoder(RedBeatJSONDecoder):  # type: ignore[misc]
    """Accepts what writers in other languages leave out or write in another way."""

    def dict_to_object(self, d: dict[str, Any]) -> Any:
        kind = d.get("__type__")
        if kind == "interval":
            return schedule(run_every=float(d["every"]), relative=bool(d.get("relative", False)))
        if kind == "crontab":
            fields = {name: _crontab_field(d[name]) for name in CRONTAB_FIELDS if d.get(name) is not None}
            d = {"__type__": kind, **fields}
        if kind == "rrule":
            return _rule(d)
        return super().dict_to_object(d)


class Encoder(RedBeatJSONEncoder):  # type: ignore[misc]
    """Writes what RedBeat can read wherever there is such a thing, and schedules that it cannot store."""

    def default(self, obj: Any) -> Any:
        """Return a value in the form of JSON; TypeError if it has none."""
        if isinstance(obj, BaseSchedule) and not is_known(obj):
            raise TypeError(f"{saferepr(obj)} is of a class of your own: give it in beat_schedule, it cannot be stored")
        if isinstance(obj, clocked):
            return {"__type__": "clocked", "instant": obj.isoformat()}
        if isinstance(obj, solar):
            return {"__type__": "solar", "event": obj.event, "lat": obj.lat, "lon": obj.lon}
        raw = super().default(obj)
        if isinstance(obj, weekday) and obj.n:  # RedBeat reads it, and does not write it
            return {**raw, "n": obj.n}
        if isinstance(obj, crontab):
            return {name: _plain(value, parsed=getattr(obj, name, ())) for name, value in raw.items()}
        if isinstance(obj, rrule):
            return {name: _plain(value, parsed=value) for name, value in raw.items()}
        return raw


#: Made once: that costs more than reading a short text with it.
_DECODER = _Decoder()


def _crontab_field(value: Any) -> Any:
    # "[1-12]" is how RedBeat's own documentation writes a range.
    return value.strip().removeprefix("[").removesuffix("]") if isinstance(value, str) else value


def _plain(value: Any, *, parsed: Any) -> Any:
    """Return a field of a schedule as JSON has it; sets, ranges and the like are lists there."""
    if isinstance(value, str | list | tuple) or not isinstance(value, Iterable):
        return value
    return sorted(parsed) if all(isinstance(each, int) for each in parsed) else list(parsed)


def _rule(d: Mapping[str, Any]) -> rrule:
    fields = {name: d[name] for name in RRULE_FIELDS if name in d}
    if "freq" not in fields or d.get("dtstart") is None:
        raise ValueError("an rrule needs freq and dtstart; without that, each beat would count from another moment")
    if isinstance(fields.get("byweekday"), list):
        fields["byweekday"] = [_weekday(day) for day in fields["byweekday"]]
    for name in ("byweekday", "wkst"):
        if isinstance(fields.get(name), str | dict):
            fields[name] = _weekday(fields[name])
    return rrule(**fields, dtstart=_moment(d, "dtstart"), until=_moment(d, "until"))


def _moment(d: Mapping[str, Any], name: str) -> datetime | None:
    """Return an instant of a rule: seconds since 1970, and beside it minutes ahead of UTC or the name of a zone."""
    seconds, zone = d.get(name), d.get(f"{name}_tz") or 0
    if seconds is None:
        return None
    if isinstance(zone, str):
        return datetime.fromtimestamp(seconds, ZoneInfo(zone))
    return datetime.fromtimestamp(seconds, timezone(timedelta(minutes=zone)) if zone else UTC)


def _weekday(value: Any) -> Any:
    """Return a day of the week: as RedBeat writes it, or ``1MO``, or an object with ``weekday`` and ``n``."""
    if isinstance(value, str):
        names = {str(day): day for day in weekdays}
        name, n = value[-2:].upper(), value[:-2]
        if name not in names:
            raise ValueError(f"a day of the week is MO, 1MO or -1SU, not {value!r}")
        return names[name](int(n)) if n else names[name]
    return weekdays[value["weekday"]](value.get("n")) if isinstance(value, dict) else value


def loads_object(text: str, what: str) -> Mapping[str, Any]:
    """Read a JSON object in RedBeat's form, with what it names (dates, schedules) made.

    Raises:
        EntryError: it cannot be understood; the message begins with ``what``.
    """
    try:
        raw = _DECODER.decode(text)
    except RecursionError:
        raise EntryError(f"{what} is nested too deeply") from None
    except Exception as exc:  # the constructors that it names may raise anything, and it must harm nobody else
        raise EntryError(f"{what} cannot be read: {type(exc).__name__}: {exc}") from exc
    if not isinstance(raw, Mapping):
        raise EntryError(f"{what} is not a JSON object")
    return raw


def encode_definition(fields: Mapping[str, Any], *, given: BaseSchedule | None = None) -> str:
    """Return the ``definition`` field of an entry.

    Args:
        given: the schedule that ``beat_schedule`` has for it.

    Raises:
        TypeError, ValueError: a value cannot be stored.
    """
    when = fields["schedule"]
    if when is given and not is_known(when):
        fields = {**fields, "schedule": {"__type__": GIVEN, "class": f"{type(when).__module__}.{type(when).__name__}"}}
    return json.dumps(fields, cls=Encoder)


def decode_definition(definition: str, *, given: BaseSchedule | None = None) -> dict[str, Any]:
    """Read the ``definition`` field of an entry; what is missing gets its default, what is unknown is left out.

    Args:
        given: the schedule that ``beat_schedule`` has for it.

    Raises:
        EntryError: it cannot be understood; the message says why.
    """
    raw = loads_object(definition, "definition")
    task, when = raw.get("task"), raw.get("schedule")
    if not isinstance(task, str) or not task:
        raise EntryError("definition has no task, or it is not a text")
    if isinstance(when, int | float) and not isinstance(when, bool):
        try:
            when = schedule(run_every=float(when))
        except (ValueError, OverflowError) as exc:
            raise EntryError(f"definition has a schedule out of range: {exc}") from exc
    if isinstance(when, dict):
        when = _made(when, given)
    if not isinstance(when, BaseSchedule):
        raise EntryError(f"definition has a schedule of no known kind: {saferepr(when)}")
    if isinstance(when, schedule) and hasattr(when, "run_every") and when.run_every.total_seconds() <= 0:
        raise EntryError("definition has an interval that is not longer than 0 seconds")
    return {
        "task": task,
        "schedule": when,
        "args": _typed(raw.get("args"), list, "args"),
        "kwargs": _typed(raw.get("kwargs"), dict, "kwargs"),
        "options": _checked_options(_typed(raw.get("options"), dict, "options")),
        "enabled": raw.get("enabled") in (None, True, 1),
    }


def _made(when: dict[str, Any], given: BaseSchedule | None) -> Any:
    """Return the schedule that RedBeat does not know; only here, because in arguments it would be the task's."""
    try:
        match when.get("__type__"):
            case "clocked":
                return clocked(when["instant"])
            case "solar":
                return solar(when["event"], float(when["lat"]), float(when["lon"]))
            case "given" if given is not None:
                return given
            case "given":
                raise EntryError(
                    f"its schedule is a {when.get('class')}, which the beat_schedule of this app must give"
                )
    except ImproperlyConfigured:
        raise EntryError("a solar schedule needs the ephem library where beat runs: pip install ephem") from None
    except (KeyError, TypeError, ValueError) as exc:
        raise EntryError(f"definition cannot be read: {type(exc).__name__}: {exc}") from exc
    return when


def _typed(value: Any, kind: type, name: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise EntryError(f"definition: {name} is not a JSON {'object' if kind is dict else 'array'}")
    return value


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    headers = options.get("headers")
    if headers is not None and not isinstance(headers, dict):
        raise EntryError("definition: the option headers is not a JSON object")
    try:
        time_to_start(options, queued_ttl=0, now=datetime.min.replace(tzinfo=UTC))
    except (ValueError, TypeError, OverflowError) as exc:
        raise EntryError(f"definition: the options countdown, eta and expires make no sense: {exc}") from exc
    return options


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known about an entry's past."""

    last_run_at: datetime | None = None  #: nominal time of its last occurrence, in UTC; None: it has never run
    total_run_count: int = 0
    #: From when on the next occurrence counts, if that is not the last one: its schedule has changed then.
    since: datetime | None = None

    @property
    def counts_from(self) -> datetime | None:
        """The moment after which its next nominal time lies; None: it is due now."""
        return self.since or self.last_run_at

    @classmethod
    def decode(cls, text: str | None) -> Meta:
        """Read the ``meta`` field of an entry.

        Raises:
            EntryError: it cannot be understood.
        """
        if not text:
            return cls()
        raw = loads_object(text, "meta")
        count = raw.get("total_run_count", 0)
        try:
            count = int(count) if isinstance(count, int | float) else 0
            return cls(_instant(raw, "last_run_at"), count, _instant(raw, "since"))
        except (ValueError, OverflowError) as exc:
            raise EntryError(f"meta is out of range: {exc}") from exc

    def uncounted(self) -> Meta:
        """Return the past without its last run, which did not happen."""
        return replace(self, total_run_count=self.total_run_count - 1)

    def encode(self) -> str:
        """Return the ``meta`` field of an entry, in UTC: local time is ambiguous when clocks go back."""
        raw = {"last_run_at": _raw(self.last_run_at), "total_run_count": self.total_run_count}
        return json.dumps(raw if self.since is None else {**raw, "since": _raw(self.since)})


def _raw(moment: datetime | None) -> Mapping[str, Any] | None:
    if moment is None:
        return None
    return {"__type__": "datetime", **{name: getattr(moment, name) for name in DATETIME_FIELDS}, "timezone": "UTC"}


def _instant(raw: Mapping[str, Any], name: str) -> datetime | None:
    moment = raw.get(name)
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as exc:
            raise EntryError(f"meta: {name} is no ISO 8601 date: {moment!r}") from exc
    if moment is not None and not isinstance(moment, datetime):
        raise EntryError(f"meta: {name} is neither a datetime nor null: {moment!r}")
    return None if moment is None else moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
