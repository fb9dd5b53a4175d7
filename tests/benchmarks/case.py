"""What a benchmark is, and how its sides are run: one after the other, round after round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

#: Makes ready by itself, measures, and returns one number, of which less is better.
Side = Callable[[], float]


def milliseconds(value: float) -> str:
    """Show seconds."""
    return f"{value * 1000:,.0f} ms" if value >= 0.1 else f"{value * 1000:,.2f} ms"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        name: for ``--only``.
        what: what is measured.
        sides: prepares the sides and returns them by their labels; the first is what the others are compared with.
        target: what singlebeat is to reach.
        show: renders one measured number.
        rounds: at most so many, where one takes long.
        warm_up: run every side once before the first round.
        compare: show how the sides compare with the first.
    """

    name: str
    what: str
    sides: Callable[[], AbstractContextManager[Mapping[str, Side]]]
    target: str
    show: Callable[[float], str] = milliseconds
    rounds: int = 1_000
    warm_up: bool = True
    compare: bool = True


@dataclass(frozen=True)
class Line:
    """What was measured of one side."""

    label: str
    values: tuple[float, ...]
    ratios: tuple[float, ...]  #: to the first side in the same round
    base: float  #: the best value of the first side

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def best(self) -> float:
        """The ratio of the best rounds: what other work on the machine disturbs least."""
        return min(self.values) / self.base

    @property
    def quartiles(self) -> tuple[float, float]:
        """The quartiles of the ratio."""
        if len(self.ratios) == 1:
            return self.ratios[0], self.ratios[0]
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high


def timed(body: Callable[[], object]) -> float:
    """Return the seconds that a body takes; what was garbage before it is not collected at its cost."""
    gc.collect()
    begun = time.perf_counter()
    body()
    return time.perf_counter() - begun


def run(case: Case, rounds: int) -> list[Line]:
    """Measure all sides of a case: A B, B A, A B, …, so that a change of the machine's load meets all alike."""
    rounds = min(rounds, case.rounds)
    with case.sides() as sides:
        labels = list(sides)
        measured: dict[str, list[float]] = {label: [] for label in labels}
        if case.warm_up:
            for side in sides.values():
                side()
        for number in range(rounds):
            for label in labels if number % 2 == 0 else reversed(labels):
                measured[label].append(sides[label]())
    first = measured[labels[0]]
    return [
        Line(label, tuple(values), tuple(value / base for value, base in zip(values, first, strict=True)), min(first))
        for label, values in measured.items()
    ]
