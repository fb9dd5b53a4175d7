"""A call that a caller waits for is never swallowed by its equal; and the results that come back from a worker."""

from __future__ import annotations

import pickle

import pytest
from celery import chain, chord, group

from singlebeat import DuplicateTaskError
from singlebeat.errors import ConfigError, EntryError, LockBackendError, SinglebeatError
from tests.support import wait_until
from tests.system.singles import PATIENCE, open_stage


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with open_stage(tmp_path_factory.mktemp("continuations"), "-P", "threads", "-c", "8") as stage:
        yield stage


@pytest.fixture(params=["alone", "beside an equal call"])
def held(request, stage, name):
    """Ids of the runs that were there before: none, or an equal call that runs until ``stage.oracle.let_go(name)``."""
    if request.param == "alone":
        return []
    first = stage.task("single").delay(name, "held")
    stage.oracle.wait_started(1, name)
    return [first.id]


def quick(stage, name, value=None):
    """Return the signature of a call that equals every other one of this name; it ends when its turn has come."""
    return stage.task("single").si(name, value, 0)


def test_a_chain_of_equal_calls_comes_to_its_end(stage, held, name):
    last = chain(quick(stage, name, value) for value in (1, 2, 3)).apply_async()
    ids = [last.parent.parent.id, last.parent.id, last.id]
    assert len(set(ids)) == 3

    stage.oracle.let_go(name)

    assert last.get(timeout=PATIENCE) == 3
    assert [run.id for run in stage.oracle.runs(name)] == held + ids
    assert stage.oracle.max_concurrent(name) == 1
    stage.free(stage.lock("single", name))


def test_the_last_step_of_a_chain_waits_for_its_turn(stage, held, name):
    last = chain(stage.task("plain").si(f"{name}, before", 1, 0), quick(stage, name, 2)).apply_async()
    before = stage.oracle.wait_ended(1, f"{name}, before")
    assert [run.id for run in before] == [last.parent.id]

    _let_go_when_waiting(stage, held, name, last.id)

    assert last.get(timeout=PATIENCE) == 2
    stage.over(name, [*held, last.id])
    assert stage.oracle.max_concurrent(name) == 1


def test_two_chains_that_begin_alike_come_to_their_ends(stage, held, name):
    ends = [f"{name}, {number}" for number in (1, 2)]
    chains = [chain(quick(stage, name), stage.task("plain").si(end, end, 0)).apply_async() for end in ends]

    stage.oracle.let_go(name)

    assert [one.get(timeout=PATIENCE) for one in chains] == ends
    stage.over(name, held + [one.parent.id for one in chains])
    assert stage.oracle.max_concurrent(name) == 1


def test_a_group_of_equal_calls_yields_all_results(stage, held, name):
    results = group(quick(stage, name, value) for value in (1, 2, 3)).apply_async()

    stage.oracle.let_go(name)

    assert results.get(timeout=PATIENCE) == [1, 2, 3]
    assert len({result.id for result in results}) == 3
    stage.over(name, held + [result.id for result in results])
    assert stage.oracle.max_concurrent(name) == 1


def test_a_chord_of_equal_calls_comes_to_its_body(stage, held, name):
    body = chord([quick(stage, name, value) for value in (1, 2, 3)])(stage.task("plain").si(f"{name}, body", "body", 0))

    stage.oracle.let_go(name)

    assert body.get(timeout=PATIENCE) == "body"
    stage.over(name, held + [result.id for result in body.parent])
    assert stage.oracle.max_concurrent(name) == 1


def test_the_body_of_a_chord_waits_for_its_turn(stage, held, name):
    body = chord([stage.task("plain").si(f"{name}, header", 1, 0)] * 2)(quick(stage, name, 2))
    stage.oracle.wait_ended(2, f"{name}, header")

    _let_go_when_waiting(stage, held, name, body.id)

    assert body.get(timeout=PATIENCE) == 2
    stage.over(name, [*held, body.id])


def test_a_call_that_a_task_becomes_waits_for_its_turn(stage, held, name):
    first = stage.task("become").delay(stage.task("single").name, name, 2, 0)

    _let_go_when_waiting(stage, held, name, first.id)

    assert first.get(timeout=PATIENCE) == 2
    stage.over(name, [*held, first.id])


def _let_go_when_waiting(stage, held, name, task_id):
    """Let the equal call end when the other has been taken up or swallowed: before, it would meet no call."""
    if held:
        wait_until(
            lambda: stage.worker.matches(rf"{task_id}\] waits for its turn|is a duplicate of task {held[0]}"),
            timeout=PATIENCE,
            what="the call to meet its equal",
        )
        stage.oracle.let_go(name)


def test_the_links_of_equal_calls_fire(stage, held, name):
    after = f"{name}, after"
    results = [quick(stage, name, n).apply_async(link=stage.task("plain").si(f"{after} {n}", n, 0)) for n in (1, 2)]

    stage.oracle.let_go(name)

    assert [result.get(timeout=PATIENCE) for result in results] == [1, 2]
    for n, result in enumerate(results, 1):
        stage.oracle.wait_ended(1, f"{after} {n}", timeout=PATIENCE)
        assert [child.get(timeout=PATIENCE) for child in result.children] == [n]
    stage.over(name, held + [result.id for result in results])
    assert stage.oracle.max_concurrent(name) == 1


def test_the_error_links_of_equal_calls_fire(stage, name):
    task, results = stage.task("fail"), []
    for n in (1, 2):
        after = stage.task("plain").si(f"{name}, after {n}", n, 0)
        results.append(task.apply_async((name,), link_error=after))
    assert results[0].id != results[1].id
    stage.oracle.wait_started(1, name)

    stage.oracle.let_go(name, 2)

    for n, result in enumerate(results, 1):
        with pytest.raises(RuntimeError, match="as asked"):
            result.get(timeout=PATIENCE)
        stage.oracle.wait_ended(1, f"{name}, after {n}", timeout=PATIENCE)
    stage.over(name, [result.id for result in results])
    assert stage.oracle.max_concurrent(name) == 1


def test_a_duplicate_yields_the_result_of_the_other_call(stage, name):
    first = stage.task("single").delay(name, {"of": "the first"})
    second = stage.task("single").delay(name, {"of": "the second"})

    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.id == first.id
    stage.oracle.let_go(name)
    assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE) == {"of": "the first"}
    stage.over(name, [first.id])


#: Every error that the package can raise, and what each is made of.
ERRORS = [
    *((kind, ("set it to 1",)) for kind in (SinglebeatError, ConfigError, EntryError, LockBackendError)),
    (DuplicateTaskError, ("an equal call is queued as task x", "x")),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(("kind", "args"), ERRORS)
def test_an_error_survives_every_pickle(kind, args, protocol):
    _check_same(pickle.loads(pickle.dumps(kind(*args), protocol)), kind(*args))


@pytest.mark.parametrize(("kind", "args"), ERRORS)
def test_an_error_that_a_task_raises_is_raised_where_its_result_is_awaited(stage, kind, args):
    result = stage.task("raise_error").delay(kind.__name__, *args)

    with pytest.raises(kind) as caught:
        result.get(timeout=PATIENCE)

    _check_same(caught.value, kind(*args))


@pytest.mark.parametrize(("kind", "args"), ERRORS)
def test_an_error_survives_results_that_are_pickled(stage, name, kind, args):
    app = stage.app(result_serializer="pickle", accept_content=["pickle", "json"])
    app.backend.mark_as_failure(name, kind(*args))

    with pytest.raises(kind) as caught:
        app.AsyncResult(name).get(timeout=PATIENCE)

    _check_same(caught.value, kind(*args))


def _check_same(error, given):
    assert type(error) is type(given)
    assert (str(error), error.args, vars(error)) == (str(given), given.args, vars(given))
