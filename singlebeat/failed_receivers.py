"""Receivers of an app's own signals that have failed: Celery goes on without what they add to ``beat_schedule``."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery.utils.dispatch import Signal
from kombu.utils.encoding import safe_repr

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("note_failed_receivers", "why_incomplete")

#: The first failure of each app, in words.
_failed: WeakKeyDictionary[Celery, str] = WeakKeyDictionary()

_send = Signal.send


def note_failed_receivers() -> None:
    """Note from now on which receivers of apps fail.

    Celery itself drops what ``Signal.send`` returns about that. It only logs it, and not where a log is set up so that
    it disables the loggers that exist, which is the default of ``logging.config``.
    """
    Signal.send = _send_and_note


@wraps(_send)
def _send_and_note(self: Signal, sender: Any, **named: Any) -> Any:
    replies = _send(self, sender, **named)
    if str(self.name).startswith("app."):
        for _, reply in replies:
            if isinstance(reply, Exception):
                why = f"a receiver of {self.name.removeprefix('app.')} has failed: {safe_repr(reply)}"
                _failed.setdefault(sender, why)
    return replies


def why_incomplete(app: Celery) -> str:
    """Return why an app's ``beat_schedule`` may lack entries in this process; empty if it is as its code wants it.

    The text is of the user's error, and may hold secrets.
    """
    return _failed.get(app, "")
