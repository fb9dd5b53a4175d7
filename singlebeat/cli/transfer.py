"""Commands that move entries as JSON: ``export`` and ``import``."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any

import click

from ..advice import listed
from ..beat.calendar.clocked import comes_once
from ..beat.calendar.zone import app_zone
from ..beat.decide import claim_for
from ..beat.entries.author import Author
from ..beat.entries.definition import LONGEST_STEP_BACK, MOST_NESTED, Meta
from ..beat.entries.entry import Entry
from ..beat.entries.fields import BATCH, read_fields
from ..beat.entries.policy import EntryPolicy
from ..beat.entries.save import save_entries
from ..beat.entries.statics import Statics
from ..beat.entries.timetable import EPOCH, TICK
from ..beat.keys import Keys
from ..beat.schedule import Schedule
from ..beat.server_time import server_now
from ..beat.status import ScheduleStatus, counted, pending_occurrences
from ..beat.store.claims import Stored
from ..connections import schedule_client
from ..errors import EntryError, UnknownEntryError
from .django_celery_beat import UNKNOWN_THERE, is_dump, rows_of
from .entries import as_mapping
from .output import UNANSWERED, command, fail, is_strict, marked, progress, show_json

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.entries.occurrence import Occurrence

#: The fields of a row of an export.
FIELDS = ("name", "definition", "policy", "meta")

#: Arrays and objects in one another that are read of a file: those around a definition, and one too many in it.
DEEPEST = 2 + MOST_NESTED + 1

#: A string or a bracket of JSON.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


@command("export")
def export_(app: Celery, as_json: bool) -> None:
    """Print all entries as JSON, for ``import``.

    Entries that cannot be read, or that hold a number which JSON does not have, are named and left out; then the exit
    code is 1.

    Entries without a place in the schedule are printed, too, and named: an import gives them a place. Unknown fields,
    which beat ignores, are named and left out.

    A pause of one entry is in the file, a pause of many is not: each that lasts is named, with the command that makes
    it on another server. A run of the schedule that beat has claimed, and not sent yet, is made up for after the
    import; one that was triggered, or is of a backfill, is not in the file, and named.
    """
    entries, found, problems, warnings = Schedule(app), [], dict[str, EntryError](), dict[str, str]()
    waiting = pending_occurrences(schedule_client(app), entries.keys, most=0)
    pending = {entries.keys.name(key): occurrence for key, occurrence, _ in waiting}

    def add(entry: Entry) -> None:
        if (occurrence := pending.get(entry.name)) is not None:
            if not occurrence.is_scheduled:
                warnings[entry.name] = "a run that was asked for, and is not sent yet, is left out"
            entry = _before_claim(entry, occurrence)
        row = as_mapping(entry)
        if entry.ignored:
            text = f"{entry.ignored}, and left out"
            warnings[entry.name] = "; ".join(filter(None, (warnings.get(entry.name), text)))
        if is_strict(row):
            found.append(row)
        else:
            problems[entry.name] = EntryError("it holds a number that JSON does not have (infinity or NaN)")

    with progress("entries read", ScheduleStatus.of(app).entries, quiet=as_json) as step:
        for entry in entries.list(left_out=problems.__setitem__):
            add(entry)
            step()
    for name in entries.without_place():
        try:
            add(entries.get(name))
        except UnknownEntryError:  # it was deleted meanwhile
            continue
        except EntryError as exc:
            problems[name] = exc
        else:
            text = f"it has no place in {entries.keys.schedule} and never runs; an import gives it a place"
            warnings[name] = "; ".join(filter(None, (warnings.get(name), text)))
    show_json(found)
    _name(problems)
    _name(warnings, "warning")
    for pause in entries.pauses():
        text = f"{pause}: this is not in the file. To pause them on another server, before the import: {pause.made_by}"
        click.echo(marked(text, "warning"), err=True)
    raise SystemExit(1 if problems else 0)


def _before_claim(entry: Entry, occurrence: Occurrence) -> Entry:
    """Return an entry with its past before its pending occurrence was claimed, so that this is made up for."""
    past, last = entry.meta, entry.meta.last_run_at
    before = past.without(occurrence)
    if before is None or last is None or last.timestamp() != occurrence.nominal or past.sent == last:
        return entry  # it is sent by now
    since = None  # the times of an interval count from the run before
    with suppress(Exception):  # a user's own schedule may raise anything
        since = last - TICK if past.sent is None and entry.timetable.next(last - TICK) == last else None
    return entry.with_past(replace(before, last_run_at=past.sent, since=since))


class _Source(click.File):
    """The type of a file that is read; - is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> IO[bytes]:
        """Return the open file."""
        if value == "-" and sys.stdin is None:
            fail("standard input is closed: name a file, or send it through a pipe", UNANSWERED)
        found: IO[bytes] = super().convert(value, param, ctx)
        return found


@command(
    "import",
    click.argument("file", type=_Source("rb")),
    click.option("--from-now", is_flag=True, help="The times that have passed are not made up for."),
    click.option("--dry-run", is_flag=True, help="Only say which entries can be stored, and which would run at once."),
)
def import_(app: Celery, as_json: bool, file: IO[bytes], from_now: bool, dry_run: bool) -> None:
    """Store entries from a file of ``export``, or from ``dumpdata django_celery_beat``; - is standard input.

    An entry of the same name is replaced, enabled or not as the file has it. It stays paused if it is, and keeps
    its past unless the file has a later run: so you may import a later dump once more. Over a dump of Django, it
    also keeps what Django has no field for: overlap, misfire_grace_time, jitter, run_on_start and tags. An enabled
    task of one run runs again if it was changed in Django after its run here, and has not run there. A new entry
    gets the past from the file: beat makes up by one run for the times that have passed since. Use --from-now if
    they may have run since the export, as on a server that has lost them. A past that lies more than 3 hours ahead
    is of a wrong clock: the entry counts from now, and is named.

    An entry that cannot be stored, such as one with an unknown field, is named. The others are stored, and the exit
    code is 1. RedBeat's entries need no import: singlebeat uses them in place.
    """
    source = getattr(file, "name", "standard input")
    try:
        rows = _loads(file.read())
    except (ValueError, RecursionError) as exc:
        fail(f"{source} is no JSON: {exc}", UNANSWERED)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        fail(f"{source} is no JSON array of objects: neither of export nor of dumpdata", UNANSWERED)
    client, now = schedule_client(app), server_now(schedule_client(app), Schedule(app).keys.schedule)
    is_of_django = is_dump(rows)
    named = list(rows_of(rows, now) if is_of_django else _ours(rows))
    stored, problems, seen, catch_up = list[str](), dict[str, str](), set[str](), list[str]()
    warnings = dict[str, str]()
    with progress("entries", len(named), quiet=as_json) as step:
        for at in range(0, len(named), BATCH):
            batch = named[at : at + BATCH]
            read = _read(app, batch, problems, seen, now)
            if is_of_django:
                _keep_unknown_there(app, read)
            ahead = {name: entry for name, entry in read.items() if _is_ahead(entry, now)}
            for name, entry in ahead.items():
                known = entry.meta.counting_from(now, now).ahead
                read[name] = entry.with_past(Meta(None, entry.meta.total_run_count, now, known))
            for name in Statics(app, client).missing([*ahead]):  # others keep their past
                warnings[name] = "its past in the file lies ahead of the server's clock: it counts from now"
            if from_now:
                read = {name: entry.letting_pass(now) for name, entry in read.items()}
            late = [name for name, entry in read.items() if _runs_at_once(app, entry, now)]
            late = [*Statics(app, client).missing(late)]  # others keep their past
            failed = _store(app, read, dry_run, now)
            problems.update(failed)
            stored.extend(name for name in read if name not in failed)
            catch_up.extend(name for name in late if name not in failed)
            step(len(batch))
    others = _not_among(seen, app) if is_of_django else []
    if as_json:
        about = {"problems": problems, "warnings": warnings, "others": others}
        show_json({"stored": stored, "catch_up": catch_up, **about})
    else:
        click.echo(f"{'can be stored' if dry_run else 'stored'}: {len(stored)} of {len(named)}")
        if catch_up:
            runs = counted(len(catch_up), "of them runs", "of them run")
            text = f"{runs} at once, for times since the export, or without any run in the file: {listed(catch_up)}"
            also = "They may have run since: --from-now lets these times pass"
            click.echo(
                marked(f"{text}. {also}{'' if dry_run else ' (try it with --dry-run first)'}", "warning"), err=True
            )
        _name(problems)
        _name(warnings, "warning")
        _name_others(others)
    raise SystemExit(1 if problems else 0)


def _name_others(others: Sequence[str]) -> None:
    """Name the entries that a dump of Django lacks, each in a line: they go on running."""
    if not others:
        return
    left = counted(len(others), "entry is left as it is", "entries are left as they are")
    advice = "Delete what was deleted or renamed in Django since an earlier import"
    click.echo(marked(f"{left}, in neither the file nor beat_schedule. {advice}:", "warning"), err=True)
    for name in others:
        click.echo(marked(f"  {name}", "warning"), err=True)


def _not_among(names: Collection[str], app: Celery) -> list[str]:
    """Return the other entries that are stored, but for those of ``beat_schedule``."""
    client, keys = schedule_client(app), Schedule(app).keys
    members = client.zrange(keys.schedule, 0, -1)
    return sorted({keys.name(member) for member in members} - {*names} - {*client.smembers(keys.statics)})


def _is_ahead(entry: Entry, now: datetime) -> bool:
    """Return whether the past of an entry comes from a wrong clock, which must not silence it."""
    return entry.meta.counts_from is not None and entry.meta.counts_from > now + LONGEST_STEP_BACK


def _runs_at_once(app: Celery, entry: Entry, now: datetime) -> bool:
    """Return whether beat makes up for times of an entry that have passed, if the entry gets its past from the file."""
    if not Keys.of(app).is_possible(entry.name):
        return False  # it cannot be stored
    stored = Stored(entry.key, 0.0, ("",) * 5, entry, entry.meta, entry.policy, None)
    try:
        claim = claim_for(stored, now, zone=entry.zone or app_zone(app), prefix=Keys.of(app).prefix)
    except Exception:  # a user's own schedule may raise anything
        return False
    return claim.occurrence is not None


def _loads(data: bytes) -> Any:
    """Read JSON in UTF-8 or UTF-16, with or without a byte order mark; one entry that is too deep harms no other."""
    try:
        return json.loads(data)
    except RecursionError:
        return json.loads(_shallow(data.decode(json.detect_encoding(data), "surrogatepass")))


def _shallow(text: str) -> str:
    """Return JSON without the parts that are nested so deeply that their entry is refused without them, too."""
    kept, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in {"[", "{"}:
            depth += 1
            if depth == DEEPEST:
                kept.append(text[begin : token.end()])
        elif token[0] in {"]", "}"}:
            if depth == DEEPEST:
                begin = token.start()
            depth -= 1
    return "".join((*kept, text[begin:]))


def _name(problems: Mapping[str, object], level: str = "problem") -> None:
    for name, problem in problems.items():
        click.echo(marked(f"{name}: {problem}", level), err=True)


_Named = Sequence[tuple[str, Callable[[], Mapping[str, Any]]]]


def _ours(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    for number, row in enumerate(rows, 1):
        name = row.get("name")
        yield name if isinstance(name, str) else f"entry number {number}", row.copy


def _read(app: Celery, named: _Named, problems: dict[str, str], seen: set[str], now: datetime) -> dict[str, Entry]:
    """Return the valid entries by name, and record why the others are invalid.

    Args:
        problems: reasons by name; this function adds to it.
        seen: names of the earlier rows of the file; this function adds to it.
    """
    schedule, entries = Schedule(app), dict[str, Entry]()
    key = schedule.keys.prefix
    for name, row_of in named:
        if name in seen:
            problems.setdefault(name, "it is in the file more than once: only its first row counts")
            continue
        seen.add(name)
        try:
            row = row_of()
            if not isinstance(row.get("name"), str) or not row.get("definition"):
                raise EntryError("it has no name, or no definition")  # noqa: TRY301
            if unknown := next((field for field in row if field not in FIELDS), ""):
                near = difflib.get_close_matches(unknown, FIELDS, n=1)
                hint = f": did you mean {near[0]!r}?" if near else f", beside {', '.join(FIELDS)}: remove it"
                raise EntryError(f"the field {unknown!r} is unknown{hint}")  # noqa: TRY301
            fields = [json.dumps(row[f]) if row.get(f) else None for f in ("definition", "meta", "policy")]
            entry = Entry.from_fields(key + name, *fields, app=app)
            entry.zone = schedule.zone
            entry.version = None  # an existing entry is replaced
            only = entry.timetable.next(EPOCH) if not row.get("meta") and comes_once(entry.schedule) else None
            if only is not None and only <= now:
                entry = entry.with_past(replace(entry.meta, since=now))  # as save() does: else the entry would run now
            _ = entry.score  # raises if it cannot be computed
        except Exception as exc:  # a schedule may raise any exception, and must not affect other entries
            problems[name] = str(exc) if isinstance(exc, EntryError) else f"{type(exc).__name__}: {exc}"
        else:
            entries[name] = entry
    return entries


def _keep_unknown_there(app: Celery, entries: Mapping[str, Entry]) -> None:
    """Give tasks of Django those settings of the stored entries that Django has no fields for."""
    keys = Schedule(app).keys
    stored = read_fields(schedule_client(app), [keys.prefix + name for name in entries]) if entries else ()
    for entry, fields in zip(entries.values(), stored, strict=True):
        with suppress(EntryError):  # what cannot be read is replaced
            own = EntryPolicy.decode("" if isinstance(fields, str) else fields[2])
            entry.policy = replace(entry.policy, **{name: getattr(own, name) for name in UNKNOWN_THERE})


def _store(app: Celery, entries: Mapping[str, Entry], dry_run: bool, now: datetime) -> Mapping[str, str]:
    """Store entries, and return the reasons for the failures, by name."""
    author = Author.of(app, by="cli")
    results = save_entries(schedule_client(app), Schedule(app).keys, entries, now, author, dry_run=dry_run)
    return {name: str(problem) for name, problem in results.items() if problem is not None}
