"""Entries whose places in the schedule are later than their times, or mean never: beat does not check them in time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice
from typing import TYPE_CHECKING

from ..advice import redis_command
from ..connections import schedule_client
from ..errors import EntryError
from ..log import LAST_INSTANT
from .calendar.zone import app_zone
from .decide import claim_for
from .entries.definition import LONGEST_STEP_BACK
from .entries.entry import Entry
from .entries.fields import BATCH, read_fields, zone_of_beats
from .entries.timetable import Timetable
from .keys import Keys
from .leadership.clock_guard import latest_shown
from .server_time import server_now
from .status import OVERDUE_AFTER
from .store.claims import Stored

if TYPE_CHECKING:
    from celery import Celery

    from ..clients import RedisClient

__all__ = ("LatePlace", "late_places")

#: Format of instants for operators.
MOMENT = "%Y-%m-%d %H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class LatePlace:
    """The place of an entry that means never, is later than the entry's time, or comes from a clock that was ahead."""

    schedule: str  #: key of the sorted set
    member: str  #: of the entry there: its key, or its bare name
    score: float
    due_at: datetime  #: when the entry is due by its timetable, or its time that has passed without a run
    counts_from: datetime | None  #: None if the entry has never run: then its place may be its first time on purpose
    first_at: datetime | None  #: the first time of the timetable from now on, None if there is none
    now: datetime

    @property
    def at(self) -> datetime | None:
        """The instant of the place; None if it means never, or lies after the year 9999, like one in milliseconds."""
        return datetime.fromtimestamp(self.score, UTC) if 0 <= self.score <= LAST_INSTANT else None

    @property
    def is_wrong(self) -> bool:
        """Whether the place is certainly a mistake."""
        return self.counts_from is not None or self.at is None

    @property
    def level(self) -> str:
        """How grave that is: problem, warning, or fine for a first run that is put off by less than one interval."""
        if self.is_wrong or self.at is None:
            return "problem"
        is_put_off = self.first_at is None or self.at - self.first_at > timedelta(seconds=OVERDUE_AFTER)
        return "warning" if is_put_off else "fine"

    def __str__(self) -> str:
        place = redis_command("ZADD", self.schedule, "0", self.member)
        advice = f"to let beat correct it: {place}"
        if self.score < 0:
            return (
                f"its place in {self.schedule} is {self.score:g}, which means never, although its next time is "
                f"{self.due_at:{MOMENT}}: it never runs. Another program has written that place, or has changed the "
                f"entry without its place; {advice}"
            )
        if self.at is None:
            return (
                f"its place in {self.schedule} is {self.score:.0f}, which is no time in seconds since 1970 (is it in "
                f"milliseconds?): it never runs; {advice}"
            )
        if self.counts_from is not None and self.counts_from > self.now:
            ahead = f"it counts from {self.counts_from:{MOMENT}}, which is yet to come: the clock of a beat was ahead"
            if self.counts_from > self.now + LONGEST_STEP_BACK:
                return f"{ahead}; {advice}"
            return f"{ahead}, and the entry waits until then; to run it now: celery singlebeat trigger"
        if self.counts_from is None:
            times = ""
            if self.level == "warning":
                times = f", although its next time is {self.first_at:{MOMENT}}" if self.first_at else ", after its end"
            return (
                f"it has never run, and by its place in {self.schedule} it does not run before {self.at:{MOMENT}}"
                f"{times}; to run it at once: {place}"
            )
        return (
            f"its place in {self.schedule} is {self.at:{MOMENT}}, later than its time, {self.due_at:{MOMENT}}: it does "
            "not run before its place. Another program has written that place, or has changed the entry without its "
            f"place; {advice}"
        )


def late_places(app: Celery, entries: Iterable[Entry]) -> Iterator[tuple[str, LatePlace]]:
    """Yield names and places of the entries whose places are later than their times by more than ``OVERDUE_AFTER``.

    Entries that are disabled, paused, quarantined or never due are left out. One round trip for each batch, and four
    more if an entry of the batch seems to be late, because beat may have moved it on since it was read.

    Args:
        entries: as they were read before.

    Raises:
        RedisError: the schedule's server does not answer.
    """
    client, keys, left = schedule_client(app), Keys.of(app), iter(entries)
    now, zone = server_now(client, keys.schedule), zone_of_beats(client, keys) or app_zone(app)
    shown = latest_shown(client, keys)  # until the clock shows it again, entries wait on purpose
    while batch := [*islice(left, BATCH)]:
        found = _compare(keys, batch, _places(client, keys, [entry.name for entry in batch]), now, zone, shown)
        names = [name for name, _ in found]
        if not names:
            continue
        # A place that is the same before and after the entry was read belongs to the entry as it was read.
        before = _places(client, keys, names)
        quarantined = _quarantined_names(client, keys, names)
        again = [*_read(app, client, keys, names)]
        after = _places(client, keys, names)
        same = {n: place for n, place in before.items() if place == after.get(n) and n not in quarantined}
        yield from _compare(keys, again, same, server_now(client, keys.schedule), zone, shown)


#: A place in the schedule: a score, and the member that has it.
_Place = tuple[float, str]


def _places(client: RedisClient, keys: Keys, names: Sequence[str]) -> Mapping[str, _Place]:
    """Return the places of the entries: each under its key or its bare name, or the earlier of both."""
    if not names:
        return {}
    members = [*(keys.prefix + name for name in names), *map(keys.bare, names)]
    found = [*zip(client.zmscore(keys.schedule, members), members, strict=True)]
    both = zip(names, found[: len(names)], found[len(names) :], strict=True)
    places = {name: [place for place in pair if place[0] is not None] for name, *pair in both}
    return {name: _first(pair) for name, pair in places.items() if pair}


def _first(places: Sequence[_Place]) -> _Place:
    return min((place for place in places if place[0] >= 0), default=max(places))  # a negative score means never


def _quarantined_names(client: RedisClient, keys: Keys, names: Sequence[str]) -> Collection[str]:
    """Return the names of the quarantined entries, which beat has parked."""
    records = client.hmget(keys.quarantine, [*(keys.prefix + name for name in names), *map(keys.bare, names)])
    pairs = zip(names, records[: len(names)], records[len(names) :], strict=True)
    return {name for name, *found in pairs if any(found)}


def _read(app: Celery, client: RedisClient, keys: Keys, names: Sequence[str]) -> Iterator[Entry]:
    members = [keys.prefix + name for name in names]
    for key, fields in zip(members, read_fields(client, members), strict=True):
        with suppress(EntryError):  # the entry was deleted or broken since
            if not isinstance(fields, str):
                definition, meta, policy, since, _, sent = fields
                yield Entry.from_fields(key, definition, meta, policy, since, sent, app=app)


def _compare(
    keys: Keys, entries: Iterable[Entry], places: Mapping[str, _Place], now: datetime, zone: tzinfo, shown: datetime
) -> Sequence[tuple[str, LatePlace]]:
    late = list[tuple[str, LatePlace]]()
    for entry in entries:
        score, member = places.get(entry.name, (None, ""))
        if score is None or not entry.enabled or entry.policy.paused or 0 <= score <= now.timestamp() + OVERDUE_AFTER:
            continue
        with suppress(Exception):  # a user's own schedule may raise anything, which a tick logs
            due_at = _due_at(entry, now, zone)
            times = Timetable(entry.name, entry.schedule, entry.policy, zone)
            since = times.since(entry.meta.counts_from)
            is_ahead = since is not None and since - max(now, shown) > timedelta(seconds=OVERDUE_AFTER)
            if due_at is not None and (score < 0 or score > due_at + OVERDUE_AFTER or is_ahead):
                missed = None if since is None else times.overdue(since, now)
                at, first = missed or datetime.fromtimestamp(due_at, UTC), times.next(now)
                late.append((entry.name, LatePlace(keys.schedule, member, score, at, since, first, now)))
    return late


def _due_at(entry: Entry, now: datetime, zone: tzinfo) -> float | None:
    """Return when a beat that checked an entry now would run it next, in seconds since 1970; None if never."""
    claim = claim_for(Stored(entry.key, 0, (), entry, entry.meta, entry.policy, None), now, zone=zone, prefix="")
    if claim.occurrence is not None or claim.decision is not None:
        return now.timestamp()
    return None if claim.next_score < 0 else claim.next_score
