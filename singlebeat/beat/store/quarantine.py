"""The quarantine of unusable entries: they are kept, are never due, and are checked again until they are usable."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from ... import signals
from ...log import Log
from ..entries.fields import BATCH
from ..entries.occurrence import Decision, DecisionType, Occurrence

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient
    from ..entries.entry import Entry
    from ..keys import Keys

__all__ = ("QUARANTINED", "RECHECKED_PER_TICK", "Quarantine")

log = Log("celery.beat")

#: The score of a quarantined entry. A finished one has another: if the record of a quarantined entry is gone, only its
#: score says that it is to be checked again.
QUARANTINED = -2.0

#: The approximate number of quarantined entries that are checked again in one tick.
RECHECKED_PER_TICK = 100

#: How long after a failure the times of an entry are calculated again: its schedule may ask another service for them.
RETRY_AFTER = timedelta(minutes=1)


@dataclass(slots=True)
class _Failing:
    """An entry that can be read, but whose times cannot be calculated."""

    found: object  #: its fields as they were read
    reason: str
    again: Callable[[datetime], object]
    tried_at: datetime


@dataclass(frozen=True, slots=True)
class _Problem:
    """The reason why an entry cannot be used."""

    reason: str
    due: bool  #: the entry is due, and so must be parked
    exc: Exception | None  #: to be logged with its traceback, because its cause is in a user's code


class Quarantine:
    """The quarantined entries, with the reason and the time of each.

    Findings about entries are only noted; ``settle`` writes them for all entries at once.

    Args:
        client: the client for the schedule.
        progress: called at each step.
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
        """Return the decisions about entries that were quarantined since the last call, one for each reason."""
        decided, self._decided = self._decided, []
        return decided

    def add_failing(
        self, member: str, found: object, exc: Exception, again: Callable[[datetime], object], now: datetime
    ) -> None:
        """Note an entry that can be read, but whose times cannot be calculated.

        Args:
            found: its fields as they were read, for later comparison.
            exc: the exception that its schedule has raised.
            again: calculates its times at a moment.
        """
        refused = self._failing[member] = _Failing(found, _reason_of(exc), again, now)
        self.add(member, refused.reason, due=True, exc=exc)

    def why_failing(self, member: str, found: object, now: datetime) -> str:
        """Return the reason why the times of an entry could not be calculated, empty if they are to be tried again."""
        refused = self._failing.get(member)
        is_known = refused is not None and refused.found == found and abs(now - refused.tried_at) <= RETRY_AFTER
        return refused.reason if refused is not None and is_known else ""

    def try_times(self, member: str, found: object, entry: Entry, now: datetime) -> None:
        """Calculate the times of a quarantined entry, and note whether that fails."""
        refused = self._failing.get(member)
        # Another process may have quarantined it.
        again = entry.timetable.next if refused is None or refused.found != found else refused.again
        try:
            again(now)
        except Exception as exc:  # a user's own schedule may raise anything
            self._failing[member] = _Failing(found, _reason_of(exc), again, now)
        else:
            self._failing.pop(member, None)

    def add(self, member: str, reason: str, *, due: bool, exc: Exception | None = None) -> None:
        """Note an entry to be quarantined.

        Args:
            due: the entry is due, and so must be parked.
            exc: the exception to log with its traceback, if its cause is in a user's code.
        """
        self._problems[member] = _Problem(reason, due, exc)

    def keep(self, member: str, reason: str) -> None:
        """Note a quarantined entry that still cannot be used; ``settle`` forgets the entry if it was deleted."""
        self._unreadable.append(member)
        self.add(member, reason, due=False)

    def readmit(self, member: str, *, has_pending: bool) -> None:
        """Note a quarantined entry that can be used again.

        Args:
            has_pending: the entry has a pending occurrence.
        """
        self._recovered[member] = has_pending

    def recheck_unrecorded(self) -> None:
        """Make quarantined entries due whose records another program has removed, so that they are checked again."""
        self._progress()
        members = self.client.zrangebyscore(self.keys.schedule, QUARANTINED, QUARANTINED)
        for at in range(0, len(members), BATCH):
            batch = members[at : at + BATCH]
            self._progress()
            records = self.client.hmget(self.keys.quarantine, batch)
            places = {member: 0 for member, record in zip(batch, records, strict=True) if record is None}
            if places:
                self._progress()
                self.client.zadd(self.keys.schedule, places, xx=True)

    def settle(self) -> None:
        """Write all noted findings in two round trips, then log each once for each reason."""
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
        due = (member for member, problem in problems.items() if problem.due)  # deleted since it was read, perhaps
        records, deleted = self._read_records(list(problems), [*unreadable, *due])
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
                    record = records[member]  # perhaps written by an earlier leader
                    if record.get("reason") != problem.reason:
                        record = {"reason": problem.reason, "since": since}
                    texts[member] = json.dumps(record)
                pipe.hset(self.keys.quarantine, mapping=texts)
                pipe.zadd(self.keys.schedule, dict.fromkeys(problems, QUARANTINED), xx=True)
                pipe.zrem(self.keys.pending, *problems, *map(self.keys.entry, problems))
            if gone := [*deleted, *recovered]:
                pipe.hdel(self.keys.quarantine, *gone)
            if recovered:
                pipe.zadd(self.keys.schedule, dict.fromkeys(recovered, 0), xx=True)
            if waiting := [self.keys.entry(member) for member, has_pending in recovered.items() if has_pending]:
                pipe.zadd(self.keys.pending, dict.fromkeys(waiting, 0), nx=True)
            pipe.execute()
        for member, problem in problems.items():
            self._progress()
            self._log_quarantined(member, problem, now, is_recorded=records[member].get("reason") == problem.reason)
        for member in gone:
            self._progress()
            self._forget(member, has_recovered=member in recovered)

    def _read_records(
        self, members: Sequence[str], placed: Sequence[str]
    ) -> tuple[Mapping[str, Mapping[str, str]], Collection[str]]:
        """Return the quarantine records of entries, and which of those that had a place were deleted."""
        with self.client.pipeline(transaction=False) as pipe:
            if members:
                pipe.hmget(self.keys.quarantine, members)
            if placed:
                pipe.zmscore(self.keys.schedule, placed)
            replies = pipe.execute()
        scores = replies.pop() if placed else []
        texts = replies.pop() if members else []
        deleted = {member for member, score in zip(placed, scores, strict=True) if score is None}
        return {member: _record(text) for member, text in zip(members, texts, strict=True)}, deleted

    def _log_quarantined(self, member: str, problem: _Problem, now: datetime, *, is_recorded: bool) -> None:
        """Log that an entry is quarantined, if this beat has not yet done so for that reason."""
        name, reason, exc = self.keys.name(member), problem.reason, problem.exc
        if not is_recorded and self.keys.entry(member) not in self.keys.own:
            # Without an id, because the entry may still run for its time once it is usable again.
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
        """Drop the findings about an entry that was deleted or is usable again; log and signal a recovery."""
        self._known.pop(member, None)
        self._failing.pop(member, None)
        if has_recovered:
            about = {"entry": self.keys.name(member), "key": self.keys.entry(member)}
            log.warning("beat: Entry %(key)s is usable again", event="entry_recovered", **about)
            signals.entry_recovered.send(sender=self.app, entry=member)


def _reason_of(exc: Exception) -> str:
    return f"its next run cannot be calculated: {type(exc).__name__}: {exc}"


def _record(text: str | None) -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in dict(json.loads(text or "{}")).items()}
    except (ValueError, TypeError, RecursionError):  # any program may write there
        return {}
