"""Acquires the lock before a run and frees it right after, in the process that runs the task.

That of a plain task is acquired in the worker's main process, and only freed here.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.signals import task_postrun
from kombu.utils.encoding import safe_repr

from .. import signals
from ..broker import BlockedError, ConfirmingSender, own_broker
from ..config import Config
from ..errors import LockBackendError, UnusableLockError
from ..locks import backend_of, seconds_until
from ..locks.acquire import note_of_broker, suspect
from ..locks.base import (
    LONGEST_WAIT,
    MOST_WAITS,
    RUN_HEADER,
    Holder,
    Renewal,
    Ticket,
    Verdict,
    entry_of,
)
from ..locks.key import behind_key, readable
from ..locks.modes import decode_arguments, has_continuations
from ..log import Log
from ..rabbitmq_errors import may_pass
from ..run_results import DUPLICATE_REFUSED, REPLACED
from ..server_errors import is_denied
from .renewer import GATE_PAUSE, has_renewer, renewer_of
from .resend import send_again

if TYPE_CHECKING:
    from ..locks.key import Arguments, NamedArguments

__all__ = (
    "Blocked",
    "Postponed",
    "Refused",
    "Run",
    "Unsent",
    "admit",
    "is_followed",
    "postpone",
    "postpone_unlocked",
    "run_under_lock",
    "turn_ttl",
    "yields_to_heir",
)

log = Log(__name__)

#: Seconds of the first wait of a message whose lock another call holds; each wait doubles the last.
FIRST_WAIT = 0.25

#: The same, of a retry: most often its run is over, and the main process has not told it yet.
UNTOLD_WAIT = 0.03

#: Seconds for which the publish of an acknowledged message is retried, and between two attempts. A broker that also
#: stores the locks is unreachable whenever the locks are. In an alarm of RabbitMQ, the pool must go on to end it.
PATIENCE, RETRY_AFTER = 60.0, 0.5


class Postponed(Ignore):  # type: ignore[misc]
    """The message was sent again and waits for its turn; its locks stay as they are."""


class Refused(Ignore):  # type: ignore[misc]
    """The run must not start, because an equal call holds its lock or the same call has run already."""

    outcome = DUPLICATE_REFUSED  #: the word for the end of the message


class Replaced(Refused):
    """The run must not start, because another call has taken its place."""

    outcome = REPLACED


class Unsent(Reject):  # type: ignore[misc]
    """The message could not be sent again to wait for its turn, so the broker must deliver it again."""


class Blocked(Unsent):
    """The message could not be sent again to wait for its turn, because RabbitMQ has an alarm."""


def _drop_traceback(retval: object = None, **_: object) -> None:
    """Drop the traceback and the cause of a run that did not start, after Celery has reported them.

    The traceback leads to the frame of Celery's tracer, and that frame to the exception. Each such cycle keeps some
    7,000 objects, copies of the traceback among them, until the garbage collector finds it: 40 MB in a busy process.
    A broker's driver may make one more with its own error.
    """
    if isinstance(retval, Postponed | Refused | Unsent):
        cause: BaseException | None = retval
        while cause is not None:
            clear_frames(cause.__traceback__)
            following = cause.__cause__ or cause.__context__
            cause.__traceback__ = cause.__cause__ = cause.__context__ = None
            cause = following


task_postrun.connect(_drop_traceback, weak=False)

#: From when on a child process may ask again a locks' server that did not answer, in seconds of the monotonic clock.
_asks_from = 0.0


def _tell_end(sender: Task, state: str | None = None, **_: object) -> None:
    """Tell the locks' server the end of a run, in the child process that has run it; that frees a plain task's lock.

    The main process does that, too, and alone after any other end. But while it reconnects to its broker, it reads no
    results: its renewer still renews the lock, and the broker delivers a message with late acknowledgement again. In a
    pool without child processes it learns of the end at once, but after such a late acknowledgement, which may fail.
    """
    global _asks_from  # noqa: PLW0603 - one for all tasks of a process
    request = sender.request
    if state not in {states.SUCCESS, states.FAILURE, states.RETRY} or request.is_eager:
        return
    # Whether what follows it is sent: else Celery's tracer is about to raise the error, or the state is another one.
    is_sent = state == states.SUCCESS and sys.exc_info()[1] is None
    if not getattr(sender, "has_own_gate", False):
        ticket = Ticket.of_message(vars(request), request.id, delivered=True)
    else:  # it has told its end before, but for what follows it
        run = getattr(request, RUN_HEADER, None)
        ticket = run.ticket if isinstance(run, Run) and is_sent and _may_be_unsent(sender) else None
    if ticket is None or not ticket.nonce:  # without one, the main process manages no locks
        return
    goes_on = not is_sent and state != states.RETRY
    if has_renewer(sender.app):
        if sender.acks_late:
            renewer_of(sender.app).tell_end(ticket, unsent=goes_on and _may_be_unsent(sender))
        return
    if time.monotonic() < _asks_from:
        return
    try:
        _free(sender, ticket, goes_on=goes_on)
    except LockBackendError:  # the main process tries, too, and logs an outage
        _asks_from = time.monotonic() + GATE_PAUSE


task_postrun.connect(_tell_end, weak=False)


class Run(Mapping[str, Any]):
    """The run of a Singleton, for its body: ``self.request.singlebeat``.

    As a mapping it has the keys of any run that beat has sent: ``entry``, ``occurrence``, ``nominal`` and ``previous``
    (ISO 8601), and ``kind`` (a word of ``beat.entries.occurrence.Kind``). It is empty for runs from other senders.
    """

    def __init__(self, task: Task, ticket: Ticket, fence: int) -> None:
        self.task, self.ticket = task, ticket
        #: The ``__call__`` of a subclass, which may call that of Singleton, is about to run the body.
        self.begins = False
        #: Rises from run to run of equal calls. A resource that refuses lower numbers is safe from runs without lock.
        self.fence = fence
        header = getattr(task.request, RUN_HEADER, None)
        self._header: Mapping[str, Any] = header if isinstance(header, Mapping) else {}

    def __getitem__(self, name: str) -> Any:
        return self._header[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)

    def __bool__(self) -> bool:
        return True

    def is_lost(self) -> bool:
        """Return whether this run has lost its lock; asks the locks' server."""
        config = Config.of(self.task.app)
        ref = self.ticket.run
        renewals = backend_of(self.task.app).renew_many([ref], lease=config.singlebeat_lock_lease)
        return renewals[0] is not Renewal.RUNNING


@contextmanager
def run_under_lock(
    task: Task, args: Arguments, kwargs: NamedArguments
) -> Iterator[tuple[Arguments, NamedArguments] | None]:
    """Hold the lock of a Singleton's current request, from before its body to right after it.

    The lock is freed before the result is stored, and before callbacks and the next step of a chain are sent. A caller
    that sees the result can therefore send the call again. Yields the arguments to run with, or None if this is not
    the run of a message: a direct call, an eager call, or a task that calls itself inside of its body.

    Raises:
        Ignore: the run must not start; ``admit`` has handled and logged the case.
    """
    request = task.request
    if request.called_directly or request.is_eager or isinstance(getattr(request, RUN_HEADER, None), Run):
        yield None
        return
    ticket = Ticket.of_message(vars(request), request.id, delivered=True)
    if ticket is None:  # the sender acquires no locks, and this worker has no lock step
        yield args, kwargs
        return
    fence, latest = _begin(task, ticket, request)
    request.singlebeat = Run(task, ticket, fence)
    if latest is not None:
        # A retry is sent with the arguments of the request. After a crash, the message still has its own arguments.
        request.args, request.kwargs = args, kwargs = latest
    try:
        yield args, kwargs
    except Reject:
        raise  # the broker may deliver the message again; the main process decides about the lock
    except (Retry, Ignore):
        _finish(task, ticket, took=fence > 0, goes_on=False)  # its retry or its replacement is sent already
        raise
    except Exception:
        _finish(task, ticket, took=fence > 0)
        raise
    else:
        _finish(task, ticket, took=fence > 0)
    # Any other BaseException ends the process or the greenlet, and the main process sees that end.


def _begin(task: Task, ticket: Ticket, request: Context) -> tuple[int, tuple[Arguments, NamedArguments] | None]:
    """Start a run: acquire its lock, and free the lock of its wait in the queue for the next call.

    If the locks' server is unreachable, ``singleton_on_backend_error`` decides whether the run starts without its lock.
    By default it starts, unless it waits for the end of another run, or its lock may hold arguments of other calls. If
    a soft time limit fires meanwhile, which fires once, it is put off.

    Returns:
        The fencing number, 0 without the lock; and the arguments of the latest call that the run stands for, or None.
    """
    config, backend = Config.of(task.app), backend_of(task.app)
    try:
        holder = backend.begin(
            ticket.run,
            queued=ticket.queued,
            turn_ttl=turn_ttl(ticket, request, lease=config.singlebeat_lock_lease),
            waits_since=ticket.waits_since,
            lease=config.singlebeat_lock_lease,
            remember_for=config.singlebeat_queued_ttl,
            task=task.name,
            arguments=readable(request.args or (), request.kwargs or {}, vars(request), app=task.app, task=task.name),
            # A lock of the run's own refuses nothing but copies of it: to them, the run is over when it ends.
            expiry=None if ticket.is_private else task.effective_lock_expiry,
            entry=entry_of(vars(request)),
            note=note_of_broker(own_broker(task.app)),
            overtakes=ticket.overtakes,
            yields=yields_to_heir(ticket, request),
        )
    except SoftTimeLimitExceeded:
        why = "its soft time limit fired while its lock was taken"
        postpone(task, request, ticket, countdown=LONGEST_WAIT, why=why, level=logging.WARNING)
    except LockBackendError as exc:
        policy = config.singleton_on_backend_error
        if policy == "raise" or (policy != "run" and (ticket.waits or ticket.joinable)):
            postpone_unlocked(task, request, ticket, exc)
        said = "%(task)s[%(id)s] runs without its lock"
        if ticket.joinable:
            said += ", with the arguments that it was sent with"
        log.warning(said, event="unlocked", task=task.name, id=request.id, reason=exc)
        return 0, None
    admit(task, ticket, holder, request)
    return holder.fence, _latest_arguments(task, holder, request)


def _latest_arguments(task: Task, holder: Holder, request: Context) -> tuple[list[object], dict[str, object]] | None:
    """Return the arguments of the latest call that a run stands for, or None if they are its own.

    They count also if all calls of the task are equal by now: the code of another release may have sent them.
    """
    if not holder.payload:
        return None
    try:
        return decode_arguments(holder.payload)
    except ValueError as exc:
        log.warning(
            "%(task)s[%(id)s] runs with the arguments that it was sent with: later ones in its lock cannot be read",
            event="payload_unreadable",
            task=task.name,
            id=request.id,
            reason=exc,
        )
        return None


def _free(task: Task, ticket: Ticket, *, took: bool = False, goes_on: bool = True) -> None:
    """Free the lock of a run that is over.

    Args:
        took: whether it is known that the run had taken its lock: its loss is recorded then, for the main process.
        goes_on: what follows the run is sent from now on.
    """
    remember_for = Config.of(task.app).singlebeat_queued_ttl
    # Its callbacks and the next step of its chain are sent after that, and the main process says whether they were.
    unsent = goes_on and _may_be_unsent(task)
    backend_of(task.app).finish_many([ticket.run], remember_for=remember_for, ran=True, took=took, unsent=unsent)


def _may_be_unsent(task: Task) -> bool:
    """Return whether another delivery of a message may have to send what follows its run."""
    return bool(task.acks_late) and is_followed(task.request)


def _finish(task: Task, ticket: Ticket, *, took: bool, goes_on: bool = True) -> None:
    try:
        try:
            _free(task, ticket, took=took, goes_on=goes_on)
        except SoftTimeLimitExceeded:  # it fires once; the body has ended, so its outcome stands
            _free(task, ticket, took=took, goes_on=goes_on)
    except LockBackendError as exc:  # the main process retries, and else the lease ends
        log.warning(
            "the lock of task %(id)s stays until its lease ends",
            event="lock_kept",
            id=ticket.task_id,
            reason=exc,
        )


def turn_ttl(ticket: Ticket, request: Context, *, lease: float) -> float:
    """Return the seconds for which a message keeps its turn while its lock is held; 0 if it does not wait."""
    if not waits_for_its_turn(ticket, request):
        return 0.0
    left = seconds_until(request.expires, datetime.now(UTC))
    return lease if left is None else max(0.001, min(lease, left))


def waits_for_its_turn(ticket: Ticket, request: Context) -> bool:
    """Return whether a message whose lock is held is sent again to wait; other messages are skipped."""
    # A redelivered message was no duplicate when it was sent. Its run was cut short, and an equal call came meanwhile.
    came_back = ticket.rejections > 0 or (request.delivery_info or {}).get("redelivered")
    is_retry = ticket.generation >= 1  # of a plain task: that of a Singleton waits in any case
    return ticket.waits or is_retry or bool(ticket.queued and came_back) or is_followed(request)


def yields_to_heir(ticket: Ticket, request: Context) -> bool:
    """Return whether a message is dropped if another call has the place behind the holder, which runs in its place."""
    return (ticket.joinable or ticket.replaceable) and not is_followed(request)


def is_followed(request: Context) -> bool:
    """Return whether a chain, a chord, a group, a callback or a replaced task waits for this very run."""
    embedded = {"link": request.callbacks, "link_error": request.errbacks, "group_id": request.group}
    embedded |= {name: getattr(request, name) for name in ("chain", "chord", "replaced_task_nesting")}
    return has_continuations(embedded)


def admit(task: Task, ticket: Ticket, holder: Holder, request: Context) -> None:
    """Return if a run may start; else log the reason, and postpone or drop the message.

    Args:
        holder: the reply of the locks' server to ``begin``.

    Raises:
        Refused: the message is dropped; Replaced if another call has taken its place.
        Postponed: the message was sent again, to wait for its turn.
        Unsent, Exception: the message could not be sent again; see ``postpone``.
    """
    match holder.verdict:
        case Verdict.STARTED:
            return
        case Verdict.COPY:
            # Not dropped: if the run dies, only this message is left of it. Then it even waits for an equal call that
            # has acquired the lock first.
            heir = replace(ticket, waits=True, waited=min(ticket.waited + 1, MOST_WAITS))
            # Shorter than the lease: the run may be over, and its worker about to free the lock.
            countdown = min(LONGEST_WAIT, max(1.0, holder.ttl), FIRST_WAIT * 2**ticket.waited)
            try:
                postpone(task, request, heir, countdown=countdown, why="it is running already")
            except (Postponed, Unsent):
                raise
            except Exception as exc:  # the end of this copy would be taken for the end of the run
                raise Refused("it is running already") from exc
        case Verdict.DONE | Verdict.STALE:
            log.info(
                "%(task)s[%(id)s] has run already: this copy is dropped",
                event="duplicate_refused",
                task=task.name,
                id=ticket.task_id,
            )
            raise Refused("it has run already")
        case Verdict.REPLACED:
            _skip(task, ticket, request, "another call took its place", event="replaced")
            raise Replaced("another call took its place")
    if holder.state == "queued" and holder.task_id != ticket.task_id:
        suspect(task.app, ticket.run.key, holder)
    if _must_wait(ticket, holder, request):
        first = UNTOLD_WAIT if holder.task_id == ticket.task_id else FIRST_WAIT
        countdown = min(LONGEST_WAIT, first * 2**ticket.waited)
        if holder.held_for:
            # Newer messages leave the free lock to the one that has the turn: while it sleeps, none of them runs.
            countdown = min(countdown, max(FIRST_WAIT, holder.held_for))
        waited = min(ticket.waited + 1, MOST_WAITS)
        since = holder.waits_since or ticket.waits_since
        # Of until_executing, the lock of the call is another one, and ends when the run starts.
        queued = ticket.queued if ticket.queued not in {"", ticket.key} else behind_key(ticket.key)
        later = replace(ticket, queued=queued, waits=True, waited=waited, waits_since=since)
        postpone(task, request, later, countdown=countdown, why=f"its lock is held by {holder}")
    signals.duplicate.send(sender=task, task_id=holder.task_id, args=request.args, kwargs=request.kwargs, at="start")
    _skip(task, ticket, request, f"its lock is held by {holder}", event="duplicate", holder=holder.task_id)
    raise Refused(f"held by {holder}")


def _must_wait(ticket: Ticket, holder: Holder, request: Context) -> bool:
    """Return whether a message whose lock is held is sent again, to wait; else it is dropped.

    A message that others may join, or that replaces others, may have lost its lock in the queue. A call that has
    acquired the lock, or the place behind the holder, since then is newer, and runs in its place.
    """
    if holder.task_id == ticket.task_id:  # a run that has sent this retry, and goes on
        return True
    if not yields_to_heir(ticket, request):
        return waits_for_its_turn(ticket, request)
    return not holder.has_heir and (holder.may_be_older or waits_for_its_turn(ticket, request))


def _skip(task: Task, ticket: Ticket, request: Context, why: str, *, event: str, holder: str = "") -> None:
    about = {"task": task.name, "id": ticket.task_id, "holder": holder, "reason": why}
    log.info("%(task)s[%(id)s] is skipped", event=event, **about)
    try:  # callers that wait for the result must learn that it was skipped
        task.backend.mark_as_revoked(ticket.task_id, why, request=request, store_result=not task.ignore_result)
    except Exception:  # result backends raise any exception, and the task must not start in any case
        log.exception(
            "%(task)s[%(id)s]: cannot store that it was skipped",
            event="result_not_stored",
            task=task.name,
            id=ticket.task_id,
        )


def postpone_unlocked(task: Task, request: Context, ticket: Ticket, exc: LockBackendError) -> NoReturn:
    """Send the message of a request again, because its lock is unreachable or unusable.

    Raises: as ``postpone`` does.
    """
    # The renewer logs an outage. An unusable lock and a missing right wait for an operator, and only this line says so.
    needs_operator = isinstance(exc, UnusableLockError) or is_denied(exc)
    level = logging.WARNING if needs_operator else logging.INFO
    postpone(task, request, ticket, countdown=LONGEST_WAIT, why=str(exc), level=level)


def postpone(
    task: Task, request: Context, ticket: Ticket, *, countdown: float, why: str, level: int = logging.INFO
) -> NoReturn:
    """Send the message of a request again, unchanged, with a countdown.

    Args:
        countdown: seconds.
        why: the reason, for the log.
        level: log level, a number of ``logging``.

    Raises:
        Postponed: the message was sent, and RabbitMQ has confirmed it.
        Unsent: the message could not be sent, but the broker still has the delivered message.
        Exception: the message could not be sent, and the broker has no copy; the error of the publish.
    """
    log.write(
        level,
        "%(task)s[%(id)s] waits for its turn",
        event="postponed",
        task=task.name,
        id=ticket.task_id,
        countdown=countdown,
        reason=why,
    )
    # A task without its own gate is postponed in the main process, which acknowledges a message only if it may start.
    is_acknowledged = getattr(task, "has_own_gate", False) and not task.acks_late
    given_up = time.monotonic() + PATIENCE * is_acknowledged
    try:
        while not _try_to_send_again(task, request, ticket, countdown, raises=time.monotonic() >= given_up):
            _pause()
    except Exception as exc:  # transports raise any exception
        said = exc if str(exc) else exc.__cause__ or exc  # kombu wraps some errors in one without words
        about = {"task": task.name, "id": ticket.task_id, "reason": safe_repr(said)}
        is_blocked = isinstance(exc, BlockedError) or isinstance(exc.__cause__, BlockedError)
        if is_acknowledged and is_blocked:
            # Only this process has the message. RabbitMQ takes it when the alarm ends, unless it dies before.
            send_again(task.app, request, ticket, countdown, sender=None)
            text = "%(task)s[%(id)s] is sent again to wait for its turn, without RabbitMQ's confirmation"
            log.warning(text, event="unconfirmed", **about)
            raise Postponed(why) from exc
        log.warning("%(task)s[%(id)s] cannot be sent again to wait for its turn", event="unsent", **about)
        if not is_acknowledged:
            raise (Blocked if is_blocked else Unsent)(why, requeue=True) from exc
        raise
    raise Postponed(why)


def _pause() -> None:
    with suppress(SoftTimeLimitExceeded):  # of a run that does not begin
        time.sleep(RETRY_AFTER)


def _try_to_send_again(task: Task, request: Context, ticket: Ticket, countdown: float, *, raises: bool) -> bool:
    try:
        send_again(task.app, request, ticket, countdown, sender=ConfirmingSender.of(task.app))
    except SoftTimeLimitExceeded:  # of a run that does not begin; of two copies of its message, one runs
        return False
    except Exception as exc:
        # After failures, kombu leaves a closed channel in its pool: the next publish over it raises an AttributeError.
        unreachable = (*task.app.producer_pool.connections.connection.connection_errors, AttributeError)
        # Celery retries for less than a second, and a first connection not at all. It wraps the errors of transports.
        if raises or not any(isinstance(each, unreachable) or may_pass(each) for each in (exc, exc.__cause__) if each):
            raise
        return False
    return True
