"""What a server refuses, and a schedule without a leader: what the tools say, and what they must not say."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from celery.beat import Service
from celery.schedules import schedule

from singlebeat import Entry
from singlebeat.beat import store
from singlebeat.beat.delivery import Reader
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.clock_guard import STORED_EVERY
from singlebeat.beat.leadership.lease import Lease
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.beat.status import SILENT_AFTER, ScheduleStatus
from singlebeat.beat.store.probe import LOCKS, SCHEDULE, Needs, with_advice
from singlebeat.cli.workers import Workers
from singlebeat.connections import ResponseError
from singlebeat.errors import LockBackendError, UnusableLockError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Call, Ref
from singlebeat.lua import Script
from singlebeat.signals import leadership_gained, leadership_lost
from tests.support import APP, ROOT, RedisServer, wait_until, without
from tests.system.apps import make_app


def rights() -> list[str]:
    """Return the commands that README lets its user run."""
    text = (ROOT / "README.rst").read_text("utf-8")
    rules = re.search(r"ACL SETUSER singlebeat on >\S+ (.+?)\n\n", text, re.DOTALL)[1].split()
    return [rule[1:] for rule in rules if rule.startswith("+")]


def needed(needs: Needs) -> set[str]:
    return {*needs.calls, *(command.lower() for command, *_ in needs.commands)}


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


@contextmanager
def signals(*, gained, lost):
    leadership_gained.connect(gained, weak=False)
    leadership_lost.connect(lost, weak=False)
    try:
        yield
    finally:
        leadership_gained.disconnect(gained)
        leadership_lost.disconnect(lost)


def keys(redis) -> set[str]:
    return {key for key in redis.scan_iter() if not key.startswith("_kombu")}


def findings(cli, app, about: str) -> list[tuple[str, str]]:
    rows = json.loads(cli("doctor", "--json", app=app, code=None).stdout)
    return [(row["level"], row["text"]) for row in rows if row["about"].startswith(about)]


def put(app, **fields) -> Entry:
    name = fields.pop("name", "e")
    return Entry(name, f"{APP}.plain", schedule(3600), args=[name], run_on_start=True, app=app, **fields).save()


# ---------------------------------------------------------------- the doctor writes


def test_the_doctor_tries_every_command_that_the_readme_asks_rights_for():
    assert needed(SCHEDULE) == {*rights()} - {"select"}, "which a connection needs, if at all"
    assert needed(LOCKS) <= needed(SCHEDULE)


def test_doctor_finds_no_refusal_on_a_healthy_server_and_leaves_nothing(cli, app, redis):
    before = keys(redis)

    (schedules,) = findings(cli, app, "schedule's server")[:1]
    assert schedules[0] == "fine"
    assert not [text for _, text in findings(cli, app, "") if "refuses" in text or "ACL" in text]
    assert keys(redis) == before


def grant(command: str) -> str:
    return f"the ACL of its user lacks {command.upper()}: grant +{command} (README, Rights)"


@contextmanager
def lacking(server, command, **conf):
    """Yield an app whose user lacks a command on the schedule's and the locks' server, and what names the two."""
    with without(server, command) as mute:
        url = mute.replace("redis+socket", "unix")
        conf = {"redbeat_redis_url": url, "singleton_backend_url": url, **conf}
        with make_app(server.celery_url, conf) as app:
            yield app, [f"the {which} server {url.replace(':any@', ':**@')}" for which in ("schedule's", "locks'")]


#: Commands that ask no workers, which takes its time; those that write come last.
COMMANDS = (
    *("status", "health", "list", "show e", "next e", "history", "history e", "locks", "export"),
    *("add f shop.bill --every 60", "edit e --every 7200", "pause e", "resume e", "trigger e", "delete e", "unlock a"),
)


@pytest.mark.parametrize("command", rights())
def test_every_tool_names_the_command_that_the_acl_lacks(cli, app, server, redis, monkeypatch, command):
    monkeypatch.setattr(
        Workers, "ask", lambda _: Workers({}, {}, {}, {}, {}, (0.0, 0.0))
    )  # kombu waits a second for answers
    put(app)
    with lacking(server, command) as (mute, servers):
        rows = json.loads(cli("doctor", "--json", app=mute, code=1).stdout)
        outputs = [(tool, cli(*tool.split(), app=mute, code=None)) for tool in COMMANDS]

    said = {(row["about"], row["text"]) for row in rows if row["level"] == "problem" and "server " in row["about"]}
    lack = [where for where, needs in zip(servers, (SCHEDULE, LOCKS), strict=True) if command in needed(needs)]
    assert said == {(where.removeprefix("the "), grant(command)) for where in lack}
    assert {"workers"} <= {row["about"] for row in rows}, "the other parts go on"
    lines = {f"Error: {server}: {grant(command)}" for server in servers}
    for tool, result in outputs:
        text = result.output.strip()
        assert result.exit_code < 2 or text in lines, f"{tool}: {text}"
        assert "permission" not in text, f"{tool}: {text}"
        assert "can't run" not in text, f"{tool}: {text}"


@pytest.mark.parametrize(("command", "option"), [("select", "db=1"), ("client|setname", "client_name=ours")])
def test_the_doctor_names_the_command_that_connections_lack(cli, server, redis, command, option):
    with without(server, command) as mute:
        url = mute.replace("redis+socket", "unix")
        conf = {"redbeat_redis_url": f"{url}?{option}", "singleton_backend_url": f"{url}?{option}"}
        with make_app(server.celery_url, conf) as app:
            rows = json.loads(cli("doctor", "--json", app=app, code=1).stdout)

    said = [row["text"] for row in rows if row["level"] == "problem" and "server " in row["about"]]
    assert said == [grant(command)] * 2


def test_the_doctor_names_a_prefix_that_the_acl_lacks(cli, server, redis):
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
def test_tools_report_a_refusing_server_and_ask_for_no_new_beat(cli, own_server, beat_of, refusing, says):
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


@pytest.mark.parametrize(
    ("refusing", "says"),
    [
        (full, "it refuses to write, so that nothing is sent: .+Its memory is full: free some, or raise maxmemory"),
        (replica, "it refuses to write, so that nothing is sent: .+It is a replica"),
    ],
)
def test_a_server_that_refuses_to_write_is_unhealthy_for_every_probe(cli, own_server, beat_of, redis, refusing, says):
    with make_app(own_server.celery_url) as app:
        beat_of(app).tick()
        assert ready(app, redis) == (200, "ok")
        with refusing(own_server):
            beat_of(app).lease.renew()
            (code, probed), health = ready(app, redis), cli("health", app=app, code=1).output
        again = ready(app, redis), cli("health", app=app).output

    where = re.escape(f"the schedule's server {own_server.url}")
    assert code == 503
    assert re.fullmatch(f"{where}: {says}.*", probed)
    assert re.fullmatch(f"Error: {where}: {says}.*\n", health)
    assert again[0] == (200, "ok")
    assert again[1].startswith("healthy: ")


def test_a_beat_that_may_not_run_cached_scripts_is_not_ready(server, redis):
    redis.script_load(Script(store.__name__, "probe").text)  # as after a probe before the right was taken away
    with lacking(server, "eval") as (app, (schedules, _)):
        code, probed = ready(app, redis)

    assert code == 503
    assert probed.startswith(schedules)
    assert "grant +eval" in probed


@pytest.mark.parametrize("command", ["pexpire", "xadd", "hset"])
def test_a_right_that_beat_lacks_is_named_by_every_probe(cli, server, redis, beat_of, command):
    with lacking(server, command) as (app, (schedules, _)):
        beat_of(app).tick()
        probed, health = ready(app, redis), cli("health", app=app, code=1).output

    assert probed == (503, f"{schedules}: {grant(command)}")
    assert health == f"Error: {schedules}: {grant(command)}\n"


def test_a_run_that_cannot_be_confirmed_is_not_sent_again(app, server, redis, beat_of):
    """It is of an entry without a lock, so that no worker would refuse the copies."""
    put(app, overlap="allow_all")
    with lacking(server, "hdel") as (mute, _):
        beat = beat_of(mute)
        for _ in range(4):
            beat.tick()
            beat._recheck_at = time.monotonic()
        sent = redis.llen("celery")
        pending = redis.zcard("redbeat::pending")

    assert (sent, pending) == (1, 1)


def test_runs_whose_history_is_refused_are_sent_and_logged_once(cli, server, redis, beat_of, caplog):
    caplog.set_level("INFO", "celery.beat")
    with lacking(server, "xadd") as (app, _):
        for name in "abc":
            put(app, name=name)
        beat = beat_of(app)
        beat.tick()
        beat._recheck_at = time.monotonic()
        beat.tick()
        explained, found = cli("explain", "a", app=app).output, findings(cli, app, "beat")

    told = [record.singlebeat for record in caplog.records]
    assert sorted(each["entry"] for each in told if each["event"] == "dispatched") == ["a", "b", "c"]
    assert redis.llen("celery") == 3
    assert redis.zcard("redbeat::pending") == 0
    assert "trouble" in {each["event"] for each in told}
    assert re.search(r"The run for \S+ \S+ was sent at \S+ \S+ as task", explained)
    assert "Nothing is sent" not in explained
    assert "broker" not in str(found)


def test_a_wrong_password_is_logged_with_its_server_and_a_remedy(server, redis, beat_of, caplog):
    with without(server, "flushall") as url, make_app(server.celery_url, {"redbeat_redis_url": url}) as app:
        app.conf.redbeat_lock_timeout = 3
        beat = beat_of(app)
        beat.tick()
        redis.acl_deluser("mute")  # which ends its connections, too
        code, probed = ready(app, redis)
        wait_until(lambda: "event=not_renewed" in caplog.text, what="a renewal that fails")
        wait_until(lambda: beat.lease.term() is None, what="the end of the term")
        beat.tick()

    where = url.replace(":any@", ":**@")
    says = f"the schedule's server {where} refuses: invalid username-password pair or user is disabled. "
    says += "Correct the user and the password in its URL or its options"
    assert (code, probed) == (503, says)
    reasons = {record.singlebeat["event"]: record.singlebeat.get("reason") for record in caplog.records}
    assert reasons["trouble"] == reasons["not_renewed"] == says
    assert ":any@" not in caplog.text


@pytest.mark.parametrize(
    ("refusing", "advice"),
    [
        (full, "Its memory is full: free some, or raise maxmemory"),
        (replica, "It is a replica: name the primary, or the Sentinels that know it"),
    ],
)
def test_doctor_names_a_refusing_broker_and_the_leader(cli, app, own_server, beat_of, refusing, advice):
    """The broker and the schedule are on one server, as most users have it."""
    with make_app(own_server.celery_url, {"singleton_backend_url": app.conf.broker_url}) as app:
        put(app, overlap="allow_all")
        beat = beat_of(app)
        beat.lease.acquire()
        with refusing(own_server):
            found = findings(cli, app, "broker") + findings(cli, app, "beat")

    (broker, *beats) = [text for level, text in found if level == "problem"]
    assert re.fullmatch(rf"it refuses: .+\. {advice}; messages cannot be sent", broker)
    assert any("leads at this moment, and cannot send while the schedule's server refuses writes" in b for b in beats)
    assert "no beat" not in "".join(beats)


def test_a_broker_that_refuses_is_not_called_unreachable(cli, server, redis, own_server, beat_of, caplog):
    conf = {"broker_url": own_server.celery_url, "task_publish_retry": False}
    with make_app(server.celery_url, {"redbeat_redis_url": server.url, **conf}) as app, full(own_server):
        put(app, overlap="allow_all")
        beat_of(app).tick()
        explained = cli("explain", "e", app=app).output

    (told,) = [record for record in caplog.records if record.singlebeat["event"] == "unreachable"]
    assert "stay pending until the broker takes it" in told.getMessage()
    assert told.singlebeat["reason"].startswith(f"the broker {own_server.url}: ")
    assert "is claimed and waits to be sent" in explained
    assert f"the broker {own_server.url} refuses: " in explained
    assert "Its memory is full: free some, or raise maxmemory. Beat sends it once that is over" in explained
    assert "does not answer" not in explained


def test_beat_says_where_the_refused_command_is_named(server, redis, beat_of, caplog):
    with without(server, "zadd") as url, make_app(server.celery_url, {"redbeat_redis_url": url}) as app:
        redis.set("redbeat::lock", "another", px=60_000)
        beat_of(app).tick()

    (told,) = [record.singlebeat for record in caplog.records if record.singlebeat["event"] == "trouble"]
    named = r"'zadd' command.*: grant \+zadd \(README, Rights\)"
    assert re.search(rf"{named}|ACL LOG on the server names the command; README, Rights", told["reason"])


@pytest.mark.parametrize("command", ["sadd", "smembers", "hscan", "hdel"])
def test_a_beat_that_ticks_cannot_serve_logs_each_event_once(server, redis, beat_of, caplog, monkeypatch, command):
    monkeypatch.setattr("singlebeat.beat.scheduler.RECHECK_AFTER", 0.05)
    caplog.set_level("INFO", "celery.beat")
    gained, lost = Mock(), Mock()
    entries = {"x": {"task": f"{APP}.plain", "schedule": schedule(0.05), "args": ["x"]}}
    with lacking(server, command, beat_schedule=entries) as (app, _), signals(gained=gained, lost=lost):
        beat = beat_of(app)
        for _ in range(6):
            beat.tick()
            time.sleep(0.02)
        told = [record.singlebeat["event"] for record in caplog.records]
        assert [told.count(event) for event in ("leadership_gained", "trouble", "recovered")] == [1, 1, 0]
        (trouble,) = [record.singlebeat for record in caplog.records if record.singlebeat["event"] == "trouble"]
        assert f"grant +{command}" in trouble["reason"] or "ACL LOG" in trouble["reason"]

        redis.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], keys=["*"])
        wait_until(lambda: beat.tick() and not beat._in_trouble, what="a tick that does all there is to do")

    told = [record.singlebeat["event"] for record in caplog.records]
    assert [told.count(event) for event in ("leadership_gained", "recovered")] == [1, 1]
    assert gained.call_count == 1
    assert lost.call_count == 0


def test_a_term_that_ends_before_it_could_begin_is_logged(server, redis, beat_of, caplog):
    caplog.set_level("INFO", "celery.beat")
    with lacking(server, "sadd", beat_schedule={"x": {"task": f"{APP}.plain", "schedule": 3600}}) as (app, _):
        beat = beat_of(app)
        beat.tick()
        redis.set("redbeat::lock", "another", px=60_000)
        beat.lease.renew()
        beat.tick()

    told = [record.singlebeat["event"] for record in caplog.records]
    assert [told.count(event) for event in ("leadership_gained", "leadership_lost", "stands_by")] == [1, 1, 1]


@pytest.mark.parametrize("command", ["exists", "hset", "time", "zmscore"])
def test_explain_names_the_right_that_the_locks_server_lacks(cli, server, redis, beat_of, app, command):
    backend_of(app).announce("w", ttl=60)
    with lacking(server, command, redbeat_redis_url=server.url) as (mute, (_, locks)):
        put(mute)
        beat_of(mute).tick()
        explained = cli("explain", "e", app=mute).output

    assert f"{locks}: {grant(command)}" in explained


# ---------------------------------------------------------------- unreachable servers


def test_explain_and_status_name_a_claimed_run_that_waits_for_the_broker(cli, server, redis, own_server, beat_of):
    with make_app(server.celery_url, {"broker_url": own_server.celery_url, "task_publish_retry": False}) as app:
        put(app)
        own_server.kill()
        beat_of(app).tick()

        explained, status = cli("explain", "e", app=app).output, cli("status", app=app).output

    assert re.search(
        r"The run for \S+ \S+ is claimed and waits to be sent, as task \S+: the broker \S+ does not", explained
    )
    assert "It is due now" not in explained
    assert "pending     1, claimed and not yet sent" in status


def test_the_doctor_checks_the_rest_while_the_schedules_server_is_down(cli, server, redis, own_server):
    with make_app(server.celery_url, {"redbeat_redis_url": own_server.url, "redbeat_lock_timeout": 1}) as app:
        own_server.kill()
        result = cli("doctor", app=app, code=2)
        rows = json.loads(cli("doctor", "--json", app=app, code=2).stdout)

    where = re.escape(f"Error: the schedule's server {own_server.url}: ")
    assert re.match(where, result.stderr)
    about = {row["about"] for row in rows}
    assert about == {"redbeat_lock_timeout", "workers", f"schedule's server {own_server.url}"}
    assert "no worker answers" in result.stdout


def test_the_doctor_names_a_broker_that_does_not_answer(cli, server, redis, own_server):
    with make_app(server.celery_url, {"broker_url": own_server.url.replace("://", "://:secret@")}) as app:
        own_server.kill()
        ((level, text),) = findings(cli, app, f"broker {own_server.url.replace('://', '://:**@')}")

    assert level == "problem"
    assert text.startswith("it does not answer: ")


def test_explain_works_while_the_locks_server_is_unreachable(cli, server, redis, own_server, beat_of):
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
    code, _, body = BeatMetrics(app, Lease(lambda: redis, Keys.of(app).lease, ttl=30)).answer("/readyz")
    return code, body.decode().strip()


def test_beats_that_share_the_work_are_healthy_in_every_tool(cli, shared, redis, beat_of):
    put(shared)
    beat_of(shared).tick()

    assert ready(shared, redis) == (200, "ok")
    assert "healthy: none: beats share the work" in cli("health", app=shared).output
    assert (
        "leader      none: beats share the work (redbeat_lock_key is None), a beat was last seen"
        in cli("status", app=shared).output
    )
    ((level, text),) = findings(cli, shared, "beat")
    assert level == "warning"
    assert f"1 beats share the work: {socket.gethostname()} (pid {os.getpid()}, since 20" in text
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
    assert ("no beat was seen" in cli("status", app=shared).output) is not ever
    ((level, text),) = findings(cli, shared, "beat")
    assert level == "problem"
    assert "singlebeat sends nothing until one is started. A celery beat without -S singlebeat.Scheduler" in text
    assert "No beat works: singlebeat sends nothing until one is started" in cli("explain", "e", app=shared).output


def test_a_sign_of_life_by_a_clock_that_was_ahead_hides_no_dead_beat(shared, redis, beat_of):
    beat = beat_of(shared)
    beat.tick()
    now, term = beat.server_time.now(), beat.lease.acquire()

    beat._tick(now + timedelta(hours=1), term)
    assert not ScheduleStatus.of(shared).works
    beat._tick(now, term)

    assert ScheduleStatus.of(shared).works
    assert float(redis.get("redbeat::clock")) > now.timestamp() + 3000


def test_a_beat_that_shares_the_work_gives_signs_of_life_in_time(shared, redis, beat_of):
    beat = beat_of(shared)
    beat.tick()
    first = float(redis.get("redbeat::alive"))
    now = beat.server_time.now()

    beat._tick(now + STORED_EVERY, beat.lease.acquire())

    assert float(redis.get("redbeat::alive")) > first
    assert STORED_EVERY.total_seconds() * 2 < SILENT_AFTER
    assert ScheduleStatus.of(shared).works


# ---------------------------------------------------------------- locks that may not be read


def test_a_lock_that_may_not_be_read_is_not_unusable(server, redis):
    """To say so would let an operator delete a lock that is well, and a run start without it."""
    ref = Ref("SINGLETONLOCK_{a}", "a", nonce="n")
    with lacking(server, "hmget") as (mute, _):
        backend = backend_of(mute)
        asked = {
            "acquire": lambda: backend.acquire_many([Call(replace(ref, nonce=""), "t", "", 60)]),
            "begin": lambda: backend.begin(ref, lease=60, remember_for=60, task="t", arguments=""),
            "renew": lambda: backend.renew_many([ref], lease=60),
            "rotate": lambda: backend.rotate(ref, to=ref, ttl=60, remember_for=60),
            "finish": lambda: backend.finish_many([ref], remember_for=60),
        }
        for verb, ask in asked.items():
            with pytest.raises(LockBackendError, match=r"(?i)hmget|can't run this command") as error:
                ask()
            assert not isinstance(error.value, UnusableLockError), verb
    assert not redis.exists(ref.key)


# ---------------------------------------------------------------- queues while another app leads


@pytest.mark.parametrize("leader", ["", "blog"])
def test_queues_are_judged_by_the_app_whose_beat_sends(cli, app, redis, monkeypatch, leader):
    """A beat sends all entries to the queues of its own app, which another app does not know."""
    reader = Reader(frozenset({"another"}), frozenset({f"{APP}.plain"}), 1, [])
    workers = Workers({}, {"w1@vm": reader.tasks}, {}, {"w1@vm": reader}, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda _: workers)
    put(app)
    beat = Lease(lambda: redis, Keys.of(app).lease, ttl=10, about={"app": leader or str(app.main), "statics": ""})
    beat.acquire()

    about_queues = findings(cli, app, "queue celery")
    explained = cli("explain", "e", app=app).output
    beat.release()

    assert [level for level, _ in about_queues] == ([] if leader else ["problem"])
    assert ("no worker that answers reads queue celery" in explained.lower()) is not bool(leader)


@pytest.mark.parametrize("check", ["warn", "ignore"])
def test_an_app_whose_entries_another_app_sends_is_told_by_every_tool(cli, server, redis, check):
    """The other app's workers drop the messages; /readyz stays, since a standby of a renamed app does what it can."""
    with make_app(server.celery_url, {"singlebeat_other_app_check": check}) as app:
        put(app)
        other = Lease(lambda: redis, Keys.of(app).lease, ttl=10, about={"app": "blog", "statics": ""})
        other.acquire()
        told = {name: cli(*name.split(), app=app, code=None) for name in ("status", "health", "list", "explain e")}
        probed = ready(app, redis)
        other.release()

    says = "a beat of app blog leads, and sends entries to the queues of its own app"
    assert {name for name, result in told.items() if says in result.output.replace("A beat", "a beat")} == (
        {*told} if check == "warn" else set()
    )
    assert told["health"].exit_code == (1 if check == "warn" else 0)
    assert told["explain e"].output.startswith("A beat of app blog") is (check == "warn")
    assert probed == (200, "ok")


def test_status_and_list_name_the_refusal_while_entries_wait(cli, own_server, beat_of):
    with RedisServer() as broker, make_app(own_server.celery_url, {"broker_url": broker.celery_url}) as app:
        put(app)
        beat_of(app).tick()
        late = time.time() - 100
        own_server.client().zadd("redbeat::schedule", {"redbeat:e": late})
        with full(own_server):
            told = [cli(name, app=app).output for name in ("status", "list")]
        told_after = [cli(name, app=app).output for name in ("status", "list")]

    assert all("it refuses to write, so that nothing is sent" in text for text in told)
    assert "problem     the schedule's server " in told[0]
    assert all("refuses" not in text for text in told_after)


def test_a_replica_of_an_empty_server_is_named_where_entries_are_missing(cli, own_server):
    with RedisServer() as broker, make_app(own_server.celery_url, {"broker_url": broker.celery_url}) as app:
        with replica(own_server):
            status, listed = cli("status", app=app).output, cli("list", app=app).output
            explained = cli("explain", "e", app=app, code=1).output
        fresh = cli("explain", "e", app=app, code=1).output

    assert all("It is a replica: name the primary" in text for text in (status, listed, explained))
    assert "there is no entry 'e' under redbeat:, and no beat leads: the schedule's server" in explained
    assert "replica" not in fresh


def test_the_doctor_tells_which_changes_a_snapshot_has_lost(cli, app, redis, beat_of, monkeypatch):
    monkeypatch.setattr("singlebeat.beat.leadership.clock_guard.STORED_EVERY", timedelta(0))
    beat = beat_of(app)
    beat.tick()
    snapshot = redis.get("redbeat::clock")
    beat.tick()
    beat.lease.renew()
    before = findings(cli, app, "schedule")

    redis.set("redbeat::clock", snapshot)  # as a server that starts from it
    beat.tick()
    beat.lease.renew()

    since = datetime.fromtimestamp(float(snapshot), UTC).isoformat(timespec="seconds")
    says = f"the server had lost the changes since {since}, or shortly before: entries and pauses of that time are gone"
    assert says not in str(before)
    assert [level for level, text in findings(cli, app, "schedule") if says in text] == ["warning"]
    assert says in cli("explain", "late", app=app, code=1).output
    beat.lease.release()
    again = beat_of(app)
    again.tick()
    again.lease.renew()
    assert says not in str(findings(cli, app, "schedule")), "the warning lasts for the term"


def test_an_error_and_its_advice_are_two_sentences():
    error = ResponseError("Error running script: OOM command not allowed when used memory > 'maxmemory'.")

    assert with_advice(error).endswith("'maxmemory'. Its memory is full: free some, or raise maxmemory")
    assert with_advice(ResponseError("no.")) == "no"
