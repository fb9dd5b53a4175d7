"""Threads that also run under gevent and eventlet, and never wait for their loop, which a task may block.

gevent and eventlet replace sockets, locks and sleeping in the whole process. A native thread that waits for one of
these needs its own loop, and a lock that it shares with a greenlet can block both for ever. A native thread of
singlebeat

- waits with ``SimpleQueue`` and ``native_sleep`` only;
- reaches Redis through the original modules, which redis-py gets from here in native threads;
- leaves logging and signals, which share locks and run code of users, to the loop: see ``do_in_loop``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from _queue import Empty, SimpleQueue  # the C class is never patched, so a native thread can wait on it
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = (
    "Empty",
    "OnDemandThread",
    "SimpleQueue",
    "await_native",
    "do_in_loop",
    "is_native",
    "native_sleep",
    "start_native_thread",
)

#: Seconds between two polls of the loop for calls from native threads.
POLL = 0.1

_is_native = ContextVar("_is_native", default=False)


def is_native() -> bool:
    """Return whether this is a native thread of singlebeat in a process that gevent or eventlet have patched."""
    return _is_native.get()


def native_sleep(seconds: float) -> None:
    """Sleep in a native thread, where a patched ``time.sleep`` would need a loop of greenlets."""
    with suppress(Empty):
        SimpleQueue[None]().get(timeout=seconds)


def await_native(done: SimpleQueue[None], *, timeout: float) -> bool:
    """Wait until a native thread has put something into a queue; return whether it has."""
    given_up = time.monotonic() + timeout
    # A native thread cannot wake a greenlet, so the greenlet polls; its sleep lets other greenlets run.
    while done.empty() and time.monotonic() < given_up:
        time.sleep(0.02)
    return not done.empty()


def start_native_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread, which is native even where gevent or eventlet have patched threads."""
    if (start := _original_start()) is None:
        threading.Thread(target=target, name=name, daemon=True).start()
        return
    _give_originals_to_redis()
    loop, thread = _loop(os.getpid()), object()
    loop.threads.add(thread)

    def run() -> None:
        _is_native.set(True)
        try:
            target()
        finally:
            loop.threads.discard(thread)

    loop.start()
    start(run, ())


def do_in_loop(do: Callable[[], object]) -> None:
    """Run a callable that may wait for a greenlet: a native thread leaves it to the loop, any other runs it at once."""
    if is_native():
        _loop(os.getpid()).calls.put(do)
    else:
        do()


class OnDemandThread:
    """A native thread that ends when there is no work, and is started again when new work comes in.

    Args:
        work: callable that does all the work, and returns when no work has come in for a while.
        has_work: callable that returns whether work has come in since ``work`` returned.
        name: name of the thread.
    """

    def __init__(self, work: Callable[[], None], *, has_work: Callable[[], bool], name: str) -> None:
        self._work, self._has_work, self._name = work, has_work, name
        #: Holds one token while there is no thread. The caller that takes the token starts the thread. Taking it is one
        #: step in C, so no lock is shared with greenlets.
        self._token: SimpleQueue[None] = SimpleQueue()
        self._token.put(None)

    @property
    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._token.empty()

    def wake(self) -> None:
        """Start the thread if there is none; call this after work was added."""
        if self._take_token():
            start_native_thread(self._run, self._name)

    def _take_token(self) -> bool:
        with suppress(Empty):
            self._token.get_nowait()
            return True
        return False

    def _run(self) -> None:
        while True:
            try:
                self._work()
            finally:  # after an error, too: the next work starts a new thread
                self._token.put(None)
            # Work that came in before the token was back has started no thread.
            if not self._has_work() or not self._take_token():
                return


class _Loop:
    """The greenlet that runs the calls from the native threads of a process, for as long as there are such threads."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.threads: set[object] = set()
        self._runs = False

    def start(self) -> None:
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._run, name="singlebeat-loop", daemon=True).start()  # patched: a greenlet

    def _run(self) -> None:
        while self.threads or not self.calls.empty():
            while not self.calls.empty():
                with suppress(Exception):  # a user's log handler may raise, and the next call must still run
                    self.calls.get_nowait()()
            threading.Event().wait(POLL)  # not time.sleep, which may be the original one
        self._runs = False


@cache
def _loop(pid: int) -> _Loop:
    return _Loop()  # a forked child has none of its parent's threads


def _original_start() -> Any:
    """Return the function that starts native threads, or None if neither gevent nor eventlet has patched threads."""
    # Neither is imported here: a library that is not loaded has patched nothing.
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return gevent.get_original("_thread", "start_new_thread")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return eventlet.original("_thread").start_new_thread
    return None


class _ByThread:
    """A module for redis-py: the original module in native threads, the patched module in greenlets."""

    def __init__(self, patched: ModuleType, original: ModuleType) -> None:
        self._patched, self._original = patched, original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original if is_native() else self._patched, name)


def _give_originals_to_redis() -> None:
    """Let redis-py connect, wrap in TLS and sleep with the original modules in native threads, for every topology."""
    modules = filter(None, map(sys.modules.get, ("redis.connection", "redis.cluster", "redis.retry")))
    for module, (name, by_thread) in product(modules, _modules_by_thread().items()):
        # Under the same name, some versions of redis-py have a module, and others a function of that module.
        if name in vars(module) and isinstance(vars(module)[name], ModuleType) is (name != "sleep"):
            setattr(module, name, by_thread)


@cache
def _modules_by_thread() -> Mapping[str, Any]:
    """Return the stand-ins for the modules and the function that redis-py uses, by their names in its modules.

    gevent keeps the original functions, but they cannot make a TLS socket, because they refer to the patched modules.
    So socket and ssl are imported once more.
    """
    names = {"socket", "ssl"} & sys.modules.keys()  # Python may be built without ssl
    patched = {name: sys.modules.pop(name) for name in names}
    try:
        originals: dict[str, Any] = {name: import_module(name) for name in patched}
    finally:
        sys.modules.update(patched)
    originals["time"] = SimpleNamespace(**{**vars(time), "sleep": native_sleep})
    modules = {name: _ByThread(sys.modules[name], original) for name, original in originals.items()}

    def sleep(seconds: float) -> None:
        modules["time"].sleep(seconds)

    return {**modules, "sleep": sleep}
