"""When failed publishes are retried, and in which order: pure, for one process."""

from __future__ import annotations

from collections import Counter

__all__ = ("FIRST_RETRY", "LAST_REFUSED", "LAST_RETRY", "Backoff")

#: Seconds until the first retry, and the longest delay; the delay doubles with each failure.
FIRST_RETRY, LAST_RETRY = 1.0, 4.0

#: The same longest delay for a message that its server refuses: an operator has to act, and there may be hundreds.
LAST_REFUSED = 30.0

#: How many failures of an entry later its failure is logged again, and for a refused message: about five minutes.
LOGGED_EACH, REFUSED_LOGGED_EACH = 75, 10


class Backoff:
    """The failures in a row: an unreachable broker fails for all entries, a broken entry only for itself.

    A single error does not show the difference. So the entry that has failed most often is tried last: it can only
    delay entries that have failed as often.
    """

    def __init__(self) -> None:
        self._failures = 0  #: in a row: failures of the server, and first failures of entries
        self._by_key = Counter[str]()
        self._logged_at: dict[str, int] = {}  #: at how many failures of an entry these are logged again
        self._refused = set[str]()  #: the entries whose last messages were refused

    def failures_of(self, key: str) -> int:
        """Return how many attempts of an entry have failed in a row."""
        return self._by_key[key]

    def is_refused(self, key: str) -> bool:
        """Return whether the last message of an entry was refused."""
        return key in self._refused

    def failed(self, *keys: str) -> bool:
        """Record a failed attempt of entries, of the server if none is given; return whether it is worth logging."""
        self._by_key.update(keys)
        self._refused.difference_update(keys)
        if any(self._by_key[key] > 1 for key in keys):  # a repeated failure shows nothing new about the server
            return False
        self._failures += 1
        return self._failures == 1

    def refused(self, key: str) -> bool:
        """Record that a server answers and refuses the message of an entry; return whether it is worth logging."""
        self._by_key[key] += 1
        self._refused.add(key)
        return self.fails_alone(key, after=0)

    def fails_alone(self, key: str, *, after: int = 1) -> bool:
        """Return whether it is worth logging that an entry fails while its server answers: now and then.

        Args:
            after: how many failures of the entry may be those of the server.
        """
        failures = self._by_key[key]
        if failures < self._logged_at.get(key, after + 1):
            return False
        self._logged_at[key] = failures + (REFUSED_LOGGED_EACH if key in self._refused else LOGGED_EACH)
        return True

    def succeeded(self, key: str) -> None:
        """Record that the server answers, and forget the failures of this entry."""
        self._failures = 0
        self.forget(key)

    def forget(self, *keys: str) -> None:
        """Forget the failures of entries; this says nothing about the server."""
        for key in keys:
            self._by_key.pop(key, None)
            self._logged_at.pop(key, None)
            self._refused.discard(key)

    def seconds(self, key: str) -> float:
        """Return the seconds until the retry of an entry that has failed, or has waited behind a failed entry."""
        times, longest = self._by_key.get(key, self._failures), LAST_REFUSED if key in self._refused else LAST_RETRY
        return float(min(longest, FIRST_RETRY * 2 ** min(max(times, 1) - 1, 10)))
