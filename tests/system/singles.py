"""The app of the kinds of Singletons: one task for each word of ``lock`` and ``overlap``; and a worker for many cases.

Every task takes the name of its case first, and its bodies wait until ``Oracle.let_go(name)``.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord, group
from redis import Redis

from singlebeat import DuplicateTaskError, Singleton, errors
from singlebeat.locks.modes import LockMode
from singlebeat.overlap import Overlap
from singlebeat.signals import lock_lost
from tests.support import (
    ORACLE_DB,
    CeleryLauncher,
    CeleryProcess,
    Oracle,
    RedisServer,
    recorded,
    until_answered,
    wait_until,
)
from tests.system import apps

#: Seconds that anything may take on a slow machine.
PATIENCE = 30.0

LOCKS = "SINGLETONLOCK_*"


def hold(name: str, value: Any = None, seconds: float = 60) -> Any:
    """Return the value after ``seconds``, or as soon as it may go."""
    with recorded(name) as client:
        if seconds:
            client.blpop([f"go:{name}"], timeout=seconds)
        return value


def report(self: Any, name: str) -> dict[str, Any]:
    """Return what the body knows about its own run."""
    with recorded(name) as client:
        client.blpop([f"go:{name}"], timeout=60)
        return {"fence": self.request.singlebeat.fence, "lost": self.request.singlebeat.is_lost()}


def retry_once(self: Any, name: str) -> str:
    with recorded(name) as client:
        client.blpop([f"go:{name}"], timeout=60)
        if not self.request.retries:
            raise self.retry(countdown=0)
        return name


def retry_after(self: Any, name: str, value: Any, countdown: float = 0) -> Any:
    """Run once more after so many seconds, if there are any."""
    with recorded(name) as client:
        client.blpop([f"go:{name}"], timeout=60)
        if countdown and not self.request.retries:
            raise self.retry(countdown=countdown)
        return value


def fail(name: str) -> None:
    with recorded(name) as client:
        client.blpop([f"go:{name}"], timeout=60)
        raise RuntimeError("as asked")


def become(self: Any, task: str, *args: Any) -> None:
    """Replace itself by a call of another task."""
    raise self.replace(self.app.signature(task, args))


def replace_itself(self: Any, name: str, by: str, times: int = 1) -> str:
    """Replace itself by an equal call: by that alone, or as a part of what ``by`` says."""
    with recorded(name):
        if not times:
            return name
        equal, other = self.si(name, by, times - 1), self.app.tasks[task_name("plain")].si(f"{name}, other", 1, 0)
        # The last part of a replacement has the id of the task that it replaces.
        replacements = {
            "equal": lambda: equal,
            "chain(equal)": lambda: chain(equal),
            "chain(equal, other)": lambda: chain(equal, other),
            "chain(other, equal)": lambda: chain(other, equal),
            "group(equal, other)": lambda: group(equal, other),
            "chord([equal, other], other)": lambda: chord([equal, other], other),
            "chord([other, other], equal)": lambda: chord([other, other], equal),
        }
        raise self.replace(replacements[by]())


def again(self: Any, name: str) -> str:
    """Call itself from its body, and say what that call raised."""
    with recorded(name):
        try:
            self.apply_async((name,), overlap="raise")
        except DuplicateTaskError as exc:
            return exc.task_id
        return ""


def raise_error(kind: str, *args: Any) -> None:
    raise getattr(errors, kind)(*args)


def by_initial(name: str, value: str, seconds: float) -> list[str]:
    """Make calls equal whose values begin alike."""
    return [name, value[:1]]


#: Options of the tasks, by the last part of their names; the rest of them take ``hold``.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "single": {"unique_on": ["name"]},
    **{str(word): {"unique_on": ["name"], "overlap": str(word)} for word in Overlap},
    **{str(word): {"lock": str(word)} for word in LockMode if word is not LockMode.UNTIL_EXPIRED},
    "until_expired": {"lock": "until_expired", "lock_expiry": 600},
    "until_soon_expired": {"lock": "until_expired", "lock_expiry": 1},
    "while_executing_in_turn": {"lock": "while_executing", "overlap": "buffer_all"},
    "on_names": {"unique_on": ["name", "value"]},
    "on_a_path": {"unique_on": ["name", "value.user.id"]},
    "on_a_function": {"unique_on": by_initial},
    "on_nothing": {"unique_on": []},
    "report": {"bind": True, "function": report},
    "retry_once": {"bind": True, "function": retry_once, "lock_expiry": 600, "max_retries": 1},
    "retry_after": {"bind": True, "function": retry_after, "unique_on": ["name"]},
    "fail": {"function": fail},
    "again": {"bind": True, "function": again},
    **{
        f"replaced_{word}": {"bind": True, "function": replace_itself, "unique_on": ["name"], "overlap": str(word)}
        for word in Overlap
    },
    "become": {"bind": True, "function": become, "base": None},
    "raise_error": {"function": raise_error, "base": None},
    "plain": {"base": None},
}


def task_name(short: str) -> str:
    return f"tests.system.singles.{short}"


def make_app(url: str, conf: Mapping[str, Any] | None = None, *, set_as_current: bool = False) -> Celery:
    """Return an app with all the tasks above."""
    # A result that outlives its server must not wait for it.
    no_retries = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0}}
    conf = {"result_backend_transport_options": no_retries, **(conf or {})}
    app = apps.make_app(url, conf, set_as_current=set_as_current, tasks=False)
    for short, given in OPTIONS.items():
        options = {"base": Singleton, **given}
        if options["base"] is None:
            del options["base"]
        app.task(options.pop("function", hold), name=task_name(short), shared=False, **options)
    return app


@dataclass
class Stage:
    """A server of its own with a worker and apps to send from; all cases of a module share it."""

    server: RedisServer
    worker: CeleryProcess
    start: CeleryLauncher
    redis: Redis
    oracle_client: Redis
    oracle: Oracle
    _stack: ExitStack
    _apps: dict[str, Celery] = field(default_factory=dict)

    def app(self, **conf: Any) -> Celery:
        """Return an app to send from; the same settings, the same app."""
        key = json.dumps(conf, sort_keys=True)
        if key not in self._apps:
            self._apps[key] = self._stack.enter_context(make_app(self.server.celery_url, conf))
        return self._apps[key]

    def task(self, short: str, **conf: Any) -> Any:
        """Return a task of the app with these settings."""
        return self.app(**conf).tasks[task_name(short)]

    def lock(self, short: str, *args: Any, **kwargs: Any) -> str:
        """Return the key of the lock of a call."""
        task = self.task(short)
        return task.generate_lock(task.name, args, kwargs)

    def consume(self, queue: str) -> None:
        """Let the worker read a queue, too."""
        until_answered(partial(self.app().control.add_consumer, queue))

    def over(self, name: str, ids: list[str]) -> None:
        """Check that exactly these runs of a case have been, and that nothing is left which could start another."""
        self.oracle.wait_ended(len(ids), name, timeout=PATIENCE)
        self.quiet(name)
        assert sorted(run.id for run in self.oracle.runs(name)) == sorted(ids)

    def postponed(self, task_id: str, times: int) -> None:
        """Return when a message has met its lock so many times, and waits for its next try."""
        self.worker.wait_for(rf"event=postponed task=\S+ id={task_id}", count=times)

    def quiet(self, name: str) -> None:
        """Return when no message of a case is left."""
        wait_until(lambda: not self._waiting(name), timeout=PATIENCE, what=f"the last message of {name}")

    def _waiting(self, name: str) -> list[str]:
        """Return what is left in queues and in the worker: its messages carry the case's name in their arguments."""
        queues = self.redis.scan_iter(_type="list")
        left = [json.loads(raw) for queue in queues for raw in self.redis.lrange(queue, 0, -1)]
        left += [json.loads(raw)[0] for raw in self.redis.hvals("unacked")]
        return [text for one in left if name in (text := one.get("headers", {}).get("argsrepr") or "")]

    def free(self, *keys: str, on: Redis | None = None) -> None:
        """Return when none of these locks is held, on this server or another."""
        wait_until(lambda: not (on or self.redis).exists(*keys), timeout=PATIENCE, what="the end of the locks")


@contextmanager
def open_stage(directory: Path, *args: str, app: str = __name__, **options: Any) -> Iterator[Stage]:
    """Open a stage for many cases: its worker, which starts slowly, starts once; options as for ``CeleryLauncher``."""
    with RedisServer() as server, ExitStack() as stack:
        start = CeleryLauncher(server, f"{server.url}?db={ORACLE_DB}", directory)
        stack.callback(start.stop)
        worker = start("worker", *args, app=app, **options).ready()
        records = server.client(db=ORACLE_DB)
        yield Stage(server, worker, start, server.client(), records, Oracle(records), stack)
        gc.collect()  # results end their subscriptions, which they cannot once the server is gone


app = make_app(
    os.environ.get("SB_TEST_URL", "memory://"),
    json.loads(os.environ.get("SB_TEST_CONF", "{}")),
    set_as_current="SB_TEST_URL" in os.environ,
)


@lock_lost.connect
def say_so(sender: str, ref: Any, **_: Any) -> None:
    print(f"lock_lost: {sender} {ref.task_id}")  # noqa: T201 - the log of the worker is where the test looks
