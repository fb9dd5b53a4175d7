"""Commands about past decisions and runs: ``history`` and ``explain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from ..beat.explain import explain
from ..beat.keys import Keys
from ..beat.schedule import Schedule
from ..beat.status import REDBEAT_LEADS, ScheduleStatus
from ..beat.store.probe import HISTORY, schedule_refusal
from ..connections import schedule_client, schedule_place
from ..diagnosis.facts import existing_entry, facts_of, with_pauses
from .output import command, marked, moment, parse_instant, printable, show_json, table

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.store.history import Record


@command(
    "history",
    click.argument("name", required=False),
    click.option(
        "-n", "count", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Number of decisions."
    ),
)
def history_(app: Celery, as_json: bool, name: str | None, count: int) -> None:
    """Show the last decisions about one entry, or about all entries without NAME, and how their runs ended.

    The last decision comes first. How a run ended is known if its worker has singlebeat.
    """
    entries = Schedule(app)
    records = with_pauses(entries, entries.history(name, count), name)
    if name is not None and not records:
        existing_entry(app, entries, name, ScheduleStatus.of(app))  # raises if there is none
    if lost := _lost(app, records, count):
        click.echo(marked(f"runs may be missing here: {lost}", "warning"), err=True)
    if refused := schedule_refusal(app, needs=HISTORY):
        text = f"runs may be missing here: the schedule's server {schedule_place(app)}: {refused}"
        click.echo(marked(text, "problem"), err=True)
    elif (state := ScheduleStatus.of(app, names=False)).redbeat_leads or state.unsent:
        text = REDBEAT_LEADS if state.redbeat_leads else state.unsent
        click.echo(marked(f"runs may be missing here: {text}", "warning"), err=True)
    if as_json:
        show_json([asdict(record) for record in records])
        return
    rows = []
    for record in records:
        end = record.end
        took = f" {end.duration:.1f} s" if end and end.duration is not None else ""
        outcome = f"{end.outcome}{took}" if end else record.reason or "no end known"
        rows.append((record.entry, moment(record.nominal), record.decision, outcome))
    table(("ENTRY", "FOR", "DECISION", "END, OR WHY"), rows)


def _lost(app: Celery, records: Sequence[Record], count: int) -> str:
    """Return what the server has lost, if records that were asked for may be among that; else an empty string."""
    at = (schedule_client(app).get(Keys.of(app).lost) or "").partition(" ")[0]
    if not at or (len(records) >= count and records[-1].at.isoformat() > at):
        return ""
    return ScheduleStatus.of(app, names=False).lost


@command(
    "explain",
    click.argument("name"),
    click.option("--at", help="Time in ISO 8601, in UTC unless it has an offset. Default: the last run."),
)
def explain_(app: Celery, as_json: bool, name: str, at: str | None) -> None:
    """Explain why an entry ran, did not run, or will run.

    The answer names the decision, the task that held the lock, and the end of the run, and says what to do.
    """
    when = parse_instant(at)
    if when is not None and not when.microsecond:  # a time as the tools print it stands for all of its second
        when += timedelta(seconds=1, microseconds=-1)
    facts = facts_of(app, name, when)
    sentences = list(explain(facts, when))
    if as_json:
        show_json(
            {"name": name, "explanation": sentences, "records": [asdict(record) for record in facts.records[:20]]}
        )
        return
    for sentence in sentences:
        click.echo(printable(sentence))
