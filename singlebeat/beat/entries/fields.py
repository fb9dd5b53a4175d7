"""The fields of entries as Redis stores them: read and written in batches, each batch by one script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...lua import packed, script

if TYPE_CHECKING:
    from ...clients import RedisClient

__all__ = ("BATCH", "read_fields", "write_fields")

#: The fields of one entry as ``read_fields`` returns them, or a string: a string is a sequence of strings, too.
StoredFields = Sequence[str | None]

#: Entries that one round trip reads or writes.
BATCH = 500

#: The fields of an entry that ``read_fields`` reads.
FIELDS = ("definition", "meta", "policy", "since", "pending", "sent")


def read_fields(client: RedisClient, keys: Sequence[str], *more: str) -> Sequence[StoredFields]:
    """Read the fields of some entries in one round trip.

    Args:
        keys: of the entries' hashes.
        more: names of further fields.

    Returns:
        For each key ``[definition, meta, policy, since, pending, sent, *more]``, with None for an absent field, or an
        error message if the key is not a hash. See ``read.lua``.
    """
    rows: Sequence[StoredFields] = json.loads(script(__package__, "read")(client, keys, (*FIELDS, *more)))
    return rows


def write_fields(client: RedisClient, schedule: str, rows: Iterable[Sequence[Any]]) -> Sequence[bool]:
    """Write the fields of some entries in one round trip, each only if it is unchanged since it was read.

    Args:
        schedule: key of the sorted set.
        rows: for each entry its key, the fields as they were read, the new ones, and its score. See ``save.lua``.

    Returns:
        For each entry whether it was written; another program has changed the others meanwhile.
    """
    rows = [*rows]
    saved: Sequence[bool] = json.loads(
        script(__package__, "save")(client, [schedule, *(row[0] for row in rows)], (packed(rows),))
    )
    return saved
