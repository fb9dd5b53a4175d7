"""Sentences about what happened, from facts; what needs real processes is in ``tests/incidents/test_incidents.py``."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.schedules import schedule

from singlebeat import Entry, clocked
from singlebeat.beat.delivery import Busy, Delivery, Reader
from singlebeat.beat.entries.definition import Meta
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.explain import Facts, HeldLock, explain
from singlebeat.beat.lost_messages import Found, Waiting
from singlebeat.beat.result_backend import StoredEnd
from singlebeat.beat.status import ScheduleStatus
from singlebeat.beat.store.history import End, Record
from singlebeat.locks.base import Ref
from singlebeat.locks.redis import RETIRED

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
app = Celery(broker="redis://", set_as_current=False)


def record(nominal: datetime, decision: str = "dispatched", *, kind: str = "scheduled", **fields: Any) -> Record:
    texts = {"reason": "", "task_id": "id", "holder": "", "holder_entry": "", "leader": "h:1", "term": "1"}
    texts |= {"end": None, "at": nominal + timedelta(seconds=1), **fields}
    return Record(entry="e", nominal=nominal, kind=kind, decision=decision, **texts)


def said(*records: Record, at: datetime | None = None, **fields: Any) -> str:
    leader = {"host": "h", "pid": "1", "term": "1", "since": "now"}
    entry = Entry("e", "t", schedule(3600), app=app, last_run_at=NOON)
    facts: dict[str, Any] = {
        "name": "e",
        "entry": entry,
        "state": ScheduleStatus(leader, [], True, 5.0, 1, 0, 0, 0.0, 0, {}),
        "records": records,
        "locks": {},
        "running": {},
        "known_tasks": frozenset({"t"}),
        "now": NOON + HOUR / 2,
        **fields,
    }
    return "\n".join(explain(Facts(**facts), at))


def test_a_run_that_ended():
    end = End("failure", "ValueError('x')", "", 1.25, "w1", NOON)

    assert "It ended at 2026-12-01 12:00:00Z after 1.2 s on w1, failure: ValueError('x')." in said(
        record(NOON, end=end)
    )


def test_a_broker_that_is_away_is_named_though_no_run_is_claimed():
    """The run before waits in that broker, so that no other is claimed."""
    away = "the broker redis://b does not answer: Name or service not known"
    state = ScheduleStatus({"host": "h", "pid": "1"}, [], True, 5.0, 1, 2, 2, 12.0, 0, {}, entry_lag=12.0)

    told = said(record(NOON), state=state, broker_away=away, running=None, known_tasks=None)

    assert "The broker redis://b does not answer: Name or service not known. So it is not known" in told
    assert "Beat is behind" in told
    assert "see the log of beat" not in told


def test_an_expired_message_is_explained_by_the_clocks():
    end = End("expired", "", "", None, "w1", NOON)
    wrong = "the clock of worker w1 is about +600 s off that of the schedule's server"

    assert f"T{wrong[1:]}: set up NTP there." in said(record(NOON, end=end), wrong_clocks=[wrong])
    assert "both are right: the message has waited in its queue for too long" in said(record(NOON, end=end))


def test_a_date_of_expiry_that_has_passed_is_named():
    end = End("expired", "", "", None, "w1", NOON)
    past, coming = (
        Entry("e", "t", schedule(3600), app=app, last_run_at=NOON, options={"expires": f"20{year}-01-01T00:00:00Z"})
        for year in (20, 99)
    )

    at_once = Entry("e", "t", schedule(3600), app=app, last_run_at=NOON, options={"expires": -5})
    assert "expire when they are sent (expires: -5 s)" in said(record(NOON, end=end), entry=at_once)
    over = "Its messages expire at 2020-01-01T00:00:00Z, which has passed: none can start any more."
    assert said(record(NOON, end=end), entry=past).count(over[:-1]) == 2
    assert "has passed" not in said(record(NOON, end=end), entry=coming)


def test_the_end_of_the_run_that_was_in_the_way_is_told():
    end = End("worker_lost", "signal 9", "", 1.0, "w1", NOON)
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    text = said(skip, holder_end=end)

    assert "does not hold the lock any more" in text
    assert "It ended at 2026-12-01 12:00:00Z after 1.0 s on w1, worker_lost: signal 9." in text


def test_a_holder_without_an_end_has_probably_lost_its_worker():
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    vanished, unknown = said(skip, holder_vanished=True), said(skip)

    died = "need not wait for it. No worker has recorded its end: its worker has probably died, or lacks its broker."
    assert died in vanished
    assert "recorded its end" not in unknown


def test_a_paused_entry_whose_only_time_has_passed_does_not_go_on():
    only = Entry("e", "t", clocked(NOON), app=app, paused=True, last_run_at=None)
    disabled = Entry("e", "t", clocked(NOON), app=app, enabled=False, last_run_at=None)
    hourly = Entry("e", "t", schedule(3600), app=app, paused=True, last_run_at=NOON)

    over = "None of its times is to come, because its only time, 2026-12-01 12:00:00Z, has passed"
    trigger = "To run it all the same: celery singlebeat trigger e"
    for entry in (only, disabled):
        text = said(entry=entry)
        assert over in text
        assert trigger in text
        assert "To go on" not in text
    assert "To go on: celery singlebeat resume e" in said(entry=hourly)


def test_a_run_elsewhere_is_not_said_to_have_ended_when_beat_noticed_it():
    """No worker has recorded that end: the time is that of the record, and no worker is known."""
    end = End("ran_elsewhere", "it ended with SUCCESS", "", None, "", NOON)
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    text = said(skip, holder_end=end)

    assert (
        "need not wait for it. Its worker left its lock behind, and beat freed its lock at 2026-12-01 12:00:00Z" in text
    )
    assert "Z: it ended with SUCCESS." in text
    assert " on ," not in text
    nameless = replace(end, outcome="revoked")
    assert "It ended at 2026-12-01 12:00:00Z, revoked: it ended" in said(skip, holder_end=nameless)
    assert "It ended at 2026-12-01 12:00:00Z, revoked: it ended" in said(record(NOON, end=nameless))


def test_an_end_that_its_worker_learned_of_late_says_both_times():
    end = End("success", "", NOON.isoformat(), 3.0, "w1", NOON + timedelta(seconds=44))

    text = said(record(NOON, end=end))

    assert "It ended after 3.0 s on w1, success. Its worker learned of that at 2026-12-01 12:00:44Z" in text
    assert "It ended at 2026-12-01 12:00:44Z after 40.0 s on w1" in said(record(NOON, end=replace(end, duration=40.0)))


def test_times_that_the_servers_clock_cannot_have_shown_are_left_out():
    """Ids of records never go back: after the clock was set back they tell a time that has not come yet."""
    end = End("success", "", "", 1.25, "w1", NOON + HOUR)

    text = said(record(NOON, end=end, at=NOON + HOUR))
    assert "The run for 2026-12-01 12:00:00Z was sent as task id." in text
    assert "It ended after 1.2 s on w1, success." in text

    text = said(record(NOON, end=replace(end, at=NOON), at=NOON + HOUR / 4))  # once the clock has caught up
    assert "was sent as task id." in text
    assert "It ended after 1.2 s on w1, success." in text


def test_a_message_lost_at_a_time_that_has_not_come_is_said_without_it():
    end = End("message_lost", "gone", "", None, "", NOON + HOUR)

    assert "Its message was lost, and beat freed its lock: gone." in said(record(NOON, end=end))


def test_a_lock_renewed_before_the_clock_was_set_back_is_no_proof_of_life():
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")
    lock = HeldLock("k", "x", "running", 17_990.0, 30.0, worker="w1@h", is_ahead=True)

    text = said(skip, locks={"x": lock})

    assert "renewed by w1@h before the clock of the locks' server was set back" in text
    assert "lived then" not in text
    assert "ends by itself within 30 s of the next call that meets it" in text


def test_a_worker_that_did_not_answer_once_is_not_said_to_be_gone():
    """The answers have a second, which a busy machine may need."""
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    text = said(skip, locks={"x": HeldLock("k", "x", "running", 29.0, 30.0, worker="w1@h")})

    assert (
        "its lock was renewed 1 s ago by w1@h, so its worker lived then. That worker did not answer in time: " in text
    )
    assert "it or its host is busy" in text
    assert "Ask again to know more. If it has died, the lock ends by itself within 30 s." in text


def test_a_lock_that_names_no_worker_yet_accuses_none():
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    text = said(skip, locks={"x": HeldLock("k", "x", "running", 29.5, 30.0)}, answering=["w1@h"])

    assert "no worker that answers ran it when asked: it had just begun or ended" in text
    assert "did not answer in time" not in text
    assert "That worker" not in text


def test_workers_without_remote_control_are_asked_no_more():
    held = HeldLock("k", "x", "running", 29.0, 30.0, worker="w1@h")
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    text = said(skip, locks={"x": held}, known_tasks=frozenset(), is_asked=False)

    assert text.count("Workers answer no question while worker_enable_remote_control is off.") == 2
    assert "Ask again" not in text
    assert "No worker answers" not in text


def test_a_worker_that_answers_and_runs_nothing_is_not_said_to_be_dead():
    """It could not free the lock, or was started again under its name."""
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")
    known, unknown = (HeldLock("k", "x", "running", 5.0, 30.0, 25.0, worker) for worker in ("w1@h", ""))
    renewed = HeldLock("k", "x", "running", 29.0, 30.0, worker="w1@h")

    text = said(skip, locks={"x": known}, answering={"w1@h"})
    assert "runs it: w1@h answers, so the run has ended there and its lock could not be freed (the log of" in text
    assert "The lock ends by itself in 5 s" in text
    assert "probably died" not in text
    two = {"w1@h": 9.0, "w2@h": 3.0, "long gone": 90.0, "for days": 4 * RETIRED + 3.0}
    text = said(skip, locks={"x": unknown}, answering={"w1@h", "w2@h"}, last_seen=two)
    assert "runs it: its worker is one of w1@h, w2@h, which answer, so the run has ended there" in text
    assert "probably died" in said(skip, locks={"x": unknown}, answering={"w1@h"}, last_seen=two)
    ended = {"w1@h": 9.0, "w2@h": RETIRED + 3.0}
    assert "probably died" in said(skip, locks={"x": unknown}, answering={"w1@h"}, last_seen=ended)
    assert "probably died" in said(skip, locks={"x": known}, answering={"w2@h"}, last_seen=two)
    text = said(skip, locks={"x": renewed}, answering={"w1@h"})
    assert "That worker answers, and did not run it when it was asked: the run began or ended just then, or" in text
    assert "did not answer in time" not in text


def test_a_lock_left_by_a_run_that_ended_names_no_dead_worker():
    end = End("success", "", "", 12.0, "w1", NOON)
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")
    left, renewed = (HeldLock("k", "x", "running", left, 30.0) for left in (5.0, 29.0))

    text = said(skip, holder_end=end, locks={"x": left})

    assert "Task x has ended (success), and its lock was left" in text
    assert "The lock ends by itself in 5 s. To free it now: celery singlebeat unlock x" in text
    assert "probably died" not in text
    assert "has ended" not in said(skip, holder_end=end, locks={"x": renewed}), "it may run again"


def test_a_run_of_which_no_end_is_known():
    assert "No end of it was recorded" in said(record(NOON))
    assert "It runs now, on w1." in said(record(NOON), running={"id": "w1"})


def test_a_run_without_an_end_is_explained_by_its_readers():
    reader = Reader(frozenset({"celery"}), frozenset({"t"}), 1, [])
    delivery = Delivery.of("celery", {"old@h": reader})

    text = said(record(NOON), delivery=delivery, without_singlebeat=["old@h"])

    assert "No end of it was recorded: no singlebeat is in old@h, or its settings name no server for locks" in text
    assert "has died" not in text
    assert "no singlebeat is in" not in said(record(NOON), delivery=delivery, without_singlebeat=["other@h"])


def test_a_run_whose_lock_is_gone_while_later_ones_ran_is_over():
    later = record(NOON + HOUR, task_id="later", end=End("success", "", "", 1.0, "w1", NOON + HOUR))

    text = said(later, record(NOON), at=NOON)
    assert (
        "later runs have started: its worker has died while it ran, or lacks its broker. Or it has ended, and" in text
    )
    assert "recorded: the schedule's server did not take the record, or the worker has another redbeat_redis" in text
    assert "it waits in its queue, or its worker has died" in said(record(NOON), at=NOON)
    gone = "its lock is gone, which it would keep in its queue: its worker has died while it ran, or lacks its broker"
    assert gone in said(record(NOON), keeps_lock_for=3600.0)
    for fields in ({"keeps_lock_for": 60.0}, {"keeps_lock_for": 3600.0, "without_singlebeat": ["old@vm"]}):
        assert gone not in said(record(NOON), **fields)
    beside = Entry("e", "t", schedule(3600), app=app, last_run_at=NOON, overlap="allow_all")
    assert "it waits in its queue, or its worker has died" in said(later, record(NOON), at=NOON, entry=beside)


def test_an_end_in_the_result_backend_is_said_with_its_error():
    stored = StoredEnd("FAILURE", NOON, "NotRegistered, a worker that does not know the task has dropped its message")

    text = said(record(NOON), stored_end=stored)

    assert "it ended at 2026-12-01 12:00:00Z with FAILURE: NotRegistered, a worker that does not know the task" in text
    assert "with SUCCESS." in said(record(NOON), stored_end=StoredEnd("SUCCESS", None))


def test_one_of_the_readers_of_a_queue_that_lacks_a_task_is_named():
    readers = {name: Reader(frozenset({"celery"}), frozenset({task}), 1, []) for name, task in (("a", "t"), ("b", "u"))}

    assert "\nWorker b reads queue celery and does not know the task t: it drops its share" in said(
        record(NOON), delivery=Delivery.of("celery", readers)
    )


def test_a_run_that_waits_is_said_to_have_expired():
    short, long = (
        Entry("e", "t", schedule(3600), app=app, last_run_at=NOON, options={"expires": seconds})
        for seconds in (60, 7200)
    )
    expired = "If it still waits, it has expired (expires: 60 s): a worker that gets its message drops it."

    assert expired in said(record(NOON), entry=short)
    assert expired in said(record(NOON), entry=short, locks={"id": HeldLock("k", "id", "queued", 20.0, 30.0)})
    assert "has expired" not in said(record(NOON), entry=long)
    assert "has expired" not in said(record(NOON), entry=short, running={"id": "w1"})
    assert "has expired" not in said(
        record(NOON), entry=short, locks={"id": HeldLock("k", "id", "running", 20.0, 30.0)}
    )


def test_a_queue_that_no_worker_reads_is_explained_once():
    unread = Delivery.of("celery", {"w1@h": Reader(frozenset({"other"}), frozenset({"t"}), 1, [])})
    waiting = Waiting(Ref("k", "x"), "t", 0.0, 60.0, 3600.0, True, "celery", "", "e", 0.0, "", None)
    found = Found(waiting, "", "its message waits in queue celery")
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")
    locks = {"x": HeldLock("k", "x", "queued", 3600.0, 30.0)}

    assert said(skip, delivery=unread).count("o worker that answers reads queue celery") == 1
    text = said(skip, delivery=unread, locks=locks, found=found, found_in=unread)
    assert text.count("o worker that answers reads queue celery") == 1


def test_a_result_backend_that_hangs_is_named_for_the_run_in_the_way():
    """The body of that run may be over: its worker waits for the backend."""
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")

    text = said(skip, running={"x": "w1@h"}, results_away="the result backend does not answer")

    assert "Task x runs now, on w1@h.\nThe result backend does not answer. A worker waits for it" in text


def test_a_message_at_a_busy_worker_is_said_to_wait_for_that_worker():
    """Others that read the queue may be free: they never get it."""
    busy = Reader(frozenset({"celery"}), frozenset({"t"}), 1, [Busy("slow", "y", NOON)])
    free = Reader(frozenset({"celery"}), frozenset({"t"}), 1, [])
    found = Found(
        Waiting(Ref("k", "x"), "t", 0.0, 60.0, 3600.0, True, "celery", "", "e", 0.0, "w1@h", 7.0),
        "",
        "worker w1@h had its message 7 s ago, when it renewed the lock",
    )
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")
    about = {"locks": {"x": HeldLock("k", "x", "queued", 3600.0, 30.0)}, "found": found}

    def among(**workers: Reader) -> str:
        delivery = Delivery.of("celery", {f"{name}@h": each for name, each in workers.items()})
        return said(skip, **about, found_in=delivery, delivery=delivery)

    behind = (
        "The only slot of worker w1@h is busy with slow, since 2026-12-01 12:00:00Z: the message waits there, though "
        "other workers may be free. With worker_prefetch_multiplier = 1 a worker receives fewer messages ahead"
    )
    assert behind in among(w1=busy, w2=free)
    alone = among(w1=busy)
    assert "since 2026-12-01 12:00:00Z: the message waits there.\n" in alone
    assert alone.count("is busy with slow") == 1
    assert "the message waits there" not in among(w1=free, w2=busy)
    about["found"] = found._replace(lock=replace(found.lock, delay=60.0))
    delayed = among(w1=busy, w2=free)
    assert "the message waits there" not in delayed, "it waits for its time, too"
    assert (
        "sent with a countdown of 60 s, which counts by the clock of the host that sent it: a worker holds" in delayed
    )
    leader = {"host": "h", "pid": "1", "ahead": "600"}
    about["state"] = ScheduleStatus(leader, [], True, 5.0, 1, 0, 0, 0.0, 0, {})
    assert "The clock of h, which leads, is +600.0 s off" in among(w1=busy)


def test_a_late_run_of_a_schedule_with_one_time_stands_for_no_other():
    at_once = record(NOON, kind="catch_up", end=End("success", "", "", 1.0, "w1", NOON))
    late = replace(at_once, at=NOON + timedelta(minutes=1))
    once = Entry("e", "t", clocked(NOON), app=app)

    assert "It was sent late.\n" in said(late, entry=once)
    assert "stands for" not in said(late, entry=once)
    assert "It was sent late, and stands for all times that passed before it." in said(late)
    assert "\nIt stands for all times that passed before it." in said(at_once), "the last one of them was in time"
    assert "stands for" not in said(at_once, entry=once)


def test_a_run_that_code_of_the_app_has_sent_has_no_known_end():
    text = said(record(NOON, reason="its task's own apply_async sent it as task x"))

    assert "sent it as task x" in text
    assert "workers record no end of it" in text
    assert "No end of it was recorded" not in text


def test_a_waiting_run_is_explained_with_the_other_waiting_runs():
    waits = [record(NOON - at * HOUR, "buffered", reason="waits for task x", task_id=f"id{at}") for at in range(4)]
    ended = record(NOON - 4 * HOUR, end=End("success", "", "", 1.0, "w1", NOON))
    text = said(*waits, ended, running={"id3": "w1"})

    assert "It met an equal call and had to wait for its turn: it waited for task x." in text
    assert "It waits for its turn, as do 2 other runs of this entry, and has not started" in text
    assert "No end of it was recorded" not in text
    assert "as does 1 other run of this entry" in said(*waits[:2])
    assert "It waits for its turn, and has not started" in said(waits[0])


def test_a_time_that_no_beat_saw_is_covered_by_the_catch_up_after_it():
    text = said(record(NOON + 5 * HOUR, kind="catch_up"), record(NOON), at=NOON + 2.5 * HOUR, now=NOON + 6 * HOUR)

    assert "Nothing was decided about 2026-12-01 14:00:00Z: no beat ran then." in text
    assert "for 2026-12-01 17:00:00Z, stands for all times that had passed" in text


def test_a_time_before_the_history_begins():
    assert "says nothing about 2026-12-01 11:00:00Z: it begins at 2026-12-01 12:00:00Z" in said(
        record(NOON), at=NOON - HOUR
    )
    assert "it is empty" in said(at=NOON)


def test_a_decision_is_explained():
    assert "left out: the entry is paused (audit)" in said(record(NOON, "paused", reason="audit"))
    assert "never can be: TypeError()" in said(record(NOON, "publish_failed", reason="TypeError()"))
    assert "does not hold the lock any more" in said(record(NOON, "skipped_overlap", holder="x", reason="held by x"))


def test_a_skip_names_the_entry_whose_run_was_in_the_way():
    def skipped(entry: str) -> str:
        return said(record(NOON, "skipped_overlap", holder="x", holder_entry=entry, reason="held by x"))

    assert "was skipped: the one before it still held the lock (held by x)." in skipped("e")
    assert "was skipped: an equal call by entry other still held the lock (held by x)." in skipped("other")
    assert "was skipped: an equal call still held the lock (held by x)." in skipped(""), "a program may have sent it"


def test_workers_that_could_not_be_asked_are_not_spoken_of():
    text = said(record(NOON), running=None, known_tasks=None)

    assert "answers" not in text


def test_the_outlook():
    assert "It runs next for 2026-12-01 13:00:00Z, in 30 min." in said()
    assert "It is due now, for 2026-12-01 13:00:00Z." in said(now=NOON + HOUR)
    assert "13:00:00Z, in 19 h 11 min." in said(now=NOON + HOUR - timedelta(seconds=69_115))


def test_an_unknown_task_is_explained_with_the_nearest_name():
    entry = Entry("e", "shop.bil", schedule(3600), app=app, last_run_at=NOON)
    known = frozenset({"shop.bill", "celery.ping"})

    assert "knows the task shop.bil: a worker that gets the message drops it. Did you mean shop.bill? " in said(
        record(NOON), entry=entry, known_tasks=known
    )
    assert "Did you mean" not in said(record(NOON), entry=entry, known_tasks=frozenset({"other"}))


def test_under_redbeat_no_policy_holds_and_pending_runs_wait():
    entry = Entry("e", "t", schedule(3600), app=app, last_run_at=NOON, paused=True, max_runs=1).with_past(Meta(NOON, 1))
    state = ScheduleStatus({}, [], True, 900.0, 1, 0, 0, 0.0, 1, {})
    about = {"state": state, "pending": Occurrence("id", NOON.timestamp(), None), "running": None}

    text = said(entry=entry, **about)
    assert "A beat of RedBeat leads. It knows no policy" in text
    assert "The run for 2026-12-01 12:00:00Z is claimed and waits until a beat of singlebeat leads, as task id." in text
    assert "the broker does not answer" not in text
    assert "It is paused, and runs all the same" in text

    entry.policy = EntryPolicy(max_runs=1)
    assert "It runs next for 2026-12-01 13:00:00Z, in 30 min." in said(entry=entry, **about)
    assert "It is finished" in said(entry=entry)


def test_a_killed_redbeat_is_explained_with_a_remedy():
    text = said(state=ScheduleStatus({}, [], True, 900.0, 3, 2, 2, 42.0, 0, {}, entry_lag=42.0))

    assert "A beat of RedBeat holds the lock, which has no name, and 2 entries are overdue, the first by 42 s" in text
    assert "Its lock ends by itself in 900 s. If no process of RedBeat runs any more, end it now: " in text
    assert "Beat is behind" not in text


def test_a_leader_that_renews_no_longer_is_explained():
    leader = {"host": "vm", "pid": "7", "lease_ms": "10000"}
    state = ScheduleStatus(leader, [], True, 2.0, 3, 1, 1, 7.0, 0, {}, entry_lag=7.0)

    text = said(state=state)
    assert (
        "The leader, vm, pid 7, has not renewed the lock for 8 s, and 1 entry is overdue, the first by 7 s: it was "
        "killed, hangs, or does not reach the schedule's server. Unless it renews the lock, that ends in 2 s; no beat "
        "stands by: start one."
    ) in text
    assert "Beat is behind" not in text
    assert "in 2 s; a standby takes over then." in said(state=replace(state, standbys=[{"host": "vm"}]))
    assert "Beat is behind" in said(state=replace(state, lease_left=7.0))


def test_a_skipped_run_names_the_workers_that_free_no_lock():
    skip = record(NOON, "skipped_overlap", holder="x", reason="held by x")
    queued, running = (HeldLock("k", "x", state, 20.0, 30.0) for state in ("queued", "running"))
    named = "No singlebeat is in old@vm, or its settings name no server for locks"

    told = said(skip, locks={"x": queued}, without_singlebeat=["old@vm"])
    assert named in told
    assert named not in said(skip, locks={"x": running}, without_singlebeat=["old@vm"])
    assert "No singlebeat" not in said(skip, locks={"x": queued})


def test_a_paused_entry_waits_for_no_slot():
    busy = Delivery.of(
        "celery", {"w1@h": Reader(frozenset({"celery"}), frozenset({"t"}), 1, [Busy("t", "other", NOON)])}
    )

    assert "a message there waits" in said(record(NOON), delivery=busy)
    assert "a message there waits" not in said(record(NOON, "paused", task_id=""), delivery=busy)
