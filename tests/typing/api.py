"""The public interface as a typed program uses it: checked by mypy, never run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import assert_type
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab

from singlebeat import DuplicateTaskError, Entry, Schedule, clocked, exclusive
from singlebeat.beat.store.history import Record
from singlebeat.errors import ConflictError, EntryError, SinglebeatError, UnknownEntryError

app = Celery("shop")
schedule = Schedule(app)

entry = schedule.upsert(
    "bill",
    "shop.bill",
    crontab(minute=0),
    args=["all"],
    options={"queue": "slow"},
    overlap="buffer_one",
    misfire_grace_time=60,
    timezone=ZoneInfo("Europe/Berlin"),
    max_runs=3,
)
assert_type(entry, Entry)
Entry("greet", "shop.greet", timedelta(minutes=1), app=app, jitter=5, paused=True, note="until Monday").save()
Entry(name="once", task="shop.greet", schedule=clocked(datetime.now(ZoneInfo("UTC"))), app=app)
schedule.upsert("wrong", "shop.bill", 60, overlaps="skip")  # type: ignore[call-arg]
schedule.upsert("wrong", "shop.bill", 60, max_runs="3")  # type: ignore[arg-type]

assert_type(schedule.delete("bill"), bool)
assert_type(schedule.history("bill"), Sequence[Record])
assert_type(schedule.next_runs("bill", 3), Sequence[datetime])

with exclusive("nightly", app=app, lease=30) as lock:
    if lock:
        assert_type(lock.fence, int)

for error in (ConflictError, EntryError, UnknownEntryError, DuplicateTaskError):
    assert issubclass(error, SinglebeatError)
