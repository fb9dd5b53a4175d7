"""The schedule of an app, for its programs: they read, change and trigger entries; needs Redis, and no beat."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import dropwhile, islice, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, overload
from uuid import uuid4

from ..advice import command_line, redis_command
from ..connections import ResponseError, schedule_client
from ..errors import ConflictError, EntryError, UnknownEntryError
from ..log import Log
from ..lua import script
from ..overlap import Overlap
from . import store
from .calendar.zone import given_instant
from .entries.author import PERMITTED, Author
from .entries.backfill import Span
from .entries.entry import PARKED, Entry, Meta
from .entries.fields import BATCH, read_fields, write_fields, zone_of_beats
from .entries.occurrence import Kind, Occurrence
from .entries.pauses import pause_many, read_pauses, resume_many
from .entries.policy import EntryPolicy, PolicyOptions
from .entries.salvage import Salvage
from .entries.save import ATTEMPTS, Unsent, save_entries
from .keys import Keys, check_encodable
from .page import Page, Query
from .server_time import server_now
from .store.changes import Change, Changes
from .store.history import History, Record
from .store.unplaced import is_placed_elsewhere, is_unlisted, without_place, without_retry

if TYPE_CHECKING:
    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..clients import RedisClient
    from ..locks.base import Options
    from ..locks.key import Arguments, NamedArguments
    from .entries.fields import StoredFields
    from .entries.pauses import Pause
    from .page import Sort

__all__ = ("Schedule",)

PROPOSE = script(store.__name__, "propose", PERMITTED)

T = TypeVar("T")

log = Log(__name__)

#: Seconds between two checks whether an entry's last occurrence is confirmed.
POLL_INTERVAL = 0.05

#: Up to how many occurrences of a backfill that is too long are counted.
COUNTED = 10_000


@contextmanager
def _calculating(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # a user's own schedule may raise anything
        why = f"its next run cannot be calculated: {type(exc).__name__}: {exc}"
        raise EntryError(f"entry {name!r}: {why}") from exc


def _until(deadline: float, times: Iterator[T]) -> Iterator[T]:
    """Yield times; no further one is calculated after a deadline of the monotonic clock."""
    for each in times:
        yield each
        if time.monotonic() >= deadline:
            return


def _log_left_out(name: str, why: EntryError) -> None:
    log.warning("%(entry)s is left out", event="left_out", entry=name, reason=why)


def _before(changes: Sequence[Change], at: int, field: str, now: str) -> str | None:
    """Return a field of an entry as it was before a change; empty if it was absent, None if that is not known.

    Args:
        changes: of the entry, latest first.
        at: number of the change.
        now: the field as it is stored.
    """
    if field in changes[at].before:
        return changes[at].before[field]
    for change in changes[at + 1 :]:
        if field in change.after:
            return change.after[field]
        if change.action == "add" and change.by != "raw":
            return ""  # it was added without
    for change in reversed(changes[: at + 1]):
        if field in change.before or field in change.after:  # of a change by another program, only what it has left
            return change.before.get(field)
    return now


def _after(changes: Sequence[Change], field: str) -> str:
    """Return a field of an entry as it was after the last change; empty if it was absent, or if that is not known."""
    return next((change.after[field] for change in changes if field in change.after), "")


def _is_removed(stored: StoredFields, last: Change) -> bool:
    """Return whether another program has removed an entry: it is not stored, and its last change says nothing of it."""
    return not isinstance(stored, str) and not stored[0] and last.action not in {"delete", "park"}


def _past(changes: Sequence[Change], at: int) -> Mapping[str, str]:
    """Return the past of a removed entry, as the last removal since a change has recorded it; empty if none has.

    An entry that was added under the same name after that removal has another past.

    Args:
        changes: of the entry, latest first.
        at: number of the change.
    """
    since = takewhile(lambda change: change.action != "add", reversed(changes[: at + 1]))
    removals = [change.before for change in since if change.before.get("meta")]
    return removals[-1] if removals else {}


class _Past(NamedTuple):
    """The past of an entry, as ``save.lua`` takes it."""

    meta: str | Literal[False]  #: False: leave it
    since: str | Literal[False]  #: False: leave it
    score: str  #: empty: leave it


_UNCHANGED = _Past(False, False, "")

#: Seconds for which the zone of beats counts as known.
ZONE_READ_EVERY = 1.0


class Schedule:
    """The entries of an app, for its programs; needs Redis, and no beat.

    An entry that beat could not use, or that holds a number which JSON does not have, is not stored: an ``EntryError``
    says why.

    Args:
        actor: who changes entries with it, for the record of changes; by default the user of this process and its host.
        by: by what means: ``api``, ``cli``, ``web``, ….

    >>> Schedule(app).upsert("greet", "tasks.greet", crontab(minute=0), args=["world"], jitter=5)  # doctest: +SKIP
    """

    def __init__(self, app: Celery, *, actor: str = "", by: str = "api") -> None:
        self.app, self.keys, self.author = app, Keys.of(app), Author.of(app, actor, by)
        self._zone: tuple[float, tzinfo | None] = -math.inf, None  #: and when it was read, by the monotonic clock

    @property
    def _client(self) -> RedisClient:
        return schedule_client(self.app)

    def _now(self) -> datetime:
        """Return the time of the schedule's server: the clock of this host may be wrong."""
        return server_now(self._client, self.keys.schedule)

    def get(self, name: str) -> Entry:
        """Return an entry.

        Raises:
            UnknownEntryError: there is no such entry; also a KeyError.
            EntryError: the entry cannot be decoded.
        """
        return self._entry(name, read_fields(self._client, [self.keys.named(name)])[0])

    def salvage(self, name: str) -> Salvage:
        """Return the readable parts of an entry that may be broken.

        Raises:
            UnknownEntryError: there is no such entry; also a KeyError.
            EntryError: the entry's key is not a hash.
        """
        return Salvage.of(name, self._found(name, read_fields(self._client, [self.keys.named(name)])[0]), self.app)

    def salvage_many(self, names: Sequence[str]) -> Mapping[str, Salvage]:
        """Return the readable parts of those of many entries that are stored, by name, in one round trip."""
        salvaged = {}
        for name, fields in zip(names, read_fields(self._client, [*map(self.keys.named, names)]), strict=True):
            with suppress(EntryError):
                salvaged[name] = Salvage.of(name, self._found(name, fields), self.app)
        return salvaged

    def save(self, entry: Entry) -> Entry:
        """Store an entry, new or read; it keeps its past, and if its times are unchanged its next time.

        Raises:
            ConflictError: another process has changed the entry since it was read.
            EntryError: a value cannot be stored.
        """
        return self._save(entry)

    def _save(self, entry: Entry, *, action: str = "edit", note: str = "", unsent: Unsent | None = None) -> Entry:
        given = self._client, self.keys, {entry.name: entry}, self._now(), self.author
        saved = save_entries(*given, action=action, note=note, unsent={entry.name: unsent} if unsent else None)
        if (problem := saved[entry.name]) is not None:
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
        """Store an entry under a name, new or in place of an old one, which keeps its past and its pause.

        Args:
            schedule: of Celery or RedBeat, or a number of seconds.
            options: for ``apply_async``.
            enabled: whether it runs, also if an operator has disabled the old one; pause an entry that is to stay off.
            policy: options by the names of ``EntryPolicy``.

        Raises:
            EntryError: a value cannot be stored, or an option of the policy is unknown or wrong.
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
            kwargs=copy.copy(kwargs or {}),
            options=copy.copy(options or {}),
            enabled=enabled,
        )
        return self.save(entry)

    def delete(self, name: str, *, found: Salvage | None = None) -> bool:
        """Remove an entry, even a broken one; return whether it existed. An entry of ``beat_schedule`` comes back.

        A key that is not an entry stays, and only loses its place in the schedule.

        Args:
            found: the entry as ``salvage`` has read it; None: delete it as it is.

        Raises:
            EntryError: the key belongs to the schedule itself, or to the schedule of another app.
            ConflictError: another process has changed the entry since it was found.
        """
        read = None if found is None else (found.texts["definition"], found.texts["policy"])
        return Entry(name, app=self.app).delete_by(self.author, read)

    def foreign_key(self, name: str) -> tuple[str, str] | None:
        """Return the key of a deleted entry and the type of the key, if another program holds it; else None."""
        key, kind = self.keys.named(name), "key"
        fields = read_fields(self._client, [key])[0]
        is_entry = not isinstance(fields, str) and any(fields)  # another process has stored it again
        if is_entry or not self._client.exists(key):
            return None
        with suppress(ResponseError):  # the server may refuse its user that command
            kind = str(self._client.type(key))
        return key, kind

    def pause(self, name: str, note: str = "") -> str:
        """Let an entry's times pass without a run; return the note that this replaces, of a pause that lasts.

        Args:
            note: the reason, for operators; if empty, the entry keeps its present note.

        Raises:
            UnknownEntryError: there is no such entry; also a KeyError.
            ConflictError: another process keeps changing the entry.
            EntryError: the entry's policy cannot be decoded.
        """
        given = {"note": note} if note else {}
        before = self._change_policy(name, {"paused": True, **given}, action="pause", note=note)
        return before.note if note and before.paused and before.note != note else ""

    def resume(self, name: str) -> bool:
        """End a pause and remove its note; return whether the entry was paused. Passed times are not caught up.

        Raises:
            UnknownEntryError, ConflictError, EntryError: as ``pause``.
        """
        return self._change_policy(name, {"paused": False, "note": ""}, action="resume", ends_pause=True).paused

    def pause_many(self, *, tag: str | None = None, note: str = "", until: datetime | None = None) -> Pause | None:
        """Let the times of many entries pass without a run; the entries themselves stay as they are.

        A pause that lasts gets the new note and end; it is returned as it was.

        Args:
            tag: of the entries; None: all entries.
            note: the reason, for operators; if empty, a pause that lasts keeps its note.
            until: when the pause ends by itself; None: ``resume_many`` ends it.

        Raises:
            EntryError: the tag is blank, or ``until`` has passed or has no time zone.
            ConflictError: another process keeps changing the pause.
        """
        return pause_many(self._client, self.keys, self._now(), self.author, tag=tag, note=note, until=until)

    def resume_many(self, *, tag: str | None = None) -> bool:
        """End a pause of ``pause_many``, and return whether there was one; times before now are not caught up.

        Other pauses last: those of single entries, and of other tags.

        Args:
            tag: as of the pause.

        Raises:
            EntryError, ConflictError: as ``pause_many``.
        """
        return resume_many(self._client, self.keys, self._now(), self.author, tag=tag)

    def pauses(self) -> Sequence[Pause]:
        """Return the pauses of many entries that last, that of all entries first."""
        return read_pauses(self._client, self.keys.pauses).lasting(self._now())

    def tags(self) -> Mapping[str, int]:
        """Return the tags of all entries whose policies can be read, each with the number of its entries."""
        members, found = self._client.zrange(self.keys.schedule, 0, -1), Counter[str]()
        for at in range(0, len(members), BATCH):
            for fields in read_fields(self._client, [self.keys.entry(member) for member in members[at : at + BATCH]]):
                with suppress(EntryError):
                    found.update(() if isinstance(fields, str) else EntryPolicy.decode(fields[2]).tags)
        return found

    def next_runs(
        self, name: str, count: int, *, after: datetime | None = None, within: float = math.inf
    ) -> Sequence[datetime]:
        """Return the next nominal times of an entry as beats read them, in UTC, whether it is paused or not.

        Args:
            count: most times to return; there are fewer if the entry ends.
            after: return only later times; by default all, of which the first has passed if the entry is overdue.
            within: seconds after which no further time is calculated: those of some rules take long.

        Raises:
            UnknownEntryError, EntryError: as ``get``; ``after`` has no time zone, or lies outside of the calendar; or
                no time after it was reached within the seconds.
        """
        after = None if after is None else given_instant("after", after)
        entry, now = self.get(name), self._now()
        # Without max_runs no run must be counted, so the times before ``after`` need not be computed.
        from_when = now if after is None or entry.policy.max_runs is not None else max(now, after)
        runs = entry.timetable.runs(entry.meta.counts_from, from_when, count=entry.meta.total_run_count)
        runs = _until(deadline := time.monotonic() + within, runs)
        if after is not None:
            runs = dropwhile(lambda nominal: nominal <= after, runs)
        with _calculating(name):
            found = [*islice(runs, count)]
        if after is not None and not found and time.monotonic() >= deadline:
            raise EntryError(
                f"entry {name!r}: its times up to {after} were not calculated within {within:g} s: ask for times after "
                "an earlier moment"
            )
        return found

    def trigger(self, name: str, *, overlap: str | None = None, timeout: float = 10.0) -> str:
        """Let an entry run as soon as a beat leads, even if it is paused, disabled or finished; return the task id.

        The run acquires the entry's lock and is recorded as ``manual``. It is not counted, and next times stay.

        Args:
            overlap: the policy if the run meets an equal call, a word of ``Overlap``; by default that of the entry.
            timeout: seconds to wait while another occurrence of the entry is pending.

        Raises:
            UnknownEntryError, EntryError: as ``get``; or ``overlap`` is no such word.
            ConflictError: another occurrence of the entry was still pending after the timeout.
        """
        word = EntryPolicy.of({"overlap": overlap}).overlap
        entry, now = self.get(name), self._now()
        last = entry.meta.last_run
        previous = None if last is None else last.timestamp()
        occurrence = Occurrence(str(uuid4()), now.timestamp(), previous, Kind.MANUAL, word)
        self._propose(name, occurrence, timeout)
        return occurrence.id

    @overload
    def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        dry_run: Literal[True],
        overlap: str = ...,
        limit: int = ...,
        within: float = ...,
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
        within: float = ...,
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
        within: float = math.inf,
        dry_run: bool = False,
        timeout: float = 10.0,
        progress: Callable[[], object] = lambda: None,
    ) -> Sequence[Occurrence] | Sequence[datetime]:
        """Let an entry run once for each of its nominal times in ``(start, end]``, in order; return the occurrences.

        An interval counts from ``start``. Beat receives each run after it has sent the run before. If a call was
        interrupted, a repetition with the same start and end continues it. After a complete call, a repetition lets all
        times run again: the history shows whether a call was complete whose answer was lost. Runs are not counted, and
        next times stay.

        Args:
            overlap: the policy for runs that meet an equal call, a word of ``Overlap``.
            limit: most runs; if there are more, none is sent.
            within: seconds to calculate the nominal times; if they take longer, none is sent.
            dry_run: only return the nominal times, in UTC, as ``next_runs`` does.
            timeout: seconds to wait for each run to be sent.
            progress: called after each run that beat has received.

        Raises:
            UnknownEntryError, EntryError: as ``get``; there are too many runs, their times take too long, one has not
                come yet, or ``start`` and ``end`` are wrong.
            ConflictError: an occurrence was not sent in time, or another backfill of the entry is not finished.
        """
        word = EntryPolicy.of({"overlap": overlap}).overlap
        entry, key = self.get(name), self.keys.named(name)
        found: str = self._client.hget(key, "backfill") or ""
        span = Span.of(start, end, run=uuid4().hex).resumed(found, name, key)
        counted = max(COUNTED, limit)
        deadline = time.monotonic() + within
        with _calculating(name):
            left = [*islice(_until(deadline, span.occurrences(entry.timetable, self.keys.prefix, word)), counted + 1)]
        if time.monotonic() >= deadline:
            raise EntryError(
                f"backfill of {name!r}: its times were not calculated within {within:g} s: choose a shorter span"
            )
        if len(left) > limit:
            number = f"more than {counted}" if len(left) > counted else len(left)
            raise EntryError(
                f"backfill of {name!r}: {number} runs are more than the limit of {limit}: choose a shorter span, or "
                "a higher limit"
            )
        if left and left[-1].nominal > (now := self._now().timestamp()):
            first = next(datetime.fromtimestamp(each.nominal, UTC) for each in left if each.nominal > now)
            raise EntryError(f"backfill of {name!r}: {first} has not come yet: choose an earlier end")
        if dry_run:
            return [datetime.fromtimestamp(occurrence.nominal, UTC) for occurrence in left]
        for occurrence in left:
            at = replace(span, at=datetime.fromtimestamp(occurrence.nominal, UTC)).encode()
            self._propose(name, occurrence, timeout, found=found, at=at)
            found = at
            progress()
        if found:  # a separate step: after an interruption before it, a repetition is no new backfill
            self._propose(name, None, timeout, found=found)
        return left

    def list(self, *, left_out: Callable[[str, EntryError], object] = _log_left_out) -> Iterator[Entry]:
        """Yield all usable entries, by the time of their next run.

        Args:
            left_out: called with the name of each unusable entry and the reason; by default it logs them.
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

    def page(
        self,
        *,
        search: str = "",
        task: str = "",
        state: str = "",
        tag: str = "",
        sort: Sort = "next",
        descending: bool = False,
        size: int = 50,
        cursor: str = "",
    ) -> Page:
        """Return a page of entries, usable or not, without reading all of them.

        While you page, entries run and move to later places. By ``name`` an entry is on exactly one page. In the other
        orders it may be on two pages, or on none if it has moved to a page that you have read.

        Args:
            search: only entries with this string in the name or the task; the case of ASCII letters does not matter.
            task: only entries of this task.
            state: only entries in this state, a word of ``State``; ``paused``: also those that are disabled as well.
            tag: only entries with this tag.
            sort: ``next``, the soonest run first; ``lateness``, the reverse; ``name``; or ``last``, the entry first
                whose run has ended last. Entries without a next run, or without an end, come last.
            descending: reverse the order.
            size: most rows, 1 to 1000. There may be fewer, even none, before the last page.
            cursor: of the page before, in the same order; empty: the first page.

        Raises:
            ValueError: an argument is not one of those.
        """
        conditions = {"search": search, "task": task, "state": state, "tag": tag}
        return Page.read(self.app, Query(**conditions, sort=sort, descending=descending), size, cursor)

    def examine(self, now: datetime) -> tuple[Sequence[Entry], Mapping[str, str]]:
        """Return all readable entries, and the reasons why beat cannot use some entries, by name.

        Beat quarantines an unusable entry only when its time comes.
        """
        unusable = dict[str, str]()
        entries = [*self.list(left_out=lambda name, why: unusable.update({name: str(why)}))]
        unusable |= {entry.name: why for entry in entries if (why := entry.why_unusable(now))}
        return entries, unusable

    def unfinished_backfill(self, name: str) -> str:
        """Return how far a backfill of an entry has come, and what to do; empty if none is unfinished."""
        return "".join(why for _, why in self.unfinished_backfills([name]))

    def unfinished_backfills(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield those of some entries that have an unfinished backfill, and what ``unfinished_backfill`` says of it."""
        for at in range(0, len(names), BATCH):
            some = names[at : at + BATCH]
            keys = [self.keys.named(name) for name in some]
            for name, key, fields in zip(some, keys, read_fields(self._client, keys, "backfill"), strict=True):
                if isinstance(fields, str) or not (found := fields[-1]):
                    continue
                try:
                    yield name, Span.decode(found, name, key).unfinished(name, key)
                except EntryError as exc:
                    yield name, str(exc)

    def no_place(self, name: str) -> str:
        """Return that an entry has no place in the sorted set, and what to do; empty if it has a place.

        An entry of another app, whose prefix is longer, has its place in the schedule of that app.
        """
        key = self.keys.named(name)
        scores = self._client.zmscore(self.keys.schedule, [key, self.keys.bare(name)])
        if any(score is not None for score in scores) or is_placed_elsewhere(self._client, self.keys, name):
            return ""
        return (
            f"it has no place in {self.keys.schedule}: it never runs; to let it run at once, and then at its next "
            f"times: {redis_command('ZADD', self.keys.schedule, '0', key)}"
        )

    def without_place(self) -> Iterator[str]:
        """Yield the names of stored entries that are never due, because they have no place in the sorted set.

        Entries of another app whose prefix begins with this one's, like ``redbeat:a:``, are left out.
        """
        return without_place(self._client, self.keys)

    def no_retry(self, name: str) -> str:
        """Return that no beat tries to send the claimed occurrence of an entry, and what to do; empty if one does."""
        key = self.keys.named(name)
        if not is_unlisted(self._client, self.keys, name):
            return ""
        listed = self.keys.pending
        return (
            f"it is not in {listed}, so that no beat tries it again before the entry is due; to send it: "
            f"{redis_command('ZADD', listed, '0', key)}"
        )

    def without_retry(self) -> Iterator[str]:
        """Yield the names of stored entries with a claimed occurrence of which ``no_retry`` says something."""
        return without_retry(self._client, self.keys)

    def history(self, name: str | None = None, count: int = 20) -> Sequence[Record]:
        """Return the last decisions about an entry, or about all entries, with the ends of their runs; latest first."""
        history = History(self.app)
        return history.latest(count) if name is None else history.of(name, count)

    def changes(self, name: str | None = None, count: int = 20) -> Sequence[Change]:
        """Return the last changes of an entry, or of all entries and of pauses of many, latest first.

        A change that another program has made in Redis has no actor. It is recorded when a beat or the next recorded
        change of the entry finds it. ``before`` and ``after`` hold all arguments as they are stored.
        """
        return Changes(self.app).latest(name, count)

    def revert(self, name: str, to: str, *, found: Salvage | None = None) -> Entry:
        """Let an entry have the definition and policy again that it had before a change; return the entry.

        So this undoes that change and all later ones, and is a change itself. An entry that was deleted, or has left
        ``beat_schedule``, comes back with its past, and the times that have passed are not made up for. If that was its
        last change, a run that was claimed, and not sent, is sent, and an interrupted backfill can be continued. An
        entry that another program has removed comes back as it was after its last change, by the id of that.

        Args:
            to: id of the change.
            found: the entry as ``salvage`` has read it; None: undo also what was changed since it was read.

        Raises:
            EntryError: there is no record of that change, or of what the entry was before; the change has added the
                entry; or a beat could not use the entry as it was.
            ConflictError: another process has changed the entry at the same time, or since it was found.
        """
        stored = read_fields(self._client, [key := self.keys.named(name)])[0]
        if isinstance(stored, str):
            raise EntryError(f"entry {name!r} cannot be stored: its key holds something else: {stored}")
        version = stored[0] or "", stored[2] or ""
        if found is not None and version != (found.texts["definition"], found.texts["policy"]):
            raise ConflictError(f"another process has changed the entry {name!r}: read it again")
        changes = [change for change in Changes(self.app).latest(name) if change.entry == name]
        at = next((number for number, change in enumerate(changes) if change.id == to), None)
        if at is None:
            raise EntryError(
                f"there is no record of a change {to!r} of entry {name!r}: celery singlebeat changes lists them"
            )
        definition, policy = (
            _before(changes, at, field, now or "") for field, now in (("definition", stored[0]), ("policy", stored[2]))
        )
        is_after = at == 0 and _is_removed(stored, changes[0])
        if is_after:
            definition, policy = (_after(changes, field) for field in ("definition", "policy"))
        if definition is None or policy is None:
            raise EntryError(
                f"what entry {name!r} was before change {to!r} is not on record: another program has made that change, "
                "and there is no record before it: revert to a later change, or edit the entry"
            )
        if not definition:
            raise EntryError(f"change {to!r} has added entry {name!r}, so there is no entry to go back to: delete it")
        past = _past(changes, at) if not stored[0] else {}
        found_past = past.get("meta"), policy, past.get("since"), past.get("sent")
        entry = Entry.from_fields(key, definition, *found_past, app=self.app)
        entry.zone = self.zone
        if not stored[0]:  # the times that have passed are not made up for
            entry = entry.letting_pass(self._now())
        entry.version = version
        left = changes[0].before  # of a removal; if it is not the last change, the entry has got its work back since
        unsent = Unsent.of(left.get("pending", ""), left.get("backfill", ""))
        return self._save(entry, unsent=unsent, action="revert", note=f"to {'after' if is_after else 'before'} {to}")

    def reverts_to_after(self, name: str, to: str) -> bool:
        """Return whether a revert lets an entry be as it was after a change, and not before it.

        So it is if another program has removed the entry, and the change is the last one.
        """
        stored, last = read_fields(self._client, [self.keys.named(name)])[0], next(iter(self.changes(name, 1)), None)
        return last is not None and last.id == to and _is_removed(stored, last)

    def histories(self, names: Collection[str], count: int = 30) -> Mapping[str, Sequence[Record]]:
        """Return the last decisions about each of some entries, latest first, with the ends of their runs.

        Far cheaper than ``history`` for each: of a schedule with many entries, older decisions than the last few about
        an entry are missing if they are not among the last 10,000 about all entries.
        """
        return History(self.app).of_many(names, count)

    def _entry(self, name: str, fields: StoredFields) -> Entry:
        found = [*self._found(name, fields), *fields[5:6]]
        entry = Entry.from_fields(self.keys.prefix + name, *found, app=self.app)
        entry.zone = self.zone
        return entry

    @property
    def zone(self) -> tzinfo | None:
        """The zone in which beats read wall clocks, as it was up to a second ago; None if that is not known."""
        read_at, zone = self._zone
        if time.monotonic() - read_at > ZONE_READ_EVERY:
            self._zone = time.monotonic(), (zone := zone_of_beats(self._client, self.keys))
        return zone

    def _found(self, name: str, fields: StoredFields) -> StoredFields:
        """Return definition, meta, policy and since of an entry that was read."""
        if isinstance(fields, str):
            raise EntryError(f"entry {name!r} cannot be used: its key holds something else: {fields}")
        if not fields[0]:
            raise self._unknown(name)
        found: StoredFields = fields[:4]
        return found

    def _unknown(self, name: str) -> UnknownEntryError:
        """Return the error about an entry that does not exist, which says whether the entry is parked."""
        text = f"there is no entry {name!r} under {self.keys.prefix}"
        if (until := self.parked_until(name)) is not None:
            text += (
                f": beat_schedule has dropped it: it is parked until {until:%Y-%m-%d %H:%M:%SZ}. If beat_schedule has "
                "it again by then, it comes back with its past"
            )
        return UnknownEntryError(text + self.meant_instead(name))

    def meant_instead(self, name: str) -> str:
        """Return that a name is the key of an entry, and which name that entry has; empty if it is none."""
        meant = self.keys.name(name)
        if meant != name and self.keys.is_possible(meant):
            with suppress(ResponseError):  # the key of another program, or one that is denied
                return f": {name} is the key of the entry {meant!r}" if self._client.hget(name, "definition") else ""
        return ""

    def parked_until(self, name: str) -> datetime | None:
        """Return until when an entry is kept that ``beat_schedule`` has dropped, None if it is not.

        If it was stored again since then, as by a revert, the last record is another one.
        """
        left = self._client.pttl(self.keys.parked(name))
        if left <= 0 or any(change.action != "park" for change in self.changes(name, 1)):
            return None
        return self._now() + timedelta(milliseconds=left)

    def _change_policy(
        self, name: str, wishes: Mapping[str, Any], *, action: str, note: str = "", ends_pause: bool = False
    ) -> EntryPolicy:
        """Change some options of an entry's policy, and nothing else in the entry; return the policy before.

        Args:
            action: what this does to the entry, for the record of the change.
            note: the same.
            ends_pause: its next run counts from now; an entry that is not paused stays as it is.
        """
        key = self.keys.named(name)
        check_encodable("note", note)
        for _ in range(ATTEMPTS):
            fields = read_fields(self._client, [key])[0]
            if isinstance(fields, str) or not fields[0]:
                raise self._unknown(name)
            definition, _, policy, _ = found = fields[:4]
            stored = EntryPolicy.decode(policy or "")
            if ends_pause and not stored.paused:
                return stored
            meta, since, score = self._pass_times(name, fields) if ends_pause else _UNCHANGED
            wanted = (definition, meta, replace(stored, **wishes).encode(), since)
            row = (key, found, wanted, score)
            if write_fields(self._client, self.keys, [row], self.author, action=action, note=note)[0]:
                return stored
        raise ConflictError(f"entry {name!r} cannot be stored: another process keeps changing it; try again")

    def _pass_times(self, name: str, fields: StoredFields) -> _Past:
        """Return ``meta``, ``since`` and the score of an entry that is resumed now, as ``save.lua`` takes them.

        The leader lets the times of a paused entry pass. Times that came while no beat led pass here.
        """
        now, score = self._now(), self._client.zscore(self.keys.schedule, self.keys.named(name))
        try:
            entry = self._entry(name, fields)
            before, past = entry.meta, entry.timetable.passed(entry.meta, now)
            due_at = entry.timetable.due_at(past.counts_from, now)
        except Exception:  # the entry is unusable; a user's own schedule may raise anything
            try:
                before, due_at = Meta.decode(fields[1] or None, fields[3] or None, fields[5]), None
            except EntryError:
                return _UNCHANGED
            past, score = before.counting_from(now, now), None
        if past == before:
            return _UNCHANGED
        at = "" if score is None or score < 0 else repr(PARKED if due_at is None else due_at.timestamp())
        return _Past(False if fields[1] else past.encode(), past.encode_since(), at)

    def _last_change(self) -> str:
        """Return the id of the last change of any entry, 0-0 if there is none."""
        with suppress(ResponseError):  # another program has spoilt the key
            for last, _ in self._client.xrevrange(self.keys.changes, count=1):
                return str(last)
        return "0-0"

    def _propose(
        self, name: str, occurrence: Occurrence | None, timeout: float, *, found: str = "", at: str = ""
    ) -> None:
        key, deadline = self.keys.named(name), time.monotonic() + timeout
        known = self._last_change()
        args = (key, *((occurrence.id, occurrence.encode()) if occurrence else ("", "")), found, at, name, known)
        while (verdict := PROPOSE(self._client, [key, self.keys.pending, self.keys.changes], args)) == "pending":
            if time.monotonic() >= deadline:
                raise ConflictError(
                    f"entry {name!r} has an occurrence that was not sent within {timeout:g} s; for the reason: "
                    f"{command_line('explain', name)}"
                )
            time.sleep(POLL_INTERVAL)
        if verdict == "missing":
            raise UnknownEntryError(
                f"{self._unknown(name)}. It was removed meanwhile; an earlier try may have been sent: see celery "
                "singlebeat history"
            )
        if verdict == "anew":
            raise ConflictError(
                f"entry {name!r} was removed meanwhile, and stored anew; an earlier try may have been sent: see celery "
                "singlebeat history before you repeat it"
            )
        if verdict == "moved" and occurrence is not None:
            raise ConflictError(f"entry {name!r}: its backfill was cancelled, or another call goes on with it")
