"""Frees the locks that a hung server may still grant to calls after the caller has given up."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..errors import LockBackendError
from ..log import Log
from ..native_threads import Empty, OnDemandThread, SimpleQueue, native_sleep
from . import new_backend
from .base import BaseBackend, Ref

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("awaits_releases", "cancel_release", "refused", "release_later")

log = Log(__name__)

#: Seconds between two attempts, and until an idle thread ends.
PAUSE = 1.0

#: Seconds after which the release of a lock is given up; the lock then ends by itself.
PATIENCE = 600.0

#: Maximum number of calls whose locks are to be freed.
MOST_CALLS = 10_000


class _LateReleases:
    """The refused calls of one process, and the thread that waits for their servers while there are such calls."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._refused: SimpleQueue[tuple[BaseBackend, Ref, float, float]] = SimpleQueue()
        self._wanted: dict[Ref, float] = {}  #: deadline by call; other calls in the queue were sent after all
        #: A mutex of ``_is_released`` and ``forget``: it holds one item while it is free.
        self._mutex: SimpleQueue[None] = SimpleQueue()
        self._mutex.put(None)
        #: Backends of the thread, which cannot use the connections of greenlets under gevent.
        self._backends: WeakKeyDictionary[Celery, BaseBackend] = WeakKeyDictionary()
        self.thread = OnDemandThread(
            self._run, has_work=lambda: not self._refused.empty(), name="singlebeat-late-release"
        )

    def add(self, app: Celery, ref: Ref, remember_for: float) -> None:
        if app not in self._backends:
            self._backends[app] = new_backend(app, own_connections=True)
        if self._refused.qsize() < MOST_CALLS:
            self._wanted[ref] = deadline = time.monotonic() + PATIENCE
            self._refused.put((self._backends[app], ref, deadline, remember_for))
        self.thread.wake()

    @property
    def is_busy(self) -> bool:
        return bool(self._wanted)

    def forget(self, ref: Ref) -> None:
        if ref in self._wanted:
            self._mutex.get()
            self._wanted.pop(ref, None)
            self._mutex.put(None)

    def find(self, key: str, task_id: str) -> Ref | None:
        return next((ref for ref in list(self._wanted) if (ref.key, ref.task_id) == (key, task_id)), None)

    def _run(self) -> None:
        while True:
            try:
                backend, ref, deadline, remember_for = self._refused.get(timeout=PAUSE)
            except Empty:
                return
            if self._is_released(backend, ref, deadline, remember_for) or time.monotonic() >= deadline:
                if self._wanted.get(ref) == deadline:
                    self._wanted.pop(ref, None)
            else:
                self._refused.put((backend, ref, deadline, remember_for))  # behind the calls of servers that may answer
                native_sleep(PAUSE)

    def _is_released(self, backend: BaseBackend, ref: Ref, deadline: float, remember_for: float) -> bool:
        try:
            backend.get(ref.key)  # once the server answers, it has run the earlier requests
            self._mutex.get()
            try:
                if self._wanted.get(ref) == deadline:
                    backend.finish_many([ref], remember_for=remember_for, ran=remember_for > 0)
            finally:
                self._mutex.put(None)
        except LockBackendError:
            return False
        except Exception:  # the outermost handler of the thread, which other calls need
            about = {"id": ref.task_id}
            log.exception("the lock of task %(id)s stays until it ends by itself", event="lock_kept", **about)
        return True


_releases = _LateReleases()


def release_later(app: Celery, ref: Ref, *, remember_for: float = 0.0) -> None:
    """Free the lock of a call as soon as the locks' server answers, which did not answer the call.

    Args:
        remember_for: seconds for which its run counts as over, so that none begins.
    """
    global _releases  # noqa: PLW0603 - a forked child has none of its parent's threads
    if _releases.pid != os.getpid():
        _releases = _LateReleases()
    _releases.add(app, ref, remember_for)


def awaits_releases() -> bool:
    """Return whether this process is to free any locks."""
    return _releases.is_busy and _releases.pid == os.getpid()


def cancel_release(ref: Ref) -> None:
    """Cancel the release of a call's lock, because the call is made again under the same task id."""
    if _releases.pid == os.getpid():
        _releases.forget(ref)


def refused(key: str, task_id: str) -> Ref | None:
    """Return the ``Ref`` of a refused call of this process that may still get its lock, or None."""
    return _releases.find(key, task_id) if _releases.pid == os.getpid() else None
