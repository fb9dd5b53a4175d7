"""Entries that cannot be used: kept, never due, and looked at again until they are mended."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from .. import signals
from ..log import Log
from .entry import PARKED
from .occurrence import Decision, Occurrence, Outcome

if TYPE_CHECKING:
    from celery import Celery

    from .keys import Keys

__all__ = ("Quarantine",)

log = Log("celery.beat")

#: Entries that are looked at again in one tick.
RECHECKED_PER_TICK = 100

#: How long after a failure the times of an entry are calculated again: its schedule may ask somebody else for them.
RETRY_AFTER = timedelta(minutes=1)


@dataclass(slots=True)
class _Refused:
    """An entry that can be read, and whose times cannot be calculated."""

    found: Any  #: what was read of it
    reason: str
    again: Callable[[datetime], object]
    tried_at: datetime


class Quarantine:
    """What is set aside, with the reason and since when."""

    def __init__(self, app: Celery, client: Any, keys: Keys) -> None:
        self.app, self.client, self.keys = app, client, keys
        self._known: dict[str, str] = {}
        self._decided: list[Decision] = []
        self._refused: dict[str, _Refused] = {}
        self._turn = 0

    def decided(self) -> Sequence[Decision]:
        """Return what was set aside since the last call, once for each reason, for the history."""
        decided, self._decided = self._decided, []
        return decided

    def refuse(
        self, member: str, found: Any, exc: Exception, again: Callable[[datetime], object], now: datetime
    ) -> None:
        """Set an entry aside that can be read, and whose times cannot be calculated.

        Args:
            found: what was read of it, to be compared.
            exc: what its schedule has raised.
            again: calculates its times at a moment.
        """
        refused = self._refused[member] = _Refused(found, _why(exc), again, now)
        self.put(member, refused.reason, due=True, exc=exc)

    def why(self, member: str, found: Any, now: datetime) -> str:
        """Return the reason why an entry was refused, if that still holds; else an empty text."""
        refused = self._refused.get(member)
        if refused is None or refused.found != found:
            return ""
        if abs(now - refused.tried_at) >= RETRY_AFTER:
            refused.tried_at = now
            try:
                refused.again(now)
            except Exception as exc:  # a user's own schedule may do anything
                refused.reason = _why(exc)
            else:
                return ""
        return refused.reason

    def put(self, member: str, reason: str, *, due: bool, exc: Exception | None = None) -> None:
        """Set an entry aside; said once per reason.

        Args:
            due: it is among those that are due, and so must be parked.
            exc: what to show with its traceback, because its cause is in somebody's code.
        """
        news, name = self._known.get(member) != reason, self.keys.name(member)
        if news:
            log.error(
                "beat: Entry %(key)s cannot be used and waits to be mended",
                event="quarantined",
                entry=name,
                key=self.keys.entry(member),
                reason=reason,
                detail="".join(traceback.format_exception(exc)) if exc else "",
            )
            self._known[member] = reason
            signals.entry_set_aside.send(sender=self.app, entry=member, reason=reason)
        if not news and not due:
            return
        now = datetime.now(UTC)
        record = {"reason": reason, "since": now.isoformat(timespec="seconds")}
        before = _record(self.client.hget(self.keys.quarantine, member))
        if before.get("reason") == reason:  # the beat before this one has recorded it
            record = before
        elif self.keys.entry(member) not in self.keys.own:
            # Without an id: when the entry is mended, it may still run for its time.
            self._decided.append(Decision(name, "", Occurrence("", now.timestamp()), Outcome.QUARANTINED, reason))
        with self.client.pipeline() as pipe:
            pipe.hset(self.keys.quarantine, member, json.dumps(record))
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
        about = {"entry": self.keys.name(member), "key": self.keys.entry(member)}
        log.info("beat: Entry %(key)s is mended", event="entry_mended", **about)
        signals.entry_mended.send(sender=self.app, entry=member)
        self._known.pop(member, None)
        self._refused.pop(member, None)
        with self.client.pipeline() as pipe:
            pipe.hdel(self.keys.quarantine, member)
            pipe.zadd(self.keys.schedule, {member: 0}, xx=True)
            if has_pending:
                pipe.zadd(self.keys.pending, {member: 0}, nx=True)
            pipe.execute()


def _why(exc: Exception) -> str:
    return f"its next run cannot be calculated: {type(exc).__name__}: {exc}"


def _record(text: str | None) -> dict[str, str]:
    try:
        return dict(json.loads(text or "{}"))
    except (ValueError, TypeError):  # anybody may write there
        return {}
