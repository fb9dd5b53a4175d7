"""The part of one beat in the work, where leadership is switched off and all beats share it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from zlib import crc32

__all__ = ("TURN", "Share")

#: Seconds for which work is in the part of one beat. Afterwards it is late, and goes on to the part of another beat.
TURN = 10.0

#: Spreads the bits of a product (Knuth's multiplicative hashing).
_SPREAD, _BITS = 0x9E3779B1, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one beat: at each moment, all work is in the parts of the beats, and in one part each.

    For each key, the beats have an order by weights (rendezvous hashing): the first one has the first turn. So when a
    beat joins or leaves, no work changes hands between the others.

    Args:
        beat: name of this beat.
        others: names of the other beats; empty: all work is ours.
    """

    beat: str = ""
    others: Collection[str] = ()
    _own: int = field(init=False, repr=False)
    _seeds: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own", crc32(self.beat.encode()))
        object.__setattr__(self, "_seeds", tuple(crc32(other.encode()) for other in self.others))

    @property
    def beats(self) -> int:
        """The number of beats that share the work."""
        return 1 + len(self.others)

    def has(self, key: str, late: float) -> bool:
        """Return whether work is in our part now.

        Args:
            key: of the work: all beats use the same one.
            late: seconds since the work could be done; negative if it cannot yet be done.
        """
        if not self._seeds:
            return True
        number = crc32(key.encode(errors="surrogateescape"))
        own = (number ^ self._own) * _SPREAD & _BITS
        before = 0
        for seed in self._seeds:
            before += (number ^ seed) * _SPREAD & _BITS > own
        return before == max(0, int(late // TURN)) % self.beats
