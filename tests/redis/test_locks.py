"""The locks in Redis: every verb, every verdict, and what each of them must leave alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule
from redis import Redis
from redis.exceptions import ReadOnlyError

from singlebeat import Schedule
from singlebeat.errors import LockBackendError, UnusableLockError
from singlebeat.locks.base import Call, Holder, IfHeld, Ref, Renewal, Ticket, Verdict
from singlebeat.locks.key import behind_key, done_key, lock_key, turn_key
from singlebeat.locks.memory import MemoryBackend
from singlebeat.locks.redis import NAMED_FOR, SCRIPTS, WORKERS_KEY, RedisBackend
from singlebeat.lua import packed
from singlebeat.tasks.renewer import ANNOUNCED_FOR
from tests.benchmarks import wire
from tests.support import RedisServer, contents, free_port, wait_until, without
from tests.system.apps import make_app

PREFIX = "SINGLETONLOCK_"
LOCK = lock_key(PREFIX, "d1")
DONE = done_key(LOCK)
QUEUED_TTL, LEASE, MEMORY = 600.0, 300.0, 900.0
#: What a slow machine may take between the setting of a lifetime and our look at it.
SLACK = 60.0

A, B = Ref(LOCK, "a"), Ref(LOCK, "b")
RUN, COPY = Ref(LOCK, "a", nonce="n1"), Ref(LOCK, "a", nonce="n2")


@pytest.fixture
def backend(server: RedisServer, redis: Redis) -> RedisBackend:
    return RedisBackend(server.url)


@pytest.fixture
def lives(redis: Redis) -> Callable[..., bool]:
    """Tells whether a key lives about so many seconds from now on, and never longer."""

    def lives(seconds: float, key: str = LOCK) -> bool:
        return seconds - SLACK < redis.pttl(key) / 1000 <= seconds

    return lives


def call(ref: Ref = A, *, ttl: float = QUEUED_TTL, **options) -> Call:
    return Call(ref, "app.task", "1, x=2", ttl, **options)


def acquire(backend: RedisBackend, ref: Ref = A, *, may_be_resent: bool = False, **options) -> Holder:
    return backend.acquire_many([call(ref, **options)], may_be_resent=may_be_resent)[0]


def acquire_all(backend: RedisBackend, keys: Sequence[str]) -> None:
    backend.acquire_many([call(Ref(key, "a")) for key in keys])


def begin(backend: RedisBackend, ref: Ref = RUN, *, lease: float = LEASE, **options) -> Holder:
    return backend.begin(ref, lease=lease, remember_for=MEMORY, task="app.task", arguments="1, x=2", **options)


def rotate(backend: RedisBackend, ref: Ref, to: Ref, *, ttl: float = QUEUED_TTL) -> bool:
    return backend.rotate(ref, to=to, ttl=ttl, remember_for=MEMORY)


def renew(backend: RedisBackend, ref: Ref = RUN, *, lease: float = LEASE) -> Renewal:
    return backend.renew_many([ref], lease=lease)[0]


def finish(redis: Redis, ref: Ref = RUN, *, remember_for: float = MEMORY) -> str:
    """Call the script itself: the backend drops its verdict."""
    args = (round(remember_for * 1000), 0, 0, packed([(ref.task_id, str(ref.generation), ref.nonce)]))
    reply = SCRIPTS["finish"](redis, (ref.key, done_key(ref.key), turn_key(ref.key)), args)
    (verdict,) = json.loads(reply)
    return verdict


def later(ref: Ref, generation: int = 1, nonce: str = "") -> Ref:
    return replace(ref, generation=generation, nonce=nonce)


def just_now(moment: datetime | None) -> bool:
    return abs(datetime.now(UTC) - moment) < timedelta(seconds=SLACK)


# ---------------------------------------------------------------- keys of others


@pytest.mark.parametrize("beside", [False, True], ids=["the lock's", "the memory's"])
@pytest.mark.parametrize("may_be_resent", [False, True])
def test_a_key_that_holds_no_lock_spoils_no_other_lock(backend, redis, may_be_resent, beside):
    foreign = Ref(lock_key(PREFIX, "d2"), "b", nonce="n1")
    key = done_key(foreign.key) if beside else foreign.key
    redis.set(key, "somebody else's")

    acquired = backend.acquire_many([call(foreign), call(A)], may_be_resent=may_be_resent)
    with pytest.raises(LockBackendError, match=rf"the lock {re.escape(foreign.key)} is unusable: it must be a hash"):
        begin(backend, foreign)
    begin(backend, RUN)
    renewed = backend.renew_many([foreign, RUN], lease=LEASE)
    backend.finish_many([foreign, RUN], remember_for=MEMORY, ran=True)

    assert [holder.verdict for holder in acquired] == [Verdict.UNUSABLE, Verdict.ACQUIRED]
    assert renewed == [Renewal.LOST, Renewal.RUNNING]
    assert not redis.exists(LOCK)
    assert redis.keys(f"*{PREFIX}{{d2}}*") == [key]
    assert redis.get(key) == "somebody else's"


@pytest.mark.parametrize("place", [LOCK, behind_key(LOCK), turn_key(LOCK)], ids=["lock", "behind", "turn"])
@pytest.mark.parametrize("may_be_resent", [False, True])
def test_a_hash_of_other_data_is_no_free_lock(backend, redis, may_be_resent, place):
    """The key comes with the message: its author may not be allowed to write to the server of the locks."""
    redis.hset(place, mapping=(data := {"definition": "{}", "since": "1"}))

    (acquired,) = backend.acquire_many([call(RUN)], may_be_resent=may_be_resent)
    with pytest.raises(LockBackendError, match=r"a hash of other data.* Give the calls another key"):
        begin(backend, RUN, turn_ttl=LEASE)
    backend.finish_many([RUN], remember_for=MEMORY, took=True)

    assert acquired.verdict is Verdict.UNUSABLE
    assert redis.hgetall(place) == data
    assert redis.ttl(place) == -1


def test_a_run_frees_its_lock_though_its_end_cannot_be_remembered(backend, redis):
    acquire(backend)
    begin(backend, RUN)
    redis.set(done_key(LOCK), "somebody else's")

    assert renew(backend) is Renewal.RUNNING
    assert finish(redis) == "finished"
    assert redis.keys("*") == [done_key(LOCK)]


def test_a_right_that_is_missing_is_no_foreign_key(server, redis):
    missing = "can't run this command|no permissions to run"  # Redis 7.0, and later
    rights = ["+@all", "-zmscore", "-zremrangebyscore"]
    try:
        redis.acl_setuser("half", enabled=True, nopass=True, keys=["*"], commands=rights)
        backend = RedisBackend(server.url.replace("://", "://half:any@"), own_connections=True)

        for ask in (acquire, begin, lambda backend: backend.finish_many([RUN], remember_for=MEMORY, ran=True)):
            with pytest.raises(LockBackendError, match=missing) as error:
                ask(backend)
            assert not isinstance(error.value, UnusableLockError)
    finally:
        redis.acl_deluser("half")


def test_a_server_that_became_a_replica_says_so_at_every_verb(own_server):
    backend = RedisBackend(own_server.url, own_connections=True)
    begin(backend)
    free = Ref(lock_key(PREFIX, "d2"), "b", nonce="n1")
    with own_server.client() as client:
        client.replicaof("127.0.0.1", 1)
        client.config_set("replica-serve-stale-data", "yes")

        for verb in (
            lambda: acquire(backend, free),
            lambda: begin(backend, free),
            lambda: renew(backend),
            lambda: backend.finish_many([RUN], remember_for=MEMORY, ran=True),
            lambda: rotate(backend, RUN, later(A)),
        ):
            with pytest.raises(LockBackendError) as caught:
                verb()
            assert isinstance(caught.value.__cause__, ReadOnlyError)


# ---------------------------------------------------------------- acquire


def test_a_free_lock_is_acquired_and_queued_under_the_task_id(backend, redis, lives):
    holder = acquire(backend)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.ACQUIRED, "a", "queued")
    assert just_now(holder.since)
    assert lives(QUEUED_TTL)
    assert QUEUED_TTL - SLACK < holder.ttl <= QUEUED_TTL
    record = redis.hgetall(LOCK)
    since = record.pop("since")
    assert record == {
        "id": "a",
        "gen": "0",
        "state": "queued",
        "nonce": "",
        "task": "app.task",
        "args": "1, x=2",
        "entry": "",
        "payload": "",
        "if_held": "",
    }
    assert int(since) / 1000 == holder.since.timestamp()


def test_another_call_learns_the_holder_and_changes_nothing(backend, redis, lives):
    acquire(backend, payload="[1]")
    before = redis.hgetall(LOCK)

    holder = acquire(backend, B, ttl=QUEUED_TTL * 10, expiry=1.0, payload="[2]")

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.HELD, "a", "queued")
    assert just_now(holder.since)
    assert redis.hgetall(LOCK) == before
    assert lives(QUEUED_TTL)


def test_a_call_is_held_off_by_a_run_and_learns_its_fence(backend, redis):
    acquire(backend)
    run = begin(backend)

    holder = acquire(backend, B)

    assert (holder.verdict, holder.task_id, holder.state, holder.fence) == (Verdict.HELD, "a", "running", run.fence)
    assert redis.hget(LOCK, "id") == "a"


@pytest.mark.parametrize("may_be_resent", [False, True])
def test_a_repeated_publish_acquires_its_own_lock_again(backend, redis, lives, may_be_resent):
    acquire(backend, ttl=QUEUED_TTL / 2)
    before = redis.hgetall(LOCK)

    holder = acquire(backend, may_be_resent=may_be_resent)

    assert (holder.verdict, holder.task_id) == (Verdict.ACQUIRED, "a")
    assert redis.hgetall(LOCK) == before
    assert lives(QUEUED_TTL)


@pytest.mark.parametrize("times", [{"ttl": float("inf")}, {"ttl": 1e18}, {"expiry": float("inf")}, {"expiry": 1e18}])
def test_a_call_that_would_wait_for_ever_does_not_fail_those_beside_it(backend, times):
    replies = backend.acquire_many([call(A, **times), call(Ref(lock_key(PREFIX, "d2"), "b"))])

    assert [reply.verdict for reply in replies] == [Verdict.ACQUIRED] * 2


@pytest.mark.parametrize("may_be_resent", [False, True])
def test_a_call_whose_run_has_started_is_not_sent_again(backend, redis, lives, may_be_resent):
    acquire(backend)
    run = begin(backend)

    holder = acquire(backend, may_be_resent=may_be_resent)

    assert (holder.verdict, holder.task_id, holder.fence) == (Verdict.RUNNING, "a", run.fence)
    assert lives(LEASE)  # not the longer time that a queued message may wait
    assert redis.hget(LOCK, "nonce") == "n1"


@pytest.mark.parametrize("if_held", IfHeld)
def test_a_call_may_be_sent_that_replaces_a_run_of_its_id(backend, redis, lives, if_held):
    acquire(backend)
    run = begin(backend)

    holder = acquire(backend, later(A), if_held=if_held)

    assert (holder.verdict, holder.task_id, holder.state, holder.fence) == (Verdict.HELD, "a", "running", run.fence)
    assert lives(LEASE)
    assert redis.hmget(LOCK, "gen", "nonce") == ["0", "n1"]
    assert begin(backend, later(A, nonce="n2")).verdict is Verdict.HELD
    backend.finish_many([RUN], remember_for=MEMORY)
    assert begin(backend, later(A, nonce="n2")).verdict is Verdict.STARTED


def test_a_call_that_ended_is_not_sent_again(backend, redis):
    acquire(backend)
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY)

    holder = acquire(backend, may_be_resent=True)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.DONE, "a", "")
    assert not redis.exists(LOCK)


def test_a_call_that_ended_is_not_sent_again_while_another_holds_the_lock(backend, redis):
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY)
    acquire(backend, B)

    assert acquire(backend, may_be_resent=True).verdict is Verdict.DONE
    assert redis.hget(LOCK, "id") == "b"


def test_a_call_that_went_on_to_a_retry_is_not_sent_again(backend, redis):
    acquire(backend)
    begin(backend)
    rotate(backend, RUN, later(A))

    assert acquire(backend, may_be_resent=True).verdict is Verdict.DONE
    assert redis.hget(LOCK, "gen") == "1"


def test_a_new_call_may_use_an_old_task_id(backend):
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY)

    assert acquire(backend, may_be_resent=False).verdict is Verdict.ACQUIRED
    assert begin(backend, replace(A, nonce="n3")).verdict is Verdict.STARTED


def test_a_lock_ends_at_its_expiry_however_long_its_message_may_wait(backend, lives):
    holder = acquire(backend, expiry=QUEUED_TTL / 4)

    assert lives(QUEUED_TTL / 4)
    assert holder.ttl <= QUEUED_TTL / 4


def test_a_repeated_publish_does_not_move_the_expiry(backend, redis, lives):
    acquire(backend, expiry=QUEUED_TTL / 4)
    until = redis.hget(LOCK, "until")

    acquire(backend, expiry=QUEUED_TTL * 4)

    assert redis.hget(LOCK, "until") == until
    assert lives(QUEUED_TTL / 4)


def test_an_expiry_beyond_the_waiting_time_does_not_stretch_it(backend, redis, lives):
    acquire(backend, expiry=QUEUED_TTL * 4)

    assert lives(QUEUED_TTL)
    assert int(redis.hget(LOCK, "until")) / 1000 > time.time() + QUEUED_TTL * 4 - SLACK


def test_a_lock_that_waited_too_long_is_free(backend, redis):
    acquire(backend, ttl=0.001)
    wait_until(lambda: not redis.exists(LOCK))

    assert acquire(backend, B).verdict is Verdict.ACQUIRED


def test_many_locks_are_acquired_at_once_and_answered_in_order(backend):
    calls = [call(Ref(lock_key(PREFIX, str(n % 3)), f"task {n}")) for n in range(6)]

    holders = backend.acquire_many(calls)

    assert [h.verdict for h in holders] == [Verdict.ACQUIRED] * 3 + [Verdict.HELD] * 3
    assert [h.task_id for h in holders] == ["task 0", "task 1", "task 2"] * 2


# ---------------------------------------------------------------- the place behind a run

BEHIND, TURN = behind_key(LOCK), turn_key(LOCK)
TURN_TTL = 20.0


def test_a_call_that_joins_waits_behind_the_run(backend, redis, lives):
    acquire(backend)
    begin(backend)

    holder = acquire(backend, B, payload="[2]", if_held=IfHeld.JOIN)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.WAITING, "a", "running")
    assert redis.hmget(BEHIND, "id", "state", "payload") == ["b", "queued", ""]
    assert lives(QUEUED_TTL, BEHIND)


@pytest.mark.parametrize("state", ["queued", "running"])
def test_the_call_that_has_not_started_gets_the_latest_arguments(backend, redis, state):
    acquire(backend, if_held=IfHeld.JOIN)
    waiting, run = A, RUN
    if state == "running":
        begin(backend)
        acquire(backend, B, if_held=IfHeld.JOIN)
        waiting, run = B, replace(B, nonce="n2")
    holders = [acquire(backend, Ref(LOCK, id_), payload=f"[{id_}]", if_held=IfHeld.JOIN) for id_ in "cd"]
    if state == "running":
        finish(redis)

    started = begin(backend, run, queued=BEHIND)

    assert [(holder.verdict, holder.task_id) for holder in holders] == [(Verdict.HELD, waiting.task_id)] * 2
    assert (started.verdict, started.payload) == (Verdict.STARTED, "[d]")
    assert not redis.exists(BEHIND)


@pytest.mark.parametrize("state", ["queued", "running"])
def test_the_latest_arguments_outlive_the_expiry_of_the_first_call(backend, redis, lives, state):
    acquire(backend, if_held=IfHeld.JOIN, expiry=LEASE / 3)
    waiting, place = A, LOCK
    if state == "running":
        begin(backend)
        acquire(backend, B, if_held=IfHeld.JOIN, expiry=LEASE / 3)
        waiting, place = B, BEHIND
    assert lives(LEASE / 3, place)

    acquire(backend, Ref(LOCK, "c"), ttl=2, payload="[3]", if_held=IfHeld.JOIN, expiry=LEASE / 3)

    assert lives(QUEUED_TTL, place)
    if state == "running":
        finish(redis)
    started = begin(backend, replace(waiting, nonce="n2"), queued=BEHIND, expiry=LEASE / 3)
    assert (started.verdict, started.payload) == (Verdict.STARTED, "[3]")
    assert lives(LEASE / 3)


@pytest.mark.parametrize("if_held", IfHeld)
def test_no_newer_call_overtakes_the_waiting_call(backend, redis, if_held):
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=IfHeld.JOIN)
    finish(redis)  # and the call that waits has not seen it yet

    holder = acquire(backend, Ref(LOCK, "c"), payload="[3]", if_held=if_held)
    waiter = begin(backend, replace(B, nonce="n2"), queued=BEHIND)

    if if_held.replaces:
        assert (holder.verdict, holder.task_id) == (Verdict.ACQUIRED, "c")
        assert waiter.verdict is Verdict.REPLACED
    else:
        assert (holder.verdict, holder.task_id, holder.state) == (Verdict.HELD, "b", "queued")
        assert (waiter.verdict, waiter.payload) == (Verdict.STARTED, "[3]" if if_held is IfHeld.JOIN else "")


def test_a_message_that_waits_for_its_turn_takes_the_place_behind(backend, redis, lives):
    acquire(backend)
    begin(backend)
    waiter = replace(B, nonce="n2")

    assert begin(backend, waiter, turn_ttl=TURN_TTL).verdict is Verdict.HELD
    assert redis.hmget(TURN, "id", "state") == ["b", "queued"]
    assert not redis.exists(BEHIND)
    assert lives(TURN_TTL, TURN)
    finish(redis)
    newer = acquire(backend, Ref(LOCK, "c"))  # the lock is free, and the message sleeps
    assert (newer.verdict, newer.task_id, newer.state) == (Verdict.HELD, "b", "queued")
    assert begin(backend, waiter, queued=BEHIND, turn_ttl=TURN_TTL).verdict is Verdict.STARTED
    assert not redis.exists(BEHIND, TURN)


def test_a_call_that_asks_in_vain_keeps_its_place_and_is_seen(backend, redis, lives):
    """Its worker has it for a moment only, and renews nothing: the broker delays it, and no queue has it then."""
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=IfHeld.JOIN, ttl=SLACK)
    redis.hset(BEHIND, "worker", "one that had it before")

    assert begin(backend, replace(B, nonce="n2"), queued=BEHIND, turn_ttl=QUEUED_TTL).verdict is Verdict.HELD

    assert lives(QUEUED_TTL, BEHIND)
    ((_, record),) = backend.read([BEHIND])
    assert "worker" not in record
    assert 0 <= int(record["now"]) - int(record["renewed"]) < SLACK * 1000


def test_a_call_that_asks_in_vain_keeps_its_place_no_longer_than_it_may(backend, redis, lives):
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=IfHeld.JOIN, expiry=SLACK)

    assert begin(backend, replace(B, nonce="n2"), queued=BEHIND, turn_ttl=QUEUED_TTL).verdict is Verdict.HELD

    assert lives(SLACK, BEHIND)


@pytest.mark.parametrize(("waited", "verdict"), [(29.0, Verdict.STARTED), (31.0, Verdict.HELD)])
def test_a_call_in_turn_is_overtaken_for_half_a_minute_only(backend, redis, waited, verdict):
    acquire(backend)
    begin(backend)
    assert begin(backend, replace(B, nonce="n2"), turn_ttl=TURN_TTL).verdict is Verdict.HELD
    finish(redis)
    redis.hset(TURN, "since", f"{float(redis.hget(TURN, 'since')) - waited * 1000:.0f}")

    other = begin(backend, Ref(LOCK, "c", nonce="n3"), turn_ttl=TURN_TTL)

    assert (other.verdict, other.task_id) == (verdict, "c" if verdict is Verdict.STARTED else "b")
    if verdict is Verdict.HELD:
        assert begin(backend, replace(B, nonce="n2"), turn_ttl=TURN_TTL).verdict is Verdict.STARTED


def test_memory_lets_no_call_overtake_one_that_waits_for_long():
    now = [1000.0]
    backend = MemoryBackend(clock=lambda: now[0])
    acquire(backend)
    begin(backend)
    assert begin(backend, replace(B, nonce="n2"), turn_ttl=TURN_TTL * 3).verdict is Verdict.HELD
    backend.finish_many([RUN], remember_for=MEMORY)
    now[0] += 31

    assert begin(backend, Ref(LOCK, "c", nonce="n3"), turn_ttl=TURN_TTL).verdict is Verdict.HELD
    assert begin(backend, replace(B, nonce="n2"), turn_ttl=TURN_TTL).verdict is Verdict.STARTED


def test_a_replaced_call_leaves_nothing_of_its_place(backend, redis):
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=IfHeld.REPLACE)
    finish(redis)

    assert acquire(backend, Ref(LOCK, "c"), if_held=IfHeld.REPLACE).verdict is Verdict.ACQUIRED
    assert not redis.exists(BEHIND, TURN)


def test_a_message_that_is_skipped_takes_no_place(backend, redis):
    acquire(backend)
    begin(backend)

    assert begin(backend, replace(B, nonce="n2")).verdict is Verdict.HELD
    assert not redis.exists(BEHIND)


def test_messages_that_wait_by_themselves_do_not_wait_for_one_another(backend, redis):
    acquire(backend)
    begin(backend)
    begin(backend, replace(B, nonce="n2"), turn_ttl=TURN_TTL)
    finish(redis)

    assert begin(backend, Ref(LOCK, "c", nonce="n3"), queued=BEHIND, turn_ttl=TURN_TTL).verdict is Verdict.STARTED


@pytest.mark.parametrize("if_held", [IfHeld.JOIN, IfHeld.REPLACE])
def test_no_message_starts_before_the_call_that_took_the_place_behind(backend, redis, if_held):
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=if_held)
    finish(redis)

    holder = begin(backend, Ref(LOCK, "c", nonce="n3"), turn_ttl=TURN_TTL)

    assert (holder.verdict, holder.task_id) == (Verdict.HELD, "b")
    assert begin(backend, replace(B, nonce="n2"), queued=BEHIND).verdict is Verdict.STARTED


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_message_that_is_quicker_than_its_sender_gets_its_places(backend, redis, state):
    """A call that replaces others is sent first, and takes their places then."""
    acquire(backend)
    if state == "running":
        begin(backend)
    waiter = replace(B, nonce="n2")
    begin(backend, waiter, queued=BEHIND, turn_ttl=TURN_TTL)

    holders = [acquire(backend, B, may_be_resent=True, if_held=IfHeld.REPLACE) for _ in range(2)]

    if state == "queued":
        assert [holder.verdict for holder in holders] == [Verdict.ACQUIRED] * 2
        assert begin(backend).verdict is Verdict.REPLACED
    else:
        assert [holder.verdict for holder in holders] == [Verdict.WAITING] * 2
        finish(redis)
        assert begin(backend, Ref(LOCK, "c", nonce="n3"), turn_ttl=TURN_TTL).verdict is Verdict.HELD
    assert begin(backend, waiter, queued=BEHIND).verdict is Verdict.STARTED


@pytest.mark.parametrize("waits", ["in the queue", "behind a run"])
def test_a_call_that_runs_by_itself_never_gets_the_arguments_of_another(backend, redis, waits):
    acquire(backend)
    if waits == "behind a run":
        begin(backend)
        begin(backend, replace(B, nonce="n2"), turn_ttl=TURN_TTL)

    holder = acquire(backend, Ref(LOCK, "c"), payload="[3]", if_held=IfHeld.JOIN)
    same = acquire(backend, Ref(LOCK, "d"), payload="", if_held=IfHeld.JOIN)

    assert holder.verdict is Verdict.WAITING
    assert (same.verdict, same.task_id) == (Verdict.HELD, "c")
    assert "[3]" not in (redis.hget(LOCK, "payload"), redis.hget(BEHIND, "payload"))


def test_calls_that_replace_each_other_stay_ahead_of_later_turns(backend, redis):
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=IfHeld.REPLACE)
    by_itself = Ref(LOCK, "c", nonce="n3")
    begin(backend, by_itself, turn_ttl=TURN_TTL)
    acquire(backend, Ref(LOCK, "d"), if_held=IfHeld.REPLACE)
    finish(redis)

    assert begin(backend, by_itself, queued=BEHIND, turn_ttl=TURN_TTL).task_id == "d"
    assert begin(backend, Ref(LOCK, "d", nonce="n4"), queued=BEHIND).verdict is Verdict.STARTED


def test_a_message_that_must_not_wait_is_skipped_in_the_turn_of_another(backend, redis):
    acquire(backend)
    begin(backend)
    waiter = replace(B, nonce="n2")
    begin(backend, waiter, turn_ttl=TURN_TTL)
    finish(redis)

    skipped = begin(backend, Ref(LOCK, "c", nonce="n3"))

    assert (skipped.verdict, skipped.task_id) == (Verdict.HELD, "b")
    assert begin(backend, waiter, turn_ttl=TURN_TTL).verdict is Verdict.STARTED


def test_a_turn_of_another_shape_keeps_no_lock_from_being_freed(backend, redis):
    acquire(backend)
    begin(backend)
    redis.hset(TURN, "id", RUN.task_id)  # written by another program, without a generation

    backend.finish_many([RUN], remember_for=MEMORY)

    assert not redis.exists(LOCK)


def test_a_call_that_is_over_leaves_its_turn(backend, redis):
    acquire(backend)
    begin(backend)
    waiter = replace(B, nonce="n2")
    begin(backend, waiter, turn_ttl=TURN_TTL)

    backend.finish_many([replace(waiter, task_id="c")], remember_for=MEMORY)
    assert redis.exists(TURN), "of another call"
    backend.finish_many([waiter], remember_for=MEMORY)

    assert not redis.exists(TURN)


def test_behind_a_run_the_first_waiting_call_goes_first(backend, redis):
    """One that runs by itself, and one that others join: neither keeps the other waiting for ever."""
    acquire(backend)
    begin(backend)
    by_itself = replace(B, nonce="n2")
    begin(backend, by_itself, turn_ttl=TURN_TTL)
    holders = [acquire(backend, Ref(LOCK, id_), payload=f"[{id_}]", if_held=IfHeld.JOIN) for id_ in "cde"]
    joined = Ref(LOCK, "c", nonce="n3")
    finish(redis)

    assert [(holder.verdict, holder.task_id) for holder in holders] == [
        (Verdict.WAITING, "a"),
        (Verdict.HELD, "c"),
        (Verdict.HELD, "c"),
    ]
    assert begin(backend, joined, queued=BEHIND, turn_ttl=TURN_TTL).task_id == "b"
    assert begin(backend, by_itself, queued=BEHIND, turn_ttl=TURN_TTL).verdict is Verdict.STARTED
    another = Ref(LOCK, "z", nonce="n4")
    begin(backend, another, turn_ttl=TURN_TTL)
    finish(redis, by_itself)
    assert begin(backend, another, queued=BEHIND, turn_ttl=TURN_TTL).task_id == "c"
    started = begin(backend, joined, queued=BEHIND, turn_ttl=TURN_TTL)
    assert (started.verdict, started.payload) == (Verdict.STARTED, "[e]")
    known = redis.time()
    wait_until(lambda: redis.time() > (known[0], known[1] + 1000), what="the next millisecond")
    assert acquire(backend, Ref(LOCK, "f"), if_held=IfHeld.JOIN).verdict is Verdict.WAITING
    finish(redis, joined)
    assert begin(backend, another, queued=BEHIND, turn_ttl=TURN_TTL).verdict is Verdict.STARTED


def test_a_replacing_call_evicts_all_calls_that_have_not_started(backend, redis):
    acquire(backend)
    begin(backend)
    acquire(backend, B, if_held=IfHeld.JOIN)

    behind_a_run = acquire(backend, Ref(LOCK, "c"), if_held=IfHeld.REPLACE)
    rotate(backend, RUN, later(A))
    alone = acquire(backend, Ref(LOCK, "d"), if_held=IfHeld.REPLACE)

    assert (behind_a_run.verdict, behind_a_run.task_id) == (Verdict.WAITING, "a")
    assert alone.verdict is Verdict.ACQUIRED
    for ref in (B, Ref(LOCK, "c"), later(A)):
        assert begin(backend, replace(ref, nonce="n9"), queued=BEHIND).verdict is Verdict.REPLACED
    assert begin(backend, Ref(LOCK, "d", nonce="n9")).verdict is Verdict.STARTED


def test_the_latest_arguments_stay_with_a_run_that_begins_twice(backend):
    acquire(backend, if_held=IfHeld.JOIN)
    acquire(backend, B, payload="[2]", if_held=IfHeld.JOIN)

    assert [begin(backend).payload, begin(backend).payload] == ["[2]", "[2]"]


def test_a_message_that_the_broker_takes_back_keeps_the_latest_arguments(backend):
    acquire(backend, if_held=IfHeld.JOIN)
    acquire(backend, B, payload="[2]", if_held=IfHeld.JOIN)
    begin(backend)
    rotate(backend, RUN, A)

    assert begin(backend, replace(A, nonce="n2")).payload == "[2]"


@pytest.mark.parametrize("way", ["rotated", "promised"])
def test_a_retry_has_arguments_of_its_own(backend, way):
    acquire(backend, if_held=IfHeld.JOIN)
    acquire(backend, B, payload="[2]", if_held=IfHeld.JOIN)
    begin(backend)
    if way == "rotated":
        rotate(backend, RUN, later(A))
    if way == "promised":
        backend.promise(RUN, to=later(A), ttl=QUEUED_TTL)
        backend.finish_many([RUN], remember_for=MEMORY)

    started = begin(backend, later(A, 1, "n2"))

    assert (started.verdict, started.payload) == (Verdict.STARTED, "")


def test_a_retry_waits_for_a_run_of_its_redelivered_first_message(backend):
    """The first run has lost its lock, or its worker has died after it sent the retry."""
    again, retry = replace(A, nonce="again"), later(A, 1, "n2")
    begin(backend, again)

    assert begin(backend, retry, turn_ttl=LEASE).verdict is Verdict.HELD
    assert backend.renew_many([again], lease=LEASE) == [Renewal.RUNNING]
    backend.finish_many([again], remember_for=MEMORY, ran=True)
    assert begin(backend, retry, turn_ttl=LEASE).verdict is Verdict.STARTED


def test_a_place_behind_that_is_no_lock_is_named(backend, redis):
    redis.set(BEHIND, "no lock")

    assert acquire(backend).verdict is Verdict.UNUSABLE
    assert redis.keys(f"{PREFIX}*") == [BEHIND]
    with pytest.raises(LockBackendError, match="WRONGTYPE"):
        begin(backend, queued=BEHIND)


def test_a_holder_that_waits_may_be_replaced(backend, redis, lives):
    acquire(backend, expiry=LEASE)

    holder = acquire(backend, B, if_held=IfHeld.REPLACE)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.ACQUIRED, "b", "queued")
    assert redis.hmget(LOCK, "id", "gen", "state", "payload", "until") == ["b", "0", "queued", "", None]
    assert lives(QUEUED_TTL)
    assert begin(backend).verdict is Verdict.REPLACED
    assert finish(redis) == finish(redis, A) == "kept"


def test_an_end_that_is_repeated_writes_nothing(backend, redis):
    acquire(backend)
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY, ran=True)
    redis.pexpire(done_key(LOCK), 5000)
    remembered = redis.zrange(done_key(LOCK), 0, -1, withscores=True)

    backend.finish_many([RUN], remember_for=MEMORY, ran=True)

    assert redis.zrange(done_key(LOCK), 0, -1, withscores=True) == remembered
    assert redis.pttl(done_key(LOCK)) <= 5000


def _queued(backend: RedisBackend) -> None:
    acquire(backend, entry="nightly")


def _joined(backend: RedisBackend) -> None:
    acquire(backend, entry="nightly", payload="[1]", if_held=IfHeld.JOIN)
    acquire(backend, B, payload="[2]", if_held=IfHeld.JOIN)


def test_a_promise_to_a_retry_ends_with_the_start_of_a_later_retry(backend, redis):
    acquire(backend)
    begin(backend)
    backend.promise(RUN, to=later(A, 1), ttl=QUEUED_TTL)
    backend.finish_many([RUN], remember_for=MEMORY)
    run = later(A, 2, "n3")

    assert begin(backend, run).verdict is Verdict.STARTED

    assert finish(redis, run) == "finished"
    assert not redis.exists(LOCK)


@pytest.mark.parametrize("prepare", [lambda _: None, _queued, _joined])
@pytest.mark.parametrize("run", [RUN, replace(RUN, generation=1)], ids=["first", "retry"])
def test_a_start_is_answered_as_its_repetition_is(backend, redis, prepare, run):
    prepare(backend)

    started = begin(backend, run, entry="nightly")

    again = begin(backend, run, entry="nightly")
    assert replace(started, ttl=0) == replace(again, ttl=0)
    assert (started.verdict, started.task_id, started.state, started.entry) == ("started", "a", "running", "nightly")
    assert started.ttl == pytest.approx(again.ttl, abs=SLACK)
    assert started.payload == ("[2]" if prepare is _joined and run is RUN else "")


def test_a_replaced_holder_is_remembered_as_long_as_it_may_wait(backend, redis):
    acquire(backend, ttl=2 * MEMORY)
    acquire(backend, B, ttl=1.0, if_held=IfHeld.REPLACE)
    run = replace(B, nonce="n2")
    begin(backend, run)
    backend.finish_many([run], remember_for=0.001)
    acquire(backend, B)
    begin(backend, run)
    rotate(backend, run, later(B))
    begin(backend, later(B, 1, "n3"))
    backend.finish_many([later(B, 1, "n3")], remember_for=MEMORY)

    assert redis.pttl(done_key(LOCK)) > MEMORY * 1000
    assert redis.zscore(done_key(LOCK), "a:replaced") > (time.time() + MEMORY) * 1000
    assert begin(backend).verdict is Verdict.REPLACED


def test_a_holder_that_was_replaced_never_starts(backend, redis):
    acquire(backend)
    acquire(backend, B, if_held=IfHeld.REPLACE)
    begin(backend, replace(B, nonce="n2"))
    backend.finish_many([replace(B, nonce="n2")], remember_for=MEMORY)

    assert begin(backend).verdict is Verdict.REPLACED
    assert begin(backend, later(A, 1, "n3")).verdict is Verdict.REPLACED
    assert 0 < redis.pttl(done_key(LOCK)) <= max(QUEUED_TTL, MEMORY) * 1000
    assert acquire(backend, may_be_resent=True).verdict is Verdict.DONE
    assert acquire(backend).verdict is Verdict.ACQUIRED  # its sender knows what it does
    assert begin(backend).verdict is Verdict.STARTED


def test_a_call_that_was_replaced_may_be_made_again(backend, redis):
    acquire(backend)
    acquire(backend, B, if_held=IfHeld.REPLACE)
    begin(backend, replace(B, nonce="n2"))

    assert acquire(backend, if_held=IfHeld.JOIN).verdict is Verdict.WAITING
    finish(redis, replace(B, nonce="n2"))
    assert begin(backend, queued=BEHIND).verdict is Verdict.STARTED


@pytest.mark.parametrize("if_held", IfHeld)
def test_a_run_keeps_its_lock_against_any_call(backend, redis, lives, if_held):
    acquire(backend)
    begin(backend)
    before = redis.hgetall(LOCK)

    holder = acquire(backend, B, payload="[2]", if_held=if_held)

    verdict = Verdict.HELD if if_held is IfHeld.LEAVE else Verdict.WAITING
    assert (holder.verdict, holder.task_id, holder.state) == (verdict, "a", "running")
    assert redis.hgetall(LOCK) == before
    assert lives(LEASE)


@pytest.mark.parametrize("if_held", IfHeld)
@pytest.mark.parametrize("runs", [False, True], ids=["alone", "behind a run"])
def test_a_repeated_call_changes_nothing(backend, redis, if_held, runs):
    if runs:
        acquire(backend, B)
        begin(backend, replace(B, nonce="n2"))
    first = acquire(backend, payload="[1]", if_held=if_held)
    before = [redis.hgetall(key) for key in (LOCK, BEHIND)]

    assert acquire(backend, payload="[1]", if_held=if_held).verdict is first.verdict
    assert [redis.hgetall(key) for key in (LOCK, BEHIND)] == before


# ---------------------------------------------------------------- a server that is late


def test_a_resumed_server_acquires_no_lock_for_a_caller_that_gave_up(own_server):
    backend = RedisBackend(own_server.url, timeout=0.3)
    backend.get(LOCK)
    own_server.pause()
    with pytest.raises(LockBackendError):
        acquire(backend)
    own_server.resume()

    other = RedisBackend(own_server.url, timeout=5)
    assert acquire(other, B).verdict is Verdict.ACQUIRED


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_clock_that_differs_from_the_servers_refuses_no_call(server, redis, ahead):
    backend = RedisBackend(server.url)
    backend._ahead += ahead

    assert acquire(backend).verdict is Verdict.ACQUIRED


@pytest.mark.parametrize("verb", ["acquire_many", "renew_many", "finish_many"])
def test_no_calls_are_no_round_trip(redis, verb):
    nowhere = RedisBackend("redis://127.0.0.1:1/0")
    options = {"acquire_many": {}, "renew_many": {"lease": LEASE}, "finish_many": {"remember_for": MEMORY}}

    assert not getattr(nowhere, verb)([], **options[verb])


# ---------------------------------------------------------------- begin


def test_a_queued_message_starts_under_a_short_lease(backend, redis, lives):
    acquire(backend)

    holder = begin(backend)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.STARTED, "a", "running")
    assert just_now(holder.since)
    assert lives(LEASE)
    assert redis.hmget(LOCK, "state", "nonce", "gen") == ["running", "n1", "0"]
    assert int(redis.hget(LOCK, "fence")) == holder.fence > 0


def test_a_lock_keeps_the_note_of_its_sender_and_else_that_of_its_worker(backend, redis):
    begin(backend, note="worker")
    rotate(backend, RUN, Ref(LOCK, "a", 1))
    assert redis.hget(LOCK, "sent") == "worker"
    backend.unlock(LOCK)
    acquire(backend, note="sender")
    begin(backend, note="worker")
    assert redis.hget(LOCK, "sent") == "sender"
    backend.unlock(LOCK)
    begin(backend)
    assert not redis.hexists(LOCK, "sent")


def test_a_message_whose_lock_is_gone_takes_it_at_its_start(backend, redis, lives):
    holder = begin(backend)

    assert (holder.verdict, holder.task_id) == (Verdict.STARTED, "a")
    assert lives(LEASE)
    assert redis.hmget(LOCK, "id", "gen", "task", "args") == ["a", "0", "app.task", "1, x=2"]
    assert redis.hget(LOCK, "until") is None


def test_a_lock_that_is_taken_at_the_start_ends_at_its_expiry(backend, lives):
    begin(backend, expiry=LEASE / 3)

    assert lives(LEASE / 3)


def test_the_expiry_of_a_queued_lock_holds_for_its_run(backend, lives):
    acquire(backend, expiry=LEASE / 3)

    begin(backend, expiry=LEASE * 2)

    assert lives(LEASE / 3)


def test_a_repeated_begin_of_the_same_delivery_has_started(backend, redis):
    acquire(backend)
    first = begin(backend)
    before = redis.hgetall(LOCK)

    second = begin(backend)

    assert second.verdict is Verdict.STARTED
    assert second.fence == first.fence
    assert redis.hgetall(LOCK) == before


def test_a_second_delivery_of_a_running_message_is_a_copy(backend, redis, lives):
    acquire(backend)
    run = begin(backend)
    before = redis.hgetall(LOCK)

    copy = begin(backend, COPY, lease=LEASE * 10)

    assert (copy.verdict, copy.task_id, copy.state, copy.fence) == (Verdict.COPY, "a", "running", run.fence)
    assert LEASE - SLACK < copy.ttl <= LEASE  # the copy comes back then
    assert redis.hgetall(LOCK) == before
    assert lives(LEASE)


def test_a_copy_takes_over_when_the_lease_of_the_run_has_ended(backend, redis):
    begin(backend)
    redis.delete(LOCK)

    assert begin(backend, COPY).verdict is Verdict.STARTED
    assert redis.hget(LOCK, "nonce") == "n2"


def test_a_message_of_an_earlier_generation_is_stale(backend, redis):
    acquire(backend)
    begin(backend)
    rotate(backend, RUN, later(A, 2))
    before = redis.hgetall(LOCK)

    holder = begin(backend, later(A, 1, "n9"))

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.STALE, "a", "queued")
    assert redis.hgetall(LOCK) == before


def test_a_copy_of_a_run_that_handed_over_is_done(backend):
    acquire(backend)
    begin(backend)
    rotate(backend, RUN, later(A))

    assert begin(backend, COPY).verdict is Verdict.DONE


def test_a_copy_of_a_run_that_ended_is_done(backend, redis):
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY)

    holder = begin(backend, COPY)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.DONE, "a", "")
    assert not redis.exists(LOCK)


def test_a_late_copy_is_done_even_if_newer_calls_have_run_since(backend, redis):
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY)
    begin(backend, replace(B, nonce="n5"))
    backend.finish_many([replace(B, nonce="n5")], remember_for=MEMORY)
    begin(backend, Ref(LOCK, "c", nonce="n6"))

    assert begin(backend, COPY).verdict is Verdict.DONE
    assert redis.hget(LOCK, "id") == "c"


def test_a_message_whose_lock_another_holds_must_not_start(backend, redis, lives):
    acquire(backend, B)
    before = redis.hgetall(LOCK)

    holder = begin(backend, RUN, expiry=1.0)

    assert (holder.verdict, holder.task_id, holder.state) == (Verdict.HELD, "b", "queued")
    assert redis.hgetall(LOCK) == before
    assert lives(QUEUED_TTL)


def test_a_higher_generation_takes_the_lock_over_from_a_lower_one(backend, redis, lives):
    acquire(backend)
    first = begin(backend)
    redis.hset(LOCK, "state", "queued")  # again, by a worker that stops

    holder = begin(backend, later(A, 1, "n2"))

    assert holder.verdict is Verdict.STARTED
    assert holder.fence > first.fence
    assert redis.hmget(LOCK, "gen", "nonce", "state") == ["1", "n2", "running"]
    assert lives(LEASE)
    # The lower one is over: it has sent the higher one.
    assert begin(backend, COPY).verdict is Verdict.DONE
    assert renew(backend) is Renewal.OVER
    assert lives(MEMORY, DONE)


def test_the_fence_rises_from_run_to_run(backend):
    fences = []
    for number in range(5):
        run = Ref(LOCK, f"task {number}", nonce=str(number))
        acquire(backend, run)
        fences.append(begin(backend, run).fence)
        backend.finish_many([run], remember_for=MEMORY)

    assert fences == sorted(set(fences))


def test_the_fence_rises_even_when_no_record_is_left(backend, redis):
    first = begin(backend).fence
    redis.flushall()

    assert begin(backend, replace(B, nonce="n2")).fence > first


def test_the_fence_rises_even_when_the_clock_of_the_server_was_set_back(backend, redis):
    begin(backend)
    ahead = int(redis.hget(LOCK, "fence")) + 10**12
    redis.hset(LOCK, mapping={"fence": ahead, "state": "queued"})  # again, by a worker that stops

    assert begin(backend, later(A, 1, "n2")).fence == ahead + 1


# ---------------------------------------------------------------- the server's clock was set back


FIVE_HOURS = 5 * 3600.0
TIMES = ("since", "renewed", "until", "uncut", "taken")


def set_back(redis: Redis, seconds: float, key: str = LOCK) -> None:
    """Leave a lock as it is a second after the server's clock was set back: its times lie in the future."""
    times = {name: at for name, at in zip(TIMES, redis.hmget(key, TIMES), strict=True) if at}
    redis.hset(key, mapping={name: int(at) + round(seconds * 1000) for name, at in times.items()})
    redis.pexpire(key, redis.pttl(key) + round(seconds * 1000) - 1000)


def meet(backend: RedisBackend, how: str) -> Holder:
    if how == "begin":
        return begin(backend, replace(B, nonce="n2"))
    if how == "copy":
        return begin(backend, COPY)
    return acquire(backend, B, if_held=IfHeld(how))


@pytest.fixture
def of_worker(server: RedisServer) -> RedisBackend:
    """The backend of a worker, which names itself in the locks that it renews."""
    backend = RedisBackend(server.url)
    backend.worker = "w1@h"
    return backend


@pytest.mark.parametrize("how", ["", "join", "replace", "begin", "copy"])
@pytest.mark.parametrize("renewed", [False, True])
def test_a_dead_runs_lock_ends_with_its_lease_after_the_clock_was_set_back(
    backend, of_worker, redis, lives, how, renewed
):
    begin(backend)
    if renewed:
        renew(of_worker)
    set_back(redis, FIVE_HOURS)
    assert redis.pttl(LOCK) > FIVE_HOURS * 1000

    holder = meet(backend, how)

    assert holder.verdict in {Verdict.HELD, Verdict.WAITING, Verdict.COPY}
    assert holder.since is None, "a time that has not come yet"
    assert lives(LEASE)
    redis.pexpire(LOCK, 5_000)
    meet(backend, how)
    assert redis.pttl(LOCK) <= 5_000, "a second call neither prolongs nor shortens it"


@pytest.mark.parametrize("seconds", [20, LEASE - 20, 2 * LEASE, FIVE_HOURS])
@pytest.mark.parametrize("named", [False, True])
def test_a_living_runs_lock_keeps_its_lease_after_the_clock_was_set_back(
    backend, of_worker, redis, lives, seconds, named
):
    """The run of ``exclusive``, which no worker renews, names none."""
    keeper = of_worker if named else backend
    begin(backend)
    renew(keeper)
    set_back(redis, seconds)
    assert renew(keeper) is Renewal.RUNNING

    for how in ("", "begin", "copy"):
        meet(backend, how)

    assert lives(LEASE)
    assert renew(keeper) is Renewal.RUNNING


def test_calls_before_its_next_renewal_end_no_living_runs_lock_early(backend, redis):
    begin(backend)
    set_back(redis, LEASE / 3)

    for how in ("", "begin", "copy", ""):
        meet(backend, how)

    assert redis.pttl(LOCK) > (LEASE - SLACK) * 1000


def test_a_run_that_starts_after_the_clock_was_set_back_keeps_its_lease(backend, of_worker, redis, lives):
    acquire(backend)
    renew(of_worker, A)
    set_back(redis, LEASE * 0.8)
    begin(backend)

    meet(backend, "")

    assert lives(LEASE)


@pytest.mark.parametrize("how", ["", "join", "begin"])
def test_a_queued_lock_lasts_as_it_was_asked_after_the_clock_was_set_back(backend, redis, lives, how):
    acquire(backend, expiry=2 * QUEUED_TTL)
    set_back(redis, FIVE_HOURS)

    assert meet(backend, how).verdict is Verdict.HELD

    assert lives(QUEUED_TTL)


@pytest.mark.parametrize("place_of", [behind_key, turn_key])
def test_a_waiting_call_lasts_as_asked_after_the_clock_was_set_back(backend, redis, lives, place_of):
    begin(backend)
    if place_of is behind_key:
        acquire(backend, B, if_held=IfHeld.JOIN)
    else:
        begin(backend, replace(B, nonce="n2"), turn_ttl=QUEUED_TTL)
    finish(redis)
    set_back(redis, FIVE_HOURS, place_of(LOCK))

    assert acquire(backend, Ref(LOCK, "c")).verdict is Verdict.HELD

    assert lives(QUEUED_TTL, place_of(LOCK))


def test_a_worker_seen_before_the_clock_was_set_back_counts_as_seen_now(backend, redis):
    backend.announce("dead", ttl=600)
    redis.zincrby(WORKERS_KEY, FIVE_HOURS, "dead")

    backend.announce("alive", ttl=600)

    assert redis.zscore(WORKERS_KEY, "dead") <= redis.zscore(WORKERS_KEY, "alive")
    assert set(backend.workers()) == {"dead", "alive"}


# ---------------------------------------------------------------- rotate


def test_a_run_hands_its_lock_over_to_the_next_generation(backend, redis, lives):
    acquire(backend)
    begin(backend)

    assert rotate(backend, RUN, later(A))

    assert redis.hmget(LOCK, "id", "gen", "state", "nonce") == ["a", "1", "queued", ""]
    assert lives(QUEUED_TTL)
    assert lives(MEMORY, DONE)
    assert begin(backend, later(A, 1, "n2")).verdict is Verdict.STARTED


def test_a_run_that_handed_over_frees_nothing_when_it_ends(backend, redis):
    begin(backend)
    rotate(backend, RUN, later(A))
    before = redis.hgetall(LOCK)

    assert finish(redis) == "kept"
    assert redis.hgetall(LOCK) == before


def test_a_retry_does_not_bring_a_generation_back_that_has_ended(backend, redis):
    begin(backend)
    redis.delete(LOCK)  # the lease ends, so the run cannot hand over what it has lost, and its retry is sent
    assert not rotate(backend, RUN, later(A))
    begin(backend, later(A, 1, "n3"))
    backend.finish_many([later(A, 1, "n3")], remember_for=MEMORY)
    begin(backend, COPY)

    rotate(backend, COPY, later(A))

    assert begin(backend, later(A, 1, "n4")).verdict is Verdict.DONE
    assert finish(redis, later(A, 1, "n4")) == "released"
    assert not redis.exists(LOCK)


def test_a_message_that_the_broker_takes_back_waits_in_its_generation(backend, redis, lives):
    begin(backend)

    assert rotate(backend, RUN, replace(RUN, nonce=""))

    assert redis.hmget(LOCK, "gen", "state", "nonce") == ["0", "queued", ""]
    assert lives(QUEUED_TTL)
    assert begin(backend, COPY).verdict is Verdict.STARTED


def test_only_the_run_that_holds_the_lock_hands_it_over(backend, redis):
    begin(backend)
    before = redis.hgetall(LOCK)

    assert not rotate(backend, COPY, later(A))
    assert not rotate(backend, A, later(A))
    assert not rotate(backend, replace(B, nonce="n1"), later(B))

    assert redis.hgetall(LOCK) == before
    assert not redis.exists(DONE)


def test_a_queued_lock_is_handed_over_by_its_message_only(backend, redis):
    acquire(backend)
    before = redis.hgetall(LOCK)

    assert not rotate(backend, RUN, later(A))
    assert redis.hgetall(LOCK) == before
    assert rotate(backend, A, later(A))


def test_a_lock_that_is_gone_cannot_be_handed_over(backend, redis):
    assert not rotate(backend, RUN, later(A))
    assert not rotate(backend, A, later(A))
    assert not redis.exists(LOCK, DONE)


def test_a_hand_over_does_not_outlive_the_expiry(backend, lives):
    acquire(backend, expiry=LEASE / 3)
    begin(backend)

    rotate(backend, RUN, later(A), ttl=QUEUED_TTL * 10)

    assert lives(LEASE / 3)


# ---------------------------------------------------------------- renew


def test_the_run_that_holds_the_lock_renews_it(backend, redis, lives):
    begin(backend, lease=LEASE / 3)
    before = redis.hgetall(LOCK)

    assert renew(backend) is Renewal.RUNNING
    assert lives(LEASE)
    assert int(redis.hget(LOCK, "renewed")) >= int(before["since"])
    redis.hdel(LOCK, "renewed")
    assert redis.hgetall(LOCK) == before


def test_a_shorter_lease_shortens_the_lifetime_of_a_run(backend, lives):
    begin(backend, lease=LEASE * 3)

    assert renew(backend) is Renewal.RUNNING
    assert lives(LEASE)


def test_a_message_that_waits_in_a_worker_is_renewed_and_never_shortened(backend, lives):
    acquire(backend, ttl=QUEUED_TTL)

    assert renew(backend, lease=LEASE / 3) is Renewal.QUEUED
    assert lives(QUEUED_TTL)
    assert renew(backend, lease=QUEUED_TTL * 2) is Renewal.QUEUED
    assert lives(QUEUED_TTL * 2)


@pytest.mark.parametrize(("state", "renewal"), [("queued", Renewal.QUEUED), ("running", Renewal.RUNNING)])
def test_a_renewal_without_a_lease_only_shows_that_the_message_lives(backend, redis, lives, state, renewal):
    acquire(backend, ttl=2 * SLACK)
    if state == "running":
        begin(backend, lease=2 * SLACK)
    backend.worker = "w1"

    assert backend.renew_many([RUN], lease=0) == [renewal]

    assert lives(2 * SLACK)
    assert redis.hget(LOCK, "worker") == "w1"
    assert int(redis.hget(LOCK, "renewed")) >= int(redis.hget(LOCK, "since"))


def test_a_copy_cannot_renew_the_lock_of_the_run(backend, lives):
    begin(backend)

    assert renew(backend, COPY, lease=LEASE * 10) is Renewal.LOST
    assert lives(LEASE)


def test_a_run_that_ended_or_handed_over_has_nothing_to_renew(backend, redis):
    begin(backend)
    rotate(backend, RUN, later(A))
    ttl = redis.pttl(LOCK)
    assert renew(backend, lease=QUEUED_TTL * 10) is Renewal.OVER
    assert redis.pttl(LOCK) <= ttl

    begin(backend, later(A, 1, "n2"))
    backend.finish_many([later(A, 1, "n2")], remember_for=MEMORY)
    assert renew(backend, later(A, 1, "n2")) is Renewal.OVER
    assert not redis.exists(LOCK)


def test_a_renewal_never_brings_a_lock_back(backend, redis):
    begin(backend)
    redis.delete(LOCK)

    assert renew(backend) is Renewal.LOST
    assert renew(backend, A) is Renewal.LOST
    assert not redis.exists(LOCK)


def test_a_renewal_never_takes_the_lock_of_another(backend, redis, lives):
    begin(backend)
    redis.delete(LOCK)
    acquire(backend, B)
    before = redis.hgetall(LOCK)

    assert renew(backend, lease=QUEUED_TTL * 10) is Renewal.LOST
    assert redis.hgetall(LOCK) == before
    assert lives(QUEUED_TTL)


def test_an_earlier_generation_does_not_renew_the_lock_of_a_later_one(backend, redis, lives):
    acquire(backend)
    rotate(backend, A, later(A, 2))

    assert renew(backend, later(A, 1, "n1"), lease=QUEUED_TTL * 10) is Renewal.LOST
    assert lives(QUEUED_TTL)


def test_no_renewal_goes_past_the_expiry(backend, redis, lives):
    acquire(backend, expiry=LEASE / 3)
    assert renew(backend, lease=LEASE * 10) is Renewal.QUEUED
    assert lives(LEASE / 3)

    begin(backend)
    assert renew(backend, lease=LEASE * 10) is Renewal.RUNNING
    assert lives(LEASE / 3)


def test_locks_are_renewed_although_the_servers_memory_is_full(own_server):
    backend, client = RedisBackend(own_server.url), own_server.client()
    backend.worker = "w@h"
    acquire(backend)
    begin(backend, lease=10)
    client.config_set("maxmemory", 1)

    assert renew(backend) is Renewal.RUNNING
    assert client.ttl(LOCK) > 10


def test_each_of_many_locks_is_renewed_on_its_own(backend, redis):
    refs = [Ref(lock_key(PREFIX, str(n)), f"task {n}", nonce=f"n{n}") for n in range(4)]
    for ref in refs[:2]:
        begin(backend, ref)
    acquire(backend, refs[2])
    backend.finish_many(refs[:1], remember_for=MEMORY)

    renewals = backend.renew_many(refs, lease=LEASE)

    assert renewals == [Renewal.OVER, Renewal.RUNNING, Renewal.QUEUED, Renewal.LOST]


# ---------------------------------------------------------------- finish


def test_a_run_that_ends_frees_its_lock_and_is_remembered(backend, redis, lives):
    acquire(backend)
    begin(backend)

    assert finish(redis) == "finished"

    assert not redis.exists(LOCK)
    assert {*redis.zrange(DONE, 0, -1)} == {"a:0", f"a:0:{RUN.nonce}:over"}
    assert lives(MEMORY, DONE)
    assert finish(redis) == "kept"


def test_a_message_that_never_started_frees_its_lock_and_is_not_remembered(backend, redis):
    acquire(backend)

    assert finish(redis, A) == "released"
    assert not redis.exists(LOCK, DONE)
    assert begin(backend).verdict is Verdict.STARTED  # it was published after all


def test_a_delivery_that_was_revoked_before_its_start_frees_its_lock(backend, redis):
    acquire(backend)

    assert finish(redis, RUN) == "released"
    assert not redis.exists(LOCK)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(COPY, id="a copy that was put off"),
        pytest.param(A, id="the sender, whose publish failed after all"),
        pytest.param(later(A, 1, "n1"), id="another generation"),
        pytest.param(replace(B, nonce="n1"), id="another task id"),
        pytest.param(B, id="another task id that never started"),
    ],
)
def test_the_end_of_anything_else_frees_nothing(backend, redis, other):
    acquire(backend)
    begin(backend)
    before = redis.hgetall(LOCK)

    assert finish(redis, other) == "kept"

    assert redis.hgetall(LOCK) == before
    assert not redis.exists(DONE)
    assert finish(redis) == "finished"


@pytest.mark.parametrize("other", [later(A, 1), B], ids=["another generation", "another task id"])
def test_a_queued_lock_is_not_freed_by_another(backend, redis, other):
    acquire(backend)

    assert finish(redis, other) == "kept"
    assert redis.hget(LOCK, "state") == "queued"


def test_a_run_that_lost_its_lease_does_not_free_the_next_holder(backend, redis):
    begin(backend)
    redis.delete(LOCK)
    begin(backend, replace(B, nonce="n2"))

    assert finish(redis) == "kept"
    assert redis.hget(LOCK, "id") == "b"


def test_ends_are_forgotten_after_their_time(backend, redis):
    redis.zadd(DONE, {"old:0": (time.time() - MEMORY - SLACK) * 1000, "young:0": (time.time() - SLACK) * 1000})
    begin(backend)

    backend.finish_many([RUN], remember_for=MEMORY)

    assert {*redis.zrange(DONE, 0, -1)} == {"young:0", "a:0", f"a:0:{RUN.nonce}:over"}


def test_many_locks_are_freed_at_once_and_only_their_own(backend, redis):
    refs = [Ref(lock_key(PREFIX, str(n)), f"task {n}", nonce=f"n{n}") for n in range(3)]
    for ref in refs:
        begin(backend, ref)

    backend.finish_many([refs[0], replace(refs[1], nonce="other"), refs[2]], remember_for=MEMORY)

    assert [bool(redis.exists(ref.key)) for ref in refs] == [False, True, False]


@pytest.mark.parametrize("kind", [RedisBackend, MemoryBackend])
def test_a_new_call_under_a_used_id_may_retry_as_the_first_did(server, redis, kind):
    """Another id of which that is the beginning is remembered."""
    backend = RedisBackend(server.url) if kind is RedisBackend else MemoryBackend()
    other = replace(RUN, task_id=f"{RUN.task_id}:1")
    for run in (other, RUN):
        assert acquire(backend, run).verdict is Verdict.ACQUIRED
        assert begin(backend, run).verdict is Verdict.STARTED
        assert backend.rotate(run, to=later(run), ttl=QUEUED_TTL, remember_for=MEMORY)
        retry = later(run, nonce="n2")
        assert begin(backend, retry).verdict is Verdict.STARTED
        backend.finish_many([retry], remember_for=MEMORY, ran=True)

    assert acquire(backend, RUN).verdict is Verdict.ACQUIRED

    assert begin(backend, RUN).verdict is Verdict.STARTED
    assert backend.rotate(RUN, to=later(RUN), ttl=QUEUED_TTL, remember_for=MEMORY)
    assert begin(backend, later(RUN, nonce="n3")).verdict is Verdict.STARTED
    assert begin(backend, later(other, nonce="n4")).verdict is Verdict.DONE


@pytest.mark.parametrize("kind", [RedisBackend, MemoryBackend])
@pytest.mark.parametrize("step", ["sent", "started", "over"])
def test_the_repeated_end_of_a_run_leaves_a_new_call_of_its_id_alone(server, redis, kind, step):
    """The main process repeats what the child has done."""
    backend = RedisBackend(server.url) if kind is RedisBackend else MemoryBackend()
    begin(backend)
    backend.finish_many([RUN], remember_for=MEMORY, ran=True)
    again = replace(A, nonce="n2")
    assert acquire(backend, again).verdict is Verdict.ACQUIRED
    if step != "sent":
        assert begin(backend, again).verdict is Verdict.STARTED
    if step == "over":
        backend.finish_many([again], remember_for=MEMORY, ran=True)
        assert acquire(backend, B).verdict is Verdict.ACQUIRED

    assert not backend.finish_many([RUN], remember_for=MEMORY, ran=True)

    assert backend.get(LOCK) == ("b" if step == "over" else "a")
    if step == "sent":
        assert begin(backend, again).verdict is Verdict.STARTED


@pytest.mark.parametrize("what", ["renew_many", "finish_many"])
def test_a_node_that_is_away_harms_no_lock_of_another_node(server, redis, monkeypatch, what):
    """In a cluster each slot has a call of its own."""
    backend = RedisBackend(server.url)
    refs = [Ref(lock_key(PREFIX, str(n)), f"task {n}", nonce=f"n{n}") for n in range(3)]
    for ref in refs:
        begin(backend, ref, lease=5)
    monkeypatch.setattr("singlebeat.locks.redis.same_slot", lambda _, keys: [[at] for at in range(len(keys))])
    run = backend._run

    def run_unless_first(name, keys, args):
        if keys[0] == refs[0].key:
            raise LockBackendError("the node hangs")
        return run(name, keys, args)

    monkeypatch.setattr(backend, "_run", run_unless_first)

    with pytest.raises(LockBackendError):
        backend.renew_many(refs, lease=50) if what == "renew_many" else backend.finish_many(refs, remember_for=MEMORY)

    left = [redis.ttl(ref.key) for ref in refs]
    assert left[0] <= 5
    assert all(seconds > 40 for seconds in left[1:]) if what == "renew_many" else left[1:] == [-2, -2]


# ---------------------------------------------------------------- operators


def test_get_names_the_holder_of_a_lock(backend):
    assert backend.get(LOCK) is None
    acquire(backend)
    assert backend.get(LOCK) == "a"


def test_unlock_frees_a_lock_of_any_holder(backend, redis):
    begin(backend)

    backend.unlock(LOCK)

    assert not redis.exists(LOCK)
    assert acquire(backend, B).verdict is Verdict.ACQUIRED


@pytest.mark.parametrize("waits", [False, True], ids=["starts", "waits for its turn"])
def test_a_start_without_the_right_to_bound_a_lock_writes_nothing(server, backend, redis, waits):
    """Else the lock of a run would last as long as a message may wait, and a turn for ever."""
    acquire(backend)
    before = contents(redis)

    with without(server, "pexpire") as url, pytest.raises(LockBackendError):
        begin(RedisBackend(url), replace(RUN, task_id="b") if waits else RUN, turn_ttl=60.0 * waits)

    assert contents(redis) == before


def test_an_end_without_the_right_to_bound_its_memory_writes_nothing(server, backend, redis):
    begin(backend)
    before = contents(redis)

    with without(server, "pexpire") as url, pytest.raises(LockBackendError):
        RedisBackend(url).finish_many([RUN], remember_for=MEMORY)

    assert contents(redis) == before


def test_a_start_that_the_server_refuses_leaves_the_lock_its_time(server, backend, redis):
    """The message may have to wait in its queue for longer than a lease."""
    acquire(backend)

    with without(server, "hset") as url, pytest.raises(LockBackendError):
        begin(RedisBackend(url))

    assert redis.hget(LOCK, "state") == "queued"
    assert redis.ttl(LOCK) > LEASE


@pytest.mark.parametrize("spoiled", [LOCK, DONE])
def test_a_lock_with_a_foreign_key_is_handed_over_without_an_error(backend, redis, spoiled):
    begin(backend)
    redis.set(spoiled, "neither hash nor zset")

    assert rotate(backend, RUN, later(A)) is (spoiled == DONE)
    assert redis.get(spoiled) == "neither hash nor zset"


@pytest.mark.parametrize("prefix", ["SINGLETONLOCK_", "a*", "a?c", "[ab]", "back\\slash", "h[^a]llo-", "{slot}:"])
def test_clear_frees_the_locks_of_its_prefix_and_no_others(backend, redis, prefix):
    inside = [lock_key(prefix, "1"), lock_key(prefix, "1") + ":next", prefix]
    others = ["axc{1}", "a", "b", "backslash", "hbllo-1", f"x{prefix}{{1}}", prefix[:-1] or "-"]
    acquire_all(backend, [*inside, *others])
    ended = Ref(lock_key(prefix, "2"), "b", nonce="n")
    begin(backend, ended)
    backend.finish_many([ended], remember_for=MEMORY)

    backend.clear(prefix)

    assert set(redis.keys()) == {*others, done_key(ended.key)}
    assert begin(backend, ended).verdict is Verdict.DONE, "no copy of it runs"


def test_clear_frees_more_locks_than_one_batch_holds(backend, redis):
    acquire_all(backend, [lock_key(PREFIX, str(n)) for n in range(1201)])

    backend.clear(PREFIX)

    assert redis.dbsize() == 0


@pytest.mark.parametrize(("locks", "entries"), [("shop:", "shop:beat:"), ("shop:", "shop:"), ("shop:beat:", "shop:")])
def test_clear_and_locks_leave_entries_under_their_prefix_alone(server, backend, redis, locks, entries):
    with make_app(server.celery_url, {"redbeat_key_prefix": entries, "singleton_key_prefix": locks}) as app:
        Schedule(app).upsert("beat:nightly", "app.task", schedule(60))
    redis.hset("shop:user:7", mapping={"id": "7", "name": "Ada"})
    redis.zadd("shop:orders:done", {"17": 1})
    before = {key: redis.dump(key) for key in redis.scan_iter()}
    acquire(backend, Ref(lock_key(locks, "1"), "a"))

    assert [key for key, _ in backend.locks(locks)] == [lock_key(locks, "1")]
    backend.clear(locks)

    assert {key: redis.dump(key) for key in redis.scan_iter()} == before


@pytest.mark.parametrize("verb", [lambda backend: list(backend.locks(PREFIX)), lambda backend: backend.clear(PREFIX)])
def test_the_locks_of_a_page_take_a_few_round_trips(server, backend, verb):
    acquire_all(backend, [lock_key(PREFIX, str(n)) for n in range(400)])

    with wire.counted() as counted:
        verb(backend)

    assert counted.round_trips <= 10


def test_clear_leaves_the_workers_alone(backend):
    backend.announce("w1@host", ttl=LEASE)

    backend.clear("")
    backend.announce("w1@host", ttl=LEASE)
    backend.clear(PREFIX)

    assert backend.workers_seen()


def test_every_lock_of_a_prefix_is_listed_with_its_record(backend, redis):
    begin(backend)
    acquire(backend, Ref(lock_key(PREFIX, "d2"), "b"))
    acquire(backend, Ref(lock_key("OTHER_", "d3"), "c"))
    finished = Ref(lock_key(PREFIX, "d4"), "d", nonce="n4")
    begin(backend, finished)
    backend.finish_many([finished], remember_for=MEMORY)

    listed = dict(backend.locks(PREFIX))

    assert {key: (record["id"], record["state"]) for key, record in listed.items()} == {
        LOCK: ("a", "running"),
        lock_key(PREFIX, "d2"): ("b", "queued"),
    }
    assert 0 < float(listed[LOCK].pop("ttl")) <= redis.pttl(LOCK) / 1000 + 1
    assert abs(int(listed[LOCK].pop("now")) - int(listed[LOCK]["since"])) < 60_000
    stored = redis.hgetall(LOCK).items()
    assert listed[LOCK] == {name: value for name, value in stored if name not in {"payload", "took_free"}}


def test_a_worker_is_seen_as_long_as_it_announces_itself(backend, redis, lives):
    assert not backend.workers_seen()

    backend.announce("w1@host", ttl=LEASE)

    assert backend.workers_seen()
    assert redis.zrange(WORKERS_KEY, 0, -1) == ["w1@host"]
    assert lives(LEASE, WORKERS_KEY)
    redis.delete(WORKERS_KEY)
    assert not backend.workers_seen()


def test_workers_count_as_seen_for_longer_than_each_is_named(backend, redis):
    """A system may have no worker over the holidays, and one that deploys often has many names."""
    seconds, _ = redis.time()
    redis.zadd(WORKERS_KEY, {"former@host": seconds - NAMED_FOR - 60, "lately@host": seconds - NAMED_FOR + 60})

    backend.announce("w1@host", ttl=ANNOUNCED_FOR)

    assert set(redis.zrange(WORKERS_KEY, 0, -1)) == {"w1@host", "lately@host"}
    assert redis.ttl(WORKERS_KEY) > 25 * 24 * 3600


# ---------------------------------------------------------------- the server

EVERY_VERB: dict[str, Callable[[RedisBackend], object]] = {
    "acquire": acquire,
    "acquire many": lambda backend: backend.acquire_many([call(A), call(Ref("{other}", "b"))]),
    "begin": begin,
    "rotate": lambda backend: rotate(backend, RUN, later(A)),
    "renew": renew,
    "finish": lambda backend: backend.finish_many([RUN], remember_for=MEMORY),
    "announce": lambda backend: backend.announce("w", ttl=LEASE),
    "workers_seen": lambda backend: backend.workers_seen(),
    "retire": lambda backend: backend.retire("w"),
    "workers": lambda backend: backend.workers(),
    "suspect": lambda backend: backend.suspect("place", LOCK),
    "suspects": lambda backend: backend.suspects("place", 1),
    "read": lambda backend: backend.read([LOCK]),
    "note_sent": lambda backend: backend.note_sent({RUN: ""}, lease=LEASE),
    "get": lambda backend: backend.get(LOCK),
    "unlock": lambda backend: backend.unlock(LOCK),
    "clear": lambda backend: backend.clear(PREFIX),
    "locks": lambda backend: list(backend.locks(PREFIX)),
}


@pytest.mark.parametrize("verb", EVERY_VERB.values(), ids=EVERY_VERB)
def test_a_server_that_is_not_there_is_named_without_its_password(verb):
    port = free_port()
    backend = RedisBackend(f"redis://user:geheim@127.0.0.1:{port}/0", timeout=1)

    with pytest.raises(LockBackendError, match=f"127.0.0.1:{port}") as caught:
        verb(backend)

    assert "geheim" not in str(caught.value)


def test_a_server_that_hangs_is_an_error_and_not_a_hang(own_server):
    backend = RedisBackend(own_server.url, timeout=0.2)

    def connected() -> bool:
        with suppress(LockBackendError):  # the time that it may take is short for a busy machine
            return bool(acquire(backend))
        return False

    wait_until(connected)
    own_server.pause()
    try:
        with pytest.raises(LockBackendError):
            begin(backend)
    finally:
        own_server.resume()
    # The server may have executed what it never answered: the same delivery asks again.
    assert begin(RedisBackend(own_server.url)).verdict is Verdict.STARTED


def test_a_server_that_refuses_the_password_is_an_error_of_the_locks():
    with RedisServer(password="richtig") as server:
        assert acquire(RedisBackend(server.url)).verdict is Verdict.ACQUIRED

        with pytest.raises(LockBackendError) as caught:
            acquire(RedisBackend(server.url.replace("richtig", "falsch")))

    assert "falsch" not in str(caught.value)


def test_a_backend_survives_the_restart_of_its_server(own_server):
    backend = RedisBackend(own_server.url)
    acquire(backend)

    own_server.restart()

    assert acquire(backend, B).verdict is Verdict.ACQUIRED
    assert begin(backend, replace(B, nonce="n1")).verdict is Verdict.STARTED


@pytest.mark.parametrize("value", ["x", "", "inf", "nan", "1e400", "-5", "0x10", "9" * 16, "9" * 40, "1.5"])
@pytest.mark.parametrize("field", ["gen", "since", "until", "uncut", "fence", "renewed", "taken", "next_ttl"])
@pytest.mark.parametrize("state", ["queued", "running"])
@pytest.mark.parametrize("place", [LOCK, behind_key(LOCK), turn_key(LOCK)], ids=["lock", "behind", "turn"])
def test_a_field_that_is_no_number_spoils_no_other_lock(backend, redis, place, state, field, value):
    """Any program may write to a lock, and beat sends many calls in one batch."""
    good, record = Ref(lock_key(PREFIX, "d2"), "c", nonce="n"), {"id": "a", "state": state, "gen": "0", "nonce": "n1"}

    def write() -> None:
        redis.delete(LOCK, behind_key(LOCK), turn_key(LOCK))
        redis.hset(place, mapping={**record, "next": "1", "if_held": "join", field: value})

    for id_ in ("a", "b"):
        write()
        for if_held in IfHeld:
            *_, free = backend.acquire_many([call(Ref(LOCK, id_), if_held=if_held), call(good)])
            assert free.verdict is Verdict.ACQUIRED
        write()
        with suppress(UnusableLockError):
            begin(backend, Ref(LOCK, id_, nonce="n1"))
    write()
    begin(backend, good)
    assert backend.renew_many([RUN, good], lease=LEASE)[1] is Renewal.RUNNING
    rotate(backend, RUN, later(A))
    assert [*backend.locks(PREFIX)]
    write()
    backend.finish_many([RUN, good], remember_for=MEMORY, ran=True)
    assert redis.exists(good.key) == 0
    if place == LOCK and state == "running" and field not in {"gen", "next_ttl"}:
        assert redis.hget(LOCK, "state") in {None, "queued"}, "it is freed, or its retry's"


def test_a_call_whose_key_holds_no_lock_says_which_key_to_delete(server, redis):
    task = make_app(server.celery_url).tasks["tests.system.apps.single"]
    key = task.generate_lock(task.name, ["a"])
    redis.set(key, "somebody else's")

    told = f"the lock {key} is unusable: it must be a hash, and its :done a zset (WRONGTYPE): delete"
    with pytest.raises(LockBackendError, match=re.escape(told)):
        task.delay("a")

    assert redis.get(key) == "somebody else's"


def test_release_lock_lets_the_next_call_be_sent_and_frees_no_other(app, redis):
    task = app.tasks["tests.system.apps.single"]
    first, other = task.delay("a", seconds=1), task.delay("b", seconds=1)

    task.release_lock(["a"], {"seconds": 1})

    again = task.delay("a", seconds=1)
    assert again.id != first.id
    assert task.get_existing_task_id(task.generate_lock(task.name, ["a"], {"seconds": 1})) == again.id
    assert task.delay("b", seconds=1).id == other.id


def test_own_connections_are_not_shared(server):
    one, other = RedisBackend(server.url, own_connections=True), RedisBackend(server.url, own_connections=True)

    assert one.redis is one.redis
    assert len({one.redis, other.redis, RedisBackend(server.url).redis}) == 3
    assert RedisBackend(server.url).redis is RedisBackend(server.url).redis


def test_the_holder_of_a_lock_is_readable(backend):
    acquire(backend)
    holder = begin(backend)

    assert str(holder) == f"task a, running since {holder.since:%Y-%m-%d %H:%M:%S}Z"
    backend.finish_many([RUN], remember_for=MEMORY)
    assert str(begin(backend, COPY)) == "task a, ended"


# ---------------------------------------------------------------- the ticket that a message carries

TICKET = Ticket("a", LOCK, LOCK)


@pytest.mark.parametrize(
    "ticket",
    [
        TICKET,
        TICKET.delivered("n1"),
        Ticket("a", LOCK),
        Ticket("a", LOCK, f"{LOCK}:next", waits=True, waited=3, nonce="n1"),
        Ticket("a", LOCK, waits=True, pause=0.25),
    ],
)
def test_a_ticket_comes_back_from_its_own_header(ticket):
    header = json.loads(json.dumps(ticket.header()))

    assert Ticket.of_message({"singlebeat_lock": header, "retries": 0}, "a") == ticket


def test_a_retry_does_not_have_the_pause_of_the_message_before_it():
    header = Ticket("a", LOCK, waits=True, generation=1, pause=2.0).header()

    pauses = [Ticket.of_message({"singlebeat_lock": header, "retries": n}, "a").pause for n in range(3)]

    assert pauses == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("pause", [7, "x", [0], [0, "x"], [0, None], [0, float("nan")], [0, -1], {}, ["0", 1], [[], 1]])
def test_a_pause_that_cannot_be_read_is_none(pause):
    assert Ticket.of_message({"singlebeat_lock": {**TICKET.header(), "pause": pause}}, "a").pause == 0


def test_no_message_pauses_for_longer_than_any_pause_lasts():
    assert Ticket.of_message({"singlebeat_lock": {**TICKET.header(), "pause": [0, float("inf")]}}, "a").pause == 5


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"singlebeat_lock": None},
        {"singlebeat_lock": "text"},
        {"singlebeat_lock": {"id": "a"}},
        {"singlebeat_lock": {"key": "", "id": "a"}},
        {"singlebeat_lock": {"key": LOCK}},
        {"singlebeat_lock": Ticket("b", LOCK).header()},
    ],
)
def test_a_header_that_is_not_of_this_task_is_no_ticket(headers):
    assert Ticket.of_message(headers, "a") is None


def test_a_generation_rises_with_every_retry_and_every_replacement():
    def generation(**headers: int | None) -> int:
        return Ticket.of_message({"singlebeat_lock": TICKET.header(), **headers}, "a").run.generation

    steps = [
        generation(),
        generation(retries=1, replaced_task_nesting=None),
        generation(retries=2),
        generation(retries=0, replaced_task_nesting=1),
        generation(retries=1, replaced_task_nesting=1),
        generation(replaced_task_nesting=2),
    ]
    assert steps == sorted(set(steps))
    assert generation(retries=None) == generation() == 0


def test_a_ticket_names_every_lock_that_its_message_holds():
    behind = f"{LOCK}:next"

    assert TICKET.delivered("n1").refs == (RUN,)
    assert Ticket("a", LOCK).refs == (A,)
    assert Ticket("a", LOCK, behind, nonce="n1").refs == (RUN, Ref(behind, "a", nonce="n1"))


def test_a_successor_holds_the_lock_of_the_run_while_it_waits():
    successor = Ticket("a", LOCK, f"{LOCK}:next", nonce="n1").successor(2)

    assert successor.refs == (Ref(LOCK, "a", 2),)


def test_the_lock_that_was_suspected_first_is_examined_first(redis, server):
    """Else calls that are made again and again keep others from their turn."""
    backend = RedisBackend(server.url)
    for lock in ("z", "b", "a", "z"):
        backend.suspect("place", lock)

    assert [*backend.suspects("place", 2)] == ["z", "b"]
    backend.suspect("place", "b")
    assert [*backend.suspects("place", 2)] == ["a", "b"]
