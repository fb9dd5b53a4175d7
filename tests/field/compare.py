"""``python -m tests.field.compare --seed 7``: one plan for singlebeat, and for RedBeat with celery-singleton.

Both are judged by messages and runs alone, with the entries that both can be given, and a supervisor that starts ended
processes again. ``--redbeat-only`` leaves singlebeat out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from redbeat import RedBeatSchedulerEntry

from singlebeat import Schedule
from tests.field import tasks
from tests.field.__main__ import say
from tests.field.bed import Bed
from tests.field.observer import standing
from tests.field.plan import Given, Plan, Process, make_plan
from tests.field.topology import faults_of


class RedBeatBed(Bed):
    """A run of RedBeat's beats, whose Singletons are celery-singleton's, in processes without singlebeat."""

    #: celery-singleton renews no lock: its expiry must outlast the wait in the queue and the run.
    OTHERWISE: Mapping[str, Any] = {
        "singleton_backend_kwargs": {"socket_timeout": 2},
        "singleton_lock_expiry": 30,
    }
    SINGLETON = "celery_singleton:Singleton"
    SENDER = Process("sender", is_bare=True)

    def __init__(self, plan: Plan, **options: Any) -> None:
        beats, workers = ([replace(each, is_bare=True) for each in part] for part in (plan.beats, plan.workers))
        super().__init__(replace(plan, beats=beats, workers=workers), **options)

    def _put(self, given: Given, entries: Schedule | None = None, every: float = 0.0) -> None:
        task, timing = f"{tasks.NAME}.{given.task}", self._schedule_of(given, every or given.every)
        entry = RedBeatSchedulerEntry(
            given.name, task, timing, args=[f"entry {given.name}", given.seconds], app=self.setup
        )
        self._edited("put", given.name, given.every, entries or Schedule(self.setup), lambda _: entry.save())

    def _ask(self, *_: object) -> None:
        """Ask nothing: there is no doctor, and there are no metrics."""

    _scrape = _ask


def comparable(given: Given) -> bool:
    """Return whether RedBeat and celery-singleton can be asked for an entry: skips of Singletons, or no lock at all."""
    asked = {("skip", "skip"), ("late_skip", "skip"), ("plain", "allow_all")}
    return not given.edited and given.grace is None and (given.task, given.overlap) in asked


def plan_of(seed: int, seconds: float, topology: str) -> Plan:
    """Return the plan for both. Nothing is edited, and all clocks are right."""
    plan = make_plan(seed, seconds, topology=topology, kinds=faults_of(topology), workers=4, clocks=False)
    return replace(plan, entries=[given for given in plan.entries if comparable(given)], edits=[])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.field.compare")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--topology", choices=("one", "two"), default="one")
    parser.add_argument("--redbeat-only", action="store_true")
    options = parser.parse_args()
    plan = plan_of(options.seed, options.minutes * 60, options.topology)
    say("\n".join(plan.lines()))
    beds = {"RedBeat": RedBeatBed} if options.redbeat_only else {"singlebeat": Bed, "RedBeat": RedBeatBed}
    found = {}
    for name, kind in beds.items():
        with kind(plan, say=say) as bed:
            found[name] = standing(bed.run())
    for name, counts in found.items():
        say(f"{name}: " + ", ".join(f"{what} {count}" for what, count in counts.items()))


if __name__ == "__main__":
    main()
