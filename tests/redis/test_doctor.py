"""Findings of ``doctor`` about the schedule and its leader; those about workers: ``tests/system/test_doctor.py``."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule

from singlebeat import Schedule, clocked
from singlebeat.beat.metrics import BeatMetrics
from tests.support import RedisServer, SlowProxy, measured, without

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")

HOUR = timedelta(hours=1)
SINGLE = "tests.system.apps.single"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("history", "stream"), ("runs", "stream"), ("standbys", "sorted set"), ("schedule", "sorted set")),
        *(("owners", "hash"), ("statics", "set"), ("term", "string"), ("clock", "string")),
    ],
)
def test_a_key_of_the_schedule_of_another_type_is_named(findings, bench, name, kind):
    bench.put(ago=timedelta())
    bench.tick()
    assert findings("key") == []
    bench.redis.delete(f"redbeat::{name}")
    bench.redis.rpush(f"redbeat::{name}", "mine")

    ((level, text),) = findings(f"key redbeat::{name}")

    measured(text)
    assert level == "problem"
    assert text.startswith(f"it is no {kind}, and beat cannot use it: another program has written there")
    bench.redis.execute_command(*re.search("DEL [^ ]+", text)[0].split())
    assert findings("key") == []


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
        f"it has never run, and never will: its only time, {now - HOUR:%Y-%m-%d %H:%M:%SZ}, has passed. "
    )


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
    missing = "there is no standby: when the leader is lost"
    assert missing in str(findings("beat"))
    with without(server, "zremrangebyscore") as url:
        mute = bench_on(server, redbeat_redis_url=url.replace("redis+socket", "unix"))
        mute.tick()  # logs that it could not
        told = str(findings("beat", app=mute.app))

    assert missing not in told
    assert "no standby is noted, but there may be one: the schedule's server refuses a command that a standby" in told
    assert "lacks ZREMRANGEBYSCORE" in told


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
    for spoil in (lambda: bench.redis.hset(key, mapping={"id": "z", "until": "x"}), lambda: bench.redis.set(key, "x")):
        bench.put(task=SINGLE)
        spoil()
        bench.tick()

        ((level, text),) = findings("entry e")
        assert level == "problem"
        assert f"the last one was sent without its lock: the lock {key} is unusable: " in text
        assert "probably killed" not in cli("explain", "e").output
        assert f"without its lock: the lock {key} is unusable: " in cli("explain", "e").output
        assert f"{key} holds something that is no lock: --force deletes the key" in cli("unlock", key, code=1).output
        cli("unlock", key, "--force")
        assert not bench.redis.exists(key)
    bench.redis.set("other", "x")
    assert "no lock is held by other" in cli("unlock", "other", "--force", code=1).output


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


def test_explain_accuses_no_worker_where_none_records_ends(cli, bench):
    """No worker was ever there: the messages wait in their queue."""
    bench.put()
    for _ in range(5):
        bench.make_due()
        bench.tick()

    assert "probably killed" not in cli("explain", "e").output
