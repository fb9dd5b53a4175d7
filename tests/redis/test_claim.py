"""What a call does about its lock before it is sent, and what is left of one that was not; without a worker."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import EncodeError, OperationalError
from redis import Redis

from singlebeat import Singleton
from singlebeat.errors import LockBackendError
from singlebeat.locks import backend_of
from singlebeat.locks.base import RUN_HEADER, Ref
from tests.support import free_port, wait_until
from tests.system.apps import make_app

MEMORY, LEASE = 3600.0, 60.0


def hold(value: Any, more: Any = None) -> None: ...


@pytest.fixture
def define(app) -> Callable[..., Any]:
    """Return a new Singleton with these options."""

    def define(function: Callable[..., Any] = hold, **options: Any) -> Any:
        return app.task(function, **{"name": "claimed", "base": Singleton, "shared": False, **options})

    return define


class Shop:
    """What others do to a lock: its calls run and end, all without a worker."""

    def __init__(self, app: Celery, redis: Redis) -> None:
        self.app, self.redis, self.backend = app, redis, backend_of(app)

    def begin(self, lock: str, task_id: str, generation: int = 0) -> Ref:
        run = Ref(lock, task_id, generation, f"run of {task_id}")
        self.backend.begin(run, lease=LEASE, memory=MEMORY, task="claimed", arguments="")
        return run

    def run(self, lock: str, task_id: str) -> None:
        """Let a call that waits run and end."""
        self.backend.finish_many([self.begin(lock, task_id)], memory=MEMORY, ran=True)

    @property
    def sent(self) -> list[str]:
        """The ids of the messages in the queue, the first one first."""
        return [json.loads(raw)["headers"]["id"] for raw in self.redis.lrange("celery", 0, -1)[::-1]]

    def holder(self, lock: str) -> list[str | None]:
        return self.redis.hmget(lock, "id", "state")


@pytest.fixture
def shop(app, redis) -> Shop:
    return Shop(app, redis)


@pytest.fixture
def revoked(app, server, redis) -> Iterator[Callable[[], list[str]]]:
    """Tells which task ids were revoked so far."""
    with redis.pubsub() as ears:
        ears.psubscribe("*pidbox*")
        wait_until(lambda: ears.get_message(timeout=5), what="the subscription")

        def revoked() -> list[str]:
            app.control.revoke("the last one")
            found: list[str] = []
            while True:
                message = wait_until(lambda: ears.get_message(timeout=5), what="a revocation")
                body = json.loads(message["data"])["body"]
                arguments = json.loads(b64decode(body))["arguments"]
                if arguments["task_id"] == "the last one":
                    return found
                found.append(arguments["task_id"])

        yield revoked


def by_beat(task: Any, task_id: str, *args: Any, **options: Any) -> Any:
    """Send a call as beat does: under an id that is computed, and may have been sent before."""
    return task.apply_async(args, task_id=task_id, headers={RUN_HEADER: {"entry": "e"}}, **options)


# ---------------------------------------------------------------- a call that was sent before


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other", "buffer_one"])
@pytest.mark.parametrize("waiting", [False, True], ids=["runs", "waits"])
def test_a_call_that_has_run_does_nothing_to_the_one_after_it(define, shop, revoked, overlap, waiting):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    by_beat(task, "first", 1)
    shop.run(lock, "first")
    task.apply_async([1], task_id="second")
    if not waiting:
        shop.begin(lock, "second")
    before = shop.redis.hgetall(lock)

    result = by_beat(task, "first", 1)

    assert (result.id, result.is_duplicate) == ("first", True)
    assert revoked() == []
    assert shop.sent == ["first", "second"]
    assert shop.redis.hgetall(lock) == before


# ---------------------------------------------------------------- a call that cannot be sent


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_a_call_that_cannot_be_encoded_ends_nothing(define, shop, revoked, overlap):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    shop.begin(lock, "running")

    with pytest.raises(EncodeError):
        task.delay(1, object())

    assert revoked() == []
    assert shop.redis.keys("SINGLETONLOCK_*") == [lock]


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_a_call_that_cannot_take_its_place_in_the_queue_ends_nothing(define, shop, revoked, overlap):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    shop.begin(lock, "running")
    shop.redis.set(f"{lock}:next", "no lock")

    with pytest.raises(LockBackendError, match="no lock"):
        task.delay(1)

    assert revoked() == []
    assert shop.sent == []


def test_the_latest_call_ends_the_one_that_runs_and_leaves_its_arguments_to_the_one_that_waits(define, shop, revoked):
    task = define(overlap="cancel_other", unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    shop.begin(lock, "running")
    task.apply_async([1, "early"], task_id="waits")
    early = shop.redis.hget(f"{lock}:next", "payload")

    result = task.delay(1, "late")

    assert (result.id, result.is_duplicate) == ("waits", True)
    assert revoked() == ["running", "running"]
    assert shop.redis.hget(f"{lock}:next", "payload") != early


def test_a_call_that_cannot_say_whom_it_ends_leaves_no_lock(server, redis):
    no_retries = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    away = {"broker_url": f"redis://127.0.0.1:{free_port()}", "broker_transport_options": no_retries}
    with make_app(server.celery_url, away) as app:
        task = app.task(hold, name="claimed", base=Singleton, shared=False, overlap="cancel_other")
        lock = task.generate_lock(task.name, [1])
        Shop(app, redis).begin(lock, "running")

        with pytest.raises(OperationalError):
            task.delay(1)

        assert redis.keys("SINGLETONLOCK_*") == [lock]
