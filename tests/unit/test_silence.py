"""When the last runs of an entry say that it is silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, schedule

from singlebeat import Entry, Singleton
from singlebeat.beat.silence import silence
from singlebeat.beat.store.history import End, Own, Record

NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
app = Celery(broker="redis://", set_as_current=False)


def end(outcome: str, reason: str = "why") -> End:
    return End(outcome, reason, "", 1.0, "w1", NOON)


def unsent(decision: str = "publish_failed") -> Record:
    return replace(skipped(NOON), decision=decision, reason="TypeError('x')")


def skipped(nominal: datetime) -> Record:
    texts = {"reason": "held by task x", "task_id": "id", "holder": "x", "holder_entry": "", "leader": "", "term": "1"}
    return Record("e", nominal, nominal, "scheduled", "skipped_overlap", end=None, **texts)


def sent(number: int, *ends: End, decision: str = "dispatched", reason: str = "") -> Record:
    """Return the decision of a minute that has sent a run, and the end of that run."""
    about = {"decision": decision, "task_id": f"id {number}", "reason": reason, "holder": ""}
    return replace(skipped(NOON + number * MINUTE), **about, end=next(iter(ends), None))


def entry_of(**fields: Any) -> Entry:
    given = {"task": "t", "schedule": schedule(60), "last_run_at": NOON, "total_run_count": 1, "app": app}
    return Entry("e", **{**given, **fields})


def said(*ends: End, decisions: tuple[Record, ...] = (), is_pending: bool = False, **fields: Any) -> str:
    return silence(entry_of(**fields), Own(decisions, ends, is_pending))


def failed(*outcomes: str, **fields: Any) -> str:
    return said(*map(end, outcomes), **fields)


def test_runs_that_were_all_missed_are_said_with_the_last_reason():
    missed = [unsent("missed"), unsent("missed")]

    assert said(decisions=tuple(missed)) == (
        "its last 2 runs were missed, the last one at 2026-12-01 12:00:00Z: TypeError('x')"
    )
    manual = replace(sent(1), kind="manual")
    assert said(decisions=(manual, *missed)).startswith("its last 2 runs were missed")
    assert said(decisions=(missed[0],)) == said(decisions=(missed[0], manual)) == ""
    assert said(decisions=(*missed, sent(0))) == ""


def test_runs_that_all_failed_are_said_with_the_last_reason():
    at = "the last one at 2026-12-01 12:00:00Z on w1"

    assert failed(*["failure"] * 4) == f"its last 4 runs all failed, {at}: why"
    assert failed("time_limit", "failure") == f"its last 2 runs all failed, {at}: time_limit: why"
    assert (
        said(end("expired", ""), end("expired", ""))
        == f"its last 2 runs all expired before a worker started them, {at}"
    )


def test_runs_whose_results_were_all_not_stored_are_named():
    """They did their work: no failure is said of them."""
    text = failed("result_not_stored", "result_not_stored")

    assert text.startswith("its last 2 runs all returned, and the result backend stored no result of them")
    assert text.endswith("the last one at 2026-12-01 12:00:00Z on w1: why")
    assert failed("result_not_stored", "failure") == failed("result_not_stored", "success") == ""


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param(["failure"], id="one may fail"),
        pytest.param(["success", "failure", "failure"], id="the last one did not"),
        pytest.param(["failure", "failure", "ignored"], id="one before has ended well"),
        pytest.param(["failure", "ran_elsewhere"], id="one ended where nothing is known of it"),
        pytest.param(["failure", "retry", "duplicate_refused", "postponed"], id="only one of them is an end"),
        pytest.param([], id="none is known"),
    ],
)
def test_runs_that_did_not_all_fail_are_not_spoken_of(outcomes):
    assert failed(*outcomes) == ""


def replaced(*numbers: int) -> list[Record]:
    """Return the runs of these minutes, each of which was replaced by a newer one a minute after it was sent."""
    return [sent(number, replace(end("replaced"), at=NOON + (number + 1) * MINUTE)) for number in numbers]


def silence_of(records: Sequence[Record]) -> str:
    ends = [record.end for record in records if record.end]
    return silence(entry_of(), Own((), ends[:4]), records)


def test_an_entry_whose_runs_are_all_replaced_in_their_queue_is_named():
    text = "each waits in its queue until a newer one takes its place (cancel_other, terminate_other). Let it run less"

    assert f"no run of it has started so far: {text}" in silence_of([sent(6), sent(5), *replaced(4, 3, 2, 1)])
    ran = sent(1, end("success"))
    assert f"has started since 2026-12-01 12:00:00Z: {text}" in silence_of([sent(6), *replaced(5, 4, 3, 2), ran])


def test_replaced_runs_are_named_though_no_decision_is_known():
    assert failed(*["replaced"] * 4).startswith("no run of it has started so far")


def test_an_entry_with_a_run_now_and_then_is_not_said_to_be_replaced():
    just_now = sent(1, replace(end("success"), at=NOON + 5.5 * MINUTE))

    assert silence_of([sent(6), *replaced(5, 4, 3, 2), just_now]) == "", "a worker has dropped them after a long run"
    assert silence_of([sent(6), *replaced(5, 4, 3, 2), sent(1)]) == "", "that one runs"
    assert silence_of([sent(6, decision="buffered"), *replaced(5, 4, 3, 2)]) == "", "the last one waits for a run"
    assert silence_of([sent(6), *replaced(5, 4, 3), sent(2, end("success")), *replaced(1)]) == ""


def test_an_entry_that_does_not_run_is_not_spoken_of():
    assert failed("failure", "failure", enabled=False) == ""
    assert failed("failure", "failure", paused=True) == ""


@pytest.mark.parametrize(
    ("every", "later", "expected"),
    [(1, 59, False), (1, 60, True), (60, 239, False), (60, 240, True), (86_400, 86_400, False)],
)
def test_four_occurrences_in_a_row_are_skipped_for_a_minute_at_least(every, later, expected):
    last = skipped(NOON + timedelta(seconds=later))

    text = said(decisions=(last,), schedule=schedule(every))

    assert bool(text) is expected
    if expected:
        assert text.startswith("no run of it was sent since 2026-12-01 12:00:00Z; its last time, 2026-12-01 12:0")
        assert text.endswith(", was skipped: held by task x")


def test_an_entry_whose_run_was_sent_late_is_not_silent():
    late = replace(sent(0), at=NOON + 5 * MINUTE)
    last = skipped(NOON + 6 * MINUTE)

    assert said(decisions=(last, late)) == ""
    assert silence(entry_of(), Own([last], ()), [late]) == ""
    assert "no run of it was sent since 2026-12-01 12:05:00Z" in said(decisions=(skipped(NOON + 9 * MINUTE), late))


def test_an_entry_that_was_always_skipped_is_spoken_of_at_once():
    text = said(decisions=(skipped(NOON),), total_run_count=0)

    assert text == "no run of it was sent so far; its last time, 2026-12-01 12:00:00Z, was skipped: held by task x"


def test_a_triggered_run_is_a_run_that_was_sent():
    """It is no run of the schedule, so the entry itself does not remember it."""
    triggered = replace(sent(0), kind="triggered", task_id="x")
    of_its_own = {"holder_entry": "e"}
    skips = [replace(skipped(NOON + number * MINUTE), **of_its_own) for number in (1, 2, 9)]

    assert said(decisions=(skips[1], skips[0], triggered), total_run_count=0) == ""
    assert silence(entry_of(total_run_count=0), Own(skips[:1], ()), [triggered]) == ""
    long = said(decisions=(skips[2], triggered), total_run_count=0)
    assert long.startswith("no run of it was sent since 2026-12-01 12:00:00Z; its last time, 2026-12-01 12:09:00Z, was")
    assert said(decisions=(skips[2],), total_run_count=0).startswith(
        "no other run of it was sent so far; its last time"
    )


def test_a_schedule_that_raises_hides_no_failures():
    class Broken(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> Any:
            raise KeyError("mine")

    broken = Broken(app=app)

    assert said(end("failure"), end("failure"), decisions=(skipped(NOON + MINUTE),), schedule=broken)


def test_an_entry_that_redbeat_ran_after_its_last_skip_is_not_silent():
    text = said(decisions=(skipped(NOON),), last_run_at=NOON + timedelta(hours=1), total_run_count=0)

    assert text == ""


def test_a_claimed_unrecorded_occurrence_was_not_run_by_redbeat():
    claimed = NOON + timedelta(minutes=2)

    text = said(decisions=(skipped(NOON + MINUTE),), is_pending=True, last_run_at=claimed, total_run_count=0)

    assert text.startswith("no run of it was sent so far")


def test_runs_none_of_which_could_be_sent_are_reported():
    assert said(decisions=(unsent(), unsent())) == "its last 2 runs could not be sent: TypeError('x')"
    assert said(decisions=(unsent(),)) == ""
    assert said(decisions=(unsent(), unsent("dispatched"))) == ""


VANISHED = "runs before the present one: each has probably killed its worker"


@pytest.mark.parametrize(
    ("decisions", "count"),
    [
        pytest.param([sent(3), sent(2), sent(1)], 2, id="three were sent"),
        pytest.param([sent(number) for number in range(9, 0, -1)], 4, id="four are counted at most"),
        pytest.param([skipped(NOON + 3.5 * MINUTE), sent(3), sent(2), sent(1)], 2, id="one was skipped since"),
        pytest.param([sent(4), sent(3), sent(2), sent(1), sent(0), sent(-1, end("success"))], 4, id="once it worked"),
        pytest.param([sent(2), sent(1)], 0, id="one may be lost in a deploy"),
        pytest.param([sent(3), sent(2, end("success")), sent(1)], 0, id="one has ended"),
        pytest.param([sent(3, end("failure")), sent(2), sent(1)], 0, id="the last one has ended"),
        pytest.param([sent(number, decision="buffered") for number in (3, 2, 1)], 0, id="they wait for their turns"),
        pytest.param([sent(number, reason="as task x") for number in (3, 2, 1)], 0, id="code of the app has sent them"),
        pytest.param([], 0, id="none was sent"),
    ],
)
def test_runs_that_end_without_a_record_have_killed_their_workers(decisions, count):
    text = silence(entry_of(), Own(decisions[:1], ()), decisions)

    assert text.startswith(f"no worker has recorded an end of its last {count} {VANISHED}") if count else text == ""
    assert silence(entry_of(), Own(decisions, ()), recorded=False) == "", "no worker records ends"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"expires": 60}, "expired"),
        ({"expires": 61}, "killed"),
        ({"options": {"expires": 3}}, "expired"),
        ({"options": {"expires": "2026-12-01T12:00:00Z"}}, "expired"),
    ],
)
def test_runs_whose_messages_expire_kill_no_worker(fields, word):
    text = silence(entry_of(**fields), Own([sent(3), sent(2), sent(1)], ()))

    assert f": each has probably {word} " in text


def test_runs_that_have_ended_killed_no_worker():
    """The worker's user may not record ends on the schedule's server, but stores results, or at least lives."""
    asked = list[str]()

    def told(ending: str, lives: str) -> str:
        def survived(_: Entry, runs: Sequence[Record]) -> tuple[str, str]:
            asked.extend(record.task_id for record in runs)
            return ending, lives

        return silence(entry_of(), Own([sent(3), sent(2), sent(1)], ()), survived=survived)

    stored, lives = told("the result backend has it", "it lives"), told("", "it lives")

    assert asked == ["id 2", "id 1"] * 2, "the present one may still run"
    assert "before the present one, but the result backend has it: the ends of its runs are not recorded" in stored
    assert "each has probably ended, and that is not recorded, because the worker's user may lack a command" in lives
    assert lives.endswith(": it lives")
    assert "killed" not in stored + lives


def test_runs_whose_messages_may_wait_are_not_surely_killers():
    text = silence(entry_of(), Own([sent(3), sent(2), sent(1)], ()), backlog=lambda entry: f"queue {entry.task}")

    assert text.startswith(
        "no worker has recorded an end of its last 2 runs before the present one: they may still wait in queue t. Or "
        "each has killed its worker "
    )


def test_runs_that_may_overlap_may_all_run_still():
    def work() -> None: ...

    decisions, own = [sent(3), sent(2), sent(1)], Celery(broker="redis://", set_as_current=False)
    for name, options in (("whole", {}), ("start", {"lock": "until_executing"}), ("brief", {"lock_expiry": 5})):
        own.task(work, name=name, base=Singleton, shared=False, **options)

    def is_named(task: str, **fields: Any) -> bool:
        return bool(silence(entry_of(task=task, app=own, **fields), Own(decisions, ())))

    assert (is_named("plain"), is_named("whole")) == (True, True)
    assert [is_named(task, overlap="allow_all") for task in ("plain", "whole")] == [False, False]
    assert (is_named("start"), is_named("brief"), is_named("start", overlap="buffer_all")) == (False, False, False)
