"""Fixtures of the page: an HTTP client on a real Redis, that keeps cookies as a browser does."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from singlebeat import web

#: A client of this machine.
HERE = ("127.0.0.1", 50_000)


class Visitor(TestClient):
    """A browser without scripts: it follows what a person would click, and sends a form with its hidden fields."""

    def form(self, path: str, **fields: Any) -> dict[str, Any]:
        """Return the hidden fields of the form that a page sends to its own address, and further fields."""
        page = self.get(path)
        assert page.status_code == 200, page.text
        hidden: dict[str, Any] = {}
        for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page.text):
            hidden.setdefault(name, []).append(html.unescape(value))
        return {name: values[0] if len(values) == 1 else values for name, values in hidden.items()} | fields

    def submit(self, path: str, url: str = "", **fields: Any) -> Any:
        """Send the form of a page; return the answer to it, which is not followed."""
        target = (url or path).partition("?")[0]
        return self.post(target, data=self.form(path, **fields), follow_redirects=False)


@pytest.fixture
def visit(app, redis, no_worker_is_awaited) -> Iterator[Callable[..., Visitor]]:
    """Return a visitor of the page of an app, which has options and is asked from an address."""
    clients = []

    def visit(*, client: tuple[str, int] = HERE, base_url: str = "http://localhost", of=app, **options: Any) -> Visitor:
        clients.append(Visitor(web.app(of, **options), client=client, base_url=base_url))
        return clients[-1]

    yield visit
    for client in clients:
        client.close()


@pytest.fixture
def no_worker_is_awaited(monkeypatch):
    """Ask no longer for workers, of which there are none."""
    monkeypatch.setattr("singlebeat.diagnosis.workers.TIMEOUT", 0.05)


@pytest.fixture
def login(app) -> str:
    """The name of a task with a secret positional argument."""

    @app.task(name="login", shared=False)
    def login(user, password):
        """Do nothing."""

    return "login"
