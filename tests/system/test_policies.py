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
class Scene:
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
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with RedisServer() as server:
        launcher = CeleryLauncher(server, f"{server.url}?db={ORACLE_DB}", tmp_path_factory.mktemp("scene"))
        try:
            beat = launcher("beat", app=APP)
            worker = launcher("worker", "-c", "4", app=APP).ready()
            beat.wait_for("this beat leads")
            with make_app(server.celery_url) as app:
                oracle = Oracle(server.client(db=ORACLE_DB))
                yield Scene(server, server.client(), oracle, worker, app, Schedule(app))
        finally:
            launcher.stop()


@pytest.fixture
def name(request: pytest.FixtureRequest, scene: Scene) -> Iterator[str]:
    """The name of the test's entry and of its runs; nothing of it is left for the next test."""
    name = request.node.name
    yield name
    scene.schedule.delete(name)
    scene.oracle.let_go(name, 10)


def instants(texts: Any) -> list[datetime]:
    return [datetime.fromisoformat(text) for text in texts]


# ---------------------------------------------------------------- overlap


@pytest.fixture
def trigger(scene: Scene, name: str) -> Callable[[int], list[str]]:
    """Let the entry run so many times, each handed over when beat has decided about the one before."""

    def trigger(times: int) -> list[str]:
        ids = []
        for _ in range(times):
            before = len(scene.decisions(name))
            ids.append(scene.schedule.trigger(name, timeout=30))
            wait_until(lambda known=before: len(scene.decisions(name)) > known, timeout=30, what="a decision")
        return ids

    return trigger


@pytest.fixture
def put(scene: Scene, name: str) -> Callable[..., None]:
    def put(task: str, overlap: str) -> None:
        scene.schedule.upsert(name, task, 3600, args=[name], kwargs={"seconds": 60}, overlap=overlap)

    return put


@BOTH
def test_skip_does_not_send_a_run_that_meets_its_equal(scene, name, put, trigger, task):
    put(task, "skip")
    (first,) = trigger(1)
    scene.oracle.wait_started(1, name)
    trigger(2)
    scene.decided(name, "dispatched", "skipped_overlap", "skipped_overlap")
    scene.oracle.let_go(name)

    assert scene.told(first)["occurrence"] == first
    assert scene.oracle.started(name) == 1


@BOTH
def test_buffer_one_runs_once_more_after_the_present(scene, name, put, trigger, task):
    put(task, "buffer_one")
    trigger(1)
    scene.oracle.wait_started(1, name)
    trigger(2)
    scene.decided(name, "dispatched", "buffered", "skipped_overlap")
    scene.oracle.let_go(name, 2)
    scene.oracle.wait_ended(2, name)

    assert scene.oracle.max_concurrent(name) == 1


@BOTH
def test_buffer_all_runs_all_in_turn(scene, name, put, trigger, task):
    put(task, "buffer_all")
    ids = trigger(1)
    scene.oracle.wait_started(1, name)
    ids += trigger(2)
    scene.decided(name, "dispatched", "buffered", "buffered")
    scene.oracle.let_go(name, 3)
    runs = scene.oracle.wait_ended(3, name)

    assert {run.id for run in runs} == set(ids)
    assert scene.oracle.max_concurrent(name) == 1


@BOTH
def test_cancel_other_lets_the_running_one_end_and_runs_after_it(scene, name, put, trigger, task):
    put(task, "cancel_other")
    ids = trigger(1)
    scene.oracle.wait_started(1, name)
    ids += trigger(1)
    scene.decided(name, "dispatched", "buffered")
    assert scene.oracle.running(name)
    scene.oracle.let_go(name, 2)
    runs = scene.oracle.wait_ended(2, name)

    assert [run.id for run in runs] == ids
    assert scene.oracle.max_concurrent(name) == 1


@BOTH
def test_terminate_other_ends_the_running_one_and_runs_after_it(scene, name, put, trigger, task):
    put(task, "terminate_other")
    ids = trigger(1)
    scene.oracle.wait_started(1, name)
    ids += trigger(1)
    first, second = scene.oracle.wait_started(2, name)

    assert [first.id, second.id] == ids
    assert not first.lives
    scene.oracle.let_go(name)
    assert scene.told(second.id)["occurrence"] == second.id


@BOTH
def test_allow_all_runs_them_at_the_same_time(scene, name, put, trigger, task):
    put(task, "allow_all")
    trigger(2)
    scene.oracle.wait_started(2, name)

    assert scene.oracle.max_concurrent(name) == 2
    scene.oracle.let_go(name, 2)


# ---------------------------------------------------------------- what a run knows


@BOTH
def test_a_run_knows_its_entry_its_times_and_why_it_runs(scene, name, task):
    entry = scene.write(name, schedule(HOUR), task=task, ago=HOUR)
    (decision,) = scene.decided(name, "dispatched")
    iso = {"timespec": "milliseconds"}

    assert scene.told(decision["id"]) == {
        "entry": name,
        "occurrence": decision["id"],
        "nominal": (entry.last_run_at + HOUR).isoformat(**iso),
        "previous": None,
        "kind": "scheduled",
    }
    asked = scene.told(scene.schedule.trigger(name))
    assert (asked["kind"], asked["previous"]) == ("manual", (entry.last_run_at + HOUR).isoformat(**iso))


@BOTH
def test_the_latest_run_missed_while_beat_was_down_is_a_catch_up(scene, name, task):
    entry = scene.write(name, schedule(HOUR), task=task, ago=5.5 * HOUR)
    (decision,) = scene.decided(name, "dispatched")
    told = scene.told(decision["id"])

    assert told["kind"] == decision["kind"] == "catch_up"
    assert told["nominal"] == (entry.last_run_at + 5 * HOUR).isoformat(timespec="milliseconds")
    assert told["previous"] is None  # it has never run


# ---------------------------------------------------------------- when, and whether


def test_timezone_is_the_clock_on_which_a_crontab_is_read(scene, name):
    tokyo = datetime.now(ZoneInfo("Asia/Tokyo")).replace(minute=0, second=0, microsecond=0)
    scene.write(name, crontab(minute=0, hour=tokyo.hour), ago=3 * HOUR, timezone="Asia/Tokyo")
    (decision,) = scene.decided(name, "dispatched")

    assert instants([decision["nominal"]]) == [tokyo]


def test_an_entry_runs_on_its_grid_from_start_to_end_and_is_finished(scene, name):
    every = timedelta(seconds=0.2)
    start = datetime.now(UTC).replace(microsecond=0) + 5 * SECOND
    scene.schedule.upsert(
        name, PLAIN, every, args=[name], overlap="allow_all", start_time=start, end_time=start + 5 * every
    )
    scene.parked(name)  # what is decided of its last time is written a moment later

    def nominals() -> list[datetime]:
        return instants(record["nominal"] for record in scene.decisions(name))

    # However late beat is, the last one stands for those before it.
    wait_until(lambda: nominals()[-1:] == [start + 5 * every], what="the run at the end")
    assert nominals() == sorted(set(nominals()))
    assert set(nominals()) <= {start + n * every for n in range(6)}
    assert {record["decision"] for record in scene.decisions(name)} == {"dispatched"}


def test_max_runs_are_all_the_runs(scene, name):
    scene.schedule.upsert(name, PLAIN, 0.2, args=[name], overlap="allow_all", max_runs=3)
    scene.parked(name)
    scene.decided(name, *["dispatched"] * 3)
    scene.oracle.wait_ended(3, name)

    assert scene.schedule.get(name).total_run_count == 3
    task_id = scene.schedule.trigger(name)
    assert scene.told(task_id)["kind"] == "manual"


def test_jitter_puts_runs_off(scene, name):
    last = datetime.now(UTC).replace(microsecond=0)  # nominal times are recorded to the millisecond
    wishes = {"overlap": "allow_all", "jitter": 0.4, "max_runs": 4}
    entry = Entry(name, PLAIN, schedule(0.5), [name], app=scene.app, last_run_at=last, **wishes).save()
    scene.parked(name)
    decisions = scene.decided(name, *["dispatched"] * 4)
    dues = [entry.timetable.due(datetime.fromisoformat(record["nominal"])) for record in decisions]

    for record, due in zip(decisions, dues, strict=True):
        assert int(record["at"].partition("-")[0]) >= int(due.timestamp() * 1000), "it was sent too early"
    assert any(due > datetime.fromisoformat(record["nominal"]) for record, due in zip(decisions, dues, strict=True))


def test_a_run_later_than_its_misfire_grace_time_is_missed(scene, name):
    scene.write(name, schedule(HOUR), ago=1.5 * HOUR, misfire_grace_time=60)
    scene.decided(name, "missed")

    kind = scene.told(scene.schedule.trigger(name))["kind"]  # which is never late
    assert kind == "manual"
    assert scene.oracle.started(name) == 1


def test_a_message_that_no_worker_starts_in_time_expires(scene, name):
    scene.schedule.upsert(name, PLAIN, 3600, args=[name], options={"queue": name}, expires=0.1)
    task_id = scene.schedule.trigger(name)
    scene.decided(name, "dispatched")
    (message,) = (json.loads(text)["headers"] for text in scene.redis.lrange(name, 0, -1))
    expires = datetime.fromisoformat(message["expires"])
    wait_until(lambda: datetime.now(UTC) > expires, what="the end of the message")

    until_answered(partial(scene.app.control.add_consumer, name))

    scene.worker.wait_for(rf"Discarding revoked task: {PLAIN}\[{task_id}\]")
    assert scene.oracle.started(name) == 0


def test_a_pause_and_its_end_are_noticed_at_once(scene, name):
    scene.schedule.upsert(name, PLAIN, 0.2, args=[name], overlap="allow_all")
    scene.oracle.wait_ended(2, name)

    began = time.monotonic()
    scene.schedule.pause(name, "for a while")
    paused = wait_until(lambda: [r for r in scene.decisions(name) if r["decision"] == "paused"], what="a pause")
    measured(f"a pause was noticed after {time.monotonic() - began:.2f} s")
    assert paused[0]["reason"] == "for a while"

    def all_that_was_sent_has_ended() -> bool:
        decisions = [record["decision"] for record in scene.decisions(name)]
        return decisions[-1] == "paused" and scene.oracle.ended(name) == decisions.count("dispatched")

    wait_until(all_that_was_sent_has_ended, timeout=30)
    runs, known = scene.oracle.started(name), len(scene.decisions(name))
    wait_until(lambda: len(scene.decisions(name)) >= known + 3, what="three more times that pass")
    assert scene.oracle.started(name) == runs

    began = time.monotonic()
    scene.schedule.resume(name)
    scene.oracle.wait_started(runs + 1, name)
    measured(f"its end was noticed after {time.monotonic() - began:.2f} s")


@pytest.mark.parametrize("by", ["Schedule", "raw Redis"])
def test_a_new_entry_an_edit_and_its_end_are_noticed_at_once(scene, name, by):
    def write(value: str) -> None:
        if by == "Schedule":
            scene.schedule.upsert(name, PLAIN, 0.2, args=[value], overlap="allow_all", run_on_start=True)
        else:
            definition = json.dumps({"task": PLAIN, "schedule": 0.2, "args": [value]})
            scene.redis.hset(
                f"redbeat:{name}", mapping={"definition": definition, "policy": '{"overlap": "allow_all"}'}
            )
            scene.redis.zadd(SCHEDULE, {f"redbeat:{name}": 0}, nx=True)

    for value in (f"{name}, new", f"{name}, edited"):
        began = time.monotonic()
        write(value)
        scene.oracle.wait_started(1, value, timeout=10)
        measured(f"{value} was noticed after {time.monotonic() - began:.2f} s")
    if by == "Schedule":
        scene.schedule.delete(name)
    else:
        scene.redis.zrem(SCHEDULE, f"redbeat:{name}")
    # Beat goes on with others, and not with this one: but for what it had read before, it is over.
    known = len(scene.decisions(name)) + 1
    for _ in range(2):
        scene.schedule.upsert(f"{name}, other", PLAIN, 3600, args=["other"], overlap="allow_all")
        scene.told(scene.schedule.trigger(f"{name}, other"))
    assert len(scene.decisions(name)) <= known
    scene.schedule.delete(f"{name}, other")


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


def test_a_killed_backfill_goes_on_and_runs_each_time_once_in_order(scene, name):
    start = datetime(2026, 3, 1, tzinfo=UTC)
    end = start + 12 * HOUR
    scene.schedule.upsert(name, PLAIN, crontab(minute=0), args=[name])
    environment = {**os.environ, "SB_TEST_URL": scene.server.celery_url, "PYTHONPATH": str(Path(ROOT))}
    arguments = [name, start.isoformat(), end.isoformat()]
    command = [sys.executable, "-m", APP, *arguments]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as backfill:
        backfill.stdin.write(b"\n" * 3)
        backfill.stdin.flush()
        wait_until(lambda: len(scene.decisions(name)) >= 3, timeout=30, what="the first runs")
        backfill.kill()
    assert scene.redis.hexists(f"redbeat:{name}", "backfill")

    rest = scene.schedule.backfill(name, start, end, timeout=30)

    assert len(rest) in {8, 9}, "it was killed while it made the fourth, or after that"
    decisions = scene.decided(name, *["dispatched"] * 12)
    nominals = instants(record["nominal"] for record in decisions)
    assert nominals == [start + n * HOUR for n in range(1, 13)]
    assert {record["kind"] for record in decisions} == {"backfill"}
    told = [scene.told(record["id"]) for record in decisions]
    assert instants(each["nominal"] for each in told) == nominals
    assert all(each["nominal"] == following["previous"] for each, following in pairwise(told))
    assert scene.oracle.started(name) == 12
    assert scene.oracle.max_concurrent(name) == 1
    assert not scene.redis.hexists(f"redbeat:{name}", "backfill")
