"""Signals of what happens, the metrics made of them, and their names."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest
import yaml
from celery.schedules import schedule
from prometheus_client.parser import text_string_to_metric_families

from singlebeat import Entry, signals
from singlebeat.beat import metrics as metrics_of_beat
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import Lease, Term
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.beat.status import ScheduleStatus
from singlebeat.beat.store.claims import Store
from singlebeat.cli import COMMANDS
from singlebeat.config import Config
from singlebeat.events import EVENTS
from singlebeat.exposition import BUILD, Answer, serve
from singlebeat.locks.base import HEADER, RUN_HEADER, Ref
from singlebeat.overlap import Overlap
from singlebeat.run_results import OUTCOMES
from singlebeat.tasks import metrics as metrics_of_worker
from singlebeat.tasks.metrics import WorkerMetrics
from singlebeat.tasks.renewer import Renewer
from tests.support import APP, ROOT, RedisServer, connected, ended_well, fork, free_port, wait_until
from tests.system.apps import make_app

TASK = f"{APP}.plain"


@pytest.fixture
def metrics(app, server, redis) -> Iterator[BeatMetrics]:
    lease = Lease(server.client, Keys.of(app).lease, ttl=30)
    yield BeatMetrics(app, lease)
    lease.release()


def families(text: str) -> dict[str, object]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, sample: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{sample} ")]
    return float(line.rpartition(" ")[2])


def decide(app, redis, outcome: DecisionType) -> None:
    occurrence = Occurrence.of("redbeat:", "e", datetime.now(UTC))
    Store(app, redis).record([Decision("e", TASK, occurrence, outcome)], Term(1, ""))


@pytest.fixture
def of_worker(app) -> WorkerMetrics:
    return WorkerMetrics(app, Renewer(app))


@pytest.fixture(params=["beat", "worker"])
def either(request) -> str:
    """What a beat or a worker says that has just begun."""
    return (
        request.getfixturevalue({"beat": "metrics", "worker": "of_worker"}[request.param])
        .answer("/metrics")[2]
        .decode()
    )


def test_names_follow_the_conventions_of_prometheus(either):
    found = families(either)

    assert len(found) >= 7
    for name, family in found.items():
        assert re.fullmatch(r"singlebeat_[a-z]+(_[a-z]+)*", name)
        assert family.documentation.endswith(".")
        assert family.type != "counter" or all(s.name.endswith(("_total", "_created")) for s in family.samples)
        assert family.type != "gauge" or not name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert family.type != "histogram" or name.endswith("_seconds")
        for sample in family.samples:
            assert not {"entry", "task", "id", "reason"} & sample.labels.keys(), "labels without bound"
        assert not re.search(r"_(ms|milliseconds|minutes|s|secs)$", name), "base units only"


@pytest.mark.parametrize("table", [metrics_of_beat.METRICS, metrics_of_worker.METRICS], ids=["beat", "worker"])
def test_exactly_the_metrics_of_the_table_are_served(table, metrics, of_worker):
    """With their types, and with the labels and words of the table from the start."""
    source = metrics if table is metrics_of_beat.METRICS else of_worker
    served: dict[str, tuple[str, str, set[tuple[str, ...]]]] = {}
    for family in families(source.answer("/metrics")[2].decode()).values():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        words = {
            tuple(value for label, value in s.labels.items() if label not in {"le", "version"}) for s in family.samples
        }
        if not name.endswith("_created"):  # the library adds them
            served[name] = family.type, family.documentation, words

    told = {
        each.name: (each.type, each.meaning, {tuple(map(str, words)) for words in product(*each.labels.values())})
        for each in table.values()
    }
    assert served == told | {BUILD.name: (BUILD.type, BUILD.meaning, {()})}


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules of the docs."""
    (group,) = yaml.safe_load((ROOT / "docs/deploy/alerts.yml").read_text("utf-8"))["groups"]
    return group["rules"]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_wrong_and_what_to_do(rule):
    """By names that are there: events of the log, decisions, outcomes, commands, settings and policies."""
    told = rule["annotations"]
    names = {*EVENTS, *OUTCOMES, *DecisionType, *COMMANDS, *Overlap, *EntryPolicy.names()}
    names |= {field.name for field in fields(Config)} | {each["alert"] for each in alerts()}

    assert told.keys() == {"summary", "action"}
    assert all(re.fullmatch(r"[A-Z`].*\.", text) for text in told.values())
    named = {words.split()[0] for words in re.findall(r"`([^`]+)`", told["action"])}
    assert named - names - {"visibility_timeout", "lock_expiry"} == set()


def test_every_alert_rule_is_about_series_that_are_there_from_the_start(metrics, of_worker):
    """An ``increase`` over a counter that is born with its first event does not see that event."""
    samples = [
        sample
        for metrics in (metrics, of_worker)
        for family in text_string_to_metric_families(metrics.answer("/metrics")[2].decode())
        for sample in family.samples
    ]
    for name, expr in ((rule["alert"], rule["expr"]) for rule in alerts()):
        found = re.findall(r"(singlebeat_\w+)(?:\{(\w+)=~?\"([^\"]+)\"\})?", expr)
        assert found, name
        for metric, label, words in found:
            for word in words.split("|"):
                series = [s for s in samples if s.name == metric and (not label or s.labels[label] == word)]
                assert series, f"alert {name}: there is no {metric} with {label}={word}"


def test_ends_of_runs_and_the_delay_of_their_starts_are_counted(app, of_worker):
    began = time.time()

    def end(outcome: str, *, retries: int = 0, **header: str) -> None:
        nominal = datetime.fromtimestamp(began - 4, UTC).isoformat()
        headers = {RUN_HEADER: {"nominal": nominal, "kind": "scheduled", **header}, "retries": retries}
        signals.run_ended.send(sender=app, outcome=outcome, began=began, headers=headers)

    end("success")
    end("failure", kind="catch_up")
    end("success", kind="manual")
    end("duplicate_refused")
    end("postponed")
    end("success", retries=1)
    end("success", nominal="nonsense")
    signals.run_ended.send(sender=app, outcome="expired", began=None, headers={HEADER: {}})
    signals.run_ended.send(sender=None, outcome="success", began=None, headers={})  # of another app

    text = of_worker.answer("/metrics")[2].decode()
    assert value(text, 'singlebeat_runs_total{outcome="success"}') == 4
    assert value(text, 'singlebeat_runs_total{outcome="expired"}') == 1
    assert value(text, "singlebeat_start_delay_seconds_count") == 2
    assert value(text, "singlebeat_start_delay_seconds_sum") == pytest.approx(8, abs=0.1)


def test_two_workers_in_one_process_count_both(app, of_worker):
    other = WorkerMetrics(app, Renewer(app))

    signals.lock_lost.send(sender="t", ref=Ref("key", "x"))
    signals.run_ended.send(sender=app, outcome="success", began=None, headers={})

    for each in (of_worker, other):
        text = each.answer("/metrics")[2].decode()
        assert value(text, "singlebeat_locks_lost_total") == 1
        assert value(text, 'singlebeat_runs_total{outcome="success"}') == 1


def test_a_call_that_is_not_sent_is_counted_where_it_was_made(app, of_worker):
    single = app.tasks[f"{APP}.single"]
    single.delay("one")
    single.delay("one")
    signals.duplicate.send(sender=single, task_id="x", args=(), kwargs={}, at="start")
    signals.lock_lost.send(sender=single.name, ref=Ref("key", "x"))

    text = of_worker.answer("/metrics")[2].decode()
    assert value(text, "singlebeat_duplicates_total") == 1
    assert value(text, "singlebeat_locks_lost_total") == 1
    assert of_worker.answer("/else")[0] == 404


def test_a_child_that_was_forked_amid_a_count_does_not_wait_for_its_end(app, of_worker):
    held, done = threading.Event(), threading.Event()

    def count() -> None:
        with of_worker._duplicates._value._lock, of_worker._lost._value._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=count)
    thread.start()
    held.wait(60)

    def child() -> None:
        signals.duplicate.send(sender=None, task_id="x", args=(), kwargs={}, at="send")
        signals.lock_lost.send(sender="name", ref=Ref("key", "x"))

    assert ended_well(fork(child))
    done.set()
    thread.join()


def test_decisions_are_counted(app, redis, metrics):
    for outcome in (DecisionType.DISPATCHED, DecisionType.MISSED, DecisionType.MISSED):
        decide(app, redis, outcome)

    text = metrics.answer("/metrics")[2].decode()

    assert value(text, 'singlebeat_decisions_total{decision="dispatched",kind="scheduled"}') == 1
    assert value(text, 'singlebeat_decisions_total{decision="missed",kind="scheduled"}') == 2
    assert value(text, "singlebeat_lateness_seconds_count") == 1


def test_a_receiver_that_raises_harms_no_decision(app, redis, metrics):
    def bad(**_: object) -> None:
        raise RuntimeError("hands off")

    Entry("e", TASK, schedule(3600), app=app).save()
    with connected(signals.occurrence_decided, bad):
        decide(app, redis, DecisionType.PAUSED)

    text = metrics.answer("/metrics")[2].decode()
    assert value(text, 'singlebeat_decisions_total{decision="paused",kind="scheduled"}') == 1
    assert redis.xlen("redbeat::history") == 1


def test_an_unreachable_server_is_a_metric_and_not_ready():
    with make_app(f"redis://127.0.0.1:{free_port()}/0", {"singlebeat_socket_timeout": 0.2}) as app:
        metrics = BeatMetrics(app, Lease(lambda: None, Keys.of(app).lease, ttl=30))

        text = metrics.answer("/metrics")[2].decode()

        assert value(text, "singlebeat_redis_up") == 0
        assert value(text, "singlebeat_leader") == 0
        assert metrics.answer("/readyz")[0] == 503
        assert metrics.answer("/healthz")[0] == 200
        metrics.last_progress -= 100
        assert metrics.answer("/healthz")[0] == 503
        assert metrics.answer("/else")[0] == 404


def test_a_server_that_refuses_writes_is_a_metric(metrics, redis):
    def scraped() -> list[float]:
        text = metrics.answer("/metrics")[2].decode()
        return [value(text, f"singlebeat_redis_{name}") for name in ("up", "refuses")]

    assert scraped() == [1, 0]
    redis.config_set("maxmemory", "1")
    try:
        assert scraped() == [1, 1]
    finally:
        redis.config_set("maxmemory", "0")


def test_a_schedule_that_the_server_has_lost_is_a_metric(metrics, redis):
    assert value(metrics.answer("/metrics")[2].decode(), "singlebeat_schedule_lost") == 0
    redis.set("redbeat::lost", "2026-11-23T20:41:53+00:00 it is gone")
    assert value(metrics.answer("/metrics")[2].decode(), "singlebeat_schedule_lost") == 1


def test_a_tick_that_makes_progress_is_healthy_however_long_it_takes(server, redis, bench_on):
    """A liveness probe that fails would end this beat, and the next one would begin the same tick."""
    answers = list[int]()

    class Slow(schedule):
        def is_due(self, last_run_at: datetime) -> Any:
            answers.append(scheduler._metrics.answer("/healthz")[0])
            scheduler._metrics.last_progress -= 100  # as if this question took so long
            return True, 60.0

    bench = bench_on(server, beat_schedule={"e": {"task": TASK, "schedule": Slow(60)}})
    scheduler = bench.scheduler(app=bench.app)
    scheduler._metrics = BeatMetrics(bench.app, scheduler.lease)
    scheduler.tick()
    bench.make_due()
    scheduler.tick()

    assert len(answers) > 1
    assert set(answers) == {200}


@pytest.mark.parametrize("path", ["/readyz", "/metrics"])
def test_a_server_that_hangs_keeps_no_probe_waiting_for_its_retries(own_server, path):
    """With them the answer took 15 seconds: longer than probes and Prometheus wait."""
    with make_app(own_server.celery_url) as app:
        metrics = BeatMetrics(app, Lease(lambda: None, Keys.of(app).lease, ttl=30))
        own_server.pause()
        began = time.monotonic()

        answer = metrics.answer(path)

        assert time.monotonic() - began < 10
        assert answer.code == 503 or value(answer.body.decode(), "singlebeat_redis_up") == 0
        own_server.resume()
        assert metrics.answer("/readyz").body == b"no beat leads\n"


def test_a_probe_is_connected_as_long_as_beat_is(own_server):
    """As where all sentinels are away: connections that are open stay."""
    conf = {"singlebeat_metrics_port": free_port(), "singlebeat_metrics_host": "127.0.0.1"}
    with make_app(own_server.celery_url, conf) as app:
        metrics = BeatMetrics.served(app, Lease(lambda: None, Keys.of(app).lease, ttl=30))
        own_server.client().config_set("requirepass", "new")
        try:
            assert value(metrics.answer("/metrics")[2].decode(), "singlebeat_redis_up") == 1
            assert metrics.answer("/readyz").body == b"no beat leads\n"
        finally:
            metrics.server.shutdown()
            metrics.server.server_close()


def test_a_scrape_counts_a_quarantine_and_reads_no_record_of_it(app, redis):
    redis.hset("redbeat::quarantine", mapping={f"redbeat:e{at}": "{}" for at in range(3)})

    assert (ScheduleStatus.of(app, names=False).quarantined, ScheduleStatus.of(app, names=False).quarantine) == (3, {})
    assert (ScheduleStatus.of(app).quarantined, len(ScheduleStatus.of(app).quarantine)) == (3, 3)


def test_beat_serves_its_metrics_on_this_host(celery, app, redis):
    port = free_port()
    Entry("e", TASK, schedule(3600), args=["x"], run_on_start=True, app=app).save()
    redis.hset("redbeat:bad", "definition", "{")
    redis.zadd("redbeat::schedule", {"redbeat:bad": 0})
    conf = {"singlebeat_metrics_port": port, "singlebeat_allowed_tasks": [f"{APP}.*"]}
    Entry("evil", "os.system", schedule(3600), run_on_start=True, app=app).save()
    beat = celery("beat", "-S", "singlebeat.Scheduler", conf=conf)
    beat.wait_for("this beat leads")

    def get(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
                return reply.read().decode()
        except OSError:
            return ""

    text: Callable[[], str] = lambda: get("/metrics")  # noqa: E731
    wait_until(lambda: 'decision="dispatched",kind="scheduled"} 1.0' in text() and "quarantines_total 2.0" in text())
    assert value(text(), "singlebeat_leader") == 1
    assert value(text(), "singlebeat_term") == 1
    assert value(text(), "singlebeat_quarantined_entries") == 2
    assert value(text(), "singlebeat_tick_duration_seconds_count") >= 1
    assert (get("/healthz"), get("/readyz")) == ("ok\n", "ok\n")
    record = json.loads(redis.hget("redbeat::quarantine", "redbeat:evil"))
    assert record["reason"] == "its task os.system is not among singlebeat_allowed_tasks"
    assert redis.llen("celery") == 1


def test_a_port_that_is_in_use_does_not_keep_beat_from_leading(celery, redis):
    with RedisServer() as taken:
        beat = celery("beat", "-S", "singlebeat.Scheduler", conf={"singlebeat_metrics_port": taken.port})

        beat.wait_for("beat: Metrics are not served .*in use")
        beat.wait_for("this beat leads")


def test_a_scraper_that_hangs_up_leaves_no_traceback(metrics, capfd):
    """As a probe does whose time-out is over before the answer is there."""
    asked, answered = threading.Event(), threading.Event()

    def answer(path: str) -> Answer:
        if path == "/slow":
            asked.set()
            answered.wait(30)
        return Answer.of("x" * 10_000_000)

    server = serve("127.0.0.1", 0, answer)
    with socket.create_connection(server.server_address) as scraper:
        scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        scraper.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        assert asked.wait(30)
    answered.set()
    wait_until(lambda: not [each for each in threading.enumerate() if "process_request" in each.name], timeout=30)
    server.shutdown()
    server.server_close()

    assert capfd.readouterr().err == ""
