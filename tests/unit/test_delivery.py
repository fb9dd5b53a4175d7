"""Sentences about a queue and its workers; what needs real ones is in ``tests/incidents/test_incidents.py``."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery
from celery.schedules import schedule
from kombu import Exchange, Queue
from kombu.common import Broadcast

from singlebeat import Entry
from singlebeat.beat.delivery import Busy, Delivery, Reader, queue_of
from singlebeat.destination import reaches_all

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def reader(*busy: Busy, queues: str = "q", tasks: str = "t", slots: int | None = 1) -> Reader:
    return Reader(frozenset(queues.split()), frozenset(tasks.split()), slots, busy)


def run(task: str, seconds: float | None = 0) -> Busy:
    return Busy(task, "id", None if seconds is None else NOON + timedelta(seconds=seconds))


def test_a_queue_is_unread_only_if_workers_answer():
    assert Delivery.of("q", {}).unread == ""
    assert Delivery.of("q", {"w": reader()}).unread == ""
    assert (
        Delivery.of("x", {"w": reader(queues="b a")}).unread == "no worker that answers reads queue x (they read a, b)"
    )


def test_own_entries_that_wait_in_the_queue_of_another_app_have_a_way_out():
    own = Delivery.of("x", {"w": reader()})
    shared = replace(own, other_apps=["bar"])

    assert "--force" not in own.way_out
    assert "runs again once the lock is free: celery singlebeat unlock --force" in shared.way_out


def test_a_silent_worker_may_read_a_queue():
    delivery = Delivery.of("x", {"w": reader(queues="b")}, silent=["solo@host"])

    assert delivery.unread.endswith("(they read b), and solo@host, which may read it, does not answer")
    one, two = (replace(delivery, silent=silent, messages=1) for silent in (["solo@host"], ["b", "a"]))
    assert one.way_out == "1 message waits there: unless solo@host reads it, start a worker with -Q x"
    assert two.unless_read == "unless a, b read it, "
    assert "celery purge -Q x" in replace(one, silent=()).way_out


def test_a_task_that_only_workers_of_other_queues_know_is_missing():
    elsewhere = reader(queues="other")

    assert Delivery.of("q", {"w": reader(tasks="u")}).without("t") == "", "that is said of all workers together"
    assert Delivery.of("other", {"w": reader()}).without("t") == "", "no worker reads the queue"
    assert "w drops the message; v knows it" in Delivery.of("q", {"w": reader(tasks="u"), "v": elsewhere}).without("t")


def test_each_reader_that_does_not_know_a_task_is_named():
    """As a worker of another app on a shared queue, or one of an old deploy: each drops the messages that it gets."""
    readers = {"w": reader(), "old": reader(tasks="u"), "other": reader(tasks="v")}
    elsewhere = {"x": reader(tasks="u", queues="x")}

    assert Delivery.of("q", {"w": reader(), "old": reader(tasks="u"), **elsewhere}).without("t") == (
        "worker old reads queue q and does not know the task t: it drops its share of the messages. If that is another "
        "app, give each app queues of its own (task_default_queue). Else deploy the task there, too"
    )
    assert "workers old, other read queue q and do not know the task t: they drop" in Delivery.of("q", readers).without(
        "t"
    )
    assert Delivery.of("q", {"w": reader(), **elsewhere}).without("t") == "", "it reads no queue of the entry"


def test_workers_are_full_since_their_last_slot_was_taken():
    both = {"w": reader(run("a"), run("a", 9), slots=2), "v": reader(run("b", 5))}

    assert Delivery.of("q", both).full == (
        "all 3 slots of the workers that read queue q are busy with a (2), b, since 2026-12-01 12:00:09Z"
    )
    assert Delivery.of("q", {**both, "u": reader()}).full == ""


@pytest.mark.parametrize("unknown", [reader(run("a"), slots=None), reader(run("a", None)), reader(slots=0)])
def test_workers_that_say_too_little_are_not_called_full(unknown):
    assert Delivery.of("q", {"w": unknown}).full == ""


def test_readers_that_hold_a_task_back_for_its_rate_limit_are_named():
    slow = replace(reader(), rate_limits={"t": "1/h"})

    assert Delivery.of("q", {"w": reader(), "v": slow}).limited("t") == (
        "the rate_limit of the task t holds messages back at worker v 1/h"
    )
    assert Delivery.of("q", {"w": reader(), "v": slow}).limited("u") == ""
    assert Delivery.of("q", {"w": reader(), "v": replace(slow, queues=frozenset("x"))}).limited("t") == ""


def test_messages_of_a_queue_with_a_comma_are_not_purged_by_a_command():
    """``celery purge -Q celery,low`` deletes the messages of two other queues."""
    way_out = Delivery.of("celery,low", {"w": reader()}).way_out

    assert way_out.startswith("give the queue another name")
    assert "purge" not in way_out
    assert "celery purge -Q 'a b')" in Delivery.of("a b", {"w": reader()}).way_out


@pytest.mark.parametrize(
    ("options", "queue"),
    [
        ({}, "celery"),
        ({"queue": "mine"}, "mine"),
        ({"exchange": "topics", "routing_key": "a.b"}, None),
        ({"exchange": "topics"}, "celery"),  # Celery sends it to the queue itself, as it does without an exchange
        ({"routing_key": "a.b"}, "celery"),
        ({"queue": Queue("named", Exchange("topics", "topic"), "a.b")}, "named"),
        ({"queue": Queue("named", Exchange("topics", "topic"), "a.#"), "routing_key": "a.b"}, None),
        ({"queue": Queue("named", Exchange("topics", "topic"), "a.b"), "exchange": "others", "routing_key": "b"}, None),
    ],
)
def test_the_queue_of_an_entry_is_that_of_its_options(options, queue):
    app = Celery(broker="redis://", set_as_current=False)

    assert queue_of(app, Entry("e", "t", schedule(60), options=options, app=app)) == queue


def test_the_queue_of_an_entry_comes_from_its_task_or_from_the_router():
    def route(name, *_, **__):
        if name == "broken":
            raise RuntimeError(name)

    def own() -> None: ...

    app = Celery(broker="redis://", set_as_current=False)
    app.conf.task_routes = ({"routed.*": {"queue": "by route"}}, route)
    app.task(own, name="own", queue="its own", shared=False)

    def of(task: str) -> str | None:
        return queue_of(app, Entry("e", task, schedule(60), app=app))

    assert (of("routed.task"), of("own"), of("else")) == ("by route", "its own", "celery")
    assert of("broken") is None


@pytest.mark.parametrize(
    ("options", "is_to_all"),
    [
        ({}, False),
        ({"queue": "one"}, False),
        ({"queue": "all"}, True),
        ({"exchange": "all"}, False),  # Celery sends it to the default queue
        ({"exchange": "all", "routing_key": "any"}, True),
        ({"exchange": "one", "routing_key": "any"}, False),
        ({"queue": Queue("own", Exchange("own", "fanout"))}, True),
        ({"exchange": "own", "exchange_type": "fanout"}, True),
    ],
)
@pytest.mark.parametrize("is_routed", [False, True])
def test_a_call_to_a_fanout_exchange_reaches_all(options, is_to_all, is_routed):
    app = Celery(broker="redis://", set_as_current=False)
    app.conf.task_queues = (Queue("one"), Broadcast("all"))
    if is_routed and all(isinstance(value, str) for value in options.values()):
        app.conf.task_routes, options = {"t": options}, {}

    assert reaches_all(app, "t", options, (), {}) is is_to_all


def test_a_broadcast_queue_has_another_name_in_each_process():
    app = Celery(broker="redis://", set_as_current=False)
    app.conf.task_queues = (Queue("one"), Broadcast("all"))

    def of(queue: str) -> str | None:
        return queue_of(app, Entry("e", "t", schedule(60), options={"queue": queue}, app=app))

    assert (of("one"), of("all")) == ("one", None)
