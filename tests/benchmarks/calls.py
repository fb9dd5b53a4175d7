"""``delay()`` of a fresh call and of a duplicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery, Task

from tests.benchmarks.apps import OURS, PLAIN, THEIRS
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.stage import Stage, numbers
from tests.benchmarks.wire import counted

#: Side: task.
SIDES = {"plain task": PLAIN, "singlebeat": OURS, "celery-singleton": THEIRS}

#: What no lock in Redis can do without, through redis-py.
ONE_EVALSHA = "one bare EVALSHA"


def cases(stage: Stage) -> list[Case]:
    count = stage.size(1_000, quick=200)

    def micros(seconds: float) -> str:
        return f"{seconds / count * 1e6:,.0f} µs"

    return [
        Case("delay", f"delay() of a fresh call, {count:,} in a row", lambda: _fresh(stage, count), "≤ 1.0", micros),
        Case("duplicate", f"delay() of a duplicate, {count:,} in a row", lambda: _again(stage, count), "≤ 0.5", micros),
        Case("many", f"apply_async_many() of {count:,} fresh calls", lambda: _many(stage, count), "≤ 0.6", micros),
        Case(
            "duplicate-round-trips",
            "Round trips of delay() of a duplicate",
            lambda: _round_trips(stage),
            "1",
            show="{:.0f}".format,
            rounds=1,
            compare=False,
        ),
    ]


@contextmanager
def _fresh(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    def side(task: Task) -> float:
        stage.clear()
        return _timed(stage, task.delay, list(numbers(count)), expected=count)

    app, ask = stage.app("calls"), _evalsha(stage)

    def ask_and_delay(argument: str) -> None:
        ask()
        app.tasks[PLAIN].delay(argument)

    def floor() -> float:
        stage.clear()
        return _timed(stage, ask_and_delay, list(numbers(count)), expected=count)

    yield {**_sides(app, side), f"plain task and {ONE_EVALSHA}": floor}


@contextmanager
def _again(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    def side(task: Task) -> float:
        stage.clear()
        if task.name == PLAIN:
            return _timed(stage, task.delay, ["17"] * count, expected=count)
        task.delay("17")
        return _timed(stage, task.delay, ["17"] * count, expected=1)

    ask = _evalsha(stage)

    def floor() -> float:
        stage.clear()
        return _timed(stage, lambda _: ask(), ["17"] * count, expected=0)

    yield {**_sides(stage.app("calls"), side), ONE_EVALSHA: floor}


@contextmanager
def _many(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    app = stage.app("calls")

    def one_by_one() -> float:
        stage.clear()
        return _timed(stage, app.tasks[PLAIN].delay, list(numbers(count)), expected=count)

    def at_once() -> float:
        stage.clear()
        calls = [((number,), None, {}) for number in numbers(count)]
        seconds = timed(lambda: app.tasks[OURS].apply_async_many(calls))
        stage.expect_sent(count)
        return seconds

    yield {"plain task, delay() each": one_by_one, "singlebeat": at_once}


@contextmanager
def _round_trips(stage: Stage) -> Iterator[Mapping[str, Side]]:
    def side(task: Task) -> float:
        stage.clear()
        task.delay("17")
        with counted() as wire:
            task.delay("17")
        return wire.round_trips

    yield _sides(stage.app("calls"), side)


def _sides(app: Celery, measure: Callable[[Any], float]) -> Mapping[str, Side]:
    return {label: lambda name=name: measure(app.tasks[name]) for label, name in SIDES.items()}


def _evalsha(stage: Stage) -> Callable[[], Any]:
    sha = stage.client.script_load("return 1")
    return lambda: stage.client.evalsha(sha, 2, "lock", "done", "arguments")


def _timed(stage: Stage, call: Callable[[str], Any], arguments: list[str], *, expected: int) -> float:
    """Return the seconds of a call with each argument."""

    def send() -> None:
        for argument in arguments:
            call(argument)

    seconds = timed(send)
    stage.expect_sent(expected)
    return seconds
