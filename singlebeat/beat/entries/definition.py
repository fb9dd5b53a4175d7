"""JSON of an entry in Redis: RedBeat's, read generously."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.schedules import BaseSchedule, schedule
from celery.utils.saferepr import saferepr

from ...errors import EntryError
from ...locks.base import HEADER, RUN_HEADER
from ..calendar.recurrence import is_known
from .code_only import marked, restored, restored_schedule
from .options import check_signatures, check_values
from .schedule_json import Decoder, Encoder, made

if TYPE_CHECKING:
    from .occurrence import Occurrence

__all__ = ("Meta", "check_headers", "decode_definition", "encode_definition", "loads_object", "salvaged")

#: Options that are no data: who sends, and how the message is to be read, is decided by what sends it.
TAKEN_OPTIONS = frozenset(
    {
        *("content_type", "content_encoding", "body", "name", "args", "kwargs"),
        *("producer", "publisher", "connection", "router", "result_cls", "task_type"),
    }
)

#: Headers that Celery (by the list of its request), kombu or singlebeat sets: an entry's would take their place.
TAKEN_HEADERS = frozenset(
    {name for name in vars(Context) if not name.startswith("__")}
    | {"lang", "task", "argsrepr", "kwargsrepr", "compression", HEADER, RUN_HEADER}
)

DATETIME_FIELDS = ("year", "month", "day", "hour", "minute", "second", "microsecond")

#: What most pasts look like: read and written for each run, so not by way of json, which takes five times as long.
COMMON_META = (
    '{"last_run_at": {"__type__": "datetime", '
    + "".join(f'"{name}": %d, ' for name in DATETIME_FIELDS)
    + '"timezone": "UTC"}, "total_run_count": %d}'
)
_COMMON_META = re.compile(re.escape(COMMON_META).replace("%d", "([0-9]+)"))

#: Made once: that costs more than reading or writing a short text with them.
_DECODER, _ENCODER = Decoder(), Encoder()


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


def encode_definition(fields: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the ``definition`` field of an entry.

    Args:
        given: what ``beat_schedule`` says about it.

    Raises:
        TypeError, ValueError: a value cannot be stored.
    """
    # Celery takes seconds wherever it takes a timedelta.
    options = {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in (fields["options"] or {}).items()
    }
    return str(_ENCODER.encode(marked({**fields, "options": options}, given)))


def decode_definition(definition: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the ``definition`` field of an entry; what is missing gets its default.

    ``ignored`` in what it returns says which further fields are left out; an empty string if there are none.

    Args:
        given: what ``beat_schedule`` says about it.

    Raises:
        EntryError: it cannot be understood; the message says why.
    """
    raw = loads_object(definition, "definition")
    fields = {name: read(raw.get(name), given) for name, read in _READERS.items()}
    check_signatures(fields["task"], fields["kwargs"])
    return {**fields, "ignored": "; ".join(_ignored(name) for name in raw if name not in KNOWN)}


def _ignored(name: str) -> str:
    near = difflib.get_close_matches(name, _READERS, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return f"the definition's field {name!r} is unknown and ignored{hint}"


def salvaged(definition: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a definition that can be read, each by itself, and why the others cannot be."""
    fields, problems = dict[str, Any](), dict[str, str]()
    try:
        raw = json.loads(definition)
        if not isinstance(raw, Mapping):
            raise TypeError("it is not a JSON object")  # noqa: TRY301
    except (ValueError, TypeError, RecursionError) as exc:
        return {}, dict.fromkeys(_READERS, f"definition cannot be read: {type(exc).__name__}: {exc}")
    for name, read in _READERS.items():
        try:
            value = loads_object(json.dumps({name: raw.get(name)}), "definition")[name]
            fields[name] = read(value, given)
        except EntryError as exc:
            problems[name] = str(exc)
    return fields, problems


def _task(value: object, _: Mapping[str, Any]) -> str:
    if not isinstance(value, str) or not value:
        raise EntryError("definition has no task, or it is not a text")
    return value


def _enabled(value: object, _: Mapping[str, Any]) -> bool:
    if value not in (None, True, False):  # and so not 1 and 0
        raise EntryError(f"definition: enabled is neither true nor false: {saferepr(value)}")
    return value is None or bool(value)


def _schedule(value: object, given: Mapping[str, Any]) -> BaseSchedule:
    when = restored_schedule(made(value), given)
    if not isinstance(when, BaseSchedule):
        raise EntryError(f"definition has a schedule of no known kind: {saferepr(when)}")
    # A user's own may compute its times without any interval.
    if is_known(when) and isinstance(when, schedule) and not (when.run_every and when.run_every.total_seconds() > 0):
        raise EntryError("definition has an interval that is not longer than 0 seconds")
    return when


def _args(value: object, given: Mapping[str, Any]) -> Any:
    return restored("args", _typed(value, list, "args"), given)


def _kwargs(value: object, given: Mapping[str, Any]) -> Any:
    return restored("kwargs", _typed(value, dict, "kwargs"), given)


def _options(value: object, _: Mapping[str, Any]) -> dict[str, Any]:
    return _checked_options(_typed(value, dict, "options"))


#: How each field of a definition is read, from its JSON and what ``beat_schedule`` gives.
_READERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "task": _task,
    "enabled": _enabled,
    "schedule": _schedule,
    "args": _args,
    "kwargs": _kwargs,
    "options": _options,
}


#: The fields of a definition that need no warning: RedBeat takes those that nothing here reads.
KNOWN = frozenset({*_READERS, "name", "relative", "last_run_at", "total_run_count"})


def _typed(value: object, kind: type, name: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise EntryError(f"definition: {name} is not a JSON {'object' if kind is dict else 'array'}")
    return value


def check_headers(headers: Any) -> None:
    """Check the headers that an entry, or a signature in it, has among its options.

    Raises:
        EntryError: they are none, or one of them would take the place of one that Celery or singlebeat sets.
    """
    if not isinstance(headers, dict | None):
        raise EntryError("definition: the option headers is not a JSON object")
    for name in headers or ():
        if name in TAKEN_HEADERS:
            raise EntryError(f"definition: the option headers has {name!r}, which is not an entry's to set")


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    check_headers(options.get("headers"))
    for name, value in options.items():
        if name in TAKEN_OPTIONS:
            raise EntryError(f"definition: the option {name} is not an entry's to set")
        if isinstance(value, BaseSchedule):  # one without an end, like a rule, kombu would read for ever
            raise EntryError(f"definition: the option {name} is a schedule")
    check_values(options)
    return options


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known about an entry's past."""

    last_run_at: datetime | None = (
        None  #: nominal time of its last occurrence, or when it was made, in UTC; None: it is due now
    )
    total_run_count: int = 0
    #: From when on the next occurrence counts, if that is not the last one: its schedule has changed then.
    since: datetime | None = None
    #: Nominal time of its last run that was sent: those of skipped runs are in ``last_run_at``, too. None: not known.
    sent: datetime | None = field(default=None, compare=False)

    @property
    def counts_from(self) -> datetime | None:
        """The moment after which its next nominal time lies; None: it is due now."""
        return self.since or self.last_run_at

    @property
    def last_run(self) -> datetime | None:
        """The nominal time of its last run, None if it has never run.

        Of an entry that only RedBeat has run, it is the time of its last decision.
        """
        return self.sent or (self.last_run_at if self.total_run_count else None)

    @classmethod
    def decode(cls, text: str | None, since: str | None = None, sent: str | None = None) -> Meta:
        """Read the ``meta`` field of an entry, and its ``since`` and ``sent`` fields.

        Raises:
            EntryError: one cannot be understood.
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
            return past  # RedBeat has run it since then, and leaves this field alone
        return replace(past, since=_instant(raw, "since", "since"))

    @classmethod
    def _decode(cls, text: str) -> Meta:
        try:
            if common := _COMMON_META.fullmatch(text):
                *parts, count = map(int, common.groups())
                return cls(datetime(*parts, tzinfo=UTC), count)  # type: ignore[misc, arg-type]
            raw = loads_object(text, "meta")
            count = raw.get("total_run_count", 0)
            count = int(count) if isinstance(count, int | float) else 0
            # ``since`` is in what ``export`` and the first singlebeat have written.
            return cls(_instant(raw, "last_run_at"), count, _instant(raw, "since"))
        except (ValueError, OverflowError) as exc:
            raise EntryError(f"meta is out of range: {exc}") from exc

    def without(self, occurrence: Occurrence) -> Meta | None:
        """Return the past without an occurrence that was counted when it was claimed, None if it was not."""
        return replace(self, total_run_count=self.total_run_count - 1) if occurrence.is_scheduled else None

    def encode(self) -> str:
        """Return the ``meta`` field of an entry, in UTC: local time is ambiguous when clocks go back."""
        last, count = self.last_run_at, self.total_run_count
        if last is None:
            return json.dumps({"last_run_at": None, "total_run_count": count})
        day, clock = (last.year, last.month, last.day), (last.hour, last.minute, last.second, last.microsecond)
        return COMMON_META % (*day, *clock, count)

    def encode_since(self) -> str:
        """Return the ``since`` field of an entry, apart because RedBeat dies on it in ``meta``; empty for none.

        It says for which last run it holds.
        """
        if self.since is None:
            return ""
        last = None if self.last_run_at is None else self.last_run_at.isoformat()
        return json.dumps({"since": self.since.isoformat(), "last_run_at": last})


def _moment(seconds: str | None) -> datetime | None:
    """Return an instant from seconds since 1970, None if the text is none."""
    try:
        return datetime.fromtimestamp(float(seconds), UTC) if seconds else None
    except (ValueError, OverflowError, OSError):  # of another writer: runs go on without it
        return None


def _instant(raw: Mapping[str, Any], name: str, what: str = "meta") -> datetime | None:
    moment = raw.get(name)
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as exc:
            raise EntryError(f"{what}: {name} is no ISO 8601 date: {moment!r}") from exc
    if moment is not None and not isinstance(moment, datetime):
        raise EntryError(f"{what}: {name} is neither a datetime nor null: {moment!r}")
    try:
        return None if moment is None else moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise EntryError(f"{what}: {name} is out of range: {exc}") from exc
