"""A scheduler's access to the broker: single attempts, none of which may hold up a tick for long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from celery.beat import Scheduler, SchedulingError
from celery.result import denied_join_result

from ..config import Config
from ..outbox import collecting, takes_outbox

if TYPE_CHECKING:
    from celery.result import AsyncResult
    from kombu import Connection, Producer

    from ..outbox import Outbox
    from .entries.entry import Entry

__all__ = ("BrokerAccess", "bounded")


#: The options that bound every wait for the broker, by driver. With TLS, py-amqp bounds only the wait for the
#: confirmation of a message, which does not come while RabbitMQ is short of memory or disk.
LIMITS = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "py-amqp": ("read_timeout", "write_timeout"),
}


#: Why RabbitMQ does not confirm a message.
BLOCKED = "RabbitMQ takes no messages until its alarm ends: it is short of memory or disk"


def bounded(connection: Connection, timeout: float) -> Connection:
    """Return a connection to the broker whose waits take no longer than some seconds."""
    for name in LIMITS.get(connection.transport.driver_name, ()):
        connection.transport_options.setdefault(name, timeout)
    return connection


class BrokerAccess(Scheduler):  # type: ignore[misc]
    """Celery's scheduler with a broker that may be unreachable."""

    _collecting: Producer | None = None  #: that puts messages into an outbox
    _blocked = False  #: RabbitMQ has an alarm: it reads nothing from our connection until it announces the end there

    def apply_async(
        self, entry: Entry, producer: Producer | None = None, advance: bool = True, **kwargs: object
    ) -> AsyncResult:
        """Send the task of an entry.

        Raises:
            SchedulingError: it could not be sent.
        """
        try:
            producer = producer or self._collecting or self.producer
        except Exception as exc:
            raise SchedulingError(f"Couldn't apply scheduled task {entry.name}: {exc}") from exc
        try:
            # Beat awaits no result. Else Celery subscribes to each result, for 19 s if the result backend is down.
            with denied_join_result():
                return super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        except SchedulingError as exc:
            errors = (*self.connection.connection_errors, *self.connection.channel_errors)
            if isinstance(exc.__context__, errors):  # RabbitMQ has closed the channel: the next message would fail, too
                self.forget_broker()
            raise

    def publish(self, entry: Entry) -> AsyncResult:
        """Send the task of an entry, and leave the entry's past to Redis.

        Raises:
            SchedulingError: it could not be sent.
        """
        return self.apply_async(entry, advance=False)

    @contextmanager
    def collecting(self) -> Iterator[Outbox]:
        """Let ``publish`` put each message into an outbox.

        Raises:
            NotImplementedError: the broker's transport, or this version of kombu, has no messages for an outbox.
            Exception: the broker is not reached.
        """
        producer = self.producer
        if not takes_outbox(producer):
            raise NotImplementedError("only kombu 5.7 and newer, with Redis as the broker, hands messages over")
        with collecting(producer) as outbox:
            self._collecting = producer
            try:
                yield outbox
            finally:
                self._collecting = None

    @cached_property
    def connection(self) -> Connection:
        """The broker connection; if the broker hangs, it must not hold up a tick for long."""
        connection = bounded(self.app.connection_for_write(), Config.of(self.app).singlebeat_socket_timeout)
        if connection.transport.driver_name == "py-amqp":
            options = connection.transport_options
            # Without confirmation, messages after a message that RabbitMQ refuses are lost, and seem to be sent.
            options.setdefault("confirm_publish", True)
            options.update(on_blocked=self._on_blocked, on_unblocked=self._on_unblocked)
        return connection

    def _on_blocked(self, _: str) -> NoReturn:
        self._blocked = True
        raise ConnectionError(BLOCKED)

    def _on_unblocked(self) -> None:
        self._blocked = False

    def _ensure_connected(self) -> Connection:
        if self._blocked:
            with suppress(*self.connection.connection_errors):  # a timeout is one of them
                while self._blocked and self.connection.connected:
                    self.connection.drain_events(timeout=0)
            if self._blocked and self.connection.connected:
                raise ConnectionError(BLOCKED)
            # A late confirmation of the message that was held would be taken for that of the next one.
            self._abandon()
        # One attempt: a tick must not wait for the broker, and the next tick retries.
        return self.connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)

    def reaches_broker(self) -> bool:
        """Return whether there is a connection to the broker, or can be one."""
        try:
            _ = self.producer
        except Exception:  # a transport's driver may raise anything
            self.forget_broker()
            return False
        return True

    def forget_broker(self) -> None:
        """Forget a broker connection that failed; the next message makes a new one.

        A blocked connection stays: RabbitMQ would hold one more message for each new connection, and deliver them all.
        """
        self.__dict__.pop("producer", None)
        if not self._blocked:
            self._abandon()

    def _abandon(self) -> None:
        self._blocked = False
        connection = self.__dict__.pop("connection", None)
        if connection is not None:
            # py-amqp would wait for the broker's goodbye, which never comes from an unreachable broker.
            with suppress(AttributeError):
                connection._connection.collect()
            connection.release()

    def close(self) -> None:
        """Close the broker connection, as Celery's scheduler does; RabbitMQ replies to no goodbye while it blocks."""
        if self._blocked:
            self._abandon()
        Scheduler.close(self)
