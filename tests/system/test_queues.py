"""Messages that no worker reads, that a worker reads which lacks their task, or that wait for a free slot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from celery.schedules import schedule
from click.testing import CliRunner

from singlebeat import Schedule
from singlebeat.cli import doctor as doctor_module
from singlebeat.cli import main
from tests.support import APP, wait_until
from tests.system.singles import PATIENCE, Served, served


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A worker that reads ``celery``, one without tasks that reads ``other``, and a beat."""
    with served(tmp_path_factory.mktemp("queues"), "-c", "1", "-P", "threads", "-Q", "celery", app=APP) as at:
        at.start("worker", "-c", "1", "-P", "threads", "-Q", "other", app=f"{APP}:nameless")
        at.start("beat", app=APP)
        yield at


@pytest.fixture
def ask(at: Served):
    """Run a command, for up to 30 s until it prints what is awaited; return what it prints."""

    def ask(*args: str, until: str) -> str:
        def printed() -> str:
            done = CliRunner().invoke(main, args, obj=SimpleNamespace(app=at.app()))
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
            return done.output if until in done.output else ""

        # To the command a worker that answers late is not there.
        return wait_until(printed, timeout=PATIENCE, what=until)

    return ask


def put(at: Served, name: str, queue: str = "", **fields: object) -> None:
    options = {"queue": queue} if queue else {}
    Schedule(at.app()).upsert(name, f"{APP}.plain", schedule(3600), args=[name], options=options, **fields)


def test_a_queue_that_no_worker_reads_is_named_with_its_entries(at, ask):
    put(at, "nightly", "bills", run_on_start=True)
    put(at, "weekly", "bills")
    unread = "o worker that answers reads queue bills (they read celery, other)"

    text = ask("explain", "nightly", until=f"N{unread}")
    assert "start a worker with -Q bills" in text
    said = ask("doctor", until=f"problem  queue bills: n{unread}: the runs of nightly, weekly wait there")
    assert "queue celery" not in said
    Schedule(at.app()).delete("nightly")
    Schedule(at.app()).delete("weekly")


def test_a_task_that_only_workers_of_other_queues_know_is_named(at, ask):
    put(at, "lost", "other")

    wrong = f"o worker that answers and reads queue other knows the task {APP}.plain: "
    assert "drops the message" in ask("explain", "lost", until=f"N{wrong}")
    ask("doctor", until=f"problem  entry lost: n{wrong}")
    Schedule(at.app()).delete("lost")


def test_workers_without_a_free_slot_are_named_with_their_runs(at, ask, monkeypatch):
    monkeypatch.setattr(doctor_module, "BUSY_FOR", 0.0)
    at.app().send_task(f"{APP}.plain", ["busy", 60])
    at.oracle.wait_started(1, "busy", timeout=PATIENCE)
    put(at, "waits", run_on_start=True)
    wait_until(lambda: Schedule(at.app()).history("waits"), timeout=PATIENCE)
    full = f"he only slot of the workers that read queue celery is busy with {APP}.plain, since 2"

    ask("explain", "waits", until=f"T{full}")
    ask("doctor", until=f"warning  queue celery: t{full}")

    at.oracle.let_go("busy")
    at.oracle.wait_ended(1, "waits", timeout=PATIENCE)
    ask("explain", "waits", until="success")
    found = {row["about"] for row in json.loads(ask("doctor", "--json", until="["))}
    assert "queue celery" not in found
