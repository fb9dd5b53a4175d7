"""The app whose ``beat_schedule`` gives objects: a schedule of its own class, and an argument that beat computes."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, schedstate

from tests.system import apps


class Seconds(BaseSchedule):  # type: ignore[misc]
    """Due at each full second, as a user may write it: asked by Celery's ``is_due`` alone."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = 1 - last_run_at.microsecond / 1e6 - (self.now() - last_run_at).total_seconds()
        return schedstate(is_due=left <= 0, next=left if left > 0 else 1)


app = apps.make_app(
    os.environ.get("SB_TEST_URL", "memory://"), apps.conf_from_environment(), set_as_current="SB_TEST_URL" in os.environ
)
app.conf.beat_schedule = {
    "given": {
        "task": "tests.system.apps.plain",
        "schedule": Seconds(),
        "args": [BeatLazyFunc(lambda: f"by {os.getpid()} in {datetime.now(UTC).year}")],
    }
}
