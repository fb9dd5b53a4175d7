"""The metrics of a worker about its runs and locks, in any of its processes."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import pytest
from celery.schedules import schedule

from singlebeat import Entry
from singlebeat.locks.base import HEADER, RUN_HEADER
from tests.support import APP, CeleryProcess, RedisServer, free_port, wait_until

#: Of the locks; short, because a lost one is noticed when it is to be renewed.
LEASE = 5


@pytest.fixture
def worker(celery) -> Callable[..., tuple[CeleryProcess, Callable[[str], float]]]:
    """Start a worker; return it, and what asks for one of its samples."""

    def start(*args: str, **conf: object) -> tuple[CeleryProcess, Callable[[str], float]]:
        port = free_port()
        started = celery("worker", *args, conf={"singlebeat_worker_metrics_port": port, **conf}).ready()

        def sample(name: str) -> float:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                    lines = reply.read().decode().splitlines()
            except OSError:
                return -1
            return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"singlebeat_{name} "))

        return started, sample

    return start


def ends(outcome: str) -> str:
    return f'runs_total{{outcome="{outcome}"}}'


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_runs_and_locks_are_counted_in_the_main_process(pool, worker, celery, app, oracle, redis):
    new = {"schedule": schedule(3600), "run_on_start": True, "app": app}
    Entry("good", f"{APP}.plain", args=["good"], **new).save()
    Entry("bad", f"{APP}.fail", args=["bad"], **new).save()
    _, sample = worker("-P", pool, "-c", "3", singlebeat_lock_lease=LEASE)
    celery("beat", "-S", "singlebeat.Scheduler")

    wait_until(lambda: sample(ends("success")) == sample(ends("failure")) == 1, timeout=30)
    assert sample("start_delay_seconds_count") == 2
    assert sample("locks_up") == 1

    # Without locks of their own, as another language sends them: the second one is refused at its start.
    app.send_task(f"{APP}.single", ["one", 60])
    oracle.wait_started(1, "one")
    app.send_task(f"{APP}.single", ["one", 60])
    wait_until(lambda: sample(ends("duplicate_refused")) == 1, timeout=30)
    assert sample('locks_held{state="running"}') == 1
    assert sample(ends("ignored")) == 0

    (lock,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    wait_until(lambda: redis.pttl(lock) <= LEASE * 1000 * 0.8)
    wait_until(lambda: redis.pttl(lock) > LEASE * 1000 * 0.8, what="a renewal: it is known now that it was held")
    redis.delete(lock)
    wait_until(lambda: sample("locks_lost_total") == 1, timeout=30)
    oracle.let_go("one")
    wait_until(lambda: sample(ends("success")) == 2, timeout=30)
    assert sample('locks_held{state="running"}') == 0
    assert sample("start_delay_seconds_count") == 2, "those were not beat's"


def test_a_run_that_a_time_limit_ends_is_counted_and_recorded_once(worker, celery, app, oracle, redis):
    options = {"time_limit": 1}
    Entry("e", f"{APP}.plain", schedule(3600), args=["e", 60], options=options, run_on_start=True, app=app).save()
    _, sample = worker("-c", "1")
    celery("beat", "-S", "singlebeat.Scheduler")
    wait_until(lambda: sample(ends("time_limit")) >= 1, timeout=30)

    # The next one ends after everything that is told about the first.
    app.send_task(f"{APP}.single", ["last"])
    wait_until(lambda: sample(ends("success")) == 1, timeout=30)

    assert sample(ends("time_limit")) == 1
    assert [record["outcome"] for _, record in redis.xrange("redbeat::runs")] == ["time_limit"]


def test_a_copy_that_waits_for_the_end_of_its_run_is_postponed_and_no_end(worker, celery, app, oracle, redis):
    Entry("e", f"{APP}.plain", schedule(3600), args=["e", 60], run_on_start=True, app=app).save()
    _, sample = worker("-P", "threads", "-c", "2", singlebeat_lock_lease=LEASE)
    celery("beat", "-S", "singlebeat.Scheduler")
    (run,) = oracle.wait_started(1, "e")
    (lock,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")

    headers = {HEADER: {"id": run.id, "key": lock}, RUN_HEADER: {"entry": "e"}}
    app.send_task(run.task, ["e", 60], task_id=run.id, headers=headers)
    wait_until(lambda: sample(ends("postponed")) >= 1, timeout=30)
    oracle.let_go("e")
    wait_until(lambda: sample(ends("duplicate_refused")) == 1, timeout=30, what="the copy to find that it has run")
    # The run frees its lock before it tells of its end.
    wait_until(lambda: sample(ends("success")) == 1, timeout=30)

    wait_until(lambda: redis.xlen("redbeat::runs") == 2)
    outcomes = sorted(record["outcome"] for _, record in redis.xrange("redbeat::runs"))
    assert outcomes == ["duplicate_refused", "success"]


def test_an_unreachable_lock_server_is_a_metric(worker, own_server):
    _, sample = worker("-P", "threads", "-c", "1", singleton_backend_url=own_server.url, singlebeat_lock_lease=LEASE)
    assert sample("locks_up") == 1

    own_server.kill()
    wait_until(lambda: sample("locks_up") == 0, timeout=30)

    own_server.restart()
    wait_until(lambda: sample("locks_up") == 1, timeout=30)


def test_a_port_that_is_in_use_does_not_keep_a_worker_from_its_work(celery, app):
    with RedisServer() as taken:
        worker = celery("worker", "-c", "1", conf={"singlebeat_worker_metrics_port": taken.port}).ready()

        assert len(worker.matches("ERROR.*Metrics are not served .*in use")) == 1
        assert app.tasks[f"{APP}.single"].delay("one").get(timeout=30) == "one"
