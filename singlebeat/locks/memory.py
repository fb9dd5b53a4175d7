"""Locks in the memory of one process, for eager calls and for the tests of users."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

from .base import BaseBackend, Call, Holder, IfHeld, Ref, Renewal, Verdict
from .key import behind_key, turn_key

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("MemoryBackend",)

#: Seconds that a call may wait until no newer one overtakes it, as in ``begin.lua``.
PATIENCE = 30.0

#: Remembered in place of an ended generation: the task id was evicted before it started.
REPLACED = -1

#: Remembered with the name of a delivery: its run ended without its lock.
LOST = -2

#: Remembered with id, generation and name of a delivery, for a minute: its run has ended.
OVER = -3

_memories: WeakKeyDictionary[Celery, BaseBackend] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Record:
    """The record of a lock, as the hash in Redis."""

    task_id: str
    generation: float
    state: str
    nonce: str
    fence: int
    task: str
    arguments: str
    since: float
    expires: float
    until: float | None
    payload: str
    if_held: str = ""  #: the ``IfHeld`` of its call
    entry: str = ""
    uncut: float = 0.0  #: time until which its message may wait, if ``until`` is earlier
    taken: float = 0.0  #: time since which this call, or a call that it evicted, waits behind the lock
    took_free: bool = False  #: its run has not held it since its call
    promised: tuple[float, float] | None = None  #: generation that gets the lock when the run ends, and its ttl (s)


class MemoryBackend(BaseBackend):
    """A lock backend in the memory of this process, with the verdicts of ``RedisBackend``.

    Args:
        clock: returns the time in seconds since 1970.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._mutex = threading.RLock()
        self._records: dict[str, _Record] = {}
        self._done: dict[str, dict[tuple[str, float], float]] = {}
        #: By lock, since when what follows the run of an id and generation may be unsent.
        self._unsent: dict[str, dict[tuple[str, float], float]] = {}
        self._announced = (0.0, "")
        self._last_fence = 0

    @classmethod
    def of_app(cls, app: Celery, *, own_connections: bool = False) -> Self:
        """Return the backend of an app in this process."""
        if app not in _memories:
            _memories[app] = super().of_app(app)
        memory = _memories[app]
        assert isinstance(memory, cls)  # noqa: S101 - for the type checker
        return memory

    def acquire_many(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Acquire the locks of calls that are about to be sent."""
        with self._mutex:
            return [self._acquire(call, may_be_resent=may_be_resent) for call in calls]

    def _acquire(self, call: Call, *, may_be_resent: bool) -> Holder:  # noqa: PLR0912 - as in acquire.lua
        ref, behind = call.ref, replace(call.ref, key=behind_key(call.ref.key))
        turn = replace(ref, key=turn_key(ref.key))
        has_ended = any(self._ended(ref.key, ref.task_id, ended) for ended in (ref.generation, REPLACED))
        has_ended = has_ended or self._unsent_since(ref) > -math.inf
        if may_be_resent and has_ended:
            return self._holder(Verdict.DONE, ref)
        now, holder, waiting = self._clock(), self._live(ref.key), self._live(behind.key)
        taken, uncut = waiting.taken if waiting else now, now + call.ttl
        if holder and holder.task_id == ref.task_id:
            if holder.state == "running":
                is_replaced = holder.generation < ref.generation
                return self._holder(Verdict.HELD if is_replaced else Verdict.RUNNING, ref)
            self._put(ref.key, replace(holder, uncut=uncut), call.ttl)
            return self._holder(Verdict.ACQUIRED, ref)
        by_itself = self._live(turn.key)
        in_turn = by_itself is not None and by_itself.task_id != ref.task_id
        if waiting and waiting.task_id == ref.task_id:
            if not call.if_held.replaces or in_turn or (holder and holder.state != "queued"):
                self._put(behind.key, replace(waiting, if_held=call.if_held, uncut=uncut), call.ttl)
                return self._holder(Verdict.WAITING, ref)
            del self._records[behind.key]
            waiting = None

        if (holder or waiting or in_turn) and call.if_held is IfHeld.LEAVE:
            return self._holder(Verdict.HELD, ref if holder else behind if waiting else turn)
        last, record = (behind, waiting) if waiting else (ref, holder)  # the last of the holder and the waiting call
        has_not_started = record is not None and (record is waiting or record.state == "queued")
        joins = call.if_held is IfHeld.JOIN and has_not_started
        if record and joins and (record.if_held not in {"", IfHeld.REPLACE_ALONE} or not call.payload):
            if call.payload:  # the new arguments last until it starts: its expiry counts from then on
                expires = max(record.expires, record.uncut if record.until else 0.0)
                self._records[last.key] = replace(record, payload=call.payload, until=None, expires=expires)
            else:
                self._records[last.key] = replace(record, payload="")
            return self._holder(Verdict.HELD, last)
        if call.if_held.replaces:
            if waiting:
                self._replace(ref.key, behind.key, call.ttl)
                waiting = None
            if holder and holder.state == "queued":
                self._replace(ref.key, ref.key, call.ttl)
                holder = None
        must_wait = bool(holder or waiting or in_turn)
        if waiting and waiting.if_held == IfHeld.REPLACE_ALONE and by_itself is None:
            self._records[turn.key] = replace(waiting, since=waiting.taken, payload="", if_held="")
            taken = now
        elif not in_turn:
            self._records.pop(turn.key, None)
        if has_ended:
            for ends in (self._done.get(ref.key, {}), self._unsent.get(ref.key, {})):
                for task_id, ended in [*ends]:
                    if task_id == ref.task_id and (ended == REPLACED or ended >= ref.generation):
                        del ends[task_id, ended]
        until = now + call.expiry if call.expiry else None
        owner = (ref.task_id, ref.generation, call.state, "")
        record = _Record(*owner, 0, call.task, call.arguments, now, now, until, "", call.if_held, call.entry)
        record = replace(record, uncut=uncut, taken=taken)
        self._put(behind.key if must_wait else ref.key, record, call.ttl)
        return self._holder(Verdict.WAITING if must_wait else Verdict.ACQUIRED, ref)

    def _replace(self, lock: str, place: str, ttl: float) -> None:
        record = self._records.pop(place)
        self._remember(lock, record.task_id, REPLACED, max(ttl, record.expires - self._clock()))

    def begin(  # noqa: PLR0912, PLR0915 - a table of cases, as in begin.lua
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
        """Start a run, or return the verdict that forbids the start."""
        with self._mutex:
            now, record = self._clock(), self._live(ref.key)
            if self._ended(ref.key, ref.task_id, ref.generation):
                return self._holder(Verdict.DONE, ref)
            if self._ended(ref.key, ref.task_id, REPLACED):
                return self._holder(Verdict.REPLACED, ref)
            if self._unsent_since(ref) > now - lease:
                return self._holder(Verdict.COPY, ref)
            behind, turn = replace(ref, key=behind_key(ref.key)), replace(ref, key=turn_key(ref.key))
            place, by_itself = self._live(behind.key), self._live(turn.key)
            is_behind = place is not None and place.task_id == ref.task_id
            is_in_turn = by_itself is not None and by_itself.task_id == ref.task_id
            since = max(now, place.taken + 0.001) if place else now  # later than the call that waits already
            if by_itself and is_in_turn:
                since = by_itself.since
            elif waits_since > 0:
                since = min(now, waits_since)
            is_older = bool(by_itself and not is_in_turn and waits_since > 0 and since < by_itself.since)
            is_patient = by_itself is None or is_older or now - by_itself.since <= PATIENCE
            is_patient = is_patient and bool(turn_ttl)
            turn_is_first = by_itself is not None and (place is None or by_itself.since <= place.taken)
            is_first = is_in_turn and turn_is_first
            if place and not is_in_turn and (by_itself is None or is_older):  # it has waited for longer than that call
                is_first = turn_ttl > 0 and waits_since > 0 and since <= place.taken
            other_waits = place is not None and not is_behind and bool(place.if_held)
            is_newer = record is not None and record.task_id != ref.task_id and record.state == "queued"
            if record and overtakes and is_newer and not (record.fence or record.payload):
                record = None
            held_by = None
            if record and record.task_id != ref.task_id:
                held_by = ref
            elif record is None and other_waits and not is_first:
                held_by = behind
            elif record is None and by_itself and not is_in_turn and (turn_is_first if is_behind else not is_patient):
                held_by = turn
            if held_by:
                holder, held_for = self._holder(Verdict.HELD, held_by), 0.0
                may_be_older = not other_waits and (held_by is turn or self._records[held_by.key].took_free)
                holder = replace(holder, may_be_older=may_be_older, has_heir=other_waits)
                if yields and other_waits:
                    if is_in_turn:
                        del self._records[turn.key]
                elif turn_ttl and not is_behind and (by_itself is None or is_in_turn or is_older):
                    new = _Record(
                        ref.task_id, ref.generation, "queued", "", 0, task, arguments, since, now, None, "", entry=entry
                    )
                    kept = by_itself if by_itself and is_in_turn else new
                    self._put(turn.key, replace(kept, generation=ref.generation), turn_ttl)
                    held_for = max(0.001, now - holder.since.timestamp()) if holder.since else 0.001
                elif turn_ttl and place and is_behind:
                    self._put(behind.key, place, max(turn_ttl, place.expires - now))
                return replace(holder, waits_since=since, held_for=held_for)
            if record and record.generation > ref.generation:
                return self._holder(Verdict.STALE, ref)
            is_retry = record is not None and math.floor(record.generation) < math.floor(ref.generation)
            if record and record.state == "running" and is_retry:
                return self._holder(Verdict.HELD, ref)
            same_retry = record is not None and math.floor(record.generation) == math.floor(ref.generation)
            if record and same_retry and record.state == "running":
                same = (record.generation, record.nonce) == (ref.generation, ref.nonce)
                return self._started(ref) if same else self._holder(Verdict.COPY, ref)
            if record and record.generation < ref.generation:
                self._remember(ref.key, record.task_id, record.generation, remember_for)
                record = replace(record, payload="")
            if record is None:
                record = _Record(ref.task_id, 0, "", "", 0, task, arguments, now, now, None, "", entry=entry)
                waiting = self._live(queued) if queued not in {"", ref.key} else None
                has_waited = is_behind or (waiting is not None and waiting.task_id == ref.task_id)
                record = replace(record, took_free=not has_waited)
            if record.until is None and expiry:
                record = replace(record, until=now + expiry)
            waiting = self._live(queued) if queued and queued != ref.key else None
            if waiting and waiting.task_id == ref.task_id:
                record = replace(record, payload=waiting.payload or record.payload)
                del self._records[queued]
            if place and place.task_id == ref.task_id:
                record = replace(record, if_held=place.if_held)
                self._records.pop(behind.key, None)
            if is_in_turn:
                self._records.pop(turn.key, None)
            self._last_fence = fence = max(int(now * 1_000_000), self._last_fence + 1)
            record = replace(
                record,
                generation=ref.generation,
                state="running",
                nonce=ref.nonce,
                since=now,
                fence=fence,
                promised=None,
            )
            self._put(ref.key, record, lease)
            return self._started(ref)

    def _started(self, ref: Ref) -> Holder:
        return replace(self._holder(Verdict.STARTED, ref), payload=self._records[ref.key].payload)

    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Hand a run's lock over to a waiting message of the same task id."""
        with self._mutex:
            record = self._live(ref.key)
            if record is None or (record.task_id, record.nonce) != (ref.task_id, ref.nonce):
                repeated = (ref.task_id, to.generation, "")
                return record is not None and (record.task_id, record.generation, record.nonce) == repeated
            payload = record.payload
            if to.generation > record.generation:
                self._remember(ref.key, ref.task_id, record.generation, remember_for)
                payload = ""
            self._hand_over(ref.key, replace(record, payload=payload), to.generation, ttl)
            return True

    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Renew the locks of live requests."""
        with self._mutex:
            return [self._renew(ref, lease) for ref in refs]

    def _renew(self, ref: Ref, lease: float) -> Renewal:
        record = self._live(ref.key)
        has_ended, is_over = self._ended(ref.key, ref.task_id, ref.generation), self._ended(ref.key, _run_of(ref), OVER)
        if is_over and not has_ended and self._unsent_since(ref) > -math.inf:
            self._unsent[ref.key][ref.task_id, ref.generation] = self._clock()
            return Renewal.LOST if self._ended(ref.key, ref.nonce, LOST) else Renewal.RUNNING
        if has_ended or is_over:
            return Renewal.LOST if self._ended(ref.key, ref.nonce, LOST) else Renewal.OVER
        if record is None or (record.task_id, record.generation) != (ref.task_id, ref.generation):
            return Renewal.LOST
        if record.state == "running" and record.nonce != ref.nonce:
            return Renewal.LOST
        if lease:
            left = record.expires - self._clock()
            self._put(ref.key, record, lease if record.state == "running" else max(lease, left))
        return Renewal.RUNNING if record.state == "running" else Renewal.QUEUED

    def promise(self, run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
        """Promise a run's lock to its own retry, for when the run ends."""
        with self._mutex:
            record = self._live(run.key)
            if record is None or (record.task_id, record.nonce, record.state) != (run.task_id, run.nonce, "running"):
                return False
            self._records[run.key] = replace(record, promised=(to.generation, ttl) if to else None)
            return True

    def finish_many(
        self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False, took: bool = False, unsent: bool = False
    ) -> Sequence[Ref]:
        """Free the locks of requests that are over, and return those that have lost them before."""
        with self._mutex:
            return tuple(
                ref for ref in refs if self._finish(ref, remember_for, ran=ran or took, took=took, unsent=unsent)
            )

    def _finish(self, ref: Ref, remember_for: float, *, ran: bool, took: bool, unsent: bool) -> bool:
        """Free the lock of a request that is over; return whether it was lost before."""
        if self._ended(ref.key, _run_of(ref), OVER):  # the main process repeats it; a new call may have the same id
            if ran and not unsent and self._unsent_since(ref) > -math.inf:
                self._remember(ref.key, ref.task_id, ref.generation, remember_for)
            return self._ended(ref.key, ref.nonce, LOST)
        by_itself = self._live(turn_key(ref.key))
        if by_itself and by_itself.task_id == ref.task_id and by_itself.generation <= ref.generation:
            del self._records[turn_key(ref.key)]
        record = self._live(ref.key)
        ours = record is not None and (record.task_id, record.generation) == (ref.task_id, ref.generation)
        promised = record.promised[0] if record and record.promised else None
        if record and not ours and (record.task_id, promised) == (ref.task_id, ref.generation):
            record = self._records[ref.key] = replace(record, promised=None)
        holds = ours and record is not None and record.state == "running" and record.nonce == ref.nonce
        unstarted = ours and record is not None and record.state != "running"
        has_ended = self._ended(ref.key, ref.task_id, ref.generation)
        is_lost = self._ended(ref.key, ref.nonce, LOST)
        is_lost |= took and bool(ref.nonce) and not (holds or unstarted or has_ended)
        if remember_for > 0 and not has_ended and (holds or (ran and (unstarted or not ours))):
            if unsent:
                self._unsent.setdefault(ref.key, {})[ref.task_id, ref.generation] = self._clock()
            else:
                self._remember(ref.key, ref.task_id, ref.generation, remember_for)
            if ref.nonce:
                self._remember(ref.key, _run_of(ref), OVER, remember_for if unsent else min(60.0, remember_for))
        if remember_for > 0 and is_lost:
            self._remember(ref.key, ref.nonce, LOST, remember_for)
        if record is None or not (holds or unstarted):
            return is_lost
        if holds and record.promised:
            self._hand_over(ref.key, replace(record, payload="", promised=None), *record.promised)
        else:
            del self._records[ref.key]
        return False

    def _hand_over(self, key: str, record: _Record, generation: float, ttl: float) -> None:
        now = self._clock()
        handed = replace(record, generation=generation, nonce="", state="queued", since=now, uncut=now + ttl)
        self._put(key, handed, ttl)

    def announce(self, worker: str, *, ttl: float) -> None:
        """Record that a worker is alive that releases the locks of its tasks."""
        self._announced = (self._clock() + ttl, worker)

    def workers_seen(self) -> bool:
        """Return whether such a worker was seen recently."""
        return self._announced[0] > self._clock()

    def get(self, lock: str) -> str | None:
        """Return the task id that holds a lock, or None."""
        record = self._live(lock)
        return record.task_id if record else None

    def unlock(self, lock: str, holder: str = "") -> None:
        """Free a lock, of any holder or of one task id alone."""
        with self._mutex:
            if not holder or self.get(lock) == holder:
                self._records.pop(lock, None)

    def clear(self, key_prefix: str) -> None:
        """Free every lock under a prefix, regardless of its holder; which runs have ended stays known."""
        with self._mutex:
            for key in [key for key in self._records if key.startswith(key_prefix)]:
                del self._records[key]

    def locks(self, key_prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield every lock under a prefix and its record."""
        for key in [key for key in self._records if key.startswith(key_prefix)]:
            if record := self._live(key):
                run = {"gen": str(record.generation), "nonce": record.nonce}
                about = {"id": record.task_id, "state": record.state, "task": record.task, "args": record.arguments}
                about |= {"entry": record.entry} if record.entry else {}
                yield key, {**about, **run}

    def _live(self, key: str) -> _Record | None:
        record = self._records.get(key)
        if record is not None and record.expires <= self._clock():
            del self._records[key]
            return None
        return record

    def _put(self, key: str, record: _Record, ttl: float) -> None:
        expires = self._clock() + ttl
        self._records[key] = replace(record, expires=min(expires, record.until) if record.until else expires)

    def _ended(self, key: str, task_id: str, generation: float) -> bool:
        return self._done.get(key, {}).get((task_id, generation), 0.0) > self._clock()

    def _unsent_since(self, ref: Ref) -> float:
        return self._unsent.get(ref.key, {}).get((ref.task_id, ref.generation), -math.inf)

    def _remember(self, key: str, task_id: str, generation: float, remember_for: float) -> None:
        now = self._clock()
        ended = {run: until for run, until in self._done.get(key, {}).items() if until > now}
        self._done[key] = {**ended, (task_id, generation): now + remember_for}

    def _holder(self, verdict: Verdict, ref: Ref) -> Holder:
        record = self._live(ref.key)
        if record is None:
            return Holder(verdict, ref.task_id, "", None, 0, 0.0)
        since, left = datetime.fromtimestamp(record.since, UTC), max(0.0, record.expires - self._clock())
        return Holder(verdict, record.task_id, record.state, since, record.fence, left, entry=record.entry)


def _run_of(ref: Ref) -> str:
    """Return the name of one delivery of a message, as an id for ``OVER``."""
    return f"{ref.task_id}:{ref.generation}:{ref.nonce}"
