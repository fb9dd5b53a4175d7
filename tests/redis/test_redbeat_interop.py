"""RedBeat itself and singlebeat on the same data, in both directions: a rollout and the way back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery
from celery.beat import Service
from celery.schedules import crontab, schedule
from redbeat import RedBeatScheduler, RedBeatSchedulerEntry
from redbeat.schedulers import acquire_distributed_beat_lock
from redbeat.schedules import rrule

from singlebeat import Entry
from singlebeat.beat.entries import fields
from singlebeat.beat.entries.entry import Meta
from singlebeat.errors import UnknownEntryError
from tests.support import wait_until

TASK = "tests.system.apps.plain"
SCHEDULE, STATICS, LOCK = "redbeat::schedule", "redbeat::statics", "redbeat::lock"
HOUR = timedelta(hours=1)
STATIC = {"static": {"task": TASK, "schedule": 3600, "args": ["static"]}}


@pytest.fixture
def theirs(bench) -> Celery:
    """An app for RedBeat: what the two keep on an app must not mix."""
    return bench.new_app()


@pytest.fixture
def ours(bench) -> Celery:
    return bench.app


@pytest.fixture
def redbeat_of() -> Iterator[Callable[[Celery], RedBeatScheduler]]:
    """Make the scheduler of a beat of RedBeat."""
    schedulers = []

    def make(app: Celery) -> RedBeatScheduler:
        schedulers.append(Service(app, scheduler_cls=RedBeatScheduler).get_scheduler())
        return schedulers[-1]

    yield make
    for scheduler in schedulers:
        scheduler.close()


def lead(scheduler: RedBeatScheduler) -> None:
    """Take the lock as RedBeat does when beat starts; waits until it is free."""
    acquire_distributed_beat_lock(sender=type("Service", (), {"scheduler": scheduler}))


#: In the middle between two times of the schedules below, whenever in the next minutes a test looks at them.
AWAY = (datetime.now(UTC) + HOUR / 2).replace(second=0, microsecond=0)

SCHEDULES = {
    "interval": schedule(3600),
    "relative interval": schedule(3600, relative=True),
    "crontab": crontab(minute=AWAY.minute, hour="*"),
    "crontab of lists": crontab([AWAY.minute], hour=list(range(24)), day_of_week="mon-sun", month_of_year="1-12"),
    # RedBeat walks from the start of a rule, step by step.
    "rule": rrule("HOURLY", dtstart=AWAY - timedelta(days=9)),
}


# ---------------------------------------------------------------- from RedBeat to us


@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_entry_saved_by_redbeat_is_loaded_and_sent(theirs, bench, ours, kind):
    last = datetime.now(UTC) - 2 * HOUR
    RedBeatSchedulerEntry(
        "e",
        TASK,
        SCHEDULES[kind],
        args=["e"],
        kwargs={"seconds": 0},
        options={"priority": 0},
        app=theirs,
        last_run_at=last,
    ).save()

    loaded = Entry.from_key("redbeat:e", app=ours)
    scheduler = bench.scheduler()
    scheduler.tick()
    scheduler.tick()

    assert (loaded.name, loaded.task, loaded.args, loaded.kwargs) == ("e", TASK, ["e"], {"seconds": 0})
    assert (loaded.options, loaded.enabled, loaded.last_run_at) == ({"priority": 0}, True, last)
    assert loaded.schedule == SCHEDULES[kind]
    assert bench.names == ["e"]
    assert bench.score() > datetime.now(UTC).timestamp()


def test_we_go_on_where_redbeat_has_stopped(theirs, bench, ours):
    entry = RedBeatSchedulerEntry("e", TASK, schedule(3600), args=["e"], app=theirs).save()
    entry = entry.next()

    bench.scheduler().tick()

    assert bench.names == []
    loaded = Entry.from_key("redbeat:e", app=ours)
    assert (loaded.last_run_at, loaded.total_run_count) == (entry.last_run_at, 1)


def test_an_entry_that_redbeat_has_disabled_stays_so(theirs, bench):
    last = datetime.now(UTC) - 2 * HOUR
    RedBeatSchedulerEntry("e", TASK, schedule(3600), args=["e"], enabled=False, app=theirs, last_run_at=last).save()

    bench.scheduler().tick()

    assert bench.names == []
    assert RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs).enabled is False


def test_a_time_that_redbeat_has_written_too_early_is_corrected(theirs, bench, redis):
    last = datetime.now(UTC) - timedelta(minutes=10)
    entry = RedBeatSchedulerEntry("e", TASK, schedule(3600), args=["e"], app=theirs, last_run_at=last).save()
    redis.zadd(SCHEDULE, {entry.key: datetime.now(UTC).timestamp() - 60})

    bench.scheduler().tick()

    assert bench.names == []
    assert bench.score() == pytest.approx((last + HOUR).timestamp(), abs=1e-5)


def test_static_entries_of_redbeat_become_ours(bench, redbeat_of, redis):
    redbeat = redbeat_of(bench.new_app(beat_schedule={**STATIC, "old": STATIC["static"]}))
    lead(redbeat)
    before = bench.score("static"), redis.hget("redbeat:static", "meta")
    redbeat.close()

    bench.scheduler(beat_schedule=STATIC).tick()

    assert redis.smembers(STATICS) == {"static"}
    assert redis.exists("redbeat:old") == 0
    assert redis.hget("redbeat:static", "meta") == before[1]
    assert bench.score("static") >= before[0]


# ---------------------------------------------------------------- from us to RedBeat


@pytest.mark.parametrize("kind", SCHEDULES)
def test_redbeat_uses_an_entry_that_we_have_saved_and_sent(theirs, bench, ours, redis, kind):
    last = datetime.now(UTC) - 2 * HOUR
    Entry("e", TASK, SCHEDULES[kind], args=["e"], kwargs={"seconds": 0}, app=ours, last_run_at=last).save()
    redis.hset("redbeat:e", "policy", '{"misfire_grace_time": 86400}')
    bench.scheduler().tick()
    assert bench.names == ["e"]

    entry = RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs)

    assert (entry.name, entry.task, entry.args, entry.kwargs) == ("e", TASK, ["e"], {"seconds": 0})
    assert (entry.options, entry.enabled, entry.total_run_count) == ({}, True, 1)
    assert entry.schedule == SCHEDULES[kind]
    assert last < entry.last_run_at <= datetime.now(UTC)
    is_due, seconds = entry.is_due()
    assert is_due in (True, False)
    assert seconds > 0

    following = entry.next()
    assert following.total_run_count == 2
    assert Entry.from_key("redbeat:e", app=ours).meta == Meta(following.last_run_at.astimezone(UTC), 2)

    following.delete()
    assert redis.exists("redbeat:e", SCHEDULE) == 0


def test_redbeat_is_not_due_for_an_entry_that_we_have_sent(theirs, bench, ours):
    Entry("e", TASK, schedule(7200), args=["e"], app=ours, last_run_at=datetime.now(UTC) - timedelta(hours=3)).save()
    bench.scheduler().tick()

    is_due, seconds = RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs).is_due()

    assert not is_due
    assert 0 < seconds <= 3600


@pytest.mark.parametrize("change", [{"schedule": 7200}, {"schedule": 1800, "jitter": 30}], ids=str)
def test_redbeat_reads_an_entry_whose_times_were_changed(theirs, bench, ours, change):
    last = datetime.now(UTC) - 2 * HOUR
    Entry("e", TASK, schedule(3600), app=ours, last_run_at=last).save()

    bench.schedule.upsert("e", TASK, change.pop("schedule", 3600), **change)

    assert Entry.from_key("redbeat:e", app=ours).meta.since > last
    assert RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs).last_run_at == last


def test_redbeat_reads_an_entry_that_counts_anew_after_a_wrong_clock(theirs, bench, ours, redis):
    ahead = datetime.now(UTC) + timedelta(days=2)
    Entry("e", TASK, schedule(3600), app=ours, last_run_at=ahead).save()
    redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.scheduler().tick()

    assert Entry.from_key("redbeat:e", app=ours).meta.since < ahead
    assert RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs).last_run_at == ahead


def test_a_run_that_redbeat_sent_after_a_change_is_not_sent_again(theirs, bench, ours):
    bench.put(ago=2 * HOUR, total_run_count=0)
    bench.schedule.upsert("e", TASK, 7200, args=["e"])
    assert Entry.from_key("redbeat:e", app=ours).meta.since

    theirs_last = next(RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs)).last_run_at

    assert Entry.from_key("redbeat:e", app=ours).meta == Meta(theirs_last.astimezone(UTC), 1)


def test_redbeat_ticks_on_all_that_we_leave_behind(bench, redbeat_of, redis, ours):
    for name in ("a", "b"):
        bench.put(name, ago=2 * HOUR)
    redis.hset("redbeat:broken", "definition", "{")
    redis.zadd(SCHEDULE, {"redbeat:broken": 0})
    mine = bench.scheduler(beat_schedule=STATIC)
    mine.tick()
    mine.close()
    assert sorted(bench.names) == ["a", "b"]
    bench.schedule.upsert("b", TASK, 7200, args=["b"])  # counts from now
    redis.zadd(SCHEDULE, {"redbeat:b": 0})  # so RedBeat looks at it
    for name in ("a", "static"):
        bench.make_due(name, ago=2 * HOUR)

    redbeat = redbeat_of(bench.new_app(beat_schedule=STATIC))
    lead(redbeat)
    redbeat.tick()

    assert sorted(bench.names) == ["a", "a", "b", "static"]
    assert Entry.from_key("redbeat:a", app=ours).total_run_count == 9


def test_the_last_run_of_the_repeated_hour_is_the_same_instant_for_redbeat(bench):
    ours, theirs = (bench.new_app(timezone="Europe/Berlin") for _ in range(2))
    last = datetime(2024, 10, 27, 1, 30, tzinfo=UTC).astimezone(ours.timezone)  # the second half past two
    Entry("e", TASK, schedule(3600), app=ours, last_run_at=last).save()

    assert RedBeatSchedulerEntry.from_key("redbeat:e", app=theirs).last_run_at == datetime(
        2024, 10, 27, 1, 30, tzinfo=UTC
    )


# ---------------------------------------------------------------- one interface


def test_saving_again_keeps_the_past(ours, redis):
    entry = Entry("e", TASK, schedule(3600), app=ours, last_run_at=datetime.now(UTC) - HOUR).save()
    entry = next(entry)

    Entry("e", TASK, schedule(60), app=ours).save()

    stored = Entry.from_key("redbeat:e", app=ours)
    assert replace(stored.meta, since=None) == entry.meta
    assert stored.schedule == schedule(60)


def test_rescheduling_keeps_the_number_of_runs(bench, ours):
    moment = datetime.now(UTC) - timedelta(minutes=5)
    entry = next(Entry("e", TASK, schedule(3600), app=ours).save())

    entry.reschedule(last_run_at=moment)

    assert Entry.from_key("redbeat:e", app=ours).meta == Meta(moment, 1)
    assert bench.score() == pytest.approx((moment + HOUR).timestamp(), abs=1e-5)


def test_rescheduling_counts_even_if_the_times_were_changed_before(bench, ours):
    Entry("e", TASK, schedule(3600), app=ours).save()
    entry = bench.schedule.upsert("e", TASK, 7200)
    entry = Entry.from_key(entry.key, app=ours)
    assert entry.meta.since

    entry.reschedule(last_run_at=(moment := datetime.now(UTC) - timedelta(minutes=5)))

    assert Entry.from_key("redbeat:e", app=ours).meta == Meta(moment)
    assert bench.score() == pytest.approx((moment + 2 * HOUR).timestamp(), abs=1e-5)


def test_rescheduling_and_next_count_the_runs_since_the_entry_was_read(bench, ours):
    bench.schedule.upsert("e", TASK, 3600, max_runs=4)
    entry = Entry.from_key("redbeat:e", app=ours)  # before its runs
    for _ in range(4):
        next(Entry.from_key("redbeat:e", app=ours))

    entry.reschedule(last_run_at=(moment := datetime.now(UTC) - timedelta(minutes=5)))

    assert Entry.from_key("redbeat:e", app=ours).meta == entry.meta == Meta(moment, 4)
    assert next(entry).total_run_count == 5


def test_rescheduling_places_an_entry_by_its_times_as_they_are_stored(bench, ours):
    entry = Entry("e", TASK, schedule(3600), app=ours).save()
    bench.schedule.upsert("e", TASK, 60)

    entry.reschedule(last_run_at=(moment := datetime.now(UTC)))

    assert bench.score() == pytest.approx((moment + timedelta(minutes=1)).timestamp(), abs=1e-5)


def test_rescheduling_overwrites_no_run_in_between(ours, monkeypatch):
    entry, read = Entry("e", TASK, schedule(3600), app=ours).save(), fields.read_fields

    def run_afterwards(*args):
        found = read(*args)
        monkeypatch.setattr("singlebeat.beat.entries.entry.read_fields", read)
        next(Entry.from_key("redbeat:e", app=ours))
        return found

    monkeypatch.setattr("singlebeat.beat.entries.entry.read_fields", run_afterwards)
    entry.reschedule()

    assert Entry.from_key("redbeat:e", app=ours).total_run_count == 1


@pytest.mark.parametrize("call", [lambda entry: entry.reschedule(), next])
def test_rescheduling_goes_by_the_clock_of_the_server(ours, redis, monkeypatch, call):
    entry = Entry("e", TASK, schedule(60), app=ours).save()
    ahead = type("ahead", (datetime,), {"now": classmethod(lambda cls, tz=None: datetime.now(tz) + timedelta(hours=1))})
    monkeypatch.setattr("singlebeat.beat.entries.entry.datetime", ahead)

    call(entry)

    assert abs(redis.zscore(SCHEDULE, "redbeat:e") - time.time() - 60) < 30


@pytest.mark.parametrize("call", [lambda entry: entry.reschedule(), next])
def test_rescheduling_a_deleted_entry_stores_nothing(bench, ours, redis, call):
    entry = Entry("e", TASK, schedule(3600), app=ours).save()
    bench.schedule.delete("e")

    with pytest.raises(UnknownEntryError, match="there is no entry"):
        call(entry)

    assert not redis.exists("redbeat:e", SCHEDULE)


def test_only_the_time_may_be_updated(ours):
    moment = datetime.now(UTC) - timedelta(minutes=5)
    entry = Entry("e", TASK, schedule(3600), app=ours).save()

    entry._next_instance(last_run_at=moment, only_update_last_run_at=True)

    assert Entry.from_key("redbeat:e", app=ours).meta == Meta(moment, 0)


def test_the_rank_counts_the_entries_before(ours, redis):
    first, second = (
        Entry(name, TASK, schedule(every), app=ours).save() for name, every in {"a": 60, "b": 3600}.items()
    )

    assert (first.rank, second.rank) == (0, 1)
    second.delete()
    assert second.rank is None


def test_an_entry_that_does_not_exist_is_a_key_error(ours, redis):
    with pytest.raises(KeyError, match="redbeat:none"):
        Entry.from_key("redbeat:none", app=ours)
    with pytest.raises(KeyError, match="redbeat:none"):
        Entry.load_definition("redbeat:none", app=ours)


def test_the_parts_of_an_entry_read_alike(ours, theirs, redis):
    Entry("e", TASK, crontab(minute="5"), args=[1], app=ours).save()

    assert Entry.load_definition("redbeat:e", app=ours) == RedBeatSchedulerEntry.load_definition(
        "redbeat:e", app=theirs
    )
    assert Entry.load_meta("redbeat:e", app=ours) == RedBeatSchedulerEntry.load_meta("redbeat:e", app=theirs)
    assert Entry.generate_key(ours, "e") == RedBeatSchedulerEntry.generate_key(theirs, "e") == "redbeat:e"


# ---------------------------------------------------------------- who leads


def test_redbeat_keeps_us_out_until_it_leaves(theirs, bench, redbeat_of, redis, caplog):
    caplog.set_level("INFO")
    redbeat, mine = redbeat_of(theirs), bench.scheduler()
    lead(redbeat)
    token = redis.get(LOCK)
    bench.put(ago=2 * HOUR)

    for _ in range(2):
        assert 0 < mine.tick() < 1
    assert (bench.names, redis.get(LOCK)) == ([], token)
    assert "Standing by: another beat leads" in caplog.text
    redbeat.close()
    mine.tick()

    assert bench.names == ["e"]


def test_redbeat_waits_until_we_leave(theirs, bench, redbeat_of, redis):
    redbeat, mine = redbeat_of(theirs), bench.scheduler()
    redbeat.max_interval = 0.01  # how often it asks
    mine.tick()
    token = redis.get(LOCK)
    theirs_held = []

    def follow() -> None:
        lead(redbeat)
        theirs_held.append(redis.get(LOCK))
        redbeat.close()  # here: redis-py's lock belongs to its thread

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()

    def asked() -> int:
        return redis.info("commandstats")["cmdstat_set"]["calls"]

    before = asked()
    wait_until(lambda: asked() >= before + 3, what="RedBeat to ask and ask")
    assert thread.is_alive()
    assert redis.get(LOCK) == token
    mine.close()
    thread.join(10)

    assert len(theirs_held) == 1
    assert theirs_held[0] not in (None, token)


def test_redbeat_cannot_prolong_a_lock_that_it_has_lost_to_us(theirs, bench, redbeat_of, redis):
    redbeat, mine = redbeat_of(theirs), bench.scheduler()
    lead(redbeat)
    redis.delete(LOCK)
    mine.tick()

    with pytest.raises(Exception, match="lock"):
        redbeat.tick()

    assert redis.get(LOCK) == mine.lease.term().token
