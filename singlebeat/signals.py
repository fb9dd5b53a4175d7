"""Celery-style signals; Celery logs the error of a receiver that raises, and nothing else fails.

===================== ============================================================================
signal                arguments
===================== ============================================================================
leadership_gained     sender: the app · term
leadership_lost       sender: the app · term, reason
tick_ended            sender: the app · seconds (its duration); standbys send it, too
occurrence_decided    sender: the app · entry (its name), decision (``beat.entries.occurrence.Decision``)
entry_quarantined     sender: the app · entry (its key, or its name), reason; once for each reason
entry_recovered       sender: the app · entry
duplicate             sender: the task · task_id (of the holder), args, kwargs, at (``send``, or ``start`` of its run)
run_ended             sender: the app · outcome (of ``run_results.OUTCOMES``), began (in seconds since 1970, or None),
                      headers (of its message); in a worker's main process, of calls that have a lock or come from beat;
                      in beat: ``message_lost`` or ``ran_elsewhere``, with only the id and the entry in the headers
lock_lost             sender: the task's name, or ``singlebeat.exclusive`` · ref (``locks.base.Ref``)
===================== ============================================================================
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = (
    "duplicate",
    "entry_quarantined",
    "entry_recovered",
    "leadership_gained",
    "leadership_lost",
    "lock_lost",
    "occurrence_decided",
    "run_ended",
    "tick_ended",
)

leadership_gained = Signal(name="leadership_gained", providing_args={"term"})
leadership_lost = Signal(name="leadership_lost", providing_args={"term", "reason"})
tick_ended = Signal(name="tick_ended", providing_args={"seconds"})
entry_quarantined = Signal(name="entry_quarantined", providing_args={"entry", "reason"})
entry_recovered = Signal(name="entry_recovered", providing_args={"entry"})
occurrence_decided = Signal(name="occurrence_decided", providing_args={"entry", "decision"})
duplicate = Signal(name="duplicate", providing_args={"task_id", "args", "kwargs", "at"})
run_ended = Signal(name="run_ended", providing_args={"outcome", "began", "headers"})
lock_lost = Signal(name="lock_lost", providing_args={"ref"})
