"""
When a schedule is next due: pure arithmetic, in which the time is always an argument.

Every answer is a *nominal* time, the instant at which the schedule asks for a run, in UTC. No step of the arithmetic is
made on a local time, because adding to a local time is off by the shift of the clocks when one lies in between.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from celery.schedules import BaseSchedule, crontab
from celery.schedules import schedule as interval
from celery.utils.time import remaining
from cronsim import CronSim, CronSimError

if TYPE_CHECKING:
    from datetime import tzinfo

__all__ = ["following", "latest_occurrence", "next_occurrence", "starts_at"]

ZERO = timedelta()
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
#: The longest shift that is a DST one; cron(8) takes any longer for a correction of the clock.
LONGEST_SHIFT = timedelta(hours=3)

#: Length of one period of an RFC 5545 rule, by the number that dateutil gives its frequency (WEEKLY ... SECONDLY).
RULE_PERIODS = {2: timedelta(weeks=1), 3: DAY, 4: timedelta(hours=1), 5: timedelta(minutes=1), 6: SECOND}


def next_occurrence(schedule: BaseSchedule, after: datetime, *, zone: tzinfo) -> datetime | None:
    """
    Return the first nominal time of `schedule` strictly after `after`, in UTC, or None when there is none.

    A crontab is read on the wall clock of `zone`, whatever its own `tz`; an rrule on that of its `dtstart`. A subclass
    with its own `remaining_estimate` is asked through it, as is any schedule of a kind unknown here.

    Raises:
        ValueError: the schedule can have no next time by its making (an interval of zero), or `after` is naive.
    """
    after = _in_utc(after)
    if _is_plain(schedule, interval):
        return _next_interval(schedule, after, zone)
    if _is_plain(schedule, crontab):
        return _next_crontab(schedule, after, zone)
    # An rrule exists only where its module was imported; importing it from here would connect RedBeat's own handler
    # to `beat_init` in every process.
    redbeat = sys.modules.get("redbeat.schedules")
    if redbeat is not None and _is_plain(schedule, redbeat.rrule):
        return _next_rrule(schedule, after)
    return _next_by_asking(schedule, after, zone)


def following(schedule: BaseSchedule, nominal: datetime, now: datetime, *, zone: tzinfo) -> datetime | None:
    """
    Return the first nominal time after `now`, for an entry whose last nominal time was `nominal`.

    Intervals stay on the grid `nominal + k * every`, so a late run does not delay the ones after it. `now` before
    `nominal` (the clock was set back) counts as `nominal`: no nominal time comes twice.
    """
    nominal = _in_utc(nominal)
    now = max(_in_utc(now), nominal)
    if not _is_plain(schedule, interval):
        return next_occurrence(schedule, now, zone=zone)
    latest = nominal + (now - nominal) // _period(schedule) * _period(schedule)
    found = next_occurrence(schedule, latest, zone=zone)
    # Only a relative interval can do this, while `nominal` is not yet on its rounded grid.
    if found is not None and found <= now:
        return next_occurrence(schedule, now, zone=zone)
    return found


def latest_occurrence(schedule: BaseSchedule, after: datetime, until: datetime, *, zone: tzinfo) -> datetime | None:
    """
    Return the last nominal time later than `after` and not later than `until`, or None when there is none between.

    An interval counts from `after`. Any other schedule is searched by halves: a year of minutes takes some forty steps.
    """
    after, until = _in_utc(after), _in_utc(until)
    if _is_plain(schedule, interval) and not schedule.relative:
        steps = (until - after) // _period(schedule)
        return after + steps * _period(schedule) if steps > 0 else None
    found, behind = next_occurrence(schedule, after, zone=zone), until
    if found is None or found > until:
        return None
    while (upcoming := next_occurrence(schedule, found, zone=zone)) is not None and upcoming <= until:
        middle = upcoming + (behind - upcoming) / 2
        ahead = next_occurrence(schedule, middle, zone=zone)
        if ahead is not None and ahead <= until:
            found = ahead
        else:  # there is none between the middle and the end
            found, behind = upcoming, middle
    return found


def starts_at(schedule: BaseSchedule, start: datetime, *, zone: tzinfo) -> datetime | None:
    """Return the first nominal time not before `start`; an interval begins with it."""
    start = _in_utc(start)
    if _is_plain(schedule, interval) and not schedule.relative:
        return start
    return next_occurrence(schedule, start - timedelta(microseconds=1), zone=zone)


def _in_utc(moment: datetime) -> datetime:
    if moment.utcoffset() is None:
        msg = f"a time needs a time zone here, {moment!r} has none"
        raise ValueError(msg)
    return moment.astimezone(UTC)


def _is_plain(schedule: BaseSchedule, kind: type[BaseSchedule]) -> bool:
    """Say whether `schedule` is of this kind and computes its times as the kind does."""
    return isinstance(schedule, kind) and type(schedule).remaining_estimate is kind.remaining_estimate


def _period(schedule: Any) -> timedelta:
    every: timedelta | None = schedule.run_every
    if every is None or every <= ZERO:
        msg = f"an interval must be longer than zero, not {every}"
        raise ValueError(msg)
    return every


def _next_interval(schedule: Any, after: datetime, zone: tzinfo) -> datetime | None:
    """
    Return `after` plus the interval in elapsed time.

    A relative interval is rounded down to its own unit (day, hour, minute) on the wall clock of `zone`; the rounding,
    and a day that counts as a calendar day, are Celery's (`celery.utils.time.remaining`).
    """
    every = _period(schedule)
    try:
        if schedule.relative:
            local = after.astimezone(zone)
            rounded: timedelta = remaining(local, every, now=local, relative=True)
            if rounded > ZERO:
                return after + rounded
        return after + every
    except OverflowError:  # due after the year 9999
        return None


def _next_crontab(schedule: Any, after: datetime, zone: tzinfo) -> datetime | None:
    """
    Return the next time at which the wall clock of `zone` satisfies every field, by the DST rules of Debian's cron(8).

    - Wildcard job (minute or hour begins with `*`, or names every value): runs whenever the wall clock shows a matching
      minute, so in both passes of a repeated hour, and not at all in an hour that is skipped.
    - Fixed job (any other): a time in a repeated hour runs in the first pass only; times in a skipped hour run once,
      right after the gap.

    Day of month and day of week must both match, as in Celery. CronSim serves as the calendar alone: its own DST
    arithmetic steps over minutes, or back in time, where the shift is not a whole hour (Lord Howe) or does not happen
    on the hour (Chatham).
    """
    times = ((schedule.minute, schedule._orig_minute, 60), (schedule.hour, schedule._orig_hour, 24))
    wildcard = any(len(values) == size or str(spec).startswith("*") for values, spec, size in times)
    fields = (schedule.minute, schedule.hour, schedule.day_of_month, schedule.month_of_year, schedule.day_of_week)
    walls = copy(_calendar(*map(frozenset, fields)))
    local = after.astimezone(zone)
    # The wall clock, labelled UTC: CronSim then does no zone arithmetic.
    walls.dt = local.replace(tzinfo=UTC, microsecond=0)
    if wildcard:
        # Clocks soon to be set back show again what they show now, so look that far back on the wall.
        walls.dt -= max(ZERO, _offset(after, zone) - _offset(after + LONGEST_SHIFT, zone))

    repeated = None
    for wall in walls:
        first = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
        second = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
        if first > second:  # PEP 495: this time of day is in a gap
            if wildcard:
                continue
            first = _end_of_gap(second, first, zone)
        if first > after:
            return first if repeated is None else min(first, repeated)
        if wildcard and repeated is None and second > after:
            repeated = second
    return repeated


@lru_cache(maxsize=4096)
def _calendar(*fields: frozenset[int]) -> CronSim:
    """Return the parsed calendar of a crontab (minute, hour, day, month, weekday), to be copied before use."""
    sizes = (60, 24, 31, 12, 7)
    parts = ("*" if len(f) == n else ",".join(map(str, sorted(f))) for f, n in zip(fields, sizes, strict=True))
    try:
        calendar = CronSim(" ".join(parts), datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        msg = f"a crontab needs a value in every field and a date that exists: {error}"
        raise ValueError(msg) from error
    calendar.day_and = True
    return calendar


def _offset(moment: datetime, zone: tzinfo) -> timedelta:
    """Return what the clocks of `zone` are ahead of UTC by at a moment."""
    return moment.astimezone(zone).utcoffset() or ZERO


def _end_of_gap(before: datetime, behind: datetime, zone: tzinfo) -> datetime:
    """Return the instant, exact to a second, at which the clocks jump forward between the two given ones."""
    seconds = range((behind - before) // SECOND)
    new = _offset(behind, zone)
    return before + SECOND * bisect_left(seconds, True, key=lambda s: _offset(before + SECOND * s, zone) == new)


def _next_rrule(schedule: Any, after: datetime) -> datetime | None:
    """
    Return what dateutil gives for the rule (RFC 5545, on the wall clock of its `dtstart`), without its long walk.

    dateutil walks from `dtstart`, which takes seconds for an old rule of short period. An uncounted rule has the same
    future when it starts any whole number of steps later, so it is started just before `after`.
    """
    rule, start = schedule.rrule, schedule.dtstart
    if schedule.interval < 1:
        msg = f"the interval of an rrule must be at least 1, not {schedule.interval}"
        raise ValueError(msg)
    if schedule.count is None and schedule.freq in RULE_PERIODS:
        step = RULE_PERIODS[schedule.freq] * schedule.interval
        # Close to a shift of the clocks, a wall time may stand for an instant that far from where it seems to be.
        shift = abs(_offset(after + DAY, start.tzinfo) - _offset(after - DAY, start.tzinfo))
        walked = after.astimezone(start.tzinfo).replace(tzinfo=None) - shift - start.replace(tzinfo=None)
        if walked > step:
            rule = rule.replace(dtstart=start + walked // step * step)
    found: datetime | None = rule.after(after)
    return None if found is None else found.astimezone(UTC)


def _next_by_asking(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> datetime | None:
    """Ask a schedule of any kind (solar, a user's own) how long it would wait if it ran, and if it were, `after`."""
    local = after.astimezone(zone)
    # Not copy(): it goes by __reduce__, in which schedules leave out their app or whatever a subclass has added.
    frozen = object.__new__(type(schedule))
    vars(frozen).update(vars(schedule), now=lambda: local, nowfun=lambda: local)
    if type(schedule).remaining_estimate is not BaseSchedule.remaining_estimate:
        wait: timedelta | None = frozen.remaining_estimate(local)
        if wait is None:
            return None
        if wait > ZERO:
            return after + wait
    seconds: float | None
    _, seconds = frozen.is_due(local)
    if seconds is None:
        return None
    # Due at once and for ever: keep a busy schedule from holding time still.
    return after + (timedelta(seconds=seconds) if seconds > 0 else SECOND)
