"""Receivers of an app's own signals that have failed: Celery goes on without what they add to ``beat_schedule``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("note_failed_receivers", "why_incomplete")

#: The first failure of each app, in words.
_failed: WeakKeyDictionary[Celery, str] = WeakKeyDictionary()


def note_failed_receivers() -> None:
    """Note from now on which receivers fail. Celery logs that, most often before a program has set up its log."""
    logging.getLogger("celery.utils.dispatch.signal").addFilter(_note)


def _note(record: logging.LogRecord) -> bool:
    exc = record.exc_info[1] if record.exc_info else None
    if exc is not None and exc.__traceback__ is not None:
        sending = exc.__traceback__.tb_frame.f_locals  # of ``Signal.send``, which has caught the error
        name, app = str(getattr(sending.get("self"), "name", "")), sending.get("sender")
        if name.startswith("app.") and app is not None:
            name = name.removeprefix("app.")
            _failed.setdefault(app, f"a receiver of {name} has failed: {type(exc).__name__}: {exc}")
    return True


def why_incomplete(app: Celery) -> str:
    """Return why an app's ``beat_schedule`` may lack entries in this process; empty if it is as its code wants it.

    The text is of the user's error, and may hold secrets.
    """
    return _failed.get(app, "")
