"""What a decision about an entry asks of a user's own schedule class: pure, every moment is made up."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import BaseSchedule, crontab, schedstate, schedule

from singlebeat import Entry, clocked
from singlebeat.beat.decide import claim_for
from singlebeat.beat.entries.definition import Meta
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.timetable import PARKED, Timetable
from singlebeat.beat.leadership.clock_guard import Jump
from singlebeat.beat.store.claims import Claim, Stored
from tests.system.apps import make_app

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class Estimating(BaseSchedule):
    """Comes each minute, and counts the questions that it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[tuple[datetime, datetime]] = []

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        self.questions.append((last_run_at, self.now()))
        return max(timedelta(), last_run_at + MINUTE - self.now())


class Both(Estimating):
    """Answers each of both questions."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        self.questions.append((last_run_at, self.now()))
        left = (last_run_at + MINUTE - self.now()).total_seconds()
        return schedstate(left <= 0, left if left > 0 else 60.0)


class Hours(Both):
    """Comes each minute from nine to five, as an office does: its times are not regular."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        self.questions.append((last_run_at, self.now()))
        following = last_run_at.replace(second=0, microsecond=0) + MINUTE
        if following.hour < 9:
            following = following.replace(hour=9, minute=0)
        elif following.hour >= 17:
            following = following.replace(hour=9, minute=0) + DAY
        return following - self.now()

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = self.remaining_estimate(last_run_at).total_seconds()
        return schedstate(left <= 0, left if left > 0 else 60.0)


@pytest.fixture
def app():
    with make_app("redis://127.0.0.1:1") as app:
        yield app


def decide(app, when: BaseSchedule, *, last: datetime, now: datetime = NOW, **wishes: object) -> Claim:
    entry = Entry("e", "shop.tick", when, app=app)
    stored = Stored(entry.key, 1.0, (), entry, Meta(last, 1), EntryPolicy.of(wishes), None)
    return claim_for(stored, now, zone=UTC, prefix="")


def claim_of(
    app, when: BaseSchedule, past: Meta, now: datetime, *, pending: Occurrence | None = None, jump: Jump | None = None
) -> Claim:
    entry = Entry("e", "shop.tick", when, app=app)
    stored = Stored(entry.key, now.timestamp(), (), entry, past, EntryPolicy(), pending)
    return claim_for(stored, now, zone=UTC, prefix="", jump=jump)


@pytest.mark.parametrize(("kind", "each"), [(Estimating, 1), (Both, 2)])
@pytest.mark.parametrize(("missed", "times"), [(1, 2), (2, 3), (3, 3), (60 * 24 * 365, 3)], ids=str)
def test_a_decision_asks_for_at_most_three_regular_times(app, kind, each, missed, times):
    when = kind()

    claim = decide(app, when, last=NOW - missed * MINUTE - SECOND)

    assert claim.occurrence is not None
    assert claim.occurrence.nominal == (NOW - SECOND).timestamp()
    assert claim.next_score == (NOW - SECOND + MINUTE).timestamp()
    assert len(when.questions) == times * each


@pytest.mark.parametrize("late", [HOUR, 20 * HOUR, 7 * DAY, 365 * DAY], ids=str)
def test_no_decision_asks_the_same_question_twice(app, late):
    when = Hours()

    claim = decide(app, when, last=NOW - late, jitter=30)

    assert claim.occurrence is not None
    assert claim.occurrence.nominal in {NOW.timestamp(), (NOW - MINUTE).timestamp()}
    assert len(when.questions) == len(set(when.questions))


@pytest.mark.parametrize(("late", "times"), [(HOUR, 13), (365 * DAY, 40)], ids=str)
@pytest.mark.parametrize("hours", [5, -3, 0, 4.5], ids=str)
def test_a_decision_asks_for_a_bounded_number_of_irregular_times(app, late, times, hours):
    """Minutes in office hours are missed."""
    when, now = Hours(), NOW + hours * HOUR + 30 * MINUTE

    claim = decide(app, when, last=now - late, now=now)

    assert claim.occurrence is not None
    assert claim.occurrence.nominal == min(now, NOW.replace(hour=16, minute=59)).timestamp()
    assert len(when.questions) <= 2 * times


@pytest.mark.parametrize("late", [timedelta(), 3.5 * MINUTE], ids=["in time", "late"])
@pytest.mark.parametrize("when", [schedule(60), crontab()], ids=["interval", "crontab"])
def test_jitter_moves_no_nominal_time_of_an_entry_that_has_yet_to_start(app, when, late):
    start = NOW + HOUR
    entry, policy = Entry("e", "shop.tick", when, app=app), EntryPolicy.of({"start_time": start, "jitter": 20})
    new = Stored(entry.key, NOW.timestamp(), (), entry, Meta(), policy, None)
    waits = claim_for(new, NOW, zone=UTC, prefix="")
    assert waits.occurrence is None
    placed = replace(new, score=waits.next_score)

    claim = claim_for(placed, datetime.fromtimestamp(waits.next_score, UTC) + late, zone=UTC, prefix="")

    assert start.timestamp() < waits.next_score < (start + 20 * SECOND).timestamp()
    assert claim.occurrence is not None
    assert claim.occurrence.nominal == (start + late // MINUTE * MINUTE).timestamp()


@pytest.mark.parametrize("when", [crontab(hour=12, minute=0), clocked(NOW)], ids=["daily", "once"])
def test_a_time_that_a_clock_ahead_has_missed_or_skipped_comes(app, when):
    past = Meta(NOW, 3, since=NOW - 5 * HOUR, sent=NOW - DAY)

    claim = claim_of(app, when, past, NOW + SECOND)

    assert claim.occurrence is not None
    assert claim.occurrence.nominal == NOW.timestamp()


AHEAD = NOW + 5 * HOUR  # the time that a clock which was ahead has decided


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("when", [crontab(minute=0), crontab(minute=0, hour=17)], ids=["hourly", "daily"])
def test_what_a_clock_ahead_has_sent_is_not_sent_again(app, when, pending):
    times = [NOW + n * HOUR for n in range(1, 7)] if when.hour != {17} else [AHEAD, AHEAD + DAY]
    past = Meta(AHEAD, 3, sent=None if pending else AHEAD)
    claim = claim_of(app, when, past, NOW, pending=Occurrence.of("", "e", AHEAD) if pending else None)
    assert (claim.occurrence, claim.decision) == (None, None)

    found = []
    for time in times:
        stored = Meta.decode(claim.meta.encode(), claim.meta.encode_since(), repr((time - HOUR).timestamp()))
        assert claim.next_score == time.timestamp()
        claim = claim_of(app, when, stored, time + SECOND)
        found.append("run" if claim.occurrence else claim.decision.outcome)
        assert (claim.occurrence or claim.decision.occurrence).nominal == time.timestamp()

    assert found == ["run_before" if time == AHEAD else "run" for time in times]
    assert claim.meta.ahead is None


@pytest.mark.parametrize("pending", [False, True])
def test_an_only_time_that_a_clock_ahead_has_sent_is_over_once_it_is_sent(app, pending):
    past = Meta(AHEAD, 1, sent=None if pending else AHEAD)

    claim = claim_of(app, clocked(AHEAD), past, NOW, pending=Occurrence.of("", "e", AHEAD) if pending else None)

    assert claim.next_score == (AHEAD.timestamp() if pending else PARKED)


@pytest.mark.parametrize("sent", [None, NOW - HOUR], ids=["by RedBeat", "earlier"])
def test_a_time_that_was_not_sent_by_a_clock_ahead_comes(app, sent):
    when = crontab(minute=0, hour=17)
    reset = claim_of(app, when, Meta(AHEAD, 3, sent=sent), NOW)

    claim = claim_of(app, when, Meta.decode(reset.meta.encode(), reset.meta.encode_since()), AHEAD + SECOND)

    assert claim.occurrence is not None
    assert claim.occurrence.nominal == AHEAD.timestamp()


def test_times_that_no_beat_has_seen_after_a_clock_ahead_are_made_up_for(app):
    reset = claim_of(app, crontab(minute=0), Meta(AHEAD, 3, sent=NOW), NOW)

    claim = claim_of(app, crontab(minute=0), replace(reset.meta, sent=NOW), AHEAD + HOUR / 2)

    assert claim.occurrence is not None
    assert (claim.occurrence.nominal, claim.occurrence.kind) == (AHEAD.timestamp(), "catch_up")


def test_a_time_before_that_which_a_clock_ahead_has_sent_is_made_up_for(app):
    """For a run that came too early stands for none before it."""
    when = crontab(minute=0, hour="16,17")
    reset = claim_of(app, when, Meta(AHEAD, 3, sent=AHEAD), NOW)

    first = claim_of(app, when, replace(reset.meta, sent=AHEAD), AHEAD + MINUTE)
    then = claim_of(app, when, replace(first.meta, sent=AHEAD - HOUR), AHEAD + MINUTE)

    assert first.occurrence is not None
    assert (first.occurrence.nominal, first.occurrence.kind) == ((AHEAD - HOUR).timestamp(), "catch_up")
    assert first.next_score == AHEAD.timestamp()
    assert (then.occurrence, then.decision.outcome) == (None, "run_before")


@pytest.mark.parametrize("policy", [{}, {"paused": True}])
def test_a_time_sent_by_a_clock_ahead_stays_known_behind_a_pause(app, policy):
    """Of an entry that comes from a file, too, which has no last run here."""
    sent, skipped = AHEAD, AHEAD + HOUR
    reset = claim_of(app, crontab(minute=0), Meta(skipped, 3, sent=sent), NOW)
    assert reset.meta.ahead == sent

    entry = Entry("e", "shop.tick", crontab(minute=0), app=app)
    past = Meta(None, 3, NOW, sent)
    stored = Stored(entry.key, NOW.timestamp(), (), entry, past, EntryPolicy.of(policy), None)
    claim = claim_for(stored, NOW + HOUR, zone=UTC, prefix="")

    assert claim.meta.ahead == sent


def test_a_run_that_is_made_up_for_names_no_later_one_as_the_last(app):
    reset = claim_of(app, crontab(minute=0), Meta(AHEAD, 3, sent=AHEAD), NOW)

    claim = claim_of(app, crontab(minute=0), replace(reset.meta, sent=AHEAD), NOW + HOUR)

    assert (claim.occurrence.nominal, claim.occurrence.previous) == ((NOW + HOUR).timestamp(), None)


def test_a_time_that_was_not_sent_again_is_the_last_sent_run(app):
    reset = claim_of(app, crontab(minute=0, hour=17), Meta(AHEAD, 3, sent=AHEAD), NOW)

    claim = claim_of(app, crontab(minute=0, hour=17), replace(reset.meta, sent=NOW), AHEAD)

    assert claim.decision.outcome == "run_before"
    assert float(claim.decision.sent) == AHEAD.timestamp()


def test_a_clock_that_was_behind_keeps_what_another_has_sent(app):
    """One was ahead before, and its time is yet to come."""
    last, behind = NOW - 10 * MINUTE, NOW - 5 * HOUR
    past = Meta(last, 5, since=behind, ahead=AHEAD, sent=last)

    claim = claim_of(app, crontab(minute=0), past, NOW + SECOND, jump=Jump(behind, NOW))

    assert claim.meta.ahead == AHEAD


def test_a_clock_that_comes_right_in_two_steps_sends_the_last_time_once(app):
    when = crontab(minute=0, hour="9,11")
    day = NOW.replace(hour=0)
    sent = [day + 2 * DAY + 9 * HOUR]
    back = claim_of(app, when, Meta(sent[0], 1, sent=sent[0]), day + DAY + 10 * HOUR)
    sent.append(day + DAY + 11 * HOUR)
    run = claim_of(app, when, replace(back.meta, sent=sent[0]), sent[1] + MINUTE)
    assert (run.occurrence.nominal, run.meta.ahead) == (sent[1].timestamp(), sent[0])

    claim = claim_of(app, when, replace(run.meta, sent=sent[1]), day + 10 * HOUR)

    assert claim.meta.ahead == sent[0]


@pytest.mark.parametrize("when", [schedule(3600), crontab(minute="5-59/20"), crontab(minute=50)], ids=str)
@pytest.mark.parametrize("sent", [None, NOW - 10 * MINUTE], ids=["never", "sent"])
def test_a_clock_that_was_behind_for_a_moment_lets_nothing_come_again(app, when, sent):
    """It took the past of the entry for wrong."""
    right = Meta(NOW - 10 * MINUTE, 1, sent=sent)
    behind = NOW - 30 * DAY
    reset = claim_of(app, when, right, behind)
    jump = Jump(behind + MINUTE, NOW)

    claim = claim_of(app, when, replace(reset.meta, sent=sent), NOW, jump=jump)

    assert (claim.occurrence, claim.decision, claim.meta) == (None, None, right)
    assert datetime.fromtimestamp(claim.next_score, UTC) == Timetable("e", when, EntryPolicy(), UTC).next(
        right.last_run_at
    )
