"""Connections to the broker whose waits are bounded, on which RabbitMQ confirms each message, and the broker's name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING
from urllib.parse import parse_qs
from weakref import WeakKeyDictionary

from kombu import Connection
from kombu.exceptions import OperationalError

from .config import Config
from .errors import ConfigError

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Producer

__all__ = (
    "BlockedError",
    "BrokerConnection",
    "ConfirmingSender",
    "bounded",
    "broker_errors",
    "broker_name",
    "connection_for_control",
    "is_one_broker",
    "naming_alarms",
    "own_broker",
)


#: The options that bound every wait for the broker, by driver. With TLS, py-amqp bounds only the wait for the
#: confirmation of a message, which does not come while RabbitMQ is short of memory or disk.
LIMITS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "py-amqp": ("read_timeout", "write_timeout"),
}


#: Why RabbitMQ does not confirm a message.
BLOCKED = "RabbitMQ takes no messages until its alarm ends: it is short of memory or disk"


#: Schemes with and without TLS, and names of this host.
_PLAIN, _LOOPBACK = {"rediss": "redis", "amqps": "amqp"}, {"", "localhost", "::1"}

#: The options of a transport that tell apart two brokers at one address.
_APART = ("global_keyprefix", "master_name", "queue_name_prefix")


class BlockedError(ConnectionError):
    """RabbitMQ has an alarm, and does not confirm messages until its end."""


def bounded(connection: Connection, timeout: float) -> Connection:
    """Return a connection to the broker whose waits take no longer than some seconds."""
    options, limits = connection.transport_options, LIMITS.get(connection.transport.driver_name, ())
    for name in limits:
        options.setdefault(name, timeout)
    if options.get("master_name"):
        from redis.backoff import NoBackoff  # noqa: PLC0415 - other brokers need none of it
        from redis.retry import Retry  # noqa: PLC0415 - as above

        # Without retries, in place of redis-py's: if a sentinel fails, the next one is asked.
        asking = {**dict.fromkeys(limits, timeout), "retry": Retry(NoBackoff(), 0)}
        options["sentinel_kwargs"] = {**asking, **(options.get("sentinel_kwargs") or {})}
    return connection


def connection_for_control(app: Celery) -> Connection:
    """Return a connection for commands to the workers of an app (``app.control``), whose waits are bounded.

    RabbitMQ confirms none of them: kombu repeats a command that is not confirmed for ever, on new connections.
    """
    connection = bounded(app.connection_for_write(), Config.of(app).singlebeat_socket_timeout)
    if connection.transport.driver_name == "py-amqp":
        connection.transport_options["confirm_publish"] = False
    return connection


def broker_errors(connection: Connection) -> tuple[type[Exception], ...]:
    """Return all errors of the broker and its driver.

    A handler of these lets those through that a signal raises anywhere: a soft time limit, for example.
    """
    return *connection.connection_errors, *connection.channel_errors, OperationalError


def broker_name(connection: Connection) -> str:
    """Return the name of a broker: transport, host, port and virtual host, with neither user nor password.

    The name of a list of brokers has the names of all. A name is compared with ``is_one_broker``.
    """
    options = connection.transport_options
    apart = "".join(f" {options[name]}" for name in _APART if options.get(name))
    if connection.alt:
        return _joined(tuple(connection.alt), apart)
    info = connection.info()
    return _name(info["transport"], info["hostname"] or "", info["port"], str(info["virtual_host"] or "")) + apart


def own_broker(app: Celery) -> str:
    """Return the name of the broker that an app sends to.

    Raises:
        ConfigError: its URL cannot be read; the message quotes nothing of it, which may be a part of the password.
    """
    try:
        return broker_name(app.pool.connection)
    except ValueError:
        why = "broker_url cannot be read: quote what is special in its password (%23 for #, %2F for /, %40 for @)"
        raise ConfigError(why) from None


def is_one_broker(name: str, other: str) -> bool:
    """Return whether two names are of one broker; a list of brokers is one with each of its members."""
    return not {*name.split(";")}.isdisjoint(other.split(";"))


@lru_cache(maxsize=64)
def _joined(urls: tuple[str, ...], apart: str) -> str:
    return ";".join(sorted({broker_name(Connection(url)) + apart for url in urls}))


@lru_cache(maxsize=64)
def _name(transport: str, host: str, port: int | None, virtual_host: str) -> str:
    transport = _PLAIN.get(transport, transport)
    address, _, query = host.rpartition("://")[2].rpartition("@")[2].partition("?")
    if "://" in host:  # a socket, a file, or the URL of another protocol
        virtual_host = parse_qs(query).get("virtual_host", [virtual_host])[0]
    else:
        address = "127.0.0.1" if address in _LOOPBACK else address
        address = f"{address}:{port}" if port else address
    virtual_host = virtual_host.rpartition("@")[2]  # a password with a slash reaches into it
    if transport in {"redis", "sentinel"}:
        virtual_host = virtual_host.strip("/") or "0"
    return f"{transport}://{address}/{virtual_host}"


@contextmanager
def naming_alarms(app: Celery) -> Iterator[Connection]:
    """Yield a connection that raises BlockedError when it awaits anything after a message in an alarm of RabbitMQ."""
    connection = connection_for_control(app)
    if connection.transport.driver_name == "py-amqp":
        connection.transport_options["on_blocked"] = _raise_blocked
    try:
        yield connection
    except BlockedError:
        _drop(connection)
        raise
    finally:
        connection.release()


def _raise_blocked(_: str) -> None:
    raise BlockedError(BLOCKED)


def _drop(connection: Connection) -> None:
    """Close a connection without the goodbye of the broker, which never comes from a blocked or unreachable one."""
    with suppress(AttributeError):  # only py-amqp awaits it
        connection._connection.collect()


class BrokerConnection:
    """A connection for messages, each of which RabbitMQ confirms; if the broker hangs, its waits are bounded."""

    #: RabbitMQ has an alarm: it reads nothing from our connection until it announces the end there.
    is_blocked = False

    def __init__(self, app: Celery) -> None:
        self.app = app

    @cached_property
    def connection(self) -> Connection:
        """The connection, which is made when it is needed."""
        connection = bounded(self.app.connection_for_write(), Config.of(self.app).singlebeat_socket_timeout)
        if connection.transport.driver_name == "py-amqp":
            options = connection.transport_options
            # Without confirmation, messages after a message that RabbitMQ refuses are lost, and seem to be sent.
            options.setdefault("confirm_publish", True)
            options.update(on_blocked=self._on_blocked, on_unblocked=self._on_unblocked)
        return connection

    def _on_blocked(self, _: str) -> None:
        self.is_blocked = True
        raise BlockedError(BLOCKED)

    def _on_unblocked(self) -> None:
        self.is_blocked = False

    def ensure_connected(self) -> Connection:
        """Return the connection, which may have sent messages before.

        Raises:
            BlockedError: RabbitMQ has not announced the end of its alarm.
            Exception: the broker does not answer.
        """
        if self.is_blocked:
            with suppress(*self.connection.connection_errors):  # a timeout is one of them
                while self.is_blocked and self.connection.connected:
                    self.connection.drain_events(timeout=0)
            if self.is_blocked and self.connection.connected:
                raise BlockedError(BLOCKED)
            # A late confirmation of the message that was held would be taken for that of the next one.
            self.abandon()
        # One attempt, of several brokers one for each: the caller must not wait for the broker, and retries by itself.
        # No timeout bounds the wait for the name of a host, and drivers ask for the name more than once an attempt.
        # The alternatives of sentinels are sentinels, and each attempt asks them all.
        has_sentinels = bool(self.connection.transport_options.get("master_name"))
        retries = 0 if has_sentinels else max(0, len(self.connection.alt) - 1)
        return self.connection.ensure_connection(max_retries=retries, interval_start=0, interval_step=0)

    def forget(self) -> None:
        """Forget a connection that failed; the next message makes a new one.

        A blocked connection stays: RabbitMQ would hold one more message for each new connection, and deliver them all.
        """
        if not self.is_blocked:
            self.abandon()

    def abandon(self) -> None:
        """Close the connection without a goodbye."""
        self.is_blocked = False
        connection = self.__dict__.pop("connection", None)
        if connection is not None:
            _drop(connection)
            connection.release()


class ConfirmingSender:
    """Sends messages of a process to RabbitMQ one by one, and returns when RabbitMQ has confirmed the message."""

    def __init__(self, app: Celery) -> None:
        self._app, self._broker = app, BrokerConnection(app)
        self._producer: Producer | None = None
        self._one_by_one = threading.Lock()

    @classmethod
    def of(cls, app: Celery) -> ConfirmingSender | None:
        """Return the sender of an app in this process; None if the broker is not RabbitMQ, so confirms nothing."""
        if app.producer_pool.connections.connection.transport.driver_name != "py-amqp":
            return None
        # The sender of a parent process stays: its end would shut down the connection of the parent.
        return _senders.setdefault(app, {}).setdefault(os.getpid(), cls(app))

    def send(self, publish: Callable[..., object]) -> None:
        """Call a function that publishes one message, with the options for ``apply_async``.

        Raises:
            BlockedError: RabbitMQ has an alarm.
            Exception: RabbitMQ did not confirm the message in time, or refused it.
        """
        with self._one_by_one:
            try:
                # Without Celery's retries: each would be a new connection, on which RabbitMQ holds one more message.
                timeout = Config.of(self._app).singlebeat_socket_timeout
                publish(producer=self._connected(), retry=False, confirm_timeout=timeout)
            except Exception:
                self._forget()
                raise

    def _connected(self) -> Producer:
        if self._producer is not None and not self._broker.is_blocked:
            try:  # RabbitMQ has closed a connection that was idle for long
                self._broker.connection.drain_events(timeout=0)
            except TimeoutError:
                return self._producer
            except self._broker.connection.connection_errors:
                self._forget()
        connection = self._broker.ensure_connected()
        self._producer = self._producer or self._app.amqp.Producer(connection, auto_declare=False)
        return self._producer

    def _forget(self) -> None:
        self._producer = None
        self._broker.forget()


_senders: WeakKeyDictionary[Celery, dict[int, ConfirmingSender]] = WeakKeyDictionary()
