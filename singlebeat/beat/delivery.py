"""Whether workers read the queue that an entry's task goes to, know the task, and have a free slot; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ..advice import listed, quoted, to_read
from ..destination import queue_of_call
from .status import APART, QUEUES_APART

if TYPE_CHECKING:
    from celery import Celery

    from .entries.entry import Entry

__all__ = ("PREFETCH", "Busy", "Delivery", "Reader", "queue_of", "unless")

#: What keeps messages away from workers that have no free slot, in words.
PREFETCH = (
    "With worker_prefetch_multiplier = 1 a worker receives fewer messages ahead, and with worker_disable_prefetch "
    "(Celery 5.6, Redis as the broker) none"
)


@dataclass(frozen=True, slots=True)
class Busy:
    """A run that occupies a slot of a worker."""

    task: str
    task_id: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Reader:
    """A worker that answers."""

    queues: frozenset[str]  #: the queues that it reads
    tasks: frozenset[str]  #: the tasks that it knows
    slots: int | None  #: how many tasks it can run at once; None: unknown
    busy: Sequence[Busy]
    up_s: float | None = None  #: seconds since it was started, rounded; None: unknown
    rate_limits: Mapping[str, str] = field(default_factory=dict)  #: of tasks that have one there: how many it starts


@dataclass(frozen=True, slots=True)
class Delivery:
    """The workers that read one queue, and the others, among all workers that answer.

    >>> Delivery.of("bills", {"w1": Reader(frozenset({"celery"}), frozenset(), 2, ())}).unread
    'no worker that answers reads queue bills (they read celery)'
    """

    queue: str
    readers: Mapping[str, Reader]
    others: Mapping[str, Reader]
    silent: Collection[str] = ()  #: the workers that seem to live and do not answer; they may read the queue
    messages: int = 0  #: that wait in the queue, if no worker reads it; 0 if unknown
    other_apps: Sequence[str] = ()  #: the other apps with entries or a leader in the schedule: it may be their queue

    @classmethod
    def of(cls, queue: str, workers: Mapping[str, Reader], silent: Collection[str] = ()) -> Delivery:
        """Return the delivery of a queue, from the workers that answer, by name."""
        readers = {name: worker for name, worker in workers.items() if queue in worker.queues}
        return cls(queue, readers, {name: worker for name, worker in workers.items() if name not in readers}, silent)

    @property
    def unread(self) -> str:
        """A sentence that no worker reads the queue; empty if a worker does, or if no worker answers at all."""
        if self.readers or not self.others:
            return ""
        read = sorted(frozenset().union(*(worker.queues for worker in self.others.values())))
        text = f"no worker that answers reads queue {self.queue} (they read {listed(read) or 'none'})"
        return f"{text}, and {listed(sorted(self.silent))}, which may read it, does not answer" if self.silent else text

    @property
    def unless_read(self) -> str:
        """The condition of what is said of an unread queue, if a silent worker may read it; else empty."""
        return unless(self.silent, "read")

    @property
    def way_out(self) -> str:
        """The number of messages in a queue that no worker reads, and the advice about them."""
        number = f"{self.messages} message{'s wait' if self.messages > 1 else ' waits'} there: " * bool(self.messages)
        if self.other_apps:
            return (
                f"{number}{self.left_alone}. An entry of this app whose lock is held by a message there runs again "
                "once the lock is free: celery singlebeat unlock --force, with the id of the message's task"
            )
        if self.silent:
            return f"{number}{self.unless_read}{to_read(self.queue)}"
        command = f" (celery purge -Q {quoted(self.queue)})" if "," not in self.queue else ""
        return (
            f"{number}{to_read(self.queue)}. Or delete all messages there, those of other entries, calls and apps, "
            f"too, if none of them is wanted{command}. Beat frees a lock then when another run or call meets it, "
            "celery singlebeat unlock --stale frees all"
        )

    @property
    def left_alone(self) -> str:
        """That the queue may be of another app, and what to do; only if there are other apps."""
        apps, is_one = listed(self.other_apps), len(self.other_apps) == 1
        return (
            f"the queue may be of app{'' if is_one else 's'} {apps}, which {'shares' if is_one else 'share'} this "
            "schedule. A worker of this app drops the messages of another app, so start none there, and delete "
            f"nothing, unless you know that the queue has only messages of this app. First {APART}"
        )

    def without(self, task: str) -> str:
        """Return a sentence that readers of the queue do not know a task, and what to do; else an empty string.

        It is empty, too, if no worker at all knows the task, or if no worker reads the queue.
        """
        lacking = sorted(name for name, worker in self.readers.items() if task not in worker.tasks)
        knowing = sorted(name for name, worker in self.others.items() if task in worker.tasks)
        if 0 < len(lacking) < len(self.readers):
            is_one = len(lacking) == 1
            reads, knows = ("reads", "does not know") if is_one else ("read", "do not know")
            return (
                f"worker{'' if is_one else 's'} {listed(lacking)} {reads} queue {self.queue} and {knows} the task "
                f"{task}: {'it drops its' if is_one else 'they drop their'} share of the messages. If that is another "
                f"app, {QUEUES_APART}. Else deploy the task there, too"
            )
        if not lacking or not knowing:
            return ""
        return (
            f"no worker that answers and reads queue {self.queue} knows the task {task}: {listed(lacking)} drops the "
            f"message; {listed(knowing)} knows it and does not read that queue. Let one worker read the queue and know "
            "the task"
        )

    def limited(self, task: str) -> str:
        """Return a sentence that a rate limit holds messages of a task back at readers of the queue; empty if none."""
        limits = {name: limit for name, worker in self.readers.items() if (limit := worker.rate_limits.get(task))}
        if not limits:
            return ""
        shown = listed([f"{name} {limit}" for name, limit in sorted(limits.items())])
        return f"the rate_limit of the task {task} holds messages back at worker{'s' * (len(limits) > 1)} {shown}"

    @property
    def full_since(self) -> datetime | None:
        """When the last free slot of the readers was taken, None if a slot is free or the time is unknown."""
        busy = [run for worker in self.readers.values() for run in worker.busy]
        times = [run.since for run in busy if run.since is not None]
        return max(times) if self._slots and len(busy) >= self._slots and len(times) == len(busy) else None

    @property
    def full(self) -> str:
        """A sentence that all slots of the readers are busy, and with which tasks; empty if not, or if unknown."""
        return self._full(f"the workers that read queue {self.queue}")

    def full_at(self, worker: str) -> str:
        """Return the same sentence about one worker that answers; empty also if that worker does not answer."""
        found = {**self.readers, **self.others}.get(worker)
        return replace(self, readers={worker: found})._full(f"worker {worker}") if found is not None else ""

    def _full(self, whose: str) -> str:
        if (since := self.full_since) is None:
            return ""
        tasks = Counter(run.task for worker in self.readers.values() for run in worker.busy)
        with_what = listed([f"{task} ({count})" if count > 1 else task for task, count in tasks.most_common()])
        which, verb = (f"all {self._slots} slots", "are") if self._slots > 1 else ("the only slot", "is")
        return f"{which} of {whose} {verb} busy with {with_what}, since {since:%Y-%m-%d %H:%M:%SZ}"

    @property
    def _slots(self) -> int:
        """How many tasks all readers can run at once, 0 if unknown."""
        slots = [worker.slots or 0 for worker in self.readers.values()]
        return sum(slots) if all(slots) else 0


def unless(workers: Collection[str], verb: str) -> str:
    """Return the condition of what is said of workers, if silent ones may be others: "unless w1 reads it, "; or empty.

    A solo pool answers nothing while it runs a task, and a worker without remote control never does.
    """
    return f"unless {listed(sorted(workers))} {verb}{'s' * (len(workers) == 1)} it, " * bool(workers)


def queue_of(app: Celery, entry: Entry) -> str | None:
    """Return the name of the queue that an entry's task goes to, None if this process cannot know it.

    A task that only workers know may have its own queue in their configuration.
    """
    try:
        return queue_of_call(app, entry.task, entry.options, entry.args, entry.kwargs) or None
    except Exception:  # a user's router may raise anything, and an unknown queue is an error
        return None
