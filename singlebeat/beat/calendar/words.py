"""Schedules and lengths of time in words, for people; a crontab needs cron-descriptor, of the extra ``web``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.schedules import crontab, schedule, solar
from redbeat.schedules import rrule

from .clocked import clocked

if TYPE_CHECKING:
    from celery.schedules import BaseSchedule

__all__ = ("in_words", "span")

#: Most characters of the words: a hostile schedule may have a long expression.
LONGEST = 200

UNITS = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))

#: The fields of a crontab, each with the number of its values.
FIELDS = {"minute": 60, "hour": 24, "day_of_month": 31, "month_of_year": 12, "day_of_week": 7}

FREQUENCIES = ("year", "month", "week", "day", "hour", "minute", "second")

#: The parts of a rule that choose among its times, in words.
PARTS = {
    "bymonth": "in {}",
    "byweekno": "in the {} week of the year",
    "byyearday": "on the {} day of the year",
    "bymonthday": "on the {} day of the month",
    "byeaster": "{} days after Easter",
    "byweekday": "on {}",
    "byhour": "at hour {}",
    "byminute": "at minute {}",
    "bysecond": "at second {}",
    "bysetpos": "of these the {}",
}

#: The parts that count, from the end if they are negative.
COUNTED = {"byweekno", "byyearday", "bymonthday", "bysetpos"}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def in_words(when: BaseSchedule) -> str:
    """Return a schedule in words, its expression if there are no words for it; 200 characters at most, on one line."""
    try:
        words = " ".join(_words(when).split())
    except Exception:  # a user's own schedule may raise anything, also in its repr
        words = f"<{type(when).__name__}>"
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


def _words(when: BaseSchedule) -> str:
    if type(when) is schedule:
        return f"Every {_duration(when.run_every.total_seconds())}"
    if type(when) is clocked:
        return f"Once, at {when.instant:%Y-%m-%d %H:%M:%SZ}"
    if type(when) is crontab:
        return _crontab(when)
    if type(when) is solar:
        return f"At {str(when.event).replace('_', ' ')}, at latitude {when.lat:g} and longitude {when.lon:g}"
    if type(when) is rrule:
        return ", ".join(_rule(when))
    return repr(when)


def _duration(seconds: float) -> str:
    """Return a number of seconds in the largest unit that needs no fraction: ``90 seconds``, ``minute``."""
    length, unit = next(((length, unit) for length, unit in UNITS if seconds % length == 0), (1, "second"))
    count = seconds / length
    return unit if count == 1 else f"{count:.15g} {unit}s"


def _crontab(when: crontab) -> str:
    raw = " ".join(str(getattr(when, f"_orig_{name}"))[:LONGEST] for name in FIELDS)
    try:
        from cron_descriptor import ExpressionDescriptor, Options  # noqa: PLC0415 - of an extra
    except ImportError:
        return f"cron {raw}"
    options = Options()
    options.use_24hour_time_format = True
    *fields, days = (_field(getattr(when, f"_orig_{name}"), getattr(when, name), most) for name, most in FIELDS.items())
    try:
        words = ExpressionDescriptor(" ".join((*fields, "*")), options).get_description()
        # Apart, because with cron a day of the month *or* a day of the week is enough: Celery wants both.
        on = ExpressionDescriptor(f"* * * * {days}", options).get_day_of_week_description() if days != "*" else ""
    except Exception:  # it knows fewer forms than Celery
        return f"cron {raw}"
    return f"{words}{on}"


def _field(given: object, values: Collection[int], most: int) -> str:
    """Return a field of a crontab in a form that has the same meaning in other programs."""
    if len(values) == most:
        return "*"
    text = str(given).strip().lower()
    step = re.fullmatch(r"\*/(\d{1,2})", text)
    is_even = step is not None and most in {60, 24, 12} and most % int(step[1]) == 0
    if isinstance(given, str) and (is_even or re.fullmatch(r"\w+(-\w+)?(,\w+)*", text)):
        return text
    return ",".join(map(str, sorted(values)))


def _rule(when: rrule) -> Iterator[str]:
    freq = when.freq if isinstance(when.freq, int) else FREQUENCIES.index(str(when.freq).lower().removesuffix("ly"))
    unit, interval = FREQUENCIES[freq], when.interval or 1
    yield f"Every {unit}" if interval == 1 else f"Every {interval} {unit}s"
    for part, words in PARTS.items():
        values = _values(getattr(when, part))
        if part == "byhour" and len(values) == len(_values(when.byminute)) == 1:
            yield f"at {values[0]:02}:{_values(when.byminute)[0]:02}"
        elif values and not (part == "byminute" and len(values) == len(_values(when.byhour)) == 1):
            yield words.format(", ".join(_value(part, each) for each in values))
    yield f"from {_moment(when.dtstart)}"
    if when.until is not None:
        yield f"until {_moment(when.until)}"
    if when.count is not None:
        yield f"{when.count} times"


def _values(given: Any) -> Sequence[Any]:
    return () if given is None else [*given] if isinstance(given, list | tuple | set) else (given,)


def _value(part: str, value: Any) -> str:
    """Return a value of a part of a rule in words."""
    if part in COUNTED:
        return _place(value)
    if part == "bymonth":
        return f"{datetime(2000, value, 1):%B}"  # noqa: DTZ001 - a name
    if part == "byweekday":
        number, place = (value, None) if isinstance(value, int) else (value.weekday, value.n)
        return f"the {_place(place)} {DAYS[number]}" if place else DAYS[number]
    return str(value)


def _place(number: int) -> str:
    """Return a number that counts: ``1st``, ``22nd``, ``last``, ``2nd to last``."""
    if number == -1:
        return "last"
    count = abs(number)
    ending = "th" if 10 < count % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}" + (" to last" if number < 0 else "")


def _moment(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def span(seconds: float) -> str:
    """Return a length of time for people, in two parts at most."""
    seconds = abs(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds % 1 >= 0.05 else f"{seconds:.0f} s"
    whole, units = round(seconds), (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    for at, (unit, length) in enumerate(units):
        if whole >= length:
            smaller, rest = (*units, ("", 1))[at + 1], whole % length
            more = f" {rest // smaller[1]} {smaller[0]}" if smaller[0] and rest // smaller[1] and at < 3 else ""
            return f"{whole // length} {unit}{more}"
    return "0 s"
