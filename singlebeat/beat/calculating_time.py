"""The calculating time of a beat: entries with expensive times wait for the others, so that these are not late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..log import Log
from .calendar.recurrence import is_cheap

if TYPE_CHECKING:
    from .entries.entry import Entry

__all__ = ("CalculatingTime",)

log = Log("celery.beat")

#: Seconds that the expensive entries of a tick may take together. The last of them may take longer.
BUDGET = 1.0

#: Seconds from which an entry is expensive: a batch of entries that are just not expensive takes a few seconds.
EXPENSIVE_FROM = 0.01

#: Entries whose costs are remembered.
MOST_COSTS = 10_000

#: The order of entries: those that were never calculated come after the cheap ones.
CHEAP, UNKNOWN, EXPENSIVE = range(3)


class CalculatingTime:
    """The time that a beat has for the times of expensive entries.

    Only this process knows what an entry has cost. An entry is known by its definition.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = BUDGET
        self._costs: dict[str, float] = {}  #: seconds, by definition
        self._logged = set[str]()

    def begin(self) -> None:
        """Allow for expensive entries again."""
        self._left = BUDGET

    def rank(self, definition: str, entry: Entry) -> int:
        """Return the place of an entry in the order in which entries are calculated."""
        if is_cheap(entry.schedule):
            return CHEAP
        cost = self._costs.get(definition)
        if cost is None:
            return UNKNOWN
        return CHEAP if cost < EXPENSIVE_FROM else EXPENSIVE

    def has_for(self, definition: str, entry: Entry) -> bool:
        """Return whether the times of an entry may be calculated now; log it once if an expensive entry must wait."""
        rank = self.rank(definition, entry)
        if self._left > 0 or rank == CHEAP:
            return True
        if rank == EXPENSIVE and definition not in self._logged:
            self._logged.add(definition)
            about = {"entry": entry.name, "seconds": self._costs[definition]}
            log.warning("beat: Entry %(entry)s waits for others: its times are expensive", event="expensive", **about)
        return False

    @contextmanager
    def spent_on(self, definition: str) -> Iterator[None]:
        """Measure what it costs to calculate the times of an entry."""
        began = self._clock()
        try:
            yield
        finally:
            cost = self._clock() - began
            if len(self._costs) >= MOST_COSTS:
                self._costs.clear()
                self._logged.clear()
            self._costs[definition] = cost
            if cost >= EXPENSIVE_FROM:
                self._left -= cost
