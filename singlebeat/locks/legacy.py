"""The adapter for a lock backend that was written for celery-singleton: four methods, any store."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from celery.exceptions import SoftTimeLimitExceeded

from ..config import Config
from ..errors import ConfigError, LockBackendError
from .base import BaseBackend, Call, Holder, IfHeld, Ref, Renewal, Verdict, read_generation
from .key import behind_key

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("LegacyBackend",)

#: Separates task id and generation in the store; the first generation is the bare id, as in celery-singleton.
LATER = " #"


class LegacyBackend(BaseBackend):
    """A lock backend that uses ``lock``, ``unlock``, ``get`` and ``clear`` of a custom ``singleton_backend_class``.

    While a retry or a replacement holds a lock, the store has ``<task id> #<number>``; it must accept such a string.

    Four methods cannot promise everything. There is no lease: if a worker died with all its processes, its lock stays
    until its ``lock_expiry``, or for ever. Freeing is a check and then a deletion, not one step. Ends are not
    remembered, so a message that the broker delivers twice runs twice. There are no payloads and no fencing numbers.
    Plain tasks that beat dispatches get no lock.

    Args:
        custom: an object with these four methods.
    """

    replaces = False

    def __init__(self, custom: Any) -> None:
        self.custom = custom
        #: By run: its retry, and the seconds that the retry may wait. Keyed without the generation of the run, because
        #: the caller of ``promise`` knows only its nonce.
        self._promised: dict[Ref, tuple[Ref, float]] = {}

    @classmethod
    def around(cls, custom_class: Any, app: Celery) -> Self:
        """Return the adapter of a custom backend, which is built as celery-singleton builds it.

        Raises:
            ConfigError: the custom backend cannot be built.
        """
        config = Config.of(app)
        url = config.singleton_backend_url or app.conf.result_backend
        if not config.singleton_backend_url and not str(url).startswith("redis://"):
            url = app.conf.broker_url
        try:
            return cls(custom_class(url, **config.singleton_backend_kwargs))
        except Exception as exc:  # it may raise any error
            raise ConfigError(f"singleton_backend_class: cannot build {custom_class!r}: {exc!r}") from exc

    def acquire_many(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Acquire the locks of calls that are about to be sent, one by one: ACQUIRED, WAITING, RUNNING or HELD."""
        return [self._acquire(call) for call in calls]

    def _acquire(self, call: Call) -> Holder:
        behind = replace(call.ref, key=behind_key(call.ref.key))
        if call.if_held is not IfHeld.LEAVE:
            with _naming(self.name):
                waits = self._held(behind.key)
            if waits and waits[0] != call.ref.task_id:
                return _holder(Verdict.HELD, waits[0])
        task_id, generation = self._take(call.ref, call.expiry)
        if task_id == call.ref.task_id:
            return _holder(Verdict.RUNNING if generation > call.ref.generation else Verdict.ACQUIRED, task_id)
        if call.if_held is IfHeld.LEAVE:
            return _holder(Verdict.HELD, task_id)
        waits_id, _ = self._take(behind, call.expiry)
        return _holder(Verdict.WAITING, task_id) if waits_id == call.ref.task_id else _holder(Verdict.HELD, waits_id)

    def _take(self, ref: Ref, expiry: float | None) -> tuple[str, float]:
        """Acquire a lock if it is free; return the task id and the generation that hold the lock now."""
        with _naming(self.name):
            # Two attempts, because the lock may be freed between the refusal and the check.
            for _ in range(2):
                if self.custom.lock(ref.key, _owner(ref), expiry=_seconds(expiry)):
                    return ref.task_id, ref.generation
                if held := self._held(ref.key):
                    return held
        raise LockBackendError(f"{self.name}.lock({ref.key!r}) refuses a lock, but get() says that it is free")

    def begin(
        self,
        ref: Ref,
        *,
        queued: str = "",
        turn_ttl: float = 0.0,
        waits_since: float = 0.0,
        lease: float,
        remember_for: float,
        task: str,
        arguments: str,
        expiry: float | None = None,
        entry: str = "",
        note: str = "",
        overtakes: bool = False,
        yields: bool = False,
    ) -> Holder:
        """Try to start a run: with STARTED it runs; with STALE or HELD it must not start."""
        with _naming(self.name):
            held = self._held(ref.key)
            if held and held[0] == ref.task_id and held[1] <= ref.generation > 0:
                # A retry: the run that sent it is over. The lock lasts only for its wait, so it is acquired anew.
                self.custom.unlock(ref.key)
                held = None
        task_id, generation = held or self._take(ref, expiry)
        if task_id != ref.task_id:
            return _holder(Verdict.HELD, task_id)
        if generation > ref.generation:
            return _holder(Verdict.STALE, task_id)
        with _naming(self.name):
            if queued not in {"", ref.key} and self._held(queued) == (ref.task_id, ref.generation):
                self.custom.unlock(queued)
        return _holder(Verdict.STARTED, task_id)

    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Hand a run's lock over to a waiting message of the same task id; return False if the lock was lost."""
        with _naming(self.name):
            ours = self._held(ref.key) == (ref.task_id, ref.generation)
            if ours and to.generation != ref.generation:
                self._hand_over(ref, to, ttl)
            return ours

    def promise(self, run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
        """Promise a run's lock to its own retry, for when the run ends in this process; None takes the promise back."""
        with _naming(self.name):
            held = self._held(run.key)
        if held is None or held[0] != run.task_id:
            return False
        if to is None:
            self._promised.pop(replace(run, generation=0), None)
        else:
            self._promised[replace(run, generation=0)] = to, ttl
        return True

    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Return the state of the locks of live requests; there is no lease to renew."""
        with _naming(self.name):
            return [self._renew(ref) for ref in refs]

    def _renew(self, ref: Ref) -> Renewal:
        held = self._held(ref.key)
        if held is None or held[0] != ref.task_id or held[1] < ref.generation:
            return Renewal.LOST
        return Renewal.RUNNING if held[1] == ref.generation else Renewal.OVER

    def finish_many(
        self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False, took: bool = False, unsent: bool = False
    ) -> Sequence[Ref]:
        """Free the locks of requests that are over; the locks of other requests stay. Which were lost is not known."""
        with _naming(self.name):
            for ref in refs:
                successor = self._promised.pop(replace(ref, generation=0), None)
                if self._held(ref.key) != (ref.task_id, ref.generation):
                    continue
                if successor is None:
                    self.custom.unlock(ref.key)
                else:
                    self._hand_over(ref, *successor)
        return ()

    def announce(self, worker: str, *, ttl: float) -> None:
        """Do nothing: see ``workers_seen``."""

    def workers_seen(self) -> bool:
        """Return False: a plain task's lock would stay for ever if its worker died, so beat must acquire none."""
        return False

    def get(self, lock: str) -> str | None:
        """Return the task id that holds a lock, or None."""
        with _naming(self.name):
            held = self._held(lock)
        return held[0] if held else None

    def unlock(self, lock: str, holder: str = "") -> None:
        """Free a lock, of any holder or of one task id alone."""
        if holder and self.get(lock) != holder:
            return
        with _naming(self.name):
            self.custom.unlock(lock)

    def clear(self, key_prefix: str) -> None:
        """Free every lock under a prefix, regardless of its holder."""
        with _naming(self.name):
            self.custom.clear(key_prefix)

    def locks(self, key_prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield nothing: such a backend cannot list its locks."""
        return iter(())

    @property
    def name(self) -> str:
        """Return the name of the user's own class."""
        return type(self.custom).__name__

    def _held(self, lock: str) -> tuple[str, float] | None:
        """Return the task id and generation that hold a lock."""
        owner = self.custom.get(lock)
        if not owner:
            return None
        text = owner.decode() if isinstance(owner, bytes) else str(owner)
        task_id, separator, number = text.rpartition(LATER)
        is_number = separator and number.replace(".", "", 1).isdecimal()
        return (task_id, read_generation(number)) if is_number else (text, 0)

    def _hand_over(self, ref: Ref, to: Ref, ttl: float) -> None:
        # If another call acquires the lock in between, the message in ``to`` waits for its turn.
        self.custom.unlock(ref.key)
        self.custom.lock(to.key, _owner(to), expiry=_seconds(ttl))


def _seconds(expiry: float | None) -> int | None:
    return math.ceil(expiry) if expiry else None  # redis-py, for example, accepts no fractions


def _owner(ref: Ref) -> str:
    return f"{ref.task_id}{LATER}{ref.generation}" if ref.generation else ref.task_id


def _holder(verdict: Verdict, task_id: str) -> Holder:
    state = "running" if verdict is Verdict.STARTED else "queued or running"
    return Holder(verdict, task_id, state, datetime.now(UTC) if verdict is Verdict.STARTED else None, 0, 0.0)


@contextmanager
def _naming(backend: str) -> Iterator[None]:
    """Convert any error of a custom backend to a LockBackendError with the backend's name."""
    try:
        yield
    except (LockBackendError, SoftTimeLimitExceeded):
        raise
    except Exception as exc:
        raise LockBackendError(f"the lock backend {backend} failed: {exc!r}") from exc
