"""Threads that run beside gevent and eventlet, too: what they wait for does not need a loop that a task may block."""

from __future__ import annotations

import sys
import threading
from _queue import Empty, SimpleQueue  # the C one: nobody patches it, so that a native thread can wait on it
from collections.abc import Callable
from contextlib import suppress

__all__ = ("Empty", "SimpleQueue", "native_sleep", "start_native_thread")


def native_sleep(seconds: float) -> None:
    """Let a native thread sleep: ``time.sleep`` may be patched, and then it needs a loop of greenlets."""
    with suppress(Empty):
        SimpleQueue[None]().get(timeout=seconds)


def start_native_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread; a native one even where gevent or eventlet have patched threads."""
    # Neither is imported here: what is not there has patched nothing.
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        gevent.get_original("_thread", "start_new_thread")(target, ())
    elif eventlet is not None and eventlet.is_monkey_patched("thread"):
        eventlet.original("_thread").start_new_thread(target, ())
    else:
        threading.Thread(target=target, name=name, daemon=True).start()
