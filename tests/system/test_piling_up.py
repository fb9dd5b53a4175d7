"""A periodic task that takes longer than its interval: one at a time, however beat knows it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from celery.schedules import schedule

from tests.support import APP, RedisServer, measured, wait_until


@contextmanager
def sampled_waiting(server: RedisServer) -> Iterator[Counter[int]]:
    """Count, as often as the server answers, the messages that wait: in the queue or in a worker's hands."""
    seen: Counter[int] = Counter()
    over = threading.Event()

    def sample() -> None:
        with server.client() as client, client.pipeline() as pipe:
            while not over.wait(0.01):
                seen[sum(pipe.llen("celery").hlen("unacked").execute())] += 1

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("task", "beats_app"),
    [("plain", APP), ("single", APP), ("plain", f"{APP}:nameless"), ("single", f"{APP}:nameless")],
    ids=["plain", "Singleton", "plain, by name only", "Singleton, by name only"],
)
def test_a_task_of_five_seconds_due_every_second_never_piles_up(task, beats_app, celery, oracle, redis, server):
    entry = {"task": f"{APP}.{task}", "schedule": schedule(1), "args": ["long"], "kwargs": {"seconds": 5}}
    celery("worker", "-c", "4").ready()
    with sampled_waiting(server) as waiting:
        beat = celery("beat", app=beats_app, conf={"beat_schedule": {"long": entry}})
        # Its own record is the clock: a decision every second.
        wait_until(lambda: redis.xlen("redbeat::history") >= 12, timeout=60, what="12 decisions")
    beat.terminate()  # or it decides between the two looks at what it has decided and at what has run
    beat.wait()
    decisions = Counter(record["decision"] for _, record in redis.xrange("redbeat::history"))
    runs = oracle.runs("long")

    assert oracle.max_concurrent("long") == 1
    assert max(waiting) <= 1, waiting
    measured(f"{decisions}, {len(runs)} runs, {waiting.total()} samples of the queue: {waiting}")
    assert decisions["dispatched"] >= 2, "nothing was dispatched after the first run"
    assert decisions["dispatched"] + decisions["skipped_overlap"] == decisions.total()
    assert len({run.id for run in runs}) == len(runs), "an occurrence ran twice"
    assert len(runs) in {decisions["dispatched"], decisions["dispatched"] - 1}
