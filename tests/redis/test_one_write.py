"""A due entry on one server: its claim, lock, message and decision are written together, or none of them."""

from __future__ import annotations

import gc
import json
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from celery.signals import after_task_publish, before_task_publish
from kombu import Exchange, Queue
from kombu.messaging import Producer
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from singlebeat import Scheduler, outbox, signals
from singlebeat.beat import one_write
from singlebeat.beat.store.claims import Claim, ClaimVerdict
from singlebeat.beat.store.dispatches import DISPATCH, Answer
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ref
from singlebeat.locks.key import behind_key
from tests.incidents.tools import Tools
from tests.proxy import LossyProxy, Network
from tests.redis.bench import Bench
from tests.support import RedisServer, connected
from tests.system.apps import make_app

pytestmark = pytest.mark.skipif(not hasattr(Producer, "batch"), reason="kombu 5.7 is the first to hand out commands")

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
LOCK, PENDING = "redbeat::lock", "redbeat::pending"


def in_one_write(scheduler: Scheduler) -> bool:
    """Return whether the next tick of a scheduler sends in one write."""
    return scheduler.work.one_write._may_be_possible()


def calls_of(redis: Redis) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in redis.info("commandstats").items()}


def lock_of(bench: Bench, task: str = SINGLE, *args: Any) -> str:
    return bench.app.tasks[task].generate_lock(task, list(args), {})


@pytest.fixture
def told() -> Iterator[list[str]]:
    """Collect the decisions that signals tell."""
    decisions: list[str] = []
    with connected(signals.occurrence_decided, lambda decision, **_: decisions.append(decision.outcome.value)):
        yield decisions


# ---------------------------------------------------------------- what is written, and how


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_many_entries_are_sent_in_a_few_round_trips(bench, redis, task):
    backend_of(bench.app).announce("w@h", ttl=60)
    scheduler = bench.scheduler()
    bench.put("first", task=task)
    scheduler.tick()
    for number in range(150):
        bench.put(f"e{number}", task=task)
    redis.config_resetstat()

    scheduler.tick()

    assert len(bench.names) == 151
    assert len(redis.keys("SINGLETONLOCK_*")) == 151
    assert set(bench.decisions) == {"dispatched"}
    assert calls_of(redis)["lpush"] == 150
    assert calls_of(redis)["evalsha"] <= 5  # the read, the question, and two batches


def test_a_tick_leaves_no_claim_to_the_garbage_collector(bench):
    bench.put()
    scheduler = bench.scheduler()
    gc.collect()
    gc.disable()
    try:
        scheduler.tick()
        kept = [each for each in gc.get_objects() if type(each) is Claim]
    finally:
        gc.enable()

    assert bench.names == ["e"]
    assert kept == []


def test_nothing_is_pending_when_a_beat_ends_before_the_write(bench, redis, monkeypatch):
    for name in ("a", "b"):
        bench.put(name)
    dead, heir = bench.scheduler(), bench.scheduler()
    before = bench.meta("a"), bench.score("a")

    def die(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(dead.work.one_write.dispatches, "write", die)
    with pytest.raises(SystemExit):
        dead.tick()

    assert (bench.messages, bench.pending("a"), redis.zcard(PENDING), bench.history) == ([], None, 0, [])
    assert (bench.meta("a"), bench.score("a")) == before
    redis.delete(LOCK)
    heir.tick()
    assert sorted(bench.names) == ["a", "b"]


@pytest.mark.parametrize("overlap", [None, "buffer_one", "buffer_all", "cancel_other", "terminate_other", "allow_all"])
@pytest.mark.parametrize("state", ["free", "queued", "running"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_one_write_does_what_several_do(bench_on, server, redis, monkeypatch, task, state, overlap):
    """The decisions, the tickets of the messages, the locks with what is stored in them, and the past."""
    found = []
    for ways in ("one", "several"):
        redis.flushdb()
        bench = bench_on(server)
        backend_of(bench.app).announce("w@h", ttl=60)
        bench.put("first", task=task, args=["a"], every=timedelta(days=1))
        if task == PLAIN:
            bench.put("e", task=task, args=["a"], overlap=overlap)
        else:
            bench.put("e", task=task, args=["a"], overlap=overlap, ago=None)
        scheduler = bench.scheduler()
        if state != "free":
            bench.make_due("e")
            bench.redis.zrem("redbeat::schedule", "redbeat:first")
            scheduler.tick()
            for key in redis.keys("SINGLETONLOCK_*"):
                if redis.type(key) == "hash":
                    redis.hset(key, "state", state)
        if ways == "several":
            monkeypatch.setattr(scheduler.work.one_write, "_may_be_possible", lambda: False)
        else:
            monkeypatch.setattr(
                scheduler.store, "claim", lambda claims, *_, **__: pytest.fail("apart") if claims else []
            )
        redis.delete("celery")
        bench.make_due("e")
        scheduler.tick()
        tickets = [message.headers.get("singlebeat_lock") for message in bench.messages]
        locks = {
            key: {
                name: value
                for name, value in redis.hgetall(key).items()
                if name not in {"id", "since", "taken", "until", "renewed", "fence"}
            }
            | {"lasts": round(redis.ttl(key), -2)}
            for key in redis.keys("SINGLETONLOCK_*")
            if redis.type(key) == "hash"
        }
        tickets = [json.loads(json.dumps(ticket).replace(bench.ids[0], "its id")) for ticket in tickets]
        found.append((bench.decisions, tickets, locks, bench.meta("e").total_run_count, bench.pending("e")))

    assert found[0] == found[1]


@pytest.mark.parametrize("prefix", ["", "{shop}:"])
def test_schedule_locks_and_broker_may_be_three_databases(server, redis, bench_on, prefix):
    def in_database(number: int) -> str:
        return f"{server.url}{'&' if '?' in server.url else '?'}db={number}"

    options = {"broker_transport_options": {"global_keyprefix": prefix}}
    bench = bench_on(server, redbeat_redis_url=in_database(3), singleton_backend_url=in_database(5), **options)
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    scheduler.tick()

    assert in_one_write(scheduler)
    assert redis.llen(f"{prefix}celery") == 1
    with server.client(db=5) as locks, server.client(db=3) as schedule:
        calls = schedule.info("commandstats")["cmdstat_lpush"]["calls"]
        assert [locks.type(key) for key in locks.keys("SINGLETONLOCK_*")] == ["hash"]
        assert [record["decision"] for _, record in schedule.xrange("redbeat::history")] == ["dispatched"]
        assert not [key for key in schedule.scan_iter() if key.startswith("SINGLETONLOCK_")]
    assert calls > 0


def test_a_pending_occurrence_is_sent_and_confirmed_at_once(bench, redis, monkeypatch):
    bench.put("e", enabled=False)
    bench.schedule.trigger("e")
    dead, heir = bench.scheduler(), bench.scheduler()
    write = dead.work.one_write.dispatches.write

    def die(request: Any) -> list[Answer] | None:
        answers = write(request)
        if answers:
            raise SystemExit
        return answers

    monkeypatch.setattr(dead.work.one_write.dispatches, "write", die)
    with pytest.raises(SystemExit):
        dead.tick()

    assert len(bench.messages) == 1
    assert (bench.pending(), redis.zcard(PENDING)) == (None, 0)
    assert bench.decisions == ["dispatched"]
    redis.delete(LOCK)
    heir.tick()
    assert len(bench.messages) == 1


# ---------------------------------------------------------------- lost replies, lost leadership


@pytest.fixture
def behind_proxy(
    server: RedisServer, redis: Redis, bench_on: Callable[..., Bench]
) -> Iterator[tuple[Bench, LossyProxy]]:
    with LossyProxy(server) as proxy:
        yield bench_on(server, redbeat_redis_url=proxy.url, singleton_backend_url=server.url), proxy


def test_a_message_is_sent_once_though_the_reply_is_lost(behind_proxy, told):
    bench, proxy = behind_proxy
    for name in ("a", "b"):
        bench.put(name)
    proxy.lose_reply_of(DISPATCH)

    bench.tick()

    assert proxy.lost == 1
    assert sorted(bench.names) == ["a", "b"]
    assert bench.decisions == told == ["dispatched"] * 2


def test_a_dead_connection_to_the_broker_costs_no_one_write(server, redis, bench_on, monkeypatch):
    """A load balancer has forgotten it: what was sent over it would be sent once more after a lost reply."""
    with Network() as network:
        link = network.link("broker", server.port, Random(1))
        url = f"redis://127.0.0.1:{link.port}"
        bench = bench_on(server, broker_url=url, redbeat_redis_url=server.url, singlebeat_socket_timeout=1)
        scheduler = bench.scheduler()
        bench.put("a")
        scheduler.tick()
        claimed = []
        monkeypatch.setattr(scheduler.store, "claim", lambda claims, *_, **__: claimed.extend(claims) or [])

        link.half_open()
        bench.put("b")
        later = time.monotonic() + outbox.WRITTEN_FOR
        monkeypatch.setattr(one_write, "time", type("later", (), {"monotonic": staticmethod(lambda: later)}))
        scheduler.tick()  # ends with the connection
        scheduler.tick()

        assert (claimed, bench.names, bench.decisions) == ([], ["a", "b"], ["dispatched"] * 2)
        scheduler.close()


def test_a_beat_finds_out_what_a_request_without_a_reply_has_done(bench, monkeypatch, told, logged, caplog):
    caplog.set_level("INFO", "celery.beat")
    for name in ("a", "b"):
        bench.put(name)
    scheduler = bench.scheduler()
    write = scheduler.work.one_write.dispatches.write

    def lose_reply(request: Any) -> None:
        write(request)
        raise RedisConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.work.one_write.dispatches, "write", lose_reply)
        scheduler.tick()
    assert told == []
    scheduler.tick()

    assert sorted(bench.names) == ["a", "b"]
    assert told == bench.decisions == ["dispatched"] * 2
    assert [line["entry"] for line in logged("dispatched")] == bench.names


def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let beat write markers as if seconds had passed."""
    later = time.monotonic() + seconds
    monkeypatch.setattr(one_write, "time", type("later", (), {"monotonic": staticmethod(lambda: later)}))


def test_a_lost_connection_leads_to_no_second_message(server, redis, bench_on, monkeypatch, logged):
    """The broker's connection ends twice: when its marker is written again, and after a message, if one is sent."""
    with LossyProxy(server) as proxy:
        bench = bench_on(server, broker_url=f"redis+socket://{proxy.path}")
        bench.put("a")
        scheduler = bench.scheduler()
        scheduler.tick()
        bench.put("b")
        let_time_pass(monkeypatch, 31)
        proxy.meanwhile = lambda: proxy.lose_next_reply(b"LPUSH")
        proxy.lose_next_reply(b"singlebeat:marker:")

        for _ in range(4):
            scheduler.tick()
            bench.retry_now()

    assert proxy.lost == 1
    assert bench.names == ["a", "b"]
    assert bench.decisions == ["dispatched"] * 2
    assert [line["level"] for line in logged("trouble")] == ["ERROR"]


def test_a_new_beat_sends_no_second_message_either(server, redis, bench_on, logged):
    """It knows nothing yet but the addresses of its servers."""
    with LossyProxy(server) as proxy:
        url = f"redis+socket://{proxy.path}"
        bench = bench_on(server, broker_url=url, redbeat_redis_url=proxy.url, singleton_backend_url=proxy.url)
        bench.put("a")
        proxy.meanwhile = lambda: proxy.lose_next_reply(b"LPUSH")
        proxy.lose_next_reply(b"singlebeat:marker:")
        scheduler = bench.scheduler()
        for _ in range(4):
            scheduler.tick()
            bench.retry_now()

    assert bench.names == ["a"]
    assert bench.decisions == ["dispatched"]
    assert [line["level"] for line in logged("trouble")] == ["ERROR"]


def test_a_broker_that_stays_away_holds_up_no_claim_for_long(server, redis, bench_on, monkeypatch, logged):
    """It was on the server of the schedule until now."""
    with LossyProxy(server) as proxy:
        bench = bench_on(server, broker_url=f"redis+socket://{proxy.path}")
        bench.put("a")
        scheduler = bench.scheduler()
        scheduler.tick()
    bench.put("b")
    let_time_pass(monkeypatch, 31)

    scheduler.tick()
    assert bench.pending("b") is None
    let_time_pass(monkeypatch, 62)
    scheduler.tick()

    assert bench.pending("b") is not None
    (trouble,) = logged("trouble")
    assert trouble["reason"].startswith("the broker redis+socket://"), "the schedule's server works"
    assert len(logged("unreachable")) == 1


def test_a_message_that_fails_once_is_sent_in_one_write(bench, monkeypatch, logged):
    """Twice in a row, it needs several writes, and delays no other message."""
    for name in ("a", "b", "c"):
        bench.put(name)
    scheduler, failures = bench.scheduler(), ["b", "c", "c"]
    publish, claim, claimed = scheduler.publish, scheduler.store.claim, list[str]()

    def fail(entry: Any) -> Any:
        if entry.name in failures:
            failures.remove(entry.name)
            raise OSError("the connection is lost")
        return publish(entry)

    def note(claims: Any, *args: Any, **options: Any) -> Any:
        claimed.extend(each.stored.entry.name for each in claims)
        return claim(claims, *args, **options)

    monkeypatch.setattr(scheduler, "publish", fail)
    monkeypatch.setattr(scheduler.store, "claim", note)
    for _ in range(4):
        scheduler.tick()

    assert sorted(bench.names) == ["a", "b", "c"]
    assert claimed == ["c"]
    assert [line["level"] for line in logged("trouble")] == ["ERROR"]


def test_a_beat_that_has_lost_its_term_sends_nothing_later(bench, redis, monkeypatch, told):
    """Not even what it does not know to be sent or not."""
    bench.put()
    loser, heir = bench.scheduler(), bench.scheduler()

    def lose_request(_: Any) -> None:
        raise RedisConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(loser.work.one_write.dispatches, "write", lose_request)
        loser.tick()
    redis.delete(LOCK)
    heir.tick()
    assert bench.names == ["e"]
    heir.close()

    loser.tick()
    assert bench.names == ["e"]
    assert told == bench.decisions == ["dispatched"]


def test_a_beat_that_pauses_before_its_write_sends_nothing(bench, redis, monkeypatch):
    for name in ("a", "b"):
        bench.put(name)
    paused, heir = bench.scheduler(), bench.scheduler()
    write = paused.work.one_write.dispatches.write

    def pause(request: Any) -> Any:
        redis.delete(LOCK)
        heir.tick()
        return write(request)

    monkeypatch.setattr(paused.work.one_write.dispatches, "write", pause)
    paused.tick()

    assert sorted(bench.names) == ["a", "b"]
    assert len(bench.history) == 2


# ---------------------------------------------------------------- what others are told


@pytest.mark.parametrize("hook", ["signals", "events"])
def test_hooks_hear_of_what_is_sent_only(server, redis, bench_on, monkeypatch, hook):
    """Another beat claims the second one, after its message is made."""
    bench = bench_on(server, task_send_sent_event=hook == "events")
    for name in ("a", "b", "c"):
        bench.put(name, task=SINGLE)
    scheduler, before, after, listener = bench.scheduler(), [], [], redis.pubsub()
    listener.psubscribe("*celeryev*")
    listener.get_message(timeout=5)
    write = scheduler.work.one_write.dispatches.write

    def overtaken(request: Any) -> Any:
        if "redbeat:b" in request.keys:
            bench.redis.zadd("redbeat::schedule", {"redbeat:b": 2e9})
        return write(request)

    monkeypatch.setattr(scheduler.work.one_write.dispatches, "write", overtaken)
    with (
        connected(before_task_publish, lambda headers, **_: before.append(headers["id"])),
        connected(after_task_publish, lambda headers, **_: after.append(headers["id"])),
    ):
        scheduler.tick()

    assert in_one_write(scheduler)
    assert sorted(bench.names) == ["a", "c"]
    assert len(before) == 3
    assert after == bench.ids
    events = []
    while message := listener.get_message(timeout=0.2 if hook == "signals" else 1):
        events += [json.loads(b64decode(json.loads(message["data"])["body"]))]
    assert [event["uuid"] for event in events if event["type"] == "task-sent"] == (
        bench.ids if hook == "events" else []
    )
    listener.close()


# ---------------------------------------------------------------- when it is not possible, or not for all


def test_a_lock_that_is_acquired_meanwhile_is_seen(bench, redis, monkeypatch):
    """The message that was made is not sent; what is made instead is the run's place behind the other one."""
    bench.put(task=SINGLE, overlap="buffer_one")
    scheduler = bench.scheduler()
    write = scheduler.work.one_write.dispatches.write

    def overtaken(request: Any) -> Any:
        backend_of(bench.app).begin(
            Ref(lock_of(bench, SINGLE, "e"), "other", nonce="n"), lease=60, remember_for=60, task=SINGLE, arguments=""
        )
        return write(request)

    monkeypatch.setattr(scheduler.work.one_write.dispatches, "write", overtaken)
    scheduler.tick()

    assert bench.decisions == ["buffered"]
    assert [message.headers["singlebeat_lock"].get("waits") for message in bench.messages] == [True]
    assert redis.hget(behind_key(lock_of(bench, SINGLE, "e")), "id") == bench.ids[0]


def test_no_message_is_made_for_a_run_that_is_skipped(bench, monkeypatch):
    """Else a monitor would hear of a run that begins, and never ends."""
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.make_due()
    monkeypatch.setattr(scheduler, "publish", lambda _: pytest.fail("a message was made"))

    scheduler.tick()

    assert bench.decisions == ["dispatched", "skipped_overlap"]
    assert in_one_write(scheduler)


def test_a_broker_elsewhere_gets_its_messages_in_several_writes(server, redis, own_server, bench_on, monkeypatch):
    bench = bench_on(server, broker_url=own_server.celery_url)
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    scheduler.tick()

    assert not in_one_write(scheduler)
    assert own_server.client().llen("celery") == 1
    assert redis.llen("celery") == 0
    assert bench.decisions == ["dispatched"]


def test_locks_elsewhere_are_taken_in_several_writes(server, redis, own_server, bench_on):
    bench = bench_on(server, singleton_backend_url=own_server.url)
    bench.put(task=SINGLE)
    scheduler = bench.scheduler()
    scheduler.tick()

    assert not in_one_write(scheduler)
    assert len(bench.messages) == 1
    assert own_server.client().hget(lock_of(bench, SINGLE, "e"), "id") == bench.ids[0]


def test_markers_that_are_gone_are_written_again(bench, redis, monkeypatch):
    scheduler = bench.scheduler()
    bench.put("a")
    scheduler.tick()
    redis.delete(*redis.keys("singlebeat:marker:*"))
    bench.put("b")
    let_time_pass(monkeypatch, 2)

    scheduler.tick()

    assert in_one_write(scheduler)
    assert bench.names == ["a", "b"]


@pytest.mark.parametrize("right", ["lpush", "select", "evalsha"])
def test_a_user_of_the_schedule_with_other_rights_needs_several_writes(server, redis, bench_on, right):
    redis.acl_setuser(
        "scheduler",
        enabled=True,
        passwords=["+pw"],
        keys=["redbeat:*"],
        channels=["*"],
        commands=["+@all"] if right == "evalsha" else ["+@all", f"-{right}"],
    )
    try:
        url = server.url.replace("://", "://scheduler:pw@", 1)
        broker = server.celery_url
        bench = bench_on(server, redbeat_redis_url=url, broker_url=broker, singleton_backend_url=server.url)
        bench.put(task=SINGLE)
        bench.scheduler().tick()
        assert len(bench.messages) == 1
        assert bench.decisions == ["dispatched"]
        assert bench.pending() is None
    finally:
        redis.acl_deluser("scheduler")


def test_doctor_says_it_if_rights_forbid_one_write(server, redis, cli, no_worker_is_awaited):
    """A broker's user without a right for the marker, as the one of the docs."""
    redis.acl_setuser(
        "narrow",
        enabled=True,
        passwords=["+pw"],
        keys=["redbeat:*", "SINGLETONLOCK_*", "singlebeat:workers", "celery*", "_kombu*"],
        channels=["*"],
        commands=["+@all"],
    )
    try:
        with make_app(server.celery_url.replace("://", "://narrow:pw@", 1)) as app:
            lines = cli("doctor", app=app, code=None).output.splitlines()
    finally:
        redis.acl_deluser("narrow")

    (calls,) = (line for line in lines if "calls of Singletons" in line)
    (entries,) = (line for line in lines if "due entries:" in line)
    assert "a user lacks rights for one write" in calls
    assert "in several writes, so sent at least once: a user lacks rights for one write" in entries


def test_a_user_with_the_rights_of_the_docs_is_refused_once(server, redis, bench_on):
    """Each refusal is a line in the server's log of rights."""
    redis.acl_setuser(
        "frugal",
        enabled=True,
        passwords=["+pw"],
        keys=["redbeat:*", "SINGLETONLOCK_*", "singlebeat:workers"],
        commands=["+@all"],
    )
    try:
        url = server.url.replace("://", "://frugal:pw@", 1)
        bench = bench_on(server, redbeat_redis_url=url, singleton_backend_url=url)
        scheduler = bench.scheduler()
        redis.acl_log_reset()
        for name in ("a", "b", "c"):
            bench.put(name, task=SINGLE)
            scheduler.tick()
        assert [line["object"].rpartition(":")[0] for line in redis.acl_log()] == ["singlebeat:marker"]
        assert [line["count"] for line in redis.acl_log()] == [1]
    finally:
        redis.acl_deluser("frugal")

    assert bench.names == ["a", "b", "c"]


def test_a_right_that_is_missing_inside_of_the_script_is_said_once(server, redis, bench_on, logged, caplog):
    """Without LPUSH, each of the messages of a write is refused."""
    caplog.set_level("INFO", "celery.beat")
    redis.acl_setuser(
        "silent", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", "-lpush"]
    )
    try:
        url = server.url.replace("://", "://silent:pw@", 1)
        bench = bench_on(server, redbeat_redis_url=url)
        for name in ("a", "b", "c"):
            bench.put(name)
        bench.scheduler().tick()
    finally:
        redis.acl_deluser("silent")

    assert sorted(bench.names) == ["a", "b", "c"]
    assert len(logged("several_writes")) == 1
    assert logged("refused") == []


def test_a_forbidden_queue_does_not_rule_one_write_out(server, redis, bench_on, logged, caplog):
    """The user of the schedule may not write to it; the user of the broker may."""
    caplog.set_level("INFO", "celery.beat")
    keys = ["redbeat:*", "SINGLETONLOCK_*", "singlebeat:*", "celery*"]
    redis.acl_setuser("narrow", enabled=True, passwords=["+pw"], keys=keys, channels=["*"], commands=["+@all"])
    try:
        bench = bench_on(server, redbeat_redis_url=server.url.replace("://", "://narrow:pw@", 1))
        scheduler = bench.scheduler()
        bench.put("bad", options={"queue": "forbidden"})
        for name in ("a", "b", "c"):
            bench.put(name)
            scheduler.tick()
            assert in_one_write(scheduler)
        bench.make_due("bad")
        scheduler.tick()
        assert in_one_write(scheduler)
        assert redis.llen("forbidden") == 2
        for _ in range(2):  # with no success between
            bench.make_due("bad")
            scheduler.tick()
        assert not in_one_write(scheduler)
    finally:
        redis.acl_deluser("narrow")

    assert bench.names == ["a", "b", "c"]
    assert redis.llen("forbidden") == 4
    assert len(logged("several_writes")) == 1


def test_an_entry_that_fails_keeps_no_other_from_one_write(server, redis, bench_on, monkeypatch):
    keys = ["redbeat:*", "SINGLETONLOCK_*", "singlebeat:*", "celery*", "_kombu*"]
    redis.acl_setuser("narrow", enabled=True, passwords=["+pw"], keys=keys, channels=["*"], commands=["+@all"])
    try:
        bench = bench_on(server, broker_url=server.celery_url.replace("://", "://narrow:pw@", 1))
        bench.put("bad", options={"queue": "forbidden"})
        scheduler = bench.scheduler()
        scheduler.tick()
        assert redis.zrange(PENDING, 0, -1) == ["redbeat:bad"]
        monkeypatch.setattr(scheduler.store, "claim", lambda claims, *_, **__: pytest.fail("apart") if claims else [])
        bench.put("a")
        bench.retry_now()
        scheduler.tick()
    finally:
        redis.acl_deluser("narrow")

    assert bench.names == ["a"]
    assert redis.zrange(PENDING, 0, -1) == ["redbeat:bad"]


def test_a_full_server_writes_nothing_and_goes_on_in_one_write(own_server, bench_on):
    bench = bench_on(own_server)
    scheduler = bench.scheduler()
    bench.put("a", task=SINGLE)
    scheduler.tick()
    bench.put("b", task=SINGLE)
    bench.redis.config_set("maxmemory", 1)

    scheduler.tick()

    assert bench.names == ["a"]
    assert bench.pending("b") is None
    bench.redis.config_set("maxmemory", 0)
    for _ in range(2):
        scheduler.tick()
    assert in_one_write(scheduler)
    assert bench.names == ["a", "b"]


def test_a_queue_of_another_type_delays_no_other_entry(bench, redis):
    redis.set("wrong", "no list")
    bench.put("bad", options={"queue": "wrong"})
    for name in ("a", "b"):
        bench.put(name)
    scheduler = bench.scheduler()

    scheduler.tick()

    assert sorted(bench.names) == ["a", "b"]
    assert in_one_write(scheduler)
    assert {record["entry"]: record["decision"] for record in bench.history} == {
        "a": "dispatched",
        "b": "dispatched",
        "bad": "publish_failed",
    }


def test_a_message_that_cannot_be_made_is_no_others_concern(bench):
    bench.put("bad", args=[1, 2, 3, 4, 5])
    for name in ("a", "b"):
        bench.put(name)
    scheduler = bench.scheduler()

    scheduler.tick()

    assert sorted(bench.names) == ["a", "b"]
    assert sorted(bench.decisions) == ["dispatched", "dispatched", "publish_failed"]


@pytest.mark.parametrize("is_one_write", [True, False], ids=["one write", "several writes"])
@pytest.mark.parametrize("error", [KeyError, AttributeError])
@pytest.mark.parametrize("ago", [1.4, 1.6], ids=["later", "earlier"])
def test_a_message_that_cannot_be_made_leaves_the_channel_to_others(bench, monkeypatch, is_one_write, error, ago):
    """Some of these errors are for kombu those of a lost connection."""
    if not is_one_write:
        monkeypatch.setattr(one_write.OneWrite, "_may_be_possible", lambda _: False)

    make = bench.app.amqp.create_task_message

    def create(*args: Any, **options: Any) -> Any:
        if ["bad"] in args:
            raise error("a")
        return make(*args, **options)

    monkeypatch.setitem(vars(bench.app.amqp), "create_task_message", create)
    bench.put("bad", ago=ago * timedelta(hours=1))
    bench.put("before", ago=1.55 * timedelta(hours=1))
    bench.put("after", ago=1.45 * timedelta(hours=1))
    bench.scheduler(app=bench.app)

    bench.tick()

    assert sorted(bench.names) == ["after", "before"]


def receive(**_: object) -> None: ...


@pytest.mark.parametrize("is_reported", [False, True], ids=["", "to a receiver"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_message_that_reaches_no_queue_waits_for_one(
    server, redis, own_server, bench_on, elsewhere, is_reported, caplog
):
    bench = bench_on(server, **({"broker_url": own_server.celery_url} if elsewhere else {}))
    bench.put("a", options={"exchange": "nowhere", "routing_key": "a typing error"})
    bench.put("b")
    if is_reported:  # then kombu sends each message by itself
        after_task_publish.connect(receive)

    try:
        bench.tick()
    finally:
        after_task_publish.disconnect(receive)

    assert {each["entry"]: each["decision"] for each in bench.history} == {"b": "dispatched"}
    assert "no queue is bound to its exchange with its routing key: start a worker" in caplog.text
    assert "maybe no queue is bound to exchange nowhere" in Tools(bench.app).ask("doctor")

    with bench.app.connection_for_write() as connection:
        Queue("late", Exchange("nowhere"), "a typing error")(connection).declare()
    redis.zadd("redbeat::pending", {"redbeat:a": 0}, xx=True)
    bench.tick()
    assert {each["entry"]: each["decision"] for each in bench.history} == {"a": "dispatched", "b": "dispatched"}


def test_a_queue_is_bound_again_after_its_bindings_were_flushed(server, redis, own_server, bench_on):
    """Its worker reads on, and declares it only when it starts."""
    topic = Queue("news", Exchange("news", "topic"), "news.#")
    bench = bench_on(server, broker_url=own_server.celery_url, task_queues=[topic])
    bench.put("a", options={"queue": "news", "routing_key": "news.a"})
    bench.tick()
    own_server.client().flushall()

    bench.make_due("a")
    for _ in range(2):
        bench.retry_now()
        bench.tick()

    assert bench.decisions == ["dispatched"] * 2
    assert own_server.client().llen("news") == 1


def test_what_is_made_before_a_server_fails_is_written(bench, monkeypatch):
    for name in ("a", "b", "c"):
        bench.put(name)
    scheduler, made = bench.scheduler(), []
    publish = scheduler.publish

    def fail(entry: Any) -> Any:
        made.append(entry.name)
        if len(made) == 2:
            raise OSError("the broker is gone")
        return publish(entry)

    monkeypatch.setattr(scheduler, "publish", fail)
    monkeypatch.setattr(scheduler.store, "claim", lambda claims, *_, **__: [ClaimVerdict.FENCED] * len(claims))
    scheduler.tick()

    assert bench.names == made[:1]


def test_a_task_that_others_send_is_claimed_before(bench, redis, monkeypatch):
    """As by a library that sends all tasks of an app over a producer of its own."""
    for name in ("a", "b"):
        bench.put(name)
    scheduler = bench.scheduler()
    app, send = scheduler.app, scheduler.app.send_task
    pending = []

    def elsewhere(*args: Any, producer: Any = None, **options: Any) -> Any:
        pending.append(redis.zcard(PENDING))
        with app.connection_for_write() as connection:
            return send(*args, producer=app.amqp.Producer(connection), **options)

    monkeypatch.setattr(app, "send_task", elsewhere)
    for _ in range(2):
        scheduler.tick()

    assert sorted(bench.names) == ["a", "b"]
    assert pending == [2, 1], "the first is confirmed before that library is called again"


def test_a_library_that_sends_in_the_place_of_beat_sends_once(server, redis, own_server, bench_on, monkeypatch):
    """Over a producer of its own, to a broker that is elsewhere: beat must know that before it makes a message."""
    bench = bench_on(server, broker_url=own_server.celery_url)
    scheduler = bench.scheduler()
    app, send = scheduler.app, scheduler.apply_async

    def elsewhere(entry: Any, producer: Any = None, **options: Any) -> Any:
        with app.connection_for_write() as connection:
            return send(entry, app.amqp.Producer(connection), **options)

    monkeypatch.setattr(scheduler, "apply_async", elsewhere)
    bench.put()
    scheduler.tick()

    assert own_server.client().llen("celery") == 1
    assert bench.decisions == ["dispatched"]


def test_a_history_that_is_not_written_holds_up_no_run(bench, redis, logged):
    for number in range(3):
        bench.put(f"e{number}")
    bench.put("single", task=SINGLE, overlap="buffer_all")
    scheduler = bench.scheduler()
    redis.set("redbeat::history", "no stream")
    for _ in range(3):
        scheduler.tick()
        bench.retry_now()
        bench.make_due("single")

    assert {"e0", "e1", "e2", "single"} <= set(bench.names)
    assert bench.names.count("single") > 1
    assert logged("refused") == []
    assert len(logged("trouble")) == 1


def test_large_messages_are_written_in_smaller_batches(bench, redis):
    scheduler = bench.scheduler()
    for number in range(6):
        bench.put(f"e{number}", args=["x" * (one_write.MOST_CHARACTERS // 4)])
    redis.config_resetstat()

    scheduler.tick()

    assert len(bench.messages) == 6
    assert calls_of(redis)["evalsha"] >= 3


def test_an_eager_app_runs_its_entries(bench_on, server, redis, logged):
    bench = bench_on(server, task_always_eager=True)
    bench.put()
    scheduler = bench.scheduler()
    scheduler.tick()
    scheduler.tick()

    assert bench.messages == []
    assert bench.decisions == ["dispatched"]
    assert len(logged("eager")) == 1
