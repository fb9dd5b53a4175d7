"""``delay()`` of a fresh call and of a duplicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Task

from tests.benchmarks.apps import OURS, PLAIN, THEIRS
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.stage import Stage, numbers
from tests.benchmarks.wire import counted

#: Side: task.
SIDES = {"plain task": PLAIN, "singlebeat": OURS, "celery-singleton": THEIRS}


def cases(stage: Stage) -> list[Case]:
    count = stage.size(3_000, quick=200)

    def micros(seconds: float) -> str:
        return f"{seconds / count * 1e6:,.0f} µs"

    return [
        Case("delay", f"delay() of a fresh call, {count:,} in a row", lambda: _fresh(stage, count), "≤ 1.12", micros),
        Case(
            "duplicate", f"delay() of a duplicate, {count:,} in a row", lambda: _again(stage, count), "≤ 0.25", micros
        ),
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
    yield _sides(stage, lambda task: _send(stage, task, list(numbers(count)), expected=count))


@contextmanager
def _again(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    def side(task: Task) -> float:
        if task.name == PLAIN:
            return _send(stage, task, ["17"] * count, expected=count)
        return _send(stage, task, ["17"] * count, expected=1, first=1)

    yield _sides(stage, side)


@contextmanager
def _round_trips(stage: Stage) -> Iterator[Mapping[str, Side]]:
    def side(task: Task) -> float:
        stage.clear()
        task.delay("17")
        with counted() as wire:
            task.delay("17")
        return wire.round_trips

    yield _sides(stage, side)


def _sides(stage: Stage, measure: Callable[[Any], float]) -> Mapping[str, Side]:
    app = stage.app("calls")
    return {label: lambda name=name: measure(app.tasks[name]) for label, name in SIDES.items()}


def _send(stage: Stage, task: Task, arguments: list[str], *, expected: int, first: int = 0) -> float:
    """Return the seconds of a call with each argument; before the clock starts, ``first`` of them are sent."""
    stage.clear()
    for argument in arguments[:first]:
        task.delay(argument)

    def send() -> None:
        for argument in arguments:
            task.delay(argument)

    seconds = timed(send)
    stage.expect_sent(expected)
    return seconds
