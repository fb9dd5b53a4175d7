"""What to do with an entry whose time may have come: pure, time is an argument."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo

from .codec import Meta
from .entry import PARKED
from .occurrence import Decision, Occurrence, Outcome
from .recurrence import following, next_occurrence
from .store import Claim, Stored

__all__ = ("claim_for", "too_late")


def claim_for(stored: Stored, now: datetime, *, zone: tzinfo, prefix: str) -> Claim:
    """Decide what to do with an entry whose score says that it may be due; no I/O.

    Args:
        zone: in which wall clocks are read.
        prefix: of the schedule's keys.
    """
    schedule, last = stored.entry.schedule, stored.meta.last_run_at
    if last is None:  # RedBeat's meaning: it has never run, so it is due now
        nominal = datetime.fromtimestamp(stored.score, UTC) if stored.score > 0 else now
    else:
        first = next_occurrence(schedule, last, zone=zone)
        if first is None or first > now:  # the score was a guess: of another beat, or of another writer
            return Claim(stored, PARKED if first is None else first.timestamp())
        nominal = first
    upcoming = following(schedule, nominal, now, zone=zone)
    next_score = PARKED if upcoming is None else upcoming.timestamp()
    occurrence = Occurrence.of(prefix, stored.entry.name, nominal)
    count = stored.meta.total_run_count
    if not stored.entry.enabled:  # its time goes on, so that it does not run for the past when it is enabled
        decision = Decision(stored.entry.name, stored.entry.task, occurrence, Outcome.PAUSED)
        return Claim(stored, next_score, Meta(nominal, count) if last else None, decision=decision)
    if too_late(stored, nominal.timestamp(), now):
        decision = Decision(stored.entry.name, stored.entry.task, occurrence, Outcome.MISSED)
        return Claim(stored, next_score, Meta(nominal, count), decision=decision)
    return Claim(stored, next_score, Meta(nominal, count + 1), occurrence)


def too_late(stored: Stored, nominal: float, now: datetime) -> bool:
    """Tell whether an occurrence is later than its entry's misfire grace time."""
    grace = stored.policy.misfire_grace_time
    return grace is not None and now.timestamp() - nominal > grace
