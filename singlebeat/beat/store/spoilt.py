"""The keys of the schedule to which another program has given another type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ...connections import ResponseError
from ..keys import LEASE_KEYS, OWN_KEYS

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys

__all__ = ("Spoilt", "spoilt_keys")

#: The name of each type, and a command that only a key of that type answers, which beat needs anyway.
_TYPES = {
    "zset": ("sorted set", ("ZCARD",)),
    "hash": ("hash", ("HMGET", "")),
    "set": ("set", ("SMISMEMBER", "")),
    "stream": ("stream", ("XREVRANGE", "+", "-", "COUNT", "1")),
    "string": ("string", ("GET",)),
}


class Spoilt(NamedTuple):
    """A key of another type than beat needs."""

    key: str
    kind: str  #: what it must be

    @property
    def advice(self) -> str:
        """What to do."""
        return (
            "another program has written there. Stop that program, and remove the key, so that beat makes it again: "
            f"DEL {shlex.quote(self.key)} (or RENAME, to keep its data)"
        )

    def __str__(self) -> str:
        return f"the key {self.key} is no {self.kind}: {self.advice}"


def spoilt_keys(client: RedisClient, keys: Keys) -> Iterator[Spoilt]:
    """Yield the keys of the schedule and of its leadership that are of a wrong type.

    Raises:
        RedisError: the server does not answer.
    """
    given = [(getattr(keys, name), kind) for name, (kind, _) in OWN_KEYS.items()]
    given += [(getattr(keys.lease, name), kind) for name, (kind, _) in LEASE_KEYS.items()]
    asked = [(key, *_TYPES[kind]) for key, kind in given if key is not None and kind in _TYPES]
    with client.pipeline(transaction=False) as pipe:
        for key, _, (command, *arguments) in asked:
            pipe.execute_command(command, key, *arguments)
        replies = pipe.execute(raise_on_error=False)
    for (key, kind, _), reply in zip(asked, replies, strict=True):
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            yield Spoilt(key, kind)
