"""What the workers of an app answer when they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

#: Seconds to wait for the answers of all workers.
TIMEOUT = 1.0


@dataclass(frozen=True, slots=True)
class Workers:
    """What all workers that answer run and know."""

    running: Mapping[str, str]  #: task id -> worker
    known_tasks: Mapping[str, frozenset[str]]  #: worker -> tasks
    versions: Mapping[str, str]  #: worker -> its singlebeat; empty: it has none, or no server for its locks

    @classmethod
    def ask(cls, app: Celery, *, versions: bool = False) -> Workers | None:
        """Ask all workers; None: the broker does not answer.

        Args:
            versions: ask for them, too, which takes ``TIMEOUT`` seconds more.
        """
        try:
            with app.connection_for_write() as connection:
                # First, because Celery would try for ever to send the question.
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=TIMEOUT)
                inspect: Any = app.control.inspect(timeout=TIMEOUT, connection=connection)
                known, active = inspect.registered() or {}, inspect.active() or {}
                stats = (inspect.stats() or {}) if versions else {}
        except Exception:  # transports raise what they like
            return None
        running = {run["id"]: worker for worker, runs in active.items() for run in runs}
        return cls(
            running,
            {worker: frozenset(tasks) for worker, tasks in known.items()},
            {worker: stat.get("singlebeat", {}).get("version", "") for worker, stat in stats.items()},
        )
