"""How late entries are when very many are due at the same time, again and again."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial

from singlebeat.locks.base import HEADER
from tests.benchmarks.apps import PLAIN, QUEUE
from tests.benchmarks.case import Case, Side
from tests.benchmarks.processes import celery
from tests.benchmarks.stage import Stage, now

#: Messages that are taken from the queue at once.
MOST_AT_ONCE = 500

#: Seconds from the start of beat until the entries are first due.
UNTIL_DUE = 5.0


def cases(stage: Stage) -> list[Case]:
    seconds = stage.size(60, quick=10)
    return [
        Case(
            name,
            f"From due to sent: {count:,} entries due together each second, over {seconds} s",
            partial(_lateness, stage, count, seconds),
            target,
            rounds=1,
            warm_up=False,
            compare=False,
        )
        for name, count, target in (
            ("lateness", stage.size(1_000, quick=100), "p99 ≤ 1 s while there is CPU left"),
            ("lateness-half", stage.size(500, quick=50), "p99 ≤ 1 s"),
        )
    ]


@contextmanager
def _lateness(stage: Stage, count: int, seconds: int) -> Iterator[Mapping[str, Side]]:
    prefix = stage.app("fairness").conf.redbeat_key_prefix
    first = now() + timedelta(seconds=UNTIL_DUE)
    last = first.timestamp() + seconds - 1
    stage.store(prefix, count, PLAIN, due=first, every=1.0)
    conf = {"redbeat_key_prefix": prefix, "singlebeat_history_limit": 10 * count * seconds}
    begun, used = time.monotonic(), _cpu_of_children()
    with celery(stage, "beat", "--pidfile=", "-S", "singlebeat.Scheduler", tasks=(PLAIN,), conf=conf) as beat:
        arrived = _consume(stage, until=last + 5)
        if beat.returncode is not None:
            raise RuntimeError(f"beat has ended:\n{beat.tail()}")
    busy = (_cpu_of_children() - used) / (time.monotonic() - begun)
    nominal = {}
    for _, record in stage.client.xrange(f"{prefix}:history"):
        nominal[record["id"]] = datetime.fromisoformat(record["nominal"]).timestamp()
    late = [at - nominal[id_] for id_, at in arrived.items() if nominal.get(id_, last + 1) <= last]
    cuts = statistics.quantiles(late, n=100, method="inclusive")
    worst = max(late)
    yield {
        f"p50 ({len(late):,} of {count * seconds:,} sent, beat busy {busy:.0%})": lambda: cuts[49],
        "p99": lambda: cuts[98],
        "longest": lambda: worst,
    }


def _cpu_of_children() -> float:
    """Return the seconds of CPU of the processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _consume(stage: Stage, *, until: float) -> dict[str, float]:
    """Take messages as a worker would and free their locks; return when each task id arrived."""
    arrived: dict[str, float] = {}
    while (at := time.time()) < until:
        messages = stage.client.lpop(QUEUE, MOST_AT_ONCE)
        if not messages:
            time.sleep(0.002)
            continue
        headers = [json.loads(message)["headers"] for message in messages]
        arrived |= {header["id"]: at for header in headers}
        stage.client.delete(*[header[HEADER]["key"] for header in headers])
    return arrived
