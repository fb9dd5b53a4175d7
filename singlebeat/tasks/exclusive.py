"""``exclusive``: the same lock for any code, as context manager and as decorator."""

from __future__ import annotations

import functools
import inspect
import os
import re
import string
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from celery import Task, current_app
from celery.exceptions import Reject
from celery.local import Proxy
from kombu.utils.uuid import uuid

from .. import signals
from ..config import MOST_SECONDS
from ..connections import is_fallback
from ..errors import ConfigError, LockBackendError
from ..locks.base import Holder, Ref, Renewal, Verdict
from ..locks.key import check_sendable, lock_key, readable
from ..log import Log
from ..native_threads import do_in_loop
from .exclusive_renewer import ExclusiveRenewer, exclusive_renewer_of

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Exclusive", "exclusive")

#: Seconds between two tries to acquire the lock of an earlier delivery, whose process may have died.
AWAIT_DEAD_EACH = 1.0

log = Log(__name__)

#: Name in the record of a lock that is acquired outside of a task, instead of the task's name.
NO_TASK = "singlebeat.exclusive"

#: Ends are not remembered, because a former holder may acquire the lock again.
NOT_REMEMBERED = 0.0

P = ParamSpec("P")
R = TypeVar("R")


def exclusive(key: str | Callable[..., str], *, app: Celery | None = None, lease: float | None = None) -> Exclusive:
    """Return a non-blocking lock for one ``with`` block, or a decorator of functions.

    The lock excludes every other request for the same key, even from its own holder. It is renewed while it is held,
    and ends by itself ``lease`` seconds after its process died.

    Args:
        key: any string; for a decorator a format of the arguments (``"feed:{feed_id}"``) or a function of them.
        app: app whose settings name the locks' server; default: the app of the running task, or else the current app
            of the thread.
        lease: seconds; default: the setting ``singlebeat_lock_lease``.

    Raises:
        ValueError: the lease is not a positive number, or more than 100 years.
    """
    return Exclusive(key, app=app, lease=lease)


class Exclusive:
    """A lock for any code; it is true if it was acquired."""

    #: The holder of the lock, which is this object or another that acquired the lock before.
    holder: Holder

    ref: Ref
    _asked: ExclusiveRenewer | None = None  #: that was to renew the lock; None if this object was not entered
    _renewer: ExclusiveRenewer | None = None  #: that renews the lock; None if this object does not hold it
    _entered = False

    def __init__(self, key: str | Callable[..., str], *, app: Celery | None = None, lease: float | None = None) -> None:
        if lease is not None and not (isinstance(lease, int | float) and 0.001 <= lease <= MOST_SECONDS):
            must = "a positive number of seconds, 100 years at most"
            raise ValueError(f"the lease of an exclusive lock must be {must}, not {lease!r}")
        self.key, self._app, self._lease = key, app, lease

    def __enter__(self) -> Self:
        """Acquire the lock if it is free.

        Raises:
            LockBackendError: the locks' server does not answer, or the value at the lock's key is not a lock.
            ConfigError: the app has no server for its locks, or its lock backend has no leases.
            RuntimeError: this object was entered before.
            TypeError, ValueError: the key is not a string, or UTF-8 cannot encode it.
        """
        if self._entered:
            raise RuntimeError(f"exclusive({self.key!r}) was entered before: make a new one for each with block")
        if not isinstance(self.key, str):
            raise TypeError(f"the key of an exclusive lock must be a string, not {self.key!r}")
        try:
            check_sendable(self.key)
        except UnicodeEncodeError:
            message = f"the key of an exclusive lock must be a string that UTF-8 can encode, not {self.key!r}"
            raise ValueError(message) from None
        self._entered = True
        task = current_app.current_worker_task
        app = self._app or (task.app if task else current_app)
        app = app._get_current_object() if isinstance(app, Proxy) else app
        try:
            renewer = self._asked = exclusive_renewer_of(app)
        except ConfigError as exc:
            if self._app is not None or task is not None or is_fallback(app):  # the error says so by itself
                raise
            which = f"the current app is {app.main or app}"
            raise ConfigError(f"{exc}; {which}: if yours is another, write exclusive(..., app=app)") from exc
        self.lease = self._lease or renewer.config.singlebeat_lock_lease
        self.name, nonce = task.name if task else NO_TASK, uuid()
        # The nonce excludes another lock of the same task; the task's id is for people.
        owner = task.request.id if task else f"{os.uname().nodename}:{os.getpid()}:{nonce}"
        key = lock_key(renewer.config.singleton_key_prefix, f"exclusive:{self.key}")
        self.ref, self._renewed_at = Ref(key, owner, nonce=nonce), time.monotonic()
        about: dict[str, Any] = {"task": self.name, "arguments": readable([self.key], {})}
        try:
            self.holder = renewer.backend.begin(self.ref, lease=self.lease, remember_for=NOT_REMEMBERED, **about)
            if self.holder.verdict is Verdict.STARTED:
                self._renewer = renewer
                renewer.track(self.ref, self)
        except LockBackendError:
            raise
        except BaseException:  # an interruption, as by a soft time limit: the block does not begin
            renewer.drop(self.ref)
            self._free(renewer)
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Free the lock if this object holds it; raise no error of the locks' server."""
        try:
            if self._renewer is None or not self._renewer.drop(self.ref):
                return
            if self._is_out_of_lease():  # the renewer may not have seen it, if the body has held the GIL
                self._report_loss()
            self._free(self._renewer)
        except BaseException:  # an interruption, as by a soft time limit, goes on
            if self._renewer is not None and self._renewer.pid == os.getpid():
                self._renewer.drop(self.ref)
                self._free(self._renewer)
            raise

    def _free(self, renewer: ExclusiveRenewer) -> None:
        try:
            renewer.backend.finish_many([self.ref], remember_for=NOT_REMEMBERED)
        except LockBackendError as exc:
            log.warning(
                "the exclusive lock '%(key)s' stays until its lease ends",
                event="lock_kept",
                key=self.key,
                id=self.ref.task_id,
                reason=exc,
            )

    def __bool__(self) -> bool:
        return self._renewer is not None

    @property
    def fence(self) -> int:
        """Return the fencing number, by which a resource can refuse former holders, or 0 if the lock was not acquired.

        The number rises from holder to holder of a key.
        """
        return self.holder.fence if self else 0

    @property
    def is_held_by_earlier_delivery(self) -> bool:
        """Whether the run of an earlier delivery of the present task's message holds the lock, here or elsewhere."""
        task = current_app.current_worker_task
        if self or self._asked is None or task is None or self.holder.task_id != task.request.id:
            return False
        is_redelivered = bool((task.request.delivery_info or {}).get("redelivered"))
        return is_redelivered and not self._asked.holds(self.ref.key)  # else this very run holds it

    def is_lost(self) -> bool:
        """Return whether this object does not hold the lock; if the locks' server is unreachable, the lease decides."""
        if self._renewer is None or not self._renewer.tracks(self.ref):
            return True
        asked_at = time.monotonic()
        try:
            (renewal,) = self._renewer.backend.renew_many([self.ref], lease=self.lease)
        except LockBackendError:
            return self._is_out_of_lease()
        self.note(renewal, asked_at)
        return not self._renewer.tracks(self.ref)

    def note(self, renewal: Renewal, asked_at: float) -> None:
        """Record the server's answer to a renewal.

        Args:
            asked_at: time of the request in monotonic seconds; a slow reply must not stretch the lease.
        """
        if renewal is Renewal.RUNNING:
            self._renewed_at = asked_at
        elif self._renewer is not None and self._renewer.drop(self.ref):
            self._report_loss()

    def _is_out_of_lease(self) -> bool:
        return time.monotonic() >= self._renewed_at + self.lease

    def _report_loss(self) -> None:
        log.warning(
            "the exclusive lock '%(key)s' was lost: another process may hold it",
            event="lock_lost",
            key=self.key,
            task=self.name,
            id=self.ref.task_id,
        )
        do_in_loop(functools.partial(signals.lock_lost.send, sender=self.name, ref=self.ref))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return a function that runs under the lock, or returns None without a run if the lock is held.

        If an earlier delivery of the message of its task holds the lock, whose process may have died, it waits for the
        lock, for as long as the lease of a dead process lasts; then it gives the message back to the broker.

        Raises:
            TypeError: the function cannot be guarded; the message says why. A call raises it, too, if only the result
                shows that.
        """
        _check_is_plain(function)
        try:
            signature = inspect.signature(function)
        except ValueError as exc:
            raise TypeError(f"exclusive cannot guard {function!r}: {exc}") from None
        if isinstance(self.key, str):
            _check_names(self.key, signature, function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            key, began = _key_of(self.key, bound), time.monotonic()
            while True:
                with exclusive(key, app=self._app, lease=self._lease) as lock:
                    if lock:
                        return _checked(function(*args, **kwargs), function)
                if not lock.is_held_by_earlier_delivery:
                    break
                if time.monotonic() >= began + lock.lease + AWAIT_DEAD_EACH:
                    raise Reject(f"an earlier delivery of its message holds the lock {key!r}", requeue=True)
                time.sleep(AWAIT_DEAD_EACH)
            log.info(
                "%(function)s is skipped",
                event="duplicate",
                function=function.__qualname__,
                key=lock.key,
                holder=lock.holder.task_id,
                reason=f"held by {lock.holder}",
            )
            return None

        guarded.__signature__ = signature  # type: ignore[attr-defined]  # Celery checks the arguments of calls with it
        return guarded


def _key_of(key: str | Callable[..., str], bound: inspect.BoundArguments) -> str:
    return key.format_map(bound.arguments) if isinstance(key, str) else key(*bound.args, **bound.kwargs)


def _check_is_plain(function: Callable[..., object]) -> None:
    if isinstance(function, Task):
        raise TypeError(f"@exclusive goes below @app.task, next to the function of {function.name}")
    own_call = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004 - perhaps async
    for one in (function, own_call):
        if inspect.iscoroutinefunction(one) or inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise _returns_early(function)


def _checked(result: R, function: Callable[..., object]) -> R:
    """Return the result of a function, unless its body has yet to run: its decorator may have hidden what it is."""
    is_early = inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    if is_early or isinstance(result, Future):
        for end in ("close", "cancel"):  # else a task runs, and Python warns of a coroutine that was never awaited
            getattr(result, end, bool)()
        raise _returns_early(function)
    return result


def _returns_early(function: Callable[..., object]) -> TypeError:
    return TypeError(
        f"exclusive cannot guard {function!r}: it returns before its body runs, so the lock would be free by then; "
        "write `with exclusive(...)` inside of it"
    )


def _check_names(key: str, signature: inspect.Signature, function: Callable[..., object]) -> None:
    for _, field, _, _ in string.Formatter().parse(key):
        name = None if field is None else re.split(r"[.[]", field, maxsplit=1)[0]
        if name is not None and name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise TypeError(f"the key {key!r} names {name!r}, no argument of {function!r}; its arguments: {known}")
