"""The fields of entries as Redis stores them: read and written in batches, each batch by one script."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...lua import packed, script
from ..calendar.zone import zone_of_text
from .author import BARE, CALLED, PERMITTED, RECORD

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys
    from .author import Author

__all__ = ("BATCH", "FENCED", "Fence", "FencedError", "read_fields", "replies_of", "write_fields", "zone_of_beats")

#: The fields of one entry as ``read_fields`` returns them, or a string: a string is a sequence of strings, too.
StoredFields = Sequence[str | None]

#: A key, and what it holds for as long as the writer leads. See ``fenced.lua``.
Fence = tuple[str, str]

FENCED = script(__package__, "fenced")
SAVE = script(__package__, "save", BARE, CALLED, FENCED, PERMITTED, RECORD)

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


def zone_of_beats(client: RedisClient, keys: Keys) -> tzinfo | None:
    """Return the zone in which the last leader has read wall clocks, None if it is not known."""
    return zone_of_text(client.get(keys.zone) or "")


class FencedError(Exception):
    """The writer led, and another beat leads by now: nothing was written."""


def replies_of(reply: str) -> Sequence[Any]:
    """Return what a script says about each of some entries.

    Raises:
        FencedError: another beat leads.
    """
    replies: Sequence[Any] | None = json.loads(reply)
    if replies is None:
        raise FencedError
    return replies


def write_fields(
    client: RedisClient,
    keys: Keys,
    rows: Iterable[Sequence[Any]],
    author: Author,
    *,
    action: str = "edit",
    note: str = "",
    fence: Fence | None = None,
) -> Sequence[bool]:
    """Write the fields of some entries in one round trip, each only if it is unchanged since it was read.

    Args:
        rows: for each entry its key, the fields as they were read, the new ones, its score, and if it comes back what
            it has left unsent. See ``save.lua``.
        author: of the changes, which are recorded.
        action: what is done to the entries; an edit of an entry that does not exist adds it.
        note: for operators.
        fence: of a leader.

    Returns:
        For each entry whether it was written; another program has changed the others meanwhile.

    Raises:
        FencedError: another beat leads.
    """
    lock, token = fence or (keys.schedule, "")
    wishes = [(key, keys.name(key), *row) for key, *row in rows]
    touched = [lock, keys.schedule, keys.changes, keys.lost, keys.pending, *(wish[0] for wish in wishes)]
    return replies_of(SAVE(client, touched, (token, *author, action, note, uuid4().hex, packed(wishes))))
