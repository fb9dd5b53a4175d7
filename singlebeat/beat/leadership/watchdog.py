"""Ends a beat that is stuck, or whose worker is gone, so that another beat can take over."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from billiard.process import current_process

from ...log import Log

__all__ = ("Watchdog", "is_orphan")

log = Log("celery.beat")

#: Polls per timeout.
POLLS = 60

#: Seconds that the process waits at most for its last log line: it may be stuck in a log handler.
LOGGED_WITHIN = 5.0


class Watchdog:
    """A watch that logs all stacks and ends the process, if ``progress`` is not called for ``timeout`` seconds.

    It counts its own polls instead of reading a clock: a process that was suspended as a whole is not stuck.

    Args:
        timeout: seconds without progress.
        end: ends the process; only tests replace it.
    """

    def __init__(self, timeout: float, *, end: Callable[[int], object] = os._exit) -> None:
        self.timeout, self._end = timeout, end
        self._polls, self._stopped = 0, False
        self._thread: threading.Thread | None = None

    def progress(self) -> None:
        """Record that work goes on; the first call starts the watch."""
        self._polls = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="singlebeat-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the watch; may be called in a signal handler."""
        self._stopped = True

    def _watch(self) -> None:
        while self._polls < POLLS:
            time.sleep(self.timeout / POLLS)
            self._polls += 1
            if self._stopped:
                return
        try:
            writer = threading.Thread(target=self._log, args=(_stacks(),), name="singlebeat-watchdog-log", daemon=True)
            writer.start()
            writer.join(LOGGED_WITHIN)
        finally:
            self._end(1)

    def _log(self, stacks: str) -> None:
        log.critical(
            "beat: No progress for %(seconds)g s: this beat ends, so that another beat takes over",
            event="stuck",
            seconds=self.timeout,
            detail=stacks,
        )


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def is_orphan() -> bool:
    """Return whether this is the beat of a ``celery worker -B`` whose main process is gone."""
    parent = getattr(current_process(), "_parent_pid", None)
    return parent is not None and parent != os.getppid()
