"""A connection of the command ``web``, as uvicorn serves it: bounded in number, and in the time that a client takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import resource
except ImportError:  # Windows: there, a process may open enough files
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import asyncio

__all__ = ("Connection", "most_at_once")

#: Most connections at once, of a process that may open enough files.
MOST = 256

#: Seconds between two checks of a connection: a client has one to two times as long.
CHECKED_EVERY = 10.0


def most_at_once() -> int:
    """Return how many connections may be open at once: a quarter of the files that the process may open, at most.

    Redis and broker need the rest, and connections that are accepted at once before the first of them is counted.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else math.inf
    return MOST if files < 0 else int(max(1, min(MOST, files // 4)))  # below 0: without limit


class Connection(H11Protocol):
    """A connection that is closed if its client sends no whole request, or does not read the answer.

    It is also closed after an answer that its client has not awaited before the next request: no browser does so, and
    thousands of requests, sent in a second, would keep all others waiting for minutes. The client may send what was not
    answered on a new connection (RFC 9112, section 9.3.2).

    Of too many connections, the oldest one whose client is awaited is closed. A new one that has sent nothing yet is
    the youngest of them, so that unfinished requests keep no one from the page.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to check the connection."""
        super().connection_made(transport)
        self._began = self.loop.time()
        self._check(None)
        if len(self.connections) > most_at_once():
            # ``ws="none"``: all of them are of this class.
            awaited = [each for each in self.connections if isinstance(each, Connection) and each._awaited()]
            min(awaited, key=lambda each: each._began)._cut_off()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the checks."""
        super().connection_lost(exc)
        self._next_check.cancel()

    def on_response_complete(self) -> None:
        """Go on with the next request, unless it was sent too early."""
        if self.conn.trailing_data[0]:
            self.transport.close()  # once what was answered is written
        super().on_response_complete()

    def _awaited(self) -> tuple[object, ...] | None:
        """Return what the client has to send or to read, None if nothing; it differs if the client has got on."""
        unread = self.transport.get_write_buffer_size()
        if unread or self.conn.their_state in {h11.IDLE, h11.SEND_BODY}:
            return self.conn.their_state, self.cycle, unread
        return None

    def _check(self, before: tuple[object, ...] | None) -> None:
        """Check the connection again and again; cut it off if the client is awaited for the same as before."""
        awaited = self._awaited()
        if awaited is not None and awaited == before:
            self._cut_off()
        self._next_check = self.loop.call_later(CHECKED_EVERY, self._check, awaited)

    def _cut_off(self) -> None:
        self.connections.discard(self)  # at once, so that it is counted no more
        self.transport.abort()  # ``close`` would wait until the client has read the answer
