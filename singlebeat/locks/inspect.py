"""A backend without locks: a run asks all workers whether a duplicate started earlier."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from celery import current_task
from celery.exceptions import SoftTimeLimitExceeded

from ..config import Config
from ..errors import LockBackendError
from .base import BaseBackend, Call, Holder, Ref, Renewal, Verdict
from .key import readable

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("InspectBackend",)

#: How often a run asks if it is not the first, because an earlier run may be about to end, or to be skipped itself.
ROUNDS = 2


def _pids() -> set[int]:
    """Return the pids that a pool may report for the current task; gevent and eventlet pools report its greenlet."""
    greenlet = sys.modules.get("greenlet")
    return {os.getpid(), *([id(greenlet.getcurrent())] if greenlet is not None else [])}


class _Run(NamedTuple):
    """A run of a task on a worker; runs sort by their start, and no two runs are equal."""

    start: float
    task_id: str
    node: str
    pid: int
    key: str  #: key of its lock; empty: the task is no Singleton
    task: str
    arguments: str


class InspectBackend(BaseBackend):
    """A lock backend without Redis: every call is sent, and each run asks all workers at its start, through the broker.

    Of duplicate runs, the run with the least (``time_start``, task id) goes on; the others are told that the lock is
    held. The backend acts only when tasks start, and does not know queued calls. So ``lock`` should be
    ``while_executing`` (``overlap`` ``skip`` or ``buffer_all``) or ``until_executed`` (``skip``).

    ``time_start`` is the wall clock of the worker's host when its pool accepted the task. Celery computes it once, from
    a monotonic clock. Two runs that start at once see the same values, so that never all runs give up. In these cases
    duplicates run, but no run is lost:

    - two runs start at once, and their hosts' clocks differ by more than ``settle``, or a worker registers a start
      later than ``settle``;
    - a worker does not answer within ``timeout``. A worker with the solo pool never answers while it runs a task, nor
      do gevent and eventlet while a task blocks their loop;
    - a redelivered message waits while its first delivery runs, and runs after it;
    - a worker loses the broker: its runs go on, and no other worker sees them.

    A call may be skipped because of a run that ended, or was skipped itself, while the call asked. Every start takes
    ``settle`` + ``timeout`` seconds, a skipped start twice as long. ``lock_and_run`` with its own key excludes no other
    run. There are no fencing numbers. Plain tasks that beat dispatches are not excluded. ``task_serializer`` must be
    able to encode the arguments.

    Args:
        app: app whose workers are asked.
        timeout: seconds to wait for a further answer.
        settle: seconds to wait before asking.
    """

    replaces = False

    def __init__(self, app: Celery, *, timeout: float = 1.0, settle: float = 0.25) -> None:
        self.app, self.timeout, self.settle = app, timeout, settle

    @classmethod
    def of_app(cls, app: Celery, *, own_connections: bool = False) -> Self:
        """Return the backend of an app."""
        return cls(app, **Config.of(app).singleton_backend_kwargs)

    def acquire_many(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Let every call be sent: always ACQUIRED."""
        now = datetime.now(UTC)
        return [Holder(Verdict.ACQUIRED, call.ref.task_id, "queued", now, 0, call.ttl) for call in calls]

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
        """Start a run (STARTED) unless a duplicate started earlier; with HELD or COPY it must not start."""
        node, began = current_task.request.hostname if current_task else "", time.time()
        earlier: list[_Run] = []
        for _ in range(ROUNDS):
            time.sleep(self.settle)
            equal = [run for run in self._runs(task) if ref.key == run.key or ref.task_id == run.task_id]
            ours = [run for run in equal if run.task_id == ref.task_id and run.pid in _pids()]
            # If the celery command did not start the worker, a task knows only the last part of its node's name. Two
            # deliveries of our message may run in the threads of this process: ours is the last so far.
            own = max((run for run in ours if run.node.endswith(node) and run.start <= began), default=None)
            earlier = sorted(run for run in equal if own and run < own)
            if not earlier and (own or not equal):
                break
        if not earlier:  # also if our own worker has not answered: the other runs see ours and give up
            return Holder(Verdict.STARTED, ref.task_id, "running", datetime.fromtimestamp(began, UTC), 0, lease)
        first = earlier[0]
        # A retry may start before the run that sent it has ended; it waits for its turn, as behind any other run.
        verdict = Verdict.COPY if first.task_id == ref.task_id and ref.generation < 1 else Verdict.HELD
        return Holder(verdict, first.task_id, "running", datetime.fromtimestamp(first.start, UTC), 0, lease)

    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Return RUNNING for each request: there is nothing to renew."""
        return [Renewal.RUNNING] * len(refs)

    def finish_many(
        self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False, took: bool = False, unsent: bool = False
    ) -> Sequence[Ref]:
        """Do nothing: workers no longer report a run that has ended."""
        return ()

    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Do nothing: a retry asks the workers at its own start."""
        return True

    def promise(self, run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
        """Do nothing: a retry asks the workers at its own start."""
        return True

    def announce(self, worker: str, *, ttl: float) -> None:
        """Do nothing: see ``workers_seen``."""

    def workers_seen(self) -> bool:
        """Return False: for a plain task, the worker process that asks would also have to answer."""
        return False

    def get(self, lock: str) -> str | None:
        """Return the task id of the first run with this key, or None."""
        first = min((run for run in self._runs() if run.key == lock), default=None)
        return first.task_id if first else None

    def unlock(self, lock: str, holder: str = "") -> None:
        """Do nothing: a run cannot be hidden from the workers."""

    def clear(self, key_prefix: str) -> None:
        """Do nothing: a run cannot be hidden from the workers."""

    def locks(self, key_prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the key of every running Singleton, and a record of the run that started first."""
        first = {run.key: run for run in sorted(self._runs(), reverse=True)}
        for key, run in first.items():
            if key and key.startswith(key_prefix):
                yield key, {"id": run.task_id, "state": "running", "task": run.task, "args": run.arguments}

    def _runs(self, task: str | None = None) -> list[_Run]:
        """Return the runs on all workers, of one task or of all tasks."""
        return [
            _Run(
                row["time_start"],
                row["id"],
                row["hostname"],
                row["worker_pid"],
                self._key(row),
                row["type"],
                readable(row["args"] or (), row["kwargs"] or {}, app=self.app, task=row["type"]),
            )
            for row in self._ask()
            if task in (None, row["type"]) and row["time_start"] is not None
        ]

    def _ask(self) -> list[Mapping[str, Any]]:
        """Ask all workers for the tasks that they run.

        Raises:
            LockBackendError: the broker cannot be reached.
        """
        try:
            with self.app.connection_for_write() as connection:
                # Connect first, because Celery would retry for ever to send the question.
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=self.timeout)
                answers = self.app.control.inspect(timeout=self.timeout, connection=connection).active() or {}
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # transports may raise any error
            raise LockBackendError(f"the workers cannot be asked what they run: {exc}") from exc
        return [row for answer in answers.values() if isinstance(answer, list) for row in answer]

    def _key(self, row: Mapping[str, Any]) -> str:
        generate = getattr(self.app.tasks.get(row["type"]), "generate_lock", None)
        try:
            return str(generate(row["type"], row["args"], row["kwargs"])) if generate else ""
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # a task's own key function may raise any error, and a run without a key has no duplicates
            return ""
