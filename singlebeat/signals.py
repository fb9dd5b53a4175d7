"""Celery-style signals; a receiver that raises is logged by Celery and harms nothing.

===================== ============================================================================
signal                arguments
===================== ============================================================================
leadership_gained     sender: the app · term
leadership_lost       sender: the app · term, reason
occurrence_decided    sender: the app · entry (its name), decision (``beat.occurrence.Decision``)
duplicate             sender: the task · task_id (of the holder), args, kwargs
lock_lost             sender: the task's name, or ``singlebeat.exclusive`` · ref (``locks.base.Ref``)
===================== ============================================================================
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ("duplicate", "leadership_gained", "leadership_lost", "lock_lost", "occurrence_decided")

leadership_gained = Signal(name="leadership_gained", providing_args={"term"})
leadership_lost = Signal(name="leadership_lost", providing_args={"term", "reason"})
occurrence_decided = Signal(name="occurrence_decided", providing_args={"entry", "decision"})
duplicate = Signal(name="duplicate", providing_args={"task_id", "args", "kwargs"})
lock_lost = Signal(name="lock_lost", providing_args={"ref"})
