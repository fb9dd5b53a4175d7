"""The name of a broker, by which a lock says where its message was sent, and how often each broker is tried."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError

from singlebeat.broker import BrokerConnection, is_one_broker, own_broker


def name(url: Any, **options: str) -> str:
    return own_broker(Celery(broker=url, set_as_current=False, broker_transport_options=options))


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        pytest.param(["redis://", "redis://localhost:6379/0", "redis://[::1]:6379/0"], "redis://127.0.0.1:6379/0"),
        pytest.param(["redis://:secret@h/3", "rediss://user:secret@H:6379/3?ssl_cert_reqs=none"], "redis://h:6379/3"),
        pytest.param(["redis+socket://:secret@/r.sock?virtual_host=2&x=secret"], "redis:///r.sock/2"),
        pytest.param(["redis+socket:///r.sock"], "redis:///r.sock/0"),
        pytest.param(["amqp://h", "amqp://user:secret@h:5672//", "pyamqp://h/"], "amqp://h:5672//"),
        pytest.param(["amqp://h/shop"], "amqp://h:5672/shop"),
        pytest.param(["amqp://b;amqp://a/x", ["amqp://u:secret@a/x", "amqp://b"]], "amqp://a:5672/x;amqp://b:5672//"),
        pytest.param(["memory://"], "memory://127.0.0.1//"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_broker_has_one_name_however_its_url_is_written(urls, expected):
    assert {name(url) for url in urls} == {expected}


@pytest.mark.parametrize("option", ["global_keyprefix", "master_name", "queue_name_prefix"])
@pytest.mark.parametrize("url", ["redis://h", "sentinel://a;sentinel://b"])
def test_an_option_that_tells_brokers_apart_is_in_the_name(url, option):
    assert not is_one_broker(name(url, **{option: "shop"}), name(url, **{option: "blog"}))
    assert not is_one_broker(name(url, **{option: "shop"}), name(url))
    assert is_one_broker(name(url, **{option: "shop"}), name(url, **{option: "shop"}))


@pytest.mark.parametrize(
    ("url", "other", "expected"),
    [
        ("redis://h/1", "redis://h/1", True),
        ("redis://h/1", "redis://h/2", False),
        ("redis://h:1", "redis://h:2", False),
        ("amqp://d", "amqp://c;amqp://d", True),
        ("amqp://e;amqp://f", "amqp://g;amqp://h", False),
    ],
)
def test_a_list_of_brokers_is_one_with_each_of_its_members(url, other, expected):
    assert is_one_broker(name(url), name(other)) is expected


@pytest.mark.parametrize("number", [1, 3])
def test_each_broker_is_tried_once_before_the_failure_is_reported(monkeypatch, number):
    """A resolver that hangs holds up each attempt, and no timeout of the broker bounds that."""
    tried = list[str]()

    def fail(connection: Connection) -> None:
        tried.append(connection.hostname)
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr(Connection, "_establish_connection", fail)
    hosts = [f"broker{at}" for at in range(number)]
    app = Celery(broker=";".join(f"amqp://{host}//" for host in hosts), set_as_current=False)

    with pytest.raises(OperationalError):
        BrokerConnection(app).ensure_connected()

    assert tried == hosts
