"""Entries that cannot be used: kept, never due, and looked at again until they are recovered."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ... import signals
from ...log import Log
from ..entries.entry import PARKED
from ..entries.occurrence import Decision, DecisionType, Occurrence

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient
    from ..keys import Keys

__all__ = ("RECHECKED_PER_TICK", "Quarantine")

log = Log("celery.beat")

#: Entries that are checked again in one tick, about.
RECHECKED_PER_TICK = 100

#: How long after a failure the times of an entry are calculated again: its schedule may ask somebody else for them.
RETRY_AFTER = timedelta(minutes=1)


@dataclass(slots=True)
class _Failing:
    """An entry that can be read, and whose times cannot be calculated."""

    found: object  #: what was read of it
    reason: str
    again: Callable[[datetime], object]
    tried_at: datetime


@dataclass(frozen=True, slots=True)
class _Problem:
    """An entry that cannot be used, as it was found."""

    reason: str
    due: bool  #: it is among those that are due, and so must be parked
    exc: Exception | None  #: to be shown with its traceback, because its cause is in a user's code


class Quarantine:
    """The entries that are quarantined, with the reason and since when.

    What is found of an entry is noted first, and written for all entries at once by ``settle``.

    Args:
        client: the client for the schedule.
        progress: hears of each step.
    """

    def __init__(
        self, app: Celery, client: RedisClient, keys: Keys, *, progress: Callable[[], object] = lambda: None
    ) -> None:
        self.app, self.client, self.keys, self._progress = app, client, keys, progress
        self.cursor = 0  #: of HSCAN: which entries are checked next
        self._known: dict[str, str] = {}
        self._decided: list[Decision] = []
        self._failing: dict[str, _Failing] = {}
        self._problems: dict[str, _Problem] = {}
        self._recovered: dict[str, bool] = {}
        self._unreadable: list[str] = []

    def decided(self) -> Sequence[Decision]:
        """Return what was quarantined since the last call, once for each reason, for the history."""
        decided, self._decided = self._decided, []
        return decided

    def add_failing(
        self, member: str, found: object, exc: Exception, again: Callable[[datetime], object], now: datetime
    ) -> None:
        """Note an entry that can be read, and whose times cannot be calculated.

        Args:
            found: what was read of it, to be compared.
            exc: what its schedule has raised.
            again: calculates its times at a moment.
        """
        refused = self._failing[member] = _Failing(found, _why(exc), again, now)
        self.add(member, refused.reason, due=True, exc=exc)

    def why_failing(self, member: str, found: object, now: datetime) -> str:
        """Return the reason why an entry was refused, if that still holds; else an empty text."""
        refused = self._failing.get(member)
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

    def add(self, member: str, reason: str, *, due: bool, exc: Exception | None = None) -> None:
        """Note an entry to be quarantined.

        Args:
            due: it is among those that are due, and so must be parked.
            exc: what to show with its traceback, because its cause is in a user's code.
        """
        self._problems[member] = _Problem(reason, due, exc)

    def keep(self, member: str, reason: str) -> None:
        """Note an entry that is quarantined and still cannot be used: it is forgotten if it was deleted."""
        self._unreadable.append(member)
        self.add(member, reason, due=False)

    def readmit(self, member: str, *, has_pending: bool) -> None:
        """Note an entry that is quarantined and can be used again.

        Args:
            has_pending: it has an occurrence that was not confirmed.
        """
        self._recovered[member] = has_pending

    def settle(self) -> None:
        """Write what was noted: two round trips, however much it is; then log it, once for each reason."""
        problems, recovered, unreadable = self._problems, self._recovered, self._unreadable
        self._problems, self._recovered, self._unreadable = {}, {}, []
        known = self._known
        problems = {
            member: problem
            for member, problem in problems.items()
            if problem.due or member in unreadable or known.get(member) != problem.reason
        }
        if not problems and not recovered:
            return
        records, deleted = self._stored(list(problems), unreadable)
        problems = {
            member: problem
            for member, problem in problems.items()
            if member not in deleted and (problem.due or known.get(member) != problem.reason)
        }
        now = datetime.now(UTC)
        with self.client.pipeline() as pipe:
            if problems:
                since = now.isoformat(timespec="seconds")
                texts = {}
                for member, problem in problems.items():
                    record = records[member]  # perhaps of the beat before this one
                    if record.get("reason") != problem.reason:
                        record = {"reason": problem.reason, "since": since}
                    texts[member] = json.dumps(record)
                pipe.hset(self.keys.quarantine, mapping=texts)
                pipe.zadd(self.keys.schedule, dict.fromkeys(problems, PARKED), xx=True)
                pipe.zrem(self.keys.pending, *problems)
            if gone := [*deleted, *recovered]:
                pipe.hdel(self.keys.quarantine, *gone)
            if recovered:
                pipe.zadd(self.keys.schedule, dict.fromkeys(recovered, 0), xx=True)
            if waiting := [member for member, has_pending in recovered.items() if has_pending]:
                pipe.zadd(self.keys.pending, dict.fromkeys(waiting, 0), nx=True)
            pipe.execute()
        for member, problem in problems.items():
            self._progress()
            self._tell(member, problem, now, is_recorded=records[member].get("reason") == problem.reason)
        for member in gone:
            self._progress()
            self._forget(member, has_recovered=member in recovered)

    def _stored(
        self, members: Sequence[str], unreadable: Sequence[str]
    ) -> tuple[Mapping[str, Mapping[str, str]], Collection[str]]:
        """Return the records of entries, and which of those that may have been deleted were."""
        with self.client.pipeline(transaction=False) as pipe:
            if members:
                pipe.hmget(self.keys.quarantine, members)
            if unreadable:
                pipe.zmscore(self.keys.schedule, unreadable)
            replies = pipe.execute()
        scores = replies.pop() if unreadable else []
        texts = replies.pop() if members else []
        deleted = {member for member, score in zip(unreadable, scores, strict=True) if score is None}
        return {member: _record(text) for member, text in zip(members, texts, strict=True)}, deleted

    def _tell(self, member: str, problem: _Problem, now: datetime, *, is_recorded: bool) -> None:
        """Log that an entry is quarantined, if this beat has not yet done so for that reason."""
        name, reason, exc = self.keys.name(member), problem.reason, problem.exc
        if not is_recorded and self.keys.entry(member) not in self.keys.own:
            # Without an id: when the entry is recovered, it may still run for its time.
            self._decided.append(Decision(name, "", Occurrence("", now.timestamp()), DecisionType.QUARANTINED, reason))
        if self._known.get(member) == reason:
            return
        self._known[member] = reason
        log.error(
            "beat: Entry %(key)s cannot be used: it is quarantined until it is fixed",
            event="quarantined",
            entry=name,
            key=self.keys.entry(member),
            reason=reason,
            detail="".join(traceback.format_exception(exc)) if exc else "",
        )
        signals.entry_quarantined.send(sender=self.app, entry=member, reason=reason)

    def _forget(self, member: str, *, has_recovered: bool) -> None:
        """Drop what is known about an entry that was deleted or recovered."""
        self._known.pop(member, None)
        self._failing.pop(member, None)
        if has_recovered:
            about = {"entry": self.keys.name(member), "key": self.keys.entry(member)}
            log.warning("beat: Entry %(key)s is usable again", event="entry_recovered", **about)
            signals.entry_recovered.send(sender=self.app, entry=member)


def _why(exc: Exception) -> str:
    return f"its next run cannot be calculated: {type(exc).__name__}: {exc}"


def _record(text: str | None) -> dict[str, str]:
    try:
        return dict(json.loads(text or "{}"))
    except (ValueError, TypeError):  # anybody may write there
        return {}
