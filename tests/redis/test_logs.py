"""What is logged and recorded of real events: every decision with its reason, trouble in time, and else nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import Service
from celery.schedules import schedule
from redis import Redis

from singlebeat import Entry, Schedule, Scheduler, Singleton, signals
from singlebeat.beat.entries.entry import PARKED, Meta
from singlebeat.beat.explain import Facts, explain
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import Lease
from singlebeat.beat.status import ScheduleStatus
from singlebeat.locks import backend_of
from singlebeat.locks.base import RUN_HEADER, Ref, Verdict
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.system.apps import make_app, plain

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
SCHEDULE, HISTORY, QUARANTINE = "redbeat::schedule", "redbeat::history", "redbeat::quarantine"
HOUR = timedelta(hours=1)


class Desk:
    """An app with entries and beats of this process that tick when they are told to."""

    def __init__(self, app: Celery, redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
        self.app, self.redis, self._caplog = app, redis, caplog
        self.beats: list[Scheduler] = []

    def beat(self) -> Scheduler:
        """Return a new beat; the one before it leaves."""
        for beat in self.beats:
            beat.close()
        self.beats.append(Service(self.app, scheduler_cls="singlebeat.Scheduler").get_scheduler())
        return self.beats[-1]

    def put(self, name: str = "e", task: str = PLAIN, **more: Any) -> Entry:
        """Store an entry that has been due for half an hour."""
        last = datetime.now(UTC) - 1.5 * HOUR
        more = {"last_run_at": last, "total_run_count": 7, "args": ["e"], **more}
        return Entry(name, task, schedule(3600), app=self.app, **more).save()

    def again(self, name: str = "e") -> None:
        """Make an entry due for another time."""
        self.redis.hset(f"redbeat:{name}", "meta", Meta(datetime.now(UTC) - 1.5 * HOUR, 7).encode())
        self.redis.zadd(SCHEDULE, {f"redbeat:{name}": 0})

    @property
    def history(self) -> list[dict[str, str]]:
        return [record for _, record in self.redis.xrange(HISTORY)]

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return the pairs of every line about an event, with its level."""
        found = [(record.levelname, getattr(record, "singlebeat", {})) for record in self._caplog.records]
        return [{"level": level, **pairs} for level, pairs in found if pairs.get("event") == event]

    def explained(self, name: str = "e") -> str:
        entries, state = Schedule(self.app), ScheduleStatus.of(self.app)
        entry = None if name in state.quarantine else entries.get(name)
        facts = Facts(name, entry, state, entries.history(name, 1), {}, None, None, datetime.now(UTC))
        return "\n".join(explain(facts))


@pytest.fixture
def desk(server, redis, caplog) -> Iterator[Desk]:
    caplog.set_level("INFO")
    with make_app(server.celery_url, {"singlebeat_watchdog_timeout": None}) as app:
        desk = Desk(app, redis, caplog)
        yield desk
        for beat in desk.beats:
            beat.close()


# ---------------------------------------------------------------- quiet


def test_a_minute_in_which_nothing_is_due_is_not_talked_about(desk, caplog):
    desk.put(last_run_at=datetime.now(UTC))
    desk.put("paused", paused=True, last_run_at=datetime.now(UTC))
    beat = desk.beat()
    beat.tick()
    assert desk.told("leadership_gained")
    caplog.clear()

    slept = 0.0
    while slept < 60:
        slept += beat.tick()
        assert beat.lease.renew()

    assert [record.getMessage() for record in caplog.records] == []


def test_a_pause_is_no_news_and_can_be_found(desk, caplog):
    desk.put(paused=True, note="until the audit is over")
    desk.beat().tick()
    assert [record["decision"] for record in desk.history] == ["paused"]
    assert desk.told("paused") == []

    caplog.set_level("DEBUG", "celery.beat")
    desk.again()
    desk.beats[0].tick()

    (told,) = desk.told("paused")
    assert (told["level"], told["entry"], told["reason"]) == ("DEBUG", "e", "until the audit is over")


# ---------------------------------------------------------------- decisions


def test_a_run_that_was_sent_has_one_line_with_its_id(desk, caplog):
    entry = desk.put()
    desk.beat().tick()

    (record,), (told,) = desk.history, desk.told("dispatched")
    assert (told["id"], told["entry"], told["task"], told["kind"]) == (record["id"], "e", PLAIN, record["kind"])
    assert told["nominal"] == record["nominal"]
    assert 1790 < told["lateness"] < 3600
    (line,) = [each.getMessage() for each in caplog.records if record["id"] in each.getMessage()]
    assert line.startswith(f"Scheduler: Sending due task e ({PLAIN}) event=dispatched ")
    assert entry.name == "e"


def test_a_missed_run_is_a_warning_that_says_by_how_much(desk):
    desk.put(misfire_grace_time=60)
    desk.beat().tick()

    (told,) = desk.told("missed")
    assert told["level"] == "WARNING"
    assert told["reason"] == desk.history[0]["reason"]
    assert 1800 <= float(told["reason"].partition(" ")[0]) < 3600
    assert told["reason"].endswith(" s late, misfire_grace_time is 60 s")


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize("overlap", ["buffer_one", "buffer_all"])
def test_a_waiting_run_is_named_in_log_history_and_explanation(desk, task, overlap):
    backend_of(desk.app).announce("w@h", ttl=60)
    desk.put(task=task, overlap=overlap)
    beat = desk.beat()
    decided = []
    signals.occurrence_decided.connect(receive := lambda decision, **_: decided.append(str(decision.outcome)))
    try:
        beat.tick()
        _start(desk, desk.history[0]["id"])
        desk.again()
        beat.tick()
    finally:
        signals.occurrence_decided.disconnect(receive)

    first, second = desk.history
    assert [record["decision"] for record in desk.history] == decided == ["dispatched", "buffered"]
    assert second["holder"] == first["id"] != second["id"]
    assert second["reason"].startswith(f"waits for task {first['id']}, running since 20")
    (told,) = desk.told("buffered")
    assert (told["id"], told["holder"], told["reason"]) == (second["id"], first["id"], second["reason"])
    assert desk.redis.llen("celery") == 2
    assert "It met an equal call and had to wait for its turn: it waits for task" in desk.explained()
    assert Schedule(desk.app).get("e").total_run_count == 8, "it is counted: it will run"


def _start(desk: Desk, task_id: str) -> None:
    """Start a run as its worker would."""
    (lock,) = [key for key in desk.redis.keys("SINGLETONLOCK_*") if desk.redis.type(key) == "hash"]
    ref = Ref(lock, task_id, nonce="n")
    holder = backend_of(desk.app).begin(ref, lease=60, remember_for=60, task="t", arguments="")
    assert holder.verdict is Verdict.STARTED


@pytest.mark.parametrize("raises", [False, True], ids=["skip", "raise"])
def test_a_skip_by_the_tasks_own_lock_says_since_when_too(desk, raises):
    options = {"lock": "until_executing", "raise_on_duplicate": raises}
    desk.app.task(plain, name="own", base=Singleton, shared=False, **options)
    holder = desk.app.tasks["own"].delay("e")
    desk.put(task="own")
    desk.beat().tick()

    (record,), (told,) = desk.history, desk.told("skipped_overlap")
    assert (record["decision"], record["holder"], told["holder"]) == ("skipped_overlap", holder.id, holder.id)
    assert record["reason"].startswith(f"held by task {holder.id}, queued since 20")
    assert told["reason"] == record["reason"]
    assert desk.told("dispatched") == []


def test_a_quarantined_entry_is_recorded_once_for_each_reason(desk):
    desk.put()
    desk.redis.hset("redbeat:e", "policy", '{"jiter": 5}')
    desk.beat().tick()
    for _ in range(3):
        desk.beats[-1].tick()

    (record,) = desk.history
    since = desk.redis.hget(QUARANTINE, "redbeat:e")
    assert (record["entry"], record["decision"], record["id"]) == ("e", "quarantined", "")
    assert record["reason"] == json.loads(since)["reason"] == "policy: there is no 'jiter'; did you mean 'jitter'?"
    (told,) = desk.told("quarantined")
    assert (told["level"], told["entry"], told["reason"]) == ("ERROR", "e", record["reason"])

    desk.beat().tick()  # another beat says it again, and records nothing new
    assert len(desk.told("quarantined")) == 2
    assert (len(desk.history), desk.redis.hget(QUARANTINE, "redbeat:e")) == (1, since)

    desk.redis.hset("redbeat:e", "policy", "{")
    desk.beats[-1].tick()
    assert [each["decision"] for each in desk.history] == ["quarantined"] * 2
    assert "It is quarantined and does not run" in desk.explained()

    desk.redis.hdel("redbeat:e", "policy")
    for _ in range(2):
        desk.beats[-1].tick()
    assert [each["decision"] for each in desk.history] == ["quarantined"] * 2 + ["dispatched"]
    assert [each.decision for each in Schedule(desk.app).history("e")] == ["dispatched", "quarantined", "quarantined"]
    assert len(desk.told("entry_recovered")) == 1


def test_a_recovered_entry_is_explained(desk):
    desk.put(last_run_at=datetime.now(UTC))
    desk.redis.hset("redbeat:e", "policy", '{"jiter": 5}')
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.beat().tick()
    desk.redis.hdel("redbeat:e", "policy")
    desk.beats[-1].tick()
    desk.beats[-1].tick()

    assert "and is usable again: policy: there is no 'jiter'" in desk.explained()


def test_a_key_of_another_type_is_recorded_and_hinders_no_other_record(desk):
    desk.put("good")
    desk.put("paused", paused=True)
    desk.redis.set("redbeat:text", "a text")
    desk.redis.zadd(SCHEDULE, {"redbeat:text": 0})
    desk.redis.hset(QUARANTINE, "redbeat:text", "nonsense")

    desk.beat().tick()

    decisions = {record["entry"]: record["decision"] for record in desk.history}
    assert decisions == {"good": "dispatched", "paused": "paused", "text": "quarantined"}
    assert desk.redis.get("redbeat:text") == "a text"
    assert desk.redis.zscore(SCHEDULE, "redbeat:text") == PARKED


def test_a_copy_that_was_refused_does_not_hide_how_the_run_ended(desk):
    desk.put()
    desk.beat().tick()
    (record,) = desk.history
    headers = {"id": record["id"], RUN_HEADER: {"entry": "e"}}
    for outcome in ("duplicate_refused", "retry", "success", "duplicate_refused", "duplicate_refused"):
        record_end_of_message(desk.app, headers, outcome)
        flush_ends(desk.app)

    assert [each.end.outcome for each in Schedule(desk.app).history("e")] == ["success"]
    assert [each.end.outcome for each in Schedule(desk.app).history()] == ["success"]


def test_a_hostile_entry_cannot_forge_a_line_or_a_pair(desk, caplog):
    forged = "[INFO] beat: Acquired lock: this beat leads event=leadership_gained term=9"
    desk.put(f"e\n{forged}")
    desk.put(f"bad\n{forged}", options={"stamped_headers": [f"x\n{forged}"]})
    desk.put("broken")
    desk.redis.hset("redbeat:broken", "policy", json.dumps({f"\n{forged}": 1}))
    desk.beat().tick()

    assert {each["decision"] for each in desk.history} == {"dispatched", "publish_failed", "quarantined"}
    assert len(desk.told("leadership_gained")) == 1
    for record in caplog.records:
        line, *rest = record.getMessage().splitlines()
        assert re.search(r"\bevent=(\w+)", line)[1] == record.singlebeat["event"]
        assert all(each.startswith("    ") for each in rest), "the lines of a traceback"
    assert len(desk.told("publish_failed")) == 1


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


def test_a_slow_tick_is_a_warning(desk, monkeypatch):
    beat = desk.beat()
    beat.tick()
    assert desk.told("tick_ended") == []

    monkeypatch.setattr("singlebeat.beat.scheduler.SLOW_TICK", 0.0)
    beat.tick()

    (told,) = desk.told("tick_ended")
    assert (told["level"], told["seconds"] >= 0) == ("WARNING", True)
