"""The app of a shop, as its beats, workers and page load it: ``celery -A tests.browser.shop``.

``SB_TEST_URL`` names the server for everything, ``SB_TEST_CONF`` (JSON) overrides any setting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery, Task
from redis import Redis

from singlebeat import Singleton
from tests.system.apps import conf_from_environment

BILL, IMPORT, REPORT = "shop.send_invoices", "shop.import_feed", "shop.report"

#: The list on which a run of ``IMPORT`` waits until a test lets it end.
GO = "test:go"

STATIC = {"ping partners": {"task": BILL, "schedule": 300.0}}


def make_app(url: str, conf: Mapping[str, Any] | None = None) -> Celery:
    """Return the app on a server."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(
        broker_url=url,
        result_backend=url,
        redbeat_redis_url=url,
        beat_scheduler="singlebeat.Scheduler",
        beat_schedule=STATIC,
        timezone="Europe/Berlin",
        broker_connection_retry_on_startup=True,
    )
    app.conf.update(conf or {})
    add = partial(app.task, shared=False)  # else every other app of the process gets them, too
    add(_send_invoices, name=BILL)
    add(_report, name=REPORT)
    add(_import_feed, name=IMPORT, base=Singleton, bind=True)
    return app


def _send_invoices(*args: object, **kwargs: object) -> str:
    return "sent"


def _report(*args: object, **kwargs: object) -> str:
    return "written"


def _import_feed(self: Task, *args: object, **kwargs: object) -> None:
    """Wait until a test lets it end."""
    with Redis.from_url(self.app.conf.redbeat_redis_url, socket_timeout=None) as client:
        client.blpop([GO], timeout=600)


app = make_app(os.environ["SB_TEST_URL"], conf_from_environment()) if "SB_TEST_URL" in os.environ else None
