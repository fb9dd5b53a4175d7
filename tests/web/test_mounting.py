"""The page inside hosts: in FastAPI and Starlette by a mount, in Flask by a2wsgi; each below a prefix."""

from __future__ import annotations

import asyncio
import threading

import httpx2 as httpx
import pytest
from a2wsgi import ASGIMiddleware
from celery.schedules import crontab
from fastapi import FastAPI
from flask import Flask
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from singlebeat import Schedule, web
from singlebeat.web.security import Role, User
from tests.support import APP

from .mounted import check_mounted, served_by_wsgi

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def page(app, redis, no_worker_is_awaited):
    """The page, whose users the host resolves by a header of its own, and an entry."""
    Schedule(app).upsert("e", f"{APP}.plain", crontab(minute=0, hour=3))
    return web.app(app, resolve_user=resolve)


def resolve(request) -> User | None:
    """Return the user of a request as a host does: by its session, here a header."""
    name = request.headers.get("x-session")
    return User(name, Role.ADMIN if name == "ann" else Role.READ) if name else None


@pytest.mark.parametrize("kind", ["fastapi", "starlette"])
@pytest.mark.parametrize("prefix", ["/beat", "/ops/beat"])
def test_the_page_is_mounted_in_an_asgi_app(app, page, kind, prefix):
    host = FastAPI() if kind == "fastapi" else Starlette(routes=[Mount(prefix, page)])
    if kind == "fastapi":
        host.mount(prefix, page)

    with TestClient(host, base_url="http://shop.example", headers={"X-Session": "ann"}) as browser:
        assert browser.get(prefix, follow_redirects=False).headers["location"].endswith(f"{prefix}/")
        check_mounted(browser, prefix)

    assert Schedule(app).get("e").policy.paused
    assert [change.actor for change in Schedule(app).changes("e", 1)] == ["ann"]


def test_a_host_behind_a_proxy_has_its_own_prefix(page):
    """As with ``uvicorn --root-path``, which adds what a proxy has stripped."""
    host = FastAPI()
    host.mount("/beat", page)

    with TestClient(host, root_path="/shop", headers={"X-Session": "ann"}) as browser:
        shown = browser.get("/shop/beat/")

    assert shown.status_code == 200
    assert 'href="/shop/beat/history"' in shown.text


def test_the_host_decides_who_may_do_what(app, page):
    host = FastAPI()
    host.mount("/beat", page)
    browser = TestClient(host, client=("198.51.100.7", 1))

    assert browser.get("/beat/").status_code == 403
    assert browser.get("/beat/api/status").status_code == 403
    assert browser.get("/beat/", headers={"X-Session": "rita"}).status_code == 200
    assert browser.get("/beat/pause", params={"name": "e"}, headers={"X-Session": "rita"}).status_code == 403


@pytest.fixture
def serve_in_flask():
    """Return a Flask app with a page below ``/beat``."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def serve(page) -> Flask:
        host = Flask("shop")
        host.add_url_rule("/", "index", lambda: "the shop")
        host.wsgi_app = DispatcherMiddleware(host.wsgi_app, {"/beat": ASGIMiddleware(page, loop=loop)})
        return host

    yield serve
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def flask(serve_in_flask, page):
    """A Flask app with the page below ``/beat``."""
    return serve_in_flask(page)


def test_two_names_of_a_user_are_refused_in_flask(app, redis, serve_in_flask):
    """One is of the client, and the proxy has added the other; WSGI knows only their join."""
    page = web.app(app, trust_proxy=["127.0.0.1"], user_header="X-User", default_role="admin")

    with served_by_wsgi(serve_in_flask(page)) as url, httpx.Client(base_url=url, timeout=60) as browser:
        assert browser.get("/beat/", headers=[("X-User", "bob")]).status_code == 200
        assert browser.get("/beat/", headers=[("X-User", "bob"), ("X-User", "admin")]).status_code == 400


def test_the_page_is_mounted_in_flask(app, flask):
    with (
        served_by_wsgi(flask) as url,
        httpx.Client(base_url=url, headers={"X-Session": "ann"}, timeout=60) as browser,
    ):
        assert browser.get("/").text == "the shop"
        check_mounted(browser, "/beat")

    assert Schedule(app).get("e").policy.paused
