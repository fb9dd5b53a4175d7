"""``celery singlebeat …``: what it answers, in words, in JSON and by its exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime, timedelta
from errno import ENOSPC, EPIPE
from typing import Any

import click
import pytest
from celery import Celery, _state
from celery.bin.celery import celery
from celery.schedules import crontab, schedule
from click import Context, Option
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from singlebeat import Entry, Schedule, Singleton, clocked
from singlebeat.beat.delivery import Busy, Reader
from singlebeat.beat.entries import save
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import Lease, Term
from singlebeat.beat.lost_messages import MOST, LostMessages
from singlebeat.beat.store import unplaced
from singlebeat.beat.store.claims import Store
from singlebeat.cli import COMMANDS, main
from singlebeat.diagnosis.doctor.beats import _leadership
from singlebeat.diagnosis.doctor.finding import Read
from singlebeat.diagnosis.doctor.servers import check_settings
from singlebeat.diagnosis.doctor.workers import _queues
from singlebeat.diagnosis.locks import locks_of
from singlebeat.diagnosis.workers import BrokerError, Workers
from singlebeat.locks import backend_of, clear_locks
from singlebeat.locks.base import RUN_HEADER, Call, Ref, Verdict
from singlebeat.locks.key import suspects_key
from singlebeat.locks.memory import MemoryBackend
from singlebeat.locks.redis import RedisBackend
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.benchmarks import wire
from tests.support import APP, RedisServer, free_port, wait_until
from tests.system.apps import make_app

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")

TASK = "tests.system.apps.plain"
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)

#: The arguments that each command needs.
NEEDED = {
    **{name: ["e"] for name in ("show", "next", "explain", "delete", "pause", "resume", "trigger", "edit", "unlock")},
    "add": ["new", TASK, "--every", "5"],
    "backfill": ["e", "2026-01-01", "2026-01-02"],
    "import": ["-"],
    "revert": ["e", "--to", "1-0"],
}


@pytest.fixture
def put(app, redis):
    def put(name: str = "e", every: float = 3600, **fields: object) -> Entry:
        fields = {"last_run_at": datetime.now(UTC), "args": ["x"], **fields}
        return Entry(name, TASK, schedule(every), app=app, **fields).save()

    return put


@pytest.fixture
def lead(app, server, redis):
    lease = Lease(server.client, Keys.of(app).lease, ttl=30)
    yield lease.acquire
    lease.release()


def decided(app, redis, outcome: DecisionType, **about) -> None:
    decision = Decision("e", TASK, Occurrence.of("redbeat:", "e", NOON), outcome, **about)
    Store(app, redis).record([decision], Term(1, ""))


def answer(result: Result):
    return json.loads(result.stdout)


def test_every_command_is_listed_and_has_help(cli):
    text = cli("--help").output

    assert all(name in text for name in COMMANDS)
    for name in COMMANDS:
        assert "--json" in cli(name, "--help").output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_has_help(name):
    """The reference prints it."""
    command = main.get_command(Context(main), name)

    assert re.match(r"[A-Z].*[.:;,]", command.help)
    assert [option.name for option in command.params if isinstance(option, Option) and not option.help] == []


def test_status_shows_the_leader_and_quarantined_entries(cli, put, lead, redis):
    put("good")
    redis.hset("redbeat::quarantine", "redbeat:bad", json.dumps({"reason": "no task", "since": "today"}))
    redis.zadd("redbeat::schedule", {"redbeat:late": datetime.now(UTC).timestamp() - 100})
    lead()

    text = cli("status").output

    assert "term 1" in text
    assert "overdue     1, the first by 100 s" in text
    assert "bad: no task" in text
    state = answer(cli("status", "--json"))
    assert (state["entries"], state["overdue"], state["leader"]["term"]) == (2, 1, "1")
    assert state["quarantine"] == {"bad": {"reason": "no task", "since": "today"}}


def test_health_is_an_exit_code(cli, lead, redis):
    assert "no beat leads" in cli("health", code=1).output
    lead()
    cli("health")
    cli("health", "--role", "leader")
    redis.hset("redbeat::leader", "host", "elsewhere")
    assert "elsewhere" in cli("health", "--role", "leader", code=1).output
    redis.zadd("redbeat::schedule", {"redbeat:late": datetime.now(UTC).timestamp() - 100})
    assert "overdue" in cli("health", code=1).output
    cli("health", "--max-lag", "1000")
    assert answer(cli("health", "--json", code=1))["healthy"] is False


def test_resign_ends_the_term(cli, lead, redis):
    cli("resign", code=1)
    lead()
    redis.expire("redbeat::lock", 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("singlebeat.cli.status.HANDOVER", 0.0)
        assert "leads: none" in cli("resign").output
    assert not redis.exists("redbeat::lock")


def test_entries_are_added_shown_changed_and_deleted(cli, app):
    cli("add", "e", TASK, "--cron", "*/5 8-18 * * mon-fri", "--args", '["x", 1]', "--set", "jitter=5")
    assert Schedule(app).get("e").schedule == crontab("*/5", "8-18", day_of_week="mon-fri")
    assert "use edit" in cli("add", "e", TASK, "--every", "5", code=1).output

    text = cli("show", "e").output
    assert "cron */5 8-18 * * mon-fri" in text
    assert "jitter" in text
    cli("edit", "e", "--every", "60", "--set", "jitter=", "--set", "timezone=Europe/Berlin", "--task", "other")
    entry = Schedule(app).get("e")
    assert (entry.schedule, entry.args, entry.task) == (schedule(60), ["x", 1], "other")
    assert (entry.policy.jitter, str(entry.policy.timezone)) == (None, "Europe/Berlin")
    assert answer(cli("show", "e", "--json"))["definition"]["task"] == "other"
    cli("delete", "e")
    assert "no entry 'e'" in cli("delete", "e", code=1).output


def test_a_list_names_quarantined_entries(cli, put, redis):
    put("paused", paused=True)
    redis.hset("redbeat::quarantine", "redbeat:bad", json.dumps({"reason": "no task", "since": "today"}))

    lines = cli("list").output.splitlines()

    assert lines[0].split() == ["NAME", "TASK", "SCHEDULE", "LAST", "ENDED", "NEXT", "STATE"]
    assert any("paused" in line for line in lines)
    assert lines[-1] == "bad: quarantined: no task"
    assert {e["name"] for e in answer(cli("list", "--json"))["entries"]} >= {"paused"}


def test_an_entry_without_further_times_is_finished(cli, app, put):
    now = datetime.now(UTC)
    put("max_runs", max_runs=1, total_run_count=1)
    put("end_time", end_time=now - timedelta(days=1))
    past = {"app": app, "last_run_at": now, "total_run_count": 1}
    Entry("clocked", TASK, clocked(now - timedelta(hours=1)), **past).save()
    Entry("still due", TASK, clocked(now - timedelta(hours=1)), app=app, last_run_at=now - timedelta(hours=2)).save()
    put("active")
    put("paused", paused=True, max_runs=1, total_run_count=1)

    finished = {"max_runs", "end_time", "clocked"}
    expected = dict.fromkeys(finished, "finished") | {"still due": "active", "active": "active", "paused": "paused"}
    assert {e["name"]: e["state"] for e in answer(cli("list", "--json"))["entries"]} == expected
    for name, state in expected.items():
        assert answer(cli("show", name, "--json"))["state"] == state


def test_next_times_in_a_zone(cli, app):
    Schedule(app).upsert("e", TASK, crontab(minute=0, hour=12))

    lines = cli("next", "e", "-n", "2", "--after", "2030-06-01", "--timezone", "Europe/Berlin").output.splitlines()

    assert lines == ["2030-06-01 14:00:00+02:00", "2030-06-02 14:00:00+02:00"]


def test_pause_and_resume(cli, put, app):
    put()
    cli("pause", "e", "--note", "until Monday")
    assert "paused" in cli("list").output
    assert re.search(r"It is paused since \S+ \S+Z by \S+@\S+ \(until Monday\)", cli("explain", "e").output)
    cli("resume", "e")
    assert not Schedule(app).get("e").policy.paused


def test_entries_are_tagged_and_listed_by_a_tag(cli, put, app):
    put("other")
    cli("add", "bill", TASK, "--every", "60", "--tag", "billing", "--tag", "eu")
    assert Schedule(app).get("bill").policy.tags == ("billing", "eu")
    assert 'tags                ["billing", "eu"]' in cli("show", "bill").output.replace("'", '"')

    cli("edit", "bill", "--tag", "us")
    listed = answer(cli("list", "--tag", "us", "--json"))["entries"]
    assert [(entry["name"], entry["policy"]["tags"]) for entry in listed] == [("bill", ["us"])]
    cli("edit", "bill", "--set", "tags=")
    assert answer(cli("list", "--tag", "us", "--json"))["entries"] == []


def test_trigger_and_backfill_are_proposed(cli, put, redis):
    put(every=3600)
    assert answer(cli("trigger", "e", "--json"))["task_id"] in redis.hget("redbeat:e", "pending")
    assert "for the reason: celery singlebeat explain e" in cli("trigger", "e", "--timeout", "0.1", code=1).output
    lines = cli("backfill", "e", "2026-01-01", "2026-01-01T03:00", "--dry-run").output.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"2026-01-01 0{hour}:00:00Z" for hour in (1, 2, 3)]
    assert "more than the limit" in cli("backfill", "e", "2026-01-01", "2026-02-01", "--limit", "5", code=2).output


@pytest.mark.parametrize("name", ["add", "edit"])
def test_the_help_of_a_policy_option_shows_how_to_unset_it(cli, name):
    assert "timezone= unsets it" in " ".join(cli(name, "--help").output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_an_option_names_no_bound_that_is_none(cli, name):
    assert "None" not in cli(name, "--help").output


def test_an_entry_that_is_both_paused_and_disabled_is_said_to_be_both(cli, put):
    put()
    cli("pause", "e")
    assert cli("edit", "e", "--disable").output == "e: paused and disabled\n"
    to_go_on = "To go on: celery singlebeat edit e --enable, and celery singlebeat resume e"
    assert f"It is disabled and paused: its times pass without a run. {to_go_on}" in cli("explain", "e").output

    still = "e: resumed, and still disabled: celery singlebeat edit e --enable\n"
    assert cli("resume", "e").output == still
    cli("pause", "e")
    assert answer(cli("resume", "e", "--json")) == {"name": "e", "paused": False, "resumed": True, "disabled": True}
    assert "It is disabled: its times pass" in cli("explain", "e").output
    cli("edit", "e", "--enable")
    cli("pause", "e")
    assert cli("resume", "e").output == "e: resumed\n"


def test_an_entry_that_is_not_paused_is_not_said_to_be_resumed(cli, put, app):
    put(note="ask Ann")
    recorded = len(Schedule(app).changes("e"))

    assert cli("resume", "e").output == "e: it was not paused\n"
    assert answer(cli("resume", "e", "--json")) == {"name": "e", "paused": False, "resumed": False}

    assert Schedule(app).get("e").policy.note == "ask Ann"
    assert len(Schedule(app).changes("e")) == recorded
    cli("pause", "--all")
    assert cli("resume", "e").output.startswith("e: it was not paused, and still paused, as all entries are paused")


def test_a_changed_entry_that_a_pause_of_many_covers_is_said_to_be_paused(cli, put):
    """It has no next run that the command could name."""
    put(tags=["slow"])
    cli("pause", "--tag", "slow", "--note", "ask Ann")
    paused = "e: paused, as entries with tag slow are paused since "
    for change in (["--every", "5"], ["--enable"]):
        said = cli("edit", "e", *change).output
        assert said.startswith(paused), said
        assert "(ask Ann): celery singlebeat resume --tag slow" in said

    assert answer(cli("edit", "e", "--enable", "--json"))["pause"]["tag"] == "slow"
    assert cli("edit", "e", "--disable").output.startswith("e: disabled, and paused, as entries with tag slow")
    cli("resume", "--tag", "slow")
    assert cli("edit", "e", "--enable").output.startswith("e: next ")
    assert "pause" not in answer(cli("edit", "e", "--enable", "--json"))


def test_explain_finds_a_run_by_the_second_that_the_tools_print(cli, put, app, redis):
    put()
    for seconds in (0, 40.6):
        occurrence = Occurrence.of("redbeat:", "e", NOON + timedelta(seconds=seconds))
        Store(app, redis).record([Decision("e", TASK, occurrence, DecisionType.MISSED, f"by {seconds}")], Term(1, ""))
    printed = re.search(r"\S+ \S+Z(?=.*40.6)", cli("history", "e").output)
    assert printed[0] == "2030-01-01 12:00:40Z"

    assert "was missed: by 40.6" in cli("explain", "e", "--at", printed[0]).output
    assert "was missed: by 0." in cli("explain", "e", "--at", "2030-01-01 12:00:39Z").output
    assert "was missed: by 0." in cli("explain", "e", "--at", "2030-01-01 12:00:40.5Z").output


def test_explain_says_that_a_time_has_not_come_yet(cli, put, app, redis):
    put()
    decided(app, redis, DecisionType.MISSED, reason="100 s late")

    told = cli("explain", "e", "--at", "2040-01-01T00:00").output

    assert "2040-01-01 00:00:00Z has not come yet: this is about the last run before it." in told
    assert "has not come yet" not in cli("explain", "e", "--at", "2020-01-01T00:00").output


def test_a_trigger_says_that_no_beat_leads(cli, put, redis):
    put(every=3600)
    assert "; no beat leads: the run is sent when a beat is started" in cli("trigger", "e").output
    redis.hdel("redbeat:e", "pending")
    redis.set("redbeat::lock", "t", px=60_000)
    redis.hset("redbeat::leader", mapping={"host": "h", "pid": 1, "token": "t"})
    assert re.fullmatch(r"e: requested, task \S+\n", cli("trigger", "e").output)


def test_a_backfill_names_the_ids_of_its_runs(cli, put, redis):
    put(every=3600)
    span = ("2026-01-01", "2026-01-01T01:00")
    planned = answer(cli("backfill", "e", *span, "--overlap", "buffer_one", "--dry-run", "--json"))
    assert planned == [{"nominal": "2026-01-01T01:00:00+00:00", "id": None}]

    (row,) = answer(cli("backfill", "e", *span, "--json"))

    assert row["nominal"] == planned[0]["nominal"]
    assert json.loads(redis.hget("redbeat:e", "pending"))["id"] == row["id"]


@pytest.mark.parametrize("theirs", [TASK, "another"], ids=["alike", "another"])
def test_an_entry_that_was_added_meanwhile_is_not_replaced(cli, app, monkeypatch, theirs):
    """The other one is there by the time when ours is written, though it was not when ours was read."""
    write = save._write

    def write_late(*args: Any) -> Any:
        monkeypatch.undo()
        Entry("e", theirs, schedule(60), app=app).save()
        return write(*args)

    monkeypatch.setattr(save, "_write", write_late)

    assert "there is an entry 'e' already: use edit" in cli("add", "e", TASK, "--every", "60", code=1).output
    assert Schedule(app).get("e").task == theirs


def test_an_entry_cannot_be_added_over_an_unreadable_entry(cli, redis):
    redis.hset("redbeat:e", "definition", "{")

    assert "there is an entry 'e' already: use edit" in cli("add", "e", TASK, "--every", "60", code=1).output
    assert redis.hgetall("redbeat:e") == {"definition": "{"}


@pytest.mark.parametrize("score", [0, 1])
def test_a_place_of_zero_says_nothing_about_how_late_an_entry_is(cli, redis, score):
    redis.zadd("redbeat::schedule", {"redbeat:e": score})

    state = answer(cli("status", "--json"))

    assert (state["due"], state["overdue"], state["lag"] > 0) == (1, score, bool(score))


def test_history_shows_decisions(cli, put, app, redis):
    put()
    occurrence = Occurrence.of("redbeat:", "e", NOON)
    Store(app, redis).record([Decision("e", TASK, occurrence, DecisionType.MISSED, "100 s late")], Term(3, ""))

    for args in (["history"], ["history", "e"]):
        row = cli(*args).output.splitlines()[1]
        assert [cell.strip() for cell in row.split("  ") if cell] == [
            "e",
            "2030-01-01 12:00:00Z",
            "missed",
            "100 s late",
        ]
    (record,) = answer(cli("history", "e", "--json"))
    assert (record["decision"], record["term"], record["end"]) == ("missed", "3", None)


def test_history_shows_the_end_of_an_id_with_the_run_that_was_sent_alone(cli, put, app, redis):
    put()
    store, occurrence = Store(app, redis), Occurrence.of("redbeat:", "e", NOON)
    store.record([Decision("e", TASK, occurrence, DecisionType.DISPATCHED, "")], Term(3, ""))
    record_end_of_message(app, {"id": occurrence.id, RUN_HEADER: {"entry": "e"}}, "success", worker="w")
    flush_ends(app)
    store.record([Decision("e", TASK, occurrence, DecisionType.RUN_BEFORE, "it has ended before")], Term(3, ""))

    rows = [[cell.strip() for cell in row.split("  ") if cell] for row in cli("history", "e").output.splitlines()[1:3]]

    assert [row[2:] for row in rows] == [["run_before", "it has ended before"], ["dispatched", "success"]]


def sent_without_end(app, redis) -> str:
    """Record that a run was sent, and return its task id."""
    occurrence = Occurrence.of("redbeat:", "e", NOON)
    Store(app, redis).record([Decision("e", TASK, occurrence, DecisionType.DISPATCHED, "")], Term(3, ""))
    return occurrence.id


def test_explain_says_how_the_run_that_was_in_the_way_has_ended(bench, cli):
    for name in ("first", "second"):
        bench.put(name, task="tests.system.apps.single", args=["same"])
        bench.tick()
    sent, skipped = bench.history
    assert (sent["decision"], skipped["decision"]) == ("dispatched", "skipped_overlap")
    message = {"id": sent["id"], RUN_HEADER: {"entry": sent["entry"]}}
    record_end_of_message(bench.app, message, "failure", reason="OSError: disk full", worker="w1@host")
    flush_ends(bench.app)
    clear_locks(bench.app)

    told = cli("explain", skipped["entry"], app=bench.app).output

    assert f"Task {sent['id']} does not hold the lock any more" in told
    assert re.search(r"It ended at \S+ \S+Z on w1@host, failure: OSError: disk full\.", told)


@pytest.mark.parametrize("lease", [1.0, 30.0])
def test_explain_says_that_the_worker_of_the_run_in_the_way_died(server, bench_on, cli, lease):
    """Its lock is gone, and no end was recorded; within the lease its end may be on its way."""
    bench = bench_on(server, singlebeat_lock_lease=lease)
    for name in ("first", "second"):
        bench.put(name, task="tests.system.apps.single", args=["same"])
        bench.tick()
    clear_locks(bench.app)
    wait_until(lambda: time.time() > int(bench.redis.xrange("redbeat::history")[0][0].split("-")[0]) / 1000 + 1.1)

    told = cli("explain", "second", app=bench.app).output

    assert ("No worker has recorded its end: its worker has probably died" in told) == (lease == 1)


def test_resume_says_that_the_only_time_of_an_entry_has_passed(cli, bench):
    only = clocked(datetime.now(UTC) + timedelta(hours=1))
    bench.put("only", every=only, paused=True, ago=None)
    bench.put("hourly", paused=True)
    past = datetime.now(UTC) - timedelta(hours=1)
    text = bench.redis.hget("redbeat:only", "definition").replace(only.isoformat(), past.isoformat())
    bench.redis.hset("redbeat:only", "definition", text)

    explained, told = cli("explain", "only").output, cli("resume", "only").output

    assert "To run it all the same: celery singlebeat trigger only" in explained
    assert told.startswith("only: resumed, and never runs: its only time, ")
    assert told.endswith(", has passed. To run it all the same: celery singlebeat trigger only\n")
    assert cli("resume", "hourly").output == "hourly: resumed\n"


def test_explain_finds_an_end_that_was_not_recorded_in_the_result_backend(cli, put, app, redis):
    put()
    task_id = sent_without_end(app, redis)
    assert (
        "Or it has ended, and that could not be recorded: the schedule's server did not take the record, or the worker "
        "has another redbeat_redis_url or redbeat_key_prefix." in cli("explain", "e").output
    )

    app.backend.mark_as_done(task_id, "done")

    told = cli("explain", "e").output
    at = f"{datetime.now(UTC):%Y-%m-%d}"
    assert f"Its end is not in the history, but in the result backend: it ended at {at}" in told
    assert "with SUCCESS." in told
    assert "No end of it was recorded" not in told


def test_explain_names_a_result_backend_that_it_cannot_ask(cli, server, redis):
    retries = {"retry_policy": {"max_retries": 0}}
    conf = {"result_backend": "redis://:secret@127.0.0.1:1", "result_backend_transport_options": retries}
    with make_app(server.celery_url, conf) as app:
        Entry("e", TASK, schedule(60), app=app).save()
        sent_without_end(app, redis)

        told = cli("explain", "e", app=app).output

    assert "The result backend redis://:**@127.0.0.1:1 " in told
    assert "No end of it was recorded" in told


def begin_and_die(backend, redis, run: Ref, *, task: str = "t", arguments: str = "") -> None:
    """Start a run whose worker dies at once, and let most of its lease pass."""
    backend.begin(run, lease=30, remember_for=60, task=task, arguments=arguments)
    redis.hset(run.key, "since", int(redis.hget(run.key, "since")) - 25_000)
    redis.pexpire(run.key, 5_000)


def test_locks_are_shown_and_freed_but_not_from_under_their_owner(cli, app, redis):
    backend = backend_of(app)
    backend.acquire_many([Call(Ref("SINGLETONLOCK_{a}", "queued-one"), "t", "(1,)", 60)])
    backend.begin(Ref("SINGLETONLOCK_{b}", "live-one", 0, "n"), lease=30, remember_for=60, task="t", arguments="(2,)")
    begin_and_die(backend, redis, Ref("SINGLETONLOCK_{c}", "dead-one", 0, "n"), task="t", arguments="(3,)")

    rows = {row["task_id"]: row for row in answer(cli("locks", "--json"))}
    assert {name: row["state"] for name, row in rows.items()} == {
        "queued-one": "queued",
        "live-one": "running",
        "dead-one": "running",
    }
    assert 0 < rows["dead-one"]["left"] <= 5
    assert "t (1,)" in cli("locks").output
    assert (
        "its lock is not freed: its message counts as late only after 30 s"
        in cli("unlock", "queued-one", code=1).output
    )
    said = cli("unlock", "live-one", code=1).output
    refused = re.search(r"was renewed \d s ago.*: its worker lives, or has died since.* try again in (\d+) s", said)
    assert 1 <= int(refused[1]) <= 12, "40 % of its lease"
    assert "--force" not in said, "its run would go on beside the next one"
    assert backend.get("SINGLETONLOCK_{b}") == "live-one"
    # No process can tell a dead worker from one that hangs.
    beside = (
        "free; it was held by task {}, running; if its process lives after all, that run goes on beside the next one"
    )
    assert beside.format("dead-one") in cli("unlock", "dead-one").output
    assert beside.format("live-one") in cli("unlock", "SINGLETONLOCK_{b}", "--force").output
    assert backend.get("SINGLETONLOCK_{b}") is backend.get("SINGLETONLOCK_{c}") is None
    assert "no lock is held" in cli("unlock", "nobody", code=1).output


def test_force_is_named_with_what_it_does_and_for_silent_workers_alone(cli, app, redis, monkeypatch):
    """A worker that shuts down answers no question, and goes on renewing the locks of its last runs."""
    backend = backend_of(app)
    backend.begin(Ref("SINGLETONLOCK_{b}", "live-one", 0, "n"), lease=30, remember_for=60, task="t", arguments="")
    begin_and_die(backend, redis, Ref("SINGLETONLOCK_{c}", "silent-one", 0, "n"))

    def away(app: Celery) -> Workers:
        raise BrokerError("does not answer")

    monkeypatch.setattr(Workers, "ask", away)
    lives, silent = (cli("unlock", which, code=1).output for which in ("live-one", "silent-one"))

    assert "Wait: if it has died, try again in" in lives
    assert "--force" not in lives
    assert "--force frees its lock all the same; a run that goes on is not stopped by that, and the next" in silent


def test_locks_and_doctor_show_who_waits_and_whose_worker_is_silent(cli, findings, app, redis):
    backend, lock = backend_of(app), "SINGLETONLOCK_{a}"
    backend.worker = "w1@vm"
    about = {"lease": 30, "remember_for": 60, "task": "t", "arguments": "(1,)"}
    run = Ref(lock, "first", 0, "n")
    backend.begin(run, **about)
    backend.renew_many([run], lease=30)
    backend.begin(Ref(lock, "second", 0, "m"), turn_ttl=60, **about)
    assert not [text for _, text in findings("locks") if "first" in text]

    for name in ("since", "renewed"):
        redis.hset(lock, name, int(redis.hget(lock, name)) - 25_000)
    redis.pexpire(lock, 5_000)

    told = cli("locks").output
    assert re.search(r"first +running\? +2\d s +\d s$", told, re.MULTILINE)
    assert re.search(r"second +waits +\d s +\d+ s$", told, re.MULTILINE)
    assert re.search(
        r"^task first: last renewed 2\d s ago by w1@vm: its worker has died, or hangs, or could not free it .celery",
        told,
        re.M,
    )
    (warned,) = [found for found in findings("locks") if "first" in found[1]]
    assert warned[0] == "warning"
    assert re.search(r"last renewed 2\d s ago by w1@vm, .* its worker has probably died, or hangs", warned[1])


def test_the_help_of_unlock_says_that_a_silent_worker_may_hang(cli):
    told = " ".join(cli("unlock", "--help").output.split())
    assert "needs --force if the lock's owner is known to be alive" in told
    assert "the run of a process that hangs goes on beside the next run" in told


def set_back(redis, lock: str, seconds: int) -> None:
    """Leave a lock as it is after the clock of its server was set back."""
    for name in ("since", "renewed"):
        if at := redis.hget(lock, name):
            redis.hset(lock, name, int(at) + seconds * 1000)
    redis.pexpire(lock, redis.pttl(lock) + seconds * 1000)


def test_a_lock_from_before_a_clock_set_back_is_not_shown_as_alive(cli, app, redis):
    backend, run = backend_of(app), Ref("SINGLETONLOCK_{a}", "old-one", 0, "n")
    backend.begin(run, lease=30, remember_for=60, task="t", arguments="")
    set_back(redis, run.key, 18_000)

    (row,) = answer(cli("locks", "--json"))
    assert (row["renewed"], row["is_ahead"]) == (None, True)
    assert re.search(r"old-one +running +\? +180\d\d s", cli("locks").output)
    assert "was last renewed before the clock of the locks' server was set back" in (
        said := cli("unlock", "old-one", code=1).output
    )
    assert "lives;" not in said
    backend.acquire_many([Call(Ref(run.key, "next-one"), "t", "", 60)])
    redis.pexpire(run.key, 10_000)  # its lease goes by, and no worker renews it

    cli("unlock", "old-one")

    assert backend.get(run.key) is None


def test_a_run_renewed_after_the_clock_was_set_back_is_alive(cli, app, redis):
    backend, run = backend_of(app), Ref("SINGLETONLOCK_{a}", "live-one", 0, "n")
    backend.begin(run, lease=30, remember_for=60, task="t", arguments="")
    set_back(redis, run.key, 18_000)
    backend.renew_many([run], lease=30)

    (row,) = answer(cli("locks", "--json"))
    assert 0 <= row["renewed"] < 30
    assert row["is_ahead"] is False
    assert re.search(r"was renewed \d+ s ago.*its worker lives", cli("unlock", "live-one", code=1).output)


def test_unlock_examines_a_lock_queued_before_the_clock_was_set_back(cli, app, redis, monkeypatch):
    """Its message is late: workers and the queue are asked, of which none answers here."""
    monkeypatch.setattr("singlebeat.beat.lost_messages.TIMEOUT", 0.05)
    run = Ref("SINGLETONLOCK_{a}", "queued-one")
    backend_of(app).acquire_many([Call(run, "t", "", 3600)])
    set_back(redis, run.key, 18_000)

    assert "of 1 old queued locks" in cli("unlock", "--stale").output
    assert (
        "task queued-one was queued before the clock of the locks' server was set back, and its lock is not freed: "
        in cli("unlock", "queued-one", code=1).output
    )


def hourly() -> None:
    """Do nothing."""


@pytest.mark.parametrize("by", ["until_expired", "a program"])
def test_a_lock_that_ends_by_time_alone_is_no_lost_message(bench, cli, findings, no_worker_is_awaited, by):
    """Its message may have run long ago, or there is none: it excludes equal calls until then."""
    app, backend = bench.app, backend_of(bench.app)
    options = {"lock": "until_expired", "lock_expiry": 600} if by == "until_expired" else {}
    task = app.task(hourly, name="app.hourly", base=Singleton, shared=False, **options)
    lock = task.generate_lock(task.name)
    if by == "a program":
        assert backend.lock(lock, "maintenance", 600)
    first = task.delay()
    app.backend.mark_as_done(first.id, None)
    bench.redis.hincrby(lock, "since", -60_000)
    bench.put("e", task=task.name, args=[])
    bench.scheduler(app=app)
    bench.tick()
    assert bench.history[-1]["decision"] == "skipped_overlap"
    assert not LostMessages(app).search(backend, [lock])
    assert not backend.suspects(suspects_key("SINGLETONLOCK_"), MOST)

    assert f" {first.id}  timed " in re.sub("  +", "  ", cli("locks", app=app).output)
    assert f"Task {first.id} holds its lock for a fixed time" in cli("explain", "e", app=app).output
    assert "0 of 0 old queued locks were freed" in cli("unlock", "--stale", app=app).output
    assert re.search(
        rf"task {first.id} holds its lock for a fixed time, .* in \d+ s\. --force frees it now; a run that goes on is",
        cli("unlock", first.id, app=app, code=1).output,
    )
    assert not [text for _, text in findings("locks", app=app)]
    assert task.delay() == first
    cli("unlock", "--force", first.id, app=app)
    assert not task.delay().is_duplicate


@pytest.mark.parametrize("prefix", ["", "kp:"])
def test_the_message_of_a_lock_is_found_in_its_queue_under_any_prefix(server, redis, cli, monkeypatch, prefix):
    """Otherwise it would be lost as soon as a worker answers that it does not have it."""
    monkeypatch.setattr("singlebeat.beat.lost_messages.TIMEOUT", 0.05)
    with make_app(server.celery_url, {"broker_transport_options": {"global_keyprefix": prefix}}) as app:
        single, sent = app.tasks[f"{APP}.single"], dict[str, str]()
        for name, options in {"first": {}, "urgent": {"priority": 9}, "purged": {"queue": "other"}}.items():
            sent[name] = single.apply_async([name], **options).id
            redis.hincrby(single.generate_lock(single.name, [name]), "since", -60_000)
        assert redis.delete(f"{prefix}other")

        told = cli("unlock", "--stale", app=app).output

        for name in ("first", "urgent"):
            assert f"task {sent[name]}: not freed: its message waits in queue celery" in told
        assert f"task {sent['purged']}: not freed: no worker answers" in told


def test_unlock_leaves_a_run_alone_that_began_while_the_workers_were_asked(cli, app, redis, monkeypatch):
    backend, lock = backend_of(app), "SINGLETONLOCK_{a}"
    dead = Ref(lock, "dead-one", 0, "n")
    begin_and_die(backend, redis, dead)
    ask = Workers.ask

    def ask_slowly(app: Any) -> Any:
        answers = ask(app)
        backend.unlock(lock)  # as the end of its lease does
        backend.begin(Ref(lock, "next-one", 0, "n"), lease=30, remember_for=60, task="t", arguments="")
        return answers

    monkeypatch.setattr(Workers, "ask", ask_slowly)

    assert "is not free: task next-one holds it" in cli("unlock", "dead-one", code=1).output
    assert backend.get(lock) == "next-one"


def test_a_forced_unlock_leaves_the_lock_of_another_task(cli, app, monkeypatch):
    """As a copy of the command that a network holds back."""
    backend, lock = backend_of(app), "SINGLETONLOCK_{a}"
    backend.lock(lock, "first", 60)

    def read_slowly(app: Any) -> Any:
        rows = list(locks_of(app))
        backend.unlock(lock)
        backend.lock(lock, "second", 60)
        return iter(rows)

    monkeypatch.setattr("singlebeat.diagnosis.locks.locks_of", read_slowly)

    assert "is not free: task second holds it" in cli("unlock", "first", "--force", code=1).output
    assert backend.get(lock) == "second"


def test_the_message_of_a_dead_run_runs_when_redelivered_after_unlock(cli, app, redis):
    backend, run = backend_of(app), Ref("SINGLETONLOCK_{a}", "dead-one", 0, "n")
    again = {"lease": 5, "remember_for": 60, "task": "t", "arguments": ""}
    backend.begin(Ref(run.key, "ended-one", 0, "n"), **again)
    backend.finish_many([Ref(run.key, "ended-one", 0, "n")], remember_for=60)
    begin_and_die(backend, redis, run)

    cli("unlock", "dead-one")

    assert backend.begin(Ref(run.key, "ended-one", 0, "n2"), **again).verdict is Verdict.DONE
    assert backend.begin(Ref(run.key, "dead-one", 0, "n2"), **again).verdict is Verdict.STARTED


def test_unlock_leaves_a_retry_the_lock_that_was_promised_to_it(cli, app, redis):
    backend, run = backend_of(app), Ref("SINGLETONLOCK_{a}", "retrying-one", 0, "n")
    begin_and_die(backend, redis, run)
    backend.promise(run, to=Ref(run.key, run.task_id, 1), ttl=60)

    assert "is not free: task retrying-one holds it" in cli("unlock", "retrying-one", code=1).output
    assert [row["state"] for row in answer(cli("locks", "--json"))] == ["queued"]


def test_unlock_never_touches_an_entry(cli, server, redis):
    conf = {"redbeat_key_prefix": "shop:", "singleton_key_prefix": "shop:"}
    with make_app(server.celery_url, conf) as app:
        Schedule(app).upsert("nightly", "t", schedule(60))

        result = cli("unlock", "shop:nightly", "--force", code=1, app=app)

        assert "no lock is held by shop:nightly" in result.output
        assert Schedule(app).get("nightly").task == "t"
        assert answer(cli("locks", "--json", app=app)) == []


def test_unlock_and_explain_read_few_locks_of_many(cli, app, put, redis, monkeypatch):
    put("e")
    decided(app, redis, DecisionType.SKIPPED_OVERLAP, holder="holder")
    backend = backend_of(app)
    refs = [Ref(f"SINGLETONLOCK_{{{n}}}", "holder") for n in range(5_000)]
    backend.acquire_many([Call(ref, "t", "", 60) for ref in refs])
    monkeypatch.setattr(Workers, "ask", lambda app, **kwargs: None)

    with wire.counted() as unlock:
        cli("unlock", "holder", "--force")
    with wire.counted() as explain:
        explained = cli("explain", "e").output

    assert "Task holder was queued " in explained
    assert unlock.round_trips < 10
    assert explain.round_trips < 60  # it tries what the locks' server lets its user do


def test_doctor_reads_entries_once_and_few_locks_of_many(cli, app, put, redis, monkeypatch):
    put("e")
    refs = [Ref(f"SINGLETONLOCK_{{{n}}}", str(n)) for n in range(5_000)]
    backend_of(app).acquire_many([Call(ref, "t", "", 60) for ref in refs])
    asked = Workers({}, {"w": frozenset({"other"})}, {"w": ""}, {}, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda app, **kwargs: asked)
    monkeypatch.setattr("singlebeat.diagnosis.doctor.locks.MOST_OLD_LOCKS", 1_000)
    lists, locks, list_, read = [], [], Schedule.list, RedisBackend._read
    monkeypatch.setattr(Schedule, "list", lambda *args, **kwargs: lists.append(1) or list_(*args, **kwargs))
    monkeypatch.setattr(RedisBackend, "_read", lambda self, keys: locks.extend(keys) or read(self, keys))

    said = cli("doctor", code=1).output

    assert "entry e: no worker that answers knows its task" in said
    assert len(lists) == 1
    assert 1_000 <= len(locks) < 2_000


def test_explain_reads_no_locks_where_none_is_asked_for(cli, app, put, redis, monkeypatch):
    put("e")
    decided(app, redis, DecisionType.PAUSED)

    monkeypatch.setattr(RedisBackend, "locks", lambda *args: pytest.fail("it has asked for locks"))

    cli("explain", "e")


def test_unlock_says_so_if_the_backend_cannot_free_a_lock(cli, server):
    class Stubborn(MemoryBackend):
        def unlock(self, lock: str, holder: str = "") -> None:
            """Do nothing, as without locks there is nothing to do."""

    with make_app(server.celery_url, {"singleton_backend_class": Stubborn}) as app:
        backend_of(app).begin(Ref("SINGLETONLOCK_{a}", "a", 0, "n"), lease=30, remember_for=60, task="t", arguments="")

        result = cli("unlock", "a", "--force", code=1, app=app)

    assert "is not free: task a holds it" in result.output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["show", "none"], 1, "there is no entry 'none'"),
        (["explain", "none"], 1, "there is no entry 'none'"),
        (["next", "e", "--after", "yesterday"], 2, "is no date and time"),
        (["next", "e", "--after", "9999-12-31T23:59:59-14:00"], 2, "is no date and time"),
        (["explain", "e", "--at", "0001-01-01T00:00:00+14:00"], 2, "is no date and time"),
        (["backfill", "e", "0001-01-01T00:00:00+14:00", "2026-01-01"], 2, "is no date and time"),
        (["backfill", "e", "2026-01-01", "9999-12-31T23:00:00-14:00"], 2, "is no date and time"),
        (["next", "e", "--timezone", "Mars"], 2, "no time zone 'Mars'"),
        (["next", "e", "-n", "0"], 2, "is not in the range"),
        (["add", "n", TASK], 2, "needs --every or --cron"),
        (["add", "n", TASK, "--every", "5", "--cron", "* * * * *"], 2, "not both"),
        (["add", "n", TASK, "--every", "1e300"], 2, "too long"),
        (["add", "n", TASK, "--every", "nan"], 2, "nan is no number of seconds"),
        (["health", "--max-lag", "nan"], 2, "nan is no number of seconds"),
        (["trigger", "e", "--timeout", "nan"], 2, "nan is no number of seconds"),
        (["add", "n", TASK, "--cron", "* *"], 2, "needs five fields"),
        (["add", "n", TASK, "--cron", "99 * * * *"], 2, "--cron"),
        (["add", "n", TASK, "--every", "5", "--args", "{}"], 2, "is no JSON array"),
        (["add", "n", TASK, "--every", "5", "--set", "jitter"], 2, "NAME=VALUE"),
        (["add", "n", TASK, "--every", "5", "--set", "jiter=5"], 2, "did you mean 'jitter'?"),
        (["add", "n", TASK, "--every", "5", "--set", "jitter=-1"], 2, "must be a positive number"),
        (["edit", "e", "--set", "timezone=Mars/X"], 2, "must be the IANA name of a time zone"),
        (["edit", "e", "--task", ""], 2, "needs a task"),
        (["edit", "e", "--options", '{"countdown": "x"}'], 2, "the option countdown is"),
        (["add", "a::lock", TASK, "--every", "5"], 2, "is a key of the schedule of another app"),
        (["add", "", TASK, "--every", "5"], 2, "there can be no entry '': its name is blank"),
        (["add", " \t", TASK, "--every", "5"], 2, "its name is blank"),
        (["backfill", "e", "2026-01-01", "2020-01-01"], 2, "is before its start"),
        (["backfill", "nosuch", "2026-01-01", "2020-01-01"], 1, "there is no entry"),
        (["edit", "nosuch", "--set", "jitter=-1"], 1, "there is no entry"),
        (["import", "-"], 2, "is no JSON"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_line_and_no_traceback(cli, put, args, code, message):
    put()

    output = cli(*args, code=code).output

    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize("given", ['{"password": "hunter2"', '{"password": "hunter2"} x', '["hunter2"]', '"hunter2"'])
def test_arguments_that_are_no_json_are_not_repeated(cli, given):
    output = cli("add", "n", TASK, "--every", "5", "--kwargs", given, code=2).output

    assert "is no JSON object" in output
    assert "hunter2" not in output


@pytest.mark.parametrize("depth", [250, 900, 100_000])
def test_arguments_that_are_too_deep_are_refused_by_add_and_import(cli, depth, tmp_path):
    deep, file = "[" * depth + "]" * depth, tmp_path / "entries.json"
    file.write_text(f'[{{"name": "e", "definition": {{"task": "t", "schedule": 5, "args": {deep}}}}}]')

    added = cli("add", "e", TASK, "--every", "5", "--args", deep, code=2).output
    imported = cli("import", str(file), code=1).output

    said = "nested too deeply: use at most 250 arrays and objects in one another"
    assert said in added or depth > 1000
    assert said in imported
    assert "Traceback" not in added + imported


@pytest.mark.parametrize("name", ["status", "doctor", "list", "health"])
@pytest.mark.parametrize("mark", ["#", "/"])
def test_a_special_character_in_the_password_of_the_broker_is_one_line(cli, server, name, mark):
    """Python reads it as the end of the host, and names a part of the password as a wrong port."""
    url = f"amqp://shop:hunter2{mark}x@127.0.0.1:1//"
    app = make_app(server.celery_url, {"broker_url": url, "redbeat_redis_url": server.url})

    told = cli(name, app=app, code=None)

    assert told.exit_code != 0
    assert "broker_url cannot be read: quote what is special in its password (%23 for #" in told.output
    assert "hunter2" not in told.output


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "web"])
def test_an_unreachable_server_is_one_line_and_exit_code_2(cli, name):
    away = f"redis://127.0.0.1:{free_port()}/0"
    with make_app(away, {"singlebeat_socket_timeout": 0.2}) as app:
        stdin = json.dumps([{"name": "e", "definition": {"task": "t", "schedule": 5}}])
        result = cli(name, *NEEDED.get(name, []), app=app, code=2, stdin=stdin)

    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
    assert name == "doctor" or not result.stdout, "the doctor says what it could check"
    assert "Traceback" not in result.output


def test_doctor_names_problems_and_password_less_urls(cli, put, redis):
    put("orphan")
    redis.hset("redbeat::quarantine", "redbeat:bad", json.dumps({"reason": "no task", "since": "today"}))

    findings = {(row["level"], row["about"]): row["text"] for row in answer(cli("doctor", "--json", code=1))}

    started = (
        "no beat leads: singlebeat sends nothing until one is started (celery beat -S singlebeat.Scheduler). A beat"
    )
    assert findings["problem", "beat"].startswith(started)
    assert (
        "A celery beat without -S singlebeat.Scheduler is not seen here, nor is one with another redbeat_key_prefix"
        in (findings["problem", "beat"])
    )
    assert "no task" in findings["problem", "entry bad"]
    assert "no worker answers" in findings["problem", "workers"]
    with make_app("redis://", {"redbeat_redis_url": "redis://:hush@db.example.org/0"}) as app:
        (finding,) = check_settings(app, Read(app))
    assert "clear" in finding.text
    assert "hush" not in finding.text


def test_doctor_asks_for_no_beat_where_no_entry_needs_one(cli, server, put, app, bench):
    def of_beat(app=app) -> list[str]:
        return [finding.level for finding in _leadership(app, Read(app))]

    assert "no beat leads" in cli("health", code=1).output
    found = cli("doctor", code=1).output
    assert "fine     beat: no beat was ever started, and no entry needs one" in found
    assert "problem  beat" not in found
    with make_app(server.celery_url, {"beat_schedule": {"e": {"task": TASK, "schedule": 60}}}) as configured:
        assert of_beat(configured) == ["problem"]
    put()
    assert of_beat() == ["problem"]
    Schedule(app).delete("e")
    assert of_beat() == ["fine"]
    bench.tick()
    bench.close()
    assert of_beat() == ["problem"], "a beat was there"


def test_a_claimed_run_that_no_beat_tries_again_is_named_with_its_way_out(cli, put, redis, bench_on, server):
    """As after the advice to delete a list of claimed runs that another program has spoilt."""
    bench = bench_on(server)
    put("e", every=36_000)
    bench.schedule.trigger("e")
    redis.delete("redbeat::pending")
    redis.set("redbeat::pending", "of another program")
    advice = "DEL redbeat::pending (or RENAME, to keep its data), and run doctor again: it names the claimed runs that"
    assert advice in cli("doctor", code=1).output
    redis.delete("redbeat::pending")

    way_out = "ZADD redbeat::pending 0 redbeat:e"
    (row,) = [row for row in answer(cli("doctor", "--json", code=1)) if way_out in row["text"]]
    assert (row["level"], row["about"]) == ("problem", "entry e")
    assert (
        f"so that no beat tries it again before the entry is due; to send it: {way_out}" in cli("explain", "e").output
    )
    redis.execute_command(*way_out.split())
    assert way_out not in cli("doctor", code=1).output
    assert "beat tries it again every few seconds" in cli("explain", "e").output
    bench.scheduler().tick()
    assert len(bench.names) == 1


def test_a_claimed_run_of_a_quarantined_entry_waits_for_that_entry(cli, put, redis, bench_on, server):
    bench = bench_on(server)
    put("e", every=36_000)
    bench.schedule.trigger("e")
    redis.hset("redbeat:e", "definition", "{")
    bench.scheduler().tick()
    assert redis.hexists("redbeat::quarantine", "redbeat:e")

    assert "ZADD" not in cli("doctor", code=1).output
    assert "beat sends it once the entry is usable" in cli("explain", "e").output


@pytest.mark.parametrize("name", ["-nightly", "--all", "--tag=eu"])
def test_a_command_is_advised_for_a_name_that_looks_like_an_option(cli, put, app, name):
    put("other", tags=["eu"])
    put(name)
    for each in (name, "other"):
        Schedule(app).pause(each)

    (advised,) = re.findall(r"celery singlebeat (resume .*?)[.]?$", cli("explain", "--", name).output, re.MULTILINE)
    cli(*shlex.split(advised))

    assert {each.name: each.policy.paused for each in Schedule(app).list()} == {name: False, "other": True}


def test_claimed_runs_are_looked_up_in_batches(app, put, redis):
    for number in range(50):
        put(f"e{number}", every=36_000)
        Schedule(app).trigger(f"e{number}")
    redis.zrem("redbeat::pending", "redbeat:e7")
    redis.config_resetstat()

    assert [*Schedule(app).without_retry()] == ["e7"]

    stats = redis.info("commandstats")
    assert stats["cmdstat_zmscore"]["calls"] < 5
    assert sum(stats[name]["calls"] for name in stats if name in {"cmdstat_evalsha", "cmdstat_eval"}) < 10


def test_a_run_that_is_confirmed_while_doctor_looks_is_not_named(cli, put, redis, monkeypatch):
    put("e")
    redis.hset("redbeat:e", "pending", json.dumps({"id": "x", "nominal": 1.0}))
    redis.zadd("redbeat::pending", {"redbeat:e": 0})
    read = unplaced.read_fields

    def read_before_the_confirmation(*args: Any, **options: Any) -> Any:
        found = read(*args, **options)
        redis.hdel("redbeat:e", "pending")
        redis.zrem("redbeat::pending", "redbeat:e")
        return found

    monkeypatch.setattr(unplaced, "read_fields", read_before_the_confirmation)

    assert "ZADD redbeat::pending" not in cli("doctor", code=1).output


def test_an_entry_without_a_place_never_runs_and_is_named(cli, put, redis):
    for name in ("gone", "bare", "e"):
        put(name)
    redis.zrem("redbeat::schedule", "redbeat:gone", "redbeat:bare")
    redis.zadd("redbeat::schedule", {"bare": 0})  # the bare name is a place as well
    redis.hset("redbeat:no entry", "mine", "1")
    redis.hset("redbeat::parked:old", "definition", "{}")
    why = "t has no place in redbeat::schedule: it never runs; to let it run at once, and then at its next times: "
    why += "ZADD redbeat::schedule 0 redbeat:gone"

    assert f"I{why}" in cli("explain", "gone").output.splitlines()
    shown = cli("show", "gone").output
    assert "state               no place" in shown
    assert "next                never" in shown
    assert f"i{why}" in shown
    assert answer(cli("show", "gone", "--json"))["next"] is None
    assert f"gone: i{why}" in cli("list").output.splitlines()
    assert answer(cli("list", "--json"))["no_place"] == ["gone"]
    found = [row for row in answer(cli("doctor", "--json", code=1)) if "place" in row["text"]]
    assert [(row["level"], row["about"]) for row in found] == [("problem", "entry gone")]
    cli("pause", "gone")
    redis.zrem("redbeat::schedule", "redbeat:gone")
    assert [row["level"] for row in answer(cli("doctor", "--json", code=1)) if "place" in row["text"]] == ["warning"]
    redis.hdel("redbeat:gone", "policy")

    cli("edit", "gone", "--enable")
    assert "no place" not in cli("list").output + cli("explain", "gone").output
    redis.zrem("redbeat::schedule", "redbeat:gone")
    redis.execute_command(*why.rpartition(": ")[2].split())
    assert redis.zscore("redbeat::schedule", "redbeat:gone") == 0


def test_doctor_names_ten_entries_without_a_place(cli, put, redis):
    for number in range(12):
        put(f"e{number}")
    redis.delete("redbeat::schedule")

    text = cli("doctor", code=1).output

    assert text.count("it has no place in") == 10
    assert "problem  entries: more than these 10 have no place in redbeat::schedule" in text


def test_an_unknown_field_of_a_definition_is_reported_everywhere(bench, cli, redis, caplog):
    definition = {"task": TASK, "schedule": 60, "arg": ["you"]}
    redis.hset("redbeat:e", "definition", json.dumps(definition))
    redis.zadd("redbeat::schedule", {"redbeat:e": 0})
    told = "the definition's field 'arg' is unknown and ignored: did you mean 'args'?"
    bench.tick(3)
    bench.close()

    assert [r.singlebeat["reason"] for r in caplog.records if "field_ignored" in r.getMessage()] == [told]
    assert f"warning             {told}" in cli("show", "e").output
    assert answer(cli("show", "e", "--json"))["warning"] == told
    assert f"e: {told}" in cli("list").output
    assert f"A warning: {told}" in cli("explain", "e").output
    assert f"warning  entry e: {told}" in cli("doctor", code=None).output


def test_where_redbeat_leads_a_disabled_entry_is_not_overdue(app, cli, redis):
    for name, enabled in (("off", False), ("on", True), ("odd", "?")):
        definition = {"name": name, "task": TASK, "schedule": {"__type__": "interval", "every": 60}, "enabled": enabled}
        redis.hset(f"redbeat:{name}", "definition", json.dumps(definition))
    now = datetime.now(UTC).timestamp()
    redis.zadd("redbeat::schedule", {"redbeat:off": now - 1000, "redbeat:gone": now - 600, "redbeat:on": now + 60})
    redis.set("redbeat::lock", "of RedBeat", ex=60)

    assert "1 entry is overdue, the first by 600 s" in cli("health", "--max-lag", "60", code=1).output

    redis.zrem("redbeat::schedule", "redbeat:gone")
    assert "healthy" in cli("health", "--max-lag", "60").output
    assert "overdue     0\n" in cli("status").output

    redis.hset("redbeat::leader", mapping={"host": "h", "pid": "1", "token": "of RedBeat"})
    assert "1 entry is overdue" in cli("health", "--max-lag", "60", code=1).output, "ours let their times go on"


def test_an_entry_that_was_edited_before_it_ever_ran_has_no_last_run(app, cli):
    Entry("e", TASK, schedule(3600), app=app).save()
    cli("edit", "e", "--every", "60")

    assert "last                never" in cli("show", "e").output
    assert "runs                0" in cli("show", "e").output


def test_a_cron_with_another_sunday_is_refused_with_ours(app, cli):
    assert "Sunday is 0, not 7." in cli("add", "e", TASK, "--cron", "0 9 * * 7", code=2).output


@pytest.mark.parametrize(("locks", "entries"), [("shop:", "shop:beat:"), ("shop:beat:", "shop:"), ("shop:", "shop:")])
def test_doctor_names_prefixes_of_locks_and_entries_that_overlap(cli, server, locks, entries):
    conf = {"redbeat_key_prefix": entries, "singleton_key_prefix": locks}
    with make_app(server.celery_url, conf) as app, make_app(server.celery_url) as usual:
        for each in (app, usual):
            Schedule(each).upsert("nightly", "t", schedule(60))

        found = {row["about"]: row for row in answer(cli("doctor", "--json", app=app, code=1))}
        fine = {row["about"] for row in answer(cli("doctor", "--json", app=usual, code=1))}

    assert found["singleton_key_prefix"]["level"] == "problem"
    assert "overlap" in found["singleton_key_prefix"]["text"]
    assert "singleton_key_prefix" not in fine


def test_doctor_lets_prefixes_overlap_on_different_servers(cli, server, own_server):
    conf = {"redbeat_key_prefix": "shop:", "singleton_key_prefix": "shop:", "singleton_backend_url": own_server.url}
    with make_app(server.celery_url, conf) as app:
        Schedule(app).upsert("nightly", "t", schedule(60))

        found = {row["about"] for row in answer(cli("doctor", "--json", app=app, code=1))}

    assert "singleton_key_prefix" not in found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--save", "3600 1"), "it keeps snapshots only (appendonly no): a restart loses the writes since"),
        (("--save", "3600 1", "--appendonly", "yes"), ""),
    ],
)
def test_a_server_that_keeps_snapshots_only_is_named(cli, options, said):
    with RedisServer(*options) as server, make_app(server.celery_url) as app:
        text = cli("doctor", app=app, code=1).output

    assert said in text
    assert ("keeps" in text) is bool(said)


def apart(server: RedisServer, results: str | None) -> Celery:
    """Return an app whose result backend is another server than all else."""
    conf = {"singlebeat_socket_timeout": 1, "redbeat_redis_url": server.url, "singleton_backend_url": server.url}
    return make_app(server.celery_url, {**conf, "result_backend": results})


def about_results(cli, app: Celery) -> tuple[list[str], str]:
    """Return what the doctor says about the result backend, and all that it says."""
    printed = cli("doctor", app=app, code=1).output
    return [line for line in printed.splitlines() if " result backend" in line.partition(":")[0]], printed


@pytest.mark.parametrize("how", ["is gone", "hangs"])
def test_doctor_says_that_the_result_backend_does_not_answer(cli, server, redis, own_server, how):
    with apart(server, own_server.celery_url.replace("://", "://:hunter2@")) as app:
        own_server.kill() if how == "is gone" else own_server.pause()
        (said,), printed = about_results(cli, app)

    where = own_server.celery_url.replace("://", "://:**@")
    does = "does not answer: " if how == "is gone" else "does not answer within 1 s. "
    assert said.startswith(f"problem  result backend {where}: it {does}")
    assert "Beat still sends" in said
    assert "hunter2" not in printed
    assert "broker or the locks' server" not in printed


def test_doctor_names_a_result_backend_without_its_driver(cli, server, redis):
    with apart(server, "db+postgresql://u:hunter2@h/db") as app:
        (said,), printed = about_results(cli, app)

    assert said.startswith("problem  result backend db+postgresql://u:**@h/db: it cannot be used: ")
    assert "hunter2" not in printed


@pytest.mark.parametrize("backend", [None, "rpc://"])
def test_doctor_finds_nothing_wrong_with_results(cli, server, redis, backend):
    with apart(server, backend) as app:
        assert about_results(cli, app)[0] == []


def test_doctor_takes_a_result_backend_that_hangs_for_why_slots_are_full(server, redis, own_server):

    busy = [Busy("app.task", "id", datetime.now(UTC) - timedelta(minutes=1))]
    workers = Workers({}, {}, {}, {"w": Reader(frozenset({"celery"}), frozenset({"app.task"}), 1, busy)}, {}, (0, 0))
    with apart(server, own_server.celery_url) as app:
        Entry("e", "app.task", schedule(60), app=app).save()
        (before,) = _queues(app, Read(app), workers, ())
        own_server.pause()
        (after,) = _queues(app, Read(app), workers, ())

    assert "Start more workers" in before.text
    assert (
        "Messages that a busy worker has already received stay with it. With worker_prefetch_multiplier" in before.text
    )
    assert "Start more workers" not in after.text
    assert after.text.endswith(
        "The result backend may be the cause, because it does not answer within 1 s: fix that first"
    )


def test_a_server_that_evicts_or_forgets_is_named(cli):
    with RedisServer("--maxmemory-policy", "allkeys-lru") as server, make_app(server.celery_url) as app:
        text = cli("doctor", app=app, code=1).output

    assert "maxmemory-policy is allkeys-lru" in text
    assert "a restart loses the schedule" in text


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    args=st.lists(st.text(max_size=20) | st.sampled_from(["e", "--json", "--every", "5", "--at"]), max_size=4),
    name=st.sampled_from([name for name in COMMANDS if name not in {"import", "doctor", "unlock", "resign", "web"}]),
)
def test_no_command_line_ends_a_command_with_a_traceback(cli, args, name):
    """300 command lines; SystemExit is all that may come out."""
    cli(name, *args, *(["--timeout", "0"] if name == "trigger" else []), code=None)


def test_the_celery_command_shows_it_without_colour_or_traceback(server, redis):
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "celery", "-A", "tests.system.apps", "singlebeat", *args]
        env = {**os.environ, "SB_TEST_URL": server.celery_url}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)

    listed, missing = run("list"), run("show", "none")

    assert (listed.returncode, missing.returncode) == (0, 1), listed.stderr
    assert "\x1b" not in listed.stdout
    assert missing.stderr.strip() == "Error: there is no entry 'none' under redbeat:"


def test_the_history_of_an_entry_that_never_was_is_an_error(cli, put, redis):
    put()
    redis.hset("redbeat:broken", "definition", "{")
    redis.zadd("redbeat::schedule", {"redbeat:broken": 0})

    assert "there is no entry 'nosuch'" in cli("history", "nosuch", code=1).output
    assert "there is no entry 'nosuch'" in cli("history", "nosuch", "--json", code=1).output
    assert answer(cli("history", "e", "--json")) == answer(cli("history", "broken", "--json")) == []


def test_times_of_history_are_those_of_the_records(cli, put, app, redis):
    put()
    began = datetime.now(UTC) - timedelta(seconds=1)
    Store(app, redis).record(
        [Decision("e", TASK, Occurrence.of("redbeat:", "e", NOON), DecisionType.PAUSED)], Term(1, "")
    )

    (record,) = Schedule(app).history("e")

    assert began <= record.at <= datetime.now(UTC) + timedelta(seconds=1)


def test_an_answer_that_cannot_be_written_is_one_line(server, redis):
    command = [sys.executable, "-m", "celery", "-A", "tests.system.apps", "singlebeat", "list"]
    env = {**os.environ, "SB_TEST_URL": server.celery_url}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False, timeout=60)

    assert (done.returncode, done.stderr.splitlines()) == (2, ["Error: [Errno 28] No space left on device"])


@pytest.mark.parametrize(
    ("args", "shown_by"),
    [
        (("trigger", "e"), "history"),
        (("delete", "e"), "changes"),
        (("edit", "e", "--set", "jitter=3", "--json"), "changes"),
        (("pause", "--all"), "changes"),
    ],
)
@pytest.mark.parametrize("errno", [ENOSPC, EPIPE])
def test_a_change_whose_answer_cannot_be_written_may_be_done(cli, put, monkeypatch, args, shown_by, errno):
    put()
    echo = click.echo

    def fail(message=None, *, err=False, **options):
        if not err:
            raise OSError(errno, os.strerror(errno))
        echo(message, err=err, **options)

    monkeypatch.setattr("click.echo", fail)

    said = cli(*args, code=2).stderr

    hint = f". It may have been done all the same: before you repeat it, see celery singlebeat {shown_by}\n"
    assert said == f"Error: [Errno {errno}] {os.strerror(errno)}{hint}"


def test_a_list_says_of_a_disabled_entry_that_it_is_paused_too(cli, put):
    put("both", enabled=False, paused=True)
    put("off", enabled=False)

    _, row, *_ = cli("list", "--state", "paused").output.splitlines()

    assert row.startswith("both ")
    assert row.endswith("  disabled, paused")
    assert [entry["state"] for entry in answer(cli("list", "--json"))["entries"]] == ["disabled", "disabled"]
    assert "off" not in cli("list", "--state", "paused").output


def test_the_last_run_is_listed_by_its_age(cli, put):
    now = datetime.now(UTC)
    for name, ago in {"s": 5, "min": 120, "h": 7200, "d": 86_400 * 400}.items():
        put(name, last_run_at=now - timedelta(seconds=ago), total_run_count=1, every=10**9)
    put("new", every=10**9)

    rows = {line.split()[0]: line for line in cli("list").output.splitlines()}

    ages = {"min": "2 min ago", "h": "2 h ago", "d": "400 d ago"}
    assert all(f"  {age} " in rows[name] for name, age in ages.items())
    assert " never " in rows["new"]
    assert all(" 20" in rows[name] for name in ("s", "min", "h", "d", "new"))
    assert "no beat leads" in cli("list").output
    assert json.loads(cli("list", "--json").stdout)["warning"] == "no beat leads"


# ---------------------------------------------------------------- what beat could not use


UNUSABLE = [
    (["--options", '{"countdown": "x"}'], "the option countdown is 'x': use a number of seconds"),
    (["--options", '{"time_limit": "300 s"}'], "the option time_limit is '300 s': use a number of seconds, 0 or more"),
    (
        ["--options", '{"link": {"task": "t", "args": [], "options": {"eta": 0}}}'],
        "the option eta is 0: use an ISO 8601 date",
    ),
    (
        ["--options", '{"delivery_mode": "x"}'],
        "the option delivery_mode is 'x': use one of 1, 2, transient, persistent",
    ),
    (["--options", '{"compression": "nosuch"}'], "the option compression is 'nosuch', which kombu does not know here"),
    (["--options", '{"serializer": "nosuch"}'], "the option serializer is 'nosuch', which kombu does not know here"),
    (["--options", '{"headers": []}'], "headers is not a JSON object"),
    (["--args", "[1e400]"], "JSON has no Infinity"),
    (["--kwargs", '{"x": NaN}'], "JSON has no NaN"),
    (["--options", '{"priority": -Infinity}'], "JSON has no -Infinity"),
    (["--options", '{"expires": 5}', "--set", "expires=5"], "expires is in its options as well as in its policy"),
    (["--set", "start_time=2030-01-02T00:00Z", "--set", "end_time=2030-01-01T00:00Z"], "is before start_time"),
]


@pytest.mark.parametrize(
    ("given", "why"), UNUSABLE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_an_entry_that_beat_cannot_use_is_not_stored(cli, put, redis, given, why):
    put()
    before = redis.hgetall("redbeat:e")

    assert why in cli("add", "new", TASK, "--every", "60", *given, code=2).output
    assert why in cli("edit", "e", *given, code=2).output

    assert not redis.exists("redbeat:new")
    assert redis.hgetall("redbeat:e") == before


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (["--set", "start_time=2030-01-02T00:00Z"], ["--set", "end_time=2030-01-01T00:00Z"], "is before start_time"),
        (["--options", '{"expires": 5}'], ["--set", "expires=5"], "as well as in its policy"),
        (["--set", "expires=5"], ["--options", '{"expires": 5}'], "as well as in its policy"),
    ],
    ids=["start and end", "expires in the policy", "expires in the options"],
)
def test_an_edit_that_contradicts_the_stored_entry_is_not_stored(cli, put, redis, first, then, why):
    put()
    cli("edit", "e", *first)
    before = redis.hgetall("redbeat:e")

    assert why in cli("edit", "e", *then, code=2).output
    assert redis.hgetall("redbeat:e") == before


#: A broken part of an entry, its fix, and the part that is shown unchanged.
BROKEN = {
    "a schedule": ({"schedule": {"__type__": "crontab", "minute": "99"}}, None, ["--every", "60"], "99"),
    "options": ({"options": {"countdown": "x"}}, None, ["--options", "{}"], "countdown"),
    "arguments": ({"args": {}}, None, ["--args", '["x"]'], "args"),
    "no task": ({"task": None}, None, ["--task", TASK], "no task"),
    "a wish": ({}, '{"jitter": "much", "note": "n"}', ["--set", "jitter="], "much"),
    "an unknown wish": ({}, '{"jiter": 5, "note": "n"}', ["--set", "jiter="], "jiter"),
    "start and end": (
        {},
        '{"start_time": "2030-01-02T00:00Z", "end_time": "2030-01-01T00:00Z", "note": "n"}',
        ["--set", "end_time="],
        "2030-01-01",
    ),
    "expires twice": ({"options": {"expires": 5}}, '{"expires": 5, "note": "n"}', ["--set", "expires="], "as well as"),
    "a policy that is none": ({}, "[", ["--set", "note=n"], "policy cannot be read"),
}


@pytest.mark.parametrize(("definition", "policy", "mending", "shown"), BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_is_shown_and_fixed(cli, put, app, redis, definition, policy, mending, shown):
    put(options={"queue": "q"}, policy=None, note="n", total_run_count=7)
    whole = json.loads(redis.hget("redbeat:e", "definition"))
    redis.hset("redbeat:e", "definition", json.dumps({**whole, **definition}))
    redis.hset("redbeat:e", mapping={"policy": policy} if policy else {"policy": '{"note": "n"}'})
    far = datetime(2200, 1, 1, tzinfo=UTC)
    Store(app, redis).due(far, all_pending=False)  # as a beat sees it

    text = cli("show", "e").output
    assert shown in text
    assert "quarantined" in text
    assert answer(cli("show", "e", "--json"))["state"] == "quarantined"
    assert mending[0] in cli("edit", "e", "--disable", code=None).output or policy
    cli("edit", "e", *mending)

    entry = Schedule(app).get("e")
    assert (entry.task, entry.args, entry.policy.note, entry.total_run_count) == (TASK, ["x"], "n", 7)
    assert (entry.options.get("queue") == "q") == ("options" not in definition)
    Store(app, redis).due(far, all_pending=False)
    assert Store(app, redis).due(far, all_pending=False).entries


def test_a_definition_that_is_no_json_is_shown_and_replaced(cli, put, app, redis):
    put(paused=True, note="until Monday", total_run_count=7)
    redis.hset("redbeat:e", "definition", "{")

    assert "definition          {" in cli("show", "e").output
    assert "in one command, with --task" in cli("edit", "e", "--every", "5", code=1).output
    assert "--replace" in cli("add", "e", TASK, "--every", "60", code=1).output
    cli("add", "e", TASK, "--every", "60", "--replace")

    entry = Schedule(app).get("e")
    assert (entry.schedule, entry.total_run_count, entry.policy.note) == (schedule(60), 7, "until Monday")
    assert entry.policy.paused
    redis.hset("redbeat:e", "definition", "{")
    cli("delete", "e")
    assert not redis.exists("redbeat:e")


@pytest.mark.parametrize("broken", ['"paused": true, "jitter": "much"', '"paused": 1'], ids=["else", "no boolean"])
def test_a_replaced_entry_whose_policy_is_broken_stays_paused(cli, put, app, redis, broken):
    put()
    redis.hset("redbeat:e", "policy", f'{{"note": "until Monday", {broken}}}')

    cli("add", "e", TASK, "--every", "60", "--replace")

    policy = Schedule(app).get("e").policy
    assert (policy.paused, policy.note) == (True, "until Monday")


def test_a_change_that_beat_schedule_undoes_is_answered_with_that(cli, app, put):
    put("mine")
    put("other")
    app.conf.beat_schedule = {"mine": {"task": TASK, "schedule": 60}}
    back = "beat_schedule has it, and"

    assert back not in cli("edit", "mine", "--disable").output  # which lasts
    assert (
        f"{back} replaces these values at the latest when the next term" in cli("edit", "mine", "--every", "5").output
    )
    assert f"{back} brings it back at the latest when the next term" in cli("delete", "mine").output
    assert back not in cli("edit", "other", "--every", "5").output
    assert back not in cli("delete", "other").output


def test_a_disabled_entry_is_answered_without_a_next_time(cli, put):
    put()

    assert cli("edit", "e", "--disable").output == "e: disabled\n"
    assert "To go on: celery singlebeat edit e --enable" in cli("explain", "e").output
    assert cli("edit", "e", "--enable").output.startswith("e: next 20")
    cli("pause", "e")
    assert cli("edit", "e", "--every", "60").output == "e: paused\n"


def test_a_part_of_an_entry_that_is_no_policy_names_its_option(cli):
    told = cli("add", "e", TASK, "--every", "5", "--set", "options={}", code=2).output

    assert "'options' is no policy option: use --options" in told


def test_an_error_of_settings_says_that_no_app_was_named(server, redis, monkeypatch):
    monkeypatch.setattr(_state, "default_app", None)  # another test may have made an app the current one
    monkeypatch.setattr(_state._tls, "current_app", None)
    told = CliRunner().invoke(celery, ["singlebeat", "status"], env={"APP": None, "CELERY_APP": None})

    assert told.exit_code == 2
    assert "set redbeat_redis_url to a Redis server" in told.output
    assert "celery -A APP singlebeat" in told.output


def test_status_says_when_the_lease_was_renewed_and_names_other_apps(bench, cli):
    bench.tick()
    bench.scheduler(app=Celery("other", set_as_current=False, broker=bench.server.celery_url)).tick()
    bench.redis.pexpire("redbeat::lock", 3_900)

    shown = cli("status", app=bench.app).output

    assert re.search(r"^leader .*, renewed [6-9] s ago$", shown, re.MULTILINE)
    assert re.search(r"^standbys    1\n  .*, of app other$", shown, re.MULTILINE)


@pytest.mark.parametrize("ended", [False, True])
def test_doctor_names_an_entry_whose_runs_pile_up(bench, findings, no_worker_is_awaited, ended):
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put(task="tests.system.apps.single", args=["x"], overlap="buffer_all", ago=None)
    scheduler = bench.scheduler()
    for _ in range(13):
        bench.make_due()
        scheduler.tick()
    assert bench.decisions.count("buffered") == 12
    if ended:
        record_end_of_message(bench.app, {"id": bench.ids[-2], RUN_HEADER: {"entry": "e"}}, "success", worker="w")
        flush_ends(bench.app)

    text = "its last 12 runs wait for their turn, and none of them has ended"
    found = [level for level, each in findings("entry e", app=bench.app) if each.startswith(text)]
    assert found == ([] if ended else ["warning"])


def test_a_triggered_run_of_a_quarantined_entry_is_said_to_wait(cli, put, lead, redis, no_worker_is_awaited):
    """It can be read here, and the leader refuses it, as by its allow-list."""
    put("e")
    redis.hset("redbeat::quarantine", "redbeat:e", json.dumps({"reason": "forbidden", "since": "today"}))

    told = cli("trigger", "e").output

    assert "; it is quarantined, and the run is sent once that is over (celery singlebeat explain e)" in told
    assert "claimed and not confirmed, as task " in (explained := cli("explain", "e").output)
    assert ": beat sends it once the entry is usable." in explained


@pytest.mark.parametrize("given", [{"paused": True}, {"enabled": False}, {}], ids=str)
def test_resuming_what_the_code_pauses_says_that_it_comes_again(bench, cli, given):
    bench.conf["beat_schedule"] = {"mine": {"task": f"{APP}.plain", "schedule": 60.0, **given}}
    beat = bench.scheduler()
    beat.tick()

    told = cli("resume", "mine", app=beat.app).output

    assert ("beat_schedule pauses it again when the next term of leadership begins" in told) == bool(given)


def test_doctor_names_a_receiver_that_fails_while_the_app_is_configured(server, redis, tmp_path):
    """That is before any part of this package is asked for: the celery command itself configures the app."""
    code = f"""
        import logging.config
        from celery import Celery
        logging.config.dictConfig({{"version": 1}})  # disables the loggers of Celery
        app = Celery("failing", broker="{server.celery_url}")
        app.conf.beat_scheduler = "singlebeat.Scheduler"

        @app.on_after_configure.connect
        def add(sender, **_):
            raise KeyError("tenants")
    """
    (tmp_path / "failing.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "celery", "-A", "failing", "singlebeat", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    assert "and is not checked: a receiver of on_after_configure has failed: KeyError('tenants')" in done.stdout
