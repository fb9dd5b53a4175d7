"""Tasks that a process may lack only because a module of tasks could not be imported there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("is_maybe_missing", "note_missing_module")

#: Apps of which a module of tasks could not be imported here.
_incomplete: WeakSet[Celery] = WeakSet()


def note_missing_module(app: Celery) -> None:
    """Note that a module of an app's tasks could not be imported here."""
    _incomplete.add(app)


def is_maybe_missing(app: Celery, task: str) -> bool:
    """Return whether a task, unknown here, may be of a module that could not be imported.

    Then its parameters and its own queue are not known either.
    """
    return app in _incomplete and task not in app.tasks
