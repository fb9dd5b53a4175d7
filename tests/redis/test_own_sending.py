"""Entries whose task or app has a method of its own that sends the task: with another id, or with other headers."""

from __future__ import annotations

from asyncio import CancelledError
from typing import Any

import pytest
from celery import Celery, Task

from singlebeat import Singleton
from singlebeat.locks import backend_of
from tests.redis.bench import Bench


def with_own_id(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "task_id": f"own {options['task_id']}"}


def without_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"task_id": None}


def with_own_headers(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "headers": {"tenant": "shop"}}


def as_given(options: dict[str, Any]) -> dict[str, Any]:
    return options


CHANGES = [with_own_id, without_options, with_own_headers]


def body(name: str) -> None:
    raise AssertionError("no worker runs it here")


def put_task(bench: Bench, kind: type[Task], change: Any, **wishes: Any) -> Celery:
    """Store an entry of a task that changes the options of its calls; return an app that has the task."""

    class Own(kind):
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            return super().apply_async(args, kwargs, **change(options))

    app = bench.new_app()
    app.task(body, name="own", base=Own, shared=False)
    backend_of(app).announce("w@h", ttl=60)
    bench.put(task="own", **wishes)
    return app


def run_again(bench: Bench) -> None:
    bench.make_due()
    bench.tick()


@pytest.mark.parametrize("kind", [Task, Singleton])
@pytest.mark.parametrize("error", [ValueError, CancelledError])
def test_a_task_that_fails_to_send_itself_hinders_no_other(bench, kind, error):
    def fails(options: dict[str, Any]) -> dict[str, Any]:
        raise error

    app = put_task(bench, kind, fails)
    bench.put("other")

    bench.scheduler(app=app).tick()

    assert bench.names == ["other"]


@pytest.mark.parametrize("kind", [Task, Singleton])
def test_an_entry_whose_task_beat_runs_itself_runs_each_time(server, redis, bench_on, cli, kind):
    """As with task_always_eager in the settings of a developer, beside a worker that would free locks."""
    bench, ran = bench_on(server, task_always_eager=True), list[str]()
    app = bench.new_app()

    def note(name: str) -> None:
        ran.append(name)

    app.task(note, name="own", base=kind, shared=False)
    backend_of(app).announce("w@h", ttl=60)
    bench.put(task="own")

    bench.scheduler(app=app).tick()
    run_again(bench)

    assert ran == ["e", "e"]
    assert bench.decisions == ["dispatched", "dispatched"]
    assert redis.keys("SINGLETONLOCK_*") == []
    said = cli("explain", "e").output  # of an app that sends messages
    assert "beat has run it itself, because task_always_eager is set" in said
    assert "So workers record no end of it.\n" in said


@pytest.mark.parametrize("overlap", [None, "raise"])
@pytest.mark.parametrize("change", [*CHANGES, as_given])
def test_a_singleton_that_sends_itself_acquires_its_own_lock(bench, redis, logged, change, overlap):
    app = put_task(bench, Singleton, change)
    app.tasks["own"].overlap = overlap
    bench.scheduler(app=app).tick()
    assert bench.names == ["e"]

    run_again(bench)
    assert bench.names == ["e"]
    for key in redis.keys("SINGLETONLOCK_*"):
        redis.delete(key)
    run_again(bench)

    assert bench.names == ["e", "e"]
    assert bench.decisions == ["dispatched", "skipped_overlap", "dispatched"]
    assert bench.history[1]["holder"] == bench.ids[0]


@pytest.mark.parametrize("change", [with_own_id, with_own_headers, as_given])
def test_a_singleton_that_sends_itself_obeys_the_policy_of_its_entry(bench, change):
    bench.scheduler(app=put_task(bench, Singleton, change, overlap="buffer_all")).tick()
    run_again(bench)

    assert bench.names == ["e", "e"]
    assert bench.decisions == ["dispatched", "buffered"]


@pytest.mark.parametrize("by_app", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_plain_task_that_is_sent_otherwise_keeps_no_lock(bench, redis, logged, cli, change, by_app, monkeypatch):
    """Its worker would free no lock, and the next runs would be skipped."""
    app = put_task(bench, Task, as_given if by_app else change)
    if by_app:
        send = app.send_task
        monkeypatch.setattr(app, "send_task", lambda name, args, kwargs, **o: send(name, args, kwargs, **change(o)))
    scheduler = bench.scheduler(app=app)
    scheduler.tick()
    for _ in range(2):
        run_again(bench)

    assert bench.names == ["e"] * 3
    assert bench.decisions == ["dispatched"] * 3
    assert not [key for key in redis.keys("SINGLETONLOCK_*") if redis.type(key) == "hash" and redis.hget(key, "id")]
    assert [line["entry"] for line in logged("unlocked")] == ["e"]
    reason = bench.history[-1]["reason"]
    assert ("without its headers" if change is with_own_headers else bench.ids[-1]) in reason
    assert reason in cli("explain", "e", app=app).output.replace("\n", " ")


def test_a_plain_task_that_sends_itself_as_given_keeps_its_lock(bench, redis, logged):
    bench.scheduler(app=put_task(bench, Task, as_given)).tick()
    run_again(bench)

    assert bench.names == ["e"]
    assert bench.decisions == ["dispatched", "skipped_overlap"]
    assert logged("unlocked") == []
