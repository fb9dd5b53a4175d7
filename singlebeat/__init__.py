"""Celery beat that never loses or doubles a run, and tasks that never pile up."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .beat.api import Schedule
    from .beat.clocked import clocked
    from .beat.entry import Entry
    from .beat.scheduler import Scheduler
    from .errors import DuplicateTaskError
    from .locks import clear_locks
    from .tasks.exclusive import exclusive
    from .tasks.install import install
    from .tasks.singleton import Singleton

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
    "Entry": "beat.entry",
    "Schedule": "beat.api",
    "clocked": "beat.clocked",
    "Singleton": "tasks.singleton",
    "exclusive": "tasks.exclusive",
    "install": "tasks.install",
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
