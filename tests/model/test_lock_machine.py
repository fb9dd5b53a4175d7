"""The lock record against a plain model: senders, copies, retries, ends of leases, lost replies, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis import Redis

from singlebeat.locks.base import Call, IfHeld, Ref, Renewal, Verdict
from singlebeat.locks.key import behind_key, done_key, lock_key, turn_key
from singlebeat.locks.redis import RedisBackend

LOCK = lock_key("LOCK_", "digest")
BEHIND, TURN = behind_key(LOCK), turn_key(LOCK)
#: Nothing ends by itself here: the end of a lease is a rule of the machine.
TTL = LEASE = MEMORY = 3600.0
#: Few, so that they meet often.
SENDERS = 3

FIELDS = ["id", "gen", "state", "nonce", "payload", "if_held"]

T = TypeVar("T")
lost = st.booleans()
steps = st.sampled_from([1, 1, 1_000_000])
payloads = st.sampled_from(["", "one", "two"])
wishes = st.sampled_from(IfHeld)
#: Of the first message of a task: another one may have been replaced by it.
firsts = st.sampled_from([0, 0, 1_000_000])


@dataclass
class Record:
    """What a lock knows of its holder."""

    id: str
    gen: int
    state: str
    nonce: str
    payload: str
    if_held: str = ""


class Model:
    """The lock as DESIGN has it, with no server, no time and no other process."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.behind: Record | None = None  # the one call that waits for the end of a run
        self.in_turn = ""  # the one message that waits and runs by itself
        self.turn_is_first, self.turn_gen = False, 0
        self.done: set[tuple[str, int]] = set()
        self.replaced: set[str] = set()

    def acquire(self, ref: Ref, *, may_be_resent: bool, payload: str, if_held: IfHeld) -> Verdict:
        if may_be_resent and ((ref.task_id, ref.generation) in self.done or ref.task_id in self.replaced):
            return Verdict.DONE
        if self.record and self.record.id == ref.task_id:
            return Verdict.ACQUIRED if self.record.state == "queued" else Verdict.RUNNING
        other, place = self.in_turn if self.in_turn != ref.task_id else "", self.behind
        if self.behind and self.behind.id == ref.task_id:
            if if_held is not IfHeld.REPLACE or other or (self.record and self.record.state == "running"):
                self.behind.if_held = if_held
                return Verdict.WAITING
            self.behind = None
        if if_held is IfHeld.LEAVE and (self.record or self.behind or other):
            return Verdict.HELD
        last = self.behind or self.record
        if if_held is IfHeld.JOIN and last and last.state == "queued" and (last.if_held or not payload):
            last.payload = payload
            return Verdict.HELD
        if if_held is IfHeld.REPLACE:
            if self.behind:
                self.replaced.add(self.behind.id)
                self.behind = None
            if self.record and self.record.state == "queued":
                self.replaced.add(self.record.id)
                self.record = None
        call = Record(ref.task_id, ref.generation, "queued", "", "", if_held)
        replaces_first = place is not None and not self.turn_is_first
        self.in_turn = other
        if self.record is None and not other:
            self.record = call
            return Verdict.ACQUIRED
        self.behind, self.turn_is_first = call, bool(other) and not replaces_first
        return Verdict.WAITING

    def wait(self, ref: Ref) -> None:
        if (self.behind and self.behind.id == ref.task_id) or self.in_turn not in {"", ref.task_id}:
            return
        if not self.in_turn:
            self.turn_is_first = self.behind is None
        self.in_turn, self.turn_gen = ref.task_id, ref.generation

    def begin(self, ref: Ref, *, waits: bool) -> Verdict:
        if (ref.task_id, ref.generation) in self.done:
            return Verdict.DONE
        if ref.task_id in self.replaced:
            return Verdict.REPLACED
        payload, if_held = "", self.record.if_held if self.record else ""
        if held := self.record:
            if held.id != ref.task_id:
                if waits:
                    self.wait(ref)
                return Verdict.HELD
            if held.gen > ref.generation:
                return Verdict.STALE
            if held.gen == ref.generation and held.state == "running":
                return Verdict.STARTED if held.nonce == ref.nonce else Verdict.COPY
            if held.gen < ref.generation:
                self.done.add((held.id, held.gen))
            else:
                payload = held.payload
        elif self.behind:
            is_in_turn, is_behind = self.in_turn == ref.task_id, self.behind.id == ref.task_id
            if not is_behind and self.behind.if_held and not (is_in_turn and self.turn_is_first):
                if waits:
                    self.wait(ref)
                return Verdict.HELD
            if self.in_turn and not is_in_turn and (self.turn_is_first if is_behind else not waits):
                return Verdict.HELD
        elif self.in_turn and self.in_turn != ref.task_id and not waits:
            return Verdict.HELD
        if self.behind and self.behind.id == ref.task_id:
            payload, if_held = self.behind.payload or payload, self.behind.if_held
            self.behind = None
        if self.in_turn == ref.task_id:
            self.in_turn = ""
        self.record = Record(ref.task_id, ref.generation, "running", ref.nonce, payload, if_held)
        return Verdict.STARTED

    def rotate(self, ref: Ref, to: Ref) -> bool:
        held = self.record
        if not held or (held.id, held.nonce) != (ref.task_id, ref.nonce):
            return bool(held) and (held.id, held.gen, held.nonce) == (ref.task_id, to.generation, "")
        if to.generation > held.gen:
            self.done.add((held.id, held.gen))
        payload = held.payload if to.generation == held.gen else ""
        self.record = Record(held.id, to.generation, "queued", "", payload, held.if_held)
        return True

    def renew(self, ref: Ref) -> Renewal:
        if (ref.task_id, ref.generation) in self.done:
            return Renewal.OVER
        if not self._is_of(ref):
            return Renewal.LOST
        return Renewal(self.record.state)

    def finish(self, ref: Ref) -> None:
        if ref.key == BEHIND:
            if self.behind and self.behind.id == ref.task_id:
                self.behind = None
            return
        if self.in_turn == ref.task_id and self.turn_gen <= ref.generation:
            self.in_turn = ""
        if self._is_of(ref):
            freed, self.record = self.record, None
            if freed.state == "running":
                self.done.add((freed.id, freed.gen))

    def _is_of(self, ref: Ref) -> bool:
        held = self.record
        if not held or (held.id, held.gen) != (ref.task_id, ref.generation):
            return False
        return held.state == "queued" or held.nonce == ref.nonce


class LockMachine(RuleBasedStateMachine):
    """Many senders and workers around one lock.

    Beside the model it keeps a history of its own, so that model and scripts cannot be wrong together about the
    promises: who runs with the lock, what is over, the last fence.
    """

    redis: Redis
    backend: RedisBackend

    tasks = Bundle("tasks")  #: the senders' claims
    messages = Bundle("messages")  #: what the broker may deliver: never, or as often as it likes
    deliveries = Bundle("deliveries")  #: what workers have got, each with a nonce of its own

    def __init__(self) -> None:
        super().__init__()
        self.redis.delete(LOCK, BEHIND, TURN, done_key(LOCK))
        self.model = Model()
        self.senders = 0
        self.runs = 0
        self.runner: Ref | None = None  # the run that holds the lock
        self.over: set[tuple[str, int]] = set()  # generations that ended, or handed over
        self.replaced: set[str] = set()  # tasks that lost their place while they waited
        self.fence = 0

    def ask(self, lost: bool, verb: Callable[[], T], model: Callable[[], T]) -> T:
        """Ask both; if the reply is lost, the server has done it, and the caller asks again."""
        for _ in range(1 + lost):
            reply = verb()
            assert reply == model()
        return reply

    # ------------------------------------------------ senders

    def acquire(
        self, ref: Ref, lost: bool, *, may_be_resent: bool, payload: str = "", if_held: IfHeld = IfHeld.LEAVE
    ) -> Verdict:
        call = Call(ref, "app.task", "", TTL, payload=payload, if_held=if_held)
        return self.ask(
            lost,
            lambda: self.backend.acquire_many([call], may_be_resent=may_be_resent)[0].verdict,
            lambda: self.model.acquire(ref, may_be_resent=may_be_resent, payload=payload, if_held=if_held),
        )

    @precondition(lambda self: self.senders < SENDERS)
    @rule(targets=(tasks, messages), lost=lost, payload=payloads, if_held=wishes, generation=firsts)
    def call(self, lost, payload, if_held, generation):
        self.senders += 1
        ref = Ref(LOCK, f"task {self.senders}", generation)
        lock, place, runs = self.stored(), self.stored(BEHIND), self.runner is not None
        verdict = self.acquire(ref, lost, may_be_resent=False, payload=payload, if_held=if_held)
        if if_held is IfHeld.REPLACE:
            self.replaced |= {lock.id} if lock and not runs else set()
            self.replaced |= {place.id} if place else set()
            assert verdict is Verdict.ACQUIRED or runs or self.model.in_turn
        elif lock or place:  # no newer call overtakes the one that waits
            assert verdict is not Verdict.ACQUIRED
        if lock is None and place is None and not self.model.in_turn:
            assert verdict is Verdict.ACQUIRED
        if verdict is Verdict.HELD and if_held is IfHeld.JOIN:
            assert payload in {record.payload for record in (self.stored(), self.stored(BEHIND)) if record}
        return ref  # even if the lock is held: a call that a caller waits for is sent in any case

    @rule(ref=tasks, lost=lost, if_held=wishes)
    def call_again(self, ref, lost, if_held):
        verdict = self.acquire(ref, lost, may_be_resent=True, if_held=if_held)
        if if_held is IfHeld.REPLACE and verdict in {Verdict.ACQUIRED, Verdict.WAITING}:
            self.replaced = set(self.model.replaced)  # held against the promises when a replaced one tries to start
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

    @rule(ref=deliveries, lost=lost, waits=st.booleans())
    def begin(self, ref, lost, waits=False):
        known = self.runner

        def verb() -> Verdict:
            before = self.stored()
            options = {"lease": LEASE, "remember_for": MEMORY, "task": "app.task", "arguments": ""}
            place = self.stored(BEHIND)
            holder = self.backend.begin(ref, queued=BEHIND, turn_ttl=60 * waits, **options)
            if (
                before is None
                and place is not None
                and place.if_held
                and place.id != ref.task_id
                and self.model.in_turn != ref.task_id
            ):
                assert holder.verdict is not Verdict.STARTED
            assert holder.payload == (self.stored().payload if holder.verdict is Verdict.STARTED else "")
            if holder.verdict is Verdict.STARTED:
                self.starts(ref, holder.fence, before)
            return holder.verdict

        verdict = self.ask(lost, verb, lambda: self.model.begin(ref, waits=waits))
        if verdict is Verdict.COPY:
            assert known is not None
            assert (known.task_id, known.generation) == (ref.task_id, ref.generation)

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
        renewal = self.ask(lost, lambda: self.backend.renew_many([ref], lease=LEASE)[0], lambda: self.model.renew(ref))
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
        before = self.stored()
        self.ask(lost, lambda: self.backend.finish_many([ref], remember_for=MEMORY), lambda: self.model.finish(ref))
        if ref.key == BEHIND:
            assert self.stored() == before
            return
        if before is not None and (before.id, before.gen) != (ref.task_id, ref.generation):
            assert self.stored() == before
        if self.runner is not None:
            if ref == self.runner:
                self.over.add((ref.task_id, ref.generation))
                self.runner = None
            else:
                assert self.stored() == before

    def hand_over(self, ref: Ref, to: Ref, lost: bool) -> None:
        held = ref == self.runner
        rotated = self.ask(
            lost,
            lambda: self.backend.rotate(ref, to=to, ttl=TTL, remember_for=MEMORY),
            lambda: self.model.rotate(ref, to),
        )
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

    @rule()
    def lease_ends(self):
        self.redis.delete(LOCK)
        self.model.record = None
        self.runner = None

    @rule()
    def the_place_behind_ends(self):
        self.redis.delete(BEHIND)
        self.model.behind = None

    @rule()
    def the_turn_ends(self):
        self.redis.delete(TURN)
        self.model.in_turn = ""

    # ------------------------------------------------ what always holds

    def stored(self, key: str = LOCK) -> Record | None:
        return record_of(self.redis.hmget(key, FIELDS))

    @invariant()
    def the_promises_are_kept(self):
        with self.redis.pipeline() as pipe:
            pipe.hmget(LOCK, FIELDS).hmget(BEHIND, FIELDS).hget(TURN, "id").zrange(done_key(LOCK), 0, -1)
            pipe.ttl(LOCK).ttl(BEHIND).ttl(TURN).ttl(done_key(LOCK))
            fields, waiting, in_turn, done, *lifetimes = pipe.execute()
        record = record_of(fields)
        assert record == self.model.record
        assert record_of(waiting) == self.model.behind
        assert (in_turn or "") == self.model.in_turn
        if self.runner is None:
            assert record is None or record.state == "queued"
        else:
            run = (self.runner.task_id, self.runner.generation, "running", self.runner.nonce)
            assert astuple(record)[:4] == run
        ends = {(id_, end) for id_, _, end in (member.rpartition(":") for member in done)}
        replaced = {id_ for id_, end in ends if end == "replaced"}
        assert replaced == self.model.replaced == self.replaced
        assert {(id_, int(end)) for id_, end in ends if end != "replaced"} == self.model.done == self.over
        assert -1 not in lifetimes  # everything ends by itself


def record_of(fields: list[str | None]) -> Record | None:
    id_, gen, state, nonce, payload, if_held = fields
    return Record(id_, int(gen), state, nonce, payload or "", if_held or "") if id_ else None


def test_a_lock_keeps_its_promises_under_any_history(server, redis):
    machine = type("Machine", (LockMachine,), {"redis": redis, "backend": RedisBackend(server.url)})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=30,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
