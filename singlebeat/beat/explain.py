"""Explains in sentences why an entry ran, did not run, or will run; reads no server, all facts are arguments."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ..advice import command_line, listed, redis_command, sentence, to_read
from ..locks import seconds_until
from ..locks.redis import RETIRED
from ..log import without_passwords
from ..overlap import Overlap
from ..run_results import MESSAGE_LOST, RAN_ELSEWHERE, RESULT_NOT_STORED
from .asking import asks_code
from .calendar.clocked import comes_once
from .calendar.words import span
from .delivery import PREFETCH, unless
from .entries.policy import EntryPolicy
from .lost_messages import BEFORE_SET_BACK
from .silence import NOT_RECORDED, expiry_of
from .status import APART, NAMESAKE, NO_BEAT, OVERDUE_AFTER, QUARANTINED_LATER, REDBEAT_LEADS, SEE_LOG, to_delete
from .store.probe import refuses_writes

if TYPE_CHECKING:
    from .delivery import Delivery
    from .entries.entry import Entry
    from .entries.occurrence import Occurrence
    from .lost_messages import Found
    from .result_backend import StoredEnd
    from .status import ScheduleStatus
    from .store.history import End, Record

__all__ = ("Facts", "HeldLock", "explain", "record_at")

#: By how much a record may be ahead of a command's time, because the command reads the time before the records.
RECORDED_AHEAD = timedelta(seconds=10)

#: Why no worker answers, however often it is asked.
UNASKED = "Workers answer no question while worker_enable_remote_control is off."

#: From which delay on explain says that an end was recorded late: longer than clocks of hosts should differ.
RECORDED_LATE = timedelta(seconds=10)

#: The least fraction of its lease that a lock has left while its worker lives, which renews it after each third.
RENEWED = 0.6


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that a task holds."""

    key: str
    task_id: str
    state: str  #: queued, running or timed
    left: float | None  #: seconds until it ends if no worker renews it; None if unknown
    lease: float  #: seconds of a whole lease
    renewed: float | None = None  #: seconds since its worker has renewed it last, or has started; None if unknown
    worker: str = ""  #: that has renewed it; empty if unknown
    is_ahead: bool = False  #: its last renewal lies in the future: the server's clock was set back since then
    unusable: str = ""  #: which of its fields another program has spoilt, and what to do; empty if none

    @property
    def seems_abandoned(self) -> bool:
        """Whether its worker has not renewed it for so long that it has probably died, or hangs."""
        return self.state == "running" and self.left is not None and self.left < self.lease * RENEWED

    @property
    def seems_abandoned_in(self) -> float:
        """Seconds until it seems abandoned if its worker has died; 0 if it does now, or if its end is unknown."""
        return max(0.0, math.ceil((self.left or 0.0) - self.lease * RENEWED))

    def left_by(self, answering: Collection[str], last_seen: Mapping[str, float]) -> str:
        """Return why it is held though its task does not run, as a sentence without its full stop.

        Args:
            answering: the workers that have answered all questions, and do not run the task.
            last_seen: the workers that the locks' server has seen, with the seconds since then.
        """
        since = (self.renewed or 0.0) + self.lease  # its worker was seen less than a lease before the run began
        near = (w for w, age in last_seen.items() if age < since or RETIRED <= age < RETIRED + since)
        owners = [self.worker] if self.worker else sorted(near)
        if not owners or not set(owners) <= set(answering):
            return "its worker has probably died, or hangs"
        who = f"{owners[0]} answers" if len(owners) == 1 else f"its worker is one of {listed(owners)}, which answer"
        return (
            f"{who}, so the run has ended there and its lock could not be freed (the log of the worker says why: "
            "lock_kept, not_renewed), or the worker was started again since then"
        )

    @property
    def fixed_time(self) -> str:
        """That it ends by time alone, and when, as a sentence without its full stop; for a timed lock."""
        left = f" in {self.left:.0f} s" if self.left is not None else ""
        return (
            f"task {self.task_id} holds its lock for a fixed time, whether it waits, runs or has ended "
            f"(lock=until_expired, or acquired by a program): the lock ends{left}"
        )

    @property
    def last_renewed(self) -> str:
        """When it was renewed last, and by which worker, in words."""
        by = f" by {self.worker}" if self.worker else ""
        if self.is_ahead:
            return f"{by} {BEFORE_SET_BACK}".strip()
        if self.renewed is not None:
            return f"{self.renewed:.0f} s ago{by}"
        return f"{max(0.0, self.lease - self.left):.0f} s ago{by}" if self.left is not None else "at a time not known"


@dataclass(frozen=True, slots=True)
class Facts:
    """The known facts about one entry."""

    name: str
    entry: Entry | None  #: None if it cannot be read
    state: ScheduleStatus
    records: Sequence[Record]  #: latest first
    locks: Mapping[str, HeldLock]  #: by task id, of the tasks that the record names and no worker runs
    running: Mapping[str, str] | None  #: task id -> worker, of all workers that answer; None if none could be asked
    known_tasks: frozenset[str] | None  #: of all workers that answer; None if none could be asked
    now: datetime
    answering: Collection[str] = ()  #: the workers that have answered all questions
    is_asked: bool = True  #: workers answer questions, by their settings as far as they are known here
    last_seen: Mapping[str, float] = field(default_factory=dict)  #: worker -> seconds since the locks' server saw it
    is_possible: bool = True  #: whether an entry can have that name; its key may be one of the schedule itself
    gone: str = ""  #: that it is not stored, who has removed it, and how to bring it back; empty if it is stored
    unusable: str = ""  #: why beat cannot use it, even before beat has found that; empty if it is usable
    delivery: Delivery | None = None  #: of the queue of its task; None if unknown
    late_place: str = ""  #: why beat does not check it in time, and what to do; empty if its place is not late
    no_place: str = ""  #: why it is never due, and what to do; empty if it has a place in the sorted set
    pending: Occurrence | None = None  #: claimed, and not known to be sent
    backfill: str = ""  #: how far one that is not finished has come, and what to do; empty if there is none
    no_retry: str = ""  #: why no beat tries to send it, and what to do; empty if one does
    refused: str = ""  #: what the schedule's server refuses, which may keep beats from their work
    broker_away: str = ""  #: why the broker takes no messages
    broker_refused: str = ""  #: why the workers could not be asked, though the broker answers
    queue_refused: str = ""  #: why the broker refuses the queue of a pending run
    locks_away: str = ""  #: why the locks' server could not be asked
    locks_refused: str = ""  #: what the locks' server refuses, if it could be asked
    locks_frozen: bool = False  #: it lets no worker renew or free a lock
    keeps_lock_for: float = 0.0  #: seconds for which a run keeps its lock in its queue, if one is sure to
    stored_end: StoredEnd | None = None  #: the end that the result backend has of a run without a recorded end
    results_away: str = ""  #: why the result backend could not be asked
    found: Found | None = None  #: the finding about the message of the lock, if the lock is queued
    lacking: str = ""  #: the queue of that message, which does not have it at this moment; empty if it has, or unknown
    found_in: Delivery | None = None  #: of the queue of that message; None if unknown
    without_singlebeat: Sequence[str] = ()  #: workers that answer, and have no singlebeat or no server for locks
    silent: str = ""  #: that all its last runs failed, or were skipped; empty if not
    wrong_clocks: Sequence[str] = ()  #: sentences about workers whose clocks differ from the server's
    holder_end: End | None = None  #: how the run ended that kept the last run from being sent
    holder_vanished: bool = False  #: no worker has recorded that end, and the run was sent longer ago than a lease
    paused_by: str = ""  #: who has paused it, and when, as far as that is recorded
    other_apps: Sequence[str] = ()  #: the apps that have installed it, if this app has not; none if no app has
    has_namesake: bool = False  #: whether the ``beat_schedule`` of this app has an entry of that name, too
    outdated: str = ""  #: that it is stored otherwise than ``beat_schedule`` gives it; empty if not, or if unknown

    @property
    def unanswered(self) -> str:
        """A sentence about why a worker that lived lately has not answered."""
        if not self.is_asked:
            return UNASKED
        return (
            "That worker did not answer in time: it or its host is busy, it shuts down and ends its last tasks, or it "
            "has died since then. Ask again to know more."
        )


def explain(facts: Facts, at: datetime | None = None) -> Iterator[str]:
    """Yield sentences, the most important ones first, without the passwords of the URLs that they quote.

    Args:
        at: explain the occurrence at or before this moment; by default the last one.
    """
    return map(without_passwords, _sentences(facts, at))


def _sentences(facts: Facts, at: datetime | None) -> Iterator[str]:
    quarantined = facts.state.quarantine.get(facts.name)
    yield from _unusable(facts)
    yield from _leadership(facts)
    yield from _refusals(facts)
    if at is None:
        yield from _pending(facts)
        if facts.backfill:
            yield f"{sentence(facts.backfill)}."
    record = record_at(facts.records, at)
    if at is not None and at.replace(microsecond=0) > facts.now:
        yield f"{_moment(at)} has not come yet: this is about the last run before it."
    if at is not None and facts.entry is not None and quarantined is None:
        yield from _missing_record(facts, record, at)
    if record is not None:
        yield from _decision(facts, record)
    elif at is None and quarantined is None and not facts.unusable:
        yield "Nothing was decided about it so far, or the history has dropped the record (singlebeat_history_limit)."
    if facts.entry is not None and facts.entry.ignored:
        yield f"A warning: {facts.entry.ignored}"
    if facts.entry is not None:
        yield from _task(facts, facts.entry)
        if at is None and quarantined is None and not facts.unusable:
            yield from _outlook(facts, facts.entry)


def _unusable(facts: Facts) -> Iterator[str]:
    """Say why beat cannot use the entry, and whether it is stored otherwise than ``beat_schedule`` gives it."""
    quarantined = facts.state.quarantine.get(facts.name)
    if quarantined is not None:
        yield f"It is quarantined and does not run, since {quarantined['since']}: {quarantined['reason'].rstrip('.')}."
        delete = command_line("delete", facts.name)
        if facts.is_possible and facts.gone:
            yield (
                f"{facts.gone}. If it comes from beat_schedule, the next term installs it: celery singlebeat resign. "
                f"To delete what is left of it: {delete}"
            )
        elif facts.is_possible:
            yield (
                "Correct the entry: a beat checks it again in every tick and runs it then. It is never deleted by "
                f"itself; to delete it: {delete}"
            )
    elif facts.unusable:
        yield f"It is unusable: {facts.unusable.rstrip('.')}. {sentence(QUARANTINED_LATER)}."
    if facts.outdated:
        yield sentence(facts.outdated)


def _whose(facts: Facts, refused: str) -> str:
    """Return that a refusal may concern this process alone; empty if it does not, or if runs are late indeed."""
    if refuses_writes(refused) or facts.pending is not None or facts.state.overdue or not facts.state.works:
        return ""
    return ", as far as beat and workers have the Redis user of this process"


def _owned_elsewhere(facts: Facts) -> str:
    """Return that the entry is of other apps, and what to do."""
    app, leave = facts.other_apps[0], "Leave"
    whose = f"It is an entry of app {listed(facts.other_apps)}, not of {facts.state.app}"
    if not any(map(facts.state.has_beat_of, facts.other_apps)):
        whose += f", and no beat of app {app} is known here. {to_delete(app, [facts.name])}"
        leave = "Else leave"
    if facts.has_namesake:
        whose += f". {sentence(NAMESAKE)}"
    return f"{whose}. {leave} it and its queue to that app: workers of this app drop its messages. {sentence(APART)}."


def _leadership(facts: Facts) -> Iterator[str]:
    """Say what keeps beat from sending runs in time, or that a beat of RedBeat or another app is concerned."""
    if facts.other_apps:
        yield _owned_elsewhere(facts)
    if facts.state.sent_elsewhere:
        yield f"{sentence(facts.state.sent_elsewhere)}."
    for text in facts.state.other_brokers():
        yield f"{sentence(text)}."
    if facts.refused:
        what = "Nothing is sent" if refuses_writes(facts.refused) else "Runs may not be sent or recorded"
        yield f"{what} because of the schedule's server: {facts.refused.rstrip('.')}{_whose(facts, facts.refused)}."
    elif facts.state.why_leaderless:
        yield f"{sentence(facts.state.why_leaderless)}."
    elif not facts.state.works and facts.state.is_shared:
        yield f"No beat works: {NO_BEAT}."
    elif not facts.state.works:
        yield f"No beat leads: {NO_BEAT}."
    elif facts.state.redbeat_silent:
        yield f"{sentence(facts.state.redbeat_silent)}."
    elif facts.state.redbeat_leads:
        yield f"{sentence(REDBEAT_LEADS)}."
    elif facts.state.leader_silent:
        yield f"{sentence(facts.state.leader_silent)}."
    elif facts.state.overdue:
        see = "" if facts.broker_away or facts.locks_away else f" {SEE_LOG}."  # that server may be why
        yield f"Beat is behind: {facts.state.overdue_entries}.{see}"
    if facts.state.lost:
        yield sentence(facts.state.lost)


def _refusals(facts: Facts) -> Iterator[str]:
    """Say what the broker and the locks' server refuse, or that the broker does not answer."""
    if facts.broker_away and facts.pending is None:  # else the claimed run waits for it
        yield (
            f"{sentence(facts.broker_away.rstrip('.'))}. So it is not known what workers do, and nothing is sent if "
            "beat does not reach it either."
        )
    if facts.broker_refused:
        refused = facts.broker_refused.rstrip(".")
        yield f"{sentence(refused)}. So it is not known what workers do; without that right, they may start nothing."
    if facts.locks_refused:
        refused = f"{facts.locks_refused.rstrip('.')}{_whose(facts, facts.locks_refused)}"
        yield f"Runs may wait, or start without their locks, because of {refused}."


def _pending(facts: Facts) -> Iterator[str]:
    """Say that an occurrence is claimed, and which server it waits for."""
    if facts.pending is None:
        return
    when = _moment(datetime.fromtimestamp(facts.pending.nominal, UTC))
    if facts.state.redbeat_leads:
        yield f"The run for {when} is claimed and waits until a beat of singlebeat leads, as task {facts.pending.id}."
        return
    why = "beat tries it again every few seconds, and logs why it could not send or confirm it (event=unreachable, "
    why += "refused or trouble)"
    if facts.broker_away:
        why = f"{facts.broker_away.rstrip('.')}. Beat sends it once that is over"
    elif facts.queue_refused:
        why = f"{facts.queue_refused}. Beat sends it once that is over"
    elif facts.locks_away:
        why = f"{facts.locks_away.rstrip('.')}. Beat sends it once that is over"
    if facts.name in facts.state.quarantine:
        why = "beat sends it once the entry is usable"
    elif facts.no_retry:
        why = facts.no_retry
    yield f"The run for {when} is claimed and not confirmed, as task {facts.pending.id}: {why}."
    if facts.entry is not None and asks_code(facts.entry) and not facts.pending.call:
        yield (
            "Beat asks your code for its arguments or its lock key first, even if the entry is paused. If that code "
            f"hangs, pause the entry and give that run up: {redis_command('HDEL', facts.entry.key, 'pending')}"
        )


def record_at(records: Sequence[Record], at: datetime | None) -> Record | None:
    """Return the record of the occurrence at or before a moment, by default the last record; None if there is none."""
    if at is None:
        return records[0] if records else None
    return max((r for r in records if r.nominal <= at), key=lambda r: r.nominal, default=None)


def _missing_record(facts: Facts, record: Record | None, at: datetime) -> Iterator[str]:
    """Say if the entry had a time of which there is no record."""
    entry = facts.entry
    assert entry is not None  # noqa: S101 - for the type checker
    if record is None:
        first = f"it begins at {_moment(facts.records[-1].nominal)}" if facts.records else "it is empty"
        yield f"The history of this entry says nothing about {_moment(at)}: {first}."
        return
    nominal = entry.timetable.latest(record.nominal, min(at, facts.now))
    if nominal is None:
        return
    later = min((r for r in facts.records if r.nominal > at), key=lambda r: r.nominal, default=None)
    if later is not None and later.kind == "catch_up":
        yield (
            f"Nothing was decided about {_moment(nominal)}: no beat ran then. The next record, for "
            f"{_moment(later.nominal)}, stands for all times that had passed."
        )
    else:
        yield f"Nothing was decided about {_moment(nominal)}, by the schedule that the entry has now."


def _catch_up(facts: Facts, record: Record) -> Iterator[str]:
    """Say what a run has made up for: the last of the times that have passed may be the present one."""
    is_late = (record.at - record.nominal).total_seconds() > OVERDUE_AFTER
    stands = "stands for all times that passed before it"
    if facts.entry is not None and comes_once(facts.entry.schedule):
        stands = ""
    if is_late:
        yield f"It was sent late{stands and ', and '}{stands}."
    elif stands:
        yield f"It {stands}."


def _decision(facts: Facts, record: Record) -> Iterator[str]:
    when = _moment(record.nominal)
    match record.decision:
        case "dispatched" | "buffered":
            how = f": {record.reason}" if record.decision == "dispatched" and record.reason else ""
            yield f"The run for {when} was sent{_recorded_at(facts, record, record.at)} as task {record.task_id}{how}."
            if record.decision == "buffered":
                waited = record.reason.replace("waits for", "waited for", 1)
                yield f"It met an equal call and had to wait for its turn: it {waited}."
            if record.kind == "catch_up":
                yield from _catch_up(facts, record)
            yield from _end(facts, record)
        case "skipped_overlap":
            yield f"The run for {when} was skipped: {_blocking_call(record)} still held the lock ({record.reason})."
            yield from _holder(facts, record.holder)
            lock = facts.locks.get(record.holder)
            if facts.without_singlebeat and lock is not None and lock.state == "queued":
                yield (
                    f"No singlebeat is in {', '.join(facts.without_singlebeat)}, or its settings name no server for "
                    "locks: if that worker has run the task, the lock stays until beat finds that out, and runs are "
                    "skipped meanwhile (celery singlebeat doctor)."
                )
        case "run_before":
            yield f"The run for {when} was not sent once more: {record.reason}."
        case "missed":
            yield f"The run for {when} was missed: {record.reason}."
            yield (
                "It was not sent in time: no beat led then or it was busy, or the broker or the locks' server was "
                "unreachable, or the broker had no queue for its message. No later run is allowed."
            ) + (
                f" Without {setting[1]}, one run would have made up for all that were missed."
                if (setting := re.search("(misfire_grace_time|beat_cron_starting_deadline)", record.reason))
                else ""
            )
        case "paused":
            yield f"The run for {when} was left out: the entry is paused" + (
                f" ({record.reason})." if record.reason else "."
            )
        case "publish_failed":
            yield f"The run for {when} was not sent, and never can be: {record.reason}."
        case "quarantined" if facts.name not in facts.state.quarantine:
            yield f"It was quarantined{_recorded_at(facts, record, record.at)}, and is usable again: {record.reason}."
        case "quarantined":
            pass  # the first sentence says it
        case other:
            yield f"The run for {when}: {other} ({record.reason})."


def _recorded_at(facts: Facts, record: Record, at: datetime) -> str:
    """Return when something was recorded; empty if the schedule's server cannot have shown that time then.

    The ids of records never go back. After that server's clock is set back, ids of new records are too late.
    """
    is_ahead = at > facts.now + RECORDED_AHEAD
    is_before = record.end is not None and record.end.at < record.at - RECORDED_AHEAD
    return "" if is_ahead or is_before else f" at {_moment(at)}"


def _blocking_call(record: Record) -> str:
    """Return which call kept a run from being sent: with a Singleton, it may not come from the entry itself."""
    if record.holder_entry == record.entry:
        return "the one before it"
    if record.holder_entry:
        return f"an equal call by entry {record.holder_entry}"
    return "an equal call"


def _end(facts: Facts, record: Record) -> Iterator[str]:
    end = record.end
    if end is not None:
        yield _ended(end, _recorded_at(facts, record, end.at))
        yield from _about(facts, end.outcome)
    elif facts.running is not None and record.task_id in facts.running:
        yield f"It runs now, on {facts.running[record.task_id]}."
    elif record.task_id in facts.locks or facts.locks_away:
        yield from _holder(facts, record.task_id)
    elif facts.stored_end is not None:
        ended = facts.stored_end
        when = f" at {_moment(ended.at)}" if ended.at is not None else ""
        yield f"Its end is not in the history, but in the result backend: it ended{when} with {ended.how}."
    elif record.is_sent_otherwise:
        yield "So workers record no end of it."
    elif record.decision == "buffered":
        yield from _waits(facts, record)
    else:
        yield f"No end of it was recorded{_why_no_end(facts, record)}"
    yield from _expiry(facts, record)
    yield from _results(facts)


def _results(facts: Facts) -> Iterator[str]:
    """Say that the result backend does not answer."""
    if facts.results_away:
        yield (
            f"{sentence(facts.results_away)}. A worker waits for it after the body of each task, and the error of a "
            "run that fails meanwhile may be that of the backend."
        )


def _ended(end: End, at: str) -> str:
    """Return how a run has ended, as a sentence.

    Args:
        at: when that was recorded, with a space before it; empty if the time is wrong.
    """
    why = f": {end.reason}" if end.reason else ""
    if end.outcome in {MESSAGE_LOST, RAN_ELSEWHERE}:
        what = "Its message was lost" if end.outcome == MESSAGE_LOST else "Its worker left its lock behind"
        return f"{what}, and beat freed its lock{at}{why}."
    later = ""
    if at and _is_late(end):
        at, later = "", f" Its worker learned of that{at}, perhaps because it did not reach its broker before."
    took = f" after {end.duration:.1f} s" if end.duration is not None else ""
    where = f"{at}{took} on {end.worker}" if end.worker else f"{at}{took}"
    if end.outcome == RESULT_NOT_STORED:
        return f"Its body ended{where} without an error, but the result backend did not store its result{why}.{later}"
    return f"It ended{where}, {end.outcome}{why}.{later}"


def _is_late(end: End) -> bool:
    """Return whether the end of a run was recorded long after its body had ended."""
    with suppress(ValueError, TypeError, OverflowError):  # any program may have written the record
        began = datetime.fromisoformat(end.started)
        return end.duration is not None and end.at > began + timedelta(seconds=end.duration) + RECORDED_LATE
    return False


def _why_no_end(facts: Facts, record: Record) -> str:
    """Return the possible causes of a missing end, as the end of a sentence."""
    if readers := _readers_without_singlebeat(facts):
        return (
            f": no singlebeat is in {', '.join(readers)}, or its settings name no server for locks, and no other "
            "worker reads the queue."
        )
    why = ": it waits in its queue, or its worker has died, or has no singlebeat installed"
    if _has_later_run(facts, record):
        why = ", its lock is gone, and later runs have started: its worker has died while it ran, or lacks its broker"
    elif _had_lock(facts, record):
        why = (
            ", and its lock is gone, which it would keep in its queue: its worker has died while it ran, or lacks its "
            "broker, unless an operator has freed the lock"
        )
    return f"{why}. Or it has ended, and that {NOT_RECORDED}."


def _expiry(facts: Facts, record: Record) -> Iterator[str]:
    """Say of a run that has not started, as far as is known, that its message has expired."""
    expires = expiry_of(facts.entry) if facts.entry is not None and record.end is None else None
    lock = facts.locks.get(record.task_id)
    is_started = record.task_id in (facts.running or ()) or facts.stored_end is not None
    if not isinstance(expires, int | float) or is_started or (lock is not None and lock.state == "running"):
        return
    if record.at + timedelta(seconds=expires) < facts.now:
        yield f"If it still waits, it has expired (expires: {expires:g} s): a worker that gets its message drops it."


def _readers_without_singlebeat(facts: Facts) -> Sequence[str]:
    """Return the workers that read the queue of the entry's task; none if one of them has singlebeat."""
    readers = sorted(facts.delivery.readers) if facts.delivery is not None else []
    return readers if set(readers) <= set(facts.without_singlebeat) else []


def _has_later_run(facts: Facts, record: Record) -> bool:
    """Return whether a later run has started, of an entry whose runs take a lock."""
    locked = facts.entry is not None and facts.entry.policy.overlap is not Overlap.ALLOW_ALL
    later = (r for r in facts.records if r.nominal > record.nominal)
    return locked and any(r.end is not None or r.task_id in (facts.running or ()) for r in later)


def _had_lock(facts: Facts, record: Record) -> bool:
    """Return whether a run was sent with a lock that would still be held if it had not started."""
    is_recent = (facts.now - record.at).total_seconds() < facts.keeps_lock_for
    return is_recent and not (record.reason or facts.without_singlebeat or facts.locks_refused)


def _about(facts: Facts, outcome: str) -> Iterator[str]:
    """Say more about an end: which clocks decide that a message has expired, and which of them are wrong."""
    if outcome == "unknown_task":
        yield "That worker does not know the task and has dropped the message."
    if outcome != "expired":
        return
    if over := _expires_at_once(facts):
        yield f"{over}."
        return
    wrong = [*(text for text, _ in facts.state.wrong_clocks(standbys=True)), *facts.wrong_clocks]
    yield "A message expires by two clocks: of the host of the beat, and of the worker's host. " + (
        f"{sentence('; '.join(wrong))}: set up NTP there."
        if wrong
        else "As far as is known, both are right: the message has waited in its queue for too long."
    )


def _expires_at_once(facts: Facts) -> str:
    """Return that no message of an entry can start, because each has expired when it is sent; empty if not."""
    expires = expiry_of(facts.entry) if facts.entry is not None else None
    if isinstance(expires, int | float) and expires <= 0:
        return (
            f"Its messages expire when they are sent (expires: {expires:g} s): none can start. Let expires be the "
            "number of seconds that a message may wait"
        )
    with suppress(ValueError, TypeError):
        if isinstance(expires, str | datetime) and (seconds_until(expires, facts.now) or 0) < 0:
            return (
                f"Its messages expire at {expires}, which has passed: none can start any more. Give it a number of "
                "seconds, as the policy expires, or a later date"
            )
    return ""


def _waits(facts: Facts, record: Record) -> Iterator[str]:
    """Say that a run waits for its turn, and how many other runs of its entry wait, too."""
    open_ = [r for r in facts.records if r.is_sent and r.end is None]
    others = sum(r.task_id not in {record.task_id, *(facts.running or ())} for r in open_)
    beside = f", as do {others} other runs of this entry" if others > 1 else ", as does 1 other run of this entry"
    yield (
        f"It waits for its turn{beside if others else ''}, and has not started as far as is known: a worker that has "
        "died, has no singlebeat installed, or does not reach the schedule's server, records no end."
    )


def _holder(facts: Facts, task_id: str) -> Iterator[str]:
    """Describe the task that holds the entry's lock."""
    lock = facts.locks.get(task_id)
    if facts.running is not None and task_id in facts.running:
        yield f"Task {task_id} runs now, on {facts.running[task_id]}."
        yield from _results(facts)
    elif facts.locks_away:
        yield f"Whether task {task_id} holds a lock is not known: {facts.locks_away}."
    elif lock is None:
        end, how = facts.holder_end, ""
        if end is not None:
            how = f" {_ended(end, f' at {_moment(end.at)}')}"
        elif facts.holder_vanished:
            how = " No worker has recorded its end: its worker has probably died, or lacks its broker."
        yield f"Task {task_id} does not hold the lock any more, so the next run need not wait for it.{how}"
    elif lock.state == "queued":
        yield from _queued(facts, task_id)
    elif lock.state == "timed":
        yield f"{sentence(lock.fixed_time)}."
    elif facts.holder_end is not None and (lock.unusable or lock.seems_abandoned):
        left = f"ends by itself in {lock.left:.0f} s" if lock.left is not None else "ends by itself soon"
        why = lock.unusable or f"the lock {left}. To free it now: {command_line('unlock', task_id)}"
        yield f"Task {task_id} has ended ({facts.holder_end.outcome}), and its lock was left. {sentence(why)}"
    elif lock.unusable:
        yield f"Task {task_id} holds the lock. {sentence(lock.unusable)}"
    else:
        yield f"Task {task_id} {_of_a_started(facts, lock, task_id)}"


def _of_a_started(facts: Facts, lock: HeldLock, task_id: str) -> str:
    """Return what is known of a task that has started, and of which no worker says that it runs."""
    since = f"holds the lock, which was last renewed {lock.last_renewed}"
    if lock.seems_abandoned and facts.locks_frozen:
        return (
            f"{since}: no worker can renew or free it while its server refuses to write, so whether its worker lives "
            "is not known."
        )
    if lock.seems_abandoned and facts.running is not None:
        left = f"in {lock.left:.0f} s" if lock.left is not None else "soon"
        return (
            f"{since}, and no worker that answers runs it: {lock.left_by(facts.answering, facts.last_seen)}. The lock "
            f"ends by itself {left}. To free it now, first make sure that its process is gone, because the run of a "
            f"process that hangs would go on beside the next run: {command_line('unlock', task_id)}"
        )
    if lock.is_ahead and facts.running is not None:
        return (
            f"{since}, and no worker that answers runs it. If its worker has died, the lock ends by itself within "
            f"{lock.lease:.0f} s of the next call that meets it."
        )
    if lock.worker in facts.answering:
        return (
            f"{since}. That worker answers, and did not run it when it was asked: the run began or ended just then, "
            "or the worker was started again since the renewal. Ask again to know more. If it is over, the lock ends "
            f"by itself within {lock.lease:.0f} s."
        )
    if facts.running is not None and not lock.worker:
        return (
            f"{since}, and no worker that answers ran it when asked: it had just begun or ended, or its worker did not "
            "answer. The lock names its worker some seconds after the start. Ask again to know more. If its worker has "
            f"died, the lock ends by itself within {lock.lease:.0f} s."
        )
    if facts.running is not None:
        return (
            f"runs, as far as is known: its lock was renewed {lock.last_renewed}, so its worker lived "
            f"then. {facts.unanswered} If it has died, the lock ends by itself within {lock.lease:.0f} s."
        )
    return f"{since}; the workers could not be asked whether it runs."


def _queued(facts: Facts, task_id: str) -> Iterator[str]:
    """Describe the message of a lock that has not started."""
    found = facts.found
    if found is None:
        yield f"Task {task_id} has not started, and nothing more is known about its message."
        return
    yield f"{sentence(found)}."
    if facts.lacking and not found.outcome:
        yield (
            f"Queue {facts.lacking} does not have that message at this moment: a worker has received it, or it is lost "
            "(a purged queue?)."
        )
    if full := _full_holder(facts):
        others = facts.found_in.readers.keys() - {found.lock.worker} if facts.found_in is not None else ()
        though = f", though other workers may be free. {PREFETCH}" if others else ""
        yield f"{sentence(full)}: the message waits there{though}."
    if facts.found_in is not None and facts.found_in.unread and not found.outcome:
        yield f"{sentence(facts.found_in.unread)}. {sentence(facts.found_in.way_out)}."
    if found.lock.delay and not found.outcome:
        wrong = [text for text, _ in facts.state.wrong_clocks(standbys=True)]
        yield (
            f"It was sent with a countdown of {found.lock.delay:g} s, which counts by the clock of the host that sent "
            "it: a worker holds the message until its own clock shows that time."
        ) + (f" {sentence('; '.join(wrong))}: set up NTP there." if wrong else "")
    if found.in_doubt:
        yield f"If that message is lost, {found.way_out}."
    if found.outcome:
        yield (
            "Beat frees the lock when another run meets it, unless singlebeat_lost_after is None. To free it now: "
            f"{command_line('unlock', task_id)}"
        )


def _full_holder(facts: Facts) -> str:
    """Return that the worker which has received the message of the lock has no free slot; empty if it may have one."""
    found = facts.found
    if found is None or facts.found_in is None or not found.lock.worker or found.outcome or found.lock.delay:
        return ""
    return facts.found_in.full_at(found.lock.worker)


def _task(facts: Facts, entry: Entry) -> Iterator[str]:
    known = facts.known_tasks
    if known == frozenset():
        yield "No worker answers." if facts.is_asked else UNASKED
    elif known is not None and entry.task not in known:
        near = difflib.get_close_matches(entry.task, known, n=1)
        silent = facts.delivery.silent if facts.delivery is not None else ()
        unknown = f"No worker that answers knows the task {entry.task}: {unless(silent, 'know')}"
        unknown += "a worker that gets the message drops it."
        hint = f" Did you mean {near[0]}?" if near else ""
        hint += " Correct the name in the entry, or start a worker that has the task."
        yield unknown if facts.other_apps or silent else f"{unknown}{hint}"
    elif facts.delivery is not None:
        yield from _delivery(facts, facts.delivery, entry)


def _delivery(facts: Facts, delivery: Delivery, entry: Entry) -> Iterator[str]:
    """Say why a message stays in the queue of the entry's task, or is not run there."""
    if delivery.unread and facts.found_in is not None and facts.found_in.queue == delivery.queue:
        return  # it is said of the message that waits
    if delivery.unread:
        hint = f"{to_read(delivery.queue)}, or correct the queue of the entry, or task_routes"
        to_do = "" if facts.other_apps else f" To correct it: {hint}."
        yield f"{sentence(delivery.unread)}: {delivery.unless_read}messages wait there.{to_do}"
    elif wrong := delivery.without(entry.task):
        yield f"{sentence(wrong)}."
    if not _may_wait(facts):
        return
    if limited := delivery.limited(entry.task):
        yield f"{sentence(limited)}: one there waits until its turn has come."
    elif delivery.full and not _full_holder(facts):
        yield f"{sentence(delivery.full)}: a message there waits until one of them has ended."


def _may_wait(facts: Facts) -> bool:
    """Return whether the last run, or the run that kept it from being sent, may wait in its queue."""
    record = facts.records[0] if facts.records else None
    if record is None or record.end is not None or record.decision not in {"dispatched", "buffered", "skipped_overlap"}:
        return False
    return (record.holder if record.decision == "skipped_overlap" else record.task_id) not in (facts.running or ())


def _outlook(facts: Facts, entry: Entry) -> Iterator[str]:
    if facts.silent and not facts.state.redbeat_leads:
        yield f"{sentence(facts.silent).rstrip('.')}."
    pauses = [] if facts.state.redbeat_leads else facts.state.pauses_over(entry.policy)
    for pause in pauses:
        end = "" if pause.until is None else " until then"
        yield f"{sentence(pause)}: its times pass without a run{end}. To go on: {pause.resumed_by}"
    if facts.no_place:
        yield sentence(facts.no_place)
    elif not entry.enabled:
        enable = command_line("edit", entry.name, option="--enable")
        paused = entry.policy.paused and not facts.state.redbeat_leads
        also = f", and {command_line('resume', entry.name)}" if paused else ""
        yield f"It is disabled{' and paused' * paused}{_goes_on(facts, entry, enable + also)}"
    elif entry.policy.paused and facts.state.redbeat_leads:
        yield (
            "It is paused, and runs all the same while a beat of RedBeat leads, unless you disable it: "
            f"{command_line('edit', entry.name, option='--disable')}"
        )
    elif entry.policy.paused:
        note = f" ({entry.policy.note})" if entry.policy.note else ""
        resume = command_line("resume", entry.name)
        yield f"It is paused{facts.paused_by}{note}{_goes_on(facts, entry, resume)}"
    elif not pauses:
        yield from _next_run(facts, entry)


def _goes_on(facts: Facts, entry: Entry, command: str) -> str:
    """Return, as the end of a sentence, how a paused or disabled entry goes on, or that none of its times is to come.

    Args:
        command: that lets it go on.
    """
    if why := entry.timetable.why_over(facts.now, facts.now, count=entry.total_run_count):
        trigger = command_line("trigger", entry.name)
        return f". None of its times is to come, because {why}. To run it all the same: {trigger}"
    return f": its times pass without a run. To go on: {command}"


def _next_run(facts: Facts, entry: Entry) -> Iterator[str]:
    """Say when an entry runs next that is neither paused nor disabled, or why it does not."""
    timetable, since = entry.timetable, entry.meta.counts_from
    if facts.state.redbeat_leads:
        timetable, since = replace(timetable, policy=EntryPolicy()), entry.meta.last_run_at
    upcoming = next(iter(timetable.runs(since, facts.now, count=entry.total_run_count)), None)
    if upcoming is None:
        why = timetable.why_over(since, facts.now, count=entry.total_run_count)
        waits = "After that run it is finished. If you delete it now, that run is not sent."
        yield waits if facts.pending is not None else f"It is finished: it never runs again, because {why}."
    elif facts.late_place and not facts.state.redbeat_leads:
        yield sentence(facts.late_place)
    elif facts.state.waits and since is not None and since > facts.now:
        trigger = command_line("trigger", entry.name)
        yield f"It waits for the clock: {facts.state.waits}. To run it now: {trigger}"
    elif (due := timetable.due(upcoming)) <= facts.now and facts.pending is not None and not facts.state.redbeat_leads:
        yield f"Its next run, for {_moment(upcoming)}, waits until that one is sent."
    elif due <= facts.now:
        asks = ": beat asks your code for its arguments or its lock key when all others are sent" * asks_code(entry)
        yield f"It is due now, for {_moment(upcoming)}{asks}."
    elif over := _expires_at_once(facts):
        yield f"It is sent next for {_moment(upcoming)}. {over}."
    else:
        jitter = f", at {_moment(due)} because of its jitter" if due != upcoming else ""
        yield f"It runs next for {_moment(upcoming)}{jitter}, in {span(round((due - facts.now).total_seconds()))}."


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
