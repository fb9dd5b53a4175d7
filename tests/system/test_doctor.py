"""``doctor`` reports which workers have singlebeat, and which version of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.schedules import schedule

import singlebeat
from singlebeat import Entry
from singlebeat.locks import backend_of
from tests.support import APP, ROOT, CeleryProcess, wait_until

#: What the doctor says: level and text of each thing.
Said = dict[str, tuple[str, str]]

BARE = """
import os
import re
from celery import Celery

app = Celery("bare", broker=os.environ["SB_TEST_URL"])


@app.task(name="tests.system.apps.plain")
def plain(name):
    return name
"""


@pytest.fixture
def installed(tmp_path: Path):
    """Return the environment of a process for which another celery-singlebeat is installed, or none."""

    def installed(version: str = "") -> dict[str, str]:
        place = tmp_path / (version or "none")
        info = place / f"celery_singlebeat-{version or 0}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: celery-singlebeat\nVersion: {version or 0}\n")
        if version:
            (info / "entry_points.txt").write_text("[celery.commands]\nsinglebeat = singlebeat.cli:main\n")
        (place / "bare.py").write_text(BARE)
        return {"PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}

    return installed


@pytest.fixture
def doctor(celery):
    """Ask the doctor, for up to 30 s until it says what is awaited; return what it says about what."""

    def examined() -> Said:
        process: CeleryProcess = celery("singlebeat", "doctor", "--json")
        process.wait(60)
        return {row["about"]: (row["level"], row["text"]) for row in json.loads(process.text)}

    def doctor(until: Callable[[Said], bool]) -> Said:
        # To the doctor a worker that answers late is not there.
        return wait_until(lambda: said if until(said := examined()) else {}, timeout=30, what="what is to be found")

    return doctor


def one_answers(said: Said) -> bool:
    return said.get("workers") == ("fine", "1 answer")


def test_workers_of_one_version_are_fine_and_beats_without_standby_are_not(celery, app, doctor):
    Entry("cleanup", "celery.backend_cleanup", schedule(3600), app=app).save()
    celery("worker", "-c", "1").ready()
    celery("beat", "-S", "singlebeat.Scheduler").wait_for("this beat leads")

    said = doctor(one_answers)

    assert said["workers"] == ("fine", "1 answer")
    assert not [about for about in said if "singlebeat" in about]
    assert "clock" not in said
    assert "entry cleanup" not in said, "each worker knows the tasks of Celery itself, and names none of them"
    assert said["beat"][0] == "warning"
    assert "none stands by" in said["beat"][1]


def test_workers_without_singlebeat_and_with_another_version_are_named(celery, app, doctor, installed):
    same = celery("worker", "-c", "1").ready()
    other = celery("worker", "-c", "1", env=installed("9.9")).ready()
    bare = celery("worker", "-c", "1", app="bare", env=installed()).ready()
    wait_until(backend_of(app).workers_seen, what="a worker to say that it looks after locks")
    names = [process.wait_for(r"(w\d+@\S+) ready").group(1) for process in (same, other, bare)]
    versions = sorted([f"{singlebeat.__version__} on {names[0]}", f"9.9 on {names[1]}"])
    differ = f"{', '.join(versions)}, {singlebeat.__version__} here: "

    said = doctor(
        lambda said: (
            "workers without singlebeat" in said
            and said.get("versions of singlebeat differ", ("", ""))[1].startswith(differ)
        )
    )

    level, text = said["workers without singlebeat"]
    assert level == "problem"
    assert text.startswith(f"{names[2]}: no singlebeat there")
    assert "up to 3600 s (singlebeat_queued_ttl)" in text
    level, text = said["versions of singlebeat differ"]
    assert level == "warning"
    assert text.startswith(differ)


def test_without_singlebeat_on_workers_doctor_names_no_lasting_locks(celery, doctor, installed):
    celery("worker", "-c", "1", app="bare", env=installed()).ready()

    said = doctor(one_answers)

    assert "workers without singlebeat" not in said
    assert said["workers"] == ("fine", "1 answer")


def test_entries_whose_runs_all_fail_or_never_start_are_named(celery, app, doctor):
    """Each is sent in time, so that beat is healthy all the while."""
    app.tasks[f"{APP}.single"].delay("long", 300)
    entries: dict[str, dict[str, Any]] = {
        "fails": {"task": f"{APP}.fail"},
        "expires": {"options": {"countdown": 1, "expires": 0.5}},
        "waits": {"task": f"{APP}.single", "args": ["long", 300]},
        "works": {},
    }
    for name, own in entries.items():
        fields = {"task": f"{APP}.plain", "schedule": schedule(1), "args": [name], **own}
        Entry(name, app=app, run_on_start=True, **fields).save()
    celery("worker", "-c", "2").ready()
    celery("beat", "-S", "singlebeat.Scheduler")

    said = doctor(lambda said: "its last 4 runs" in str(said.get("entry expires")) and "entry fails" in said)

    at = r"at \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ on w\S+"
    assert re.match(rf"its last 4 runs all failed, the last one {at}: RuntimeError", said["entry fails"][1])
    assert re.match(
        rf"its last 4 runs all expired before a worker started them, the last one {at}", said["entry expires"][1]
    )
    assert re.match(r"no run of it was sent so far; .* was skipped: held by task ", said["entry waits"][1])
    assert {said[f"entry {name}"][0] for name in ("fails", "expires", "waits")} == {"warning"}
    assert "entry works" not in said
    explain = celery("singlebeat", "explain", "fails")
    explain.wait(60)
    assert explain.matches(r"(?m)^Its last 4 runs all failed, the last one at .*\.$")
