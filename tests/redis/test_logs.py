"""What is logged and recorded of real events: every decision with its reason, trouble in time, and else nothing."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from singlebeat import Singleton, signals
from singlebeat.beat.explain import Facts, explain
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import Lease
from singlebeat.beat.status import ScheduleStatus
from singlebeat.beat.store.quarantine import QUARANTINED
from singlebeat.locks import backend_of
from singlebeat.locks.base import RUN_HEADER, Ref, Verdict
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.redis.bench import Bench
from tests.support import connected
from tests.system.apps import make_app, plain

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
SCHEDULE, HISTORY, QUARANTINE = "redbeat::schedule", "redbeat::history", "redbeat::quarantine"
HOUR = timedelta(hours=1)


@pytest.fixture
def bench(bench: Bench, caplog: pytest.LogCaptureFixture) -> Bench:
    """A bench whose beats log what those of an operator do."""
    caplog.set_level("INFO")
    return bench


def explained(bench: Bench) -> str:
    """Return what ``explain`` says about the entry ``e``."""
    state = ScheduleStatus.of(bench.app)
    entry = None if "e" in state.quarantine else bench.schedule.get("e")
    facts = Facts("e", entry, state, bench.schedule.history("e", 1), {}, None, None, datetime.now(UTC))
    return "\n".join(explain(facts))


# ---------------------------------------------------------------- quiet


def test_a_minute_in_which_nothing_is_due_is_not_talked_about(bench, logged, caplog):
    bench.put(ago=timedelta())
    bench.put("paused", paused=True, ago=timedelta())
    beat = bench.scheduler()
    beat.tick()
    assert logged("leadership_gained")
    caplog.clear()

    slept = 0.0
    while slept < 60:
        slept += beat.tick()
        assert beat.lease.renew()

    assert [record.getMessage() for record in caplog.records] == []


def test_a_pause_is_no_news_and_can_be_found(bench, logged, caplog):
    bench.put(paused=True, note="until the audit is over")
    bench.tick()
    assert bench.decisions == ["paused"]
    assert logged("paused") == []

    caplog.set_level("DEBUG", "celery.beat")
    bench.make_due()
    bench.tick()

    (told,) = logged("paused")
    assert (told["level"], told["entry"], told["reason"]) == ("DEBUG", "e", "until the audit is over")


# ---------------------------------------------------------------- decisions


def test_a_run_that_was_sent_has_one_line_with_its_id(bench, logged, caplog):
    entry = bench.put()
    bench.tick()

    (record,), (told,) = bench.history, logged("dispatched")
    assert (told["id"], told["entry"], told["task"], told["kind"]) == (record["id"], "e", PLAIN, record["kind"])
    assert told["nominal"] == record["nominal"]
    assert 1790 < told["lateness"] < 3600
    (line,) = [each.getMessage() for each in caplog.records if record["id"] in each.getMessage()]
    assert line.startswith(f"Scheduler: Sending due task e ({PLAIN}) event=dispatched ")
    assert entry.name == "e"


def test_a_missed_run_is_a_warning_that_says_by_how_much(bench, logged):
    bench.put(misfire_grace_time=60)
    bench.tick()

    (told,) = logged("missed")
    assert told["level"] == "WARNING"
    assert told["reason"] == bench.history[0]["reason"]
    assert 1800 <= float(told["reason"].partition(" ")[0]) < 3600
    assert told["reason"].endswith(" s late, misfire_grace_time is 60 s")


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize("overlap", ["buffer_one", "buffer_all"])
def test_a_waiting_run_is_named_in_log_history_and_explanation(bench, logged, task, overlap):
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put(task=task, overlap=overlap)
    beat = bench.scheduler()
    decided = []
    with connected(signals.occurrence_decided, lambda decision, **_: decided.append(str(decision.outcome))):
        beat.tick()
        _start(bench, bench.history[0]["id"])
        bench.make_due()
        beat.tick()

    first, second = bench.history
    assert bench.decisions == decided == ["dispatched", "buffered"]
    assert second["holder"] == first["id"] != second["id"]
    assert second["reason"].startswith(f"waits for task {first['id']}, running since 20")
    (told,) = logged("buffered")
    assert (told["id"], told["holder"], told["reason"]) == (second["id"], first["id"], second["reason"])
    assert len(bench.messages) == 2
    assert "It met an equal call and had to wait for its turn: it waited for task" in explained(bench)
    assert bench.schedule.get("e").total_run_count == 9, "it is counted: it will run"


def _start(bench: Bench, task_id: str) -> None:
    """Start a run as its worker would."""
    (lock,) = [key for key in bench.redis.keys("SINGLETONLOCK_*") if bench.redis.type(key) == "hash"]
    ref = Ref(lock, task_id, nonce="n")
    holder = backend_of(bench.app).begin(ref, lease=60, remember_for=60, task="t", arguments="")
    assert holder.verdict is Verdict.STARTED


@pytest.mark.parametrize("raises", [False, True], ids=["skip", "raise"])
def test_a_skip_by_the_tasks_own_lock_says_since_when_too(bench, logged, raises):
    options = {"lock": "until_executing", "raise_on_duplicate": raises}
    bench.app.task(plain, name="own", base=Singleton, shared=False, **options)
    holder = bench.app.tasks["own"].delay("e")
    bench.scheduler(app=bench.app)
    bench.put(task="own")
    bench.tick()

    (record,), (told,) = bench.history, logged("skipped_overlap")
    assert (record["decision"], record["holder"], told["holder"]) == ("skipped_overlap", holder.id, holder.id)
    assert record["reason"].startswith(f"held by task {holder.id}, queued since 20")
    assert told["reason"] == record["reason"]
    assert logged("dispatched") == []


def test_a_quarantined_entry_is_recorded_once_for_each_reason(bench, logged):
    bench.put()
    bench.redis.hset("redbeat:e", "policy", '{"jiter": 5}')
    bench.tick(4)

    (record,) = bench.history
    since = bench.redis.hget(QUARANTINE, "redbeat:e")
    assert (record["entry"], record["decision"], record["id"]) == ("e", "quarantined", "")
    assert record["reason"] == json.loads(since)["reason"] == "policy: there is no 'jiter'; did you mean 'jitter'?"
    (told,) = logged("quarantined")
    assert (told["level"], told["entry"], told["reason"]) == ("ERROR", "e", record["reason"])

    bench.schedulers[0].close()
    bench.scheduler().tick()  # another beat says it again, and records nothing new
    assert len(logged("quarantined")) == 2
    assert (len(bench.history), bench.redis.hget(QUARANTINE, "redbeat:e")) == (1, since)

    bench.redis.hset("redbeat:e", "policy", "{")
    bench.tick()
    assert bench.decisions == ["quarantined"] * 2
    assert "It is quarantined and does not run" in explained(bench)

    bench.redis.hdel("redbeat:e", "policy")
    bench.tick(2)
    assert bench.decisions == ["quarantined"] * 2 + ["dispatched"]
    assert [each.decision for each in bench.schedule.history("e")] == ["dispatched", "quarantined", "quarantined"]
    assert len(logged("entry_recovered")) == 1


def test_a_recovered_entry_is_explained(bench):
    bench.put(ago=timedelta())
    bench.redis.hset("redbeat:e", "policy", '{"jiter": 5}')
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()
    bench.redis.hdel("redbeat:e", "policy")
    bench.tick(2)

    assert "and is usable again: policy: there is no 'jiter'" in explained(bench)


def test_a_key_of_another_type_is_recorded_and_hinders_no_other_record(bench):
    bench.put("good")
    bench.put("paused", paused=True)
    bench.redis.set("redbeat:text", "a text")
    bench.redis.zadd(SCHEDULE, {"redbeat:text": 0})
    bench.redis.hset(QUARANTINE, "redbeat:text", "nonsense")

    bench.tick()

    decisions = {record["entry"]: record["decision"] for record in bench.history}
    assert decisions == {"good": "dispatched", "paused": "paused", "text": "quarantined"}
    assert bench.redis.get("redbeat:text") == "a text"
    assert bench.score("text") == QUARANTINED


def test_a_copy_that_was_refused_does_not_hide_how_the_run_ended(bench):
    bench.put()
    bench.tick()
    (record,) = bench.history
    headers = {"id": record["id"], RUN_HEADER: {"entry": "e"}}
    for outcome in ("duplicate_refused", "retry", "success", "duplicate_refused", "duplicate_refused"):
        record_end_of_message(bench.app, headers, outcome)
        flush_ends(bench.app)

    assert [each.end.outcome for each in bench.schedule.history("e")] == ["success"]
    assert [each.end.outcome for each in bench.schedule.history()] == ["success"]


def test_a_hostile_entry_cannot_forge_a_line_or_a_pair(bench, logged, caplog):
    forged = "[INFO] beat: Acquired lock: this beat leads event=leadership_gained term=9"
    bench.put(f"e\n{forged}")
    bench.put(f"bad\n{forged}", task=SINGLE, kwargs={f"x\n{forged}": 1})
    bench.put("broken")
    bench.redis.hset("redbeat:broken", "policy", json.dumps({f"\n{forged}": 1}))
    bench.tick()

    assert {each["decision"] for each in bench.history} == {"dispatched", "publish_failed", "quarantined"}
    assert len(logged("leadership_gained")) == 1
    for record in caplog.records:
        line, *rest = record.getMessage().splitlines()
        assert re.search(r"\bevent=(\w+)", line)[1] == record.singlebeat["event"]
        assert all(each.startswith("    ") for each in rest), "the lines of a traceback"
    assert len(logged("publish_failed")) == 1


def test_the_traceback_of_a_run_that_can_never_be_sent_is_logged_once(bench, logged, caplog):
    bench.put(task=SINGLE, kwargs={"nope": 1})
    bench.put("other", task=SINGLE, kwargs={"nope": 1})
    for _ in range(3):
        bench.make_due("e")
        bench.make_due("other")
        bench.tick()

    lines = [record.getMessage() for record in caplog.records if record.singlebeat["event"] == "publish_failed"]
    assert len(lines) == 6
    assert all("got an unexpected keyword argument 'nope'" in line.splitlines()[0] for line in lines)
    assert len([line for line in lines if "Traceback" in line]) == 2


# ---------------------------------------------------------------- trouble


def test_ends_that_are_not_recorded_have_a_line_when_they_are_again(own_server, caplog, monkeypatch):
    monkeypatch.setattr("singlebeat.run_results.PAUSE", 0.0)
    headers = {"id": "a", RUN_HEADER: {"entry": "e"}}
    with make_app(own_server.celery_url) as app:
        own_server.kill()
        for _ in range(2):
            record_end_of_message(app, headers, "success")
            flush_ends(app)
        own_server.restart()
        for _ in range(2):
            record_end_of_message(app, headers, "success")
            flush_ends(app)

    told = [(record.levelname, record.singlebeat["event"]) for record in caplog.records]
    assert told[0] == ("WARNING", "ends_not_recorded")
    assert [each for each in told if each != told[0]] == [("WARNING", "recovered")]


def test_a_lease_that_was_nearly_lost_is_a_warning(server, redis, app, caplog):
    now = [1000.0]
    lease = Lease(server.client, Keys.of(app).lease, ttl=100, clock=lambda: now[0])
    lease.acquire()
    now[0] += 34
    assert lease.renew()
    assert caplog.records == []

    now[0] += 85
    assert lease.renew()

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.singlebeat == {"event": "lease_nearly_lost", "left": 5.0}
    lease.release()


def test_a_slow_tick_is_a_warning(bench, logged, monkeypatch):
    beat = bench.scheduler()
    beat.tick()
    assert logged("tick_ended") == []

    monkeypatch.setattr("singlebeat.beat.scheduler.SLOW_TICK", 0.0)
    beat.tick()

    (told,) = logged("tick_ended")
    assert (told["level"], told["seconds"] >= 0) == ("WARNING", True)
