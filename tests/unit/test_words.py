"""Schedules in words: right for every kind, and short and quick for hostile ones."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery.schedules import BaseSchedule, crontab, schedule, solar
from dateutil.rrule import MO, SU
from redbeat.schedules import rrule

from singlebeat import clocked
from singlebeat.beat.calendar.words import LONGEST, in_words, span

START = datetime(2026, 1, 5, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (schedule(30), "Every 30 seconds"),
        (schedule(90), "Every 90 seconds"),
        (schedule(60), "Every minute"),
        (schedule(7200), "Every 2 hours"),
        (schedule(timedelta(days=1)), "Every day"),
        (schedule(0.25), "Every 0.25 seconds"),
        (clocked("2026-12-01T09:00:00+01:00"), "Once, at 2026-12-01 08:00:00Z"),
        (crontab(), "Every minute"),
        (crontab(minute="*/5"), "Every 5 minutes"),
        (crontab(minute="*/90"), "Every hour"),
        (crontab(minute=15, hour=9, day_of_week="mon-fri"), "At 09:15, Monday through Friday"),
        (crontab(minute=0, hour={9, 17}), "At 09:00 and 17:00"),
        (crontab(minute=0, hour=[9], day_of_week=0), "At 09:00, only on Sunday"),
        (crontab(minute=0, hour=0, month_of_year="jan,jul", day_of_month=1), None),
        (
            crontab(minute=0, hour=9, day_of_month="1-7", day_of_week="mon"),
            "At 09:00, between day 1 and 7 of the month, only on Monday",
        ),
        (solar("sunset", 52.5, -13.25), "At sunset, at latitude 52.5 and longitude -13.25"),
        (
            rrule("MONTHLY", bymonthday=[-1, 22, -2], bymonth=[1, 7], byhour=18, byminute=5, dtstart=START),
            "Every month, in January, July, on the last, 22nd, 2nd to last day of the month, at 18:05, "
            "from 2026-01-05 09:00:00Z",
        ),
        (rrule("DAILY", dtstart=START), "Every day, from 2026-01-05 09:00:00Z"),
        (
            rrule("WEEKLY", interval=2, byweekday=[MO, SU(-1)], byhour=9, dtstart=START, count=3),
            "Every 2 weeks, on Monday, the last Sunday, at hour 9, from 2026-01-05 09:00:00Z, 3 times",
        ),
        (
            rrule("MONTHLY", byweekday=0, dtstart=START, until=START),
            "Every month, on Monday, from 2026-01-05 09:00:00Z, until 2026-01-05 09:00:00Z",
        ),
    ],
)
def test_each_kind_of_schedule_has_its_words(when, words):
    assert in_words(when) == words if words else in_words(when).startswith("At 00:00, on day 1 of the month")


def test_a_step_that_does_not_fit_is_told_by_its_values():
    """``*/25`` is minutes 0, 25 and 50: the next run after 50 is ten minutes later."""
    assert in_words(crontab(minute="*/25")) == "At 0, 25, and 50 minutes past the hour"


def test_without_the_library_a_crontab_is_its_expression(monkeypatch):
    monkeypatch.setitem(sys.modules, "cron_descriptor", None)

    assert in_words(crontab(minute=0, hour="9-17")) == "cron 0 9-17 * * *"


class Hostile(BaseSchedule):
    """A schedule that fails wherever it can."""

    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "when",
    [
        Hostile(),
        SimpleNamespace(text="x\n" * 100_000),
        crontab(minute=",".join(["0-59/2"] * 2000)),
        crontab(minute=",".join(map(str, range(59))), hour=",".join(map(str, range(23)))),
        rrule("YEARLY", byyearday=list(range(1, 366)), dtstart=START),
    ],
)
def test_the_words_of_a_hostile_schedule_are_short_and_on_one_line(when):
    words = in_words(when)

    assert 0 < len(words) <= LONGEST
    assert "\n" not in words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.25, "0.2 s"), (59, "59 s"), (61, "1 min 1 s"), (7200, "2 h"), (90_000, "1 d 1 h")],
)
def test_a_length_of_time_is_short(seconds, words):
    assert span(seconds) == words
