"""Celery-style signals, with the meaning of each; the reference in the docs prints this table.

Celery logs the error of a receiver that raises, and nothing else fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from celery.utils.dispatch import Signal

__all__ = (
    "duplicate",
    "entry_quarantined",
    "entry_recovered",
    "leadership_gained",
    "leadership_lost",
    "lock_lost",
    "occurrence_decided",
    "run_ended",
    "tick_ended",
)


class Description(NamedTuple):
    """What a signal means, who its sender is, and its arguments by name; in reStructuredText."""

    meaning: str
    sender: str
    arguments: Mapping[str, str]


#: The description of each signal, by its name.
DESCRIPTIONS: dict[str, Description] = {}


def _signal(name: str, meaning: str, *, sender: str = "the app", **arguments: str) -> Signal:
    DESCRIPTIONS[name] = Description(meaning, sender, arguments)
    return Signal(name=name, providing_args=set(arguments))


leadership_gained = _signal(
    "leadership_gained",
    "A beat leads, and has installed ``beat_schedule``.",
    term="the term, with its ``number``",
)
leadership_lost = _signal(
    "leadership_lost",
    "A beat leads no longer.",
    term="the term that is over",
    reason="why it is over: ``lost``",
)
tick_ended = _signal(
    "tick_ended",
    "A beat has looked for due entries and has sent them; standbys send the signal, too.",
    seconds="how long that took",
)
occurrence_decided = _signal(
    "occurrence_decided",
    "Beat has decided about an occurrence, and has recorded the decision.",
    entry="the name of the entry",
    decision="the decision, with its ``outcome``, ``reason``, ``occurrence``, ``task`` and ``holder``",
)
entry_quarantined = _signal(
    "entry_quarantined",
    "Beat cannot use an entry. Sent once for each reason.",
    entry="the key or the name of the entry",
    reason="why the entry cannot be used",
)
entry_recovered = _signal(
    "entry_recovered",
    "A quarantined entry is usable again.",
    entry="the key or the name of the entry",
)
duplicate = _signal(
    "duplicate",
    "A call of a Singleton was not sent, or its message was not run, because an equal call is queued or running.",
    sender="the task",
    task_id="the id of the equal call",
    args="the positional arguments of the duplicate",
    kwargs="its keyword arguments",
    at="``send`` in the process of the caller, or ``start`` in a worker",
)
run_ended = _signal(
    "run_ended",
    "A run with a lock, or one that beat has sent, has ended. A worker's main process sends the signal. Beat sends the "
    "signal with ``message_lost`` and ``ran_elsewhere``, and with only the id and the entry in the headers.",
    outcome="the word for the end, as in the history",
    began="when the run began, in seconds since 1970, or None",
    headers="the headers of its message",
)
lock_lost = _signal(
    "lock_lost",
    "A lock has ended, or another call holds it, while its owner runs. The owner goes on, or has ended since.",
    sender="the name of the task, or ``singlebeat.exclusive``",
    ref="the lock, with its ``key`` and ``task_id``",
)
