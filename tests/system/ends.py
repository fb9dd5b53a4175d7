"""The app of the ends of tasks: one Singleton for each way in which a body can end.

Every task takes the name of its scenario first; the body tells the oracle that it runs, and notes when it finds that
it does not hold its own lock.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject
from redis import Redis

from singlebeat import Singleton
from tests.support import recorded

#: Variables of the worker's environment: as for ``tests.system.apps``, and the server for the results of ``store``.
RESULTS = "SB_TEST_RESULTS"

_tasks: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


def body(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a bound Singleton of the app, under its own name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _tasks[function.__name__] = (function, options)
        return function

    return register


def task_name(short: str) -> str:
    return f"tests.system.ends.{short}"


@contextmanager
def running(task: Any, name: str) -> Iterator[Redis]:
    """Record a run, and note for the test when it does not hold its lock, at its start and at its end."""
    lock = task.generate_lock(task.name, task.request.args, task.request.kwargs)

    def look(when: str) -> None:
        holder = task.get_existing_task_id(lock)
        if holder != task.request.id:
            client.rpush(f"unheld:{name}", f"{when} of run {task.request.retries}: held by {holder}")

    with recorded(name) as client:
        look("at the start")
        try:
            yield client
        finally:
            look("at the end")


def wait_for_go(client: Redis, name: str, seconds: float) -> None:
    ends = time.monotonic() + seconds
    # In short turns: a client has a timeout of its own.
    while (left := ends - time.monotonic()) > 0 and not client.blpop([f"go:{name}"], timeout=min(left, 2)):
        pass


def first_time(client: Redis, name: str) -> bool:
    return client.incr(f"count:{name}") == 1


def keep_the_interpreter(seconds: float) -> None:
    """Keep the interpreter's lock for so long: one call into C that no signal interrupts, and that costs no CPU."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(round(seconds * 1_000_000)))  # a PyDLL keeps the lock in its calls
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@body()
def succeed(self: Any, name: str, seconds: float = 0) -> str:
    with running(self, name) as client:
        if seconds:
            wait_for_go(client, name, seconds)
        return name


@body()
def return_to_a_paused_server(self: Any, name: str, seconds: float) -> str:
    """Return; halfway through a pause of the server, which frees no lock meanwhile, comes the soft time limit.

    The process sends itself the signal: Celery's main process cannot while its broker is paused.
    """
    with running(self, name) as client:
        pass
    client.client_pause(round(seconds * 1000), all=False)
    threading.Timer(seconds / 2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    return name


@body()
def fail(self: Any, name: str) -> None:
    with running(self, name):
        raise RuntimeError(name)


@body(max_retries=5)
def retry(self: Any, name: str, countdown: float) -> str:
    # The run is over when it asks for its retry: what is recorded is what the user's code does.
    with running(self, name) as client:
        first = first_time(client, name)
    if first:
        raise self.retry(countdown=countdown)
    return name


@body(max_retries=1)
def retry_in_vain(self: Any, name: str) -> None:
    with running(self, name):
        pass
    raise self.retry(countdown=0)


@body(max_retries=5)
def retry_without_raising(self: Any, name: str, goes_on: float) -> str:
    with running(self, name) as client:
        first = first_time(client, name)
        if first and goes_on:
            self.retry(countdown=0, throw=False)
            wait_for_go(client, name, goes_on)
    if first and not goes_on:
        self.retry(countdown=0, throw=False)
    return name


@body(autoretry_for=(ValueError,), max_retries=2, default_retry_delay=0)
def retry_by_itself(self: Any, name: str) -> None:
    with running(self, name):
        raise ValueError(name)


@body(max_retries=5)
def retry_that_cannot_be_sent(self: Any, name: str) -> None:
    with running(self, name):
        raise self.retry(countdown=0, kwargs={"unknown to JSON": object()})


@body()
def ignore(self: Any, name: str) -> None:
    with running(self, name):
        raise Ignore(name)


@body()
def reject(self: Any, name: str, requeue: bool) -> str:
    with running(self, name) as client:
        if first_time(client, name):
            raise Reject(name, requeue=requeue)
        return name


@body()
def replace(self: Any, name: str, turn: int, step: int) -> str:
    with running(self, name) as client:
        first = first_time(client, name)
    if first:
        raise self.replace(self.s(name, turn + step, step))
    return name


@body()
def hold_the_interpreter(self: Any, name: str, seconds: float) -> str:
    with running(self, name):
        keep_the_interpreter(seconds)
        return name


@body(reject_on_worker_lost=True)
def insist(self: Any, name: str, seconds: float) -> str:
    with running(self, name) as client:
        wait_for_go(client, name, seconds)
        return name


@body()
def leave(self: Any, name: str, kind: str) -> str:
    with running(self, name) as client:
        if first_time(client, name):
            raise {"SystemExit": SystemExit, "MemoryError": MemoryError}[kind]
        return name


@body(typing=False)
def picky(self: Any, name: str) -> str:
    with running(self, name):
        return name


@body()
def return_what_nobody_can_store(self: Any, name: str) -> object:
    with running(self, name):
        return threading.Lock()


@body()
def store(self: Any, name: str, seconds: float) -> str:
    """Succeed; its results go to a server of their own."""
    with running(self, name) as client:
        wait_for_go(client, name, seconds)
        return name


@body()
def mutate(self: Any, name: str, values: list[int], options: dict[str, Any]) -> str:
    with running(self, name):
        values.append(4)
        options["seen"] = True
        self.request.args[1].append(5)
        return name


def make_app(url: str, conf: Mapping[str, Any] | None = None, *, set_as_current: bool = False) -> Celery:
    """Return an app with all the tasks above; broker, results and locks on one server."""
    app = Celery("tests.system.ends", set_as_current=set_as_current)
    app.conf.update(
        broker_url=url,
        result_backend=url,
        result_backend_transport_options={"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0}},
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        singlebeat_lock_lease=3,
    )
    app.conf.update(conf or {})
    for short, (function, options) in _tasks.items():
        app.task(function, name=task_name(short), base=Singleton, bind=True, shared=False, **options)
    if os.environ.get(RESULTS):
        from celery.app.backends import by_url

        app.finalize()
        backend, url = by_url(os.environ[RESULTS], app.loader)
        app.tasks[task_name("store")].backend = backend(app=app, url=url)
    return app


app = make_app(
    os.environ.get("SB_TEST_URL", "memory://"),
    json.loads(os.environ.get("SB_TEST_CONF", "{}")),
    set_as_current="SB_TEST_URL" in os.environ,
)
