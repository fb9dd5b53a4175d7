"""Eager calls (``task_always_eager``), under locks in the memory of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import Config
from ..locks import eager_backend_of
from ..locks.base import Call, Ref, Verdict
from ..locks.modes import LockMode, Overlap

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from ..locks.base import Holder
    from .singleton import Singleton

__all__ = ("run_eagerly",)


def run_eagerly(
    task: Singleton, lock: str, task_id: str, run: Callable[[], AsyncResult], *, overlap: Overlap = Overlap.SKIP
) -> AsyncResult | Holder:
    """Return the result of a run under a lock, or the ``Holder`` if a surrounding call holds the lock."""
    if overlap is Overlap.ALLOW_ALL or task.lock == LockMode.UNTIL_EXECUTING:  # a surrounding call has started
        return run()
    backend, ref = eager_backend_of(task.app), Ref(lock, task_id)
    holder = backend.acquire_many([Call(ref, task.name, "", Config.of(task.app).singlebeat_queued_ttl)])[0]
    if holder.verdict is not Verdict.ACQUIRED:
        return holder
    try:
        return run()
    finally:
        backend.finish_many([ref], remember_for=0)
