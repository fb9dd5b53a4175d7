"""Receivers of an app's own signals that have failed: Celery goes on without what they add to ``beat_schedule``."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kombu.utils.encoding import safe_repr

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("note_failed_receivers", "why_incomplete")

#: The first failure of each app, in words.
_failed: WeakKeyDictionary[Celery, str] = WeakKeyDictionary()


def note_failed_receivers() -> None:
    """Note from now on which receivers fail. Celery logs that, most often before a program has set up its log."""
    logging.getLogger("celery.utils.dispatch.signal").addFilter(_note)


def _note(record: logging.LogRecord) -> bool:
    with suppress(Exception):  # Celery expects none here
        _, exc, traceback = record.exc_info or sys.exc_info()
        sending = traceback.tb_frame.f_locals if traceback is not None else {}  # of ``Signal.send``, which caught it
        if (name := str(sending["self"].name)).startswith("app."):
            name = name.removeprefix("app.")
            _failed.setdefault(sending["sender"], f"a receiver of {name} has failed: {safe_repr(exc)}")
    return True


def why_incomplete(app: Celery) -> str:
    """Return why an app's ``beat_schedule`` may lack entries in this process; empty if it is as its code wants it.

    The text is of the user's error, and may hold secrets.
    """
    return _failed.get(app, "")
