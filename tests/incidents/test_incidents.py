"""Sixteen incidents over TCP, with real processes: what each tool must say, what it must not say, and after how long.

The tools are the log of beat at Celery's default level, the log of the worker, ``/readyz`` and ``/metrics`` of beat,
and the commands ``status``, ``health``, ``doctor``, ``explain``, ``list``, ``locks`` and ``history``. ``pytest -rP``
prints a line for each tool: after how many seconds it said so. No test depends on these times.

===  ==================================  ==========================================================================
No.  Incident                            Test, and where more of it is tested
===  ==================================  ==========================================================================
B1   kill -9 or SIGSTOP of the leader    ``test_b1_…``; no run lost or doubled: ``tests/chaos``
B2   restart of Redis: AOF, RDB, none    ``test_b2_…``; under load: ``tests/chaos``
B3   Redis without memory (maxmemory)    ``test_b3_b4_…[b3]``; all commands: ``tests/redis/test_refusals.py``
B4   Redis becomes a replica             ``test_b3_b4_…[b4]``; with a worker: ``tests/chaos``
B5   failover of Redis Sentinel          ``test_b5_…``; a cluster: ``test_topologies.py``
B6   RabbitMQ and Redis stop             ``test_b6_…`` in ``tests/rabbitmq``, which has the server
B7   wrong password, ACL too narrow      ``test_b7_…``; the ACL of the docs: ``test_topologies.py``; calls without
                                         their locks: ``test_lock_outage.py``
B8   queue that no worker reads          ``test_b8_…``
B9   saturated workers                   ``test_b9_…``
B10  bad cron                            ``test_b10_…``; broken entries of all kinds: ``tests/redis/test_cli.py``
B11  task that raises                    ``test_b11_…``; all ends of a run: ``test_ends.py``
B12  kill -9 of the worker's child       ``test_b12_…``; other deaths: ``test_worker_ends.py``
B13  wrong clock of a host               ``test_b13_…``; of a program: ``test_clocks.py``
B14  two apps on one prefix              ``test_b14_…``
B15  warm shutdown of a worker           ``test_b15_…``; lost messages: ``test_lost_messages.py``
B16  three beats, redbeat_lock_key None  ``test_b16_…``; the shares of the work: ``tests/chaos``
===  ==================================  ==========================================================================
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.schedules import schedule
from redis import Redis
from redis.exceptions import RedisError

from singlebeat import Entry, Schedule, clear_locks
from singlebeat.beat.status import ScheduleStatus
from singlebeat.diagnosis.doctor import workers as of_workers
from singlebeat.locks import backend_of
from tests.incidents.tools import Beat, Incident, Said, Tools, log
from tests.support import APP, ROOT, CeleryProcess, RedisServer, free_port, wait_until
from tests.system.apps import make_app
from tests.system.singles import PATIENCE, Stage, open_stage
from tests.system.topologies import PASSWORD, Sentinels, ask, each_decided_and_started_once, prove
from tests.system.topologies import running as running_on

#: Seconds that leadership lasts after its last renewal: a standby follows a killed leader then.
LEASE = 3

#: An entry that each test watches.
STEADY = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["steady"]}

#: A problem that doctor names, unless it is that of a test without workers.
PROBLEM = "^problem  (?!workers: no worker answers)"


@pytest.fixture
def beat(celery) -> Callable[..., Beat]:
    """Start a beat that logs at Celery's default level and answers over HTTP."""

    def start(**conf: Any) -> Beat:
        conf = {"redbeat_lock_timeout": LEASE, "singlebeat_metrics_port": free_port(), **conf}
        return Beat(celery("beat", "-l", "WARNING", conf=conf), conf["singlebeat_metrics_port"])

    return start


@contextmanager
def tools_of(server: RedisServer, conf: Mapping[str, Any]) -> Iterator[Tools]:
    with make_app(server.celery_url, conf) as app:
        yield Tools(app)


def sent(app: Celery, name: str = "steady", *, more: int = 1) -> None:
    """Return when more runs of an entry were sent than now."""

    def count() -> int:
        with suppress(RedisError):
            return len([r for r in Schedule(app).history(name, 1000) if r.decision == "dispatched"])
        return 0

    before = count()
    wait_until(lambda: count() >= before + more, timeout=30, what=f"{more} more runs of {name}")


def standbys(app: Celery) -> list[str]:
    return [standby["pid"] for standby in ScheduleStatus.of(app).standbys]


def decided_once(redis: Redis) -> None:
    """Check that there are decisions, and none about an occurrence that was decided before."""
    decided = Counter(record["id"] for _, record in redis.xrange("redbeat::history"))
    assert decided
    assert set(decided.values()) == {1}


def test_b1_a_leader_that_is_stopped_or_killed_is_replaced(beat, app, redis):
    """Until the lease of the lost leader ends, tools still name that one; they may miss a leader for a moment then."""
    tools, conf = Tools(app), {"beat_schedule": {"steady": STEADY}}
    first = beat(**conf)
    sent(app)
    second = beat(**conf)
    wait_until(lambda: standbys(app) == [str(second.pid)], timeout=30)

    incident = Incident("B1 leader stopped (SIGSTOP)")
    first.process.pause()
    incident.until(
        second.logs("WARNING.*beat: Acquired lock: this beat leads event=leadership_gained term=2"),
        tools.say("health", f"healthy: .*pid {second.pid}, term 2"),
        tools.say("status", f"leader .*pid {second.pid}, term 2"),
        second.metric("leader", "1.0"),
        second.ready("^200 ok$"),
        first.ready("no answer", timeout=0.3),
        tools.say("doctor", "warning  beat: no standby is noted", code=1),
        tools.say("explain steady", "was sent at", gone="No beat"),
    )
    incident = Incident("B1 stopped leader goes on (SIGCONT)")
    first.process.resume()
    incident.until(
        first.logs("WARNING.*event=leadership_lost term=1", "WARNING.*Standing by: .* event=stands_by"),
        first.metric("leader", "0.0"),
        first.ready("^200 ok$"),
        tools.say("status", "standbys +1", f"^leader .*{second.leads}"),
        tools.say("doctor", "^fine", code=1, gone=f"{PROBLEM}|no standby is noted"),
    )
    sent(app)

    incident = Incident("B1 leader killed")
    second.process.kill()
    incident.until(
        first.logs("WARNING.*event=leadership_gained term=3"),
        tools.say("health", f"healthy: .*pid {first.pid}, term 3"),
        first.ready("^200 ok$"),
        first.metric("leader", "1.0"),
        tools.say("doctor", "warning  beat: no standby is noted", code=1, gone=PROBLEM),
    )
    sent(app)
    assert "Traceback" not in first.process.text + second.process.text
    decided_once(redis)

    incident = Incident("B1 last beat killed")
    first.process.kill()
    incident.until(
        tools.say("health", "Error: no beat leads", code=1),
        tools.say("status", "leader +none$"),
        tools.say("doctor", "problem  beat: no beat leads: singlebeat sends nothing until one is started", code=1),
        tools.say("explain steady", "No beat leads: singlebeat sends nothing until one is started"),
    )


VANISHED = "WARNING.*event=schedule_vanished"


def test_b2_a_restarted_redis_has_kept_the_data_that_it_persists(beat, server, own_server, redis):
    """Nothing, all (AOF), or what was there at the last snapshot (RDB); doctor says so before and after."""
    places = {"redbeat_redis_url": own_server.url, "singleton_backend_url": own_server.url}
    conf = {**places, "beat_schedule": {"steady": STEADY}}
    admin, server_is = own_server.client(), f"the schedule's server {own_server.url}"
    with tools_of(server, places) as tools:
        Entry("dynamic", f"{APP}.plain", schedule(1), args=["dynamic"], app=tools.app, run_on_start=True).save()
        first = beat(**conf)
        sent(tools.app, "dynamic")
        second = beat(**conf)
        wait_until(lambda: standbys(tools.app) == [str(second.pid)], timeout=30)

        incident = Incident("B2 Redis that keeps nothing killed")
        incident.until(tools.say("doctor", "warning  .*it keeps nothing on disk.*a restart loses the schedule", code=1))
        first.process.pause()  # so that the one leads that has installed nothing
        own_server.kill()
        incident.until(
            second.logs("ERROR.*Trouble with Redis: trying again event=trouble"),
            second.ready(r"^503 the schedule's server \S+ does not answer"),
            second.metric("redis_up", "0.0"),
            *(
                tools.say(command, f"^Error: {server_is}: .*", code=2)
                for command in ("health", "status", "list", "explain steady", "doctor")
            ),
            tools.say("locks", f"^Error: the locks' server {own_server.url} does not answer", code=2),
        )
        incident = Incident("B2 Redis that kept nothing is back")
        own_server.restart()
        incident.until(
            second.logs(f'{VANISHED} reason="the server has forgotten term 1: '),
            second.logs("WARNING.*Redis works again event=recovered"),
            second.ready("^200 ok$"),
            tools.say("health", f"healthy: .*pid {second.pid}, term 1"),
            tools.say(
                "doctor",
                "warning  schedule: the server has lost the schedule, or its last changes, as a beat noticed at 20",
                "the server has forgotten term 1",
                "Entries of beat_schedule are back, perhaps without their pauses. First pause again what was paused",
                "An old snapshot also brings back entries that were deleted since, and pauses that have ended since",
                code=1,
            ),
            tools.say("explain dynamic", "Error: .*dynamic", code=1),
            tools.say("list", "^steady", never="dynamic"),
        )
        first.process.resume()
        sent(tools.app)
        assert len(second.process.matches("event=trouble")) <= 2, "once for each kind of error"

        for key, value in {"appendfsync": "always", "appendonly": "yes"}.items():
            admin.config_set(key, value)
        wait_until(lambda: not admin.info("persistence")["aof_rewrite_in_progress"], timeout=30)
        Entry("dynamic", f"{APP}.plain", schedule(1), args=["dynamic"], app=tools.app, run_on_start=True).save()
        sent(tools.app, "dynamic")
        kept = {record["id"] for _, record in admin.xrange("redbeat::history")}
        logged = {beat: beat.process.position for beat in (first, second)}
        own_server.kill()
        Incident("B2 Redis with AOF killed").until(
            second.logs("ERROR.*event=trouble", after=logged[second]),
            tools.say("health", f"^Error: {server_is}: .*", code=2),
        )
        incident = Incident("B2 Redis with AOF is back")
        own_server.restart("--appendonly", "yes", "--appendfsync", "always")
        incident.until(
            second.logs("WARNING.*Redis works again event=recovered", after=logged[second]),
            tools.say("health", "^healthy: .*pid"),
            second.ready("^200 ok$"),
            tools.say("explain dynamic", "was sent at"),
            tools.say("list", "^dynamic"),
            tools.say("doctor", "^fine", code=1, never="it keeps", gone=PROBLEM),
        )
        sent(tools.app, "dynamic", more=2)
        assert kept <= {record["id"] for _, record in admin.xrange("redbeat::history")}
        decided_once(admin)
        assert not [beat for beat, position in logged.items() if beat.process.matches(VANISHED, after=position)]

        admin.config_set("appendonly", "no")
        admin.config_set("save", "3600 1")
        admin.save()
        snapshot = {record["id"] for _, record in admin.xrange("redbeat::history")}
        Entry("late", f"{APP}.plain", schedule(3600), app=tools.app).save()
        sent(tools.app, "dynamic", more=2)
        snapshots = "warning  .*it keeps snapshots only.*runs that have ended may run once more; use appendonly yes"
        incident = Incident("B2 Redis with snapshots killed and started")
        incident.until(tools.say("doctor", snapshots, code=1))
        own_server.restart("--save", "3600 1", "--appendonly", "no")
        lost = (
            "the server has lost the schedule, or its last changes, .*the changes since .* are lost: Redis has started"
        )
        incident.until(
            tools.say("health", f"^healthy: .*pid.*\n?.*{lost}"),
            tools.say("status", f"^lost +{lost}"),
            tools.say("explain late", f"Error: .*late.*[Tt]{lost[1:]}", code=1),
            tools.say("doctor", snapshots, f"^warning +schedule: {lost}", code=1),
            tools.say("list", f"lost: {lost}"),
            second.metric("schedule_lost", "1.0"),
        )
        sent(tools.app, "dynamic", more=2)
        assert [beat for beat, position in logged.items() if beat.process.matches(VANISHED, after=position)]
        assert snapshot <= {record["id"] for _, record in admin.xrange("redbeat::history")}


@contextmanager
def full(server: RedisServer) -> Iterator[None]:
    """Leave the server no memory to write."""
    server.client().config_set("maxmemory", "1")
    yield
    server.client().config_set("maxmemory", "0")


@contextmanager
def replica(server: RedisServer) -> Iterator[None]:
    """Make the server a replica of one that is not there."""
    server.client().replicaof("127.0.0.1", "1")
    yield
    server.client().replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("refusing", "error", "advice"),
    [
        pytest.param(
            full, ("OOM", "used memory > 'maxmemory'"), "Its memory is full: free some, or raise maxmemory", id="b3"
        ),
        pytest.param(
            replica,
            ("READONLY", "read only replica"),
            "It is a replica: name the primary, or the Sentinels that know it",
            id="b4",
        ),
    ],
)
def test_b3_b4_a_redis_that_refuses_to_write_is_named(refusing, error, advice, beat, server, own_server, redis):
    """The beat that runs is not to be started, and nothing is lost or sent twice."""
    places = {"redbeat_redis_url": own_server.url, "singleton_backend_url": own_server.url}
    title = f"{'B3' if refusing is full else 'B4'} {refusing.__name__} Redis"
    with tools_of(server, places) as tools:
        running = beat(**places, beat_schedule={"steady": STEADY})
        sent(tools.app)
        refused, start = rf"it refuses to write, so that nothing is sent: .*{error[0]}.*\. {advice}", "is started"
        leads = refusing is full  # to renew the lease needs no memory
        sends_nothing = f"no beat leads.*{refused}"
        if leads:
            sends_nothing = f"{running.leads}.* leads at this moment, and cannot send"

        with refusing(own_server):
            incident = Incident(title)
            incident.until(
                running.logs(f"ERROR.*Trouble with Redis: trying again event=trouble .*{error[1]}"),
                tools.say("doctor", f"problem  schedule's server .*: {refused}", code=1, never=start),
                tools.say(
                    "doctor", f"^problem  beat: .*{sends_nothing}", "beat: 1 entry is overdue", code=1, never=start
                ),
                tools.say(
                    "explain steady", f"^Nothing is sent because of the schedule's server: {refused}", never=start
                ),
                running.metric("overdue_entries", "1.0"),
                running.metric("lag_seconds", "[1-9].*"),
                running.ready(rf"^503 the schedule's server \S+: {refused}"),
                tools.say("health", rf"^Error: the schedule's server \S+: {refused}", code=1),
            )
        incident = Incident(f"{title} writes again")
        incident.until(
            running.logs("WARNING.*Redis works again event=recovered"),
            tools.say("health --max-lag 3", f"^healthy: .*{running.leads}"),
            running.metric("overdue_entries", "0.0"),
            running.ready("^200 ok$"),
            tools.say("explain steady", "was sent at", "It runs next for", never="Nothing is sent because"),
        )
        sent(tools.app)
        assert "catch_up" in {record["kind"] for _, record in own_server.client().xrange("redbeat::history")}
        decided_once(own_server.client())
        assert len(running.process.matches("event=trouble")) == len(running.process.matches("Redis works again")) == 1


def test_b5_sentinels_lead_all_to_the_next_master(celery, oracle):
    with Sentinels() as sentinels:
        urls = dict.fromkeys(("broker_url", "result_backend"), sentinels.url)
        options = dict.fromkeys(("broker_transport_options", "result_backend_transport_options"), sentinels.options)
        conf = {**urls, **options, "singlebeat_metrics_port": free_port()}
        with running_on(celery, conf) as (app, worker, process):
            leader, tools = Beat(process, conf["singlebeat_metrics_port"]), Tools(app)
            prove(app, oracle)
            single = app.tasks[f"{APP}.single"]
            call = single.delay("over", seconds=60)
            oracle.wait_started(1, "over")

            incident = Incident("B5 master killed")
            sentinels.fail_over()

            incident.until(
                leader.logs("(WARNING|ERROR).*event=(trouble|not_renewed)", "WARNING.*event=recovered"),
                leader.ready("^200 ok$"),
                leader.metric("redis_up", "1.0"),
                tools.say("health", "^healthy: .*pid"),
                tools.say("status", rf"^leader .*{leader.leads}"),
                tools.say("explain tick", "was (sent|skipped)", gone="is started"),
                tools.say("doctor", "fine     workers: 1 answer", code=None),
                timeout=60,
            )
            wait_until(lambda: ask(single, "over") == call.id, timeout=60, what="the lock on the next master")
            oracle.wait_started(oracle.started("tick") + 2, "tick", timeout=60)
            oracle.let_go("over")
            oracle.wait_ended(1, "over")
            assert oracle.max_concurrent("over") == oracle.started("over") == 1
            each_decided_and_started_once(oracle, sentinels.replica.client().xrange("redbeat::history"))
        assert process.returncode is worker.returncode is None
        assert PASSWORD not in process.text + worker.text + tools.heard


def test_b7_a_wrong_password_or_a_missing_right_is_named(beat, server, own_server, redis):
    admin = own_server.client()

    def user(name: str, *rules: str, drop: bool = False) -> None:
        """Set the rights of a user; a password counts for new connections only."""
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", "~*", "&*", "+@all", *rules)
        if drop:
            admin.execute_command("CLIENT", "KILL", "USER", name)

    user("beats", ">secret-of-beats")
    user("locks", ">secret-of-locks")
    places = {
        "redbeat_redis_url": own_server.url.replace("//", "//beats:secret-of-beats@"),
        "singleton_backend_url": own_server.url.replace("//", "//locks:secret-of-locks@"),
    }
    with tools_of(server, places) as tools:
        backend_of(tools.app).announce("a worker", ttl=3600)  # else plain tasks need no locks
        running = beat(**places, beat_schedule={"steady": {**STEADY, "args": ["steady"]}})
        sent(tools.app)
        wrong = "invalid username-password pair"

        incident = Incident("B7 wrong password of the schedule's server")
        user("beats", ">another", drop=True)
        incident.until(
            running.logs(f"ERROR.*Trouble with Redis: trying again event=trouble .*{wrong}"),
            running.ready(rf"^503 the schedule's server \S+ refuses: .*{wrong}"),
            running.metric("redis_up", "1.0"),
            running.metric("redis_refuses", "1.0"),
            *(
                tools.say(command, f"^Error: the schedule's server .*{wrong}", code=2)
                for command in ("health", "status", "list", "explain steady", "doctor")
            ),
        )
        incident = Incident("B7 right password again")
        user("beats", ">secret-of-beats")
        incident.until(
            running.logs("WARNING.*Redis works again event=recovered"),
            running.ready("^200 ok$"),
            tools.say("health", f"^healthy: .*{running.leads}"),
            tools.say("explain steady", "^The run for "),
        )

        logged = running.process.position
        incident = Incident("B7 ACL lacks ZADD")
        user("beats", ">secret-of-beats", "-zadd")
        lacks = r"the ACL of its user lacks ZADD: grant \+zadd \(docs, Rights\)"
        incident.until(
            running.logs(r"ERROR.*event=trouble .*grant \+zadd", after=logged),
            tools.say("doctor", f"problem  schedule's server .*: {lacks}", code=1, never="is started"),
            tools.say("explain steady", f"^Runs may not be sent or recorded because of the schedule's server: {lacks}"),
            running.ready(rf"^503 the schedule's server \S+: {lacks}"),
            running.metric("overdue_entries", "1.0"),
        )
        incident = Incident("B7 ZADD granted")
        user("beats", ">secret-of-beats")
        incident.until(
            running.logs("WARNING.*Redis works again event=recovered", after=logged),
            tools.say("explain steady", "^The run for ", never="because of the schedule's server"),
        )

        for raw in admin.scan_iter("SINGLETONLOCK_*"):  # no worker ends the runs
            admin.delete(raw)
        sent(tools.app)
        admin.delete(*admin.scan_iter("SINGLETONLOCK_*"))
        logged = running.process.position
        incident = Incident("B7 wrong password of the locks' server")
        user("locks", ">another", drop=True)
        away = f"the locks' server .* refuses: .*{wrong}"
        incident.until(
            running.logs("ERROR.*event=unreachable server=.the locks' server. .*", after=logged, never="works again"),
            running.metric("pending_occurrences", "1.0"),
            running.ready("^200 ok$"),
            tools.say("health", f"^healthy: .*{running.leads}"),
            tools.say(
                "status", "^pending +1, .*claimed and not confirmed: .*locks' server does not answer, or refuses"
            ),
            tools.say("locks", f"^Error: {away}", code=2),
            tools.say("doctor", f"^problem  locks: {away}", code=1),
            tools.say("explain steady", f"is claimed and not confirmed, as task .*{away}"),
        )
        incident = Incident("B7 right password of the locks' server again")
        user("locks", ">secret-of-locks")
        incident.until(
            running.logs("WARNING.*the locks' server works again event=recovered", after=logged),
            running.metric("pending_occurrences", "0.0"),
            tools.say("status", "^pending +0$"),
            tools.say("locks", "queued"),
            tools.say("explain steady", "^The run for .* was (sent|skipped)"),
        )
        lines = running.process.matches("event=(trouble|unreachable|recovered)", after=logged)
        assert len(lines) == 2, "one line says when it begins, one when it ends"
        decided_once(admin)
        assert "secret-of" not in running.process.text + tools.heard


# ---------------------------------------------------------------- one sick entry among sound beats and workers


@dataclass(kw_only=True)
class Shop(Stage):
    """A worker that reads ``celery``, one without tasks that reads ``other``, a beat, and the commands."""

    beat: Beat
    tools: Tools

    def put(self, name: str, task: str = f"{APP}.plain", every: float = 3600, **fields: Any) -> None:
        Schedule(self.app()).upsert(name, task, schedule(every), **{"args": [name], "run_on_start": True, **fields})

    def is_healthy(self) -> tuple[Said, ...]:
        """Return that beat and schedule are sound, which they are: it is one entry, or its queue."""
        return self.beat.ready("^200 ok$"), self.tools.say("health", f"^healthy: .*{self.beat.leads}")


@pytest.fixture(scope="module")
def shop_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    port, name = free_port(), "tests.system.apps"
    with open_stage(tmp_path_factory.mktemp("shop"), "-c", "1", "-Q", "celery", app=name) as stage:
        stage.start("worker", "-c", "1", "-P", "threads", "-Q", "other", app=f"{name}:nameless")
        beat = stage.start("beat", "-l", "WARNING", app=name, conf={"singlebeat_metrics_port": port})
        wait_until(lambda: ScheduleStatus.of(stage.app()).leader, timeout=30, what="a leader")
        yield Shop(**vars(stage), beat=Beat(beat, port), tools=Tools(stage.app()))


@pytest.fixture
def shop(shop_of_all: Shop) -> Iterator[Shop]:
    """All entries go with the test, and all that holds their locks."""
    yield shop_of_all
    for member in shop_of_all.redis.zrange("redbeat::schedule", 0, -1):
        Schedule(shop_of_all.app()).delete(member.removeprefix("redbeat:"))
    for name in {run.name for run in shop_of_all.oracle.running()}:
        shop_of_all.oracle.let_go(name)
    shop_of_all.app().control.purge()
    clear_locks(shop_of_all.app())


def test_b8_a_queue_that_no_worker_reads_is_named_with_its_entries(shop):
    tools, unread = shop.tools, r"o worker that answers reads queue bills \(they read celery, other\)"
    incident = Incident("B8 queue that no worker reads")
    shop.put("nightly", options={"queue": "bills"})
    shop.put("weekly", options={"queue": "bills"}, run_on_start=False)

    incident.until(
        tools.say("explain nightly", f"^N{unread}.* start a worker with -Q bills", never="--force"),
        tools.say(
            "doctor",
            f"^problem  queue bills: n{unread}: the runs of nightly, weekly wait there",
            code=1,
            never="queue celery",
        ),
        tools.say("locks", "nightly .* queued"),
        tools.say("list", "^nightly"),
        *shop.is_healthy(),
    )


def test_b8_a_task_that_only_workers_of_other_queues_know_is_named(shop):
    incident = Incident("B8 queue whose workers lack the task")
    shop.put("lost", options={"queue": "other"})
    wrong = f"o worker that answers and reads queue other knows the task {APP}.plain: "

    incident.until(
        shop.tools.say("explain lost", f"^N{wrong}.* drops the message"),
        shop.tools.say("doctor", f"^problem  entry lost: n{wrong}", code=1),
        shop.tools.say("history lost", "unknown_task"),
    )


def test_b9_workers_without_a_free_slot_are_named_with_their_runs(shop, monkeypatch):
    monkeypatch.setattr(of_workers, "BUSY_FOR", 0.0)
    tools = shop.tools
    shop.app().send_task(f"{APP}.plain", ["busy", 60])
    shop.oracle.wait_started(1, "busy", timeout=PATIENCE)
    full_ = f"he only slot of {{}} is busy with {APP}.plain, since 2"
    # Once its worker has renewed the lock, the message is known to be there.
    either = full_.format("(the workers that read queue celery|worker .*)")
    incident = Incident("B9 saturated workers")
    shop.put("waits", every=1)

    incident.until(
        tools.say("explain waits", f"^T{either}", never="--force", gone="No worker|probably"),
        tools.say("doctor", f"^warning  queue celery: t{full_.format('the workers that read queue celery')}"),
        tools.say("locks", "waits .* queued"),
        tools.say("history waits", "^waits .* skipped_overlap .*queued since"),
        *shop.is_healthy(),
    )
    assert len([r for r in Schedule(shop.app()).history("waits", 1000) if r.decision == "dispatched"]) == 1

    incident = Incident("B9 free slot")
    shop.oracle.let_go("busy")
    shop.oracle.wait_ended(2, "waits", timeout=PATIENCE)
    incident.until(
        tools.say("explain waits", "success|runs now|was sent"), tools.say("doctor", "^fine", gone="queue celery")
    )
    assert shop.oracle.max_concurrent("waits") == 1


def test_b9_a_rate_limit_that_holds_messages_back_is_named(shop):
    tools, task = shop.tools, f"{APP}.plain"
    shop.app().control.rate_limit(task, "6/m", reply=True)
    held = "he rate_limit of the task {} holds messages back at worker .* 6/m: one there waits"
    incident = Incident("B9 rate limit")
    shop.put("first")
    shop.oracle.wait_started(1, "first", timeout=PATIENCE)
    shop.put("waits", every=1)

    incident.until(tools.say("explain waits", f"^T{held.format(task)}", never="busy|probably"), *shop.is_healthy())
    incident = Incident("B9 no rate limit")
    shop.app().control.rate_limit(task, 0, reply=True)
    incident.until(tools.say("explain waits", gone="rate_limit"))


def test_b10_a_bad_cron_is_named_everywhere_until_it_is_corrected(shop):
    tools, when = shop.tools, {"__type__": "crontab", "minute": "99"}
    definition = {"name": "nightly", "task": f"{APP}.plain", "args": ["cron"], "schedule": when}
    incident = Incident("B10 bad cron")
    shop.redis.hset("redbeat:nightly", "definition", json.dumps(definition))
    shop.redis.zadd("redbeat::schedule", {"redbeat:nightly": 0})
    reason = "definition has an invalid schedule: .*99"

    incident.until(
        shop.beat.logs(
            f"ERROR.*cannot be used: it is quarantined until it is fixed event=quarantined entry=nightly .*{reason}"
        ),
        shop.beat.metric("quarantined_entries", "1.0"),
        tools.say("status", "^quarantine +1", f"^  nightly: {reason}"),
        tools.say("list", f"^nightly: quarantined: {reason}"),
        tools.say("show nightly", "99"),
        tools.say("explain nightly", f"^It is quarantined and does not run, since .*{reason}", "Correct the entry"),
        tools.say("doctor", f"^problem  entry nightly: is quarantined since .*{reason}", code=1),
        *shop.is_healthy(),
    )
    logged = shop.beat.process.position
    assert len(shop.beat.process.matches("event=quarantined entry=nightly")) == 1, "not in each tick"

    incident = Incident("B10 cron corrected")
    definition["schedule"] = {"__type__": "interval", "every": 3600}
    shop.redis.hset("redbeat:nightly", "definition", json.dumps(definition))
    shop.redis.zadd("redbeat::schedule", {"redbeat:nightly": 0})
    incident.until(
        shop.beat.logs("WARNING.*event=entry_recovered entry=nightly", after=logged),
        shop.beat.metric("quarantined_entries", "0.0"),
        tools.say("status", "^quarantine +0"),
        tools.say("explain nightly", "success", gone="No worker"),
    )


def test_b11_a_task_that_raises_is_reported_with_its_exception(shop):
    tools, error = shop.tools, r"failure: .*RuntimeError\(.raises.\)"
    incident = Incident("B11 raising task")
    shop.put("raises", task=f"{APP}.fail", every=2)

    incident.until(
        log(shop.worker, "log of worker", r"ERROR.*raised unexpected: RuntimeError\(.raises.\)"),
        tools.say("history raises", r"^raises .*failure"),
        tools.say("explain raises", error, gone="No worker|not over"),
        tools.say("doctor", "^fine", r"entry raises: its last \d+ runs all failed, .*RuntimeError\(.raises.\)"),
        *shop.is_healthy(),
    )
    shop.oracle.wait_ended(2, "raises", timeout=PATIENCE)  # the failed one does not keep the next from running


def test_b12_a_run_whose_process_is_killed_is_reported_and_unlocked(shop):
    tools = shop.tools
    shop.put("crashes", args=["crashes", 60])
    (run,) = shop.oracle.wait_started(1, "crashes", timeout=PATIENCE)
    Incident("B12 before").until(tools.say("locks", f"crashes .*{run.id} .*running"))
    incident = Incident("B12 child of the worker killed")
    os.kill(run.pid, signal.SIGKILL)

    incident.until(
        log(shop.worker, "log of worker", f"ERROR.* pid:{run.pid} exited with 'signal 9", "ERROR.*WorkerLostError"),
        tools.say("locks", "^TASK", gone=run.id),
        tools.say("history crashes", "^crashes .*worker_lost .* s"),
        tools.say("explain crashes", r"It ended at .* after .* s on w.*, worker_lost: .*SIGKILL", never="unlock"),
        tools.say("doctor", "^fine", gone="crashes"),
        *shop.is_healthy(),
    )
    assert "exit code 0" in tools.ask("trigger", "crashes")
    shop.oracle.wait_started(2, "crashes", timeout=PATIENCE)
    shop.oracle.let_go("crashes")
    shop.oracle.wait_ended(1, "crashes", timeout=PATIENCE)
    assert shop.oracle.max_concurrent("crashes") == 1


# ---------------------------------------------------------------- beats that must not be together, or are not well


def test_b13_beats_with_wrong_clocks_send_on_time_and_are_named(celery, app, libfaketime):
    """By two hours, by ten minutes the other way, and a right one before and after."""
    Entry("e", f"{APP}.plain", schedule(1), args=["e"], overlap="allow_all", run_on_start=True, app=app).save()
    tools, here = Tools(app), socket.gethostname()

    def start(ahead: int) -> Beat:
        env = {"LD_PRELOAD": libfaketime, "FAKETIME": f"{ahead:+d}s"} if ahead else None
        conf = {"singlebeat_metrics_port": free_port()}
        return Beat(celery("beat", "-l", "WARNING", env=env, conf=conf), conf["singlebeat_metrics_port"])

    def sends(beat: Beat, count: int = 3) -> None:
        def is_sent() -> bool:
            records = [r for r in Schedule(app).history("e", 100) if r.leader == f"{here}:{beat.pid}"]
            assert all(abs(record.nominal.timestamp() - record.at.timestamp()) < 60 for record in records)
            return len([record for record in records if record.decision == "dispatched"]) >= count

        wait_until(is_sent, timeout=40, what=f"{count} runs that were sent by {beat.pid}")

    leader = start(0)
    sends(leader, 1)
    for ahead in (7200, -600, 0):
        beat = start(ahead)
        wait_until(lambda beat=beat: standbys(app) == [str(beat.pid)], timeout=40)
        sign = "-" if ahead < 0 else r"\+"
        off = f"the clock of {here}, which {{}}, is {sign}[0-9.]+ s off that of the schedule's server"
        if ahead and not ScheduleStatus.of(app).problem():  # each host is named once, and both are this one
            Incident(f"B13 standby with a clock {ahead:+d} s off").until(
                beat.logs("WARNING.*event=clock_differs"),
                tools.say("doctor", f"^problem  clock: {off.format('stands by')}: set up NTP on both", code=1),
                tools.say("status", f"^clock +{off.format('stands by')}"),
            )
        incident = Incident(f"B13 leader with a clock {ahead:+d} s off")
        leader.process.terminate()
        leader.process.wait()
        incident.until(
            beat.logs("WARNING.*beat: Acquired lock: this beat leads event=leadership_gained"),
            *(
                (
                    beat.ready(f"^503 {off.format('leads')}"),
                    beat.metric("clock_ahead_seconds", ("-" if ahead < 0 else "") + r"\d{3}.*"),
                    tools.say("health", f"^Error: {off.format('leads')}", code=1),
                    tools.say("status", f"^clock +{off.format('leads')}"),
                    tools.say("doctor", f"^problem  clock: {off.format('leads')}: set up NTP on both", code=1),
                )
                if ahead
                else (
                    beat.ready("^200 ok$"),
                    tools.say("health", f"^healthy: .*{beat.leads}"),
                    tools.say("status", f"^leader .*{beat.leads}", gone="^clock"),
                    tools.say("doctor", "^fine", code=None, gone="clock"),
                )
            ),
            tools.say("explain e", "^The run for .* was sent", never=r"in \d{3,} s", gone="No beat"),
        )
        sends(beat)
        assert abs(float(ScheduleStatus.of(app).leader["ahead"]) - ahead) < 3
        differs = [json.loads(m[1]) for m in beat.process.matches(r"WARNING.*event=clock_differs ahead=(\S+) host=")]
        assert [abs(seconds - ahead) < 3 for seconds in differs] == [True] * bool(ahead), "one line, of the right size"
        leader = beat
    assert Schedule(app).get("e").due_at.timestamp() - time.time() < 5


OF_A_NAME = """
import json, os
from celery import Celery
from celery.schedules import schedule

app = Celery(os.environ["NAME"], broker=os.environ["SB_TEST_URL"])
app.conf.redbeat_redis_url = os.environ["SB_TEST_URL"]
app.conf.beat_schedule = {os.environ["ENTRY"]: {"task": "work", "schedule": schedule(3600)}}
app.conf.update(json.loads(os.environ.get("CONF", "{}")))
"""


@pytest.fixture
def beat_of(celery, tmp_path: Path) -> Callable[..., CeleryProcess]:
    """Start a beat of an app of a name with one entry."""
    (tmp_path / "shared.py").write_text(OF_A_NAME)

    def start(name: str, entry: str, level: str = "INFO", **conf: object) -> CeleryProcess:
        env = {"NAME": name, "ENTRY": entry, "CONF": json.dumps(conf), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return celery("beat", "-S", "singlebeat.Scheduler", "-l", level, app="shared", env=env)

    return start


@pytest.fixture
def tools_named(server, redis) -> Iterator[Callable[..., Tools]]:
    """Return the commands of an app of a name."""
    with ExitStack() as stack:

        def named(name: str, **conf: object) -> Tools:
            app = stack.enter_context(Celery(name, broker=server.celery_url, set_as_current=False))
            app.conf.update(redbeat_redis_url=server.url, singleton_backend_url=server.url, **conf)
            return Tools(app)

        yield named


def of_prefix(tools: Tools) -> list[str]:
    """Return what doctor says about the prefix."""
    rows = json.loads(tools.ask("doctor", "--json").rpartition("exit code")[0])
    return [f"{row['level']} {row['text']}" for row in rows if row["about"] == "redbeat_key_prefix redbeat:"]


def test_b14_beats_of_two_apps_on_one_prefix_are_named(beat_of, tools_named, redis):
    ops = beat_of("ops", "nightly")
    wait_until(lambda: redis.hexists("redbeat::owners", "nightly"), timeout=30)
    port, about = free_port(), "^problem  redbeat_key_prefix redbeat:: "
    incident = Incident("B14 beat of a second app")
    blog = Beat(beat_of("blog", "publish", level="WARNING", singlebeat_metrics_port=port), port)
    tools = tools_named("blog")
    incident.until(
        blog.logs(
            "WARNING.*This beat of app blog stands by for a beat of app ops event=other_app",
            "give each app a prefix of its own.* and singleton_key_prefix.* queues of its own .task_default_queue.",
        ),
        tools.say(
            "doctor",
            f"{about}1 entry there is of app ops, not of blog",
            f"{about}the beat .* which leads, is of app ops, not of blog",
            code=1,
        ),
        tools.say("explain publish", "Error: there is no entry 'publish'", code=1),
        tools_named("ops").say("doctor", f"{about}the beat .* which stands by, is of app blog, not of ops", code=1),
        blog.ready("^200 ok$"),  # another app's beat does what it can
    )
    entries, leads = of_prefix(tools)
    assert entries.startswith("problem 1 entry there is of app ops, not of blog")
    assert leads.startswith("problem the beat ")
    assert len(of_prefix(tools_named("ops"))) == 1
    assert of_prefix(tools_named("blog", singlebeat_other_app_check="ignore")) == []

    refused = beat_of("news", "print", singlebeat_other_app_check="raise")
    assert refused.wait() != 0
    assert refused.matches("This beat of app news stands by for a beat of app ops: both have redbeat_key_prefix")

    incident = Incident("B14 beat of the second app leads")
    ops.terminate()
    incident.until(
        blog.logs(
            "WARNING.*This beat of app blog leads over 1 entries of app ops, and sends them to its own queues "
            "event=other_app"
        ),
        tools.say("doctor", f"{about}1 entry there is of app ops, not of blog", code=1),
        tools.say("explain publish", "Nothing was decided about it so far", "It runs next for"),
    )


def test_b14_two_apps_of_one_name_are_seen_by_their_different_entries(beat_of, tools_named):
    beat_of("shop", "nightly").wait_for("this beat leads")
    beat_of("shop", "publish").wait_for("Standing by")

    (differ,) = of_prefix(tools_named("shop"))

    assert differ.startswith("warning beats of app shop differ in their beat_schedule (1 and 1 entries)")


def test_b14_a_beat_that_must_not_lead_over_another_app_resigns(beat_of, redis):
    ops = beat_of("ops", "nightly")
    wait_until(lambda: redis.hexists("redbeat::owners", "nightly"), timeout=30)
    ops.terminate()
    ops.wait()

    refused = beat_of("blog", "publish", singlebeat_other_app_check="raise")

    assert refused.wait() != 0
    leads_over = "This beat of app blog leads over 1 entries of app ops, and sends them to its own queues: both have"
    assert refused.matches(leads_over)
    assert not redis.exists("redbeat::lock")
    assert redis.smembers("redbeat::statics") == {"nightly"}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_body_that_returned_is_no_failure_if_results_are_not_stored(pool, celery, beat, app, oracle):
    no_retries = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0}}
    with RedisServer() as results:
        conf = {"result_backend": results.celery_url, "result_backend_transport_options": no_retries}
        once = {"schedule": schedule(3600), "run_on_start": True, "app": app}
        Entry("good", f"{APP}.plain", args=["good", 60], **once).save()
        Entry("single", f"{APP}.single", args=["single", 60], **once).save()
        Entry("bad", f"{APP}.fail", args=["bad"], **once).save()
        Entry("unstorable", f"{APP}.opaque", args=["unstorable"], **once).save()
        celery("worker", "-P", pool, "-c", "4", conf=conf).ready()
        beat()
        for name in ("good", "single"):
            oracle.wait_started(1, name, timeout=PATIENCE)
        wait_until(lambda: [record for record in Schedule(app).history("unstorable", 1) if record.end], timeout=30)
        results.kill()
        Schedule(app).trigger("bad")
        incident = Incident(f"result backend down, {pool}")
        for name in ("good", "single"):
            oracle.let_go(name)

        with make_app(app.conf.broker_url, conf) as told:
            tools = Tools(told)
            returned = (
                r"^Its body ended at .* after .* on w.* without an error, but the result backend did not store it"
            )
            away = f"^The result backend {results.celery_url} "
            incident.until(
                tools.say("explain good", returned, away),
                tools.say("explain single", returned, away),
                tools.say("explain bad", "^It ended at .*, failure: ", away),
                tools.say("history good", "dispatched  result_not_stored "),
                tools.say("explain unstorable", "^It ended at .*, failure: .*EncodeError"),
            )


def nightly(app: Celery, **fields: Any) -> None:
    fields = {"task": f"{APP}.plain", "schedule": schedule(1), "args": ["nightly", 60], **fields}
    Entry("nightly", app=app, **{"run_on_start": True, **fields}).save()


def decided(app: Celery, decision: str, holder: str = "", times: int = 1) -> None:
    """Return when something was decided about the nightly entry so many times."""

    def is_decided() -> bool:
        records = [record for record in Schedule(app).history("nightly", 1000) if record.decision == decision]
        return len([record for record in records if holder in {"", record.holder}]) >= times

    wait_until(is_decided, timeout=60, what=f"{times} times {decision}")


def test_b15_a_worker_that_shuts_down_is_said_to_live(celery, beat, app, oracle):
    """A run in a warm shutdown answers no question, and renews its lock: no command advises to free that."""
    tools, conf = Tools(app), {"singlebeat_lock_lease": 10}
    worker = celery("worker", "-c", "1", conf=conf).ready()
    wait_until(backend_of(app).workers_seen, timeout=30, what="a worker to say that it looks after locks")
    nightly(app)
    running = beat(**conf)
    (run,) = oracle.wait_started(1, "nightly")
    incident = Incident("B15 warm shutdown of the last worker")
    worker.send(signal.SIGTERM)
    decided(app, "skipped_overlap", run.id, times=2)
    lives = Said(
        "explain nightly",
        lambda: tools.ask("explain", "nightly"),
        (
            f"^Task {run.id} runs, as far as is known: its lock was renewed .*so its worker lived then. That worker "
            "did not answer in time: it or its host is busy, it shuts down and ends its last tasks",
        ),
        never="--force",
        gone="unlock|probably|waits in its queue",
    )
    incident.until(
        log(worker, "log of worker", "Warm shutdown"),
        lives,
        tools.say(
            "doctor",
            r"^warning  workers: no worker answers, but w.* or has died within the last \d+ s\. Without another worker",
        ),
        tools.say("locks", f"nightly .*{run.id} .*running "),
        tools.say("history nightly", f"skipped_overlap .*held by task {run.id}, running since"),
        running.ready("^200 ok$"),
        tools.say("health", "^healthy"),
    )
    incident = Incident("B15 warm shutdown, a new worker is up")
    celery("worker", "-c", "1", conf=conf).ready()
    incident.until(
        lives,
        tools.say("doctor", "^fine     workers: 1 answer"),
        tools.say(f"unlock {run.id}", f"task {run.id} was renewed .* ago.*: its worker lives", code=1),
    )
    assert worker.returncode is None
    assert oracle.started("nightly") == 1

    incident = Incident("B15 last task over")
    oracle.let_go("nightly")
    assert worker.wait() == 0
    oracle.wait_started(2, "nightly")
    incident.until(
        tools.say("history nightly -n 1000", "dispatched +success"),
        tools.say("explain nightly", "runs now, on w", gone="lived"),
    )
    assert oracle.max_concurrent("nightly") == 1


def test_b16_beats_that_share_the_work_are_healthy(beat, server, redis):
    """One of three is killed, which the others log, and doctor says in its number; then the others, and all say so."""
    conf = {"redbeat_lock_key": None}
    with tools_of(server, conf) as tools:
        beats = [beat(**conf, beat_schedule={"steady": STEADY}) for _ in range(3)]
        healthy = (
            tools.say("health", "^healthy: none: beats share the work"),
            tools.say(
                "status", r"^leader +none: beats share the work \(redbeat_lock_key is None\), a beat was last seen"
            ),
            tools.say(
                "doctor",
                "^warning  redbeat_lock_key: is None: no beat leads, all beats share the work",
                code=1,
                never="is started",
                gone=PROBLEM,
            ),
            tools.say("explain steady", "was sent at", never="No beat"),
        )

        def number(count: int) -> Said:
            return tools.say("doctor", f"^fine     beat: {count} beats share the work: ", code=1, never="is started")

        sent(tools.app)
        incident = Incident("B16 three beats without a lock")
        incident.until(
            *(each.ready("^200 ok$") for each in beats), beats[0].metric("leader", "1.0"), *healthy, number(3)
        )

        incident = Incident("B16 one of three beats killed")
        beats[0].process.kill()
        sent(tools.app, more=3)
        incident.until(
            *(each.ready("^200 ok$") for each in beats[1:]),
            *(each.logs("WARNING.*shares the work no more: .*event=share_left") for each in beats[1:]),
            *healthy,
            number(2),
            timeout=60,
        )
        decided_once(redis)
        logged = [line for each in beats for line in each.process.lines if re.search("WARNING/|ERROR", line)]
        assert not [line for line in logged if not re.search("event=(unlocked|share_left)", line)]

        for each in beats[1:]:
            each.process.kill()
        Incident("B16 all beats killed").until(
            tools.say("health", r"^Error: no beat works: there was no sign of one for \d+ s", code=1),
            tools.say("status", r"^leader +none: beats share the work .* a beat was last seen \d+ s ago"),
            tools.say(
                "doctor", "^problem  beat: no beat works.*: singlebeat sends nothing until one is started", code=1
            ),
            tools.say("explain steady", "^No beat works: singlebeat sends nothing until one is started"),
            timeout=60,
        )


# ---------------------------------------------------------------- beside the sixteen: what explain says in the docs


def test_a_run_is_skipped_because_the_one_before_it_is_not_over(shop):
    nightly(shop.app())
    (run,) = shop.oracle.wait_started(1, "nightly", timeout=PATIENCE)
    decided(shop.app(), "skipped_overlap")

    Incident("long run").until(
        shop.tools.say(
            "explain nightly", f"^Task {run.id} runs now, on w", "was skipped: the one before it still held the lock"
        ),
        shop.tools.say("locks --json", run.id),
        shop.tools.say(f"unlock {run.id}", f"task {run.id} runs on w", code=1),
    )
    assert shop.worker.returncode is None


def test_a_worker_has_died_and_its_lock_waits_for_the_end_of_its_lease(celery, beat, app, oracle, redis):
    tools = Tools(app)
    nightly(app)
    worker = celery("worker", "-c", "1", conf={"singlebeat_lock_lease": 120}).ready()
    beat()
    (run,) = oracle.wait_started(1)
    incident = Incident("worker killed")
    worker.kill_group()
    worker.wait()
    decided(app, "skipped_overlap")
    (lock,) = redis.scan_iter("SINGLETONLOCK_*", _type="HASH")
    a_minute_ago = int(time.time() * 1000) - 60_000
    redis.hset(lock, mapping={"since": a_minute_ago, "renewed": a_minute_ago})
    redis.pexpire(lock, 60_000)

    incident.until(
        tools.say(
            "explain nightly",
            "its worker has probably died, or hangs. The lock ends by itself in ",
            "was skipped: the one before it still held the lock",
            f"^Task {run.id} holds the lock, which was last renewed",
            "To free it now, first make sure that its process is gone, because the run of a process that hangs would "
            f"go on beside the next run: celery singlebeat unlock {run.id}$",
            "^No worker answers.",
            never="--force",
        ),
        tools.say("doctor", "^problem  workers: no worker answers: no run starts", code=1),
    )
    assert tools.ask("unlock", run.id).endswith("exit code 0")
    wait_until(
        lambda: any(
            record.task_id != run.id and record.decision == "dispatched" for record in Schedule(app).history("nightly")
        ),
        timeout=30,
    )


def test_a_run_is_missed_while_no_beat_was_there(beat, app):
    began, tools = datetime.now(UTC) - timedelta(minutes=30), Tools(app)
    nightly(app, schedule=schedule(3600 / 2 - 60), last_run_at=began, misfire_grace_time=30, run_on_start=False)
    assert "No beat leads: singlebeat sends nothing until one is started" in tools.ask("explain", "nightly")

    running = beat()
    Incident("missed run").until(
        tools.say(
            "explain nightly",
            "was missed: .*misfire_grace_time is 30 s",
            "no beat led then or it was busy, or the broker or the locks' server was unreachable",
            "It runs next for",
        ),
        running.logs("WARNING.*event=missed entry=nightly"),
    )


def test_no_worker_knows_the_task_of_an_entry(shop):
    incident = Incident("wrong name of a task")
    nightly(shop.app(), task="shop.bil", schedule=schedule(3600))

    incident.until(
        shop.tools.say(
            "explain nightly",
            "^No worker that answers knows the task shop.bil",
            "unknown_task",
            "That worker does not know the task and has dropped the message.",
        ),
        shop.tools.say("doctor", "entry nightly: no worker that answers knows its task shop.bil", code=1),
    )
