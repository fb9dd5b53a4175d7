"""No locks at all: a run asks all workers whether an equal one started earlier."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from celery import current_task

from ..config import Config
from ..errors import LockBackendError
from .base import BaseBackend, Call, Holder, Ref, Renewal, Verdict
from .key import readable

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("InspectBackend",)

#: How often a run asks that is not the first: the one before it may be about to end, or to be skipped itself.
ROUNDS = 2


def _pids() -> set[int]:
    """Return what a pool may call the process of the current task; gevent's and eventlet's mean its greenlet."""
    greenlet = sys.modules.get("greenlet")
    return {os.getpid(), *([id(greenlet.getcurrent())] if greenlet is not None else [])}


class _Run(NamedTuple):
    """A task that a worker runs; the lesser one started first, and no two are equal."""

    start: float
    task_id: str
    node: str
    pid: int
    key: str  #: of its lock; empty: it is no Singleton
    task: str
    arguments: str


class InspectBackend(BaseBackend):
    """Excludes equal runs without Redis: every call is sent, and at its start it asks all workers through the broker.

    Of equal runs the one with the least (``time_start``, task id) goes on; the others meet a lock that is held. It
    acts when tasks start, so ``lock`` should be ``while_executing`` (``overlap`` ``skip`` or ``buffer_all``) or
    ``until_executed`` (``skip``): nothing is known of calls that wait in a queue.

    ``time_start`` is the wall clock of the worker's host at the moment when its pool took the task: Celery computes it
    from a monotonic clock, once. Of two runs that start at once, both see the same figures, so never do all of them
    give up. What can go wrong, and then runs are doubled, never lost:

    - two start at once, and their hosts' clocks differ, or a worker takes note of a start, by more than ``settle``;
    - a worker does not answer within ``timeout``. One with the solo pool never does while it runs a task, nor do gevent
      and eventlet while a task blocks their loop;
    - a message that the broker delivers again waits while its first delivery runs, and runs when that has ended;
    - a worker is cut off from the broker: it goes on, and nobody sees it.

    A call may be skipped for one that ended, or was skipped itself, while it asked. Every start takes ``settle`` +
    ``timeout`` seconds, a skipped one twice as long. ``lock_and_run`` with a key of its own excludes
    nobody, there are no fencing numbers, plain tasks that beat dispatches are not excluded, and arguments must be
    encodable by ``task_serializer``.

    Args:
        app: whose workers are asked.
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
        lease: float,
        remember_for: float,
        task: str,
        arguments: str,
        expiry: float | None = None,
        entry: str = "",
    ) -> Holder:
        """Start a run unless an equal one started earlier: STARTED, or HELD or COPY, and then it must not start."""
        node, began = current_task.request.hostname if current_task else "", time.time()
        earlier: list[_Run] = []
        for _ in range(ROUNDS):
            time.sleep(self.settle)
            equal = [run for run in self._runs(task) if ref.key == run.key or ref.task_id == run.task_id]
            ours = [run for run in equal if run.task_id == ref.task_id and run.pid in _pids()]
            # In a worker that was not started by its command a task knows only the last part of its node's name. Two
            # deliveries of our message may run in the threads of this process: we are the last so far.
            own = max((run for run in ours if run.node.endswith(node) and run.start <= began), default=None)
            earlier = sorted(run for run in equal if own and run < own)
            if not earlier and (own or not equal):
                break
        if not earlier:  # at worst our own worker has not answered: then the others see us, and we do not give up, too
            return Holder(Verdict.STARTED, ref.task_id, "running", datetime.fromtimestamp(began, UTC), 0, lease)
        first = earlier[0]
        # A retry may start while the run that has sent it ends: it waits its turn, as behind any other.
        verdict = Verdict.COPY if first.task_id == ref.task_id and ref.generation < 1 else Verdict.HELD
        return Holder(verdict, first.task_id, "running", datetime.fromtimestamp(first.start, UTC), 0, lease)

    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Return RUNNING for each: what runs is seen to run."""
        return [Renewal.RUNNING] * len(refs)

    def finish_many(self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False) -> None:
        """Do nothing: what has ended is not seen to run."""

    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Do nothing: a retry asks for itself."""
        return True

    def promise(self, run: Ref, *, to: Ref | None, ttl: float) -> bool:
        """Do nothing: a retry asks for itself."""
        return True

    def announce(self, worker: str, *, ttl: float) -> None:
        """Do nothing: see ``workers_seen``."""

    def workers_seen(self) -> bool:
        """Return False: the process that would ask for a plain task is the one that has to answer."""
        return False

    def get(self, lock: str) -> str | None:
        """Return the id of the run that started first of those with this key, or None."""
        first = min((run for run in self._runs() if run.key == lock), default=None)
        return first.task_id if first else None

    def unlock(self, lock: str) -> None:
        """Do nothing: a run cannot be made unseen."""

    def clear(self, key_prefix: str) -> None:
        """Do nothing: a run cannot be made unseen."""

    def locks(self, key_prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the key of every Singleton that runs, and what is known of the run that started first."""
        first = {run.key: run for run in sorted(self._runs(), reverse=True)}
        for key, run in first.items():
            if key and key.startswith(key_prefix):
                yield key, {"id": run.task_id, "state": "running", "task": run.task, "args": run.arguments}

    def _runs(self, task: str | None = None) -> list[_Run]:
        """Return what all workers run, of one task or of all."""
        return [
            _Run(
                row["time_start"],
                row["id"],
                row["hostname"],
                row["worker_pid"],
                self._key(row),
                row["type"],
                readable(row["args"] or (), row["kwargs"] or {}),
            )
            for row in self._ask()
            if task in (None, row["type"]) and row["time_start"] is not None
        ]

    def _ask(self) -> list[Mapping[str, Any]]:
        """Ask all workers what they run.

        Raises:
            LockBackendError: the broker cannot be reached.
        """
        try:
            with self.app.connection_for_write() as connection:
                # First, because Celery would try for ever to send the question.
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=self.timeout)
                answers = self.app.control.inspect(timeout=self.timeout, connection=connection).active() or {}
        except Exception as exc:  # transports raise what they like
            raise LockBackendError(f"the workers cannot be asked what they run: {exc}") from exc
        return [row for answer in answers.values() if isinstance(answer, list) for row in answer]

    def _key(self, row: Mapping[str, Any]) -> str:
        generate = getattr(self.app.tasks.get(row["type"]), "generate_lock", None)
        try:
            return str(generate(row["type"], row["args"], row["kwargs"])) if generate else ""
        except Exception:  # a task's own key function may do anything, and what has no key is like no other
            return ""
