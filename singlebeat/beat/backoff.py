"""When what the broker did not take is tried again, and after whom: pure, of one process."""

from __future__ import annotations

from collections import Counter

__all__ = ("Backoff",)

#: Seconds until the first repetition: doubled each time, up to the second figure.
FIRST_RETRY, LAST_RETRY = 1.0, 4.0


class Backoff:
    """What has failed in a row: a broker that is away fails for all, a broken entry for itself alone.

    Nobody can tell the two apart by one error, so whoever has failed most often is tried last: it can only keep
    its like waiting.
    """

    def __init__(self) -> None:
        self._failures = 0  #: of server or entries that had not failed before, in a row
        self._by_member = Counter[str]()

    def failures_of(self, member: str) -> int:
        """Return how many attempts of an entry have failed in a row."""
        return self._by_member[member]

    def failed(self, member: str = "") -> bool:
        """Note a failure of an entry, without one of a server; tell whether that is news to people."""
        if member:
            self._by_member[member] += 1
        if self._by_member[member] > 1:  # it tells nothing new about the server
            return False
        self._failures += 1
        return self._failures == 1

    def succeeded(self, member: str) -> None:
        """Note that the server answers, and that this entry has nothing to wait for."""
        self._failures = 0
        self.forget(member)

    def forget(self, *members: str) -> None:
        """Note that entries have nothing to wait for any more, whether or not the server answers."""
        for member in members:
            self._by_member.pop(member, None)

    def seconds(self, member: str) -> float:
        """Return the seconds until an entry is tried again that has failed, or was behind one that has."""
        times = self._by_member.get(member, self._failures)
        return float(min(LAST_RETRY, FIRST_RETRY * 2 ** min(max(times, 1) - 1, 10)))
