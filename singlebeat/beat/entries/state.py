"""The state of an entry in one word, and its next run; pure, time is an argument."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .entry import Entry
    from .pauses import Pause

__all__ = ("State", "outlook")


class State(StrEnum):
    """The state of an entry."""

    #: It runs at its times.
    ACTIVE = "active"
    #: Its times pass without a run, by a pause of its own or one of many entries.
    PAUSED = "paused"
    #: It is switched off in its definition.
    DISABLED = "disabled"
    #: It has no further time.
    FINISHED = "finished"
    #: Beat cannot use it, and has recorded why.
    QUARANTINED = "quarantined"
    #: Beat cannot use it, and quarantines it when its time comes.
    UNUSABLE = "unusable"


def outlook(entry: Entry, now: datetime, pause: Pause | None) -> tuple[datetime | None, State]:
    """Return the next nominal time of a usable entry, and its state.

    The time is None if there is none, or if a schedule of a user's own raises. It has passed if the entry is overdue.

    Args:
        pause: of many entries, which covers it; None if there is none.
    """
    past, upcoming, fails = entry.meta, None, False
    try:
        runs = entry.timetable.runs(past.counts_from, now, count=past.total_run_count)
        upcoming = next(iter(runs), None)
    except Exception:  # of a user's own schedule; its quarantine record has the reason
        fails = True
    if not entry.enabled:
        return upcoming, State.DISABLED
    if entry.policy.paused or pause is not None:
        return upcoming, State.PAUSED
    return upcoming, State.ACTIVE if upcoming or fails else State.FINISHED
