"""Checks servers, settings, beats, workers, entries and locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...beat.store.probe import schedule_server_says
from ...connections import RedisError, ResponseError, schedule_place, what_it_does
from ...errors import LockBackendError
from ...log import without_passwords
from ...server_errors import with_advice
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

__all__ = ("PARTS", "Finding", "Read", "findings")

#: A part of the examination.
Check = Callable[["Celery", Read], Iterator[Finding]]

PARTS: Sequence[Check] = (
    *(check_server, check_keys, check_rights, check_result_backend, check_prefixes, check_settings),
    *(check_beats, check_entries, check_workers, check_locks, describe_writes),
)


def findings(schedule: Read, *, step: Callable[[], object] = lambda: None) -> Iterator[Finding]:
    """Yield the findings of all parts, each as soon as it is known, without the passwords of the URLs that they quote.

    Args:
        schedule: nothing of it was read yet; later it has the error of the schedule's server.
        step: called after each part.
    """
    found = set[Finding]()
    for check in PARTS:
        for level, about, text in _on_any_server(schedule.app, check, schedule):
            finding = Finding(level, without_passwords(about), without_passwords(text))
            if finding not in found:  # a finding of many parts is shown once
                found.add(finding)
                yield finding
        step()


def _on_any_server(app: Celery, check: Check, schedule: Read) -> Iterator[Finding]:
    """Yield the findings of a check, also if a server refuses; note an error of the schedule's server."""
    try:
        yield from check(app, schedule)
    except ResponseError as exc:
        yield Finding("problem", f"schedule's server {schedule_place(app)}", schedule_server_says(app, exc))
    except RedisError as exc:
        if schedule.error is None:
            text = f"it {what_it_does(exc)}: {with_advice(exc)}; the parts that need it are left out"
            yield Finding("problem", f"schedule's server {schedule_place(app)}", text)
        schedule.error = exc
    except LockBackendError as exc:
        yield of_locks(app, exc)
