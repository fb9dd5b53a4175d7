"""What was made of the texts of entries as they were read last; pure."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ("Latest",)

T = TypeVar("T")

#: Members that are kept, and characters of their texts. What is made of a text takes some five times its memory.
MOST_MEMBERS, MOST_CHARACTERS = 5_000, 8_000_000


class Latest(Generic[T]):
    """For each member, what was made of its texts as they were read last; all are forgotten if they become too many.

    >>> latest = Latest[int]()
    >>> latest.keep("e", ("one",), 1)
    >>> latest.of("e", ("one",)), latest.of("e", ("two",))
    (1, None)
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[str, ...], T]] = {}
        self._characters = 0

    def of(self, member: str, texts: tuple[str, ...]) -> T | None:
        """Return what was made of these texts of a member, None if it is not known."""
        found = self._kept.get(member)
        return found[1] if found is not None and found[0] == texts else None

    def keep(self, member: str, texts: tuple[str, ...], made: T) -> None:
        """Keep what was made of the texts of a member, instead of what was kept for it."""
        if member in self._kept:
            self._characters -= _size(self._kept.pop(member)[0])
        if len(self._kept) >= MOST_MEMBERS or self._characters >= MOST_CHARACTERS:
            self._kept.clear()
            self._characters = 0
        self._kept[member] = texts, made
        self._characters += _size(texts)


def _size(texts: tuple[str, ...]) -> int:
    return sum(map(len, texts))
