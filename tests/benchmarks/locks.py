"""The verbs of a lock, each against a script that does nothing with the same keys and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from singlebeat.locks import backend_of
from singlebeat.locks.base import BaseBackend, Call, Ref, Renewal, Verdict
from tests.benchmarks.apps import OURS
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.stage import Stage, numbers
from tests.benchmarks.wire import counted

BARE = "bare EVALSHA"

#: In the order of a lock's life: each finds what the one before it has left.
VERBS = ("acquire", "begin", "renew", "finish")


def cases(stage: Stage) -> list[Case]:
    count, many = stage.size(1_000, quick=50), stage.size(1_000, quick=50)

    def micros(seconds: float) -> str:
        return f"{seconds / count * 1e6:,.0f} µs"

    return [
        *(
            Case(f"lock-{verb}", f"{verb} a lock, {count:,} in a row", partial(_verb, stage, verb, count), "", micros)
            for verb in VERBS
        ),
        Case("lock-renew-many", f"renew {many:,} locks at once", partial(_renew_many, stage, many), "≤ 20 ms"),
        Case(
            "lock-round-trips",
            "Round trips of a verb",
            partial(_round_trips, stage),
            "1",
            show="{:.0f}".format,
            rounds=1,
            compare=False,
        ),
    ]


class _Locks:
    """Locks in any state, and the verbs on each of them."""

    def __init__(self, stage: Stage, count: int) -> None:
        self.stage = stage
        self.backend: BaseBackend = backend_of(stage.app("locks"))
        ids = [f"{number:0>36}" for number in numbers(count)]
        self.refs = [Ref(f"SINGLETONLOCK_{{{id_:0>64}}}", id_, nonce="0123456789abcdef") for id_ in ids]

    def prepare(self, verb: str) -> None:
        """Bring all locks to the state that a verb expects."""
        self.stage.client.flushdb()
        for earlier in VERBS[: VERBS.index(verb)]:
            self.do(earlier)

    def do(self, verb: str) -> None:
        """Call a verb on each lock."""
        call = getattr(self, verb)
        for ref in self.refs:
            call(ref)

    def acquire(self, ref: Ref) -> None:
        holder = self.backend.acquire_many([Call(Ref(ref.key, ref.task_id), OURS, "('17',)", ttl=3600.0)])[0]
        _expect(holder.verdict, Verdict.ACQUIRED)

    def begin(self, ref: Ref) -> None:
        holder = self.backend.begin(ref, lease=30.0, remember_for=3600.0, task=OURS, arguments="('17',)")
        _expect(holder.verdict, Verdict.STARTED)

    def renew(self, ref: Ref) -> None:
        _expect(self.backend.renew_many([ref], lease=30.0)[0], Renewal.RUNNING)

    def finish(self, ref: Ref) -> None:
        self.backend.finish_many([ref], remember_for=3600.0, ran=True)


def _expect(verdict: Verdict | Renewal, expected: Verdict | Renewal) -> None:
    if verdict is not expected:
        raise RuntimeError(f"the lock's server answered {verdict}, not {expected}: this measures nothing")


@contextmanager
def _verb(stage: Stage, verb: str, count: int) -> Iterator[Mapping[str, Side]]:
    locks = _Locks(stage, count)
    client, calls, bare = _replayed(locks, verb)

    def floor() -> float:
        def replay() -> None:
            for call in calls:
                client.evalsha(bare, *call)

        return timed(replay)

    def side() -> float:
        locks.prepare(verb)
        return timed(lambda: locks.do(verb))

    yield {BARE: floor, verb: side}


@contextmanager
def _renew_many(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    locks = _Locks(stage, count)
    client, calls, bare = _replayed(locks, "renew")
    locks.prepare("renew")

    def floor() -> float:
        def replay() -> None:
            with client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.evalsha(bare, *call)
                pipe.execute()

        return timed(replay)

    def side() -> float:
        return timed(lambda: locks.backend.renew_many(locks.refs, lease=30.0))

    yield {f"{BARE}, pipelined": floor, "renew_many": side}


@contextmanager
def _round_trips(stage: Stage) -> Iterator[Mapping[str, Side]]:
    locks = _Locks(stage, 1)
    for verb in VERBS:  # the server must know the scripts
        locks.do(verb)

    def side(verb: str) -> float:
        locks.prepare(verb)
        with counted() as wire:
            locks.do(verb)
        return wire.round_trips

    yield {verb: partial(side, verb) for verb in VERBS}


def _replayed(locks: _Locks, verb: str) -> tuple[Any, Sequence[tuple[Any, ...]], str]:
    """Return the client, what a verb sends with EVALSHA, lock by lock, and a script that only returns."""
    client = locks.backend.redis
    locks.prepare(verb)
    locks.do(verb)  # so that the server knows the script
    locks.prepare(verb)
    calls = _sent(client, lambda: locks.do(verb))
    return client, calls, client.script_load("return 1")


def _sent(client: Any, body: Callable[[], object]) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    evalsha = client.evalsha

    def recording(sha: str, *args: Any) -> Any:
        calls.append(args)
        return evalsha(sha, *args)

    client.evalsha = recording
    try:
        body()
    finally:
        del client.evalsha
    return calls
