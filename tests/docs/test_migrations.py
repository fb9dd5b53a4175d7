"""The migrations of the docs, there and back, by real processes of the libraries that singlebeat replaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from tests.docs.pages import python
from tests.support import CeleryProcess, RedisServer, wait_until

LEADS = "Acquired lock: this beat leads"
OLD, NEW = "redbeat.RedBeatScheduler", "singlebeat.Scheduler"

#: The end of each app: its task notes its runs.
TASK = """
from redis import Redis

@app.task(**options)
def bill(name):
    Redis.from_url(os.environ["SHOP_URL"]).rpush("ran", name)
"""

BEATS = """
import os
from celery import Celery

app = Celery("shop", broker=os.environ["SB_TEST_URL"], backend=os.environ["SB_TEST_URL"])
app.conf.beat_schedule = {"tick": {"task": "shop.bill", "schedule": 1.0, "args": ["tick"]}}
app.conf.beat_max_loop_interval = 1
options = {}
"""

SINGLETONS = """
import os
from celery import Celery
from LIBRARY import Singleton

app = Celery("shop", broker=os.environ["SB_TEST_URL"], backend=os.environ["SB_TEST_URL"])
app.conf.singleton_backend_url = os.environ["SHOP_URL"]
options = {"base": Singleton}
"""

SITE = """
import os
SECRET_KEY = "for tests"
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SHOP_DB"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
CELERY_BROKER_URL = CELERY_RESULT_BACKEND = os.environ["SB_TEST_URL"]
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_BEAT_MAX_LOOP_INTERVAL = 1
"""

IN_DJANGO = """
import os
import django
from celery import Celery

os.environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
django.setup()
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
options = {}
"""


class Shop:
    """A folder with ``shop.py`` as a user has it, the processes that are started there, and the runs of its task."""

    def __init__(self, folder: Path, start: Callable[..., CeleryProcess], server: RedisServer, redis: Redis) -> None:
        self.folder, self._start, self._redis = folder, start, redis
        self._environment = {
            "SB_TEST_URL": server.celery_url,
            "SHOP_URL": server.url,
            "SHOP_DB": str(folder / "db.sqlite3"),
        }

    def save(self, app: str) -> None:
        """Save the code; processes that run keep the code that they have."""
        (self.folder / "shop.py").write_text(app + TASK, "utf-8")

    def start(self, *args: str) -> CeleryProcess:
        return self._start(*args, app="shop", cwd=self.folder, env=self._environment)

    def run(self, script: str) -> str:
        """Run Python in a process of the folder, and return what it prints."""
        return self._run("-c", f"import shop\n{script}")

    def command(self, *words: str) -> str:
        """Run a command of singlebeat."""
        return self._run("-m", "celery", "-A", "shop", "singlebeat", *words)

    def _run(self, *words: str) -> str:
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(self.folder)}
        done = subprocess.run(
            [sys.executable, *words],
            check=False,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def runs(self) -> Counter[str]:
        return Counter(self._redis.lrange("ran", 0, -1))

    def wait_for_ticks(self) -> None:
        """Wait until the entry of each second has run twice from now."""
        before = self.runs["tick"]
        wait_until(lambda: self.runs["tick"] >= before + 2, timeout=30, what="two runs of the entry of each second")

    def wait_for(self, **runs: int) -> None:
        """Wait until there are at least so many runs of each entry."""
        wait_until(lambda: all(self.runs[name] >= count for name, count in runs.items()), timeout=30, what=f"{runs}")


@pytest.fixture
def shop(celery, server, redis, tmp_path) -> Shop:
    return Shop(tmp_path, celery, server, redis)


def stopped(process: CeleryProcess) -> None:
    process.terminate()
    process.wait()


DUE = """
from datetime import UTC, datetime, timedelta
from celery.schedules import schedule
from redbeat import RedBeatSchedulerEntry
for name, ago in {"daily": 2, "paused": 0}.items():
    last = datetime.now(UTC) - timedelta(days=ago)
    RedBeatSchedulerEntry(name, "shop.bill", schedule(86400), args=[name], app=shop.app, last_run_at=last).save()
"""


#: The schedules of entries that other programs write, without what only RedBeat needs.
BY_PROGRAMS = {
    "interval": {"__type__": "interval", "every": 1},
    "rule": {"__type__": "rrule", "freq": "YEARLY", "dtstart": 1_700_000_000},
}


def test_a_schedule_goes_from_redbeat_and_back_without_a_repeat(shop, redis):
    shop.save(BEATS)
    shop.run(DUE)
    shop.start("worker", "-c", "1", "-l", "INFO").ready()
    redbeat = shop.start("beat", "-S", OLD, "-l", "INFO")
    shop.wait_for(daily=1)

    singlebeat = shop.start("beat", "-S", NEW, "-l", "INFO")
    singlebeat.wait_for("Standing by")
    stopped(redbeat)
    singlebeat.wait_for(LEADS)
    shop.wait_for_ticks()
    shop.command("pause", "paused")
    shop.command("edit", "paused", "--every", "2")
    shop.run(
        "from singlebeat import Schedule, clocked\n"
        "Schedule(shop.app).upsert('once', 'shop.bill', clocked('2100-01-01T00:00+00:00'), args=['once'])"
    )

    for name, schedule in BY_PROGRAMS.items():  # the least that singlebeat needs
        definition = {"task": "shop.bill", "args": [name], "schedule": schedule}
        redis.hset(f"redbeat:{name}", "definition", json.dumps(definition))
        redis.zadd("redbeat::schedule", {f"redbeat:{name}": 0})
    shop.wait_for(interval=1, rule=1)

    names, disable = python("how-to/migrate-redbeat")
    assert shop.run(names) == "['once']"
    shop.command("delete", "once")
    assert shop.run(f"{names}\n{disable}").splitlines() == ["[]", "paused"]
    stopped(singlebeat)
    redbeat = shop.start("beat", "-S", OLD, "-l", "INFO")
    before = shop.runs
    shop.wait_for_ticks()
    shop.wait_for(interval=before["interval"] + 1)
    assert (shop.runs["daily"], shop.runs["paused"], shop.runs["rule"]) == (1, 0, 1)
    assert redis.keys("redbeat:None") == []

    singlebeat = shop.start("beat", "-S", NEW, "-l", "INFO")
    singlebeat.wait_for("Standing by")
    stopped(redbeat)
    singlebeat.wait_for(LEADS)
    shop.command("edit", "paused", "--enable")
    shop.wait_for_ticks()
    assert (shop.runs["daily"], shop.runs["paused"]) == (1, 0), "it is still paused"
    shop.command("resume", "paused")
    shop.wait_for(paused=1)
    assert shop.runs["daily"] == 1


def test_singletons_go_from_celery_singleton_and_back(shop, redis):
    send = "print(shop.bill.delay('{}').id)".format
    old, new = (SINGLETONS.replace("LIBRARY", library) for library in ("celery_singleton", "singlebeat"))
    (clear,) = python("how-to/migrate-celery-singleton")
    shop.save(old)
    first = shop.run(send("left"))
    assert shop.run(send("left")) == first, "it is a duplicate of the queued one"

    shop.save(new)
    worker = shop.start("worker", "-c", "1").ready()
    shop.wait_for(left=1)
    assert shop.run(send("left")) != first, "the old lock is no obstacle"
    shop.wait_for(left=2)
    stopped(worker)
    second = shop.run(send("back"))
    assert shop.run(send("back")) == second

    shop.save(old)
    worker = shop.start("worker", "-c", "1").ready()
    shop.wait_for(back=1)
    assert shop.run(send("left")) == first, "without the step of the page, the old lock is an obstacle"
    shop.run(clear)
    assert redis.keys("SINGLETONLOCK_*") == []
    assert shop.run(send("left")) != first
    shop.wait_for(left=3)
    assert shop.runs["back"] == 1


PERIODIC = """
from datetime import timedelta
from django.core.management import call_command
from django.utils import timezone
from django_celery_beat.models import ClockedSchedule, IntervalSchedule, PeriodicTask

now = timezone.now()
def every(seconds, name, **fields):
    interval, _ = IntervalSchedule.objects.get_or_create(every=seconds, period="seconds")
    PeriodicTask.objects.create(name=name, task="shop.bill", args=f'["{name}"]', interval=interval, **fields)
"""


def test_a_schedule_goes_from_django_and_back_without_a_repeated_run(shop):
    (shop.folder / "site_settings.py").write_text(SITE, "utf-8")
    shop.save(IN_DJANGO)
    due = "last_run_at=now - timedelta(days=2)"
    shop.run(f"{PERIODIC}\ncall_command('migrate', verbosity=0)\nevery(1, 'tick')\nevery(86400, 'before', {due})")
    shop.start("worker", "-c", "1").ready()
    beat = shop.start("beat", "-l", "INFO")
    shop.wait_for(before=1)
    stopped(beat)

    shop.run(
        f"{PERIODIC}\nevery(86400, 'between', {due})\n"
        "PeriodicTask.objects.create(name='once', task='shop.bill', args='[\"once\"]', one_off=True,\n"
        "    clocked=ClockedSchedule.objects.create(clocked_time=now + timedelta(seconds=1)))\n"
        "call_command('dumpdata', 'django_celery_beat', output='tasks.json')"
    )
    assert shop.command("import", "tasks.json") == "stored: 5 of 5", "with Celery's own backend_cleanup"
    beat = shop.start("beat", "-S", NEW, "-l", "INFO")
    shop.wait_for(between=1, once=1)
    shop.wait_for_ticks()
    stopped(beat)
    assert shop.runs["before"] == 1

    (back,) = python("how-to/migrate-django-celery-beat")
    shop.run(back)
    shop.start("beat", "-l", "INFO")
    shop.wait_for_ticks()
    assert (shop.runs["before"], shop.runs["between"], shop.runs["once"]) == (1, 1, 1)
