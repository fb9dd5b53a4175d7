"""Prometheus metrics and health of one beat over HTTP, from the beat's signals and from the state in Redis."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .. import signals
from ..config import Config
from ..connections import RedisError, schedule_client, what_it_does
from ..exposition import DELAYS, Answer, Metric, metrics_of, new_registry, serve
from ..log import Log
from ..server_errors import is_denied
from .entries.occurrence import DecisionType, Kind
from .status import MAX_LAG, ScheduleStatus
from .store.probe import schedule_error, ticks_refusal

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from celery import Celery
    from prometheus_client.metrics_core import GaugeMetricFamily

    from ..clients import RedisClient
    from .leadership.lease import Lease

__all__ = ("METRICS", "BeatMetrics")

log = Log("celery.beat")

#: Seconds without progress after which a beat is not healthy.
HEALTHY_FOR = 30.0

#: Seconds that Redis may take to answer: a health probe waits for a few seconds, and Prometheus for 10.
PROBE_TIMEOUT = 2.0

#: Upper bounds of the buckets for ticks, in seconds.
TICKS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30)


#: Every metric of a beat, by its name.
METRICS: Mapping[str, Metric] = {
    each.name: each
    for each in (
        Metric(
            "singlebeat_decisions_total",
            "counter",
            "Decisions about occurrences.",
            {"decision": [*DecisionType], "kind": [*Kind]},
        ),
        Metric(
            "singlebeat_lateness_seconds",
            "histogram",
            "Time from the nominal time of a run to its sending.",
            buckets=DELAYS,
        ),
        Metric(
            "singlebeat_tick_duration_seconds",
            "histogram",
            "Time that ticks take: one read of the due entries, and their sending.",
            buckets=TICKS,
        ),
        Metric(
            "singlebeat_leadership_total",
            "counter",
            "Terms of leadership that this beat has gained or lost.",
            {"event": ("gained", "lost")},
        ),
        Metric("singlebeat_quarantines_total", "counter", "Unusable entries that this beat has found."),
        Metric("singlebeat_leader", "gauge", "1: this beat leads. 0: it does not."),
        Metric("singlebeat_redbeat_leads", "gauge", "1: a beat of RedBeat holds the lock. 0: none does."),
        Metric(
            "singlebeat_renewal_seconds",
            "gauge",
            "Time that this beat's last renewal of leadership took, 0 if it has not led; a quarter of "
            "redbeat_lock_timeout is too long.",
        ),
        Metric(
            "singlebeat_redis_up",
            "gauge",
            "1: the schedule's server answers. 0: it does not. If it does not, or refuses what the following gauges "
            "need, those are missing.",
        ),
        Metric(
            "singlebeat_redis_refuses",
            "gauge",
            "1: the schedule's server refuses a command or a key that beat needs, as all writes when its memory is "
            "full, or another program has spoilt a key of the schedule; runs may not be sent or recorded.",
        ),
        Metric(
            "singlebeat_schedule_lost",
            "gauge",
            "1: the server has lost the schedule, or its last changes, as a beat has noticed; for a day, or until a "
            "program adds an entry.",
        ),
        Metric("singlebeat_term", "gauge", "Number of the present term."),
        Metric(
            "singlebeat_standbys",
            "gauge",
            "Beats that stand by; with redbeat_lock_key None, the other beats that share the work.",
        ),
        Metric("singlebeat_lease_left_seconds", "gauge", "Time until leadership ends unless it is renewed."),
        Metric(
            "singlebeat_clock_ahead_seconds",
            "gauge",
            "How far the clock of this host is ahead of the clock of the schedule's server.",
        ),
        Metric(
            "singlebeat_clock_set_back_seconds",
            "gauge",
            "How long entries still wait, because the clock of the schedule's server was set back.",
        ),
        Metric("singlebeat_entries", "gauge", "Entries of the schedule."),
        Metric(
            "singlebeat_overdue_entries",
            "gauge",
            "Entries that have been due for 5 s and are not decided; a place of 0 does not tell since when.",
        ),
        Metric(
            "singlebeat_lag_seconds",
            "gauge",
            "How late the most overdue entry, or the oldest pending occurrence, is.",
        ),
        Metric("singlebeat_pending_occurrences", "gauge", "Occurrences that are claimed and not confirmed."),
        Metric("singlebeat_quarantined_entries", "gauge", "Entries that cannot be used until they are fixed."),
    )
}


class BeatMetrics:
    """The metrics of one beat; needs ``prometheus_client``.

    Args:
        lease: of the beat.
    """

    def __init__(self, app: Celery, lease: Lease) -> None:
        self.app, self.lease = app, lease
        self.registry = registry = new_registry()
        self.last_progress = time.monotonic()
        self.server: ThreadingHTTPServer | None = None
        made = {name: metric.made(registry) for name, metric in METRICS.items() if metric.type != "gauge"}
        self._decisions = made["singlebeat_decisions_total"]
        self._lateness = made["singlebeat_lateness_seconds"]
        self._ticks = made["singlebeat_tick_duration_seconds"]
        self._terms = made["singlebeat_leadership_total"]
        self._quarantines = made["singlebeat_quarantines_total"]
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
        with suppress(RedisError):  # connect: beat may still reach a server whose sentinels are away by then
            metrics._client.time()
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
            idle = time.monotonic() - self.last_progress
            return self._verdict("" if idle < HEALTHY_FOR else f"no progress for {idle:.0f} s")
        if path == "/readyz":
            try:
                state = self._state()
            except RedisError as exc:
                refused = ticks_refusal(self.app, client=self._client) if is_denied(exc) else ""
                return self._verdict(refused or schedule_error(self.app, exc))
            # A server that refuses writes may still let the leader renew its lease, and lets tools read the leader.
            # A standby is ready to lead: it must not keep a leader that cannot send from being replaced.
            behind = state.behind if state.lag > MAX_LAG and self.lease.owned() else ""
            return self._verdict(ticks_refusal(self.app, client=self._client) or state.problem() or behind)
        return Answer.of("/metrics, /healthz or /readyz", 404)

    def progress(self) -> None:
        """Record that work goes on."""
        self.last_progress = time.monotonic()

    @cached_property
    def _client(self) -> RedisClient:
        """The connection of the probes and of Prometheus."""
        timeout = min(PROBE_TIMEOUT, Config.of(self.app).singlebeat_socket_timeout)
        return schedule_client(self.app, timeout=timeout)

    def _state(self) -> ScheduleStatus:
        return ScheduleStatus.of(self.app, names=False, client=self._client)

    @staticmethod
    def _verdict(problem: str) -> Answer:
        return Answer.of(problem or "ok", 503 if problem else 200)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield gauges of the present state in Redis."""
        yield METRICS["singlebeat_leader"].gauge(self.lease.term() is not None)
        yield METRICS["singlebeat_renewal_seconds"].gauge(self.lease.took_s)
        try:
            state = self._state()
            refused = ticks_refusal(self.app, client=self._client)
        except RedisError as exc:
            refuses = what_it_does(exc) == "refuses"
            yield METRICS["singlebeat_redis_up"].gauge(refuses)
            if refuses:
                yield METRICS["singlebeat_redis_refuses"].gauge(1)
            return
        us = (socket.gethostname(), str(os.getpid()))
        others = [beat for beat in state.sharing if (beat.get("host"), beat.get("pid")) != us]
        for name, value in {
            "redis_up": 1,
            "redbeat_leads": state.redbeat_leads,
            "redis_refuses": bool(refused),
            "schedule_lost": bool(state.lost),
            "term": state.term,
            "standbys": len(others if state.is_shared else state.standing_by),
            "lease_left_seconds": state.lease_left,
            "clock_ahead_seconds": state.host_ahead,
            "clock_set_back_seconds": state.set_back,
            "entries": state.entries,
            "overdue_entries": state.overdue,
            "lag_seconds": state.lag,
            "pending_occurrences": state.pending,
            "quarantined_entries": state.quarantined,
        }.items():
            yield METRICS[f"singlebeat_{name}"].gauge(value)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return no names: otherwise the registry would ask Redis when this object is registered."""
        return iter(())

    def _count_decision(self, decision: Any = None, **_: object) -> None:
        self._decisions.labels(decision.outcome.value, decision.occurrence.kind.value).inc()
        if decision.occurrence.is_scheduled and decision.outcome.value in {"dispatched", "buffered"}:
            self._lateness.observe(max(0.0, self.lease.server_time.timestamp() - decision.occurrence.nominal))

    def _observe_tick(self, seconds: float = 0.0, **_: object) -> None:
        self.progress()
        self._ticks.observe(seconds)

    def _count_gained(self, **_: object) -> None:
        self._terms.labels("gained").inc()

    def _count_lost(self, **_: object) -> None:
        self._terms.labels("lost").inc()

    def _count_quarantined(self, **_: object) -> None:
        self._quarantines.inc()
