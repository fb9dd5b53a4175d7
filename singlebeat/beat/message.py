"""The message of an occurrence, and the lock that the message holds or acquires."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kombu.utils.encoding import safe_repr

from ..config import Config
from ..destination import are_by_others, reaches_all
from ..locks.acquire import Plan, plan_call
from ..locks.base import RUN_HEADER, Ref
from ..locks.key import behind_key, check_sendable
from ..locks.modes import drops_by_default, is_singleton, overlap_for
from ..overlap import Overlap
from .calendar.clocked import comes_once
from .calendar.recurrence import ENDING
from .entries.code_only import evaluate_lazy
from .entries.occurrence import Occurrence
from .entries.timetable import on_its_clock
from .plain_task import PlainTask

if TYPE_CHECKING:
    from celery import Celery

    from ..locks.base import Call
    from ..locks.task import LockableTask
    from .entries.entry import Entry
    from .store.claims import ClaimedOccurrence, Stored

__all__ = ("Message", "prepare")


@dataclass(slots=True)
class Message:
    """One occurrence on its way to the broker."""

    claimed: ClaimedOccurrence
    entry: Entry  #: a copy of its own, with task id and headers in its options
    task: LockableTask | None = None  #: whose lock beat acquires; None: it has none, or acquires it itself
    plan: Plan | None = None  #: how its lock is acquired
    key: str = ""  #: of its lock; empty if it has none
    is_sent_by_others: bool = False  #: its task, or the app, has a method of its own that sends it
    without_lock: str = ""  #: why it is sent without a lock that it should have; empty if it is not
    locks_itself: bool = False  #: its task acquires its lock when it is sent, as a task of celery-singleton does

    @property
    def stored(self) -> Stored:
        """Its entry as it is stored."""
        return self.claimed.stored

    @property
    def occurrence(self) -> Occurrence:
        """The occurrence whose task id the message has."""
        return self.claimed.occurrence

    def find_lock(self, app: Celery, *, looked_after: bool) -> None:
        """Determine how its lock is acquired.

        Raises:
            Exception: the policy contradicts the task's lock, or any error of the task's own key function.
        """
        entry = self.entry
        overlap = self.occurrence.overlap or self.stored.policy.overlap
        task = app.tasks.get(entry.task)
        is_eager = task is not None and app.conf.task_always_eager  # beat runs it, and no worker frees its lock
        ways = () if task is None else are_by_others(task, "apply_async")
        has_own_way = is_eager or any(ways[:1])
        self.is_sent_by_others = is_eager or any(ways) or any(are_by_others(app, "send_task"))
        if overlap is None and comes_once(entry.schedule) and drops_by_default(task):
            overlap = Overlap.BUFFER_ALL  # no later run makes up for a skipped run
        if not is_singleton(task):
            self.locks_itself = hasattr(task, "generate_lock")
            is_free = is_eager or not looked_after or overlap is Overlap.ALLOW_ALL
            if self.locks_itself or is_free or self._reaches_all(app):
                return
            task = PlainTask(app, entry.task, entry.options, entry.name)
        try:
            self.key = self._key(task)
        except TypeError as exc:
            self.without_lock = str(exc)
            return
        overlap = overlap_for(task, overlap) if is_singleton(task) else overlap or Overlap.SKIP
        if is_singleton(task) and has_own_way:
            # It may send the call under an id of its own, and would be refused by a lock that beat has acquired.
            entry.options["overlap"] = Overlap.SKIP if overlap is Overlap.RAISE else overlap
            self.locks_itself = True
            return
        call = entry.args, entry.kwargs
        self.plan = plan_call(task, self.occurrence.id, *call, overlap=overlap, options=entry.options, key=self.key)
        self.task = task

    def _reaches_all(self, app: Celery) -> bool:
        """Return whether each worker gets it and runs it, so that no lock may choose one of them."""
        entry = self.entry
        with suppress(Exception):  # of a user's own router: it is sent, or not, by the same way
            return reaches_all(app, entry.task, entry.options, entry.args, entry.kwargs)
        return False

    def _key(self, task: LockableTask) -> str:
        """Return the key of its lock; a key that is the same for all runs of the entry is computed once."""
        entry, shared = self.entry, self.stored.entry
        if not (key := self._kept_key()):
            key = shared.lock_key or str(task.generate_lock(entry.task, entry.args, entry.kwargs))
            if shared.lock_key is None and shared.is_constant and task.has_pure_keys:
                shared.lock_key = key
        check_sendable(key, entry.task, self.occurrence.id)
        return key

    def _kept_key(self) -> str:
        """Return the key that its occurrence was claimed with; empty if none was kept, or if the entry was edited."""
        with suppress(Exception):  # JSON may not have an argument
            if self.occurrence.lock and self.entry.call_as_json == self.occurrence.call:
                return self.occurrence.lock
        return ""

    @property
    def goes_its_own_way(self) -> bool:
        """Whether its task acquires a lock itself, or code of others sends it, maybe over a producer of its own."""
        return self.locks_itself or self.is_sent_by_others or self.entry.options.get("connection") is not None

    @property
    def call(self) -> Call | None:
        """The request for its lock; None if it needs none before it is sent."""
        return None if self.plan is None else self.plan.call

    @property
    def locks(self) -> list[Ref]:
        """The locks that it may hold, including those whose acquire reply was lost."""
        places = (self.key, behind_key(self.key)) if self.key and not self.without_lock else ()
        return [Ref(place, self.occurrence.id) for place in places]

    @property
    def run_locks(self) -> list[Ref]:
        """The lock that its run holds, which in some lock modes is another than that of the message; empty if none."""
        return [] if self.plan is None else [Ref(self.plan.ticket.key, self.occurrence.id)]


def prepare(
    app: Celery, occurrences: Iterable[ClaimedOccurrence], *, looked_after: bool
) -> tuple[list[Message], list[tuple[Message, Exception]]]:
    """Return the messages that can be sent, and the others with their errors."""
    messages, wrong = [], []
    for claimed in occurrences:
        message = Message(claimed, copy.copy(claimed.stored.entry))
        try:
            if claimed.stored.error is not None:
                raise claimed.stored.error  # noqa: TRY301
            _complete(message, Config.of(app))
            message.find_lock(app, looked_after=looked_after)
        except ENDING:
            raise
        except BaseException as exc:  # a task's own key function, or a BeatLazyFunc, may raise anything
            wrong.append((message, exc if isinstance(exc, Exception) else RuntimeError(safe_repr(exc))))
            continue
        messages.append(message)
    return messages, wrong


def _complete(message: Message, config: Config) -> None:
    """Give the entry of a message the arguments and options with which it is sent."""
    entry, stored, occurrence = message.entry, message.stored, message.occurrence
    entry.options = copy.deepcopy(entry.options)  # Celery writes into the headers
    with suppress(RecursionError):  # they can be sent all the same
        entry.args, entry.kwargs = _own(entry.args), _own(entry.kwargs)
    entry.schedule = on_its_clock(entry.schedule, stored.policy.timezone)
    entry.options["task_id"] = occurrence.id
    # Beat retries by itself, without blocking other entries; so no wait may be longer than its own.
    entry.options["retry"], longest = False, config.singlebeat_socket_timeout
    entry.options.setdefault("confirm_timeout", longest)
    for wait in {"timeout", "confirm_timeout"} & entry.options.keys():
        own = entry.options[wait]
        entry.options[wait] = longest if own is None else min(own, longest)
    if stored.policy.expires is not None:
        entry.options["expires"] = stored.policy.expires
    entry.options["headers"] = {**(entry.options.get("headers") or {}), RUN_HEADER: occurrence.header(entry.name)}
    if not entry.is_constant:
        entry.args, entry.kwargs = evaluate_lazy(entry.args), evaluate_lazy(entry.kwargs)


def _own(value: Any) -> Any:
    """Return a copy of JSON's arrays and objects, into which a receiver of ``before_task_publish`` may write.

    For arguments of a few values, ``copy.deepcopy`` takes several times as long.
    """
    if type(value) is list:
        return [_own(each) for each in value]
    if type(value) is dict:
        return {name: _own(each) for name, each in value.items()}
    return value
