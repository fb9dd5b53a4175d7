"""Checks entries: unusable, late or never due, and runs that fail, are skipped or pile up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from ...advice import command_line, listed, redis_command
from ...beat.calendar.clocked import comes_once
from ...beat.keys import Keys
from ...beat.late_places import late_places
from ...beat.schedule import Schedule
from ...beat.silence import silence
from ...beat.status import QUARANTINED_LATER, counted
from ...beat.store.history import History
from ...connections import ResponseError, schedule_client
from ...errors import EntryError
from .finding import MOST_NAMED, Finding, Read
from .servers import visibility_timeout

if TYPE_CHECKING:
    from celery import Celery

    from ...beat.entries.entry import Entry
    from ...beat.store.history import End, Record

#: Maximum number of entries whose own history is read, and of records in the history of all.
MOST_HISTORIES = 10_000

#: How many of the last runs of an entry may wait for their turn.
MOST_WAITING = 10


def check_entries(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for unknown fields, entries that are unusable, late or never due, and runs that fail or are skipped."""
    for entry in schedule.usable:
        if entry.ignored:
            yield Finding("warning", f"entry {entry.name}", entry.ignored)
    for name, why in islice(schedule.unusable.items(), MOST_NAMED):
        yield Finding("problem", f"entry {name}", f"is unusable: {why}; {QUARANTINED_LATER}")
    if len(schedule.unusable) > MOST_NAMED:
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} are unusable (celery singlebeat list)")
    yield from _pauses(schedule)
    yield from _histories(app, schedule)
    if not schedule.state.redbeat_leads:  # RedBeat calculates other times
        yield from _late(app, schedule.usable)
        yield from _over(app, schedule)
    yield from _unplaced(app, datetime.fromtimestamp(schedule.state.now, UTC))
    yield from _unretried(app)
    yield from _unfinished_backfills(app, schedule)


def _unplaced(app: Celery, now: datetime) -> Iterator[Finding]:
    """Check for entries without a place: a problem, unless they would not run with a place either."""
    entries = Schedule(app)
    names = [*islice(entries.without_place(), MOST_NAMED + 1)]
    for name in names[:MOST_NAMED]:
        level = "warning" if _is_idle(entries, name, now) else "problem"
        yield Finding(level, f"entry {name}", f"{entries.no_place(name)}; or delete it")
    if len(names) > MOST_NAMED:
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} have no place in {Keys.of(app).schedule}")


def _unretried(app: Celery) -> Iterator[Finding]:
    """Check for claimed occurrences that no beat tries to send again."""
    entries = Schedule(app)
    names = [*islice(entries.without_retry(), MOST_NAMED + 1)]
    for name in names[:MOST_NAMED]:
        if why := entries.no_retry(name):
            yield Finding("problem", f"entry {name}", f"its run is claimed and not confirmed, and {why}")
    if len(names) > MOST_NAMED:
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} are not in {Keys.of(app).pending}")


def _unfinished_backfills(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for backfills that are running, or whose process has ended before them."""
    names = [entry.name for entry in schedule.usable]
    unfinished = [*islice(Schedule(app).unfinished_backfills(names), MOST_NAMED + 1)]
    for name, why in unfinished[:MOST_NAMED]:
        yield Finding("warning", f"entry {name}", why)
    if len(unfinished) > MOST_NAMED:
        yield Finding("warning", "entries", f"more than these {MOST_NAMED} have an unfinished backfill")


def _is_idle(entries: Schedule, name: str, now: datetime) -> bool:
    """Return whether an entry is paused, disabled or finished."""
    with suppress(EntryError):
        entry = entries.get(name)
        return not entry.enabled or entry.policy.paused or bool(why_over(entry, now))
    return False


def _pauses(schedule: Read) -> Iterator[Finding]:
    """Name the paused and the disabled entries, the pauses of many, and those that cannot be read."""
    if paused := [entry.name for entry in schedule.usable if entry.policy.paused]:
        which = f"{counted(len(paused), 'entry is', 'entries are')} paused by name: {listed(paused)}"
        text = f"{which} (celery singlebeat list --state paused)"
        yield Finding("fine", "entries", text)
    if disabled := [entry.name for entry in schedule.usable if not entry.enabled]:
        text = f"{counted(len(disabled), 'entry is', 'entries are')} disabled: {listed(disabled)}"
        yield Finding("fine", "entries", f"{text} (celery singlebeat list --state disabled)")
    key = Keys.of(schedule.app).pauses
    for selector, why in islice(schedule.state.unreadable_pauses.items(), MOST_NAMED):
        if selector:  # else its key is not a hash, which another part says
            text = f"it pauses nothing, for {why}. To remove it: {redis_command('HDEL', key, selector)}"
            yield Finding("problem", f"pause {selector}", text)
    for pause in schedule.state.pauses[:MOST_NAMED]:
        count = sum(pause.covers(entry.policy) for entry in schedule.usable)
        covered = counted(count, "entry is", "entries are")
        yield Finding("warning", "pause", f"{pause}: {covered} covered. To go on: {pause.resumed_by}")
    if len(schedule.state.pauses) > MOST_NAMED:
        yield Finding(
            "warning", "pause", f"there are {len(schedule.state.pauses)} of many entries (celery singlebeat status)"
        )


def _late(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Check for entries whose place in the schedule is later than their next time."""
    found = [(name, place) for name, place in late_places(app, entries) if place.level != "fine"]
    found.sort(key=lambda each: each[1].level)  # problems before warnings
    for name, place in found[:MOST_NAMED]:
        yield Finding(place.level, f"entry {name}", str(place))
    if found[MOST_NAMED:]:
        text = f"more than these {MOST_NAMED} have places that are later than their times"
        yield Finding(found[MOST_NAMED][1].level, "entries", text)


def _over(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for entries that never run again: those that never ran are a warning, the others have done their work."""
    keys = Keys.of(app)
    # Beat gives them a place that means never; to calculate the times of all entries would take too long.
    parked = schedule_client(app).zrangebyscore(keys.schedule, "-inf", "(0", start=0, num=MOST_HISTORIES)
    names, now = set(map(keys.name, parked)), datetime.fromtimestamp(schedule.state.now, UTC)
    unsent = set(schedule_client(app).zrange(keys.pending, 0, -1))  # their last runs are still to come
    never, done = dict[str, str](), list[str]()
    for entry in schedule.usable:
        most = entry.policy.max_runs  # the place of the last run stays until it has passed
        is_parked = entry.name in names or (most is not None and entry.total_run_count >= most)
        if not is_parked or entry.key in unsent or entry.name in schedule.state.quarantine:
            continue
        why = why_over(entry, now)
        if why and entry.meta.last_run is None:
            never[entry.name] = why
        elif why:
            done.append(f"{entry.name} ({why})")
    for name, own in History(app).own([*never]):
        if own.ends or any(record.is_sent for record in own.decisions):
            done.append(f"{name} ({never.pop(name)})")  # it was triggered, which does not count as one of its times
    once = {entry.name for entry in schedule.usable if comes_once(entry.schedule)}
    for name, why in islice(never.items(), MOST_NAMED):
        advice = f"Correct its times ({command_line('edit', name)}), or delete it"
        if name in once:  # that command sets no such time
            advice = f"If it has not run: {command_line('trigger', name)}. Or delete it, or give it a later "
            advice += "time, on the page or by Schedule.upsert"
        yield Finding("warning", f"entry {name}", f"no run of it is recorded, and none will be: {why}. {advice}")
    if len(never) > MOST_NAMED:
        yield Finding("warning", "entries", f"more than these {MOST_NAMED} never run (celery singlebeat list)")
    if done:
        text = f"{counted(len(done), 'entry is', 'entries are')} finished and never run again: {listed(done)}"
        yield Finding("fine", "entries", text)


def why_over(entry: Entry, now: datetime) -> str:
    """Return why an entry never runs again, empty if it does."""
    with suppress(Exception):  # a user's own schedule may raise anything, which a tick logs
        return entry.timetable.why_over(entry.meta.counts_from, now, count=entry.total_run_count)
    return ""


def _histories(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check the history of each entry for last runs that all failed, were all skipped or wait, and for long runs."""
    entries = schedule.usable
    by_name = {entry.name: entry for entry in entries[:MOST_HISTORIES]}
    recent: Mapping[str, list[Record]] = defaultdict(list)
    with suppress(ResponseError, KeyError, ValueError):  # another part names the key; any program may add records
        for record in History(app).latest(MOST_HISTORIES):
            recent[record.entry].append(record)
    silent, unlocked = dict[str, str](), dict[str, str]()
    longest: dict[str, End] = {}
    for name, own in History(app).own(by_name):
        if own.decisions and own.decisions[0].is_without_lock:
            unlocked[name] = own.decisions[0].reason
        if text := silence(
            by_name[name],
            own,
            recent[name],
            recorded=schedule.workers_seen and not schedule.state.sends_elsewhere,
            backlog=schedule.where_waits,
            survived=schedule.what_survived,
        ):
            silent[name] = text
        if ends := [end for end in own.ends if end.duration is not None]:
            longest[name] = max(ends, key=_duration)
    yield from _piling_up({name: waiting for name in by_name if (waiting := _waiting(recent[name])) > MOST_WAITING})
    for name, why in islice(unlocked.items(), MOST_NAMED):
        yield Finding("problem", f"entry {name}", f"its runs may overlap: the last one was sent {why}")
    for name, text in islice(silent.items(), MOST_NAMED):
        yield Finding("warning", f"entry {name}", f"{text} ({command_line('explain', name)})")
    if len(silent) > MOST_NAMED:
        text = f"the last runs of {len(silent) - MOST_NAMED} more entries all failed, or were skipped"
        yield Finding("warning", "entries", text)
    if len(entries) > MOST_HISTORIES:
        text = f"whether all their runs fail was checked for the first {MOST_HISTORIES} of {len(entries)} only"
        yield Finding("fine", "entries", text)
    if longest:
        name, end = max(longest.items(), key=lambda each: _duration(each[1]))
        yield from _redelivered(app, by_name[name], end)


def _waiting(records: Sequence[Record]) -> int:
    """Return how many of an entry's last runs wait for their turn, since the last one that has ended."""
    sent = (record for record in records if record.is_sent)
    return sum(record.decision == "buffered" for record in takewhile(lambda record: record.end is None, sent))


def _piling_up(waiting: Mapping[str, int]) -> Iterator[Finding]:
    """Name the entries whose runs pile up, those with most runs first."""
    most_first = sorted(waiting.items(), key=lambda each: -each[1])
    for name, count in most_first[:MOST_NAMED]:
        text = (
            f"its last {count} runs wait for their turn, and none of them has ended: they come due faster than they "
            "end, or the run before them hangs. Let it run less often, or choose another overlap "
            f"({command_line('explain', name)})"
        )
        yield Finding("warning", f"entry {name}", text)
    if len(most_first) > MOST_NAMED:
        yield Finding("warning", "entries", f"the runs of {len(most_first) - MOST_NAMED} more entries pile up")


def _duration(end: End) -> float:
    return end.duration or 0.0


def _redelivered(app: Celery, entry: Entry, end: End) -> Iterator[Finding]:
    """Check whether the broker has delivered messages again while the longest run on record ran."""
    timeout, took, task = visibility_timeout(app), _duration(end), app.tasks.get(entry.task)
    if took <= timeout:
        return
    is_late = task.acks_late if task is not None else app.conf.task_acks_late
    what = "its message" if is_late else "messages that its worker had received, and not started yet,"
    text = (
        f"its run that ended at {end.at:%Y-%m-%d %H:%M:%SZ} took {took:.0f} s, longer than the broker's "
        f"visibility_timeout of {timeout:g} s: {what} may have been delivered again meanwhile. "
        "singlebeat refuses such a copy, and a worker without singlebeat runs it. Set visibility_timeout "
        "(broker_transport_options of all workers and beats) to more than the longest run"
    )
    yield Finding("warning", f"entry {entry.name}", text)
