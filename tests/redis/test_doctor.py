"""Findings of ``doctor`` about the schedule and its leader; those about workers: ``tests/incidents/test_doctor.py``."""

from __future__ import annotations

import json
import re
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import crontab, schedule
from click import unstyle
from kombu import Producer

from singlebeat import Schedule, Singleton, clocked
from singlebeat.beat.delivery import Busy, Reader
from singlebeat.beat.keys import LEASE_KEYS, OWN_KEYS, Keys
from singlebeat.beat.leadership.lease import Lease
from singlebeat.beat.lost_messages import living_workers
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.beat.status import ScheduleStatus
from singlebeat.connections import ResponseError
from singlebeat.diagnosis.workers import Workers
from singlebeat.locks import backend_of, worker_name
from singlebeat.locks.base import RUN_HEADER, Ref, unusable
from singlebeat.log import LONGEST_REASON
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.support import APP, RedisServer, SlowProxy, free_port, measured, without
from tests.system.apps import make_app

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")

HOUR = timedelta(hours=1)
SINGLE = "tests.system.apps.single"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, "sorted set" if kind == "zset" else kind)
        for name, (kind, _) in {**OWN_KEYS, **LEASE_KEYS}.items()
        if kind != "any" and name != "lock"
    ],
)
def test_a_key_of_the_schedule_of_another_type_is_named(findings, cli, bench, name, kind):
    bench.put(ago=timedelta())
    bench.tick()
    assert findings("key") == []
    bench.redis.delete(f"redbeat::{name}")
    bench.redis.rpush(f"redbeat::{name}", "mine")
    health = cli("health", code=None)
    assert health.exit_code > 0
    assert f"redbeat::{name}" in health.output

    ((level, text),) = findings(f"key redbeat::{name}")

    measured(text)
    assert level == "problem"
    assert text.startswith(f"it is no {kind}, and beat cannot use it: another program has written there")
    bench.redis.execute_command(*re.search("DEL [^ ]+", text)[0].split())
    assert findings("key") == []


@pytest.mark.parametrize("name", [name for name, (kind, _) in OWN_KEYS.items() if kind == "stream"])
def test_a_stream_that_takes_no_more_records_is_named(findings, cli, bench, name):
    """An id is a time and a number: XADD by another program may set them so high that no id is higher."""
    bench.put(ago=timedelta())
    bench.tick()
    bench.redis.xadd(f"redbeat::{name}", {"a": "b"}, "18446744073709551615-18446744073709551614")
    assert findings("key") == []  # one more is possible
    bench.redis.xadd(f"redbeat::{name}", {"a": "b"}, "18446744073709551615-18446744073709551615")
    assert f"redbeat::{name}" in cli("health", code=1).output

    ((level, text),) = findings(f"key redbeat::{name}")

    measured(text)
    assert level == "problem"
    assert text.startswith("it takes no more records, because it has the last possible id, and beat cannot use it: ")
    bench.redis.execute_command(*re.search("DEL [^ ]+", text)[0].split())
    assert findings("key") == []
    cli("health")


def test_a_change_that_cannot_be_recorded_fails_with_what_to_do(cli, bench, caplog):
    bench.put()
    bench.redis.xadd("redbeat::changes", {"a": "b"}, "18446744073709551615-18446744073709551615")
    bench.redis.hset("redbeat:new", "definition", json.dumps({"task": f"{APP}.plain", "schedule": 60}))
    bench.redis.zadd("redbeat::schedule", {"redbeat:new": 0})
    bench.tick()

    said = cli("pause", "e", code=2).output

    why = "the key redbeat::changes takes no more records, because it has the last possible id: another program"
    assert why in said
    assert "DEL redbeat::changes" in said
    assert why in caplog.text
    bench.redis.delete("redbeat::changes")
    cli("pause", "e")


@pytest.mark.parametrize("spoil", [("SET", "x"), ("SET", "-99999999999999999999999"), ("RPUSH", "mine")])
def test_a_spoilt_number_of_terms_is_named_wherever_no_beat_leads(findings, cli, bench, probe, spoil, caplog):
    bench.put()
    bench.redis.execute_command(spoil[0], "redbeat::term", spoil[1])
    bench.tick()
    ((level, text),) = [found for found in findings("beat") if "no beat" in found[1]]

    measured(text)
    assert (level, bench.names) == ("problem", [])
    assert text.startswith("no beat can lead because of the key redbeat::term: it ")
    for shown in (cli("status").output, cli("health", code=1).output, probe()[1]):
        assert "DEL redbeat::term" in " ".join(shown.split())
    assert "DEL redbeat::term" in caplog.text

    bench.redis.execute_command(*re.search("DEL [^ ]+", text)[0].split())
    bench.tick(2)
    assert bench.names == ["e"]
    assert "schedule_vanished" not in caplog.text
    cli("health")


def test_explain_and_trigger_name_a_spoilt_number_of_terms(cli, bench, no_worker_is_awaited):
    bench.put()
    bench.redis.set("redbeat::term", "abc")
    said = ScheduleStatus.of(bench.app).problem()

    explained, triggered = cli("explain", "e").output, cli("trigger", "e").output

    assert "DEL redbeat::term" in said
    assert f"{said[0].upper()}{said[1:]}." in explained
    assert triggered.rstrip().endswith(f"; {said}. The run is sent once a beat leads")
    assert "is started" not in explained + triggered


def test_a_lock_without_an_end_is_named_wherever_no_beat_leads(findings, cli, bench):
    bench.put()
    bench.redis.set("redbeat::lock", "x")
    bench.tick()
    ((_, text),) = [found for found in findings("beat") if "no beat" in found[1]]

    assert text.startswith("no beat can lead because of the key redbeat::lock: it has no end")
    for shown in (cli("status").output, cli("health", code=1).output, cli("explain", "e").output):
        assert "celery singlebeat resign removes it" in " ".join(shown.split())

    cli("resign")
    bench.tick()
    assert bench.names == ["e"]


def test_entries_that_never_run_again_are_named_with_the_reason(findings, cli, bench):
    day = timedelta(days=1)
    past, now = {"ago": timedelta(days=2), "every": schedule(60)}, datetime.now(UTC)
    bench.put("counted", max_runs=8)
    bench.put("ended", **past, end_time=now - day)
    bench.put("once", every=clocked(now - HOUR), ago=None, run_on_start=True)
    bench.put("too late", every=clocked(now - HOUR), ago=None)
    bench.put("goes on")
    bench.redis.zadd("redbeat::schedule", {"redbeat:ended": 0})
    bench.tick(2)

    ((level, text),) = [found for found in findings("entries") if "never run again" in found[1]]
    measured(text)
    explained = {name: cli("explain", name).output for name in ("counted", "ended", "once", "goes on")}

    assert level == "fine"
    assert text.startswith("3 entries are finished and never run again: ")
    for name, why in (
        ("counted", "it has run 8 times, and max_runs is 8"),
        ("ended", f"its end_time, {now - day:%Y-%m-%d %H:%M:%SZ}, comes before its next time"),
        ("once", f"its only time, {now - HOUR:%Y-%m-%d %H:%M:%SZ}, has passed"),
    ):
        assert f"{name} ({why})" in text
        assert f"It is finished: it never runs again, because {why}." in explained[name]
    assert "never runs again" not in explained["goes on"]
    ((level, text),) = findings("entry too late")
    assert level == "warning"
    assert text.startswith(
        f"no run of it is recorded, and none will be: its only time, {now - HOUR:%Y-%m-%d %H:%M:%SZ}, has passed. "
    )
    (run,) = re.findall(r"If it has not run: celery singlebeat (.*?)\. Or ", text)
    assert "edit" not in text, "no option of that command sets such a time"
    cli(*shlex.split(run))
    bench.tick()
    assert findings("entry too late") == [], "a run by request is a run, too"
    ((_, text),) = [found for found in findings("entries") if "never run again" in found[1]]
    assert text.startswith("4 entries are finished and never run again: ")


def test_an_entry_whose_last_run_is_still_to_be_sent_is_not_finished(findings, bench, monkeypatch):
    now = datetime.now(UTC)
    bench.put("once", every=clocked(now - HOUR), ago=None, run_on_start=True)
    bench.put("done", every=clocked(now - HOUR), ago=None, run_on_start=True)
    bench.tick(2)
    bench.redis.hset("redbeat:once", "pending", json.dumps({"id": "x", "nominal": now.timestamp() - 3600}))
    bench.redis.zadd("redbeat::pending", {"redbeat:once": 0})

    ((_, text),) = [found for found in findings("entries") if "never run again" in found[1]]

    assert "done" in text
    assert "once" not in text.split("never run again")[1].replace("its only time", "")


def test_the_share_of_the_lease_that_a_renewal_takes_is_told(findings, cli, bench, server):
    near = bench.scheduler()
    near.lease.acquire()
    assert "renewal" not in str(findings("beat"))
    for _ in range(2):  # the second one notes what the first one took
        near.lease.renew()
    ((level, text),) = [found for found in findings("beat") if "renewal" in found[1]]
    measured(text)
    assert level == "fine"
    assert re.fullmatch(r"the leader's last renewal of its term took [0-9.]+ ms, [0-9.]+% of the lease of 10 s", text)
    near.lease.release()

    with SlowProxy(server.path, delay=0.5) as proxy:
        far = bench.scheduler(redbeat_redis_url=proxy.url, redbeat_lock_timeout=4)
        far.lease.acquire()
        for _ in range(3):  # the first one opens a connection
            far.lease.renew()
        ((level, text),) = [found for found in findings("beat") if "renewal" in found[1]]
        served = BeatMetrics(bench.app, far.lease).answer("/metrics").body.decode()
        far.lease.release()

    measured(text)
    assert level == "warning"
    took, share = map(float, re.search(r"took ([0-9.]+) ms, ([0-9.]+)% of the lease of 4 s: the", text).groups())
    assert took >= 500
    assert share == pytest.approx(took / 40, rel=0.01)
    assert float(re.search("^singlebeat_renewal_seconds (.*)$", served, re.MULTILINE)[1]) >= 0.5
    assert "renewal" not in str(findings("beat"))


def test_no_standby_is_missed_where_none_can_note_itself(findings, bench, server, bench_on):
    bench.tick()
    missing = "no standby is noted: when the leader is lost without one"
    assert missing in str(findings("beat"))
    with without(server, "zremrangebyscore") as url:
        mute = bench_on(server, redbeat_redis_url=url.replace("redis+socket", "unix"))
        mute.tick()  # logs that it could not
        told = str(findings("beat", app=mute.app))

    assert missing not in told
    assert "no standby is noted, but there may be one: the schedule's server refuses a command that a standby" in told
    assert "lacks ZREMRANGEBYSCORE" in told


def test_explain_says_until_when_jitter_delays_a_run_whose_time_has_passed(cli, bench, no_worker_is_awaited):
    for name in "abcdefgh":  # of which the name decides
        bench.put(name, ago=HOUR + timedelta(seconds=1), jitter=3000)
    name = max("abcdefgh", key=bench.score)
    due = datetime.fromtimestamp(bench.score(name), UTC)

    explained = cli("explain", name).output

    assert f"at {due:%Y-%m-%d %H:%M:%SZ} because of its jitter" in explained
    assert "It is due now" not in explained


def test_explain_says_once_that_one_server_refuses_to_write(cli, own_server, bench_on):
    with RedisServer() as broker:
        bench = bench_on(own_server, broker_url=broker.celery_url)
        bench.put()
        bench.tick()
        bench.redis.zadd("redbeat::schedule", {"redbeat:e": 1})
        bench.redis.config_set("maxmemory", "1")
        explained = cli("explain", "e", app=bench.app).output
        bench.redis.config_set("maxmemory", "0")

    assert "Nothing is sent because of the schedule's server: it refuses to write" in explained
    assert explained.count("refuses to write") == 1


def test_tools_name_a_lock_that_is_unusable_and_free_it(findings, cli, bench):
    task = bench.app.tasks[SINGLE]
    key = task.generate_lock(SINGLE, ["e"], {})
    for spoil, cause in (
        (
            lambda: bench.redis.hset(key, mapping={"id": "z", "until": "x"}),
            'its field until must be a number, and is "x"',
        ),
        (
            lambda: bench.redis.set(key, "x"),
            "it must be a hash, and its :done a zset (WRONGTYPE): delete the wrong one",
        ),
    ):
        bench.put(task=SINGLE)
        bench.make_due()
        spoil()
        bench.tick()

        ((level, text),) = findings("entry e")
        assert level == "problem"
        assert f"the last one was sent without its lock: the lock {key} is unusable: {cause}" in text
        assert "probably killed" not in cli("explain", "e").output
        assert f"without its lock: the lock {key} is unusable: {cause}" in cli("explain", "e").output
        assert f"{key} holds something that is no lock: --force deletes the key" in cli("unlock", key, code=1).output
        cli("unlock", key, "--force")
        assert not bench.redis.exists(key)
    bench.redis.set("other", "x")
    assert "no lock is held by other" in cli("unlock", "other", "--force", code=1).output


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ('its field until must be a number, and is "x"',) * 2,
        ("WRONGTYPE wrong kind of value", "it must be a hash, and its :done a zset (WRONGTYPE)"),
    ],
)
def test_no_key_is_so_long_that_the_cause_is_cut(reason, cause):
    key = f"{'shop:production:' * 20}SINGLETONLOCK_{{{'0' * 64}}}"
    told = f"without its lock: {unusable(key, reason)}"

    assert cause in told[:LONGEST_REASON]
    assert re.search("the lock shop:production:.+….*0{16}} is unusable", told), told


def test_tools_say_who_has_paused_or_deleted_an_entry(findings, cli, bench):
    bench.put("away")
    bench.put("stays")
    ann = Schedule(bench.app, actor="ann")
    ann.pause("stays", note="INC-7")
    ann.delete("away")

    assert ("fine", "1 entry is paused by name: stays (celery singlebeat list --state paused)") in findings("entries")
    assert re.search(r"It is paused since \S+ \S+Z by ann \(INC-7\): its times pass", cli("explain", "stays").output)
    for command in ("explain", "show"):
        told = cli(command, "away", code=1).output
        measured(told)
        (undo,) = re.findall(r"ann has deleted it at \S+ \S+Z; to undo that: celery singlebeat (revert .*)", told)
    cli(*undo.split())
    assert ann.get("away").name == "away"


def test_entries_that_are_off_by_name_are_counted_and_have_an_author(findings, cli, bench, monkeypatch):
    now = datetime.now(UTC)
    for name in ("on", "held", "noted", "off"):
        bench.put(name, tags=["t"])
    assert "off  " not in cli("status").output
    ann = Schedule(bench.app, actor="ann")
    ann.pause("held")
    ann.pause("noted", note="INC-7")
    cli("edit", "off", "--disable")
    ann.pause_many(tag="t")

    found, told = findings("entries"), cli("status").output
    listed_, active = cli("list", "--state", "paused").output, cli("list").output

    assert ("fine", "1 entry is disabled: off (celery singlebeat list --state disabled)") in found
    assert (
        "\noff         2 entries are paused by name (celery singlebeat list --state paused), 1 entry is disabled "
        "(celery singlebeat list --state disabled)\n"
    ) in told
    since = f"{now:%Y-%m-%d} ..:..:..Z"
    counts = json.loads(cli("status", "--json").stdout)
    assert (counts["paused_by_name"], counts["disabled"]) == (2, 1)
    assert re.search(f"^held: paused since {since} by ann$", listed_, re.MULTILINE)
    assert re.search(rf"^noted: paused since {since} by ann \(INC-7\)$", listed_, re.MULTILINE)
    assert "by ann (INC-7)" not in active
    ann.resume_many(tag="t")
    bench.tick()
    rows = cli("history").output
    measured(rows)
    assert re.search(f" paused +since {since} by ann$", rows, re.MULTILINE)
    assert re.search(r" paused +INC-7$", rows, re.MULTILINE)
    (record,) = json.loads(cli("history", "held", "--json").stdout)
    assert re.fullmatch(f"since {since} by ann", record["reason"])
    assert re.search(r" paused +disabled$", rows, re.MULTILINE)
    cli("resume", "held")
    assert re.search(f" paused +since {since} by ann$", cli("history", "held").output, re.MULTILINE)
    bench.redis.delete("redbeat::owners")
    bench.redis.rpush("redbeat::owners", "mine")
    assert "\nquarantine  0\n" in cli("status").output, "a key that status does not need"
    monkeypatch.setattr("singlebeat.cli.status.MOST_COUNTED", 3)
    assert "\noff         not counted of more than 3 entries (" in cli("status").output
    counts = json.loads(cli("status", "--json").stdout)
    assert (counts["paused_by_name"], counts["disabled"]) == (None, None)


def test_explain_and_history_say_that_the_schedule_was_lost(cli, bench):
    bench.put()
    bench.tick()
    assert "lost" not in cli("explain", "e").output + cli("history", "e").output
    bench.redis.set("redbeat::lost", f"{datetime.now(UTC) - HOUR:%Y-%m-%dT%H:%M:%S+00:00} it is gone")

    lost = ScheduleStatus.of(bench.app).lost
    explained, history = cli("explain", "e").output, cli("history", "e").output

    measured(explained)
    assert f"{lost[0].upper()}{lost[1:]}" in explained
    assert f"runs may be missing here: {lost}" in history
    assert f"runs may be missing here: {lost}" in cli("history").output
    assert "missing" not in cli("history", "e", "-n", "1").output, "the last record is younger than the loss"


def test_explain_accuses_no_worker_where_none_records_ends(cli, bench):
    """No worker was ever there: the messages wait in their queue."""
    bench.put()
    for _ in range(5):
        bench.make_due()
        bench.tick()

    assert "probably killed" not in cli("explain", "e").output


def answering(**workers: Reader) -> Workers:
    """Return the answers of workers with singlebeat."""
    tasks = {name: reader.tasks for name, reader in workers.items()}
    return Workers({}, tasks, dict.fromkeys(workers, "1"), workers, {}, (0.0, 0.0))


@pytest.mark.parametrize(
    ("queue", "busy", "options", "why"),
    [
        ("celery", 0, {}, "they may still wait in queue celery, which has 5 messages"),
        ("mail", 0, {"queue": "gone"}, "they may still wait in queue gone, which no worker that answers reads"),
        ("gone", 1, {"queue": "gone"}, "they may still wait in queue gone, or at its workers: the only slot of the"),
        ("gone", 0, {"queue": "gone"}, "each has probably killed its worker"),
        ("celery", 0, {"expires": 0}, "each has probably expired in its queue before a worker started it"),
    ],
)
def test_runs_that_wait_or_expire_have_killed_no_worker(findings, cli, bench, monkeypatch, queue, busy, options, why):
    entry = bench.put(options=options)
    for _ in range(5):
        bench.make_due()
        bench.tick()
    bench.redis.delete("gone")  # as if a worker had received the messages
    runs = [Busy("t", "x", datetime.now(UTC))] * busy
    workers = answering(w1=Reader(frozenset({queue}), frozenset({entry.task}), 1, runs))
    monkeypatch.setattr(Workers, "ask", lambda _: workers)
    backend_of(bench.app).announce("w1@vm", ttl=60)

    assert why in cli("explain", "e").output
    assert why in str(findings("entry e"))


@pytest.mark.parametrize("waiting", [0, 3])
def test_workers_without_a_free_slot_are_named_at_once_if_messages_wait(findings, bench, monkeypatch, waiting):
    """Runs may be short and many: no slot is busy for long, and the queue grows all the same."""
    entry = bench.put()
    for _ in range(waiting):
        bench.redis.lpush("celery", "{}")
    runs = [Busy("shop.short", "x", datetime.now(UTC))]
    workers = answering(w1=Reader(frozenset({"celery"}), frozenset({entry.task}), 1, runs))
    monkeypatch.setattr(Workers, "ask", lambda _: workers)

    told = [text for level, text in findings("queue celery") if level == "warning"]
    assert bool(told) == bool(waiting)
    assert all("is busy with shop.short" in text and "other messages wait" in text for text in told)


@pytest.mark.parametrize("is_stored", [True, False])
def test_runs_whose_ends_are_not_recorded_kill_no_worker(findings, cli, bench, monkeypatch, is_stored):
    """The user of the worker lacks a command on the schedule's server."""
    entry = bench.put()
    for _ in range(5):
        bench.make_due()
        bench.tick()
    bench.redis.delete("celery")
    if is_stored:
        bench.app.backend.mark_as_done([each["id"] for each in bench.history][-2], None)
    reader = Reader(frozenset({"celery"}), frozenset({entry.task}), 1, (), None if is_stored else 3600)
    monkeypatch.setattr(
        Workers, "ask", lambda _: replace(answering(w1=reader), asked=(time.monotonic(), time.monotonic()))
    )
    backend_of(bench.app).announce("w1@vm", ttl=60)

    told = [cli("explain", "e").output, str(findings("entry e"))]

    shown = "the result backend has the end of task" if is_stored else "each worker that answers and reads queue celery"
    assert all(shown in text and "ends_not_recorded" in text for text in told), told
    assert "killed" not in "".join(told)


def test_a_lock_whose_message_no_worker_reads_names_its_queue(findings, cli, bench, monkeypatch):
    backend_of(bench.app).announce("w1@vm", ttl=60)
    bench.put(task=SINGLE, options={"queue": "billing"})
    bench.tick()
    entry = bench.put(task=SINGLE)  # its next runs go elsewhere
    bench.make_due()
    (message,) = bench.redis.lrange("billing", 0, -1)
    for _ in range(2):
        bench.redis.rpush("billing", message)
    bench.tick()
    assert bench.decisions == ["dispatched", "skipped_overlap"]
    reader = Reader(frozenset({"celery"}), frozenset({entry.task}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=reader))

    unread, advice = "o worker that answers reads queue billing (they read celery)", "3 messages wait there: start a"
    advice += (
        " worker with -Q billing. Or delete all messages there, those of other entries, calls and apps, too, if none"
    )
    advice += " of them is wanted (celery purge -Q billing)"
    (task_id,) = re.findall("Task (\\S+) was queued", cli("explain", "e").output)
    ((level, text),) = findings("queue billing")

    measured(text)
    assert level == "problem"
    assert text.startswith(f"n{unread}, and 1 lock is held by messages that were sent there, such as task {task_id}")
    freed = "Beat frees a lock then when another run or call meets it, celery singlebeat unlock --stale frees all"
    assert text.endswith(f". {advice}. {freed}")
    assert f"N{unread}. {advice}" in cli("explain", "e").output
    assert f"n{unread}. {advice}" in cli("unlock", task_id, code=1).output
    bench.put(task=SINGLE, options={"queue": "billing"})
    assert "The queue has 3 messages. Start a worker with -Q billing" in str(findings("queue billing"))


def test_doctor_names_all_entries_whose_locks_a_plain_worker_leaves(findings, bench, monkeypatch):
    """A worker without singlebeat frees the lock of no task, whether that is a Singleton elsewhere or not."""
    backend_of(bench.app).announce("w1@vm", ttl=60)
    bench.put("plain")
    bench.put("once", task=SINGLE)
    bench.app.task(answering, base=Singleton, name="alone", lock="while_executing", shared=False)
    bench.put("in its run", task="alone")
    bench.put("beside", task=SINGLE, overlap="allow_all")
    bench.put("mailed", task=SINGLE, options={"queue": "mail"})
    reader = Reader(frozenset({"celery"}), frozenset({SINGLE}), 1, ())
    asked = replace(answering(old=reader, w1=reader), versions={"old": "", "w1": "1"})
    monkeypatch.setattr(Workers, "ask", lambda _: asked)

    ((level, text),) = findings("workers without singlebeat", app=bench.app)

    assert level == "problem"
    assert "When such a worker runs a task whose lock beat has acquired, it leaves that lock as it is" in text
    assert "That concerns the entries whose queues it reads: once, plain." in text


def test_a_reader_that_drops_the_messages_of_an_entry_is_named(findings, cli, bench, monkeypatch):
    """Other workers know the task: the runs that they get end well, and may be the last ones of the entry."""
    bench.put(task=SINGLE)
    bench.put("mailed", task=SINGLE, options={"queue": "mail"})
    bench.tick()
    read = {"w1": "celery", "other@h": "celery", "w2": "mail", "elsewhere": "else"}
    readers = {
        name: Reader(frozenset({queue}), frozenset({SINGLE} if name in {"w1", "w2"} else {"other.job"}), 1, ())
        for name, queue in read.items()
    }
    monkeypatch.setattr(Workers, "ask", lambda _: answering(**readers))

    ((level, text),) = findings("entry e")

    measured(text)
    assert level == "problem"
    says = f"orker other@h reads queue celery and does not know the task {SINGLE}: it drops its share"
    assert text.startswith(f"w{says}")
    assert "give each app queues of its own (task_default_queue). Else deploy the task there, too" in text
    assert f"\nW{says}" in cli("explain", "e").output
    assert findings("entry mailed") == []


def test_a_worker_that_answers_but_renews_nothing_is_named(findings, cli, bench, monkeypatch):
    """Its user lacks a command on the locks' server, or its password is wrong: it lives, and could not free a lock."""
    backend, lease = backend_of(bench.app), {"lease": 30, "remember_for": 60, "task": "t", "arguments": ""}
    for name in ("w1@vm", "w2@vm"):
        backend.announce(worker_name(bench.app, name), ttl=60)
    bench.redis.zincrby("singlebeat:workers", -20, worker_name(bench.app, "w1@vm"))
    for task_id, worker in (("known", "w1@vm"), ("unknown", "")):
        backend.begin(Ref(f"SINGLETONLOCK_{task_id}", task_id, 0, "n"), **lease)
        then = int(time.time() * 1000) - 25_000
        renewed = {"renewed": then, "worker": worker} if worker else {}
        bench.redis.hset(f"SINGLETONLOCK_{task_id}", mapping={"since": then, **renewed})
        bench.redis.pexpire(f"SINGLETONLOCK_{task_id}", 5_000)
    reader = Reader(frozenset({"celery"}), frozenset({SINGLE}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(**{"w1@vm": reader, "w2@vm": reader}))

    (unheard,) = [found for found in findings("workers", app=bench.app) if "renewed nothing" in found[1]]
    left = [text for level, text in findings("locks", app=bench.app) if level == "warning"]

    measured("\n".join([unheard[1], *left]))
    assert unheard[0] == "problem"
    assert re.match(r"w1@vm \(2\d s\): each answers, and has renewed nothing at the locks' server", unheard[1])
    known, unknown = sorted(left)
    assert "w1@vm answers, so the run has ended there" in known
    assert "its worker is one of w1@vm, w2@vm, which answer, so the run has ended there" in unknown
    assert "probably died" not in known + unknown


def test_workers_are_not_missed_at_a_backend_that_knows_none(findings, bench, monkeypatch):
    """They answer, and cannot announce themselves in other processes."""
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=Reader(frozenset({"celery"}), frozenset(), 1, ())))
    app = bench.new_app(singleton_backend_class="singlebeat.locks.inspect:InspectBackend")

    (found,) = [text for _, text in findings("workers", app=app) if "plain tasks" in text or "announced" in text]

    measured(found)
    assert found.startswith("the lock backend InspectBackend knows no workers: plain tasks are sent without a lock")
    assert "install" not in found


@pytest.mark.parametrize("before", ["never seen", "one of its name has shut down"])
def test_a_worker_whose_locks_are_on_another_server_is_named(findings, bench, monkeypatch, before):
    """A release gave it another result backend. A worker of another app, or one that has just started, is not meant."""
    backend = backend_of(bench.app)
    backend.announce(worker_name(bench.app, "old@vm"), ttl=60)
    if before != "never seen":
        backend.announce(worker_name(bench.app, "new@vm"), ttl=60)
        backend.retire(worker_name(bench.app, "new@vm"))
        bench.redis.zincrby("singlebeat:workers", -20, worker_name(bench.app, "new@vm"))
    bench.put(task=SINGLE)
    bench.tick()
    reader = Reader(frozenset({"celery"}), frozenset({SINGLE}), 1, (), up_s=60)
    others = {"other@vm": replace(reader, tasks=frozenset({"theirs"})), "young@vm": replace(reader, up_s=1)}
    readers = {"old@vm": reader, "new@vm": reader, **others}
    monkeypatch.setattr(Workers, "ask", lambda _: answering(**readers))

    (found,) = [found for found in findings("workers", app=bench.app) if "announced" in found[1]]

    measured(found[1])
    assert found[0] == "problem"
    assert found[1].startswith("new@vm answers and runs e, and has not announced itself at the locks' server redis://")


def test_entries_that_a_moved_app_has_left_are_to_be_deleted(findings, cli, bench):
    """The app has a prefix of its own by now: its entries run there, and here once more."""
    left = ("b1", "b 2")
    for name in left:
        bench.put(name)
        bench.redis.hset("redbeat::owners", name, "bar")
    about, of_bar = "redbeat_key_prefix redbeat:", {"app": "bar", "statics": ""}
    bar = Lease(lambda: bench.redis, Keys.of(bench.app).lease, ttl=10, about=of_bar)
    bar.acquire()
    while_it_leads = str(findings(about)) + cli("explain", "b1").output
    bar.release()
    bench.tick()

    ((_, text),) = findings(about)
    explained = cli("explain", "b 2").output

    measured(text)
    unknown, moved = "and no beat of app bar is known here", "If app bar has a prefix of its own now, "
    assert unknown not in while_it_leads
    assert text.startswith(f"2 entries there are of app bar, not of {bench.app.main} (b 2, b1), {unknown}. ")
    assert f"{moved}they run twice: delete each here: celery singlebeat delete 'b 2'. Else: the leader" in text
    assert f"{unknown}. {moved}it runs twice: delete it here: celery singlebeat delete 'b 2'. Else" in explained
    for name in left:
        cli("delete", name)
    assert findings(about) == []


def test_a_name_that_two_apps_have_is_said_to_be_of_both(findings, cli, bench):
    """The entry of this app is refused, and does not run; that of the other app runs under its name."""
    for name in ("both", "theirs"):
        bench.put(name)
        bench.redis.hset("redbeat::owners", name, "bar")
    bench.app.conf.beat_schedule = {"both": {"task": SINGLE, "schedule": 60}}

    explained = {name: cli("explain", name, app=bench.app).output for name in ("both", "theirs")}

    taken = "the beat_schedule of this app has an entry of that name, too, which does not run"
    assert findings("entry theirs", app=bench.app) == []
    ((level, text),) = findings("entry both", app=bench.app)
    assert (level, taken in text, text.startswith("it is of app bar, and ")) == ("problem", True, True)
    assert taken in explained["both"].replace("The beat_schedule", "the beat_schedule")
    assert "rename one of them" in explained["both"]
    assert "of that name, too" not in explained["theirs"]


def test_a_lock_without_a_message_is_doubted_while_no_worker_answers(findings, server, bench_on):
    """It is not freed: a worker without singlebeat that is too busy to answer may have the message."""
    bench = bench_on(server)
    call = bench.app.tasks[SINGLE].delay("purged")
    (key,) = bench.redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    bench.redis.hset(key, "since", int(time.time() * 1000) - 60_000)
    assert "may wait" not in str(findings("locks", app=bench.app)), "its message waits in its queue"

    bench.redis.delete("celery")

    ((level, text),) = findings("locks", app=bench.app)
    measured(text)
    assert level == "warning"
    assert text.startswith(f"1 lock may wait for a message that is lost, such as this: task {call.id} was queued 6")
    assert "no worker answers, and one may have its message" in text
    assert backend_of(bench.app).get(key) == call.id


@pytest.mark.parametrize("check", ["warn", "ignore"])
def test_no_advice_about_the_queue_of_another_app_loses_messages(findings, cli, server, bench_on, monkeypatch, check):
    """A worker of this app drops the messages of another app, and a purge deletes them."""
    bench = bench_on(server, singlebeat_other_app_check=check)
    backend_of(bench.app).announce("w1@vm", ttl=60)
    bench.put("theirs", task="crm.sync", options={"queue": "crm"})
    bench.put(task=SINGLE, options={"queue": "crm"})
    bench.redis.hset("redbeat::owners", "theirs", "crm")
    bench.tick()
    bench.put(task=SINGLE)  # our entry has left that queue
    bench.make_due()
    bench.tick()
    reader = Reader(frozenset({"celery"}), frozenset({SINGLE}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=reader))

    ours, theirs = (cli("explain", name, app=bench.app).output for name in ("e", "theirs"))
    (task_id,) = re.findall("Task (\\S+) was queued", ours)
    told = [ours, theirs, cli("unlock", task_id, app=bench.app, code=1).output]
    told += [str(findings(about, app=bench.app)) for about in ("queue crm", "entry theirs")]
    bench.schedule.delete("theirs")
    bench.redis.hset("redbeat::owners", "another of theirs", "crm")
    told.append(str(findings("queue crm", app=bench.app)))

    dangerous = [text for text in told if re.search("with -Q|purge|Correct the name", text)]
    if check == "warn":
        assert all("app crm" in text for text in told), told
        assert dangerous == []
    else:
        assert dangerous == [*told[:4], told[5]], "they share the schedule on purpose"


def test_a_lost_message_of_a_deleted_entry_is_no_longer_awaited(findings, cli, server, redis, bench_on, monkeypatch):
    """No run and no call meets its lock, which lasts until the end of singlebeat_queued_ttl or until it is freed."""
    bench = bench_on(server, singlebeat_lost_after=0.01)
    bench.put(task=SINGLE, options={"queue": "billing"})
    bench.tick()
    bench.schedule.delete("e")
    redis.delete("billing")
    (lock,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    redis.hincrby(lock, "since", -1_000)  # it is late now
    reader = Reader(frozenset({"celery"}), frozenset({SINGLE}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=reader))
    monkeypatch.setattr("singlebeat.beat.lost_messages._Broker.ask", lambda *_, **__: {"w1": {}})

    about_queue, about_locks = findings("queue billing", app=bench.app), findings("locks", app=bench.app)

    ((level, text),) = about_locks
    measured(text)
    assert (level, about_queue) == ("problem", [])
    assert text.startswith("1 lock waits for a message that is lost, such as task ")
    assert text.endswith(
        ". Equal runs and calls are refused meanwhile: beat frees a lock when one of them meets it, unless "
        "singlebeat_lost_after is None. To free all now: celery singlebeat unlock --stale"
    )
    cli("unlock", "--stale", app=bench.app)
    assert findings("locks", app=bench.app) == []


def test_messages_wait_without_a_worker_only_where_there_are_any(findings, bench, monkeypatch):
    monkeypatch.setattr(Workers, "ask", lambda _: Workers({}, {}, {}, {}, {}, (0.0, 0.0)))
    bench.put()
    bench.tick()
    with_message = findings("workers")
    bench.redis.delete("celery")
    without = findings("workers")

    assert ("problem", "no worker answers: messages wait in their queues") in with_message
    assert ("problem", "no worker answers: no run starts") in without


def test_workers_of_one_name_are_a_problem(findings, bench, monkeypatch):
    """As of two containers with the same -n: each question is answered for one of them."""
    stats = {"pool": {"max-concurrency": 1}, "singlebeat": {"version": "1"}}
    replies = {"registered": [f"{APP}.plain"], "active": [], "active_queues": [{"name": "celery"}], "stats": stats}
    monkeypatch.setattr(
        "singlebeat.diagnosis.workers._asking", lambda _: lambda question: [("w@prod", replies[question])] * 2
    )

    assert ("problem", "several are called w@prod") in [(level, text[:25]) for level, text in findings("workers")]


def test_while_redbeat_leads_the_doctor_promises_nothing_of_due_entries(findings, bench):
    bench.put()
    assert findings("due entries") != []
    bench.redis.set("redbeat::lock", "of RedBeat", px=60_000)

    assert findings("due entries") == []


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ({}, ["problem"]),
        ({"paused": True}, ["warning"]),
        ({"enabled": False}, []),
        ({"max_runs": 1, "total_run_count": 1}, []),
    ],
    ids=["active", "paused", "disabled", "finished"],
)
def test_a_task_that_is_gone_is_a_problem_only_where_it_will_be_sent(findings, bench, monkeypatch, given, levels):
    reader = Reader(frozenset({"celery"}), frozenset({"another"}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=reader))
    bench.put(**given)

    found = [level for level, text in findings("entry e") if "knows its task" in text]

    assert found == levels


@pytest.mark.parametrize("option", ["link", "link_error", "chain"])
def test_a_task_that_an_entry_links_and_no_worker_knows_is_named(findings, bench, monkeypatch, option):
    reader = Reader(frozenset({"celery"}), frozenset({f"{APP}.plain"}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=reader))
    told = [bench.app.signature("shop.tel"), bench.app.signature(f"{APP}.plain")]
    bench.put(options={option: [json.loads(json.dumps(each)) for each in told]})

    ((level, text),) = findings("entry e")

    measured(text)
    assert level == "warning"
    assert text.startswith("no worker that answers knows shop.tel, which its message makes run (link, chain): a worker")


def test_a_task_that_only_a_silent_worker_may_know_is_a_warning(findings, bench, cli, monkeypatch):
    """A solo pool answers nothing while it runs a task."""
    reader = Reader(frozenset({"celery"}), frozenset({"another"}), 1, ())
    monkeypatch.setattr(Workers, "ask", lambda _: answering(w1=reader))
    bench.put()
    backend_of(bench.app).announce(worker_name(bench.app, "solo@host"), ttl=60)

    (told,) = findings("entry e")

    unless = "unless solo@host knows it, a worker that gets the message drops it"
    assert told == ("warning", f"no worker that answers knows its task {APP}.plain: {unless}")
    explained = cli("explain", "e").output
    assert unless in explained
    assert "Correct the name" not in explained


@pytest.mark.parametrize("is_on", [True, False])
def test_workers_that_answer_no_questions_by_their_settings_are_no_problem(app, findings, bench, monkeypatch, is_on):
    """A run that has just ended does not show that its worker still lives; one that runs has no worker that ends."""
    monkeypatch.setattr(Workers, "ask", lambda _: Workers({}, {}, {}, {}, {}, (0.0, 0.0)))
    app.conf.worker_enable_remote_control = is_on
    unseen = findings("workers", app=app)
    backend_of(app).announce("w1", ttl=60)
    bench.put()
    bench.tick()
    headers = {"id": bench.ids[0], RUN_HEADER: {"entry": "e"}}
    record_end_of_message(app, headers, "success", worker="w1", began=time.time())
    flush_ends(app)
    if not is_on:
        held = Ref("SINGLETONLOCK_a", "a", nonce="n")
        backend_of(app).begin(held, lease=60, remember_for=60, task="t", arguments="")
        backend_of(app).renew_many([held], lease=60)

    ((level, text),) = findings("workers", app=app)

    assert ("problem", "no worker answers: no run starts") in unseen
    assert level == ("problem" if is_on else "warning")
    assert "w1" in text
    assert "worker_enable_remote_control" in text


def test_a_beat_that_sends_where_no_run_ends_is_a_problem(findings, cli, bench, bench_on, server, own_server):
    tools = bench_on(server, broker_url=own_server.celery_url, redbeat_redis_url=server.url)
    for name in ("a", "b", "c"):
        bench.put(name=name)
    bench.tick()

    ((level, text), *_) = findings("redbeat_key_prefix redbeat:", app=tools.app)
    assert level == "problem"
    assert "sends to the broker" in text
    assert "has probably" not in cli("explain", "a", app=tools.app).output
    record_end_of_message(bench.app, {"id": bench.ids[0], RUN_HEADER: {"entry": "a"}}, "success", worker="w")
    flush_ends(bench.app)
    assert findings("redbeat_key_prefix redbeat:", app=tools.app)[0][0] == "warning", "the broker has two names"


def test_a_tool_that_reads_clocks_in_another_zone_than_beat_says_so(findings, cli, bench, bench_on, server):
    nightly = {"task": f"{APP}.plain", "schedule": crontab(minute=0, hour=3)}
    statics = {"nightly": nightly, "hourly": {"task": f"{APP}.plain", "schedule": 3600}}
    bench = bench_on(server, timezone="Asia/Tokyo", beat_schedule=statics)
    bench.tick()
    tool = bench_on(server, timezone="UTC", beat_schedule=statics)

    ((level, text),) = findings("timezone of nightly", app=tool.app)

    assert level == "warning"
    assert "beat reads wall clocks in Asia/Tokyo, which counts, and this process in UTC" in text
    assert findings("timezone of nightly", app=bench.app) == []
    for command in ("explain", "show", "next", "list"):
        shown = [cli(command, *["nightly"][: command != "list"], app=each.app).output for each in (bench, tool)]
        assert "18:00" in shown[0], "03:00 in Tokyo"
        assert shown[0] == shown[1]


def test_a_refused_history_is_named_by_all_that_read_it(findings, cli, bench, server, bench_on):
    with without(server, "xadd") as url:
        mute = bench_on(server, redbeat_redis_url=url.replace("redis+socket", "unix"))
        bench.put(task=SINGLE)
        with suppress(ResponseError):  # of the history; all else is written
            mute.tick()
        said = [cli(command, "e", app=mute.app).output for command in ("explain", "history")]
        standby = str(findings("beat", app=mute.app))
        mute.close()

    assert len(mute.messages) == 1
    assert said[0].startswith("Runs may not be sent or recorded because of the schedule's server: the ACL of its user")
    assert all("lacks XADD: grant +xadd" in each for each in said)
    assert "runs may be missing here" in said[1]
    assert "no standby is noted: " in standby
    assert "runs may be missing" not in cli("history", "e").output


#: The settings that name a server.
SERVERS = ("broker_url", "redbeat_redis_url", "result_backend", "singleton_backend_url")


@pytest.mark.parametrize("hanging", [SERVERS, *SERVERS])
def test_tools_ask_a_server_that_hangs_once(server, own_server, cli, hanging, monkeypatch):
    """With ``hanging`` on a server of its own, or all on one server, which used to take minutes."""
    urls = {name: own_server.tcp_url if name in hanging else server.tcp_url for name in SERVERS}
    printed, once = list[tuple[float, str]](), 2
    with make_app(server.tcp_url, {**urls, "singlebeat_socket_timeout": once}) as app:
        own_server.pause()
        began = time.monotonic()
        monkeypatch.setattr(
            "click.echo", lambda text="", **_: printed.append((time.monotonic() - began, unstyle(text)))
        )
        cli("doctor", app=app, code=2 if "redbeat_redis_url" in hanging else 1)
        took = time.monotonic() - began
        for command in ("status", "health") if "redbeat_redis_url" in hanging else ():
            began = time.monotonic()
            cli(command, app=app, code=2)
            assert time.monotonic() - began < 2 * once

    assert took < 3 * once
    assert printed[0][0] < 2 * once, "it is not kept until the end"
    if hanging == SERVERS:
        said = [text for _, text in printed]
        assert "schedule's server" in said[0]
        for about in ("result backend", "locks", "broker"):
            assert any(re.match(f"problem +{about}.* does not answer: ", text) for text in said), said
        assert "Beat still sends" not in str(said)
        assert "The schedule is kept there, too: nothing is sent until it answers" in str(said)


@pytest.mark.parametrize(("master", "is_same"), [("main", True), ("other", False)])
def test_doctor_says_that_nothing_is_sent_without_the_master_of_sentinels(server, cli, master, is_same):
    sentinels = "sentinel://127.0.0.1:1;sentinel://127.0.0.1:2"
    conf = {
        "broker_transport_options": {"master_name": "main"},
        "redbeat_redis_options": {"master_name": "main"},
        "result_backend": f"{sentinels}/1",
        "result_backend_transport_options": {"master_name": master},
        "singleton_backend_url": server.url,
    }
    with make_app(sentinels, conf) as app:
        told = cli("doctor", app=app, code=2).output

    assert ("The schedule is kept there, too: nothing is sent until it answers" in told) is is_same
    assert ("Beat still sends" in told) is not is_same


def test_doctor_says_that_nothing_is_sent_without_the_server_of_the_locks(server, redis, own_server, cli):
    with make_app(server.celery_url, {"result_backend": own_server.celery_url, "singleton_backend_url": None}) as app:
        own_server.kill()
        told = cli("doctor", app=app, code=1).output

    assert "Beat still sends" not in told
    assert "Locks are kept there, too: no run that takes a lock is sent until it answers." in told


def test_workers_of_a_server_that_was_emptied_are_not_called_missing(findings, bench, monkeypatch):
    """After the locks' server has come back empty."""
    answers = Workers({}, {"w1": frozenset()}, {"w1": "0.1"}, {}, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda _: answers)

    (text,) = [text for level, text in findings("workers") if level == "warning"]

    measured(text)
    assert text.startswith("workers with singlebeat answer, and none has announced itself at the locks' server yet")
    assert "within 10 s" in text
    assert "install it there" not in text
    backend_of(bench.app).announce("w1", ttl=60)
    assert [level for level, _ in findings("workers")] == ["fine"]


def test_users_of_one_broker_are_no_two_brokers_and_no_two_fleets(findings, cli, server, redis, bench_on):
    """As after "Give beat and workers a Redis user of their own": each has its URL, and there is one broker."""
    for user in ("beat", "worker"):
        redis.acl_setuser(user, enabled=True, nopass=True, categories=["+@all"], keys=["*"], channels=["*"])
    beats, workers, operators = (
        bench_on(server, broker_url=server.celery_url.replace("://", f"://{login}"))
        for login in ("beat:any@", "worker:any@", "")
    )
    beats.put()
    beats.tick()
    backend = backend_of(workers.app)
    backend.announce(worker_name(workers.app, "w1@vm"), ttl=60)
    backend.worker = "w1@vm"
    run = Ref("SINGLETONLOCK_{a}", "x", 0, "n")
    backend.begin(run, lease=30, remember_for=60, task="t", arguments="()")
    backend.renew_many([run], lease=30)
    told = [cli(*command.split(), app=operators.app).output for command in ("status", "explain e")]
    told.append(str(findings("redbeat_key_prefix", app=operators.app)))
    told.append(str(findings("singleton_key_prefix", app=operators.app)))
    living = living_workers(operators.app, backend_of(operators.app))
    for user in ("beat", "worker"):
        redis.acl_deluser(user)

    assert ScheduleStatus.of(operators.app).leader
    assert not [text for text in told if "broker" in text]
    assert living == {"w1@vm"}


def test_explain_says_of_a_lock_that_is_freed_meanwhile_only_that(cli, server, redis, bench_on, monkeypatch):
    bench = bench_on(server, singlebeat_lost_after=0.01)
    bench.put(task=SINGLE)
    bench.tick()
    redis.delete("celery")
    monkeypatch.setattr("singlebeat.beat.lost_messages._Broker.ask", lambda *_, **__: {"w1": {}})
    monkeypatch.setattr("singlebeat.beat.lost_messages._reread", lambda *_: None)

    text = cli("explain", "e", app=bench.app).output

    said = r"^Task \S+ was queued \d+ s ago: it has started meanwhile, or its lock is free already\.$"
    assert re.search(said, text, re.MULTILINE)


def test_explain_brings_a_quarantined_entry_back_whose_hash_is_gone(cli, bench):
    bench.put("broken")
    bench.redis.hset("redbeat:broken", "definition", "{")
    Schedule(bench.app, actor="ann").save(bench.put("gone"))
    bench.schedule.pause("gone")
    bench.redis.delete("redbeat:gone")
    bench.tick()
    assert {*ScheduleStatus.of(bench.app).quarantine} == {"gone", "broken"}

    text = cli("explain", "gone").output

    measured(text)
    assert "Correct the entry" in cli("explain", "broken").output
    assert "Correct the entry" not in text
    assert "It is not stored. Another program has removed it; its last record is of " in text
    assert "If it comes from beat_schedule, the next term installs it: celery singlebeat resign." in text
    (undo,) = re.findall("To bring it back: celery singlebeat (revert gone --to [0-9-]+)", text)
    cli(*undo.split())
    bench.tick()
    assert {*ScheduleStatus.of(bench.app).quarantine} == {"broken"}


@pytest.mark.parametrize("is_seen", [True, False], ids=["quarantined", "unseen"])
def test_an_entry_of_beat_schedule_that_another_program_removed_is_named(findings, cli, bench, is_seen):
    given = {name: {"task": f"{APP}.plain", "schedule": 5.0} for name in ("five", "six")}
    beat, app = bench.scheduler(beat_schedule=given), bench.new_app(beat_schedule=given)
    beat.tick()
    beat.tick()
    assert findings("entry", app=app) == []
    bench.redis.delete("redbeat:five")
    if is_seen:
        bench.redis.zadd("redbeat::schedule", {"redbeat:five": 0})
        beat.tick()
        bench.redis.delete("redbeat::schedule")
    else:
        bench.redis.zrem("redbeat::schedule", "redbeat:five")
    beat.tick()

    ((level, text),) = findings("entry five", app=app)
    other = findings("entry five", app=bench.new_app(beat_schedule={}))

    measured(text)
    assert level == "problem"
    assert text.startswith("it is in beat_schedule, and is not stored, so it does not run. Another program has")
    assert text.endswith(". Or let the next term install it: celery singlebeat resign")
    assert other == []
    (undo,) = re.findall("celery singlebeat (revert five --to [0-9-]+)", text)
    cli(*undo.split(), app=app)
    assert findings("entry", app=app) == []
    bench.schedule.delete("five")  # on purpose
    assert findings("entry", app=app) == []


@pytest.mark.parametrize("is_eager", [True, False])
def test_doctor_names_tasks_that_run_inside_of_beat(server, redis, bench_on, findings, is_eager):
    """The settings of a developer, left on: no message is sent, and the workers have nothing to do."""
    app = bench_on(server, task_always_eager=is_eager).app

    found = [text for level, text in findings("task_always_eager", app=app) if level == "problem"]
    (due,) = [text for _, text in findings("due entries", app=app)]

    assert [text.startswith("it is set: beat runs the tasks itself") for text in found] == [True] * is_eager
    assert ("exactly once" in due) == (not is_eager and hasattr(Producer, "batch"))


@pytest.mark.parametrize("home", ["a broker", "a third server"])
def test_a_schedule_on_one_of_several_brokers_is_named(server, own_server, redis, bench_on, findings, logged, home):
    """Workers change to the next broker when it fails, and beat comes back to it: no worker reads what it sends."""
    brokers = [server.celery_url, f"redis://localhost:{free_port()}/0"]
    elsewhere = {"redbeat_redis_url": own_server.url, "singleton_backend_url": own_server.url}
    at_home = {"redbeat_redis_url": None, "singleton_backend_url": None, "result_backend": None}
    given = at_home if home == "a broker" else elsewhere
    bench = bench_on(server, broker_url=";".join(brokers), **given)

    scheduler = bench.scheduler()
    for _ in range(2):
        scheduler.tick()
    found = [text for level, text in findings("broker_url", app=bench.app) if level == "problem"]

    assert len(logged("several_brokers")) == len(found) == (home == "a broker")
    assert all("no worker reads that. Set redbeat_redis_url and singleton_backend_url" in text for text in found)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"schedule": None}, "it needs a task and a schedule"),
        ({"overlp": "skip"}, "there is no field overlp; did you mean overlap?"),
        ({"timezone": "Europe/Berln"}, "Europe/Berln"),
        ({"max_runs": 0}, "max_runs"),
        ({"schedule": "60"}, "schedule must be a schedule or a number of seconds, not '60'"),
    ],
    ids=str,
)
def test_an_entry_of_beat_schedule_that_was_never_stored_is_named(bench, cli, findings, wrong, why):
    bench.conf["beat_schedule"] = {"wrong": {"task": f"{APP}.plain", "schedule": 60, **wrong}}
    scheduler = bench.scheduler()
    scheduler.tick()

    (text,) = [text for level, text in findings("entry wrong", app=scheduler.app) if level == "problem"]

    measured(text)
    assert text.startswith("it is in beat_schedule, and is not stored, so it does not run, for it cannot be stored: ")
    assert why in text
    explained = cli("explain", "wrong", app=scheduler.app, code=1).output
    assert why in explained


def test_unstored_entries_are_named_where_one_differs_in_each_process(bench, findings):
    def code(now: str) -> dict[str, dict[str, object]]:
        plain = {"task": f"{APP}.plain", "schedule": 60}
        typo = {**plain, "overlp": "skip"}
        return {"typo": typo, "gone": plain, "same": plain, "broken": plain, "by time": {**plain, "args": [now]}}

    bench.scheduler(beat_schedule=code("12:00")).tick()
    bench.redis.delete("redbeat:gone")
    bench.redis.zrem("redbeat::schedule", "redbeat:gone")
    here = bench.new_app(beat_schedule=code("12:05") | {"broken": code("")["typo"]})

    wrong = [text for level, text in findings("entry", app=here) if level == "problem"]
    ((_, differs),) = findings("redbeat_key_prefix redbeat:", app=here)

    assert len(wrong) == 3
    assert "so it does not run. Another program has removed it" in wrong[0]
    assert "it cannot be stored: entry 'typo': there is no field overlp" in wrong[1]
    assert "cannot be stored, so the one of before runs: entry 'broken': there is no field overlp" in wrong[2]
    assert "(5 entries here, 5 there) (stored otherwise than here: broken, by time): each beat" in differs


@pytest.mark.parametrize("name", ["cache", ":lock", "half \ud800"])
def test_an_entry_of_beat_schedule_that_can_have_no_key_is_named(bench, cli, findings, name):
    if name == "cache":
        bench.redis.set("redbeat:cache", "of another program")
    bench.conf["beat_schedule"] = {name: {"task": f"{APP}.plain", "schedule": 60}}
    scheduler = bench.scheduler()
    scheduler.tick()

    (text,) = [text for level, text in findings(f"entry {name}", app=scheduler.app) if level == "problem"]

    why = {
        "cache": "the key redbeat:cache is in use for other data: rename the entry",
        ":lock": "there can be no entry ':lock', because 'redbeat::lock' is a key of the schedule itself",
    }.get(name, "half of a surrogate pair cannot be encoded")
    assert "so it does not run, for it cannot be stored: " in text
    assert why in text
    assert why in cli("explain", name, app=scheduler.app, code=None).output


def test_an_entry_that_another_app_has_on_purpose_is_named(bench, cli, findings):
    """Apps that share a prefix share the entries of one name, too; this one is another entry."""
    job = {"task": f"{APP}.plain", "schedule": 60}
    given = {"same": job, "nightly": job}
    sharing = {"singlebeat_other_app_check": "ignore"}
    shop, bar = (bench.new_app(**sharing, beat_schedule=given) for _ in "12")
    shop.main, bar.main = "shop", "bar"
    bar.conf.beat_schedule = {**given, "nightly": {**job, "schedule": 30}}
    for app in (shop, bar):
        scheduler = bench.scheduler(app=app)
        scheduler.tick()
        if app is shop:
            scheduler.close()

    found = findings("entry nightly", app=bar)

    assert [level for level, _ in found] == ["problem"]
    assert "app shop has another entry of this name: rename one of them" in found[0][1]
    assert findings("entry same", app=bar) == findings("entry nightly", app=shop) == []
    assert "app shop has another entry of this name" in cli("explain", "nightly", app=bar).output


class Unwell(schedule):
    def is_due(self, last_run_at):
        raise OSError("no answer")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"jitter": -1}, "cannot be stored, so the one of before runs: policy: jitter must be"),
        ({"args": [object()]}, "cannot be stored, so the one of before runs: entry 'mine' cannot"),
        (
            {"schedule": Unwell(60)},
            "so the one of before runs: entry 'mine' cannot be stored: its next run",
        ),
        (
            {"args": "everybody"},
            "so the one of before runs: entry 'mine' cannot be stored: definition: args is not",
        ),
    ],
    ids=["a typo", "an argument", "a schedule", "no comma"],
)
def test_a_definition_that_a_deploy_could_not_store_is_named(bench, cli, findings, logged, wrong, why):
    bench.conf["beat_schedule"] = {"mine": {"task": f"{APP}.plain", "schedule": 60.0}}
    before = bench.scheduler()
    before.tick()
    assert findings("entry", app=before.app) == []
    before.close()
    bench.conf["beat_schedule"] = {"mine": {"task": f"{APP}.plain", "schedule": 60.0, **wrong}}
    deployed = bench.scheduler()
    deployed.tick()
    assert [line["entry"] for line in logged("not_added")] == ["mine"]
    cli("edit", "mine", "--every", "30", app=deployed.app)  # it is told all the same

    ((level, text),) = findings("entry mine", app=deployed.app)

    measured(text)
    assert (level, why in text) == ("problem", True), text
    assert f"{text[0].upper()}{text[1:]}" in cli("explain", "mine", app=deployed.app).output


def test_an_edited_entry_of_beat_schedule_is_named_until_the_next_term(bench, cli, findings):
    bench.conf["beat_schedule"] = {"mine": {"task": f"{APP}.plain", "schedule": 60.0}}
    first = bench.scheduler()
    first.tick()
    cli("pause", "mine", app=first.app)
    assert [text for _, text in findings("entry mine", app=first.app)] == [], "a pause outlasts the term"
    cli("edit", "mine", "--every", "30", app=first.app)

    ((level, text),) = findings("entry mine", app=first.app)
    first.close()
    bench.scheduler().tick()

    measured(text)
    assert level == "fine"
    assert re.fullmatch(r"\S+@\S+ has changed it at .*Z: the next term stores it as beat_schedule gives it", text)
    assert findings("entry mine", app=first.app) == []


def test_a_definition_that_another_program_has_just_changed_is_named(bench, findings):
    bench.conf["beat_schedule"] = {"mine": {"task": f"{APP}.plain", "schedule": 3600.0}}
    scheduler = bench.scheduler()
    scheduler.tick()
    definition = json.loads(bench.redis.hget("redbeat:mine", "definition"))
    bench.redis.hset("redbeat:mine", "definition", json.dumps({**definition, "args": ["by hand"]}))

    ((level, text),) = findings("entry mine", app=scheduler.app)

    assert level == "fine"
    assert text.startswith("another program has changed it, and beat has not read it since: the next term stores it")


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_process_without_a_schedule_says_what_it_does_not_check(bench, findings, spoilt):
    """Such as one that gives ``beat_schedule`` to beats alone."""
    scheduler = bench.scheduler(app=bench.new_app(beat_schedule={"mine": {"task": f"{APP}.plain", "schedule": 3600.0}}))
    scheduler.tick()
    if spoilt:
        bench.redis.hset("redbeat::leader", "statics", "many")

    (told,) = findings("beat_schedule", app=bench.app)

    number = "many" if spoilt else "1"
    text = f"this process has none, and beats have some ({number}): whether they are stored is not checked here"
    assert told == ("warning", text)


def test_a_spoilt_entry_of_beat_schedule_is_healed_by_the_next_term(bench, cli, findings):
    bench.conf["beat_schedule"] = {"mine": {"task": f"{APP}.plain", "schedule": 60.0}}
    beat = bench.scheduler()
    beat.tick()
    bench.put("other")
    for name in ("mine", "other"):
        bench.redis.hset(f"redbeat:{name}", "definition", "{")
    unseen = cli("explain", "mine", app=beat.app).output
    bench.redis.zadd("redbeat::schedule", {"redbeat:mine": 0, "redbeat:other": 0})
    beat.tick()

    text, other = (cli("explain", name, app=beat.app).output for name in ("mine", "other"))
    advised = findings("entry mine", app=beat.app)
    beat.close()
    bench.scheduler().tick()

    measured(text)
    heals = "It is in beat_schedule: the next term tries to store it as it is given there: celery singlebeat resign"
    assert "It is unusable" in unseen
    assert heals in unseen
    assert "It is quarantined" in text
    assert heals in text
    assert "It is quarantined" in other
    assert heals not in other
    assert ("problem", f"{heals[0].lower()}{heals[1:]}") in advised
    assert "one of before runs" not in str(advised)
    assert "mine" not in ScheduleStatus.of(bench.app).quarantine


def test_a_place_without_a_definition_is_not_said_to_be_removed(bench, cli):
    bench.redis.hset("redbeat:never", "foo", "1")
    bench.put("was there", ago=timedelta(), run_on_start=True)
    bench.redis.zadd("redbeat::schedule", {"redbeat:never": 0, "redbeat:was there": 0})
    bench.make_due("was there")
    bench.tick()
    bench.redis.delete("redbeat:was there", "redbeat::changes")
    bench.redis.zadd("redbeat::schedule", {"redbeat:was there": 0})
    bench.tick()

    never, removed = cli("explain", "never").output, cli("explain", "was there").output

    measured(never)
    assert "It is not stored. Another program has given it a place in the schedule without a definition, or " in never
    assert "Another program has removed it" not in never
    assert "It is not stored. Another program has removed it; its last record is of " in removed
