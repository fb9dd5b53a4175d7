"""Beat as a process: how it is started, what it does with what others write into Redis, and who takes over."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import median

import celery as celery_package
import pytest
from celery.schedules import schedule

from tests.support import APP, RedisServer, measured, wait_until

OTHER_SCHEDULER = {"beat_scheduler": "celery.beat:PersistentScheduler"}
LEADS = r"beat: Acquired lock: this beat leads event=leadership_gained term=\d+"
EVERY_SECOND = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["a"]}


def now(redis) -> float:
    """Return the server's time, in seconds."""
    seconds, microseconds = redis.time()
    return seconds + microseconds / 1e6


@pytest.fixture
def locked_server() -> Iterator[RedisServer]:
    with RedisServer(password="hush-hush") as server:
        yield server


@pytest.mark.parametrize(
    ("command", "conf"),
    [
        (["beat", "-S", "singlebeat.Scheduler"], OTHER_SCHEDULER),
        (["beat", "-S", "singlebeat"], OTHER_SCHEDULER),
        (["beat"], {"beat_scheduler": "singlebeat.Scheduler"}),
        (["worker", "-B", "--scheduler", "singlebeat.Scheduler"], OTHER_SCHEDULER),
    ],
    ids=["-S class", "-S short name", "setting", "worker -B"],
)
def test_every_way_to_start_it_runs_it_and_shows_no_password(command, conf, celery, locked_server):
    process = celery(*command, conf={**conf, "beat_schedule": {"a": EVERY_SECOND}}, server=locked_server)

    process.wait_for(LEADS)
    process.wait_for(r"Scheduler: Sending due task a ")

    if command[0] == "beat":
        assert process.matches(rf"^\s+\. redis -> redis://:\*+@localhost:{locked_server.port}$")
        assert process.matches(r"^\s+\. lock -> `redbeat::lock`, lease 10 s$")
        assert process.matches(r"singlebeat\.(\S+\.)?Scheduler")
    assert locked_server.password not in process.text
    assert locked_server.client().hget("redbeat::leader", "pid")
    assert "Traceback" not in process.text


def test_the_banner_shows_the_lock_and_the_lease_that_are_configured(celery, server):
    beat = celery("beat", conf={"redbeat_lock_timeout": 2.5, "redbeat_lock_key": "mine"}).ready()

    assert beat.matches(rf"^\s+\. redis -> {server.url}$")
    assert beat.matches(r"^\s+\. lock -> `redbeat:mine`, lease 2\.5 s$")


def definition(name: str, schedule: dict, **more) -> str:
    """Return an entry as RedBeat's documentation writes it."""
    task = {"name": name, "task": f"{APP}.plain", "args": [name], "kwargs": {"seconds": 0}, "enabled": True}
    return json.dumps({**task, "schedule": schedule, **more})


INTERVAL = {"__type__": "interval", "every": 5, "relative": False}
CRONTAB = {
    "__type__": "crontab",
    "minute": "5",
    "hour": "*",
    "day_of_week": "monday",
    "day_of_month": "*/7",
    "month_of_year": "[1-12]",
}


def test_an_entry_written_by_redis_commands_runs_within_two_seconds(celery, oracle, redis):
    celery("worker", "-c", "1").ready()
    beat = celery("beat")
    beat.wait_for(LEADS)
    forms = {
        "interval example": (INTERVAL, "redbeat:interval example"),
        "new-task-name": (INTERVAL, "new-task-name"),
        "no-relative": ({"__type__": "interval", "every": 5}, "redbeat:no-relative"),
        "crontab example": (CRONTAB, "redbeat:crontab example"),
    }
    delays = {}
    for name, (when, member) in forms.items():
        began = now(redis)
        redis.hset(f"redbeat:{name}", "definition", definition(name, when))
        redis.zadd("redbeat::schedule", {member: 0})
        run = oracle.wait_started(1, name)[0]
        delays[name] = run.started - began

    redis.zadd("redbeat::schedule", {"redbeat:zadd first": 0})
    beat.wait_for(r"Entry redbeat:zadd first cannot be used: it is quarantined until it is fixed")
    began = now(redis)
    redis.hset("redbeat:zadd first", "definition", definition("zadd first", INTERVAL))
    delays["zadd first"] = oracle.wait_started(1, "zadd first")[0].started - began

    measured(", ".join(f"{name}: {delay:.2f} s" for name, delay in delays.items()))
    assert median(delays.values()) < 4, delays  # not 2: a machine may be slow
    next_run = datetime.fromtimestamp(redis.zscore("redbeat::schedule", "redbeat:crontab example"))  # noqa: DTZ006
    assert next_run.minute == 5
    oracle.wait_started(2, "new-task-name")  # it goes on, under the place that its writer gave it
    assert redis.zscore("redbeat::schedule", "redbeat:new-task-name") is None
    assert not redis.exists("redbeat::quarantine")


def test_an_entry_with_options_that_end_workers_is_never_sent(celery, oracle, redis):
    """Celery's worker ends on such a message, and so does the next one that gets it."""
    worker = celery("worker", "-c", "1").ready()
    celery("beat").ready()
    often = {"__type__": "interval", "every": 0.5}
    after = {"task": f"{APP}.plain", "args": ["after"], "options": {"soft_time_limit": "five"}}
    bad = {"time limit": {"time_limit": "300 s"}, "eta": {"eta": 0}, "callback": {"link": [after]}}
    for name, options in {**bad, "good": {}}.items():
        text = json.dumps({**json.loads(definition(name, often)), "options": options})
        redis.hset(f"redbeat:{name}", "definition", text)
        redis.zadd("redbeat::schedule", {f"redbeat:{name}": 0})

    oracle.wait_ended(3, "good")

    assert worker.returncode is None
    assert {run.name for run in oracle.runs()} == {"good"}
    assert set(redis.hkeys("redbeat::quarantine")) == {f"redbeat:{name}" for name in bad}


def test_an_entry_that_is_removed_with_redis_commands_stops(celery, oracle, redis):
    celery("worker", "-c", "1").ready()
    celery("beat").ready()
    often = {"__type__": "interval", "every": 0.5}
    for name in ("clock", "removed"):
        redis.hset(f"redbeat:{name}", "definition", definition(name, often))
        redis.zadd("redbeat::schedule", {f"redbeat:{name}": 0})
    oracle.wait_started(2, "removed")

    redis.delete("redbeat:removed")
    redis.zrem("redbeat::schedule", "redbeat:removed")

    def ticks(count):
        oracle.wait_started(oracle.started("clock") + count, "clock")

    ticks(2)  # what was on its way has come
    started = oracle.started("removed")
    ticks(4)
    assert oracle.started("removed") == started
    assert redis.keys("redbeat:removed") == []
    assert redis.zscore("redbeat::schedule", "redbeat:removed") is None


@pytest.fixture
def two_beats(celery):
    """Starts two beats; returns the one that leads and the one that stands by."""

    def start(*args, **conf):
        both = [
            celery("beat", *args, *(["-n", f"beat{number}@test"] if args else []), conf=conf) for number in range(2)
        ]
        leader = wait_until(
            lambda: next((beat for beat in both if beat.matches(LEADS)), None), timeout=30, what="a leader"
        )
        standby = both[1 - both.index(leader)]
        standby.wait_for(rf"beat: Standing by: \S+:{leader.pid} leads event=stands_by .*since=")
        return leader, standby

    return start


@pytest.mark.skipif(
    tuple(map(int, celery_package.__version__.split(".")[:2])) < (5, 7), reason="beat answers since Celery 5.7"
)
def test_one_beat_leads_one_stands_by_and_both_answer_a_ping(two_beats, celery):
    leader, standby = two_beats("--enable-remote-control", beat_schedule={"a": EVERY_SECOND})
    leader.wait_for("Sending due task a ", count=2)

    for beat in (leader, standby):
        beat.wait_for(r"(?i)remote control")
    ping = celery("inspect", "ping", "-d", "beat0@test,beat1@test", "--timeout", "5")

    assert ping.wait(60) == 0, ping.tail()
    wait_until(lambda: ping.matches("2 nodes online"), what="both answers")
    assert all(ping.matches(rf"beat{number}@test: OK") for number in range(2)), ping.tail()
    assert not standby.matches(LEADS)
    assert not standby.matches("Sending due task")


def test_a_standby_takes_over_from_a_terminated_leader(two_beats, redis):
    """Within 1 s; the bound is for slow machines. A killed leader is B1 of ``test_incidents.py``."""
    often = {**EVERY_SECOND, "schedule": schedule(0.25)}
    leader, standby = two_beats(redbeat_lock_timeout=10, beat_schedule={"a": often})
    leader.wait_for("Sending due task a ", count=2)
    assert not standby.matches("Sending due task")

    began = time.monotonic()
    leader.terminate()
    standby.wait_for("Sending due task a ")
    took = time.monotonic() - began

    measured(f"SIGTERM: dispatched by the other after {took:.2f} s")
    assert took < 5
    assert standby.matches(LEADS)
    assert redis.hget("redbeat::leader", "pid") == str(standby.pid)
    assert leader.wait() == 0
    assert leader.wait_for("beat: Released lock")
    standby.wait_for("Sending due task a ", count=4)
    ids = [record["id"] for _, record in redis.xrange("redbeat::history")]
    assert len(set(ids)) == len(ids) >= 4, "an occurrence was decided twice"


@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT"])
def test_a_hangup_or_a_quit_releases_leadership(name, celery, redis):
    beat = celery("beat", conf={"beat_schedule": {"a": EVERY_SECOND}})
    beat.wait_for("Sending due task a ")

    beat.send(getattr(signal, name))

    assert beat.wait() == 0
    assert beat.matches("beat: Released lock")
    assert redis.exists("redbeat::lock") == 0


def test_a_beat_stopped_amid_a_message_ends_and_loses_no_occurrence(celery, redis, own_server):
    conf = {"broker_url": own_server.celery_url, "beat_schedule": {"a": EVERY_SECOND}}
    beat = celery("beat", conf=conf)
    wait_until(lambda: redis.xlen("redbeat::history") >= 1, timeout=30, what="a message that was sent")

    def paused_between_two_messages() -> bool:
        own_server.pause()
        if redis.hexists("redbeat:a", "pending"):  # the broker may have it, and be waiting only for its confirmation
            own_server.resume()
            return False
        return True

    wait_until(paused_between_two_messages, timeout=30)
    pending = json.loads(wait_until(lambda: redis.hget("redbeat:a", "pending"), timeout=30, what="a claim"))
    time.sleep(0.3)  # now it waits for the broker's answer: the signal closes the connection under it

    beat.terminate()

    assert beat.wait() == 0
    own_server.resume()
    fates = {record["id"]: record["decision"] for _, record in redis.xrange("redbeat::history")}
    assert fates.get(pending["id"], "pending") == "pending"
    celery("beat", conf=conf)
    wait_until(lambda: redis.xlen("redbeat::history") > len(fates), timeout=30, what="another decision")
    fates = {record["id"]: record["decision"] for _, record in redis.xrange("redbeat::history")}
    assert fates[pending["id"]] == "dispatched"


@pytest.mark.parametrize("command", [["beat"], ["worker"], ["worker", "-B"]], ids=" ".join)
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("singlebeat_lock_leese", 3, r"unknown setting singlebeat_lock_leese; did you mean singlebeat_lock_lease\?"),
        ("redbeat_lock_timeout", -1, r"redbeat_lock_timeout must be a positive number of seconds, not -1"),
    ],
    ids=["unknown name", "wrong value"],
)
def test_a_wrong_setting_ends_the_start_with_one_line_that_names_it(setting, value, message, command, celery):
    process = celery(*command, conf={setting: value})

    code = process.wait(60)

    process.stop()
    assert code not in (0, None)
    lines = [line for line in process.lines if setting in line]
    assert len(lines) == 1, process.tail()
    assert process.matches(rf"^Error: {message}$"), process.tail()
    assert "Traceback" not in process.text


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0?sentinel_kwargs=x", "redis:/:hush-hush@127.0.0.1:1/0"])
def test_a_wrong_url_of_the_schedule_ends_the_start_with_one_line(url, celery):
    process = celery("beat", conf={"redbeat_redis_url": url})

    code = process.wait(60)

    process.stop()
    assert code not in (0, None)
    assert process.matches(r"^Error: (set )?redbeat_redis_url"), process.tail()
    assert "Traceback" not in process.text
    assert "hush-hush" not in process.text


def test_a_lazy_argument_is_computed_by_the_current_leader(celery, oracle, redis):
    app, conf = "tests.system.given", {"redbeat_lock_timeout": 2}
    celery("worker", "-c", "1", "-P", "threads", app=app).ready()

    for _ in range(2):
        beat = celery("beat", app=app, conf=conf)
        beat.wait_for(LEADS)
        runs = oracle.wait_ended(2, f"by {beat.pid} in {datetime.now(UTC).year}")
        assert len({run.id for run in runs}) == len(runs)
        beat.kill()

    assert not redis.exists("redbeat::quarantine")
    nominal = [record["nominal"] for _, record in redis.xrange("redbeat::history")]
    assert len(nominal) == len(set(nominal))
    assert redis.zscore("redbeat::schedule", "redbeat:given") % 1 == pytest.approx(0, abs=0.001)
