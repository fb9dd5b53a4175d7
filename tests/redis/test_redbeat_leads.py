"""While a beat of RedBeat leads, or was killed and left its lock: what the tools say, about real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from celery.beat import Service
from celery.schedules import crontab, schedule
from redbeat import RedBeatScheduler, RedBeatSchedulerEntry
from redbeat.schedulers import acquire_distributed_beat_lock

from singlebeat import Entry, Schedule
from singlebeat.beat.entries.entry import Meta
from singlebeat.beat.status import ScheduleStatus
from tests.support import APP, CeleryProcess, wait_until
from tests.system.apps import make_app

LOCK, SCHEDULE, QUEUE = "redbeat::lock", "redbeat::schedule", "celery"
TASK = f"{APP}.plain"

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")


def put(app, name: str, every: float, **fields: object) -> Entry:
    return Entry(name, TASK, schedule(every), args=[name], app=app, **fields).save()


@pytest.fixture
def redbeat(celery, app, redis) -> CeleryProcess:
    """A beat of RedBeat, with its own lease of 25 minutes, that has sent an entry of each second."""
    put(app, "e", 1)
    put(app, "paused", 1, paused=True, note="until Monday")
    process = celery("beat", "-S", "redbeat.RedBeatScheduler", conf={"redbeat_lock_timeout": 1500})
    wait_until(lambda: redis.llen(QUEUE) > 2, timeout=30, what="RedBeat to send")
    return process


def test_every_tool_explains_that_redbeat_leads(redbeat, app, redis, cli, probe):
    meaning = "a beat of RedBeat leads. It knows no policy: it sends paused entries"

    assert ScheduleStatus.of(app).redbeat_leads
    assert probe() == (200, "ok")
    assert "healthy: a beat of RedBeat, which leaves no name; its lock ends in 1" in cli("health").output
    status = cli("status").output
    assert "leader      a beat of RedBeat, which leaves no name" in status
    assert "overdue     0\n" in status
    assert f"LAST, ENDED, NEXT and STATE hold for singlebeat, but {meaning}" in cli("list").output
    assert json.loads(cli("list", "--json").stdout)["warning"].startswith(meaning)
    assert f"warning             {meaning}" in cli("show", "paused").output
    assert json.loads(cli("show", "paused", "--json").stdout)["warning"].startswith(meaning)
    explained = cli("explain", "paused").output
    assert f"A{meaning[1:]}" in explained
    assert "It is paused, and runs all the same while a beat of RedBeat leads" in explained
    assert "pass without a run" not in explained
    assert f"warning  beat: {meaning}" in cli("doctor", code=1).output


def test_a_redbeat_that_was_killed_is_named_by_every_tool(redbeat, celery, app, redis, cli, probe):
    celery("beat", "-S", "singlebeat.Scheduler").wait_for("Standing by: another beat leads")
    redbeat.kill()
    redbeat.wait()
    dead, resign = "a beat of RedBeat holds the lock, which has no name, and 2 entries are overdue", "singlebeat resign"
    wait_until(lambda: ScheduleStatus.of(app).overdue == 2, timeout=30)

    for text in (cli("status").output, cli("doctor", code=1).output, cli("explain", "e").output.replace("A b", "a b")):
        assert dead in text
        assert "that beat was probably killed, or hangs" in text
        assert "Its lock ends by itself in 1" in text
        assert resign in text
    listed = cli("list").output
    assert (dead in listed, "but a beat of RedBeat leads" in listed) == (True, False)
    ago = datetime.now(UTC) - timedelta(seconds=100)  # as a minute later
    for name in ("e", "paused"):
        redis.hset(f"redbeat:{name}", "meta", Meta(ago, 5).encode())
    redis.zadd(SCHEDULE, {f"redbeat:{name}": ago.timestamp() for name in ("e", "paused")})
    assert resign in cli("health", code=1).output
    assert "healthy" in cli("health", "--max-lag", "3600").output
    code, text = probe()
    assert (code, dead in text) == (503, True)

    sent = redis.llen(QUEUE)
    assert "leads: " in cli("resign").output

    assert ScheduleStatus.of(app).leader["term"] == "1"
    wait_until(lambda: redis.llen(QUEUE) > sent, what="singlebeat to send")
    # A run is recorded after it was sent.
    wait_until(lambda: [record for record in Schedule(app).history() if record.decision == "dispatched"])
    assert not ScheduleStatus.of(app).redbeat_silent


def test_a_living_redbeat_ends_when_it_is_made_to_resign(redbeat, app, redis, cli, monkeypatch):
    monkeypatch.setattr("singlebeat.cli.status.HANDOVER", 0.0)

    assert "ended: a beat of RedBeat" in cli("resign").output

    assert redbeat.wait() != 0
    assert "LockNotOwnedError" in redbeat.text
    assert not ScheduleStatus.of(app).locked


def test_an_entry_whose_place_redbeat_has_made_too_early_is_not_overdue(server, app, redis):
    """After a start of RedBeat a place is too early by the age of the last run (sibson/redbeat#210)."""
    with make_app(server.celery_url) as theirs:
        scheduler = Service(theirs, scheduler_cls=RedBeatScheduler).get_scheduler()
        acquire_distributed_beat_lock(sender=type("Service", (), {"scheduler": scheduler}))
        now = datetime.now(UTC)
        hourly = crontab(minute=(now + timedelta(minutes=10)).minute)
        RedBeatSchedulerEntry("e", TASK, hourly, args=["e"], app=theirs, last_run_at=now - timedelta(minutes=40)).save()
        scheduler.tick()
        assert redis.zscore(SCHEDULE, "redbeat:e") < now.timestamp() - 300
        assert redis.llen(QUEUE) == 0, "RedBeat itself does not think so"

        assert (ScheduleStatus.of(app).overdue, ScheduleStatus.of(app).lag) == (0, 0.0)

        redis.hset("redbeat:e", "meta", Meta(now - timedelta(minutes=90), 1).encode())
        state = ScheduleStatus.of(app)
        assert state.overdue == 1
        assert state.lag == pytest.approx(30 * 60, abs=90), "since RedBeat should have looked at it"
        scheduler.close()


def test_an_entry_that_redbeat_has_disabled_or_never_sends_is_not_overdue(app, redis):
    long_ago = datetime.now(UTC) - timedelta(hours=2)
    put(app, "off", 60, enabled=False, last_run_at=long_ago)
    put(app, "max", 60, max_runs=1, last_run_at=long_ago)
    redis.zadd(SCHEDULE, {"redbeat:off": long_ago.timestamp(), "redbeat:max": long_ago.timestamp()})
    redis.set(LOCK, "of RedBeat", ex=60)

    assert ScheduleStatus.of(app).overdue == 1, "RedBeat knows no max_runs"
    assert replace(ScheduleStatus.of(app), leader={"host": "h"}).redbeat_silent == ""
