"""``python -m tests.benchmarks``: measure, and print a table; fails on errors only, never on speed."""

# ruff: noqa: T201 - what it measures, it prints

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from importlib.metadata import version

from tests.benchmarks import calls, fairness, locks, memory, pages, starts, ticks, web, workers
from tests.benchmarks.case import run
from tests.benchmarks.stage import Stage
from tests.benchmarks.table import render
from tests.support import RedisServer

GROUPS = (ticks, starts, calls, workers, locks, pages, web, memory, fairness)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", help="a case, or several; --list names them")
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that everything works")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--socket", action="store_true", help="reach the servers by their unix sockets, not over TCP")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, not {options.rounds}")
    with RedisServer(socket=options.socket) as server, RedisServer(socket=options.socket) as elsewhere:
        stage = Stage(server, elsewhere=elsewhere, quick=options.quick)
        cases = {case.name: case for group in GROUPS for case in group.cases(stage)}
        if unknown := set(options.only or ()) - cases.keys():
            parser.error(f"there is no case {', '.join(sorted(unknown))}: there are {', '.join(cases)}")
        if options.list:
            print("\n".join(f"{case.name:<24}{case.what}" for case in cases.values()))
            return
        measured = []
        try:
            for name in options.only or cases:
                begun = time.monotonic()
                stage.client.flushall()
                measured.append((cases[name], run(cases[name], options.rounds)))
                print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        finally:  # what was measured before an error took its time, too
            print(f"{render(measured)}\n\n{conditions(stage, options)}")


def conditions(stage: Stage, options: argparse.Namespace) -> str:
    """Say what all this was measured with."""
    info = stage.client.info("server")
    server = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    packages = [f"{name} {version(name)}" for name in ("celery", "redis", "celery-redbeat", "celery-singleton")]
    way = "a unix socket" if options.socket else "TCP"
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return (
        f"Measured with {os.cpu_count()} CPUs, {python}, {server} over {way}, {', '.join(packages)}; "
        f"up to {options.rounds} rounds, system load {os.getloadavg()[0]:.1f} at the end."
    )


if __name__ == "__main__":
    main()
