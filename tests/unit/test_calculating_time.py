"""The calculating time of a beat: which entries may be calculated now, and in which order."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from celery.schedules import crontab, schedule, solar
from hypothesis import given
from hypothesis import strategies as st
from redbeat.schedules import rrule

from singlebeat import Entry, clocked
from singlebeat.beat import calculating_time
from singlebeat.beat.calculating_time import (
    CHEAP,
    EXPENSIVE,
    EXPENSIVE_FROM,
    LOGGED_FROM,
    LOGGED_WITHIN_FROM,
    UNKNOWN,
    CalculatingTime,
)
from singlebeat.beat.calendar.recurrence import next_occurrence
from tests.system.apps import make_app

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def app():
    with make_app("redis://127.0.0.1:1") as app:
        yield app


@pytest.fixture
def rule(app):
    return Entry("rule", "shop.tick", rrule("DAILY", dtstart=NOW), app=app)


class Clock:
    """Monotonic seconds that pass only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(time: CalculatingTime, entry: Entry, seconds: float, *, definition: str = "rule") -> None:
    with time.spent_on(definition, entry):
        time._clock.now += seconds


def test_an_entry_is_ranked_by_what_it_has_cost(rule):
    time = CalculatingTime(Clock())
    assert time.rank("rule", rule) == UNKNOWN
    spend(time, rule, 2.0)
    assert time.rank("rule", rule) == EXPENSIVE
    assert time.rank("another rule", rule) == UNKNOWN
    spend(time, rule, EXPENSIVE_FROM / 2)
    assert time.rank("rule", rule) == CHEAP


def test_a_cheap_entry_is_expensive_only_if_it_takes_long_twice(rule):
    """On a busy host, any entry takes long once in a while."""
    time = CalculatingTime(Clock())
    for cost in (EXPENSIVE_FROM / 2, 2.0):
        spend(time, rule, cost)
        assert time.rank("rule", rule) == CHEAP
    spend(time, rule, 2.0)
    assert time.rank("rule", rule) == EXPENSIVE


def test_schedules_of_simple_kinds_are_always_cheap(app):
    time = CalculatingTime(Clock())
    for when in (schedule(60), crontab(), clocked("2030-01-01T00:00:00Z")):
        assert time.rank("e", Entry("e", "shop.tick", when, app=app)) == CHEAP
    sun = solar("sunset", 89.9, 0, app=app)
    assert time.rank("e", Entry("e", "shop.tick", sun, app=app)) == UNKNOWN


def test_expensive_entries_wait_for_as_long_as_the_last_one_took(app, rule, caplog):
    time, cheap = CalculatingTime(Clock()), Entry("cheap", "shop.tick", schedule(60), app=app)
    assert time.has_for("rule", rule)
    spend(time, rule, EXPENSIVE_FROM)

    time._clock.now += EXPENSIVE_FROM / 2
    assert time.wait_s == pytest.approx(EXPENSIVE_FROM / 2)
    assert not time.has_for("rule", rule)
    assert not time.has_for("unknown", rule)
    assert not time.has_for("rule", rule)
    assert time.has_for("cheap", cheap)
    assert caplog.text.count("event=expensive") == 1

    time._clock.now += EXPENSIVE_FROM
    assert time.wait_s == 0
    assert time.has_for("rule", rule)


@given(costs=st.lists(st.floats(2 * EXPENSIVE_FROM, 60), min_size=1, max_size=20))
def test_expensive_entries_have_at_most_half_of_the_time(costs):
    time = CalculatingTime(Clock())
    with make_app("redis://127.0.0.1:1") as app:
        rule = Entry("rule", "shop.tick", rrule("DAILY", dtstart=NOW), app=app)
    for cost in costs:
        spend(time, rule, cost)
        time._clock.now += time.wait_s
        assert time.has_for("rule", rule)

    assert sum(costs) <= time._clock.now / 2 + 1e-6


def test_an_entry_for_which_others_waited_long_is_logged_with_its_cost(rule, caplog):
    time = CalculatingTime(Clock())
    spend(time, rule, LOGGED_FROM / 2)
    assert "event=expensive" not in caplog.text

    for _ in range(2):
        spend(time, rule, 2.5)

    assert caplog.text.count("event=expensive entry=rule seconds=2.5") == 1


def test_an_entry_is_logged_while_it_is_calculated_if_that_takes_long(rule, caplog):
    time = CalculatingTime(Clock())
    with time.spent_on("rule", rule):
        for _ in range(3):
            assert "event=expensive" not in caplog.text
            next_occurrence(rule.schedule, NOW, zone=UTC)
            time._clock.now += LOGGED_WITHIN_FROM / 2 - 1
        next_occurrence(rule.schedule, NOW, zone=UTC)
        assert "event=expensive entry=rule seconds=12" in caplog.text
    spend(time, rule, 100.0)

    assert caplog.text.count("event=expensive") == 1


def test_cheap_entries_spend_nothing(rule):
    time = CalculatingTime(Clock())
    for _ in range(1000):
        spend(time, rule, EXPENSIVE_FROM / 2)
    assert time.has_for("another", rule)


def test_an_entry_that_raises_has_spent_its_time(rule):
    time = CalculatingTime(Clock())

    def calculate() -> None:
        with time.spent_on("rule", rule):
            time._clock.now += 2.0
            raise ValueError("no such time")

    with pytest.raises(ValueError, match="no such time"):
        calculate()
    assert not time.has_for("rule", rule)


def test_the_costs_of_a_bounded_number_of_entries_are_remembered(rule, monkeypatch):
    monkeypatch.setattr(calculating_time, "MOST_COSTS", 3)
    time = CalculatingTime(Clock())
    for number in range(10):
        spend(time, rule, 2.0, definition=f"rule {number}")
    assert len(time._costs) <= 3
    assert time.rank("rule 9", rule) == EXPENSIVE
