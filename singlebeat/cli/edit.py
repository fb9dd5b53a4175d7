"""Commands that change entries: ``add``, ``edit``, ``delete``, ``pause``, ``resume``, ``trigger``, ``backfill``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

import click
from celery.schedules import crontab, schedule

from ..advice import command_line, redis_command
from ..beat.entries.entry import NOTHING, Entry
from ..beat.entries.policy import EntryPolicy
from ..beat.entries.schedule_json import why_no_crontab
from ..beat.entries.statics import OPERATORS, Statics
from ..beat.schedule import Schedule
from ..beat.server_time import server_now
from ..beat.status import ScheduleStatus
from ..connections import schedule_client
from ..errors import ConflictError, EntryError, UnknownEntryError
from ..overlap import Overlap
from .output import UNANSWERED, Seconds, command, done, fail, moment, parse_instant, printable, progress, show_json

if TYPE_CHECKING:
    from celery import Celery
    from celery.schedules import BaseSchedule

    from ..beat.entries.definition import Fields
    from ..beat.entries.pauses import Pause
    from ..beat.entries.policy import Wishes
    from ..beat.entries.salvage import Salvage
    from .output import Decorator

NAME = click.argument("name")
DEFINITION: Sequence[Decorator] = (
    click.option("--every", type=Seconds(min=0, min_open=True), help="Interval between two runs, in seconds."),
    click.option("--cron", help="Crontab of five fields: minute, hour, day of month, month, day of week."),
    click.option("--args", "args_", help="Positional arguments of the task, as a JSON array."),
    click.option("--kwargs", "kwargs_", help="Keyword arguments of the task, as a JSON object."),
    click.option("--options", "options_", help="Options of apply_async, as a JSON object."),
    click.option(
        "--enable/--disable", "enabled", default=None, help="Whether the entry runs. Default of a new entry: yes."
    ),
    click.option(
        "--set",
        "wishes",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set an option of the policy, such as timezone=Europe/Berlin; timezone= unsets it. May be repeated.",
    ),
    click.option(
        "--tag", "tags", multiple=True, help="Tag of the entry, in place of those that it has. May be repeated."
    ),
)

#: The option that replaces each part of an entry.
OPTIONS = {
    "task": "--task",
    "schedule": "--every or --cron",
    "args": "--args",
    "kwargs": "--kwargs",
    "options": "--options",
    "enabled": "either --enable or --disable",
    "policy": "--set",
}


def _entries(app: Celery) -> Schedule:
    """Return the entries of an app, to be changed from the command line."""
    return Schedule(app, by="cli")


def _json(text: str | None, kind: type, option: str) -> Any:
    if text is None:
        return None
    needed = f"is no JSON {'array' if kind is list else 'object'}"  # its text is not repeated: arguments may be secret
    try:
        value = json.loads(text)
    except RecursionError:
        raise click.BadParameter(f"{needed}: it is nested too deeply", param_hint=option) from None
    except ValueError as exc:
        raise click.BadParameter(f"{needed}: {exc}", param_hint=option) from None
    if not isinstance(value, kind):
        raise click.BadParameter(needed, param_hint=option)
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
    given = dict(zip(names, fields, strict=True))
    try:
        return crontab(**given)
    except Exception as exc:  # Celery's parser raises any exception
        raise click.BadParameter(f"{cron!r}: {why_no_crontab(exc, given)}", param_hint="--cron") from None


def _wishes(given: Sequence[str]) -> dict[str, Any]:
    wishes = dict[str, Any]()
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.BadParameter(f"is not NAME=VALUE: {each!r}", param_hint="--set")
        if name in OPTIONS and name != "policy":
            raise click.BadParameter(f"{name!r} is no policy option: use {OPTIONS[name]}", param_hint="--set")
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
    entries = _entries(app)
    when, wishes = _schedule(given["every"], given["cron"]), _wishes(given["wishes"])
    if given["tags"]:
        wishes |= {"tags": list(given["tags"])}
    fields = {
        "task": task,
        "schedule": when,
        "args": _json(given["args_"], list, "--args"),
        "kwargs": _json(given["kwargs_"], dict, "--kwargs"),
        "options": _json(given["options_"], dict, "--options"),
        "enabled": given["enabled"],
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    found = None if new else entries.salvage(name)
    if found is not None:
        _check_left(found, fields, wishes)
    try:
        with _given_values():
            if found is not None:
                entries.save(found.changed(fields, wishes))
            elif replace:
                entries.upsert(name, **fields, **wishes)
            else:
                entry = Entry(name, app=app, policy=EntryPolicy.of(wishes), **fields)
                entry.version = NOTHING
                entries.save(entry)
    except ConflictError:
        if not new or replace:
            raise
        fail(f"there is an entry {name!r} already: use edit or --replace, or delete the entry first")
    except ValueError as exc:  # a value that JSON cannot hold
        fail(f"entry {name!r} cannot be stored: {exc}", UNANSWERED)
    upcoming, entry = next(iter(entries.next_runs(name, 1)), None), entries.get(name)
    pause = _pause_over(entries, entry.policy)
    off = " and ".join(["paused"] * entry.policy.paused + ["disabled"] * (not entry.enabled))
    off += f"{', and ' * bool(off)}paused, as {pause}: {pause.resumed_by}" if pause is not None else ""
    kept = fields in ({}, {"enabled": False}) and wishes.keys() <= set(OPERATORS)
    back = "" if kept else comes_back(app, name, "replaces these values")
    facts: dict[str, object] = {"pause": asdict(pause)} if pause is not None else {}
    done(as_json, f"{name}: {off or f'next {moment(upcoming)}'}{back}", name=name, next=upcoming, **facts)


@contextmanager
def _given_values() -> Iterator[None]:
    """End the command as one of wrong usage if the values of its arguments cannot be used."""
    try:
        yield
    except (UnknownEntryError, ConflictError):
        raise
    except EntryError as exc:
        fail(str(exc), UNANSWERED)


def _pause_over(entries: Schedule, policy: EntryPolicy) -> Pause | None:
    """Return a pause of many entries that covers an entry with a policy, None if there is none."""
    return next((pause for pause in entries.pauses() if pause.covers(policy)), None)


def comes_back(app: Celery, name: str, what: str) -> str:
    """Return what to add to the answer to a change that the code undoes; empty if it does not.

    Args:
        what: what ``beat_schedule`` does to the change.
    """
    if name not in map(str, app.conf.beat_schedule):
        return ""
    return f"; beat_schedule has it, and {what} at the latest when the next term of leadership begins"


def _check_left(found: Salvage, fields: Fields, wishes: Wishes) -> None:
    """Check that a command replaces every unreadable part of an entry.

    Raises:
        EntryError: an unreadable part is not replaced; the message names all options that are needed.
    """
    replaced = {*fields, *(["policy"] if wishes else [])}
    left = {name: why for name, why in found.problems.items() if name in OPTIONS and name not in replaced}
    if left:
        wrong = [name for name in OPTIONS if name in found.problems]
        why = "; ".join(dict.fromkeys(found.problems[name] for name in wrong))
        *first, last = (OPTIONS[name] for name in wrong)
        options = f"{', '.join(first)}, and {last}" if first else last
        raise EntryError(
            f"entry {found.name!r} cannot be used: {why}. Replace the wrong parts in one command, with {options}"
        )


@command(
    "add",
    NAME,
    click.argument("task"),
    *DEFINITION,
    click.option("--replace", is_flag=True, help="Replace an entry of this name; only its past and pause stay."),
)
def add_(app: Celery, as_json: bool, name: str, task: str, replace: bool, **given: Any) -> None:
    """Store a new entry that runs TASK; fail if there is an entry of this name.

    Give it a schedule by --every or --cron. An entry that beat could not use is not stored.
    """
    if given["every"] is None and given["cron"] is None:
        raise click.UsageError("it needs --every or --cron")
    _store(app, name, task, given, as_json, new=True, replace=replace)


@command("edit", NAME, *DEFINITION, click.option("--task", help="Name of the task that the entry runs."))
def edit_(app: Celery, as_json: bool, name: str, task: str | None, **given: Any) -> None:
    """Change the given parts of an entry, and keep the others.

    If parts of the entry cannot be read, the error names the options that you have to give for them.
    """
    _store(app, name, task, given, as_json)


@command("delete", NAME)
def delete_(app: Celery, as_json: bool, name: str) -> None:
    """Delete an entry, also one that cannot be read.

    An entry of beat_schedule comes back at the latest when the next term of leadership begins: pause it instead.
    """
    if not _entries(app).delete(name):
        fail(f"there is no entry {name!r}{Schedule(app).meant_instead(name)}")
    back = comes_back(app, name, "brings it back")
    if left := Schedule(app).foreign_key(name):
        key, kind = left
        text = (
            f"{name}: its place in the schedule and its quarantine are removed{back}. Its key {key} stays, for it is a "
            f"{kind} of another program. If no program needs that key: {redis_command('DEL', key)}"
        )
        done(as_json, text, name=name, deleted=True, left=key)
        return
    done(as_json, f"{name}: deleted{back}", name=name, deleted=True)


#: The options that choose many entries instead of one.
MANY: Sequence[Decorator] = (
    click.argument("name", required=False),
    click.option("--tag", help="All entries with this tag, in place of one entry."),
    click.option("--all", "all_", is_flag=True, help="All entries, in place of one."),
)


def _check_choice(name: str | None, tag: str | None, all_: bool) -> None:
    """Check that exactly one of the name of an entry, a tag and all entries is given.

    Raises:
        click.UsageError: none or several are.
    """
    if [name is not None, tag is not None, all_].count(True) != 1:
        raise click.UsageError("give either the NAME of an entry, --tag or --all")


def _parse_until(text: str, now: datetime) -> datetime:
    """Return the end of a pause: a date and time, or the next moment with a time of day, in UTC."""
    try:
        clock = time.fromisoformat(text)
    except ValueError:
        until = parse_instant(text)
        assert until is not None  # noqa: S101 - for the type checker
        return until
    until = datetime.combine(now.date(), clock, clock.tzinfo or UTC)
    while until <= now:
        until += timedelta(days=1)
    return until


@command(
    "pause",
    *MANY,
    click.option("--note", default="", help="Reason of the pause, for other operators."),
    click.option(
        "--until",
        help="With --tag or --all: when the pause ends by itself, such as 18:00 or 2026-12-01T09:00, in UTC unless it "
        "has an offset.",
    ),
    needs_tasks=False,
)
def pause_(
    app: Celery, as_json: bool, name: str | None, tag: str | None, all_: bool, note: str, until: str | None
) -> None:
    """Pause an entry, all entries with a tag, or all entries: their times pass without a run.

    The pause stays, also when beat_schedule is installed again, until you resume, or until the given time. Entries that
    you add meanwhile are covered by a pause with --tag or --all, too.
    """
    _check_choice(name, tag, all_)
    entries = _entries(app)
    if name is not None:
        if until is not None:
            raise click.UsageError("--until needs --tag or --all")
        former = entries.pause(name, note)
        replaces = f"; this replaces the note of its pause: {former}" if former else ""
        done(as_json, f"{name}: paused{replaces}", name=name, paused=True, replaced=former)
        return
    now = server_now(schedule_client(app), entries.keys.schedule)
    with _given_values():
        before = entries.pause_many(tag=tag, note=note, until=None if until is None else _parse_until(until, now))
    pause = next(pause for pause in entries.pauses() if pause.tag == tag)
    none = tag is not None and not entries.tags().get(tag)
    text = f"{pause}{'; no entry has this tag now' if none else ''}"
    replaced = asdict(before) if before is not None else None
    done(as_json, f"{text}; this replaces: {before}" if before else text, pause=asdict(pause), replaced=replaced)


@command("resume", *MANY, needs_tasks=False)
def resume_(app: Celery, as_json: bool, name: str | None, tag: str | None, all_: bool) -> None:
    """End a pause of an entry, of a tag or of all entries; runs that were due meanwhile are not made up for.

    Each pause is ended by itself: --all leaves entries paused that were paused by their names or tags.
    """
    _check_choice(name, tag, all_)
    entries = _entries(app)
    if name is None:
        with _given_values():
            was_paused = entries.resume_many(tag=tag)
        which = "all entries" if tag is None else f"entries with tag {tag}"
        left = entries.pauses()
        still = "".join(f"; {pause}, to go on: {pause.resumed_by}" for pause in left)
        text = f"{which}: {'resumed' if was_paused else 'they were not paused so'}{still}"
        done(as_json, text, tag=tag, resumed=was_paused, pauses=[asdict(pause) for pause in left])
        return
    was_paused = entries.resume(name)
    disabled, pause, over = False, None, ""
    with suppress(EntryError):  # its definition cannot be read
        entry = entries.get(name)
        disabled = not entry.enabled
        pause = _pause_over(entries, entry.policy)
        with suppress(Exception):  # a user's own schedule may raise anything
            now = server_now(schedule_client(app), entries.keys.schedule)
            over = entry.timetable.why_over(entry.meta.counts_from, now, count=entry.total_run_count)
    off = f", and still disabled: {command_line('edit', name, option='--enable')}" if disabled else ""
    off += f", and still paused, as {pause}: {pause.resumed_by}" if pause is not None else ""
    if Statics(app, schedule_client(app)).is_paused(name):
        off += "; beat_schedule pauses it again when the next term of leadership begins"
    if over:
        off += f", and never runs: {over}. To run it all the same: {command_line('trigger', name)}"
    facts: dict[str, object] = {"disabled": True} if disabled else {}
    facts |= {"pause": asdict(pause)} if pause is not None else {}
    text = f"{name}: {'resumed' if was_paused else 'it was not paused'}{off}"
    done(as_json, text, name=name, paused=False, resumed=was_paused, **facts)


@command(
    "trigger",
    NAME,
    click.option(
        "--overlap",
        type=click.Choice([word.value for word in Overlap if word is not Overlap.RAISE]),
        help="What becomes of the run if it meets an equal call. Default: as the entry says.",
    ),
    click.option(
        "--timeout",
        type=Seconds(min=0),
        default=10.0,
        show_default=True,
        help="How long to wait while another occurrence of the entry is pending, in seconds.",
    ),
)
def trigger_(app: Celery, as_json: bool, name: str, overlap: str | None, timeout: float) -> None:
    """Run an entry once, as soon as a beat leads, and print the id of the task.

    The entry may be paused, disabled or finished. Its other times stay, and the run is not counted.
    """
    state = ScheduleStatus.of(app)  # before: after it, an error would hide that the run was requested
    task_id = _entries(app).trigger(name, overlap=overlap, timeout=timeout)
    waits = "a beat of RedBeat leads: the run waits for a beat of singlebeat" if state.redbeat_leads else ""
    if state.why_leaderless:
        waits = f"{state.why_leaderless}. The run is sent once a beat leads"
    elif not state.works:
        waits = f"{state.problem()}: the run is sent when a beat is started"
    if name in state.quarantine:
        explain = command_line("explain", name)
        waits = f"it is quarantined, and the run is sent once that is over ({explain})"
    text = f"{name}: requested, task {task_id}{waits and '; '}{waits}"
    done(as_json, text, name=name, task_id=task_id)


@command(
    "backfill",
    NAME,
    click.argument("start"),
    click.argument("end"),
    click.option("--dry-run", is_flag=True, help="Only print the times of the runs."),
    click.option(
        "--limit",
        type=click.IntRange(1, 10**9),
        default=1000,
        show_default=True,
        help="Most runs; if there are more, none is sent.",
    ),
    click.option(
        "--overlap",
        type=click.Choice([word.value for word in Overlap]),
        default=Overlap.BUFFER_ALL.value,
        show_default=True,
        help="What becomes of a run that meets an equal call.",
    ),
)
def backfill_(
    app: Celery, as_json: bool, name: str, start: str, end: str, dry_run: bool, limit: int, overlap: str
) -> None:
    """Run an entry once for each of its times after START until END, END included; these times must have passed.

    START and END are in ISO 8601, in UTC unless they have an offset. Beat gets each run after it has sent the run
    before. Repeat the command to continue after an interruption. After a complete backfill, all times run again: if its
    answer was lost, see the history before you repeat it.
    """
    entries, first, last = _entries(app), parse_instant(start), parse_instant(end)
    assert first is not None  # noqa: S101 - for the type checker
    assert last is not None  # noqa: S101
    entries.get(name)  # raises if there is no entry of this name, or none that can be read
    with _given_values():
        planned = entries.backfill(name, first, last, overlap=overlap, limit=limit, dry_run=True)
    rows: list[tuple[datetime, str | None]] = [(nominal, None) for nominal in planned]
    if not dry_run:
        click.echo(f"{printable(name)}: {len(planned)} runs, each handed to beat when the last one is sent", err=True)
        with progress("runs handed over", len(planned), quiet=as_json) as step:
            sent = entries.backfill(name, first, last, overlap=overlap, limit=limit, progress=step)
        rows = [(datetime.fromtimestamp(each.nominal, UTC), each.id) for each in sent]
    if as_json:
        show_json([{"nominal": nominal, "id": task_id} for nominal, task_id in rows])
        return
    for nominal, task_id in rows:
        click.echo(f"{moment(nominal)}  {task_id}" if task_id else moment(nominal))
