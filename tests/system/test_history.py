"""The history: what beat decided, how the runs ended, also for an entry that runs rarely beside a busy one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule

from singlebeat import Entry, Schedule
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.leadership.lease import Term
from singlebeat.beat.silence import LEAST_FAILED, silence
from singlebeat.beat.store.claims import HISTORY_BYTES, Store
from singlebeat.beat.store.history import History
from singlebeat.locks.base import RUN_HEADER
from singlebeat.log import LONGEST_REASON
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.support import APP, wait_until
from tests.system.apps import make_app

OFF = Term(0, "")
NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def recorded(store: Store, name: str, count: int, begin: datetime = NOON, **fields: str) -> None:
    """Record decisions about an entry, a second between two of them."""
    occurrences = (Occurrence.of("redbeat:", name, begin + timedelta(seconds=at)) for at in range(count))
    store.record([Decision(name, "t", occurrence, DecisionType.PAUSED, **fields) for occurrence in occurrences], OFF)


def put(app, *names: str) -> None:
    for name in names:
        Entry(name, f"{APP}.plain", schedule(3600), app=app, last_run_at=datetime.now(UTC)).save()


def test_a_rare_entry_keeps_its_records_beside_a_busy_one(server, redis):
    with make_app(server.celery_url, {"singlebeat_history_limit": 100}) as app:
        put(app, "rare", "busy")
        store = Store(app, redis)
        recorded(store, "rare", 3)
        for at in range(10):
            recorded(store, "busy", 100, NOON + timedelta(hours=at))

        assert [r.nominal for r in Schedule(app).history("rare", 2)] == [NOON + timedelta(seconds=s) for s in (2, 1)]
        assert len(Schedule(app).history("busy", 50)) == 50
        assert {r.entry for r in Schedule(app).history(count=100)} == {"busy"}
        assert len(redis.hget("redbeat:busy", "history")) <= HISTORY_BYTES
        assert redis.xlen("redbeat::history") <= 200


def test_an_entry_keeps_enough_failures_to_be_silent_however_long(app, redis):
    """A message that RabbitMQ cannot route fails with a long reason; "ü" and quotes are longer in JSON."""
    put(app, "e")
    store = Store(app, redis)
    for at in range(6):
        occurrence = Occurrence.of("redbeat:", "e", NOON + timedelta(seconds=at))
        failed = Decision("e", "t", occurrence, DecisionType.PUBLISH_FAILED, 'ü"\x1b' * LONGEST_REASON)
        store.record([failed], OFF)
        store.record([failed], OFF)  # repeated: its reply was lost
    ((_, own),) = History(app).own(["e"])

    assert [each.nominal for each in own.decisions] == [NOON + timedelta(seconds=s) for s in (5, 4, 3)]
    assert len(own.decisions) == LEAST_FAILED + 1
    assert silence(Schedule(app).get("e"), own).startswith('its last 3 runs could not be sent: ü"')
    assert len(Schedule(app).history("e", 50)) == len(History(app).of_many(["e"], 50)["e"]) == 6


def test_records_are_joined_from_both_places_and_none_is_there_twice(app, redis):
    put(app, "e")
    recorded(Store(app, redis), "e", 30)

    assert [r.nominal for r in Schedule(app).history("e", 30)] == [NOON + timedelta(seconds=29 - s) for s in range(30)]


def test_an_entry_keeps_its_last_four_ends_however_long_their_reasons_are(app, redis):
    put(app, "e", "never")
    for number in range(6):
        headers = {"id": str(number), RUN_HEADER: {"entry": "e"}}
        record_end_of_message(app, headers, "failure", "x" * 5000, worker="w")
    flush_ends(app)

    (_, own), (_, none) = History(app).own(["e", "never"])

    assert [end.reason for end in own.ends] == ["x" * 200] * 4
    assert redis.hget("redbeat:e", "runs").count("\n") == 4
    assert (none.decisions, none.ends) == ([], [])


def test_a_long_reason_cannot_push_out_the_record_itself(app, redis):
    put(app, "e")
    recorded(Store(app, redis), "e", 1, reason="x" * 5000)

    redis.delete("redbeat::history")
    (record,) = Schedule(app).history("e")
    assert record.reason == "x" * 200


def test_a_record_of_a_deleted_entry_does_not_bring_it_back(app, redis):
    recorded(Store(app, redis), "gone", 1)

    assert not redis.exists("redbeat:gone")


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_run_is_in_the_history_with_its_end(pool, celery, app, redis):
    new = {"schedule": schedule(3600), "run_on_start": True, "app": app}
    Entry("good", f"{APP}.plain", args=["good"], **new).save()
    Entry("single", f"{APP}.single", args=["single"], **new).save()
    Entry("bad", f"{APP}.fail", args=["bad"], **new).save()
    Entry("pickled", f"{APP}.plain", args=["pickled"], options={"serializer": "pickle"}, **new).save()
    celery("worker", "-P", pool, "-c", "2").ready()
    celery("beat", "-S", "singlebeat.Scheduler")
    schedule_of = Schedule(app)

    def ended() -> dict[str, str]:
        ends = {record.entry: record.end for record in schedule_of.history() if record.end}
        return {name: end.outcome for name, end in ends.items()} if len(ends) == 4 else {}

    outcomes = {"good": "success", "single": "success", "bad": "failure", "pickled": "rejected"}
    assert wait_until(ended, timeout=30) == outcomes
    assert "untrusted content of type pickle" in schedule_of.history("pickled")[0].end.reason
    for name in ("good", "single", "bad"):
        (record,) = schedule_of.history(name)
        assert record.decision == "dispatched"
        assert record.end.worker.startswith("w")
        assert 0 <= record.end.duration < 30
        assert record.leader
    assert schedule_of.history("bad")[0].end.reason == "RuntimeError('bad')"
    assert [r.end.outcome for r in schedule_of.history("bad")] == ["failure"]
