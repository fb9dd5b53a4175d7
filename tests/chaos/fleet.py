"""The app and the schedulers of the chaos tests, and the driver that feeds occurrences, does harm and counts.

A process is told by ``SB_CHAOS`` what to do to itself at which step of a tick; several orders are separated by ``;``:

- ``kill before claim 3``: SIGKILL right before the third claim that has something to claim;
- ``hang after publish 1``: stand still for ever;
- ``slow publish 0.01``: take so many seconds longer for each of these steps.

The steps are ``read``, ``publish`` and ``write`` where everything is on one server; else ``read``, ``claim``, ``lock``,
``publish`` and ``confirm``.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from statistics import median
from typing import Any

from celery.schedules import schedule
from celery.signals import task_received
from redis.exceptions import RedisError

import singlebeat.beat.scheduler as scheduler_module
from singlebeat import Entry, Scheduler
from singlebeat.beat.entries.entry import Meta
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.keys import Keys
from singlebeat.beat.server_time import ServerTime
from singlebeat.beat.store.claims import Store
from singlebeat.beat.tick import Tick
from singlebeat.locks import backend_of
from tests.support import CeleryLauncher, CeleryProcess, Oracle, RedisServer, _oracle_client, wait_until
from tests.system.apps import app, make_app

__all__ = ("APP", "PLAIN", "SINGLE", "Chaos", "Line", "SabotagedScheduler", "app", "steady")

APP = "tests.chaos.fleet"
PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
DAY = timedelta(days=1)

#: Oracle's key that holds how many seconds the clocks of the beats are ahead.
CLOCK = "clock"

#: Oracle's key that holds which messages workers have got.
RECEIVED = "received"


@task_received.connect
def _record_message(request: Any, **_: Any) -> None:
    if request.eta is None:  # else it is one that the worker itself has put off
        _oracle_client().xadd(RECEIVED, {"id": request.id})


class SteppedTime(ServerTime):
    """The time by which a beat decides, from a server whose clock tests set forward and back."""

    def timestamp(self) -> float:
        return super().timestamp() + float(_oracle_client().get(CLOCK) or 0)


class SabotagedScheduler(Scheduler):
    """Does to itself what ``SB_CHAOS`` says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._orders = [order.split() for order in os.environ.get("SB_CHAOS", "").split(";") if order]
        self._steps: Counter[str] = Counter()
        if ["step", "clock"] in self._orders:
            self.server_time = SteppedTime()

    @cached_property
    def store(self) -> Store:
        store = Store(self.app, scheduler_module.schedule_client(self.app))
        store.due = self._sabotaged("read", store.due)
        store.claim = self._sabotaged("claim", store.claim)
        store.confirm = self._sabotaged("confirm", store.confirm)
        backend = backend_of(self.app)
        backend.acquire_many = self._sabotaged("lock", backend.acquire_many)
        return store

    @cached_property
    def work(self) -> Tick:
        work = Scheduler.work.func(self)
        dispatches = work.one_write.dispatches
        dispatches.write = self._sabotaged("write", dispatches.write)
        return work

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        return self._sabotaged("publish", super().apply_async)(*args, **kwargs)

    def _sabotaged(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def sabotaged(*args: Any, **kwargs: Any) -> Any:
            if not args[0]:  # an idle tick comes by with empty hands
                return call(*args, **kwargs)
            self._steps[step] += 1
            self._obey("before", step)
            try:
                return call(*args, **kwargs)
            finally:
                self._obey("after", step)

        return sabotaged

    def _obey(self, when: str, step: str) -> None:
        for order in self._orders:
            if order[:2] == ["slow", step] and when == "before":
                time.sleep(float(order[2]))
            elif order[1:] == [when, step, str(self._steps[step])]:
                if order[0] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()


@dataclass
class Line:
    """What one scenario did: a row of the table."""

    scenario: str
    occurrences: int
    decided: int
    published: int
    started: int
    lost: int
    twice: int
    remarks: str = ""


class Chaos:
    """One scenario: beats, a worker, occurrences that fall due, and what became of each of them.

    Args:
        server: keeps the schedule and the locks.
        broker: another server for the messages and results.
        report: takes the finished row of the table.
        conf: further settings of all processes.
    """

    def __init__(
        self,
        celery: CeleryLauncher,
        oracle: Oracle,
        server: RedisServer,
        *,
        report: Callable[[dict[str, Any]], None],
        broker: RedisServer | None = None,
        **conf: Any,
    ) -> None:
        self.celery, self.oracle, self.server, self.report = celery, oracle, server, report
        self.redis = server.client()
        self.broker = (broker or server).client()
        self.conf: dict[str, Any] = {
            "beat_scheduler": f"{APP}:SabotagedScheduler",
            "redbeat_lock_timeout": 1.5,
            "singlebeat_history_limit": 1_000_000,
            "singlebeat_lock_lease": 3,
            "task_ignore_result": True,
            **({"broker_url": broker.celery_url, "result_backend": broker.celery_url} if broker else {}),
            **conf,
        }
        self.app = make_app(server.celery_url, self.conf)
        self.keys = Keys.of(self.app)
        self.expected: dict[str, str] = {}  #: name of the entry by id of the occurrence
        self._past: list[dict[str, str]] = []  #: decisions that Redis has forgotten
        self.takeovers: dict[str, list[float]] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------ processes

    def beat(self, orders: str = "", **conf: Any) -> CeleryProcess:
        """Start a beat that follows these orders, see above."""
        env = {"SB_CHAOS": orders}
        return self.celery("beat", app=APP, env=env, conf={**self.conf, **conf}, server=self.server)

    def announce_worker(self) -> None:
        """Let beats know that there will be a worker, so that they take locks."""
        backend_of(self.app).announce("a worker", ttl=3600)

    def worker(self) -> CeleryProcess:
        """Start a worker, and return when beats know that it looks after locks."""
        worker = self.celery("worker", "-c", "2", app=APP, conf=self.conf, server=self.server).ready()
        wait_until(backend_of(self.app).workers_seen, what="the worker to announce itself")
        return worker

    def leading(self, *beats: CeleryProcess) -> CeleryProcess:
        """Return the one of the beats that leads, as soon as one does."""

        def leader() -> CeleryProcess | None:
            pid = self.redis.hget(self.keys.lease.leader, "pid")
            return next((beat for beat in beats if str(beat.pid) == pid), None)

        return wait_until(leader, timeout=30, what="one of the beats to lead")

    def pair(self, **conf: Any) -> tuple[CeleryProcess, CeleryProcess]:
        """Start two beats and return the one that leads and the one that stands by."""
        one, other = self.beat(**conf), self.beat(**conf)
        leader = self.leading(one, other)
        standby = other if leader is one else one
        standby.wait_for("Standing by")
        return leader, standby

    @contextmanager
    def takeover(self, how: str, *beats: CeleryProcess) -> Iterator[Sequence[CeleryProcess]]:
        """Note how long no beat decides anything when the leader ends in this way; needs a steady flow.

        Yields the beats, the one that leads first: on a slow machine another may lead than a moment ago.
        """
        leader = wait_until(lambda: self.redis.hgetall(self.keys.lease.leader), timeout=30, what="a leader")
        term = int(leader["term"])
        began = time.time()
        yield sorted(beats, key=lambda beat: str(beat.pid) != leader["pid"])
        first = wait_until(lambda: self._first_decision_after(term), timeout=60, what="a decision of the next leader")
        self.takeovers.setdefault(how, []).append(first - began)

    def _first_decision_after(self, term: int) -> float | None:
        for id_, record in reversed(self.redis.xrevrange(self.keys.history, count=1000)):
            if int(record["term"]) > term:
                return int(id_.partition("-")[0]) / 1000
        return None

    # ------------------------------------------------ occurrences

    def feed(self, count: int, *, over: float = 0.0, delay: float = 0.0, task: str = PLAIN) -> None:
        """Let ``count`` occurrences fall due, each of an entry of its own, from ``delay`` on and ``over`` so long.

        Nothing can merge them with a later one: each must be decided, published and started by itself.
        """
        begin = time.time() + delay
        with self.redis.pipeline(transaction=False) as pipe:
            for at in range(count):
                name = f"e{next(self._numbers)}"
                nominal = datetime.fromtimestamp(round(begin + over * at / count, 3), UTC)
                entry = Entry(name, task, schedule(DAY), args=[name], app=self.app)
                fields = {"definition": entry.encode(), "meta": Meta(nominal - DAY).encode()}
                pipe.hset(self.keys.entry(name), mapping=fields)
                pipe.zadd(self.keys.schedule, {self.keys.entry(name): nominal.timestamp()})
                self.expected[Occurrence.of(self.keys.prefix, name, nominal).id] = name
            pipe.execute()

    def claimed(self) -> int:
        """Return how many occurrences were claimed so far."""
        return self.redis.zcard(self.keys.pending) + self.redis.xlen(self.keys.history)

    def decisions(self) -> list[dict[str, str]]:
        """Return the records of all decisions so far."""
        return [*self._past, *(record for _, record in self.redis.xrange(self.keys.history))]

    def keep_decisions(self) -> None:
        """Remember the decisions so far: Redis is about to forget them."""
        self._past = self.decisions()

    def decided(self) -> Counter[str]:
        """Return how often each occurrence was decided, by its id."""
        return Counter(record["id"] for record in self.decisions())

    def dispatched(self) -> set[str]:
        """Return the occurrences for which the decision was to send their task."""
        return {record["id"] for record in self.decisions() if record["decision"] == "dispatched"}

    def published(self) -> Counter[str]:
        """Return how many messages workers have got for each occurrence."""
        return Counter(record["id"] for _, record in self.oracle._client.xrange(RECEIVED))

    def queued(self) -> Counter[str]:
        """Return how many messages wait in the queue for each occurrence."""
        return Counter(json.loads(message)["headers"]["id"] for message in self.broker.lrange("celery", 0, -1))

    def started(self) -> Counter[str]:
        """Return how often the body of each occurrence's task has begun."""
        return Counter(run.id for run in self.oracle.runs())

    def missing(self) -> set[str]:
        """Return the occurrences that were not started yet, or not decided."""
        return set(self.expected) - (set(self.started()) & set(self.decided()))

    def is_quiet(self) -> bool:
        """Return whether no message and no run is under way any more."""
        try:
            waiting = self.broker.llen("celery") + self.broker.hlen("unacked") + self.redis.zcard(self.keys.pending)
        except RedisError:
            return False
        return not waiting and not self.oracle.running()

    def settle(self, *, timeout: float = 60.0) -> None:
        """Return when every occurrence has been started and decided, and nothing is on its way any more."""
        deadline = time.monotonic() + timeout
        while missing := self.missing():
            if time.monotonic() > deadline:
                some = sorted(self.expected[id_] for id_ in missing)[:10]
                raise AssertionError(f"{len(missing)} occurrences were lost, among them {', '.join(some)}")
            time.sleep(0.1)
        wait_until(self.is_quiet, timeout=timeout, what="the last messages to be dealt with")

    # ------------------------------------------------ the table

    @contextmanager
    def scenario(self, title: str, *, timeout: float = 60.0, may_lose: bool = False) -> Iterator[list[str]]:
        """Count when the block is done, and demand that nothing was lost or done twice; takes remarks.

        Args:
            may_lose: acknowledged writes are lost here by design.
        """
        remarks: list[str] = []
        try:
            yield remarks
            self.settle(timeout=timeout)
        finally:
            line = self.line(title, remarks)
            self.report(asdict(line))
        decided, started = self.decided(), set(self.started())
        assert {id_: count for id_, count in decided.items() if count > 1} == {}, "decided twice"
        assert line.twice == 0
        if not may_lose:
            assert line.lost == 0
            assert started == set(self.published()) == self.dispatched() >= set(self.expected)

    def line(self, title: str, remarks: Sequence[str] = ()) -> Line:
        """Return the row of the table as things stand now."""
        decided, published, started = self.decided(), self.published(), self.started()
        all_ids = set(self.expected) | self.dispatched()
        times = [
            f"take-over after {how}: {median(seconds):.1f} s (median of {len(seconds)})"
            for how, seconds in self.takeovers.items()
        ]
        return Line(
            scenario=title,
            occurrences=len(all_ids),
            decided=decided.total(),
            published=published.total(),
            started=started.total(),
            lost=len(all_ids - set(started)),
            twice=sum(count > 1 for count in started.values()),
            remarks="; ".join([*times, *remarks]),
        )


def steady(count: int, *, every: float = 0.1) -> Mapping[str, Any]:
    """Return a ``beat_schedule`` whose entries are due again and again."""
    return {
        f"s{n}": {"task": PLAIN, "schedule": schedule(timedelta(seconds=every)), "args": [f"s{n}"]}
        for n in range(count)
    }
