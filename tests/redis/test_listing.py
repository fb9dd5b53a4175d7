"""``Scheduler.schedule``: what a tool sees that lists the entries of a beat, and what it does to them."""

from __future__ import annotations

import pytest
from celery.schedules import crontab
from redbeat import RedBeatScheduler

from singlebeat import Schedule, Scheduler
from singlebeat.beat.entries import listing

PLAIN = "tests.system.apps.plain"
STATIC = {"task": PLAIN, "schedule": crontab(hour=9, minute=0), "args": ["static"], "timezone": "Europe/Berlin"}


def test_all_usable_entries_are_listed_due_or_not(bench, redis):
    bench.put("one", args=["one"])
    bench.put("two", enabled=False)
    bench.put("broken")
    redis.hset("redbeat:broken", "definition", "{")
    scheduler = bench.scheduler(beat_schedule={"static": STATIC})

    found = scheduler.schedule

    assert sorted(found) == ["one", "static", "two"], "before it leads, and with what it has not stored yet"
    assert {name: entry.name for name, entry in found.items()} == {name: name for name in found}
    assert found["one"].args == ["one"]
    assert "broken" not in found
    with pytest.raises(KeyError):
        found["three"]
    assert scheduler.get_schedule()["static"].schedule == crontab(hour=9, minute=0)


def test_a_static_entry_is_listed_as_the_code_has_it_with_its_past(bench):
    first = bench.scheduler(beat_schedule={"static": STATIC})
    first.tick()
    Schedule(first.app).pause("static", "a while")
    last = Schedule(first.app).get("static").meta
    first.close()

    entry = bench.scheduler(beat_schedule={"static": {**STATIC, "args": ["changed"]}}).schedule["static"]

    assert (entry.args, entry.meta.total_run_count) == (["changed"], last.total_run_count)
    assert str(entry.schedule.tz) == "Europe/Berlin"


def test_a_listing_reads_as_many_entries_at_once_as_a_batch(bench, monkeypatch):
    for number in range(7):
        bench.put(f"e{number}")
    monkeypatch.setattr(listing, "BATCH", 3)
    read = []
    read_fields = listing.read_fields
    monkeypatch.setattr(
        listing, "read_fields", lambda client, keys: read.append(len(keys)) or read_fields(client, keys)
    )

    found = bench.scheduler().schedule

    assert [found[name].name for name in found] == [f"e{number}" for number in range(7)]
    assert read == [3, 3, 1]


def cronitor(scheduler: Scheduler) -> None:
    """Add all entries to ``beat_schedule`` again, with a header, as Cronitor's integration does at ``beat_init``."""
    found, app = scheduler.schedule, scheduler.app
    for name in list(found):
        entry = found[name]
        call = app.tasks[entry.task].s().set(headers={"x-cronitor-celerybeat-name": name})
        app.add_periodic_task(entry.schedule, call, args=entry.args, kwargs=entry.kwargs, name=name)


def test_a_tool_that_adds_entries_again_keeps_policies_and_owners(bench, redis):
    bench.put("dynamic", jitter=5)
    scheduler = bench.scheduler(beat_schedule={"static": STATIC})

    cronitor(scheduler)
    scheduler.tick()

    stored = Schedule(scheduler.app).get("static")
    assert str(stored.policy.timezone) == "Europe/Berlin"
    assert stored.options["headers"] == {"x-cronitor-celerybeat-name": "static"}
    assert Schedule(scheduler.app).get("dynamic").policy.jitter == 5
    assert redis.smembers("redbeat::statics") == {"static"}, "else it would go with the tool"


def test_a_tool_that_adds_entries_again_enables_none(bench):
    first = bench.scheduler(beat_schedule={"off": {**STATIC, "enabled": False}, "deployed": STATIC, "on": STATIC})
    first.tick()
    first.close()
    scheduler = bench.scheduler(
        beat_schedule={"off": {**STATIC, "enabled": False}, "deployed": {**STATIC, "enabled": False}, "on": STATIC}
    )

    cronitor(scheduler)
    cronitor(scheduler)
    scheduler.tick()

    entries = Schedule(scheduler.app)
    assert {name: entries.get(name).enabled for name in ("off", "deployed", "on")} == {
        "off": False,
        "deployed": False,
        "on": True,
    }


def test_the_apply_async_that_sentry_patches_is_called_for_each_run(bench, monkeypatch):
    calls, send = [], RedBeatScheduler.apply_async

    def patched(*args, **kwargs):
        calls.append((args, kwargs))
        return send(*args, **kwargs)

    monkeypatch.setattr(RedBeatScheduler, "apply_async", patched)
    bench.put()
    scheduler = bench.scheduler()

    scheduler.tick()

    (((owner, entry), _),) = calls
    assert owner is scheduler
    assert entry.name == "e"
