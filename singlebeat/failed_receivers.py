"""Receivers of an app's or a beat's signals that have failed: Celery goes on without what they add to its schedule."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery.utils.dispatch import Signal
from kombu.utils.encoding import safe_repr

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("note_failed_receivers", "why_incomplete")

#: The signals whose receivers add entries to ``beat_schedule``.
SIGNALS = frozenset({"on_configure", "on_after_configure", "on_after_finalize", "beat_init", "beat_embedded_init"})

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
    name = str(self.name).removeprefix("app.")
    for receiver, reply in replies if name in SIGNALS else ():
        # RedBeat's own fails for every scheduler but RedBeat's, and adds nothing.
        if isinstance(reply, Exception) and not str(getattr(receiver, "__module__", "")).startswith("redbeat"):
            app = sender.app if name.startswith("beat") else sender
            _failed.setdefault(app, f"a receiver of {name} has failed: {safe_repr(reply)}")
    return replies


def why_incomplete(app: Celery) -> str:
    """Return why an app's ``beat_schedule`` may lack entries in this process; empty if it is as its code wants it.

    The text is of the user's error, and may hold secrets.
    """
    return _failed.get(app, "")
