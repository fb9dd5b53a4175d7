"""Runs of an entry for times in the past: which they are, and how far they have come; pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from ...errors import ConflictError, EntryError
from ...overlap import Overlap
from ..calendar.zone import given_instant
from .occurrence import Kind, Occurrence
from .timetable import Timetable

__all__ = ("Span",)


@dataclass(frozen=True, slots=True)
class Span:
    """The times of a backfill: later than its start, not later than its end, and those up to ``at`` are done."""

    start: datetime
    end: datetime
    at: datetime
    run: str = ""  #: tells it from other backfills of the same times; empty in what an older singlebeat has begun

    @classmethod
    def of(cls, start: datetime, end: datetime, *, run: str) -> Span:
        """Return a span that has not begun.

        Args:
            run: a name that no other backfill has.

        Raises:
            EntryError: one of the two has no time zone or lies outside of the calendar, or the end is before the start.
        """
        start, end = given_instant("backfill: start", start), given_instant("backfill: end", end)
        if end < start:
            raise EntryError(f"backfill: its end {end} is before its start {start}")
        return cls(start, end, start, run)

    def encode(self) -> str:
        """Return the ``backfill`` field of an entry."""
        times = {name: getattr(self, name).isoformat() for name in ("start", "end", "at")}
        return json.dumps({**times, "run": self.run})

    def resumed(self, text: str | None, name: str, key: str) -> Span:
        """Return the same span from where an earlier call has left it, by what that has written.

        Raises:
            ConflictError: that was another span.
            EntryError: it cannot be understood.
        """
        if not text:
            return self
        try:
            raw = json.loads(text)
            run = str(raw.pop("run", ""))
            found = Span(**{name: datetime.fromisoformat(value) for name, value in raw.items()}, run=run)
        except (ValueError, TypeError, AttributeError) as exc:
            raise EntryError(
                f"entry {name!r}: its field backfill cannot be read, HDEL {shlex.quote(key)} backfill: {exc}"
            ) from exc
        if (found.start, found.end) != (self.start, self.end):
            raise ConflictError(
                f"entry {name!r} has an unfinished backfill from {found.start} to {found.end}: finish it with the same "
                f"start and end, or give it up with HDEL {shlex.quote(key)} backfill"
            )
        return found

    def occurrences(self, table: Timetable, prefix: str, overlap: Overlap | None) -> Iterator[Occurrence]:
        """Yield what is left, each with the time before it as its previous one."""
        previous, nominal = self.at, table.next(self.at)
        while nominal is not None and nominal <= self.end:
            kind, run = Kind.BACKFILL, self.run
            yield Occurrence.of(prefix, table.name, nominal, previous=previous, kind=kind, overlap=overlap, run=run)
            previous, nominal = nominal, table.next(nominal)
