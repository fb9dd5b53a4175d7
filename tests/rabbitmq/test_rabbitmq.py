"""RabbitMQ as the broker: with locks and schedule in Redis, and with no Redis at all."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery, chord
from celery.beat import SchedulingError, Service
from celery.schedules import schedule
from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast

from singlebeat import Entry, Schedule, Scheduler
from singlebeat.beat.lost_messages import BOUND, Found, LostMessages, Waiting, examine, may_yet_start
from singlebeat.broker import ConfirmingSender
from singlebeat.config import Config
from singlebeat.locks import backend_of
from singlebeat.locks.base import HEADER, Ticket
from singlebeat.locks.key import behind_key
from tests.incidents.tools import Beat, Incident, Tools
from tests.rabbitmq.server import RabbitMQ, find_rabbitmq
from tests.support import APP, CeleryLauncher, CeleryProcess, Oracle, RedisServer, free_port, wait_until
from tests.system.apps import make_app

#: Its server takes long for each command on a slow host.
pytestmark = pytest.mark.timeout(240)

SINGLE, IN_TURN = f"{APP}.single", f"{APP}.in_turn"

#: Deliveries of one message after which a quorum queue drops it here.
MOST_DELIVERIES = 3


@pytest.fixture(scope="module")
def rabbit() -> Iterator[RabbitMQ]:
    if find_rabbitmq() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("RabbitMQ is not installed")
    with RabbitMQ() as rabbit:
        yield rabbit


class Stage:
    """Workers, beats and a sender whose broker is RabbitMQ."""

    def __init__(self, celery: CeleryLauncher, oracle: Oracle, conf: Mapping[str, Any]) -> None:
        self.celery, self.oracle, self.conf = celery, oracle, conf

    def start(self, *command: str, **conf: Any) -> CeleryProcess:
        environment = {"SB_TEST_URL": self.conf["broker_url"]}  # what is not set is not in Redis
        return self.celery(*command, env=environment, conf={**self.conf, **conf})

    def app(self) -> Celery:
        return make_app(self.conf["broker_url"], self.conf)


def beat_worker_and_singleton(stage: Stage) -> None:
    """Beat sends, the worker runs, a call meets its equal; schedule and locks are in Redis."""
    tick = {"task": SINGLE, "schedule": schedule(0.5), "args": ["tick"]}
    stage.start("worker", "-c", "2").ready()
    stage.start("beat", beat_schedule={"tick": tick})
    oracle = stage.oracle
    with stage.app() as app:
        single = app.tasks[SINGLE]
        oracle.wait_ended(3, "tick", timeout=60)
        first = single.delay("one", seconds=60)
        oracle.wait_started(1, "one")
        again = single.delay("one", seconds=60)
        assert (again.id, again.is_duplicate) == (first.id, True)
        oracle.let_go("one")
        assert first.get(timeout=60) == "one"
    ids = [run.id for run in oracle.runs("tick")]
    assert len(set(ids)) == len(ids)
    assert oracle.max_concurrent("one") == oracle.started("one") == oracle.max_concurrent("tick") == 1


def a_message_of_a_killed_worker(stage: Stage) -> None:
    """RabbitMQ delivers it again at once, under the lease of the dead run: it waits, and then runs once more."""
    late = {"task_acks_late": True, "worker_prefetch_multiplier": 1, "singlebeat_lock_lease": 6}
    oracle = stage.oracle
    stage.conf = {**stage.conf, **late}
    doomed = stage.start("worker", "-c", "1").ready()
    with stage.app() as app:
        single = app.tasks[SINGLE]
        call = single.delay("one", seconds=60)
        oracle.wait_started(1, "one")
        heir = stage.start("worker", "-c", "1").ready()

        doomed.kill_group()

        heir.wait_for(rf"{SINGLE}\[{call.id}\].*received", timeout=60)
        assert single.delay("one", seconds=60).id == call.id, "the lock is held for it"
        oracle.wait_started(2, "one", timeout=60)
        oracle.let_go("one")
        assert call.get(timeout=60) == "one"
        assert oracle.max_concurrent("one") == 1
        assert {run.id for run in oracle.runs("one")} == {call.id}
        assert single.delay("one").get(timeout=60) == "one", "its lock is free"


def calls_that_wait_for_their_turn(stage: Stage) -> None:
    """They run one after the other; early acknowledgement leaves them nowhere but in the message that is sent again.

    Their bodies are larger than a frame of RabbitMQ, into which all headers of a message must fit.
    """
    stage.start("worker", "-c", "4").ready()
    with stage.app() as app:
        in_turn, never = app.tasks[IN_TURN], app.tasks[f"{APP}.plain"].si("x" * 200_000)
        calls = [in_turn.apply_async(["one"], {"seconds": 60}, link_error=never) for _ in range(3)]
        for count in (1, 2, 3):
            stage.oracle.wait_started(count, "one", timeout=60)
            stage.oracle.let_go("one")
        assert [call.get(timeout=60) for call in calls] == ["one"] * 3
    assert stage.oracle.max_concurrent("one") == 1


def a_chord_of_two_equal_calls(stage: Stage) -> None:
    """Neither is a duplicate of the other, because the chord waits for both: the second waits for its turn."""
    stage.start("worker", "-c", "4").ready()
    with stage.app() as app:
        single, plain = app.tasks[SINGLE], app.tasks[f"{APP}.plain"]
        result = chord([single.s("one", seconds=60), single.s("one", seconds=60)])(plain.si("both"))
        for count in (1, 2):
            stage.oracle.wait_started(count, "one", timeout=60)
            stage.oracle.let_go("one")
        assert result.get(timeout=60) == "both"
    assert stage.oracle.max_concurrent("one") == 1


def a_late_call_that_waits_longer_than_it_may_be_delivered(stage: Stage) -> None:
    """It is sent again rather than put back: a quorum queue drops what it has delivered too often."""
    stage.conf = {**stage.conf, "task_acks_late": True}
    worker = stage.start("worker", "-c", "4").ready()
    with stage.app() as app:
        in_turn = app.tasks[IN_TURN]
        first = in_turn.delay("one", seconds=60)
        stage.oracle.wait_started(1, "one", timeout=60)
        second = in_turn.delay("two")
        worker.wait_for(rf"{second.id}\] waits for its turn", count=MOST_DELIVERIES + 2, timeout=60)
        stage.oracle.let_go("one")
        assert [first.get(timeout=60), second.get(timeout=60)] == ["one", "two"]
    assert not worker.matches("cannot be sent again")


def a_purged_queue(stage: Stage) -> None:
    """The lock of a message stays while it waits in a queue or is delayed, and no longer."""
    stage.conf = {**stage.conf, "singlebeat_lost_after": 1.5}
    later = stage.conf["task_default_queue"] + "_later"
    busy = {"task": SINGLE, "schedule": schedule(0.5), "args": ["busy", 60], "options": {"countdown": 3}}
    purged = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["purged"], "options": {"queue": later}}
    stage.start("worker", "-c", "1").ready()
    with stage.app() as app:
        wait_until(backend_of(app).workers_seen, timeout=60, what="the worker to say that it looks after locks")
        beat = stage.start("beat", beat_schedule={"purged": purged, "busy": busy})
        sent = beat.wait_for(r"event=dispatched entry=purged .* id=(\S+)", timeout=60).group(1)
        beat.wait_for(f"holder={sent}", count=4, timeout=60)
        with app.connection_for_write() as connection:
            assert connection.default_channel.queue_purge(later) == 1, "its lock has stayed"

        beat.wait_for(rf"event=message_lost .*id={sent}", timeout=60)
        beat.wait_for(r"event=dispatched entry=purged", count=2, timeout=60)
    stage.oracle.wait_started(1, "busy", timeout=60)
    assert not beat.matches(r"event=message_lost .*entry=busy")
    assert len(beat.matches(r"event=dispatched entry=busy")) == 1


def no_redis_at_all(stage: Stage) -> None:
    """Equal runs exclude one another by asking the workers through RabbitMQ; results go there as well."""
    stage.conf = {
        **stage.conf,
        "result_backend": "rpc://",
        "redbeat_redis_url": None,
        "singleton_backend_url": None,
        "singleton_backend_class": "singlebeat.locks.inspect:InspectBackend",
        "singleton_backend_kwargs": {"timeout": 3, "settle": 0.5},
        "worker_prefetch_multiplier": 1,
    }
    oracle = stage.oracle
    workers = [stage.start("worker", "-c", "2") for _ in range(2)]
    for worker in workers:
        worker.ready()
    with stage.app() as app:
        single = app.tasks[SINGLE]
        calls = [single.delay("one", seconds=60) for _ in range(3)]
        oracle.wait_started(1, "one", timeout=60)
        skipped = rf"{SINGLE}\[.* is skipped .*its lock is held by task"
        wait_until(lambda: sum(len(w.matches(skipped)) for w in workers) == 2, timeout=60, what="two to be skipped")
        runner = oracle.running("one")[0].id
        oracle.let_go("one")
        assert next(call for call in calls if call.id == runner).get(timeout=60) == "one"
    assert oracle.started("one") == 1
    assert not [line for worker in workers for line in worker.lines if "redis" in line.lower()]


CASES: dict[str, Callable[[Stage], None]] = {
    "beat, worker and Singleton": beat_worker_and_singleton,
    "a message of a killed worker": a_message_of_a_killed_worker,
    "calls that wait for their turn": calls_that_wait_for_their_turn,
    "a chord of two equal calls": a_chord_of_two_equal_calls,
    "a late call that waits long": a_late_call_that_waits_longer_than_it_may_be_delivered,
    "a purged queue": a_purged_queue,
    "no Redis at all": no_redis_at_all,
}


def test_beat_outlives_an_alarm_of_rabbitmq(
    rabbit: RabbitMQ, celery: CeleryLauncher, oracle: Oracle, server: RedisServer
) -> None:
    """The confirmation of a message does not come then; a beat that starts meanwhile meets the same.

    The first beat has no bound for reading, as with TLS.
    """
    conf = {
        **conf_of(rabbit, server),
        **on_quorum_queue("alarm"),
        "beat_schedule": {"tick": {"task": SINGLE, "schedule": schedule(0.5), "args": ["tick"]}},
        "singlebeat_socket_timeout": 1,
        "singlebeat_watchdog_timeout": 20,
    }
    stage = Stage(celery, oracle, conf)
    stage.start("worker", "-c", "2").ready()
    before = stage.start("beat", broker_transport_options={"confirm_publish": True, "read_timeout": 600})
    oracle.wait_ended(2, "tick", timeout=60)
    with rabbit.alarm():
        before.wait_for("event=unreachable", timeout=60)
        before.terminate()
        assert before.wait() == 0
        meanwhile = stage.start("beat")
        meanwhile.wait_for("event=unreachable", timeout=60)
    oracle.wait_ended(oracle.ended("tick") + 3, "tick", timeout=60)
    assert meanwhile.returncode is None
    ids = [run.id for run in oracle.runs("tick")]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("bound", [{}, {"read_timeout": 600}], ids=["bounded reads", "unbounded reads, as with TLS"])
def test_an_alarm_of_rabbitmq_doubles_no_message_for_each_try(bound, rabbit, celery, oracle, server, redis):
    """When the alarm ends, RabbitMQ delivers what waits on blocked connections, also on those that are closed."""
    lockless = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["tick"], "overlap": "allow_all"}
    conf = {**conf_of(rabbit, server), **on_classic_queue("blocked"), "beat_schedule": {"tick": lockless}}
    stage = Stage(celery, oracle, {**conf, "singlebeat_socket_timeout": 1, "broker_transport_options": bound})
    tries = set[float]()

    def has_tried_for_long() -> bool:
        tries.update(score for _, score in redis.zrange("redbeat::pending", 0, -1, withscores=True))
        return len(tries) >= 5  # four tries or five, for seven seconds or more

    stage.start("worker", "-c", "2").ready()
    beat = stage.start("beat")
    oracle.wait_ended(2, "tick", timeout=60)
    with rabbit.alarm():
        beat.wait_for("event=unreachable", timeout=60)
        wait_until(has_tried_for_long, timeout=60, what="many tries")
    beat.wait_for("event=recovered", timeout=15)
    oracle.wait_ended(oracle.ended("tick") + 3, "tick", timeout=15)
    with rabbit.alarm():
        beat.wait_for("event=unreachable", count=2, timeout=60)
        beat.terminate()
        assert beat.wait(timeout=15) == 0

    repeated = [count for count in Counter(run.id for run in oracle.runs("tick")).values() if count > 1]
    assert repeated in ([], [2]), "the message that was held, and the one that was sent after the alarm"
    assert len(beat.matches("event=unreachable .*RabbitMQ takes no messages until its alarm ends")) == 2


def test_one_message_of_a_connection_waits_for_the_end_of_an_alarm(rabbit, server, redis):
    conf = {**conf_of(rabbit, server), **on_classic_queue("waiting"), "singlebeat_socket_timeout": 1}
    with make_app(rabbit.url, {**conf, "singlebeat_watchdog_timeout": None}) as app:
        entry = Entry("e", f"{APP}.plain", schedule(60), ["x"], options={"retry": False}, app=app)
        scheduler = Scheduler(app)
        scheduler.publish(entry)
        with rabbit.alarm():
            for _ in range(5):
                with pytest.raises(SchedulingError):
                    scheduler.publish(entry)
                scheduler.forget_broker()
        wait_until(scheduler.reaches_broker, what="the end of the alarm")
        scheduler.publish(entry)
        scheduler.close()
        with app.connection_for_write() as connection:
            waiting = connection.default_channel.queue_declare("waiting", passive=True).message_count
        assert waiting <= 3, "two that were confirmed, and one that was held"


def test_a_blocked_connection_that_rabbitmq_ends_is_forgotten(rabbit, server, redis):
    conf = {**conf_of(rabbit, server), **on_classic_queue("ended"), "singlebeat_socket_timeout": 1}
    with make_app(rabbit.url, {**conf, "singlebeat_watchdog_timeout": None}) as app:
        entry = Entry("e", f"{APP}.plain", schedule(60), ["x"], options={"retry": False}, app=app)
        scheduler = Scheduler(app)

        def is_sent() -> bool:
            try:
                scheduler.publish(entry)
            except SchedulingError:
                scheduler.forget_broker()
                return False
            return True

        with rabbit.alarm():
            assert not is_sent()
            with rabbit.outage():
                assert not is_sent()
        wait_until(is_sent, what="a message over a new connection")
        scheduler.close()


def let_one_wait(app: Celery, task: str, worker: CeleryProcess, oracle: Oracle) -> None:
    """Send the calls "first", which runs, and "second", which waits for its end."""
    for call in ("first", "second"):
        ticket = Ticket(call, "SINGLETONLOCK_{x}", "" if call == "second" else "SINGLETONLOCK_{x}", waits=True)
        app.send_task(task, (call, 60), task_id=call, headers={HEADER: ticket.header()})
        oracle.wait_started(1, "first", timeout=60)
    worker.wait_for(r"\[second\] waits for its turn", timeout=60)


@pytest.mark.parametrize(
    ("options", "task", "acks_late"),
    [
        pytest.param((), IN_TURN, False, id="prefork"),
        pytest.param((), IN_TURN, True, id="prefork, acks_late"),
        pytest.param((), f"{APP}.plain", False, id="prefork, a plain task that beat has sent"),
        pytest.param(("-P", "threads"), IN_TURN, False, id="threads"),
        pytest.param(("-P", "gevent"), IN_TURN, False, id="gevent"),
    ],
)
def test_a_run_that_waits_outlives_rabbitmq_in_an_alarm(options, task, acks_late, rabbit, celery, oracle, server):
    """A message that is sent again in an alarm dies with RabbitMQ; the worker still has it, or RabbitMQ has."""
    queue = on_classic_queue(f"alarm and outage of {task}, {options}, {acks_late}")
    conf = {**conf_of(rabbit, server), **queue, "task_acks_late": acks_late, "broker_connection_max_retries": None}
    # Else the next message after the outage uses the worker's connection in a thread of the pool, and may hang there.
    conf["worker_enable_prefetch_count_reduction"] = False
    stage = Stage(celery, oracle, {**conf, "singlebeat_socket_timeout": 2})
    worker = stage.start("worker", *options, "-c", "2").ready()
    with stage.app() as app:
        let_one_wait(app, task, worker, oracle)
        with rabbit.alarm():
            rabbit.await_blocked()
            with rabbit.outage():
                pass
        oracle.let_go("first")

        oracle.wait_started(1, "second", timeout=60)
        oracle.let_go("second")
        oracle.wait_ended(1, "second", timeout=60)
    assert oracle.max_concurrent("second") == 1


def test_a_run_that_waits_outlives_a_queue_that_is_full(rabbit, celery, oracle, server):
    """Only this process has its message, which the queue takes back when there is room."""
    policy = ("full", "^crowded$", '{"max-length": 0, "overflow": "reject-publish"}')
    stage = Stage(celery, oracle, {**conf_of(rabbit, server), **on_classic_queue("crowded")})
    worker = stage.start("worker", "-c", "2").ready()
    with stage.app() as app:
        let_one_wait(app, IN_TURN, worker, oracle)
        before = worker.position
        rabbit.control("set_policy", *policy)
        try:
            worker.wait_for(r"\[second\] waits for its turn", timeout=60, after=before)
        finally:
            rabbit.control("clear_policy", "full")
        oracle.let_go("first")

        oracle.wait_started(1, "second", timeout=60)
        oracle.let_go("second")
        oracle.wait_ended(1, "second", timeout=60)


@pytest.mark.parametrize(("alarmed", "confirms"), [(True, False), (True, True), (False, False)])
def test_doctor_and_explain_name_the_alarm_of_rabbitmq(alarmed, confirms, rabbit, celery, oracle, server):
    """They end, too, where an app lets RabbitMQ confirm all that it sends: kombu would ask again for ever."""
    entry = {"task": SINGLE, "schedule": schedule(3600), "args": ["x"]}
    conf = {**conf_of(rabbit, server), **on_classic_queue("named"), "beat_schedule": {"hourly": entry}}
    if confirms:
        conf["broker_transport_options"] = {"confirm_publish": True}
    stage = Stage(celery, oracle, conf)
    stage.start("worker", "-c", "1").ready()
    beat = stage.start("beat")
    beat.wait_for("event=leadership_gained")
    with rabbit.alarm() if alarmed else nullcontext():
        assert stage.start("singlebeat", "trigger", "hourly").wait() == 0
        beat.wait_for("event=unreachable" if alarmed else "event=dispatched", timeout=60)
        said = {name: stage.start("singlebeat", *name.split()) for name in ("doctor", "explain hourly")}
        for process in said.values():
            process.wait(timeout=60)
    why = "RabbitMQ takes no messages until its alarm ends"
    assert bool(said["doctor"].matches(f"problem *broker amqp://.* it does not answer: {why}")) is alarmed
    assert bool(said["explain hourly"].matches(why)) is alarmed
    assert not said["doctor"].matches("no worker answers")
    assert not said["explain hourly"].matches("No worker answers")


def test_a_sender_outlives_the_end_of_its_idle_connection(rabbit, server):
    """RabbitMQ ends a connection that is idle for long: it gets no heartbeats."""
    with make_app(rabbit.url, {**conf_of(rabbit, server), **on_classic_queue("idle")}) as app:
        sender, plain = ConfirmingSender.of(app), app.tasks[f"{APP}.plain"]
        for _ in range(2):
            sender.send(partial(plain.apply_async, ["x"]))
            rabbit.end_connections()
        with app.connection_for_write() as connection:
            assert connection.default_channel.queue_declare("idle", passive=True).message_count == 2


def test_b6_rabbitmq_and_redis_that_are_unreachable_are_named(
    rabbit: RabbitMQ, celery: CeleryLauncher, oracle: Oracle, server: RedisServer
) -> None:
    """One of the sixteen incidents of ``test_incidents.py``: RabbitMQ, then the Redis of schedule and locks as well."""
    # A worker that loses its broker may end a run only when it has it again: that run's lock must not skip the next.
    steady = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["steady"], "overlap": "allow_all"}
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as redis:
        port = free_port()
        conf = {**conf_of(rabbit, redis), **on_classic_queue("outage"), "result_backend": server.celery_url}
        conf |= {"redbeat_lock_timeout": 3, "singlebeat_socket_timeout": 1, "singlebeat_metrics_port": port}
        conf |= {"broker_connection_max_retries": None}
        stage = Stage(celery, oracle, conf)
        worker = stage.start("worker", "-c", "2", singlebeat_metrics_port=None).ready()
        beat = Beat(stage.start("beat", "-l", "WARNING", beat_schedule={"steady": steady}), port)
        tools = Tools(stage.app())
        oracle.wait_ended(2, "steady", timeout=60)
        waits = "is claimed and not confirmed, as task .*: the broker .* does not answer"
        with rabbit.outage():
            Incident("B6 RabbitMQ stopped").until(
                beat.logs("ERROR.*stay pending until the broker answers event=unreachable server=.?the broker"),
                beat.metric("pending_occurrences", "1.0"),
                tools.say("status", "^pending +1, .*claimed and not confirmed"),
                tools.say(
                    "doctor",
                    "^problem  broker .*: it does not answer: .*Connection refused; messages cannot be sent",
                    code=1,
                ),
                tools.say("explain steady", waits, gone="It is due now|No beat"),
                tools.say("health", f"^healthy: .*{beat.leads}"),
                beat.ready("^200 ok$"),
            )
            redis.kill()
            Incident("B6 Redis killed, too").until(
                beat.logs("ERROR.*Trouble with Redis: trying again event=trouble"),
                beat.ready(r"^503 the schedule's server \S+ does not answer"),
                tools.say("health", f"^Error: the schedule's server {redis.url}: ", code=2),
                tools.say("explain steady", f"^Error: the schedule's server {redis.url}: ", code=2),
            )
            redis.start()
            Incident("B6 Redis is back").until(
                beat.logs("WARNING.*Redis works again event=recovered"),
                beat.ready("^200 ok$"),
                tools.say("health", f"^healthy: .*{beat.pid}"),
                tools.say("explain steady", waits),
            )
        incident, ended = Incident("B6 RabbitMQ is back"), oracle.ended("steady")
        incident.until(
            beat.logs("WARNING.*the broker works again event=recovered"),
            beat.metric("pending_occurrences", "0.0"),
            tools.say("status", "^pending +0$"),
            tools.say("doctor", "^fine     workers: 1 answer", gone="unreachable"),
            tools.say("explain steady", "^The run for .* was sent"),
            timeout=60,
        )
        oracle.wait_ended(ended + 3, "steady", timeout=60)
        assert beat.process.returncode is worker.returncode is None
        decided = [record["id"] for _, record in redis.client().xrange("redbeat::history")]
        started = Counter(run.id for run in oracle.runs("steady"))
        assert len(set(decided)) == len(decided) > 3
        assert len(started) > 3
        # RabbitMQ delivers the message again whose acknowledgement it has not seen when it stops; it has no lock.
        assert started.total() - len(started) <= 1


@pytest.mark.parametrize(
    ("refused", "decision"),
    [
        ({"exchange": "nosuch", "routing_key": "x"}, None),
        ({"expiration": -5}, "publish_failed"),
        ({"headers": {"a": "x" * 200_000}}, "publish_failed"),
    ],
    ids=["an unknown exchange", "a negative expiration", "too large a header"],
)
def test_a_message_that_rabbitmq_refuses_takes_no_other_with_it(refused, decision, rabbit, server, redis):
    """RabbitMQ closes the channel, or the connection, and drops what comes on it meanwhile."""
    conf = {**conf_of(rabbit, server), "task_default_queue": "refusing", "singlebeat_watchdog_timeout": None}
    with make_app(rabbit.url, conf) as app:
        with app.connection_for_write() as connection:
            connection.default_channel.queue_delete("refusing")
        for at, options in enumerate([{}, refused, {}, {}]):
            Entry(f"e{at}", f"{APP}.plain", schedule(60), ["x"], options=options, app=app, run_on_start=True).save()
            redis.zadd("redbeat::schedule", {f"redbeat:e{at}": at})
        scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
        scheduler.tick()
        scheduler.close()

        decided = {record.entry: record.decision for record in Schedule(app).history()}
        others = dict.fromkeys(("e0", "e2", "e3"), "dispatched")
        assert decided == others | ({"e1": decision} if decision else {})
        assert redis.zcard("redbeat::pending") == (decision is None)
        with app.connection_for_write() as connection:
            assert connection.default_channel.queue_declare("refusing", passive=True).message_count == 3


def test_an_entry_whose_queue_is_full_is_named(rabbit, server, redis, caplog):
    """The others are sent, so the broker is not unreachable."""
    conf = {**conf_of(rabbit, server), "task_default_queue": "roomy", "singlebeat_watchdog_timeout": None}
    full = Queue("full", queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    conf["task_queues"] = [Queue("roomy"), full]
    with make_app(rabbit.url, conf) as app, app.connection_for_write() as connection:
        full(connection).declare()
        app.send_task("any", queue="full")
        for at, options in enumerate([{"queue": "full"}, {}]):
            Entry(f"e{at}", f"{APP}.plain", schedule(60), ["x"], options=options, app=app, run_on_start=True).save()
        scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
        for _ in range(3):
            scheduler.tick()
            redis.zadd("redbeat::pending", {"redbeat:e0": 0}, xx=True)
        lines = [facts for record in caplog.records if (facts := getattr(record, "singlebeat", None))]
        named = [(line["entry"], line["reason"]) for line in lines if line["event"] == "refused"]

        assert [record.entry for record in Schedule(app).history()] == ["e1"]
        assert named == [("e0", "Couldn't apply scheduled task e0: MessageNacked")]
        assert not [line for line in lines if line["event"] in {"unreachable", "recovered"}]
        full(connection).purge()
        scheduler.tick()
        scheduler.close()
        assert {record.entry for record in Schedule(app).history()} == {"e0", "e1"}


#: What RabbitMQ refuses to all, and how that ends. The first ones concern connections, the others queues and messages.
REFUSALS = {
    "login": (("change_password", "guest", "another"), ("change_password", "guest", "guest")),
    "virtual host": (("clear_permissions", "guest"), ("set_permissions", "guest", ".*", ".*", ".*")),
    "limit of connections": (
        ("set_vhost_limits", '{"max-connections": 0}'),
        ("set_vhost_limits", '{"max-connections": -1}'),
    ),
    "limit of channels": (("set_user_limits", "guest", '{"max-channels": 0}'), ("clear_user_limits", "guest", "all")),
    "right to declare": (("set_permissions", "guest", "^$", ".*", ".*"), ("set_permissions", "guest", *[".*"] * 3)),
    "right to write": (("set_permissions", "guest", ".*", "^$", ".*"), ("set_permissions", "guest", *[".*"] * 3)),
    "limit of queues": (("set_vhost_limits", '{"max-queues": 0}'), ("set_vhost_limits", '{"max-queues": -1}')),
}


@pytest.fixture
def runs_outlive(rabbit, server, redis, caplog):
    """Return a check that due runs stay pending in a context, and are sent after it."""

    def check(
        refusing: AbstractContextManager[object],
        queue: str,
        event: str,
        why: str = "the broker or the locks' server is away, or refuses",
        options: Mapping[str, object] = {},
    ) -> None:
        conf = {**conf_of(rabbit, server), "task_default_queue": queue, "singlebeat_watchdog_timeout": None}
        with make_app(rabbit.url, conf) as app:
            for at in range(2):
                Entry(f"e{at}", f"{APP}.plain", schedule(60), ["x"], options=options, app=app, run_on_start=True).save()
            scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
            with refusing:
                for _ in range(3):
                    scheduler.tick()
                    try_again_now()
                assert not Schedule(app).history()
                assert redis.zcard("redbeat::pending") == 2
                said = Tools(app).ask("doctor")
                assert re.search(rf"2 occurrences are claimed and not confirmed: .*{re.escape(why)}", said)

            def sent() -> bool:
                scheduler.tick()
                try_again_now()
                return len(Schedule(app).history()) == 2

            wait_until(sent, timeout=60, what="both runs")
            scheduler.close()
            assert {record.decision for record in Schedule(app).history()} == {"dispatched"}
            events = [facts["event"] for record in caplog.records if (facts := getattr(record, "singlebeat", None))]
            assert event in events

    def try_again_now() -> None:
        if pending := redis.zrange("redbeat::pending", 0, -1):
            redis.zadd("redbeat::pending", dict.fromkeys(pending, 0), xx=True)

    return check


@pytest.mark.parametrize("refused", REFUSALS)
def test_runs_outlive_a_broker_that_refuses_them(refused, rabbit, runs_outlive):
    @contextmanager
    def refusing() -> Iterator[None]:
        refuse, admit = REFUSALS[refused]
        rabbit.control(*refuse)
        try:
            yield
        finally:
            rabbit.control(*admit)

    queue = f"refused by its {refused}"
    runs_outlive(refusing(), queue, "unreachable" if [*REFUSALS].index(refused) < 4 else "refused")


def test_runs_outlive_a_queue_with_other_arguments(rabbit, runs_outlive):
    """Another program has declared it: an operator deletes it, or corrects the setting."""

    @contextmanager
    def declared_otherwise() -> Iterator[None]:
        with Connection(rabbit.url) as connection:
            connection.default_channel.queue_declare("otherwise", arguments={"x-max-priority": 5}, auto_delete=False)
            yield
            connection.default_channel.queue_delete("otherwise")

    runs_outlive(declared_otherwise(), "otherwise", "refused")


@pytest.mark.parametrize("by", ["its name", "its exchange"])
def test_runs_outlive_the_node_of_a_cluster_that_has_their_queue(by, rabbit, runs_outlive):
    """As in each rolling upgrade: beat reaches another node, which has no place for the message meanwhile."""
    name = f"at home elsewhere, by {by}"
    with RabbitMQ(joins=rabbit) as node:

        @contextmanager
        def node_away() -> Iterator[None]:
            with Connection(node.url) as connection:
                Queue(name, Exchange(name), name)(connection).declare()
            with node.outage():
                yield

        try:
            refuses = f"refuses queue {name}: Queue.declare: (404) NOT_FOUND - home node"
            if by == "its name":
                runs_outlive(node_away(), name, "refused", refuses)
            else:
                bound = {"exchange": name, "routing_key": name}
                runs_outlive(node_away(), name, "refused", "maybe no queue is bound to exchange at home", bound)
        finally:
            node.control("stop_app")
            rabbit.control("forget_cluster_node", node.name)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_message_that_a_lost_broker_has_taken_along_frees_its_lock(pool, rabbit, celery, oracle, server, redis):
    """A worker that held it for its countdown lives, connects again, and does not have it any more."""
    host = f"of {pool}"
    make = (("add_vhost", host), ("set_permissions", "-p", host, "guest", ".*", ".*", ".*"))
    for command in make:
        rabbit.control(*command)
    url = f"{rabbit.url.rstrip('/')}/{quote(host)}"
    conf = {**conf_of(rabbit, server), "broker_url": url, "singlebeat_lost_after": 2, "singlebeat_lock_lease": 3}
    stage = Stage(celery, oracle, conf)
    worker = stage.start("worker", "-c", "1", "-P", pool).ready()
    with stage.app() as app:
        app.tasks[SINGLE].apply_async(["a"], countdown=20)
    worker.wait_for(rf"{SINGLE}.*received")

    rabbit.control("delete_vhost", host)
    for command in make:
        rabbit.control(*command)

    beat = stage.start("beat", beat_schedule={"a": {"task": SINGLE, "schedule": schedule(1), "args": ["a"]}})
    beat.wait_for("event=message_lost", timeout=90)
    oracle.wait_started(1, "a", timeout=60)


def test_a_delayed_run_waits_for_the_first_worker(rabbit, celery, server, redis, caplog):
    """That declares the exchanges in which RabbitMQ delays messages."""
    conf = {**conf_of(rabbit, server), **on_quorum_queue("early"), "singlebeat_watchdog_timeout": None}
    stage = Stage(celery, None, conf)
    with stage.app() as app:
        with app.connection_for_write() as connection:
            for level in range(28):  # of another test
                connection.default_channel.exchange_delete(f"celery_delayed_{level}")
        Entry("e", f"{APP}.plain", schedule(60), ["x"], options={"countdown": 2}, app=app, run_on_start=True).save()
        scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
        scheduler.tick()
        assert not Schedule(app).history()
        assert "no exchange 'celery_delayed_27'" in caplog.text
        stage.start("worker", "-c", "1").ready()

        def sent() -> bool:
            redis.zadd("redbeat::pending", {"redbeat:e": 0}, xx=True)
            scheduler.tick()
            return bool(Schedule(app).history())

        wait_until(sent, timeout=60, what="the run")
        scheduler.close()
        assert [record.decision for record in Schedule(app).history()] == ["dispatched"]


def test_a_message_that_reaches_no_queue_waits_for_one(rabbit, server, redis, caplog):
    """RabbitMQ confirms such a message, and drops it."""
    conf = {**conf_of(rabbit, server), "task_default_queue": "reached", "singlebeat_watchdog_timeout": None}
    conf["task_send_sent_event"] = True  # these reach no queue either
    nowhere = {"exchange": "amq.direct", "routing_key": "a typing error"}
    with make_app(rabbit.url, conf) as app, app.connection_for_write() as connection:
        for at, options in enumerate([{}, nowhere, {}, {**nowhere, "mandatory": False}, {}]):
            Entry(f"e{at}", f"{APP}.plain", schedule(60), ["x"], options=options, app=app, run_on_start=True).save()
            redis.zadd("redbeat::schedule", {f"redbeat:e{at}": at})
        scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
        scheduler.tick()

        decided = {record.entry: record.decision for record in Schedule(app).history()}
        assert decided == dict.fromkeys(["e0", "e2", "e3", "e4"], "dispatched")
        assert connection.default_channel.queue_declare("reached", passive=True).message_count == 3
        assert re.search("does not take the message of e1.*NO_ROUTE.*start a worker that reads the queue", caplog.text)

        Queue("found at last", Exchange("amq.direct", no_declare=True), "a typing error")(connection).declare()
        redis.zadd("redbeat::pending", {"redbeat:e1": 0}, xx=True)
        wait_until(lambda: scheduler.tick() and len(Schedule(app).history()) == 5, timeout=60, what="the run")
        scheduler.close()
        assert connection.default_channel.queue_declare("found at last", passive=True).message_count == 1


@pytest.mark.parametrize("options", [{}, {"queue": "deleted"}], ids=["the default queue", "one of its own"])
def test_a_run_whose_queue_was_deleted_gets_it_again(rabbit, server, redis, options):
    conf = {**conf_of(rabbit, server), "task_default_queue": "deleted", "singlebeat_watchdog_timeout": None}
    with make_app(rabbit.url, conf) as app, app.connection_for_write() as connection:
        scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
        for name in ("e0", "e1", "e2"):
            Entry(name, f"{APP}.plain", schedule(60), [name], options=options, app=app, run_on_start=True).save()
            scheduler.tick()
            assert connection.default_channel.queue_delete("deleted") == 1, name
        scheduler.close()

        assert [record.decision for record in Schedule(app).history()] == ["dispatched"] * 3


def conf_of(rabbit: RabbitMQ, server: RedisServer) -> dict[str, Any]:
    """Return the settings for a broker that is RabbitMQ, with everything else in Redis."""
    return {
        "broker_url": rabbit.url,
        "result_backend": server.celery_url,
        "redbeat_redis_url": server.url,
        "singleton_backend_url": server.url,
    }


def on_classic_queue(name: str) -> dict[str, Any]:
    """Return the settings for a queue as Celery makes it by itself."""
    return {"task_default_queue": name}


def on_quorum_queue(name: str) -> dict[str, Any]:
    """Return the settings for a quorum queue with delayed delivery by RabbitMQ, as Celery's manual has them."""
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": MOST_DELIVERIES}
    queue = {"exchange": name, "exchange_type": "topic", "routing_key": name, "queue_arguments": arguments}
    return {
        "task_queues": {name: queue},
        "task_default_queue": name,
        "task_default_exchange": name,
        "task_default_exchange_type": "topic",
        "task_default_routing_key": name,
        "broker_transport_options": {"confirm_publish": True},
    }


# One server for all of them: it takes ten seconds to start.
@pytest.mark.parametrize("on_queue", [on_classic_queue, on_quorum_queue], ids=["rabbitmq: classic", "rabbitmq: quorum"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rabbitmq_is_a_broker_like_any_other(
    case: Callable[[Stage], None],
    on_queue: Callable[[str], dict[str, Any]],
    rabbit: RabbitMQ,
    celery: CeleryLauncher,
    oracle: Oracle,
    server: RedisServer,
) -> None:
    queue = on_queue(f"{on_queue.__name__}_{list(CASES.values()).index(case)}")
    case(Stage(celery, oracle, {**conf_of(rabbit, server), **queue}))


def test_a_call_that_rabbitmq_delays_is_never_called_lost(rabbit, celery, oracle, server):
    """Between two tries it is in no queue that a worker reads, and in no worker."""
    conf = {**conf_of(rabbit, server), **on_quorum_queue("delayed"), "singlebeat_lost_after": 1.5}
    stage = Stage(celery, oracle, conf)
    worker = stage.start("worker", "-c", "2").ready()
    with stage.app() as app:
        single, call = app.tasks[SINGLE], ("one", 60)
        first = single.delay(*call)
        later = single.apply_async(("later",), countdown=600, expires=3000)
        oracle.wait_started(1, "one", timeout=60)
        second = single.apply_async(call, overlap="buffer_one")
        places = [behind_key(single.generate_lock(SINGLE, call)), single.generate_lock(SINGLE, ["later"])]
        worker.wait_for(rf"{second.id}\] waits for its turn", count=6, timeout=60)  # each pause is longer than the last

        assert not LostMessages(app).search(backend_of(app), places)

        assert single.apply_async(call, overlap="buffer_one") == second
        assert single.delay("later") == later
        oracle.let_go("one")
        oracle.wait_started(2, "one", timeout=60)
        oracle.let_go("one")
        assert [first.get(timeout=60), second.get(timeout=60)] == ["one"] * 2


@pytest.mark.parametrize("is_added", [False, True], ids=["of its app", "added to a worker"])
def test_a_call_that_rabbitmq_delays_comes_back_to_its_own_queue(is_added, rabbit, celery, oracle, server):
    """No worker reads the default queue. Another queue gets what has the same key, once for each call."""
    name, twin = f"its own {is_added}", f"twin {is_added}"
    conf, own = {**conf_of(rabbit, server), **on_quorum_queue("of others")}, on_quorum_queue(name)
    if not is_added:
        conf["task_queues"] = {**conf["task_queues"], **own["task_queues"]}
    stage = Stage(celery, oracle, conf)
    exchange = Exchange(name, type="topic")
    with stage.app() as app, app.connection_for_write() as connection:
        app.amqp.queues["of others"](connection).declare()  # before Celery 5.6, a worker binds all queues or none
        worker = stage.start("worker", "-P", "threads", "-c", "2", "-Q", "of others" if is_added else name).ready()
        if is_added:
            Queue(name, exchange, name)(connection).declare()  # a worker answers before it does
            app.control.add_consumer(name, exchange=name, exchange_type="topic", routing_key=name)
        Queue(twin, exchange, name)(connection).declare()
        single, call = app.tasks[SINGLE], {"args": (name, 60), "exchange": name, "routing_key": name}
        first = single.apply_async(**call)
        oracle.wait_started(1, name, timeout=60)
        second = single.apply_async(**call, overlap="buffer_one")
        worker.wait_for(rf"{second.id}\] waits for its turn", count=4, timeout=60)

        oracle.let_go(name, 2)

        assert [first.get(timeout=60), second.get(timeout=60)] == [name] * 2
        assert connection.default_channel.queue_purge(twin) == 2
    assert oracle.max_concurrent(name) == 1


def test_a_call_that_rabbitmq_delays_outlives_the_deletion_of_its_queue(rabbit, celery, oracle, server):
    """The worker declares the queue anew at once, before the delay ends. Its name and its key differ."""
    arguments = {"x-queue-type": "quorum"}
    feeds = {"exchange": "shop", "exchange_type": "topic", "routing_key": "feed.#", "queue_arguments": arguments}
    conf = {**conf_of(rabbit, server), "task_queues": {"feeds": feeds}, "task_default_queue": "feeds"}
    stage = Stage(celery, oracle, {**conf, "broker_transport_options": {"confirm_publish": True}})
    worker = stage.start("worker", "-c", "2").ready()
    with stage.app() as app, app.connection_for_write() as connection:
        single, call = app.tasks[SINGLE], {"args": ("one", 60), "exchange": "shop", "routing_key": "feed.a"}
        first = single.apply_async(**call)
        oracle.wait_started(1, "one", timeout=60)
        second = single.apply_async(**call, overlap="buffer_one")
        worker.wait_for(rf"{second.id}\] waits for its turn", count=6, timeout=60)  # the pauses are longer by then

        connection.default_channel.queue_delete("feeds")
        oracle.let_go("one", 2)

        assert [first.get(timeout=60), second.get(timeout=60)] == ["one"] * 2


def test_a_call_that_rabbitmq_delays_comes_back_to_a_queue_of_an_operator(rabbit, celery, oracle, server):
    """No worker declares it. Its name and its key differ."""
    made = Queue("made", Exchange("made", type="topic"), "made.by.hand", queue_arguments={"x-queue-type": "quorum"})
    own = {"exchange": "made", "exchange_type": "topic", "queue_arguments": {"x-queue-type": "quorum"}}
    queues = {"made": {**own, "routing_key": "made.by.hand", "no_declare": True}}
    conf = {**conf_of(rabbit, server), "task_queues": queues, "task_default_queue": "made"}
    stage = Stage(celery, oracle, {**conf, "broker_transport_options": {"confirm_publish": True}})
    with stage.app() as app, app.connection_for_write() as connection:
        made(connection).declare()
        worker = stage.start("worker", "-c", "2", "-Q", "made").ready()
        single, call = app.tasks[SINGLE], {"args": ("one", 60), "exchange": "made", "routing_key": "made.by.hand"}
        first = single.apply_async(**call)
        oracle.wait_started(1, "one", timeout=60)
        second = single.apply_async(**call, overlap="buffer_one")
        worker.wait_for(rf"{second.id}\] waits for its turn", count=3, timeout=60)

        oracle.let_go("one", 2)

        assert [first.get(timeout=60), second.get(timeout=60)] == ["one"] * 2


def test_a_call_waits_in_a_queue_that_only_its_worker_may_use(rabbit, celery, oracle, server):
    """RabbitMQ lets no other connection declare an exclusive queue."""
    own = {"exchange": "exclusive", "routing_key": "exclusive", "exclusive": True}
    stage = Stage(celery, oracle, {**conf_of(rabbit, server), "task_queues": {"exclusive": own}})
    worker = stage.start("worker", "-c", "2", "-Q", "exclusive").ready()
    with stage.app() as app:
        single, call = app.tasks[SINGLE], {"args": ("one", 60), "exchange": "exclusive", "routing_key": "exclusive"}
        first = single.apply_async(**call)
        oracle.wait_started(1, "one", timeout=60)
        second = single.apply_async(**call, overlap="buffer_one")
        worker.wait_for(rf"{second.id}\] waits for its turn", count=3, timeout=60)

        oracle.let_go("one", 2)

        assert [first.get(timeout=60), second.get(timeout=60)] == ["one"] * 2


@pytest.mark.parametrize("task", ["rejecting", "single_rejecting"])
def test_a_dead_lettered_message_that_comes_back_runs_again(task, rabbit, celery, oracle, server, redis):
    """The usual delayed retry: reject, wait in a queue without consumers until its TTL ends, and come back."""
    work, waiting = f"work of {task}", f"waiting of {task}"
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": waiting}
    queue = {"exchange": work, "routing_key": work, "queue_arguments": back}
    conf = {"broker_url": rabbit.url, "result_backend": server.celery_url, "singleton_backend_url": server.url}
    conf |= {"task_default_queue": work, "task_queues": {work: queue}, "singlebeat_lock_lease": 300}
    stage = Stage(celery, oracle, conf)
    worker = stage.start("worker", "-c", "2").ready()
    with stage.app() as app:
        there = {"x-message-ttl": 300, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": work}
        with app.connection_for_write() as connection:
            Queue(waiting, Exchange(""), waiting, queue_arguments=there, channel=connection).declare()
        sent, lock = app.tasks[f"{APP}.{task}"], "SINGLETONLOCK_{a}"
        headers = {HEADER: Ticket("a", lock, lock).header()}

        sent.apply_async(("a", 4, False), task_id="a", headers=headers)

        oracle.wait_ended(4, timeout=60)
        wait_until(lambda: not redis.exists(lock), timeout=60, what="the end of the lock")
        # What a broker delivers twice is still a copy.
        sent.apply_async(("a", 4, False), task_id="a", headers=headers)
        worker.wait_for(rf"{APP}.{task}\[a\] has run already", timeout=60)
    assert (oracle.started("a"), oracle.max_concurrent("a")) == (4, 1)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("ends", [("single_rejecting", False), ("single_retrying",)], ids=["reject", "retry"])
def test_a_rejection_that_rabbitmq_does_not_get_lets_the_call_run_again(pool, ends, rabbit, celery, oracle, server):
    """It delivers the message again. Celery rejects it, too, if a retry cannot be sent."""
    task, *requeue = ends
    queue = on_classic_queue(f"rejected by {task} in {pool}")
    conf = {**conf_of(rabbit, server), **queue, "task_acks_late": True, "broker_connection_max_retries": None}
    # Else the next message after the outage uses the worker's connection in a thread of the pool, and may hang there.
    conf |= {"worker_enable_prefetch_count_reduction": False, "singlebeat_lock_lease": 3}
    stage = Stage(celery, oracle, {**conf, "task_publish_retry": False})
    worker = stage.start("worker", "-P", pool, "-c", "2").ready()
    with stage.app() as app:
        app.tasks[f"{APP}.{task}"].apply_async(("a", 2, *requeue, 60), retry=True)
        oracle.wait_started(1, "a", timeout=60)
        with rabbit.outage():
            oracle.let_go("a")
            worker.wait_for("reject requeue=False", timeout=60)
        oracle.let_go("a", 2)

        oracle.wait_ended(2 if task == "single_rejecting" else 3, "a", timeout=60)
    assert oracle.max_concurrent("a") == 1


@pytest.mark.parametrize("named_by", ["the entry", "a route", "the task", "a call"])
def test_a_message_in_an_unknown_queue_is_not_called_lost(named_by, rabbit, celery, server, redis):
    """The queue has no reader, is known to no app, and only RabbitMQ knows that the message waits there."""
    where = {"exchange": "amq.direct", "routing_key": named_by}
    conf = {**conf_of(rabbit, server), "task_default_queue": "read", "singlebeat_watchdog_timeout": None}
    conf |= {"singlebeat_lost_after": 1, "task_routes": {SINGLE: where} if named_by == "a route" else {}}
    celery("worker", "-c", "1", env={"SB_TEST_URL": rabbit.url}, conf=conf).ready()
    with make_app(rabbit.url, conf) as app, app.connection_for_write() as connection:
        task = app.tasks[SINGLE]
        if named_by == "the task":
            task.exchange, task.routing_key = where.values()
        queue = Queue(f"behind {named_by}", Exchange("amq.direct", passive=True), routing_key=named_by)(connection)
        queue.queue_declare()
        queue.queue_bind()
        if named_by == "the entry":
            options = {"options": where}
            Entry("e", SINGLE, schedule(60), ["x"], app=app, run_on_start=True, **options).save()
            scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
            scheduler.tick()
            scheduler.close()
        else:
            task.apply_async(["x"], **(where if named_by == "a call" else {}))
        key, backend = task.generate_lock(SINGLE, ["x"]), backend_of(app)

        def found() -> Found | None:
            ((_, record),) = backend.read([key])
            lock = Waiting.of(key, record)
            return examine(app, [lock])[0] if lock is not None and not may_yet_start(lock, Config.of(app)) else None

        finding = wait_until(found, timeout=30, what="the lock to be overdue")
        assert queue.queue_declare(passive=True).message_count == 1
        assert (finding.outcome, finding.reason) == ("", BOUND)


WITH_BROADCAST = """
from kombu.common import Broadcast
from tests.system.apps import app
app.conf.task_queues = (Broadcast("all"),)
"""


@pytest.mark.parametrize("overlap", [None, "skip"])
def test_an_entry_on_a_broadcast_queue_runs_on_each_worker(rabbit, celery, oracle, server, redis, tmp_path, overlap):
    (tmp_path / "with_broadcast.py").write_text(WITH_BROADCAST)
    entry = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["a"], "overlap": overlap}
    entry["options"] = {"queue": "all", "exchange": "all"}
    conf = {**conf_of(rabbit, server), "beat_schedule": {"e": {k: v for k, v in entry.items() if v is not None}}}
    start = partial(celery, app="with_broadcast", env={"SB_TEST_URL": rabbit.url}, conf=conf)
    for worker in [start("worker", "-c", "1", "-n", f"{name}@h") for name in "ab"]:
        worker.ready()
    start("beat")

    wait_until(lambda: len({run.id for run in oracle.runs("a")}) >= 3, timeout=60, what="three runs")

    runs = oracle.runs("a")
    first, second, *_ = dict.fromkeys(run.id for run in runs)  # the third may begin just now
    pids = {task_id: {run.pid for run in runs if run.id == task_id} for task_id in (first, second)}
    assert [len(each) for each in pids.values()] == [2, 2]
    assert redis.keys("SINGLETONLOCK_*") == []


WITH_TOPICS = """
from kombu import Exchange, Queue
from tests.system.apps import app
feeds = Exchange("feeds", "topic")
app.conf.task_queues = [Queue(name, feeds, key) for name, key in (("a", "feed.#"), ("b", "#"), ("c", "feed.one"))]
"""

WITH_HEADERS = """
from kombu import Exchange, Queue, binding
from tests.system.apps import app
kinds = Exchange("kinds", "headers")
app.conf.task_queues = [
    Queue("d", kinds, binding_arguments={"kind": "feed"}),
    Queue("e", bindings=[binding(kinds, arguments={"kind": "feed"})]),
]
"""


@pytest.mark.parametrize(
    ("module", "route", "reads"),
    [
        (WITH_BROADCAST, {"queue": "all"}, ["", "", ""]),
        (WITH_TOPICS, {"exchange": "feeds", "routing_key": "feed.one"}, ["a", "b,c", "c"]),
        (WITH_HEADERS, {"exchange": "kinds", "routing_key": "x", "headers": {"kind": "feed"}}, ["d,e", "e", "d"]),
    ],
    ids=["broadcast", "topics that overlap", "headers"],
)
def test_a_singleton_that_several_queues_get_waits_in_each_once(
    module, route, reads, rabbit, celery, oracle, server, redis, tmp_path
):
    """Sent to its exchange again, each of its copies would become one for each queue, again and again."""
    (tmp_path / "with_queues.py").write_text(module)
    start = partial(celery, app="with_queues", env={"SB_TEST_URL": rabbit.url}, conf=conf_of(rabbit, server))
    workers = [
        start("worker", "-c", "2", "-n", f"{name}@h", *(["-Q", queues] if queues else [])).ready()
        for name, queues in zip("abc", reads, strict=True)
    ]

    def times(line: str) -> int:
        return sum(len(re.findall(line, worker.text)) for worker in workers)

    def are_tried(waits: str) -> bool:
        return times(waits) >= 8

    with make_app(rabbit.url, conf_of(rabbit, server)) as app:
        app.conf.task_queues = (Queue("celery"), Broadcast("all"))
        calls = [app.tasks[IN_TURN].apply_async(("one", 60), **route) for _ in range(2)]
        for number in (1, 2):
            (*_, run) = oracle.wait_started(number, "one", timeout=60)
            received, waits = rf"\[{run.id}\] received", rf"\[{run.id}\] waits for its turn"
            wait_until(partial(are_tried, waits), timeout=60, what="eight tries")
            assert times(received) <= 3 + times(waits)
            oracle.let_go("one")
        assert [call.get(timeout=60) for call in calls] == ["one"] * 2
        wait_until(lambda: not redis.keys("SINGLETONLOCK_*[^e]"), timeout=60, what="the end of the locks")
    assert (oracle.started("one"), oracle.max_concurrent("one")) == (2, 1)
