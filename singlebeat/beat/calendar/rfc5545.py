"""The times of a rule of RFC 5545 on a clock that never shifts: pure, and fast for a rule that began long ago.

dateutil walks from the start of a rule. This takes seconds for an old rule, and minutes for a rule that has no date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

from dateutil.rrule import DAILY, HOURLY, MINUTELY, MONTHLY, SECONDLY, WEEKLY, YEARLY, rrule, weekday

if TYPE_CHECKING:
    from redbeat.schedules import rrule as RedBeatRule  # noqa: N812 - another class than dateutil's

__all__ = ("is_paced", "step_of", "walls", "wildcards")

DAY = timedelta(days=1)
#: The length of one period, for each frequency whose periods all have the same length.
PERIODS = {
    WEEKLY: timedelta(weeks=1),
    DAILY: DAY,
    HOURLY: timedelta(hours=1),
    MINUTELY: timedelta(minutes=1),
    SECONDLY: timedelta(seconds=1),
}
#: Start of the last cycle of our calendar, which repeats after 400 years: a date that is not in it never comes.
LAST_CYCLE = datetime(9600, 1, 1)  # noqa: DTZ001 - a time on the wall

#: A rule that has no time on so many allowed days in a row counts as ended. The number is large enough for any
#: reasonable interval.
MOST_DAYS = 5000

#: How far the times of a rule with a count are counted: in days, or in times for a rule with positions (BYSETPOS).
#: To count so far takes less than a second, which blocks the process.
MOST_COUNTED = 50_000

DATE_PARTS = ("bymonth", "bymonthday", "byyearday", "byeaster", "byweekno", "byweekday")
TIME_PARTS = ("byhour", "byminute", "bysecond")
UNITS = {HOURLY: "hour", MINUTELY: "minute", SECONDLY: "second"}

#: The parts of a rule, by dateutil's names, each with its values in dateutil's types; hashable.
_Parts = tuple[tuple[str, Any], ...]


class _Rule(NamedTuple):
    """A rule on a wall clock."""

    freq: int
    interval: int
    wkst: int  #: first day of the week
    limit: int | None  #: number of its times; None: unlimited
    start: datetime
    parts: _Parts


def is_paced(schedule: RedBeatRule) -> bool:
    """Return whether an rrule only repeats every so many hours, minutes or seconds, without any restriction."""
    parts = ("bysetpos", *DATE_PARTS, *TIME_PARTS)
    return schedule.freq >= HOURLY and all(getattr(schedule, name) is None for name in parts)


def wildcards(schedule: RedBeatRule) -> tuple[bool, bool]:
    """Return whether the minutes of an rrule are a wildcard, as those of a crontab are, and whether its hours are.

    The hours are if they name all 24, and the rule, if it steps by hours or less, meets each of them alike.
    """
    hours, minutes = len(set(_listed(schedule.byhour) or ())), len(set(_listed(schedule.byminute) or ()))
    step, hour = step_of(schedule) if schedule.freq >= DAILY else DAY, PERIODS[HOURLY]
    any_minute = minutes == 60 or (schedule.freq >= MINUTELY and not minutes and step < hour)
    any_hour = hours == 24 or (schedule.freq >= HOURLY and not hours)
    return any_minute, any_hour and (schedule.freq < HOURLY or not hour % step)


def step_of(schedule: RedBeatRule) -> timedelta:
    """Return the length of one step of an rrule of weeks, days, hours, minutes or seconds."""
    step: timedelta = PERIODS[schedule.freq] * schedule.interval
    return step


def walls(schedule: RedBeatRule, start: datetime, after: datetime) -> Iterator[datetime]:
    """Yield the times of an rrule later than ``after``, on a clock that shows ``start`` when the rule starts.

    Args:
        schedule: a ``redbeat.schedules.rrule``; the caller applies its ``until``.
        start: a naive datetime, like ``after``.

    Raises:
        ValueError: the count is so large that the end of the rule cannot be computed.
    """
    wkst = getattr(schedule.wkst, "weekday", schedule.wkst) or 0
    start = start.replace(microsecond=0)
    rule = _Rule(schedule.freq, schedule.interval, wkst, schedule.count, start, _parts(schedule, start))
    last, is_end = (None, False) if schedule.count is None else _last(rule)
    if last is not None and is_end and after >= last:
        return
    for wall in _walls(rule, after):
        if last is not None and wall > last:
            if is_end:
                return
            msg = f"an rrule with a count of {schedule.count} cannot be counted beyond {last}: give it an until instead"
            raise ValueError(msg)
        yield wall


def _parts(schedule: RedBeatRule, start: datetime) -> _Parts:
    """Return all parts of a rule: its start supplies the missing ones."""
    freq = schedule.freq
    parts = {name: _listed(getattr(schedule, name)) for name in ("bysetpos", *DATE_PARTS, *TIME_PARTS)}
    if freq > MONTHLY and parts["byweekday"] is not None:  # "the first Monday" needs a month or a year
        parts["byweekday"] = tuple(getattr(day, "weekday", day) for day in parts["byweekday"])
    if freq < DAILY and all(not parts[name] for name in DATE_PARTS if name != "bymonth"):
        if freq == WEEKLY:
            parts["byweekday"] = (start.weekday(),)
        else:
            parts["bymonthday"] = (start.day,)
            if freq == YEARLY and not parts["bymonth"]:
                parts["bymonth"] = (start.month,)
    for name, frequency, value in zip(
        TIME_PARTS, (HOURLY, MINUTELY, SECONDLY), (start.hour, start.minute, start.second), strict=True
    ):
        if freq < frequency and parts[name] is None:
            parts[name] = (value,)
    return tuple((name, value) for name, value in parts.items() if value is not None)


def _listed(value: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    return (value,) if isinstance(value, int | weekday) else tuple(value)


@lru_cache(maxsize=1024)
def _last(rule: _Rule) -> tuple[datetime, bool]:
    """Return the last time of a rule with a count and True, or the time up to which it was counted and False."""
    left, start = rule.limit or 0, rule.start
    last = start - DAY
    if left < 1:
        return last, True
    if _has_positions(rule):
        for visited, wall in enumerate(islice(_walls(rule, last), left)):
            if visited == MOST_COUNTED:
                return last, False
            last = wall
        return last, True
    known: dict[timedelta, int] = {}
    for visited, begin in enumerate(_begins(rule, start)):
        if visited == MOST_COUNTED:
            return last, False
        if begin is None:
            continue
        midnight = _floor(begin, DAILY)
        number = known.get(begin - midnight)
        if number is None:
            number = sum(1 for _ in _in_day(rule, begin))
            if midnight > start:  # days with equal first steps have equally many times, except the start day
                known[begin - midnight] = number
        if left <= number:
            return next(islice(_in_day(rule, begin), left - 1, None), last), True
        left, last = left - number, midnight + (DAY - PERIODS[SECONDLY])
    return last, True


def _walls(rule: _Rule, after: datetime) -> Iterator[datetime]:
    found = _in_periods(rule, after) if _has_positions(rule) else _by_day(rule, after)
    return (wall for wall in found if wall > after)


def _has_positions(rule: _Rule) -> bool:
    """Return whether a rule picks times by positions in a week, month or year: not to be computed day by day."""
    return rule.freq < DAILY and "bysetpos" in dict(rule.parts)


def _in_periods(rule: _Rule, after: datetime) -> Iterator[datetime]:
    """Yield the times of a rule that picks them by positions, or the possible days of another rule.

    Begin with the week, month or year of ``after``, or with the next period if the interval skips that one.
    """
    freq, interval, wkst, _, start, parts = rule
    day, has_positions = _floor(after, DAILY), _has_positions(rule)
    try:
        if freq == WEEKLY:
            week = _floor(start, DAILY) - DAY * ((start.weekday() - wkst) % 7)
            steps, passed = divmod(max(timedelta(), after - week), PERIODS[WEEKLY] * interval)
            steps += passed >= PERIODS[WEEKLY]
            begin = week + steps * interval * PERIODS[WEEKLY]
        else:
            months = 12 if freq == YEARLY else 1
            first = start.year * 12 + (0 if freq == YEARLY else start.month - 1)
            steps, late = divmod(max(0, after.year * 12 + after.month - 1 - first), interval * months)
            steps += late >= months
            year, month = divmod(first + steps * interval * months, 12)
            begin = datetime(year, month + 1, 1)  # noqa: DTZ001 - a time on the wall
    except (OverflowError, ValueError):  # after the year 9999
        return
    if has_positions:  # dateutil counts positions from the beginning of a week
        begin = max(begin, start)
    else:
        begin = max(begin, day, _floor(start, DAILY))
        parts = tuple((name, 0 if name in TIME_PARTS else value) for name, value in parts)
    if _has_dates(freq, wkst, parts):
        yield from rrule(freq, dtstart=begin, interval=interval, wkst=wkst, **dict(parts))


@lru_cache(maxsize=1024)
def _has_dates(freq: int, wkst: int, parts: _Parts) -> bool:
    """Return whether any date satisfies the parts of a rule: if not, dateutil would search until the year 9999."""
    if freq == WEEKLY and any(name == "bysetpos" for name, _ in parts):
        dates = tuple((name, value) for name, value in parts if name != "bysetpos")
        return _has_dates(YEARLY, wkst, dates) and any(rrule(freq, dtstart=LAST_CYCLE, wkst=wkst, **dict(parts)))
    freq = YEARLY if freq == WEEKLY else freq
    return any(rrule(freq, dtstart=LAST_CYCLE, wkst=wkst, **dict(parts)))


def _by_day(rule: _Rule, after: datetime) -> Iterator[datetime]:
    """Yield the times of a rule, from one possible day to the next."""
    without, empty = 0, set[timedelta]()
    for begin in _begins(rule, max(after, rule.start)):
        without += 1
        # Days with equal first steps have the same times: if one has none, to walk through the others takes minutes.
        offset = begin - _floor(begin, DAILY) if begin is not None else None
        for wall in _in_day(rule, begin) if begin is not None and offset not in empty else ():
            without = 0
            yield wall
        if without and offset is not None and begin is not None and begin > rule.start:
            empty.add(offset)
        if without == MOST_DAYS:
            return


def _begins(rule: _Rule, moment: datetime) -> Iterator[datetime | None]:
    """Yield the first step of a rule on each possible day, and None for each step that is on another day."""
    freq, interval, _, _, start, parts = rule
    if not _offsets(freq, parts):
        return
    if freq < DAILY:
        yield from _in_periods(rule, moment)
        return
    period, step = PERIODS[freq], PERIODS[freq] * interval
    origin = _floor(start, freq)
    days, day = _days(rule, moment), datetime.min  # noqa: DTZ901 - a time on the wall
    try:
        while True:
            # The first step whose period is not over at this moment.
            begin = origin + ((moment - period - origin) // step + 1) * step
            midnight = _floor(begin, DAILY)
            while day < midnight:
                day = midnight if days is None else next(days)
            yield begin if day == midnight else None
            moment = midnight + DAY if day == midnight else day
    except (StopIteration, OverflowError):  # no such day before the year 10000
        return


def _in_day(rule: _Rule, begin: datetime) -> Iterator[datetime]:
    """Yield the times of a rule from the step ``begin`` until the end of its day."""
    freq, interval, _, _, start, parts = rule
    times, end = dict(parts), _floor(begin, DAILY) + (DAY - PERIODS[SECONDLY])
    step = PERIODS[freq] * interval if freq >= DAILY else DAY
    offsets = _offsets(freq, parts)
    wanted = [(each, UNITS[each], set(times.get(f"by{UNITS[each]}") or ())) for each in UNITS if each <= freq]
    try:
        while begin <= end:
            for each, name, values in wanted:
                if values and getattr(begin, name) not in values:
                    begin += -((begin - _floor(begin, each) - PERIODS[each]) // step) * step
                    break
            else:
                yield from (wall for offset in offsets if (wall := begin + offset) >= start)
                begin += step
    except OverflowError:  # after the year 9999
        return


@lru_cache(maxsize=64)
def _offsets(freq: int, parts: _Parts) -> Sequence[timedelta]:
    """Return the times of a rule in one period (a day at most), as offsets from the beginning of the period."""
    times = dict(parts)
    units = [each for each in UNITS if each > freq]
    finer = [[PERIODS[each] * value for value in sorted(set(times[f"by{UNITS[each]}"]))] for each in units]
    found = [sum(offset, timedelta()) for offset in product(*finer)]
    if not times.get("bysetpos"):
        return found
    places = {place - 1 if place > 0 else place + len(found) for place in times["bysetpos"] if abs(place) <= len(found)}
    return [found[place] for place in sorted(places)]


def _floor(moment: datetime, freq: int) -> datetime:
    """Return the beginning of the day, hour, minute or second that contains a moment."""
    smaller = {DAILY: ("hour", "minute", "second"), HOURLY: ("minute", "second"), MINUTELY: ("second",), SECONDLY: ()}
    fields: dict[str, Any] = dict.fromkeys((*smaller[freq], "microsecond"), 0)
    return moment.replace(**fields)


def _days(rule: _Rule, begin: datetime) -> Iterator[datetime] | None:
    """Return the midnights of the days to which a rule is restricted, None if it is not restricted to days.

    They begin with the year of ``begin``, so some may be before ``begin``.
    """
    parts = {name: value for name, value in rule.parts if name in DATE_PARTS and value}
    if not parts:
        return None
    if set(parts) == {"bymonth"}:
        parts["bymonthday"] = tuple(range(1, 32))
    if not _has_dates(YEARLY, rule.wkst, tuple(parts.items())):
        return iter(())
    days: Iterator[datetime] = iter(
        rrule(YEARLY, dtstart=_floor(begin, DAILY).replace(month=1, day=1), wkst=rule.wkst, **parts)
    )
    return days
