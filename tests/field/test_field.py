"""The short form of the field test bed: fixed seeds, a small fleet, half a minute of faults each.

The long form is ``python -m tests.field``; so is a seed that fails here, which it prints first.
"""

from __future__ import annotations

import pytest

from tests.field.bed import Bed
from tests.field.observer import check, counts
from tests.field.plan import make_plan
from tests.field.topology import faults_of
from tests.support import measured

#: Seconds of faults; the fleet's start and its rest take as long again.
SECONDS = 20

#: Of many seeds those whose faults are of many kinds and meet one another.
SEEDS = (("one", 1), ("two", 100))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("topology", "seed"), SEEDS)
def test_no_promise_is_broken_under_seeded_faults(topology, seed):
    # Without wrong clocks: those need libfaketime, and the plan shall be the same without it.
    how = {"beats": 2, "workers": 2, "clocks": False, "gap": 2, "longest": 4}
    plan = make_plan(seed, SECONDS, topology=topology, kinds=faults_of(topology), **how)
    measured("\n".join(plan.lines()))

    with Bed(plan, say=measured) as bed:
        records = bed.run()
    records.slack = 15.0  # other tests use the machine as well

    measured(", ".join(f"{name} {count}" for name, count in counts(records).items()))
    found = check(records)
    assert not found, "\n".join(map(str, found))
    assert len({decision.id for decision in records.decisions}) > 3 * SECONDS
