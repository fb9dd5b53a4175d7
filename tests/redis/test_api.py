"""``singlebeat.Schedule``: what a program does to entries, and what a beat then does with them."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from redbeat.schedules import rrule

from singlebeat import Entry, Schedule, clocked
from singlebeat.beat.entries.entry import Meta
from singlebeat.beat.entries.occurrence import Kind, Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.timetable import Timetable
from singlebeat.errors import ConflictError, EntryError, UnknownEntryError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ref
from tests.redis.bench import Bench
from tests.support import at_once, wait_until
from tests.system.apps import make_app

PLAIN = "tests.system.apps.plain"
SCHEDULE, PENDING, HISTORY = "redbeat::schedule", "redbeat::pending", "redbeat::history"
QUARANTINE, CHANGES = "redbeat::quarantine", "redbeat::changes"
START = datetime(2026, 3, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def api(app: Celery) -> Schedule:
    return Schedule(app)


@pytest.fixture
def ticking(bench: Bench) -> Iterator[None]:
    """Let a scheduler tick all the time, as a beat does."""
    over, beat = threading.Event(), bench.scheduler()

    def tick() -> None:
        while not over.wait(min(beat.tick(), 0.02)):
            pass

    thread = threading.Thread(target=tick)
    thread.start()
    yield
    over.set()
    thread.join()


def decided(bench: Bench) -> list[tuple[str, str]]:
    """Return the kind of each occurrence, with its decision."""
    return [(record["kind"], record["decision"]) for record in bench.history]


# ---------------------------------------------------------------- get, list


def test_get_returns_the_stored_entry(api):
    api.upsert(
        "e", PLAIN, 60, args=["a"], kwargs={"seconds": 1}, options={"queue": "q"}, enabled=False, jitter=5, note="n"
    )
    entry = api.get("e")

    assert (entry.name, entry.task, entry.schedule, entry.enabled) == ("e", PLAIN, schedule(60), False)
    assert (entry.args, entry.kwargs, entry.options) == (["a"], {"seconds": 1}, {"queue": "q"})
    assert entry.policy == EntryPolicy(jitter=5.0, note="n")


@pytest.mark.parametrize(
    "verb",
    [
        lambda api: api.get("nobody"),
        lambda api: api.pause("nobody"),
        lambda api: api.resume("nobody"),
        lambda api: api.trigger("nobody"),
        lambda api: api.next_runs("nobody", 1),
        lambda api: api.backfill("nobody", START, START + HOUR),
    ],
    ids=["get", "pause", "resume", "trigger", "next_runs", "backfill"],
)
def test_an_unknown_name_is_an_error_and_nothing_is_written(api, redis, verb):
    with pytest.raises(UnknownEntryError, match=r"^there is no entry 'nobody' under redbeat:$") as caught:
        verb(api)

    assert isinstance(caught.value, KeyError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert redis.dbsize() == 0


def test_an_entry_that_cannot_be_read_says_why(api, redis):
    redis.hset("redbeat:e", mapping={"definition": "{"})
    redis.set("redbeat:f", "a text")

    with pytest.raises(EntryError, match="definition cannot be read"):
        api.get("e")
    with pytest.raises(EntryError, match="its key holds something else"):
        api.get("f")


def test_all_entries_are_listed_by_their_times_and_broken_ones_are_logged(api, redis, caplog):
    for number in range(505):
        api.upsert(f"e{number}", PLAIN, 1000 - number)
    redis.hset("redbeat:e7", "definition", "{")
    redis.hset("redbeat:e8", "policy", '{"jiter": 5}')
    redis.zadd(SCHEDULE, {"redbeat:e9": -1})
    redis.zadd(SCHEDULE, {"e504": 1})  # RedBeat's documentation puts in bare names, too
    redis.zrem(SCHEDULE, "redbeat:e504")
    for number in range(505):
        if number not in (7, 8, 9, 504):
            redis.zadd(SCHEDULE, {f"redbeat:e{number}": 10_000 - number})

    listed = [entry.name for entry in api.list()]

    assert listed == ["e9", "e504", *(f"e{number}" for number in reversed(range(504)) if number not in (7, 8, 9))]
    assert 'e7 is left out event=left_out entry=e7 reason="definition cannot be read' in caplog.text
    assert "policy: there is no 'jiter'; did you mean 'jitter'?" in caplog.text


# ---------------------------------------------------------------- save, upsert, delete


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"jiter": 5}, "there is no 'jiter'; did you mean 'jitter'?"),
        ({"jitter": -5}, "jitter must be a positive number of seconds, not -5"),
        ({"timezone": "Mars/Olympus"}, "timezone must be the IANA name"),
        ({"overlap": "raise"}, "overlap must be one of skip, "),
        ({"start_time": datetime(2026, 1, 1)}, "start_time must be a date and time with offset"),  # noqa: DTZ001
        ({"start_time": START, "end_time": START - HOUR}, "is before start_time"),
        ({"max_runs": 0}, "max_runs must be a whole number"),
        ({"paused": "yes"}, "paused must be true or false"),
        ({"expires": 5, "options": {"expires": 6}}, "expires is in its options as well as in its policy"),
    ],
)
def test_typos_and_contradictions_are_refused_and_nothing_is_written(api, redis, wishes, message):
    with pytest.raises(EntryError) as caught:
        api.upsert("e", PLAIN, 60, **wishes)

    assert message in str(caught.value)
    assert redis.dbsize() == 0


def test_an_unchanged_entry_is_not_written(api, redis):
    api.upsert("e", PLAIN, 60, jitter=5)
    redis.hset("redbeat:e", "meta", (past := Meta(START, 7).encode()))
    redis.zadd(SCHEDULE, {"redbeat:e": 12345})

    api.upsert("e", PLAIN, 60, jitter=5)

    assert redis.zscore(SCHEDULE, "redbeat:e") == 12345
    assert redis.hget("redbeat:e", "meta") == past


@pytest.mark.parametrize("change", [{"args": ["b"]}, {"note": "n"}, {"overlap": "allow_all"}, {"expires": 5}])
def test_a_change_that_is_not_of_its_times_keeps_the_next_time(api, redis, change):
    api.upsert("e", PLAIN, 60)
    redis.hset("redbeat:e", "meta", (past := Meta(START, 7).encode()))
    redis.zadd(SCHEDULE, {"redbeat:e": 12345})

    api.upsert("e", PLAIN, 60, **change)

    assert redis.zscore(SCHEDULE, "redbeat:e") == 12345
    assert redis.hget("redbeat:e", "meta") == past


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": 120},
        {"schedule": crontab(minute=5)},
        {"start_time": START + timedelta(hours=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_its_times_counts_from_now_and_keeps_the_last_run(api, redis, change):
    api.upsert("e", PLAIN, 60)
    last = START + timedelta(seconds=7)
    redis.hset("redbeat:e", "meta", Meta(last, 7).encode())
    before = datetime.now(UTC)

    api.upsert("e", PLAIN, change.pop("schedule", 60), **change)

    past = api.get("e").meta
    assert (past.last_run_at, past.total_run_count) == (last, 7)
    assert before <= past.since <= datetime.now(UTC)
    assert redis.zscore(SCHEDULE, "redbeat:e") >= before.timestamp()


@pytest.mark.parametrize(
    "change",
    [
        {"jitter": 30},
        {"timezone": "Asia/Tokyo"},
        {"start_time": START - timedelta(days=1)},
        {"end_time": datetime(2090, 1, 1, tzinfo=UTC)},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("by", ["upsert", "deploy"])
def test_a_change_that_keeps_the_next_time_keeps_a_run_that_is_due(bench, change, by):
    bench.put()
    if by == "upsert":
        bench.schedule.upsert("e", PLAIN, 3600, args=["e"], **change)
    else:
        bench.redis.hset("redbeat::owners", "e", bench.app.main)
        bench.redis.sadd("redbeat::statics", "e")
        given = {"task": PLAIN, "schedule": 3600, "args": ["e"], **change}
        bench.scheduler(beat_schedule={"e": given})

    bench.tick(at=datetime.now(UTC) + timedelta(minutes=5))  # after any jitter

    assert bench.names == ["e"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (crontab(minute="*/2"), crontab(minute="*")),
        (crontab(minute="*"), crontab(minute="*/2")),
        (crontab(minute="*/2"), crontab(minute="*/3")),
        (crontab(minute="*/2"), rrule("MINUTELY", dtstart=START)),
    ],
    ids=["more often", "less often", "in part", "of another kind"],
)
def test_a_change_keeps_a_run_that_is_due_before_and_after_it(bench, old, new):
    now = datetime.now(UTC)
    bench.put(every=old, ago=timedelta(minutes=8 + now.minute % 2, seconds=now.second, microseconds=now.microsecond))

    bench.schedule.upsert("e", PLAIN, new, args=["e"])
    bench.tick()

    assert bench.names == ["e"]


def test_a_change_keeps_an_overdue_run_before_one_that_jitter_delays(bench):
    """Of the times before and after the change, the last one is yet to come."""
    now = datetime.now(UTC)
    last = now.replace(minute=now.minute // 2 * 2, second=0, microsecond=0)

    def delays(name: str) -> bool:
        due = Timetable(name, crontab(minute="*/2"), EntryPolicy(jitter=119), UTC).due
        return due(last) > now + timedelta(seconds=2) and due(last - timedelta(minutes=2)) < now

    name = next((name for name in map(str, range(1000)) if delays(name)), "")
    if not name:
        pytest.skip("the last two seconds of two minutes")
    bench.put(name, every=crontab(minute="*/2"), jitter=119, last_run_at=last - timedelta(minutes=4))

    further = (last.minute - 3) % 60  # before that run, so that the next time is another one
    bench.schedule.upsert(name, PLAIN, crontab(minute=f"*/2,{further}"), args=[name], jitter=119)
    bench.tick()

    assert bench.names == [name]


@pytest.mark.parametrize(
    "change",
    [
        lambda api, when: api.upsert("e", PLAIN, when),
        lambda api, when: api.upsert("e", PLAIN, when) and api.resume("e"),
        lambda api, _: (api.pause("e"), api.resume("e")),
        lambda api, _: api.get("e").reschedule(),
        lambda api, _: api.delete("e") and api.revert("e", api.changes("e", 1)[0].id),
    ],
    ids=["saved", "saved and resumed", "resumed", "rescheduled", "reverted"],
)
def test_a_tool_in_another_zone_than_beat_stores_the_places_of_beat(bench, change):
    """Else a run would come hours late, or never."""
    beat, tool = (Schedule(bench.new_app(timezone=zone)) for zone in ("Asia/Tokyo", "UTC"))
    bench.redis.set("redbeat::zone", "Asia/Tokyo")
    hour = datetime.now(ZoneInfo("Asia/Tokyo")).hour  # nine hours later in UTC
    beat.upsert("e", PLAIN, crontab(minute=0, hour=(hour + 1) % 24))

    change(tool, crontab(minute=0, hour=(hour + 2) % 24))

    place = bench.redis.zscore("redbeat::schedule", "redbeat:e")
    assert place <= beat.next_runs("e", 1)[0].timestamp()
    assert tool.next_runs("e", 3) == beat.next_runs("e", 3)


@pytest.mark.parametrize("change", [{"jitter": 40_000}, {"schedule": "twice"}], ids=str)
def test_an_edit_by_a_tool_in_another_zone_keeps_a_run_that_is_due(bench, change):
    beat, tool = (Schedule(bench.new_app(timezone=zone)) for zone in ("Asia/Tokyo", "America/New_York"))
    bench.redis.set("redbeat::zone", "Asia/Tokyo")
    now = datetime.now(ZoneInfo("Asia/Tokyo")).replace(second=0, microsecond=0)
    daily, twice = (crontab(minute=now.minute, hour=hours) for hours in (now.hour, f"{now.hour},{(now.hour + 3) % 24}"))
    Entry("e", PLAIN, daily, app=beat.app, last_run_at=now - timedelta(days=1), total_run_count=7).save()

    given = {**change, "schedule": twice if "schedule" in change else daily}
    tool.upsert("e", PLAIN, given.pop("schedule"), **given)

    assert beat.next_runs("e", 1) == [now.astimezone(UTC)]


def test_a_backfill_by_a_tool_in_another_zone_runs_the_times_of_beat(bench):
    beat, tool = (Schedule(bench.new_app(timezone=zone)) for zone in ("UTC", "America/New_York"))
    bench.redis.set("redbeat::zone", "UTC")
    beat.upsert("e", PLAIN, crontab(minute=0, hour=9))
    end = datetime.now(UTC)

    runs = [each.backfill("e", end - timedelta(days=3), end, dry_run=True) for each in (beat, tool)]

    assert runs[0] == runs[1]
    assert {each.hour for each in runs[0]} == {9}


@pytest.mark.parametrize(
    ("zone", "own"),
    [("UTC", None), ("UTC", "Asia/Tokyo"), ("Asia/Tokyo", None)],
    ids=["rewritten in UTC", "the zone becomes the entry's", "nothing changes"],
)
@pytest.mark.parametrize("jitter", [None, 40_000])
@pytest.mark.parametrize("former", [ZoneInfo("Asia/Tokyo"), timezone(9 * HOUR)], ids=str)
def test_a_change_of_the_apps_zone_and_the_entry_keeps_a_run_that_is_due(bench, zone, own, jitter, former):
    now, given = datetime.now(UTC), {"args": ["e"], "jitter": jitter}
    nominal = now.replace(second=0, microsecond=0) - timedelta(minutes=30)

    def daily(zone: str) -> crontab:
        local = nominal.astimezone(ZoneInfo(zone))
        return crontab(minute=local.minute, hour=local.hour)

    before, after = bench.new_app(timezone=former), bench.new_app(timezone=zone)
    past = {"last_run_at": nominal - timedelta(days=1), "total_run_count": 7}
    Entry("e", PLAIN, daily("Asia/Tokyo"), app=before, **given, **past).save()
    bench.redis.set("redbeat::zone", str(former))

    Schedule(after).upsert("e", PLAIN, daily(own or zone), timezone=own, **given)
    scheduler = bench.scheduler(app=after)
    scheduler._tick(now + timedelta(hours=12), scheduler.lease.acquire())

    assert [message.nominal for message in bench.messages] == [nominal]


@pytest.mark.parametrize(
    ("new", "ahead"), [(crontab(minute="*/2"), HOUR / 9), (schedule(90), HOUR / 9), (schedule(90), 4 * HOUR)]
)
def test_a_change_after_the_clock_was_set_back_repeats_no_run(bench, new, ahead):
    now = datetime.now(UTC)
    bench.put(every=crontab(minute="*"), last_run_at=now + ahead)

    bench.schedule.upsert("e", PLAIN, new, args=["e"])

    counts_from = bench.schedule.get("e").meta.counts_from
    is_of_wrong_clock = ahead > 3 * HOUR
    assert (counts_from < now + timedelta(minutes=1)) is is_of_wrong_clock
    assert (bench.score() < (now + ahead).timestamp()) is is_of_wrong_clock


@pytest.mark.parametrize("was_sent", [False, True])
@pytest.mark.parametrize("change", ["upsert", "import", "revert", "resume", "reschedule"])
def test_a_change_before_a_beat_leads_knows_what_a_clock_ahead_has_sent(bench, change, was_sent):
    ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    bench.put(every=crontab(minute=0), last_run_at=ahead)
    if was_sent:
        bench.redis.hset("redbeat:e", "sent", repr(ahead.timestamp()))

    if change == "upsert":
        bench.schedule.upsert("e", PLAIN, crontab(minute=30), args=["e"])
    elif change == "import":
        entry = bench.schedule.get("e").letting_pass(datetime.now(UTC))
        entry.version = None
        bench.redis.delete("redbeat:e")
        bench.schedule.save(entry)
    elif change == "reschedule":
        bench.schedule.get("e").reschedule()
    elif change == "revert":
        bench.schedule.delete("e")
        bench.schedule.revert("e", bench.schedule.changes("e", 1)[0].id)
    else:
        bench.redis.hset("redbeat:e", mapping={"definition": "{}", "policy": '{"paused": true}'})  # unusable
        bench.schedule.resume("e")

    past = Meta.decode(*bench.redis.hmget("redbeat:e", "meta", "since"))
    assert past.counts_from < datetime.now(UTC) + timedelta(minutes=1)
    assert past.ahead == (ahead if was_sent else None)


@pytest.mark.parametrize("given", [{}, {"end_time": HOUR / 12}], ids=["once", "until an end"])
def test_a_change_to_times_that_end_before_the_clock_has_caught_up_runs(bench, given):
    """They cannot have been decided: a schedule that waits for the clock would never run."""
    now = datetime.now(UTC)
    bench.put(every=crontab(minute="*"), last_run_at=now + HOUR / 6)
    when = crontab(minute="*") if given else clocked(now + HOUR / 20)

    bench.schedule.upsert("e", PLAIN, when, args=["e"], **{name: now + after for name, after in given.items()})

    assert now.timestamp() < bench.score() < (now + HOUR / 12).timestamp()


def test_a_change_to_one_time_runs_although_beat_sees_it_late(bench):
    now = datetime.now(UTC)
    bench.put(every=crontab(minute="*"), last_run_at=now + HOUR / 60)

    bench.schedule.upsert("e", PLAIN, clocked(now + HOUR / 180), args=["e"])
    bench.tick(at=now + HOUR / 30)

    assert bench.names == ["e"]


@pytest.mark.parametrize("new", [crontab(minute="1-59/2"), schedule(1800), schedule(7200)], ids=repr)
def test_a_change_to_other_times_makes_up_for_none(bench, new):
    bench.put(every=crontab(minute="*/2"), ago=timedelta(minutes=10))

    bench.schedule.upsert("e", PLAIN, new, args=["e"])
    bench.tick()

    assert bench.names == []


@pytest.mark.parametrize("change", [{"max_runs": 8}, {"max_runs": None}, {"max_runs": 8, "jitter": 9}], ids=str)
def test_a_finished_entry_that_may_run_again_counts_from_now(bench, change):
    bench.put(max_runs=7)
    bench.tick()
    assert bench.score() < 0, "it has run seven times"

    bench.schedule.upsert("e", PLAIN, 3600, args=["e"], **change)
    bench.tick()

    assert bench.names == []
    assert bench.score() > datetime.now(UTC).timestamp() + 3000


def test_a_change_of_jitter_keeps_a_run_that_the_jitter_delays(bench):
    nominal = datetime.now(UTC).replace(microsecond=0)
    bench.put(ago=timedelta(hours=1, seconds=1), jitter=1800)
    assert bench.score() > nominal.timestamp(), "it is delayed"

    bench.schedule.upsert("e", PLAIN, 3600, args=["e"], jitter=1700)
    bench.tick(at=datetime.now(UTC) + timedelta(minutes=40))

    assert bench.names == ["e"]


BROKEN = {
    "JSON": "{",
    "crontab": '{"task": "t", "schedule": {"__type__": "crontab", "minute": "99"}}',
    "task": '{"schedule": 60}',
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_upsert_over_a_broken_definition_keeps_past_and_pause(api, redis, what):
    api.upsert("e", PLAIN, 60, misfire_grace_time=9)
    api.pause("e", "why")
    redis.hset("redbeat:e", mapping={"definition": BROKEN[what], "meta": Meta(START, 7).encode()})
    redis.zadd(SCHEDULE, {"redbeat:e": -1})

    api.upsert("e", PLAIN, 60)

    entry = api.get("e")
    assert (entry.meta.last_run_at, entry.meta.total_run_count) == (START, 7)
    assert (entry.policy.paused, entry.policy.note) == (True, "why")
    assert redis.zscore(SCHEDULE, "redbeat:e") > START.timestamp()


def test_an_upsert_over_an_invalid_rule_keeps_the_past(api, redis):
    """The rule can be read, and its times cannot be calculated."""
    api.upsert("e", PLAIN, rrule("DAILY", dtstart=START))
    definition = json.loads(redis.hget("redbeat:e", "definition"))
    definition["schedule"]["interval"] = 0
    redis.hset("redbeat:e", mapping={"definition": json.dumps(definition), "meta": Meta(START, 7).encode()})

    api.upsert("e", PLAIN, 60)

    assert (api.get("e").schedule, api.get("e").meta.total_run_count) == (schedule(60), 7)


@pytest.mark.parametrize("policy", ["{", '{"jiter": 5}'])
def test_an_upsert_over_a_broken_policy_keeps_the_past(api, redis, policy):
    api.upsert("e", PLAIN, 60)
    redis.hset("redbeat:e", mapping={"policy": policy, "meta": Meta(START, 7).encode()})

    api.upsert("e", PLAIN, 60)

    assert (api.get("e").meta.last_run_at, api.get("e").meta.total_run_count) == (START, 7)


@pytest.mark.parametrize("broken", [{"meta": "["}, {"meta": '{"last_run_at": "yesterday"}'}], ids=str)
def test_an_upsert_over_a_broken_past_keeps_the_pause(api, redis, broken):
    api.upsert("e", PLAIN, 60)
    api.pause("e", "why")
    redis.hset("redbeat:e", mapping=broken)

    api.upsert("e", PLAIN, 60)

    entry = api.get("e")
    assert (entry.policy.paused, entry.policy.note, entry.total_run_count) == (True, "why", 0)


def test_an_upsert_over_a_broken_count_since_a_change_keeps_the_past(api, redis):
    api.upsert("e", PLAIN, 60)
    redis.hset("redbeat:e", mapping={"since": "{", "meta": Meta(START, 7).encode()})

    api.upsert("e", PLAIN, 60)

    assert (api.get("e").meta.last_run_at, api.get("e").meta.total_run_count) == (START, 7)


def test_a_conflicting_edit_of_an_entry_is_refused(api):
    api.upsert("e", PLAIN, 60)
    mine, theirs = api.get("e"), api.get("e")
    theirs.args = ["theirs"]
    api.save(theirs)
    mine.args = ["mine"]

    with pytest.raises(ConflictError, match="'e' was changed since it was read: read it again"):
        api.save(mine)

    assert api.get("e").args == ["theirs"]


def test_a_pause_meanwhile_is_an_edit_too(api):
    api.upsert("e", PLAIN, 60)
    mine = api.get("e")
    api.pause("e")
    mine.args = ["mine"]

    with pytest.raises(ConflictError):
        api.save(mine)


def test_of_many_edits_at_once_all_are_done_or_refused(api):
    """Each adds its number to the arguments that it has read: none of those that were stored may be lost."""
    api.upsert("e", PLAIN, 60)
    stored = list[int]()

    def edit(number: int) -> None:
        for attempt in range(20):
            entry = api.get("e")
            entry.args = [*entry.args, number * 100 + attempt]
            try:
                api.save(entry)
            except ConflictError:
                continue
            stored.append(number * 100 + attempt)

    at_once(*[partial(edit, number) for number in range(3)])

    assert sorted(api.get("e").args) == sorted(stored)
    assert stored


def test_of_equal_edits_at_once_each_that_is_done_counts(api):
    api.upsert("e", PLAIN, 60, kwargs={"n": 0})

    def add() -> int:
        done = 0
        for _ in range(20):
            entry = api.get("e")
            entry.kwargs = {"n": entry.kwargs["n"] + 1}
            with suppress(ConflictError):
                api.save(entry)
                done += 1
        return done

    assert sum(at_once(*[add] * 4)) == api.get("e").kwargs["n"]


def test_a_deleted_entry_leaves_only_the_record_of_it_behind(api, redis):
    api.upsert("e", PLAIN, 60)
    api.trigger("e")

    assert api.delete("e") is True
    assert api.delete("e") is False
    assert redis.keys() == [CHANGES]


def test_a_broken_entry_can_be_deleted(api, redis):
    redis.hset("redbeat:e", "definition", "{")
    redis.zadd(SCHEDULE, {"redbeat:e": 0})

    assert api.delete("e") is True
    assert redis.keys() == [CHANGES]


#: Names whose keys are the schedule's own; the last one is the lock that a setting has named.
OWN = [
    *(":schedule", ":statics", ":owners", ":pending", ":quarantine", ":history", ":runs", ":pauses", ":changes"),
    *(":leader", ":term", ":standbys", ":resigned", ":lock", "my lock"),
]


@pytest.mark.parametrize("name", OWN)
def test_a_name_whose_key_is_the_schedules_own_is_refused(server, redis, name):
    with make_app(server.celery_url, {"redbeat_lock_key": "my lock"}) as app:
        api, key = Schedule(app), f"redbeat:{name}"
        entry = Entry(name, PLAIN, schedule(60), app=app)
        if key == SCHEDULE:
            redis.zadd(key, {"redbeat:e": -1})
        else:  # as a hash, it may even look like an entry
            redis.hset(key, mapping={"definition": Entry("e", PLAIN, schedule(60), app=app).encode(), "mine": "kept"})
        before = redis.dump(key)

        for attempt in (
            lambda: api.upsert(name, PLAIN, 60),
            entry.save,
            entry.delete,
            entry.reschedule,
            lambda: next(entry),
            lambda: api.delete(name),
            lambda: api.pause(name),
            lambda: api.resume(name),
            lambda: api.trigger(name),
            lambda: api.backfill(name, START, END),
            lambda: api._propose(name, Occurrence("id", 0.0), 0.0),
        ):
            with pytest.raises(EntryError, match=f"'{re.escape(key)}' is a key of the schedule itself"):
                attempt()

        assert redis.keys() == [key]
        assert redis.dump(key) == before


def test_such_names_in_beat_schedule_harm_no_other(bench, redis, caplog):
    each = {"task": PLAIN, "schedule": 60}

    bench.scheduler(beat_schedule={**dict.fromkeys(OWN[:-1], each), "good": each}).tick()

    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:good"]
    assert redis.smembers("redbeat::statics") == {"good"}
    assert caplog.text.count("is a key of the schedule itself") == len(OWN) - 1
    assert not redis.exists(HISTORY, QUARANTINE)


def test_such_names_among_those_of_the_statics_cost_no_data(bench, redis):
    redis.sadd("redbeat::statics", *OWN)
    redis.xadd(HISTORY, {"entry": "e"})
    redis.zadd(SCHEDULE, {"redbeat:e": -1})

    bench.scheduler(beat_schedule={"good": {"task": PLAIN, "schedule": 60}}).tick()

    assert redis.smembers("redbeat::statics") == {"good"}
    assert redis.xlen(HISTORY) == 1
    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:e", "redbeat:good"]


# ---------------------------------------------------------------- pause, resume


def test_a_pause_changes_the_policy_alone(api, redis):
    strange = json.dumps({"task": PLAIN, "schedule": 60, "unknown": "kept"})
    meta = Meta(START, 7).encode()
    redis.hset("redbeat:e", mapping={"definition": strange, "meta": meta, "policy": '{"jitter": 5}', "mine": "kept"})
    redis.zadd(SCHEDULE, {"redbeat:e": 12345})

    api.pause("e", "until Monday")

    stored = redis.hgetall("redbeat:e")
    assert stored.pop("recorded")
    assert stored.pop("written")
    assert stored == {
        "definition": strange,
        "meta": meta,
        "policy": json.dumps({"jitter": 5.0, "paused": True, "note": "until Monday"}),
        "mine": "kept",
    }
    assert redis.zscore(SCHEDULE, "redbeat:e") == 12345

    api.resume("e")

    assert json.loads(redis.hget("redbeat:e", "policy")) == {"jitter": 5.0}


def test_a_pause_without_a_note_leaves_the_note(api):
    api.upsert("e", PLAIN, 60, note="ask Ann")

    api.pause("e")

    assert api.get("e").policy == EntryPolicy(paused=True, note="ask Ann")


def test_an_upsert_leaves_a_paused_entry_paused(api):
    api.upsert("e", PLAIN, 60)
    api.pause("e", "why")

    api.upsert("e", PLAIN, 120)

    assert api.get("e").policy == EntryPolicy(paused=True, note="why")


def test_a_pause_amid_claims_loses_neither(api, redis):
    api.upsert("e", PLAIN, 60)
    over = threading.Event()

    def claim_and_claim() -> None:
        """Write its past over and over, as a beat does."""
        count = 0
        with redis.pipeline() as pipe:
            while not over.is_set():
                count += 1
                pipe.hset("redbeat:e", "meta", Meta(START, count).encode()).execute()

    thread = threading.Thread(target=claim_and_claim)
    thread.start()
    try:
        for number in range(50):
            api.pause("e", f"note {number}")
            assert api.get("e").policy.note == f"note {number}"
            api.resume("e")
    finally:
        over.set()
        thread.join()
    assert api.get("e").policy == EntryPolicy()
    assert api.get("e").total_run_count > 0


# ---------------------------------------------------------------- the next runs


def test_the_next_runs_of_an_interval_stay_on_its_grid(api, redis):
    last = datetime.now(UTC) - 0.5 * HOUR
    Entry("e", PLAIN, schedule(HOUR), app=api.app, last_run_at=last).save()

    assert api.next_runs("e", 3) == [last + HOUR, last + 2 * HOUR, last + 3 * HOUR]
    assert api.next_runs("e", 2, after=last + 100.5 * HOUR) == [last + 101 * HOUR, last + 102 * HOUR]
    assert api.next_runs("e", 1, after=last + HOUR) == [last + 2 * HOUR]
    assert api.next_runs("e", 0) == []


def test_no_further_run_is_calculated_after_the_time_that_is_given(api):
    Entry("e", PLAIN, schedule(1), app=api.app).save()

    assert len(api.next_runs("e", 10**12, within=0)) == 1
    assert len(api.next_runs("e", 3, within=60)) == 3


def test_a_search_for_later_runs_ends_in_time_and_hides_none(api):
    """With ``max_runs``, each run before that moment is counted."""
    now = datetime.now(UTC)
    Entry("e", PLAIN, crontab(), app=api.app, last_run_at=now, max_runs=10**9).save()

    with pytest.raises(EntryError, match=r"entry 'e': its times up to 9999-01-01 .* not calculated within 0.2 s"):
        api.next_runs("e", 1, after=datetime(9999, 1, 1, tzinfo=UTC), within=0.2)
    assert len(api.next_runs("e", 1, after=now + HOUR, within=60)) == 1


def test_the_latest_overdue_run_comes_first_and_stands_for_all_missed(api):
    last = datetime.now(UTC) - 2.5 * HOUR
    Entry("e", PLAIN, schedule(HOUR), app=api.app, last_run_at=last).save()

    assert api.next_runs("e", 2) == [last + 2 * HOUR, last + 3 * HOUR]
    assert api.next_runs("e", 1, after=datetime.now(UTC)) == [last + 3 * HOUR]


def test_an_entry_that_has_never_run_is_due_now(api, redis):
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "schedule": 60}))
    before = datetime.now(UTC)

    first, second = api.next_runs("e", 2)

    assert before <= first <= datetime.now(UTC)
    assert second == first + timedelta(seconds=60)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (datetime(2030, 1, 1), "after needs a time zone"),  # noqa: DTZ001 - that is wrong with it
        (datetime.fromisoformat("9999-12-31T23:59:59-14:00"), "after lies outside of the years 1 to 9999"),
    ],
)
def test_a_moment_that_is_none_is_not_blamed_on_the_entry(api, after, why):
    api.upsert("e", PLAIN, 60)

    with pytest.raises(EntryError, match=f"^{why}"):
        api.next_runs("e", 1, after=after)


def test_the_next_runs_end_with_the_entry(api):
    last = datetime.now(UTC)
    Entry("n", PLAIN, schedule(60), app=api.app, last_run_at=last, total_run_count=3, max_runs=5).save()
    Entry("t", PLAIN, schedule(60), app=api.app, last_run_at=last, end_time=last + timedelta(seconds=150)).save()
    Entry("over", PLAIN, schedule(60), app=api.app, last_run_at=last, total_run_count=5, max_runs=5).save()

    assert [len(api.next_runs(name, 10)) for name in ("n", "t", "over")] == [2, 2, 0]
    assert api.next_runs("n", 10, after=last + timedelta(seconds=90)) == [last + timedelta(seconds=120)]


def test_the_next_runs_of_a_busy_entry_in_a_year_are_known_at_once(api):
    last = datetime.now(UTC)
    Entry("e", PLAIN, schedule(0.001), app=api.app, last_run_at=last).save()

    assert api.next_runs("e", 1, after=last + timedelta(days=3650)) == [last + timedelta(days=3650, milliseconds=1)]


# ---------------------------------------------------------------- trigger


@pytest.mark.parametrize("state", ["active", "paused", "disabled", "finished"])
def test_a_trigger_runs_an_entry_of_any_state_once_and_keeps_its_times(api, bench, redis, state):
    wishes = {"paused": {"paused": True}, "disabled": {"enabled": False}, "finished": {"max_runs": 7}}.get(state, {})
    last = datetime.now(UTC)
    Entry("e", PLAIN, schedule(HOUR), ["a"], app=api.app, last_run_at=last, total_run_count=7, **wishes).save()
    if state == "finished":
        redis.zadd(SCHEDULE, {"redbeat:e": -1})
    score, meta = bench.score(), redis.hget("redbeat:e", "meta")

    task_id = api.trigger("e")
    bench.tick(3)

    assert bench.ids == [task_id]
    assert decided(bench) == [("manual", "dispatched")]
    (message,) = bench.messages
    header = message.run
    assert (header["entry"], header["occurrence"], header["kind"]) == ("e", task_id, "manual")
    assert datetime.fromisoformat(header["previous"]) == last.replace(microsecond=last.microsecond // 1000 * 1000)
    assert (bench.score(), redis.hget("redbeat:e", "meta")) == (score, meta)
    assert not redis.exists(PENDING)


def test_triggers_wait_for_one_another(api, bench, ticking):
    api.upsert("e", PLAIN, 3600, args=["a"], overlap="allow_all")

    task_ids = [api.trigger("e", timeout=30) for _ in range(3)]

    wait_until(lambda: len(bench.ids) == 3, what="three messages")
    assert bench.ids == task_ids
    assert len(set(task_ids)) == 3


def test_triggers_at_once_are_each_a_run(api, bench, ticking):
    api.upsert("e", PLAIN, 3600, args=["a"], overlap="allow_all")

    triggered = at_once(*[lambda: api.trigger("e", timeout=30)] * 5)

    wait_until(lambda: len(bench.ids) == 5, what="five messages")
    assert sorted(bench.ids) == sorted(triggered)


def test_a_trigger_without_a_beat_waits_for_one_and_a_second_says_so(api, bench):
    api.upsert("e", PLAIN, 3600, args=["a"])
    first = api.trigger("e")

    with pytest.raises(ConflictError, match="'e' has an occurrence that was not sent within 0 s; for the reason: "):
        api.trigger("e", timeout=0)
    bench.tick()

    assert bench.ids == [first]


def test_a_trigger_takes_the_entrys_lock(api, bench):
    api.upsert("e", "tests.system.apps.single", 3600, args=["a"])
    api.trigger("e")
    bench.tick()
    api.trigger("e")
    bench.tick()

    assert len(bench.ids) == 1
    assert decided(bench) == [("manual", "dispatched"), ("manual", "skipped_overlap")]


def test_a_trigger_whose_reply_was_lost_is_one_run(api, bench):
    api.upsert("e", PLAIN, 3600, args=["a"])
    occurrence = Occurrence("the-id", 1.0, kind=Kind.MANUAL)
    for _ in range(2):
        api._propose("e", occurrence, 0.0)
    bench.tick()

    assert bench.ids == ["the-id"]


def test_a_pending_occurrence_is_sent_once_its_broken_entry_is_fixed(api, bench, redis):
    api.upsert("e", PLAIN, 3600, args=["a"])
    task_id = api.trigger("e")
    good = redis.hget("redbeat:e", "definition")
    redis.hset("redbeat:e", "definition", "{")
    bench.tick()
    assert redis.hexists(QUARANTINE, "redbeat:e")
    redis.hset("redbeat:e", "definition", good)
    bench.tick(3)

    assert bench.ids == [task_id]


# ---------------------------------------------------------------- backfill


HOURS = [START + n * HOUR for n in range(1, 6)]
END = HOURS[-1]


@pytest.fixture
def hourly(api: Schedule) -> Callable[..., Entry]:
    def hourly(**wishes: Any) -> Entry:
        return api.upsert("e", PLAIN, crontab(minute=0), args=["a"], **{"overlap": "allow_all", **wishes})

    return hourly


def times(occurrences: Any) -> list[datetime]:
    return [datetime.fromtimestamp(occurrence.nominal, UTC) for occurrence in occurrences]


def backfilled(at: datetime, run: str = "") -> Occurrence:
    return Occurrence.of("redbeat:", "e", at, previous=None, kind=Kind.BACKFILL, run=run)


def test_a_backfill_runs_every_time_after_its_start_up_to_its_end_in_order(api, bench, redis, hourly, ticking):
    hourly()
    score, meta = bench.score(), redis.hget("redbeat:e", "meta")

    done = api.backfill("e", START, END)

    assert times(done) == HOURS
    wait_until(lambda: len(bench.ids) == 5, what="five messages")
    assert bench.ids == [occurrence.id for occurrence in done]
    assert [message.nominal for message in bench.messages] == HOURS
    assert [datetime.fromisoformat(message.run["previous"]) for message in bench.messages] == [START, *HOURS[:-1]]
    wait_until(lambda: decided(bench) == [("backfill", "dispatched")] * 5, what="five decisions")
    assert (bench.score(), redis.hget("redbeat:e", "meta")) == (score, meta)
    assert not redis.hexists("redbeat:e", "backfill")


def test_a_dry_run_writes_nothing_and_returns_the_same(api, redis, hourly, ticking):
    hourly()
    before = redis.hgetall("redbeat:e")

    planned = api.backfill("e", START, END, dry_run=True)

    assert redis.hgetall("redbeat:e") == before
    assert planned == times(api.backfill("e", START, END)) == HOURS


def test_a_backfill_keeps_to_the_bounds_of_the_policy(api, hourly):
    hourly(start_time=HOURS[1], end_time=HOURS[3], max_runs=1)

    assert api.backfill("e", START, END, dry_run=True) == HOURS[1:4]


def test_an_interval_is_backfilled_from_the_start(api):
    api.upsert("e", PLAIN, 3600, args=["a"])

    assert api.backfill("e", START, END, dry_run=True) == HOURS


def test_a_backfill_of_too_many_runs_is_refused_before_the_first(api, redis, hourly):
    hourly()
    with pytest.raises(EntryError, match=r"backfill of 'e': 5 runs are more than the limit of 4"):
        api.backfill("e", START, END, limit=4)
    api.upsert("often", PLAIN, 0.001)
    with pytest.raises(EntryError, match=r"more than 10000 runs are more than the limit of 1000"):
        api.backfill("often", START, END)

    assert not redis.exists(PENDING)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_backfill_for_times_that_have_not_come_is_refused(api, redis, hourly, dry_run):
    """Its runs would be sent now, and those of the schedule at their times."""
    hourly()
    last, first, _ = coming = api.next_runs("e", 3)  # ``last`` may pass meanwhile
    with pytest.raises(EntryError, match=f"'e': {first:%Y-%m-%d %H:%M:%S}.* has not come yet: choose an earlier end"):
        api.backfill("e", last, coming[2], dry_run=dry_run)

    assert not redis.exists(PENDING)
    assert len(api.backfill("e", last - 3 * HOUR, last - HOUR / 60, dry_run=True)) == 2


def test_a_backfill_whose_times_take_too_long_is_refused_before_the_first(api, redis, hourly):
    hourly()
    with pytest.raises(EntryError, match=r"backfill of 'e': its times were not calculated within 0 s"):
        api.backfill("e", START, END, within=0)

    assert not redis.exists(PENDING)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (START, START - HOUR, "is before its start"),
        (START.replace(tzinfo=None), END, "start needs a time zone"),
        (START, END.replace(tzinfo=None), "end needs a time zone"),
    ],
)
def test_a_span_that_is_none_is_refused(api, hourly, start, end, message):
    hourly()
    with pytest.raises(EntryError, match=message):
        api.backfill("e", start, end)


def test_an_overlap_that_is_none_is_refused(api, hourly):
    hourly()
    with pytest.raises(EntryError, match="overlap must be one of"):
        api.backfill("e", START, END, overlap="sometimes")


def test_an_interrupted_backfill_goes_on_where_it_was(api, bench, redis, hourly):
    hourly()
    with pytest.raises(ConflictError, match="was not sent within 0 s"):  # no beat ticks: it gets to the first one
        api.backfill("e", START, END, timeout=0)
    assert json.loads(redis.hget("redbeat:e", "backfill"))["at"] == HOURS[0].isoformat()
    bench.tick()
    with pytest.raises(ConflictError, match="was not sent within 0 s"):
        api.backfill("e", START, END, timeout=0)
    bench.tick()

    assert api.backfill("e", START, END, dry_run=True) == HOURS[2:]
    with pytest.raises(ConflictError, match="an unfinished backfill from 2026-03-01 00:00"):
        api.backfill("e", START, END + HOUR)
    for _ in HOURS[2:4]:
        with pytest.raises(ConflictError, match="was not sent within 0 s"):
            api.backfill("e", START, END, timeout=0)
        bench.tick()
    assert times(api.backfill("e", START, END, timeout=0)) == HOURS[4:]
    bench.tick()

    assert [message.nominal for message in bench.messages] == HOURS
    assert not redis.hexists("redbeat:e", "backfill")


@pytest.mark.parametrize("task", [PLAIN, "tests.system.apps.single"])
def test_a_second_backfill_of_the_same_times_runs_them_once_more(api, bench, hourly, ticking, task):
    """As after a fix of what made the first one fail."""
    hourly()
    backend = backend_of(api.app)
    backend.announce("w@h", ttl=60)
    api.upsert("e", task, crontab(minute=0), args=["a"])
    done = []
    for number in (5, 10):
        done += api.backfill("e", START, END, overlap="buffer_all")
        wait_until(lambda number=number: len(decided(bench)) == number, what="the decisions")
        for key, record in backend.locks("SINGLETONLOCK_"):  # as their workers end them
            runs = [Ref(key, occurrence.id, nonce="n") for occurrence in done]
            backend.begin(Ref(key, record["id"], nonce="n"), lease=60, remember_for=60, task=task, arguments="")
            backend.finish_many(runs, remember_for=60, ran=True)

    assert bench.ids == [occurrence.id for occurrence in done]
    assert len(set(bench.ids)) == 10
    assert times(done) == HOURS * 2


def test_an_interrupted_backfill_goes_on_under_the_same_ids(api, bench, redis, hourly):
    hourly()
    with pytest.raises(ConflictError, match="was not sent within 0 s"):
        api.backfill("e", START, END, timeout=0)
    run = json.loads(redis.hget("redbeat:e", "backfill"))["run"]
    for _ in HOURS[1:-1]:
        bench.tick()
        with pytest.raises(ConflictError, match="was not sent within 0 s"):
            api.backfill("e", START, END, timeout=0)
    bench.tick()
    api.backfill("e", START, END, timeout=0)
    bench.tick()

    assert bench.ids == [backfilled(at, run).id for at in HOURS]


def test_a_backfill_that_is_interrupted_at_its_very_end_runs_nothing_twice(api, bench, redis, hourly, monkeypatch):
    hourly()
    api.backfill("e", START, HOURS[0])
    bench.tick()
    propose = api._propose

    def interrupted(name: str, occurrence: Occurrence | None, *args: Any, **kwargs: Any) -> None:
        if occurrence is None:
            raise KeyboardInterrupt
        propose(name, occurrence, *args, **kwargs)

    monkeypatch.setattr(api, "_propose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.backfill("e", HOURS[0], HOURS[1])
    monkeypatch.undo()
    bench.tick()

    assert api.backfill("e", HOURS[0], HOURS[1]) == []
    assert len(bench.ids) == 2
    assert not redis.hexists("redbeat:e", "backfill")


def test_a_backfill_that_an_older_singlebeat_has_begun_goes_on(api, redis, hourly, ticking):
    hourly()
    redis.hset("redbeat:e", "backfill", json.dumps({"start": str(START), "end": str(END), "at": str(HOURS[2])}))

    done = api.backfill("e", START, END)

    assert times(done) == HOURS[3:]
    expected = Occurrence.of("redbeat:", "e", HOURS[3], kind=Kind.BACKFILL)
    assert done[0].id == expected.id


def test_a_trigger_recovers_an_occurrence_lost_from_the_pending_set(api, bench, redis):
    api.upsert("e", PLAIN, 3600, args=["a"])
    lost = api.trigger("e")
    redis.delete(PENDING)
    with pytest.raises(ConflictError):
        api.trigger("e", timeout=0)
    bench.tick()

    assert bench.ids == [lost]


def test_two_equal_backfills_at_once_run_nothing_twice(api, bench, redis, hourly, ticking):
    hourly()

    def backfill() -> object:
        try:
            return api.backfill("e", START, END, timeout=30)
        except ConflictError as exc:
            return exc

    outcomes = at_once(backfill, backfill)
    if len([one for one in outcomes if isinstance(one, ConflictError)]) == 2:
        pytest.fail(f"neither went on: {outcomes}")
    wait_until(lambda: not redis.exists(PENDING), what="the last confirmation")

    nominals = [message.run["nominal"] for message in bench.messages]
    assert set(map(datetime.fromisoformat, nominals)) == set(HOURS)
    if any(isinstance(one, ConflictError) for one in outcomes):  # else the one began when the other had ended
        assert all(before < after for before, after in pairwise(nominals))


def test_a_backfill_that_another_call_has_continued_stops(api, bench, redis, hourly):
    hourly()
    with pytest.raises(ConflictError, match="was not sent within 0 s"):
        api.backfill("e", START, END, timeout=0)
    bench.tick()
    before = redis.hgetall("redbeat:e")

    with pytest.raises(ConflictError, match="'e': its backfill was cancelled, or another call goes on with it"):
        api._propose("e", backfilled(HOURS[0]), 1.0, found="", at="mine")

    assert redis.hgetall("redbeat:e") == before
    assert not redis.exists(PENDING)


def test_a_trigger_amid_a_backfill_leaves_its_place(api, bench, redis, hourly):
    hourly()
    with pytest.raises(ConflictError):
        api.backfill("e", START, END, timeout=0)
    bench.tick()
    at = redis.hget("redbeat:e", "backfill")

    api.trigger("e")

    assert redis.hget("redbeat:e", "backfill") == at


def test_a_place_that_cannot_be_read_says_how_to_give_it_up(api, redis, hourly):
    hourly()
    redis.hset("redbeat:e", "backfill", '{"start": 7}')

    with pytest.raises(EntryError, match="HDEL redbeat:e backfill"):
        api.backfill("e", START, END)


def test_an_entry_that_is_deleted_amid_its_backfill_does_not_come_back(api, redis, hourly):
    hourly()
    api.delete("e")

    with pytest.raises(UnknownEntryError):
        api._propose("e", backfilled(HOURS[0]), 1.0)
    assert redis.keys() == [CHANGES]
