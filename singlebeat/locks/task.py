"""What a lock needs to know of a task: a ``Singleton``, or a plain task that beat sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Sequence

    from celery import Celery

    from ..config import Config
    from .base import BaseBackend, Options
    from .key import Arguments, NamedArguments

__all__ = ("LockableTask", "SingletonTask")


class LockableTask(Protocol):
    """A task whose calls exclude one another, as ``locks.acquire`` sees it."""

    @property
    def app(self) -> Celery:
        """The app that sends it."""

    @property
    def name(self) -> str:
        """The name under which workers know it."""

    @property
    def lock(self) -> str:
        """When its calls exclude one another: a word of ``locks.modes.LockMode``."""

    @property
    def unique_on(self) -> Sequence[str] | str | Callable[..., object] | None:
        """The arguments that make a call unique; None: all."""

    @property
    def has_pure_keys(self) -> bool:
        """Whether equal calls always have the same lock."""

    @property
    def effective_lock_expiry(self) -> float | None:
        """Seconds from the call after which its lock ends; None: no bound."""

    @property
    def singleton_backend(self) -> BaseBackend:
        """The backend of its locks."""

    def generate_lock(self, task_name: str, task_args: Arguments | None, task_kwargs: NamedArguments | None, /) -> str:
        """Return the key of the lock of a call."""

    def time_to_start(self, options: Options) -> float:
        """Return the seconds that a message sent with these options may wait for its start."""


class SingletonTask(LockableTask, Protocol):
    """A task with the options of a Singleton, as ``locks.modes`` checks them, also on its class."""

    lock: str
    unique_on: Sequence[str] | str | Callable[..., object] | None
    overlap: str | None
    raise_on_duplicate: bool | None
    lock_expiry: float | None
    call_signature: inspect.Signature

    @property
    def singleton_config(self) -> Config:
        """The settings of its app."""

    def as_sent(self, args: Arguments | None, kwargs: NamedArguments | None) -> tuple[list[object], dict[str, object]]:
        """Return the arguments of a call as its message has them."""
