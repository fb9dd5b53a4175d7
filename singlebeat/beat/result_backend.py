"""Questions to the result backend with a timeout: Celery's own clients may wait for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from ..connections import what_it_does
from ..log import without_passwords

if TYPE_CHECKING:
    from celery import Celery
    from celery.backends.base import Backend

__all__ = ("ResultBackendError", "ask_results", "check_results")

#: A task id that no task has.
NO_TASK = "singlebeat-doctor"


class ResultBackendError(Exception):
    """An error of the result backend; its text follows the name of the backend in a sentence."""


def ask_results(app: Celery, ask: Callable[[Backend], object], *, timeout: float) -> None:
    """Ask the result backend in a thread of its own; do nothing if the app keeps no results.

    Args:
        ask: called with the backend; may go on after the timeout.
        timeout: seconds.

    Raises:
        ResultBackendError: the backend does not answer in time, or refuses, or its driver is missing.
    """
    answers: SimpleQueue[Exception | None] = SimpleQueue()

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


def _line(exc: Exception) -> str:
    return without_passwords(" ".join(str(exc).split())).rstrip(".") or type(exc).__name__
