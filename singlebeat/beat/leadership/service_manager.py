"""Reports to the service manager, such as systemd, that a beat has started, works and stops."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

__all__ = ("ServiceManager",)

#: Shortest time in seconds between two reports of progress.
INTERVAL = 1.0


class ServiceManager:
    """The service manager that has started this process; its protocol is that of ``sd_notify(3)``.

    Args:
        address: of its socket, a path or an abstract name with ``@`` before it; empty if it awaits no reports.
    """

    def __init__(self, address: str) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._is_ready = False
        self._next_at = 0.0

    @classmethod
    def of_environment(cls) -> ServiceManager:
        """Return the one that ``NOTIFY_SOCKET`` names."""
        return cls(os.environ.get("NOTIFY_SOCKET", ""))

    def progress(self) -> None:
        """Report that work goes on, once a second at most; the first call reports that this process is ready."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + INTERVAL
            self._send("WATCHDOG=1" if self._is_ready else "READY=1\nWATCHDOG=1")
            self._is_ready = True

    def stop(self) -> None:
        """Report that this process stops, if it was ready; may be called in a signal handler, and repeatedly."""
        if self._is_ready:
            self._is_ready, self._next_at = False, float("inf")
            self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # Without a report the service manager itself logs what it has waited for. A full socket must not block a tick.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), self._address)
