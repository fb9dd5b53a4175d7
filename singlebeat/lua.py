"""Loads a ``.lua`` file and calls it in one round trip."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from .server_errors import says_disk_full

if TYPE_CHECKING:
    from .clients import RedisClient

__all__ = (
    "EVAL_READING",
    "Script",
    "answered_scripts",
    "noting_answers",
    "packed",
    "script",
)

#: The command that runs a script which writes nothing.
EVAL_READING = "EVAL_RO"

#: The names of the scripts that were answered within ``noting_answers``.
_answered: ContextVar[set[str] | None] = ContextVar("_answered", default=None)


#: Made once, because making an encoder costs more than encoding a short row. It escapes nothing, so that bytes that are
#: not UTF-8 pass through JSON unchanged on both sides.
_encode = json.JSONEncoder(ensure_ascii=False).encode


class Script:
    """A Lua script; the header of its file documents its keys, arguments and reply.

    Args:
        uses: scripts that it calls as functions of ``KEYS`` and ``ARGV``, by their names.
    """

    def __init__(self, package: str, name: str, *, uses: Sequence[Script] = ()) -> None:
        self.name = name
        own = resources.files(package).joinpath(f"{name}.lua").read_text("utf-8")
        self.text = "".join(used.as_function() for used in uses) + own
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def as_function(self) -> str:
        """Return Lua code that defines this script as a local function of its name, for another script."""
        return f"local function {self.name}(KEYS, ARGV)\n{self.text}\nend\n"

    def __call__(self, client: RedisClient, keys: Sequence[str], args: Sequence[str | int | float]) -> Any:
        """Run the script once and return its reply; an error of the server says in ``script`` which script it was."""
        try:
            try:
                reply = client.evalsha(self.sha, len(keys), *keys, *args)
            except NoScriptError:
                reply = client.eval(self.text, len(keys), *keys, *args)
        except RedisError as exc:
            exc.script = self.name  # type: ignore[attr-defined]
            if not says_disk_full(exc):
                raise
            reply = self._only_read(client, keys, args, exc)
        if (answered := _answered.get()) is not None:
            answered.add(self.name)
        return reply

    def _only_read(
        self, client: RedisClient, keys: Sequence[str], args: Sequence[str | int | float], refusal: RedisError
    ) -> Any:
        """Run the script once more, and let the server refuse it only if it writes.

        Raises:
            RedisError: the given refusal; the script writes.
        """
        try:
            return client.execute_command(EVAL_READING, self.text, len(keys), *keys, *args)
        except ResponseError:
            raise refusal from None


@contextmanager
def noting_answers() -> Iterator[None]:
    """Note the scripts that are answered, for one command or request: its error has to say what it has done before."""
    token = _answered.set(set())
    try:
        yield
    finally:
        _answered.reset(token)


def answered_scripts() -> Collection[str]:
    """Return the names of the scripts that were answered within ``noting_answers``; none outside of it."""
    return _answered.get() or ()


@cache
def script(package: str, name: str, *uses: Script) -> Script:
    """Return a script of a package, and of the scripts that it calls; its file is read once."""
    return Script(package, name, uses=uses)


def packed(rows: Iterable[object]) -> str:
    """Return rows of values as one JSON argument of a script, far cheaper than one argument for each value."""
    return _encode(list(rows))
