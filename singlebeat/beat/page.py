"""Pages of entries: the schedule's server searches and sorts in slices, and only rows that are shown are decoded."""

from __future__ import annotations

import heapq
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..connections import schedule_client
from ..errors import EntryError
from ..log import LAST_INSTANT
from ..lua import script
from . import store
from .entries.entry import Entry
from .entries.fields import BATCH, read_fields, zone_of_beats
from .entries.pauses import NO_PAUSES, read_pauses
from .entries.salvage import Salvage
from .entries.state import State, outlook
from .keys import Keys
from .server_time import server_now
from .status import quarantine_record
from .store.history import NO_END, Own, read_records

if TYPE_CHECKING:
    from celery import Celery

    from .entries.fields import StoredFields
    from .entries.pauses import Pause
    from .store.history import End, Record

__all__ = ("LARGEST", "Page", "Query", "Row", "Sort", "off_by_name", "rows_of")

#: The orders of a page.
Sort = Literal["next", "name", "last", "lateness"]

#: Most rows of a page.
LARGEST = 1000

#: Keys at which one script looks, and records, which take longer: each a few milliseconds.
SLICE, RECORDS = 2000, 500

#: Slices that are searched while others are read.
AHEAD = 2

#: Most entries that are decoded for one page: perhaps few of them meet its conditions.
MOST_DECODED = 2000

#: Most records of ends in which a page finds the latest ends; after these it asks the entries themselves.
MOST_RECORDS = 20_000

#: The numbers of the fields of an entry's own history among all that a page reads.
OF_HISTORY = (6, 7, 4)

#: Comes after every name.
AFTER_NAMES = "\U0010ffff"

#: Where an entry is in the order of a page, as JSON can hold it; the last item is the member, or the name.
_Place = tuple[Any, ...]

#: Members of the sorted set, and their scores.
_Slice = Sequence[tuple[str, str]]

#: Largest number in the id of a record of a stream.
LARGEST_OF_ID = 2**64 - 1

#: A score as the server writes it.
_SCORE = re.compile(r"-?(?:inf|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")

#: The types of a place in each order.
_PLACES = {"next": (str, str), "lateness": (str, str), "name": (str,), "last": (int, int, str)}


def _is_place(sort: Sort, place: Sequence[Any]) -> bool:
    """Return whether a place, of the right types, can be one: the server refuses other numbers."""
    match sort:
        case "name":
            return True
        case "last":
            id_ = (-place[0], -place[1])  # of a record; (-1, 0): there is none
            return id_ == (-1, 0) or (id_ > (0, 0) and all(0 <= number <= LARGEST_OF_ID for number in id_))
        case _:
            return _SCORE.fullmatch(place[0]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The conditions and the order of a page; ``Schedule.page`` explains them.

    Raises:
        ValueError: ``state`` or ``sort`` is not one of its words.
    """

    search: str = ""
    task: str = ""
    state: str = ""
    tag: str = ""
    sort: Sort = "next"
    descending: bool = False

    def __post_init__(self) -> None:
        for what, word, words in (("state", self.state, ("", *State)), ("sort", self.sort, get_args(Sort))):
            if word not in words:
                raise ValueError(f"{what} is {word!r}: use one of {', '.join(filter(None, words))}")

    def is_met_by(self, row: Row) -> bool:
        """Return whether a row meets all conditions."""
        text = _lower(self.search)
        return (
            (text in _lower(row.name) or text in _lower(row.task))
            and self.task in {"", row.task}
            and (self.state in {"", row.state} or (self.state == State.PAUSED and row.is_paused))
            and (not self.tag or self.tag in row.tags)
        )

    def cursor(self, place: _Place) -> str:
        """Return the cursor of the page behind a place."""
        return urlsafe_b64encode(json.dumps([self.sort, self.descending, *place]).encode()).decode()

    def place(self, cursor: str) -> _Place | None:
        """Return the place behind which the page of a cursor begins, None if it is the first page.

        Raises:
            ValueError: the cursor does not come from a page in this order.
        """
        if not cursor:
            return None
        try:
            sort, descending, *place = json.loads(urlsafe_b64decode(cursor.encode()))
            if (sort, descending, *map(type, place)) != (self.sort, self.descending, *_PLACES[self.sort]):
                raise TypeError  # noqa: TRY301
            if not _is_place(self.sort, place):
                raise ValueError  # noqa: TRY301
        except (ValueError, TypeError, RecursionError):
            raise ValueError("cursor is not that of a page in this order: begin with the first page") from None
        return tuple(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An entry as lists show it."""

    name: str
    task: str  #: empty if it cannot be read
    tags: Sequence[str]
    entry: Entry | None  #: None if it cannot be read
    why: str  #: why beat cannot use it; empty if it can
    state: State
    next: datetime | None  #: next nominal time, past if it is overdue; None if there is none, or it is unusable
    place: datetime | None  #: when beat checks it next; None if never
    last_end: End | None  #: the last end of its runs that is recorded
    last_decision: Record | None
    is_static: bool  #: it comes from ``beat_schedule``
    is_pending: bool  #: an occurrence is claimed and not yet confirmed
    pause: Pause | None  #: of many entries, which covers it

    @property
    def is_paused(self) -> bool:
        """Whether it is paused, by itself or with many entries; ``state`` does not say so of a disabled entry."""
        if self.entry is None or self.state not in {State.PAUSED, State.DISABLED}:
            return False
        return self.entry.policy.paused or self.pause is not None


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries in an order."""

    rows: Sequence[Row]
    cursor: str  #: of the next page; empty at the end
    total: int  #: number of the entries that have a place, whether they meet the conditions or not
    now: datetime  #: the time of the schedule's server

    @classmethod
    def read(cls, app: Celery, query: Query, size: int, cursor: str) -> Page:
        """Return the page of a cursor; ``Schedule.page`` explains it."""
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST:
            raise ValueError(f"size is {size!r}: use 1 to {LARGEST}")
        at, reader, rows, following = query.place(cursor), _Reader(app, query), list[Row](), ""
        for number, (place, row) in enumerate(reader.rows(at, size)):
            if number == MOST_DECODED or (row is not None and len(rows) == size):
                following = query.cursor(at or place)
                break
            at = place
            rows += [row] if row is not None else []
        return cls(rows, following, reader.client.zcard(reader.keys.schedule), reader.now)


def rows_of(app: Celery, query: Query) -> Iterator[Row]:
    """Yield all entries that meet the conditions of a query, in its order."""
    return (row for _, row in _Reader(app, query).rows(None, None) if row is not None)


def off_by_name(app: Celery) -> tuple[int, int]:
    """Return how many entries are paused by themselves, not with many, and how many are disabled."""
    counts = []
    for state in (State.PAUSED, State.DISABLED):
        reader = _Reader(app, Query(state=state))
        reader.pauses = NO_PAUSES
        counts.append(sum(row is not None for _, row in reader.rows(None, None)))
    return counts[0], counts[1]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An entry that may be a row."""

    place: _Place
    member: str  #: its key, or its bare name
    end: str | None = None  #: id of the record of its last end, None if any; with another one its place is another


class _Reader:
    """Reads the entries of a query."""

    def __init__(self, app: Celery, query: Query) -> None:
        self.app, self.query = app, query
        self.client, self.keys = schedule_client(app), Keys.of(app)
        self.now, self.pauses = server_now(self.client, self.keys.schedule), read_pauses(self.client, self.keys.pauses)
        self.zone = zone_of_beats(self.client, self.keys)
        self._behind_stream: _Place | None = None

    def rows(self, after: _Place | None, count: int | None) -> Iterator[tuple[_Place, Row | None]]:
        """Yield places and rows; None in place of a row that does not meet the conditions.

        Args:
            after: the place behind which to begin; None: at the beginning.
            count: number of rows that the caller probably needs; None: all.
        """
        match self.query.sort:
            case "name":
                found = self._sorted(self._by_name, after, count)
            case "last":
                found = self._by_last_end(after, count)
            case _:
                found = self._by_place(after, count)
        size = BATCH if count is None else min(BATCH, count + 1)
        while batch := [*islice(found, size)]:
            yield from self._decoded(batch)
            size = BATCH

    # ---------------------------------------------------------------- orders

    def _by_place(self, after: _Place | None, count: int | None) -> Iterator[_Candidate]:
        """Yield entries in the order of the sorted set; those that are never due come last in both directions."""
        goes_up = (self.query.sort == "next") is not self.query.descending
        size = min(SLICE, count + 1) if count and self._needs_no_strings else SLICE
        parts = ["placed", "parked"] if self.query.state != State.FINISHED else ["parked"]
        if after is not None and float(after[0]) < 0:
            parts = ["parked"]
        for part in parts:
            is_within = after is not None and (float(after[0]) < 0) is (part == "parked")
            slices = self._slices(part, after if is_within else None, size, goes_up=goes_up)
            for slice_, members in self._searched(slices):
                places = {member: (score, member) for member, score in slice_}
                yield from (_Candidate(places[member], member) for member in members)

    def _sorted(
        self,
        places: Callable[[Sequence[str]], Iterable[tuple[_Place, str]]],
        after: _Place | None,
        count: int | None,
    ) -> Iterator[_Candidate]:
        """Yield entries in an order that the server does not keep; the memory that it takes depends on ``count``."""
        size = self.client.zcard(self.keys.schedule) + 1 if count is None else max(BATCH, count + 1)
        part = "parked" if self.query.state == State.FINISHED else "all"
        pick = heapq.nlargest if self.query.descending else heapq.nsmallest
        while True:
            slices = self._slices(part, None, SLICE, goes_up=True)
            pairs = (pair for _, members in self._searched(slices) for pair in places(members))
            if after is not None:
                pairs = (pair for pair in pairs if (pair[0] < after if self.query.descending else pair[0] > after))
            found = pick(size, pairs)
            for place, member in found:
                if place != after:  # an entry that moves on while it is read is in two slices
                    yield _Candidate(place, member)
                after = place
            if len(found) < size:
                return

    def _by_name(self, members: Sequence[str]) -> Iterable[tuple[_Place, str]]:
        return (((self.keys.name(member),), member) for member in members)

    def _by_last_end(self, after: _Place | None, count: int | None) -> Iterator[_Candidate]:
        """Yield entries by their last ends: at first from the stream of ends, which has the latest ones at its end."""
        if not self.query.descending and (after is None or after[0] <= 0):
            for candidate in self._from_stream(after):
                yield candidate
                after = candidate.place
            after = self._behind_stream or after
        yield from self._sorted(self._by_own_ends, after, count)

    def _by_own_ends(self, members: Sequence[str]) -> Iterable[tuple[_Place, str]]:
        if not members:
            return ()
        keys = [self.keys.entry(member) for member in members]
        ends = script(store.__name__, "last_ends")(self.client, keys, [*NO_END]).split(",")
        return (
            (self._end_place(end, self.keys.name(member)), member) for end, member in zip(ends, members, strict=True)
        )

    def _end_place(self, end: str, name: str) -> _Place:
        if not end:
            return (1, 0, name)  # behind all others
        milliseconds, _, number = end.partition("-")
        return (-int(milliseconds), -int(number), name)

    def _from_stream(self, after: _Place | None) -> Iterator[_Candidate]:
        """Yield entries by the ends in the stream; ``_behind_stream`` is then the place behind the last end read."""
        at, seen = "" if after is None else f"{-after[0]}-{-after[1]}", set[str]()
        for _ in range(MOST_RECORDS // RECORDS):
            at, records = read_records(self.client, self.keys.runs, at, RECORDS, leave_out=NO_END)
            if not at:
                return
            ends = dict[str, tuple[str, str]]()
            for end, fields in records:
                if (name := fields["entry"]) not in seen:
                    ends[self.keys.prefix + name] = end, name
            seen.update(name for _, name in ends.values())
            for key in self._candidates([*ends]):
                yield _Candidate(self._end_place(*ends[key]), key, ends[key][0])
            self._behind_stream = self._end_place(at, AFTER_NAMES)

    # ---------------------------------------------------------------- reading

    def _slices(self, part: str, after: _Place | None, size: int, *, goes_up: bool) -> Iterator[_Slice]:
        """Yield members and scores of the sorted set, in its order."""
        score, member = after or ("", "")
        while True:
            args = (part, "up" if goes_up else "down", size, score, member)
            flat = json.loads(script(store.__name__, "members")(self.client, [self.keys.schedule], args))
            pairs = [*zip(flat[::2], flat[1::2], strict=True)]
            if pairs:
                yield pairs
            if len(pairs) < size:
                return
            member, score = pairs[-1]

    def _searched(self, slices: Iterator[_Slice]) -> Iterator[tuple[_Slice, Sequence[str]]]:
        """Yield slices, and those of their members that may meet the conditions.

        From the second slice on, threads send the keys of some slices while the server looks at those of others.
        """
        ahead, searched = 0, deque[tuple[_Slice, Future[Sequence[str]]]]()
        with ThreadPoolExecutor(AHEAD) as threads:
            for slice_ in slices:
                searched.append((slice_, threads.submit(self._candidates, [member for member, _ in slice_])))
                if len(searched) > ahead:
                    first, found = searched.popleft()
                    yield first, found.result()
                    ahead = AHEAD
            while searched:
                first, found = searched.popleft()
                yield first, found.result()

    @property
    def _needs_no_strings(self) -> bool:
        """Whether the stored strings of entries say nothing about the conditions."""
        query = self.query
        return not (query.search or query.task or query.tag) and query.state in {"", State.FINISHED, State.UNUSABLE}

    def _candidates(self, members: Sequence[str]) -> Sequence[str]:
        """Return the members that may meet the conditions, by the stored strings of their entries."""
        if self._needs_no_strings or not members:
            return members
        query = self.query
        keys = [self.keys.quarantine, *map(self.keys.entry, members)]
        # The policies do not say which entries a pause of many covers.
        state = "" if query.state == State.PAUSED and self.pauses.lasting(self.now) else query.state
        args = (self.keys.prefix, _lower(query.search), _lower(query.task), query.tag, state)
        return [
            members[number - 1] for number in json.loads(script(store.__name__, "candidates")(self.client, keys, args))
        ]

    def _decoded(self, batch: Sequence[_Candidate]) -> Iterator[tuple[_Place, Row | None]]:
        members, names = [each.member for each in batch], [self.keys.name(each.member) for each in batch]
        found = read_fields(self.client, [self.keys.entry(member) for member in members], "history", "runs")
        with self.client.pipeline(transaction=False) as pipe:
            pipe.zmscore(self.keys.schedule, members)
            pipe.hmget(self.keys.quarantine, members)
            pipe.hmget(self.keys.owners, names)
            about = zip(*pipe.execute(), strict=True)
        for candidate, name, fields, (score, record, is_static) in zip(batch, names, found, about, strict=True):
            if score is None:  # it was deleted meanwhile
                yield candidate.place, None
                continue
            own = Own((), ()) if isinstance(fields, str) else Own.of(name, *(fields[at] or None for at in OF_HISTORY))
            if candidate.end not in {None, own.last_end_id}:  # another run has ended since
                yield candidate.place, None
                continue
            row = self._row(name, fields, own, score, record, is_static=bool(is_static))
            yield candidate.place, row if self.query.is_met_by(row) else None

    def _row(
        self,
        name: str,
        fields: StoredFields,
        own: Own,
        score: float,
        record: str | None,
        *,
        is_static: bool,
    ) -> Row:
        entry, why, task = None, "", ""
        tags: object = ()
        if isinstance(fields, str):
            why = f"its key holds something else: {fields}"
        else:
            definition, meta, policy, since, _, sent, *_ = fields
            try:
                if not definition:
                    raise EntryError("it has a place in the schedule, and no definition")  # noqa: TRY301
                entry = Entry.from_fields(self.keys.prefix + name, definition, meta, policy, since, sent, app=self.app)
                entry.zone = self.zone
                task, tags = entry.task, entry.policy.tags
            except EntryError as exc:
                why = str(exc)
                left = Salvage.of(name, fields[:4], self.app)
                task, tags = str(left.fields.get("task", "")), left.wishes.get("tags")
        why = why or (entry.why_unusable(self.now) if entry is not None else "")
        pause = self.pauses.over(entry.policy, self.now) if entry is not None else None
        upcoming, state = (None, State.UNUSABLE) if why or entry is None else outlook(entry, self.now, pause)
        if record is not None:
            why, upcoming, state = quarantine_record(record)["reason"], None, State.QUARANTINED
        return Row(
            name=name,
            task=task,
            tags=tuple(map(str, tags)) if isinstance(tags, list | tuple) else (),
            entry=entry,
            why=why,
            state=state,
            next=upcoming,
            place=datetime.fromtimestamp(score, UTC) if 0 <= score <= LAST_INSTANT else None,
            last_end=own.last_end,
            last_decision=next(iter(own.decisions), None),
            is_static=is_static,
            is_pending=own.is_pending,
            pause=pause,
        )


def _lower(text: str) -> str:
    """Return a string with ASCII letters in lower case, as Lua's ``string.lower`` on a server does."""
    return text if text.isascii() and text.islower() else text.translate(_LOWER)


_LOWER = {ord(letter): letter.lower() for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
