"""The app of the policies of entries: tasks that return what they know about their run, and an interrupted backfill."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery import Celery, Task

from singlebeat import Schedule, Singleton
from tests.support import recorded
from tests.system import apps


def tell(self: Task, name: str, seconds: float = 0) -> dict[str, Any]:
    """Return what the body knows about its run; bound."""
    with recorded(name) as client:
        if seconds:
            client.blpop([f"go:{name}"], timeout=seconds)
        return dict(self.request.singlebeat)


def make_app(url: str, conf: Mapping[str, Any] | None = None, *, set_as_current: bool = False) -> Celery:
    """Return the app with the tasks ``tests.system.policies.plain`` and ``.single``."""
    app = apps.make_app(url, conf, set_as_current=set_as_current)
    app.task(tell, name="tests.system.policies.plain", bind=True, shared=False)
    app.task(tell, name="tests.system.policies.single", bind=True, base=Singleton, shared=False)
    return app


app = make_app(
    os.environ.get("SB_TEST_URL", "memory://"),
    apps.conf_from_environment(),
    set_as_current="SB_TEST_URL" in os.environ,
)

if __name__ == "__main__":
    entry, start, end = sys.argv[1:]
    span = datetime.fromisoformat(start), datetime.fromisoformat(end)
    # A line of the input lets it go on: it comes no further than its test wants, however late that kills it.
    Schedule(app).backfill(entry, *span, timeout=60, progress=sys.stdin.readline)
