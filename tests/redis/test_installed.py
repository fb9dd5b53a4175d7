"""What a worker's step does from its start to its end, in the worker's own process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.signals import task_rejected, task_unknown

from singlebeat import signals
from singlebeat.errors import ConfigError
from singlebeat.locks.base import HEADER
from singlebeat.tasks.worker_step import WorkerLockStep
from tests.support import connected
from tests.system.apps import make_app


@dataclass(eq=False)
class Worker:
    """What the step and Celery's signals see of a worker and its consumer."""

    app: Celery
    hostname: str = "here"
    timer: Any = None
    pool: Any = None


def test_only_the_last_worker_of_a_process_reports_an_unknown_task(app: Celery):
    told: list[str] = []
    worker = Worker(app)
    message = SimpleNamespace(headers={"id": "1", HEADER: {"id": "1", "key": "k"}})
    with connected(signals.run_ended, lambda outcome, **_: told.append(outcome), sender=app):
        for number in (1, 2):
            step = WorkerLockStep(worker)
            step.start(worker)
            for ended, word in ((task_unknown, "unknown_task"), (task_rejected, "rejected")):
                ended.send(sender=worker, message=message)
                assert told == [word], f"worker {number}"
                told.clear()
            step.stop(worker)

    task_unknown.send(sender=worker, message=message)
    assert told == []


@pytest.mark.parametrize(
    "conf",
    [
        {"singleton_backend_class": "no.such.module.Class"},
        {"singleton_backend_url": "gopher://h"},
        {"singleton_backend_kwargs": {"bogus": 1}},
    ],
    ids=str,
)
def test_a_worker_with_a_wrong_place_for_locks_does_not_start(server, conf):
    """Else it would take the messages of Singletons, and each would fail."""
    with make_app(server.celery_url, conf) as app:
        worker = Worker(app)
        step = WorkerLockStep(worker)
        with pytest.raises(ConfigError):
            step.start(worker)


def test_a_worker_without_a_server_for_locks_starts():
    worker = Worker(Celery(broker="memory://", set_as_current=False))
    step = WorkerLockStep(worker)

    step.start(worker)

    assert step.renewer is None
