"""Five incidents, each made with real processes and explained in words by one command."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule

from singlebeat import Entry, Schedule
from tests.support import APP, CeleryProcess, measured, wait_until

BEAT = ("beat", "-S", "singlebeat.Scheduler")


@pytest.fixture
def ask(celery):
    """Run ``celery singlebeat …``, for up to 30 s until it prints what is awaited; return what it prints."""

    def ask(*args: str, code: int = 0, until: str = "") -> str:
        def printed() -> str:
            process: CeleryProcess = celery("singlebeat", *args)
            assert process.wait(60) == code, process.tail()
            process.stop()
            return process.text if until in process.text else ""

        # To the command a worker that answers late is not there.
        text = wait_until(printed, timeout=30, what=until)
        measured(f"$ celery -A shop singlebeat {' '.join(args)}\n{text}")
        return text

    return ask


def nightly(app, **fields: object) -> Entry:
    fields = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["nightly", 60], **fields}
    return Entry("nightly", app=app, **{"run_on_start": True, **fields}).save()


def decided(app, decision: str) -> None:
    wait_until(lambda: [r for r in Schedule(app).history("nightly") if r.decision == decision], timeout=30)


def test_a_run_is_skipped_because_the_one_before_it_is_not_over(celery, app, oracle, ask):
    nightly(app)
    worker = celery("worker", "-c", "2").ready()
    celery(*BEAT)
    (run,) = oracle.wait_started(1)
    decided(app, "skipped_overlap")

    text = ask("explain", "nightly", until=(runs := f"Task {run.id} runs now, on w"))

    assert "was skipped: the one before it was not over" in text
    assert runs in text
    assert worker.returncode is None
    assert run.id in ask("locks", "--json")


def test_a_worker_has_died_and_its_lock_waits_for_the_end_of_its_lease(celery, app, oracle, redis, ask):
    nightly(app)
    worker = celery("worker", "-c", "2", conf={"singlebeat_lock_lease": 120}).ready()
    celery(*BEAT)
    (run,) = oracle.wait_started(1)
    worker.kill_group()
    worker.wait()
    decided(app, "skipped_overlap")
    (lock,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    a_minute_ago = int(time.time() * 1000) - 60_000
    redis.hset(lock, mapping={"since": a_minute_ago, "renewed": a_minute_ago})
    redis.pexpire(lock, 60_000)

    text = ask("explain", "nightly", until="its worker has probably died. The lock ends by itself in ")
    assert "was skipped: the one before it was not over" in text
    assert f"Task {run.id} holds the lock, which was last renewed" in text
    assert f"to free it now: celery singlebeat unlock {run.id}" in text
    assert "--force" not in text
    assert "No worker answers." in text
    ask("unlock", run.id)
    wait_until(
        lambda: any(
            record.task_id != run.id and record.decision == "dispatched" for record in Schedule(app).history("nightly")
        )
    )


def test_a_run_is_missed_while_no_beat_was_there(celery, app, ask):
    began = datetime.now(UTC) - timedelta(minutes=30)
    nightly(app, schedule=schedule(3600 / 2 - 60), last_run_at=began, misfire_grace_time=30, run_on_start=False)
    assert "No beat leads: nothing is sent until one is started" in ask("explain", "nightly")

    celery(*BEAT)
    decided(app, "missed")

    text = ask("explain", "nightly")
    assert "was missed: " in text
    assert "misfire_grace_time is 30 s" in text
    assert "No beat was there to send it in time" in text
    assert "It runs next for" in text


def test_an_entry_is_broken(celery, redis, ask):
    definition = {"task": "shop.bill", "schedule": {"__type__": "crontab", "minute": "99"}}
    redis.hset("redbeat:nightly", "definition", json.dumps(definition))
    redis.zadd("redbeat::schedule", {"redbeat:nightly": 0})
    celery(*BEAT)
    wait_until(lambda: redis.hexists("redbeat::quarantine", "redbeat:nightly"))

    text = ask("explain", "nightly")

    assert "It is set aside and does not run, since" in text
    assert "definition cannot be read" in text
    assert "99" in text
    assert "entry nightly: is set aside since" in ask("doctor", code=1)


def test_no_worker_knows_the_task_of_an_entry(celery, app, ask):
    nightly(app, task="shop.bil", schedule=schedule(3600))
    celery("worker", "-c", "1").ready()
    celery(*BEAT)
    wait_until(lambda: any(record.end for record in Schedule(app).history("nightly")), timeout=30)

    text = ask("explain", "nightly", until=(nobody := "No worker that answers knows the task shop.bil"))

    assert "unknown_task" in text
    assert "That worker does not know the task and has dropped the message." in text
    assert nobody in text
    unknown = "entry nightly: no worker that answers knows its task shop.bil"
    assert unknown in ask("doctor", code=1, until=unknown)
