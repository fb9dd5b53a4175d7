"""From claimed occurrences to their messages: lock, publish, confirm."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from celery.beat import SchedulingError
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError
from kombu.utils.encoding import safe_repr

from ..config import Config
from ..connections import DataError, RedisError, ResponseError, broker_place, what_it_does
from ..errors import ConfigError, DuplicateTaskError, LockBackendError, UnusableLockError
from ..locks import backend_of, time_to_start
from ..locks.acquire import UNSENT_TTL, Granted, Refused, cancel_releases, keep, note
from ..locks.base import HEADER, RUN_HEADER, Holder, Ref, Verdict, unusable
from ..locks.late_release import release_later
from ..log import Log
from ..outbox import MOST_CHARACTERS, MOST_MESSAGES, reports_each, size
from ..overlap import Overlap
from .backoff import Backoff
from .decision_log import log_decision
from .destination import queue_reached
from .entries.occurrence import WITHOUT_LOCK, Decision, DecisionType
from .message import Message, prepare
from .store.probe import with_advice

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from celery import Celery
    from celery.result import AsyncResult

    from ..locks.base import Headers
    from ..outbox import Command, Outbox
    from .entries.entry import Entry
    from .leadership.lease import Term
    from .store.claims import ClaimedOccurrence, Confirmation, Store


__all__ = (
    "BROKER",
    "LOCKS",
    "RETRY_AFTER",
    "Dispatcher",
    "Published",
    "Publisher",
    "delay_of",
    "in_words",
    "is_refusal",
    "is_transient",
    "not_published",
)

log = Log("celery.beat")

#: Seconds after which another beat may retake an occurrence that was claimed and not confirmed.
RETRY_AFTER = 30.0

#: Fraction of ``RETRY_AFTER`` in which the beat that claimed an occurrence may still send it.
PUBLISH_SHARE = 0.8

#: The servers without which messages are not sent, as the log names them.
BROKER, LOCKS = "the broker", "the locks' server"

#: Errors of an unreachable broker or locks' server.
UNREACHABLE = (OperationalError, RedisError, LockBackendError, OSError)

#: Errors of a message that cannot be made, as with an option of the wrong type or an unknown compression.
UNUSABLE = (LookupError, TypeError, ValueError, DataError)


def is_transient(exc: Exception) -> bool:
    """Return whether an attempt failed because a server is unreachable, so that a retry may succeed."""
    return any(isinstance(cause, UNREACHABLE) and not _is_of_message(cause) for cause in _causes(exc))


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes at any depth: Celery and kombu wrap the real error, sometimes twice.

    The causes of an error of one message say nothing about a server.
    """
    met = set[int]()  # a task's own code may raise an error from itself
    while exc is not None and id(exc) not in met:
        yield exc
        if _is_of_message(exc):
            return
        met.add(id(exc))
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)


def is_refusal(exc: Exception) -> bool:
    """Return whether a server has answered, and its answer is the error."""
    return any(what_it_does(cause) == "refuses" for cause in _causes(exc))


def _server_of(exc: BaseException) -> str:
    """Return the server that is behind the error of a message."""
    return LOCKS if any(isinstance(cause, LockBackendError) for cause in _causes(exc)) else BROKER


def in_words(exc: Exception) -> str:
    """Return an error for a log: the name of the first cause as well if that has no words."""
    *_, cause = _causes(exc)
    return with_advice(exc) if cause.args else f"{with_advice(exc).rstrip(': ')}: {type(cause).__name__}"


def _is_of_message(exc: BaseException) -> bool:
    """Return whether an error concerns one message or its lock: kombu takes some of these for errors of the broker."""
    if isinstance(exc, UnusableLockError):
        return True
    cause = exc.__cause__ if isinstance(exc, OperationalError) else None
    if isinstance(cause, OSError):  # the error of a wrong certificate is also a ValueError
        return False
    return isinstance(cause, UNUSABLE) or any(
        isinstance(each, ResponseError) and "WRONGTYPE" in str(each) for each in (exc, cause)
    )


class Publisher(Protocol):
    """The scheduler as the dispatcher needs it."""

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


@dataclass(slots=True)
class _Attempt:
    """A message, and what has become of it."""

    message: Message
    outcome: Granted | Refused | None = None  #: as of ``Dispatcher.outcome``
    error: Exception | None = None  #: why it is not sent
    commands: Sequence[Command] = ()  #: that are to send it; empty: it is sent, or not to be sent
    published: Published | None = None  #: by code of others


class Dispatcher:
    """Sends claimed occurrences, each under its lock and under its own task id.

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
        self._publisher, self.progress = publisher, progress
        self._said_unlocked = False
        self._said_unlocked_of = set[str]()  #: the same of entries, by their keys
        self._unreachable = set[str]()  #: the servers that were logged as unreachable
        self._backoff = Backoff()
        self._queues: dict[str, str] = {}  #: the queues of the messages of this dispatch, by task id
        self._without_ticket = set[str]()  #: the ids of those that have none

    def dispatch(self, claimed: Sequence[ClaimedOccurrence], term: Term, now: datetime) -> None:
        """Lock all occurrences in one round trip, publish them in a few, confirm all in one round trip.

        Each occurrence comes with its entry and with the entry's past, in which the occurrence is counted.

        An unconfirmed occurrence stays pending: this beat or the next leader retries it under the same task id.
        Meanwhile it holds no lock, because its entry may be edited, paused or deleted before it is sent.
        """
        if not claimed:
            return
        taken_until = time.monotonic() + RETRY_AFTER
        deadline = taken_until - RETRY_AFTER * (1 - PUBLISH_SHARE)
        outage: LockBackendError | None = None
        try:
            looked_after = self.check_workers(claimed)
        except LockBackendError as exc:
            outage, looked_after = exc, True  # messages that may need a lock wait
        messages, wrong = prepare(self.app, self.report_each(claimed), looked_after=looked_after)
        self._release(*(lock for message, _ in wrong for lock in message.locks))
        decided: list[Confirmation] = [self._give_up(*each) for each in wrong]
        unsent, asked, one_by_one = list[str](), outage is None, reports_each(self.app)
        messages = self.by_failures(messages)
        try:
            holders: Mapping[str, Holder] = {}
            try:
                holders = self._acquire(messages) if asked else {}
                if any(holder.verdict is Verdict.ACQUIRED for holder in holders.values()):
                    self._note_answer(LOCKS)  # HELD proves nothing: a server that refuses writes still reads a holder
            except LockBackendError as exc:
                outage = exc
            ready = messages
            if outage is not None:
                unsent.extend(message.entry.key for message in messages if message.call is not None)
                ready = [message for message in messages if message.call is None]
            if outage is not None and unsent:
                self._note_failure(outage)
            before_task_publish.connect(self._note_queue)
            for settled in self._send_all(ready, holders, term, deadline, unsent, one_by_one=one_by_one):
                decided.append(settled)
        finally:
            before_task_publish.disconnect(self._note_queue)
            self._keep_locks({each.decision.occurrence.id for each in decided if each.decision.is_sent}, messages, now)
            self.store.confirm(decided, term)
            self.store.postpone({each: now + timedelta(seconds=self._backoff.seconds(each)) for each in unsent})
            # Only until then: afterwards another beat may hold these locks for the same task ids.
            if asked and self._publisher.may_publish(term) and time.monotonic() < taken_until:
                over = {each.decision.occurrence.id for each in decided}
                left = [message for message in messages if message.occurrence.id not in over]
                locks = [lock for message in left for lock in message.locks]
                self._release(*locks) if outage is None else self._release_later(locks)

    def by_failures(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages in another order: those that have failed most often come last."""
        return sorted(messages, key=lambda message: self._backoff.failures_of(message.entry.key))

    def _send_all(
        self,
        messages: Sequence[Message],
        holders: Mapping[str, Holder],
        term: Term,
        deadline: float,
        unsent: list[str],
        *,
        one_by_one: bool,
    ) -> Iterator[Confirmation]:
        """Send messages, for as long as this beat may; yield the confirmation of each.

        Args:
            unsent: receives the keys of the entries whose messages a server does not take now.
            one_by_one: send each in a round trip of its own.
        """

        def may_send() -> bool:
            return self._publisher.may_publish(term) and time.monotonic() <= deadline

        broker_is_down, patience, left = False, Config.of(self.app).singlebeat_socket_timeout, deque(messages)
        while left and may_send():
            if broker_is_down:  # each further message would wait for the broker again
                unsent.extend(message.entry.key for message in left)
                return
            began, failed = time.monotonic(), list[tuple[Message, Exception]]()
            for attempt in self._send_next(left, holders, may_send, is_alone=one_by_one):
                message, exc = attempt.message, attempt.error
                if exc is None:
                    yield self._settle(attempt)
                elif not self._publisher.may_publish(term):
                    continue
                elif is_transient(exc):
                    failed.append((message, exc))
                else:
                    self._release(*message.locks)
                    yield self._give_up(message, exc)
            if failed:
                unsent.extend(message.entry.key for message, _ in failed)
                away = [(message, exc) for message, exc in failed if not self._is_refused(message, exc)]
                if away:
                    self._note_failure(away[0][1], *(message.entry.key for message, _ in away))
                patience -= time.monotonic() - began
                # The cause may be one message alone. A broker that hangs may still accept connections.
                broker_is_down = patience <= 0 or not self._publisher.reaches_broker()
                if not broker_is_down:
                    self._note_lone_failures(away)

    def _send_next(
        self, left: deque[Message], holders: Mapping[str, Holder], may_send: Callable[[], bool], *, is_alone: bool
    ) -> list[_Attempt]:
        """Send the first of the messages that are left, or many in one round trip where the broker takes that.

        Returns:
            The attempts; without those that this beat may no longer send.
        """
        made, characters = list[_Attempt](), 0
        with ExitStack() as stack:
            is_alone = is_alone or self._goes_alone(left[0])
            try:
                outbox = None if is_alone else stack.enter_context(self._publisher.collecting())
            except Exception as exc:  # a transport's driver may raise anything
                return [_Attempt(left.popleft(), error=exc)]
            most = MOST_MESSAGES if outbox is not None else 1
            while left and len(made) < most and characters < MOST_CHARACTERS and may_send():
                if made and self._goes_alone(left[0]):
                    break
                message = left.popleft()
                made.append(self._make(message, holders.get(message.occurrence.id), outbox))
                characters += size(made[-1].commands)
                if made[-1].error is not None:  # the connection may be forgotten
                    break
            collected = [attempt for attempt in made if attempt.commands]
            if outbox is None or not collected:
                return made
            self.progress()
            if not may_send():
                return [attempt for attempt in made if not attempt.commands]
            try:
                errors: Sequence[Exception | None] = outbox.send([attempt.commands for attempt in collected])
            except Exception as exc:  # a transport's driver may raise anything
                errors = [exc] * len(collected)
        for attempt, error in zip(collected, errors, strict=True):
            attempt.error = error
        return made

    def _goes_alone(self, message: Message) -> bool:
        """Return whether a message is sent by itself; one that has failed may be the cause of the failure."""
        return message.goes_its_own_way or bool(self._backoff.failures_of(message.entry.key))

    def _make(self, message: Message, holder: Holder | None, outbox: Outbox | None) -> _Attempt:
        """Make the message of an occurrence, if it is to be sent; without an outbox it is sent at once."""
        attempt = _Attempt(message)
        self.progress()
        try:
            attempt.outcome = self.outcome(message, holder)
            if isinstance(attempt.outcome, Refused):
                return attempt
            if outbox is not None:
                outbox.expect()
            result = self.publish(message, attempt.outcome)
        except Exception as exc:  # sending runs a task's own code and the broker's driver
            duplicate = next((cause for cause in _causes(exc) if isinstance(cause, DuplicateTaskError)), None)
            if duplicate is not None and isinstance(duplicate.holder, Holder):
                attempt.outcome = Refused(duplicate.holder)
            else:
                attempt.error = exc
            return attempt
        if outbox is not None and outbox.is_full:
            attempt.commands = outbox.commands
            self._queues[message.occurrence.id] = outbox.queue
            if not outbox.commands:
                attempt.error = SchedulingError("no queue is bound to its exchange with its routing key")
        if message.is_sent_by_others:
            attempt.published = self._published_by_others(message, result)
        return attempt

    def _published_by_others(self, message: Message, result: object) -> Published | None:
        """Return what code of others has done with a message, by its result; None if it was sent as beat sends it."""
        if message.locks_itself:
            held_by, waits_for = (getattr(result, name, None) for name in ("holder", "waits_for"))
            if getattr(result, "is_duplicate", False) and isinstance(held_by, Holder):
                return not_published(message, Refused(held_by))
            return Published.under(waits_for if isinstance(waits_for, Holder) else None)
        sent_as, why = getattr(result, "id", None), ""
        if sent_as is not None and sent_as != message.occurrence.id:
            why = f"sent it as task {sent_as}"
        elif message.plan is not None and message.occurrence.id in self._without_ticket:
            why = "sent it without its headers"
        if not why:
            return None
        why = f"its task's own apply_async, or the app's send_task, {why}"
        if message.plan is not None:  # no worker would free it
            self._release(*message.locks)
            why = f"{why}, so without its lock"
            if message.entry.key not in self._said_unlocked_of:
                self._said_unlocked_of.add(message.entry.key)
                about = {"entry": message.entry.name, "reason": why}
                log.warning("beat: %(entry)s is sent without a lock", event="unlocked", **about)
        return Published(DecisionType.DISPATCHED, reason=why)

    def check_workers(self, claimed: Sequence[ClaimedOccurrence]) -> bool:
        """Return whether workers free the locks of the plain tasks here; if not, free those of tasks that were pending.

        Raises:
            LockBackendError: the locks' server does not answer.
        """
        plain = [
            each
            for each in claimed
            if not hasattr(type(self.app.tasks.get(each.stored.entry.task)), "generate_lock")
            and (each.occurrence.overlap or each.stored.policy.overlap) is not Overlap.ALLOW_ALL
        ]
        looked_after = bool(plain) and self._ask_for_workers()
        if not looked_after:  # a lock may have been acquired while a worker was seen
            self._free_locks([each for each in plain if each.stored.pending is not None])
        return looked_after

    def report_each(self, claimed: Iterable[ClaimedOccurrence]) -> Iterator[ClaimedOccurrence]:
        """Yield occurrences, and report progress at each."""
        for each in claimed:  # a task's own key function may take long
            self.progress()
            yield each

    def publish(self, message: Message, granted: Granted | None) -> object:
        """Send the task of an entry, and return what its ``apply_async`` returns.

        Raises:
            SchedulingError: it could not be sent.
        """
        options = message.entry.options
        if granted is not None:
            options["headers"] = {**options["headers"], HEADER: granted.ticket.header()}
        return self._publisher.publish(message.entry)

    def _is_refused(self, message: Message, exc: Exception) -> bool:
        """Return whether RabbitMQ answers and refuses one message, as for a full queue; log it now and then."""
        # By its name: a beat whose broker is Redis does not load the driver of RabbitMQ.
        if not any(type(cause).__name__ == "MessageNacked" for cause in _causes(exc)):
            return False
        if self._backoff.refused(message.entry.key):
            self._log_refusal(message, exc)
        return True

    def _note_lone_failures(self, failed: Sequence[tuple[Message, Exception]]) -> None:
        """Log the messages that fail again and again, unless their server is known to be unreachable."""
        for message, exc in failed:
            if _server_of(exc) not in self._unreachable and self._backoff.fails_alone(message.entry.key):
                self._log_refusal(message, exc)

    def _log_refusal(self, message: Message, exc: Exception) -> None:
        text = "beat: %(server)s answers, and does not take the message of %(entry)s, which stays pending"
        about = {"server": _server_of(exc), "entry": message.entry.name}
        log.error(text, event="refused", **about, reason=in_words(exc))

    def _note_failure(self, exc: Exception, *keys: str) -> None:
        server = _server_of(exc)
        self._publisher.forget_broker()
        if self._backoff.failed(*keys) and server not in self._unreachable:
            self._unreachable.add(server)
            until = "takes it" if is_refusal(exc) else "answers"
            text = f"Scheduler: Message Error: due occurrences stay pending until %(server)s {until}"
            # The locks' server is in the error.
            where = "" if server == LOCKS else f"{BROKER} {broker_place(self.app)}: "
            log.error(text, event="unreachable", server=server, reason=f"{where}{in_words(exc)}")

    def _note_answer(self, server: str) -> None:
        if server in self._unreachable:
            self._unreachable.remove(server)
            log.warning("Scheduler: %(server)s works again", event="recovered", server=server)

    def _give_up(self, message: Message, exc: Exception) -> Confirmation:
        """Log that a message can never be sent, and return its confirmation as ``publish_failed``."""
        self._backoff.forget(message.entry.key)
        entry, why = message.entry, safe_repr(exc.__context__ or exc)
        decision = Decision(entry.name, entry.task, message.occurrence, DecisionType.PUBLISH_FAILED, why)
        log_decision(decision, self._timestamp(), detail="".join(traceback.format_exception(exc)))
        return message.claimed.confirmation(decision)

    def _release(self, *locks: Ref) -> None:
        if not locks:
            return
        self.progress()
        try:
            backend_of(self.app).finish_many(locks, remember_for=Config.of(self.app).singlebeat_queued_ttl)
        except LockBackendError:
            self._release_later(locks)
        except ConfigError:  # then there are no locks
            pass

    def _release_later(self, locks: Sequence[Ref]) -> None:
        for lock in locks:
            release_later(self.app, lock)

    def free(self, claimed: Sequence[ClaimedOccurrence]) -> None:
        """Free the locks of occurrences that are not to be sent after all."""
        self._backoff.forget(*(each.stored.entry.key for each in claimed))
        self._free_locks(claimed)

    def _free_locks(self, claimed: Sequence[ClaimedOccurrence]) -> None:
        messages, _ = prepare(self.app, self.report_each(claimed), looked_after=True)
        self._release(*(lock for message in messages for lock in message.locks))

    def _ask_for_workers(self) -> bool:
        """Return whether a worker was seen that frees the locks of plain tasks, which else would stay for an hour."""
        self.progress()
        try:
            seen, why = backend_of(self.app).workers_seen(), "no worker with singlebeat installed was seen"
        except ConfigError as exc:
            seen, why = False, str(exc)
        if not seen and not self._said_unlocked:
            log.warning("beat: Tasks that are no Singleton are sent without a lock", event="unlocked", reason=why)
        elif seen and self._said_unlocked:
            log.warning("beat: Tasks that are no Singleton are sent with a lock from now on", event="locked")
        self._said_unlocked = not seen
        return seen

    def _note_queue(
        self,
        headers: Headers | None = None,
        declare: Sequence[object] | None = None,
        exchange: object = None,
        routing_key: str = "",
        **_: object,
    ) -> None:
        """Note the queue of a message that Celery is about to publish, and whether it has a ticket."""
        if headers and HEADER not in headers:
            self._without_ticket.add(str(headers.get("id")))
        if headers and RUN_HEADER in headers:
            self._queues[str(headers.get("id"))] = queue_reached(exchange, routing_key, (declare or [None])[0])

    def _keep_locks(self, sent: Collection[str], messages: Sequence[Message], now: datetime) -> None:
        """Prolong the locks of sent messages for the time that the messages may wait, and store the queue in each.

        A lock that a worker has begun or freed meanwhile stays as it is.
        """
        refs = defaultdict[float, dict[Ref, str]](dict)
        for message in messages:
            if message.occurrence.id not in sent:
                continue
            seconds = message.plan.wait if message.plan is not None else 0.0
            delay = delay_of(message, self.app, now)
            queue = self._queues.get(message.occurrence.id, "")
            for ref in message.locks:
                refs[seconds][ref] = note(ref, queue=queue, delay=delay)
        self._queues.clear()
        self._without_ticket.clear()
        for seconds, locks in refs.items():  # one round trip, unless countdowns differ
            if seconds > UNSENT_TTL:
                self.progress()
                keep(backend_of(self.app), locks, seconds)

    def _acquire(self, messages: Sequence[Message]) -> Mapping[str, Holder]:
        plans = [message.plan for message in messages if message.plan is not None]
        calls = [call for plan in plans if (call := plan.unsent) is not None]
        for call in calls:
            cancel_releases(call)
        self.progress()
        holders = backend_of(self.app).acquire_many(calls, may_be_resent=True) if calls else []
        return {call.ref.task_id: holder for call, holder in zip(calls, holders, strict=True)}

    def _settle(self, attempt: _Attempt) -> Confirmation:
        """Note what has become of an occurrence, and return the decision and its change of the entry's past."""
        message, outcome = attempt.message, attempt.outcome
        if attempt.published is not None:
            published = attempt.published
        elif isinstance(outcome, Refused):
            published = not_published(message, outcome)
        else:
            waits_for = None
            if outcome is not None and message.task is not None:
                replaces = outcome.replacing is not None
                waits_for = outcome.note_sent(message.task) if replaces else outcome.ticket.waits_for
            published = Published.under(waits_for)
        decision = self.decide(message, published)
        self.report(message, decision, BROKER)
        return message.claimed.confirmation(decision)

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
        self._backoff.succeeded(message.entry.key)
        if decision.is_sent:
            for server in servers:
                self._note_answer(server)
            if message.without_lock:
                about = {"entry": decision.entry, "reason": message.without_lock}
                log.error("beat: %(entry)s is sent without its lock", event="unlocked", **about)
            about = {"task": decision.task, "id": decision.occurrence.id}
            log.debug("Scheduler: %(task)s sent. id->%(id)s", event="published", **about)
        log_decision(decision, self._timestamp())

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


def not_published(message: Message, refused: Refused) -> Published:
    """Return what became of an occurrence that is not sent."""
    if refused.holder.task_id != message.occurrence.id:
        return Published(DecisionType.SKIPPED_OVERLAP, refused.holder)
    # An earlier try or an earlier claim has sent it.
    return Published(DecisionType.DISPATCHED if message.stored.pending is not None else DecisionType.RUN_BEFORE)


def delay_of(message: Message, app: Celery, now: datetime) -> float:
    """Return the seconds from now until a message may start."""
    options = message.entry.options
    if not {"countdown", "eta"} & options.keys():
        return 0.0
    ttl = Config.of(app).singlebeat_queued_ttl
    return time_to_start({**options, "expires": None}, queued_ttl=ttl, now=now) - ttl
