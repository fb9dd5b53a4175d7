"""Keeps messages as Redis commands, for a script that writes them together with something else."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

if TYPE_CHECKING:
    from kombu import Producer

    from .clients import RedisClient

__all__ = ("Broker", "Command", "Outbox", "collecting", "database", "senders", "takes_outbox")

#: Seconds for which the marker proves that the broker is a certain server, and after which it is written again: the
#: name of a broker may be given to another server at any time.
MARKER_TTL, MARKED_FOR = 90.0, 30.0

#: Seconds for which messages are sent in two steps after the broker was found to be another server.
ELSEWHERE_FOR = 600.0


class Command(NamedTuple):
    """A command that a message consists of: ``LPUSH``, ``PEXPIRE`` or ``PUBLISH``."""

    name: str
    key: str
    argument: str | int


class Outbox:
    """The publish batch of a producer: kombu gives it each message, and it keeps the commands that would send it.

    Args:
        channel: of the producer, of kombu's Redis transport.
        full: called with the outbox when it has got a message; later messages are sent as if there were no outbox.
    """

    def __init__(self, channel: Any, full: Callable[[Outbox], object]) -> None:
        self.channel, self.commands, self._full = channel, list[Command](), full
        self._is_full = False

    def publish(self, message: object, **kwargs: object) -> None:
        """Keep the commands of a message."""
        if self._is_full:  # the event about the message that was sent
            self.channel.basic_publish(message, **kwargs)
            return
        self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        self._is_full = True
        self._full(self)

    def add(self, name: str, key: str, argument: str | int) -> None:
        """Keep a command; kombu calls it for each queue of a message."""
        self.commands.append(Command(name, f"{self.channel.global_keyprefix}{key}", argument))

    def flush(self) -> None:
        """Do nothing: the script has sent the message."""

    discard = close = flush


def takes_outbox(channel: object) -> bool:
    """Return whether messages over a channel are Redis commands that an outbox can keep: with kombu 5.7 and newer."""
    return hasattr(channel, "create_publish_batch") and hasattr(channel, "global_keyprefix")


@contextmanager
def collecting(producer: Producer, full: Callable[[Outbox], object]) -> Iterator[None]:
    """Let a producer put its next message into an outbox, for ``full`` to send; later ones go out as usual."""
    channel = producer.channel
    channel.create_publish_batch = lambda max_size: Outbox(channel, full)
    try:
        with producer.batch():
            yield
    finally:
        del channel.create_publish_batch


@dataclass(slots=True)
class Broker:
    """What this process knows of the broker's server: whether the locks are on the same one.

    A marker proves it: a string of a random name, which is written over the connection of the broker, and read by the
    script. It stays true behind aliases, sentinels and sockets, and tells two servers apart that were restored from
    the same snapshot.
    """

    marker: str = field(default_factory=lambda: f"singlebeat:marker:{uuid4().hex}")
    value: str = field(default_factory=lambda: uuid4().hex)
    pid: int = field(default_factory=os.getpid)
    key: str = ""  #: of the marker, with the prefix of the broker's keys
    db: int = 0
    marked_at: float = -MARKED_FOR  #: monotonic
    elsewhere_until: float = 0.0  #: monotonic

    def may_be_here(self, now: float) -> bool:
        """Return whether the broker has not been found to be another server lately."""
        return now >= self.elsewhere_until

    def mark(self, channel: Any, now: float, *, anew: bool = False) -> bool:
        """Write the marker over the connection of the broker, unless this was done lately; return whether it did.

        Args:
            anew: the marker may have gone with the broker's data; what was written in this second has not.

        Raises:
            Exception: any error of the broker's driver.
        """
        age = now - self.marked_at
        if age < (1.0 if anew else MARKED_FOR):
            return False
        client: RedisClient = channel.client
        client.set(self.marker, self.value, px=round(MARKER_TTL * 1000))
        self.key, self.db = f"{channel.global_keyprefix}{self.marker}", database(client)
        self.marked_at = now
        return True

    def forget(self, channel: Any) -> None:
        """Delete the marker."""
        channel.client.delete(self.marker)

    def rule_out(self, now: float) -> None:
        """Note that the broker is another server."""
        self.elsewhere_until, self.marked_at = now + ELSEWHERE_FOR, -MARKED_FOR


def database(client: RedisClient) -> int:
    """Return the number of the database of a client of one server."""
    return int(client.connection_pool.connection_kwargs.get("db") or 0)


class Senders:
    """The names of the senders of a process: each sends one request at a time, and the server keeps its last reply."""

    def __init__(self) -> None:
        self._pid, self._free, self._numbers = os.getpid(), deque[str](), count(1)

    @contextmanager
    def one(self) -> Iterator[str]:
        """Lend a name to the requests of one caller; no other thread or greenlet has it meanwhile."""
        if self._pid != os.getpid():  # a forked child has the names of its parent
            self._pid, self._free = os.getpid(), deque()
        try:
            name = self._free.pop()
        except IndexError:
            name = uuid4().hex
        try:
            yield name
        finally:
            self._free.append(name)

    def request(self) -> str:
        """Return the name of a request, which no other request of this process has."""
        return str(next(self._numbers))


senders = Senders()
