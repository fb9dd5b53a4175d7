"""The app of the exclusive locks: a guarded task, and one that lets nothing else run in its process."""

from __future__ import annotations

import os
from typing import Any

import singlebeat
from singlebeat import Singleton
from tests.system import apps

#: Seconds of the lease; two thirds of it are what a slow machine may stand still.
LEASE = 2.5


@singlebeat.exclusive("guarded {name}")
def guarded(name: str) -> str:
    """Wait until ``Oracle.let_go(name)``."""
    return apps.plain(name, seconds=60)


def block(path: str) -> bool:
    """Hold a lock and stand still until the test opens the pipe, as a call into C does; return whether it was lost."""
    with singlebeat.exclusive("block") as lock:
        os.close(os.open(path, os.O_RDONLY))
        return lock.is_lost()


def make_app(url: str, *, set_as_current: bool = False) -> Any:
    app = apps.make_app(url, {"singlebeat_lock_lease": LEASE}, set_as_current=set_as_current, tasks=False)
    for function, base in ((guarded, app.Task), (block, Singleton)):
        app.task(function, base=base, name=f"tests.system.exclusives.{function.__name__}", shared=False)
    app.task(guarded, base=Singleton, name="tests.system.exclusives.single", shared=False)
    return app


app = make_app(os.environ.get("SB_TEST_URL", "memory://"), set_as_current="SB_TEST_URL" in os.environ)
