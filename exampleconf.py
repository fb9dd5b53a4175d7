"""A complete example in one file: an app, its tasks and its schedule.

    celery -A exampleconf worker -B -l INFO        beat and worker in one process, to try it out
    celery -A exampleconf beat -l INFO             beat alone; start several, and one leads
    celery --config exampleconf beat -l INFO       beat that knows the tasks by name only
    celery -A exampleconf singlebeat web           a page to look at all of that; needs the extra web

All of them share a private Redis, which starts with the first process and ends with the last. Set
SINGLEBEAT_REDIS_URL to use your own Redis.
"""

import sys
import time
from importlib.util import find_spec
from pathlib import Path

from celery import Celery
from celery.schedules import crontab
from celery.signals import beat_init, worker_ready

from singlebeat import Singleton, embedded

broker_url = result_backend = redbeat_redis_url = embedded.redis_url()
beat_scheduler = "singlebeat.Scheduler"
timezone = "Europe/Berlin"
worker_concurrency = 4

beat_schedule = {
    "greet every two seconds": {"task": "exampleconf.greet", "schedule": 2.0, "args": ["world"]},
    "greet every minute": {"task": "exampleconf.greet", "schedule": crontab(), "args": ["minute"]},
    # Due every 2 seconds, busy for 5: the log shows skipped runs, the lock's holder and its age.
    "report every two seconds": {"task": "exampleconf.report", "schedule": 2.0, "args": ["sales"]},
    "clean up every three seconds": {"task": "exampleconf.clean_up", "schedule": 3.0},
}

app = Celery("exampleconf")
app.config_from_object(__name__)


@worker_ready.connect
@beat_init.connect
def show_page(**_: object) -> None:
    """Print the line that opens the page."""
    if find_spec("starlette"):
        celery = sys.argv[0] if Path(sys.argv[0]).name == "celery" else "celery"
        print(f"To look at it on a page: {celery} -A exampleconf singlebeat web", flush=True)  # noqa: T201


@app.task
def greet(name: str) -> str:
    """Return a greeting; a plain task."""
    return f"Hello, {name}!"


@app.task
def report(subject: str) -> str:
    """Take longer than the interval; beat does not let the runs of this plain task pile up."""
    time.sleep(5)
    return f"The {subject} report is ready."


@app.task(base=Singleton)
def clean_up() -> str:
    """Exclude duplicates from every sender: beat, ``clean_up.delay()``, another service."""
    time.sleep(4)
    return "All clean."
