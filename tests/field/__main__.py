"""``python -m tests.field --seed 7 --minutes 10 --topology two``: one run by hand; the same seed, the same plan."""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.field.bed import Bed
from tests.field.observer import check, counts, slopes
from tests.field.plan import make_plan
from tests.field.topology import TOPOLOGIES, faults_of


def find_libfaketime() -> str:
    """Return the library that gives a process another clock, empty where it is not installed."""
    return str(next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), ""))


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the purpose of the command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.field")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--topology", choices=TOPOLOGIES, default="one")
    parser.add_argument("--beats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gap", type=float, default=20, help="most seconds between two faults")
    parser.add_argument("--only", nargs="*", help="kinds of faults; all by default")
    parser.add_argument("--server-clock", action="store_true", help="let the clock of the server step, too")
    parser.add_argument("--mixed", action="store_true", help="besides, a beat of RedBeat and a worker of plain Celery")
    parser.add_argument("--results", action="store_true", help="keep the results of tasks")
    parser.add_argument("--upgrade", metavar="COMMIT", default="", help="upgrade from this commit, or back to it")
    parser.add_argument("--keep", type=Path, help="a file for the records, to check them again")
    options = parser.parse_args()
    say(f"seed {options.seed}")
    libfaketime = find_libfaketime()
    if options.server_clock and not (libfaketime and options.topology in {"one", "two"}):
        parser.error("--server-clock needs libfaketime and topology one or two")
    if (options.mixed or options.results) and options.topology not in {"one", "two"}:
        parser.error("--mixed and --results need topology one or two")
    # Often, because a standby of singlebeat is mostly earlier than one of RedBeat.
    besides = ["server_clock"] * options.server_clock + ["handed_over"] * 5 * options.mixed
    kinds = options.only or [*faults_of(options.topology), *besides]
    plan = make_plan(
        options.seed,
        options.minutes * 60,
        topology=options.topology,
        kinds=kinds,
        beats=options.beats,
        workers=options.workers,
        clocks=bool(libfaketime),
        gap=options.gap,
        upgrades=bool(options.upgrade),
        mixed=options.mixed,
    )
    say("\n".join(plan.lines()))
    began = time.monotonic()
    with Bed(plan, libfaketime=libfaketime, old=options.upgrade, results=options.results, say=say) as bed:
        records = bed.run()
    if options.keep:
        options.keep.write_bytes(pickle.dumps(records))
    found = check(records)
    say(f"seed {plan.seed}, topology {plan.topology}, {time.monotonic() - began:.0f} s in all")
    say(", ".join(f"{name} {count}" for name, count in counts(records).items()))
    for whose, what, slope, _ in slopes(records):
        say(f"in an hour {slope:+.1f} {what}: {whose}")
    for violation in found:
        say(f"VIOLATION {violation}")
    say(f"{len(found)} violations {dict(Counter(violation.check for violation in found))}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
