"""Versions of entries, by which a change in between is noticed; they tell nothing of arguments that are not shown."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..beat.entries.policy import EntryPolicy
from ..beat.keys import Keys
from ..connections import ResponseError, schedule_client

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.entries.salvage import Salvage

__all__ = ("DEFINITION", "differences", "version_of")

#: The parts of a definition, and all parts that have a version of their own.
DEFINITION = ("task", "schedule", "args", "kwargs", "options", "enabled")
PARTS = (*DEFINITION, *sorted(EntryPolicy.names()))

#: Hexadecimal digits of the version of one part.
DIGITS = 8

#: The secret of a process whose rights in Redis allow it to store none.
_OWN_SECRET = secrets.token_hex(32)


def version_of(found: Salvage | None) -> str:
    """Return the version of definition and policy, which has a digest for each part; empty if there is no entry."""
    if found is None:
        return ""
    texts = dict.fromkeys(PARTS, found.texts["policy"]) | dict.fromkeys(DEFINITION, found.texts["definition"])
    for field in ("definition", "policy"):
        with suppress(ValueError, RecursionError):
            raw = json.loads(found.texts[field] or "{}")
            if isinstance(raw, dict):
                parts = DEFINITION if field == "definition" else PARTS[len(DEFINITION) :]
                texts |= {part: json.dumps(raw.get(part), sort_keys=True) for part in parts}
    # Of the name, too: else equal digests would tell that two entries have the same secret.
    key = _secret(found.app).encode()
    made = ("\0".join((found.name, part, texts[part])).encode(errors="surrogateescape") for part in PARTS)
    return "".join(hmac.digest(key, text, "sha256").hex()[:DIGITS] for text in made)


def _secret(app: Celery) -> str:
    """Return the secret of all versions: without one, a reader could try which masked argument fits a version.

    It lies in the schedule's server, so that all processes of a page make the same versions. A page that may not write
    there has one of its own: no change is made through it, so no other process needs to know its versions.
    """
    client, key = schedule_client(app), Keys.of(app).versions
    try:
        if not (found := client.get(key)):
            client.set(key, secrets.token_hex(32), nx=True)
            found = client.get(key)
    except ResponseError:
        return _OWN_SECRET
    return str(found or _OWN_SECRET)


def differences(one: str, other: str) -> Sequence[str]:
    """Return the names of the parts in which two versions differ, empty if that is not known."""
    if len(one) != len(other) or not other:
        return ()
    digests = [[text[at : at + DIGITS] for at in range(0, len(text), DIGITS)] for text in (one, other)]
    return [part for part, mine, theirs in zip(PARTS, *digests, strict=True) if mine != theirs]
