"""What the record of a lock says about its message, before workers and queues are asked."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from singlebeat.beat.lost_messages import Found, Waiting, _read_ends, may_yet_start, sent_to_another_broker
from singlebeat.config import Config
from singlebeat.locks.acquire import note, note_of_broker
from singlebeat.locks.base import Ref
from singlebeat.run_results import MESSAGE_LOST, RAN_ELSEWHERE

NOW = 2_000_000_000_000

#: Of a message that beat has sent a minute ago.
RECORD = {"id": "a", "gen": "0", "state": "queued", "since": str(NOW - 60_000), "now": str(NOW), "ttl": "3540"}
CALL = {"sent": note(Ref("k", "a"), broker="redis://h:6379/0", delay=0)}
SENT = {"sent": note(Ref("k", "a"), broker="redis://h:6379/0", queue="q", delay=0)}


def waiting(key: str = "SINGLETONLOCK_{a}", **fields: Any) -> Waiting | None:
    return Waiting.of(key, {**RECORD, **fields})


def reason(**fields: Any) -> str:
    found = waiting(**fields)
    assert found is not None
    return may_yet_start(found, Config.of(Celery(set_as_current=False)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, "", id="a call"),
        pytest.param(SENT, "", id="a run"),
        pytest.param({"since": str(NOW - 20_000)}, "its message counts as late only after 30 s", id="a young one"),
        pytest.param(
            {"ttl": "3600"}, "its countdown or eta is not over, or ended just now", id="a countdown of an older version"
        ),
        pytest.param({"ttl": "3600", **CALL}, "", id="a call whose delay is known"),
        pytest.param(
            {"ttl": "0.5", **CALL}, "it is not known whether its message was sent", id="a call that may not be sent"
        ),
        pytest.param(
            {"ttl": "0.5"}, "it is not known whether its message was sent", id="one that is not known to be sent"
        ),
        pytest.param({"ttl": "0.5", **SENT}, "", id="one that is known to be sent"),
        pytest.param(
            {"worker": "w", "renewed": str(NOW - 9_000)},
            "worker w had its message 9 s ago, when it renewed the lock; if that worker has died, its message counts "
            "as late in 21 s",
            id="taken",
        ),
        pytest.param({"worker": "w", "renewed": str(NOW - 31_000)}, "", id="taken by a worker that is gone"),
        pytest.param(
            {"renewed": str(NOW - 9_000)}, "its message asked for the lock 9 s ago, and asks again", id="one that waits"
        ),
        pytest.param({"renewed": str(NOW - 31_000)}, "", id="one that has not asked again"),
        pytest.param({"worker": "w", "renewed": str(NOW - 61_000)}, "", id="taken before it was queued again"),
    ],
)
def test_a_message_is_missed_when_no_cause_for_its_wait_is_left(fields, expected):
    assert expected in reason(**fields)
    assert bool(reason(**fields)) is bool(expected)


def test_a_message_in_another_broker_is_left_to_that_one():
    app = Celery(broker="redis://localhost/0", set_as_current=False)
    brokers = ("redis://127.0.0.1:6379/0", "redis://h:6379/0", "")

    said = [sent_to_another_broker(app, waiting(sent=note_of_broker(broker))) for broker in brokers]

    assert said[0] == said[2] == ""
    assert said[1] == (
        "it was sent to the broker redis://h:6379/0, and the broker of this process is redis://127.0.0.1:6379/0: ask "
        "with the settings of its sender. If that broker is gone for good: celery singlebeat unlock --force a"
    )


AHEAD = {"since": str(NOW + 18_000_000), "ttl": str(18_000 + 3_600)}


@pytest.mark.parametrize(("renewed", "is_late"), [(9, False), (11, True)])
def test_a_message_that_waits_is_not_late_before_it_asks_again(renewed, is_late):
    """Also where a lease is shorter than the pause between two tries."""
    app = Celery(set_as_current=False)
    app.conf.singlebeat_lock_lease = 2.0

    found = may_yet_start(waiting(renewed=str(NOW - renewed * 1000)), Config.of(app))

    assert not found if is_late else "asks again" in found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, "", id="a call"),
        pytest.param(SENT, "", id="a run"),
        pytest.param({"ttl": "3500"}, "", id="one that a call has met since then"),
        pytest.param({"ttl": "3660"}, "its countdown or eta may not be over", id="a countdown that a call has met"),
        pytest.param({"ttl": "21660"}, "its countdown or eta may not be over", id="a countdown of an older version"),
        pytest.param({"ttl": "21660", **CALL}, "", id="a call whose delay is known"),
        pytest.param(
            {"sent": note(Ref("k", "a"), broker="redis://h:6379/0", queue="q", delay=40)},
            "eta may not be over",
            id="a known delay",
        ),
        pytest.param({"ttl": "18060"}, "it is not known whether its message was sent", id="one that may be unsent"),
        pytest.param(
            {"worker": "w", "renewed": str(NOW - 9_000)}, "worker w had its message", id="kept by a worker since then"
        ),
        pytest.param({"worker": "w", "renewed": str(NOW + 18_000_000)}, "", id="renewed before"),
    ],
)
def test_a_message_queued_before_the_clock_was_set_back_is_late(fields, expected):
    assert expected in reason(**{**AHEAD, **fields})
    assert bool(reason(**{**AHEAD, **fields})) is bool(expected)


def test_a_message_queued_before_the_clock_was_set_back_has_no_age():
    found = waiting(**AHEAD)

    assert (found.age, found.left) == (0.0, 3600.0)
    assert str(Found(found, "", "REASON")) == (
        "task a was queued before the clock of the locks' server was set back, and its lock is not freed: REASON"
    )


def test_a_delay_that_beat_knows_counts_though_the_lock_ends_before():
    assert "counts as late only after 70 s" in reason(
        ttl="540", sent=note(Ref("k", "a"), broker="redis://h:6379/0", queue="q", delay=40)
    )


def test_a_note_on_an_earlier_message_says_nothing_of_its_retry():
    found = waiting(**SENT, gen="1")

    assert (found.queue, found.is_noted) == ("", False)
    assert waiting(**SENT).queue == "q"


@pytest.mark.parametrize("sent", ["", "{", "[]", "{}", '"text"', '{"gen": 5}'])
def test_a_note_that_cannot_be_read_says_nothing(sent):
    assert not waiting(sent=sent).is_noted


def test_only_a_waiting_lock_is_checked():
    assert waiting(state="running") is None
    assert waiting("SINGLETONLOCK_{a}:turn") is None
    assert waiting("SINGLETONLOCK_{a}:next") is not None


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("", "task a was queued 60 s ago, and its lock is not freed: REASON"),
        (MESSAGE_LOST, "the message of task a was queued 60 s ago and is lost: REASON"),
        (RAN_ELSEWHERE, "task a has run, and its lock was not freed: REASON"),
    ],
)
def test_each_finding_is_a_sentence_of_its_own(outcome, expected):
    assert str(Found(waiting(), outcome, "REASON")) == expected


def test_a_result_backend_without_its_driver_knows_of_no_end():
    app = Celery(backend="db+postgresql://u@h/db", set_as_current=False)
    lock = waiting()
    assert lock is not None

    assert _read_ends(app, [lock]) == {}
