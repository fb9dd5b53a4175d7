"""What a server refuses, and a schedule without a leader: what the tools say, and what they must not say."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from celery.schedules import schedule
from redis.sentinel import MasterNotFoundError

from singlebeat import Scheduler, Singleton, clients, clocked
from singlebeat.beat import failures as failures_of
from singlebeat.beat import store
from singlebeat.beat.delivery import Reader
from singlebeat.beat.failures import UnreachableBrokerError
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import STAY, Lease
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.beat.result_backend import ResultBackendError
from singlebeat.beat.status import ScheduleStatus
from singlebeat.beat.store.probe import LOCKS, SCHEDULE, Needs
from singlebeat.connections import ResponseError
from singlebeat.diagnosis.workers import Workers
from singlebeat.errors import LockBackendError, UnusableLockError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Call, Ref, Verdict
from singlebeat.lua import Script
from singlebeat.run_results import flush_ends, record_end_of_message
from singlebeat.server_errors import NO_CONNECTION, with_advice
from singlebeat.signals import leadership_gained, leadership_lost
from tests.redis.bench import Bench
from tests.support import APP, RedisServer, connected, free_port, measured, page, wait_until, without
from tests.system.apps import make_app
from tests.system.given import Seconds

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")


def rights() -> list[str]:
    """Return the commands that the docs let their user run."""
    rules = re.search(r"ACL SETUSER singlebeat on >\S+ (.+?)\n\n", page("how-to/redis"), re.DOTALL)[1].split()
    return [rule[1:] for rule in rules if rule.startswith("+")]


def needed(needs: Needs) -> set[str]:
    return {*needs.calls, *(command.lower() for command, *_ in needs.commands)}


def keys(redis) -> set[str]:
    return {key for key in redis.scan_iter() if not key.startswith("_kombu")}


@pytest.fixture
def away(server, redis, bench_on) -> Bench:
    """A bench whose broker is away; its beat leads, and has claimed runs that it cannot send."""
    bench = bench_on(server, broker_url="amqp://guest:guest@127.0.0.1:1//")
    now = datetime.now(UTC)
    bench.put("once", every=clocked(now - timedelta(seconds=90)), ago=timedelta(hours=2))
    bench.put("hourly", ago=timedelta(hours=1, seconds=30))
    bench.tick()
    assert redis.zcard("redbeat::pending") == 2
    return bench


def test_a_run_that_is_claimed_and_cannot_be_sent_is_late(away, cli, probe):
    """However rare its entry is: the next time of the entry lies ahead, or there is none."""
    state = ScheduleStatus.of(away.app)
    assert (state.overdue, state.lag) == (0, pytest.approx(90, abs=30))
    said = cli("health", code=1, app=away.app).output
    assert re.search(r"2 occurrences are claimed and not confirmed, the first is late by \d+ s: if they stay", said)
    answer = BeatMetrics(away.app, away.schedulers[-1].lease).answer("/readyz")
    assert answer.code == 503
    assert answer.body.startswith(b"2 occurrences are claimed and not confirmed, the first is late by ")
    assert b"or the locks' server does not answer, or refuses a command (see doctor)" in answer.body
    assert probe(app=away.app) == (200, "ok"), "a standby is ready to lead, so that the leader can be replaced"
    cli("health", "--max-lag", "1000", app=away.app)
    assert re.search(r"pending +2, the first late by \d+ s, claimed", cli("status", app=away.app).output)
    assert re.search(r"problem +beat: 2 occurrences are claimed", cli("doctor", code=1, app=away.app).output)


def test_the_lateness_of_a_pending_run_begins_after_its_jitter(server, redis, bench_on, app):
    bench = bench_on(server, broker_url="amqp://guest:guest@127.0.0.1:1//")
    entry = bench.put(jitter=3000, ago=timedelta(hours=2))
    bench.tick()

    nominal = datetime.fromtimestamp(bench.pending().nominal, UTC)
    late = (datetime.now(UTC) - entry.timetable.due(nominal)).total_seconds()
    assert ScheduleStatus.of(app).pending_lag == pytest.approx(late, abs=30)


def test_an_entry_whose_claimed_run_waits_is_not_finished(away, cli):
    rows = {line.split()[0]: line for line in cli("list", app=away.app).output.splitlines()}
    assert re.search(r" 2 h ago +- +never +pending$", rows["once"])
    assert re.search(r" 1 h .* pending$", rows["hourly"])
    said = cli("explain", "once", app=away.app).output
    assert "After that run it is finished. If you delete it now, that run is not sent." in said
    assert "It is finished" not in said
    shown = cli("show", "once", app=away.app).output
    assert re.search(r"^state +pending$", shown, re.MULTILINE)
    last = datetime.fromisoformat(re.search(r"^last +(.*)$", shown, re.MULTILINE)[1])
    assert datetime.now(UTC) - last > timedelta(hours=1)


# ---------------------------------------------------------------- the doctor writes


def test_the_doctor_tries_every_command_that_the_docs_ask_rights_for():
    assert needed(SCHEDULE) == {*rights()} - {"select"}, "which a connection needs, if at all"
    assert needed(LOCKS) <= needed(SCHEDULE)


def test_doctor_finds_no_refusal_on_a_healthy_server_and_leaves_nothing(findings, cli, app, redis):
    before = keys(redis)

    (schedules,) = findings("schedule's server")[:1]
    assert schedules[0] == "fine"
    output = cli("doctor", code=None).output
    assert "refuses" not in output
    assert "ACL" not in output
    assert keys(redis) == before


def grant(command: str) -> str:
    return f"the ACL of its user lacks {command.upper()}: grant +{command} (docs, Rights)"


@pytest.fixture
def lacking(server, redis, bench_on):
    """Yield a bench whose user lacks a command on the schedule's and the locks' server, and what names the two."""

    @contextmanager
    def lacking(command, **conf):
        with without(server, command) as mute:
            url = mute.replace("redis+socket", "unix")
            conf = {"redbeat_redis_url": url, "singleton_backend_url": url, **conf}
            named = [f"the {which} server {url.replace(':any@', ':**@')}" for which in ("schedule's", "locks'")]
            yield bench_on(server, **conf), named

    return lacking


#: Commands that ask no workers, which takes its time; those that write come last.
COMMANDS = (
    *("status", "health", "list", "show e", "next e", "history", "history e", "locks", "export"),
    *("add f shop.bill --every 60", "edit e --every 7200", "pause e", "resume e", "trigger e", "delete e", "unlock a"),
)


@pytest.mark.parametrize("command", rights())
def test_every_tool_names_the_command_that_the_acl_lacks(cli, bench, lacking, monkeypatch, command):
    monkeypatch.setattr(
        Workers, "ask", lambda _: Workers({}, {}, {}, {}, {}, (0.0, 0.0))
    )  # kombu waits a second for answers
    bench.put()
    with lacking(command) as (mute, servers):
        rows = json.loads(cli("doctor", "--json", app=mute.app, code=1).stdout)
        outputs = [(tool, cli(*tool.split(), app=mute.app, code=None)) for tool in COMMANDS]

    said = {(row["about"], row["text"]) for row in rows if row["level"] == "problem" and "server " in row["about"]}
    lack = [where for where, needs in zip(servers, (SCHEDULE, LOCKS), strict=True) if command in needed(needs)]
    assert said == {(where.removeprefix("the "), grant(command)) for where in lack}
    assert {"workers"} <= {row["about"] for row in rows}, "the other parts go on"
    promised = {"calls of Singletons", "due entries"} & {row["about"] for row in rows}
    assert not (lack and promised)
    lines = {f"Error: {server}: {grant(command)}" for server in servers}
    for tool, result in outputs:
        text = result.output.strip()
        assert result.exit_code < 2 or text in lines, f"{tool}: {text}"
        assert "permission" not in text, f"{tool}: {text}"
        assert "can't run" not in text, f"{tool}: {text}"


def test_the_doctor_promises_nothing_of_a_broker_that_lacks_rights(cli, server, redis):
    with without(server, "lpush") as broker, make_app(broker, {"redbeat_redis_url": server.url}) as app:
        told = cli("doctor", app=app, code=None).output

    assert "one write" not in told


HELLO = (
    "HELLO must be called with the client already authenticated, otherwise the HELLO AUTH <user> <pass> option can be "
    "used to authenticate the client and select the RESP protocol version at the same time"
)


def test_a_login_that_is_refused_by_hello_has_advice():
    told = with_advice(ResponseError(HELLO))

    assert told == f"{HELLO}. Correct the user and the password in its URL or its options"


def test_doctor_says_that_the_password_of_the_result_backend_is_wrong(findings, bench, monkeypatch):
    monkeypatch.setattr(
        "singlebeat.diagnosis.doctor.finding.check_results", Mock(side_effect=ResultBackendError(HELLO))
    )

    ((level, text),) = findings("result backend", app=bench.app)

    assert level == "problem"
    assert text.endswith("Correct the user and the password in result_backend")
    assert "Start the backend" not in text


@pytest.mark.parametrize(("command", "option"), [("select", "db=1"), ("client|setname", "client_name=ours")])
def test_the_doctor_names_the_command_that_connections_lack(cli, server, redis, command, option):
    with without(server, command) as mute:
        url = mute.replace("redis+socket", "unix")
        conf = {"redbeat_redis_url": f"{url}?{option}", "singleton_backend_url": f"{url}?{option}"}
        with make_app(server.celery_url, conf) as app:
            rows = json.loads(cli("doctor", "--json", app=app, code=1).stdout)

    said = [row["text"] for row in rows if row["level"] == "problem" and "server " in row["about"]]
    assert said == [grant(command)] * 2


def test_the_doctor_names_a_prefix_that_the_acl_lacks(findings, server, redis):
    redis.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], keys=["redbeat:*"])
    url = server.celery_url.replace("://", "://mute:any@")
    with make_app(url, {"redbeat_redis_url": url.replace("redis+socket", "unix")}) as app:
        ((level, text),) = findings("locks' server", app=app)
    redis.acl_deluser("mute")
    assert level == "problem"
    assert text == "its user may not use the key SINGLETONLOCK_{doctor}: grant all keys with that prefix (docs, Rights)"


@pytest.mark.parametrize(
    "key", ["redbeat::schedule", "redbeat::placed", "redbeat::history", "redbeat::lock", "redbeat:e"]
)
def test_beat_and_doctor_name_a_key_of_the_schedule_that_the_acl_lacks(
    cli, server, redis, bench_on, logged, probe, key
):
    keys = Keys.of(bench_on(server).app)
    allowed = [name for name in (*keys.own, keys.entry("e")) if name != key]
    redis.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], keys=[*allowed, "SINGLETONLOCK_*"])
    bench_on(server).put()
    bench = bench_on(server, redbeat_redis_url=server.url.replace("://", "://mute:any@"))

    bench.tick()
    rows = json.loads(cli("doctor", "--json", app=bench.app, code=1).stdout)
    health, probed = cli("health", app=bench.app, code=None).output, probe(app=bench.app)
    _, scraped = probe("/metrics", app=bench.app)
    redis.acl_deluser("mute")

    assert f"the key {key} is denied to this user" in health
    assert f"the key {key} is denied to this user" in probed[1]
    assert probed[0] == 503
    assert "singlebeat_redis_up 1.0" in scraped
    assert "singlebeat_redis_refuses 1.0" in scraped
    (told,) = logged("trouble")
    advice = "grant all keys with that prefix (docs, Rights)"
    assert told["reason"].endswith(f": the key {key} is denied to this user: {advice}")
    (text,) = [row["text"] for row in rows if row["about"] == f"key {key}"]
    assert text == f"it is denied to this user, and beat cannot use it: {advice}"


@pytest.mark.parametrize("overlap", ["skip", "buffer_one"])
def test_a_lock_whose_key_is_denied_keeps_no_other_entry_from_running(
    server, redis, bench_on, several_writes, logged, overlap
):
    """As of a task with a key of its own: the server refuses a call with such a key as a whole."""

    class OwnKey(Singleton):
        def generate_lock(self, *args, **kwargs):
            return "mine:a"

    redis.acl_setuser("few", enabled=True, nopass=True, categories=["+@all"], keys=["SINGLETONLOCK_*", "singlebeat:*"])
    redis.zadd("singlebeat:workers", {"w": time.time()})
    bench = bench_on(server)
    app = bench.new_app(singleton_backend_url=server.url.replace("://", "://few:any@"))
    app.task(needed, name="own", base=OwnKey, shared=False)  # only its name and its key matter here
    single = f"{APP}.single"
    for name, task in {"a": "own", "b": single, "c": single}.items():
        bench.put(name, task=task, overlap=overlap)
    scheduler = bench.scheduler(app=app)
    for _ in range(2):
        scheduler.tick()
        bench.retry_now()

    is_sent = overlap == "skip"
    assert sorted(bench.names) == ["a", "b", "c"][not is_sent :]
    about = logged("unlocked" if is_sent else "publish_failed")
    assert {line["entry"] for line in about} == {"a"}
    assert "the lock mine:a is unusable: " in about[0]["reason"]
    assert logged("unreachable", "recovered") == []
    redis.acl_deluser("few")


@pytest.mark.parametrize("command", ["exists", "del", "pttl"])
def test_a_locks_server_that_refuses_some_calls_has_not_recovered(server, lacking, redis, logged, monkeypatch, command):
    """Not each call needs each command: some runs go on."""
    monkeypatch.setattr("singlebeat.beat.failures.TRY_LOCKS_EVERY", 0.0)
    with lacking(command, redbeat_redis_url=server.url) as (bench, _):
        failures, refused = bench.scheduler().dispatcher.failures, LockBackendError("refused")
        refused.__cause__ = ResponseError("refused")
        failures.note(refused)
        failures.note_answer(failures_of.LOCKS)
        assert (len(logged("unreachable")), logged("recovered")) == (1, [])

        redis.acl_setuser("mute", commands=[f"+{command}"])
        failures.note_answer(failures_of.LOCKS)
        assert len(logged("recovered")) == 1


def test_nothing_is_sent_without_the_right_to_write_the_history(own_server, bench_on):
    """Else each tick would send the message once more under its id, because it cannot confirm it."""
    with RedisServer() as broker:
        bench_on(own_server).put(overlap="allow_all")
        keys, admin = Keys.of(bench_on(own_server).app), own_server.client()
        allowed = [name for name in (*keys.own, keys.entry("e")) if name != keys.history]
        admin.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], keys=[*allowed, "SINGLETONLOCK_*"])
        muted = own_server.url.replace("://", "://mute:any@")
        bench = bench_on(own_server, redbeat_redis_url=muted, broker_url=broker.celery_url)
        bench.tick(3)
        assert broker.client().llen("celery") == 0

        admin.acl_setuser("mute", keys=["redbeat:*"])
        bench.tick(3)
        assert broker.client().llen("celery") == 1


@pytest.mark.parametrize(
    "error",
    [
        "No permissions to access a key",
        "This user has no permissions to access one of the keys used as arguments",
        "The user executing the script can't access at least one of the keys mentioned in the command arguments",
    ],
)
def test_an_error_about_a_key_has_advice_about_keys(error):
    advice = "grant all keys with the prefix of that key, which ACL LOG on the server names (docs, Rights)"

    assert with_advice(ResponseError(error)) == f"{error}: {advice}"


def test_an_error_of_sentinels_is_told_without_their_clients():
    error = MasterNotFoundError("No master found for 'm' : <redis.client.Redis(<redis.connection.ConnectionPool()>)>")

    assert with_advice(error) == "No master found for 'm'"


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
def test_tools_report_a_refusing_server_and_ask_for_no_new_beat(findings, cli, own_server, bench_on, refusing, says):
    with RedisServer() as broker:
        bench = bench_on(own_server, broker_url=broker.celery_url)
        bench.put()
        with refusing(own_server):
            bench.tick()
            found = findings("schedule's server", app=bench.app) + findings("beat", app=bench.app)
            explained = cli("explain", "e", app=bench.app).output

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
def test_a_server_that_refuses_to_write_is_unhealthy_for_every_probe(probe, cli, own_server, bench_on, refusing, says):
    bench = bench_on(own_server)
    bench.tick()
    assert probe(app=bench.app) == (200, "ok")
    with refusing(own_server):
        bench.scheduler().lease.renew()
        (code, probed), health = probe(app=bench.app), cli("health", app=bench.app, code=1).output
    again = probe(app=bench.app), cli("health", app=bench.app).output

    where = re.escape(f"the schedule's server {own_server.url}")
    assert code == 503
    assert re.fullmatch(f"{where}: {says}.*", probed)
    assert re.fullmatch(f"Error: {where}: {says}.*\n", health)
    assert again[0] == (200, "ok")
    assert again[1].startswith("healthy: ")


@pytest.fixture
def without_disk(own_server, bench_on) -> Iterator[Bench]:
    """A beat with an entry that has run, on a server whose disk is full since then."""
    bench = bench_on(own_server)
    bench.put()
    bench.tick()
    where = bench.redis.config_get("dir")["dir"]
    bench.redis.config_set("save", "3600 1")
    shutil.rmtree(where)
    with suppress(ResponseError):
        bench.redis.bgsave()
    wait_until(lambda: bench.redis.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield bench
    os.makedirs(where)
    bench.redis.config_set("save", "")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("status", "entries"),
        ("list", "every 3600 s"),
        ("show e", "task"),
        ("explain e", "Nothing is sent because of the schedule's server: it refuses to write"),
        ("history", "dispatched"),
        ("next e", "+00:00"),
        ("changes", "ENTRY"),
        ("locks", "HELD BY"),
        ("export", "definition"),
    ],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_what_only_reads_answers_while_the_servers_disk_is_full(cli, without_disk, monkeypatch, command, says, is_new):
    """Above all a copy of what is only in memory."""
    if is_new:  # redis-py begins with a ping
        monkeypatch.setattr(clients, "_clients", {})
    assert says in cli(*command.split(), app=without_disk.new_app() if is_new else without_disk.app).output


def test_a_server_whose_disk_is_full_is_unhealthy_and_takes_no_change(cli, without_disk):
    assert "MISCONF" in cli("health", app=without_disk.app, code=1).output
    assert "MISCONF" in cli("delete", "e", app=without_disk.app, code=2).output


def test_a_beat_that_may_not_run_cached_scripts_is_not_ready(lacking, redis, probe):
    redis.script_load(Script(store.__name__, "probe").text)  # as after a probe before the right was taken away
    with lacking("eval") as (bench, (schedules, _)):
        code, probed = probe(app=bench.app)

    assert code == 503
    assert probed.startswith(schedules)
    assert "grant +eval" in probed


def test_a_right_without_which_no_state_is_read_is_named(probe, lacking):
    """Redis before 7.2 does not name it: a trial of each command finds it."""
    with lacking("time") as (bench, (schedules, _)):
        code, probed = probe(app=bench.app)

    assert (code, probed) == (503, f"{schedules}: the ACL of its user lacks TIME: grant +time (docs, Rights)")


def test_a_right_without_which_no_gauge_is_read_is_a_refusal(probe, lacking):
    with lacking("hlen") as (bench, _):
        _, text = probe("/metrics", app=bench.app)

    assert ("singlebeat_redis_up 1.0" in text, "singlebeat_redis_refuses 1.0" in text) == (True, True)


@pytest.mark.parametrize("command", ["pexpire", "xadd", "hset"])
def test_a_right_that_beat_lacks_is_named_by_every_probe(probe, cli, lacking, redis, command):
    with lacking(command) as (bench, (schedules, _)):
        bench.tick()
        probed, health = probe(app=bench.app), cli("health", app=bench.app, code=1).output

    assert probed == (503, f"{schedules}: {grant(command)}")
    assert health == f"Error: {schedules}: {grant(command)}\n"


@pytest.mark.parametrize("leads", [False, True])
def test_a_beat_whose_own_user_lacks_a_right_is_not_called_missing(findings, cli, bench, lacking, redis, leads):
    """The tools have another user, for whom nothing is wrong: only the log of beat names the right."""
    with lacking("hmget" if leads else "evalsha") as (mute, _):
        if leads:
            mute.schedulers.append(beat := mute.scheduler())
            beat.lease.acquire()
        bench.put()
        redis.zadd("redbeat::schedule", {"redbeat:e": time.time() - 100})
        with suppress(ResponseError):
            mute.tick()
        told = " ".join(text for _, text in findings("beat")), cli("explain", "e").output

    assert bool(ScheduleStatus.of(bench.app).leader) is leads
    for text in told:
        if leads:
            assert "1 entry is overdue, the first by " in text
            assert "If that lasts, see the log of beat: it names what a server refuses to its user" in text
        else:
            assert "A beat that runs may be refused by the server: its log names the right that its user lacks" in text


def test_a_run_that_could_not_be_confirmed_is_not_sent(bench, lacking, redis):
    """It is of an entry without a lock, so that no worker would refuse the copies."""
    bench.put(overlap="allow_all")
    with lacking("hdel") as (mute, _):
        beat = mute.scheduler()
        for _ in range(4):
            beat.tick()
            beat._recheck_at = time.monotonic()
        assert (len(bench.messages), redis.zcard("redbeat::pending")) == (0, 0)
        redis.acl_setuser("mute", enabled=True, commands=["+hdel"])
        beat.tick()

    assert len(bench.messages) == 1


@pytest.mark.parametrize("ways", ["one", "several"])
def test_a_right_that_is_taken_away_for_a_while_doubles_no_run(bench, lacking, redis, monkeypatch, ways):
    bench.put(overlap="allow_all")
    with lacking("wait") as (mute, _):  # which nobody needs
        beat = mute.scheduler()
        if ways == "several":
            monkeypatch.setattr(beat.work.one_write, "_may_be_possible", lambda: False)
        for right in ("+hdel", "-hdel", "+hdel"):
            redis.acl_setuser("mute", enabled=True, commands=[right])
            for _ in range(3):
                bench.make_due()
                beat._recheck_at = time.monotonic()
                beat.tick()

    sent = [message.id for message in bench.messages]
    assert len(sent) == len(set(sent)) == 6


@pytest.mark.parametrize("lacking_right", ["del", "hdel", "hset", "zadd", "zrem"])
@pytest.mark.parametrize(
    "command", ["delete a", "edit a --every 61", "pause a", "pause --all", "add b shop.bill --every 60"]
)
def test_a_change_that_needs_a_right_that_is_missing_changes_nothing(
    cli, bench, lacking, redis, lacking_right, command
):
    bench.put("a")

    def stored():
        keys = sorted(redis.keys("redbeat*"))
        return {key: redis.dump(key) for key in keys if "doctor" not in key}

    with lacking(lacking_right) as (mute, _):
        before = stored()
        result = cli(*command.split(), app=mute.app, code=None)

    if result.exit_code == 2:
        assert grant(lacking_right) in result.output
        assert stored() == before
    else:
        assert result.exit_code == 0, result.output
        assert stored() != before


def test_runs_whose_history_is_refused_are_sent_and_logged_once(
    findings, cli, lacking, server, redis, bench_on, caplog, logged
):
    caplog.set_level("INFO", "celery.beat")
    with lacking("xadd") as (bench, _):
        for name in "abc":
            bench_on(server).put(name)  # a change needs the right, too: it is recorded
        beat = bench.scheduler()
        beat.tick()
        beat._recheck_at = time.monotonic()
        beat.tick()
        explained, found = cli("explain", "a", app=bench.app).output, findings("beat", app=bench.app)

    assert sorted(each["entry"] for each in logged("dispatched")) == ["a", "b", "c"]
    assert len(bench.messages) == 3
    assert redis.zcard("redbeat::pending") == 0
    assert logged("trouble")
    assert re.search(r"The run for \S+ \S+ was sent at \S+ \S+ as task", explained)
    assert "Nothing is sent" not in explained
    assert "broker" not in str(found)


def test_a_wrong_password_is_logged_with_its_server_and_a_remedy(server, redis, bench_on, caplog, probe):
    with without(server, "flushall") as url:
        bench = bench_on(server, redbeat_redis_url=url, redbeat_lock_timeout=3)
        beat = bench.scheduler()
        beat.tick()
        redis.acl_deluser("mute")  # which ends its connections, too
        code, probed = probe(app=bench.app)
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


@pytest.mark.parametrize("refusing", [full, replica])
def test_tools_say_what_a_locks_server_that_refuses_does(findings, cli, server, redis, own_server, bench_on, refusing):
    """While its memory is full, calls take their locks and runs go on. A replica lets no worker renew a lock."""
    bench = bench_on(server, singleton_backend_url=own_server.url)
    bench.put(task=f"{APP}.single")
    bench.tick()
    (key,) = own_server.client().scan_iter("SINGLETONLOCK_*", _type="HASH")
    backend, task_id = backend_of(bench.app), own_server.client().hget(key, "id")
    backend.begin(Ref(key, task_id, 0, "n"), lease=30, remember_for=60, task="t", arguments="")
    own_server.client().hincrby(key, "since", -60_000)  # and its worker has not renewed it since
    with refusing(own_server):
        if refusing is full:
            (holder,) = backend.acquire_many([Call(Ref("SINGLETONLOCK_{b}", "b"), "t", "", 60)])
            assert holder.verdict is Verdict.ACQUIRED
        said = (cli(*asked, app=bench.app).output for asked in (["status"], ["explain", "e"], ["locks"]))
        status, explained, locks = said
        doctor = findings("locks", app=bench.app) + findings("locks' server", app=bench.app)

    what = "runs start without their locks, or wait" if refusing is full else "no lock is taken"
    refused = f"the locks' server {own_server.url}: it refuses to write, so that {what}"
    assert f"problem     {refused}" in status
    assert f"Runs may wait, or start without their locks, because of {refused}" in explained
    assert any(f"it refuses to write, so that {what}" in text for _, text in doctor)
    for words in (explained, str(doctor), locks):
        assert ("has probably died" in words or "has died, or hangs" in words) == (refusing is full)
    assert ("so whether its worker lives is not known" in explained) == (refusing is replica)


@pytest.mark.parametrize(
    ("refusing", "advice"),
    [
        (full, "Its memory is full: free some, or raise maxmemory"),
        (replica, "It is a replica: name the primary, or the Sentinels that know it"),
    ],
)
def test_doctor_names_a_refusing_broker_and_the_leader(findings, server, own_server, bench_on, refusing, advice):
    """The broker and the schedule are on one server, as most users have it."""
    bench = bench_on(own_server, singleton_backend_url=server.celery_url)
    bench.put(overlap="allow_all")
    bench.scheduler().lease.acquire()
    with refusing(own_server):
        found = findings("broker", app=bench.app) + findings("beat", app=bench.app)

    (broker, *beats) = [text for level, text in found if level == "problem"]
    assert re.fullmatch(rf"it refuses: .+\. {advice}; messages cannot be sent", broker)
    assert any("leads at this moment, and cannot send while the schedule's server refuses writes" in b for b in beats)
    assert "no beat" not in "".join(beats)


@pytest.mark.parametrize("is_late", [False, True])
def test_doctor_knows_that_beat_may_reach_a_broker_that_it_does_not(findings, server, redis, bench_on, is_late):
    """As where the name of the broker is gone: connections that are open stay."""
    bench = bench_on(server)
    bench.tick()
    if is_late:
        bench.put()
        redis.zadd("redbeat::schedule", {"redbeat:e": time.time() - 100})
    astray = bench.new_app(broker_url=f"redis://127.0.0.1:{free_port()}/0")

    ((level, text),) = findings("broker", app=astray)

    measured(text)
    assert level == "problem"
    assert text.endswith("; messages cannot be sent") == is_late
    this = "; this process cannot send messages. Beat may still do so, as long as its present connection lasts"
    assert text.endswith(this) != is_late


def test_doctor_names_a_command_that_an_old_broker_refuses_to_scripts(findings, server, redis, bench_on, monkeypatch):
    """Redis before 7.2 does not name the command of a script."""
    redis.acl_setuser(
        "narrow", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", "-zadd"]
    )
    bench = bench_on(server, broker_url=server.celery_url.replace("://", "://narrow:pw@", 1))

    def refused(*_: object) -> Callable[[str], None]:
        raise ResponseError("The user executing the script can't run this command or subcommand script: ef7a, on @user")

    monkeypatch.setattr("singlebeat.diagnosis.workers._asking", refused)
    try:
        ((_, text),) = findings("broker", app=bench.app)
    finally:
        redis.acl_deluser("narrow")

    assert text.startswith("it refuses the questions to workers: the ACL of its user lacks ZADD: grant +zadd")


@pytest.mark.parametrize("asks", [True, False], ids=["may ask workers", "may not"])
def test_tools_name_the_queue_that_the_broker_refuses(findings, cli, server, redis, bench_on, asks):
    """Messages to other queues are sent meanwhile."""
    keys = [
        "redbeat:*",
        "SINGLETONLOCK_*",
        "singlebeat:*",
        "celery*",
        "_kombu*",
        *(["*.pidbox*", "unacked*"] if asks else []),
    ]
    redis.acl_setuser("narrow", enabled=True, passwords=["+pw"], keys=keys, channels=["*"], commands=["+@all"])
    try:
        bench = bench_on(server, broker_url=server.celery_url.replace("://", "://narrow:pw@", 1))
        for name, queue in (("bad", "forbidden"), ("good", "celery")):
            bench.put(name, options={"queue": queue})
        bench.tick()
        found = findings("beat", app=bench.app), findings("broker", app=bench.app)
        explained = cli("explain", "bad", app=bench.app).output
    finally:
        redis.acl_deluser("narrow")

    refused = "refuses queue forbidden to this user: grant the keys forbidden*"
    assert bench.names == ["good"]
    assert any(
        "1 occurrence is claimed and not confirmed: the broker" in text and refused in text for _, text in found[0]
    )
    assert f"{refused}. Beat sends it once that is over" in explained
    questions = [text for _, text in found[1] if "it refuses the questions to workers: " in text]
    assert (len(questions), len(found[1])) == ((0, 0) if asks else (1, 1))
    assert "messages cannot be sent" not in str(found)


@pytest.mark.parametrize("is_purged", [True, False])
def test_tools_say_that_a_purged_queue_lacks_a_message(cli, server, redis, bench_on, is_purged):
    """The message counts as late only later, as it may be on its way."""
    bench = bench_on(server)
    bench.put(task=f"{APP}.single", options={"queue": "billing"})
    bench.tick()
    if is_purged:
        redis.delete("billing")

    explained, stale = cli("explain", "e", app=bench.app).output, cli("unlock", "--stale", app=bench.app).output

    assert "its message counts as late only after 30 s" in explained
    assert ("Queue billing does not have that message at this moment" in explained) == is_purged
    assert "0 of 0 old queued locks were freed; 1 more are not late yet" in stale


def test_the_lock_of_a_broker_that_is_away_says_why_it_stays(cli, server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.url, singlebeat_lost_after=0.01)
    bench.put(task=f"{APP}.single")
    bench.tick()
    (key,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    redis.hincrby(key, "since", -60_000)
    own_server.kill()

    explained = cli("explain", "e", app=bench.app).output

    assert f"The broker {own_server.url} does not answer: " in explained
    assert re.search(r"the broker cannot be asked for its message: \S+", explained)


def test_explain_waits_only_once_for_a_locks_server_that_hangs(cli, server, redis, own_server, bench_on, monkeypatch):
    bench = bench_on(server, singleton_backend_url=own_server.url, singlebeat_socket_timeout=0.2)
    bench.put(task=f"{APP}.single")
    bench.tick()
    (message,) = bench.messages
    runs = Workers({message.headers["id"]: "w"}, {}, {}, {}, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda _: runs)
    asked = []
    for asking in ("facts.lock_refusal", "workers.living_workers"):
        monkeypatch.setattr(f"singlebeat.diagnosis.{asking}", lambda *args, what=asking: asked.append(what) or "")

    own_server.pause()
    explained = cli("explain", "e", app=bench.app).output
    own_server.resume()

    assert "It runs now, on w." in explained
    assert asked == []


def test_a_broker_that_refuses_is_not_called_unreachable(cli, server, redis, own_server, bench_on, caplog):
    bench = bench_on(server, broker_url=own_server.celery_url, task_publish_retry=False)
    with full(own_server):
        bench.put(overlap="allow_all")
        bench.tick()
        explained = cli("explain", "e", app=bench.app).output

    (told,) = [record for record in caplog.records if record.singlebeat["event"] == "unreachable"]
    assert "stay pending until the broker takes it" in told.getMessage()
    assert told.singlebeat["reason"].startswith(f"the broker {own_server.url}: ")
    assert "is claimed and not confirmed" in explained
    assert f"the broker {own_server.url} refuses: " in explained
    assert "Its memory is full: free some, or raise maxmemory. Beat sends it once that is over" in explained
    assert "does not answer" not in explained


def test_beat_says_where_the_refused_command_is_named(server, redis, bench_on, logged):
    with without(server, "zadd") as url:
        redis.set("redbeat::lock", "another", px=60_000)
        bench_on(server, redbeat_redis_url=url).tick()

    (told,) = logged("trouble")
    named = r"'zadd' command.*: grant \+zadd \(docs, Rights\)"
    assert re.search(rf"{named}|lacks ZADD: grant \+zadd", told["reason"])


def test_errors_of_the_locks_server_name_the_missing_right(lacking, redis):
    """Workers and callers log them as they are."""
    with lacking("pexpire") as (mute, (_, locks)), pytest.raises(LockBackendError) as raised:
        backend_of(mute.app).begin(
            Ref("SINGLETONLOCK_{a}", "x", 0, "n"), lease=30, remember_for=60, task="t", arguments="()"
        )

    named = r"'pexpire' command.*: grant \+pexpire \(docs, Rights\)"
    assert re.search(
        rf"{named}|celery singlebeat doctor, or ACL LOG on the server, names the command; docs, Rights\)$",
        str(raised.value),
    )
    assert str(raised.value).startswith(f"{locks} refuses: ")
    assert with_advice(raised.value) == str(raised.value)


@pytest.mark.parametrize("command", ["xadd", "hset"])
def test_a_right_without_which_no_end_is_recorded_is_logged(bench, lacking, logged, command):
    bench.put()
    bench.tick()
    (message,) = bench.messages
    with lacking(command) as (mute, _):
        record_end_of_message(mute.app, message.headers, "success", "")
        flush_ends(mute.app)

    (told,) = logged("ends_not_recorded")
    named = rf"'{command}' command.*: grant \+{command} \(docs, Rights\)"
    assert re.search(
        rf"{named}|celery singlebeat doctor, or ACL LOG on the server, names the command; docs, Rights\)$",
        told["reason"],
    )


@pytest.mark.parametrize("command", ["sadd", "smembers", "hscan", "hdel"])
def test_a_beat_that_ticks_cannot_serve_logs_each_event_once(lacking, redis, caplog, logged, monkeypatch, command):
    monkeypatch.setattr("singlebeat.beat.scheduler.RECHECK_AFTER", 0.05)
    caplog.set_level("INFO", "celery.beat")
    gained, lost = Mock(), Mock()
    entries = {"x": {"task": f"{APP}.plain", "schedule": schedule(0.05), "args": ["x"]}}
    with (
        lacking(command, beat_schedule=entries) as (bench, _),
        connected(leadership_gained, gained),
        connected(leadership_lost, lost),
    ):
        beat = bench.scheduler()
        for _ in range(6):
            beat.tick()
            time.sleep(0.02)
        assert [len(logged(event)) for event in ("leadership_gained", "trouble", "recovered")] == [1, 1, 0]
        (trouble,) = logged("trouble")
        assert f"grant +{command}" in trouble["reason"] or "ACL LOG" in trouble["reason"]

        redis.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], keys=["*"])
        wait_until(lambda: beat.tick() and not beat._in_trouble, what="a tick that does all there is to do")

    assert [len(logged(event)) for event in ("leadership_gained", "recovered")] == [1, 1]
    assert gained.call_count == 1
    assert lost.call_count == 0


def test_a_term_that_ends_before_it_could_begin_is_logged(lacking, redis, caplog, logged):
    caplog.set_level("INFO", "celery.beat")
    with lacking("sadd", beat_schedule={"x": {"task": f"{APP}.plain", "schedule": 3600}}) as (bench, _):
        beat = bench.scheduler()
        beat.tick()
        redis.set("redbeat::lock", "another", px=60_000)
        beat.lease.renew()
        beat.tick()

    assert [len(logged(event)) for event in ("leadership_gained", "leadership_lost", "stands_by")] == [1, 1, 1]


@pytest.mark.parametrize("command", ["exists", "hset", "time", "zmscore"])
def test_explain_names_the_right_that_the_locks_server_lacks(cli, server, lacking, app, command):
    backend_of(app).announce("w", ttl=60)
    with lacking(command, redbeat_redis_url=server.url) as (bench, (_, locks)):
        bench.put()
        bench.tick()
        explained = cli("explain", "e", app=bench.app).output

    assert f"{locks}: {grant(command)}" in explained


# ---------------------------------------------------------------- unreachable servers


def test_explain_and_status_name_a_claimed_run_that_waits_for_the_broker(cli, server, redis, own_server, bench_on):
    bench = bench_on(server, broker_url=own_server.celery_url, task_publish_retry=False)
    bench.put()
    own_server.kill()
    bench.tick()

    explained, status = cli("explain", "e", app=bench.app).output, cli("status", app=bench.app).output

    assert re.search(
        r"The run for \S+ \S+ is claimed and not confirmed, as task \S+: the broker \S+ does not", explained
    )
    assert "It is due now" not in explained
    assert re.search("pending     1, the first late by .* s, claimed and not confirmed", status)


def test_the_doctor_checks_the_rest_while_the_schedules_server_is_down(cli, server, redis, own_server):
    with make_app(server.celery_url, {"redbeat_redis_url": own_server.url, "redbeat_lock_timeout": 1}) as app:
        own_server.kill()
        result = cli("doctor", app=app, code=2)
        rows = json.loads(cli("doctor", "--json", app=app, code=2).stdout)

    where = re.escape(f"Error: the schedule's server {own_server.url}: ")
    assert re.match(where, result.stderr)
    about = {row["about"] for row in rows} - {"due entries"}  # with an old kombu it is known without the server
    assert about == {"redbeat_lock_timeout", "workers", "calls of Singletons", f"schedule's server {own_server.url}"}
    assert "no worker answers" in result.stdout


def test_the_doctor_names_a_broker_that_does_not_answer(findings, server, redis, own_server):
    with make_app(server.celery_url, {"broker_url": own_server.url.replace("://", "://:secret@")}) as app:
        own_server.kill()
        ((level, text),) = findings(f"broker {own_server.url.replace('://', '://:**@')}", app=app)

    assert level == "problem"
    assert text.startswith("it does not answer: ")


def test_doctor_knows_that_beat_may_reach_a_master_without_sentinels(findings):
    urls = ";".join(f"sentinel://127.0.0.1:{free_port()}/0" for _ in range(2))
    options = {name: {"master_name": "m"} for name in ("broker_transport_options", "redbeat_redis_options")}
    with make_app(urls, {**options, "result_backend": "disabled"}) as app:
        ((level, text),) = findings("broker", app=app)

    assert level == "problem"
    assert text.endswith("this process cannot send messages. A beat that is still connected to the master may do so")


@pytest.mark.parametrize(("overlap", "is_said"), [("skip", True), ("allow_all", False)])
def test_a_singleton_without_its_lock_is_said_to_have_started(cli, bench, redis, overlap, is_said):
    bench.put(task=f"{APP}.single", overlap=overlap)
    bench.tick()
    redis.delete(*redis.scan_iter("SINGLETONLOCK_*"), "none")

    told = cli("explain", "e", app=bench.app).output

    assert ("and its lock is gone, which it would keep in its queue" in told) == is_said
    assert ("it waits in its queue, or its worker has died" in told) != is_said


def test_explain_works_while_the_locks_server_is_unreachable(cli, server, redis, own_server, bench_on):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    bench.put(overlap="allow_all")
    bench.put("waits", task=f"{APP}.single")
    own_server.kill()
    bench.tick()

    sent, waits = cli("explain", "e", app=bench.app).output, cli("explain", "waits", app=bench.app).output

    assert "was sent at" in sent
    assert "It runs next for" in sent
    assert "holds a lock is not known: the locks' server" in sent
    assert "is claimed and not confirmed" in waits
    assert "the locks' server" in waits
    assert "does not answer" in waits


def test_health_that_wants_less_lag_than_is_usual_says_how_late_beat_is(cli, app, redis):
    redis.set("redbeat::lock", "t", px=60_000)
    redis.zadd("redbeat::schedule", {"redbeat:late": redis.time()[0] - 4})

    output = cli("health", "--max-lag", "3", code=1).output

    late = re.search(r"1 entry is overdue, the first by (\d+) s", output)
    assert late is not None
    assert int(late[1]) >= 4  # and as many as the command has taken


# ---------------------------------------------------------------- beats that share the work


@pytest.fixture
def shared(server, redis, bench_on) -> Bench:
    """A bench whose beats share the work."""
    return bench_on(server, redbeat_lock_key=None)


def test_beats_that_share_the_work_are_healthy_in_every_tool(findings, probe, cli, shared, redis):
    shared.put()
    shared.tick()

    assert probe(app=shared.app) == (200, "ok")
    assert "healthy: none: beats share the work" in cli("health", app=shared.app).output
    assert (
        "leader      none: beats share the work (redbeat_lock_key is None), a beat was last seen"
        in cli("status", app=shared.app).output
    )
    shared.tick()  # a sign of life lasts for some seconds
    ((level, text),) = findings("beat", app=shared.app)
    assert level == "warning"
    assert f"1 beats share the work: {socket.gethostname()} (pid {os.getpid()}, since 20" in text
    shared.tick()
    assert (
        f"beats       1\n  {socket.gethostname()}, pid {os.getpid()}, since 20" in cli("status", app=shared.app).output
    )
    assert [level for level, _ in findings("redbeat_lock_key", app=shared.app)] == ["warning"]
    shared.tick()
    explained = cli("explain", "e", app=shared.app).output
    assert "No beat" not in explained
    assert "was sent at" in explained
    assert "leave out --role leader" in cli("health", "--role", "leader", app=shared.app, code=1).output


@pytest.mark.parametrize("ever", [False, True])
def test_beats_that_share_the_work_are_missed_when_none_works(findings, probe, cli, shared, redis, ever):
    shared.put()
    if ever:
        shared.tick()
        (sign,) = redis.zrange("redbeat::standbys", 0, -1)
        redis.zincrby("redbeat::standbys", -200_000, sign)
        redis.incrbyfloat("redbeat::clock", -200)
    since = r"for 20\d s" if ever else "ever"

    code, text = probe(app=shared.app)
    assert code == 503
    assert re.fullmatch(rf"no beat works: there was no sign of one {since}, and none leads \(redbeat_lock_key.*", text)
    assert "no sign of one" in cli("health", app=shared.app, code=1).output
    assert ("no beat was seen" in cli("status", app=shared.app).output) is not ever
    ((level, text),) = findings("beat", app=shared.app)
    assert level == "problem"
    assert (
        "singlebeat sends nothing until one is started (celery beat -S singlebeat.Scheduler). A beat that runs" in text
    )
    assert "No beat works: singlebeat sends nothing until one is started" in cli("explain", "e", app=shared.app).output


def test_a_sign_of_life_by_a_clock_that_was_ahead_hides_no_dead_beat(shared, redis):
    shared.tick()
    (sign,) = redis.zrange("redbeat::standbys", 0, -1)
    redis.zadd("redbeat::standbys", {sign: 1000 * (redis.time()[0] + STAY + 3600)})
    redis.set("redbeat::clock", redis.time()[0] + 3600)

    state = ScheduleStatus.of(shared.app)

    assert (state.works, state.silent) == (False, None)


def test_a_beat_that_shares_the_work_is_seen_each_second(shared, cli, redis):
    shared.put()
    shared.scheduler().tick()
    redis.incrbyfloat("redbeat::clock", -9)  # written every 10 s
    assert re.search("a beat was last seen [0-8] s ago", cli("status", app=shared.app).output)

    (sign,) = redis.zrange("redbeat::standbys", 0, -1)
    redis.zincrby("redbeat::standbys", -1000 * STAY, sign)

    assert re.search("a beat was last seen ([5-9]|[1-9][0-9]) s ago", cli("status", app=shared.app).output)
    for command, code in {"health": 1, "status": 0}.items():
        assert "no beat works: there was no sign of one for" in cli(command, app=shared.app, code=code).output
    assert "beat: no beat works" in cli("doctor", app=shared.app, code=1).output
    assert cli("explain", "e", app=shared.app).output.startswith("No beat works: ")


def test_a_beat_gives_signs_of_life_in_a_long_tick(shared, redis):
    shared.put()
    beat = shared.scheduler()
    beat.tick()
    (sign,) = redis.zrange("redbeat::standbys", 0, -1)
    redis.zincrby("redbeat::standbys", -1000 * STAY, sign)
    beat.lease._share_at, beat._ticking = 0.0, True  # as a second later

    beat._report_progress()

    assert ScheduleStatus.of(shared.app).works


# ---------------------------------------------------------------- locks that may not be read


def test_a_lock_that_may_not_be_read_is_not_unusable(lacking, redis):
    """To say so would let an operator delete a lock that is well, and a run start without it."""
    ref = Ref("SINGLETONLOCK_{a}", "a", nonce="n")
    with lacking("hmget") as (mute, _):
        backend = backend_of(mute.app)
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
def test_queues_are_judged_by_the_app_whose_beat_sends(findings, cli, app, bench, redis, monkeypatch, leader):
    """A beat sends all entries to the queues of its own app, which another app does not know."""
    reader = Reader(frozenset({"another"}), frozenset({f"{APP}.plain"}), 1, [])
    workers = Workers({}, {"w1@vm": reader.tasks}, {}, {"w1@vm": reader}, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda _: workers)
    bench.put()
    beat = Lease(lambda: redis, Keys.of(app).lease, ttl=10, about={"app": leader or str(app.main), "statics": ""})
    beat.acquire()

    about_queues = findings("queue celery")
    explained = cli("explain", "e", app=app).output
    beat.release()

    assert [level for level, _ in about_queues] == ([] if leader else ["problem"])
    assert ("no worker that answers reads queue celery" in explained.lower()) is not bool(leader)


@pytest.mark.parametrize("check", ["warn", "ignore"])
def test_an_app_whose_entries_another_app_sends_is_told_by_every_tool(cli, server, redis, bench_on, probe, check):
    """The other app's workers drop the messages; /readyz stays, since a standby of a renamed app does what it can."""
    bench = bench_on(server, singlebeat_other_app_check=check)
    bench.put()
    other = Lease(lambda: redis, Keys.of(bench.app).lease, ttl=10, about={"app": "blog", "statics": ""})
    other.acquire()
    told = {name: cli(*name.split(), app=bench.app, code=None) for name in ("status", "health", "list", "explain e")}
    probed = probe(app=bench.app)
    other.release()

    says = "a beat of app blog leads, and sends entries to the queues of its own app"
    named = {name for name, result in told.items() if says in result.output.replace("A beat", "a beat")}
    assert named == ({*told} if check == "warn" else set())
    assert told["health"].exit_code == (1 if check == "warn" else 0)
    assert told["explain e"].output.startswith("A beat of app blog") is (check == "warn")
    assert probed == (200, "ok")


EVERY_5 = {"e": {"task": f"{APP}.plain", "schedule": 5.0}}
EVERY_9 = {"e": {"task": f"{APP}.plain", "schedule": 9.0}}
PAUSED = {"e": {"task": f"{APP}.plain", "schedule": 5.0, "paused": True}}
IN_CODE = {"e": {"task": f"{APP}.plain", "schedule": Seconds()}}  # Redis holds a mark for it
OF_BEATS, OF_THIS_PROCESS = "beats of app {} differ in their beat_schedule", "of this process differs from that of the"


@pytest.mark.parametrize(
    ("leads", "stands_by", "asks", "told"),
    [
        (EVERY_5, EVERY_5, EVERY_5, ""),
        (EVERY_5, EVERY_9, EVERY_5, OF_BEATS),
        (EVERY_5, PAUSED, EVERY_5, OF_BEATS),
        (EVERY_5, {}, EVERY_5, OF_BEATS),
        (EVERY_9, EVERY_9, EVERY_5, OF_THIS_PROCESS),
        (EVERY_5, EVERY_5, {}, ""),  # a program that does not know the schedule
        (IN_CODE, IN_CODE, IN_CODE, ""),
    ],
    ids=["same", "times", "policy", "missing", "this-process", "none-here", "code-only"],
)
def test_doctor_warns_of_code_that_differs_under_the_same_names(findings, bench, leads, stands_by, asks, told):
    for given in (leads, stands_by):
        bench.scheduler(beat_schedule=given).tick()

    found = findings("redbeat_key_prefix redbeat:", app=bench.new_app(beat_schedule=asks))

    assert [level for level, _ in found] == (["warning"] if told else [])
    assert all(told.format(bench.app.main) in text for _, text in found)


def test_explain_of_an_old_checkout_says_that_the_beats_have_another(cli, bench):
    """The beats would not store the entry: their log says nothing about it."""
    bench.scheduler(beat_schedule=EVERY_5).tick()
    old = bench.new_app(beat_schedule={**EVERY_5, "goner": EVERY_5["e"]})
    bench.schedule.delete("goner")

    told = cli("explain", "goner", app=old, code=1).output
    same = bench.new_app(beat_schedule=EVERY_5)
    bench.redis.delete("redbeat:e", "redbeat::history", "redbeat::changes")
    told_of_ours = cli("explain", "e", app=same, code=1).output

    bench.scheduler(beat_schedule={**EVERY_5, "goner": EVERY_5["e"]}).tick()
    stands_by = cli("explain", "goner", app=old, code=1).output

    for text in (told, stands_by):
        assert "It is in the beat_schedule of this process, and the beat that leads runs with another one" in text
        assert "not_added" not in text
    assert "event=not_added" in told_of_ours


def test_status_and_list_name_the_refusal_while_entries_wait(cli, own_server, bench_on):
    with RedisServer() as broker:
        bench = bench_on(own_server, broker_url=broker.celery_url)
        bench.tick()
        bench.put()
        bench.redis.zadd("redbeat::schedule", {"redbeat:e": time.time() - 100})
        with full(own_server):
            told = [cli(name, app=bench.app).output for name in ("status", "list")]
        told_after = [cli(name, app=bench.app).output for name in ("status", "list")]

    assert all("it refuses to write, so that nothing is sent" in text for text in told)
    assert "problem     the schedule's server " in told[0]
    assert all("refuses" not in text for text in told_after)


@pytest.mark.parametrize("command", ["set", "xadd"])
def test_status_names_a_refusal_before_an_entry_is_overdue(cli, bench, lacking, command):
    bench.tick()
    with lacking(command) as (mute, (schedules, _)):
        told = cli("status", app=mute.app).output

    assert ScheduleStatus.of(bench.app).leader
    assert f"problem     {schedules}: the ACL of its user lacks {command.upper()}: grant +{command}" in told


def test_a_leader_that_no_beat_could_follow_does_not_resign(cli, own_server, bench_on, monkeypatch):
    monkeypatch.setattr("singlebeat.cli.status.HANDOVER", 0.0)
    bench = bench_on(own_server)
    bench.tick()
    with full(own_server):
        told = cli("resign", app=bench.app, code=2).output

    assert "Error: no beat could lead next, so the present term goes on: the schedule's server" in told
    assert ScheduleStatus.of(bench.app).leader
    assert "ended: " in cli("resign", app=bench.app).output


def test_a_replica_of_an_empty_server_is_named_where_entries_are_missing(cli, own_server, bench_on):
    with RedisServer() as broker:
        app = bench_on(own_server, broker_url=broker.celery_url).app
        with replica(own_server):
            status, listed = cli("status", app=app).output, cli("list", app=app).output
            explained = cli("explain", "e", app=app, code=1).output
        fresh = cli("explain", "e", app=app, code=1).output

    assert all("It is a replica: name the primary" in text for text in (status, listed, explained))
    assert "there is no entry 'e' under redbeat:, and no beat leads: the schedule's server" in explained
    assert "replica" not in fresh


def test_the_doctor_tells_which_changes_a_snapshot_has_lost(cli, findings, bench, redis, monkeypatch):
    for name in ("STORED_EVERY", "STORED_LATE"):
        monkeypatch.setattr(f"singlebeat.beat.leadership.clock_guard.{name}", timedelta(0))
    beat = bench.scheduler()
    beat.tick()
    snapshot = redis.get("redbeat::clock")
    beat.tick()
    beat.lease.renew()
    before = findings("schedule")

    redis.set("redbeat::clock", snapshot)  # as a server that starts from it
    beat.tick()
    beat.lease.renew()

    since = datetime.fromtimestamp(float(snapshot), UTC).isoformat(timespec="seconds")
    says = f"the changes since {since}, or shortly before, are lost: Redis has started from a snapshot, or "
    assert says not in str(before)
    assert [level for level, text in findings("schedule") if says in text] == ["warning"]
    assert says in cli("explain", "late", code=1).output
    assert "lost: the server has lost the schedule, or its last changes, as a beat noticed at " in cli("list").output


def test_an_error_and_its_advice_are_two_sentences():
    error = ResponseError("Error running script: OOM command not allowed when used memory > 'maxmemory'.")

    assert with_advice(error).endswith("'maxmemory'. Its memory is full: free some, or raise maxmemory")
    assert with_advice(ResponseError("no.")) == "no"


@pytest.mark.parametrize("lacking_right", ["hset", "zadd"])
def test_a_trigger_that_needs_a_missing_right_proposes_nothing(cli, bench, lacking, redis, lacking_right):
    bench.put("a")
    with lacking(lacking_right) as (mute, _):
        assert grant(lacking_right) in cli("trigger", "a", app=mute.app, code=2).output

    assert not redis.hexists("redbeat:a", "pending")


def test_explain_blames_no_beat_for_the_rights_of_its_own_user(cli, bench, lacking):
    bench.put("a")
    bench.tick()
    with lacking("hset") as (mute, _):
        explained = cli("explain", "a", app=mute.app).output

    assert "lacks HSET: grant +hset (docs, Rights), as far as beat and workers have the Redis user of this" in explained


def test_the_doctor_names_an_evicting_server_to_a_user_without_config(findings, lacking, redis):
    redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with lacking("config") as (mute, _):
            texts = [text for _, text in findings("schedule's server", app=mute.app)]
    finally:
        redis.config_set("maxmemory-policy", "noeviction")

    assert any("maxmemory-policy is allkeys-lru" in text for text in texts)
    assert any("grant +config|get" in text for text in texts)


def share_as(monkeypatch: pytest.MonkeyPatch, host: str, bench: Bench) -> Scheduler:
    """Let a beat that shares the work tick as on a host of its own."""
    scheduler = bench.scheduler()
    tick_as(monkeypatch, host, scheduler)
    return scheduler


def tick_as(monkeypatch: pytest.MonkeyPatch, host: str, scheduler: Scheduler) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: host)
        scheduler.tick()


def test_a_beat_without_a_lock_beside_a_leader_is_a_problem(
    findings, cli, server, bench_on, shared, redis, monkeypatch
):
    locked = bench_on(server)
    leader = locked.scheduler()
    leader.tick()
    sharer = share_as(monkeypatch, "sharer", shared)

    for bench, here in ((locked, "is set"), (shared, "is None")):
        leader.lease.renew()
        tick_as(monkeypatch, "sharer", sharer)  # on a slow host, the commands take longer than it counts as alive
        (text,) = [text for level, text in findings("beat", app=bench.app) if level == "problem"]
        assert text.startswith("settings with and without a lock: ")
        assert f"{socket.gethostname()}, pid {os.getpid()}, leads; sharer, pid {os.getpid()}, shares the work; " in text
        assert f"redbeat_lock_key {here} in this process. Set redbeat_lock_key alike for all beats" in text
        tick_as(monkeypatch, "sharer", sharer)
        status = cli("status", app=bench.app).output
        assert f"leader      {socket.gethostname()}, pid {os.getpid()}, term 1" in status
        assert "problem     settings with and without a lock" in status
        assert "beats       1" in status
        assert findings("redbeat_lock_key", app=bench.app) == [], "no beat leads would be wrong"

    redis.delete("redbeat::lock", "redbeat::leader")
    tick_as(monkeypatch, "sharer", sharer)
    (text,) = [text for level, text in findings("beat", app=locked.app) if level == "problem"]
    assert text.startswith(f"settings with and without a lock: sharer, pid {os.getpid()}, shares the work; ")
    assert "healthy: none: beats share the work" in cli("health", app=locked.app).output
    locked.put()
    tick_as(monkeypatch, "sharer", sharer)
    assert "No beat leads" not in cli("explain", "e", app=locked.app).output


def test_a_beat_that_shares_the_work_logs_when_another_is_gone(shared, redis, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    one, _ = share_as(monkeypatch, "one", shared), share_as(monkeypatch, "other", shared)
    (sign,) = [each for each in redis.zrange("redbeat::standbys", 0, -1) if '"other"' in each]
    stays = redis.zscore("redbeat::standbys", sign)

    for until in (stays, 1, stays):
        redis.zadd("redbeat::standbys", {sign: until})
        one.lease._share_at = 0.0  # as a second later
        one.tick()

    told = [
        (record.levelname, record.getMessage()) for record in caplog.records if "event=share_" in record.getMessage()
    ]
    told = [(level, text) for level, text in told if f"beat=other:{os.getpid()}" in text]
    assert [level for level, _ in told] == ["INFO", "WARNING", "INFO"]
    assert "shares the work no more: it has ended, hangs, or does not reach the server" in told[1][1]


def test_a_beat_that_shares_the_work_counts_only_the_others(shared, monkeypatch):
    pytest.importorskip("prometheus_client")
    scheduler = shared.scheduler()
    scheduler.tick()

    def standbys() -> float | None:
        return BeatMetrics(shared.app, scheduler.lease).registry.get_sample_value("singlebeat_standbys")

    assert standbys() == 0
    share_as(monkeypatch, "other", shared)
    assert standbys() == 1


def test_a_command_that_the_server_does_not_name_is_in_the_log(lacking, logged, monkeypatch):
    """Redis before 7.2 does not name the command of a script: beat finds it as /readyz does."""
    unnamed = ResponseError("The user executing the script can't run this command or subcommand script: f, on line 9.")
    for command in ("zadd", "hset", "time", "xadd"):
        with lacking(command) as (mute, (schedule_server, _)):
            beat = mute.scheduler()
            monkeypatch.setattr(Lease, "acquire", Mock(side_effect=unnamed))
            beat.server_time.is_known = True
            beat.tick()

        assert logged("trouble")[-1]["reason"] == f"{schedule_server}: {grant(command)}"


@pytest.mark.parametrize("command", ["zadd", "hset"])
def test_a_claim_that_lacks_a_right_claims_nothing(bench, lacking, redis, command):
    with lacking("flushall") as (mute, _):
        beat = mute.scheduler()
        beat.tick()
        bench.put("a")
        redis.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], commands=[f"-{command}"])
        beat.tick()
        beat.tick()

    assert redis.hget("redbeat:a", "pending") is None
    assert redis.zscore("redbeat::schedule", "redbeat:a") is not None
    assert bench.messages == []


def test_a_standby_logs_that_another_program_has_spoilt_the_lock(bench, logged):
    beat = bench.scheduler()
    beat.tick()
    bench.redis.set("redbeat::lock", "x")
    beat.lease.renew()
    for _ in range(2):
        beat._check_leader_at = 0.0  # as five seconds later
        beat.tick()

    (told,) = logged("leaderless")
    assert told["reason"].startswith("no beat can lead because of the key redbeat::lock: it has no end")
    assert "celery singlebeat resign removes it" in told["reason"]
    assert logged("stands_by") == []
    bench.redis.set("redbeat::lock", "x", px=60_000)
    beat._check_leader_at = 0.0
    beat.tick()
    assert [each["leader"] for each in logged("stands_by")] == ["another beat"]


@pytest.mark.parametrize("refusing", [full, replica])
def test_a_due_run_names_at_once_the_server_that_refuses(cli, own_server, bench_on, refusing):
    bench = bench_on(own_server)
    bench.tick()
    bench.put()
    own_server.client().zadd("redbeat::schedule", {"redbeat:e": time.time() - 1})
    with refusing(own_server):
        explained, status = cli("explain", "e", app=bench.app).output, cli("status", app=bench.app).output

    assert explained.startswith("Nothing is sent because of the schedule's server: it refuses to write")
    assert "standbys    0, and none can note itself while the server refuses writes" in status


def test_an_entry_of_beat_schedule_that_beat_could_not_store_is_explained(cli, bench, lacking, findings):
    with lacking("zadd") as (mute, _):
        for each in (mute, bench):
            each.app.conf.beat_schedule = {"new": {"task": "t", "schedule": 60}}
        unled = cli("explain", "new", app=bench.app, code=1).output
        beat = Scheduler(mute.app)
        beat.tick()
        explained = cli("explain", "new", app=bench.app, code=1).output
        ((_, text),) = findings("entry new", app=bench.app)
        beat.close()

    why = "event=not_added; event=trouble if the schedule's server refuses a command to beat's user"
    stored = "It is in beat_schedule, which a beat stores when it begins to lead: "
    assert f"{stored}no beat leads" in unled
    assert f"{stored}the log of beat says why it could not ({why})" in explained
    assert f"does not run: the log of beat says why it could not be stored ({why})" in text


def test_a_server_that_accepts_no_more_connections_is_named(own_server, bench_on, cli, logged):
    bench = bench_on(own_server, result_backend=own_server.celery_url)
    bench.put()
    admin, app = own_server.client(), bench.new_app()
    admin.config_set("maxclients", 1)
    admin.client_kill_filter(_type="normal", skipme=True)
    Scheduler(app).tick()
    rows = [row for row in json.loads(cli("doctor", "--json", app=app, code=2).stdout) if row["level"] == "problem"]
    asked = [cli(command, app=app, code=None).output for command in ("status", "health", "list")]

    named = [row["text"] for row in rows if row["about"].partition(" ")[0] in {"schedule's", "result", "locks"}]
    (trouble,) = logged("trouble")
    assert len(named) == 3
    said = f"max number of clients reached. {NO_CONNECTION}"
    assert [text for text in (*named, *asked) if said not in text] == []
    assert NO_CONNECTION in trouble["reason"]
    assert not any("nothing is sent" in text or "Start the backend" in text for text in named)


@pytest.mark.parametrize("is_away", [False, True])
def test_trouble_with_the_broker_is_not_logged_as_of_redis(bench, logged, caplog, monkeypatch, is_away):
    beat = bench.scheduler()
    away = UnreachableBrokerError("the broker amqp://b is not reached: Name or service not known")
    with monkeypatch.context() as patch:
        patch.setattr(beat.lease, "acquire", Mock(side_effect=away))
        beat.tick()
    if is_away:  # by now a message could not be sent
        beat.dispatcher.failures.note(away)
    beat.tick()

    (told,) = logged("trouble")
    assert told["reason"] == str(away)
    assert "Trouble with the broker: trying again" in caplog.text
    assert "Redis" not in caplog.text
    assert len(logged("recovered")) == (not is_away)
