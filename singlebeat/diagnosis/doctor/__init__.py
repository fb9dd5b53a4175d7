"""Checks servers, settings, beats, workers, entries and locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...beat.store.probe import schedule_server_says
from ...connections import RedisError, ResponseError, schedule_place, what_it_does
from ...errors import LockBackendError
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

__all__ = ("PARTS", "Finding", "findings")

#: A part of the examination.
Check = Callable[["Celery", Read], Iterator[Finding]]

PARTS: Sequence[Check] = (
    *(check_server, check_keys, check_rights, check_result_backend, check_prefixes, check_settings),
    *(check_beats, check_entries, check_workers, check_locks, describe_writes),
)


def findings(app: Celery, *, step: Callable[[], object] = lambda: None) -> tuple[Sequence[Finding], RedisError | None]:
    """Return the findings of all parts, and the error of the schedule's server if it did not answer.

    Args:
        step: called after each part.
    """
    schedule = Read(app)
    found = dict[Finding, None]()
    for check in PARTS:
        found |= dict.fromkeys(_on_any_server(app, check, schedule))  # a finding of many parts is shown once
        step()
    return [*found], schedule.error


def left_out(app: Celery, error: RedisError) -> Finding:
    """Return the finding that the schedule's server did not answer, and parts were left out."""
    text = f"it {what_it_does(error)}: {error}; the parts that need it were left out"
    return Finding("problem", f"schedule's server {schedule_place(app)}", text)


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
