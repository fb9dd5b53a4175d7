"""What a call does about its lock before it is sent, and what is left of one that was not; without a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from celery import Celery, Task
from celery.exceptions import Reject, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError, OperationalError, SerializerNotInstalled
from pydantic import BaseModel
from redis import Redis

from singlebeat import Singleton
from singlebeat.errors import LockBackendError
from singlebeat.locks import backend_of, late_release
from singlebeat.locks.base import HEADER, RUN_HEADER, Call, Holder, IfHeld, Ref, Renewal, Ticket, Verdict
from singlebeat.locks.key import behind_key
from singlebeat.locks.late_release import release_later
from singlebeat.locks.memory import MemoryBackend
from singlebeat.locks.modes import decode_arguments
from singlebeat.locks.redis import RedisBackend
from singlebeat.tasks.gate import Postponed
from singlebeat.tasks.resend import MESSAGE, Message
from tests.redis.test_legacy_backend import BytesBackend
from tests.support import ROOT, wait_until
from tests.system.apps import make_app

MEMORY, LEASE = 3600.0, 60.0


def hold(value: Any, more: Any = None) -> None: ...


@pytest.fixture
def define(app) -> Callable[..., Any]:
    """Return a new Singleton with these options."""

    def define(function: Callable[..., Any] = hold, **options: Any) -> Any:
        function.__name__ = "function"  # a lambda's is no name for Celery
        return app.task(function, **{"name": "claimed", "base": Singleton, "shared": False, **options})

    return define


class Shop:
    """What others do to a lock: its calls run and end, all without a worker."""

    def __init__(self, app: Celery, redis: Redis) -> None:
        self.app, self.redis, self.backend = app, redis, backend_of(app)

    def begin(self, lock: str, task_id: str, generation: int = 0) -> Ref:
        self.begins(lock, task_id, generation)
        return Ref(lock, task_id, generation, f"run of {task_id}")

    def begins(self, lock: str, task_id: str, generation: int = 0) -> Holder:
        run = Ref(lock, task_id, generation, f"run of {task_id}")
        queued = behind_key(lock)
        return self.backend.begin(run, queued=queued, lease=LEASE, remember_for=MEMORY, task="claimed", arguments="")

    def run(self, lock: str, task_id: str) -> None:
        """Let a call that waits run and end."""
        self.backend.finish_many([self.begin(lock, task_id)], remember_for=MEMORY, ran=True)

    @property
    def sent(self) -> list[str]:
        """The ids of the messages in the queue, the first one first."""
        return [json.loads(raw)["headers"]["id"] for raw in self.redis.lrange("celery", 0, -1)[::-1]]

    def holder(self, lock: str) -> list[str | None]:
        return self.redis.hmget(lock, "id", "state")


@pytest.fixture(params=["one write", "two writes"])
def writes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a call and its lock are written: together, or one after the other, as if the broker were elsewhere."""
    if request.param == "two writes":
        monkeypatch.setattr(RedisBackend, "sends", False)
    return request.param


@pytest.fixture
def two_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send calls as if the broker were on another server than the locks."""
    monkeypatch.setattr(RedisBackend, "sends", False)


@pytest.fixture
def shop(app, redis, writes) -> Shop:
    return Shop(app, redis)


@pytest.fixture
def revoked(app, server, redis) -> Iterator[Callable[[], list[str]]]:
    """Tells which task ids were revoked so far."""
    with redis.pubsub() as ears:
        ears.psubscribe("*pidbox*")
        wait_until(lambda: ears.get_message(timeout=5), what="the subscription")

        def revoked() -> list[str]:
            app.control.revoke("the last one")
            found: list[str] = []
            while True:
                message = wait_until(lambda: ears.get_message(timeout=5), what="a revocation")
                body = json.loads(message["data"])["body"]
                arguments = json.loads(b64decode(body))["arguments"]
                if arguments["task_id"] == "the last one":
                    return found
                found.append(arguments["task_id"])

        yield revoked


def by_beat(task: Any, task_id: str, *args: Any, **options: Any) -> Any:
    """Send a call as beat does: under an id that is computed, and may have been sent before."""
    return task.apply_async(args, task_id=task_id, headers={RUN_HEADER: {"entry": "e"}}, **options)


# ---------------------------------------------------------------- a call that was sent before


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other", "buffer_one"])
@pytest.mark.parametrize("waiting", [False, True], ids=["runs", "waits"])
def test_a_call_that_has_run_does_nothing_to_the_one_after_it(define, shop, revoked, overlap, waiting):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    by_beat(task, "first", 1)
    shop.run(lock, "first")
    task.apply_async([1], task_id="second")
    if not waiting:
        shop.begin(lock, "second")
    before = shop.redis.hgetall(lock)

    result = by_beat(task, "first", 1)

    assert (result.id, result.is_duplicate) == ("first", True)
    assert revoked() == []
    assert shop.sent == ["first", "second"]
    assert shop.redis.hgetall(lock) == before


# ---------------------------------------------------------------- a call that comes after another


class ByInitial(Singleton):
    """Makes calls equal whose values begin alike, by a key of its own."""

    abstract = True

    def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> str:
        return super().generate_lock(task_name, [task_args[0][:1]], {})


@pytest.mark.parametrize("runs", [False, True], ids=["waits", "runs"])
def test_a_custom_key_leaves_the_latest_arguments_to_the_waiting_call(define, shop, runs):
    task = define(base=ByInitial, overlap="buffer_one")
    lock = task.generate_lock(task.name, ["early"])
    task.apply_async(["early"], task_id="first")
    if runs:
        shop.begin(lock, "first")
        task.apply_async(["even later"], task_id="second")
    waiting, place = ("second", behind_key(lock)) if runs else ("first", lock)

    result = task.delay("eventually")

    assert shop.sent == (["first", "second"] if runs else ["first"])
    assert (result.id, result.is_duplicate) == (waiting, True)
    assert decode_arguments(shop.redis.hget(place, "payload"))[0] == ["eventually"]


@pytest.mark.parametrize("overlap", ["skip", "buffer_one"])
def test_no_call_overtakes_a_call_that_waits_between_two_tries(define, shop, overlap):
    task = define(overlap="buffer_one", unique_on=[])
    lock = task.generate_lock(task.name, [1])
    task.apply_async([1], task_id="first")
    run = shop.begin(lock, "first")
    task.apply_async([2], task_id="older")
    shop.backend.finish_many([run], remember_for=MEMORY)

    result = task.apply_async([3], task_id="latest", overlap=overlap)

    assert (result.id, result.is_duplicate) == ("older", True)
    assert shop.sent == ["first", "older"]


@pytest.mark.skipif(not hasattr(Task, "_dump_pydantic_arguments"), reason="this Celery sends no models")
def test_a_model_of_pydantic_is_kept_as_it_is_sent(app, shop):

    class Model(BaseModel):
        a: int

    def body(model: Model) -> None: ...

    body.__annotations__["model"] = Model  # not as text: the class is local
    task = app.task(
        body, name="modelled", base=Singleton, shared=False, pydantic=True, overlap="buffer_one", unique_on=[]
    )
    task.apply_async([Model(a=1)], task_id="first")

    task.delay(Model(a=2))

    payload = shop.redis.hget(task.generate_lock(task.name, [Model(a=1)]), "payload")
    assert decode_arguments(payload) == ([{"a": 2}], {})


# ---------------------------------------------------------------- a call that cannot be sent


def test_arguments_without_json_cannot_be_kept_for_another_run(define, shop):
    task = define(overlap="buffer_one", unique_on=["value"], serializer="pickle")

    with pytest.raises(TypeError, match="buffer_one keeps arguments as JSON, argument 1 has none"):
        task.delay(1, object())

    assert shop.sent == []
    assert shop.redis.keys("SINGLETONLOCK_*") == []


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
@pytest.mark.parametrize("runs", [False, True], ids=["waits", "runs"])
def test_a_call_that_cannot_be_sent_ends_no_other(define, shop, revoked, overlap, runs):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    task.apply_async([1], task_id="other")
    if runs:
        shop.begin(lock, "other")
    before = shop.redis.hgetall(lock)

    with pytest.raises(EncodeError):
        task.delay(1, object())

    assert revoked() == []
    assert shop.redis.hgetall(lock) == before
    assert shop.redis.keys("SINGLETONLOCK_*") == [lock]
    if not runs:
        assert shop.begins(lock, "other").verdict is Verdict.STARTED


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_a_call_takes_its_place_only_when_it_is_sent(define, shop, overlap, monkeypatch):
    """What waits may start while the broker is slow to take the message: then the new call runs after it."""
    task = define(overlap=overlap)
    lock = task.generate_lock(task.name, [1])
    task.apply_async([1], task_id="first")
    publish = Task.apply_async

    def slow(*args: Any, **options: Any) -> Any:
        assert shop.begins(lock, "first").verdict is Verdict.STARTED
        return publish(*args, **options)

    monkeypatch.setattr(Task, "apply_async", slow)
    result = task.apply_async([1], task_id="second")

    assert (result.waits_for.task_id, result.waits_for.state) == ("first", "running")
    assert shop.holder(behind_key(lock)) == ["second", "queued"]


def test_a_call_that_started_before_it_took_its_place_takes_no_lock_again(define, shop, monkeypatch):
    task = define(overlap="cancel_other")
    lock = task.generate_lock(task.name, [1])
    task.apply_async([1], task_id="first")
    publish = Task.apply_async

    def quick(*args: Any, **options: Any) -> Any:
        result = publish(*args, **options)
        shop.run(lock, "first")
        shop.run(lock, "second")
        return result

    monkeypatch.setattr(Task, "apply_async", quick)
    task.apply_async([1], task_id="second")

    assert shop.redis.keys("SINGLETONLOCK_*") == [f"{lock}:done"]


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_a_place_behind_that_is_no_lock_is_named_and_nothing_ends(define, shop, revoked, overlap):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    shop.begin(lock, "running")
    shop.redis.set(behind_key(lock), "no lock")

    with pytest.raises(LockBackendError, match="is unusable: it must be a hash"):
        task.delay(1)

    assert revoked() == []
    assert shop.sent == []


@pytest.mark.parametrize(("overlap", "ended"), [("cancel_other", []), ("terminate_other", ["running", "running"])])
def test_the_latest_call_replaces_the_waiting_call(define, shop, revoked, overlap, ended):
    task = define(overlap=overlap, unique_on=["value"])
    lock = task.generate_lock(task.name, [1])
    shop.begin(lock, "running")
    task.apply_async([1, "early"], task_id="early")

    result = task.apply_async([1, "late"], task_id="late")

    assert (result.id, result.is_duplicate, result.waits_for.task_id) == ("late", False, "running")
    assert shop.sent == ["early", "late"]
    assert revoked() == ended
    assert shop.holder(behind_key(lock)) == ["late", "queued"]
    assert shop.begins(lock, "early").verdict is Verdict.REPLACED


@pytest.mark.parametrize("fails", ["the broker", "the locks' server"])
def test_a_call_that_is_sent_is_not_lost_to_a_failure_after_it(define, shop, two_writes, fails, monkeypatch, caplog):
    task = define(overlap="terminate_other")
    shop.begin(task.generate_lock(task.name, [1]), "running")
    acquire = RedisBackend.acquire_many

    def once(backend: Any, calls: Any, **options: Any) -> Any:
        if calls[0].if_held is IfHeld.REPLACE:
            raise LockBackendError("as asked")
        return acquire(backend, calls, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise OperationalError("as asked")

    if fails == "the broker":
        monkeypatch.setattr(task.app.control, "revoke", refuse)
    else:
        monkeypatch.setattr(RedisBackend, "acquire_many", once)

    result = task.apply_async([1], task_id="second")

    assert (result.id, result.is_duplicate) == ("second", False)
    assert shop.sent == ["second"]
    assert f"event={'not_terminated' if fails == 'the broker' else 'not_replaced'}" in caplog.text


def test_a_soft_time_limit_ends_a_call_while_it_terminates_a_run(define, shop, monkeypatch):
    def end(*args: Any, **options: Any) -> Any:
        raise SoftTimeLimitExceeded

    task = define(overlap="terminate_other")
    shop.begin(task.generate_lock(task.name, [1]), "running")
    monkeypatch.setattr(task.app.control, "revoke", end)

    with pytest.raises(SoftTimeLimitExceeded):
        task.delay(1)


def test_arguments_that_do_not_fit_are_an_error_that_names_the_task(define):
    task = define()

    with pytest.raises(TypeError, match=rf"^{task.name}: too many positional arguments"):
        task.delay(*range(9))


def test_a_call_that_is_not_sent_frees_its_lock_when_its_server_goes_on(server, redis, own_server):
    conf = {"singleton_backend_url": own_server.url, "singlebeat_socket_timeout": 0.2}
    with make_app(server.celery_url, conf) as app:
        task = app.task(hold, name="claimed", base=Singleton, shared=False)

        def hang(*args: Any, **options: Any) -> Any:
            own_server.pause()
            raise OperationalError("as asked")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Task, "apply_async", hang)
            with pytest.raises(OperationalError):
                task.delay(1)
        own_server.resume()
        all_undone()

        with own_server.client() as client:
            assert client.keys() == []


# ---------------------------------------------------------------- a call that was refused


@pytest.fixture
def refuse(server, redis, own_server) -> Iterator[Callable[..., Any]]:
    """Return a task after a call of it under an id was refused: the locks' server hung, and goes on."""
    conf = {"singleton_backend_url": own_server.url, "singlebeat_socket_timeout": 0.2}
    with make_app(server.celery_url, conf) as app:
        task = app.task(hold, name="claimed", base=Singleton, shared=False, overlap="cancel_other")

        def refuse(**options: Any) -> Any:
            own_server.pause()
            for number in range(300):  # so that ours is not undone before it is made again
                release_later(app, Ref(f"another lock {number}", "refused"))
            with pytest.raises(LockBackendError):
                task.apply_async([1], **options)
            own_server.resume()
            return task

        yield refuse
        all_undone()


def all_undone() -> None:
    waiting = late_release._releases
    wait_until(
        lambda: not waiting._wanted and not waiting.thread.is_alive,
        timeout=30,
        what="the end of the calls that were refused",
    )


@pytest.mark.parametrize("headers", [{}, {RUN_HEADER: {"entry": "e"}}], ids=["by its caller", "by beat"])
def test_a_refused_call_that_is_repeated_keeps_its_lock(refuse, own_server, headers):
    task = refuse(task_id="mine", headers=headers)

    def sent() -> Any:
        with suppress(LockBackendError):  # the time that it may take is short for a busy machine
            return task.apply_async([1], task_id="mine", headers=headers)
        return None

    wait_until(sent, what="an answer")
    all_undone()

    with own_server.client() as client:
        assert client.hget(task.generate_lock(task.name, [1]), "id") == "mine"


def test_no_call_is_a_duplicate_of_a_refused_call(server, own_server, monkeypatch):
    """The reply to a call is lost, and an equal one comes before its lock is freed."""
    conf = {"singleton_backend_url": own_server.url}
    with make_app(server.celery_url, conf) as app:
        task = app.task(hold, name="claimed", base=Singleton, shared=False)
        acquire = RedisBackend.acquire_many

        def lose_the_reply(backend: Any, calls: Any, **options: Any) -> Any:
            acquire(backend, calls, **options)
            raise LockBackendError("as asked")

        # The thread that frees it has not come to it yet.
        monkeypatch.setattr("singlebeat.native_threads.start_native_thread", lambda *_: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RedisBackend, "acquire_many", lose_the_reply)
            with pytest.raises(LockBackendError):
                task.apply_async([1], task_id="refused")

        result = task.apply_async([1], task_id="mine")

        assert (result.id, result.is_duplicate) == ("mine", False)


UNDONE_BESIDE_GREENLETS = """
import sys
import time
from gevent import joinall, monkey, sleep, spawn
monkey.patch_all()
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ref
from singlebeat.tasks.gate import Postponed
from singlebeat.locks.modes import decode_arguments
from singlebeat.locks.late_release import release_later
from tests.system.apps import make_app

with make_app(sys.argv[1]) as app:
    backend, given_up = backend_of(app), time.monotonic() + 20

    def wait():
        while backend.get("a lock") and time.monotonic() < given_up:
            sleep(0.005)  # idle, so that the thread waits for its answers

    for number in range(10):
        backend.lock("a lock", "refused")
        greenlets = [spawn(wait) for _ in range(5)]
        release_later(app, Ref("a lock", "refused"))
        joinall(greenlets, raise_error=True)
    print(backend.get("a lock"))
"""


def test_a_refused_call_is_undone_beside_greenlets(server, redis):
    pytest.importorskip("gevent")
    command = [sys.executable, "-c", UNDONE_BESIDE_GREENLETS, server.celery_url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout == "None\n", done.stderr


def test_an_unforeseen_error_does_not_stop_the_release_of_other_locks(app, redis):
    class Broken(MemoryBackend):
        def get(self, lock: str) -> str | None:
            raise RuntimeError("as asked")

    with make_app("memory://", {"singleton_backend_class": Broken}) as broken:
        backend_of(app).lock("a lock", "refused")
        release_later(broken, Ref("another lock", "refused"))
        release_later(app, Ref("a lock", "refused"))
        wait_until(lambda: not redis.exists("a lock"), what="the end of the lock")
        all_undone()


# ---------------------------------------------------------------- what people see of its arguments

SECRET = "4929-8812-2045"  # no chance part of an id or a time
HIDDEN = {"argsrepr": "('an account',)", "kwargsrepr": "{'card': '****'}"}


def no_secret(redis: Redis) -> bool:
    """Return whether no lock shows the secret; there must be at least one lock."""
    shown = [json.dumps(redis.hgetall(key)) for key in redis.keys("SINGLETONLOCK_*")]
    assert shown
    return not any(SECRET in text for text in shown)


@pytest.mark.parametrize("hidden", [HIDDEN, {"kwargsrepr": HIDDEN["kwargsrepr"]}], ids=["both", "kwargs alone"])
def test_a_lock_shows_the_arguments_as_its_sender_shows_them(define, app, redis, hidden):
    task = define(lambda account, card: None)
    args = [SECRET] if "argsrepr" in hidden else ["an account"]

    task.s(*args, card=SECRET).set(**hidden).delay()

    assert no_secret(redis)
    ((_, record),) = backend_of(app).locks("SINGLETONLOCK_")
    assert "an account" in record["args"]
    assert "****" in record["args"]


@pytest.fixture
def message(define, redis) -> Callable[..., Any]:
    """Return the call of a task as its worker makes it, for the message that is in the queue."""

    def message(task: Any) -> Callable[[], Any]:
        raw = json.loads(redis.lrange("celery", 0, 0)[0])
        args, kwargs, _ = json.loads(b64decode(raw["body"]))
        came = Message(b64decode(raw["body"]), raw["content-type"], raw["content-encoding"], raw["headers"], {})
        headers = {**raw["headers"], "hostname": "w@h", "called_directly": False, "is_eager": False, MESSAGE: came}

        def call() -> Any:
            task.push_request(**headers, args=args, kwargs=kwargs, delivery_info=raw["properties"]["delivery_info"])
            try:
                return task(*args, **kwargs)
            finally:
                task.pop_request()

        return call

    return message


def test_a_lock_acquired_at_the_start_shows_arguments_as_the_sender_does(define, redis, message):
    def body(account: str, card: str) -> bool:
        return no_secret(redis)

    task = define(body, lock="while_executing")
    task.s("an account", card=SECRET).set(**HIDDEN).delay()

    assert message(task)()


def test_a_lock_acquired_at_the_start_shows_no_secret_argument(define, redis, message):
    def body(account: str, password: str, token: str) -> bool:
        return no_secret(redis)

    task = define(body, lock="while_executing")
    task.delay("an account", SECRET, token=SECRET)

    assert message(task)()


def test_a_message_without_reprs_starts_and_its_lock_shows_its_arguments(define, redis, message):
    """As those from other languages may be."""

    def body(account: str, card: str) -> str:
        (lock,) = redis.keys("SINGLETONLOCK_*")
        return redis.hget(lock, "args")

    task = define(body, lock="while_executing")
    task.delay("an account", card="4929")
    raw = json.loads(redis.lpop("celery"))
    raw["headers"] = {name: value for name, value in raw["headers"].items() if name not in HIDDEN}
    redis.lpush("celery", json.dumps(raw))

    assert message(task)() == "'an account', card='4929'"


def test_a_retry_that_cannot_be_sent_says_why_in_an_outage(define, redis, message, monkeypatch, caplog):
    def body(self: Any) -> None:
        promise = type(self.singleton_backend).promise

        def fails_to_take_back(backend: Any, run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
            if to is None:
                raise LockBackendError("the locks' server is away")
            return promise(backend, run, to=to, ttl=ttl, note=note)

        monkeypatch.setattr(type(self.singleton_backend), "promise", fails_to_take_back)
        raise self.retry(kwargs={"unknown to JSON": object()})

    task = define(body, bind=True)
    task.delay()
    raw = json.loads(redis.lpop("celery"))
    raw["headers"][HEADER]["nonce"] = "n"  # as the worker's main process does
    redis.lpush("celery", json.dumps(raw))

    with pytest.raises(Reject, match="unexpected keyword"):
        message(task)()
    assert "waits for a retry that was not sent" in caplog.text


def test_a_task_id_may_be_a_uuid(define, redis):
    task, task_id, other = define(), uuid.uuid4(), uuid.uuid4()

    first, again = task.apply_async([1], task_id=task_id), task.delay(1)

    assert first.id == again.id == str(task_id)
    assert task.lock_and_run("a lock", [1], task_id=other).id == str(other)


def test_a_waiting_message_shows_arguments_as_its_sender_does(define, shop, redis, message):
    task = define(lambda account, card: None, lock="while_executing", overlap="buffer_all")
    shop.begin(task.generate_lock(task.name, ["an account"], {"card": SECRET}), "another")
    task.s("an account", card=SECRET).set(**HIDDEN).delay()

    with pytest.raises(Postponed):
        message(task)()

    for raw in redis.lrange("celery", 0, -1):
        headers = json.loads(raw)["headers"]
        assert {name: headers[name] for name in HIDDEN} == HIDDEN
    assert redis.llen("celery") + redis.zcard("unacked_index") == 2


# ---------------------------------------------------------------- a call that replaces another task

BACKENDS = {
    "redis": {},
    "memory": {"singleton_backend_class": MemoryBackend},
    "custom": {"singleton_backend_class": BytesBackend},
}


@pytest.fixture(params=BACKENDS)
def other(request, server, redis) -> Iterator[Any]:
    """The task that another one is replaced by, on each backend."""
    with make_app(server.celery_url, BACKENDS[request.param]) as app:
        yield app.task(hold, name="claimed", base=Singleton, shared=False)


def replacement(task: Any, redis: Redis, **options: Any) -> Ref:
    """Send the call that replaces a task, and return its claim as its message has it."""
    task.apply_async([1], task_id="replaced", replaced_task_nesting=1, **options)
    (headers,) = (json.loads(raw)["headers"] for raw in redis.lrange("celery", 0, -1))
    return Ticket.of_message(headers, "replaced").run


def test_a_replacement_that_never_starts_frees_its_lock(other, redis):
    ref, backend = replacement(other, redis), other.singleton_backend
    assert backend.get(ref.key) == "replaced"

    backend.finish_many([ref], remember_for=MEMORY)

    assert backend.get(ref.key) is None


def test_a_replacement_that_waits_in_its_worker_keeps_its_lock_and_starts(other, redis):
    ref, backend = replacement(other, redis), other.singleton_backend

    (renewal,) = backend.renew_many([ref], lease=LEASE)
    begun = backend.begin(replace(ref, nonce="n"), lease=LEASE, remember_for=MEMORY, task="claimed", arguments="")

    assert renewal is not Renewal.LOST
    assert begun.verdict is Verdict.STARTED


def test_a_replacement_that_cannot_be_sent_frees_its_lock(other, redis):
    with pytest.raises(SerializerNotInstalled):
        replacement(other, redis, serializer="no such thing")

    lock = other.generate_lock(other.name, [1])
    assert other.singleton_backend.get(lock) is None


def test_a_replacement_that_is_sent_again_takes_its_own_lock(other, redis):
    ref = replacement(other, redis)
    (holder,) = other.singleton_backend.acquire_many([Call(ref, "claimed", "", 60)])
    assert (holder.verdict, holder.task_id) == (Verdict.ACQUIRED, "replaced")


# ---------------------------------------------------------------- a lock of the caller's choice


@pytest.mark.parametrize(
    "take", [lambda task: task.aquire_lock("a lock", "a"), lambda task: task.lock_and_run("a lock")]
)
def test_a_lock_of_the_callers_choice_refuses_a_key_that_holds_no_lock(define, shop, take):
    shop.redis.set("a lock", "no lock")

    with pytest.raises(LockBackendError, match="the lock a lock is unusable: it must be a hash"):
        take(define())

    assert shop.sent == []


class TwoArguments(Singleton):
    """Overrides a method of celery-singleton as it was there."""

    abstract = True
    taken: ClassVar[list[str]] = []

    def aquire_lock(self, lock, task_id):
        self.taken.append(lock)
        return super().aquire_lock(lock, task_id)


def test_a_users_aquire_lock_takes_the_arguments_of_celery_singletons(app, shop):
    task = app.task(hold, name="app.two", base=TwoArguments, shared=False)

    TwoArguments.taken.clear()

    task.lock_and_run("a lock", args=[1], countdown=5)

    assert TwoArguments.taken == ["a lock"]
    assert len(shop.sent) == 1


def test_a_lock_of_the_callers_choice_is_held_by_the_id_that_took_it(define):
    task = define()

    assert [task.aquire_lock("a lock", task_id) for task_id in ("a", "a", "b")] == [True, True, False]


@pytest.mark.parametrize(("options", "seconds"), [({}, 3600), ({"countdown": 9000}, 12_600), ({"expires": 60}, 60)])
def test_a_lock_of_the_callers_choice_waits_as_long_as_its_message(define, redis, options, seconds):
    define().lock_and_run("a lock", [1], **options)

    assert seconds - 30 < redis.pttl("a lock") / 1000 <= seconds


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"overlap": "allow_all"}, 3),
        ({"lock": "until_executing"}, 3),
        ({}, 1),
        ({"lock": "while_executing"}, 1),
        ({"lock": "until_and_while_executing"}, 1),
    ],
    ids=str,
)
def test_an_eager_call_inside_of_its_equal_runs_where_the_task_allows_it(server, redis, options, runs):
    seen = []

    def nested(self: Any) -> None:
        seen.append(self.request.id)
        if len(seen) < 3:
            self.delay()

    with make_app(server.celery_url, {"task_always_eager": True}) as app:
        app.task(nested, bind=True, base=Singleton, name="app.nested", shared=False, **options).delay()

    assert len(seen) == len(set(seen)) == runs


def test_an_eager_call_may_ask_to_run_beside_its_equal(server, redis):
    seen = []

    def nested(self: Any) -> None:
        seen.append(self.request.id)
        if len(seen) < 3:
            self.apply_async(overlap="allow_all")

    with make_app(server.celery_url, {"task_always_eager": True}) as app:
        app.task(nested, bind=True, base=Singleton, name="app.nested", shared=False).delay()

    assert len(seen) == 3


def test_an_eager_run_frees_the_callers_lock_and_leaves_redis_empty(server, redis):
    with make_app(server.celery_url, {"task_always_eager": True}) as app:

        def body(value: int, again: bool = False) -> list[Any]:
            nested = None if again else task.lock_and_run("a lock", [value, True])
            return [value, nested, redis.keys()]

        task = app.task(body, name="claimed", base=Singleton, shared=False)

        results = [task.lock_and_run("a lock", [value]).get() for value in (1, 2)]

    assert results == [[1, None, []], [2, None, []]]
