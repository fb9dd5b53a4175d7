"""A delivery of a message in the worker's main process, which sees the ends of a run that the task's process cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.concurrency.base import BasePool
from celery.exceptions import (
    Reject,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker import request as celery_request
from celery.worker.state import revoked, revoked_stamps, task_ready
from kombu.transport.virtual import Channel
from kombu.transport.virtual.exchange import STANDARD_EXCHANGE_TYPES, FanoutExchange
from kombu.utils.encoding import safe_repr
from kombu.utils.functional import maybe_list
from kombu.utils.uuid import uuid

from ..broker import own_broker
from ..config import Config
from ..errors import ConfigError, LockBackendError, UnusableLockError
from ..locks import time_to_start
from ..locks.acquire import note_of_broker, unlocked_ticket
from ..locks.base import HEADER, Ref, Ticket, entry_of
from ..locks.key import check_sendable, readable
from ..locks.modes import LockMode, overlap_for
from ..log import Log
from ..run_results import RESULT_NOT_STORED, is_result_lost, may_be_unsent, outcome_of, record_end
from .gate import (
    Blocked,
    Postponed,
    Refused,
    Unsent,
    admit,
    is_followed,
    postpone_unlocked,
    turn_ttl,
    yields_to_heir,
)
from .lock_action import LockAction, lock_action
from .renewer import renewer_of
from .resend import MESSAGE, Message

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Queue

__all__ = ("Request", "leave_unwritten", "report_exceptions")

log = Log(__name__)

#: The ends that come from outside of a body, and may have come before it began.
CUT_SHORT_BY = (SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError, Terminated)

#: Seconds after a hard time limit until the child process is surely dead: Celery reports the limit before it kills.
KILL_TIME = 1.0

#: Seconds from a signal that ends a run to the pool's check whether the process is dead.
REAPED_AFTER = 0.3

#: Seconds until a message that cannot start now is requeued; the broker delivers it again at once.
PUT_BACK_AFTER = 1.0

#: The same while RabbitMQ has an alarm: a quorum queue drops a message that it has delivered too often.
PUT_BACK_AFTER_ALARM = 30.0


#: Seconds for which the lock of a requeued message lasts at least, so that it can be received again: it may expire now.
REDELIVERED_WITHIN = 5.0


class _Escaped(ExceptionInfo):  # type: ignore[misc]
    """An exception that has left Celery's tracer, in a pool without processes."""


def report_exceptions(pool: BasePool) -> None:
    """Let a pool report exceptions that leave Celery's tracer, such as those of a result backend that refuses writes.

    Pools of processes report them already. In other pools no code catches them, and the request would never end.
    """
    if getattr(pool, "uses_semaphore", True):  # a pool of processes
        return
    on_apply = pool.on_apply

    @wraps(on_apply)
    def reporting(target: Callable[..., Any], *args: Any, **options: Any) -> Any:
        request = getattr(options.get("callback"), "__self__", None)
        is_ours = isinstance(request, Request) and request.ticket is not None
        return on_apply(_reported(target) if is_ours else target, *args, **options)

    pool.on_apply = reporting


def leave_unwritten(pool: BasePool) -> None:
    """Let a pool of processes leave the runs that it drops to the next delivery of their messages.

    It drops those that it has not begun to write to a process when its worker stops, or loses the broker. The broker
    gets their messages back after that.
    """
    flush, unwritten = getattr(pool, "flush", None), getattr(getattr(pool, "_pool", None), "outbound_buffer", None)
    if flush is None or unwritten is None:
        return

    @wraps(flush)
    def flushed() -> None:
        callbacks = [getattr(job, "_callback", None) for job in unwritten]
        flush()
        for callback in callbacks:
            request = getattr(callback, "__self__", None)
            if isinstance(request, Request):
                request.leave_unstarted()

    pool.flush = flushed


def _reported(target: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(target)
    def reported(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except Exception:
            return _Escaped()

    return reported


def _then_over(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ended(self: Request, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], _Escaped):
            return self.end_escaped(args[0])
        try:
            # In a pool without processes, SystemExit and the like arrive here in place of a result, and Celery fails.
            with self._over_though_celery_fails():
                return method(self, *args, **kwargs)
        finally:
            self.free_if_acknowledged()
            if not isinstance(args[0], ExceptionInfo) and not args[0][0]:
                # A worker that reconnects to its broker reads the result late. Celery measures no failed run.
                record_end(self, "success", seconds=args[0][2])

    return ended


def _gated(execute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute)
    def gated(self: Request, pool: BasePool | None, **kwargs: Any) -> Any:
        self._given_to_pool = True
        self._in_process = not getattr(pool, "uses_semaphore", True)
        try:
            self.begin_for_plain_task()
        except Postponed as exc:
            self._leave_to_next_delivery()
            self._drop("postponed")
            raise TaskRevokedError(self.id) from exc
        except Refused as exc:
            self._drop(exc.outcome, str(exc))
            self.free_if_acknowledged()  # the message may have a turn
            raise TaskRevokedError(self.id) from exc
        except Exception as exc:  # errors of the broker, a backend or a user's function must not stop the worker
            if not isinstance(exc, Unsent):  # Unsent has been logged
                about = {"task": self.task.name, "id": self.id, "reason": safe_repr(exc)}
                log.warning("%(task)s[%(id)s] cannot start now and is put back", event="put_back", **about)
            self._put_back(exc)
            raise TaskRevokedError(self.id) from exc
        try:
            return execute(self, pool, **kwargs)
        except TaskRevokedError:
            raise  # _announce_revoked has freed its lock
        except Exception as exc:
            self._end_untaken(exc)
            raise

    return gated


def _queue_of(message: Any, app: Celery) -> str:
    """Return the queue by which a message of kombu has come; empty if that is not known.

    The message of RabbitMQ names its consumer; which queue that reads, only the consumer itself knows.
    """
    if isinstance(message.channel, Channel):
        return _read_by(message.delivery_info or {}, app.amqp.queues.consume_from.values())
    tag = (message.delivery_info or {}).get("consumer_tag")
    callback = getattr(message.channel, "callbacks", {}).get(tag)
    tags = getattr(getattr(callback, "__self__", None), "_active_tags", {})  # of kombu's Consumer, by queue
    return next((str(queue) for queue, each in tags.items() if each == tag), "")


def _read_by(delivery_info: Mapping[str, Any], queues: Iterable[Queue]) -> str:
    """Return a queue of this worker that has got a message over one of kombu's own exchanges, as those in Redis.

    If several have, each of them has got a copy, so each will do.
    """
    exchange, key = delivery_info.get("exchange"), delivery_info.get("routing_key") or ""
    if not exchange:
        return str(key)
    for queue in queues:
        for bound in queue.bindings or (queue,):
            kind = STANDARD_EXCHANGE_TYPES.get(bound.exchange.type, FanoutExchange)
            if bound.exchange.name != exchange or kind is FanoutExchange:  # a fanout queue can be read, not written
                continue
            rule = kind(None)
            if rule.lookup([rule.prepare_bind(queue.name, exchange, bound.routing_key, None)], exchange, key, None):
                return str(queue.name)
    return ""


class Request(celery_request.Request):  # type: ignore[misc]
    """A delivery of a message to this worker, in its main process; works as in Celery if the message has no ticket."""

    ticket: Ticket | None = None
    #: Whether the end of the run was recorded: Celery reports a hard time limit twice.
    end_told = False
    #: Whether the pool has got the request. The pool then starts it even if it is revoked from now on.
    _given_to_pool = False
    #: Whether that pool runs tasks in this process, in threads or greenlets.
    _in_process = False
    #: Whether the greenlet was killed, or the thread stopped, that had taken the run but not begun its body.
    _has_no_body = False
    _given_up = False
    #: Whether a hard time limit has passed: the body of a request with a ticket lives for a moment after that.
    _past_limit = False
    _over = False
    #: Whether its message is rejected, and the broker is not known to have got that: it delivers it again then.
    _is_rejected = False
    _cancelled = False
    _cut_short = False
    #: Whether the run failed outside of its body, as by an error of the broker.
    _failed_to_send = False
    #: This delivery is known to have taken its lock.
    has_begun = False
    _eta: datetime | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss_is_untold = True
        self.ticket = self._ticket()
        if self.ticket is not None:
            # The nonce goes with the request to the process that runs the task: both processes can name this run.
            self.request_dict[HEADER] = self.ticket.header()
            # Receivers and hooks come before the gate, and may change arguments and headers.
            self.request_dict[MESSAGE] = Message.of(self.message)
            self._shorten_pause(self.ticket, datetime.now(UTC))
            renewer_of(self.app).track(self)

    def _ticket(self) -> Ticket | None:
        ticket = Ticket.of_message(self.request_dict, self.id)
        if ticket is None and not self._has_own_gate:
            return None
        try:
            renewer_of(self.app)
            if ticket is None:  # sent by send_task or another language: the run acquires its lock at the start
                key = str(self.task.generate_lock(self.task.name, self.args, self.kwargs))
                ticket = unlocked_ticket(self.task, self.id, key, overlap_for(self.task))
                check_sendable(key, ticket.task_id)
        except ConfigError as exc:
            self._log_unlocked(exc)
            return None
        except Exception as exc:  # a user's function may raise any exception, but no message may stop the worker
            self._log_unlocked(safe_repr(exc))
            return None
        return ticket.delivered(uuid(), brought_by=_queue_of(self.message, self.app))

    def _shorten_pause(self, ticket: Ticket, now: datetime) -> None:
        """Let a message that waits for its turn ask again in time, though the clock of its sender may be ahead."""
        if ticket.pause and self._eta is not None:
            self._eta = min(self._eta, now + timedelta(seconds=ticket.pause))

    @property
    def _has_own_gate(self) -> bool:
        return getattr(self.task, "has_own_gate", False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Celery makes a subclass for each task, whose on_success and execute_using_pool do not call super().
        super().__init_subclass__(**kwargs)
        for name, wrap in (("on_success", _then_over), ("execute_using_pool", _gated)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    @property
    def shown(self) -> str:
        """The arguments for people, as the message shows them."""
        return readable((), {}, self.request_dict, app=self.app, task=self.task.name)

    @property
    def has_run(self) -> bool:
        """Whether its body has run.

        A run that was cut short may have been about to send its message again, if it was never seen to hold its lock.
        """
        return self.time_start is not None and (self.has_begun or not self._cut_short)

    @property
    def leaves_unsent(self) -> bool:
        """Whether another delivery of its message may run, though its body has ended.

        What follows the run, such as the next step of a chain, may be unsent; or the broker has not got its rejection,
        as in the outage in which its retry could not be sent.
        """
        return self._is_rejected or (self._failed_to_send and bool(self.task.acks_late) and is_followed(self._context))

    def tells_loss(self, *, is_over: bool) -> bool:
        """Return whether a loss of the lock is to be logged; of several callers, in any threads, one gets True.

        Args:
            is_over: the run is over. Until then, it may not hold the lock yet.
        """
        is_by_time = getattr(self.task, "lock", None) == LockMode.UNTIL_EXPIRED
        if self.ticket is None or self.ticket.is_private or is_by_time or not (is_over or self.has_begun):
            return False
        return bool(self.__dict__.pop("_loss_is_untold", False))

    def renewed(self) -> Sequence[Ref]:
        """Return the locks to renew; of a queued message with an expiry, only its turn."""
        if (ticket := self._held) is None:
            return ()
        turn = (ticket.turn,) if ticket.turn is not None else ()
        if not self._ends_with_message:
            return (*ticket.refs, *turn)
        return turn if self.expires > datetime.now(UTC) else ()

    def shown_alive(self) -> Sequence[Ref]:
        """Return the locks of a queued message with an expiry: they are not renewed, as they end with the message."""
        return self._held.refs if self._held is not None and self._ends_with_message else ()

    @property
    def waits_here(self) -> bool:
        """Whether the pool has not got it: it waits in the main process for its ETA, a rate limit or a free process."""
        return not self._given_to_pool

    @property
    def _held(self) -> Ticket | None:
        return None if self._given_up and not self._given_to_pool else self.ticket

    @property
    def _ends_with_message(self) -> bool:
        return self.expires is not None and self.time_start is None

    def give_up_if_revoked(self) -> bool:
        """Return True once if the request was revoked while it waits here; Celery drops it only at its ETA."""
        # In this order: the event loop first notes that the pool gets the request, then checks whether it is revoked.
        if self._given_up or not self._is_revoked() or self._given_to_pool:
            return False
        self._given_up = True
        return True

    def _is_revoked(self) -> bool:
        if self.id in revoked:
            return True
        try:
            stamps = {header: maybe_list(self.stamps.get(header)) or () for header in self.stamped_headers}
            return any(set(stamps[header]) & set(maybe_list(revoked_stamps.get(header)) or ()) for header in stamps)
        except Exception:  # any program may write a message, but no message may stop a worker
            return False

    def begin_for_plain_task(self) -> None:
        """Begin the run of a task without its own gate; return only if the run may start.

        Raises: as ``gate.admit`` does.
        """
        if self.ticket is not None and not self._has_own_gate and not self.revoked():
            self._begin(self.ticket)

    def _drop(self, outcome: str, reason: str = "") -> None:
        """End a request that does not start."""
        self.acknowledge()
        task_ready(self)
        record_end(self, outcome, reason)

    def _begin(self, ticket: Ticket) -> None:
        renewer, config = renewer_of(self.app), Config.of(self.app)
        try:
            holder = renewer.gate.begin(
                ticket.run,
                queued=ticket.queued,
                turn_ttl=turn_ttl(ticket, self._context, lease=config.singlebeat_lock_lease),
                waits_since=ticket.waits_since,
                lease=config.singlebeat_lock_lease,
                remember_for=config.singlebeat_queued_ttl,
                task=self.task.name,
                arguments=self.shown,
                entry=entry_of(self.request_dict),
                note=note_of_broker(own_broker(self.app)),
                overtakes=ticket.overtakes,
                yields=yields_to_heir(ticket, self._context),
            )
        except LockBackendError as exc:
            if renewer.answers() and not isinstance(exc, UnusableLockError):
                renewer.note_failure()
            if ticket.waits:  # for the end of another run, which may still be running
                postpone_unlocked(self.task, self._context, ticket, exc)
            self._log_unlocked(exc)
            return
        admit(self.task, ticket, holder, self._context)
        self.has_begun = True

    def _log_unlocked(self, why: Exception | str) -> None:
        about = {"task": self.task.name, "id": self.id, "reason": why}
        log.warning("%(task)s[%(id)s] runs without its lock", event="unlocked", **about)

    def acknowledge(self) -> None:
        """Acknowledge the message, which frees the lock of a run that no pool reports, as of celery-batches."""
        super().acknowledge()
        if not self._given_to_pool:
            self.free_if_acknowledged()

    def free_if_acknowledged(self) -> None:
        """Free the lock if the broker does not deliver the message again: do what ``lock_action`` says."""
        if self.ticket is None or self._over:
            return
        action = lock_action(
            acknowledged=self.acknowledged,
            acks_late=bool(self.task.acks_late),
            cancelled=self._cancelled,
            past_limit=self._past_limit,
        )
        match action:
            case LockAction.WAIT:
                return
            case LockAction.HAND_OVER:
                self._leave_to_next_delivery()
            case LockAction.FORGET:
                self._over = True
                renewer_of(self.app).forget(self)
            case LockAction.RELEASE | LockAction.RELEASE_LATER:
                self._over = True
                renewer_of(self.app).finish(self, after=KILL_TIME if action is LockAction.RELEASE_LATER else 0.0)

    def _put_back(self, exc: Exception) -> None:
        """Requeue the message after a pause: at once, it would fail again in an endless loop."""
        task_ready(self)
        record_end(self, "postponed")
        pause = PUT_BACK_AFTER_ALARM if isinstance(exc, Blocked) else PUT_BACK_AFTER
        renewer_of(self.app).call_later(pause, partial(self.reject, requeue=True))

    def _end_untaken(self, exc: Exception) -> None:
        """Free the lock of a run that the pool could not take; the message is left to Celery.

        Celery logs the error in the timer of a message with an ETA, and ends the worker at any other message. The pool
        may keep the request for as long as the worker lives, and with it the renewal of the lock.
        """
        # A pool without processes may run the task before it returns. The run has started then, and ends as any other.
        if self.ticket is None or self._over or self.time_start is not None:
            return
        self._over = True
        renewer_of(self.app).finish(self)
        about = {"task": self.task.name, "id": self.id, "reason": safe_repr(exc)}
        log.error("%(task)s[%(id)s] does not start: the pool cannot take the run", event="not_taken", **about)
        record_end(self, "failure", exc)

    def leave_unstarted(self) -> None:
        """Hand over the lock of a run that a pool has got, and will not start."""
        if not (self.acknowledged or self._over):
            self._leave_to_next_delivery(at_once=True)

    def _leave_to_next_delivery(self, *, at_once: bool = False) -> None:
        # Also for a message that could not start: a server that hung may still grant its lock.
        if self.ticket is not None:
            self._over = True
            renewer, options = renewer_of(self.app), {"expires": self.expires}
            ttl = time_to_start(options, queued_ttl=renewer.remember_for, now=datetime.now(UTC))
            ttl = max(REDELIVERED_WITHIN, ttl)
            renewer.hand_over(self, replace(self.ticket.run, nonce=""), ttl=ttl, at_once=at_once)

    def terminate(self, pool: BasePool, signal: str | int | None = None) -> None:
        """End the run by a signal to its process, and check soon for its death, which Celery may notice 5 s late.

        In a pool without processes, a run that still waits for a free thread or greenlet never starts: it ends here.
        """
        super().terminate(pool, signal)
        if self.ticket is None:
            return
        is_unstarted = self._terminate_on_ack is not None and self.time_start is None
        if is_unstarted and not getattr(pool, "uses_semaphore", True):
            # A thread that takes the run from now on finds that it was terminated.
            self._end_unstarted(signal)
        elif self._has_no_body:  # and it could not acknowledge the message, as Celery just has
            self.free_if_acknowledged()
        elif getattr(pool, "uses_semaphore", False):
            # The process closes its files before it can be reaped. The pool finds it alive then, and checks by a timer.
            renewer_of(self.app).call_later(REAPED_AFTER, pool.maintain_pool)

    def cancel(self, pool: BasePool, signal: str | int | None = None, **options: Any) -> None:
        """End the run, because the connection to the broker was lost or the worker shuts down.

        A pool that cannot do that lets the run end by itself. ``options``: ``emit_retry``, since Celery 5.6.
        """
        # Before super(): a killed greenlet reports a success while Celery cancels it.
        self._cancelled = getattr(pool.terminate_job, "__func__", None) is not BasePool.terminate_job
        super().cancel(pool, signal, **options)

    def on_failure(self, exc_info: ExceptionInfo, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Handle every end of a run except success; Retry, Ignore and Reject among them."""
        exc = exc_info.exception
        exc = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
        if isinstance(exc, Unsent) and not self.acknowledged:
            return self._put_back(exc)
        if isinstance(exc, Postponed):
            self._leave_to_next_delivery()
            record_end(self, "postponed")
        else:
            outcome = exc.outcome if isinstance(exc, Refused) else outcome_of(exc)
            if outcome == "failure" and is_result_lost(exc_info, is_stored=return_ok):
                outcome = RESULT_NOT_STORED
            self._failed_to_send |= may_be_unsent(exc_info) and outcome in {"failure", RESULT_NOT_STORED}
            record_end(self, outcome, exc)
        self._cut_short |= isinstance(exc, CUT_SHORT_BY)
        self._past_limit |= isinstance(exc, celery_request.TimeLimitExceeded) and self.ticket is not None
        answer = partial(self.reject, requeue=exc.requeue) if isinstance(exc, Reject) else None
        try:
            with self._over_though_celery_fails(answer):
                return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            self.free_if_acknowledged()

    @contextmanager
    def _over_though_celery_fails(self, answer: Callable[[], object] | None = None) -> Iterator[None]:
        """Let the run be over though Celery fails at its end before it answers the broker, which it does last.

        Most often the result backend is away. No other end would follow, and the lock would be renewed for ever.

        Args:
            answer: the answer; None: the broker delivers the message again once it has lost this worker.
        """
        try:
            yield
        except BaseException:
            if not (self.acknowledged or self._over):
                (answer or self._leave_to_next_delivery)()
            raise

    def end_escaped(self, exc_info: ExceptionInfo) -> None:
        """End the request with an exception that has left Celery's tracer, as the pool of processes does."""
        try:
            self.on_failure(exc_info)
        except MemoryError:
            raise
        except Exception as exc:  # most often the result backend, which refuses the same result again
            about = {"task": self.task.name, "id": self.id, "reason": safe_repr(exc)}
            log.exception("%(task)s[%(id)s]: cannot store how it ended", event="result_not_stored", **about)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Handle that a process, thread or greenlet takes the run; a run that was terminated before ends here."""
        try:
            super().on_accepted(pid, time_accepted)
        except BaseException as exc:
            # A thread cannot be terminated, a greenlet was killed, or Celery has failed. Then no body follows, and no
            # end is reported. A pool of processes reports the end of the run itself.
            if self.ticket is not None and self._in_process:
                self._has_no_body = True
                if self._terminate_on_ack is not None:
                    self._end_unstarted(self._terminate_on_ack[1])
                self.free_if_acknowledged()
                if isinstance(exc, Exception) and not self._over:
                    self._over = True
                    renewer_of(self.app).leave(self)
            elif self.ticket is not None and not self.task.acks_late:
                self.acknowledge()  # the process runs the task all the same, and its end frees the lock
            raise

    def _end_unstarted(self, signum: str | int | None) -> None:
        if self.end_told:  # when it was terminated; Celery counts it as active since then
            task_ready(self)
            return
        try:
            self._announce_revoked("terminated", True, signum, False)
        finally:  # the result backend may be unreachable
            self.acknowledge()
            self.free_if_acknowledged()

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Handle a time limit; the hard limit ends the run."""
        self._past_limit |= not soft and self.ticket is not None
        self._cut_short |= not soft
        if soft:
            super().on_timeout(soft, timeout)
            return
        acknowledges = getattr(self.task, "acks_on_timeout", self.task.acks_on_failure_or_timeout)
        answer = self.acknowledge if acknowledges else partial(self.reject, requeue=True)
        try:
            with self._over_though_celery_fails(answer):
                super().on_timeout(soft, timeout)
        finally:
            record_end(self, "time_limit", f"{timeout} s")
            self.free_if_acknowledged()

    def reject(self, requeue: bool = False) -> None:
        """Reject the message; a requeued message keeps its lock and waits again."""
        if requeue and self._past_limit:
            # Without a pause, the next delivery would begin beside a body that is about to be killed.
            renewer_of(self.app).call_later(KILL_TIME, partial(self._reject, requeue=True))
        else:
            self._reject(requeue=requeue)

    def _reject(self, *, requeue: bool) -> None:
        requeued = requeue and not self.acknowledged
        if requeued:  # first, because the broker may deliver the message within a millisecond
            self._leave_to_next_delivery(at_once=True)
        elif self.ticket is not None and not self.acknowledged:
            self._note_rejection()
        super().reject(requeue)
        if not requeued:
            self.free_if_acknowledged()

    def _note_rejection(self) -> None:
        """Let the next delivery of the message run, until the broker has got the rejection.

        Celery only logs it if the connection is lost, and where a pool has processes, its loop sends it later.
        """
        reject, self._is_rejected = self.message.reject, True

        def note_sent(*args: Any, **options: Any) -> None:
            reject(*args, **options)
            self._is_rejected = False
            renewer_of(self.app).finish(self)

        self.message.reject = note_sent

    def _announce_revoked(self, reason: str, terminated: bool, signum: str | int | None, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        record_end(self, "expired" if expired else reason)
        if not terminated:  # a terminated run may still run for a while: its end is reported separately
            self.free_if_acknowledged()
