"""Data as released versions of RedBeat have written it (recorded from their own encoders) is read as they meant it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery
from celery.schedules import crontab, schedule

from singlebeat import Entry
from singlebeat.beat.entries.definition import Meta

MOMENT = {
    "__type__": "datetime",
    "year": 2024,
    "month": 1,
    "day": 2,
    "hour": 3,
    "minute": 4,
    "second": 5,
    "microsecond": 6,
}
#: How each version writes a moment in UTC.
MOMENTS = {
    "0.13.0": MOMENT,
    "1.0.0": MOMENT,
    "2.0.0": {**MOMENT, "timezone": "UTC"},
    "2.2.0": {**MOMENT, "timezone": 0.0},
    "2.3.3": {**MOMENT, "timezone": 0.0},
}
#: The schedules look the same in all of them; rrule came with 1.0.
INTERVAL = {"__type__": "interval", "every": 60.0, "relative": False}
CRONTAB = {
    "__type__": "crontab",
    "minute": "5",
    "hour": "*/2",
    "day_of_week": "*",
    "day_of_month": "*",
    "month_of_year": "*",
}
PARTS = ("bysetpos", "bymonth", "bymonthday", "byyearday", "byeaster", "byweekno", "byweekday")
RRULE = {
    "__type__": "rrule",
    "freq": 3,
    "interval": 1,
    "wkst": None,
    "count": None,
    **dict.fromkeys((*PARTS, "byhour", "byminute", "bysecond")),
    "dtstart": 1704067200,
    "dtstart_tz": 0,
}


@pytest.mark.parametrize("version", MOMENTS)
def test_the_past_is_read_as_every_version_writes_it(version):
    text = json.dumps({"last_run_at": MOMENTS[version], "total_run_count": 7})

    assert Meta.decode(text) == Meta(datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC), 7)


@pytest.mark.parametrize(("written", "meant"), [(INTERVAL, schedule(60)), (CRONTAB, crontab(minute="5", hour="*/2"))])
def test_a_schedule_is_read_as_every_version_writes_it(written, meant):
    entry = read(written)

    assert entry.schedule == meant
    assert (entry.name, entry.task, entry.args, entry.enabled) == ("golden", "tasks.t", [1], True)


def test_a_rule_is_read_as_every_version_writes_it():
    entry = read(RRULE).with_past(Meta(datetime(2024, 1, 1, tzinfo=UTC)))

    assert entry.schedule.rrule.after(datetime(2024, 1, 1, tzinfo=UTC)) == datetime(2024, 1, 2, tzinfo=UTC)
    assert entry.due_at - datetime.now(UTC) < timedelta(seconds=1)


def read(written: dict) -> Entry:
    definition = {"name": "golden", "task": "tasks.t", "args": [1], "kwargs": {}, "options": {}}
    definition |= {"schedule": written, "enabled": True}
    app = Celery(broker="redis://127.0.0.1:1", set_as_current=False)
    return Entry.decode("redbeat:golden", json.dumps(definition), app)
