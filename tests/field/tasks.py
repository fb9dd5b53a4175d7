"""The app of the fleet: its tasks record their runs on a server of the observer's, which has no faults.

``SB_FIELD_CONF`` (JSON) has the settings, ``SB_FIELD_RECORDS`` names the observer's server, and ``SB_FIELD_SINGLETON``
the class of tasks with a lock, so that a fleet without singlebeat imports none of it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery, current_task
from celery.utils.imports import symbol_by_name
from redis import Redis

Singleton = symbol_by_name(os.environ.get("SB_FIELD_SINGLETON", "singlebeat:Singleton"))

RUNS = "runs"
NAME = "field"

_clients: dict[int, Redis] = {}


def records() -> Redis:
    """Return this process's client of the observer's server: children would share one made before a fork."""
    if os.getpid() not in _clients:
        _clients[os.getpid()] = Redis.from_url(os.environ["SB_FIELD_RECORDS"], decode_responses=True)
    return _clients[os.getpid()]


@contextmanager
def recorded(name: str, **more: Any) -> Iterator[None]:
    """Record the start and the end of a body; the observer's server gives the times."""
    request, run = current_task.request, uuid.uuid4().hex
    about = {"task": current_task.name, "id": request.id or "", "host": request.hostname or "", "name": name, **more}
    records().xadd(RUNS, {"event": "start", "run": run, "pid": os.getpid(), **about})
    try:
        yield
    finally:
        records().xadd(RUNS, {"event": "end", "run": run})


def work(name: str, seconds: float = 0.0) -> None:
    """Take so many seconds."""
    with recorded(name):
        time.sleep(seconds)


def merge(name: str, number: int, seconds: float = 0.0) -> None:
    """Take the latest number: equal calls are those of one name."""
    with recorded(name, number=number):
        time.sleep(seconds)


def make_app(conf: Mapping[str, Any], *, set_as_current: bool = False) -> Celery:
    """Return an app with the tasks of the field."""
    app = Celery(NAME, set_as_current=set_as_current)
    app.conf.update(conf)

    def add(function: Any, name: str, **options: Any) -> None:
        app.task(function, name=f"{NAME}.{name}", shared=False, **options)

    add(work, "plain")
    add(work, "late", acks_late=True)
    add(work, "skip", base=Singleton)
    add(work, "late_skip", base=Singleton, acks_late=True)
    add(work, "in_turn", base=Singleton, unique_on=["name"], overlap="buffer_all")
    add(merge, "merge", base=Singleton, unique_on=["name"], overlap="buffer_one")
    add(work, "beside", base=Singleton, overlap="allow_all")
    return app


app = make_app(json.loads(os.environ.get("SB_FIELD_CONF", "{}")), set_as_current="SB_FIELD_CONF" in os.environ)
