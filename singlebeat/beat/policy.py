"""What an entry's user wants beside its times: the ``policy`` field of its hash."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import EntryError
from .codec import loads_object

__all__ = ("Policy",)


@dataclass(frozen=True, slots=True)
class Policy:
    """The wishes for one entry; all of them optional."""

    #: Seconds that an occurrence may be late; a later one is recorded as missed. None: it runs however late it is.
    misfire_grace_time: float | None = None

    @classmethod
    def decode(cls, text: str | None) -> Policy:
        """Read the ``policy`` field of an entry.

        Raises:
            EntryError: it cannot be understood.
        """
        if not text:
            return cls()
        raw = loads_object(text, "policy")
        grace = raw.get("misfire_grace_time")
        if grace is not None and (isinstance(grace, bool) or not isinstance(grace, int | float) or grace <= 0):
            raise EntryError(f"policy: misfire_grace_time must be a positive number of seconds, not {grace!r}")
        return cls(None if grace is None else float(grace))
