"""The history of decisions about occurrences, and of the ends of their runs, read from the schedule's server."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from ...connections import ResponseError, schedule_client
from ...lua import packed, script
from ..entries.fields import BATCH, read_fields
from ..entries.occurrence import SENT_BEFORE, WITHOUT_LOCK, DecisionType
from ..keys import Keys
from .claims import HISTORY_BYTES

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient

__all__ = ("NO_END", "End", "History", "Own", "Record", "read_records")

#: Records of a stream that one round trip reads.
PAGE = 1000

#: Most records of a stream in which ``of_many`` looks for the older records of its entries.
MOST_SEARCHED = 10_000

#: Outcomes of messages that did not run, or have not run yet.
NO_END = {"duplicate_refused", "postponed"}

#: The values of a line in an entry's own history after its id, in the order of ``confirm.lua`` and ``record_ends.lua``.
_OF_DECISION = ("nominal", "kind", "decision", "reason", "id", "term", "holder", "leader", "holder_entry")
_OF_END = ("id", "outcome", "reason", "started", "duration", "worker")

#: What reading a record raises that another program has written.
_ODD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError)

#: A record of a stream, and its id before it.
_Row = tuple[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run."""

    outcome: str  #: success, failure, retry, time_limit, worker_lost, revoked, expired, duplicate_refused, …
    reason: str
    started: str  #: ISO 8601; empty if the run did not start
    duration: float | None  #: seconds
    worker: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Record:
    """A decision about one occurrence, and the end of its run."""

    entry: str
    at: datetime  #: when it was decided
    nominal: datetime
    kind: str
    decision: str  #: a word of ``DecisionType``
    reason: str
    task_id: str
    holder: str  #: the task that held its lock
    holder_entry: str  #: the entry that has sent that task; empty if a program has sent it, or if unknown
    leader: str  #: host and pid of the beat that decided
    term: str
    end: End | None

    @property
    def is_sent(self) -> bool:
        """Whether a message was sent for it."""
        return self.decision in {"dispatched", "buffered"}

    @property
    def is_sent_otherwise(self) -> bool:
        """Whether it has another id, lacks beat's headers, or is no message at all: no end of it is recorded."""
        is_as_usual = not self.reason or self.is_without_lock or self.reason.endswith(SENT_BEFORE)
        return self.decision == "dispatched" and not is_as_usual

    @property
    def is_without_lock(self) -> bool:
        """Whether it was sent without its lock."""
        return self.reason.startswith(WITHOUT_LOCK)


class Own(NamedTuple):
    """The history that an entry keeps itself, latest first: its last few decisions, and the last ends of its runs."""

    decisions: Sequence[Record]
    ends: Sequence[End]
    is_pending: bool = False  #: an occurrence is claimed, and not yet among the decisions
    last_end_id: str = ""  #: of the record of the last end, without messages that did not run; empty if there is none

    @classmethod
    def of(cls, name: str, history: str | None, runs: str | None, pending: str | None) -> Own:
        """Return the history of an entry from the fields of its hash, empty if another program has written there."""
        try:
            ends = _ends(_lines(runs, _OF_END))
            rows = [(at, {**fields, "entry": name}) for at, fields in _lines(history, _OF_DECISION)]
            last = next((at for at, fields in ends.values() if fields["outcome"] not in NO_END), "")
            return cls(_join_ends(rows, ends), [_end(*end) for end in ends.values()], bool(pending), last)
        except _ODD:
            return cls((), (), bool(pending))

    @property
    def last_end(self) -> End | None:
        """The last end of a run, without messages that did not run; None if there is none."""
        return next((end for end in self.ends if end.outcome not in NO_END), None)


class History:
    """The records of an app's schedule that its server still has."""

    def __init__(self, app: Celery) -> None:
        self.app, self.keys = app, Keys.of(app)

    def latest(self, count: int) -> Sequence[Record]:
        """Return the last decisions about any entry, latest first."""
        decisions = list(islice(self._stream(self.keys.history), count))
        since = decisions[-1][0] if decisions else "+"
        return _join_ends(decisions, _ends(self._stream(self.keys.runs, until=since)))

    def of(self, name: str, count: int) -> Sequence[Record]:
        """Return the last decisions about one entry, latest first.

        The few that the entry keeps itself survive however busy other entries are. Older ones come from the stream that
        all entries share.
        """
        own = _hmget(schedule_client(self.app), self.keys.prefix + name, "history", "runs")
        decisions: dict[str, Mapping[str, str]]
        decisions = {at: {**fields, "entry": name} for at, fields in _lines(own[0], _OF_DECISION)}
        ends = _ends(_lines(own[1], _OF_END))
        if len(decisions) < count:
            decisions |= self._stream(self.keys.history, name)
        rows = sorted(decisions.items(), key=lambda row: _place(row[0]), reverse=True)[:count]
        if any(fields.get("id") and fields["id"] not in ends for _, fields in rows):
            ends = _ends(self._stream(self.keys.runs, name)) | ends
        return _join_ends(rows, ends)

    def own(self, names: Iterable[str]) -> Iterator[tuple[str, Own]]:
        """Yield names of entries, each with the history that it keeps itself; one round trip per ``BATCH`` entries."""
        left = iter(names)
        while batch := [*islice(left, BATCH)]:
            with schedule_client(self.app).pipeline(transaction=False) as pipe:
                for name in batch:
                    pipe.hmget(self.keys.prefix + name, "history", "runs", "pending")
                found = pipe.execute()
            for name, fields in zip(batch, found, strict=True):
                yield name, Own.of(name, *fields)

    def of_many(self, names: Collection[str], count: int) -> Mapping[str, Sequence[Record]]:
        """Return the last decisions about some entries, latest first, from few round trips.

        The few that each entry keeps itself are always there. Older ones come from the last ``MOST_SEARCHED`` records
        of the streams that all entries share.
        """
        client, listed = schedule_client(self.app), list(dict.fromkeys(names))
        decisions, ends, left = dict[str, dict[str, Mapping[str, str]]](), dict[str, _Row](), set[str]()
        for at in range(0, len(listed), BATCH):
            batch = listed[at : at + BATCH]
            rows = read_fields(client, [self.keys.prefix + name for name in batch], "history", "runs")
            for name, stored in zip(batch, rows, strict=True):
                history, runs = ("", "") if isinstance(stored, str) else (stored[6] or "", stored[7] or "")
                decisions[name] = {id_: {**line, "entry": name} for id_, line in _lines(history, _OF_DECISION)}
                ends |= _ends(_lines(runs, _OF_END))
                if len(decisions[name]) < count and len(history.encode(errors="surrogateescape")) >= HISTORY_BYTES:
                    left.add(name)  # it has had more decisions than it keeps
        for id_, fields in self._search(self.keys.history, left):
            found = decisions[fields["entry"]]
            found[id_] = fields
            if len(found) >= count:
                left.discard(fields["entry"])
        last = {
            name: sorted(found.items(), key=lambda row: _place(row[0]), reverse=True)[:count]
            for name, found in decisions.items()
        }
        unended = {name for name, found in last.items() if any(fields.get("id") not in ends for _, fields in found)}
        oldest = min((last[name][-1][0] for name in unended), key=_place, default="")
        ends = _ends(self._search(self.keys.runs, unended, until=oldest)) | ends
        return {name: _join_ends(found, ends) for name, found in last.items()}

    def _search(self, stream: str, names: Collection[str], until: str = "0-0") -> Iterator[_Row]:
        """Yield the records of some entries, latest first; the caller may take names away while it reads."""
        client, before = schedule_client(self.app), ""
        for _ in range(MOST_SEARCHED // PAGE):
            if not names:
                return
            before, rows = read_records(client, stream, before, PAGE, names=names)
            yield from rows
            if not before or _place(before) < _place(until):
                return

    def _stream(self, key: str, entry: str | None = None, until: str = "-") -> Iterator[tuple[str, Mapping[str, str]]]:
        client, before = schedule_client(self.app), "+"
        while page := client.xrevrange(key, before, until, count=PAGE):
            for at, fields in page:
                if entry in {None, fields.get("entry")}:
                    yield at, fields
            before = f"({page[-1][0]}"


def read_records(
    client: RedisClient,
    stream: str,
    before: str,
    count: int,
    *,
    names: Collection[str] | None = None,
    leave_out: Iterable[str] = (),
) -> tuple[str, Sequence[tuple[str, Mapping[str, str]]]]:
    """Read records of a stream in one round trip, the latest first.

    Args:
        before: id of the record before which to begin; empty: begin with the last record.
        count: number of the records that are looked at.
        names: return only the records of these entries; None: of each entry only its last record.
        leave_out: outcomes of records that are passed over.

    Returns:
        The id of the last record that was looked at, empty if there was none, and the records by their ids.
    """
    args: list[str | int] = [before, count, "" if names is None else packed(names), *leave_out]
    last, *rows = json.loads(script(__package__, "records")(client, [stream], args))
    return last, [(at, dict(zip(values[::2], values[1::2], strict=True))) for at, values in rows]


def _hmget(client: RedisClient, key: str, *fields: str) -> Sequence[str | None]:
    """Return fields of a hash, None for each if another program has given the key another type."""
    try:
        found: Sequence[str | None] = client.hmget(key, *fields)
    except ResponseError as exc:
        if "WRONGTYPE" not in str(exc):
            raise
        return [None] * len(fields)
    return found


def _ends(rows: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return the last end of each task id: a run that was retried has several, and the rows begin with the latest.

    If a copy of the message was refused or postponed, before or after the run, this does not replace the run's end.
    """
    ends: dict[str, tuple[str, Mapping[str, str]]] = {}
    for at, fields in rows:
        id_ = fields.get("id", "")
        if id_ not in ends or ends[id_][1].get("outcome") in NO_END:
            ends[id_] = at, fields
    return ends


def _lines(text: str | None, names: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the lines of an entry's own history up to one that is none; the last one may be cut off."""
    for line in (text or "").splitlines():
        try:
            at, *values = json.loads(line)
            if not all(isinstance(value, str) for value in values) or _place(at) < (0, 0):
                return
            values += [""] * (len(values) == len(names) - 1)  # an older singlebeat knows no ``holder_entry``
            yield at, dict(zip(names, values, strict=True))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return


def _join_ends(rows: Iterable[_Row], ends: Mapping[str, _Row]) -> Sequence[Record]:
    """Return the records of decisions with the ends of their runs; any program may have added rows that are none."""
    found = list[Record]()
    for at, fields in rows:
        end = None
        if fields.get("id") in ends and _is_sent(fields):
            with suppress(*_ODD):
                end = _end(*ends[fields["id"]])
        with suppress(*_ODD):
            found.append(_record(at, fields, end))
    return found


def _is_sent(fields: Mapping[str, str]) -> bool:
    """Return whether a decision has sent its run; with other decisions, an earlier run may have had the same id."""
    return fields.get("decision") in {DecisionType.DISPATCHED, DecisionType.BUFFERED}


def _record(at: str, fields: Mapping[str, str], end: End | None) -> Record:
    names = ("entry", "kind", "decision", "reason", "holder", "holder_entry", "leader", "term")
    texts = {name: fields.get(name, "") for name in names}
    nominal = datetime.fromisoformat(fields["nominal"])
    if nominal.tzinfo is None:
        raise ValueError("a nominal time has an offset")
    return Record(at=_instant(at), nominal=nominal, task_id=fields["id"], end=end, **texts)


def _end(at: str, fields: Mapping[str, str]) -> End:
    duration = float(fields["duration"]) if fields["duration"] else None
    if duration is not None and not isfinite(duration):
        raise ValueError("a run takes a finite time")
    texts = {name: fields[name] for name in ("outcome", "reason", "started", "worker")}
    return End(duration=duration, at=_instant(at), **texts)


def _place(at: str) -> tuple[int, int]:
    milliseconds, _, number = at.partition("-")
    return int(milliseconds), int(number)


def _instant(at: str) -> datetime:
    return datetime.fromtimestamp(_place(at)[0] / 1000, UTC)
