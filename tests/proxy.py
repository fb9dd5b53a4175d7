"""A proxy between a client and a Redis server that loses a reply: the command was executed, the connection ends."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from singlebeat.lua import Script
from tests.support import RedisServer


class LossyProxy:
    """Passes everything on, for as long as a ``with`` block, but the replies that it is to lose."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.directory = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
        self.path = self.directory / "p"
        self.lost = 0  #: replies so far
        self.meanwhile: Callable[[], object] = lambda: None  #: called when a reply is lost, before the connection ends
        self._marks: tuple[bytes, ...] = ()
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)

    @property
    def url(self) -> str:
        """Its address in the form of redis-py and RedBeat."""
        return f"unix://{self.path}"

    def lose_reply_of(self, script: Script) -> None:
        """Lose the next reply of a script, whichever connection it is called on."""
        self._marks = script.sha.encode(), f"--- {script.name}: ".encode()

    def lose_next_reply(self, command: bytes) -> None:
        """Lose the next reply to a request that holds a text."""
        self._marks = (command,)

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self._listener.listen(50)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each in (self._listener, *self._open):
            _end(each)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self.server.path))
                self._open += client, server
                losing = threading.Event()
                for loop in (self._requests, self._replies):
                    threading.Thread(target=loop, args=(client, server, losing), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, losing: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 20):
                if any(mark in data for mark in self._marks):
                    losing.set()
                server.sendall(data)
        _end(server)

    def _replies(self, client: socket.socket, server: socket.socket, losing: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 20):
                if losing.is_set() and not data.startswith(b"-NOSCRIPT"):
                    self._marks = ()
                    self.lost += 1
                    self.meanwhile()
                    break
                losing.clear()
                client.sendall(data)
        _end(client)
        _end(server)


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
