"""The code of an app in a process that is neither a beat nor a worker, such as a command or the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from celery.fixups.django import DjangoFixup
from celery.signals import import_modules

from ..beat.entries.statics import signature_of
from ..failed_receivers import why_incomplete
from ..log import without_passwords
from ..missing_modules import note_missing_module

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("LoadingError", "load_code", "statics_here")

#: Why the code of an app could not be imported; empty if it could. It is not tried again, as it may take long and has
#: side effects.
_loaded: WeakKeyDictionary[Celery, str] = WeakKeyDictionary()
_loading = RLock()


class LoadingError(Exception):
    """Another thread has been importing the modules of tasks for longer than this one waits."""


def load_code(app: Celery, *, patience: float | None = None) -> str:
    """Import the modules of an app's tasks, as beat and workers do, and return why that failed; empty if it did not.

    They define tasks, whose parameters name the arguments to mask and whose options name queues; types of arguments;
    and receivers that add entries to ``beat_schedule``.

    Args:
        patience: seconds to wait for another thread that imports them; None: until it has.

    Raises:
        LoadingError: it goes on.
    """
    if app in _loaded:
        return _loaded[app]
    if not _loading.acquire(timeout=-1 if patience is None else patience):
        raise LoadingError
    try:
        if app not in _loaded:
            _loaded[app] = _load(app)
            if _loaded[app]:
                note_missing_module(app)
        return _loaded[app]
    finally:
        _loading.release()


def _load(app: Celery) -> str:
    why = ""
    # As Celery does it, but it ends at the first that fails: each module says how its tasks' arguments are masked.
    each = (partial(app.loader.import_task_module, module) for module in app.loader.default_modules)
    for load in (partial(_discover, app), *each, app.finalize):
        try:
            load()
        except (Exception, SystemExit) as exc:  # of a user's module
            why = why or without_passwords(f"{type(exc).__name__}: {exc}")
    return why


def _discover(app: Celery) -> None:
    with _leaving_django_as_it_is(app):
        replies = import_modules.send(sender=app)  # to ``autodiscover_tasks`` and the like
    for _, reply in replies:
        if isinstance(reply, Exception):
            raise reply


@contextmanager
def _leaving_django_as_it_is(app: Celery) -> Iterator[None]:
    """Keep Celery from setting Django up once more, which would give a process that serves it new log handlers."""
    django = sys.modules.get("django.apps")
    fixups = app._fixups if django is not None and django.apps.ready else ()
    receivers = [each.on_import_modules for each in fixups if isinstance(each, DjangoFixup)]
    left_out = [each for each in receivers if import_modules.disconnect(each, sender=app)]
    try:
        yield
    finally:
        for each in left_out:
            import_modules.connect(each, sender=app)


def statics_here(app: Celery) -> str:
    """Return the number and the digest of the entries in the code of this process; empty if it has none."""
    if load_code(app) or why_incomplete(app):
        return ""
    return signature_of(app)["statics"] if app.conf.beat_schedule else ""
