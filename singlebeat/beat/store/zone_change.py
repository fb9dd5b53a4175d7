"""The places of entries in the schedule, recomputed when the zone of the app has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ...log import Log
from ...lua import script
from ..calendar.zone import app_zone
from ..entries.entry import Entry
from ..entries.fields import BATCH, read_fields
from ..keys import Keys

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient
    from ..calculating_time import CalculatingTime
    from ..leadership.lease import Term

__all__ = ("Places",)

log = Log("celery.beat")


class Places:
    """The places of an app's entries, computed in the app's zone.

    A leader whose zone differs from the zone of the leader before (a deploy has changed ``timezone``, or runs beside
    the old one) recomputes all places before its first claim. An entry counts on from its last run, so that no handover
    loses or repeats a run.

    Args:
        client: the client for the schedule.
        progress: called at each step.
        calculating_time: for expensive entries. Those that must wait are due at once, so that ticks calculate their
            times.
    """

    def __init__(
        self, app: Celery, client: RedisClient, *, progress: Callable[[], None], calculating_time: CalculatingTime
    ) -> None:
        self.app, self.client, self.keys, self._progress = app, client, Keys.of(app), progress
        self._time = calculating_time

    def renew(self, before: str | None, now: datetime, term: Term) -> None:
        """Move the entries that wait for a wall clock of the app's zone, unless another beat leads by now.

        Args:
            before: the zone in which the places were computed, None if it is not known.
        """
        keys, zone, moved, cursor = self.keys, str(app_zone(self.app)), 0, None
        touched = (keys.lock or keys.lease.leader, keys.schedule, keys.zone)
        while cursor != 0:
            self._progress()
            cursor, found = self.client.zscan(keys.schedule, cursor or 0, count=BATCH)
            # The tick checks due entries in any case.
            waiting = {member: score for member, score in found if score < 0 or score > now.timestamp()}
            places = [*self._earlier_places(waiting, now)] if waiting else []
            args = [text for member, score in places for text in (repr(score), member)]
            if not script(__package__, "place")(self.client, touched, (term.token, "" if cursor else zone, *args)):
                return
            moved += len(places)
        if before is not None:
            about = {"before": before, "zone": zone, "moved": moved}
            log.warning(
                "beat: Wall clocks are read in %(zone)s, no longer in %(before)s", event="zone_changed", **about
            )

    def _earlier_places(self, waiting: dict[str, float], now: datetime) -> Iterator[tuple[str, float]]:
        """Yield the entries whose places are too late, and their new places."""
        members: Sequence[str] = list(waiting)
        entries = [self.keys.entry(member) for member in members]
        rows = read_fields(self.client, entries)
        for member, key, fields in zip(members, entries, rows, strict=True):
            self._progress()
            try:
                definition = fields[0] or ""
                due_at = self._due_at(Entry.from_fields(key, *fields[:4], app=self.app), definition, now)
            except Exception:  # a tick logs what is wrong with the entry  # noqa: S112
                continue
            if due_at is not None and (waiting[member] < 0 or due_at.timestamp() < waiting[member]):
                yield member, due_at.timestamp()

    def _due_at(self, entry: Entry, definition: str, now: datetime) -> datetime | None:
        """Return when an entry is due next by a wall clock of its app, None if none decides that."""
        policy, past = entry.policy, entry.meta
        is_finished = policy.max_runs is not None and past.total_run_count >= policy.max_runs
        if is_finished or past.counts_from is None or not entry.reads_clock_of_app:
            return None
        if not self._time.has_for(definition, entry):
            return now
        with self._time.spent_on(definition, entry):
            return entry.timetable.due_at(past.counts_from, now)
