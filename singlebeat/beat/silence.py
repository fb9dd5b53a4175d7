"""Whether an entry is silent though beat does its work: its last runs failed, vanished, or did not begin; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..locks.modes import LockMode, is_singleton, overlap_for
from ..overlap import Overlap
from ..run_results import KEPT_ENDS, MESSAGE_LOST, REPLACED, RESULT_NOT_STORED
from .entries.occurrence import Kind

if TYPE_CHECKING:
    from .entries.entry import Entry
    from .store.history import End, Own, Record

__all__ = ("silence",)

#: Ends that are not final, or that say nothing about a run: they are left out.
_PASSED_OVER = {"retry", "postponed", "duplicate_refused"}

#: Ends of runs that did not do their work, or not all of it, and the words for several such runs.
_FAILED = {
    "failure": "failed",
    "time_limit": "exceeded their time limit",
    "worker_lost": "lost their worker process",
    "rejected": "were rejected",
    "terminated": "were terminated",
    "revoked": "were revoked",
    "expired": "expired before a worker started them",
    "unknown_task": "were dropped by a worker that does not know the task",
    MESSAGE_LOST: "were lost with their messages",
}

#: The words for several runs that are no failures, though Celery reports failures.
_NOT_STORED = (
    "returned, and the result backend stored no result of them (is it down, or lacks the user of the worker a command "
    "there?)"
)

#: Least number of runs in a row that must have failed, and of occurrences in a row that must have been skipped.
LEAST_FAILED, LEAST_SKIPPED = 2, 4

#: Why a run that has ended has no recorded end.
NOT_RECORDED = (
    "could not be recorded: the schedule's server did not take the record, or the worker has another "
    "redbeat_redis_url or redbeat_key_prefix"
)

_UNRECORDED = (
    "the worker's user may lack a command at the schedule's server (the log of the worker has ends_not_recorded then), "
    "or the worker has no singlebeat, or another redbeat_redis_url or redbeat_key_prefix"
)

#: Most runs without an end that are counted.
MOST_VANISHED = 4

#: Least time for which occurrences must have been skipped: a run may take a little longer than its interval.
SKIPPED_FOR = timedelta(minutes=1)


def silence(
    entry: Entry,
    own: Own,
    recent: Sequence[Record] = (),
    *,
    recorded: bool = True,
    backlog: Callable[[Entry], str] = lambda _: "",
    survived: Callable[[Entry, Sequence[Record]], tuple[str, str]] = lambda *_: ("", ""),
) -> str:
    """Return a sentence, without a full stop, if an entry is silent; else an empty string.

    Args:
        own: the last decisions about it and the last ends of its runs.
        recent: earlier decisions about it, and later ones: those that it was skipped push the others out of its own.
        recorded: whether there are workers with singlebeat, which record the ends of runs.
        backlog: returns where its messages may still wait, in words; called only if that matters.
        survived: returns what shows that some of these runs, the last one first, have ended, and what shows that their
            workers live, in words; called only if that matters.
    """
    if not entry.enabled or entry.policy.paused:
        return ""
    found = _skipped(entry, own, recent) or _unsent(own.decisions) or _missed(own.decisions)
    decisions = [*own.decisions, *recent]
    found = found or (recorded and _vanished(entry, decisions, backlog, survived)) or _failed(own.ends)
    return found or _replaced(own.ends, decisions)


def _unsent(decisions: Sequence[Record]) -> str:
    if len(decisions) < LEAST_FAILED or any(record.decision != "publish_failed" for record in decisions):
        return ""
    return f"its last {len(decisions)} runs could not be sent: {decisions[0].reason}"


def _missed(decisions: Sequence[Record]) -> str:
    scheduled = [record for record in decisions if record.kind in {Kind.SCHEDULED, Kind.CATCH_UP}]
    if len(scheduled) < LEAST_FAILED or any(record.decision != "missed" for record in scheduled):
        return ""
    last = scheduled[0]
    return f"its last {len(scheduled)} runs were missed, the last one at {_moment(last.nominal)}: {last.reason}"


def _failed(ends: Sequence[End]) -> str:
    ends = [end for end in ends if end.outcome not in _PASSED_OVER]
    words = {end.outcome for end in ends}
    if len(ends) < LEAST_FAILED or not (words <= _FAILED.keys() or words == {RESULT_NOT_STORED}):
        return ""
    last = ends[0]
    what = {**_FAILED, RESULT_NOT_STORED: _NOT_STORED}[last.outcome] if len(words) == 1 else "failed"
    where = f" on {last.worker}" if last.worker else ""
    why = ": ".join(["", *([last.outcome] if len(words) > 1 else []), *([last.reason] if last.reason else [])])
    return f"its last {len(ends)} runs all {what}, the last one at {_moment(last.at)}{where}{why}"


def _replaced(ends: Sequence[End], decisions: Sequence[Record]) -> str:
    """Return a sentence if each run of an entry is replaced by a newer one before a worker comes to it."""
    if len(ends) < KEPT_ENDS or any(end.outcome != REPLACED for end in ends):
        return ""
    sent: dict[str, Record] = {}
    for record in decisions:  # some come twice, the second time perhaps without their end
        if record.is_sent and (record.task_id not in sent or sent[record.task_id].end is None):
            sent[record.task_id] = record
    replaced_at = max(
        (run.at for run in sent.values() if run.end is not None and run.end.outcome == REPLACED), default=None
    )
    if replaced_at is not None and any(run.at < replaced_at for run in sent.values() if run.end is None):
        return ""  # that one runs, and those behind it may be replaced
    last = max(sent.values(), key=lambda run: run.at, default=None)
    if last is not None and last.decision == "buffered":
        return ""  # a run goes on that the records known here do not reach
    others = [run.end.at for run in sent.values() if run.end is not None and run.end.outcome != REPLACED]
    ran = max(others, default=None)
    if ran is not None and ends[0].at - ran < SKIPPED_FOR:
        return ""
    since = f"since {_moment(ran)}" if ran is not None else "so far"
    return (
        f"no run of it has started {since}: each waits in its queue until a newer one takes its place (cancel_other, "
        "terminate_other). Let it run less often, start more workers, or choose another overlap"
    )


def _vanished(
    entry: Entry,
    decisions: Sequence[Record],
    backlog: Callable[[Entry], str],
    survived: Callable[[Entry, Sequence[Record]], tuple[str, str]],
) -> str:
    """Return a sentence if runs of an entry end without a record: expired, not started yet, or with their worker."""
    # A reason says that code of the app has sent it, or that it was sent without its lock.
    followed = (record for record in decisions if record.decision == "dispatched" and not record.reason)
    sent = sorted(followed, key=lambda record: record.at)
    ended = {record.task_id for record in sent if record.end is not None}
    last, *before = [*dict.fromkeys(record.task_id for record in reversed(sent))][: MOST_VANISHED + 1] or [""]
    if len(before) < LEAST_FAILED or not ended.isdisjoint([last, *before]) or not _follows_its_end(entry):
        return ""
    what = f"no worker has recorded an end of its last {len(before)} runs before the present one"
    runs = {record.task_id: record for record in sent}
    ending, lives = survived(entry, [runs[task_id] for task_id in before])
    if ending:
        return f"{what}, but {ending}: the ends of its runs are not recorded, because {_UNRECORDED}"
    if _may_expire(entry, sent[-len(before) - 1 :]):
        return f"{what}: each has probably expired in its queue before a worker started it"
    how = (
        "killed its worker (for want of memory? See the log of the worker's host). Or its worker has no singlebeat, or "
        f"its end {NOT_RECORDED}"
    )
    if lives:
        how = f"ended, and that is not recorded, because {_UNRECORDED}: {lives}"
    if where := backlog(entry):
        return f"{what}: they may still wait in {where}. Or each has {how}"
    return f"{what}: each has probably {how}"


def expiry_of(entry: Entry) -> object:
    """Return when messages of an entry expire: seconds after they were sent, or a moment; None if they do not."""
    given = (
        entry.policy.expires,
        entry.options.get("expires"),
        getattr(entry.app.tasks.get(entry.task), "expires", None),
    )
    return next((each for each in given if each is not None), None)


def _may_expire(entry: Entry, sent: Sequence[Record]) -> bool:
    """Return whether the message of each of these runs may have expired before the next one was sent."""
    expires = expiry_of(entry)
    if not isinstance(expires, int | float):  # a moment, which may have come
        return expires is not None
    return all((later.at - earlier.at).total_seconds() >= expires for earlier, later in pairwise(sent))


def _follows_its_end(entry: Entry) -> bool:
    """Return whether a run of an entry is sent only once the run before it has ended, or the lock of that has."""
    task = entry.app.tasks.get(entry.task)
    try:
        if not is_singleton(task):
            return not hasattr(task, "generate_lock") and entry.policy.overlap is not Overlap.ALLOW_ALL
        is_whole = LockMode(task.lock) is LockMode.UNTIL_EXECUTED and task.effective_lock_expiry is None
        is_one = entry.is_constant and task.has_pure_keys  # all its runs have one lock
        return is_whole and is_one and overlap_for(task, entry.policy.overlap) is not Overlap.ALLOW_ALL
    except ConfigError:  # its policy contradicts its task
        return False


def _skipped(entry: Entry, own: Own, recent: Sequence[Record]) -> str:
    last, sent = next(iter(own.decisions), None), entry.meta.last_run
    if last is None or last.decision != "skipped_overlap":
        return ""
    decided = entry.meta.last_run_at
    if decided is not None and decided - last.nominal > timedelta(seconds=1) and not own.is_pending:
        return ""  # RedBeat has run the entry since then; RedBeat records no history
    # The run of a time may have been sent long after that time, and a triggered run has none.
    known = [each.at for each in (*own.decisions, *recent) if each.is_sent]
    sent = max([*known, *([sent] if sent is not None else [])], default=None)
    if sent is not None and last.nominal - sent < max(SKIPPED_FOR, _time_of(entry, sent, LEAST_SKIPPED) - sent):
        return ""
    since = f"since {_moment(sent)}" if sent is not None else "so far"
    which = "no other run" if sent is None and last.holder_entry == entry.name else "no run"
    return f"{which} of it was sent {since}; its last time, {_moment(last.nominal)}, was skipped: {last.reason}"


def _time_of(entry: Entry, after: datetime, number: int) -> datetime:
    """Return the nominal time ``number`` occurrences after a moment; ``datetime.max`` if there is none or unknown."""
    never, found = datetime.max.replace(tzinfo=UTC), after
    for _ in range(number):
        try:
            found = entry.timetable.next(found) or never
        except Exception:  # a user's own schedule may raise anything
            return never
    return found


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
