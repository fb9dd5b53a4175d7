"""Renews the exclusive locks of this process, in one thread that runs while there are such locks."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..config import Config
from ..errors import ConfigError, LockBackendError
from ..locks import backend_of, new_backend
from ..locks.base import RENEWALS_PER_LEASE
from ..locks.inspect import InspectBackend
from ..locks.legacy import LegacyBackend
from ..log import Log
from ..native_threads import Empty, OnDemandThread, SimpleQueue, native_sleep

if TYPE_CHECKING:
    from celery import Celery

    from ..locks.base import Ref
    from .exclusive import Exclusive

__all__ = ("ExclusiveRenewer", "exclusive_renewer_of")

log = Log(__name__)

#: Maximum number of seconds after which a failed renewal is retried.
RETRY_AFTER = 0.5

#: Seconds that the thread stays when no lock is left to renew.
LINGER = 1.0

#: Maximum number of seconds between two renewals, also of a lock with a long lease: the wait of a thread has a limit.
MOST_PAUSE = 86_400.0


class ExclusiveRenewer:
    """The renewer of the exclusive locks that this process holds for an app.

    The set of locks is weak: after its block has ended for any reason, a lock is not renewed any more. The set also
    decides which thread ends a lock. The caller that frees a lock and the thread that finds it lost both remove the
    lock from the set, and only one of them succeeds.

    Raises:
        ConfigError: the app has no server for its locks, or its lock backend knows no leases.
    """

    def __init__(self, app: Celery) -> None:
        self.pid, self.config, self.backend = os.getpid(), Config.of(app), backend_of(app)
        if isinstance(self.backend, InspectBackend | LegacyBackend):
            raise ConfigError(
                f"singleton_backend_class: exclusive() needs locks that end with their lease, which "
                f"{type(self.backend).__name__} does not have: use the default backend, in Redis"
            )
        self._backend = new_backend(app, own_connections=True)
        self._held: WeakValueDictionary[str, Exclusive] = WeakValueDictionary()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._thread = OnDemandThread(self._run, has_work=lambda: bool(self._held), name="singlebeat-exclusive")

    def track(self, ref: Ref, lock: Exclusive) -> None:
        """Renew a lock from now on."""
        self._held[ref.nonce] = lock
        self._news.put(None)
        self._thread.wake()

    def tracks(self, ref: Ref) -> bool:
        """Return whether a lock is renewed; a forked child holds no lock of its parent."""
        return self.pid == os.getpid() and ref.nonce in self._held

    def holds(self, key: str) -> bool:
        """Return whether code of this process holds the lock at a key."""
        return self.pid == os.getpid() and any(lock.ref.key == key for lock in self._locks())

    def drop(self, ref: Ref) -> bool:
        """Stop renewing a lock, and return whether it was renewed until now; only one caller gets True."""
        return self.tracks(ref) and self._held.pop(ref.nonce, None) is not None

    def _run(self) -> None:
        due, failing = math.inf, False
        while True:
            try:
                due = min(due, time.monotonic() + self._pause())
                with suppress(Empty):
                    self._news.get(timeout=max(0.0, due - time.monotonic()))
                if time.monotonic() < due:
                    continue
                if not self._held:
                    return
                due = math.inf
                if self._renew() and failing:
                    failing = False
                    log.warning("exclusive locks are renewed again", event="recovered")
            except LockBackendError as exc:
                due = time.monotonic() + RETRY_AFTER
                if not failing:
                    log.warning(
                        "exclusive locks that are not renewed end by themselves", event="not_renewed", reason=exc
                    )
                failing = True
            except Exception:  # the outer edge of the thread: it must live as long as there are locks
                log.exception("the renewer of exclusive locks failed and goes on", event="renewer_failed")
                native_sleep(RETRY_AFTER)  # the next round may fail before it waits

    def _locks(self) -> list[Exclusive]:
        # valuerefs() copies in one step: locks come and go in other threads meanwhile.
        return [lock for weak in self._held.valuerefs() if (lock := weak()) is not None]

    def _pause(self) -> float:
        shortest = min((lock.lease for lock in self._locks()), default=LINGER * RENEWALS_PER_LEASE)
        return min(shortest / RENEWALS_PER_LEASE, MOST_PAUSE)

    def _renew(self) -> bool:
        """Renew all locks; return whether there was a lock."""
        locks = self._locks()
        for lease in {lock.lease for lock in locks}:
            equal = [lock for lock in locks if lock.lease == lease]
            asked_at = time.monotonic()
            renewals = self._backend.renew_many([lock.ref for lock in equal], lease=lease)
            for lock, renewal in zip(equal, renewals, strict=True):
                lock.note(renewal, asked_at)
        return bool(locks)


_renewers: WeakKeyDictionary[Celery, ExclusiveRenewer] = WeakKeyDictionary()


def exclusive_renewer_of(app: Celery) -> ExclusiveRenewer:
    """Return the renewer of an app in this process; a forked child gets its own renewer."""
    renewer = _renewers.get(app)
    if renewer is None or renewer.pid != os.getpid():
        renewer = _renewers[app] = ExclusiveRenewer(app)
    return renewer
