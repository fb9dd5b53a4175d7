"""The functions behind the operations: each calls what a view, an action or a command calls, and returns JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ...beat.delivery import queue_of
from ...errors import ConflictError, EntryError, UnknownEntryError
from ..actions import MOST_RUNS, PATIENCE, end_present_term, free_lock
from ..board import CALCULATED_FOR
from ..edits import preview_of
from ..security import Role
from . import entries

if TYPE_CHECKING:
    from datetime import datetime

    from ...beat.entries.salvage import Salvage
    from ...beat.schedule import Schedule
    from ...beat.store.changes import Change
    from ..board import Board
    from ..exchange import PageRequest
    from ..security import User

__all__ = ("Call", "Result")


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that is asked for."""

    board: Board
    request: PageRequest
    user: User
    given: Mapping[str, Any]  #: the values of its parameters by name

    @property
    def schedule(self) -> Schedule:
        """The entries, whose changes are recorded as those of the user."""
        return self.board.schedule(self.user, by="api")

    @property
    def name(self) -> str:
        """The name of the entry."""
        found: str = self.given["name"]
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a call."""

    value: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def status(call: Call) -> Result:
    """Return the state of the schedule."""
    return Result({**asdict(call.board.state), "problem": call.board.snapshot.problem})


def doctor(call: Call) -> Result:
    """Return the findings of all checks."""
    return Result({"findings": [each._asdict() for each in call.board.doctor()]})


def quarantine(call: Call) -> Result:
    """Return the entries that beat has quarantined."""
    rows = call.board.state.quarantine
    return Result({"entries": [{"name": name, **_about(record)} for name, record in rows.items()]})


def _about(record: Mapping[str, str]) -> Mapping[str, str]:
    return {"reason": record.get("reason", ""), "since": record.get("since", "")}


def list_entries(call: Call) -> Result:
    """Return a page of entries."""
    page = call.board.page(**call.given).page
    rows = [entries.row(call.board, row) for row in page.rows]
    return Result({"entries": rows, "cursor": page.cursor, "total": page.total})


def get_entry(call: Call) -> Result:
    """Return an entry."""
    found, version = entries.document(call.board, call.schedule, call.name)
    return Result(found, headers={"ETag": version})


def put_entry(call: Call) -> Result:
    """Store an entry, new or in place of an old one."""
    return _save(call, is_partial=False)


def patch_entry(call: Call) -> Result:
    """Replace parts of an entry."""
    return _save(call, is_partial=True)


def _save(call: Call, *, is_partial: bool) -> Result:
    given, headers = call.given, call.request.headers
    is_new = entries.save(
        call.board,
        call.schedule,
        call.name,
        given["definition"] or {},
        given["policy"] or {},
        expected=entries.versions_of(headers.get("if-match")),
        must_be_new=headers.get("if-none-match", "").strip() == "*",
        is_partial=is_partial,
    )
    call.board.poller.forget()
    found, version = entries.document(call.board, call.schedule, call.name)
    return Result(found, 201 if is_new else 200, headers={"ETag": version})


def delete_entry(call: Call) -> Result:
    """Delete an entry."""
    found = _expected(call)
    try:
        is_deleted = call.schedule.delete(call.name, found=found)
    except ConflictError as exc:
        raise entries.ChangedError(str(exc), is_condition=True) from None
    if not is_deleted:
        raise UnknownEntryError(f"there is no entry {call.name!r}")
    if left := call.schedule.foreign_key(call.name):
        return Result({"name": call.name, "deleted": True, "left": left[0]})
    return Result(None, 204)


def _expected(call: Call) -> Salvage | None:
    """Return the entry in the version that ``If-Match`` names; None if the header is not given.

    Raises:
        ChangedError: it has another version, or there is no entry.
    """
    expected = entries.versions_of(call.request.headers.get("if-match"))
    found = entries.stored(call.schedule, call.name) if expected else None
    entries.check_version(call.name, found, expected)
    return found


def preview(call: Call) -> Result:
    """Return what an entry would do."""
    entry = entries.drafted(call.board, "preview", call.given["definition"], call.given["policy"] or {})
    if why := entry.why_unusable(call.board.now):
        raise EntryError(why)
    found = preview_of(call.board, entry, entry.task, queue_of(call.board.app, entry))
    return Result(
        {"words": found.words, "runs": [*found.runs], "effects": [*found.effects], "unknown_task": found.unknown_task}
    )


def next_runs(call: Call) -> Result:
    """Return the next times of an entry."""
    given = call.given
    runs = call.schedule.next_runs(call.name, given["count"], after=given["after"], within=CALCULATED_FOR)
    return Result({"runs": [*runs]})


def explain(call: Call) -> Result:
    """Explain why an entry ran, did not run, or will run."""
    return Result({"sentences": [*call.board.explain(call.name)]})


def history(call: Call) -> Result:
    """Return the last decisions."""
    name = call.given["name"]
    records = call.board.history(name or "", call.given["count"])
    if name and not records:
        call.schedule.salvage(name)  # raises if there is no entry of this name
    return Result({"records": [asdict(record) for record in records]})


def run(call: Call) -> Result:
    """Let an entry run once."""
    task = call.schedule.trigger(call.name, overlap=call.given["overlap"], timeout=PATIENCE)
    return Result({"name": call.name, "task_id": task}, 202)


def pause(call: Call) -> Result:
    """Pause an entry."""
    replaced = call.schedule.pause(call.name, call.given["note"] or "")
    return Result({"name": call.name, "paused": True, "replaced": replaced})


def resume(call: Call) -> Result:
    """End the pause of an entry."""
    was_paused = call.schedule.resume(call.name)
    return Result({"name": call.name, "paused": False, "was_paused": was_paused})


def pauses(call: Call) -> Result:
    """Return the pauses of many entries."""
    return Result({"pauses": [asdict(each) for each in call.schedule.pauses()]})


def pause_many(call: Call) -> Result:
    """Pause all entries, or those with a tag."""
    tag = _selected(call)
    before = call.schedule.pause_many(tag=tag, note=call.given["note"] or "", until=call.given["until"])
    replaced = None if before is None else asdict(before)
    return Result({"pauses": pauses(call).value["pauses"], "replaced": replaced})


def resume_many(call: Call) -> Result:
    """End a pause of all entries, or of those with a tag."""
    tag = _selected(call)
    was_paused = call.schedule.resume_many(tag=tag)
    return Result({"was_paused": was_paused, "pauses": pauses(call).value["pauses"]})


def _selected(call: Call) -> str | None:
    """Return the tag of the entries that are meant, None for all entries: a tag that was forgotten must not mean all.

    Raises:
        ValueError: neither or both were given.
    """
    tag: str | None = call.given["tag"]
    if (tag is None) is not bool(call.given["all"]):
        raise ValueError('give a tag, or "all": true')
    return tag


def backfill(call: Call) -> Result:
    """Return the times of a backfill, and begin it unless only the times are asked for."""
    schedule, given = call.schedule, call.given
    start: datetime = given["start"]
    end: datetime = given["end"]
    limit = min(given["limit"], MOST_RUNS)
    runs = schedule.backfill(
        call.name, start, end, overlap=given["overlap"], limit=limit, dry_run=True, within=CALCULATED_FOR
    )
    if given["dry_run"]:
        return Result({"name": call.name, "runs": [*runs], "begun": False})
    call.board.begin_backfill(schedule, call.name, start, end, given["overlap"], len(runs))
    return Result({"name": call.name, "runs": [*runs], "begun": True}, 202)


def backfill_progress(call: Call) -> Result:
    """Return how far a backfill is that was begun in this process."""
    found = call.board.backfills.get(call.name)
    if found is None:
        why = f"no backfill of {call.name!r} was begun here since this process was started"
        unfinished = call.schedule.unfinished_backfill(call.name)
        raise UnknownEntryError(f"{why}; {unfinished}" if unfinished else why)
    return Result({"total": found.total, "count": found.count, "is_over": found.is_over, "problem": found.problem})


def changes(call: Call) -> Result:
    """Return the last changes of entries."""
    found = call.board.changes(call.given["name"] or "", call.given["count"])
    return Result({"changes": [_change(call.board, each) for each in found]})


def _change(board: Board, change: Change) -> Mapping[str, Any]:
    texts = ("id", "at", "actor", "by", "entry", "action", "note")
    differences = {part: [*pair] for part, pair in board.differences(change).items()}
    return {**{name: getattr(change, name) for name in texts}, "differences": differences}


def revert(call: Call) -> Result:
    """Let an entry be as it was before a change."""
    found = _expected(call)
    try:
        call.schedule.revert(call.name, call.given["to"], found=found)
    except ConflictError as exc:
        raise entries.ChangedError(str(exc), is_condition=found is not None) from None
    call.board.poller.forget()
    return get_entry(call)


def locks(call: Call) -> Result:
    """Return the held locks."""
    rows = []
    for record, lock in call.board.locks():
        task = record.get("task") or ""
        args = call.board.masked_text(record.get("args") or "", task)
        about = {"task": task, "args": args, "entry": record.get("entry") or ""}
        # The key is a digest of all arguments: a reader could try which masked ones fit it.
        key = lock.key if call.user.may(Role.OPERATE) else ""
        rows.append({**asdict(lock), **about, "key": key, "seems_abandoned": lock.seems_abandoned})
    return Result({"locks": rows})


def unlock(call: Call) -> Result:
    """Free a lock."""
    lock = free_lock(call.board, call.user, call.given["which"], force=bool(call.given["force"]))
    return Result({"key": lock.key, "task_id": lock.task_id, "unlocked": True})


def resign(call: Call) -> Result:
    """End the term of leadership."""
    before = call.board.state.leader
    end_present_term(call.board)
    return Result({"before": dict(before)})
