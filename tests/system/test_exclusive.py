"""``exclusive`` in real workers: processes, threads and greenlets exclude one another, and the dead hold nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
from redis import Redis

import singlebeat
from singlebeat.locks.key import lock_key
from tests.support import ROOT, until_answered, wait_until
from tests.system import exclusives
from tests.system.exclusives import LEASE

PATIENCE = 30.0

LOCK = lock_key("SINGLETONLOCK_", "exclusive:guarded a")


@pytest.fixture
def app(server, redis):
    with exclusives.make_app(server.celery_url) as app:
        yield app


def age(redis: Redis, lock: str) -> float:
    """Return the seconds since a lock was taken; it must not have ended."""
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6 - int(redis.hget(lock, "since")) / 1000


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_runs_of_a_guarded_task_exclude_one_another_in_every_pool(celery, app, oracle, redis, pool):
    celery("worker", "-P", pool, "-c", "2", app=exclusives.__name__).ready()
    task = app.tasks["tests.system.exclusives.guarded"]
    first = task.delay("a")
    (run,) = oracle.wait_started(1, "a")
    wait_until(lambda: age(redis, LOCK) > 1.5 * LEASE, timeout=PATIENCE, what="more than a lease to pass")

    assert task.delay("a").get(timeout=PATIENCE) is None
    with singlebeat.exclusive("guarded a", app=app) as lock:
        assert not lock
        assert lock.holder.task_id == first.id == run.id

    oracle.let_go("a")
    assert first.get(timeout=PATIENCE) == "a"
    oracle.let_go("a")
    assert task.delay("a").get(timeout=PATIENCE) == "a"
    assert oracle.started("a") == 2
    assert oracle.max_concurrent("a") == 1
    assert not redis.keys("*exclusive*")


def test_a_worker_that_is_killed_holds_its_lock_no_longer_than_its_lease(celery, app, oracle, redis):
    worker = celery("worker", "-c", "1", app=exclusives.__name__).ready()
    app.tasks["tests.system.exclusives.guarded"].delay("a")
    oracle.wait_started(1, "a")
    worker.kill_group()
    wait_until(lambda: not oracle.running("a"), timeout=PATIENCE, what="the death of the run")
    assert redis.pttl(LOCK) <= LEASE * 1000, "what is left at most when its owner is dead"

    def get() -> bool:
        with singlebeat.exclusive("guarded a", app=app) as lock:
            return bool(lock)

    wait_until(get, timeout=PATIENCE, what="the end of the lease")


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_body_that_blocks_the_loop_of_greenlets_keeps_both_of_its_locks(celery, app, redis, tmp_path, pool):
    worker = celery("worker", "-P", pool, "-c", "2", app=exclusives.__name__).ready()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    task = app.tasks["tests.system.exclusives.block"]
    of_code, of_task = lock_key("SINGLETONLOCK_", "exclusive:block"), task.generate_lock(task.name, [str(pipe)])
    result = task.delay(str(pipe))
    wait_until(lambda: redis.exists(of_code), timeout=PATIENCE)
    nonce = redis.hget(of_task, "nonce")
    wait_until(lambda: age(redis, of_code) > 2 * LEASE, timeout=PATIENCE, what="two leases to pass")
    assert redis.hget(of_task, "nonce") == nonce

    worker.terminate()  # now, so that it shuts down as soon as it can
    os.close(os.open(pipe, os.O_WRONLY))
    assert result.get(timeout=PATIENCE) is False
    assert worker.wait() == 0
    assert not worker.matches("before its last locks are free")
    assert not redis.exists(of_code, of_task)


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_greenlet_that_is_killed_loses_its_lock(celery, app, oracle, redis, pool):
    worker = celery("worker", "-P", pool, "-c", "2", app=exclusives.__name__).ready()
    result = app.tasks["tests.system.exclusives.guarded"].delay("a")
    oracle.wait_started(1, "a")
    until_answered(partial(app.control.revoke, result.id, terminate=True))
    wait_until(lambda: not redis.exists(LOCK), timeout=PATIENCE, what="the end of the lock")
    assert worker.returncode is None


PATCHED_LATE = """
import sys
import singlebeat
from tests.system.exclusives import LEASE, make_app

with make_app(sys.argv[2]) as app:
    if sys.argv[1] == "gevent":
        from gevent import monkey
        monkey.patch_all()
        sleep = monkey.get_original("time", "sleep")
    else:
        import eventlet.patcher
        eventlet.monkey_patch()
        sleep = eventlet.patcher.original("time").sleep
    with singlebeat.exclusive("late", app=app) as lock:
        sleep(2 * LEASE)  # all greenlets with it
        print(bool(lock), lock.is_lost())
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_lock_outlives_a_blocked_loop_of_a_late_patch(server, redis, library):
    command = [sys.executable, "-c", PATCHED_LATE, library, server.celery_url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout == "True False\n", done.stderr


def test_children_of_one_task_each_leave_no_lock_and_no_connection(celery, app, oracle, redis):
    celery("worker", "-c", "2", "--max-tasks-per-child", "1", app=exclusives.__name__).ready()
    task, most = app.tasks["tests.system.exclusives.single"], 0
    for batch in ("a", "b", "c"):
        names = [f"{batch} {number}" for number in range(4)]
        for name in names:
            oracle.let_go(name)
        results = [task.delay(name) for name in names]
        assert [result.get(timeout=PATIENCE) for result in results] == names
        most = most or len(redis.client_list()) + 4
        wait_until(lambda most=most: len(redis.client_list()) <= most, timeout=PATIENCE, what="the end of connections")
    assert len({run.pid for run in oracle.runs()}) == 12
    wait_until(lambda: not list(redis.scan_iter("SINGLETONLOCK_*", _type="HASH")), what="the end of the locks")
