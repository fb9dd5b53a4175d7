"""RabbitMQ as the broker: with locks and schedule in Redis, and with no Redis at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from celery import Celery
from celery.schedules import schedule
from kombu import Exchange, Queue

from singlebeat.locks.base import HEADER, Ticket
from tests.support import APP, CeleryLauncher, CeleryProcess, Oracle, RedisServer, wait_until
from tests.system.apps import make_app
from tests.system.rabbitmq import RabbitMQ, find_rabbitmq

SINGLE = f"{APP}.single"


@pytest.fixture(scope="module")
def rabbit() -> Iterator[RabbitMQ]:
    if find_rabbitmq() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("RabbitMQ is not installed")
    with RabbitMQ() as rabbit:
        yield rabbit


class Scene:
    """Workers, beats and a sender whose broker is RabbitMQ."""

    def __init__(self, celery: CeleryLauncher, oracle: Oracle, conf: Mapping[str, Any]) -> None:
        self.celery, self.oracle, self.conf = celery, oracle, conf

    def start(self, *command: str, **conf: Any) -> CeleryProcess:
        environment = {"SB_TEST_URL": self.conf["broker_url"]}  # what is not set is not in Redis
        return self.celery(*command, env=environment, conf={**self.conf, **conf})

    def app(self) -> Celery:
        return make_app(self.conf["broker_url"], self.conf)


def beat_worker_and_singleton(scene: Scene) -> None:
    """Beat sends, the worker runs, a call meets its equal; schedule and locks are in Redis."""
    tick = {"task": SINGLE, "schedule": schedule(0.5), "args": ["tick"]}
    scene.start("worker", "-c", "2").ready()
    scene.start("beat", beat_schedule={"tick": tick})
    oracle = scene.oracle
    with scene.app() as app:
        single = app.tasks[SINGLE]
        oracle.wait_ended(3, "tick", timeout=60)
        first = single.delay("one", seconds=60)
        oracle.wait_started(1, "one")
        again = single.delay("one", seconds=60)
        assert (again.id, again.is_duplicate) == (first.id, True)
        oracle.let_go("one")
        assert first.get(timeout=60) == "one"
    ids = [run.id for run in oracle.runs("tick")]
    assert len(set(ids)) == len(ids)
    assert oracle.max_concurrent("one") == oracle.started("one") == oracle.max_concurrent("tick") == 1


def a_message_of_a_killed_worker(scene: Scene) -> None:
    """RabbitMQ delivers it again at once, under the lease of the dead run: it waits, and then runs once more."""
    late = {"task_acks_late": True, "worker_prefetch_multiplier": 1, "singlebeat_lock_lease": 6}
    oracle = scene.oracle
    scene.conf = {**scene.conf, **late}
    doomed = scene.start("worker", "-c", "1").ready()
    with scene.app() as app:
        single = app.tasks[SINGLE]
        call = single.delay("one", seconds=60)
        oracle.wait_started(1, "one")
        heir = scene.start("worker", "-c", "1").ready()

        doomed.kill_group()

        heir.wait_for(rf"{SINGLE}\[{call.id}\].*received", timeout=60)
        assert single.delay("one", seconds=60).id == call.id, "the lock is held for it"
        oracle.wait_started(2, "one", timeout=60)
        oracle.let_go("one")
        assert call.get(timeout=60) == "one"
        assert oracle.max_concurrent("one") == 1
        assert {run.id for run in oracle.runs("one")} == {call.id}
        assert single.delay("one").get(timeout=60) == "one", "its lock is free"


def no_redis_at_all(scene: Scene) -> None:
    """Equal runs exclude one another by asking the workers through RabbitMQ; results go there as well."""
    scene.conf = {
        **scene.conf,
        "result_backend": "rpc://",
        "redbeat_redis_url": None,
        "singleton_backend_url": None,
        "singleton_backend_class": "singlebeat.locks.inspect:InspectBackend",
        "singleton_backend_kwargs": {"timeout": 3, "settle": 0.5},
        "worker_prefetch_multiplier": 1,
    }
    oracle = scene.oracle
    workers = [scene.start("worker", "-c", "2") for _ in range(2)]
    for worker in workers:
        worker.ready()
    with scene.app() as app:
        single = app.tasks[SINGLE]
        calls = [single.delay("one", seconds=60) for _ in range(3)]
        oracle.wait_started(1, "one", timeout=60)
        skipped = rf"{SINGLE}\[.* is skipped .*its lock is held by task"
        wait_until(lambda: sum(len(w.matches(skipped)) for w in workers) == 2, timeout=60, what="two to be skipped")
        runner = oracle.running("one")[0].id
        oracle.let_go("one")
        assert next(call for call in calls if call.id == runner).get(timeout=60) == "one"
    assert oracle.started("one") == 1
    assert not [line for worker in workers for line in worker.lines if "redis" in line.lower()]


CASES: dict[str, Callable[[Scene], None]] = {
    "beat, worker and Singleton": beat_worker_and_singleton,
    "a message of a killed worker": a_message_of_a_killed_worker,
    "no Redis at all": no_redis_at_all,
}


# One server for all of them: it takes ten seconds to start.
@pytest.mark.parametrize("case", CASES.values(), ids=[f"rabbitmq: {name}" for name in CASES])
def test_rabbitmq_is_a_broker_like_any_other(
    case: Callable[[Scene], None], rabbit: RabbitMQ, celery: CeleryLauncher, oracle: Oracle, server: RedisServer
) -> None:
    conf = {
        "broker_url": rabbit.url,
        "task_default_queue": f"queue {list(CASES.values()).index(case)}",
        "result_backend": server.celery_url,
        "redbeat_redis_url": server.url,
        "singleton_backend_url": server.url,
    }
    case(Scene(celery, oracle, conf))


@pytest.mark.parametrize("task", ["rejecting", "single_rejecting"])
def test_a_dead_lettered_message_that_comes_back_runs_again(task, rabbit, celery, oracle, server, redis):
    """The usual delayed retry: reject, wait in a queue without consumers until its TTL ends, and come back."""
    work, waiting = f"work of {task}", f"waiting of {task}"
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": waiting}
    queue = {"exchange": work, "routing_key": work, "queue_arguments": back}
    conf = {"broker_url": rabbit.url, "result_backend": server.celery_url, "singleton_backend_url": server.url}
    conf |= {"task_default_queue": work, "task_queues": {work: queue}, "singlebeat_lock_lease": 300}
    scene = Scene(celery, oracle, conf)
    worker = scene.start("worker", "-c", "2").ready()
    with scene.app() as app:
        there = {"x-message-ttl": 300, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": work}
        with app.connection_for_write() as connection:
            Queue(waiting, Exchange(""), waiting, queue_arguments=there, channel=connection).declare()
        sent, lock = app.tasks[f"{APP}.{task}"], "SINGLETONLOCK_{a}"
        headers = {HEADER: Ticket("a", lock, lock).header()}

        sent.apply_async(("a", 4, False), task_id="a", headers=headers)

        oracle.wait_ended(4, timeout=60)
        wait_until(lambda: not redis.exists(lock), timeout=60, what="the end of the lock")
        # What a broker delivers twice is still a copy.
        sent.apply_async(("a", 4, False), task_id="a", headers=headers)
        worker.wait_for(rf"{APP}.{task}\[a\] has run already", timeout=60)
    assert (oracle.started("a"), oracle.max_concurrent("a")) == (4, 1)
