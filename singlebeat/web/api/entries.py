"""Entries as the API reads and stores them: with a version for conflicts, and with masks that keep stored values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...beat.calendar.words import in_words
from ...beat.entries.code_only import given_for
from ...beat.entries.definition import salvage_fields
from ...beat.entries.entry import NOTHING, Entry
from ...beat.entries.policy import EntryPolicy
from ...beat.entries.salvage import Salvage
from ...beat.entries.state import State, outlook
from ...errors import ConflictError, EntryError, UnknownEntryError
from ..board import policy_of
from ..security import RefusedError
from ..versions import DEFINITION, differences, version_of

if TYPE_CHECKING:
    from ...beat.page import Row
    from ...beat.schedule import Schedule
    from ..board import Board

__all__ = ("ChangedError", "check_version", "document", "drafted", "row", "save", "stored", "version", "versions_of")


class ChangedError(ConflictError):
    """Another process has changed an entry since the client has read it.

    Args:
        differences: the names of the parts that were changed; empty if they are not known.
        is_condition: the client has named a version.
    """

    def __init__(self, text: str, differences: Sequence[str] = (), *, is_condition: bool = False) -> None:
        super().__init__(text)
        self.differences, self.is_condition = differences, is_condition


def version(found: Salvage | None) -> str:
    """Return the version of an entry as an ETag; empty if there is no entry."""
    return f'"{version_of(found)}"' if found is not None else ""


def document(board: Board, schedule: Schedule, name: str) -> tuple[Mapping[str, Any], str]:
    """Return an entry as JSON has it, and its version.

    Raises:
        UnknownEntryError: there is no such entry.
    """
    found, now = schedule.salvage(name), board.now
    entry, why, upcoming, state = None, "", None, State.UNUSABLE
    try:
        entry = schedule.get(name)
        why = entry.why_unusable(now)
    except UnknownEntryError:
        raise
    except EntryError as exc:
        why = str(exc)
    if entry is not None and not why:
        upcoming, state = outlook(entry, now, board.many_paused(entry))
    if name in board.state.quarantine:
        why, upcoming, state = board.state.quarantine[name]["reason"], None, State.QUARANTINED
    tags = found.wishes.get("tags")
    return {
        "name": name,
        "state": state,
        "why": why,
        "next": upcoming,
        "tags": tags if isinstance(tags, list) else [],
        "is_static": board.is_static(name),
        "words": in_words(entry.schedule) if entry is not None else "",
        "definition": _shown(board, json.loads(entry.encode())) if entry is not None else None,
        "policy": policy_of(entry) if entry is not None else None,
        "problems": dict(found.problems),
        "meta": _meta(entry) if entry is not None else None,
    }, version(found)


def row(board: Board, each: Row) -> Mapping[str, Any]:
    """Return an entry of a list as JSON has it."""
    return {
        "name": each.name,
        "state": each.state,
        "why": each.why,
        "next": each.next,
        "tags": [*each.tags],
        "is_static": each.is_static,
        "task": each.task,
        "words": in_words(each.entry.schedule) if each.entry is not None else "",
        "last_end": each.last_end,
        "last_decision": each.last_decision,
    }


def _meta(entry: Entry) -> Mapping[str, object]:
    past = entry.meta
    return {"last_run_at": past.last_run_at, "total_run_count": past.total_run_count, "since": past.since}


def _shown(board: Board, definition: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**definition, **board.shown_call(definition)}


def drafted(board: Board, name: str, definition: Mapping[str, Any], policy: Mapping[str, Any]) -> Entry:
    """Return an entry from JSON, read as beat reads one that is stored.

    Raises:
        EntryError: it cannot be read, or has a field that is unknown.
    """
    schedule = board.schedule()
    entry = Entry.decode(schedule.keys.named(name), _encoded(definition), board.app)
    entry.zone = schedule.zone
    if entry.ignored:
        raise EntryError(entry.ignored.replace(" and ignored", ""))
    wishes = EntryPolicy.of(policy)
    entry.policy = wishes if wishes.timezone else replace(wishes, timezone=entry.policy.timezone)
    if why := entry.policy.contradicts(entry.options):
        raise EntryError(why)
    return entry


def _encoded(definition: Mapping[str, Any]) -> str:
    try:
        return json.dumps(definition)
    except (ValueError, RecursionError) as exc:
        raise EntryError(f"the definition cannot be stored: {exc}") from None


def save(
    board: Board,
    schedule: Schedule,
    name: str,
    definition: Mapping[str, Any],
    policy: Mapping[str, Any],
    *,
    expected: Sequence[str],
    must_be_new: bool,
    is_partial: bool,
) -> bool:
    """Store an entry, and return whether it is new.

    Args:
        definition: of which masks keep the stored values.
        expected: versions that the stored entry may have; empty: any, and there may be no entry.
        must_be_new: store it only if there is no entry of this name.
        is_partial: keep the parts that are not given, also in the policy, of which null removes a part.

    Raises:
        UnknownEntryError: there is no entry, and only parts are given.
        ChangedError: the stored entry has another version, or another process was faster.
        EntryError: a value cannot be stored.
    """
    found = stored(schedule, name)
    if found is None and is_partial and not expected:
        raise UnknownEntryError(f"there is no entry {name!r}")
    if found is not None and must_be_new:
        raise ChangedError(f"there is an entry {name!r} already: change it with If-Match", is_condition=True)
    check_version(name, found, expected)
    given = _kept(board, definition, found, is_partial=is_partial)
    if is_partial and found is not None:
        entry = _changed(found, given, policy)
    else:
        has_masks = given != definition  # whose stored values are those that were read
        is_any = [*expected] == ["*"]
        if found is not None and (is_any or (has_masks and not expected)) and found.wishes.get("paused"):
            # As in ``save_entries``: a client that has not read the entry does not know that it is paused.
            policy = {**policy, "paused": True, "note": found.wishes.get("note") or ""}
        entry = drafted(board, name, given, policy)
        if must_be_new or found is None:
            entry.version = NOTHING
        elif expected or has_masks:
            entry.version = found.texts["definition"], found.texts["policy"]
    try:
        schedule.save(entry)
    except ConflictError as exc:
        now = stored(schedule, name)
        parts = differences(version_of(found), version_of(now))
        # Any version is still there, of which ``*`` speaks; it was another write that was faster.
        is_condition = must_be_new or now is None or [*expected] not in ([], ["*"])
        raise ChangedError(str(exc), parts, is_condition=is_condition) from None
    return found is None


def versions_of(header: str | None) -> Sequence[str]:
    """Return the versions that ``If-Match`` lists; empty if it is not given.

    Raises:
        RefusedError: it is given, and empty.
    """
    if header is None:
        return ()
    # The page joins the values of a header that came several times by the ends of lines.
    found = [each.strip().removeprefix("W/") for each in header.replace("\n", ",").split(",") if each.strip()]
    if not found:
        raise RefusedError(
            "the header If-Match is empty: write the ETag of the entry there, as its last answer has it, or * for any "
            "version, or leave the header out",
            400,
        )
    return found


def check_version(name: str, found: Salvage | None, expected: Sequence[str]) -> None:
    """Check that an entry has one of the expected versions; ``*`` is any version of an entry that exists.

    Raises:
        ChangedError: it has another one, or there is no entry.
    """
    if not expected:
        return
    if found is None:
        raise ChangedError(f"there is no entry {name!r}, so that no version of it matches", is_condition=True)
    present = version(found)
    if [*expected] != ["*"] and present not in expected:
        parts = differences(expected[0].strip('"'), present.strip('"'))
        what = f": {', '.join(parts)}" if parts else ""
        raise ChangedError(
            f"another process has changed the entry since you have read it{what}. Read it again, and repeat the change",
            parts,
            is_condition=True,
        )


def stored(schedule: Schedule, name: str) -> Salvage | None:
    """Return an entry as it is stored; None if there is none of this name."""
    with suppress(UnknownEntryError):
        return schedule.salvage(name)
    return None


def _kept(board: Board, definition: Mapping[str, Any], found: Salvage | None, *, is_partial: bool) -> Mapping[str, Any]:
    """Return a definition with the stored value in the place of each mask.

    Raises:
        MaskError: a mask cannot be replaced.
    """
    stored: Any = {}
    if found is not None:
        with suppress(ValueError, RecursionError):
            stored = json.loads(found.texts["definition"])
    stored = stored if isinstance(stored, dict) else {}
    return {**definition, **board.unmasked_call(definition, stored, is_partial=is_partial)}


def _changed(found: Salvage, definition: Mapping[str, Any], policy: Mapping[str, Any]) -> Entry:
    """Return a stored entry with other parts.

    Raises:
        EntryError: a part is unknown or wrong, or an unreadable one is not replaced.
    """
    if unknown := next((name for name in definition if name not in {*DEFINITION, "name"}), ""):
        raise EntryError(f"the definition's field {unknown!r} is unknown")
    fields, problems = salvage_fields(_encoded({**_LEAST, **definition}), given_for(found.app, found.name))
    if problems:
        raise EntryError("; ".join(dict.fromkeys(problems.values())))
    given = {name: fields[name] for name in definition if name in fields}
    replaced = {*given, *(["policy"] if policy else [])}
    left = [name for name in found.problems if name in {*DEFINITION, "policy"} and name not in replaced]
    if left:
        why = "; ".join(dict.fromkeys(found.problems[name] for name in left))
        raise EntryError(f"the entry cannot be used: {why}. Replace the wrong parts in one request: {', '.join(left)}")
    return found.changed(given, policy)


#: What a definition needs to be read.
_LEAST: Mapping[str, object] = {"task": "-", "schedule": 1}
