"""What each view shows: functions of the board, the request and the user that return a template and its context."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..beat.entries.state import State, outlook
from ..errors import EntryError, UnknownEntryError
from .actions import Page
from .board import CALCULATED_FOR, IN_TIMELINE
from .exchange import PageReply
from .render import zone_of
from .security import Role, User
from .squares import WORDS, outcome

if TYPE_CHECKING:
    from ..beat.explain import HeldLock
    from ..beat.store.history import Record
    from .board import Board
    from .exchange import Fields, PageRequest

__all__ = ("VIEWS", "View")

#: Entries on one page of the list, at most.
MOST_ROWS = 100

#: Decisions that the history shows, at choice.
COUNTS = (50, 200, 1000)

#: The fields of a decision in CSV.
CSV = ("entry", "at", "nominal", "kind", "decision", "reason", "task_id", "holder", "holder_entry", "leader", "term")

#: How the list can be sorted.
SORTS = {"next": "next run", "last": "last end", "name": "name", "lateness": "latest run"}


class View(NamedTuple):
    """A view, and the least role that may see it."""

    show: Callable[[Board, PageRequest, User], Page | PageReply]
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
        next_run, state = outlook(found, board.now, board.many_paused(found))
        with suppress(EntryError):
            upcoming = [*schedule.next_runs(name, 10, within=CALCULATED_FOR)]
    records, begun = board.history(name, IN_TIMELINE), board.backfills.get(name)
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
        "backfill": begun,
        "unfinished": schedule.unfinished_backfill(name) if found is not None and begun is None else "",
        "changes": board.changes(name, 5),
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
        sent = (record.at - record.nominal).total_seconds() if record.is_sent else None
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
    """Return the lock that a run of an entry holds, with its record, None if none does, or False if that is unknown."""
    if entry is None:
        return None
    with suppress(Exception):  # the locks' server is another one, and may be unreachable
        return next((row for row in board.locks() if row[0].get("entry") == entry.name), None)
    return False


def why(board: Board, request: PageRequest, user: User) -> Page:
    """Explain an entry, for which the workers are asked."""
    name = request.query.get("name")
    return Page("why.html", {"name": name, "sentences": board.explain(name)})


def zone(board: Board, request: PageRequest, entry: Any = None) -> tzinfo:
    """Return the zone in which the times of an entry are written for a reader."""
    return zone_of(request.cookies.get("singlebeat_zone", "entry"), board.zone_of(entry))


def history(board: Board, request: PageRequest, user: User) -> Page:
    """Show decisions and ends of runs, latest first."""
    query = request.query
    chosen = Chosen.of(query)
    context = {"records": chosen.records(board), "chosen": chosen, "words_of_outcomes": WORDS, "counts": COUNTS}
    return Page("history.html", context | {"zone": zone(board, request)})


def locks(board: Board, request: PageRequest, user: User) -> Page:
    """Show the held locks."""
    return Page("locks.html", {"rows": [_lock_row(*row) for row in board.locks()], "zone": zone(board, request)})


def doctor(board: Board, request: PageRequest, user: User) -> Page:
    """Show the beats; the findings follow, because the checks take some seconds."""
    return Page("doctor.html", {"beats": board.state.beats})


def findings(board: Board, request: PageRequest, user: User) -> Page:
    """Show what is wrong, and what to do."""
    found = sorted(board.doctor(), key=lambda finding: ("problem", "warning", "fine").index(finding.level))
    return Page("findings.html", {"findings": found})


def quarantine(board: Board, request: PageRequest, user: User) -> Page:
    """Show the entries that beat cannot use, with their raw fields."""
    records = dict(islice(board.state.quarantine.items(), MOST_ROWS))
    texts = {}
    for name in records:
        with suppress(EntryError):
            texts[name] = {field: text for field, text in board.schedule(user).salvage(name).texts.items() if text}
    return Page("quarantine.html", {"records": records, "texts": texts, "total": len(board.state.quarantine)})


def changes(board: Board, request: PageRequest, user: User) -> Page:
    """Show who has changed what."""
    name = request.query.get("name")
    count = request.query.number("n", 50, most=1000)
    context = {"changes": board.changes(name, count), "name": name, "zone": zone(board, request), "count": count}
    return Page("changes.html", context)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which decisions the history shows."""

    entry: str
    word: str  #: an outcome, as the squares have it
    task: str  #: id of a task
    since: datetime | None
    until: datetime | None
    count: int

    @classmethod
    def of(cls, query: Fields) -> Chosen:
        """Read the choice of a query; a moment that is none is left out."""
        since, until = _instant(query.get("since")), _instant(query.get("until"))
        count = query.number("n", COUNTS[0], most=COUNTS[-1])
        return cls(query.get("name"), query.get("outcome"), query.get("task").strip(), since, until, count)

    def records(self, board: Board) -> Sequence[Record]:
        """Return the chosen ones of the last decisions."""
        is_narrow = bool(self.word or self.task or self.since or self.until)
        found = board.history(self.entry, COUNTS[-1] if is_narrow else self.count)
        return [*islice((record for record in found if self._is_met_by(record)), self.count)]

    def _is_met_by(self, record: Record) -> bool:
        return (
            (not self.word or outcome(record) == self.word)
            and (not self.task or self.task in {record.task_id, record.holder})
            and (self.since is None or record.nominal >= self.since)
            and (self.until is None or record.nominal <= self.until)
        )


def _instant(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _lock_row(record: Mapping[str, str], lock: HeldLock) -> tuple[Mapping[str, str], HeldLock, float | None]:
    """Return a lock with its record, and the seconds since its state began; None if unknown."""
    began, now = (float(record.get(field) or 0) for field in ("since", "now"))
    return record, lock, max(0.0, now - began) / 1000 if began and now else None


def history_as_json(board: Board, request: PageRequest, user: User) -> PageReply:
    """Return the decisions that the history shows, as JSON."""
    rows = [asdict(record) for record in Chosen.of(request.query).records(board)]
    return PageReply(json.dumps(rows, indent=1, default=_plain), kind="application/json")


def history_as_csv(board: Board, request: PageRequest, user: User) -> PageReply:
    """Return the decisions that the history shows, as CSV."""
    rows, text = Chosen.of(request.query).records(board), io.StringIO()
    writer = csv.writer(text)
    writer.writerow((*CSV, "outcome", "ended", "duration", "worker", "end_reason"))
    for record in rows:
        end = record.end
        ended = (end.outcome, end.at.isoformat(), end.duration, end.worker, end.reason) if end is not None else ()
        fields = [_plain(getattr(record, name)) for name in CSV]
        writer.writerow([_harmless(value) for value in (*fields, *ended)])
    headers = {"Content-Disposition": 'attachment; filename="history.csv"'}
    body = text.getvalue().encode(errors="replace")  # names may have bytes that are not UTF-8
    return PageReply(body, kind="text/csv; charset=utf-8", headers=headers)


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _harmless(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula: names and reasons come from any writer."""
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"} else value


VIEWS: Mapping[str, View] = {
    "/": View(entries),
    "/entry": View(entry),
    "/why": View(why, is_live=False),
    "/history": View(history),
    "/history.json": View(history_as_json, is_live=False),
    "/history.csv": View(history_as_csv, is_live=False),
    "/locks": View(locks),
    "/doctor": View(doctor),
    "/findings": View(findings, is_live=False),
    "/quarantine": View(quarantine),
    "/changes": View(changes),
}
