"""The gate before a run and the release right after it, in the process that runs the task."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.utils.encoding import safe_repr

from .. import signals
from ..config import Config
from ..errors import LockBackendError, UnusableLockError
from ..locks import backend_of, seconds_until
from ..locks.base import HEADER, MOST_WAITS, RUN_HEADER, Holder, Renewal, Ticket, Verdict, entry_of, without_deaths
from ..locks.key import behind_key, readable
from ..locks.modes import decode_arguments, equal_calls_may_differ, has_continuations
from ..log import Log
from ..monitors import same_trace

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

    from ..locks.key import Arguments, NamedArguments

__all__ = (
    "LONGEST_WAIT",
    "Postponed",
    "Refused",
    "Run",
    "Unsent",
    "admit",
    "postpone",
    "postpone_unlocked",
    "run_under_lock",
    "turn_ttl",
)

log = Log(__name__)

#: Seconds that a message waits for a lock that another call holds: doubled each time, up to the second figure.
FIRST_WAIT, LONGEST_WAIT = 0.25, 5.0

#: Seconds for which a message is sent again that the broker has no more, and between two tries: a broker that keeps the
#: locks, too, is unreachable whenever they are.
PATIENCE, RETRY_AFTER = 60.0, 0.5


class Postponed(Ignore):  # type: ignore[misc]
    """The message was sent again and waits for its turn: its locks stay as they are."""


class Refused(Ignore):  # type: ignore[misc]
    """The run must not start: an equal call holds its lock, or this one has run."""


class Unsent(Reject):  # type: ignore[misc]
    """The message could not be sent again, to wait for its turn: the broker is to deliver this one again."""


class Run(Mapping[str, Any]):
    """The run of a Singleton, for its body: ``self.request.singlebeat``.

    As a mapping it is what the run of any task gets that beat has sent, empty for one that was sent otherwise:
    ``entry``, ``occurrence``, ``nominal`` and ``previous`` (ISO 8601), ``kind`` (a word of ``beat.occurrence.Kind``).
    """

    def __init__(self, task: Task, ticket: Ticket, fence: int) -> None:
        self.task, self.ticket = task, ticket
        #: Rises from run to run of equal calls: a resource that refuses lower ones is safe from a run without lock.
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
        """Ask the locks' server whether this run does not hold its lock any more."""
        config = Config.of(self.task.app)
        ref = self.ticket.run
        renewals = backend_of(self.task.app).renew_many([ref], lease=config.singlebeat_lock_lease)
        return renewals[0] is not Renewal.RUNNING


@contextmanager
def run_under_lock(
    task: Task, args: Arguments, kwargs: NamedArguments
) -> Iterator[tuple[Arguments, NamedArguments] | None]:
    """Hold the lock of the request that a Singleton is running, from before its body to right after it.

    The lock is free before the result is stored and before callbacks and the next step of a chain are sent, so
    whoever sees them can send the call again. Yields the arguments to run with, or None where this is no run of a
    message: a direct call, an eager one, a task that calls itself inside of its body.

    Raises:
        Ignore: the run must not start; what happens instead has been logged and done.
    """
    request = task.request
    if request.called_directly or request.is_eager or isinstance(getattr(request, RUN_HEADER, None), Run):
        yield None
        return
    ticket = Ticket.of_message(vars(request), request.id, delivered=True)
    if ticket is None:  # sent by somebody who takes no locks, to a worker that does not look after them
        yield args, kwargs
        return
    fence, latest = _begin(task, ticket, request)
    request.singlebeat = Run(task, ticket, fence)
    if latest is not None:
        # A retry is sent with what the request has. If this run dies, though, its message has what it was sent with.
        request.args, request.kwargs = args, kwargs = latest
    try:
        yield args, kwargs
    except Reject:
        raise  # the broker may deliver the message again: the main process knows
    except Exception:
        _finish(task, ticket)
        raise
    else:
        _finish(task, ticket)
    # Any other BaseException ends the process or the greenlet: the main process sees how.


def _begin(task: Task, ticket: Ticket, request: Context) -> tuple[int, tuple[Arguments, NamedArguments] | None]:
    """Start a run: its lock becomes ours, and the one that it held in the queue is free for the next call.

    A run whose lock cannot be asked for starts without, if ``singleton_on_backend_error`` lets it: by default unless it
    waits for the end of another one, or for arguments that other calls have left in its lock.

    Returns:
        Its fencing number, 0 without its lock; and the arguments of the latest call that it stands for, or None.
    """
    config, backend = Config.of(task.app), backend_of(task.app)
    try:
        holder = backend.begin(
            ticket.run,
            queued=ticket.queued,
            turn_ttl=turn_ttl(ticket, request, lease=config.singlebeat_lock_lease),
            lease=config.singlebeat_lock_lease,
            remember_for=config.singlebeat_queued_ttl,
            task=task.name,
            arguments=readable(request.args or (), request.kwargs or {}, vars(request)),
            expiry=task.effective_lock_expiry,
            entry=entry_of(vars(request)),
        )
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
    """Return the arguments of the latest call that a run stands for, or None if they are its own."""
    if not holder.payload or not equal_calls_may_differ(task):
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


def _finish(task: Task, ticket: Ticket) -> None:
    try:
        backend_of(task.app).finish_many([ticket.run], remember_for=Config.of(task.app).singlebeat_queued_ttl, ran=True)
    except LockBackendError as exc:  # the main process tries again, and then the lease ends by itself
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
    """Return whether a message is sent again when its lock is held, where another is skipped."""
    embedded = {"link": request.callbacks, "link_error": request.errbacks, "group_id": request.group}
    embedded |= {name: getattr(request, name) for name in ("chain", "chord", "replaced_task_nesting")}
    # It was no duplicate when it was sent, and its run was cut short: meanwhile an equal call was accepted as well.
    came_back = ticket.rejections > 0 or (request.delivery_info or {}).get("redelivered")
    return ticket.waits or bool(ticket.queued and came_back) or has_continuations(embedded)


def admit(task: Task, ticket: Ticket, holder: Holder, request: Context) -> None:
    """Let a run start, or log why it must not and see to what becomes of its message.

    Args:
        holder: what the locks' server has answered to ``begin``.

    Raises:
        Refused: the message is dropped.
        Postponed: the message was sent again, to wait for its turn.
        Unsent, Exception: the message could not be sent again; see ``postpone``.
    """
    match holder.verdict:
        case Verdict.STARTED:
            return
        case Verdict.COPY:
            # Not dropped: if the run dies, this message is what is left of it, and waits even for an equal call that
            # was quicker to take the lock.
            heir = replace(ticket, waits=True, waited=min(ticket.waited + 1, MOST_WAITS))
            # Not for all of the lease: the run may be over, and its worker about to say so.
            countdown = min(max(1.0, holder.ttl), FIRST_WAIT * 2**ticket.waited)
            try:
                postpone(task, request, heir, countdown=countdown, why="it is running already")
            except (Postponed, Unsent):
                raise
            except Exception as exc:  # its end would be taken for that of the run
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
            raise Refused("another call took its place")
    if waits_for_its_turn(ticket, request):
        countdown = min(LONGEST_WAIT, FIRST_WAIT * 2**ticket.waited)
        waited = min(ticket.waited + 1, MOST_WAITS)
        later = replace(ticket, queued=behind_key(ticket.key), waits=True, waited=waited)
        postpone(task, request, later, countdown=countdown, why=f"its lock is held by {holder}")
    signals.duplicate.send(sender=task, task_id=holder.task_id, args=request.args, kwargs=request.kwargs, at="start")
    _skip(task, ticket, request, f"its lock is held by {holder}", event="duplicate", holder=holder.task_id)
    raise Refused(f"held by {holder}")


def _skip(task: Task, ticket: Ticket, request: Context, why: str, *, event: str, holder: str = "") -> None:
    about = {"task": task.name, "id": ticket.task_id, "holder": holder, "reason": why}
    log.info("%(task)s[%(id)s] is skipped", event=event, **about)
    try:  # whoever waits for its result hears of it
        task.backend.mark_as_revoked(ticket.task_id, why, request=request, store_result=not task.ignore_result)
    except Exception:  # result backends raise what they like, and the task must not start in any case
        log.exception(
            "%(task)s[%(id)s]: cannot store that it was skipped",
            event="result_not_stored",
            task=task.name,
            id=ticket.task_id,
        )


def postpone_unlocked(task: Task, request: Context, ticket: Ticket, exc: LockBackendError) -> NoReturn:
    """Send the message of a request again, because its lock cannot be asked for.

    Raises: as ``postpone`` does.
    """
    # An outage is logged by the renewer. A lock that cannot be read waits for an operator, and for none but this line.
    level = logging.WARNING if isinstance(exc, UnusableLockError) else logging.INFO
    postpone(task, request, ticket, countdown=LONGEST_WAIT, why=str(exc), level=level)


def postpone(
    task: Task, request: Context, ticket: Ticket, *, countdown: float, why: str, level: int = logging.INFO
) -> NoReturn:
    """Send the message of a request again, as it is but later.

    Args:
        countdown: seconds.
        level: of the line in the log, a number of ``logging``.

    Raises:
        Postponed: it was sent.
        Unsent: it could not be sent; the broker has this one still.
        Exception: the same, but the broker has it no more: what the publishing raised.
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
    # A task without a gate of its own is in the main process, which acknowledges only what may start.
    is_acknowledged = getattr(task, "has_own_gate", False) and not task.acks_late
    given_up = time.monotonic() + PATIENCE * is_acknowledged
    try:
        while not _is_sent_again(task, request, ticket, countdown, raises=time.monotonic() >= given_up):
            time.sleep(RETRY_AFTER)
    except Exception as exc:  # a transport raises what it likes
        about = {"task": task.name, "id": ticket.task_id, "reason": safe_repr(exc)}
        log.warning("%(task)s[%(id)s] cannot be sent again to wait for its turn", event="unsent", **about)
        if not is_acknowledged:
            raise Unsent(why, requeue=True) from exc
        raise
    raise Postponed(why)


def _is_sent_again(task: Task, request: Context, ticket: Ticket, countdown: float, *, raises: bool) -> bool:
    try:
        _send_again(task, request, ticket, countdown)
    except Exception as exc:
        unreachable = task.app.producer_pool.connections.connection.connection_errors
        # Celery retries for less than a second, and a first connection not at all. It wraps what the transport raises.
        if raises or not (isinstance(exc, unreachable) or isinstance(exc.__cause__, unreachable)):
            raise
        return False
    return True


def _send_again(task: Task, request: Context, ticket: Ticket, countdown: float) -> None:
    headers = {**without_deaths(request.headers), HEADER: ticket.undelivered.header()}
    shown = {name: request.get(name) for name in ("argsrepr", "kwargsrepr")}  # by itself Celery would show everything
    encoding = {"serializer": ticket.serializer, "compression": request.get("compression")}
    encoding = {name: value for name, value in encoding.items() if value}  # else as the task says
    signature = task.signature_from_request(
        request,
        countdown=_sendable(task.app, countdown),
        retries=request.retries,
        headers=headers,
        **shown,
        **encoding,
    )
    # All headers, for beside Sentry's ``request.headers`` are only some.
    with same_trace(vars(request)):
        # Task's own method: a Singleton's would hand the lock over to it.
        Task.apply_async(task, signature.args, signature.kwargs, **signature.options)


def _sendable(app: Celery, countdown: float) -> float:
    """Return a countdown that Celery can send: where it lets RabbitMQ delay messages, whole seconds from 1 on."""
    driver = app.producer_pool.connections.connection.transport.driver_type
    return math.ceil(countdown) if detect_quorum_queues(app, driver)[0] else countdown
