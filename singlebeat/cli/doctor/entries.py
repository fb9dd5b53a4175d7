"""Checks entries: unusable, late or never due, and runs that fail or are skipped."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ...beat.keys import Keys
from ...beat.late_places import late_places
from ...beat.schedule import Schedule
from ...beat.silence import silence
from ...beat.status import QUARANTINED_LATER
from ...beat.store.history import History
from .finding import MOST_NAMED, Finding, Read

if TYPE_CHECKING:
    from celery import Celery

    from ...beat.entries.entry import Entry

#: Maximum number of entries whose own history is read.
MOST_HISTORIES = 10_000


def check_entries(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for unknown fields, entries that are unusable, late or never due, and runs that fail or are skipped."""
    for entry in schedule.usable:
        if entry.ignored:
            yield Finding("warning", f"entry {entry.name}", entry.ignored)
    for name, why in islice(schedule.unusable.items(), MOST_NAMED):
        yield Finding("problem", f"entry {name}", f"is unusable: {why}; {QUARANTINED_LATER}")
    if len(schedule.unusable) > MOST_NAMED:
        yield Finding("problem", "entries", f"more than these {MOST_NAMED} are unusable (celery singlebeat list)")
    yield from _silent(app, schedule.usable)
    if not schedule.state.redbeat_leads:  # RedBeat calculates other times
        yield from _late(app, schedule.usable)
    entries = Schedule(app)
    names = [*islice(entries.without_place(), MOST_NAMED + 1)]
    for name in names[:MOST_NAMED]:
        yield Finding("warning", f"entry {name}", f"{entries.no_place(name)}; or delete it")
    if len(names) > MOST_NAMED:
        yield Finding("warning", "entries", f"more than these {MOST_NAMED} have no place in {Keys.of(app).schedule}")


def _late(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Check for entries whose place in the schedule is later than their next time."""
    found = [(name, place) for name, place in late_places(app, entries) if place.level != "fine"]
    found.sort(key=lambda each: each[1].level)  # problems before warnings
    for name, place in found[:MOST_NAMED]:
        yield Finding(place.level, f"entry {name}", str(place))
    if found[MOST_NAMED:]:
        text = f"more than these {MOST_NAMED} have places that are later than their times"
        yield Finding(found[MOST_NAMED][1].level, "entries", text)


def _silent(app: Celery, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Check the own history of each entry for last runs that all failed, or were all skipped."""
    by_name = {entry.name: entry for entry in entries[:MOST_HISTORIES]}
    found = ((name, text) for name, own in History(app).own(by_name) if (text := silence(by_name[name], own)))
    for name, text in islice(found, MOST_NAMED):
        yield Finding("warning", f"entry {name}", f"{text} (celery singlebeat explain {shlex.quote(name)})")
    if more := sum(1 for _ in found):
        yield Finding("warning", "entries", f"the last runs of {more} more entries all failed, or were skipped")
    if len(entries) > MOST_HISTORIES:
        text = f"whether all their runs fail was checked for the first {MOST_HISTORIES} of {len(entries)} only"
        yield Finding("fine", "entries", text)
