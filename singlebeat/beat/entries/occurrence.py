"""One time at which an entry is due, and what became of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from ...errors import EntryError
from ...log import LONGEST_REASON, utc_iso, without_passwords
from ...overlap import Overlap

__all__ = ("Decision", "DecisionType", "Kind", "Occurrence")


class DecisionType(StrEnum):
    """What beat decided about an occurrence."""

    DISPATCHED = "dispatched"  #: its message was sent
    BUFFERED = "buffered"  #: its message was sent, and waits for the end of an equal call
    SKIPPED_OVERLAP = "skipped_overlap"  #: an equal call is queued or running
    RUN_BEFORE = "run_before"  #: a run with its id has begun or ended before: it is not sent once more
    PAUSED = "paused"  #: its entry is paused or disabled
    MISSED = "missed"  #: it was later than its misfire grace time allows
    PUBLISH_FAILED = "publish_failed"  #: its message can never be sent
    QUARANTINED = "quarantined"  #: its entry cannot be used, and waits to be mended


class Kind(StrEnum):
    """Why an entry runs."""

    SCHEDULED = "scheduled"  #: its time has come
    CATCH_UP = "catch_up"  #: its time has passed while no beat ran; it stands for all that were missed
    MANUAL = "manual"  #: somebody has triggered it
    BACKFILL = "backfill"  #: somebody wants runs for a time in the past


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time at which an entry is due; its id is the id of its task."""

    id: str
    nominal: float  #: seconds since 1970
    previous: float | None = None  #: nominal time of the last run before it that was sent
    kind: Kind = Kind.SCHEDULED
    overlap: Overlap | None = None  #: instead of the entry's
    text: str = field(default="", compare=False, repr=False)  #: as it was read: who confirms it must name it so

    @classmethod
    def of(
        cls,
        prefix: str,
        name: str,
        nominal: datetime,
        *,
        previous: datetime | None = None,
        kind: Kind = Kind.SCHEDULED,
        overlap: Overlap | None = None,
        run: str = "",
    ) -> Occurrence:
        """Return the occurrence of an entry at a time: always the same one.

        Args:
            run: the backfill that it belongs to: another one of the same times makes other runs.
        """
        seconds = nominal.timestamp()
        seed = f"{prefix}\n{_printable(name)}\n{round(seconds * 1000)}"  # a name may be bytes that are no text
        if kind in {Kind.MANUAL, Kind.BACKFILL}:  # another run than the scheduled one of that time
            seed += f"\n{kind}{run}"
        before = None if previous is None else previous.timestamp()
        return cls(str(uuid5(NAMESPACE_OID, seed)), seconds, before, kind, overlap)

    @property
    def is_scheduled(self) -> bool:
        """Whether it is one of the schedule's: counted, and perhaps too late."""
        return self.kind in {Kind.SCHEDULED, Kind.CATCH_UP}

    def header(self, entry: str) -> dict[str, Any]:
        """Return what the message carries under ``RUN_HEADER``; instants in ISO 8601."""
        previous = None if self.previous is None else utc_iso(self.previous)
        return {
            "entry": entry,
            "occurrence": self.id,
            "nominal": utc_iso(self.nominal),
            "previous": previous,
            "kind": str(self.kind),
        }

    def encode(self) -> str:
        """Return the ``pending`` field of an entry."""
        if self.text:
            return self.text
        # Not a dict by way of json, which takes thrice as long: this is written twice for each run.
        text = f'"id": {json.dumps(self.id)}, "nominal": {self.nominal!r}'
        if self.previous is not None:
            text += f', "previous": {self.previous!r}'
        if self.kind is not Kind.SCHEDULED:
            text += f', "kind": "{self.kind}"'
        if self.overlap is not None:
            text += f', "overlap": "{self.overlap}"'
        return f"{{{text}}}"

    @classmethod
    def decode(cls, text: str) -> Occurrence:
        """Read the ``pending`` field of an entry.

        Raises:
            EntryError: it cannot be understood.
        """
        try:
            raw = json.loads(text)
            nominal, previous, overlap = float(raw["nominal"]), raw.get("previous"), raw.get("overlap")
            previous = None if previous is None else float(previous)
            for seconds in (nominal, previous):
                utc_iso(seconds or 0.0)  # else it cannot be sent
            return cls(
                str(raw["id"]),
                nominal,
                previous,
                Kind(raw.get("kind", Kind.SCHEDULED)),
                None if overlap is None else Overlap(overlap),
                text,
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as exc:
            raise EntryError(f"pending cannot be read: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one occurrence, and why."""

    entry: str
    task: str
    occurrence: Occurrence
    outcome: DecisionType
    reason: str = ""
    holder: str = ""  #: the task that was in its way
    holder_entry: str = ""  #: the entry that has sent that; empty: a program has, or it is not known

    @property
    def is_sent(self) -> bool:
        """Whether there is a message of it now."""
        return self.outcome in {DecisionType.DISPATCHED, DecisionType.BUFFERED}

    @property
    def sent(self) -> str:
        """Its nominal time in seconds since 1970, if it is a run of the schedule; else an empty string."""
        return repr(self.occurrence.nominal) if self.is_sent and self.occurrence.is_scheduled else ""

    def values(self, term: int, leader: str) -> list[str]:
        """Return the values of a history record, in the order of ``confirm.lua``."""
        occurrence = self.occurrence
        record = (
            self.entry,
            self.task,
            utc_iso(occurrence.nominal),
            occurrence.kind.value,
            self.outcome.value,
            _printable(without_passwords(self.reason))[:LONGEST_REASON],
            occurrence.id,
            str(term),
            self.holder,
            leader,
            self.holder_entry,
        )
        # Names that somebody wrote into Redis may hold what no text can.
        return [_printable(text) for text in record]


def _printable(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
