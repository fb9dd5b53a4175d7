"""Entries that cannot be used: kept, never due, and looked at again until they are mended."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from .entry import PARKED

if TYPE_CHECKING:
    from .keys import Keys

__all__ = ("Quarantine",)

logger = get_logger("celery.beat")


class Quarantine:
    """What is set aside, with the reason and since when."""

    def __init__(self, client: Any, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self._known: dict[str, str] = {}

    def put(self, member: str, reason: str, *, due: bool) -> None:
        """Set an entry aside; said once per reason.

        Args:
            due: it is among those that are due, and so must be parked.
        """
        news = self._known.get(member) != reason
        if news:
            logger.error("beat: Entry %s cannot be used and waits to be mended: %s", member, reason)
            self._known[member] = reason
        if not news and not due:
            return
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with self.client.pipeline() as pipe:
            pipe.hset(self.keys.quarantine, member, json.dumps({"reason": reason, "since": since}))
            pipe.zadd(self.keys.schedule, {member: PARKED}, xx=True)
            pipe.zrem(self.keys.pending, member)
            pipe.execute()

    def lift(self, member: str) -> None:
        """Take an entry up again that is mended."""
        logger.info("beat: Entry %s is mended", member)
        self._known.pop(member, None)
        with self.client.pipeline() as pipe:
            pipe.hdel(self.keys.quarantine, member)
            pipe.zadd(self.keys.schedule, {member: 0}, xx=True)
            pipe.execute()
