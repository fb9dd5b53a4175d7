"""From claimed occurrences to their messages in several writes: lock, publish, confirm, on any servers."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

from celery.signals import after_task_publish, before_task_publish
from kombu.utils.encoding import safe_repr

from ..broker import own_broker
from ..config import Config
from ..destination import id_of_message, queue_reached, rename_message
from ..errors import DuplicateTaskError, LockBackendError
from ..locks import backend_of, delay_of
from ..locks.acquire import UNSENT_TTL, Refused, cancel_releases, keep, note
from ..locks.base import HEADER, RUN_HEADER, Holder, Ref, Verdict, unusable
from ..log import Log
from ..outbox import MOST_CHARACTERS, MOST_MESSAGES, reports_each, size
from ..server_errors import is_key_denied
from .dispatch import Published, has_begun, not_published
from .entries.occurrence import SENT_BEFORE, DecisionType
from .failures import BROKER, LOCKS, NoQueueError, causes, is_transient
from .store.probe import lock_refusal

if TYPE_CHECKING:
    from ..locks.acquire import Granted
    from ..locks.base import Call, Headers
    from ..outbox import Command, Outbox
    from .dispatch import Dispatcher
    from .entries.occurrence import Decision
    from .leadership.lease import Term
    from .message import Message
    from .store.claims import ClaimedOccurrence, Confirmation

__all__ = ("RETRY_AFTER", "SeveralWrites")

log = Log("celery.beat")

#: Seconds after which another beat may retake an occurrence that was claimed and not confirmed.
RETRY_AFTER = 30.0

#: Seconds that the messages which have failed before may take in one tick.
RETRIES_MAY_TAKE = 0.5

#: Seconds for which messages are made before they are sent: code of the user may choose their routes.
MADE_WITHIN = 1.0

#: Who may send a message otherwise than beat does, in words.
BY_OTHERS = "its task's own apply_async, or the app's send_task,"

#: How beat sends a run under ``task_always_eager``, in words.
RUN_HERE = "beat has run it itself, because task_always_eager is set"

#: Fraction of ``RETRY_AFTER`` in which the beat that claimed an occurrence may still send it.
PUBLISH_SHARE = 0.8


@dataclass(slots=True)
class _Attempt:
    """A message, and what has become of it."""

    message: Message
    outcome: Granted | Refused | None = None  #: as of ``Dispatcher.outcome``
    error: Exception | None = None  #: why it is not sent
    commands: Sequence[Command] = ()  #: that are to send it; empty: it is sent, or not to be sent
    published: Published | None = None  #: by code of others
    has_sent_others: bool = False  #: code of others has sent calls of other tasks, which a further try would double
    dropped: Decision | None = None  #: why it is not to be sent any more


class SeveralWrites:
    """The sending of the occurrences of one tick: many in each write, but locks, messages and confirmations apart.

    Args:
        dispatcher: decides, by the same rules as for one write.
        term: in which this beat must still lead.
        now: the server's time.
        taken_at: monotonic seconds from before the first of the occurrences was claimed or retaken.
    """

    def __init__(self, dispatcher: Dispatcher, term: Term, now: datetime, taken_at: float) -> None:
        self.dispatcher, self.app, self.publisher = dispatcher, dispatcher.app, dispatcher.publisher
        self.failures, self.term, self.now = dispatcher.failures, term, now
        self._taken_until = taken_at + RETRY_AFTER
        self._publish_until = self._taken_until - RETRY_AFTER * (1 - PUBLISH_SHARE)
        #: Celery reports each message when it is published. Asked before ``_note_queue`` is told of them, too.
        self._sends_each = reports_each(self.app)
        self._holders: Mapping[str, Holder] = {}  #: the answers of the locks' server, by task id
        self._outage: LockBackendError | None = None  #: the locks' server does not answer
        #: Seconds that messages which fail may still take.
        self._patience = Config.of(self.app).singlebeat_socket_timeout
        self._broker_is_down = False
        self._confirmations: list[Confirmation] = []
        self._dropped = set[str]()  #: the ids of the occurrences that are not to be sent any more
        self._over = set[str]()  #: those whose decisions are confirmed, and whose locks are not ours to free
        self._unsent: list[str] = []  #: the keys of the entries whose messages a server does not take now
        self._queues: dict[str, str] = {}  #: of the messages, by task id
        self._alone = ""  #: the id of the plain occurrence that code of others sends just now: of one message alone
        self._published: list[str] = []  #: the task ids of the messages that it has published for that
        self._without_ticket = set[str]()  #: the task ids of the messages without a ticket

    def send(self, claimed: Sequence[ClaimedOccurrence]) -> None:
        """Lock all occurrences in one round trip, publish and confirm ``MOST_MESSAGES`` in one round trip each.

        Before that, those that need no lock are published and confirmed: the locks' server may hang.

        Each occurrence comes with its entry and with the entry's past, in which the occurrence is counted.

        An unconfirmed occurrence stays pending: this beat or the next leader retries it under the same task id.
        Meanwhile it holds no lock, because its entry may be edited, paused or deleted before it is sent.
        """
        if not claimed:
            return
        plain: list[ClaimedOccurrence] = []
        others: list[ClaimedOccurrence] = []
        for each in claimed:
            (plain if self.dispatcher.needs_worker(each) else others).append(each)
        messages, wrong = self.dispatcher.messages(others, looked_after=True)
        free = [message for message in messages if self._needs_no_lock(message)]
        self._send(free)
        first = {message.occurrence.id for message in free}
        if self._broker_is_down:  # locks would be acquired in vain
            self._unsent += [each.stored.entry.key for each in claimed if each.occurrence.id not in first]
            self._confirm([])
            return
        left = [message for message in messages if message.occurrence.id not in first]
        try:
            with self.failures.asking_locks():
                looked_after = self.dispatcher.check_workers(plain)
        except LockBackendError as exc:
            self._outage, looked_after = exc, True  # messages that may need a lock wait
        more, wrong_too = self.dispatcher.messages(plain, looked_after=looked_after)
        self._give_up(wrong + wrong_too)
        place = {each.occurrence.id: number for number, each in enumerate(claimed)}
        left = self.dispatcher.by_failures(sorted(left + more, key=lambda message: place[message.occurrence.id]))
        is_asked = self._outage is None
        try:
            if is_asked:
                self._acquire(left)
            ready = left
            if self._outage is not None:
                ready = [message for message in left if message.call is None]
                self._unsent += [message.entry.key for message in left if message.call is not None]
            if self._outage is not None and self._unsent:
                self.failures.note(self._outage)
            self._send(ready)
        finally:
            if is_asked:
                self._release_unsent(free + left)

    def _needs_no_lock(self, message: Message) -> bool:
        """Return whether a message is sent first; one that has failed or may hang comes after the others."""
        is_free = message.call is None and not (message.locks_itself or message.is_sent_by_others)
        return is_free and not self.failures.backoff.failures_of(message.entry.key)

    def _give_up(self, wrong: Sequence[tuple[Message, Exception]]) -> None:
        """Give up messages that cannot be made."""
        self.dispatcher.release(*(lock for message, _ in wrong for lock in message.locks))
        self._confirmations += [self.dispatcher.give_up(message, exc) for message, exc in wrong]

    def _send(self, messages: Sequence[Message]) -> None:
        """Publish messages, and confirm all that is decided."""
        try:
            # Not weak: when a weak receiver dies, Celery before 5.7 gives the signal a new list of receivers, while its
            # sender of messages keeps the old list.
            before_task_publish.connect(self._note_queue, weak=False)
            self._publish(messages)
        finally:
            before_task_publish.disconnect(self._note_queue)
            self._confirm(messages)

    # ---------------------------------------------------------------- locks

    def _acquire(self, messages: Sequence[Message]) -> None:
        plans = [message.plan for message in messages if message.plan is not None]
        calls = [call for plan in plans if (call := plan.unsent) is not None]
        for call in calls:
            cancel_releases(call)
        self.dispatcher.progress()
        try:
            with self.failures.asking_locks():
                holders = self._holders_of(calls) if calls else []
        except LockBackendError as exc:
            self._outage = exc
            return
        self._holders = {call.ref.task_id: holder for call, holder in zip(calls, holders, strict=True)}
        for message in messages:
            holder = self._holders.get(message.occurrence.id)
            if holder is not None and holder.verdict is Verdict.UNUSABLE:
                message.without_lock = unusable(message.key, holder.reason)
        if any(holder.verdict is Verdict.ACQUIRED for holder in holders):
            self.failures.note_answer(LOCKS)  # HELD proves nothing: a server that refuses writes still reads a holder

    def _holders_of(self, calls: Sequence[Call]) -> Sequence[Holder]:
        """Acquire the locks of calls; the lock of a call whose key is denied to beat's user is unusable.

        The server refuses a call with such a key as a whole, and one entry must not harm the others.

        Raises:
            LockBackendError: the locks' server does not answer or refuses, or all keys of locks are denied.
        """
        try:
            return backend_of(self.app).acquire_many(calls, may_be_resent=True)
        except LockBackendError as exc:
            if not is_key_denied(exc) or lock_refusal(self.app):
                raise
            if len(calls) == 1:
                return [Holder(Verdict.UNUSABLE, calls[0].ref.task_id, "", None, 0, 0.0, reason=str(exc))]
        middle = len(calls) // 2
        return [*self._holders_of(calls[:middle]), *self._holders_of(calls[middle:])]

    def _keep_locks(self, sent: Collection[str], messages: Sequence[Message]) -> None:
        """Prolong the locks of sent messages for the time that the messages may wait, and store the queue in each.

        A lock that a worker has begun or freed meanwhile stays as it is.

        Args:
            sent: ids of occurrences.
        """
        refs, broker = defaultdict[float, dict[Ref, str]](dict), own_broker(self.app)
        for message in messages:
            if message.occurrence.id not in sent:
                continue
            seconds = message.plan.wait if message.plan is not None else 0.0
            delay = delay_of(message.entry.options, self.now)
            queue = self._queues.get(message.occurrence.id, "")
            for ref in message.locks:
                refs[seconds][ref] = note(ref, broker=broker, queue=queue, delay=delay)
        for seconds, locks in refs.items():  # one round trip, unless countdowns differ
            if seconds > UNSENT_TTL:
                self.dispatcher.progress()
                keep(backend_of(self.app), locks, seconds)

    def _release_unsent(self, messages: Sequence[Message]) -> None:
        """Release the locks of messages that are not sent, while no other beat may hold them for the same task ids."""
        if not self.publisher.may_publish(self.term) or time.monotonic() >= self._taken_until:
            return
        locks = [lock for message in messages if message.occurrence.id not in self._over for lock in message.locks]
        if self._outage is None:
            self.dispatcher.release(*locks)
        else:
            self.dispatcher.release_later(locks)

    # ---------------------------------------------------------------- messages

    def _may_publish(self) -> bool:
        return self.publisher.may_publish(self.term) and time.monotonic() <= self._publish_until

    def _publish(self, messages: Sequence[Message]) -> None:
        """Publish messages, for as long as this beat may."""
        left, retried_since = deque(messages), math.inf
        while left and self._may_publish():
            began = time.monotonic()
            has_failed = self.failures.backoff.failures_of(left[0].entry.key) > 0  # and so have all that follow
            if self._confirmations and (has_failed or left[0].is_sent_by_others):  # what comes may hang
                self._confirm(messages)
            if has_failed:
                retried_since = min(retried_since, began)
            # Each further message would wait for the broker again, or would hold up the entries of the next tick.
            if self._broker_is_down or began > retried_since + RETRIES_MAY_TAKE:
                self._unsent += [message.entry.key for message in left]
                return
            if failed := [*self._failed(self._publish_next(left))]:
                self._unsent += [message.entry.key for message, _ in failed]
                away = [(message, exc) for message, exc in failed if not self.failures.is_refused(message.entry, exc)]
                if away:
                    self.failures.note(away[0][1], *(message.entry.key for message, _ in away))
                self._patience -= time.monotonic() - began
                # The cause may be one message alone. A broker that hangs may still accept connections.
                self._broker_is_down = self._patience <= 0 or not self.publisher.reaches_broker()
                if not self._broker_is_down:
                    self.failures.note_lone(away)
            if len(self._confirmations) >= MOST_MESSAGES:  # what the server does not confirm then is sent once more
                self._confirm(messages)

    def _failed(self, attempts: Sequence[_Attempt]) -> Iterator[tuple[Message, Exception]]:
        """Settle attempts; yield the messages that are to be tried again, with their errors."""
        for attempt in attempts:
            message, exc = attempt.message, attempt.error
            if exc is None:
                self._confirmations.append(self._settle(attempt))
            elif not self.publisher.may_publish(self.term):
                continue
            elif is_transient(exc) and not (attempt.has_sent_others and self.publisher.reaches_broker()):
                yield message, exc
            else:
                self.dispatcher.release(*message.locks)
                self._confirmations.append(self.dispatcher.give_up(message, exc))

    def _publish_next(self, left: deque[Message]) -> Sequence[_Attempt]:
        """Publish the first of the messages that are left, or many in one round trip where the broker takes that.

        Returns:
            The attempts; without those that this beat may no longer send.
        """
        made, characters = list[_Attempt](), 0
        with ExitStack() as stack:
            is_alone = self._sends_each or self._goes_alone(left[0])
            try:
                outbox = None if is_alone else stack.enter_context(self.publisher.collecting())
            except Exception as exc:  # a transport's driver may raise anything
                return [_Attempt(left.popleft(), error=exc)]
            most, until = MOST_MESSAGES if outbox is not None else 1, time.monotonic() + MADE_WITHIN
            while left and len(made) < most and characters < MOST_CHARACTERS and self._may_publish():
                if made and (self._goes_alone(left[0]) or time.monotonic() >= until):
                    break
                made.append(self._attempt(left.popleft(), outbox))
                characters += size(made[-1].commands)
                if made[-1].error is not None:  # the connection may be forgotten
                    break
            collected = [attempt for attempt in made if attempt.commands]
            if outbox is None or not collected:
                return made
            self.dispatcher.progress()
            if not self._may_publish():
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
        return message.goes_its_own_way or bool(self.failures.backoff.failures_of(message.entry.key))

    def _attempt(self, message: Message, outbox: Outbox | None) -> _Attempt:
        """Make the message of an occurrence, if it is to be sent; without an outbox it is sent at once."""
        attempt = _Attempt(message)
        self.dispatcher.progress()
        holder = self._holders.get(message.occurrence.id)
        if message.call is None or not has_begun(message.call.ref, holder):
            attempt.dropped = self.dispatcher.dropped(message)
        if attempt.dropped is not None:
            return attempt
        self._published = []
        try:
            attempt.outcome = self.dispatcher.outcome(message, holder)
            if isinstance(attempt.outcome, Refused):
                return attempt
            if outbox is not None:
                outbox.expect()
            with self._noting_published(attempt):
                result = self.dispatcher.publish(message, attempt.outcome)
            if message.is_sent_by_others:
                attempt.published = self._published_by_others(message, result)
        except Exception as exc:  # sending runs a task's own code and the broker's driver
            duplicate = next((cause for cause in causes(exc) if isinstance(cause, DuplicateTaskError)), None)
            if duplicate is not None and isinstance(duplicate.holder, Holder):
                attempt.outcome = Refused(duplicate.holder)
            elif self._published:  # a second one would double the run
                attempt.published = Published(DecisionType.DISPATCHED, reason=self._failed_afterwards(message, exc))
                if message.occurrence.id not in self._published:  # no worker would free them
                    self.dispatcher.release(*message.locks)
            else:
                attempt.error = exc
            return attempt
        if outbox is not None and outbox.is_full:
            attempt.commands = outbox.commands
            self._queues[message.occurrence.id] = outbox.queue
            if not outbox.commands:
                attempt.error = NoQueueError()
        return attempt

    @contextmanager
    def _noting_published(self, attempt: _Attempt) -> Iterator[None]:
        """Note the task ids of the messages that code of others publishes meanwhile for an occurrence."""
        message = attempt.message
        if not message.is_sent_by_others:
            yield
            return

        def note(sender: object = None, headers: Headers | None = None, body: object = None, **_: object) -> None:
            task_id = id_of_message(headers or {}, body)
            if message.entry.task == sender or message.occurrence.id == task_id:
                self._published.append(task_id)
            else:
                attempt.has_sent_others = True

        after_task_publish.connect(note, weak=False)
        self._alone = "" if message.locks_itself else message.occurrence.id
        try:
            yield
        finally:
            self._alone = ""
            after_task_publish.disconnect(note)

    def _failed_afterwards(self, message: Message, exc: Exception) -> str:
        """Return how code of others has sent an occurrence, and failed then; its worker records ends of a usual one."""
        is_usual = message.occurrence.id in self._queues
        why = f"{BY_OTHERS} raised {safe_repr(exc.__cause__ or exc)} {SENT_BEFORE}"
        return why if is_usual else f"{why} as task {self._published[0]}"

    def _published_by_others(self, message: Message, result: object) -> Published | None:
        """Return what code of others has done with a message; None if it was sent as beat sends it.

        What Celery's signals have told counts more than the result.
        """
        own_id, sent_as = message.occurrence.id, str(getattr(result, "id", None) or "")
        if self.app.conf.task_always_eager:
            return Published(DecisionType.DISPATCHED, reason=RUN_HERE)
        is_sent = own_id in self._published or (message.locks_itself and bool(self._published))
        held_by, waits_for = (getattr(result, name, None) for name in ("holder", "waits_for"))
        if message.locks_itself and is_sent:
            return Published.under(waits_for if isinstance(waits_for, Holder) else None)
        if message.locks_itself and getattr(result, "is_duplicate", False) and isinstance(held_by, Holder):
            return not_published(message, Refused(held_by))
        if is_sent and message.plan is not None and len(self._published) > 1:
            why = f"{BY_OTHERS} made {len(self._published)} messages of it, of which one has its lock"
            self.dispatcher.note_unlocked(message, why)
            return Published(DecisionType.DISPATCHED, reason=why)
        if is_sent and (message.plan is None or own_id not in self._without_ticket):
            return None
        self.dispatcher.release(*message.locks)  # no worker would free them
        if not is_sent and sent_as and sent_as != own_id and message.locks_itself:
            return Published(DecisionType.SKIPPED_OVERLAP, reason=f"{BY_OTHERS} has sent nothing, for task {sent_as}")
        if not is_sent and not sent_as:
            return Published(DecisionType.PUBLISH_FAILED, reason=f"{BY_OTHERS} has sent no message")
        if is_sent:
            why = f"{BY_OTHERS} sent it without its headers"
        elif sent_as == own_id:  # it may keep the call, and send it later
            why = f"{BY_OTHERS} has sent nothing yet"
        else:
            why = f"{BY_OTHERS} sent it as task {sent_as}"
        if message.plan is not None:
            why = f"{why}, so without its lock"
            self.dispatcher.note_unlocked(message, why)
        return Published(DecisionType.DISPATCHED, reason=why)

    def _note_queue(
        self,
        body: Any = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
        declare: Sequence[object] | None = None,
        exchange: object = None,
        routing_key: str = "",
        **_: object,
    ) -> None:
        """Note the queue of a message that Celery is about to publish, and whether it has a ticket.

        A further message of one run, which code of others makes, gets a task id of its own.
        """
        headers = {} if headers is None else headers
        task_id = id_of_message(headers, body)
        if task_id == self._alone and task_id in self._published:
            # One for each tenant, for example: a worker would take it for a copy of the first.
            task_id = str(uuid5(NAMESPACE_OID, f"{task_id}:{len(self._published)}"))
            rename_message(headers, body, properties, task_id)
        if HEADER not in headers:
            self._without_ticket.add(task_id)
        if RUN_HEADER in headers:
            self._queues[task_id] = queue_reached(exchange, routing_key, (declare or [None])[0])

    # ---------------------------------------------------------------- confirmations

    def _settle(self, attempt: _Attempt) -> Confirmation:
        """Note what has become of an occurrence, and return the decision and its change of the entry's past."""
        message, outcome = attempt.message, attempt.outcome
        if attempt.dropped is not None:
            self._dropped.add(message.occurrence.id)
            return self.dispatcher.drop(message, attempt.dropped)
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
        decision = self.dispatcher.decide(message, published)
        self.dispatcher.report(message, decision, BROKER)
        return message.claimed.confirmation(decision)

    def _confirm(self, messages: Sequence[Message]) -> None:
        """Confirm what is decided, and let the other occurrences wait."""
        confirmations, self._confirmations = self._confirmations, []
        unsent, self._unsent = self._unsent, []
        decisions = [each.decision for each in confirmations]
        self._over |= {decision.occurrence.id for decision in decisions} - self._dropped
        self._keep_locks({decision.occurrence.id for decision in decisions if decision.is_sent}, messages)
        store, seconds = self.dispatcher.store, self.failures.backoff.seconds
        store.confirm(confirmations, self.term)
        store.postpone({key: self.now + timedelta(seconds=seconds(key)) for key in unsent})
