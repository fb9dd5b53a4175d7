"""Backfills: runs of an entry for times in the past, and the progress of such a series; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from ...advice import command_line, redis_command
from ...errors import ConflictError, EntryError
from ...overlap import Overlap
from ..calendar.zone import given_instant
from .occurrence import Kind, Occurrence
from .timetable import Timetable

__all__ = ("Span",)


@dataclass(frozen=True, slots=True)
class Span:
    """The times of a backfill: later than ``start``, not later than ``end``; the times up to ``at`` are done."""

    start: datetime
    end: datetime
    at: datetime
    run: str = ""  #: distinguishes backfills of the same times; empty if an older singlebeat has begun this one

    @classmethod
    def of(cls, start: datetime, end: datetime, *, run: str) -> Span:
        """Return the span of a backfill that has not begun.

        Args:
            run: the unique name of the backfill.

        Raises:
            EntryError: an instant has no time zone or lies outside of the calendar, or the end is before the start.
        """
        start, end = given_instant("backfill: start", start), given_instant("backfill: end", end)
        if end < start:
            raise EntryError(f"backfill: its end {end} is before its start {start}")
        return cls(start, end, start, run)

    def encode(self) -> str:
        """Return the ``backfill`` field of an entry."""
        times = {name: getattr(self, name).isoformat() for name in ("start", "end", "at")}
        return json.dumps({**times, "run": self.run})

    @classmethod
    def decode(cls, text: str, name: str, key: str) -> Span:
        """Return the span of a ``backfill`` field.

        Raises:
            EntryError: the field cannot be decoded.
        """
        try:
            raw = json.loads(text)
            run = str(raw.pop("run", ""))
            return cls(**{name: datetime.fromisoformat(value) for name, value in raw.items()}, run=run)
        except (ValueError, TypeError, AttributeError, RecursionError) as exc:
            raise EntryError(
                f"entry {name!r}: its field backfill cannot be read, {redis_command('HDEL', key, 'backfill')}: {exc}"
            ) from exc

    def unfinished(self, name: str, key: str) -> str:
        """Return how far a stored backfill has come, and what to do if no process goes on with it."""
        again = command_line("backfill", name, self.start.isoformat(), self.end.isoformat())
        return (
            f"its backfill from {self.start} to {self.end} is not finished: beat has the runs up to {self.at}; unless "
            f"a process goes on with it, repeat it: {again}; or cancel it: "
            f"{redis_command('HDEL', key, 'backfill')}"
        )

    def resumed(self, text: str | None, name: str, key: str) -> Span:
        """Return the span with the progress of an earlier call, as that call has written it.

        Raises:
            ConflictError: the earlier call was for another span.
            EntryError: the field ``backfill`` cannot be decoded.
        """
        if not text:
            return self
        found = self.decode(text, name, key)
        if (found.start, found.end) != (self.start, self.end):
            raise ConflictError(
                f"entry {name!r} has an unfinished backfill from {found.start} to {found.end}: finish it with the same "
                f"start and end, or cancel it with {redis_command('HDEL', key, 'backfill')}"
            )
        return found

    def occurrences(self, table: Timetable, prefix: str, overlap: Overlap | None) -> Iterator[Occurrence]:
        """Yield the remaining occurrences, each with the time before it as its previous time."""
        previous, nominal = self.at, table.next(self.at)
        while nominal is not None and nominal <= self.end:
            kind, run = Kind.BACKFILL, self.run
            yield Occurrence.of(prefix, table.name, nominal, previous=previous, kind=kind, overlap=overlap, run=run)
            previous, nominal = nominal, table.next(nominal)
