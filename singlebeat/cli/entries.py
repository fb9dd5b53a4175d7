"""Entries, only looked at: ``list``, ``show``, ``next``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click
from celery.schedules import crontab, schedule

from ..beat.api import Schedule
from ..beat.state import State
from ..errors import EntryError, UnknownEntryError
from .output import age, command, instant, marked, moment, printable, show_json, table

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.entry import Entry
    from ..beat.salvage import Salvage


#: Of a definition, in the order in which people see them.
FIELDS = ("task", "schedule", "args", "kwargs", "options", "enabled")


def readable_schedule(when: Any) -> str:
    """Return a schedule for people."""
    if isinstance(when, crontab):
        names = ("_orig_minute", "_orig_hour", "_orig_day_of_month", "_orig_month_of_year", "_orig_day_of_week")
        return "cron " + " ".join(str(getattr(when, name)) for name in names)
    if type(when) is schedule:
        return f"every {when.run_every.total_seconds():g} s"
    return str(when)


def state_of(entry: Entry) -> str:
    """Return one word for an entry."""
    if not entry.enabled:
        return "disabled"
    if entry.policy.paused:
        return "paused"
    limit = entry.policy.max_runs
    return "finished" if limit is not None and entry.total_run_count >= limit else "active"


def as_mapping(entry: Entry) -> Mapping[str, Any]:
    """Return an entry as JSON has it."""
    since = entry.meta.since
    return {
        "name": entry.name,
        "definition": json.loads(entry.encode()),
        "policy": json.loads(entry.policy.encode() or "{}"),
        "meta": json.loads(entry.meta.encode()) | ({"since": since.isoformat()} if since else {}),
    }


def _next(entry: Entry) -> datetime | None:
    try:
        return next(iter(entry.timetable.runs(entry.meta.counts_from, datetime.now(UTC), count=entry.total_run_count)))
    except Exception:  # there is none; or a user's own schedule fails, and why is with what is set aside
        return None


@command("list")
def list_(app: Celery, as_json: bool) -> None:
    """List all entries by the time of their next run, and those that are set aside; LAST is how long ago one ran."""
    broken = dict[str, Mapping[str, str]]()  # also those that no beat has looked at yet
    entries = list(
        Schedule(app).list(left_out=lambda name, why: broken.update({name: {"reason": str(why), "since": ""}}))
    )
    aside = {**broken, **State.of(app).quarantine}
    if as_json:
        rows = [{**as_mapping(entry), "state": state_of(entry), "next": _next(entry)} for entry in entries]
        show_json({"entries": rows, "quarantine": aside})
        return
    now = datetime.now(UTC)
    rows_ = [
        (e.name, e.task, readable_schedule(e.schedule), age(e.meta.last_run, now), moment(_next(e)), state_of(e))
        for e in entries
    ]
    table(("NAME", "TASK", "SCHEDULE", "LAST", "NEXT", "STATE"), rows_, wide=(0, 1, 2))
    for name, record in aside.items():
        click.echo(marked(f"{name}: set aside: {record['reason']}", "problem"))


@command("show", click.argument("name"))
def show_(app: Celery, as_json: bool, name: str) -> None:
    """Show one entry with its policy and its past; one that cannot be read, as far as it can."""
    entries, aside = Schedule(app), State.of(app).quarantine.get(name, {}).get("reason", "")
    try:
        entry = entries.get(name)
    except UnknownEntryError:
        raise
    except EntryError as exc:
        _show_broken(entries.salvage(name), aside or str(exc), as_json)
        return
    state = "set aside" if aside else state_of(entry)
    if as_json:
        why = {"reason": aside} if aside else {}
        show_json({**as_mapping(entry), "state": state, **why, "next": _next(entry)})
        return
    _show_rows(
        {
            "task": entry.task,
            "schedule": readable_schedule(entry.schedule),
            "args": entry.args,
            "kwargs": entry.kwargs,
            "options": entry.options,
            "state": state,
            "last": moment(entry.meta.last_run),
            "runs": entry.meta.total_run_count,
            "next": moment(_next(entry)),
            **json.loads(entry.policy.encode() or "{}"),
        }
    )
    _show_reason(aside)


def _show_broken(found: Salvage, reason: str, as_json: bool) -> None:
    """Show what can be read of an entry, and the rest as it is."""
    broken = {"definition" if name in FIELDS else name for name in found.problems}
    texts = {name: text for name, text in found.texts.items() if text and name in broken}
    if as_json:
        show_json({"name": found.name, "state": "set aside", "reason": reason, "problems": found.problems, **texts})
        return
    fields = {name: found.fields[name] for name in FIELDS if name in found.fields}
    if "schedule" in fields:
        fields["schedule"] = readable_schedule(fields["schedule"])
    _show_rows({**fields, "state": "set aside", **({} if "policy" in broken else found.wishes), **texts})
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
    click.option("-n", "count", type=click.IntRange(1, 10_000), default=10, show_default=True),
    click.option("--after", help="Only what is later, in ISO 8601; without offset it is in UTC."),
    click.option("--timezone", help="Show wall clocks of this zone; default: UTC."),
)
def next_(app: Celery, as_json: bool, name: str, count: int, after: str | None, timezone: str | None) -> None:
    """Show the next times of an entry, whether it is paused or not."""
    try:
        zone = ZoneInfo(timezone) if timezone else UTC
    except (KeyError, ValueError, OSError):
        raise click.BadParameter(f"there is no time zone {timezone!r}") from None
    runs = [run.astimezone(zone) for run in Schedule(app).next_runs(name, count, after=instant(after))]
    if as_json:
        show_json(runs)
        return
    for run in runs:
        click.echo(run.isoformat(sep=" ", timespec="seconds"))
    if not runs:
        click.echo("it never runs again")
