"""Processes that kill themselves between two steps of a call, and producers that race; the app is that of ``singles``.

A call that is to end so has the place as its task id. ``SB_TEST_VICTIM`` says who dies there: the ``sender``, a
worker's ``child``, or with that its whole ``group``; without that variable no process dies.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from celery import Task
from redis import Redis

from singlebeat.locks.redis import RedisBackend
from tests.support import wait_until
from tests.system.singles import app, task_name

VICTIM = "SB_TEST_VICTIM"
#: Set if a sender is to send its calls in two writes.
TWO_WRITES = "SB_TEST_TWO_WRITES"

#: The method at each place, how it is told which task it is for, and whether to die before or after it.
OF_A_SENDER = {
    "before the write": (RedisBackend, "send", lambda sendings, _: sendings[0].call.ref.task_id, "before"),
    "after the write": (RedisBackend, "send", lambda sendings, _: sendings[0].call.ref.task_id, "after"),
    "before the lock is taken": (RedisBackend, "acquire_many", lambda calls, **_: calls[0].ref.task_id, "before"),
    "between lock and message": (RedisBackend, "acquire_many", lambda calls, **_: calls[0].ref.task_id, "after"),
    "after the message": (Task, "apply_async", lambda *_, task_id, **__: task_id, "after"),
}
#: The places in the way of a call whose lock and message are two writes, as with a broker on another server.
OF_TWO_WRITES = ("before the lock is taken", "between lock and message")
OF_A_RUN = {
    "before its lock is taken": (RedisBackend, "begin", lambda ref, **_: ref.task_id, "before"),
    "between lock and body": (RedisBackend, "begin", lambda ref, **_: ref.task_id, "after"),
    "between body and release": (RedisBackend, "finish_many", lambda refs, **_: refs and refs[0].task_id, "before"),
    "between release and result": (RedisBackend, "finish_many", lambda refs, **_: refs and refs[0].task_id, "after"),
}

_main = os.getpid()


def _die(task_id: str) -> None:
    victim = os.environ[VICTIM]
    if victim != "sender" and os.getpid() == _main:
        return  # a worker's main process takes the same steps for other reasons
    if victim == "child":
        # If its worker has not heard that it has begun, Celery gives the same task to another child.
        with Redis.from_url(os.environ["SB_TEST_URL"].replace("redis+socket", "unix"), decode_responses=True) as broker:
            wait_until(lambda: not any(task_id in raw for raw in broker.hvals("unacked")))
    os.kill(0 if victim == "group" else os.getpid(), signal.SIGKILL)


def _lay_trap(place: str, cls: type, method: str, task_of: Callable[..., str], when: str) -> None:
    step = getattr(cls, method)

    @functools.wraps(step)
    def trapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = task_of(*args, **kwargs) == place
        if here and when == "before":
            _die(place)
        result = step(self, *args, **kwargs)
        if here and when == "after":
            _die(place)
        return result

    setattr(cls, method, trapped)


if TWO_WRITES in os.environ:
    RedisBackend.sends = False  # type: ignore[assignment,method-assign]

if VICTIM in os.environ:
    for place, trap in {**OF_A_SENDER, **OF_A_RUN}.items():
        _lay_trap(place, *trap)


def send(name: str, task_id: str) -> None:
    """Make one call, into a queue of its own."""
    app.tasks[task_name("until_executed")].apply_async((name, 0, 0), task_id=task_id, queue=name)


def race(name: str, count: int) -> None:
    """Make many calls as soon as all may start, and print what became of each."""
    task = app.tasks[task_name("until_executed")]
    task.apply_async((name, "to connect", 0), queue="unread", overlap="allow_all")
    with Redis.from_url(os.environ["SB_TEST_ORACLE_URL"]) as client:
        client.rpush("ready", os.getpid())
        client.blpop(["start"])
    results = [task.apply_async((name, number, 0), queue=name) for number in range(count)]
    json.dump([(result.id, result.is_duplicate) for result in results], sys.stdout)


if __name__ == "__main__":
    send(*sys.argv[2:]) if sys.argv[1] == "send" else race(sys.argv[2], int(sys.argv[3]))
