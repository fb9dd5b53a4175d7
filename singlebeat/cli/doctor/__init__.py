"""The command ``doctor``: checks servers, settings, beats, workers, entries and locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ...beat.store.probe import schedule_server_says
from ...connections import RedisError, ResponseError, schedule_place, what_it_does
from ...errors import LockBackendError
from ..output import command, marked, printable, progress, show_json
from .beats import check_beats
from .entries import check_entries
from .finding import Finding, Read, of_locks
from .locks import check_locks
from .servers import (
    check_keys,
    check_prefixes,
    check_result_backend,
    check_rights,
    check_server,
    check_settings,
    describe_writes,
)
from .workers import check_workers

if TYPE_CHECKING:
    from celery import Celery

#: A part of the examination.
Check = Callable[["Celery", Read], Iterator[Finding]]

PARTS: Sequence[Check] = (
    *(check_server, check_keys, check_rights, check_result_backend, check_prefixes, check_settings),
    *(check_beats, check_entries, check_workers, check_locks, describe_writes),
)


@command("doctor")
def doctor_(app: Celery, as_json: bool) -> None:
    """Check servers, settings, beats, workers, entries and locks; say what is wrong, and what to do.

    Exit code 1: there is a problem. 2: the schedule's server does not answer; the parts that need no such server are
    checked nevertheless.
    """
    schedule = Read(app)
    found = dict[Finding, None]()
    with progress("parts checked", len(PARTS), quiet=as_json) as step:
        for check in PARTS:
            found |= dict.fromkeys(_on_any_server(app, check, schedule))  # a finding of many parts is shown once
            step()
    findings = list(found)
    if schedule.error is not None and as_json:
        text = f"it {what_it_does(schedule.error)}: {schedule.error}; the parts that need it were left out"
        findings.insert(0, Finding("problem", f"schedule's server {schedule_place(app)}", text))
    if as_json:
        show_json([finding._asdict() for finding in findings])
    else:
        for level, about, text in findings:
            click.echo(f"{marked(f'{level:<8}', level)} {printable(about)}: {printable(text)}")
    if schedule.error is not None:
        raise schedule.error  # the parts that need the schedule's server were left out
    raise SystemExit(1 if any(finding.level == "problem" for finding in findings) else 0)


def _on_any_server(app: Celery, check: Check, schedule: Read) -> Iterator[Finding]:
    """Yield the findings of a check, also if a server refuses; note an error of the schedule's server."""
    try:
        yield from check(app, schedule)
    except ResponseError as exc:
        yield Finding("problem", f"schedule's server {schedule_place(app)}", schedule_server_says(app, exc))
    except RedisError as exc:
        schedule.error = exc
    except LockBackendError as exc:
        yield of_locks(app, exc)
