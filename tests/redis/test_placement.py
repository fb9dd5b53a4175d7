"""Places in the schedule that are later than their entries' times: tools name them, beat corrects milliseconds."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import BaseSchedule, crontab, schedule
from redis.exceptions import ConnectionError as RedisConnectionError

from singlebeat import Entry, Schedule, clocked
from singlebeat.beat import late_places as placement
from singlebeat.beat.late_places import late_places
from tests.redis.bench import Bench
from tests.support import APP
from tests.system.apps import make_app

SCHEDULE = "redbeat::schedule"
WEEK, HOUR = timedelta(days=7), timedelta(hours=1)


pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")


def put(bench: Bench, name: str = "e", when: BaseSchedule | None = None, *, place: float | None = None, **fields: Any):
    """Store an entry, by default with a run a minute ago and an hour between runs, at a place."""
    fields = {"total_run_count": 1, **fields}
    entry = bench.put(name, every=when or HOUR, ago=timedelta(minutes=1), **fields)
    if place is not None:
        bench.redis.zadd(SCHEDULE, {entry.key: place})
    return entry


def late(app) -> dict[str, str]:
    return {name: str(place) for name, place in late_places(app, Schedule(app).list())}


@pytest.mark.parametrize("overdue", [False, True])
def test_every_tool_names_a_place_that_is_a_week_too_late(app, bench, redis, findings, cli, overdue):
    put(bench, last_run_at=datetime.now(UTC) - (2 if overdue else 0.5) * HOUR)
    bench.tick()
    due_at = bench.score()
    at = datetime.fromtimestamp(time.time() // 1, UTC) + WEEK
    redis.zadd(SCHEDULE, {"redbeat:e": at.timestamp()})
    time_of = f"{datetime.fromtimestamp(due_at, UTC):%Y-%m-%d %H:%M:%SZ}"
    why = f"ts place in {SCHEDULE} is {at:%Y-%m-%d %H:%M:%SZ}, later than its time, {time_of}: it does not run before "
    advice = f"to let beat correct it: ZADD {SCHEDULE} 0 redbeat:e"

    bench.tick()

    assert bench.score() == at.timestamp(), "no beat sees it"
    listed, shown, explained = cli("list").output, cli("show", "e").output, cli("explain", "e").output
    assert f"e: i{why}" in listed
    assert "late place" in listed
    assert f"problem             i{why}" in shown
    assert f"{at:%Y-%m-%d %H:%M:%SZ}" in shown
    assert f"I{why}" in explained
    assert "due now" not in explained
    assert [advice in text for text in (listed, shown, explained)] == [True] * 3
    data = json.loads(cli("list", "--json").stdout)
    assert data["late_place"] == ["e"]
    assert [row["state"] for row in data["entries"] if row["name"] == "e"] == ["late place"]
    ((level, text),) = findings("entry e")
    assert (level, why in text) == ("problem", True)

    redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()
    assert bench.score() == pytest.approx(due_at)
    assert late(app) == {}
    assert "late place" not in cli("list").output


def test_tools_name_a_place_in_milliseconds_while_no_beat_runs(app, bench, findings, cli):
    put(bench, place=(time.time() + 3600) * 1000)
    put(bench, "new", place=(time.time() + 3600) * 1000, last_run_at=None, total_run_count=0, run_on_start=True)
    why = "which is no time in seconds since 1970 (is it in milliseconds?): it never runs"

    for name in ("e", "new"):
        assert why in cli("explain", name).output
        assert [why in text for _, text in findings(f"entry {name}")] == [True]
    listed = cli("list").output
    assert (listed.count(why), listed.count("never")) == (2, 5)  # NEXT, LAST of the new one, and the sentences


@pytest.mark.parametrize("place", [1.8e12, float("inf")])
def test_beat_corrects_a_place_that_is_no_time(app, bench, logged, redis, place):
    put(bench)
    put(bench, "other")
    bench.tick()
    right = bench.score()
    redis.zadd(SCHEDULE, {"redbeat:e": place})

    bench.tick(at=bench.schedulers[0].server_time.now() + timedelta(seconds=11))

    assert bench.score() == pytest.approx(right)
    (told,) = logged("place_corrected")
    assert (told["entry"], told["place"], "seconds since 1970" in told["reason"]) == ("e", place, True)


def test_every_tool_names_a_parked_entry_that_may_run_again(app, bench, redis, findings, cli):
    put(bench, "counted", max_runs=1)
    put(bench, "once", clocked(datetime.now(UTC) - HOUR), total_run_count=1)
    put(bench, "done", max_runs=1)
    put(bench, "tick 7", last_run_at=datetime.now(UTC) - 2 * HOUR)
    redis.zadd(SCHEDULE, {"redbeat:counted": 0, "redbeat:once": 0, "redbeat:done": 0, "redbeat:tick 7": "-inf"})
    bench.tick()
    assert redis.zmscore(SCHEDULE, [f"redbeat:{name}" for name in ("counted", "once", "done")]) == [-1] * 3
    assert {*late(app)} == {"tick 7"}
    redis.hset("redbeat:counted", "policy", '{"max_runs": 100}')
    interval = {"task": f"{APP}.plain", "schedule": {"__type__": "interval", "every": 60}}
    redis.hset("redbeat:once", "definition", json.dumps(interval))

    bench.tick()

    assert {*late(app)} == {"tick 7", "once", "counted"}
    never = "which means never, although its next time is "
    advice = f"to let beat correct it: ZADD {SCHEDULE} 0 "
    listed = cli("list").output
    members = {"counted": "redbeat:counted", "once": "redbeat:once", "tick 7": "'redbeat:tick 7'"}
    for name, member in members.items():
        why = f"ts place in {SCHEDULE} is {'-inf' if name == 'tick 7' else '-1'}, {never}"
        shown, explained = cli("show", name).output, cli("explain", name).output
        assert f"{name}: i{why}" in listed
        assert f"problem             i{why}" in shown
        assert f"I{why}" in explained
        assert "due now" not in explained
        assert [advice + member in text for text in (listed, shown, explained)] == [True] * 3
        ((level, text),) = findings(f"entry {name}")
        assert (level, why in text) == ("problem", True)
    assert {*json.loads(cli("list", "--json").stdout)["late_place"]} == {"counted", "once", "tick 7"}
    assert (
        "It is finished: it never runs again, because it has run 1 time, and max_runs is 1."
        in cli("explain", "done").output
    )
    assert findings("entry done") == []
    redis.hset("redbeat:once", "policy", '{"paused": true}')
    redis.hset("redbeat:counted", "definition", json.dumps({**interval, "enabled": False}))
    redis.hset("redbeat::quarantine", "redbeat:tick 7", json.dumps({"reason": "no task", "since": "today"}))
    assert late(app) == {}


def test_places_that_beat_has_given_are_never_late(app, bench, redis):
    now = datetime.now(UTC)
    zone = ZoneInfo("Pacific/Auckland")
    put(bench, "overdue", last_run_at=now - 5 * HOUR)
    put(bench, "never ran", run_on_start=True, last_run_at=None, total_run_count=0)
    put(bench, "jitter", jitter=3000)
    put(bench, "jitter late", jitter=3000, last_run_at=now - 5 * HOUR)
    put(bench, "starts", start_time=now + WEEK)
    put(bench, "starts new", start_time=now + WEEK, run_on_start=True, last_run_at=None, total_run_count=0)
    put(bench, "ends", end_time=now + HOUR / 2)
    put(bench, "ends late", end_time=now + 3 * HOUR, last_run_at=now - 5 * HOUR)
    put(bench, "finished", max_runs=1)
    put(bench, "last", max_runs=2, last_run_at=now - 5 * HOUR)
    put(bench, "paused", paused=True, last_run_at=now - 5 * HOUR)
    put(bench, "disabled", enabled=False, last_run_at=now - 5 * HOUR)
    put(bench, "cron", crontab(hour=4, minute=30), last_run_at=now - 30 * HOUR)
    put(bench, "cron there", crontab(hour=4, minute=30), timezone=zone, last_run_at=now - 30 * HOUR)
    put(bench, "once", clocked(now + WEEK), total_run_count=0)
    put(bench, "missed", misfire_grace_time=1, last_run_at=now - 5 * HOUR)
    put(bench, "skipped", overlap="skip", last_run_at=now - 5 * HOUR)
    Schedule(app).upsert("upserted", f"{APP}.plain", crontab(0, 0, 1, 1, 1))

    assert late(app) == {}
    for _ in range(3):
        bench.tick()
        assert late(app) == {}
    assert min(redis.zmscore(SCHEDULE, ["redbeat:once", "redbeat:starts new"])) > (now + WEEK).timestamp() - 1


@pytest.mark.parametrize("hours", [2, 48])
def test_entries_whose_clock_was_set_back_have_no_late_places(app, bench, hours):
    put(bench, last_run_at=datetime.now(UTC) - 5 * HOUR)
    bench.tick(at=datetime.now(UTC) + hours * HOUR)

    bench.tick()

    assert late(app) == {}


def test_an_entry_whose_past_lies_days_ahead_has_a_late_place(app, bench, redis):
    """A beat of RedBeat may have written it by a clock that was ahead; one of ours corrects it when it looks."""
    ahead = datetime.now(UTC) + WEEK
    put(bench, last_run_at=ahead, place=(ahead + HOUR).timestamp())
    put(bench, "soon", last_run_at=datetime.now(UTC) + 2 * HOUR, place=time.time() + 3 * 3600)

    assert {*late(app)} == {"e", "soon"}
    assert f"it counts from {ahead:%Y-%m-%d %H:%M:%SZ}, which is yet to come" in late(app)["e"]
    assert "ZADD redbeat::schedule 0 redbeat:e" in late(app)["e"]
    assert "celery singlebeat trigger soon" not in late(app)["soon"]
    assert "the entry waits until then" in late(app)["soon"]
    redis.zrem(SCHEDULE, "redbeat:soon")
    redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()

    assert late(app) == {}
    assert bench.score() < time.time() + 3601


@pytest.mark.parametrize("later", [HOUR / 2, HOUR])
def test_a_first_run_that_another_program_puts_off_is_no_problem(bench, findings, cli, redis, later):
    put(bench, last_run_at=None, total_run_count=0, run_on_start=True)
    at = datetime.fromtimestamp(time.time() // 1, UTC) + later
    redis.zadd(SCHEDULE, {"redbeat:e": at.timestamp()})
    why = f"It has never run, and by its place in {SCHEDULE} it does not run before {at:%Y-%m-%d %H:%M:%SZ}"

    explained = cli("explain", "e").output
    assert why in explained
    assert "due now" not in explained
    (row,) = json.loads(cli("list", "--json").stdout)["entries"]
    assert (row["state"], row["next"]) == ("active", at.isoformat())
    assert "place" not in cli("list").output
    assert findings("entry e") == []


def test_a_first_run_put_off_for_more_than_an_interval_is_a_warning(bench, findings, cli, redis):
    """A program may want that. It may also have made a mistake, and the entry does not run for so long."""
    new = {"last_run_at": None, "total_run_count": 0, "run_on_start": True}
    at = datetime.fromtimestamp(time.time() // 1, UTC) + WEEK
    put(bench, "interval", place=at.timestamp(), **new)
    put(bench, "cron", crontab(minute="*"), place=at.timestamp(), **new)
    put(bench, "ends", place=at.timestamp(), end_time=datetime.now(UTC) + HOUR / 2, **new)
    why = f"t has never run, and by its place in {SCHEDULE} it does not run before {at:%Y-%m-%d %H:%M:%SZ}, a"

    listed = cli("list").output
    for name in ("interval", "cron", "ends"):
        ((level, text),) = findings(f"entry {name}")
        assert (level, f"i{why}" in text) == ("warning", True)
        assert f"{name}: i{why}" in listed
        assert f"warning             i{why}" in cli("show", name).output
        assert f"I{why}" in cli("explain", name).output
        assert f"to run it at once: ZADD {SCHEDULE} 0 redbeat:{name}" in text
    assert {*json.loads(cli("list", "--json").stdout)["late_place"]} == {"interval", "cron", "ends"}


def test_every_tool_names_a_clocked_entry_whose_place_is_too_late(bench, findings, cli, redis):
    """It has never run, but its only time is known: beat would run it too late, or miss it."""
    instant = datetime.fromtimestamp(time.time() // 1, UTC) + HOUR
    entry = put(bench, when=clocked(instant), last_run_at=None, total_run_count=0, place=(instant + HOUR).timestamp())
    redis.hdel(entry.key, "meta", "since")
    why = (
        f"ts place in {SCHEDULE} is {instant + HOUR:%Y-%m-%d %H:%M:%SZ}, later than its time, "
        f"{instant:%Y-%m-%d %H:%M:%SZ}: it does not run before its place"
    )

    ((level, text),) = findings("entry e")
    assert (level, f"i{why}" in text) == ("problem", True)
    assert f"e: i{why}" in cli("list").output
    assert f"problem             i{why}" in cli("show", "e").output
    assert f"I{why}" in cli("explain", "e").output


def test_the_advice_for_a_place_under_a_bare_name_names_that_member(app, bench, redis):
    put(bench)
    redis.zrem(SCHEDULE, "redbeat:e")
    redis.zadd(SCHEDULE, {"e": -5})

    assert late(app)["e"].endswith(f"ZADD {SCHEDULE} 0 e")

    redis.zadd(SCHEDULE, {"redbeat:e": time.time() + 10**6})
    assert late(app)["e"].endswith(f"ZADD {SCHEDULE} 0 redbeat:e")


def test_no_occurrence_of_an_entry_with_two_places_stays_pending(app, bench, redis):
    put(bench, last_run_at=datetime.now(UTC) - 2 * HOUR, overlap="allow_all")
    redis.zadd(SCHEDULE, {"redbeat:e": 0, "e": 0})

    bench.tick()
    bench.tick()

    assert (redis.zcard("redbeat::pending"), redis.llen("celery")) == (0, 1)
    places = redis.zmscore(SCHEDULE, ["redbeat:e", "e"])
    assert places[0] == places[1] > time.time()


def test_an_entry_that_beat_moves_on_while_it_is_read_has_no_late_place(app, bench, redis, monkeypatch):
    put(bench, last_run_at=datetime.now(UTC) - 2 * HOUR)
    read_before = [*Schedule(app).list()]
    bench.tick()
    assert bench.score() > time.time() + 5

    assert [*late_places(app, read_before)] == []

    read = placement._read
    redis.zadd(SCHEDULE, {"redbeat:e": time.time() + 10 * 86_400})

    def while_a_writer_corrects_it(*args):
        found = [*read(*args)]
        redis.zadd(SCHEDULE, {"redbeat:e": time.time() + 9 * 86_400})
        return found

    monkeypatch.setattr(placement, "_read", while_a_writer_corrects_it)
    assert late(app) == {}


def test_places_are_compared_by_the_zone_of_the_last_leader(server, redis, bench_on):
    """What comes within the hour in Lisbon comes in the early morning in Tokyo, many hours later."""
    here, last = datetime.now(ZoneInfo("Europe/Lisbon")), datetime.now(UTC) - timedelta(minutes=1)
    when = crontab(minute=(here.minute + 30) % 60, hour=(here + HOUR / 2).hour)
    bench = bench_on(server, timezone="Asia/Tokyo")
    bench.put(every=when, last_run_at=last)
    bench.tick()
    assert bench.score() > time.time() + 7200

    assert late(bench.new_app(timezone="Europe/Lisbon")) == {}


def test_the_doctor_names_ten_late_places_and_says_that_there_are_more(bench, cli):
    for number in range(12):
        put(bench, f"e{number}", place=time.time() + 10**6)

    text = cli("doctor", code=1).output

    assert text.count("later than its time") == 10
    assert "problem  entries: more than these 10 have places that are later than their times" in text


def test_the_places_of_a_batch_are_read_in_one_round_trip(app, bench, redis):
    for number in range(30):
        put(bench, f"e{number}")

    def calls() -> int:
        return redis.info("commandstats").get("cmdstat_zmscore", {"calls": 0})["calls"]

    entries, before = [*Schedule(app).list()], calls()

    assert [*late_places(app, entries)] == []
    assert calls() == before + 1


@pytest.mark.parametrize("name", [":schedule", ":lock", ":leader"])
def test_a_place_of_a_key_of_the_schedule_itself_is_named_with_its_removal(bench, redis, findings, cli, name):
    member = f"redbeat:{name}"
    redis.zadd(SCHEDULE, {member: 0})
    bench.tick()
    removal = f"remove its place with ZREM {SCHEDULE} {member}"

    explained = cli("explain", name).output
    assert removal in explained
    assert "celery singlebeat delete" not in explained
    assert [removal in text for _, text in findings(f"entry {name}")] == [True]

    redis.zrem(SCHEDULE, member)
    bench.tick()
    assert findings(f"entry {name}") == []


def test_an_entry_of_another_app_lacks_no_place(app, redis, cli):
    with make_app(app.conf.broker_url, {"redbeat_key_prefix": "redbeat:a:"}) as other:
        Entry("job", f"{APP}.plain", schedule(60), app=other).save()

    for command in ("show", "explain"):
        assert "no place" not in cli(command, "a:job").output


@pytest.mark.parametrize("taken", [False, True], ids=["removed", "of another type"])
@pytest.mark.parametrize("restarted", [False, True], ids=["in a term", "in the next term"])
@pytest.mark.parametrize("given", [{}, {"mine": {"task": f"{APP}.plain", "schedule": 3600}}], ids=["", "beat_schedule"])
def test_entries_get_their_places_again_when_the_sorted_set_is_gone(
    server, redis, bench_on, findings, cli, logged, given, restarted, taken
):
    bench = bench_on(server, beat_schedule=given)
    bench.put(ago=timedelta())
    bench.put("limited", ago=HOUR / 2, max_runs=8)
    bench.put("other:e")
    bench.tick(2)
    before, sent = dict(redis.zrange(SCHEDULE, 0, -1, withscores=True)), bench.names
    if restarted:
        bench.schedulers[-1].close()
        bench.scheduler()
    if taken:
        redis.delete(SCHEDULE)
        redis.set(SCHEDULE, "x")
        bench.tick()
        ((_, text),) = findings(f"key {SCHEDULE}", app=bench.app)
        redis.execute_command(*re.search("DEL [^ ]+", text)[0].split())
    else:
        redis.delete(SCHEDULE)

    bench.tick(3)

    assert dict(redis.zrange(SCHEDULE, 0, -1, withscores=True)) == pytest.approx(before)
    assert bench.names == sent, "no run is sent twice, or early"
    assert [found for found in findings("entry", app=bench.app) if "place" in found[1]] == []
    assert [line["restored"] for line in logged("places_restored")] == [len(before)]


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("how", ["in a term", "in the next term", "while no beat runs", "without leadership"])
def test_entries_get_places_again_if_one_was_added_since_the_loss(
    server, redis, bench_on, findings, logged, count, how
):
    bench = bench_on(server, **({"redbeat_lock_key": None} if how == "without leadership" else {}))
    for number in range(count):
        bench.put(f"e{number}", ago=timedelta())
    bench.tick(2)
    before = dict(redis.zrange(SCHEDULE, 0, -1, withscores=True))

    if how == "while no beat runs":
        bench.schedulers[-1].close()
    redis.delete(SCHEDULE)
    bench.put("new", ago=timedelta())
    if how == "in the next term":
        bench.schedulers[-1].close()
    if bench.schedulers[-1]._closed:
        bench.scheduler()
    bench.tick(3)

    after = dict(redis.zrange(SCHEDULE, 0, -1, withscores=True))
    assert after.pop("redbeat:new")
    assert after == pytest.approx(before)
    assert bench.names == [], "no run is sent early"
    assert [found for found in findings("entry", app=bench.app) if "place" in found[1]] == []
    assert [line["restored"] for line in logged("places_restored")] == [count]


def test_entries_whose_places_were_removed_by_hand_stay_without_them(bench, redis, logged):
    """Also if most of the other entries are deleted, and in the next term."""
    for number in range(40):
        bench.put(f"e{number}", ago=timedelta())
    bench.tick(2)
    removed = [f"redbeat:e{number}" for number in range(0, 40, 10)]
    for member in removed:
        redis.zrem(SCHEDULE, member)
        bench.tick()
    for number in range(35):
        bench.schedule.delete(f"e{number}") if number % 10 else None
    bench.tick(2)
    bench.schedulers[-1].close()
    bench.scheduler()
    bench.tick(2)

    assert redis.zmscore(SCHEDULE, removed) == [None] * len(removed)
    assert redis.zcard(SCHEDULE) == 5
    assert logged("places_restored") == []


def test_a_few_entries_that_are_removed_at_once_stay_removed(bench, redis, logged):
    """Even if they are the witnesses."""
    for number in range(40):
        bench.put(f"e{number}", ago=timedelta())
    bench.tick(2)
    removed = [*redis.smembers("redbeat::placed")]
    redis.zrem(SCHEDULE, *removed)
    bench.tick(3)

    assert redis.zmscore(SCHEDULE, removed) == [None] * len(removed)
    assert len(removed) == 16
    assert logged("places_restored") == []


def test_one_of_two_entries_that_is_removed_by_hand_stays_removed(bench, redis):
    for name in ("gone", "kept"):
        bench.put(name, ago=timedelta())
    bench.tick(2)
    redis.zrem(SCHEDULE, "redbeat:gone")
    bench.tick(2)
    bench.schedulers[-1].close()
    bench.scheduler()
    bench.tick(2)

    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:kept"]


def test_lost_places_are_noticed_though_a_program_stores_its_own_again(bench, redis):
    for number in range(60):
        bench.put(f"e{number}", ago=timedelta())
    bench.tick(2)
    bench.schedulers[-1].close()
    redis.delete(SCHEDULE)
    for number in range(20):
        bench.put(f"e{number}", ago=timedelta())
    bench.scheduler()
    bench.tick(3)

    assert redis.zcard(SCHEDULE) == 60


@pytest.mark.parametrize("ends", [True, False], ids=["killed", "refused"])
def test_a_search_for_lost_places_that_ends_early_is_begun_again(bench, redis, monkeypatch, ends):
    """Even if most places are there again by then."""
    monkeypatch.setattr("singlebeat.beat.store.unplaced.BATCH", 5)
    for number in range(40):
        bench.put(f"e{number}", ago=timedelta())
    bench.tick(2)
    redis.delete(SCHEDULE)
    scheduler = bench.schedulers[-1]
    zadd, calls = scheduler.store.client.zadd, []

    def fail(*args: Any, **options: Any) -> int:
        calls.append(args)
        if len(calls) == 7:
            raise RedisConnectionError
        return zadd(*args, **options)

    monkeypatch.setattr(scheduler.store.client, "zadd", fail)
    bench.tick()
    assert 20 < redis.zcard(SCHEDULE) < 40
    if ends:
        scheduler.close()
        bench.scheduler()
    bench.tick(3)
    assert redis.zcard(SCHEDULE) == 40


def test_a_long_search_for_lost_places_takes_a_part_of_each_tick(bench, redis, monkeypatch, logged):
    monkeypatch.setattr("singlebeat.beat.store.unplaced.BATCH", 5)
    monkeypatch.setattr("singlebeat.beat.store.unplaced.SEARCH_TIME", 0.0)
    for number in range(40):
        bench.put(f"e{number}", ago=timedelta())
    bench.tick(2)
    redis.delete(SCHEDULE)
    scheduler, ticks = bench.schedulers[-1], 0

    while redis.zcard(SCHEDULE) < 40:
        delay, ticks = scheduler.tick(), ticks + 1
        assert ticks < 100
    assert ticks > 4
    assert delay < 0.1
    bench.tick(2)
    assert [line["restored"] for line in logged("places_restored")] == [40]


def test_a_schedule_that_is_empty_is_searched_for_entries_once(bench, monkeypatch):
    searches = []
    monkeypatch.setattr("singlebeat.beat.store.unplaced.pages_without_place", lambda *_: searches.append(1) or iter(()))
    bench.tick(3)
    assert len(searches) == 1

    bench.put(ago=timedelta())
    bench.tick(2)
    bench.schedule.delete("e")
    bench.tick(3)
    assert len(searches) == 2


KEY = "redbeat:e"  # which users of redis-cli and of RedBeat know


@pytest.mark.parametrize("command", ["delete", "pause", "trigger", "explain", "show"])
def test_a_command_given_a_key_names_the_entry_and_leaves_its_place(bench, cli, command):
    bench.put()
    place = bench.score()
    bench.redis.zadd("redbeat::pending", {KEY: 5})
    bench.redis.hset("redbeat::quarantine", KEY, "{}")

    said = cli(command, KEY, code=None)

    assert said.exit_code != 0
    assert "redbeat:e is the key of the entry 'e'" in said.output
    assert bench.score() == place
    assert bench.redis.zscore("redbeat::pending", KEY) == 5
    assert bench.redis.hexists("redbeat::quarantine", KEY)


def test_the_key_of_another_programs_value_is_the_name_of_no_entry(bench, cli):
    bench.redis.set("redbeat:text", "of another program")

    for command in ("show", "pause", "trigger", "delete"):
        said = cli(command, "redbeat:text", code=1).output
        assert "there is no entry 'redbeat:text'" in said
        assert "is the key of" not in said


@pytest.mark.parametrize("every", [HOUR, 2 * HOUR], ids=["its times stay", "its times change"])
def test_an_edit_of_an_entry_under_its_bare_name_gives_it_no_second_place(bench, every):
    bench.put(ago=timedelta(minutes=1))
    place = bench.score()
    bench.redis.zrem(SCHEDULE, KEY)
    bench.redis.zadd(SCHEDULE, {"e": place})

    bench.schedule.upsert("e", f"{APP}.plain", every, args=["edited"])

    assert bench.redis.zcard(SCHEDULE) == 1
    assert [entry.args for entry in bench.schedule.list()] == [["edited"]]


@pytest.mark.parametrize("removal", ["delete", "park"])
def test_an_entry_named_as_the_key_of_another_leaves_the_place_of_that(bench, removal):
    bench.put()
    if removal == "delete":
        bench.put(KEY)
        bench.schedule.delete(KEY)
    else:
        listed = {KEY: {"task": f"{APP}.plain", "schedule": 60}}
        bench.scheduler(beat_schedule=listed).tick()
        bench.schedulers.pop().close()
        assert KEY in {entry.name for entry in bench.schedule.list()}
        bench.make_due()
        bench.scheduler(beat_schedule={}).tick()

    assert bench.score() is not None
    assert {entry.name for entry in bench.schedule.list()} == {"e"}


def test_an_entry_named_as_the_key_of_another_needs_a_place_of_its_own(bench, findings):
    bench.put()
    bench.put(KEY)
    bench.redis.zrem("redbeat::schedule", f"redbeat:{KEY}")

    assert KEY in [*bench.schedule.without_place()]
    assert "has no place" in bench.schedule.no_place(KEY)
