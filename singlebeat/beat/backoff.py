"""When failed publishes are retried, and in which order: pure, for one process."""

from __future__ import annotations

from collections import Counter

__all__ = ("Backoff",)

#: Seconds until the first retry, and the longest delay; the delay doubles with each failure.
FIRST_RETRY, LAST_RETRY = 1.0, 4.0


class Backoff:
    """The failures in a row: an unreachable broker fails for all entries, a broken entry only for itself.

    A single error does not show the difference. So the entry that has failed most often is tried last: it can only
    delay entries that have failed as often.
    """

    def __init__(self) -> None:
        self._failures = 0  #: in a row: failures of the server, and first failures of entries
        self._by_member = Counter[str]()

    def failures_of(self, member: str) -> int:
        """Return how many attempts of an entry have failed in a row."""
        return self._by_member[member]

    def failed(self, member: str = "") -> bool:
        """Record a failed attempt, of the server if no entry is given; return whether it is worth logging."""
        if member:
            self._by_member[member] += 1
        if self._by_member[member] > 1:  # a repeated failure of one entry shows nothing new about the server
            return False
        self._failures += 1
        return self._failures == 1

    def succeeded(self, member: str) -> None:
        """Record that the server answers, and forget the failures of this entry."""
        self._failures = 0
        self.forget(member)

    def forget(self, *members: str) -> None:
        """Forget the failures of entries; this says nothing about the server."""
        for member in members:
            self._by_member.pop(member, None)

    def seconds(self, member: str) -> float:
        """Return the seconds until the retry of an entry that has failed, or has waited behind a failed entry."""
        times = self._by_member.get(member, self._failures)
        return float(min(LAST_RETRY, FIRST_RETRY * 2 ** min(max(times, 1) - 1, 10)))
