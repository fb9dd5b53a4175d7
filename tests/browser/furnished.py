"""Entries of a shop with a past of some weeks, written as beats and workers write it (``docs/reference/data.rst``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import NAMESPACE_OID, uuid5

from celery import Celery
from celery.schedules import crontab
from redbeat.schedules import rrule
from redis import Redis

from singlebeat import Schedule
from singlebeat.beat.store.claims import HISTORY_BYTES

from .shop import BILL, IMPORT, REPORT

#: A name that is longer than any column, and one whose letters run from right to left.
LONG = "reconcile payments of all tenants with the ledger of the previous quarter, in the order of their contracts"
ARABIC = "تقرير المبيعات الأسبوعي"

#: Days that hold the last occurrences of each entry, and what became of these, latest first: o ended well, l late,
#: f failed, s skipped, m missed, p paused.
PASTS = {
    "send invoices": (3, "oooooooooolooooooooooooofooooo"),
    "import feed of suppliers": (1, "osoossooosooooossoooosoooossoo"),
    "nightly report": (60, "ffoooooooooooooooooooooooooooo"),
    "sync stock": (1, "ppppppppppoooooooooooooooooooo"),
    LONG: (8, "ooooooommloooooooooooooooooooo"),
    ARABIC: (40, "oooo"),
}

#: Seconds of a run of each task.
SECONDS = {BILL: 4.0, IMPORT: 170.0, REPORT: 95.0}


class Past(NamedTuple):
    """One decision, and what became of its run."""

    at: datetime
    stream: str
    fields: dict[str, str]


def furnish(app: Celery, redis: Redis) -> Schedule:
    """Store entries with their past; no beat may have written to the server before."""
    entries = Schedule(app, actor="ann", by="web")
    berlin = {"timezone": "Europe/Berlin"}
    entries.upsert("send invoices", BILL, crontab(minute=0), args=["all"], tags=["billing"], **berlin)
    feed = {"url": "https://feeds.example.org/suppliers.xml", "api_token": "s3cret"}
    entries.upsert("import feed of suppliers", IMPORT, 300.0, kwargs=feed, overlap="skip", tags=["stock"])
    weekdays = crontab(minute=0, hour=3, day_of_week="mon-fri")
    entries.upsert("nightly report", REPORT, weekdays, jitter=60, note="for the sales team", **berlin)
    entries.upsert("sync stock", BILL, crontab(minute="*/10"), tags=["stock", "warehouse"])
    last_day = rrule("MONTHLY", bymonthday=-1, byhour=18, byminute=0, bysecond=0)
    entries.upsert("month end", REPORT, last_day, tags=["billing"], **berlin)
    entries.upsert("clean up carts", BILL, 86_400.0, enabled=False)
    entries.upsert(LONG, REPORT, crontab(minute=30, hour="6-20/2"), expires=3600)
    entries.upsert(ARABIC, REPORT, crontab(minute=0, hour=8, day_of_week="sun"), timezone="Asia/Riyadh")
    entries.upsert("read inbox", "mail.read_inbox_of_support", 1800.0)
    entries.upsert("nightly report", REPORT, weekdays, jitter=120, note="for the sales team", **berlin)
    entries.pause("sync stock", "the warehouse counts its stock until Friday")
    cut_off = '{"name": "old import", "task": "shop.import", "schedule": {"every": '
    redis.hset("redbeat:old import", "definition", cut_off)
    redis.zadd("redbeat::schedule", {"redbeat:old import": 1})
    _write(entries, redis)
    return entries


def _write(entries: Schedule, redis: Redis) -> None:
    """Write what was decided before now, in the order of time, as streams need it."""
    now = datetime.now(UTC)
    past = sorted((each for name in PASTS for each in _past_of(entries, name, now)), key=lambda each: each.at)
    redis.delete("redbeat::history", "redbeat::runs")
    ids = [
        redis.xadd(f"redbeat::{stream}", fields, id=f"{int(at.timestamp() * 1000)}-*") for at, stream, fields in past
    ]
    for name in PASTS:
        lines: dict[str, list[str]] = {"history": [], "runs": []}
        for id_, (_, stream, fields) in reversed([*zip(ids, past, strict=True)]):
            if fields["entry"] != name:
                continue
            values = [*fields.values()][1:] if stream == "runs" else _line(fields)
            lines[stream].append(json.dumps([id_, *values]))
        redis.hset(f"redbeat:{name}", "history", "\n".join(lines["history"]).encode()[:HISTORY_BYTES])
        redis.hset(f"redbeat:{name}", "runs", "\n".join(lines["runs"][:4]))


def _past_of(entries: Schedule, name: str, now: datetime) -> Iterator[Past]:
    entry, (days, words) = entries.get(name), PASTS[name]
    nominal, times = now - timedelta(days=days), []
    while (nominal := entry.timetable.next(nominal)) < now - timedelta(minutes=5):
        times.append(nominal)
    for number, (nominal, word) in enumerate(zip(reversed(times), words, strict=False)):
        task, holder = (str(uuid5(NAMESPACE_OID, f"{name} {at}")) for at in (number, number + 1))
        is_sent, at = word in "olf", nominal + timedelta(seconds=95 if word == "l" else 0.04)
        reason = f"held by task {holder}, running since {nominal:%H:%M:%S}Z" if word == "s" else ""
        yield Past(
            at,
            "history",
            {
                "entry": name,
                "task": entry.task,
                "nominal": nominal.isoformat(),
                "kind": "catch_up" if word == "l" else "scheduled",
                "decision": {"s": "skipped_overlap", "m": "missed", "p": "paused"}.get(word, "dispatched"),
                "reason": reason,
                "id": task,
                "term": "7",
                "holder": holder if word == "s" else "",
                "leader": "beat-1:4711",
                "holder_entry": name if word == "s" else "",
            },
        )
        if is_sent:
            took = SECONDS[entry.task] * (1 + number * 7 % 5 / 10)
            started = at + timedelta(seconds=number * 3 % 7)
            yield Past(
                min(started + timedelta(seconds=took), now - timedelta(seconds=1)),
                "runs",
                {
                    "entry": name,
                    "id": task,
                    "outcome": "failure" if word == "f" else "success",
                    "reason": "ConnectionError: smtp.example.org: connection refused" if word == "f" else "",
                    "started": started.isoformat(),
                    "duration": f"{took:.3f}",
                    "worker": f"celery@worker-{number % 2 + 1}",
                },
            )


def _line(fields: dict[str, str]) -> list[str]:
    names = ("nominal", "kind", "decision", "reason", "id", "term", "holder", "leader", "holder_entry")
    return [fields[name] for name in names]
