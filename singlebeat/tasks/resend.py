"""Sends a message to its queue once more, byte for byte, so that it waits there for its turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app.task import Context
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Exchange, Queue
from kombu.serialization import dumps, loads, prepare_accept_content, registry
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    calculate_routing_key,
    level_name,
)

from ..destination import kind_of
from ..errors import ConfigError
from ..locks import seconds_until
from ..locks.base import HEADER, without_deaths

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Message as Delivery

    from ..broker import ConfirmingSender
    from ..locks.base import Headers, Ticket

__all__ = ("MESSAGE", "Message", "bind_to_delay", "delays", "send_again")

#: Where a request keeps its ``Message``.
MESSAGE = "singlebeat_message"

# Celery takes what a request does not know for headers, which each retry passes on.
setattr(Context, MESSAGE, None)

#: Properties that stay as they are; the others are those of one delivery, or are made anew.
KEPT = ("correlation_id", "reply_to", "delivery_mode", "priority", "message_id", "timestamp", "type", "app_id")


class Message(NamedTuple):
    """A message as it came; a printed request, which has the arguments, does not show them once more."""

    content: bytes | str
    content_type: str
    encoding: str
    headers: Headers
    properties: Mapping[str, Any]

    @classmethod
    def of(cls, delivery: Delivery) -> Message:
        """Return the message of a delivery."""
        content = bytes(delivery.body) if isinstance(delivery.body, memoryview) else delivery.body
        properties = {name: value for name in KEPT if (value := delivery.properties.get(name)) is not None}
        return cls(content, delivery.content_type, delivery.content_encoding, delivery.headers, properties)

    def __repr__(self) -> str:
        return f"<{len(self.content)} of {self.content_type}>"


class _Queue(Queue):  # type: ignore[misc]
    """A queue that is declared for each message: an operator may have deleted it and its binding since the last one."""

    can_cache_declaration = False


class _DelayedQueue(_Queue):
    """A queue that is bound to what RabbitMQ has delayed for it, also if only an operator may declare it."""

    def declare(self, nowait: bool = False, channel: Any = None) -> str:
        """Declare and bind the queue; bind it only if it is not to be declared, which needs no right to configure."""
        if self.no_declare:
            self.queue_bind(nowait=nowait, channel=channel)
        return str(super().declare(nowait=nowait, channel=channel))


def send_again(
    app: Celery, request: Context, ticket: Ticket, countdown: float, *, sender: ConfirmingSender | None
) -> None:
    """Send the message of a request again, as it came but for its ETA and its ticket, to the queue it came from.

    No receiver, no route, and no ``apply_async`` or ``send_task`` of the user sees it: they have seen the call when it
    was made, and may choose another user, queue or key for arguments here.

    Args:
        countdown: seconds.
        sender: awaits the confirmation of RabbitMQ; None if nothing does.

    Raises:
        ConfigError: the request does not come from our class of requests, and has no message.
        Exception: the message could not be sent; the error of the broker.
    """
    came: Message | None = getattr(request, MESSAGE)
    if came is None:
        raise ConfigError(f"{request.task}: its own class Request must be derived from that of Singleton")
    is_delayed = delays(app)
    countdown = math.ceil(countdown) if is_delayed else countdown  # RabbitMQ counts whole seconds
    now = datetime.now(UTC)
    changed: dict[str, object] = {
        "eta": (now + timedelta(seconds=countdown)).isoformat(),
        HEADER: replace(ticket.undelivered, pause=countdown).header(),
    }
    headers = {**without_deaths(came.headers), **changed}
    message = {
        "body": _content(app, came, changed),
        "content_type": came.content_type,
        "content_encoding": came.encoding,
        "compression": headers.pop("compression", None),
        "headers": headers,
        **came.properties,
        **_destination(app, ticket, request, int(countdown) if is_delayed else 0),
    }
    if (left := seconds_until(request.expires, now)) is not None:
        message["expiration"] = max(0.0, left)
    if sender is not None:
        sender.send(lambda producer, **options: producer.publish(**message, **options))
        return
    message.pop("declare", None)  # a list in Redis needs none, and RabbitMQ answers none in an alarm
    with app.producer_or_acquire() as producer:
        policy = {"retry": app.conf.task_publish_retry, "retry_policy": {**app.conf.task_publish_retry_policy}}
        producer.publish(**message, **policy)


def _content(app: Celery, came: Message, changed: Mapping[str, object]) -> bytes | str:
    """Return the content of a message; that of protocol 1 has the fields that are headers else."""
    if "task" in came.headers:
        return came.content
    accepted = prepare_accept_content(app.conf.accept_content)
    fields = loads(came.content, came.content_type, came.encoding, accept=accepted)
    content: bytes | str = dumps({**fields, **changed}, serializer=registry.type_to_name[came.content_type])[2]
    return content


def _destination(app: Celery, ticket: Ticket, request: Context, seconds: int) -> Mapping[str, Any]:
    """Return where a message goes, as options of ``Producer.publish``.

    That is the queue alone by which it has come, not the exchange: this may give it to several queues, and each worker
    would get it once more from each other, and so on.

    Args:
        seconds: for which RabbitMQ delays it, if its queue is bound to an exchange that can; 0 if it does not.
    """
    delivery = request.delivery_info or {}
    exchange, key = delivery.get("exchange") or "", delivery.get("routing_key") or ""
    queue = ticket.brought_by or ("" if exchange else key)
    known = app.amqp.queues.get(queue)
    if not queue:  # only the exchange knows it
        return {"exchange": exchange, "routing_key": key}
    kind = kind_of(known)
    if known is None or known.exclusive or kind == "fanout":  # only its own connection may declare it
        return {"exchange": "", "routing_key": queue}
    if not seconds or kind == "direct":
        return {"exchange": "", "routing_key": queue, "declare": [_Queue(**known.as_dict())]}
    bound = _bound_to_delay(known)
    key = calculate_routing_key(seconds, bound.routing_key.removeprefix("#."))
    return {"exchange": level_name(MAX_LEVEL), "routing_key": key, "declare": [bound]}


def bind_to_delay(app: Celery) -> None:
    """Let the queues of a worker get what RabbitMQ delays for them: one may have been declared anew meanwhile."""
    queues = app.amqp.queues.consume_from.values()
    with app.connection_for_write() as connection:
        for queue in queues:
            if queue.exclusive or kind_of(queue) in {"direct", "fanout"}:
                continue
            # Each message that is sent again declares it, too, and its error is logged. An error ends the channel.
            with suppress(Exception), connection.channel() as channel:
                _bound_to_delay(queue)(channel).declare()


def _bound_to_delay(queue: Queue) -> Queue:
    """Return a queue with a binding by which it alone gets a message that RabbitMQ has delayed for it.

    By Celery's own binding each queue gets it whose key matches, and only queues that were known at a worker's start
    have one. A name is one word of the key, else a key like ``#.feeds.#`` of another queue would match it.
    """
    bound, name = _DelayedQueue(**queue.as_dict()), queue.name.replace("%", "%25").replace(".", "%2E")
    bound.exchange, bound.bindings = Exchange(CELERY_DELAYED_DELIVERY_EXCHANGE, type="topic"), set()
    bound.routing_key = f"#.singlebeat.{name}"
    return bound


def delays(app: Celery) -> bool:
    """Return whether RabbitMQ delays the messages of an app, as Celery asks it to if the app has quorum queues."""
    driver = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver)[0])
