"""The lock of a task that is not a Singleton: beat acquires the lock, and the worker releases it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..config import Config
from ..locks import backend_of, time_to_start
from ..locks.base import BaseBackend
from ..locks.key import digest, lock_key
from ..locks.modes import LockMode

if TYPE_CHECKING:
    from celery import Celery

    from ..locks.base import Options
    from ..locks.key import Arguments, NamedArguments

__all__ = ("PlainTask",)

#: Options that say where a message goes: for a plain task they distinguish calls, like the arguments.
ROUTE = ("queue", "exchange", "routing_key")


@dataclass(frozen=True, slots=True)
class PlainTask:
    """A task that is not a Singleton, with the interface that ``locks.acquire`` needs."""

    app: Celery
    name: str
    options: Options  #: the options of its message
    entry: str  #: only runs of this entry exclude one another, not equal calls of other entries

    lock = LockMode.UNTIL_EXECUTED
    unique_on = effective_lock_expiry = serializer = None
    has_pure_keys = True

    @property
    def singleton_backend(self) -> BaseBackend:
        """The backend of the locks of the app."""
        return backend_of(self.app)

    def generate_lock(self, name: str, args: Arguments | None, kwargs: NamedArguments | None) -> str:
        """Return the key of the lock for all runs of a call that come from the entry.

        Raises:
            TypeError: an argument cannot be encoded; the message names it.
        """
        route = {option: str(self.options[option]) for option in ROUTE if self.options.get(option)}
        config = Config.of(self.app)
        scope = {"entry": config.redbeat_key_prefix + self.entry, **route}
        return lock_key(config.singleton_key_prefix, digest(name, args or (), kwargs or {}, scope=scope))

    def time_to_start(self, options: Options) -> float:
        """Return the seconds that a message sent with these options may wait for its start."""
        return time_to_start(options, queued_ttl=Config.of(self.app).singlebeat_queued_ttl, now=datetime.now(UTC))
