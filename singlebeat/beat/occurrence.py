"""One time at which an entry is due, and what became of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from uuid import NAMESPACE_OID, uuid5

from ..errors import EntryError

__all__ = ("Decision", "Occurrence", "Outcome")


class Outcome(StrEnum):
    """What beat decided about an occurrence."""

    DISPATCHED = "dispatched"  #: its message was sent
    SKIPPED_OVERLAP = "skipped_overlap"  #: an equal call is queued or running
    PAUSED = "paused"  #: its entry is disabled
    MISSED = "missed"  #: it was later than its misfire grace time allows
    PUBLISH_FAILED = "publish_failed"  #: its message can never be sent


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time at which an entry is due; its id is the id of its task."""

    id: str
    nominal: float  #: seconds since 1970

    @classmethod
    def of(cls, prefix: str, name: str, nominal: datetime) -> Occurrence:
        """Return the occurrence of an entry at a time: the same one, whoever asks and however often."""
        seconds = nominal.timestamp()
        return cls(str(uuid5(NAMESPACE_OID, f"{prefix}\n{name}\n{round(seconds * 1000)}")), seconds)

    def encode(self) -> str:
        """Return the ``pending`` field of an entry."""
        return json.dumps({"id": self.id, "nominal": self.nominal})

    @classmethod
    def decode(cls, text: str) -> Occurrence:
        """Read the ``pending`` field of an entry.

        Raises:
            EntryError: it cannot be understood.
        """
        try:
            raw = json.loads(text)
            return cls(str(raw["id"]), float(raw["nominal"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
            raise EntryError(f"pending cannot be read: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one occurrence, and why."""

    entry: str
    task: str
    occurrence: Occurrence
    outcome: Outcome
    reason: str = ""

    def fields(self, term: int) -> list[str]:
        """Return the fields and values of a history record."""
        nominal = datetime.fromtimestamp(self.occurrence.nominal, UTC).isoformat(timespec="milliseconds")
        record = {
            "entry": self.entry,
            "task": self.task,
            "nominal": nominal,
            "decision": self.outcome.value,
            "reason": self.reason,
            "id": self.occurrence.id,
            "term": str(term),
        }
        # Names that somebody wrote into Redis may hold what no text can.
        return [
            text if text.isascii() else text.encode(errors="backslashreplace").decode()
            for pair in record.items()
            for text in pair
        ]
