"""What the workers of an app answer when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..beat.delivery import Busy, Reader

if TYPE_CHECKING:
    from celery import Celery

#: Seconds to wait for the answers of all workers.
TIMEOUT = 1.0

#: What is asked of them. ``active_queues`` and ``stats`` tell who reads which queue, and how many slots there are.
QUESTIONS = ("registered", "active", "active_queues", "stats")


@dataclass(frozen=True, slots=True)
class Workers:
    """What all workers that answer run and know."""

    running: Mapping[str, str]  #: task id -> worker
    known_tasks: Mapping[str, frozenset[str]]  #: worker -> tasks, Celery's own among them
    versions: Mapping[str, str]  #: worker -> its singlebeat; empty: it has none, or no server for its locks
    readers: Mapping[str, Reader]  #: worker -> its queues, tasks and slots; without those that answered in part

    @classmethod
    def ask(cls, app: Celery) -> Workers | None:
        """Ask all workers, which takes ``TIMEOUT`` seconds; None if the broker does not answer."""
        try:
            with app.connection_for_write() as connection:
                # First, because Celery would try for ever to send the question.
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=TIMEOUT)
            # At once, because each question takes all of its time.
            with ThreadPoolExecutor(len(QUESTIONS)) as pool:
                answers = [*pool.map(_asking(app), QUESTIONS)]
        except Exception:  # transports raise what they like
            return None
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
        )


def _asking(app: Celery) -> Callable[[str], Mapping[str, Any]]:
    def ask(question: str) -> Mapping[str, Any]:
        with app.connection_for_write() as connection:
            inspect: Any = app.control.inspect(timeout=TIMEOUT, connection=connection)
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
