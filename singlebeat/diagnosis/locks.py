"""Every lock with what its record says: who holds it, whether its worker lives, and which may be freed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ..advice import sentence
from ..beat.explain import HeldLock
from ..beat.lost_messages import (
    AHEAD_FROM,
    BEFORE_SET_BACK,
    FREES_NOW,
    Found,
    Waiting,
    examine,
    free,
    may_yet_start,
    queue_here,
)
from ..config import Config
from ..connections import broker_place
from ..errors import SinglebeatError
from ..locks import backend_of
from ..locks.base import Ref, read_generation, unusable
from ..locks.key import is_lock_key
from ..locks.redis import RedisBackend
from ..run_results import flush_ends
from .workers import BrokerError, Workers, delivery_of

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("HeldLock", "NotFreedError", "Row", "every", "free_one", "held_by", "locks_of", "old", "waiting")

#: A lock: its key, its record, and what the record says.
Row = tuple[str, Mapping[str, str], HeldLock]


def locks_of(app: Celery) -> Iterator[Row]:
    """Yield every lock with its key and its record."""
    config = Config.of(app)
    for key, record in backend_of(app).locks(config.singleton_key_prefix):
        left = float(record["ttl"]) if record.get("ttl") else None
        began, now = float(record.get("since") or 0), float(record.get("now") or 0)
        # The record may still name the worker of an earlier run or delivery. A state that began in the future began
        # before the server's clock was set back, and the lock may have been renewed since then.
        renewed = float(record.get("renewed") or 0)
        is_known, worker = renewed >= began or (renewed > 0 and began > now), record.get("worker", "")
        age = (now - (renewed if is_known else began)) / 1000 if now and began else None
        is_ahead = age is not None and age < -AHEAD_FROM
        age = None if age is None or is_ahead else max(0.0, age)
        # Its worker may use another lease than this process; a bound (until) may have shortened the rest of the lease.
        is_whole = None not in (age, left) and "until" not in record
        lease = (age or 0.0) + (left or 0.0) if is_whole else config.singlebeat_lock_lease
        about = record.get("id", ""), record.get("state", ""), left, lease
        spoilt = record.get("spoilt", "")
        what = f"its fields {spoilt} must be numbers" if ", " in spoilt else f"its field {spoilt} must be a number"
        why = unusable(key, what) if spoilt else ""
        yield key, record, HeldLock(key, *about, age, worker if is_known else "", is_ahead, why)


def every(app: Celery) -> Iterator[HeldLock]:
    """Yield every lock."""
    return (lock for _, _, lock in locks_of(app))


def held_by(app: Celery, task_ids: Collection[str]) -> Mapping[str, HeldLock]:
    """Return a lock for each of the task ids that holds any; stop reading once all task ids are found."""
    found: dict[str, HeldLock] = {}
    locks = (lock for lock in every(app) if lock.task_id in task_ids)
    while len(found) < len(task_ids) and (lock := next(locks, None)) is not None:
        found[lock.task_id] = lock
    return found


def waiting(rows: Iterable[Row], task_ids: Collection[str] | None = None) -> Iterator[Waiting]:
    """Yield the locks whose messages have not started, of all tasks or of some."""
    for key, record, lock in rows:
        if (task_ids is None or lock.task_id in task_ids) and (found := Waiting.of(key, record)) is not None:
            yield found


def old(app: Celery, rows: Iterable[Row]) -> Iterator[Waiting]:
    """Yield the locks that have been queued for so long that their messages may be lost."""
    return (lock for lock in waiting(rows) if not may_yet_start(lock, Config.of(app)))


#: What ``--force`` does to the run that holds a lock, as the end of a sentence.
_BESIDE = "a run that goes on is not stopped by that, and the next run starts beside it"


class NotFreedError(SinglebeatError):
    """A lock stays as it is; the message says why, and what to do."""


def free_one(app: Celery, which: str, *, force: bool = False) -> HeldLock:
    """Free a lock, unless its owner is known to be alive; return the lock as it was.

    Args:
        which: the task id of its owner, or its key.
        force: free it even then.

    Raises:
        NotFreedError: there is no such lock, its owner may be alive, or another task holds the lock now.
        LockBackendError: the locks' server does not answer.
    """
    found = next(((record, lock) for key, record, lock in locks_of(app) if which in {key, lock.task_id}), None)
    backend = backend_of(app)
    if found is None:
        # An entry's key may have the same prefix.
        is_possible = is_lock_key(which, Config.of(app).singleton_key_prefix)
        if not (is_possible and isinstance(backend, RedisBackend) and backend.holds(which)):
            raise NotFreedError(f"no lock is held by {which}")
        if not force:
            raise NotFreedError(f"{which} holds something that is no lock: --force deletes the key")
        backend.unlock(which)
        return HeldLock(which, "?", "unusable", None, 0.0)
    record, lock = found
    if force:
        backend.unlock(lock.key, lock.task_id)  # another task may have acquired the lock since it was read
    elif lock.state == "queued":
        _free_queued(app, lock, Waiting.of(lock.key, record))
    elif lock.state == "timed":
        raise NotFreedError(f"{lock.fixed_time}. --force frees it now; {_BESIDE}")
    else:
        _check_abandoned(app, lock)
        # Free the lock of this run only: its lease may have ended meanwhile, and another run may have begun. The end of
        # this run is not remembered: if its worker died, the broker may deliver the message again.
        run = Ref(lock.key, lock.task_id, read_generation(record.get("gen") or "0"), record.get("nonce", ""))
        backend.finish_many([run], remember_for=0)
    # The lock of a lost message is free by now, and the next run may have acquired it since.
    if (force or lock.state != "queued") and (holder := backend.get(lock.key)):
        raise NotFreedError(f"{lock.key} is not free: task {holder} holds it")
    return lock


def _check_abandoned(app: Celery, lock: HeldLock) -> None:
    """Check that the worker of a run has probably died.

    Raises:
        NotFreedError: it runs, or may run.
    """
    workers, unasked = None, ""
    try:
        workers = Workers.ask(app)
    except BrokerError as exc:
        unasked = f"the workers cannot be asked whether task {lock.task_id} runs (the broker {broker_place(app)} {exc})"
    if workers is not None and lock.task_id in workers.running:
        worker = workers.running[lock.task_id]
        raise NotFreedError(f"task {lock.task_id} runs on {worker}: its lock is free when the run ends")
    if lock.is_ahead and not lock.seems_abandoned:
        raise NotFreedError(
            f"the lock of task {lock.task_id} was last renewed {BEFORE_SET_BACK}, so whether its worker lives is "
            f"not known. If it has died, the lock ends by itself within {lock.lease:.0f} s of the next call that "
            "meets it"
        )
    if lock.left is not None and not lock.seems_abandoned:  # its worker may just be too busy to answer
        raise NotFreedError(
            f"the lock of task {lock.task_id} was renewed {lock.last_renewed}: its worker lives, or has died since "
            f"then. Wait: if it has died, try again in {lock.seems_abandoned_in:.0f} s, or the lock ends by itself in "
            f"{lock.left:.0f} s. A worker that shuts down ends its last runs without an answer"
        )
    if unasked:
        raise NotFreedError(f"{unasked}. --force frees its lock all the same; {_BESIDE}")


def _unread(app: Celery, queue: str) -> str:
    """Return that no worker reads a queue, and what to do, as the end of a sentence; empty if one may read it."""
    with suppress(BrokerError):
        delivery = delivery_of(app, queue, Workers.ask(app) if queue else None)
        if delivery is not None and delivery.unread:
            return f"; {delivery.unread}. {sentence(delivery.way_out)}"
    return ""


def _free_queued(app: Celery, lock: HeldLock, found: Waiting | None) -> None:
    """Free the lock of a lost message.

    Raises:
        NotFreedError: the message may still exist.
    """
    results: list[Found] = examine(app, [found]) if found is not None else []
    if not free(app, results):
        unknown = f"the lock of task {lock.task_id} is not freed: nothing more is known about its message"
        why = f"{results[0]}{_unread(app, queue_here(app, results[0].lock))}" if results else unknown
        raise NotFreedError(f"{why}. --force {FREES_NOW}")
    flush_ends(app)
