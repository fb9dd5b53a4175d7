"""A call whose lock and message are one write: it is sent under its lock, or nothing has happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from celery import Celery, Task
from celery._state import _task_stack
from celery.result import EagerResult
from celery.signals import after_task_publish, before_task_publish
from celery.utils import uuid
from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import OperationalError
from kombu.messaging import Producer
from kombu.transport.redis import Channel
from redis import Redis

from singlebeat import Singleton, outbox
from singlebeat.beat import lost_messages
from singlebeat.beat.lost_messages import UNNOTED, Waiting, examine
from singlebeat.errors import DuplicateTaskError, LockBackendError
from singlebeat.locks import backend_of
from singlebeat.locks.acquire import unlocked_ticket
from singlebeat.locks.base import HEADER, Call, Ref, Renewal
from singlebeat.locks.key import behind_key, turn_key
from singlebeat.locks.redis import SCRIPTS, RedisBackend
from singlebeat.locks.send import MOST_MESSAGES, _ManyCalls, _refused, why_two_writes
from singlebeat.outbox import Senders, collecting
from singlebeat.overlap import Overlap
from tests.proxy import LossyProxy
from tests.support import APP, ROOT, connected, wait_until
from tests.system.apps import make_app

pytestmark = pytest.mark.skipif(not hasattr(Producer, "batch"), reason="kombu 5.7 is the first to hand out commands")


@pytest.fixture(autouse=True)
def _no_call_was_refused() -> Iterator[None]:
    yield
    _refused.clear()


def numbered(value: int) -> None: ...


def define(app: Celery, **options: Any) -> Any:
    return app.task(numbered, name="numbered", base=Singleton, shared=False, **options)


@contextmanager
def apps(url: str, **conf: Any) -> Iterator[Celery]:
    with make_app(url, conf) as app:
        yield app


@contextmanager
def run_of(task: Any, task_id: str) -> Iterator[None]:
    """Make calls as the body of a run does."""
    _task_stack.push(task)
    task.push_request(id=task_id, called_directly=False, children=[])
    try:
        yield
    finally:
        task.pop_request()
        _task_stack.pop()


def messages(redis: Redis, queue: str = "celery") -> list[dict[str, Any]]:
    """The messages in a queue, the first one first."""
    return [json.loads(raw) for raw in redis.lrange(queue, 0, -1)[::-1]]


def values(redis: Redis, queue: str = "celery") -> list[Any]:
    return [json.loads(b64decode(message["body"]))[0][0] for message in messages(redis, queue)]


def locks(redis: Redis) -> set[str]:
    """The ids that hold a lock."""
    return {redis.hget(key, "id") for key in redis.scan_iter("SINGLETONLOCK_*", _type="HASH")}


def ids(redis: Redis) -> set[str]:
    return {message["headers"]["id"] for message in messages(redis)}


def calls_of(redis: Redis) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in redis.info("commandstats").items()}


# ---------------------------------------------------------------- one write


def test_a_call_and_its_lock_are_one_round_trip(app, redis):
    task = define(app, ignore_result=True)
    task.delay(1)
    redis.config_resetstat()

    result = task.delay(2)

    calls = calls_of(redis)
    assert calls["evalsha"] == calls["lpush"] == 1
    assert "eval" not in calls
    assert locks(redis) == ids(redis) >= {result.id}
    assert (result.is_duplicate, result.waits_for) == (False, None)


def test_a_duplicate_is_refused_in_one_round_trip_without_a_message(app, redis, monkeypatch):
    task = define(app)
    first = task.delay(1)
    assert task.delay(1).id == first.id  # made in vain
    redis.config_resetstat()
    monkeypatch.setattr(app.amqp, "create_task_message", None)

    again = task.delay(1)

    assert (again.id, again.is_duplicate) == (first.id, True)
    assert calls_of(redis)["evalsha"] == 1
    assert values(redis) == [1]


@pytest.mark.parametrize("by", ["task", "app", "call", "none"])
@pytest.mark.parametrize("many", [False, True])
def test_a_result_that_is_not_stored_is_awaited_of_no_duplicate_either(app, by, many):
    app.conf.task_ignore_result = by == "app"
    task = define(app, **({"ignore_result": True} if by == "task" else {}))
    options = {"ignore_result": True} if by == "call" else {}

    def call() -> Any:
        return task.apply_async_many([([1], {}, options)])[0] if many else task.apply_async([1], **options)

    first, again = call(), call()

    assert (first.is_duplicate, again.is_duplicate) == (False, True)
    assert first.ignored is again.ignored is (by != "none")


def test_a_refused_message_leaves_no_subscription(app, redis):
    task = define(app)
    kept = task.delay(1)
    for _ in range(3):
        _refused.clear()
        assert task.delay(1).is_duplicate

    subscribed = {channel.decode() for channel in app.backend.result_consumer.subscribed_to}
    assert [channel for channel in subscribed if kept.id not in channel] == []


def test_a_call_after_a_refused_one_is_sent_in_one_write(app, redis):
    task = define(app)
    first = task.delay(1)
    task.delay(1)
    redis.delete(*redis.keys("SINGLETONLOCK_*"), "celery")

    second = task.delay(1)

    assert second.id != first.id
    assert locks(redis) == ids(redis) == {second.id}


@pytest.mark.parametrize("database", [0, 5], ids=["one database", "two databases"])
@pytest.mark.parametrize("prefix", ["", "{shop}:"])
def test_the_broker_may_have_another_database_and_a_prefix(server, redis, database, prefix):
    joined = "&" if "?" in server.url else "?"
    options = {"broker_transport_options": {"global_keyprefix": prefix}}
    with apps(server.celery_url, singleton_backend_url=f"{server.url}{joined}db={database}", **options) as app:
        result = define(app).apply_async([1], priority=0)
        before = calls_of(redis)["evalsha"]
        define(app).delay(2)
        assert calls_of(redis)["evalsha"] == before + 1

    assert values(redis, f"{prefix}celery") == [1, 2]
    with server.client(db=database) as client:
        assert result.id in locks(client)
        assert len(locks(client)) == 2


def test_a_message_goes_where_kombu_would_send_it(app, redis):
    topic = Exchange("news", type="topic")
    app.conf.task_queues = [
        Queue("celery"),
        Queue("all", topic, routing_key="#"),
        Queue("local", topic, routing_key="local.*"),
        Queue("brief", expires=60.0),
    ]
    task = define(app)
    for queue in app.conf.task_queues:  # declared, as by a worker
        with app.connection_for_write() as connection:
            queue(connection.default_channel).declare()

    task.apply_async([1], queue="local", routing_key="local.weather")
    task.apply_async([2], queue="brief")
    task.apply_async([3], priority=9)

    assert (values(redis, "all"), values(redis, "local"), values(redis, "brief")) == ([1], [1], [2])
    assert values(redis, "celery\x06\x169") == [3]
    assert 0 < redis.ttl("brief") <= 60


# ---------------------------------------------------------------- the lock decides about the message


def test_a_call_that_waits_is_sent_with_its_place(app, redis):
    task = define(app, overlap="buffer_one")
    lock = task.generate_lock(task.name, [1])
    first = task.delay(1)
    redis.hset(lock, "state", "running")

    second = task.delay(1)

    assert second.waits_for.task_id == first.id
    assert redis.hget(behind_key(lock), "id") == second.id
    assert [message["headers"]["singlebeat_lock"].get("waits") for message in messages(redis)] == [None, True]


def test_a_call_that_replaces_others_evicts_them_in_the_same_write(app, redis):
    task = define(app, overlap="cancel_other")
    lock = task.generate_lock(task.name, [1])
    first = task.delay(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.amqp, "create_task_message", None)
        with pytest.raises(TypeError):
            task.delay(1)
    assert redis.hget(lock, "id") == first.id
    second = task.delay(1)

    assert redis.hget(lock, "id") == second.id
    assert redis.zscore(f"{lock}:done", f"{first.id}:replaced") is not None


def test_a_call_makes_no_client_of_the_broker_when_the_last_one_did(app, redis, monkeypatch):
    task = define(app)
    task.delay(1)
    monkeypatch.setattr(Channel, "_create_client", None)  # takes longer than all else that a call does

    task.delay(2)

    assert values(redis) == [1, 2]


def test_a_lock_that_changes_while_the_message_is_made_is_seen(app, redis, monkeypatch):
    task = define(app, overlap="buffer_one")
    lock = task.generate_lock(task.name, [1])
    make = app.amqp.create_task_message
    made: list[str] = []

    def meanwhile(task_id: str, *args: Any, **options: Any) -> Any:
        made.append(task_id)
        if len(made) == 1:
            redis.hset(lock, mapping={"id": "other", "gen": "0", "state": "running", "nonce": "n", "since": "1"})
        elif len(made) == 2:
            redis.delete(lock)
        return make(task_id, *args, **options)

    monkeypatch.setattr(app.amqp, "create_task_message", meanwhile)

    result = task.delay(1)

    assert made == [result.id] * 3
    assert locks(redis) == ids(redis) == {result.id}
    assert messages(redis)[0]["headers"]["singlebeat_lock"] == {"id": result.id, "key": lock}


# ---------------------------------------------------------------- what may go wrong


def test_a_call_whose_reply_is_lost_is_sent_once(server, redis):
    with LossyProxy(server) as proxy, apps(server.celery_url, singleton_backend_url=proxy.url) as app:
        task = define(app)
        task.delay(0)
        proxy.lose_next_reply(b"lpush")

        result = task.delay(1)

        assert proxy.lost == 1
    assert values(redis) == [0, 1]
    assert result.id in locks(redis)


def test_a_call_whose_run_is_over_before_the_repetition_is_sent_once(server, redis):
    with LossyProxy(server) as proxy, apps(server.celery_url, singleton_backend_url=proxy.url) as app:
        task = define(app)
        task.delay(0)
        proxy.lose_next_reply(b"lpush")
        proxy.meanwhile = lambda: redis.delete(*redis.keys("SINGLETONLOCK_*"))

        result = task.delay(1)

        assert proxy.lost == 1
    assert values(redis) == [0, 1]
    assert result.id in ids(redis)


@pytest.mark.parametrize("writes", [1, 2])
def test_a_request_that_is_executed_after_its_run_does_nothing(app, redis, monkeypatch, writes):
    """The network has held it back; its sender has repeated it and has gone on."""
    monkeypatch.setattr(RedisBackend, "sends", writes == 1)
    requests, run = [], RedisBackend._run

    def note(self: RedisBackend, name: str, keys: Any, args: Any) -> Any:
        requests.append((name, keys, args))
        return run(self, name, keys, args)

    monkeypatch.setattr(RedisBackend, "_run", note)
    task = define(app)
    result = task.delay(0)
    held_back = requests[-1]
    assert held_back[0] == ("send" if writes == 1 else "acquire")
    (lock,) = (key for key in redis.scan_iter("SINGLETONLOCK_*") if redis.hget(key, "id") == result.id)
    delivery, backend = Ref(lock, result.id, nonce="n1"), backend_of(app)
    backend.begin(delivery, lease=60, remember_for=60, task="t", arguments="")
    backend.finish_many([delivery], remember_for=60, ran=True)
    task.delay(1)

    run(backend, *held_back)

    assert values(redis) == [0, 1]
    assert result.id not in locks(redis)


def test_a_broken_connection_to_the_broker_leads_to_no_second_message(server, redis, monkeypatch):
    """Not even if the next reply of the broker is lost, too."""
    monkeypatch.setattr(outbox, "WRITTEN_FOR", 0.0)  # each call uses the connection to the broker
    with LossyProxy(server) as proxy:
        url = f"redis+socket://{proxy.path}"
        with apps(url, singleton_backend_url=server.url, result_backend=None) as app:
            task = define(app)
            task.delay(0)
            proxy.lose_next_reply(b"singlebeat:marker")
            proxy.meanwhile = lambda: proxy.lose_next_reply(b"LPUSH") if proxy.lost == 1 else None

            result = task.delay(1)

            assert proxy.lost == 1
    assert values(redis) == [0, 1]
    assert result.id in locks(redis)


def test_a_broker_that_cannot_be_reached_gets_no_second_message_later(server, redis, monkeypatch):
    """After all retries, one message is sent in a write of its own, and only once: its reply may be lost."""
    monkeypatch.setattr(outbox, "WRITTEN_FOR", 0.0)  # each call uses the connection to the broker
    with LossyProxy(server) as proxy:
        url = f"redis+socket://{proxy.path}"
        with apps(url, singleton_backend_url=server.url, result_backend=None) as app:
            task = define(app)
            task.delay(0)

            def lose_the_next() -> None:
                proxy.lose_next_reply(b"singlebeat:marker" if proxy.lost < 2 else b"LPUSH")

            proxy.meanwhile = lose_the_next
            lose_the_next()

            with pytest.raises(OperationalError):
                task.apply_async([1], retry_policy={"max_retries": 1})

            assert proxy.lost == 3
    assert values(redis) == [0, 1]


def test_a_sender_that_is_killed_leaves_no_lock_without_a_message(server, redis):
    code = (
        "import sys; from tests.system.apps import make_app; from tests.redis.test_send import define\n"
        f"task = define(make_app({server.celery_url!r}), ignore_result=True)\n"
        "print('ready', flush=True)\n"
        "for number in range(int(sys.argv[1]), int(sys.argv[1]) + 1_000_000): task.delay(number)\n"
    )
    for turn in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(turn * 1_000_000)], cwd=ROOT, stdout=subprocess.PIPE, env=os.environ
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            before = redis.llen("celery")
            wait_until(lambda n=before: redis.llen("celery") > n + random.randint(1, 50), what="calls")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()

    sent = [message["headers"]["id"] for message in messages(redis)]
    assert len(sent) == len(set(sent)) > 5
    assert locks(redis) == set(sent)


def test_a_broker_elsewhere_gets_its_messages_in_two_writes(server, redis, own_server, monkeypatch):
    with apps(own_server.celery_url, singleton_backend_url=server.url, result_backend=None) as app:
        task = define(app)
        first = task.delay(1)
        assert task.delay(1).id == first.id
        monkeypatch.setattr(RedisBackend, "send", None)  # it is not tried again
        task.delay(2)

    with own_server.client() as broker:
        assert values(broker) == [1, 2]
        assert ids(broker) == locks(redis)
    assert redis.exists("celery") == 0


@pytest.mark.parametrize("by", ["producer", "connection"])
def test_a_call_over_a_connection_of_ones_own_goes_there(server, redis, own_server, by):
    with apps(server.celery_url) as app, app.connection_for_write(own_server.celery_url) as connection:
        task = define(app)
        task.delay(0)
        given = {"connection": connection} if by == "connection" else {"producer": app.amqp.Producer(connection)}

        result = task.apply_async([1], **given)
        again = task.apply_async([1], **given)

    with own_server.client() as broker:
        assert values(broker) == [1]
    assert values(redis) == [0]
    assert result.id in locks(redis)
    assert (again.id, again.is_duplicate) == (result.id, True)


@pytest.mark.parametrize("by", ["delay", "many", "exchange", "producer", "connection", "many by producer", "hook"])
def test_a_lock_names_the_broker_of_its_message_however_it_is_sent(server, redis, monkeypatch, by):
    """In its note for the search for lost messages, without a round trip of its own."""
    there = {"producer", "connection", "many by producer"}
    with apps(server.celery_url) as app, app.connection_for_write(f"{server.celery_url}/7") as connection:
        task, producer = define(app), app.amqp.Producer(connection)
        if by == "hook":
            monkeypatch.setattr(before_task_publish, "receivers", [*before_task_publish.receivers])
            before_task_publish.connect(lambda **_: None, weak=False)
        match by:
            case "delay" | "hook":
                task.delay(1)
            case "many":
                task.apply_async_many([((1,), {}, {})])
            case "many by producer":
                task.apply_async_many([((1,), {}, {})], producer)
            case "exchange":
                with app.connection_for_write() as here:
                    app.amqp.queues["celery"](here).declare()
                task.apply_async((1,), exchange="celery", routing_key="celery")
            case "producer":
                task.apply_async((1,), producer=producer)
            case "connection":
                task.apply_async((1,), connection=connection)

        note = json.loads(redis.hget(task.generate_lock(task.name, [1], {}), "sent"))

    assert note["broker"] == f"redis://127.0.0.1:{server.port}/{7 if by in there else 0}"
    with server.client(db=7) as broker:
        assert len(values(broker)) == (by in there)


@pytest.mark.parametrize("overlap", ["skip", "raise"])
def test_a_duplicate_over_a_connection_of_ones_own_is_not_sent(app, server, redis, overlap):
    task = define(app, overlap=overlap)
    first = task.delay(1)

    with app.connection_for_write(server.celery_url) as connection, suppress(DuplicateTaskError):
        assert task.apply_async([1], connection=connection).id == first.id

    assert values(redis) == [1]


def test_a_transport_that_keeps_no_messages_gets_them_in_two_writes(server, redis):
    """With this option, kombu publishes at once in a batch, too."""
    with apps(server.celery_url, broker_transport_options={"retry_on_timeout": True}) as app:
        task = define(app)
        assert [task.delay(1).is_duplicate for _ in range(2)] == [False, True]
        with app.connection_for_write() as connection:
            assert "retry_on_timeout" in why_two_writes(app, connection)

    assert values(redis) == [1]


def test_a_call_after_a_failover_of_the_broker_goes_where_the_worker_is(server, redis, own_server):
    """The first server is back by then, with its data."""
    with apps(own_server.celery_url, broker_url=f"{own_server.celery_url};{server.celery_url}") as app:
        task = define(app, ignore_result=True)
        task.delay(0)
        own_server.client().save()
        own_server.kill()
        app.tasks["tests.system.apps.plain"].apply_async([1], ignore_result=True)
        own_server.start()

        task.delay(2)

    assert values(redis) == [1, 2]
    with own_server.client() as first:
        assert values(first) == [0]


def test_a_call_that_was_sent_otherwise_and_is_over_leaves_no_lock(app, redis, monkeypatch):
    task, send = define(app), app.send_task

    def elsewhere(*args: Any, producer: Any = None, **options: Any) -> Any:
        with app.connection_for_write() as connection:
            result = send(*args, producer=app.amqp.Producer(connection), **options)
        key = task.generate_lock(task.name, [1])
        backend_of(app).finish_many([Ref(key, result.id)], remember_for=60, ran=True)
        return result

    monkeypatch.setattr(app, "send_task", elsewhere)
    task.delay(1)

    assert locks(redis) == set()


def test_a_call_that_terminates_a_run_needs_one_connection(server, redis):
    with apps(server.celery_url, broker_pool_limit=1) as app:
        task = define(app, overlap="terminate_other")
        first = task.delay(1)
        redis.hset(task.generate_lock(task.name, [1]), "state", "running")

        assert task.delay(1).waits_for.task_id == first.id

    assert values(redis) == [1, 1]


@pytest.mark.parametrize("caller", ["a", "b"])
@pytest.mark.parametrize("broker", ["one write", "two writes"])
def test_a_call_terminates_no_run_that_makes_it(server, redis, own_server, monkeypatch, caller, broker):
    revoked, url = [], (own_server if broker == "two writes" else server).celery_url
    with apps(server.celery_url, broker_url=url) as app:
        monkeypatch.setattr(app.control, "revoke", lambda task_id, **_: revoked.append(task_id))
        task = define(app, overlap="terminate_other")
        run = Ref(task.generate_lock(task.name, [1]), "a", nonce="n")
        task.singleton_backend.begin(run, lease=60, remember_for=60, task=task.name, arguments="1")

        with run_of(task, caller):
            assert task.delay(1).waits_for.task_id == "a"

    assert revoked == ([] if caller == "a" else ["a"])


@pytest.mark.parametrize("backend", [None, "singlebeat.locks.memory:MemoryBackend"], ids=["Redis", "memory"])
@pytest.mark.parametrize("overlap", Overlap)
def test_a_call_that_replaces_a_run_is_sent_while_the_run_goes_on(server, redis, overlap, backend):
    """As the last step of a replacement, which another process sends under the id of the run."""
    with apps(server.celery_url, singleton_backend_class=backend) as app:
        task = define(app, overlap=overlap)
        run = Ref(task.generate_lock(task.name, [1]), "a", nonce="n")
        task.singleton_backend.begin(run, lease=60, remember_for=60, task=task.name, arguments="1")

        sent = task.apply_async([1], task_id="a", replaced_task_nesting=1)
        repeated = task.apply_async([1], task_id="a", overlap="skip")

        assert (sent.id, sent.is_duplicate, repeated.is_duplicate) == ("a", False, True)
        assert task.singleton_backend.renew_many([run], lease=60) == [Renewal.RUNNING]
    (message,) = messages(redis)
    assert message["headers"]["replaced_task_nesting"] == 1


def test_a_call_of_a_users_own_sender_is_locked_all_the_same(app, redis, monkeypatch):
    """As one that sends all tasks of an app over a producer of its own."""
    task, send = define(app), app.send_task

    def elsewhere(*args: Any, producer: Any = None, **options: Any) -> Any:
        with app.connection_for_write() as connection:
            return send(*args, producer=app.amqp.Producer(connection), **options)

    monkeypatch.setattr(app, "send_task", elsewhere)
    results = [task.delay(number) for number in (1, 1, 2)]

    assert values(redis) == [1, 2]
    assert locks(redis) == ids(redis) == {results[0].id, results[2].id}


@pytest.mark.parametrize("database", [0, 5])
def test_a_user_with_the_rights_of_the_docs_sends_in_two_writes(server, redis, database):
    joined = "&" if "?" in server.url else "?"
    selects = ["+select"] if database else []
    commands = ["+@all", "-@admin", *selects]
    redis.acl_setuser(
        "locker", enabled=True, passwords=["+pw"], keys=["SINGLETONLOCK_*", "singlebeat:workers"], commands=commands
    )
    try:
        url = f"{server.url.replace('://', '://locker:pw@', 1)}{joined}db={database}"
        with apps(server.celery_url, singleton_backend_url=url) as app:
            results = [define(app).delay(number) for number in (1, 1, 2)]
    finally:
        redis.acl_deluser("locker")

    assert [result.is_duplicate for result in results] == [False, True, False]
    assert values(redis) == [1, 2]
    with server.client(db=database) as client:
        assert locks(client) == ids(redis)


def test_names_of_senders_are_lent_to_one_request_at_a_time():
    senders = Senders()
    with senders.one() as first:
        with senders.one() as second:
            assert first != second
        assert senders.request() != senders.request()
    with senders.one() as third, senders.one() as fourth:
        assert {third, fourth} == {first, second}


def test_a_marker_that_is_gone_is_written_again(app, redis, monkeypatch):
    task = define(app)
    task.delay(1)
    redis.delete(*redis.keys("singlebeat:marker:*"))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 5)
    monkeypatch.setattr("singlebeat.locks.send.time", later)

    task.delay(2)

    assert values(redis) == [1, 2]
    assert locks(redis) == ids(redis)
    assert len(redis.keys("singlebeat:marker:*")) == 1


def test_a_user_of_the_locks_that_may_not_push_needs_two_writes(server, redis):
    redis.acl_setuser(
        "locker", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", "-lpush"]
    )
    try:
        url = server.url.replace("://", "://locker:pw@", 1)
        with apps(server.celery_url, singleton_backend_url=url) as app:
            task = define(app)
            results = [task.delay(number) for number in (1, 1, 2)]
    finally:
        redis.acl_deluser("locker")

    assert [result.is_duplicate for result in results] == [False, True, False]
    assert values(redis) == [1, 2]
    assert locks(redis) == ids(redis)


def test_a_queue_of_another_type_is_the_brokers_error(app, redis):
    task = define(app)
    task.delay(0)
    redis.delete("celery")
    redis.set("celery", "no list")

    with pytest.raises(Exception, match="WRONGTYPE"):
        task.delay(1)

    assert len(locks(redis)) == 1  # that of the first call


def test_a_full_server_takes_neither_lock_nor_message(own_server):
    with apps(own_server.celery_url) as app, own_server.client() as redis:
        task = define(app, ignore_result=True)
        task.delay(0)
        redis.config_set("maxmemory", 1)

        with pytest.raises(LockBackendError, match="maxmemory"):
            task.delay(1)

        redis.config_set("maxmemory", 0)
        assert values(redis) == [0]
        assert locks(redis) == ids(redis)


def test_a_server_that_refuses_writes_is_the_locks_error(own_server, monkeypatch):
    with apps(own_server.celery_url) as app, own_server.client() as redis:
        task = define(app, ignore_result=True)
        task.delay(0)
        own_server.client().config_set("min-replicas-to-write", 1)
        later = time.monotonic() + 2  # so the marker would be written again
        monkeypatch.setattr("singlebeat.locks.send.time", SimpleNamespace(monotonic=lambda: later))

        with pytest.raises(LockBackendError, match="NOREPLICAS"):
            task.delay(1)

        redis.config_set("min-replicas-to-write", 0)
        assert values(redis) == [0]


def test_a_user_that_may_not_limit_a_lock_writes_none(server, redis):
    redis.acl_setuser(
        "endless", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", "-pexpire"]
    )
    try:
        url = server.url.replace("://", "://endless:pw@", 1)
        with apps(server.celery_url, singleton_backend_url=url) as app, pytest.raises(LockBackendError):
            define(app).delay(1)
    finally:
        redis.acl_deluser("endless")

    assert locks(redis) == set()


def test_a_write_that_comes_too_late_sends_nothing(server, redis, monkeypatch):
    with apps(server.celery_url) as app:
        task = define(app)
        task.delay(0)
        backend = app.tasks["numbered"].singleton_backend
        monkeypatch.setattr(backend, "timeout", -1e6)

        with pytest.raises(LockBackendError, match="takes longer"):
            task.delay(1)

    assert values(redis) == [0]
    assert len(locks(redis)) == 1


# ---------------------------------------------------------------- what others are told


@pytest.mark.parametrize("hook", [before_task_publish, after_task_publish], ids=["before", "after"])
def test_receivers_of_publish_signals_hear_of_sent_calls_only(app, redis, hook):
    heard: list[str] = []
    task = define(app)

    def hear(sender: Any, headers: Any, **_: Any) -> None:
        heard.append(headers["id"])

    with connected(hook, hear):
        results = [task.delay(number) for number in (1, 1, 2)]

    assert heard == [results[0].id, results[2].id]
    assert values(redis) == [1, 2]


def test_task_sent_events_tell_of_sent_calls_only(app, redis):
    app.conf.task_send_sent_event = True
    task = define(app)
    with redis.pubsub() as ears:
        ears.psubscribe("*celeryev*")
        wait_until(lambda: ears.get_message(timeout=5), what="the subscription")

        results = [task.delay(number) for number in (1, 1, 2)]

        told: list[str] = []
        while message := ears.get_message(timeout=0.5):
            event = json.loads(b64decode(json.loads(message["data"])["body"]))
            told += [event["uuid"]] if event["type"] == "task-sent" else []
    assert told == [results[0].id, results[2].id]
    assert values(redis) == [1, 2]


def test_a_users_own_batch_of_messages_is_left_alone(app, redis):
    task, plain = define(app), app.tasks["tests.system.apps.plain"]
    with app.producer_pool.acquire() as producer, producer.batch():
        plain.apply_async(["in the batch"], producer=producer)
        task.apply_async([1])
        assert values(redis) == [1]

    assert values(redis) == [1, "in the batch"]


def test_a_duplicate_in_a_users_own_batch_ends_it_not(app, redis):
    task, plain = define(app), app.tasks["tests.system.apps.plain"]
    first = task.delay(1)
    with app.producer_pool.acquire() as producer, producer.batch():
        assert task.apply_async([1], producer=producer).id == first.id
        plain.apply_async([2], producer=producer)
        assert task.apply_async([1], producer=producer).id == first.id
        task.apply_async([3], producer=producer)
        assert values(redis) == [1]

    assert values(redis) == [1, 2, 3]


def test_outboxes_of_one_producer_take_a_message_each(app, redis):
    """As of two greenlets; and a batch that the user's own code opens meanwhile keeps no message."""
    with app.producer_pool.acquire() as producer:
        (first, first_box), (second, second_box) = collecting(producer), collecting(producer)
        with second.batch():
            second.publish("second", routing_key="celery")
        first.publish("first", routing_key="celery")
        producer.publish("another", routing_key="celery")
        second.publish("later", routing_key="celery")

    assert [len(box.commands) for box in (first_box, second_box)] == [1, 1]
    assert redis.llen("celery") == 2


def test_a_publish_that_kombu_retries_does_not_bypass_its_outbox(app, redis):
    def fail(_: object) -> None:
        raise ConnectionError("as asked")

    with app.producer_pool.acquire() as producer:
        copied, _ = collecting(producer, fail)
        with pytest.raises(OperationalError, match="as asked"):
            copied.publish("", routing_key="celery", retry=True, retry_policy={"interval_start": 0})

    assert not redis.exists("celery")


def test_a_producer_of_another_class_makes_the_message_in_its_way(app, redis):
    class Own(Producer):
        def publish(self, *args: Any, **options: Any) -> Any:
            return super().publish(*args, **{**options, "headers": {**options["headers"], "mine": self.mine}})

    task = define(app)
    with app.connection_for_write() as connection:
        producer = Own(connection, compression="zlib")
        producer.mine = 7
        result = task.apply_async([1], producer=producer)

    (message,) = messages(redis)
    assert (message["headers"]["id"], message["headers"]["mine"]) == (result.id, 7)
    assert message["headers"]["compression"] == "application/x-gzip"
    assert locks(redis) == {result.id}


def test_a_call_before_celery_has_bound_its_task_is_sent(app, redis):
    """Celery registers a task first, so another thread may call it meanwhile."""
    sent = []

    class Early(Singleton):
        abstract = True

        @classmethod
        def annotate(cls) -> None:
            assert cls.request_stack is None
            sent.append(app._tasks["numbered"].delay(1).id)
            super().annotate()

    task = app.task(numbered, name="numbered", base=Early, shared=False)

    assert task.delay(1).is_duplicate
    assert list(locks(redis)) == sent == list(ids(redis))


def test_a_forked_child_proves_the_broker_by_a_marker_of_its_own(app, redis):
    task = define(app, ignore_result=True)
    task.delay(1)
    pid = os.fork()
    if not pid:
        try:
            task.delay(2)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    task.delay(3)

    assert sorted(values(redis)) == [1, 2, 3]
    assert len(redis.keys("singlebeat:marker:*")) == len(redis.keys("singlebeat:sent:*")) == 2


@pytest.mark.parametrize("backend", ["singlebeat.locks.memory:MemoryBackend"])
def test_other_backends_send_in_two_writes(server, redis, backend):
    with apps(server.celery_url, singleton_backend_class=backend) as app:
        task = define(app)
        assert not isinstance(task.singleton_backend, RedisBackend)
        assert [task.delay(number).is_duplicate for number in (1, 1, 2)] == [False, True, False]

    assert values(redis) == [1, 2]


# ---------------------------------------------------------------- what operators are told


def test_doctor_tells_in_how_many_writes_all_is_sent(app, cli, no_worker_is_awaited, own_server):
    def told() -> list[str]:
        lines = cli("doctor", code=1).output.splitlines()
        return [line for line in lines if "calls of Singletons" in line or "due entries:" in line]

    calls, entries = told()
    assert "sent in one write" in calls
    assert "recorded in one write" in entries
    with connected(after_task_publish, lambda **_: None):
        calls, entries = told()
    assert "in two writes: there are receivers of before_task_publish or after_task_publish" in calls
    assert "recorded in one write" in entries
    app.conf.broker_url = own_server.celery_url
    calls, entries = told()
    assert "sent in two writes: the broker is not on the server of the locks" in calls
    assert "several writes, so sent at least once: schedule, locks and broker are not on one server" in entries
    app.conf.broker_url = "memory://"
    assert ["the broker is not Redis, whose messages alone go into a script" in line for line in told()] == [True] * 2


def test_doctor_says_which_option_keeps_messages_out_of_a_script(server, redis, cli, no_worker_is_awaited):
    with apps(server.celery_url, broker_transport_options={"retry_on_timeout": True}) as app:
        lines = cli("doctor", code=1, app=app).output.splitlines()

    said = [line for line in lines if "calls of Singletons" in line or "due entries:" in line]
    assert ["retry_on_timeout" in line for line in said] == [True, True]
    assert "only kombu 5.7" not in str(said)


# ---------------------------------------------------------------- many calls


def calls_for(*numbers: int, **options: Any) -> list[tuple[list[int], None, dict[str, Any]]]:
    return [([number], None, options) for number in numbers]


def test_many_calls_are_sent_in_a_few_round_trips(app, redis):
    task = define(app, ignore_result=True)
    task.delay(-1)
    redis.config_resetstat()

    results = task.apply_async_many(calls_for(*range(250)))

    assert values(redis) == [-1, *range(250)]
    assert [result.id for result in results] == [message["headers"]["id"] for message in messages(redis)][1:]
    assert {result.is_duplicate for result in results} == {False}
    assert len(locks(redis)) == 251
    assert calls_of(redis)["evalsha"] == 3


@pytest.mark.parametrize("ways", ["one write", "two writes", "hooks", "events"])
def test_duplicates_among_many_calls_get_the_result_of_the_first_one(server, redis, own_server, ways):
    conf: dict[str, Any] = {"task_send_sent_event": ways == "events"}
    broker = own_server if ways == "two writes" else server
    told: list[str] = []
    with apps(server.celery_url, broker_url=broker.celery_url, **conf) as app, ExitStack() as stack:
        if ways == "hooks":
            hook = connected(after_task_publish, lambda headers, **_: told.append(headers["id"]))
            stack.enter_context(hook)
        task = define(app)
        first = task.delay(1)
        results = task.apply_async_many(calls_for(1, 2, 2, 3, 2))

    assert [result.is_duplicate for result in results] == [True, False, True, False, True]
    assert results[0].id == first.id
    assert results[1].id == results[2].id == results[4].id
    assert values(broker.client()) == [1, 2, 3]
    assert told == ([first.id, results[1].id, results[3].id] if ways == "hooks" else [])


@pytest.mark.parametrize("overlap", ["buffer_one", "buffer_all", "cancel_other", "allow_all"])
def test_many_calls_of_each_mode_do_what_single_ones_do(app, redis, overlap):
    task = define(app, overlap=overlap)
    found = []
    for send in (task.apply_async_many, lambda calls: [task.apply_async(*call[:2], **call[2]) for call in calls]):
        redis.flushdb()
        task.delay(1)
        redis.hset(task.generate_lock(task.name, [1]), "state", "running")
        results = send(calls_for(1, 2, 1, 3, 1))
        waits = [message["headers"]["singlebeat_lock"].get("waits") for message in messages(redis)]
        assert {result.id for result in results} <= ids(redis)
        found.append(sorted(zip(values(redis), map(str, waits), strict=True)))
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", ["buffer_one", "cancel_other"])
def test_the_last_of_many_calls_wins_though_its_lock_ends_between_writes(app, redis, monkeypatch, overlap):
    """The first call waits for the run that holds the lock: it is sent before a later call can get the free lock."""
    task, write = define(app, unique_on=[], overlap=overlap), _ManyCalls.send
    run = task.delay(0)
    key = task.generate_lock(task.name, [0])
    redis.hset(key, mapping={"state": "running", "fence": 1})

    def send(self: _ManyCalls) -> Any:
        if any(made.plan.ticket.task_id == "last" for made in self._calls):
            task.singleton_backend.finish_many([Ref(key, run.id, 0)], remember_for=9)
        yield from write(self)

    monkeypatch.setattr(_ManyCalls, "send", send)
    first = [([number], None, {}) for number in range(1, MOST_MESSAGES + 1)]
    results = task.apply_async_many([*first, ([MOST_MESSAGES + 1], None, {"task_id": "last"})])

    last = json.dumps(MOST_MESSAGES + 1)
    if overlap == "buffer_one":
        assert results[-1].is_duplicate
        assert last in redis.hget(behind_key(key), "payload")
    else:
        assert redis.hget(behind_key(key), "id") == "last" or redis.hget(key, "id") == "last"


@pytest.mark.parametrize("first", ["cancel_other", "terminate_other", "followed"])
def test_of_many_calls_that_meet_a_held_lock_in_several_ways_the_last_wins(app, redis, first):
    """The first one is sent by itself: it must not evict the arguments of the last one, or be joined after it."""
    task = define(app, unique_on=[])
    run = task.delay(0)
    key = task.generate_lock(task.name, [0])
    redis.hset(key, mapping={"state": "running", "fence": 1, "id": run.id})
    task.apply_async([1], overlap="buffer_one")  # which waits
    given = {"overlap": "buffer_one", "link": task.si(9)} if first == "followed" else {"overlap": first}

    *_, last = task.apply_async_many([([2], None, given), ([3], None, {"overlap": "buffer_one"})])

    waits, payload = redis.hmget(behind_key(key), "id", "payload")
    assert (waits, last.is_duplicate) == (last.id, True)
    assert "[3]" in payload


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
@pytest.mark.parametrize("is_followed", [True, False])
def test_no_call_joins_one_that_another_waits_for(app, redis, overlap, is_followed):
    """The next step of its chain would get the result of another call."""
    task = define(app, unique_on=[])
    run = task.delay(0)
    key = task.generate_lock(task.name, [0])
    redis.hset(key, mapping={"state": "running", "fence": 1, "id": run.id})
    link = {"link": task.si(9)} if is_followed else {}
    first = task.apply_async([1], overlap=overlap, **link)

    second = task.apply_async([2], overlap="buffer_one")

    assert second.is_duplicate is not is_followed
    assert redis.hget(turn_key(key), "id") == (first.id if is_followed else None), "it goes first"
    assert {message["headers"]["id"] for message in messages(redis)} == {run.id, first.id, second.id}
    assert redis.hget(behind_key(key), "payload") in (["", None] if is_followed else ["[[2], {}]", "[[2],{}]"])


KNOWN = [Queue("real name", alias="short"), Broadcast("to all"), Queue("q", Exchange("media", "topic"), "video.#")]
AWAY = {"exchange": "media", "routing_key": "video"}


@pytest.mark.parametrize(
    ("own", "asked", "queue"),
    [
        pytest.param({}, {}, "celery", id="none"),
        pytest.param({"queue": "task's"}, {}, "task's", id="the task's"),
        pytest.param({}, {"queue": "call's"}, "call's", id="the call's"),
        pytest.param({"queue": "task's"}, {"queue": "call's"}, "call's", id="both"),
        pytest.param({}, {"queue": Queue("call's", Exchange("e"))}, "call's", id="a Queue"),
        pytest.param({}, {"queue": "short"}, "real name", id="an alias"),
        pytest.param({}, {"queue": "to all"}, "", id="Broadcast"),
        pytest.param({}, AWAY, "", id="an exchange"),
        pytest.param(AWAY, {"queue": "call's"}, "", id="the task's exchange"),
        pytest.param({"queue": "task's", "routes": AWAY}, {}, "", id="a route to an exchange"),
        pytest.param({"routes": {"priority": 6}}, {}, "celery", id="a route without a queue"),
    ],
)
def test_a_message_is_found_in_a_queue_that_only_its_call_names(server, redis, own, asked, queue):
    """A beat that knows tasks by name, or a command, may know neither; and no worker may read that queue just now."""
    routes = {"task_routes": {"numbered": own["routes"]}} if "routes" in own else {}
    with (
        connected(before_task_publish, lambda **_: None),  # so lock and message are written apart
        apps(server.celery_url, task_queues=KNOWN, task_create_missing_queues=True, **routes) as app,
        make_app(server.celery_url, {"singlebeat_lost_after": 0.1}) as stranger,
    ):
        task = define(app)
        for name in ("queue", "exchange", "routing_key"):
            setattr(task, name, own.get(name))
        call = task.apply_async([1], **asked)
        key = task.generate_lock(task.name, [1])
        lock = Waiting.of(key, next(record for _, record in backend_of(app).read([key])))
        (found,) = examine(stranger, [replace(lock, age=60, since=lock.since - 60)])

    assert lock.ref.task_id == call.id
    assert (lock.queue, lock.is_noted) == (queue, True)
    assert not found.outcome, found
    assert found.queue == queue


def test_a_lock_without_a_queue_is_in_doubt_for_each_app(server, redis, monkeypatch):
    """Apps may share tasks, the broker and the locks: each knows the queues of its own, and its workers answer."""
    lost_soon = {"singlebeat_lost_after": 0.1}
    monkeypatch.setattr(lost_messages._Broker, "ask", lambda *_, **__: {"w@h": {}})
    with apps(server.celery_url) as app, make_app(server.celery_url, lost_soon) as stranger:
        task, own = define(app), Ref("SINGLETONLOCK_a", "id")
        locks = [Call(own, name, "", 3600) for name in (task.name, f"{APP}.single")]
        found = []
        for call in locks:
            backend_of(app).acquire_many([call])
            record = next(record for _, record in backend_of(app).read([own.key]))
            lock = Waiting.of(own.key, record)
            found += examine(stranger, [replace(lock, age=600, since=lock.since - 600, left=3000)])
            redis.delete(own.key)

    assert [(bool(each.outcome), each.in_doubt) for each in found] == [(False, True), (False, True)]
    assert {each.reason for each in found} == {UNNOTED}


def test_a_router_of_the_user_is_asked_once_for_each_call(server, redis):
    """It may deal calls out to queues in turn."""
    turns = cycle(["q0", "q1"])
    with apps(server.celery_url, task_routes=[lambda *_, **__: {"queue": next(turns)}]) as app:
        task = define(app)
        for number in range(4):
            task.delay(number)
        with connected(before_task_publish, lambda **_: None):  # so lock and message are written apart
            for number in (4, 5):
                task.delay(number)
            task.apply_async([6], queue="named")
        notes = [json.loads(redis.hget(task.generate_lock(task.name, [number]), "sent")) for number in (1, 4, 6)]

    assert [redis.llen(queue) for queue in ("q0", "q1", "named")] == [3, 3, 1]
    assert [note.get("queue") for note in notes] == ["q1", "q0", "named"]


class Elsewhere(Task):
    """A user's class, which chooses the queue behind the Singleton."""

    abstract = True

    def apply_async(self, args=None, kwargs=None, **options):
        return super().apply_async(args, kwargs, **{**options, "queue": "elsewhere"})


class SingletonElsewhere(Singleton, Elsewhere):
    abstract = True


def chosen(x: int) -> None: ...


class Switched(Task):
    """A user's class, which may send nothing, give each message an id of its own, or return nothing."""

    abstract = True
    way: ClassVar[str] = "sends"

    def apply_async(self, args=None, kwargs=None, **options):
        if self.way == "sends nothing":
            return EagerResult(None, None, "REJECTED")
        if self.way == "has its own id":
            options["task_id"] = uuid()
        sent = super().apply_async(args, kwargs, **options)
        return None if self.way == "returns nothing" else sent


class SwitchedSingleton(Singleton, Switched):
    abstract = True


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("ways", ["one write", "two writes", "many"])
@pytest.mark.parametrize("way", ["sends nothing", "has its own id", "returns nothing"])
def test_a_class_that_sends_otherwise_leaves_no_lock_without_a_message(server, redis, monkeypatch, way, ways, protocol):
    with apps(server.celery_url, task_protocol=protocol) as app, ExitStack() as receivers:
        if ways == "two writes":
            receivers.enter_context(connected(before_task_publish, lambda **_: None))
        task = app.task(chosen, name="app.switched", base=SwitchedSingleton, shared=False)
        monkeypatch.setattr(Switched, "way", way)
        first = task.apply_async_many([([1], None, {})])[0] if ways == "many" else task.delay(1)
        held = locks(redis)
        monkeypatch.setattr(Switched, "way", "sends")
        again = task.delay(1)

    assert held == ({first.id} if way == "returns nothing" else set())
    assert again.is_duplicate is (way == "returns nothing")
    assert redis.llen("celery") == {"sends nothing": 1, "has its own id": 2, "returns nothing": 1}[way]


@pytest.mark.parametrize("is_written_apart", [False, True])
def test_a_lock_notes_the_queue_that_a_class_of_the_user_chooses(server, redis, is_written_apart):
    with apps(server.celery_url) as app, ExitStack() as receivers:
        if is_written_apart:
            receivers.enter_context(connected(before_task_publish, lambda **_: None))
        task = app.task(chosen, name="app.chosen", base=SingletonElsewhere, shared=False)
        task.delay(1)
        task.apply_async([2], queue="named")
        records = [redis.hgetall(task.generate_lock(task.name, [number])) for number in (1, 2)]

    assert redis.llen("elsewhere") == 2
    assert [json.loads(record["sent"])["queue"] for record in records] == ["elsewhere"] * 2
    assert [record.get("worker") for record in records] == [None] * 2


@pytest.mark.parametrize("priority", [None, 0, 3, 9, 20])
@pytest.mark.parametrize("queue", ["shop:bills", "shop:3", "shop"])
def test_a_lock_notes_a_queue_whose_name_has_the_separator_of_priorities(server, redis, queue, priority):
    steps = {"sep": ":", "priority_steps": list(range(10)), "queue_order_strategy": "priority"}
    with apps(server.celery_url, broker_transport_options=steps) as app:
        task = define(app)
        task.apply_async([1], queue=queue, priority=priority)
        note = json.loads(redis.hget(task.generate_lock(task.name, [1]), "sent"))

    assert note["queue"] == queue
    assert redis.llen(f"{queue}:{min(priority, 9)}" if priority else queue) == 1


@pytest.mark.parametrize("options", [{"priority_steps": list(range(10))}, {"sep": ":"}, {}], ids=str)
@pytest.mark.parametrize("priority", [5, 9])
def test_a_message_is_found_whatever_the_priorities_of_its_app(server, redis, options, priority):
    """Apps may share the broker and the locks: another one searches with its own settings."""
    lost_soon = {"singlebeat_lost_after": 0.1}
    with (
        apps(server.celery_url, broker_transport_options=options) as app,
        make_app(server.celery_url, lost_soon) as stranger,
    ):
        task = define(app)
        task.apply_async([1], queue="shop", priority=priority)
        key = task.generate_lock(task.name, [1])
        lock = Waiting.of(key, next(record for _, record in backend_of(app).read([key])))
        (found,) = examine(stranger, [replace(lock, age=600, since=lock.since - 600, left=3000)])

    assert redis.exists("shop") == 0
    assert (found.outcome, found.queue) == ("", "shop")


@pytest.mark.parametrize("many", [False, True])
def test_a_call_that_reaches_no_queue_leaves_no_lock(server, redis, many, logged):
    """Its worker has never run, so that no queue is bound yet: kombu drops the message, also without singlebeat."""
    way = {"exchange": "late", "routing_key": "k"}
    with apps(server.celery_url) as app:
        task = define(app)

        def call() -> Any:
            return task.apply_async_many([([1], None, way)])[0] if many else task.apply_async([1], **way)

        dropped = call()
        assert not dropped.is_duplicate
        assert not locks(redis)
        assert [told["id"] for told in logged("unsent")] == [dropped.id]
        with app.connection_for_write() as connection:
            Queue("late", Exchange("late"), "k")(connection).declare()

        assert not (sent := call()).is_duplicate
        assert call().id == sent.id
    assert redis.llen("late") == 1


def test_calls_whose_write_was_not_answered_get_no_lock_a_second_time(server, redis):
    """They may have run by then: with a lock they would run again."""
    conf = {"singleton_on_backend_error": "run", "broker_pool_limit": 1}
    with LossyProxy(server) as proxy, apps(server.celery_url, singleton_backend_url=proxy.url, **conf) as app:
        task = define(app)
        task.delay(0)
        proxy.meanwhile = lambda: proxy.lose_reply_of(SCRIPTS["send"])  # of each attempt
        proxy.lose_reply_of(SCRIPTS["send"])
        task.apply_async_many(calls_for(1, 2))
        assert proxy.lost > 1

    sent = [(message["headers"]["id"], "queued" in message["headers"][HEADER]) for message in messages(redis)[1:]]
    assert sorted({is_without_lock for _, is_without_lock in sent}) == [False, True]
    assert len({task_id for task_id, _ in sent}) == 2
    assert [is_without_lock for _, is_without_lock in sent].count(False) == 2


@pytest.mark.parametrize("overlap", ["buffer_all", "buffer_one", "skip", "allow_all"])
@pytest.mark.parametrize("many", [False, True])
def test_a_call_that_is_sent_without_its_lock_keeps_its_own_policy(server, redis, overlap, many):
    """The worker may reach the locks' server."""
    conf = {"singleton_on_backend_error": "run", "singleton_backend_url": "redis://127.0.0.1:1"}
    with apps(server.celery_url, **conf) as app:
        task = define(app, overlap="buffer_all" if overlap == "skip" else "skip")
        if many:
            task.apply_async_many([([1], None, {"overlap": overlap}), ([1], None, {"overlap": overlap})])
        else:
            task.apply_async([1], overlap=overlap)

        key = task.generate_lock(task.name, [1])
        for message in messages(redis):
            expected = unlocked_ticket(task, message["headers"]["id"], key, Overlap(overlap))
            assert message["headers"][HEADER] == expected.header()
        assert len(messages(redis)) == 1 + many


def test_a_spoilt_lock_of_one_of_many_calls_lets_no_duplicate_run(server, redis):
    with apps(server.celery_url, singleton_on_backend_error="run") as app:
        task = define(app)
        for number in (1, 2):
            task.delay(number)
        redis.set(task.generate_lock(task.name, [3]), "spoilt")

        results = task.apply_async_many(calls_for(1, 3, 2))

    assert [result.is_duplicate for result in results] == [True, False, True]
    assert values(redis) == [1, 2, 3]


def test_an_option_of_one_of_many_calls_is_its_own(app, redis):
    task = define(app)
    calls = [([1], None, {"task_id": "mine"}), ([2], None, {"queue": "other"}), ([3], None, {"overlap": "raise"})]
    results = task.apply_async_many(calls)

    assert results[0].id == "mine"
    assert values(redis, "other") == [2]
    with pytest.raises(DuplicateTaskError):
        task.apply_async_many([([4], None, {}), ([3], None, {"overlap": "raise"})])
    assert values(redis) == [1, 3, 4]


@pytest.mark.parametrize("case", ["one server", "hooks", "by itself"])
def test_a_duplicate_among_many_calls_is_raised_after_all_others_were_sent(app, redis, case):
    """Behind it in its write, in later ones, and where each call is sent by itself."""
    task, number = define(app, overlap="raise"), 2 * MOST_MESSAGES + 9
    app.conf.task_send_sent_event = case == "hooks"
    task.delay(5)
    options = {"add_to_parent": False} if case == "by itself" else {}

    for _ in range(2):
        with pytest.raises(DuplicateTaskError):
            task.apply_async_many([((each,), None, options) for each in range(number)])

    assert sorted(values(redis)) == [*range(number)]


def test_many_calls_need_one_connection(server, redis):
    with apps(server.celery_url, broker_pool_limit=1) as app:
        task = define(app, overlap="cancel_other")
        task.delay(1)
        task.apply_async_many(calls_for(1, 1, 2))

    assert sorted(set(values(redis))) == [1, 2]


def test_a_lost_reply_sends_many_calls_once(server, redis):
    with LossyProxy(server) as proxy, apps(server.celery_url, singleton_backend_url=proxy.url) as app:
        task = define(app)
        task.delay(0)
        proxy.lose_reply_of(SCRIPTS["send"])
        results = task.apply_async_many(calls_for(1, 2, 1))
        assert proxy.lost == 1

    assert values(redis) == [0, 1, 2]
    assert [result.is_duplicate for result in results] == [False, False, True]


def test_a_bad_call_among_many_says_so(app, redis):
    task = define(app)
    with pytest.raises(TypeError):
        task.apply_async_many([([1], None, {}), ([1, 2, 3], None, {})])

    assert locks(redis) == ids(redis)


def test_many_calls_are_late_together_or_not_at_all(app, redis, monkeypatch):
    """Else some of them would be sent, and sent again with the others."""
    task = define(app)
    task.delay(0)
    calls: list[Any] = []
    run = task.singleton_backend._run

    def stalled(name: str, keys: Any, args: Any) -> Any:
        calls.append(name)
        if name == "send" and calls.count("send") == 1:
            args = (*args[:6], 1, *args[7:])  # a deadline that has passed
        return run(name, keys, args)

    monkeypatch.setattr(task.singleton_backend, "_run", stalled)
    results = task.apply_async_many(calls_for(1, 2, 3))

    assert calls.count("send") == 2
    assert values(redis) == [0, 1, 2, 3]
    assert {result.id for result in results} < ids(redis)


def test_a_lost_lock_server_does_not_keep_many_calls_from_running(server, redis, own_server):
    conf = {"singleton_backend_url": own_server.url, "singleton_on_backend_error": "run"}
    with apps(server.celery_url, **conf) as app:
        task = define(app)
        own_server.kill()
        results = task.apply_async_many([([1], None, None), ([2], None, {})])

    assert values(redis) == [1, 2]
    assert ids(redis) == {result.id for result in results}


def test_planning_many_calls_may_send_a_task_itself(server, redis):
    with apps(server.celery_url, broker_pool_limit=1) as app:

        def key(value: int) -> int:
            app.tasks["tests.system.apps.plain"].apply_async([f"asked {value}"], ignore_result=True)
            return value

        task = define(app, unique_on=key)
        task.apply_async_many(calls_for(1, 2))

    assert set(values(redis)) >= {1, 2}


def test_a_duplicate_among_many_calls_is_no_child_of_the_running_task(app, redis):
    task = define(app)
    parent = app.tasks["tests.system.apps.plain"]
    with run_of(parent, "parent"):
        results = task.apply_async_many(calls_for(1, 1, 2))
        children = list(parent.request.children)

    assert [child.id for child in children] == [results[0].id, results[2].id]


@pytest.mark.parametrize(("args", "kwargs"), [({"1": 2}, None), ("1", None), (None, ["ab"])], ids=repr)
def test_arguments_of_a_wrong_type_are_refused_beside_a_held_call(app, redis, args, kwargs):
    def taking_all(*args: Any, **kwargs: Any) -> None: ...

    task = app.task(taking_all, name="any", base=Singleton, shared=False, unique_on=[])
    task.delay()

    with pytest.raises(TypeError, match=r"any: (kw)?args must be a"):
        task.apply_async(args, kwargs)
    with pytest.raises(TypeError, match=r"any: (kw)?args must be a"):
        task.apply_async_many([(args, kwargs, {})])

    assert len(messages(redis)) == 1


# ---------------------------------------------------------------- questions to workers over the same connection


def test_calls_leave_replies_of_workers_to_those_who_asked(server, redis, monkeypatch):
    """Kombu awaits replies with a BRPOP, and leaves it in flight on the pooled connection when it stops waiting."""
    monkeypatch.setattr(outbox, "WRITTEN_FOR", 0.0)  # each call writes the marker
    got = list[int]()
    with apps(server.celery_url, broker_pool_limit=1) as app, Connection(server.celery_url) as other:
        task = define(app)
        with app.pool.acquire() as connection:
            queue = Queue("replies")
            connection.Consumer([queue], callbacks=[lambda body, _: got.append(body)], no_ack=True).consume()

        for number in range(4):
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.01)
            assert connection.default_channel._in_poll

            result = task.delay(number)
            Producer(other).publish(number, routing_key="replies")
            connection.drain_events(timeout=10)

            assert (result.id in locks(redis), got) == (True, [*range(number + 1)])
