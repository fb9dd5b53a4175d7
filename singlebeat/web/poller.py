"""Reads the state of a schedule once in two seconds at most, for all viewers of a process."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..beat.keys import Keys
from ..beat.status import MAX_LAG, ScheduleStatus
from ..beat.store.probe import lock_trouble, schedule_server_says, ticks_refusal
from ..connections import RedisError, schedule_client, schedule_place

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("EVERY", "Poller", "Snapshot")

#: Seconds for which what was read serves all viewers; a page asks as often.
EVERY = 2.0

#: Seconds after which a page is shown anew even if nothing seems to have changed: another program may have written.
AT_LEAST_EVERY = 10

#: Seconds between two checks of what the server refuses: such a check tries every command, and writes.
PROBED_EVERY = 10.0

#: What was read for the views of one moment, at most.
MOST_KEPT = 64


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a schedule at one moment."""

    state: ScheduleStatus | None  #: None: the schedule's server does not answer
    problem: str  #: why nothing may be sent, in words; empty if all is well
    stamp: str  #: differs if anything has changed that a page shows
    read_at: float = 0.0  #: in seconds of this process's monotonic clock


class Poller:
    """The last snapshot of a schedule, and what views have read for it.

    Args:
        may_write: its user has the rights of a beat, so that a refusal concerns beats, too.
        clock: monotonic seconds.
    """

    def __init__(self, app: Celery, *, may_write: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.app, self._may_write, self._clock = app, may_write, clock
        self._refused, self._probed_at = "", -PROBED_EVERY
        self._lock, self._read_at = threading.Lock(), -EVERY
        self._snapshot = Snapshot(None, "", "")
        self._kept: OrderedDict[object, tuple[float, Any]] = OrderedDict()
        self._locks: dict[object, threading.Lock] = {}

    def snapshot(self) -> Snapshot:
        """Return the state, which is ``EVERY`` seconds old at most."""
        with self._lock:
            if self._clock() - self._read_at >= EVERY:
                self._snapshot, self._read_at = self._read(), self._clock()
            return self._snapshot

    def forget(self) -> None:
        """Let the next viewer read anew: a change was made here."""
        with self._lock:
            self._read_at = -EVERY
            self._kept.clear()

    def shared(self, key: object, read: Callable[[], Any], *, seconds: float = EVERY) -> Any:
        """Return what was read under a key within the last seconds, by any viewer; else read it."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # viewers of the same wait for one of them
            with self._lock:
                if (found := self._kept.get(key)) is not None and self._clock() < found[0]:
                    return found[1]
            try:
                value = read()
            finally:
                with self._lock:
                    self._locks.pop(key, None)
            with self._lock:
                self._kept[key] = self._clock() + seconds, value
                self._kept.move_to_end(key)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            return value

    def _read(self) -> Snapshot:
        try:
            state = ScheduleStatus.of(self.app)
            last = self._last_ids()
        except RedisError as exc:
            problem = f"the schedule's server {schedule_place(self.app)}: {schedule_server_says(self.app, exc)}"
            return Snapshot(None, problem, problem)
        behind = state.behind if state.lag > MAX_LAG else ""
        problem = self._refusal() or state.problem() or state.unlike or state.sent_elsewhere or behind or state.lost
        facts = (
            {name: value for name, value in state.leader.items() if name not in {"took", "ahead"}},
            [beat.get("host", "") + beat.get("pid", "") for beat in state.standbys],
            *(state.entries, state.overdue, state.pending, state.quarantine, state.pauses, problem, last),
            int(self._clock()) // AT_LEAST_EVERY,
        )
        stamp = hashlib.sha256(repr(facts).encode(errors="replace")).hexdigest()[:16]
        return Snapshot(state, problem, stamp, time.monotonic())

    def _refusal(self) -> str:
        """Return what the servers refuse to beats, as it was at the last check; empty if that is not known."""
        if self._may_write and self._clock() - self._probed_at >= PROBED_EVERY:
            self._refused, self._probed_at = ticks_refusal(self.app) or lock_trouble(self.app), self._clock()
        return self._refused

    def _last_ids(self) -> list[str]:
        """Return the ids of the last decision, of the last end of a run and of the last change."""
        keys = Keys.of(self.app)
        with schedule_client(self.app).pipeline(transaction=False) as pipe:
            for key in (keys.history, keys.runs, keys.changes):
                pipe.xrevrange(key, count=1)
            return [row[0][0] if row else "" for row in pipe.execute()]
