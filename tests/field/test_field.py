"""The short form of the field test bed: fixed seeds, a small fleet, half a minute of faults each.

The long form is ``python -m tests.field``; so is a seed that fails here, which it prints first.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.bed import Bed
from tests.field.observer import Records, check, counts
from tests.field.plan import make_plan
from tests.field.topology import faults_of
from tests.support import measured

#: Seconds of faults; the fleet's start and its rest take as long again.
SECONDS = 20

#: Of many seeds those whose faults are of many kinds and meet one another.
SEEDS = (("one", 1), ("two", 100))
MIXED = 8


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("topology", "seed"), SEEDS)
def test_no_promise_is_broken_under_seeded_faults(topology, seed):
    records = run(seed, topology=topology, kinds=faults_of(topology), beats=2, workers=2)

    assert len({decision.id for decision in records.decisions}) > 3 * SECONDS


@pytest.mark.timeout(240)
def test_no_promise_is_broken_beside_redbeat_and_a_bare_worker():
    kinds = ["handed_over", "beat_killed", "worker_killed", "delivered_again"]

    records = run(MIXED, topology="one", kinds=kinds, beats=1, workers=1, mixed=True)

    assert records.redbeat_led
    assert any(message.is_redbeats for message in records.messages)
    assert any(map(records.is_bare, records.runs))


def run(seed: int, **how: Any) -> Records:
    """Return the records of a run in which no check has found anything."""
    # Without wrong clocks: those need libfaketime, and the plan shall be the same without it.
    plan = make_plan(seed, SECONDS, clocks=False, gap=2, longest=4, **how)
    measured("\n".join(plan.lines()))
    with Bed(plan, say=measured) as bed:
        records = bed.run()
    records.slack = 15.0  # other tests use the machine as well
    measured(", ".join(f"{name} {count}" for name, count in counts(records).items()))
    found = check(records)
    assert not found, "\n".join(map(str, found))
    return records
