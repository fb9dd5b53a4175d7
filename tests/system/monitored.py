"""The app under test with Sentry and OpenTelemetry around it, set up as the docs say.

What they would send goes to the lists ``check-ins`` and ``spans`` of the oracle's server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import sentry_sdk
from celery.signals import beat_init, before_task_publish, celeryd_init, task_prerun
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from redis import Redis
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from singlebeat import Singleton
from tests.system import apps


def _tell(kind: str, about: dict[str, Any]) -> None:
    with Redis.from_url(os.environ["SB_TEST_ORACLE_URL"]) as client:
        client.rpush(kind, json.dumps(about))


class ToOracle(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        for item in envelope.items:
            if item.type == "check_in":
                _tell("check-ins", item.payload.json)


class ToOracleToo(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            about = {"name": span.name, "trace": span.context.trace_id, "parent": bool(span.parent)}
            _tell("spans", {**about, "task": span.attributes.get("messaging.message.id")})
        return SpanExportResult.SUCCESS


@celeryd_init.connect
@beat_init.connect
def set_up(**_: Any) -> None:
    integration = CeleryIntegration(monitor_beat_tasks=True)
    quick = {"default_integrations": False, "auto_enabling_integrations": False}  # these import Django and the like
    sentry_sdk.init(dsn="https://key@localhost/1", transport=ToOracle, integrations=[integration], **quick)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToOracleToo()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


@before_task_publish.connect
def note_sent(headers: Mapping[str, Any], **_: Any) -> None:
    _tell("sentry-traces", {"task": headers["id"], "by": "sender", "trace": headers["sentry-trace"].partition("-")[0]})


@task_prerun.connect
def note_run(task_id: str, **_: Any) -> None:
    traced = sentry_sdk.get_traceparent() or ""
    _tell("sentry-traces", {"task": task_id, "by": "run", "trace": traced.partition("-")[0]})


def alone(name: str, seconds: float = 0) -> str:
    """Run alone from its start on, like ``plain``."""
    return apps.plain(name, seconds)


app = apps.make_app(
    os.environ.get("SB_TEST_URL", "memory://"),
    apps.conf_from_environment(),
    set_as_current="SB_TEST_URL" in os.environ,
)
app.task(alone, name="tests.system.monitored.alone", base=Singleton, lock="while_executing", shared=False)
