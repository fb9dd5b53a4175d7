"""Names and values of a hostile writer: never run, never break the layout, and each entry can be acted on."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from .layout import cut_off, overflow
from .shop import REPORT

SCRIPT = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"

#: Names by what is hostile in them.
NAMES = {
    "tags": SCRIPT,
    "quotes": "\" onfocus=window.ran=1 autofocus x='\"' `",
    "slashes": "../../entry?name=other&x=1#y %2e%2e%2f \\\\host\\share",
    "template": "{{ 7 * 7 }} {% raw %} ${7 * 7} #{7}",
    "link": "javascript:window.ran=1",
    "right-to-left": "\u202egnp.exe\u202c تقرير \u2067abc",
    "zero-width": "re\u200bport\u2060\u200d\ufeff\u00ad",
    "long": "x" * 10_000,
    "lines": "two\nlines\r\nand\rmore",
    "control": "a\tb\x01<b>c</b>\x7fд\u2028e",
    "combining": "e" + "\u0301" * 400,
}

NARROW = {"viewport": {"width": 320, "height": 640}}


@pytest.mark.parametrize("name", [pytest.param(name, id=what) for what, name in NAMES.items()])
def test_a_hostile_entry_is_shown_and_acted_on(visit, entries, redis, name):
    person = visit(**NARROW)
    page = person.page
    value = {"url": name[:200], name[:200]: SCRIPT, "link": "javascript:window.ran=1"}
    entries.upsert(name, REPORT, 3600, args=[name], kwargs=value, note=name[:900].strip(), tags=["t"])
    entries.upsert("other", REPORT, 3600)
    record = {"entry": name, "task": name, "nominal": "2026-11-01T00:00:00+00:00", "kind": "scheduled", "term": "1"}
    record |= {"decision": "skipped_overlap", "reason": f"held by {name}", "id": name[:64], "holder": name[:64]}
    redis.xadd("redbeat::history", {**record, "leader": name[:64], "holder_entry": name})
    line = [record[each] for each in ("nominal", "kind", "decision", "reason", "id", "term", "holder")]
    redis.hset(f"redbeat:{name}", "history", json.dumps(["1793000000000-0", *line, "", name]))

    page.goto("/")
    for view in ("/history", "/changes", "/"):
        page.goto(view)
        assert not overflow(page), view
        assert cut_off(page) == [], view
    row = page.locator("tbody tr").filter(has_not=page.get_by_role("link", name="other", exact=True))
    row.locator("a.name").click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert not overflow(page)
    assert cut_off(page) == []
    for link in ("Run now", "Edit", "Pause"):
        page.locator(".head").get_by_role("link", name=link).click()
        expect(page.locator("main form.card, main form#edit").first).to_be_visible()
        assert not overflow(page), (link, cut_off(page))
        if link != "Pause":
            page.go_back()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("p.done").first).to_contain_text("Paused")

    assert entries.get(name).policy.paused
    assert not entries.get("other").policy.paused
    assert page.evaluate("window.ran") is None
    assert page.evaluate("[...document.links].every(link => link.protocol === 'http:')")


def test_a_name_in_another_direction_turns_nothing_around(visit, entries):
    page = visit().page
    entries.upsert(NAMES["right-to-left"], REPORT, 3600, args=["a"])
    page.goto("/")

    boxes = page.locator("tbody tr").first.locator("td, th").evaluate_all("cells => cells.map(c => c.offsetLeft)")
    assert boxes == sorted(boxes)
    assert page.locator("tbody tr th small").first.inner_text().startswith(REPORT)


def test_values_of_the_form_come_back_as_they_were(visit, entries):
    page = visit().page
    text = f'{SCRIPT} "quoted" \u202e & &amp; \\ </textarea>'
    entries.upsert("report", REPORT, 3600, args=[text], note="n")
    page.goto("/edit?name=report")
    page.get_by_label("Note").fill("changed")
    page.get_by_role("button", name="Check the changes").click()
    page.get_by_role("button", name="Back").click()
    page.get_by_role("button", name="Check the changes").click()
    page.get_by_role("button", name="Save").click()
    expect(page.locator("p.done")).to_contain_text("Saved")

    entry = entries.get("report")
    assert (entry.args, entry.policy.note) == ([text], "changed")
