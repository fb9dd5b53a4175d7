"""A stage for Celery tasks: one server, its workers, and a watch that misses no freeing of a lock and no run."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from celery.result import AsyncResult
from redis import Redis

from tests.support import (
    ORACLE_DB,
    CeleryLauncher,
    CeleryProcess,
    Oracle,
    RedisServer,
    Run,
    alive,
    until_answered,
    wait_until,
)
from tests.system import ends

#: Seconds after which a scenario is given up; a solo worker plays them one by one.
PATIENCE = 40.0

#: Seconds that the lock of a running task outlives its worker here.
LEASE = 3.0

LOCKS = "SINGLETONLOCK_"


@dataclass(frozen=True)
class Config:
    """How a worker runs its tasks: a column of the matrix."""

    pool: str
    late: bool = False

    @property
    def acks(self) -> str:
        return "late" if self.late else "early"

    def __str__(self) -> str:
        return f"{self.pool} {self.acks}" if self.pool != "caller" else self.pool


@dataclass(frozen=True)
class Freeing:
    at: float
    event: str  #: ``del``, or ``expired``


class Watch:
    """Follows every freeing of a lock and every run as they happen."""

    def __init__(self, server: RedisServer) -> None:
        self.news = threading.Condition()
        self.freeings: dict[str, list[Freeing]] = defaultdict(list)
        self.runs: dict[str, Run] = {}
        #: Asked at the moment in which a lock becomes free; what it returns is in ``witnessed``.
        self.witnesses: dict[str, Callable[[], Any]] = {}
        self.witnessed: dict[str, Any] = {}
        self._closed = False
        client = server.client(client_name="test")
        client.config_set("notify-keyspace-events", "KEA")
        self._pubsub = client.pubsub()
        self._pubsub.psubscribe(f"__keyspace@0__:{LOCKS}*")
        assert self._pubsub.get_message(timeout=5)["type"] == "psubscribe"
        self._oracle = server.client(db=ORACLE_DB)
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._locks, self._runs)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join()
        self._pubsub.close()

    def _locks(self) -> None:
        while not self._closed:
            message = self._pubsub.get_message(timeout=0.2)
            if not message or message["data"] not in {"del", "expired"} or message["channel"].endswith(":done"):
                continue
            key = message["channel"].partition(":")[2]
            if key in self.witnesses:
                self.witnessed[key] = self.witnesses[key]()
            with self.news:
                self.freeings[key].append(Freeing(time.time(), message["data"]))
                self.news.notify_all()

    def _runs(self) -> None:
        last = "0"
        while not self._closed:
            for _, records in self._oracle.xread({"runs": last}, block=200) or []:
                with self.news:
                    for last, record in records:  # noqa: B007 - where to go on
                        event, run, moment = record.pop("event"), record["run"], float(record.pop("t"))
                        if event == "start":
                            self.runs[run] = Run(**{**record, "pid": int(record["pid"])}, started=moment)
                        elif run in self.runs:
                            self.runs[run].ended = moment
                    self.news.notify_all()

    def until(self, predicate: Callable[[], Any], *, what: Callable[[], str], timeout: float = PATIENCE) -> Any:
        """Return the first true value of the predicate; ``what`` says what was awaited."""
        deadline = time.monotonic() + timeout
        with self.news:
            while not (value := predicate()):
                if time.monotonic() > deadline:
                    raise AssertionError(f"waited {timeout:g} s for {what()}")
                self.news.wait(0.1)
        return value


class Stage:
    """A server of its own, an app to send from, workers, and the watch."""

    def __init__(self, config: Config, directory: Path, conf: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.server = RedisServer(socket=config.pool == "solo").start()  # one column does without a port
        self.results = RedisServer().start()
        self.redis = self.server.client()
        self.oracle = Oracle(self.server.client(db=ORACLE_DB))
        self.conf: dict[str, Any] = {"task_acks_late": config.late, "singlebeat_lock_lease": LEASE, **(conf or {})}
        # Senders want no results: each would keep a subscription to a server that ends before them.
        self.app = self.make_app()
        self.watch = Watch(self.server)
        self._launcher = CeleryLauncher(self.server, f"{self.server.url}?db={ORACLE_DB}", directory)

    def make_app(self, **conf: Any) -> Any:
        return ends.make_app(self.server.celery_url, {**self.conf, "result_backend": "disabled", **conf})

    def worker(self, *args: str, pool: str = "", concurrency: int = 3) -> CeleryProcess:
        """Start a worker and return when it takes tasks."""
        pool = pool or self.config.pool
        several = () if pool == "solo" else ("-c", str(concurrency))
        env = {ends.RESULTS: self.results.celery_url}
        process = self._launcher(
            "worker", "-P", pool, *several, *args, app="tests.system.ends", conf=self.conf, env=env
        )
        return process.ready(timeout=PATIENCE)

    @property
    def workers(self) -> list[CeleryProcess]:
        return self._launcher.processes

    def undelivered(self) -> list[str]:
        """Return the ids of the messages that the broker would still deliver to a worker."""
        waiting = [json.loads(raw) for raw in self.redis.lrange("celery", 0, -1)]
        waiting += [json.loads(raw)[0] for raw in self.redis.hvals("unacked")]
        return [message["headers"]["id"] for message in waiting]

    def wait_quiet(self, *, but: Collection[str] = ()) -> None:
        """Return when the broker has nothing more to deliver, but for some ids."""
        wait_until(
            lambda: set(self.undelivered()) <= set(but), timeout=PATIENCE, what="the last message to be delivered"
        )

    def locks(self) -> set[str]:
        return {key for key in self.redis.scan_iter(f"{LOCKS}*") if not key.endswith(":done")}

    def close(self) -> None:
        self.watch.close()
        self._launcher.stop()
        self.app.close()
        self.server.stop()
        self.results.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass
class Scene:
    """One scenario on a stage: what it sent, what must come of it, and what was measured."""

    stage: Stage
    name: str
    worker: CeleryProcess | None = None
    ids: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    #: Ids of messages that no worker will ever acknowledge.
    kept: list[str] = field(default_factory=list)
    expected_runs: int | None = None
    #: Of the cell: how long the lock outlived the task.
    text: str = ""
    by_lease: bool = False
    #: The lock ended with its lease while the message was with the broker, and was taken again.
    lapsed: bool = False

    @property
    def config(self) -> Config:
        return self.stage.config

    @property
    def pool(self) -> str:
        return self.stage.config.pool

    @property
    def late(self) -> bool:
        return self.stage.config.late

    @property
    def watch(self) -> Watch:
        return self.stage.watch

    @property
    def redis(self) -> Redis:
        return self.stage.redis

    @property
    def queue(self) -> str:
        """A queue of this scene that no worker reads yet."""
        return f"queue of {self.name}"

    def task(self, short: str, app: Any = None) -> Any:
        return (app or self.stage.app).tasks[ends.task_name(short)]

    def send(self, short: str, *args: Any, app: Any = None, **options: Any) -> AsyncResult:
        """Send a task; from now on its lock is watched."""
        task = self.task(short, app)
        result = task.apply_async((self.name, *args), **options)
        self.note(result, task.generate_lock(task.name, (self.name, *args)))
        return result

    def note(self, result: AsyncResult, key: str) -> None:
        assert not result.is_duplicate
        self.ids.append(result.id)
        if key not in self.keys:
            self.keys.append(key)

    def runs(self) -> list[Run]:
        return [run for run in self.watch.runs.values() if run.name == self.name]

    def wait_started(self, count: int = 1) -> Run:
        """Return the ``count``-th run as soon as it has begun."""

        def what() -> str:
            return f"run {count} of {self.name}; so far: {self.runs()}"

        return self.watch.until(lambda: self.runs()[count - 1 : count], what=what)[0]

    def wait_accepted(self) -> Run:
        """Return the run when the worker's main process knows of it: until then the pool would start it again."""
        inspect = self.stage.app.control.inspect(limit=1, timeout=PATIENCE)

        def accepted() -> bool:
            replies = inspect.active() or {}
            return any(
                job["id"] == self.ids[0] and job["worker_pid"] for jobs in replies.values() for job in jobs or ()
            )

        run = self.wait_started()
        wait_until(accepted, timeout=PATIENCE, what="the worker to know of the run")
        return run

    def let_go(self) -> None:
        """End the body that runs, or the next one."""
        self.stage.oracle.let_go(self.name, 2)  # one may go to a body that has just been killed

    def held(self) -> bool:
        return all(self.redis.exists(key) for key in self.keys)

    def wait_log(self, pattern: str, *, worker: CeleryProcess | None = None, count: int = 1) -> None:
        (worker or self.worker).wait_for(pattern, timeout=PATIENCE, count=count)

    def over(
        self,
        *,
        runs: int = 1,
        at: float | None = None,
        by: tuple[str, ...] = ("del",),
        lease: bool = False,
        once: bool = True,
    ) -> None:
        """Wait until the task is over and its locks are free; check how often and when that happened.

        Args:
            at: when the task was over, if not at the end of its last body.
            by: how its lock may become free.
            lease: the lock may also end with its lease.
            once: each lock becomes free once; otherwise it may be lost and taken again.
        """
        self.expected_runs = runs
        allowed = {*by, *(["expired"] if lease else [])}

        def is_freed(freeings: Sequence[Freeing]) -> bool:
            # An event comes a moment late: the loss of a lock that another run took at once, after the end of that run.
            return bool(freeings) and (once or (freeings[-1].at > ended and freeings[-1].event in allowed))

        def states() -> str:
            locks = {key: self.redis.hgetall(key) | {"pttl": self.redis.pttl(key)} for key in self.keys}
            return f"{runs} runs of {self.name} and its lock;\n{self.runs()}\n{locks}\n{dict(self.freeings())}"

        self.watch.until(
            lambda: (
                len(self.runs()) >= runs
                and not any(run.lives for run in self.runs())
                and (at is not None or self.runs()[-1].ended)
            ),
            what=lambda: f"the end of {states()}",
        )
        ended = max((run.ended for run in self.runs() if run.ended), default=0.0)
        self.watch.until(
            lambda: all(map(is_freed, self.freeings().values())),
            what=lambda: f"the freeing after {states()}",
        )
        wait_until(lambda: not any(self.redis.exists(key) for key in self.keys), timeout=PATIENCE, what=states())
        assert len(self.runs()) == runs, f"it ran {len(self.runs())} times, not {runs}"
        last = [freeings[-1] for freeings in self.freeings().values()]
        over = ended if at is None else at
        for key, freeings in self.freeings().items():
            assert len(freeings) == 1 or not once, f"lock {key} became free more than once: {freeings}"
        if len(last) == 1:
            assert last[0].at >= ended, f"the lock was freed {ended - last[0].at:.3f} s before the end of the body"
        assert {freeing.event for freeing in last} <= allowed, f"freed by {last}, not by {allowed}"
        self.by_lease = lease and any(freeing.event == "expired" for freeing in last)
        self.lapsed = any(freeing.event == "expired" for found in self.freeings().values() for freeing in found[:-1])
        self.measured(max(freeing.at for freeing in last) - over)

    def measured(self, seconds: float) -> None:
        self.text = "<0.1" if seconds < 0.1 else f"{seconds:.1f}"
        if self.by_lease:
            self.text = f"lease {self.text}"
        elif self.lapsed:
            self.text = f"lapse {self.text}"

    def freeings(self) -> dict[str, list[Freeing]]:
        return {key: self.watch.freeings[key] for key in self.keys}

    def check(self) -> None:
        """Check what must be true for good, once no message is left."""
        if self.expected_runs is not None:
            assert len(self.runs()) == self.expected_runs, f"it ran again: {self.runs()}"
            left = [key for key in self.keys if self.redis.exists(key)]
            assert not left, f"locked again: {[self.redis.hgetall(key) for key in left]}"
        concurrent = self.stage.oracle.max_concurrent(self.name)
        assert concurrent <= 1, f"{concurrent} runs at once"
        with self.stage.server.client(db=ORACLE_DB) as client:
            unheld = client.lrange(f"unheld:{self.name}", 0, -1)
        assert not unheld, f"runs without their lock: {unheld}"

    # What a scene may do to the world.

    def consume(self) -> None:
        """Let the worker read the queue of this scene, too."""
        until_answered(partial(self.stage.app.control.add_consumer, self.queue))

    def revoke(self, task_id: str) -> None:
        """Return when the worker knows that the task is revoked."""
        until_answered(partial(self.stage.app.control.revoke, task_id))

    def revoke_stamped(self, **headers: list[str]) -> None:
        until_answered(partial(self.stage.app.control.revoke_by_stamped_headers, headers))

    def take_message(self) -> dict[str, Any]:
        """Take the message out of the scene's own queue."""
        return json.loads(self.redis.rpop(self.queue))

    def deliver(self, message: Mapping[str, Any], queue: str = "celery") -> None:
        """Put a message into a queue, as its sender or the broker would."""
        delivery = {**message["properties"]["delivery_info"], "routing_key": queue}
        properties = {**message["properties"], "delivery_info": delivery}
        self.redis.lpush(queue, json.dumps({**message, "properties": properties}))

    def drop_broker_connections(self) -> None:
        """Cut the connections on which workers receive."""
        for client in self.redis.client_list():
            receives = client["cmd"].startswith(("brpop", "psubscribe", "subscribe"))
            if receives and client["db"] == "0" and client["name"] != "test":
                self.redis.client_kill_filter(_id=client["id"])


@contextmanager
def dead(run: Run, scene: Scene) -> Iterator[None]:
    """Check that the process of a run is dead when its lock becomes free."""
    scene.watch.witnesses[scene.keys[0]] = lambda: alive(run.pid)
    yield
    assert not scene.watch.witnessed[scene.keys[0]], "the lock was free while the body's process lived"
