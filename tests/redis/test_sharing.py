"""Beats that share the work: each takes its own part first, and none of it stays undone."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from celery.schedules import schedule
from redis import Redis

from singlebeat import Entry, Scheduler
from singlebeat.beat.entries.entry import Meta
from singlebeat.beat.entries.fields import BATCH
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.share import PAUSE, TURN, Share
from singlebeat.beat.store.claims import Store
from tests.redis.bench import HOUR, Bench
from tests.support import APP, RedisServer

SCHEDULE, STANDBYS, PENDING = "redbeat::schedule", "redbeat::standbys", "redbeat::pending"


@pytest.fixture
def bench(server: RedisServer, redis: Redis, bench_on) -> Bench:
    """A bench whose beats share the work."""
    return bench_on(server, redbeat_lock_key=None)


@pytest.fixture
def tick_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a beat tick as on a host of its own."""

    def tick_on(host: str, scheduler: Scheduler, *, at: datetime | None = None) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("socket.gethostname", lambda: host)
            scheduler.lease._share_at = 0.0  # as time does
            now, term = at or datetime.now(UTC), scheduler.lease.acquire()
            scheduler._tick(now, term)

    return tick_on


@pytest.fixture
def pair(bench: Bench, tick_on) -> tuple[Scheduler, Scheduler]:
    """Two beats that know one another."""
    one, other = bench.scheduler(), bench.scheduler()
    for host, scheduler in (("one", one), ("other", other), ("one", one)):
        tick_on(host, scheduler)
    assert (one.lease.share.beats, other.lease.share.beats) == (2, 2)
    return one, other


def test_a_clock_set_right_since_the_last_reply_sends_nothing_early(bench):
    scheduler = bench.scheduler()
    scheduler.tick()
    bench.put(every=HOUR, last_run_at=datetime.now(UTC))
    scheduler.server_time._offset += timedelta(days=1).total_seconds()

    for _ in range(3):
        scheduler.tick()

    assert bench.messages == []
    assert bench.schedule.get("e").meta.counts_from < datetime.now(UTC)
    assert bench.history == []


def test_parts_of_a_schedule_on_several_servers_share_locks(server, redis, own_server, bench_on):
    """As the docs divide a schedule: each part has a server, a prefix and a beat; broker and locks are one server."""
    bench = bench_on(server, broker_url=server.celery_url, singleton_backend_url=server.url)
    parts = {"a": (server, "shop-0:"), "b": (own_server, "shop-1:")}
    for name, (where, prefix) in parts.items():
        conf = {"redbeat_redis_url": where.url, "redbeat_key_prefix": prefix}
        app, past = bench.new_app(**conf), {"last_run_at": datetime.now(UTC) - 2 * HOUR, "total_run_count": 7}
        for entry, task in ((name, "plain"), (f"single {name}", "single")):
            args = [entry] if task == "plain" else ["the same"]
            Entry(entry, f"{APP}.{task}", schedule(HOUR), app=app, args=args, **past).save()
        beat = bench.scheduler(app=app)
        beat.tick()
        beat.tick()

    assert sorted(str(name) for name in bench.names) == ["a", "b", "the same"]
    decided = [where.client().xrange(f"{prefix}:history") for where, prefix in parts.values()]
    outcomes = [sorted(record["decision"] for _, record in records) for records in decided]
    assert outcomes == [["dispatched", "dispatched"], ["dispatched", "skipped_overlap"]]


def put_all(bench: Bench, names: Sequence[str], *, late: float = 1.0) -> None:
    """Store entries that are due, the first one for the longest time."""
    fields = bench.redis.hgetall(bench.put("copied").key)
    bench.schedule.delete("copied")
    definition, past = json.loads(fields["definition"]), datetime.now(UTC) - timedelta(seconds=late)
    meta = Meta(past - HOUR).encode()
    with bench.redis.pipeline(transaction=False) as pipe:
        for number, name in enumerate(names):
            own = json.dumps({**definition, "name": name, "args": [name]})
            pipe.hset(f"redbeat:{name}", mapping={"definition": own, "meta": meta})
            pipe.zadd(SCHEDULE, {f"redbeat:{name}": past.timestamp() + number / 1e5})
        pipe.execute()


def names_of(scheduler: Scheduler, count: int) -> list[str]:
    """Return names of entries in the part of a beat."""
    share = scheduler.lease.share
    return list(
        islice((name for name in map("n{}".format, itertools.count()) if share.has(f"redbeat:{name}", 0)), count)
    )


def shares(count: int) -> list[Share]:
    names = {f"host:{number}" for number in range(count)}
    return [Share(name, frozenset(names - {name})) for name in sorted(names)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_beats_read_parts_that_are_disjoint_complete_and_in_order(bench, redis, count):
    """Each works alone here: the entries of the others stay where they are."""
    names = [f"e{number}" for number in range(5 * BATCH)]
    put_all(bench, names)
    now, store, found = datetime.now(UTC), Store(bench.app, redis), list[str]()
    places = redis.zrange(SCHEDULE, 0, -1, withscores=True)

    for share in shares(count):
        redis.zadd(SCHEDULE, dict(places))
        ours, left, more = list[str](), 0, True
        while more:
            due = store.due(now, share, all_pending=False, start=left)
            assert len(due.entries) <= BATCH
            ours += [stored.entry.name for stored in due.entries]
            redis.zrem(SCHEDULE, "", *(stored.member for stored in due.entries))
            left, more = left + due.passed, due.more
        assert ours == [name for name in names if name in set(ours)]
        found += ours

    assert sorted(found) == sorted(names)


def test_a_beat_leaves_the_entries_of_another_beat_to_it(bench, pair, tick_on):
    one, other = pair
    names = [*names_of(one, 5), *names_of(other, 5)]
    put_all(bench, names)

    tick_on("one", one)
    assert bench.names == names[:5]
    tick_on("other", other)
    assert bench.names == names
    assert set(bench.decisions) == {"dispatched"}


def test_a_beat_takes_the_late_entries_of_another_beat(bench, pair, tick_on):
    """The other one gives signs of life, and sends nothing."""
    one, other = pair
    names = names_of(other, 5)
    put_all(bench, names)

    for late in (0, TURN - 1.5, TURN + PAUSE / 2 - 1):
        tick_on("one", one, at=datetime.now(UTC) + timedelta(seconds=late))
        assert bench.messages == []
    tick_on("one", one, at=datetime.now(UTC) + timedelta(seconds=TURN + PAUSE))

    assert bench.names == names


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_beat_takes_the_entries_of_a_beat_that_works_no_longer(bench, pair, tick_on, redis, how):
    one, other = pair
    names = [*names_of(one, 2), *names_of(other, 5)]
    put_all(bench, names)
    if how == "ended":
        other.close()
    else:
        (sign,) = [sign for sign in redis.zrange(STANDBYS, 0, -1) if '"other"' in sign]
        redis.zadd(STANDBYS, {sign: 1000 * (redis.time()[0] - 1)})  # as STAY seconds later

    tick_on("one", one)

    assert one.lease.share.beats == 1
    assert bench.names == names


def test_a_beat_reads_on_behind_the_entries_of_a_slow_beat(bench, pair, tick_on):
    one, other = pair
    names = names_of(one, 5)
    put_all(bench, [*names_of(other, 4 * BATCH + 10), *names])

    for _ in range(3):
        assert bench.messages == []
        tick_on("one", one)

    assert bench.names == names


def test_a_tick_of_a_slow_beat_is_no_longer_than_that_of_a_leader(bench, pair):
    """The other one has done its part, so most of the rows are ours."""
    one, _ = pair
    put_all(bench, names_of(one, BATCH + 5))

    due = one.store.due(datetime.now(UTC), one.lease.share, all_pending=False)

    assert len(due.entries) == BATCH
    assert due.more


def test_each_retry_of_a_pending_occurrence_is_in_the_part_of_one_beat(bench, redis):
    """Not always of the same beat: one may not reach the broker."""
    entry, now = bench.put(ago=timedelta()), datetime.now(UTC)
    redis.hset(entry.key, "pending", Occurrence.of("redbeat:", "e", now).encode())
    store, owners = Store(bench.app, redis), list[str]()

    for number in range(20):
        redis.zadd(PENDING, {entry.key: now.timestamp() - 5 + number / 10})
        owners += [share.beat for share in shares(2) if store.due(now, share, all_pending=False).recovered]
        assert len(owners) == number + 1

    assert len(set(owners)) == 2


def test_no_other_beat_sends_the_run_of_a_beat_whose_decision_took_long(bench, pair, tick_on, monkeypatch):
    """For as long as that beat may still send the run, which it has claimed after the decision."""
    one, other = pair
    put_all(bench, names := names_of(one, 1))
    one.work.one_write.rule_out("several writes may overlap")
    decided_at, publish = datetime.now(UTC) + timedelta(minutes=2), one.publish
    monkeypatch.setattr(one.work, "_timestamp", decided_at.timestamp)

    def publish_late(entry: Entry) -> object:
        for seconds in (2, 2 + TURN):  # in either turn
            tick_on("other", other, at=decided_at + timedelta(seconds=seconds))
        return publish(entry)

    monkeypatch.setattr(one, "publish", publish_late)
    tick_on("one", one)

    assert bench.names == names


def test_a_beat_wakes_up_for_its_own_next_entry(bench, pair):
    one, other = pair
    now = datetime.now(UTC)
    (own,), (others, later) = names_of(one, 1), names_of(other, 2)
    bench.redis.zadd(SCHEDULE, {f"redbeat:{others}": now.timestamp() + 10, f"redbeat:{own}": now.timestamp() + 20})

    def next_score(*args: Share) -> float | None:
        return one.store.due(now, *args, all_pending=False).next_score

    assert next_score(one.lease.share) == bench.score(own)
    assert next_score(other.lease.share) == next_score() == bench.score(others)
    bench.redis.zadd(SCHEDULE, {f"redbeat:{later}": now.timestamp() + 15})
    assert next_score(one.lease.share) == bench.score(later), "it reads no further"


@pytest.mark.parametrize(
    "sign",
    [
        "?",
        "[]",
        "7",
        '{"host": "other", "pid": "1"}',
        '{"host": "other", "pid": "1", "zone": "Asia/Tokyo"}',
    ],
)
def test_a_beat_shares_only_with_beats_that_may_claim(bench, tick_on, redis, sign):
    """Claims from another zone are refused, and a beat of an earlier version does not leave entries to others."""
    one = bench.scheduler()
    redis.zadd(STANDBYS, {sign: 1000 * (redis.time()[0] + 5)})
    put_all(bench, ["a", "b", "c", "d"])

    tick_on("one", one)

    assert one.lease.share.beats == 1
    assert bench.names == ["a", "b", "c", "d"]


def test_a_leader_shares_nothing_and_reads_nothing_more(server, redis, bench_on):
    bench = bench_on(server)
    scheduler = bench.scheduler()
    scheduler.tick()
    sign = {"host": "other", "pid": "1", "since": "", "zone": str(bench.app.timezone)}
    redis.zadd(STANDBYS, {json.dumps(sign): 1000 * (redis.time()[0] + 60)})
    put_all(bench, ["a", "b", "c", "d"])
    scheduler.tick()
    assert bench.names == ["a", "b", "c", "d"]

    redis.config_resetstat()
    scheduler.tick()

    ran = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in redis.info("commandstats").items()}
    assert {name: ran.get(name, 0) for name in ("eval", "zrangebyscore", "zrange", "zadd")} == {
        "eval": 4,
        "zrangebyscore": 3,
        "zrange": 0,
        "zadd": 0,
    }


@pytest.mark.parametrize("seed", range(3))
def test_beats_that_come_and_go_double_nothing_and_leave_nothing(bench, tick_on, seed):
    """Each second some of them tick; one never does after its start, and two more start later."""
    chance, now = random.Random(seed), datetime.now(UTC)
    beats = {host: bench.scheduler() for host in ("a", "b", "hangs")}
    for host, scheduler in beats.items():
        tick_on(host, scheduler)
    hung = beats.pop("hangs")
    names = [f"e{number}" for number in range(200)]
    put_all(bench, names)

    for second in range(int(4 * TURN)):
        if second in {2, 5}:
            beats[f"new {second}"] = bench.scheduler()
        for host in chance.sample(sorted(beats), chance.randint(1, len(beats))):
            tick_on(host, beats[host], at=now + timedelta(seconds=second))

    assert sorted(bench.names) == sorted(names)
    assert hung.lease.share.beats > 1


@pytest.mark.parametrize("lost", ["all", "all, and an entry is added", "the time zone"])
def test_a_server_that_comes_back_empty_is_noticed_without_a_leader(bench, pair, tick_on, cli, logged, lost):
    """All entries are those of programs: no part of beat_schedule is gone."""
    bench.put("e")
    for host, beat in zip(("one", "other"), pair, strict=True):
        tick_on(host, beat)
    if lost == "the time zone":
        bench.redis.delete("redbeat::zone")
    else:
        bench.redis.flushall()
    if "added" in lost:
        bench.put("new")

    for host, beat in zip(("one", "other"), pair, strict=True):
        tick_on(host, beat)

    said = [line["reason"] for line in logged("schedule_vanished")]
    assert said == ([] if lost == "the time zone" else ["the server has lost all its data"])
    assert bool(bench.redis.exists("redbeat::lost")) == bool(said)
    health = cli("health", app=bench.app, code=int(lost == "all"))
    assert ("lost" in health.output) == bool(said)
