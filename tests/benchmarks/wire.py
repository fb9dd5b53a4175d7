"""Counts the commands that all Redis clients of this process send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.connection import AbstractConnection


class Wire:
    """What was sent so far."""

    def __init__(self) -> None:
        self.commands = 0
        self.commands_run = 0  #: by the server, for any client, those inside of scripts included
        self.round_trips = 0

    def add(self, packed: Any) -> None:
        """Count one request, which is one command or many at once."""
        chunks = [packed] if isinstance(packed, str | bytes) else packed
        data = b"".join(chunk.encode() if isinstance(chunk, str) else bytes(chunk) for chunk in chunks)
        self.round_trips += 1
        self.commands += _commands(data)


def _commands(data: bytes) -> int:
    """Count commands in Redis's protocol: each is ``*parts``, and each part is ``$length`` and so many bytes."""
    count = at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        parts, at = int(data[at + 1 : end]), end + 2
        for _ in range(parts):
            end = data.index(b"\r\n", at)
            at = end + 2 + int(data[at + 1 : end]) + 2
        count += 1
    return count


@contextmanager
def counted(observer: Redis | None = None) -> Iterator[Wire]:
    """Count what this thread sends, and not the renewals that other threads send meanwhile.

    Args:
        observer: a client, to ask the server as well what it has run.
    """
    before = _run(observer)
    wire, send, thread = Wire(), AbstractConnection.send_packed_command, threading.get_ident()

    def counting(self: Any, command: Any, check_health: bool = True) -> Any:
        if threading.get_ident() == thread:
            wire.add(command)
        return send(self, command, check_health)

    AbstractConnection.send_packed_command = counting
    try:
        yield wire
    finally:
        AbstractConnection.send_packed_command = send
        wire.commands_run = _run(observer) - before


def _run(observer: Redis | None) -> int:
    if observer is None:
        return 0
    stats = observer.info("commandstats")
    return sum(stats[name]["calls"] for name in stats if name != "cmdstat_info")
