"""Commands that show entries: ``list``, ``show``, ``next``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args
from zoneinfo import ZoneInfo

import click
from celery.schedules import crontab, schedule

from ..beat.entries.state import State, outlook
from ..beat.keys import Keys
from ..beat.late_places import LatePlace, late_places
from ..beat.page import Query, Sort, rows_of
from ..beat.schedule import Schedule
from ..beat.status import QUARANTINED_LATER, REDBEAT_LEADS, ScheduleStatus, pending_occurrences
from ..connections import schedule_client
from ..diagnosis.facts import AGAIN, paused_by, pauses_recorded, why_gone
from ..diagnosis.leader import refusal
from ..errors import EntryError, UnknownEntryError
from ..masking import masked, masked_text
from .output import age, command, marked, moment, parse_instant, printable, show_json, table

if TYPE_CHECKING:
    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..beat.entries.entry import Entry
    from ..beat.entries.occurrence import Occurrence
    from ..beat.entries.salvage import Salvage


#: Fields of a definition, in the order of the output.
FIELDS = ("task", "schedule", "args", "kwargs", "options", "enabled")


def readable_schedule(when: BaseSchedule) -> str:
    """Return a schedule for people."""
    if isinstance(when, crontab):
        names = ("_orig_minute", "_orig_hour", "_orig_day_of_month", "_orig_month_of_year", "_orig_day_of_week")
        return "cron " + " ".join(str(getattr(when, name)) for name in names)
    if type(when) is schedule:
        return f"every {when.run_every.total_seconds():g} s"
    return str(when)


def as_mapping(entry: Entry) -> Mapping[str, Any]:
    """Return an entry as a mapping for JSON, with all of its arguments."""
    past = entry.meta
    more = {"since": past.since, "ahead": past.ahead, "sent": past.sent}
    return {
        "name": entry.name,
        "definition": json.loads(entry.encode()),
        "policy": json.loads(entry.policy.encode() or "{}"),
        "meta": json.loads(past.encode()) | {name: at.isoformat() for name, at in more.items() if at is not None},
    }


def _as_shown(entry: Entry) -> Mapping[str, object]:
    """Return an entry as a mapping for JSON, with secret arguments masked."""
    row = as_mapping(entry)
    return {**row, "definition": masked(row["definition"], entry.app)}


def _pending(app: Celery) -> Mapping[str, Occurrence]:
    """Return the claimed occurrences that stay unconfirmed, by entry; in every tick there are some for a moment."""
    client, keys = schedule_client(app), Keys.of(app)

    def read() -> dict[str, Occurrence]:
        return {key.removeprefix(keys.prefix): waiting for key, waiting, _ in pending_occurrences(client, keys)}

    before = read()
    if not before:
        return {}
    time.sleep(AGAIN)
    return {name: waiting for name, waiting in read().items() if waiting == before.get(name)}


def _last_run(entry: Entry, pending: Occurrence | None) -> datetime | None:
    """Return when the last run of an entry was due that was sent, or decided about: not the pending one."""
    if pending is None or not pending.is_scheduled:
        return entry.meta.last_run
    return None if pending.previous is None else datetime.fromtimestamp(pending.previous, UTC)


def _outlook(
    upcoming: datetime | None, state: State, place: LatePlace | None, pending: Occurrence | None
) -> tuple[datetime | None, str]:
    """Return the next time of an entry, and a word for its state.

    Args:
        place: the place of the entry in the schedule if that is too late, else None.
        pending: its occurrence that is claimed, and not known to be sent.
    """
    if state in {State.QUARANTINED, State.UNUSABLE}:
        return None, state
    if place is not None:
        return place.at, "late place" if place.is_wrong else state
    return upcoming, "pending" if pending is not None and state in {State.ACTIVE, State.FINISHED} else state


@command(
    "list",
    click.option("--search", default="", metavar="TEXT", help="Only entries with this string in the name or the task."),
    click.option("--task", default="", help="Only entries of this task."),
    click.option(
        "--state",
        type=click.Choice([state.value for state in State]),
        help="Only entries in this state; paused: also disabled ones.",
    ),
    click.option("--tag", default="", help="Only entries with this tag."),
    click.option(
        "--sort",
        type=click.Choice(get_args(Sort)),
        default="next",
        show_default=True,
        help="Order of the entries: soonest next run, name, latest end of a run, or latest next run.",
    ),
    click.option("--limit", type=click.IntRange(1, 10**9), help="Most entries to show."),
)
def list_(
    app: Celery, as_json: bool, search: str, task: str, state: str | None, tag: str, sort: Sort, limit: int | None
) -> None:
    """List all entries by their next run; those that never run come last.

    LAST is when the last run was due; ENDED is how the last run ended, and when. Unusable entries and
    unknown fields are named after the table. Entries without a place are named only if you list all entries.
    """
    state_of_all = ScheduleStatus.of(app)
    now, entries = datetime.fromtimestamp(state_of_all.now, UTC), Schedule(app)
    query = Query(search=search, task=task, state=state or "", tag=tag, sort=sort)
    found = [*islice(rows_of(app, query), limit)]
    rows = {row.name: (row, row.entry) for row in found if row.entry is not None}
    is_whole = limit is None and not (search or task or state or tag)
    quarantine, unusable = state_of_all.quarantine, {row.name: row.why for row in found if row.state == State.UNUSABLE}
    if not is_whole:
        named = {row.name for row in found}
        quarantine = {name: record for name, record in quarantine.items() if name in named}
    pending = _pending(app)
    no_place = {name: entries.no_place(name) for name in entries.without_place()} if is_whole else {}
    late = {} if state_of_all.redbeat_leads else dict(late_places(app, [entry for _, entry in rows.values()]))
    refused = refusal(app, state_of_all)
    problem = state_of_all.problem() or state_of_all.sent_elsewhere
    silent = state_of_all.redbeat_silent
    warning = silent or (REDBEAT_LEADS if state_of_all.redbeat_leads else refused or (problem if rows else ""))
    shown = {name: _outlook(row.next, row.state, late.get(name), pending.get(name)) for name, (row, _) in rows.items()}
    if as_json:
        led = {"warning": warning} if warning else {}
        show_json(
            {
                "entries": [
                    {
                        **_as_shown(entry),
                        "state": shown[name][1],
                        "next": shown[name][0],
                        "last_end": asdict(row.last_end) if row.last_end else None,
                    }
                    for name, (row, entry) in rows.items()
                ],
                "quarantine": quarantine,
                "unusable": unusable,
                "no_place": [*no_place],
                "late_place": [name for name, place in late.items() if place.level != "fine"],
                "pauses": [asdict(pause) for pause in state_of_all.pauses],
                **led,
            }
        )
        return
    cells = []
    for name, (row, entry) in rows.items():
        last, end = age(_last_run(entry, pending.get(name)), now), row.last_end
        ended = f"{end.outcome} {age(end.at, now)}" if end else "-"
        when = readable_schedule(entry.schedule)
        upcoming, word = shown[name]
        also = ", paused" if word == State.DISABLED and row.is_paused else ""
        cells.append((name, entry.task, when, last, ended, moment(upcoming), word + also))
    table(("NAME", "TASK", "SCHEDULE", "LAST", "ENDED", "NEXT", "STATE"), cells, cut=(1, 2))
    if warning:
        begins = (
            "LAST, ENDED, NEXT and STATE hold for singlebeat, but " if state_of_all.redbeat_leads and not silent else ""
        )
        click.echo(marked(f"{begins}{warning}", "warning"))
    _show_warnings(filter(None, (state_of_all.lost and f"lost: {state_of_all.lost}", *map(str, state_of_all.pauses))))
    if state == State.PAUSED:
        _show_warnings(_pauses(entries, [entry for _, entry in rows.values() if entry.policy.paused]))
    for name, record in quarantine.items():
        click.echo(marked(f"{name}: quarantined: {record['reason']}", "problem"))
    for name, why in unusable.items():
        click.echo(marked(f"{name}: unusable: {why}; {QUARANTINED_LATER}", "problem"))
    _show_warnings(f"{name}: {entry.ignored}" for name, (_, entry) in rows.items() if entry.ignored)
    for name, why in no_place.items():
        click.echo(marked(f"{name}: {why}", "problem"))
    for name, place in late.items():
        if place.level != "fine":
            click.echo(marked(f"{name}: {place}", place.level))


def _pauses(entries: Schedule, paused: Sequence[Entry]) -> Iterator[str]:
    """Yield since when each paused entry is paused, by whom, and why."""
    recorded = pauses_recorded(entries) if paused else {}
    for entry in paused:
        by = paused_by(recorded.get(entry.name, ()))
        parts = ("paused", by, f"({entry.policy.note})" if entry.policy.note else "")
        yield f"{entry.name}: {' '.join(filter(None, parts))}"


def _show_warnings(texts: Iterable[str]) -> None:
    for text in texts:
        click.echo(marked(text, "warning"))


@command("show", click.argument("name"))
def show_(app: Celery, as_json: bool, name: str) -> None:
    """Show an entry with its policy and its past.

    Of an entry that cannot be read, show the readable parts, and the raw strings of the others.
    """
    entries, found = Schedule(app), ScheduleStatus.of(app)
    problem, now = found.quarantine.get(name, {}).get("reason", ""), datetime.fromtimestamp(found.now, UTC)
    try:
        entry = entries.get(name)
    except UnknownEntryError as exc:
        raise UnknownEntryError(f"{exc}{why_gone(entries, name)}") from None
    except EntryError as exc:
        reason, state = (problem, "quarantined") if problem else (f"{exc}; {QUARANTINED_LATER}", "unusable")
        _show_broken(entries.salvage(name), reason, state, as_json)
        return
    late = None if found.redbeat_leads else dict(late_places(app, [entry])).get(name)
    pending = _pending(app).get(name)
    pause = found.pause_over(entry.policy)
    upcoming, state = _outlook(*outlook(entry, now, pause), late, pending)
    if problem:
        upcoming, state = None, "quarantined"
    elif unusable := entry.why_unusable(now):
        problem, upcoming, state = f"{unusable}; {QUARANTINED_LATER}", None, "unusable"
    elif no_place := entries.no_place(name):
        problem, upcoming, state = no_place, None, "no place"
    elif late is not None and late.is_wrong:
        problem = str(late)
    put_off = str(late) if late is not None and late.level == "warning" else ""
    many = str(pause) if pause is not None else ""
    warnings = [text for text in (entry.ignored, put_off, many, found.redbeat_leads and REDBEAT_LEADS) if text]
    if as_json:
        why = {"reason": problem} if problem else {}
        why |= {"warning": "; ".join(warnings)} if warnings else {}
        paused = {"pause": asdict(pause)} if pause is not None else {}
        show_json({**_as_shown(entry), "state": state, **why, **paused, "next": upcoming})
        return
    call = masked({"task": entry.task, "args": entry.args, "kwargs": entry.kwargs, "options": entry.options}, app)
    _show_rows(
        {
            "task": call.pop("task"),
            "schedule": readable_schedule(entry.schedule),
            **call,
            "state": state,
            "last": moment(_last_run(entry, pending)),
            "runs": entry.meta.total_run_count,
            "next": moment(upcoming),
            **json.loads(entry.policy.encode() or "{}"),
        }
    )
    _show_reason(problem)
    for warning in warnings:
        click.echo(marked(f"{'warning':<20}{warning}", "warning"))


def _show_broken(found: Salvage, reason: str, state: str, as_json: bool) -> None:
    """Show the readable parts of an entry, and the raw strings of the others."""
    broken = {"definition" if name in FIELDS else name for name in found.problems}
    texts = {name: masked_text(text, found.app) for name, text in found.texts.items() if text and name in broken}
    if as_json:
        show_json({"name": found.name, "state": state, "reason": reason, "problems": found.problems, **texts})
        return
    fields = {name: found.fields[name] for name in FIELDS if name in found.fields}
    fields = dict(masked(fields, found.app))
    if "schedule" in fields:
        fields["schedule"] = readable_schedule(fields["schedule"])
    _show_rows({**fields, "state": state, **({} if "policy" in broken else found.wishes), **texts})
    for problem in dict.fromkeys((*found.problems.values(), reason)):
        _show_reason(problem)


def _show_rows(rows: Mapping[str, object]) -> None:
    for label, value in rows.items():
        click.echo(f"{label:<20}{printable(value)}")


def _show_reason(reason: str) -> None:
    if reason:
        click.echo(marked(f"{'problem':<20}{reason}", "problem"))


@command(
    "next",
    click.argument("name"),
    click.option("-n", "count", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Number of times."),
    click.option("--after", help="Show only later times; ISO 8601, in UTC unless it has an offset."),
    click.option("--timezone", help="Show the times in this time zone. Default: UTC."),
)
def next_(app: Celery, as_json: bool, name: str, count: int, after: str | None, timezone: str | None) -> None:
    """Show the next times of an entry, whether it is paused or not."""
    try:
        zone = ZoneInfo(timezone) if timezone else UTC
    except (KeyError, ValueError, OSError):
        raise click.BadParameter(f"there is no time zone {timezone!r}") from None
    runs = [run.astimezone(zone) for run in Schedule(app).next_runs(name, count, after=parse_instant(after))]
    if as_json:
        show_json(runs)
        return
    for run in runs:
        click.echo(run.isoformat(sep=" ", timespec="seconds"))
    if not runs:
        click.echo("the entry never runs again")
