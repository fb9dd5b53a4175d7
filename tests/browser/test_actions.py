"""Each action of the page, taken by clicks; Redis and the workers show what came of it."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
from celery.schedules import crontab
from playwright.sync_api import expect

from singlebeat.beat.status import ScheduleStatus
from singlebeat.errors import UnknownEntryError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Ref
from tests.support import wait_until

from .shop import GO, IMPORT, REPORT


@pytest.fixture
def beat(shop):
    """A beat that leads."""
    beat = shop("beat")
    beat.wait_for("event=leadership_gained")
    return beat


def open_entry(page, name="report"):
    """Go from the list to an entry, as a person does."""
    page.goto("/")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()


def says(page, text):
    """Await what the page says after an action."""
    expect(page.locator("p.done").first).to_contain_text(text)


def is_gone(entries, name):
    try:
        entries.get(name)
    except UnknownEntryError:
        return True
    return False


def test_a_click_runs_an_entry_with_the_chosen_overlap(page, entries, redis, beat, shop):
    shop("worker", "-c", "1", "-P", "threads").ready()
    entries.upsert("report", REPORT, crontab(minute=0, hour=3), overlap="skip")
    open_entry(page)

    page.get_by_role("link", name="Run now").click()
    expect(page.get_by_label("as the entry says: skip")).to_be_checked()
    page.get_by_label("run beside it").check()
    page.get_by_role("button", name="Run now").click()

    says(page, "A run was requested")
    task = page.locator("p.done code").inner_text()
    record = wait_until(lambda: next((each for each in entries.history("report") if each.end), None), timeout=30)
    assert (record.task_id, record.kind, record.end.outcome) == (task, "manual", "success")
    expect(page.get_by_label("Timeline")).to_contain_text("success")


def test_a_requested_run_carries_the_overlap_that_was_chosen(page, entries, redis):
    entries.upsert("report", REPORT, 3600, overlap="skip")
    page.goto("/")

    page.get_by_role("link", name="Run report now").click()
    page.get_by_label("revoke the call that is queued, and run").check()
    page.get_by_role("button", name="Run now").click()

    says(page, "A run was requested")
    assert '"cancel_other"' in redis.hget("redbeat:report", "pending")


def test_clicks_pause_an_entry_with_a_note_and_resume_it(page, entries):
    entries.upsert("report", REPORT, 3600)
    open_entry(page)

    page.get_by_role("link", name="Pause", exact=True).click()
    page.get_by_label("Why").fill("until the gateway is back")
    page.get_by_role("button", name="Pause").click()
    says(page, "Paused")
    policy = entries.get("report").policy
    assert (policy.paused, policy.note) == (True, "until the gateway is back")

    page.get_by_role("link", name="Resume", exact=True).click()
    expect(page.locator("main")).to_contain_text("until the gateway is back")
    page.get_by_role("button", name="Resume").click()
    says(page, "Resumed")
    assert not entries.get("report").policy.paused


def test_an_entry_is_edited_after_its_changes_were_shown(page, entries):
    entries.upsert("report", REPORT, crontab(minute=0, hour=3))
    open_entry(page)

    page.get_by_role("link", name="Edit").click()
    page.get_by_label("Hour", exact=True).fill("5")
    expect(page.locator("#preview")).to_contain_text("At 05:00")
    page.get_by_label("Jitter").fill("30")
    page.get_by_role("button", name="Check the changes").click()
    expect(page.locator(".diff")).to_contain_text("30")
    assert entries.get("report").policy.jitter is None, "nothing is stored before it is confirmed"
    page.get_by_role("button", name="Save").click()

    says(page, "Saved")
    entry = entries.get("report")
    assert entry.schedule == crontab(minute=0, hour=5)
    assert entry.policy.jitter == 30
    (change,) = [each for each in entries.changes("report") if each.by == "web"]
    assert change.actor == "page"


def test_a_new_entry_is_created_by_its_form(page, entries):
    page.goto("/")
    page.get_by_role("link", name="New entry").click()
    page.get_by_label("Name", exact=True).fill("quarter/hour: report")
    page.get_by_label("Task", exact=True).fill(REPORT)
    page.get_by_label("Every …").check()
    page.get_by_label("Every a number").fill("15")
    page.get_by_label("Unit").select_option("min")
    page.get_by_label("args JSON array", exact=True).fill('["week"]')
    page.get_by_label("Tags").fill("sales, weekly")
    expect(page.locator("#preview")).to_contain_text("15 minutes")
    page.get_by_role("button", name="Check and create").click()
    page.get_by_role("button", name="Save").click()

    says(page, "Saved")
    entry = entries.get("quarter/hour: report")
    assert (entry.task, entry.args, entry.policy.tags) == (REPORT, ["week"], ("sales", "weekly"))
    assert entry.schedule.run_every == timedelta(minutes=15)


def test_a_wrong_field_is_marked_and_stores_nothing(page, entries):
    page.goto("/edit")
    page.get_by_label("Name", exact=True).fill("report")
    page.get_by_label("Task", exact=True).fill(REPORT)
    page.get_by_label("args JSON array", exact=True).fill('["week",\n}')
    page.get_by_role("button", name="Check and create").click()

    expect(page.get_by_role("alert").filter(has_text="Nothing was saved")).to_be_visible()
    field = page.locator("[aria-invalid=true]")
    expect(field).to_have_attribute("name", "args")
    expect(page.locator("#e-args")).to_contain_text("line 2")
    assert is_gone(entries, "report")


def test_an_entry_is_duplicated_with_its_secrets(page, entries):
    entries.upsert("report", REPORT, 3600, kwargs={"api_token": "s3cret", "of": "week"}, tags=["sales"])
    open_entry(page)
    page.get_by_role("link", name="Duplicate").click()
    expect(page.get_by_label("kwargs JSON object", exact=True)).not_to_have_value(re.compile("s3cret"))
    page.get_by_label("Name", exact=True).fill("second report")
    page.get_by_role("button", name="Check and create").click()
    page.get_by_role("button", name="Save").click()

    says(page, "Saved")
    assert entries.get("second report").kwargs == {"api_token": "s3cret", "of": "week"}
    assert entries.get("report").kwargs["api_token"] == "s3cret"


def test_an_entry_is_deleted_after_a_question(page, entries):
    entries.upsert("report", REPORT, 3600)
    open_entry(page)
    page.get_by_role("link", name="Delete").click()
    page.get_by_role("link", name="Cancel").click()
    assert entries.get("report").task == REPORT

    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete").click()

    says(page, "Deleted")
    assert is_gone(entries, "report")


def test_a_backfill_runs_the_list_that_was_confirmed(page, entries, beat, shop):
    shop("worker", "-c", "1", "-P", "threads").ready()
    entries.upsert("report", REPORT, crontab(minute=0), timezone="Europe/Berlin")
    open_entry(page)

    page.get_by_role("link", name="Backfill").click()
    page.get_by_label("After").fill("2026-11-01T00:00:00")
    page.get_by_label("Until, included").fill("2026-11-01T03:00:00")
    page.get_by_role("button", name="Show the runs").click()
    shown = page.locator("ol.columns li")
    expect(shown).to_have_count(3)
    expect(shown.first).to_contain_text("2026-11-01 01:00:00 CET")
    page.get_by_role("button", name="Run these 3").click()

    says(page, "The runs of the backfill")
    expect(page.get_by_role("status").filter(has_text="3 of 3 runs were handed to beat")).to_be_visible()
    records = wait_until(
        lambda: (
            (found := [each for each in entries.history("report") if each.kind == "backfill"])
            and len(found) == 3
            and all(each.end for each in found)
            and found
        ),
        timeout=30,
    )
    assert sorted(f"{each.nominal:%d %H}" for each in records) == ["01 00", "01 01", "01 02"]


def test_a_click_frees_the_lock_of_a_dead_worker(page, app, redis):
    backend, key = backend_of(app), "SINGLETONLOCK_{a}"
    backend.begin(Ref(key, "dead-one", 0, "n"), lease=600, remember_for=60, task=IMPORT, arguments="('x',)", entry="e")
    redis.hset(key, "since", int(redis.hget(key, "since")) - 500_000)  # and was not renewed since
    redis.pexpire(key, 100_000)  # so it does not end by itself under the click
    page.goto("/locks")
    expect(page.locator("main")).to_contain_text("seems abandoned")
    page.get_by_role("link", name="Free").click()
    expect(page.locator("main")).to_contain_text("dead-one")
    page.get_by_role("button", name="Free the lock").click()

    says(page, "The lock is free")
    assert backend.get(key) is None
    expect(page.locator("main")).to_contain_text("No lock is held")


def test_a_lock_in_use_is_freed_by_its_typed_id_only(page, app, redis, shop):
    shop("worker", "-c", "2", "-P", "threads").ready()
    task = app.tasks[IMPORT].delay("x")
    page.goto("/locks")
    expect(page.locator("main")).to_contain_text("running")

    page.get_by_role("link", name="Free").click()
    page.get_by_role("button", name="Free the lock").click()
    expect(page.locator("main")).not_to_contain_text("The lock is free")
    assert app.tasks[IMPORT].delay("x").id == task.id, "without force it stays"

    page.goto(f"/free?id={task.id}")
    page.get_by_label("Free it even if its owner runs").check()
    page.get_by_label("Type the id of its task").fill("yes")
    page.get_by_role("button", name="Free the lock").click()
    expect(page.locator("main")).to_contain_text("type the id of its task")
    assert app.tasks[IMPORT].delay("x").id == task.id, "another word does not free it"

    page.goto(f"/free?id={task.id}")
    page.get_by_label("Free it even if its owner runs").check()
    page.get_by_label("Type the id of its task").fill(task.id)
    page.get_by_role("button", name="Free the lock").click()
    says(page, "The lock is free")
    assert app.tasks[IMPORT].delay("x").id != task.id
    redis.rpush(GO, 1, 1)


def test_the_leader_resigns_and_the_standby_leads(page, app, beat, shop):
    standby = shop("beat")
    standby.wait_for("Standing by")
    page.goto("/doctor")

    page.get_by_role("link", name="End the term of leadership").click()
    page.get_by_role("button", name="End the term").click()

    says(page, "The term of leadership was ended")
    standby.wait_for("event=leadership_gained term=2")
    assert ScheduleStatus.of(app).leader["pid"] == str(standby.pid)
    expect(page.locator("#status")).to_contain_text("term 2")


def test_several_entries_are_changed_after_their_count_is_typed(page, entries):
    for name in ("a", "b", "c"):
        entries.upsert(name, REPORT, 3600)
    page.goto("/")
    page.get_by_label("Select a", exact=True).check()
    page.get_by_label("Select c", exact=True).check()
    expect(page.locator("#chosen")).to_have_text("2 selected")
    page.locator("#many").get_by_role("button", name="Pause", exact=True).click()
    page.get_by_label("Why").fill("maintenance")
    page.get_by_label("How many entries are these?").fill("3")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("main")).to_contain_text("nothing was changed: type 2")
    assert not any(entries.get(name).policy.paused for name in "abc")

    page.go_back()
    page.get_by_label("How many entries are these?").fill("2")
    page.get_by_role("button", name="Pause").click()

    says(page, "Done for all")
    assert [entries.get(name).policy.paused for name in "abc"] == [True, False, True]
    assert entries.get("c").policy.note == "maintenance"


@pytest.mark.parametrize("what", ["Resume", "Run", "Delete"])
def test_each_action_is_done_to_all_that_are_selected(page, entries, redis, what):
    for name in ("a", "b"):
        entries.upsert(name, REPORT, 3600, paused=what == "Resume")
    page.goto("/")
    page.get_by_label("Select all on this page").check()
    page.locator("#many").get_by_role("button", name=what, exact=True).click()
    page.get_by_label("How many entries are these?").fill("2")
    page.get_by_role("button", name=what).click()

    says(page, "Done for all")
    if what == "Delete":
        assert [*entries.list()] == []
    elif what == "Run":
        assert all(redis.hget(f"redbeat:{name}", "pending") for name in "ab")
    else:
        assert not any(entries.get(name).policy.paused for name in "ab")


def test_entries_with_a_tag_are_paused_under_one_key_and_resumed(page, entries):
    entries.upsert("report", REPORT, 3600, tags=["billing"])
    page.goto("/")
    page.get_by_role("link", name="Pause many").click()
    page.get_by_label("those with the tag").check()
    page.get_by_label("Tag", exact=True).fill("billing")
    page.get_by_label("Why").fill("month end")
    page.get_by_role("button", name="Pause").click()
    says(page, "Paused")
    (pause,) = entries.pauses()
    assert (pause.tag, pause.note) == ("billing", "month end")
    expect(page.locator("p.caution")).to_contain_text("month end")

    page.locator("p.caution").get_by_role("link", name="Resume").click()
    page.get_by_role("button", name="Resume").click()
    says(page, "Resumed")
    assert entries.pauses() == []


def test_a_change_is_reverted_where_it_is_listed(page, entries):
    entries.upsert("report", REPORT, 3600, args=["good"])
    entries.upsert("report", REPORT, 3600, args=["bad"])
    page.goto("/changes")
    page.get_by_role("row").filter(has_text="bad").get_by_role("link", name="Revert").click()
    expect(page.locator(".diff ins").filter(has_text="good")).to_be_visible()
    page.get_by_role("button", name="Revert").click()

    says(page, "Reverted")
    assert entries.get("report").args == ["good"]


@pytest.fixture
def quarantined(entries, redis, beat):
    """An entry whose definition another program has broken, and that beat has found."""
    entries.upsert("report", REPORT, 3600)
    definition = {
        "name": "report",
        "task": REPORT,
        "args": ["week"],
        "schedule": {"__type__": "interval", "every": "x"},
    }
    redis.hset("redbeat:report", "definition", json.dumps(definition))
    redis.zadd("redbeat::schedule", {"redbeat:report": 0})
    wait_until(lambda: redis.hget("redbeat::quarantine", "redbeat:report"), timeout=20, what="the quarantine")


def test_a_quarantined_entry_is_corrected_by_its_form(page, entries, redis, quarantined):
    page.goto("/")
    page.locator("#status").get_by_role("link", name="quarantined").click()
    page.locator("section").filter(has_text="report").get_by_role("link", name="Edit").click()
    page.get_by_label("Every …").check()
    page.get_by_label("Every a number").fill("60")
    page.get_by_role("button", name="Check the changes").click()
    page.get_by_role("button", name="Save").click()

    says(page, "Saved")
    entry = entries.get("report")
    assert (entry.args, entry.schedule.run_every) == (["week"], timedelta(minutes=1))
    wait_until(lambda: not redis.hget("redbeat::quarantine", "redbeat:report"), timeout=20)


def test_a_quarantined_entry_is_deleted(page, redis, quarantined):
    page.goto("/quarantine")
    page.get_by_role("link", name="Delete").click()
    page.get_by_role("button", name="Delete").click()

    says(page, "Deleted")
    assert not redis.exists("redbeat:report")
