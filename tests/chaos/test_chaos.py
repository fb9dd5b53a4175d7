"""Chaos: beats, worker, Redis and broker are killed, paused and set wrong, and every occurrence is counted.

Each test prints a row of the table at the end of the run. By default the numbers are small, so that the suite is
quick; ``SINGLEBEAT_CHAOS=full pytest tests/chaos/test_chaos.py`` runs it with the numbers of the docs.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from kombu.messaging import Producer

from singlebeat.beat.status import ScheduleStatus
from tests.chaos.fleet import CLOCK, PLAIN, SINGLE, Chaos, steady
from tests.support import CeleryProcess, RedisServer, alive, free_port, wait_until

#: Whether this kombu hands out the commands of messages.
ONE_WRITE = hasattr(Producer, "batch")

FULL = os.environ.get("SINGLEBEAT_CHAOS") == "full"

pytestmark = pytest.mark.timeout(600 if FULL else 120)


@pytest.fixture
def chaos_on(celery, oracle, chaos_report) -> Callable[..., Chaos]:
    return lambda server, **options: Chaos(celery, oracle, server, report=chaos_report, **options)


@pytest.fixture
def chaos(chaos_on, server) -> Chaos:
    return chaos_on(server)


@pytest.fixture
def broker() -> Iterator[RedisServer]:
    """A server for messages alone, which a test may kill."""
    with RedisServer() as server:
        yield server


# ---------------------------------------------------------------- beats die


def feed_until_all_are_dead(chaos: Chaos, doomed: list[CeleryProcess]) -> None:
    """Let occurrences fall due until each of these beats has killed itself, and another beat has decided about all."""
    for left in range(len(doomed), 0, -1):
        chaos.feed(20)
        wait_until(
            lambda left=left: sum(beat.returncode is None for beat in doomed) < left,
            timeout=30,
            what=f"the end of another beat, of {left} left",
        )
    assert {beat.returncode for beat in doomed} == {-signal.SIGKILL}
    chaos.feed(20)
    chaos.beat()
    wait_until(lambda: len(chaos.dispatched()) == len(chaos.expected), timeout=30, what="all decisions")


def test_no_occurrence_is_lost_or_doubled_when_leaders_are_killed(chaos):
    kills, total = (20, 3000) if FULL else (4, 300)
    rng = random.Random(kills)
    chaos.worker()
    leader, standby = chaos.pair()

    with chaos.scenario(f"SIGKILL of the leader, {kills} times", timeout=120):
        for _ in range(kills):
            claimed, share = chaos.claimed(), total // kills
            chaos.feed(share, over=4)  # also after the kill
            moment = claimed + rng.randrange(1, share // 2)
            wait_until(lambda moment=moment: chaos.claimed() >= moment, timeout=60, what=f"{moment} claims")
            time.sleep(rng.uniform(0, 0.1))  # into any step of what it does
            with chaos.takeover("SIGKILL", leader, standby) as (leader, standby):
                leader.kill()
            leader, standby = standby, chaos.beat()
            standby.wait_for("Standing by")
    assert not ONE_WRITE or set(chaos.published().values()) == {1}


@pytest.mark.skipif(not ONE_WRITE, reason="kombu 5.7 is the first to hand out commands")
@pytest.mark.parametrize("conf", [{}, {"task_send_sent_event": True}], ids=["batches", "one by one"])
def test_on_one_server_a_kill_at_any_step_leaves_one_message_each(chaos_on, server, conf):
    """Of tasks without locks, so nothing would tell a copy from its original."""
    chaos = chaos_on(server, **conf)
    points = [f"{when} {step}" for when in ("before", "after") for step in ("read 1", "publish 10", "write 1")]
    doomed = [chaos.beat(f"kill {point}") for point in points]
    for beat in doomed:
        beat.ready()

    feed_until_all_are_dead(chaos, doomed)

    assert chaos.queued() == Counter(chaos.expected.keys())
    assert set(chaos.decided().values()) == {1}


@pytest.mark.skipif(not ONE_WRITE, reason="kombu 5.7 is the first to hand out commands")
def test_on_one_server_a_leader_that_wakes_up_after_its_term_sends_no_copy(chaos):
    paused = chaos.beat("slow publish 0.01")
    chaos.leading(paused)
    standby = chaos.beat()
    standby.wait_for("Standing by")

    chaos.feed(300)
    paused.wait_for("Sending due task", count=50)
    paused.pause()
    standby.wait_for("this beat leads")
    wait_until(lambda: len(chaos.dispatched()) == 300, timeout=60, what="the other one to send all")
    paused.resume()
    paused.wait_for("Lost the lock")

    assert chaos.queued() == Counter(chaos.expected.keys())


def test_no_occurrence_is_lost_or_doubled_by_a_kill_at_any_step(chaos_on, server, broker):
    chaos = chaos_on(server, broker=broker)
    points = [f"{when} {step}" for step in ("read", "claim", "lock", "confirm") for when in ("before", "after")]
    points = [f"{point} 1" for point in points] + ["before publish 1", "before publish 10", "after publish 10"]
    # The messages wait in the broker until all is over: nothing but the worker's gate tells a copy from its original.
    chaos.announce_worker()
    doomed = [chaos.beat(f"kill {point}") for point in points]
    for beat in doomed:
        beat.ready()

    with chaos.scenario(f"SIGKILL before and after each step of a tick ({len(points)} points)") as remarks:
        feed_until_all_are_dead(chaos, doomed)
        copies = chaos.broker.llen("celery") - len(chaos.expected)
        assert copies > 0
        remarks.append(f"{copies} copies refused by the worker")
        chaos.worker()


def test_a_leader_that_wakes_up_after_its_term_sends_no_duplicate(chaos_on, server, broker):
    chaos = chaos_on(server, broker=broker)
    total = 1000 if FULL else 300
    chaos.worker()
    paused = chaos.beat("slow publish 0.01")
    chaos.leading(paused)
    standby = chaos.beat()
    standby.wait_for("Standing by")

    with chaos.scenario(f"SIGSTOP of the leader amid a tick of {total}, longer than its lease") as remarks:
        chaos.feed(total)
        paused.wait_for("Sending due task", count=50)
        paused.pause()
        left = chaos.redis.zcard(chaos.keys.pending)
        assert left > 0  # it is amid its tick
        remarks.append(f"{left} claimed and not confirmed when it stopped")
        standby.wait_for("this beat leads")
        wait_until(lambda: not chaos.missing(), timeout=60, what="the other one to send all")
        paused.resume()
        paused.wait_for("Lost the lock")


def test_a_short_lease_survives_a_long_tick(chaos):
    chaos.conf["redbeat_lock_timeout"] = 2.0
    chaos.worker()
    leader = chaos.beat("slow publish 0.02")
    chaos.leading(leader)
    standby = chaos.beat()
    standby.wait_for("Standing by")

    with chaos.scenario("300 publishes of 20 ms under a lease of 2 s"):
        chaos.feed(300)
        chaos.settle()
    assert not leader.matches("Lost the lock")
    assert not standby.matches("this beat leads")


def test_a_rolling_restart_loses_and_doubles_nothing(chaos):
    rounds = 10 if FULL else 3
    chaos.worker()
    leader, standby = chaos.pair()

    with chaos.scenario(f"rolling restart of both beats, {rounds} times"):
        for _ in range(rounds):
            chaos.feed(100, over=2)
            with chaos.takeover("SIGTERM", leader, standby) as (leader, standby):
                leader.terminate()
                assert leader.wait() == 0
            leader, standby = standby, chaos.beat()
            standby.wait_for("Standing by")


def test_beats_without_a_lock_share_the_work(chaos_on, server):
    chaos = chaos_on(server, redbeat_lock_key=None)
    chaos.worker()
    beats = [chaos.beat().ready(), chaos.beat().ready()]

    with chaos.scenario("redbeat_lock_key = None, two beats side by side") as remarks:
        chaos.feed(300, over=4)
        chaos.settle()
        shares = [len(beat.matches("Sending due task")) for beat in beats]
        remarks.append("shares {} and {}".format(*shares))
    assert all(shares)

    def named() -> list[int]:
        return [int(beat["pid"]) for beat in ScheduleStatus.of(chaos.app).standbys]

    assert set(named()) == {beat.pid for beat in beats}
    beats[0].kill_group()
    wait_until(lambda: named() == [beats[1].pid], timeout=60)


@pytest.mark.skipif(not ONE_WRITE, reason="kombu 5.7 is the first to hand out commands")
def test_beats_without_a_lock_take_over_from_a_paused_and_a_killed_one(chaos_on, server):
    """No worker and no lock would tell a copy from its original. The paused beat sends what it has read, or nothing."""
    chaos = chaos_on(server, redbeat_lock_key=None)
    beats = [chaos.beat("slow publish 0.01").ready() for _ in range(3)]
    wait_until(lambda: len(ScheduleStatus.of(chaos.app).standbys) == 3, timeout=30, what="three beats")

    chaos.feed(600)
    paused, killed, last = beats
    for beat in beats:
        beat.wait_for("Sending due task", count=10)
    paused.pause()
    killed.kill()
    assert len(chaos.dispatched()) < 600, "they are amid their work"
    wait_until(lambda: len(chaos.dispatched()) == 600, timeout=60, what="the last beat to send all")
    paused.resume()
    chaos.feed(60)
    wait_until(lambda: len(chaos.dispatched()) == 660, timeout=60, what="both to send the rest")
    last.terminate()
    paused.terminate()
    assert (last.wait(), paused.wait()) == (0, 0)

    assert chaos.queued() == Counter(chaos.expected.keys())
    assert set(chaos.decided().values()) == {1}


def test_a_beat_that_is_stuck_ends_itself_with_its_stacks_in_the_log(chaos):
    chaos.worker()
    stuck = chaos.beat("hang before publish 10", singlebeat_watchdog_timeout=2)
    chaos.leading(stuck)
    standby = chaos.beat()
    standby.wait_for("Standing by")

    with chaos.scenario("a tick that hangs, watchdog after 2 s"):
        chaos.feed(20)
        with chaos.takeover("the tick got stuck"):
            assert stuck.wait() == 1
    stuck.wait_for("No progress for 2 s")
    stuck.wait_for("in apply_async")


def test_the_beat_of_a_worker_that_was_killed_ends(chaos):
    # It takes no task of ours: those that a killed worker has acknowledged are gone, whoever has sent them.
    embedded = chaos.celery("worker", "-B", "-c", "1", "-Q", "other", app="tests.chaos.fleet", conf=chaos.conf)
    embedded.ready()
    pid = int(wait_until(lambda: chaos.redis.hget(chaos.keys.lease.leader, "pid"), what="the embedded beat to lead"))
    assert pid != embedded.pid

    with chaos.scenario("SIGKILL of the main process of a worker -B"):
        chaos.worker()
        standby = chaos.beat()
        standby.wait_for("Standing by")
        chaos.feed(100, over=8)  # also after the orphaned beat has ended
        wait_until(lambda: chaos.claimed() >= 10, what="10 claims")
        with chaos.takeover("SIGKILL of the worker"):
            embedded.kill()
        embedded.wait_for("worker's main process is gone")
        chaos.settle()
        wait_until(lambda: not alive(pid), what="the orphan's end")


def test_another_beat_takes_over_in_the_time_of_a_lease(chaos):
    rounds = 5 if FULL else 2
    chaos.conf["redbeat_lock_timeout"] = 10.0 if FULL else 2.0
    chaos.worker()
    leader, standby = chaos.pair()

    with chaos.scenario(f"take-over with a lease of {chaos.conf['redbeat_lock_timeout']:g} s", timeout=120):
        for how in ("SIGTERM", "SIGKILL"):
            for _ in range(rounds):
                chaos.feed(40, over=2, delay=0.5)
                with chaos.takeover(how, leader, standby) as (leader, standby):
                    leader.send(getattr(signal, how))
                leader, standby = standby, chaos.beat()
                standby.wait_for("Standing by")
                chaos.settle()


# ---------------------------------------------------------------- Redis and the broker fail


@pytest.fixture
def durable() -> Iterator[RedisServer]:
    """A server that has kept every write that it has acknowledged when it is restarted."""
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def test_a_redis_that_is_restarted_under_beats_brings_everything_back(chaos_on, durable):
    chaos = chaos_on(durable)
    # No worker meanwhile: Celery's own consumer loses messages when its broker dies while it fetches one.
    chaos.announce_worker()
    beats = chaos.pair()

    with chaos.scenario("Redis with AOF killed and restarted, twice"):
        for _ in range(2):
            claimed = chaos.claimed()
            chaos.feed(100, over=3)
            wait_until(lambda claimed=claimed: chaos.claimed() >= claimed + 30, what="30 claims")
            durable.restart()
        wait_until(lambda: len(chaos.dispatched()) == 200, timeout=60, what="all decisions")
        chaos.worker()
    assert [beat.returncode for beat in beats] == [None, None]


def test_a_restarted_redis_brings_everything_back(chaos_on, durable, broker):
    chaos = chaos_on(durable, broker=broker)
    chaos.worker()
    beats = chaos.pair()

    with chaos.scenario("Redis with schedule and locks (AOF) killed and restarted, twice; broker elsewhere"):
        for _ in range(2):
            claimed = chaos.claimed()
            chaos.feed(100, over=3)
            wait_until(lambda claimed=claimed: chaos.claimed() >= claimed + 30, what="30 claims")
            durable.restart()
    assert [beat.returncode for beat in beats] == [None, None]


def test_a_redis_that_hangs_for_a_while_costs_nothing(chaos_on, own_server):
    chaos = chaos_on(own_server)
    chaos.worker()
    beats = chaos.pair()

    with chaos.scenario("Redis hangs for 5 s"):
        chaos.feed(200, over=4)
        wait_until(lambda: chaos.claimed() >= 50, what="50 claims")
        own_server.pause()
        time.sleep(5)
        own_server.resume()
        chaos.settle()
    assert [beat.returncode for beat in beats] == [None, None]


def test_a_redis_that_is_read_only_for_a_while_costs_nothing(chaos_on, own_server, broker):
    chaos = chaos_on(own_server, broker=broker)
    chaos.worker()
    beats = chaos.pair()

    with chaos.scenario("Redis read-only for 3 s, as amid a failover"):
        chaos.feed(200, over=4)
        wait_until(lambda: chaos.claimed() >= 50, what="50 claims")
        position = beats[0].position
        chaos.redis.replicaof("127.0.0.1", free_port())
        beats[0].wait_for("trying again", after=position)
        time.sleep(3)
        chaos.redis.replicaof("NO", "ONE")
        beats[0].wait_for("Redis works again", after=position)
        chaos.settle()
    assert [beat.returncode for beat in beats] == [None, None]


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "single"])
def test_a_copy_is_refused_though_its_original_ran_in_a_lock_outage(chaos_on, own_server, broker, task):
    chaos = chaos_on(own_server, broker=broker)
    chaos.announce_worker()
    doomed = chaos.beat("kill before confirm 1")

    title = "locks read-only while {} tasks start that were published and not confirmed"
    with chaos.scenario(title.format("plain" if task is PLAIN else "Singleton")):
        chaos.feed(20, task=task)
        assert doomed.wait() == -signal.SIGKILL
        chaos.redis.replicaof("127.0.0.1", free_port())
        worker = chaos.worker()
        wait_until(lambda: chaos.published().total() == 20, what="the worker to get all messages")
        wait_until(
            lambda: len(chaos.started()) + len(worker.matches("waits for its turn")) >= 20, what="their start or delay"
        )
        chaos.redis.replicaof("NO", "ONE")
        chaos.beat()


def test_the_entries_of_beat_schedule_come_back_after_flushall(chaos_on, own_server):
    chaos = chaos_on(own_server, beat_schedule=steady(10, every=1))
    chaos.worker()
    beats = chaos.pair()
    wait_until(lambda: len(chaos.decisions()) >= 20, what="20 decisions")

    with chaos.scenario("FLUSHALL: loses messages, locks and history by design", may_lose=True) as remarks:
        chaos.keep_decisions()
        chaos.redis.flushall()
        began = time.monotonic()
        wait_until(lambda: len(chaos.decisions()) >= len(chaos._past) + 30, timeout=30, what="30 further decisions")
        remarks.append(f"all entries back, each run three times after {time.monotonic() - began:.1f} s")
        for beat in beats:
            assert beat.returncode is None
            beat.terminate()
            beat.wait()
    later = {record["entry"] for record in chaos.decisions()[len(chaos._past) :]}
    assert later == set(steady(10))


def test_runs_due_in_a_broker_outage_are_sent_once_after_it(chaos_on, server, redis, broker):
    chaos = chaos_on(server, broker=broker)
    chaos.announce_worker()
    leader, standby = chaos.pair()
    lock = chaos.redis.get(chaos.keys.lock)

    with chaos.scenario("broker down for 20 occurrences"):
        broker.kill()
        position = leader.position
        chaos.feed(20, over=2)
        leader.wait_for("stay pending until the broker answers", after=position)
        wait_until(lambda: chaos.claimed() == 20, what="the claim of all")
        ticks = leader.position
        assert chaos.redis.zcard(chaos.keys.pending) == 20
        broker.restart()
        wait_until(lambda: not chaos.redis.zcard(chaos.keys.pending), timeout=40, what="the last message")
        assert chaos.broker.llen("celery") == 20
        assert chaos.redis.get(chaos.keys.lock) == lock
        assert not leader.matches("Lost the lock", after=ticks)
        chaos.worker()
    assert not standby.matches("this beat leads")


# ---------------------------------------------------------------- the clock is set


@pytest.mark.parametrize("hours", [1, -1])
def test_a_clock_that_is_set_by_an_hour_and_back_loses_and_doubles_nothing(chaos, oracle, hours):
    chaos.worker()
    chaos.oracle._client.set(CLOCK, 0)
    beats = [chaos.beat("step clock"), chaos.beat("step clock")]
    chaos.leading(*beats)

    with chaos.scenario(f"clock of the server set by {hours:+d} h and back"):
        chaos.feed(50, over=3)
        wait_until(lambda: chaos.claimed() >= 10, what="10 claims")
        chaos.oracle._client.set(CLOCK, 3600 * hours)
        if hours > 0:
            wait_until(lambda: not chaos.missing(), timeout=60, what="what is due by that clock")
        chaos.feed(10)
        chaos.oracle._client.set(CLOCK, 0)
        chaos.settle()
