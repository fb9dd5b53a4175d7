"""``exclusive``: the same lock for any code, as context manager and as decorator."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import string
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from celery import Task, current_app
from celery.local import Proxy
from kombu.utils.uuid import uuid

from .. import signals
from ..errors import ConfigError, LockBackendError
from ..locks.base import Holder, Ref, Renewal, Verdict
from ..locks.key import check_sendable, lock_key, readable
from ..log import Log
from ..native_threads import do_in_loop
from .exclusive_renewer import ExclusiveRenewer, exclusive_renewer_of

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Exclusive", "exclusive")

log = Log(__name__)

#: What a lock that is taken outside of every task shows instead of the task's name.
NO_TASK = "singlebeat.exclusive"

#: Ends of locks are not remembered: whoever had one may have it again.
NOT_REMEMBERED = 0.0

P = ParamSpec("P")
R = TypeVar("R")


def exclusive(key: str | Callable[..., str], *, app: Celery | None = None, lease: float | None = None) -> Exclusive:
    """Return a lock that is there or not, without waiting: for one ``with``, or for the decoration of a function.

    It excludes everybody who asks for the same key, also the one who holds it. It is renewed for as long as it is held,
    and ends by itself ``lease`` seconds after its process died.

    Args:
        key: any text; for a decorator a format of the arguments (``"feed:{feed_id}"``) or a function of them.
        app: whose settings say where the locks are; default: the app of the running task, or else the current one.
        lease: seconds; default: the setting ``singlebeat_lock_lease``.

    Raises:
        ValueError: the lease is no positive number.
    """
    return Exclusive(key, app=app, lease=lease)


class Exclusive:
    """A lock for any code; true if it was acquired."""

    #: Who holds the lock: we, or the one who was there before us.
    holder: Holder

    ref: Ref
    _renewer: ExclusiveRenewer | None = None
    _entered = False

    def __init__(self, key: str | Callable[..., str], *, app: Celery | None = None, lease: float | None = None) -> None:
        if lease is not None and not (isinstance(lease, int | float) and 0.001 <= lease < math.inf):
            raise ValueError(f"the lease of an exclusive lock must be a positive number of seconds, not {lease!r}")
        self.key, self._app, self._lease = key, app, lease

    def __enter__(self) -> Self:
        """Ask for the lock.

        Raises:
            LockBackendError: the locks' server does not answer, or what is at the lock's key is no lock.
            ConfigError: the app has no server for its locks, or its lock backend knows no leases.
            RuntimeError: it was entered before.
            TypeError, ValueError: the key is no string, or one that has no UTF-8.
        """
        if self._entered:
            raise RuntimeError(f"exclusive({self.key!r}) was entered before: make a new one for every with")
        if not isinstance(self.key, str):
            raise TypeError(f"the key of an exclusive lock must be a text, not {self.key!r}")
        try:
            check_sendable(self.key)
        except UnicodeEncodeError:
            message = f"the key of an exclusive lock must be a string that UTF-8 can encode, not {self.key!r}"
            raise ValueError(message) from None
        self._entered = True
        task = current_app.current_worker_task
        app = self._app or (task.app if task else current_app)
        try:
            renewer = exclusive_renewer_of(app._get_current_object() if isinstance(app, Proxy) else app)
        except ConfigError as exc:
            if self._app is not None or task is not None:
                raise
            # Most often the current app is not theirs: Celery makes one where no module of an app was imported.
            which = "no app is current here" if app.main in {None, "default"} else f"the current app is {app.main}"
            raise ConfigError(f"{exc}; {which}: if yours is another, write exclusive(..., app=app)") from exc
        self.lease = self._lease or renewer.config.singlebeat_lock_lease
        self.name, nonce = task.name if task else NO_TASK, uuid()
        # The nonce excludes another lock of the same task, whose id is there for people.
        owner = task.request.id if task else f"{os.uname().nodename}:{os.getpid()}:{nonce}"
        key = lock_key(renewer.config.singleton_key_prefix, f"exclusive:{self.key}")
        self.ref, self._renewed_at = Ref(key, owner, nonce=nonce), time.monotonic()
        self.holder = renewer.backend.begin(
            self.ref, lease=self.lease, remember_for=NOT_REMEMBERED, task=self.name, arguments=readable([self.key], {})
        )
        if self.holder.verdict is Verdict.STARTED:
            self._renewer = renewer
            renewer.track(self.ref, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Free the lock if it is ours; never raises because of it."""
        if self._renewer is None or not self._renewer.drop(self.ref):
            return
        if self._is_out_of_lease():  # nobody has seen it: the body may have kept Python's lock for so long
            self._tell_lost()
        try:
            self._renewer.backend.finish_many([self.ref], remember_for=NOT_REMEMBERED)
        except Exception as exc:  # backends raise what they like, and how the body ended matters more
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
        """Rises from holder to holder of a key, so that a resource can refuse one that lost it; 0: not acquired."""
        return self.holder.fence if self else 0

    def is_lost(self) -> bool:
        """Ask the locks' server whether the lock is not ours, or not any more; while it is away, the lease decides."""
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
        """Take note of what the server answered to a renewal.

        Args:
            asked_at: monotonic seconds; a slow reply must not stretch the lease.
        """
        if renewal is Renewal.RUNNING:
            self._renewed_at = asked_at
        elif self._renewer is not None and self._renewer.drop(self.ref):
            self._tell_lost()

    def _is_out_of_lease(self) -> bool:
        return time.monotonic() >= self._renewed_at + self.lease

    def _tell_lost(self) -> None:
        log.warning(
            "the exclusive lock '%(key)s' was lost: somebody else may hold it",
            event="lock_lost",
            key=self.key,
            task=self.name,
            id=self.ref.task_id,
        )
        do_in_loop(functools.partial(signals.lock_lost.send, sender=self.name, ref=self.ref))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return a function that runs under the lock, and returns None without running where somebody holds it.

        Raises:
            TypeError: it cannot be guarded so; the message says why.
        """
        _check_is_plain(function)
        signature = inspect.signature(function)
        if isinstance(self.key, str):
            _check_names(self.key, signature, function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            with exclusive(_key_of(self.key, bound), app=self._app, lease=self._lease) as lock:
                if lock:
                    return function(*args, **kwargs)
            log.info(
                "%(function)s is skipped",
                event="duplicate",
                function=function.__qualname__,
                key=lock.key,
                holder=lock.holder.task_id,
                reason=f"held by {lock.holder}",
            )
            return None

        guarded.__signature__ = signature  # type: ignore[attr-defined]  # Celery checks the arguments of calls by it
        return guarded


def _key_of(key: str | Callable[..., str], bound: inspect.BoundArguments) -> str:
    return key.format_map(bound.arguments) if isinstance(key, str) else key(*bound.args, **bound.kwargs)


def _check_is_plain(function: Any) -> None:
    if isinstance(function, Task):
        raise TypeError(f"@exclusive goes below @app.task, next to the function of {function.name}")
    for one in (function, getattr(function, "__call__", None)):  # noqa: B004 - an object may have an async one
        if inspect.iscoroutinefunction(one) or inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise TypeError(
                f"exclusive cannot guard {function!r}: it returns before its body runs, and the lock would be free by "
                "then; write `with exclusive(...)` inside of it"
            )


def _check_names(key: str, signature: inspect.Signature, function: Any) -> None:
    for _, field, _, _ in string.Formatter().parse(key):
        name = None if field is None else re.split(r"[.[]", field, maxsplit=1)[0]
        if name is not None and name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise TypeError(f"the key {key!r} names {name!r}, no argument of {function!r}; its arguments: {known}")
