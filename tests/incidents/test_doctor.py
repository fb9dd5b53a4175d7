"""``doctor`` reports which workers have singlebeat, and which version of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.schedules import schedule

import singlebeat
from singlebeat import Entry, Schedule
from singlebeat.broker import own_broker
from singlebeat.locks import backend_of, worker_name
from tests.incidents.tools import Tools
from tests.support import APP, ROOT, CeleryProcess, measured, wait_until
from tests.system.apps import make_app

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


def put(app: Celery, *names: str, **fields: Any) -> None:
    """Store entries that are due in an hour."""
    for name in names:
        fields = {"task": f"{APP}.plain", "schedule": schedule(3600), "args": [name], **fields}
        Entry(name, app=app, last_run_at=datetime.now(UTC), **fields).save()


def told(app: Celery, pattern: str, *command: str) -> str:
    """Ask a command, the doctor by default, until a line of its answer matches; return that line."""

    def line() -> str:
        found = re.search(f"^.*{pattern}.*$", Tools(app).ask(*(command or ("doctor",))), re.MULTILINE)
        return found[0] if found else ""

    text = wait_until(line, timeout=60, what=pattern)
    measured(f"$ celery -A shop singlebeat {' '.join(command) or 'doctor'}\n{text}")
    return text


@pytest.mark.parametrize("command", ["lpush", "brpop"])
def test_a_right_that_workers_lack_on_the_broker_is_named(celery, server, oracle, own_server, command):
    """A worker that lives cannot answer without LPUSH, and an operator's command hears nothing without BRPOP."""
    admin = own_server.client()
    admin.execute_command("ACL", "SETUSER", "br", "on", "nopass", "~*", "&*", "+@all")
    broker = own_server.celery_url.replace("://", "://br:any@")
    places = dict.fromkeys(("redbeat_redis_url", "singleton_backend_url"), server.url)
    conf = {"broker_url": broker, **places}
    with make_app(server.celery_url, conf) as app:
        put(app, "e")
        celery("worker", "-c", "1", conf=conf).ready()
        celery("beat", conf=conf)
        Schedule(app).trigger("e")
        oracle.wait_ended(1, "e")
        wait_until(lambda: [run for run in Schedule(app).history("e", 1) if run.end], what="the record of its end")
        admin.execute_command("ACL", "SETUSER", "br", f"-{command}")

        grant = rf"{command.upper()}.*: grant \+{command}|'{command}' command: grant \+{command}"
        text = told(app, f"^problem  broker .*({grant})")
        explained = told(app, f"^The broker .*({grant})", "explain", "e")

    assert "wait in their queues" not in text
    assert "No worker answers" not in explained


def test_a_spoilt_lock_of_a_run_that_has_ended_is_named_with_its_fields(celery, app, oracle, redis):
    put(app, "long", schedule=schedule(1), args=["long", 300], run_on_start=True)
    celery("worker", "-c", "1").ready()
    celery("beat")
    oracle.wait_started(1, "long")
    (key,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    redis.hset(key, mapping=dict.fromkeys(("gen", "since", "renewed", "fence"), "abc"))
    oracle.let_go("long")

    left = told(app, r"^Task \S+ has ended \(success\), and its lock was left", "explain", "long")
    text = told(app, "^problem  locks: the lock .* is unusable: its fields fence, gen, renewed, since must be numbers")

    free = re.escape(f"(celery singlebeat unlock --force '{key}')")
    assert re.search(free, left)
    assert re.search(free, text)
    assert "probably died" not in Tools(app).ask("explain", "long")


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
    assert "no standby is noted" in said["beat"][1]


def test_a_silent_worker_is_named_with_the_queue_that_it_may_read(celery, app, doctor):
    put(app, "nightly")
    celery("beat", "-S", "singlebeat.Scheduler").wait_for("this beat leads")
    celery("worker", "-Q", "other", "-c", "1").ready()
    assert doctor(lambda said: "queue celery" in said)["queue celery"][0] == "problem"
    backend_of(app).announce(silent := worker_name(app, "silent@host"), ttl=3600)

    level, text = doctor(one_answers)["queue celery"]
    explained = Tools(app).ask("explain", "nightly")

    backend_of(app).retire(silent)
    assert level == "warning"
    assert "no worker that answers reads queue celery (they read other), and silent@host, which may read it" in text
    assert "does not answer: unless silent@host reads it, the runs of nightly wait there" in text
    assert "does not answer: unless silent@host reads it, messages wait there" in explained


def test_workers_without_singlebeat_and_with_another_version_are_named(celery, app, doctor, installed):
    same = celery("worker", "-c", "1").ready()
    other = celery("worker", "-c", "1", env=installed("9.9")).ready()
    bare = celery("worker", "-c", "1", app="bare", env=installed()).ready()
    wait_until(backend_of(app).workers_seen, what="a worker to say that it looks after locks")
    put(app, "weekly", "nightly")
    put(app, "together", overlap="allow_all")
    put(app, "elsewhere", options={"queue": "other"})
    put(app, "single", task=f"{APP}.single")
    put(app, "paused", paused=True)
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
    measured(text)
    assert level == "problem"
    assert "That concerns the entries whose queues it reads: nightly, single, weekly. How" in text
    assert text.startswith(f"{names[2]}: no singlebeat there")
    assert "up to 3600 s (singlebeat_queued_ttl)" in text
    level, text = said["versions of singlebeat differ"]
    assert level == "warning"
    assert text.startswith(differ)


def test_without_singlebeat_on_workers_doctor_names_no_lasting_locks(celery, app, doctor, installed):
    celery("worker", "-c", "1", app="bare", env=installed()).ready()
    put(app, "nightly")
    put(app, "together", overlap="allow_all")

    said = doctor(one_answers)

    assert "workers without singlebeat" not in said
    assert said["workers"] == ("fine", "1 answer")
    text = Tools(app).ask("doctor")
    measured(text)
    unlocked = "plain tasks are sent without a lock, so that runs of nightly may overlap; install it there, too"
    assert f"warning  workers: no worker with singlebeat was seen: {unlocked}" in text


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


def test_beats_of_another_version_are_named(celery, app, installed):
    celery("beat", env=installed("9.9")).wait_for("this beat leads")
    celery("beat").wait_for("Standing by")

    text = told(app, "^warning  versions of beats differ: ")

    versions = rf"9\.9 on \S+ \(pid \d+, which leads\), {re.escape(singlebeat.__version__)} on \S+ \(pid \d+, which "
    assert re.search(rf"{versions}stands by\), {re.escape(singlebeat.__version__)} here: install the same", text)


def test_two_fleets_that_share_the_prefix_of_the_schedule_are_named(celery, app, own_server):
    """Their app has one name and one beat_schedule: they differ in their brokers alone."""
    put(app, "e")
    celery("beat", conf={"broker_url": own_server.celery_url}).wait_for("this beat leads")
    with make_app(own_server.celery_url, {"redbeat_redis_url": app.conf.redbeat_redis_url}) as same:
        ours, theirs = (re.escape(own_broker(each)) for each in (app, same))
        sends = rf"he beat \S+, pid \d+, which leads, sends to the broker {theirs}, and the broker of this process"
        sends = f"{sends} is {ours}"

        told(app, f"^warning  redbeat_key_prefix redbeat:: t{sends}")
        told(app, f"^T{sends}", "explain", "e")
        told(app, f"^broker      t{sends}", "status")
        assert "sends to the broker" not in Tools(same).ask("doctor")


def test_two_fleets_that_share_the_prefix_of_the_locks_are_named(celery, app, oracle, own_server):
    """A run of one fleet keeps an equal call of the other from running."""
    conf = {"broker_url": own_server.celery_url}
    worker = celery("worker", "-c", "1", conf=conf).ready()
    name = worker.wait_for(r"(w\d+@\S+) ready").group(1)
    with make_app(app.conf.broker_url, conf) as other:
        task = other.tasks[f"{APP}.single"].delay("long", 300)
        oracle.wait_started(1, "long")

        text = told(app, "^problem  singleton_key_prefix SINGLETONLOCK_: ")

        assert app.tasks[f"{APP}.single"].delay("long", 300).is_duplicate
        assert "singleton_key_prefix" not in Tools(other).ask("doctor")
        theirs = own_broker(other)
    assert f"worker {name}, which has another broker ({theirs}), holds the lock of task {task.id} " in text
    assert f"holds the lock of task {task.id} ({APP}.single). If these are two apps, or two fleets" in text
    oracle.let_go("long")


@pytest.mark.parametrize("late", [True, False], ids=["acks late", "acks early"])
def test_a_run_longer_than_the_visibility_timeout_is_named(celery, server, redis, oracle, late):
    conf = {"broker_transport_options": {"visibility_timeout": 1}, "task_acks_late": late}
    celery("worker", "-c", "1", conf=conf).ready()
    with make_app(server.celery_url, conf) as app:
        put(app, "long", args=["long", 2])
        put(app, "short")
        celery("beat", conf=conf)
        for name in ("long", "short"):
            Schedule(app).trigger(name)

        text = told(app, "^warning  entry long: its run that ended at ")

        assert "entry short" not in Tools(app).ask("doctor")
    what = "its message" if late else "messages that its worker had received, and not started yet,"
    assert re.search(
        rf"took \d+ s, longer than the broker's visibility_timeout of 1 s: {what} may have been delivered again", text
    )


def test_an_entry_whose_runs_all_kill_their_workers_is_named(celery, app, oracle):
    conf = {"singlebeat_lock_lease": 1}
    Entry("deadly", f"{APP}.deadly", schedule(3), args=["deadly"], run_on_start=True, app=app).save()
    put(app, "fine")
    celery("beat", conf=conf)
    Schedule(app).trigger("fine")
    for number in range(1, 5):
        worker = celery("worker", "-c", "1", conf=conf)
        oracle.wait_started(number, "deadly")
        worker.wait()
    celery("worker", "-c", "1", "-Q", "none", conf=conf).ready()

    vanished = "no worker has recorded an end of its last [2-4] runs before the present one"
    text = told(app, f"^warning  entry deadly: {vanished}")

    assert "each has killed its worker (for want of memory?" in text
    assert "entry fine" not in Tools(app).ask("doctor")
    told(app, f"^N{vanished[1:]}", "explain", "deadly")
