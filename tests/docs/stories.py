"""What happens around the blocks of a page: what its reader has before, and what goes on when a command is typed.

A story is a generator. It runs on to its next ``yield`` before each step of the page, and to its end after the last.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import ModuleType, SimpleNamespace

from celery import Celery
from celery.schedules import schedule
from celery_singleton.backends.redis import RedisBackend as TheirBackend

from singlebeat import Entry, Schedule, clear_locks
from singlebeat.locks import backend_of, new_backend
from singlebeat.locks.base import Ref
from singlebeat.locks.inspect import InspectBackend
from singlebeat.locks.legacy import LegacyBackend
from singlebeat.web.security import hashed_token
from tests.docs.pages import python
from tests.docs.reader import Reader
from tests.support import ROOT, free_port, wait_until

Story = Callable[[Reader], Iterator[None]]

#: An app whose task takes as long as an entry says.
NIGHTLY = """
import time
from celery import Celery

app = Celery("shop", broker="redis://localhost/0", backend="redis://localhost/0")
app.conf.singlebeat_lock_lease = 15

@app.task
def bill(seconds=0):
    time.sleep(seconds)

@app.task
def sync():
    raise ConnectionError("no route to host")
"""

LEADS = "Acquired lock: this beat leads"


def given_shop(reader: Reader) -> None:
    """Give the reader the app of the page about entries, with an entry."""
    reader.save(python("how-to/entries")[0])
    reader.shop.entries = Schedule(reader.shop.app)
    reader.shop.entries.upsert("bill every hour", "shop.bill", schedule(3600))
    reader.db = 1


def given_feed(reader: Reader) -> list[int]:
    """Give the reader a feed; return the list of the numbers with which it is saved."""
    saved: list[int] = []

    def save(fence: int) -> None:
        saved.append(fence)

    reader.shop.feed = SimpleNamespace(save=save)
    return saved


def given_dead_run(reader: Reader) -> None:
    """Leave the lock of a run whose worker has died, and most of its lease is over."""
    run = Ref("SINGLETONLOCK_{a}", "one", 0, "n")
    backend_of(reader.shop.app).begin(run, lease=600, remember_for=60, task="shop.bill", arguments="()")
    reader.redis.hset(run.key, "since", int(reader.redis.hget(run.key, "since")) - 500_000)
    reader.redis.pexpire(run.key, 100_000)
    reader.values["TASK_ID"] = run.task_id


def shop(reader: Reader) -> Iterator[None]:
    """The story of each page that has no other: there is an app."""
    given_shop(reader)
    yield


def changed(reader: Reader) -> Iterator[None]:
    """An entry was changed twice."""
    given_shop(reader)
    for every in (60, 30):
        reader.shop.entries.upsert("bill", "shop.bill", schedule(every))
    reader.values["CHANGE"] = reader.shop.entries.changes("bill", 1)[0].id
    yield from [None] * 4
    assert reader.shop.entries.get("bill").schedule == schedule(60)


def readme(reader: Reader) -> Iterator[None]:
    """The page shows the demo, and then an app in three blocks, the last of which saves to a feed."""
    reader.environment["SINGLEBEAT_REDIS_URL"] = reader.server.url
    yield from [None] * 3  # the demo, its log, and ``explain``
    for process in reader.processes:
        process.kill_group()  # it would take the messages of the app
    yield from [None] * 2
    saved = given_feed(reader)
    yield
    assert saved


def events(reader: Reader) -> Iterator[None]:
    """The logs are those of the demo."""
    reader.environment["SINGLEBEAT_REDIS_URL"] = reader.server.url
    reader.start("celery -A exampleconf worker -B -l INFO")
    yield


def tutorial(reader: Reader) -> Iterator[None]:
    """Four terminals: a worker, two beats, and commands; the leader is killed, the next one stopped."""
    reader.settings = "app.conf.redbeat_lock_timeout = 2"
    yield  # the app
    yield  # the worker
    yield  # the first beat
    first = reader.processes[-1]
    first.wait_for(LEADS)
    second = reader.start("celery -A shop beat -l INFO")
    second.wait_for("Standing by")
    yield from [None] * 6  # the log, and questions about it
    reader.values["PID"] = str(first.pid)
    yield  # ``kill``
    second.wait_for(LEADS)
    third = reader.start("celery -A shop beat -l INFO")
    third.wait_for("Standing by")
    second.terminate()
    third.wait_for(LEADS)
    yield  # ``add``
    reader.processes[0].wait_for(r"shop\.greet\S+ succeeded.*Hello, you!")
    yield from [None] * 5  # ``list`` and the other commands, and a Singleton
    worker, *_ = reader.processes
    worker.kill_group()
    with (reader.folder / "shop.py").open("a", encoding="utf-8") as file:
        file.write(python("tutorial")[1])
    reader.start("celery -A shop worker -l INFO").ready()
    yield  # the shell


def entries(reader: Reader) -> Iterator[None]:
    """A beat runs, and a backfill has a start and an end."""
    yield  # the app
    reader.start("celery -A shop beat -S singlebeat.Scheduler -l INFO").wait_for(LEADS)
    end = datetime.now(UTC)
    reader.shop.start, reader.shop.end = end - timedelta(days=2), end
    yield


def django_dump(reader: Reader) -> Iterator[None]:
    """The dump is one of django-celery-beat's."""
    given_shop(reader)
    shutil.copy(ROOT / "tests/redis/django_celery_beat-2.9.0.json", reader.folder / "tasks.json")
    yield


def exclusive(reader: Reader) -> Iterator[None]:
    given_shop(reader)
    saved = given_feed(reader)
    yield
    assert saved, "the lock was free, and the block has saved with its number"


def troubleshoot(reader: Reader) -> Iterator[None]:
    """The incidents of the page: a worker that knows no ``shop.bil``, and ends at last; no beat, a beat, two beats."""
    reader.save(NIGHTLY)
    reader.shop.app.conf.singlebeat_lost_after = 1  # of the commands here; beat does not free the lock so soon
    entries = Schedule(reader.shop.app)

    def nightly(task: str = "shop.bill", every: float = 1, ago: float = 0, **fields: object) -> None:
        with suppress(KeyError):
            entries.delete("nightly")
        past = {"last_run_at": datetime.now(UTC) - timedelta(seconds=ago)} if ago else {}
        Entry("nightly", task, schedule(every), app=reader.shop.app, **past, **fields).save()

    def last(decision: str) -> None:
        wait_until(lambda: [r.decision for r in entries.history("nightly", 1)] == [decision], what=f"a run {decision}")

    def is_running() -> None:
        beat.wait_for("event=skipped_overlap .*running since", after=beat.position)

    def is_broken() -> None:
        broken = {"task": "shop.bill", "schedule": {"__type__": "crontab", "minute": "99"}}
        reader.redis.hset("redbeat:nightly", "definition", json.dumps(broken))
        reader.redis.zadd("redbeat::schedule", {"redbeat:nightly": 0})
        wait_until(lambda: reader.redis.exists("redbeat::quarantine"), what="the quarantine")

    worker_command = "celery -A shop worker -l INFO -P threads -c 4 -n w1@%h --without-mingle"
    worker = reader.start(worker_command).ready()
    beat = reader.start("celery -A shop beat -S singlebeat.Scheduler -l INFO")
    beat.wait_for(LEADS)
    nightly(args=[60])
    is_running()
    yield  # the run before it takes longer than the interval

    reader.redis.delete("celery")
    nightly(args=[1], options={"queue": "bills"})
    wait_until(lambda: reader.redis.llen("bills"), what="a message that no worker reads")
    last("skipped_overlap")
    reader.redis.delete("bills")
    assert reader.shop.app.control.add_consumer("bills", reply=True, timeout=10, limit=1)
    yield  # its queue was purged

    nightly(every=1800, ago=1871, misfire_grace_time=30)
    last("missed")
    yield  # all beats were down

    is_broken()
    yield  # another program has broken the entry

    nightly("shop.bil", every=3600, ago=3601)
    worker.wait_for("unregistered task of type 'shop.bil'")
    yield  # a typing error in the name of its task

    nightly(args=[61])
    is_running()
    worker.terminate()
    yield  # its worker shuts down

    worker.kill_group()
    yield  # its worker has died

    standby = reader.start("celery -A shop beat -S singlebeat.Scheduler -l INFO")
    reader.start(worker_command)
    entries.upsert("weekly", "shop.sync", schedule(0.2))
    is_broken()
    standby.wait_for("Standing by")
    yield  # ``status``: two beats

    standby.kill_group()
    entries.delete("nightly")
    clear_locks(reader.shop.app)  # of the purged message
    Entry("nightly", "shop.bil", schedule(3600), app=reader.shop.app).save()

    def failures() -> int:
        return sum(
            record.end is not None and record.end.outcome == "failure" for record in entries.history("weekly", 9)
        )

    wait_until(lambda: failures() >= 4, timeout=30, what="runs that fail")
    entries.upsert("weekly", "shop.sync", schedule(3600))
    yield  # ``doctor``

    given_dead_run(reader)
    yield  # ``unlock``


def new_app(reader: Reader) -> None:
    """Give the reader an app that nothing has used."""
    reader.shop.app = Celery("shop", broker=f"{reader.server.url}/0")


def locks_elsewhere(reader: Reader) -> Iterator[None]:
    """The page configures two backends: one that asks the workers, and one with four methods."""
    project = ModuleType("myproject.locks")
    project.DatabaseBackend = TheirBackend
    sys.modules |= {"myproject": ModuleType("myproject"), "myproject.locks": project}
    new_app(reader)
    yield
    assert isinstance(new_backend(reader.shop.app), InspectBackend)
    new_app(reader)
    yield
    assert isinstance(new_backend(reader.shop.app), LegacyBackend)


def servers(reader: Reader) -> Iterator[None]:
    """Each block has its app, with TLS and with sentinels; the user may do what beat needs."""
    new_app(reader)
    yield
    assert new_backend(reader.shop.app)
    new_app(reader)
    yield
    assert new_backend(reader.shop.app)
    yield  # ``redis-cli``
    yield  # the user
    assert reader.redis.acl_getuser("singlebeat")["enabled"]
    reader.redis.acl_deluser("singlebeat")


DJANGO = """
import django
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
django.setup()
from celery import Celery
from django.db import transaction
app = Celery("shop", broker="redis://localhost/0", backend="redis://localhost/0")
atomic = transaction.atomic()
atomic.__enter__()
"""


def django(reader: Reader) -> Iterator[None]:
    """A call within a transaction is sent at its end."""
    url = reader.server.url
    reader.around = (
        DJANGO.replace("redis://localhost", url),
        "from redis import Redis\n"
        f"redis = Redis.from_url('{url}')\n"
        "assert not redis.llen('celery')\natomic.__exit__(None, None, None)\nassert redis.llen('celery') == 1",
    )
    yield


def redbeat(reader: Reader) -> Iterator[None]:
    """A process of RedBeat was killed, and its lock is there; a beat of singlebeat stands by."""
    given_shop(reader)
    with reader.server.client(db=1) as client:
        client.set("redbeat::lock", "its token", ex=1500)
    beat = reader.start("celery -A shop beat -S singlebeat.Scheduler -l INFO")
    beat.wait_for("Standing by")
    yield
    beat.wait_for(LEADS)


SENTRY = """
import sentry_sdk
init = sentry_sdk.init
sentry_sdk.init = lambda dsn, **options: init("http://key@localhost:1/1", **options)
"""


def sentry(reader: Reader) -> Iterator[None]:
    """Beat and worker send their signals, and the page's data source name is that of no server."""
    send = "for signal in (beat_init, celeryd_init):\n    signal.send(None)\n"
    reader.around = (SENTRY, f"{send}assert sentry_sdk.is_initialized()\nsentry_sdk.get_client().close(timeout=0)")
    yield


HOSTS = """
import os
os.chdir({folder!r})
from shop import app
from flask import Flask
flask_app = Flask("shop")
from django.conf import settings
settings.configure(
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"],
)
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
"""


def page(reader: Reader) -> Iterator[None]:
    """Each host is in a process of its own, beside the app, and there is a users file."""
    given_shop(reader)
    (reader.folder / "users").write_text(f"deploy:admin:{hashed_token('t0ken')}")
    reader.around = (
        f"import sys\nsys.path.insert(0, {str(reader.folder)!r})\n{HOSTS.format(folder=str(reader.folder))}",
        "",
    )
    yield


def http_api(reader: Reader) -> Iterator[None]:
    """The page is served with a users file, and the reader's shell has its address and the token."""
    given_shop(reader)
    (reader.folder / "users").write_text(f"deploy:admin:{hashed_token('t0ken')}")
    port = free_port()
    reader.start(f"celery -A shop singlebeat web --users users --port {port}").wait_for("The page: ")
    reader.environment |= {"PAGE": f"http://127.0.0.1:{port}", "AUTH": "Authorization: Bearer t0ken"}
    wait_until(lambda: is_open(port), what="the page")
    yield from [None] * 9  # an entry is stored, looked at, run, paused, read and changed
    assert reader.shop.entries.get("bill").policy.jitter == 30
    assert reader.shop.entries.get("bill").policy.paused


def is_open(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


STORIES: dict[str, Story] = {
    "README": readme,
    "tutorial": tutorial,
    "how-to/changes": changed,
    "how-to/django": django,
    "how-to/entries": entries,
    "how-to/exclusive": exclusive,
    "how-to/http-api": http_api,
    "how-to/lock-backends": locks_elsewhere,
    "how-to/migrate-django-celery-beat": django_dump,
    "how-to/migrate-redbeat": redbeat,
    "how-to/page": page,
    "how-to/redis": servers,
    "how-to/sentry-opentelemetry": sentry,
    "how-to/troubleshoot": troubleshoot,
    "reference/events": events,
}
