"""The broker is another server: the messages of due entries go there in batches, and are decided about afterwards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery.signals import after_task_publish
from kombu.messaging import Producer
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

from singlebeat.beat import several_writes
from singlebeat.beat.store.claims import Store
from singlebeat.broker import own_broker
from singlebeat.locks import backend_of
from singlebeat.outbox import MOST_CHARACTERS, MOST_MESSAGES, Outbox
from tests.proxy import LossyProxy
from tests.redis.bench import Bench
from tests.support import RedisServer, connected

pytestmark = pytest.mark.skipif(not hasattr(Producer, "batch"), reason="kombu 5.7 is the first to hand out commands")

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
QUEUE, LOCK, PENDING = "celery", "redbeat::lock", "redbeat::pending"


@pytest.fixture
def broker(own_server: RedisServer) -> Redis:
    return own_server.client()


@pytest.fixture
def bench(server: RedisServer, redis: Redis, own_server: RedisServer, bench_on: Any) -> Bench:
    return bench_on(server, broker_url=own_server.celery_url)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the sizes of the batches that are sent, which the time that a slow machine takes does not limit."""
    sizes: list[int] = []
    monkeypatch.setattr(several_writes, "MADE_WITHIN", 60.0)
    send = Outbox.send
    monkeypatch.setattr(Outbox, "send", lambda self, messages: sizes.append(len(messages)) or send(self, messages))
    return sizes


def ids(broker: Redis, queue: str = QUEUE) -> list[str]:
    """Return the task ids of the messages in a queue, the first one first."""
    return [json.loads(text)["headers"]["id"] for text in broker.lrange(queue, 0, -1)[::-1]]


def put(bench: Bench, count: int, **fields: Any) -> list[str]:
    names = [f"e{number}" for number in range(count)]
    for name in names:
        bench.put(name, **fields)
    return names


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_many_entries_are_sent_in_a_few_batches(bench, redis, broker, batches, task):
    backend_of(bench.app).announce("w@h", ttl=60)
    put(bench, 150, task=task)

    bench.tick()

    assert batches == [100, 50]
    assert len(set(ids(broker))) == 150
    assert {record["id"] for record in bench.history} == set(ids(broker))
    assert set(bench.decisions) == {"dispatched"}
    assert redis.zcard(PENDING) == 0
    assert len(redis.keys("SINGLETONLOCK_*")) == 150
    assert all(redis.ttl(key) > 60 for key in redis.keys("SINGLETONLOCK_*")), "they last as long as the messages wait"
    notes = [json.loads(redis.hget(key, "sent")) for key in redis.keys("SINGLETONLOCK_*")]
    assert {(note["queue"], note["broker"]) for note in notes} == {(QUEUE, own_broker(bench.app))}


@pytest.mark.parametrize("prefix", ["", "{shop}:"])
def test_priorities_queues_and_prefixes_are_those_of_kombu(server, own_server, broker, bench_on, batches, prefix):
    transport = {"global_keyprefix": prefix, "priority_steps": [0, 5]}
    bench = bench_on(server, broker_url=own_server.celery_url, broker_transport_options=transport)
    bench.redis.flushdb()
    bench.put("a")
    bench.put("b", options={"priority": 5})
    bench.put("c", options={"queue": "other"})

    bench.tick()

    assert batches == [3]
    places = (f"{prefix}celery", f"{prefix}celery\x06\x165", f"{prefix}other")
    assert [broker.llen(place) for place in places] == [1, 1, 1]


@pytest.mark.parametrize("is_lost", ["request", "reply"])
def test_a_batch_without_a_reply_is_sent_again_under_the_same_ids(
    server, redis, own_server, broker, bench_on, monkeypatch, logged, caplog, batches, is_lost
):
    caplog.set_level("INFO", "celery.beat")
    with LossyProxy(own_server) as proxy:
        bench = bench_on(server, broker_url=f"redis+socket://{proxy.path}")
        names, scheduler = put(bench, 5), bench.scheduler()
        with monkeypatch.context() as patch:
            if is_lost == "reply":
                proxy.lose_next_reply(b"LPUSH")
            else:

                def fail(*_: object) -> None:
                    raise RedisConnectionError

                patch.setattr(Outbox, "send", fail)
            scheduler.tick()
        before = ids(broker)
        assert bench.decisions == []
        assert redis.zcard(PENDING) == len(names)
        assert len(before) == (5 if is_lost == "reply" else 0)
        assert len(logged("unreachable")) == 1
        assert logged("dispatched") == []
        batches.clear()

        bench.retry_now()
        bench.put("fresh")
        scheduler.tick()

    assert batches == [1], "each of those that failed may be the cause"
    assert Counter(ids(broker)) == {record["id"]: 2 if record["id"] in before else 1 for record in bench.history}
    assert bench.decisions == ["dispatched"] * 6
    assert len(logged("dispatched")) == 6
    assert redis.zcard(PENDING) == 0


def test_a_bad_message_holds_up_none_of_its_batch(bench, redis, broker, batches):
    names, scheduler = put(bench, 99), bench.scheduler()
    bench.put("bad", options={"queue": "wrong"})
    scheduler.tick()
    assert batches == [100]
    broker.delete("wrong", QUEUE)
    broker.set("wrong", "no list")
    for name in (*names, "bad"):
        bench.make_due(name)

    scheduler.tick()

    assert batches == [100, 100]
    assert len(ids(broker)) == len(set(ids(broker))) == len(names)
    assert [record["entry"] for record in bench.history if record["decision"] == "publish_failed"] == ["bad"]
    assert Counter(bench.decisions) == {"dispatched": 199, "publish_failed": 1}
    assert redis.zcard(PENDING) == 0


def test_a_message_that_cannot_be_made_holds_up_none_of_its_batch(bench, broker):
    names = put(bench, 20)
    bench.put("bad", args=[1, 2, 3, 4, 5])

    bench.tick()

    assert len(ids(broker)) == len(names)
    assert Counter(bench.decisions) == {"dispatched": 20, "publish_failed": 1}


def test_a_message_that_breaks_the_connection_fails_alone_from_then_on(bench, redis, broker, monkeypatch, batches):
    """As one that is larger than the server takes."""
    names = put(bench, 5)
    bench.put("bad", options={"queue": "poison"})
    scheduler, send = bench.scheduler(), Outbox.send

    def cut(self: Outbox, messages: Any) -> Any:
        if any(command.key == "poison" for message in messages for command in message):
            raise RedisConnectionError
        return send(self, messages)

    monkeypatch.setattr(Outbox, "send", cut)
    publish = scheduler.publish

    def publish_or_fail(entry: Any) -> Any:
        if entry.name == "bad" and scheduler._collecting is None:
            raise OSError
        return publish(entry)

    monkeypatch.setattr(scheduler, "publish", publish_or_fail)
    for _ in range(2):
        scheduler.tick()
        bench.retry_now()

    assert sorted(record["entry"] for record in bench.history) == names
    assert len(ids(broker)) == len(names)
    assert redis.zrange(PENDING, 0, -1) == ["redbeat:bad"]


def test_a_full_broker_gets_each_message_once_when_it_has_room(bench, redis, broker, logged):
    scheduler = bench.scheduler()
    bench.put("first")
    scheduler.tick()  # and declare the queue
    broker.delete(QUEUE)
    names = put(bench, 5, task=SINGLE)
    broker.config_set("maxmemory", 1)
    for _ in range(2):
        scheduler.tick()
        bench.retry_now()

    assert (len(bench.history), broker.llen(QUEUE), redis.zcard(PENDING)) == (1, 0, len(names))
    assert redis.keys("SINGLETONLOCK_*") == [], "an occurrence that waits holds no lock"
    (said,) = logged("unreachable")
    assert "Its memory is full" in said["reason"]
    broker.config_set("maxmemory", 0)
    scheduler.tick()

    assert len(ids(broker)) == len(set(ids(broker))) == len(names)
    assert bench.decisions == ["dispatched"] * 6


@pytest.mark.parametrize("hook", ["signals", "events"])
def test_hooks_hear_of_each_message_when_it_is_sent(server, redis, own_server, broker, bench_on, batches, hook):
    bench, heard = bench_on(server, broker_url=own_server.celery_url, task_send_sent_event=hook == "events"), []
    put(bench, 3)
    scheduler = bench.scheduler()
    if hook == "signals":
        with connected(after_task_publish, lambda **_: heard.append(broker.llen(QUEUE))):
            scheduler.tick()
        assert heard == [1, 2, 3]
    else:
        scheduler.tick()

    assert batches == []
    assert bench.decisions == ["dispatched"] * 3


@pytest.mark.usefixtures("several_writes")
def test_a_beat_that_stops_leading_while_it_makes_messages_sends_none(bench, redis, broker, monkeypatch):
    put(bench, 5, task=SINGLE)
    loser, heir, made = bench.scheduler(), bench.scheduler(), []
    publish = loser.publish

    def lose(entry: Any) -> Any:
        made.append(entry.name)
        if len(made) == 3:
            loser.lease._trusted_until = 0
        return publish(entry)

    monkeypatch.setattr(loser, "publish", lose)
    loser.tick()
    assert (len(made), broker.llen(QUEUE), bench.decisions) == (3, 0, [])
    redis.delete(LOCK)
    heir.tick()

    assert len(ids(broker)) == len(set(ids(broker))) == 5
    assert bench.decisions == ["dispatched"] * 5


def test_a_sent_part_of_a_batch_is_confirmed_after_the_end_of_the_term(bench, redis, broker, monkeypatch):
    """The server refuses the first message of the batch."""
    names, loser = put(bench, 3), bench.scheduler()
    send = Outbox.send

    def refuse_first(self: Outbox, messages: Any) -> Any:
        errors = send(self, messages[1:])
        loser.lease._trusted_until = 0
        return [RedisConnectionError(), *errors]

    monkeypatch.setattr(Outbox, "send", refuse_first)
    loser.tick()

    assert len(bench.history) == len(names) - 1
    assert {record["id"] for record in bench.history} == set(ids(broker))
    assert redis.zcard(PENDING) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_beat_that_dies_around_a_batch_loses_none_of_it(bench, redis, broker, monkeypatch, task, when):
    names, dead, heir, send = put(bench, 5, task=task), bench.scheduler(), bench.scheduler(), Outbox.send

    def die(self: Outbox, messages: Any) -> None:
        if when == "after":
            send(self, messages)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "send", die)
        # A process that is killed frees and confirms nothing.
        patch.setattr(dead.dispatcher, "release", lambda *_, **__: None)
        with pytest.raises(SystemExit):
            dead.tick()
    assert (bench.decisions, redis.zcard(PENDING)) == ([], len(names))
    redis.delete(LOCK)
    heir.tick()

    assert bench.decisions == ["dispatched"] * len(names)
    assert Counter(ids(broker)) == {record["id"]: 1 if when == "before" else 2 for record in bench.history}
    assert redis.zcard(PENDING) == 0


def test_a_refused_confirmation_doubles_no_more_than_one_batch(bench, redis, broker, monkeypatch):
    names, scheduler, confirm, asked = put(bench, 3 * MOST_MESSAGES), bench.scheduler(), Store.confirm, []

    def refuse_second(self: Store, confirmations: Any, term: Any) -> Any:
        if confirmations:
            asked.append(len(confirmations))
            if len(asked) == 2:
                raise ReadOnlyError
        return confirm(self, confirmations, term)

    monkeypatch.setattr(Store, "confirm", refuse_second)
    with suppress(ReadOnlyError):
        scheduler.tick()
    assert max(asked) <= MOST_MESSAGES
    assert broker.llen(QUEUE) == 2 * MOST_MESSAGES, "nothing more is sent while the schedule's server refuses"
    bench.retry_now()
    redis.delete(LOCK)
    bench.scheduler().tick()

    copies = Counter(ids(broker))
    assert len(copies) == len(names)
    assert sum(copies.values()) == len(names) + MOST_MESSAGES
    assert redis.zcard(PENDING) == 0


def test_large_messages_are_sent_in_smaller_batches(bench, broker, batches):
    put(bench, 6, args=["x" * (MOST_CHARACTERS // 4)])

    bench.tick()

    assert sum(batches) == 6
    assert max(batches) <= 3
    assert broker.llen(QUEUE) == 6


def test_a_task_that_others_send_is_in_no_batch(bench, broker, batches, monkeypatch):
    put(bench, 3)
    bench.put("own", task=SINGLE)
    scheduler = bench.scheduler()
    task, sent = scheduler.app.tasks[SINGLE], []
    send = task.apply_async
    monkeypatch.setattr(task, "apply_async", lambda *args, **options: sent.append(batches[:]) or send(*args, **options))

    scheduler.tick()

    assert sum(batches) == 3
    assert len(sent) == 1
    assert len(ids(broker)) == 4


@pytest.mark.usefixtures("several_writes")
def test_a_message_that_was_sent_while_a_batch_is_made_counts_as_sent(bench, broker, batches, monkeypatch):
    """As by a library that replaces the producer of a task."""
    put(bench, 3)
    scheduler = bench.scheduler()
    send = scheduler.apply_async

    def elsewhere(entry: Any, **more: Any) -> Any:
        if entry.name != "e1":
            return send(entry, **more)
        with scheduler.app.connection_for_write() as connection:
            return send(entry, producer=scheduler.app.amqp.Producer(connection), **more)

    monkeypatch.setattr(scheduler, "apply_async", elsewhere)
    scheduler.tick()

    assert batches == [2]
    assert len(ids(broker)) == len(set(ids(broker))) == 3
    assert bench.decisions == ["dispatched"] * 3
