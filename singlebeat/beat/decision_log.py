"""Logs decisions: one line each, in the terms of the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..events import EVENTS
from ..log import Log, utc_iso
from .entries.occurrence import DecisionType

if TYPE_CHECKING:
    from .entries.occurrence import Decision

__all__ = ("log_decision",)

log = Log("celery.beat")

#: The sentence for each decision.
_SENTENCES = {
    DecisionType.DISPATCHED: "Scheduler: Sending due task %(entry)s (%(task)s)",
    DecisionType.BUFFERED: "Scheduler: Sending due task %(entry)s (%(task)s) to wait for its turn",
    DecisionType.SKIPPED_OVERLAP: "Scheduler: Skipping task %(entry)s (%(task)s)",
    DecisionType.RUN_BEFORE: "Scheduler: Not sending task %(entry)s (%(task)s) once more",
    DecisionType.PAUSED: "Scheduler: Leaving out task %(entry)s (%(task)s)",
    DecisionType.MISSED: "Scheduler: Missed task %(entry)s (%(task)s)",
    DecisionType.PUBLISH_FAILED: "Scheduler: Message Error: %(entry)s (%(task)s) cannot be sent",
}


def log_decision(decision: Decision, now: float, *, detail: str = "") -> None:
    """Log a decision about an occurrence.

    Args:
        now: seconds since 1970 by the server's clock.
        detail: further lines after the reason, such as a traceback.
    """
    level, sentence = EVENTS[decision.outcome].level, _SENTENCES[decision.outcome]
    if not log.wants(level):
        return
    occurrence = decision.occurrence
    log.write(
        level,
        sentence,
        event=decision.outcome,
        entry=decision.entry,
        task=decision.task,
        id=occurrence.id,
        nominal=utc_iso(occurrence.nominal),
        lateness=now - occurrence.nominal,
        kind=occurrence.kind,
        holder=decision.holder,
        holder_entry=decision.holder_entry if decision.holder_entry != decision.entry else "",
        reason=decision.reason,
        detail=detail,
    )
