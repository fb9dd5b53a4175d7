"""What the worker's main process makes of a delivery, with a real broker and no worker around it."""

from __future__ import annotations

import gc
import json
import logging
import re
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery import Celery, Task, _state, chain, chord, states
from celery.app.trace import build_tracer
from celery.canvas import Signature
from celery.concurrency.solo import TaskPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from celery.result import AsyncResult
from celery.signals import before_task_publish, task_prerun
from celery.worker import state
from celery.worker.request import create_request_cls
from celery.worker.strategy import proto1_to_proto2
from kombu import Producer
from kombu.asynchronous.timer import Timer
from kombu.compression import decompress
from kombu.exceptions import OperationalError
from kombu.serialization import registry
from kombu.utils.uuid import uuid

from singlebeat import Singleton, signals
from singlebeat.beat import lost_messages as lost
from singlebeat.beat.result_backend import read_end
from singlebeat.broker import own_broker
from singlebeat.config import Config
from singlebeat.errors import LockBackendError
from singlebeat.locks import backend_of
from singlebeat.locks.base import HEADER, RUN_HEADER, Call, IfHeld, Ref, Renewal, Ticket, Verdict
from singlebeat.locks.key import behind_key, done_key, turn_key
from singlebeat.locks.memory import MemoryBackend
from singlebeat.locks.modes import LockMode
from singlebeat.locks.redis import RedisBackend
from singlebeat.run_results import MESSAGE_LOST, RAN_ELSEWHERE, flush_ends
from singlebeat.server_errors import is_denied
from singlebeat.tasks.gate import Postponed, Refused, Unsent, postpone
from singlebeat.tasks.renewer import GATE_PAUSE, renewer_of
from singlebeat.tasks.request import REAPED_AFTER, Request
from singlebeat.tasks.resend import MESSAGE
from singlebeat.tasks.succession import let_retries_keep_lock
from tests.support import connected, ended_well, fork, wait_until, without
from tests.system.apps import make_app

Deliver = Callable[..., Request]

#: Of Celery's result backend, with a recent redis-py.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")


@pytest.fixture
def deliver(app: Celery) -> Iterator[Deliver]:
    """Returns the request that a message makes, whoever has written it; without arguments, that of the next one."""
    solo = TaskPool(app=app)
    app.set_current()
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:

        def deliver(task: Any, args: Any = None, kwargs: Any = None, pool: Any = solo, **headers: Any) -> Request:
            if not isinstance(task, Singleton):
                let_retries_keep_lock(task)  # as a worker does when it starts
            if args is not None:
                body = (args, {} if kwargs is None else kwargs, {})
                queue.put(body, headers={"task": task.name, "id": uuid(), "argsrepr": repr(args), **headers})
            message = queue.get(timeout=5)
            # As Celery's strategy makes it.
            kind = create_request_cls(Request, task, pool, None, None, app=app)
            given: dict[str, Any] = {"on_ack": message.ack_log_error, "on_reject": message.reject_log_error}
            if "id" not in message.headers:
                read = proto1_to_proto2(message, message.payload)
                given |= zip(("body", "headers", "decoded", "utc"), read, strict=True)
            return kind(message, app=app, task=task, **given)

        yield deliver
    _state._set_current_app(None)
    gc.collect()  # results end their subscriptions, which they cannot once the server is gone
    gc.freeze()  # what is left stays: the next test does not look through it again


def same(user: Any) -> Any:
    return user


def task_of(app: Celery, **options: Any) -> Any:
    """Return a Singleton with these options, of one argument."""
    return app.task(same, name="app.task", base=Singleton, shared=False, **options)


class OwnKey(Singleton):
    """A Singleton whose user has written the function that makes its key."""

    abstract = True

    def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> str:
        return f"SINGLETONLOCK_{task_args[0]['id']}"


@pytest.fixture
def own_serializer() -> Iterator[None]:
    registry.register("own", json.dumps, json.loads, content_type="application/x-own", content_encoding="utf-8")
    yield
    registry.unregister("own")


@pytest.mark.parametrize("asked", [{}, {"serializer": "own"}, {"compression": "gzip"}], ids=str)
def test_a_message_that_waits_for_its_turn_is_encoded_as_it_was(app, deliver, own_serializer, asked):
    app.conf.accept_content = ["json", "own"]
    task = task_of(app)
    task.apply_async((["a"],), **asked)

    first = deliver(task)
    with pytest.raises(Postponed):
        postpone(task, first._context, first.ticket, countdown=0, why="its lock is held")
    again = deliver(task)

    assert again.content_type == first.content_type
    assert again.request_dict.get("compression") == first.request_dict.get("compression")
    assert set(again.request_dict[HEADER]) == set(first.request_dict[HEADER])


class Marks(Singleton):
    """A user's class, which changes arguments before each run."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)
        kwargs["notes"].append("before_start")


@pytest.mark.parametrize(
    ("base", "protocol", "compression"), [(Marks, 2, None), (Marks, 2, "gzip"), (Marks, 1, None), (Task, 2, None)]
)
def test_a_call_that_waits_is_sent_again_as_it_came(app, deliver, redis, base, protocol, compression):
    """A receiver takes the tenant out of the arguments, for example, and would not find it at the next try.

    A pair of receivers encodes another argument, and decodes it: twice encoded, it would be decoded once.
    """
    app.conf.task_protocol = protocol
    sent, tenants, ran = list[bool](), list[str](), list[Any]()

    def encode(body: Any, **_: Any) -> None:
        kwargs = body[1] if protocol == 2 else body["kwargs"]
        if protocol == 2:  # the key of a call of protocol 1 is made from what has come
            kwargs["tenant"] = "acme" if not sent else "of this process"
        sent.append(True)
        kwargs["text"] = f"<{kwargs['text']}>"

    def decode(kwargs: Any, **_: Any) -> None:
        tenants.append(kwargs.pop("tenant", "public" if protocol == 2 else "acme"))
        kwargs["text"] = kwargs["text"][1:-1]

    def body(notes: Any, text: str = "", value: str = "a") -> None:
        ran.append((value, notes, text))

    task = app.task(body, name="app.tenant", base=base, shared=False, overlap="buffer_all", unique_on=["value"])
    lock = task.generate_lock(task.name, [[]]) if base is Marks else "SINGLETONLOCK_a"
    other = Ref(lock, "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    headers = {HEADER: Ticket("b", other.key, other.key, waits=True).header()}
    arguments = [], {"notes": [], "text": "secret"}

    with connected(before_task_publish, encode), connected(task_prerun, decode):
        Task.apply_async(task, *arguments, task_id="b", compression=compression, headers=headers)
        for _ in range(3):
            started(deliver(task))
        assert MESSAGE not in json.loads(redis.lindex("celery", 0))["headers"]
        backend_of(app).finish_many([other], remember_for=60)
        started(deliver(task))

    assert {*tenants} == {"acme"}
    assert ran == [("a", ["before_start"] if base is Marks else [], "secret")]


@pytest.mark.parametrize("protocol", [2, 1])
def test_a_call_that_waits_passes_by_the_own_send_task_of_its_app(app, deliver, redis, protocol):
    """It has seen the call when it was made: here it would name another user, and encode the text once more."""
    user, makers = ["alice"], list[Any]()

    class Own(type(app)):
        def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            makers.append(name)
            return super().send_task(name, (*args, user[0]), {"text": f"<{kwargs['text']}>"}, **options)

    app.__class__ = Own
    app.conf.task_protocol = protocol
    ran = list[Any]()

    def body(user: str, text: str = "") -> None:
        ran.append((user, text))

    options = {"typing": False, "overlap": "buffer_all", "unique_on": []}
    task = app.task(body, name="app.own", base=Singleton, shared=False, **options)
    other = Ref(task.generate_lock(task.name, ["any"]), "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    headers = {HEADER: Ticket("b", other.key, other.key, waits=True).header()}
    Task.apply_async(task, [], {"text": "secret"}, headers=headers, task_id="b")
    user[0] = "worker"

    for _ in range(3):
        started(deliver(task))
    backend_of(app).finish_many([other], remember_for=60)
    started(deliver(task))

    assert ran == [("alice", "<secret>")]
    assert len(makers) == 1


def of_any_priority(redis: Any) -> list[str]:
    """Return the messages in the default queue, which is a list for each priority."""
    lists = [key for key in redis.keys("celery*") if redis.type(key) == "list"]
    return [raw for key in lists for raw in redis.lrange(key, 0, -1)]


def read(raw: str) -> Mapping[str, Any]:
    """Return a message with its body, without its ticket and what is made anew at each send."""
    message = json.loads(raw)
    content, headers, properties = b64decode(message["body"]), message["headers"], message["properties"]
    body = json.loads(decompress(content, headers["compression"]) if "compression" in headers else content)
    for fields in (headers, body if isinstance(body, dict) else {}):
        for name in (HEADER, "eta"):
            fields.pop(name, None)
    del properties["delivery_tag"], properties["delivery_info"]
    return {**message, "body": body}


@pytest.mark.parametrize("protocol", [2, 1])
@pytest.mark.parametrize("asked", [{}, {"compression": "gzip"}, {"priority": 3, "delivery_mode": 1}], ids=str)
def test_a_call_that_waits_is_sent_again_byte_for_byte(app, deliver, redis, protocol, asked):
    """Receivers have seen it when it was made: here they know another user, and would add their callback once more."""
    app.conf.task_protocol = protocol
    task, users = task_of(app), ["alice"]
    follows = task.si("follows")

    def sign(headers: Any, body: Any, **_: Any) -> None:
        headers["user"] = users[-1]
        (body[2] if protocol == 2 else body)["callbacks"] = [follows]
        users.append("worker")

    with connected(before_task_publish, sign):
        # Of a call in a task, which is its parent.
        task.apply_async(["a"], headers={"tenant": "acme"}, parent_id="p", root_id="r", reply_to="me", **asked)
        (first,) = map(read, of_any_priority(redis))
        request = deliver(task)
        with pytest.raises(Postponed):
            postpone(task, request._context, request.ticket, countdown=0, why="its lock is held")

    (again,) = map(read, of_any_priority(redis))
    assert users == ["alice", "worker"]
    assert again == first


def test_no_route_is_asked_about_a_call_that_waits(app, deliver, redis):
    """It goes where it has come from, and a receiver may have changed arguments that the function reads."""
    asked = list[Any]()
    app.conf.task_routes = (lambda name, args, *_, **__: asked.append(args),)
    task = task_of(app)
    first = task.delay("a")
    request = deliver(task)
    asked.clear()

    with pytest.raises(Postponed):
        postpone(task, request._context, request.ticket, countdown=0, why="its lock is held")

    assert asked == []
    assert [json.loads(raw)["headers"]["id"] for raw in queued(redis)] == [first.id]


@pytest.mark.parametrize("given", [{"args": ["a"]}, {"kwargs": {"user": "a"}}])
def test_a_message_of_protocol_1_may_lack_arguments(app, deliver, redis, given):
    task = task_of(app, overlap="buffer_all")
    other = Ref(task.generate_lock(task.name, ["a"]), "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        queue.put({"task": task.name, "id": "b", **given})

    started(deliver(task))

    again = deliver(task)
    assert (again.id, again.ticket.waited) == ("b", 1)
    assert (list(again.args), again.kwargs) == (given.get("args", []), given.get("kwargs", {}))


@pytest.mark.parametrize("base", [Singleton, None])
def test_no_body_goes_into_the_headers_of_a_retry(app, deliver, redis, base):
    """RabbitMQ closes a connection over which a header of more than 128 kB comes."""
    seen = list[Any]()

    def retries(self: Any, text: str) -> None:
        seen.append(self.request.headers)
        seen.append(repr(self.request))
        raise self.retry(countdown=0)

    task = app.task(retries, name="app.retries", bind=True, base=base, shared=False)
    headers = {} if base else {HEADER: {"id": "a", "key": "SINGLETONLOCK_a"}}
    task.apply_async(["secret"], task_id="a", headers={**headers, "of": "mine"})

    started(deliver(task))

    (sent,) = (json.loads(message)["headers"] for message in queued(redis))
    assert '[["secret"]' not in str(sent)
    assert '[["secret"]' not in str(seen)
    assert (sent["of"], seen[0]["of"]) == ("mine", "mine")


class Refusing(Task):
    """A user's class, which sends no retries during maintenance."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return None if options.get("retries") else super().apply_async(args, kwargs, **options)


class RefusingSingleton(Singleton, Refusing):
    abstract = True


@pytest.mark.parametrize("base", [RefusingSingleton, Refusing])
def test_a_retry_that_a_class_of_the_user_does_not_send_keeps_no_lock(app, deliver, redis, base):
    task = app.task(retries_later, name="app.later", bind=True, base=base, shared=False)
    started(deliver(task, [], id="a", **{HEADER: {"id": "a", "key": "SINGLETONLOCK_a"}}))
    renewer_of(app).flush()

    assert redis.llen("celery") == 0
    assert not redis.exists("SINGLETONLOCK_a")


def test_a_call_that_waits_goes_back_to_its_queue(app, deliver, redis):
    """An own ``send_task`` may choose another one by the time of day, or in another release."""
    send_task = app.send_task

    def send_elsewhere(*args: Any, **options: Any) -> AsyncResult:
        return send_task(*args, **{**options, "queue": "elsewhere"})

    task = task_of(app, overlap="buffer_one")
    first, waiting = task.delay("a"), uuid()
    request = deliver(task)
    backend_of(app).begin(request.ticket.run, lease=60, remember_for=60, task=task.name, arguments="")
    task.apply_async(["a"], task_id=waiting)
    app.send_task = send_elsewhere

    started(deliver(task))

    lock = task.generate_lock(task.name, ["a"])
    assert redis.hget(lock, "id") == first.id
    place = redis.hgetall(behind_key(lock))
    assert (place["id"], json.loads(place["sent"])["queue"]) == (waiting, "celery")
    assert [json.loads(raw)["headers"]["id"] for raw in queued(redis)] == [waiting]


def test_a_call_that_runs_in_a_batch_frees_its_lock_with_its_message(app, deliver, redis):
    """A task of celery-batches has a strategy of its own: no pool gets the request, and none reports its end."""
    task = task_of(app)
    first = task.delay("a")
    request = deliver(task)
    assert task.delay("a") == first, "a duplicate"

    request.acknowledge()

    renewer_of(app).flush()
    assert task.delay("a") != first


def test_a_message_waits_no_longer_than_it_should_though_clocks_differ(app, deliver):
    """Its sender's clock is ten minutes ahead of this worker's. Other times are those of callers."""
    task, ahead = task_of(app, overlap="buffer_all"), datetime.now(UTC) + timedelta(minutes=10)

    def eta_of(ticket: Ticket, **headers: Any) -> float:
        shown = {HEADER: ticket.header(), "eta": ahead.isoformat(), **headers}
        return (deliver(task, ["a"], id="a", **shown).eta - datetime.now(UTC)).total_seconds()

    waits = Ticket("a", "SINGLETONLOCK_a", waits=True)
    assert eta_of(replace(waits, pause=2.0)) <= 2
    assert eta_of(waits) > 500
    assert eta_of(replace(waits, pause=2.0), retries=1) > 500


def test_a_message_that_is_sent_again_says_how_long_it_waits(app, deliver):
    task = task_of(app, overlap="buffer_all")
    other = Ref(task.generate_lock(task.name, ["a"]), "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    task.delay("a")

    started(deliver(task))
    again = deliver(task)

    assert again.ticket.pause > 0
    assert again.eta <= datetime.now(UTC) + timedelta(seconds=again.ticket.pause)
    assert again.ticket.successor().pause == 0


@pytest.mark.parametrize("parent", [None, "p"])
def test_a_message_that_waits_for_its_turn_keeps_its_parent(app, deliver, parent):
    """A sender that is no task gives it none: Celery would take the message itself for its parent."""
    task = task_of(app, overlap="buffer_all")
    other = Ref(task.generate_lock(task.name, ["a"]), "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    sent = task.apply_async(["a"], parent_id=parent, root_id=parent)

    for _ in range(2):
        request = deliver(task)
        assert (request.parent_id, request.root_id) == (parent, parent or sent.id)
        started(request)


@pytest.mark.parametrize(
    ("when", "seconds"),
    [(None, 3600), (0, 3600), (9000, 12_600), (timedelta(seconds=9000), 12_600)],
    ids=["not said", "now", "countdown", "eta"],
)
def test_the_lock_of_a_plain_task_waits_for_its_retry_with_the_countdown(app, deliver, redis, when, seconds):
    def body(self: Any) -> None:
        eta = datetime.now(UTC) + when if isinstance(when, timedelta) else None
        raise self.retry(**({"eta": eta} if eta else {} if when is None else {"countdown": when}))

    plain, task_id, lock = app.task(body, name="app.plain", bind=True, shared=False), uuid(), "SINGLETONLOCK_a"
    plain.default_retry_delay = 0
    started(deliver(plain, [], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert redis.hmget(lock, "state", "gen") == ["queued", "1"]
    assert seconds - 300 < redis.pttl(lock) / 1000 <= seconds


class Unheard(Task):
    """A task whose hook fails, as one that tells a chat of the retry while that is away."""

    def on_retry(self, *_: Any, **__: Any) -> None:
        raise OSError("no chat")


def retries_and_returns(self: Any) -> None:
    self.retry(countdown=600, throw=False)


@pytest.mark.parametrize(
    ("base", "body"), [(Unheard, "retries_later"), (Task, "retries_and_returns")], ids=["hook fails", "throw=False"]
)
def test_a_plain_run_leaves_its_lock_to_its_retry_however_it_ends(app, deliver, redis, base, body):
    task = app.task(globals()[body], name="app.later", bind=True, base=base, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"

    started(deliver(task, [], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert redis.hmget(lock, "id", "state", "gen") == [task_id, "queued", "1"]


def test_a_plain_run_that_raises_retry_by_hand_frees_its_lock(app, deliver, redis):
    """Celery sends no message then."""

    def body() -> None:
        raise Retry("again", None, 600)

    task, task_id, lock = app.task(body, name="app.hand", shared=False), uuid(), "SINGLETONLOCK_a"

    started(deliver(task, [], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert not redis.exists(lock)


@pytest.mark.parametrize("by", ["itself", "another task"])
def test_a_plain_task_that_replaces_its_run_keeps_the_lock(app, deliver, redis, by):
    another = app.task(same, name="app.another", shared=False)
    let_retries_keep_lock(another)

    def body(self: Any, user: Any) -> None:
        raise self.replace({"itself": self, "another task": another}[by].si("b"))

    task = app.task(body, name="app.replaces", bind=True, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"
    about = {HEADER: {"id": task_id, "key": lock}, RUN_HEADER: {"entry": "e"}}

    started(deliver(task, ["a"], id=task_id, **about))
    renewer_of(app).flush()

    assert redis.hmget(lock, "id", "state") == [task_id, "queued"]
    replacement = deliver({"itself": task, "another task": another}[by])
    assert (replacement.id, replacement.ticket.key) == (task_id, lock)
    assert replacement.request_dict[RUN_HEADER] == {"entry": "e"}
    started(replacement)
    renewer_of(app).flush()
    assert (redis.hget(lock, "state") == "queued") == (by == "itself")


@pytest.mark.parametrize("by", ["an equal call", "another call", "another task", "a retry"])
def test_a_singleton_that_goes_on_as_another_call_is_still_of_its_entry(app, deliver, redis, by):
    """Else no tool would name the entry if that fails."""
    another = app.task(same, name="app.another", base=Singleton, shared=False)

    def body(self: Any, user: Any) -> None:
        if by == "a retry":
            raise self.retry(countdown=0, headers={"user": "u"})
        args = [user] if by == "an equal call" else ["b"]
        raise self.replace((another if by == "another task" else self).si(*args))

    task = app.task(body, name="app.goes_on", bind=True, base=Singleton, shared=False)
    task_id, lock = uuid(), task.generate_lock(task.name, ["a"])
    about = {HEADER: {"id": task_id, "key": lock}, RUN_HEADER: {"entry": "e"}}

    started(deliver(task, ["a"], id=task_id, **about))
    renewer_of(app).flush()

    following = deliver(another if by == "another task" else task)
    assert following.id == task_id
    assert following.request_dict[RUN_HEADER] == {"entry": "e"}


@pytest.mark.parametrize("canvas", ["chain", "chord", "chunks"])
def test_a_plain_task_that_replaces_its_run_by_several_frees_its_lock(app, deliver, redis, canvas):
    """Celery sends some of them later, or in other processes."""
    another = app.task(same, name="app.another", shared=False)
    let_retries_keep_lock(another)

    def body(self: Any, user: Any) -> None:
        several = [another.si("b"), another.si("c")]
        canvases = {"chain": lambda: chain(*several), "chord": lambda: chord(several, another.si("d"))}
        raise self.replace({**canvases, "chunks": lambda: another.chunks([("b",), ("c",)], 1)}[canvas]())

    task = app.task(body, name="app.replaces", bind=True, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"

    started(deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert not redis.exists(lock)


def test_a_plain_task_may_replace_its_run_by_a_task_of_another_app(app, deliver, redis):
    def body(self: Any, user: Any) -> None:
        raise self.replace(app.signature("other.work", ("b",), immutable=True))

    task = app.task(body, name="app.replaces", bind=True, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"

    started(deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert redis.llen("celery") == 1
    assert not redis.exists(lock)
    redis.delete("celery")


def test_a_task_whose_retries_keep_their_lock_is_sent_as_before(app):
    """By beat in the same worker (-B), and by code that patches Celery later."""
    task = app.task(same, name="app.task", shared=False)

    let_retries_keep_lock(task)

    assert "apply_async" not in vars(task)


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_the_reason_of_used_up_retries_quotes_no_arguments(app, deliver, redis, base):
    """Celery's own error does, by their places."""

    def body(self: Any, user: str, password: str) -> None:
        raise self.retry(countdown=0)

    task = app.task(body, name="app.used_up", bind=True, base=base, shared=False, max_retries=0)
    task_id = uuid()
    about = {HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}, RUN_HEADER: {"entry": "e"}}

    started(deliver(task, ["ann", "s3cret"], {}, id=task_id, **about))
    flush_ends(app)

    ((_, end),) = redis.xrange("redbeat::runs")
    assert f"Can't retry app.used_up[{task_id}]" in end["reason"]
    assert "s3cret" not in str(end)
    assert "s3cret" not in read_end(app, task_id, timeout=5).error


def test_a_call_from_a_run_under_another_id_leaves_its_lock_alone(app, deliver, redis):
    def body(self: Any) -> None:
        self.apply_async(task_id="another", countdown=600)

    task, task_id, lock = app.task(body, name="app.calls", bind=True, shared=False), uuid(), "SINGLETONLOCK_a"

    started(deliver(task, [], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert not redis.exists(lock)
    assert deliver(task).ticket is None


def why_not_late(app: Celery, redis: Any, lock: str) -> str:
    """Return why the message of a lock may yet start though it was queued a minute ago."""
    redis.hincrby(lock, "since", -60_000)
    redis.hdel(lock, "renewed")  # while it ran, maybe: long before it was queued
    ((_, record),) = backend_of(app).read([lock])
    return lost.may_yet_start(lost.Waiting.of(lock, record), Config.of(app))


@pytest.mark.parametrize("key", ["", "SINGLETONLOCK_own"], ids=["apply_async", "lock_and_run"])
@pytest.mark.parametrize("options", [{"lock_expiry": 3000}, {}], ids=["lock_expiry", "expires"])
def test_a_call_with_a_countdown_is_not_late_before_its_time(app, redis, options, key):
    """Neither ``expires`` nor ``lock_expiry``, which end the lock early, hide that it has to wait."""
    task = task_of(app, **options)
    given = {"countdown": 600, **({} if options else {"expires": 3000})}
    if key:
        task.lock_and_run(key, args=["a"], **given)
    else:
        task.apply_async(["a"], **given)

    said = why_not_late(app, redis, key or task.generate_lock(task.name, ["a"]))

    assert re.fullmatch(r"its message counts as late only after 6(30|29\.\d+) s", said)


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_retry_with_a_countdown_is_not_late_before_its_time(app, deliver, redis, base):
    """It is in the worker, which shows that it lives, or in the broker, which may delay it."""
    task = app.task(retries_later, name="app.later", bind=True, base=base, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"

    started(deliver(task, [], id=task_id, expires=later(3000), **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()

    assert redis.hmget(lock, "state", "gen") == ["queued", "1"]
    assert 2400 < redis.ttl(lock) <= 3000
    assert re.fullmatch(r"its message counts as late only after 6(30|29\.\d+) s", why_not_late(app, redis, lock))


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_retry_keeps_its_lock_though_its_sender_has_copied_the_headers(app, deliver, redis, base):
    """Sentry puts them into the message once more, and Celery passes that copy to the retry."""
    task = app.task(retries_later, name="app.later", bind=True, base=base, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"
    headers = {HEADER: {"id": task_id, "key": lock}}

    started(deliver(task, [], id=task_id, **headers, headers=headers))
    renewer_of(app).flush()

    assert redis.hmget(lock, "state", "gen") == ["queued", "1"]
    retried = deliver(task)
    assert retried.ticket.generation == 1
    started(retried)
    renewer_of(app).flush()
    assert redis.hmget(lock, "state", "gen") == ["queued", "2"]


@pytest.mark.parametrize("mode", [mode for mode in LockMode if mode != LockMode.UNTIL_EXPIRED])
def test_a_retry_under_another_id_is_no_duplicate_of_its_own_run(app, deliver, redis, mode):
    def body(self: Any) -> int:
        if self.request.retries == 0:
            raise self.retry(countdown=0, task_id="another")
        return self.request.retries

    task = app.task(body, name="app.renamed", bind=True, base=Singleton, shared=False, lock=mode)
    task.apply_async(task_id="first")

    started(deliver(task))
    renewer_of(app).flush()

    retried = deliver(task)
    assert (retried.id, retried.request_dict["retries"]) == ("another", 1)
    started(retried)
    renewer_of(app).flush()
    assert messages(redis) == (0, 0)


def calls_and_retries(self: Any, value: str) -> None:
    """Retry with arguments whose lock an equal call holds by then, and with headers of its own."""
    self.apply_async([value], task_id="another")
    raise self.retry(args=[value], headers={"user": "u"}, countdown=0)


@pytest.mark.parametrize("lock", [mode for mode in LockMode if mode != LockMode.UNTIL_EXPIRED])
def test_a_retry_with_headers_of_its_own_is_no_new_call(app, deliver, redis, lock):
    """So it is with an older Sentry in the sender: what it puts into the message replaces the headers of the retry."""
    task = app.task(calls_and_retries, name="app.calls", bind=True, base=Singleton, shared=False, lock=lock)
    first = task.delay("a")
    request = deliver(task)

    started(request)
    renewer_of(app).flush()

    sent = [(headers["id"], headers["retries"]) for headers in (json.loads(raw)["headers"] for raw in queued(redis))]
    assert (first.id, 1) in sent
    assert len(sent) <= 2


def replaces_itself_by(self: Any, other: str) -> None:
    """Pass its headers on, with its ticket among them."""
    raise self.replace(self.app.tasks[other].si("a").set(headers={HEADER: vars(self.request)[HEADER]}))


def test_a_task_that_replaces_another_has_a_lock_of_its_own(app, deliver, redis):
    other = task_of(app)
    task = app.task(replaces_itself_by, name="app.replaced", bind=True, base=Singleton, shared=False)
    first = task.delay(other.name)

    started(deliver(task))
    renewer_of(app).flush()

    (message,) = (json.loads(raw)["headers"] for raw in queued(redis))
    assert message["id"] == first.id
    assert message[HEADER]["key"] == other.generate_lock(other.name, ["a"])
    assert other.delay("a").id == first.id, "a duplicate"


def queued(redis: Any) -> list[str]:
    """Return the messages in the default queue."""
    return list(redis.lrange("celery", 0, -1))


@pytest.mark.parametrize(("expires", "least", "most"), [(None, 3000, 3600), (100, 40, 100), (-1, 0, 5)])
def test_the_lock_of_a_requeued_message_ends_with_the_message(app, deliver, redis, expires, least, most):
    """RabbitMQ drops a requeued message that has expired: no worker would ever free its lock."""
    task, task_id, lock = task_of(app, acks_late=True), uuid(), "SINGLETONLOCK_a"
    headers = {"expires": later(expires)} if expires else {}
    request = deliver(task, ["a"], id=task_id, **headers, **{HEADER: {"id": task_id, "key": lock}})
    backend_of(app).begin(request.ticket.run, lease=60, remember_for=60, task=task.name, arguments="")

    request.reject(requeue=True)

    assert redis.hget(lock, "state") == "queued"
    assert least < redis.pttl(lock) / 1000 <= most


def retries_later(self: Any) -> None:
    """Retry in ten minutes."""
    raise self.retry(countdown=600)


def retries_elsewhere(self: Any) -> None:
    """Retry on another queue, which no worker reads now."""
    raise self.retry(countdown=0, queue="elsewhere")


def retries_by_another_key(self: Any) -> None:
    """Retry by the exchange of the run, which takes it to another queue."""
    raise self.retry(countdown=0, routing_key="other.key")


class Elsewhere(Task):
    """A user's class, which chooses the queue."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        chosen = {"queue": "elsewhere", "exchange": None, "routing_key": None}
        return super().apply_async(args, kwargs, **{**options, **chosen})


class SingletonElsewhere(Singleton, Elsewhere):
    """It chooses the queue behind the Singleton."""

    abstract = True


@pytest.mark.parametrize(
    ("body", "base", "queue"),
    [
        (retries_elsewhere, Singleton, "elsewhere"),
        (retries_later, Singleton, "celery"),
        (retries_later, None, "celery"),
        (retries_elsewhere, None, "elsewhere"),
        (retries_later, SingletonElsewhere, "elsewhere"),
        (retries_later, Elsewhere, "elsewhere"),
        (retries_by_another_key, Singleton, ""),
        (retries_by_another_key, None, ""),
    ],
)
def test_a_retry_is_found_in_a_queue_that_no_other_process_knows(app, deliver, server, redis, body, base, queue):
    """The worker that reads the queue is away, for a deploy."""
    task = app.task(body, name="app.later", bind=True, base=base, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"
    started(deliver(task, [], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()
    redis.hincrby(lock, "since", -3_600_000)
    redis.hdel(lock, "renewed")
    ((_, record),) = backend_of(app).read([lock])

    with make_app(server.celery_url, {"task_default_queue": "another", "singlebeat_lost_after": 0.1}) as stranger:
        (found,) = lost.examine(stranger, [lost.Waiting.of(lock, record)])

    assert not found.outcome, found
    assert found.queue == json.loads(record["sent"])["queue"] == queue


@pytest.mark.parametrize("base", [Singleton, None])
def test_a_retry_that_a_function_may_route_notes_where_it_was_sent(app, deliver, redis, base):
    """The function is asked once for it, as it may count its calls."""
    asked = list[str]()

    def route(name: str, *_: Any, **__: Any) -> None:
        asked.append(name)

    app.conf.task_routes = (route,)
    task = app.task(retries_later, name="app.later", bind=True, base=base, shared=False)
    task_id = uuid()
    lock = task.generate_lock(task.name, [], {}) if base else "SINGLETONLOCK_a"
    task.apply_async(task_id=task_id, headers={} if base else {HEADER: {"id": task_id, "key": lock}})
    asked.clear()

    started(deliver(task))
    renewer_of(app).flush()

    assert asked == ["app.later"]
    assert redis.llen("celery") == 1
    assert json.loads(redis.hget(lock, "sent"))["queue"] == "celery"
    assert redis.hget(lock, "gen") == "1"


def later(seconds: float) -> str:
    """Return a time as messages have it."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


# ---------------------------------------------------------------- messages that come back from a dead letter exchange


def deaths(*entries: tuple[str, Any]) -> list[Any]:
    """Return what RabbitMQ says about the deaths of a message."""
    return [{"queue": "q", "reason": reason, "count": count} for reason, count in entries]


@pytest.mark.parametrize("retries", [0, 3])
def test_each_rejection_makes_a_generation_below_the_next_retry(app, deliver, retries):
    task, task_id = task_of(app), uuid()
    header = {"id": task_id, "key": "SINGLETONLOCK_a"}
    said = [[], deaths(("expired", 7)), *(deaths(("expired", n), ("rejected", n)) for n in (1, 2, 998, 5000))]

    tickets = [
        deliver(task, ["a"], id=task_id, retries=retries, **{HEADER: header, "x-death": each}).ticket for each in said
    ]
    generations = [ticket.generation for ticket in tickets]

    assert generations[0] == generations[1] == retries
    assert generations[1:] == sorted(set(generations[1:]))
    assert all(
        generation < ticket.successor().generation for ticket, generation in zip(tickets, generations, strict=True)
    )
    assert {ticket.successor().generation for ticket in tickets} == {retries + 1}


@pytest.mark.parametrize("nonsense", ["x", 7, [7], [{"reason": "rejected", "count": "x"}], [{"reason": "rejected"}]])
def test_an_invalid_x_death_header_stops_no_message(app, deliver, nonsense):
    task, task_id = task_of(app), uuid()
    header = {"id": task_id, "key": "SINGLETONLOCK_a", "rejections": "x"}

    assert deliver(task, ["a"], id=task_id, **{HEADER: header, "x-death": nonsense}).ticket.generation == 0


def test_a_rejected_message_starts_neither_beside_its_run_nor_as_a_copy(app):
    backend, lock = backend_of(app), "SINGLETONLOCK_{a}"
    lived = {"lease": 60.0, "remember_for": 60.0, "task": "t", "arguments": ""}
    first, back = Ref(lock, "a", 0, "n1"), Ref(lock, "a", 0.001, "n2")
    copies = [replace(first, nonce="n3"), replace(back, nonce="n4")]

    assert backend.begin(first, **lived).verdict is Verdict.STARTED
    assert backend.begin(back, **lived).verdict is Verdict.COPY
    backend.finish_many([first], remember_for=60, ran=True)
    assert backend.begin(back, **lived).verdict is Verdict.STARTED
    assert [backend.begin(copy, **lived).verdict for copy in copies] == [Verdict.DONE, Verdict.COPY]
    assert backend.renew_many([back], lease=60) == [Renewal.RUNNING]
    backend.finish_many([back], remember_for=60, ran=True)
    assert [backend.begin(copy, **lived).verdict for copy in copies] == [Verdict.DONE, Verdict.DONE]


def test_a_rejected_message_that_waits_keeps_its_generation(app, deliver):
    task, task_id = task_of(app), uuid()
    header = {"id": task_id, "key": "SINGLETONLOCK_a"}
    died = deaths(("rejected", 2))

    request = deliver(task, ["a"], id=task_id, **{HEADER: header, "x-death": died, "x-last-death-queue": "q"})
    with pytest.raises(Postponed):
        postpone(task, request._context, request.ticket, countdown=0, why="its lock is held")
    again = deliver(task)

    assert again.ticket.generation == request.ticket.generation == 0.002
    assert Ticket.of_message(request.request_dict, task_id, delivered=True) == request.ticket, "so its run reads it"
    assert not [name for name in again.request_dict if "death" in name]


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_message_that_waits_takes_the_turn_of_a_newer_one(app, deliver, redis, other, base):
    """It carries since when it waits, from one time that it is sent to the next."""
    task = app.task(same, name="app.task", shared=False, **based(base))

    def comes(task_id: str, *sent: Any) -> Request:
        header = Ticket(task_id, "SINGLETONLOCK_a", "", waits=True).header()
        request = deliver(task, *sent, **({"id": task_id, HEADER: header} if sent else {}))
        assert request.id == task_id
        started(request)
        return request

    comes("older", ["a"])
    redis.delete(turn_key("SINGLETONLOCK_a"))  # as when its message lies in the broker for long
    older = deliver(task)
    comes("newer", ["a"])
    assert redis.hget(turn_key("SINGLETONLOCK_a"), "id") == "newer"
    started(older)

    assert redis.hget(turn_key("SINGLETONLOCK_a"), "id") == "older"
    backend_of(app).finish_many([other], remember_for=60)
    redis.hincrby(turn_key("SINGLETONLOCK_a"), "since", -31_000)
    comes("newer")
    assert not redis.exists("SINGLETONLOCK_a"), "none overtakes it any more"
    comes("older")
    assert app.AsyncResult("older").state == states.SUCCESS
    wait_until(lambda: not redis.exists("SINGLETONLOCK_a"), what="the end of the lock")
    comes("newer")
    assert app.AsyncResult("newer").state == states.SUCCESS


# ---------------------------------------------------------------- messages of other programs


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param([{"id": 7}], {}, id="no text"),
        pytest.param([{}], {}, id="no id"),
        pytest.param([None], {}, id="no user"),
        pytest.param([{"id": "a"}], ["no", "mapping"], id="kwargs that are no mapping"),
        pytest.param(7, {}, id="args that are no list"),
    ],
)
def test_a_call_whose_key_cannot_be_made_is_received_and_has_no_lock(app, deliver, redis, args, kwargs):
    function = task_of(app, unique_on=lambda user: user["id"].lower())

    assert deliver(function, args, kwargs).ticket is None
    assert not redis.keys("SINGLETONLOCK_*")


def test_a_call_whose_generate_lock_fails_is_received_without_a_lock(app, deliver, caplog):
    task = app.task(same, name="app.task", base=OwnKey, shared=False)

    assert deliver(task, [{"id": 7}]).ticket.key == "SINGLETONLOCK_7"
    request = deliver(task, [{"name": "a"}])

    assert request.ticket is None
    assert f"app.task[{request.id}] runs without its lock" in caplog.text
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("waited", ["x", [1], {}, float("inf"), 10**30, -(10**30)], ids=str)
@pytest.mark.parametrize("retries", [0, "x"])
def test_an_invalid_header_stops_no_message(app, deliver, waited, retries):
    task, task_id = task_of(app), uuid()
    header = {"id": task_id, "key": "SINGLETONLOCK_a", "waited": waited, "waits_since": waited}

    request = deliver(task, ["a"], id=task_id, retries=retries, **{HEADER: header})

    assert (request.ticket.task_id, request.ticket.key) == (task_id, "SINGLETONLOCK_a")
    assert 0 <= request.ticket.waited <= 10
    left = Ticket.of_message(request.request_dict, task_id, delivered=True)
    assert left == request.ticket, "its run reads what is left of it"


class Numbered(Singleton):
    """A Singleton whose user's function makes a key that is no text, or none that a server takes."""

    abstract = True

    def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> Any:
        return task_args[0]


LONE = "\ud800"  #: JSON can say it, UTF-8 cannot


@pytest.mark.parametrize(
    "header", [{}, {"key": LONE}, {"key": "a", "queued": LONE}, {"key": "a", "nonce": LONE}], ids=str
)
@pytest.mark.parametrize("task_id", ["a", LONE])
@pytest.mark.parametrize("key", [7, ["x"], LONE])
def test_a_key_that_no_server_takes_spoils_no_other_lock_of_its_worker(
    app, deliver, redis, caplog, header, task_id, key
):
    good, bad = task_of(app), app.task(same, name="app.bad", base=Numbered, shared=False)
    renewer, backend = renewer_of(app), backend_of(app)
    run = deliver(good, ["a"])
    backend.begin(run.ticket.run, lease=1, remember_for=60, task="app.task", arguments="")
    told = {"argsrepr": LONE, **({HEADER: {"id": task_id, **header}} if header else {})}

    hostile = deliver(bad, [key], id=task_id, **told)
    hostile.time_start = time.time()
    renewer._renew(renewer._living())

    assert redis.pttl(run.ticket.key) > 1000
    hostile.acknowledged = True
    hostile.free_if_acknowledged()
    renewer.flush()
    assert "failed" not in caplog.text


def test_any_arguments_of_a_message_can_be_shown(app, deliver):
    request = deliver(app.task(same, name="app.plain", shared=False), ["a"], argsrepr=f"({LONE})" * 100)

    assert request.shown.startswith(r"(\ud800)(")
    assert len(request.shown) == 200


def test_a_lock_that_cannot_be_read_opens_the_gate_for_its_own_task_alone(app, deliver, redis):
    plain, ids = app.task(same, name="app.plain", shared=False), [uuid(), uuid()]
    redis.set("{SINGLETONLOCK_a}:done", "no zset")
    redis.hset("SINGLETONLOCK_b", mapping={"id": "other", "gen": "0", "state": "running", "nonce": "n"})
    spoiled, held = (
        deliver(plain, [id_], id=id_, **{HEADER: {"id": id_, "key": key}})
        for id_, key in zip(ids, ["SINGLETONLOCK_a", "SINGLETONLOCK_b"], strict=True)
    )

    spoiled.begin_for_plain_task()
    with pytest.raises(Refused):
        held.begin_for_plain_task()


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_waiting_message_never_starts_because_the_locks_are_unreachable(
    app, deliver, redis, own_server, caplog, base
):
    app.conf.singleton_backend_url = own_server.url
    task, ids = app.task(same, name="app.task", shared=False, **based(base)), [uuid() for _ in range(4)]
    requests = [
        deliver(task, ["a"], id=id_, **{HEADER: Ticket(id_, "LOCK_a", "LOCK_a", waits=waits).header()})
        for id_, waits in zip(ids, [True, True, False, False], strict=True)
    ]
    own_server.kill()

    for request in requests:
        started(request)

    assert [app.AsyncResult(id_).state for id_ in ids] == [states.PENDING] * 2 + [states.SUCCESS] * 2
    assert redis.llen("celery") == 2, "those that wait were sent again"
    said = [record.message for record in caplog.records if "event=unlocked" in record.message]
    assert [[id_ for id_ in ids if id_ in text] for text in said] == [[ids[2]], [ids[3]]]


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_lock_taken_at_the_start_names_the_broker_of_its_worker(app, deliver, redis, base):
    """A retry of it waits under that lock."""
    seen, id_ = [], uuid()

    def look(_: str) -> None:
        seen.append(redis.hget("SINGLETONLOCK_a", "sent"))

    task = app.task(look, name="app.task", shared=False, **based(base))

    started(deliver(task, ["a"], id=id_, **{HEADER: waiting(id_)}))

    assert [json.loads(note) for note in seen] == [{"broker": own_broker(app)}]


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_waiting_message_never_starts_because_its_lock_is_unreadable(app, deliver, redis, caplog, base):
    task, id_ = app.task(same, name="app.task", shared=False, **based(base)), uuid()
    redis.set("SINGLETONLOCK_a", "no hash")

    started(deliver(task, ["a"], id=id_, **{HEADER: waiting(id_)}))

    assert redis.llen("celery") == 1
    (said,) = [record for record in caplog.records if "event=postponed" in record.message]
    assert said.levelname == "WARNING", "it waits until an operator deletes the key"
    assert "the lock SINGLETONLOCK_a is unusable" in said.message


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_waiting_message_says_which_right_its_worker_lacks(app, deliver, server, redis, caplog, base):
    """Its lock is renewed all the time, which needs other rights, so nothing else says why it never runs."""
    with without(server, "hset") as url:
        app.conf.singleton_backend_url = url
        task, id_ = app.task(same, name="app.task", shared=False, **based(base)), uuid()

        started(deliver(task, ["a"], id=id_, **{HEADER: waiting(id_)}))

    assert redis.llen("celery") == 1
    (said,) = [record for record in caplog.records if "event=postponed" in record.message]
    assert said.levelname == "WARNING"
    assert is_denied(said.message)


@pytest.mark.parametrize("policy", [None, "run"])
def test_a_run_that_others_have_joined_waits_for_their_arguments(app, deliver, redis, own_server, caplog, policy):
    settings = {"singlebeat_socket_timeout": 0.5, "singleton_on_backend_error": policy}
    app.conf.update(singleton_backend_url=own_server.url, **settings)
    buffered = app.task(told, name="app.told", unique_on=["user"], bind=True, base=Singleton, shared=False)
    first = buffered.apply_async(("a", 1), overlap="buffer_one")
    assert buffered.apply_async(("a", 2), overlap="buffer_one").id == first.id
    own_server.pause()

    started(deliver(buffered))
    own_server.resume()

    if policy == "run":
        assert first.get(timeout=5)[0] == 1
        assert "runs without its lock, with the arguments that it was sent with" in caplog.text
    else:
        assert first.state == states.PENDING
        # The server may take the lock for the lost call when it wakes up: until that is freed, the message waits on.
        wait_until(lambda: started(deliver(buffered)) or first.ready(), what="the run")
        assert first.get(timeout=5)[0] == 2


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_no_lock_is_taken_late_for_a_message_that_waits_on(app, deliver, own_server, base):
    settings = {"singlebeat_socket_timeout": 0.2, "singleton_on_backend_error": "raise"}
    app.conf.update(singleton_backend_url=own_server.url, **settings)
    task, id_ = app.task(same, name="app.task", shared=False, **({"base": base} if base else {})), uuid()
    redis, ticket = own_server.client(), Ticket(id_, "LOCK_a", "LOCK_a", waits=True)
    backend_of(app).acquire_many([Call(ticket.run, task.name, "", 600)])
    another = Ref("LOCK_b", "another", nonce="n")  # so that the server knows the script
    backend_of(app).begin(another, lease=60, remember_for=60, task=task.name, arguments="")
    request = deliver(task, ["a"], id=id_, **{HEADER: ticket.header()})
    own_server.pause()

    started(request)
    own_server.resume()
    wait_until(renewer_of(app).answers, what="the end of the outage")

    wait_until(lambda: redis.hget("LOCK_a", "state") == "queued", what="the handover")
    assert request not in renewer_of(app)._living()


def test_the_gate_opens_as_soon_as_the_locks_server_answers_again(app, deliver, own_server):
    app.conf.singleton_backend_url = own_server.url
    plain, id_ = app.task(same, name="app.plain", shared=False), uuid()
    request = deliver(plain, ["a"], id=id_, **{HEADER: Ticket(id_, "LOCK_a", "LOCK_a").header()})
    own_server.kill()
    request.begin_for_plain_task()
    assert not renewer_of(app).answers()
    failed_at = time.monotonic()

    own_server.restart()

    wait_until(renewer_of(app).answers, what="the end of the outage")
    assert time.monotonic() < failed_at + GATE_PAUSE, "it did not wait for the end of the pause"


def test_a_refused_handover_is_retried_with_pauses_while_renewals_go_on(app, deliver, monkeypatch):
    """A server whose memory is full refuses only the handover."""
    app.conf.singlebeat_lock_lease = 1
    renewer, asked, renewed = renewer_of(app), [], []

    def refuse(*args: Any, **kwargs: Any) -> bool:
        asked.append(args)
        raise LockBackendError("its memory is full")

    monkeypatch.setattr(renewer.backend, "rotate", refuse)
    monkeypatch.setattr(renewer, "_announce", lambda: renewed.append(None))  # a step of each renewal
    request = deliver(task_of(app), ["a"], id="a", **{HEADER: {"id": "a", "key": "LOCK_a"}})

    renewer.hand_over(request, request.ticket.run, ttl=60)
    wait_until(lambda: len(asked) >= 1, what="the handover")
    renewals = len(renewed)
    wait_until(lambda: len(renewed) >= renewals + 3, what="renewals")

    assert len(asked) < 10 * len(renewed)


def test_an_unreadable_lock_does_not_stop_the_renewal_of_others(app, deliver, redis):
    task, backend, renewer = task_of(app), backend_of(app), renewer_of(app)
    spoiled, other = deliver(task, ["a"]), deliver(task, ["b"])
    for request in (spoiled, other):
        backend.acquire_many([Call(replace(request.ticket.run, nonce=""), "app.task", "", 60)])
        request.time_start = time.time()
    redis.set(done_key(spoiled.ticket.key), "no zset")

    renewer._renew(renewer._living())

    assert redis.hget(other.ticket.key, "state") == "running", "it began while the server was away"


def test_a_key_that_is_denied_to_the_worker_harms_no_other_lock(app, deliver, server, redis, caplog):
    """The server refuses a call with such a key as a whole: no lock of the worker would be renewed or freed."""
    redis.acl_setuser("few", enabled=True, nopass=True, categories=["+@all"], keys=["SINGLETONLOCK_*", "singlebeat:*"])
    app.conf.singleton_backend_url = server.url.replace("://", "://few:any@")
    task, renewer = task_of(app), renewer_of(app)
    denied = [
        deliver(task, [name], id=name, **{HEADER: Ticket(name, f"mine:{name}", f"mine:{name}", nonce="n").header()})
        for name in "de"
    ]
    runs = [deliver(task, [name]) for name in "abc"]
    for run in runs:
        backend_of(app).begin(run.ticket.run, lease=1, remember_for=60, task="app.task", arguments="")
    for run in (*runs, *denied):
        run.time_start = time.time()

    renewer.hand_over(denied[0], denied[0].ticket.run, ttl=60.0)
    renewer._renew(renewer._living())
    assert all(redis.pttl(run.ticket.key) > 1000 for run in runs)

    for ended in (denied[1], runs[0]):
        ended.acknowledged = True
        ended.free_if_acknowledged()
    renewer.flush()
    assert [redis.exists(run.ticket.key) for run in runs] == [0, 1, 1]
    said = [record.message for record in caplog.records if "event=not_renewed" in record.message]
    assert len(said) == 2
    assert all("grant all keys with the prefix of that key" in text for text in said)
    redis.acl_deluser("few")


def test_a_worker_that_may_not_announce_itself_renews_its_locks(app, deliver, server, redis, caplog):
    with without(server, "zrangebyscore") as url:
        app.conf.singleton_backend_url = url
        renewer = renewer_of(app)
        renewer._started = True  # the test is its thread
        run = deliver(task_of(app), ["a"])
        backend_of(app).begin(run.ticket.run, lease=1, remember_for=60, task="app.task", arguments="")
        run.time_start, renewer.name = time.time(), "host:1"
        for _ in range(2):
            renewer._renew(renewer._living())
            renewer._announce()
        assert redis.pttl(run.ticket.key) > 1000
        redis.acl_setuser("mute", commands=["+zrangebyscore"])
        renewer._announce()

    said = [record.message for record in caplog.records if "nnounced" in record.message]
    assert len(said) == 2
    assert "event=not_announced" in said[0]
    assert "event=recovered" in said[1]
    assert "event=not_renewed" not in caplog.text


def test_a_spoilt_key_of_the_workers_is_named_and_locks_are_renewed(app, deliver, redis, caplog, findings):
    redis.set("singlebeat:workers", "of another program")
    renewer = renewer_of(app)
    renewer._started = True  # the test is its thread
    run = deliver(task_of(app), ["a"])
    backend_of(app).begin(run.ticket.run, lease=1, remember_for=60, task="app.task", arguments="")
    run.time_start, renewer.name = time.time(), "host:1"
    renewer._renew(renewer._living())
    renewer._announce()
    assert redis.pttl(run.ticket.key) > 1000

    told = [text for level, text in findings("locks") if level == "problem"]
    remedy = (
        "the key singlebeat:workers is no sorted set: another program has written there. Stop that program, and remove"
    )
    assert any(remedy in text for text in told)
    assert f"{remedy} the key" in caplog.text
    assert "event=not_announced" in caplog.text
    redis.delete("singlebeat:workers")
    renewer._announce()
    assert redis.zcard("singlebeat:workers") == 1


@pytest.mark.parametrize("ran", ["", "with its lock", "and lost its lock"])
@pytest.mark.parametrize("cut", ["time limit", "soft time limit", "killed"])
def test_a_call_that_was_cut_short_while_it_waited_runs_and_no_other_does(app, deliver, monkeypatch, cut, ran):
    """A child may be killed right after it has sent the message again, and the copy must not be taken for a repeat."""
    monkeypatch.setattr("singlebeat.tasks.request.KILL_TIME", 0.0)
    task = task_of(app, overlap="buffer_all")
    backend, other = backend_of(app), Ref(task.generate_lock(task.name, ["a"]), "other", nonce="n")
    backend.begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    sent = task.delay("a")
    request = deliver(task)
    if ran:
        backend.finish_many([other], remember_for=60)
        backend.begin(request.ticket.run, lease=60, remember_for=60, task=task.name, arguments="")
        request.time_start = time.time()
        renewer_of(app)._renew(renewer_of(app)._living())
    else:
        with pytest.raises(Postponed):
            postpone(task, request._context, request.ticket, countdown=0, why="its lock is held")
    if "lost" in ran:
        backend.unlock(other.key)
    request.time_start, request.acknowledged = time.time(), True
    if cut == "time limit":
        request.on_timeout(soft=False, timeout=1)
    else:
        kind = {"soft time limit": SoftTimeLimitExceeded, "killed": WorkerLostError}[cut]
        try:
            raise kind("cut")  # noqa: TRY301 - only what was raised has a traceback
        except kind:
            request.on_failure(ExceptionInfo())
    renewer_of(app).flush()
    backend.finish_many([other], remember_for=60)

    copy = Ref(other.key, sent.id, request.ticket.generation, "copy")
    verdict = backend.begin(copy, lease=60, remember_for=60, task=task.name, arguments="").verdict
    assert verdict is (Verdict.DONE if ran else Verdict.STARTED)


def test_a_soft_time_limit_while_a_message_is_sent_again_loses_no_call(app, deliver, monkeypatch):
    task = task_of(app)
    request, sends = deliver(task, ["a"]), []

    def send_again(*args: Any, **kwargs: Any) -> None:
        sends.append(args)
        if len(sends) == 1:
            raise SoftTimeLimitExceeded

    monkeypatch.setattr("singlebeat.tasks.gate.send_again", send_again)
    monkeypatch.setattr("singlebeat.tasks.gate.RETRY_AFTER", 0.0)
    with pytest.raises(Postponed):
        postpone(task, request._context, request.ticket, countdown=0, why="its lock is held")

    assert len(sends) == 2


def test_a_soft_time_limit_while_the_lock_is_taken_puts_the_start_off(app, deliver, monkeypatch, caplog):
    task = task_of(app)
    request = deliver(task, ["a"])

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(type(backend_of(app)), "begin", interrupted)
    started(request)
    monkeypatch.undo()
    again = deliver(task)
    started(again)

    assert again.id == request.id
    (told,) = [record for record in caplog.records if "event=postponed" in record.message]
    assert told.levelname == "WARNING"
    assert "its soft time limit fired while its lock was taken" in told.message
    assert AsyncResult(again.id, app=app).get(timeout=5) == "a"


def test_an_end_whose_key_is_denied_is_sent_again(app, deliver, server, redis, monkeypatch):
    """A lock of a run that could not take it may last for as long as a message may wait in its queue."""
    monkeypatch.setattr("singlebeat.tasks.renewer.DENIED_PAUSE", 0.0)
    redis.acl_setuser("few", enabled=True, nopass=True, categories=["+@all"], keys=["*"])
    app.conf.singleton_backend_url = server.url.replace("://", "://few:any@")
    task, renewer = task_of(app), renewer_of(app)
    task.delay("a")
    request = deliver(task)
    redis.execute_command("ACL", "SETUSER", "few", "resetkeys", "~singlebeat:*")
    request.time_start, request.acknowledged = time.time(), True
    request.free_if_acknowledged()
    renewer.flush()
    assert redis.exists(request.ticket.key) == 1

    redis.execute_command("ACL", "SETUSER", "few", "allkeys")
    wait_until(lambda: renewer.flush() or not redis.exists(request.ticket.key), timeout=10)
    redis.acl_deluser("few")


# ---------------------------------------------------------------- a broker that takes no messages


@pytest.fixture
def mute(server, app):
    """Lets the app read messages and send none."""
    with without(server, "lpush") as url:
        app.conf.broker_write_url = url
        yield


@pytest.fixture
def other(app):
    """The run of another call, by which the lock of every test here is held."""
    backend, other = backend_of(app), Ref("SINGLETONLOCK_a", "other", nonce="n")
    assert backend.begin(other, lease=60, remember_for=60, task="app.task", arguments="").verdict is Verdict.STARTED
    return other


def waiting(task_id: str) -> dict[str, Any]:
    """Return the header of a message that waits for its turn."""
    return Ticket(task_id, "SINGLETONLOCK_a", "SINGLETONLOCK_a", waits=True, nonce="another").header()


def based(base: type | None) -> dict[str, Any]:
    """Return the option that gives a task its base, if it has one of ours."""
    return {"base": base} if base else {}


def first_lock(task: Any) -> str:
    return task.generate_lock(task.name, ["a", 1])


def started(request: Request) -> None:
    """Start a delivery in this process, as a worker's solo pool does."""
    with suppress(TaskRevokedError):
        request.execute_using_pool(None)


def messages(redis: Any) -> tuple[int, int]:
    """Return how many messages are in the queue, and in the hands of workers."""
    return redis.llen("celery"), redis.hlen("unacked")


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_an_unsendable_call_goes_back_to_the_broker_after_a_delay(app, deliver, redis, mute, other, base):
    task = app.task(same, name="app.task", shared=False, **({"base": base, "acks_late": True} if base else {}))
    timer = renewer_of(app).timer = Timer()
    task_id = uuid()
    request = deliver(task, ["a"], id=task_id, **{HEADER: waiting(task_id)})
    began = time.monotonic()

    started(request)

    assert messages(redis) == (0, 1)
    (due,) = timer.queue
    assert due.eta >= began + 0.9, "what comes at once fails at once, again and again"
    due.entry()
    assert messages(redis) == (1, 0)
    assert app.AsyncResult(task_id).state == states.PENDING


class Broken(MemoryBackend):
    """A lock backend with a bug."""

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug")


def test_a_plain_task_whose_start_fails_goes_back_to_the_broker_too(app, deliver, redis, caplog):
    app.conf.singleton_backend_class = f"{__name__}.Broken"
    task = app.task(same, name="app.task", shared=False)
    timer = renewer_of(app).timer = Timer()
    task_id = uuid()

    started(deliver(task, ["a"], id=task_id, **{HEADER: waiting(task_id)}))

    assert messages(redis) == (0, 1)
    assert f"app.task[{task_id}] cannot start now and is put back" in caplog.text
    assert "a bug" in caplog.text
    (due,) = timer.queue
    due.entry()
    assert messages(redis) == (1, 0)


class FullPool:
    """A pool of processes that keeps a run that it has not been able to write down for a process."""

    uses_semaphore = True

    def __init__(self) -> None:
        self.kept = list[Any]()

    def apply_async(self, *_: Any, **callbacks: Any) -> None:
        self.kept.append(callbacks)
        raise RecursionError("maximum recursion depth exceeded while pickling an object")


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_that_its_pool_cannot_take_frees_its_lock(app, deliver, redis, caplog, base):
    """The pool keeps the request alive, so the renewal of its lock would not end by itself."""
    task, task_id, pool = app.task(same, name="app.task", shared=False, **based(base)), uuid(), FullPool()
    lock = "SINGLETONLOCK_a"
    backend_of(app).acquire_many([Call(Ref(lock, task_id), task.name, "", 60)])
    header = {"id": task_id, "key": lock}
    request = deliver(task, ["a"], pool=pool, id=task_id, **{HEADER: header, RUN_HEADER: {"entry": "a"}})

    with pytest.raises(RecursionError):
        request.execute_using_pool(pool)
    renewer_of(app).flush()
    flush_ends(app)

    assert pool.kept
    assert backend_of(app).get(lock) is None
    assert request not in renewer_of(app)._living()
    assert messages(redis) == (0, 1), "Celery leaves it to its broker"
    ((_, end),) = redis.xrange("redbeat::runs")
    assert end["outcome"] == "failure"
    assert "RecursionError" in end["reason"]
    assert caplog.text.count("the pool cannot take the run") == 1


class TooManyError(Exception):
    """An error of Celery's main process while it notes that a run has begun."""


@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
def test_a_run_whose_start_celery_cannot_note_frees_its_lock(app, deliver, redis, monkeypatch, acks_late):
    """The pool starts the run all the same, and nothing else would acknowledge its message."""
    task, task_id, lock = app.task(same, name="app.task", shared=False, acks_late=acks_late), uuid(), "SINGLETONLOCK_a"
    pool = SimpleNamespace(uses_semaphore=True, apply_async=lambda *_, **__: None)
    request = deliver(task, ["a"], pool=pool, id=task_id, **{HEADER: {"id": task_id, "key": lock}})
    request.execute_using_pool(pool)
    held = backend_of(app).get(lock)

    def fail(_: Request) -> None:
        raise TooManyError

    monkeypatch.setattr("celery.worker.request.task_accepted", fail)
    with pytest.raises(TooManyError):
        request.on_accepted(1, time.monotonic())
    request.on_success((False, "a", 0.1))
    renewer_of(app).flush()

    assert held is not None
    assert backend_of(app).get(lock) is None
    assert messages(redis) == (0, 0)


def test_an_acknowledged_singleton_that_cannot_be_resent_fails_with_why(app, deliver, redis, mute, other):
    task_id = uuid()

    started(deliver(task_of(app), ["a"], id=task_id, **{HEADER: waiting(task_id)}))

    assert messages(redis) == (0, 0)
    result = app.AsyncResult(task_id)
    assert result.state == states.FAILURE
    assert "lpush" in str(result.result)


def test_an_acknowledged_waiting_message_outlives_a_broker_restart(app, deliver, own_server, other, monkeypatch):
    task, task_id = task_of(app), uuid()
    request = deliver(task, ["a"], id=task_id, **{HEADER: waiting(task_id)})
    app.conf.broker_write_url = own_server.url
    own_server.kill()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: own_server.restart())
    monkeypatch.setattr("singlebeat.tasks.gate.time", clock)

    started(request)

    assert own_server.client().llen("celery") == 1
    assert app.AsyncResult(task_id).state == states.PENDING


def test_an_acknowledged_waiting_message_outlives_a_closed_channel(app, deliver, redis, other, monkeypatch):
    """As after several failures in a row: the next publish over it finds no connection, the one after that works."""
    monkeypatch.setattr("singlebeat.tasks.gate.RETRY_AFTER", 0.01)
    task, task_id, publish = task_of(app), uuid(), Producer.publish
    request = deliver(task, ["a"], id=task_id, **{HEADER: waiting(task_id)})
    faults = iter([AttributeError("'NoneType' object has no attribute 'client'")])

    def publish_over_it(*args: Any, **options: Any) -> Any:
        for fault in faults:
            raise fault
        return publish(*args, **options)

    monkeypatch.setattr(Producer, "publish", publish_over_it)

    started(request)

    assert redis.llen("celery") == 1
    assert app.AsyncResult(task_id).state == states.PENDING


def test_a_replaced_run_holds_its_lock_until_its_body_is_over(app, deliver, redis):
    held = []

    def clean_up(self: Any, user: Any) -> None:
        try:
            self.replace(another.si(user))
        finally:
            held.append((redis.llen("celery"), backend_of(app).get(lock)))

    another = app.task(same, name="app.another", shared=False)
    task = app.task(clean_up, bind=True, name="app.task", base=Singleton, shared=False)
    lock, result = task.generate_lock(task.name, ["a"]), task.delay("a")

    started(deliver(task))

    assert held == [(1, result.id)]
    assert backend_of(app).get(lock) is None


@pytest.mark.parametrize("goes_on", [False, True], ids=["last", "before a step"])
def test_an_equal_body_of_a_chord_is_a_later_generation_of_its_run(app, deliver, redis, goes_on):
    """The body may be sent while the run that it replaces has not ended."""

    def become_a_body(self: Any, user: Any) -> None:
        self.replace(chord([another.si(user), another.si(user)], self.si(user)))

    another = app.task(same, name="app.another", shared=False)
    task = app.task(become_a_body, bind=True, name="app.task", base=Singleton, shared=False)
    call = task.si("a")
    (chain(call, another.si("a")) if goes_on else call).delay()
    task_id = json.loads(redis.lindex("celery", -1))["headers"]["id"]

    started(deliver(task))

    embedded = json.loads(b64decode(json.loads(redis.lindex("celery", 0))["body"]))[2]
    body = embedded["chord"]
    first = body["kwargs"]["tasks"][0] if body["task"] == "celery.chain" else body
    assert (first["options"]["task_id"], first["options"]["replaced_task_nesting"]) == (task_id, 1)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_an_unsendable_copy_does_not_change_the_result_of_the_live_run(app, deliver, redis, mute, late):
    run = Ref("SINGLETONLOCK_a", uuid(), nonce="n")
    backend_of(app).begin(run, lease=60, remember_for=60, task="app.task", arguments="")
    renewer_of(app).timer = Timer()

    started(deliver(task_of(app, acks_late=late), ["a"], id=run.task_id, **{HEADER: waiting(run.task_id)}))

    assert app.AsyncResult(run.task_id).state == states.PENDING
    assert messages(redis) == (0, int(late))
    assert backend_of(app).renew_many([run], lease=60) == [Renewal.RUNNING]


# ---------------------------------------------------------------- messages that are revoked while a worker has them


@pytest.fixture
def revoke():
    """Returns what the control commands of the same names do to the state of a worker."""

    def revoke(*ids: str, **stamps: str) -> None:
        state.revoked.update(ids)
        state.revoked_stamps.update({header: [stamp] for header, stamp in stamps.items()})

    yield revoke
    state.revoked.clear()
    state.revoked_stamps.clear()


@pytest.mark.parametrize("held", ["lock", "place", "turn", "lock, stamped", "lock of a plain task"])
def test_a_waiting_message_that_is_revoked_leaves_nothing_held(app, deliver, redis, revoke, held):
    task = app.task(same, name="app.task", shared=False, **based(None if "plain" in held else Singleton))
    task_id, overlap = uuid(), {"place": "buffer_one", "turn": "buffer_all"}.get(held)
    header = {"id": task_id, "key": "SINGLETONLOCK_plain"}
    if overlap:
        other = Ref(task.generate_lock(task.name, ["a"]), "other", nonce="n")
        backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
        task.apply_async(["a"], task_id=task_id, overlap=overlap)
        if held == "turn":
            started(deliver(task))
    elif "plain" in held:
        backend_of(app).acquire_many([Call(Ref(header["key"], task_id), task.name, "", 600)])
    else:
        signature = task.s("a").set(task_id=task_id, countdown=600)
        signature.stamp(owner="x")
        signature.apply_async()
    request = deliver(task, *([["a"]] if "plain" in held else []), **({"id": task_id, HEADER: header}))
    keys = [
        ref.key for ref in (*request.ticket.refs, request.ticket.turn) if ref and redis.hget(ref.key, "id") == task_id
    ]
    assert keys

    revoke(*([] if "stamped" in held else [task_id]), **({"owner": "x"} if "stamped" in held else {}))

    wait_until(lambda: not redis.exists(*keys), timeout=30, what="the end of what it held")
    assert not request.renewed()
    assert not request.acknowledged, "Celery drops it when its time has come"
    started(request)
    assert request.acknowledged
    assert app.AsyncResult(task_id).state == states.REVOKED


def test_a_message_that_the_pool_has_keeps_its_lock_though_it_is_revoked(app, deliver, redis, revoke):
    task, task_id, lock = app.task(same, name="app.plain", shared=False), uuid(), "SINGLETONLOCK_a"
    request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": lock}})
    request._given_to_pool = True
    request.begin_for_plain_task()

    revoke(task_id)
    renewer_of(app)._free_revoked()
    renewer_of(app).flush()

    assert redis.hget(lock, "state") == "running"
    assert request.renewed()


# ---------------------------------------------------------------- how runs end


class UnspeakableError(Exception):
    """An error that cannot even say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def refuse(user: Any) -> None:
    raise UnspeakableError


@pytest.mark.parametrize("header", [{}, {RUN_HEADER: {"entry": "a"}}], ids=["sent by hand", "sent by beat"])
def test_an_exception_that_has_no_words_ends_its_run_as_any_other(app, deliver, redis, header):
    task = app.task(refuse, name="app.refuse", acks_late=True, shared=False)

    started(deliver(task, ["a"], **header))

    assert messages(redis) == (0, 0)
    flush_ends(app)
    assert [end["outcome"] for _, end in redis.xrange("redbeat::runs")] == (["failure"] if header else [])


@pytest.fixture
def no_collector(caplog) -> Iterator[None]:
    """Leaves cycles where they are, for a test whose log keeps no exceptions either."""
    caplog.set_level(logging.CRITICAL + 1)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
@pytest.mark.parametrize("kind", [Postponed, Refused])
def test_a_run_that_does_not_start_leaves_no_cycle(app, deliver, redis, no_collector, base, kind):
    """A cycle would keep the traceback, and copies of it that Celery makes, until the collector runs."""
    task, task_id = app.task(same, name="app.task", shared=False, **based(base)), uuid()
    redis.hset("LOCK_a", mapping={"id": "other", "gen": "0", "state": "running", "nonce": "n"})
    ticket = Ticket(task_id, "LOCK_a", "LOCK_a", waits=kind is Postponed)

    started(deliver(task, ["a"], id=task_id, **{HEADER: ticket.header()}))

    assert messages(redis) == (int(kind is Postponed), 0)
    assert kept_errors() == []


def test_a_retry_of_a_plain_task_that_is_dropped_keeps_no_turn(app, deliver, redis):
    """A run that has sent a retry and goes on ends; a newer one runs then, and another waits."""
    task, key, ids = app.task(same, name="app.task", shared=False), "SINGLETONLOCK_a", [uuid() for _ in range(3)]
    backend, about = backend_of(app), {"lease": 60, "remember_for": 60, "task": "app.task", "arguments": ""}
    backend.begin(Ref(key, ids[1], nonce="n"), **about)
    retry = Ticket(ids[0], key, key, generation=1, replaceable=True)
    started(deliver(task, ["a"], id=ids[0], retries=1, **{HEADER: retry.header()}))
    again = deliver(task)
    assert backend.get(turn_key(key)) == ids[0]
    backend.acquire_many([Call(Ref(key, ids[2]), "app.task", "", 60, if_held=IfHeld.REPLACE)])

    started(again)

    assert messages(redis) == (0, 0)
    assert backend.get(turn_key(key)) is None
    assert again not in renewer_of(app)._living()


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_retry_takes_no_lock_of_a_newer_call_that_was_sent(app, deliver, redis, base):
    """Its run has ended and freed the lock, as after retry(throw=False); a newer call was sent with the lock then."""
    task, key, ids = app.task(same, name="app.task", shared=False, **based(base)), "SINGLETONLOCK_a", [uuid(), uuid()]
    about = {"task": "app.task", "arguments": ""}
    run = Ref(key, ids[0], nonce="n")
    backend_of(app).begin(run, lease=60, remember_for=60, **about)
    backend_of(app).finish_many([run], remember_for=60)
    backend_of(app).acquire_many([Call(Ref(key, ids[1]), ttl=60, **about)])
    retry, newer = Ticket(ids[0], key, key, generation=1), Ticket(ids[1], key, key)

    started(deliver(task, ["a"], id=ids[0], retries=1, **{HEADER: retry.header()}))

    assert backend_of(app).get(key) == ids[1]
    again = deliver(task)
    assert again.id == ids[0], "it waits"
    started(deliver(task, ["a"], id=ids[1], **{HEADER: newer.header()}))
    assert app.AsyncResult(ids[1]).state == states.SUCCESS


def test_an_unsendable_call_leaves_no_cycle(app, deliver, mute, other, no_collector):
    task_id = uuid()

    started(deliver(task_of(app, acks_late=True), ["a"], id=task_id, **{HEADER: waiting(task_id)}))

    assert kept_errors() == []


def kept_errors() -> list[BaseException]:
    return [each for each in gc.get_objects() if type(each) in {Postponed, Refused, Unsent}]


# ---------------------------------------------------------------- what a retry is sent with, and what a run knows


def told(self: Any, user: Any, value: int, times: int = 1) -> tuple[int, int]:
    """Return the value and the fencing number of the last of so many runs."""
    if self.request.retries + 1 < times:
        raise self.retry(countdown=0)
    return value, self.request.singlebeat.fence


@pytest.fixture
def buffered(app):
    """A task whose calls wait for a run of the same user, the latest of them."""
    options = {"unique_on": ["user"], "overlap": "buffer_one", "bind": True, "base": Singleton, "shared": False}
    return app.task(told, name="app.told", **options)


@pytest.fixture
def run(app, buffered):
    """A run of that task, of user "a"."""
    run = Ref(buffered.generate_lock(buffered.name, ["a", 0]), "run", nonce="n")
    backend_of(app).begin(run, lease=60, remember_for=60, task=buffered.name, arguments="")
    return run


@pytest.mark.parametrize("unique_on", [None, ["user"]])
def test_the_latest_arguments_reach_the_code_of_another_release(app, deliver, buffered, run, unique_on):
    result = buffered.delay("a", 2)
    assert buffered.delay("a", 3).id == result.id
    backend_of(app).finish_many([run], remember_for=60)

    buffered.unique_on = unique_on
    started(deliver(buffered))

    assert result.get(timeout=5)[0] == 3


def test_a_retry_has_the_latest_arguments_too(app, deliver, buffered, run):
    result = buffered.delay("a", 2, times=3)
    assert buffered.delay("a", 3, times=3).id == result.id
    backend_of(app).finish_many([run], remember_for=60)

    for _ in range(3):
        started(deliver(buffered))

    assert result.get(timeout=5)[0] == 3


def test_a_lost_message_that_others_have_joined_says_that_they_are_lost(app, buffered, redis, caplog):
    buffered.delay("a", 1)
    backend, lock = backend_of(app), first_lock(buffered)
    assert buffered.delay("a", 2).is_duplicate
    ((_, record),) = backend.read([lock])

    lost.free(app, [lost.Found(lost.Waiting.of(lock, record), MESSAGE_LOST, "its queue was purged")])

    assert not redis.exists(lock)
    (said,) = [each.message for each in caplog.records if "event=message_lost" in each.message]
    assert "its queue was purged; the calls that have joined it are lost with it" in said
    assert "payload" not in record, "arguments may be secret"


def test_a_lock_that_was_named_twice_is_freed_and_logged_once(app, buffered, redis, caplog):
    result, lock = buffered.delay("a", 1), first_lock(buffered)
    redis.hincrby(lock, "since", -120_000)
    redis.expire(lock, 3600 - 120)
    app.backend.mark_as_done(result.id, None)

    (found,) = lost.LostMessages(app).search(backend_of(app), [lock, lock])

    assert found.outcome == RAN_ELSEWHERE
    assert not redis.exists(lock)
    assert len([each for each in caplog.records if "event=ran_elsewhere" in each.message]) == 1


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_the_result_of_a_run_is_not_that_of_its_retry(app, deliver, redis, base):
    task = app.task(retries_and_returns, name="app.later", bind=True, base=base, shared=False)
    task_id, lock = uuid(), "SINGLETONLOCK_a"
    started(deliver(task, [], id=task_id, **{HEADER: {"id": task_id, "key": lock}}))
    renewer_of(app).flush()
    assert AsyncResult(task_id, app=app).state == "SUCCESS"
    redis.hincrby(lock, "since", -1_000_000)  # its countdown is over, and it waits in a long queue
    redis.hdel(lock, "renewed")

    found = lost.LostMessages(app).search(backend_of(app), [lock])

    assert [each.outcome for each in found] in ([], [""])
    assert redis.hget(lock, "gen") == "1"


class OwnHeaders(Task):
    """A task whose user makes the headers of its retries."""

    def signature_from_request(self, *args: Any, **kwargs: Any) -> Any:
        return super().signature_from_request(*args, **{**kwargs, "headers": {"user": "u"}})


@pytest.mark.parametrize("copied", [{}, {"headers": {"sentry-trace": "t"}}], ids=["", "by Sentry"])
def test_a_message_that_is_put_off_keeps_its_ticket_beside_own_headers(app, deliver, redis, other, copied):
    task = app.task(same, name="app.task", shared=False, base=OwnHeaders)
    task_id = uuid()
    started(deliver(task, ["a"], id=task_id, **{HEADER: waiting(task_id), RUN_HEADER: {"entry": "e"}}, **copied))

    again = deliver(task)

    assert again.ticket is not None
    assert again.request_dict[RUN_HEADER] == {"entry": "e"}
    assert again.request_dict.get("headers") == copied.get("headers")
    assert "user" not in again.request_dict, "it is no retry"


def test_a_task_keeps_its_lock_in_a_custom_backend_while_its_retries_wait(app, deliver, tmp_path):
    app.conf.singleton_backend_class = "tests.redis.test_legacy_backend.FileBackend"
    app.conf.singleton_backend_url = f"file:{tmp_path / 'locks'}"
    task = app.task(told, name="app.told", bind=True, base=Singleton, shared=False)
    result = task.delay("a", 1, times=4)

    for _ in range(3):
        started(deliver(task))
        assert task.delay("a", 1, times=4).id == result.id
    started(deliver(task))

    assert result.get(timeout=5) == [1, 0]
    assert not task.delay("a", 1, times=4).is_duplicate


def test_arguments_in_a_lock_that_cannot_be_read_leave_a_run_its_own(app, deliver, buffered, run, redis, caplog):
    lock = run.key
    result = buffered.delay("a", 2)
    redis.hset(behind_key(lock), "payload", '["application/x-python-serialize", "binary", "gASVAAAA"]')
    backend_of(app).finish_many([run], remember_for=60)

    started(deliver(buffered))

    assert result.get(timeout=5)[0] == 2
    assert "event=payload_unreadable" in caplog.text


@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_that_is_terminated_while_it_waits_for_a_thread_is_over(app, deliver, redis, base, acks_late):
    """Its lock is free at once. Celery fails on the run when a thread is free for it."""
    bodies, lock, slot = list[str](), "SINGLETONLOCK_a", Event()

    def body(name: str) -> None:
        bodies.append(name)

    task = app.task(body, name="app.thread", base=base or app.Task, shared=False, acks_late=acks_late)
    task_id, pool = uuid(), ThreadPool(1, app=app)
    pool.executor.submit(slot.wait)
    backend_of(app).acquire_many([Call(Ref(lock, task_id), task.name, "", 60)])
    request = deliver(task, ["a"], pool=pool, id=task_id, **{HEADER: {"id": task_id, "key": lock}})
    request.execute_using_pool(pool)
    state.task_reserved(request)

    request.terminate(pool, "TERM")
    renewer_of(app).flush()
    held = backend_of(app).get(lock)
    slot.set()
    pool.executor.shutdown()
    renewer_of(app).flush()

    assert held is None
    assert bodies == []
    assert app.AsyncResult(task_id).state == states.REVOKED
    assert backend_of(app).get(lock) is None
    assert request not in state.active_requests
    assert messages(redis) == (0, 0)


class Killed(BaseException):
    """As gevent and eventlet raise it in a greenlet."""


@pytest.mark.parametrize("acks_late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("is_first", [False, True], ids=["killed after that", "killed before that"])
def test_a_greenlet_that_is_killed_before_its_body_frees_its_lock(app, deliver, monkeypatch, acks_late, is_first):
    """A revoke with ``terminate`` kills it while it tells that it has the run, which switches to other greenlets."""
    task = task_of(app, acks_late=acks_late)
    result, lock = task.delay("a"), task.generate_lock(task.name, ["a"])
    pool = SimpleNamespace(uses_semaphore=False, apply_async=lambda *_, **__: None, terminate_job=lambda *_: None)
    request = deliver(task, pool=pool)
    request.execute_using_pool(pool)

    def tell(event: str, **_: object) -> None:
        if event == "task-started":
            if not is_first:
                request.terminate(pool, "TERM")
            raise Killed

    monkeypatch.setattr(request, "send_event", tell)
    with pytest.raises(Killed):
        request.on_accepted(1, time.monotonic())
    if is_first:
        request.terminate(pool, "TERM")
    renewer_of(app).flush()

    assert request.time_start is not None
    assert backend_of(app).get(lock) is None
    assert result.state == states.REVOKED


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_that_celery_fails_to_begin_is_not_renewed(app, deliver, redis, base, monkeypatch):
    """In a thread, Celery 5.7 asks RabbitMQ for its former prefetch count there, and the connection may be lost."""
    task = app.task(same, name="app.task", base=base, shared=False)
    task_id, lock, pool = uuid(), "SINGLETONLOCK_a", SimpleNamespace(uses_semaphore=False, apply_async=Mock())
    request = deliver(task, ["a"], pool=pool, id=task_id, **{HEADER: {"id": task_id, "key": lock}})
    backend_of(app).acquire_many([Call(Ref(lock, task_id), task.name, "", 3600)])
    request.execute_using_pool(pool)

    def fail(self: Request, pid: int, time_accepted: float) -> None:
        self.time_start = time.time()
        raise OSError("the connection is lost")

    monkeypatch.setattr("celery.worker.request.Request.on_accepted", fail)
    renewer = renewer_of(app)
    with pytest.raises(OSError, match="lost"):
        request.on_accepted(1, time.monotonic())
    renewer.flush()

    assert not renewer._living()
    assert redis.hget(lock, "state") == "queued"
    assert 0 < redis.ttl(lock) <= renewer.lease
    about = {"lease": 60, "remember_for": 60, "task": task.name, "arguments": ""}
    again = backend_of(app).begin(Ref(lock, task_id, nonce="another delivery"), **about)
    assert again.verdict is Verdict.STARTED, "the broker may deliver it again"


def test_a_termination_without_a_ticket_is_left_to_celery(app, deliver):
    task, task_id, pool = app.task(same, name="app.plain", shared=False), uuid(), ThreadPool(1, app=app)
    request = deliver(task, ["a"], pool=pool, id=task_id)

    request.terminate(pool, "TERM")
    pool.executor.shutdown()

    assert request.ticket is None
    assert not request.acknowledged
    assert app.AsyncResult(task_id).state == states.PENDING


def test_a_pool_checks_its_processes_soon_after_a_run_was_terminated(app, deliver):
    """A process that has closed its files may not be dead yet: Celery's own check is 5 s later."""
    task, task_id, done = app.task(same, name="app.plain", shared=False), uuid(), list[str]()
    request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}})
    timer = renewer_of(app).timer = Timer()
    request.time_start = time.time()
    pool = SimpleNamespace(
        uses_semaphore=True,
        terminate_job=lambda *_: done.append("terminated"),
        maintain_pool=lambda: done.append("checked"),
    )

    request.terminate(pool, "TERM")

    assert done == ["terminated"]
    (due,) = timer.queue
    assert due.eta <= time.monotonic() + REAPED_AFTER
    due.entry()
    assert done == ["terminated", "checked"]


# ---------------------------------------------------------------- calls that are sent by name


BESIDE = [{"overlap": "allow_all"}, {"lock": "until_executing"}, {"lock": "until_expired", "lock_expiry": 600}]
IN_TURN = [
    *({"overlap": overlap} for overlap in ("buffer_one", "buffer_all", "cancel_other", "terminate_other")),
    {"lock": "while_executing", "overlap": "buffer_all"},
    {"lock": "until_and_while_executing"},
]
SKIPPED = [{}, {"overlap": "raise"}, {"lock": "while_executing"}]


@pytest.mark.parametrize(
    ("options", "becomes"),
    [
        *((options, (0, states.SUCCESS)) for options in BESIDE),
        *((options, (1, states.PENDING)) for options in IN_TURN),
        *((options, (0, states.REVOKED)) for options in SKIPPED),
    ],
    ids=str,
)
def test_a_call_that_is_sent_by_name_meets_its_equal_as_its_task_says(app, deliver, redis, options, becomes):
    task = task_of(app, **options)
    other = Ref(task.generate_lock(task.name, ["a"]), "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    result = app.send_task(task.name, ["a"])

    started(deliver(task))

    assert (redis.llen("celery"), result.state) == becomes
    assert backend_of(app).renew_many([other], lease=60) == [Renewal.RUNNING]


@pytest.mark.parametrize("how", ["redelivered", "dead-lettered", "neither"])
def test_a_returning_message_waits_for_a_quicker_equal_call(app, deliver, redis, how):
    task = task_of(app)
    lock = task.generate_lock(task.name, ["a"])
    first = task.delay("a")
    message = json.loads(redis.lpop("celery"))
    redis.delete(lock)  # its worker was killed, and the lease has ended
    other = Ref(lock, "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    if how == "dead-lettered":
        message["headers"]["x-death"] = [{"reason": "rejected", "count": 1, "queue": "celery"}]
    redis.lpush("celery", json.dumps(message))

    request = deliver(task)
    request.delivery_info["redelivered"] = how == "redelivered"
    started(request)

    skipped = how == "neither"
    assert (redis.llen("celery"), first.state) == ((0, states.REVOKED) if skipped else (1, states.PENDING))


@pytest.mark.parametrize("expires", [None, 1000])
def test_a_message_that_waits_in_a_worker_soon_shows_that_it_lives(app, deliver, redis, expires):
    """Of a task with a rate limit, the search for lost messages sees it nowhere else."""
    app.conf.singlebeat_lock_lease = 3000.0  # the next renewal of all is long after the test
    task = task_of(app)
    locks = [task.generate_lock(task.name, [user]) for user in "ab"]
    renewer_of(app).serve("w", name="")
    requests = []
    for user, lock in zip("ab", locks, strict=True):
        task.apply_async([user], expires=expires)
        requests.append(deliver(task))
        wait_until(lambda lock=lock: redis.hget(lock, "renewed"), timeout=30, what="a sign of life")

    assert redis.ttl(locks[1]) <= (expires or 3600)


@pytest.mark.parametrize("expires", [None, 1000])
def test_the_turn_of_a_waiting_message_lasts_as_long_as_the_message(app, deliver, redis, expires):
    task = task_of(app)
    lock = task.generate_lock(task.name, ["a"])
    other = Ref(lock, "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")
    task.apply_async(["a"], overlap="buffer_all", expires=expires)
    started(deliver(task))
    first_ttl = redis.ttl(turn_key(lock))

    request = deliver(task)  # it waits for its next try in the worker

    lease = Config.of(app).singlebeat_lock_lease
    assert lease - 60 < first_ttl <= lease
    ticket, refs = request.ticket, request.renewed()
    assert dict(zip(refs, backend_of(app).renew_many(refs, lease=2000), strict=True)) == {
        **({} if expires else dict.fromkeys((ticket.run, replace(ticket.run, key=behind_key(lock))), Renewal.LOST)),
        replace(ticket.run, key=turn_key(lock)): Renewal.QUEUED,
    }
    assert redis.ttl(turn_key(lock)) > 1900
    backend_of(app).finish_many(ticket.refs, remember_for=60)
    assert not redis.exists(turn_key(lock))


def call_itself(self: Any, user: Any) -> bool:
    """Return whether an equal call, made during this run, is a duplicate."""
    return self.delay(user).is_duplicate


@pytest.mark.parametrize("lock", ["until_executing", "until_executed"])
def test_a_run_sent_by_name_excludes_calls_if_its_lock_outlives_the_start(app, deliver, lock):
    task = app.task(call_itself, name="app.task", bind=True, base=Singleton, shared=False, lock=lock)
    result = app.send_task(task.name, ["a"])

    started(deliver(task))

    assert result.get(timeout=5) is (lock == "until_executed")


@pytest.mark.parametrize("lock", [mode for mode in LockMode if mode != "until_expired"])
def test_a_replacement_that_begins_before_its_run_has_ended_leaves_no_lock(app, deliver, redis, lock):
    begun: list[str] = []

    def replace_itself(self: Any, user: Any) -> None:
        begun.append(self.request.id)
        if len(begun) == 1:
            try:
                raise self.replace(self.si(user))
            finally:
                started(deliver(task))

    task = app.task(replace_itself, name="app.task", bind=True, base=Singleton, shared=False, lock=lock)
    first = task.delay("a")

    started(deliver(task))
    started(deliver(task))

    assert begun == [first.id, first.id]
    assert [key for key in redis.keys("SINGLETONLOCK*") if redis.type(key) == "hash"] == []
    assert not task.delay("a").is_duplicate


# ---------------------------------------------------------------- a run that has lost its lock


def steal(app: Celery, redis: Any, request: Request, thief: str, *, renewed: bool = True) -> None:
    """End the lock of a run, and maybe let another call or delivery acquire it, before the renewer notices."""
    run = request.ticket.run
    if renewed:
        renewer_of(app)._renew([request])
    redis.delete(run.key)
    if thief:
        of_another = {"id": Ref(run.key, "other", nonce="m"), "delivery": replace(run, nonce="m")}[thief]
        backend_of(app).begin(of_another, lease=60, remember_for=60, task="app.task", arguments="")


@pytest.mark.parametrize("thief", ["", "id", "delivery"])
@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("renewed_late", [False, True])
@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_that_ends_without_its_lock_says_so_once(app, deliver, redis, caplog, base, renewed_late, renewed, thief):
    """Its worker was stopped for longer than the lease, and its body ends just after that."""
    task, task_id, told = app.task(same, name="app.task", base=base, shared=False), uuid(), []
    renewer_of(app)._started = True  # the test is its thread
    request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}})
    request.time_start = time.monotonic()
    run = request.ticket.run
    if base is None:
        request.begin_for_plain_task()
    else:
        backend_of(app).begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    steal(app, redis, request, thief, renewed=renewed)

    with connected(signals.lock_lost, lambda sender, ref, **_: told.append((sender, ref))):
        if base is not None:  # the process of the run frees its lock first
            backend_of(app).finish_many([run], remember_for=60, took=True)
        if renewed_late:
            renewer_of(app)._renew([request])
        renewer_of(app).finish(request)
        for _ in range(2):
            renewer_of(app)._work_off()

    # Others are of an earlier test's thread.
    assert [(sender, ref) for sender, ref in told if ref.task_id == task_id] == [(task.name, run)]
    own = [record for record in caplog.records if task_id in record.getMessage()]
    assert [record.singlebeat["event"] for record in own] == ["lock_lost"]


@pytest.mark.parametrize("lock", [each for each in LockMode if each is not LockMode.UNTIL_EXECUTED])
def test_no_run_has_lost_a_lock_that_is_not_bound_to_its_end(app, deliver, redis, caplog, lock):
    expiry = {"lock_expiry": 60} if lock is LockMode.UNTIL_EXPIRED else {}

    def body(user: Any) -> None:
        if expiry:  # which is over
            redis.delete(*redis.keys("SINGLETONLOCK_*"))

    task = app.task(body, name="app.task", base=Singleton, shared=False, lock=str(lock), **expiry)
    task.delay("a")
    renewer_of(app)._started = True  # the test is its thread

    started(deliver(task))
    renewer_of(app)._work_off()

    assert redis.keys("SINGLETONLOCK_*[^e]") == []
    assert "lock_lost" not in caplog.text


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_without_its_lock_has_lost_none(app, deliver, redis, caplog, base, monkeypatch):
    task = app.task(same, name="app.task", base=base, shared=False)
    renewer_of(app)._started = True  # the test is its thread
    request = deliver(task, ["a"], id="a", **{HEADER: Ticket("a", "SINGLETONLOCK_a").header()})
    monkeypatch.setattr(type(backend_of(app)), "begin", Mock(side_effect=LockBackendError("away")))

    started(request)
    renewer_of(app)._work_off()

    assert "event=unlocked" in caplog.text
    assert "lock_lost" not in caplog.text


def test_a_run_that_was_refused_has_lost_no_lock(app, deliver, redis, caplog):
    caplog.set_level("INFO")
    task = task_of(app)
    task.delay("a")
    renewer_of(app)._started = True  # the test is its thread
    request = deliver(task)
    redis.delete(request.ticket.key)
    other = Ref(request.ticket.key, "other", nonce="n")
    backend_of(app).begin(other, lease=60, remember_for=60, task=task.name, arguments="")

    started(request)
    renewer_of(app)._work_off()

    assert "event=duplicate" in caplog.text
    assert "lock_lost" not in caplog.text


def test_a_run_that_begins_while_locks_are_renewed_has_not_lost_its_lock(app, deliver, redis, caplog, monkeypatch):
    """The answer is of the moment before."""
    task, task_id = app.task(same, name="app.task", shared=False), uuid()
    renewer_of(app)._started = True  # the test is its thread
    request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}})
    renew = renewer_of(app).backend.renew_many

    def renew_first(*args: Any, **options: Any) -> Any:
        answer = renew(*args, **options)
        request.time_start = time.monotonic()
        request.begin_for_plain_task()
        return answer

    monkeypatch.setattr(renewer_of(app).backend, "renew_many", renew_first)
    renewer_of(app)._renew([request])

    assert request.has_begun
    assert "lock_lost" not in caplog.text


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_that_ends_with_its_lock_has_not_lost_it(app, deliver, redis, caplog, base):
    """Its process frees the lock, and another call acquires it, before its worker hears of the end."""
    task, task_id = app.task(same, name="app.task", base=base, shared=False), uuid()
    renewer_of(app)._started = True  # the test is its thread
    request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}})
    request.time_start = time.monotonic()
    run = request.ticket.run
    backend_of(app).begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    renewer_of(app)._renew([request])

    if base is not None:
        backend_of(app).finish_many([run], remember_for=60, took=True)
        backend_of(app).begin(Ref(run.key, "other"), lease=60, remember_for=60, task="app.task", arguments="")
    renewer_of(app).finish(request)
    renewer_of(app)._work_off()

    assert "lock_lost" not in caplog.text


# ---------------------------------------------------------------- a lock that ends in the queue


@pytest.mark.parametrize(
    "holder",
    ["runs", "has run and retries", "waits", "has acquired the lock since then", "has acquired the place since then"],
)
@pytest.mark.parametrize("overlap", ["buffer_one", "cancel_other", "terminate_other"])
def test_the_last_arguments_are_not_dropped_for_an_older_run(app, deliver, redis, other, overlap, holder):
    """No worker was there for longer than a queued lock lasts, so that each call has got the lock, and none is left."""
    ran = []

    def body(user: str, number: int) -> None:
        ran.append(number)

    task = app.task(body, name="app.task", base=Singleton, unique_on=["user"], overlap=overlap, shared=False)
    task.generate_lock = lambda *_, **__: other.key
    redis.delete(other.key)
    task.delay("a", 2)
    redis.delete(other.key)
    about = {"lease": 60, "remember_for": 60, "task": task.name, "arguments": ""}
    if holder == "has acquired the lock since then":
        backend_of(app).acquire_many([Call(replace(other, nonce=""), task.name, "", 60)])
    backend_of(app).begin(other, **about)
    if holder == "has acquired the place since then":
        newer = Call(Ref(other.key, "newer"), task.name, "", 60, payload="[]", if_held=IfHeld.JOIN)
        assert backend_of(app).acquire_many([newer])[0].verdict is Verdict.WAITING
    elif holder == "has run and retries":
        backend_of(app).rotate(other, to=replace(other, generation=1, nonce=""), ttl=60, remember_for=60)
    elif holder == "waits":
        backend_of(app).begin(replace(other, task_id="waits", nonce="w"), turn_ttl=60, **about)
        backend_of(app).finish_many([other], remember_for=60, ran=True)

    started(deliver(task))

    if "acquired" in holder:  # it is newer: the older arguments must not run after its own
        assert messages(redis) == (0, 0)
        return
    assert messages(redis) == (1, 0)
    redis.delete(other.key, turn_key(other.key))
    started(deliver(task))
    assert ran == [2]


@pytest.mark.parametrize("mode", ["until_expired", "until_executing"])
def test_a_copy_of_a_run_is_refused_after_its_lock_has_expired(app, deliver, redis, mode):
    """The run has a lock of its own, which refuses nothing else, and so lasts as long as the run."""
    told = []

    def body(user: Any) -> None:
        run = task.request.singlebeat.ticket.run
        bound = redis.hget(run.key, "until")
        copy = replace(run, nonce="copy")
        verdict = backend_of(app).begin(copy, lease=60, remember_for=60, task=task.name, arguments="").verdict
        told.append((bound, verdict))

    task = app.task(body, name="app.task", base=Singleton, shared=False, lock=mode, lock_expiry=5)
    task.delay("a")
    renewer_of(app)._started = True  # the test is its thread
    started(deliver(task))
    renewer_of(app)._work_off()

    assert told == [(None, Verdict.COPY)]


class InContext(Task):
    """Flask's pattern: each run has the app's context."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.in_context = True
        return self.run(*args, **kwargs)


class InContextFirst(InContext, Singleton):
    abstract = True


class InContextLast(Singleton, InContext):
    abstract = True


class OwnCall(Singleton):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.in_context = True
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("base", [InContextFirst, InContextLast, OwnCall])
def test_a_class_with_its_own_call_runs_under_its_lock(app, deliver, redis, base):
    told = []

    def body(user: Any) -> None:
        run = task.request.singlebeat.ticket.run
        told.append((user, task.request.id, redis.hget(run.key, "state"), task.in_context))
        assert redis.hget(run.key, "nonce") == run.nonce

    task = app.task(body, name="app.task", base=base, shared=False, in_context=False)
    sent = task.delay("a")
    renewer_of(app)._started = True  # the test is its thread
    started(deliver(task))
    renewer_of(app)._work_off()

    assert told == [("a", sent.id, "running", True)]
    assert redis.keys("SINGLETONLOCK_*[^e]") == []
    task.in_context = False
    task.run = lambda user: user  # a direct call is one of a plain function
    assert (task("b"), task.in_context) == ("b", True)


# ---------------------------------------------------------------- what follows a run


@pytest.fixture
def run_first(app, deliver, monkeypatch):
    """Runs the first step of a chain, and returns what another delivery of its message is told with a given lease."""

    def run(
        base: type | None, body: Any, *, acks_late: bool = True, unsent: Exception | None = None, told: bool = True
    ) -> Any:
        task = app.task(body, name="app.first", base=base, shared=False, acks_late=acks_late)
        then = app.task(same, name="app.then", shared=False)
        first, ticket = task.si("a"), Ticket("first", "SINGLETONLOCK_{a}", "SINGLETONLOCK_{a}")
        (first.set(task_id="first", headers={} if base else {HEADER: ticket.header()}) | then.si("b")).apply_async()
        renewer_of(app)._started = True  # the test is its thread
        request = deliver(task)
        with monkeypatch.context() as patch:
            if unsent is not None:
                patch.setattr(Signature, "apply_async", Mock(side_effect=unsent))
            if not told:  # a child process runs it, and the main process reads no result
                patch.setattr("singlebeat.tasks.gate.has_renewer", lambda _: False)
                patch.setattr(Request, "free_if_acknowledged", lambda _: None)
            started(request)
        renewer_of(app)._work_off()

        def again(lease: float) -> Verdict:
            about = {"remember_for": 60, "task": task.name, "arguments": ""}
            return backend_of(app).begin(replace(request.ticket.run, nonce="again"), lease=lease, **about).verdict

        return again

    return run


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
@pytest.mark.parametrize("unsent", [OperationalError("away"), RuntimeError("away")], ids=["broker", "another"])
@pytest.mark.parametrize("told", [True, False], ids=["by the main process", "by its child process alone"])
def test_a_run_whose_next_step_cannot_be_sent_may_run_again_after_a_lease(run_first, redis, caplog, base, unsent, told):
    """Celery may not have been able to acknowledge its message either. Without a lock it would run again at once."""
    again = run_first(base, same, unsent=unsent, told=told)

    assert redis.keys("SINGLETONLOCK_*[^e]") == []
    assert again(60) is Verdict.COPY
    assert again(0) is Verdict.STARTED
    assert "lock_lost task=app.first" not in caplog.text


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
@pytest.mark.parametrize("told", [True, False], ids=["by the main process", "by its child process alone"])
def test_a_run_whose_next_step_is_sent_does_not_run_again(run_first, caplog, base, told):
    """Celery may cancel a run that has ended, as its connection to the broker is lost, and get its message again."""
    again = run_first(base, same, told=told)

    assert again(0) is Verdict.DONE
    assert "lock_lost task=app.first" not in caplog.text


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
@pytest.mark.parametrize("error", [ValueError, OperationalError])
def test_a_run_that_fails_does_not_run_again_though_a_step_would_follow(run_first, base, error):
    def body(user: Any) -> None:
        raise error(user)

    assert run_first(base, body)(0) is Verdict.DONE


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_whose_message_was_acknowledged_first_does_not_run_again(run_first, base):
    again = run_first(base, same, acks_late=False, unsent=OperationalError("away"))

    assert again(0) is Verdict.DONE


def test_a_run_goes_on_between_its_body_and_what_follows(app, deliver, redis, caplog, monkeypatch):
    """The thread renews locks meanwhile: the run has freed its own."""
    task = app.task(same, name="app.first", base=Singleton, shared=False, acks_late=True)
    (task.si("a") | app.task(same, name="app.then", shared=False).si("b")).apply_async()
    renewer_of(app)._started = True  # the test is its thread
    request, send = deliver(task), Signature.apply_async

    told = []

    def send_late(*args: Any, **options: Any) -> Any:
        redis.zadd(done_key(request.ticket.key), {f"{request.id}:0:unsent": 1}, xx=True)  # for longer than a lease
        for _ in range(2):
            renewer_of(app)._renew([request])
            copy = replace(request.ticket.run, nonce="copy")
            told.append(backend_of(app).begin(copy, lease=60, remember_for=60, task=task.name, arguments="").verdict)
        return send(*args, **options)

    monkeypatch.setattr(Signature, "apply_async", send_late)
    started(request)
    renewer_of(app)._work_off()

    assert told == [Verdict.COPY] * 2
    assert "lock_lost task=app.first" not in caplog.text


# ---------------------------------------------------------------- a run that is ended by force


def past_its_limit() -> ExceptionInfo:
    """Return the end of a run that a pool has ended by force."""
    try:
        raise TimeLimitExceeded(1)  # noqa: TRY301 - only what was raised has a traceback
    except TimeLimitExceeded:
        return ExceptionInfo()


@pytest.mark.parametrize("first", ["the end", "the limit"])
def test_a_timed_out_run_keeps_message_and_lock_until_its_process_is_dead(app, deliver, redis, first):
    task = task_of(app, acks_late=True, acks_on_failure_or_timeout=False)
    timer = renewer_of(app).timer = Timer()
    request = deliver(task, ["a"])
    backend, run = backend_of(app), request.ticket.run
    backend.begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    request.on_accepted(1, time.monotonic())
    began = time.monotonic()

    # Pools differ in what they tell first.
    news = [lambda: request.on_failure(past_its_limit()), lambda: request.on_timeout(False, 1)]
    for tell in news if first == "the end" else reversed(news):
        tell()

    assert messages(redis) == (0, 1)
    renewer_of(app).flush()
    assert backend.renew_many([run], lease=60) == [Renewal.RUNNING]
    entries = list(timer.queue)
    assert min(due.eta for due in entries) >= began + 0.5
    for due in entries:
        due.entry()
    assert messages(redis) == (1, 0)
    renewer_of(app).flush()
    assert redis.hget(run.key, "state") == "queued"


@pytest.mark.parametrize(
    ("options", "waiting"),
    [({}, 0), ({"acks_late": True}, 0), ({"acks_late": True, "acks_on_failure_or_timeout": False}, 1)],
    ids=["early", "late", "requeued"],
)
def test_a_hard_time_limit_that_cannot_be_stored_ends_its_run(app, deliver, redis, monkeypatch, options, waiting):
    """In a pool of greenlets, no other end follows."""
    task, timer = task_of(app, **options), Timer()
    renewer_of(app).timer = timer
    pool = SimpleNamespace(uses_semaphore=False, apply_async=Mock())
    request = deliver(task, ["a"], pool=pool)
    request.execute_using_pool(pool)
    run = request.ticket.run
    backend_of(app).begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    request.on_accepted(1, time.monotonic())
    monkeypatch.setattr(task.backend, "mark_as_failure", Mock(side_effect=ConnectionError("away")))

    with pytest.raises(ConnectionError):
        request.on_timeout(False, 1)
    for due in [*timer.queue]:
        due.entry()

    assert messages(redis) == (waiting, 0)
    state = "queued" if waiting else None
    wait_until(lambda: redis.hget(run.key, "state") == state, what="the end of the lock")


@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize("report", ["on_success", "on_failure"])
def test_no_error_of_celery_at_the_end_of_a_run_keeps_its_lock(app, deliver, redis, monkeypatch, report, acks_late):
    """Celery leaves the message with the worker: a run that its next delivery makes starts at once."""
    task, pool = task_of(app, acks_late=acks_late), SimpleNamespace(uses_semaphore=True, apply_async=Mock())
    request = deliver(task, ["a"], pool=pool)
    request.execute_using_pool(pool)
    run = request.ticket.run
    backend_of(app).begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    request.on_accepted(1, time.monotonic())
    try:
        raise MemoryError  # noqa: TRY301 - only what was raised has a traceback
    except MemoryError:
        error = ExceptionInfo()

    with pytest.raises(MemoryError):
        request.on_success((True, error, 1.0)) if report == "on_success" else request.on_failure(error)
    renewer_of(app).flush()

    assert redis.hget(run.key, "state") == ("queued" if acks_late else None)
    assert request not in renewer_of(app)._living()


@pytest.mark.parametrize("during", ["renew_many", "begin"])
def test_a_run_that_is_requeued_while_it_is_renewed_leaves_its_lock(app, deliver, redis, monkeypatch, during):
    """Else its next delivery would be dropped as a copy of a run that is over."""
    task, renewer = task_of(app, acks_late=True), renewer_of(app)
    renewer._started = True  # the test does the work of its thread
    task.delay("a")
    request = deliver(task)
    run = request.ticket.run
    request.on_accepted(1, time.monotonic())
    requeues, handle = Thread(target=lambda: request.reject(requeue=True)), getattr(renewer.backend, during)

    def meanwhile(*args: Any, **options: Any) -> Any:
        if requeues.ident is None:
            requeues.start()
        wait_until(lambda: request not in renewer._living(), what="the other thread")
        if during == "renew_many":
            requeues.join(10)
        return handle(*args, **options)

    monkeypatch.setattr(renewer.backend, during, meanwhile)
    if during == "renew_many":
        backend_of(app).begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    renewer._renew([request])
    requeues.join(10)

    assert redis.hget(run.key, "state") == "queued"
    assert messages(redis) == (1, 0)


@pytest.mark.parametrize("base", [Task, Singleton])
@pytest.mark.parametrize("requeue", [False, True], ids=["", "requeued"])
def test_a_rejected_run_whose_failure_cannot_be_stored_is_rejected(app, deliver, redis, monkeypatch, base, requeue):
    """Celery stores the failure first; without an answer to the broker, the worker would renew the lock for ever."""
    task, task_id = app.task(same, name="app.task", base=base, shared=False, acks_late=True), uuid()
    request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}})
    run = request.ticket.run
    backend_of(app).begin(run, lease=60, remember_for=60, task=task.name, arguments="")
    request.on_accepted(1, time.monotonic())
    monkeypatch.setattr(
        task.backend, "mark_as_failure", Mock(side_effect=ConnectionError("the result backend is away"))
    )
    try:
        raise Reject("no", requeue=requeue)  # noqa: TRY301 - only what was raised has a traceback
    except Reject:
        error = ExceptionInfo()

    with suppress(ConnectionError):  # Celery before 5.7 stores none
        request.on_failure(error)
    renewer_of(app).flush()

    assert messages(redis) == (int(requeue), 0)
    assert redis.hget(run.key, "state") == ("queued" if requeue else None)


@pytest.fixture
def begun(app: Celery, deliver: Deliver) -> Callable[..., Request]:
    """Returns the request of a plain task with a lock that has begun: its body raises the error, or returns."""

    def begun(error: Exception | None = None) -> Request:
        def body(user: Any) -> Any:
            if error is not None:
                raise error
            return user

        task, task_id = app.task(body, name="app.task", shared=False), uuid()
        request = deliver(task, ["a"], id=task_id, **{HEADER: {"id": task_id, "key": "SINGLETONLOCK_a"}})
        request.begin_for_plain_task()
        return request

    return begun


def trace(request: Request) -> None:
    """Run the task of a request as the process of a pool does, up to the sending of its result."""
    headers = {**request.request_dict, "delivery_info": {}, "is_eager": False}
    build_tracer(request.name, request.task, app=request.app)(request.id, ["a"], {}, headers)


@pytest.mark.parametrize(
    ("error", "frees"),
    [(None, True), (ValueError(), True), (Retry(), True), (Reject(), False), (Ignore(), False)],
    ids=["success", "failure", "retry", "reject", "ignore"],
)
def test_a_child_frees_the_lock_of_a_plain_run_that_is_over(begun, app, redis, caplog, error, frees):
    request = begun(error)

    assert ended_well(fork(lambda: trace(request)))

    run = request.ticket.run
    assert backend_of(app).get(run.key) == (None if frees else request.id)
    if frees:
        assert backend_of(app).renew_many([run], lease=60) == [Renewal.OVER]
        request.has_begun = True
        request.on_accepted(1, time.monotonic())
        request.on_success((False, "a", 0.1))
        renewer_of(app).flush()
    assert f"lock_lost task=app.task id={request.id}" not in caplog.text


def test_a_pool_without_processes_leaves_the_lock_to_the_main_process(begun, app):
    request = begun()

    trace(request)

    assert backend_of(app).get(request.ticket.key) == request.id


def test_a_pool_without_processes_tells_an_end_before_a_late_ack(begun, app):
    """That may fail, or hang: a lost connection to RabbitMQ does both."""
    request = begun()
    request.task.acks_late = True

    trace(request)
    renewer_of(app).flush()

    assert backend_of(app).get(request.ticket.key) is None
    assert backend_of(app).renew_many([request.ticket.run], lease=60) == [Renewal.OVER]


def test_a_child_asks_a_locks_server_that_hangs_once_in_a_while(begun, app, own_server, monkeypatch):
    app.conf.update(singleton_backend_url=own_server.url, singlebeat_socket_timeout=0.1)
    request, asked = begun(), list[Celery]()
    monkeypatch.setattr("singlebeat.tasks.gate.backend_of", lambda app: asked.append(app) or backend_of(app))
    own_server.pause()

    def trace_two() -> None:
        trace(request)
        trace(request)
        assert len(asked) == 1

    assert ended_well(fork(trace_two))


def test_every_app_has_a_renewer_of_its_own_and_takes_it_along(server):
    for lease in (1, 2, 3):
        with Celery(set_as_current=False) as app:
            app.conf.update(singleton_backend_url=server.url, singlebeat_lock_lease=lease)
            assert renewer_of(app).lease == lease
            assert renewer_of(app) is renewer_of(app)
        gone = ref(app)
        del app
        gc.collect()  # the next one may have its address
        assert gone() is None


@pytest.mark.parametrize("ends", ["retry", "replace", "Ignore"])
def test_the_end_of_a_run_that_was_replaced_is_remembered_at_once(app, deliver, redis, ends):
    """Its retry goes on: a copy of its message must not run though its worker dies before it can tell the end."""

    def body(self: Any, user: Any) -> None:
        if ends == "retry":
            raise self.retry(countdown=0)
        if ends == "replace":
            self.replace(app.tasks["app.then"].si("c"))
        raise Ignore

    task = app.task(body, name="app.first", base=Singleton, shared=False, acks_late=True, bind=True)
    (task.si("a") | app.task(same, name="app.then", shared=False).si("b")).apply_async()
    renewer_of(app)._started = True  # which never tells it
    request = deliver(task)

    started(request)

    assert redis.zscore(done_key(request.ticket.key), f"{request.id}:0") is not None


@pytest.mark.parametrize("base", [None, Singleton], ids=["plain", "Singleton"])
def test_a_run_that_its_pool_cannot_cancel_ends_as_any_other(app, deliver, base):
    """Celery tries to cancel it when the connection to the broker is lost, and has acknowledged it in vain then."""
    task = app.task(same, name="app.first", base=base, shared=False, acks_late=True)
    then = app.task(same, name="app.then", shared=False)
    headers = {} if base else {HEADER: Ticket("first", "SINGLETONLOCK_{a}", "SINGLETONLOCK_{a}").header()}
    (task.si("a").set(task_id="first", headers=headers) | then.si("b")).apply_async()
    renewer_of(app)._started = True  # the test is its thread
    request, pool = deliver(task), ThreadPool(1)
    request.time_start = time.time()
    with suppress(NotImplementedError):
        request.cancel(pool)
    started(request)
    renewer_of(app)._work_off()

    copy, about = replace(request.ticket.run, nonce="copy"), {"task": task.name, "arguments": ""}
    assert backend_of(app).begin(copy, lease=0, remember_for=60, **about).verdict is Verdict.DONE


def test_a_lock_does_not_wait_for_a_retry_that_was_not_sent(app, deliver, redis, monkeypatch):
    """Neither the broker nor the locks' server answers any more: the promise to the retry cannot be taken back now."""

    def body(self: Any, user: Any) -> None:
        monkeypatch.setattr(app.amqp, "send_task_message", Mock(side_effect=OperationalError("away")))
        monkeypatch.setattr(task.singleton_backend, "promise", promise)
        raise self.retry(countdown=0)

    def promise(run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
        if to is None:
            raise LockBackendError("away")
        return RedisBackend.promise(task.singleton_backend, run, to=to, ttl=ttl, note=note)

    task = app.task(body, name="app.first", base=Singleton, shared=False, bind=True)
    task.delay("a")
    request = deliver(task)
    started(request)
    renewer_of(app).flush()

    wait_until(lambda: not redis.exists(request.ticket.key), what="the release of the lock")


@pytest.mark.parametrize("holder", ["another run", "its own run"])
def test_a_retry_of_a_plain_task_waits_for_its_lock_and_is_not_dropped(app, deliver, holder):
    plain, task_id, lock = app.task(same, name="app.plain", shared=False), uuid(), "SINGLETONLOCK_a"
    run = Ref(lock, task_id if holder == "its own run" else "other", nonce="n")
    backend_of(app).begin(run, lease=60, remember_for=60, task=plain.name, arguments="")
    retry = deliver(plain, ["a"], id=task_id, retries=1, **{HEADER: {"id": task_id, "key": lock}})

    with pytest.raises(Postponed):
        retry.begin_for_plain_task()

    again = deliver(plain)
    assert again.ticket.pause < (0.1 if holder == "its own run" else 1)
    assert again.ticket.generation == 1
