"""Which messages RabbitMQ must say of that they reach no queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Producer

from singlebeat.beat.publisher import BeatProducer
from singlebeat.locks.base import RUN_HEADER

RUN = {RUN_HEADER: {"entry": "e"}}


@pytest.mark.parametrize(
    ("driver", "confirms", "options", "mandatory"),
    [
        pytest.param("py-amqp", True, {"headers": RUN}, True, id="a run"),
        pytest.param("py-amqp", True, {"headers": RUN, "mandatory": None}, True, id="as Celery gives it"),
        pytest.param("py-amqp", True, {"headers": RUN, "mandatory": False}, False, id="as the entry wishes"),
        pytest.param("py-amqp", True, {"headers": {**RUN, "x-delay": 5}}, None, id="a delayed message"),
        pytest.param("py-amqp", True, {"headers": {}}, None, id="no run"),
        pytest.param("py-amqp", False, {"headers": RUN}, None, id="without confirms the next one would learn it"),
        pytest.param("redis", True, {"headers": RUN}, None, id="another broker"),
    ],
)
def test_a_run_must_reach_a_queue(monkeypatch, driver, confirms, options, mandatory):
    sent = list[dict[str, Any]]()
    monkeypatch.setattr(Producer, "publish", lambda _, **options: sent.append(options))
    transport = SimpleNamespace(driver_name=driver)
    connection = SimpleNamespace(transport=transport, transport_options={"confirm_publish": confirms})
    monkeypatch.setattr(Producer, "connection", connection)
    monkeypatch.setattr(Producer, "channel", None)
    producer = object.__new__(BeatProducer)

    producer.publish(**options)

    assert sent[0].get("mandatory") is mandatory
