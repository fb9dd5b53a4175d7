"""The app under test, as the workers and beats of the system tests load it.

``SB_TEST_URL`` names the server for everything, ``SB_TEST_CONF`` (JSON) overrides any setting.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

from singlebeat import Singleton
from tests.support import recorded


def plain(name: str, seconds: float = 0) -> str:
    """Take up to ``seconds``; ``Oracle.let_go(name)`` ends it earlier."""
    with recorded(name) as client:
        if seconds:
            client.blpop([f"go:{name}"], timeout=seconds)
        return name


def single(name: str, seconds: float = 0) -> str:
    """Do the same, as a Singleton."""
    return plain(name, seconds)


def fail(name: str) -> None:
    """Fail after it has begun."""
    with recorded(name):
        raise RuntimeError(name)


def deadly(name: str) -> None:
    """Kill its whole worker, as the end of a container does."""
    with recorded(name):
        os.killpg(os.getpgrp(), signal.SIGKILL)  # a worker under test leads a group of its own


def opaque(name: str) -> object:
    """Return a result that cannot be encoded."""
    with recorded(name):
        return object()


def retrying(self: Task, name: str, times: int, seconds: float = 0) -> str:
    """Retry itself until it has run so many times, each like ``plain``; bound."""
    with recorded(name) as client:
        if seconds:
            client.blpop([f"go:{name}"], timeout=seconds)
        if self.request.retries + 1 < times:
            raise self.retry(countdown=0.5, max_retries=None)
        return name


def rejecting(name: str, times: int, requeue: bool, seconds: float = 0) -> str:
    """Reject its message until it has run so many times, each like ``plain``."""
    with recorded(name) as client:
        if seconds:
            client.blpop([f"go:{name}"], timeout=seconds)
        if client.incr(f"count:{name}") < times:
            raise Reject(name, requeue=requeue)
        return name


def make_app(
    url: str, conf: Mapping[str, Any] | None = None, *, set_as_current: bool = False, tasks: bool = True
) -> Celery:
    """Return an app with the tasks ``tests.system.apps.plain``, ``.single`` and the others of ``_add_tasks``.

    Args:
        tasks: False for an app that knows no task.
    """
    # RedBeat and celery-singleton take redis-py's form only.
    native = url.replace("redis+socket://", "unix://", 1)
    app = Celery("tests.system.apps", set_as_current=set_as_current)
    app.conf.update(
        broker_url=url,
        result_backend=url,
        redbeat_redis_url=native,
        singleton_backend_url=native,
        beat_scheduler="singlebeat.Scheduler",
        broker_connection_retry_on_startup=True,
    )
    app.conf.update(conf or {})
    if tasks:
        _add_tasks(app)
    return app


def _add_tasks(app: Celery) -> None:
    add = partial(app.task, shared=False)  # else every other app of the process gets them, too
    add(plain, name="tests.system.apps.plain")
    add(single, name="tests.system.apps.single", base=Singleton)
    add(single, name="tests.system.apps.in_turn", base=Singleton, overlap="buffer_all", unique_on=[])
    add(fail, name="tests.system.apps.fail")
    add(fail, name="tests.system.apps.single_fail", base=Singleton)
    add(deadly, name="tests.system.apps.deadly")
    add(opaque, name="tests.system.apps.opaque")
    add(retrying, name="tests.system.apps.retrying", bind=True)
    add(retrying, name="tests.system.apps.single_retrying", bind=True, base=Singleton)
    add(rejecting, name="tests.system.apps.rejecting", acks_late=True)
    add(rejecting, name="tests.system.apps.single_rejecting", base=Singleton, acks_late=True)


def conf_from_environment() -> dict[str, Any]:
    """Return the settings in ``SB_TEST_CONF``, schedules in RedBeat's JSON."""
    text = os.environ.get("SB_TEST_CONF", "{}")
    if '"__type__"' not in text:  # importing RedBeat makes it listen to every beat: not without need
        return json.loads(text)
    from redbeat.decoder import RedBeatJSONDecoder

    return json.loads(text, cls=RedBeatJSONDecoder)


app = make_app(
    os.environ.get("SB_TEST_URL", "memory://"),
    conf_from_environment(),
    set_as_current="SB_TEST_URL" in os.environ,
)

#: What a beat without the workers' code has: ``-A tests.system.apps:nameless``.
nameless = make_app(os.environ.get("SB_TEST_URL", "memory://"), conf_from_environment(), tasks=False)
