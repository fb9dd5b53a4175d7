"""Builds every Redis client of singlebeat from a URL and options."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from kombu.utils.imports import symbol_by_name
from redis import Redis
from redis import exceptions as redis_errors
from redis._parsers import Encoder
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import DataError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from .cluster import Cluster
from .errors import ConfigError
from .server_errors import says_disk_full

if TYPE_CHECKING:
    from redis.backoff import AbstractBackoff

__all__ = (
    "SINGLE",
    "TOPOLOGY",
    "DataError",
    "RedisError",
    "ResponseError",
    "first_home",
    "is_cluster",
    "is_redis",
    "masked",
    "native",
    "private",
    "shared",
    "what_it_does",
)

#: Options that name the servers, as RedBeat and Celery's transports spell them.
TOPOLOGY = frozenset(
    ["cluster", "startup_nodes", "sentinels", "service_name", "master_name", "sentinel_kwargs", "min_other_sentinels"]
)

#: Seconds after which an idle connection is checked before it is used.
HEALTH_CHECK_INTERVAL = 30

#: Errors after which a call is retried: the server is unreachable, or a failover has just changed its role.
PASSING = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.ClusterDownError,
)

SENTINEL_PORT = 26379

#: What to add to the error of a connect by TLS that gets no answer: Redis without TLS waits for the end of a line.
NO_TLS = ": it hangs, or does not speak TLS (redis:// is without TLS)"

_URL = re.compile(r"[\w+.-]+://")
#: Matches up to the last @, because passwords are often not quoted as a URL requires.
_PASSWORD = re.compile(r"(?<=://)([^:@/]*):.*@")
_NEXT_URL = re.compile(r";(?=[\w+-]+://)")
#: The beginnings of URLs of one server.
SINGLE = ("redis://", "rediss://", "unix://", "redis+socket://")
_SENTINEL = ("sentinel://", "redis-sentinel://")
_CLUSTER = ("redis-cluster://",)

#: A client of redis-py, of one server or of a cluster, or the user's own ``app.redbeat_redis``. redis-py's types do not
#: serve: each command returns a union with an awaitable, and the cluster's client has another class than the server's.
RedisClient = Any

#: Keyword arguments of a client, by the names of redis-py, RedBeat and Celery; the client checks their types.
ClientOptions = Mapping[str, Any]

_clients: dict[tuple[int, str, str], RedisClient] = {}


class UnansweredError(redis_errors.TimeoutError):
    """A new connection got no answer in time, so the next one would get none either: server or network hangs."""


class _Retry(Retry):
    """A retry policy that retries a call but not the connect inside it; nesting both made nine attempts of three.

    Args:
        period: seconds during which a call is retried; 0 means that only ``retries`` limits it.
    """

    _busy = False

    def __init__(self, backoff: AbstractBackoff, retries: int, period: float = 0) -> None:
        super().__init__(backoff, -1 if period else retries, PASSING)
        self._period = period

    def call_with_retry(self, do: Callable[[], Any], fail: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``do`` and retry it on failure; redis-py gives each connection its own copy of this policy."""
        if self._busy:
            return do()
        deadline = time.monotonic() + self._period

        def failed(error: Exception, *more: object) -> None:
            fail(error, *more)
            if time.monotonic() > deadline if self._period else isinstance(error, UnansweredError | TimeoutError):
                raise error

        with self.suspended():
            return super().call_with_retry(do, failed, *args, **kwargs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Retry nothing within it."""
        was_busy, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = was_busy


class _Serializer:
    """Packs commands, each into one piece for the socket.

    Redis-py's own makes a piece of each 6 KB and takes two to three times as long; that of hiredis refuses bytes that
    are not UTF-8.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encode: Callable[[object], bytes] = encoder.encode
        self._encoding, self._errors = encoder.encoding, encoder.encoding_errors

    def pack(self, name: str | bytes, *args: Any) -> list[bytes]:
        """Return a command as the server takes it; its name may be several words."""
        encode, encoding, errors = self._encode, self._encoding, self._errors
        words = (name.encode() if isinstance(name, str) else name).split()
        parts = [b"*%d\r\n" % (len(words) + len(args))]
        parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        for arg in args:
            data = arg.encode(encoding, errors) if type(arg) is str else encode(arg)
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
        return [b"".join(parts)]


@contextmanager
def _unanswered(connection: object) -> Iterator[None]:
    try:
        yield
    except UnansweredError:  # of a connect within this one
        raise
    except redis_errors.TimeoutError as exc:
        is_greeted = "connecting" not in str(exc)  # then TLS was agreed upon
        hint = "" if is_greeted or not isinstance(connection, SSLConnection) else NO_TLS
        raise UnansweredError(f"{exc}{hint}") from exc


class _Connecting:
    """A connection whose connect is not retried after a timeout; redis-py's own waits once for each retry."""

    def connect(self: Any) -> None:
        """Connect, and greet the server.

        Raises:
            UnansweredError: the server does not answer in time.
        """
        with _unanswered(self):
            super().connect()  # type: ignore[misc]

    def connect_check_health(self: Any, *args: Any, **kwargs: Any) -> None:
        """Connect as ``connect`` does; redis-py from version 6 on calls it in most places."""
        with _unanswered(self):
            super().connect_check_health(*args, **kwargs)  # type: ignore[misc]

    def _send_ping(self: Any) -> None:
        """Check that the server lives; one whose disk is full refuses a ping, too, and answers what only reads."""
        try:
            super()._send_ping()  # type: ignore[misc]
        except redis_errors.ResponseError as exc:
            if not says_disk_full(exc):
                raise

    def on_connect(self: Any) -> None:
        """Greet the server; redis-py before version 6 also pings it then, which is not retried either."""
        with self.retry.suspended():
            super().on_connect()  # type: ignore[misc]


class _Connection(_Connecting, Connection):
    pass


class _SSLConnection(_Connecting, SSLConnection):
    pass


class _UnixConnection(_Connecting, UnixDomainSocketConnection):
    pass


class _Releasing:
    """A pool that ends the connection of an interrupted call, as by a soft time limit or a signal.

    Its reply may be on its way. Redis-py 8 would give the connection to the next call, which would take that reply for
    its own, and be told that a lock is free.
    """

    def get_connection(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Lend a connection for a call."""
        connection = super().get_connection(*args, **kwargs)  # type: ignore[misc]
        connection.handled = sys.exception()  # the call may be made while another error is handled
        return connection

    def release(self: Any, connection: Any) -> None:
        """Take a connection back."""
        error, handled = sys.exception(), getattr(connection, "handled", None)
        connection.handled = None
        # An error of redis-py means that the whole reply was read, or that the connection has ended already.
        if error is not None and error is not handled and not isinstance(error, RedisError):
            connection.disconnect()
        super().release(connection)  # type: ignore[misc]


class _Pool(_Releasing, ConnectionPool):
    pass


class _SentinelPool(_Releasing, SentinelConnectionPool):
    pass


class _DiscoveringConnection(_Connecting):
    """A connection that asks the sentinels at each connect; redis-py's own retries a call on the last master."""

    def send_packed_command(self: Any, command: object, check_health: bool = True) -> Any:
        """Send a command; if there is no connection, connect to the current master first."""
        if not self._sock:
            self.connect()
        return super().send_packed_command(command, check_health)  # type: ignore[misc]


class _MasterConnection(_DiscoveringConnection, SentinelManagedConnection):
    pass


class _MasterSSLConnection(_DiscoveringConnection, SentinelManagedSSLConnection):
    pass


class _Sentinels(Sentinel):
    """Sentinels whose error for an unknown master is one short line."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the master.

        Raises:
            MasterNotFoundError: no sentinel answers, or no sentinel knows a live master.
        """
        try:
            master: tuple[str, int] = super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError:
            asked = ", ".join("{host}:{port}".format(**s.connection_pool.connection_kwargs) for s in self.sentinels)
            why = f"the sentinels {asked} do not answer, or know no live master"
            raise MasterNotFoundError(f"no master {service_name!r} found: {why}") from None
        return master


def _retry(retries: int, period: float) -> _Retry:
    return _Retry(ExponentialBackoff(cap=0.5, base=0.02), retries, period)


def is_redis(url: object) -> bool:
    """Return whether a URL names a Redis server in any form that Celery, RedBeat or redis-py accepts."""
    return isinstance(url, str) and url.startswith((*SINGLE, *_SENTINEL, *_CLUSTER))


def is_cluster(url: str, options: ClientOptions) -> bool:
    """Return whether URL and options name a Redis Cluster."""
    return bool(options.get("cluster")) or url.startswith(_CLUSTER)


def first_home(url: str) -> str:
    """Return the first URL if several single servers are given.

    Celery fails over from one broker to the next, but the data of singlebeat must stay on one server.
    """
    return _NEXT_URL.split(url)[0] if url.startswith(SINGLE) else url


def masked(url: str) -> str:
    """Return one or several URLs without passwords and options, for logs."""
    return ";".join(_masked(one).partition("?")[0] for one in _NEXT_URL.split(url))


def _masked(url: str) -> str:
    # Without a scheme, the password cannot be distinguished from the rest of the URL before the @.
    return _PASSWORD.sub(r"\1:**@", url) if _URL.match(url) else re.sub(r".*@", "**@", url, flags=re.DOTALL)


def what_it_does(exc: BaseException) -> str:
    """Return ``refuses`` or ``does not answer``: what a Redis server or broker did to cause an error."""
    cause: BaseException | None = exc
    while cause is not None:
        # redis-py raises a ConnectionError for a wrong password. Errors with a reply code are py-amqp's.
        is_answer = isinstance(cause, (ResponseError, redis_errors.AuthenticationError, redis_errors.BusyLoadingError))
        if is_answer or getattr(cause, "reply_code", None):
            return "refuses"
        cause = cause.__cause__  # not __context__: the failed EVALSHA there says nothing about the EVAL that followed
    return "does not answer"


def native(url: str) -> str:
    """Return the URL as redis-py takes it: ``redis+socket://`` is Celery's name for ``unix://``."""
    if not url.startswith("redis+socket://"):
        return url
    parts = urlsplit(url)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if "virtual_host" in query:
        query["db"] = query.pop("virtual_host").strip("/")
    return f"unix://{parts.netloc}{parts.path}" + (f"?{urlencode(query)}" if query else "")


#: The settings that hold the options of a client, by the setting that holds its URL.
_OPTIONS_OF = {
    "redbeat_redis_url": "redbeat_redis_options",
    "singleton_backend_url": "singleton_backend_kwargs",
    "broker_url": "broker_transport_options",
    "result_backend": "result_backend_transport_options",
}


def private(
    url: str, *, timeout: float, retries: int = 2, options: ClientOptions | None = None, setting: str = ""
) -> RedisClient:
    """Return a new client with its own connections; it connects on its first call.

    Args:
        url: URL of one server, or URLs of sentinels or cluster nodes, separated by ``;``.
        timeout: seconds that one connect may take, and that one reply may take.
        retries: number of retries of a call whose connection fails; 0 overrides ``retry_period`` in the options.
        options: further arguments of the client, as in ``redbeat_redis_options``.
        setting: name of the setting that holds the URL, for errors.

    Raises:
        ConfigError: the URL or the options cannot be used; the message masks the password.
    """
    try:
        return _client(_NEXT_URL.split(url), timeout, retries, dict(options or {}), _OPTIONS_OF.get(setting, ""))
    except (ValueError, TypeError, redis_errors.DataError, ImportError, AttributeError) as exc:
        # An invalid port may be part of the password, cut at a character that had to be quoted.
        reason = "its port is not a number (is the password quoted?)" if "Port" in str(exc) else exc
        where = f"{setting}: " if setting else ""
        raise ConfigError(f"{where}cannot use {masked(url)} as a Redis server: {reason}") from None


def shared(url: str, *, timeout: float, options: ClientOptions | None = None, setting: str = "") -> RedisClient:
    """Return the client that this process shares for the same URL, timeout and options."""
    key = (os.getpid(), url, repr(sorted((options or {}).items())) + repr(timeout))
    if key not in _clients:
        _clients.setdefault(key, private(url, timeout=timeout, options=options, setting=setting))
    return _clients[key]


def _client(urls: list[str], timeout: float, retries: int, given: dict[str, Any], given_in: str) -> RedisClient:
    topology = {name: given.pop(name) for name in TOPOLOGY & given.keys()}
    # A negative value makes RedBeat retry for ever. Beat retries at every tick instead; other callers must not block.
    period = max(0.0, float(given.pop("retry_period", None) or 0)) * bool(retries)
    addresses: list[dict[str, Any]] = [parse_url(_plain(url)) for url in urls]  # type: ignore[no-untyped-call]
    for url in urls:
        _check_database(url)
    kinds = [address.pop("connection_class", None) for address in addresses]
    tls = bool(given.pop("ssl", False)) or SSLConnection in kinds
    kind: Any = _UnixConnection if "path" in addresses[0] else _SSLConnection if tls else _Connection
    limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    if kind is not _UnixConnection:
        limits["socket_keepalive"] = True
    kwargs = {
        **limits,
        "health_check_interval": HEALTH_CHECK_INTERVAL,
        "encoding_errors": "surrogateescape",  # bytes that are not UTF-8 must not end a tick
        **given,
        "decode_responses": True,
    }
    account = {name: value for name, value in addresses[0].items() if name not in {"host", "port"}}
    if is_cluster(urls[0], topology):
        nodes = topology.get("startup_nodes") or addresses
        repeated = (lambda do: _retry(0, period).call_with_retry(do, lambda _: None)) if period else None
        return Cluster(
            nodes,
            retries=retries,
            repeated=repeated,
            connection_pool_class=_Pool,
            **_translated({**account, **kwargs, "ssl": tls}),
        )
    kwargs |= {"retry": _retry(retries, period), "retry_on_error": list(PASSING)}
    # A cluster's client accepts no serializer.
    kwargs["command_packer"] = _Serializer(Encoder("utf-8", kwargs["encoding_errors"], False))  # type: ignore[no-untyped-call]
    if urls[0].startswith(_SENTINEL):
        asked = topology.get("sentinels") or [(a.get("host", "localhost"), a.get("port", 0)) for a in addresses]
        name = topology.get("master_name") or topology.get("service_name")
        if not name and urls[0].startswith("sentinel://"):
            where = f" in {given_in}" if given_in else ""
            raise ValueError(f"the option master_name is missing{where}: set it to the master that the sentinels watch")
        # No retries: if a sentinel fails, redis-py asks the next sentinel.
        asking = {**limits, "retry": Retry(NoBackoff(), 0), **(topology.get("sentinel_kwargs") or {})}
        sentinel: Any = _Sentinels(  # type: ignore[no-untyped-call]
            [(host, int(port) or SENTINEL_PORT) for host, port in asked],
            min_other_sentinels=topology.get("min_other_sentinels", 0),
            sentinel_kwargs=asking,
            connection_class=_MasterSSLConnection if tls else _MasterConnection,
            **_translated({**account, **kwargs}),
        )
        client = sentinel.master_for(name or "master", connection_pool_class=_SentinelPool)
    elif len(urls) > 1:
        raise ValueError("several URLs given: name one server, or sentinels, or a cluster")
    else:
        client = Redis.from_pool(_Pool(connection_class=kind, **_translated({**kwargs, **addresses[0]})))
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)  # only a connection checks the options
    return client


def _check_database(url: str) -> None:
    """Check that a URL of a server names its database by a number, if at all: redis-py would take database 0.

    Raises:
        ValueError: it does not.
    """
    parts = urlsplit(url)
    if _plain(url).startswith("unix://") or "db" in parse_qs(parts.query):  # then the path is no database
        return
    name = unquote(parts.path).strip("/")
    if name and not (name.isascii() and name.isdecimal()):
        hint = " (is the password quoted?)" if "@" in name else ""
        raise ValueError(f"its database is not a number{hint}: end the URL with a number, such as /0")


def _plain(url: str) -> str:
    """Return the URL in a form that redis-py can parse."""
    return re.sub(r"^[\w-]+(?=://)", "redis", url) if url.startswith((*_SENTINEL, *_CLUSTER)) else native(url)


def _translated(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a client, with Celery's values translated to redis-py's."""
    required = kwargs.get("ssl_cert_reqs")
    if isinstance(required, str):
        kwargs["ssl_cert_reqs"] = required.removeprefix("CERT_").lower()
    if isinstance(kwargs.get("credential_provider"), str):
        kwargs["credential_provider"] = symbol_by_name(kwargs["credential_provider"])()
    return kwargs
