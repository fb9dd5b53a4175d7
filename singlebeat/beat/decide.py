"""Decides what to do with an entry that may be due: pure, time is an argument."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo

from celery.schedules import crontab

from .entries.definition import LONGEST_STEP_BACK, Meta
from .entries.entry import PARKED
from .entries.occurrence import Decision, DecisionType, Kind, Occurrence
from .entries.timetable import TICK, Timetable
from .leadership.clock_guard import WRONG_PAST, Jump
from .store.claims import Claim, Stored

__all__ = ("claim_for", "dropped", "is_ever_too_late")

#: Lateness from which an occurrence is a catch-up: a catch-up does not run after the end time of its entry.
CATCH_UP_AFTER = timedelta(minutes=1)


def claim_for(stored: Stored, now: datetime, *, zone: tzinfo, prefix: str, jump: Jump | None = None) -> Claim:
    """Decide what to do with an entry whose score says that it may be due; no I/O.

    Of all nominal times since the last run, only the latest one runs: its run stands for the others.

    Args:
        zone: in which wall clocks are read, if the entry has no zone of its own.
        prefix: prefix of the schedule's keys.
        jump: the last jump of the clock, if one is known.
    """
    policy, past = stored.policy, _known_past(stored.meta, now, jump)
    table = Timetable(stored.entry.name, stored.entry.schedule, policy, zone)
    # An unconfirmed run is counted, and may still be un-counted: then the entry must not be parked yet.
    may_be_less = stored.pending is not None and stored.pending.is_scheduled
    if policy.max_runs is not None and past.total_run_count >= policy.max_runs and not may_be_less:
        return Claim(stored, PARKED)
    since = table.since(past.counts_from)
    if since is not None and since > now + (timedelta() if stored.score == WRONG_PAST else LONGEST_STEP_BACK):
        return _counted_anew(stored, past, table, now)
    nominal = _latest_nominal(stored, past, table, now)
    if nominal is None or nominal > now:  # the score was a guess of another beat or another program
        return Claim(stored, table.score(nominal or table.next(since or now)), past if past != stored.meta else None)
    return _moved_on(stored, past, table, nominal, now, prefix)


def _known_past(past: Meta, now: datetime, jump: Jump | None) -> Meta:
    """Return the past of an entry, without what a beat whose clock was behind has noted of it.

    That beat took the last time for wrong, and let the entry count from its own time, earlier than that one.
    """
    last = past.last_run_at
    if past.since is not None and last is not None and past.since < last <= now and jump and last in jump:
        return replace(past, since=None, ahead=past.ahead if past.ahead is not None and past.ahead > now else None)
    return past


def _latest_nominal(stored: Stored, past: Meta, table: Timetable, now: datetime) -> datetime | None:
    """Return the latest nominal time that has come and was not decided; None or a later time if there is none."""
    since = table.since(past.counts_from)
    if since is None:  # as in RedBeat: the entry has never run, so it is due now
        return table.first_at(datetime.fromtimestamp(stored.score, UTC) if stored.score > 0 else now, now)
    nominal = table.overdue(since, now)
    if nominal is not None and nominal == past.ahead:  # its run came too early to stand for those before it
        return table.latest(since, nominal - TICK) or nominal
    return nominal


def _moved_on(stored: Stored, past: Meta, table: Timetable, nominal: datetime, now: datetime, prefix: str) -> Claim:
    """Decide about a nominal time that has come: it runs, or is recorded as not run; the entry moves on behind it."""
    entry, count, since = stored.entry, past.total_run_count, table.since(past.counts_from)
    next_score, due = table.score(table.next(nominal)), table.due(nominal)
    is_late = now - due > CATCH_UP_AFTER or (since is not None and table.next(since) != nominal)
    kind = Kind.CATCH_UP if is_late else Kind.SCHEDULED
    before = past.last_run
    before = before if before is not None and before < nominal else None  # a clock that was ahead may have sent it
    occurrence = Occurrence.of(prefix, entry.name, nominal, previous=before, kind=kind)
    passed = Meta(nominal, count, ahead=past.ahead if past.ahead is not None and past.ahead > nominal else None)
    if nominal == past.ahead:
        why = "it was sent before, by a clock that was ahead"
        repeated = Decision(entry.name, entry.task, occurrence, DecisionType.RUN_BEFORE, why)
        return Claim(stored, next_score, passed, decision=repeated)
    if (paused := _paused(stored, occurrence, now, due)) is not None:
        # Its time moves on, so that it does not catch up when it resumes; it has still never run.
        passed = passed if past.last_run_at else replace(passed, last_run_at=None, since=nominal)
        return Claim(stored, next_score, passed, decision=paused)
    if (too_late := _missed(stored, occurrence, now, due)) is not None:
        return Claim(stored, next_score, passed, decision=too_late)
    return Claim(stored, next_score, replace(passed, total_run_count=count + 1), occurrence)


def _counted_anew(stored: Stored, past: Meta, table: Timetable, now: datetime) -> Claim:
    """Let an entry count from now whose past comes from a wrong clock."""
    last, pending, upcoming = past.last_run_at, stored.pending, table.next(now)
    if pending is not None and pending.is_scheduled and last is not None and pending.nominal == last.timestamp():
        past = replace(past, sent=last)  # is about to be sent
    past = past.counting_from(now, now)
    if upcoming is not None and upcoming == past.ahead and table.next(upcoming) is None and pending is None:
        return Claim(stored, PARKED)  # its last time has already run, too early
    return Claim(stored, table.score(upcoming), past)


def dropped(stored: Stored, occurrence: Occurrence, now: datetime, *, zone: tzinfo) -> Decision | None:
    """Return the decision about a claimed occurrence that must not be sent any more, None if it may be sent."""
    if not occurrence.is_scheduled:
        return None
    due = nominal = datetime.fromtimestamp(occurrence.nominal, UTC)
    with suppress(Exception):  # a user's own schedule may raise anything; its last occurrence may still be sent
        due = Timetable(stored.entry.name, stored.entry.schedule, stored.policy, zone).due(nominal)
    return _paused(stored, occurrence, now, due) or _missed(stored, occurrence, now, due)


def _paused(stored: Stored, occurrence: Occurrence, now: datetime, due: datetime) -> Decision | None:
    """Return the decision about an occurrence of a paused or disabled entry, None if the entry is neither.

    An entry is paused by its own policy, or by a pause of many entries.
    """
    entry, policy = stored.entry, stored.policy
    if not entry.enabled or policy.paused:
        why = policy.note or ("" if entry.enabled else "disabled")
    else:
        pause = stored.pauses.over(policy, now, due)
        if pause is None:
            return None
        why = pause.reason
    return Decision(entry.name, entry.task, occurrence, DecisionType.PAUSED, why)


def _missed(stored: Stored, occurrence: Occurrence, now: datetime, due: datetime) -> Decision | None:
    """Return the decision about an occurrence that is too late to run, None if it may run."""
    (grace, setting), end = _grace(stored), stored.policy.end_time
    late = now - due
    if grace is not None and late.total_seconds() > grace:
        reason = f"{late.total_seconds():.1f} s late, {setting} is {grace:g} s"
    elif end is not None and now > end and late > CATCH_UP_AFTER:
        reason = f"{late.total_seconds():.1f} s late, its end_time was {end:%Y-%m-%d %H:%M:%SZ}"
    else:
        return None
    return Decision(stored.entry.name, stored.entry.task, occurrence, DecisionType.MISSED, reason)


def _grace(stored: Stored) -> tuple[float | None, str]:
    """Return how many seconds late an occurrence may be, None for any number, and the name of the setting."""
    own = stored.policy.misfire_grace_time
    if own is None and isinstance(stored.entry.schedule, crontab):
        return stored.entry.app.conf.beat_cron_starting_deadline, "beat_cron_starting_deadline"
    return own, "misfire_grace_time"


def is_ever_too_late(stored: Stored) -> bool:
    """Return whether an occurrence of an entry may be too late to run."""
    return _grace(stored)[0] is not None or stored.policy.end_time is not None
