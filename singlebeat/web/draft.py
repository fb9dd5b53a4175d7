"""An entry as the form of the page holds it: strings, which become an entry again, with an error for each field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from zoneinfo import ZoneInfo

from celery.schedules import BaseSchedule

from ..beat.entries.code_only import MARK, has_code
from ..beat.entries.policy import EntryPolicy
from ..beat.entries.schedule_json import Decoder, Encoder, decode_schedule, encode_schedule
from ..errors import EntryError
from ..masking import MASK

if TYPE_CHECKING:
    from ..beat.entries.salvage import Salvage
    from .exchange import Fields

__all__ = ("KINDS", "Change", "Draft")

#: The kinds of a schedule, as the form shows them.
KINDS = {"every": "Every …", "cron": "Cron", "rule": "Rule", "once": "Once", "json": "JSON"}

CRON = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")

#: The parts of a rule that have a field of their own; a rule with other parts is shown as JSON.
RULE = ("freq", "interval", "byweekday", "bysetpos", "bymonthday", "bymonth", "byhour", "byminute", "count")
FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY")

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}

#: The fields of a policy that the form has; a pause has a form of its own.
NUMBERS = ("misfire_grace_time", "jitter", "expires", "max_runs")
INSTANTS = ("start_time", "end_time")
TEXTS = ("timezone", "overlap", "note")
FLAGS = ("run_on_start",)

#: The fields that make a schedule.
SCHEDULE = (
    *("kind", "every", "unit", *CRON, *(f"rule_{name}" for name in RULE), "rule_dtstart", "rule_until"),
    *("once", "json"),
)

#: All fields, in the order of the form.
FIELDS = (
    *("name", "task", *SCHEDULE, "args", "kwargs", "options", "enabled"),
    *(*TEXTS, *NUMBERS, *INSTANTS, *FLAGS, "tags"),
)

#: Those of several lines. A browser removes the line breaks of others.
AREAS = frozenset({"args", "kwargs", "options", "json"})

#: Those that are a date and time on a wall clock. A browser removes seconds that are 0.
MOMENTS = frozenset({"once", "rule_dtstart", "rule_until"})
WHOLE_MINUTE = re.compile(r"^(.*T\d\d:\d\d):00(\.0+)?$")


class Change(NamedTuple):
    """A field that differs."""

    field: str
    before: str
    after: str


@dataclass(slots=True)
class Draft:
    """The fields of the form.

    ``errors`` has the reason for each field that cannot be used.
    """

    values: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Self:
        """Return the draft of a new entry."""
        empty = dict.fromkeys(FIELDS, "")
        return cls(
            empty
            | {"kind": "cron", "unit": "s", "minute": "0", "hour": "3", "args": "[]", "kwargs": "{}", "options": "{}"}
            | dict.fromkeys(("day_of_month", "month_of_year", "day_of_week"), "*")
            | {"enabled": "on", "rule_freq": "MONTHLY", "rule_interval": "1"}
        )

    @classmethod
    def of_form(cls, form: Fields) -> Self:
        """Return the draft that a form holds."""
        sent = {name: form.get(name) for name in FIELDS}
        return cls({name: _as_shown(name, text) for name, text in sent.items()})

    @classmethod
    def of_entry(cls, found: Salvage, zone: tzinfo, shown: Mapping[str, object]) -> Self:
        """Return the draft of a stored entry; what cannot be read is empty, or the JSON of its schedule.

        Args:
            zone: in which it is read if it has no zone of its own.
            shown: its args, kwargs and options as they may be shown, and its schedule if it cannot be read.
        """
        values, wishes, own = cls.new().values, found.wishes, found.timezone
        values |= {"name": found.name, "task": str(found.fields.get("task", ""))}
        values |= {name: _pretty(shown[name]) if name in shown else "" for name in ("args", "kwargs", "options")}
        values["enabled"] = "on" if found.fields.get("enabled") else ""
        when = found.fields.get("schedule")
        if isinstance(when, BaseSchedule):
            values |= _of_schedule(when, own or zone, is_own=own is not None)
        else:
            values |= {"kind": "json", "json": _pretty(shown.get("schedule"))}
        for name in (*TEXTS, *NUMBERS, *INSTANTS):
            value = wishes.get(name)
            text = "" if value is None else str(value)
            values[name] = text.removesuffix(".0") if name in NUMBERS else text
        values["timezone"] = values["timezone"] or str(own or "")
        values["run_on_start"] = "on" if wishes.get("run_on_start") else ""
        values["tags"] = _of_tags(wishes.get("tags"))
        return cls({name: text if name == "name" else _sent_back(name, text) for name, text in values.items()})

    @property
    def is_usable(self) -> bool:
        """Whether no field has an error so far."""
        return not self.errors

    def fields(self, zone: tzinfo) -> dict[str, Any]:
        """Return the fields of the definition, and note errors.

        Args:
            zone: in which the schedule is read.
        """
        values, found = self.values, dict[str, Any]()
        if not values["task"].strip():
            self.errors["task"] = "name the task that the entry runs"
        found["task"] = values["task"].strip()
        for name, kind, what in (("args", list, "array"), ("kwargs", dict, "object"), ("options", dict, "object")):
            try:
                value = json.loads(values[name] or ("[]" if kind is list else "{}"), cls=Decoder)
            except json.JSONDecodeError as exc:
                self.errors[name] = f"line {exc.lineno}, column {exc.colno}: {exc.msg}"
                continue
            except (EntryError, ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as exc:
                self.errors[name] = f"cannot be read: {type(exc).__name__}: {exc}"
                continue
            if not isinstance(value, kind) and value != MASK:  # which stands for what is stored
                self.errors[name] = f"must be a JSON {what}"
                continue
            found[name] = value
        found["enabled"] = values["enabled"] == "on"
        try:
            found["schedule"] = self.schedule(zone)
        except (EntryError, ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as exc:
            self.errors["schedule"] = (
                str(exc).removeprefix("definition has an invalid schedule: ") or type(exc).__name__
            )
        return found

    def wishes(self) -> dict[str, object]:
        """Return the fields of the policy, None for those that are left empty, and note errors."""
        values, found = self.values, dict[str, object]()
        for name in (*TEXTS, *INSTANTS):
            found[name] = values[name].strip() or None
        if values["note"] == "":
            found["note"] = None
        for name in NUMBERS:
            text = values[name].strip()
            try:
                found[name] = None if not text else int(text) if name == "max_runs" else float(text)
            except ValueError:
                self.errors[name] = "must be a number"
        found["run_on_start"] = True if values["run_on_start"] == "on" else None
        if "tags" in EntryPolicy.names():
            found["tags"] = _tags(values["tags"]) or None
        for name, value in found.items():
            try:
                EntryPolicy.of({name: value})
            except EntryError as exc:
                self.errors.setdefault(name, str(exc).removeprefix("policy: "))
        return found

    def schedule(self, zone: tzinfo) -> BaseSchedule:
        """Return the schedule, read as beat reads one that is stored.

        Raises:
            EntryError, ValueError, TypeError, ...: it cannot be read.
        """
        found = decode_schedule(json.loads(json.dumps(self._raw(zone)), cls=Decoder))
        if not isinstance(found, BaseSchedule):
            raise EntryError('is no schedule, such as {"__type__": "interval", "every": 60}')
        return found

    def _raw(self, zone: tzinfo) -> Any:
        """Return the schedule as JSON has it."""
        values = self.values
        match values["kind"]:
            case "every":
                every = float(values["every"] or "nan") * UNITS.get(values["unit"], 1)
                if not 0 < every < float("inf"):
                    raise EntryError("the interval must be a positive number")
                return {"__type__": "interval", "every": every}
            case "cron":
                return {"__type__": "crontab", **{name: values[name].strip() or "*" for name in CRON}}
            case "rule":
                return self._raw_rule(zone)
            case "once":
                if not values["once"]:
                    raise EntryError("choose the date and the time")
                return {"__type__": "clocked", "instant": _local(values["once"], zone).isoformat()}
            case _:
                try:
                    return json.loads(values["json"])
                except json.JSONDecodeError as exc:
                    raise EntryError(f"line {exc.lineno}, column {exc.colno}: {exc.msg}") from None

    def _raw_rule(self, zone: tzinfo) -> Mapping[str, object]:
        values, raw = self.values, dict[str, object]()
        for name in RULE:
            text = values[f"rule_{name}"].strip()
            if text and name in {"freq"}:
                raw[name] = text
            elif text and name == "byweekday":
                raw[name] = [day.strip().upper() for day in text.split(",") if day.strip()]
            elif text:
                numbers = [_whole(part, name) for part in text.split(",") if part.strip()]
                raw[name] = numbers[0] if name in {"interval", "count"} else numbers
        for name in ("dtstart", "until"):
            if text := values[f"rule_{name}"]:
                moment = _local(text, zone)
                key = getattr(zone, "key", None)
                offset = moment.astimezone(zone).utcoffset()
                raw[name] = moment.timestamp()
                raw[f"{name}_tz"] = key or (offset.total_seconds() / 60 if offset else 0)
        return {"__type__": "rrule", **raw}

    def texts(self) -> dict[str, str]:
        """Return each field as a person compares it; the fields of the schedule as one."""
        values = self.values
        shown = {name: values[name] for name in FIELDS if name not in SCHEDULE and name != "name"}
        match values["kind"]:
            case "every":
                when = f"every {values['every']} {values['unit']}"
            case "cron":
                when = "cron " + " ".join(values[name] for name in CRON)
            case "rule":
                parts = [*(f"rule_{name}" for name in RULE), "rule_dtstart", "rule_until"]
                when = "\n".join(f"{name.removeprefix('rule_')} {values[name]}" for name in parts if values[name])
            case "once":
                when = f"once, at {values['once']}"
            case _:
                when = values["json"]
        return {"task": shown.pop("task"), "schedule": when, **shown}

    def changes(self, other: Draft) -> Sequence[Change]:
        """Return the fields in which another draft differs."""
        mine, theirs = self.texts(), other.texts()
        return [Change(name, mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]]

    def zone(self, default: tzinfo) -> tzinfo:
        """Return the zone in which it is read, the default if it names none that is known."""
        try:
            return ZoneInfo(self.values["timezone"].strip()) if self.values["timezone"].strip() else default
        except Exception:  # ZoneInfo raises five different errors; the field has an error then
            return default

    def has_schedule_of(self, other: Draft, *, but_zone: bool = False) -> bool:
        """Return whether the schedule is that of another draft, and so is the zone in which it is read.

        Args:
            but_zone: the zone may be another one.
        """
        names = SCHEDULE if but_zone else (*SCHEDULE, "timezone")
        return all(self.values[name] == other.values[name] for name in names)

    def _moments(self, default: tzinfo) -> Sequence[object]:
        """Return the fields of the schedule, with instants in the place of times of a zone."""
        zone, found = self.zone(default), dict[str, object](self.values)
        for name in MOMENTS:
            with suppress(EntryError):
                found[name] = _local(self.values[name], zone)
        return [found[name] for name in SCHEDULE]

    def merged(self, before: Draft, theirs: Draft, zone: tzinfo) -> Draft:
        """Return this draft with the fields of another one that were not changed here.

        Args:
            zone: in which drafts are read that have no zone of their own.
        """
        is_mine = any(self.values[name] != before.values[name] for name in SCHEDULE)
        kind = (self if is_mine else theirs).values["kind"]
        is_theirs = not is_mine and theirs._moments(zone) != before._moments(zone)
        # Texts that are times of a zone are kept with it, unless one has changed the schedule, and the other the zone.
        when = (*SCHEDULE, "timezone") if kind in {"once", "rule"} and not is_theirs else SCHEDULE
        groups = [when, *((name,) for name in FIELDS if name not in when)]
        values = dict(self.values)
        for group in groups:
            if all(self.values[name] == before.values[name] for name in group):
                values |= {name: theirs.values[name] for name in group}
        return Draft(values)


def _sent_back(name: str, text: str) -> str:
    """Return what a browser sends for the text of a field that is left as it is."""
    text = text.encode(errors="replace").decode().replace("\0", "\ufffd")  # half of a surrogate pair; HTML's own
    return _as_shown(name, text if name in AREAS else re.sub("[\r\n]", "", text))


def _as_shown(name: str, text: str) -> str:
    """Return the text that the form shows for a text that a browser has sent."""
    if name in AREAS:
        return text.replace("\r\n", "\n")
    return WHOLE_MINUTE.sub(r"\1", text) if name in MOMENTS else text


def _of_tags(tags: object) -> str:
    """Return tags as they are shown: separated by commas, or as JSON if they hold a comma or space of their own."""
    if not isinstance(tags, Sequence) or isinstance(tags, str):
        return ""
    text = ", ".join(map(str, tags))
    return text if _tags(text) == [*tags] else _json(tags, default=str)


def _tags(text: str) -> Sequence[object]:
    """Return the tags that a text shows."""
    if text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            tags: Sequence[object] = json.loads(text)
            return tags
    return [tag.strip() for tag in text.split(",") if tag.strip()]


def _of_schedule(when: BaseSchedule, zone: tzinfo, *, is_own: bool) -> dict[str, str]:
    """Return the fields of a schedule; as JSON if no other kind has all of its parts.

    Args:
        is_own: whether the zone is the entry's own.
    """
    try:
        raw = encode_schedule(when)
    except (TypeError, ValueError):  # only the code can give it
        return {"kind": "json", "json": ""}
    as_json = {"kind": "json", "json": _pretty(raw)}
    match raw.get("__type__"):
        case "interval" if not raw.get("relative"):
            every = float(raw["every"])
            unit = next((unit for unit in ("d", "h", "min") if every >= UNITS[unit] and every % UNITS[unit] == 0), "s")
            return {"kind": "every", "every": f"{every / UNITS[unit]:.15g}", "unit": unit, "json": _pretty(raw)}
        case "crontab":
            fields = {name: raw.get(name, "*") for name in CRON}
            texts = {
                name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
                for name, value in fields.items()
            }
            return {**as_json, "kind": "cron", **texts}
        case "clocked":
            instant = datetime.fromisoformat(raw["instant"])
            if not _is_shown(instant, zone):
                return as_json
            return {**as_json, "kind": "once", "once": _shown_local(instant, zone)}
        case "rrule":
            return _of_rule(raw, zone, is_own=is_own) or as_json
    return as_json


def _of_rule(raw: Mapping[str, Any], zone: tzinfo, *, is_own: bool) -> dict[str, str]:
    """Return the fields of a rule, empty if they cannot hold all of it, or if it is read on the clock of an offset."""
    given = {name: value for name, value in raw.items() if value is not None and name != "__type__"}
    ends = {"dtstart", "dtstart_tz", "until", "until_tz"}
    freq = given.get("freq")
    if given.keys() - {*RULE, *ends} or not isinstance(freq, int) or "dtstart" not in given:
        return {}
    start = datetime.fromtimestamp(given["dtstart"], zone)
    if not is_own and start.utcoffset() != timedelta(minutes=given.get("dtstart_tz", 0)):
        return {}
    moments = [datetime.fromtimestamp(given[name], UTC) for name in ("dtstart", "until") if name in given]
    if not all(_is_shown(moment, zone) for moment in moments):
        return {}
    fields = {"kind": "rule", "json": _pretty(raw)}
    for name in RULE:
        value = given.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if name == "freq":
            fields["rule_freq"] = FREQUENCIES[freq]
        elif name == "byweekday":
            fields["rule_byweekday"] = ", ".join(_weekday(day) for day in values)
        else:
            fields[f"rule_{name}"] = ", ".join(map(str, values))
    for name in ("dtstart", "until"):
        if name in given:
            fields[f"rule_{name}"] = _shown_local(datetime.fromtimestamp(given[name], UTC), zone)
    return fields


def _weekday(day: Any) -> str:
    names = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
    if isinstance(day, Mapping):
        return f"{day.get('n') or ''}{names[day.get('wkday', day.get('weekday', 0))]}"
    return names[day]


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise EntryError(f"{name} of a rule is a list of whole numbers, not {text.strip()!r}") from None


def _local(text: str, zone: tzinfo) -> datetime:
    """Return the instant of a date and time on the wall clock of a zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise EntryError(f"{text!r} is no date and time like 2026-12-01T09:00") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)).astimezone(UTC)


def _shown_local(moment: datetime, zone: tzinfo) -> str:
    return moment.astimezone(zone).replace(tzinfo=None).isoformat(timespec="seconds")


def _is_shown(moment: datetime, zone: tzinfo) -> bool:
    """Return whether the form can show a moment: not its fraction of a second, nor an hour that comes twice."""
    return _local(_shown_local(moment, zone), zone) == moment


def _pretty(value: object) -> str:
    flat = _json(value, default=_as_json)
    return flat if len(flat) <= 60 else _json(value, indent=2, default=_as_json)


def _json(value: object, **options: Any) -> str:
    """Return JSON as a person reads it; escaped if it has half of a surrogate pair, which no page can hold."""
    text = json.dumps(value, ensure_ascii=False, **options)
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return json.dumps(value, **options)


def _as_json(value: object) -> object:
    """Return a value as it is stored; what only the code can give as its mark, any other as a person reads it."""
    if has_code([value]):
        return MARK
    try:
        return Encoder().default(value)
    except (TypeError, ValueError):
        return str(value)
