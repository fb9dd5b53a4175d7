"""The page stays as new as Redis while a person looks at it, and asks nothing while it is hidden."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from .shop import REPORT

#: Hides the tab from its page, as another tab before it does: headless Chromium shows all of them.
HIDE = """hidden => {
  Object.defineProperty(document, 'visibilityState', {value: hidden ? 'hidden' : 'visible', configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def test_a_change_by_another_process_appears_without_a_reload(page, entries):
    page.goto("/")
    expect(page.locator("main")).to_contain_text("There is no entry yet")
    page.evaluate("window.isTheSamePage = true")

    entries.upsert("report", REPORT, 3600)
    expect(page.get_by_role("link", name="report", exact=True)).to_be_visible()
    entries.pause("report", "until Monday")
    expect(page.get_by_role("row").filter(has_text="until Monday")).to_be_visible()
    entries.delete("report")
    expect(page.locator("main")).to_contain_text("There is no entry yet")

    assert page.evaluate("window.isTheSamePage"), "no reload has shown it"


def test_a_new_leader_and_a_run_appear_on_an_open_page(page, entries, shop):
    entries.upsert("report", REPORT, 3600)
    page.goto("/entry?name=report")
    expect(page.locator("#status.wrong")).to_contain_text("No beat leads")

    shop("beat").wait_for("event=leadership_gained")
    expect(page.locator("#status.wrong")).to_have_count(0)
    expect(page.locator("#status")).to_contain_text("term 1")
    entries.trigger("report")

    expect(page.get_by_label("Timeline")).to_contain_text("dispatched")


def test_an_open_page_of_a_deleted_entry_says_that_it_is_gone(page, entries):
    entries.upsert("report", REPORT, 3600)
    page.goto("/entry?name=report")
    expect(page.get_by_role("heading", name="Next runs")).to_be_visible()

    entries.delete("report")

    expect(page.get_by_role("heading", name="There is no such entry")).to_be_visible()
    expect(page.locator("[hx-get]")).to_have_count(0)
    expect(page.locator("#lost")).to_be_hidden()
    page.get_by_role("link", name="All entries").click()
    expect(page.locator("main")).to_contain_text("There is no entry yet")


def test_a_hidden_tab_asks_nothing(page, entries):
    entries.upsert("report", REPORT, 3600)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    with page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true"):
        page.goto("/")
    # The icons of the first page may still be on their way.
    page.wait_for_load_state("networkidle")

    page.evaluate(HIDE, True)
    before = len(asked)
    # Its own timers fire twice meanwhile: they are what would ask.
    page.evaluate("() => new Promise(after => setTimeout(after, 4500))")
    assert asked[before:] == []

    entries.upsert("other", REPORT, 3600)
    page.evaluate(HIDE, False)
    expect(page.get_by_role("link", name="other", exact=True)).to_be_visible()


def test_an_unchanged_page_gets_empty_answers(page, entries):
    entries.upsert("report", REPORT, 3600)
    page.goto("/")

    with page.expect_response(lambda answer: answer.status == 304):
        pass


def test_a_selection_survives_a_live_update(page, entries):
    for name in ("a", "b"):
        entries.upsert(name, REPORT, 3600)
    page.goto("/")
    page.get_by_label("Select a", exact=True).check()

    entries.upsert("c", REPORT, 3600)

    expect(page.get_by_label("Select c", exact=True)).to_be_visible()
    expect(page.get_by_label("Select a", exact=True)).to_be_checked()
    expect(page.get_by_label("Select b", exact=True)).not_to_be_checked()
    expect(page.locator("#chosen")).to_have_text("1 selected")


def test_the_focus_stays_on_its_button_in_a_live_update(page, entries):
    entries.upsert("a", REPORT, 3600)
    page.goto("/")
    page.get_by_label("Run a now").focus()

    entries.upsert("b", REPORT, 3600)

    expect(page.get_by_label("Select b", exact=True)).to_be_visible()
    expect(page.get_by_label("Run a now")).to_be_focused()


def test_a_page_without_its_server_says_so_and_recovers(visit, entries):
    person = visit()
    entries.upsert("report", REPORT, 3600)
    person.page.goto("/")
    expect(person.page.locator("#lost")).to_be_hidden()

    person.context.set_offline(True)
    expect(person.page.locator("#lost")).to_be_visible()
    expect(person.page.get_by_role("link", name="report", exact=True)).to_be_visible()

    person.context.set_offline(False)
    expect(person.page.locator("#lost")).to_be_hidden()
    person.console = [text for text in person.console if not ("ERR_INTERNET_DISCONNECTED" in text or "htmx:" in text)]


@pytest.mark.parametrize(("choice", "shown"), [("UTC", "02:00:00Z"), ("entry's", "03:00:00 CET"), ("mine", "11:00:00")])
def test_times_are_shown_in_the_zone_that_a_person_chooses(visit, entries, choice, shown):
    from celery.schedules import crontab

    page = visit(timezone_id="Asia/Tokyo").page
    entries.upsert("report", REPORT, crontab(minute=0, hour=3, month_of_year="12,1,2"), timezone="Europe/Berlin")
    page.goto("/entry?name=report")

    page.get_by_role("button", name=choice, exact=True).click()

    expect(page.get_by_role("button", name=choice, exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page.locator("section").filter(has_text="Next runs").locator("li").first).to_contain_text(shown)


def test_each_viewer_reads_its_own_zone_and_the_same_entries(visit, entries):
    entries.upsert("report", REPORT, 3600)
    pages = [visit(timezone_id=zone).page for zone in ("Asia/Tokyo", "America/Lima")]
    for page in pages:
        page.goto("/")

    entries.pause("report", "for both")

    for page in pages:
        expect(page.get_by_role("row").filter(has_text="for both")).to_be_visible()
