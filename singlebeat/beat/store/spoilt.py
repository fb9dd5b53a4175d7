"""The keys of the schedule that beat cannot use: spoilt by another program, or denied to its user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ...advice import redis_command
from ...connections import RedisError, ResponseError
from ...server_errors import is_key_denied
from ..keys import LEASE_KEYS, OWN_KEYS

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys

__all__ = ("Spoilt", "spoilt_keys", "why_spoilt")

#: The name of each type, and a command that only a key of that type answers, which beat needs anyway.
_TYPES = {
    "zset": ("sorted set", ("ZCARD",)),
    "hash": ("hash", ("HMGET", "")),
    "set": ("set", ("SMISMEMBER", "")),
    "stream": ("stream", ("XREVRANGE", "+", "-", "COUNT", "1")),
    "string": ("string", ("GET",)),
}

#: The id after which a stream takes no more records.
_LAST_ID = "18446744073709551615-18446744073709551615"

#: Most entries that are tried: the first ones by their places, and as many with a pending occurrence.
MOST_TRIED = 100


class Spoilt(NamedTuple):
    """A key that beat cannot use."""

    key: str
    why: str  #: what is wrong, as a predicate: ``is no hash``
    is_denied: bool = False  #: the user lacks the right to use the key

    @property
    def advice(self) -> str:
        """What to do."""
        if self.is_denied:
            return "grant all keys with that prefix (docs, Rights)"
        text = (
            "another program has written there. Stop that program, and remove the key, so that beat makes it again: "
            f"{redis_command('DEL', self.key)} (or RENAME, to keep its data)"
        )
        if self.key.endswith(":pending"):  # the list of claimed runs that beat tries to send again
            text += ", and run doctor again: it names the claimed runs that are not in the new list"
        return text

    def __str__(self) -> str:
        return f"the key {self.key} {self.why}: {self.advice}"


def spoilt_keys(client: RedisClient, keys: Keys) -> Iterator[Spoilt]:
    """Yield the keys of the schedule and of its leadership that another program has spoilt, or its user may not use.

    Of the keys of entries, those are tried that come next or are pending, and those only for the rights to them.

    Raises:
        RedisError: the server does not answer.
    """
    given = [(getattr(keys, name), kind) for name, (kind, _) in OWN_KEYS.items()]
    given += [(getattr(keys.lease, name), kind) for name, (kind, _) in LEASE_KEYS.items()]
    asked = [(key, *_TYPES[kind]) for key, kind in given if key is not None and kind in _TYPES]
    with client.pipeline(transaction=False) as pipe:
        for key, _, (command, *arguments) in asked:
            pipe.execute_command(command, key, *arguments)
        pipe.zrangebyscore(keys.schedule, 0, "+inf", start=0, num=MOST_TRIED)
        pipe.zrange(keys.pending, 0, MOST_TRIED - 1)
        *replies, coming, pending = pipe.execute(raise_on_error=False)
    for (key, kind, _), reply in zip(asked, replies, strict=True):
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            yield Spoilt(key, f"is no {kind}")
        elif isinstance(reply, ResponseError) and is_key_denied(reply):
            yield Spoilt(key, "is denied to this user", is_denied=True)
        elif kind == "stream" and reply and not isinstance(reply, ResponseError) and reply[0][0] == _LAST_ID:
            yield Spoilt(key, "takes no more records, because it has the last possible id")
    members = dict.fromkeys(member for reply in (coming, pending) if isinstance(reply, list) for member in reply)
    yield from _denied(client, [keys.entry(member) for member in members])


def _denied(client: RedisClient, entries: Sequence[str]) -> Iterator[Spoilt]:
    """Yield the keys of entries that are denied to the user: with one of them, the server refuses beat's whole read."""
    with client.pipeline(transaction=False) as pipe:
        for key in entries:
            pipe.exists(key)
        replies = pipe.execute(raise_on_error=False)
    for key, reply in zip(entries, replies, strict=True):
        if isinstance(reply, ResponseError) and is_key_denied(reply):
            yield Spoilt(key, "is denied to this user", is_denied=True)


def why_spoilt(client: RedisClient, keys: Keys, error: Exception) -> str:
    """Return which keys are spoilt or denied, and what to do, if an error of the server may come of that; else empty.

    Args:
        error: of a call, which does not name the key.
    """
    if is_key_denied(error) or any(text in str(error) for text in ("WRONGTYPE", "exhausted the last possible ID")):
        with suppress(RedisError):
            return "; ".join(map(str, spoilt_keys(client, keys)))
    return ""
