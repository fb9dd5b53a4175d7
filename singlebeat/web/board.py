"""What views read: the schedule of an app and what is around it, each read once for all viewers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule

from ..beat.calendar.zone import app_zone
from ..beat.entries.policy import EntryPolicy
from ..beat.explain import explain
from ..beat.schedule import Schedule
from ..beat.status import ScheduleStatus
from ..beat.store.history import Record
from ..diagnosis.doctor import Finding, findings, left_out
from ..diagnosis.facts import facts_of
from ..diagnosis.locks import locks_of
from ..diagnosis.workers import BrokerError, Workers
from .poller import Poller, Snapshot
from .render import span

if TYPE_CHECKING:
    from datetime import tzinfo

    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..beat.entries.entry import Entry
    from ..beat.explain import HeldLock

__all__ = ("Board", "EntryRow", "Rows")

#: Decisions in the strip of an entry in the list, and in the timeline of its own page.
IN_STRIP, IN_TIMELINE = 30, 50

#: Seconds for which the answers of workers serve all viewers: to ask them takes one.
WORKERS_KEPT = 10.0

#: Locks that the page shows at most.
MOST_LOCKS = 1000


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One entry in the list."""

    name: str
    entry: Entry | None  #: None if it cannot be read
    why: str  #: why beat cannot use it; empty if it can
    state: str
    next: datetime | None
    records: Sequence[Record]  #: latest first
    is_static: bool  #: it comes from beat_schedule


@dataclass(frozen=True, slots=True)
class Rows:
    """One page of the list."""

    rows: Sequence[EntryRow]
    total: int
    cursor: str  #: of the next page; empty at the end


class Board:
    """The schedule of an app as views read it.

    Args:
        hide_arguments: show no arguments of tasks at all.
    """

    def __init__(self, app: Celery, *, hide_arguments: bool = False) -> None:
        self.app, self.hide_arguments = app, hide_arguments
        self.poller = Poller(app)

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
        """The zone in which schedules without one of their own are read."""
        return app_zone(self.app)

    def zone_of(self, entry: Entry | None) -> tzinfo:
        """Return the zone in which an entry's schedule is read."""
        own: ZoneInfo | None = entry.policy.timezone if entry is not None else None
        return own or self.zone

    def schedule(self) -> Schedule:
        """Return the schedule, to read."""
        return Schedule(self.app)

    def shown(self, arguments: object) -> object:
        """Return arguments as they may be shown."""
        return arguments

    def is_static(self, name: str) -> bool:
        """Return whether an entry comes from the code: ``beat_schedule`` replaces changes of its definition."""
        return name in map(str, self.app.conf.beat_schedule)

    def page(self, *, search: str, task: str, state: str, tag: str, sort: str, cursor: str, size: int) -> Rows:
        """Return one page of the entries."""
        key = ("page", search, task, state, tag, sort, cursor, size)
        rows: Rows = self.poller.shared(
            key, lambda: self._page(search=search, task=task, state=state, tag=tag, sort=sort, cursor=cursor, size=size)
        )
        return rows

    def _page(self, *, search: str, task: str, state: str, tag: str, sort: str, cursor: str, size: int) -> Rows:
        found, now = dict[str, EntryRow](), self.now
        unusable = dict[str, str]()
        quarantine = {name: record["reason"] for name, record in self.state.quarantine.items()}
        entries = self.schedule()
        for entry in entries.list(left_out=lambda name, why: unusable.update({name: str(why)})):
            why = quarantine.get(entry.name) or entry.why_unusable(now)
            upcoming, word = _outlook(entry, now) if not why else (None, "quarantined")
            found[entry.name] = EntryRow(entry.name, entry, why, word, upcoming, (), self.is_static(entry.name))
        for name, why in (quarantine | unusable).items():
            found.setdefault(name, EntryRow(name, None, why, "quarantined", None, (), self.is_static(name)))
        kept = [
            row
            for row in found.values()
            if (not search or search.lower() in row.name.lower() or (row.entry and search in row.entry.task))
            and (not task or (row.entry is not None and row.entry.task == task))
            and (not state or row.state == state)
            and (not tag or tag in tags_of(row.entry))
        ]
        far = datetime.max.replace(tzinfo=UTC)
        if sort == "name":
            kept.sort(key=lambda row: row.name)
        elif sort == "last":
            kept.sort(key=lambda row: _last(row.entry), reverse=True)
        else:
            kept.sort(key=lambda row: row.next or far)
        start = int(cursor) if cursor.isdecimal() else 0
        page = kept[start : start + size]
        histories = self.histories([row.name for row in page], IN_STRIP)
        page = [
            EntryRow(row.name, row.entry, row.why, row.state, row.next, histories[row.name], row.is_static)
            for row in page
        ]
        return Rows(page, len(kept), str(start + size) if start + size < len(kept) else "")

    def histories(self, names: Sequence[str], count: int) -> Mapping[str, Sequence[Record]]:
        """Return the last decisions about each of some entries, latest first."""
        entries = self.schedule()
        return {name: entries.history(name, count) for name in names}

    def outlook(self, entry: Entry) -> tuple[datetime | None, str]:
        """Return the next time of an entry, None if there is none, and a word for its state."""
        return _outlook(entry, self.now)

    def history(self, name: str, count: int) -> Sequence[Record]:
        """Return the last decisions about one entry, or about all if there is no name, latest first."""
        records: Sequence[Record] = self.poller.shared(
            ("history", name, count), lambda: self.schedule().history(name or None, count)
        )
        return records

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
        sentences: Sequence[str] = self.poller.shared(
            ("explain", name), lambda: [*explain(facts_of(self.app, name, None))], seconds=WORKERS_KEPT
        )
        return sentences

    def doctor(self) -> Sequence[Finding]:
        """Return the findings of all checks, which take some seconds."""

        def check() -> Sequence[Finding]:
            found, error = findings(self.app)
            return [left_out(self.app, error), *found] if error is not None else found

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


def raw_schedule(when: BaseSchedule) -> str:
    """Return a schedule in its own notation."""
    if isinstance(when, crontab):
        names = ("_orig_minute", "_orig_hour", "_orig_day_of_month", "_orig_month_of_year", "_orig_day_of_week")
        return " ".join(str(getattr(when, name)) for name in names)
    return f"{when.run_every.total_seconds():g} s" if type(when) is schedule else str(when)


def in_words(when: BaseSchedule) -> str:
    """Return a schedule in words."""
    return f"every {span(when.run_every.total_seconds())}" if type(when) is schedule else raw_schedule(when)


def policy_of(entry: Entry) -> Mapping[str, Any]:
    """Return the options of an entry's policy that are no defaults, as in JSON."""
    found: Mapping[str, Any] = json.loads(entry.policy.encode() or "{}")
    return found


def tags_of(entry: Entry | None) -> Sequence[str]:
    """Return the tags of an entry."""
    return getattr(entry.policy, "tags", None) or () if entry is not None else ()


def _last(entry: Entry | None) -> datetime:
    last = entry.meta.last_run if entry is not None else None
    return last or datetime.min.replace(tzinfo=UTC)


def _outlook(entry: Entry, now: datetime) -> tuple[datetime | None, str]:
    upcoming: Any = None
    with suppress(Exception):  # of a user's own schedule; its quarantine record has the reason
        upcoming = next(iter(entry.timetable.runs(entry.meta.counts_from, now, count=entry.meta.total_run_count)), None)
    if not entry.enabled:
        return upcoming, "disabled"
    if entry.policy.paused:
        return upcoming, "paused"
    return upcoming, "on" if upcoming else "finished"


#: The fields of a policy, in the order of the form.
POLICY_FIELDS = tuple(sorted(EntryPolicy.names()))
