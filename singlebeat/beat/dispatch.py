"""What is decided about claimed occurrences, and said about it, however their messages are sent."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..config import Config
from ..errors import ConfigError, LockBackendError, UnusableLockError
from ..locks import backend_of
from ..locks.acquire import UNSENT_TTL
from ..locks.base import HEADER, Call, Holder, Ref, Verdict, unusable
from ..locks.late_release import release_later
from ..log import Log
from ..overlap import Overlap
from .asking import Asking
from .calendar.zone import app_zone
from .decide import dropped, is_ever_too_late
from .decision_log import log_decision
from .entries.occurrence import WITHOUT_LOCK, Decision, DecisionType
from .failures import Failures, unsendable
from .message import prepare

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from celery import Celery
    from celery.result import AsyncResult

    from ..locks.acquire import Granted, Refused
    from ..outbox import Outbox
    from .entries.entry import Entry
    from .leadership.lease import Term
    from .message import Message
    from .store.claims import ClaimedOccurrence, Confirmation, Store

__all__ = ("Dispatcher", "Published", "Publisher", "has_begun", "not_published")

log = Log("celery.beat")


class Publisher(Protocol):
    """The scheduler as the dispatcher needs it."""

    own_code_s: float  #: how many seconds code of the user took in the last ``publish``, before anything was sent

    def publish(self, entry: Entry) -> AsyncResult:
        """Send the task of an entry; raise SchedulingError if it could not be sent."""

    def collecting(self) -> AbstractContextManager[Outbox | None]:
        """Let ``publish`` put each message into an outbox; None if the broker's transport, or kombu, has none.

        Raises:
            Exception: the broker is not reached.
        """

    def may_publish(self, term: Term) -> bool:
        """Return whether this beat still leads in a term."""

    def reaches_broker(self) -> bool:
        """Return whether there is a connection to the broker, or can be one."""

    def forget_broker(self) -> None:
        """Drop a connection to the broker that failed."""


class Published(NamedTuple):
    """The outcome of an attempt to send an occurrence."""

    type: DecisionType
    holder: Holder | None = None  #: the other run that holds its lock; None if there is none
    reason: str = ""  #: how code of others has sent it; empty if beat has sent it as it is

    @classmethod
    def under(cls, waits_for: Holder | None) -> Published:
        """Return the outcome of a message that is sent, and waits for the end of another run, or for none."""
        return cls(DecisionType.DISPATCHED) if waits_for is None else cls(DecisionType.BUFFERED, waits_for)


class Dispatcher:
    """Decides about claimed occurrences; ``OneWrite`` or ``SeveralWrites`` sends them, by what it says.

    Each has its own task id, and its lock unless no worker would free that.

    Args:
        publisher: sends messages while this beat leads.
        progress: called at each step and before each call to a server, because a call may be repeated for long.
        timestamp: returns the server's time in seconds since 1970.
        suspect: called with the keys of locks that keep a run waiting, because their messages may be lost.
    """

    def __init__(
        self,
        app: Celery,
        store: Store,
        *,
        publisher: Publisher,
        progress: Callable[[], None],
        timestamp: Callable[[], float],
        suspect: Callable[..., object],
    ) -> None:
        self.app, self.store, self._timestamp, self._suspect = app, store, timestamp, suspect
        self.publisher, self.progress = publisher, progress
        self._said_unlocked = False
        self._workers_trusted_until = 0.0  #: until when they count as seen, by the monotonic clock
        self._workers_noted_until = 0.0  #: until when a standby does not ask for them again
        self._said_unlocked_of = set[str]()  #: the same of entries, by their keys
        self._said_why_unsent = dict[str, str]()  #: the reason whose traceback was logged last, by the key of an entry
        self.failures = Failures(app, publisher.forget_broker)
        self.asking = Asking(progress)

    def check_workers(self, claimed: Sequence[ClaimedOccurrence]) -> bool:
        """Return whether workers free the locks of the plain tasks here; if not, free those of tasks that were pending.

        Raises:
            LockBackendError: the locks' server does not answer.
        """
        plain = [each for each in claimed if self.needs_worker(each)]
        looked_after = bool(plain) and self._ask_for_workers()
        if not looked_after:  # a lock may have been acquired while a worker was seen
            pending = [each for each in plain if each.stored.pending is not None]
            messages, _ = self.messages(pending, looked_after=True)
            self.release(*(lock for message in messages for lock in message.locks))
        return looked_after

    def needs_worker(self, claimed: ClaimedOccurrence) -> bool:
        """Return whether an occurrence is of a plain task, and is sent with a lock if a worker would free that."""
        is_plain = not hasattr(type(self.app.tasks.get(claimed.stored.entry.task)), "generate_lock")
        return is_plain and (claimed.occurrence.overlap or claimed.stored.policy.overlap) is not Overlap.ALLOW_ALL

    def note_workers(self) -> None:
        """Note whether a worker was seen, in a beat that stands by: it may lead next on a server that was emptied."""
        if time.monotonic() >= self._workers_noted_until:
            self._workers_noted_until = time.monotonic() + Config.of(self.app).singlebeat_lock_lease / 2
            with suppress(ConfigError, LockBackendError):  # the leader logs it
                if backend_of(self.app).workers_seen():
                    self._trust_workers()

    def _trust_workers(self) -> None:
        self._workers_trusted_until = time.monotonic() + Config.of(self.app).singlebeat_lock_lease

    def _ask_for_workers(self) -> bool:
        """Return whether a worker was seen that frees the locks of plain tasks, which else would stay for an hour."""
        self.progress()
        try:
            seen, why = backend_of(self.app).workers_seen(), "no worker with singlebeat installed was seen"
        except ConfigError as exc:
            seen, why = False, str(exc)
        if seen:
            self._trust_workers()
        # A server that comes back empty: workers announce themselves again at each renewal, a third of a lease apart.
        seen = seen or time.monotonic() < self._workers_trusted_until
        if not seen and not self._said_unlocked:
            log.warning("beat: Tasks that are no Singleton are sent without a lock", event="unlocked", reason=why)
        elif seen and self._said_unlocked:
            log.warning("beat: Tasks that are no Singleton are sent with a lock from now on", event="locked")
        self._said_unlocked = not seen
        return seen

    def note_unlocked(self, message: Message, reason: str) -> None:
        """Log, once for each entry, that its runs are sent without their lock."""
        if message.entry.key not in self._said_unlocked_of:
            self._said_unlocked_of.add(message.entry.key)
            about = {"entry": message.entry.name, "reason": reason}
            log.warning("beat: %(entry)s is sent without a lock", event="unlocked", **about)

    def messages(
        self, claimed: Iterable[ClaimedOccurrence], *, looked_after: bool
    ) -> tuple[list[Message], list[tuple[Message, Exception]]]:
        """Return the messages of occurrences that can be sent, and the others with their errors."""
        return prepare(self.app, self._report_each(claimed), looked_after=looked_after)

    def _report_each(self, claimed: Iterable[ClaimedOccurrence]) -> Iterator[ClaimedOccurrence]:
        """Yield occurrences, and report progress at each."""
        for each in claimed:
            self.progress()
            yield each

    def by_failures(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages in another order: those that have failed most often come last.

        Of others, those come last that code of the user sends: it may hang until the watchdog ends this beat.
        """
        failures_of = self.failures.backoff.failures_of
        return sorted(messages, key=lambda message: (failures_of(message.entry.key), message.is_sent_by_others))

    def publish(self, message: Message, granted: Granted | None) -> object:
        """Send the task of an entry, and return what its ``apply_async`` returns.

        Raises:
            SchedulingError: it could not be sent.
        """
        options = message.entry.options
        if granted is not None:
            options["headers"] = {**options["headers"], HEADER: granted.ticket.header()}
        try:
            return self.publisher.publish(message.entry)
        finally:
            self.asking.note_time(message.entry, self.publisher.own_code_s)

    def outcome(self, message: Message, holder: Holder | None) -> Granted | Refused | None:
        """Return what the answer of the locks' server means for a message; None if beat acquires no lock for it.

        Raises:
            UnusableLockError: the lock cannot be read, and the message could not wait for its turn.
        """
        if message.plan is None:
            return None
        if holder is None:
            return message.plan.granted
        if holder.verdict is Verdict.UNUSABLE:
            message.without_lock = unusable(message.key, holder.reason)
            if message.plan.overlap is not Overlap.SKIP:  # it could not wait for its turn
                raise UnusableLockError(message.without_lock)
            return message.plan.granted
        # The call has ended under this lock, so the present holder does not matter to it.
        done = holder.verdict is Verdict.DONE
        return message.plan.outcome(replace(holder, task_id=message.occurrence.id) if done else holder)

    def dropped(self, message: Message) -> Decision | None:
        """Return the decision about a message that waited until it was too late; None if it may be sent."""
        if not is_ever_too_late(message.stored):
            return None
        now = datetime.fromtimestamp(self._timestamp(), UTC)
        return dropped(message.stored, message.occurrence, now, zone=app_zone(self.app))

    def decide(self, message: Message, published: Published) -> Decision:
        """Return the decision about an occurrence; have its lock checked if the message of the holder may be lost."""
        entry, occurrence, (kind, other, reason) = message.entry, message.occurrence, published
        if other is not None and other.state == "queued":
            self._suspect(*(lock.key for lock in message.locks))
        if kind is DecisionType.RUN_BEFORE:
            reason = f"task {occurrence.id} has begun or ended before"
        if kind is DecisionType.DISPATCHED and message.without_lock:
            reason = f"{WITHOUT_LOCK}{message.without_lock}"
        if other is not None:
            # The name of the entry itself is not repeated in its own history.
            shown = replace(other, entry="") if other.entry == entry.name else other
            reason = f"{'waits for' if kind is DecisionType.BUFFERED else 'held by'} {shown}"
        about = (other.task_id, other.entry) if other is not None else ("", "")
        return Decision(entry.name, entry.task, occurrence, kind, reason, *about)

    def report(self, message: Message, decision: Decision, *servers: str) -> None:
        """Log a decision, and that these servers work if its message is sent."""
        self.failures.backoff.succeeded(message.entry.key)
        if decision.is_sent:
            for server in servers:
                self.failures.note_answer(server)
            if message.without_lock:
                about = {"entry": decision.entry, "reason": message.without_lock}
                log.error("beat: %(entry)s is sent without its lock", event="unlocked", **about)
            about = {"task": decision.task, "id": decision.occurrence.id}
            log.debug("Scheduler: %(task)s sent. id->%(id)s", event="published", **about)
        log_decision(decision, self._timestamp())

    def give_up(self, message: Message, exc: Exception) -> Confirmation:
        """Log that a message can never be sent, and return its confirmation as ``publish_failed``.

        The traceback is logged once for each reason: the cause is most often in the entry, which stays as it is.
        """
        self.failures.backoff.forget(message.entry.key)
        entry, why = message.entry, unsendable(exc)
        decision = Decision(entry.name, entry.task, message.occurrence, DecisionType.PUBLISH_FAILED, why)
        is_new = self._said_why_unsent.get(entry.key) != why
        self._said_why_unsent[entry.key] = why
        log_decision(decision, self._timestamp(), detail="".join(traceback.format_exception(exc)) if is_new else "")
        return message.claimed.confirmation(decision)

    def drop(self, message: Message, decision: Decision) -> Confirmation:
        """Log that a message is not to be sent any more, and return its confirmation."""
        self.failures.backoff.forget(message.entry.key)
        log_decision(decision, self._timestamp())
        return message.claimed.confirmation(decision)

    def release(self, *locks: Ref, is_over: bool = False) -> None:
        """Free locks, later if their server does not answer.

        Args:
            is_over: remember that their runs are over: none begins under them from now on.
        """
        if not locks:
            return
        self.progress()
        remember_for = Config.of(self.app).singlebeat_queued_ttl
        try:
            with self.failures.asking_locks():
                backend_of(self.app).finish_many(locks, remember_for=remember_for, ran=is_over)
        except LockBackendError:
            self.release_later(locks, remember_for=remember_for if is_over else 0.0)
        except ConfigError:  # then there are no locks
            pass

    def release_later(self, locks: Sequence[Ref], *, remember_for: float = 0.0) -> None:
        """Free locks when their server answers again, and remember for some seconds that their runs are over."""
        for lock in locks:
            release_later(self.app, lock, remember_for=remember_for)

    def begun(self, claimed: Sequence[ClaimedOccurrence]) -> Mapping[str, bool | None]:
        """Return by id whether the runs of occurrences have begun or ended: an earlier try has sent their messages.

        It is None if the locks' server does not answer. An occurrence that has no lock is left out. The others have
        their locks until ``free``.
        """
        messages, _ = self.messages(claimed, looked_after=True)
        calls = [Call(ref, message.entry.task, "", UNSENT_TTL) for message in messages for ref in message.run_locks]
        if not calls:
            return {}
        self.progress()
        try:
            with self.failures.asking_locks():
                holders = backend_of(self.app).acquire_many(calls, may_be_resent=True)
        except ConfigError:  # then there are no locks
            return {}
        except LockBackendError:
            return dict.fromkeys(call.ref.task_id for call in calls)
        return {call.ref.task_id: has_begun(call.ref, holder) for call, holder in zip(calls, holders, strict=True)}

    def free(self, claimed: Sequence[ClaimedOccurrence]) -> None:
        """Free the locks of occurrences that are not to be sent after all; a message of an earlier try is refused."""
        self.failures.backoff.forget(*(each.stored.entry.key for each in claimed))
        messages, _ = self.messages(claimed, looked_after=True)
        of_runs = [lock for message in messages for lock in message.run_locks]
        self.release(*of_runs, is_over=True)
        self.release(*(lock for message in messages for lock in message.locks if lock not in message.run_locks))


def has_begun(ref: Ref, holder: Holder | None) -> bool:
    """Return whether an answer of the locks' server says that the run of a message has begun, or has ended."""
    if holder is None:
        return False
    return holder.verdict is Verdict.DONE or (holder.verdict is Verdict.RUNNING and holder.task_id == ref.task_id)


def not_published(message: Message, refused: Refused) -> Published:
    """Return what became of an occurrence that is not sent."""
    if refused.holder.task_id != message.occurrence.id:
        return Published(DecisionType.SKIPPED_OVERLAP, refused.holder)
    # An earlier try or an earlier claim has sent it.
    return Published(DecisionType.DISPATCHED if message.stored.pending is not None else DecisionType.RUN_BEFORE)
