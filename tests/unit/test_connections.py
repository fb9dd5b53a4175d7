"""From settings to a client: which server, which options, and how long it may keep us waiting."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery import Celery
from redis import CredentialProvider, Redis
from redis.connection import Connection, PythonRespSerializer, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelConnectionPool

from singlebeat.broker import BrokerConnection
from singlebeat.clients import native
from singlebeat.connections import (
    DataError,
    RedisError,
    is_redis,
    lock_server,
    masked,
    private,
    schedule_client,
    schedule_url,
    shared,
)
from singlebeat.errors import ConfigError, LockBackendError
from singlebeat.locks import backend_of, new_backend
from singlebeat.locks.redis import RedisBackend
from singlebeat.overlap import Overlap
from tests.support import ROOT, RedisServer, at_once, wait_until

URL = "redis://127.0.0.1:1/0"  # no server is there, and none is asked
OTHER = "redis://127.0.0.1:1/1"


def app_with(**conf: Any) -> Celery:
    app = Celery("test", set_as_current=False)
    app.conf.update({"broker_url": "memory://", **conf})
    return app


def options_of(client: Redis) -> dict[str, Any]:
    return client.connection_pool.connection_kwargs


def kind_of(client: Redis) -> type:
    kinds = client.connection_pool.connection_class.__mro__
    return next(kind for kind in kinds if kind.__module__ == "redis.connection")


# ---------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+socket:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis+socket:///run/redis.sock?virtual_host=3", "unix:///run/redis.sock?db=3"),
        ("redis+socket:///run/redis.sock?virtual_host=/3", "unix:///run/redis.sock?db=3"),
        (
            "redis+socket:///run/redis.sock?virtual_host=3&socket_timeout=7",
            "unix:///run/redis.sock?socket_timeout=7&db=3",
        ),
        ("redis+socket://:pa%2Fss@/run/redis.sock", "unix://:pa%2Fss@/run/redis.sock"),
        ("redis+socket://me:pass@/run/redis.sock?virtual_host=3", "unix://me:pass@/run/redis.sock?db=3"),
        ("unix:///run/redis.sock?db=3", "unix:///run/redis.sock?db=3"),
        ("redis://:pass@h:1/2", "redis://:pass@h:1/2"),
        ("rediss://h:1/2", "rediss://h:1/2"),
    ],
)
def test_celerys_name_for_a_socket_is_translated_and_no_other_is(url, expected):
    assert native(url) == expected


def test_a_socket_of_celery_reaches_its_database_with_its_password():
    with RedisServer() as server:
        server.client().config_set("requirepass", "ge/heim")
        url = f"redis+socket://:ge%2Fheim@{server.path}"
        with private(f"{url}?virtual_host=3", timeout=5) as there, private(url, timeout=5) as elsewhere:
            there.set("key", "value")

            assert (there.get("key"), elsewhere.get("key")) == ("value", None)
            assert kind_of(there) is UnixDomainSocketConnection


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", True),
        ("rediss://h", True),
        ("unix:///s", True),
        ("redis+socket:///s", True),
        ("redis-sentinel://h", True),
        ("redis-cluster://h", True),
        ("sentinel://a:1;sentinel://b:2", True),
        ("sentinel://h", True),
        ("amqp://h", False),
        ("memory://", False),
        ("redis", False),
        ("rpc://redis://", False),
        ("", False),
        (None, False),
        (["redis://h"], False),
    ],
)
def test_the_url_of_a_redis_server_is_known_in_all_its_forms(url, expected):
    assert is_redis(url) is expected


@pytest.mark.parametrize(
    "url",
    [
        "redis://:geheim@h:1/0",
        "redis://me:geheim@h:1/0",
        "rediss://me:geheim@h:1/0?ssl_cert_reqs=none",
        "unix://:geheim@/run/s",
        "unix:///run/s?db=1&password=geheim",
        "redis+socket://:geheim@/run/s?virtual_host=1",
        "amqp://me:geheim@h:1//",
        "sentinel://:geheim@h:26379",
        "sentinel://:geheim@h:26379;sentinel://:geheim@h2:26379",
        "amqp://me:geheim@h:1//;amqp://me:geheim@h2:2//",
        "redis://:ge/geheim@h:1/0",
        "redis://:ge#geheim@h:1/0",
        "redis://:ge@geheim@h:1/0",
    ],
)
def test_a_url_is_shown_without_its_password(url):
    assert "geheim" not in masked(url)
    assert masked(url).startswith(url.partition("://")[0])


@pytest.mark.parametrize(
    "url",
    [
        "redis:/:geheim@h:1/0",
        ":geheim@h",
        "redis:geheim@h:1/0?password=geheim",
        "redis:/:geheim://x@h",
        " redis://:geheim@h",
    ],
)
def test_a_mistyped_url_is_shown_without_its_password(url):
    assert masked(url).startswith("**@h")
    assert "geheim" not in masked(url)


@pytest.mark.parametrize("url", ["redis://h:1/0", "unix:///run/s", "memory://", "None"])
def test_a_url_without_a_password_is_shown_as_it_is(url):
    assert masked(url).rstrip("/") == url.rstrip("/")


# ---------------------------------------------------------------- the server of the locks


def test_the_locks_are_where_the_user_says():
    app = app_with(singleton_backend_url="redis://locks", result_backend="redis://results", broker_url="redis://broker")

    assert lock_server(app).url == "redis://locks"


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"result_backend": "redis://results", "broker_url": "redis://broker"}, "redis://results"),
        ({"broker_url": "redis://broker", "redbeat_redis_url": "redis://beat"}, "redis://broker"),
        ({"result_backend": "rpc://", "broker_url": "redis://broker"}, "redis://broker"),
        (
            {"result_backend": "db+sqlite:///x", "broker_url": "amqp://h//", "redbeat_redis_url": "unix:///s"},
            "unix:///s",
        ),
    ],
)
def test_by_default_the_locks_are_in_the_first_redis_that_is_known(conf, expected):
    assert lock_server(app_with(**conf)).url == expected


def test_locks_without_any_redis_are_an_error_that_names_the_setting():
    with pytest.raises(ConfigError, match=r"^set singleton_backend_url to a Redis server"):
        lock_server(app_with(broker_url="amqp://me:geheim@h//", result_backend="rpc://"))


def test_an_app_has_one_lock_backend_and_its_settings_reach_it():
    app = app_with(
        singleton_backend_url=URL, singleton_backend_kwargs={"username": "me"}, singlebeat_socket_timeout=1.5
    )

    backend = backend_of(app)

    assert backend is backend_of(app)
    assert backend is not backend_of(app_with(singleton_backend_url=URL))
    assert (options_of(backend.redis)["username"], options_of(backend.redis)["socket_timeout"]) == ("me", 1.5)
    assert new_backend(app, own_connections=True).redis is not backend.redis


class Backend(RedisBackend):
    """A lock backend of the user's own."""


def test_the_user_may_have_a_lock_backend_of_his_own():
    for given in (Backend, f"{__name__}:Backend", f"{__name__}.Backend"):
        assert (
            type(backend_of(app_with(singleton_backend_url=URL, singleton_backend_class=given))).__name__ == "Backend"
        )


# ---------------------------------------------------------------- the server of the schedule


def test_the_schedule_is_where_the_user_says_and_else_in_the_broker():
    assert schedule_url(app_with(broker_url="redis://broker")) == "redis://broker"
    assert schedule_url(app_with(broker_url="redis://broker", redbeat_redis_url="redis://beat")) == "redis://beat"


@pytest.mark.parametrize(
    "conf",
    [
        {"broker_url": "amqp://me:geheim@h//"},
        {"broker_url": "amqp://me:geheim@h//;amqp://me:geheim@h2//"},
        {"broker_url": "redis://h", "redbeat_redis_url": "amqp://me:geheim@h//"},
    ],
)
def test_a_schedule_without_redis_is_an_error_that_names_the_setting(conf):
    with pytest.raises(ConfigError, match=r"^set redbeat_redis_url to a Redis server: .*amqp://") as caught:
        schedule_url(app_with(**conf))

    assert "geheim" not in str(caught.value)


def test_a_client_that_the_user_has_given_the_app_is_used():
    app = app_with()  # with no other word about a server
    app.redbeat_redis = Redis(port=1, decode_responses=True)

    assert schedule_client(app) is app.redbeat_redis
    assert schedule_client(app, timeout=1) is app.redbeat_redis


def test_a_client_of_the_app_that_reads_bytes_is_an_error():
    app = app_with()
    app.redbeat_redis = Redis(port=1)

    with pytest.raises(ConfigError, match=r"app\.redbeat_redis .*decode_responses=True"):
        schedule_client(app)


def test_the_schedule_has_one_client_and_a_thread_beside_it_one_of_its_own():
    app = app_with(redbeat_redis_url=URL, singlebeat_socket_timeout=3)

    assert schedule_client(app) is schedule_client(app)
    beside = schedule_client(app, timeout=0.5)
    assert beside is not schedule_client(app)
    assert options_of(schedule_client(app))["socket_timeout"] == 3
    assert options_of(beside)["socket_timeout"] == options_of(beside)["socket_connect_timeout"] == 0.5
    assert options_of(beside)["retry"]._retries == 0  # a lease that waits for a second try is lost already


def test_the_options_of_the_broker_are_not_for_our_clients():
    app = app_with(
        broker_url=URL,
        broker_transport_options={"visibility_timeout": 9, "socket_timeout": 9, "socket_connect_timeout": 9, "db": 9},
        result_backend_transport_options={"db": 9, "socket_timeout": 9},
    )

    for client in (schedule_client(app), schedule_client(app, timeout=1), backend_of(app).redis):
        assert 9 not in options_of(client).values()
        assert "visibility_timeout" not in options_of(client)


def test_the_options_for_redbeat_reach_the_client_and_its_own_ones_do_not():
    app = app_with(
        redbeat_redis_url=URL,
        redbeat_redis_options={"socket_timeout": 9, "username": "me", "retry_period": 60, "cluster": False},
    )

    for client in (schedule_client(app), schedule_client(app, timeout=1)):
        options = options_of(client)
        assert (options["socket_timeout"], options["username"]) == (9, "me")
        assert not {"retry_period", "cluster"} & set(options)


def test_each_sentinel_of_a_broker_is_asked_once_in_an_attempt():
    """Beat must say within a moment that it cannot send. redis-py's own sentinels wait between their retries."""
    asked, listeners = [0, 0, 0], [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]

    def refuse(number: int) -> None:
        with suppress(OSError):
            while True:
                listeners[number].accept()[0].close()
                asked[number] += 1

    threads = [threading.Thread(target=refuse, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    urls = ";".join(f"sentinel://127.0.0.1:{each.getsockname()[1]}/0" for each in listeners)
    broker = BrokerConnection(app_with(broker_url=urls, broker_transport_options={"master_name": "m"}))
    with pytest.raises(Exception, match="No master found"):
        broker.ensure_connected()
    for listener, thread in zip(listeners, threads, strict=True):
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

    assert asked == [1, 1, 1]


def test_sentinels_are_asked_for_the_master():
    app = app_with(
        redbeat_redis_url="redis-sentinel://h:26379/0",
        redbeat_redis_options={
            "sentinels": [("127.0.0.1", 1), ("127.0.0.1", 2)],
            "service_name": "the one",
            "sentinel_kwargs": {"password": "s"},
            "password": "p",
            "db": 3,
        },
    )

    pool = schedule_client(app).connection_pool

    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "the one"
    assert (pool.connection_kwargs["password"], pool.connection_kwargs["db"]) == ("p", 3)
    assert pool.connection_kwargs["decode_responses"] is True
    sentinels = pool.sentinel_manager.sentinels
    assert [options_of(sentinel)["port"] for sentinel in sentinels] == [1, 2]
    assert all(options_of(sentinel)["password"] == "s" for sentinel in sentinels)
    for options in (pool.connection_kwargs, *map(options_of, sentinels)):
        assert 0 < options["socket_timeout"] < 60
        assert 0 < options["socket_connect_timeout"] < 60


def test_the_tls_options_of_the_schedule_reach_the_client():
    app = app_with(redbeat_redis_url="rediss://h:1/0", redbeat_redis_use_ssl={"ssl_ca_certs": "ca.pem"})

    client = schedule_client(app)

    assert kind_of(client) is SSLConnection
    assert options_of(client)["ssl_ca_certs"] == "ca.pem"


def test_the_tls_options_of_the_broker_hold_where_its_url_is_used():
    tls = {"broker_use_ssl": {"ssl_ca_certs": "ca.pem"}}

    assert options_of(schedule_client(app_with(broker_url="rediss://h:1/0", **tls)))["ssl_ca_certs"] == "ca.pem"
    assert "ssl_ca_certs" not in options_of(schedule_client(app_with(redbeat_redis_url="rediss://h:1/0", **tls)))


# ---------------------------------------------------------------- Sentinel


def sentinels_of(client: Redis) -> list[tuple[str, int]]:
    asked = [options_of(sentinel) for sentinel in client.connection_pool.sentinel_manager.sentinels]
    return [(options["host"], options["port"]) for options in asked]


CELERYS_SENTINELS = "sentinel://me:pa%2Fss@a:1/3;sentinel://b;sentinel://c:3"


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("broker_url", "broker_transport_options"),
        ("result_backend", "result_backend_transport_options"),
        ("singleton_backend_url", "singleton_backend_kwargs"),
    ],
)
def test_the_locks_are_found_through_sentinels_in_celerys_form(setting, options):
    given = {"master_name": "the one", "sentinel_kwargs": {"password": "s"}, "min_other_sentinels": 1}
    client = backend_of(app_with(**{setting: CELERYS_SENTINELS, options: given})).redis

    pool = client.connection_pool
    assert sentinels_of(client) == [("a", 1), ("b", 26379), ("c", 3)]
    assert pool.service_name == "the one"
    assert pool.sentinel_manager.min_other_sentinels == 1
    assert [options_of(client)[name] for name in ("username", "password", "db")] == ["me", "pa/ss", 3]
    asked = options_of(pool.sentinel_manager.sentinels[0])
    assert asked["password"] == "s", "the sentinels have a password of their own"
    assert asked["retry"]._retries == 0, "the next sentinel is the retry"


def test_the_schedule_is_found_through_the_sentinels_of_the_broker():
    app = app_with(broker_url=CELERYS_SENTINELS, broker_transport_options={"master_name": "the one"})

    for client in (schedule_client(app), schedule_client(app, timeout=1)):
        assert client.connection_pool.service_name == "the one"
        assert sentinels_of(client)[0] == ("a", 1)


def test_without_its_name_no_master_is_asked_for():
    with pytest.raises(ConfigError, match=r"^broker_url: cannot use sentinel://me:.*master_name") as caught:
        schedule_client(app_with(broker_url=CELERYS_SENTINELS))

    assert "pa%2Fss" not in str(caught.value)
    for setting, url, make in (
        ("broker_transport_options", "broker_url", schedule_client),
        ("redbeat_redis_options", "redbeat_redis_url", schedule_client),
        ("singleton_backend_kwargs", "singleton_backend_url", lambda app: backend_of(app).redis),
    ):
        with pytest.raises(ConfigError, match=f"{url}: .* master_name is missing in {setting}: set it to the master"):
            make(app_with(**{"broker_url": "memory://", url: CELERYS_SENTINELS}))
    redbeats = app_with(redbeat_redis_url="redis-sentinel://h:26379/0")
    assert schedule_client(redbeats).connection_pool.service_name == "master", "RedBeat's name for it"


def test_a_master_behind_sentinels_may_speak_tls():
    app = app_with(
        broker_url="sentinel://h:1",
        broker_transport_options={"master_name": "m"},
        broker_use_ssl={"ssl_ca_certs": "ca.pem", "ssl_cert_reqs": "CERT_REQUIRED"},
    )

    client = schedule_client(app)

    assert issubclass(kind_of(client), SSLConnection)
    assert (options_of(client)["ssl_ca_certs"], options_of(client)["ssl_cert_reqs"]) == ("ca.pem", "required")


# ---------------------------------------------------------------- TLS and accounts


@pytest.mark.parametrize("required", ["CERT_NONE", "none", ssl.CERT_NONE])
def test_celerys_words_for_checking_a_certificate_are_known(required):
    in_options = private("rediss://h:1", timeout=1, options={"ssl_cert_reqs": required})
    assert in_options.connection_pool.make_connection().cert_reqs == ssl.CERT_NONE
    if isinstance(required, str):
        in_url = private(f"rediss://h:1/0?ssl_cert_reqs={required}", timeout=1)
        assert in_url.connection_pool.make_connection().cert_reqs == ssl.CERT_NONE
    assert private("rediss://h:1", timeout=1).connection_pool.make_connection().cert_reqs == ssl.CERT_REQUIRED


def test_a_server_that_does_not_speak_tls_is_named_as_a_cause(own_server):
    """It waits for the end of a line, which TLS does not send."""
    url = own_server.tcp_url.replace("redis://", "rediss://")
    with private(url, timeout=0.5, retries=0) as client, pytest.raises(RedisError) as caught:
        client.ping()

    said = "Timeout connecting to server: it hangs, or does not speak TLS (redis:// is without TLS)"
    assert str(caught.value) == said


@pytest.mark.parametrize("tls", [True, {"ssl_ca_certs": "ca.pem"}])
@pytest.mark.parametrize(
    ("url", "switch"),
    [
        ("broker_url", "broker_use_ssl"),
        ("result_backend", "redis_backend_use_ssl"),
        ("redbeat_redis_url", "redbeat_redis_use_ssl"),
    ],
)
def test_a_setting_that_asks_for_tls_gets_it_under_any_url(url, switch, tls):
    app = app_with(**{url: "redis://h:1/2", switch: tls})

    clients = [backend_of(app).redis] + ([schedule_client(app)] if url != "result_backend" else [])
    for client in clients:
        assert kind_of(client) is SSLConnection
        assert options_of(client)["db"] == 2
        assert options_of(client).get("ssl_ca_certs") == (None if tls is True else "ca.pem")


class Passwords(CredentialProvider):
    """Knows who we are."""

    def get_credentials(self) -> tuple[str, str]:
        return "me", "geheim"


def test_a_provider_of_credentials_is_asked_wherever_celery_asks_one():
    named = f"{__name__}.Passwords"
    broker = app_with(broker_url=URL, broker_transport_options={"credential_provider": Passwords()})
    results = app_with(result_backend=URL, redis_backend_credential_provider=named)
    beat = app_with(redbeat_redis_url=URL, redbeat_redis_options={"credential_provider": named})
    locks = app_with(singleton_backend_url=URL, singleton_backend_kwargs={"credential_provider": Passwords()})

    clients = [schedule_client(broker), schedule_client(beat), *(backend_of(a).redis for a in (broker, results, locks))]
    for client in clients:
        assert options_of(client)["credential_provider"].get_credentials() == ("me", "geheim")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"credential_provider": Passwords(), "password": "geheim"}, "credential_"),
        ({"credential_provider": "no.such.module.Passwords"}, "no"),
        ({"cluster": True, "db": 3}, "database 0 only"),
    ],
)
def test_contradicting_options_are_an_error_that_names_the_setting(options, reason):
    with pytest.raises(
        ConfigError, match=f"^redbeat_redis_url: cannot use {URL} as a Redis server: .*{reason}"
    ) as caught:
        schedule_client(app_with(redbeat_redis_url=URL, redbeat_redis_options=options, redbeat_key_prefix="{r}:"))

    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("conf", "setting"),
    [
        ({"singleton_backend_url": "redis://:geheim@h:port"}, "singleton_backend_url"),
        ({"result_backend": "redis://:geheim@h:port"}, "result_backend"),
        ({"broker_url": "redis://:geheim@h:port"}, "broker_url"),
        ({"redbeat_redis_url": "redis://:geheim@h:port"}, "redbeat_redis_url"),
    ],
)
def test_an_unusable_url_of_the_locks_is_an_error_that_names_the_setting(conf, setting):
    with pytest.raises(ConfigError, match=f"^{setting}: cannot use redis://") as caught:
        backend_of(app_with(**conf)).redis.ping()
    assert "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"^{setting}: cannot use redis://"):
        new_backend(app_with(**conf), own_connections=True)


# ---------------------------------------------------------------- several servers


@pytest.mark.parametrize("several", ["redis://h:1/5;redis://h:2/6", ["redis://h:1/5", "redis://h:2/6"]])
def test_the_first_of_several_brokers_keeps_schedule_and_locks(several):
    app = app_with(broker_url=several)

    for client in (schedule_client(app), backend_of(app).redis):
        assert (options_of(client)["port"], options_of(client)["db"]) == (1, 5)


@pytest.mark.parametrize("setting", ["redbeat_redis_url", "singleton_backend_url"])
def test_several_servers_for_schedule_or_locks_are_an_error(setting):
    app = app_with(**{"redbeat_redis_url": URL, setting: "redis://:geheim@h:1;redis://:geheim@h:2"})

    with pytest.raises(ConfigError, match=f"^{setting}: .*several URLs given: name one server, or sentinels") as caught:
        _ = schedule_client(app), backend_of(app).redis

    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "conf",
    [
        {"redbeat_redis_url": "redis-cluster://h:1"},
        {"redbeat_redis_url": "redis://h:1", "redbeat_redis_options": {"cluster": True}},
        {"broker_url": "redis://h:1", "broker_transport_options": {"cluster": True}},
    ],
)
def test_a_cluster_wants_the_schedule_on_one_node(conf):
    app = app_with(**conf)

    with pytest.raises(ConfigError, match=r"redbeat_key_prefix 'redbeat:' needs a hash tag .* '\{redbeat\}:'"):
        schedule_url(app)

    assert schedule_url(app_with(**conf, redbeat_key_prefix="{redbeat}:"))


def test_an_unreachable_cluster_is_an_error_of_redis_and_not_of_settings():
    with pytest.raises(RedisError):
        private("redis-cluster://127.0.0.1:1", timeout=1).ping()
    with pytest.raises(LockBackendError):
        RedisBackend("redis-cluster://127.0.0.1:1").get("lock")
    away = app_with(singleton_backend_url="redis-cluster://127.0.0.1:1")
    assert new_backend(away, own_connections=True), "it may come up later"


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("url", [URL, "unix:///s", "redis+socket:///s", "rediss://h:1/0"])
def test_every_client_gives_up_in_a_finite_time_and_returns_strings(url):
    for client in (private(url, timeout=2), shared(url, timeout=2)):
        options = options_of(client)
        assert options["socket_timeout"] == options["socket_connect_timeout"] == 2
        assert 0 <= options["retry"]._retries < 10
        assert options["health_check_interval"] > 0
        assert options.get("socket_keepalive", kind_of(client) is UnixDomainSocketConnection) is True
        assert options["decode_responses"] is True


def test_no_option_disables_the_decoding_of_replies():
    assert options_of(private(URL, timeout=1, options={"decode_responses": False}))["decode_responses"] is True


@pytest.mark.parametrize(
    "url",
    [
        "redis://:geheim@h:port/0",
        "redis://:geheim#heim@h:1/0",
        "redis://:geheim/heim@h:1/0",
        "sentinel://:geheim@h:26379",
        "sentinel://:geheim@h:26379;sentinel://:geheim@h2:26379",
    ],
)
def test_a_url_that_cannot_be_used_is_an_error_without_its_password(url):
    with pytest.raises(ConfigError, match="as a Redis server") as caught:
        private(url, timeout=1)

    assert "geheim" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "url", ["redis://:geheim@h:1/word", "rediss://h/1/2", "redis://h/-1", "sentinel://a/0;sentinel://b/mymaster"]
)
def test_a_url_whose_database_is_no_number_is_an_error(url):
    """redis-py would take database 0, or 12; Celery refuses such a URL of a broker."""
    why = "its database is not a number: end the URL with a number, such as /0"
    with pytest.raises(ConfigError, match=f"as a Redis server: {re.escape(why)}$") as caught:
        private(url, timeout=1, options={"master_name": "m"})

    assert "geheim" not in str(caught.value)


def test_a_number_that_ends_a_password_is_not_taken_for_a_port():
    with pytest.raises(ConfigError, match=re.escape("(is the password quoted?)")) as caught:
        private("redis://:12/geheim@h:1/0", timeout=1)

    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "database"),
    [("redis://h", 0), ("redis://h/", 0), ("redis://h//3", 3), ("redis://h/word?db=3", 3), ("unix:///word?db=3", 3)],
)
def test_a_database_is_read_as_redis_py_reads_it(url, database):
    assert options_of(private(url, timeout=1)).get("db", 0) == database


def test_an_option_unknown_to_the_client_is_an_error_of_the_settings():
    with pytest.raises(ConfigError, match="no_such_option"):
        private(URL, timeout=1, options={"no_such_option": 1})


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("CONFIG GET", "maxmemory"),
        (b"CONFIG GET", "maxmemory"),
        ("SET", "key", "é ∑ 😀", "PX", 1000),
        ("SET", "key", b"\xff\xfe".decode(errors="surrogateescape")),
        ("ZADD", "key", 1.5, b"\xff\xfe", -1, "x" * 100_000),
        ("HSET", "key", "policy", Overlap.SKIP, "", ""),
    ],
)
def test_a_command_is_packed_as_redis_py_packs_it_in_one_piece(command):
    ours = private(URL, timeout=1).connection_pool.make_connection()
    its = PythonRespSerializer(6000, Connection(encoding_errors="surrogateescape").encoder.encode)

    assert ours.pack_command(*command) == [b"".join(its.pack(*command))]


@pytest.mark.parametrize("value", [None, True, {"a": 1}])
def test_a_value_that_redis_py_refuses_is_no_argument_of_a_command(value):
    ours = private(URL, timeout=1).connection_pool.make_connection()

    with pytest.raises(DataError):
        ours.pack_command("SET", "key", value)


def test_one_url_has_one_client_in_a_process():
    client = shared(URL, timeout=1)

    assert shared(URL, timeout=1) is client
    assert shared(URL, timeout=1, options={}) is client
    assert shared(OTHER, timeout=1) is not client
    assert shared(URL, timeout=2) is not client
    assert shared(URL, timeout=1, options={"username": "me"}) is not client
    one, same = ({"username": "me", "db": 1}, {"db": 1, "username": "me"})
    assert shared(URL, timeout=1, options=one) is shared(URL, timeout=1, options=same)


def test_all_threads_share_the_client():
    found = at_once(*[lambda: shared("redis://127.0.0.1:1/7", timeout=1)] * 8)

    assert len(found) == 8
    assert len(set(map(id, found))) == 1


FORK = """
import os, sys
from singlebeat.connections import shared
url = sys.argv[1]
client = shared(url, timeout=5)
parent = client.client_id()
read, write = os.pipe()
if os.fork() == 0:
    theirs = shared(url, timeout=5)
    same = theirs is client, theirs is shared(url, timeout=5), theirs.client_id() == parent
    os.write(write, repr(same).encode())
    os._exit(0)
os.wait()
print(os.read(read, 100).decode(), client.client_id() == parent, shared(url, timeout=5) is client)
"""


def test_a_forked_child_has_a_client_and_a_connection_of_its_own(server):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-c", FORK, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)

    assert done.stdout == "(False, True, False) True True\n", done.stderr


def test_a_connection_that_the_server_has_closed_is_opened_again(server, redis):
    client = private(server.socket_url, timeout=5)
    name = client.client_id()
    redis.client_kill_filter(_id=name)

    assert client.ping()
    assert client.client_id() != name
    assert kind_of(client) is UnixDomainSocketConnection
    assert issubclass(kind_of(private(URL, timeout=1)), Connection)


@contextmanager
def demoted(server: RedisServer) -> Iterator[None]:
    """Make the server a read-only replica of a server that does not exist."""
    client = server.client()
    client.replicaof("127.0.0.1", 1)
    try:
        yield
    finally:
        client.replicaof("NO", "ONE")


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_call_is_repeated_until_a_read_only_server_takes_writes_again(own_server, pipelined):
    client = private(own_server.url, timeout=5, options={"retry_period": 60})

    def call() -> None:
        with client.pipeline() as pipe:
            (pipe if pipelined else client).set("key", "value")
            pipe.execute()

    with demoted(own_server):
        caller = threading.Thread(target=call)
        caller.start()
        wait_until(lambda: own_server.client().info("errorstats").get("errorstat_READONLY"), what="a refused write")
    caller.join(30)

    assert own_server.client().get("key") == "value"


@pytest.mark.parametrize("options", [{}, {"retry_period": -1}, {"retry_period": 0.2}])
def test_no_call_is_repeated_for_ever(own_server, options):
    with private(own_server.url, timeout=5, options=options) as client, demoted(own_server):
        with pytest.raises(RedisError):
            client.set("key", "value")
        tries = own_server.client().info("errorstats")["errorstat_READONLY"]["count"]

    assert tries >= 3


def test_a_client_without_retries_gets_none_under_any_options(own_server):
    with (
        private(own_server.url, timeout=5, retries=0, options={"retry_period": 60}) as client,
        demoted(own_server),
        pytest.raises(RedisError),
    ):
        client.set("key", "value")

    assert own_server.client().info("errorstats")["errorstat_READONLY"]["count"] == 1
