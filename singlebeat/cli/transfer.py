"""Entries as JSON: ``export`` and ``import``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import click
from celery.schedules import crontab, schedule

from ..beat.api import Schedule
from ..beat.codec import decode_definition
from ..beat.policy import Policy
from ..errors import EntryError
from .entries import as_mapping
from .output import command, fail, printable, show_json

if TYPE_CHECKING:
    from celery import Celery

#: Entries between two signs of progress.
PROGRESS = 500

#: Seconds of the periods that django-celery-beat has.
PERIODS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1, "microseconds": 1e-6}


@command("export")
def export_(app: Celery, as_json: bool) -> None:
    """Print all entries as JSON, for ``import``."""
    show_json([as_mapping(entry) for entry in Schedule(app).list()])


@command("import", click.argument("file", type=click.File("r")), click.option("--dry-run", is_flag=True))
def import_(app: Celery, as_json: bool, file: IO[str], dry_run: bool) -> None:
    """Store entries from a file of ``export``, or from ``dumpdata django_celery_beat``; - is standard input.

    An entry of the same name is replaced and keeps its past. What cannot be stored is named, and the rest is stored.
    RedBeat's entries need no import: singlebeat works on them where they are.
    """
    try:
        rows = json.load(file)
    except (ValueError, RecursionError) as exc:
        fail(f"{file.name} is no JSON: {exc}")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        fail(f"{file.name} is no JSON array of objects: neither of export nor of dumpdata")
    of_django = any("model" in row for row in rows)
    entries, stored, problems = Schedule(app), list[str](), dict[str, str]()
    for name, read in _django(rows) if of_django else _ours(rows):
        try:
            wanted = read()
            if not dry_run:
                entries.upsert(name, **wanted)
            stored.append(name)
        except (EntryError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
            problems[name] = str(exc) or type(exc).__name__
        if len(stored) % PROGRESS == 0 and stored:
            click.echo(f"{len(stored)} of {len(rows)}", err=True)
    if as_json:
        show_json({"stored": stored, "problems": problems})
    else:
        click.echo(f"{len(stored)} entries {'can be' if dry_run else 'are'} stored")
        for name, problem in problems.items():
            click.secho(printable(f"{name}: {problem}"), fg="red", err=True)
    raise SystemExit(1 if problems else 0)


def _ours(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    for number, row in enumerate(rows):

        def read(row: Mapping[str, Any] = row) -> Mapping[str, Any]:
            wishes = row.get("policy") or {}
            Policy.of(wishes)
            return {**decode_definition(json.dumps(row["definition"]), {}), **wishes}

        yield str(row.get("name") or f"entry number {number + 1}"), read


def _django(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    times = {(row.get("model"), row.get("pk")): row.get("fields") or {} for row in rows}
    for row in rows:
        if row.get("model") != "django_celery_beat.periodictask":
            continue
        fields = row.get("fields") or {}

        def read(fields: Mapping[str, Any] = fields) -> Mapping[str, Any]:
            options = {
                name: fields[name] for name in ("queue", "exchange", "routing_key", "priority") if fields.get(name)
            }
            headers = json.loads(fields.get("headers") or "{}")
            when, zone = _django_schedule(fields, times)
            return {
                "task": fields["task"],
                "schedule": when,
                "args": json.loads(fields.get("args") or "[]"),
                "kwargs": json.loads(fields.get("kwargs") or "{}"),
                "options": {**options, **({"headers": headers} if headers else {})},
                "enabled": bool(fields.get("enabled", True)),
                "timezone": zone,
                "start_time": fields.get("start_time"),
                "expires": fields.get("expire_seconds"),
                "max_runs": 1 if fields.get("one_off") else None,
                "note": fields.get("description") or "",
            }

        yield str(fields.get("name") or f"pk {row.get('pk')}"), read


def _django_schedule(fields: Mapping[str, Any], times: Mapping[Any, Mapping[str, Any]]) -> tuple[Any, str | None]:
    if fields.get("interval") is not None:
        given = times["django_celery_beat.intervalschedule", fields["interval"]]
        return schedule(given["every"] * PERIODS[given["period"]]), None
    if fields.get("crontab") is not None:
        given = times["django_celery_beat.crontabschedule", fields["crontab"]]
        names = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        return crontab(**{name: given[name] for name in names}), given.get("timezone") or None
    raise EntryError("neither an interval nor a crontab: solar and clocked times are not imported")
