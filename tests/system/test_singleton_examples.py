"""The examples of celery-singleton's documentation, with nothing changed but the import."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.signals import worker_ready

from singlebeat import DuplicateTaskError, Singleton, clear_locks
from tests.support import measured, recorded, wait_until
from tests.system.apps import make_app


def make_examples(url: str) -> tuple[Celery, SimpleNamespace]:
    """Return an app and the tasks of the documentation."""
    app = make_app(url, tasks=False)

    def pause(name, seconds):
        with recorded(name) as client:
            client.blpop([f"go:{name}"], timeout=seconds)

    @app.task(base=Singleton, shared=False)
    def do_stuff(*args, **kwargs):
        pause("do_stuff", 4)
        return "I just woke up"

    @app.task(base=Singleton, unique_on=["username"], shared=False)
    def do_something(username, otherarg=None):
        pause("do_something", 5)

    @app.task(base=Singleton, unique_on=[], shared=False)
    def do_it_once(username):
        pause("do_it_once", 5)

    @app.task(base=Singleton, raise_on_duplicate=True, shared=False)
    def do_or_raise(username):
        pause("do_or_raise", 5)

    @app.task(base=Singleton, lock_expiry=10, shared=False)
    def runs_longer_than_its_lock():
        pause("runs_longer_than_its_lock", 60)  # at least: the test looks after the end of its lock

    return app, SimpleNamespace(**{task.__name__: task for task in locals().values() if hasattr(task, "delay")})


# What the workers load: celery -A tests.system.test_singleton_examples
app, _ = make_examples(os.environ.get("SB_TEST_URL", "memory://"))

if "SB_TEST_UNLOCK" in os.environ:

    @worker_ready.connect
    def unlock_all(**kwargs):
        clear_locks(app)


@pytest.fixture
def tasks(server, redis):
    app, tasks = make_examples(server.celery_url)
    with app:
        yield tasks


@pytest.fixture
def worker(celery):
    return celery("worker", "-c", "2", app=__name__).ready()


def test_equal_calls_are_one_until_it_has_run(worker, tasks, oracle):
    a = tasks.do_stuff.delay(1, 2, 3, a="b")
    b = tasks.do_stuff.delay(1, 2, 3, a="b")
    c = tasks.do_stuff.delay(4, 5, 6)
    assert a == b
    assert a != c
    oracle.wait_started(2)

    oracle.let_go("do_stuff", 2)
    assert a.get(timeout=20) == "I just woke up"
    d = tasks.do_stuff.delay(1, 2, 3, a="b")

    assert a != d
    assert {run.id for run in oracle.wait_started(3)} == {a.id, c.id, d.id}


def test_unique_on_compares_the_named_arguments_only(worker, tasks, oracle):
    task1 = tasks.do_something.delay(username="bob", otherarg=99)

    assert tasks.do_something.delay(username="bob", otherarg=100) == task1
    assert tasks.do_something.delay("bob") == task1
    other = tasks.do_something.delay(username="alice", otherarg=99)
    assert other != task1
    assert {run.id for run in oracle.wait_started(2)} == {task1.id, other.id}


def test_an_empty_unique_on_compares_the_name_of_the_task_only(worker, tasks, oracle):
    task1 = tasks.do_it_once.delay("bob")

    assert tasks.do_it_once.delay("alice") == task1
    assert tasks.do_something.delay("bob") != task1
    oracle.wait_started(1, "do_it_once")
    oracle.let_go("do_it_once")
    task1.get(timeout=20)
    assert tasks.do_it_once.delay("alice") != task1


def test_raise_on_duplicate_names_the_task_that_is_there(worker, tasks, oracle):
    task1 = tasks.do_or_raise.delay("bob")

    with pytest.raises(DuplicateTaskError) as caught:
        tasks.do_or_raise.delay("bob")

    assert caught.value.task_id == task1.id
    oracle.wait_started(1)
    oracle.let_go("do_or_raise")
    task1.get(timeout=20)
    assert tasks.do_or_raise.delay("bob") != task1


def test_lock_expiry_ends_the_lock_though_its_task_still_runs(worker, tasks, oracle, redis):
    task = tasks.runs_longer_than_its_lock
    task1 = task.delay()
    (first,) = oracle.wait_started(1)
    lock = task.generate_lock(task.name)
    left = redis.pttl(lock)
    assert 0 < left <= 10_000
    assert task.delay() == task1

    wait_until(lambda: not redis.exists(lock), timeout=20, what="the end of the lock: 10 s after the call")
    assert [run.id for run in oracle.running()] == [task1.id]
    task2 = task.delay()

    assert task1 != task2
    runs = oracle.wait_started(2)
    measured(f"the second run began {runs[1].started - first.started:.1f} s after the first")
    assert [run.id for run in runs] == [task1.id, task2.id]


def test_a_worker_may_clear_all_locks_when_it_starts(celery, tasks, redis, oracle):
    lost = tasks.do_stuff.delay(1)
    redis.delete("celery")  # its message is lost, its lock is left
    assert tasks.do_stuff.delay(1) == lost

    celery("worker", "-c", "2", app=__name__, env={"SB_TEST_UNLOCK": "yes"}).ready()

    wait_until(lambda: not redis.exists(tasks.do_stuff.generate_lock(tasks.do_stuff.name, [1])))
    again = tasks.do_stuff.delay(1)
    assert again != lost
    assert oracle.wait_started(1)[0].id == again.id
