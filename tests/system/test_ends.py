"""The lock of a task is held until the task is over, however it ends, and is free then; and no two run at once.

One row per way to end, one column per pool and acknowledgement; each cell is a test, ``-k "prefork and early"`` picks
a column of them. The cells of a column share workers where they can.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from singlebeat import Singleton
from tests.matrix import CELL
from tests.support import connected, wait_until
from tests.system.scene import LEASE, PATIENCE, Config, Scene, Stage, dead

POOLS = ("prefork", "threads", "solo", "gevent")
CALLER = Config("caller")
COLUMNS = [*(Config(pool, late) for pool in POOLS for late in (False, True)), CALLER]

#: Settings that make Redis deliver an unacknowledged message again soon; kombu looks for such every second.
SOON = 2
REDELIVERS_SOON = {
    "broker_transport_options": {
        "visibility_timeout": SOON,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
}

#: Seconds of a time limit: a scene that sees a start late still watches what the limit does.
LIMIT = 3

NO_CHILD = "this pool has no child processes"
NO_SOFT_LIMIT = "Celery enforces soft time limits in prefork only"
NO_HARD_LIMIT = "Celery enforces no time limits in this pool"
NO_TERMINATE_IN_C = "only a process can be ended in a call into C"
GIL = "the renewer shares the interpreter with the body: the lease must be longer than any call that keeps it"
NO_RESTORE = "an idle gevent worker never restores messages of its own accord"
BLOCKED = "a solo worker receives nothing while a body runs"
ACKED = "the message is acknowledged before the body begins: the broker does not deliver it again"
ONLY_LATE = "differs with late acknowledgement only"
ONLY_EARLY = "is the same with late acknowledgement"
NO_CANCEL = "Celery cannot cancel a task in this pool"
NEEDS_WORKER = "needs a worker"

Play = Callable[[Scene], None]


@dataclass
class Scenario:
    """A row: how to play it on a worker that it shares, or alone, and where it has nothing to say."""

    title: str
    absent: Mapping[str, str]  #: reasons, by ``"pool"``, ``"acks"`` or ``"pool acks"``
    shared: Play | None = None
    alone: Play | None = None
    caller: Play | None = None
    #: The columns in which it has the stage to itself, if it does not have it in all.
    apart: Callable[[Config], bool] = field(default=lambda config: False)
    conf: Mapping[str, Any] = field(default_factory=dict)

    def reason(self, column: Config) -> str:
        """Return why there is nothing to see in a column, or an empty text."""
        if (column == CALLER) != (self.caller is not None):
            return "-"
        for word in (column.pool, column.acks, str(column)):
            if word in self.absent:
                return self.absent[word]
        return "" if column == CALLER or column.pool != "gevent" or find_spec("gevent") else "gevent is not installed"

    def is_alone(self, column: Config) -> bool:
        return self.alone is not None and (self.shared is None or self.apart(column))


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    title: str, *, role: str = "shared", conf: Mapping[str, Any] | None = None, apart: Any = None, **absent: str
) -> Any:
    """Make a function the play of a row; ``absent`` names columns (``threads``, ``early``, ``solo_late``)."""

    def register(play: Play) -> Play:
        reasons = {name.replace("_", " "): reason for name, reason in absent.items()}
        row = SCENARIOS.setdefault(title, Scenario(title, reasons))
        setattr(row, role, play)
        row.conf = conf or row.conf
        row.apart = apart or row.apart
        return play

    return register


def only(*pools: str, because: str) -> dict[str, str]:
    return dict.fromkeys([pool for pool in POOLS if pool not in pools], because)


# --- how a task may end -------------------------------------------------------------------------------------------


@scenario("success")
def _(s: Scene) -> None:
    s.send("succeed", 30)
    s.wait_started()
    assert s.held()
    s.let_go()
    s.over()


@scenario("exception")
def _(s: Scene) -> None:
    s.send("fail")
    s.over()


@scenario("retry at once")
def _(s: Scene) -> None:
    s.send("retry", 0)
    s.over(runs=2)


@scenario("retry with a countdown")
def _(s: Scene) -> None:
    s.send("retry", 1)
    s.over(runs=2)


@scenario("retry until there is none left")
def _(s: Scene) -> None:
    s.send("retry_in_vain")
    s.over(runs=2)


@scenario("retry(throw=False) at the end")
def _(s: Scene) -> None:
    s.send("retry_without_raising", 0)
    s.over(runs=2)


@scenario("retry(throw=False), and the body goes on")
def _(s: Scene) -> None:
    s.send("retry_without_raising", 2)
    s.over(runs=2)


@scenario("autoretry_for until there is none left")
def _(s: Scene) -> None:
    s.send("retry_by_itself")
    s.over(runs=3)


@scenario("retry that cannot be sent")
def _(s: Scene) -> None:
    s.send("retry_that_cannot_be_sent")
    s.over()


@scenario("Ignore")
def _(s: Scene) -> None:
    s.send("ignore")
    s.over()


@scenario("Reject")
def _(s: Scene) -> None:
    s.send("reject", False)
    s.over()


@scenario("Reject(requeue=True)")
def _(s: Scene) -> None:
    s.send("reject", True)
    s.over(runs=2 if s.late else 1)


@scenario("replaced by the same call")
def _(s: Scene) -> None:
    s.send("replace", 0, 0)
    s.over(runs=2)


@scenario("replaced by another call")
def _(s: Scene) -> None:
    task = s.task("replace")
    result = s.send("replace", 0, 1)
    s.note(result, task.generate_lock(task.name, (s.name, 1, 1)))
    s.over(runs=2)


@scenario("arguments that do not fit")
def _(s: Scene) -> None:
    result = s.send("picky", 1, 2, 3)
    wait_until(lambda: s.redis.exists(f"celery-task-meta-{result.id}"), timeout=60, what="the failure")
    s.over(runs=0, at=time.time())


@scenario("arguments changed by the body")
def _(s: Scene) -> None:
    s.send("mutate", [1, 2, 3], {"a": 1})
    s.over()


@scenario("result that cannot be encoded")
def _(s: Scene) -> None:
    s.send("return_what_nobody_can_store")
    s.over()


@scenario("result backend down")
def _(s: Scene) -> None:
    result = s.send("store", 30)
    s.wait_started()
    s.stage.results.kill()
    if s.late:  # Celery acknowledges in prefork only
        s.kept.append(result.id)
    s.let_go()
    s.over()


@scenario("soft time limit", **only("prefork", because=NO_SOFT_LIMIT))
def _(s: Scene) -> None:
    s.send("succeed", 30, soft_time_limit=LIMIT)
    s.over()


@scenario(
    "soft time limit while its lock is freed", role="alone", late=ONLY_EARLY, **only("prefork", because=NO_SOFT_LIMIT)
)
def _(s: Scene) -> None:
    s.stage.worker()
    result = s.send("return_to_a_paused_server", 2 * LIMIT)
    s.over(lease=True)
    stored = wait_until(lambda: s.redis.get(f"celery-task-meta-{result.id}"), timeout=PATIENCE, what="the result")
    assert (json.loads(stored)["status"], json.loads(stored)["result"]) == ("SUCCESS", s.name)


@scenario("hard time limit", **only("prefork", "gevent", because=NO_HARD_LIMIT))
def _(s: Scene) -> None:
    s.send("succeed", 30, time_limit=LIMIT)
    run = s.wait_started()
    if s.pool == "gevent":
        s.over()
    else:
        with dead(run, s):  # the pool kills it a moment after SIGTERM: on a slow host it cannot record its end
            s.over(at=run.started + LIMIT)


@scenario("hard time limit in a call into C", **only("prefork", because=NO_HARD_LIMIT))
def _(s: Scene) -> None:
    s.send("hold_the_interpreter", LIMIT + 5, time_limit=LIMIT)
    run = s.wait_started()
    with dead(run, s):
        s.over(at=run.started + LIMIT)


@scenario("SIGTERM to the child", **only("prefork", because=NO_CHILD))
def _(s: Scene) -> None:
    s.send("succeed", 30)
    run = s.wait_accepted()
    os.kill(run.pid, signal.SIGTERM)
    s.over(at=time.time())


@scenario("SIGKILL to the child", **only("prefork", because=NO_CHILD))
def _(s: Scene) -> None:
    s.send("succeed", 30)
    run = s.wait_accepted()
    with dead(run, s):
        os.kill(run.pid, signal.SIGKILL)
        s.over(at=time.time())


@scenario("SIGKILL to the child, task_reject_on_worker_lost", **only("prefork", because=NO_CHILD))
def _(s: Scene) -> None:
    s.send("insist", 30)
    run = s.wait_accepted()
    os.kill(run.pid, signal.SIGKILL)
    killed = time.time()
    if s.late:
        s.let_go()
        s.over(runs=2)
    else:
        s.over(at=killed)


def _leaves_late_in_thread(column: Config) -> bool:
    """Return whether no process acknowledges the message of a body that left; it comes again after the timeout."""
    return column.pool == "solo" or (column.late and column.pool in {"threads", "gevent"})


@scenario("SystemExit")
def _(s: Scene) -> None:
    s.send("leave", "SystemExit")
    s.over()


@scenario("SystemExit", role="alone", conf=REDELIVERS_SOON, apart=_leaves_late_in_thread)
def _(s: Scene) -> None:
    _leave_alone(s, "SystemExit", dies=s.pool == "solo", again=s.late)


@scenario("MemoryError", role="alone", conf=REDELIVERS_SOON)
def _(s: Scene) -> None:
    # Celery has stored the failure when it ends its worker or forgets the message: what comes again is a copy.
    _leave_alone(s, "MemoryError", dies=s.pool in {"prefork", "solo"}, again=False)


def _leave_alone(s: Scene, kind: str, *, dies: bool, again: bool) -> None:
    worker = s.stage.worker()
    s.send("leave", kind)
    s.wait_started()
    ended = s.watch.until(lambda: s.runs()[0].ended, what=lambda: "the end of the body")
    if dies:
        worker.wait(30)
    if s.late and dies:
        worker = s.stage.worker()
    elif s.late and s.pool == "gevent":
        worker = s.stage.worker(pool="solo")  # one that restores
    if again:
        s.over(runs=2)
    else:
        s.over(at=ended, lease=True)
        if s.late:
            copy = rf"{s.ids[0]}\] has run already"  # whichever of them the broker gives it to
            wait_until(lambda: any(w.matches(copy) for w in s.stage.workers), timeout=PATIENCE, what="the copy's end")


@scenario("revoked before its start")
def _(s: Scene) -> None:
    result = s.send("succeed", queue=s.queue)
    s.revoke(result.id)
    _discarded(s)


@scenario("revoked by a stamped header")
def _(s: Scene) -> None:
    task = s.task("succeed")
    signature = task.s(s.name).set(queue=s.queue)
    signature.stamp(scene=s.name)
    s.note(signature.apply_async(), task.generate_lock(task.name, (s.name,)))
    s.revoke_stamped(scene=[s.name])
    _discarded(s)


def _discarded(s: Scene) -> None:
    assert s.held()
    asked = time.time()
    s.consume()
    s.wait_log(rf"Discarding revoked task: .*{s.ids[0]}")
    s.over(runs=0, at=asked)


@scenario("revoked while the worker holds it for its ETA")
def _(s: Scene) -> None:
    result = s.send("succeed", countdown=600)
    s.wait_log(rf"{result.id}\] received")
    s.kept.append(result.id)
    s.revoke(result.id)
    s.over(runs=0, at=time.time())


@scenario("expired in the queue")
def _(s: Scene) -> None:
    s.send("succeed", queue=s.queue, expires=0.5)
    expired = time.time() + 0.5
    s.over(runs=0, at=expired, by=("expired",))
    # The lock was taken before the message was made: it may end a little earlier.
    wait_until(lambda: time.time() > expired, what="the end of the message")
    s.consume()
    s.wait_log(rf"Discarding revoked task: .*{s.ids[0]}")


@scenario("expired while the worker held it for its ETA")
def _(s: Scene) -> None:
    s.send("succeed", countdown=2, expires=1)
    due = time.time() + 2
    s.wait_log(rf"Discarding revoked task: .*{s.ids[0]}")
    s.over(runs=0, at=due, by=("del", "expired"))


@scenario("revoke(terminate=True)")
def _(s: Scene) -> None:
    result = s.send("succeed", 30)
    s.wait_started()
    if s.pool in {"prefork", "gevent"}:
        s.stage.app.control.revoke(result.id, terminate=True)
        s.over()
    else:  # not supported: the body runs on, and its lock with it
        if s.pool == "threads":
            s.stage.app.control.revoke(result.id, terminate=True, reply=True, timeout=30, limit=1)
        else:
            s.stage.app.control.revoke(result.id, terminate=True)
        assert s.held()
        s.let_go()
        s.over()


@scenario("revoke(terminate=True) in a call into C", **only("prefork", because=NO_TERMINATE_IN_C))
def _(s: Scene) -> None:
    result = s.send("hold_the_interpreter", 2)
    s.wait_started()
    s.stage.app.control.revoke(result.id, terminate=True)
    s.over()


def _unknown(name: str) -> None:
    raise AssertionError(name)


@scenario("task that the worker does not know")
def _(s: Scene) -> None:
    app = s.stage.make_app()
    task = app.task(_unknown, name="tests.system.ends.unknown", base=Singleton, shared=False)
    s.note(task.delay(s.name), task.generate_lock(task.name, (s.name,)))
    s.wait_log("Received unregistered task of type 'tests.system.ends.unknown'")
    s.over(runs=0, at=time.time())
    app.close()


@scenario("message with an ETA that is none")
def _(s: Scene) -> None:
    s.send("succeed", queue=s.queue)
    message = s.take_message()
    message["headers"]["eta"] = "soon"
    s.deliver(message)
    s.wait_log("Received invalid task message")
    s.over(runs=0, at=time.time())


@scenario("message that cannot be decoded")
def _(s: Scene) -> None:
    app, sent = s.stage.make_app(singlebeat_queued_ttl=2), time.time()
    s.send("succeed", app=app, queue=s.queue)
    message = s.take_message()
    s.deliver({**message, "body": "AAAA"})
    s.wait_log("decode message body")
    s.over(runs=0, at=sent, lease=True)
    app.close()


# --- how a worker may end -----------------------------------------------------------------------------------------


@scenario("warm shutdown", role="alone")
def _(s: Scene) -> None:
    worker = s.stage.worker()
    task, waiting = s.task("succeed"), f"{s.name}, waiting"
    key = task.generate_lock(task.name, (waiting,))
    later = task.apply_async((waiting,), countdown=600)
    worker.wait_for(rf"received.*\n?.*{later.id}|{later.id}.*received")
    s.send("succeed", 30)
    s.wait_started()
    worker.terminate()
    worker.wait_for("Warm shutdown")
    assert s.held()
    s.let_go()
    s.over()
    worker.wait(30)
    # What the worker has put back waits on, with its lock.
    assert s.redis.llen("celery") == 1
    assert s.redis.pttl(key) > 600_000
    s.redis.delete("celery")


def _cold(s: Scene, *, stops: bool) -> None:
    """Shut down with force; a body that cannot be stopped outlives that."""
    worker = s.stage.worker()
    s.send("succeed", 30)
    s.wait_started()
    worker.send(signal.SIGQUIT)
    worker.wait_for(r"Cold shutdown|Hitting Ctrl\+C again")
    if not stops:
        s.let_go()
    worker.wait(40)
    gone = time.time()
    if s.stage.undelivered():
        assert s.held(), "the lock was lost while the message waits in the broker"
        s.stage.worker()
        s.let_go()
        # A gevent worker may give the message back and have no time left for its lock, which then ends by itself.
        s.over(runs=2, lease=s.pool == "gevent", once=s.pool != "gevent")
    else:
        s.over(lease=True, at=None if s.runs()[0].ended else gone)


@scenario("cold shutdown", role="alone")
def _(s: Scene) -> None:
    _cold(s, stops=s.pool != "threads")


@scenario("soft shutdown", role="alone", conf={"worker_soft_shutdown_timeout": 1.0})
def _(s: Scene) -> None:
    _cold(s, stops=s.pool in {"prefork", "solo"})


@scenario("SIGKILL to the whole worker", role="alone", conf=REDELIVERS_SOON)
def _(s: Scene) -> None:
    worker = s.stage.worker()
    s.send("succeed", 30)
    s.wait_started()
    assert s.held()
    worker.kill_group()
    killed = time.time()
    worker.wait()
    if s.late:
        s.stage.worker(pool="solo" if s.pool == "gevent" else "")
        s.let_go()
        s.over(runs=2, lease=True, once=False)
    else:
        s.over(at=killed, lease=True)


@scenario("SIGKILL to a worker that held it for its ETA", role="alone", conf=REDELIVERS_SOON, late=ONLY_EARLY)
def _(s: Scene) -> None:
    worker = s.stage.worker()
    s.send("succeed", countdown=SOON + 3)
    worker.wait_for(s.ids[0])
    worker.kill_group()
    worker.wait()
    s.stage.worker(pool="solo" if s.pool == "gevent" else "")
    s.over()


# --- never two at once --------------------------------------------------------------------------------------------


@scenario("a body that outlives several leases")
def _(s: Scene) -> None:
    s.send("succeed", 30)
    run = s.wait_started()
    task = s.task("succeed")

    def has_outlived() -> bool:
        assert task.delay(s.name, 30).is_duplicate, f"an equal call was sent {time.time() - run.started:.1f} s later"
        time.sleep(0.2)
        return time.time() > run.started + 2.2 * LEASE

    wait_until(has_outlived, timeout=60)
    s.let_go()
    s.over()


@scenario("a call into C that outlives several leases", **only("prefork", because=GIL), late=ONLY_EARLY)
def _(s: Scene) -> None:
    s.send("hold_the_interpreter", 2.3 * LEASE)
    s.over()
    run = s.runs()[0]
    assert run.ended - run.started > 1.5 * LEASE


@scenario("a copy of the message after its success")
def _(s: Scene) -> None:
    s.send("succeed", queue=s.queue)
    message = s.take_message()
    s.deliver(message)
    s.over()
    s.deliver(message)
    s.wait_log(rf"{s.ids[0]}\] has run already")


@scenario("a copy of the message while it runs", solo=BLOCKED)
def _(s: Scene) -> None:
    s.send("succeed", 30, queue=s.queue)
    message = s.take_message()
    s.deliver(message)
    s.wait_started()
    s.deliver(message)
    s.wait_log(rf"{s.ids[0]}\] waits for its turn")
    s.let_go()
    s.over()
    s.wait_log(rf"{s.ids[0]}\] has run already")


@scenario("the original dies while its copy waits", role="alone", early=ONLY_LATE)
def _(s: Scene) -> None:
    original, other = s.stage.worker("-Q", "original"), s.stage.worker("-Q", "other")
    s.send("succeed", 30, queue=s.queue)
    message = s.take_message()
    s.deliver(message, "original")
    s.wait_started()
    s.deliver(message, "other")
    s.wait_log(rf"{s.ids[0]}\] waits for its turn", worker=other)
    original.kill_group()
    original.wait()
    s.let_go()
    s.over(runs=2, once=False)


@scenario(
    "visibility timeout in mid-run", role="alone", conf=REDELIVERS_SOON, early=ACKED, solo=BLOCKED, gevent=NO_RESTORE
)
def _(s: Scene) -> None:
    worker = s.stage.worker(concurrency=4)
    s.send("succeed", 60)
    s.wait_started()
    s.wait_log(rf"{s.ids[0]}\] waits for its turn", worker=worker, count=2)
    s.let_go()
    s.over()
    s.stage.wait_quiet()


@scenario("countdown longer than the visibility timeout", role="alone", conf=REDELIVERS_SOON, gevent=NO_RESTORE)
def _(s: Scene) -> None:
    worker = s.stage.worker(concurrency=4)
    s.send("succeed", 0.5, countdown=3 * SOON + 1)
    s.wait_log(rf"{s.ids[0]}\] received", worker=worker, count=3)
    s.over()
    s.stage.wait_quiet()


@scenario("broker connection lost in mid-run", role="alone")
def _(s: Scene) -> None:
    worker = s.stage.worker()
    s.send("succeed", 60)
    s.wait_started()
    s.drop_broker_connections()
    if s.pool != "solo":
        worker.wait_for("[Cc]onnection to broker lost")
        if s.late:
            s.wait_log(rf"{s.ids[0]}\] waits for its turn", worker=worker)
    assert s.held()
    s.let_go()
    s.over()
    s.stage.wait_quiet()


@scenario(
    "broker connection lost, and its tasks cancelled",
    role="alone",
    conf={"worker_cancel_long_running_tasks_on_connection_loss": True},
    early=ONLY_LATE,
    threads=NO_CANCEL,
    solo=NO_CANCEL,
)
def _(s: Scene) -> None:
    worker = s.stage.worker()
    s.send("succeed", 60)
    s.wait_started()
    s.drop_broker_connections()
    worker.wait_for("[Cc]onnection to broker lost")
    s.watch.until(lambda: s.runs()[0].ended, what=lambda: "the end of the cancelled body")
    s.let_go()
    # A killed greenlet reports a success, which may or may not have reached the broker: the lock is left to its lease.
    # In every pool it may end with that before the second run takes it again.
    s.over(runs=2, lease=True, once=False)
    s.stage.wait_quiet()


# --- where no worker has a part -----------------------------------------------------------------------------------


@scenario("control.purge()", role="caller")
def _(s: Scene) -> None:
    app = s.stage.make_app(singlebeat_queued_ttl=2, task_default_queue="unread")
    sent = time.time()
    s.send("succeed", app=app)
    assert s.held()
    assert app.control.purge() == 1
    s.over(runs=0, at=sent, lease=True)
    app.close()


class Unsendable(BaseException):
    """No Exception, like a timeout of gevent."""


@scenario("message that cannot be sent", role="caller")
def _(s: Scene) -> None:
    url = s.stage.server.url
    app = s.stage.make_app(
        broker_url="redis+socket:///nowhere/at/all", task_publish_retry=False, singleton_backend_url=url
    )
    with pytest.raises((OperationalError, OSError, RedisError)):
        s.task("succeed", app).delay(s.name)
    assert not s.stage.locks()
    app.close()
    s.measured(0)


@scenario("sending interrupted by what is no Exception", role="caller")
def _(s: Scene) -> None:
    from celery.signals import before_task_publish

    # A receiver that raises is logged and passed over; what is no Exception ends the call.
    def interrupt(**_: Any) -> None:
        raise Unsendable

    with connected(before_task_publish, interrupt), pytest.raises(Unsendable):
        s.task("succeed").delay(s.name)
    assert not s.stage.locks()
    s.measured(0)


def _beside(s: Scene, act: Callable[[Any], Any], *, eager: bool = False, base: Mapping[str, Any] | None = None) -> None:
    """Check that a call in this process runs each time beside an equal one in the queue, and leaves its lock alone."""
    queued = s.send("succeed", queue=s.queue)
    before = s.redis.hgetall(s.keys[0])
    app = s.stage.make_app(task_always_eager=eager)
    ran: list[str] = []
    task = s.task("succeed", app)
    task.run = lambda name: ran.append(name) or base["end"](task) if base else ran.append(name)
    for _ in range(2):
        act(task)
    assert ran == [s.name] * len(ran)
    assert len(ran) >= 2
    assert s.redis.hgetall(s.keys[0]) == before, f"the lock of {queued.id} was touched"
    assert s.stage.locks() == set(s.keys)
    app.close()
    s.measured(0)


@scenario("eager: success", role="caller")
def _(s: Scene) -> None:
    _beside(s, lambda task: task.delay(s.name), eager=True)


def _raise(exc: BaseException) -> None:
    raise exc


@scenario("eager: exception", role="caller")
def _(s: Scene) -> None:
    _beside(s, lambda task: task.delay(s.name), eager=True, base={"end": lambda _: _raise(RuntimeError())})


@scenario("eager: retry", role="caller")
def _(s: Scene) -> None:
    def retry_once(task: Any) -> None:
        if not task.request.retries:
            raise task.retry(countdown=0)

    _beside(s, lambda task: task.delay(s.name), eager=True, base={"end": retry_once})


@scenario("eager: Reject", role="caller")
def _(s: Scene) -> None:
    _beside(s, lambda task: task.delay(s.name), eager=True, base={"end": lambda _: _raise(Reject("no"))})


@scenario("eager: Ignore", role="caller")
def _(s: Scene) -> None:
    _beside(s, lambda task: task.delay(s.name), eager=True, base={"end": lambda _: _raise(Ignore("no"))})


@scenario("apply()", role="caller")
def _(s: Scene) -> None:
    _beside(s, lambda task: task.apply((s.name,)))


@scenario("called directly", role="caller")
def _(s: Scene) -> None:
    _beside(s, lambda task: task(s.name))


# --- how they are played ------------------------------------------------------------------------------------------

ROWS = list(SCENARIOS)


def _cells(*, alone: bool) -> list[Any]:
    return [
        # What stands before a colon keeps tests in one process: see tests/conftest.py.
        pytest.param(column, title, id=f"{title}, {column}" if alone else f"{column}: {title.replace(': ', ', ')}")
        for column in COLUMNS
        for title, row in SCENARIOS.items()
        if column != CALLER and not row.reason(column) and row.is_alone(column) == alone
    ]


def _report(request: pytest.FixtureRequest, scene: Scene, *, text: str) -> None:
    title = request.node.callspec.params["title"]
    row, column = SCENARIOS[title], scene.config
    cell = {"row": title, "column": str(column), "text": text, "lease": scene.by_lease, "lapsed": scene.lapsed}
    cell["order"] = [ROWS.index(title), COLUMNS.index(column)]
    cell["absent"] = {str(c): reason for c in COLUMNS if (reason := row.reason(c)) not in {"", "-"}}
    request.node.user_properties.append((CELL, cell))


def _played(request: pytest.FixtureRequest, scene: Scene, play: Callable[[], None]) -> None:
    """Play a scene, report its cell, and show what its workers said about it if it fails."""
    try:
        play()
    except BaseException:
        _report(request, scene, text="FAILS")
        for worker in scene.stage.workers:
            about = [line for line in worker.text.splitlines() if any(task_id in line for task_id in scene.ids)]
            log = worker.tail(80) if len(scene.stage.workers) > 1 or scene.worker is None else "\n".join(about)
            request.node.add_report_section("call", f"log of worker {worker.pid}", log)
        raise
    _report(request, scene, text=scene.text)


class Show:
    """A worker that serves all scenarios of a column at once."""

    def __init__(self, column: Config, titles: list[str], directory: Path) -> None:
        self.stage = Stage(column, directory)
        try:
            worker = self.stage.worker(concurrency=10)
        except BaseException:
            self.stage.close()
            raise
        self.scenes = {title: Scene(self.stage, f"{title}, {column}", worker) for title in titles}
        self._threads = ThreadPoolExecutor(len(titles) or 1)
        self.futures: dict[str, Future[None]] = {
            title: self._threads.submit(SCENARIOS[title].shared, scene) for title, scene in self.scenes.items()
        }

    def settle(self) -> None:
        """Return when all scenes are over and no message is left that could start one again."""
        for future in self.futures.values():
            future.exception()
        if all(future.exception() is None for future in self.futures.values()):
            self.stage.wait_quiet(but=[task_id for scene in self.scenes.values() for task_id in scene.kept])

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.stage.close()


@pytest.fixture(scope="module")
def show(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Config], Show]]:
    """Returns the show of a column, with the scenarios that were selected; there is one at a time."""
    running: list[Show] = []

    def of(column: Config) -> Show:
        if not running or running[0].stage.config != column:
            while running:
                running.pop().close()
            titles = [
                item.callspec.params["title"]
                for item in request.session.items
                if item.location[2].startswith(f"{test_the_lock_is_free_when_and_only_when_the_task_is_over.__name__}[")
                and item.callspec.params["column"] == column
            ]
            running.append(Show(column, titles, tmp_path_factory.mktemp("ends")))
        return running[0]

    yield of
    while running:
        running.pop().close()


@pytest.mark.parametrize(("column", "title"), _cells(alone=False))
def test_the_lock_is_free_when_and_only_when_the_task_is_over(column, title, show, request):
    scenes = show(column)

    def play() -> None:
        scenes.futures[title].result()
        scenes.settle()
        scenes.scenes[title].check()

    _played(request, scenes.scenes[title], play)


@pytest.mark.parametrize(("column", "title"), _cells(alone=True))
def test_the_lock_is_free_exactly_when_the_task_of_a_hurt_worker_is_over(column, title, request, tmp_path):
    with Stage(column, tmp_path, SCENARIOS[title].conf) as stage:
        scene = Scene(stage, f"{title}, {column}")

        def play() -> None:
            SCENARIOS[title].alone(scene)
            scene.check()

        _played(request, scene, play)


@pytest.mark.parametrize(
    "title", [pytest.param(title, id=title.replace(": ", ", ")) for title, row in SCENARIOS.items() if row.caller]
)
def test_a_call_leaves_no_lock_behind_at_its_caller(title, request, tmp_path):
    with Stage(CALLER, tmp_path) as stage:
        scene = Scene(stage, title)
        _played(request, scene, lambda: SCENARIOS[title].caller(scene))
