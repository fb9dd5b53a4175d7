"""What Sentry and OpenTelemetry must learn of a message that does not simply run; without them it does nothing.

They hear of Celery's signals. None is sent for a run that is refused, and a message that waits for its turn is for
them a new message of the process that sends it again. Neither is imported here: a process that uses one has it loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from .log import Log

__all__ = ("close_check_in", "same_trace")

log = Log(__name__)

#: The headers of Sentry Crons in a message that beat has sent, by the arguments of ``capture_checkin``.
_CHECK_IN = {
    "monitor_slug": "sentry-monitor-slug",
    "check_in_id": "sentry-monitor-check-in-id",
    "monitor_config": "sentry-monitor-config",
}


@contextmanager
def same_trace(headers: Mapping[str, Any]) -> Iterator[None]:
    """Send what is sent in the block as part of the trace that a message belongs to.

    Args:
        headers: of that message.
    """
    with ExitStack() as stack:
        try:
            _enter_trace(stack, headers)
        except Exception as exc:  # of a library, and of headers that anyone may write: the message must be sent
            log.debug("a message is sent again under a new trace", event="trace_lost", reason=exc)
        yield


def _enter_trace(stack: ExitStack, headers: Mapping[str, Any]) -> None:
    propagate, context = sys.modules.get("opentelemetry.propagate"), sys.modules.get("opentelemetry.context")
    if propagate is not None and context is not None:
        stack.callback(context.detach, context.attach(propagate.extract(headers)))
    sentry = sys.modules.get("sentry_sdk")
    if sentry is not None and sentry.is_initialized():
        stack.enter_context(sentry.isolation_scope()).generate_propagation_context(headers)


def close_check_in(headers: Mapping[str, Any]) -> None:
    """Tell Sentry Crons that a run is over which was refused at its start: its monitor would wait for an end.

    It is told as ``ok``: Sentry has no word for skipped, and the equal call tells how its own run ends.

    Args:
        headers: of the message.
    """
    crons = sys.modules.get("sentry_sdk.crons")
    if crons is None or not headers.get(_CHECK_IN["check_in_id"]):
        return
    try:
        given = {name: headers.get(header) for name, header in _CHECK_IN.items()}
        crons.capture_checkin(**given, status=crons.MonitorStatus.OK)
    except Exception as exc:  # of a library, and of headers that anyone may write: no end of a run may be lost for it
        log.debug("a check-in of Sentry stays open", event="check_in_open", reason=exc)
