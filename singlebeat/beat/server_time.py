"""The time by which beat decides, the time of the schedule's server, and how far this host's clock is off."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ..log import Log
from ..lua import Script

if TYPE_CHECKING:
    from ..clients import RedisClient

__all__ = ("DIFFERS_FROM", "READ_CLOCK", "UNFIT_FROM", "ServerTime", "server_now")

log = Log("celery.beat")

#: Asks a server for its time.
READ_CLOCK = Script(__package__, "time")

#: Seconds from which a host's clock differs from the server's, and below which it agrees again.
DIFFERS_FROM, AGREES_BELOW = 2.0, 1.0

#: Seconds from which the clock of a beat's host is so wrong that the beat is not healthy.
UNFIT_FROM = 60.0


class ServerTime:
    """The server's time at any moment: its last reply, advanced by the monotonic clock of this process.

    The time follows the clock of the server, even if this clock is set or another server takes over. It ignores steps
    of this host's own clock. Before the first reply of the server, it is the time of this host.

    Args:
        monotonic: seconds of a clock that is never set.
        wall: seconds since 1970 by the clock of this host.
        quiet: do not log that the clocks differ, because the caller is not a beat.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        quiet: bool = False,
    ) -> None:
        self._monotonic, self._wall, self._quiet = monotonic, wall, quiet
        self._offset = wall() - monotonic()
        self._differs = False
        self.is_known = False
        #: Seconds by which the clock of this host was ahead of the server's at the last reply.
        self.host_ahead = 0.0

    def ask(self, client: RedisClient, key: str) -> None:
        """Ask the server for its time, in a round trip of its own.

        Args:
            key: any key of the schedule.

        Raises:
            RedisError: the server does not answer.
        """
        asked = self.asked()
        self.heard(READ_CLOCK(client, (key,), ()), asked)

    def asked(self) -> float:
        """Return the moment of a question, as ``heard`` needs it."""
        return self._monotonic()

    def heard(self, reply: Sequence[str | int], asked: float) -> None:
        """Record a reply of the server's clock.

        Args:
            reply: of Redis's command TIME: seconds and microseconds.
            asked: the value that ``asked`` returned before the question was sent.
        """
        shown, heard = int(reply[0]) + int(reply[1]) / 1e6, self._monotonic()
        offset = self._offset if self.is_known else self._wall() - heard
        # The server has read its clock at some moment in between, so the offset is between two bounds. The known offset
        # is kept within these bounds: a slow reply does no harm, and a clock that was set is followed at once.
        self._offset = min(max(offset, shown - heard), shown - asked)
        self.is_known = True
        self.host_ahead = self._wall() - (self._offset + heard)
        if not self._quiet:
            self._compare()

    def timestamp(self) -> float:
        """Return the server's time in seconds since 1970."""
        return self._offset + self._monotonic()

    def now(self) -> datetime:
        """Return the server's time."""
        return datetime.fromtimestamp(self.timestamp(), UTC)

    def _compare(self) -> None:
        """Log when the clock of this host begins to differ from the server's, and when it agrees again."""
        off = abs(self.host_ahead)
        if self._differs and off < AGREES_BELOW:
            self._differs = False
            log.warning("beat: The clock of this host agrees with the server's again", event="clock_agrees")
        elif not self._differs and off > DIFFERS_FROM:
            self._differs = True
            log.warning(
                "beat: The clock of this host differs by %(ahead)+.1f s from that of the schedule's server, by which "
                "beat decides: set up NTP on both",
                event="clock_differs",
                ahead=self.host_ahead,
                host=socket.gethostname(),
            )


def server_now(client: RedisClient, key: str) -> datetime:
    """Ask the schedule's server for its time, by which commands and programs decide; its next reply is no earlier.

    Args:
        client: the client for the schedule.
        key: any key of the schedule.

    Raises:
        RedisError: the server does not answer.
    """
    seconds, microseconds = READ_CLOCK(client, (key,), ())
    return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(microseconds))
