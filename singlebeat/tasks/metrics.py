"""Prometheus metrics of a worker's main process, from its signals and from the locks that it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from .. import signals
from ..config import Config
from ..exposition import DELAYS, Answer, Metric, metrics_of, new_registry, serve
from ..locks.base import RUN_HEADER
from ..log import Log
from ..run_results import DUPLICATE_REFUSED, OUTCOMES, REPLACED

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client.metrics_core import GaugeMetricFamily

    from ..locks.base import Headers
    from .renewer import Renewer

__all__ = ("METRICS", "WorkerMetrics")

log = Log(__name__)

#: Kinds of runs (``beat.entries.occurrence.Kind``) that should begin at their nominal time.
ON_TIME = {"scheduled", "catch_up"}


#: Every metric of a worker, by its name.
METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        Metric("singlebeat_runs_total", "counter", "Ends of runs.", {"outcome": OUTCOMES}),
        Metric(
            "singlebeat_start_delay_seconds",
            "histogram",
            "Time from the nominal time of a run that beat has sent to its start, observed at its end; not of retries, "
            "manual runs and backfills.",
            buckets=DELAYS,
        ),
        Metric(
            "singlebeat_duplicates_total",
            "counter",
            "Duplicate calls by the tasks of this process, which were not sent; only of pools without child processes "
            "(threads, gevent and others).",
        ),
        Metric(
            "singlebeat_locks_lost_total",
            "counter",
            "Locks that have ended, or that another call got, while their task ran.",
        ),
        Metric(
            "singlebeat_locks_held",
            "gauge",
            "Messages of this worker that have a lock, which this worker renews.",
            {"state": ("queued", "running")},
        ),
        Metric(
            "singlebeat_locks_up",
            "gauge",
            "1: the locks' server answered the last renewal, which is a third of a lease ago at most. 0: it did not.",
        ),
    )
}


class WorkerMetrics:
    """The metrics of one worker; needs ``prometheus_client``.

    Args:
        renewer: renewer of the worker.
    """

    def __init__(self, app: Celery, renewer: Renewer) -> None:
        self.renewer, self._pid = renewer, os.getpid()
        self._host = Config.of(app).singlebeat_metrics_host
        self.registry = registry = new_registry()
        made = {name: metric.made(registry) for name, metric in METRICS.items() if metric.type != "gauge"}
        self._runs = made["singlebeat_runs_total"]
        self._delays = made["singlebeat_start_delay_seconds"]
        self._duplicates = made["singlebeat_duplicates_total"]
        self._lost = made["singlebeat_locks_lost_total"]
        registry.register(self)
        # Signals keep weak references to methods: this object must live as long as its worker.
        # Without a dispatch_uid, Celery before 5.7 takes the same method of two objects for one receiver.
        signals.run_ended.connect(self._run_ended, sender=app, dispatch_uid=id(self))
        signals.duplicate.connect(self._duplicate, dispatch_uid=id(self))
        signals.lock_lost.connect(self._lock_lost, dispatch_uid=id(self))

    def serve(self, port: int) -> None:
        """Serve ``/metrics`` in a thread; if the port is in use, only log an error."""
        try:
            serve(self._host, port, self.answer)
        except OSError as exc:  # the worker goes on: its runs matter more than its metrics
            log.error("Metrics are not served", event="metrics_not_served", reason=exc)  # noqa: TRY400 - the reason is enough

    def answer(self, path: str) -> Answer:
        """Return the answer to a request for a path."""
        return metrics_of(self.registry) if path == "/metrics" else Answer.of("/metrics", 404)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the current gauges of the worker's locks."""
        yield METRICS["singlebeat_locks_held"].gauge(self.renewer.held())
        yield METRICS["singlebeat_locks_up"].gauge(not self.renewer.failing)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield nothing, so that the registry does not check the names of the gauges."""
        return iter(())

    def _run_ended(
        self, outcome: str = "", began: float | None = None, headers: Headers | None = None, **_: object
    ) -> None:
        self._runs.labels(outcome).inc()
        header = (headers or {}).get(RUN_HEADER)
        # A retry is not late: its start was planned for then.
        if began is None or not isinstance(header, Mapping) or (headers or {}).get("retries"):
            return
        if outcome in {DUPLICATE_REFUSED, REPLACED, "postponed"} or header.get("kind") not in ON_TIME:
            return
        with suppress(KeyError, ValueError):  # any program may have sent the message
            self._delays.observe(max(0.0, began - datetime.fromisoformat(str(header["nominal"])).timestamp()))

    def _duplicate(self, at: str = "", **_: object) -> None:
        # A child that is forked while another thread holds the counter's lock would wait for that lock for ever.
        if at == "send" and os.getpid() == self._pid:
            self._duplicates.inc()

    def _lock_lost(self, **_: object) -> None:
        if os.getpid() == self._pid:
            self._lost.inc()
