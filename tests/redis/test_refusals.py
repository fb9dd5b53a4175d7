"""What a server refuses, and a schedule without a leader: what the tools say, and what they must not say."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import contextmanager
from datetime import timedelta

import pytest
from celery.beat import Service
from celery.schedules import schedule

from singlebeat import Entry
from singlebeat.beat.clock import STORED_EVERY
from singlebeat.beat.keys import Keys
from singlebeat.beat.lease import Lease
from singlebeat.beat.metrics import Metrics
from singlebeat.beat.probe import LOCK_COMMANDS, SCHEDULE_COMMANDS
from singlebeat.beat.state import SILENT_AFTER, State
from tests.support import APP, ROOT, RedisServer, without
from tests.system.apps import make_app

#: Of the rights that README asks for, those that no script or call uses on a key.
OF_NO_KEY = {"eval", "evalsha", "multi", "exec", "select", "ping", "client|setname", "time", "scan", "info"}


@pytest.fixture(autouse=True)
def _no_worker_is_waited_for(monkeypatch):
    monkeypatch.setattr("singlebeat.cli.workers.TIMEOUT", 0.05)


@pytest.fixture
def beat_of():
    schedulers = []

    def make(app):
        app.conf.singlebeat_watchdog_timeout = None
        schedulers.append(Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler())
        return schedulers[-1]

    yield make
    for scheduler in schedulers:
        scheduler.close()


def keys(redis) -> set[str]:
    return {key for key in redis.scan_iter() if not key.startswith("_kombu")}


def findings(cli, app, about: str) -> list[tuple[str, str]]:
    rows = json.loads(cli("doctor", "--json", app=app, code=None).stdout)
    return [(row["level"], row["text"]) for row in rows if row["about"].startswith(about)]


def put(app, **fields) -> Entry:
    return Entry("e", f"{APP}.plain", schedule(3600), args=["e"], run_on_start=True, app=app, **fields).save()


# ---------------------------------------------------------------- the doctor writes


def test_the_doctor_tries_every_command_that_the_readme_asks_rights_for():
    text = (ROOT / "README.rst").read_text("utf-8")
    rights = re.search(r"ACL SETUSER singlebeat on >\S+ (.+?)\n\n", text, re.DOTALL)[1].split()
    granted = {rule[1:] for rule in rights if rule.startswith("+")}

    tried = {command.lower() for command, *_ in SCHEDULE_COMMANDS}

    assert tried == granted - OF_NO_KEY
    assert {command.lower() for command, *_ in LOCK_COMMANDS} <= granted


def test_the_doctor_finds_nothing_refused_on_a_server_that_is_well_and_leaves_nothing(cli, app, redis):
    before = keys(redis)

    (schedules,) = findings(cli, app, "schedule's server")[:1]
    assert schedules[0] == "fine"
    assert not [text for _, text in findings(cli, app, "") if "refuses" in text or "ACL" in text]
    assert keys(redis) == before


@pytest.mark.parametrize("command", ["zadd", "pexpire", "del", "xadd", "hscan"])
def test_the_doctor_names_the_command_that_the_acl_lacks(cli, server, redis, command):
    with without(server, command) as url, make_app(url) as app:
        found = findings(cli, app, "schedule's server")

    (text,) = [text for level, text in found if level == "problem"]
    assert text == f"the ACL of its user lacks {command.upper()}: grant +{command} (README, Rights)"
    redis.flushall()


def test_the_doctor_names_a_call_and_a_prefix_that_the_acl_lacks(cli, server, redis):
    with without(server, "evalsha") as url, make_app(url, {"singleton_backend_url": server.url}) as app:
        result = cli("doctor", app=app, code=2)
    assert "evalsha" in result.output

    redis.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], keys=["redbeat:*"])
    url = server.celery_url.replace("://", "://mute:any@")
    with make_app(url, {"redbeat_redis_url": url.replace("redis+socket", "unix")}) as app:
        ((level, text),) = findings(cli, app, "locks' server")
    redis.acl_deluser("mute")
    assert level == "problem"
    assert "ACL LOG on the server names the command; README, Rights" in text


@contextmanager
def full(server):
    """Leave the server no memory to write."""
    client = server.client()
    client.config_set("maxmemory", "1")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")


@contextmanager
def replica(server):
    """Make the server a replica of one that is not there."""
    client = server.client()
    client.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@pytest.mark.parametrize(("refusing", "says"), [(full, "Its memory is full"), (replica, "It is a replica")])
def test_tools_say_that_the_server_refuses_and_not_that_a_beat_is_to_be_started(
    cli, own_server, beat_of, refusing, says
):
    with RedisServer() as broker, make_app(own_server.celery_url, {"broker_url": broker.celery_url}) as app:
        put(app)
        with refusing(own_server):
            beat_of(app).tick()
            found = findings(cli, app, "schedule's server") + findings(cli, app, "beat")
            explained = cli("explain", "e", app=app).output

    problems = [text for level, text in found if level == "problem"]
    assert len([text for text in problems if says in text]) == 2
    assert "until one is started" not in "".join(problems) + explained
    assert "Nothing is sent because of the schedule's server: it refuses to write" in explained
    assert says in explained


def test_beat_says_where_the_refused_command_is_named(server, redis, beat_of, caplog):
    with without(server, "zadd") as url, make_app(server.celery_url, {"redbeat_redis_url": url}) as app:
        redis.set("redbeat::lock", "another", px=60_000)
        beat_of(app).tick()

    (told,) = [record.singlebeat for record in caplog.records if record.singlebeat["event"] == "trouble"]
    assert "ACL LOG on the server names the command; README, Rights" in told["reason"]


# ---------------------------------------------------------------- servers that are away


def test_explain_and_status_say_that_a_run_is_claimed_and_waits_for_the_broker(cli, server, redis, own_server, beat_of):
    with make_app(server.celery_url, {"broker_url": own_server.celery_url, "task_publish_retry": False}) as app:
        put(app)
        own_server.kill()
        beat_of(app).tick()

        explained, status = cli("explain", "e", app=app).output, cli("status", app=app).output

    assert re.search(
        r"The run for \S+ \S+ is claimed and waits to be sent, as task \S+: the broker does not", explained
    )
    assert "It is due now" not in explained
    assert "pending     1, claimed and not yet sent" in status


def test_explain_tells_what_is_known_while_the_locks_server_is_away(cli, server, redis, own_server, beat_of):
    with make_app(server.celery_url, {"singleton_backend_url": own_server.url}) as app:
        put(app, overlap="allow_all")
        Entry("waits", f"{APP}.single", schedule(3600), args=["e"], run_on_start=True, app=app).save()
        own_server.kill()
        beat_of(app).tick()

        sent, waits = cli("explain", "e", app=app).output, cli("explain", "waits", app=app).output

    assert "was sent at" in sent
    assert "It runs next for" in sent
    assert "holds a lock is not known: the locks' server" in sent
    assert "is claimed and waits to be sent" in waits
    assert "the locks' server" in waits
    assert "does not answer" in waits


def test_health_that_wants_less_lag_than_is_usual_says_how_late_beat_is(cli, app, redis):
    redis.set("redbeat::lock", "t", px=60_000)
    redis.zadd("redbeat::schedule", {"redbeat:late": redis.time()[0] - 4})

    output = cli("health", "--max-lag", "3", code=1).output

    assert re.search(r"1 entries are overdue, the first by [45] s", output)


# ---------------------------------------------------------------- beats that share the work


@pytest.fixture
def shared(server, redis):
    with make_app(server.celery_url, {"redbeat_lock_key": None}) as app:
        yield app


def ready(app, redis) -> tuple[int, str]:
    code, _, body = Metrics(app, Lease(lambda: redis, Keys.of(app).lease, ttl=30)).answer("/readyz")
    return code, body.decode().strip()


def test_beats_that_share_the_work_are_healthy_in_every_tool(cli, shared, redis, beat_of):
    put(shared)
    beat_of(shared).tick()

    assert ready(shared, redis) == (200, "ok")
    assert "healthy: none: beats share the work" in cli("health", app=shared).output
    assert (
        "leader      none: beats share the work (redbeat_lock_key is None), the last sign"
        in cli("status", app=shared).output
    )
    ((level, text),) = findings(cli, shared, "beat")
    assert level == "warning"
    assert f"1 share the work: {socket.gethostname()} (pid {os.getpid()}, since 20" in text
    assert f"beats       1\n  {socket.gethostname()}, pid {os.getpid()}, since 20" in cli("status", app=shared).output
    assert [level for level, _ in findings(cli, shared, "redbeat_lock_key")] == ["warning"]
    explained = cli("explain", "e", app=shared).output
    assert "No beat" not in explained
    assert "was sent at" in explained
    assert "leave out --role leader" in cli("health", "--role", "leader", app=shared, code=1).output


@pytest.mark.parametrize("ever", [False, True])
def test_beats_that_share_the_work_are_missed_when_none_works(cli, shared, redis, beat_of, ever):
    put(shared)
    if ever:
        beat_of(shared).tick()
        redis.incrbyfloat("redbeat::alive", -1000)
    since = r"for 10\d\d s" if ever else "ever"

    code, text = ready(shared, redis)
    assert code == 503
    assert re.fullmatch(rf"no beat works: there was no sign of one {since}, and none leads \(redbeat_lock_key.*", text)
    assert "no sign of one" in cli("health", app=shared, code=1).output
    assert ("no sign of any" in cli("status", app=shared).output) is not ever
    ((level, text),) = findings(cli, shared, "beat")
    assert level == "problem"
    assert text.endswith("nothing is sent until one is started")
    assert "No beat works: nothing is sent until one is started" in cli("explain", "e", app=shared).output


def test_a_sign_of_life_by_a_clock_that_was_ahead_hides_no_dead_beat(shared, redis, beat_of):
    beat = beat_of(shared)
    beat.tick()
    now, term = beat.server_time.now(), beat.lease.acquire()

    beat._tick(now + timedelta(hours=1), term)
    assert not State.of(shared).works
    beat._tick(now, term)

    assert State.of(shared).works
    assert float(redis.get("redbeat::clock")) > now.timestamp() + 3000


def test_a_beat_that_shares_the_work_gives_signs_of_life_in_time(shared, redis, beat_of):
    beat = beat_of(shared)
    beat.tick()
    first = float(redis.get("redbeat::alive"))
    now = beat.server_time.now()

    beat._tick(now + STORED_EVERY, beat.lease.acquire())

    assert float(redis.get("redbeat::alive")) > first
    assert STORED_EVERY.total_seconds() * 2 < SILENT_AFTER
    assert State.of(shared).works
