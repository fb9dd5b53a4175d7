"""The command ``doctor``: checks servers, settings, beats, workers, entries and locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..diagnosis.doctor import PARTS, findings, left_out
from .output import command, marked, printable, progress, show_json

if TYPE_CHECKING:
    from celery import Celery


@command("doctor")
def doctor_(app: Celery, as_json: bool) -> None:
    """Check servers, settings, beats, workers, entries and locks; say what is wrong, and what to do.

    Exit code 1: there is a problem. 2: the schedule's server does not answer; the parts that need no such server are
    checked nevertheless.
    """
    with progress("parts checked", len(PARTS), quiet=as_json) as step:
        found, error = findings(app, step=step)
    if as_json:
        show_json([finding._asdict() for finding in ((left_out(app, error), *found) if error else found)])
    else:
        for level, about, text in found:
            click.echo(f"{marked(f'{level:<8}', level)} {printable(about)}: {printable(text)}")
    if error is not None:
        raise error  # the parts that need the schedule's server were left out
    raise SystemExit(1 if any(finding.level == "problem" for finding in found) else 0)
