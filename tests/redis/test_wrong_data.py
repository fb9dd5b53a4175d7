"""Data that another program has broken, and names that touch another app's keys: named, and shown in strict JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.schedules import schedule
from kombu import Producer
from redbeat.schedules import rrule

from singlebeat import Entry, Schedule
from singlebeat.beat.entries.definition import LONGEST_FIELD, Meta
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.keys import ENTRY_FIELDS, LEASE_KEYS, OWN_KEYS
from singlebeat.beat.leadership.lease import Term
from singlebeat.beat.status import ScheduleStatus
from singlebeat.beat.store.claims import Store
from singlebeat.errors import EntryError, UnknownEntryError
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.support import RedisServer
from tests.system.apps import make_app

TASK = "tests.system.apps.plain"
SCHEDULE = "redbeat::schedule"
NIGHTLY = '{"task": "shop.tick", "schedule": {"__type__": "crontb"}}'


pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")


@pytest.fixture
def put(app, redis):
    def put(name: str = "e", every: float = 3600, **fields: object) -> Entry:
        fields = {"last_run_at": datetime.now(UTC), **fields}
        return Entry(name, TASK, schedule(every), app=app, **fields).save()

    return put


@pytest.fixture
def neighbour(server: RedisServer, redis):
    """Another app, whose prefix begins with that of the first one."""
    with make_app(server.celery_url, {"redbeat_key_prefix": "redbeat:a:"}) as app:
        yield app


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        pytest.fail(f"JSON has no {constant}")

    return json.loads(text, parse_constant=refuse)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("own", ["schedule", "lock", "leader", "term", "history", "quarantine", "parked:old"])
def test_no_name_of_an_entry_touches_another_apps_keys(app, neighbour, redis, cli, own):
    Schedule(neighbour).upsert("job", TASK, schedule(60))
    key = f"redbeat:a::{own}"
    if not redis.exists(key):
        redis.hset(key, "mine", "1")
    name, before = f"a::{own}", redis.dump(key)
    why = "is a key of the schedule of another app"

    for touch in (
        lambda: Schedule(app).delete(name),
        lambda: Entry(name, TASK, schedule(60), app=app).save(),
        lambda: Schedule(app).upsert(name, TASK, schedule(60)),
        lambda: Entry(name, TASK, schedule(60), app=app).reschedule(),
    ):
        with pytest.raises(EntryError, match=why):
            touch()
    assert why in cli("delete", name, code=1).output
    assert why in cli("add", name, TASK, "--every", "5", code=2).output
    row = {"name": name, "definition": {"task": TASK, "schedule": 60}}
    assert why in cli("import", "-", stdin=json.dumps([row]), code=1).output
    assert redis.dump(key) == before
    redis.delete(key)
    with pytest.raises(EntryError, match=why):
        Schedule(app).upsert(name, TASK, schedule(60))


def test_a_stored_entry_with_such_a_name_is_listed_and_deleted(app, redis, cli):
    redis.hset("redbeat:a::lock", "definition", json.dumps({"task": TASK, "schedule": 60}))
    redis.zadd(SCHEDULE, {"redbeat:a::lock": 0})

    assert [entry.name for entry in Schedule(app).list()] == ["a::lock"]
    cli("pause", "a::lock")
    cli("edit", "a::lock", "--every", "5")
    cli("delete", "a::lock")

    assert not redis.exists("redbeat:a::lock", SCHEDULE)


def test_names_with_colons_that_are_no_such_keys_are_stored(app, redis):
    for name in ("a::b", "report::lock::x", "x:lock", "::locks", "a::schedules"):
        Schedule(app).upsert(name, TASK, schedule(60))
        assert Schedule(app).delete(name)


@pytest.mark.parametrize("kind", ["string", "list", "hash"])
def test_delete_says_which_key_it_leaves_to_another_program(redis, cli, kind):
    """Beat has quarantined the place of an entry whose key another program holds."""
    key = "redbeat:b 5"
    {"string": redis.set, "list": redis.rpush, "hash": lambda *_: redis.hset(key, "mine", "x")}[kind](key, "precious")
    redis.zadd(SCHEDULE, {key: 0})
    redis.hset("redbeat::quarantine", key, "{}")

    told = cli("delete", "b 5").output

    assert told.startswith(f"b 5: its place in the schedule and its quarantine are removed. Its key {key} stays, for ")
    assert f"for it is a {kind} of another program" in told
    assert redis.type(key) == kind
    assert not redis.exists(SCHEDULE, "redbeat::quarantine")
    (command,) = re.findall("If no program needs that key: (.*)$", told, re.MULTILINE)
    redis.execute_command(*shlex.split(command))
    assert not redis.exists(key)
    redis.set(key, "again")
    redis.zadd(SCHEDULE, {key: 0})
    assert json.loads(cli("delete", "b 5", "--json").stdout) == {"name": "b 5", "deleted": True, "left": key}


def test_a_key_that_is_no_entry_is_never_deleted(app, redis):
    redis.set("redbeat:text", "precious")
    redis.hset("redbeat:hash", "mine", "precious")
    redis.zadd(SCHEDULE, {"redbeat:text": 0, "redbeat:hash": 0})
    redis.hset("redbeat::quarantine", "redbeat:text", "{}")
    redis.hset("redbeat:broken", "definition", "{")

    assert [Schedule(app).delete(name) for name in ("text", "hash", "broken", "none")] == [True, True, True, False]

    assert (redis.get("redbeat:text"), redis.hget("redbeat:hash", "mine")) == ("precious", "precious")
    assert not redis.exists(SCHEDULE, "redbeat::quarantine", "redbeat:broken")
    assert Schedule(app).delete("text") is False


def test_entries_of_another_app_below_the_prefix_lack_no_place(app, neighbour, put, redis, cli):
    Schedule(neighbour).upsert("job", TASK, schedule(60))
    put("a:b")
    redis.zrem(SCHEDULE, "redbeat:a:b")

    assert [*Schedule(app).without_place()] == ["a:b"]
    assert [row["name"] for row in strict(cli("export").stdout)] == ["a:b"]


# ---------------------------------------------------------------- export and import


def test_an_export_has_entries_without_a_place_and_names_them(app, put, redis, cli):
    put("kept")
    put("gone")
    redis.zrem(SCHEDULE, "redbeat:gone")
    redis.hset("redbeat:bad", "definition", "{")

    found = cli("export", code=1)

    assert {row["name"] for row in strict(found.stdout)} == {"kept", "gone"}
    assert "gone: it has no place in redbeat::schedule" in found.stderr
    assert "bad: definition cannot be read" in found.stderr
    redis.delete("redbeat:bad")
    dump = cli("export").stdout
    redis.flushdb()
    cli("import", "-", stdin=dump)
    assert redis.zcard(SCHEDULE) == 2


def test_an_import_refuses_a_field_that_it_does_not_know(app, redis, cli):
    good = {"name": "good", "definition": {"task": TASK, "schedule": 60}, "meta": None, "policy": {}}
    bad = {**good, "name": "bad", "polcy": {"paused": True}}

    found = cli("import", "-", stdin=json.dumps([bad, good]), code=1)

    assert "bad: the field 'polcy' is unknown: did you mean 'policy'?" in found.stderr
    assert [entry.name for entry in Schedule(app).list()] == ["good"]


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_all_json_is_strict_whatever_an_entry_holds(put, redis, cli, number):
    put("good")
    sun = f'{{"task": "{TASK}", "schedule": {{"__type__": "solar", "event": "sunset", "lat": {number}, "lon": 0}}}}'
    redis.hset("redbeat:sun", "definition", sun)
    args = f'{{"task": "{TASK}", "args": [{number}], "schedule": {{"__type__": "interval", "every": 60}}}}'
    redis.hset("redbeat:args", "definition", args)
    redis.zadd(SCHEDULE, {"redbeat:sun": 2e9, "redbeat:args": 2e9})
    shown = "Infinity" if number == "1e999" else number

    for command in (("list",), ("show", "sun"), ("show", "args"), ("explain", "args"), ("doctor",), ("status",)):
        strict(cli(*command, "--json", code=None).stdout)
    assert strict(cli("show", "args", "--json").stdout)["definition"]["args"] == [shown]
    found = cli("export", code=1)
    assert [row["name"] for row in strict(found.stdout)] == ["good"]
    assert "args: it holds a number that JSON does not have" in found.stderr


# ---------------------------------------------------------------- unusable entries


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"definition": NIGHTLY}, "definition has a schedule of no known kind"),
        ({"policy": '{"expires": 5}'}, "expires is in its options as well as in its policy"),
        ({"policy": "{"}, "policy cannot be read"),
    ],
)
def test_an_unusable_entry_is_named_before_its_time_comes(bench, redis, findings, cli, fields, why):
    bench.put("nightly", ago=timedelta(), options={"expires": 60})
    bench.tick()
    redis.hset("redbeat:nightly", mapping=fields)
    bench.tick()
    later = "when its time comes"

    ((level, text),) = findings("entry nightly")
    assert (level, why in text, later in text) == ("problem", True, True)
    explained = cli("explain", "nightly").output
    assert why in explained
    assert later in explained
    assert "Nothing was decided" not in explained
    listed, shown = cli("list").output, cli("show", "nightly").output
    assert f"nightly: unusable: {why}" in listed
    assert "quarantined" not in listed + shown + explained
    assert "state               unusable" in shown
    assert "active" not in "".join(line for line in listed.splitlines() if line.startswith("nightly"))
    data = strict(cli("list", "--json").stdout)
    assert (data["quarantine"], [*data["unusable"]]) == ({}, ["nightly"])
    assert strict(cli("show", "nightly", "--json").stdout)["state"] == "unusable"
    assert strict(cli("status", "--json").stdout)["quarantined"] == 0

    redis.zadd(SCHEDULE, {"redbeat:nightly": 0})
    bench.tick()

    listed, shown = cli("list").output, cli("show", "nightly").output
    assert f"nightly: quarantined: {why}" in listed
    assert "active" not in "".join(line for line in listed.splitlines() if line.startswith("nightly"))
    assert "state               quarantined" in shown
    data = strict(cli("list", "--json").stdout)
    assert ([*data["quarantine"]], data["unusable"]) == (["nightly"], {})
    assert len(findings("entry nightly")) == 1


def test_status_counts_the_quarantined_entries_that_it_names(redis, cli):
    record = json.dumps({"reason": "no task", "since": "today"})
    redis.hset("redbeat::quarantine", mapping={"redbeat:bad": record, "bad": record})

    state = strict(cli("status", "--json").stdout)

    assert state["quarantined"] == len(state["quarantine"]) == 1


def test_a_key_of_another_type_is_explained_like_an_unusable_entry(bench, redis, cli):
    redis.set("redbeat:tick 7", "mine")
    redis.zadd(SCHEDULE, {"redbeat:tick 7": 2e9})
    assert "its key holds something else" in cli("explain", "tick 7").output
    redis.zadd(SCHEDULE, {"redbeat:tick 7": 0})
    bench.tick()

    explained = cli("explain", "tick 7").output

    assert "It is quarantined and does not run" in explained
    assert "its key holds something else" in explained
    assert "celery singlebeat delete 'tick 7'" in explained
    assert "quarantined" in cli("history", "tick 7").output
    assert cli("history", "tick 7", "--json").exit_code == 0


def test_a_dropped_entry_is_explained_as_parked(bench, app, cli):
    scheduler = bench.scheduler(beat_schedule={"feed": {"task": TASK, "schedule": 3600.0}})
    scheduler.tick()
    scheduler.app.conf.beat_schedule = {}
    scheduler.setup_schedule()

    for command in ("explain", "history", "show", "pause"):
        text = cli(command, "feed", code=1).output
        assert "no entry 'feed'" in text
        assert "beat_schedule has dropped it: it is parked until " in text
    with pytest.raises(UnknownEntryError, match="parked until"):
        Schedule(app).get("feed")
    assert "parked" not in cli("show", "never", code=1).output


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "no record"])
def test_an_entry_is_said_to_be_either_parked_or_removed(bench, cli, redis, is_recorded):
    feed = {"task": TASK, "schedule": 3600.0, "run_on_start": True}
    scheduler = bench.scheduler(beat_schedule={"feed": feed})
    scheduler.tick()
    scheduler.tick()
    scheduler.app.conf.beat_schedule = {}
    scheduler.setup_schedule()
    if is_recorded:
        bench.schedule.revert("feed", bench.schedule.changes("feed")[0].id)
        redis.delete("redbeat:feed")
        redis.zrem(SCHEDULE, "redbeat:feed")
    else:
        assert bench.schedule.history("feed")
        redis.delete("redbeat::changes")

    text = cli("explain", "feed", code=1).output

    assert ("Another program has removed it" in text) is is_recorded
    assert ("it is parked until" in text) is not is_recorded


def test_explain_blames_no_beat_for_a_missed_run_that_it_cannot_know(app, redis, cli, put):
    put()
    missed = Occurrence.of("redbeat:", "e", datetime.now(UTC) - timedelta(hours=1))
    Store(app, redis).record([Decision("e", TASK, missed, DecisionType.MISSED, "60.0 s late")], Term(1, ""))

    text = cli("explain", "e").output

    assert "No beat was there" not in text
    assert "no beat led then or it was busy, or the broker or the locks' server was unreachable" in text


def test_edit_asks_once_for_all_that_cannot_be_read(redis, cli):
    redis.hset("redbeat:e", "definition", "{")
    redis.zadd(SCHEDULE, {"redbeat:e": 2e9})

    text = cli("edit", "e", "--task", TASK, code=1).output

    needed = "--task, --every or --cron, --args, --kwargs, --options, and either --enable or --disable"
    assert needed in text
    assert needed in cli("edit", "e", "--task", TASK, "--every", "5", "--args", "[]", code=1).output
    options = ("--task", TASK, "--every", "5", "--args", "[]", "--kwargs", "{}", "--options", "{}", "--disable")
    cli("edit", "e", *options)


@pytest.mark.parametrize("args", ["abc", b"abc", {"a": 1}, 5])
def test_arguments_that_are_no_array_are_refused(app, redis, args):
    with pytest.raises(EntryError, match="args is not"):
        Schedule(app).upsert("e", TASK, schedule(60), args=args)

    assert not redis.exists("redbeat:e")


def test_advice_quotes_names_with_spaces(app, put, redis, cli):
    put("tick 7", paused=True)
    assert "celery singlebeat resume 'tick 7'" in cli("explain", "tick 7").output
    redis.zrem(SCHEDULE, "redbeat:tick 7")
    assert f"ZADD {SCHEDULE} 0 'redbeat:tick 7'" in cli("show", "tick 7").output


# ---------------------------------------------------------------- output


def test_long_cells_do_not_widen_the_rows_of_others(app, put, cli):
    put("x" * 100_000)
    for number in range(50):
        put(f"e{number}")
    rule = rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=UTC), count=9, byhour=[*range(24)], byminute=[*range(60)])
    Entry("rule", TASK, rule, app=app).save()

    lines = cli("list").output.splitlines()

    assert any("x" * 100_000 in line for line in lines)
    assert max(len(line) for line in lines if line.startswith("e")) < 200
    assert str(rule) in "\n".join(lines)


@pytest.mark.parametrize(
    ("redirect", "code", "out"),
    [
        ("singlebeat import - 2>&-", 0, "stored: 0 of 0"),
        ("singlebeat --help >/dev/full", 2, "Error:"),
        ("singlebeat import - <&-", 2, "Error: standard input is closed"),
    ],
)
def test_a_closed_or_full_stream_ends_no_command_with_a_traceback(server: RedisServer, redis, redirect, code, out):
    command = ["sh", "-c", f'exec "$0" -m celery -A tests.system.apps {redirect}', sys.executable]
    env = {**os.environ, "SB_TEST_URL": server.celery_url}

    done = subprocess.run(command, input="[]", capture_output=True, text=True, env=env, check=False, timeout=60)

    assert "Traceback" not in done.stderr
    assert (done.returncode, out in done.stdout + done.stderr) == (code, True), done


# ---------------------------------------------------------------- keys of the schedule itself

#: A command that makes a key of each type.
MADE = {
    "string": ("SET", "x"),
    "list": ("RPUSH", "x"),
    "set": ("SADD", "x"),
    "zset": ("ZADD", "1", "x"),
    "hash": ("HSET", "mine", "x"),
    "stream": ("XADD", "*", "mine", "x"),
}

ALL_KEYS = [(name, kind) for name, (kind, _) in {**OWN_KEYS, **LEASE_KEYS}.items() if kind != "any"]


@pytest.fixture
def spoilt(server: RedisServer, redis, bench_on, monkeypatch, cli):
    """Spoil a key of a schedule with a leader and a standby; check that all is right after the advised command."""
    monkeypatch.setattr("singlebeat.beat.scheduler.LEADER_CHECK_INTERVAL", 0.0)
    bench = bench_on(server, result_expires=None, beat_schedule={"static": {"task": TASK, "schedule": 3600}})
    leader, standby = bench.scheduler(), bench.scheduler()

    def tick() -> None:
        for beat in (leader, standby):
            beat.tick()

    def spoil(key: str, *commands: tuple[str, ...]) -> None:
        for command in commands:
            redis.execute_command(command[0], key, *command[1:])
            tick()

    def check() -> None:
        for beat in (leader, standby):
            beat.lease.renew()
        tick()
        bench.put("after")
        tick()
        assert "after" in bench.names
        for beat in (leader, standby):
            beat.lease.renew()
        state = ScheduleStatus.of(bench.app)
        assert (state.problem(), state.lost, state.leader["pid"]) == ("", "", str(os.getpid()))
        assert state.term
        assert "healthy" in cli("health", app=bench.app).output
        assert "problem" not in cli("status", app=bench.app).output
        told = cli("doctor", app=bench.app, code=None).output.splitlines()
        assert [line for line in told if re.match("problem +(?!workers| )", line)] == []
        assert redis.smembers("redbeat::statics") == {"static"}

    bench.put("before")
    tick()
    tick()
    return spoil, check


@pytest.mark.parametrize(("name", "kind"), ALL_KEYS)
def test_a_deleted_key_of_the_schedule_ends_no_beat_and_is_no_loss(spoilt, name, kind):
    spoil, check = spoilt

    spoil(f"redbeat::{name}", ("DEL",))

    check()


@pytest.mark.parametrize(("name", "kind"), ALL_KEYS)
def test_after_the_advised_command_a_key_of_another_type_is_right(spoilt, redis, name, kind):
    spoil, check = spoilt
    key = f"redbeat::{name}"

    for command in (command for other, command in MADE.items() if other != kind):
        redis.delete(key)
        spoil(key, command)
    spoil(key, ("DEL",))

    check()


@pytest.mark.parametrize("name", [name for name, kind in ALL_KEYS if kind == "hash"])
def test_foreign_fields_in_a_hash_of_the_schedule_end_no_beat(spoilt, redis, name):
    spoil, check = spoilt
    key = f"redbeat::{name}"

    spoil(key, ("DEL",), ("HSET", "mine", "x"), ("HSET", "pid", "", "token", "x", "term", "x", "since", "x"))
    spoil(key, ("HDEL", "mine", "pid", "token", "term", "since"))

    check()


@pytest.mark.parametrize("fields", [{}, {"ahead": "0.0", "took": "0.1"}, {"host": "h", "pid": "1"}])
def test_tools_say_that_the_record_of_the_leader_is_spoilt(bench, cli, probe, monkeypatch, fields):
    monkeypatch.setattr("singlebeat.cli.status.HANDOVER", 0.0)
    monkeypatch.setattr("singlebeat.beat.scheduler.LEADER_CHECK_INTERVAL", 0.0)
    leader, standby = (bench.scheduler(redbeat_lock_timeout=100) for _ in range(2))  # a slow host needs long for all
    leader.tick()
    bench.redis.delete("redbeat::leader")
    for field, value in fields.items():
        bench.redis.hset("redbeat::leader", field, value)

    standby.tick()

    unknown = "unknown, because another program has removed or spoilt the leader's record: the next renewal of the term"
    assert unknown in cli("status").output
    assert unknown in cli("health").output
    assert unknown in cli("health", "--role", "leader", code=1).output
    assert "RedBeat" not in cli("doctor", code=None).output
    assert probe()[0] == 200
    assert "singlebeat_term 0.0" in probe("/metrics")[1]
    assert unknown in cli("resign").output


def test_a_record_of_a_leader_without_its_lock_is_not_healthy(bench, cli, redis):
    bench.tick()
    record = redis.hgetall("redbeat::leader")
    bench.schedulers[-1].close()
    redis.hset("redbeat::leader", mapping=record)

    assert "no beat leads" in cli("health", code=1).output
    redis.set("redbeat::lock", "of another beat", px=60_000)
    assert ScheduleStatus.of(bench.app).leader == {}


def test_a_schedule_whose_list_of_statics_is_removed_keeps_its_pauses(server, redis, bench_on, logged):
    given = {"static": {"task": TASK, "schedule": 3600}}
    bench = bench_on(server, result_expires=None, beat_schedule=given)
    beat = bench.scheduler()
    beat.tick()
    bench.schedule.pause("static")
    redis.delete("redbeat::statics")

    beat.tick()

    assert redis.smembers("redbeat::statics") == {"static"}
    assert bench.schedule.get("static").policy.paused
    assert (logged("schedule_vanished"), ScheduleStatus.of(bench.app).lost) == ([], "")

    redis.delete("redbeat::statics", "redbeat:static", SCHEDULE)
    beat.tick()
    assert len(logged("schedule_vanished")) == 1
    assert ScheduleStatus.of(bench.app).lost


def test_a_lock_of_another_type_is_logged_once(bench, redis, logged):
    beat = bench.scheduler()
    beat.tick()
    redis.delete("redbeat::lock")
    redis.rpush("redbeat::lock", "mine")
    for number in range(3):
        bench.put(f"e{number}")

    for _ in range(3):
        beat.tick()

    one_write = hasattr(Producer, "batch")  # kombu 5.7 is the first to hand out commands
    assert len(logged("refused")) == (1 if one_write else 0)
    assert len(logged("trouble")) == 1


@pytest.mark.parametrize("kind", ["string", "hash"])
def test_explain_says_of_a_deleted_entry_which_key_is_still_there(bench, redis, cli, kind):
    bench.put("wt")
    bench.tick()
    redis.delete("redbeat:wt")
    redis.execute_command(MADE[kind][0], "redbeat:wt", *MADE[kind][1:])
    redis.zadd(SCHEDULE, {"redbeat:wt": 0})
    bench.tick()
    assert "quarantined" in cli("explain", "wt").output
    cli("delete", "wt")

    for command in ("explain", "history"):
        told = " ".join(cli(command, "wt", code=1 if command == "explain" else None).output.split())
        assert "is usable again" not in told
        assert "quarantines it" not in told
    told = " ".join(cli("explain", "wt", code=1).output.split())
    assert "there is no entry 'wt'" in told
    assert f"The key redbeat:wt is still there, for it is a {kind} of another program" in told
    assert "If no program needs that key: DEL redbeat:wt" in told
    assert "revert" not in told, "it would fail while that key is there"


def test_an_entry_with_a_huge_definition_delays_no_other(bench, cli):
    """Read and sent, it would let all others wait for a second or more."""
    bench.put("good")
    definition = Entry("huge", TASK, schedule(3600), app=bench.app, args=[["x" * LONGEST_FIELD]]).encode()
    with pytest.raises(EntryError, match="more than 1000000: store the large arguments elsewhere"):
        bench.schedule.upsert("huge", TASK, 3600, args=["x" * LONGEST_FIELD])
    bench.redis.hset("redbeat:huge", mapping={"definition": definition, "meta": Meta(None, 0).encode()})
    bench.redis.zadd("redbeat::schedule", {"redbeat:huge": 0})

    bench.tick()

    assert bench.names == ["good"]
    assert "definition has 1000" in cli("explain", "huge", app=bench.app).output
    assert bench.redis.hget("redbeat:huge", "definition") == definition


#: Nested too deeply for JSON readers.
DEEP = "[" * 10_000


def check_that_all_goes_on(bench, cli, *names: str) -> None:
    """Check that the beat, and one that begins now, run an entry, and that no command fails."""
    bench.put("canary")
    bench.tick(2)
    bench.scheduler()
    bench.tick(2)
    assert "canary" in bench.names
    for command in ("status", "list", "history", "changes", "health", "doctor", "export"):
        cli(command, app=bench.app, code=None)
    for name in names:
        for command in ("show", "explain"):
            cli(command, name, app=bench.app, code=None)


def test_deep_json_in_a_field_of_an_entry_ends_nothing(bench, redis, cli):
    for field in ENTRY_FIELDS:
        bench.put(field)
    bench.tick(2)

    for field in ENTRY_FIELDS:
        redis.hset(f"redbeat:{field}", field, DEEP)
        redis.zadd(SCHEDULE, {f"redbeat:{field}": 0})
    redis.zadd("redbeat::pending", {"redbeat:pending": 0})

    check_that_all_goes_on(bench, cli, *ENTRY_FIELDS)
    cli("backfill", "backfill", "2026-11-27", "2026-11-28", app=bench.app, code=2)


def test_deep_json_in_a_key_of_the_schedule_ends_nothing(bench, redis, cli):
    bench.put("e")
    bench.tick(2)
    soon = (datetime.now(UTC) + timedelta(seconds=60)).timestamp()

    for name in ("quarantine", "pauses", "leader"):
        redis.hset(f"redbeat::{name}", mapping={"redbeat:e": DEEP, "all": DEEP, "zone": DEEP})
    for name in ("changes", "history"):
        fields = ("before", "after", "id", "decision", "definition_before")
        redis.xadd(f"redbeat::{name}", {**dict.fromkeys(fields, DEEP), "entry": "e"})
    redis.zadd("redbeat::standbys", {DEEP: soon})
    redis.set("redbeat::lost", DEEP)

    check_that_all_goes_on(bench, cli, "e")


def test_a_huge_field_of_ends_delays_no_other_call(bench, redis):
    """With a pattern that starts again at each character, the server would search it for an hour and a half."""
    bench.put()
    bench.tick()
    (message,) = bench.messages
    redis.hset("redbeat:e", "runs", "x" * 1_000_000)

    record_end_of_message(bench.app, message.headers, "success", "")
    flush_ends(bench.app)

    (line,) = redis.hget("redbeat:e", "runs").splitlines()
    assert json.loads(line)[2] == "success"
