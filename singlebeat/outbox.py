"""Keeps messages as Redis commands, to send many in one round trip, or by a script together with something else."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from uuid import uuid4

from celery.signals import after_task_publish, before_task_publish

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Producer

    from .clients import RedisClient

__all__ = (
    "ELSEWHERE_FOR",
    "MOST_CHARACTERS",
    "MOST_MESSAGES",
    "SENT_FOR",
    "SENT_KEY",
    "Command",
    "Marker",
    "Outbox",
    "collecting",
    "database",
    "reports_each",
    "senders",
    "size",
    "takes_outbox",
)

#: Seconds for which the marker proves that a connection leads to a certain server, and after which it is written again:
#: the name of a server may be given to another one at any time.
MARKER_TTL, WRITTEN_FOR = 90.0, 30.0

#: Seconds for which there is no one write after a connection was found to lead to another server.
ELSEWHERE_FOR = 600.0

#: Messages, and characters of them, that are written at once: a script keeps the server from all else meanwhile, and
#: without one, a reply that is lost may mean as many copies.
MOST_MESSAGES, MOST_CHARACTERS = 100, 1_000_000

#: Prefix of the keys of the last replies to senders, and seconds for which a reply is kept: longer than any repetition.
SENT_KEY, SENT_FOR = "singlebeat:sent:", 60.0

#: The keys of one write: the Redis type and what each holds; the reference in the docs prints them.
OUTBOX_KEYS: Mapping[str, tuple[str, str]] = {
    "singlebeat:marker:<id>": (
        "string",
        "A marker, which proves that a connection leads to the server of a script. It expires after 90 s.",
    ),
    "singlebeat:sent:<id>": (
        "string",
        "The last reply to a sender, so that a repeated write sends no message twice. It expires after a minute.",
    ),
}


class Command(NamedTuple):
    """A command that a message consists of: ``LPUSH``, ``PEXPIRE`` or ``PUBLISH``."""

    name: str
    key: str
    argument: str | int


class Outbox:
    """Keeps the commands that would send the message of a producer of ``collecting``.

    It keeps one message, and sends the later ones as if there were no outbox: the event about the message, for example.

    Args:
        channel: of the producer, of kombu's Redis transport.
        full: called with the outbox when it has got a message.
    """

    def __init__(self, channel: Any, full: Callable[[Outbox], object] | None = None) -> None:
        self.channel, self.commands, self._full = channel, list[Command](), full
        self.is_full = False
        self._suffix = ""  #: of the queue, for the priority of the message

    def expect(self, full: Callable[[Outbox], object] | None = None) -> None:
        """Keep one more message, and call ``full`` with it."""
        self.commands, self._full, self.is_full = [], full, False

    def take(self, message: Mapping[str, Any], **kwargs: object) -> None:
        """Keep the commands of a message, or send it if the outbox is full."""
        if self.is_full:
            self.channel.basic_publish(message, **kwargs)
            return
        self._suffix = self._suffix_of(message)
        # kombu gives the commands to ``add``, as it does with those of its own batches.
        self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        # Not kept: it mostly leads back to this outbox, a cycle that would keep all entries of a tick.
        full, self._full, self.is_full = self._full, None, True
        if full is not None:
            full(self)

    def add(self, name: str, key: str, argument: str | int) -> None:
        """Keep a command; kombu calls it for each queue of a message."""
        self.commands.append(Command(name, f"{self.channel.global_keyprefix}{key}", argument))

    @property
    def queue(self) -> str:
        """The queue of the message; empty if it has none, or several."""
        queues = {command.key for command in self.commands if command.name == "lpush"}
        if len(queues) != 1:
            return ""
        name: str = queues.pop().removeprefix(self.channel.global_keyprefix)
        return name.removesuffix(self._suffix)

    def _suffix_of(self, message: Mapping[str, Any]) -> str:
        """Return what kombu puts behind the name of a queue for the priority of a message."""
        channel = self.channel
        try:
            number = min(max(int(message["properties"]["priority"]), channel.min_priority), channel.max_priority)
        except (TypeError, ValueError, KeyError):
            number = channel.default_priority
        step = channel.priority(number)
        return f"{channel.sep}{step}" if step else ""

    def send(self, messages: Sequence[Sequence[Command]]) -> list[Exception | None]:
        """Send messages in one round trip; return the server's error for each, None if it has taken the message.

        Raises:
            Exception: any error of the connection. It is unknown then which of the messages are sent.
        """
        prefix = self.channel.global_keyprefix
        with self.channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for command in (command for message in messages for command in message):
                getattr(pipe, command.name)(command.key.removeprefix(prefix), command.argument)
            replies = pipe.execute(raise_on_error=False)
        # The first command of a message puts the message into a queue.
        first = [replies[at] for at in accumulate(map(len, messages[:-1]), initial=0)]
        return [reply if isinstance(reply, Exception) else None for reply in first]


class _OutboxChannel:
    """The channel of an outbox, whose messages go into the outbox."""

    #: kombu's own batches send each message at once, so by ``basic_publish``.
    supports_batch_publish = False

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def basic_publish(self, message: Mapping[str, Any], **kwargs: object) -> None:
        self._outbox.take(message, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox.channel, name)


def size(commands: Sequence[Command]) -> int:
    """Return the characters of a message."""
    return sum(len(str(command.argument)) for command in commands)


def reports_each(app: Celery) -> bool:
    """Return whether Celery reports each message of an app when it is published, to receivers or in an event."""
    return bool(before_task_publish.receivers or after_task_publish.receivers or app.conf.task_send_sent_event)


def takes_outbox(producer: Producer) -> bool:
    """Return whether the messages of a producer are Redis commands that an outbox can keep: with kombu 5.7 and newer.

    Those of a producer whose user collects them in a batch are not.
    """
    if not getattr(producer, "supports_batch_publish", False) or not hasattr(producer.channel, "global_keyprefix"):
        return False
    return getattr(getattr(producer, "_batch_local", None), "current", None) is None


def collecting(producer: Producer, full: Callable[[Outbox], object] | None = None) -> tuple[Producer, Outbox]:
    """Return a copy of a producer whose next message goes into an outbox, for ``full`` to send, and the outbox.

    Later messages of the copy go out as usual. Producer and channel stay as they are: a soft time limit or another
    signal may end the caller at any line, and nothing would undo a change of them.
    """
    outbox, copied = Outbox(producer.channel, full), object.__new__(type(producer))
    copied.__dict__.update(producer.__dict__, _batch_local=local(), revive=_refuse_revival)
    copied.channel = _OutboxChannel(outbox)
    return copied, outbox


def _refuse_revival(channel: object) -> NoReturn:
    """Raise the error because of which kombu retries a publish: over a new channel it would bypass the outbox."""
    raise  # noqa: PLE0704 - kombu calls this while it handles the error


@dataclass(slots=True)
class Marker:
    """The proof that a connection leads to the server of a script: a string that is written over it, and read there.

    Name and value are random. So it stays true behind aliases, sentinels and sockets, and tells two servers apart that
    were restored from the same snapshot.
    """

    name: str = field(default_factory=lambda: f"singlebeat:marker:{uuid4().hex}")
    value: str = field(default_factory=lambda: uuid4().hex)
    pid: int = field(default_factory=os.getpid)
    key: str = ""  #: its name with the prefix of the connection's keys
    db: int = 0
    written_at: float = -WRITTEN_FOR  #: monotonic
    channel: weakref.ref[Any] | None = None  #: over which it was written to the broker
    elsewhere_until: float = 0.0  #: monotonic

    def may_be_here(self, now: float) -> bool:
        """Return whether the connection has not been found to lead to another server lately."""
        return now >= self.elsewhere_until

    def write(self, client: RedisClient, now: float, *, prefix: str = "", anew: bool = False) -> None:
        """Write it over a connection, unless this was done lately.

        Args:
            prefix: that the client puts before its keys.
            anew: it may have gone with the server's data.

        Raises:
            Exception: any error of the server's driver; if the user may not write it, it is also ruled out.
        """
        if self._is_known(now) and not anew:
            return
        try:
            client.set(self.name, self.value, px=round(MARKER_TTL * 1000))
        except Exception as exc:
            # By its name: a program whose broker is another one does not load the driver of Redis.
            if type(exc).__name__ == "NoPermissionError":
                self.rule_out(now)
            raise
        self.key, self.db = f"{prefix}{self.name}", database(client)
        self.written_at = now

    def write_for_broker(self, channel: Any, now: float, *, anew: bool = False) -> None:
        """Write it to the broker of a channel, as ``write`` does; another channel may lead elsewhere."""
        if self.channel is None or self.channel() is not channel:
            self.channel, self.value, self.written_at = weakref.ref(channel), uuid4().hex, -WRITTEN_FOR
        if self._is_known(now) and not anew:  # to make a client takes longer than all else here
            return
        # Not over ``channel.client``: after a question to workers, kombu's BRPOP for more replies is in flight there.
        with channel.conn_or_acquire() as client:
            self.write(client, now, prefix=channel.global_keyprefix, anew=anew)

    def _is_known(self, now: float) -> bool:
        """Return whether it was written lately."""
        return now - self.written_at < WRITTEN_FOR

    def delete(self, client: RedisClient) -> None:
        """Delete it."""
        client.delete(self.name)

    def delete_for_broker(self, channel: Any) -> None:
        """Delete it from the broker of a channel."""
        with channel.conn_or_acquire() as client:
            self.delete(client)

    def rule_out(self, now: float) -> None:
        """Note that the connection leads to another server."""
        self.elsewhere_until, self.written_at = now + ELSEWHERE_FOR, -WRITTEN_FOR


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
        """Return the number of a request, higher than those of all earlier requests of this process."""
        return str(next(self._numbers))


senders = Senders()
