"""Every lock backend of ours gives the same answers: the one in Redis, and the one in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from redis import Redis

from singlebeat.locks.base import BaseBackend, Call, Holder, IfHeld, Ref, Renewal, Verdict
from singlebeat.locks.key import behind_key, lock_key, turn_key
from singlebeat.locks.memory import MemoryBackend
from singlebeat.locks.redis import RedisBackend
from tests.both_backends import BothBackends
from tests.support import RedisServer, measured, wait_until

PREFIX = "LOCK_"
LOCKS = lock_key(PREFIX, "one"), lock_key(PREFIX, "two")
MEMORY = 3600.0
#: Far apart, so that it shows in what is left which of them was used, and long, so that none ends.
QUEUED_TTL, LEASE, PROMISED_TTL, EXPIRIES = 10_000.0, 1_000.0, 4_000.0, (None, 2_000.0, 20_000.0)

Answers = Callable[[BaseBackend], Any]


class Ask:
    """One verb with its arguments, for any backend."""

    def __init__(self, verb: str, ask: Answers, *about: Any) -> None:
        self.verb, self.ask, self.about = verb, ask, about

    def __repr__(self) -> str:
        return f"{self.verb}{self.about}"


# Few of each, so that they meet often.
locks = st.sampled_from([LOCKS[0], *LOCKS])
ids = st.sampled_from(["a", "a", "b"])
generations = st.sampled_from([0, 0, 0.001, 1, 2])
runs = st.builds(Ref, locks, ids, generations, st.sampled_from(["n1", "n1", "n2"]))
messages = st.builds(Ref, locks, ids, generations)
anybody = runs | messages
payloads = st.sampled_from(["", "one", "one", "two"])
expiries = st.sampled_from(EXPIRIES)


def entry_of(ref: Ref) -> str:
    """Return the entry that has sent a message: a program has sent those of "b"."""
    return "" if ref.task_id == "b" else f"of {ref.task_id}"


@st.composite
def acquire(draw: st.DrawFn) -> Ask:
    calls = draw(
        st.lists(
            st.builds(
                Call,
                messages,
                st.just("app.task"),
                st.just("1, x=2"),
                st.just(QUEUED_TTL),
                expiries,
                payloads,
                st.sampled_from([IfHeld.LEAVE, *IfHeld]),
                state=st.sampled_from(["queued", "queued", "queued", "timed"]),
            ).map(lambda call: replace(call, entry=entry_of(call.ref))),
            min_size=1,
            max_size=2,
        )
    )
    may_be_resent = draw(st.booleans())
    return Ask("acquire", lambda b: b.acquire_many(calls, may_be_resent=may_be_resent), calls, may_be_resent)


@st.composite
def begin(draw: st.DrawFn) -> Ask:
    ref, expiry, waits, waited = draw(runs), draw(expiries), draw(st.booleans()), draw(st.booleans())
    options = {"lease": LEASE, "remember_for": MEMORY, "task": "app.task", "arguments": "1, x=2", "expiry": expiry}
    options["entry"], options["overtakes"], options["yields"] = entry_of(ref), draw(st.booleans()), draw(st.booleans())
    queued, options["turn_ttl"] = behind_key(ref.key) if waited else ref.key, LEASE * waits
    since = options["waits_since"] = draw(st.sampled_from([0.0, 0.0, 1.0, 2.0]))
    return Ask("begin", lambda b: b.begin(ref, queued=queued, **options), ref, queued, waits, expiry, since)


@st.composite
def rotate(draw: st.DrawFn) -> Ask:
    ref, generation = draw(anybody), draw(generations)
    to = Ref(ref.key, ref.task_id, generation)
    return Ask("rotate", lambda b: b.rotate(ref, to=to, ttl=PROMISED_TTL, remember_for=MEMORY), ref, to)


@st.composite
def promise(draw: st.DrawFn) -> Ask:
    run, generation = draw(runs), draw(st.sampled_from([None, 1, 1, 2]))
    to = None if generation is None else Ref(run.key, run.task_id, generation)
    return Ask("promise", lambda b: b.promise(run, to=to, ttl=PROMISED_TTL), run, to)


@st.composite
def renew(draw: st.DrawFn) -> Ask:
    refs, lease = draw(st.lists(anybody, min_size=1, max_size=2)), draw(st.sampled_from([LEASE, LEASE, 0.0]))
    return Ask("renew", lambda b: b.renew_many(refs, lease=lease), refs, lease)


#: What is known of a run that is over.
endings = st.sampled_from([{}, {"ran": True}, {"took": True}, {"took": True, "unsent": True}])


@st.composite
def finish(draw: st.DrawFn) -> Ask:
    refs, how = draw(st.lists(anybody, min_size=1, max_size=2)), draw(endings)
    return Ask("finish", lambda b: b.finish_many(refs, remember_for=MEMORY, **how), refs, how)


@st.composite
def by_user(draw: st.DrawFn) -> Ask:
    lock, task_id, expiry = draw(locks), draw(ids), draw(expiries)
    verbs: dict[str, Answers] = {
        "lock": lambda b: b.lock(lock, task_id, expiry),
        "unlock": lambda b: b.unlock(lock),
        "clear": lambda b: b.clear(lock),
    }
    verb = draw(st.sampled_from(["lock", "lock", "unlock", "clear"]))
    return Ask(verb, verbs[verb], lock, task_id, expiry)


@st.composite
def life(draw: st.DrawFn) -> list[Ask]:
    """What one delivery does, and a copy of it: verbs that pick their runs by themselves seldom meet."""
    run, generation, how, last = draw(runs), draw(generations), draw(endings), draw(endings)
    copy, to = replace(run, nonce="n3"), Ref(run.key, run.task_id, generation)
    options = {"lease": LEASE, "remember_for": MEMORY, "task": "app.task", "arguments": ""}
    steps = [
        Ask("begin", lambda b: b.begin(run, **options), run),
        Ask("promise", lambda b: b.promise(run, to=to, ttl=PROMISED_TTL), run, to),
        Ask("finish", lambda b: b.finish_many([copy], remember_for=MEMORY, **how), copy, how),
        Ask("renew", lambda b: b.renew_many([run], lease=LEASE), run),
        Ask("finish", lambda b: b.finish_many([run], remember_for=MEMORY, **last), run, last),
        Ask("begin", lambda b: b.begin(copy, **options), copy),
        Ask("finish", lambda b: b.finish_many([run], remember_for=MEMORY, ran=True), run),
        Ask("begin", lambda b: b.begin(copy, **options), copy),
    ]
    return [step for step in steps if draw(st.sampled_from([True, True, True, False]))]


@st.composite
def displaced(draw: st.DrawFn) -> list[Ask]:
    """A call loses its lock to another before it starts, and starts none the less."""
    lock, generation = draw(locks), draw(st.sampled_from([0, 0, 0, 1]))

    def taken(task_id: str, if_held: IfHeld) -> Ask:
        call = Call(Ref(lock, task_id), "app.task", "1, x=2", QUEUED_TTL, None, "", if_held)
        return Ask("acquire", lambda b: b.acquire_many([call]), call)

    run = Ref(lock, "a", generation, "n1")
    options = {"lease": LEASE, "remember_for": MEMORY, "task": "app.task", "arguments": ""}
    begun = Ask("begin", lambda b: b.begin(run, **options), run)
    return [Ask("unlock", lambda b: b.unlock(lock), lock), taken("a", IfHeld.LEAVE), taken("b", IfHeld.REPLACE), begun]


@st.composite
def crowded(draw: st.DrawFn) -> list[Ask]:
    """Calls with other arguments come during a run, and often a message waits for it already."""
    lock = draw(locks)
    options = {"lease": LEASE, "remember_for": MEMORY, "task": "app.task", "arguments": ""}
    run, waiter = Ref(lock, "a", 0, "n1"), Ref(lock, "b", 0, "n2")

    def called() -> Ask:
        ref, if_held = Ref(lock, draw(st.sampled_from("cd"))), draw(st.sampled_from([IfHeld.JOIN, *IfHeld]))
        call = Call(ref, "app.task", "1, x=2", QUEUED_TTL, None, draw(payloads), if_held)
        return Ask("acquire", lambda b: b.acquire_many([call]), call)

    freed = Ask("unlock", lambda b: b.unlock(lock), lock)
    begun = Ask("begin", lambda b: b.begin(run, **options), run)
    waits = Ask("begin", lambda b: b.begin(waiter, turn_ttl=LEASE, **options), waiter)
    steps = [waits, called(), called(), called(), freed, called()]
    return [freed, begun, *(step for step in steps if draw(st.sampled_from([True, True, False])))]


#: Those that are here several times lead on; the others mostly find what those have left.
verbs = st.one_of(acquire(), acquire(), begin(), begin(), begin(), rotate(), promise(), renew(), finish(), by_user())
mixed = st.lists(verbs, min_size=4, max_size=10)
episodes = st.one_of(mixed, mixed, life(), life(), displaced(), crowded())
histories = st.lists(episodes, min_size=3, max_size=6).map(lambda parts: [ask for part in parts for ask in part])


def held(backend: BaseBackend) -> Any:
    """Return all locks, in one order, with what people see of their holders."""
    found = {key: [record[name] for name in ("id", "state", "task", "args")] for key, record in backend.locks(PREFIX)}
    return {key: (backend.get(key), record) for key, record in sorted(found.items())}


def kinds(verb: str, answer: Any) -> list[str]:
    """Name what an answer was, to see that the histories have met everything."""
    if isinstance(answer, list):
        return [kind for one in answer for kind in kinds(verb, one)]
    return [f"{verb}: {answer.verdict if isinstance(answer, Holder) else answer}"]


@pytest.mark.timeout(600)  # of which it needs ten, unless it has found something and looks for less of it
def test_redis_and_memory_give_the_same_answers_to_any_history(server: RedisServer, redis: Redis) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    @given(history=histories)
    def agree(history: list[Ask]) -> None:
        redis.flushdb()
        both = BothBackends(server.url)
        for asked in history:
            note(repr(asked))
            seen.update(kinds(asked.verb, both.ask(asked.ask)))
        for lock in LOCKS:
            both.stored(lock)
        # No call has this id, so this only shows their fences and lifetimes.
        calls = [Call(Ref(key, "nobody"), "", "", 1) for key in both.ask(held)]
        both.ask(lambda b: b.acquire_many(calls))

    expected = {f"acquire: {verdict}" for verdict in ("acquired", "waiting", "running", "done", "held")}
    expected |= {f"begin: {verdict}" for verdict in ("started", "stale", "done", "replaced", "held")}
    expected |= {"renew: running", "renew: over", "renew: lost", "promise: True", "lock: True"}
    for _ in range(3):  # one round is nearly always enough
        agree()
        if expected <= set(seen):
            break

    measured(", ".join(f"{kind} {count}" for kind, count in sorted(seen.items())))
    assert expected <= set(seen), "the histories do not meet everything: compare more of them"


# ---------------------------------------------------------------- what ends by itself

LOCK = lock_key(PREFIX, "one")
TINY = 0.05


@pytest.fixture(params=["redis", "memory"])
def backend(request: pytest.FixtureRequest, server: RedisServer, redis: Redis) -> BaseBackend:
    return RedisBackend(server.url) if request.param == "redis" else MemoryBackend()


def free(backend: BaseBackend, lock: str = LOCK) -> None:
    wait_until(lambda: backend.get(lock) is None, what="the end of the lock")


def take(
    backend: BaseBackend, task_id: str = "a", *, ttl: float = QUEUED_TTL, may_be_resent: bool = False, **options: Any
) -> Holder:
    return backend.acquire_many(
        [Call(Ref(LOCK, task_id), "app.task", "", ttl, **options)], may_be_resent=may_be_resent
    )[0]


def start(backend: BaseBackend, ref: Ref, *, lease: float = LEASE, **options: Any) -> Holder:
    return backend.begin(ref, lease=lease, remember_for=MEMORY, task="app.task", arguments="", **options)


RUN = Ref(LOCK, "a", nonce="n1")


def test_a_message_that_waits_too_long_loses_its_lock(backend):
    take(backend, ttl=TINY)
    free(backend)

    assert take(backend, "b").verdict is Verdict.ACQUIRED
    assert start(backend, RUN).verdict is Verdict.HELD


B = Ref(LOCK, "b", nonce="n2")


def take_after_the_end_of_a(backend: BaseBackend, **options: Any) -> None:
    """Let "b" acquire the lock, which "a" has acquired before, and which has ended while the message of "a" waits."""
    take(backend, ttl=TINY)
    free(backend)
    assert take(backend, "b", **options).verdict is Verdict.ACQUIRED


def test_a_message_whose_lock_has_ended_starts_before_a_newer_call(backend):
    """Else in a queue that is longer than the lock lasts, each message would be dropped for a newer call."""
    take_after_the_end_of_a(backend, expiry=QUEUED_TTL)

    first, again = (start(backend, RUN, overtakes=True) for _ in range(2))

    assert first.verdict is again.verdict is Verdict.STARTED
    assert first.fence == again.fence > 0
    assert backend.renew_many([RUN], lease=LEASE) == [Renewal.RUNNING]
    assert start(backend, B, overtakes=True).verdict is Verdict.HELD
    backend.finish_many([RUN], remember_for=MEMORY)
    assert start(backend, B, overtakes=True).verdict is Verdict.STARTED


@pytest.mark.parametrize("had_turn", [False, True])
def test_a_message_that_gives_way_to_the_call_behind_keeps_no_turn(backend, had_turn):
    start(backend, RUN)
    asks = {"turn_ttl": LEASE, "yields": True}
    if had_turn:
        assert start(backend, B, **asks).held_for
    assert take(backend, "c", if_held=IfHeld.REPLACE).verdict is Verdict.WAITING

    held = start(backend, B, **asks)

    assert (held.verdict, held.has_heir, held.held_for) == (Verdict.HELD, True, 0.0)
    assert backend.get(turn_key(LOCK)) is None
    backend.finish_many([RUN], remember_for=MEMORY)
    assert start(backend, Ref(LOCK, "c", nonce="n2"), queued=behind_key(LOCK)).verdict is Verdict.STARTED


@pytest.mark.parametrize("case", ["has other arguments", "runs", "retries", "is timed", "is not to"])
def test_a_message_whose_lock_has_ended_leaves_other_holders_alone(backend, case):
    """A newer call that others have joined, or that has started before."""
    options = {"is timed": {"state": "timed"}, "has other arguments": {"payload": "two", "if_held": IfHeld.JOIN}}
    take_after_the_end_of_a(backend, **options.get(case, {}))
    if case == "has other arguments":
        take(backend, "c", payload="three", if_held=IfHeld.JOIN)
    if case in {"runs", "retries"}:
        start(backend, B)
    if case == "retries":
        backend.rotate(B, to=Ref(LOCK, "b", 1), ttl=QUEUED_TTL, remember_for=MEMORY)

    assert start(backend, RUN, overtakes=case != "is not to").verdict is Verdict.HELD
    assert backend.get(LOCK) == "b"


def test_a_run_that_is_not_renewed_loses_its_lock_to_the_next_call(backend):
    start(backend, RUN, lease=TINY)
    free(backend)

    assert backend.renew_many([RUN], lease=LEASE) == [Renewal.LOST]
    assert backend.get(LOCK) is None
    assert take(backend, "b").verdict is Verdict.ACQUIRED
    backend.finish_many([RUN], remember_for=MEMORY)
    assert backend.get(LOCK) == "b"


def test_a_copy_goes_on_when_the_lease_of_its_run_has_ended(backend):
    before = start(backend, RUN, lease=TINY)
    free(backend)

    copy = start(backend, Ref(LOCK, "a", nonce="n2"))

    assert copy.verdict is Verdict.STARTED
    assert copy.fence > before.fence


@pytest.mark.parametrize("by", ["call", "start"])
def test_no_renewal_and_no_hand_over_goes_past_the_expiry(backend, by):
    if by == "call":
        take(backend, expiry=TINY)
    start(backend, RUN, expiry=TINY)
    backend.renew_many([RUN], lease=LEASE)
    backend.rotate(RUN, to=Ref(LOCK, "a", 1), ttl=QUEUED_TTL, remember_for=MEMORY)

    free(backend)


def test_a_lock_that_was_promised_ends_when_its_retry_has_waited_too_long(backend):
    start(backend, RUN)
    backend.promise(RUN, to=Ref(LOCK, "a", 1), ttl=TINY)
    backend.finish_many([RUN], remember_for=MEMORY)

    free(backend)


def test_a_lock_that_was_promised_to_a_revoked_retry_is_free_after_its_run(backend):
    start(backend, RUN)
    backend.promise(RUN, to=Ref(LOCK, "a", 1), ttl=QUEUED_TTL)

    backend.finish_many([Ref(LOCK, "a", 1, "n2")], remember_for=MEMORY)

    assert backend.renew_many([RUN], lease=LEASE) == [Renewal.RUNNING]
    backend.finish_many([RUN], remember_for=MEMORY)
    assert take(backend, "b").verdict is Verdict.ACQUIRED


def test_the_end_of_a_run_is_forgotten_after_its_time(backend):
    start(backend, RUN)
    backend.finish_many([RUN], remember_for=TINY)

    def forgotten() -> bool:
        return take(backend, may_be_resent=True).verdict is Verdict.ACQUIRED

    wait_until(forgotten, what="a new call under the old id")


def test_a_worker_is_not_seen_any_more_after_its_time(backend):
    assert not backend.workers_seen()
    backend.announce("host:1", ttl=MEMORY)
    assert backend.workers_seen()
    backend.announce("host:1", ttl=TINY)
    wait_until(lambda: not backend.workers_seen(), what="the end of the announcement")


# ---------------------------------------------------------------- what histories seldom meet


def test_a_call_takes_the_place_of_a_waiting_call_that_it_cannot_join(backend):
    """As behind a run: the answer does not depend on whether the run has just ended."""
    start(backend, Ref(LOCK, "run", nonce="n1"))
    take(backend, "a", payload="one", if_held=IfHeld.JOIN)
    take(backend, "a", may_be_resent=True)  # from now on it keeps its own arguments
    backend.unlock(LOCK)

    assert take(backend, "b", payload="two", if_held=IfHeld.JOIN).verdict is Verdict.WAITING
    assert backend.get(LOCK) is None
    assert backend.get(behind_key(LOCK)) == "b"


def test_a_call_with_the_same_arguments_undoes_those_of_a_joined_call(backend):
    take(backend, "a", if_held=IfHeld.JOIN)
    take(backend, "b", payload="one", if_held=IfHeld.JOIN)
    take(backend, "c", if_held=IfHeld.JOIN)

    assert start(backend, RUN).payload == ""


@pytest.mark.parametrize("waits", [False, True])
def test_a_joined_call_lasts_as_long_as_its_message_was_last_given(backend, waits):
    if waits:
        start(backend, Ref(LOCK, "run", nonce="n1"))
    take(backend, "a", expiry=LEASE, if_held=IfHeld.JOIN)
    take(backend, "a", ttl=2 * QUEUED_TTL, if_held=IfHeld.JOIN)

    joined = take(backend, "b", payload="one", if_held=IfHeld.JOIN)

    assert joined.ttl > QUEUED_TTL


@pytest.mark.parametrize("promised", [False, True])
def test_arguments_that_join_a_retry_outlast_the_expiry_of_its_lock(backend, promised):
    take(backend, "a", if_held=IfHeld.JOIN)
    start(backend, RUN, expiry=LEASE)
    retry = Ref(LOCK, "a", 1)
    if promised:
        backend.promise(RUN, to=retry, ttl=QUEUED_TTL)
        backend.finish_many([RUN], remember_for=MEMORY)
    else:
        backend.rotate(RUN, to=retry, ttl=QUEUED_TTL, remember_for=MEMORY)
    assert take(backend, "b").ttl <= LEASE

    joined = take(backend, "b", payload="one", if_held=IfHeld.JOIN)

    assert joined.ttl > QUEUED_TTL / 2
    assert start(backend, retry, expiry=LEASE).payload == "one"


def test_of_two_messages_that_wait_the_older_one_goes_first(backend):
    older, newer, never = (Ref(LOCK, id_, nonce="n") for id_ in ("older", "newer", "never"))
    start(backend, RUN)
    first = start(backend, newer, turn_ttl=LEASE)
    since = first.waits_since - 60

    met = start(backend, older, turn_ttl=LEASE, waits_since=since)

    assert (met.waits_since, met.held_for > 0) == (since, True), "it has the turn"
    assert start(backend, newer, turn_ttl=LEASE, waits_since=first.waits_since).held_for == 0, "it has lost the turn"
    backend.finish_many([RUN], remember_for=MEMORY)
    assert start(backend, newer, turn_ttl=LEASE, waits_since=first.waits_since).task_id == "older"
    assert start(backend, never, turn_ttl=LEASE).task_id == "older"
    assert start(backend, older, turn_ttl=LEASE, waits_since=since).verdict is Verdict.STARTED


def test_an_older_message_starts_in_the_turn_of_a_newer_one(backend):
    older, newer = Ref(LOCK, "older", nonce="n"), Ref(LOCK, "newer", nonce="n")
    start(backend, RUN)
    start(backend, newer, turn_ttl=LEASE, waits_since=2.0)
    backend.finish_many([RUN], remember_for=MEMORY)

    assert start(backend, older, turn_ttl=LEASE, waits_since=1.0).verdict is Verdict.STARTED


def test_the_late_end_of_a_run_leaves_the_turn_to_its_retry(backend):
    start(backend, Ref(LOCK, "b", nonce="n2"))
    start(backend, Ref(LOCK, "a", 1), turn_ttl=LEASE)

    backend.finish_many([RUN], remember_for=MEMORY)

    assert backend.get(turn_key(LOCK)) == "a"


# ---------------------------------------------------------------- celery-singleton's four methods


def test_user_code_locks_and_unlocks_as_with_celery_singleton(backend):
    assert backend.lock(LOCK, "a") is True
    assert backend.lock(LOCK, "b") is False
    backend.unlock(LOCK, "b")  # which does not hold it
    assert backend.get(LOCK) == "a"
    backend.unlock(LOCK, "a")
    assert backend.get(LOCK) is None
    assert backend.lock(LOCK, "a") is True
    backend.unlock(LOCK)
    assert backend.get(LOCK) is None
    assert backend.lock(LOCK, "b", 60) is True
    backend.clear(PREFIX)
    assert backend.get(LOCK) is None


def test_a_lock_of_user_code_is_reentrant_for_its_id_even_while_running(backend):
    assert backend.lock(LOCK, "a")
    assert backend.lock(LOCK, "a")
    start(backend, RUN)
    assert backend.lock(LOCK, "a")


def test_a_lock_of_user_code_ends_at_its_expiry_or_else_by_unlock(backend):
    other = lock_key(PREFIX, "two")
    backend.lock(LOCK, "a", expiry=TINY)
    backend.lock(other, "a")

    free(backend)

    held = backend.acquire_many([Call(Ref(other, "b"), "", "", 1)])[0]
    assert held.ttl > 365 * 86_400


def test_a_call_joins_the_waiting_call_of_any_state(backend):
    start(backend, RUN)
    assert take(backend, "b", if_held=IfHeld.JOIN, state="timed").verdict is Verdict.WAITING

    holder = take(backend, "c", if_held=IfHeld.JOIN, state="timed")
    assert (holder.verdict, holder.task_id) == (Verdict.HELD, "b")
