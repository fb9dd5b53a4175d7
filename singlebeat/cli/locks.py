"""Commands about locks: ``locks`` and ``unlock``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..beat.lost_messages import AHEAD_FROM, MOST, Answers, Found, examine, free
from ..beat.store.probe import freezes_locks, lock_place, lock_refusal
from ..diagnosis.locks import free_one, locks_of, old, waiting
from ..locks.key import held_up_by
from ..run_results import flush_ends
from .output import command, marked, printable, progress, show_json, table

if TYPE_CHECKING:
    from celery import Celery


@command("locks")
def locks_(app: Celery, as_json: bool) -> None:
    """Show the held locks: task, entry, state, age, and the rest of the lease.

    Calls in state "waits" wait for their turn behind a lock. Those that no worker has received yet are missing, but for
    one that others can join or replace.
    """
    rows = []
    with progress("locks read", quiet=as_json) as step:
        for row in locks_of(app):
            rows.append(row)
            step()
    if as_json:
        shown = ("task", "args", "entry")
        show_json([{**asdict(lock), **{name: record.get(name) for name in shown}} for _, record, lock in rows])
        return
    cells, held = [], {key for key, *_ in rows}
    for _, record, lock in rows:
        began, now = float(record.get("since") or 0), float(record.get("now") or 0)
        age = f"{max(0.0, now - began) / 1000:.0f} s" if began and began <= now + AHEAD_FROM * 1000 else "?"
        left = "?" if lock.left is None else f"{lock.left:.0f} s"
        what = f"{record.get('task', '')} {record.get('args', '')}".strip()
        waits = not held.isdisjoint(held_up_by(lock.key))
        state = "waits" if waits else lock.state + ("?" if lock.seems_abandoned else "")
        cells.append((what, record.get("entry") or "-", lock.task_id, state, age, left))
    table(("TASK (ARGS)", "ENTRY", "HELD BY", "STATE", "SINCE", "LEFT"), cells, cut=(0,))
    silent = [lock for _, _, lock in rows if lock.seems_abandoned]
    if silent and freezes_locks(refused := lock_refusal(app)):
        click.echo(marked(f"the locks' server {lock_place(app)}: {refused}", "problem"))
    else:
        for lock in silent:
            text = f"task {lock.task_id}: last renewed {lock.last_renewed}: its worker has died, or hangs, or "
            text += "could not free it (celery singlebeat doctor asks the workers)"
            click.echo(marked(text, "warning"))


@command(
    "unlock",
    click.argument("which", required=False),
    click.option("--force", is_flag=True, help="Free the lock even if its owner runs: it runs on beside the next run."),
    click.option("--stale", is_flag=True, help="Free all locks whose messages are lost."),
)
def unlock_(app: Celery, as_json: bool, which: str | None, force: bool, stale: bool) -> None:
    """Free a lock by its task id or key; needs --force if the lock's owner is known to be alive.

    Without --force it frees the lock of a run whose worker seems dead, and of a message that is lost. In doubt the lock
    stays.

    A worker that has not renewed its lock for 40 % of the lease has died, or hangs. Make sure that its process is gone:
    the run of a process that hangs goes on beside the next run.
    """
    if stale == (which is not None) or (stale and force):
        raise click.UsageError("give a task id or a key, or --stale alone")
    if which is None:
        _unlock_stale(app, as_json=as_json)
        return
    lock = free_one(app, which, force=force)
    # No process can tell a worker that has died from one that hangs.
    warning = "if its process lives after all, that run goes on beside the next one" if lock.state == "running" else ""
    if as_json:
        show_json(
            {"key": lock.key, "task_id": lock.task_id, "unlocked": True, **({"warning": warning} if warning else {})}
        )
        return
    click.echo(
        printable(f"{lock.key}: free; it was held by task {lock.task_id}, {lock.state}{warning and '; '}{warning}")
    )


def _unlock_stale(app: Celery, *, as_json: bool) -> None:
    """Free all locks whose messages are lost or have run elsewhere, and say why the others stay."""
    rows = list(locks_of(app))
    locks, results, answers = list(old(app, rows)), list[Found](), Answers()
    young = sum(1 for _ in waiting(rows)) - len(locks)
    with progress("locks checked", len(locks), quiet=as_json) as step:
        for begin in range(0, len(locks), MOST):
            batch = examine(app, locks[begin : begin + MOST], answers=answers)
            gone = free(app, batch)
            results += gone + [found for found in batch if not found.outcome]
            for _ in batch:
                step()
    flush_ends(app)
    if as_json:
        told = [(found.lock.ref, found.outcome, found.reason) for found in results]
        show_json([{"key": ref.key, "task_id": ref.task_id, "outcome": o, "reason": why} for ref, o, why in told])
        return
    for found in results:
        what = f"freed, {found.outcome}" if found.outcome else "not freed"
        click.echo(printable(f"{found.lock.task}, task {found.lock.ref.task_id}: {what}: {found.reason}"))
    more = f"; {young} more are not late yet: their messages may start (see explain)" if young else ""
    click.echo(f"{sum(1 for found in results if found.outcome)} of {len(locks)} old queued locks were freed{more}")
