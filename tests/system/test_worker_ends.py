"""A lock lives while its task waits or runs, and no longer: however a run, a child or a whole worker ends."""

from __future__ import annotations

import json
import os
import signal
import time
from random import Random

import celery as celery_package
import pytest
from celery.schedules import schedule

from singlebeat import Schedule
from singlebeat.locks import backend_of
from singlebeat.locks.base import HEADER, Call, Ref, Ticket
from singlebeat.locks.key import done_key
from tests.proxy import Network, Weather
from tests.support import APP, RedisServer, measured, wait_until, without
from tests.system.apps import make_app

#: Seconds of the lease where a test waits for its end.
LEASE = 3


@pytest.fixture
def single(app):
    return app.tasks[f"{APP}.single"]


@pytest.fixture
def lock_of(redis):
    """Returns the key of the lock that a call of a Singleton takes."""

    def key(task, *args, **kwargs):
        return task.generate_lock(task.name, args, kwargs)

    return key


def free(redis, *, timeout=20.0):
    """Wait until no lock is left; return how long that took."""
    began = time.monotonic()

    def none_left():
        return not list(redis.scan_iter("SINGLETONLOCK_*", _type="HASH"))

    wait_until(none_left, timeout=timeout, what="the end of the lock")
    return time.monotonic() - began


def test_the_lock_of_a_killed_worker_ends_with_its_lease(celery, oracle, redis, single, lock_of):
    worker = celery("worker", "-c", "1", conf={"singlebeat_lock_lease": LEASE}).ready()
    first = single.delay("a", seconds=60)
    oracle.wait_started(1)

    worker.kill_group()
    left = redis.pttl(lock_of(single, "a", seconds=60))

    assert 0 < left <= LEASE * 1000
    assert single.delay("a", seconds=60) == first, "the lease has not ended yet"
    measured(f"free {free(redis):.2f} s after the death of its worker, lease {LEASE} s")
    celery("worker", "-c", "1").ready()
    again = single.delay("a", seconds=60)
    assert again != first
    assert [run.id for run in oracle.wait_started(2)] == [first.id, again.id]


WITH_HEADERS = """
from tests.system.apps import app

@app.task(bind=True, name="retries_with_headers", max_retries=1)
def retries(self):
    if not self.request.retries:
        raise self.retry(countdown=0, headers={"user": "u"})
"""


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_plain_task_that_retries_with_headers_of_its_own_frees_its_lock(pool, celery, app, redis, tmp_path):
    (tmp_path / "with_headers.py").write_text(WITH_HEADERS)
    celery("worker", "-c", "1", "-P", pool, app="with_headers").ready()
    due = {"task": "retries_with_headers", "schedule": schedule(0.5)}
    celery("beat", app="with_headers", conf={"beat_schedule": {"e": due}})

    def ended() -> bool:
        return len([record for record in Schedule(app).history("e") if record.decision == "dispatched"]) >= 4

    wait_until(ended, timeout=30, what="four runs, none of which was in the way of another for long")


@pytest.mark.parametrize("follows", ["chain", "link"])
def test_what_follows_a_run_comes_though_its_worker_dies_before_it_is_sent(follows, celery, app, oracle, redis):
    """The message comes again and runs again, as without a lock: else the rest of its chain would never run."""
    conf = {"singlebeat_lock_lease": LEASE, "task_acks_late": True}
    killed = celery("worker", "-c", "1", conf=conf, app="tests.system.killed_sender").ready()
    first, then = app.tasks[f"{APP}.single"].si("first"), app.tasks[f"{APP}.plain"].si("then")
    (first | then).apply_async() if follows == "chain" else first.apply_async(link=then)
    assert killed.wait() == -signal.SIGKILL
    for raw in redis.hvals("unacked"):  # as kombu does after the visibility timeout, an old one after long
        redis.rpush("celery", json.dumps(json.loads(raw)[0]))
    redis.delete("unacked", "unacked_index")
    assert (len(oracle.runs("first")), len(oracle.runs("then"))) == (1, 0)
    assert not list(redis.scan_iter("SINGLETONLOCK_*", _type="HASH")), "a new call may be sent"

    celery("worker", "-c", "1", conf=conf).ready()
    oracle.wait_ended(1, "then")
    assert len(oracle.runs("first")) == 2
    assert oracle.max_concurrent("first") == 1


def test_a_run_terminated_while_it_waits_for_a_thread_frees_its_lock(celery, app, oracle, redis):
    """As ``terminate_other`` does with the run of a plain task, which holds its lock while it waits there."""
    celery("worker", "--pool", "threads", "-c", "1").ready()
    plain, lock = app.tasks[f"{APP}.plain"], "SINGLETONLOCK_{a}"
    plain.delay("busy", 60)
    oracle.wait_started(1, "busy")
    waits = plain.apply_async(("waits",), task_id="waits", headers={HEADER: Ticket("waits", lock, lock).header()})
    wait_until(lambda: redis.hget(lock, "state") == "running", what="the lock of the run that waits")

    app.control.revoke(waits.id, terminate=True, reply=True, timeout=30, limit=1)
    oracle.let_go("busy")

    free(redis)
    assert oracle.started("waits") == 0
    assert waits.state == "REVOKED"


def test_the_lock_of_a_plain_task_of_beat_ends_with_its_killed_worker(celery, oracle, redis):
    entry = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["a"], "kwargs": {"seconds": 60}}
    worker = celery("worker", "-c", "1", conf={"singlebeat_lock_lease": LEASE}).ready()
    beat = celery("beat", conf={"beat_schedule": {"a": entry}})
    (first,) = oracle.wait_started(1)
    beat.wait_for(rf"Skipping task a \({APP}\.plain\) .*held by task {first.id}, running since")

    worker.kill_group()
    at = beat.position
    began = time.monotonic()
    (key,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    assert redis.hget(key, "id") == first.id
    assert 0 < redis.pttl(key) <= LEASE * 1000

    beat.wait_for("Sending due task a ", after=at)
    measured(f"dispatched again {time.monotonic() - began:.2f} s after the death of its worker, lease {LEASE} s")
    celery("worker", "-c", "1").ready()
    _, second = oracle.wait_started(2)
    assert second.id != first.id
    assert oracle.max_concurrent("a") == 1


def test_a_plain_run_frees_its_lock_while_its_worker_lacks_the_broker(celery, app, oracle, redis, server):
    """The main process reads no result of its children while it stands in a reconnect."""
    definition = {"task": f"{APP}.plain", "args": ["a", 60], "schedule": {"__type__": "interval", "every": 3600}}
    redis.hset("redbeat:a", "definition", json.dumps(definition))
    with Network() as network:
        link = network.link("broker", server.port, Random(0))
        cut_off = celery("worker", "-c", "1", conf={"broker_url": f"redis://127.0.0.1:{link.port}"}).ready()
        celery("beat").ready()
        redis.zadd("redbeat::schedule", {"redbeat:a": 0})
        oracle.wait_started(1)

        link.weather = Weather(refuses=True)
        link.reset()
        cut_off.wait_for("Trying again in")
        oracle.let_go("a")
        (first,) = oracle.wait_ended(1)
        free(redis)
        celery("worker", "-c", "1").ready()
        Schedule(app).trigger("a")
        _, second = oracle.wait_started(2)
        back, link.weather = time.time(), Weather()
        if celery_package.VERSION >= (5, 7):  # older ones do not read that result any more
            end = wait_until(lambda: end_of(app, first.id), timeout=60, what="the end that the main process reads")
            assert end.outcome == "success"
            assert end.duration < back - first.started, "it is that of the body"
        cut_off.kill_group()  # before the network, which it would ask for connections to the end

    assert second.id != first.id


def end_of(app, task_id):
    return next((record.end for record in Schedule(app).history("a") if record.task_id == task_id), None)


def test_a_lock_is_kept_far_beyond_its_lease_while_the_body_runs(celery, oracle, redis, single, lock_of):
    celery("worker", "-c", "2", conf={"singlebeat_lock_lease": LEASE}).ready()
    first = single.delay("a", seconds=60)
    oracle.wait_started(1)

    until = time.monotonic() + 3 * LEASE
    while time.monotonic() < until:
        record = redis.hgetall(lock_of(single, "a", seconds=60))
        assert (record.get("id"), record.get("state")) == (first.id, "running")
        assert single.delay("a", seconds=60) == first

    oracle.let_go("a")
    assert first.get(timeout=20) == "a"
    assert single.delay("a", seconds=60) != first


def test_the_message_of_a_dead_run_runs_after_a_quicker_equal_call(celery, oracle, redis, single, lock_of):
    worker = celery("worker", "-c", "2").ready()
    backend, lock = single.singleton_backend, lock_of(single, "a")
    lived = {"remember_for": 60.0, "task": single.name, "arguments": "'a'"}
    assert backend.begin(Ref(lock, "first", nonce="of the run that died"), lease=5, **lived).verdict == "started"
    single.apply_async(["a"], task_id="first", headers={HEADER: Ticket("first", lock, lock).header()})
    worker.wait_for("first.* waits for its turn .*it is running already")

    other = Ref(lock, "second", nonce="of an equal call")
    backend.unlock(lock)  # as the end of the lease would, but before the message that waits for it can be quicker
    assert backend.begin(other, lease=60, **lived).verdict == "started"
    worker.wait_for(r"first.* waits for its turn .*its lock is held by task second")

    assert not oracle.runs()
    backend.finish_many([other], remember_for=60)
    assert [run.id for run in oracle.wait_started(1)] == ["first"]


@pytest.mark.parametrize("task", ["single", "single_fail"])
def test_a_call_is_new_at_once_when_the_result_of_the_last_is_there(task, celery, app):
    celery("worker", "-c", "1").ready()
    task = app.tasks[f"{APP}.{task}"]
    seen = set()
    for _ in range(20):
        result = task.delay("a")
        assert not result.is_duplicate
        assert result.id not in seen
        seen.add(result.id)
        result.get(timeout=20, propagate=False)
        assert result.state == ("SUCCESS" if task.name.endswith("single") else "FAILURE")


def test_a_call_that_is_revoked_before_its_start_leaves_no_lock(celery, oracle, redis, app, single):
    worker = celery("worker", "-c", "1").ready()
    app.tasks[f"{APP}.plain"].delay("busy", seconds=60)
    oracle.wait_started(1)
    revoked = single.delay("a")
    worker.wait_for(rf"{revoked.id}\] received")

    assert app.control.revoke(revoked.id, reply=True, timeout=20, limit=1)
    oracle.let_go("busy")

    worker.wait_for(rf"Discarding revoked task: {APP}\.single\[{revoked.id}\]")
    free(redis)
    again = single.delay("a")
    assert again != revoked
    assert again.get(timeout=20) == "a"
    assert oracle.started("a") == 1


def test_a_call_whose_time_expires_in_the_queue_frees_its_lock(redis, single, lock_of):
    expired = single.apply_async(("a",), expires=2)
    assert redis.pttl(lock_of(single, "a")) <= 2000

    free(redis)

    assert single.delay("a") != expired


def test_a_call_whose_time_expires_in_the_hands_of_a_worker_leaves_no_lock(celery, oracle, redis, app, single):
    worker = celery("worker", "-c", "1").ready()
    app.tasks[f"{APP}.plain"].delay("busy", seconds=60)
    oracle.wait_started(1)
    expired = single.apply_async(("a",), expires=1)
    worker.wait_for(rf"{expired.id}\] received")
    time.sleep(1)  # what expires is the message

    oracle.let_go("busy")

    worker.wait_for(rf"Discarding revoked task: {APP}\.single\[{expired.id}\]")
    free(redis)
    again = single.delay("a")
    assert again != expired
    assert again.get(timeout=20) == "a"
    assert oracle.started("a") == 1


def test_an_expired_call_at_a_busy_worker_excludes_no_call(celery, oracle, redis, app, single):
    worker = celery("worker", "-c", "1", conf={"singlebeat_lock_lease": LEASE}).ready()
    app.tasks[f"{APP}.plain"].delay("busy", seconds=60)
    (busy,) = oracle.wait_started(1)
    expired = single.apply_async(("a",), expires=1)
    worker.wait_for(rf"{expired.id}\] received")

    lock = single.generate_lock(single.name, ("a",))
    wait_until(lambda: not redis.exists(lock), timeout=5 * LEASE, what="the end of the lock of an expired call")

    assert single.delay("a") != expired
    assert oracle.running() == [busy]


def test_a_chain_of_retries_holds_its_lock_to_its_end(celery, oracle, redis, app, lock_of):
    celery("worker", "-c", "2").ready()
    task = app.tasks[f"{APP}.single_retrying"]
    first = task.delay("a", 3, seconds=60)
    key = lock_of(task, "a", 3, seconds=60)
    for runs in (1, 2, 3):
        oracle.wait_started(runs)
        assert redis.hmget(key, "id", "state") == [first.id, "running"]
        assert task.delay("a", 3, seconds=60) == first
        oracle.let_go("a")
        oracle.wait_ended(runs)
        if runs < 3:  # the retry was sent before its run ended
            assert redis.hget(key, "id") == first.id
            assert task.delay("a", 3, seconds=60) == first

    assert first.get(timeout=20) == "a"
    assert {run.id for run in oracle.runs()} == {first.id}
    assert oracle.max_concurrent("a") == 1
    free(redis)


def test_a_call_is_new_at_once_when_its_chain_of_retries_has_ended(celery, oracle, app):
    celery("worker", "-c", "1").ready()
    task = app.tasks[f"{APP}.single_retrying"]
    first = task.delay("a", 2)

    assert first.get(timeout=20) == "a"
    second = task.delay("a", 2)

    assert second != first
    assert second.get(timeout=20) == "a"
    assert [run.id for run in oracle.runs("a")] == [first.id] * 2 + [second.id] * 2


def _due_now(redis, **arguments):
    """Add an entry of a plain task that is due once within an hour."""
    definition = {"task": f"{APP}.plain", "args": ["a"], "schedule": {"__type__": "interval", "every": 3600}}
    redis.hset("redbeat:a", "definition", json.dumps(definition | arguments))
    redis.zadd("redbeat::schedule", {"redbeat:a": 0})


def _left_locks(redis):
    return [redis.hget(key, "state") for key in redis.scan_iter("SINGLETONLOCK_*", _type="HASH")]


def _recorded_outcome(app):
    (sent,) = (record for record in Schedule(app).history("a") if record.is_sent)
    return sent.end and sent.end.outcome


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_run_that_a_stopping_worker_gives_back_may_start_at_once(pool, celery, app, oracle, redis):
    stopping = celery("worker", "-P", pool, "-c", "2", app="tests.system.stopped_early").ready()
    celery("beat").ready()
    _due_now(redis)
    assert stopping.wait(timeout=20) == 0

    started = len(oracle.runs("a"))
    assert _left_locks(redis) == (["queued"] if started == 0 else [])
    assert _recorded_outcome(app) == ("success" if started else None)
    celery("worker", "-c", "1").ready()
    oracle.wait_ended(1)
    assert len(oracle.runs("a")) == 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_run_that_ends_while_its_worker_stops_leaves_its_end_and_no_lock(pool, celery, app, oracle, redis):
    worker = celery("worker", "-P", pool, "-c", "2", app="tests.system.slow_threads").ready()
    celery("beat").ready()
    _due_now(redis, kwargs={"seconds": 1})
    oracle.wait_started(1)
    worker.terminate()
    assert worker.wait() == 0

    assert _left_locks(redis) == []
    assert _recorded_outcome(app) == "success"


@pytest.mark.parametrize("how", ["child killed", "hard time limit"])
def test_the_lock_of_a_child_that_dies_is_free_long_before_its_lease(how, celery, oracle, redis, single, lock_of):
    worker = celery("worker", "-c", "1", conf={"singlebeat_lock_lease": 300}).ready()
    first = single.apply_async(("a",), {"seconds": 60}, time_limit=1 if how == "hard time limit" else None)
    (run,) = oracle.wait_started(1)
    if how == "child killed":
        os.kill(run.pid, signal.SIGKILL)

    worker.wait_for("WorkerLostError" if how == "child killed" else "Hard time limit")
    measured(f"{how}: free {free(redis):.2f} s after the worker said so")

    again = single.delay("a", seconds=60)
    assert again != first
    oracle.wait_started(2)
    assert oracle.max_concurrent("a") == 1, "it was free while the body lived"


def test_a_plain_task_that_beat_sent_may_retry(celery, oracle, redis):
    celery("worker", "-c", "2").ready()
    beat = celery("beat").ready()
    when = {"__type__": "interval", "every": 3600}
    definition = {"task": f"{APP}.retrying", "args": ["a", 3], "schedule": when}
    redis.hset("redbeat:a", "definition", json.dumps(definition))
    redis.zadd("redbeat::schedule", {"redbeat:a": 0})

    runs = oracle.wait_ended(3)

    beat.wait_for("Sending due task a ")
    ((_, decision),) = redis.xrange("redbeat::history")
    assert decision["decision"] == "dispatched"
    assert [run.id for run in runs] == [decision["id"]] * 3
    free(redis)
    assert oracle.max_concurrent("a") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
@pytest.mark.parametrize("task", ["rejecting", "single_rejecting"])
def test_a_requeued_message_starts_long_before_the_lease_of_its_run(pool, task, celery, oracle, app, redis):
    if pool == "gevent":
        pytest.importorskip("gevent")
    celery("worker", "-P", pool, "-c", "2", conf={"singlebeat_lock_lease": 300}).ready()
    task, lock = app.tasks[f"{APP}.{task}"], "SINGLETONLOCK_{a}"
    backend_of(app).acquire_many([Call(Ref(lock, "a"), task.name, "", 600)])

    task.apply_async(("a", 4, True), task_id="a", headers={HEADER: Ticket("a", lock, lock).header()})

    oracle.wait_ended(4)
    free(redis)
    assert oracle.max_concurrent("a") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
@pytest.mark.parametrize("task", ["rejecting", "single_rejecting"])
def test_a_copy_of_a_message_that_was_rejected_is_not_started(pool, task, celery, oracle, app, redis):
    """A broker that has got the rejection delivers the message no more."""
    if pool == "gevent":
        pytest.importorskip("gevent")
    worker = celery("worker", "-P", pool, "-c", "2").ready()
    task, lock = app.tasks[f"{APP}.{task}"], "SINGLETONLOCK_{a}"
    message = {"task_id": "a", "headers": {HEADER: Ticket("a", lock, lock).header()}}
    task.apply_async(("a", 9, False), **message)
    oracle.wait_ended(1)
    wait_until(lambda: redis.zscore(done_key(lock), "a:0"), timeout=30, what="the end without anything unsent")

    task.apply_async(("a", 9, False), **message)

    worker.wait_for(rf"{task.name}\[a\] has run already", timeout=30)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_run_whose_result_is_refused_is_over_in_every_pool(pool, celery, oracle, app, redis):
    if pool == "gevent":
        pytest.importorskip("gevent")
    early, late = f"{APP}.plain", f"{APP}.rejecting"
    with RedisServer() as results, results.client() as client:
        conf = {"result_backend": results.celery_url}
        worker = celery("worker", "-P", pool, "-c", "2", conf=conf).ready()
        for task, args in ((early, ["a", 60]), (late, ["b", 0, False, 60])):
            lock = f"SINGLETONLOCK_{task}"
            app.send_task(task, args, task_id=task, headers={HEADER: Ticket(task, lock, lock).header()})
            if pool != "solo":
                oracle.wait_started(1, args[0])
        oracle.wait_started(1, "a")
        client.config_set("maxmemory", 1)
        oracle.let_go("a")
        oracle.let_go("b")

        oracle.wait_ended(2)
        free(redis)
        wait_until(lambda: not redis.hlen("unacked"), timeout=30, what="the acknowledgement")
        wait_until(lambda: idle(app), timeout=30, what="a worker that runs nothing")
        if pool != "prefork":  # there the pool says so
            worker.wait_for(
                rf"{early}\[{early}\]: cannot store how it ended event=result_not_stored .*OutOfMemoryError"
            )

        client.config_set("maxmemory", 0)
        app.send_task(early, ["c"])
        oracle.wait_ended(1, "c")


def idle(app):
    """Return whether a worker answers, and runs nothing as far as it knows."""
    replies = app.control.inspect(limit=1, timeout=10).active()
    return bool(replies) and not any(replies.values())


def test_a_requeued_message_starts_soon_after_a_lock_outage(celery, oracle, app):
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as locks:
        conf = {"singleton_backend_url": locks.url, "singlebeat_lock_lease": 300, "singlebeat_socket_timeout": 0.5}
        worker = celery("worker", "-c", "1", conf={**conf, "singleton_on_backend_error": "raise"}).ready()
        with make_app(app.conf.broker_url, conf) as sender:
            call = sender.tasks[f"{APP}.single_rejecting"].delay("a", 2, True, seconds=60)
        oracle.wait_started(1)

        locks.kill()
        oracle.let_go("a")
        worker.wait_for(rf"{call.id}\] waits for its turn .* does not answer")
        locks.restart()

        oracle.wait_started(2)
        oracle.let_go("a")
        oracle.wait_ended(2)
        assert oracle.max_concurrent("a") == 1


@pytest.mark.parametrize("task", ["plain", "single"])
def test_a_call_that_waits_keeps_its_serializer_and_compression(task, celery, oracle, redis, app):
    conf = {"accept_content": ["json", "pickle"]}
    worker = celery("worker", "-c", "1", conf=conf, env={"C_FORCE_ROOT": "yes"}).ready()
    task, lock, other = app.tasks[f"{APP}.{task}"], "SINGLETONLOCK_{a}", Ref("SINGLETONLOCK_{a}", "b", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    headers = {HEADER: Ticket("a", lock, lock, waits=True).header()}

    nothing = frozenset()  # which JSON does not know
    task.apply_async(("a", nothing), task_id="a", headers=headers, serializer="pickle", compression="gzip")
    worker.wait_for(r"\[a\] waits for its turn", count=2)
    backend_of(app).finish_many([other], remember_for=60)

    oracle.wait_ended(1)


def test_a_broker_that_takes_no_messages_loses_no_waiting_call(celery, oracle, redis, server, app, single, lock_of):
    backend, other = single.singleton_backend, Ref(lock_of(single, "a"), "other", nonce="of an equal call")
    backend.begin(other, lease=60, remember_for=60, task=single.name, arguments="")
    with without(server, "lpush") as url:
        worker = celery("worker", "-c", "2", conf={"broker_write_url": url, "task_acks_late": True}).ready()
        for task in (single, app.tasks[f"{APP}.plain"]):
            headers = {HEADER: Ticket(task.name, other.key, other.key, waits=True).header()}
            app.send_task(task.name, ["a"], task_id=task.name, headers=headers)
        for task in (single.name, f"{APP}.plain"):  # delivered twice, and twice in vain
            worker.wait_for(rf"{task}\[{task}\] cannot be sent again to wait", count=2)
        assert not oracle.runs()

        redis.acl_setuser("mute", enabled=True, commands=["+lpush"])
        backend.finish_many([other], remember_for=60)
        runs = oracle.wait_ended(2)

    assert sorted(run.id for run in runs) == [f"{APP}.plain", single.name]
    assert worker.returncode is None
