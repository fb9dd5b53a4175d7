"""The messages that go through RabbitMQ, by a queue that gets a copy of each."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kombu import Connection, Exchange, Queue

from tests.field.journal import Message, message_of
from tests.rabbitmq.server import RabbitMQ

EXCHANGE = Exchange("celery", type="topic", durable=True)
QUEUE = Queue("the tap", EXCHANGE, routing_key="#", durable=True)

#: Seconds from a message to the death of a worker that may have taken it and acknowledged it early.
TAKEN_FOR = 20.0


class Tap:
    """Follows the messages, for as long as the server lives; it reads on where it was when that comes back."""

    def __init__(self, broker: RabbitMQ) -> None:
        self.broker = broker
        self.messages: list[Message] = []
        self._ids: set[str] = set()
        self._stops = threading.Event()
        with Connection(broker.url) as connection:
            QUEUE(connection.default_channel).declare()
        self._thread = threading.Thread(target=self._follow, name="tap", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stops.is_set():
            with (
                suppress(Exception),  # the server is killed at any moment
                Connection(self.broker.url, connect_timeout=2, heartbeat=4) as connection,
                connection.Consumer(QUEUE, callbacks=[self._take], accept=["json"]),
            ):
                while not self._stops.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=1)
                    connection.heartbeat_check()
            self._stops.wait(0.5)

    def _take(self, _: object, received: Any) -> None:
        headers: Mapping[str, Any] = received.headers or {}
        if (message := message_of(headers, time.time())) is not None:
            # What the server delivers again after its death is not one more, if it was here before.
            if not (received.delivery_info.get("redelivered") and message.id in self._ids):
                message.popped = message.kept = message.at
                message.acked = message.at + TAKEN_FOR
                self.messages.append(message)
            self._ids.add(message.id)
        received.ack()

    def read(self) -> None:
        """Do nothing: it follows by itself."""

    def waiting(self) -> int:
        """Return how many messages are in a queue of tasks or with a worker."""
        not_of_tasks = re.compile(rf"{QUEUE.name}|celeryev|.*pidbox")
        return sum(count for name, count in self.broker.messages().items() if not not_of_tasks.match(name))

    def stop(self) -> None:
        """End it."""
        self._stops.set()
        self._thread.join()
