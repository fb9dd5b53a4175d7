"""A call that a soft time limit, or the handler of a signal, ends at any line: it leaves nothing half done."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import kombu.messaging
import kombu.pools
import pytest
import redis.client
import redis.connection
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import before_task_publish
from kombu.messaging import Producer
from redis import Redis

import singlebeat.clients
from singlebeat import Singleton, exclusive
from singlebeat.clients import RedisClient, ResponseError, private
from tests.support import connected, fork

pytestmark = pytest.mark.skipif(not hasattr(Producer, "batch"), reason="kombu 5.7 is the first to hand out commands")

#: The code of a call in which the call is ended: ours, and kombu's producer.
CODE = (str(Path(singlebeat.__file__).parent), kombu.messaging.__file__)

#: The same, of a command: between its sending and the release of its connection.
CODE_OF_COMMANDS = (singlebeat.clients.__file__, redis.client.__file__, redis.connection.__file__)


def numbered(value: object) -> None: ...


@contextmanager
def interrupted(at: int, code: tuple[str, ...] = CODE) -> Iterator[list[int]]:
    """Raise SoftTimeLimitExceeded before the line that is executed as number ``at``; yield the lines that remain."""
    remaining = [at]

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            remaining[0] -= 1
            if not remaining[0]:
                sys.settrace(None)
                raise SoftTimeLimitExceeded
        return on_line

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: on_line if frame.f_code.co_filename.startswith(code) else None)
    try:
        yield remaining
    finally:
        sys.settrace(before)


def sent(redis: Redis) -> list[str]:
    """The ids of the messages in the queue, the last one first."""
    return [json.loads(message)["headers"]["id"] for message in redis.lrange("celery", 0, -1)]


def locked(redis: Redis) -> set[str]:
    return {redis.hget(key, "id") for key in redis.scan_iter("SINGLETONLOCK_*", _type="HASH")}


@pytest.fixture(autouse=True)
def pools():
    """Forget kombu's pools, which count a connection as lent for ever if a call ended before it gave it back."""
    yield
    kombu.pools.reset()


@pytest.fixture(params=["one write", "two writes", "a lock of the caller's choice"])
def call(request, app):
    """Return a function that makes a call of a Singleton with a value and a task id."""
    task = app.task(numbered, name="numbered", base=Singleton, shared=False, ignore_result=True)
    if request.param == "a lock of the caller's choice":
        yield lambda value, task_id: task.lock_and_run("SINGLETONLOCK_own", [value], task_id=task_id)
    elif request.param == "one write":
        yield lambda value, task_id: task.apply_async([value], task_id=task_id)
    else:
        with connected(before_task_publish, lambda **_: None):
            yield lambda value, task_id: task.apply_async([value], task_id=task_id)


def ends_well(interrupt: Callable[[], object]) -> bool:
    """Interrupt in a child: where tracing ends a ``with``, a lock may stay held, or an error current.

    CPython 3.11 itself crashes in some processes when a trace function raises; newer versions run these tests, too.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(fork(interrupt, within=100), 0)[1])
    if code == -signal.SIGSEGV and sys.version_info < (3, 12):
        pytest.skip("the interpreter has crashed")
    return code == 0


def test_a_call_that_ends_at_any_line_leaves_no_half_and_harms_no_other(app, redis, call):
    plain = app.tasks["tests.system.apps.plain"]

    def interrupt_each_line() -> None:
        call("warm", "warm")
        plain.delay("warm")
        at, halves, lost, swallowed = 0, [], [], []
        remaining = [0]
        while remaining[0] <= 0:
            at += 1
            redis.flushall()
            try:
                with interrupted(at) as remaining:
                    call(at, "cut")
                if remaining[0] <= 0:
                    swallowed.append(at)
            except SoftTimeLimitExceeded:
                pass
            if ("cut" in locked(redis)) > ("cut" in sent(redis)):
                halves.append(at)
            if plain.delay("next").id not in sent(redis):
                lost.append(at)

        assert at > 100
        assert (halves, lost, swallowed) == ([], [], [])

    assert ends_well(interrupt_each_line)


def in_pipeline(client: RedisClient, text: str) -> str:
    with client.pipeline(transaction=False) as pipe:
        return pipe.echo(text).execute()[0]


@pytest.mark.parametrize("send", [lambda client, text: client.echo(text), in_pipeline], ids=["one", "pipeline"])
def test_a_command_that_ends_at_any_line_leaves_its_reply_to_no_other(server, send):
    """The reply may be on its way: the next command on that connection would take it for its own."""

    def interrupt_each_line() -> None:
        client = private(server.url, timeout=5)
        send(client, "warm")
        at, remaining, wrong = 0, [0], []
        while remaining[0] <= 0:
            at += 1
            with suppress(SoftTimeLimitExceeded), interrupted(at, CODE_OF_COMMANDS) as remaining:
                send(client, "cut")
            if send(client, "next") != "next":
                wrong.append(at)
        assert at > 50
        assert wrong == []

    assert ends_well(interrupt_each_line)


def test_an_error_of_the_server_or_of_the_caller_costs_no_connection(server):
    client = private(server.url, timeout=5)
    before = client.client_id()

    with pytest.raises(ResponseError):
        client.incr("a", "text")
    try:
        raise LookupError  # noqa: TRY301 - as a task whose lock is freed while its error is handled
    except LookupError:
        within = client.client_id()

    assert before == within == client.client_id()


@pytest.mark.parametrize("step", ["begin", "end"])
def test_a_soft_time_limit_amid_exclusive_is_raised_and_leaves_no_lock(app, redis, step):
    """Else the body goes on without its limit, or other bodies wait until the lease ends."""

    def interrupt_each_line() -> None:
        at, remaining, left = 0, [0], []
        while remaining[0] <= 0:
            at += 1
            redis.flushall()
            lock = exclusive(f"key {at}", app=app, lease=600)
            if step == "end":
                lock.__enter__()
            try:
                with interrupted(at) as remaining:
                    lock.__enter__() if step == "begin" else lock.__exit__(None, None, None)
                assert remaining[0] > 0, "swallowed"
            except SoftTimeLimitExceeded:
                left += [at] * len(redis.keys("SINGLETONLOCK_*"))
        assert at > 20
        assert len(left) <= 2, "only before the first line of the end, or after the last one of the beginning"

    assert ends_well(interrupt_each_line)
