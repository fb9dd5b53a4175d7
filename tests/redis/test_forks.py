"""No client, thread or lock is used across a fork: child and parent go on at once, whatever was under way."""

from __future__ import annotations

import os
import threading

import pytest

import singlebeat
from singlebeat.connections import schedule_client
from singlebeat.locks import backend_of, eager_backend_of
from singlebeat.locks.base import Call, Ref
from tests.support import APP, ended_well, fork, wait_until
from tests.system.apps import make_app

#: Seconds of a lease; two thirds of it are what a slow machine may stand still.
LEASE = 3.0

#: Seconds after which a thread that hangs is given up.
PATIENCE = 30


@pytest.fixture
def app(server, redis):
    with make_app(server.celery_url, {"singlebeat_socket_timeout": PATIENCE}) as app:
        yield app


@pytest.fixture
def single(app):
    """A Singleton that was used before; Celery's own lock on its ``app.tasks`` and ``app.conf`` outlives no fork."""
    single = app.tasks[f"{APP}.single"]
    use(app, single, "before")
    return single


def use(app, single, name: str, rounds: int = 1) -> None:
    """Take, read and free locks of every sort under a name of their own; each reply must belong to its request."""
    backend = backend_of(app)
    for number in range(rounds):
        own = f"{name} {number}"
        lock = single.generate_lock(single.name, [own])
        assert single.acquire_lock(lock, own)
        assert single.get_existing_task_id(lock) == own
        backend.finish_many([Ref(lock, own)], remember_for=0)
        assert backend.get(lock) is None
        with singlebeat.exclusive(own, app=app) as mine:
            assert mine
            assert mine.holder.task_id == mine.ref.task_id
            assert not mine.is_lost()
        redis = schedule_client(app)
        assert redis.echo(own) == own


def test_parent_and_children_use_locks_at_once_and_get_their_own_replies(app, single, redis):
    single.delay("before")
    with singlebeat.exclusive("held", app=app) as held:
        mine = backend_of(app).redis.client_id()

        def child() -> None:
            use(app, single, f"child {os.getpid()}", rounds=100)
            assert backend_of(app).redis.client_id() != mine
            first = single.delay(f"child {os.getpid()}")
            assert not first.is_duplicate
            again = single.delay(f"child {os.getpid()}")
            assert (again.id, again.is_duplicate) == (first.id, True)

        children = [fork(child) for _ in range(3)]
        use(app, single, "parent", rounds=100)
        assert all([ended_well(pid) for pid in children])  # noqa: C419 - all of them
        assert backend_of(app).redis.client_id() == mine
        assert not held.is_lost()
    assert redis.llen("celery") == 4


def test_a_child_does_not_await_replies_to_threads_of_its_parent(app, single, redis):
    """The threads hold connections in the middle of a call, at the moment of the fork."""
    heard: list[object] = []
    clients = [backend_of(app).redis, schedule_client(app)]
    threads = [threading.Thread(target=lambda c=c: heard.append(c.blpop("go", timeout=PATIENCE)[1])) for c in clients]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(client["cmd"] == "blpop" for client in redis.client_list()) == 2)

    def child() -> None:
        use(app, single, "child")
        redis_of_child = backend_of(app).redis
        redis_of_child.rpush("go", "a", "b")

    assert ended_well(fork(child))
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(heard) == ["a", "b"]
    use(app, single, "after")


def connect_once_for_all(app) -> None:
    """Let no thread of this process resolve a name any more.

    A child that was forked while another thread did so may hang in glibc, which does not free its lock on resolv.conf.
    """
    for client in (backend_of(app).redis, schedule_client(app)):
        # Only redis-py before version 6 needs the name of a command.
        connections = [client.connection_pool.get_connection("_") for _ in range(10)]
        for connection in connections:
            client.connection_pool.release(connection)


def test_children_of_a_process_with_busy_lock_threads_never_hang(app, single):
    connect_once_for_all(app)
    stop, failed = threading.Event(), []

    def busy(name: str) -> None:
        try:
            while not stop.is_set():
                use(app, single, name)
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=busy, args=(f"thread {number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(15):
            assert ended_well(fork(lambda number=number: use(app, single, f"child {number}")))
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not failed


def test_children_renew_their_own_exclusive_locks_beside_their_parent(app):
    def hold(key: str) -> None:
        with singlebeat.exclusive(key, app=app, lease=LEASE) as lock:
            lowest = LEASE * 1000

            def has_risen() -> bool:
                nonlocal lowest
                left = backend_of(app).redis.pttl(lock.ref.key)
                assert left > 0, "the lock is lost"
                lowest = min(lowest, left)
                return left > lowest + 100

            wait_until(has_risen, what="a renewal")
            assert not lock.is_lost()

    with singlebeat.exclusive("parent", app=app, lease=LEASE) as parent:
        children = [fork(lambda key=key: hold(key)) for key in ("one", "two")]
        assert all([ended_well(pid) for pid in children])  # noqa: C419 - all of them
        assert not parent.is_lost()


def test_a_child_does_not_inherit_the_locks_of_eager_calls(server, redis):
    with make_app(server.celery_url, {"task_always_eager": True}) as app:
        ref = Ref(app.tasks[f"{APP}.single"].generate_lock(f"{APP}.single", ["a"]), "of the parent")
        backend = eager_backend_of(app)
        backend.acquire_many([Call(ref, "single", "", 60)])
        held, release = threading.Event(), threading.Event()

        def in_the_middle() -> None:
            with backend._mutex:
                held.set()
                release.wait(PATIENCE)

        thread = threading.Thread(target=in_the_middle)
        thread.start()
        held.wait(PATIENCE)

        def child() -> None:
            assert eager_backend_of(app).get(ref.key) is None

        try:
            assert ended_well(fork(child))
        finally:
            release.set()
            thread.join(PATIENCE)
        assert eager_backend_of(app).get(ref.key) == "of the parent"
