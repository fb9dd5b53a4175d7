"""The calculating time of a beat: entries with expensive times wait for the others, so that these are not late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..log import Log
from .calendar.recurrence import is_cheap, reporting_questions

if TYPE_CHECKING:
    from .entries.entry import Entry

__all__ = ("CalculatingTime",)

log = Log("celery.beat")

#: Seconds from which an entry is expensive: a batch of entries that are just not expensive takes a few seconds.
EXPENSIVE_FROM = 0.01

#: Seconds from which an entry is logged though it has not waited: the others have waited for it.
LOGGED_FROM = 1.0

#: Seconds from which an entry is logged while its times are still being calculated: the others wait for it.
LOGGED_WITHIN_FROM = 10.0

#: Entries whose costs are remembered.
MOST_COSTS = 10_000

#: The order of entries: those that were never calculated come after the cheap ones.
CHEAP, UNKNOWN, EXPENSIVE = range(3)


class CalculatingTime:
    """The time that a beat has for the times of expensive entries: half of its time, and one entry at a time.

    Only this process knows what an entry has cost. An entry is known by its definition.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._resumes_at = -math.inf
        #: Seconds of the last two times, by the hash of the definition, which may be long, and often be rewritten.
        self._costs: dict[int, tuple[float, float]] = {}
        self._logged = set[int]()  #: the same hashes

    @property
    def wait_s(self) -> float:
        """Seconds until the times of an expensive entry may be calculated; 0 if they may be now."""
        return max(0.0, self._resumes_at - self._clock())

    def rank(self, definition: str, entry: Entry) -> int:
        """Return the place of an entry in the order in which entries are calculated."""
        if is_cheap(entry.schedule):
            return CHEAP
        costs = self._costs.get(hash(definition))
        if costs is None:
            return UNKNOWN
        # On a busy host, any entry takes long once in a while.
        return CHEAP if min(costs) < EXPENSIVE_FROM else EXPENSIVE

    def has_for(self, definition: str, entry: Entry) -> bool:
        """Return whether the times of an entry may be calculated now; log it once if an expensive entry must wait."""
        rank = self.rank(definition, entry)
        if rank == CHEAP or not self.wait_s:
            return True
        if rank == EXPENSIVE:
            self._log_once(definition, entry, self._costs[hash(definition)][-1])
        return False

    @contextmanager
    def spent_on(self, definition: str, entry: Entry) -> Iterator[None]:
        """Measure what it costs to calculate the times of an entry; as long as that took, other work comes first."""
        if is_cheap(entry.schedule):
            yield
            return
        began = self._clock()

        def note() -> None:
            if (so_far := self._clock() - began) >= LOGGED_WITHIN_FROM:
                self._log_once(definition, entry, so_far)

        try:
            with reporting_questions(note):
                yield
        finally:
            ended, known = self._clock(), hash(definition)
            cost = ended - began
            if len(self._costs) >= MOST_COSTS:
                self._costs.clear()
                self._logged.clear()
            self._costs[known] = (self._costs.get(known, (cost,))[-1], cost)
            if cost >= EXPENSIVE_FROM:
                self._resumes_at = ended + cost
            if cost >= LOGGED_FROM:
                self._log_once(definition, entry, cost)

    def _log_once(self, definition: str, entry: Entry, seconds: float) -> None:
        if hash(definition) in self._logged:
            return
        self._logged.add(hash(definition))
        about = {"entry": entry.name, "seconds": seconds}
        log.warning("beat: The times of entry %(entry)s are expensive to calculate", event="expensive", **about)
