"""``Singleton``: a task of which equal calls are not queued again while one is queued or running."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from celery import Task
from celery.result import AsyncResult
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from kombu.utils.uuid import uuid

from .. import signals
from ..config import Config
from ..errors import DuplicateTaskError
from ..locks import backend_of, time_to_start
from ..locks.base import HEADER, BaseBackend, Call, Holder, Ref, Verdict, generation
from ..locks.key import canonical, digest, lock_key, readable
from .renewer import install
from .request import run_under_lock

__all__ = ("Singleton",)

logger = get_logger(__name__)


class Singleton(Task):  # type: ignore[misc]
    """Base of tasks that exclude their equals: same task, same arguments.

    A call that equals one which is queued or running is not sent; it returns the ``AsyncResult`` of that one.
    The options and methods are those of celery-singleton.
    """

    abstract = True
    Request = "singlebeat.tasks.request:Request"
    #: Tells the Request class that this task asks for its lock itself, in the process that runs it.
    has_own_gate = True

    #: Names of the arguments that make a call unique; None: all of them, []: none, the task's name alone.
    unique_on: Sequence[str] | str | None = None
    #: Raise DuplicateTaskError for a duplicate; None: as the setting ``singleton_raise_on_duplicate`` says.
    raise_on_duplicate: bool | None = None
    #: Seconds from the call after which its lock ends whatever the task does; None: ``singleton_lock_expiry``.
    lock_expiry: float | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Let the app's workers look after locks as soon as it has one task that needs it."""
        super().on_bound(app)
        install(app)

    @property
    def singleton_config(self) -> Config:
        """The settings of the app."""
        return Config.of(self.app)

    @property
    def singleton_backend(self) -> BaseBackend:
        """What keeps the locks of the app."""
        return backend_of(self.app)

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.run)

    def generate_lock(
        self, task_name: str, task_args: Sequence[Any] | None = None, task_kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """Return the key of the lock of a call; override it for a key of your own.

        Raises:
            TypeError: the arguments do not fit the task, or one of them cannot be encoded.
        """
        args, kwargs = list(task_args or ()), dict(task_kwargs or {})
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            if self.typing and self.unique_on is None:
                raise
        else:
            bound.apply_defaults()
            if self.unique_on is None:
                args, kwargs = canonical(bound)
            else:
                names = [self.unique_on] if isinstance(self.unique_on, str) else self.unique_on
                args, kwargs = [], {name: bound.arguments[name] for name in names}
        config = self.singleton_config
        encoder = config.singleton_json_encoder_class
        encoder = symbol_by_name(encoder) if encoder else None
        return lock_key(config.singleton_key_prefix, digest(task_name, args, kwargs, encoder=encoder))

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Send the task unless an equal call is queued or running; takes what ``Task.apply_async`` takes.

        Returns:
            The result of the call that was sent, or of the call that holds the lock.

        Raises:
            DuplicateTaskError: an equal call holds the lock and ``raise_on_duplicate`` is on.
            LockBackendError: the locks' server does not answer.
        """

        def publish(**more: Any) -> AsyncResult[Any]:
            return super(Singleton, self).apply_async(
                args,
                kwargs,
                task_id=task_id,
                producer=producer,
                link=link,
                link_error=link_error,
                shadow=shadow,
                **{**options, **more},
            )

        if self.app.conf.task_always_eager:
            return publish()
        headers = options.get("headers") or {}
        own = Ref.of_message(headers, task_id)
        if own is None:
            task_id = task_id or uuid()
            ref = Ref(self.generate_lock(self.name, args, kwargs), task_id)
            return self._acquire_and_send(ref, args, kwargs, options, publish)
        if own.nonce:
            return self._hand_over_and_send(own, options, publish)
        return publish()  # whoever made this header has the lock already: beat takes them in batches

    def _acquire_and_send(
        self, ref: Ref, args: Any, kwargs: Any, options: Mapping[str, Any], publish: Callable[..., AsyncResult[Any]]
    ) -> AsyncResult[Any]:
        shown = options.get("argsrepr") or readable(args or (), kwargs or {})
        call = Call(ref, self.name, shown, self._time_to_start(options), self.effective_lock_expiry)
        holder = self.singleton_backend.acquire_many([call])[0]
        if holder.verdict is not Verdict.ACQUIRED:
            return self._duplicate(holder, args, kwargs)
        try:
            return publish(headers={**(options.get("headers") or {}), HEADER: ref.header()})
        except BaseException:
            self.singleton_backend.finish_many([ref], memory=self.singleton_config.singlebeat_queued_ttl)
            raise

    def _hand_over_and_send(
        self, run: Ref, options: Mapping[str, Any], publish: Callable[..., AsyncResult[Any]]
    ) -> AsyncResult[Any]:
        """Send a retry or replacement of the run that calls us: its lock goes over to the next generation first."""
        backend, memory = self.singleton_backend, self.singleton_config.singlebeat_queued_ttl
        successor = replace(run, generation=generation(options), nonce="")
        rotated = backend.rotate(run, to=successor, ttl=self._time_to_start(options), memory=memory)
        try:
            return publish(headers={**options["headers"], HEADER: successor.header()})
        except BaseException:
            if rotated:
                backend.rotate(successor, to=run, ttl=self.singleton_config.singlebeat_lock_lease, memory=memory)
            raise

    def _duplicate(self, holder: Holder, args: Any, kwargs: Any) -> AsyncResult[Any]:
        logger.info("%s is a duplicate of %s: not sent", self.name, holder)
        signals.duplicate.send(sender=self, task_id=holder.task_id, args=args, kwargs=kwargs)
        return self.on_duplicate(holder.task_id)

    def on_duplicate(self, existing_task_id: str) -> AsyncResult[Any]:
        """Return the result of the call that holds the lock; override it for another answer.

        Raises:
            DuplicateTaskError: ``raise_on_duplicate`` is on.
        """
        if self._raise_on_duplicate:
            raise DuplicateTaskError(
                f"an equal call of {self.name} is queued or running as task {existing_task_id}", existing_task_id
            )
        return self.AsyncResult(existing_task_id)

    @property
    def _raise_on_duplicate(self) -> bool:
        if self.raise_on_duplicate is not None:
            return self.raise_on_duplicate
        return bool(self.singleton_config.singleton_raise_on_duplicate)

    @property
    def effective_lock_expiry(self) -> float | None:
        """Seconds from the call after which its lock ends, of the task or else of the app; None: no bound."""
        return self.lock_expiry if self.lock_expiry is not None else self.singleton_config.singleton_lock_expiry

    def _time_to_start(self, options: Mapping[str, Any]) -> float:
        ttl = self.singleton_config.singlebeat_queued_ttl
        return time_to_start({"expires": self.expires, **options}, queued_ttl=ttl, now=datetime.now(UTC))

    def get_existing_task_id(self, lock: str) -> str | None:
        """Return the id of the task that holds a lock, or None."""
        return self.singleton_backend.get(lock)

    def release_lock(
        self, task_args: Sequence[Any] | None = None, task_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Free the lock of a call, whoever holds it."""
        self.unlock(self.generate_lock(self.name, task_args, task_kwargs))

    def unlock(self, lock: str) -> None:
        """Free a lock, whoever holds it."""
        self.singleton_backend.unlock(lock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: in a worker under its lock; called directly, like any function."""
        with run_under_lock(self) as in_worker:
            # In a worker the tracer has set up the request; Task.__call__ would put another one on top of it.
            return self.run(*args, **kwargs) if in_worker else super().__call__(*args, **kwargs)
