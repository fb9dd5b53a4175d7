"""``python -m tests.benchmarks.sizes``: how lateness, memory, start and commands grow with the entries.

Each row has so many entries stored, of which some are due together in each minute. A real beat sends them; there is no
worker, and between two minutes the queue is emptied. With ``--servers 2`` the entries are divided: each server has its
own prefix and its own beat. It fails if an occurrence is sent twice or never.
"""

# ruff: noqa: T201 - what it measures, it prints

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from singlebeat.beat.store.dispatches import DISPATCH
from singlebeat.locks.redis import SCRIPTS
from singlebeat.lua import script
from tests.benchmarks.apps import PLAIN, QUEUE
from tests.benchmarks.processes import celery
from tests.benchmarks.stage import Stage
from tests.support import ROOT, CeleryProcess, RedisServer, wait_until

STORED = (10_000, 100_000, 1_000_000)
DUE = (100, 1_000, 20_000)

#: Entries up to which they are listed: more of them are more than an operator reads.
MOST_LISTED = 100_000

#: Seconds between two occurrences, of those that are due and of all others.
EVERY, RARELY = 60, 30 * 24 * 3600

#: Seconds from the storing of the due entries to their first time, and that anything here may take.
AHEAD, PATIENCE = 5.0, 600.0

#: Microseconds from which the server notes how long a script took.
NOTED = 200

MB = 1 << 20


@dataclass(frozen=True)
class Row:
    """What was measured with so many entries."""

    stored: int
    due: int
    servers: int
    start: float  #: seconds from the start of the process to its leadership
    late: Sequence[float]  #: seconds from the nominal time to the message, of each occurrence
    cpu: float  #: seconds of the beats for each minute
    beat: float  #: bytes of the largest beat, at its most
    redis: float  #: bytes of all servers before anything is due
    script: tuple[float, str]  #: seconds of the longest script, and its name
    commands: Mapping[str, tuple[float, float]]  #: ``list`` and ``status``: seconds and bytes

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        late = sorted(self.late)
        listed, state = self.commands.get("list"), self.commands.get("status")
        return [
            f"{self.stored:,}",
            f"{self.due:,}",
            f"{self.start:.1f} s",
            f"{statistics.median(late):.2f} s",
            f"{late[-1]:.2f} s",
            f"{self.cpu:.1f} s",
            f"{self.beat / MB:,.0f} MB",
            f"{self.redis / MB:,.0f} MB",
            f"{self.script[0] * 1000:.0f} ms, {self.script[1]}",
            f"{listed[0]:.1f} s, {listed[1] / MB:,.0f} MB" if listed else "",
            f"{state[0]:.1f} s" if state else "",
        ]


HEADER = ("Stored", "Due", "Start", "Late, median", "Last", "CPU", "Beat", "Redis", "Script", "``list``", "``status``")


class Part:
    """One server, with its prefix, its beat and its part of the entries."""

    def __init__(self, server: RedisServer, stored: int) -> None:
        self.stage, self.stored = Stage(server), stored
        self.client = self.stage.client
        self.prefix = "sizes:"
        later = datetime.now(UTC) + timedelta(seconds=RARELY / 2)
        self.stage.store(self.prefix, stored, PLAIN, due=later, every=RARELY)
        self.conf = {"redbeat_key_prefix": self.prefix, "singlebeat_history_limit": 200_000}
        self.stage.app("announce")
        # As after the first start on these data, which reads each entry once.
        self.client.set(f"{self.prefix}:zone", "UTC")
        self.memory = float(self.client.info("memory")["used_memory"])
        self.client.config_set("slowlog-log-slower-than", NOTED)
        self.client.config_set("slowlog-max-len", 10_000)

    def leads(self) -> bool:
        """Return whether a beat leads."""
        return bool(self.client.exists(f"{self.prefix}:leader"))

    def make_due(self, count: int, at: datetime) -> None:
        """Let so many entries be due at a time, and in each minute after it."""
        self.client.delete(f"{self.prefix}:history")
        self.stage.clear()
        self.client.slowlog_reset()
        self.stage.store(self.prefix, count, PLAIN, due=at, every=EVERY)
        self.client.slowlog_reset()

    def lateness(self) -> list[float]:
        """Return how late each occurrence was that was sent."""
        records = self.client.xrange(f"{self.prefix}:history")
        sent = [(id_, record) for id_, record in records if record["decision"] == "dispatched"]
        if len({record["id"] for _, record in sent}) != len(sent):
            raise RuntimeError("an occurrence was decided twice")
        return [
            int(id_.partition("-")[0]) / 1000 - datetime.fromisoformat(record["nominal"]).timestamp()
            for id_, record in sent
        ]

    def check_messages(self, count: int) -> None:
        """Refuse a minute in which an occurrence was sent twice or never."""
        ids = [json.loads(text)["headers"]["id"] for text in self.client.lrange(QUEUE, 0, -1)]
        if len(ids) != count or len(set(ids)) != count:
            raise RuntimeError(f"{len(ids)} messages of {len(set(ids))} occurrences were sent instead of {count}")

    def longest_script(self) -> tuple[float, str]:
        """Return the seconds of the longest script since ``make_due``, and its name."""
        scripts = names_of_scripts()
        found = [(log["duration"] / 1e6, log["command"].decode(errors="replace").split()) for log in self._slow()]
        runs = [(seconds, words[1]) for seconds, words in found if words[0] == "EVALSHA"]
        seconds, sha = max(runs, default=(0.0, ""))
        return seconds, scripts.get(sha, sha)

    def _slow(self) -> list[Any]:
        found: list[Any] = self.client.slowlog_get(10_000)
        return found


@cache
def names_of_scripts() -> dict[str, str]:
    """Return the names of all scripts by their SHA-1."""
    package = ROOT / "singlebeat"
    places = ((path.relative_to(ROOT).parts[:-1], path.stem) for path in package.rglob("*.lua"))
    found = {script(".".join(where), name).sha: name for where, name in places}
    return {**found, DISPATCH.sha: "dispatch", **{each.sha: name for name, each in SCRIPTS.items()}}


def measure(stored: int, due: Sequence[int], servers: int, minutes: int, *, ask: bool) -> list[Row]:
    """Measure a number of stored entries with each number of due ones."""
    rows = []
    with ExitStack() as stack:
        parts = [Part(stack.enter_context(RedisServer()), stored // servers) for _ in range(servers)]
        beats: list[CeleryProcess] = []
        begun = time.monotonic()
        for part in parts:
            given = ("beat", "--pidfile=", "--max-interval", "1", "-S", "singlebeat.Scheduler")
            beats.append(stack.enter_context(celery(part.stage, *given, tasks=(PLAIN,), conf=part.conf)))
        for part in parts:
            wait_until(part.leads, timeout=PATIENCE, what="a leader")
        start, commands = time.monotonic() - begun, dict[str, tuple[float, float]]()
        for count in (count for count in due if count <= stored):
            late, cpu = minutes_of(parts, beats, count // servers, minutes)
            if ask and not commands:
                names = ("list", "status") if stored <= MOST_LISTED else ("status",)
                commands = {name: asked(parts[0], name) for name in names}
            memory = max(high_water(beat) for beat in beats)
            longest = max(part.longest_script() for part in parts)
            redis = sum(part.memory for part in parts)
            rows.append(Row(stored, count, servers, start, late, cpu, memory, redis, longest, commands))
            print(" ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    return rows


def minutes_of(
    parts: Sequence[Part], beats: Sequence[CeleryProcess], count: int, minutes: int
) -> tuple[list[float], float]:
    """Let entries be due for some minutes; return how late each run was sent, and the CPU time for each minute."""
    first = datetime.now(UTC) + timedelta(seconds=AHEAD)
    while True:  # storing takes its time
        for part in parts:
            part.make_due(count, first)
        if datetime.now(UTC) < first:
            break
        first = datetime.now(UTC) + timedelta(seconds=2 * AHEAD)
    before = sum(map(cpu_of, beats))
    for minute in range(minutes):
        until = first.timestamp() + minute * EVERY
        time.sleep(max(0.0, until - time.time()))
        for part in parts:
            wait_until(lambda part=part: part.stage.sent() >= count, timeout=PATIENCE, what="the last message")
            part.check_messages(count)
            part.stage.clear()
    used = (sum(map(cpu_of, beats)) - before) / minutes
    late = [seconds for part in parts for seconds in part.lateness()]
    for part in parts:  # later again
        later = datetime.now(UTC) + timedelta(seconds=RARELY / 2)
        part.stage.store(part.prefix, count, PLAIN, due=later, every=RARELY)
    return late, used


def cpu_of(beat: CeleryProcess) -> float:
    """Return the seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def high_water(beat: CeleryProcess) -> float:
    """Return the bytes that a process has had at its most."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{beat.pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024.0


def asked(part: Part, name: str) -> tuple[float, float]:
    """Run a command; return its seconds and its bytes at its most."""
    env = {
        **os.environ,
        "SB_BENCH_URL": part.stage.server.celery_url,
        "SB_BENCH_CONF": json.dumps(part.conf),
        "SB_BENCH_TASKS": PLAIN,
        "PYTHONPATH": str(ROOT),
    }
    begun = time.monotonic()
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-m", "celery", "-A", "tests.benchmarks.apps", "singlebeat", name]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        _, code, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            out.seek(0)
            raise RuntimeError(f"{name} has failed: {out.read()[-2000:].decode(errors='replace')}")
    return time.monotonic() - begun, usage.ru_maxrss * 1024.0


def table(rows: Sequence[Row]) -> str:
    """Return a table in reStructuredText."""
    cells = [row.cells() for row in rows]
    widths = [max(len(row[at]) for row in [HEADER, *cells]) for at in range(len(HEADER))]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    head = "  ".join(f"{cell:<{width}}" for cell, width in zip(HEADER, widths, strict=True)).rstrip()
    return "\n".join([rule, head, rule, *lines, rule])


def plot(rows: Sequence[Row]) -> str:
    """Return the plot of the docs: lateness by due entries, a line for each number of stored ones."""
    lines = [".. plot:: Seconds until the last of the due entries is sent, by their number", "   :x: due in a minute"]
    lines += ["   :y: seconds until the last one is sent", ""]
    for stored in dict.fromkeys(row.stored for row in rows):
        points = ", ".join(f"{row.due} {max(row.late):.3g}" for row in rows if row.stored == stored)
        lines.append(f"   {stored:,} stored = {points}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sizes", description=__doc__)
    parser.add_argument("--stored", type=int, nargs="*", default=STORED, help="stored entries")
    parser.add_argument("--due", type=int, nargs="*", default=DUE, help="of them due in each minute")
    parser.add_argument("--minutes", type=int, default=2, help="minutes of each row (%(default)s)")
    parser.add_argument("--servers", type=int, default=1, help="servers, with a prefix and a beat each (%(default)s)")
    options = parser.parse_args()
    rows = []
    for stored in options.stored:
        rows += measure(stored, options.due, options.servers, options.minutes, ask=options.servers == 1)
    print(table(rows))
    print()
    print(plot(rows))
    print(f"\n{os.cpu_count()} CPUs, system load {math.ceil(os.getloadavg()[0])} at the end")


if __name__ == "__main__":
    main()
