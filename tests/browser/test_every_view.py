"""Every view of a shop in use: its console is empty, axe finds nothing serious, and it fits a narrow window."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from singlebeat.diagnosis.locks import locks_of
from tests.support import ORACLE_DB, ROOT, CeleryLauncher, RedisServer, wait_until

from .conftest import SHOP, Person, serve
from .furnished import furnish
from .layout import cut_off, overflow
from .shop import make_app
from .views import VIEWS

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 320, "height": 640}

#: The window of the pictures in the docs, and the view of each.
SHOWN = {"width": 1200, "height": 560}
PICTURES = {"page-entries": "entries", "page-entry": "entry-skipped", "page-edit": "edit"}

#: How far pictures of one view may differ: times and names of hosts change, and what wraps with them.
UNLIKE = 6.0

_DIFFERENCE = """async pictures => {
  const [a, b] = await Promise.all(pictures.map(async picture => {
    const image = new Image();
    image.src = 'data:image/png;base64,' + picture;
    await image.decode();
    const canvas = document.createElement('canvas');
    canvas.width = 56; canvas.height = 36;
    const drawn = canvas.getContext('2d');
    drawn.imageSmoothingQuality = 'high';
    drawn.drawImage(image, 0, 0, 56, 36);
    return drawn.getImageData(0, 0, 56, 36).data;
  }));
  return a.reduce((sum, value, at) => sum + Math.abs(value - b[at]), 0) / (56 * 36 * 3);
}"""

#: How serious a finding of axe must be.
SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A shop with two beats, a worker that runs a task, entries with a past, and the page."""
    with RedisServer() as server:
        launcher = CeleryLauncher(server, f"{server.url}?db={ORACLE_DB}", tmp_path_factory.mktemp("shop"))
        start = partial(launcher, app=SHOP)
        try:
            with make_app(server.celery_url) as app:
                redis = server.client()
                entries = furnish(app, redis)
                worker = start("worker", "-c", "2", "-P", "threads", "-n", "worker-1@shop")
                start("beat").wait_for("event=leadership_gained")
                start("beat").wait_for("Standing by")
                worker.ready()
                task = entries.trigger("import feed of suppliers")
                wait_until(lambda: redis.hget("redbeat::quarantine", "redbeat:old import"), timeout=20)
                wait_until(lambda: entries.history("import feed of suppliers", 1)[0].task_id == task, timeout=20)
                wait_until(lambda: any(lock.state == "running" for _, _, lock in locks_of(app)), timeout=20)
                change = entries.changes("nightly report")[0].id
                yield SimpleNamespace(site=serve(start), lock=task, change=change)
        finally:
            launcher.stop()


@pytest.fixture
def look(chromium, furnished) -> Iterator:
    """Open a view in a window of a size and a scheme of colours; at the end, each console must be empty."""
    persons = []

    def look(view: str, size=WIDE, scheme="light", **options) -> Person:
        person = Person(chromium, furnished.site, viewport=size, color_scheme=scheme, **options)
        persons.append(person)
        person.page.goto(VIEWS[view].path.format(lock=furnished.lock, change=furnished.change))
        expect(person.page.locator("main")).to_contain_text(VIEWS[view].shows)
        person.page.wait_for_load_state("networkidle")
        return person

    yield look
    for person in persons:
        person.context.close()
    assert [text for person in persons for text in person.complaints] == []


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(look, view):
    page = look(view).page

    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page).response
        assert found["passes"], "axe has looked"
        serious = [
            (rule["id"], node["html"][:200], node["failureSummary"][:300])
            for rule in found["violations"]
            if rule["impact"] in SERIOUS
            for node in rule["nodes"]
        ]
        assert serious == [], scheme


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_a_narrow_window(look, view):
    page = look(view, NARROW).page

    assert not overflow(page), cut_off(page)
    assert cut_off(page) == []


def test_a_script_of_another_writer_would_not_run(look):
    """The policy of the page holds in this browser: what it forbids is refused, and told to the console."""
    person = look("entries")
    person.page.evaluate(
        """() => { const bad = document.createElement('script'); bad.textContent = 'window.ran = 1';
        document.body.append(bad); document.body.setAttribute('onclick', 'window.ran = 1'); document.body.click(); }"""
    )

    assert person.page.evaluate("window.ran") is None
    assert all("Content Security Policy" in text for text in person.console)
    assert len(person.console) >= 2
    person.console.clear()


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_docs_show_the_page(look, name, request):
    page = look(PICTURES[name], SHOWN).page
    path = "/?sort=name" if name == "page-entries" else None
    if path:
        page.goto(path)
        page.wait_for_load_state("networkidle")
    taken = page.screenshot()
    if folder := request.config.getoption("--screenshots"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(taken)
    shown = (ROOT / "docs/pictures" / f"{name}.png").read_bytes()

    assert len(shown) < 100_000
    assert difference(page, taken, shown) < UNLIKE, f"take it anew: --screenshots docs/pictures -k {name}"


def difference(page, *pictures: bytes) -> float:
    """Return how far two pictures differ on the average, seen from so far that no letter can be read: 0 to 255."""
    page.goto("about:blank")
    return page.evaluate(_DIFFERENCE, [base64.b64encode(picture).decode() for picture in pictures])


@pytest.mark.parametrize("view", VIEWS)
def test_a_picture_of_every_view_is_taken(look, view, request):
    folder: Path | None = request.config.getoption("--screenshots")
    if folder is None:
        pytest.skip("pictures are taken with --screenshots FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for size, width in ((WIDE, "wide"), (NARROW, "narrow")):
        person = look(view, size)
        for scheme in ("light", "dark"):
            person.page.emulate_media(color_scheme=scheme)
            person.page.screenshot(path=folder / f"{view}-{width}-{scheme}.png", full_page=True)
