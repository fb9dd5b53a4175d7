"""Loads a ``.lua`` file and calls it, alone or many at once in one round trip."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

__all__ = ("Call", "Script")

#: The keys and the arguments of one call.
Call = tuple[Sequence[str], Sequence[str | int | float]]


class Script:
    """One Lua script; its header is its contract, the caller names its keys and arguments."""

    def __init__(self, package: str, name: str) -> None:
        self.name = name
        self.text = resources.files(package).joinpath(f"{name}.lua").read_text("utf-8")
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, client: Any, keys: Sequence[str], args: Sequence[str | int | float]) -> Any:
        """Run the script once and return its reply."""
        try:
            return client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.eval(self.text, len(keys), *keys, *args)

    def batch(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """Run the script for each call in one round trip; a reply may be the error of that call alone."""
        if len(calls) < 2:
            return [self._single(client, keys, args) for keys, args in calls]
        replies = self._pipeline(client, calls)
        unknown = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:  # a server that was restarted has forgotten its scripts
            client.script_load(self.text)
            again = self._pipeline(client, [calls[at] for at in unknown])
            for at, reply in zip(unknown, again, strict=True):
                replies[at] = reply
        return replies

    def _single(self, client: Any, keys: Sequence[str], args: Sequence[str | int | float]) -> Any:
        try:
            return self(client, keys, args)
        except ResponseError as exc:
            return exc

    def _pipeline(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                pipe.evalsha(self.sha, len(keys), *keys, *args)
            return list(pipe.execute(raise_on_error=False))
