"""Entries that make the same call: what they owe one another, and how an operator learns of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule
from kombu import Exchange, Queue

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


WITH_QUEUES = """
from kombu import Exchange, Queue
from tests.system.apps import app
news = Exchange("news", "{kind}")
app.conf.task_queues = [Queue("a", news, "{key}"), Queue("b", news, "{key}"), Queue("c", news, "{key}")]
"""


@pytest.mark.parametrize(("kind", "key"), [("topic", "news.#"), ("direct", "news.one")])
def test_a_waiting_message_that_several_queues_have_got_stays_as_many(kind, key, celery, server, oracle, tmp_path):
    """Sent to its exchange again, each of its copies would become one for each queue, again and again."""
    (tmp_path / "with_queues.py").write_text(WITH_QUEUES.format(kind=kind, key=key))
    names = {"one": "a,b", "two": "c"}
    workers = [
        celery("worker", "-c", "3", "-P", "threads", "-n", f"{name}@h", "-Q", queues, app="with_queues").ready()
        for name, queues in names.items()
    ]
    news = Exchange("news", kind)
    to_all = {"exchange": news, "routing_key": "news.one", "declare": [Queue("a", news, key)]}

    def times(line: str) -> int:
        return sum(worker.text.count(line) for worker in workers)

    with make_app(server.celery_url, {"task_queues": [Queue("a", news, key)]}) as app:
        calls = [app.tasks[f"{APP}.in_turn"].apply_async(("one", 60), **to_all) for _ in range(2)]
        for number in (1, 2):
            (*_, run) = oracle.wait_started(number, "one", timeout=60)
            waits = f"[{run.id}] waits for its turn"
            wait_until(lambda waits=waits: times(waits) >= 8, timeout=60, what="eight tries")
            assert times(f"[{run.id}] received") <= 3 + times(waits)
            oracle.let_go("one")
        assert [call.get(timeout=60) for call in calls] == ["one"] * 2
    assert (oracle.started("one"), oracle.max_concurrent("one")) == (2, 1)
