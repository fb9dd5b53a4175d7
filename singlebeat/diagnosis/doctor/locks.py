"""Checks locks that no worker frees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ...beat.lost_messages import MOST, examine
from ...config import Config
from ...errors import SinglebeatError
from ...locks import backend_of, worker_name
from ...run_results import MESSAGE_LOST, RAN_ELSEWHERE
from ..locks import locks_of, old
from ..workers import BrokerError, Workers
from .finding import MOST_NAMED, Finding, Read

if TYPE_CHECKING:
    from celery import Celery

    from ...beat.explain import HeldLock

#: Maximum number of locks that are read to find old locks.
MOST_OLD_LOCKS = 10_000


def check_locks(app: Celery, _: Read) -> Iterator[Finding]:
    """Check for locks that no worker frees: their messages are lost or ran elsewhere, or their workers are silent."""
    try:
        rows = list(islice(locks_of(app), MOST_OLD_LOCKS))
        found = examine(app, list(islice(old(app, rows), MOST)))
    except SinglebeatError:  # an earlier part has reported it
        return
    for outcome, what in _STALE.items():
        stale = [each for each in found if each.outcome == outcome]
        if stale:
            lock, how_many = stale[0].lock, what[len(stale) > 1].format(len(stale))
            text = (
                f"{how_many}, such as task {lock.ref.task_id} ({lock.task}): {stale[0].reason}. Equal runs and calls "
                "are refused meanwhile. To free them: celery singlebeat unlock --stale"
            )
            yield Finding("problem", "locks", text)
    yield from _of_other_brokers(app, [(record.get("task", ""), lock) for _, record, lock in rows])
    yield from _silent_owners(app, [lock for _, _, lock in rows if lock.seems_abandoned])


def _of_other_brokers(app: Celery, locks: Sequence[tuple[str, HeldLock]]) -> Iterator[Finding]:
    """Check for a lock of a worker of another broker, whose app or fleet has the same prefix for locks."""
    brokers = defaultdict[str, set[str]](set)
    for announced in backend_of(app).workers():
        hostname, _, broker = announced.partition(" ")
        brokers[hostname].add(broker)
    for task, lock in locks:
        others = brokers.get(lock.worker, set())
        if lock.state == "running" and others and worker_name(app, lock.worker).partition(" ")[2] not in others:
            text = (
                f"worker {lock.worker}, which has another broker ({', '.join(sorted(others))}), holds the lock of task "
                f"{lock.task_id} ({task}): two apps, or two fleets such as staging and production, share the prefix, "
                "and a call of one keeps an equal call of the other from running. Give each a prefix of its own"
            )
            yield Finding("problem", f"singleton_key_prefix {Config.of(app).singleton_key_prefix}", text)
            return


def _silent_owners(app: Celery, locks: Sequence[HeldLock]) -> Iterator[Finding]:
    """Check for runs whose workers have not renewed their locks and do not answer."""
    try:
        running = Workers.ask(app).running if locks else {}
    except BrokerError:  # an earlier part has reported it
        return
    for lock in islice((lock for lock in locks if lock.task_id not in running), MOST_NAMED):
        ends = f" in {lock.left:.0f} s" if lock.left is not None else ""
        text = (
            f"the lock of task {lock.task_id} was last renewed {lock.last_renewed}, and no worker that answers runs "
            f"the task: its worker has probably died, or hangs. The lock ends by itself{ends}"
        )
        yield Finding("warning", "locks", text)


#: The words for one lock and for several, for each outcome of the check of a lock's message.
_STALE = {
    MESSAGE_LOST: ("1 lock waits for a message that is lost", "{} locks wait for messages that are lost"),
    RAN_ELSEWHERE: (
        "1 lock is held by a task that has run on a worker without singlebeat",
        "{} locks are held by tasks that have run on workers without singlebeat",
    ),
}
