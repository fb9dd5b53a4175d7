"""What every benchmark stands on: one Redis server, apps on it, and stored entries that are due when they should be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import schedule
from redbeat import RedBeatScheduler
from redbeat.decoder import RedBeatJSONEncoder
from redbeat.schedulers import acquire_distributed_beat_lock

from singlebeat import Scheduler
from singlebeat.locks import backend_of
from tests.benchmarks.apps import QUEUE, make_app
from tests.support import RedisServer

#: Seconds between two occurrences of an entry that does not say otherwise.
EVERY = 60.0

A_DAY = 24 * 3600.0

#: Entries or keys that one request handles.
MOST_AT_ONCE = 10_000

#: Written by the server itself, as a million of them would take minutes from here.
_STORE = """
for number = ARGV[1], ARGV[2] do
  local key = KEYS[1] .. 'e' .. number
  redis.call('HSET', key, 'definition', (string.gsub(ARGV[3], '@', number)), 'meta', ARGV[4])
  redis.call('HDEL', key, 'pending')
  redis.call('ZADD', KEYS[2], ARGV[5], key)
end
"""


class Stage:
    """The server that all sides share.

    Args:
        elsewhere: another server.
        quick: small numbers, to see that everything works.
    """

    def __init__(self, server: RedisServer, *, elsewhere: RedisServer | None = None, quick: bool = False) -> None:
        self.server, self.elsewhere, self.quick = server, elsewhere or server, quick
        self.client = server.client(socket_timeout=60)

    def size(self, full: int, quick: int) -> int:
        """Return how many there are to be of something."""
        return quick if self.quick else full

    def app(self, name: str, **conf: Any) -> Celery:
        """Return an app with all the tasks, its schedule under a prefix of its own."""
        # The time between two rounds is no lack of progress.
        conf = {"redbeat_key_prefix": f"{name}:", "singlebeat_watchdog_timeout": A_DAY, **conf}
        app = make_app(self.server.celery_url, conf)
        backend_of(app).announce("benchmark", ttl=A_DAY)  # so that beat locks plain tasks, too
        return app

    def sent(self) -> int:
        """Return how many messages wait in the queue."""
        return self.client.llen(QUEUE)

    def clear(self) -> None:
        """Forget all messages and all locks."""
        locks = self.locks()
        self.client.delete(QUEUE, *locks)

    def locks(self) -> list[str]:
        """Return the keys of all locks, of singlebeat and of celery-singleton."""
        return [key for key in self.client.scan_iter(match="SINGLETONLOCK_*", count=MOST_AT_ONCE) if ":done" not in key]

    def expect_sent(self, count: int) -> None:
        """Refuse a measurement that has not done its work."""
        if (sent := self.sent()) != count:
            raise RuntimeError(f"{sent} messages were sent instead of {count}: this measures nothing")

    def store(self, prefix: str, count: int, task: str, *, due: datetime, every: float = EVERY, begin: int = 0) -> None:
        """Write entries ``e0``, ``e1``, … as RedBeat does, each with its number as argument, due at one time."""
        template = {
            "name": "e@",
            "task": task,
            "args": ["@"],
            "kwargs": {},
            "options": {},
            "schedule": schedule(timedelta(seconds=every)),
            "enabled": True,
        }
        # With the zone as Celery has it, whose name RedBeat stores, as we do.
        last_run_at = (due - timedelta(seconds=every)).replace(tzinfo=ZoneInfo("UTC"))
        definition = json.dumps(template, cls=RedBeatJSONEncoder)
        meta = json.dumps({"last_run_at": last_run_at, "total_run_count": 1}, cls=RedBeatJSONEncoder)
        for at in range(begin, begin + count, MOST_AT_ONCE):
            last = min(at + MOST_AT_ONCE, begin + count) - 1
            self.client.eval(_STORE, 2, prefix, f"{prefix}:schedule", at, last, definition, meta, due.timestamp())
        self.client.delete(f"{prefix}:pending")

    @contextmanager
    def singlebeat(self, app: Celery) -> Iterator[Scheduler]:
        """Return our scheduler as it is after its start, leading."""
        scheduler = Scheduler(app)
        if scheduler.lease.acquire() is None:
            raise RuntimeError("another beat leads")
        scheduler.tick()
        try:
            yield scheduler
        finally:
            scheduler.close()

    @contextmanager
    def redbeat(self, app: Celery) -> Iterator[RedBeatScheduler]:
        """Return RedBeat's scheduler as it is after its start, leading."""
        scheduler = RedBeatScheduler(app)
        acquire_distributed_beat_lock(SimpleNamespace(scheduler=scheduler))
        scheduler.tick()
        try:
            yield scheduler
        finally:
            scheduler.close()


def now() -> datetime:
    return datetime.now(UTC)


def just_now() -> datetime:
    """Return a time that has passed."""
    return now() - timedelta(seconds=1)


def work_off(scheduler: Any) -> None:
    """Tick until nothing is due: RedBeat does all in one tick, singlebeat a batch in each, without a pause between."""
    while scheduler.tick() < 0.01:
        pass


def numbers(count: int) -> Iterable[str]:
    """Return the arguments of the entries' tasks."""
    return map(str, range(count))
