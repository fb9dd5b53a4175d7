"""The JSON of an entry in Redis: RedBeat's format, read leniently."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.schedules import BaseSchedule, schedule

from ...errors import EntryError
from ...log import without_passwords
from ..calendar.recurrence import is_known
from ..keys import check_encodable
from .code_only import insert_marks, restore_objects, restore_schedule
from .options import cause, check_signatures, check_values, scalar, shortened
from .schedule_json import Decoder, Encoder, decode_schedule, encode_schedule

if TYPE_CHECKING:
    from .code_only import Given
    from .occurrence import Occurrence

__all__ = (
    "LONGEST_STEP_BACK",
    "Meta",
    "decode_definition",
    "encode_definition",
    "loads_object",
    "salvage_fields",
    "why_too_deep",
)

#: A JSON object, decoded: each value is checked where it is read.
JsonObject = Mapping[str, object]

#: The fields of a definition by name, decoded.
Fields = Mapping[str, Any]

#: Options that an entry must not set, because the sender decides about connection, encoding and content.
TAKEN_OPTIONS = frozenset(
    {
        *("content_type", "content_encoding", "body", "name", "args", "kwargs"),
        *("producer", "publisher", "connection", "router", "result_cls", "task_type"),
    }
)

DATETIME_FIELDS = ("year", "month", "day", "hour", "minute", "second", "microsecond")

#: The usual form of ``meta``. It is read and written for each run, and the json module takes five times as long.
COMMON_META = (
    '{"last_run_at": {"__type__": "datetime", '
    + "".join(f'"{name}": %d, ' for name in DATETIME_FIELDS)
    + '"timezone": "UTC"}, "total_run_count": %d}'
)
_COMMON_META = re.compile(re.escape(COMMON_META).replace("%d", "([0-9]+)"))

#: Fields of a definition, of ``meta`` and of ``since`` that hold no arguments of a task: errors may quote their values.
WITHOUT_ARGUMENTS = frozenset({"schedule", "last_run_at", "since"})

#: Arrays and objects that may be nested in one another. A worker cannot pickle arguments for its processes that are
#: about twice as deep, and ends.
MOST_NESTED = 250

#: Characters of a field of an entry: a beat needs up to a second to read and to send ten times as many, and so long all
#: others wait.
LONGEST_FIELD = 1_000_000

#: How far ahead the past of an entry may lie, so that runs of before the clock was set back are not repeated. A past
#: that lies further ahead comes from a wrong clock, and must not silence its entry (cron(8) of Debian has this limit).
LONGEST_STEP_BACK = timedelta(hours=3)

#: Unknown fields of a definition that a warning names, at most.
MOST_IGNORED = 5

#: Characters of an unknown name that are compared with known ones: that takes the square of them.
LONGEST_NAME = 80

#: Created once: to create them costs more than to read or write a short string with them.
_DECODER, _ENCODER = Decoder(), Encoder()


def loads_object(text: str, what: str) -> JsonObject:
    """Read a JSON object in RedBeat's format, with its dates and schedules decoded.

    Raises:
        EntryError: the object cannot be decoded, or is nested too deeply, or its string is too long; the message begins
            with ``what``.
    """
    if len(text) > LONGEST_FIELD:
        hint = "store the large arguments elsewhere, and give their key to the task"
        raise EntryError(f"{what} has {len(text)} characters, more than {LONGEST_FIELD}: {hint}")
    try:
        raw = _DECODER.decode(text)
    except RecursionError:
        raise EntryError(why_too_deep(what)) from None
    except Exception:  # constructors may raise anything: this must not harm other entries
        raise EntryError(f"{what} cannot be read: {_why_unreadable(text)}") from None
    if not isinstance(raw, Mapping):
        raise EntryError(f"{what} is not a JSON object")
    if text.count("[") + text.count("{") > MOST_NESTED and _is_too_deep(raw):
        raise EntryError(why_too_deep(what))
    return raw


def why_too_deep(what: str) -> str:
    """Return why JSON with too many arrays and objects in one another is refused."""
    return f"{what} is nested too deeply: use at most {MOST_NESTED} arrays and objects in one another"


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MOST_NESTED):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for values in inner for each in values]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


class _UnreadableError(Exception):
    """An object in JSON whose ``__type__`` does not fit the rest; ``path`` is where it is: names and indices."""

    def __init__(self, path: Sequence[str], kind: object, error: Exception) -> None:
        super().__init__(path, kind, error)
        self.path, self.kind, self.error = path, kind, error


def _why_unreadable(text: str) -> str:
    """Return why a JSON object cannot be decoded. Only schedules and dates are quoted: other values may be secret."""
    try:
        _decoded(json.loads(text), ())
    except _UnreadableError as found:
        if found.path[:1] and found.path[0] in WITHOUT_ARGUMENTS:
            return cause(found.error)
        where = shortened(".".join(found.path)) if found.path else "it"
        said = f"{where} has the __type__ {shortened(found.kind)}, which its other fields do not fit"
        return f"{said}: correct them, or rename __type__"
    except RecursionError:
        return why_too_deep("it")
    except ValueError as no_json:
        return cause(no_json)
    return "it gives a field twice, and the first value cannot be decoded"  # JSON takes the last one


def _decoded(value: object, path: Sequence[str]) -> object:
    """Decode a value as the decoder does, innermost first.

    Raises:
        _UnreadableError: an object cannot be decoded.
    """
    if isinstance(value, list):
        return [_decoded(each, (*path, str(at))) for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    fields = {name: _decoded(each, (*path, name)) for name, each in value.items()}
    try:
        return _DECODER.dict_to_object({**fields})
    except RecursionError:
        raise
    except Exception as exc:
        raise _UnreadableError(path, fields.get("__type__"), exc) from exc


def encode_definition(fields: Fields, given: Given) -> str:
    """Return the ``definition`` field of an entry.

    Args:
        given: the entry's item in ``beat_schedule``, empty if there is none.

    Raises:
        TypeError, ValueError: a value cannot be stored.
        RecursionError: a value is nested too deeply.
    """
    # Celery accepts seconds wherever it accepts a timedelta.
    options = {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in (fields["options"] or {}).items()
    }
    marked = insert_marks({**fields, "options": options}, given)
    text = str(_ENCODER.encode({**marked, "schedule": encode_schedule(marked["schedule"])}))
    return text if len(text) <= LONGEST_FIELD else _unescaped(text)


def _unescaped(text: str) -> str:
    """Return JSON as other languages write it, which is shorter: a letter beyond ASCII takes one character, not six."""
    shorter = json.dumps(json.loads(text), ensure_ascii=False)
    try:
        shorter.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return text
    return shorter


def decode_definition(definition: str, given: Given) -> dict[str, Any]:
    """Read the ``definition`` field of an entry; missing fields get their defaults.

    ``ignored`` in the result is a sentence about unknown fields, which are left out; empty if there are none.

    Args:
        given: the entry's item in ``beat_schedule``, empty if there is none.

    Raises:
        EntryError: the definition cannot be decoded; the message says why.
    """
    raw = loads_object(definition, "definition")
    fields = {name: read(raw.get(name), given) for name, read in _READERS.items()}
    check_signatures(fields["task"], fields["kwargs"])
    unknown = [name for name in raw if name not in KNOWN]
    ignored = [*map(_ignored, unknown[:MOST_IGNORED])]
    if more := unknown[MOST_IGNORED:]:
        ignored.append(f"{len(more):,} more are unknown and ignored")
    return {**fields, "ignored": without_passwords("; ".join(ignored))}


def _ignored(name: str) -> str:
    near = difflib.get_close_matches(name[:LONGEST_NAME], _READERS, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return f"the definition's field {shortened(name)} is unknown and ignored{hint}"


def salvage_fields(definition: str, given: Given) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the readable fields of a definition, each read on its own, and the errors of the others."""
    fields, problems = dict[str, Any](), dict[str, str]()
    try:
        raw = json.loads(definition)
        if not isinstance(raw, Mapping):
            raise TypeError("it is not a JSON object")  # noqa: TRY301
    except (ValueError, TypeError, RecursionError) as exc:
        return {}, dict.fromkeys(_READERS, f"definition cannot be read: {cause(exc)}")
    for name, read in _READERS.items():
        try:
            value = loads_object(json.dumps({name: raw.get(name)}), "definition")[name]
            fields[name] = read(value, given)
        except EntryError as exc:
            problems[name] = str(exc)
        except RecursionError:
            problems[name] = why_too_deep("definition")
    return fields, problems


def _task(value: object, _: Given) -> str:
    if not isinstance(value, str) or not value:
        raise EntryError("definition has no task, or its task is not a string")
    check_encodable("task", value)
    return value


def _enabled(value: object, _: Given) -> bool:
    if value not in (None, True, False):  # 1 and 0 are equal to True and False, so they pass
        raise EntryError(f"definition: enabled is neither true nor false: {scalar(value)}")
    return value is None or bool(value)


def _schedule(value: object, given: Given) -> BaseSchedule:
    when = restore_schedule(decode_schedule(value), given)
    if not isinstance(when, BaseSchedule):
        raise EntryError(f"definition has a schedule of no known kind: {scalar(when)}")
    # A user's own schedule class may compute its times without an interval.
    if is_known(when) and isinstance(when, schedule) and not (when.run_every and when.run_every.total_seconds() > 0):
        raise EntryError("definition has an interval that is not longer than 0 seconds")
    return when


def _args(value: object, given: Given) -> Any:
    return restore_objects("args", _typed(value, list, "args"), given)


def _kwargs(value: object, given: Given) -> Any:
    return restore_objects("kwargs", _typed(value, dict, "kwargs"), given)


def _options(value: object, given: Given) -> dict[str, Any]:
    return _checked_options(restore_objects("options", _typed(value, dict, "options"), given))


#: The function that reads each field of a definition, from its JSON and the entry's item in ``beat_schedule``.
_READERS: Mapping[str, Callable[[object, Given], Any]] = {
    "task": _task,
    "enabled": _enabled,
    "schedule": _schedule,
    "args": _args,
    "kwargs": _kwargs,
    "options": _options,
}


#: The fields of a definition that need no warning: RedBeat accepts those that this module does not read.
KNOWN = frozenset({*_READERS, "name", "relative", "last_run_at", "total_run_count"})


def _typed(value: object, kind: type, name: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise EntryError(f"definition: {name} is not a JSON {'object' if kind is dict else 'array'}")
    return value


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    if not options:
        return options
    for name, value in options.items():
        if name in TAKEN_OPTIONS:
            raise EntryError(f"definition: an entry must not set the option {name}")
        if isinstance(value, BaseSchedule):  # kombu would iterate for ever over an endless rrule
            raise EntryError(f"definition: the option {name} is a schedule")
    check_values(options)
    return options


@dataclass(frozen=True, slots=True)
class Meta:
    """The past of an entry, as far as it is known."""

    last_run_at: datetime | None = (
        None  #: nominal time of its last occurrence, or the time of its creation, in UTC; None: it is due now
    )
    total_run_count: int = 0
    #: Moment from which the next occurrence counts, if not from ``last_run_at``: the schedule has changed then.
    since: datetime | None = None
    #: Nominal time, yet to come, of a run that a clock which was ahead has sent: it is not sent once more.
    ahead: datetime | None = None
    #: Nominal time of its last run that was sent (``last_run_at`` includes skipped runs). None: unknown.
    sent: datetime | None = field(default=None, compare=False)

    @property
    def counts_from(self) -> datetime | None:
        """The moment after which its next nominal time lies, None if it is due now."""
        return self.since or self.last_run_at

    @property
    def last_run(self) -> datetime | None:
        """The nominal time of its last run, None if it has never run.

        If only RedBeat has run the entry, this is its ``last_run_at``.
        """
        return self.sent or (self.last_run_at if self.total_run_count else None)

    def counting_from(self, since: datetime | None, now: datetime) -> Meta:
        """Return the past of an entry that counts from a moment; what clocks that were ahead have sent stays known."""
        known = (time for time in (self.sent, self.ahead) if time is not None and time > now)
        return replace(self, since=since, ahead=max(known, default=None))

    @classmethod
    def decode(cls, text: str | None, since: str | None = None, sent: str | None = None) -> Meta:
        """Read the ``meta`` field of an entry, and its ``since`` and ``sent`` fields.

        Raises:
            EntryError: one of the fields cannot be decoded.
        """
        if not text:
            return cls(sent=_moment(sent))
        past = cls._decode(text)
        if sent:
            past = replace(past, sent=_moment(sent))
        if not since:
            return past
        raw = loads_object(since, "since")
        if _instant(raw, "last_run_at", "since") != past.last_run_at:
            return past  # RedBeat has run the entry since then, without writing this field
        return replace(past, since=_instant(raw, "since", "since"), ahead=_instant(raw, "ahead", "since"))

    @classmethod
    def _decode(cls, text: str) -> Meta:
        try:
            if common := _COMMON_META.fullmatch(text):
                *parts, count = map(int, common.groups())
                return cls(datetime(*parts, tzinfo=UTC), count)  # type: ignore[misc, arg-type]
            raw = loads_object(text, "meta")
            runs = raw.get("total_run_count", 0)
            count = int(runs) if isinstance(runs, int | float) else 0
            # ``export`` and the first singlebeat have written ``since`` into ``meta``, and ``export`` the others.
            more = (_instant(raw, name) for name in ("since", "ahead", "sent"))
            return cls(_instant(raw, "last_run_at"), count, *more)
        except (ValueError, OverflowError) as exc:
            raise EntryError(f"meta is out of range: {exc}") from exc

    def without(self, occurrence: Occurrence) -> Meta | None:
        """Return the past without a claimed occurrence, None if the claim did not count the occurrence."""
        if not occurrence.is_scheduled:
            return None
        is_ahead = self.ahead is not None and self.ahead.timestamp() == occurrence.nominal
        return replace(self, total_run_count=self.total_run_count - 1, ahead=None if is_ahead else self.ahead)

    def encode(self) -> str:
        """Return the ``meta`` field of an entry, in UTC: local time is ambiguous when clocks go back."""
        last, count = self.last_run_at, self.total_run_count
        if last is None:
            return json.dumps({"last_run_at": None, "total_run_count": count})
        day, clock = (last.year, last.month, last.day), (last.hour, last.minute, last.second, last.microsecond)
        return COMMON_META % (*day, *clock, count)

    def encode_since(self) -> str:
        """Return the ``since`` field of an entry, with ``ahead``; an empty string for neither.

        It is a field of its own, because RedBeat crashes if ``since`` is in ``meta``. It holds only for the
        ``last_run_at`` that is stored beside it.
        """
        if self.since is None and self.ahead is None:
            return ""
        moments = {"since": self.since, "last_run_at": self.last_run_at}
        moments |= {"ahead": self.ahead} if self.ahead is not None else {}
        return json.dumps({name: moment and moment.isoformat() for name, moment in moments.items()})


def _moment(seconds: str | None) -> datetime | None:
    """Return an instant from a string of seconds since 1970, None if the string is not one."""
    try:
        return datetime.fromtimestamp(float(seconds), UTC) if seconds else None
    except (ValueError, OverflowError, OSError):  # another program wrote it: runs go on without it
        return None


def _instant(raw: JsonObject, name: str, what: str = "meta") -> datetime | None:
    moment = raw.get(name)
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as exc:
            raise EntryError(f"{what}: {name} is not an ISO 8601 date: {shortened(moment)}") from exc
    if moment is not None and not isinstance(moment, datetime):
        raise EntryError(f"{what}: {name} is neither a datetime nor null: {shortened(moment)}")
    try:
        return None if moment is None else moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise EntryError(f"{what}: {name} is out of range: {exc}") from exc
