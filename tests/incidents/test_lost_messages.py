"""A lock whose message is gone is found out and freed, and in doubt it stays: with real workers, beats and queues."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from celery.schedules import schedule

from singlebeat import Entry, Schedule
from singlebeat.beat.lost_messages import MOST, Found, LostMessages, Waiting, examine, may_yet_start
from singlebeat.beat.store.history import Record
from singlebeat.config import Config
from singlebeat.locks import backend_of, worker_name
from singlebeat.locks.base import Ref
from singlebeat.locks.key import suspects_key
from tests.support import APP, ROOT, CeleryProcess, measured, wait_until
from tests.system.apps import make_app

BEAT = ("beat", "-S", "singlebeat.Scheduler")

#: Seconds instead of 30 after which a queued lock is checked.
SOON = {"singlebeat_lost_after": 1.5}

#: The key of the locks whose messages may be lost.
SUSPECTS = suspects_key("SINGLETONLOCK_")

#: Seconds for which no entry may be silent.
A_MINUTE = 60.0

BARE = """
import os
from celery import Celery

app = Celery("bare", broker=os.environ["SB_TEST_URL"], backend=os.environ.get("BARE_RESULTS"))


@app.task(name="tests.system.apps.plain")
def plain(name, seconds=0):
    return name
"""


@pytest.fixture
def old_worker(celery, server, tmp_path: Path):
    """Start a worker that has no singlebeat."""
    info = tmp_path / "celery_singlebeat-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: celery-singlebeat\nVersion: 0\n")
    (tmp_path / "bare.py").write_text(BARE)

    def start(*args: str, results: bool) -> CeleryProcess:
        env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        env |= {"BARE_RESULTS": server.celery_url} if results else {}
        return celery("worker", "-c", "1", *args, app="bare", env=env).ready()

    return start


@pytest.fixture
def ask(celery):
    """Run ``celery singlebeat …`` until it prints what is awaited; return what it prints."""

    def ask(*args: str, until: str) -> str:
        def printed() -> str:
            process: CeleryProcess = celery("singlebeat", *args, conf=SOON)
            process.wait(60)
            process.stop()
            return process.text if until in process.text else ""

        # To the command a worker that answers late is not there.
        text = wait_until(printed, timeout=2 * A_MINUTE, what=until)
        measured(f"$ celery -A shop singlebeat {' '.join(args)}\n{text}")
        return text

    return ask


def entry(app, name: str, **fields: object) -> None:
    fields = {"task": f"{APP}.plain", "schedule": schedule(1), "args": [name], **fields}
    Entry(name, app=app, run_on_start=True, **fields).save()


def records(app, name: str, decision: str) -> list[Record]:
    return [record for record in Schedule(app).history(name, 1000) if record.decision == decision]


def seen(app) -> None:
    wait_until(backend_of(app).workers_seen, timeout=30, what="a worker to say that it looks after locks")


def sent_again(app, name: str, *, after: int = 0) -> list[Record]:
    """Return the runs of an entry, when there is one more; it must not take a minute."""
    began = time.monotonic()
    runs = wait_until(
        lambda: found if len(found := records(app, name, "dispatched")) > after else [], timeout=A_MINUTE, what=name
    )
    measured(f"{name}: sent again after {time.monotonic() - began:.1f} s")
    return runs


def skipped(app, name: str, task_id: str, times: int) -> None:
    def is_skipped() -> bool:
        return sum(record.holder == task_id for record in records(app, name, "skipped_overlap")) >= times

    wait_until(is_skipped, timeout=A_MINUTE, what=f"{times} runs skipped for {task_id}")


def test_an_entry_goes_on_after_its_queue_was_purged(celery, app, oracle, redis):
    """While its message waits in the queue its lock stays, however long that takes."""
    celery("worker", "-c", "1").ready()
    seen(app)
    entry(app, "purged", options={"queue": "later"})
    beat = celery(*BEAT, conf=SOON)
    (first,) = sent_again(app, "purged")
    skipped(app, "purged", first.task_id, 6)
    assert len(records(app, "purged", "dispatched")) == 1, "its message waits"

    assert app.control.purge() == 0
    assert redis.llen("later") == 1
    redis.delete("later")

    sent_again(app, "purged", after=1)
    beat.wait_for(rf"event=message_lost .*id={first.task_id}")
    (end,) = wait_until(
        lambda: [
            record.end
            for record in Schedule(app).history("purged", 1000)
            if record.task_id == first.task_id and record.end
        ]
    )
    assert end.outcome == "message_lost"
    assert end.reason == "no worker that answers has its message, and it is not in its queue later"
    celery("worker", "-c", "1", "-Q", "later").ready()
    oracle.wait_ended(3, "purged", timeout=A_MINUTE)
    assert oracle.max_concurrent("purged") == 1


@pytest.mark.parametrize("priority", [None, 9])
def test_a_lost_message_is_found_behind_others_in_its_queue(celery, app, redis, priority):
    """The search looks into the queue for the message, also into the lists of priorities."""
    celery("worker", "-c", "1").ready()
    seen(app)
    entry(app, "purged", options={"queue": "later"} | ({"priority": priority} if priority else {}))
    beat = celery(*BEAT, conf=SOON)
    (first,) = sent_again(app, "purged")
    for number in range(40):
        app.tasks[f"{APP}.plain"].apply_async((f"other {number}",), queue="later", priority=priority)
    skipped(app, "purged", first.task_id, 6)
    assert len(records(app, "purged", "dispatched")) == 1, "its message waits"
    assert not beat.matches("event=(message_lost|in_doubt)")

    for key in redis.scan_iter("later*", _type="LIST"):
        for raw in redis.lrange(key, 0, -1):
            assert first.task_id not in raw or redis.lrem(key, 1, raw) == 1

    sent_again(app, "purged", after=1)
    beat.wait_for(rf"event=message_lost .*id={first.task_id}")


def test_a_lock_long_in_doubt_is_named_with_its_way_out(celery, app, ask, redis, monkeypatch):
    """Its queue is too long to be read."""
    celery("worker", "-c", "1").ready()
    seen(app)
    entry(app, "purged", options={"queue": "later"})
    beat = celery(*BEAT, conf={"singlebeat_lost_after": 0.5})
    (first,) = sent_again(app, "purged")
    (raw,) = redis.lrange("later", 0, -1)
    redis.delete("later")
    redis.lpush("later", *[raw.replace(first.task_id, "other")] * 1001)

    beat.wait_for(rf"WARNING.*event=in_doubt .*id={first.task_id} .*1001 messages wait in queue later, perhaps its own")
    way_out = f"celery singlebeat unlock --force {first.task_id} frees it now; a message that starts later acquires the"
    assert beat.matches(re.escape(way_out))
    assert way_out in ask("explain", "purged", until="If that message is lost, ")
    assert way_out in ask("doctor", until="warning  locks: 1 lock may wait for a message that is lost, such as this: ")
    ask("unlock", "--force", first.task_id, until="free; it was held by")
    sent_again(app, "purged", after=1)
    assert len(beat.matches(f"event=in_doubt .*id={first.task_id}")) == 1


def test_a_queue_that_no_worker_reads_is_logged_once(celery, app):
    celery("worker", "-c", "1").ready()
    seen(app)
    entry(app, "unread", options={"queue": "later"})
    beat = celery(*BEAT, conf={"singlebeat_lost_after": 0.5})
    (first,) = sent_again(app, "unread")

    beat.wait_for(
        rf"WARNING.*beat: Messages wait in queue 'later' event=unread .*id={first.task_id} .*no worker that answers "
        r"reads queue later \(they read celery\)\. Start a worker with -Q later"
    )
    skipped(app, "unread", first.task_id, len(records(app, "unread", "skipped_overlap")) + 3)
    assert len(beat.matches("event=unread")) == 1
    assert not beat.matches("event=in_doubt")


def test_a_queue_that_a_worker_reads_slowly_is_not_logged_as_unread(celery, app, caplog):
    celery("worker", "-c", "1", "-Q", "celery,later").ready()
    seen(app)
    search = LostMessages(app)
    waiting = Waiting(Ref("k", "x"), "t", 0.0, 1000.0, 3600.0, True, "later", "", "e", 0.0, "", None)

    for queue in ("later", "unread"):
        search._log_unread([Found(waiting, "", "its message waits", queue=queue)], backend_of(app))

    assert re.findall(r"event=unread .*queue=(\w+)", caplog.text) == ["unread"]


def _end_idle(app, worker, *names):
    """End the worker while its entries pause: Celery's warm shutdown may hang if TERM meets the begin of a run."""
    schedule = Schedule(app)
    for name in names:
        schedule.pause(name)
    for name in names:
        wait_until(lambda name=name: schedule.history(name, 1)[0].decision == "paused", what="the pause")
    worker.terminate()
    worker.wait()
    for name in names:
        schedule.resume(name)


@pytest.mark.parametrize("results", [True, False], ids=["results", "no results"])
def test_old_workers_silence_no_entry_before_or_after_an_upgrade(celery, app, oracle, old_worker, results):
    """Mixed workers, a roll-back to old ones alone, and an upgrade after that."""
    new = celery("worker", "-c", "1").ready()
    seen(app)
    old = old_worker("-Q", "old", results=results)
    entry(app, "there", options={"queue": "old"})
    entry(app, "here")
    beat = celery(*BEAT, conf=SOON)

    (first,) = sent_again(app, "there")
    runs = sent_again(app, "there", after=1)
    beat.wait_for(rf"event={'ran_elsewhere' if results else 'message_lost'} .*id={first.task_id}")
    oracle.wait_ended(3, "here")

    _end_idle(app, new, "here")
    entry(app, "back", options={"queue": "old"})
    sent_again(app, "there", after=len(runs) + 1)
    sent_again(app, "back", after=1)

    _end_idle(app, old, "there", "back")
    celery("worker", "-c", "1", "-Q", "old,celery").ready()
    oracle.wait_ended(2, "there", timeout=A_MINUTE)
    oracle.wait_ended(2, "back", timeout=A_MINUTE)
    assert not beat.matches(r"event=(message_lost|ran_elsewhere) .*entry=here")


def test_no_lock_is_freed_wrongly_behind_10000_messages(celery, server, app, oracle, redis):
    """Neither of calls in a long queue nor in busy workers; of a queue that is purged then, all the others are."""
    with make_app(server.celery_url, {"singlebeat_lost_after": 0.2, "singlebeat_lock_lease": 0.2}) as impatient:
        impatient.tasks[f"{APP}.plain"].delay("other")
        (other,) = redis.lrange("celery", 0, 0)
        redis.delete("celery")
        single, names = impatient.tasks[f"{APP}.single"], [f"call {number}" for number in range(100)]
        ids = {single.delay(name, seconds=300).id for name in names}
        redis.lpush("celery", *[other] * 10_000)
        keys = [single.generate_lock(single.name, [name], {"seconds": 300}) for name in names]
        search, backend = LostMessages(impatient), backend_of(impatient)
        assert not search.search(backend, keys), "no worker answers"
        for _ in range(2):  # two tasks run, and sixteen are taken besides
            celery("worker", "-c", "2", "--prefetch-multiplier", "8", conf={"singlebeat_lock_lease": 300})
        wait_until(lambda: redis.hlen("unacked") == 32 and oracle.started() == 4, timeout=60, what="busy workers")

        for _ in range(2):
            assert not search.search(backend, keys), f"{redis.llen('celery')} messages wait"

        waiting = {json.loads(raw)["headers"]["id"] for raw in redis.lrange("celery", -100, -1)} & ids
        assert len(waiting) == len(ids) - 36
        redis.delete("celery")
        assert {found.lock.ref.task_id for found in search.search(backend, keys)} == waiting
        assert not search.search(backend, keys)


def test_a_call_goes_on_after_its_message_was_lost(celery, server, oracle, redis):
    """A refused call tells the leader of the lock in its way, which stays while a worker that lives is silent."""
    with make_app(server.celery_url, SOON) as app:
        single, backend = app.tasks[f"{APP}.single"], backend_of(app)
        first = single.apply_async(("one",), queue="later")
        celery("worker", "-c", "1").ready()
        redis.delete("later")
        backend.announce(silent := worker_name(app, "silent@host"), ttl=3600)

        def found() -> str:
            (lock,) = (Waiting.of(*each) for each in backend.read([single.generate_lock(single.name, ["one"], {})]))
            return examine(app, [lock])[0].reason

        wait_until(lambda: "worker silent@host, which may have its message, does not answer" in found(), timeout=60)
        assert single.delay("one") == first
        backend.retire(silent)
        beat = celery(*BEAT, conf=SOON)

        again = wait_until(lambda: not (call := single.delay("one")).is_duplicate and call, timeout=A_MINUTE)

        beat.wait_for(rf"event=message_lost task={APP}.single id={first.id}")
        assert again.get(timeout=60) == "one"


@pytest.mark.parametrize("behind", ["a chain", "a call that is buffered"])
def test_calls_that_wait_behind_a_lost_message_go_on(celery, server, oracle, redis, behind):
    """No other call meets its lock."""
    with make_app(server.celery_url, SOON) as app:
        single, plain = app.tasks[f"{APP}.single"], app.tasks[f"{APP}.plain"]
        lost = single.apply_async(("one",), queue="later")
        redis.delete("later")
        if behind == "a chain":
            waiting = (single.si("one") | plain.si("then")).apply_async()
        else:
            waiting = single.apply_async(("one",), overlap="buffer_all")
        celery("worker", "-c", "1", conf=SOON).ready()
        celery(*BEAT, conf=SOON).wait_for(rf"event=message_lost .*id={lost.id}", timeout=A_MINUTE)

        assert waiting.get(timeout=A_MINUTE) == ("then" if behind == "a chain" else "one")
    assert oracle.started("one") == 1


def test_the_messages_of_a_worker_that_shuts_down_are_never_called_lost(celery, server, oracle, ask):
    """It does not answer, and gives them back only when its last task has ended."""
    conf = {"singlebeat_lock_lease": 3}
    old = celery("worker", "-c", "1", conf=conf).ready()
    with make_app(server.celery_url, {"singlebeat_lost_after": 0.5, **conf}) as app:
        single, backend = app.tasks[f"{APP}.single"], backend_of(app)
        single.delay("first", seconds=300)
        oracle.wait_started(1, "first")
        second = single.delay("second")
        key = single.generate_lock(single.name, ["second"])

        def record() -> Waiting:
            return Waiting.of(*backend.read([key])[0])

        wait_until(lambda: record().worker, timeout=30, what="the worker to renew the lock of its message")
        old.send(signal.SIGTERM)
        old.wait_for("Warm shutdown")
        celery("worker", "-c", "1", conf=conf).ready()
        wait_until(lambda: not may_yet_start(record(), Config.of(app)), timeout=60, what="a message that is late")

        assert not LostMessages(app).search(backend, [key])
        (found,) = examine(app, [record()])
        assert found.reason == (
            f"worker {record().worker} had its message, and shuts down: it gives the message back at its end"
        )
        ask("doctor", until="workers: shutting down, or ended in the last ")

        oracle.let_go("first")
        assert old.wait(60) == 0
        assert second.get(timeout=60) == "second"
        assert oracle.started("second") == 1


def test_a_call_that_its_worker_holds_back_is_never_called_lost(celery, server, redis):
    """Of a task with a rate limit: Celery keeps the request where ``query_task`` does not look."""
    conf = {"task_annotations": {f"{APP}.single": {"rate_limit": "1/m"}}, "singlebeat_lock_lease": 3}
    worker = celery("worker", "-c", "1", conf=conf).ready()
    with make_app(server.celery_url, {"singlebeat_lost_after": 0.5}) as app:
        single, backend = app.tasks[f"{APP}.single"], backend_of(app)
        single.delay("first")
        second = single.apply_async(("second",), expires=600)
        worker.wait_for(rf"{second.id}\] received", timeout=A_MINUTE)
        key = single.generate_lock(single.name, ["second"])

        def is_old() -> bool:
            ((_, record),) = backend.read([key])
            return Waiting.of(key, record).age > 2

        wait_until(is_old, what="a lock that is old enough")

        assert not LostMessages(app).search(backend, [key])
        assert single.delay("second") == second
        assert 0 < redis.ttl(key) <= 600, "no longer than its message"


def test_a_purged_message_is_explained_and_its_lock_freed(celery, app, ask, redis):
    celery("worker", "-c", "1").ready()
    seen(app)
    entry(app, "purged", options={"queue": "later"})
    celery(*BEAT, conf={"singlebeat_lost_after": None})
    (first,) = sent_again(app, "purged")
    skipped(app, "purged", first.task_id, 3)

    waits = ask("explain", "purged", until="No worker that answers reads queue later")

    assert "its message waits in queue later" in waits
    assert "--force" not in waits
    ask("unlock", first.task_id, until="lock is not freed: its message waits in queue later; no worker")
    ask("unlock", "--stale", until="0 of 1 old queued locks were freed")

    redis.delete("later")

    gone = ask("explain", "purged", until=" is lost: no worker that answers has its message")
    assert f"The message of task {first.task_id} was queued" in gone
    assert "it is not in its queue later" in gone
    assert f"To free it now: celery singlebeat unlock {first.task_id}" in gone
    ask(
        "doctor",
        until=f"problem  locks: 1 lock waits for a message that is lost, such as task {first.task_id} ({APP}.plain)",
    )
    rows = json.loads(ask("unlock", "--stale", "--json", until="message_lost"))
    assert [row["task_id"] for row in rows] == [first.task_id]
    sent_again(app, "purged", after=1)
    redis.delete("later")
    second = records(app, "purged", "dispatched")[0].task_id
    skipped(app, "purged", second, 2)
    ask("unlock", second, until=f"free; it was held by task {second}, queued")


def test_a_message_in_another_broker_is_never_called_lost(celery, server, app, ask, redis):
    """Neither by commands nor by a beat of another broker; a beat of its own broker finds out when it is lost."""
    there = f"{server.celery_url}/7"
    celery("worker", "-c", "1").ready()
    celery("worker", "-c", "1", "-Q", "other", conf={"broker_url": there}).ready()
    seen(app)
    entry(app, "good")
    sender = celery(*BEAT, conf={**SOON, "broker_url": there})
    (first,) = sent_again(app, "good")
    skipped(app, "good", first.task_id, 3)
    theirs, ours = (f"redis://127.0.0.1:{server.port}/{db}" for db in (7, 0))
    elsewhere = f"was sent to the broker {theirs}, and the broker of this process is {ours}"

    said = [
        ask("explain", "good", until=elsewhere),
        ask("doctor", until=f"task {first.task_id} ({APP}.plain) holds a lock: it {elsewhere}"),
        ask("unlock", first.task_id, until=f"{elsewhere}: ask with the settings of its sender. If that broker is gone"),
        ask("unlock", "--stale", until="0 of 1 old queued locks were freed"),
    ]

    assert not any(wrong in text for text in said for wrong in ("is lost:", "that is lost", "reads queue celery"))
    sender.stop()
    other = celery(*BEAT, conf=SOON)
    other.wait_for("this beat leads")
    skipped(app, "good", first.task_id, 9)
    other.stop()
    assert not other.matches("event=message_lost")
    with server.client(db=7) as broker:
        assert broker.llen("celery") == 1
        broker.delete("celery")
    celery(*BEAT, conf={**SOON, "broker_url": there}).wait_for(rf"event=message_lost .*id={first.task_id}")
    sent_again(app, "good", after=1)


def test_a_beat_leaves_lost_messages_to_the_beat_of_their_broker(celery, server, app):
    """Two fleets with one server for their locks: the beat that learns of the lock passes that on to the other one."""
    theirs = {**SOON, "broker_url": f"{server.celery_url}/7", "redbeat_key_prefix": "theirs:"}
    with make_app(server.celery_url, theirs) as other, make_app(server.celery_url, SOON) as ours:
        first = other.tasks[f"{APP}.single"].apply_async(("one",), queue="later")
        single, backend = ours.tasks[f"{APP}.single"], backend_of(ours)
        celery("worker", "-c", "1").ready()
        celery("worker", "-c", "1", conf=theirs).ready()
        with server.client(db=7) as broker:
            broker.delete("later")
        wait_until(lambda: single.delay("one") == first and backend.suspects(SUSPECTS, MOST), what="a suspect")

        assert not LostMessages(ours).search(backend, [single.generate_lock(single.name, ["one"], {})])

        beat = celery(*BEAT, conf=SOON)
        beat.wait_for("this beat leads")
        their_beat = celery(*BEAT, conf=theirs)
        wait_until(lambda: not single.delay("one").is_duplicate, timeout=A_MINUTE, what="a free lock")
        their_beat.wait_for(rf"event=message_lost task={APP}.single id={first.id}")
        assert not beat.matches("event=message_lost")
