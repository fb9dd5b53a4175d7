"""Zones as users give them: by name, of zoneinfo, pytz and dateutil, fixed offsets, and what is refused."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab
from celery.utils.time import LocalTimezone
from dateutil import tz
from redbeat.schedules import rrule

from singlebeat import Entry
from singlebeat.beat.calendar.recurrence import next_occurrence
from singlebeat.beat.calendar.zone import app_zone
from singlebeat.beat.entries.backfill import Span
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.timetable import zone_of
from singlebeat.errors import ConfigError, EntryError
from tests.support import ROOT, PytzLike

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Own(tzinfo):
    """A zone of a user's own, in which clocks shift, without a name."""

    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return None if when is None else HOUR

    def dst(self, when: datetime | None) -> timedelta | None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "own"


def app_in(zone: Any) -> Celery:
    app = Celery(set_as_current=False)
    app.conf.update(timezone=zone, redbeat_redis_url="redis://")
    return app


ZONES = {
    "a name": "Europe/Berlin",
    "zoneinfo": BERLIN,
    "pytz": PytzLike(),
    "dateutil": tz.gettz("Europe/Berlin"),
}


@pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES)
@pytest.mark.parametrize("month", [1, 7])
def test_a_crontab_is_read_on_the_apps_zone_of_any_library(zone, month):
    app, midnight = app_in(zone), datetime(2026, month, 1, tzinfo=UTC)

    found = Entry("e", "t", crontab(hour=9, minute=0), app=app).timetable.next(midnight)

    assert found == datetime(2026, month, 1, 9, tzinfo=BERLIN)


@pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES)
def test_a_zone_of_any_library_is_taken_by_its_name(zone):
    assert app_zone(app_in(zone)) == BERLIN
    assert EntryPolicy.of({"timezone": zone}).timezone == BERLIN


@pytest.mark.parametrize("zone", list(ZONES.values())[1:], ids=list(ZONES)[1:])
def test_the_zone_of_a_rule_of_any_library_is_kept(zone):
    start = datetime(2026, 1, 1, 9, tzinfo=UTC).astimezone(zone)

    assert zone_of(rrule("DAILY", dtstart=start)) == BERLIN
    assert zone_of(crontab(nowfun=lambda: datetime.now(zone))) == BERLIN


@pytest.mark.parametrize("zone", [timezone(HOUR), tz.tzoffset(None, 3600)], ids=["datetime", "dateutil"])
def test_a_fixed_offset_stays_one(zone):
    assert app_zone(app_in(zone)) == timezone(HOUR)


@pytest.fixture
def in_berlin(monkeypatch):
    """The system's zone is Berlin's."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize("fold", [0, 1])
def test_the_zone_of_the_system_knows_both_passes_of_an_hour(fold):
    zone = app_zone(app_in(LocalTimezone()))

    assert datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=zone).astimezone(UTC).hour == fold


@pytest.mark.parametrize("zone", ["Europe/Berln", "/etc/passwd", Own(), 3], ids=["typo", "path", "own", "number"])
def test_a_zone_that_is_none_is_a_wrong_setting(zone):
    with pytest.raises(ConfigError, match="which is neither a known IANA name"):
        app_zone(app_in(zone))


@pytest.mark.parametrize("zone", [Own(), tz.tzstr("EST5EDT")], ids=["own", "dateutil"])
def test_an_entry_whose_zone_nothing_can_say_is_refused(zone):
    rule = rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=zone))

    with pytest.raises(EntryError, match="give the entry a timezone"):
        Entry("e", "t", rule, app=app_in("UTC"))

    assert Entry("e", "t", rule, app=app_in("UTC"), timezone="Europe/Berlin").policy.timezone == BERLIN


def test_a_rule_may_begin_in_the_apps_own_zone_without_a_name():
    local = tz.tzstr("EST5EDT")

    entry = Entry("e", "t", rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=local)), app=app_in(local))

    assert entry.policy.timezone is None


def test_a_time_without_a_zone_is_refused_wherever_it_comes_in():
    naive = NOON.replace(tzinfo=None)

    with pytest.raises(EntryError, match="start needs a time zone"):
        Span.of(naive, NOON, run="r")
    with pytest.raises(EntryError, match="end_time must be a date and time with offset"):
        EntryPolicy.of({"end_time": naive})
    with pytest.raises(ValueError, match="needs a time zone"):
        next_occurrence(crontab(), naive, zone=UTC)


def test_a_time_outside_of_the_calendar_is_refused():
    with pytest.raises(EntryError, match="end lies outside of the years 1 to 9999"):
        Span.of(NOON, datetime(9999, 12, 31, 23, 59, tzinfo=timezone(-14 * HOUR)), run="r")


def test_the_apps_zone_is_read_in_one_place():
    places = {
        path.name
        for path in (ROOT / "singlebeat").rglob("*.py")
        if re.search(r"\bapp\.timezone\b|conf\.timezone\b", path.read_text())
    }

    assert places == {"zone.py"}
