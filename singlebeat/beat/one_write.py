"""From due entries to their messages in one write, where schedule, locks and broker are on one Redis server."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from kombu import Producer
from redis import RedisCluster
from redis.exceptions import NoPermissionError

from ..broker import own_broker
from ..clients import native
from ..connections import RedisError, ResponseError, broker_place, lock_server, schedule_client, schedule_url
from ..destination import are_by_others
from ..errors import ConfigError, LockBackendError
from ..locks import backend_of, delay_of
from ..locks.acquire import Refused, cancel_releases, note
from ..locks.base import Verdict
from ..locks.redis import RedisBackend
from ..locks.send import why_no_outbox
from ..log import Log
from ..outbox import ELSEWHERE_FOR, MOST_CHARACTERS, MOST_MESSAGES, Marker, reports_each, size, takes_outbox
from .dispatch import Published, not_published
from .failures import BROKER, LOCKS, UnreachableBrokerError, in_words, is_of_own_code, is_refusal, is_transient
from .leadership.lease import Term
from .store.claims import ClaimVerdict, Store
from .store.dispatches import UNRECORDED, Dispatch, Dispatches

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Connection

    from ..locks.acquire import Granted
    from ..locks.base import Call, Holder
    from ..outbox import Outbox
    from .dispatch import Dispatcher, Publisher
    from .message import Message
    from .store.claims import Claim, ClaimedOccurrence
    from .store.dispatches import Answer, Request

__all__ = ("OneWrite", "why_several_writes")

log = Log("celery.beat")

#: Why due entries need several writes.
ELSEWHERE = "schedule, locks and broker are not on one server"

#: Seconds for which each tick ends at an error of a server where one write was possible. Several writes might send a
#: message twice: if the reply to it is lost.
PATIENCE = 30.0

#: How often the message of an occurrence is made until it is sent in several writes, because its lock has changed
#: before each write.
MOST_TRIES = 3


#: The words of a server whose user lacks a right: outside of a script, and inside, up to Redis 7.0 in others.
DENIED = ("NOPERM", "ACL failure", "can't run this command", "can't access at least one of the keys")


class _NotSentError(Exception):
    """Ends a publish before Celery reports the message as sent."""


@dataclass(slots=True)
class _Attempt:
    """A message, and all that is to be written with it."""

    message: Message
    dispatch: Dispatch
    granted: Granted | None = None
    has_message: bool = True  #: else there is only a decision


class OneWrite:
    """Claims occurrences, acquires their locks, sends their messages and records the decisions in one write.

    Args:
        dispatcher: does the same in several writes, by the same rules.
        publisher: makes the messages.
    """

    def __init__(self, app: Celery, store: Store, dispatcher: Dispatcher, publisher: Publisher) -> None:
        self.app, self.store, self.dispatcher, self.publisher = app, store, dispatcher, publisher
        self._broker, self._locks = Marker(), Marker()
        self.dispatches = Dispatches(store, (self._broker, self._locks))
        self._unanswered: tuple[Sequence[_Attempt], Request] | None = None  #: its reply is lost: is it written?
        self._refusal = ""  #: why the server does not record decisions
        self._is_denied = False  #: the last write, for lack of a right
        self._refused = dict[str, str]()  #: why a part of the dispatch of an entry is refused; without name: all claims
        self._proved = ("", "")  #: the markers that were found on the schedule's server
        self.failed = ""  #: the key of the entry whose message has failed last when it was made
        #: Monotonic; infinite while no server has failed since the last write was answered.
        self._patient_until = math.inf if _has_one_address(app) else 0.0

    def send(
        self,
        retaken: Sequence[ClaimedOccurrence],
        claims: Sequence[Claim],
        term: Term,
        now: datetime,
        *,
        retry_at: datetime,
    ) -> dict[str, ClaimVerdict]:
        """Send occurrences.

        Args:
            retaken: they are claimed already.
            retry_at: when another beat may retake an occurrence that is claimed and not sent.

        Returns:
            The verdicts of the occurrences that are sent, or that are not to be sent by this beat, by their ids. The
            others must be sent in several writes.

        Raises:
            RedisError: the server does not answer, or replies with an error; the next call finds out what it has done.
        """
        self._recall()
        wanted = [*retaken, *(claimed for claim in claims if (claimed := claim.claimed) is not None)]
        if not wanted or not self._may_be_possible():
            return {}
        by_id: dict[str, Claim | ClaimedOccurrence] = {each.occurrence.id: each for each in retaken}
        by_id |= {claim.occurrence.id: claim for claim in claims if claim.occurrence is not None}
        with ExitStack() as stack:
            try:
                looked_after = self.dispatcher.check_workers(wanted)
                with self._naming_broker():
                    outbox = stack.enter_context(self.publisher.collecting())
                if outbox is None:
                    return {}
                self.mark(outbox)
                self._prove(term, retry_at)
            except Exception as exc:  # several writes find out what to do about it
                self.end_tick(exc)
                return {}
            if not self._may_be_here():
                return {}
            messages, _ = self.dispatcher.messages(wanted, looked_after=looked_after)
            refused = self.dispatcher.failures.backoff.is_refused
            messages = [each for each in messages if not (each.goes_its_own_way or refused(each.entry.key))]
            sending = _Sending(self, outbox, by_id, term, now, retry_at)
            return sending.send(self.dispatcher.by_failures(messages))

    def _may_be_possible(self) -> bool:
        """Return whether nothing forbids one write as far as this process knows."""
        if time.monotonic() >= self._patient_until and self.dispatcher.failures.is_away(LOCKS):
            return False  # several writes would wait for that server once more
        return self._may_be_here() and not _why_not(self.app, self.store)

    def _may_be_here(self) -> bool:
        now = time.monotonic()
        return self._broker.may_be_here(now) and self._locks.may_be_here(now)

    def mark(self, outbox: Outbox, *, anew: bool = False) -> None:
        """Mark the servers of broker and locks, unless this was done lately.

        Raises:
            Exception: any error of their drivers.
        """
        now, backend = time.monotonic(), cast("RedisBackend", backend_of(self.app))
        self.store.report_progress()
        with self._naming_broker():
            self._broker.write_for_broker(outbox.channel, now, anew=anew)
        self.store.report_progress()
        self._locks.write(backend.redis, now, anew=anew)

    @contextmanager
    def _naming_broker(self) -> Iterator[None]:
        """Turn the error of an unreachable broker into one that names it: it may be known here by another name."""
        try:
            yield
        except Exception as exc:
            if is_transient(exc) and not is_refusal(exc):
                raise self._of_broker(exc) from exc
            raise

    def _of_broker(self, exc: Exception) -> UnreachableBrokerError:
        return UnreachableBrokerError(f"{BROKER} {broker_place(self.app)} is not reached: {in_words(exc)}")

    def _prove(self, term: Term, retry_at: datetime) -> None:
        """Write nothing over new connections, or rule one write out: a message may be sent when it is made.

        Raises:
            RedisError: as of ``send``.
        """
        markers = self._broker.value, self._locks.value
        if markers == self._proved:
            return
        try:
            is_elsewhere = self.dispatches.write(self.dispatches.request([], term, retry_at=retry_at)) is None
        except NoPermissionError as exc:
            self.rule_out(str(exc))
            return
        if is_elsewhere:
            self.rule_out(ELSEWHERE)
        else:
            self._proved = markers

    def end_tick(self, exc: Exception) -> None:
        """Raise the error of an unreachable server, unless one write is not known to be possible, or errors last.

        Raises:
            RedisError: to end the tick; due entries stay due.
            LockBackendError: the same.
        """
        now = time.monotonic()
        if not is_transient(exc) or is_refusal(exc) or not self._may_be_here():
            return
        self._patient_until = min(self._patient_until, now + PATIENCE)
        if now >= self._patient_until:
            return
        self.publisher.forget_broker()
        if isinstance(exc, RedisError | LockBackendError):
            raise exc
        raise self._of_broker(exc) from exc

    def rule_out(self, reason: str) -> None:
        """Send in several writes for a while, and say so once."""
        self._patient_until = 0.0
        if not self._may_be_here():
            return
        text = "beat: Due entries are sent in several writes for %(seconds)g s"
        log.info(text, event="several_writes", seconds=ELSEWHERE_FOR, reason=reason)
        for marker in (self._broker, self._locks):
            marker.rule_out(time.monotonic())

    def note_denial(self, reason: str) -> None:
        """Rule one write out if it is denied twice in a row; the queue of one message may be forbidden."""
        if self._is_denied:
            self.rule_out(reason)
        self._is_denied = True

    def check_records(self) -> None:
        """Raise the server's error if it has not recorded all that was sent since the last check.

        Raises:
            ResponseError: it has not.
        """
        refusal, self._refusal = self._refusal, ""
        if refusal:
            raise ResponseError(refusal)

    def write(self, attempts: Sequence[_Attempt], request: Request) -> Sequence[Answer] | None:
        """Write attempts, and report those that are sent; return the answers, or None if this server cannot do it.

        Raises:
            RedisError: as of ``send``.
        """
        self._unanswered = attempts, request
        try:
            answers = self.dispatches.write(request)
        except ResponseError:  # it is answered
            self._unanswered = None
            raise
        self._unanswered, self._is_denied = None, False
        if answers is not None:
            self._patient_until = math.inf
        for attempt, answer in zip(attempts, answers or (), strict=answers is not None):
            self._report(attempt, answer)
        return answers

    def _recall(self) -> None:
        """Find out what became of a request without a reply: the server repeats the reply, or does it now."""
        if self._unanswered is not None:
            self.write(*self._unanswered)

    def _report(self, attempt: _Attempt, answer: Answer) -> None:
        """Report what has become of an attempt."""
        message, decision = attempt.message, attempt.dispatch.decision
        if answer.recorded == UNRECORDED:
            self._refusal = answer.refusal
        elif any(words in answer.refusal for words in DENIED):
            self.rule_out(answer.refusal)
        else:
            self._note_refusal(message.entry.name, answer)
        if not answer.recorded:
            return
        self.dispatcher.report(message, decision, BROKER, LOCKS)
        self.store.signal(decision, answer.recorded)
        granted, holder = attempt.granted, answer.holder
        if granted is not None and granted.replacing is not None and holder is not None and message.task is not None:
            granted.note_replaced(message.task, holder)

    def _note_refusal(self, entry: str, answer: Answer) -> None:
        """Log that the server refuses a part of a dispatch, unless it was logged before."""
        refused = entry if answer.verdict is not None else ""  # claims are refused together
        before = self._refused.pop(refused, "")
        if refused:
            self._refused.pop("", None)
        if answer.refusal:
            self._refused[refused] = answer.refusal
        if answer.refusal and answer.refusal != before:
            about = {"entry": entry, "reason": answer.refusal}
            log.warning("beat: The server refuses a part of the dispatch of %(entry)s", event="refused", **about)


def _has_one_address(app: Celery) -> bool:
    """Return whether schedule, locks and broker are on one server by their settings, before a marker proves it."""
    broker = app.conf.broker_write_url or app.conf.broker_url
    try:
        return len({_address(str(url)) for url in (broker, schedule_url(app), lock_server(app).url)}) == 1
    except (ConfigError, ValueError):  # one has no address in the settings, or a port that is none
        return False


def _address(url: str) -> tuple[str | None, int | None, str]:
    parts = urlsplit(native(url))
    return parts.hostname, parts.port, parts.path if parts.scheme == "unix" else ""


def _why_not(app: Celery, store: Store) -> str:
    """Return why one write is impossible with any broker, or an empty string."""
    if app.conf.task_always_eager:
        return "task_always_eager is set"
    if isinstance(store.client, RedisCluster):
        return "the schedule is in a Redis Cluster"
    try:
        backend = backend_of(app)
    except ConfigError as exc:
        return f"there are no locks: {exc}"
    if not isinstance(backend, RedisBackend) or not backend.sends:
        return f"the locks are in {backend.name}, or in a Redis Cluster"
    return ""


def why_several_writes(app: Celery, connection: Connection) -> str:
    """Return why a due entry needs several writes, or an empty string; it asks the three servers.

    Args:
        connection: to the broker.

    Raises:
        Exception: any error of a server.
    """
    store, producer = Store(app, schedule_client(app)), Producer(connection.default_channel)
    if why := _why_not(app, store):
        return why
    if any(are_by_others(app, "send_task")):
        return "the app has a send_task of its own"
    if not takes_outbox(producer):
        return why_no_outbox(producer)
    broker, locks, client = Marker(), Marker(), cast("RedisBackend", backend_of(app)).redis
    try:
        broker.write_for_broker(producer.channel, time.monotonic())
        locks.write(client, time.monotonic())
        dispatches = Dispatches(store, (broker, locks))
        request = dispatches.request([], Term(0, ""), retry_at=datetime.now(UTC))
        is_elsewhere = dispatches.write(request) is None
    except NoPermissionError as exc:
        return f"a user lacks rights for one write: {exc}"
    finally:
        with suppress(NoPermissionError):
            broker.delete_for_broker(producer.channel)
            locks.delete(client)
    return ELSEWHERE if is_elsewhere else ""


class _Sending:
    """The sending of the occurrences of one tick.

    Args:
        claims: by the ids of their occurrences.
    """

    def __init__(
        self,
        one_write: OneWrite,
        outbox: Outbox,
        claims: dict[str, Claim | ClaimedOccurrence],
        term: Term,
        now: datetime,
        retry_at: datetime,
    ) -> None:
        self.one_write, self.outbox, self.claims = one_write, outbox, claims
        self.term, self.now, self.retry_at = term, now, retry_at
        self.dispatcher, app = one_write.dispatcher, one_write.app
        self.broker = own_broker(app)
        #: Celery reports each message when it is published: it is written before that.
        self.writes_each = reports_each(app)
        self._batch, self._characters = list[_Attempt](), 0
        self._answers: dict[str, Holder] = {}  #: of the locks' server, by task id
        self._again: list[Message] = []  #: their locks are not held as they were when the messages were made
        self._settled = dict[str, ClaimVerdict]()
        self._error: RedisError | None = None  #: that has ended a write inside of a publish
        self._is_possible = True

    def send(self, messages: Sequence[Message]) -> dict[str, ClaimVerdict]:
        """Send messages; return the verdicts as ``OneWrite.send`` does."""
        self._ask([message.call for message in messages if message.call is not None])
        for _ in range(MOST_TRIES):
            for message in messages:
                if not self._is_possible:
                    return self._settled
                self._add(message)
                if len(self._batch) >= MOST_MESSAGES or self._characters >= MOST_CHARACTERS:
                    self._write()
            self._write()
            messages, self._again = self._again, []
        return self._settled

    def _ask(self, calls: Sequence[Call]) -> None:
        """Ask for the locks of calls: a monitor would take a message that is made in vain for one that was sent."""
        backend = cast("RedisBackend", backend_of(self.one_write.app))
        try:
            holders = [] if backend.are_free(calls) else backend.ask(calls, may_be_resent=True)
        except LockBackendError:
            return
        self._answers |= {call.ref.task_id: holder for call, holder in zip(calls, holders, strict=bool(holders))}

    def _add(self, message: Message) -> None:
        """Make the message of an occurrence, if it is to be sent."""
        self.dispatcher.progress()
        if self.dispatcher.dropped(message) is not None:  # several writes record that, and free its lock
            return
        try:
            attempt = self._attempt(message, self._answers.get(message.occurrence.id))
            if attempt.has_message:
                self.outbox.expect(partial(self._take, attempt))
                self.dispatcher.publish(message, attempt.granted)
        except Exception as exc:  # several writes find out what to do about it
            if self._error is not None:
                raise self._error from None
            if is_transient(exc) and not is_of_own_code(exc):  # each further try may take as long
                self._write()
                if self.one_write.failed != message.entry.key:  # else the message is the cause
                    self.one_write.failed = message.entry.key
                    self.one_write.end_tick(exc)
                self._is_possible = False
            return
        if attempt.has_message and self.outbox.is_full and self.writes_each:
            return
        self._batch.append(attempt)
        self._characters += size(attempt.dispatch.commands)
        if attempt.has_message and not self.outbox.is_full:
            self._write()
            self._is_possible = False
            self.one_write.rule_out(f"{message.entry.task} was sent over a producer of its own")

    def _attempt(self, message: Message, holder: Holder | None) -> _Attempt:
        """Return what is to be written about an occurrence.

        Args:
            holder: of its lock; None: the lock is taken to be free.

        Raises:
            UnusableLockError: as of ``Dispatcher.outcome``.
        """
        outcome = self.dispatcher.outcome(message, holder)
        call, only, waits_for = None, Verdict.ACQUIRED, None
        if isinstance(outcome, Refused):
            published = not_published(message, outcome)
        else:
            if outcome is not None:
                waits_for = outcome.ticket.waits_for
                if outcome.replacing is not None and holder is not None:
                    call, waits_for = outcome.replacing, holder if holder.state != "queued" else None
                    only = Verdict.WAITING if waits_for else Verdict.ACQUIRED
                elif message.call is not None and outcome.lock is not None and not _is_unusable(holder):
                    call, only = message.call, holder.verdict if holder else only
            published = Published.under(waits_for)
        if call is not None:
            cancel_releases(call)
        decision = self.dispatcher.decide(message, published)
        dispatch = Dispatch(self.claims[message.occurrence.id], message.claimed, decision, call, only)
        if isinstance(outcome, Refused):
            return _Attempt(message, dispatch, has_message=False)
        return _Attempt(message, dispatch, outcome)

    def _take(self, attempt: _Attempt, outbox: Outbox) -> None:
        """Take the message that kombu has made."""
        dispatch = attempt.dispatch
        dispatch.commands = outbox.commands
        if not outbox.commands:  # several writes record that it reaches no queue
            raise _NotSentError
        if dispatch.call is not None:
            delay = delay_of(attempt.message.entry.options, self.now)
            dispatch.note = note(dispatch.call.ref, broker=self.broker, queue=outbox.queue, delay=delay)
        if self.writes_each and not self._write_at_once(attempt):
            raise _NotSentError

    def _write_at_once(self, attempt: _Attempt) -> bool:
        """Write one attempt; return whether it is sent."""
        self._batch.append(attempt)
        try:
            answers = self._write()
        except RedisError as exc:
            self._error = exc  # Celery wraps what is raised inside of a publish
            raise
        return bool(answers and answers[-1].recorded)

    def _write(self) -> Sequence[Answer]:
        """Write the batch, and return the answers."""
        batch, self._batch, self._characters = self._batch, [], 0
        one_write = self.one_write
        if not batch or not self._is_possible:
            return ()
        self._is_possible = one_write.publisher.may_publish(self.term)
        if not self._is_possible:
            return ()
        try:
            answers = one_write.write(batch, self._request(batch))
            is_marked = answers is None and self._marks_anew()
            if is_marked:
                answers = one_write.write(batch, self._request(batch))
        except NoPermissionError as exc:
            one_write.note_denial(str(exc))
            self._is_possible = False
            return ()
        if answers is None:
            if is_marked:  # else a server is away
                one_write.rule_out(ELSEWHERE)
            self._is_possible = False
            return ()
        for attempt, answer in zip(batch, answers, strict=True):
            self._settle(attempt.message, answer)
        return answers

    def _request(self, batch: Sequence[_Attempt]) -> Request:
        dispatches = [attempt.dispatch for attempt in batch]
        return self.one_write.dispatches.request(dispatches, self.term, retry_at=self.retry_at)

    def _marks_anew(self) -> bool:
        """Mark the servers again, because they may have lost the markers; return whether it is done."""
        try:
            self.one_write.mark(self.outbox, anew=True)
        except Exception as exc:  # their drivers may raise anything
            self.one_write.end_tick(exc)
            return False
        return True

    def _settle(self, message: Message, answer: Answer) -> None:
        task_id = message.occurrence.id
        if answer.recorded or answer.verdict not in {ClaimVerdict.CLAIMED, None}:
            self._settled[task_id] = answer.verdict or ClaimVerdict.CLAIMED
        elif answer.holder is not None and not answer.refusal:
            self._answers[task_id] = answer.holder
            self._again.append(message)


def _is_unusable(holder: Holder | None) -> bool:
    """Return whether a lock cannot be read."""
    return holder is not None and holder.verdict is Verdict.UNUSABLE
