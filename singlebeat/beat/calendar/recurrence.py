"""
Computes when a schedule is next due: pure arithmetic, in which the time is always an argument.

Every result is a *nominal* time: the instant at which the schedule asks for a run, in UTC. The arithmetic never adds to
a local time, because the sum is wrong if the clocks are shifted in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval
from celery.utils.time import remaining
from cronsim import CronSim, CronSimError
from kombu.utils.encoding import safe_repr
from redbeat.schedules import rrule

from . import rfc5545, sun
from .clocked import clocked
from .zone import in_utc

if TYPE_CHECKING:
    from datetime import tzinfo

__all__ = (
    "ENDING",
    "is_cheap",
    "is_known",
    "latest_occurrence",
    "next_occurrence",
    "reads_clock",
    "reporting_questions",
    "starts_at",
)

ZERO = timedelta()
SECOND = timedelta(seconds=1)
#: The longest shift of the clocks that counts as DST; cron(8) treats a longer shift as a correction of the clock.
LONGEST_SHIFT = timedelta(hours=3)

#: What a user's code may raise to end the process, such as a schedule, or the function of a key. Any other error is one
#: of its entry alone: that includes `gevent.Timeout` and `asyncio.CancelledError`, which are no `Exception`.
ENDING = (SystemExit, KeyboardInterrupt)

#: How many times a user's own schedule class is asked whether it is due, before this is an error.
MOST_QUESTIONS = 1000

#: Called before each question to a schedule whose answer may take long.
_report: ContextVar[Callable[[], object]] = ContextVar("_report", default=lambda: None)


@contextmanager
def reporting_questions(report: Callable[[], object]) -> Iterator[None]:
    """Call ``report`` in this block before each question to a schedule that is not cheap, and the reports around it."""
    outer = _report.get()
    token = _report.set(lambda: (outer(), report()))
    try:
        yield
    finally:
        _report.reset(token)


def next_occurrence(schedule: BaseSchedule, after: datetime, *, zone: tzinfo) -> datetime | None:
    """
    Return the first nominal time of `schedule` strictly after `after`, in UTC, or None when there is none.

    A crontab is read on the wall clock of `zone`, even if its own `tz` differs. An rrule is read on the wall clock of
    its `dtstart`. If `dtstart` has only an offset, and `zone` has the same offset at that instant, the rrule is read on
    the wall clock of `zone`. A subclass that computes its own times is asked for them, like any schedule of an unknown
    kind.

    Raises:
        ValueError: the schedule can never have a next time (an interval of zero), or `after` is naive.
    """
    try:
        return _next(schedule, in_utc(after), zone)
    except OverflowError:  # due after the year 9999
        return None


def _next(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> datetime | None:
    if _is_plain(schedule, interval):
        return _next_interval(schedule, after, zone)
    if _is_plain(schedule, crontab):
        return _next_crontab(schedule, after, zone)
    if _is_plain(schedule, clocked):
        return in_utc(schedule.instant) if schedule.instant > after else None
    _report.get()()
    if _is_plain(schedule, rrule):
        return _next_rrule(schedule, after, zone)
    if _is_plain(schedule, solar):
        return sun.next_event(schedule, after)
    try:
        return _next_by_asking(schedule, after, zone)
    except (Exception, *ENDING):
        raise
    except BaseException as exc:
        raise RuntimeError(safe_repr(exc)) from exc  # its string may fail, too


def latest_occurrence(
    next_after: Callable[[datetime], datetime | None], after: datetime, until: datetime
) -> datetime | None:
    """
    Return the last nominal time later than `after` and not later than `until`, or None if there is none.

    If `after` is such a time and the times are regular, at most three are asked for, however many have passed. Others
    are searched by bisection: a year of minutes in office hours takes about forty. An interval counts from `after`.

    Args:
        next_after: returns the first nominal time strictly after a moment, or None. It may be asked for the same twice.
    """
    after, until = in_utc(after), in_utc(until)
    found = next_after(after)
    if found is None or found > until:
        return None
    gap, behind = found - after, until
    middle = after + ((until - after) // gap - 1) * gap  # the last but one: the answer is on the grid of an interval
    while True:
        ahead = next_after(middle)
        if ahead is not None and ahead <= until:
            found = ahead
        else:  # there is none between the middle and the end
            behind = middle
        upcoming = next_after(found)
        if upcoming is None or upcoming > until:
            return found
        found, middle = upcoming, upcoming + (behind - upcoming) / 2


def is_known(schedule: BaseSchedule) -> bool:
    """Return whether a schedule is of a kind that this module computes by itself, and that JSON can hold."""
    return any(_is_plain(schedule, kind) for kind in (interval, crontab, rrule, solar, clocked))


def is_cheap(schedule: BaseSchedule) -> bool:
    """Return whether the times of a schedule are cheap to calculate with any fields."""
    return any(_is_plain(schedule, kind) for kind in (interval, crontab, clocked))


def reads_clock(schedule: BaseSchedule) -> bool:
    """Return whether the times of a schedule depend on the zone in which it is read: True for an unknown kind, too."""
    if _is_plain(schedule, interval):
        return bool(schedule.relative)
    return not _is_plain(schedule, solar) and not _is_plain(schedule, clocked)


def starts_at(schedule: BaseSchedule, start: datetime, *, zone: tzinfo) -> datetime | None:
    """Return the first nominal time not before `start`; an interval begins at `start`."""
    start = in_utc(start)
    if _is_plain(schedule, interval) and not schedule.relative:
        return start
    return next_occurrence(schedule, start - timedelta(microseconds=1), zone=zone)


def _is_plain(schedule: BaseSchedule, kind: type[BaseSchedule]) -> bool:
    """Return whether `schedule` is of this kind and computes its times as the kind does."""
    own = type(schedule)
    return isinstance(schedule, kind) and (own.remaining_estimate, own.is_due) == (kind.remaining_estimate, kind.is_due)


def _period(schedule: BaseSchedule) -> timedelta:
    every: timedelta | None = schedule.run_every
    if every is None or every <= ZERO:
        msg = f"an interval must be longer than zero, not {every}"
        raise ValueError(msg)
    return every


def _next_interval(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> datetime:
    """
    Return `after` plus the interval in elapsed time.

    A relative interval is rounded down to its own unit (day, hour, minute) on the wall clock of `zone`. The rounding
    is Celery's (`celery.utils.time.remaining`), which also counts a day as a calendar day.
    """
    every = _period(schedule)
    if schedule.relative:
        local = after.astimezone(zone)
        rounded: timedelta = remaining(local, every, now=local, relative=True)
        if rounded > ZERO:
            return after + rounded
    return after + every


def _next_crontab(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> datetime | None:
    """
    Return the next time at which the wall clock of `zone` satisfies every field, by the DST rules of Debian's cron(8).

    - Wildcard job (minute begins with `*`, or minute or hour names every value): runs whenever the wall clock shows a
      matching minute: in both passes of a repeated hour, and not at all in a skipped hour.
    - Fixed job (any other): a time in a repeated hour runs in the first pass only; times in a skipped hour run once,
      right after the gap.

    Two things differ from cron(8), or a night might be without a run, or have two: the hours `*/n` are fixed times, and
    a wildcard minute in a fixed hour that is skipped runs once, right after the gap.

    Day of month and day of week must both match, as in Celery. CronSim only serves as the calendar: its own DST
    arithmetic skips minutes, or goes back in time, where the shift is not a whole hour (Lord Howe) or does not happen
    on the hour (Chatham).
    """
    any_minute = len(schedule.minute) == 60 or str(schedule._orig_minute).startswith("*")
    any_hour = len(schedule.hour) == 24
    fields = (schedule.minute, schedule.hour, schedule.day_of_month, schedule.month_of_year, schedule.day_of_week)

    def walls(wall: datetime) -> Iterator[datetime]:
        calendar = copy(_calendar(*map(frozenset, fields)))
        calendar.dt = wall.replace(tzinfo=UTC)  # CronSim then does no zone arithmetic
        return calendar

    return _on_clock(walls, after, zone, repeats=any_minute or any_hour, skips=any_hour)


def _on_clock(
    walls: Callable[[datetime], Iterator[datetime]],
    after: datetime,
    zone: tzinfo,
    *,
    repeats: bool,
    skips: bool,
    begin: datetime | None = None,
) -> datetime | None:
    """
    Return the first instant after `after` at which the wall clock of `zone` shows a time of the schedule, or None.

    Args:
        walls: yields, in their order, the times of the schedule on the wall clock that are later than a given one.
        repeats: a time in a repeated hour runs in both passes.
        skips: a time in a skipped hour does not run, instead of right after the gap.
        begin: of the schedule. If that is in the second pass of a repeated hour, so are the times in that hour.
    """
    start = after.astimezone(zone).replace(tzinfo=None, microsecond=0)
    if repeats:
        # If the clocks are set back soon, the wall clock repeats times before this one: start that much earlier.
        start -= max(ZERO, _offset(after, zone) - _offset(after + LONGEST_SHIFT, zone))

    repeated = None
    for wall in walls(start):
        first = wall.replace(tzinfo=zone, fold=0).astimezone(UTC)
        second = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
        if first > second:  # PEP 495: this time of day is in a gap
            if skips:
                continue
            first = _end_of_gap(second, first, zone)
        elif begin is not None and first < begin <= second:
            first = second
        if first > after:
            return first if repeated is None else min(first, repeated)
        if repeats and repeated is None and second > after:
            repeated = second
    return repeated


@lru_cache(maxsize=4096)
def _calendar(*fields: frozenset[int]) -> CronSim:
    """Return the parsed calendar of a crontab (minute, hour, day, month, weekday); callers copy it before use."""
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
    """Return by how much the clocks of `zone` are ahead of UTC at a moment."""
    return moment.astimezone(zone).utcoffset() or ZERO


def _end_of_gap(before: datetime, behind: datetime, zone: tzinfo) -> datetime:
    """Return the instant, exact to a second, at which the clocks jump forward between two instants."""
    seconds = range((behind - before) // SECOND)
    new = _offset(behind, zone)
    return before + SECOND * bisect_left(seconds, True, key=lambda s: _offset(before + SECOND * s, zone) == new)


def _next_rrule(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> datetime | None:
    """
    Return the next time of a rule of RFC 5545; a shift of the clocks affects a rule like a crontab.

    A rule of hours, minutes or seconds that has no other part counts elapsed time.
    """
    if schedule.interval < 1:
        msg = f"the interval of an rrule must be at least 1, not {schedule.interval}"
        raise ValueError(msg)
    if rfc5545.is_paced(schedule):
        found = _next_paced(schedule, after)
    else:
        clock, start = schedule.dtstart.tzinfo, schedule.dtstart
        if not isinstance(clock, ZoneInfo) and start.utcoffset() == _offset(start, zone):
            clock = zone
        walls = partial(rfc5545.walls, schedule, start.astimezone(UTC).astimezone(clock).replace(tzinfo=None))
        any_minute, any_hour = rfc5545.wildcards(schedule)
        begin = start.astimezone(UTC).replace(microsecond=0)
        found = _on_clock(walls, after, clock, repeats=any_minute or any_hour, skips=any_hour, begin=begin)
    return None if found is None or (schedule.until is not None and found > schedule.until) else found


def _next_paced(schedule: BaseSchedule, after: datetime) -> datetime | None:
    start, step = schedule.dtstart.astimezone(UTC).replace(microsecond=0), rfc5545.step_of(schedule)
    steps = max(0, (after - start) // step + 1)
    found: datetime = start + steps * step
    return None if schedule.count is not None and steps >= schedule.count else found


def _next_by_asking(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> datetime | None:
    """
    Return the next time of a schedule of any kind (a user's own), by asking the schedule for its wait.

    For this call, `after` is both the time of the last run and the present time.
    """

    def at(moment: datetime) -> BaseSchedule:  # to be asked one question
        _report.get()()
        local = moment.astimezone(zone)
        # Not copy(): it uses __reduce__, in which schedules leave out their app and the attributes of subclasses.
        frozen = object.__new__(type(schedule))
        vars(frozen).update(vars(schedule), now=lambda: local, nowfun=lambda: local, tz=zone)
        return frozen

    local, estimates = after.astimezone(zone), type(schedule).remaining_estimate
    has_none = estimates is interval.remaining_estimate and not getattr(schedule, "run_every", None)
    if estimates is not BaseSchedule.remaining_estimate and not has_none:
        wait: timedelta | None = at(after).remaining_estimate(local)
        if wait is None:
            return None
        if wait > ZERO:
            return _first_due(schedule, at, local, after + wait)
    seconds: float | None
    _, seconds = at(after).is_due(local)
    if seconds is None:
        return None
    # A schedule may always be due at once: advance by a second at least.
    return after + (timedelta(seconds=seconds) if seconds > 0 else SECOND)


def _first_due(
    schedule: BaseSchedule, at: Callable[[datetime], BaseSchedule], last: datetime, moment: datetime
) -> datetime | None:
    """Return the first moment, not before the given one, at which `is_due` agrees: it may exclude hours."""
    if type(schedule).is_due is BaseSchedule.is_due:
        return moment
    for _ in range(MOST_QUESTIONS):
        is_due, seconds = at(moment).is_due(last)
        if is_due:
            return moment
        if seconds is None:
            return None
        moment += max(timedelta(seconds=seconds), SECOND)
    msg = f"{schedule!r} was asked {MOST_QUESTIONS} times, up to {moment}, and never said that it is due"
    raise ValueError(msg)
