"""The apps under measurement: the same task three times, plain, as our Singleton and as celery-singleton's.

In a process of its own (``-A tests.benchmarks.apps``), ``SB_BENCH_URL`` names the server and ``SB_BENCH_CONF`` (JSON)
the settings; ``SB_BENCH_TASKS`` names the tasks that it has, so that it imports nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery, Task
from celery.utils.imports import symbol_by_name

QUEUE = "celery"

PLAIN, OURS, THEIRS = "bench.plain", "bench.singlebeat", "bench.celery_singleton"

BASES = {PLAIN: Task, OURS: "singlebeat:Singleton", THEIRS: "celery_singleton:Singleton"}


def nothing(number: str) -> None:
    """Take no time at all."""


def make_app(url: str, conf: Mapping[str, Any], tasks: Iterable[str] = tuple(BASES)) -> Celery:
    """Return an app; results are ignored, so that they cost no side anything."""
    # RedBeat and celery-singleton take redis-py's form only.
    native = url.replace("redis+socket://", "unix://", 1)
    app = Celery("bench", set_as_current=False)
    app.conf.update(
        broker_url=url,
        result_backend=url,
        redbeat_redis_url=native,
        singleton_backend_url=native,
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
    )
    app.conf.update(conf)
    for name in tasks:
        base = BASES[name]
        if isinstance(base, str):
            base = symbol_by_name(base)
        app.task(nothing, name=name, base=base, shared=False)
    app.finalize()
    return app


if "SB_BENCH_URL" in os.environ:
    app = make_app(
        os.environ["SB_BENCH_URL"],
        json.loads(os.environ.get("SB_BENCH_CONF", "{}")),
        os.environ.get("SB_BENCH_TASKS", "").split(),
    )
