"""Entries, changed: ``add``, ``edit``, ``delete``, ``pause``, ``resume``, ``trigger``, ``backfill``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from celery.schedules import crontab, schedule

from ..beat.entries.entry import NOTHING, Entry
from ..beat.entries.policy import EntryPolicy
from ..beat.entries.schedule_json import why_no_crontab
from ..beat.schedule import Schedule
from ..beat.status import ScheduleStatus
from ..errors import ConflictError, EntryError
from ..overlap import Overlap
from .output import Seconds, command, fail, moment, parse_instant, printable, progress, show_json

if TYPE_CHECKING:
    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..beat.entries.definition import Fields
    from ..beat.entries.policy import Wishes
    from ..beat.entries.salvage import Salvage
    from .output import Decorator

NAME = click.argument("name")
DEFINITION: Sequence[Decorator] = (
    click.option("--every", type=Seconds(min=0, min_open=True), help="Seconds between two runs."),
    click.option("--cron", help="Five fields: minute, hour, day of month, month, day of week."),
    click.option("--args", "args_", help="JSON array."),
    click.option("--kwargs", "kwargs_", help="JSON object."),
    click.option("--options", "options_", help="JSON object: options of apply_async."),
    click.option("--enable/--disable", "enabled", default=None),
    click.option("--set", "wishes", multiple=True, metavar="NAME=VALUE", help="A wish of the policy; empty: none."),
)

#: What replaces a part of an entry.
OPTIONS = {
    "task": "--task",
    "schedule": "--every or --cron",
    "args": "--args",
    "kwargs": "--kwargs",
    "options": "--options",
    "enabled": "either --enable or --disable",
    "policy": "--set",
}


def _json(text: str | None, kind: type, option: str) -> Any:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise click.BadParameter(f"is no JSON {'array' if kind is list else 'object'}: {text}", param_hint=option)
    return value


def _schedule(every: float | None, cron: str | None) -> BaseSchedule | None:
    if every is not None and cron is not None:
        raise click.UsageError("--every or --cron, not both")
    if every is not None:
        try:
            return schedule(every)
        except OverflowError:
            raise click.BadParameter("is too long", param_hint="--every") from None
    if cron is None:
        return None
    fields = cron.split()
    if len(fields) != 5:
        raise click.BadParameter(f"needs five fields, not {len(fields)}: {cron!r}", param_hint="--cron")
    names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
    try:
        return crontab(**dict(zip(names, fields, strict=True)))
    except Exception as exc:  # its parser raises what it likes
        raise click.BadParameter(f"{cron!r}: {why_no_crontab(exc, fields[-1])}", param_hint="--cron") from None


def _wishes(given: Sequence[str]) -> Mapping[str, Any]:
    wishes = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.BadParameter(f"is not NAME=VALUE: {each!r}", param_hint="--set")
        try:
            wishes[name] = json.loads(value) if value else None
        except (ValueError, RecursionError):
            wishes[name] = value
    return wishes


def _store(
    app: Celery,
    name: str,
    task: str | None,
    given: Mapping[str, Any],
    as_json: bool,
    *,
    new: bool = False,
    replace: bool = False,
) -> None:
    entries = Schedule(app)
    when, wishes = _schedule(given["every"], given["cron"]), _wishes(given["wishes"])
    fields = {
        "task": task,
        "schedule": when,
        "args": _json(given["args_"], list, "--args"),
        "kwargs": _json(given["kwargs_"], dict, "--kwargs"),
        "options": _json(given["options_"], dict, "--options"),
        "enabled": given["enabled"],
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    try:
        if new and replace:
            entries.upsert(name, **fields, **wishes)
        elif new:
            entry = Entry(name, app=app, policy=EntryPolicy.of(wishes), **fields)
            entry.version = NOTHING
            entries.save(entry)
        else:
            found = entries.salvage(name)
            _check_left(found, fields, wishes)
            entries.save(found.changed(fields, wishes))
    except ConflictError:
        if not new or replace:
            raise
        fail(f"there is an entry {name!r}: use edit, --replace it, or delete it first")
    except ValueError as exc:  # what JSON cannot hold
        raise EntryError(f"entry {name!r} cannot be stored: {exc}") from exc
    upcoming = next(iter(entries.next_runs(name, 1)), None)
    if as_json:
        show_json({"name": name, "next": upcoming})
        return
    click.echo(f"{printable(name)}: next {moment(upcoming)}")


def _check_left(found: Salvage, fields: Fields, wishes: Wishes) -> None:
    """Check that what cannot be read of an entry is replaced.

    Raises:
        EntryError: something is not; the message names the options for it.
    """
    replaced = {*fields, *(["policy"] if wishes else [])}
    left = {name: why for name, why in found.problems.items() if name in OPTIONS and name not in replaced}
    if left:
        wrong = [name for name in OPTIONS if name in found.problems]
        why = "; ".join(dict.fromkeys(found.problems[name] for name in wrong))
        *first, last = (OPTIONS[name] for name in wrong)
        options = f"{', '.join(first)}, and {last}" if first else last
        raise EntryError(
            f"entry {found.name!r} cannot be used: {why}. Replace what is wrong; one command needs {options}"
        )


@command(
    "add",
    NAME,
    click.argument("task"),
    *DEFINITION,
    click.option("--replace", is_flag=True, help="Also if there is one of this name, which keeps its past and pause."),
)
def add_(app: Celery, as_json: bool, name: str, task: str, replace: bool, **given: Any) -> None:
    """Store a new entry; one of this name must not be there."""
    if given["every"] is None and given["cron"] is None:
        raise click.UsageError("it needs --every or --cron")
    _store(app, name, task, given, as_json, new=True, replace=replace)


@command("edit", NAME, *DEFINITION, click.option("--task", help="Name of the task."))
def edit_(app: Celery, as_json: bool, name: str, task: str | None, **given: Any) -> None:
    """Change what is named of an entry, and nothing else."""
    _store(app, name, task, given, as_json)


def _done(as_json: bool, text: str, **facts: object) -> None:
    if as_json:
        show_json(facts)
    else:
        click.echo(printable(text))


@command("delete", NAME)
def delete_(app: Celery, as_json: bool, name: str) -> None:
    """Remove an entry; one of beat_schedule comes back when a beat begins to lead."""
    if not Schedule(app).delete(name):
        fail(f"there is no entry {name!r}")
    _done(as_json, f"{name}: deleted", name=name, deleted=True)


@command("pause", NAME, click.option("--note", default="", help="Why, for people."))
def pause_(app: Celery, as_json: bool, name: str, note: str) -> None:
    """Let an entry's times pass without a run."""
    Schedule(app).pause(name, note)
    _done(as_json, f"{name}: paused", name=name, paused=True)


@command("resume", NAME)
def resume_(app: Celery, as_json: bool, name: str) -> None:
    """End a pause; what has passed is not made up for."""
    Schedule(app).resume(name)
    _done(as_json, f"{name}: goes on", name=name, paused=False)


@command("trigger", NAME, click.option("--timeout", type=Seconds(), default=10.0, show_default=True))
def trigger_(app: Celery, as_json: bool, name: str, timeout: float) -> None:
    """Let an entry run once as soon as a beat leads, also if it is paused."""
    task_id = Schedule(app).trigger(name, timeout=timeout)
    state = ScheduleStatus.of(app)
    waits = "a beat of RedBeat leads: it waits for one of singlebeat" if state.redbeat_leads else ""
    waits = waits or ("" if state.works else f"{state.problem()}: it is sent when one is started")
    text = f"{name}: asked for, task {task_id}{waits and '; '}{waits}"
    _done(as_json, text, name=name, task_id=task_id)


@command(
    "backfill",
    NAME,
    click.argument("start"),
    click.argument("end"),
    click.option("--dry-run", is_flag=True, help="Only list the times."),
    click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Most runs."),
    click.option(
        "--overlap",
        type=click.Choice([word.value for word in Overlap]),
        default=Overlap.BUFFER_ALL.value,
        show_default=True,
    ),
)
def backfill_(
    app: Celery, as_json: bool, name: str, start: str, end: str, dry_run: bool, limit: int, overlap: str
) -> None:
    """Let an entry run once for each of its times in (START, END]; goes on where it was interrupted."""
    entries, first, last = Schedule(app), parse_instant(start), parse_instant(end)
    assert first is not None  # noqa: S101 - for the type checker
    assert last is not None  # noqa: S101
    planned = entries.backfill(name, first, last, overlap=overlap, limit=limit, dry_run=True)
    rows: list[tuple[datetime, str | None]] = [(nominal, None) for nominal in planned]
    if not dry_run:
        click.echo(f"{printable(name)}: {len(planned)} runs, each handed to beat when the one before is sent", err=True)
        with progress("runs handed over", len(planned), quiet=as_json) as step:
            sent = entries.backfill(name, first, last, overlap=overlap, limit=limit, progress=step)
        rows = [(datetime.fromtimestamp(each.nominal, UTC), each.id) for each in sent]
    if as_json:
        show_json([{"nominal": nominal, "id": task_id} for nominal, task_id in rows])
        return
    for nominal, task_id in rows:
        click.echo(f"{moment(nominal)}  {task_id}" if task_id else moment(nominal))
