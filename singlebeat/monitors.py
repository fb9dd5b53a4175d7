"""Reports refused runs and resent messages to Sentry and OpenTelemetry; does nothing without them.

Both libraries listen to Celery's signals. Celery sends no signal for a refused run. A message that waits for its turn
is sent again, and would begin a new trace. Neither library is imported here: a process that uses it has it loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from .log import Log

if TYPE_CHECKING:
    from .locks.base import Headers

__all__ = ("close_check_in", "same_trace")

log = Log(__name__)

#: The headers of Sentry Crons in a message that beat has sent, by the arguments of ``capture_checkin``.
_CHECK_IN = {
    "monitor_slug": "sentry-monitor-slug",
    "check_in_id": "sentry-monitor-check-in-id",
    "monitor_config": "sentry-monitor-config",
}


@contextmanager
def same_trace(headers: Headers) -> Iterator[None]:
    """Send the messages of the block as part of the trace of another message.

    Args:
        headers: headers of that other message.
    """
    with ExitStack() as stack:
        try:
            _enter_trace(stack, headers)
        except Exception as exc:  # of a library, or of forged headers; the message must be sent
            log.debug("a message is sent again under a new trace", event="trace_lost", reason=exc)
        yield


def _enter_trace(stack: ExitStack, headers: Headers) -> None:
    propagate, context = sys.modules.get("opentelemetry.propagate"), sys.modules.get("opentelemetry.context")
    if propagate is not None and context is not None:
        stack.callback(context.detach, context.attach(propagate.extract(headers)))
    sentry = sys.modules.get("sentry_sdk")
    if sentry is not None and sentry.is_initialized():
        stack.enter_context(sentry.isolation_scope()).generate_propagation_context(headers)


def close_check_in(headers: Headers) -> None:
    """Close the Sentry Crons check-in of a run that was refused at its start; the monitor would wait for its end.

    The status is ``ok``: Sentry has no status for skipped runs, and the run of the other call reports its own end.

    Args:
        headers: headers of the refused message.
    """
    crons = sys.modules.get("sentry_sdk.crons")
    if crons is None or not headers.get(_CHECK_IN["check_in_id"]):
        return
    try:
        given = {name: headers.get(header) for name, header in _CHECK_IN.items()}
        crons.capture_checkin(**given, status=crons.MonitorStatus.OK)
    except Exception as exc:  # of a library, or of forged headers; the end of the run must still be recorded
        log.debug("a check-in of Sentry stays open", event="check_in_open", reason=exc)
