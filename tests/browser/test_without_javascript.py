"""All of the page without JavaScript: forms, links and reloads."""

from __future__ import annotations

import pytest
from celery.schedules import crontab
from playwright.sync_api import expect

from .shop import REPORT
from .test_actions import is_gone, open_entry, says


@pytest.fixture
def page(visit):
    """The tab of a person whose browser runs no script."""
    return visit(java_script_enabled=False).page


def test_an_entry_is_run_paused_and_resumed(page, entries, redis):
    entries.upsert("report", REPORT, 3600)
    open_entry(page)
    page.get_by_role("link", name="Pause", exact=True).click()
    page.get_by_label("Why").fill("no script")
    page.get_by_role("button", name="Pause").click()
    says(page, "Paused")
    assert entries.get("report").policy.note == "no script"

    page.get_by_role("link", name="Resume", exact=True).click()
    page.get_by_role("button", name="Resume").click()
    says(page, "Resumed")
    page.get_by_role("link", name="Run now").click()
    page.get_by_role("button", name="Run now").click()
    says(page, "A run was requested")
    assert redis.hget("redbeat:report", "pending")


def test_an_entry_is_created_previewed_edited_and_deleted(page, entries):
    page.goto("/edit")
    page.get_by_label("Name", exact=True).fill("report")
    page.get_by_label("Task", exact=True).fill(REPORT)
    page.get_by_label("Hour", exact=True).fill("5")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#preview")).to_contain_text("At 05:00")
    expect(page.locator("#preview li")).to_have_count(5)
    page.get_by_role("button", name="Check and create").click()
    page.get_by_role("button", name="Save").click()
    says(page, "Saved")
    assert entries.get("report").schedule == crontab(minute=0, hour=5)

    page.get_by_role("link", name="Edit").click()
    page.get_by_label("Note").fill("changed")
    page.get_by_role("button", name="Check the changes").click()
    page.get_by_role("button", name="Back").click()
    expect(page.get_by_label("Note")).to_have_value("changed")
    page.get_by_role("button", name="Check the changes").click()
    page.get_by_role("button", name="Save").click()
    assert entries.get("report").policy.note == "changed"

    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete").click()
    says(page, "Deleted")
    assert is_gone(entries, "report")


def test_several_entries_are_paused_and_a_search_finds_them(page, entries):
    for name in ("a", "b", "other"):
        entries.upsert(name, REPORT, 3600)
    page.goto("/")
    page.get_by_label("Select a", exact=True).check()
    page.get_by_label("Select b", exact=True).check()
    page.locator("#many").get_by_role("button", name="Pause", exact=True).click()
    page.get_by_label("How many entries are these?").fill("2")
    page.get_by_role("button", name="Pause").click()
    says(page, "Done for all")

    page.get_by_label("State").select_option("paused")
    page.get_by_role("button", name="Show").click()

    assert page.locator("tbody a.name").all_inner_texts() == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "link", "shown"),
    [
        ("/entry?name=report", "Ask the schedule, the locks and the workers", "It runs next"),
        ("/doctor", "Check servers, beats, entries, workers and locks", "no beat leads"),
    ],
)
def test_what_a_script_would_load_is_a_link(page, entries, path, link, shown):
    entries.upsert("report", REPORT, 3600)
    page.goto(path)
    page.get_by_role("link", name=link).click()

    expect(page.locator("main")).to_contain_text(shown)


def test_a_backfill_is_listed_and_begun(page, entries):
    entries.upsert("report", REPORT, crontab(minute=0))
    page.goto("/backfill?name=report")
    page.get_by_label("After").fill("2026-11-01T00:00:00")
    page.get_by_label("Until, included").fill("2026-11-01T02:00:00")
    page.get_by_role("button", name="Show the runs").click()
    expect(page.locator("ol.columns li")).to_have_count(2)
    page.get_by_role("button", name="Run these 2").click()

    says(page, "The runs of the backfill")


def test_a_person_without_a_script_is_told_what_mine_cannot_show(page, entries):
    """Only a script knows the reader's zone: times stay in UTC, and say so."""
    entries.upsert("report", REPORT, crontab(minute=0, hour=3), timezone="Europe/Berlin")
    page.goto("/entry?name=report")
    page.get_by_role("button", name="mine").click()

    expect(page.locator("section").filter(has_text="Next runs").locator("li").first).to_contain_text("Z")
