"""What a shift of the clocks does to the times of a schedule, in words: pure, the time is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice
from typing import TYPE_CHECKING

from redbeat.schedules import rrule

from .recurrence import next_occurrence, reads_clock
from .rfc5545 import is_paced

if TYPE_CHECKING:
    from datetime import tzinfo

    from celery.schedules import BaseSchedule

__all__ = ("Shift", "effects", "shifts")

#: Times of a schedule that one sentence names.
MOST_NAMED = 3

TICK = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Shift:
    """A moment at which the clocks of a zone jump."""

    at: datetime  #: in UTC
    before: timedelta  #: how far the clocks are ahead of UTC until then
    after: timedelta  #: how far they are ahead of UTC from then on

    @property
    def skipped(self) -> timedelta:
        """How much of the wall clock is skipped; negative if it is repeated."""
        return self.after - self.before


def shifts(zone: tzinfo, start: datetime, days: int) -> Iterator[Shift]:
    """Yield the shifts of a zone within some days after a moment; two shifts within one day are seen as one."""
    moment = start.astimezone(UTC).replace(microsecond=0)
    for _ in range(days):
        following = moment + timedelta(days=1)
        if (before := _offset(moment, zone)) != (after := _offset(following, zone)):
            low, high = 0, 86_400
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (
                    (middle, high) if _offset(moment + timedelta(seconds=middle), zone) == before else (low, middle)
                )
            yield Shift(moment + timedelta(seconds=high), before, after)
        moment = following


def effects(schedule: BaseSchedule, zone: tzinfo, start: datetime, *, days: int = 366) -> Iterator[str]:
    """Yield a sentence for each shift of the clocks that changes the times of a schedule.

    Args:
        zone: on whose wall clock the schedule is read.
        start: only later shifts.
        days: only shifts within so many days.
    """
    is_rule = isinstance(schedule, rrule)
    if not reads_clock(schedule) or (is_rule and is_paced(schedule)):
        return
    for shift in shifts(zone, start, days):
        if sentence := _effect(schedule, zone, shift):
            yield sentence


def _effect(schedule: BaseSchedule, zone: tzinfo, shift: Shift) -> str:
    """Return what a shift does to the times of a schedule, an empty string if it does nothing."""
    old, new, length = timezone(shift.before), timezone(shift.after), abs(shift.skipped)
    day, clocks = shift.at.astimezone(old), f"{shift.at.astimezone(old):%H:%M} to {shift.at.astimezone(new):%H:%M}"
    if shift.skipped > timedelta():
        begin, end = shift.at, shift.at + length  # as long as the gap, by the clock that is not shifted
        asked = _between(_on(schedule, zone, old), old, begin, end)
        if not asked:
            return ""
        what = f"{day:%d %B %Y}: {_named(asked, old)} {'does' if len(asked) == 1 else 'do'} not exist"
        stands = _between(schedule, zone, begin, begin + TICK)
        is_own = bool(_between(_on(schedule, zone, new), new, begin, begin + TICK))
        then = f"it runs at {shift.at.astimezone(new):%H:%M}" if stands and not is_own else "there is no run for that"
        return f"{what}, because the clocks go from {clocks}: {then}"
    begin, end = shift.at - length, shift.at
    asked = _between(_on(schedule, zone, old), old, begin, end)
    if not asked:
        return ""
    again = _between(schedule, zone, shift.at, shift.at + length)
    how = "it runs both times" if again else "it runs the first time only"
    what = f"{day:%d %B %Y}: {_named(asked, old)} {'comes' if len(asked) == 1 else 'come'} twice"
    return f"{what}, because the clocks go from {clocks}: {how}"


def _between(schedule: BaseSchedule, zone: tzinfo, begin: datetime, end: datetime) -> Sequence[datetime]:
    """Return the times of a schedule from ``begin`` until before ``end``, of which there may be more than returned."""

    def times() -> Iterator[datetime]:
        moment = next_occurrence(schedule, begin - TICK, zone=zone)
        while moment is not None and moment < end:
            yield moment
            moment = next_occurrence(schedule, moment, zone=zone)

    return [*islice(times(), MOST_NAMED + 1)]


def _on(schedule: BaseSchedule, zone: tzinfo, fixed: tzinfo) -> BaseSchedule:
    """Return a schedule that is read on a clock which is never shifted."""
    if not isinstance(schedule, rrule):
        return schedule
    same = object.__new__(type(schedule))
    vars(same).update(vars(schedule), dtstart=schedule.dtstart.astimezone(zone).replace(tzinfo=fixed))
    return same


def _named(times: Sequence[datetime], zone: tzinfo) -> str:
    shown = [f"{moment.astimezone(zone):%H:%M}" for moment in times[:MOST_NAMED]]
    more = " and others" if len(times) > MOST_NAMED else ""
    return (f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 and not more else ", ".join(shown)) + more


def _offset(moment: datetime, zone: tzinfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()
