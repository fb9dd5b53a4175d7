"""A bench for beats of this process: their entries, ticks on command, and what came of these on a real server."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.beat import Service
from celery.schedules import BaseSchedule, schedule

from singlebeat import Entry, Schedule, Scheduler
from singlebeat.beat.entries.entry import Meta
from singlebeat.beat.entries.occurrence import Occurrence
from tests.support import APP, RedisServer
from tests.system.apps import make_app

HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class Message:
    """A message in the queue: the headers, and the arguments of its task."""

    headers: dict[str, Any]
    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def decode(cls, text: str) -> Message:
        raw = json.loads(text)
        args, kwargs, _ = json.loads(b64decode(raw["body"]))
        return cls(raw["headers"], args, kwargs)

    @property
    def id(self) -> str:
        """The id of the task."""
        return self.headers["id"]

    @property
    def run(self) -> dict[str, Any]:
        """What the message tells its task about the run."""
        return self.headers["singlebeat"]

    @property
    def nominal(self) -> datetime:
        """The nominal time of the run."""
        return datetime.fromisoformat(self.run["nominal"])


class Bench:
    """A server with an app, and the schedulers of further processes, which tick when a test tells them to.

    Args:
        conf: settings of all its apps.
    """

    def __init__(self, server: RedisServer, **conf: Any) -> None:
        # The watchdog would end this very process after its tests.
        self.server, self.conf = server, {"singlebeat_watchdog_timeout": None, **conf}
        self.redis = server.client()
        self.schedulers: list[Scheduler] = []
        self._apps: list[Celery] = []
        self.app = self.new_app()

    def new_app(self, **conf: Any) -> Celery:
        """Return an app as another process would have it."""
        self._apps.append(make_app(self.server.celery_url, {**self.conf, **conf}))
        return self._apps[-1]

    def scheduler(self, *, app: Celery | None = None, **conf: Any) -> Scheduler:
        """Return a scheduler as of another process, which has this app, or an app with these settings."""
        scheduler = Service(app or self.new_app(**conf), scheduler_cls="singlebeat.Scheduler").get_scheduler()
        self.schedulers.append(scheduler)
        return scheduler

    def tick(self, times: int = 1, *, at: datetime | None = None) -> None:
        """Let the latest scheduler tick, at first a new one.

        Args:
            at: the moment that it takes for now.
        """
        scheduler = self.schedulers[-1] if self.schedulers else self.scheduler()
        for _ in range(times):
            if at is None:
                scheduler.tick()
            else:
                scheduler._tick(at, scheduler.lease.acquire())

    def close(self) -> None:
        """End all schedulers and apps."""
        for closed in (*self.schedulers, *self._apps):
            closed.close()

    # ---------------------------------------------------------------- entries

    @property
    def schedule(self) -> Schedule:
        """The entries of the app, to edit."""
        return Schedule(self.app)

    def put(
        self,
        name: str = "e",
        *,
        task: str = f"{APP}.plain",
        every: Any = HOUR,
        ago: timedelta | None = 1.5 * HOUR,
        **fields: Any,
    ) -> Entry:
        """Store an entry: by default it is due, and has been for half an hour.

        Args:
            ago: since its last run; None for an entry that has never run.
        """
        every = every if isinstance(every, BaseSchedule) else schedule(every)
        past = {} if ago is None else {"last_run_at": datetime.now(UTC) - ago, "total_run_count": 7}
        return Entry(name, task, every, app=self.app, **{"args": [name], **past, **fields}).save()

    def make_due(self, name: str = "e", *, ago: timedelta = 1.5 * HOUR) -> None:
        """Let the last run of an entry lie in the past, as if time had passed."""
        past = datetime.now(UTC) - ago
        self.redis.hset(f"redbeat:{name}", "meta", replace(self.meta(name), last_run_at=past).encode())
        self.redis.zadd("redbeat::schedule", {f"redbeat:{name}": past.timestamp()})

    def score(self, name: str = "e") -> float:
        """Return the place of an entry in the schedule."""
        return self.redis.zscore("redbeat::schedule", f"redbeat:{name}")

    def meta(self, name: str = "e") -> Meta:
        """Return the past of an entry."""
        return Meta.decode(self.redis.hget(f"redbeat:{name}", "meta"))

    def pending(self, name: str = "e") -> Occurrence | None:
        """Return the pending occurrence of an entry."""
        text = self.redis.hget(f"redbeat:{name}", "pending")
        return Occurrence.decode(text) if text else None

    def retry_now(self) -> None:
        """Let the time come to which pending occurrences were postponed, or code of the user that has failed."""
        for scheduler in self.schedulers:
            scheduler.dispatcher.asking._again_at.clear()
        for member in self.redis.zrange("redbeat::pending", 0, -1):
            self.redis.zadd("redbeat::pending", {member: 0})

    # ---------------------------------------------------------------- what came of them

    @property
    def messages(self) -> list[Message]:
        """The messages in the queue, the first one first."""
        return [Message.decode(text) for text in self.redis.lrange("celery", 0, -1)[::-1]]

    @property
    def ids(self) -> list[str]:
        """The task ids of the messages in the queue."""
        return [message.id for message in self.messages]

    @property
    def names(self) -> list[Any]:
        """The first argument of each message in the queue: by our convention, the entry's name."""
        return [message.args[0] for message in self.messages]

    @property
    def history(self) -> list[dict[str, str]]:
        """The records of all decisions."""
        return [record for _, record in self.redis.xrange("redbeat::history")]

    @property
    def decisions(self) -> list[str]:
        """All decisions so far."""
        return [record["decision"] for record in self.history]
