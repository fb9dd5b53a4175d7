"""The schedule of an app, for its programs: read, change and trigger entries; needs Redis, and no beat."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload
from uuid import uuid4

from ..connections import ResponseError, schedule_client
from ..errors import ConflictError, EntryError, UnknownEntryError
from ..locks.redis import escaped
from ..log import Log
from ..lua import script
from ..overlap import Overlap
from . import store
from .calendar.zone import given_instant
from .entries.backfill import Span
from .entries.entry import PARKED, Entry, Meta
from .entries.fields import BATCH, read_fields, write_fields
from .entries.occurrence import Kind, Occurrence
from .entries.policy import EntryPolicy, PolicyOptions
from .entries.salvage import Salvage
from .entries.save import ATTEMPTS, save_entries
from .keys import Keys
from .server_time import server_now
from .store.history import History, Record

if TYPE_CHECKING:
    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..clients import RedisClient
    from ..locks.base import Options
    from ..locks.key import Arguments, NamedArguments
    from .entries.fields import StoredFields

__all__ = ("Schedule",)

log = Log(__name__)

#: Seconds between two looks whether an entry's last occurrence is confirmed.
POLL_INTERVAL = 0.05

#: How far the occurrences of a backfill that is too long are counted.
COUNTED = 10_000


@contextmanager
def _asking(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # a user's own schedule may do anything
        why = f"its next run cannot be calculated: {type(exc).__name__}: {exc}"
        raise EntryError(f"entry {name!r}: {why}") from exc


def _has_place(client: RedisClient, schedule: str, key: str, prefix: str) -> bool:
    try:
        return any(score is not None for score in client.zmscore(schedule, [key, key.removeprefix(prefix)]))
    except ResponseError:  # that key is no sorted set
        return False


def _log_left_out(name: str, why: EntryError) -> None:
    log.warning("%(entry)s is left out", event="left_out", entry=name, reason=why)


class _Past(NamedTuple):
    """The past of an entry, as ``save.lua`` takes it."""

    meta: str | Literal[False]  #: False: leave it
    since: str | Literal[False]  #: False: leave it
    score: str  #: empty: leave it


_UNCHANGED = _Past(False, False, "")


class Schedule:
    """The entries of an app.

    >>> Schedule(app).upsert("greet", "tasks.greet", crontab(minute=0), args=["world"], jitter=5)  # doctest: +SKIP
    """

    def __init__(self, app: Celery) -> None:
        self.app, self.keys = app, Keys.of(app)

    @property
    def _client(self) -> RedisClient:
        return schedule_client(self.app)

    def _now(self) -> datetime:
        """Return the time of the schedule's server: the clock of this host may be wrong."""
        return server_now(self._client, self.keys.schedule)

    def get(self, name: str) -> Entry:
        """Return an entry.

        Raises:
            UnknownEntryError: there is none; it is a KeyError, too.
            EntryError: it cannot be understood.
        """
        return self._entry(name, read_fields(self._client, [self.keys.named(name)])[0])

    def salvage(self, name: str) -> Salvage:
        """Return what can be read of an entry, however broken it is.

        Raises:
            UnknownEntryError: there is none; it is a KeyError, too.
            EntryError: its key holds something else.
        """
        return Salvage.of(name, self._found(name, read_fields(self._client, [self.keys.named(name)])[0]), self.app)

    def save(self, entry: Entry) -> Entry:
        """Store an entry, new or read; it keeps its past, and if its times are unchanged its next time.

        Raises:
            ConflictError: somebody else has changed the entry since it was read.
            EntryError: a value cannot be stored.
        """
        problem = save_entries(self._client, self.keys, {entry.name: entry}, self._now())[entry.name]
        if problem is not None:
            raise problem
        return entry

    def upsert(
        self,
        name: str,
        task: str,
        schedule: BaseSchedule | timedelta | float,
        *,
        args: Arguments = (),
        kwargs: NamedArguments | None = None,
        options: Options | None = None,
        enabled: bool = True,
        **policy: Unpack[PolicyOptions],
    ) -> Entry:
        """Store an entry under a name, whatever is there; it keeps its past, and stays paused if it is.

        Args:
            schedule: of Celery or RedBeat, or a number of seconds.
            options: for ``apply_async``.
            policy: wishes by the names of ``EntryPolicy``.

        Raises:
            EntryError: a value cannot be stored, or a wish is unknown or wrong.
        """
        if not isinstance(args, Sequence) or isinstance(args, str | bytes | bytearray):
            raise EntryError(f"entry {name!r} cannot be stored: args is not a list or tuple: {args!r}")
        entry = Entry(
            name,
            task,
            schedule,
            app=self.app,
            policy=EntryPolicy.of(policy),
            args=list(args),
            kwargs=dict(kwargs or {}),
            options=dict(options or {}),
            enabled=enabled,
        )
        return self.save(entry)

    def delete(self, name: str) -> bool:
        """Remove an entry, whatever is in it; return whether it was there. One of ``beat_schedule`` comes back.

        A key that holds something else than an entry stays, and loses its place in the schedule.

        Raises:
            EntryError: its key is one of the schedule itself, or of another app's.
        """
        return Entry(name, app=self.app).delete()

    def pause(self, name: str, note: str = "") -> None:
        """Let an entry's times pass without a run.

        Args:
            note: for people: why; empty: what it says is left.

        Raises:
            UnknownEntryError: there is none; it is a KeyError, too.
            ConflictError: somebody else keeps changing it.
            EntryError: its policy cannot be understood.
        """
        self._wish(name, {"paused": True, **({"note": note} if note else {})})

    def resume(self, name: str) -> None:
        """End a pause and remove its note; the times that have passed are not made up for.

        Raises:
            UnknownEntryError, ConflictError, EntryError: as ``pause``.
        """
        self._wish(name, {"paused": False, "note": ""}, goes_on=True)

    def next_runs(self, name: str, count: int, *, after: datetime | None = None) -> Sequence[datetime]:
        """Return the next nominal times of an entry, in UTC, whether it is paused or not.

        Args:
            count: how many at most; there are fewer if the entry ends.
            after: only what is later; by default all, of which the first is past if it is overdue.

        Raises:
            UnknownEntryError, EntryError: as ``get``; or ``after`` has no time zone, or lies outside of the calendar.
        """
        after = None if after is None else given_instant("after", after)
        entry, now = self.get(name), self._now()
        # Without a number of runs to count, all that lies before it can be left out at once.
        from_when = now if after is None or entry.policy.max_runs is not None else max(now, after)
        runs = entry.timetable.runs(entry.meta.counts_from, from_when, count=entry.meta.total_run_count)
        if after is not None:
            runs = dropwhile(lambda nominal: nominal <= after, runs)
        with _asking(name):
            return [*islice(runs, count)]

    def trigger(self, name: str, *, timeout: float = 10.0) -> str:
        """Let an entry run as soon as a beat leads, also if it is paused, disabled or finished; return the task id.

        The run takes the entry's lock and is recorded as ``manual``; it is not counted, and next times stay.

        Args:
            timeout: seconds to wait while another occurrence of the entry is on its way.

        Raises:
            UnknownEntryError, EntryError: as ``get``.
            ConflictError: another occurrence of the entry was on its way for all that time.
        """
        entry, now = self.get(name), self._now()
        last = entry.meta.last_run
        previous = None if last is None else last.timestamp()
        occurrence = Occurrence(str(uuid4()), now.timestamp(), previous, Kind.MANUAL)
        self._propose(name, occurrence, timeout)
        return occurrence.id

    @overload
    def backfill(
        self, name: str, start: datetime, end: datetime, *, dry_run: Literal[True], overlap: str = ..., limit: int = ...
    ) -> Sequence[datetime]: ...

    @overload
    def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        overlap: str = ...,
        limit: int = ...,
        dry_run: Literal[False] = ...,
        timeout: float = ...,
        progress: Callable[[], object] = ...,
    ) -> Sequence[Occurrence]: ...

    def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        overlap: str = Overlap.BUFFER_ALL,
        limit: int = 1000,
        dry_run: bool = False,
        timeout: float = 10.0,
        progress: Callable[[], object] = lambda: None,
    ) -> Sequence[Occurrence] | Sequence[datetime]:
        """Let an entry run once for each of its nominal times in ``(start, end]``, in their order; return these.

        An interval counts from ``start``. Each run is handed to beat when that has sent the one before. A call that was
        interrupted goes on when it is repeated with the same start and end; after one that was not, all run once more.
        Runs are not counted, next times stay.

        Args:
            overlap: what becomes of one that meets an equal call, a word of ``Overlap``.
            limit: more runs than that are refused before the first is sent.
            dry_run: only return the nominal times, in UTC, as ``next_runs`` does.
            timeout: seconds to wait for each one to be sent.
            progress: hears of each run that was handed over.

        Raises:
            UnknownEntryError, EntryError: as ``get``; there are too many runs, or ``start`` and ``end`` are wrong.
            ConflictError: an occurrence was not sent in time, or another backfill of the entry is not finished.
        """
        word = EntryPolicy.of({"overlap": overlap}).overlap
        entry, key = self.get(name), self.keys.named(name)
        found: str = self._client.hget(key, "backfill") or ""
        span = Span.of(start, end, run=uuid4().hex).resumed(found, name, key)
        counted = max(COUNTED, limit)
        with _asking(name):
            left = [*islice(span.occurrences(entry.timetable, self.keys.prefix, word), counted + 1)]
        if len(left) > limit:
            number = f"more than {counted}" if len(left) > counted else len(left)
            raise EntryError(
                f"backfill of {name!r}: {number} runs are more than the limit of {limit}; raise it if need be"
            )
        if dry_run:
            return [datetime.fromtimestamp(occurrence.nominal, UTC) for occurrence in left]
        for occurrence in left:
            at = replace(span, at=datetime.fromtimestamp(occurrence.nominal, UTC)).encode()
            self._propose(name, occurrence, timeout, found=found, at=at)
            found = at
            progress()
        if found:  # a step of its own: a call that is interrupted before it is no new backfill when it is repeated
            self._propose(name, None, timeout, found=found)
        return left

    def list(self, *, left_out: Callable[[str, EntryError], object] = _log_left_out) -> Iterator[Entry]:
        """Yield all entries, by the time of their next run, without those that cannot be used.

        Args:
            left_out: hears the name of each of these, and why; by default it is logged.
        """
        members = self._client.zrange(self.keys.schedule, 0, -1)
        for at in range(0, len(members), BATCH):
            keys = [self.keys.entry(member) for member in members[at : at + BATCH]]
            for key, fields in zip(keys, read_fields(self._client, keys), strict=True):
                name = key.removeprefix(self.keys.prefix)
                try:
                    yield self._entry(name, fields)
                except EntryError as exc:
                    left_out(name, exc)

    def examine(self, now: datetime) -> tuple[Sequence[Entry], Mapping[str, str]]:
        """Return all entries that can be read, and why beat cannot use some, by name.

        Beat quarantines an unusable entry when its time comes, and not before.
        """
        unusable = dict[str, str]()
        entries = [*self.list(left_out=lambda name, why: unusable.update({name: str(why)}))]
        unusable |= {entry.name: why for entry in entries if (why := entry.why_unusable(now))}
        return entries, unusable

    def no_place(self, name: str) -> str:
        """Return why an entry is never due, and what to do: it has no place in the sorted set. Empty: it has one."""
        key = self.keys.named(name)
        if any(score is not None for score in self._client.zmscore(self.keys.schedule, [key, name])):
            return ""
        return (
            f"it has no place in {self.keys.schedule}: it never runs; to let it run at once and then as scheduled: "
            f"ZADD {shlex.join((self.keys.schedule, '0', key))}"
        )

    def without_place(self) -> Iterator[str]:
        """Yield the names of entries that are stored, and never due, because they have no place in the sorted set.

        Entries of another app whose prefix begins with this one's, like ``redbeat:a:``, are left out.
        """
        client, found = self._client, f"{escaped(self.keys.prefix)}*"
        keys = (key for key in client.scan_iter(match=found, count=BATCH, _type="HASH"))
        while page := [*islice(keys, BATCH)]:
            names = {name: key for key in page if self.keys.is_possible(name := self.keys.name(key))}
            if not names:
                continue
            scores = client.zmscore(self.keys.schedule, [*names.values(), *names])
            placed = {
                name
                for name, *both in zip(names, scores[: len(names)], scores[len(names) :], strict=True)
                if any(score is not None for score in both)
            }
            left = [name for name in names if name not in placed]
            for name, fields in zip(left, read_fields(self._client, [names[name] for name in left]), strict=True):
                if not isinstance(fields, str) and fields[0] and not self._is_placed_elsewhere(name):
                    yield name

    def _is_placed_elsewhere(self, name: str) -> bool:
        """Return whether an entry has its place in the schedule of another app, whose prefix is longer."""
        parts, key = name.split(":"), self.keys.prefix + name
        prefixes = [f"{self.keys.prefix}{':'.join(parts[:count])}:" for count in range(1, len(parts))]
        return any(_has_place(self._client, f"{prefix}:schedule", key, prefix) for prefix in prefixes)

    def history(self, name: str | None = None, count: int = 20) -> Sequence[Record]:
        """Return the last decisions about an entry, or about all, with the ends of their runs; the last one first."""
        history = History(self.app)
        return history.latest(count) if name is None else history.of(name, count)

    def _entry(self, name: str, fields: StoredFields) -> Entry:
        found = [*self._found(name, fields), *fields[5:]]
        return Entry.from_fields(self.keys.prefix + name, *found, app=self.app)

    def _found(self, name: str, fields: StoredFields) -> StoredFields:
        """Return definition, meta, policy and since of an entry that was read."""
        if isinstance(fields, str):
            raise EntryError(f"entry {name!r} cannot be used: its key holds something else: {fields}")
        if not fields[0]:
            raise self._unknown(name)
        found: StoredFields = fields[:4]
        return found

    def _unknown(self, name: str) -> UnknownEntryError:
        """Return the error about an entry that is not there, which says whether it is parked."""
        text, left = f"there is no entry {name!r} under {self.keys.prefix}", self._client.pttl(self.keys.parked(name))
        if left > 0:
            until = self._now() + timedelta(milliseconds=left)
            text += (
                f": beat_schedule has dropped it: it is parked until {until:%Y-%m-%d %H:%M:%SZ}, and comes back with "
                "its past when beat_schedule has it again before"
            )
        return UnknownEntryError(text)

    def _wish(self, name: str, wishes: Mapping[str, Any], *, goes_on: bool = False) -> None:
        """Change some wishes of an entry, and nothing else in it.

        Args:
            goes_on: if it is paused, its next run counts from now.
        """
        key = self.keys.named(name)
        for _ in range(ATTEMPTS):
            fields = read_fields(self._client, [key])[0]
            if isinstance(fields, str) or not fields[0]:
                raise self._unknown(name)
            definition, _, policy, _ = found = fields[:4]
            stored = EntryPolicy.decode(policy or "")
            meta, since, score = self._going_on(name, found) if goes_on and stored.paused else _UNCHANGED
            wanted = (definition, meta, replace(stored, **wishes).encode(), since)
            if write_fields(self._client, self.keys.schedule, [(key, found, wanted, score)])[0]:
                return
        raise ConflictError(f"entry {name!r} cannot be stored: somebody else keeps changing it")

    def _going_on(self, name: str, fields: StoredFields) -> _Past:
        """Return ``meta``, ``since`` and the score of an entry that goes on now, as ``save.lua`` takes them.

        Its times pass while a beat leads; here those pass that came while none did.
        """
        now, score = self._now(), self._client.zscore(self.keys.schedule, self.keys.named(name))
        try:
            entry = self._entry(name, fields)
            before, past = entry.meta, entry.timetable.passed(entry.meta, now)
            due_at = entry.timetable.due_at(past.counts_from, now)
        except Exception:  # it cannot be used; a user's own schedule may do anything
            try:
                before, due_at = Meta.decode(fields[1] or None, fields[3] or None), None
            except EntryError:
                return _UNCHANGED
            past, score = replace(before, since=now), None
        if past == before:
            return _UNCHANGED
        at = "" if score is None or score < 0 else repr(PARKED if due_at is None else due_at.timestamp())
        return _Past(False if fields[1] else past.encode(), past.encode_since(), at)

    def _propose(
        self, name: str, occurrence: Occurrence | None, timeout: float, *, found: str = "", at: str = ""
    ) -> None:
        key, deadline = self.keys.named(name), time.monotonic() + timeout
        args = (key, *((occurrence.id, occurrence.encode()) if occurrence else ("", "")), found, at)
        while (verdict := script(store.__name__, "propose")(self._client, [key, self.keys.pending], args)) == "pending":
            if time.monotonic() >= deadline:
                raise ConflictError(
                    f"entry {name!r} has an occurrence that was not sent within {timeout:g} s: does a beat run? "
                    "(celery singlebeat status)"
                )
            time.sleep(POLL_INTERVAL)
        if verdict == "missing":
            raise self._unknown(name)
        if verdict == "moved" and occurrence is not None:
            raise ConflictError(f"entry {name!r}: another call goes on with its backfill")
