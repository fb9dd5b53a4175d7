"""Values that RedBeat cannot store, through real data and ticks: by Entry, by Schedule, and by beat_schedule."""

from __future__ import annotations

import json
import sys
from asyncio import CancelledError
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from itertools import count
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from dateutil.rrule import MO
from kombu import Exchange, Queue
from redbeat.schedules import rrule

from singlebeat import Entry, Schedule, clocked
from singlebeat.beat.entries.definition import Meta
from singlebeat.beat.store import quarantine
from singlebeat.errors import ConflictError, EntryError
from singlebeat.locks import backend_of
from tests.support import wait_until
from tests.system.apps import make_app

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
SCHEDULE, QUARANTINE = "redbeat::schedule", "redbeat::quarantine"
SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
NEW_YORK, BERLIN = ZoneInfo("America/New_York"), ZoneInfo("Europe/Berlin")


class OnceAnHour(BaseSchedule):  # type: ignore[misc]
    """A user's own schedule, with something that JSON cannot hold."""

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.wanted = wanted

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = (last_run_at + HOUR - self.now()).total_seconds()
        return schedstate(is_due=left <= 0 and self.wanted(), next=left if left > 0 else 3600)


class Asked(schedule):  # type: ignore[misc]
    """An interval in name only: Celery allows that it has none."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = (last_run_at + HOUR - self.now()).total_seconds()
        return schedstate(is_due=left <= 0, next=left if left > 0 else 3600)


class Estimated(Asked):
    """Knows by itself how long it has to wait."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return last_run_at + HOUR - self.now()


class Every(BaseSchedule):  # type: ignore[misc]
    """A user's own schedule with a parameter, which Redis does not know."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self.hours = hours

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = (last_run_at + self.hours * HOUR - self.now()).total_seconds()
        return schedstate(is_due=left <= 0, next=left if left > 0 else self.hours * 3600)


@pytest.mark.parametrize(("hours", "place"), [(9, 8 * HOUR), (3, 2 * HOUR), (20, 19 * HOUR), (1, HOUR)])
def test_a_deploy_that_changes_an_own_class_moves_the_place(bench, redis, hours, place):
    """From nine hours; the last run was an hour ago."""

    def deploy(hours: int) -> None:
        beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "schedule": Every(hours)}})
        beat.tick()
        beat.close()

    deploy(9)
    past = datetime.now(UTC) - HOUR
    redis.hset("redbeat:e", "meta", Meta(past, 1).encode())
    redis.hdel("redbeat:e", "since")
    redis.zadd(SCHEDULE, {"redbeat:e": (past + 9 * HOUR).timestamp()})

    deploy(hours)

    assert abs(bench.score() - (datetime.now(UTC) + place).timestamp()) < 30
    assert bench.messages == []


KINDS = {
    "clocked": clocked(datetime(2040, 1, 1, tzinfo=UTC)),
    "solar": solar("sunset", 52.5, 13.4),
    "sets in a crontab": crontab(minute={0, 30}, hour=range(3), day_of_week=frozenset({1, 2})),
    "first Monday": rrule("MONTHLY", dtstart=datetime(2026, 1, 1, 9, tzinfo=NEW_YORK), byweekday=MO(1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["Entry", "Schedule", "beat_schedule"])
def test_every_kind_of_schedule_is_kept_with_all_its_times(app, bench, redis, kind, by):
    when = KINDS[kind]
    if by == "Entry":
        Entry("e", PLAIN, when, app=app).save()
    elif by == "Schedule":
        Schedule(app).upsert("e", PLAIN, when)
    else:
        bench.scheduler(beat_schedule={"e": {"task": PLAIN, "schedule": when}}).tick()

    wanted = Entry("e", PLAIN, when, app=app)
    first = wanted.timetable.next(datetime.now(UTC))
    times = [first]
    while len(times) < 15 and times[-1] is not None:
        times.append(wanted.timetable.next(times[-1]))
    assert [*Schedule(app).next_runs("e", 15)] == [moment for moment in times if moment is not None]
    assert bench.score() == first.timestamp()
    assert not redis.exists(QUARANTINE)


@pytest.mark.parametrize("option", ["expires", "countdown"])
def test_a_timedelta_in_options_is_sent_as_seconds(app, bench, option):
    Schedule(app).upsert("e", PLAIN, 3600, args=["e"], options={option: timedelta(minutes=5), "queue": "celery"})
    bench.make_due()

    bench.scheduler().tick()

    moment = datetime.fromisoformat(bench.messages[0].headers[{"countdown": "eta"}.get(option, option)])
    assert timedelta(minutes=4) < moment - datetime.now(UTC) <= timedelta(minutes=5)
    assert Schedule(app).get("e").options == {option: 300.0, "queue": "celery"}


def test_a_one_off_runs_once_and_stays(app, bench):
    instant = datetime.now(UTC).replace(microsecond=0) - HOUR
    Entry("e", PLAIN, clocked(instant), args=["e"], last_run_at=instant - DAY, app=app).save()
    beat = bench.scheduler()

    beat.tick()
    beat.tick()

    assert [message.nominal for message in bench.messages] == [instant]
    assert bench.score() == -1
    assert Schedule(app).get("e").total_run_count == 1


@pytest.mark.parametrize("score", [0, 1])
def test_a_one_off_written_by_hand_waits_for_its_instant(app, bench, redis, score):
    instant = datetime.now(UTC).replace(microsecond=0) + HOUR
    raw = {"__type__": "clocked", "instant": instant.isoformat()}
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "args": ["e"], "schedule": raw}))
    redis.zadd(SCHEDULE, {"redbeat:e": score})

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() == instant.timestamp()
    assert list(Schedule(app).next_runs("e", 5)) == [instant]
    assert Schedule(app).get("e").due_at == instant


def test_a_new_entry_for_an_instant_that_has_passed_never_runs(app, bench):
    Schedule(app).upsert("e", PLAIN, clocked(datetime.now(UTC) - SECOND))

    bench.scheduler().tick()

    assert bench.messages == []
    assert bench.score() == -1


# ---------------------------------------------------------------- what only beat_schedule can give


def test_a_schedule_of_ones_own_runs_from_beat_schedule(bench, app):
    when = OnceAnHour()
    beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "args": ["e"], "schedule": when}})
    beat.tick()
    assert 3590 < bench.score() - datetime.now(UTC).timestamp() <= 3600

    bench.make_due()
    beat.tick()
    beat.tick()

    assert [message.args for message in bench.messages] == [["e"]]
    assert Schedule(beat.app).get("e").schedule is when
    assert Schedule(beat.app).get("e").save().schedule is when
    with pytest.raises(EntryError, match=r"a .+\.OnceAnHour, which the beat_schedule of this app must give"):
        Schedule(app).get("e")


@pytest.mark.parametrize("every", [None, 0, -1])
@pytest.mark.parametrize("kind", [Asked, Estimated])
def test_a_schedule_that_is_asked_for_its_times_needs_no_interval(bench, redis, kind, every):
    beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "args": ["e"], "schedule": kind(every)}})
    beat.tick()
    assert 3590 < bench.score() - datetime.now(UTC).timestamp() <= 3600

    bench.make_due()
    beat.tick()

    assert [message.args for message in bench.messages] == [["e"]]
    assert not redis.exists(QUARANTINE)


def test_a_schedule_that_raises_when_read_harms_no_other_entry(bench, redis):
    when = Asked(60)
    beat = bench.scheduler(
        beat_schedule={
            "e": {"task": PLAIN, "args": ["e"], "schedule": when},
            "f": {"task": PLAIN, "args": ["f"], "schedule": 3600},
        }
    )
    beat.tick()
    when.nowfun = lambda: 1 // 0
    bench.make_due()
    bench.make_due("f")

    beat.tick()

    assert [message.args for message in bench.messages] == [["f"]]
    assert "ZeroDivisionError" in redis.hget(QUARANTINE, "redbeat:e")
    when.nowfun = None
    beat.tick()
    beat.tick()
    assert [message.args for message in bench.messages] == [["f"], ["e"]]


@pytest.mark.parametrize("every", [None, 0, -1])
def test_an_interval_that_is_none_sets_its_entry_aside(bench, redis, every):
    beat = bench.scheduler(beat_schedule={"f": {"task": PLAIN, "args": ["f"], "schedule": 3600}})
    beat.tick()
    raw = {"__type__": "interval", "every": every, "relative": False}
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "args": ["e"], "schedule": raw}))
    redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.make_due("f")

    beat.tick()

    assert [message.args for message in bench.messages] == [["f"]]
    assert redis.hexists(QUARANTINE, "redbeat:e")


def test_a_schedule_of_ones_own_can_only_come_from_beat_schedule(app, redis):
    with pytest.raises(EntryError, match=r"entry 'e' cannot be stored: only beat_schedule can give <.*OnceAnHour"):
        Entry("e", PLAIN, OnceAnHour(), app=app).save()
    assert not redis.exists("redbeat:e")


def test_a_beat_with_the_schedule_recovers_an_entry_quarantined_without(bench, redis):
    first = bench.scheduler(
        beat_schedule={
            "e": {"task": PLAIN, "args": ["e"], "schedule": OnceAnHour()},
            "f": {"task": PLAIN, "schedule": 60},
        }
    )
    first.tick()
    bench.make_due()
    first.close()
    poor = bench.scheduler()
    poor.app.main = "another"  # whose statics are not ours to remove
    poor.tick()
    assert "OnceAnHour" in redis.hget(QUARANTINE, "redbeat:e")
    poor.close()

    rich = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "args": ["e"], "schedule": OnceAnHour()}})
    rich.tick()
    rich.tick()

    assert not redis.exists(QUARANTINE)
    assert [message.args for message in bench.messages] == [["e"]]


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_a_lazy_argument_is_computed_by_beat_for_each_run(bench, redis, task):
    numbers = count()
    lazy = BeatLazyFunc(lambda: next(numbers))
    beat = bench.scheduler(
        beat_schedule={"e": {"task": task, "args": ["e"], "kwargs": {"seconds": lazy}, "schedule": 3600}}
    )
    beat.tick()
    assert json.loads(redis.hget("redbeat:e", "definition"))["kwargs"] == {"seconds": {"__type__": "given"}}

    for _ in range(2):
        bench.make_due()
        beat.tick()

    assert [message.kwargs for message in bench.messages] == [{"seconds": 0}, {"seconds": 1}]
    assert Schedule(beat.app).get("e").kwargs == {"seconds": lazy}


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_the_lock_of_a_run_is_that_of_its_computed_arguments(bench, task):
    beat = bench.scheduler(beat_schedule={"e": {"task": task, "args": ["e", BeatLazyFunc(abs, -3)], "schedule": 3600}})
    backend_of(beat.app).announce("w@h", ttl=60)
    beat.tick()
    for _ in range(2):
        bench.make_due()
        beat.tick()

    assert bench.decisions == ["dispatched", "skipped_overlap"]


def test_a_lazy_argument_may_be_positional(bench):
    beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "args": ("e", BeatLazyFunc(abs, -3)), "schedule": 3600}})
    beat.tick()
    bench.make_due()
    beat.tick()

    assert [message.args for message in bench.messages] == [["e", 3]]


@pytest.mark.parametrize("task", [PLAIN, SINGLE])
@pytest.mark.parametrize(
    "options",
    [{"queue": Queue("own", Exchange("own"), "own")}, {"exchange": Exchange("celery"), "routing_key": "celery"}],
    ids=["queue", "exchange"],
)
def test_a_queue_or_an_exchange_can_come_from_beat_schedule(bench, redis, task, options):
    """As for plain beat. Others see that the code gives it, and keep it when they edit the entry."""
    item = {"task": task, "args": ["e"], "schedule": 3600, "options": options}
    beat = bench.scheduler(beat_schedule={"e": item})
    beat.tick()
    for _ in range(2):
        bench.make_due()
        beat.tick()
    entries = Schedule(beat.app)
    entries.upsert("e", task, schedule(1800), args=["e"], options=entries.get("e").options)

    assert bench.decisions == ["dispatched", "dispatched" if task == PLAIN else "skipped_overlap"]
    assert redis.llen("own" if "queue" in options else "celery") == (2 if task == PLAIN else 1)
    assert json.loads(redis.hget("redbeat:e", "definition"))["options"] == {
        name: value if isinstance(value, str) else {"__type__": "given"} for name, value in options.items()
    }
    assert entries.get("e").options == options


def test_a_queue_of_a_program_cannot_be_stored(app):
    with pytest.raises(EntryError, match="entry 'e' cannot be stored: Object of type Queue is not JSON serializable"):
        Entry("e", PLAIN, schedule(60), options={"queue": Queue("own")}, app=app).save()


class UnsayableError(BaseException):
    """Its string cannot be had, either."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [ZeroDivisionError, CancelledError, UnsayableError])
def test_a_lazy_argument_that_fails_harms_no_other_entry(bench, error):
    def fail() -> None:
        raise error

    wrong = BeatLazyFunc(fail)
    beat = bench.scheduler(
        beat_schedule={
            "e": {"task": PLAIN, "args": [wrong], "schedule": 3600},
            "f": {"task": PLAIN, "args": ["f"], "schedule": 3600},
        }
    )
    beat.tick()
    bench.make_due()
    bench.make_due("f")
    beat.tick()

    assert [message.args for message in bench.messages] == [["f"]]
    decided = {record["entry"]: record["decision"] for record in bench.history}
    assert decided == {"e": "publish_failed", "f": "dispatched"}


@pytest.mark.parametrize("halt", ["paused", "disabled"])
def test_a_removed_lazy_argument_leaves_an_entry_its_past_and_halted(bench, app, halt):
    first = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "args": (BeatLazyFunc(abs, -3),), "schedule": 3600}})
    first.tick()
    bench.make_due()
    first.tick()
    if halt == "paused":
        Schedule(first.app).pause("e", "for now")
    else:
        entry = Schedule(first.app).get("e")
        entry.enabled = False
        entry.save()
    past, score = Schedule(first.app).get("e").meta, bench.score()
    first.close()

    bench.scheduler(beat_schedule={"e": {"task": PLAIN, "args": (), "schedule": 3600}}).tick()

    entry = Schedule(app).get("e")
    assert (entry.args, entry.meta, bench.score()) == ([], past, score)
    assert past.total_run_count == 1
    if halt == "paused":
        assert (entry.policy.paused, entry.policy.note) == (True, "for now")
    else:
        assert not entry.enabled


@pytest.mark.parametrize("overlap", ["skip", "buffer_one", "buffer_all", "allow_all"])
@pytest.mark.parametrize("task", [PLAIN, SINGLE])
def test_an_unsendable_computed_argument_harms_no_other_entry(bench, redis, task, overlap):
    beat = bench.scheduler(
        beat_schedule={
            "e": {"task": task, "args": [BeatLazyFunc(object)], "schedule": 3600},
            "f": {"task": PLAIN, "args": ["f"], "schedule": 3600},
        }
    )
    backend_of(beat.app).announce("w@h", ttl=60)
    beat.tick()
    redis.hset("redbeat:e", "policy", json.dumps({"overlap": overlap}))
    bench.make_due("e", ago=3 * HOUR)
    bench.make_due("f")

    beat.tick()

    assert [message.args for message in bench.messages] == [["f"]]
    decided = {record["entry"]: record["decision"] for record in bench.history}
    assert decided == {"e": "publish_failed", "f": "dispatched"}


def test_a_lazy_argument_can_only_come_from_beat_schedule(app):
    with pytest.raises(EntryError, match=r"only beat_schedule can give <.*BeatLazyFunc"):
        Schedule(app).upsert("e", PLAIN, 60, args=[BeatLazyFunc(dict)])


# ---------------------------------------------------------------- zones and changes of rules


def test_a_rule_keeps_the_zone_of_its_start(app, redis):
    Schedule(app).upsert("e", PLAIN, rrule("DAILY", dtstart=datetime(2026, 1, 1, 9, tzinfo=NEW_YORK)))

    runs = Schedule(app).next_runs("e", 366)

    assert {run.astimezone(NEW_YORK).hour for run in runs} == {9}
    assert json.loads(redis.hget("redbeat:e", "policy")) == {"timezone": "America/New_York"}


def test_a_rule_in_utc_stays_in_utc_under_any_zone_of_the_app(server, redis):
    with make_app(server.celery_url, {"timezone": "Europe/London"}) as app:
        Schedule(app).upsert("e", PLAIN, rrule("DAILY", dtstart=datetime(2026, 1, 1, 9, tzinfo=UTC)))

        assert {run.hour for run in Schedule(app).next_runs("e", 366)} == {9}


def test_a_crontab_with_a_clock_keeps_its_zone(app):
    Schedule(app).upsert("e", PLAIN, crontab(0, 9, nowfun=lambda: datetime.now(NEW_YORK)))

    assert {run.astimezone(NEW_YORK).hour for run in Schedule(app).next_runs("e", 366)} == {9}


@pytest.mark.parametrize("start", [datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=timezone(-5 * HOUR))])
def test_the_zone_of_the_policy_is_that_of_a_rule(app, start):
    plan = rrule("DAILY", dtstart=start, byhour=9, byminute=0, bysecond=0)
    Schedule(app).upsert("e", PLAIN, plan, timezone="Europe/Berlin")

    assert {run.astimezone(BERLIN).hour for run in Schedule(app).next_runs("e", 366)} == {9}


def test_a_zone_that_another_language_gave_a_rule_survives_a_save(app, redis):
    raw = {"__type__": "rrule", "freq": "DAILY", "dtstart": 1767254400, "dtstart_tz": "Europe/Berlin"}
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "schedule": raw}))
    entry = Schedule(app).get("e")
    entry.args = ["changed"]
    Schedule(app).save(entry)

    _, *runs = Schedule(app).next_runs("e", 366)  # it has never run, and is due now
    assert {run.astimezone(BERLIN).hour for run in runs} == {9}


def test_a_changed_rule_counts_from_now_though_rules_compare_equal(app, bench):
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    Schedule(app).upsert("e", PLAIN, rrule("YEARLY", dtstart=noon))
    before = bench.score()

    Schedule(app).upsert("e", PLAIN, rrule("YEARLY", dtstart=noon), args=["x"])
    assert bench.score() == before
    Schedule(app).upsert("e", PLAIN, rrule("HOURLY", dtstart=noon))

    assert bench.score() <= datetime.now(UTC).timestamp() + 3600


# ---------------------------------------------------------------- concurrent edits, and enabled


@pytest.mark.parametrize("save", [lambda api, entry: entry.save(), lambda api, entry: api.save(entry)])
@pytest.mark.parametrize("unchanged", [False, True])
def test_a_second_save_conflicts_with_a_change_by_another_caller(app, save, unchanged):
    api = Schedule(app)
    mine = save(api, Entry("e", PLAIN, schedule(60), app=app))
    mine.args = ["mine"]
    save(api, mine)
    if unchanged:
        save(api, mine)
    theirs = api.get("e")
    theirs.args = ["theirs"]
    save(api, theirs)

    mine.args = ["mine again"]
    with pytest.raises(ConflictError, match="was changed since it was read"):
        save(api, mine)

    assert api.get("e").args == ["theirs"]


def test_an_entry_that_was_deleted_can_be_saved_again(app):
    entry = Entry("e", PLAIN, schedule(60), app=app).save()
    entry.delete()
    entry.save()

    assert Schedule(app).get("e").task == PLAIN


@pytest.mark.parametrize("enabled", ["yes", "false", "", 2, [], {}])
def test_an_entry_with_an_invalid_enabled_is_quarantined(bench, redis, enabled):
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "schedule": 60, "enabled": enabled}))
    redis.zadd(SCHEDULE, {"redbeat:e": 0})

    bench.scheduler().tick()

    assert bench.messages == []
    assert "enabled is neither true nor false" in redis.hget(QUARANTINE, "redbeat:e")


# ---------------------------------------------------------------- what can have no time


class Broken(BaseSchedule):  # type: ignore[misc]
    """Fails whenever it is asked."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        raise RuntimeError("a bug")


NEVER = {
    "an interval that does not move": rrule("DAILY", dtstart=datetime(2026, 1, 1, tzinfo=UTC), interval=0),
    "a class with a bug": Broken(),
}


@pytest.mark.parametrize("what", NEVER)
def test_a_schedule_without_a_next_time_harms_no_other_static_entry(bench, redis, caplog, what):
    beat = bench.scheduler(
        beat_schedule={"e": {"task": PLAIN, "schedule": NEVER[what]}, "f": {"task": PLAIN, "schedule": 60}}
    )

    beat.tick()

    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:f"]
    assert "entry 'e' cannot be stored: its next run cannot be calculated" in caplog.text


def test_a_schedule_without_a_next_time_is_refused_when_it_is_saved(app, redis):
    with pytest.raises(EntryError, match="entry 'e' cannot be stored: its next run cannot be calculated"):
        Schedule(app).upsert("e", PLAIN, NEVER["an interval that does not move"])

    assert not redis.exists("redbeat:e")


class Forgetful(BaseSchedule):  # type: ignore[misc]
    """Knows its next time, and fails when that has passed unseen."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        if last_run_at < datetime.now(UTC) - HOUR / 2:
            raise LookupError("too long ago")
        return schedstate(is_due=False, next=3600)


def test_600_entries_whose_schedules_fail_starve_no_other_entry(bench, redis, caplog):
    given = {f"bad {n}": {"task": PLAIN, "schedule": Forgetful()} for n in range(600)}
    beat = bench.scheduler(
        beat_schedule={"good": {"task": PLAIN, "schedule": schedule(HOUR), "args": ["good"]}, **given}
    )
    beat.tick()
    caplog.clear()
    for name in given:
        bench.make_due(name, ago=2 * HOUR)
    bench.make_due("good", ago=1.5 * HOUR)

    def only_the_good_one_is_due_again() -> bool:
        beat.tick()  # on a busy host some of the others are put off for a moment: their times seem expensive
        return bool(redis.zcount(SCHEDULE, 0, "+inf") == 1)

    wait_until(only_the_good_one_is_due_again)
    for _ in range(5):
        beat.tick()

    assert [message.args for message in bench.messages] == [["good"]]
    aside = redis.hgetall(QUARANTINE)
    assert len(aside) == 600
    assert "its next run cannot be calculated: LookupError: too long ago" in aside["redbeat:bad 7"]
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 600, "each once, not in every tick"
    assert "Traceback (most recent call last):" in said[0].getMessage(), "the mistake is in somebody's code"
    assert "is usable again" not in caplog.text


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("definition", json.dumps({"task": PLAIN, "schedule": 60, "args": ["mended"]})),
        ("meta", json.dumps({"last_run_at": None, "total_run_count": 0})),
    ],
)
def test_an_entry_whose_schedule_failed_recovers_when_it_has_changed(bench, redis, field, text):
    beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "schedule": Forgetful(), "args": ["mended"]}})
    beat.tick()
    bench.make_due()
    beat.tick()
    assert redis.hexists(QUARANTINE, "redbeat:e")
    assert bench.messages == []

    redis.hset("redbeat:e", field, text)
    beat.tick()
    beat.tick()

    assert not redis.exists(QUARANTINE)
    assert [message.args for message in bench.messages] == [["mended"]]


def test_a_schedule_that_failed_for_a_moment_recovers(bench, redis, monkeypatch):
    failing = True

    class AsksSomebody(Forgetful):
        def is_due(self, last_run_at: datetime) -> schedstate:
            return super().is_due(last_run_at) if failing else schedstate(is_due=True, next=1800)

    beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "schedule": AsksSomebody(), "args": ["mended"]}})
    beat.tick()
    bench.make_due()
    beat.tick()
    monkeypatch.setattr(quarantine, "RETRY_AFTER", timedelta(0))
    beat.tick()
    assert redis.hexists(QUARANTINE, "redbeat:e"), "it fails still"

    failing = False
    beat.tick()
    beat.tick()

    assert not redis.exists(QUARANTINE)
    assert [message.args for message in bench.messages] == [["mended"]]


def test_an_entry_whose_schedule_failed_is_retried_by_a_beat_of_new_code(bench, redis, monkeypatch):
    conf = {"task": PLAIN, "schedule": Forgetful(), "args": ["mended"]}
    beat = bench.scheduler(beat_schedule={"e": conf})
    beat.tick()
    bench.make_due()
    beat.tick()
    beat.close()
    assert redis.hexists(QUARANTINE, "redbeat:e")

    monkeypatch.setattr(Forgetful, "is_due", OnceAnHour().is_due)
    other = bench.scheduler(beat_schedule={"e": conf})
    other.tick()
    other.tick()

    assert not redis.exists(QUARANTINE)
    assert [message.args for message in bench.messages] == [["mended"]]


AT = "2026-01-01"
COMMANDS = [
    *(["list"], ["status"], ["export"], ["history"], ["show", "e"], ["next", "e"], ["explain", "e"], ["trigger", "e"]),
    *(["explain", "e", "--at", AT], ["backfill", "e", AT, "2026-01-02", "--dry-run"]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_is_not_ended_by_an_entry_whose_schedule_fails(bench, cli, command):
    beat = bench.scheduler(beat_schedule={"e": {"task": PLAIN, "schedule": Forgetful()}})
    beat.tick()
    bench.make_due()
    beat.tick()

    output = cli(*command, app=beat.app, code=None).output

    if command[0] in {"list", "status", "next", "explain", "backfill"}:
        assert "next run cannot be calculated: LookupError: too long ago" in output


@pytest.mark.parametrize("command", ["status", "list"])
def test_what_a_receiver_of_on_after_finalize_prints_spoils_no_command(cli, server, redis, command):
    with make_app(server.celery_url) as app:
        app.finalized = False

        @app.on_after_finalize.connect(weak=False)
        def add(**_):
            sys.stdout.write("adding entries")
            sys.exit(0)

        answer = cli(command, "--json", app=app)

    assert "entries" in json.loads(answer.stdout)
    assert "adding entries" in answer.stderr


@pytest.mark.parametrize("command", ["health", "export"])
def test_a_configuration_that_exits_is_an_error_of_each_command(cli, command):
    app = Celery("exits", set_as_current=False)

    @app.on_after_configure.connect(weak=False)
    def leave(**_):
        sys.stdout.write("no licence")
        sys.exit(0)

    answer = cli(command, app=app, code=2)

    assert answer.stdout == ""
    assert "a receiver of on_after_configure, exits: 0" in answer.stderr


def test_a_command_reads_what_on_after_finalize_adds(cli, server, redis):
    """Celery's way for tasks of other modules; beat finalizes the app, and so stores the entry."""
    with make_app(server.celery_url) as app:
        queue = Queue("own", Exchange("own"), "own")
        options = {"queue": queue}
        Entry("e", PLAIN, schedule(60), app=app).save()
        stored = json.loads(redis.hget("redbeat:e", "definition")) | {"options": {"queue": {"__type__": "given"}}}
        redis.hset("redbeat:e", "definition", json.dumps(stored))
        app.finalized = False

        @app.on_after_finalize.connect(weak=False)
        def add(sender, **_):
            sender.conf.beat_schedule = {"e": {"task": PLAIN, "schedule": 60, "options": options}}

        assert "unusable" not in cli("list", app=app).output
        assert [row["name"] for row in json.loads(cli("export", app=app).output)] == ["e"]
        cli("edit", "e", "--disable", app=app)
        assert Schedule(app).get("e").options == options
