"""Leases, crashes, pauses and claims in any order: nothing is claimed twice, and nothing by a beat fenced off."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from celery.schedules import schedule
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from singlebeat import Entry
from singlebeat.beat.calendar.recurrence import latest_occurrence, next_occurrence
from singlebeat.beat.entries.entry import Meta
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership import lease as lease_module
from singlebeat.beat.leadership.lease import MARGIN, Lease, Term
from singlebeat.beat.store import claims as store_module
from singlebeat.beat.store import dispatches as dispatches_module
from singlebeat.beat.store.claims import (
    Claim,
    ClaimedOccurrence,
    ClaimVerdict,
    Confirmation,
    Due,
    Store,
    Stored,
)
from singlebeat.beat.store.dispatches import DISPATCH, Dispatch, Dispatches
from singlebeat.lua import Script
from singlebeat.outbox import Command, Marker
from tests.system.apps import make_app

#: Seconds of a lease in the machine's time; real ones are too few to end it.
TTL = 300.0
EVERY = timedelta(seconds=60)
RETRY_AFTER = timedelta(seconds=30)
START = datetime(2026, 1, 1, tzinfo=UTC)

#: Speeds of the beats' monotonic clocks, which the margin of the lease must bear.
SPEEDS = (0.95, 1.05)

QUEUE = "celery"

beats = st.integers(0, len(SPEEDS) - 1)
delays = st.sampled_from([0, 0, 0, 20, 150, 280])
lost = st.sampled_from(["", "", "", "reply", "late"])


class ManualLease(Lease):
    """A lease that is renewed when the machine says so."""

    def _keep_renewing(self) -> None:
        pass


class LeaseTrustingItsReplies(ManualLease):
    """The mistake to count trust from the reply instead of the request."""

    def acquire(self) -> Term | None:
        known = self._term
        term = super().acquire()
        if term is not known:
            self._trusted_until = self._clock() + self.ttl * (1 - MARGIN)
        return term


@dataclass
class Hands:
    """What a beat holds in its hands while others go on."""

    term: Term
    due: Due
    now: datetime
    taken: list[tuple[Stored, Occurrence]] = field(default_factory=list)


@dataclass
class Beat:
    """One process."""

    lease: Lease
    store: Store
    hands: Hands | None = None


class Repeating:
    """A client that has lost the reply of a script when it is told so, and has run it once more."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.repeats = redis, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.redis, name)

    def evalsha(self, *args: Any) -> Any:
        if self.repeats:
            self.redis.evalsha(*args)
        return self.redis.evalsha(*args)

    def eval(self, *args: Any) -> Any:  # the server has not seen the script yet
        if self.repeats:
            self.redis.eval(*args)
        return self.redis.eval(*args)


class LeaseMachine(RuleBasedStateMachine):
    """Two beats with the real lease, store and scripts on a real server.

    A beat is paused when the others' rules run while it holds what it has read: every rule of a beat goes on with that,
    however old it is. Time passes when told to, also between a request and its execution, and from there to its reply.
    """

    redis: Redis
    app: Celery
    lease_class: type[Lease] = ManualLease

    def __init__(self) -> None:
        super().__init__()
        self.redis.flushdb()
        for name in ("campaign", "renew", "resign"):  # else the first example alone would send them, and wait for that
            self.redis.script_load(lease_module.script(lease_module.__package__, name).text)
        self.keys = Keys.of(self.app)
        self.now = 0.0
        self.late: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []  #: calls that the server executes later
        #: An operator has deleted the lock: two beats may believe that they lead, and still none may claim twice.
        self.robbed = False
        self.delay, self.lost = (0.0, 0.0), ""
        self.takes = 0
        self.claimed: Counter[str] = Counter()
        self.written: dict[str, bool] = {}  #: occurrences that were sent in one write
        self.retaken: Counter[tuple[str, float]] = Counter()
        self.terms: set[int] = set()
        self.ledger_is_new = False
        self.beats = [self.new_beat(speed) for speed in SPEEDS]
        for name in ("a", "b"):
            entry = Entry(name, "tests.system.apps.plain", schedule(EVERY), app=self.app)
            key = self.keys.entry(name)
            self.redis.hset(key, mapping={"definition": entry.encode(), "meta": Meta(START - EVERY).encode()})
            self.redis.zadd(self.keys.schedule, {key: START.timestamp()})

    def new_beat(self, speed: float) -> Beat:
        lease = self.lease_class(
            lambda: self, self.keys.lease, ttl=TTL, clock=lambda speed=speed: 1000 + self.now * speed
        )
        return Beat(lease, Store(self.app, Repeating(self.redis)))

    # ------------------------------------------------ the wire between leases and server

    def evalsha(self, *args: Any) -> Any:
        return self._call(self.redis.evalsha, *args)

    def eval(self, *args: Any) -> Any:
        return self._call(self.redis.eval, *args)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        before, after = self.delay
        self.pass_time(before)
        if self.lost == "late":
            self.late.append((method, args))
            raise RedisConnectionError("the server did not answer in time")
        reply = method(*args)
        self.pass_time(after)
        if self.lost:
            raise RedisConnectionError("the reply was lost")
        return reply

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for key in (self.keys.lease.lock, self.keys.lease.leader):
            if seconds and (left := self.redis.pttl(key)) > 0:
                self.redis.pexpire(key, left - int(seconds * 1000))

    def ask(self, verb: Callable[[], Any], before: float, after: float, lost: str) -> Any:
        self.delay, self.lost = (before, after), lost
        try:
            return verb()
        except RedisError:
            return None
        finally:
            self.delay, self.lost = (0.0, 0.0), ""

    @property
    def hands(self) -> list[tuple[Store, Hands]]:
        return [(beat.store, beat.hands) for beat in self.beats if beat.hands is not None]

    @property
    def wall(self) -> datetime:
        return START + timedelta(seconds=self.now)

    def retry_at(self) -> datetime:
        """Return when to try again what is taken now: as clocks go, one time names one taker."""
        self.takes += 1
        return self.wall + RETRY_AFTER + timedelta(milliseconds=self.takes)

    def is_fenced(self, term: Term) -> bool:
        return self.redis.get(self.keys.lease.lock) != term.token

    # ------------------------------------------------ what a beat does

    @rule(at=beats, before=delays, after=delays, lost=lost, all_pending=st.booleans())
    def read(self, at, before, after, lost, all_pending):
        beat = self.beats[at]
        known = beat.lease.term()
        term = self.ask(beat.lease.acquire, before, after, lost)
        if term is None:
            return
        if term != known:
            assert term.number > max(self.terms, default=0)
            self.terms.add(term.number)
        beat.hands = Hands(term, beat.store.due(self.wall, all_pending=all_pending), self.wall)

    @rule(at=beats, before=delays, after=delays, lost=lost)
    def renew(self, at, before, after, lost):
        self.ask(self.beats[at].lease.renew, before, after, lost)

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), repeated=st.booleans())
    def claim(self, data, repeated):
        store, hands = data.draw(st.sampled_from(self.hands))
        store.client.repeats = repeated
        self.ledger_is_new = True
        claims = [self.claim_for(stored, hands.now) for stored in hands.due.entries]
        fenced = self.is_fenced(hands.term)
        replies = store.claim(claims, hands.term, retry_at=self.retry_at())
        for claim, reply in zip(claims, replies, strict=True):
            assert not fenced or reply in {ClaimVerdict.FENCED}, "a beat has claimed that another one has fenced off"
            if reply is ClaimVerdict.CLAIMED:
                self.claimed[claim.occurrence.id] += 1
                hands.taken.append((claim.stored, claim.occurrence))

    def claim_for(self, stored: Stored, now: datetime) -> Claim:
        nominal = datetime.fromtimestamp(stored.score, UTC)
        next_after = partial(next_occurrence, stored.entry.schedule, zone=UTC)
        upcoming = next_after(latest_occurrence(next_after, nominal, now) or nominal)
        occurrence = Occurrence.of(self.keys.prefix, stored.entry.name, nominal)
        return Claim(stored, upcoming.timestamp(), Meta(nominal, 1), occurrence)

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), repeated=st.booleans())
    def retake(self, data, repeated):
        store, hands = data.draw(st.sampled_from(self.hands))
        store.client.repeats = repeated
        self.ledger_is_new = True
        fenced = self.is_fenced(hands.term)
        taken = store.retake(hands.due.recovered, hands.term, retry_at=self.retry_at())
        assert not (fenced and taken), "a beat has taken up what is another one's"
        self.retaken.update((stored.pending.id, stored.pending_score) for stored in taken)
        hands.taken.extend((stored, stored.pending) for stored in taken)

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), repeated=st.booleans())
    def confirm(self, data, repeated):
        store, hands = data.draw(st.sampled_from(self.hands))
        store.client.repeats = repeated
        self.ledger_is_new = True
        confirmations = [
            Confirmation(stored, Decision(stored.entry.name, stored.entry.task, occurrence, DecisionType.DISPATCHED))
            for stored, occurrence in hands.taken
        ]
        store.confirm(confirmations, hands.term)

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), repeated=st.booleans(), late=st.booleans())
    def dispatch(self, data, repeated, late):
        """Claim, send and confirm in one write."""
        store, hands = data.draw(st.sampled_from(self.hands))
        store.client.repeats = repeated
        self.ledger_is_new = True
        claims: list[Claim | ClaimedOccurrence] = [self.claim_for(stored, hands.now) for stored in hands.due.entries]
        claims += [ClaimedOccurrence(stored, occurrence, stored.meta) for stored, occurrence in hands.taken]
        rows = []
        for claim in claims:
            claimed = claim if isinstance(claim, ClaimedOccurrence) else claim.claimed
            entry, occurrence = claimed.stored.entry, claimed.occurrence
            decision = Decision(entry.name, entry.task, occurrence, DecisionType.DISPATCHED)
            rows.append(Dispatch(claim, claimed, decision, commands=[Command("lpush", QUEUE, occurrence.id)]))
        here = Marker()
        here.write(self.redis, 0.0)
        writer = Dispatches(store, (here, here))
        request = writer.request(rows, hands.term, retry_at=self.retry_at())
        fenced = self.is_fenced(hands.term)

        def write() -> None:
            self.ledger_is_new = True
            for row, answer in zip(rows, writer.write(request), strict=True):
                assert late or not fenced or answer.verdict is ClaimVerdict.FENCED
                assert (answer.verdict is ClaimVerdict.CLAIMED) == bool(answer.recorded)
                if answer.recorded and isinstance(row.claim, Claim):
                    self.written[row.claimed.occurrence.id] = True

        if late:
            self.late.append((write, ()))
        else:
            write()

    # ------------------------------------------------ the world

    @rule(at=beats, what=st.sampled_from(["crash", "stop", "lock is deleted"]))
    def trouble(self, at, what):
        if what == "lock is deleted":
            self.robbed = bool(self.redis.delete(self.keys.lease.lock)) or self.robbed
            return
        if what == "stop":
            self.beats[at].lease.release()
        self.beats[at] = self.new_beat(SPEEDS[at])

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def a_late_call_is_executed(self, data):
        method, args = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        with suppress(NoScriptError):  # the client would have sent the script
            method(*args)

    @rule(seconds=st.sampled_from([10, 40, 120, 310]))
    def time_passes(self, seconds):
        self.pass_time(seconds)

    # ------------------------------------------------ what always holds

    @invariant()
    def no_occurrence_is_claimed_twice(self):
        assert not {id_: count for id_, count in self.claimed.items() if count > 1}
        assert not self.claimed.keys() & self.written.keys()

    @invariant()
    def no_occurrence_is_taken_up_twice_at_a_time(self):
        assert not {taken: count for taken, count in self.retaken.items() if count > 1}

    @invariant()
    def every_claimed_occurrence_is_pending_or_decided_once(self):
        if not self.ledger_is_new:
            return
        self.ledger_is_new = False
        members = self.redis.zrange(self.keys.pending, 0, -1)
        pending = Counter(Occurrence.decode(self.redis.hget(member, "pending")).id for member in members)
        decided = Counter(record["id"] for _, record in self.redis.xrange(self.keys.history))
        assert pending + decided == Counter({*self.claimed, *self.written})
        sent = Counter(self.redis.lrange(QUEUE, 0, -1))
        assert not {id_: count for id_, count in sent.items() if count > 1}
        assert self.written.keys() <= sent.keys() <= decided.keys()

    @invariant()
    def who_trusts_in_its_term_leads(self):
        terms = [term for beat in self.beats if (term := beat.lease.term()) is not None]
        if not self.robbed:
            assert [term for term in terms if self.is_fenced(term)] == []
            assert len(terms) <= 1


def run(server: Any, redis: Redis, *, lease_class: type[Lease] = ManualLease, **options: Any) -> None:
    with make_app(server.celery_url, {"singlebeat_history_limit": 100_000}) as app:
        machine = type("Machine", (LeaseMachine,), {"redis": redis, "app": app, "lease_class": lease_class})
        run_state_machine_as_test(
            machine,
            settings=settings(
                deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck), **options
            ),
        )


def test_no_occurrence_is_claimed_twice_under_any_history(server, redis):
    run(server, redis, max_examples=130, stateful_step_count=30)


#: Script and checks that are taken out of it, by what the machine must notice.
MUTANTS = {
    "a claim after the end of the term": (
        store_module,
        "claim",
        "fenced",
    ),
    "a claim of what was claimed before": (
        store_module,
        "claim",
        'at ~= score or redis.sha1hex(table.concat(f, "\\0")) ~= sha',
    ),
    "a retake after the end of the term": (
        store_module,
        "retake",
        "fenced",
    ),
    "a retake of what was taken up before": (
        store_module,
        "retake",
        'tonumber(redis.call("ZSCORE", pending, member) or "nan") ~= score',
    ),
    "a repetition of a claim": (store_module, "claim", "is_ours"),
    "a second decision": (
        store_module,
        "confirm",
        'occurrence ~= "" and stored[1] ~= occurrence',
        'last and "[" .. last == line',  # which knows a repetition of the call
    ),
    "a dispatch after the end of the term": (dispatches_module, "dispatch", "fenced"),
    "a dispatch of what was claimed before": (
        dispatches_module,
        "dispatch",
        'at ~= score or redis.sha1hex(table.concat(f, "\\0")) ~= sha',
    ),
    "a repeated dispatch": (
        dispatches_module,
        "dispatch",
        'type(kept) == "string" and string.sub(kept, 1, #request) == request',
    ),
    "a campaign against a leader": (lease_module, "campaign", "holder and holder ~= last"),
    "a renewal of another one's term": (
        lease_module,
        "renew",
        'redis.call("GET", lock) ~= token',
        "last ~= number and not is_spoilt",
    ),
    "the end of another one's term": (lease_module, "resign", "holder ~= token"),
}


def break_script(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, *checks: str) -> None:
    assert module.__package__ is not None
    script, original = copy.copy(DISPATCH) if name == "dispatch" else Script(module.__package__, name), module.script
    for check in checks:
        assert f"if {check} then" in script.text
        script.text = script.text.replace(f"if {check} then", "if false then")
    script.sha = hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(dispatches_module, "DISPATCH", script if name == "dispatch" else DISPATCH)
    monkeypatch.setattr(module, "script", lambda package, asked: script if asked == name else original(package, asked))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_notices(server, redis, monkeypatch, mutant):
    break_script(monkeypatch, *MUTANTS[mutant])

    with pytest.raises(AssertionError):
        run(
            server,
            redis,
            max_examples=1000,
            stateful_step_count=30,
            phases=[Phase.generate],
            derandomize=True,
            database=None,
        )


def test_the_machine_notices_trust_that_counts_from_the_reply(server, redis):
    with pytest.raises(AssertionError):
        run(
            server,
            redis,
            lease_class=LeaseTrustingItsReplies,
            max_examples=1000,
            stateful_step_count=30,
            phases=[Phase.generate],
            derandomize=True,
            database=None,
        )
