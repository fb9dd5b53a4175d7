"""The scheduler in this process, on a real server: what a tick sends, skips, keeps for later and survives."""

from __future__ import annotations

import itertools
import json
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any, ClassVar, NoReturn
from unittest.mock import Mock
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, Task
from celery.beat import Service
from celery.schedules import BaseSchedule, crontab, schedule
from celery.signals import after_task_publish, beat_init, before_task_publish
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from redbeat.schedules import rrule
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError

from singlebeat import Entry, Schedule, Scheduler, Singleton, clocked
from singlebeat import signals as events
from singlebeat.beat.backoff import LOGGED_EACH
from singlebeat.beat.calculating_time import CalculatingTime
from singlebeat.beat.calendar.recurrence import next_occurrence
from singlebeat.beat.entries import statics
from singlebeat.beat.entries.entry import PARKED, Meta
from singlebeat.beat.entries.fields import BATCH
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.timetable import Timetable
from singlebeat.beat.leadership.lease import Term, identity
from singlebeat.beat.plain_task import PlainTask
from singlebeat.beat.scheduler import POLL_INTERVAL
from singlebeat.beat.status import ScheduleStatus
from singlebeat.beat.store import claims
from singlebeat.beat.store.claims import Confirmation
from singlebeat.beat.store.quarantine import QUARANTINED
from singlebeat.beat.store.zone_change import Places
from singlebeat.beat.tick import SHORTEST_SLEEP
from singlebeat.errors import ConfigError, LockBackendError, UnusableLockError
from singlebeat.locks import backend_of, late_release
from singlebeat.locks.base import Call, Ref, Ticket, Verdict
from singlebeat.locks.key import behind_key, done_key
from singlebeat.locks.redis import RedisBackend
from singlebeat.outbox import Marker
from tests.incidents.tools import Tools
from tests.redis.bench import Bench
from tests.support import ROOT, PytzLike, RedisServer, SlowProxy, connected, contents, wait_until, without
from tests.system.apps import make_app

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
QUEUE = "celery"
SCHEDULE, STATICS, PENDING = "redbeat::schedule", "redbeat::statics", "redbeat::pending"
HISTORY, LOCK, LEADER = "redbeat::history", "redbeat::lock", "redbeat::leader"
QUARANTINE, LOST, OWNERS = "redbeat::quarantine", "redbeat::lost", "redbeat::owners"
HOUR = timedelta(hours=1)


def python(code: str) -> Any:
    """Run code in a fresh interpreter and return what it prints as JSON."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ---------------------------------------------------------------- before the first tick


@pytest.mark.parametrize("lazy", [True, False])
def test_making_a_scheduler_writes_connects_and_starts_nothing(bench, lazy):
    app = make_app(bench.server.celery_url, {"beat_schedule": {"e": {"task": PLAIN, "schedule": 60}}})
    clients = {client["id"] for client in bench.redis.client_list()}
    threads = set(threading.enumerate())

    scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler(lazy=lazy)
    shown = scheduler.info

    assert isinstance(scheduler, Scheduler)
    assert "redbeat::lock" in shown
    assert set(threading.enumerate()) <= threads
    assert {client["id"] for client in bench.redis.client_list()} <= clients
    assert bench.redis.dbsize() == 0


def test_the_scheduler_has_a_short_name():
    app = make_app("redis://127.0.0.1:1")

    assert isinstance(Service(app, scheduler_cls="singlebeat").get_scheduler(lazy=True), Scheduler)


LOOK_AT_REDBEAT = """
import json, redbeat, redbeat.schedulers, redbeat.decoder
from celery.signals import beat_init
def look():
    classes = (redbeat.RedBeatScheduler, redbeat.RedBeatSchedulerEntry, redbeat.schedulers.RedBeatConfig)
    classes += (redbeat.decoder.RedBeatJSONDecoder, redbeat.decoder.RedBeatJSONEncoder)
    found = {f"{c.__name__}.{k}": repr(v) for c in classes for k, v in vars(c).items()}
    found["module"] = {k: repr(v) for k, v in vars(redbeat.schedulers).items() if k != "__builtins__"}
    found["receivers"] = repr(beat_init.receivers)
    return found
before = look()
import singlebeat
objects = [getattr(singlebeat, name) for name in singlebeat.__all__]
print(json.dumps([before, look(), len(objects)]))
"""


def test_importing_singlebeat_does_not_change_redbeat():
    before, after, number = python(LOOK_AT_REDBEAT)

    assert number >= 6
    assert "RedBeatScheduler.tick" in before
    assert "acquire_distributed_beat_lock" in before["receivers"]
    assert after == before


def test_a_singleton_does_not_import_redbeat():
    code = "import json, sys; from singlebeat import Singleton; "
    code += "from celery.signals import beat_init; "
    code += "print(json.dumps([[m for m in sys.modules if m.startswith('redbeat')], len(beat_init.receivers or [])]))"

    assert python(code) == [[], 0]


def test_redbeats_own_receiver_leaves_our_scheduler_alone(bench):
    from redbeat.schedulers import acquire_distributed_beat_lock

    service = Service(bench.app, scheduler_cls="singlebeat.Scheduler")
    scheduler = service.scheduler

    beat_init.send(sender=service)
    acquire_distributed_beat_lock(sender=service)

    assert bench.redis.dbsize() == 0
    assert scheduler.tick() > 0
    assert bench.redis.get(LOCK) == scheduler.lease.term().token
    service.sync()
    assert bench.redis.exists(LOCK) == 0


@pytest.mark.parametrize(
    "url", ["redis://u:hunter2@127.0.0.1:1/3", "unix://:hunter2@/run/none", "redis://127.0.0.1:1/3?password=hunter2"]
)
def test_the_banner_shows_server_lock_and_lease_without_the_password(url):
    app = make_app("memory://", {"redbeat_redis_url": url, "redbeat_key_prefix": "mine:", "redbeat_lock_timeout": 42})

    shown = Scheduler(app, lazy=True).info

    assert "hunter2" not in shown
    assert url.split("?")[0].split("@")[-1].removeprefix("redis://") in shown
    assert "lock -> `mine::lock`, lease 42 s" in shown


def test_the_banner_says_that_there_is_no_lock():
    app = make_app("redis://127.0.0.1:1", {"redbeat_lock_key": None})

    assert "lock -> none" in Scheduler(app, lazy=True).info


# ---------------------------------------------------------------- what is due is sent


def test_a_due_entry_is_sent_once_under_the_id_of_its_occurrence(bench):
    entry = bench.put()
    nominal = entry.last_run_at + HOUR
    occurrence = Occurrence.of("redbeat:", "e", nominal)
    scheduler = bench.scheduler()

    for _ in range(3):
        scheduler.tick()

    assert [(message.id, message.args) for message in bench.messages] == [(occurrence.id, ["e"])]
    assert bench.meta() == Meta(nominal, 8)
    assert bench.pending() is None
    assert bench.redis.exists(PENDING) == 0
    ((record),) = bench.history
    assert (record["entry"], record["decision"], record["id"]) == ("e", "dispatched", occurrence.id)
    assert record["term"] == "1"


def test_the_next_time_stays_on_the_grid_and_lies_ahead(bench):
    entry = bench.put(ago=timedelta(hours=5, minutes=20))

    bench.scheduler().tick()

    ahead = entry.last_run_at + timedelta(hours=6)
    assert bench.score() == pytest.approx(ahead.timestamp(), abs=1e-5)
    assert len(bench.messages) == 1


def test_entries_are_sent_in_the_order_of_their_times(bench):
    for name, minutes in {"b": 10, "c": 5, "a": 20}.items():
        entry = bench.put(name)
        bench.redis.zadd(SCHEDULE, {entry.key: datetime.now(UTC).timestamp() - 60 * minutes})

    bench.scheduler().tick()

    assert bench.names == ["a", "b", "c"]


def test_an_entry_that_has_never_run_runs_at_once(bench):
    bench.put()
    bench.redis.hdel("redbeat:e", "meta")

    bench.scheduler().tick()

    assert bench.names == ["e"]
    assert bench.meta().total_run_count == 1


def test_nothing_due_is_nothing_sent_and_a_sleep_until_it_is(bench):
    bench.put(ago=timedelta())
    scheduler = bench.scheduler()

    delays = [scheduler.tick() for _ in range(3)]

    assert bench.messages == []
    assert all(0 < delay <= 1 for delay in delays)
    assert bench.meta().total_run_count == 7


def test_the_sleep_ends_when_an_entry_that_was_just_sent_is_due_again(bench):
    bench.put(every=timedelta(seconds=0.2), ago=timedelta(seconds=1))
    begun = datetime.now(UTC).timestamp()

    delay = bench.scheduler().tick()

    assert delay <= max(0.001, bench.score() - begun)


def test_the_sleep_ends_when_the_next_entry_is_due(bench):
    bench.put(every=0.4, ago=timedelta())
    scheduler = bench.scheduler()

    assert 0 < scheduler.tick() <= 0.4


def test_an_entry_that_is_written_while_beat_runs_is_sent(bench):
    scheduler = bench.scheduler()
    scheduler.tick()

    bench.put("new")
    scheduler.tick()

    assert bench.names == ["new"]


def test_a_disabled_entry_is_not_sent_and_its_time_goes_on(bench):
    entry = bench.put(enabled=False)
    scheduler = bench.scheduler()

    scheduler.tick()
    scheduler.tick()

    assert (bench.messages, bench.pending()) == ([], None)
    assert bench.decisions == ["paused"]
    assert bench.meta() == Meta(entry.last_run_at + HOUR, bench.meta().total_run_count)
    assert bench.score() > datetime.now(UTC).timestamp()


def test_an_entry_that_is_enabled_again_does_not_run_for_the_past(bench):
    entry = bench.put(enabled=False, ago=10 * HOUR)
    scheduler = bench.scheduler()
    scheduler.tick()
    entry.enabled = True
    entry.last_run_at = bench.meta().last_run_at
    bench.redis.hset(entry.key, "definition", entry.encode())

    scheduler.tick()

    assert bench.messages == []


def test_an_occurrence_later_than_its_grace_is_missed_and_not_counted(bench):
    entry = bench.put()
    bench.redis.hset(entry.key, "policy", '{"misfire_grace_time": 60}')
    before = bench.meta().total_run_count

    bench.scheduler().tick()

    assert (bench.messages, bench.pending()) == ([], None)
    assert bench.decisions == ["missed"]
    assert bench.meta() == Meta(entry.last_run_at + HOUR, before)
    assert bench.score() > datetime.now(UTC).timestamp()


def test_an_occurrence_within_its_grace_runs(bench):
    entry = bench.put()
    bench.redis.hset(entry.key, "policy", '{"misfire_grace_time": 7200}')

    bench.scheduler().tick()

    assert bench.names == ["e"]


@pytest.mark.parametrize(
    ("deadline", "is_crontab", "own", "decision"),
    [
        (60, True, {}, "missed"),
        (3600, True, {}, "dispatched"),
        (60, False, {}, "dispatched"),
        (60, True, {"misfire_grace_time": 3600}, "dispatched"),
        (3600, True, {"misfire_grace_time": 60}, "missed"),
    ],
)
def test_a_crontab_that_is_late_keeps_the_deadline_of_celery(
    deadline, is_crontab, own, decision, server, redis, bench_on
):
    """A policy of the entry wins; Celery's setting is for crontabs alone."""
    bench, half_an_hour_ago = bench_on(server, beat_cron_starting_deadline=deadline), datetime.now(UTC) - HOUR / 2
    bench.put(every=crontab(minute=half_an_hour_ago.minute) if is_crontab else HOUR, **own)

    bench.tick()

    assert bench.decisions == [decision]
    assert (decision == "dispatched") == bool(bench.messages)
    assert ("beat_cron_starting_deadline" in bench.history[0]["reason"]) == (decision == "missed" and not own)
    assert ("Without " in Tools(bench.app).ask("explain", "e")) == (decision == "missed")


def test_a_deleted_entry_is_not_sent(bench):
    bench.put().delete()

    bench.scheduler().tick()

    assert bench.messages == []


def test_an_entry_without_further_times_is_sent_once_and_parked(bench):
    from redbeat.schedules import rrule

    once = rrule("DAILY", dtstart=datetime.now(UTC) - HOUR, count=1)
    bench.put(every=once, ago=2 * HOUR)
    scheduler = bench.scheduler()

    scheduler.tick()
    scheduler.tick()

    assert bench.names == ["e"]
    assert bench.score() == PARKED


def test_a_rule_that_comes_once_waits_for_its_time_even_if_it_has_no_past(bench):
    """As another program may write it, without meta."""
    now = datetime.now(UTC).replace(microsecond=0)
    for name, start in {"ahead": now + HOUR, "due": now - timedelta(minutes=1)}.items():
        when = {"__type__": "rrule", "freq": 3, "count": 1, "dtstart": start.timestamp()}
        bench.redis.hset(f"redbeat:{name}", "definition", json.dumps({"task": PLAIN, "args": [name], "schedule": when}))
        bench.redis.zadd(SCHEDULE, {f"redbeat:{name}": 0})
    bench.tick(3)

    assert bench.names == ["due"]
    assert (bench.score("ahead"), bench.score("due")) == ((now + HOUR).timestamp(), PARKED)


def test_a_score_that_comes_too_early_is_corrected_and_nothing_sent(bench):
    entry = bench.put(ago=timedelta(minutes=1))
    bench.redis.zadd(SCHEDULE, {entry.key: datetime.now(UTC).timestamp() - 30})
    before = bench.meta()
    scheduler = bench.scheduler()

    scheduler.tick()

    assert bench.messages == []
    assert bench.meta() == before
    assert bench.score() == pytest.approx((entry.last_run_at + HOUR).timestamp(), abs=1e-5)


def test_a_crontab_that_has_run_today_is_not_sent_again_by_an_early_score(bench):
    now = datetime.now(UTC)
    entry = bench.put(every=crontab(minute=str((now.minute - 2) % 60)), ago=timedelta(minutes=1))
    bench.redis.zadd(SCHEDULE, {entry.key: now.timestamp() - 30})

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() > now.timestamp()


def test_a_score_ahead_is_waited_for_even_if_the_last_run_is_long_ago(bench):
    entry = bench.put(ago=99 * HOUR)
    ahead = datetime.now(UTC).timestamp() + 600
    bench.redis.zadd(SCHEDULE, {entry.key: ahead})

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() == ahead


def test_a_parked_entry_stays_parked(bench):
    entry = bench.put(ago=99 * HOUR)
    bench.redis.zadd(SCHEDULE, {entry.key: PARKED})

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() == PARKED


def test_a_last_run_in_the_future_is_waited_for(bench):
    entry = bench.put(ago=-3 * HOUR)
    bench.redis.zadd(SCHEDULE, {entry.key: 0})

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() == pytest.approx((entry.last_run_at + HOUR).timestamp(), abs=1e-5)


def test_an_entry_whose_last_run_is_far_in_the_future_counts_from_now(bench):
    entry = bench.put(every=HOUR, ago=-100 * HOUR)
    bench.redis.zadd(SCHEDULE, {entry.key: 0})
    scheduler = bench.scheduler()

    scheduler.tick()
    assert bench.messages == []
    assert 0 < bench.score() - datetime.now(UTC).timestamp() <= 3600
    bench.tick(at=datetime.now(UTC) + 1.5 * HOUR)

    assert bench.names == ["e"]
    assert bench.meta().last_run_at < datetime.now(UTC) + 2 * HOUR


def test_a_corrected_clock_that_was_days_ahead_silences_no_entry(bench, caplog):
    bench.put("hourly")
    bench.put("never ran", every=10 * HOUR)
    bench.redis.hset("redbeat:never ran", "meta", "")
    waits = datetime.now(UTC).timestamp() + 100 * 86400
    bench.redis.zadd(SCHEDULE, {"redbeat:never ran": waits})
    scheduler = bench.scheduler()
    bench.tick(at=datetime.now(UTC) + 48 * HOUR)
    assert bench.score("hourly") > datetime.now(UTC).timestamp() + 47 * 3600

    scheduler.tick()

    assert 0 < bench.score("hourly") - datetime.now(UTC).timestamp() <= 3600
    assert bench.score("never ran") == waits  # as an operator wanted it
    assert bench.names == ["hourly"]
    assert "The clock was set back" in caplog.text


def test_a_clock_that_was_ahead_under_another_leader_silences_no_entry(bench, caplog):
    bench.put("hourly")
    bench.put("yearly", every=365 * 24 * HOUR, ago=HOUR)
    bench.put("never ran", every=10 * HOUR)
    bench.redis.hset("redbeat:never ran", "meta", "")
    waits = datetime.now(UTC).timestamp() + 100 * 86400
    bench.redis.zadd(SCHEDULE, {"redbeat:never ran": waits})
    ahead = bench.scheduler()
    bench.tick(at=datetime.now(UTC) + 30 * 24 * HOUR)
    ahead.close()
    others = [("redbeat:yearly", bench.score("yearly")), ("redbeat:never ran", waits)]

    bench.scheduler().tick()

    assert 0 < bench.score("hourly") - datetime.now(UTC).timestamp() <= 3600
    assert bench.redis.zrange(SCHEDULE, 1, -1, withscores=True) == [others[1], others[0]]
    assert bench.names == ["hourly"]
    assert "The clock was set back" in caplog.text
    caplog.clear()
    for scheduler in bench.schedulers:
        scheduler.close()
    bench.scheduler().tick()
    assert "The clock was set back" not in caplog.text


def test_a_parked_entry_stays_parked_when_a_clock_is_set_back(bench):
    bench.put("once", every=clocked(datetime.now(UTC) + 24 * HOUR))
    scheduler = bench.scheduler()
    bench.tick(at=datetime.now(UTC) + 30 * 24 * HOUR)
    assert bench.names == ["once"]

    scheduler.tick()

    assert bench.score("once") == PARKED


def test_a_leader_whose_clock_was_behind_for_a_moment_repeats_nothing(bench):
    bench.put(ago=HOUR / 2)
    right = bench.score()
    for ahead in (0, -30 * 24, 0):
        scheduler = bench.scheduler()
        bench.tick(at=datetime.now(UTC) + ahead * HOUR)
        bench.tick(at=datetime.now(UTC) + ahead * HOUR)
        scheduler.close()

    assert bench.names == []
    assert bench.score() == pytest.approx(right)


@pytest.mark.parametrize("restarts", [False, True], ids=["one beat", "restarted"])
@pytest.mark.parametrize("case", ["ahead, missed", "ahead, sent", "behind, missed", "behind, sent"])
def test_a_time_that_a_wrong_clock_has_decided_comes_once(bench, restarts, case):
    """One that was decided by a right clock before the clock was behind for a moment does not come again."""
    now = datetime.now(UTC).replace(microsecond=0)
    due = now + timedelta(minutes=2)
    grace = {"misfire_grace_time": 30} if "missed" in case else {}
    daily = crontab(hour=due.hour, minute=due.minute)
    due = due.replace(second=0)
    bench.put(every=daily, last_run_at=due - 24 * HOUR, **grace)
    late = due + HOUR / 60
    moments = [now, now + 5 * HOUR, now, now + HOUR / 3600, due + HOUR / 3600]
    if "behind" in case:
        moments = [now, late, late - 5 * HOUR, late + HOUR / 3600, late + HOUR / 1800]

    scheduler = bench.scheduler()
    for moment in moments:
        bench.tick(at=moment)
        if restarts:
            scheduler.close()
            scheduler = bench.scheduler()

    assert bench.names == (["e"] if case != "behind, missed" else [])
    decisions = [record.decision for record in bench.schedule.history("e")][::-1]
    assert (
        decisions
        == {
            "ahead, missed": ["missed", "dispatched"],
            "ahead, sent": ["dispatched", "run_before"],
            "behind, missed": ["missed"],
            "behind, sent": ["dispatched"],
        }[case]
    )


def test_many_steps_back_count_as_one(bench):
    bench.put(every=HOUR)
    scheduler = bench.scheduler()
    for hours in (4, 2):
        bench.tick(at=datetime.now(UTC) + hours * HOUR)

    scheduler.tick()

    assert 0 < bench.score() - datetime.now(UTC).timestamp() <= 3600
    assert bench.names == ["e"]


def test_a_clock_that_was_ahead_finishes_no_entry_whose_end_has_not_come(bench):
    bench.put(end_time=datetime.now(UTC) + 30 * 24 * HOUR)
    scheduler = bench.scheduler()
    for _ in range(2):
        bench.tick(at=datetime.now(UTC) + 365 * 24 * HOUR)
    assert bench.score() == PARKED

    scheduler.tick()

    assert 0 < bench.score() - datetime.now(UTC).timestamp() <= 3600


def bounded_by(kind: str, now: datetime) -> dict[str, Any]:
    """Return the schedule and policy of an entry whose last time comes in two hours."""
    end, start = now + 2 * HOUR, now + timedelta(minutes=1)
    spans = {"count": {"count": 121}, "until": {"until": end}}
    if kind in spans:
        return {"every": rrule("MINUTELY", dtstart=now, **spans[kind])}
    return {"every": timedelta(minutes=1), "end_time": end, **({"start_time": start} if kind == "start" else {})}


@pytest.mark.parametrize("other_leader", [False, True], ids=["same leader", "next leader"])
@pytest.mark.parametrize("kind", ["end", "start", "until", "count"])
def test_a_clock_that_was_days_ahead_ends_no_entry_before_its_end(bench, kind, other_leader):
    now = datetime.now(UTC)
    bench.put(ago=timedelta(minutes=1), **bounded_by(kind, now))
    scheduler = bench.scheduler()
    for _ in range(2):
        bench.tick(at=now + 24 * HOUR)
    assert bench.score() == PARKED
    if other_leader:
        scheduler.close()
        scheduler = bench.scheduler()

    scheduler.tick()

    assert 0 < bench.score() - now.timestamp() <= 180
    sent = len(bench.names)
    bench.tick(at=now + HOUR)
    assert len(bench.names) == sent + 1
    for _ in range(2):
        bench.tick(at=now + 2.5 * HOUR)
    assert bench.score() == PARKED


def test_a_clock_that_was_hours_ahead_silences_no_entry_of_some_hours(bench):
    """Its last time by the wrong clock lies less than three hours ahead, and its next one is of tomorrow."""
    now = datetime.now(UTC)
    hours = {now.hour, (now.hour + 1) % 24}
    bench.put(every=crontab(hour=hours), ago=timedelta(minutes=1), timezone="UTC")
    scheduler = bench.scheduler()
    bench.tick(at=now + 12 * HOUR)
    assert bench.score() > (now + 12 * HOUR).timestamp()

    scheduler.tick()

    assert 0 < bench.score() - now.timestamp() <= 120


def test_a_clock_that_was_an_hour_ahead_repeats_no_time_before_the_end(bench):
    now = datetime.now(UTC)
    bench.put(every=timedelta(minutes=1), ago=timedelta(minutes=1), end_time=now + HOUR)
    scheduler = bench.scheduler()
    for _ in range(2):
        bench.tick(at=now + 2 * HOUR)

    scheduler.tick()

    assert bench.score() == PARKED


@pytest.mark.parametrize("grace", [None, 60], ids=["sent", "missed"])
def test_an_only_time_that_was_sent_by_a_wrong_clock_is_not_sent_again(bench, grace):
    now = datetime.now(UTC)
    bench.put("once", every=clocked(now + 2 * HOUR), ago=None, misfire_grace_time=grace)
    bench.put("used up", every=timedelta(minutes=1), max_runs=7)
    bench.put("long over", every=clocked(now - 2 * HOUR), ago=HOUR)
    scheduler = bench.scheduler()
    for _ in range(2):
        bench.tick(at=now + 24 * HOUR)

    scheduler.tick()

    assert bench.names == ([] if grace else ["once"])
    assert bench.score("once") == ((now + 2 * HOUR).timestamp() if grace else PARKED)
    assert (bench.score("used up"), bench.score("long over")) == (PARKED, PARKED)
    for _ in range(2):
        bench.tick(at=now + 2 * HOUR)
    assert bench.names == ["once"]


@pytest.mark.parametrize("resumed", ["before", "after"])
def test_a_clock_that_was_ahead_silences_no_paused_new_entry(bench, resumed):
    api = bench.schedule
    api.upsert("e", PLAIN, HOUR, args=["e"], paused=True, run_on_start=True)
    scheduler = bench.scheduler()
    bench.tick(at=datetime.now(UTC) + 365 * 24 * HOUR)
    assert bench.meta().last_run_at is None

    if resumed == "before":
        api.resume("e")
    scheduler.tick()
    api.resume("e")

    assert 0 < bench.score() - datetime.now(UTC).timestamp() <= 3600


def test_a_retry_does_not_wait_for_the_time_of_a_wrong_clock(bench):
    entry = bench.put(every=365 * 24 * HOUR)
    scheduler = bench.scheduler()
    ahead = datetime.now(UTC) + 30 * 24 * HOUR
    bench.tick(at=ahead)
    bench.redis.hset(entry.key, "pending", Occurrence.of("redbeat:", "e", ahead).encode())
    bench.redis.zadd(PENDING, {entry.key: ahead.timestamp() + 4})

    scheduler.tick()

    assert bench.names == ["e"]
    assert not bench.redis.zcard(PENDING)


def test_a_clock_that_steps_back_a_little_repeats_nothing(bench):
    bench.put()
    scheduler = bench.scheduler()
    bench.tick(at=datetime.now(UTC) + 2 * HOUR)
    score = bench.score()

    scheduler.tick()

    assert bench.names == ["e"]
    assert bench.score() == score


@pytest.mark.parametrize("task", [SINGLE, PLAIN])
def test_options_travel_with_the_message_and_are_not_changed(bench, task):
    options = {"headers": {"mine": "1"}, "queue": "other"}
    bench.put(task=task, options=options)
    definition = bench.redis.hget("redbeat:e", "definition")
    scheduler = bench.scheduler()

    scheduler.tick()

    (message,) = (json.loads(text) for text in bench.redis.lrange("other", 0, -1))
    assert message["headers"]["mine"] == "1"
    assert message["headers"].get("celery_beat_task", True) is True  # Celery 5.5 and 5.6 do not report it
    assert ("singlebeat_lock" in message["headers"]) is (task == SINGLE)
    assert bench.redis.hget("redbeat:e", "definition") == definition
    assert scheduler.store._decode("redbeat:e", definition).options == options


def test_what_a_receiver_writes_into_arguments_stays_in_one_message(bench):
    bench.put(task="unknown here", args=[[1]], kwargs={"seen": {"by": []}})

    def write(body: Any, **_: Any) -> None:
        body[0][0].append(2)
        body[1]["seen"]["by"].append("receiver")

    before_task_publish.connect(write)
    try:
        for _ in range(3):
            bench.tick()
            bench.make_due()
    finally:
        before_task_publish.disconnect(write)

    bodies = [json.loads(b64decode(json.loads(text)["body"])) for text in bench.redis.lrange("celery", 0, -1)]
    assert [body[:2] for body in bodies] == [[[[1, 2]], {"seen": {"by": ["receiver"]}}]] * 3


def test_a_task_that_beat_does_not_know_is_sent_by_its_name(bench):
    bench.put(task="elsewhere.task")

    bench.scheduler().tick()

    assert bench.names == ["e"]


def test_more_than_one_batch_is_due(bench):
    for at in range(501):
        bench.put(f"e{at}", task=PLAIN)
    scheduler = bench.scheduler()

    assert scheduler.tick() < 0.1
    scheduler.tick()

    assert len(set(bench.names)) == len(bench.names) == 501


class ExpensiveRules:
    """The clock of a beat's calculating time, on which a second passes whenever a time of a rule is asked for."""

    def __init__(self) -> None:
        self.now, self.when_asked = 0.0, lambda: None

    def __call__(self) -> float:
        return self.now

    def next_occurrence(self, schedule: BaseSchedule, after: datetime, *, zone: ZoneInfo) -> datetime | None:
        """Return the true answer."""
        if isinstance(schedule, rrule):
            self.now += 1
            self.when_asked()
        return next_occurrence(schedule, after, zone=zone)


@pytest.fixture
def expensive_rules(monkeypatch):
    clock = ExpensiveRules()
    monkeypatch.setattr("singlebeat.beat.entries.timetable.next_occurrence", clock.next_occurrence)
    monkeypatch.setattr("singlebeat.beat.store.claims.CalculatingTime", partial(CalculatingTime, clock))
    return clock


DAILY = rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=UTC))


def test_entries_with_expensive_rules_do_not_keep_others_waiting(bench, expensive_rules):
    """The others are sent first, and a tick calculates one such entry. The next one waits for as long as that took."""
    sent_when_asked = list[list[str]]()
    expensive_rules.when_asked = lambda: sent_when_asked.append(bench.names)
    for number in range(3):
        bench.put(f"slow{number}", task=PLAIN, every=DAILY, ago=(72 - number) * HOUR)
    bench.put("cheap", task=PLAIN)
    scheduler = bench.scheduler()

    sent = []
    for number in range(3):
        bench.make_due("cheap")
        began, _ = expensive_rules.now, sent_when_asked.clear()
        scheduler.tick()
        spent = expensive_rules.now - began
        assert 0 < spent == len(sent_when_asked)
        assert all(names == [*sent, "cheap"] for names in sent_when_asked), "the cheap one was sent before"
        sent += ["cheap", f"slow{number}"]
        assert bench.names == sent

        bench.make_due("cheap")
        expensive_rules.now += spent - 0.5
        scheduler.tick()
        sent.append("cheap")
        assert bench.names == sent, "half of the time is for the others"
        expensive_rules.now += 0.5


def test_a_beat_sleeps_while_only_expensive_entries_are_due(bench, expensive_rules):
    for number in range(2):
        bench.put(f"slow{number}", task=PLAIN, every=DAILY, ago=48 * HOUR)

    delay = bench.scheduler().tick()

    assert len(bench.names) == 1
    assert delay == POLL_INTERVAL


def test_an_entry_behind_a_batch_of_expensive_ones_is_sent(bench, redis, expensive_rules):
    fields = redis.hgetall(bench.put("slow", every=DAILY, ago=48 * HOUR).key)
    with redis.pipeline() as pipe:
        for number in range(BATCH):
            pipe.hset(f"redbeat:slow{number}", mapping=fields)
            pipe.zadd(SCHEDULE, {f"redbeat:slow{number}": 1})
        pipe.execute()
    bench.put("cheap")

    bench.tick(2)
    assert bench.names == ["slow", "cheap"]

    for _ in range(8):
        expensive_rules.now += 60
        bench.tick()
    later = bench.names[2:]
    assert len(later) > 3, "each round of ticks does one"
    assert set(later) == {"slow"}


def test_every_decision_is_signalled(bench):
    bench.put()
    told = []
    with connected(events.occurrence_decided, lambda entry, decision, **_: told.append((entry, decision.outcome))):
        bench.scheduler().tick()

    assert told == [("e", "dispatched")]


# ---------------------------------------------------------------- overlap


def test_an_occurrence_whose_task_is_still_queued_is_skipped(bench, caplog):
    caplog.set_level("INFO")
    holder = bench.app.tasks[SINGLE].delay("e")
    bench.put(task=SINGLE)

    scheduler = bench.scheduler()
    scheduler.tick()

    assert bench.ids == [holder.id]
    (record,) = bench.history
    assert record["decision"] == "skipped_overlap"
    assert f"held by task {holder.id}, queued since 20" in record["reason"]
    (line,) = (r.getMessage() for r in caplog.records if "Skipping" in r.getMessage())
    assert line.startswith(f"Scheduler: Skipping task e ({SINGLE}) event=skipped_overlap entry=e task={SINGLE} id=")
    assert f' holder={holder.id} reason="held by task {holder.id}, queued since 20' in line
    assert bench.pending() is None


def test_a_skipped_occurrence_is_not_counted_and_not_tried_again(bench):
    bench.app.tasks[SINGLE].delay("e")
    entry = bench.put(task=SINGLE)
    before = bench.meta()
    scheduler = bench.scheduler()

    for _ in range(3):
        scheduler.tick()

    assert bench.meta() == Meta(entry.last_run_at + HOUR, before.total_run_count)
    assert len(bench.history) == 1
    assert bench.score() > datetime.now(UTC).timestamp()


@pytest.mark.parametrize("overlap", [None, "buffer_one"], ids=["locked with others", "locked when it is sent"])
def test_a_singleton_that_another_entry_has_sent_is_named_with_that_entry(bench, caplog, logged, cli, overlap):
    caplog.set_level("INFO")
    for name in ("a", "b c"):
        bench.put(name, task=SINGLE, args=["same"], **({"overlap": overlap} if overlap else {}))

    bench.scheduler().tick()

    assert bench.names == ["same"]
    sent, skipped = bench.history
    assert [sent["decision"], skipped["decision"]] == ["dispatched", "skipped_overlap"]
    holder, other = sent["id"], sent["entry"]
    assert (skipped["holder"], skipped["holder_entry"]) == (holder, other)
    assert skipped["reason"].startswith(f"held by task {holder}, queued since 20")
    assert skipped["reason"].endswith(f"Z, of entry {other}")
    (line,) = logged("skipped_overlap")
    assert (line["holder"], line["holder_entry"], line["reason"]) == (holder, other, skipped["reason"])
    (record,) = bench.schedule.history(skipped["entry"])
    assert record.holder_entry == other
    (lock,) = json.loads(cli("locks", "--json", app=bench.app).output)
    assert (lock["task_id"], lock["entry"]) == (holder, other)
    assert f" {other} " in cli("locks", app=bench.app).output


def test_a_singleton_that_a_program_has_sent_is_of_no_entry(bench, caplog):
    caplog.set_level("INFO")
    bench.app.tasks[SINGLE].delay("e")
    bench.put(task=SINGLE)

    bench.scheduler().tick()

    assert bench.history[0]["holder_entry"] == ""
    assert "of entry" not in bench.history[0]["reason"]
    assert "holder_entry" not in caplog.text


def test_entries_with_other_arguments_do_not_overlap(bench):
    for name in ("a", "b"):
        bench.put(name, task=SINGLE)

    bench.scheduler().tick()

    assert sorted(bench.names) == ["a", "b"]


@pytest.mark.parametrize("overlap", [None, "buffer_one"], ids=["locked with others", "locked when it is sent"])
def test_entries_of_one_plain_call_do_not_keep_one_another_from_running(bench, caplog, overlap):
    caplog.set_level("INFO")
    backend_of(bench.app).announce("w@h", ttl=60)
    beat = bench.scheduler()

    for _ in range(2):
        for name in ("a", "b"):
            bench.put(name, args=["same"], **({"overlap": overlap} if overlap else {}))
            bench.make_due(name)
        beat.tick()

    decided = {(record["entry"], record["decision"]): record for record in bench.history}
    assert len(bench.history) == len(decided) == 4
    for name in ("a", "b"):
        sent, skipped = decided[name, "dispatched"], decided[name, "skipped_overlap"]
        assert (skipped["holder"], skipped["holder_entry"]) == (sent["id"], name), "its own runs do not pile up"
        assert "of entry" not in skipped["reason"]
    assert len(bench.redis.keys("SINGLETONLOCK_*")) == 2


@pytest.mark.parametrize("changed", [{"args": ["another"]}, {"options": {"queue": "other"}}, {"task": "elsewhere"}])
def test_an_entry_that_makes_another_plain_call_waits_for_no_run(bench, changed):
    backend_of(bench.app).announce("w@h", ttl=60)
    beat = bench.scheduler()
    bench.put()
    beat.tick()
    bench.put(**changed)
    bench.make_due()
    beat.tick()

    assert bench.decisions == ["dispatched", "dispatched"]


def test_the_same_entry_of_another_schedule_has_a_lock_of_its_own(server, redis, bench_on):
    for prefix in ("one:", "two:"):
        bench = bench_on(server, redbeat_key_prefix=prefix)
        backend_of(bench.app).announce("w@h", ttl=60)
        bench.put()
        bench.scheduler().tick()

    assert bench.names == ["e", "e"]
    assert len(redis.keys("SINGLETONLOCK_*")) == 2


def test_a_run_that_was_asked_for_takes_the_lock_of_its_entry(bench):
    backend_of(bench.app).announce("w@h", ttl=60)
    beat = bench.scheduler()
    bench.put()
    bench.put("other", args=["e"], ago=HOUR / 4)
    beat.tick()
    for name in ("e", "other"):
        bench.schedule.trigger(name)
        beat.tick()

    decided = [(record["entry"], record["decision"]) for record in bench.history]
    assert decided == [("e", "dispatched"), ("e", "skipped_overlap"), ("other", "dispatched")]


def test_a_task_of_another_uniqueness_layer_takes_its_lock_itself(bench):
    class Theirs(Task):
        def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> str:
            raise AssertionError("its keys are its own business")

    app = bench.new_app()
    app.task(die_in_publish, name="theirs", base=Theirs, shared=False)  # only its name matters here
    backend_of(app).announce("w", ttl=60)
    bench.put(task="theirs")

    bench.scheduler(app=app).tick()

    assert bench.names == ["e"]
    assert bench.redis.keys("SINGLETONLOCK_*") == []


@pytest.mark.parametrize("own", ["generate_lock", "unique_on"])
def test_a_key_that_a_user_makes_is_made_anew_for_each_run(bench, own):
    keys = iter("ab")

    class Own(Singleton):
        abstract = True

    if own == "generate_lock":
        Own.generate_lock = lambda *_: f"SINGLETONLOCK_{next(keys)}"
    else:
        Own.unique_on = staticmethod(lambda name: next(keys))

    def run(name: str) -> None:
        pass

    app = bench.new_app()
    app.task(run, name="own", base=Own, shared=False)
    bench.put(task="own", args=["e"])
    beat = bench.scheduler(app=app)

    beat.tick()
    bench.put(task="own", args=["e"])
    bench.redis.hdel("redbeat:e", "meta")
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    beat.tick()

    assert bench.decisions == ["dispatched", "dispatched"]
    assert len(bench.redis.keys("SINGLETONLOCK_*")) == 2


@pytest.mark.parametrize("field", ["nominal", "previous"])
@pytest.mark.parametrize("value", ["Infinity", "NaN", "1e300", "1e18"])
def test_a_claimed_time_that_is_none_does_not_hinder_the_others(bench, caplog, field, value):
    bench.put("a")
    bench.put("b")
    claimed = {"id": "x", "nominal": 1.0, field: "@"}
    bench.redis.hset("redbeat:a", "pending", json.dumps(claimed).replace('"@"', value))
    bench.redis.zadd(PENDING, {"redbeat:a": 0})

    bench.scheduler().tick()

    assert bench.names == ["b"]
    assert "pending cannot be read" in caplog.text


def test_a_claimed_run_without_an_id_is_quarantined(bench):
    """Its lock would look like a free one to every tool, and refuse all runs for an hour."""
    bench.put("a")
    bench.redis.hset("redbeat:a", "pending", json.dumps({"id": "", "nominal": 1.0, "kind": "manual"}))
    bench.redis.zadd(PENDING, {"redbeat:a": 0})

    bench.scheduler().tick()

    assert "its id is empty" in bench.redis.hget(QUARANTINE, "redbeat:a")
    assert not bench.redis.keys("SINGLETONLOCK_*")


def test_an_entry_that_has_run_in_the_last_microsecond_of_all_runs_again(bench):
    last = {"year": 9999, "month": 12, "day": 31, "hour": 23, "minute": 59, "second": 59, "microsecond": 999_999}
    past = {"last_run_at": {"__type__": "datetime", **last, "timezone": "UTC"}, "total_run_count": 1}
    bench.put("a", every=1)
    bench.put("b")
    bench.redis.hset("redbeat:a", mapping={"meta": json.dumps(past), "since": json.dumps({"since": None, **past})})
    beat = bench.scheduler()
    beat.tick()
    bench.redis.zadd(SCHEDULE, {"redbeat:a": 1.0})
    wait_until(lambda: beat.tick() and "a" in bench.names, what="its run")

    assert set(bench.names) == {"a", "b"}


def test_a_message_that_cannot_be_made_hinders_no_other(bench, monkeypatch):
    bench.put("a")
    bench.put("b")
    header = Occurrence.header
    monkeypatch.setattr(Occurrence, "header", lambda self, entry: header(self, entry) if entry == "b" else 1 / 0)

    bench.scheduler().tick()

    assert bench.names == ["b"]


@pytest.mark.parametrize("beside", [False, True])
def test_a_foreign_value_at_a_lock_key_does_not_hinder_other_entries(bench, caplog, beside):
    bench.put("a", task=SINGLE)
    bench.put("b", task=SINGLE)
    task = bench.app.tasks[SINGLE]
    lock = task.generate_lock(SINGLE, ["a"])
    foreign = done_key(lock) if beside else lock
    bench.redis.set(foreign, "somebody else's")

    bench.scheduler().tick()

    assert sorted(bench.names) == ["a", "b"]
    assert f"the lock {lock} is unusable: it must be a hash" in caplog.text
    assert bench.redis.get(foreign) == "somebody else's"
    assert bench.redis.hget(task.generate_lock(SINGLE, ["b"]), "state") == "queued"


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_run_that_would_wait_for_an_unreadable_lock_is_given_up(bench, task, caplog):
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put("a", task=task, overlap="buffer_one")
    bench.put("b")
    known = bench.app.tasks[SINGLE] if task == SINGLE else PlainTask(bench.app, PLAIN, {}, "a")
    bench.redis.set(known.generate_lock(task, ["a"], {}), "somebody else's")

    bench.scheduler().tick()

    assert bench.names == ["b"]
    decisions = {record["entry"]: (record["decision"], record["reason"]) for record in bench.history}
    decision, reason = decisions["a"]
    assert decision == "publish_failed"
    assert "is unusable: it must be a hash" in reason
    assert bench.redis.zcard(PENDING) == 0, "it would be tried for ever, whatever the broker does"
    assert "until the broker answers" not in caplog.text


def test_without_such_a_worker_plain_tasks_are_sent_without_a_lock(bench, caplog):
    for name in ("a", "b"):
        bench.put(name, args=["same"])
    scheduler = bench.scheduler()

    scheduler.tick()
    bench.put("c", args=["same"])
    scheduler.tick()

    assert bench.names == ["same"] * 3
    assert caplog.text.count("sent without a lock") == 1
    assert bench.redis.keys("SINGLETONLOCK_*") == []

    backend_of(bench.app).announce("w@h", ttl=60)
    for name in ("d", "e"):
        bench.put(name)
        scheduler.tick()
    assert [(r.levelname, r.singlebeat["event"]) for r in caplog.records] == [
        ("WARNING", "unlocked"),
        ("WARNING", "locked"),
    ]


# ---------------------------------------------------------------- the broker is unreachable


def test_a_failed_publish_is_repeated_under_the_same_id_exactly_once(
    server, redis, own_server, bench_on, caplog, logged
):
    bench = bench_on(server, broker_url=own_server.celery_url, task_publish_retry=False)
    entry = bench.put(task=SINGLE)
    occurrence = Occurrence.of("redbeat:", "e", entry.last_run_at + HOUR)
    scheduler = bench.scheduler()
    own_server.kill()

    assert scheduler.tick() > 0

    assert bench.pending().id == occurrence.id
    assert 0 < redis.zscore(PENDING, entry.key) <= datetime.now(UTC).timestamp() + 1
    assert bench.history == []
    assert "stay pending" in caplog.text

    own_server.restart()
    redis.zadd(PENDING, {entry.key: (datetime.now(UTC) + HOUR / 60).timestamp()})  # however long that took
    scheduler.tick()  # its time to be tried again has not come
    broker = own_server.client()
    assert broker.llen(QUEUE) == 0
    bench.retry_now()
    for _ in range(3):
        scheduler.tick()

    (message,) = broker.lrange(QUEUE, 0, -1)
    assert json.loads(message)["headers"]["id"] == occurrence.id
    assert bench.decisions == ["dispatched"]
    assert bench.meta() == Meta(entry.last_run_at + HOUR, 8)
    assert bench.pending() is None
    (told,) = logged("recovered")
    assert (told["level"], told["server"]) == ("WARNING", "the broker")


def test_an_unreachable_broker_is_asked_once_in_a_tick(server, redis, own_server, bench_on, caplog, monkeypatch):
    caplog.set_level("INFO")
    bench = bench_on(server, broker_url=own_server.celery_url, task_publish_retry=False)
    for at in range(5):
        bench.put(f"e{at}")
    own_server.kill()
    tries, scheduler = [], bench.scheduler()
    scheduler.work.one_write.rule_out("the broker is another server")
    connect = scheduler._ensure_connected
    monkeypatch.setattr(scheduler, "_ensure_connected", lambda: tries.append(1) or connect())

    scheduler.tick()

    assert len(tries) == 2, "the second one shows that the broker is down"
    assert "Sending due task" not in caplog.text
    assert caplog.text.count("stay pending") == 1
    assert redis.zcard(PENDING) == 5


def test_an_entry_with_retries_of_its_own_does_not_hold_up_beat(server, redis, own_server, bench_on, monkeypatch):
    bench = bench_on(server, broker_url=own_server.celery_url)
    waits = {"retry": True, "retry_policy": {"max_retries": 3}, "timeout": 3600, "confirm_timeout": 3600}
    for at in range(2):
        bench.put(f"e{at}", options=waits)
    scheduler = bench.scheduler()
    scheduler.work.one_write.rule_out("the broker is another server")
    retried, published, publish = [], [], Producer.publish
    monkeypatch.setattr(Connection, "ensure", lambda *args, **kwargs: retried.append(args))
    monkeypatch.setattr(Producer, "publish", lambda *args, **kw: published.append(kw) or publish(*args, **kw))

    def end_broker(**_: object) -> None:
        before_task_publish.disconnect(end_broker)
        own_server.kill()

    before_task_publish.connect(end_broker)  # it is connected then
    scheduler.tick()

    assert redis.zcard(PENDING) == 2
    assert not retried
    assert all(each["timeout"] == each["confirm_timeout"] == 5 for each in published)
    own_server.restart()
    bench.retry_now()
    scheduler.tick()
    assert own_server.client().llen(QUEUE) == 2


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_beat_sends_while_the_result_backend_is_down(server, redis, own_server, bench_on, task):
    """Beat awaits no result, so that sending must not subscribe to any: that blocks for 19 s, and fails then."""
    locks = {"singleton_backend_url": server.url, "redbeat_redis_url": server.url}
    bench = bench_on(server, result_backend=own_server.celery_url, **locks)
    bench.put(task=task)
    scheduler = bench.scheduler()
    own_server.kill()

    scheduler.tick()

    assert bench.names == ["e"]
    assert bench.decisions == ["dispatched"]


#: Options with which no message can be made, or none that the broker takes.
NEVER_SENT: dict[str, dict[str, Any]] = {
    "an unknown serializer": {"serializer": "no such thing"},
    "an unknown compression": {"compression": "no such thing"},
    "a compression of another type": {"compression": 5},
    "a queue that is none": {"queue": "foreign"},
}


def put_never_sent(bench: Bench, options: dict[str, Any], name: str = "bad") -> None:
    """Store an entry with options as another program may write them."""
    bench.redis.set("foreign", "no queue")
    entry = bench.put(name, task=SINGLE)
    fields = json.loads(bench.redis.hget(entry.key, "definition"))
    bench.redis.hset(entry.key, "definition", json.dumps({**fields, "options": options}))


@pytest.mark.parametrize("what", NEVER_SENT)
def test_an_unsendable_run_is_given_up_and_does_not_hinder_others(bench, caplog, what):
    put_never_sent(bench, NEVER_SENT[what])
    bench.put("good", task=SINGLE)
    before = bench.meta("bad").total_run_count
    scheduler = bench.scheduler()

    for _ in range(2):
        scheduler.tick()
        bench.retry_now()

    assert bench.names == ["good"]
    assert {r["entry"]: r["decision"] for r in bench.history} == {"bad": "publish_failed", "good": "dispatched"}
    assert [bench.meta(name).total_run_count for name in ("bad", "good")] == [before, before + 1]
    assert len(bench.history) == 2
    assert bench.redis.exists(PENDING) == 0
    assert len(bench.redis.keys("SINGLETONLOCK_*")) == 1
    assert "unreachable" not in caplog.text


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_a_plain_task_that_cancels_another_waits_for_the_broker(server, redis, own_server, bench_on, overlap):
    once = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    bench = bench_on(server, broker_url=own_server.celery_url, broker_transport_options=once)
    backend = backend_of(bench.app)
    backend.announce("w@h", ttl=60)
    bench.put(overlap=overlap)
    key = PlainTask(bench.app, PLAIN, {}, "e").generate_lock(PLAIN, ["e"], {})
    backend.begin(Ref(key, "running", nonce="n"), lease=60, remember_for=60, task=PLAIN, arguments="")
    scheduler = bench.scheduler()
    own_server.kill()

    assert scheduler.tick() > 0
    claimed = bench.pending()
    assert claimed is not None

    own_server.restart()
    bench.retry_now()
    scheduler.tick()

    (message,) = own_server.client().lrange(QUEUE, 0, -1)
    assert json.loads(message)["headers"]["id"] == claimed.id
    assert bench.decisions == ["buffered"]


class RefusedTask(Task):
    """One whose messages never reach the broker, and it seems to be the broker's fault."""

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["producer"].asked_at = time.monotonic()  # as if its connection had failed
        raise OperationalError("no route to the host")


def put_refused(bench: Bench, *names: str) -> Celery:
    """Store entries of such a task; return an app that has it."""
    app = bench.new_app()
    app.task(die_in_publish, name="refused", base=RefusedTask, shared=False)  # only its name matters here
    for name in names:
        bench.put(name, task="refused")
    return app


def test_runs_that_the_broker_never_takes_delay_no_other_entry(bench, caplog):
    """They are many, and come first."""
    bad = [f"a{at:02}" for at in range(40)]
    scheduler = bench.scheduler(app=put_refused(bench, *bad))
    for name in ("b", "c"):
        bench.put(name)

    scheduler.tick()
    assert bench.names == ["b", "c"]
    for name in ("d", "e"):
        bench.retry_now()
        bench.put(name)
        scheduler.tick()

    assert bench.names == ["b", "c", "d", "e"]
    assert sorted(bench.redis.zrange(PENDING, 0, -1)) == [f"redbeat:{name}" for name in bad]
    assert caplog.text.count("stay pending") == 1


def test_an_entry_that_alone_fails_is_named_again_and_again(bench, redis, logged):
    """What others are sent says nothing about it."""
    scheduler = bench.scheduler(app=put_refused(bench, "a"))
    for number in range(LOGGED_EACH + 20):
        if number % 10 == 0:
            bench.put(f"b{number}")
        scheduler.tick()
        bench.retry_now()

    named = logged("refused")
    assert [line["entry"] for line in named] == ["a"] * 2
    assert all("no route to the host" in line["reason"] for line in named)
    assert len(logged("unreachable")) == len(logged("recovered")) == 1


def test_entries_of_a_broker_that_is_away_are_not_named(server, redis, own_server, bench_on, logged):
    bench = bench_on(server, broker_url=own_server.celery_url)
    for name in ("a", "b"):
        bench.put(name)
    scheduler = bench.scheduler()
    own_server.kill()
    for _ in range(4):
        scheduler.tick()
        bench.retry_now()

    assert logged("refused") == []
    assert len(logged("unreachable")) == 1


def test_a_broker_is_named_that_only_an_own_connection_asks(server, redis, own_server, bench_on, logged):
    """A task's own ``apply_async`` leaves out beat's producer, so that Celery takes one of its pool."""
    bench = bench_on(server, broker_url=own_server.celery_url)
    app = bench.new_app()

    class OverPool(Task):
        abstract = True

        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            return super().apply_async(args, kwargs, task_id=options["task_id"], retry=False)

    app.task(die_in_publish, name="own", base=OverPool, shared=False)  # only its name matters here
    bench.put("e", task="own")
    scheduler = bench.scheduler(app=app)
    own_server.kill()
    scheduler.tick()

    assert [line["server"] for line in logged("unreachable", "refused")] == ["the broker"]
    own_server.restart()
    bench.retry_now()
    scheduler.tick()
    assert bench.decisions == ["dispatched"]


def test_a_broker_that_hangs_is_asked_once_in_a_tick(server, redis, bench_on, monkeypatch):
    """It takes connections, and each attempt to send would cost the same time again."""
    bench, tries = bench_on(server, singlebeat_socket_timeout=1), []
    scheduler = bench.scheduler(app=put_refused(bench, "a", "b"))

    def hang(self: Task, *args: Any, **kwargs: Any) -> Any:
        tries.append(args)
        time.sleep(1)
        raise TimeoutError

    monkeypatch.setattr(RefusedTask, "apply_async", hang)

    scheduler.tick()

    assert len(tries) <= 2  # the second one, alone, to learn what is wrong
    assert redis.zcard(PENDING) == 2


@pytest.mark.parametrize("passes", [True, False], ids=["a server", "no server"])
def test_an_occurrence_stays_pending_if_a_server_is_behind_its_error(bench, monkeypatch, passes):
    """However many layers of a task's own code, of Celery and of kombu have wrapped the error."""

    def wrap(self: Task, *args: Any, **kwargs: Any) -> Any:
        error, middle = RuntimeError(), ValueError()
        middle.__context__ = ConnectionRefusedError() if passes else RecursionError()
        raise error from middle

    scheduler = bench.scheduler(app=put_refused(bench, "a"))
    monkeypatch.setattr(RefusedTask, "apply_async", wrap)

    scheduler.tick()

    assert (bench.pending("a") is not None) is passes
    assert bench.decisions == ([] if passes else ["publish_failed"])


def test_an_error_that_was_raised_from_itself_is_given_up(bench, monkeypatch):
    def turn(self: Task, *args: Any, **kwargs: Any) -> Any:
        error = RuntimeError()
        raise error from error

    scheduler = bench.scheduler(app=put_refused(bench, "a"))
    monkeypatch.setattr(RefusedTask, "apply_async", turn)

    scheduler.tick()

    assert bench.decisions == ["publish_failed"]


def test_a_refused_run_waits_longer_each_time_and_others_do_not(bench):
    bench.scheduler(app=put_refused(bench, "a"))
    waits = []
    for name in ("b", "c", "d", "e"):
        now = datetime.now(UTC)
        bench.tick(at=now)
        waits.append(bench.redis.zscore(PENDING, "redbeat:a") - now.timestamp())
        bench.put(name)
        bench.retry_now()

    assert waits == pytest.approx([1, 2, 4, 4], abs=1e-3)
    assert bench.names == ["b", "c", "d"]


def test_a_poison_entry_does_not_delay_entries_retried_after_an_outage(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    scheduler = bench.scheduler(app=put_refused(bench, "a"))
    bench.put("b")
    own_server.kill()
    for _ in range(4):  # both have been tried, each of them more than once
        scheduler.tick()
        bench.retry_now()

    own_server.restart()
    for _ in range(3):
        scheduler.tick()
        bench.retry_now()

    assert own_server.client().llen(QUEUE) == 1
    assert redis.zrange(PENDING, 0, -1) == ["redbeat:a"]


def test_a_claim_written_by_another_program_is_confirmed_once_sent(bench):
    entry = bench.put(ago=timedelta())
    bench.redis.hset(entry.key, "pending", '{"nominal":1795302798,"id":"another"}')
    bench.redis.zadd(PENDING, {entry.key: 0})
    scheduler = bench.scheduler()

    for _ in range(2):
        scheduler.tick()
        bench.retry_now()

    assert bench.ids == ["another"]
    assert bench.pending() is None
    assert [record["id"] for record in bench.history] == ["another"]


def test_any_error_of_a_task_when_it_is_sent_harms_no_other_entry(bench):
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    class Own(Task):
        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            raise MuteError

    app = bench.new_app()
    app.task(die_in_publish, name="own", base=Own, shared=False)  # only its name matters here
    bench.put("a", task="own")
    bench.put("b")

    bench.scheduler(app=app).tick()

    assert bench.names == ["b"]
    assert {r["entry"]: r["decision"] for r in bench.history} == {"a": "publish_failed", "b": "dispatched"}


class Switched(Task):
    """A user's class, which sends nothing during maintenance; else its way of sending is Celery's."""

    abstract = True
    sends: ClassVar[bool] = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        return super().apply_async(*args, **options) if self.sends else None


class SwitchedAround(Switched, Singleton):
    abstract = True


class SwitchedBehind(Singleton, Switched):
    abstract = True


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("base", [Switched, SwitchedAround, SwitchedBehind])
def test_an_entry_whose_task_has_sent_nothing_goes_on_at_its_next_time(bench, monkeypatch, base, protocol):
    app = bench.new_app(task_protocol=protocol)
    backend_of(app).announce("w@h", ttl=60)
    app.task(die_in_publish, name="own", base=base, shared=False)  # only its name matters here
    bench.put("e", task="own")
    scheduler = bench.scheduler(app=app)
    monkeypatch.setattr(Switched, "sends", False)
    scheduler.tick()
    assert list(bench.redis.scan_iter("SINGLETONLOCK_*")) == []
    (record,) = bench.history
    unsent = {"publish_failed": "has sent no message", "dispatched": "has sent nothing yet, so without its lock"}
    assert record["decision"] == ("dispatched" if base is SwitchedBehind else "publish_failed")
    assert unsent[record["decision"]] in record["reason"]

    monkeypatch.setattr(Switched, "sends", True)
    bench.put("next", task="own")
    scheduler.tick()

    assert bench.decisions == [record["decision"], "dispatched"]
    (lock,) = bench.redis.scan_iter("SINGLETONLOCK_*")
    assert json.loads(bench.redis.hget(lock, "sent"))["queue"] == QUEUE


class Row:
    """What an own ``apply_async`` may return, such as a row of a table."""

    def __init__(self, key: Any) -> None:
        self.key = key

    @property
    def id(self) -> Any:
        if self.key is None:
            raise RuntimeError("no connection")
        return self.key


class Recording(Task):
    """A user's class, which sends as Celery does, and returns a row."""

    abstract = True
    key: ClassVar[Any] = 17

    def apply_async(self, *args: Any, **options: Any) -> Any:
        super().apply_async(*args, **options)
        return Row(self.key)


@pytest.mark.parametrize("key", [17, UUID(int=1)])
@pytest.mark.parametrize("protocol", [1, 2])
def test_what_an_own_apply_async_returns_is_not_asked_whether_it_has_sent(bench, monkeypatch, key, protocol):
    app = bench.new_app(task_protocol=protocol)
    backend_of(app).announce("w@h", ttl=60)
    app.task(die_in_publish, name="own", base=Recording, shared=False)  # only its name matters here
    bench.put("e", task="own")
    monkeypatch.setattr(Recording, "key", key)

    bench.scheduler(app=app).tick()

    (record,) = bench.history
    assert (record["decision"], record.get("reason", "")) == ("dispatched", "")
    assert len(list(bench.redis.scan_iter("SINGLETONLOCK_*"))) == 1


class Fanning(Task):
    """A user's class, which makes a call for each tenant of one."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return [super(Fanning, self).apply_async([tenant], kwargs, **options) for tenant in ("a", "b", "c")]


@pytest.mark.parametrize("protocol", [1, 2])
def test_each_message_that_a_task_makes_of_one_run_has_an_id_of_its_own(bench, caplog, protocol):
    """A worker would take them for copies of the first."""
    app = bench.new_app(task_protocol=protocol)
    backend_of(app).announce("w@h", ttl=60)
    app.task(die_in_publish, name="own", base=Fanning, shared=False)  # only its name matters here
    bench.put("e", task="own")

    bench.scheduler(app=app).tick()

    sent = [json.loads(message) for message in bench.redis.lrange(QUEUE, 0, -1)]
    ids = [message["properties"]["correlation_id"] for message in sent]
    assert len({*ids}) == 3
    assert ids[-1] == bench.history[0]["id"], "the first"
    if protocol == 2:
        assert [message["headers"]["id"] for message in sent] == ids
    assert bench.decisions == ["dispatched"]
    assert "made 3 messages of it, of which one has its lock" in bench.history[0]["reason"]
    assert "event=unlocked" in caplog.text


class Insisting(Task):
    """A user's class, which tries twice to send a call."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        with suppress(Exception):
            super().apply_async(*args, **options | {"priority": object()})
            pytest.fail("it was sent")
        return super().apply_async(*args, **options)


def test_a_second_try_of_a_task_to_send_a_run_keeps_its_id(bench):
    app = bench.new_app()
    backend_of(app).announce("w@h", ttl=60)
    app.task(die_in_publish, name="own", base=Insisting, shared=False)  # only its name matters here
    bench.put("e", task="own")

    bench.scheduler(app=app).tick()

    (message,) = bench.redis.lrange(QUEUE, 0, -1)
    assert json.loads(message)["headers"]["id"] == bench.history[0]["id"]
    assert bench.decisions == ["dispatched"]


class SendsAndRaises(Task):
    """A user's class, which tells another service of each call, and that is away."""

    abstract = True
    own_id: ClassVar[bool] = False

    def apply_async(self, *args: Any, **options: Any) -> Any:
        super().apply_async(*args, **options | ({"task_id": "own"} if self.own_id else {}))
        raise OSError("the audit service is away")


@pytest.mark.parametrize("own_id", [False, True])
def test_a_run_whose_task_raises_once_it_was_sent_is_not_sent_again(bench, monkeypatch, own_id):
    app = bench.new_app()
    backend_of(app).announce("w@h", ttl=60)
    app.task(die_in_publish, name="own", base=SendsAndRaises, shared=False)  # only its name matters here
    bench.put("e", task="own")
    monkeypatch.setattr(SendsAndRaises, "own_id", own_id)
    scheduler = bench.scheduler(app=app)

    scheduler.tick()
    bench.retry_now()
    scheduler.tick()

    (record,) = bench.history
    assert record["decision"] == "dispatched"
    assert "the audit service is away" in record["reason"]
    assert record["reason"].endswith("after it was sent as task own" if own_id else "after it was sent")
    assert Schedule(app).history("e")[0].is_sent_otherwise is own_id
    assert bench.redis.llen(QUEUE) == 1
    assert len(list(bench.redis.scan_iter("SINGLETONLOCK_*"))) == (0 if own_id else 1)


def test_a_run_stays_pending_while_a_database_that_its_task_asks_is_away(bench, caplog):
    """Its class writes a row about each call; SQLite's locked database stands for all databases."""
    app, is_locked = bench.new_app(), [True]

    class Audited(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            if is_locked:
                raise sqlite3.OperationalError("database is locked")
            return super().apply_async(*args, **options)

    app.task(die_in_publish, name="own", base=Audited, shared=False)  # only its name matters here
    bench.put("e", task="own")
    scheduler = bench.scheduler(app=app)

    scheduler.tick()
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage().startswith("beat: the message of e stays pending, because its own code fails")
    assert "database is locked" in line.getMessage()
    is_locked.clear()
    bench.retry_now()
    scheduler.tick()

    assert [record["decision"] for record in bench.history] == ["dispatched"]
    assert bench.redis.llen(QUEUE) == 1


def test_a_dead_connection_of_django_holds_up_no_run_for_long(bench, monkeypatch):
    """Its database was restarted. A connection of PostgreSQL fails then until it is closed."""
    app, is_dead = bench.new_app(), [True]
    monkeypatch.setattr("django.db.close_old_connections", is_dead.clear)

    class Audited(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            if is_dead:
                raise sqlite3.InterfaceError("connection already closed")
            return super().apply_async(*args, **options)

    app.task(die_in_publish, name="own", base=Audited, shared=False)  # only its name matters here
    bench.put("e", task="own")
    scheduler = bench.scheduler(app=app)

    scheduler.tick()
    bench.retry_now()
    scheduler.tick()

    assert [record["decision"] for record in bench.history] == ["dispatched"]


def test_the_runs_before_code_of_a_user_that_hangs_are_confirmed(bench):
    """The watchdog ends the beat then, and the next one would send what is not confirmed once more."""
    app, decided = bench.new_app(), list[Any]()

    class Hanging(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            decided.append({record["entry"]: record["decision"] for record in bench.history})
            return super().apply_async(*args, **options)

    app.task(die_in_publish, name="hanging", base=Hanging, shared=False)  # only its name matters here
    app.task(die_in_publish, name="own", base=Recording, shared=False)
    bench.put("a", task="own")
    bench.put("b", task="hanging")
    bench.put("c")

    with connected(before_task_publish, lambda **_: None):  # so each message is sent alone
        bench.scheduler(app=app).tick()

    assert decided == [{"a": "dispatched", "c": "dispatched"}]


def test_a_run_waits_for_a_database_that_its_route_asks(bench, caplog):
    """The other entries run, and no line says that the broker is away."""
    app, is_away = bench.new_app(), [True]

    def route(name: str, *_: Any, **__: Any) -> None:
        if is_away and name == "own":
            raise sqlite3.OperationalError("database is locked")

    app.conf.task_routes = (route,)
    app.conf.beat_schedule = {
        name: {"task": task, "schedule": 3600} for name, task in {"e": "own", "other": "o"}.items()
    }
    scheduler = bench.scheduler(app=app)
    scheduler.tick()
    for name in ("e", "other"):
        Schedule(app).trigger(name)

    scheduler.tick()
    assert {record["entry"]: record["decision"] for record in bench.history} == {"other": "dispatched"}
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [error for error in errors if "the message of e stays pending, because its own code" not in error] == []
    is_away.clear()
    bench.retry_now()
    scheduler.tick()

    decided = {record["entry"]: record["decision"] for record in bench.history}
    assert decided == {"e": "dispatched", "other": "dispatched"}


@pytest.mark.parametrize("error", [sqlite3.OperationalError("locked"), ConnectionRefusedError("no service")], ids=str)
def test_calls_that_an_own_apply_async_has_sent_are_not_sent_again(bench, error):
    """It sends one for each tenant, and what it does after that fails: at each try it would bill them once more."""
    app = bench.new_app()

    class PerTenant(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            self.app.send_task("bill", ["tenant"])
            raise error

    app.task(die_in_publish, name="own", base=PerTenant, shared=False)  # only its name matters here
    bench.put("e", task="own")
    scheduler = bench.scheduler(app=app)

    scheduler.tick()
    bench.retry_now()
    scheduler.tick()

    assert [record["decision"] for record in bench.history] == ["publish_failed"]
    assert bench.redis.llen(QUEUE) == 1


def test_a_result_that_cannot_be_read_harms_no_other_entry(bench, monkeypatch):
    app = bench.new_app()
    app.task(die_in_publish, name="own", base=Recording, shared=False)  # only its name matters here
    bench.put("a", task="own")
    bench.put("b")
    monkeypatch.setattr(Recording, "key", None)

    bench.scheduler(app=app).tick()

    assert {r["entry"]: r["decision"] for r in bench.history} == {"a": "dispatched", "b": "dispatched"}


def test_a_task_of_celery_singleton_is_sent_by_its_own_way(bench, cli):
    """It looks much like one of ours: the beats may be changed before the tasks."""
    app = bench.new_app()

    class Foreign(Task):
        abstract = True
        unique_on = None
        singleton_config = singleton_backend = None

        def generate_lock(self, name: str, args: Any = None, kwargs: Any = None) -> str:
            return "foreign"

        def apply_async(self, *args: Any, **options: Any) -> Any:
            if bench.redis.set("foreign", options["task_id"], nx=True):
                return super().apply_async(*args, **options)
            return self.AsyncResult(bench.redis.get("foreign"))

    app.task(die_in_publish, name="own", base=Foreign, shared=False)  # only its name matters here
    scheduler = bench.scheduler(app=app)
    for name in ("a", "b"):
        bench.put(name, task="own")
        scheduler.tick()

    sent, skipped = bench.history
    assert (sent["decision"], skipped["decision"]) == ("dispatched", "skipped_overlap")
    assert f"has sent nothing, for task {sent['id']}" in skipped["reason"]
    assert f"has sent nothing, for task {sent['id']}" in cli("explain", "b", app=app).output


def test_a_users_key_that_no_server_takes_harms_no_other_entry(bench):
    class Own(Singleton):
        abstract = True

        def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> str:
            return "\ud800"

    app = bench.new_app()
    app.task(die_in_publish, name="own", base=Own, shared=False)  # only its name matters here
    bench.put("a", task="own")
    bench.put("b", task=SINGLE)

    bench.scheduler(app=app).tick()

    assert bench.names == ["b"]
    assert {r["entry"]: r["decision"] for r in bench.history} == {"a": "publish_failed", "b": "dispatched"}


def test_a_pending_occurrence_past_its_grace_is_missed_and_not_counted(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(ago=HOUR + timedelta(seconds=1))
    before = bench.meta().total_run_count
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    assert bench.pending() is not None
    own_server.restart()
    redis.hset(entry.key, "policy", '{"misfire_grace_time": 0.001}')

    bench.retry_now()
    scheduler.tick()

    assert own_server.client().llen(QUEUE) == 0
    assert bench.decisions == ["missed"]
    assert bench.pending() is None
    assert bench.meta().total_run_count == before


@pytest.mark.parametrize("several", [False, True], ids=["one write", "several writes"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_run_whose_grace_ends_while_its_tick_waits_is_missed(bench, redis, request, task, several):
    if several:
        request.getfixturevalue("several_writes")
    bench.put(task=task, misfire_grace_time=60)
    bench.make_due(ago=HOUR + timedelta(seconds=100))
    before = bench.meta().total_run_count

    bench.tick(at=datetime.now(UTC) - timedelta(seconds=90))  # it has waited since then

    assert bench.messages == []
    assert bench.decisions == ["missed"]
    assert bench.pending() is None
    assert bench.meta().total_run_count == before
    assert list(redis.scan_iter("SINGLETONLOCK_*", _type="HASH")) == []


@pytest.mark.usefixtures("several_writes")
@pytest.mark.parametrize("overlap", [None, "buffer_one", "buffer_all", "cancel_other"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_lock_lasts_a_minute_until_its_message_is_sent(bench, redis, task, overlap):
    """A beat that is killed between the two cannot free it."""
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put(task=task, overlap=overlap, options={"queue": QUEUE})
    before, notes = [], []

    def look(**_: object) -> None:
        for key in redis.keys("SINGLETONLOCK_*"):
            before.append(redis.ttl(key))
            notes.append(json.loads(redis.hget(key, "sent")))

    with connected(before_task_publish, look):
        bench.scheduler().tick()

    assert [0 < ttl <= 60 for ttl in before] == [True]
    assert ["queue" in note for note in notes] == [False], "it may not be sent"
    assert [ttl > 3500 for ttl in map(redis.ttl, redis.keys("SINGLETONLOCK_*"))] == [True]


@pytest.mark.parametrize("overlap", [None, "buffer_one", "cancel_other"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_an_occurrence_that_waits_for_the_broker_holds_no_lock(server, redis, own_server, bench_on, task, overlap):
    """So its entry may be edited or deleted, by any program, and no lock is left of an id that was never sent."""
    bench = bench_on(server, broker_url=own_server.celery_url)
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put("first", task=task, args=["a"], overlap=overlap)
    bench.put("second", task=task, args=["b"], overlap=overlap)
    scheduler = bench.scheduler()
    own_server.kill()
    for _ in range(2):
        scheduler.tick()
        assert redis.zcard(PENDING) == 2
        assert redis.keys("SINGLETONLOCK_*") == []
        bench.retry_now()

    own_server.restart()
    scheduler.tick()

    assert own_server.client().llen(QUEUE) == 2
    assert len(redis.keys("SINGLETONLOCK_*")) == 2


GOES = {
    "deleted": lambda bench: bench.schedule.delete("e"),
    "deleted by hand": lambda bench: bench.redis.delete("redbeat:e"),
    "edited": lambda bench: bench.schedule.upsert("e", SINGLE, HOUR, args=["another"]),
    "removed from beat_schedule": lambda bench: None,
}


@pytest.mark.parametrize("how", GOES)
def test_an_entry_removed_while_it_is_pending_keeps_no_call_waiting(server, redis, own_server, bench_on, how):
    static = {"e": {"task": SINGLE, "schedule": 3600, "args": ["e"]}} if "beat_schedule" in how else {}
    bench = bench_on(server, broker_url=own_server.celery_url, beat_schedule=static)
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.put(task=SINGLE)
    bench.make_due()
    own_server.kill()
    scheduler.tick()
    assert bench.pending() is not None

    GOES[how](bench)
    scheduler.app.conf.beat_schedule.clear()
    own_server.restart()
    bench.retry_now()
    scheduler.setup_schedule()
    scheduler.tick()

    assert not bench.app.tasks[SINGLE].delay("e").is_duplicate


def all_undone() -> bool:
    return not late_release._releases._wanted and not late_release._releases.thread.is_alive


def test_an_occurrence_that_the_locks_server_did_not_answer_leaves_no_lock(server, redis, own_server, bench_on):
    """That server takes the locks when it goes on, and the entry may be gone by then."""
    bench = bench_on(server, singleton_backend_url=own_server.url, singlebeat_socket_timeout=0.2)
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    key = bench.app.tasks[SINGLE].generate_lock(SINGLE, ["e"])
    backend = backend_of(scheduler.app)
    backend.acquire_many([Call(Ref(key, "warm"), SINGLE, "", 1)])
    backend.unlock(key)
    own_server.pause()
    scheduler.tick()
    bench.schedule.delete("e")

    own_server.resume()

    wait_until(all_undone, timeout=30)
    assert own_server.client().exists(key) == 0


def test_a_lock_whose_release_failed_with_the_publish_is_freed_later(server, redis, own_server, bench_on):
    bench = bench_on(
        server,
        singleton_backend_url=own_server.url,
        singlebeat_socket_timeout=0.2,
        broker_url="redis+socket:///nowhere/s",
    )
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()

    with connected(before_task_publish, lambda **_: own_server.pause()):
        scheduler.tick()
    own_server.resume()

    assert bench.pending() is not None
    key = bench.app.tasks[SINGLE].generate_lock(SINGLE, ["e"])
    wait_until(lambda: not own_server.client().exists(key), what="the end of the lock")


def test_an_occurrence_that_is_tried_again_keeps_its_lock(server, redis, own_server, bench_on, monkeypatch):
    """The undoing of its first try must not free what the second one has taken."""
    bench = bench_on(server, singleton_backend_url=own_server.url, singlebeat_socket_timeout=0.2)
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    key = bench.app.tasks[SINGLE].generate_lock(SINGLE, ["e"])
    undone, sent = late_release._LateReleases._is_released, threading.Event()
    monkeypatch.setattr(late_release._LateReleases, "_is_released", lambda *args: sent.wait(30) and undone(*args))
    own_server.pause()
    scheduler.tick()
    own_server.resume()

    def is_sent() -> bool:
        bench.retry_now()
        scheduler.tick()
        return bench.names == ["e"]

    wait_until(is_sent, what="the message")
    sent.set()
    wait_until(all_undone, timeout=30)
    assert own_server.client().hget(key, "id") == bench.ids[0]


def test_the_next_occurrence_runs_in_the_tick_that_misses_the_last_one(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(task=SINGLE, ago=HOUR + timedelta(seconds=1))
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    own_server.restart()
    redis.hset(entry.key, "policy", '{"misfire_grace_time": 60}')
    bench.retry_now()

    bench.tick(at=datetime.now(UTC) + HOUR)

    assert bench.decisions == ["missed", "dispatched"]
    assert own_server.client().llen(QUEUE) == 1


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_missed_run_leaves_no_lock_acquired_without_a_reply(bench, task, behind):
    backend = backend_of(bench.app)
    backend.announce("w@h", ttl=60)
    entry = bench.put(task=task, ago=timedelta(), overlap="buffer_one", misfire_grace_time=1)
    occurrence = Occurrence.of("redbeat:", "e", datetime.now(UTC) - HOUR)
    bench.redis.hset(entry.key, "pending", occurrence.encode())
    bench.redis.zadd(PENDING, {entry.key: 0})
    key = PlainTask(bench.app, task, {}, "e").generate_lock(task, ["e"], {})
    key = bench.app.tasks[task].generate_lock(task, ["e"]) if task == SINGLE else key
    backend.acquire_many(
        [Call(Ref(behind_key(key) if behind else key, occurrence.id), task, "", 3600)], may_be_resent=True
    )

    bench.scheduler().tick()

    assert bench.decisions == ["missed"]
    assert list(bench.redis.scan_iter("SINGLETONLOCK_*", _type="HASH")) == []


def test_a_run_given_up_leaves_no_lock_acquired_without_a_reply(bench):
    app = bench.new_app()
    task = app.task(die_in_publish, name="own", base=Singleton, lock="until_executing", shared=False)
    entry = bench.put(task="own", ago=timedelta(), overlap="buffer_all")  # which contradicts the lock of its task
    occurrence = Occurrence.of("redbeat:", "e", datetime.now(UTC))
    bench.redis.hset(entry.key, "pending", occurrence.encode())
    bench.redis.zadd(PENDING, {entry.key: 0})
    key = task.generate_lock("own", ["e"])
    backend_of(app).acquire_many([Call(Ref(key, occurrence.id), "own", "", 3600)], may_be_resent=True)

    bench.scheduler(app=app).tick()

    assert bench.decisions == ["publish_failed"]
    assert bench.redis.keys("SINGLETONLOCK_*") == []


def test_a_run_missed_when_the_next_is_due_is_not_counted(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(ago=HOUR + timedelta(seconds=1), max_runs=8)
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    assert bench.meta().total_run_count == 8
    own_server.restart()
    redis.hset(entry.key, "policy", '{"misfire_grace_time": 60, "max_runs": 8}')
    bench.retry_now()

    bench.tick(at=datetime.now(UTC) + HOUR)
    assert bench.decisions == ["missed", "dispatched"]
    assert bench.meta() == Meta(entry.last_run_at + 2 * HOUR, 8)
    bench.tick(at=datetime.now(UTC) + 2 * HOUR)

    assert bench.score() == PARKED
    assert len(bench.history) == 2


@pytest.mark.usefixtures("several_writes")
def test_without_leadership_an_entry_runs_no_more_often_than_it_wants(server, redis, bench_on):
    """One beat reads while the last run may still turn out to be none; the other confirms it before the claim."""
    bench = bench_on(server, redbeat_lock_key=None)
    first, second = bench.scheduler(), bench.scheduler()
    second.tick()
    entry, now = bench.put(max_runs=8), datetime.now(UTC)
    die_in_publish(first)
    redis.zadd(PENDING, {entry.key: (now + 2 * HOUR).timestamp()})

    def confirm() -> None:
        (stored,) = first.store.due(now, all_pending=True).recovered
        decision = Decision("e", PLAIN, stored.pending, DecisionType.DISPATCHED)
        first.store.confirm([Confirmation(stored, decision)], first.lease.term())

    with before_the_claim(second, confirm):
        for _ in range(2):
            second._tick(now + HOUR, second.lease.acquire())

    assert bench.messages == []
    assert len(bench.history) == 1
    assert bench.meta().total_run_count == 8
    assert bench.score() == PARKED


def test_an_entry_is_not_finished_while_its_last_run_waits_for_the_broker(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(ago=HOUR + timedelta(seconds=1), max_runs=8)
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    redis.zadd(PENDING, {entry.key: datetime.now(UTC).timestamp() + 7200})

    bench.tick(at=datetime.now(UTC) + HOUR)
    assert bench.score() != PARKED  # it may yet be missed, and another run be the last one
    own_server.restart()
    bench.retry_now()
    for _ in range(2):
        bench.tick(at=datetime.now(UTC) + HOUR)

    assert bench.decisions == ["dispatched"]
    assert bench.score() == PARKED


@pytest.mark.parametrize("too_late", ["missed", "paused"])
@pytest.mark.parametrize("state", ["running", "ended", "another's"])
def test_a_run_that_was_sent_is_not_missed_and_its_lock_stays(server, redis, own_server, bench_on, state, too_late):
    """A beat was killed before it has recorded that the broker has the message, and the next one comes too late."""
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(task=SINGLE, ago=HOUR + timedelta(seconds=1))
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    lock = bench.app.tasks[SINGLE].generate_lock(SINGLE, ["e"])
    if state in {"running", "ended"}:
        run = Ref(lock, bench.pending().id, nonce="n")
        backend_of(bench.app).begin(run, lease=60, remember_for=60, task=SINGLE, arguments="")
        if state == "ended":
            backend_of(bench.app).finish_many([run], remember_for=60, ran=True)
    else:
        backend_of(bench.app).acquire_many([Call(Ref(lock, "another"), SINGLE, "", 3600)])
    before, backoff = redis.hgetall(lock), scheduler.dispatcher.failures.backoff
    assert backoff.failures_of(entry.key)
    redis.hset(entry.key, "policy", '{"misfire_grace_time": 0.001}' if too_late == "missed" else '{"paused": true}')

    own_server.restart()
    bench.retry_now()
    scheduler.tick()

    assert bench.decisions == [too_late if state == "another's" else "dispatched"]
    assert bench.meta().total_run_count == 7 + (state != "another's")
    assert own_server.client().llen(QUEUE) == 0
    assert redis.hgetall(lock) == before
    assert not backoff.failures_of(entry.key), "its next time would come last"


def test_a_late_run_may_yet_be_sent_if_its_decision_was_not_stored(server, redis, own_server, bench_on, monkeypatch):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    redis.hset(entry.key, "policy", '{"paused": true}')
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.store, "confirm", Mock(side_effect=RedisConnectionError("away")))
        bench.retry_now()
        scheduler.tick()
    redis.hdel(entry.key, "policy")
    own_server.restart()

    bench.retry_now()
    wait_until(lambda: scheduler.tick() and bench.decisions, timeout=30, what="a decision")

    assert bench.decisions == ["dispatched"]
    assert own_server.client().llen(QUEUE) == 1


def named(name: str) -> None: ...


@pytest.mark.parametrize("lock", ["until_executed", "until_executing", "until_and_while_executing", "until_expired"])
@pytest.mark.parametrize("begins", [True, False])
def test_a_run_under_any_lock_that_has_begun_is_not_called_paused(server, redis, own_server, bench_on, lock, begins):
    bench = bench_on(server, broker_url=own_server.celery_url)
    expiry = {"lock_expiry": 600} if lock == "until_expired" else {}
    task = bench.app.task(named, name="locked", base=Singleton, shared=False, lock=lock, **expiry)
    bench.put(task=task.name)
    scheduler = bench.scheduler(app=bench.app)
    confirm = scheduler.store.confirm
    scheduler.store.confirm = lambda *_: None  # it is killed before
    scheduler.tick()
    scheduler.store.confirm = confirm
    (message,) = [json.loads(raw)["headers"] for raw in own_server.client().lrange(QUEUE, 0, -1)]
    ticket = Ticket.of_message(message, message["id"]).delivered("n")
    about = {"lease": 60, "remember_for": 60, "task": task.name, "arguments": ""}
    if begins:
        backend_of(bench.app).begin(ticket.run, queued=ticket.queued, **about)
    before = {key: redis.hgetall(key) for key in redis.keys("*SINGLETONLOCK_*") if redis.type(key) == "hash"}
    redis.hset("redbeat:e", "policy", '{"paused": true}')

    bench.retry_now()
    scheduler.tick()

    assert bench.decisions == ["dispatched" if begins else "paused"]
    after = {key: redis.hgetall(key) for key in redis.keys("*SINGLETONLOCK_*") if redis.type(key) == "hash"}
    assert after == (before if begins else {})
    if not begins:  # its message waits in the queue
        late = backend_of(bench.app).begin(ticket.run, queued=ticket.queued, **about)
        assert late.verdict is Verdict.DONE, "what the history calls paused does not run"


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_what_is_called_paused_does_not_run_though_its_lock_is_freed_later(
    server, redis, own_server, bench_on, monkeypatch, task
):
    """The locks' server answers whether the run has begun, and is away then for a moment."""
    bench = bench_on(server, broker_url=own_server.celery_url)
    backend_of(bench.app).announce("w", ttl=60)  # which frees the locks of plain tasks
    bench.put(task=task)
    scheduler = bench.scheduler(app=bench.app)
    confirm = scheduler.store.confirm
    scheduler.store.confirm = lambda *_: None  # it is killed before
    scheduler.tick()
    scheduler.store.confirm = confirm
    (message,) = [json.loads(raw)["headers"] for raw in own_server.client().lrange(QUEUE, 0, -1)]
    ticket, backend = Ticket.of_message(message, message["id"]).delivered("n"), backend_of(bench.app)
    redis.hset("redbeat:e", "policy", '{"paused": true}')
    monkeypatch.setattr(backend, "finish_many", Mock(side_effect=LockBackendError("away")))  # not that of the thread

    bench.retry_now()
    scheduler.tick()

    assert bench.decisions == ["paused"]
    wait_until(lambda: redis.exists(done_key(ticket.key)))
    late = backend.begin(ticket.run, queued=ticket.queued, lease=60, remember_for=60, task=task, arguments="")
    assert late.verdict is Verdict.DONE


@pytest.mark.parametrize("how", ["paused", "disabled"])
def test_a_pending_occurrence_is_not_sent_once_its_entry_is_paused(server, redis, own_server, bench_on, how):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put(task=SINGLE, max_runs=9)
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    assert bench.pending() is not None
    if how == "paused":
        bench.schedule.pause("e", "the audit")
    else:
        bench.schedule.upsert("e", SINGLE, HOUR, args=["e"], enabled=False)

    own_server.restart()
    for _ in range(2):
        bench.retry_now()
        scheduler.tick()

    assert own_server.client().llen(QUEUE) == 0
    reason = {"paused": "the audit", "disabled": "disabled"}[how]
    assert [(record["decision"], record["reason"]) for record in bench.history] == [("paused", reason)]
    assert bench.pending() is None
    assert bench.meta().total_run_count == entry.total_run_count
    assert list(redis.scan_iter("SINGLETONLOCK_*", _type="HASH")) == []


def test_a_triggered_run_of_a_paused_entry_is_sent_after_an_outage(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    bench.put(ago=timedelta(), paused=True)
    task_id = bench.schedule.trigger("e")
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()

    own_server.restart()
    bench.retry_now()
    scheduler.tick()

    (message,) = own_server.client().lrange(QUEUE, 0, -1)
    assert json.loads(message)["headers"]["id"] == task_id


def test_a_pause_between_read_and_claim_is_heard(bench):
    bench.put()
    scheduler = bench.scheduler()

    with before_the_claim(scheduler, lambda: bench.schedule.pause("e")):
        for _ in range(2):
            scheduler.tick()

    assert bench.messages == []
    assert bench.decisions == ["paused"]


RESUMES: dict[str, Callable[[Schedule], object]] = {
    "resume": lambda api: api.resume("e"),
    "upsert": lambda api: api.upsert("e", PLAIN, HOUR, args=["e"]),
    "save": lambda api: _enabled(api.get("e")).save(),
}


def _enabled(entry: Entry) -> Entry:
    entry.enabled, entry.policy = True, EntryPolicy()
    return entry


@pytest.mark.parametrize("resume", RESUMES)
def test_an_entry_that_goes_on_makes_up_for_nothing_though_no_beat_ran(bench, resume):
    entry = bench.put(ago=2.5 * HOUR, **({"enabled": False} if resume == "upsert" else {"paused": True}))
    before = bench.score()

    RESUMES[resume](bench.schedule)

    upcoming = entry.last_run_at + 3 * HOUR  # on its grid, as if a beat had let its times pass
    assert before < bench.score() == upcoming.timestamp()
    scheduler = bench.scheduler()
    scheduler.tick()
    assert (bench.messages, bench.history) == ([], [])
    bench.tick(at=upcoming)
    assert bench.names == ["e"]
    assert [record["kind"] for record in bench.history] == ["scheduled"]
    assert bench.meta() == Meta(upcoming, 8)


def test_an_entry_that_has_never_run_and_goes_on_waits_for_its_next_time(bench):
    entry = bench.put(paused=True)
    bench.redis.hset(entry.key, "meta", Meta(None, 0).encode())
    bench.redis.zadd(SCHEDULE, {entry.key: 5})

    bench.schedule.resume("e")
    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() > (datetime.now(UTC) + HOUR / 2).timestamp()


@pytest.mark.parametrize("broken", [{"definition": "{"}, {"definition": "{", "meta": "{"}], ids=["definition", "both"])
def test_a_broken_entry_resumed_while_broken_catches_nothing_up(bench, broken):
    entry = bench.put(paused=True)
    good = bench.redis.hgetall(entry.key)
    bench.redis.hset(entry.key, mapping=broken)
    scheduler = bench.scheduler()
    scheduler.tick()

    bench.schedule.resume("e")

    assert bench.score() == QUARANTINED
    bench.redis.hset(entry.key, "definition", good["definition"])
    for _ in range(3):
        scheduler.tick()
    assert bench.messages == []


def test_a_finished_entry_that_is_resumed_stays_finished(bench):
    bench.put(max_runs=7, paused=True)
    scheduler = bench.scheduler()
    scheduler.tick()
    assert bench.score() == PARKED

    bench.schedule.resume("e")
    scheduler.tick()

    assert bench.score() == PARKED


def test_an_entry_that_is_not_paused_loses_no_time_by_resume(bench):
    bench.put()

    bench.schedule.resume("e")
    bench.scheduler().tick()

    assert bench.names == ["e"]


@pytest.mark.parametrize("again", [False, True], ids=["first", "set back"])
@pytest.mark.parametrize("overlap", [None, "buffer_one"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_run_that_was_not_sent_is_not_recorded_as_dispatched(bench, task, overlap, again):
    """An entry whose past is set back, by a restored backup or by hand, comes to the ids of runs that have ended."""
    backend = backend_of(bench.app)
    backend.announce("w@h", ttl=60)
    entry = bench.put(task=task, overlap=overlap, max_runs=9)
    occurrence = Occurrence.of("redbeat:", "e", entry.last_run_at + HOUR)
    key = PlainTask(bench.app, task, {}, "e").generate_lock(task, ["e"], {})
    key = bench.app.tasks[task].generate_lock(task, ["e"]) if task == SINGLE else key
    run = Ref(key, occurrence.id, nonce="n")
    if again:
        backend.begin(run, lease=60, remember_for=60, task=task, arguments="")
        backend.finish_many([run], remember_for=60, ran=True)

    bench.scheduler().tick()

    assert len(bench.messages) == (not again)
    (record,) = bench.history
    assert record["decision"] == ("run_before" if again else "dispatched")
    assert record["reason"] == (f"task {occurrence.id} has begun or ended before" if again else "")
    assert bench.meta().total_run_count == 7 + (not again)


def test_a_late_run_waits_for_the_locks_which_know_whether_it_was_sent(server, redis, own_server, bench_on, caplog):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    entry = bench.put(task=SINGLE, ago=HOUR + timedelta(seconds=1))
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    redis.hset(entry.key, "policy", '{"misfire_grace_time": 0.001}')
    bench.retry_now()

    assert scheduler.tick() > 0

    assert bench.decisions == []
    assert "Trouble with Redis" not in caplog.text  # the tick went on
    own_server.restart()
    bench.retry_now()
    wait_until(lambda: scheduler.tick() and bench.decisions, timeout=30, what="a decision")
    assert bench.decisions == ["missed"]
    assert bench.pending() is None


def test_a_run_missed_without_a_lock_backend_hinders_no_other_entry(server, redis, bench_on):
    bench = bench_on(server, singleton_backend_class="no.such:Backend")
    entry = bench.put("missed", ago=timedelta(), misfire_grace_time=1)
    bench.put("due")
    redis.hset(entry.key, "pending", Occurrence.of("redbeat:", "missed", datetime.now(UTC) - HOUR).encode())
    redis.zadd(PENDING, {entry.key: 0})

    bench.scheduler().tick()

    assert bench.names == ["due"]
    assert bench.decisions == ["missed", "dispatched"]


def test_a_pending_run_sent_without_a_lock_leaves_no_lock_behind(server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url)
    entry = bench.put()
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    key = PlainTask(bench.app, PLAIN, {}, "e").generate_lock(PLAIN, ["e"], {})  # as a leader leaves it that dies
    backend_of(bench.app).acquire_many([Call(Ref(key, bench.pending().id), entry.task, "", 3600)], may_be_resent=True)

    own_server.restart()  # and no worker is left to free it
    bench.retry_now()
    scheduler.tick()

    assert bench.decisions == ["dispatched"]
    assert redis.keys("SINGLETONLOCK_*") == []


def test_pending_entries_neither_hide_others_nor_keep_beat_awake(server, redis, own_server, bench_on, monkeypatch):
    monkeypatch.setattr("singlebeat.beat.store.claims.BATCH", 2)
    bench = bench_on(server, broker_url=own_server.celery_url)
    for at in range(4):
        bench.put(f"waits {at}")
    scheduler = bench.scheduler()
    own_server.kill()
    for _ in range(3):
        scheduler.tick()
    assert redis.zcard(PENDING) == 4
    for at in range(4):
        bench.make_due(f"waits {at}")
    bench.put("new")

    delays = [scheduler.tick() for _ in range(6)]

    assert bench.pending("new") is not None
    assert delays == [SHORTEST_SLEEP, SHORTEST_SLEEP, POLL_INTERVAL] * 2  # no round without a sleep
    own_server.restart()
    bench.retry_now()
    for _ in range(20):
        scheduler.tick()
    assert redis.exists(PENDING) == 0
    decisions = bench.decisions
    assert decisions == ["dispatched"] * 9  # each that had waited, and the next of it


# ---------------------------------------------------------------- a leader dies


@contextmanager
def before_the_claim(scheduler: Scheduler, do: Callable[[], object]) -> Iterator[None]:
    """Do something when a tick has read and decided, and is about to claim for the first time."""
    fence, done = scheduler.store.fence, []

    def late(term: Term) -> tuple[str, str]:
        if not done:
            done.append(True)
            do()
        return fence(term)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.store, "fence", late)
        yield


def die_in_publish(scheduler: Scheduler) -> None:
    """Tick, and end in the middle of the first publish without a chance to clean up the schedule."""

    def die(**_: Any) -> None:
        raise SystemExit

    with connected(before_task_publish, die), pytest.raises(SystemExit):
        scheduler.tick()


@pytest.mark.usefixtures("several_writes")
def test_a_claim_of_a_dead_leader_is_sent_by_the_next_one_at_once(bench):
    entry = bench.put(task=SINGLE)
    occurrence = Occurrence.of("redbeat:", "e", entry.last_run_at + HOUR)
    dead, heir = bench.scheduler(), bench.scheduler()
    die_in_publish(dead)
    assert (bench.pending().id, bench.messages) == (occurrence.id, [])
    assert bench.redis.zscore(PENDING, entry.key) > datetime.now(UTC).timestamp()
    bench.redis.delete(LOCK)  # as its time to live does

    for _ in range(3):
        heir.tick()

    assert [(message.id, message.args) for message in bench.messages] == [(occurrence.id, ["e"])]
    assert [(r["decision"], r["term"]) for r in bench.history] == [("dispatched", "2")]
    assert bench.meta() == Meta(entry.last_run_at + HOUR, 8)
    assert bench.pending() is None


@pytest.mark.usefixtures("several_writes")
@pytest.mark.parametrize("state", ["running", "done"])
def test_a_run_that_a_dead_leader_has_sent_is_not_sent_again(bench, state):
    entry = bench.put(task=SINGLE)
    occurrence = Occurrence.of("redbeat:", "e", entry.last_run_at + HOUR)
    die_in_publish(bench.scheduler())
    bench.redis.delete(LOCK)
    # Its message went out, and a worker has got it.
    backend = backend_of(bench.app)
    ref = Ref(bench.app.tasks[SINGLE].generate_lock(SINGLE, ["e"], {}), occurrence.id, nonce="n")
    begun = backend.begin(ref, lease=60, remember_for=60, task=SINGLE, arguments="")
    assert begun.verdict is Verdict.STARTED
    if state == "done":
        backend.finish_many([ref], remember_for=60)

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.decisions == ["dispatched"]
    assert bench.pending() is None


def test_a_claim_of_a_dead_leader_is_skipped_if_its_lock_is_held(bench):
    entry = bench.put(task=SINGLE)
    die_in_publish(bench.scheduler())
    bench.redis.delete(LOCK)
    backend = backend_of(bench.app)
    backend.clear("SINGLETONLOCK_")
    key = bench.app.tasks[SINGLE].generate_lock(SINGLE, ["e"], {})
    backend.acquire_many([Call(Ref(key, "another"), SINGLE, "", 60)])

    bench.scheduler().tick()

    assert bench.decisions == ["skipped_overlap"]
    assert bench.meta() == Meta(entry.last_run_at + HOUR, 7)


def lock_ttls(bench: Bench, *names: str) -> list[float]:
    """Return how many seconds the locks of entries last."""
    task = bench.app.tasks[SINGLE]
    return [bench.redis.pttl(task.generate_lock(SINGLE, [name])) / 1000 for name in names]


@pytest.mark.usefixtures("several_writes")
@pytest.mark.parametrize("how", ["closed", "deposed"])
def test_the_lock_of_a_run_that_a_beat_may_no_longer_send_ends_soon(bench, how):
    """For its entry may be gone before the next beat retakes it, and then nothing else frees that lock."""
    for name in ("a", "b", "c"):
        bench.put(name, task=SINGLE)
    leader, while_sending = bench.scheduler(), []

    def end(**_: Any) -> None:
        while_sending.extend(lock_ttls(bench, "a", "b", "c"))  # all that a beat leaves which is killed now
        if how == "closed":
            leader.close()
        else:
            bench.redis.set(LOCK, "thief", px=60_000)
            leader.lease.renew()

    with connected(after_task_publish, end):
        leader.tick()

    (sent,) = bench.names
    left = lock_ttls(bench, *sorted({"a", "b", "c"} - {sent}))
    assert len(while_sending + left) == 5
    assert all(0 < ttl <= 60 for ttl in while_sending + left)
    assert 3500 < lock_ttls(bench, sent)[0] <= 3600


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({}, 3500, 3600), ({"countdown": 7200}, 10_700, 10_800), ({"expires": 600}, 500, 600), ({"expires": 9}, 0, 9)],
)
def test_the_lock_of_a_message_lasts_for_as_long_as_that_may_wait(bench, options, least, most):
    bench.put("a", task=SINGLE)
    bench.put("b", task=SINGLE, options=options)

    bench.scheduler().tick()

    assert bench.names == ["a", "b"]
    other, ttl = lock_ttls(bench, "a", "b")
    assert 3500 < other <= 3600
    assert least < ttl <= most


@pytest.mark.parametrize("state", ["running", "done", "dropped"])
def test_a_lock_is_not_touched_that_a_worker_has_taken_amid_the_tick(bench, state):
    entry = bench.put("a", task=SINGLE)
    key = bench.app.tasks[SINGLE].generate_lock(SINGLE, ["a"])
    ref = Ref(key, Occurrence.of("redbeat:", "a", entry.last_run_at + HOUR).id, nonce="n")

    def work(**_: Any) -> None:
        backend = backend_of(bench.app)
        if state != "dropped":
            assert backend.begin(ref, lease=20, remember_for=60, task=SINGLE, arguments="").verdict is Verdict.STARTED
        if state != "running":
            backend.finish_many([ref], remember_for=60)

    with connected(after_task_publish, work):
        bench.scheduler().tick()

    assert bench.decisions == ["dispatched"]
    (ttl,) = lock_ttls(bench, "a")
    assert 0 < ttl <= 20 if state == "running" else ttl < 0


def test_a_sent_run_is_confirmed_though_the_locks_server_dies_mid_tick(server, redis, own_server, bench_on, caplog):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    bench.put(task=SINGLE)

    with connected(after_task_publish, lambda **_: own_server.kill()):
        bench.scheduler().tick()

    assert bench.decisions == ["dispatched"]
    assert bench.pending() is None
    assert "Locks end in 60 s unless their tasks start before event=unlocked" in caplog.text


# ---------------------------------------------------------------- leadership


def test_a_change_of_leaders_is_a_warning_and_a_first_start_is_none(bench, caplog):
    caplog.set_level("INFO")
    first, second = bench.scheduler(), bench.scheduler()
    first.tick()
    second.tick()
    first.close()
    second.tick()
    bench.redis.set(LOCK, "another", px=60_000)
    assert not second.lease.renew()
    second.tick()

    told = [(record.singlebeat["event"], record.levelname) for record in caplog.records]
    assert told == [
        ("leadership_gained", "INFO"),
        ("stands_by", "INFO"),
        ("lock_released", "INFO"),
        ("leadership_gained", "WARNING"),
        ("leadership_lost", "WARNING"),
        ("stands_by", "WARNING"),
    ]


def test_one_leads_and_the_other_stands_by_and_follows(bench, caplog):
    caplog.set_level("INFO")
    leader, standby = bench.scheduler(), bench.scheduler()
    leader.tick()
    bench.put()

    assert 0 < standby.tick() < 1
    standby.tick()
    assert bench.messages == []
    assert caplog.text.count("Standing by: ") == 1
    leader.close()
    standby.tick()

    assert bench.names == ["e"]
    assert "this beat leads event=leadership_gained term=2 leader=" in caplog.text


@pytest.mark.parametrize("ended", ["by itself", "by its leader"])
def test_a_new_leader_logs_whom_it_follows_if_that_one_died(bench, caplog, ended):
    caplog.set_level("INFO")
    leader, standby = bench.scheduler(), bench.scheduler()
    leader.tick()
    standby.tick()
    if ended == "by itself":
        bench.redis.pexpire(LOCK, 300)
        standby.tick()
        wait_until(lambda: not bench.redis.exists(LOCK), what="the end of the lock")
    else:
        leader.close()

    standby.tick()

    (line,) = [line for line in caplog.text.splitlines() if "leadership_gained term=2" in line]
    told = f'reason="{identity()} did not renew the lock for 10 s: it has died, hangs, or did'
    assert (told in line) is (ended == "by itself")


def test_a_standby_writes_only_that_it_stands_by(bench):
    bench.conf["beat_schedule"] = {"theirs": {"task": PLAIN, "schedule": 60}}
    bench.redis.set(LOCK, "another", px=60_000)

    bench.scheduler().tick()

    assert set(bench.redis.keys()) == {LOCK, "redbeat::standbys"}


@pytest.mark.parametrize("loss", ["stolen", "not trusted"])
def test_losing_the_lease_amid_a_tick_stops_the_publishing(bench, loss):
    for name in ("a", "b", "c"):
        bench.put(name)
    loser, heir = bench.scheduler(), bench.scheduler()

    def lose(**_: Any) -> None:
        bench.redis.set(LOCK, "thief", px=60_000)
        if loss == "stolen":
            loser.lease.renew()
        else:  # no renewal came through for the length of a lease
            loser.lease._trusted_until = 0

    with connected(after_task_publish, lose):
        loser.tick()

    assert len(bench.messages) == 1
    loser.tick()
    assert len(bench.messages) == 1

    bench.redis.delete(LOCK)
    heir.tick()
    assert sorted(bench.names) == ["a", "b", "c"]
    assert len(set(bench.ids)) == 3


def test_losing_the_lease_between_read_and_claim_changes_nothing(bench):
    bench.put()
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.put("late")
    before = bench.meta("late")
    bench.redis.set(LOCK, "thief", px=60_000)  # and no renewal has reported it

    scheduler.tick()

    assert bench.names == ["e"]
    assert bench.meta("late") == before
    assert bench.score("late") < datetime.now(UTC).timestamp()


def test_a_lost_lease_is_logged_once_and_signalled(bench, caplog):
    scheduler, told = bench.scheduler(), []
    with (
        connected(events.leadership_gained, lambda term, **_: told.append(("gained", term.number))),
        connected(events.leadership_lost, lambda term, **_: told.append(("lost", term.number))),
    ):
        scheduler.tick()
        bench.redis.set(LOCK, "thief", px=60_000)
        scheduler.lease.renew()
        for _ in range(3):
            scheduler.tick()
        bench.redis.delete(LOCK)
        scheduler.tick()

    assert told == [("gained", 1), ("lost", 1), ("gained", 2)]
    assert caplog.text.count("Lost the lock") == 1


def test_a_lost_lease_is_signalled_when_the_same_beat_leads_next(bench, caplog):
    scheduler, told = bench.scheduler(), []
    with (
        connected(events.leadership_gained, lambda term, **_: told.append(("gained", term.number))),
        connected(events.leadership_lost, lambda term, **_: told.append(("lost", term.number))),
    ):
        scheduler.tick()
        bench.redis.delete(LOCK)
        scheduler.lease.renew()
        for _ in range(2):
            scheduler.tick()

    assert told == [("gained", 1), ("lost", 1), ("gained", 2)]
    assert caplog.text.count("event=leadership_lost term=1") == 1


def test_with_the_lock_switched_off_two_beats_share_the_work(server, redis, bench_on):
    bench = bench_on(server, redbeat_lock_key=None)
    one, other = bench.scheduler(), bench.scheduler()
    one.tick()
    other.tick()
    for name in ("a", "b"):
        bench.put(name)

    for scheduler in (one, other, one, other):
        scheduler.tick()

    assert sorted(bench.names) == ["a", "b"]
    assert redis.exists(LOCK, LEADER) == 0


# ---------------------------------------------------------------- another zone


HONOLULU, BRISBANE = "Pacific/Honolulu", "Australia/Brisbane"


def places(redis: Redis) -> dict[str, float]:
    return {name.removeprefix("redbeat:"): score for name, score in redis.zrange(SCHEDULE, 0, -1, withscores=True)}


@pytest.mark.parametrize(
    "zones", [(HONOLULU, "UTC"), ("UTC", BRISBANE), ("UTC", PytzLike())], ids=["UTC", "Brisbane", "pytz"]
)
def test_a_changed_timezone_moves_every_wall_clock(server, redis, bench_on, zones, caplog):
    """Each new zone is east of the old one: what is due there in an hour would be due hours later."""
    name = getattr(zones[1], "zone", zones[1])
    now = datetime.now(UTC)
    soon = (now.astimezone(ZoneInfo(name)) + HOUR).replace(minute=30, second=0, microsecond=0)
    daily = crontab(hour=soon.hour, minute=30)
    rule = rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=UTC), byhour=soon.hour, byminute=30, bysecond=0)
    rule.dtstart = rule.dtstart.astimezone(timezone(timedelta()))  # of an offset alone, so read in the app's zone
    bench = bench_on(server, beat_schedule={"static": {"task": PLAIN, "schedule": daily}})
    old, new = (bench.scheduler(timezone=zone) for zone in zones)
    for entry, when, wishes in (
        ("stored", daily, {}),
        ("rule", rule, {}),
        ("disabled", daily, {"enabled": False}),
        ("ends before it is due in the old zone", daily, {"end_time": soon}),
        ("own zone", daily, {"timezone": "Asia/Tokyo"}),
        ("finished", daily, {"max_runs": 1, "total_run_count": 1}),
        ("interval", schedule(4 * HOUR), {}),
        ("once", clocked(now + 4 * HOUR), {}),
    ):
        Entry(entry, PLAIN, when, app=old.app, last_run_at=now, **wishes).save()
    bench.put("unusable")
    redis.hset("redbeat:unusable", "definition", "{")
    redis.zadd(SCHEDULE, {"redbeat:finished": PARKED})
    old.tick()
    before = places(redis)
    old.close()

    new.tick()

    moved = {"static", "stored", "disabled", "ends before it is due in the old zone"}
    moved |= {"rule"} if zones[0] == HONOLULU else set()  # elsewhere its start is not of the app's offset
    assert places(redis) == {**before, **dict.fromkeys(moved, soon.timestamp())}
    assert redis.get("redbeat::zone") == name
    assert f"Wall clocks are read in {name}, no longer in {zones[0]}" in caplog.text


def test_a_changed_timezone_moves_more_entries_than_one_batch_holds(server, redis, bench_on):
    now = datetime.now(UTC)
    soon = (now + HOUR).replace(minute=30, second=0, microsecond=0)
    bench = bench_on(server)
    entry = bench.put(every=crontab(hour=soon.hour, minute=30), ago=timedelta())
    fields, late = redis.hgetall(entry.key), (soon + 10 * HOUR).timestamp()
    with redis.pipeline() as pipe:
        for at in range(1200):
            pipe.hset(f"redbeat:e{at}", mapping=fields)
            pipe.zadd(SCHEDULE, {f"redbeat:e{at}": late})
        pipe.execute()
    redis.set("redbeat::zone", HONOLULU)
    steps: list[None] = []
    scheduler = bench.scheduler(timezone="UTC")
    scheduler.places._progress = lambda: steps.append(None)

    scheduler.tick()

    assert set(places(redis).values()) == {soon.timestamp()}
    assert redis.get("redbeat::zone") == "UTC"
    assert len(steps) > 1200


def test_ticks_move_expensive_entries_after_a_change_of_the_timezone(server, redis, bench_on, expensive_rules):
    """Their times would take long: they are due at once, and the ticks give them their places without a run."""
    now = datetime.now(UTC)
    soon = (now + HOUR).replace(minute=30, second=0, microsecond=0)
    start = datetime(2026, 1, 1, tzinfo=timezone(-10 * HOUR))  # its zone is no named one
    rule = rrule("DAILY", dtstart=start, byhour=(soon - 10 * HOUR).hour, byminute=30, bysecond=0)
    bench = bench_on(server)
    old, new = (bench.scheduler(timezone=zone) for zone in (HONOLULU, "UTC"))
    for number in range(4):
        Entry(f"e{number}", PLAIN, rule, app=old.app, last_run_at=now).save()
    old.tick()
    old.close()
    redis.zadd(SCHEDULE, dict.fromkeys(redis.zrange(SCHEDULE, 0, -1), (soon + 10 * HOUR).timestamp()))

    new.tick()
    for left in (3, 2, 1):
        assert redis.zcount(SCHEDULE, 0, time.time()) == left
        expensive_rules.now += 60
        bench.tick()

    assert set(places(redis).values()) == {soon.timestamp()}
    assert bench.names == []


def test_an_unchanged_timezone_costs_no_scan_of_the_entries(bench, monkeypatch):
    bench.scheduler().tick()
    bench.schedulers[0].close()
    monkeypatch.setattr(Places, "renew", lambda *_: pytest.fail("it looked"))

    for _ in range(2):
        bench.scheduler().tick()
        bench.schedulers[-1].close()


def test_a_place_in_the_zone_of_an_outgoing_beat_is_put_right(server, redis, bench_on):
    bench = bench_on(server, redbeat_lock_key=None)
    old, new = bench.scheduler(timezone=HONOLULU), bench.scheduler(timezone="UTC")
    soon = (datetime.now(UTC) + HOUR).replace(minute=30, second=0, microsecond=0)
    bench.put(every=crontab(hour=soon.hour, minute=30), ago=timedelta())
    new.tick()
    assert bench.score() == soon.timestamp()

    old.tick()
    redis.zadd(SCHEDULE, {"redbeat:e": (soon + 10 * HOUR).timestamp()})  # the old one has moved it on
    new._zone_turn_at = 0.0
    new.tick()

    assert bench.score() == soon.timestamp()


def test_beats_of_two_zones_that_share_the_work_do_not_undo_it_in_turns(server, redis, bench_on, caplog):
    """A rolling deploy without leadership: the beat that starts last decides, until the others' turn comes."""
    bench = bench_on(server, redbeat_lock_key=None)
    old, new = bench.scheduler(timezone=HONOLULU), bench.scheduler(timezone="UTC")
    old.tick()

    for at in range(5):
        for beat in (new, old):
            beat.tick()
            assert redis.get("redbeat::zone") == "UTC"
        bench.put(f"e{at}", every=crontab())
    new.tick()
    assert caplog.text.count("event=zone_changed") == 1
    assert [*dict.fromkeys(bench.names)] == [f"e{at}" for at in range(5)]

    bench.put("last", every=crontab())  # and the new one has died
    old.tick()
    assert "last" not in bench.names
    old._zone_turn_at = 0.0  # as time does
    old.tick()
    assert redis.get("redbeat::zone") == HONOLULU
    assert "last" in bench.names


@pytest.mark.parametrize("value", ["x", "inf", "9" * 30])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_lock_that_another_program_has_spoilt_harms_no_other_entry(bench, redis, caplog, value, one_by_one):
    if one_by_one:
        bench.app.conf.task_send_sent_event = True
    bench.put("spoilt", task=SINGLE)
    bench.put("good")
    task = bench.app.tasks[SINGLE]
    key = task.generate_lock(SINGLE, ["spoilt"], {})
    redis.hset(key, mapping=dict.fromkeys(("gen", "since", "until", "fence"), value) | {"id": "z", "state": "running"})
    scheduler = bench.scheduler()
    for _ in range(2):
        scheduler.tick()

    assert "good" in bench.names
    cause = f'its field until must be a number, and is "{value[:20]}"'
    assert (
        f"the lock {key} is unusable: {cause}; delete the lock (celery singlebeat unlock --force '{key}')"
        in caplog.text.replace('\\"', '"')
    )
    assert "must be a hash" not in caplog.text
    with pytest.raises(UnusableLockError, match=cause):
        task.delay("spoilt")


def test_a_beat_of_another_zone_sleeps_however_many_entries_are_due(server, redis, bench_on):
    bench = bench_on(server, redbeat_lock_key=None)
    old, new = bench.scheduler(timezone=HONOLULU), bench.scheduler(timezone="UTC")
    old.tick()
    new.tick()
    for at in range(BATCH):
        bench.put(f"e{at}")

    assert old.tick() == POLL_INTERVAL
    assert bench.names == []
    assert new.tick() == SHORTEST_SLEEP
    assert len(bench.names) == BATCH


def test_a_claim_that_was_decided_in_another_zone_is_refused(server, redis, bench_on):
    """Without leadership, nothing else keeps a beat of the old deploy from moving an entry on to its own time."""
    bench = bench_on(server, redbeat_lock_key=None)
    old, new = bench.scheduler(timezone=HONOLULU), bench.scheduler(timezone="UTC")
    old.tick()
    bench.put(every=crontab())

    with before_the_claim(old, lambda: new.places.renew(HONOLULU, datetime.now(UTC), Term(0, ""))):
        old.tick()
    assert bench.messages == []

    new.tick()
    assert bench.names == ["e"]


def test_a_beat_that_leads_no_longer_changes_no_places(server, redis, bench_on):
    bench = bench_on(server)
    old, new = bench.scheduler(timezone=HONOLULU), bench.scheduler(timezone="UTC")
    old.tick()
    bench.put(every=crontab(hour=3), ago=timedelta())
    stale = old.lease.term()
    redis.delete(LOCK)
    new.tick()
    before = contents = redis.dump(SCHEDULE), redis.get("redbeat::zone")

    old.places.renew("UTC", datetime.now(UTC), stale)

    assert contents == before == (redis.dump(SCHEDULE), "UTC")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("locked", [True, False], ids=["with leadership", "without"])
def test_beats_of_two_zones_double_nothing_and_lose_nothing(server, redis, bench_on, seed, locked):
    """A rolling deploy whose leadership flaps: in each hour one of the two ticks, for ten days."""
    bench = bench_on(server, **({} if locked else {"redbeat_lock_key": None}))
    beats = [bench.scheduler(timezone=zone) for zone in (HONOLULU, "UTC")]
    now = datetime.now(UTC).replace(minute=30, second=0, microsecond=0) + HOUR
    bench.put(every=crontab(hour=3, minute=0))
    chance = random.Random(seed)
    redis.hset("redbeat:e", "meta", Meta(now, 7).encode())

    for _ in range(240):
        now += HOUR
        beat = beats[chance.random() < chance.choice([0.1, 0.5, 0.9])]
        if locked and redis.get(LOCK) != beat.lease._last_token:
            redis.delete(LOCK)
            beat.lease._term = None
        beat._zone_turn_at = 0.0  # comes within the hour
        beat._tick(now, beat.lease.acquire())
        table = Timetable("e", crontab(hour=3, minute=0), EntryPolicy(), ZoneInfo(str(beat.app.timezone)))
        assert table.latest(bench.meta().last_run_at, now) is None, "late, or lost"

    sent = bench.ids
    assert len(set(sent)) == len(sent)
    assert bench.meta().total_run_count == 7 + len(sent)
    assert 10 <= len(sent) <= 20  # at three o'clock in either zone, at most


# ---------------------------------------------------------------- the entries of beat_schedule


def test_the_leader_installs_beat_schedule(server, redis, bench_on):
    entry = {"task": PLAIN, "schedule": 3600, "args": ("x",), "options": {"queue": "q"}}
    bench = bench_on(server, beat_schedule={"mine": entry})

    bench.scheduler().tick()

    stored = Entry.from_key("redbeat:mine", app=bench.app)
    assert (stored.task, stored.args, stored.options, stored.schedule) == (PLAIN, ["x"], {"queue": "q"}, schedule(3600))
    assert redis.smembers(STATICS) == {"mine"}
    assert bench.messages == []


def test_an_entry_of_an_operator_that_the_code_takes_over_is_named_once(server, redis, bench_on, logged):
    """A deploy that is rolled back would take it out of the schedule."""
    own = {"task": "t", "schedule": 60}
    bench = bench_on(server, beat_schedule={"mine": own, "new": own})
    bench.put("mine")

    for _ in range(2):
        bench.scheduler().tick()

    assert [line["entry"] for line in logged("taken_over")] == ["mine"]


def test_the_entry_that_celery_adds_is_never_parked(server, redis, bench_on, monkeypatch):
    bench = bench_on(server, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    monkeypatch.setattr(type(bench.app.backend), "supports_autoexpire", False)
    for _ in range(2):
        scheduler = bench.scheduler()
        scheduler.tick()
        scheduler.close()

    assert redis.exists("redbeat:celery.backend_cleanup")
    assert redis.keys("redbeat::parked:*") == []
    assert redis.smembers(STATICS) == {"mine"}


def test_what_a_dying_beat_installed_goes_with_the_next_deploy(server, redis, bench_on, monkeypatch):
    entry, save_entries = {"task": PLAIN, "schedule": 3600}, statics.save_entries
    dying = bench_on(server, beat_schedule={"both": entry, "only": entry}).scheduler()

    def save_and_die(*args: object, **kwargs: object) -> None:
        save_entries(*args, **kwargs)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(statics, "save_entries", save_and_die)
        with pytest.raises(SystemExit):
            dying.tick()
    assert redis.exists("redbeat:both", "redbeat:only") == 2
    dying.lease.release()

    bench_on(server, beat_schedule={"both": entry}).tick()

    assert redis.smembers(STATICS) == {"both"}
    assert [redis.exists(key) for key in ("redbeat:both", "redbeat:only", "redbeat::parked:only")] == [1, 0, 1]


@pytest.mark.parametrize("step", ["_own", "_unpark", "save_entries"])
def test_what_a_dying_beat_put_back_goes_with_the_next_deploy(server, redis, bench_on, monkeypatch, step):
    """As the beat of a deploy that is rolled back, and is killed after one of its steps."""
    entry = {"task": PLAIN, "schedule": 3600}
    old, new = {"both": entry, "only": entry}, {"both": entry}

    def deploy(entries: dict[str, Any]) -> None:
        scheduler = bench_on(server, beat_schedule=entries).scheduler()
        try:
            scheduler.tick()
        finally:
            scheduler.close()

    def places() -> set[str]:
        return {*redis.zrange(SCHEDULE, 0, -1)}

    deploy(old)
    redis.hset("redbeat:only", "meta", Meta(datetime.now(UTC), 7).encode())
    deploy(new)
    assert places() == {"redbeat:both"}

    where = statics if step == "save_entries" else statics.Statics
    run, done = getattr(where, step), list[str]()

    def run_and_die(*args: Any, **options: Any) -> None:
        run(*args, **options)
        done.append(step)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(where, step, run_and_die)
        with pytest.raises(SystemExit):
            deploy(old)
    assert done == [step]
    deploy(new)

    assert places() == {"redbeat:both"}
    assert redis.smembers(STATICS) == {"both"}
    assert [redis.exists(key) for key in ("redbeat:only", "redbeat::parked:only")] == [0, 1]
    deploy(old)
    assert places() == {"redbeat:both", "redbeat:only"}
    assert Entry.from_key("redbeat:only", app=bench_on(server).app).total_run_count == 7


def deploy(bench: Bench, entries: dict[str, Any]) -> None:
    """Let a beat with this ``beat_schedule`` lead for two ticks, and end."""
    scheduler = bench.scheduler(beat_schedule=entries)
    scheduler.tick()
    scheduler.tick()
    scheduler.close()


@pytest.mark.parametrize("step", ["_own", "_unpark", "save_entries"])
def test_a_roll_back_that_begins_anew_puts_back_what_was_parked(server, redis, bench_on, monkeypatch, step):
    """The connection is lost after one of its steps, or the beat is killed there, and another goes on."""
    old = {"e": {"task": PLAIN, "schedule": 3600, "args": ["e"]}}
    bench = bench_on(server)

    deploy(bench, old)
    bench.schedule.pause("e", "audit")
    bench.schedule.trigger("e")
    deploy(bench, {})
    assert not redis.exists("redbeat:e")

    where = statics if step == "save_entries" else statics.Statics
    run = getattr(where, step)

    def run_and_fail(*args: Any, **options: Any) -> None:
        run(*args, **options)
        monkeypatch.setattr(where, step, run)
        raise RedisConnectionError

    monkeypatch.setattr(where, step, run_and_fail)
    deploy(bench, old)

    policy = bench.schedule.get("e").policy
    assert (policy.paused, policy.note) == (True, "audit")
    assert bench.names == ["e"]


@pytest.mark.parametrize("first_back", ["first", "second"])
def test_each_of_two_apps_gets_back_what_both_have_dropped(bench, redis, first_back):
    def deploy_to(name: str, entries: Mapping[str, Any]) -> None:
        app = bench.new_app(beat_schedule=entries, singlebeat_other_app_check="ignore")
        app.main = name
        scheduler = bench.scheduler(app=app)
        scheduler.tick()
        scheduler.close()

    both = {"e": {"task": PLAIN, "schedule": 3600, "args": ["e"]}}
    deploy_to("first", both)
    deploy_to("second", both)
    bench.schedule.pause("e", "audit")
    deploy_to("first", {})
    deploy_to("second", {})
    assert not redis.exists("redbeat:e")

    deploy_to(first_back, both)

    assert bench.schedule.get("e").policy.note == "audit"
    assert redis.hget(OWNERS, "e") == first_back
    assert not redis.hexists("redbeat:e", "dropped_by")


def test_an_entry_with_an_unsent_run_gets_the_one_that_was_parked_later(bench, redis):
    old = {"e": {"task": PLAIN, "schedule": 3600, "args": ["old"]}}

    deploy(bench, old)
    bench.schedule.trigger("e")
    deploy(bench, {})
    bench.schedule.upsert("e", PLAIN, 3600, args=["new"])
    bench.schedule.trigger("e")

    deploy(bench, old)
    deploy(bench, old)

    assert len(bench.messages) == 2
    assert not redis.exists("redbeat::parked:e")


def test_an_entry_put_back_without_a_place_gets_one_at_the_next_start(server, redis, bench_on, monkeypatch):
    old = {"e": {"task": PLAIN, "schedule": 3600}}
    for given in (old, {}):
        scheduler = bench_on(server, beat_schedule=given).scheduler()
        scheduler.tick()
        scheduler.close()
    dying = bench_on(server, beat_schedule=old).scheduler()

    def die(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(statics, "save_entries", die)
        with pytest.raises(SystemExit):
            dying.tick()
    dying.close()
    assert redis.exists("redbeat:e")
    assert redis.zscore(SCHEDULE, "redbeat:e") is None

    bench_on(server, beat_schedule=old).tick()

    assert redis.zscore(SCHEDULE, "redbeat:e") > datetime.now(UTC).timestamp()


def test_an_entry_that_leaves_beat_schedule_is_named_in_a_warning(server, redis, bench_on, caplog):
    """Maybe a receiver that adds entries has failed: Celery swallows the error before it sets logging up."""
    entry = {"task": PLAIN, "schedule": 3600}
    before = bench_on(server, beat_schedule={"kept": entry, "gone": entry}).scheduler()
    before.tick()
    before.close()
    caplog.set_level("WARNING")

    bench_on(server, beat_schedule={"kept": entry}).tick()

    (line,) = [each for each in caplog.records if "event=entry_removed" in each.message]
    assert (line.levelname, "entry=gone" in line.message) == ("WARNING", True)


@pytest.mark.parametrize("signal_name", ["on_after_finalize", "beat_init"])
def test_a_receiver_that_fails_takes_no_entry_out_of_the_schedule(
    server, redis, bench_on, caplog, cli, no_worker_is_awaited, signal_name
):
    """It may add entries that it reads from a database, which is away during a deploy."""
    entry = {"task": PLAIN, "schedule": 3600}
    bench = bench_on(server, beat_schedule={"kept": entry, "gone": entry})
    before = bench.scheduler()
    before.tick()
    before.close()
    failing = bench.new_app(beat_schedule={"kept": entry, "new": entry})
    failing.finalized = False

    def add(**_):
        raise ConnectionError("postgres://shop:hunter2@db is away")

    with connected(beat_init if signal_name == "beat_init" else failing.on_after_finalize, add):
        failing.finalize()
        scheduler = bench.scheduler(app=failing)
        beat_init.send(sender=type("Service", (), {"app": failing, "scheduler": scheduler})())
    scheduler.tick()

    names = ("kept", "gone", "new")
    assert [name for name in names if redis.zscore(SCHEDULE, f"redbeat:{name}")] == [*names]
    why = f"a receiver of {signal_name} has failed: ConnectionError('postgres://shop:**@db is away')"
    (line,) = [each for each in caplog.records if "event=incomplete" in each.message]
    assert (line.levelname, why in line.message) == ("ERROR", True)
    for told in (cli("doctor", app=bench.app, code=1).output, cli("status", app=bench.app, code=None).output):
        assert f"which leads, may lack entries of beat_schedule: {why}" in told
        assert "differs" not in told
    here = f"it may lack entries where doctor runs, and is not checked: {why}"
    assert here in cli("doctor", app=failing, code=1).output


def test_the_watchdog_hears_of_each_batch_of_beat_schedule(server, redis, bench_on, monkeypatch):
    entries = {f"e{at}": {"task": PLAIN, "schedule": 3600} for at in range(1001)}
    scheduler = bench_on(server, beat_schedule=entries).scheduler()
    events: list[str] = []
    install = scheduler.statics.install
    monkeypatch.setattr(scheduler, "_report_progress", lambda: events.append("progress"))
    monkeypatch.setattr(
        scheduler.statics, "install", lambda *args, **owns: events.append("batch") or install(*args, **owns)
    )

    scheduler.setup_schedule()

    batches = [at for at, event in enumerate(events) if event == "batch"]
    assert len(batches) == 3
    assert all(events[at - 1] == "progress" for at in batches)
    assert redis.zcard(SCHEDULE) == 1001


def test_a_start_reads_the_whole_of_beat_schedule_once_however_long_it_is(server, redis, bench_on, monkeypatch):
    monkeypatch.setattr("singlebeat.beat.scheduler.BATCH", 10)
    scheduler = bench_on(
        server, beat_schedule={f"e{at}": {"task": PLAIN, "schedule": 3600} for at in range(100)}
    ).scheduler()

    def run() -> dict[str, int]:
        redis.config_resetstat()
        scheduler.setup_schedule()
        stats = redis.info("commandstats")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hgetall", "smembers", "sadd")}

    assert run() == {"hgetall": 1, "smembers": 1, "sadd": 10}, "each batch is ours before it is stored"
    assert run() == {"hgetall": 1, "smembers": 1, "sadd": 0}, "what is unchanged is not written again"


@pytest.mark.parametrize("step", ["_unpark", "save_entries", "_owners", "_park"])
def test_a_beat_that_stood_still_does_not_install_over_the_next_leader(bench, monkeypatch, step):
    """It begins its term, and stands still for longer than its lease."""
    module, when = statics.Statics, {"task": PLAIN, "schedule": 3600}
    old = bench.scheduler(beat_schedule={"a": when | {"args": ["old"]}})
    new = bench.scheduler(beat_schedule={"a": when | {"args": ["new"]}, "b": when})
    bench.put("c")
    bench.redis.sadd("redbeat::statics", "c")  # it has left both
    where, run = (statics, statics.save_entries) if step == "save_entries" else (module, getattr(module, step))

    def stand_still(*args: Any, **options: Any) -> Any:
        if bench.redis.get("redbeat::lock") == old.lease.acquire().token:
            bench.redis.delete("redbeat::lock")
            new.tick()
            left.append(contents(bench.redis, but=["redbeat::standbys"]))
        return run(*args, **options)

    left = list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(where, step, stand_still)
        old.tick()

    assert contents(bench.redis, but=["redbeat::standbys"]) == left[0]
    assert bench.schedule.get("a").args == ["new"]
    assert {entry.name for entry in bench.schedule.list()} == {"a", "b"}


def test_storing_entries_outside_of_a_tick_starts_no_watchdog(server, redis, bench_on):
    scheduler = bench_on(server, singlebeat_watchdog_timeout=60).scheduler()

    scheduler.update_from_dict({"e": {"task": PLAIN, "schedule": 3600}})

    assert scheduler._watchdog._thread is None


def test_an_invalid_entry_of_beat_schedule_harms_no_other_entry(server, redis, bench_on, caplog):
    wrong = {"no schedule": {"task": PLAIN}, "unknown": {"task": PLAIN, "schedule": 60, "typo": 1}}
    wrong["unstorable"] = {"task": PLAIN, "schedule": 60, "args": [object()]}
    wrong["nothing"] = None
    bench = bench_on(server, beat_schedule={**wrong, "good": {"task": PLAIN, "schedule": 60}})

    bench.scheduler().tick()

    assert "redbeat:good" in redis.zrange(SCHEDULE, 0, -1)
    assert all(name in caplog.text for name in ("unknown", "unstorable", "nothing"))


class Unwell(BaseSchedule):
    """A schedule that fails at each call, like one that asks an unreachable server."""

    def is_due(self, last_run_at: datetime) -> Any:
        raise OSError("no answer")


@pytest.mark.parametrize(
    "given",
    [None, "secret-1", ["secret-1"], {"task": PLAIN, "schedule": Unwell(), "args": ["secret-1"]}],
    ids=["nothing", "a text", "a list", "a schedule that fails"],
)
def test_the_log_does_not_quote_an_invalid_entry_of_beat_schedule(server, bench_on, caplog, given):
    """It may hold secrets that no decorator could name."""
    bench_on(server, beat_schedule={"e": given}).scheduler().tick()

    (said,) = [each for each in caplog.records if "event=not_added" in each.message]
    assert "secret-1" not in caplog.text
    if not isinstance(given, dict):
        assert f"must be a dict of its fields, not a {type(given).__name__}" in said.message
        assert said.exc_info is None


def test_a_policy_as_an_option_of_beat_schedule_is_refused_in_a_sentence(server, bench_on, caplog):
    """The schedule's JSON has such a field, so that it is tried."""
    given = {"task": PLAIN, "schedule": 60, "policy": {"overlap": "buffer_one", "jitter": 3}}

    bench_on(server, beat_schedule={"e": given}).scheduler().tick()

    (said,) = [each for each in caplog.records if "event=not_added" in each.message]
    assert "policy must be an EntryPolicy, not a dict: put overlap, jitter beside task" in said.message
    assert said.exc_info is None


@pytest.mark.parametrize(
    "wrong", [{"jitter": -1}, {"args": [object()]}, {"schedule": Unwell()}], ids=["a typo", "an argument", "a schedule"]
)
def test_a_static_entry_that_cannot_be_stored_keeps_its_stored_data(server, redis, bench_on, wrong):
    mine, gone = {"task": PLAIN, "schedule": 3600}, {"task": PLAIN, "schedule": 60}
    bench = bench_on(server, beat_schedule={"mine": mine, "gone": gone})
    first = bench.scheduler()
    first.tick()
    first.close()
    redis.hset("redbeat:mine", mapping={"policy": '{"paused": true}', "history": "[]"})
    before = redis.hgetall("redbeat:mine"), bench.score("mine")
    bench.conf["beat_schedule"] = {"mine": {**mine, **wrong}}

    bench.scheduler().tick()

    assert (redis.hgetall("redbeat:mine"), bench.score("mine")) == before
    assert redis.smembers(STATICS) == {"mine"}
    assert not redis.exists("redbeat:gone"), "what has left the configuration goes"


class Away(schedule):
    """A schedule whose source may be away for a while."""

    cause: str | None = None

    def is_due(self, last_run_at: datetime) -> Any:
        if self.cause:
            raise OSError(self.cause)
        return super().is_due(last_run_at)


def test_an_entry_whose_schedule_fails_when_a_term_begins_is_added_later(server, redis, bench_on, monkeypatch, logged):
    monkeypatch.setattr(Away, "cause", "no route")
    monkeypatch.setattr("singlebeat.beat.scheduler.LEFT_OUT_EVERY", 0.0)
    entries = {"away": {"task": PLAIN, "schedule": Away(1)}, "wrong": {"task": PLAIN}}
    scheduler = bench_on(server, beat_schedule=entries).scheduler()
    for _ in range(3):
        scheduler.tick()
    assert not redis.exists("redbeat:away")

    monkeypatch.setattr(Away, "cause", "no name")
    scheduler.tick()
    monkeypatch.setattr(Away, "cause", None)
    scheduler.tick()
    scheduler.tick()

    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:away"]
    assert "away" in redis.smembers(STATICS)
    left_out = sorted((line["entry"], str(line.get("reason"))[-9:]) for line in logged("not_added"))
    assert [name for name, _ in left_out] == ["away", "away", "wrong"], "each cause is logged once"
    assert {reason.strip() for name, reason in left_out if name == "away"} == {"no route", ": no name"}
    assert [(line["level"], line["entry"]) for line in logged("added")] == [("WARNING", "away")]


def test_an_entry_that_was_left_out_is_not_tried_over_one_that_is_stored(server, redis, bench_on, monkeypatch):
    """An operator may have added it since, and hears that the next term replaces it."""
    monkeypatch.setattr(Away, "cause", "no route")
    monkeypatch.setattr("singlebeat.beat.scheduler.LEFT_OUT_EVERY", 0.0)
    bench = bench_on(server, beat_schedule={"away": {"task": PLAIN, "schedule": Away(1)}})
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.put("away")
    before = redis.hget("redbeat:away", "definition")
    scheduler.tick()
    monkeypatch.setattr(Away, "cause", None)

    for _ in range(2):
        scheduler.tick()

    assert redis.hget("redbeat:away", "definition") == before


@pytest.fixture
def deployed(server, redis, bench_on, monkeypatch):
    """Return a scheduler with another task for its stored entry; its schedule fails as the term begins."""
    monkeypatch.setattr("singlebeat.beat.scheduler.LEFT_OUT_EVERY", 0.0)
    entry = {"task": PLAIN, "schedule": Away(3600), "args": ["old"]}
    bench = bench_on(server, beat_schedule={"away": entry})
    before = bench.scheduler()
    before.tick()
    before.close()
    monkeypatch.setattr(Away, "cause", "no route")
    bench.conf["beat_schedule"] = {"away": {**entry, "args": ["new"]}}
    scheduler = bench.scheduler()
    scheduler.tick()
    scheduler.tick()
    assert arguments(redis, "away") == ["old"]
    return scheduler


def arguments(redis, name: str) -> list[Any]:
    return json.loads(redis.hget(f"redbeat:{name}", "definition"))["args"]


@pytest.mark.parametrize("meanwhile", ["nothing", "pause"])
def test_a_change_that_was_left_out_is_stored_once_its_schedule_answers(
    deployed, redis, monkeypatch, logged, meanwhile
):
    if meanwhile == "pause":
        Schedule(deployed.app).pause("away")
        deployed.tick()
    monkeypatch.setattr(Away, "cause", None)

    deployed.tick()

    assert arguments(redis, "away") == ["new"]
    assert [line["entry"] for line in logged("added")] == ["away"]
    assert ("paused" in (redis.hget("redbeat:away", "policy") or "")) is (meanwhile == "pause")


@pytest.mark.parametrize("when", ["before a try", "in a try"])
def test_a_change_that_was_left_out_replaces_no_edit_of_this_term(deployed, redis, monkeypatch, logged, when):
    def edit() -> None:
        entry = Schedule(deployed.app).get("away")
        entry.args = ["edited"]
        entry.save()

    monkeypatch.setattr(Away, "cause", None)
    if when == "before a try":
        edit()
    else:
        install = deployed.statics.install
        with monkeypatch.context() as patch:
            patch.setattr(deployed.statics, "install", lambda *args, **options: edit() or install(*args, **options))
            deployed.tick()
    for _ in range(2):
        deployed.tick()

    assert arguments(redis, "away") == ["edited"]
    assert [line["reason"] for line in logged("not_added") if "no route" not in str(line["reason"])] == []
    assert logged("added") == []


def test_an_entry_of_an_app_that_is_gone_is_taken_over_without_a_new_term(server, redis, bench_on, monkeypatch):
    monkeypatch.setattr("singlebeat.beat.scheduler.LEFT_OUT_EVERY", 0.0)
    entry = {"task": PLAIN, "schedule": 3600, "args": ["old"]}
    bench = bench_on(server, beat_schedule={"both": entry}, singlebeat_other_app_check="ignore")
    gone = bench.scheduler()
    gone.tick()
    gone.close()
    redis.hset(OWNERS, "both", "gone")
    bench.conf["beat_schedule"] = {"both": {**entry, "args": ["new"]}}
    scheduler = bench.scheduler()
    scheduler.tick()
    scheduler.tick()
    assert arguments(redis, "both") == ["old"]

    redis.hdel(OWNERS, "both")
    scheduler.tick()

    assert arguments(redis, "both") == ["new"]
    assert redis.hget(OWNERS, "both") == scheduler.statics.owner


def test_an_entry_that_was_removed_and_left_out_is_back_once_it_is_usable(server, redis, bench_on, monkeypatch):
    """It cannot even be made as the term begins, so the copy that was kept of it is put back by a later try."""
    monkeypatch.setattr("singlebeat.beat.scheduler.LEFT_OUT_EVERY", 0.0)
    entry = {"task": PLAIN, "schedule": 3600, "args": ["old"]}
    bench = bench_on(server, beat_schedule={"back": entry})
    made = Scheduler._maybe_entry

    def make(self: Scheduler, name: str, given: Any) -> Any:
        if Away.cause:
            raise OSError(Away.cause)
        return made(self, name, given)

    monkeypatch.setattr(Scheduler, "_maybe_entry", make)
    for given, cause in (({"back": entry}, None), ({}, None), ({"back": {**entry, "args": ["new"]}}, "no route")):
        bench.conf["beat_schedule"] = given
        monkeypatch.setattr(Away, "cause", cause)
        scheduler = bench.scheduler()
        scheduler.tick()
        if not cause:
            scheduler.close()
    assert not redis.exists("redbeat:back")

    monkeypatch.setattr(Away, "cause", None)
    scheduler.tick()

    assert arguments(redis, "back") == ["new"]


def test_a_schedule_that_has_vanished_is_installed_again(server, redis, bench_on, caplog):
    bench = bench_on(server, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    scheduler = bench.scheduler()
    scheduler.tick()
    redis.delete("redbeat:mine", SCHEDULE, STATICS)

    scheduler.tick()

    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:mine"]
    assert "vanished" in caplog.text


def test_a_name_in_beat_schedule_becomes_a_string_as_with_redbeat(server, redis, bench_on):
    entry = {"task": PLAIN, "schedule": 60}
    bench = bench_on(server, result_expires=None, beat_schedule={5: entry, "a": entry})

    for _ in range(2):
        scheduler = bench.scheduler()
        scheduler.tick()
        scheduler.close()

    assert set(redis.zrange(SCHEDULE, 0, -1)) == {"redbeat:5", "redbeat:a"}
    assert redis.smembers(STATICS) == {"5", "a"}


def test_a_schedule_of_which_nothing_can_be_stored_has_not_vanished(server, redis, bench_on, caplog):
    bench = bench_on(server, beat_schedule={"bad": {"task": PLAIN, "schedule": 60, "args": [object()]}})
    scheduler = bench.scheduler()

    delays = [scheduler.tick() for _ in range(3)]

    assert min(delays) > 0.5, "else the ticks follow one another without end"
    assert "vanished" not in caplog.text
    assert caplog.text.count("entry 'bad' cannot be stored") == 1


def test_a_vanished_schedule_is_installed_again_where_it_can_be_stored(server, redis, bench_on, caplog):
    bad, good = {"task": PLAIN, "schedule": Unwell()}, {"task": PLAIN, "schedule": 3600}
    bench = bench_on(server, result_expires=None, beat_schedule={"bad": bad, "good": good})
    scheduler = bench.scheduler()
    scheduler.tick()
    redis.flushall()

    scheduler.tick()
    delay = scheduler.tick()

    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:good"]
    assert caplog.text.count("The schedule has vanished") == 1
    assert delay > 0.5


@pytest.mark.parametrize("first", ["leader", "standby"])
@pytest.mark.parametrize("has_statics", [True, False], ids=["with beat_schedule", "without"])
def test_a_lost_schedule_is_said_once_by_the_beat_that_leads_next(
    server, redis, bench_on, caplog, logged, cli, first, has_statics
):
    given = {"beat_schedule": {"mine": {"task": PLAIN, "schedule": 3600}}} if has_statics else {}
    bench = bench_on(server, result_expires=None, **given)
    leader, standby = bench.scheduler(), bench.scheduler()
    leader.tick()
    standby.tick()
    redis.flushall()
    caplog.clear()

    if first == "leader":
        leader.tick()
        assert not leader.lease.renew()
    next_one = leader if first == "leader" else standby
    next_one.tick()

    said = logged("schedule_vanished")
    assert len(said) == 1
    if first == "standby":
        assert said[0]["reason"].startswith("the server has forgotten term 1: it has lost all its data, or its last ")
    assert redis.get(LOST).endswith(f" {said[0]['reason']}")
    assert "warning  schedule: the server has lost the schedule, or its" in cli("doctor", app=bench.app, code=1).output


def load_snapshot(redis: Any, snapshot: Mapping[str, bytes], *, lock: bool) -> None:
    """Let the server be as it was, with the leader's lock or without: it may have ended meanwhile."""
    redis.flushall()
    for key, value in snapshot.items():
        if lock or key != LOCK:
            redis.restore(key, 60_000 if key in {LOCK, LEADER} else 0, value)


@pytest.mark.parametrize("next_one", ["the leader goes on", "the leader leads again", "the standby leads"])
@pytest.mark.parametrize("lost", ["a change", "a run"])
def test_a_server_that_starts_from_a_snapshot_is_noticed(bench, server, logged, lost, next_one):
    leader, standby = bench.scheduler(), bench.scheduler()
    bench.put("old")
    leader.tick()
    standby.tick()
    with server.client(decode_responses=False) as raw:
        snapshot = {key.decode(): raw.dump(key) for key in raw.scan_iter()}
        if lost == "a change":
            bench.schedule.pause("old")
        else:
            bench.put("due")
        leader.tick()
        standby._look_at = 0.0
        standby.tick()
        load_snapshot(raw, snapshot, lock=next_one == "the leader goes on")

    if next_one == "the leader leads again":
        assert not leader.lease.renew()
    (standby if next_one == "the standby leads" else leader).tick()

    reason = "shortly before, are lost: Redis has started from a snapshot, or another server has taken over"
    assert [line["reason"].partition(", or ")[2] for line in logged("schedule_vanished")] == [reason]
    assert "the server has lost the schedule, or its last changes" in ScheduleStatus.of(bench.app).lost


def test_a_lost_record_after_one_that_has_no_time_is_noticed(bench, redis, logged):
    scheduler = bench.scheduler()
    scheduler.tick()
    for number in (2**63, 2**63 + 1):
        redis.xadd("redbeat::changes", {"a": "b"}, id=f"{number}-1")
    scheduler.tick()
    redis.xdel("redbeat::changes", f"{2**63 + 1}-1")

    scheduler.tick()

    assert len(logged("schedule_vanished")) == 1


def test_a_loss_is_said_once_though_an_error_follows(bench, redis, logged, monkeypatch):
    """``beat_schedule`` is then installed by a later tick."""
    scheduler = bench.scheduler()
    bench.put("e")
    scheduler.tick()
    bench.schedule.pause("e")
    scheduler.tick()
    redis.xdel("redbeat::changes", redis.xrevrange("redbeat::changes", count=1)[0][0])
    install, installed = scheduler.setup_schedule, []

    def fail_twice() -> None:
        installed.append(len(installed) >= 2)
        if not installed[-1]:
            raise RedisConnectionError
        install()

    monkeypatch.setattr(scheduler, "setup_schedule", fail_twice)
    for _ in range(4):
        scheduler.tick()

    assert installed == [False, False, True]
    assert len(logged("schedule_vanished")) == 1


@pytest.mark.parametrize("removed", ["all records", "the records until then", "the streams"])
def test_removed_records_are_no_loss(bench, redis, logged, removed):
    leader, standby = bench.scheduler(), bench.scheduler()
    bench.put("e")
    leader.tick()
    standby.tick()
    for stream in ("redbeat::changes", "redbeat::history"):
        if removed == "the streams":
            redis.delete(stream)
        else:
            redis.xadd(stream, {"a": "b"})
            redis.xtrim(stream, maxlen=int(removed == "the records until then"), approximate=False)

    standby._look_at = 0.0
    standby.tick()
    leader.tick()

    assert logged("schedule_vanished") == []
    assert not redis.exists(LOST)


def test_a_lost_schedule_is_shown_until_a_day_has_passed(bench, cli):
    """Also in later terms, and with the time when it was first noticed."""
    bench.put("gone")
    leader, standby = bench.scheduler(), bench.scheduler()
    leader.tick()
    standby.tick()
    bench.redis.flushall()
    standby.tick()
    said = ScheduleStatus.of(bench.app).lost
    assert re.match(r"the server has lost the schedule, or its last changes, as a beat noticed at 20\S+: ", said)
    for command in ("history gone", "explain gone"):
        assert "The server has lost the schedule" in cli(*command.split(), app=bench.app, code=1).output

    assert not leader.lease.renew()
    standby.close()
    leader.tick()
    assert leader.lease.leader()["term"] == "2"
    bench.redis.expire(LOST, 5)
    leader._note_loss("another loss")

    assert ScheduleStatus.of(bench.app).lost == said
    for command in ("status", "doctor", "health"):
        assert said in " ".join(cli(command, code=None).output.split())
    assert f"{said[0].upper()}{said[1:]}" in " ".join(cli("explain", "gone", code=1).output.split())
    assert 86_000 < bench.redis.ttl(LOST) <= 86_400


@pytest.mark.parametrize("knows", [True, False], ids=["who has noted it", "who began after it"])
def test_a_loss_is_noted_once_whoever_leads_after_it(bench, redis, logged, caplog, knows):
    redis.set("redbeat::term", 5)
    old = bench.scheduler()
    old.tick()
    new = bench.scheduler()
    if knows:
        new.tick()
    redis.flushall()
    new.tick()
    assert bool(redis.get(LOST)) is knows

    assert not old.lease.renew()
    old.tick()
    assert "has forgotten term 6" in redis.get(LOST)
    assert len(logged("schedule_vanished")) == 1

    redis.delete(LOST)  # as an operator does once the entries are back
    new.close()
    old.tick()
    assert old.lease.owned()
    assert not redis.exists(LOST)
    assert len(logged("schedule_vanished")) == 1


def test_a_plain_task_is_locked_while_workers_announce_themselves_again(bench, logged):
    """After the locks' server has come back empty: each worker does so within a third of a lease."""
    backend_of(bench.app).announce("w1", ttl=60)
    bench.put()
    bench.tick()
    bench.redis.delete("singlebeat:workers")
    bench.make_due()
    bench.tick()
    assert [record["decision"] for record in bench.history] == ["dispatched", "skipped_overlap"]
    assert logged("unlocked") == []

    bench.schedulers[-1].dispatcher._workers_trusted_until = 0.0  # as after a lease
    bench.make_due()
    bench.tick()
    assert len(logged("unlocked")) == 1


def test_a_standby_that_takes_over_an_emptied_server_locks_plain_tasks(server, redis, bench_on, logged):
    """Workers live, and announce themselves again a third of a lease later."""
    leader, standby = bench_on(server), bench_on(server)
    backend_of(leader.app).announce("w1", ttl=60)
    leader.tick()
    standby.tick()
    redis.flushall()
    leader.close()
    standby.put()

    standby.tick()
    standby.make_due()
    standby.tick()

    assert [record["decision"] for record in standby.history] == ["dispatched", "skipped_overlap"]
    assert logged("unlocked") == []


@pytest.mark.parametrize("given", [{}, {"mine": {"task": PLAIN, "schedule": 3600}}], ids=["empty", "with entries"])
def test_a_lost_schedule_is_unhealthy_while_it_has_no_entries(server, redis, bench_on, cli, given):
    """Beats that work are not to be restarted for a day because of entries that they cannot bring back."""
    bench = bench_on(server, beat_schedule=given)
    bench.tick()
    assert cli("health", app=bench.app).output.count("\n") == 1, "a new schedule may be empty"
    redis.flushall()
    assert not bench.schedulers[-1].lease.renew()
    bench.tick()

    found = cli("health", app=bench.app, code=0 if given else 1).output

    assert "the server has lost the schedule" in " ".join(found.split())
    assert found.startswith("healthy: " if given else "Error: the server has lost")
    assert bool(json.loads(cli("health", "--json", app=bench.app, code=None).stdout)["lost"])


@pytest.mark.parametrize("means", ["save", "upsert", "import", "revert"])
def test_a_lost_schedule_is_shown_until_a_program_adds_an_entry(server, redis, bench_on, cli, means):
    bench = bench_on(server, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    bench.put()
    rows = json.loads(cli("export").stdout)
    bench.tick()
    bench.redis.set(LOST, "2026-11-23T14:00:00+00:00 so")
    cli("pause", "mine")
    cli("edit", "mine", "--set", "jitter=5")
    bench.scheduler(beat_schedule={"mine": {"task": PLAIN, "schedule": 60}, "new": {"task": PLAIN, "schedule": 60}})
    bench.schedulers[0].close()
    bench.tick()
    assert bench.redis.exists("redbeat:new", LOST) == 2

    if means == "save":
        bench.put("other")
    elif means == "upsert":
        bench.schedule.upsert("other", PLAIN, 60)
    elif means == "import":
        cli("delete", "e")
        cli("import", "-", stdin=json.dumps(rows))
    else:
        cli("delete", "e")
        cli("revert", "e", "--to", bench.schedule.changes("e", 1)[0].id)

    assert not bench.redis.exists(LOST)
    assert ScheduleStatus.of(bench.app).lost == ""


def test_a_standby_notices_that_another_app_leads_now(server, redis, bench_on, monkeypatch, caplog):
    monkeypatch.setattr("singlebeat.beat.scheduler.LEADER_CHECK_INTERVAL", 0.0)
    bench = bench_on(server, singlebeat_other_app_check="raise")
    leader, standby = bench.scheduler(), bench.scheduler()
    caplog.set_level("INFO", "celery.beat")
    leader.tick()
    for _ in range(3):
        standby.tick()
    assert caplog.text.count("Standing by: ") == 1
    redis.hset(LEADER, mapping={"host": "elsewhere", "pid": "1", "app": "other"})

    with pytest.raises(ConfigError, match="stands by for a beat of app other"):
        standby.tick()


def test_a_trouble_whose_words_change_is_said_once(bench, monkeypatch, caplog):
    scheduler = bench.scheduler()
    scheduler.tick()
    with monkeypatch.context() as patch:
        for text in ("closed by server", "reset by peer", "closed by server"):
            patch.setattr(scheduler.lease, "acquire", Mock(side_effect=RedisConnectionError(text)))
            scheduler.tick()
    scheduler.tick()

    assert caplog.text.count("Trouble with Redis") == 1
    assert caplog.text.count("Redis works again") == 1


def test_a_leader_of_a_spoilt_term_has_recovered_only_when_it_leads_again(bench, caplog, logged):
    leader, standby = bench.scheduler(), bench.scheduler()
    leader.tick()
    standby.tick()
    caplog.clear()
    bench.redis.set("redbeat::term", "abc")
    assert not leader.lease.renew()
    for _ in range(3):
        leader.tick()

    assert bench.redis.pttl(LOCK) > 0, "its own lock has not ended"
    assert len(logged("trouble")) == 1
    assert logged("recovered", "stands_by", "leadership_gained") == []

    bench.redis.delete("redbeat::term")
    leader._recheck_at = 0.0
    leader.tick()
    assert leader.lease.owned()
    assert [line["event"] for line in logged("recovered", "stands_by", "schedule_vanished")] == ["recovered"]


def test_each_loss_of_the_schedule_is_said(server, redis, bench_on, caplog):
    bench = bench_on(server, result_expires=None, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    scheduler = bench.scheduler()
    scheduler.tick()

    for noticed in ("in a tick", "by the lock", "by the lock", "in a tick", "by the lock"):
        caplog.clear()
        redis.flushall()
        if noticed == "in a tick":
            scheduler.tick()
        assert not scheduler.lease.renew()
        scheduler.tick()

        assert caplog.text.count("The schedule has vanished") == 1, noticed


@pytest.mark.parametrize("lost", ["all data", "the last changes"])
def test_a_loss_is_said_by_a_beat_that_has_lost_its_term_with_the_last_one(server, redis, bench_on, caplog, lost):
    """Numbers of terms begin anew with each loss, so two losses may show the same number."""
    bench = bench_on(server, result_expires=None, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    first, second = bench.scheduler(), bench.scheduler()
    first.tick()
    second.tick()
    if lost == "the last changes":
        bench.schedule.pause("mine")
        first.tick()
        redis.delete("redbeat::changes")
        redis.xadd("redbeat::changes", {"a": "b"}, id="1-1")
        redis.delete(LOCK, "redbeat::term")
    else:
        redis.flushall()
    first.tick()
    assert not first.lease.renew()
    second.tick()
    first.tick()
    assert second.lease.leader()["term"] == "1"
    assert redis.exists(LOST)
    caplog.clear()
    redis.flushall()

    first.tick()  # it campaigns, and leads

    assert first.lease.owned()
    assert caplog.text.count("The schedule has vanished") == 1
    assert redis.exists(LOST)


def test_a_loss_of_all_is_said_after_one_that_has_left_the_lock(server, redis, bench_on, caplog):
    """The lease that goes on shows that the server knows the term, so its number counts again."""
    bench = bench_on(server, result_expires=None, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    scheduler = bench.scheduler()
    scheduler.tick()
    redis.delete("redbeat:mine", SCHEDULE, STATICS)
    scheduler.tick()
    assert scheduler.lease.renew()
    assert caplog.text.count("The schedule has vanished") == 1
    redis.flushall()

    assert not scheduler.lease.renew()
    scheduler.tick()

    assert caplog.text.count("The schedule has vanished") == 2


def test_a_term_that_follows_the_last_one_has_lost_nothing(bench, caplog):
    leader, standby, third = bench.scheduler(), bench.scheduler(), bench.scheduler()
    for beat in (leader, standby, third):
        beat.tick()
    for closing, following in ((leader, standby), (standby, third)):
        closing.close()
        following.tick()

    assert third.lease.leader()["term"] == "3"
    assert not bench.redis.exists(LOST)
    assert "vanished" not in caplog.text


def test_a_deploy_that_is_rolled_back_runs_nothing_again(bench):
    def leads(**entries: Any) -> None:
        app = bench.new_app()
        app.conf.beat_schedule = {
            name: {"task": PLAIN, "args": [name], "schedule": schedule(HOUR), "run_on_start": True, **given}
            for name, given in entries.items()
        }
        scheduler = bench.scheduler(app=app)
        scheduler.tick()
        scheduler.tick()
        scheduler.close()

    before = {"once": {"max_runs": 1}, "audited": {}}
    leads(**before)
    bench.schedule.pause("audited", "until the audit is over")
    leads()
    assert bench.redis.zrange(SCHEDULE, 0, -1) == []
    leads(**before)

    assert sorted(bench.names) == ["audited", "once"]
    assert bench.schedule.get("audited").policy.note == "until the audit is over"


@pytest.mark.parametrize(
    "how",
    [
        "dropped by a deploy",
        "dropped, and stored again by an operator",
        "dropped, reverted and deployed",
        "deleted",
        "removed and put back by another program",
    ],
)
@pytest.mark.parametrize("what", ["clocked", "once", "hourly", "triggered"])
def test_a_claimed_run_comes_back_with_its_entry(server, redis, own_server, bench_on, logged, how, what):
    """Its past counts the run already, so nothing else would ever send it."""
    when = clocked(datetime.now(UTC) + timedelta(minutes=5)) if what == "clocked" else schedule(HOUR)
    given = {"task": PLAIN, "args": ["e"], "schedule": when, "run_on_start": what in {"once", "hourly"}}
    given |= {"max_runs": 1} if what == "once" else {}
    bench = bench_on(server, broker_url=own_server.celery_url, beat_schedule={"e": given})
    first = bench.scheduler()
    own_server.kill()
    first.tick()
    if what == "triggered":
        bench.schedule.trigger("e")
    bench.tick(at=datetime.now(UTC) + timedelta(minutes=5, seconds=1))
    claimed = bench.pending()
    assert claimed is not None

    scheduler = first
    if how.startswith("dropped"):
        first.close()
        without = bench.scheduler(beat_schedule={})
        without.tick()
        assert not redis.zrange(SCHEDULE, 0, -1) + redis.zrange(PENDING, 0, -1)
        (line,) = logged("entry_removed")
        assert (line["level"], line["reason"]) == ("WARNING", "it is sent if the entry comes back within seven days")
        if "stored again" in how:
            bench.schedule.upsert("e", PLAIN, schedule(HOUR))
        elif "reverted" in how:
            (change, *_) = bench.schedule.changes("e", 1)
            bench.schedule.revert("e", change.id)
        without.tick()
        without.close()
        scheduler = bench.scheduler()
    elif how == "deleted":
        bench.schedule.delete("e")
        first.tick()
        assert bench.pending() is None
        (change, *_) = bench.schedule.changes("e", 1)
        bench.schedule.revert("e", change.id)
    else:
        stored = redis.hgetall("redbeat:e")
        redis.delete("redbeat:e")
        first.tick()
        redis.zrem(SCHEDULE, "redbeat:e")
        redis.zrem(PENDING, "redbeat:e")
        redis.hset("redbeat:e", mapping=stored)
        redis.zadd(SCHEDULE, {"redbeat:e": 0})
    own_server.restart()
    for _ in range(4):
        scheduler.tick()
        bench.retry_now()

    sent = [json.loads(message)["headers"]["id"] for message in own_server.client().lrange(QUEUE, 0, -1)]
    assert sent == [claimed.id]
    assert bench.decisions.count("dispatched") == 1
    assert bench.pending() is None


@pytest.mark.parametrize("how", ["dropped by a deploy", "deleted"])
def test_an_interrupted_backfill_goes_on_when_its_entry_comes_back(bench, how):
    def interrupted() -> None:
        scheduler.tick()
        if len(bench.ids) == 2:
            raise KeyboardInterrupt

    span = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 1, 5, tzinfo=UTC)
    bench.conf["beat_schedule"] = {
        "e": {"task": PLAIN, "args": ["e"], "schedule": crontab(minute=0), "overlap": "allow_all"}
    }
    scheduler = bench.scheduler()
    scheduler.tick()
    with pytest.raises(KeyboardInterrupt):
        bench.schedule.backfill("e", *span, progress=interrupted)

    if how == "deleted":
        bench.schedule.delete("e")
        (change, *_) = bench.schedule.changes("e", 1)
        bench.schedule.revert("e", change.id)
    else:
        scheduler.close()
        without = bench.scheduler(beat_schedule={})
        without.tick()
        without.close()
        scheduler = bench.scheduler()
        scheduler.tick()
    bench.schedule.backfill("e", *span, progress=scheduler.tick)

    assert [message.nominal.hour for message in bench.messages] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["bad\ud800", ":parked:e"])
def test_a_name_that_cannot_be_stored_does_not_keep_beat_from_leading(bench, caplog, name):
    app = bench.new_app()
    entry = {"task": PLAIN, "args": ["good"], "schedule": schedule(HOUR), "run_on_start": True}
    app.conf.beat_schedule = {name: entry, "good": entry}

    scheduler = bench.scheduler(app=app)
    scheduler.tick()
    scheduler.tick()

    assert bench.names == ["good"]
    assert "there can be no entry" in caplog.text


def test_a_client_of_the_users_needs_no_url(server, redis, cli):
    """``app.redbeat_redis`` beside a broker that is no Redis."""
    with make_app("amqp://nowhere", {"redbeat_redis_url": None, "result_backend": None}) as app:
        app.redbeat_redis = server.client()
        Entry("e", PLAIN, schedule(HOUR), app=app).save()

        assert "redis -> app.redbeat_redis" in Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler().info
        assert "every 3600 s" in cli("list", app=app).output
        assert "app.redbeat_redis: it answers" in cli("doctor", app=app, code=None).output


# ---------------------------------------------------------------- one bad entry

POISON: dict[str, dict[str, Any]] = {
    "invalid JSON": {"definition": "{"},
    "a bare number beyond the calendar": {"schedule": float("inf")},
    "a rule that cannot be": {"schedule": {"__type__": "rrule", "freq": "SOMETIMES"}},
    "a rule that never advances": {"schedule": {"__type__": "rrule", "freq": "DAILY", "interval": 0}},
    "a run count beyond numbers": {"meta": '{"total_run_count": NaN}'},
    "a past that is a weekday which is none": {"meta": '{"last_run_at": {"__type__": "weekday", "wkday": 9}}'},
    "a wish that is a weekday which is none": {"policy": '{"note": {"__type__": "weekday", "wkday": 9}}'},
    "a date that is none among the arguments": {"args": [{"__type__": "date", "__value__": "x"}]},
    "a past at the end of the calendar": {"meta": '{"last_run_at": "0001-01-01T00:00:00+01:00"}'},
    "a broken occurrence": {"pending": "{"},
    "a lone surrogate in the id of an occurrence": {"pending": '{"id": "\\ud800", "nominal": 1.0}'},
    "an occurrence of another kind": {"pending": "[]"},
    "a lone surrogate in an argument": {"args": ["\ud800"]},
    "a lone surrogate in the task": {"task": "\ud800"},
    "arguments that are too deep for a worker": {"args": json.loads("[" * 900 + "]" * 900)},
    "a link that is no signature": {"options": {"link": ["x"]}},
    "a chain of a task alone": {"options": {"chain": [{"task": "x"}]}},
    "a shadow that is no name": {"options": {"shadow": {"a": 1}}},
    "a stamped header without a value": {"options": {"stamped_headers": ["x"]}},
    "a countdown that is no number": {"options": {"countdown": "soon"}},
    "an eta that is no date": {"options": {"eta": "soon"}},
    "an expiry that is no date": {"options": {"expires": "soon"}},
    "an expiry of another kind": {"options": {"expires": [1]}},
    "a time limit that is no number": {"options": {"time_limit": "five"}},
    "headers that are no headers": {"options": {"headers": "x"}},
    "an option that nobody takes": {"options": {"producer": 1, "args": 2}},
    "arguments that do not fit": {"args": [], "kwargs": {"no such": 1}},
    "a task id that is no text": {"options": {"task_id": {"a": 1}}},
    "a queue that is none": {"options": {"queue": 3}},
    "a queue without end": {"options": {"queue": {"__type__": "rrule", "freq": "DAILY", "dtstart": 1}}},
    "a countdown without end": {"options": {"countdown": float("inf")}},
    "a countdown beyond the calendar": {"options": {"countdown": 1e18}},
    "a countdown that is not a number": {"options": {"countdown": float("nan")}},
    "an expiry without end": {"options": {"expires": float("inf")}},
}


def put_poison(bench: Bench, what: dict[str, Any]) -> None:
    what = dict(what)
    fields = {name: what.pop(name) for name in ("meta", "pending", "definition", "policy") if name in what}
    backend_of(bench.app).announce("w@h", ttl=60)  # so that plain tasks are locked, too
    definition = {"task": SINGLE, "args": ["bad"], "schedule": {"__type__": "interval", "every": 60}, **what}
    bench.redis.hset("redbeat:bad", mapping={"definition": json.dumps(definition), **fields})
    bench.redis.zadd(SCHEDULE, {"redbeat:bad": 0})
    if "pending" in fields:
        bench.redis.zadd(PENDING, {"redbeat:bad": 0})


@pytest.mark.parametrize("what", POISON)
def test_a_bad_entry_harms_no_other_entry(bench, what):
    put_poison(bench, POISON[what])
    bench.put("good", task=SINGLE)
    scheduler = bench.scheduler()

    for _ in range(3):
        assert scheduler.tick() > 0
    bench.put("later", task=SINGLE)
    scheduler.tick()

    assert [name for name in bench.names if name in ("good", "later")] == ["good", "later"]
    assert bench.redis.exists("redbeat:bad")


@pytest.mark.parametrize("what", POISON)
def test_a_bad_entry_is_not_sent_over_and_over(bench, what):
    put_poison(bench, POISON[what])
    scheduler = bench.scheduler()

    for _ in range(4):
        try:
            scheduler.tick()
        except Exception:
            pytest.fail("it ends beat")
        bench.retry_now()

    assert len(bench.messages) <= 1


def test_an_unknown_next_time_is_not_logged_in_every_tick(bench, caplog):
    put_poison(bench, POISON["a rule that never advances"])
    scheduler = bench.scheduler()

    for _ in range(4):
        scheduler.tick()

    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


@pytest.fixture
def far_bench(server, redis, bench_on) -> Iterator[tuple[Bench, SlowProxy]]:
    """A bench whose schedule is kept far away."""
    with SlowProxy(server.path, delay=0.02) as proxy:
        bench = bench_on(server, redbeat_redis_url=proxy.url, singlebeat_allowed_tasks=[SINGLE])
        bench.scheduler().tick()
        yield bench, proxy


def put_many(bench: Bench, task: str, number: int) -> None:
    """Store entries that are due, as another program would."""
    definition = json.dumps({"task": task, "args": ["bad"], "schedule": {"__type__": "interval", "every": 3600}})
    past = Meta(datetime.now(UTC) - 2 * HOUR, 1).encode()
    with bench.redis.pipeline() as pipe:
        for at in range(number):
            pipe.hset(f"redbeat:e{at}", mapping={"definition": definition, "meta": past})
            pipe.zadd(SCHEDULE, {f"redbeat:e{at}": at})
        pipe.execute()


#: Round trips of a tick, however many entries it quarantines: due, their fields, their records and the records' change,
#: claim, confirm twice, new witnesses twice, and what a client asks when it connects.
IN_A_TICK = 14


def test_an_entry_deleted_just_as_it_comes_due_is_not_quarantined(bench, monkeypatch, logged):
    """A program may delete an entry for one run once that has run."""
    bench.put()
    read = claims.read_fields

    def read_late(*args: Any) -> Any:
        Schedule(bench.app).delete("e")
        return read(*args)

    monkeypatch.setattr(claims, "read_fields", read_late)

    bench.tick()

    assert logged("quarantined") == []
    assert not bench.redis.exists(QUARANTINE)
    assert bench.history == []


@pytest.mark.parametrize("number", [2, 490])
def test_many_entries_are_quarantined_in_few_round_trips(far_bench, number):
    bench, proxy = far_bench
    put_many(bench, PLAIN, number)
    bench.put("good", task=SINGLE)
    steps, before = [], proxy.round_trips
    (scheduler,) = bench.schedulers
    scheduler.store.report_progress = scheduler.store.quarantine._progress = lambda: steps.append(None)

    scheduler.tick()

    assert proxy.round_trips - before <= IN_A_TICK
    assert bench.redis.hlen(QUARANTINE) == number
    assert bench.names == ["good"]
    assert len(steps) > 2 * number
    assert sum(record["decision"] == "quarantined" for record in bench.history) == number


def test_entries_without_known_times_are_quarantined_in_few_round_trips(far_bench, monkeypatch):
    bench, proxy = far_bench
    put_many(bench, SINGLE, 300)
    (scheduler,) = bench.schedulers
    monkeypatch.setattr("singlebeat.beat.tick.claim_for", lambda *_, **__: 1 / 0)
    before = proxy.round_trips

    scheduler.tick()
    assert (bench.redis.hlen(QUARANTINE), bench.messages) == (300, [])
    assert proxy.round_trips - before <= IN_A_TICK


def test_recovered_and_deleted_entries_cost_few_round_trips(far_bench):
    bench, proxy = far_bench
    put_many(bench, PLAIN, 50)
    (scheduler,) = bench.schedulers
    scheduler.tick()
    put_many(bench, SINGLE, 25)
    bench.redis.zadd(SCHEDULE, dict.fromkeys((f"redbeat:e{at}" for at in range(25)), QUARANTINED))
    for at in range(25, 40):
        bench.redis.delete(f"redbeat:e{at}")
        bench.redis.zrem(SCHEDULE, f"redbeat:e{at}")
    before = proxy.round_trips

    scheduler.tick()

    assert proxy.round_trips - before <= IN_A_TICK
    assert bench.redis.hlen(QUARANTINE) == 10
    scheduler.tick()
    assert len(bench.messages) == 1  # all are one call, whose lock is held


def test_a_tick_reads_a_part_of_a_large_quarantine(bench, redis):
    scheduler = bench.scheduler()
    scheduler.tick()
    put_many(bench, PLAIN, 1)
    redis.hset(
        QUARANTINE, mapping={f"redbeat:gone{at}": '{"reason": "of another one that was deleted"}' for at in range(2000)}
    )
    checked = scheduler.store.quarantine.keep
    seen: list[str] = []

    def check(member: str, reason: str) -> None:
        seen.append(member)
        checked(member, reason)

    scheduler.store.quarantine.keep = check
    scheduler.tick()
    assert 0 < len(seen) < 400

    for _ in range(60):
        scheduler.tick()
    assert redis.hlen(QUARANTINE) == 0


# ---------------------------------------------------------------- Redis is unreachable


def test_an_outage_is_survived_and_said_once(own_server, bench_on, caplog):
    caplog.set_level("INFO")
    static = {"mine": {"task": PLAIN, "schedule": 0.05, "args": ["mine"]}}
    bench = bench_on(own_server, beat_schedule=static, redbeat_lock_timeout=1.5, task_publish_retry=False)
    scheduler = bench.scheduler()
    wait_until(lambda: scheduler.tick() and bench.redis.llen(QUEUE), what="the first message")
    own_server.kill()

    for _ in range(5):
        assert scheduler.tick() > 0

    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR" and "trying again" in r.getMessage()]
    assert said
    assert len(said) == len(set(said))

    own_server.restart()
    redis = own_server.client()
    wait_until(lambda: scheduler.tick() and redis.llen(QUEUE), what="a message after the outage")
    assert "Redis works again" in caplog.text
    assert redis.smembers(STATICS) == {"mine"}


def test_a_server_that_hangs_is_survived(own_server, bench_on, caplog):
    bench = bench_on(own_server, singlebeat_socket_timeout=0.2, redbeat_lock_timeout=1.5, task_publish_retry=False)
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.put()
    own_server.pause()

    try:
        for _ in range(2):
            assert scheduler.tick() > 0
        wait_until(lambda: scheduler.lease.term() is None, what="the end of trust")
        assert scheduler.tick() > 0
    finally:
        own_server.resume()

    assert "trying again" in caplog.text
    wait_until(lambda: scheduler.tick() and bench.redis.llen(QUEUE), what="the message after the pause")
    assert bench.names == ["e"]


def test_a_beat_that_starts_before_redis_does_waits_for_it(own_server, bench_on):
    bench = bench_on(own_server, beat_schedule={"mine": {"task": PLAIN, "schedule": 3600}})
    scheduler = bench.scheduler()
    own_server.kill()

    assert scheduler.tick() > 0
    own_server.restart()
    scheduler.tick()

    assert own_server.client().smembers(STATICS) == {"mine"}


def test_an_outage_of_the_locks_alone_is_survived(server, redis, own_server, bench_on, caplog):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    entry = bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    own_server.kill()

    assert scheduler.tick() > 0
    assert bench.messages == []
    assert bench.pending() is not None
    assert "the locks' server" in caplog.text

    own_server.restart()
    bench.retry_now()
    scheduler.tick()
    assert bench.names == ["e"]
    assert bench.meta() == Meta(entry.last_run_at + HOUR, 8)


@pytest.mark.parametrize("overlap", ["skip", "buffer_one"])
def test_a_plain_task_that_needs_a_lock_waits_for_the_locks_server(
    server, redis, own_server, bench_on, caplog, logged, overlap
):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put(overlap=overlap)
    scheduler = bench.scheduler()
    own_server.kill()

    scheduler.tick()
    scheduler.tick()

    assert bench.messages == []
    assert caplog.text.count('event=unreachable server="the locks\' server"') == 1
    assert "event=trouble" not in caplog.text
    assert "event=recovered" not in caplog.text
    own_server.restart()
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.retry_now()
    scheduler.tick()
    assert bench.names == ["e"]
    (told,) = logged("recovered")
    assert (told["level"], told["server"]) == ("WARNING", "the locks' server")


@pytest.fixture
def refusing(server, redis, bench_on, monkeypatch):
    """Yield a bench whose schedule's or locks' server lacks a command, by its URL, and a function that grants that."""
    monkeypatch.setattr("singlebeat.beat.scheduler.RECHECK_AFTER", 0.2)
    with ExitStack() as stack:

        def make(setting: str, command: str) -> tuple[Bench, Callable[[], object]]:
            url = stack.enter_context(without(server, command)).replace("redis+socket://", "unix://")
            return bench_on(server, **{setting: url}), lambda: redis.acl_setuser("mute", commands=[f"+{command}"])

        yield make


#: The events of a server that fails, and works again.
TROUBLE = ("unreachable", "recovered", "trouble")


def test_a_schedule_that_can_only_be_read_has_not_recovered(refusing, server, bench_on, logged):
    """A tick with nothing to do succeeds on a server that refuses to record what the one before has done."""
    bench_on(server).put()  # a change needs the right, too: it is recorded
    bench, grant = refusing("redbeat_redis_url", "xadd")
    scheduler = bench.scheduler()

    for _ in range(3):
        scheduler.tick()
    assert [line["event"] for line in logged(*TROUBLE)] == ["trouble"]

    grant()
    wait_until(lambda: scheduler.tick() and logged("recovered"))
    assert [line["event"] for line in logged(*TROUBLE)] == ["trouble", "recovered"]


@pytest.mark.usefixtures("several_writes")
def test_locks_that_can_only_be_read_have_not_recovered(refusing, logged):
    """That a lock is held can be read, and says nothing about the next one that is to be taken."""
    bench, grant = refusing("singleton_backend_url", "hset")
    with make_app(bench.server.celery_url) as caller:
        caller.tasks[SINGLE].delay("held")
    scheduler = bench.scheduler()
    free = bench.put("free", task=SINGLE)
    scheduler.tick()
    held = bench.put("held", task=SINGLE)
    scheduler.tick()
    assert [record["entry"] for record in bench.history] == [held.name]
    assert [line["event"] for line in logged(*TROUBLE)] == ["unreachable"]

    grant()
    bench.retry_now()
    scheduler.tick()
    assert bench.names[-1] == free.name
    assert [line["event"] for line in logged(*TROUBLE)] == ["unreachable", "recovered"]


def test_an_outage_is_logged_once_however_often_others_are_sent(server, redis, own_server, bench_on, logged):
    """Entries without a lock go on, which says nothing about the locks' server."""
    bench = bench_on(server, singleton_backend_url=own_server.url)
    bench.put("waits", task=SINGLE)
    scheduler = bench.scheduler()
    own_server.kill()

    for at in range(3):
        bench.put(f"free{at}", overlap="allow_all")
        bench.retry_now()
        scheduler.tick()
    own_server.restart()
    bench.retry_now()
    scheduler.tick()
    scheduler.tick()

    assert sorted(bench.names) == ["free0", "free1", "free2", "waits"]
    assert [line["event"] for line in logged(*TROUBLE)] == ["unreachable", "recovered"]


@pytest.mark.usefixtures("several_writes")
@pytest.mark.parametrize(("task", "question"), [(SINGLE, "acquire_many"), (PLAIN, "workers_seen")])
def test_a_run_that_needs_no_lock_is_sent_before_locks_are_asked_for(bench, monkeypatch, task, question):
    met = []

    def ask(*args: object, **kwargs: object) -> NoReturn:
        met.append((bench.names, bench.decisions))
        raise LockBackendError("it hangs")

    monkeypatch.setattr(RedisBackend, question, ask)
    bench.put("locked", task=task, ago=2 * HOUR)
    bench.put("free", overlap="allow_all")

    bench.tick()

    assert met == [(["free"], ["dispatched"])]
    assert bench.pending("locked") is not None


@pytest.mark.usefixtures("several_writes")
def test_a_locks_server_that_hangs_is_left_alone_for_a_while(bench, redis, monkeypatch):
    """Each question keeps the tick waiting, and so all entries that need no lock."""
    asked, now = [], [1000.0]

    def hang(*args: object, **kwargs: object) -> NoReturn:
        asked.append(now[0])
        now[0] += 5.0
        raise LockBackendError("it hangs")

    monkeypatch.setattr("singlebeat.beat.failures.monotonic", lambda: now[0])
    for question in ("acquire_many", "finish_many"):
        monkeypatch.setattr(RedisBackend, question, hang)
    monkeypatch.setattr("singlebeat.beat.dispatch.release_later", Mock())  # its thread would ask, too
    scheduler = bench.scheduler()
    for name in ("a", "b"):
        bench.put(name, task=SINGLE)
        bench.retry_now()
        scheduler.tick()
    redis.hset("redbeat:b", "policy", '{"misfire_grace_time": 0.001}')
    bench.retry_now()
    scheduler.tick()

    assert asked == [1000.0]
    assert bench.decisions == []
    now[0] += 5.0
    bench.retry_now()
    scheduler.tick()
    assert asked == [1000.0, 1010.0]


def test_one_write_is_not_tried_while_locks_elsewhere_are_unreachable(server, redis, own_server, bench_on, monkeypatch):
    """It would wait for their server once more in each tick."""
    bench, marked = bench_on(server, singleton_backend_url=own_server.url), Mock()
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    own_server.kill()
    scheduler.tick()
    monkeypatch.setattr(Marker, "write", marked)

    bench.retry_now()
    scheduler.tick()

    assert marked.call_count == 0


@pytest.mark.usefixtures("several_writes")
def test_no_lock_is_asked_for_in_a_tick_whose_broker_is_away(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(RedisBackend, "acquire_many", lambda *args, **kwargs: asked.append(args))
    monkeypatch.setattr(Scheduler, "publish", Mock(side_effect=OSError("no route")))
    monkeypatch.setattr(Scheduler, "reaches_broker", lambda _: False)
    bench.put("locked", task=SINGLE)
    bench.put("free", overlap="allow_all")

    bench.tick()

    assert asked == []
    assert bench.pending("locked") is not None
    assert bench.pending("free") is not None


def test_a_wrong_password_of_the_locks_server_is_logged_once(server, redis, bench_on, caplog):
    with RedisServer(password="right") as locks:
        bench = bench_on(server, singleton_backend_url=locks.url.replace("right", "wrong"))
        bench.put(task=SINGLE)
        scheduler = bench.scheduler()
        for _ in range(3):
            bench.retry_now()
            scheduler.tick()

    told = [record.singlebeat["event"] for record in caplog.records]
    assert told == ["unreachable"]
    assert "wrong" not in caplog.text.replace("WRONGPASS", "")


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
def test_an_entry_without_a_lock_runs_while_the_locks_are_unreachable(server, redis, own_server, bench_on, task):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put("locked")
    bench.put("unlocked", task=task, overlap="allow_all")
    own_server.kill()

    bench.scheduler().tick()

    assert bench.names == ["unlocked"]
    assert [record["entry"] for record in bench.history] == ["unlocked"]


# ---------------------------------------------------------------- the end


def test_closing_before_the_first_tick_touches_nothing(bench):
    scheduler = bench.scheduler()

    scheduler.close()
    scheduler.close()

    assert bench.redis.dbsize() == 0


def test_closing_gives_the_lock_back_and_may_be_repeated(bench):
    scheduler = bench.scheduler()
    scheduler.tick()
    assert bench.redis.exists(LOCK, LEADER) == 2

    scheduler.close()
    scheduler.close()

    assert bench.redis.exists(LOCK, LEADER) == 0


def test_a_closed_scheduler_never_leads_again(bench):
    scheduler = bench.scheduler()
    scheduler.tick()
    scheduler.close()
    bench.put()

    with pytest.raises(SystemExit):  # it was told to end, and something has swallowed that
        scheduler.tick()

    assert bench.messages == []
    assert bench.redis.exists(LOCK) == 0


def test_closing_amid_a_tick_stops_the_publishing(bench):
    for name in ("a", "b", "c"):
        bench.put(name)
    scheduler = bench.scheduler()

    with connected(after_task_publish, lambda **_: scheduler.close()):
        scheduler.tick()

    assert len(bench.messages) == 1
    assert bench.redis.exists(LOCK) == 0
    bench.scheduler().tick()
    assert sorted(bench.names) == ["a", "b", "c"]


def test_a_signal_that_ends_beat_amid_a_tick_loses_nothing(bench):
    for name in ("a", "b", "c"):
        bench.put(name)
    scheduler = bench.scheduler()

    def terminate(**_: Any) -> None:  # what celery does on SIGTERM
        scheduler.close()
        raise SystemExit

    with connected(after_task_publish, terminate), pytest.raises(SystemExit):
        scheduler.tick()
    scheduler.close()
    bench.scheduler().tick()

    assert sorted(set(bench.names)) == ["a", "b", "c"]
    assert len(set(bench.ids)) == 3


def test_closing_without_redis_does_not_raise(own_server, bench_on):
    scheduler = bench_on(own_server).scheduler()
    scheduler.tick()
    own_server.kill()

    scheduler.close()

    assert scheduler.lease.term() is None


def test_the_watchdog_does_not_end_a_process_that_has_closed_its_scheduler(bench):
    code = f"""
import json, threading
from celery import Celery
from singlebeat import Scheduler
app = Celery(broker={bench.server.celery_url!r}, set_as_current=False)
app.conf.update(redbeat_redis_url={bench.server.url!r}, singlebeat_watchdog_timeout=0.5)
scheduler = Scheduler(app)
scheduler.tick()
threads = [t for t in threading.enumerate() if t.name == "singlebeat-watchdog"]
scheduler.close()
for thread in threads:
    thread.join(30)
print(json.dumps(len(threads)))
"""

    assert python(code) == 1


@pytest.mark.parametrize("setting", ["redbeat_redis_options", "singleton_backend_kwargs"])
def test_the_watchdog_waits_for_calls_that_are_repeated(setting):
    app = make_app("redis://unused", {"singlebeat_watchdog_timeout": 20, setting: {"retry_period": 60}})

    assert Scheduler(app)._watchdog.timeout == 80


def test_the_watchdog_hears_before_each_call_of_a_tick_to_a_server(bench, monkeypatch):
    """Each call may be repeated for ``retry_period``, so no two of them may fall into one wait of the watchdog."""
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.put("single", task=SINGLE)
    bench.put("plain")
    events = list[str]()
    for part in (scheduler.store.quarantine, scheduler.clock, scheduler.lost_places):
        monkeypatch.setattr(part, "_progress", lambda: events.append("progress"))
    monkeypatch.setattr(scheduler.store, "report_progress", lambda: events.append("progress"))
    monkeypatch.setattr(scheduler.dispatcher, "progress", lambda: events.append("progress"))
    pools = {scheduler.store.client.connection_pool, backend_of(scheduler.app).redis.connection_pool}

    def heard(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(client: Any, *args: Any, **kwargs: Any) -> Any:
            # A script that the server does not know is sent at once again, as EVAL.
            if client.connection_pool in pools and args[:1] != ("EVAL",):
                events.append(str(args[:1] or name))
            return real(client, *args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    heard(Redis, "execute_command")
    heard(Pipeline, "execute")
    scheduler.tick()

    seen = events[:]
    assert sorted(bench.names) == ["plain", "single"]
    assert len([event for event in seen if event != "progress"]) >= 5
    assert [pair for pair in itertools.pairwise(["progress", *seen]) if "progress" not in pair] == []


@pytest.mark.parametrize("where", ["install", "decide", "recheck"])
def test_the_watchdog_hears_before_each_question_to_an_own_schedule(server, bench_on, where, monkeypatch):
    """Each may take nearly as long as the watchdog waits."""
    events = list[str]()

    class EvenMinutes(schedule):
        is_broken = False

        def is_due(self, last_run_at: datetime) -> Any:
            events.append("question")
            if self.is_broken:
                raise ValueError("no calendar")
            return (self.now().minute % 2 == 0, 60.0)

    when = EvenMinutes(60)
    bench = bench_on(server, beat_schedule={"own": {"task": PLAIN, "schedule": when, "args": ["own"]}})
    scheduler = bench.scheduler(app=bench.app)
    monkeypatch.setattr(scheduler, "_report_progress", lambda: events.append("progress"))
    if where != "install":
        scheduler.tick()
        bench.make_due("own", ago=HOUR)
    if where == "recheck":
        when.is_broken = True
        scheduler.tick()
        assert bench.redis.hexists("redbeat::quarantine", "redbeat:own")
        when.is_broken = False
        monkeypatch.setattr("singlebeat.beat.store.quarantine.RETRY_AFTER", timedelta())
    events.clear()

    scheduler.tick()

    asked = events.count("question")
    assert asked >= {"install": 1, "decide": 3, "recheck": 1}[where]
    assert ("question", "question") not in itertools.pairwise(events)
    assert not bench.redis.hexists("redbeat::quarantine", "redbeat:own")


def test_the_lock_has_redbeats_interface(bench):
    scheduler = bench.scheduler()
    scheduler.tick()

    assert scheduler.lock.owned()
    scheduler.lock.release()
    assert not scheduler.lock.owned()
    assert bench.redis.exists(LOCK) == 0


# ---------------------------------------------------------------- singlebeat_allowed_tasks


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"link": [{"task": "admin.drop", "args": [], "options": {}}]},
            "makes task admin.drop run, which is not among",
        ),
        (
            {"chain": [{"task": "admin.drop", "args": [], "options": {}}]},
            "makes task admin.drop run, which is not among",
        ),
        ({"headers": {"task": "admin.drop"}}, "the option headers has 'task', which an entry must not set"),
    ],
    ids=str,
)
def test_an_entry_that_smuggles_a_task_past_the_setting_sends_nothing(bench_on, server, redis, options, reason):
    bench = bench_on(server, singlebeat_allowed_tasks=["tests.*"])
    definition = {"task": PLAIN, "args": ["smuggler"], "schedule": 60, "options": options}
    redis.hset("redbeat:smuggler", "definition", json.dumps(definition))
    redis.zadd(SCHEDULE, {"redbeat:smuggler": 0})
    bench.put("honest", options={"link": [{"task": PLAIN, "args": ["linked"], "options": {}}]})

    bench.scheduler().tick()

    assert bench.names == ["honest"]
    assert reason in json.loads(redis.hget("redbeat::quarantine", "redbeat:smuggler"))["reason"]
