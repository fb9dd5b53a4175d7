"""Prometheus metrics and health of one beat over HTTP, from the beat's signals and from the state in Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import signals
from ..config import Config
from ..connections import RedisError, schedule_client
from ..exposition import DELAYS, Answer, metrics_of, new_registry, serve
from ..log import Log
from .entries.occurrence import DecisionType, Kind
from .status import ScheduleStatus
from .store.probe import schedule_error, ticks_refusal

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from celery import Celery
    from prometheus_client.metrics_core import Metric

    from ..clients import RedisClient
    from .leadership.lease import Lease

__all__ = ("BeatMetrics",)

log = Log("celery.beat")

#: Seconds without a tick after which a beat is not healthy.
HEALTHY_FOR = 30.0

#: Seconds that Redis may take to answer: a health probe waits for a few seconds, and Prometheus for 10.
PROBE_TIMEOUT = 2.0

#: Upper bounds of the buckets for ticks, in seconds.
TICKS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30)


class BeatMetrics:
    """The metrics of one beat; needs ``prometheus_client``.

    Args:
        lease: of the beat.
    """

    def __init__(self, app: Celery, lease: Lease) -> None:
        from prometheus_client import Counter, Histogram  # noqa: PLC0415 - an extra

        self.app, self.lease = app, lease
        self.registry = registry = new_registry()
        self.last_tick = time.monotonic()
        self.server: ThreadingHTTPServer | None = None
        self._client: RedisClient = None
        self._decisions = Counter(
            "singlebeat_decisions_total", "Decisions about occurrences.", ["decision", "kind"], registry=registry
        )
        self._lateness = Histogram(
            "singlebeat_lateness_seconds", "From nominal time to its sending.", buckets=DELAYS, registry=registry
        )
        self._ticks = Histogram(
            "singlebeat_tick_duration_seconds", "Time that ticks take.", buckets=TICKS, registry=registry
        )
        self._terms = Counter("singlebeat_leadership_total", "Begun and lost terms.", ["event"], registry=registry)
        self._quarantines = Counter(
            "singlebeat_quarantines_total", "Unusable entries that were found.", registry=registry
        )
        # Each series begins at 0: increase() misses the first event of a counter that appears with this event.
        for outcome in DecisionType:
            for kind in Kind:
                self._decisions.labels(outcome.value, kind.value)
        for event in ("gained", "lost"):
            self._terms.labels(event)
        registry.register(self)
        # Signals keep weak references to methods: this object must live as long as its beat. Without a dispatch_uid,
        # Celery before 5.7 confuses the methods of two objects.
        signals.occurrence_decided.connect(self._count_decision, sender=app, dispatch_uid=id(self))
        signals.tick_ended.connect(self._observe_tick, sender=app, dispatch_uid=id(self))
        signals.leadership_gained.connect(self._count_gained, sender=app, dispatch_uid=id(self))
        signals.leadership_lost.connect(self._count_lost, sender=app, dispatch_uid=id(self))
        signals.entry_quarantined.connect(self._count_quarantined, sender=app, dispatch_uid=id(self))

    @classmethod
    def served(cls, app: Celery, lease: Lease) -> BeatMetrics | None:
        """Serve and return the metrics of a beat; return None if ``singlebeat_metrics_port`` is None."""
        config = Config.of(app)
        if config.singlebeat_metrics_port is None:
            return None
        metrics = cls(app, lease)
        try:
            metrics.serve(config.singlebeat_metrics_host, config.singlebeat_metrics_port)
        except OSError as exc:  # beat goes on: sending is worth more than counting
            log.error("beat: Metrics are not served", event="metrics_not_served", reason=exc)  # noqa: TRY400 - as above
        return metrics

    def serve(self, host: str, port: int) -> None:
        """Answer ``/metrics``, ``/healthz`` and ``/readyz`` in a thread.

        Raises:
            OSError: the port is in use, or the address does not belong to this host.
        """
        self.server = serve(host, port, self.answer)

    def answer(self, path: str) -> Answer:
        """Return status, type and body of the answer to a path."""
        if path == "/metrics":
            return metrics_of(self.registry)
        if path == "/healthz":
            idle = time.monotonic() - self.last_tick
            return self._verdict("" if idle < HEALTHY_FOR else f"no tick for {idle:.0f} s")
        if path == "/readyz":
            try:
                state = self._state()
            except RedisError as exc:
                return self._verdict(schedule_error(self.app, exc))
            # A server that refuses writes may still let the leader renew its lease, and lets tools read the leader.
            return self._verdict(ticks_refusal(self.app, client=self._client) or state.problem())
        return Answer.of("/metrics, /healthz or /readyz", 404)

    def _state(self) -> ScheduleStatus:
        if self._client is None:
            timeout = min(PROBE_TIMEOUT, Config.of(self.app).singlebeat_socket_timeout)
            self._client = schedule_client(self.app, timeout=timeout)
        return ScheduleStatus.of(self.app, names=False, client=self._client)

    @staticmethod
    def _verdict(problem: str) -> Answer:
        return Answer.of(problem or "ok", 503 if problem else 200)

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the present state in Redis."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

        leads = self.lease.term() is not None
        yield GaugeMetricFamily("singlebeat_leader", "Whether this beat leads.", value=leads)
        text = "Time that this beat's last renewal of its term took."
        yield GaugeMetricFamily("singlebeat_renewal_seconds", text, value=self.lease.took_s)
        try:
            state = self._state()
        except RedisError:
            yield GaugeMetricFamily("singlebeat_redis_up", "Whether the schedule's server answers.", value=0)
            return
        yield GaugeMetricFamily("singlebeat_redis_up", "Whether the schedule's server answers.", value=1)
        for name, text, value in (
            ("term", "Number of the present term.", float(state.leader.get("term") or 0)),
            ("standbys", "Beats that stand by.", len(state.standbys)),
            ("lease_left_seconds", "Time until leadership ends unless it is renewed.", state.lease_left),
            ("clock_ahead_seconds", "How far the clock of this host is ahead of the server's.", state.host_ahead),
            ("clock_set_back_seconds", "For how long entries wait: the server's clock was set back.", state.set_back),
            ("entries", "Entries of the schedule.", state.entries),
            ("overdue_entries", "Entries that are due and not decided about.", state.overdue),
            ("lag_seconds", "How late the most overdue entry, or the oldest pending occurrence, is.", state.lag),
            ("pending_occurrences", "Occurrences that are claimed and not confirmed.", state.pending),
            ("quarantined_entries", "Entries that cannot be used until they are fixed.", state.quarantined),
        ):
            yield GaugeMetricFamily(f"singlebeat_{name}", text, value=value)

    def describe(self) -> Iterator[Metric]:
        """Return no names: otherwise the registry would ask Redis when this object is registered."""
        return iter(())

    def _count_decision(self, decision: Any = None, **_: object) -> None:
        self._decisions.labels(decision.outcome.value, decision.occurrence.kind.value).inc()
        if decision.occurrence.is_scheduled and decision.outcome.value in {"dispatched", "buffered"}:
            self._lateness.observe(max(0.0, self.lease.server_time.timestamp() - decision.occurrence.nominal))

    def _observe_tick(self, seconds: float = 0.0, **_: object) -> None:
        self.last_tick = time.monotonic()
        self._ticks.observe(seconds)

    def _count_gained(self, **_: object) -> None:
        self._terms.labels("gained").inc()

    def _count_lost(self, **_: object) -> None:
        self._terms.labels("lost").inc()

    def _count_quarantined(self, **_: object) -> None:
        self._quarantines.inc()
