"""No value of a header or a parameter, however wrong, is answered with a failure of the page or of its servers."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from celery.schedules import crontab
from starlette.testclient import TestClient

from singlebeat import Schedule, web
from singlebeat.web.api.operations import OPERATIONS
from singlebeat.web.security import COOKIE, Users, hashed_password, hashed_token
from singlebeat.web.site import ASKING_WORKERS
from tests.support import APP

from .conftest import HERE, Visitor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

USERS = f"ann:admin:{hashed_password('a')}\nboss:admin:{hashed_token('admin')}"
FORM, JSON = "application/x-www-form-urlencoded", "application/json"
ADMIN = {"Authorization": "Bearer admin"}

#: Neither UTF-8 nor base64; huge and odd numbers; halves of IPv6 addresses and of quoted strings; the ends of time.
VALUES = (
    *(b"", b"\xe9", b"\xff\xfe", b"7aCAOng=", b"%ff%00", b"a\tb", b"-1", b"1_0", b"9" * 29, b"9" * 5000, b"1e999"),
    *(b"nan", b"http://[", b"//[v1.", b"[::1", b"[::1]:" + b"9" * 99, b'"a', b'"\\777\\015\\012"', b"1-1-1"),
    *(b"9" * 29 + b"-1", b"0001-01-01T00:00:00", b"9999-12-31T23:59:59-23:59"),
)

#: The values as strings, and half a character.
TEXTS = (*(value.decode(errors="surrogateescape") for value in VALUES), "\0", "\u0661", "\ud83d")

#: Headers that the page and its framework read, and how their values begin.
HEADERS = (
    *(("Authorization", begin) for begin in (b"", b"Basic ", b"Bearer ")),
    *(("Cookie", begin) for begin in (b"", f"{COOKIE}=".encode(), b"singlebeat_zone=")),
    *((name, b"") for name in ("Host", "Origin", "Content-Type", "Content-Length", "If-Match", "If-None-Match")),
    *((name, b"") for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-User", "X-Singlebeat-Token")),
    *((name, b"") for name in ("Sec-Fetch-Site", "HX-Request")),
)

#: The fields that a page parses, by its path.
READ = {
    "/": ("cursor", "size", "sort", "state", "name"),
    "/history": ("since", "until", "n"),
    "/history.csv": ("since",),
    "/changes": ("n",),
    "/backfill": ("start", "end"),
    "/revert": ("to",),
    "/free": ("id",),
}
SENT = {
    "/pause-all": ("until",),
    "/revert": ("to",),
    "/free": ("which",),
    "/zone": ("zone", "back"),
    "/preview": ("every", "once", "json", "rule_dtstart", "rule_interval", "max_runs", "jitter", "start_time", "args"),
}
KINDS = {"once": "once", "json": "json", "rule_dtstart": "rule", "rule_interval": "rule"}


def cursors() -> Iterator[tuple[str, str]]:
    """Yield orders, and cursors with places that no page has."""
    numbers = (0, 1, 5, -1, 10**29, -(10**29), -(2**64), True, None, 1.5)
    scores = ("", "1_0", "nan", "inf", "-inf", "0x1", " 1 ", "1" * 400, "\u0661", "1e999", "\ud83d")
    places: dict[str, list[list[Any]]] = {
        "last": [[one, other, "e"] for one in numbers for other in numbers],
        "next": [*([score, "redbeat:e"] for score in scores), ["1", "\ud83d"]],
        "name": [["\ud83d"], ["\0"], [1]],
    }
    for sort, found in places.items():
        for place in found:
            yield sort, urlsafe_b64encode(json.dumps([sort, False, *place]).encode()).decode()


@pytest.fixture
def pages(visit, app, redis, monkeypatch) -> Iterable[Visitor]:
    """The page for this machine, with users, and behind a proxy; no limit, and an entry that is due at night."""
    for limit in ("MOST_CHANGES", "MOST_FAILURES", "MOST_FAILURES_OF_ALL"):
        monkeypatch.setattr(f"singlebeat.web.security.{limit}", 10**9)
    Schedule(app).upsert("e", f"{APP}.plain", crontab(minute=0, hour=3))
    proxy = {"client": ("10.1.2.3", 1), "trust_proxy": ["10.0.0.0/8"], "user_header": "X-User", "default_role": "admin"}
    found = [visit(), visit(client=("198.51.100.7", 1), users=Users(USERS)), visit(**proxy)]
    for page in found:
        page.cookies.set(COOKIE, "t")
        page._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    return found


def failed(ask: Callable[[Any], Any], values: Iterable[Any]) -> list[tuple[Any, int, str]]:
    """Return the values after which the page or one of its servers has failed."""
    answers = [(value, ask(value)) for value in values]
    return [(value, each.status_code, each.text[:200]) for value, each in answers if each.status_code >= 500]


def encoded(**fields: str) -> str:
    try:
        return urlencode(fields, errors="surrogateescape")
    except UnicodeEncodeError:
        return urlencode(fields, errors="surrogatepass")


@pytest.mark.parametrize(("header", "begin"), HEADERS)
@pytest.mark.parametrize(
    ("method", "path", "kind", "body"),
    [("GET", "/", "", ""), ("POST", "/pause", FORM, f"{COOKIE}=t&name=e"), ("PATCH", "/api/entry?name=e", JSON, "{}")],
)
def test_no_header_makes_the_page_fail(pages, header, begin, method, path, kind, body):
    given = {**ADMIN, "X-User": "ann", "X-Singlebeat-Token": "t", **({"Content-Type": kind} if kind else {})}

    for page in pages:

        def ask(value: bytes, page: Visitor = page) -> Any:
            headers = {**given, header: begin + value}
            return page.request(method, path, content=body, headers=headers, follow_redirects=False)

        assert failed(ask, VALUES) == []


@pytest.mark.parametrize("path", ["/entry", "/api/entry"])
def test_bytes_of_a_query_that_are_not_encoded_make_no_page_fail(app, redis, path):
    """Not every server refuses them; uvicorn with httptools does not."""
    page = web.app(app)

    async def with_bytes(scope, receive, send):
        await page({**scope, "query_string": b"name=\xe9"}, receive, send)

    answer = TestClient(with_bytes, client=HERE, base_url="http://localhost").get(path)

    assert (answer.status_code, "there is no entry" in answer.text) == (404, True)


@pytest.mark.parametrize(
    "operation",
    [each for each in OPERATIONS if f"/api{each.path}" not in ASKING_WORKERS],
    ids=lambda each: f"{each.method} {each.path}",
)
def test_no_parameter_makes_the_api_fail(pages, operation):
    named = {"name": "e"} if any(each.name == "name" for each in operation.query) else {}
    headers = {**ADMIN, **({"Content-Type": JSON} if operation.method != "GET" else {})}

    def ask(query: dict[str, str], body: dict[str, Any]) -> Any:
        content = json.dumps(body) if body else ""
        url = f"/api{operation.path}?{encoded(**named | query)}"
        return pages[1].request(operation.method, url, content=content, headers=headers)

    for each in operation.query:
        assert failed(lambda text, name=each.name: ask({name: text}, {}), TEXTS) == []
    for each in operation.body:
        values = [*TEXTS, 10**29, -1, 1e300]
        assert failed(lambda value, name=each.name: ask({}, {name: value}), values) == []


def test_no_cursor_makes_the_page_fail(pages):
    def ask(given: tuple[str, str]) -> Any:
        return pages[0].get("/api/entries", params=dict(zip(("sort", "cursor"), given, strict=True)))

    assert failed(ask, cursors()) == []


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in READ.items() for name in names])
def test_no_field_of_a_query_makes_a_page_fail(pages, path, name):
    assert failed(lambda text: pages[0].get(f"{path}?{encoded(**{'name': 'e', name: text})}"), TEXTS) == []


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in SENT.items() for name in names])
def test_no_field_of_a_form_makes_a_page_fail(pages, path, name):
    given = {COOKIE: "t", "name": "e", "task": "t", "kind": KINDS.get(name, "every"), "every": "5", "unit": "s"}

    def ask(text: str) -> Any:
        body = encoded(**{**given, name: text})
        return pages[0].post(path, content=body, headers={"Content-Type": FORM}, follow_redirects=False)

    assert failed(ask, TEXTS) == []
