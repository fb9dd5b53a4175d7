"""Sends a call under its lock: in one write if the broker is the locks' server, else in two."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from celery.signals import after_task_publish, before_task_publish
from kombu import Producer
from kombu.exceptions import OperationalError

from ..broker import broker_errors
from ..destination import Sent, seeing_sent
from ..errors import LockBackendError
from ..log import Log
from ..outbox import MOST_CHARACTERS, MOST_MESSAGES, Marker, collecting, size, takes_outbox
from . import backend_of
from .acquire import Granted, Refused, acquire, answered, cancel_releases, free, left_behind, noted_in, places_of
from .base import Sending, Verdict

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult
    from kombu import Connection

    from ..outbox import Outbox
    from .acquire import Plan
    from .base import Call, Holder, Options, Ticket
    from .task import LockableTask

__all__ = ("send_call", "send_many", "why_no_outbox", "why_two_writes")

log = Log(__name__)

#: Why calls need two writes.
ELSEWHERE = "the broker is not on the server of the locks, or a user lacks rights for one write"

#: How often the message of a call is made until it is sent in two writes, because its lock has changed before each
#: write.
MOST_TRIES = 4

#: Seconds for which this process remembers that a call was refused, and the maximum number of these calls. Meanwhile it
#: asks for their locks before it makes a message that may be in vain.
REFUSED_FOR, MOST_REFUSED = 60.0, 10_000

_refused: dict[str, float] = {}
#: By app, because two apps may use one broker and have their locks on different servers, and by connection.
_brokers: WeakKeyDictionary[Celery, WeakKeyDictionary[Connection, Marker]] = WeakKeyDictionary()


class Publish(Protocol):
    """Sends the message of a call, with a ticket in its headers and further options of ``Task.apply_async``."""

    def __call__(self, ticket: Ticket, **options: object) -> AsyncResult: ...


class _UnreachableError(Exception):
    """The broker cannot be reached, and the message is not sent."""


class _NotSentError(Exception):
    """Ends a publish before Celery reports the message as sent."""


def send_call(
    task: LockableTask, plan: Plan, publish: Publish, producer: Producer | None, options: Options
) -> AsyncResult | Refused:
    """Acquire the lock of a call, and send the call.

    Where broker and locks are one Redis server, both happen in one write, or neither. Else the lock is acquired first;
    if the process dies before it sends the message, the lock ends by itself.

    Args:
        options: of ``Task.apply_async``. With a ``connection``, Celery sends the call without this producer.

    Raises:
        LockBackendError: the locks' server does not answer, or the lock's key holds other data.
        Exception: any error of the broker.
    """
    is_redirected, retries = options.get("connection") is not None, dict[str, bool]()
    if (call := plan.call) is not None and not plan.is_of_beat and not is_redirected and _may_be_one_write(task):
        # A call that is probably refused asks first: its message would be made in vain.
        answer = answered(task, call, task.singleton_backend.ask([call])[0]) if _was_refused(call.ref.key) else None
        if (
            answer is not None
            and not left_behind(call, answer)
            and isinstance(refused := plan.outcome(answer), Refused)
        ):
            return refused
        with task.app.producer_or_acquire(producer) as own:
            write = _OneWrite(task, plan, publish, own)
            try:
                outcome = write.send_with_retries(call, answer, options)
            except _UnreachableError:
                # All retries are spent. One more could put a second message beside one whose reply was lost.
                outcome, retries = None, {"retry": False}
        if outcome is not None:
            _remember(call.ref.key, is_refused=isinstance(outcome, Refused))
            return outcome if isinstance(outcome, Refused) else write.replaced(outcome)
    granted: Granted | Refused | None = None
    try:
        granted = acquire(task, plan)
        if isinstance(granted, Refused):
            return granted
        with seeing_sent(task.app, task, granted.ticket.task_id) as sent:
            result = publish(granted.ticket, producer=producer, **retries)
    except BaseException as exc:
        if isinstance(granted, Granted):
            granted.give_up(task)
        elif granted is None and plan.call is not None and not isinstance(exc, LockBackendError):
            free(task, *places_of(plan.call))  # a signal has ended the call before it knew the answer
        raise
    if sent.is_unsent:
        granted.give_up(task)
        return result
    _note_queue(task, plan, granted, sent)
    result.waits_for = granted.note_sent(task)
    return result


def _note_queue(task: LockableTask, plan: Plan, granted: Granted, sent: Sent) -> None:
    """Note in the lock of a call the queue that code of the user has sent it to."""
    if sent.queues and plan.call is not None and granted.lock is not None:
        with suppress(LockBackendError):  # the note is for the search for lost messages alone
            task.singleton_backend.note_sent({granted.lock: noted_in(plan.call, sent.queues[-1]).note}, lease=0)


def send_many(
    task: LockableTask, calls: Iterable[tuple[Plan, Publish]], producer: Producer | None
) -> Iterator[AsyncResult | Refused | LockBackendError | None]:
    """Acquire the locks of calls and send the calls, many in one write; yield what ``send_call`` would return.

    Yields:
        None for a call that must be sent by itself before the next outcome is asked for: the next write may hold a
        later call with the same lock. The error for each call of a write that the locks' server has not answered, and
        then nothing more.

    Raises:
        Exception: a message cannot be made. The calls before may be sent.
    """
    left = iter(calls)
    while batch := deque(islice(left, MOST_MESSAGES)):  # planning may send a task, which needs a producer
        while batch:
            with task.app.producer_or_acquire(producer) as own:
                many = _ManyCalls(task, own)
                while batch and not many.ends_before(batch[0][0]):
                    many.add(*batch.popleft())
                number = many.number
                try:
                    outcomes = [*many.send()]
                except LockBackendError as exc:
                    outcomes, left = [exc] * number, iter(())
                    batch.clear()
            yield from outcomes


def why_no_outbox(producer: Producer) -> str:
    """Return why messages of a producer do not go into an outbox."""
    if not hasattr(producer.channel, "global_keyprefix"):
        return "the broker is not Redis, whose messages alone go into a script"
    if not hasattr(producer, "supports_batch_publish"):
        return f"only kombu 5.7 and newer hands messages over to a script, and this is kombu {version('kombu')}"
    return "with retry_on_timeout, or another option that retries, kombu hands no messages over to a script"


def why_two_writes(app: Celery, connection: Connection) -> str:
    """Return why a call needs one write for its lock and another one for its message; empty if it needs one for both.

    It asks both servers.

    Args:
        connection: to the broker.

    Raises:
        LockBackendError: the locks' server does not answer.
        Exception: any error of the broker.
    """
    backend, channel, broker = backend_of(app), connection.default_channel, Marker()
    if not backend.sends:
        return f"the locks are in {backend.name}, or in a Redis Cluster"
    if not takes_outbox(producer := Producer(channel)):
        return why_no_outbox(producer)
    try:
        broker.write_for_broker(channel, time.monotonic())
    except Exception:
        if broker.may_be_here(time.monotonic()):
            raise
        return ELSEWHERE  # the user may not write it
    try:
        if backend.send([], broker) is None:
            return ELSEWHERE
        return "there are receivers of before_task_publish or after_task_publish" * _has_receivers()
    finally:
        broker.delete_for_broker(channel)


def _may_be_one_write(task: LockableTask) -> bool:
    """Return whether nothing forbids one write."""
    return not _has_receivers() and task.singleton_backend.sends


def _has_receivers() -> bool:
    """Return whether receivers of Celery's publish signals would be told of messages that are made and not sent."""
    return bool(before_task_publish.receivers or after_task_publish.receivers)


def _broker_of(app: Celery, connection: Connection) -> Marker:
    """Return what is known of the server of a connection."""
    known = _brokers.setdefault(app, WeakKeyDictionary())
    broker = known.get(connection)
    if broker is None or broker.pid != os.getpid():
        broker = known[connection] = Marker()
    return broker


def _was_refused(key: str) -> bool:
    """Return whether a call with this lock was refused lately, and none was sent since."""
    return time.monotonic() - _refused.get(key, -REFUSED_FOR) < REFUSED_FOR


def _remember(key: str, *, is_refused: bool) -> None:
    """Remember whether a call with this lock was refused."""
    if not is_refused:
        _refused.pop(key, None)
        return
    if len(_refused) >= MOST_REFUSED:
        _refused.clear()
    _refused[key] = time.monotonic()


def _is_marked(broker: Marker, producer: Producer) -> bool:
    """Mark the server of a producer's broker, unless it is known to be another than that of the locks.

    Raises:
        Exception: a recoverable error of the connection.
    """
    try:
        if not broker.may_be_here(time.monotonic()) or not takes_outbox(producer):
            return False
        broker.write_for_broker(producer.channel, time.monotonic())
    except producer.connection.recoverable_connection_errors:
        raise
    except broker_errors(producer.connection):  # two writes find out what to do about it
        return False
    return True


def _write_all(
    task: LockableTask, sendings: Sequence[Sending], broker: Marker, producer: Producer
) -> list[Holder] | None:
    """Write calls, and return the answers; None if nothing is sent in one write for now.

    Raises:
        Exception: a recoverable error of the broker's connection; nothing is sent.
        LockBackendError: the locks' server does not answer, so it is unknown whether the calls were sent.
    """
    holders = task.singleton_backend.send(sendings, broker)
    if holders is not None:
        return holders
    try:
        broker.write_for_broker(producer.channel, time.monotonic(), anew=True)
    except producer.connection.recoverable_connection_errors:
        raise
    except broker_errors(producer.connection):  # two writes find out what to do about it
        return None
    holders = task.singleton_backend.send(sendings, broker)
    if holders is None:
        broker.rule_out(time.monotonic())
    return holders


def _log_dropped(task: LockableTask, ticket: Ticket) -> None:
    why = "no queue is bound to its exchange with its routing key"
    about = {"task": task.name, "id": ticket.task_id, "reason": why}
    log.warning("%(task)s[%(id)s] reaches no queue, and takes no lock", event="unsent", **about)


def _discard(task: LockableTask, task_id: str) -> None:
    """End Celery's wait for the result of a message that is made and not sent."""
    task.app.AsyncResult(task_id)  # its ``__del__`` does that


@dataclass(slots=True)
class _Made:
    """A call, and its message if that is made."""

    plan: Plan
    result: AsyncResult | None = None  #: None: it must be sent by itself
    sending: Sending | None = None  #: None: it must be sent by itself, or was sent over another producer


def _way_of(plan: Plan) -> tuple[str, bool]:
    """Return what a call does if its lock is held: by its policy, and whether it is sent in any case."""
    return plan.overlap, plan.otherwise is not None


class _ManyCalls:
    """Sends calls over one producer, many in one write."""

    def __init__(self, task: LockableTask, producer: Producer) -> None:
        self.task, self.producer = task, producer
        self.broker = _broker_of(task.app, producer.connection)
        self._calls, self._characters = list[_Made](), 0
        self._ways = dict[str, tuple[str, bool]]()  #: by the keys of locks, ``_way_of`` their calls
        self._is_possible = False  #: for the calls that are made now

    @property
    def number(self) -> int:
        """The number of calls that were added."""
        return len(self._calls)

    def ends_before(self, plan: Plan) -> bool:
        """Return whether it is time to send, before this call is added.

        If the lock is held, a call may have to be sent by itself. So calls with one lock are sent together only if they
        do the same then.
        """
        is_full = len(self._calls) >= MOST_MESSAGES or self._characters >= MOST_CHARACTERS
        return is_full or self._ways.get(plan.ticket.key, _way_of(plan)) != _way_of(plan)

    def add(self, plan: Plan, publish: Publish) -> None:
        """Make the message of a call, if that can be sent in one write."""
        made = _Made(plan)
        self._ways[plan.ticket.key] = _way_of(plan)
        if not self._calls:
            has_hooks = not _may_be_one_write(self.task) or self.task.app.conf.task_send_sent_event
            self._is_possible = not has_hooks and self._is_marked()
        self._calls.append(made)
        if plan.call is None or not self._is_possible:
            return
        cancel_releases(plan.call)
        producer, outbox = collecting(self.producer)
        with seeing_sent(self.task.app, self.task, plan.ticket.task_id) as sent:
            # Not yet a child of the task that runs here: it may be refused.
            made.result = publish(plan.ticket, producer=producer, retry=False, add_to_parent=False)
        if sent.is_unsent and outbox.is_full:  # under an id of its own
            made.result = None
        elif sent.is_unsent:
            return
        elif outbox.is_full and not outbox.commands:
            _log_dropped(self.task, plan.ticket)
        elif outbox.is_full:
            made.sending = Sending(noted_in(plan.call, outbox.queue), outbox.commands, only=Verdict.ACQUIRED)
            self._characters += size(outbox.commands)
        else:  # the user's own code has sent it over another producer
            self.broker.rule_out(time.monotonic())
            acquire(self.task, plan, may_have_run=True)

    def _is_marked(self) -> bool:
        try:
            return _is_marked(self.broker, self.producer)
        except self.producer.connection.recoverable_connection_errors:  # each call retries by itself
            return False

    def _write_all(self, sendings: Sequence[Sending]) -> list[Holder] | None:
        try:
            return _write_all(self.task, sendings, self.broker, self.producer)
        except self.producer.connection.recoverable_connection_errors:  # each call retries by itself
            return None

    def send(self) -> Iterator[AsyncResult | Refused | None]:
        """Send the calls, and yield what became of each, as ``send_many`` does."""
        calls, self._calls, self._characters = self._calls, [], 0
        sendings = [made.sending for made in calls if made.sending is not None]
        holders = self._write_all(sendings) if sendings else []
        answers = iter(holders or ())
        for made in calls:
            if made.sending is None:
                yield made.result
                continue
            outcome = self._outcome(made, next(answers, None))
            if outcome is not made.result:
                _discard(self.task, made.plan.ticket.task_id)
            yield outcome

    def _outcome(self, made: _Made, holder: Holder | None) -> AsyncResult | Refused | None:
        """Return what became of a call by the answer of the locks' server; None: it must be sent by itself."""
        plan = made.plan
        if holder is None or holder.verdict in {Verdict.REFUSED, Verdict.UNUSABLE} or plan.call is None:
            return None
        if holder.verdict is Verdict.ACQUIRED:
            if (parent := self.task.app.current_worker_task) is not None:
                parent.add_trail(made.result)
            return made.result
        answer = answered(self.task, plan.call, holder)
        outcome = plan.outcome(answer)
        return outcome if isinstance(outcome, Refused) and not left_behind(plan.call, answer) else None


class _OneWrite:
    """Sends one call in one write, over the producer of its message."""

    def __init__(self, task: LockableTask, plan: Plan, publish: Publish, producer: Producer) -> None:
        self.task, self.plan, self.publish, self.producer = task, plan, publish, producer
        self.broker = _broker_of(task.app, producer.connection)
        self._replaced: tuple[Granted, Holder] | None = None  #: the answer to a call that evicts others
        self.is_written = False  #: the call is sent

    def send_with_retries(self, call: Call, answer: Holder | None, options: Options) -> AsyncResult | Refused | None:
        """Send the call; if the connection to the broker fails before the write, connect anew and retry.

        Args:
            answer: of the locks' server, if it was asked before.
            options: of ``Task.apply_async``, for ``retry`` and ``retry_policy``.

        Returns:
            The result of the call, or None if it must be sent in two writes.

        Raises:
            _UnreachableError: the connection failed before the write, after all retries.
            LockBackendError: the locks' server does not answer, so it is unknown whether the call was sent; or its lock
                cannot be read.
            Exception: the message cannot be made.
        """
        conf, connection = self.task.app.conf, self.producer.connection
        retry, policy = options.get("retry"), {"max_retries": 0}
        if conf.task_publish_retry if retry is None else retry:
            policy = {**conf.task_publish_retry_policy, **(options.get("retry_policy") or {})}
        failed: Exception | None = None
        is_lost = False  #: the connection; an error of the user's own code may look the same

        def send() -> AsyncResult | Refused | None:
            nonlocal failed, is_lost
            try:
                return self._send(call, answer)
            except connection.recoverable_connection_errors as exc:
                if not self.is_written:
                    is_lost = True
                    raise
                failed = exc
                return None

        try:
            outcome = connection.ensure(self.producer, send, **policy)()
        except (*connection.recoverable_connection_errors, OperationalError) as exc:
            if self.is_written or not is_lost:
                raise
            raise _UnreachableError from exc
        if failed is not None:
            raise failed
        return outcome

    def _send(self, call: Call, answer: Holder | None) -> AsyncResult | Refused | None:
        if not _is_marked(self.broker, self.producer):
            return None
        cancel_releases(call)
        granted, sending = self.plan.granted, Sending(call, only=Verdict.ACQUIRED)
        for _ in range(MOST_TRIES):
            if answer is not None:
                outcome = self.plan.outcome(answer)
                if isinstance(outcome, Refused):
                    return None if left_behind(call, answer) else outcome
                if outcome.lock is None and outcome.replacing is None:  # it must be sent, and waits without a place
                    return None
                granted, sending = outcome, Sending(call, only=answer.verdict)
                if outcome.replacing is not None:
                    sending = Sending(outcome.replacing)
            result, answer = self._write(granted, sending)
            if result is not None or answer is None:
                return result
        return None

    def replaced(self, result: AsyncResult) -> AsyncResult:
        """Return the result of the sent call; terminate the run that it waits for, if the call does that.

        This needs another producer, so the caller has freed its own: that may be the only one of its pool.
        """
        if self._replaced is not None:
            granted, holder = self._replaced
            result.waits_for = granted.note_replaced(self.task, holder)
        return result

    def _answer(self, sending: Sending) -> Holder | None:
        """Run the write, and return the answer to its call; None if nothing is sent in one write for now."""
        holders = _write_all(self.task, [sending], self.broker, self.producer)
        if holders is None:
            return None
        if holders[0].verdict is Verdict.REFUSED:
            self.broker.rule_out(time.monotonic())
            return None
        return answered(self.task, sending.call, holders[0])

    def _write(self, granted: Granted, sending: Sending) -> tuple[AsyncResult | None, Holder | None]:
        """Make the message of a call, and send it if the lock is granted.

        Returns:
            The result of the sent call, or None; the answer to the call, or None if two writes must send it.
        """
        answer: Holder | None = None
        is_dropped = False

        def write(outbox: Outbox) -> None:
            nonlocal answer, is_dropped
            if not outbox.commands:  # no queue gets it, and kombu says nothing: its lock would wait for an hour
                is_dropped = True
                return
            if sent.is_unsent:  # under an id of its own
                raise _NotSentError
            call = noted_in(sending.call, outbox.queue)
            answer = self._answer(replace(sending, call=call, commands=outbox.commands))
            if answer is None or not sending.is_granted(answer.verdict):
                raise _NotSentError
            self.is_written = True

        producer, _ = collecting(self.producer, write)
        try:
            with seeing_sent(self.task.app, self.task, granted.ticket.task_id) as sent:
                result = self.publish(granted.ticket, producer=producer, retry=False)
        except _NotSentError:
            _discard(self.task, granted.ticket.task_id)
            return None, answer
        if is_dropped:
            _log_dropped(self.task, granted.ticket)
            return result, None
        if sent.is_unsent:
            return result, None
        if answer is None:  # the user's own code has sent it over another producer
            self.broker.rule_out(time.monotonic())
            # If it is refused, so is the message at its start. It may have run already.
            acquire(self.task, self.plan, may_have_run=True)
            return result, None
        result.waits_for = granted.ticket.waits_for
        if granted.replacing is not None:
            self._replaced = granted, answer
        return result, answer
