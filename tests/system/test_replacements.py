"""A run that replaces itself by an equal call: what comes after it is never lost, in a chain, a group or a chord."""

from __future__ import annotations

import pytest
from celery import chain, chord, group

from singlebeat.overlap import Overlap
from tests.support import wait_until
from tests.system.singles import PATIENCE, open_stage

#: A call that replaces itself twice, and what stands around it.
AROUND = {
    "alone": lambda call, after: call,
    "before a step": chain,
    "before a chain": lambda call, after: chain(call, chain(after, after)),
    "before a group": lambda call, after: chain(call, group(after, after)),
    "before a chord": lambda call, after: chain(call, group(after, after), after),
    "last of a chain": lambda call, after: chain(after, call),
    "in a header": lambda call, after: chord([chain(call, after), after], after),
    "a body": lambda call, after: chord([after, after], call),
    "a body that goes on": lambda call, after: chord([after, after], chain(call, after)),
}

BY = [
    "equal",
    "chain(equal)",
    "chain(equal, other)",
    "chain(other, equal)",
    "group(equal, other)",
    "chord([equal, other], other)",
    "chord([other, other], equal)",
]


@pytest.fixture(scope="module", params=["prefork", "threads"])
def stage(request, tmp_path_factory):
    with open_stage(tmp_path_factory.mktemp("replacements"), "-P", request.param, "-c", "4") as stage:
        yield stage


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("by", BY)
def test_what_follows_a_run_that_replaces_itself_comes(stage, name, by, around):
    after, results = stage.task("plain").si(f"{name}, after", "after", 0), {}
    for word in Overlap:
        call = stage.task(f"replaced_{word}").si(f"{name}, {word}", by, 2 if by == "equal" else 1)
        results[word] = AROUND[around](call, after).apply_async()

    for word, result in results.items():
        # Not by ``get``: Celery's subscription may come after the end of a result, which it then misses.
        wait_until(result.ready, timeout=PATIENCE, what=f"the result of {word}")
        assert result.successful(), word
        stage.free(stage.lock(f"replaced_{word}", f"{name}, {word}", by))
        assert stage.oracle.max_concurrent(f"{name}, {word}") == 1 or word is Overlap.ALLOW_ALL
