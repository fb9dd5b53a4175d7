"""Asks code of the user for the arguments and the lock key of a run, before the run is claimed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from kombu.utils.encoding import safe_repr
from kombu.utils.json import dumps, loads

from ..locks.modes import is_singleton
from ..log import Log
from .backoff import Backoff
from .calculating_time import LOGGED_FROM
from .calendar.recurrence import ENDING
from .entries.code_only import evaluate_lazy
from .failures import OWN_CODE, in_words, is_transient
from .plain_task import PlainTask

if TYPE_CHECKING:
    from datetime import datetime

    from .entries.entry import Entry
    from .entries.occurrence import Occurrence
    from .store.claims import Stored

__all__ = ("Answers", "Asking", "asks_code", "keep_answers")

log = Log("celery.beat")

#: Characters of arguments that are kept with a claimed occurrence.
MOST_KEPT = 65_536

#: Seconds for which code of the user is asked before others are sent again; the first answer is awaited in any case.
ASKED_FOR = 0.2


class Answers(NamedTuple):
    """What code of the user has answered."""

    given: Mapping[str, Stored]  #: the entries that can be sent or given up now, with the answers, by their keys
    failed: Mapping[str, float]  #: for how many seconds entries wait whose code has failed just now, by their keys
    wait_s: float  #: seconds until the next of the others is to be asked; infinite if there is none


class Asking:
    """Asks code of the user: ``BeatLazyFunc`` arguments, and key functions of Singletons.

    It may be slow, fail, or hang until the watchdog ends this beat. An entry that is not claimed yet is not harmed by
    any of that: it stays due, and can be paused, edited or removed.

    Args:
        progress: called before each question.
    """

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._backoff = Backoff()  #: the failures of such code
        self._again_at: dict[str, float] = {}  #: monotonic: when those are asked again that have failed, by key
        self._until = math.inf  #: monotonic: until when code is asked in this tick
        self._said_slow_of = set[str]()  #: the entries whose code was logged as slow, by their keys

    def begin_tick(self) -> None:
        """Let code be asked for ``ASKED_FOR`` from its first question on."""
        self._until = math.inf

    def answers(self, wanted: Sequence[Stored], now: datetime) -> Answers:
        """Ask for entries as long as the time of the tick is not over, the one first that has waited longest.

        Entries that need no code are among the answers as they are, and those whose answers were kept.
        """
        given = {stored.entry.key: known for stored in wanted if (known := _known(stored)) is not None}
        asked = [stored for stored in wanted if stored.entry.key not in given]
        failed, wait_s = dict[str, float](), math.inf
        for stored in sorted(asked, key=lambda each: self._waited_s(each, now), reverse=True):
            key, began = stored.entry.key, monotonic()
            wait = max(0.0, self._again_at.get(key, began) - began)
            if wait or began >= self._until:
                wait_s = min(wait_s, wait)
                continue
            self._until = min(self._until, began + ASKED_FOR)
            self._progress()
            if (answer := self._answer(stored)) is not None:
                given[key] = answer
            else:
                failed[key] = self._backoff.seconds(key)
                self._again_at[key] = monotonic() + failed[key]
        return Answers(given, failed, min([wait_s, *failed.values()]))

    def _waited_s(self, stored: Stored, now: datetime) -> float:
        """Return the seconds since an entry was due, or since it may be asked again if its code has failed."""
        since_due = now.timestamp() - (stored.pending_score or stored.score)
        return min(since_due, monotonic() - self._again_at.get(stored.entry.key, -math.inf))

    def _answer(self, stored: Stored) -> Stored | None:
        """Return an entry with what its code answers, or with its error; None if it is to be asked again."""
        entry, began = stored.entry, monotonic()
        try:
            answered = _answered(stored)
        except ENDING:
            raise
        except BaseException as exc:  # it may raise anything
            error = exc if isinstance(exc, Exception) else RuntimeError(safe_repr(exc))
            if is_transient(error):
                if self._backoff.refused(entry.key):
                    text, why = "beat: %(entry)s waits, because its own code fails", in_words(error)
                    log.exception(text, event="refused", entry=entry.name, server=OWN_CODE, reason=why)
                return None
            answered = replace(stored, error=error)
        finally:
            self.note_time(entry, monotonic() - began)
        self._backoff.forget(entry.key)
        self._again_at.pop(entry.key, None)
        return answered

    def note_time(self, entry: Entry, seconds: float) -> None:
        """Log, once for each entry, that code of the user took so long that other entries are late."""
        if seconds >= LOGGED_FROM and entry.key not in self._said_slow_of:
            self._said_slow_of.add(entry.key)
            text = "beat: Entry %(entry)s holds up others, because its own code is slow"
            log.warning(text, event="expensive", entry=entry.name, seconds=seconds)


def asks_code(entry: Entry) -> bool:
    """Return whether code of the user makes the arguments of an entry's runs, or the keys of their locks."""
    if not entry.is_constant:
        return True
    return entry.lock_key is None and not getattr(entry.app.tasks.get(entry.task), "has_pure_keys", True)


def keep_answers(occurrence: Occurrence, entry: Entry) -> Occurrence:
    """Return an occurrence with what code has answered for it, if JSON can keep that; a tuple becomes a list."""
    with suppress(Exception):  # an object's own methods may raise anything
        text = entry.call_as_json
        if len(text) <= MOST_KEPT and dumps(loads(text)) == text:
            return replace(occurrence, lock=entry.lock_key or "", call=text)
    return occurrence


def _known(stored: Stored) -> Stored | None:
    """Return an entry that needs no code, or with the answers of its pending occurrence; None if code is asked."""
    if not asks_code(stored.entry):
        return stored
    if stored.pending is None or not stored.pending.call:
        return None
    with suppress(Exception):  # any program may have written them
        _, args, kwargs = loads(stored.pending.call)
        entry = copy.copy(stored.entry)
        if not entry.is_constant:
            entry.args, entry.kwargs = list(args), dict(kwargs)
        if entry.call_as_json == stored.pending.call:  # else it was edited since then
            return replace(stored, entry=entry)
    return None


def _answered(stored: Stored) -> Stored:
    """Return an entry with the arguments and the lock key of its next run.

    Raises:
        Exception: any error of code of the user.
    """
    entry, app = copy.copy(stored.entry), stored.entry.app
    entry.args, entry.kwargs = evaluate_lazy(entry.args), evaluate_lazy(entry.kwargs)
    task = app.tasks.get(entry.task)
    if is_singleton(task) or not hasattr(task, "generate_lock"):  # one of celery-singleton locks itself
        locked = task if is_singleton(task) else PlainTask(app, entry.task, entry.options, entry.name)
        try:
            entry.lock_key = str(locked.generate_lock(entry.task, entry.args, entry.kwargs))
        except TypeError:
            if not locked.has_pure_keys:
                raise
            # A run whose arguments do not fit, or have no JSON, is sent without its lock, which says why.
    return replace(stored, entry=entry)
