"""Questions to the result backend with a timeout: Celery's own clients may wait for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import NotRegistered
from celery.states import FAILURE, READY_STATES

from ..connections import masked, what_it_does
from ..log import LONGEST_REASON, without_passwords
from ..run_results import reason_of

if TYPE_CHECKING:
    from celery import Celery
    from celery.backends.base import Backend

__all__ = ("ResultBackendError", "StoredEnd", "ask_results", "check_results", "read_end", "result_place", "stored_end")

#: A task id that no task has.
NO_TASK = "singlebeat-doctor"


class ResultBackendError(Exception):
    """An error of the result backend; its text follows the name of the backend in a sentence."""


class StoredEnd(NamedTuple):
    """The end of a task, as the result backend has it."""

    status: str  #: SUCCESS, FAILURE or REVOKED
    at: datetime | None  #: in UTC; None if unknown
    error: str = ""  #: why it failed, as far as it is known

    @property
    def how(self) -> str:
        """The status and the error, in words."""
        return f"{self.status}: {self.error}" if self.error else self.status


def result_place(app: Celery) -> str:
    """Return the name of the result backend in messages."""
    url = app.conf.result_backend
    return f"result backend {masked(url)}" if isinstance(url, str) else "result backend"


def stored_end(backend: Backend, task_id: str) -> StoredEnd | None:
    """Return the end of a task that a result backend has, None if it has none."""
    meta = backend.get_task_meta(task_id, cache=False)
    status, result = meta.get("status"), meta.get("result")
    if status not in READY_STATES:
        return None
    error = ""
    if isinstance(result, NotRegistered):
        error = "NotRegistered, a worker that does not know the task has dropped its message"
    elif status == FAILURE and result is not None:
        error = without_passwords(reason_of(result))[:LONGEST_REASON]
    return StoredEnd(status, _instant(meta.get("date_done")), error)


def read_end(app: Celery, task_id: str, *, timeout: float) -> StoredEnd | None:
    """Return the end of a task that the result backend of an app has; None if it has none, or this app stores none.

    Raises:
        ResultBackendError: as ``ask_results`` does.
    """
    found: list[StoredEnd | None] = []
    if app.conf.task_always_eager and not app.conf.task_store_eager_result:
        return None
    ask_results(app, lambda backend: found.append(stored_end(backend, task_id)), timeout=timeout)
    return found[0] if found else None


def ask_results(app: Celery, ask: Callable[[Backend], object], *, timeout: float) -> None:
    """Ask the result backend in a thread of its own; do nothing if the app keeps no results.

    Args:
        ask: called with the backend; may go on after the timeout.
        timeout: seconds.

    Raises:
        ResultBackendError: the backend does not answer in time, or refuses, or its driver is missing.
    """
    # No SimpleQueue: it would block the thread of a process that gevent or eventlet have patched since this import.
    answers: Queue[Exception | None] = Queue()

    def answer() -> None:
        try:
            ask(backend)
        except Exception as exc:  # a backend may raise anything
            answers.put(exc)
        else:
            answers.put(None)

    try:
        backend = app.backend
    except Exception as exc:  # the backend's module imports a driver, and reads its URL
        raise ResultBackendError(f"cannot be used: {_line(exc)}") from exc
    if isinstance(backend, DisabledBackend | RPCBackend):  # the broker sends results to the process that awaits them
        return
    threading.Thread(target=answer, name="singlebeat-results", daemon=True).start()
    try:
        error = answers.get(timeout=timeout)
    except Empty:
        raise ResultBackendError(f"does not answer within {timeout:g} s") from None
    if error is not None:
        does = "cannot be used" if isinstance(error, ImportError) else what_it_does(error)
        raise ResultBackendError(f"{does}: {_line(error)}") from error


def check_results(app: Celery, *, timeout: float) -> None:
    """Read a result that does not exist.

    Raises:
        ResultBackendError: as ``ask_results`` does.
    """
    ask_results(app, lambda backend: backend.get_task_meta(NO_TASK, cache=False), timeout=timeout)


def _instant(date_done: Any) -> datetime | None:
    try:
        done = date_done if isinstance(date_done, datetime) else datetime.fromisoformat(date_done)
    except (TypeError, ValueError):
        return None
    return done.replace(tzinfo=done.tzinfo or UTC).astimezone(UTC)


def _line(exc: Exception) -> str:
    return without_passwords(" ".join(str(exc).split())).rstrip(".") or type(exc).__name__
