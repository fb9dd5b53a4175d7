"""One tick with many due entries: what it takes, what it sends, and what it takes without the publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from singlebeat.beat.store.claims import BATCH
from tests.benchmarks.apps import OURS, PLAIN, THEIRS
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.processes import apart
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
            "≤ 0.85",
        ),
        Case(
            "tick-elsewhere",
            f"The same with the broker on another server, {count:,} due entries",
            lambda: _published(stage, count, is_elsewhere=True),
            "≤ 1.0",
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
def _published(stage: Stage, count: int, *, is_elsewhere: bool = False) -> Iterator[Mapping[str, Side]]:
    broker = Stage(stage.elsewhere) if is_elsewhere else stage
    conf = {"broker_url": broker.server.celery_url}

    @contextmanager
    def bare() -> Iterator[Side]:
        app = stage.app("floor", **conf)
        task = app.tasks[PLAIN]

        def side() -> float:
            broker.clear()
            with app.producer_or_acquire() as producer:

                def send() -> None:
                    for number in numbers(count):
                        task.apply_async((number,), producer=producer)

                seconds = timed(send)
            broker.expect_sent(count)
            return seconds

        yield side

    @contextmanager
    def tick(label: str) -> Iterator[Side]:
        with _scheduler(stage, label, **conf) as scheduler:

            def side() -> float:
                broker.clear()
                _make_due(stage, scheduler, label, count)
                seconds = timed(lambda: work_off(scheduler))
                broker.expect_sent(count)
                locks = len(stage.locks())
                if locks != (count if label != "RedBeat, plain task" else 0):
                    raise RuntimeError(f"{label}: {locks} locks for {count} entries: this measures nothing")
                return seconds

            yield side

    with _apart({BARE: bare, **{label: partial(tick, label) for label in SIDES}}) as sides:
        yield sides


@contextmanager
def _stubbed(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    @contextmanager
    def tick(label: str) -> Iterator[Side]:
        with _scheduler(stage, label) as scheduler:
            _stub_publishing(scheduler, label)

            def side() -> float:
                _make_due(stage, scheduler, label, count)
                return timed(lambda: work_off(scheduler))

            yield side

    def floor() -> AbstractContextManager[Side]:
        return nullcontext(lambda: timed(lambda: _write(stage, count)))

    labels = [label for label in SIDES if label != "RedBeat, celery-singleton"]
    with _apart({"pipelined writes of the same": floor, **{label: partial(tick, label) for label in labels}}) as sides:
        yield sides


@contextmanager
def _apart(sides: Mapping[str, Callable[[], AbstractContextManager[Side]]]) -> Iterator[Mapping[str, Side]]:
    """Run each side in a process of its own, as a beat has one scheduler."""
    with ExitStack() as stack:
        yield {label: stack.enter_context(apart(prepare)) for label, prepare in sides.items()}


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
    @contextmanager
    def tick(label: str) -> Iterator[Side]:
        with _scheduler(stage, label) as scheduler:
            _stub_publishing(scheduler, label)

            def side() -> float:
                _make_due(stage, scheduler, label, count)
                with counted(stage.client) as wire:
                    work_off(scheduler)
                return what(wire) / count

            yield side

    # RedBeat's numbers are what the others are compared with.
    labels = ("RedBeat, plain task", "singlebeat, plain task", "singlebeat, Singleton")
    with _apart({label: partial(tick, label) for label in labels}) as sides:
        yield sides


def _scheduler(stage: Stage, label: str, **conf: Any) -> AbstractContextManager[Any]:
    """Return the scheduler of a side, as in a beat that has been running for a while."""
    kind, task = SIDES[label]
    scheduler: AbstractContextManager[Any] = getattr(stage, kind)(stage.app(f"{kind}-{task}", **conf))
    return scheduler


def _make_due(stage: Stage, scheduler: Any, label: str, count: int) -> None:
    stage.clear()
    stage.store(scheduler.app.conf.redbeat_key_prefix, count, SIDES[label][1], due=just_now())


def _stub_publishing(scheduler: Any, label: str) -> None:
    # RedBeat's ``apply_async`` also moves the entry on; ours is called when that is done.
    ours = SIDES[label][0] == "singlebeat"
    scheduler.apply_async = lambda entry, **_: None if ours else scheduler.reserve(entry)
