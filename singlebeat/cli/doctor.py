"""The command ``doctor``: checks servers, settings, beats, workers, entries and locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..diagnosis.doctor import PARTS, Finding, Read, findings
from .output import REFUSED, command, marked, printable, progress, show_json

if TYPE_CHECKING:
    from celery import Celery


@command("doctor")
def doctor_(app: Celery, as_json: bool) -> None:
    """Check servers, settings, beats, workers, entries and locks; say what is wrong, and what to do.

    Exit code 1: there is a problem. 2: the schedule's server does not answer; the parts that need no such server are
    checked nevertheless.
    """
    schedule, found = Read(app), list[Finding]()
    with progress("parts checked", len(PARTS), quiet=as_json) as step:
        for finding in findings(schedule, step=step):
            found.append(finding)
            if not as_json:  # at once: a server that hangs may keep the next one waiting
                step.clear()
                click.echo(
                    f"{marked(f'{finding.level:<8}', finding.level)} {printable(finding.about)}: "
                    f"{printable(finding.text)}"
                )
    if as_json:
        show_json([finding._asdict() for finding in found])
    if schedule.error is not None:
        raise schedule.error  # the parts that need the schedule's server were left out
    raise SystemExit(REFUSED if any(finding.level == "problem" for finding in found) else 0)
