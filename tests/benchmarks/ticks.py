"""One tick with many due entries: what it takes, what it sends, and what it takes without the publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from celery import Celery

from singlebeat.beat.store import BATCH
from tests.benchmarks.apps import OURS, PLAIN, THEIRS
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.stage import Stage, just_now, numbers, work_off
from tests.benchmarks.wire import counted

BARE = "apply_async in a loop"

#: Side: scheduler and task.
SIDES = {
    "singlebeat, plain task": ("singlebeat", PLAIN),
    "singlebeat, Singleton": ("singlebeat", OURS),
    "RedBeat, plain task": ("redbeat", PLAIN),
    "RedBeat, celery-singleton": ("redbeat", THEIRS),
}


def cases(stage: Stage) -> list[Case]:
    count = stage.size(5_000, quick=200)
    return [
        Case(
            "tick",
            f"One tick, {count:,} due entries, locked and published",
            lambda: _published(stage, count),
            "≤ 1.15",
        ),
        Case(
            "claim",
            f"The same, publishing stubbed: entries per second, {count:,} due",
            lambda: _stubbed(stage, count),
            "≥ 10,000 / s",
            show=lambda seconds: f"{count / seconds:,.0f} / s",
        ),
        Case(
            "commands",
            "Commands sent to Redis per due entry, without the publish",
            lambda: _counted(stage, count, lambda wire: wire.commands),
            "≤ 6",
            show="{:.2f}".format,
            rounds=1,
            warm_up=False,
        ),
        Case(
            "commands-run",
            "Commands that Redis runs per due entry, those inside of scripts included",
            lambda: _counted(stage, count, lambda wire: wire.commands_run),
            "",
            show="{:.2f}".format,
            rounds=1,
            warm_up=False,
        ),
        Case(
            "round-trips",
            "Round trips to Redis per due entry, without the publish",
            lambda: _counted(stage, count, lambda wire: wire.round_trips),
            "≤ 0.05",
            show="{:.3f}".format,
            rounds=1,
            warm_up=False,
        ),
    ]


@contextmanager
def _published(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    app = stage.app("floor")

    def bare() -> float:
        stage.clear()
        task = app.tasks[PLAIN]
        with app.producer_or_acquire() as producer:

            def send() -> None:
                for number in numbers(count):
                    task.apply_async((number,), producer=producer)

            seconds = timed(send)
        stage.expect_sent(count)
        return seconds

    with _schedulers(stage) as schedulers:

        def of(label: str) -> Side:
            def side() -> float:
                scheduler, task = _made_due(stage, schedulers[label], SIDES[label][1], count)
                seconds = timed(lambda: work_off(scheduler))
                stage.expect_sent(count)
                locks = len(stage.locks())
                if locks != (count if label != "RedBeat, plain task" else 0):
                    raise RuntimeError(f"{label}: {locks} locks for {count} entries of {task}: this measures nothing")
                return seconds

            return side

        yield {BARE: bare, **{label: of(label) for label in SIDES}}


@contextmanager
def _stubbed(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    with _schedulers(stage) as schedulers:
        _stub_publishing(schedulers)

        def of(label: str) -> Side:
            def side() -> float:
                scheduler, _ = _made_due(stage, schedulers[label], SIDES[label][1], count)
                return timed(lambda: work_off(scheduler))

            return side

        floor = {"pipelined writes of the same": lambda: timed(lambda: _write(stage, count))}
        yield {**floor, **{label: of(label) for label in SIDES if label != "RedBeat, celery-singleton"}}


def _write(stage: Stage, count: int) -> None:
    """Write what a tick writes: the claim, the lock and the decision, each for a batch in one round trip."""
    meta, occurrence, score = "m" * 170, "o" * 75, 2e9
    client, lock = stage.client, {"id": "i" * 36, "gen": 0, "state": "queued", "task": PLAIN, "args": "('17',)"}
    record = {"entry": "e17", "task": PLAIN, "nominal": "n" * 29, "decision": "dispatched", "id": "i" * 36, "term": 1}
    for at in range(0, count, BATCH):
        keys = [f"writes:e{number}" for number in range(at, min(at + BATCH, count))]
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hset(key, mapping={"meta": meta, "pending": occurrence})
                pipe.zadd("writes::schedule", {key: score})
                pipe.zadd("writes::pending", {key: score})
            pipe.execute()
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hset(f"{key}:lock", mapping=lock)
                pipe.pexpire(f"{key}:lock", 3_600_000)
            pipe.execute()
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hdel(key, "pending")
                pipe.zrem("writes::pending", key)
                pipe.xadd("writes::history", record, maxlen=10_000)
            pipe.execute()


@contextmanager
def _counted(stage: Stage, count: int, what: Callable[[Any], int]) -> Iterator[Mapping[str, Side]]:
    with _schedulers(stage) as schedulers:
        _stub_publishing(schedulers)

        def of(label: str) -> Side:
            def side() -> float:
                scheduler, _ = _made_due(stage, schedulers[label], SIDES[label][1], count)
                with counted(stage.client) as wire:
                    work_off(scheduler)
                return what(wire) / count

            return side

        # RedBeat's numbers are what the others are compared with.
        yield {label: of(label) for label in ("RedBeat, plain task", "singlebeat, plain task", "singlebeat, Singleton")}


@contextmanager
def _schedulers(stage: Stage) -> Iterator[Mapping[str, Any]]:
    """Return a scheduler for each side, all of them as a beat that has been running for a while."""
    with ExitStack() as stack:
        yield {
            label: stack.enter_context(getattr(stage, kind)(_app(stage, kind, task)))
            for label, (kind, task) in SIDES.items()
        }


def _app(stage: Stage, kind: str, task: str) -> Celery:
    return stage.app(f"{kind}-{task}")


def _made_due(stage: Stage, scheduler: Any, task: str, count: int) -> tuple[Any, str]:
    stage.clear()
    stage.store(scheduler.app.conf.redbeat_key_prefix, count, task, due=just_now())
    return scheduler, task


def _stub_publishing(schedulers: Mapping[str, Any]) -> None:
    for label, scheduler in schedulers.items():
        # RedBeat's ``apply_async`` also moves the entry on; ours is called when that is done.
        scheduler.apply_async = (
            (lambda entry, **_: None)
            if SIDES[label][0] == "singlebeat"
            else (lambda entry, scheduler=scheduler, **_: scheduler.reserve(entry))
        )
