"""The outcome of a decision in one word, for the strip of squares and for the history."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..beat.status import OVERDUE_AFTER

if TYPE_CHECKING:
    from ..beat.store.history import End, Record

__all__ = ("WORDS", "Square", "outcome", "outcome_of_end", "square")

#: Each word with its meaning, as the legend shows it.
WORDS = {
    "ok": "ended well",
    "late": "ended well, sent late",
    "failed": "failed",
    "open": "sent, no end known yet",
    "skipped": "skipped: an equal call still held the lock",
    "missed": "missed",
    "paused": "paused",
    "refused": "not run",
}

_FAILED = {"failure", "time_limit", "worker_lost", "terminated", "message_lost"}
_OK = {"success", "result_not_stored", "ignored", "ran_elsewhere"}
_OPEN = {"retry", "postponed"}
_DECISIONS = {"skipped_overlap": "skipped", "run_before": "skipped", "missed": "missed", "paused": "paused"}


class Square(NamedTuple):
    """One decision in a strip."""

    word: str  #: one of ``WORDS``
    title: str


def outcome(record: Record) -> str:
    """Return the word for a decision and the end of its run."""
    if record.decision not in {"dispatched", "buffered"}:
        return _DECISIONS.get(record.decision, "failed" if record.decision == "publish_failed" else "refused")
    if record.end is None:
        return "open"
    word = outcome_of_end(record.end)
    is_late = record.kind == "catch_up" or (
        record.kind == "scheduled" and (record.at - record.nominal).total_seconds() > OVERDUE_AFTER
    )
    return "late" if word == "ok" and is_late else word


def outcome_of_end(end: End) -> str:
    """Return the word for the end of a run."""
    if end.outcome in _OPEN:
        return "open"
    return "ok" if end.outcome in _OK else "failed" if end.outcome in _FAILED else "refused"


def square(record: Record) -> Square:
    """Return the square of a decision, with what its tooltip says."""
    end = record.end
    parts = [
        f"{record.nominal:%Y-%m-%d %H:%M:%SZ}",
        end.outcome if end is not None else record.decision,
        f"{end.duration:.1f} s" if end is not None and end.duration is not None else "",
        (end.reason if end is not None and end.reason else record.reason)[:200],
    ]
    return Square(outcome(record), ", ".join(part for part in parts if part))
