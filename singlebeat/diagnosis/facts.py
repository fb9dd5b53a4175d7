"""Gathers the facts from which an entry is explained: from the schedule, the locks, the workers and the results."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from ..advice import command_line, redis_command, sentence
from ..beat.delivery import queue_of
from ..beat.entries.fields import read_fields
from ..beat.entries.occurrence import Occurrence
from ..beat.entries.statics import OPERATORS, Statics, owner_of
from ..beat.explain import Facts, HeldLock, record_at
from ..beat.keys import Keys, check_encodable
from ..beat.late_places import late_places
from ..beat.lost_messages import examine, is_in_queue, queue_here
from ..beat.result_backend import ResultBackendError, read_end, result_place
from ..beat.schedule import Schedule
from ..beat.server_time import DIFFERS_FROM
from ..beat.silence import silence
from ..beat.status import ScheduleStatus
from ..beat.store.history import History
from ..beat.store.probe import (
    freezes_locks,
    lock_place,
    lock_refusal,
    lock_server_says,
    refuses_writes,
    schedule_refusal,
)
from ..config import Config
from ..connections import broker_place, schedule_client, schedule_place
from ..errors import EntryError, LockBackendError, UnknownEntryError
from ..locks import backend_of
from ..locks.modes import LockMode, is_singleton
from ..overlap import Overlap
from ..run_results import RESULT_NOT_STORED
from ..server_errors import is_denied
from .code import statics_here
from .leader import refusal
from .locks import held_by, locks_of, waiting
from .workers import (
    Backlog,
    BrokerError,
    NoQuestionsError,
    Survival,
    Workers,
    ahead_of_server,
    delivery_of,
    last_seen,
    refused_queues,
)

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.delivery import Delivery
    from ..beat.entries.entry import Entry
    from ..beat.lost_messages import Found
    from ..beat.store.changes import Change
    from ..beat.store.history import Record
    from ..clients import RedisClient

__all__ = (
    "AGAIN",
    "existing_entry",
    "facts_of",
    "paused_by",
    "pauses_recorded",
    "why_gone",
    "why_outdated",
    "with_pauses",
)

#: Seconds after which a command checks a state again that may be transient.
AGAIN = 1.0

#: Maximum number of an entry's records that an explanation reads, and of those in which it looks for one run or change.
EXPLAINED, ENDS_READ = 1000, 50


def _read_entry(entries: Schedule, name: str, state: ScheduleStatus) -> tuple[Entry | None, str]:
    try:
        entry = entries.get(name)
    except UnknownEntryError as exc:
        if name not in state.quarantine:
            raise UnknownEntryError(f"{exc}{_foreign(entries, name)}") from None
        return None, ""
    except EntryError as exc:
        if name not in state.quarantine and (foreign := _foreign(entries, name)):
            raise UnknownEntryError(f"there is no entry {name!r}{foreign}") from None
        return None, str(exc)
    return entry, entry.why_unusable(datetime.fromtimestamp(state.now, UTC))


def _foreign(entries: Schedule, name: str) -> str:
    """Return that a key is of another program, and not of an entry, and what to do; empty if it may be of an entry."""
    if not entries.keys.is_possible(name) or not entries.no_place(name) or (found := entries.foreign_key(name)) is None:
        return ""
    key, kind = found
    return (
        f". It was deleted, or never stored: it has no place in {entries.keys.schedule}. The key {key} is still there, "
        f"for it is a {kind} of another program. If no program needs that key: {redis_command('DEL', key)}"
    )


def why_gone(entries: Schedule, name: str) -> str:
    """Return who has deleted an entry, and how to bring it back; empty if no record names the entry."""
    change = next(iter(entries.changes(name, 1)), None)
    if change is None:
        records = entries.history(name, ENDS_READ)
        if not records or entries.parked_until(name) is not None:
            return ""
        what = "has removed it"
        if all(record.decision == "quarantined" for record in records):  # beat has never read a definition of it
            what = "has given it a place in the schedule without a definition, or has removed it"
        last = f"its last record is of {records[0].at:%Y-%m-%d %H:%M:%SZ}"
        return f". Another program {what}; {last} ({command_line('history', name)})"
    back = command_line("revert", name, option=f"--to {change.id}")
    at = f"{change.at:%Y-%m-%d %H:%M:%SZ}"
    if change.action == "delete":
        return f". {change.actor or 'Another program'} has deleted it at {at}; to undo that: {back}"
    if change.action == "park":
        return ""
    return f". Another program has removed it; its last record is of {at} ({change.action}). To bring it back: {back}"


def why_outdated(entries: Schedule, name: str, why: str, *, is_unusable: bool) -> tuple[str, str]:
    """Return the level and the text of a finding: an entry is stored otherwise than ``beat_schedule`` gives it.

    Args:
        why: it cannot be stored as it is given; empty if it can.
        is_unusable: beat cannot use it as it is stored.
    """
    runs = "" if is_unusable else ", so the one of before runs"
    changes = (each for each in entries.changes(name, ENDS_READ) if set(each.differences).difference(OPERATORS))
    change = next(changes, None)
    if why:
        return "problem", f"its definition in beat_schedule cannot be stored{runs}: {why}"
    if is_unusable:
        text = "it is in beat_schedule: the next term tries to store it as it is given there: celery singlebeat resign"
        return "problem", text
    stored, _ = Statics(entries.app, schedule_client(entries.app)).stored([name])[name]
    if change is not None and change.after.get("definition") not in {None, stored}:
        text = "another program has changed it, and beat has not read it since"
        return "fine", f"{text}: the next term stores it as beat_schedule gives it"
    if change is None or change.by == "beat_schedule":
        return "problem", (
            f"its definition in beat_schedule was not stored{runs}: the log of beat says why (not_added). Beat "
            "tries it again every minute"
        )
    text = f"{change.actor or 'another program'} has changed it at {change.at:%Y-%m-%d %H:%M:%SZ}"
    return "fine", f"{text}: the next term stores it as beat_schedule gives it"


def _statics_of_beats(app: Celery, state: ScheduleStatus) -> Set[str]:
    """Return the numbers and digests of the entries in the code of the beats of an app."""
    return {beat.get("statics", "") for beat, _ in state.beats if beat.get("app") == owner_of(app)}


def _has_other_code(app: Celery, state: ScheduleStatus) -> bool:
    """Return whether the leader of an app, or all beats that share its work, have another ``beat_schedule`` than we."""
    beats = state.sharing if state.is_shared else [state.leader]
    theirs = {beat.get("statics", "") for beat in beats if beat.get("app") == owner_of(app)} - {""}
    return bool(theirs) and statics_here(app) not in theirs


def _outdated(app: Celery, name: str, state: ScheduleStatus, *, is_unusable: bool) -> str:
    """Return that an entry is stored otherwise than ``beat_schedule`` gives it; empty if not, or if that is not known.

    It is not known if the code of this process is not that of the beats of its app.
    """
    found = next(Statics(app, schedule_client(app)).outdated(datetime.fromtimestamp(state.now, UTC), [name]), None)
    if found is None or _statics_of_beats(app, state) != {statics_here(app)}:
        return ""
    return why_outdated(Schedule(app), *found, is_unusable=is_unusable)[1]


def _why_missing(app: Celery, entries: Schedule, name: str, state: ScheduleStatus) -> str:
    """Return what to add to the error that there is no entry: the trouble that may have kept it away or removed it."""
    statics = Statics(app, schedule_client(app))
    if name in statics.given and (why := statics.why_unstorable(name, datetime.fromtimestamp(state.now, UTC))):
        return f". It is in beat_schedule, and cannot be stored: {why}"
    if _foreign(entries, name):  # it is said, and no revert would succeed
        return ""
    if gone := why_gone(entries, name):
        return gone
    if not state.works and (refused := refusal(app, state)):
        return f", and {state.problem()}: {refused}"
    if told := "".join(f". {sentence(found)}" for found in (state.sent_elsewhere, state.lost) if found):
        return told
    if name not in statics.given:
        return ""
    if not state.problem() and _has_other_code(app, state):
        work = "the beats that share the work run" if state.is_shared else "the beat that leads runs"
        return (
            f". It is in the beat_schedule of this process, and {work} with another one. A beat stores its entries "
            "when it begins to lead: start all beats with this code, or ask with the code that they run (celery "
            "singlebeat doctor)"
        )
    why = state.problem() or (
        "the log of beat says why it could not (event=not_added; event=trouble if the schedule's server refuses a "
        "command to beat's user)"
    )
    return f". It is in beat_schedule, which a beat stores when it begins to lead: {why}"


def _keeps_lock_for(app: Celery, entry: Entry | None) -> float:
    """Return the seconds for which a run keeps its lock in its queue, if one is sure to; else 0."""
    if entry is None or entry.policy.overlap is Overlap.ALLOW_ALL:
        return 0.0
    task = app.tasks.get(entry.task)
    sure = is_singleton(task) and task.lock == LockMode.UNTIL_EXECUTED
    return Config.of(app).singlebeat_queued_ttl if sure else 0.0


def _delivery(app: Celery, entry: Entry | None, workers: Workers | None, *, locks_answer: bool) -> Delivery | None:
    if entry is None:
        return None
    return delivery_of(app, queue_of(app, entry) or "", workers, locks_answer=locks_answer)


def _pending(app: Celery, name: str) -> Occurrence | None:
    """Return the claimed occurrence of an entry that stays unconfirmed, or None if none can be read.

    In every tick an occurrence is unconfirmed for a moment, so the command reads the entry twice.
    """
    client, key = schedule_client(app), Keys.of(app).prefix + name
    text = _pending_text(client, key)
    if text:
        time.sleep(AGAIN)
        text = text if _pending_text(client, key) == text else None
    try:
        return Occurrence.decode(text) if text else None
    except EntryError:
        return None


def _pending_text(client: RedisClient, key: str) -> str | None:
    fields = read_fields(client, [key])[0]
    return None if isinstance(fields, str) else fields[4]  # a string: its key is of another type


def existing_entry(app: Celery, entries: Schedule, name: str, state: ScheduleStatus) -> tuple[Entry | None, str]:
    """Return an entry, or None if it cannot be read, and the reason why beat cannot use it.

    The reason is empty if beat can use the entry, or if only a quarantine record is left of the entry.

    Raises:
        UnknownEntryError: there is no such entry; the error says which trouble may have kept it away or removed it.
    """
    try:
        return _read_entry(entries, name, state)
    except UnknownEntryError as exc:
        raise UnknownEntryError(f"{exc}{_why_missing(app, entries, name, state)}") from None


def facts_of(app: Celery, name: str, when: datetime | None) -> Facts:
    """Return the facts about an entry.

    Raises:
        UnknownEntryError: there is no such entry.
    """
    facts = _facts_of(app, name, when)
    is_started = any(lock.state == "running" for lock in facts.locks.values())
    return _facts_of(app, name, when) if is_started else facts  # it may have begun after the workers were asked


def _facts_of(app: Celery, name: str, when: datetime | None) -> Facts:
    """Return the facts about an entry; ask the workers first, because their answers take longest."""
    check_encodable("entry", name)
    workers, entries, broker_away, broker_refused = None, Schedule(app), "", ""
    try:
        workers = Workers.ask(app)
    except NoQuestionsError as exc:
        broker_refused = f"the broker {broker_place(app)} {exc}"
    except BrokerError as exc:
        broker_away = f"the broker {broker_place(app)} {exc}"
    pending, state = _pending(app, name), ScheduleStatus.of(app)
    entry, unusable = existing_entry(app, entries, name, state)
    records = entries.history(name, EXPLAINED if when else 1)
    if [record.decision for record in records] == ["buffered"]:  # earlier runs may wait, too
        records = entries.history(name, EXPLAINED)
    running = workers.running if workers else None
    # The explanation needs one lock: of the task that held up the run, or of the run if it has not ended.
    record, task = record_at(records, when), ""
    if record is not None and record.decision == "skipped_overlap":
        task = record.holder
    elif record is not None and record.is_sent and record.end is None:
        task = record.task_id
    locks, locks_away, found = dict[str, HeldLock](), "", None
    try:
        # A pending run may wait for the locks' server. While that hangs, no other call is to wait for it, too.
        if pending is not None or task:
            backend_of(app).workers_seen()
        locks = dict(held_by(app, {task} - {"", *(running or ())}))
        if task in locks and locks[task].state == "queued":
            found = next(iter(examine(app, list(islice(waiting(locks_of(app), {task}), 1)))), None)
    except LockBackendError as exc:
        # A right that this user lacks does not matter to a run that is known to be running.
        is_of_interest = pending is not None or task not in (running or ()) or not is_denied(exc)
        locks_away = lock_server_says(app, exc) if is_of_interest else ""
    # A run without an end may have ended, and the server may have refused the record.
    is_doubtful = pending is not None or bool(state.due) or not state.works or bool(task)
    refused = schedule_refusal(app) if is_doubtful else ""
    # A refusal of the locks' server may be the reason why a run is not sent, or does not start.
    locks_refused = lock_refusal(app) if (pending is not None or task) and not locks_away else ""
    locks_frozen = freezes_locks(locks_refused)
    if refuses_writes(refused) and refuses_writes(locks_refused) and lock_place(app) == schedule_place(app):
        locks_refused = ""  # it is said of the schedule's server
    stored, results_away, run = None, "", _run_with_result(record, running or ())
    if record is not None and run:
        try:
            stored = read_end(app, run, timeout=Config.of(app).singlebeat_socket_timeout)
        except ResultBackendError as exc:
            results_away = f"the {result_place(app)} {exc}"
        stored = stored if run == record.task_id else None
    holder, statics = _holder_of(entries, record) if record is not None else None, Statics(app, schedule_client(app))
    has_expired = record is not None and record.end is not None and record.end.outcome == "expired"
    return Facts(
        name=name,
        entry=entry,
        gone=f"It is not stored{why_gone(entries, name).rstrip('.')}" if entry is None and not unusable else "",
        is_possible=entries.keys.is_possible(name),
        unusable=unusable,
        state=state,
        records=records,
        locks=locks,
        running=running,
        known_tasks=frozenset().union(*workers.known_tasks.values()) if workers else None,
        now=datetime.fromtimestamp(state.now, UTC),
        answering=workers.readers.keys() if workers else (),
        last_seen=last_seen(app) if workers and locks else {},
        delivery=_delivery(app, entry, workers, locks_answer=not locks_away)
        if state.is_led_by(owner_of(app))
        else None,
        no_place=entries.no_place(name) if entry is not None else "",
        backfill=entries.unfinished_backfill(name) if entry is not None else "",
        late_place=next((str(place) for _, place in late_places(app, [entry])), "") if entry is not None else "",
        pending=pending,
        no_retry=entries.no_retry(name) if pending is not None else "",
        refused=refused,
        broker_away=broker_away,
        broker_refused=broker_refused,
        queue_refused=next(refused_queues(app, [entry]), "") if pending is not None and entry is not None else "",
        locks_away=locks_away,
        locks_refused=f"the locks' server {lock_place(app)}: {locks_refused}" if locks_refused else "",
        locks_frozen=locks_frozen,
        keeps_lock_for=_keeps_lock_for(app, entry),
        stored_end=stored,
        results_away=results_away,
        found=found,
        lacking=_lacking(app, found) if found is not None and workers is not None else "",
        found_in=delivery_of(app, queue_here(app, found.lock), workers) if found is not None else None,
        without_singlebeat=sorted(name for name, found in workers.versions.items() if not found) if workers else (),
        silent=_silence(app, entry, records, workers, state) if entry is not None else "",
        wrong_clocks=[*_wrong_clocks(app, workers)] if workers is not None and has_expired else (),
        holder_end=holder.end if holder is not None else None,
        holder_vanished=holder is not None and _has_vanished(app, holder, state, workers),
        paused_by=_paused_by(entries, entry) if entry is not None and entry.policy.paused else "",
        other_apps=statics.foreign([name]).get(name, ()),
        has_namesake=name in statics.given,
        is_asked=bool(app.conf.worker_enable_remote_control),
        outdated=_outdated(app, name, state, is_unusable=bool(unusable) or name in state.quarantine),
    )


def _record_ends(workers: Workers | None) -> bool:
    """Return whether any worker answers that records the ends of runs."""
    return workers is not None and any(workers.versions.values())


def _wrong_clocks(app: Celery, workers: Workers) -> Iterator[str]:
    """Yield a sentence about each worker whose clock differs from the clock of the schedule's server."""
    for worker, ahead in workers.wrong_clocks(ahead_of_server(app), more_than=DIFFERS_FROM):
        yield f"the clock of worker {worker} is about {ahead:+.0f} s off that of the schedule's server"


def _holder_of(entries: Schedule, skipped: Record) -> Record | None:
    """Return the run that kept another run from being sent, None if it is not among the last ones."""
    if skipped.decision != "skipped_overlap" or not skipped.holder_entry:
        return None
    records = entries.history(skipped.holder_entry, ENDS_READ)
    return next((record for record in records if record.task_id == skipped.holder), None)


def _has_vanished(app: Celery, run: Record, state: ScheduleStatus, workers: Workers | None) -> bool:
    """Return whether no worker has recorded the end of a run, though there has been time for that since it was sent."""
    can_record = workers is None or not workers.versions or _record_ends(workers)
    since = state.now - run.at.timestamp()
    return can_record and run.end is None and not run.is_sent_otherwise and since > Config.of(app).singlebeat_lock_lease


def pauses_recorded(entries: Schedule, name: str | None = None) -> Mapping[str, Sequence[Change]]:
    """Return the last changes that have paused or resumed an entry, or all entries, by entry, latest first."""
    found: dict[str, list[Change]] = defaultdict(list)
    for change in entries.changes(name, EXPLAINED if name is None else ENDS_READ):
        if "paused" in change.differences:
            found[change.entry].append(change)
    return found


def paused_by(changes: Sequence[Change], at: datetime | None = None) -> str:
    """Return since when an entry is paused, and by whom; empty if that is not recorded.

    Args:
        changes: those that have paused or resumed the entry, latest first.
        at: a moment at which it was paused; None: now.
    """
    change = next((change for change in changes if at is None or change.at <= at), None)
    return f"since {change.at:%Y-%m-%d %H:%M:%SZ} by {change.actor or 'another program'}" if change is not None else ""


def with_pauses(entries: Schedule, records: Sequence[Record], name: str | None = None) -> Sequence[Record]:
    """Return decisions in which a pause without a note is the reason since when it lasts, and by whom.

    Args:
        name: of the entry that all are about; None: of any entries.
    """
    if not any(map(_is_unnoted_pause, records)):
        return records
    changes = pauses_recorded(entries, name)
    return [
        replace(record, reason=paused_by(changes.get(record.entry, ()), record.at))
        if _is_unnoted_pause(record)
        else record
        for record in records
    ]


def _is_unnoted_pause(record: Record) -> bool:
    return record.decision == "paused" and not record.reason


def _paused_by(entries: Schedule, entry: Entry) -> str:
    """Return since when an entry is paused, and by whom; empty if that is not recorded."""
    by = paused_by(pauses_recorded(entries, entry.name).get(entry.name, ()))
    return by and f" {by}"


def _silence(
    app: Celery, entry: Entry, records: Sequence[Record], workers: Workers | None, state: ScheduleStatus
) -> str:
    """Return that all last runs of an entry failed, vanished or were skipped; empty if not.

    Args:
        records: the last decision about it, or several.
        workers: the answers of the workers; None if they could not be asked.
    """
    ((_, own),) = History(app).own([entry.name])
    is_open = bool(records) and records[0].end is None  # it may be the last of several runs without an end
    recent = Schedule(app).history(entry.name, EXPLAINED) if is_open else ()
    backlog, survived = Backlog(app, workers).of, Survival(app, workers).of
    recorded = _record_ends(workers) and not state.sends_elsewhere  # else they are not these workers' runs
    return silence(entry, own, recent, recorded=recorded, backlog=backlog, survived=survived)


def _lacking(app: Celery, found: Found) -> str:
    """Return the queue of a message that does not have it now; empty if it has, or if a worker has, or if unknown."""
    queue = queue_here(app, found.lock)
    if found.lock.worker or found.lock.delay or found.queue or not queue:
        return ""
    return queue if is_in_queue(app, queue, found.lock.ref.task_id) is False else ""


def _run_with_result(record: Record | None, running: Collection[str]) -> str:
    """Return the task id of the run of which the result backend may know more than a record, or for which it may hang.

    Args:
        record: of the decision that is explained.
        running: the tasks that run: a worker may wait for the result backend after the body.
    """
    if record is None or record.decision == "skipped_overlap":
        return record.holder if record is not None and record.holder in running else ""
    may_know = record.end is None or record.end.outcome in {"failure", RESULT_NOT_STORED}
    return record.task_id if record.is_sent and may_know else ""
