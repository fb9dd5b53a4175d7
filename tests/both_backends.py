"""The lock backends in Redis and in memory, which must agree: the one in memory is the model of the scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from singlebeat.locks.base import BaseBackend, Holder, read_generation
from singlebeat.locks.key import behind_key, done_key, turn_key
from singlebeat.locks.memory import LOST, OVER, REPLACED, MemoryBackend
from singlebeat.locks.redis import RedisBackend

#: Seconds that the two may be apart on a slow machine. Lifetimes that a test tells apart differ by more.
SLACK = 100.0

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """The record of a call at a lock, or at one of the two places where calls wait for it."""

    id: str
    gen: float
    state: str
    nonce: str
    payload: str
    if_held: str


@dataclass(frozen=True)
class Stored:
    """The stored data of a lock."""

    holder: Record | None
    behind: Record | None  #: the call that waits for the end of the holder
    turn: Record | None  #: the call that waits for the end of the holder, and runs by itself
    over: set[tuple[str, float]]  #: generations that ended, or handed over
    replaced: set[str]  #: task ids that were evicted while they waited
    lost: set[str]  #: deliveries whose runs ended without their lock
    ended: set[str]  #: deliveries whose ends are remembered
    unsent: set[tuple[str, float]]  #: generations that ended before it was known that what follows them was sent


class BothBackends:
    """A backend in Redis and one in memory: they are asked the same, and their answers must be equal."""

    def __init__(self, url: str) -> None:
        self.redis, self.memory = RedisBackend(url), MemoryBackend()
        self._redis_fences, self._memory_fences = [0], [0]

    def ask(self, verb: Callable[[BaseBackend], T]) -> T:
        """Return the answer of both; their times may differ, and their fences must only rise alike."""
        in_redis, in_memory = verb(self.redis), verb(self.memory)
        assert _comparable(in_memory, self._memory_fences) == _comparable(in_redis, self._redis_fences)
        return in_redis

    def stored(self, lock: str) -> Stored:
        """Return the stored data of a lock, which must be the same in both."""
        in_redis = self._stored_in_redis(lock)
        assert self._stored_in_memory(lock) == in_redis
        return in_redis

    def _stored_in_redis(self, lock: str) -> Stored:
        places, done = (lock, behind_key(lock), turn_key(lock)), done_key(lock)
        with self.redis.redis.pipeline() as pipe:
            for key in places:
                pipe.hmget(key, "id", "gen", "state", "nonce", "payload", "if_held")
            pipe.zrange(done, 0, -1)
            for key in (*places, done):
                pipe.ttl(key)
            replies = pipe.execute()
        rows, members, lifetimes = replies[:3], replies[3], replies[4:]
        assert -1 not in lifetimes  # everything ends by itself
        records = [
            Record(id_, read_generation(gen), *(text or "" for text in rest)) if id_ else None
            for id_, gen, *rest in rows
        ]
        ends = [(id_, end) for id_, _, end in (member.rpartition(":") for member in members)]
        names = ("replaced", "lost", "over", "unsent")
        over = {(id_, read_generation(end)) for id_, end in ends if end not in names}
        replaced, lost, ended, unsent = ({id_ for id_, end in ends if end == word} for word in names)
        generations = ((id_, read_generation(end)) for id_, _, end in (each.rpartition(":") for each in unsent))
        return Stored(*records, over, replaced, lost, ended, {*generations})

    def _stored_in_memory(self, lock: str) -> Stored:
        found = [self.memory._live(key) for key in (lock, behind_key(lock), turn_key(lock))]
        records = [r and Record(r.task_id, r.generation, r.state, r.nonce, r.payload, r.if_held) for r in found]
        ends = self.memory._done.get(lock, {})
        over = {(id_, end) for id_, end in ends if end >= 0}
        words = ({id_ for id_, end in ends if end == word} for word in (REPLACED, LOST, OVER))
        return Stored(*records, over, *words, {*self.memory._unsent.get(lock, {})})


def _comparable(answer: Any, fences: list[int]) -> Any:
    """Return an answer with a rounded lifetime, without times, and with a fence as the count of fences below it.

    Args:
        fences: the fences of this backend so far, from the lowest.
    """
    if isinstance(answer, list):
        return [_comparable(one, fences) for one in answer]
    if not isinstance(answer, Holder):
        return answer
    verdict, task_id, state, since, fence, ttl, payload, entry, waits_since, held_for, *rest = astuple(answer)
    more = payload, entry, waits_since > 0, held_for > 0, *rest
    if fence > fences[-1]:
        fences.append(fence)
    return verdict, task_id, state, since is not None, fences.index(fence), round((ttl + SLACK / 2) / (2 * SLACK)), more
