"""The start of a beat with many static entries, and its ticks while nothing is due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from tests.benchmarks.apps import PLAIN
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.stage import MOST_AT_ONCE, Stage, now
from tests.benchmarks.wire import counted

#: Seconds between two occurrences of a static entry: long, so that none is due.
EVERY = 3600.0


def cases(stage: Stage) -> list[Case]:
    static, ticks = stage.size(10_000, quick=200), stage.size(200, quick=20)
    sizes = [10, stage.size(10_000, quick=100), stage.size(1_000_000, quick=1_000)]
    return [
        Case(
            "start-unchanged",
            f"Start with {static:,} static entries, none of them changed",
            partial(_start, stage, static, new=False),
            "≤ 3",
        ),
        Case(
            "start-new",
            f"Start with {static:,} static entries, all of them new",
            partial(_start, stage, static, new=True),
            "≤ 3",
        ),
        Case(
            "idle",
            f"A tick with nothing due, {ticks} in a row",
            partial(_idle, stage, sizes, ticks),
            "flat",
            show=lambda seconds: f"{seconds / ticks * 1e6:,.0f} µs",
        ),
        Case(
            "idle-round-trips",
            "Round trips of a tick with nothing due",
            partial(_idle, stage, sizes[:2], ticks, count=True),
            "≤ 2",
            show=lambda round_trips: f"{round_trips / ticks:.2f}",
            rounds=1,
            compare=False,
        ),
    ]


@contextmanager
def _start(stage: Stage, count: int, *, new: bool) -> Iterator[Mapping[str, Side]]:
    schedule = {f"e{n}": {"task": PLAIN, "schedule": EVERY, "args": [str(n)]} for n in range(count)}

    def side(scheduler: Any) -> float:
        prefix = scheduler.app.conf.redbeat_key_prefix
        if new:
            _forget(stage, prefix)
        seconds = timed(scheduler.setup_schedule)
        if (stored := stage.client.zcard(f"{prefix}:schedule")) != count:
            raise RuntimeError(f"{stored} entries were installed instead of {count}: this measures nothing")
        return seconds

    with (
        stage.singlebeat(stage.app("start-singlebeat", beat_schedule=schedule)) as ours,
        stage.redbeat(stage.app("start-redbeat", beat_schedule=schedule)) as theirs,
    ):
        written = _written(stage, "start-singlebeat:", count)

        def floor() -> float:
            if new:
                _forget(stage, "writes:")
            return timed(lambda: _write(stage, written))

        yield {
            "one pipeline that writes the same": floor,
            "singlebeat": partial(side, ours),
            "RedBeat": partial(side, theirs),
        }


def _written(stage: Stage, prefix: str, count: int) -> list[tuple[str, dict[str, str], float]]:
    """Return what a start has left in Redis: the names, hashes and scores of the entries."""
    scores = dict(stage.client.zrange(f"{prefix}:schedule", 0, -1, withscores=True))
    return [(f"e{n}", stage.client.hgetall(f"{prefix}e{n}"), scores[f"{prefix}e{n}"]) for n in range(count)]


def _write(stage: Stage, written: list[tuple[str, dict[str, str], float]]) -> None:
    with stage.client.pipeline(transaction=False) as pipe:
        for name, record, score in written:
            pipe.hset(f"writes:{name}", mapping=record)
            pipe.zadd("writes::schedule", {f"writes:{name}": score})
        names = [name for name, *_ in written]
        pipe.sadd("writes::statics", *names)
        pipe.hset("writes::owners", mapping=dict.fromkeys(names, "bench"))
        pipe.execute()


def _forget(stage: Stage, prefix: str) -> None:
    """Delete all entries of a prefix, and leave its lock."""
    entries = stage.client.scan_iter(match=f"{prefix}e*", count=MOST_AT_ONCE)
    stage.client.delete(*[f"{prefix}:{key}" for key in ("schedule", "statics", "owners")], *entries)


@contextmanager
def _idle(stage: Stage, sizes: list[int], ticks: int, *, count: bool = False) -> Iterator[Mapping[str, Side]]:
    def side(scheduler: Any) -> float:
        def tick() -> None:
            for _ in range(ticks):
                scheduler.tick()

        if not count:
            return timed(tick)
        with counted() as wire:
            tick()
        return wire.round_trips

    sides = {}
    with ExitStack() as stack:
        for size in sizes:
            stage.store(f"idle-{size}:", size, PLAIN, due=now() + timedelta(days=1))
        for kind, label in (("singlebeat", "singlebeat"), ("redbeat", "RedBeat")):
            for size in sizes:
                # Both on the same entries, so each needs a lock of its own.
                app = stage.app(f"idle-{size}", redbeat_lock_key=f":lock-{kind}")
                scheduler = stack.enter_context(getattr(stage, kind)(app))
                sides[f"{label}, {size:,} stored"] = partial(side, scheduler)
        yield sides
