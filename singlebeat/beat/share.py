"""The part of one beat in the work, where leadership is switched off and all beats share it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

__all__ = ("ALL", "PAUSE", "TURN", "Share")

#: Seconds for which work is in the part of one beat. Then it is late, and goes on to the part of the next beat.
TURN = 10.0

#: Seconds at the beginning of a later turn in which work is in no part: the beat before may just be doing it.
PAUSE = 1.0

#: Work is divided by slots, so that a beat calculates few weights.
SLOTS = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one beat: at each moment, work is in the part of one beat at most.

    The beats have turns. For each slot of work, their order is another one, by weights (rendezvous hashing). So when a
    beat joins or leaves, no other work than its own changes hands in the first turn.

    Args:
        beat: name of this beat.
        others: names of the other beats; empty: all work is ours.
    """

    beat: str = ""
    others: Collection[str] = ()
    _turns: Sequence[int] = field(init=False, repr=False, compare=False)  #: for each slot, the number of our turn

    def __post_init__(self) -> None:
        own = _weights(self.beat)
        before = [map(int.__gt__, _weights(other), own) for other in self.others]
        object.__setattr__(self, "_turns", [*map(sum, zip(*before, strict=True))])

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
        if not self._turns:
            return True
        turn = self._turns[crc32(key.encode(errors="surrogateescape")) % SLOTS]
        if late < TURN:
            return turn == 0
        number, passed = divmod(late, TURN)
        return passed >= PAUSE and turn == number % self.beats


@lru_cache(maxsize=64)
def _weights(beat: str) -> Sequence[int]:
    """Return the weight of a beat for each slot of work."""
    seed = crc32(beat.encode())
    # Knuth's multiplicative hashing: the checksums of two beats differ by the same bits for all slots.
    return [crc32(slot.to_bytes(2), seed) * 0x9E3779B1 & 0xFFFFFFFF for slot in range(SLOTS)]


#: The part of a beat that works alone, or that leads.
ALL = Share()
