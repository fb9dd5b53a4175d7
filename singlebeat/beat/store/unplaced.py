"""Stored entries that have no place in the schedule, and so are never due."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from ...connections import ResponseError
from ...locks.redis import escaped
from ..entries.fields import BATCH, read_fields

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys

__all__ = ("is_placed_elsewhere", "restore_places", "without_place")

#: Keys that the server searches in one call: of a database with very many keys of other programs, most are not ours.
SEARCHED = 10_000


def without_place(client: RedisClient, keys: Keys) -> Iterator[str]:
    """Yield the names of stored entries that are never due, because they have no place in the sorted set.

    Entries of another app whose prefix begins with this one's, like ``redbeat:a:``, are left out.
    """
    hashes = client.scan_iter(match=f"{escaped(keys.prefix)}*", count=SEARCHED, _type="HASH")
    while page := [*islice(hashes, BATCH)]:
        names = {name: key for key in page if keys.is_possible(name := keys.name(key))}
        if not names:
            continue
        scores = client.zmscore(keys.schedule, [*names.values(), *names])
        placed = {
            name
            for name, *both in zip(names, scores[: len(names)], scores[len(names) :], strict=True)
            if any(score is not None for score in both)
        }
        left = [name for name in names if name not in placed]
        for name, fields in zip(left, read_fields(client, [names[name] for name in left]), strict=True):
            if not isinstance(fields, str) and fields[0] and not is_placed_elsewhere(client, keys, name):
                yield name


def is_placed_elsewhere(client: RedisClient, keys: Keys, name: str) -> bool:
    """Return whether an entry has its place in the schedule of another app, whose prefix is longer."""
    parts, key = name.split(":"), keys.prefix + name
    prefixes = [f"{keys.prefix}{':'.join(parts[:count])}:" for count in range(1, len(parts))]
    return any(_has_place(client, f"{prefix}:schedule", key, prefix) for prefix in prefixes)


def _has_place(client: RedisClient, schedule: str, key: str, prefix: str) -> bool:
    try:
        return any(score is not None for score in client.zmscore(schedule, [key, key.removeprefix(prefix)]))
    except ResponseError:  # the key is not a sorted set
        return False


def restore_places(client: RedisClient, keys: Keys) -> int:
    """Give all stored entries places again if the sorted set is gone; return their number.

    The next tick reads them, and moves them on to their next times, which it calculates from their past.
    """
    if client.exists(keys.schedule):
        return 0
    names, restored = iter(without_place(client, keys)), 0
    while batch := [*islice(names, BATCH)]:
        restored += client.zadd(keys.schedule, {keys.prefix + name: 0 for name in batch}, nx=True)
    return restored
