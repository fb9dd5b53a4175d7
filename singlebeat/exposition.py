"""The Prometheus metrics and the health of a process: what a metric is, and an HTTP server in a thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import GaugeMetricFamily

__all__ = ("BUILD", "DELAYS", "Answer", "Metric", "metrics_of", "new_registry", "serve")

#: Upper bounds of the histogram buckets for delays, in seconds.
DELAYS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)


#: Seconds that a client may take to send its request, and to read the answer.
PATIENCE = 10.0


class Metric(NamedTuple):
    """One metric of a beat or a worker; the reference in the docs prints it.

    ``type`` is ``counter``, ``gauge`` or ``histogram``, and ``labels`` holds the words of each label by its name.
    """

    name: str
    type: str
    meaning: str
    labels: Mapping[str, Collection[str]] = MappingProxyType({})
    buckets: Sequence[float] = ()  #: upper bounds, of a histogram

    def made(self, registry: CollectorRegistry) -> Any:
        """Return the counter or histogram in a registry; needs ``prometheus_client``."""
        from prometheus_client import Counter, Histogram  # noqa: PLC0415 - an extra

        if self.type == "histogram":
            return Histogram(self.name, self.meaning, buckets=self.buckets, registry=registry)
        counter = Counter(self.name, self.meaning, [*self.labels], registry=registry)
        # Each series begins at 0: increase() misses the first event of a counter that appears with this event.
        for words in product(*self.labels.values()) if self.labels else ():
            counter.labels(*words)
        return counter

    def gauge(self, value: float | Mapping[str, float]) -> GaugeMetricFamily:
        """Return the gauge with a value, or with one for each word of its label; needs ``prometheus_client``."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

        if not isinstance(value, Mapping):
            return GaugeMetricFamily(self.name, self.meaning, value=value)
        family = GaugeMetricFamily(self.name, self.meaning, labels=[*self.labels])
        for word, each in value.items():
            family.add_metric([word], each)
        return family


#: The metric of beats and workers alike.
BUILD = Metric("singlebeat_build_info", "gauge", "1; the label is the version of singlebeat.", {"version": ()})


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
    Info(BUILD.name.removesuffix("_info"), BUILD.meaning, registry=registry).info({"version": __version__})
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
