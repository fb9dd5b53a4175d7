"""Programs and workers on hosts with a wrong clock, by libfaketime; beats are B13 of ``test_incidents.py``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from celery.schedules import schedule
from click.testing import CliRunner

from singlebeat import Entry, Schedule
from singlebeat.beat.status import ScheduleStatus
from singlebeat.cli import main
from tests.support import APP, ROOT, RedisServer, wait_until
from tests.system.apps import make_app

BEAT = ("beat", "-S", "singlebeat.Scheduler", "-l", "WARNING")

#: What a program does to the schedule.
ELSEWHERE = """
import json, sys, time
from celery.schedules import crontab, schedule
from singlebeat import Entry, Schedule
from singlebeat.cli import main
from tests.support import APP
from tests.system.apps import make_app

app = make_app(sys.argv[1], {})
entries = Schedule(app)
entries.upsert("upserted", f"{APP}.plain", schedule(60))
Entry("saved", f"{APP}.plain", schedule(60), app=app).save()
entries.resume("paused")
entry = entries.get("edited")
entry.schedule = schedule(60)
entries.save(entry)
print(json.dumps([time.time(), *(entries.next_runs(name, 1)[0].timestamp() for name in ("upserted", "old"))]))
"""


@pytest.mark.parametrize("ahead", [86_400, -86_400])
def test_a_program_with_a_wrong_clock_stores_entries_by_the_servers(server, app, redis, libfaketime, ahead):
    for name in ("paused", "edited", "old"):
        Entry(name, f"{APP}.plain", schedule(3600 if name == "edited" else 60), app=app).save()
    Schedule(app).pause("paused")
    redis.zadd("redbeat::schedule", {"redbeat:paused": 1})  # as where no beat has led for long

    env = {**os.environ, "LD_PRELOAD": libfaketime, "FAKETIME": f"{ahead:+d}s"}
    program = [sys.executable, "-c", ELSEWHERE, server.celery_url]
    shown, *upcoming = json.loads(subprocess.check_output(program, cwd=ROOT, env=env, text=True))

    now = time.time()
    assert abs(shown - now - ahead) < 60
    places = dict(redis.zrange("redbeat::schedule", 0, -1, withscores=True))
    del places["redbeat:paused"]
    assert {name: abs(at - now) < 120 for name, at in places.items()} == dict.fromkeys(places, True)
    assert [abs(at - now) < 120 for at in upcoming] == [True, True]
    for name in ("upserted", "saved", "paused", "edited"):
        counts_from = Schedule(app).get(name).meta.counts_from
        assert abs(counts_from.timestamp() - now) < 120, name


def test_the_doctor_names_a_worker_with_a_wrong_clock(celery, app, libfaketime):
    worker = celery("worker", "-P", "solo", env={"LD_PRELOAD": libfaketime, "FAKETIME": "-90s"}).ready()
    name = worker.wait_for(r"(w\d+@\S+) ready").group(1)

    def found() -> list[str]:
        rows = json.loads(CliRunner().invoke(main, ["doctor", "--json"], obj=SimpleNamespace(app=app)).stdout)
        return ["{level} {text}".format(**row) for row in rows if "the clock of worker" in row["text"]]

    # To the doctor a worker that answers late is not there.
    (text,) = wait_until(found, timeout=40, what="a clock that is wrong")

    assert re.match(rf"problem the clock of worker {name} is about -\d\d s off that of the schedule's server", text)


def test_explain_names_the_worker_whose_clock_has_let_a_message_expire(celery, app, libfaketime):
    Entry("e", f"{APP}.plain", schedule(3600), args=["e"], expires=30, run_on_start=True, app=app).save()
    worker = celery("worker", "-P", "solo", env={"LD_PRELOAD": libfaketime, "FAKETIME": "+90s"}).ready()
    name = worker.wait_for(r"(w\d+@\S+) ready").group(1)
    celery(*BEAT)

    def found() -> re.Match[str] | None:
        told = CliRunner().invoke(main, ["explain", "e"], obj=SimpleNamespace(app=app)).stdout
        return re.search(rf"The clock of worker {name} is about \+[89]\d s off .*: set up NTP there\.", told)

    wait_until(found, timeout=40, what="the clock by which the message has expired")


@pytest.fixture
def clocked_server(libfaketime):
    """A server whose clock a test sets."""
    with RedisServer(libfaketime=libfaketime) as server:
        yield server


def test_entries_that_wait_for_the_servers_clock_are_named_until_they_run(celery, clocked_server):
    server = clocked_server
    with make_app(server.celery_url) as app:
        Entry("e", f"{APP}.plain", schedule(1), args=["e"], overlap="allow_all", run_on_start=True, app=app).save()
        beat = celery(*BEAT, server=server, conf={"redbeat_lock_timeout": 2})

        def sent(after: float) -> list[float]:
            records = Schedule(app).history("e", 100)
            return [r.nominal.timestamp() for r in records if r.decision == "dispatched" and r.at.timestamp() > after]

        wait_until(lambda: sent(0), timeout=40, what="a run")
        server.set_clock(7200)
        wait_until(lambda: sent(time.time() + 3600), timeout=40, what="a run by the clock that is ahead")
        server.set_clock(0)
        beat.wait_for("WARNING.*event=clock_set_back")
        # Until its lease is renewed, what the leader has noted of its host's clock is of before.
        wait_until(
            lambda: ScheduleStatus.of(app).problem().startswith("entries wait until"), timeout=40, what="the problem"
        )
        assert 7000 < ScheduleStatus.of(app).set_back <= 7300
        assert beat.matches("event=clock_caught_up") == []
        server.set_clock(7300)
        beat.wait_for("WARNING.*event=clock_caught_up")
        wait_until(lambda: sent(time.time() + 7290), timeout=40, what="a run after that")
        wait_until(lambda: not ScheduleStatus.of(app).set_back, timeout=40)
        nominal = sent(0)
        assert len(nominal) == len(set(nominal)), "no time is decided twice"
