"""The page inside a real Django: its sessions, permissions and CSRF protection decide; by its client and under WSGI."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from threading import Thread
from types import ModuleType
from urllib.parse import urlencode

import django
import httpx2 as httpx
import pytest
from celery.schedules import crontab
from django.conf import settings
from django.test import Client, override_settings

from singlebeat import Schedule
from singlebeat.errors import ConfigError
from singlebeat.web.security import Role, User, hashed_token
from tests.support import APP

from .mounted import check_mounted, served_by_wsgi

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

URLS = "tests.web.django_urls"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[None]:
    """A project with users in a database."""
    database = tmp_path_factory.mktemp("django") / "site.sqlite3"
    if not settings.configured:
        settings.configure(
            SECRET_KEY="for tests",
            ALLOWED_HOSTS=["testserver", "127.0.0.1"],
            ROOT_URLCONF=URLS,
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(database)}},
            INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
            MIDDLEWARE=[
                "django.contrib.sessions.middleware.SessionMiddleware",
                "django.middleware.common.CommonMiddleware",
                "django.middleware.csrf.CsrfViewMiddleware",
                "django.contrib.auth.middleware.AuthenticationMiddleware",
            ],
            LOGIN_URL="/login/",
            USE_TZ=True,
        )
        django.setup()
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, verbosity=0)
    yield
    from django.db import connections

    connections.close_all()


@pytest.fixture
def page(project, app, redis, no_worker_is_awaited, monkeypatch) -> ModuleType:
    """The adapter, on the app of the test."""
    from singlebeat.web import django as adapter

    module = ModuleType("django_page_app")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "django_page_app", module)
    monkeypatch.setattr(settings, "SINGLEBEAT_WEB", {"app": "django_page_app.app"}, raising=False)
    adapter._made_site.cache_clear()
    yield adapter
    adapter._made_site.cache_clear()


def sign_in(name: str, *, role: str = "", **flags: bool) -> Client:
    """Return a client of a new user, who has the permission for a role."""
    from django.contrib.auth.models import Permission, User
    from django.contrib.contenttypes.models import ContentType

    User.objects.filter(username=name).delete()
    user = User.objects.create_user(name, password="p", **flags)
    if role:
        kind, _ = ContentType.objects.get_or_create(app_label="singlebeat", model="schedule")
        permission, _ = Permission.objects.get_or_create(codename=role, content_type=kind, name=role)
        user.user_permissions.add(permission)
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def form(client: Client, path: str, **fields: str) -> dict[str, str]:
    """Return the hidden fields of the form of a page, and further fields."""
    shown = client.get(path)
    assert shown.status_code == 200, shown.content
    return dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', shown.content.decode())) | fields


def send(client: Client, path: str, fields: dict[str, str]):
    """Send a form as a browser does."""
    return client.post(path, urlencode(fields), content_type="application/x-www-form-urlencoded")


@pytest.fixture
def e(page, app):
    """An entry that is due at night."""
    return Schedule(app).upsert("e", f"{APP}.plain", crontab(minute=0, hour=3))


def is_paused(app) -> bool:
    return Schedule(app).get("e").policy.paused


def test_a_superuser_pauses_an_entry_by_its_form(app, e):
    client = sign_in("root", is_superuser=True)

    answer = send(client, "/beat/pause", form(client, "/beat/pause?name=e", note="why"))

    assert (answer.status_code, answer.headers["location"]) == (303, "/beat/entry?name=e&done=paused")
    assert is_paused(app)
    assert [change.actor for change in Schedule(app).changes("e", 1)] == ["root"]


def test_a_form_without_djangos_token_changes_nothing(app, e):
    client = sign_in("root", is_superuser=True)
    client.get("/beat/")

    assert send(client, "/beat/pause", {"name": "e"}).status_code == 403
    assert send(client, "/beat/pause", {"name": "e", "csrfmiddlewaretoken": "x" * 64}).status_code == 403
    assert not is_paused(app)


def test_a_form_is_protected_without_the_middleware_of_the_host(app, e):
    middleware = [each for each in settings.MIDDLEWARE if "csrf" not in each]
    with override_settings(MIDDLEWARE=middleware):
        client = sign_in("root", is_superuser=True)
        assert send(client, "/beat/pause", {"name": "e"}).status_code == 403
        assert not is_paused(app)
        assert send(client, "/beat/pause", form(client, "/beat/pause?name=e")).status_code == 303
    assert is_paused(app)


@pytest.mark.parametrize(
    ("flags", "role", "reads", "pauses", "deletes"),
    [
        ({}, "", 403, 403, 403),
        ({"is_staff": True}, "", 200, 403, 403),
        ({}, "read", 200, 403, 403),
        ({}, "operate", 200, 303, 403),
        ({}, "admin", 200, 303, 303),
        ({"is_superuser": True}, "", 200, 303, 303),
    ],
)
def test_permissions_of_django_are_roles(app, e, flags, role, reads, pauses, deletes):
    client = sign_in("someone", role=role, **flags)

    assert client.get("/beat/").status_code == reads
    data = form(client, "/beat/", name="e") if reads == 200 else {"name": "e"}
    assert send(client, "/beat/pause", data).status_code == pauses
    assert send(client, "/beat/delete", data).status_code == deletes


def test_a_user_without_a_permission_sees_no_state_in_any_error(page, redis, e):
    redis.hset("redbeat::leader", mapping={"host": "vm-of-the-leader", "pid": "7", "token": "token"})
    redis.set("redbeat::lock", "token")
    client = sign_in("joe")

    for path in ("/beat/nope", "/beat/entry?name=nope", "/beat/api/nope"):
        answer = client.get(path)
        assert answer.status_code == 403
        assert "vm-of-the-leader" not in answer.content.decode()
        assert "pending" not in answer.content.decode()


def test_a_visitor_is_led_to_the_login(page):
    answer = Client().get("/beat/entry?name=e")

    assert (answer.status_code, answer.headers["location"]) == (302, "/login/?next=/beat/entry%3Fname%3De")
    assert Client().get("/beat/", headers={"HX-Request": "true"}).status_code == 401


def test_the_api_takes_sessions_to_read_and_djangos_token_to_change(app, e):
    client = sign_in("root", is_superuser=True)
    assert client.get("/beat/api/entry?name=e").json()["name"] == "e"
    assert Client().get("/beat/api/entry?name=e").json()["status"] == 401

    refused = client.post("/beat/api/pause?name=e", {}, content_type="application/json")
    assert (refused.status_code, refused.json()["status"]) == (403, 403)
    assert not is_paused(app)

    client.get("/beat/")
    token = {"X-CSRFToken": client.cookies["csrftoken"].value}
    assert client.post("/beat/api/pause?name=e", {}, content_type="application/json", headers=token).status_code == 200
    assert is_paused(app)


def test_the_api_takes_tokens_of_a_users_file(page, app, e, tmp_path, monkeypatch):
    path = tmp_path / "users"
    path.write_text(f"bot:operate:{hashed_token('t0ken')}")
    monkeypatch.setitem(settings.SINGLEBEAT_WEB, "users", str(path))
    client = Client(enforce_csrf_checks=True)

    assert client.post("/beat/api/pause?name=e", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.delete("/beat/api/entry?name=e", headers={"Authorization": "Bearer t0ken"}).status_code == 403
    sent = {"content_type": "application/json", "headers": {"Authorization": "Bearer t0ken"}}
    assert client.post("/beat/api/pause?name=e", {}, **sent).status_code == 200
    assert is_paused(app)
    assert client.get("/beat/", headers={"Authorization": "Bearer t0ken"}).status_code == 302  # a page needs a session


def resolve(request) -> User | None:
    """Return a user by a header, as a host of the test does."""
    name = request.headers.get("X-Who")
    return User(name, Role.OPERATE) if name else None


def test_the_host_may_resolve_users_itself(page, app, e, monkeypatch):
    monkeypatch.setitem(settings.SINGLEBEAT_WEB, "resolve_user", f"{__name__}.resolve")

    shown = Client().get("/beat/", headers={"X-Who": "olga"})

    assert "olga, operate" in shown.content.decode()
    assert Client().get("/beat/").status_code == 302


def test_a_read_only_page_refuses_a_superuser(page, app, e, monkeypatch):
    monkeypatch.setitem(settings.SINGLEBEAT_WEB, "read_only", True)
    client = sign_in("root", is_superuser=True)

    assert send(client, "/beat/pause", form(client, "/beat/", name="e")).status_code == 403
    assert not is_paused(app)


def test_requests_that_are_too_large_or_unknown_are_refused(app, e):
    client = sign_in("root", is_superuser=True)

    assert send(client, "/beat/pause", form(client, "/beat/pause?name=e", note="x" * 1_100_000)).status_code == 413
    assert client.options("/beat/").status_code == 405
    assert client.get("/beat/", headers={"Host": "evil.example"}).status_code == 400


def test_a_fragment_that_is_unchanged_is_not_sent_again(page, app, e):
    client = sign_in("root", is_superuser=True)
    fragment = {"HX-Request": "true"}
    first = client.get("/beat/", headers=fragment)

    again = client.get("/beat/", headers={**fragment, "If-None-Match": first.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("length", ["9" * 29, "9" * 5000, "1_0", "\xb2"])
def test_a_wrong_length_of_a_body_is_refused(e, length):
    client = sign_in("root", is_superuser=True)

    assert client.post("/beat/pause", {"name": "e"}, CONTENT_LENGTH=length).status_code == 413


def test_an_unknown_option_of_the_page_is_refused(page, monkeypatch):
    """A typing error must not open a page that is to be read-only."""
    monkeypatch.setitem(settings.SINGLEBEAT_WEB, "readonly", True)

    with pytest.raises(ConfigError, match="SINGLEBEAT_WEB: there is no 'readonly'; did you mean 'read_only'"):
        sign_in("root", is_superuser=True).get("/beat/")


def test_a_token_needs_no_login_of_django_though_all_views_need_one(page, app, tmp_path, monkeypatch):
    path = tmp_path / "users"
    path.write_text(f"bot:operate:{hashed_token('t0ken')}")
    monkeypatch.setitem(settings.SINGLEBEAT_WEB, "users", str(path))
    guarded = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]

    with override_settings(MIDDLEWARE=guarded):
        client, token = Client(), {"Authorization": "Bearer t0ken"}
        asked = {"/beat/api/status": token, "/beat/static/page.css": {}, "/beat/": {}}
        answers = [client.get(path, headers=headers).status_code for path, headers in asked.items()]

    assert answers == [200, 200, 302]


def test_two_first_requests_at_once_make_one_site(page, monkeypatch):
    made = list[str]()

    def make(*_: object, **__: object) -> str:
        made.append("a site")
        if len(made) == 1:
            other = Thread(target=page._site, daemon=True)
            other.start()
            other.join(0.5)  # it waits for this one
        return "a site"

    monkeypatch.setattr(page, "Site", make)
    page._site()

    assert made == ["a site"]


def test_the_page_imports_tasks_and_leaves_the_output_of_its_host_alone(page, app, tmp_path, monkeypatch):
    """Another thread may print meanwhile, and find another stream."""
    (tmp_path / "tasks_that_look.py").write_text("import sys\nseen = sys.stdout")
    monkeypatch.syspath_prepend(tmp_path)
    app.conf.include = ["tasks_that_look"]

    sign_in("root", is_superuser=True).get("/beat/")

    assert sys.modules.pop("tasks_that_look").seen is sys.stdout


def test_answers_have_the_headers_of_security(page):
    client = sign_in("root", is_superuser=True)

    for path in ("/beat/", "/beat/static/page.css", "/beat/api/status", "/beat/none"):
        assert "default-src 'none'" in client.get(path).headers["content-security-policy"]


def test_under_wsgi_links_and_static_files_lead_below_the_prefix(page, app, e):
    from django.core.wsgi import get_wsgi_application

    cookies = {"sessionid": sign_in("root", is_superuser=True).cookies["sessionid"].value}
    with (
        served_by_wsgi(get_wsgi_application()) as url,
        httpx.Client(base_url=url, cookies=cookies, timeout=60) as browser,
    ):
        check_mounted(browser, "/beat", token="csrfmiddlewaretoken")

    assert is_paused(app)
