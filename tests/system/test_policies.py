"""Policies of entries and ``singlebeat.Schedule`` with a real beat and a real worker, shared by the cases here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from redis import Redis

from singlebeat import Entry, Schedule
from tests.support import (
    ORACLE_DB,
    ROOT,
    CeleryLauncher,
    CeleryProcess,
    Oracle,
    RedisServer,
    measured,
    until_answered,
    wait_until,
)
from tests.system.policies import make_app

APP = "tests.system.policies"
PLAIN, SINGLE = f"{APP}.plain", f"{APP}.single"
BOTH = pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
SCHEDULE, HISTORY, PENDING = "redbeat::schedule", "redbeat::history", "redbeat::pending"
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


@dataclass
class Stage:
    """A server with a beat and a worker."""

    server: RedisServer
    redis: Redis
    oracle: Oracle
    worker: CeleryProcess
    app: Celery
    schedule: Schedule

    def decisions(self, name: str) -> list[dict[str, str]]:
        """What beat has decided about an entry so far, with the time of each as ``at``."""
        records = self.redis.xrange(HISTORY)
        return [{**record, "at": place} for place, record in records if record["entry"] == name]

    def decided(self, name: str, *outcomes: str) -> list[dict[str, str]]:
        """Return the decisions about an entry as soon as there are so many, and check that they are these."""
        wait_until(lambda: len(self.decisions(name)) >= len(outcomes), timeout=30, what=f"{outcomes} of {name}")
        decisions = self.decisions(name)
        assert [record["decision"] for record in decisions] == list(outcomes)
        return decisions

    def ends(self, name: str) -> list[str]:
        """Return how the runs of an entry have ended, the first one first."""
        records = self.schedule.history(name)
        return [record.end.outcome for record in reversed(records) if record.end is not None]

    def told(self, task_id: str) -> dict[str, Any]:
        """Return what the body of a run knew about it."""
        return self.app.AsyncResult(task_id).get(timeout=30)

    def parked(self, name: str) -> None:
        wait_until(lambda: self.redis.zscore(SCHEDULE, f"redbeat:{name}") == -1, timeout=30, what=f"the end of {name}")

    def write(self, name: str, when: Any, *, task: str = PLAIN, ago: timedelta, **wishes: Any) -> Entry:
        """Store an entry that has run before, due as soon as beat sees it."""
        last = datetime.now(UTC) - ago
        return Entry(name, task, when, [name], app=self.app, last_run_at=last, **wishes).save()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with RedisServer() as server:
        launcher = CeleryLauncher(server, f"{server.url}?db={ORACLE_DB}", tmp_path_factory.mktemp("policies"))
        try:
            beat = launcher("beat", app=APP)
            worker = launcher("worker", "-c", "4", app=APP).ready()
            beat.wait_for("this beat leads")
            with make_app(server.celery_url) as app:
                oracle = Oracle(server.client(db=ORACLE_DB))
                yield Stage(server, server.client(), oracle, worker, app, Schedule(app))
        finally:
            launcher.stop()


@pytest.fixture
def name(request: pytest.FixtureRequest, stage: Stage) -> Iterator[str]:
    """The name of the test's entry and of its runs; nothing of it is left for the next test."""
    name = request.node.name
    yield name
    stage.schedule.delete(name)
    stage.oracle.let_go(name, 10)


def instants(texts: Any) -> list[datetime]:
    return [datetime.fromisoformat(text) for text in texts]


# ---------------------------------------------------------------- overlap


@pytest.fixture
def trigger(stage: Stage, name: str) -> Callable[[int], list[str]]:
    """Let the entry run so many times, each handed over when beat has decided about the one before."""

    def trigger(times: int) -> list[str]:
        ids = []
        for _ in range(times):
            before = len(stage.decisions(name))
            ids.append(stage.schedule.trigger(name, timeout=30))
            wait_until(lambda known=before: len(stage.decisions(name)) > known, timeout=30, what="a decision")
        return ids

    return trigger


@pytest.fixture
def put(stage: Stage, name: str) -> Callable[..., None]:
    def put(task: str, overlap: str) -> None:
        stage.schedule.upsert(name, task, 3600, args=[name], kwargs={"seconds": 60}, overlap=overlap)

    return put


@BOTH
def test_skip_does_not_send_a_run_that_meets_its_equal(stage, name, put, trigger, task):
    put(task, "skip")
    (first,) = trigger(1)
    stage.oracle.wait_started(1, name)
    trigger(2)
    stage.decided(name, "dispatched", "skipped_overlap", "skipped_overlap")
    stage.oracle.let_go(name)

    assert stage.told(first)["occurrence"] == first
    assert stage.oracle.started(name) == 1


@BOTH
def test_buffer_one_runs_once_more_after_the_present(stage, name, put, trigger, task):
    put(task, "buffer_one")
    trigger(1)
    stage.oracle.wait_started(1, name)
    trigger(2)
    stage.decided(name, "dispatched", "buffered", "skipped_overlap")
    stage.oracle.let_go(name, 2)
    stage.oracle.wait_ended(2, name)

    assert stage.oracle.max_concurrent(name) == 1


@BOTH
def test_buffer_all_runs_all_in_turn(stage, name, put, trigger, task):
    put(task, "buffer_all")
    ids = trigger(1)
    stage.oracle.wait_started(1, name)
    ids += trigger(2)
    stage.decided(name, "dispatched", "buffered", "buffered")
    stage.oracle.let_go(name, 3)
    runs = stage.oracle.wait_ended(3, name)

    assert {run.id for run in runs} == set(ids)
    assert stage.oracle.max_concurrent(name) == 1


@BOTH
def test_cancel_other_lets_the_running_one_end_and_runs_after_it(stage, name, put, trigger, task):
    put(task, "cancel_other")
    ids = trigger(1)
    stage.oracle.wait_started(1, name)
    ids += trigger(2)
    stage.decided(name, "dispatched", "buffered", "buffered")
    assert stage.oracle.running(name)
    stage.oracle.let_go(name, 2)
    runs = stage.oracle.wait_ended(2, name)

    assert [run.id for run in runs] == [ids[0], ids[2]]
    assert stage.oracle.max_concurrent(name) == 1
    ends = ["success", "replaced", "success"]
    wait_until(lambda: stage.ends(name) == ends, timeout=30, what=f"the ends {ends}")


@BOTH
def test_terminate_other_ends_the_running_one_and_runs_after_it(stage, name, put, trigger, task):
    put(task, "terminate_other")
    ids = trigger(1)
    stage.oracle.wait_started(1, name)
    ids += trigger(1)
    first, second = stage.oracle.wait_started(2, name)

    assert [first.id, second.id] == ids
    assert not first.lives
    stage.oracle.let_go(name)
    assert stage.told(second.id)["occurrence"] == second.id


@BOTH
def test_allow_all_runs_them_at_the_same_time(stage, name, put, trigger, task):
    put(task, "allow_all")
    trigger(2)
    stage.oracle.wait_started(2, name)

    assert stage.oracle.max_concurrent(name) == 2
    stage.oracle.let_go(name, 2)


# ---------------------------------------------------------------- what a run knows


@BOTH
def test_a_run_knows_its_entry_its_times_and_why_it_runs(stage, name, task):
    entry = stage.write(name, schedule(HOUR), task=task, ago=HOUR)
    (decision,) = stage.decided(name, "dispatched")
    iso = {"timespec": "milliseconds"}

    assert stage.told(decision["id"]) == {
        "entry": name,
        "occurrence": decision["id"],
        "nominal": (entry.last_run_at + HOUR).isoformat(**iso),
        "previous": None,
        "kind": "scheduled",
    }
    asked = stage.told(stage.schedule.trigger(name))
    assert (asked["kind"], asked["previous"]) == ("manual", (entry.last_run_at + HOUR).isoformat(**iso))


@BOTH
def test_the_latest_run_missed_while_beat_was_down_is_a_catch_up(stage, name, task):
    entry = stage.write(name, schedule(HOUR), task=task, ago=5.5 * HOUR)
    (decision,) = stage.decided(name, "dispatched")
    told = stage.told(decision["id"])

    assert told["kind"] == decision["kind"] == "catch_up"
    assert told["nominal"] == (entry.last_run_at + 5 * HOUR).isoformat(timespec="milliseconds")
    assert told["previous"] is None  # it has never run


# ---------------------------------------------------------------- when, and whether


def test_timezone_is_the_clock_on_which_a_crontab_is_read(stage, name):
    tokyo = datetime.now(ZoneInfo("Asia/Tokyo")).replace(minute=0, second=0, microsecond=0)
    stage.write(name, crontab(minute=0, hour=tokyo.hour), ago=3 * HOUR, timezone="Asia/Tokyo")
    (decision,) = stage.decided(name, "dispatched")

    assert instants([decision["nominal"]]) == [tokyo]


def test_an_entry_runs_on_its_grid_from_start_to_end_and_is_finished(stage, name):
    every = timedelta(seconds=0.2)
    start = datetime.now(UTC).replace(microsecond=0) + 5 * SECOND
    stage.schedule.upsert(
        name, PLAIN, every, args=[name], overlap="allow_all", start_time=start, end_time=start + 5 * every
    )
    stage.parked(name)  # what is decided of its last time is written a moment later

    def nominals() -> list[datetime]:
        return instants(record["nominal"] for record in stage.decisions(name))

    # However late beat is, the last one stands for those before it.
    wait_until(lambda: nominals()[-1:] == [start + 5 * every], what="the run at the end")
    assert nominals() == sorted(set(nominals()))
    assert set(nominals()) <= {start + n * every for n in range(6)}
    assert {record["decision"] for record in stage.decisions(name)} == {"dispatched"}


def test_max_runs_are_all_the_runs(stage, name):
    stage.schedule.upsert(name, PLAIN, 0.2, args=[name], overlap="allow_all", max_runs=3)
    stage.parked(name)
    stage.decided(name, *["dispatched"] * 3)
    stage.oracle.wait_ended(3, name)

    assert stage.schedule.get(name).total_run_count == 3
    task_id = stage.schedule.trigger(name)
    assert stage.told(task_id)["kind"] == "manual"


def test_jitter_puts_runs_off(stage, name):
    last = datetime.now(UTC).replace(microsecond=0)  # nominal times are recorded to the millisecond
    wishes = {"overlap": "allow_all", "jitter": 0.4, "max_runs": 4}
    entry = Entry(name, PLAIN, schedule(0.5), [name], app=stage.app, last_run_at=last, **wishes).save()
    stage.parked(name)
    decisions = stage.decided(name, *["dispatched"] * 4)
    dues = [entry.timetable.due(datetime.fromisoformat(record["nominal"])) for record in decisions]

    for record, due in zip(decisions, dues, strict=True):
        assert int(record["at"].partition("-")[0]) >= int(due.timestamp() * 1000), "it was sent too early"
    assert any(due > datetime.fromisoformat(record["nominal"]) for record, due in zip(decisions, dues, strict=True))


def test_a_run_later_than_its_misfire_grace_time_is_missed(stage, name):
    stage.write(name, schedule(HOUR), ago=1.5 * HOUR, misfire_grace_time=60)
    stage.decided(name, "missed")

    kind = stage.told(stage.schedule.trigger(name))["kind"]  # which is never late
    assert kind == "manual"
    assert stage.oracle.started(name) == 1


def test_a_message_that_no_worker_starts_in_time_expires(stage, name):
    stage.schedule.upsert(name, PLAIN, 3600, args=[name], options={"queue": name}, expires=0.1)
    task_id = stage.schedule.trigger(name)
    stage.decided(name, "dispatched")
    (message,) = (json.loads(text)["headers"] for text in stage.redis.lrange(name, 0, -1))
    expires = datetime.fromisoformat(message["expires"])
    wait_until(lambda: datetime.now(UTC) > expires, what="the end of the message")

    until_answered(partial(stage.app.control.add_consumer, name))

    stage.worker.wait_for(rf"Discarding revoked task: {PLAIN}\[{task_id}\]")
    assert stage.oracle.started(name) == 0


def test_a_pause_and_its_end_are_noticed_at_once(stage, name):
    stage.schedule.upsert(name, PLAIN, 0.2, args=[name], overlap="allow_all")
    stage.oracle.wait_ended(2, name)

    began = time.monotonic()
    stage.schedule.pause(name, "for a while")
    paused = wait_until(lambda: [r for r in stage.decisions(name) if r["decision"] == "paused"], what="a pause")
    measured(f"a pause was noticed after {time.monotonic() - began:.2f} s")
    assert paused[0]["reason"] == "for a while"

    def all_that_was_sent_has_ended() -> bool:
        decisions = [record["decision"] for record in stage.decisions(name)]
        return decisions[-1] == "paused" and stage.oracle.ended(name) == decisions.count("dispatched")

    wait_until(all_that_was_sent_has_ended, timeout=30)
    runs, known = stage.oracle.started(name), len(stage.decisions(name))
    wait_until(lambda: len(stage.decisions(name)) >= known + 3, what="three more times that pass")
    assert stage.oracle.started(name) == runs

    began = time.monotonic()
    stage.schedule.resume(name)
    stage.oracle.wait_started(runs + 1, name)
    measured(f"its end was noticed after {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize("by", ["Schedule", "raw Redis"])
def test_a_new_entry_an_edit_and_its_end_are_noticed_at_once(stage, name, by):
    def write(value: str) -> None:
        if by == "Schedule":
            stage.schedule.upsert(name, PLAIN, 0.2, args=[value], overlap="allow_all", run_on_start=True)
        else:
            definition = json.dumps({"task": PLAIN, "schedule": 0.2, "args": [value]})
            stage.redis.hset(
                f"redbeat:{name}", mapping={"definition": definition, "policy": '{"overlap": "allow_all"}'}
            )
            stage.redis.zadd(SCHEDULE, {f"redbeat:{name}": 0}, nx=True)

    stage.schedule.upsert(f"{name}, other", PLAIN, 3600, args=["other"], overlap="allow_all")
    for value in (f"{name}, new", f"{name}, edited"):
        began = time.monotonic()
        write(value)
        stage.oracle.wait_started(1, value, timeout=10)
        measured(f"{value} was noticed after {time.monotonic() - began:.2f} s")
    if by == "Schedule":
        stage.schedule.delete(name)
    else:  # one place of two: beat restores places when more than half of those that it has seen are gone
        stage.redis.zrem(SCHEDULE, f"redbeat:{name}")
    # Beat goes on with others, and not with this one: but for what it had read before, it is over.
    known = len(stage.decisions(name)) + 1
    for _ in range(2):
        stage.told(stage.schedule.trigger(f"{name}, other"))
    assert len(stage.decisions(name)) <= known
    stage.schedule.delete(f"{name}, other")


def test_run_on_start_runs_a_new_entry_once_and_not_at_the_next_start(celery, oracle, redis, app):
    entry = {"task": PLAIN, "schedule": schedule(3600), "args": ["once"], "run_on_start": True}
    celery("worker", "-P", "solo", app=APP)
    for number in range(2):
        beat = celery("beat", app=APP, conf={"beat_schedule": {"once": entry}})
        beat.wait_for("this beat leads")
        # What is triggered now is sent in a tick after the one that installs the entries.
        Schedule(app).upsert("other", PLAIN, 3600, args=["other"], overlap="allow_all")
        Schedule(app).trigger("other")
        oracle.wait_ended(number + 1, "other")
        oracle.wait_ended(1, "once")
        beat.terminate()
        beat.wait()

    assert [r["entry"] for _, r in redis.xrange(HISTORY) if r["entry"] == "once"] == ["once"]
    assert oracle.started("once") == 1


# ---------------------------------------------------------------- backfill


def test_a_killed_backfill_goes_on_and_runs_each_time_once_in_order(stage, name):
    start = datetime(2026, 3, 1, tzinfo=UTC)
    end = start + 12 * HOUR
    stage.schedule.upsert(name, PLAIN, crontab(minute=0), args=[name])
    environment = {**os.environ, "SB_TEST_URL": stage.server.celery_url, "PYTHONPATH": str(Path(ROOT))}
    arguments = [name, start.isoformat(), end.isoformat()]
    command = [sys.executable, "-m", APP, *arguments]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as backfill:
        backfill.stdin.write(b"\n" * 3)
        backfill.stdin.flush()
        wait_until(lambda: len(stage.decisions(name)) >= 3, timeout=30, what="the first runs")
        backfill.kill()
    assert stage.redis.hexists(f"redbeat:{name}", "backfill")

    rest = stage.schedule.backfill(name, start, end, timeout=30)

    assert len(rest) in {8, 9}, "it was killed while it made the fourth, or after that"
    wait_until(lambda: len(stage.decisions(name)) >= 12, timeout=30, what="all runs")
    decisions = stage.decisions(name)
    # A run may not be over when the next one is due.
    assert {record["decision"] for record in decisions} <= {"dispatched", "buffered"}
    nominals = instants(record["nominal"] for record in decisions)
    assert nominals == [start + n * HOUR for n in range(1, 13)]
    assert {record["kind"] for record in decisions} == {"backfill"}
    told = [stage.told(record["id"]) for record in decisions]
    assert instants(each["nominal"] for each in told) == nominals
    assert all(each["nominal"] == following["previous"] for each, following in pairwise(told))
    assert stage.oracle.started(name) == 12
    assert stage.oracle.max_concurrent(name) == 1
    assert not stage.redis.hexists(f"redbeat:{name}", "backfill")
