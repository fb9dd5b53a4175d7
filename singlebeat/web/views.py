"""What each view shows: functions of the board, the request and the user that return a template and its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

from ..beat.entries.state import State, outlook
from ..errors import EntryError, UnknownEntryError
from .actions import Page
from .board import IN_TIMELINE
from .render import zone_of
from .security import Role, User

if TYPE_CHECKING:
    from ..beat.store.history import Record
    from .board import Board
    from .exchange import PageRequest

__all__ = ("VIEWS", "View")

#: Entries on one page of the list, at most.
MOST_ROWS = 100

#: How the list can be sorted.
SORTS = {"next": "next run", "last": "last end", "name": "name", "lateness": "latest run"}


class View(NamedTuple):
    """A view, and the least role that may see it."""

    show: Callable[[Board, PageRequest, User], Page]
    role: Role = Role.READ
    is_live: bool = True  #: its page asks for it again while it is visible


def entries(board: Board, request: PageRequest, user: User) -> Page:
    """Show the entries: search, filters, sorting and paging happen here."""
    query = request.query
    sort = query.get("sort") if query.get("sort") in SORTS else "next"
    found = board.page(
        search=query.get("q")[:200],
        task=query.get("task"),
        state=query.get("state"),
        tag=query.get("tag"),
        sort=sort,
        cursor=query.get("cursor"),
        size=query.number("size", 50, most=MOST_ROWS),
    )
    context = {"page": found.page, "histories": found.histories, "sort": sort, "sorts": SORTS, "states": [*State]}
    return Page("entries.html", context)


def entry(board: Board, request: PageRequest, user: User) -> Page:
    """Show one entry, except for its explanation, which takes longer."""
    name, schedule = request.query.get("name"), board.schedule(user)
    found = why = None
    salvaged = None
    try:
        found = schedule.get(name)
        why = found.why_unusable(board.now)
    except UnknownEntryError:
        if name not in board.state.quarantine:
            raise
        why = board.state.quarantine[name]["reason"]
    except EntryError as exc:
        why, salvaged = str(exc), schedule.salvage(name)
    upcoming: list[Any] = []
    state, next_run = State.QUARANTINED, None
    if found is not None and not why:
        next_run, state = outlook(found, board.now)
        with suppress(EntryError):
            upcoming = [*schedule.next_runs(name, 10)]
    records = board.history(name, IN_TIMELINE)
    context = {
        "name": name,
        "entry": found,
        "why": why or "",
        "salvaged": salvaged,
        "word": state,
        "next": next_run,
        "upcoming": upcoming,
        "records": records,
        "zone": zone(board, request, found),
        "lock": _lock_of(board, found),
        "timeline": timeline,
        "backfill": board.backfills.get(name),
    }
    return Page("entry.html", context)


class Bar(NamedTuple):
    """One decision in a timeline; times are seconds after its nominal time, widths are of 200."""

    record: Record
    sent: float | None
    started: float | None
    wait: float
    width: float


def timeline(records: Sequence[Record]) -> Sequence[Bar]:
    """Return how long each run waited and ran, drawn to the scale of the longest one."""
    found = []
    for record in records:
        sent = (record.at - record.nominal).total_seconds() if record.decision in {"dispatched", "buffered"} else None
        started = None
        if record.end is not None and record.end.started:
            with suppress(ValueError):
                started = (datetime.fromisoformat(record.end.started) - record.nominal).total_seconds()
        if record.kind in {"manual", "backfill"} and sent is not None:  # they count from when they were asked for
            started, sent = None if started is None else max(0.0, started - sent), 0.0
        took = record.end.duration or 0.0 if record.end is not None else 0.0
        found.append((record, sent, started, max(0.0, started or 0.0), took))
    scale = 200 / (max((wait + took for *_, wait, took in found), default=0.0) or 1.0)
    return [
        Bar(
            record,
            sent,
            started,
            round(wait * scale, 1),
            max(1.0, round(took * scale, 1)) if started is not None else 0,
        )
        for record, sent, started, wait, took in found
    ]


def _lock_of(board: Board, entry: Any) -> Any:
    """Return the lock that a run of an entry holds, with its record, or None."""
    if entry is None:
        return None
    with suppress(Exception):  # the locks' server is another one, and may be unreachable
        return next((row for row in board.locks() if row[0].get("entry") == entry.name), None)
    return None


def why(board: Board, request: PageRequest, user: User) -> Page:
    """Explain an entry, for which the workers are asked."""
    name = request.query.get("name")
    return Page("why.html", {"name": name, "sentences": board.explain(name)})


def zone(board: Board, request: PageRequest, entry: Any = None) -> tzinfo:
    """Return the zone in which the times of an entry are written for a reader."""
    return zone_of(request.cookies.get("singlebeat_zone", "entry"), board.zone_of(entry))


VIEWS: Mapping[str, View] = {
    "/": View(entries),
    "/entry": View(entry),
    "/why": View(why),
}
