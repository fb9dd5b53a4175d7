"""An HTTP server in a thread, for the Prometheus metrics and the health of a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from . import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ("DELAYS", "Answer", "metrics_of", "new_registry", "serve")

#: Upper bounds of the histogram buckets for delays, in seconds.
DELAYS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)


#: Seconds that a client may take to send its request, and to read the answer.
PATIENCE = 10.0


class Answer(NamedTuple):
    """The answer to one request: status code, content type and body."""

    code: int
    kind: str
    body: bytes

    @classmethod
    def of(cls, text: str, code: int = 200) -> Answer:
        """Return a line of text as an answer."""
        return cls(code, "text/plain; charset=utf-8", f"{text}\n".encode())


def new_registry() -> CollectorRegistry:
    """Return a registry for the metrics of this process; needs ``prometheus_client``."""
    from prometheus_client import CollectorRegistry, Info  # noqa: PLC0415 - an extra

    registry = CollectorRegistry()
    Info("singlebeat_build", "Version of singlebeat.", registry=registry).info({"version": __version__})
    return registry


def metrics_of(registry: CollectorRegistry) -> Answer:
    """Return the metrics of a registry in the text format of Prometheus."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - an extra

    return Answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))


def serve(host: str, port: int, answer: Callable[[str], Answer]) -> ThreadingHTTPServer:
    """Answer GET requests in a thread.

    Args:
        answer: gets the path without its query.

    Raises:
        OSError: the port is in use, or this host does not have the address.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def do_GET(self) -> None:
            code, kind, body = answer(self.path.partition("?")[0])
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of the standard library
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: object) -> None:
            """Ignore a client that disconnects before the answer, as a probe does at its timeout."""
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)

    server = Server((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="singlebeat-metrics", daemon=True).start()
    return server
