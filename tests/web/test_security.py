"""Who may see and change what: the seven points of what is expected of the page's security."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from celery.schedules import crontab
from click.testing import CliRunner
from starlette.testclient import TestClient

from singlebeat import Schedule, web
from singlebeat.cli import main
from singlebeat.errors import ConfigError
from singlebeat.web.exchange import PageRequest
from singlebeat.web.security import (
    COOKIE,
    Gate,
    Limit,
    RefusedError,
    Role,
    User,
    Users,
    hashed_password,
    hashed_token,
)
from tests.support import page as docs_page
from tests.support import wait_until
from tests.system.apps import make_app

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

USERS = "\n".join(
    (
        "# users of the tests",
        f"rita:read:{hashed_password('r')}",
        f"otto:operate:{hashed_password('o')}",
        f"ann:admin:{hashed_password('a')}",
        f"bot:operate:{hashed_token('t0ken')}",
        "petra:admin:",
    )
)


@pytest.fixture
def entry(app, redis):
    """An entry that is not due."""
    Schedule(app).upsert("e", "tests.system.apps.plain", crontab(minute=0, hour=3))


# ------------------------------------------------------------------ 1. where it is served


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_without_authentication_the_command_refuses_other_addresses(app, redis, host):
    result = CliRunner().invoke(main, ["web", "--host", host], obj=SimpleNamespace(app=app))

    assert result.exit_code == 2
    assert "name a users file" in result.output


@pytest.mark.parametrize("client", ["192.0.2.7", "10.0.0.1", "::ffff:192.0.2.1", ""])
def test_without_authentication_other_machines_are_refused(visit, entry, client):
    """Also where a host has mounted the page on a public address."""
    answer = visit(client=(client, 1)).get("/")

    assert answer.status_code == 403
    assert "tests.system.apps.plain" not in answer.text


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP"])
def test_without_authentication_a_proxy_on_this_machine_is_refused(visit, entry, header):
    assert visit().get("/", headers={header: "192.0.2.7"}).status_code == 403


def test_without_authentication_a_request_by_http_1_0_is_refused(app, redis):
    """A proxy that adds no header, such as nginx with ``proxy_pass`` alone, asks so; no browser does."""
    page = web.app(app)

    async def by_http_1_0(scope, receive, send):
        await page({**scope, "http_version": "1.0"}, receive, send)

    answer = TestClient(by_http_1_0, client=("127.0.0.1", 1), base_url="http://localhost").get("/")

    assert answer.status_code == 403
    assert "on this machine only, and without a proxy" in answer.text


# ------------------------------------------------------------------ 2. who


@pytest.mark.parametrize(
    ("name", "password", "status"), [("rita", "r", 200), ("rita", "o", 401), ("zoe", "r", 401), ("petra", "", 401)]
)
def test_a_password_of_the_users_file_admits(visit, entry, name, password, status):
    assert visit(client=("192.0.2.7", 1), users=Users(USERS)).get("/", auth=(name, password)).status_code == status


def test_a_browser_is_asked_for_a_password(visit):
    answer = visit(users=Users(USERS)).get("/")

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")


@pytest.mark.parametrize(("token", "status"), [("t0ken", 200), ("t0keN", 401), ("", 401)])
def test_a_bearer_token_of_the_users_file_admits(visit, token, status):
    answer = visit(users=Users(USERS)).get("/", headers={"Authorization": f"Bearer {token}"})

    assert answer.status_code == status


def test_a_token_in_a_cookie_admits_no_one(visit):
    assert visit(users=Users(USERS)).get("/", headers={"Cookie": "Authorization=Bearer t0ken"}).status_code == 401


@pytest.mark.parametrize(("client", "status"), [("10.1.2.3", 200), ("11.1.2.3", 401)])
def test_only_a_trusted_proxy_names_the_user(visit, client, status):
    page = visit(
        client=(client, 1), users=Users(USERS), trust_proxy=["10.0.0.0/8"], user_header="X-User", hosts=["localhost"]
    )

    assert page.get("/", headers={"X-User": "petra"}).status_code == status


def test_a_user_of_the_proxy_without_a_role_sees_nothing(visit, entry):
    page = visit(client=("10.1.2.3", 1), trust_proxy=["10.0.0.0/8"], user_header="X-User")

    answer = page.get("/", headers={"X-User": "eve"})

    assert answer.status_code == 403
    assert "needs the role read" in answer.text


@pytest.mark.parametrize("names", [("petra", "eve"), ("eve", "petra"), ("petra", "petra")])
def test_a_user_who_is_named_twice_is_refused(visit, names):
    """The proxy has added its header to that of the client, who may name anyone."""
    page = visit(client=("10.1.2.3", 1), users=Users(USERS), trust_proxy=["10.0.0.0/8"], user_header="X-User")

    answer = page.get("/", headers=[("X-User", name) for name in names])

    assert answer.status_code == 400
    assert "X-User was sent 2 times" in answer.text


@pytest.mark.parametrize("name", ["petra,eve", "eve, petra", ","])
def test_a_user_whose_name_has_a_comma_is_refused(visit, name):
    """A WSGI server joins two headers of one name by a comma."""
    page = visit(client=("10.1.2.3", 1), trust_proxy=["10.0.0.0/8"], user_header="X-User", default_role="admin")

    answer = page.get("/", headers={"X-User": name})

    assert answer.status_code == 400
    assert "the name in X-User has a comma" in answer.text


def test_a_user_header_needs_a_proxy_and_a_proxy_needs_users():
    with pytest.raises(ConfigError, match="name the networks of the proxies"):
        web.app(None, user_header="X-User")
    with pytest.raises(ConfigError, match="names no user"):
        web.app(None, trust_proxy=["10.0.0.0/8"])


@pytest.mark.parametrize(
    ("proxy", "forwarded", "status"),
    [
        ("10.1.2.3", ["192.0.2.7"], 200),
        ("10.1.2.3", ["198.51.100.7, 192.0.2.7"], 200),
        ("10.1.2.3", ["198.51.100.7", "192.0.2.7"], 200),
        ("10.1.2.3", ["192.0.2.7, 198.51.100.7"], 429),
        ("10.1.2.3", ["192.0.2.7:1234"], 429),
        ("11.1.2.3", ["192.0.2.7"], 429),
    ],
)
def test_wrong_passwords_count_for_the_client_of_a_trusted_proxy(visit, monkeypatch, proxy, forwarded, status):
    """The proxy adds the address of its client to those that the client has sent. What is no address is ignored."""
    monkeypatch.setattr("singlebeat.web.security.MOST_FAILURES_OF_ALL", 2)
    page = visit(client=(proxy, 1), users=Users(USERS), trust_proxy=["10.0.0.0/8"], hosts=["localhost"])
    for attacker in ("198.51.100.7", "no address"):
        for name in ("rita", "otto"):
            page.get("/", auth=(name, "wrong"), headers={"X-Forwarded-For": attacker})

    answer = page.get("/", auth=("ann", "a"), headers=[("X-Forwarded-For", address) for address in forwarded])

    assert answer.status_code == status


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/entry?name=nope", "/why?name=nope", "/api/nope", "/api/entry?name=nope"]
)
def test_a_user_without_a_role_sees_no_state_in_any_error(visit, entry, redis, path):
    redis.hset("redbeat::leader", mapping={"host": "vm-of-the-leader", "pid": "7", "token": "token"})
    redis.set("redbeat::lock", "token")
    page = visit(client=("10.1.2.3", 1), trust_proxy=["10.0.0.0/8"], user_header="X-User")

    answer = page.get(path, headers={"X-User": "eve"})

    assert answer.status_code == 403
    assert "vm-of-the-leader" not in answer.text
    assert "pending" not in answer.text


def test_the_host_decides_by_its_own_request(visit, entry):
    seen = []

    def resolve(request):
        seen.append(request.url.path)
        return User("ann", Role.READ) if request.headers.get("x-session") == "good" else None

    page = visit(client=("192.0.2.7", 1), base_url="http://shop.example", resolve_user=resolve)

    assert page.get("/").status_code == 403
    assert page.get("/", headers={"X-Session": "good"}).status_code == 200
    assert seen == ["/", "/"]


def test_a_function_of_the_host_that_would_have_to_be_awaited_is_refused(visit):
    async def resolve(request):
        raise AssertionError("it is called in a thread")

    with pytest.raises(ConfigError, match="resolve_user must be a plain function"):
        visit(resolve_user=resolve)


def test_too_many_wrong_passwords_are_not_even_checked(visit):
    page = visit(users=Users(USERS))

    answers = [page.get("/", auth=("ann", "wrong")).status_code for _ in range(11)]

    assert answers == [401] * 10 + [429]
    assert page.get("/", auth=("ann", "a")).status_code == 429


def test_wrong_passwords_lock_no_other_user_out(visit):
    """Behind a proxy, all users have one address."""
    page = visit(users=Users(f"{USERS}\nbot:read:{hashed_token('t' * 40)}"))
    assert page.get("/", auth=("ann", "a")).status_code == 200
    for name in ("ann", "otto", "zoe"):
        for _ in range(11):
            page.get("/", auth=(name, "wrong"))
    for _ in range(11):
        page.get("/", headers={"Authorization": "Bearer wrong"})

    assert page.get("/", auth=("ann", "a")).status_code == 200, "it was right before"
    assert page.get("/", headers={"Authorization": f"Bearer {'t' * 40}"}).status_code == 200


def test_the_cookie_is_sent_by_tls_only_behind_a_proxy_that_ends_tls(visit, entry):
    plain, behind = visit(users=Users(USERS)), visit(users=Users(USERS))

    for page, given in ((plain, {}), (behind, {"X-Forwarded-Proto": "https"})):
        answer = page.get("/", auth=("ann", "a"), headers=given)
        assert ("secure" in answer.headers["set-cookie"].lower()) == bool(given)


def test_a_form_of_many_counts_each_of_them(visit, entry):
    page, names = visit(), [f"e{number}" for number in range(121)]

    answer = page.submit("/many?do=pause&name=e", do="pause", name=names, count=str(len(names)))

    assert answer.status_code == 429


def test_no_page_of_another_zone_leads_elsewhere(visit):
    for back in ("//evil.example", "/\u2603", "/\\evil", "https://evil.example"):
        answer = visit().submit("/", "/zone", zone="utc", back=back)
        assert answer.status_code == 303, back
        assert answer.headers["location"].startswith("/"), back
        assert not answer.headers["location"].startswith("//"), back


@pytest.mark.parametrize(
    "line", ["ann", "ann:admin", "ann:boss:", "ann:admin:md5$1$2", "ann:admin:scrypt$a$b", ":admin:"]
)
def test_a_wrong_line_of_the_users_file_is_named_without_its_hash(line):
    with pytest.raises(ConfigError) as error:
        Users(f"# first\n{line}")

    assert "md5$1$2" not in str(error.value)


def test_the_command_prints_a_line_that_admits(app, redis, tmp_path):
    made = CliRunner().invoke(
        main, ["web", "--add-user", "ann", "--role", "admin"], obj=SimpleNamespace(app=app), input="geheim\n"
    )
    path = tmp_path / "users"
    path.write_text(made.output)

    assert Users.read(path).of_password("ann", "geheim") == User("ann", Role.ADMIN)
    assert "geheim" not in made.output


# ------------------------------------------------------------------ 3. forged requests


def test_a_link_changes_nothing(visit, app, entry):
    page = visit()

    for path in ("/pause", "/resume", "/delete", "/run", "/resign", "/free", "/save"):
        page.get(path, params={"name": "e", "do": "yes"})

    assert not Schedule(app).get("e").policy.paused


def test_a_form_without_the_token_changes_nothing(visit, app, entry):
    page = visit()
    page.get("/")

    assert page.post("/pause", data={"name": "e"}).status_code == 403
    assert page.post("/pause", data={"name": "e", COOKIE: "guess"}).status_code == 403
    assert not Schedule(app).get("e").policy.paused


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "null"},
    ],
)
def test_a_form_of_another_site_changes_nothing(visit, app, entry, headers):
    page = visit()
    data = page.form("/pause?name=e")

    assert page.post("/pause", data=data, headers=headers).status_code == 403
    assert not Schedule(app).get("e").policy.paused


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "same-origin", "Origin": "null"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
        {"Origin": "http://localhost"},
    ],
)
def test_a_form_of_the_page_is_taken_as_browsers_send_it(visit, app, entry, headers):
    """With our Referrer-Policy, browsers that know it send no other Origin than null."""
    page = visit()

    assert page.post("/pause", data=page.form("/pause?name=e"), headers=headers).status_code == 200
    assert Schedule(app).get("e").policy.paused


def test_the_cookie_is_kept_from_other_sites_and_from_scripts(visit):
    cookie = visit(base_url="https://localhost").get("/").headers["set-cookie"].lower()

    assert {"httponly", "samesite=strict", "secure"} <= {part.strip() for part in cookie.split(";")}


def test_a_link_of_another_site_is_asked_again_with_its_cookie(visit):
    """Without that, the cookie that it lacks would be replaced, and the forms of other tabs would fail."""
    answer = visit().get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})

    assert answer.headers["refresh"] == "0"
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 421), ("localhost:5556", 200), ("[::1]:5556", 200), ("shop.example", 200)]
)
def test_only_known_host_names_are_served(visit, host, status):
    """Otherwise a page of another site could let its own name lead here (DNS rebinding)."""
    assert visit(hosts=["shop.example"]).get("/", headers={"Host": host}).status_code == status


def test_no_other_site_may_read_an_answer(visit):
    answer = visit().get("/", headers={"Origin": "http://evil.example"})

    assert [name for name in answer.headers if name.startswith("access-control")] == []


# ------------------------------------------------------------------ 4. headers


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/no-such-page", "/entry?name=none"])
def test_every_answer_has_the_headers_of_security(visit, path):
    headers = visit().get(path).headers

    assert headers["content-security-policy"] == CSP
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_the_scripts_carry_the_nonce_of_the_host(visit):
    text = visit(nonce=lambda request: "n0nce").get("/").text

    assert text.count('nonce="n0nce"') == text.count("<script") + text.count('rel="stylesheet"')


# ------------------------------------------------------------------ 5. hostile names

HOSTILE = (
    "<script>alert(1)</script>",
    "\"onmouseover=alert(1) x='",
    "a/b/../c?d=e#f",
    "javascript:alert(1)",
    "\u202eright to left",
    "x" * 10_000,
)


@pytest.mark.parametrize("name", HOSTILE, ids=["script", "quotes", "slashes", "scheme", "bidi", "long"])
def test_a_hostile_name_is_shown_as_it_is_and_never_in_a_path(visit, app, name):
    Schedule(app).upsert(name, "t<b>", 3600, args=["<img src=x onerror=alert(1)>"], paused=True, note=name)
    page = visit()

    for path in ("/", "/history"):
        text = page.get(path).text
        assert "<script>alert" not in text
        assert "<img" not in text
    answer = page.get("/entry", params={"name": name})
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    assert "<img" not in answer.text
    links = re.findall(r'(?:href|action|src|hx-get)="([^"]*)"', page.get("/").text + answer.text)
    assert [link for link in links if not link.startswith(("/", "#", "data:image/svg+xml,"))] == []
    assert [link for link in links if "alert" in link.partition("?")[0]] == []


# ------------------------------------------------------------------ 6. limits


def test_a_large_form_is_refused(visit, app, entry):
    page = visit()

    assert page.post("/pause", data=page.form("/pause?name=e", note="x" * 1_100_000)).status_code == 413


def test_a_form_of_another_kind_is_refused(visit):
    page = visit()

    assert page.post("/pause", json={"name": "e"}).status_code == 415


def test_a_form_with_very_many_fields_is_refused(visit):
    page = visit()

    assert page.post("/pause", data={f"f{at}": "1" for at in range(1000)}).status_code == 400


def test_changes_are_limited_for_each_user():
    clock = iter(range(1000))
    limit = Limit(2, lambda: next(clock))

    assert [limit.take("ann") for _ in range(3)] == [True, True, False]
    assert not limit.take("otto", 3)
    assert limit.take("otto", 2)


def test_a_limit_forgets_after_a_minute():
    times = [0.0]
    limit = Limit(1, lambda: times[0])
    assert limit.take("ann")
    times[0] = 61.0

    assert limit.take("ann")


def test_an_unknown_name_takes_as_long_as_a_wrong_password():
    """The names of users are not given away; a slow hash is computed in both cases."""
    users = Users(USERS)

    def took(name: str) -> float:
        began = time.thread_time()
        assert users.of_password(name, "wrong") is None
        return time.thread_time() - began

    took("zoe")
    assert min(took("zoe") for _ in range(3)) > min(took("ann") for _ in range(3)) / 4


class Checked:
    """Users whose passwords are checked only when the test lets them; counts how many are checked at once."""

    def __init__(self, users: Users) -> None:
        self.users, self.real = users, users.of_password
        self.let_go, self.began = threading.Event(), threading.Semaphore(0)
        self.running, self.most = 0, 0
        users.of_password = self

    def __call__(self, name: str, password: str) -> User | None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.began.release()
        assert self.let_go.wait(30)
        self.running -= 1
        return self.real(name, password)


@contextmanager
def at_once(gate: Gate, passwords: Sequence[tuple[str, str]]) -> Iterator[Counter[object]]:
    """Let each of some users ask at once; yield names and statuses of the answers, which are complete at the end."""
    answers: Counter[object] = Counter()

    def ask(name: str, password: str) -> None:
        try:
            answers[gate.admit(request_of(name, password)).name] += 1
        except RefusedError as exc:
            answers[exc.status] += 1

    threads = [threading.Thread(target=ask, args=each) for each in passwords]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join()


def request_of(name: str, password: str) -> PageRequest:
    given = base64.b64encode(f"{name}:{password}".encode()).decode()
    return PageRequest("/", client="192.0.2.7", headers={"host": "localhost", "authorization": f"Basic {given}"})


def test_wrong_passwords_at_once_are_no_more_than_one_by_one():
    """Each is counted before it is checked; and each takes 16 MiB: many at once must not take all memory."""
    users = Users(USERS)
    checked, gate = Checked(users), Gate(users=users)
    checked.let_go.set()

    with at_once(gate, [("ann", f"wrong {number}") for number in range(40)]) as answers:
        pass

    assert answers == {401: 10, 429: 30}
    assert checked.most == 1


def test_right_passwords_at_once_use_up_no_attempts():
    users = Users(USERS)
    checked, gate = Checked(users), Gate(users=users)

    with at_once(gate, [("ann", "a")] * 16) as answers:
        checked.let_go.set()

    assert answers == {"ann": 16}
    with at_once(gate, [("ann", f"wrong {number}") for number in range(10)]) as answers:
        pass
    assert answers == {401: 10}


def test_a_client_tries_no_password_with_very_many_names(visit):
    page = visit(users=Users(f"ann:admin:{hashed_password('a')}"))

    answers = [page.get("/", auth=(f"name {number}", "Winter2026")).status_code for number in range(101)]

    assert answers == [401] * 100 + [429]


def test_wrong_passwords_of_one_name_leave_room_for_other_names(visit):
    """Behind a proxy, a program with an old password must not lock all others out."""
    page = visit(users=Users(USERS))

    assert [page.get("/", auth=("otto", "old")).status_code for _ in range(110)] == [401] * 10 + [429] * 100
    assert page.get("/", auth=("ann", "a")).status_code == 200


def test_a_verified_user_waits_for_no_password_of_another():
    users = Users(USERS)
    gate = Gate(users=users)
    gate.admit(request_of("ann", "a"))
    checked = Checked(users)

    with at_once(gate, [(f"name {number}", "wrong") for number in range(60)]) as answers:
        assert checked.began.acquire(timeout=30)
        assert gate.admit(request_of("ann", "a")).name == "ann"
        wait_until(lambda: answers[429] == 44, what="the refusal of those that need not wait")
        checked.let_go.set()

    assert answers == {401: 16, 429: 44}


# ------------------------------------------------------------------ 7. rights in Redis


def rules_of(user: str) -> list[str]:
    """Return the rules of a user of Redis in the docs."""
    text = docs_page("how-to/page" if user == "viewer" else "how-to/redis")
    return re.search(rf"ACL SETUSER {user} on >\S+ (.+?)\n\n", text, re.DOTALL)[1].split()


@pytest.mark.parametrize("user", ["singlebeat", "viewer"])
def test_no_view_needs_more_rights_in_redis_than_the_docs_give(visit, own_server, user):
    client = own_server.client()
    client.execute_command("ACL", "SETUSER", user, "reset", "on", ">pw", *rules_of(user))
    url = own_server.tcp_url.replace("://", f"://{user}:pw@")
    with make_app(own_server.celery_url, {"redbeat_redis_url": url, "singleton_backend_url": url}) as app:
        with make_app(own_server.celery_url) as free:
            Schedule(free).upsert("e", "t", 3600, paused=True)
            Schedule(free).trigger("e")
        page = visit(of=app, read_only=user == "viewer")
        for path in ("/", "/?q=e&sort=last", "/?sort=name", "/entry?name=e", "/why?name=e", "/history"):
            assert (answer := page.get(path)).status_code == 200, (path, answer.text[-900:])
        for path in ("/locks", "/doctor", "/quarantine", "/changes", "/changes?name=e", "/api/entry?name=e"):
            assert page.get(path).status_code == 200, path
        if user == "singlebeat":
            assert page.submit("/run?name=e").status_code in {303, 409}
            assert page.submit("/resume?name=e").status_code == 303
            assert page.submit("/delete?name=e").status_code == 303
