"""Hands the lock of a run over to its retry or its replacement, in the process that runs the task and sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from celery.canvas import Signature
from celery.result import AsyncResult

from ..broker import own_broker
from ..config import Config
from ..destination import is_sent_by_others, seeing_sent
from ..errors import LockBackendError
from ..locks import backend_of, delay_of, time_to_start
from ..locks.acquire import note, place_of_call
from ..locks.base import HEADER, RUN_HEADER, Ticket, generation, without_deaths
from ..locks.late_release import release_later
from ..log import Log

if TYPE_CHECKING:
    from celery import Celery, Task
    from celery.app.task import Context

    from ..locks.base import Options

__all__ = ("Publish", "hand_over_and_send", "let_retries_keep_lock")

log = Log(__name__)

Publish: TypeAlias = Callable[..., AsyncResult]

_prepared = WeakSet[Any]()  #: the plain tasks whose retries keep their locks


def hand_over_and_send(
    task: Task, run: Ticket, options: Options, publish: Publish, *, request: Context, ttl: float
) -> AsyncResult:
    """Send a retry or replacement from within its run, and promise the run's lock to the sent call first.

    Args:
        task: of the sent call.
        request: of the run.
        ttl: seconds that the message may wait for its start.
    """
    backend, successor = backend_of(task.app), run.successor(generation(options))
    delay, where = delay_of(options, datetime.now(UTC)), _place_from(request, task, run, options)
    told = note(successor.run, broker=own_broker(task.app), delay=delay, **where)
    promised = True  # as long as it is unknown: a signal may end the call before it knows the answer
    try:
        try:
            promised = backend.promise(run.run, to=successor.run, ttl=ttl, note=told)
        except LockBackendError as exc:  # the successor waits until the run has ended, or its lease
            promised = False
            about = {"task": task.name, "id": run.task_id, "reason": exc}
            log.warning("%(task)s[%(id)s] goes on without its lock", event="unlocked", **about)
        with seeing_sent(task.app, task, run.task_id) as seen:
            sent = publish(headers={**without_deaths(options.get("headers")), HEADER: successor.header()})
    except BaseException:
        if promised:
            _take_back(task.app, run, successor)
        raise
    if promised and seen.is_unsent:
        _take_back(task.app, run, successor)
    elif promised and seen.queues:
        told = note(successor.run, broker=own_broker(task.app), delay=delay, queue=seen.queues[-1])
        with suppress(LockBackendError):  # the note is for the search for lost messages alone
            backend.promise(run.run, to=successor.run, ttl=ttl, note=told)
    return sent


def let_retries_keep_lock(task: Task) -> None:
    """Let a plain task hand the lock of its run over to its retry, or to the plain task that takes its place.

    They keep what beat has said about the run, though they may have headers of their own. The signatures that Celery
    makes for them do it: code of others, which may patch how tasks are sent, finds ``apply_async`` as it was.
    """
    if task in _prepared:
        return
    _prepared.add(task)
    make, replace = task.signature_from_request, task.on_replace

    @wraps(make)
    def signature_from_request(request: Context | None = None, *given: Any, **options: Any) -> Signature:
        signature = make(request, *given, **options)
        _let_keep_lock(signature, task.request if request is None else request)
        return signature

    @wraps(replace)
    def on_replace(sig: Signature) -> Any:
        is_one_task = type(sig).apply_async is Signature.apply_async  # else its parts have other ids, or are sent later
        known = task.app.tasks.get(sig.task)  # another app's may be a Singleton
        if is_one_task and known is not None and not getattr(known, "has_own_gate", False):
            _let_keep_lock(sig, task.request)
        return replace(sig)

    task.signature_from_request, task.on_replace = signature_from_request, on_replace


def _let_keep_lock(signature: Signature, request: Context) -> None:
    """Let a signature take the lock of a run over, when it is sent with the id and a higher generation of that."""
    send, about = signature.apply_async, vars(request)
    ours = {name: about[name] for name in (HEADER, RUN_HEADER) if about.get(name) is not None}
    if not ours or request.is_eager or signature.app.conf.task_always_eager:
        return

    @wraps(send)
    def apply_async(*given: Any, **more: Any) -> AsyncResult:
        options = {**signature.options, **more}
        if options.get("task_id") != request.id or generation(options) <= generation(about):
            return send(*given, **more)
        options["headers"] = {**ours, **(options.get("headers") or {})}
        run = Ticket.of_message(about, request.id, delivered=True)

        def publish(headers: Mapping[str, object]) -> AsyncResult:
            return send(*given, **{**more, "headers": headers})

        if run is None or not run.nonce:  # no lock, or the main process manages none
            return publish(options["headers"])
        task = signature.type
        queued_ttl, now = Config.of(task.app).singlebeat_queued_ttl, datetime.now(UTC)
        ttl = time_to_start(options, queued_ttl=queued_ttl, now=now)
        return hand_over_and_send(task, run, options, publish, request=request, ttl=ttl)

    signature.apply_async = apply_async


def _place_from(request: Context, task: Task, run: Ticket, options: Options) -> Mapping[str, str]:
    """Return what is known of the queue of a call that a run makes in its own place, as ``place_of_call`` does.

    A retry that names none goes by the exchange by which its run has come, with the same routing key.
    """
    came, where = request.delivery_info or {}, ("exchange", "routing_key")
    is_same = all(options.get(name) == came.get(name) for name in where) and not options.get("queue")
    if came.get("exchange") and is_same and not is_sent_by_others(task.app, task):
        return {"queue": run.brought_by}
    return place_of_call(task, options)


def _take_back(app: Celery, run: Ticket, successor: Ticket) -> None:
    try:
        backend_of(app).promise(run.run, to=None, ttl=0)
    except LockBackendError as exc:  # the caller's own error matters more
        about = {"id": run.task_id, "reason": exc}
        said = "the lock of task %(id)s waits for a retry that was not sent, until the locks' server answers"
        log.warning(said, event="lock_kept", **about)
        release_later(app, successor.run)
