"""Code of the user that makes arguments and lock keys may be slow, fail or hang, and harms no other entry."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sqlite3
import time
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.beat import BeatLazyFunc
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError
from kombu.messaging import Producer
from redis.exceptions import ConnectionError as RedisConnectionError

from singlebeat import Schedule, Scheduler, Singleton
from singlebeat.beat.store.claims import Store
from singlebeat.errors import LockBackendError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ticket
from tests.redis.bench import Bench
from tests.support import connected, wait_until

HOUR = 3600

HANDS_OUT = pytest.mark.skipif(not hasattr(Producer, "batch"), reason="kombu 5.7 is the first to hand out commands")


def work(*_: object) -> None: ...


@pytest.fixture(params=["one write", "several writes"])
def writes(request: pytest.FixtureRequest) -> None:
    """Send where all is on one server, and where the broker may be on another one."""
    if request.param == "several writes":
        request.getfixturevalue("several_writes")


@pytest.fixture
def app(bench: Bench) -> Celery:
    """Return the app of a team, whose tasks only the workers know but for those that a test adds."""
    return bench.new_app()


def scheduled(bench: Bench, app: Celery, **entries: dict[str, Any]) -> Scheduler:
    """Return a beat whose entries are due at once, the first one first."""
    app.conf.beat_schedule = {name: {"task": name, "schedule": HOUR, **fields} for name, fields in entries.items()}
    scheduler = bench.scheduler(app=app)
    scheduler.tick()
    for number, name in enumerate(entries):
        bench.redis.zadd("redbeat::schedule", {f"redbeat:{name}": time.time() - 60 + number})
        bench.make_due(name)
    return scheduler


def decided(bench: Bench) -> dict[str, str]:
    return {record["entry"]: record["decision"] for record in bench.history}


def asking(function: Callable[..., Any], place: str, app: Celery, name: str) -> dict[str, Any]:
    """Return the fields of an entry for which a function is asked, for an argument or for the key of its lock."""
    if place == "argument":
        return {"args": [BeatLazyFunc(function)]}
    app.task(work, name=name, base=Singleton, unique_on=function, shared=False, typing=False)
    return {"args": ["a"]}


@pytest.mark.parametrize("place", ["argument", "key"])
def test_others_are_sent_and_recorded_before_code_is_asked(bench, app, writes, place):
    """It may hang until the watchdog ends this beat, and the next one."""
    seen = list[Any]()

    def ask(*_: object) -> str:
        seen.append(decided(bench))
        return "a"

    scheduler = scheduled(bench, app, asks=asking(ask, place, app, "asks"), plain={})
    scheduler.tick()

    assert seen == [{"plain": "dispatched"}]
    assert decided(bench) == {"plain": "dispatched", "asks": "dispatched"}


@pytest.mark.parametrize("place", ["argument", "key"])
def test_a_pause_keeps_code_that_hangs_from_being_asked(bench, app, writes, place):
    asked = list[int]()

    def ask(*_: object) -> str:
        asked.append(1)
        raise SystemExit  # the watchdog ends this beat

    scheduler = scheduled(bench, app, asks=asking(ask, place, app, "asks"), plain={})
    with pytest.raises(SystemExit):
        scheduler.tick()
    Schedule(app).pause("asks")
    scheduler.tick()

    assert asked == [1]
    assert decided(bench) == {"plain": "dispatched", "asks": "paused"}


def test_explain_says_how_to_give_up_a_run_whose_code_hangs(bench, app, writes, cli):
    """It was triggered, and beat asks its code though the entry is paused."""
    asked = list[int]()
    scheduler = scheduled(bench, app, asks={"args": [BeatLazyFunc(asked.append, 1)]})
    Schedule(app).pause("asks")
    Schedule(app).trigger("asks")

    (advice,) = re.findall(
        r"even if the entry is paused.* give that run up: (.*)", cli("explain", "asks", app=app).output
    )
    bench.redis.execute_command(*shlex.split(advice))
    scheduler.tick()

    assert asked == []
    assert decided(bench) == {"asks": "paused"}
    assert bench.redis.zcard("redbeat::pending") == 0


def test_code_that_answers_after_a_claim_would_be_over_is_sent(bench, app, several_writes, monkeypatch):
    monkeypatch.setattr("singlebeat.beat.several_writes.RETRY_AFTER", 0.2)
    monkeypatch.setattr("singlebeat.beat.tick.RETRY_AFTER", 0.2)
    slow = {"args": [BeatLazyFunc(time.sleep, 0.3)]}
    scheduler = scheduled(bench, app, slow=slow, plain={})

    def both_are_sent() -> bool:
        bench.retry_now()
        scheduler.tick()
        return decided(bench) == {"slow": "dispatched", "plain": "dispatched"}

    wait_until(both_are_sent, what="the run of the slow entry")


def test_each_entry_has_its_turn_where_their_code_takes_too_long(bench, app, writes, monkeypatch):
    monkeypatch.setattr("singlebeat.beat.asking.ASKED_FOR", 0)
    names = ["a", "b", "c"]
    turns = list[str]()
    entries = {name: {"args": [BeatLazyFunc(turns.append, name)]} for name in names}
    scheduler = scheduled(bench, app, **entries)

    for _ in range(9):
        before = len(turns)
        scheduler.tick()
        assert len(turns) == before + 1, "others may be due again"
        bench.make_due(turns[-1])  # before the others have had their turns
        bench.redis.zadd("redbeat::schedule", {f"redbeat:{turns[-1]}": time.time()})

    assert turns == names * 3


def test_code_that_fails_again_and_again_lets_others_have_their_turns(bench, app, writes, monkeypatch):
    """Each failure is slow, as a connection that times out, and the time for the next one has come by then."""
    monkeypatch.setattr("singlebeat.beat.asking.ASKED_FOR", 0)
    failing = {"args": [BeatLazyFunc(Mock(side_effect=ConnectionRefusedError))]}
    entries = dict.fromkeys("abc", failing)
    scheduler = scheduled(bench, app, **entries, healthy={"args": [BeatLazyFunc(str)]})

    for _ in range(4):
        scheduler.tick()
        again_at = scheduler.dispatcher.asking._again_at
        again_at.update(dict.fromkeys(again_at, time.monotonic()))

    assert decided(bench) == {"healthy": "dispatched"}


def test_a_tick_awaits_one_answer_that_is_slow(bench, app, several_writes, monkeypatch):
    """Both a run that was claimed before and one that is due now ask code; each has its turn."""
    monkeypatch.setattr("singlebeat.beat.asking.ASKED_FOR", 0)
    asked = list[str]()
    names = ["claimed", "due"]
    scheduler = scheduled(bench, app, **{name: {"args": [BeatLazyFunc(asked.append, name)]} for name in names})
    Schedule(app).trigger("claimed")

    for count in (1, 2):
        scheduler.tick()
        assert len(asked) == count

    assert sorted(asked) == names


@pytest.mark.parametrize("place", ["argument", "key"])
def test_a_claimed_run_that_is_paused_is_dropped_without_a_question(bench, app, several_writes, place):
    """Its code may be slow, fail or hang by now: its answers were kept."""
    asked = list[Any]()

    def ask(*_: object) -> str:
        asked.append(1)
        return "a"

    scheduler = scheduled(bench, app, asks=asking(ask, place, app, "asks"))
    with connected(before_task_publish, Mock(side_effect=SystemExit)), pytest.raises(SystemExit):
        scheduler.tick()
    assert bench.redis.zcard("redbeat::pending") == 1
    bench.schedule.pause("asks")
    asked.clear()

    bench.retry_now()
    scheduler.tick()

    assert (asked, bench.messages, decided(bench)) == ([], [], {"asks": "paused"})


@pytest.mark.parametrize("is_singleton", [False, True], ids=["a plain task", "a singleton"])
def test_what_is_sent_again_has_the_lock_of_the_first_message(bench, app, several_writes, is_singleton):
    """Its code gives other arguments by then, as the time. By its lock, beat and workers tell a copy."""
    backend_of(app).announce("w@h", ttl=60)
    if is_singleton:
        app.task(work, name="counts", base=Singleton, shared=False)
    numbers = itertools.count()
    scheduler = scheduled(bench, app, counts={"args": [BeatLazyFunc(numbers.__next__)]})
    confirm, scheduler.store.confirm = scheduler.store.confirm, lambda *_: None  # it is killed before
    scheduler.tick()
    scheduler.store.confirm = confirm
    (first,) = bench.messages
    ticket = Ticket.of_message(first.headers, first.headers["id"])
    about = {"lease": 60, "remember_for": 60, "task": "counts", "arguments": ""}
    backend_of(app).begin(ticket.delivered("n").run, queued=ticket.queued, **about)
    bench.retry_now()
    scheduler.tick()

    assert decided(bench) == {"counts": "dispatched"}
    assert len(bench.messages) == 1, "beat sees by the lock that the first one has begun"


@pytest.mark.parametrize("answer", [datetime.now, lambda: (uuid4(), "a"), lambda: {"a": (Decimal(1), None, 1.5)}])
def test_a_run_that_could_not_be_sent_is_sent_with_its_first_arguments(bench, app, several_writes, answer):
    """Its lock has the key of these; and each question may take the next number of a sequence."""
    numbers = itertools.count()
    scheduler = scheduled(bench, app, e={"args": [BeatLazyFunc(numbers.__next__), BeatLazyFunc(answer)]})
    with connected(before_task_publish, Mock(side_effect=SystemExit)), pytest.raises(SystemExit):
        scheduler.tick()

    bench.retry_now()
    scheduler.tick()

    assert [message.args[0] for message in bench.messages] == [0]
    assert next(numbers) == 1


@pytest.mark.parametrize("edited", ["arguments", "task"])
def test_a_claimed_run_is_sent_as_it_was_edited_since_under_a_lock_of_that(bench, app, several_writes, edited):
    """Else an equal call of a program would run beside it, and a call of before would be refused."""
    for name in ("own", "other"):
        app.task(work, name=name, base=Singleton, unique_on=lambda *args: args, shared=False, typing=False)
    scheduler = scheduled(bench, app, own={"args": ["before"]})
    with connected(before_task_publish, Mock(side_effect=SystemExit)), pytest.raises(SystemExit):
        scheduler.tick()
    task, args = ("own", ["after"]) if edited == "arguments" else ("other", ["before"])
    Schedule(app).upsert("own", task, HOUR, args=args)

    bench.retry_now()
    scheduler.tick()

    (message,) = bench.messages
    assert (message.headers["task"], message.args) == (task, args)
    key = app.tasks[task].generate_lock(task, args, {})
    assert Ticket.of_message(message.headers, message.headers["id"]).key == key


@pytest.mark.parametrize("answer", [{1, 2}, range(3)], ids=["a set", "a range"])
def test_an_answer_that_json_cannot_keep_is_asked_for_again(bench, several_writes, answer):
    app = bench.new_app(task_serializer="pickle", accept_content=["json", "pickle"])
    ask = Mock(return_value=answer)
    scheduler = scheduled(bench, app, e={"args": [BeatLazyFunc(ask)]})
    with connected(before_task_publish, Mock(side_effect=SystemExit)), pytest.raises(SystemExit):
        scheduler.tick()

    bench.retry_now()
    scheduler.tick()

    assert ask.call_count == 2
    assert decided(bench) == {"e": "dispatched"}


@pytest.mark.parametrize("spoilt", ["[", "[1, 2]", "{}", "[[], {}, 3]", '["other", [], {}]'])
def test_answers_that_another_program_has_spoilt_are_asked_for_again(bench, app, several_writes, spoilt):
    scheduler = scheduled(bench, app, e={"args": [BeatLazyFunc(lambda: "asked")]})
    with connected(before_task_publish, Mock(side_effect=SystemExit)), pytest.raises(SystemExit):
        scheduler.tick()
    pending = json.loads(bench.redis.hget("redbeat:e", "pending"))
    bench.redis.hset("redbeat:e", "pending", json.dumps({**pending, "call": spoilt}))

    bench.retry_now()
    scheduler.tick()

    assert [message.args for message in bench.messages] == [["asked"]]
    assert decided(bench) == {"e": "dispatched"}


@HANDS_OUT
def test_on_one_server_slow_code_leaves_nothing_to_several_writes(bench, app, monkeypatch):
    """A beat that is killed between its writes would send it twice."""
    monkeypatch.setattr("singlebeat.beat.asking.ASKED_FOR", 0.05)
    monkeypatch.setattr(Store, "confirm", confirm := Mock(wraps=lambda *_: None))
    slow = {"args": [BeatLazyFunc(time.sleep, 0.1)], "options": {"overlap": "allow_all"}}
    scheduler = scheduled(bench, app, a=slow, b=slow)

    wait_until(lambda: scheduler.tick() and len(decided(bench)) == 2)

    assert [call for call in confirm.mock_calls if call.args[0]] == []


@pytest.mark.parametrize("where", ["a task", "the app"])
def test_a_function_is_asked_once_for_each_run_that_code_sends(bench, app, where):
    """It may take the next number of a sequence, or the next row of a table."""

    class Own(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            return super().apply_async(*args, **options)

    if where == "a task":
        app.task(work, name="own", base=Own, shared=False)
    else:
        app.send_task = lambda *args, **options: Celery.send_task(app, *args, **options)
    numbers = itertools.count()
    scheduler = scheduled(bench, app, e={"task": "own", "args": [BeatLazyFunc(numbers.__next__)]})
    for _ in range(3):
        scheduler.tick()
        Schedule(app).trigger("e")

    assert [message.args for message in bench.messages] == [[0], [1], [2]]


@pytest.mark.parametrize("place", ["argument", "key"])
@pytest.mark.parametrize("error", [sqlite3.OperationalError, ConnectionRefusedError])
def test_a_run_waits_for_a_service_that_its_code_asks(bench, app, writes, place, error, logged):
    """A run at one time alone would be lost for ever."""
    away = [True]

    def ask(*_: object) -> str:
        if away:
            raise error("it is away")
        return "a"

    scheduler = scheduled(bench, app, asks=asking(ask, place, app, "asks"), plain={})
    scheduler.tick()
    scheduler.tick()
    assert decided(bench) == {"plain": "dispatched"}
    assert bench.redis.zcard("redbeat::pending") == 0
    (line,) = logged("refused", "unreachable")
    assert line["entry"] == "asks"
    assert line["server"] == "what its own code asks"

    away.clear()
    bench.retry_now()
    scheduler.tick()
    assert decided(bench) == {"plain": "dispatched", "asks": "dispatched"}


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_a_key_function_with_a_bug_is_asked_once_for_a_run(bench, app, writes, error):
    """What it looks up is missing, and None has no items: a TypeError, as where arguments do not fit the task."""
    asked = list[int]()

    def ask(*_: object) -> str:
        asked.append(1)
        raise error("'NoneType' object is not subscriptable")

    scheduled(bench, app, asks=asking(ask, "key", app, "asks"), plain={}).tick()

    assert asked == [1]
    assert decided(bench) == {"plain": "dispatched", "asks": "publish_failed"}


@pytest.mark.parametrize("error", [ConnectionResetError, RedisConnectionError, OperationalError])
def test_routes_that_fail_hold_up_no_other_entry(bench, app, writes, error, logged):
    """Each asks a service of flags that is away; entries whose keys are asked for come last in a tick.

    The last error is kombu's: a route may send a message to the broker of another app.
    """
    routed = {f"routed {number}": {"task": "routed"} for number in range(3)}

    def route(name: str, *_: Any, **__: Any) -> None:
        if name == "routed":
            raise error("no flags")

    app.conf.task_routes = (route,)
    asks = asking(lambda *_: "a", "key", app, "asks")
    scheduler = scheduled(bench, app, **routed, asks=asks, plain={})
    scheduler.tick()

    assert decided(bench) == {"plain": "dispatched", "asks": "dispatched"}
    for _ in range(3):
        bench.retry_now()
        scheduler.tick()
    lines = logged("unreachable", "trouble", "refused")
    assert {(line["event"], line["server"]) for line in lines} == {("refused", "what its own code asks")}


def test_code_that_fails_is_not_asked_in_each_tick(bench, app, writes):
    asked = list[int]()

    def ask() -> None:
        asked.append(1)
        raise ConnectionRefusedError

    scheduler = scheduled(bench, app, asks={"args": [BeatLazyFunc(ask)]})
    delays = [scheduler.tick() for _ in range(5)]

    assert len(asked) == 1
    assert max(delays) > 0.5, "beat sleeps until it is asked again"


def test_a_paused_run_is_not_sent_while_its_lock_is_unknown(bench, app, several_writes, monkeypatch):
    """The locks' server fails when it is asked whether the run has begun, and answers again just after that."""
    app.task(work, name="own", base=Singleton, shared=False)
    scheduler = scheduled(bench, app, own={})
    with connected(before_task_publish, Mock(side_effect=SystemExit)), pytest.raises(SystemExit):
        scheduler.tick()
    bench.schedule.pause("own")
    backend = backend_of(app)
    acquire = backend.acquire_many
    answers = iter([LockBackendError("away")])

    def fail_once(*args: Any, **options: Any) -> Any:
        for error in answers:
            raise error
        return acquire(*args, **options)

    monkeypatch.setattr(backend, "acquire_many", fail_once)
    bench.retry_now()
    scheduler.tick()
    assert (bench.messages, decided(bench)) == ([], {})

    bench.retry_now()
    scheduler.tick()
    assert (bench.messages, decided(bench)) == ([], {"own": "paused"})


def test_slow_code_of_a_user_holds_up_no_other_entry_for_long(bench, several_writes, monkeypatch, logged):
    """All of them take longer than a beat may publish what it has claimed, and would be asked again in each tick."""
    monkeypatch.setattr("singlebeat.beat.asking.ASKED_FOR", 0.05)
    monkeypatch.setattr("singlebeat.beat.asking.LOGGED_FROM", 0.05)
    monkeypatch.setattr("singlebeat.beat.several_writes.RETRY_AFTER", 0.5)
    app = bench.new_app()
    slow = {"task": "slow", "schedule": 3600, "args": [BeatLazyFunc(time.sleep, 0.1)]}
    names = [f"e{number}" for number in range(9)]
    app.conf.beat_schedule = {**dict.fromkeys(names, slow), "plain": {"task": "plain", "schedule": 3600}}
    scheduler = bench.scheduler(app=app)
    scheduler.tick()
    for name in (*names, "plain"):
        Schedule(app).trigger(name)

    def all_are_sent() -> bool:
        bench.retry_now()
        scheduler.tick()
        return {record["entry"] for record in bench.history} == {*names, "plain"}

    wait_until(all_are_sent, what="the runs of the slow entries")
    assert bench.history[0]["entry"] == "plain"
    assert len(bench.messages) == 10
    slow_ones = [line["entry"] for line in logged("expensive") if line["entry"] != "plain"]  # on a busy host, all are
    assert sorted(slow_ones) == names


def test_a_broker_that_is_slow_is_not_called_slow_code(bench, app, writes, monkeypatch, logged):
    monkeypatch.setattr("singlebeat.beat.asking.LOGGED_FROM", 0.05)
    publish = Producer.publish

    def publish_slowly(self: Producer, *args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return publish(self, *args, **options)

    scheduler = scheduled(bench, app, plain={})
    monkeypatch.setattr(Producer, "publish", publish_slowly)
    scheduler.tick()

    assert decided(bench) == {"plain": "dispatched"}
    assert logged("expensive") == []


@pytest.mark.parametrize("place", ["argument", "key", pytest.param("route", marks=HANDS_OUT), "apply_async"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_entry_whose_code_is_slow_is_named_once(bench, monkeypatch, logged, place, fails):
    monkeypatch.setattr("singlebeat.beat.asking.LOGGED_FROM", 0.05)
    app = bench.new_app()

    def answer(*_: Any, **__: Any) -> Any:
        time.sleep(0.1)
        if fails:
            raise TimeoutError("the service does not answer")
        return "a"

    class Slow(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            answer()
            return super().apply_async(*args, **options)

    options = {
        "argument": {},
        "key": {"base": Singleton, "unique_on": answer},
        "route": {},
        "apply_async": {"base": Slow},
    }
    app.task(work, name="slow", shared=False, typing=False, **options[place])
    if place == "route":
        app.conf.task_routes = [lambda name, *_, **__: answer() and None]
    args = [BeatLazyFunc(answer)] if place == "argument" else ["a"]
    app.conf.beat_schedule = {"e": {"task": "slow", "schedule": 3600, "args": args}}
    scheduler = bench.scheduler(app=app)
    scheduler.tick()
    for number in range(3):
        if number == 0 or not fails:
            Schedule(app).trigger("e")
        bench.retry_now()
        scheduler.tick()

    assert len(bench.history) == (0 if fails else 3)
    assert [line["entry"] for line in logged("expensive")] == ["e"]
