"""The run side of a lock: the gate before the body, the release after it, and every other end of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.utils.log import get_logger
from celery.worker import request as celery_request
from celery.worker.state import task_ready
from kombu.utils.uuid import uuid

from .. import signals
from ..config import Config
from ..errors import LockBackendError
from ..locks import backend_of
from ..locks.base import HEADER, Holder, Ref, Verdict
from ..locks.key import readable
from .renewer import renewer_of

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Request", "run_under_lock")

logger = get_logger(__name__)


@contextmanager
def run_under_lock(task: Any) -> Iterator[bool]:
    """Hold the lock of the request that a Singleton is running, from before its body to right after it.

    The lock is free before the result is stored and before callbacks and the next step of a chain are sent, so
    whoever sees them can send the call again. Yields whether this is a run in a worker at all: a direct call, an
    eager one, or a task that calls itself inside of its body touches no lock.

    Raises:
        Ignore: the run must not start; what happens instead has been logged and done.
    """
    request = task.request
    if request.called_directly or request.is_eager or getattr(request, "singlebeat", None):
        yield False
        return
    ref = Ref.of_message(vars(request), request.id)
    if ref is None:  # sent by somebody who takes no locks, to a worker process that is not ours
        yield True
        return
    config = Config.of(task.app)
    request.singlebeat = _begin(task, ref, request)
    try:
        yield True
    except Reject:
        raise  # the broker may deliver the message again: the main process knows
    except Exception:
        _finish(task.app, ref, config)
        raise
    else:
        _finish(task.app, ref, config)
    # Any other BaseException ends the process or the greenlet: the main process sees how.


def _begin(task: Any, ref: Ref, request: Any) -> Holder | Ref:
    config = Config.of(task.app)
    try:
        holder = backend_of(task.app).begin(
            ref,
            lease=config.singlebeat_lock_lease,
            memory=config.singlebeat_queued_ttl,
            task=task.name,
            arguments=request.argsrepr or readable(request.args or (), request.kwargs or {}),
            expiry=task.effective_lock_expiry,
        )
    except LockBackendError as exc:
        logger.warning("%s[%s] runs without its lock: %s", task.name, request.id, exc)
        return ref
    if _may_start(task, ref, holder, request):
        return holder
    raise Ignore(f"held by {holder}")


def _finish(app: Celery, ref: Ref, config: Config) -> None:
    try:
        backend_of(app).finish_many([ref], memory=config.singlebeat_queued_ttl)
    except LockBackendError as exc:  # the main process tries again, and then the lease ends by itself
        logger.warning("the lock of task %s stays until its lease ends: %s", ref.task_id, exc)


def _may_start(task: Any, ref: Ref, holder: Holder, request: Any) -> bool:
    """Tell whether a run may start; if not, log why, and send a copy of a running message later again."""
    match holder.verdict:
        case Verdict.STARTED:
            return True
        case Verdict.COPY:
            # Not dropped: if the run dies, this message is what is left of it.
            logger.info("%s[%s] is running already: this copy waits for it", task.name, ref.task_id)
            _postpone(task, request, ref, countdown=max(1.0, holder.ttl))
        case Verdict.DONE | Verdict.STALE:
            logger.info("%s[%s] has run already: this copy is dropped", task.name, ref.task_id)
        case _:
            logger.info("%s[%s] is skipped: its lock is held by %s", task.name, ref.task_id, holder)
            signals.duplicate.send(sender=task, task_id=holder.task_id, args=request.args, kwargs=request.kwargs)
    return False


def _postpone(task: Any, request: Any, ref: Ref, *, countdown: float) -> None:
    """Send the message of a request again, as it is but later."""
    headers = {**(request.headers or {}), HEADER: replace(ref, nonce="").header()}
    signature = task.signature_from_request(request, countdown=countdown, retries=request.retries, headers=headers)
    # Task's own method: a Singleton's would hand the lock over to it.
    Task.apply_async(task, signature.args, signature.kwargs, **signature.options)


def _then_over(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ended(self: Request, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.over()

    return ended


def _gated(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def gated(self: Request, *args: Any, **kwargs: Any) -> Any:
        if not self.begin_for_plain_task():
            self.acknowledge()
            task_ready(self)
            raise TaskRevokedError(self.id)
        return execute(self, *args, **kwargs)

    return gated


class Request(celery_request.Request):  # type: ignore[misc]
    """A delivery of a message to this worker, in its main process; acts only where the message has a lock."""

    lock_ref: Ref | None = None
    #: The renewer has seen that this delivery is the run which holds the lock.
    lock_seen_running = False
    _requeued = False
    _over = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lock_ref = self._claim()
        if self.lock_ref is not None:
            # The nonce travels with the request to the process that runs the task: both sides can name this run.
            self.request_dict[HEADER] = self.lock_ref.header()
            renewer_of(self._app).keep(self)

    def _claim(self) -> Ref | None:
        ref = Ref.of_message(self.request_dict, self.id)
        if ref is None and getattr(self._task, "has_own_gate", False):
            try:  # send_task, another language: the lock is taken at the start
                ref = Ref(self._task.generate_lock(self._task.name, self._args, self._kwargs), self.id)
            except TypeError:
                return None  # the call will fail on its arguments
        return ref.delivered(uuid()) if ref else None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Celery makes a subclass per task whose on_success and execute_using_pool do not call ours.
        super().__init_subclass__(**kwargs)
        for name, wrap in (("on_success", _then_over), ("execute_using_pool", _gated)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    def begin_for_plain_task(self) -> bool:
        """Take the lock for a task that has no gate of its own; tell whether it may start."""
        ref = self.lock_ref
        if ref is None or getattr(self._task, "has_own_gate", False) or self.revoked():
            return True
        renewer = renewer_of(self._app)
        if not renewer.answers():
            return True
        config = Config.of(self._app)
        try:
            holder = renewer.gate.begin(
                ref,
                lease=config.singlebeat_lock_lease,
                memory=config.singlebeat_queued_ttl,
                task=self._task.name,
                arguments=self.argsrepr or "",
            )
            return _may_start(self._task, ref, holder, self._context)
        except LockBackendError as exc:
            renewer.failed()
            logger.warning("%s[%s] runs without its lock: %s", self._task.name, self.id, exc)
            return True

    def over(self) -> None:
        """Free the lock if the request is over: acknowledged, so that the broker will not deliver it again."""
        if self.lock_ref is None or self._over or not self.acknowledged or self._requeued:
            return
        self._over = True
        renewer_of(self._app).finish(self)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Every end of a run but success, Retry and Ignore and Reject among them."""
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            self.over()

    def on_retry(self, exc_info: Any) -> None:
        """A plain task has sent its retry: the lock goes over to that message."""
        super().on_retry(exc_info)
        if self.lock_ref is not None and not getattr(self._task, "has_own_gate", False):
            successor = replace(self.lock_ref, generation=self.lock_ref.generation + 1, nonce="")
            self._over = True
            renewer_of(self._app).hand_over(self, successor)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A time limit has passed; the hard one ends the run."""
        super().on_timeout(soft, timeout)
        if not soft:
            self.over()

    def reject(self, requeue: bool = False) -> None:
        """Reject the message; requeued, it keeps its lock and waits again."""
        requeued = requeue and not self.acknowledged
        super().reject(requeue)
        if requeued and self.lock_ref is not None:
            self._requeued = True
            renewer_of(self._app).hand_over(self, replace(self.lock_ref, nonce=""))
        else:
            self.over()

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        if not terminated:  # a terminated run may go on for a while: its end is reported by itself
            self.over()
