"""Schedules and arguments as JSON: RedBeat's format, read leniently, and values that RedBeat cannot store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from celery.beat import BeatLazyFunc
from celery.exceptions import ImproperlyConfigured
from celery.schedules import BaseSchedule, crontab, schedule, solar
from celery.utils.saferepr import saferepr
from dateutil.rrule import weekday, weekdays
from kombu.utils import json as kombu_json
from redbeat.decoder import RedBeatJSONDecoder, RedBeatJSONEncoder
from redbeat.schedules import rrule

from ...errors import EntryError
from ..calendar.clocked import clocked
from ..calendar.recurrence import is_known
from .options import cause, scalar

if TYPE_CHECKING:
    from .definition import JsonObject

__all__ = ("Decoder", "Encoder", "decode_schedule", "encode_schedule", "have_same_times", "why_no_crontab")

#: A JSON object in RedBeat's format: the classes that take its values check them.
_Raw = Mapping[str, Any]

CRONTAB_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
DATE_PARTS = ("bysetpos", "bymonth", "bymonthday", "byyearday", "byeaster", "byweekno", "byweekday")
#: Exclusive upper bounds of the rule parts that name a time of day: Python and dateutil have no leap seconds.
TIMES_END = {"byhour": 24, "byminute": 60, "bysecond": 60}
RRULE_FIELDS = ("freq", "interval", "wkst", "count", *DATE_PARTS, *TIMES_END)


#: The values that JSON has no form for, and that messages hold in that of kombu: an argument is stored as it is sent.
#: Those of a type that the app has registered with kombu are left as they are: workers decode them.
#: RedBeat passes this form on unread, but for a datetime, of which it has one of its own, with a zone.
OF_KOMBU = frozenset({"date", "time", "datetime", "decimal", "uuid", "bytes", "base64"})

_kombu = kombu_json.JSONEncoder()


class Decoder(RedBeatJSONDecoder):  # type: ignore[misc]
    """A decoder of the values that JSON has no form for; schedules are decoded by ``decode_schedule``."""

    def dict_to_object(self, d: dict[str, Any]) -> object:
        """Return the value that a JSON object stands for, the object itself if its type is unknown."""
        kind = d.get("__type__")
        if d.keys() == {"__type__", "__value__"}:
            if isinstance(kind, str) and kind in OF_KOMBU:
                return kombu_json.object_hook(d)
            if not isinstance(kind, str) or kind not in getattr(kombu_json, "_decoders", {}):
                raise ValueError("a worker cannot read it")  # it would drop the message
        return super().dict_to_object(d) if kind == "datetime" else d


class Encoder(RedBeatJSONEncoder):  # type: ignore[misc]
    """An encoder of arguments and options."""

    def default(self, obj: object) -> object:
        """Return a value in the form of JSON; raise a TypeError if it has none."""
        if isinstance(obj, BeatLazyFunc):
            raise TypeError(f"only beat_schedule can give {saferepr(obj)}: JSON cannot hold it")
        if not isinstance(obj, datetime) or obj.tzinfo is None:  # which RedBeat would store as one in UTC
            return _kombu.default(obj)
        if obj.utcoffset() != obj.replace(fold=0).utcoffset():
            # The hour that comes twice: the format has no field for which one, and a message has the offset.
            obj = obj.replace(tzinfo=timezone(obj.utcoffset() or timedelta()), fold=0)
        return super().default(obj)


class _ScheduleEncoder(RedBeatJSONEncoder):  # type: ignore[misc]
    """An encoder that writes RedBeat's JSON where possible, and also schedules that RedBeat cannot store."""

    def default(self, obj: object) -> object:
        if isinstance(obj, BaseSchedule) and not is_known(obj):
            raise TypeError(f"only beat_schedule can give {saferepr(obj)}: JSON cannot hold it")
        if isinstance(obj, clocked):
            return {"__type__": "clocked", "instant": obj.isoformat()}
        if isinstance(obj, solar):
            return {"__type__": "solar", "event": obj.event, "lat": obj.lat, "lon": obj.lon}
        raw = super().default(obj)
        if isinstance(obj, weekday) and obj.n:  # RedBeat reads n, and does not write it
            return {**raw, "n": obj.n}
        if isinstance(obj, crontab):
            return {name: _json_value(value, parsed=getattr(obj, name, ())) for name, value in raw.items()}
        if isinstance(obj, rrule):
            return {name: _json_value(value, parsed=value) for name, value in raw.items()}
        return raw


_schedule_encoder = _ScheduleEncoder()


def encode_schedule(when: object) -> Any:
    """Return the JSON value of a schedule.

    Raises:
        TypeError: only code can give it.
    """
    return json.loads(_schedule_encoder.encode(when))


def why_no_crontab(exc: Exception, fields: Mapping[str, Any]) -> str:
    """Return why Celery rejects a crontab: the field, and a hint if Sunday may be written as 7, as in other programs.

    Args:
        exc: of the whole crontab, whose fields may be wrong only together.
    """
    for name, value in fields.items():
        try:
            crontab(**{name: value})
        except Exception as of_field:  # Celery's parser raises any exception
            is_sunday = name == "day_of_week" and re.search(r"(?<!\d)7(?!\d)", str(value))
            hint = " Sunday is 0, not 7." if is_sunday else ""
            return f"{name} is {scalar(value)}: {of_field}{hint}"
    return str(exc)


def _check_fields(d: JsonObject, known: Iterable[str]) -> None:
    # If a misspelled field were ignored, the schedule would run far too often.
    if unknown := d.keys() - {"__type__", *known}:
        kind, fields = d["__type__"], ", ".join(known)
        raise ValueError(f"the {kind} has {', '.join(map(repr, sorted(unknown)))}: its fields are {fields}")


def _crontab_field(value: object) -> object:
    # "[1-12]" is how RedBeat's own documentation writes a range.
    return value.strip().removeprefix("[").removesuffix("]") if isinstance(value, str) else value


def _interval(name: str, seconds: Any, *, relative: bool = False) -> schedule:
    """Return the schedule of an interval.

    Args:
        name: of the field, for the error.
    """
    try:
        return schedule(run_every=float(seconds), relative=relative)
    except (TypeError, ValueError, OverflowError):
        longest = f"{timedelta.max // timedelta(seconds=1):,}"
        raise ValueError(f"{name} is {scalar(seconds)}: use a number of seconds, up to {longest}") from None


def _json_value(value: object, *, parsed: Iterable[Any]) -> object:
    """Return a field of a schedule in its JSON form, where sets, ranges and the like are lists."""
    if isinstance(value, str | list | tuple) or not isinstance(value, Iterable):
        return value
    return sorted(parsed) if all(isinstance(each, int) for each in parsed) else list(parsed)


def _rule(d: _Raw) -> rrule:
    _check_fields(d, (*RRULE_FIELDS, "dtstart", "dtstart_tz", "until", "until_tz"))
    fields = {name: d[name] for name in RRULE_FIELDS if name in d}
    if "freq" not in fields or d.get("dtstart") is None:
        raise ValueError("an rrule needs freq and dtstart; without dtstart, each beat would count from another moment")
    freq = fields["freq"]
    if (freq.upper() if isinstance(freq, str) else freq) not in {*rrule.FREQ_MAP, *rrule.FREQ_MAP.values()}:
        raise ValueError(f"the freq of an rrule is one of {', '.join(rrule.FREQ_MAP)} or 0 to 6, not {freq!r}")
    for name, end in TIMES_END.items():
        given = fields.get(name)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            if not isinstance(value, int) or not 0 <= value < end:
                raise ValueError(f"{name} of an rrule is 0 to {end - 1}, not {value!r}")
    if isinstance(fields.get("byweekday"), list):
        fields["byweekday"] = [_weekday(day) for day in fields["byweekday"]]
    for name in ("byweekday", "wkst"):
        if isinstance(fields.get(name), str | dict | int):
            fields[name] = _weekday(fields[name])
    return rrule(**fields, dtstart=_moment(d, "dtstart"), until=_moment(d, "until"))


def _moment(d: _Raw, name: str) -> datetime | None:
    """Return an instant of a rule, from seconds since 1970 and a zone: minutes ahead of UTC, or a name."""
    seconds, zone = d.get(name), d.get(f"{name}_tz") or 0
    if seconds is None:
        return None
    try:
        # The name keeps it different from UTC: UTC is a zone, an offset of 0 is not.
        tz = ZoneInfo(zone) if isinstance(zone, str) else timezone(timedelta(minutes=zone), "offset")
    except Exception:  # ZoneInfo raises five different errors for a wrong name
        what = "use minutes ahead of UTC, or the name of a zone, like Europe/Berlin"
        raise ValueError(f"{name}_tz of an rrule is {scalar(zone)}: {what}") from None
    try:
        return datetime.fromtimestamp(seconds, tz)
    except (TypeError, ValueError, OverflowError, OSError):
        raise ValueError(
            f"{name} of an rrule is {scalar(seconds)}: use seconds since 1970, up to the year 9999"
        ) from None


def _weekday(value: object) -> object:
    """Return a day of the week, from RedBeat's forms, ``1MO``, or an object with ``weekday`` and ``n``."""
    if isinstance(value, int) and value not in range(7):
        raise ValueError(f"a day of the week is 0, Monday, to 6, not {value!r}")
    if isinstance(value, str):
        names = {str(day): day for day in weekdays}
        name, n = value[-2:].upper(), value[:-2]
        if name not in names:
            raise ValueError(f"a day of the week is MO, 1MO or -1SU, not {value!r}")
        return names[name](int(n)) if n else names[name]
    if isinstance(value, dict) and value.get("__type__") == "weekday":
        # dateutil makes a weekday of any value, even one that no error message can show.
        day, nth = value.get("wkday"), value.get("n")
        if not isinstance(day, int) or day not in range(7) or not isinstance(nth, int | None):
            raise ValueError(f"a weekday has a wkday, 0 (Monday) to 6, and perhaps a whole n, not {day!r} and {nth!r}")
        return weekday(day, nth)
    return weekdays[value["weekday"]](value.get("n")) if isinstance(value, dict) else value


def _of_interval(d: _Raw) -> schedule:
    if "every" not in d:
        raise ValueError("an interval needs every, a number of seconds")
    return _interval("every", d["every"], relative=bool(d.get("relative", False)))


def _of_crontab(d: _Raw) -> crontab:
    _check_fields(d, CRONTAB_FIELDS)
    fields = {name: _crontab_field(d[name]) for name in CRONTAB_FIELDS if d.get(name) is not None}
    try:
        return crontab(**fields)
    except Exception as exc:  # Celery's parser raises any exception
        raise ValueError(why_no_crontab(exc, fields)) from exc


#: The function that makes each kind of schedule from its JSON: RedBeat's, read leniently, and those of singlebeat.
_KINDS: Mapping[str, Callable[[_Raw], BaseSchedule]] = {
    "interval": _of_interval,
    "crontab": _of_crontab,
    "rrule": _rule,
    "clocked": lambda d: clocked(d["instant"]),
    "solar": lambda d: solar(d["event"], float(d["lat"]), float(d["lon"])),
}


def decode_schedule(when: Any) -> object:
    """Return the schedule for a JSON value, or any other value unchanged.

    It accepts the omissions and spellings of writers in other languages. Among the arguments of a task, such values are
    ordinary data.

    Raises:
        EntryError: the schedule is invalid; the message says why.
    """
    kind = when.get("__type__") if isinstance(when, Mapping) else None
    try:
        if isinstance(kind, str) and kind in _KINDS:
            return _KINDS[kind](when)
        if isinstance(when, int | float) and not isinstance(when, bool):
            return _interval("the schedule", when)
    except (ImproperlyConfigured, ImportError):  # the latter up to Celery 5.6
        raise EntryError("a solar schedule needs the ephem library where beat runs: pip install ephem") from None
    except Exception as exc:  # constructors may raise anything: this must not harm other entries
        raise EntryError(f"definition has an invalid schedule: {cause(exc)}") from exc
    return when


def have_same_times(one: BaseSchedule, other: BaseSchedule) -> bool:
    """Return whether two schedules are the same. Compare their JSON, because all rrules of RedBeat are equal."""
    if type(one) is type(other) and one == other and not isinstance(one, rrule):
        return True
    try:
        return bool(encode_schedule(one) == encode_schedule(other))
    except TypeError:  # one of them cannot be stored
        return False
