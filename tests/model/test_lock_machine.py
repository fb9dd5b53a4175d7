"""The lock scripts against the lock in memory: senders, copies, retries, ends of leases, lost replies, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from singlebeat.locks.base import BaseBackend, Call, IfHeld, Ref, Renewal, Verdict
from singlebeat.locks.key import behind_key, lock_key, turn_key
from tests.both_backends import BothBackends, Record, Stored

LOCK = lock_key("LOCK_", "digest")
BEHIND, TURN = behind_key(LOCK), turn_key(LOCK)
#: Nothing ends by itself here: the end of a lease is a rule of the machine.
TTL = LEASE = MEMORY = 3600.0
#: Few, so that they meet often.
SENDERS = 4

T = TypeVar("T")
lost = st.booleans()
steps = st.sampled_from([1, 1, 1_000_000])
payloads = st.sampled_from(["", "one", "two"])
wishes = st.sampled_from(IfHeld)
#: Since when a message waits: not known, or for very long.
ages = st.sampled_from([0.0, 0.0, 1.0, 2.0])
#: Of the first message of a task: another one may have been replaced by it.
firsts = st.sampled_from([0, 0, 1_000_000])


class LockMachine(RuleBasedStateMachine):
    """Many senders and workers around one lock.

    It keeps a history of its own, so that the two backends cannot be wrong together about the promises: the run that
    holds the lock, the ends of runs, the last fence.
    """

    redis: Redis
    url: str

    tasks = Bundle("tasks")  #: the senders' claims
    messages = Bundle("messages")  #: what the broker may deliver: never, or as often as it likes
    deliveries = Bundle("deliveries")  #: what workers have got, each with a nonce of its own

    def __init__(self) -> None:
        super().__init__()
        self.redis.flushdb()
        self.both = BothBackends(self.url)
        self.senders = 0
        self.runs = 0
        self.runner: Ref | None = None  # the run that holds the lock
        self.over: set[tuple[str, int]] = set()  # generations that ended, or handed over
        self.replaced: set[str] = set()  # tasks that lost their place while they waited
        self.fence = 0

    def ask(self, lost: bool, verb: Callable[[BaseBackend], T]) -> T:
        """Return the answer of both; if the reply is lost, both have done it, and the caller asks again."""
        replies = [self.both.ask(verb) for _ in range(1 + lost)]
        assert len({getattr(reply, "verdict", reply) for reply in replies}) == 1
        return replies[-1]

    def stored(self) -> Stored:
        """Return what both have stored for the lock."""
        return self.both.stored(LOCK)

    # ------------------------------------------------ senders

    def acquire(
        self, ref: Ref, lost: bool, *, may_be_resent: bool, payload: str = "", if_held: IfHeld = IfHeld.LEAVE
    ) -> Verdict:
        call = Call(ref, "app.task", "", TTL, payload=payload, if_held=if_held)
        return self.ask(lost, lambda b: b.acquire_many([call], may_be_resent=may_be_resent)[0]).verdict

    @initialize(targets=(tasks, messages), if_held=wishes, payload=payloads, is_busy=st.booleans())
    def first_calls(self, if_held, payload, is_busy):
        """Begin half of the histories with a call during a run, which most of the rules are about."""
        first = self.call(False, "", if_held, 0)
        if not is_busy:
            return first
        self.deliver_and_begin(first, False)
        return multiple(first, self.call(False, payload, if_held, 0))

    @precondition(lambda self: self.senders < SENDERS)
    @rule(targets=(tasks, messages), lost=lost, payload=payloads, if_held=wishes, generation=firsts)
    def call(self, lost, payload, if_held, generation):
        self.senders += 1
        ref = Ref(LOCK, f"task {self.senders}", generation)
        before, runs = self.stored(), self.runner is not None
        verdict = self.acquire(ref, lost, may_be_resent=False, payload=payload, if_held=if_held)
        if if_held.replaces:
            self.replaced |= {before.holder.id} if before.holder and not runs else set()
            self.replaced |= {before.behind.id} if before.behind else set()
            assert verdict is Verdict.ACQUIRED or runs or before.turn
        elif before.holder or before.behind:  # no newer call overtakes the one that waits
            assert verdict is not Verdict.ACQUIRED
        if not (before.holder or before.behind or before.turn):
            assert verdict is Verdict.ACQUIRED
        if verdict is Verdict.HELD and if_held is IfHeld.JOIN:
            after = self.stored()
            assert payload in {record.payload for record in (after.holder, after.behind) if record}
        return ref  # even if the lock is held: a call that a caller waits for is sent in any case

    @rule(ref=tasks, lost=lost, if_held=wishes)
    def call_again(self, ref, lost, if_held):
        verdict = self.acquire(ref, lost, may_be_resent=True, if_held=if_held)
        if if_held.replaces and verdict in {Verdict.ACQUIRED, Verdict.WAITING}:
            self.replaced = set(self.stored().replaced)  # held against the promises when a replaced one tries to start
        assert (verdict is Verdict.DONE) == ((ref.task_id, ref.generation) in self.over or ref.task_id in self.replaced)

    @rule(ref=tasks, behind=st.booleans(), lost=lost)
    def give_up_publishing(self, ref, behind, lost):
        self.finish(replace(ref, key=BEHIND) if behind else ref, False, lost)

    # ------------------------------------------------ workers

    @rule(target=deliveries, ref=messages)
    def deliver(self, ref):
        self.runs += 1
        return replace(ref, nonce=f"run {self.runs}")

    @rule(target=deliveries, ref=messages, lost=lost)
    def deliver_and_begin(self, ref, lost):
        delivery = self.deliver(ref)
        self.begin(delivery, lost)
        return delivery

    @rule(ref=deliveries, lost=lost, waits=st.booleans(), since=ages)
    def begin(self, ref, lost, waits=False, since=0.0):
        known = self.runner
        (verdict,) = {self.begin_once(ref, waits, since) for _ in range(1 + lost)}
        if verdict is Verdict.COPY:
            assert known is not None
            assert (known.task_id, known.generation) == (ref.task_id, ref.generation)

    def begin_once(self, ref: Ref, waits: bool, since: float) -> Verdict:
        options = {"lease": LEASE, "remember_for": MEMORY, "task": "app.task", "arguments": "", "waits_since": since}
        before = self.stored()
        holder = self.both.ask(lambda b: b.begin(ref, queued=BEHIND, turn_ttl=60 * waits, **options))
        place, in_turn = before.behind, before.turn is not None and before.turn.id == ref.task_id
        is_old = waits and since > 0  # it may have waited for longer than the call in that place
        if before.holder is None and place and place.if_held and place.id != ref.task_id and not (in_turn or is_old):
            assert holder.verdict is not Verdict.STARTED
        if holder.verdict is Verdict.STARTED:
            assert holder.payload == self.stored().holder.payload
            self.starts(ref, holder.fence, before.holder)
        else:
            assert holder.payload == ""
        return holder.verdict

    def starts(self, ref: Ref, fence: int, before: Record | None) -> None:
        if ref == self.runner:
            assert fence == self.fence
            return
        assert (ref.task_id, ref.generation) not in self.over
        assert ref.task_id not in self.replaced
        if before is not None:
            assert before.id == ref.task_id
            assert before.state == "queued" or before.gen < ref.generation
            if before.gen < ref.generation:  # its message exists only because the lower one has asked for a retry
                self.over.add((before.id, before.gen))
        assert fence > self.fence
        self.runner, self.fence = ref, fence

    @rule(ref=deliveries | tasks, lost=lost)
    def renew(self, ref, lost):
        renewal = self.ask(lost, lambda b: b.renew_many([ref], lease=LEASE)[0])
        if renewal is Renewal.RUNNING:
            assert ref == self.runner
        if (ref.task_id, ref.generation) in self.over:
            assert renewal is Renewal.OVER

    def pick(self, ref: Ref, runner: bool) -> Ref:
        """Return the run that holds the lock, if that is wanted and there is one: it has more to lose than others."""
        return self.runner if runner and self.runner else ref

    @rule(ref=deliveries, runner=st.booleans(), lost=lost)
    def finish(self, ref, runner, lost):
        ref = self.pick(ref, runner)
        before = self.stored().holder
        self.ask(lost, lambda b: b.finish_many([ref], remember_for=MEMORY))
        after = self.stored().holder
        if ref.key == BEHIND:
            assert after == before
            return
        if before is not None and (before.id, before.gen) != (ref.task_id, ref.generation):
            assert after == before
        if self.runner is not None:
            if ref == self.runner:
                self.over.add((ref.task_id, ref.generation))
                self.runner = None
            else:
                assert after == before

    def hand_over(self, ref: Ref, to: Ref, lost: bool) -> None:
        held = ref == self.runner
        rotated = self.ask(lost, lambda b: b.rotate(ref, to=to, ttl=TTL, remember_for=MEMORY))
        assert rotated or not held
        if held:
            self.runner = None
            if to.generation > ref.generation:
                self.over.add((ref.task_id, ref.generation))

    @rule(target=messages, ref=deliveries, runner=st.booleans(), step=steps, ends=st.booleans(), lost=lost)
    def retry_or_replace(self, ref, runner, step, ends, lost):
        ref = self.pick(ref, runner)
        successor = replace(ref, generation=ref.generation + step, nonce="")
        self.hand_over(ref, successor, lost)
        if ends:
            self.finish(ref, False, lost)
        return successor  # sent in any case: the run that asks for a retry holds the lock

    @rule(ref=deliveries, runner=st.booleans(), lost=lost)
    def requeue(self, ref, runner, lost):
        ref = self.pick(ref, runner)
        self.hand_over(ref, replace(ref, nonce=""), lost)

    # ------------------------------------------------ the world

    @rule(key=st.sampled_from([LOCK, BEHIND, TURN]))
    def lease_ends(self, key):
        self.both.ask(lambda b: b.unlock(key))
        if key == LOCK:
            self.runner = None

    # ------------------------------------------------ what always holds

    @invariant()
    def the_promises_are_kept(self):
        stored = self.stored()
        if self.runner is None:
            assert stored.holder is None or stored.holder.state == "queued"
        else:
            run = (self.runner.task_id, self.runner.generation, "running", self.runner.nonce)
            assert astuple(stored.holder)[:4] == run
        assert stored.replaced == self.replaced
        assert stored.over == self.over


def test_a_lock_keeps_its_promises_under_any_history(server, redis):
    machine = type("Machine", (LockMachine,), {"redis": redis, "url": server.url})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=30,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
