"""What a shift of the clocks does to the times of a schedule, in words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule
from redbeat.schedules import rrule

from singlebeat.beat.calendar.shifts import effects, shifts

BERLIN, LORD_HOWE = ZoneInfo("Europe/Berlin"), ZoneInfo("Australia/Lord_Howe")
NOW = datetime(2026, 11, 23, tzinfo=UTC)
GAP = "28 March 2027: 02:30 does not exist, because the clocks go from 02:00 to 03:00: it runs at 03:00"
TWICE = "31 October 2027: 02:30 comes twice, because the clocks go from 03:00 to 02:00: it runs the first time only"


@pytest.mark.parametrize(
    "when",
    [crontab(minute=30, hour=2), rrule("DAILY", dtstart=datetime(2026, 1, 1, 2, 30, tzinfo=BERLIN))],
    ids=["crontab", "rule"],
)
def test_a_fixed_time_runs_after_the_gap_and_once_when_it_repeats(when):
    assert [*effects(when, BERLIN, NOW)] == [GAP, TWICE]


def test_a_wildcard_runs_by_the_clock_in_both_hours():
    skipped, repeated = effects(crontab(minute="*/30"), BERLIN, NOW)

    assert "02:00 and 02:30 do not exist" in skipped
    assert skipped.endswith("there is no run for that")
    assert repeated.endswith("it runs both times")


@pytest.mark.parametrize("when", [schedule(3600), crontab(minute=0, hour=3), crontab(minute=30, hour=2, day_of_week=1)])
def test_times_that_no_shift_touches_are_not_named(when):
    assert [*effects(when, BERLIN, NOW)] == []


def test_a_shift_of_half_an_hour_is_named_as_it_is():
    first, *_ = effects(crontab(minute=15, hour=2), LORD_HOWE, NOW)

    assert first == (
        "03 October 2027: 02:15 does not exist, because the clocks go from 02:00 to 02:30: it runs at 02:30"
    )


def test_a_zone_without_shifts_has_none():
    assert [*shifts(ZoneInfo("Asia/Tokyo"), NOW, 366)] == []
    assert [shift.skipped for shift in shifts(BERLIN, NOW, 366)] == [timedelta(hours=1), timedelta(hours=-1)]
