"""Sentry Crons and OpenTelemetry, as they are, around a beat and a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from celery.schedules import crontab, schedule

from singlebeat import Schedule
from singlebeat.beat.store.history import Record
from tests.support import APP, wait_until
from tests.system.singles import PATIENCE, Stage, open_stage

MONITORED = "tests.system.monitored"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("monitored"), "-c", "2", app=MONITORED) as stage:
        stage.start("beat", app=MONITORED)
        yield stage


@pytest.fixture
def told(stage: Stage):
    """Return what a monitor was told about a name, once it was told something of a kind."""

    def told(kind: str, count: int = 1, **about: Any) -> list[Mapping[str, Any]]:
        def found() -> list[Mapping[str, Any]]:
            records = [json.loads(text) for text in stage.oracle_client.lrange(kind, 0, -1)]
            found = [record for record in records if about.items() <= record.items()]
            return found if len(found) >= count else []

        return wait_until(found, timeout=PATIENCE, what=f"{count} of {about} in {kind}")

    return told


def put(stage: Stage, name: str, task: str, when: Any, **fields: Any) -> None:
    """Store an entry that runs at once."""
    Schedule(stage.app()).upsert(name, task, when, **{"args": [name], "run_on_start": True, **fields})


def sent(stage: Stage, name: str, decision: str = "dispatched") -> Record:
    records = wait_until(
        lambda: [each for each in Schedule(stage.app()).history(name) if each.decision == decision], timeout=PATIENCE
    )
    return records[0]


def test_an_entry_is_announced_to_sentry_in_its_own_zone(stage, told):
    put(stage, "berlin", f"{APP}.plain", crontab(hour=9, minute=0), timezone="Europe/Berlin")

    begun, ended = told("check-ins", 2, monitor_slug="berlin")

    assert begun["status"] == "in_progress"
    assert begun["monitor_config"]["schedule"] == {"type": "crontab", "value": "0 9 * * *"}
    assert begun["monitor_config"]["timezone"] == "Europe/Berlin"
    assert (ended["status"], ended["check_in_id"]) == ("ok", begun["check_in_id"])


def test_a_run_that_is_refused_at_its_start_closes_its_check_in(stage, told):
    task = f"{MONITORED}.alone"
    stage.app().send_task(task, ["refused"], {"seconds": 60})
    (running,) = stage.oracle.wait_started(1, "refused", timeout=PATIENCE)
    put(stage, "refused", task, schedule(3600), kwargs={"seconds": 60})

    begun, ended = told("check-ins", 2, monitor_slug="refused")

    assert [run.id for run in stage.oracle.runs("refused")] == [running.id]
    stage.worker.wait_for(rf"{task}\[{sent(stage, 'refused').task_id}\] is skipped")
    assert (begun["status"], ended["status"]) == ("in_progress", "ok")
    assert ended["check_in_id"] == begun["check_in_id"]
    stage.oracle.let_go("refused")


@pytest.mark.parametrize("task", [f"{APP}.plain", f"{APP}.single"])
def test_a_run_that_waited_for_its_turn_keeps_its_trace(stage, told, task):
    name = f"in turn {task}"
    put(stage, name, task, schedule(3600), kwargs={"seconds": 60}, overlap="buffer_all")
    stage.oracle.wait_started(1, name, timeout=PATIENCE)
    Schedule(stage.app()).trigger(name)
    task_id = sent(stage, name, "buffered").task_id
    stage.postponed(task_id, 2)
    stage.oracle.let_go(name, 2)

    (run,) = told("spans", name=f"run/{task}", task=task_id)
    (sending,) = told("spans", name=f"apply_async/{task}", task=task_id)
    (by_sender,) = told("sentry-traces", by="sender", task=task_id)
    by_runs = told("sentry-traces", by="run", task=task_id)

    assert run["parent"]
    assert run["trace"] == sending["trace"]
    assert {by_run["trace"] for by_run in by_runs} == {by_sender["trace"]}
