"""Mutual exclusion of runs: one lock per unique call, with an owner, a state, a lease and a fencing number.

The states of a lock::

              acquire                    begin                     finish
    (free) ------------> queued ---------------------> running ------------> (free), id remembered in :done
       ^                 |    ^                        |    |
       |    release,     |    |  rotate, promise       |    | lease ends: worker or host is dead
       +-----------------+    +------------------------+    v
         queued_ttl is over      a retry or a requeue      (free)

======= ========================= ==========================================================================
state   its holder                it lasts, without a renewal
======= ========================= ==========================================================================
queued  the message of a call     ``singlebeat_queued_ttl`` plus its countdown, and no longer than the message:
                                  beat frees it if the message is lost
running one delivery of it        ``singlebeat_lock_lease``; its worker renews it
timed   a call (``until_expired``) ``lock_expiry``, or until it is unlocked: no message or run frees it
        or a program (``lock``)
======= ========================= ==========================================================================

Four keys belong to a lock. ``<lock>`` is the record itself; ``<lock>:next`` is the place of the one call that waits
behind it (``buffer_one``, ``cancel_other``, ``until_and_while_executing``); ``<lock>:turn`` is the turn of the oldest
call that waits and runs by itself (``buffer_all``, calls with continuations). ``<lock>:done`` remembers ids that have
ended, so that a late copy of their messages does not run.

``base`` names the verbs, which each backend does in one step: ``redis`` (the default; each verb a Lua script whose
header is its contract), ``memory`` (eager calls), ``inspect`` (no server: asks the workers), ``legacy`` (a backend
written for celery-singleton). ``acquire`` gets the lock of a call before it is sent, by lock mode and overlap policy
(``modes``). ``send`` acquires it and sends the call in one script if broker and locks are one Redis server, for which
``singlebeat.outbox`` keeps the message back, and else in two writes. ``late_release`` frees a lock whose server was
unreachable when the call was refused.

Tests: ``tests/redis/test_locks.py`` (each script), ``tests/redis/test_backends_agree.py`` (Redis and memory give the
same answers), ``tests/model/test_lock_machine.py`` (any history keeps the promises, also with lost replies). In the
last two, ``memory`` is the model of the scripts.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery.utils.imports import symbol_by_name

from ..broker import own_broker
from ..config import Config
from ..errors import ConfigError
from .base import BaseBackend
from .legacy import LegacyBackend
from .memory import MemoryBackend

if TYPE_CHECKING:
    from celery import Celery

    from .base import Options

__all__ = (
    "backend_of",
    "clear_locks",
    "delay_of",
    "eager_backend_of",
    "new_backend",
    "seconds_until",
    "time_to_start",
    "worker_name",
)

#: By name, because an app whose backend needs no Redis must not import redis-py.
DEFAULT_BACKEND = "singlebeat.locks.redis:RedisBackend"

_backends: WeakKeyDictionary[Celery, BaseBackend] = WeakKeyDictionary()
_eager_backends: WeakKeyDictionary[Celery, tuple[int, BaseBackend]] = WeakKeyDictionary()


def backend_of(app: Celery) -> BaseBackend:
    """Return the lock backend of an app, which is created on first use.

    Raises:
        ConfigError: as ``new_backend``.
    """
    backend = _backends.get(app)
    if backend is None:
        backend = _backends[app] = new_backend(app)
    return backend


def eager_backend_of(app: Celery) -> BaseBackend:
    """Return the lock backend of an app's eager calls: the memory of this process, and not of its parent."""
    pid, backend = _eager_backends.get(app, (0, None))
    if backend is None or pid != os.getpid():
        backend = MemoryBackend()
        _eager_backends[app] = os.getpid(), backend
    return backend


def new_backend(app: Celery, *, own_connections: bool = False) -> BaseBackend:
    """Return a new lock backend for an app.

    Args:
        own_connections: whether to share no connections with the rest of the process; for a separate thread.

    Raises:
        ConfigError: its class cannot be imported, or has no server; the message names the setting.
    """
    given = Config.of(app).singleton_backend_class or DEFAULT_BACKEND
    try:
        cls: Any = symbol_by_name(given)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"singleton_backend_class: cannot import {given!r}: {exc}") from exc
    if isinstance(cls, type) and issubclass(cls, BaseBackend):
        return cls.of_app(app, own_connections=own_connections)
    return LegacyBackend.around(cls, app)


def worker_name(app: Celery, hostname: str) -> str:
    """Return the announced name of a worker, with its broker: apps with other brokers may share the locks' server."""
    return f"{hostname} {own_broker(app)}"


def clear_locks(app: Celery) -> None:
    """Free every lock of an app, whichever task holds it."""
    backend_of(app).clear(Config.of(app).singleton_key_prefix)


def time_to_start(options: Options, *, queued_ttl: float, now: datetime) -> float:
    """Return the seconds that a message sent with these options may wait for its start.

    That is ``queued_ttl`` after its countdown or eta, and never longer than its ``expires``.
    """
    wait = queued_ttl + delay_of(options, now)
    expires = seconds_until(options.get("expires"), now)
    return wait if expires is None else max(0.001, min(wait, expires))


def delay_of(options: Options, now: datetime) -> float:
    """Return the seconds from now until a message sent with these options may start."""
    return max(0.0, seconds_until(options.get("eta"), now) or float(options.get("countdown") or 0))


def seconds_until(moment: datetime | str | timedelta | float | None, now: datetime) -> float | None:
    """Return the seconds until a datetime, an ISO 8601 string, or a timedelta or seconds from now; None for None.

    Raises:
        ValueError, TypeError: ``moment`` is none of these.
    """
    if moment is None:
        return None
    if isinstance(moment, timedelta):
        return moment.total_seconds()
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (aware - now).total_seconds()
    return float(moment)
