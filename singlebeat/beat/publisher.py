"""A scheduler's access to the broker: single attempts, none of which may hold up a tick for long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Any

from celery.beat import Scheduler, SchedulingError
from celery.result import denied_join_result
from kombu import Producer
from kombu.transport.virtual import Channel
from kombu.utils.encoding import safe_repr

from ..broker import BrokerConnection
from ..locks.base import RUN_HEADER
from ..outbox import collecting, takes_outbox
from ..rabbitmq_errors import is_of_one_message
from .calendar.recurrence import ENDING
from .failures import NoQueueError, OwnCodeError, causes, is_transient, is_without_queue

if TYPE_CHECKING:
    from celery.result import AsyncResult
    from kombu import Connection, Exchange

    from ..outbox import Outbox
    from .entries.entry import Entry

__all__ = ("BeatProducer", "BrokerAccess")


class BeatProducer(Producer):  # type: ignore[misc]
    """kombu's producer, which says that the message of a run reaches no queue, and lets RabbitMQ say so.

    kombu's own copies a queue for each message, only to find that the queue is declared.
    """

    asked_at: float | None = None  #: monotonic: when it was first to send something since this was reset

    def publish(self, *args: object, **options: Any) -> Any:
        """Send a message.

        Raises:
            NoQueueError: kombu has dropped the message of a run, for which its exchange has no queue.
            Exception: any error of the broker, or RabbitMQ has no queue for the message of a run.
        """
        if self.asked_at is None:
            self.asked_at = monotonic()
        headers, connection = options.get("headers") or {}, self.connection
        may_be_dropped = options.get("mandatory") is False
        if (
            RUN_HEADER in headers
            and options.get("mandatory") is None  # as Celery gives it for a message that names its queue
            and connection.transport.driver_name == "py-amqp"
            # Else the next message learns that this one reaches no queue.
            and connection.transport_options.get("confirm_publish")
            and "x-delay" not in headers  # RabbitMQ's exchange for delayed messages says so of each of them
        ):
            options["mandatory"] = True
        published = super().publish(*args, **options)
        if RUN_HEADER in headers and isinstance(self.channel, Channel) and not may_be_dropped:
            self._check_route(options.get("exchange"), options.get("routing_key"))
        return published

    def _check_route(self, exchange: Exchange | str | None, routing_key: str | None) -> None:
        """Check that one of kombu's own exchanges has given a message to a queue, which it does not say.

        Raises:
            NoQueueError: it has dropped the message.
        """
        name = getattr(exchange, "name", exchange)
        if not name or (kind := self.channel.typeof(name)).type == "fanout":  # that reaches those who listen
            return
        with suppress(KeyError):  # no such exchange
            if kind.lookup(self.channel.get_table(name), name, routing_key or "", None):
                return
        raise NoQueueError

    def maybe_declare(self, entity: Any, retry: bool = False, **retry_policy: object) -> Any:
        """Declare a queue or an exchange if it is not declared already."""
        if entity and entity.can_cache_declaration and hash(entity) in self.connection.declared_entities:
            return False
        return super().maybe_declare(entity, retry, **retry_policy)


class BrokerAccess(Scheduler):  # type: ignore[misc]
    """Celery's scheduler with a broker that may be unreachable."""

    _collecting: Producer | None = None  #: that puts messages into an outbox
    own_code_s = 0.0  #: how many seconds code of the user took in the last ``apply_async``, before anything was sent

    def apply_async(
        self, entry: Entry, producer: Producer | None = None, advance: bool = True, **kwargs: object
    ) -> AsyncResult:
        """Send the task of an entry.

        Raises:
            SchedulingError: it could not be sent.
            OwnCodeError: the same, and no producer of beat has failed.
        """
        self.own_code_s = 0.0
        try:
            producer = producer or self._collecting or self.producer
        except Exception as exc:
            raise SchedulingError(f"Couldn't apply scheduled task {entry.name}: {exc}") from exc
        producer.asked_at, began = None, monotonic()
        try:
            # Beat awaits no result. Else Celery subscribes to each result, for 19 s if the result backend is down.
            with denied_join_result():
                return super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        except SchedulingError as exc:
            if producer.asked_at is None:
                if not is_transient(exc) or self._broker_answers():
                    raise OwnCodeError(*exc.args) from exc.__context__
                producer.asked_at = began  # that code has waited for the broker, over a connection of its own
            errors = (*self.connection.connection_errors, *self.connection.channel_errors)
            # A message for an outbox is only made, and each KeyError is for kombu one of a connection to Redis: the
            # other messages need that channel.
            if producer is not self._collecting and isinstance(exc.__context__, errors):
                if is_of_one_message(exc.__context__):
                    self._forget_channel()
                else:
                    self.forget_broker()
            raise
        except (Exception, *ENDING):
            raise
        except BaseException as exc:  # of the task's own apply_async
            raise SchedulingError(f"Couldn't apply scheduled task {entry.name}: {safe_repr(exc)}") from exc
        finally:
            self.own_code_s = (producer.asked_at or monotonic()) - began

    def _broker_answers(self) -> bool:
        """Return whether the broker answers over a new connection."""
        broker = BrokerConnection(self.app)
        try:
            broker.ensure_connected()
        except Exception:  # a transport's driver may raise anything
            return False
        finally:
            broker.abandon()
        return True

    def publish(self, entry: Entry) -> AsyncResult:
        """Send the task of an entry, and leave the entry's past to Redis.

        Raises:
            SchedulingError: it could not be sent.
        """
        try:
            return self.apply_async(entry, advance=False)
        except SchedulingError as exc:
            if not any(map(is_without_queue, causes(exc))):
                raise
        # Its queue may have been deleted, or its bindings in Redis, since this process has declared it.
        self.connection.declared_entities.clear()
        if isinstance(channel := self.producer.channel, Channel):
            channel.state.bindings.clear()
            channel.state.queue_index.clear()
        return self.apply_async(entry, advance=False)

    @contextmanager
    def collecting(self) -> Iterator[Outbox | None]:
        """Let ``publish`` put each message into an outbox; None if the broker's transport, or kombu, has none.

        Raises:
            Exception: the broker is not reached.
        """
        producer = self.producer
        if not takes_outbox(producer):
            yield None
            return
        self._collecting, outbox = collecting(producer)
        try:
            yield outbox
        finally:
            self._collecting = None

    @cached_property
    def _broker(self) -> BrokerConnection:
        return BrokerConnection(self.app)

    @property
    def connection(self) -> Connection:
        """The broker connection; if the broker hangs, it must not hold up a tick for long."""
        return self._broker.connection

    def _ensure_connected(self) -> Connection:
        return self._broker.ensure_connected()

    @cached_property
    def producer(self) -> Producer:
        """Celery's producer, on a channel of its own: RabbitMQ closes that for one message that it refuses."""
        connection = self._ensure_connected()
        is_rabbitmq = connection.transport.driver_name == "py-amqp"
        return self.Producer(connection.channel() if is_rabbitmq else connection, auto_declare=False)

    def _forget_channel(self) -> None:
        """Forget the channel on which RabbitMQ has refused a message: it may be closed, or hold a late confirmation."""
        producer = self.__dict__.pop("producer", None)
        if producer is not None:
            self.connection.maybe_close_channel(producer.channel)

    def reaches_broker(self) -> bool:
        """Return whether there is a connection to the broker, or can be one."""
        try:
            _ = self.producer
        except Exception:  # a transport's driver may raise anything
            self.forget_broker()
            return False
        return True

    def forget_broker(self) -> None:
        """Forget a broker connection that failed, unless it is blocked; the next message makes a new one."""
        self.__dict__.pop("producer", None)
        self._broker.forget()

    def close(self) -> None:
        """Close the broker connection, as Celery's scheduler does; RabbitMQ replies to no goodbye while it blocks."""
        if self._broker.is_blocked:
            self._broker.abandon()
        Scheduler.close(self)
