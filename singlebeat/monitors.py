"""Reports refused runs to Sentry, for which Celery sends no signal; does nothing without it.

The library is not imported here: a process that uses it has it loaded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .log import Log

if TYPE_CHECKING:
    from .locks.base import Headers

__all__ = ("close_check_in",)

log = Log(__name__)

#: The headers of Sentry Crons in a message that beat has sent, by the arguments of ``capture_checkin``.
_CHECK_IN = {
    "monitor_slug": "sentry-monitor-slug",
    "check_in_id": "sentry-monitor-check-in-id",
    "monitor_config": "sentry-monitor-config",
}


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
