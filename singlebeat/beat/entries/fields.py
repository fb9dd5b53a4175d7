"""The fields of entries as Redis stores them: read and written in batches, each batch by one script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...lua import packed, script
from .author import RECORD

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys
    from .author import Author

__all__ = ("BATCH", "read_fields", "write_fields")

#: The fields of one entry as ``read_fields`` returns them, or a string: a string is a sequence of strings, too.
StoredFields = Sequence[str | None]

SAVE = script(__package__, "save", RECORD)

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


def write_fields(
    client: RedisClient,
    keys: Keys,
    rows: Iterable[Sequence[Any]],
    author: Author,
    *,
    action: str = "edit",
    note: str = "",
) -> Sequence[bool]:
    """Write the fields of some entries in one round trip, each only if it is unchanged since it was read.

    Args:
        rows: for each entry its key, the fields as they were read, the new ones, and its score. See ``save.lua``.
        author: of the changes, which are recorded.
        action: what is done to the entries; an edit of an entry that does not exist adds it.
        note: for operators.

    Returns:
        For each entry whether it was written; another program has changed the others meanwhile.
    """
    wishes = [(key, keys.name(key), *row) for key, *row in rows]
    touched = [keys.schedule, keys.changes, *(wish[0] for wish in wishes)]
    saved: Sequence[bool] = json.loads(SAVE(client, touched, (*author, action, note, packed(wishes))))
    return saved
