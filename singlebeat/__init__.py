"""Celery beat that never loses or doubles a run, and tasks that never pile up."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .beat.calendar.clocked import clocked
    from .beat.entries.entry import Entry
    from .beat.schedule import Schedule
    from .beat.scheduler import Scheduler
    from .errors import DuplicateTaskError
    from .locks import clear_locks
    from .tasks.exclusive import exclusive
    from .tasks.singleton import Singleton
    from .tasks.worker_step import install

__all__ = (
    "DuplicateTaskError",
    "Entry",
    "Schedule",
    "Scheduler",
    "Singleton",
    "clear_locks",
    "clocked",
    "exclusive",
    "install",
)

_HOMES = {
    "Scheduler": "beat.scheduler",
    "Entry": "beat.entries.entry",
    "Schedule": "beat.schedule",
    "clocked": "beat.calendar.clocked",
    "Singleton": "tasks.singleton",
    "exclusive": "tasks.exclusive",
    "install": "tasks.worker_step",
    "clear_locks": "locks",
    "DuplicateTaskError": "errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("celery-singlebeat")
        except PackageNotFoundError:  # a copy that was not installed
            return "unknown"
    # On first use only: whoever wants a Singleton must not get RedBeat imported, which listens to every beat.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
