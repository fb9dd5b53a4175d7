"""What an error means for who asks: a status, a title, and a sentence that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..beat.store.probe import lock_server_says, schedule_server_says
from ..connections import RedisError, schedule_place
from ..diagnosis.locks import NotFreedError
from ..errors import ConflictError, LockBackendError, UnknownEntryError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Problem", "problem_of")


class Problem(NamedTuple):
    """An error as it is answered."""

    status: int
    title: str
    text: str


def problem_of(app: Celery, exc: Exception) -> Problem:
    """Return what an error of an entry, of a value or of a server means."""
    match exc:
        case UnknownEntryError():
            return Problem(404, "There is no such entry", str(exc))
        case ConflictError():
            return Problem(409, "Another process was faster", str(exc))
        case NotFreedError():
            return Problem(409, "The lock was not freed", str(exc))
        case LockBackendError():
            return Problem(503, "The locks' server", lock_server_says(app, exc))
        case RedisError():
            return Problem(503, "The schedule's server", f"{schedule_place(app)}: {schedule_server_says(app, exc)}")
    return Problem(422, "That cannot be done", str(exc))
