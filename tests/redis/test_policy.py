"""Every wish of an entry, through the ticks of a scheduler: what is sent, what is decided, and when it is due next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import Service
from celery.schedules import crontab, schedule
from celery.signals import after_task_publish
from redbeat.schedules import rrule
from redis import Redis

from singlebeat import Entry, Schedule, Singleton, clocked
from singlebeat.beat.entries.entry import PARKED, Meta
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.scheduler import Scheduler
from singlebeat.locks import backend_of
from singlebeat.locks.base import HEADER, Ref
from tests.support import RedisServer
from tests.system.apps import make_app

PLAIN, SINGLE = "tests.system.apps.plain", "tests.system.apps.single"
SCHEDULE, HISTORY, QUARANTINE = "redbeat::schedule", "redbeat::history", "redbeat::quarantine"
PENDING = "redbeat::pending"
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


class Desk:
    """An app with its schedule, a scheduler that ticks when it is told to, and a look at what was sent."""

    def __init__(self, app: Celery, redis: Redis) -> None:
        self.app, self.redis = app, redis
        self.schedule = Schedule(app)
        self.scheduler: Scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()

    def put(self, *, task: str = PLAIN, every: Any = HOUR, ago: timedelta | None = 1.5 * HOUR, **more: Any) -> Entry:
        """Store the entry ``e``: by default its next time was half an hour ago."""
        every = schedule(every) if isinstance(every, timedelta) else every
        last = None if ago is None else datetime.now(UTC) - ago
        more = {"last_run_at": last, "total_run_count": 0 if ago is None else 7, "args": ["e"], **more}
        return Entry("e", task, every, app=self.app, **more).save()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.tick()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The headers of all messages in the queue, the first one first."""
        return [json.loads(text)["headers"] for text in self.redis.lrange("celery", 0, -1)[::-1]]

    @property
    def decisions(self) -> list[str]:
        return [record["decision"] for _, record in self.redis.xrange(HISTORY)]

    @property
    def score(self) -> float:
        return self.redis.zscore(SCHEDULE, "redbeat:e")

    @property
    def meta(self) -> Meta:
        return Meta.decode(self.redis.hget("redbeat:e", "meta"))

    def nominal(self, message: dict[str, Any]) -> datetime:
        return datetime.fromisoformat(message["singlebeat"]["nominal"])


@pytest.fixture
def desk(server: RedisServer, redis: Redis) -> Iterator[Desk]:
    with make_app(server.celery_url, {"singlebeat_watchdog_timeout": None}) as app:
        desk = Desk(app, redis)
        yield desk
        desk.scheduler.close()


# ---------------------------------------------------------------- when


def test_timezone_is_the_wall_clock_of_the_entry(desk):
    tokyo = datetime.now(ZoneInfo("Asia/Tokyo")).replace(minute=0, second=0, microsecond=0)
    desk.put(every=crontab(minute=0, hour=tokyo.hour), ago=3 * HOUR)
    desk.tick()
    assert desk.messages == []  # on the app's clock, which is UTC, that hour is far

    entry = desk.schedule.get("e")
    desk.schedule.upsert("e", PLAIN, entry.schedule, args=["e"], timezone="Asia/Tokyo")
    desk.redis.hset("redbeat:e", "meta", Meta(datetime.now(UTC) - 3 * HOUR, 7).encode())
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()

    assert [desk.nominal(message) for message in desk.messages] == [tokyo]
    assert datetime.fromtimestamp(desk.score, UTC) == tokyo + timedelta(days=1)


def test_start_time_keeps_a_new_entry_waiting(desk):
    start = datetime.now(UTC) + HOUR
    desk.put(ago=None, start_time=start)
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()

    assert desk.messages == []
    assert desk.score == start.timestamp()


def test_an_interval_begins_at_its_start_time(desk):
    start = (datetime.now(UTC) - timedelta(minutes=30)).replace(microsecond=0)
    desk.put(ago=3 * HOUR, start_time=start)
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick(2)

    assert [desk.nominal(message) for message in desk.messages] == [start]
    assert desk.score == (start + HOUR).timestamp()


def test_end_time_ends_the_entry_which_is_kept(desk):
    desk.put(end_time=datetime.now(UTC) + HOUR / 4)
    desk.tick(2)

    assert desk.decisions == ["dispatched"]
    assert desk.score == PARKED
    assert desk.redis.exists("redbeat:e")


def test_a_run_after_the_end_time_is_not_sent(desk):
    desk.put(end_time=datetime.now(UTC) - HOUR)
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()

    assert (desk.messages, desk.decisions, desk.score) == ([], [], PARKED)


def test_no_catch_up_runs_after_the_end_time(desk):
    desk.put(end_time=datetime.now(UTC) - HOUR / 4)  # after its time, which is half an hour ago
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()

    assert (desk.messages, desk.decisions, desk.score) == ([], ["missed"], PARKED)
    ((_, record),) = desk.redis.xrange(HISTORY)
    assert "its end_time was" in record["reason"]
    assert desk.meta.total_run_count == 7


def test_a_run_for_the_end_time_itself_is_not_late_for_that(desk):
    desk.put(ago=HOUR + SECOND, end_time=datetime.now(UTC) - SECOND / 2)
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()

    assert desk.decisions == ["dispatched"]


def test_a_retry_after_the_end_time_is_missed_and_a_trigger_runs(desk):
    desk.put()
    (stored,) = desk.scheduler.store.due(datetime.now(UTC), all_pending=False).entries
    pending = Occurrence.of("redbeat:", "e", stored.meta.last_run_at + HOUR)
    desk.redis.hset("redbeat:e", "pending", pending.encode())
    desk.redis.hset("redbeat:e", "policy", EntryPolicy(end_time=datetime.now(UTC) - HOUR / 4).encode())
    desk.redis.zadd(SCHEDULE, {"redbeat:e": PARKED})
    desk.redis.zadd(PENDING, {"redbeat:e": 0})
    desk.tick()
    assert (desk.messages, desk.decisions) == ([], ["missed"])

    desk.schedule.trigger("e")
    desk.tick()
    assert desk.decisions == ["missed", "dispatched"]


def test_max_runs_counts_sent_runs(desk):
    desk.put(max_runs=8, task=SINGLE)
    backend = backend_of(desk.app)
    desk.schedule.trigger("e")
    desk.tick()  # the triggered one is not counted, and keeps the next one from running
    assert desk.decisions == ["dispatched"]
    desk.tick()
    assert desk.decisions == ["dispatched", "skipped_overlap"]
    assert desk.meta.total_run_count == 7

    backend.clear("SINGLETONLOCK_")
    desk.redis.hset("redbeat:e", "meta", Meta(datetime.now(UTC) - 1.5 * HOUR, 7).encode())
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()
    assert desk.decisions == ["dispatched", "skipped_overlap", "dispatched"]
    assert desk.meta.total_run_count == 8

    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()
    assert len(desk.decisions) == 3
    assert desk.score == PARKED


def test_a_finished_entry_goes_on_when_it_may_run_more_often(desk):
    desk.put(max_runs=7)
    desk.tick()
    assert (desk.decisions, desk.score) == ([], PARKED)

    desk.schedule.upsert("e", PLAIN, HOUR, args=["e"], max_runs=8)
    desk.tick()

    assert desk.score != PARKED


def test_run_on_start_runs_a_new_entry_at_once_and_never_again(desk):
    def save() -> None:
        desk.schedule.upsert("e", PLAIN, 3600, args=["e"], run_on_start=True)

    save()
    desk.tick()
    assert desk.decisions == ["dispatched"]

    save()
    desk.schedule.upsert("e", PLAIN, 1800, args=["e"], run_on_start=True)
    desk.tick()
    assert desk.decisions == ["dispatched"]


def test_without_it_a_new_entry_waits_for_its_time(desk):
    desk.schedule.upsert("e", PLAIN, 3600, args=["e"])
    desk.tick()

    assert desk.decisions == []


def test_run_on_start_of_beat_schedule_is_no_run_of_every_start(server, redis):
    entry = {"task": PLAIN, "schedule": 3600.0, "args": ["e"], "run_on_start": True}
    conf = {"singlebeat_watchdog_timeout": None, "beat_schedule": {"e": entry}}
    for _ in range(3):
        with make_app(server.celery_url, conf) as app:
            desk = Desk(app, redis)
            desk.tick(3)
            desk.scheduler.close()

    assert desk.decisions == ["dispatched"]


def test_jitter_puts_the_run_off_and_leaves_its_nominal_time(desk):
    entry = desk.put(jitter=600)
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.tick()
    (message,) = desk.messages
    upcoming = desk.nominal(message) + HOUR

    assert abs(desk.nominal(message) - (entry.last_run_at + HOUR)) < timedelta(milliseconds=1)
    assert upcoming.timestamp() <= desk.score < upcoming.timestamp() + 600
    assert desk.score == pytest.approx(entry.timetable.due(entry.last_run_at + 2 * HOUR).timestamp())


def test_a_run_delayed_by_jitter_is_not_sent_before(desk):
    # Times that do not change: what is put off, and by how much, is a hash of them.
    entry = desk.put(jitter=3599, last_run_at=datetime(2026, 3, 1, tzinfo=UTC))
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.scheduler._tick(entry.last_run_at + HOUR + SECOND, desk.scheduler.lease.acquire())

    assert desk.messages == []
    assert desk.score == entry.timetable.due(entry.last_run_at + HOUR).timestamp()


# ---------------------------------------------------------------- whether


@pytest.mark.parametrize(("grace", "decision"), [(1790, "missed"), (1900, "dispatched")])
def test_misfire_grace_time_bounds_the_lateness_of_a_run(desk, grace, decision):
    desk.put(misfire_grace_time=grace)
    desk.tick(2)

    assert desk.decisions == [decision]
    assert desk.meta.total_run_count == (8 if decision == "dispatched" else 7)


@pytest.mark.parametrize(("grace", "decision"), [(-1, "missed"), (1, "dispatched")])
def test_a_run_delayed_by_jitter_is_late_from_its_due_time(desk, grace, decision):
    # Times that do not change: what is put off, and by how much, is a hash of them.
    entry = desk.put(jitter=1800, last_run_at=datetime(2026, 3, 1, tzinfo=UTC))
    due = entry.timetable.due(entry.last_run_at + HOUR)
    now = entry.last_run_at + 2 * HOUR - SECOND
    late = (now - due).total_seconds()
    assert 600 < late < 3590
    desk.redis.hset("redbeat:e", "policy", EntryPolicy(jitter=1800.0, misfire_grace_time=late + grace).encode())
    desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    desk.scheduler._tick(now, desk.scheduler.lease.acquire())

    assert desk.decisions == [decision]


def test_paused_lets_its_times_pass_and_says_why(desk):
    desk.put(paused=True, note="until Monday")
    desk.tick(2)
    ((_, record),) = desk.redis.xrange(HISTORY)

    assert (record["decision"], record["reason"]) == ("paused", "until Monday")
    assert desk.messages == []
    assert desk.meta.total_run_count == 7
    assert desk.score > datetime.now(UTC).timestamp()

    desk.schedule.resume("e")
    desk.tick(2)
    assert desk.decisions == ["paused"]  # what has passed is not made up for


def test_of_many_missed_times_the_latest_runs_as_a_catch_up(desk):
    entry = desk.put(ago=5.5 * HOUR)
    desk.redis.zadd(SCHEDULE, {"redbeat:e": (entry.last_run_at + HOUR).timestamp()})
    desk.tick(2)
    (message,) = desk.messages
    run = message["singlebeat"]

    assert run["kind"] == "catch_up"
    assert abs(desk.nominal(message) - (entry.last_run_at + 5 * HOUR)) < timedelta(milliseconds=1)
    assert abs(datetime.fromisoformat(run["previous"]) - entry.last_run_at) < timedelta(milliseconds=1)
    assert run["occurrence"] == message["id"]
    assert desk.score == pytest.approx((entry.last_run_at + 6 * HOUR).timestamp())


@pytest.mark.parametrize("sent", ["sent", "no number", None])
def test_previous_is_the_last_run_that_was_sent(desk, sent):
    """A task that works on what is new since ``previous`` must not lose the times of skipped and paused runs."""
    at = datetime.now(UTC)

    def tick(decision: str) -> None:
        nonlocal at
        at += HOUR
        desk.scheduler._tick(at, desk.scheduler.lease.acquire())
        assert desk.decisions[-1] == decision

    entry = desk.put(task=SINGLE, ago=HOUR / 2)
    tick("dispatched")
    (first,) = desk.messages
    tick("skipped_overlap")
    desk.schedule.pause("e")
    tick("paused")
    desk.redis.hdel("redbeat:e", "policy")
    if sent == "no number":
        desk.redis.hset("redbeat:e", "sent", sent)
    if sent is None:  # as RedBeat stores an entry
        desk.redis.hdel("redbeat:e", "sent")
    backend_of(desk.app).clear("SINGLETONLOCK_")
    last = desk.schedule.get("e").meta.last_run
    listed = {each.name: each.meta.last_run for each in desk.schedule.list()}
    tick("dispatched")

    expected = desk.nominal(first) if sent == "sent" else entry.last_run_at + 3 * HOUR
    previous = datetime.fromisoformat(desk.messages[1]["singlebeat"]["previous"])
    assert [abs(each - expected) < SECOND / 100 for each in (previous, last, listed["e"])] == [True] * 3


def test_a_run_on_time_is_scheduled(desk):
    desk.put(ago=HOUR + SECOND)
    desk.tick()

    assert [message["singlebeat"]["kind"] for message in desk.messages] == ["scheduled"]


# ---------------------------------------------------------------- how


def test_expires_counts_from_the_dispatch(desk):
    desk.put(expires=30)
    before = datetime.now(UTC)
    desk.tick()
    (message,) = desk.messages

    expires = datetime.fromisoformat(message["expires"])
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
def test_overlap_decides_about_calls_that_wait_in_the_queue(desk, task, overlap, later, waiting):
    backend_of(desk.app).announce("w@h", ttl=60)
    desk.put(task=task, **({"overlap": overlap} if overlap else {}))
    for _ in range(3):
        desk.redis.hset("redbeat:e", "meta", Meta(datetime.now(UTC) - 1.5 * HOUR, 7).encode())
        desk.redis.zadd(SCHEDULE, {"redbeat:e": 0})
        desk.tick()

    tickets = [message.get("singlebeat_lock") or {} for message in desk.messages]
    assert desk.decisions == ["dispatched", later, later]
    assert len(desk.messages) == (1 if later == "skipped_overlap" else 3)
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
def test_a_one_off_waits_for_its_turn_unless_its_policy_says_otherwise(desk, kind, wish, options, decision):
    @desk.app.task(name="own", base=Singleton, shared=False, **options)
    def own(name: str) -> None:
        pass

    own.delay("e")
    desk.put(task="own", every=once(kind), **({"overlap": wish} if wish else {}))
    desk.tick()

    assert desk.decisions == [decision]
    assert len(desk.messages) == (1 if decision == "skipped_overlap" else 2)
    waits = [message["singlebeat_lock"].get("waits", False) for message in desk.messages[1:]]
    assert waits == ([] if decision == "skipped_overlap" else [wish != "allow_all"])


def test_a_plain_task_that_comes_once_waits_for_the_run_that_was_triggered(desk):
    backend_of(desk.app).announce("w@h", ttl=60)
    desk.put(every=once("clocked"))
    desk.schedule.trigger("e")
    desk.tick(2)

    assert desk.decisions == ["dispatched", "buffered"]
    assert desk.messages[1]["singlebeat_lock"]["waits"]


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize("overlap", ["buffer_one", "terminate_other"])
def test_a_finished_run_is_dispatched_even_if_an_equal_call_runs_now(desk, task, overlap):
    backend = backend_of(desk.app)
    backend.announce("w@h", ttl=60)
    desk.put(task=task, overlap=overlap)
    with dying_after_publish(), pytest.raises(SystemExit):
        desk.tick()
    (message,) = desk.messages
    for task_id in (message["id"], "another"):
        run = Ref(message[HEADER]["key"], task_id, nonce=f"run of {task_id}")
        backend.begin(run, lease=60, remember_for=60, task=task, arguments="")
        if task_id == message["id"]:
            backend.finish_many([run], remember_for=60, ran=True)

    desk.redis.zadd(PENDING, {"redbeat:e": 0})
    desk.tick()

    assert desk.decisions == ["dispatched"]
    assert [sent["id"] for sent in desk.messages] == [message["id"]]
    assert desk.meta.total_run_count == 8


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
@pytest.mark.parametrize("overlap", ["skip", "buffer_all"])
def test_a_lock_shows_the_arguments_of_an_entry_as_its_options_do(desk, task, overlap):
    backend_of(desk.app).announce("w@h", ttl=60)
    hidden = {"argsrepr": "('a name',)", "kwargsrepr": "{'seconds': '**'}"}
    desk.put(task=task, overlap=overlap, args=["e"], kwargs={"seconds": 4929}, options=hidden)

    desk.tick()

    (lock,) = desk.redis.keys("SINGLETONLOCK_*")
    assert desk.redis.hget(lock, "args") == "('a name',), {'seconds': '**'}"


@contextmanager
def dying_after_publish() -> Iterator[None]:
    def die(**_: Any) -> None:
        raise SystemExit

    after_task_publish.connect(die, weak=False)
    try:
        yield
    finally:
        after_task_publish.disconnect(die)


@pytest.mark.parametrize("task", [PLAIN, SINGLE], ids=["plain", "Singleton"])
def test_every_message_says_of_which_run_it_is(desk, task):
    entry = desk.put(task=task, ago=HOUR + SECOND, options={"headers": {"mine": 1}})
    desk.tick()
    (message,) = desk.messages

    assert message["singlebeat"] == {
        "entry": "e",
        "occurrence": message["id"],
        "nominal": (entry.last_run_at + HOUR).isoformat(timespec="milliseconds"),
        "previous": entry.last_run_at.isoformat(timespec="milliseconds"),
        "kind": "scheduled",
    }
    assert message["mine"] == 1


# ---------------------------------------------------------------- wrong ones


@pytest.mark.parametrize(("lock", "overlap"), [("while_executing", "cancel_other"), ("until_executing", "buffer_all")])
def test_an_overlap_that_contradicts_its_tasks_lock_is_recorded(desk, lock, overlap):
    @desk.app.task(name="own", base=Singleton, lock=lock, shared=False)
    def own(name: str) -> None: ...

    desk.put(task=own.name, overlap=overlap)
    desk.tick()

    assert (desk.messages, desk.decisions) == ([], ["publish_failed"])
    (_, record), *_ = desk.redis.xrange(HISTORY)
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
def test_an_invalid_policy_quarantines_its_entry_until_it_is_fixed(desk, policy, reason):
    entry = desk.put(options={"expires": 60} if "expires" in policy else {})
    desk.redis.hset("redbeat:e", "policy", policy)
    desk.tick(2)

    assert desk.messages == []
    assert json.loads(desk.redis.hget(QUARANTINE, entry.key))["reason"].startswith(reason)
    assert desk.redis.hget("redbeat:e", "policy") == policy

    desk.redis.hset("redbeat:e", "policy", '{"note": "mended"}')
    desk.tick(2)
    assert desk.decisions == ["quarantined", "dispatched"]
    assert not desk.redis.exists(QUARANTINE)
