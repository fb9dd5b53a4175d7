"""How fast a real worker gets through short tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from celery import Task

from tests.benchmarks.apps import OURS, PLAIN, THEIRS
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.processes import celery
from tests.benchmarks.stage import Stage, numbers
from tests.support import CeleryProcess, wait_until

#: Side: task, and whether its worker is as where singlebeat is not installed.
SIDES = {
    "plain task": (PLAIN, True),
    "plain task, singlebeat installed": (PLAIN, False),
    "singlebeat": (OURS, False),
    "celery-singleton": (THEIRS, True),
}

#: Seconds that anything here may take.
PATIENCE = 300.0

#: Where messages are collected before their worker may see them.
COLLECTED = "collected"

#: Seconds between two polls whether a worker has finished.
LOOK = 0.005


def cases(stage: Stage) -> list[Case]:
    count = stage.size(2_000, quick=100)
    return [
        Case(
            "worker",
            f"A worker with 2 processes gets through {count:,} short tasks",
            partial(_workers, stage, count),
            "≤ 1.25",
            rounds=7,
        )
    ]


@contextmanager
def _workers(stage: Stage, count: int) -> Iterator[Mapping[str, Side]]:
    app = stage.app("workers")
    with ExitStack() as stack:
        workers = {}
        for number, (label, (task, bare)) in enumerate(SIDES.items()):
            options = ("-c", "2", "-Q", f"work{number}", "--without-heartbeat")
            worker = celery(stage, "worker", *options, tasks=(task,), bare=bare)
            workers[label] = (stack.enter_context(worker), f"work{number}", app.tasks[task])

        def side(label: str) -> float:
            worker, queue, task = workers[label]
            _collect(stage, task, count)

            def work() -> None:
                stage.client.rename(COLLECTED, queue)
                _await_idle(stage, worker, queue)

            seconds = timed(work)
            wait_until(lambda: not stage.locks(), what="all locks free")
            return seconds

        for worker, queue, task in workers.values():  # a first task shows that it is ready
            _collect(stage, task, 1)
            stage.client.rename(COLLECTED, queue)
            _await_idle(stage, worker, queue)
        yield {label: partial(side, label) for label in SIDES}


def _collect(stage: Stage, task: Task, count: int) -> None:
    for number in numbers(count):
        task.apply_async((number,), queue=COLLECTED)
    if (sent := stage.client.llen(COLLECTED)) != count:
        raise RuntimeError(f"{sent} messages were sent instead of {count}: this measures nothing")


def _await_idle(stage: Stage, worker: CeleryProcess, queue: str) -> None:
    """Return when every message was given to a process of the worker, which acknowledges it then.

    Two looks in a row: between queue and ``unacked`` a message is nowhere for a moment.
    """
    deadline, idle = time.monotonic() + PATIENCE, 0
    while idle < 2:
        if worker.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker does not get through its tasks:\n{worker.tail()}")
        time.sleep(LOOK)
        with stage.client.pipeline(transaction=False) as pipe:
            waiting, unacked = pipe.llen(queue).hlen("unacked").execute()
        idle = 0 if waiting or unacked else idle + 1
