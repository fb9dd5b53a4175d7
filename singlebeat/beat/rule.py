"""What a rule of RFC 5545 says on a clock whose time never shifts: pure, and fast for a rule that began long ago.

dateutil walks from the start of a rule, which takes seconds for an old one, and minutes for one that never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

from dateutil.rrule import DAILY, HOURLY, MINUTELY, MONTHLY, SECONDLY, WEEKLY, YEARLY, rrule, weekday

__all__ = ("is_paced", "keeps_pace", "step_of", "walls")

DAY = timedelta(days=1)
#: The length of one period of each frequency that has one.
PERIODS = {
    WEEKLY: timedelta(weeks=1),
    DAILY: DAY,
    HOURLY: timedelta(hours=1),
    MINUTELY: timedelta(minutes=1),
    SECONDLY: timedelta(seconds=1),
}
#: The last time that our calendar repeats itself: a date that is not in it never comes.
LAST_CYCLE = datetime(9600, 1, 1)  # noqa: DTZ001 - a time on the wall

#: Days on which a rule is looked for, of those that its parts allow: enough for any interval that is not absurd.
MOST_DAYS = 5000

DATE_PARTS = ("bymonth", "bymonthday", "byyearday", "byeaster", "byweekno", "byweekday")
TIME_PARTS = ("byhour", "byminute", "bysecond")

#: A rule: frequency, interval, first day of the week, count, start on the wall, and its parts by name.
_Rule = tuple[int, int, int, int | None, datetime, tuple[tuple[str, Any], ...]]


def is_paced(schedule: Any) -> bool:
    """Tell whether an rrule has nothing but a pace: hours, minutes or seconds without any restriction."""
    parts = ("bysetpos", *DATE_PARTS, *TIME_PARTS)
    return schedule.freq >= HOURLY and all(getattr(schedule, name) is None for name in parts)


def keeps_pace(schedule: Any) -> bool:
    """Tell whether an rrule names no hour of its own, and so runs as often in an hour that comes twice."""
    return schedule.freq >= HOURLY or len(set(_listed(schedule.byhour) or ())) == 24


def step_of(schedule: Any) -> timedelta:
    """Return the length of one step of an rrule of weeks or less."""
    step: timedelta = PERIODS[schedule.freq] * schedule.interval
    return step


def walls(schedule: Any, start: datetime, after: datetime) -> Iterator[datetime]:
    """Yield the times of an rrule later than ``after``, on a clock that shows ``start`` when the rule starts.

    Args:
        schedule: a ``redbeat.schedules.rrule``; its ``until`` is left to the caller.
        start: naive, as ``after``.
    """
    wkst = getattr(schedule.wkst, "weekday", schedule.wkst) or 0
    start = start.replace(microsecond=0)
    rule = (schedule.freq, schedule.interval, wkst, schedule.count, start, _parts(schedule, start))
    last = None if schedule.count is None else _last(rule)
    for wall in _walls(rule, after):
        if last is not None and wall > last:
            return
        yield wall


def _parts(schedule: Any, start: datetime) -> tuple[tuple[str, Any], ...]:
    """Return all parts of a rule: those that it has not been given are those of its start."""
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
def _last(rule: _Rule) -> datetime:
    """Return the last time of a rule that ends after a count."""
    count, start = rule[3] or 0, rule[4]
    found = deque(islice(_walls(rule, start - DAY), count), maxlen=1)
    return found[0] if found else start - DAY


def _walls(rule: _Rule, after: datetime) -> Iterator[datetime]:
    found = _by_day(rule, after) if rule[0] >= DAILY else _by_period(rule, after)
    return (wall for wall in found if wall > after)


def _by_period(rule: _Rule, after: datetime) -> Iterator[datetime]:
    """Walk from the last whole period before ``after``."""
    freq, interval, wkst, _, start, parts = rule
    begin = start
    if freq == WEEKLY:
        week = start.replace(hour=0, minute=0, second=0) - DAY * ((start.weekday() - wkst) % 7)
        steps = (after - week) // (PERIODS[WEEKLY] * interval)
        if steps > 0:
            begin = week + steps * interval * PERIODS[WEEKLY]
    else:
        months = interval * (12 if freq == YEARLY else 1)
        first = start.year * 12 + (0 if freq == YEARLY else start.month - 1)
        steps = (after.year * 12 + after.month - 1 - first) // months
        if steps > 0:
            year, month = divmod(first + steps * months, 12)
            begin = datetime(year, month + 1, 1)  # noqa: DTZ001 - a time on the wall
    if _comes(freq, wkst, parts):
        yield from rrule(freq, dtstart=begin, interval=interval, wkst=wkst, **dict(parts))


@lru_cache(maxsize=1024)
def _comes(freq: int, wkst: int, parts: tuple[tuple[str, Any], ...]) -> bool:
    """Tell whether there is any date as a rule wants it: dateutil would look for it until the year 9999."""
    if freq == WEEKLY and any(name == "bysetpos" for name, _ in parts):
        dates = tuple((name, value) for name, value in parts if name != "bysetpos")
        return _comes(YEARLY, wkst, dates) and any(rrule(freq, dtstart=LAST_CYCLE, wkst=wkst, **dict(parts)))
    freq = YEARLY if freq == WEEKLY else freq
    return any(rrule(freq, dtstart=LAST_CYCLE, wkst=wkst, **dict(parts)))


def _by_day(rule: _Rule, after: datetime) -> Iterator[datetime]:
    """Go from one day on which the rule may come to the next."""
    freq, interval, wkst, _, start, parts = rule
    period, step = PERIODS[freq], PERIODS[freq] * interval
    origin = _floor(start, freq)
    moment = max(after, start)
    days, day = _days(rule, moment), datetime.min  # noqa: DTZ901 - a time on the wall
    times = {name: value for name, value in parts if name not in DATE_PARTS}
    per_period = prod(len(set(times[name])) for name in TIME_PARTS[freq - DAILY :])
    if "bysetpos" in times and all(abs(position) > per_period for position in times["bysetpos"]):
        return
    try:
        for _ in range(MOST_DAYS):
            # The first step whose period has not passed by now: dateutil need not count the ones before.
            begin = origin + ((moment - period - origin) // step + 1) * step
            midnight = _floor(begin, DAILY)
            while day < midnight:
                day = midnight if days is None else next(days)
            if day == midnight:
                begin, until = max(begin, start), midnight + DAY - PERIODS[SECONDLY]
                yield from rrule(freq, dtstart=begin, interval=interval, wkst=wkst, until=until, **times)
            moment = midnight + DAY if day == midnight else day
    except (StopIteration, OverflowError):  # no such day before the year 10000
        return


def _floor(moment: datetime, freq: int) -> datetime:
    """Return the begin of the day, hour, minute or second that a moment is in."""
    smaller = {DAILY: ("hour", "minute", "second"), HOURLY: ("minute", "second"), MINUTELY: ("second",), SECONDLY: ()}
    fields: dict[str, Any] = dict.fromkeys((*smaller[freq], "microsecond"), 0)
    return moment.replace(**fields)


def _days(rule: _Rule, begin: datetime) -> Iterator[datetime] | None:
    """Return the midnights of the days, from some before ``begin``, that a rule is restricted to; None: it is not."""
    parts = {name: value for name, value in rule[5] if name in DATE_PARTS and value}
    if not parts:
        return None
    if set(parts) == {"bymonth"}:
        parts["bymonthday"] = tuple(range(1, 32))
    if not _comes(YEARLY, rule[2], tuple(parts.items())):
        return iter(())
    days: Iterator[datetime] = iter(
        rrule(YEARLY, dtstart=_floor(begin, DAILY).replace(month=1, day=1), wkst=rule[2], **parts)
    )
    return days
