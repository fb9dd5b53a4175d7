"""Every wish of an entry, through the ticks of a scheduler: what is sent, what is decided, and when it is due next."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab
from celery.signals import after_task_publish
from redbeat.schedules import rrule

from singlebeat import Singleton, clocked
from singlebeat.beat.entries.entry import PARKED
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.locks import backend_of
from singlebeat.locks.base import HEADER, Ref
from tests.support import connected

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
SCHEDULE, HISTORY, QUARANTINE = "redbeat::schedule", "redbeat::history", "redbeat::quarantine"
PENDING = "redbeat::pending"
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


# ---------------------------------------------------------------- when


def test_timezone_is_the_wall_clock_of_the_entry(bench):
    tokyo = datetime.now(ZoneInfo("Asia/Tokyo")).replace(minute=0, second=0, microsecond=0)
    bench.put(every=crontab(minute=0, hour=tokyo.hour), ago=3 * HOUR)
    bench.tick()
    assert bench.messages == []  # on the app's clock, which is UTC, that hour is far

    entry = bench.schedule.get("e")
    bench.schedule.upsert("e", PLAIN, entry.schedule, args=["e"], timezone="Asia/Tokyo")
    bench.make_due(ago=3 * HOUR)
    bench.tick()

    assert [message.nominal for message in bench.messages] == [tokyo]
    assert datetime.fromtimestamp(bench.score(), UTC) == tokyo + timedelta(days=1)


def test_start_time_keeps_a_new_entry_waiting(bench):
    start = datetime.now(UTC) + HOUR
    bench.put(ago=None, start_time=start)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()

    assert bench.messages == []
    assert bench.score() == start.timestamp()


def test_an_interval_begins_at_its_start_time(bench):
    start = (datetime.now(UTC) - timedelta(minutes=30)).replace(microsecond=0)
    bench.put(ago=3 * HOUR, start_time=start)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(2)

    assert [message.nominal for message in bench.messages] == [start]
    assert bench.score() == (start + HOUR).timestamp()


def test_end_time_ends_the_entry_which_is_kept(bench):
    bench.put(end_time=datetime.now(UTC) + HOUR / 4)
    bench.tick(2)

    assert bench.decisions == ["dispatched"]
    assert bench.score() == PARKED
    assert bench.redis.exists("redbeat:e")


def test_a_run_after_the_end_time_is_not_sent(bench):
    bench.put(end_time=datetime.now(UTC) - HOUR)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()

    assert (bench.messages, bench.decisions, bench.score()) == ([], [], PARKED)


def test_no_catch_up_runs_after_the_end_time(bench):
    bench.put(end_time=datetime.now(UTC) - HOUR / 4)  # after its time, which is half an hour ago
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()

    assert (bench.messages, bench.decisions, bench.score()) == ([], ["missed"], PARKED)
    (record,) = bench.history
    assert "its end_time was" in record["reason"]
    assert bench.meta().total_run_count == 7


def test_a_run_for_the_end_time_itself_is_not_late_for_that(bench):
    bench.put(ago=HOUR + SECOND, end_time=datetime.now(UTC) - SECOND / 2)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()

    assert bench.decisions == ["dispatched"]


def test_a_retry_after_the_end_time_is_missed_and_a_trigger_runs(bench):
    bench.put()
    (stored,) = bench.scheduler().store.due(datetime.now(UTC), all_pending=False).entries
    pending = Occurrence.of("redbeat:", "e", stored.meta.last_run_at + HOUR)
    bench.redis.hset("redbeat:e", "pending", pending.encode())
    bench.redis.hset("redbeat:e", "policy", EntryPolicy(end_time=datetime.now(UTC) - HOUR / 4).encode())
    bench.redis.zadd(SCHEDULE, {"redbeat:e": PARKED})
    bench.redis.zadd(PENDING, {"redbeat:e": 0})
    bench.tick()
    assert (bench.messages, bench.decisions) == ([], ["missed"])

    bench.schedule.trigger("e")
    bench.tick()
    assert bench.decisions == ["missed", "dispatched"]


def test_max_runs_counts_sent_runs(bench):
    bench.put(max_runs=8, task=SINGLE)
    backend = backend_of(bench.app)
    bench.schedule.trigger("e")
    bench.tick()  # the triggered one is not counted, and keeps the next one from running
    assert bench.decisions == ["dispatched"]
    bench.tick()
    assert bench.decisions == ["dispatched", "skipped_overlap"]
    assert bench.meta().total_run_count == 7

    backend.clear("SINGLETONLOCK_")
    bench.make_due()
    bench.tick()
    assert bench.decisions == ["dispatched", "skipped_overlap", "dispatched"]
    assert bench.meta().total_run_count == 8

    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()
    assert len(bench.decisions) == 3
    assert bench.score() == PARKED


def test_a_finished_entry_goes_on_when_it_may_run_more_often(bench):
    bench.put(max_runs=7)
    bench.tick()
    assert (bench.decisions, bench.score()) == ([], PARKED)

    bench.schedule.upsert("e", PLAIN, HOUR, args=["e"], max_runs=8)
    bench.tick()

    assert bench.score() != PARKED


def test_run_on_start_runs_a_new_entry_at_once_and_never_again(bench):
    def save() -> None:
        bench.schedule.upsert("e", PLAIN, 3600, args=["e"], run_on_start=True)

    save()
    bench.tick()
    assert bench.decisions == ["dispatched"]

    save()
    bench.schedule.upsert("e", PLAIN, 1800, args=["e"], run_on_start=True)
    bench.tick()
    assert bench.decisions == ["dispatched"]


def test_without_it_a_new_entry_waits_for_its_time(bench):
    bench.schedule.upsert("e", PLAIN, 3600, args=["e"])
    bench.tick()

    assert bench.decisions == []


def test_run_on_start_of_beat_schedule_is_no_run_of_every_start(bench):
    entry = {"task": PLAIN, "schedule": 3600.0, "args": ["e"], "run_on_start": True}
    for _ in range(3):
        scheduler = bench.scheduler(beat_schedule={"e": entry})
        bench.tick(3)
        scheduler.close()

    assert bench.decisions == ["dispatched"]


def test_jitter_puts_the_run_off_and_leaves_its_nominal_time(bench):
    entry = bench.put(jitter=600)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick()
    (message,) = bench.messages
    upcoming = message.nominal + HOUR

    assert abs(message.nominal - (entry.last_run_at + HOUR)) < timedelta(milliseconds=1)
    assert upcoming.timestamp() <= bench.score() < upcoming.timestamp() + 600
    assert bench.score() == pytest.approx(entry.timetable.due(entry.last_run_at + 2 * HOUR).timestamp())


def test_a_run_delayed_by_jitter_is_not_sent_before(bench):
    # Times that do not change: what is put off, and by how much, is a hash of them.
    entry = bench.put(jitter=3599, last_run_at=datetime(2026, 3, 1, tzinfo=UTC))
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(at=entry.last_run_at + HOUR + SECOND)

    assert bench.messages == []
    assert bench.score() == entry.timetable.due(entry.last_run_at + HOUR).timestamp()


# ---------------------------------------------------------------- whether


@pytest.mark.parametrize(("grace", "decision"), [(1790, "missed"), (1900, "dispatched")])
def test_misfire_grace_time_bounds_the_lateness_of_a_run(bench, grace, decision):
    bench.put(misfire_grace_time=grace)
    bench.tick(2)

    assert bench.decisions == [decision]
    assert bench.meta().total_run_count == (8 if decision == "dispatched" else 7)


@pytest.mark.parametrize(("grace", "decision"), [(-1, "missed"), (1, "dispatched")])
def test_a_run_delayed_by_jitter_is_late_from_its_due_time(bench, monkeypatch, grace, decision):
    # Times that do not change: what is put off, and by how much, is a hash of them.
    entry = bench.put(jitter=1800, last_run_at=datetime(2026, 3, 1, tzinfo=UTC))
    due = entry.timetable.due(entry.last_run_at + HOUR)
    now = entry.last_run_at + 2 * HOUR - SECOND
    late = (now - due).total_seconds()
    assert 600 < late < 3590
    bench.redis.hset("redbeat:e", "policy", EntryPolicy(jitter=1800.0, misfire_grace_time=late + grace).encode())
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    monkeypatch.setattr(bench.scheduler().dispatcher, "_timestamp", now.timestamp)
    bench.tick(at=now)

    assert bench.decisions == [decision]


def test_paused_lets_its_times_pass_and_says_why(bench):
    bench.put(paused=True, note="until Monday")
    bench.tick(2)
    (record,) = bench.history

    assert (record["decision"], record["reason"]) == ("paused", "until Monday")
    assert bench.messages == []
    assert bench.meta().total_run_count == 7
    assert bench.score() > datetime.now(UTC).timestamp()

    bench.schedule.resume("e")
    bench.tick(2)
    assert bench.decisions == ["paused"]  # what has passed is not made up for


def test_of_many_missed_times_the_latest_runs_as_a_catch_up(bench):
    entry = bench.put(ago=5.5 * HOUR)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": (entry.last_run_at + HOUR).timestamp()})
    bench.tick(2)
    (message,) = bench.messages
    run = message.run

    assert run["kind"] == "catch_up"
    assert abs(message.nominal - (entry.last_run_at + 5 * HOUR)) < timedelta(milliseconds=1)
    assert abs(datetime.fromisoformat(run["previous"]) - entry.last_run_at) < timedelta(milliseconds=1)
    assert run["occurrence"] == message.id
    assert bench.score() == pytest.approx((entry.last_run_at + 6 * HOUR).timestamp())


@pytest.mark.parametrize("sent", ["sent", "no number", None])
def test_previous_is_the_last_run_that_was_sent(bench, sent):
    """A task that works on what is new since ``previous`` must not lose the times of skipped and paused runs."""
    at = datetime.now(UTC)

    def tick(decision: str) -> None:
        nonlocal at
        at += HOUR
        bench.tick(at=at)
        assert bench.decisions[-1] == decision

    entry = bench.put(task=SINGLE, ago=HOUR / 2)
    tick("dispatched")
    (first,) = bench.messages
    tick("skipped_overlap")
    bench.schedule.pause("e")
    tick("paused")
    bench.redis.hdel("redbeat:e", "policy")
    if sent == "no number":
        bench.redis.hset("redbeat:e", "sent", sent)
    if sent is None:  # as RedBeat stores an entry
        bench.redis.hdel("redbeat:e", "sent")
    backend_of(bench.app).clear("SINGLETONLOCK_")
    last = bench.schedule.get("e").meta.last_run
    listed = {each.name: each.meta.last_run for each in bench.schedule.list()}
    tick("dispatched")

    expected = first.nominal if sent == "sent" else entry.last_run_at + 3 * HOUR
    previous = datetime.fromisoformat(bench.messages[1].run["previous"])
    assert [abs(each - expected) < SECOND / 100 for each in (previous, last, listed["e"])] == [True] * 3


def test_a_run_on_time_is_scheduled(bench):
    bench.put(ago=HOUR + SECOND)
    bench.tick()

    assert [message.run["kind"] for message in bench.messages] == ["scheduled"]


# ---------------------------------------------------------------- how


def test_expires_counts_from_the_dispatch(bench):
    bench.put(expires=30)
    before = datetime.now(UTC)
    bench.tick()
    (message,) = bench.messages

    expires = datetime.fromisoformat(message.headers["expires"])
    assert before + 30 * SECOND <= expires <= datetime.now(UTC) + 30 * SECOND


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize(
    ("overlap", "later", "waiting"),
    [
        (None, "skipped_overlap", 0),
        ("skip", "skipped_overlap", 0),
        ("buffer_one", "skipped_overlap", 0),  # the first is still queued, and the same call: nothing would be new
        ("buffer_all", "buffered", 3),
        ("allow_all", "dispatched", 0),
        ("cancel_other", "dispatched", 2),
        ("terminate_other", "dispatched", 2),
    ],
)
def test_overlap_decides_about_calls_that_wait_in_the_queue(bench, task, overlap, later, waiting):
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put(task=task, **({"overlap": overlap} if overlap else {}))
    for _ in range(3):
        bench.make_due()
        bench.tick()

    tickets = [message.headers.get(HEADER) or {} for message in bench.messages]
    assert bench.decisions == ["dispatched", later, later]
    assert len(bench.messages) == (1 if later == "skipped_overlap" else 3)
    assert sum(bool(ticket.get("waits")) for ticket in tickets) == waiting


def once(kind: str) -> Any:
    """Return a schedule whose one time was half an hour ago."""
    at = datetime.now(UTC) - HOUR / 2
    return clocked(at) if kind == "clocked" else rrule("DAILY", dtstart=at, count=1)


@pytest.mark.parametrize("kind", ["clocked", "rrule"])
@pytest.mark.parametrize(
    ("wish", "options", "decision"),
    [
        (None, {}, "buffered"),
        (None, {"lock": "while_executing"}, "dispatched"),  # it meets its equal only at its start, and waits there
        (None, {"overlap": "skip"}, "skipped_overlap"),
        (None, {"raise_on_duplicate": True}, "skipped_overlap"),
        (None, {"lock": "until_executing"}, "skipped_overlap"),  # which has not started: it runs later than this one
        ("skip", {}, "skipped_overlap"),
        ("allow_all", {}, "dispatched"),
    ],
)
def test_a_one_off_waits_for_its_turn_unless_its_policy_says_otherwise(bench, kind, wish, options, decision):
    @bench.app.task(name="own", base=Singleton, shared=False, **options)
    def own(name: str) -> None:
        pass

    own.delay("e")
    bench.scheduler(app=bench.app)
    bench.put(task="own", every=once(kind), **({"overlap": wish} if wish else {}))
    bench.tick()

    assert bench.decisions == [decision]
    assert len(bench.messages) == (1 if decision == "skipped_overlap" else 2)
    waits = [message.headers[HEADER].get("waits", False) for message in bench.messages[1:]]
    assert waits == ([] if decision == "skipped_overlap" else [wish != "allow_all"])


def test_a_past_instant_runs_only_if_another_program_has_stored_it(bench, cli):
    """Singlebeat notes when it has saved an entry, and counts from there."""
    bench.put("ours", every=once("clocked"), ago=None)
    bench.redis.hset("redbeat:theirs", "definition", bench.redis.hget("redbeat:ours", "definition"))
    bench.redis.zadd("redbeat::schedule", {"redbeat:theirs": 0})
    bench.tick(2)

    assert [record["entry"] for record in bench.history] == ["theirs"]
    assert bench.decisions == ["dispatched"]
    told = cli("explain", "theirs").output
    assert "It was sent late." in told
    assert "stands for" not in told


def test_a_plain_task_that_comes_once_waits_for_the_run_that_was_triggered(bench):
    backend_of(bench.app).announce("w@h", ttl=60)
    bench.put(every=once("clocked"))
    bench.schedule.trigger("e")
    bench.tick(2)

    assert bench.decisions == ["dispatched", "buffered"]
    assert bench.messages[1].headers[HEADER]["waits"]


def die(**_: Any) -> None:
    raise SystemExit


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize("overlap", ["buffer_one", "terminate_other"])
def test_a_finished_run_is_dispatched_even_if_an_equal_call_runs_now(bench, task, overlap):
    backend = backend_of(bench.app)
    backend.announce("w@h", ttl=60)
    bench.put(task=task, overlap=overlap)
    with connected(after_task_publish, die), pytest.raises(SystemExit):
        bench.tick()
    (message,) = bench.messages
    for task_id in (message.id, "another"):
        run = Ref(message.headers[HEADER]["key"], task_id, nonce=f"run of {task_id}")
        backend.begin(run, lease=60, remember_for=60, task=task, arguments="")
        if task_id == message.id:
            backend.finish_many([run], remember_for=60, ran=True)

    bench.retry_now()
    bench.tick()

    assert bench.decisions == ["dispatched"]
    assert bench.ids == [message.id]
    assert bench.meta().total_run_count == 8


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize("overlap", ["skip", "buffer_all"])
def test_a_lock_shows_the_arguments_of_an_entry_as_its_options_do(bench, task, overlap):
    backend_of(bench.app).announce("w@h", ttl=60)
    hidden = {"argsrepr": "('a name',)", "kwargsrepr": "{'seconds': '**'}"}
    bench.put(task=task, overlap=overlap, args=["e"], kwargs={"seconds": 4929}, options=hidden)

    bench.tick()

    (lock,) = bench.redis.keys("SINGLETONLOCK_*")
    assert bench.redis.hget(lock, "args") == "('a name',), {'seconds': '**'}"


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
def test_every_message_says_of_which_run_it_is(bench, task):
    entry = bench.put(task=task, ago=HOUR + SECOND, options={"headers": {"mine": 1}})
    bench.tick()
    (message,) = bench.messages

    assert message.run == {
        "entry": "e",
        "occurrence": message.id,
        "nominal": (entry.last_run_at + HOUR).isoformat(timespec="milliseconds"),
        "previous": entry.last_run_at.isoformat(timespec="milliseconds"),
        "kind": "scheduled",
    }
    assert message.headers["mine"] == 1


# ---------------------------------------------------------------- wrong ones


@pytest.mark.parametrize(("lock", "overlap"), [("while_executing", "cancel_other"), ("until_executing", "buffer_all")])
def test_an_overlap_that_contradicts_its_tasks_lock_is_recorded(bench, lock, overlap):
    @bench.app.task(name="own", base=Singleton, lock=lock, shared=False)
    def own(name: str) -> None: ...

    bench.scheduler(app=bench.app)
    bench.put(task=own.name, overlap=overlap)
    bench.tick()

    assert (bench.messages, bench.decisions) == ([], ["publish_failed"])
    record, *_ = bench.history
    assert f"overlap={overlap} contradicts lock={lock}" in record["reason"]


REFUSED = [
    ('{"jiter": 5}', "policy: there is no 'jiter'; did you mean 'jitter'?"),
    ('{"jitter": 0}', "policy: jitter must be a positive number of seconds, not 0"),
    ('{"overlap": "raise"}', "policy: overlap must be one of"),
    ('{"start_time": "2026-12-01T09:00"}', "policy: start_time must be a date and time with offset"),
    (
        '{"start_time": "2026-12-02T00:00Z", "end_time": "2026-12-01T00:00Z"}',
        "policy: end_time 2026-12-01 00:00:00+00:00 is before start_time",
    ),
    ('{"expires": 5}', "expires is in its options as well as in its policy"),
    ("{", "policy cannot be read"),
]


@pytest.mark.parametrize(("policy", "reason"), REFUSED, ids=[policy for policy, _ in REFUSED])
def test_an_invalid_policy_quarantines_its_entry_until_it_is_fixed(bench, policy, reason):
    entry = bench.put(options={"expires": 60} if "expires" in policy else {})
    bench.redis.hset("redbeat:e", "policy", policy)
    bench.tick(2)

    assert bench.messages == []
    assert json.loads(bench.redis.hget(QUARANTINE, entry.key))["reason"].startswith(reason)
    assert bench.redis.hget("redbeat:e", "policy") == policy

    bench.redis.hset("redbeat:e", "policy", '{"note": "mended"}')
    bench.tick(2)
    assert bench.decisions == ["quarantined", "dispatched"]
    assert not bench.redis.exists(QUARANTINE)
