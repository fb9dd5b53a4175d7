"""Every kind of lock and every policy for a call that meets its equal, on a real worker; and what makes calls equal."""

from __future__ import annotations

from functools import cached_property

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from kombu.utils.uuid import uuid

from singlebeat import DuplicateTaskError, Singleton
from singlebeat.errors import ConfigError
from singlebeat.locks.base import HEADER
from singlebeat.locks.key import behind_key, turn_key
from singlebeat.locks.modes import LockMode
from singlebeat.overlap import Overlap
from tests.support import wait_until
from tests.system.singles import PATIENCE, open_stage, task_name

#: Seconds of the worker's lease: renewals come every third of it.
LEASE = 4.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with open_stage(tmp_path_factory.mktemp("kinds"), "-c", "4", conf={"singlebeat_lock_lease": LEASE}) as stage:
        yield stage


# ---------------------------------------------------------------- lock: when a call excludes its equals


def test_until_executed_excludes_from_the_call_to_the_end_of_the_run(stage, name):
    task = stage.task("until_executed")
    first = task.apply_async((name,), queue=name)
    assert task.delay(name) == first, "while it waits"

    stage.consume(name)
    stage.oracle.wait_started(1, name)
    assert task.delay(name) == first, "while it runs"

    stage.oracle.let_go(name)
    first.get(timeout=PATIENCE)
    second = task.delay(name, seconds=60)
    assert second != first
    stage.oracle.let_go(name)
    stage.over(name, [first.id, second.id])
    assert stage.oracle.max_concurrent(name) == 1


def test_until_executing_excludes_from_the_call_to_the_start_of_the_run(stage, name):
    task = stage.task("until_executing")
    first = task.apply_async((name,), queue=name)
    assert task.delay(name) == first, "while it waits"

    stage.consume(name)
    stage.oracle.wait_started(1, name)
    second = task.delay(name)
    assert second != first
    stage.oracle.wait_started(2, name)
    assert stage.oracle.max_concurrent(name) == 2

    stage.oracle.let_go(name, 2)
    stage.over(name, [first.id, second.id])
    stage.free(stage.lock("until_executing", name))


def test_until_expired_excludes_until_its_expiry_after_its_run(stage, name):
    task, lock = stage.task("until_expired"), stage.lock("until_expired", name)
    first = task.apply_async((name,), queue=name)
    assert task.delay(name) == first, "while it waits"

    stage.consume(name)
    stage.oracle.wait_started(1, name)
    assert task.delay(name) == first, "while it runs"

    stage.oracle.let_go(name)
    first.get(timeout=PATIENCE)
    assert task.delay(name) == first, "when it has ended"
    assert 0 < stage.redis.pttl(lock) <= 600_000
    stage.over(name, [first.id])


def test_until_expired_excludes_no_longer_than_its_expiry(stage, name):
    task = stage.task("until_soon_expired")
    first = task.delay(name)
    stage.oracle.wait_started(1, name)

    stage.free(stage.lock("until_soon_expired", name))
    second = task.delay(name)

    assert second != first
    stage.oracle.wait_started(2, name)
    stage.oracle.let_go(name, 2)
    stage.over(name, [first.id, second.id])


def test_while_executing_excludes_from_the_start_to_the_end_of_the_run(stage, name):
    task = stage.task("while_executing")
    first = task.apply_async((name,), queue=name)
    stage.consume(name)
    stage.oracle.wait_started(1, name)

    second = task.delay(name)
    assert second.id != first.id
    with pytest.raises(TaskRevokedError, match=f"held by task {first.id}"):
        second.get(timeout=PATIENCE)

    stage.oracle.let_go(name)
    first.get(timeout=PATIENCE)
    third = task.delay(name)
    stage.oracle.let_go(name)
    third.get(timeout=PATIENCE)
    stage.over(name, [first.id, third.id])
    stage.free(stage.lock("while_executing", name))


def test_while_executing_does_not_exclude_calls_that_wait(stage, name):
    task = stage.task("while_executing_in_turn")
    results = [task.apply_async((name,), queue=name) for _ in range(2)]
    assert results[0].id != results[1].id
    assert not any(result.is_duplicate for result in results)

    stage.consume(name)
    stage.oracle.let_go(name, 2)

    stage.over(name, [result.id for result in results])
    assert stage.oracle.max_concurrent(name) == 1


def test_until_and_while_executing_lets_one_run_and_one_wait(stage, name):
    task = stage.task("until_and_while_executing")
    first = task.apply_async((name,), queue=name)
    assert task.delay(name) == first, "while it waits"

    stage.consume(name)
    stage.oracle.wait_started(1, name)
    second = task.delay(name)
    assert second != first
    assert not second.is_duplicate
    third = task.delay(name)
    assert third == second
    assert third.is_duplicate

    stage.oracle.let_go(name, 2)
    stage.over(name, [first.id, second.id])
    assert stage.oracle.max_concurrent(name) == 1
    lock = stage.lock("until_and_while_executing", name)
    stage.free(lock, behind_key(lock))


# ---------------------------------------------------------------- overlap: what becomes of a call that meets its equal


@pytest.fixture(params=["by the task", "by the call", "by the app"])
def call(request, stage):
    """Sends a call under a policy that is its task's, its own or the app's; its value makes it no other call."""

    def call(overlap, name, value=None, **options):
        if request.param == "by the task":
            return stage.task(overlap).apply_async((name, value), **options)
        if request.param == "by the call":
            return stage.task("single").apply_async((name, value), overlap=overlap, **options)
        return stage.task("single", singlebeat_overlap=overlap).apply_async((name, value), **options)

    def lock(overlap, name):
        return stage.lock(overlap if request.param == "by the task" else "single", name)

    call.lock = lock
    return call


def test_skip_sends_nothing_and_returns_the_result_of_the_other(stage, call, name):
    first = call("skip", name, 1)
    stage.oracle.wait_started(1, name)
    second = call("skip", name, 2)

    assert second == first
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    stage.oracle.let_go(name)
    assert second.get(timeout=PATIENCE) == 1
    stage.over(name, [first.id])
    stage.free(call.lock("skip", name))


def test_raise_sends_nothing_and_names_the_other(stage, call, name):
    first = call("raise", name, 1)
    stage.oracle.wait_started(1, name)

    with pytest.raises(DuplicateTaskError, match=first.id) as caught:
        call("raise", name, 2)

    assert caught.value.task_id == first.id
    stage.oracle.let_go(name)
    assert first.get(timeout=PATIENCE) == 1
    stage.over(name, [first.id])
    stage.free(call.lock("raise", name))


def test_buffer_one_runs_once_more_with_the_latest_arguments(stage, call, name):
    first = call("buffer_one", name, 1)
    stage.oracle.wait_started(1, name)
    second, third, fourth = (call("buffer_one", name, value) for value in (2, 3, 4))

    assert second != first
    assert third == fourth == second
    assert [result.is_duplicate for result in (first, second, third, fourth)] == [False, False, True, True]
    stage.oracle.let_go(name, 2)
    assert first.get(timeout=PATIENCE) == 1
    assert second.get(timeout=PATIENCE) == 4
    stage.over(name, [first.id, second.id])
    assert stage.oracle.max_concurrent(name) == 1
    lock = call.lock("buffer_one", name)
    stage.free(lock, behind_key(lock))


@pytest.mark.parametrize("overlap", ["buffer_one", "cancel_other", "terminate_other"])
def test_an_older_call_without_its_lock_leaves_it_to_the_newer_one(stage, name, overlap):
    """The newer one has the latest arguments, or takes the place of older ones."""
    task = stage.task(overlap)
    older = task.apply_async((name, 1), queue=name)
    stage.redis.delete(stage.lock(overlap, name))  # as at its end
    newer = task.apply_async((name, 2), queue=f"{name} later")

    stage.consume(name)
    wait_until(lambda: older.state == "REVOKED", timeout=PATIENCE, what="the older call to be dropped")
    stage.consume(f"{name} later")
    stage.oracle.let_go(name)

    assert newer.get(timeout=PATIENCE) == 2
    assert [run.id for run in stage.oracle.runs(name)] == [newer.id]


@pytest.mark.parametrize("overlap", ["buffer_one", "cancel_other"])
def test_the_last_run_is_never_that_of_an_older_call(stage, name, overlap):
    task = stage.task(overlap)
    first = task.apply_async((name, 1))
    stage.oracle.wait_started(1, name)
    older = task.apply_async((name, 2))
    stage.postponed(older.id, 4)  # it sleeps for seconds by now
    stage.oracle.let_go(name, 3)
    first.get(timeout=PATIENCE)

    latest = task.apply_async((name, 3))  # while the older one sleeps between two tries

    assert latest.get(timeout=PATIENCE) == 3
    stage.quiet(name)
    assert stage.oracle.runs(name)[-1].id == latest.id
    assert stage.oracle.max_concurrent(name) == 1
    lock = stage.lock(overlap, name)
    stage.free(lock, behind_key(lock))


def test_newer_calls_do_not_starve_a_call_that_waits_for_its_turn(stage, name):
    task = stage.task("single")
    first = task.apply_async((name, 1))
    stage.oracle.wait_started(1, name)
    waiting = task.apply_async((name, 2), overlap="buffer_all")
    stage.postponed(waiting.id, 4)  # it sleeps for seconds by now
    stage.oracle.let_go(name)
    first.get(timeout=PATIENCE)

    newer = task.apply_async((name, 3), overlap="skip")

    assert (newer.id, newer.is_duplicate) == (waiting.id, True)
    stage.oracle.let_go(name)
    assert waiting.get(timeout=PATIENCE) == 2


def test_a_revoked_call_leaves_its_turn_to_the_next_one(stage, name):
    task = stage.task("single")
    first = task.apply_async((name, 1))
    stage.oracle.wait_started(1, name)
    waiting = task.apply_async((name, 2), overlap="buffer_all")
    stage.postponed(waiting.id, 2)
    waiting.revoke()
    stage.oracle.let_go(name)
    first.get(timeout=PATIENCE)
    with pytest.raises(TaskRevokedError):
        waiting.get(timeout=PATIENCE)
    stage.free(turn_key(stage.lock("single", name)))

    newer = task.apply_async((name, 3))

    assert not newer.is_duplicate
    stage.oracle.let_go(name)
    assert newer.get(timeout=PATIENCE) == 3


def test_a_run_that_another_call_waits_for_goes_on_with_its_retry(stage, name):
    task = stage.task("retry_after")
    first = task.apply_async((name, 1, 0.5))
    stage.oracle.wait_started(1, name)
    second = task.apply_async((name, 2), overlap="cancel_other")
    stage.oracle.let_go(name, 3)

    assert first.get(timeout=PATIENCE) == 1
    assert second.get(timeout=PATIENCE) == 2
    assert stage.oracle.max_concurrent(name) == 1


def test_buffer_all_lets_each_wait_for_its_turn(stage, call, name):
    first = call("buffer_all", name, 1)
    stage.oracle.wait_started(1, name)
    results = [first, *(call("buffer_all", name, value) for value in (2, 3, 4))]

    assert len({result.id for result in results}) == 4
    stage.oracle.let_go(name, 4)
    assert [result.get(timeout=PATIENCE) for result in results] == [1, 2, 3, 4]
    stage.over(name, [result.id for result in results])
    assert stage.oracle.max_concurrent(name) == 1
    stage.free(call.lock("buffer_all", name))


def test_cancel_other_runs_after_a_run_that_has_begun(stage, call, name):
    first = call("cancel_other", name, 1)
    stage.oracle.wait_started(1, name)
    second = call("cancel_other", name, 2)

    assert second != first
    assert not second.is_duplicate
    stage.oracle.let_go(name, 2)
    assert second.get(timeout=PATIENCE) == 2
    stage.over(name, [first.id, second.id])
    assert stage.oracle.max_concurrent(name) == 1
    lock = call.lock("cancel_other", name)
    stage.free(lock, behind_key(lock))


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_a_call_evicts_a_call_that_has_not_begun(stage, call, name, overlap):
    first = call(overlap, name, 1, queue=name)
    second = call(overlap, name, 2, queue=name)

    assert second != first
    stage.consume(name)
    with pytest.raises(TaskRevokedError):
        first.get(timeout=PATIENCE)
    stage.oracle.let_go(name)
    assert second.get(timeout=PATIENCE) == 2
    stage.over(name, [second.id])
    stage.free(call.lock(overlap, name))


@pytest.mark.parametrize("overlap", ["cancel_other", "terminate_other"])
def test_an_evicted_call_does_not_run_after_the_call_that_evicted_it(stage, name, overlap):
    first = stage.task(overlap).apply_async((name, 1), queue=name)
    second = stage.task(overlap).apply_async((name, 2, 0))
    assert second.get(timeout=PATIENCE) == 2

    stage.consume(name)
    stage.oracle.let_go(name)
    with pytest.raises(TaskRevokedError):
        first.get(timeout=PATIENCE)
    stage.over(name, [second.id])


def test_terminate_other_ends_the_run_and_begins_after_it(stage, call, name):
    first = call("terminate_other", name, 1)
    (begun,) = stage.oracle.wait_started(1, name)
    second = call("terminate_other", name, 2)

    assert second != first
    with pytest.raises(TaskRevokedError, match="terminated"):
        first.get(timeout=PATIENCE)
    stage.oracle.wait_started(2, name)
    assert not begun.lives
    stage.oracle.let_go(name)
    assert second.get(timeout=PATIENCE) == 2
    assert [run.id for run in stage.oracle.runs(name)] == [first.id, second.id]
    assert stage.oracle.max_concurrent(name) == 1
    lock = call.lock("terminate_other", name)
    stage.free(lock, behind_key(lock))


def test_allow_all_runs_beside_the_other(stage, call, name):
    first = call("allow_all", name, 1)
    second = call("allow_all", name, 2)

    assert second != first
    assert {run.id for run in stage.oracle.wait_started(2, name)} == {first.id, second.id}
    assert stage.oracle.max_concurrent(name) == 2
    stage.oracle.let_go(name, 2)
    assert [first.get(timeout=PATIENCE), second.get(timeout=PATIENCE)] == [1, 2]
    stage.over(name, [first.id, second.id])


def test_a_calls_policy_precedes_its_tasks_and_its_tasks_the_apps(stage, name):
    conf = {"singlebeat_overlap": "buffer_all"}
    first = stage.task("raise", **conf).delay(name)

    assert stage.task("raise", **conf).apply_async((name,), overlap="skip") == first
    with pytest.raises(DuplicateTaskError):
        stage.task("raise", **conf).delay(name)

    stage.oracle.let_go(name)
    stage.over(name, [first.id])


def test_an_app_policy_that_contradicts_a_lock_leaves_its_tasks_alone(stage, name):
    first = stage.task("until_executing", singlebeat_overlap="terminate_other").apply_async((name,), queue=name)

    again = stage.task("until_executing", singlebeat_overlap="terminate_other").delay(name)

    assert again == first
    assert again.is_duplicate


#: What makes no sense: a lock that does not reach to the end of the run cannot name what is to wait or to end.
CONTRADICTIONS = [
    *((lock, overlap) for lock in ("until_executing", "until_expired", "until_and_while_executing") for overlap in (
        "buffer_one", "buffer_all", "cancel_other", "terminate_other")),
    *(("while_executing", overlap) for overlap in ("raise", "buffer_one", "cancel_other", "terminate_other")),
]  # fmt: skip


@pytest.mark.parametrize(("lock", "overlap"), [(str(lock), str(overlap)) for lock in LockMode for overlap in Overlap])
def test_a_task_with_contradicting_options_is_refused_at_definition(lock, overlap):
    options = {"lock": lock, "overlap": overlap, "lock_expiry": 60}

    if (lock, overlap) not in CONTRADICTIONS:
        assert define(**options).overlap == overlap
        return
    with pytest.raises(ConfigError, match=rf"task defined: overlap={overlap} contradicts lock={lock}"):
        define(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lock": "until_finished"}, "lock must be one of until_executed, .*, not 'until_finished'"),
        ({"overlap": "queue"}, "overlap must be one of skip, .*, not 'queue'"),
        ({"lock": "until_expired"}, "lock=until_expired needs lock_expiry"),
        *(
            ({"lock_expiry": wrong}, "lock_expiry must be a positive number of seconds, or None, not")
            for wrong in (0, -5, "60", True, float("nan"), float("inf"))
        ),
        ({"overlap": "skip", "raise_on_duplicate": True}, "overlap=skip contradicts raise_on_duplicate=True"),
        ({"overlap": "raise", "raise_on_duplicate": False}, "overlap=raise contradicts raise_on_duplicate=False"),
        ({"unique_on": ["user.id"]}, "unique_on names 'user.id', which is no argument of the task; .*: account"),
        ({"unique_on": 5}, "unique_on must be a name of an argument, a list of such names, or a function .*, not 5"),
        ({"unique_on": ["account", 5]}, r"unique_on must be .*, not \['account', 5\]"),
    ],
)
def test_a_wrong_option_is_refused_when_the_task_is_defined(options, named):
    with pytest.raises(ConfigError, match=f"task defined: {named}"):
        define(**options)


def test_a_lock_expiry_may_be_computed_by_a_property_of_any_kind():
    class Fixed(Singleton):
        abstract = True
        lock_expiry = property(lambda self: 60.0)

    class Cached(Singleton):
        abstract = True

        @cached_property
        def lock_expiry(self):
            return 60.0

    assert [define(base=base).effective_lock_expiry for base in (Fixed, Cached)] == [60, 60]


def define(**options):
    def body(account):
        pass

    return Celery(set_as_current=False).task(
        body, name="defined", shared=False, lazy=False, **{"base": Singleton, **options}
    )


@pytest.mark.parametrize(("lock", "overlap"), CONTRADICTIONS)
def test_a_call_whose_policy_contradicts_the_lock_of_its_task_is_not_sent(stage, name, lock, overlap):
    with pytest.raises(ConfigError, match=f"overlap={overlap} contradicts lock={lock}"):
        stage.task(lock).apply_async((name,), overlap=overlap)

    assert not stage.redis.exists(stage.lock(lock, name))


# ---------------------------------------------------------------- unique_on: what makes two calls equal


@pytest.mark.parametrize(
    ("task", "value", "equal", "other"),
    [
        ("on_names", "a", "a", "b"),
        (
            "on_a_path",
            {"user": {"id": 1, "seen": 1}},
            {"user": {"id": 1, "seen": 2}},
            {"user": {"id": 2, "seen": 1}},
        ),
        ("on_a_function", "apple", "avocado", "banana"),
    ],
)
def test_unique_on_decides_which_calls_are_equal(stage, name, task, value, equal, other):
    task = stage.task(task)
    first = task.delay(name, value)

    assert task.delay(value=equal, name=name, seconds=30) == first
    second = task.delay(name, other)
    assert second != first

    stage.oracle.let_go(name, 2)
    assert [first.get(timeout=PATIENCE), second.get(timeout=PATIENCE)] == [value, other]
    stage.over(name, [first.id, second.id])


def test_an_empty_unique_on_makes_all_calls_equal(stage, name):
    task = stage.task("on_nothing")
    first = task.delay(name, 1)

    assert task.delay("another name", 2) == first

    stage.oracle.let_go(name)
    stage.over(name, [first.id])
    stage.free(stage.lock("on_nothing", name))


# ---------------------------------------------------------------- the run: who holds the lock, and how long


def test_a_call_that_is_sent_by_name_takes_its_lock_at_the_start(stage, name):
    first = stage.app().send_task(task_name("until_executed"), (name,))
    stage.oracle.wait_started(1, name)

    assert stage.task("until_executed").delay(name) == first
    second = stage.app().send_task(task_name("until_executed"), (name,))
    with pytest.raises(TaskRevokedError, match=f"held by task {first.id}"):
        second.get(timeout=PATIENCE)

    stage.oracle.let_go(name)
    stage.over(name, [first.id])
    stage.free(stage.lock("until_executed", name))


def test_a_message_of_which_no_key_can_be_made_does_not_stop_its_worker(stage, name):
    short = task_name("on_a_path")
    with stage.app().producer_pool.acquire(block=True) as producer:
        headers = {"task": short, "id": uuid()}
        producer.publish(([], ["no", "mapping"], {}), headers=headers, routing_key="celery")
    stage.worker.wait_for(rf"{short}\[{headers['id']}\] runs without its lock", timeout=PATIENCE)

    header = {"id": uuid(), "key": stage.lock("single", name), "waited": "often"}
    stage.app().send_task(task_name("single"), (name, 1, 0), task_id=header["id"], headers={HEADER: header})

    stage.over(name, [header["id"]])
    assert stage.worker.returncode is None


def test_lock_expiry_counts_from_the_call_through_all_retries(stage, name):
    task, lock = stage.task("retry_once"), stage.lock("retry_once", name)
    first = task.apply_async((name,), countdown=0.2)
    until = stage.redis.hget(lock, "until")
    assert until

    for runs in (1, 2):
        stage.oracle.wait_started(runs, name)
        assert stage.redis.hmget(lock, "id", "until") == [first.id, until]
        stage.oracle.let_go(name)
    stage.over(name, [first.id, first.id])
    stage.free(lock)


def test_the_fence_rises_from_run_to_run(stage, name):
    task, fences = stage.task("report"), []
    for _ in range(3):
        stage.oracle.let_go(name)
        run = task.delay(name).get(timeout=PATIENCE)
        assert run["lost"] is False
        fences.append(run["fence"])
    # Also when nothing is left that remembers the last one.
    stage.redis.delete(stage.lock("report", name), stage.lock("report", name) + ":done")
    stage.oracle.let_go(name)
    fences.append(task.delay(name).get(timeout=PATIENCE)["fence"])

    assert fences[0] > 0
    assert fences == sorted(set(fences))


def test_a_run_that_loses_its_lock_knows_it_and_its_worker_logs_it(stage, name):
    task, lock = stage.task("report"), stage.lock("report", name)
    first = task.delay(name)
    stage.oracle.wait_started(1, name)
    _wait_for_renewal(stage.redis, lock)

    task.unlock(lock)

    stage.worker.wait_for(rf"{first.id}\] runs on without its lock, or has just ended: it was lost")
    stage.worker.wait_for(rf"lock_lost: {task.name} {first.id}")
    second = task.delay(name)
    assert second != first
    stage.oracle.wait_started(2, name)
    stage.oracle.let_go(name, 2)
    one, other = first.get(timeout=PATIENCE), second.get(timeout=PATIENCE)
    assert (one["lost"], other["lost"]) == (True, False)
    assert other["fence"] > one["fence"]
    stage.over(name, [first.id, second.id])
    stage.free(lock)


def _wait_for_renewal(redis, lock):
    """Return when the worker has renewed the lock of a run: its time left has risen."""
    least = redis.pttl(lock)

    def risen():
        nonlocal least
        left = redis.pttl(lock)
        least = min(least, left)
        return left > least

    wait_until(risen, timeout=PATIENCE, what="a renewal")


def test_a_body_that_makes_its_own_call_again_meets_itself(stage, name):
    first = stage.task("again").delay(name)

    assert first.get(timeout=PATIENCE) == first.id
    stage.over(name, [first.id])


def test_an_eager_body_that_makes_its_own_call_again_meets_itself(stage, name, monkeypatch):
    monkeypatch.setenv("SB_TEST_ORACLE_URL", f"{stage.server.url}?db=15")
    first = stage.task("again", task_always_eager=True).delay(name)

    assert first.get() == first.id
