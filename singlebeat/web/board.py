"""What views read: the schedule of an app and what is around it, each read once for all viewers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from celery.schedules import crontab

from ..beat.calendar.zone import app_zone, zone_of_text
from ..beat.entries.policy import EntryPolicy
from ..beat.explain import explain
from ..beat.schedule import Schedule
from ..beat.status import ScheduleStatus
from ..beat.store.history import Record
from ..diagnosis.doctor import Finding, Read, findings
from ..diagnosis.facts import facts_of, with_pauses
from ..diagnosis.locks import locks_of
from ..diagnosis.workers import BrokerError, Workers
from ..errors import ConflictError
from ..masking import IN_TEXT, MASK, Faces, masked, masked_text, unmasked
from .poller import Poller, Snapshot
from .problems import problem_of

if TYPE_CHECKING:
    from datetime import tzinfo

    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..beat.entries.entry import Entry
    from ..beat.entries.pauses import Pause
    from ..beat.explain import HeldLock
    from ..beat.page import Page
    from ..beat.store.changes import Change
    from .security import User

__all__ = ("Board", "EntryPage")

#: Decisions in the strip of an entry in the list, and in the timeline of its own page.
IN_STRIP, IN_TIMELINE = 30, 50

#: Seconds for which the answers of workers serve all viewers: to ask them takes one.
WORKERS_KEPT = 10.0

#: Seconds after which no further times of an entry are calculated: they may be very many, or expensive.
CALCULATED_FOR = 2.0

#: Backfills that are remembered.
MOST_BACKFILLS = 100

#: Locks that the page shows at most.
MOST_LOCKS = 1000

#: The fields of a definition that may hold arguments.
IN_CALL = ("args", "kwargs", "options")

#: The parts of an entry that hold no arguments but those of calls in its options.
WITHOUT_ARGUMENTS = frozenset({"task", "schedule", "enabled", "options", "policy", *EntryPolicy.names()})

#: The fields of a call and of a message that hold or show its arguments.
ARGUMENTS = frozenset({"args", "kwargs", "argsrepr", "kwargsrepr"})


class EntryPage(NamedTuple):
    """One page of the list."""

    page: Page
    histories: Mapping[str, Sequence[Record]]  #: the last decisions of each of its entries, latest first


@dataclass(slots=True)
class Backfill:
    """A backfill that was begun here."""

    total: int
    count: int = 0  #: runs that were handed to beat
    is_over: bool = False
    problem: str = ""  #: why it ended early

    def step(self) -> None:
        """Count a run."""
        self.count += 1


class Board:
    """The schedule of an app as views read it.

    Args:
        hide_arguments: show no arguments of tasks at all.
        read_only: write nothing in Redis.
    """

    def __init__(self, app: Celery, *, hide_arguments: bool = False, read_only: bool = False) -> None:
        self.app, self.hide_arguments = app, hide_arguments
        self.poller = Poller(app, may_write=not read_only)
        self.backfills: dict[str, Backfill] = {}
        self._backfilling = threading.Lock()

    @property
    def snapshot(self) -> Snapshot:
        """The state of the schedule."""
        return self.poller.snapshot()

    @property
    def state(self) -> ScheduleStatus:
        """The state of the schedule; read anew, with the server's error, if there is none."""
        return self.snapshot.state or ScheduleStatus.of(self.app)

    @property
    def now(self) -> datetime:
        """The time of the schedule's server."""
        snapshot = self.snapshot
        if snapshot.state is None:
            return datetime.fromtimestamp(self.state.now, UTC)
        return datetime.fromtimestamp(snapshot.state.now + time.monotonic() - snapshot.read_at, UTC)

    @property
    def zone(self) -> tzinfo:
        """The zone in which beats read schedules without one of their own; this process's if it is not known."""
        return zone_of_text(self.state.zone) or app_zone(self.app)

    def zone_of(self, entry: Entry | None) -> tzinfo:
        """Return the zone in which an entry's schedule is read."""
        own: ZoneInfo | None = entry.policy.timezone if entry is not None else None
        return own or self.zone

    def schedule(self, user: User | None = None, *, by: str = "web") -> Schedule:
        """Return the schedule, whose changes are recorded as those of a user."""
        name = user.name if user is not None and user.name else "page"
        return Schedule(self.app, actor=name, by=by)

    def begin_backfill(
        self, entries: Schedule, name: str, start: datetime, end: datetime, overlap: str, total: int
    ) -> None:
        """Hand the runs of a backfill to beat in a thread: each waits until the one before it is sent.

        Raises:
            ConflictError: a backfill of the entry is not finished.
        """
        begun = Backfill(total)
        with self._backfilling:
            if (other := self.backfills.get(name)) is not None and not other.is_over:
                raise ConflictError(f"a backfill of {name!r} is not finished")
            self.backfills[name] = begun
            while len(self.backfills) > MOST_BACKFILLS:
                self.backfills.pop(next(iter(self.backfills)))

        def hand_over() -> None:
            try:
                entries.backfill(name, start, end, overlap=overlap, limit=total, progress=begun.step)
            except Exception as exc:  # is shown beside the entry: the thread has no caller
                begun.problem = problem_of(self.app, exc).text
            finally:
                begun.is_over = True

        threading.Thread(target=hand_over, name="singlebeat-backfill", daemon=True).start()

    def masked_text(self, text: str, task: str = "") -> str:
        """Return the arguments of a call, as a string, as they may be shown."""
        return "hidden" if self.hide_arguments else masked_text(text, self.app, task=task)

    def shown_call(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a definition, args, kwargs and options as they may be shown."""
        call = {name: fields[name] for name in ("task", *IN_CALL) if name in fields}
        with suppress(RecursionError):
            found = masked(without_arguments(call) if self.hide_arguments else call, self.app)
            if isinstance(found, Mapping):  # else it is nested too deeply
                return found
        return dict.fromkeys(call, MASK)

    def unmasked_call(
        self, given: Mapping[str, Any], stored: Mapping[str, Any], *, is_partial: bool = False
    ) -> Mapping[str, Any]:
        """Return the given args, kwargs and options with the stored value in the place of each mask.

        Args:
            given: fields of a definition, of which args, kwargs and options may hold masks.
            stored: those of the stored definition, or of the one that is copied.
            is_partial: fields that are not given stay as they are stored: as if they were sent back as they were shown.

        Raises:
            MaskError: a mask cannot be replaced, or the value that it stands for would be shown.
        """
        old = {"args": [], **{name: stored[name] for name in ("task", *IN_CALL) if name in stored}}
        shown = self.shown_call(old)
        sent = {"args": [], **(shown if is_partial else {}), **given}
        call = {name: sent[name] for name in ("task", *IN_CALL) if name in sent}
        before = Faces(old, shown, masked(old, self.app))
        found = unmasked(call, before, MASK)
        unmasked(call, before, masked(found, self.app))  # again, to check that all stay masked
        return {name: found[name] for name in IN_CALL if name in given}

    def differences(self, change: Change) -> Mapping[str, tuple[str, str]]:
        """Return the parts of an entry that a change has changed, before and after, as they may be shown."""
        found = {}
        for part, (before, after) in change.masked_differences(self.app).items():
            # A field that no entry has may be one of arguments, with its name mistyped by another program.
            is_hidden = self.hide_arguments and bool(change.entry) and part not in WITHOUT_ARGUMENTS
            found[part] = self._as_text(before, is_hidden=is_hidden), self._as_text(after, is_hidden=is_hidden)
        return found

    def _as_text(self, value: object, *, is_hidden: bool) -> str:
        if value is None:
            return ""
        if is_hidden:
            return "hidden"
        if self.hide_arguments:
            value = without_arguments(value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    def many_paused(self, entry: Entry | None) -> Pause | None:
        """Return the pause of many entries that covers an entry, None if there is none."""
        return self.state.pause_over(entry.policy) if entry is not None else None

    def is_static(self, name: str) -> bool:
        """Return whether an entry comes from the code: ``beat_schedule`` replaces changes of its definition."""
        return name in map(str, self.app.conf.beat_schedule)

    def page(self, **query: Any) -> EntryPage:
        """Return one page of the entries, with the strips of its rows; arguments as of ``Schedule.page``."""

        def read() -> EntryPage:
            page = self.schedule().page(**query)
            return EntryPage(page, self.histories([row.name for row in page.rows], IN_STRIP))

        found: EntryPage = self.poller.shared(("page", *query.items()), read)
        return found

    def histories(self, names: Sequence[str], count: int) -> Mapping[str, Sequence[Record]]:
        """Return the last decisions about each of some entries, latest first."""
        return self.schedule().histories(names, count)

    def history(self, name: str, count: int) -> Sequence[Record]:
        """Return the last decisions about one entry, or about all if there is no name, latest first.

        Of one entry, decisions that lie behind very many others are left out: a page must not search all of them.
        """

        def read() -> Sequence[Record]:
            entries = self.schedule()
            found = entries.histories([name], count)[name] if name else entries.history(None, count)
            return with_pauses(entries, found, name or None)

        records: Sequence[Record] = self.poller.shared(("history", name, count), read)
        return records

    def changes(self, name: str, count: int) -> Sequence[Change]:
        """Return the last changes of one entry, or of all if there is no name, latest first."""
        changes: Sequence[Change] = self.poller.shared(
            ("changes", name, count), lambda: self.schedule().changes(name or None, count)
        )
        return changes

    def workers(self) -> Workers | None:
        """Return the answers of the workers, which may be some seconds old; None if the broker does not answer."""

        def ask() -> Workers | None:
            with suppress(BrokerError):
                return Workers.ask(self.app)
            return None

        workers: Workers | None = self.poller.shared("workers", ask, seconds=WORKERS_KEPT)
        return workers

    def explain(self, name: str) -> Sequence[str]:
        """Return why an entry ran, did not run, or will run; asks the workers, which takes a second."""
        # Kept for a moment only: some sentences hold for the moment at which they were read.
        sentences: Sequence[str] = self.poller.shared(
            ("explain", name), lambda: [*explain(facts_of(self.app, name, None))]
        )
        return sentences

    def doctor(self) -> Sequence[Finding]:
        """Return the findings of all checks, which take some seconds."""

        def check() -> Sequence[Finding]:
            return [*findings(Read(self.app))]

        found: Sequence[Finding] = self.poller.shared("doctor", check, seconds=WORKERS_KEPT)
        return found

    def locks(self) -> Sequence[tuple[Mapping[str, str], HeldLock]]:
        """Return the held locks with their records, ``MOST_LOCKS`` at most."""

        def read() -> Iterator[tuple[Mapping[str, str], HeldLock]]:
            for number, (_, record, lock) in enumerate(locks_of(self.app)):
                if number >= MOST_LOCKS:
                    return
                yield record, lock

        found: Sequence[tuple[Mapping[str, str], HeldLock]] = self.poller.shared("locks", lambda: [*read()])
        return found


def without_arguments(value: Any) -> Any:
    """Return a value with the arguments of each call in it masked: also of the calls in options, such as ``link``."""
    if isinstance(value, Mapping):
        return {
            name: masked_whole(each)
            if name in ARGUMENTS
            else _calls_without_arguments(each)
            if name in IN_TEXT
            else without_arguments(each)
            for name, each in value.items()
        }
    return [without_arguments(each) for each in value] if isinstance(value, list | tuple) else value


def _calls_without_arguments(value: Any) -> Any:
    """Return one call or several without their arguments; what is no call, such as a string, is masked as a whole."""
    if isinstance(value, list | tuple):
        return [_calls_without_arguments(each) for each in value]
    return without_arguments(value) if isinstance(value, Mapping) or value is None else MASK


def masked_whole(value: Any) -> Any:
    """Return a value with every part masked, so that a form can keep the stored parts."""
    if isinstance(value, Mapping):
        return dict.fromkeys(value, MASK)
    return [MASK] * len(value) if isinstance(value, list | tuple) else MASK


def raw_schedule(when: BaseSchedule) -> str:
    """Return the fields of a crontab; an empty string for other schedules, whose words say it all."""
    if not isinstance(when, crontab):
        return ""
    names = ("_orig_minute", "_orig_hour", "_orig_day_of_month", "_orig_month_of_year", "_orig_day_of_week")
    return " ".join(str(getattr(when, name)) for name in names)


def policy_of(entry: Entry) -> Mapping[str, Any]:
    """Return the options of an entry's policy that are no defaults, as in JSON."""
    found: Mapping[str, Any] = json.loads(entry.policy.encode() or "{}")
    return found


def tags_of(entry: Entry | None) -> Sequence[str]:
    """Return the tags of an entry."""
    return getattr(entry.policy, "tags", None) or () if entry is not None else ()


#: The fields of a policy, in the order of the form.
POLICY_FIELDS = tuple(sorted(EntryPolicy.names()))
