"""The work of a leader's tick: from due entries and pending occurrences to messages and decisions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from .asking import asks_code, keep_answers
from .calculating_time import CHEAP, EXPENSIVE, UNKNOWN
from .calendar.zone import app_zone
from .decide import claim_for, dropped
from .decision_log import log_decision
from .dispatch import Dispatcher
from .entries.occurrence import DecisionType
from .one_write import OneWrite
from .several_writes import RETRY_AFTER, SeveralWrites
from .store.claims import Claim, ClaimedOccurrence, ClaimVerdict, Confirmation, Due, Store, Stored

if TYPE_CHECKING:
    from celery import Celery

    from .entries.occurrence import Decision
    from .leadership.clock_guard import Jump
    from .leadership.lease import Term
    from .share import Share

__all__ = ("SHORTEST_SLEEP", "Tick", "next_delay")

#: Seconds that the leader sleeps after it has sent a run that a program asked for: the next run of a backfill is asked
#: for as soon as this one is sent.
ASKED_INTERVAL = 0.1

#: Shortest sleep in seconds: a tick that returns 0 keeps Celery from its own work.
SHORTEST_SLEEP = 0.001


class Tick:
    """Decides about the due entries of an app, and sends their occurrences.

    Args:
        progress: called at each step, because a step may take long.
        timestamp: returns the server's time in seconds since 1970.
    """

    def __init__(
        self,
        app: Celery,
        store: Store,
        dispatcher: Dispatcher,
        one_write: OneWrite,
        *,
        progress: Callable[[], None],
        timestamp: Callable[[], float],
    ) -> None:
        self.app, self.store, self.dispatcher, self.one_write = app, store, dispatcher, one_write
        self._progress, self._timestamp = progress, timestamp
        #: Number of due entries that are left: blocked by an earlier occurrence which is not sent yet, expensive, or in
        #: the parts of beats that are slow. They keep their places at the head of the due entries, so the next tick
        #: reads on behind them, until it reaches the end.
        self._left = 0
        self._asks_pending_first = False  #: in this tick, code of the user is asked for pending occurrences first

    def read(self, now: datetime, share: Share, *, all_pending: bool) -> Due:
        """Read one batch of due entries, and the pending occurrences to be retried, or all pending ones."""
        return self.store.due(now, share, all_pending=all_pending, start=self._left)

    def work_off(self, due: Due, term: Term, now: datetime, jump: Jump | None = None) -> list[float]:
        """Decide about one batch, send it, and return when entries that it has moved on or left waiting come next.

        Expensive entries are calculated when the occurrences of the others are sent. Last come those for which code of
        the user is asked: it may be slow, or hang until the watchdog ends this beat.

        Args:
            jump: the last jump of the clock, if one is known.
        """
        _close_old_connections()
        self.dispatcher.asking.begin_tick()
        over, upcoming, left = list[Confirmation](), list[float](), due.passed
        for recovered, entries in self._groups(due):
            pending, wait_s = self._answered(recovered, now)
            taken_at, retry_at = monotonic(), self._retry_at()
            retaken = self._retake(pending, term, retry_at)
            confirmed, ready = self._drop(retaken, term, now)
            over += confirmed
            decided, waits_s = self._decide(_without(entries, over), now, jump)
            wanted, unasked_s = self._ask(decided, now)
            self.store.quarantine.settle()
            if not ready:  # no retaken ones
                taken_at, retry_at = monotonic(), self._retry_at()  # the decisions may have taken long
            settled = self.one_write.send(ready, wanted, term, now, retry_at=retry_at)
            claims, blocked = self._claim(wanted, settled, term, retry_at)
            self._record(claims, term)
            ready += [claimed for claim in claims if (claimed := claim.claimed) is not None]
            unsettled = [each for each in ready if each.occurrence.id not in settled]
            SeveralWrites(self.dispatcher, term, now, taken_at).send(unsettled)
            upcoming += [claim.next_score for claim in claims if claim.next_score >= 0]
            waits_s += unasked_s
            upcoming += [self._timestamp() + seconds for seconds in {wait_s, *waits_s} if seconds < math.inf]
            left += len(waits_s) + blocked
        self._left = self._left + left if due.more else 0
        self.store.notice_changes()
        self.one_write.check_records()
        return upcoming

    def _groups(self, due: Due) -> Iterator[tuple[Sequence[Stored], Sequence[Stored]]]:
        """Yield pending and due entries in groups, each of which is sent before the next one is calculated or asked."""
        time, asking = self.store.calculating_time, list[Stored]()
        ranked: dict[int, list[Stored]] = {CHEAP: [], UNKNOWN: [], EXPENSIVE: []}
        for stored in due.entries:
            group = asking if asks_code(stored.entry) else ranked[time.rank(stored.fields[0], stored.entry)]
            group.append(stored)
        yield [stored for stored in due.recovered if not asks_code(stored.entry)], ranked[CHEAP]
        yield (), ranked[UNKNOWN] + ranked[EXPENSIVE]
        self._asks_pending_first = not self._asks_pending_first  # the first group may use up the time for questions
        last = [([stored for stored in due.recovered if asks_code(stored.entry)], ()), ((), asking)]
        yield from last if self._asks_pending_first else reversed(last)

    def _answered(self, recovered: Sequence[Stored], now: datetime) -> tuple[list[Stored], float]:
        """Return those entries with pending occurrences that can be sent now, and the seconds until others can."""
        answers = self.dispatcher.asking.answers(recovered, now)
        self._postpone(answers.failed, now)
        return [each for stored in recovered if (each := answers.given.get(stored.entry.key))], answers.wait_s

    def _retry_at(self) -> datetime:
        """Return until when no other beat sends occurrences that this one takes now."""
        return datetime.fromtimestamp(self._timestamp() + RETRY_AFTER, UTC)

    def _retake(self, recovered: Sequence[Stored], term: Term, retry_at: datetime) -> list[ClaimedOccurrence]:
        """Retake pending occurrences: until ``retry_at`` no other beat sends them."""
        retaken = self.store.retake(recovered, term, retry_at=retry_at)
        return [
            ClaimedOccurrence(stored, stored.pending, stored.meta) for stored in retaken if stored.pending is not None
        ]

    def _drop(
        self, retaken: Sequence[ClaimedOccurrence], term: Term, now: datetime
    ) -> tuple[list[Confirmation], list[ClaimedOccurrence]]:
        """Confirm retaken occurrences that are too late, paused or disabled, and free their locks; return the others.

        One whose run has begun was sent. One of which that is not known is neither confirmed nor returned: it waits
        until the locks' server answers.
        """
        zone = app_zone(self.app)
        decided = [(claimed, dropped(claimed.stored, claimed.occurrence, now, zone=zone)) for claimed in retaken]
        late = [(claimed, decision) for claimed, decision in decided if decision is not None]
        begun = self.dispatcher.begun([claimed for claimed, _ in late])
        sent = [(claimed, decision) for claimed, decision in late if begun.get(claimed.occurrence.id)]
        over = [(claimed, decision) for claimed, decision in late if begun.get(claimed.occurrence.id, False) is False]
        unknown = [claimed.stored.entry.key for claimed, _ in late if begun.get(claimed.occurrence.id, False) is None]
        decisions = [(claimed, replace(each, outcome=DecisionType.DISPATCHED, reason="")) for claimed, each in sent]
        confirmations = [claimed.confirmation(decision) for claimed, decision in (*over, *decisions)]
        self.store.confirm(confirmations, term)
        self._postpone({key: self.dispatcher.failures.backoff.seconds(key) for key in unknown}, now)
        self.dispatcher.free([claimed for claimed, _ in over])
        self.dispatcher.failures.backoff.forget(*(claimed.stored.entry.key for claimed, _ in sent))
        self._log(confirmation.decision for confirmation in confirmations)
        return confirmations, [claimed for claimed, decision in decided if decision is None]

    def _postpone(self, waits_s: Mapping[str, float], now: datetime) -> None:
        """Let pending occurrences wait for some seconds, by the keys of their entries."""
        self.store.postpone({key: now + timedelta(seconds=seconds) for key, seconds in waits_s.items()})

    def _decide(self, entries: Sequence[Stored], now: datetime, jump: Jump | None) -> tuple[list[Claim], list[float]]:
        """Return a claim for each entry that can be decided about, and for each that waits the seconds until it can.

        Entries whose times cannot be calculated are quarantined.
        """
        zone, time = app_zone(self.app), self.store.calculating_time
        claims, waits_s = list[Claim](), list[float]()
        for stored in entries:
            self._progress()
            if not time.has_for(stored.fields[0], stored.entry):
                waits_s.append(time.wait_s)  # it stays due
                continue
            again = partial(claim_for, stored, zone=zone, prefix=self.store.keys.prefix, jump=jump)
            try:
                with time.spent_on(stored.fields[0], stored.entry):
                    claims.append(again(now))
            except Exception as exc:  # a user's own schedule class may raise anything
                self.store.quarantine.add_failing(stored.member, stored.found, exc, again, now)
        return claims, waits_s

    def _ask(self, claims: Sequence[Claim], now: datetime) -> tuple[list[Claim], list[float]]:
        """Return claims with what code of the user answers, and for each that waits the seconds until it is asked."""
        asked = [each.stored for each in claims if each.occurrence is not None and not _is_blocked(each.stored)]
        answers = self.dispatcher.asking.answers(asked, now)
        ready = list[Claim]()
        for claim in claims:
            answered = answers.given.get(claim.stored.entry.key)
            if claim.occurrence is None or answered is claim.stored:
                ready.append(claim)
            elif answered is not None:
                occurrence = keep_answers(claim.occurrence, answered.entry)
                ready.append(replace(claim, stored=answered, occurrence=occurrence))
        return ready, [answers.wait_s] * (len(claims) - len(ready))

    def _claim(
        self, claims: Sequence[Claim], settled: Mapping[str, ClaimVerdict], term: Term, retry_at: datetime
    ) -> tuple[list[Claim], int]:
        """Return the claims that Redis has granted, and the number of entries with a pending occurrence.

        Args:
            settled: the verdicts of those that have been decided about, by the ids of their occurrences.
        """
        verdicts = [settled.get(claim.occurrence.id) if claim.occurrence is not None else None for claim in claims]
        left = [claim for claim, verdict in zip(claims, verdicts, strict=True) if verdict is None]
        answers = iter(self.store.claim(left, term, retry_at=retry_at))
        verdicts = [verdict or next(answers) for verdict in verdicts]
        granted = [claim for claim, verdict in zip(claims, verdicts, strict=True) if verdict is ClaimVerdict.CLAIMED]
        return granted, verdicts.count(ClaimVerdict.PENDING)

    def _record(self, claims: Sequence[Claim], term: Term) -> None:
        """Log the decisions that send nothing, and record those about entries that are not moved on."""
        self.store.record(self.store.quarantine.decided(), term)
        self._log(claim.decision for claim in claims if claim.decision is not None)

    def _log(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            log_decision(decision, self._timestamp())


def _close_old_connections() -> None:
    """Let Django, if this process uses it, close connections to databases that have failed or are too old.

    It does so at the ends of requests, and Celery at those of tasks, of which there are none here. Times, arguments,
    keys, routes and the sending of a task may be code of the user that asks a database.
    """
    if (django := sys.modules.get("django.db")) is not None:
        with suppress(Exception):  # it may not be set up
            django.close_old_connections()


def _is_blocked(stored: Stored) -> bool:
    """Return whether code would be asked in vain: an earlier occurrence was not yet sent when the entry was read."""
    return stored.pending is not None and asks_code(stored.entry)


def _without(entries: Sequence[Stored], over: Sequence[Confirmation]) -> list[Stored]:
    """Return entries as they are stored once the given occurrences are confirmed."""
    pasts = {confirmation.stored.entry.key: confirmation.past for confirmation in over if confirmation.past is not None}
    return [
        stored.without_pending(pasts[stored.entry.key]) if stored.entry.key in pasts else stored for stored in entries
    ]


def next_delay(due: Due, scores: Sequence[float], now: float, *, longest: float) -> float:
    """Return the seconds to sleep after a tick.

    Args:
        scores: when entries that the tick has moved on or left waiting come next, in seconds since 1970.
        now: seconds since 1970.
        longest: seconds after which changes of other programs must be noticed.
    """
    if due.more:
        return SHORTEST_SLEEP
    upcoming = min([longest, *(score - now for score in scores)])
    if due.next_score is not None:
        upcoming = min(upcoming, due.next_score - now)
    if any(stored.pending and not stored.pending.is_scheduled for stored in due.recovered):
        upcoming = min(upcoming, ASKED_INTERVAL)
    return max(SHORTEST_SLEEP, upcoming)
