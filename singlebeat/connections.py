"""URL and options to a Redis client: the only constructor of clients."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from .config import Config
from .errors import ConfigError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("RedisError", "is_redis", "lock_url", "masked", "private", "schedule_client", "schedule_url", "shared")

#: Options of RedBeat's ``redbeat_redis_options`` that are not for the client.
REDBEAT_OPTIONS = frozenset(
    {"retry_period", "cluster", "sentinels", "service_name", "sentinel_kwargs", "startup_nodes"}
)

#: Seconds after which a connection that was idle is checked before it is used.
HEALTH_CHECK_INTERVAL = 30

#: Up to the last @, because many a password is not quoted as it should be.
_PASSWORD = re.compile(r"(?<=://)([^:@/]*):.*@")
_NEXT_URL = re.compile(r";(?=[\w+-]+://)")

_clients: dict[tuple[int, str, str], Any] = {}


class _Retry(Retry):
    """Repeats a call, but not the connecting within it as well: that made nine tries of three."""

    _busy = False

    def call_with_retry(self, do: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Call, and call again if that fails; redis-py gives each connection a copy of its own."""
        if self._busy:
            return do()
        self._busy = True
        try:
            return super().call_with_retry(do, *args, **kwargs)
        finally:
            self._busy = False


def is_redis(url: object) -> bool:
    """Tell whether a URL names a Redis server in any of the forms that Celery, RedBeat or redis-py use."""
    schemes = ("redis://", "rediss://", "unix://", "redis+socket://", "redis-sentinel://", "sentinel://")
    return isinstance(url, str) and url.startswith(schemes)


def masked(url: str) -> str:
    """Return the URL, or each of several, without its password and options, for logs."""
    return ";".join(_PASSWORD.sub(r"\1:**@", one).partition("?")[0] for one in _NEXT_URL.split(url))


def native(url: str) -> str:
    """Return the URL as redis-py takes it: ``redis+socket://`` is Celery's name for ``unix://``."""
    if not url.startswith("redis+socket://"):
        return url
    parts = urlsplit(url)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if "virtual_host" in query:
        query["db"] = query.pop("virtual_host").strip("/")
    return f"unix://{parts.netloc}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def private(url: str, *, timeout: float, retries: int = 2, options: Mapping[str, Any] | None = None) -> Any:
    """Return a new client of its own connections.

    Args:
        timeout: seconds that one call may take, for connecting and for the reply alike.
        retries: how often a call is repeated when the connection fails.
        options: further arguments of the client, as in ``redbeat_redis_options``.

    Raises:
        ConfigError: the URL or the options cannot be used; the message masks the password.
    """
    given = dict(options or {})
    own = {name: given.pop(name) for name in REDBEAT_OPTIONS if name in given}
    kwargs: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "health_check_interval": HEALTH_CHECK_INTERVAL,
        "retry": _Retry(ExponentialBackoff(cap=0.5, base=0.02), retries),
        "encoding_errors": "surrogateescape",  # bytes that are no text must not end a tick
        **given,
        "decode_responses": True,
    }
    try:
        if own.get("sentinels"):
            sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
                own["sentinels"], sentinel_kwargs=own.get("sentinel_kwargs"), **kwargs
            )
            return sentinel.master_for(own.get("service_name") or "master")
        client = Redis.from_url(native(url), **kwargs)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # it is the first to look at the options
    except (ValueError, TypeError) as exc:
        # What is no port may be the password, cut at a character that had to be quoted.
        reason = "its port is no number (is the password quoted?)" if "Port" in str(exc) else exc
        raise ConfigError(f"cannot use {masked(url)} as a Redis server: {reason}") from None
    return client


def shared(url: str, *, timeout: float, options: Mapping[str, Any] | None = None) -> Any:
    """Return the client that all users of the same URL and options share in this process."""
    key = (os.getpid(), url, repr(sorted((options or {}).items())) + repr(timeout))
    if key not in _clients:
        _clients.setdefault(key, private(url, timeout=timeout, options=options))
    return _clients[key]


def schedule_url(app: Celery) -> str:
    """Return the URL of the server that keeps the schedule.

    Raises:
        ConfigError: neither ``redbeat_redis_url`` nor ``broker_url`` names a Redis server.
    """
    url = Config.of(app).redbeat_redis_url or app.conf.broker_url
    if not is_redis(url):
        raise ConfigError(f"set redbeat_redis_url to a Redis server: {masked(str(url))} is none")
    return str(url)


def schedule_client(app: Celery, *, timeout: float | None = None) -> Any:
    """Return the client for the schedule: ``app.redbeat_redis`` if the user has set it, as with RedBeat.

    Args:
        timeout: seconds; asks for a client of its own connections that gives up after so long, without retries.
    """
    own = getattr(app, "redbeat_redis", None)
    config = Config.of(app)
    if timeout is not None:
        if own is not None and isinstance(own, Redis):
            return own
        return private(schedule_url(app), timeout=timeout, retries=0, options=_schedule_options(app))
    if own is not None:
        return own
    return shared(schedule_url(app), timeout=config.singlebeat_socket_timeout, options=_schedule_options(app))


def _schedule_options(app: Celery) -> Mapping[str, Any]:
    config = Config.of(app)
    tls = config.redbeat_redis_use_ssl
    if not tls and not config.redbeat_redis_url:
        tls = app.conf.broker_use_ssl or False
    return {**(tls if isinstance(tls, Mapping) else {}), **config.redbeat_redis_options}


def lock_url(app: Celery) -> str:
    """Return the URL of the server that keeps the locks.

    Raises:
        ConfigError: no setting names a Redis server; the message says which one to set.
    """
    config = Config.of(app)
    if config.singleton_backend_url:
        return config.singleton_backend_url
    for url in (app.conf.result_backend, app.conf.broker_url, config.redbeat_redis_url):
        if is_redis(url):
            return str(url)
    raise ConfigError("set singleton_backend_url to a Redis server: neither result_backend nor broker_url is one")
