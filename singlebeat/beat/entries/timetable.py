"""The times of one entry: its schedule within the bounds of its policy; pure, time is an argument."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING

from celery.schedules import crontab
from redbeat.schedules import rrule

from ...errors import EntryError
from ..calendar.clocked import clocked, comes_once
from ..calendar.recurrence import is_known, latest_occurrence, next_occurrence, starts_at
from ..calendar.zone import in_utc, known_zone, named_zone
from .definition import LONGEST_STEP_BACK, Meta
from .policy import EntryPolicy

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from celery.schedules import BaseSchedule

__all__ = (
    "EPOCH",
    "PARKED",
    "TICK",
    "Timetable",
    "as_listed",
    "is_listed_as_disabled",
    "is_listed_from_redis",
    "listed_policy",
    "on_its_clock",
    "zone_of",
)

#: The score of an entry that is never due, because it has no next occurrence.
PARKED = -1.0

#: Name of the attribute that marks the schedule of a listed entry.
_LISTED = "_singlebeat_listed"

#: Its value for a schedule that was not listed: policy, whether ``beat_schedule`` has the entry, whether it is enabled.
_NOT_LISTED = (None, True, True)

#: The shortest step of a nominal time.
TICK = timedelta(microseconds=1)

#: A moment before all nominal times.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def zone_of(schedule: BaseSchedule, app_zone: tzinfo = UTC) -> ZoneInfo | None:
    """Return the zone of an rrule's ``dtstart`` or of a schedule's clock, None if it is not a named zone.

    Raises:
        EntryError: the zone has no name, shifts its clocks and is not the app's: JSON could not hold it.
    """
    now = getattr(schedule, "nowfun", None)
    moment = getattr(schedule, "dtstart", None) or (now() if now else None)
    own = moment.tzinfo if isinstance(moment, datetime) else None
    if own is None or (named := named_zone(own)) is not None:
        return None if own is None else named
    found = known_zone(own)
    if found is None or (found.utcoffset(None) is None and found != app_zone):
        raise EntryError(
            f"the zone of its schedule, {own!r}, has neither an IANA name nor a fixed offset: give the entry a "
            "timezone, like Europe/Berlin"
        )
    return None


def on_its_clock(schedule: BaseSchedule, zone: ZoneInfo | None) -> BaseSchedule:
    """Return a schedule whose ``tz`` is the zone in which it is read: monitors such as Sentry Crons use ``tz``."""
    return schedule if zone is None or not isinstance(schedule, crontab) else _with(schedule, tz=zone)


def as_listed(schedule: BaseSchedule, policy: EntryPolicy, *, is_static: bool, enabled: bool) -> BaseSchedule:
    """Return the schedule of an entry for a tool that lists entries, and may add them to ``beat_schedule`` again.

    Such a tool knows neither policy nor ``enabled``, so the schedule carries them.

    Args:
        is_static: ``beat_schedule`` has the entry.
        enabled: whether the entry is enabled in ``beat_schedule``, or in Redis if it is not in ``beat_schedule``.
    """
    if not is_known(schedule):  # such a schedule is recognised by its identity
        return schedule
    return _with(on_its_clock(schedule, policy.timezone), **{_LISTED: (policy, is_static, enabled)})


def listed_policy(schedule: BaseSchedule) -> EntryPolicy | None:
    """Return the policy that the schedule of a listed entry carries, or None."""
    policy: EntryPolicy | None = getattr(schedule, _LISTED, _NOT_LISTED)[0]
    return policy


def is_listed_from_redis(schedule: BaseSchedule) -> bool:
    """Return whether a schedule comes from a listed entry that ``beat_schedule`` did not have."""
    return not getattr(schedule, _LISTED, _NOT_LISTED)[1]


def is_listed_as_disabled(schedule: BaseSchedule) -> bool:
    """Return whether a schedule comes from a listed entry that is disabled."""
    return not getattr(schedule, _LISTED, _NOT_LISTED)[2]


def _with(schedule: BaseSchedule, **attributes: object) -> BaseSchedule:
    """Return a copy with other attributes. Celery's own copy parses a crontab again; RedBeat's rrule has no copy."""
    same = object.__new__(type(schedule))
    vars(same).update(vars(schedule), **attributes)
    return same


@dataclass(frozen=True, slots=True)
class Timetable:
    """The nominal times of an entry, and the times when its runs are due, which jitter may delay.

    A user's own schedule class may take long to answer, so it is asked for the time after a moment once.
    """

    name: str
    schedule: BaseSchedule
    policy: EntryPolicy
    zone: tzinfo  #: of the app, for an entry that has no zone of its own
    _answers: dict[datetime, datetime | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def since(self, counts_from: datetime | None) -> datetime | None:
        """Return the moment after which its next nominal time lies, None if it is due now because it has never run.

        A schedule that comes once is never due before its instant.
        """
        return EPOCH if counts_from is None and comes_once(self.schedule) else counts_from

    def _read(self) -> tuple[BaseSchedule, tzinfo]:
        """Return the schedule, and the zone on whose wall clock it is read."""
        zone = self.policy.timezone
        if zone is None or not isinstance(self.schedule, rrule):
            return self.schedule, zone or self.zone
        return _with(self.schedule, dtstart=self.schedule.dtstart.astimezone(zone)), zone

    def _next_after(self, moment: datetime) -> datetime | None:
        """Return the first time of the schedule after a moment, within the bounds of its policy or not."""
        moment = in_utc(moment)
        if moment not in self._answers:
            schedule, zone = self._read()
            self._answers[moment] = next_occurrence(schedule, moment, zone=zone)
        return self._answers[moment]

    def next(self, after: datetime) -> datetime | None:
        """Return the first nominal time after a moment, None if there is none."""
        start, end = self.policy.start_time, self.policy.end_time
        if start is not None and after < start:
            schedule, zone = self._read()
            nominal = starts_at(schedule, start, zone=zone)
        else:
            nominal = self._next_after(after)
        return nominal if nominal is None or end is None or nominal <= end else None

    def latest(self, after: datetime, until: datetime) -> datetime | None:
        """Return the last nominal time later than ``after`` and not later than ``until``, or None."""
        start, end = self.policy.start_time, self.policy.end_time
        until = until if end is None else min(until, end)
        if start is not None and after < start:
            first = self.next(after)
            if first is None or first > until:
                return None
            return latest_occurrence(self._next_after, first, until) or first
        return latest_occurrence(self._next_after, after, until)

    def without_passed(self, counts_from: datetime | None, now: datetime) -> datetime:
        """Return the moment from which an entry counts whose times that have passed are not made up for.

        It is the last of these times: an interval keeps its pace. An entry without a past, or with that of a wrong
        clock, counts from now.

        Args:
            counts_from: the moment from which the entry counts if they are made up for; None: it has never run.
        """
        if counts_from is not None and counts_from > now + LONGEST_STEP_BACK:
            return now
        since = self.since(counts_from)
        passed = None if since is None else self.latest(since, now)
        if since is not None and passed is not None and self.due(passed) > now:  # jitter delays it: it is yet to come
            passed = self.latest(since, passed - TICK)
        return passed or counts_from or now

    def first_at(self, place: datetime, now: datetime) -> datetime | None:
        """Return the nominal time that an entry runs for which has never run, because it is due; None if it never is.

        A schedule's times count from its place. Only if that is when its start is due, they count from its start:
        jitter must not move them.

        Args:
            place: its place in the schedule, which may be any time.
        """
        start = self.policy.start_time
        first = None if start is None else self.next(max(start, EPOCH) - TICK)
        since = first if first is not None and self.due(first) == place else place
        return self.bounded(self.overdue(since, now) or since)

    def bounded(self, nominal: datetime) -> datetime | None:
        """Return a time that does not come from the schedule as a nominal time within the bounds of the policy.

        A time before the start becomes the first nominal time, a time after the end becomes None.
        """
        start, end = self.policy.start_time, self.policy.end_time
        if start is not None and nominal < start:
            return self.next(nominal)
        return nominal if end is None or nominal <= end else None

    def why_without_time(self) -> str:
        """Return why the only time of a ``clocked`` schedule is out of the bounds of the policy; empty if it is not."""
        if not isinstance(self.schedule, clocked):
            return ""
        instant, start, end = self.schedule.isoformat(), self.policy.start_time, self.policy.end_time
        if start is not None and self.schedule.instant < start:
            return f"it would never run: its instant, {instant}, is before its start_time: remove start_time"
        if end is not None and self.schedule.instant > end:
            return f"it would never run: its instant, {instant}, is after its end_time: remove end_time"
        return ""

    def why_over(self, since: datetime | None, now: datetime, *, count: int = 0) -> str:
        """Return why no run is to come; empty if one is.

        Args:
            since, now, count: as for ``runs``.
        """
        if next(self.runs(since, now, count=count), None) is not None:
            return ""
        end, most = self.policy.end_time, self.policy.max_runs
        if most is not None and count >= most:
            return f"it has run {count} {'time' if count == 1 else 'times'}, and max_runs is {most}"
        if isinstance(self.schedule, clocked):
            return f"its only time, {self.schedule.instant:%Y-%m-%d %H:%M:%SZ}, has passed"
        endless = replace(self, policy=replace(self.policy, end_time=None))
        if end is not None and next(endless.runs(since, now, count=count), None) is not None:
            return f"its end_time, {end.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}, comes before its next time"
        return "its schedule has no further time"

    def score(self, nominal: datetime | None) -> float:
        """Return the place in the schedule of a nominal time: seconds since 1970 when it is due, or PARKED."""
        return PARKED if nominal is None else self.due(nominal).timestamp()

    def due(self, nominal: datetime) -> datetime:
        """Return when the occurrence of a nominal time is to run: a hash of name and time gives the delay.

        The result is before the next nominal time even if the jitter is longer (in APScheduler it may be later), and
        not after the end.
        """
        if self.policy.jitter is None:
            return nominal
        span, limit = timedelta(seconds=self.policy.jitter), self.next(nominal) or self.policy.end_time
        if limit is not None:
            span = max(timedelta(), min(span, limit - nominal))
        seed = f"{self.name}\n{round(nominal.timestamp() * 1000)}".encode(errors="surrogateescape")
        part = int.from_bytes(hashlib.sha256(seed).digest()[:4])  # of 2**32
        return nominal + (span // TICK * part >> 32) * TICK  # rounded down: the next nominal time is never reached

    def due_at(self, counts_from: datetime | None, now: datetime) -> datetime | None:
        """Return when its next run is due, now if it is overdue or has never run; None if there is none."""
        since = self.since(counts_from)
        if since is None:
            return now
        nominal = self.next(since)
        return None if nominal is None else max(now, self.due(nominal))

    def overdue(self, after: datetime, now: datetime) -> datetime | None:
        """Return the last nominal time after a moment whose run is due by now, None if none is."""
        nominal = self.latest(after, now)
        if nominal is not None and self.due(nominal) > now:  # the nominal time before it is due in any case
            nominal = self.latest(after, nominal - TICK)
        return nominal

    def passed(self, past: Meta, until: datetime) -> Meta:
        """Return the past of an entry that was paused until a moment: runs missed before it are not made up for."""
        since = self.since(past.counts_from)
        nominal = until if since is None else self.overdue(since, until)
        return past if nominal is None else replace(past, since=nominal)

    def runs(self, since: datetime | None, now: datetime, *, count: int = 0) -> Iterator[datetime]:
        """Yield the nominal times of the runs to come; the first one is past if it is overdue.

        Args:
            since: moment after which its next nominal time lies; None: the entry has never run, and is due now.
            count: runs that the entry has had, for ``max_runs``.
        """
        left = None if self.policy.max_runs is None else self.policy.max_runs - count
        since = self.since(since)
        nominal = self.bounded(now) if since is None else self.overdue(since, now) or self.next(since)
        while nominal is not None and (left is None or left > 0):
            yield nominal
            left = None if left is None else left - 1
            nominal = self.next(nominal)
