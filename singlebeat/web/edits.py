"""The form of an entry: its preview, the diff before it is saved, and the merge if another process was faster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..advice import sentence
from ..beat.calendar.shifts import effects
from ..beat.calendar.words import in_words
from ..beat.delivery import Delivery
from ..beat.entries.code_only import restore_objects
from ..beat.entries.definition import why_too_deep
from ..beat.entries.entry import NOTHING, Entry
from ..beat.entries.policy import EntryPolicy
from ..destination import queue_of_call
from ..errors import ConflictError, EntryError, UnknownEntryError
from ..masking import MASK, MaskError, masked
from .actions import Page, leads_to
from .board import IN_CALL
from .draft import FIELDS, FREQUENCIES, KINDS, UNITS, Change, Draft
from .versions import differences, version_of

if TYPE_CHECKING:
    from celery.schedules import BaseSchedule

    from ..beat.entries.salvage import Salvage
    from .board import Board
    from .exchange import Fields, PageReply, PageRequest
    from .security import User

__all__ = ("ask", "preview", "preview_of", "save")

#: Next runs of a preview.
PREVIEWED = 5

#: Most tasks that the form proposes.
MOST_TASKS = 500


@dataclass(slots=True)
class Preview:
    """What a draft would do."""

    words: str
    runs: Sequence[datetime]
    effects: Sequence[str]  #: of the shifts of the clocks within a year
    zone: tzinfo
    unknown_task: str  #: that no worker, or none that reads its queue, knows the task; empty if unknown


def ask(board: Board, request: PageRequest, user: User) -> Page:
    """Show the form of a new entry, of a stored one, or of a copy."""
    name, like = request.query.get("name"), request.query.get("like")
    found = _stored(board, user, name or like) if name or like else None
    if found is None and (name or like):
        board.schedule(user).get(name or like)  # raises
    draft = Draft.new() if found is None else _draft_of(board, found)
    if like and not name:
        draft.values["name"] = ""
        return _form(board, draft, found=None, before=draft, like_version=version_of(found))
    return _form(board, draft, found=found, before=draft)


def save(board: Board, request: PageRequest, user: User) -> Page | PageReply:
    """Check a draft, show what it changes, or store it."""
    form = request.changes
    name, is_new = form.get("name"), not form.get("version")
    found, draft, before = _stored(board, user, name), Draft.of_form(form), _before(form)
    is_stored = not is_new and form.get("do") not in {"preview", "back"}
    if is_stored and version_of(found) != form.get("version"):  # first: masks stand for what was stored then
        return _conflict(board, draft, before, found, form.get("version"))
    zone = draft.zone(board.zone)
    fields, wishes = draft.fields(zone), draft.wishes()
    source = found or (_stored(board, user, form.get("like")) if form.get("like") else None)
    fields |= _unmasked(board, draft, fields, source.fields if source is not None else {})
    if source is not None:
        _keep(fields, wishes, draft, _draft_of(board, source), source)
        if found is None:
            for part in differences(form.get("like_version"), version_of(source)):
                if part in IN_CALL and json.dumps(MASK) in draft.values[part]:
                    draft.errors[part] = f"{MASK} would stand for what the other entry has now: give it anew"
    if not name:
        draft.errors["name"] = "give the entry a name"
    if draft.errors or form.get("do") in {"preview", "back"}:
        shown = _preview(board, draft, fields.get("schedule")) if form.get("do") == "preview" else None
        status = 422 if draft.errors and form.get("do") != "back" else 200
        page = _form(
            board, draft, found=None if is_new else found, before=before, version=form.get("version"), preview=shown
        )
        return page._replace(status=status)
    if is_new and found is not None:
        draft.errors["name"] = "there is an entry of this name already"
        return _form(board, draft, found=None, before=before)._replace(status=409)
    try:
        entry = _entry(board, name, fields, wishes, found)
        if form.get("do") != "save":
            changes = Draft.new().changes(draft) if found is None else _changes(before, draft, found)
            context = {
                "name": name,
                "changes": changes,
                "preview": _preview(board, draft, entry.schedule),
                "values": draft.values,
                "fields": FIELDS,
                "is_new": is_new,
                "version": form.get("version"),
                "before": json.dumps(before.values),
            }
            return Page("review.html", context)
        board.schedule(user).save(entry)
    except ConflictError:
        return _conflict(board, draft, before, _stored(board, user, name), form.get("version"))
    except (EntryError, ValueError) as exc:
        draft.errors["whole"] = str(exc)
        found = None if is_new else found
        return _form(board, draft, found=found, before=before, version=form.get("version"))._replace(status=422)
    return leads_to(request, "/entry", name=name, done="saved")


def preview(board: Board, request: PageRequest, user: User) -> Page:
    """Show what a draft would do; for a form that is being filled in."""
    draft = Draft.of_form(request.changes)
    with suppress(EntryError, ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        return Page("preview.html", {"preview": _preview(board, draft, draft.schedule(draft.zone(board.zone)))})
    draft.fields(draft.zone(board.zone))
    return Page("preview.html", {"preview": None, "why": draft.errors.get("schedule", "")})


def _stored(board: Board, user: User, name: str) -> Salvage | None:
    with suppress(UnknownEntryError):
        return board.schedule(user).salvage(name) if name else None
    return None


def _draft_of(board: Board, found: Salvage) -> Draft:
    shown = dict(board.shown_call(found.fields))
    if "schedule" in found.problems:
        shown["schedule"] = masked(found.raw("schedule"), board.app)
    return Draft.of_entry(found, board.zone, shown)


def _changes(before: Draft, draft: Draft, found: Salvage) -> Sequence[Change]:
    """Return the fields in which a draft differs from what is stored, those that could not be read among them."""
    changes = before.changes(draft)
    problems = dict(found.problems)
    for name, value in found.wishes.items():  # of which that of the policy names one
        try:
            EntryPolicy.of({name: value})
        except EntryError as exc:
            problems[name] = str(exc)
            problems.pop("policy", None)
    named, texts = {change.field for change in changes}, draft.texts()
    mended = [Change(part, problem, texts.get(part, "")) for part, problem in problems.items() if part not in named]
    return [*changes, *mended]


def _before(form: Fields) -> Draft:
    """Return the draft with which the user began."""
    try:
        values = json.loads(form.get("before") or "{}")
        return Draft(Draft.new().values | {name: str(values[name]) for name in FIELDS if name in values})
    except (ValueError, TypeError, RecursionError):
        return Draft.new()


def _keep(fields: dict[str, Any], wishes: dict[str, object], draft: Draft, shown: Draft, source: Salvage) -> None:
    """Let each field whose text is as it was shown keep its stored value, of which the text may hold only a part.

    A field of the definition that could not be read has an error until it is given anew.

    Args:
        shown: the texts of ``source``: the entry, or the one that was copied.
    """
    for name in wishes:
        if draft.values[name] == shown.values[name] and name not in draft.errors:
            with suppress(EntryError):  # a broken one becomes what its text shows
                EntryPolicy.of({name: source.wishes.get(name)})
                wishes[name] = source.wishes.get(name)
    for name in source.fields.keys() & fields.keys() - draft.errors.keys():
        if name in ("task", *IN_CALL) and draft.values[name] == shown.values[name]:
            fields[name] = source.fields[name]
    is_zone_known = source.timezone is not None or not shown.values["timezone"]
    is_same = draft.has_schedule_of(shown, but_zone=not is_zone_known)
    if not is_same and wishes.get("timezone") is None:  # it may be shown as that of the former schedule
        wishes["timezone"] = draft.values["timezone"].strip() or None
    if "schedule" in source.fields and is_same:
        fields["schedule"] = source.fields["schedule"]
        draft.errors.pop("schedule", None)
    for name in source.problems.keys() & {"task", "schedule", *IN_CALL}:
        is_left = is_same if name == "schedule" else draft.values[name] == shown.values[name]
        if is_left:
            draft.errors[name] = f"{source.problems[name]}: give it anew"


def _unmasked(board: Board, draft: Draft, fields: Mapping[str, Any], stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return args, kwargs and options with the stored value in the place of each mask or mark, and note errors."""
    try:
        found = board.unmasked_call(fields, stored)
    except MaskError as exc:
        draft.errors[exc.path.partition(".")[0]] = str(exc)
        return {}
    except RecursionError:
        draft.errors["whole"] = why_too_deep("the definition")
        return {}
    call = dict[str, Any]()
    for name, values in found.items():
        try:
            call[name] = restore_objects(name, values, stored)
        except EntryError as exc:
            draft.errors[name] = str(exc)
    return call


def _entry(board: Board, name: str, fields: Any, wishes: Any, found: Salvage | None) -> Entry:
    if found is not None:
        return found.changed(fields, wishes)
    given = {option: value for option, value in wishes.items() if value is not None}
    entry = Entry(name, app=board.app, policy=EntryPolicy.of(given), **fields)
    entry.version = NOTHING
    return entry


def _preview(board: Board, draft: Draft, schedule: BaseSchedule | None) -> Preview | None:
    """Return what a draft would do; None if it has no usable schedule."""
    if schedule is None:
        return None
    policy = draft.wishes()
    given = {option: value for option, value in policy.items() if value is not None and option not in draft.errors}
    entry = Entry("preview", "preview", schedule, app=board.app, policy=EntryPolicy.of(given))
    task, queue = draft.values["task"].strip(), ""
    with suppress(Exception):  # a user's router may raise anything
        args, kwargs, options = (json.loads(draft.values[name] or "null") for name in ("args", "kwargs", "options"))
        queue = queue_of_call(board.app, task, options or {}, args, kwargs)
    return preview_of(board, entry, task, queue)


def preview_of(board: Board, entry: Entry, task: str, queue: str | None) -> Preview:
    """Return what an entry would do.

    Args:
        task: that it runs; empty if it is not known yet.
        queue: to which the task goes; empty or None if this process cannot know it.
    """
    entry.zone = board.zone  # as beat reads its schedule
    zone, now = board.zone_of(entry), board.now
    runs = [*islice(entry.timetable.runs(now, now), PREVIEWED)]
    workers, unknown = board.workers(), ""
    if task and workers is not None:
        known = frozenset().union(*workers.known_tasks.values())
        if not known:
            unknown = "No worker answers, so it is not known whether one has the task."
        elif task not in known:
            unknown = f"No worker that answers knows the task {task}: a worker that gets its message drops it."
        elif queue and (wrong := Delivery.of(queue, workers.readers).without(task)):
            unknown = f"{sentence(wrong)}."
    return Preview(in_words(entry.schedule), runs, [*effects(entry.schedule, zone, now)], zone, unknown)


def _form(
    board: Board,
    draft: Draft,
    *,
    found: Salvage | None,
    before: Draft,
    version: str | None = None,
    preview: Preview | None = None,
    like_version: str = "",
) -> Page:
    """Return the form with a draft.

    Args:
        found: the stored entry that is edited; None: the entry is new.
        before: the draft with which the user began.
        version: of the stored entry at that time; by default of ``found``.
        like_version: of the entry that is copied, as it is shown.
    """
    tasks = sorted(name for name in board.app.tasks if not name.startswith("celery."))
    context = {
        "values": draft.values,
        "errors": draft.errors,
        "is_new": found is None,
        "version": version_of(found) if version is None else version,
        "before": json.dumps(before.values),
        "kinds": KINDS,
        "units": UNITS,
        "frequencies": FREQUENCIES,
        "tasks": tasks[:MOST_TASKS],
        "zone": draft.zone(board.zone),
        "preview": preview,
        "like_version": like_version,
        "problems": dict(found.problems) if found is not None else {},
    }
    return Page("edit.html", context)


def _conflict(board: Board, draft: Draft, before: Draft, found: Salvage | None, version: str) -> Page:
    """Show in three columns what the user began with, what the user wants, and what another process has stored.

    Args:
        version: with which the user began.
    """
    if found is None:
        raise ConflictError("the entry was deleted meanwhile: to store it again, duplicate it from its changes")
    theirs = _draft_of(board, found)
    began, mine, other = before.texts(), draft.texts(), theirs.texts()
    merged = draft.merged(before, theirs, board.zone)
    for name in differences(version, version_of(found)):
        # A mask would stand for what is stored now. What is no JSON has an error until it is replaced.
        for values in (draft.values, merged.values) if name in IN_CALL else ():
            if values[name] != theirs.values[name]:
                values[name] = values[name].replace(json.dumps(MASK), "<give this anew>")
    rows = [
        (name, began[name], mine[name], other[name]) for name in mine if not began[name] == mine[name] == other[name]
    ]
    context = {
        "name": found.name,
        "rows": rows,
        "merged": merged.values,
        "mine": draft.values,
        "fields": FIELDS,
        "version": version_of(found),
        "before": json.dumps(theirs.values),
    }
    return Page("conflict.html", context, 409)
