"""What the workers of an app answer when they are asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..beat.delivery import Busy, Reader
from ..beat.store.probe import advice
from ..connections import what_it_does
from ..log import without_passwords

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.control import Inspect

#: The answers to a question, by worker.
_Answers = Mapping[str, Any]

#: Seconds to wait for the answers of all workers.
TIMEOUT = 1.0

#: What is asked of them. ``active_queues`` and ``stats`` tell who reads which queue, and how many slots there are.
QUESTIONS = ("registered", "active", "active_queues", "stats")


class BrokerError(Exception):
    """Workers cannot be asked; says in words that follow the broker's name what it does, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Workers:
    """What all workers that answer run and know."""

    running: Mapping[str, str]  #: task id -> worker
    known_tasks: Mapping[str, frozenset[str]]  #: worker -> tasks, Celery's own among them
    versions: Mapping[str, str]  #: worker -> its singlebeat; empty: it has none, or no server for its locks
    readers: Mapping[str, Reader]  #: worker -> its queues, tasks and slots; without those that answered in part
    clocks: Mapping[str, float]  #: worker -> what its clock has shown while it was asked, in seconds since 1970
    asked: tuple[float, float]  #: when that began and ended, by this process's monotonic clock

    @classmethod
    def ask(cls, app: Celery) -> Workers:
        """Ask all workers, which takes ``TIMEOUT`` seconds.

        Raises:
            BrokerError: the broker does not answer, or refuses.
        """
        try:
            with app.connection_for_write() as connection:
                # First, because Celery would try for ever to send the question.
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=TIMEOUT)
            began = time.monotonic()
            # At once, because each question takes all of its time.
            with ThreadPoolExecutor(len(QUESTIONS)) as pool:
                answers = [*pool.map(_asking(app), QUESTIONS)]
            asked = began, time.monotonic()
        except Exception as exc:  # transports raise what they like
            raise BrokerError(f"{what_it_does(exc)}: {without_passwords(str(exc)).rstrip('.')}{advice(exc)}") from exc
        known, active, queues, stats = answers
        # Every worker has Celery's own tasks, and names none of them.
        builtins = {name for name in app.tasks if name.startswith("celery.")}
        known_tasks = {worker: frozenset(tasks) | builtins for worker, tasks in known.items()}
        return cls(
            {run["id"]: worker for worker, runs in active.items() for run in runs},
            known_tasks,
            {worker: stat.get("singlebeat", {}).get("version", "") for worker, stat in stats.items()},
            {
                worker: Reader(
                    frozenset(queue["name"] for queue in queues[worker]),
                    known_tasks[worker],
                    _slots(stats[worker]),
                    [Busy(run["name"], run["id"], _started(run)) for run in active[worker]],
                )
                for worker in sorted(known.keys() & active.keys() & queues.keys() & stats.keys())
            },
            {worker: shown for worker, stat in stats.items() if (shown := stat.get("singlebeat", {}).get("time"))},
            asked,
        )

    def wrong_clocks(self, ahead_of_us: float, *, more_than: float) -> Iterator[tuple[str, float]]:
        """Yield workers whose clock is certainly wrong, and by about how many seconds it is ahead.

        A worker reads its clock between its question and its answer, however slow it is: a clock that is right shows a
        time in between.

        Args:
            ahead_of_us: seconds by which the time that is right is ahead of this process's monotonic clock.
            more_than: seconds that a clock may be wrong.
        """
        began, ended = (moment + ahead_of_us for moment in self.asked)
        for worker, shown in sorted(self.clocks.items()):
            if not began - more_than <= shown <= ended + more_than:
                yield worker, shown - began


def _asking(app: Celery) -> Callable[[str], _Answers]:
    def ask(question: str) -> _Answers:
        with app.connection_for_write() as connection:
            inspect: Inspect = app.control.inspect(timeout=TIMEOUT, connection=connection)
            return getattr(inspect, question)() or {}

    return ask


def _slots(stats: Mapping[str, Any]) -> int | None:
    """Return how many tasks a worker can run at once, None if it does not say."""
    with suppress(KeyError, TypeError, ValueError):
        return max(int(stats["pool"]["max-concurrency"]), int((stats.get("autoscaler") or {}).get("max", 0)))
    return None


def _started(run: Mapping[str, Any]) -> datetime | None:
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromtimestamp(run["time_start"], UTC)
    return None
