"""While the locks' server is unreachable or hangs, calls and starts do what ``singleton_on_backend_error`` says."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from celery import chord

from singlebeat.errors import LockBackendError
from singlebeat.locks import late_release
from singlebeat.locks.base import HEADER
from singlebeat.locks.redis import RedisBackend
from tests.support import APP, RedisServer, wait_until, without
from tests.system.singles import PATIENCE, make_app, open_stage, task_name

#: Seconds that one call to a server may take, and that a call of a task may then last: it may ask more than once.
#: With the default of 5 s for the first it would last longer.
TIMEOUT, BOUND = 0.2, 10.0


@pytest.fixture
def locks():
    with RedisServer() as locks:
        yield locks


@pytest.fixture(params=["gone", "mute"])
def outage(request, locks):
    """Ends and begins the service of the locks: the server is killed and comes back empty, or hangs for a while."""

    class Outage:
        begin = staticmethod(locks.kill if request.param == "gone" else locks.pause)
        end = staticmethod(locks.restart if request.param == "gone" else locks.resume)
        executes_late = request.param == "mute"

    return Outage


def settings(locks, policy):
    conf = {"singleton_backend_url": locks.url, "singlebeat_socket_timeout": TIMEOUT, "singlebeat_lock_lease": 1.5}
    return conf if policy is None else {**conf, "singleton_on_backend_error": policy}


@pytest.fixture
def single(request, locks, server, redis):
    """A task of an app whose policy is the test's, without a worker."""
    policy = request.node.callspec.params["policy"]
    # It wants no results: each would keep a subscription.
    with make_app(server.celery_url, {**settings(locks, policy), "result_backend": "disabled"}) as app:
        yield app.tasks[task_name("until_executed")]
    # What is left of refused calls is undone one by one: the next test's would wait for a server that has ended.
    refused = late_release._releases
    wait_until(
        lambda: not refused._wanted and not refused.thread.is_alive,
        timeout=PATIENCE,
        what="the end of the calls that were refused",
    )


@pytest.mark.parametrize("policy", [None, "raise"])
def test_a_call_that_cannot_get_its_lock_is_refused_and_not_sent(policy, single, outage, redis, locks, name):
    single.apply_async((f"{name}, before",), queue=name)
    outage.begin()
    began = time.monotonic()

    with pytest.raises(LockBackendError, match=f"the locks' server {locks.url} does not answer"):
        single.apply_async((name,), queue=name)

    assert time.monotonic() - began < BOUND
    assert redis.llen(name) == 1
    outage.end()


@pytest.mark.parametrize("policy", [None])
def test_a_call_that_was_refused_can_be_made_when_the_server_is_back(policy, single, outage, redis, name):
    single.apply_async((f"{name}, before",), queue=name)
    outage.begin()
    with pytest.raises(LockBackendError):
        single.apply_async((name,), queue=name)
    outage.end()

    def sent() -> bool:
        with suppress(LockBackendError):  # TIMEOUT is short for a busy machine
            return not single.apply_async((name,), queue=name).is_duplicate
        return False

    # A server that hung takes the lock for the refused call when it wakes up.
    wait_until(sent, timeout=PATIENCE)
    assert redis.llen(name) == 2


def test_a_server_that_answers_no_new_connection_is_not_tried_again(locks):
    backend = RedisBackend(locks.url, timeout=TIMEOUT, own_connections=True)
    with locks.client() as client:
        before = client.info("stats")["total_connections_received"]
        locks.pause()
        with pytest.raises(LockBackendError):
            backend.get("key")
        locks.resume()
    # The server accepts in the order of arrival, so a new connection is behind all of them; one from before is not.
    with locks.client() as client:
        tries = client.info("stats")["total_connections_received"] - 1 - before

    assert tries == 1


@pytest.mark.parametrize("policy", ["run"])
def test_a_call_that_cannot_get_its_lock_is_sent_without_it_if_so_asked(policy, single, outage, redis, name):
    outage.begin()
    began = time.monotonic()

    result = single.apply_async((name,), queue=name)

    assert time.monotonic() - began < BOUND
    assert not result.is_duplicate
    (message,) = (json.loads(raw)["headers"] for raw in redis.lrange(name, 0, -1))
    assert message["id"] == result.id
    assert message[HEADER]["queued"] == "", "it holds none"
    outage.end()


@pytest.fixture
def stage(request, locks, tmp_path):
    """A worker whose policy is the test's; broker and results are on another server than the locks."""
    with open_stage(tmp_path, "-c", "4", conf=settings(locks, request.node.callspec.params["policy"])) as stage:
        stage.conf = settings(locks, request.node.callspec.params["policy"])
        yield stage


@pytest.mark.parametrize(("policy", "outage"), [(None, "mute")], indirect=["outage"])
def test_calls_that_wait_for_a_run_wait_on_through_an_outage(policy, stage, outage, name):
    words = ("buffer_all", "buffer_one", "cancel_other")
    tasks = {f"{name}, {word}": stage.task(word, **stage.conf) for word in words}
    stage.consume(name)
    for case, task in tasks.items():
        task.apply_async((case, 1), queue=name)
        stage.oracle.wait_started(1, case)
    calls = [task.apply_async((case, 2), queue=name) for case, task in tasks.items()]
    by_name = stage.app(**stage.conf).send_task(task_name("buffer_all"), (f"{name}, buffer_all", 3), queue=name)
    for call in (*calls, by_name):
        stage.postponed(call.id, 1)
    outage.begin()

    for call in (*calls, by_name):
        stage.worker.wait_for(rf"{call.id}\] waits for its turn .* does not answer")
    assert {case: stage.oracle.started(case) for case in tasks} == dict.fromkeys(tasks, 1)

    for case in tasks:
        stage.oracle.let_go(case, 3)
        stage.oracle.wait_ended(1, case)
    outage.end()
    for case in tasks:
        stage.oracle.wait_ended(3 if "buffer_all" in case else 2, case, timeout=PATIENCE)
        assert stage.oracle.max_concurrent(case) == 1


@pytest.mark.parametrize("policy", [None, "run"])
@pytest.mark.parametrize("follows", ["chain", "link", "body of a chord"])
def test_what_follows_a_run_that_ends_in_an_outage_comes(follows, policy, stage, outage, name):
    """Celery sends it, and no caller would hear that its lock could not be acquired."""
    task = stage.task("until_executed", **stage.conf)
    first, then = task.si(f"{name}, first"), task.si(f"{name}, then", 1, 0).set(queue=name)
    if follows == "link":
        first.apply_async(queue=name, link=then)
    elif follows == "chain":
        (first.set(queue=name) | then | task.si(f"{name}, last", 1, 0).set(queue=name)).apply_async()
    else:
        other = task.si(f"{name}, other", 1, 0)
        chord([other.set(queue=name), first.set(queue=name)], then).apply_async()
    stage.consume(name)
    stage.oracle.wait_started(1, f"{name}, first")
    if follows == "body of a chord":
        stage.oracle.wait_ended(1, f"{name}, other")
    outage.begin()
    stage.oracle.let_go(f"{name}, first")

    stage.worker.wait_for("is sent without its lock")
    outage.end()

    for each in ("then", "last") if follows == "chain" else ("then",):
        stage.oracle.wait_ended(1, f"{name}, {each}", timeout=PATIENCE)
    stage.quiet(name)
    assert stage.oracle.started(f"{name}, then") == 1


@pytest.mark.parametrize(("policy", "outage"), [(None, "mute"), ("run", "gone")], indirect=["outage"])
def test_a_task_whose_lock_cannot_be_asked_for_runs_once_without_it(policy, stage, outage, locks, name):
    task = stage.task("until_executed", **stage.conf)
    lock = task.generate_lock(task.name, (name, 0, 0))
    first = task.apply_async((name, 0, 0), queue=name)
    outage.begin()

    stage.consume(name)
    assert first.get(timeout=PATIENCE) == 0
    stage.worker.wait_for(rf"{first.id}\] runs without its lock .* does not answer")

    outage.end()
    with locks.client() as client:
        stage.free(lock, on=client)
    second = task.delay(name, 0, 0)
    assert second != first
    assert second.get(timeout=PATIENCE) == 0
    stage.over(name, [first.id, second.id])


@pytest.mark.parametrize("policy", ["raise"])
def test_a_task_may_wait_until_its_lock_server_answers_again(policy, stage, outage, locks, name):
    task = stage.task("until_executed", **stage.conf)
    lock = task.generate_lock(task.name, (name,))
    first = task.apply_async((name,), queue=name)
    outage.begin()

    stage.consume(name)
    stage.worker.wait_for(rf"{first.id}\] waits for its turn .* does not answer")
    assert not stage.oracle.runs(name)

    outage.end()
    stage.oracle.wait_started(1, name)
    with locks.client() as client:
        assert client.hmget(lock, "id", "state") == [first.id, "running"]
        assert task.delay(name) == first
        stage.oracle.let_go(name)
        assert first.get(timeout=PATIENCE) is None
        stage.free(lock, on=client)
    stage.over(name, [first.id])


def test_a_worker_recovers_when_it_frees_locks_again_and_not_before(celery, server, app, oracle):
    """Its server renews locks all the while, and refuses to free them."""
    with without(server, "del") as url:
        conf = {"singleton_backend_url": url.replace("redis+socket://", "unix://"), "singlebeat_lock_lease": 0.9}
        worker = celery("worker", "-c", "1", conf=conf).ready()
        for count in range(1, 5):
            app.tasks[f"{APP}.single"].delay(str(count))
            oracle.wait_ended(count)
        worker.wait_for("event=not_renewed .*refuses")
        assert not worker.matches("event=recovered")

        server.client().acl_setuser("mute", commands=["+del"])

        worker.wait_for("locks are renewed and freed again event=recovered")
        assert len(worker.matches("event=not_renewed")) == len(worker.matches("event=recovered")) == 1
