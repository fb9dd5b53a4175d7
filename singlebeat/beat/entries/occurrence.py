"""One time at which an entry is due, and the decision about it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import NAMESPACE_OID, uuid5

from ...errors import EntryError
from ...log import LAST_INSTANT, LONGEST_REASON, utc_iso, without_passwords
from ...overlap import Overlap

__all__ = ("Decision", "DecisionType", "Kind", "Occurrence")


#: How the reason of a decision begins whose message was sent without a lock.
WITHOUT_LOCK = "without its lock: "

#: How the reason ends of one that was sent as beat sends it, by code of the app that failed then.
SENT_BEFORE = "after it was sent"


class DecisionType(StrEnum):
    """The kind of a decision about an occurrence."""

    #: Its message was sent. The reason, if it was sent without its lock: why; if code of yours has sent it: how.
    DISPATCHED = "dispatched"
    #: Its message was sent, and waits for the end of an equal call. The reason: which call, since when.
    BUFFERED = "buffered"
    #: It was not sent, because an equal call is queued or running. The reason: which call, since when, of which entry.
    SKIPPED_OVERLAP = "skipped_overlap"
    #: It was not sent again: a run with its id has begun or ended, as after a backup was restored.
    RUN_BEFORE = "run_before"
    #: Its entry is paused or disabled. The reason: the note of the pause.
    PAUSED = "paused"
    #: It was later than ``misfire_grace_time`` or ``end_time`` allows. The reason: by how much.
    MISSED = "missed"
    #: Its message can never be sent. The reason: why.
    PUBLISH_FAILED = "publish_failed"
    #: Its entry cannot be used until it is fixed. The reason: why; recorded once for each reason.
    QUARANTINED = "quarantined"


class Kind(StrEnum):
    """The reason why an entry runs."""

    #: Its time has come.
    SCHEDULED = "scheduled"
    #: Its time has passed while no beat ran. It stands for all missed occurrences.
    CATCH_UP = "catch_up"
    #: An operator or a program has triggered it.
    MANUAL = "manual"
    #: An operator or a program wants runs for a time in the past.
    BACKFILL = "backfill"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One time at which an entry is due; its id is the id of its task."""

    id: str
    nominal: float  #: seconds since 1970
    previous: float | None = None  #: nominal time of the last run before it that was sent
    kind: Kind = Kind.SCHEDULED
    overlap: Overlap | None = None  #: replaces the overlap of the entry
    #: The key of its lock, and JSON of task and arguments, if code of the user has made one of them: asked again, it
    #: may answer otherwise, and what is sent again would be no copy. Empty: they follow from the entry, or from code.
    lock: str = field(default="", compare=False)
    call: str = field(default="", compare=False, repr=False)
    text: str = field(default="", compare=False, repr=False)  #: as it was read: confirm.lua compares it

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
        """Return the occurrence of an entry at a time: the same arguments always give the same id.

        Args:
            run: name of its backfill: another backfill of the same times has other runs.
        """
        seconds = nominal.timestamp()
        seed = f"{prefix}\n{_printable(name)}\n{round(seconds * 1000)}"  # a name may be bytes that are not UTF-8
        if kind in {Kind.MANUAL, Kind.BACKFILL}:  # not the scheduled run of the same time
            seed += f"\n{kind}{run}"
        before = None if previous is None else min(previous.timestamp(), LAST_INSTANT)
        return cls(str(uuid5(NAMESPACE_OID, seed)), seconds, before, kind, overlap)

    @property
    def is_scheduled(self) -> bool:
        """Whether the schedule asks for it: then it is counted, and may be too late."""
        return self.kind in {Kind.SCHEDULED, Kind.CATCH_UP}

    def header(self, entry: str) -> dict[str, object]:
        """Return the value of the message header ``RUN_HEADER``; its instants are in ISO 8601."""
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
        # Without json.dumps, which takes three times as long: this is written twice for each run.
        text = f'"id": {json.dumps(self.id)}, "nominal": {self.nominal!r}'
        if self.previous is not None:
            text += f', "previous": {self.previous!r}'
        if self.kind is not Kind.SCHEDULED:
            text += f', "kind": "{self.kind}"'
        if self.overlap is not None:
            text += f', "overlap": "{self.overlap}"'
        if self.call:
            text += f', "lock": {json.dumps(self.lock)}, "call": {json.dumps(self.call)}'
        return f"{{{text}}}"

    @classmethod
    def decode(cls, text: str) -> Occurrence:
        """Read the ``pending`` field of an entry.

        Raises:
            EntryError: the field cannot be decoded.
        """
        try:
            raw = json.loads(text)
            if not (id_ := str(raw["id"])):  # its lock would be taken for a free one, or never be freed
                raise ValueError("its id is empty")  # noqa: TRY301
            nominal, previous, overlap = float(raw["nominal"]), raw.get("previous"), raw.get("overlap")
            previous = None if previous is None else float(previous)
            for seconds in (nominal, previous):
                utc_iso(seconds or 0.0)  # raises if it is out of range: such an occurrence cannot be sent
            return cls(
                id_,
                nominal,
                previous,
                Kind(raw.get("kind", Kind.SCHEDULED)),
                None if overlap is None else Overlap(overlap),
                str(raw.get("lock") or ""),
                str(raw.get("call") or ""),
                text,
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError, RecursionError) as exc:
            why = f"{type(exc).__name__}: {exc}"
            raise EntryError(
                f"pending cannot be read: {why}; to give up that run: HDEL KEY-OF-THE-ENTRY pending"
            ) from exc


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one occurrence, with its reason."""

    entry: str
    task: str
    occurrence: Occurrence
    outcome: DecisionType
    reason: str = ""
    holder: str = ""  #: the task that held its lock
    holder_entry: str = ""  #: the entry that sent the holder; empty: a program sent it, or unknown

    @property
    def is_sent(self) -> bool:
        """Whether its message was sent."""
        return self.outcome in {DecisionType.DISPATCHED, DecisionType.BUFFERED}

    @property
    def sent(self) -> str:
        """Its nominal time in seconds since 1970, if it is a sent run of the schedule; else an empty string."""
        was_sent = self.is_sent or self.outcome is DecisionType.RUN_BEFORE
        return repr(self.occurrence.nominal) if was_sent and self.occurrence.is_scheduled else ""

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
        # Names that other programs wrote into Redis may hold bytes that are not UTF-8.
        return [_printable(text) for text in record]


def _printable(text: str) -> str:
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
