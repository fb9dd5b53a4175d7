"""The memory of real beat processes: with many entries, after many were due, and after many ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from tests.benchmarks.apps import OURS, PLAIN
from tests.benchmarks.case import Case, Side
from tests.benchmarks.processes import celery, rss
from tests.benchmarks.stage import Stage, just_now, now
from tests.support import CeleryProcess, wait_until

#: Seconds that anything here may take.
PATIENCE = 600.0

#: Side: options of ``celery beat``. The first knows its own few entries only, and no Redis schedule.
SIDES: Mapping[str, tuple[str, ...]] = {
    "bare celery beat, 1 entry": ("-s", "beat-schedule"),
    "singlebeat": ("-S", "singlebeat.Scheduler"),
    "RedBeat": ("-S", "redbeat.RedBeatScheduler"),
}

BARE = next(iter(SIDES))


def megabytes(count: float) -> str:
    return f"{count / 2**20:.1f} MB"


def cases(stage: Stage) -> list[Case]:
    stored, due = stage.size(100_000, quick=1_000), stage.size(10_000, quick=100)
    ticks, early = stage.size(11_000, quick=200), stage.size(1_000, quick=100)
    return [
        Case(
            "memory-idle",
            f"Memory (RSS) of a beat process, {stored:,} entries stored",
            partial(_entries, stage, stored, due=0),
            "≤ 1.3",
            show=megabytes,
            rounds=3,
            warm_up=False,
        ),
        Case(
            "memory-due",
            f"The same, after {due:,} of them were due",
            partial(_entries, stage, stored, due=due),
            "≤ 1.3",
            show=megabytes,
            rounds=3,
            warm_up=False,
        ),
        Case(
            "memory-growth",
            f"Memory after {ticks:,} ticks by that after {early:,}, one task sent in each",
            partial(_growth, stage, ticks, early),
            "1",
            show="{:.3f}".format,
            rounds=1,
            warm_up=False,
            compare=False,
        ),
    ]


@contextmanager
def _entries(stage: Stage, stored: int, *, due: int) -> Iterator[Mapping[str, Side]]:
    def side(label: str) -> float:
        stage.client.flushall()
        prefix = stage.app("memory").conf.redbeat_key_prefix
        stage.store(prefix, stored, PLAIN, due=now() + timedelta(days=1))
        stage.store(prefix, 1, PLAIN, due=just_now())
        with _beat(stage, label, conf=_static(every=1.0) if label == BARE else {}) as beat:
            _await_sent(stage, beat, 1)
            if due and label != BARE:
                stage.store(prefix, due, PLAIN, due=just_now(), begin=1)
                _await_sent(stage, beat, due + 1)
                _await(beat, lambda: not stage.client.exists(f"{prefix}:pending"), "all confirmed")
            return rss(beat)

    yield {label: partial(side, label) for label in SIDES}


@contextmanager
def _growth(stage: Stage, ticks: int, early: int) -> Iterator[Mapping[str, Side]]:
    every = 0.001  # so that it is due in each tick

    def side(label: str) -> float:
        stage.client.flushall()
        # No worker was announced, so the plain task is sent without a lock, in each tick; the Singleton is skipped in
        # all but the first, as nobody ends it.
        stage.store("memory:", 1, PLAIN, due=just_now(), every=every)
        if label == "singlebeat":
            stage.store("memory:", 1, OURS, due=just_now(), every=every, begin=1)
        with _beat(stage, label, conf=_static(every=every) if label == BARE else {}) as beat:
            _await_sent(stage, beat, early)
            before = rss(beat)
            _await_sent(stage, beat, ticks)
            return rss(beat) / before

    yield {label: partial(side, label) for label in SIDES}


def _static(*, every: float) -> dict[str, Any]:
    return {"beat_schedule": {"e0": {"task": PLAIN, "schedule": every, "args": ["0"]}}}


def _beat(stage: Stage, label: str, conf: Mapping[str, Any]) -> Any:
    ours = label == "singlebeat"
    conf = {"redbeat_key_prefix": "memory:", **conf}
    return celery(
        stage,
        "beat",
        "--pidfile=",
        "--max-interval",
        "1",
        *SIDES[label],
        tasks=(PLAIN, OURS) if ours else (PLAIN,),
        conf=conf,
        bare=not ours,
    )


def _await_sent(stage: Stage, beat: CeleryProcess, count: int) -> None:
    _await(beat, lambda: stage.sent() >= count, f"{count} messages")


def _await(beat: CeleryProcess, reached: Callable[[], bool], what: str) -> None:
    wait_until(lambda: reached() or beat.returncode is not None, timeout=PATIENCE, what=what)
    if beat.returncode is not None:
        raise RuntimeError(f"beat has ended:\n{beat.tail()}")
