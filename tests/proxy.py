"""Proxies between clients and Redis servers: one that loses a chosen reply, and links through any weather."""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
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


@dataclass(frozen=True)
class Weather:
    """How a link behaves at present.

    Args:
        delay: seconds that each piece of data takes, one way.
        jitter: up to so many seconds more, different for each piece; the order stays.
        resets: how likely a reply is cut in its middle, and its connection reset.
        passes: False: nothing arrives in either direction, and no connection ends.
        refuses: every new connection is ended at once.
    """

    delay: float = 0.0
    jitter: float = 0.0
    resets: float = 0.0
    passes: bool = True
    refuses: bool = False


class Link:
    """A TCP port of 127.0.0.1 that leads to another one, through any weather; threads may change ``weather``."""

    def __init__(self, target: int, random: Random) -> None:
        self.target, self.weather = target, Weather()
        self.port = 0
        self.accepted = self.cut = 0  #: connections so far
        self._random = random
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._orphans: set[asyncio.StreamWriter] = set()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._pairs)

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def reset(self) -> None:
        """End all connections at once, as a restart of a load balancer does."""
        self._loop.call_soon_threadsafe(lambda: [_abort(end) for pair in list(self._pairs) for end in pair])

    def half_open(self) -> None:
        """Forget all connections: the server has lost them, and the client hears nothing of that."""
        self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        for client, server in list(self._pairs):
            self._orphans.add(client)
            _abort(server)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.weather.refuses:
            _abort(client)
            return
        try:
            from_server, server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _abort(client)
            return
        pair = client, server
        self._pairs.add(pair)
        pumps = [self._pump(reader, server, is_reply=False), self._pump(from_server, client, is_reply=True)]
        tasks = [asyncio.ensure_future(pump) for pump in pumps]
        try:
            with suppress(asyncio.CancelledError):  # asyncio's streams would log it
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if client in self._orphans:
                    await asyncio.wait(tasks[:1])  # until the client ends it; what it sends leads nowhere
        finally:
            self._orphans.discard(client)
            self._pairs.discard(pair)
            for task in tasks:
                task.cancel()
            for end in pair:
                _abort(end)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_reply: bool) -> None:
        on_their_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arrival = asyncio.ensure_future(self._arrive(on_their_way, target, is_reply=is_reply))
        due = 0.0
        try:
            while data := await source.read(1 << 16):
                weather, now = self.weather, asyncio.get_running_loop().time()
                due = max(due, now + weather.delay + self._random.uniform(0, weather.jitter))
                on_their_way.put_nowait((due, data))
            on_their_way.put_nowait((due, b""))
            await arrival
        except OSError:
            pass
        finally:
            arrival.cancel()

    async def _arrive(
        self, on_their_way: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(OSError):
            while True:
                due, data = await on_their_way.get()
                if (left := due - asyncio.get_running_loop().time()) > 0:
                    await asyncio.sleep(left)
                while not self.weather.passes:
                    await asyncio.sleep(0.05)
                if not data:
                    return
                if is_reply and self._random.random() < self.weather.resets:
                    self.cut += 1
                    target.write(data[: len(data) // 2])
                    await target.drain()
                    _abort(target)
                    return
                target.write(data)
                await target.drain()


def _abort(end: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()


class Network:
    """Links, served by a thread for as long as a ``with`` block."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)

    def link(self, name: str, target: int, random: Random) -> Link:
        """Open a link to a port of 127.0.0.1."""
        link = self.links[name] = Link(target, random)
        asyncio.run_coroutine_threadsafe(link.open(), self._loop).result(10)
        return link

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
