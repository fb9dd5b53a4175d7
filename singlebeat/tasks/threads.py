"""Threads that run beside gevent, too: what they wait for must not wait for a loop that a task has blocked."""

from __future__ import annotations

import sys
import threading
from _queue import Empty, SimpleQueue  # the C one: gevent does not patch it, so that a native thread can wait on it
from collections.abc import Callable

__all__ = ("Empty", "SimpleQueue", "start_native_thread")


def start_native_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread; a native one even where gevent has patched threads."""
    monkey = sys.modules.get("gevent.monkey")  # not imported: it has patched nothing
    if monkey is not None and monkey.is_module_patched("threading"):
        monkey.get_original("_thread", "start_new_thread")(target, ())
    else:
        threading.Thread(target=target, name=name, daemon=True).start()
