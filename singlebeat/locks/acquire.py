"""Acquires the lock of a call before the call is sent, by the task's lock mode and the call's overlap policy."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection
from kombu.utils.encoding import safe_repr

from ..broker import broker_errors, broker_name, own_broker
from ..config import Config
from ..destination import is_sent_by_others, queue_of_call
from ..errors import ConfigError, LockBackendError, UnusableLockError
from ..log import Log
from . import backend_of, delay_of
from .base import (
    RUN_HEADER,
    BaseBackend,
    Call,
    Holder,
    IfHeld,
    Ref,
    Ticket,
    Verdict,
    entry_of,
    generation,
    unusable,
)
from .key import behind_key, beside, readable, suspects_key
from .late_release import awaits_releases, cancel_release, refused, release_later
from .modes import LockMode, Overlap, encode_arguments, equal_calls_may_differ, has_continuations

if TYPE_CHECKING:
    from celery import Celery

    from .base import Options
    from .key import Arguments, NamedArguments
    from .task import LockableTask

__all__ = (
    "UNSENT_TTL",
    "Granted",
    "Plan",
    "Refused",
    "acquire",
    "answered",
    "cancel_releases",
    "free",
    "keep",
    "left_behind",
    "note",
    "note_of_broker",
    "note_of_call",
    "noted_in",
    "place_of_call",
    "places_of",
    "plan_call",
    "unlocked_ticket",
)

log = Log(__name__)

#: Seconds that the lock of beat's own call lasts until the call is sent. A beat that dies during a dispatch cannot free
#: the locks that it has acquired. The next beat frees no lock of an entry that was deleted or edited meanwhile.
UNSENT_TTL = 60.0

#: Policies by which a call evicts the calls that have not started.
REPLACING = {Overlap.CANCEL_OTHER, Overlap.TERMINATE_OTHER}


@dataclass(frozen=True, slots=True)
class Granted:
    """A call that may be sent, and the lock that it has acquired."""

    ticket: Ticket
    lock: Ref | None = None  #: the acquired lock, which is freed if the call cannot be sent
    #: The request that evicts other calls. It is made after the publish, because a call that fails must evict none.
    replacing: Call | None = None
    wait: float = 0.0  #: seconds that the lock is to last once the message is sent; 0: it lasts so long already
    terminates: bool = False  #: whether the call terminates the run that it waits for

    def give_up(self, task: LockableTask) -> None:
        """Free the lock of a call that could not be sent."""
        if self.lock is not None:
            free(task, self.lock)

    def note_sent(self, task: LockableTask) -> Holder | None:
        """Extend the lock of the sent call and evict other calls; return the run that the call waits for, or None.

        The lock then lasts for as long as the message may wait. Failures are logged and not raised, because the call
        is already sent and waits for its turn.
        """
        if self.lock is not None and self.wait > UNSENT_TTL:
            keep(task.singleton_backend, {self.lock: ""}, self.wait)
        if self.replacing is None:
            return self.ticket.waits_for
        about = {"task": task.name, "id": self.ticket.task_id}
        try:
            holder: Holder = task.singleton_backend.acquire_many([self.replacing], may_be_resent=True)[0]
        except LockBackendError as exc:
            log.warning(
                "%(task)s[%(id)s] waits for its turn: it could not replace other calls",
                event="not_replaced",
                **about,
                reason=exc,
            )
            return self.ticket.waits_for
        return self.note_replaced(task, holder)

    def note_replaced(self, task: LockableTask, holder: Holder) -> Holder | None:
        """Terminate the run that the sent call waits for, if the call does that; return this run, or None.

        A run that makes the call itself goes on: a part of what it has replaced itself by may have its id.

        Args:
            holder: the answer to ``replacing``.
        """
        if holder.verdict is not Verdict.WAITING:
            return None
        about = {"task": task.name, "id": self.ticket.task_id}
        caller = task.app.current_worker_task
        is_caller = caller is not None and caller.request.id == holder.task_id
        if self.terminates and holder.state == "running" and not is_caller:
            # Celery holds this connection while it takes a producer with another one from a pool, maybe the last.
            connection = task.app.connection_for_write()
            try:
                with connection:
                    task.app.control.revoke(holder.task_id, terminate=True, connection=connection)
            except broker_errors(connection) as exc:
                log.warning(
                    "%(task)s[%(id)s] waits for its turn: the run of task %(holder)s could not be terminated",
                    event="not_terminated",
                    **about,
                    holder=holder.task_id,
                    reason=safe_repr(exc),
                )
        return holder


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that must not be sent, because its lock is held or its task id was sent before."""

    holder: Holder  #: of the lock; has the call's own task id if that was sent before


def unlocked_ticket(task: LockableTask, task_id: str, key: str, overlap: Overlap) -> Ticket:
    """Return the ticket of a call that holds no lock while it is queued, such as a call that was sent by name."""
    if overlap is Overlap.ALLOW_ALL or task.lock in {LockMode.UNTIL_EXECUTING, LockMode.UNTIL_EXPIRED}:
        return Ticket(task_id, beside(key, task_id))  # its own lock refuses only copies of the call
    skipped = overlap in {Overlap.SKIP, Overlap.RAISE} and task.lock != LockMode.UNTIL_AND_WHILE_EXECUTING
    return Ticket(task_id, key) if skipped else Ticket(task_id, key, behind_key(key), waits=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call needs before it may be sent, and what becomes of it by the answer of the locks' server."""

    ticket: Ticket  #: of its message, if its lock is acquired, or if it needs none
    call: Call | None = None  #: the request for its lock; None if it needs none
    #: The ticket of its message if another call holds the lock and this one must be sent; None if it need not be.
    otherwise: Ticket | None = None
    overlap: Overlap = Overlap.SKIP
    wait: float = 0.0  #: seconds that its message may wait for its start
    is_of_beat: bool = False  #: beat sends it: its lock ends early until the message is sent, and it may be sent again
    has_new_id: bool = False  #: its task id was made for it: if that has ended, the request is one that was held back

    @property
    def unsent(self) -> Call | None:
        """The request for its lock in a write of its own, before the message is sent."""
        if self.call is None or not self.is_of_beat:
            return self.call
        return dataclasses.replace(self.call, ttl=min(self.wait, UNSENT_TTL))

    @property
    def granted(self) -> Granted:
        """What the call may do if its lock is acquired, or if it needs none."""
        lock = self.call.ref if self.call is not None else None
        return Granted(self.ticket, lock, wait=self.wait * self.is_of_beat)

    def outcome(self, holder: Holder) -> Granted | Refused:
        """Return what becomes of the call by the server's answer to ``call``."""
        if self.call is None or holder.verdict is Verdict.ACQUIRED:
            return self.granted
        task_id, key = self.ticket.task_id, self.ticket.key
        behind = Ticket(task_id, key, behind_key(key), waits=True)
        if holder.verdict is Verdict.WAITING:
            behind = dataclasses.replace(behind, waits_for=holder if holder.task_id != task_id else None)
            place = dataclasses.replace(self.call.ref, key=behind.queued)
            return Granted(behind, place, wait=self.wait * self.is_of_beat)
        if holder.verdict in {Verdict.RUNNING, Verdict.DONE}:  # the call was sent before
            return Refused(holder)
        # Else the holder may have the call's own id: a run that was replaced, and has not ended yet.
        if self.overlap in REPLACING and holder.task_id != task_id:
            if_held = IfHeld.REPLACE if self.otherwise is None else IfHeld.REPLACE_ALONE
            replacing = dataclasses.replace(self.call, ttl=self.wait, if_held=if_held)
            behind = dataclasses.replace(behind, waits_for=holder)
            return Granted(behind, replacing=replacing, terminates=self.overlap is Overlap.TERMINATE_OTHER)
        if self.otherwise is not None:
            waits_for = holder if self.otherwise.waits else None
            return Granted(dataclasses.replace(self.otherwise, waits_for=waits_for))
        return Refused(holder)


def plan_call(
    task: LockableTask,
    task_id: str,
    args: Arguments | None,
    kwargs: NamedArguments | None,
    *,
    overlap: Overlap,
    options: Options,
    key: str = "",
    has_new_id: bool = False,
    is_awaited: bool = False,
) -> Plan:
    """Return what a call needs before it may be sent, by the task's lock mode and the call's overlap policy; no I/O.

    Args:
        key: of its lock, if it is known.
        has_new_id: whether the task id was made for this call.
        is_awaited: it is no duplicate of the call that holds its lock, and waits for the end of that.

    Raises:
        ConfigError: the app's lock backend does not support the policy.
        TypeError: the arguments do not fit the task, or one of them cannot be encoded.
        ValueError: countdown, eta or expires among the options is invalid.

    A task's own ``unique_on`` or ``generate_lock`` may raise anything.
    """
    key = key or str(task.generate_lock(task.name, args, kwargs))
    if overlap is Overlap.ALLOW_ALL or task.lock == LockMode.WHILE_EXECUTING:
        return Plan(unlocked_ticket(task, task_id, key, overlap))
    must_be_sent = is_awaited or has_continuations(options) or overlap is Overlap.BUFFER_ALL
    call = _call(task, Ref(key, task_id, generation(options)), args, kwargs, options)
    wait, is_of_beat = call.ttl, RUN_HEADER in (options.get("headers") or {})
    otherwise: Ticket | None = None
    if task.lock == LockMode.UNTIL_EXECUTED:  # the usual one: no more is made than it needs
        ticket = Ticket(task_id, key, key, waits=overlap is Overlap.BUFFER_ALL, replaceable=overlap in REPLACING)
        if must_be_sent:
            otherwise = Ticket(task_id, key, behind_key(key), waits=True)
        if overlap is Overlap.BUFFER_ONE:
            # At every call, joined or not: an error in only some calls would be found too late.
            payload = encode_arguments(task, args, kwargs) if equal_calls_may_differ(task) else ""
            ticket = dataclasses.replace(ticket, joinable=bool(payload))
            if_held = IfHeld.LEAVE if must_be_sent else IfHeld.JOIN
            call = dataclasses.replace(call, payload=payload, if_held=if_held)
    else:
        ticket = otherwise = unlocked_ticket(task, task_id, key, overlap)
        if task.lock == LockMode.UNTIL_EXECUTING:
            ticket = Ticket(task_id, otherwise.key, key)
        elif task.lock == LockMode.UNTIL_AND_WHILE_EXECUTING:
            behind = behind_key(key)
            ticket = Ticket(task_id, key, behind, waits=True)
            call = dataclasses.replace(call, ref=dataclasses.replace(call.ref, key=behind))
    if overlap in REPLACING or call.payload:
        _check_backend(task, overlap)
    return Plan(ticket, call, otherwise if must_be_sent else None, overlap, wait, is_of_beat, has_new_id)


def acquire(task: LockableTask, plan: Plan, *, may_have_run: bool = False) -> Granted | Refused:
    """Acquire the lock that a call needs before it is sent.

    Args:
        may_have_run: the call may have been sent before; if it has ended by now, it is refused.

    Raises:
        LockBackendError: the locks' server does not answer, or the lock's key holds other data.
    """
    call = plan.unsent
    if call is None:
        return plan.granted
    # Beat computes its task ids. It sends the same id again if it cannot know whether the message was sent.
    may_be_resent = plan.is_of_beat or may_have_run
    return plan.outcome(_acquire(task, call, may_be_resent=may_be_resent, has_new_id=plan.has_new_id))


def _check_backend(task: LockableTask, overlap: Overlap) -> None:
    backend = task.singleton_backend
    if not backend.replaces:
        raise ConfigError(
            f"{task.name}: overlap {overlap} needs locks that keep the latest arguments and replace calls, which "
            f"{backend.name} cannot: use another overlap policy, or the default singleton_backend_class"
        )


def _call(
    task: LockableTask, ref: Ref, args: Arguments | None, kwargs: NamedArguments | None, options: Options
) -> Call:
    wait, expiry, state = task.time_to_start(options), task.effective_lock_expiry, "queued"
    if task.lock == LockMode.UNTIL_EXPIRED and expiry:
        wait, state = expiry, "timed"
    entry = entry_of(options.get("headers") or {})
    shown = readable(args or (), kwargs or {}, options, app=task.app, task=task.name)
    sent = note_of_call(task, ref, options, args, kwargs)
    return Call(ref, task.name, shown, wait, expiry, entry=entry, note=sent, state=state)


def _broker_of(app: Celery, options: Options) -> str:
    """Return the name of the broker that Celery sends a call to; empty if unknown."""
    given = options.get("connection") or getattr(options.get("producer"), "connection", None)
    if given is None:
        return own_broker(app)
    return broker_name(given) if isinstance(given, Connection) else ""


def _acquire(task: LockableTask, call: Call, *, may_be_resent: bool, has_new_id: bool) -> Holder:
    """Acquire the lock of a call.

    A hung server may have granted that lock late to a refused call of this process: free it then, and retry.
    """
    backend, refuses_ended = task.singleton_backend, may_be_resent or has_new_id
    cancel_releases(call)
    try:
        holder: Holder = backend.acquire_many([call], may_be_resent=refuses_ended)[0]
        if holder.verdict is Verdict.HELD and (left := left_behind(call, holder)):
            backend.finish_many(left, remember_for=0)
            holder = backend.acquire_many([call], may_be_resent=refuses_ended)[0]
    except LockBackendError:
        if not may_be_resent:
            for place in places_of(call):
                release_later(task.app, place)
        raise
    return answered(task, call, holder)


def places_of(call: Call) -> list[Ref]:
    """Return the locks that a call may hold before it is sent."""
    return [call.ref, dataclasses.replace(call.ref, key=behind_key(call.ref.key))]


def cancel_releases(call: Call) -> None:
    """Cancel the release of the locks that a call may hold, because it is made again under the same task id."""
    if awaits_releases():
        for place in places_of(call):
            cancel_release(place)


def left_behind(call: Call, holder: Holder) -> list[Ref]:
    """Return the locks that an earlier call of this process may have got after it had given up."""
    if not awaits_releases():
        return []
    return [found for place in places_of(call) if (found := refused(place.key, holder.task_id))]


def answered(task: LockableTask, call: Call, holder: Holder) -> Holder:
    """Return the server's answer to a call; have its lock checked if the message of the holder may be lost.

    Raises:
        UnusableLockError: the lock's key holds other data.
    """
    key = call.ref.key
    if holder.verdict is Verdict.UNUSABLE:
        raise UnusableLockError(unusable(key, holder.reason))
    if holder.verdict is Verdict.HELD and holder.state == "queued":
        suspect(task.app, key, holder)
    # The call has ended under this lock, so the current holder does not matter to it.
    return dataclasses.replace(holder, task_id=call.ref.task_id) if holder.verdict is Verdict.DONE else holder


def note(ref: Ref, *, broker: str, delay: float, queue: str | None = None, near: str = "") -> str:
    """Return the note, in JSON, that is stored in the lock of a message for the search for lost messages.

    Args:
        broker: its name.
        delay: seconds from the sending of the message until it may start.
        queue: of the sent message; empty if the broker's bindings decide, None if unknown, or if it may not be sent.
        near: a queue in which the message may be, if its queue is unknown; empty if none is known.
    """
    where = {"near": near} if near else {}
    where |= {} if queue is None else {"queue": queue}
    return json.dumps({"gen": str(ref.generation), "delay": delay, "broker": broker, **where})


def note_of_call(
    task: LockableTask,
    ref: Ref,
    options: Options,
    args: Arguments | None = None,
    kwargs: NamedArguments | None = None,
) -> str:
    """Return the note of a call that is about to be sent with these options; beat notes the queue once it is sent."""
    delay, is_of_beat = delay_of(options, datetime.now(UTC)), RUN_HEADER in (options.get("headers") or {})
    where = {} if is_of_beat else place_of_call(task, options, args, kwargs)
    return note(ref, broker=_broker_of(task.app, options), delay=delay, **where)


def place_of_call(
    task: LockableTask, options: Options, args: Arguments | None = None, kwargs: NamedArguments | None = None
) -> Mapping[str, str]:
    """Return what is known of the queue that a call goes to, as arguments of ``note``.

    A process that looks for the message may be of another app, and know neither the call, nor the task, nor the routes.
    Code of the user is not asked: it may give another answer each time, and may count its calls.
    """
    if is_sent_by_others(task.app, task):
        named = options.get("queue") or getattr(task, "queue", None)
        queue = task.app.amqp.queues.aliases.get(named, named)
        return {"near": str(getattr(queue, "name", queue) or "")}
    try:
        return {"queue": queue_of_call(task.app, task.name, options, args, kwargs)}
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # Celery will raise it, too
        return {"queue": ""}


def noted_in(call: Call, queue: str) -> Call:
    """Return the request for a lock with the queue in its note to which the message goes in the same write."""
    return dataclasses.replace(call, note=json.dumps({**json.loads(call.note or "{}"), "queue": queue}))


@lru_cache(maxsize=64)
def note_of_broker(broker: str) -> str:
    """Return the note for a message of which only the broker is known; empty if unknown."""
    return json.dumps({"broker": broker}) if broker else ""


def keep(backend: BaseBackend, locks: Mapping[Ref, str], seconds: float) -> None:
    """Extend the locks of sent messages, except those that a worker has taken over or freed meanwhile.

    Args:
        locks: a note on where its message went for each lock, or an empty string.
        seconds: time that the locks last from now on.
    """
    try:
        backend.note_sent(locks, lease=seconds)
    except LockBackendError as exc:
        text = "beat: Locks end in %(seconds)g s unless their tasks start before"
        log.warning(text, event="unlocked", seconds=UNSENT_TTL, reason=exc)


#: Time (monotonic, in s) at which this process last reported a lock whose message may be lost, by the lock's key.
_suspected: dict[str, float] = {}

#: Seconds after which it reports the same lock again, and the maximum number of locks that it remembers.
SUSPECT_AGAIN, MOST_SUSPECTS = 10.0, 1000


def suspect(app: Celery, key: str, holder: Holder) -> None:
    """Ask the leader to check a queued lock if it is so old that its message may be lost."""
    config, now = Config.of(app), time.monotonic()
    patience, since = config.singlebeat_lost_after, holder.since
    if patience is None or since is None or (datetime.now(UTC) - since).total_seconds() < patience:
        return
    if now - _suspected.get(key, -SUSPECT_AGAIN) < SUSPECT_AGAIN:
        return
    if len(_suspected) >= MOST_SUSPECTS:
        _suspected.clear()
    _suspected[key] = now
    with suppress(LockBackendError):  # the call has its answer already
        backend_of(app).suspect(suspects_key(config.singleton_key_prefix), key)


def free(task: LockableTask, *refs: Ref, remember_for: float = 0.0) -> None:
    """Free the locks of an unsent call or an ended run, at once or when the locks' server answers again.

    Args:
        remember_for: seconds for which the end of a run is remembered; 0 for an unsent call.
    """
    try:
        task.singleton_backend.finish_many(refs, remember_for=remember_for)
    except LockBackendError as exc:  # the caller's own error matters more
        for ref in refs:
            release_later(task.app, ref)
        about = {"id": refs[0].task_id, "reason": exc}
        log.warning("the lock of task %(id)s stays until the locks' server answers", event="lock_kept", **about)
