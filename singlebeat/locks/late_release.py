"""Frees the locks of calls that were refused: a server that hung takes them when it goes on."""

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

__all__ = ("cancel_release", "refused", "release_later")

log = Log(__name__)

#: Seconds between two tries, and until a thread that has nothing to do ends.
PAUSE = 1.0

#: Seconds after which a server that does not come back is given up: its locks end by themselves.
PATIENCE = 600.0

#: Calls that are kept in mind.
MOST_CALLS = 10_000


class _LateReleases:
    """The refused calls of one process, and the thread that waits for their server while there are any."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._refused: SimpleQueue[tuple[BaseBackend, Ref, float]] = SimpleQueue()
        self._wanted: dict[Ref, float] = {}  #: until when; whatever else is in the queue was sent after all
        #: Holds one thing while nobody frees or forgets.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._turn.put(None)
        #: Of the thread: under gevent it cannot use a connection of the greenlets.
        self._backends: WeakKeyDictionary[Celery, BaseBackend] = WeakKeyDictionary()
        self.thread = OnDemandThread(
            self._run, has_work=lambda: not self._refused.empty(), name="singlebeat-late-release"
        )

    def add(self, app: Celery, ref: Ref) -> None:
        if app not in self._backends:
            self._backends[app] = new_backend(app, own_connections=True)
        if self._refused.qsize() < MOST_CALLS:
            self._wanted[ref] = given_up = time.monotonic() + PATIENCE
            self._refused.put((self._backends[app], ref, given_up))
        self.thread.wake()

    def forget(self, ref: Ref) -> None:
        if ref in self._wanted:
            self._turn.get()
            self._wanted.pop(ref, None)
            self._turn.put(None)

    def find(self, key: str, task_id: str) -> Ref | None:
        return next((ref for ref in list(self._wanted) if (ref.key, ref.task_id) == (key, task_id)), None)

    def _run(self) -> None:
        while True:
            try:
                backend, ref, given_up = self._refused.get(timeout=PAUSE)
            except Empty:
                return
            if self._is_released(backend, ref, given_up) or time.monotonic() >= given_up:
                if self._wanted.get(ref) == given_up:
                    self._wanted.pop(ref, None)
            else:
                self._refused.put((backend, ref, given_up))  # behind those of servers that may answer
                native_sleep(PAUSE)

    def _is_released(self, backend: BaseBackend, ref: Ref, given_up: float) -> bool:
        try:
            backend.get(ref.key)  # once it answers, it has read what came before
            self._turn.get()
            try:
                if self._wanted.get(ref) == given_up:
                    backend.finish_many([ref], remember_for=0)
            finally:
                self._turn.put(None)
        except LockBackendError:
            return False
        except Exception:  # the outer edge of the thread: others wait for it, too
            about = {"id": ref.task_id}
            log.exception("the lock of task %(id)s stays until it ends by itself", event="lock_kept", **about)
        return True


_releases = _LateReleases()


def release_later(app: Celery, ref: Ref) -> None:
    """Free the lock of a call that was refused because its server did not answer, when it answers again."""
    global _releases  # noqa: PLW0603 - a forked child has none of its parent's threads
    if _releases.pid != os.getpid():
        _releases = _LateReleases()
    _releases.add(app, ref)


def cancel_release(ref: Ref) -> None:
    """Leave the lock of a call alone, whatever became of it before: it is made again, under the same id."""
    if _releases.pid == os.getpid():
        _releases.forget(ref)


def refused(key: str, task_id: str) -> Ref | None:
    """Return the claim of a call of this process that was refused and may yet hold its lock, or None."""
    return _releases.find(key, task_id) if _releases.pid == os.getpid() else None
