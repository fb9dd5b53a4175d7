"""Backends that were written for celery-singleton: four methods, any store, and our verbs on top of them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from singlebeat import Singleton
from singlebeat.errors import ConfigError, LockBackendError
from singlebeat.locks import backend_of, clear_locks, new_backend
from singlebeat.locks.base import BaseBackend, Call, Holder, Ref, Renewal, Verdict
from singlebeat.locks.legacy import LegacyBackend
from singlebeat.locks.memory import MemoryBackend
from tests.support import APP, RedisServer, wait_until
from tests.system.apps import make_app

LOCK = "SINGLETONLOCK_digest"
LEASE, MEMORY, QUEUED_TTL = 300.0, 900.0, 600.0

RUN = Ref(LOCK, "a", nonce="n1")
RETRY = Ref(LOCK, "a", 1, "n2")
OTHER = Ref(LOCK, "b", nonce="n3")


class FileBackend:
    """A custom backend without Redis: a table in a file. It has no base class."""

    def __init__(self, url: str, *, patience: float = 10.0) -> None:
        self.url, self.patience = url, patience

    def _execute(self, statement: str, *values: Any) -> list[Any]:
        connection = sqlite3.connect(self.url.removeprefix("file:"), timeout=self.patience, isolation_level=None)
        try:
            connection.execute("CREATE TABLE IF NOT EXISTS locks (lock TEXT PRIMARY KEY, id TEXT, ends REAL)")
            connection.execute("DELETE FROM locks WHERE ends < ?", (time.time(),))
            return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def lock(self, lock: str, task_id: str, expiry: int | None = None) -> bool:
        ends = time.time() + expiry if expiry else None
        return bool(self._execute("INSERT OR IGNORE INTO locks VALUES (?, ?, ?) RETURNING id", lock, task_id, ends))

    def unlock(self, lock: str) -> None:
        self._execute("DELETE FROM locks WHERE lock = ?", lock)

    def get(self, lock: str) -> str | None:
        rows = self._execute("SELECT id FROM locks WHERE lock = ?", lock)
        return rows[0][0] if rows else None

    def clear(self, key_prefix: str) -> None:
        self._execute("DELETE FROM locks WHERE substr(lock, 1, ?) = ?", len(key_prefix), key_prefix)


class BytesBackend:
    """A custom backend in the way of many: its own client, which gives bytes, and takes no fractions of seconds."""

    def __init__(self, url: str) -> None:
        self.redis = Redis.from_url(url)

    def lock(self, lock: str, task_id: str, expiry: int | None = None) -> bool:
        return bool(self.redis.set(lock, task_id, nx=True, ex=expiry))

    def unlock(self, lock: str) -> None:
        self.redis.delete(lock)

    def get(self, lock: str) -> bytes | None:
        return self.redis.get(lock)

    def clear(self, key_prefix: str) -> None:
        for key in self.redis.scan_iter(f"{key_prefix}*"):
            self.redis.delete(key)


@pytest.fixture(params=[FileBackend, BytesBackend], ids=["a file", "bytes in Redis"])
def backend(request: pytest.FixtureRequest, server: RedisServer, redis: Redis, tmp_path: Path) -> LegacyBackend:
    url = f"file:{tmp_path / 'locks'}" if request.param is FileBackend else server.url
    return LegacyBackend(request.param(url))


def acquire(backend: BaseBackend, ref: Ref = RUN, *, expiry: float | None = None) -> Holder:
    return backend.acquire_many([Call(replace(ref, nonce=""), "app.task", "1", QUEUED_TTL, expiry)])[0]


def begin(backend: BaseBackend, ref: Ref = RUN, *, expiry: float | None = None) -> Holder:
    return backend.begin(ref, lease=LEASE, remember_for=MEMORY, task="app.task", arguments="1", expiry=expiry)


def finish(backend: BaseBackend, ref: Ref = RUN) -> None:
    backend.finish_many([ref], remember_for=MEMORY, ran=True)


def test_a_call_acquires_a_free_lock_and_its_equal_learns_the_holder(backend):
    assert acquire(backend).verdict is Verdict.ACQUIRED
    assert acquire(backend).verdict is Verdict.ACQUIRED, "a repeated publish must go on"

    held = acquire(backend, OTHER)

    assert (held.verdict, held.task_id) == (Verdict.HELD, "a")
    assert backend.get(LOCK) == "a"


def test_a_run_starts_under_its_own_lock_or_a_free_one_and_under_no_other(backend):
    acquire(backend)

    assert begin(backend).verdict is Verdict.STARTED
    assert begin(backend, OTHER).verdict is Verdict.HELD
    finish(backend)
    assert begin(backend, OTHER).verdict is Verdict.STARTED
    assert backend.get(LOCK) == "b"


def test_only_its_own_run_frees_a_lock(backend):
    begin(backend)
    finish(backend, OTHER)
    finish(backend, RETRY)
    assert backend.get(LOCK) == "a"

    finish(backend)

    assert backend.get(LOCK) is None


def test_a_living_run_keeps_its_lock_and_hears_when_it_is_lost(backend):
    begin(backend)
    assert backend.renew_many([RUN, OTHER, RETRY], lease=LEASE) == [Renewal.RUNNING, Renewal.LOST, Renewal.LOST]

    backend.unlock(LOCK)

    assert backend.renew_many([RUN], lease=LEASE) == [Renewal.LOST]
    assert backend.get(LOCK) is None


def test_a_run_leaves_its_lock_to_its_retry(backend):
    begin(backend)
    assert backend.promise(RUN, to=RETRY, ttl=QUEUED_TTL)
    assert begin(backend, OTHER).verdict is Verdict.HELD
    finish(backend)

    assert backend.get(LOCK) == "a"
    assert acquire(backend, OTHER).task_id == "a"
    assert acquire(backend).verdict is Verdict.RUNNING, "its first message must not be sent again"
    assert backend.renew_many([RUN], lease=LEASE) == [Renewal.OVER]
    assert begin(backend, RETRY).verdict is Verdict.STARTED
    assert begin(backend).verdict is Verdict.STALE
    finish(backend, RETRY)
    assert backend.get(LOCK) is None


def test_the_main_process_leaves_the_lock_of_a_run_to_its_retry(backend):
    main = LegacyBackend(backend.custom)  # it knows nothing of the promise
    begin(backend)
    backend.promise(RUN, to=RETRY, ttl=QUEUED_TTL)
    finish(backend)

    finish(main)

    assert backend.get(LOCK) == "a"


def test_a_promise_that_was_taken_back_leaves_nothing(backend):
    begin(backend)
    backend.promise(RUN, to=RETRY, ttl=QUEUED_TTL)
    assert backend.promise(RUN, to=None, ttl=0)
    finish(backend)

    assert backend.get(LOCK) is None
    assert not backend.promise(RUN, to=RETRY, ttl=QUEUED_TTL), "it holds nothing that it could promise"


def test_a_retry_leaves_its_lock_to_the_next_one(backend):
    begin(backend, RETRY)

    # The sender knows a run by its nonce: Celery hides from it how often the task was retried.
    assert backend.promise(replace(RETRY, generation=0), to=replace(RETRY, generation=2, nonce=""), ttl=QUEUED_TTL)
    finish(backend, RETRY)

    assert backend.get(LOCK) == "a"
    assert begin(backend, OTHER).verdict is Verdict.HELD
    assert begin(backend, replace(RETRY, generation=2, nonce="n4")).verdict is Verdict.STARTED


def test_a_retry_goes_on_without_the_last_word_of_its_run(backend):
    begin(backend)

    assert begin(backend, RETRY).verdict is Verdict.STARTED
    finish(backend)
    assert backend.get(LOCK) == "a"
    assert backend.renew_many([RETRY], lease=LEASE) == [Renewal.RUNNING]


def test_a_message_that_the_broker_takes_back_keeps_its_lock(backend):
    begin(backend)

    assert backend.rotate(RUN, to=replace(RUN, nonce=""), ttl=QUEUED_TTL, remember_for=MEMORY)
    assert not backend.rotate(OTHER, to=replace(OTHER, nonce=""), ttl=QUEUED_TTL, remember_for=MEMORY)
    assert backend.get(LOCK) == "a"
    assert begin(backend, replace(RUN, nonce="n9")).verdict is Verdict.STARTED


@pytest.mark.parametrize("verb", [acquire, begin])
def test_a_lock_ends_at_its_expiry(backend, verb):
    verb(backend, expiry=0.5)

    wait_until(lambda: backend.get(LOCK) is None, what="the end of the lock")


def test_people_free_locks(backend):
    begin(backend)
    begin(backend, Ref("another", "c"))
    backend.clear("SINGLETONLOCK_")

    assert backend.get(LOCK) is None
    assert backend.get("another") == "c"
    backend.unlock("another")
    assert backend.get("another") is None
    assert backend.lock(LOCK, "d", 60) is True
    assert backend.lock(LOCK, "e") is False


class Broken:
    """A custom backend of which every method fails, each in its own way."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    def lock(self, lock, task_id, expiry=None):
        raise OSError("disk full")

    unlock = get = clear = property(lambda self: 1 / 0)


class Forgetful(Broken):
    """It refuses every lock, and names no holder."""

    def lock(self, lock, task_id, expiry=None):
        return False

    def get(self, lock):
        return None


@pytest.mark.parametrize(
    "verb",
    [
        acquire,
        begin,
        finish,
        lambda b: b.rotate(RUN, to=RETRY, ttl=1, remember_for=1),
        lambda b: b.promise(RUN, to=RETRY, ttl=1),
        lambda b: b.renew_many([RUN], lease=1),
        lambda b: b.get(LOCK),
        lambda b: b.unlock(LOCK),
        lambda b: b.clear("S"),
    ],
)
def test_any_error_of_a_custom_backend_is_a_lock_error_that_names_it(verb):
    with pytest.raises(LockBackendError, match=r"^the lock backend Broken failed: "):
        verb(LegacyBackend(Broken(None)))


def test_a_custom_backend_that_refuses_without_a_holder_is_an_error():
    with pytest.raises(LockBackendError, match=r"^Forgetful.lock\('SINGLETONLOCK_digest'\) refuses a lock, but get"):
        acquire(LegacyBackend(Forgetful(None)))


# ---------------------------------------------------------------- which backend an app has


def app_with(**conf: Any) -> Celery:
    app = Celery(set_as_current=False)
    app.conf.update(conf)
    return app


@pytest.mark.parametrize(
    ("conf", "url"),
    [
        ({"singleton_backend_url": "file:x", "result_backend": "redis://result"}, "file:x"),
        ({"result_backend": "redis://result", "broker_url": "amqp://broker"}, "redis://result"),
        ({"result_backend": "rpc://", "broker_url": "amqp://broker"}, "amqp://broker"),
        ({"broker_url": "amqp://broker"}, "amqp://broker"),
    ],
)
def test_a_custom_backend_is_built_as_celery_singleton_does(conf, url):
    app = app_with(singleton_backend_class=f"{__name__}.FileBackend", singleton_backend_kwargs={"patience": 3}, **conf)

    backend = backend_of(app)

    assert isinstance(backend, LegacyBackend)
    assert type(backend.custom).__name__ == "FileBackend"
    assert (backend.custom.url, backend.custom.patience) == (url, 3)
    assert new_backend(app, own_connections=True).custom is not backend.custom


def test_a_backend_of_celery_singletons_own_base_class_is_a_custom_one():
    base = pytest.importorskip("celery_singleton.backends.base").BaseBackend

    class Custom(Broken, base):
        unlock = get = clear = lambda self, _: None

    app = app_with(singleton_backend_class=Custom, broker_url="amqp://")

    assert isinstance(backend_of(app), LegacyBackend)
    assert isinstance(backend_of(app).custom, Custom)


def test_a_backend_of_ours_is_taken_as_it_is_and_needs_no_url():
    class Mine(MemoryBackend):
        pass

    app = app_with(singleton_backend_class=Mine, broker_url="amqp://", result_backend="rpc://")

    assert type(backend_of(app)) is Mine


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"singleton_backend_class": "no.such.module.Class"}, "cannot import 'no.such.module.Class'"),
        ({"singleton_backend_class": f"{__name__}:Nobody"}, f"cannot import '{__name__}:Nobody'"),
        (
            {"singleton_backend_class": FileBackend, "singleton_backend_kwargs": {"colour": 1}},
            r"cannot build <class .*FileBackend'>: TypeError",
        ),
    ],
)
def test_an_unusable_backend_class_is_an_error_that_names_the_setting(conf, message):
    with pytest.raises(ConfigError, match=f"^singleton_backend_class: {message}"):
        backend_of(app_with(**conf))


# ---------------------------------------------------------------- with real workers


@pytest.fixture
def custom(tmp_path: Path) -> dict[str, Any]:
    """Settings of an app that keeps its locks in a file."""
    return {
        "singleton_backend_class": "tests.redis.test_legacy_backend.FileBackend",
        "singleton_backend_url": f"file:{tmp_path / 'locks'}",
    }


@pytest.fixture
def sender(server: RedisServer, redis: Redis, custom: dict[str, Any]) -> Iterator[Celery]:
    with make_app(server.celery_url, custom) as app:
        yield app


def latest(user: str, number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("backend_class", "name"),
    [(FileBackend, "FileBackend"), ("singlebeat.locks.inspect:InspectBackend", "InspectBackend")],
)
@pytest.mark.parametrize("overlap", ["buffer_one", "cancel_other", "terminate_other"])
def test_a_backend_that_cannot_keep_a_policy_refuses_its_calls(tmp_path, backend_class, name, overlap):
    conf = {"singleton_backend_class": backend_class}
    conf |= {"singleton_backend_url": f"file:{tmp_path}/locks"} if backend_class is FileBackend else {}
    with app_with(**conf) as app:
        task = app.task(latest, name="shop.bill", base=Singleton, shared=False, unique_on="user")

        with pytest.raises(ConfigError, match=f"shop.bill: overlap {overlap} needs .* which {name} cannot"):
            task.apply_async(["a", 1], overlap=overlap)


def test_a_worker_runs_equal_calls_one_at_a_time_with_a_custom_backend(celery, custom, sender, oracle, redis):
    single = sender.tasks[f"{APP}.single"]
    celery("worker", "-c", "2", conf=custom).ready()
    first = single.delay("one", seconds=60)
    oracle.wait_started(1, "one")

    duplicate = single.delay("one", seconds=60)
    other = single.delay("two")

    assert (duplicate.id, duplicate.is_duplicate) == (first.id, True)
    assert other.get(timeout=30) == "two"
    oracle.let_go("one")
    assert first.get(timeout=30) == "one"
    second = single.delay("one")
    assert not second.is_duplicate
    assert second.get(timeout=30) == "one"
    assert not redis.keys("SINGLETONLOCK_*")
    single.delay("three", seconds=60)
    oracle.wait_started(1, "three")
    clear_locks(sender)
    assert not single.delay("three").is_duplicate


def test_a_task_keeps_its_lock_in_a_custom_backend_through_its_retries(celery, custom, sender, oracle):
    retrying = sender.tasks[f"{APP}.single_retrying"]
    worker = celery("worker", "-c", "2", conf=custom).ready()
    first = retrying.delay("one", 3, seconds=60)

    for count in (1, 2, 3):
        oracle.wait_started(count, "one")
        if count > 1:  # by now the main process has done what it does at the end of a run
            worker.wait_for("Retry in", count=count - 1)
        assert retrying.delay("one", 3, seconds=60).id == first.id
        oracle.let_go("one")

    assert first.get(timeout=30) == "one"
    assert oracle.max_concurrent("one") == 1
    wait_until(
        lambda: backend_of(sender).get(retrying.generate_lock(retrying.name, ["one", 3], {"seconds": 60})) is None
    )
