"""Entries that cannot be used: kept, never due, and looked at again until they are mended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from .. import signals
from .entry import PARKED

if TYPE_CHECKING:
    from celery import Celery

    from .keys import Keys

__all__ = ("Quarantine",)

logger = get_logger("celery.beat")

#: Entries that are looked at again in one tick.
RECHECKED_PER_TICK = 100


class Quarantine:
    """What is set aside, with the reason and since when."""

    def __init__(self, app: Celery, client: Any, keys: Keys) -> None:
        self.app, self.client, self.keys = app, client, keys
        self._known: dict[str, str] = {}
        #: What was read of entries whose times cannot be calculated: it is not tried again until that has changed.
        self._refused: dict[str, tuple[Any, str]] = {}
        self._turn = 0

    def refuse(self, member: str, found: Any, exc: Exception) -> None:
        """Set an entry aside that can be read, and whose times cannot be calculated.

        Args:
            found: what was read of it, to be compared.
            exc: what its schedule has raised.
        """
        reason = f"its next run cannot be calculated: {type(exc).__name__}: {exc}"
        self._refused[member] = found, reason
        self.put(member, reason, due=True, exc=exc)

    def why(self, member: str, found: Any) -> str:
        """Return the reason why an entry was refused, if it still is as it was then; else an empty text."""
        then, reason = self._refused.get(member, (None, ""))
        return reason if then == found else ""

    def put(self, member: str, reason: str, *, due: bool, exc: Exception | None = None) -> None:
        """Set an entry aside; said once per reason.

        Args:
            due: it is among those that are due, and so must be parked.
            exc: what to show with its traceback, because its cause is in somebody's code.
        """
        news = self._known.get(member) != reason
        if news:
            logger.error(
                "beat: Entry %s cannot be used and waits to be mended: %s", _printable(member), reason, exc_info=exc
            )
            self._known[member] = reason
            signals.entry_set_aside.send(sender=self.app, entry=member, reason=reason)
        if not news and not due:
            return
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with self.client.pipeline() as pipe:
            pipe.hset(self.keys.quarantine, member, json.dumps({"reason": reason, "since": since}))
            pipe.zadd(self.keys.schedule, {member: PARKED}, xx=True)
            pipe.zrem(self.keys.pending, member)
            pipe.execute()

    def to_recheck(self, members: Sequence[str]) -> Sequence[str]:
        """Return which of them to look at again in this tick: each in its turn."""
        start = self._turn % len(members) if members else 0
        self._turn = start + RECHECKED_PER_TICK
        return (*members[start:], *members[:start])[:RECHECKED_PER_TICK]

    def forget(self, member: str) -> None:
        """Drop what is known about an entry that was deleted."""
        self._known.pop(member, None)
        self._refused.pop(member, None)
        self.client.hdel(self.keys.quarantine, member)

    def lift(self, member: str, *, has_pending: bool) -> None:
        """Take an entry up again that is mended, with the occurrence of it that was not confirmed."""
        logger.info("beat: Entry %s is mended", _printable(member))
        signals.entry_mended.send(sender=self.app, entry=member)
        self._known.pop(member, None)
        self._refused.pop(member, None)
        with self.client.pipeline() as pipe:
            pipe.hdel(self.keys.quarantine, member)
            pipe.zadd(self.keys.schedule, {member: 0}, xx=True)
            if has_pending:
                pipe.zadd(self.keys.pending, {member: 0}, nx=True)
            pipe.execute()


def _printable(member: str) -> str:
    return member.encode(errors="backslashreplace").decode()
