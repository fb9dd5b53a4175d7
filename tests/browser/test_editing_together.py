"""Two people edit one entry: the second to save sees what the first has stored, and loses nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from playwright.sync_api import expect
from redbeat.schedules import rrule

from singlebeat import clocked

from .shop import REPORT
from .test_actions import says


@pytest.fixture
def conflict(visit, entries):
    """The page of a second person, who has changed the jitter after another had changed interval and note."""
    entries.upsert("report", REPORT, 3600, note="before")
    first, second = visit().page, visit().page
    for page in (first, second):
        page.goto("/edit?name=report")
    first.get_by_label("Every a number").fill("20")
    first.get_by_label("Unit").select_option("min")
    first.get_by_label("Note").fill("theirs")
    first.get_by_role("button", name="Check the changes").click()
    first.get_by_role("button", name="Save").click()
    says(first, "Saved")

    second.get_by_label("Jitter").fill("7")
    second.get_by_label("Note").fill("mine")
    second.get_by_role("button", name="Check the changes").click()
    expect(second.get_by_role("heading", level=1)).to_contain_text("Another process has changed")
    return second


def columns(page, field):
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=field)).locator("td").all_inner_texts()


def test_a_conflict_shows_what_was_there_mine_and_theirs(conflict, entries):
    assert columns(conflict, "note") == ["before", "mine", "theirs"]
    assert columns(conflict, "jitter") == ["", "7", ""]
    assert entries.get("report").policy.note == "theirs", "nothing was saved"


def test_merged_fields_keep_theirs_where_i_changed_nothing(conflict, entries):
    conflict.get_by_role("button", name="Keep theirs where you changed nothing").click()
    expect(conflict.get_by_label("Every a number")).to_have_value("20")
    expect(conflict.get_by_label("Note")).to_have_value("mine")
    conflict.get_by_role("button", name="Check the changes").click()
    conflict.get_by_role("button", name="Save").click()

    says(conflict, "Saved")
    entry = entries.get("report")
    assert (entry.schedule.run_every.total_seconds(), entry.policy.jitter, entry.policy.note) == (1200, 7, "mine")


def test_all_fields_of_mine_can_be_kept(conflict, entries):
    conflict.get_by_role("button", name="Keep all of yours").click()
    expect(conflict.get_by_label("Note")).to_have_value("mine")
    conflict.get_by_role("button", name="Check the changes").click()
    conflict.get_by_role("button", name="Save").click()

    says(conflict, "Saved")
    entry = entries.get("report")
    assert (entry.schedule.run_every.total_seconds(), entry.policy.note) == (3600, "mine")


def test_all_fields_of_theirs_can_be_kept(conflict, entries):
    conflict.get_by_role("link", name="Keep all of theirs").click()

    expect(conflict.get_by_role("heading", name="report")).to_be_visible()
    assert entries.get("report").policy.note == "theirs"


@pytest.mark.parametrize("second", [0, 7])
@pytest.mark.parametrize("kind", ["once", "rule"])
def test_a_time_that_was_left_alone_is_no_change(visit, entries, kind, second):
    """A browser sends it in its shortest form."""
    moment = datetime(2030, 1, 1, 9, 0, second, tzinfo=UTC)
    when = clocked(moment) if kind == "once" else rrule("DAILY", dtstart=moment, until=moment.replace(year=2040))
    entries.upsert("report", REPORT, when)
    page = visit().page
    page.goto("/edit?name=report")

    page.get_by_label("Note").fill("mine")
    page.get_by_role("button", name="Check the changes").click()

    expect(page.locator("dl.diff dt")).to_have_text(["note"])
    page.get_by_role("button", name="Save").click()
    says(page, "Saved")
    assert repr(entries.get("report").schedule) == repr(when)
