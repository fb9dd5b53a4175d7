"""Hands the lock of a run over to its retry or its replacement, in the process that runs the task and sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from celery.result import AsyncResult

from ..broker import own_broker
from ..config import Config
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
    sent = note(successor.run, broker=own_broker(task.app), delay=delay, **where)
    promised = True  # as long as it is unknown: a signal may end the call before it knows the answer
    try:
        try:
            promised = backend.promise(run.run, to=successor.run, ttl=ttl, note=sent)
        except LockBackendError as exc:  # the successor waits until the run has ended, or its lease
            promised = False
            about = {"task": task.name, "id": run.task_id, "reason": exc}
            log.warning("%(task)s[%(id)s] goes on without its lock", event="unlocked", **about)
        return publish(headers={**without_deaths(options.get("headers")), HEADER: successor.header()})
    except BaseException:
        if promised:
            _take_back(task.app, run, successor)
        raise


def let_retries_keep_lock(task: Task) -> None:
    """Let a plain task hand the lock of its run over to its retry, or to the plain task that takes its place.

    They keep what beat has said about the run, though they may have headers of their own.
    """
    if task in _prepared:
        return
    _prepared.add(task)
    send = task.apply_async

    @wraps(send)
    def apply_async(*given: Any, **options: Any) -> AsyncResult:
        request = _succeeded_by(task.app, options)
        if request is None:
            return send(*given, **options)
        about = vars(request)
        ours = {name: about[name] for name in (HEADER, RUN_HEADER) if about.get(name) is not None}
        options["headers"] = {**ours, **(options.get("headers") or {})}
        run = Ticket.of_message(about, request.id, delivered=True)
        if run is None or not run.nonce:  # no lock, or the main process manages none
            return send(*given, **options)

        def publish(headers: Mapping[str, object]) -> AsyncResult:
            return send(*given, **{**options, "headers": headers})

        queued_ttl, now = Config.of(task.app).singlebeat_queued_ttl, datetime.now(UTC)
        ttl = time_to_start(options, queued_ttl=queued_ttl, now=now)
        return hand_over_and_send(task, run, options, publish, request=request, ttl=ttl)

    task.apply_async = apply_async


def _succeeded_by(app: Celery, options: Options) -> Context | None:
    """Return the request of the plain task that makes a call which is to take its place; None if no task does."""
    task_id = options.get("task_id")
    maker = app.current_worker_task if task_id else None
    if maker is None or maker.request.id != task_id or getattr(maker, "has_own_gate", False):
        return None
    about = vars(maker.request)
    is_ours = about.get(HEADER) is not None or about.get(RUN_HEADER) is not None
    is_eager = maker.request.is_eager or app.conf.task_always_eager
    return maker.request if is_ours and not is_eager and generation(options) > generation(about) else None


def _place_from(request: Context, task: Task, run: Ticket, options: Options) -> Mapping[str, str]:
    """Return what is known of the queue of a call that a run makes in its own place, as ``place_of_call`` does.

    A retry that names none goes by the exchange by which its run has come.
    """
    exchange = (request.delivery_info or {}).get("exchange")
    if exchange and options.get("exchange") == exchange:
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
