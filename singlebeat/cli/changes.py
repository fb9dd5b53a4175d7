"""Commands about changes of entries: ``changes`` and ``revert``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..beat.entries.pauses import Pause
from ..beat.schedule import Schedule
from ..errors import EntryError
from .edit import comes_back
from .output import command, done, moment, show_json, table

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.store.changes import Change


def _who(change: Change) -> str:
    return f"{change.actor} ({change.by})" if change.actor else f"unknown ({change.by})"


def _what(app: Celery, change: Change) -> str:
    """Return the differences in words; of an entry that is added or removed, its action says enough."""
    if not change.before.get("definition", "-") or not change.after.get("definition", "-"):
        return change.note or "-"
    if not change.entry:
        return "; ".join(_pause(change.action, selector, text) for selector, text in change.after.items()) or "-"
    differences = change.masked_differences(app).items()
    parts = [f"{name}: {_text(before)} -> {_text(after)}" for name, (before, after) in differences]
    return "; ".join([*parts, *([change.note] if change.note else [])]) or "-"


def _pause(action: str, selector: str, record: str) -> str:
    """Return a change of a pause of many entries in words."""
    try:
        pause = Pause.decode(selector, record)
    except EntryError:  # another program has written it
        return f"{selector}: {record}"
    return f"{pause.which}: resumed" if action == "resume" else str(pause)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@command(
    "changes",
    click.argument("name", required=False),
    click.option(
        "-n", "count", type=click.IntRange(1, 10**9), default=20, show_default=True, help="Number of changes."
    ),
)
def changes_(app: Celery, as_json: bool, name: str | None, count: int) -> None:
    """Show who has changed an entry, or any entry, and what; latest first.

    A change by "unknown (raw)" was made in Redis by another program. It is recorded when beat reads the entry, or when
    the entry is changed the next time.
    """
    changes = Schedule(app).changes(name, count)
    if as_json:
        show_json([{**asdict(change.masked(app)), "differences": change.masked_differences(app)} for change in changes])
        return
    rows = [
        (change.id, moment(change.at), _who(change), change.entry or "many entries", change.action, _what(app, change))
        for change in changes
    ]
    table(("ID", "AT", "BY", "ENTRY", "ACTION", "WHAT"), rows, cut=(2,))


@command(
    "revert",
    click.argument("name"),
    click.option("--to", "change", required=True, help="Id of the change to undo, with all later ones."),
)
def revert_(app: Celery, as_json: bool, name: str, change: str) -> None:
    """Let an entry be again as it was before a change: undo that change and all later ones.

    It gets the definition and the policy of that time, and keeps its past. A deleted entry comes back by the id of its
    deletion. An entry that another program has removed comes back by the id of its last change, as it was after that.
    A revert is a change, too, and can be undone by its own id. The command changes lists the ids.
    """
    entries = Schedule(app, by="cli")
    side = "after" if entries.reverts_to_after(name, change) else "before"
    entries.revert(name, change)
    back = comes_back(app, name, "replaces these values")
    done(as_json, f"{name}: as it was {side} change {change}{back}", **{"name": name, side: change})
