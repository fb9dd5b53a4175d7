"""Frees the locks of calls that were refused: a server that hung takes them when it goes on."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from ..errors import LockBackendError
from ..locks.base import BaseBackend, Ref
from .threads import Empty, SimpleQueue, start_native_thread

__all__ = ("undo_later",)

#: Seconds between two tries, and until a thread that has nothing to do ends.
PAUSE = 1.0

#: Seconds after which a server that does not come back is given up: its locks end by themselves.
PATIENCE = 600.0

#: Calls that are kept in mind.
MOST_CALLS = 10_000


class _Undoing:
    """The refused calls of one process, and the thread that waits for their server while there are any."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._refused: SimpleQueue[tuple[BaseBackend, Ref, float]] = SimpleQueue()
        #: Holds one thing while there is no thread: whoever gets it starts one.
        self._no_thread: SimpleQueue[None] = SimpleQueue()
        self._no_thread.put(None)

    def add(self, backend: BaseBackend, ref: Ref) -> None:
        if self._refused.qsize() < MOST_CALLS:
            self._refused.put((backend, ref, time.monotonic() + PATIENCE))
        if self._may_start():
            start_native_thread(self._run, "singlebeat-undo")

    def _may_start(self) -> bool:
        try:
            self._no_thread.get_nowait()
        except Empty:
            return False
        return True

    def _run(self) -> None:
        while True:
            try:
                backend, ref, given_up = self._refused.get(timeout=PAUSE)
            except Empty:
                self._no_thread.put(None)
                # One that came in between has found no reason to start a thread, or has started one.
                if self._refused.empty() or not self._may_start():
                    return
            else:
                if not _undone(backend, ref) and time.monotonic() < given_up:
                    self._refused.put((backend, ref, given_up))  # behind those of servers that may answer
                    with suppress(Empty):  # a sleep that no gevent has patched
                        SimpleQueue[None]().get(timeout=PAUSE)


def _undone(backend: BaseBackend, ref: Ref) -> bool:
    try:
        backend.get(ref.key)  # once it answers, it has read what came before
        backend.finish_many([ref], memory=0)
    except LockBackendError:
        return False
    return True


_undoing = _Undoing()


def undo_later(backend: BaseBackend, ref: Ref) -> None:
    """Free the lock of a call that was refused because its server did not answer, when it answers again."""
    global _undoing  # noqa: PLW0603 - a forked child has none of its parent's threads
    if _undoing.pid != os.getpid():
        _undoing = _Undoing()
    _undoing.add(backend, ref)
