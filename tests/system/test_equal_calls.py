"""Entries that make the same call: what they owe one another, and how an operator learns of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule

from singlebeat import Entry, Schedule, clocked
from tests.support import APP, wait_until
from tests.system.apps import make_app

BEAT = ("beat", "-S", "singlebeat.Scheduler")


def decided(app, name: str, decision: str) -> dict[str, str]:
    """Return the record of an entry's decision as soon as there is one."""
    return wait_until(
        lambda: next((r for r in Schedule(app).history(name) if r.decision == decision), None),
        timeout=30,
        what=f"{name} to be {decision}",
    )


def test_plain_entries_of_one_call_run_and_singletons_name_the_other(celery, app, oracle):
    for task in ("plain", "single"):
        for which in ("hourly", "nightly"):
            about = {"args": [task, 60], "run_on_start": True}
            Entry(f"{which} {task}", f"{APP}.{task}", schedule(1), app=app, **about).save()
    celery("worker", "-c", "3").ready()
    beat = celery(*BEAT)

    plain = oracle.wait_started(2, "plain")
    assert {run.id for run in plain if run.name == "plain"} == {
        decided(app, f"{which} plain", "dispatched").task_id for which in ("hourly", "nightly")
    }
    own = decided(app, "nightly plain", "skipped_overlap")
    assert own.holder_entry == "nightly plain", "an entry's own runs do not pile up"

    (single,) = oracle.wait_started(1, "single")
    sent = next(n for n in ("hourly single", "nightly single") if Schedule(app).history(n)[-1].task_id == single.id)
    (other,) = {"hourly single", "nightly single"} - {sent}
    skipped = decided(app, other, "skipped_overlap")
    assert (skipped.holder, skipped.holder_entry) == (single.id, sent)
    beat.wait_for(rf'event=skipped_overlap entry="{other}" .* holder_entry="{sent}" reason="held by task {single.id}, ')
    explained = celery("singlebeat", "explain", other)
    assert explained.wait(60) == 0
    assert (
        f"was skipped: an equal call by entry {sent} still held the lock (held by task {single.id}, " in explained.text
    )
    assert f", of entry {sent})." in explained.text


@pytest.mark.parametrize("task", ["single", "in_turn"])
def test_a_call_that_waits_for_longer_than_its_lock_lasts_runs(celery, server, app, redis, task):
    """Newer calls acquire the lock meanwhile. In a long queue, none would run if each were dropped for a newer one."""
    with make_app(server.celery_url, {"singlebeat_queued_ttl": 0.2}) as impatient:
        first = impatient.tasks[f"{APP}.{task}"].delay("late")
        wait_until(lambda: not [*redis.scan_iter("SINGLETONLOCK_*", _type="HASH")], what="the end of its lock")
    second = app.tasks[f"{APP}.{task}"].delay("late")
    assert not second.is_duplicate

    celery("worker", "-c", "1").ready()

    for call in (first, second):
        assert app.AsyncResult(call.id).get(timeout=30) == "late"


def test_a_one_off_runs_after_the_equal_run_that_it_meets(celery, app, oracle):
    celery("worker", "-c", "2").ready()
    first = app.tasks[f"{APP}.single"].delay("one", 60)
    oracle.wait_started(1, "one")
    at = datetime.now(UTC) + timedelta(milliseconds=100)
    Entry("once", f"{APP}.single", clocked(at), args=["one", 60], app=app).save()
    celery(*BEAT)

    buffered = decided(app, "once", "buffered")
    assert buffered.holder == first.id
    oracle.let_go("one", count=2)

    runs = oracle.wait_ended(2, "one")
    assert [run.id for run in runs] == [first.id, buffered.task_id]
    assert oracle.max_concurrent("one") == 1
