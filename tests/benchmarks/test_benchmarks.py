"""The benchmarks run, and count and compare as they say; what they measure is no test."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import nullcontext

from redis import Redis

from tests.benchmarks.case import Case, run
from tests.benchmarks.wire import counted
from tests.support import ROOT


def benchmarks(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmarks", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def number(cell: str) -> float:
    return float(cell.split(maxsplit=1)[0].replace(",", ""))


def test_a_quick_run_prints_a_row_of_numbers_for_each_side():
    done = benchmarks("--quick", "--rounds", "2", "--only", "duplicate", "--only", "lock-renew")

    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|") and "+-" not in line]
    cells = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines[1:]]
    rows = {side: [number(median), number(ratio)] for side, median, ratio in cells if side}
    assert list(rows) == ["plain task", "singlebeat", "celery-singleton", "one bare EVALSHA", "bare EVALSHA", "renew"]
    assert all(value > 0 and math.isfinite(value) for row in rows.values() for value in row)
    assert "celery-redbeat 2" in done.stdout


def test_an_unknown_case_is_an_error_that_names_the_known_ones():
    done = benchmarks("--only", "everything")

    assert done.returncode != 0
    assert "no case everything" in done.stderr
    assert "duplicate-round-trips" in done.stderr


def test_sides_are_run_in_turns_and_compared_round_by_round():
    turns = []

    def side(label: str, *values: float):
        left = iter(values)
        return lambda: turns.append(label) or next(left)

    sides = {"a": side("a", 1, 1, 2, 4), "b": side("b", 9, 3, 4, 4)}
    a, b = run(Case("c", "", lambda: nullcontext(sides), ""), 3)

    assert turns == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert a.ratios == (1, 1, 1)
    assert (b.ratios, b.ratio, b.best) == ((3, 2, 1), 2, 3)


def test_commands_are_counted_as_they_are_sent_and_as_they_are_run(redis: Redis):
    with counted(redis) as wire:
        redis.set("key", "two\r\n*1\r\nlines")
        redis.eval("redis.call('GET', 'key') return redis.call('GET', 'key')", 0)
        with redis.pipeline(transaction=False) as pipe:
            pipe.get("key").get("key").get("key").execute()

    assert (wire.commands, wire.round_trips) == (5, 3)
    assert wire.commands_run == 7
