"""Equal runs that exclude one another by asking the workers: no lock is kept anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from celery.schedules import schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from singlebeat.errors import LockBackendError
from singlebeat.locks import backend_of, inspect
from singlebeat.locks.base import Call, Ref, Renewal, Verdict
from singlebeat.locks.inspect import InspectBackend
from tests.support import APP, ROOT, CeleryProcess, RedisServer, free_port, wait_until
from tests.system.apps import make_app, plain

SINGLE = f"{APP}.single"
#: Patient, because a slow machine answers late, and then a call runs twice.
INSPECT = {
    "singleton_backend_class": "singlebeat.locks.inspect:InspectBackend",
    "singleton_backend_kwargs": {"timeout": 2, "settle": 0.5},
    "worker_prefetch_multiplier": 1,
}


@pytest.fixture
def sender(server: RedisServer, redis) -> Iterator[Celery]:
    with make_app(server.celery_url, INSPECT) as app:
        yield app


def skipped(workers: Sequence[CeleryProcess], name: str) -> int:
    return sum(len(worker.matches(rf"{name}\[.* is skipped .*its lock is held by task")) for worker in workers)


@pytest.mark.parametrize("pools", [("prefork", "threads"), ("gevent", "gevent"), ("eventlet", "eventlet")])
def test_of_equal_calls_that_start_at_once_on_two_workers_one_runs(celery, sender, oracle, redis, pools):
    workers = [celery("worker", "-c", "3", "-P", pool, conf=INSPECT) for pool in pools]
    for worker in workers:
        worker.ready()
    single = sender.tasks[SINGLE]

    calls = [single.delay("one", seconds=60) for _ in range(5)]
    other = single.delay("two", seconds=60)

    assert not any(call.is_duplicate for call in calls), "every call is sent"
    oracle.wait_started(1, "one")
    oracle.wait_started(1, "two")
    wait_until(lambda: skipped(workers, SINGLE) == 4, timeout=60, what="the other four to be skipped")
    assert len(oracle.running("one")) == len(oracle.running("two")) == 1, "different calls run at once"
    assert oracle.started("one") == 1

    lock = single.generate_lock(SINGLE, ["one"], {"seconds": 60})
    runner = oracle.running("one")[0].id
    seen = dict(backend_of(sender).locks("SINGLETONLOCK_"))
    assert {record["id"] for record in seen.values()} == {runner, other.id}
    assert seen[lock] == {"id": runner, "state": "running", "task": SINGLE, "args": "'one', seconds=60"}

    oracle.let_go("one")
    assert sender.AsyncResult(runner).get(timeout=60) == "one"
    assert single.delay("one").get(timeout=60) == "one"
    assert oracle.max_concurrent("one") == 1
    assert oracle.started("one") == 2
    oracle.let_go("two")
    assert not redis.keys("SINGLETONLOCK_*")
    assert not redis.keys("singlebeat:*")


def test_a_waiting_call_and_a_retry_run_after_the_run_before_them(celery, sender, oracle):
    celery("worker", "-c", "3", "-P", "threads", conf=INSPECT).ready()
    retrying = sender.tasks[f"{APP}.single_retrying"]

    first = retrying.delay("one", 2, seconds=60)
    oracle.wait_started(1, "one")
    second = retrying.apply_async(("one", 2), {"seconds": 60}, link=sender.tasks[f"{APP}.plain"].si("linked"))
    oracle.let_go("one", count=4)

    assert first.get(timeout=60) == "one"
    assert second.get(timeout=60) == "one"
    oracle.wait_ended(1, "linked")
    # Each runs again until one of its runs is a second one.
    assert oracle.started("one") == 4
    assert oracle.max_concurrent("one") == 1


def test_a_task_that_beat_sends_again_and_again_runs_one_at_a_time(celery, oracle, redis):
    entry = {"task": SINGLE, "schedule": schedule(1), "args": ["one"], "kwargs": {"seconds": 60}}
    worker = celery("worker", "-c", "3", "-P", "threads", conf=INSPECT).ready()
    celery("beat", conf={**INSPECT, "beat_schedule": {"one": entry}})

    oracle.wait_started(1, "one")
    wait_until(lambda: skipped([worker], SINGLE) >= 2, timeout=60, what="two occurrences to be skipped")

    assert oracle.started("one") == 1
    decisions = {record["decision"] for _, record in redis.xrange("redbeat::history")}
    assert decisions == {"dispatched"}
    assert not redis.keys("SINGLETONLOCK_*")


# ---------------------------------------------------------------- without Redis

OFFLINE = """
import json, sys, threading
from celery import Celery
from celery.contrib.testing.worker import start_worker
from singlebeat import Singleton
from singlebeat.signals import duplicate

app = Celery("offline", broker="memory://")
app.conf.update(
    broker_transport_options={"polling_interval": 0.02},
    singleton_backend_class="singlebeat.locks.inspect:InspectBackend",
    singleton_backend_kwargs={"timeout": 2},
)
started, skipped, end, holders = threading.Event(), threading.Event(), threading.Event(), []

@app.task(base=Singleton)
def alone():
    started.set()
    end.wait(60)

@duplicate.connect(weak=False)
def note(task_id, **_):
    holders.append(task_id)
    skipped.set()

with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
    first = alone.delay()
    assert started.wait(60)
    second = alone.delay()
    assert skipped.wait(60)
    end.set()
print(json.dumps([holders == [first.id], second.is_duplicate, sorted({"redis", "redbeat"} & set(sys.modules))]))
"""


def test_nothing_of_redis_is_imported_where_the_broker_is_another(tmp_path: Path):
    (tmp_path / "offline.py").write_text(OFFLINE)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    said = subprocess.check_output([sys.executable, "offline.py"], cwd=tmp_path, env=env, timeout=100)

    assert json.loads(said.splitlines()[-1]) == [True, False, []]


# ---------------------------------------------------------------- who goes on

KEY = "the key"
REF = Ref(KEY, "b", nonce="n1")
LONG_AGO, LATER = 1_000_000_000.0, 4_000_000_000.0


class Asked(InspectBackend):
    """Knows what the workers answer, one time after the other, and the last one again and again."""

    def __init__(self, *answers: list[Mapping[str, Any]]) -> None:
        app = Celery(set_as_current=False)
        super().__init__(app, timeout=0.01, settle=0)
        self.answers, self.asked = answers, 0
        task = app.task(plain, name="task", shared=False)
        task.generate_lock = lambda name, args, kwargs: {KEY: KEY, "another": "another"}[args[0]]

    def _ask(self) -> list[Mapping[str, Any]]:
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


def run(task_id: str, start: float | None, *, key: Any = KEY, node: str = "", pid: int = os.getpid()) -> dict[str, Any]:
    where = {"hostname": node, "worker_pid": pid}
    return {"id": task_id, "type": "task", "args": [key], "kwargs": {}, "time_start": start, **where}


def begin(*answers: list[Mapping[str, Any]], ref: Ref = REF) -> tuple[Verdict, str, int]:
    """Return the verdict on a start, who holds it, and how often was asked."""
    backend = Asked(*answers)
    holder = backend.begin(ref, lease=30, remember_for=1, task="task", arguments="")
    return holder.verdict, holder.task_id, backend.asked


OWN = run("b", LONG_AGO + 5)
#: The same message in another process, and a call like ours.
COPY, EQUAL = run("b", LONG_AGO + 2, pid=1, node="w2"), run("c", LONG_AGO + 3, node="w2")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([[]], (Verdict.STARTED, "b", 1), id="nobody answers"),
        pytest.param([[OWN]], (Verdict.STARTED, "b", 1), id="nobody else runs"),
        pytest.param([[OWN, run("c", LONG_AGO + 9)]], (Verdict.STARTED, "b", 1), id="the other is later"),
        pytest.param([[OWN, run("c", None)]], (Verdict.STARTED, "b", 1), id="the other has not started"),
        pytest.param([[OWN, run("c", 1.0, key="another")]], (Verdict.STARTED, "b", 1), id="the other is different"),
        pytest.param([[OWN, run("c", 1.0, key="has none")]], (Verdict.STARTED, "b", 1), id="the other has no key"),
        pytest.param([[OWN, {**EQUAL, "type": "unknown"}]], (Verdict.STARTED, "b", 1), id="another task"),
        pytest.param([[OWN, EQUAL]], (Verdict.HELD, "c", 2), id="the other is earlier"),
        pytest.param([[OWN, EQUAL, run("d", LONG_AGO)]], (Verdict.HELD, "d", 2), id="the earliest is named"),
        pytest.param([[OWN, run("a", OWN["time_start"])]], (Verdict.HELD, "a", 2), id="at once, the lesser id first"),
        pytest.param([[OWN, run("c", OWN["time_start"])]], (Verdict.STARTED, "b", 1), id="at once, ours first"),
        pytest.param([[OWN, EQUAL], [OWN]], (Verdict.STARTED, "b", 2), id="the earlier one has ended meanwhile"),
        pytest.param([[EQUAL], [EQUAL, OWN]], (Verdict.HELD, "c", 2), id="our worker is late to note our start"),
        pytest.param([[EQUAL], [OWN]], (Verdict.STARTED, "b", 2), id="late, and the other has ended"),
        pytest.param([[EQUAL]], (Verdict.STARTED, "b", 2), id="our worker never answers"),
        pytest.param([[OWN, COPY]], (Verdict.COPY, "b", 2), id="our message runs elsewhere"),
        pytest.param([[OWN, run("b", LONG_AGO)]], (Verdict.COPY, "b", 2), id="our message runs in this process"),
        pytest.param([[OWN, run("b", LATER)]], (Verdict.STARTED, "b", 1), id="a copy came to this process later"),
        pytest.param([[OWN, run("b", LATER, pid=1)]], (Verdict.STARTED, "b", 1), id="a copy came elsewhere later"),
    ],
)
def test_the_equal_run_that_started_first_goes_on(answers, expected):
    assert begin(*answers) == expected


def test_a_retry_waits_its_turn_behind_the_end_of_the_run_that_has_sent_it():
    retry = Ref(KEY, "b", 1, "n2")

    assert begin([OWN, COPY], ref=retry) == (Verdict.HELD, "b", 2)


@settings(max_examples=40, deadline=None)
@given(starts=st.lists(st.sampled_from([LONG_AGO, LONG_AGO + 1]), min_size=1, max_size=6), same=st.integers(0, 6))
def test_exactly_one_of_equal_runs_goes_on_under_any_clocks(starts, same):
    # Those up to ``same`` are deliveries of one message.
    rows = [run("b" if i < same else f"id {i}", start, node=f"w{i}", pid=i) for i, start in enumerate(starts)]

    verdicts = []
    for own, row in enumerate(rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inspect.os, "getpid", lambda own=own: own)
            patch.setattr(inspect, "current_task", SimpleNamespace(request=SimpleNamespace(hostname=f"w{own}")))
            verdicts.append(begin(rows, ref=Ref(KEY, row["id"], nonce=str(own)))[0])

    assert verdicts.count(Verdict.STARTED) == 1


def test_a_copy_of_our_message_is_found_under_any_key():
    own_key = Ref(f"{KEY}:b", "b", nonce="n1")

    assert begin([OWN, EQUAL], ref=own_key) == (Verdict.STARTED, "b", 1)
    assert begin([OWN, COPY], ref=own_key) == (Verdict.COPY, "b", 2)


def test_it_keeps_nothing_and_frees_nothing():
    backend = Asked([OWN, EQUAL, {**EQUAL, "type": "unknown"}])
    call = Call(REF, "task", "", 60.0)

    assert [h.verdict for h in backend.acquire_many([call, call])] == [Verdict.ACQUIRED] * 2
    assert backend.lock(KEY, "anybody")
    assert backend.renew_many([REF, REF], lease=30) == [Renewal.RUNNING] * 2
    backend.finish_many([REF, REF], remember_for=1)
    assert backend.promise(REF, to=None, ttl=1)
    assert backend.rotate(REF, to=REF, ttl=1, remember_for=1)
    backend.announce("here", ttl=60)
    assert not backend.workers_seen()
    backend.unlock(KEY)
    backend.clear("")
    assert backend.get(KEY) == "c"
    assert backend.get("another") is None
    assert [(key, record["id"]) for key, record in backend.locks("the")] == [(KEY, "c")]


def test_an_unreachable_broker_is_an_error_and_not_a_hang():
    app = make_app(f"redis://127.0.0.1:{free_port()}", {**INSPECT, "singleton_backend_kwargs": {"timeout": 0.5}})

    with pytest.raises(LockBackendError, match=r"^the workers cannot be asked what they run: "):
        backend_of(app).begin(REF, lease=30, remember_for=1, task=SINGLE, arguments="")


def test_a_soft_time_limit_amid_the_question_is_no_error_of_the_broker(sender, monkeypatch):
    """It fires once: the run would go on without its limit, and without its lock."""

    def interrupted(*args: object, **options: object) -> None:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(sender.control, "inspect", interrupted)
    backend = InspectBackend(sender, timeout=0.1, settle=0.0)
    with pytest.raises(SoftTimeLimitExceeded):
        list(backend.locks(""))
