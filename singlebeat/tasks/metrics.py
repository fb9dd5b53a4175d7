"""Prometheus metrics of a worker's main process, from its signals and from the locks that it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from .. import signals
from ..config import Config
from ..exposition import DELAYS, Answer, metrics_of, new_registry, serve
from ..locks.base import RUN_HEADER
from ..log import Log
from ..run_results import OUTCOMES

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client.metrics_core import Metric

    from ..locks.base import Headers
    from .renewer import Renewer

__all__ = ("WorkerMetrics",)

log = Log(__name__)

#: Kinds of runs (``beat.entries.occurrence.Kind``) that should begin at their nominal time.
ON_TIME = {"scheduled", "catch_up"}


class WorkerMetrics:
    """The metrics of one worker; needs ``prometheus_client``.

    Args:
        renewer: renewer of the worker.
    """

    def __init__(self, app: Celery, renewer: Renewer) -> None:
        from prometheus_client import Counter, Histogram  # noqa: PLC0415 - an extra

        self.renewer, self._pid = renewer, os.getpid()
        self._host = Config.of(app).singlebeat_metrics_host
        self.registry = registry = new_registry()
        self._runs = Counter("singlebeat_runs_total", "Ends of runs.", ["outcome"], registry=registry)
        self._delays = Histogram(
            "singlebeat_start_delay_seconds", "From nominal time to the start.", buckets=DELAYS, registry=registry
        )
        self._duplicates = Counter(
            "singlebeat_duplicates_total", "Duplicate calls that this process has not sent.", registry=registry
        )
        self._lost = Counter("singlebeat_locks_lost_total", "Locks that a run has lost.", registry=registry)
        # Each series begins at 0, because increase() does not see the first event of a new series.
        for outcome in OUTCOMES:
            self._runs.labels(outcome)
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

    def collect(self) -> Iterator[Metric]:
        """Yield the current gauges of the worker's locks."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

        held = GaugeMetricFamily("singlebeat_locks_held", "Messages of this worker that have a lock.", labels=["state"])
        for state, count in self.renewer.held().items():
            held.add_metric([state], count)
        yield held
        up = not self.renewer.failing
        yield GaugeMetricFamily("singlebeat_locks_up", "Whether the locks' server has answered.", value=up)

    def describe(self) -> Iterator[Metric]:
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
        if outcome in {"duplicate_refused", "postponed"} or header.get("kind") not in ON_TIME:
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
