"""Finds the servers of the schedule and of the locks in the settings of an app, and returns their clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import celery._state
from redis import Redis, RedisCluster

from .clients import (
    SINGLE,
    TOPOLOGY,
    DataError,
    RedisError,
    ResponseError,
    first_home,
    is_cluster,
    is_redis,
    masked,
    private,
    shared,
    what_it_does,
)
from .cluster import keeps_together, same_slot
from .config import Config
from .errors import ConfigError

if TYPE_CHECKING:
    from celery import Celery

    from .clients import ClientOptions, RedisClient

__all__ = (
    "DataError",
    "RedisError",
    "ResponseError",
    "broker_place",
    "check_schedule_server",
    "home_among_brokers",
    "is_fallback",
    "is_one_server",
    "is_redis",
    "lock_server",
    "masked",
    "private",
    "same_slot",
    "schedule_client",
    "schedule_place",
    "schedule_server",
    "schedule_url",
    "shared",
    "what_it_does",
)


class Endpoint(NamedTuple):
    """The URL and client options of a server, and the name of the setting that holds the URL."""

    setting: str
    url: str
    options: ClientOptions


def schedule_server(app: Celery) -> Endpoint:
    """Return the server that keeps the schedule.

    Raises:
        ConfigError: neither ``redbeat_redis_url`` nor ``broker_url`` names a Redis server, or the prefix lacks the hash
            tag that a cluster needs.
    """
    config, conf = Config.of(app), app.conf
    if config.redbeat_redis_url:
        server = Endpoint("redbeat_redis_url", config.redbeat_redis_url, _tls(config.redbeat_redis_use_ssl))
    else:
        tls = config.redbeat_redis_use_ssl or conf.broker_use_ssl
        server = _borrowed("broker_url", conf.broker_url, tls, conf.broker_transport_options)
    server = server._replace(options={**server.options, **config.redbeat_redis_options})
    if not is_redis(server.url):
        raise ConfigError(f"set redbeat_redis_url to a Redis server: {masked(server.url)} is not one")
    if is_cluster(server.url, server.options):
        _check_prefix(config.redbeat_key_prefix)
    return server


def check_schedule_server(app: Celery) -> None:
    """Check the settings of the schedule's server without a connection.

    Raises:
        ConfigError: as ``schedule_client``.
    """
    if getattr(app, "redbeat_redis", None) is None:
        schedule_client(app)


def schedule_url(app: Celery) -> str:
    """Return the URL of the server that keeps the schedule; raises as ``schedule_server``."""
    return schedule_server(app).url


def schedule_place(app: Celery) -> str:
    """Return the place of the schedule for messages: its masked URL, or ``app.redbeat_redis`` if the user set that."""
    return "app.redbeat_redis" if getattr(app, "redbeat_redis", None) is not None else masked(schedule_url(app))


def schedule_client(app: Celery, *, timeout: float | None = None) -> RedisClient:
    """Return the client for the schedule: ``app.redbeat_redis`` if the user has set it, as with RedBeat.

    Args:
        timeout: seconds per call of a client with its own connections and without retries; default: the shared client.
            If the user has set ``app.redbeat_redis`` to a client of redis-py, that client is returned in any case, with
            its own connections, timeouts and retries.

    Raises:
        ConfigError: no setting names a Redis server, or the given server or client cannot be used.
    """
    own = getattr(app, "redbeat_redis", None)
    if isinstance(own, RedisCluster):
        _check_prefix(Config.of(app).redbeat_key_prefix)
    if isinstance(own, Redis | RedisCluster) and not own.get_encoder().decode_responses:
        raise ConfigError("app.redbeat_redis returns bytes: create the client with decode_responses=True")
    if own is not None and (timeout is None or isinstance(own, Redis | RedisCluster)):
        return own
    server = schedule_server(app)
    if timeout is not None:
        return private(server.url, timeout=timeout, retries=0, options=server.options, setting=server.setting)
    patience = Config.of(app).singlebeat_socket_timeout
    return shared(server.url, timeout=patience, options=server.options, setting=server.setting)


def is_one_server(place: str, other: str, *, one_master: bool = False) -> bool:
    """Return whether two places, as masked URLs, are certainly one Redis server; it may have several databases.

    Args:
        one_master: the sentinels that the places may name are asked for a master of the same name.
    """
    homes = {_home(place, one_master=one_master), _home(other, one_master=one_master)}
    return len(homes) == 1 and "" not in homes


def _home(place: str, *, one_master: bool) -> str:
    """Return host and port of a single Redis server, or of its sentinels, or the path of its socket; else empty."""
    if one_master and place.startswith("sentinel://"):
        return ";".join(sorted(each.rpartition("://")[2].rpartition("@")[2].split("/")[0] for each in place.split(";")))
    if not place.startswith(SINGLE) or ";" in place:
        return ""
    rest = place.partition("://")[2].rpartition("@")[2]
    return rest if rest.startswith("/") else rest.partition("/")[0]


def broker_place(app: Celery) -> str:
    """Return where messages are sent, for people: the URL of the broker, or each of several, without its password."""
    given = app.conf.broker_write_url or app.conf.broker_url or app.connection_for_write().as_uri()
    return masked(";".join(map(str, given)) if isinstance(given, list | tuple) else str(given))


def home_among_brokers(app: Celery) -> str:
    """Return the place of the schedule or of the locks if that server is one of several brokers; else an empty string.

    When it fails, workers change to the next broker and stay there. Beat waits for it, and goes on sending there.

    Raises:
        ConfigError: as of ``schedule_server`` and ``lock_server``.
    """
    brokers = broker_place(app).split(";")
    if len(brokers) == 1:
        return ""
    homes = [place.split(";")[0] for place in (schedule_place(app), masked(lock_server(app).url))]
    return next((home for home in homes if any(is_one_server(home, broker) for broker in brokers)), "")


def lock_server(app: Celery) -> Endpoint:
    """Return the server that keeps the locks, without ``singleton_backend_kwargs``.

    Raises:
        ConfigError: no setting names a Redis server; the message says which one to set.
    """
    config, conf = Config.of(app), app.conf
    if config.singleton_backend_url:
        return Endpoint("singleton_backend_url", config.singleton_backend_url, {})
    provider = conf.get("redis_backend_credential_provider")
    options = {"credential_provider": provider, **(conf.result_backend_transport_options or {})}
    for server in (
        _borrowed("result_backend", conf.result_backend, conf.get("redis_backend_use_ssl"), options),
        _borrowed("broker_url", conf.broker_url, conf.broker_use_ssl, conf.broker_transport_options),
    ):
        if is_redis(server.url):
            return server
    if is_redis(config.redbeat_redis_url):
        return schedule_server(app)
    message = "set singleton_backend_url to a Redis server: neither result_backend nor broker_url is one"
    if is_fallback(app):
        message += (
            "; these are the settings of Celery's default app, because this thread has no current app: give app=... or "
            "call set_default() of your app"
        )
    raise ConfigError(message)


def is_fallback(app: Celery) -> bool:
    """Return whether an app is the one that Celery makes for threads without a current app."""
    return app is celery._state.default_app and app.main == "default"


def _borrowed(setting: str, url: object, tls: object, options: ClientOptions | None) -> Endpoint:
    """Return the endpoint of a URL that is configured for another purpose.

    Of its options, only those for the topology and the credentials are used.
    """
    url = first_home(str(url[0] if isinstance(url, list | tuple) and url else url))
    names = TOPOLOGY | {"credential_provider"}
    given = {name: value for name, value in (options or {}).items() if name in names and value is not None}
    return Endpoint(setting, url, {**_tls(tls), **given})


def _tls(given: object) -> ClientOptions:
    """Return the client options for the value of a ``*_use_ssl`` setting."""
    return {"ssl": True, **(given if isinstance(given, Mapping) else {})} if given else {}


def _check_prefix(prefix: str) -> None:
    if not keeps_together(prefix):
        raise ConfigError(
            f"redbeat_key_prefix {prefix!r} needs a hash tag in a Redis Cluster, which keeps the schedule on one node: "
            f"set it to '{{{prefix.strip(':')}}}:'"
        )
