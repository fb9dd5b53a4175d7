"""Pages of many entries, in each order and under each condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from singlebeat import Schedule
from tests.benchmarks.apps import PLAIN
from tests.benchmarks.case import Case, Side, timed
from tests.benchmarks.stage import MOST_AT_ONCE, Stage, now

#: Each page by its label; the first is what the others are compared with.
PAGES: Mapping[str, Mapping[str, Any]] = {
    "by next run": {},
    "by name": {"sort": "name"},
    "by last end": {"sort": "last"},
    "by first end": {"sort": "last", "descending": True},
    "search, all match": {"search": "PLAIN"},
    "search, none matches": {"search": "nothing"},
    "paused, none is": {"state": "paused"},
}

#: Written by the server itself: the ends of runs, each also in its entry, and a decision about each.
_END = r"""
for number = ARGV[1], ARGV[2] do
  local name = 'e' .. (number % ARGV[3])
  local task, began = 'run ' .. number, '2026-11-22T10:00:00.000+00:00'
  local at = redis.call('XADD', KEYS[2], '*', 'entry', name, 'id', task, 'outcome', 'success', 'reason', '',
    'started', began, 'duration', '1.000', 'worker', 'celery@worker')
  redis.call('XADD', KEYS[3], '*', 'entry', name, 'task', 'plain', 'nominal', began, 'kind', 'scheduled', 'decision',
    'dispatched', 'reason', '', 'id', task, 'term', '1', 'holder', '', 'leader', 'host:1', 'holder_entry', '')
  local line = cjson.encode({at, task, 'success', '', began, '1.000', 'celery@worker'}) .. '\n'
  local decision = cjson.encode({at, began, 'scheduled', 'dispatched', '', task, '1', '', 'host:1', ''}) .. '\n'
  local history = string.sub(string.rep(decision, 9), 1, 600)
  redis.call('HSET', KEYS[1] .. name, 'runs', string.rep(line, 4), 'history', history)
end
"""


def cases(stage: Stage) -> list[Case]:
    stored, records = stage.size(100_000, quick=1_000), stage.size(1_000_000, quick=2_000)
    return [
        Case(
            "page",
            f"The first page of 50 of {stored:,} entries, with {records:,} ends of runs and as many decisions",
            partial(_pages, stage, stored, records),
            "≤ 150 ms; with a search ≤ 400 ms",
        ),
        Case(
            "page-strips",
            f"The last 30 decisions about each of 50 of these {stored:,} entries",
            partial(_strips, stage, stored, records),
            "",
        ),
    ]


def store_with_past(stage: Stage, stored: int, records: int) -> Schedule:
    """Store entries, each with ends of runs and decisions, and return them."""
    app, prefix = stage.app("pages"), "pages:"
    stage.store(prefix, stored, PLAIN, due=now())
    for at in range(0, records, MOST_AT_ONCE):
        last = min(at + MOST_AT_ONCE, records) - 1
        stage.client.eval(_END, 3, prefix, f"{prefix}:runs", f"{prefix}:history", at, last, stored)
    return Schedule(app)


@contextmanager
def _pages(stage: Stage, stored: int, records: int) -> Iterator[Mapping[str, Side]]:
    entries = store_with_past(stage, stored, records)
    yield {label: partial(timed, partial(entries.page, **conditions)) for label, conditions in PAGES.items()}


@contextmanager
def _strips(stage: Stage, stored: int, records: int) -> Iterator[Mapping[str, Side]]:
    entries = store_with_past(stage, stored, records)
    names = [row.name for row in entries.page().rows]
    yield {
        "histories of 50": partial(timed, partial(entries.histories, names)),
        "history of one": partial(timed, partial(entries.history, names[0], 30)),
    }
