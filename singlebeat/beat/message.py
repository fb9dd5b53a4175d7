"""The message of an occurrence, and the lock that the message holds or acquires."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import Config
from ..locks.base import HEADER, RUN_HEADER, Ref, Ticket
from ..locks.key import behind_key, check_sendable
from ..locks.modes import drops_by_default
from ..log import Log
from ..overlap import Overlap
from .calendar.clocked import comes_once
from .entries.code_only import evaluate_lazy
from .entries.occurrence import Occurrence
from .entries.timetable import on_its_clock
from .plain_task import PlainTask

if TYPE_CHECKING:
    from celery import Celery

    from ..locks.task import LockableTask
    from .entries.entry import Entry
    from .store.claims import ClaimedOccurrence, Stored

__all__ = ("Message", "prepare")

log = Log("celery.beat")


@dataclass(slots=True)
class Message:
    """One occurrence on its way to the broker."""

    claimed: ClaimedOccurrence
    entry: Entry  #: a copy of its own, with task id and headers in its options
    ticket: Ticket | None = None  #: of its lock; None: acquired when the message is sent, or no lock
    claims: tuple[PlainTask, Overlap] | None = None  #: for a plain task whose lock is acquired when it is sent

    @property
    def stored(self) -> Stored:
        """Its entry as it is stored."""
        return self.claimed.stored

    @property
    def occurrence(self) -> Occurrence:
        """The occurrence whose task id the message has."""
        return self.claimed.occurrence

    def find_lock(self, app: Celery, *, looked_after: bool) -> None:
        """Determine how its lock is acquired, and set its ticket if the lock can be acquired in a batch."""
        entry = self.entry
        overlap = self.occurrence.overlap or self.stored.policy.overlap
        task = app.tasks.get(entry.task)
        if overlap is None and comes_once(entry.schedule) and drops_by_default(task):
            overlap = Overlap.BUFFER_ALL  # no later run makes up for a skipped run
        acquires_on_send = getattr(task, "acquires_on_send", None)
        if acquires_on_send is not None:
            if acquires_on_send or overlap not in {None, Overlap.SKIP}:
                if overlap is not None:
                    entry.options["overlap"] = overlap
                return
        elif hasattr(task, "generate_lock") or not looked_after or overlap is Overlap.ALLOW_ALL:
            return  # a task of celery-singleton acquires its lock itself
        else:
            task = PlainTask(app, entry.task, entry.options, entry.name)
        try:
            key = self._key(task)
        except TypeError as exc:
            log.warning("beat: %(entry)s is sent without a lock", event="unlocked", entry=entry.name, reason=exc)
            return
        if acquires_on_send is None and overlap not in {None, Overlap.SKIP}:
            self.claims = task, overlap
            return
        self.ticket = Ticket(self.occurrence.id, key, queued=key)

    def _key(self, task: LockableTask) -> str:
        """Return the key of its lock; a key that is the same for all runs of the entry is computed once."""
        entry, shared = self.entry, self.stored.entry
        key = shared.lock_key or str(task.generate_lock(entry.task, entry.args, entry.kwargs))
        if shared.lock_key is None and shared.is_constant and task.has_pure_keys:
            shared.lock_key = key
        check_sendable(key, entry.task, self.occurrence.id)
        return key

    def needs_lock(self, app: Celery) -> bool:
        """Return whether it can be sent only while the server of the locks is reachable."""
        if self.ticket is not None or self.claims is not None:
            return True
        overlap = self.entry.options.get("overlap") or getattr(app.tasks.get(self.entry.task), "overlap", None)
        return hasattr(app.tasks.get(self.entry.task), "acquires_on_send") and overlap != Overlap.ALLOW_ALL

    def locks(self, app: Celery) -> list[Ref]:
        """Return the locks that it may hold, including those whose acquire reply was lost."""
        if self.ticket is not None:
            return [self.ticket.run]
        task = self.claims[0] if self.claims is not None else app.tasks.get(self.entry.task)
        if not isinstance(task, PlainTask) and not hasattr(task, "acquires_on_send"):
            return []
        try:
            key = self._key(task)
        except Exception:  # of a task's own key function: then no lock can have been acquired
            return []
        return [Ref(key, self.occurrence.id), Ref(behind_key(key), self.occurrence.id)]


def prepare(
    app: Celery, occurrences: Iterable[ClaimedOccurrence], *, looked_after: bool
) -> tuple[list[Message], list[tuple[Message, Exception]]]:
    """Return the messages that can be sent, and the others with their errors."""
    messages, wrong = [], []
    for claimed in occurrences:
        stored, occurrence = claimed.stored, claimed.occurrence
        entry = copy.copy(stored.entry)
        entry.options = copy.deepcopy(entry.options)  # Celery writes into the headers
        entry.schedule = on_its_clock(entry.schedule, stored.policy.timezone)
        entry.options["task_id"] = occurrence.id
        entry.options.setdefault("retry", False)  # beat retries by itself, without blocking other entries
        entry.options.setdefault("confirm_timeout", Config.of(app).singlebeat_socket_timeout)
        if stored.policy.expires is not None:
            entry.options["expires"] = stored.policy.expires
        headers = {**(entry.options.get("headers") or {}), RUN_HEADER: occurrence.header(entry.name)}
        entry.options["headers"] = headers
        message = Message(claimed, entry)
        try:
            if not entry.is_constant:
                entry.args, entry.kwargs = evaluate_lazy(entry.args), evaluate_lazy(entry.kwargs)
            message.find_lock(app, looked_after=looked_after)
        except Exception as exc:  # a task's own key function, or a BeatLazyFunc, may raise anything
            wrong.append((message, exc))
            continue
        if message.ticket is not None:
            headers[HEADER] = message.ticket.header()
        messages.append(message)
    return messages, wrong
