"""When schedules are next due: grids of intervals, the wall clocks of many zones, rules, and schedules of one's own."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import partial
from itertools import islice, pairwise, takewhile
from operator import gt
from types import FrameType
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedstate, schedule
from dateutil.rrule import FR, MO, SU
from dateutil.rrule import rrule as dateutil_rrule
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from redbeat.schedules import rrule

from singlebeat.beat.calendar import rfc5545
from singlebeat.beat.calendar.recurrence import latest_occurrence, next_occurrence, reporting_questions
from singlebeat.beat.calendar.rfc5545 import walls as walls_of

BERLIN = ZoneInfo("Europe/Berlin")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")  # shifts by half an hour
TROLL = ZoneInfo("Antarctica/Troll")  # shifts by two hours
CHATHAM = ZoneInfo("Pacific/Chatham")  # shifts at a quarter to
HAVANA = ZoneInfo("America/Havana")  # shifts at midnight

#: One shift forward and one back for each zone: noon (UTC) of the day before it.
SHIFTS = {
    "Europe/Berlin": ("2024-03-30", "2024-10-26"),
    "America/New_York": ("2024-03-09", "2024-11-02"),
    "Australia/Lord_Howe": ("2024-10-05", "2024-04-06"),
    "Antarctica/Troll": ("2024-03-30", "2024-10-26"),
    "Pacific/Chatham": ("2024-09-28", "2024-04-06"),
    "America/Havana": ("2024-03-09", "2024-11-02"),
    "Africa/Casablanca": ("2024-04-13", "2024-03-09"),
    "America/Asuncion": ("2023-09-30", "2023-03-25"),
    "Europe/Dublin": ("2024-03-30", "2024-10-26"),  # winter is the time that is saved
    "Asia/Gaza": ("2024-02-09", "2024-04-19"),
    "Pacific/Apia": ("2011-12-29", "2011-04-01"),  # and a whole day is skipped
    "Pacific/Kwajalein": ("1993-08-19", "1993-08-21"),  # as here
    "UTC": ("2024-03-30", "2024-10-26"),
}
EDGES = [
    (ZoneInfo(name), datetime.fromisoformat(f"{day}T12:00+00:00")) for name, days in SHIFTS.items() for day in days
]
FREQUENCIES = rrule.FREQ_MAP
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def following(schedule: BaseSchedule, nominal: datetime, now: datetime, *, zone: tzinfo) -> datetime | None:
    """Return the first nominal time after now, as beat asks for it."""
    next_after = partial(next_occurrence, schedule, zone=zone)
    return next_after(latest_occurrence(next_after, nominal, now) or nominal)


def occurrences(schedule: BaseSchedule, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    while (found := next_occurrence(schedule, after, zone=zone)) is not None:
        yield found
        after = found


def walls(schedule: BaseSchedule, after: str, zone: tzinfo, count: int) -> list[str]:
    """Return what the clock on the wall shows at the next times, with the offset from UTC."""
    found = islice(occurrences(schedule, utc(after), zone), count)
    return [moment.astimezone(zone).strftime("%d %H:%M %z") for moment in found]


# ---------------------------------------------------------------- intervals


def test_an_interval_counts_elapsed_time_through_a_shift_of_the_clocks() -> None:
    before = datetime(2024, 10, 27, 1, 59, 50, tzinfo=BERLIN)  # 23:59:50Z, summer time

    assert next_occurrence(schedule(7200), before, zone=BERLIN) == utc("2024-10-27T01:59:50")


@given(
    nominal=st.timedeltas(timedelta(), timedelta(days=90_000)).map(lambda age: utc("1970-01-01") + age),
    every=st.timedeltas(timedelta(microseconds=1), timedelta(days=40)),
    late=st.timedeltas(timedelta(), timedelta(days=4000)),
)
def test_the_following_time_is_the_first_on_the_grid_after_now(
    nominal: datetime, every: timedelta, late: timedelta
) -> None:
    now = nominal + late

    found = following(schedule(every), nominal, now, zone=BERLIN)

    assert found is not None
    assert found - every <= now < found
    assert (found - nominal) % every == timedelta()


def test_late_runs_do_not_make_an_interval_drift() -> None:
    start = nominal = utc("2024-10-26T22:00:00")
    for late in range(1000):
        found = following(schedule(30), nominal, nominal + timedelta(milliseconds=late), zone=BERLIN)
        assert found is not None
        nominal = found

    assert nominal == start + 1000 * timedelta(seconds=30)


def test_an_interval_may_be_shorter_than_a_second() -> None:
    found = following(schedule(0.25), utc("2024-01-01T00:00:00"), utc("2024-01-01T10:00:00.3"), zone=UTC)

    assert found == utc("2024-01-01T10:00:00.5")


def test_a_grid_point_that_is_now_has_passed() -> None:
    nominal = utc("2024-01-01T00:00:00")

    assert following(schedule(60), nominal, nominal + 5 * MINUTE, zone=UTC) == nominal + 6 * MINUTE


@pytest.mark.parametrize("kind", [schedule(60), crontab()])
def test_no_nominal_time_comes_again_when_the_clock_is_set_back(kind: BaseSchedule) -> None:
    nominal = utc("2024-01-01T12:00:00")

    assert following(kind, nominal, nominal - HOUR, zone=UTC) == nominal + MINUTE


@pytest.mark.parametrize("every", [0, -1, None])
def test_an_interval_that_is_not_longer_than_zero_is_refused(every: float | None) -> None:
    with pytest.raises(ValueError, match="longer than zero"):
        next_occurrence(schedule(every), utc("2024-01-01"), zone=UTC)
    with pytest.raises(ValueError, match="longer than zero"):
        following(schedule(every), utc("2024-01-01"), utc("2024-01-02"), zone=UTC)


def test_an_interval_that_ends_after_the_calendar_has_no_next_time() -> None:
    assert next_occurrence(schedule(timedelta.max), utc("2024-01-01"), zone=UTC) is None


def test_a_relative_interval_is_rounded_down_to_its_unit_on_the_wall_clock() -> None:
    after = utc("2024-07-01T21:40:30")  # 23:40:30 in Berlin, on 1 July

    def rounded(every: timedelta) -> datetime | None:
        return next_occurrence(schedule(every, relative=True), after, zone=BERLIN)

    assert rounded(timedelta(seconds=40)) == utc("2024-07-01T21:41:10")
    assert rounded(5 * MINUTE) == utc("2024-07-01T21:45:00")
    assert rounded(2 * HOUR) == utc("2024-07-01T23:00:00")
    assert rounded(DAY) == utc("2024-07-01T22:00:00")


def test_a_relative_day_starts_at_midnight_on_both_sides_of_a_shift() -> None:
    daily = schedule(DAY, relative=True)

    assert walls(daily, "2024-10-25T12:00", BERLIN, 3) == ["26 00:00 +0200", "27 00:00 +0200", "28 00:00 +0100"]


def test_a_late_relative_interval_keeps_its_rounded_grid() -> None:
    two_hours = schedule(2 * HOUR, relative=True)
    noon = utc("2024-01-01T12:00:00")

    assert following(two_hours, noon, noon + 3 * HOUR + MINUTE, zone=UTC) == noon + 4 * HOUR
    assert following(two_hours, noon + 30 * MINUTE, noon + 2 * HOUR + MINUTE, zone=UTC) == noon + 4 * HOUR


# ---------------------------------------------------------------- times in and out


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="has none"):
        next_occurrence(schedule(60), utc("2024-01-01").replace(tzinfo=None), zone=BERLIN)


@pytest.mark.parametrize(
    "kind",
    [schedule(60), schedule(60, relative=True), crontab(), rrule("DAILY", dtstart=datetime(2024, 1, 1, tzinfo=BERLIN))],
)
def test_any_aware_time_is_taken_and_utc_is_returned(kind: BaseSchedule) -> None:
    repeated = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN)

    found = next_occurrence(kind, repeated, zone=BERLIN)

    assert found is not None
    assert found.tzinfo is UTC
    assert found == next_occurrence(kind, utc("2024-10-27T01:30:00"), zone=BERLIN)


# ---------------------------------------------------------------- crontab, the fields


def test_day_of_month_and_day_of_week_must_both_match() -> None:
    friday_13th = crontab(0, 12, day_of_week="fri", day_of_month=13)

    found = [moment.strftime("%Y-%m-%d") for moment in islice(occurrences(friday_13th, utc("2024-01-01"), UTC), 3)]

    assert found == ["2024-09-13", "2024-12-13", "2025-06-13"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"day_of_week": "mon-wed"}, "01 02 03 08"),
        ({"day_of_week": "sunday"}, "07 14 21 28"),
        ({"day_of_week": "sat-sun"}, "06 07 13 14"),
        ({"day_of_week": "*/3"}, "03 06 07 10"),
        ({"day_of_week": [0, 6]}, "06 07 13 14"),
        ({"day_of_month": "*/10"}, "01 11 21 31"),
        ({"day_of_month": "2-8/3", "month_of_year": "february-march"}, "02 05 08 02"),
        ({"day_of_month": {31}, "month_of_year": "*/2"}, "31 31 31 31"),
    ],
)
def test_the_fields_mean_the_same_as_to_celery(fields: dict[str, object], expected: str) -> None:
    daily = crontab(0, 9, **fields)

    found = islice(occurrences(daily, utc("2023-12-31T12:00"), UTC), 4)  # 1 January is a Monday

    assert " ".join(moment.strftime("%d") for moment in found) == expected


def test_lists_sets_and_numbers_are_values_of_a_field() -> None:
    twice = crontab({15, 45}, [6, 18], "*", 1, "jan")

    assert walls(twice, "2024-01-01", UTC, 4) == [
        "01 06:15 +0000",
        "01 06:45 +0000",
        "01 18:15 +0000",
        "01 18:45 +0000",
    ]


def test_a_nominal_time_is_after_even_the_last_microsecond() -> None:
    assert next_occurrence(crontab(), utc("2024-01-01T11:59:59.999999"), zone=UTC) == utc("2024-01-01T12:00:00")
    assert next_occurrence(crontab(), utc("2024-01-01T12:00:00.000001"), zone=UTC) == utc("2024-01-01T12:01:00")
    assert next_occurrence(crontab(), utc("2024-01-01T12:00:00"), zone=UTC) == utc("2024-01-01T12:01:00")


def test_the_zone_is_the_argument_and_not_that_of_the_app() -> None:
    app = Celery(set_as_current=False)
    app.conf.timezone = "America/New_York"

    assert next_occurrence(crontab(0, 9, app=app), utc("2024-07-01"), zone=BERLIN) == utc("2024-07-01T07:00:00")


def test_a_leap_day_that_is_a_monday_is_found() -> None:
    assert next_occurrence(crontab(0, 0, 1, 29, 2), utc("2024-03-01"), zone=UTC) == utc("2044-02-29")


def test_a_field_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="a value in every field"):
        next_occurrence(crontab(minute=[]), utc("2024-01-01"), zone=UTC)


def test_a_date_that_never_comes_is_not_searched_for_ever() -> None:
    never, never_on_mondays = crontab(0, 0, "*", 28, 2), crontab(0, 0, "mon", 28, 2)
    never.day_of_month = never_on_mondays.day_of_month = {30}  # Celery refuses it when asked for in the open

    assert next_occurrence(never_on_mondays, utc("2024-01-01"), zone=UTC) is None
    with pytest.raises(ValueError, match="a date that exists"):
        next_occurrence(never, utc("2024-01-01"), zone=UTC)


# ---------------------------------------------------------------- crontab, the clocks


def test_a_fixed_time_in_the_gap_runs_once_right_after_it() -> None:
    assert walls(crontab(30, 2), "2024-03-30T12:00", BERLIN, 2) == ["31 03:00 +0200", "01 02:30 +0200"]
    assert walls(crontab("10,20,50", 2), "2024-03-30T12:00", BERLIN, 2) == ["31 03:00 +0200", "01 02:10 +0200"]
    assert walls(crontab(30, 0), "2024-03-09T12:00", HAVANA, 2) == ["10 01:00 -0400", "11 00:30 -0400"]
    assert walls(crontab(0, 3), "2024-09-28T12:00", CHATHAM, 2) == ["29 03:45 +1345", "30 03:00 +1345"]
    assert walls(crontab(15, 2), "2024-10-05T12:00", LORD_HOWE, 2) == ["06 02:30 +1100", "07 02:15 +1100"]


def test_a_fixed_time_in_the_repeated_hour_runs_once_in_the_first_pass() -> None:
    assert walls(crontab(30, 2), "2024-10-26T12:00", BERLIN, 2) == ["27 02:30 +0200", "28 02:30 +0100"]
    assert walls(crontab(0, 3), "2024-04-06T12:00", CHATHAM, 2) == ["07 03:00 +1345", "08 03:00 +1245"]
    assert walls(crontab(30, 0), "2024-11-02T12:00", HAVANA, 2) == ["03 00:30 -0400", "04 00:30 -0500"]


def test_a_fixed_time_does_not_run_when_asked_for_in_the_second_pass() -> None:
    assert walls(crontab(45, 2), "2024-10-27T01:30", BERLIN, 1) == ["28 02:45 +0100"]


def test_every_minute_runs_every_minute_of_the_repeated_hour() -> None:
    found = list(islice(occurrences(crontab(), utc("2024-10-26T23:00"), BERLIN), 300))

    assert {later - earlier for earlier, later in pairwise(found)} == {MINUTE}


def test_an_hourly_job_runs_hourly_in_elapsed_time_on_both_shifts() -> None:
    for edge in (zone_and_day for zone_and_day in EDGES if zone_and_day[0] is not LORD_HOWE):
        found = list(islice(occurrences(crontab(30), edge[1], edge[0]), 48))

        assert {later - earlier for earlier, later in pairwise(found)} == {HOUR}, edge


def test_a_wildcard_in_the_gap_runs_only_if_its_hour_is_fixed() -> None:
    assert walls(crontab(30, "*"), "2024-03-31T00:45", BERLIN, 1) == ["31 03:30 +0200"]
    assert walls(crontab("*/30", 2), "2024-03-30T12:00", BERLIN, 2) == ["31 03:00 +0200", "01 02:00 +0200"]
    assert walls(crontab("*", "2-3"), "2024-03-30T12:00", BERLIN, 2) == ["31 03:00 +0200", "31 03:01 +0200"]


def test_a_wildcard_runs_in_both_passes_of_half_an_hour() -> None:
    assert walls(crontab("*/15", 1), "2024-04-06T13:30", LORD_HOWE, 6) == [
        "07 01:00 +1100",
        "07 01:15 +1100",
        "07 01:30 +1100",
        "07 01:45 +1100",
        "07 01:30 +1030",
        "07 01:45 +1030",
    ]
    assert walls(crontab("*/15", 2), "2024-04-06T13:30", LORD_HOWE, 1) == ["07 02:00 +1030"]


def test_a_wildcard_that_comes_once_a_year_runs_in_the_second_pass_too() -> None:
    yearly = crontab("*/30", 2, day_of_month=27, month_of_year=10)

    assert walls(yearly, "2024-10-27T00:30", BERLIN, 3) == ["27 02:00 +0100", "27 02:30 +0100", "27 02:00 +0100"]


def test_a_field_that_names_every_value_is_a_wildcard() -> None:
    hourly = crontab(30, "0-23")

    assert walls(hourly, "2024-10-27T00:15", BERLIN, 2) == ["27 02:30 +0200", "27 02:30 +0100"]


def reference(schedule: crontab, start: datetime, minutes: int, zone: tzinfo) -> list[datetime]:
    """
    Say minute by minute whether the job runs.

    A wildcard runs when the wall clock matches. A fixed job runs when the wall clock reaches a matching minute, or
    jumps over it, for the first time. A wildcard minute in a fixed hour runs in both cases. Hours `*/n` are fixed.
    """
    any_hour = str(schedule._orig_hour) == "*"
    wildcard = any_hour or "*" in str(schedule._orig_minute)

    def matches(wall: datetime) -> bool:
        return (
            wall.minute in schedule.minute
            and wall.hour in schedule.hour
            and wall.day in schedule.day_of_month
            and wall.month in schedule.month_of_year
            and wall.isoweekday() % 7 in schedule.day_of_week
        )

    found = []
    reached = (start - DAY).astimezone(zone).replace(tzinfo=None)
    for count in range(1 - 24 * 60, minutes):
        moment = start + count * MINUTE
        wall = moment.astimezone(zone).replace(tzinfo=None)
        new = [reached + step * MINUTE for step in range(1, (wall - reached) // MINUTE + 1)]
        reaches = not any_hour and any(map(matches, new))
        if (reaches or (wildcard and matches(wall))) and count > 0:
            found.append(moment)
        reached = max(reached, wall)
    return found


def test_hours_of_every_so_many_are_fixed_times() -> None:
    assert walls(crontab(30, "*/2"), "2024-03-30T23:45", BERLIN, 2) == ["31 03:00 +0200", "31 04:30 +0200"]
    assert walls(crontab(30, "*/2"), "2024-10-27T00:15", BERLIN, 2) == ["27 02:30 +0200", "27 04:30 +0100"]
    assert walls(crontab(0, "*/24"), "2024-03-09T12:00", HAVANA, 2) == ["10 01:00 -0400", "11 00:00 -0400"]


minute_fields = st.sampled_from(["*", "*/5", "*/20", "*/45", 0, 15, 30, 59, "10,40", "0-20", "7-57/10"])
hour_fields = st.sampled_from(["*", "*/2", "*/5", 0, 1, 2, 3, 4, 23, "0,2", "1-3", "2-3", "22-1"])
weekday_fields = st.sampled_from(["*", "*", "sun", "sat-sun", "mon-fri"])
crontabs = st.builds(crontab, minute_fields, hour_fields, weekday_fields)


@given(plan=crontabs, edge=st.sampled_from(EDGES), offset=st.integers(0, 1440))
@settings(max_examples=150, deadline=None)
def test_a_crontab_runs_when_a_minute_by_minute_cron_would_run_it(
    plan: crontab, edge: tuple[ZoneInfo, datetime], offset: int
) -> None:
    zone, day = edge
    start = day + offset * MINUTE

    expected = reference(plan, start, 1440, zone)

    assert list(islice(occurrences(plan, start, zone), len(expected))) == expected
    following_one = next_occurrence(plan, expected[-1] if expected else start, zone=zone)
    assert following_one is not None
    assert following_one >= start + DAY


# ---------------------------------------------------------------- all kinds

rules = st.builds(
    rrule,
    st.sampled_from(["WEEKLY", "DAILY", "HOURLY", "MINUTELY"]),
    dtstart=st.sampled_from([datetime(2023, 1, 1, 2, 30, tzinfo=zone) for zone in (BERLIN, TROLL, UTC)]),
    interval=st.integers(1, 50),
)
intervals = st.builds(schedule, st.timedeltas(timedelta(milliseconds=1), timedelta(days=3)))
relatives = st.builds(schedule, st.timedeltas(MINUTE, timedelta(days=3)), relative=st.just(True))


@given(
    plan=crontabs | rules | intervals | relatives,
    edge=st.sampled_from(EDGES),
    offset=st.timedeltas(timedelta(), DAY),
)
@settings(deadline=None)
def test_times_are_strictly_increasing(plan: BaseSchedule, edge: tuple[ZoneInfo, datetime], offset: timedelta) -> None:
    zone, day = edge
    start = day + offset
    found = [start, *islice(occurrences(plan, start, zone), 30)]

    assert len(found) == 31
    assert all(earlier < later for earlier, later in pairwise(found))


@given(
    plan=crontabs | rules,
    edge=st.sampled_from(EDGES),
    offset=st.timedeltas(timedelta(), DAY),
    fraction=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_the_next_time_stays_the_same_until_it_comes(
    plan: BaseSchedule, edge: tuple[ZoneInfo, datetime], offset: timedelta, fraction: float
) -> None:
    zone, day = edge
    start = day + offset
    found = next_occurrence(plan, start, zone=zone)
    assert found is not None

    later = min(start + (found - start) * fraction, found - timedelta(microseconds=1))

    assert next_occurrence(plan, later, zone=zone) == found


# ---------------------------------------------------------------- rrule


PARTS = {
    "bymonth": st.sets(st.integers(1, 12), min_size=1, max_size=3),
    "bymonthday": st.sets(st.sampled_from([1, 13, 29, 30, 31, -1, -30]), min_size=1),
    "byweekday": st.sets(st.sampled_from([0, 2, 6, MO(1), FR(-1), SU(5)]), min_size=1),
    "byyearday": st.sets(st.sampled_from([1, 60, 100, 366, -1]), min_size=1),
    "byweekno": st.sets(st.sampled_from([1, 20, 53, -1]), min_size=1),
    "byeaster": st.sampled_from([0, -2, 49]),
    "byhour": st.sets(st.sampled_from([0, 2, 3, 9, 23]), min_size=1),
    "byminute": st.sets(st.sampled_from([0, 10, 40]), min_size=1),
    "bysecond": st.sets(st.sampled_from([0, 30]), min_size=1),
    "bysetpos": st.sampled_from([1, -1]),
    "wkst": st.sampled_from([0, 6, SU]),
}
#: One date part beside the weekdays, and none that is rare for a rule of days or less: dateutil looks for a day that
#: never comes until the year 9999, however soon a rule ends.
DATES = ["bymonth", "bymonthday", "byyearday", "byweekno", "byeaster"]


@st.composite
def rules_in_parts(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    freq = draw(st.sampled_from(list(PERIODS)))
    rare = [] if FREQUENCIES[freq] > FREQUENCIES["WEEKLY"] else DATES
    names = draw(
        st.lists(st.sampled_from(["byweekday", "byhour", "byminute", "bysecond", "bysetpos", "wkst"]), max_size=2)
    )
    dates = draw(st.none() | st.sampled_from(rare or ["byweekday", "bymonth"]))
    return freq, {name: draw(PARTS[name]) for name in dict.fromkeys([*names, dates]) if name}


#: Of each frequency: one period, and how far ahead dateutil can be made to walk in a test.
PERIODS = {
    "YEARLY": (366 * DAY, 9000 * DAY),
    "MONTHLY": (30 * DAY, 2000 * DAY),
    "WEEKLY": (7 * DAY, 500 * DAY),
    "DAILY": (DAY, 100 * DAY),
    "HOURLY": (HOUR, 30 * DAY),
    "MINUTELY": (MINUTE, DAY),
    "SECONDLY": (timedelta(seconds=1), HOUR),
}


@given(
    plan=rules_in_parts(),
    interval=st.integers(1, 40),
    ago=st.integers(-5, 60),
    offset=st.integers(0, 86_400),
    count=st.none() | st.integers(1, 80),
)
@settings(max_examples=250, deadline=None)
@pytest.mark.filterwarnings("ignore:Using both 'count' and 'until'")
def test_a_rule_that_is_not_walked_equals_the_long_walk(
    plan: tuple[str, dict[str, object]], interval: int, ago: int, offset: int, count: int | None
) -> None:
    freq, parts = plan
    period, window = PERIODS[freq]
    after = utc("2024-02-27T00:00:00") + offset * timedelta(seconds=1)
    dtstart = after - ago * min(period * interval, 400 * DAY)
    try:
        # Without an end, dateutil would look for seconds in a month that is far away.
        long = dateutil_rrule(FREQUENCIES[freq], dtstart, interval, until=after + window, count=count, **parts)
        rule = rrule(freq, dtstart=dtstart, interval=interval, count=count, **parts)
        wanted = list(islice(takewhile(lambda moment: moment <= after + window, long.xafter(after)), 5))
    except ValueError:  # dateutil: no step of this interval meets these parts, which it sees at once or on its way
        reject()

    found = list(islice(takewhile(lambda moment: moment <= after + window, occurrences(rule, after, UTC)), 5))

    assert found == wanted


@pytest.mark.parametrize(
    ("freq", "parts", "as_crontab"),
    [
        ("DAILY", {"byhour": [2, 3], "byminute": [0, 30]}, crontab("0,30", "2-3")),
        ("DAILY", {"byhour": 0, "byminute": [10, 50]}, crontab("10,50", 0)),
        ("HOURLY", {"byhour": 2, "byminute": 30}, crontab(30, 2)),
        ("MINUTELY", {"byhour": 2, "byminute": 30}, crontab(30, 2)),
        ("SECONDLY", {"byhour": 2, "byminute": 30, "bysecond": 0}, crontab(30, 2)),
        ("HOURLY", {"interval": 24, "byweekday": range(7)}, crontab(30, 2)),
        ("HOURLY", {"interval": 2, "byweekday": range(7)}, crontab(30, "*/2")),
        ("HOURLY", {"byweekday": range(7)}, crontab(30)),
        ("HOURLY", {"byhour": range(24)}, crontab(30)),
        ("DAILY", {"byhour": range(24), "byminute": 30}, crontab(30)),
        ("MINUTELY", {"byminute": 30}, crontab(30)),
        ("MINUTELY", {"byhour": 2}, crontab("*", 2)),
        ("DAILY", {"byhour": 2, "byminute": range(60)}, crontab("*", 2)),
        ("MINUTELY", {"interval": 15, "byhour": [1, 2]}, crontab("*/15", "1-2")),
        ("MINUTELY", {"interval": 45, "byhour": range(24), "byminute": 30}, crontab(30, "2-23/3")),
        ("MINUTELY", {"interval": 60, "byhour": 2}, crontab(30, 2)),
    ],
)
def test_clocks_shift_a_rule_as_they_shift_a_crontab(freq, parts, as_crontab) -> None:
    for zone, day in EDGES:
        rule = rrule(freq, dtstart=datetime(1990, 1, 1, 2, 30, tzinfo=zone), **parts)

        expected, found = (
            list(takewhile(partial(gt, day + 2 * DAY), occurrences(each, day, zone))) for each in (as_crontab, rule)
        )
        assert found == expected, (zone, day)


@pytest.mark.parametrize("freq", ["DAILY", "HOURLY"])
@pytest.mark.parametrize(("zone", "start"), [(BERLIN, "2024-10-27T02:40"), (LORD_HOWE, "2024-04-07T01:40")], ids=str)
def test_a_rule_that_begins_in_the_second_pass_begins_then(freq, zone, start) -> None:
    start = datetime.fromisoformat(start).replace(tzinfo=zone, fold=1)
    rule = rrule(freq, dtstart=start, count=2, byminute=[40, 50])

    for after in (start - DAY, start - HOUR / 4, start - MINUTE):
        assert list(occurrences(rule, after.astimezone(UTC), UTC)) == [
            start.astimezone(UTC),
            start.astimezone(UTC) + timedelta(minutes=10),
        ]


@pytest.mark.parametrize("minutes", [25, 60, 420])
def test_a_rule_of_minutes_alone_counts_elapsed_time_through_both_shifts(minutes: int) -> None:
    start = datetime(2024, 3, 1, 1, 20, tzinfo=BERLIN)
    rule = rrule("MINUTELY", dtstart=start, interval=minutes)

    for zone, day in EDGES:
        found = list(islice(occurrences(rule, day, zone), 100))
        assert {later - earlier for earlier, later in pairwise(found)} == {minutes * MINUTE}
        assert (found[0] - start.astimezone(UTC)) % (minutes * MINUTE) == timedelta()


def test_a_rule_of_seconds_from_decades_ago_is_answered_at_once() -> None:
    steps = 0

    class Counted(tzinfo):
        """The zone of the rule: dateutil asks it for its offset at every step."""

        def utcoffset(self, moment: datetime | None) -> timedelta:
            nonlocal steps
            steps += 1
            return timedelta()

        dst = utcoffset

    rule = rrule("SECONDLY", dtstart=datetime(1980, 1, 1, tzinfo=Counted()), interval=5)

    assert next_occurrence(rule, utc("2024-01-01T00:00:03"), zone=UTC) == utc("2024-01-01T00:00:05")
    assert steps < 50


def test_a_rule_ends_with_its_until_and_with_its_count() -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC)
    until = rrule("HOURLY", dtstart=start, until=start + 3 * HOUR)
    count = rrule("HOURLY", dtstart=start, count=4)

    for rule in (until, count):
        assert next_occurrence(rule, start + 2 * HOUR, zone=UTC) == start + 3 * HOUR
        assert next_occurrence(rule, start + 3 * HOUR, zone=UTC) is None
        assert following(rule, start, start + 5 * HOUR, zone=UTC) is None


def test_the_first_time_of_a_rule_is_its_start() -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC)

    assert next_occurrence(rrule("MONTHLY", dtstart=start), start - DAY, zone=UTC) == start
    assert next_occurrence(rrule("SECONDLY", dtstart=start), start - DAY, zone=UTC) == start


def test_a_rule_is_read_on_the_wall_clock_of_its_start() -> None:
    daily = rrule("DAILY", dtstart=datetime(2020, 1, 1, 9, tzinfo=BERLIN))

    assert walls(daily, "2024-10-25T12:00", BERLIN, 3) == ["26 09:00 +0200", "27 09:00 +0100", "28 09:00 +0100"]


def test_a_stored_rule_keeps_its_zone_where_only_its_offset_is_known() -> None:
    stored = rrule("DAILY", dtstart=datetime(2020, 1, 1, 9, tzinfo=timezone(HOUR)))

    assert walls(stored, "2024-10-25T12:00", BERLIN, 3) == ["26 09:00 +0200", "27 09:00 +0100", "28 09:00 +0100"]


def test_a_rule_with_an_offset_that_the_zone_had_not_keeps_that() -> None:
    stored = rrule("DAILY", dtstart=datetime(2020, 1, 1, 9, tzinfo=UTC))

    assert walls(stored, "2024-10-25T12:00", BERLIN, 3) == ["26 11:00 +0200", "27 10:00 +0100", "28 10:00 +0100"]


def test_the_first_monday_is_not_every_monday() -> None:
    rule = rrule("MONTHLY", dtstart=utc("2020-01-01T09:00"), byweekday=MO(1))

    found = [moment.strftime("%m-%d %H") for moment in islice(occurrences(rule, utc("2024-01-02"), UTC), 3)]

    assert found == ["02-05 09", "03-04 09", "04-01 09"]


@pytest.mark.parametrize("freq", PERIODS)
def test_a_rule_for_a_date_that_never_comes_ends_soon(freq: str) -> None:
    rule = rrule(freq, dtstart=utc("2020-01-01"), bymonth=2, bymonthday=30)
    counted = rrule(freq, dtstart=utc("2020-01-01"), bymonth=2, bymonthday=30, count=5)

    years = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal years
        years += event == "call" and frame.f_code.co_name == "rebuild"  # dateutil, at each year or month

    sys.setprofile(count)
    try:
        found = (
            next_occurrence(rule, utc("2024-01-02"), zone=UTC),
            next_occurrence(counted, utc("2024-01-02"), zone=UTC),
        )
    finally:
        sys.setprofile(None)

    assert found == (None, None)
    assert years < 6000


@pytest.mark.parametrize(
    ("freq", "parts", "count", "last"),
    [
        ("DAILY", {}, 6000, "2026-06-05T12:30:15"),
        ("DAILY", {"byhour": [9, 18]}, 12_001, "2026-06-06T18:30:15"),
        ("DAILY", {"byhour": [9, 18]}, 1, "2010-01-01T18:30:15"),
        ("DAILY", {"byweekday": [MO]}, 800, "2025-04-28T12:30:15"),
        ("HOURLY", {"interval": 7, "byhour": range(12)}, 6000, "2019-08-02T05:30:15"),
        ("MINUTELY", {"byhour": [9], "byminute": [0, 30]}, 12_000, "2026-06-06T09:30:15"),
        ("SECONDLY", {"byhour": range(23)}, 82_800 * 6000 - 45_015, "2026-06-05T22:59:59"),
        ("WEEKLY", {"byweekday": [MO, FR]}, 1601, "2025-05-02T12:30:15"),
        ("MONTHLY", {"byhour": range(24), "byminute": range(60)}, 1440 * 24 - 750, "2011-12-01T23:59:15"),
        ("MONTHLY", {"bysetpos": -1, "byhour": [9, 18]}, 30, "2012-06-01T18:30:15"),
        ("YEARLY", {"byeaster": 0}, 16, "2025-04-20T12:30:15"),
    ],
)
def test_a_rule_ends_after_its_count_however_long_that_takes(
    freq: str, parts: dict[str, Any], count: int, last: str
) -> None:
    start, end = utc("2010-01-01T12:30:15"), utc(last)
    rule = rrule(freq, dtstart=start, count=count, **parts)

    assert next_occurrence(rule, end - timedelta(seconds=1), zone=UTC) == end
    assert next_occurrence(rule, end, zone=UTC) is None
    further = next_occurrence(rrule(freq, dtstart=start, count=count + 1, **parts), end, zone=UTC)
    assert further is not None
    assert further > end


def test_days_with_a_time_do_not_end_the_search() -> None:
    rule, start = rrule("DAILY", dtstart=utc("2010-01-01")), utc("2010-01-01").replace(tzinfo=None)

    found = list(islice(walls_of(rule, start, start), 6000))

    assert found[-1] == start + 6000 * DAY


@pytest.mark.parametrize(("hours", "days"), [(1, 1), (7, 7)])
def test_a_rule_that_no_day_has_is_searched_in_few_days(hours: int, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To walk through each of the 5,000 days that are searched takes minutes, in which beat does nothing else."""
    searched: list[datetime] = []
    in_day = rfc5545._in_day
    monkeypatch.setattr(rfc5545, "_in_day", lambda rule, begin: searched.append(begin) or in_day(rule, begin))
    never = rrule("SECONDLY", interval=3600 * hours, dtstart=utc("2024-01-01T00:00:30"), byminute=[5])

    assert next_occurrence(never, utc("2026-01-01"), zone=UTC) is None
    assert len(searched) == days


def test_a_rule_with_a_count_of_nothing_never_comes() -> None:
    assert next_occurrence(rrule("DAILY", dtstart=utc("2024-01-01"), count=0), utc("2023-01-01"), zone=UTC) is None


ALWAYS = {"byhour": range(24), "byminute": range(60), "bysecond": range(60)}


@pytest.mark.parametrize(
    ("freq", "parts", "found"),
    [
        ("DAILY", {"count": 10**9}, "2026-11-22T00:00:00"),
        ("DAILY", ALWAYS, "2026-11-21T20:00:01"),
        ("SECONDLY", {"count": 10**9, "byhour": range(23)}, "2026-11-21T20:00:01"),
        ("MINUTELY", {"count": 10**9, "interval": 7, "byhour": range(23)}, "2026-11-21T20:0"),
        ("WEEKLY", {"count": 10**9}, "2026-11-27T00:00:00"),
        ("MONTHLY", {"count": 10**9, "bymonthday": range(1, 32), **ALWAYS}, "2026-11-21T20:00:01"),
        ("YEARLY", {"bymonth": range(1, 13), "bymonthday": range(1, 32), **ALWAYS}, "2026-11-21T20:00:01"),
        ("YEARLY", {"interval": 15, "bymonth": range(1, 13), "bymonthday": [1], **ALWAYS}, "2040-01-01T00:00:00"),
        ("SECONDLY", {"interval": 86_400, "byhour": [3]}, "None"),
        ("SECONDLY", {"interval": 7 * 86_400 + 1, "byhour": [3]}, "None"),
        ("SECONDLY", {"count": 10**10, "dtstart": utc("1750-01-01"), "byhour": range(23)}, "give it an until"),
        ("MONTHLY", {"count": 10**9, "bysetpos": range(1, 367), **ALWAYS}, "give it an until"),
    ],
)
def test_no_rule_takes_long_however_often_or_rarely_it_comes(freq: str, parts: dict[str, Any], found: str) -> None:
    rule = rrule(freq, **{"dtstart": utc("2010-01-01"), **parts})

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("it takes minutes, where it should take less than a second")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        answer = str(next_occurrence(rule, utc("2026-11-21T20:00"), zone=UTC))
    except ValueError as exc:
        answer = str(exc)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

    assert found.replace("T", " ") in answer


@pytest.mark.parametrize("freq", PERIODS)
def test_a_rule_for_a_leap_day_is_found_across_the_year_2100(freq: str) -> None:
    rule = rrule(freq, dtstart=utc("2020-02-29"), bymonth=2, bymonthday=29, byweekday=SU)

    assert next_occurrence(rule, utc("2088-12-31"), zone=UTC) == utc("2128-02-29")


def test_a_rule_that_does_not_move_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        next_occurrence(rrule("DAILY", dtstart=utc("2024-01-01"), interval=0), utc("2024-01-02"), zone=UTC)


# ---------------------------------------------------------------- schedules of one's own


class AtNoon(BaseSchedule):
    """Due at noon on its clock; cannot be copied by way of `__reduce__`."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        now = self.now()
        noon = last_run_at.replace(hour=12, minute=0, second=0, microsecond=0)
        return (noon if noon > last_run_at else noon + DAY) - now

    def __reduce__(self) -> str:
        raise NotImplementedError


class Answers(BaseSchedule):
    """Gives the answers that it was made with."""

    def __init__(self, remaining: timedelta | None, check: float | None) -> None:
        super().__init__()
        self.remaining, self.check = remaining, check

    def remaining_estimate(self, last_run_at: datetime) -> timedelta | None:
        return self.remaining

    def is_due(self, last_run_at: datetime) -> schedstate:
        return True, self.check


def test_a_schedule_of_ones_own_is_asked_as_if_it_ran_at_that_time() -> None:
    noon = AtNoon(nowfun=lambda: pytest.fail("a clock was read"))

    assert walls(noon, "2024-06-30T11:00", BERLIN, 2) == ["01 12:00 +0200", "02 12:00 +0200"]
    assert noon.nowfun is not None
    with pytest.raises(pytest.fail.Exception):
        noon.now()


def test_a_schedule_with_its_own_clock_does_not_read_it() -> None:
    class Clocked(AtNoon):
        def now(self) -> datetime:
            pytest.fail("a clock was read")

    assert walls(Clocked(), "2024-06-30T11:00", BERLIN, 1) == ["01 12:00 +0200"]


def test_a_subclass_with_its_own_estimate_is_asked_and_not_computed() -> None:
    class Doubled(schedule):
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return 2 * super().remaining_estimate(last_run_at)

    start = utc("2024-01-01")

    assert next_occurrence(Doubled(60), start, zone=UTC) == start + 2 * MINUTE
    assert next_occurrence(Doubled(60), start + MINUTE, zone=UTC) == start + 3 * MINUTE


def test_a_subclass_without_its_own_estimate_is_computed() -> None:
    class Named(schedule):
        pass

    start = utc("2024-01-01")

    assert following(Named(60), start, start + 90 * timedelta(seconds=1), zone=UTC) == start + 2 * MINUTE


@pytest.mark.parametrize(
    ("remaining", "check", "expected"),
    [
        (timedelta(seconds=5), 7, 5),
        (None, 7, None),
        (timedelta(), 7, 7),
        (timedelta(seconds=-5), 0.5, 0.5),
        (timedelta(seconds=-5), 0, 1),
        (timedelta(), -3, 1),
        (timedelta(), None, None),
    ],
)
def test_a_schedule_that_says_now_still_moves_forward(
    remaining: timedelta | None, check: float | None, expected: float | None
) -> None:
    start = utc("2024-01-01")

    found = next_occurrence(Answers(remaining, check), start, zone=UTC)

    assert found == (None if expected is None else start + timedelta(seconds=expected))


def test_a_schedule_that_only_knows_whether_it_is_due_is_asked_that() -> None:
    class Rare(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> schedstate:
            return schedstate(is_due=False, next=20.0)

    assert next_occurrence(Rare(), utc("2024-01-01"), zone=UTC) == utc("2024-01-01T00:00:20")


def test_each_question_to_a_schedule_of_ones_own_is_reported_before():
    """The watchdog of a beat must hear of each: each may take long."""
    events = list[str]()

    class Own(schedule):
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            events.append("question")
            return schedule.remaining_estimate(self, last_run_at)

        def is_due(self, last_run_at: datetime) -> schedstate:
            events.append("question")
            hour = self.now().hour
            return schedstate(hour >= 9, 3600.0)

    def report() -> None:
        events.append("report")

    with reporting_questions(report), reporting_questions(lambda: None):
        found = next_occurrence(Own(60), utc("2026-01-01T04:00"), zone=UTC)
    assert found == utc("2026-01-01T09:01")
    assert events.count("question") == 7
    assert [pair for pair in pairwise(["report", *events]) if pair == ("question", "question")] == []

    reported = len(events)
    next_occurrence(Own(60), utc("2026-01-01T09:00"), zone=UTC)
    assert "report" not in events[reported:], "only within the block"


def test_the_times_of_rules_are_reported_as_well():
    """Thousands of them may be calculated for one batch of ``beat_schedule``."""
    reported = list[bool]()
    with reporting_questions(lambda: reported.append(True)):
        next_occurrence(rrule("DAILY", dtstart=utc("2026-01-01T00:00")), utc("2026-01-01T00:00"), zone=UTC)
    assert reported


class Raising(BaseSchedule):
    """A schedule that raises a given error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def is_due(self, last_run_at: datetime) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_what_is_no_exception_is_an_error_of_its_schedule_alone(error):
    with pytest.raises(RuntimeError, match=re.escape(f"{error.__name__}('too late')")):
        next_occurrence(Raising(error("too late")), utc("2024-01-01"), zone=UTC)


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_a_schedule_may_end_the_process(ending):
    with pytest.raises(ending):
        next_occurrence(Raising(ending()), utc("2024-01-01"), zone=UTC)
