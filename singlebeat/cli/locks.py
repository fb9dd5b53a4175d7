"""Commands about locks: ``locks`` and ``unlock``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..beat.explain import HeldLock
from ..beat.lost_messages import (
    AHEAD_FROM,
    BEFORE_SET_BACK,
    MOST,
    Answers,
    Found,
    Waiting,
    examine,
    free,
    may_yet_start,
)
from ..config import Config
from ..connections import broker_place
from ..locks import backend_of
from ..locks.base import Ref, read_generation
from ..locks.key import held_up_by
from ..run_results import flush_ends
from .output import command, fail, marked, printable, progress, show_json, table
from .workers import BrokerError, Workers

if TYPE_CHECKING:
    from celery import Celery


#: A lock: its key, its record, and what the record says.
_Row = tuple[str, Mapping[str, str], HeldLock]


def locks_of(app: Celery) -> Iterator[_Row]:
    """Yield every lock with its key and its record."""
    config = Config.of(app)
    for key, record in backend_of(app).locks(config.singleton_key_prefix):
        left = float(record["ttl"]) if record.get("ttl") else None
        began, now = float(record.get("since") or 0), float(record.get("now") or 0)
        # The record may still name the worker of an earlier run or delivery. A state that began in the future began
        # before the server's clock was set back, and the lock may have been renewed since then.
        renewed = float(record.get("renewed") or 0)
        is_known, worker = renewed >= began or (renewed > 0 and began > now), record.get("worker", "")
        age = (now - (renewed if is_known else began)) / 1000 if now and began else None
        is_ahead = age is not None and age < -AHEAD_FROM
        age = None if age is None or is_ahead else max(0.0, age)
        # Its worker may use another lease than this process; a bound (until) may have shortened the rest of the lease.
        is_whole = None not in (age, left) and "until" not in record
        lease = (age or 0.0) + (left or 0.0) if is_whole else config.singlebeat_lock_lease
        about = record.get("id", ""), record.get("state", ""), left, lease
        yield key, record, HeldLock(key, *about, age, worker if is_known else "", is_ahead)


def every(app: Celery) -> Iterator[HeldLock]:
    """Yield every lock."""
    return (lock for _, _, lock in locks_of(app))


def held_by(app: Celery, task_ids: Collection[str]) -> Mapping[str, HeldLock]:
    """Return a lock for each of the task ids that holds any; stop reading once all task ids are found."""
    found: dict[str, HeldLock] = {}
    locks = (lock for lock in every(app) if lock.task_id in task_ids)
    while len(found) < len(task_ids) and (lock := next(locks, None)) is not None:
        found[lock.task_id] = lock
    return found


def waiting(rows: Iterable[_Row], task_ids: Collection[str] | None = None) -> Iterator[Waiting]:
    """Yield the locks whose messages have not started, of all tasks or of some."""
    for key, record, lock in rows:
        if (task_ids is None or lock.task_id in task_ids) and (found := Waiting.of(key, record)) is not None:
            yield found


def old(app: Celery, rows: Iterable[_Row]) -> Iterator[Waiting]:
    """Yield the locks that have been queued for so long that their messages may be lost."""
    return (lock for lock in waiting(rows) if not may_yet_start(lock, Config.of(app)))


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
    table(("TASK (ARGS)", "ENTRY", "HELD BY", "STATE", "SINCE", "LEFT"), cells)
    for _, _, lock in rows:
        if lock.seems_abandoned:
            text = f"task {lock.task_id}: last renewed {lock.last_renewed}: its worker has probably died, or hangs"
            click.echo(marked(text, "warning"))


@command(
    "unlock",
    click.argument("which", required=False),
    click.option("--force", is_flag=True, help="Free the lock even if its owner runs or is queued."),
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
    found = next(((record, lock) for key, record, lock in locks_of(app) if which in {key, lock.task_id}), None)
    if found is None:
        fail(f"no lock is held by {which}")
    record, lock = found
    backend = backend_of(app)
    if force:
        backend.unlock(lock.key)
    elif lock.state == "queued":
        _unlock_queued(app, lock, Waiting.of(lock.key, record))
    else:
        try:
            workers = Workers.ask(app)
        except BrokerError as exc:
            fail(
                f"the workers cannot be asked whether task {lock.task_id} runs (the broker {broker_place(app)} "
                f"{exc}): --force frees its lock all the same"
            )
        if lock.task_id in workers.running:
            fail(f"task {lock.task_id} runs on {workers.running[lock.task_id]}: --force frees its lock all the same")
        if lock.is_ahead and not lock.seems_abandoned:
            fail(
                f"the lock of task {lock.task_id} was last renewed {BEFORE_SET_BACK}, so whether its worker lives is "
                f"not known. If it has died, the lock ends by itself within {lock.lease:.0f} s of the next call that "
                "meets it; --force frees it now"
            )
        if lock.left is not None and not lock.seems_abandoned:  # its worker may just be too busy to answer
            fail(
                f"the lock of task {lock.task_id} was renewed {lock.last_renewed}: its worker lives, or has died since "
                f"then. If it has died, try again in {lock.seems_abandoned_in:.0f} s; --force frees the lock now"
            )
        # Free the lock of this run only: its lease may have ended meanwhile, and another run may have begun. The end of
        # this run is not remembered: if its worker died, the broker may deliver the message again.
        run = Ref(lock.key, lock.task_id, read_generation(record.get("gen") or "0"), record.get("nonce", ""))
        backend.finish_many([run], remember_for=0)
    # The lock of a lost message is free by now, and the next run may have acquired it since.
    if (force or lock.state != "queued") and (holder := backend.get(lock.key)):
        fail(f"{lock.key} is not free: task {holder} holds it")
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


def _unlock_queued(app: Celery, lock: HeldLock, found: Waiting | None) -> None:
    """Free the lock of a lost message; end the command with an error if the message may still exist."""
    results = examine(app, [found]) if found is not None else []
    if not free(app, results):
        unknown = f"the lock of task {lock.task_id} is not freed: nothing more is known about its message"
        why = str(results[0]) if results else unknown
        fail(f"{why}. --force frees it now; a message that starts later acquires the lock again")
    flush_ends(app)


def _unlock_stale(app: Celery, *, as_json: bool) -> None:
    """Free all locks whose messages are lost or have run elsewhere, and say why the others stay."""
    locks, results, answers = list(old(app, locks_of(app))), list[Found](), Answers()
    with progress("locks checked", len(locks), quiet=as_json) as step:
        for begin in range(0, len(locks), MOST):
            batch = examine(app, locks[begin : begin + MOST], answers=answers)
            gone = free(app, batch)
            results += gone + [found for found in batch if not found.outcome]
            for _ in batch:
                step()
    flush_ends(app)
    if as_json:
        rows = [(found.lock.ref, found.outcome, found.reason) for found in results]
        show_json([{"key": ref.key, "task_id": ref.task_id, "outcome": o, "reason": why} for ref, o, why in rows])
        return
    for found in results:
        what = f"freed, {found.outcome}" if found.outcome else "not freed"
        click.echo(printable(f"{found.lock.task}, task {found.lock.ref.task_id}: {what}: {found.reason}"))
    click.echo(f"{sum(1 for found in results if found.outcome)} of {len(locks)} old queued locks were freed")
