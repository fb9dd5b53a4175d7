"""``python -m tests.benchmarks.sharing``: what an entry costs where several beats share the work, and how many races.

Each row has so many beats, in processes of their own, and as many entries that are due at once. In the rows with kills,
beats end by SIGKILL amid their work. It fails if an occurrence is sent twice or never.
"""

# ruff: noqa: T201 - what it measures, it prints

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from singlebeat.beat.tick import Tick
from tests.benchmarks.apps import PLAIN, QUEUE
from tests.benchmarks.stage import Stage, just_now
from tests.support import RedisServer, wait_until

#: Seconds for which no message is sent until a run is given up.
PATIENCE = 120.0

#: Commands with which this process looks on.
OURS = ("cmdstat_llen", "cmdstat_info")

FORK = multiprocessing.get_context("fork")


@dataclass
class Used:
    """What a beat has used and done so far."""

    cpu: float = 0.0
    asked: int = 0  #: claims
    lost: int = 0  #: claims that were denied


@dataclass(frozen=True)
class Row:
    """What one run of some beats has cost."""

    beats: int
    kills: int
    cpu: float  #: seconds for each entry
    commands: float  #: that Redis has run for each entry, those inside of scripts included
    lost: float  #: fraction of all claims
    seconds: float


def beat(stage: Stage, number: int, kill_after: int, warm: Event, go: Event, done: Event, pipe: Connection) -> None:
    """Work as a beat until all is done, and report what this has used.

    Args:
        kill_after: number of claims after which this beat kills itself amid a tick; 0: never.
    """
    used = Used()
    claim = Tick._claim

    def counting(self: Tick, due: Any, claims: Sequence[Any], *rest: Any) -> Any:
        granted = claim(self, due, claims, *rest)
        used.asked += len(claims)
        used.lost += len(claims) - len(granted)
        if go.is_set() and 0 < kill_after <= used.asked:
            report()
            os.kill(os.getpid(), signal.SIGKILL)
        return granted

    def report() -> None:
        used.cpu = sum(os.times()[:2]) - begun
        pipe.send(used)

    Tick._claim = counting  # type: ignore[method-assign]
    with stage.singlebeat(stage.app("sharing", redbeat_lock_key=None, singlebeat_history_limit=1000)) as scheduler:
        # As after some time: each has sent messages, and knows all others.
        while not (warm.is_set() and scheduler.lease.share.beats == number):
            warm.wait(scheduler.tick())
        pipe.send(None)
        go.wait()
        begun, used.asked, used.lost = sum(os.times()[:2]), 0, 0
        while not done.is_set():
            done.wait(scheduler.tick())
        report()


def run(stage: Stage, count: int, beats: int, kills: int) -> Row:
    """Let beats work off due entries, and return what they have used."""
    stage.client.flushall()
    warm, go, done = FORK.Event(), FORK.Event(), FORK.Event()
    pipes = [FORK.Pipe() for _ in range(beats)]
    doomed = [(at + 1) * count // beats // (kills + 1) if at < kills else 0 for at in range(beats)]
    processes = [
        FORK.Process(target=beat, args=(stage, beats, after, warm, go, done, its), daemon=True)
        for after, (_, its) in zip(doomed, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        make_due(stage, count)
        wait_until(lambda: stage.sent() >= count, timeout=PATIENCE, what="the last message of the warm-up")
        warm.set()
        for ours, _ in pipes:
            ours.recv()
        make_due(stage, count)
        before, begun = commands(stage), time.monotonic()
        go.set()
        wait_until(lambda: stage.sent() >= count, timeout=PATIENCE, what="the last message")
        seconds, ran = time.monotonic() - begun, commands(stage) - before
        done.set()
        used: list[Used] = [ours.recv() for ours, _ in pipes]
    finally:
        for event in (warm, go, done):
            event.set()
        for process in processes:
            process.join()
    ids = [json.loads(text)["headers"]["id"] for text in stage.client.lrange(QUEUE, 0, -1)]
    if len(ids) != count or len(set(ids)) != count:
        raise RuntimeError(f"{len(ids)} messages of {len(set(ids))} occurrences were sent instead of {count}")
    asked, lost = sum(each.asked for each in used), sum(each.lost for each in used)
    return Row(beats, kills, sum(each.cpu for each in used) / count, ran / count, lost / asked, seconds)


def make_due(stage: Stage, count: int) -> None:
    stage.clear()
    stage.store("sharing:", count, PLAIN, due=just_now())


def commands(stage: Stage) -> int:
    """Return how many commands the server has run for the beats."""
    stats = stage.client.info("commandstats")
    return sum(stats[name]["calls"] for name in stats if name not in OURS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sharing", description=__doc__)
    parser.add_argument("--entries", type=int, default=8_000, help="due entries (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best of each row counts (%(default)s)")
    options = parser.parse_args()
    plan = [(1, 0), (2, 0), (4, 0), (8, 0), (2, 1), (4, 1), (8, 3)]
    with RedisServer() as server:
        stage = Stage(server)
        measured = [[run(stage, options.entries, *each) for each in plan] for _ in range(options.rounds)]
    first = min(row.cpu for row, *_ in measured)
    print("Beats  Killed  CPU per entry   Ratio  Commands per entry   Ratio  Races lost  Seconds")
    print("=====  ======  =============  ======  ==================  ======  ==========  =======")
    for rows in zip(*measured, strict=True):
        best, base = min(rows, key=lambda row: row.cpu), measured[0][0].commands
        ran, lost = max(row.commands for row in rows), max(row.lost for row in rows)
        print(
            f"{best.beats:5}  {best.kills:6}  {best.cpu * 1000:10.3f} ms  {best.cpu / first:6.2f}  "
            f"{ran:18.2f}  {ran / base:6.2f}  {lost:10.2%}  {best.seconds:7.1f}"
        )


if __name__ == "__main__":
    main()
