"""Locks: ``locks`` and ``unlock``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ..beat.explain import Lock
from ..config import Config
from ..locks import backend_of
from ..locks.base import Ref, instant, read_generation
from .output import command, fail, printable, progress, show_json, table
from .workers import Workers

if TYPE_CHECKING:
    from celery import Celery


def _records(app: Celery) -> Iterator[tuple[str, Mapping[str, str], Lock]]:
    config = Config.of(app)
    for key, record in backend_of(app).locks(config.singleton_key_prefix):
        left = float(record["ttl"]) if record.get("ttl") else None
        lock = Lock(key, record.get("id", ""), record.get("state", ""), left, config.singlebeat_lock_lease)
        yield key, record, lock


def held_by(app: Celery, task_ids: Collection[str]) -> Mapping[str, Lock]:
    """Return the locks that task ids hold, one for each that holds any; read no more locks than that takes."""
    found: dict[str, Lock] = {}
    locks = (lock for _, _, lock in _records(app) if lock.task_id in task_ids)
    while len(found) < len(task_ids) and (lock := next(locks, None)) is not None:
        found[lock.task_id] = lock
    return found


@command("locks")
def locks_(app: Celery, as_json: bool) -> None:
    """Show what is held: by which task, in which state, how long, and how much of its lease is left."""
    rows, now = [], datetime.now(UTC)
    with progress("locks read", quiet=as_json) as step:
        for row in _records(app):
            rows.append(row)
            step()
    if as_json:
        shown = ("task", "args", "entry")
        show_json([{**asdict(lock), **{name: record.get(name) for name in shown}} for _, record, lock in rows])
        return
    cells = []
    for _, record, lock in rows:
        since = instant(record["since"]) if record.get("since", "").isdigit() else None
        age = f"{max(0.0, (now - since).total_seconds()):.0f} s" if since else "?"
        left = "?" if lock.left is None else f"{lock.left:.0f} s"
        what = f"{record.get('task', '')}{record.get('args', '')}"
        state = lock.state + ("?" if lock.seems_abandoned else "")
        cells.append((what, record.get("entry") or "-", lock.task_id, state, age, left))
    table(("TASK", "ENTRY", "HELD BY", "STATE", "SINCE", "LEFT"), cells)


@command(
    "unlock",
    click.argument("which"),
    click.option("--force", is_flag=True, help="Also if its owner lives, or waits in a queue."),
)
def unlock_(app: Celery, as_json: bool, which: str, force: bool) -> None:
    """Free the lock of a task id, or of a key; a lock whose owner lives only by force."""
    found = next(((record, lock) for key, record, lock in _records(app) if which in {key, lock.task_id}), None)
    if found is None:
        fail(f"no lock is held by {which}")
    record, lock = found
    backend = backend_of(app)
    if force:
        backend.unlock(lock.key)
    else:
        if lock.state == "queued":
            fail(
                f"task {lock.task_id} waits in its queue: when it starts it takes its lock again; --force frees it now"
            )
        workers = Workers.ask(app)
        if workers is None:
            fail(f"the workers cannot be asked whether task {lock.task_id} runs: --force frees its lock all the same")
        if lock.task_id in workers.running:
            fail(f"task {lock.task_id} runs on {workers.running[lock.task_id]}: --force frees its lock all the same")
        if lock.left is not None and not lock.seems_abandoned:  # its worker may just be too busy to answer
            fail(f"the lock of task {lock.task_id} was renewed lately: its worker lives; --force frees it all the same")
        # This run's alone: meanwhile its lease may have ended, and another run begun. Its end is not remembered: if its
        # worker died, the broker may deliver its message again.
        run = Ref(lock.key, lock.task_id, read_generation(record.get("gen") or "0"), record.get("nonce", ""))
        backend.finish_many([run], memory=0)
    if holder := backend.get(lock.key):
        fail(f"{lock.key} is not free: task {holder} holds it")
    if as_json:
        show_json({"key": lock.key, "task_id": lock.task_id, "unlocked": True})
        return
    click.echo(printable(f"{lock.key}: free; it was held by task {lock.task_id}, {lock.state}"))
