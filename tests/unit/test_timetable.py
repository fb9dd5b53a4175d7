"""The times of an entry within the bounds of its policy: pure, so every moment here is made up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.timetable import PARKED, TICK, Timetable

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def table(when: Any = 60, *, name: str = "e", zone: str = "UTC", **wishes: Any) -> Timetable:
    return Timetable(
        name, schedule(when) if isinstance(when, int | float) else when, EntryPolicy.of(wishes), ZoneInfo(zone)
    )


# ---------------------------------------------------------------- the zone


def test_a_crontab_is_read_on_the_wall_clock_of_the_app_or_of_the_entry():
    daily = crontab(hour=9, minute=0)

    assert table(daily, zone="Asia/Tokyo").next(NOW) == datetime(2026, 3, 2, 0, 0, tzinfo=UTC)
    assert table(daily, zone="Asia/Tokyo", timezone="Europe/Berlin").next(NOW) == datetime(2026, 3, 2, 8, 0, tzinfo=UTC)


def test_a_day_with_a_shift_of_the_clocks_is_of_the_entrys_zone():
    times = list(islice(table(crontab(hour=9, minute=0), timezone="Europe/Berlin").runs(NOW + 26 * DAY, NOW), 3))

    assert [nominal.hour for nominal in times] == [8, 7, 7]  # the 28th, and from the 29th on it is summer


# ---------------------------------------------------------------- bounds


def test_an_interval_begins_at_its_start():
    late = table(60, start_time=NOW + HOUR)

    assert late.next(NOW) == NOW + HOUR
    assert late.next(NOW + HOUR - TICK) == NOW + HOUR
    assert late.next(NOW + HOUR) == NOW + HOUR + MINUTE


def test_a_crontab_may_run_at_its_start():
    assert table(crontab(), start_time=NOW + HOUR).next(NOW) == NOW + HOUR
    assert table(crontab(), start_time=NOW + HOUR + TICK).next(NOW) == NOW + HOUR + MINUTE


def test_the_end_is_the_last_time():
    bounded = table(60, end_time=NOW + 2 * MINUTE)

    assert bounded.next(NOW + MINUTE) == NOW + 2 * MINUTE
    assert bounded.next(NOW + 2 * MINUTE) is None
    assert bounded.latest(NOW, NOW + HOUR) == NOW + 2 * MINUTE


def test_there_is_nothing_between_a_start_and_an_end_without_a_time():
    hourly = table(crontab(minute=30), start_time=NOW, end_time=NOW + MINUTE)

    assert hourly.next(NOW - DAY) is None
    assert hourly.latest(NOW - DAY, NOW + DAY) is None
    assert hourly.score(None) == PARKED


def test_the_latest_time_before_the_start_is_none():
    assert table(60, start_time=NOW).latest(NOW - HOUR, NOW - TICK) is None
    assert table(60, start_time=NOW).latest(NOW - HOUR, NOW) == NOW
    assert table(60, start_time=NOW).latest(NOW - HOUR, NOW + 1.5 * MINUTE) == NOW + MINUTE


@pytest.mark.parametrize(
    ("wishes", "bounded"),
    [
        ({}, NOW),
        ({"start_time": NOW + HOUR}, NOW + HOUR),
        ({"start_time": NOW}, NOW),
        ({"end_time": NOW}, NOW),
        ({"end_time": NOW - TICK}, None),
    ],
)
def test_a_time_from_elsewhere_than_the_schedule_is_bounded(wishes, bounded):
    assert table(60, **wishes).bounded(NOW) == bounded


# ---------------------------------------------------------------- runs to come


def test_the_runs_to_come_follow_the_last_one():
    assert list(islice(table(60).runs(NOW, NOW), 2)) == [NOW + MINUTE, NOW + 2 * MINUTE]


def test_the_run_that_is_overdue_is_the_latest_one():
    assert list(islice(table(60).runs(NOW - 2.5 * MINUTE, NOW), 2)) == [NOW - 0.5 * MINUTE, NOW + 0.5 * MINUTE]


def test_an_entry_that_has_never_run_is_due_now_or_at_its_start():
    assert next(table(60).runs(None, NOW)) == NOW
    assert next(table(60, start_time=NOW + HOUR).runs(None, NOW)) == NOW + HOUR
    assert list(table(60, end_time=NOW - HOUR).runs(None, NOW)) == []


@pytest.mark.parametrize(("count", "left"), [(0, 3), (1, 2), (3, 0), (7, 0)])
def test_the_runs_to_come_end_with_their_number(count, left):
    assert len(list(table(60, max_runs=3).runs(NOW, NOW, count=count))) == left


# ---------------------------------------------------------------- jitter

schedules = st.one_of(
    st.floats(0.01, 1e6).map(schedule),
    st.sampled_from([crontab(), crontab(minute="*/7"), crontab(hour=2, minute=30), crontab(day_of_month=31)]),
)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2060, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
zones = st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/Havana"])


@given(schedules, moments, zones, st.floats(0.001, 1e6), st.text(max_size=5))
@settings(deadline=None)
def test_jitter_is_at_most_its_setting_and_ends_before_the_next_time(when, after, zone, jitter, name):
    entry = Timetable(name, when, EntryPolicy(jitter=jitter), ZoneInfo(zone))
    nominal = entry.next(after)
    due, following = entry.due(nominal), entry.next(nominal)

    assert nominal <= due < nominal + timedelta(seconds=jitter)
    assert due <= entry.due(following)
    assert due < following
    assert entry.score(nominal) == due.timestamp()


@given(schedules, moments, zones, st.floats(0.001, 1e6))
@settings(deadline=None)
def test_jitter_is_the_same_for_every_process_at_any_time(when, after, zone, jitter):
    one, other = (Timetable("e", when, EntryPolicy(jitter=jitter), ZoneInfo(zone)) for _ in range(2))
    nominal = one.next(after)

    assert one.due(nominal) == other.due(nominal)


def test_jitter_spreads_entries_of_the_same_time_evenly():
    shifts = [table(crontab(minute=0), name=f"e{n}", jitter=600).due(NOW) - NOW for n in range(1000)]
    by_minute = [sum(n * MINUTE <= shift < (n + 1) * MINUTE for shift in shifts) for n in range(10)]

    assert sum(by_minute) == 1000
    assert all(60 <= count <= 140 for count in by_minute), by_minute


def test_jitter_differs_from_time_to_time():
    entry = table(crontab(minute=0), jitter=600)

    assert len({entry.due(NOW + n * HOUR) - NOW - n * HOUR for n in range(100)}) > 90


@pytest.mark.parametrize("left", [timedelta(), TICK, MINUTE])
def test_jitter_puts_no_run_behind_the_end(left):
    end = NOW + left

    hourly = (table(3600, name=f"e{n}", jitter=1800, end_time=end) for n in range(50))

    assert all(NOW <= each.due(NOW) <= end for each in hourly)


def test_without_jitter_an_entry_is_due_at_its_time():
    assert table(60).due(NOW) == NOW


@given(schedules, moments, st.floats(0, 1e7), st.none() | st.floats(0.001, 1e6))
@settings(deadline=None)
def test_an_overdue_time_is_due_by_now_and_no_later_time_is(when, after, ahead, jitter):
    entry = Timetable("e", when, EntryPolicy(jitter=jitter), UTC)
    now = after + timedelta(seconds=ahead)
    overdue = entry.overdue(after, now)
    following = entry.next(overdue or after)

    assert overdue is None or (after < overdue and entry.due(overdue) <= now)
    assert following is None or entry.due(following) > now


@given(schedules, moments, st.none() | st.floats(0.001, 1e4))
@settings(deadline=None)
def test_runs_rise_strictly_and_so_do_the_times_when_they_are_due(when, after, jitter):
    entry = Timetable("e", when, EntryPolicy(jitter=jitter), UTC)
    times = list(islice(entry.runs(after, after), 10))

    assert all(before < behind and entry.due(before) < entry.due(behind) for before, behind in pairwise(times))
