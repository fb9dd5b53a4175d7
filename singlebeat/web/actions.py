"""What a user may do: functions of the board, the request with its form, and the user; a form comes before each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

from ..beat.leadership.lease import resign
from ..beat.store.probe import ticks_refusal
from ..diagnosis.locks import free_one
from ..errors import ConflictError, EntryError, SinglebeatError
from ..overlap import Overlap
from .board import CALCULATED_FOR
from .exchange import Fields, PageReply
from .security import RefusedError, Role, User
from .versions import version_of

if TYPE_CHECKING:
    from ..beat.entries.pauses import Pause
    from ..beat.entries.salvage import Salvage
    from ..beat.explain import HeldLock
    from .board import Board
    from .exchange import PageRequest

__all__ = ("ACTIONS", "FORMS", "SAID", "Action", "Page")

#: Most runs of a backfill.
MOST_RUNS = 1000

#: Seconds for which a run waits until another occurrence of its entry was sent; a browser waits, too.
PATIENCE = 3.0

#: The version in a form of an entry that is not stored.
NO_ENTRY = "none"

#: What the page says after a change.
SAID = {
    "requested": "A run was requested: the leading beat sends it.",
    "paused": "Paused: its times pass without a run.",
    "resumed": "Resumed: runs that were due meanwhile are not made up for.",
    "not_paused": "It was not paused.",
    "saved": "Saved: beats notice it within a second.",
    "deleted": "Deleted.",
    "place_deleted": "Its place in the schedule and its quarantine are removed.",
    "freed": "The lock is free.",
    "resigned": "The term of leadership was ended: a standby leads next.",
    "backfill": "The runs of the backfill are handed to beat, one after the other.",
    "reverted": "Reverted.",
    "pause_all": "Paused: the times of these entries pass without a run.",
    "resume_all": "Resumed: runs that were due meanwhile are not made up for.",
    "many": "Done for all that were selected.",
}

#: The words for a run that meets an equal call, as a person chooses them.
OVERLAPS = {
    Overlap.SKIP: "skip it if an equal call is queued or running",
    Overlap.BUFFER_ONE: "let it wait, unless another one waits",
    Overlap.BUFFER_ALL: "let it wait for its turn",
    Overlap.CANCEL_OTHER: "revoke the call that is queued, and run",
    Overlap.TERMINATE_OTHER: "end the call that runs, and run",
    Overlap.ALLOW_ALL: "run beside it",
}


class Page(NamedTuple):
    """A template and its context; ``status`` is that of the answer."""

    template: str
    context: Mapping[str, Any]
    status: int = 200


class Action(NamedTuple):
    """An action, and the least role that may take it; it answers with a page, or leads to another one."""

    act: Callable[[Board, PageRequest, User], Page | PageReply]
    role: Role
    is_change: bool = True  #: it changes more than what this browser shows


class Form(NamedTuple):
    """The form of an action, and the least role that may see it."""

    show: Callable[[Board, PageRequest, User], Page]
    role: Role


def leads_to(request: PageRequest, path: str, **query: object) -> PageReply:
    """Return the answer after a change, so that a reload does not repeat it."""
    return PageReply(status=303, headers={"Location": request.url(path, **query)})


def choose_zone(board: Board, request: PageRequest, user: User) -> PageReply:
    """Keep in which zone this browser shows times, and show the same page again."""
    choice, back = request.changes.get("zone"), request.changes.get("back")
    local = f"/{back.lstrip('/')}" if "\\" not in back and back.isascii() and back.isprintable() else "/"
    return PageReply(
        status=303,
        headers={"Location": request.root + local},
        cookies={"singlebeat_zone": choice if choice in {"entry", "mine", "utc"} else "entry"},
    )


def _confirm(template: str, title: str, action: str, button: str, **context: Any) -> Page:
    return Page(template, {"title": title, "action": action, "button": button, "danger": False, **context})


def ask_run(board: Board, request: PageRequest, user: User) -> Page:
    """Ask what becomes of a run if it meets an equal call."""
    name = request.query.get("name")
    entry = board.schedule(user).get(name)
    return _confirm(
        "run.html",
        "Run now",
        "/run",
        "Run now",
        name=name,
        entry=entry,
        overlaps=OVERLAPS,
        present=entry.policy.overlap,
    )


def run(board: Board, request: PageRequest, user: User) -> PageReply:
    """Let an entry run once."""
    name, overlap = request.changes.get("name"), request.changes.get("overlap") or None
    task = board.schedule(user).trigger(name, overlap=overlap, timeout=PATIENCE)
    return leads_to(request, "/entry", name=name, done="requested", task=task)


def ask_pause(board: Board, request: PageRequest, user: User) -> Page:
    """Ask why an entry is paused."""
    name = request.query.get("name")
    found = board.schedule(user).salvage(name)
    return _confirm("pause.html", "Pause", "/pause", "Pause", name=name, note=found.wishes.get("note", ""))


def pause(board: Board, request: PageRequest, user: User) -> PageReply:
    """Pause an entry."""
    form, name = request.changes, request.changes.get("name")
    _pause(board, user, name, note=form.get("note"), shown=form.get("shown"))
    return leads_to(request, "/entry", name=name, done="paused")


def _pause(board: Board, user: User, name: str, *, note: str, shown: str) -> None:
    """Pause an entry, or give its pause another note; a repetition is no conflict.

    Args:
        shown: its note as the form has shown it.

    Raises:
        ConflictError: it is paused with a note that another user has given since.
    """
    schedule = board.schedule(user)
    found = schedule.salvage(name).wishes
    if note and found.get("paused") and (present := str(found.get("note", ""))) not in {note, shown}:
        raise ConflictError(f"meanwhile {name!r} was paused: {present}. Look at that before you change it")
    schedule.pause(name, note)


def ask_resume(board: Board, request: PageRequest, user: User) -> Page:
    """Show why an entry is paused, before it is resumed."""
    name = request.query.get("name")
    found = board.schedule(user).salvage(name)
    shown = {"note": found.wishes.get("note", ""), "version": version_of(found)}
    return _confirm("resume.html", "Resume", "/resume", "Resume", name=name, **shown)


def resume(board: Board, request: PageRequest, user: User) -> PageReply:
    """End the pause of an entry."""
    name = request.changes.get("name")
    _as_shown(board, user, name, request.changes.get("version"))
    was_paused = board.schedule(user).resume(name)
    return leads_to(request, "/entry", name=name, done="resumed" if was_paused else "not_paused")


def ask_delete(board: Board, request: PageRequest, user: User) -> Page:
    """Ask whether an entry is to be deleted."""
    name = request.query.get("name")
    version = version_of(_stored(board, user, name)) or NO_ENTRY
    return _confirm("delete.html", "Delete", "/delete", "Delete", name=name, version=version, danger=True)


def delete(board: Board, request: PageRequest, user: User) -> PageReply:
    """Delete an entry."""
    name = request.changes.get("name")
    schedule = board.schedule(user)
    if not schedule.delete(name, found=_as_shown(board, user, name, request.changes.get("version"))):
        raise ConflictError(f"there is no entry {name!r} any more")
    if left := schedule.foreign_key(name):
        return leads_to(request, "/", done="place_deleted", left=left[0])
    return leads_to(request, "/", done="deleted")


def _stored(board: Board, user: User, name: str) -> Salvage | None:
    """Return an entry as it is stored; None if there is none."""
    with suppress(EntryError):
        return board.schedule(user).salvage(name)
    return None


def _as_shown(board: Board, user: User, name: str, version: str) -> Salvage | None:
    """Return the entry as it was when its user was asked; None if it was not stored then.

    Args:
        version: that the form has; empty if it has none.

    Raises:
        ConflictError: another process has changed it since.
    """
    found = _stored(board, user, name) if version else None
    if version and version != (version_of(found) or NO_ENTRY):
        raise ConflictError(f"another process has changed the entry {name!r} meanwhile: look at it before you go on")
    return found


def _moment(text: str, zone: tzinfo) -> datetime:
    """Return a moment on the wall clock of a zone.

    Raises:
        EntryError: it is none.
    """
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo is not None else when.replace(tzinfo=zone)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise EntryError(f"{text!r} is no date and time like 2026-12-01T09:00") from None


def ask_backfill(board: Board, request: PageRequest, user: User) -> Page:
    """Show which runs a backfill would have, before it begins."""
    query, name = request.query, request.query.get("name")
    entry = board.schedule(user).get(name)
    zone, planned, wrong = board.zone_of(entry), None, ""
    if query.get("start") or query.get("end"):
        try:
            planned = _planned(board, query, user, zone)
        except EntryError as exc:
            wrong = str(exc)
    overlap = query.get("overlap") or Overlap.BUFFER_ALL.value
    context = {"name": name, "entry": entry, "zone": zone, "planned": planned, "wrong": wrong, "overlaps": OVERLAPS}
    return _confirm("backfill.html", "Backfill", "/backfill", "Run them", **context, overlap=overlap)


def _planned(board: Board, given: Fields, user: User, zone: tzinfo) -> Sequence[datetime]:
    start, end = (_moment(given.get(field), zone) for field in ("start", "end"))
    overlap = given.get("overlap") or Overlap.BUFFER_ALL.value
    return board.schedule(user).backfill(
        given.get("name"), start, end, overlap=overlap, limit=MOST_RUNS, dry_run=True, within=CALCULATED_FOR
    )


def backfill(board: Board, request: PageRequest, user: User) -> PageReply:
    """Begin a backfill, whose runs are handed to beat by a thread, if the list is the one that was confirmed."""
    form, name = request.changes, request.changes.get("name")
    zone = board.zone_of(board.schedule(user).get(name))
    planned = _planned(board, form, user, zone)
    if form.get("count") != str(len(planned)):
        raise ConflictError(f"the backfill has {len(planned)} runs now, not {form.get('count')}: check the list again")
    start, end = (_moment(form.get(field), zone) for field in ("start", "end"))
    board.begin_backfill(board.schedule(user), name, start, end, form.get("overlap"), len(planned))
    return leads_to(request, "/entry", name=name, done="backfill")


def ask_free(board: Board, request: PageRequest, user: User) -> Page:
    """Show a lock before it is freed."""
    which = request.query.get("id")
    found = next((row for row in board.locks() if row[1].task_id == which), None)
    if found is None:
        raise ConflictError(f"task {which} holds no lock any more")
    return _confirm("free.html", "Free a lock", "/free", "Free the lock", record=found[0], lock=found[1], danger=True)


def free(board: Board, request: PageRequest, user: User) -> PageReply:
    """Free a lock; by force only if the id of its task was typed."""
    form = request.changes
    which, force = form.get("id"), bool(form.get("force"))
    if force and form.get("typed").strip() != which:
        raise EntryError("to free a lock by force, type the id of its task")
    free_lock(board, user, which, force=force)
    return leads_to(request, "/locks", done="freed")


def free_lock(board: Board, user: User, which: str, *, force: bool) -> HeldLock:
    """Free a lock; by force only if the user is an admin. Return the lock as it was."""
    if force and not user.may(Role.ADMIN):
        raise RefusedError("to free a lock by force needs the role admin")
    return free_one(board.app, which, force=force)


def ask_resign(board: Board, request: PageRequest, user: User) -> Page:
    """Ask whether the term of leadership is to be ended."""
    return _confirm("resign.html", "End the term of leadership", "/resign", "End the term", danger=True)


def end_term(board: Board, request: PageRequest, user: User) -> PageReply:
    """End the term of leadership."""
    end_present_term(board)
    return leads_to(request, "/doctor", done="resigned")


def end_present_term(board: Board) -> None:
    """End the term of leadership, unless no beat could lead next."""
    if refused := ticks_refusal(board.app):
        raise ConflictError(f"no beat could lead next, so the present term goes on: {refused}")
    if not resign(board.app):
        raise ConflictError("no beat leads")


def ask_revert(board: Board, request: PageRequest, user: User) -> Page:
    """Show a change before it is undone."""
    name, to = request.query.get("name"), request.query.get("to")
    change = next((each for each in board.changes(name, 1000) if each.id == to), None)
    if change is None:
        raise ConflictError(f"there is no record of a change {to!r} of entry {name!r}")
    is_after = board.schedule(user).reverts_to_after(name, to)
    shown = {"change": change, "is_after": is_after, "version": version_of(_stored(board, user, name)) or NO_ENTRY}
    return _confirm("revert.html", "Revert", "/revert", "Revert", name=name, **shown)


def revert(board: Board, request: PageRequest, user: User) -> PageReply:
    """Let an entry be again as it was before a change."""
    name = request.changes.get("name")
    found = _as_shown(board, user, name, request.changes.get("version"))
    board.schedule(user).revert(name, request.changes.get("to"), found=found)
    return leads_to(request, "/entry", name=name, done="reverted")


def ask_pause_all(board: Board, request: PageRequest, user: User) -> Page:
    """Ask which entries are paused, why, and until when."""
    tag = request.query.get("tag")
    schedule, shown = board.schedule(user), {"tag": tag, "zone": board.zone}
    shown |= {"tags": sorted(schedule.tags()), "pauses": schedule.pauses(), "text": _text_of}
    return _confirm("pause_all.html", "Pause many entries", "/pause-all", "Pause", **shown)


def pause_all(board: Board, request: PageRequest, user: User) -> PageReply:
    """Pause all entries, or those with a tag, under one key."""
    form = request.changes
    until = _moment(form.get("until"), board.zone) if form.get("until") else None
    if form.get("which") not in {"all", "tag"}:
        raise EntryError("choose all entries, or those with a tag")
    tag = form.get("tag") if form.get("which") == "tag" else None
    present = next((each for each in board.schedule(user).pauses() if each.tag == tag), None)
    note, shown = form.get("note"), form.all("pause")
    if present is not None and (present.note, present.until) != (note, until) and _text_of(present) not in shown:
        raise ConflictError(f"meanwhile they were paused: {present}. Look at that before you change it")
    board.schedule(user).pause_many(tag=tag, note=note, until=until)
    return leads_to(request, "/", done="pause_all")


def ask_resume_all(board: Board, request: PageRequest, user: User) -> Page:
    """Show a pause of many entries before it is ended."""
    tag = request.query.get("tag") or None
    pause = next((each for each in board.schedule(user).pauses() if each.tag == tag), None)
    if pause is None:
        raise ConflictError("that pause has ended")
    shown = {"pause": pause, "text": _text_of(pause)}
    return _confirm("resume_all.html", "Resume many entries", "/resume-all", "Resume", **shown)


def _text_of(pause: Pause) -> str:
    """Return a pause as a form keeps it, to know whether it is still the same."""
    return json.dumps([str(pause.since), str(pause.until), pause.note, pause.by])


def resume_all(board: Board, request: PageRequest, user: User) -> PageReply:
    """End a pause of many entries."""
    tag, schedule = request.changes.get("tag") or None, board.schedule(user)
    lasting = next((each for each in schedule.pauses() if each.tag == tag), None)
    shown = request.changes.get("pause")
    if lasting is not None and shown and _text_of(lasting) != shown:
        raise ConflictError("another process has changed that pause meanwhile: look at it before you go on")
    schedule.resume_many(tag=tag)
    return leads_to(request, "/", done="resume_all")


#: What can be done to several entries at once: the words for it, and the least role.
MANY = {
    "pause": ("Pause", Role.OPERATE),
    "resume": ("Resume", Role.OPERATE),
    "run": ("Run", Role.OPERATE),
    "delete": ("Delete", Role.ADMIN),
}


def _many(given: Fields, user: User) -> tuple[str, Sequence[str]]:
    """Return what is to be done, and to which entries.

    Raises:
        EntryError: nothing was selected.
        RefusedError: the user may not do that.
    """
    what, names = given.get("do"), [*dict.fromkeys(given.all("name"))]
    if what not in MANY or not names:
        raise EntryError("nothing was selected: go back, and tick the entries")
    if not user.may(MANY[what][1]):
        raise RefusedError(f"to {what} entries needs the role {MANY[what][1].name.lower()}")
    return what, names


def ask_many(board: Board, request: PageRequest, user: User) -> Page:
    """Ask for the number of the selected entries."""
    what, names = _many(request.query, user)
    title = f"{MANY[what][0]} {len(names)} {'entry' if len(names) == 1 else 'entries'}"
    stored = board.schedule(user).salvage_many(names)
    versions = {name: version_of(stored.get(name)) or NO_ENTRY for name in names}
    wishes = {name: found.wishes for name, found in stored.items()}
    shown = {"do": what, "versions": versions, "wishes": wishes, "danger": what == "delete"}
    return _confirm("many.html", title, "/many", MANY[what][0], **shown)


def act_on_many(board: Board, request: PageRequest, user: User) -> Page | PageReply:
    """Do something to each of several entries, and name those for which it failed."""
    form, schedule = request.changes, board.schedule(user)
    what, names = _many(form, user)
    if form.get("count").strip() != str(len(names)):
        raise EntryError(f"nothing was changed: type {len(names)}, the number of the selected entries")
    versions = dict(zip(form.all("name"), form.all("version"), strict=False))
    notes = dict(zip(form.all("name"), form.all("shown"), strict=False))

    def as_shown(name: str) -> Salvage | None:
        return _as_shown(board, user, name, versions.get(name, ""))

    def resume_shown(name: str) -> None:
        as_shown(name)
        schedule.resume(name)

    acts: Mapping[str, Callable[[str], object]] = {
        "pause": lambda name: _pause(board, user, name, note=form.get("note"), shown=notes.get(name, "")),
        "resume": resume_shown,
        "run": lambda name: schedule.trigger(name, timeout=PATIENCE),
        "delete": lambda name: schedule.delete(name, found=as_shown(name)),
    }
    failed = {}
    for name in names:
        try:
            acts[what](name)
        except SinglebeatError as exc:
            failed[name] = str(exc)
    if not failed:
        return leads_to(request, "/", done="many")
    context = {"what": MANY[what][0], "done_count": len(names) - len(failed), "failed": failed}
    return Page("many_failed.html", context, 409)


FORMS: Mapping[str, Form] = {
    "/run": Form(ask_run, Role.OPERATE),
    "/pause": Form(ask_pause, Role.OPERATE),
    "/resume": Form(ask_resume, Role.OPERATE),
    "/delete": Form(ask_delete, Role.ADMIN),
    "/backfill": Form(ask_backfill, Role.ADMIN),
    "/free": Form(ask_free, Role.OPERATE),
    "/resign": Form(ask_resign, Role.ADMIN),
    "/many": Form(ask_many, Role.OPERATE),
    "/revert": Form(ask_revert, Role.ADMIN),
    "/pause-all": Form(ask_pause_all, Role.OPERATE),
    "/resume-all": Form(ask_resume_all, Role.OPERATE),
}

ACTIONS: Mapping[str, Action] = {
    "/zone": Action(choose_zone, Role.READ, is_change=False),
    "/run": Action(run, Role.OPERATE),
    "/pause": Action(pause, Role.OPERATE),
    "/resume": Action(resume, Role.OPERATE),
    "/delete": Action(delete, Role.ADMIN),
    "/backfill": Action(backfill, Role.ADMIN),
    "/free": Action(free, Role.OPERATE),
    "/resign": Action(end_term, Role.ADMIN),
    "/many": Action(act_on_many, Role.OPERATE),
    "/revert": Action(revert, Role.ADMIN),
    "/pause-all": Action(pause_all, Role.OPERATE),
    "/resume-all": Action(resume_all, Role.OPERATE),
}
