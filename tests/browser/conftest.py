"""Fixtures: Debian's Chromium, the page as a process of its own, and a person who looks at it."""

from __future__ import annotations

import http.client
import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from redis import Redis

from singlebeat import Schedule
from singlebeat.web.security import COOKIE
from tests.support import ORACLE_DB, CeleryLauncher, RedisServer, free_port, wait_until

from .shop import make_app

SHOP = "tests.browser.shop"

#: Milliseconds for which an expectation waits: far more than a machine that others use needs.
expect.set_options(timeout=20_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, metavar="FOLDER", help="take a picture of every view, to look at")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; without it the tests are skipped, in CI they fail."""
    path = shutil.which("chromium")
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(name="app")
def _app(server: RedisServer, redis: Redis) -> Iterator[Celery]:
    """The shop in this process, to look what came of a click."""
    with make_app(server.celery_url) as app:
        yield app


@pytest.fixture
def entries(app: Celery) -> Schedule:
    """The entries of the shop, of which there are none."""
    return Schedule(app, actor="bob")


@pytest.fixture
def shop(celery: CeleryLauncher) -> Callable[..., Any]:
    """Start a process of the shop: ``shop("worker", "-c", "2").ready()``."""
    return lambda *args, **options: celery(*args, app=SHOP, **options)


@pytest.fixture(scope="session")
def site(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page, which a process of its own serves to all tests of this process."""
    launcher = CeleryLauncher(server, f"{server.url}?db={ORACLE_DB}", tmp_path_factory.mktemp("page"))
    yield serve(partial(launcher, app=SHOP))
    launcher.stop()


def serve(start: Callable[..., Any]) -> str:
    """Start the page, and return its address as soon as it answers."""
    port = free_port()
    start("singlebeat", "web", "--port", str(port))

    def answers() -> bool:
        with suppress(OSError, http.client.HTTPException):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/static/page.css", timeout=5).status == 200
        return False

    wait_until(answers, timeout=40, what="the page")
    return f"http://127.0.0.1:{port}"


def forget(site: str) -> None:
    """Let the page read anew what it keeps for viewers some seconds long: each change of its own makes it do so."""
    with closing(http.client.HTTPConnection(urlsplit(site).netloc, timeout=20)) as connection:
        kind = "application/x-www-form-urlencoded"
        headers = {"Cookie": f"{COOKIE}=x", "Origin": site, "Content-Type": kind}
        connection.request("POST", "/resume-all", f"{COOKIE}=x", headers)
        assert connection.getresponse().status == 303


class Person:
    """Someone with a browser of their own; notes what the browser's console says."""

    def __init__(self, browser: Browser, site: str, **options: Any) -> None:
        self.context: BrowserContext = browser.new_context(base_url=site, reduced_motion="reduce", **options)
        self.context.set_default_timeout(20_000)
        self.console: list[str] = []
        self.page = self.open_tab()

    def open_tab(self) -> Page:
        """Return a new tab."""
        page = self.context.new_page()
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text} ({page.url})"))
        page.on("pageerror", lambda error: self.console.append(f"error: {error} ({page.url})"))
        return page

    @property
    def complaints(self) -> list[str]:
        """What the console says, but for what tests cause: statuses that they ask for, and fields filled in at once."""
        expected = ("responded with a status of 4", "Autofocus processing was blocked because a document already has")
        return [text for text in self.console if not any(words in text for words in expected)]


@pytest.fixture
def visit(chromium: Browser, site: str, redis: Redis) -> Iterator[Callable[..., Person]]:
    """Let a person open the page; at the end, the console of each must be empty."""
    persons: list[Person] = []
    forget(site)

    def visit(**options: Any) -> Person:
        persons.append(Person(chromium, site, **{"viewport": {"width": 1280, "height": 900}, **options}))
        return persons[-1]

    yield visit
    for person in persons:
        person.context.close()
    assert [text for person in persons for text in person.complaints] == []


@pytest.fixture
def page(visit) -> Page:
    """The tab of a person."""
    return visit().page
