"""Kinds of schedules beside intervals, crontabs and rules, how all of them are stored, and what holds for each."""

from __future__ import annotations

import builtins
import json
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import partial
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from cronsim import CronSim
from dateutil.rrule import FR, MO, SU
from hypothesis import given, settings
from hypothesis import strategies as st
from redbeat.decoder import RedBeatJSONDecoder, RedBeatJSONEncoder
from redbeat.schedules import rrule

from singlebeat.beat.calendar.clocked import clocked
from singlebeat.beat.calendar.recurrence import latest_occurrence, next_occurrence, reads_clock, starts_at
from singlebeat.beat.entries.definition import decode_definition, encode_definition
from singlebeat.beat.entries.timetable import zone_of
from singlebeat.errors import EntryError

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
ZONES = [
    ZoneInfo(name)
    for name in (
        "Europe/Berlin",
        "Europe/Dublin",
        "Australia/Lord_Howe",
        "Pacific/Chatham",
        "Antarctica/Troll",
        "Africa/Casablanca",
        "America/Havana",
        "America/Asuncion",
        "Asia/Gaza",
        "Pacific/Kwajalein",
        "Pacific/Apia",
    )
]


def occurrences(plan: BaseSchedule, after: datetime, zone: tzinfo = UTC) -> Iterator[datetime]:
    while (found := next_occurrence(plan, after, zone=zone)) is not None:
        yield found
        after = found


def written(plan: object, given: BaseSchedule | None = None) -> str:
    fields = {"task": "t", "args": [], "kwargs": {}, "options": {}, "schedule": plan}
    return encode_definition(fields, {"schedule": given})


def stored(plan: object, given: BaseSchedule | None = None) -> dict[str, object]:
    found: dict[str, object] = json.loads(written(plan, given))["schedule"]
    return found


def read(raw: object, given: BaseSchedule | None = None) -> BaseSchedule:
    plan = decode_definition(json.dumps({"task": "t", "schedule": raw}), {"schedule": given})["schedule"]
    assert isinstance(plan, BaseSchedule)
    return plan


# ---------------------------------------------------------------- once


def test_a_clocked_entry_is_due_once() -> None:
    once = clocked(NOON)

    assert list(occurrences(once, NOON - 400 * DAY)) == [NOON]
    assert next_occurrence(once, NOON, zone=UTC) is None
    assert latest_occurrence(partial(next_occurrence, once, zone=UTC), NOON - HOUR, NOON + DAY) == NOON
    assert starts_at(once, NOON, zone=UTC) == NOON


def test_a_clocked_entry_works_in_a_beat_of_celery() -> None:
    now = NOON - MINUTE
    once = clocked(NOON, nowfun=lambda: now)

    assert once.is_due(NOON - DAY) == (False, 60)
    now = NOON + MINUTE
    assert once.is_due(NOON - DAY) == (True, None)
    assert once.is_due(NOON) == (False, None)


def test_a_clocked_entry_is_stored_by_its_instant_in_utc() -> None:
    once = clocked("2026-06-01T14:00:00+02:00")

    assert stored(once) == {"__type__": "clocked", "instant": "2026-06-01T12:00:00Z"}
    assert read(stored(once)) == once == clocked(NOON) != clocked(NOON + MINUTE)
    assert repr(pickle.loads(pickle.dumps(once))) == "<clocked: 2026-06-01T12:00:00Z>"


@pytest.mark.parametrize("instant", ["2026-06-01T12:00:00", "soon", None, 3, datetime(2026, 6, 1)])  # noqa: DTZ001
def test_a_clocked_entry_needs_an_instant_with_its_offset(instant: object) -> None:
    with pytest.raises(ValueError, match="clocked needs a date and time with offset"):
        clocked(instant)  # type: ignore[arg-type]
    if not isinstance(instant, datetime):
        with pytest.raises(EntryError, match="clocked needs"):
            read({"__type__": "clocked", "instant": instant})


# ---------------------------------------------------------------- the sun

pytest.importorskip("ephem")


def test_the_sun_rises_each_day_a_little_later_or_earlier() -> None:
    greenwich = solar("sunrise", 51.48, 0)

    found = list(islice(occurrences(greenwich, datetime(2026, 1, 1, tzinfo=UTC)), 365))

    assert {later.date() - earlier.date() for earlier, later in pairwise(found)} == {DAY}
    assert max(abs(later - earlier - DAY) for earlier, later in pairwise(found)) < 3 * MINUTE
    assert abs(found[171] - datetime(2026, 6, 21, 3, 43, tzinfo=UTC)) < 2 * MINUTE  # from the almanac
    assert all(moment.microsecond == 0 for moment in found)


def test_beyond_the_polar_circle_the_sun_waits_for_spring() -> None:
    svalbard = solar("sunset", 78.2, 15.6)

    found = list(islice(occurrences(svalbard, datetime(2026, 1, 1, tzinfo=UTC)), 120))

    gaps = [(earlier.month, later.month) for earlier, later in pairwise(found) if later - earlier > 2 * DAY]
    assert (found[0].month, found[-1].month) == (2, 10)
    assert gaps == [(4, 8)]


def test_at_the_pole_there_is_an_answer_for_every_event() -> None:
    never = solar("dawn_astronomical", 90, 0)
    assert next_occurrence(solar("solar_noon", 90, 0), NOON, zone=UTC) is not None

    found = next_occurrence(never, NOON, zone=UTC)

    assert found is None or found > NOON


@pytest.mark.parametrize("event", sorted(solar._all_events))
@pytest.mark.parametrize("place", [(51.48, 0.0), (-33.9, 151.2), (66.5, 25.7), (0.0, -179.9)])
def test_an_event_of_the_sun_is_the_same_at_any_time_of_asking(event: str, place: tuple[float, float]) -> None:
    plan = solar(event, *place)
    found = list(islice(occurrences(plan, datetime(2026, 5, 1, tzinfo=UTC)), 4))

    for earlier, later in pairwise(found):
        for asked in (earlier + timedelta(microseconds=1), earlier + (later - earlier) * 0.37, later - MINUTE):
            assert next_occurrence(solar(event, *place), asked, zone=BERLIN) == later


def test_a_solar_schedule_is_stored() -> None:
    plan = solar("dusk_civil", 52.5, -13.4)

    assert stored(plan) == {"__type__": "solar", "event": "dusk_civil", "lat": 52.5, "lon": -13.4}
    assert read(stored(plan)) == plan


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"lat": 1}, "lon"), ({"lat": 91, "lon": 0}, "latitude"), ({"lat": "north", "lon": 0}, "north"), ({}, "lat")],
)
def test_a_solar_schedule_that_cannot_be_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(EntryError, match=why):
        read({"__type__": "solar", "event": "sunrise", **fields})


def test_without_ephem_a_solar_entry_names_the_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ephem(name: str, *args: object) -> object:
        if name == "ephem":
            raise ImportError(name)
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_ephem)

    with pytest.raises(EntryError, match="a solar schedule needs the ephem library where beat runs: pip install ephem"):
        read({"__type__": "solar", "event": "sunrise", "lat": 1, "lon": 2})


# ---------------------------------------------------------------- rules


def test_the_first_monday_stays_the_first_when_it_is_stored() -> None:
    plan = rrule("MONTHLY", dtstart=NOON, byweekday=[MO(1), FR(-1)])

    text = written(plan)

    days = [{"__type__": "weekday", "wkday": 0, "n": 1}, {"__type__": "weekday", "wkday": 4, "n": -1}]
    assert json.loads(text)["schedule"]["byweekday"] == days
    for found in (decode_definition(text, {})["schedule"], json.loads(text, cls=RedBeatJSONDecoder)["schedule"]):
        assert list(islice(occurrences(found, NOON), 9)) == list(islice(occurrences(plan, NOON), 9))


@pytest.mark.parametrize(
    "days",
    [
        "1MO",
        ["1MO"],
        ["+1mo"],
        {"weekday": 0, "n": 1},
        [{"weekday": 0, "n": 1}],
        {"__type__": "weekday", "wkday": 0, "n": 1},
    ],
)
def test_a_weekday_may_be_written_in_many_ways(days: object) -> None:
    plan = read({"__type__": "rrule", "freq": "MONTHLY", "dtstart": NOON.timestamp(), "byweekday": days, "wkst": "SU"})

    found = next_occurrence(plan, NOON, zone=UTC)

    assert found == datetime(2026, 7, 6, 12, tzinfo=UTC)
    assert plan.wkst == SU


@pytest.mark.parametrize("day", ["XX", "MONDAY", "0MO", "aMO", {"n": 1}, {"weekday": 9}])
def test_a_weekday_that_there_is_not_is_refused(day: object) -> None:
    with pytest.raises(EntryError, match="definition has an invalid schedule"):
        read({"__type__": "rrule", "freq": "MONTHLY", "dtstart": 0, "byweekday": [day]})


def test_a_rule_is_written_as_redbeat_writes_it() -> None:
    plan = rrule("WEEKLY", dtstart=datetime(2026, 1, 1, 9, tzinfo=BERLIN), until=NOON, byweekday=[MO, FR], wkst=SU)

    assert json.loads(json.dumps(plan, cls=RedBeatJSONEncoder)) == stored(plan)


def test_a_rule_keeps_sets_and_ranges() -> None:
    plan = rrule("DAILY", dtstart=NOON, byhour=range(9, 12), byminute={30, 0}, bysecond=(0,))

    assert (stored(plan)["byhour"], stored(plan)["byminute"]) == ([9, 10, 11], [0, 30])
    assert list(islice(occurrences(read(stored(plan)), NOON), 7)) == list(islice(occurrences(plan, NOON), 7))


def test_a_rule_may_name_its_zone() -> None:
    plan = read({"__type__": "rrule", "freq": 3, "dtstart": 1767254400, "dtstart_tz": "Europe/Berlin"})

    assert {moment.astimezone(BERLIN).hour for moment in islice(occurrences(plan, NOON), 300)} == {9}


@pytest.mark.parametrize(
    ("part", "value"), [("bysecond", 60), ("bysecond", [0, 61]), ("byminute", [60]), ("byhour", [24]), ("byhour", -1)]
)
def test_a_rule_with_a_time_that_no_day_has_is_refused(part: str, value: object) -> None:
    with pytest.raises(EntryError, match=f"{part} of an rrule is 0 to (23|59), not "):
        read({"__type__": "rrule", "freq": "SECONDLY", "dtstart": 0, part: value})


def test_a_rule_without_a_start_is_refused() -> None:
    with pytest.raises(EntryError, match="an rrule needs freq and dtstart"):
        read({"__type__": "rrule", "freq": "DAILY"})


def test_the_zone_of_a_rule_or_of_a_clock_has_a_name() -> None:
    assert zone_of(rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=BERLIN))) == BERLIN
    assert zone_of(rrule("DAILY", dtstart=START)) == ZoneInfo("UTC")
    assert zone_of(rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=timezone(HOUR)))) is None
    assert zone_of(read(stored(rrule("DAILY", dtstart=START)))) is None  # it may have been London
    assert zone_of(crontab(nowfun=lambda: datetime.now(BERLIN))) == BERLIN
    assert zone_of(crontab()) is None


# ---------------------------------------------------------------- values that RedBeat cannot store


@pytest.mark.parametrize(
    "plan",
    [
        crontab(minute={30, 0}, hour=range(3), day_of_month=frozenset({1}), month_of_year=(1, 7)),
        pytest.param(crontab(minute=iter([5, 10])), id="an iterator"),
        crontab(minute=[0, 30], hour="*/4"),
        schedule(timedelta(milliseconds=1500)),
        schedule(timedelta(days=2), relative=True),
        clocked(NOON),
        solar("sunset", 1, 2),
    ],
    ids=str,
)
def test_a_schedule_survives_being_stored(plan: BaseSchedule) -> None:
    found = read(stored(plan))

    assert type(found) is type(plan)
    assert found == plan
    assert stored(found) == stored(plan)


# ---------------------------------------------------------------- a class of one's own


class Office(schedule):  # type: ignore[misc]
    """Due only in office hours: in Celery the usual way to make a custom schedule."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        if not 9 <= self.now().hour < 17:
            return schedstate(is_due=False, next=600)
        return super().is_due(last_run_at)


class Local(crontab):  # type: ignore[misc]
    """Asks its base, which reads its own zone."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return super().remaining_estimate(last_run_at)


class Named(crontab):  # type: ignore[misc]
    """Changes nothing about its times."""


def test_an_interval_with_hours_of_its_own_runs_in_them_only() -> None:
    found = list(islice(occurrences(Office(3 * HOUR), NOON, BERLIN), 4))  # 14:00 on its wall

    assert [moment.astimezone(BERLIN).strftime("%d %H:%M") for moment in found] == [
        "02 09:00",
        "02 12:00",
        "02 15:00",
        "03 09:00",
    ]


def test_a_schedule_that_never_agrees_is_an_error_and_not_an_endless_loop() -> None:
    class Never(Office):
        def is_due(self, last_run_at: datetime) -> schedstate:
            return schedstate(is_due=False, next=1)

    with pytest.raises(ValueError, match="never said that it is due"):
        next_occurrence(Never(60), NOON, zone=UTC)


def test_a_crontab_that_is_asked_reads_the_zone_of_the_entry() -> None:
    app = Celery(set_as_current=False)
    app.conf.timezone = "America/New_York"

    assert next_occurrence(Local(0, 9, app=app), NOON, zone=BERLIN) == datetime(2026, 6, 2, 7, tzinfo=UTC)


@pytest.mark.parametrize("plan", [Office(60), Local()])
def test_a_custom_schedule_is_not_stored_as_its_base_class(plan: BaseSchedule) -> None:
    with pytest.raises(TypeError, match="only beat_schedule can give"):
        stored(plan)


def test_a_schedule_of_ones_own_comes_from_the_configuration() -> None:
    plan = Office(60)
    raw = stored(plan, given=plan)

    assert raw == {"__type__": "given", "class": f"{__name__}.Office"}
    assert read(raw, given=plan) is plan
    with pytest.raises(EntryError, match=r"Office, which the beat_schedule of this app must give"):
        read(raw)


def test_a_class_that_changes_no_times_is_stored_as_its_base() -> None:
    assert type(read(stored(Named(5)))) is crontab


# ---------------------------------------------------------------- all kinds

START = datetime(2026, 1, 1, tzinfo=UTC)
begins = st.datetimes(datetime(1980, 1, 1), datetime(2024, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@st.composite
def rules(draw: st.DrawFn) -> rrule:
    hours = [None, (2,), (0, 1, 2, 3), tuple(range(24))]
    fields = {
        "freq": draw(st.sampled_from(["YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY"])),
        "interval": draw(st.integers(1, 9)),
        "byweekday": draw(st.sampled_from([None, (MO(1), FR(-1)), (0, 2, 4), (6,)])),
        "dtstart": draw(begins).astimezone(draw(st.sampled_from(ZONES))),
    }
    try:
        return rrule(**fields, byhour=draw(st.sampled_from(hours)))
    except ValueError:  # dateutil: no step of this interval is in these hours
        return rrule(**fields)


crontabs = st.builds(
    crontab,
    st.sampled_from(["*", "*/7", "*/30", 0, 30, "15,45", "59"]),
    st.sampled_from(["*", "*/2", 0, 1, 2, 3, "1-4", "23"]),
    st.sampled_from(["*", "*", "sun", "mon-fri"]),
    st.sampled_from(["*", "*", "1", "28-31", "13"]),
    st.sampled_from(["*", "*", "3-4,9-11", "2"]),
)
intervals = st.builds(schedule, st.timedeltas(timedelta(milliseconds=1), timedelta(days=3)))
#: Moments in years with odd shifts: the date line in 1993 and 2011, the rules of Casablanca and Gaza after it.
moments = st.sampled_from([1993, 2011, 2023, 2024, 2026]).flatmap(
    lambda year: st.datetimes(datetime(year, 1, 1), datetime(year, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001
)


@given(plan=rules() | crontabs | intervals, zone=st.sampled_from(ZONES), after=moments)
@settings(max_examples=150, deadline=None)
def test_times_are_strictly_increasing_in_every_zone(plan: BaseSchedule, zone: ZoneInfo, after: datetime) -> None:
    found = [after, *islice(occurrences(plan, after, zone), 15)]

    assert all(earlier < later for earlier, later in pairwise(found))


@given(
    plan=rules() | crontabs,
    zone=st.sampled_from(ZONES),
    after=moments,
    fraction=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_between_two_times_everybody_gets_the_same_answer(
    plan: BaseSchedule, zone: ZoneInfo, after: datetime, fraction: float
) -> None:
    found = next_occurrence(plan, after, zone=zone)
    if found is None:
        assert next_occurrence(plan, after + fraction * 400 * DAY, zone=zone) is None
        return

    asked = min(after + (found - after) * fraction, found - timedelta(microseconds=1))

    assert next_occurrence(plan, asked, zone=zone) == found
    assert next_occurrence(read(stored(plan)), asked, zone=zone_for(plan, zone)) == found


def zone_for(plan: BaseSchedule, zone: ZoneInfo) -> ZoneInfo:
    """Return the zone of the entry, which keeps that of its rule."""
    return zone_of(plan) or zone


@given(
    minute=st.sampled_from(["*", "*/7", "0", "30", "15,45"]),
    hour=st.sampled_from(["*", "*/5", "0", "2", "9-17"]),
    day=st.sampled_from(["*", "1", "29-31", "13"]),
    month=st.sampled_from(["*", "2", "*/3"]),
    weekday=st.sampled_from(["*", "5", "1-5"]),
    zone=st.sampled_from(["UTC", "Asia/Tokyo", "Asia/Kolkata", "Asia/Kathmandu", "America/Phoenix"]),
    after=moments,
)
@settings(max_examples=150, deadline=None)
def test_a_crontab_agrees_with_cronsim_where_clocks_do_not_shift(
    minute: str, hour: str, day: str, month: str, weekday: str, zone: str, after: datetime
) -> None:
    clock = ZoneInfo(zone)
    same = CronSim(f"{minute} {hour} {day} {month} {weekday}", after.astimezone(clock))
    same.day_and = True
    expected = [moment.astimezone(UTC) for moment in islice(same, 5)]

    plan = crontab(minute, hour, weekday, day, month)

    assert list(islice(occurrences(plan, after, clock), 5)) == expected


@given(every=st.timedeltas(timedelta(milliseconds=1), timedelta(days=10)), after=moments, steps=st.integers(1, 10**5))
@settings(deadline=None)
def test_the_last_of_many_missed_intervals_is_on_the_grid(every: timedelta, after: datetime, steps: int) -> None:
    until = after + steps * every + every * 0.5

    next_after = partial(next_occurrence, schedule(every), zone=UTC)

    assert latest_occurrence(next_after, after, until) == after + steps * every


@pytest.mark.parametrize(
    "plan",
    [schedule(60), crontab(), rrule("DAILY", dtstart=START), clocked(START), solar("sunrise", 1, 2), Office(60)],
    ids=str,
)
def test_the_end_of_the_calendar_is_harmless(plan: BaseSchedule) -> None:
    end = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)

    assert next_occurrence(plan, end, zone=UTC) is None


def test_a_leap_day_comes_every_four_years_but_in_2100() -> None:
    leap = rrule("YEARLY", dtstart=datetime(2096, 2, 29, tzinfo=UTC))

    for plan in (crontab(0, 0, "*", 29, 2), leap):
        found = list(islice(occurrences(plan, datetime(2096, 1, 1, tzinfo=UTC)), 3))
        assert [moment.year for moment in found] == [2096, 2104, 2108]


@pytest.mark.parametrize(
    ("plan", "reads"),
    [
        (crontab(), True),
        (rrule("DAILY", dtstart=START), True),
        (schedule(60, relative=True), True),
        (Office(60), True),
        (schedule(60), False),
        (solar("sunset", 1, 2), False),
        (clocked(NOON), False),
    ],
    ids=["crontab", "rrule", "relative", "own", "interval", "solar", "clocked"],
)
def test_it_is_known_which_schedules_read_a_wall_clock(plan: BaseSchedule, reads: bool) -> None:
    assert reads_clock(plan) is reads
