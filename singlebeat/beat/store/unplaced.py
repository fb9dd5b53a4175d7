"""Stored entries that have no place in the schedule, and so are never due; and the loss of all places.

Also those whose claimed occurrences are not in the list of pending ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from ...connections import ResponseError
from ...locks.redis import escaped
from ...log import Log
from ...lua import script
from ..entries.fields import BATCH, read_fields

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys

__all__ = (
    "READ_WITNESSES",
    "LostPlaces",
    "Witnesses",
    "is_placed_elsewhere",
    "is_unlisted",
    "without_place",
    "without_retry",
)

log = Log("celery.beat")

READ_WITNESSES = script(__package__, "witnesses")

#: Keys that the server searches in one call: of a database with very many keys of other programs, most are not ours.
SEARCHED = 10_000

#: How many members of the schedule are witnesses.
WITNESSES = 16

#: Seconds of a tick in which lost places are searched: the other entries must not wait for the whole search.
SEARCH_TIME = 1.0


class Witnesses(NamedTuple):
    """The witnesses at one moment."""

    places: int  #: number of places in the schedule
    kept: int  #: number of witnesses that have their places
    gone: Sequence[str] = ()  #: the other witnesses

    @classmethod
    def of(cls, reply: tuple[int, int, Sequence[str]]) -> Witnesses:
        """Return them as ``witnesses.lua`` has read them."""
        places, kept, gone = reply
        return cls(places, kept, tuple(gone))


def without_place(client: RedisClient, keys: Keys) -> Iterator[str]:
    """Yield the names of stored entries that are never due, because they have no place in the sorted set.

    Entries of another app whose prefix begins with this one's, like ``redbeat:a:``, are left out.
    """
    for names in pages_without_place(client, keys):
        yield from names


def pages_without_place(client: RedisClient, keys: Keys) -> Iterator[Sequence[str]]:
    """Yield the same in parts, some of them empty, so that the caller may pause between them."""
    for names in _pages(client, keys):
        yield [*_unplaced(client, keys, names)]


def without_retry(client: RedisClient, keys: Keys) -> Iterator[str]:
    """Yield the names of stored entries with a claimed occurrence that no beat tries again, as ``is_unlisted`` says."""
    for page in _pages(client, keys):
        claimed = [*_claimed(client, keys, [name for name in page if keys.is_possible(name)])]
        # Thousands are claimed while the broker is away: only those that are not listed are asked about one by one.
        yield from (n for n in _absent(client, keys.pending, keys, claimed) if is_unlisted(client, keys, n))


def is_unlisted(client: RedisClient, keys: Keys, name: str) -> bool:
    """Return whether an entry has a claimed occurrence, and is not in the list of those: a program has removed it.

    Beat itself removes one that is in quarantine, and adds it again when it is usable.
    """
    claimed = _claimed(client, keys, [name])
    if not claimed or not _absent(client, keys.pending, keys, [name]):
        return False
    if any(reason is not None for reason in client.hmget(keys.quarantine, [keys.prefix + name, keys.bare(name)])):
        return False
    # Once more: a beat may have confirmed it in between.
    return _claimed(client, keys, [name]) == claimed and not is_placed_elsewhere(client, keys, name)


def _claimed(client: RedisClient, keys: Keys, names: Sequence[str]) -> Mapping[str, str]:
    """Return the claimed occurrences of entries, as they are stored, by name."""
    fields = read_fields(client, [keys.prefix + name for name in names]) if names else ()
    found = ((name, None if isinstance(each, str) else each[4]) for name, each in zip(names, fields, strict=True))
    return {name: text for name, text in found if text}


def _pages(client: RedisClient, keys: Keys) -> Iterator[Sequence[str]]:
    """Yield the names of all hashes with the prefix of entries, in parts."""
    hashes = client.scan_iter(match=f"{escaped(keys.prefix)}*", count=SEARCHED, _type="HASH")
    while page := [*islice(hashes, BATCH)]:
        yield [*map(keys.name, page)]


def _unplaced(client: RedisClient, keys: Keys, names: Iterable[str]) -> Iterator[str]:
    """Yield those of some names that are names of stored entries without a place."""
    possible = [name for name in names if keys.is_possible(name)]
    left = _absent(client, keys.schedule, keys, possible)
    if not left:
        return
    for name, fields in zip(left, read_fields(client, [keys.prefix + name for name in left]), strict=True):
        if not isinstance(fields, str) and fields[0] and not is_placed_elsewhere(client, keys, name):
            yield name


def _absent(client: RedisClient, zset: str, keys: Keys, names: Sequence[str]) -> Sequence[str]:
    """Return those of some names of entries that a sorted set has neither as keys nor as bare names."""
    scores = client.zmscore(zset, [*(keys.prefix + name for name in names), *map(keys.bare, names)]) if names else []
    both = zip(names, scores[: len(names)], scores[len(names) :], strict=True)
    return [name for name, *found in both if all(score is None for score in found)]


def is_placed_elsewhere(client: RedisClient, keys: Keys, name: str) -> bool:
    """Return whether an entry belongs to another app, whose prefix is longer: a beat of it led, or has placed it."""
    parts, key = name.split(":"), keys.prefix + name
    prefixes = [f"{keys.prefix}{':'.join(parts[:count])}:" for count in range(1, len(parts))]
    return any(
        client.exists(f"{prefix}:term") or _has_place(client, f"{prefix}:schedule", key, prefix) for prefix in prefixes
    )


def _has_place(client: RedisClient, schedule: str, key: str, prefix: str) -> bool:
    try:
        return any(score is not None for score in client.zmscore(schedule, [key, key.removeprefix(prefix)]))
    except ResponseError:  # the key is not a sorted set
        return False


class LostPlaces:
    """Notices that the schedule has lost the places of its entries, and gives them places again.

    Another key keeps the names of some members, chosen at random: the witnesses. If a quarter of them have lost their
    places, and their entries are still stored, the entries without a place are searched. If they are more
    than those that have places, the sorted set was removed, even if programs have added entries to it since. A place
    that an operator removes stays removed.

    Args:
        client: the client for the schedule.
        progress: called at each step.
    """

    def __init__(self, client: RedisClient, keys: Keys, *, progress: Callable[[], object]) -> None:
        self.client, self.keys, self._progress = client, keys, progress
        self._search: Iterator[int] | None = None
        self._restored = 0  #: by the present search
        self._is_known_empty = False  #: the schedule is empty, without witnesses, and was searched for entries

    def begin(self) -> None:
        """Check the places at the beginning of a term; an empty schedule is searched again."""
        self._search, self._restored, self._is_known_empty = None, 0, False
        self._progress()
        self.check(Witnesses.of(READ_WITNESSES(self.client, (self.keys.schedule, self.keys.placed), ())))

    def check(self, found: Witnesses) -> None:
        """Begin a search if the places are lost; else choose other witnesses if some are gone, or more may be had."""
        if self._search is not None:
            return
        has_none = not (found.places or found.kept or found.gone)
        self._is_known_empty = self._is_known_empty and has_none
        is_to_search = has_none and not self._is_known_empty
        is_begun = self.keys.placed in found.gone
        if is_to_search or is_begun or self._are_stripped(found):
            self._search, self._restored = self._restore(is_begun=is_begun, kept=found.kept), 0
        elif found.gone or found.kept < min(found.places, WITNESSES):
            self._choose(found.places)

    def search(self) -> bool:
        """Go on with the search for up to ``SEARCH_TIME``; return whether it is to go on in the next tick."""
        search, self._search, ends_at = self._search, None, time.monotonic() + SEARCH_TIME
        for restored in search or ():  # after an error the next tick begins another one
            self._restored += restored
            if time.monotonic() >= ends_at:
                self._search = search
                return True
        if self._restored:
            log.warning("beat: The places of entries were gone", event="places_restored", restored=self._restored)
        self._restored = 0
        return False

    def _are_stripped(self, found: Witnesses) -> bool:
        """Return whether a quarter of the witnesses have lost their places; a deleted entry has lost none."""
        if 3 * len(found.gone) < found.kept:
            return False
        self._progress()
        lost = len([*_unplaced(self.client, self.keys, map(self.keys.name, found.gone))])
        return lost > 0 and 3 * lost >= found.kept

    def _restore(self, *, is_begun: bool, kept: int) -> Iterator[int]:
        """Give all entries without a place one, if most have none; yield their number, in parts.

        A tick reads them then, and moves them on to their next times, which it calculates from their past.

        Args:
            is_begun: whether a beat has begun to restore them.
            kept: number of the witnesses that have their places.
        """
        self._progress()
        found = list[str]()
        for names in pages_without_place(self.client, self.keys):
            self._progress()
            found += names
            yield 0
        self._progress()
        lost, places = len(found), self.client.zcard(self.keys.schedule)
        # Half of them may be lost if no witness has its place, as where there was one entry, and another was added.
        are_lost = is_begun or lost > places or (lost == places and not kept)
        self._progress()
        if are_lost:
            # A witness that never has a place: if this beat ends, the next one restores the others.
            self.client.sadd(self.keys.placed, self.keys.placed)
        for at in range(0, len(found) if are_lost else 0, BATCH):
            self._progress()
            restored = {self.keys.prefix + name: 0 for name in found[at : at + BATCH]}
            yield self.client.zadd(self.keys.schedule, restored, nx=True)
        self._progress()
        self._choose(self.client.zcard(self.keys.schedule))
        self._is_known_empty = True

    def _choose(self, places: int) -> None:
        self._progress()
        with self.client.pipeline(transaction=False) as pipe:
            for rank in random.sample(range(places), min(places, WITNESSES)):
                pipe.zrange(self.keys.schedule, rank, rank)
            members = [*chain.from_iterable(pipe.execute())]
        self._progress()
        with self.client.pipeline() as pipe:
            pipe.delete(self.keys.placed)
            if members:
                pipe.sadd(self.keys.placed, *members)
            pipe.execute()
