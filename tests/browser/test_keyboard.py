"""The page without a mouse: each control is reached by Tab, can be seen when it has the focus, and acts by Enter."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support import wait_until

from .shop import REPORT
from .test_actions import says

#: What has the focus: its name, and whether it is seen and has a ring; null if nothing has.
FOCUS = """() => {
  if (document.activeElement === document.body) return null;
  const at = document.activeElement, box = at.getBoundingClientRect(), style = getComputedStyle(at);
  return {
    name: at.getAttribute('aria-label') || at.labels?.[0]?.innerText || at.innerText || at.name || at.tagName,
    isSeen: box.width > 0 && box.height > 0 && box.right > 0 && box.left < innerWidth && box.bottom > 0,
    hasRing: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
  };
}"""


def tab_to(page, name, most=80):
    """Press Tab until the control of this name has the focus; check all that have it on the way."""
    for _ in range(most):
        page.keyboard.press("Tab")
        # Amid a live update, nothing has the focus for a moment.
        focus = wait_until(lambda: page.evaluate(FOCUS), what="a control with the focus")
        assert focus["isSeen"], focus
        assert focus["hasRing"], focus
        if " ".join(focus["name"].split()) == name:
            return
    raise AssertionError(f"{name} is not reached by {most} Tabs; the last control was {focus}")


def press(page, key, name):
    """Go to a control and press a key there, which leads to another page."""
    tab_to(page, name)
    with page.expect_navigation():
        page.keyboard.press(key)


def test_an_entry_is_paused_by_the_keyboard_alone(page, entries):
    entries.upsert("report", REPORT, 3600)
    page.goto("/")
    press(page, "Enter", "report")
    press(page, "Enter", "Pause")
    assert page.evaluate("document.activeElement.id") == "note", "the form begins with the reason"
    page.keyboard.type("by keys")
    with page.expect_navigation():
        page.keyboard.press("Enter")

    says(page, "Paused")
    assert entries.get("report").policy.note == "by keys"


def test_entries_are_selected_and_run_by_the_keyboard_alone(page, entries, redis):
    for name in ("a", "b"):
        entries.upsert(name, REPORT, 3600)
    page.goto("/")
    tab_to(page, "Select a")
    page.keyboard.press("Space")
    press(page, "Enter", "Run")
    tab_to(page, "How many entries are these?")
    page.keyboard.type("1")
    press(page, "Space", "Run")

    says(page, "Done for all")
    assert redis.hget("redbeat:a", "pending")
    assert not redis.hget("redbeat:b", "pending")


def test_an_entry_is_made_by_the_keyboard_alone(page, entries):
    page.goto("/edit")
    tab_to(page, "Name")
    page.keyboard.type("report")
    tab_to(page, "Task")
    page.keyboard.type(REPORT)
    page.keyboard.press("Escape")  # closes the list of tasks
    tab_to(page, "Cron")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_label("Every …")).to_be_checked()
    tab_to(page, "Every a number")
    page.keyboard.type("90")
    press(page, "Enter", "Check and create")
    press(page, "Enter", "Save")

    says(page, "Saved")
    assert entries.get("report").schedule.run_every.total_seconds() == 90


def test_the_first_tab_skips_to_the_content(page, entries):
    entries.upsert("report", REPORT, 3600)
    page.goto("/entry?name=report")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")

    assert page.evaluate("document.getElementById('live').contains(document.activeElement)")
