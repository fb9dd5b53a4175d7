"""Checks locks that no worker frees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ...advice import sentence
from ...beat.delivery import queue_of
from ...beat.entries.statics import owner_of
from ...beat.lost_messages import MOST, Waiting, examine, queue_here, sent_to_another_broker
from ...beat.status import counted
from ...beat.store.probe import freezes_locks
from ...broker import is_one_broker, own_broker
from ...config import Config
from ...errors import SinglebeatError
from ...locks import backend_of
from ...run_results import MESSAGE_LOST, RAN_ELSEWHERE
from ..locks import locks_of, old, waiting
from ..workers import delivery_of, last_seen
from .finding import MOST_NAMED, Finding, Read

if TYPE_CHECKING:
    from celery import Celery

    from ...beat.explain import HeldLock
    from ..locks import Row
    from ..workers import Workers

#: Maximum number of locks that are read to find old locks.
MOST_OLD_LOCKS = 10_000


def check_locks(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for locks that no worker frees: their messages are lost or ran elsewhere, or their workers are silent."""
    if schedule.locks_error is not None:
        return
    try:
        rows = list(islice(locks_of(app), MOST_OLD_LOCKS))
        found = examine(app, list(islice(old(app, rows), MOST))) if schedule.broker_answers else []
    except SinglebeatError:  # an earlier part has reported it
        return
    for outcome, what in _STALE.items():
        stale = [each for each in found if each.outcome == outcome]
        if stale:
            lock, how_many = stale[0].lock, what[len(stale) > 1].format(len(stale))
            text = (
                f"{how_many}, such as task {lock.ref.task_id} ({lock.task}): {stale[0].reason}. Equal runs and calls "
                "are refused meanwhile: beat frees a lock when one of them meets it, unless singlebeat_lost_after is "
                "None. To free all now: celery singlebeat unlock --stale"
            )
            yield Finding("problem", "locks", text)
    doubtful = [each for each in found if each.in_doubt]
    if doubtful:
        kind = counted(len(doubtful), "lock may wait for a message that is", "locks may wait for messages that are")
        text = (
            f"{kind} lost, such as this: {doubtful[0]}. Equal runs and calls are refused meanwhile. If it is "
            f"lost, {doubtful[0].way_out}"
        )
        yield Finding("warning", "locks", text)
    for text in islice((lock.unusable for _, _, lock in rows if lock.unusable), MOST_NAMED):
        yield Finding("problem", "locks", text)
    over = {each.lock.ref for each in found if each.outcome}
    open_ = (lock for lock in waiting(rows) if lock.ref not in over)
    yield from _unread(app, schedule, [lock for lock in open_ if queue_here(app, lock)])
    if text := _run_of_another_broker(app, rows) or _message_of_another_broker(app, rows):
        text = f"{text}. {_SHARED}"
        yield Finding("problem", f"singleton_key_prefix {Config.of(app).singleton_key_prefix}", text)
    if schedule.workers and not freezes_locks(schedule.locks_refused):
        silent = [lock for _, _, lock in rows if lock.seems_abandoned and not lock.unusable]
        yield from _silent_owners(app, schedule.workers, silent)


def _unread(app: Celery, schedule: Read, locks: Sequence[Waiting]) -> Iterator[Finding]:
    """Check for locks whose messages wait in a queue that no worker reads, and to which no entry sends any more."""
    by_queue, sent_to = defaultdict[str, list[Waiting]](list), set[str | None]()
    for lock in locks:
        by_queue[lock.queue].append(lock)
    if by_queue and schedule.error is None and schedule.state.is_led_by(owner_of(app)):
        sent_to = {queue_of(app, entry) for entry in schedule.usable if entry.enabled}  # another part names these
    for queue in sorted(by_queue.keys() - sent_to):
        delivery, held = delivery_of(app, queue, schedule.workers), by_queue[queue]
        if delivery is not None and delivery.unread:
            held_up = counted(len(held), "lock is", "locks are")
            text = (
                f"{delivery.unread}, and {held_up} held by messages that were sent there, such as task "
                f"{held[0].ref.task_id} ({held[0].task}): equal runs and calls are refused meanwhile. "
                f"{sentence(delivery.way_out)}"
            )
            yield Finding("warning" if delivery.silent else "problem", f"queue {queue}", text)


def _run_of_another_broker(app: Celery, rows: Iterable[Row]) -> str:
    """Return that a worker of another broker holds a lock; empty if none does."""
    brokers, own = defaultdict[str, set[str]](set), own_broker(app)
    for announced in backend_of(app).workers():
        hostname, _, broker = announced.partition(" ")
        brokers[hostname].add(broker)
    for _, record, lock in rows:
        others = brokers.get(lock.worker, set())
        if lock.state == "running" and others and not any(is_one_broker(own, other) for other in others):
            return (
                f"worker {lock.worker}, which has another broker ({', '.join(sorted(others))}), holds the lock of task "
                f"{lock.task_id} ({record.get('task', '')})"
            )
    return ""


def _message_of_another_broker(app: Celery, rows: Iterable[Row]) -> str:
    """Return that a message which was sent to another broker holds a lock; empty if none does."""
    found = ((lock, sent_to_another_broker(app, lock)) for lock in waiting(rows))
    return next(
        (f"task {lock.ref.task_id} ({lock.task}) holds a lock: {reason}" for lock, reason in found if reason), ""
    )


def _silent_owners(app: Celery, workers: Workers, locks: Sequence[HeldLock]) -> Iterator[Finding]:
    """Check for runs whose workers have not renewed their locks and do not answer, or do not run them."""
    seen = last_seen(app) if locks else {}
    for lock in islice((lock for lock in locks if lock.task_id not in workers.running), MOST_NAMED):
        ends = f" in {lock.left:.0f} s" if lock.left is not None else ""
        text = (
            f"the lock of task {lock.task_id} was last renewed {lock.last_renewed}, and no worker that answers runs "
            f"the task: {lock.left_by(workers.readers, seen)}. The lock ends by itself{ends}"
        )
        yield Finding("warning", "locks", text)


#: What it means that processes with other brokers hold locks, and what to do.
_SHARED = (
    "If these are two apps, or two fleets such as staging and production, they share the prefix, and a call of one "
    "keeps an equal call of the other from running: give each a prefix of its own. If they are one fleet, give all its "
    "processes one broker_url"
)

#: The words for one lock and for several, for each outcome of the check of a lock's message.
_STALE = {
    MESSAGE_LOST: ("1 lock waits for a message that is lost", "{} locks wait for messages that are lost"),
    RAN_ELSEWHERE: (
        "1 lock is held by a task that has ended, and whose worker did not free it",
        "{} locks are held by tasks that have ended, and whose workers did not free them",
    ),
}
