"""``exclusive`` against a real server: who gets the lock, for how long, and what becomes of it at every kind of end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery._state import _task_stack
from celery.exceptions import Reject
from redis.crc import key_slot

import singlebeat
from singlebeat import signals
from singlebeat.config import MOST_SECONDS
from singlebeat.errors import ConfigError, LockBackendError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ref
from singlebeat.locks.key import done_key, lock_key
from singlebeat.tasks.exclusive_renewer import exclusive_renewer_of
from tests.support import ROOT, RedisServer, connected, ended_well, fork, wait_until
from tests.system.apps import make_app

#: Seconds of a lease that is to pass within a test; two thirds of it are what a slow machine may stand still.
LEASE = 2.0

#: Texts that mean something to Redis, to Lua, to a format or to a cluster.
ODD_KEYS = [
    "",
    "two words",
    "a{b}c",
    "{",
    "}",
    "}{",
    "{}",
    "*",
    "?[a-z]\\",
    "ünï☃😀",
    "line\nbreak",
    "\x00",
    "\udcff",
    "a",
    "a}:done",
    "%s%(x)s",
    "'\"",
    "x" * 10_000,
]


@pytest.fixture
def exclusive(app: Celery):
    return functools.partial(singlebeat.exclusive, app=app)


@pytest.fixture
def lost():
    """Collects what ``lock_lost`` tells."""
    told: list[tuple[str, str]] = []
    with connected(signals.lock_lost, lambda sender, ref, **_: told.append((sender, ref.key))):
        yield told


def lock_of(key: str) -> str:
    return lock_key("SINGLETONLOCK_", f"exclusive:{key}")


def age(lock) -> float:
    return time.time() - lock.holder.since.timestamp()


class Elsewhere:
    """A thread that does what it is told, one thing after the other; ``with`` ends it."""

    def __enter__(self):
        self._asked, self._answers = SimpleQueue(), SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def _work(self) -> None:
        while (function := self._asked.get()) is not None:
            try:
                self._answers.put((function(), None))
            except BaseException as exc:
                self._answers.put((None, exc))

    def __call__(self, function):
        self._asked.put(function)
        value, exc = self._answers.get(timeout=30)
        if exc:
            raise exc
        return value

    def __exit__(self, *exc_info):
        self._asked.put(None)
        self._thread.join()


# ---------------------------------------------------------------- who gets it


def test_two_threads_exclude_one_another(exclusive):
    first, second = exclusive("a"), exclusive("a")
    with Elsewhere() as elsewhere:
        elsewhere(first.__enter__)
        with second:
            assert first
            assert not second
            assert second.holder.task_id == first.holder.task_id == first.ref.task_id
            assert second.fence == 0
        assert not first.is_lost(), "whoever was refused frees nothing"
        elsewhere(lambda: first.__exit__(None, None, None))
    with exclusive("a") as third:
        assert third


def test_of_two_threads_that_race_for_a_key_exactly_one_wins_each_time(exclusive):
    rounds, together = 200, threading.Barrier(2, timeout=30)
    wins = [[] for _ in range(rounds)]

    def race() -> None:
        for number in range(rounds):
            together.wait()
            with exclusive("a") as lock:
                if lock:
                    wins[number].append(lock.fence)
                together.wait()

    with Elsewhere() as one, Elsewhere() as other:
        one._asked.put(race)
        other(race)
    assert [len(winners) for winners in wins] == [1] * rounds
    fences = [fence for (fence,) in wins]
    assert fences == sorted(set(fences)), "they rise from holder to holder"


def test_the_holder_of_a_key_does_not_get_it_again(exclusive):
    with exclusive("a") as outer:
        with exclusive("a") as inner:
            assert not inner
        assert not outer.is_lost()


def test_a_task_is_the_holder_under_its_id_and_does_not_get_its_key_again(server, redis):
    with make_app(server.celery_url, {"task_always_eager": True}) as app:

        @app.task(shared=False, name="nested")
        def nested():
            with singlebeat.exclusive("a") as outer, singlebeat.exclusive("a") as inner:
                return bool(outer), bool(inner), inner.holder.task_id, redis.hget(lock_of("a"), "task")

        @app.task(shared=False, name="in turn")
        def in_turn():
            with singlebeat.exclusive("a") as first:
                pass
            with singlebeat.exclusive("a") as second:
                return bool(first), bool(second)

        # No app was named: it is that of the task, and its locks are real ones although the task is not sent.
        result = nested.delay()
        assert result.get() == (True, False, result.id, "nested")
        assert in_turn.delay().get() == (True, True)


def test_different_keys_of_any_content_do_not_exclude_one_another(exclusive, app, redis):
    with ExitStack() as stack:
        for key in ODD_KEYS:
            assert stack.enter_context(exclusive(key)), key
        for key in ODD_KEYS:
            with exclusive(key) as again:
                assert not again, key
        assert redis.dbsize() == len(ODD_KEYS)
    assert redis.dbsize() == 0


def test_all_keys_of_a_lock_are_in_one_slot_of_a_cluster():
    for key in ODD_KEYS:
        lock = lock_of(key).encode("utf-8", "surrogateescape")
        done = done_key(lock_of(key)).encode("utf-8", "surrogateescape")
        assert lock != done
        assert key_slot(lock) == key_slot(done), key


def test_clear_locks_frees_it(exclusive, app, redis):
    with exclusive("a*") as lock:
        assert redis.keys() == [lock_of("a*")]
        singlebeat.clear_locks(app)
        assert lock.is_lost()
    assert redis.keys() == []


def test_the_record_of_a_lock_names_its_key_and_holder(exclusive, redis):
    with exclusive("feed 7") as lock:
        record = redis.hgetall(lock_of("feed 7"))
    assert record["task"] == "singlebeat.exclusive"
    assert record["args"] == "'feed 7'"
    assert str(os.getpid()) in record["id"]
    assert int(record["fence"]) == lock.fence


def test_a_foreign_value_at_the_key_is_an_error_that_names_the_key(exclusive, redis):
    redis.set(lock_of("a"), "what?")
    with pytest.raises(LockBackendError, match="exclusive:a"), exclusive("a"):
        pass
    assert redis.get(lock_of("a")) == "what?"


@pytest.mark.parametrize("backend", ["singlebeat.locks.inspect:InspectBackend", f"{__name__}:Custom"])
def test_a_backend_without_leases_is_refused(server, backend):
    with make_app(server.celery_url, {"singleton_backend_class": backend}) as app:  # noqa: SIM117 - it need not raise
        with pytest.raises(ConfigError, match="singleton_backend_class"), singlebeat.exclusive("a", app=app):
            pass


class Custom:
    """As celery-singleton's backends."""

    def __init__(self, *args, **kwargs):
        self.lock = self.unlock = self.get = self.clear = None


# ---------------------------------------------------------------- how long


def test_it_is_renewed_for_as_long_as_it_is_held(exclusive, redis, lost):
    with make_app("memory://", {"singleton_backend_class": "singlebeat.locks.memory:MemoryBackend"}) as in_memory:
        in_process = functools.partial(singlebeat.exclusive, app=in_memory)
        with exclusive("a", lease=LEASE) as real, in_process("a", lease=LEASE) as local:
            assert real
            assert local
            assert 0 < redis.pttl(lock_of("a")) <= LEASE * 1000

            def is_over() -> bool:
                for one in (exclusive, in_process):
                    with one("a", lease=LEASE) as other:
                        assert not other
                return min(age(real), age(local)) > 2 * LEASE

            wait_until(is_over, what="two leases to pass")
    assert redis.dbsize() == 0
    assert lost == []


def test_a_short_lease_is_renewed_beside_a_long_one(exclusive):
    with exclusive("long", lease=600), exclusive("short", lease=LEASE) as short:
        wait_until(lambda: age(short) > LEASE + 0.5)
        with exclusive("short") as other:
            assert not other


def test_a_short_lease_is_renewed_beside_the_longest_one(exclusive, lost):
    with exclusive("short", lease=LEASE) as short, exclusive("longest", lease=MOST_SECONDS) as longest:
        wait_until(lambda: age(short) > LEASE + 0.5)
        assert (short.is_lost(), longest.is_lost(), lost) == (False, False, [])


def test_the_renewer_goes_on_after_an_error_before_its_wait(exclusive, caplog):
    with exclusive("odd") as odd, exclusive("other", lease=6) as other:
        odd.lease = None  # as any value that it cannot work with
        with exclusive("news"):
            wait_until(lambda: "the renewer of exclusive locks failed and goes on" in caplog.text)
        odd.lease, known = 30, other._renewed_at
        wait_until(lambda: other._renewed_at > known, what="a renewal")


def test_the_lease_is_that_of_the_setting_by_default(server, redis):
    with make_app(server.celery_url, {"singlebeat_lock_lease": 600}) as app, singlebeat.exclusive("a", app=app):
        assert 300_000 < redis.pttl(lock_of("a")) <= 600_000


def test_an_abandoned_lock_ends_with_its_lease(exclusive, redis):
    """As after an exception between the acquisition and the body: a signal handler's, say."""
    assert exclusive("a", lease=LEASE).__enter__()
    gc.collect()
    wait_until(lambda: not redis.exists(lock_of("a")))


@pytest.mark.parametrize(
    "lease",
    [0, -1, 0.0001, float("inf"), float("nan"), "5", [5], 2.8e10, sys.maxsize, 2**2000],
    ids=lambda it: repr(it)[:20],
)
def test_a_lease_that_is_no_time_is_refused(lease):
    with pytest.raises(ValueError, match="positive number of seconds"):
        singlebeat.exclusive("a", lease=lease)


def test_one_thread_renews_all_and_ends_when_nothing_is_held(exclusive):
    before = set(threading.enumerate())

    def ours() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    with ExitStack() as stack:
        for number in range(100):
            stack.enter_context(exclusive(f"key {number}", lease=LEASE))
        assert len(ours()) == 1
    wait_until(lambda: not ours(), what="the end of the thread")
    with exclusive("again", lease=LEASE) as lock:
        assert len(ours()) == 1
        wait_until(lambda: age(lock) > LEASE + 0.5)
        assert not lock.is_lost()


# ---------------------------------------------------------------- the end


def test_an_error_in_the_body_comes_through_and_frees_the_lock(exclusive, redis):
    with pytest.raises(SystemExit, match="mine"), exclusive("a"):
        raise SystemExit("mine")
    assert redis.dbsize() == 0


def test_a_thousand_keys_in_a_burst_leave_nothing_behind(exclusive, redis):
    with ExitStack() as stack:
        for number in range(1000):
            with exclusive(f"short {number}") as lock:
                assert lock
            assert stack.enter_context(exclusive(f"long {number}"))
        assert redis.dbsize() == 1000
    assert redis.dbsize() == 0


def test_the_exit_leaves_a_lock_that_another_holder_has_acquired(exclusive, redis):
    first, second = exclusive("a"), exclusive("a")
    with first:
        redis.pexpire(lock_of("a"), 1)
        wait_until(lambda: not redis.exists(lock_of("a")))
        assert second.__enter__()
        assert second.fence > first.fence
    assert redis.hget(lock_of("a"), "nonce") == second.ref.nonce
    second.__exit__(None, None, None)
    assert redis.dbsize() == 0


def test_a_lost_lock_is_reported_once(exclusive, redis, lost, caplog):
    with exclusive("a", lease=LEASE) as lock:
        redis.delete(lock_of("a"))
        wait_until(lambda: lost)
        assert lock.is_lost()
        assert lock, "it was acquired"
    assert lost == [("singlebeat.exclusive", lock_of("a"))]
    assert [record.levelname for record in caplog.records if "'a' was lost" in record.getMessage()] == ["WARNING"]


def test_is_lost_reports_a_loss_at_once(exclusive, redis, lost):
    with exclusive("a", lease=600) as lock:
        assert not lock.is_lost()
        redis.delete(lock_of("a"))
        assert lock.is_lost()
    assert len(lost) == 1
    assert lock.is_lost(), "after the end it is not ours either"


def test_a_refused_or_released_lock_counts_as_lost(exclusive, lost):
    with exclusive("a") as held, exclusive("a") as refused:
        assert refused.is_lost()
        assert not held.is_lost()
    assert held.is_lost()
    assert lost == []


def test_it_is_entered_once(exclusive):
    with exclusive("a") as lock:
        pass
    with pytest.raises(RuntimeError, match="make a new one"), lock:
        pass


@pytest.mark.parametrize("has_app", [False, True], ids=["no app", "an app of another thread"])
@pytest.mark.parametrize("call", ["singlebeat.exclusive('a').__enter__()", "shared.delay()"])
def test_code_of_a_thread_without_an_app_must_name_its_app(call, has_app):
    """As in the threads of a web server: an app is the current one of the thread that has made it."""
    code = f"""
import threading, celery, singlebeat
app = celery.Celery("shop", broker="redis://127.0.0.1:1") if {has_app} else None
@celery.shared_task(base=singlebeat.Singleton)
def shared(): pass
def call():
    {call}
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    reason = "these are the settings of Celery's default app, because this thread has no current app: give app=..."
    assert reason in done.stderr


def test_an_app_that_is_the_default_one_is_current_in_each_thread(server, redis):
    code = f"""
import threading, celery, singlebeat
celery.Celery("shop", broker="{server.celery_url}").set_default()
def call():
    with singlebeat.exclusive("a") as lock:
        print(bool(lock))
thread = threading.Thread(target=call)
thread.start()
thread.join()
"""

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.stdout == "True\n", done.stderr


def test_an_error_about_the_current_app_names_that_app():
    code = "import celery, singlebeat; celery.Celery('shop', broker='amqp://');"
    code += "singlebeat.exclusive('a').__enter__()"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert "is one; the current app is shop: if yours is another, write exclusive(..., app=app)" in done.stderr


# ---------------------------------------------------------------- forks


def test_a_forked_child_neither_holds_nor_gets_nor_frees_its_parents_lock(exclusive, redis):
    with exclusive("a", lease=60) as lock:
        assert ended_well(fork(lambda: lock.__exit__(None, None, None)))
        assert redis.hget(lock_of("a"), "nonce") == lock.ref.nonce

        def ask() -> None:
            assert lock.is_lost()
            with exclusive("a") as other:
                assert not other

        assert ended_well(fork(ask))
        assert not lock.is_lost()


def test_a_forked_child_keeps_locks_of_its_own(exclusive, redis):
    def hold() -> None:
        with exclusive("child", lease=LEASE) as lock:
            wait_until(lambda: age(lock) > LEASE + 0.5)
            assert not lock.is_lost()

    with exclusive("parent"):
        assert ended_well(fork(hold))
        assert redis.keys() == [lock_of("parent")]


# ---------------------------------------------------------------- the server is unreachable


@pytest.fixture
def away():
    """A server of its own that keeps its data when it is killed, and an app that does not wait for it for long."""
    with (
        RedisServer("--appendonly", "yes", "--appendfsync", "no") as server,
        make_app(server.celery_url, {"singlebeat_socket_timeout": 1.0}) as app,
    ):
        yield SimpleNamespace(server=server, app=app, exclusive=functools.partial(singlebeat.exclusive, app=app))


def test_without_a_server_no_caller_acquires_the_lock(away):
    away.server.kill()
    with pytest.raises(LockBackendError, match="does not answer"), away.exclusive("a"):
        pytest.fail("the body runs")


def test_a_lock_that_a_hung_server_grants_late_ends_with_its_lease(away):
    with away.exclusive("warm"):  # the script is known from here on
        pass
    away.server.pause()
    with pytest.raises(LockBackendError, match="does not answer"), away.exclusive("a", lease=LEASE):
        pytest.fail("the body runs")
    away.server.resume()

    def get() -> bool:
        with suppress(LockBackendError), away.exclusive("a") as lock:
            return bool(lock)
        return False

    wait_until(get, timeout=30)


def test_a_lock_outlives_an_outage_that_is_shorter_than_its_lease(away, lost, caplog):
    asked = SimpleQueue()
    backend = exclusive_renewer_of(away.app)._backend
    renew_many = backend.renew_many
    backend.renew_many = lambda refs, **options: (asked.put(refs), renew_many(refs, **options))[1]
    with away.exclusive("a", lease=30) as lock, away.exclusive("short", lease=LEASE):
        # Before the outage: once the short lock is lost, the first renewal after it is the only one for ten seconds.
        away.server.client().pexpire(lock_of("a"), 20_000)
        away.server.kill()
        for _ in range(3):
            asked.get(timeout=10)
        away.server.restart()
        redis = away.server.client()
        wait_until(lambda: redis.pttl(lock_of("a")) > 20_000, what="a renewal")
        wait_until(lambda: "exclusive locks are renewed again event=recovered" in caplog.text)
        assert not lock.is_lost()
    assert len([record for record in caplog.records if "does not answer" in record.getMessage()]) == 1
    assert lock_of("a") not in {key for _, key in lost}
    assert not redis.exists(lock_of("a"))


def test_in_an_outage_a_lock_is_held_until_its_lease_ends(away, lost):
    with away.exclusive("long", lease=600) as long, away.exclusive("short", lease=LEASE) as short:
        away.server.kill()
        assert not long.is_lost()
        wait_until(short.is_lost)
        assert not long.is_lost()
    assert lost == [("singlebeat.exclusive", lock_of("short"))]


def test_an_exit_without_a_server_is_logged_and_harmless(away, caplog):
    def body() -> None:
        with away.exclusive("a"):
            away.server.kill()
            raise KeyError("the body's")

    with pytest.raises(KeyError, match="the body's"):
        body()
    assert "'a' stays until its lease ends" in caplog.text


# ---------------------------------------------------------------- as a decorator


def test_a_decorated_function_runs_alone_per_key_or_returns_none(exclusive, caplog):
    caplog.set_level("INFO")

    @exclusive("import-feed:{feed_id}")
    def import_feed(feed_id: int, *, then=lambda: None):
        """Import it."""
        return feed_id, then()

    assert import_feed(7, then=lambda: import_feed(8)) == (7, (8, None))
    assert import_feed(7, then=lambda: import_feed(feed_id=7)) == (7, None)
    assert "import_feed is skipped event=duplicate function=" in caplog.text
    assert import_feed(7) == (7, None), "it is free again"
    assert (import_feed.__name__, import_feed.__doc__) == ("import_feed", "Import it.")


def test_the_key_is_made_of_the_arguments_however_they_are_written(exclusive, redis):
    @exclusive("{user.name}:{mode}:{options[x]}:{{}}")
    def sync(user, mode="full", **options):
        return redis.keys()

    ann = SimpleNamespace(name="ann")
    assert sync(ann, x=1) == sync(user=ann, mode="full", x=1) == [lock_of("ann:full:1:{}")]


def test_the_key_may_be_a_function_of_the_arguments(exclusive, redis):
    @exclusive(lambda number, *rest: f"{number % 10}:{rest}")
    def work(number, *rest):
        return redis.keys()

    assert work(27, 1) == [lock_of("7:(1,)")]
    assert work(number=27) == [lock_of("7:()")]


def test_methods_can_be_guarded(exclusive, redis):
    class Shop:
        name = "ours"

        @exclusive("{self.name}:{item}")
        def sell(self, item):
            return redis.keys()

    assert Shop().sell("tea") == [lock_of("ours:tea")]


def test_a_guarded_task_checks_its_arguments_at_the_call_like_any_task(app, redis):
    @app.task(shared=False, bind=True, name="guarded")
    @singlebeat.exclusive("{self.name}:{feed_id}")
    def guarded(self, feed_id):
        return redis.hget(lock_of("guarded:7"), "id")

    with pytest.raises(TypeError, match="feed_id"):
        guarded.delay()
    result = guarded.apply((7,))
    assert result.get() == result.id


def ran() -> str:
    return "ran"


@pytest.fixture
def delivered(app, monkeypatch):
    """Runs a guarded function as the body of a task with the id of a lock's holder."""
    monkeypatch.setattr("singlebeat.tasks.exclusive.AWAIT_DEAD_EACH", 0.05)

    def run(body: Callable[[], Any], *, ttl: float, redelivered: bool) -> Any:
        task = app.task(body, name="app.guarded", shared=False)
        held = Ref(lock_of("a"), "same", nonce="of the run that has died")
        backend_of(app).begin(held, lease=ttl, remember_for=0.0, task=task.name, arguments="")
        _task_stack.push(task)
        task.push_request(id="same", called_directly=False, delivery_info={"redelivered": redelivered})
        try:
            return task.run()
        finally:
            task.pop_request()
            _task_stack.pop()

    return run


@pytest.mark.parametrize(("redelivered", "returned"), [(True, "ran"), (False, None)])
def test_a_guarded_task_that_comes_back_waits_for_its_dead_run(delivered, exclusive, redis, redelivered, returned):
    assert delivered(exclusive("a", lease=5)(ran), ttl=0.3, redelivered=redelivered) == returned


def test_a_guarded_task_that_comes_back_while_it_runs_is_given_back(delivered, exclusive, redis):
    with pytest.raises(Reject) as given_back:
        delivered(exclusive("a", lease=0.2)(ran), ttl=60, redelivered=True)

    assert given_back.value.requeue


def test_a_guarded_function_in_its_own_lock_returns_none_at_once(delivered, exclusive, redis):
    @exclusive("b", lease=60)
    def outer() -> Any:
        return inner()

    @exclusive("b", lease=60)
    def inner() -> str:
        return "twice"

    assert delivered(outer, ttl=60, redelivered=True) is None


async def coroutine(): ...


def generator():
    yield


async def async_generator():
    yield


class AsyncCallable:
    async def __call__(self): ...


@pytest.mark.parametrize(
    "function", [coroutine, generator, async_generator, AsyncCallable(), functools.partial(coroutine)]
)
def test_a_function_that_returns_before_its_body_runs_is_refused(exclusive, function):
    with pytest.raises(TypeError, match="the lock would be free"):
        exclusive("a")(function)


@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
@pytest.mark.filterwarnings("error")
def test_a_call_that_returns_before_its_body_runs_is_refused(exclusive, redis, function):
    """Another decorator hides what it is."""

    @exclusive("a")
    @functools.wraps(function)
    def guarded():
        return function()

    with pytest.raises(TypeError, match="the lock would be free"):
        guarded()
    assert redis.exists(lock_of("a")) == 0


@pytest.fixture(params=["asyncio", "concurrent"])
def future(request):
    loop = asyncio.new_event_loop()
    yield loop.create_future() if request.param == "asyncio" else concurrent.futures.Future()
    loop.close()


def test_a_call_that_returns_a_future_is_refused_and_its_future_cancelled(exclusive, redis, future):
    with pytest.raises(TypeError, match="the lock would be free"):
        exclusive("a")(lambda: future)()

    assert future.cancelled()


def test_a_class_can_be_guarded_whatever_its_instances_do(exclusive):
    assert isinstance(exclusive("a")(AsyncCallable)(), AsyncCallable)


def test_a_function_whose_arguments_are_not_known_is_refused(exclusive):
    with pytest.raises(TypeError, match="no signature found for builtin"):
        exclusive("a")(max)


def test_a_task_is_refused_because_it_would_not_be_one_any_more(exclusive, app):
    with pytest.raises(TypeError, match=r"below @app\.task"):

        @exclusive("a")
        @app.task(shared=False, name="wrong way round")
        def task(): ...


@pytest.mark.parametrize("key", ["{feed}", "{}", "{0}", "{feed.id}", "{feed[id]!r:>5}"])
def test_a_key_that_names_no_argument_is_refused_at_the_definition(exclusive, key):
    with pytest.raises(TypeError, match="its arguments: feed_id"):

        @exclusive(key)
        def import_feed(feed_id): ...


def test_a_key_without_utf_8_is_refused_and_named(exclusive):
    with pytest.raises(ValueError, match=r"must be a string that UTF-8 can encode, not '\\ud800'"), exclusive("\ud800"):
        pass


@pytest.mark.parametrize("key", [7, None, b"a", len])
def test_a_key_that_is_no_string_is_refused(exclusive, key):
    with pytest.raises(TypeError, match="must be a string"), exclusive(key):
        pass
    with pytest.raises(TypeError, match="must be a string"):
        exclusive(lambda: key)(lambda: None)()
