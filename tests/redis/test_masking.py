"""No command shows a secret argument, and none is lost."""

from __future__ import annotations

import json
import sys
from threading import Thread
from types import SimpleNamespace
from uuid import uuid4

import pytest
from celery.schedules import schedule
from starlette.testclient import TestClient

from singlebeat import Entry, Schedule, Singleton, web
from singlebeat.beat.delivery import Reader
from singlebeat.diagnosis.workers import Workers

SECRET = "hunter2"
KWARGS = {"user": "ann", "api_token": SECRET, "more": [{"Password": SECRET}], "to": f"https://ann:{SECRET}@shop.test/"}
UNREADABLE = {"__type__": "date", "__value__": SECRET}


@pytest.fixture
def login(app):
    """A task whose second argument is secret."""

    @app.task(base=Singleton, name="shop.login", shared=False)
    def login(user, password, **more):
        pass

    return login


@pytest.fixture
def entry(app, redis, login):
    """An entry with secrets in each of its parts."""
    options = {"headers": {"x-secret": SECRET}}
    return Entry("e", login.name, schedule(60), args=["ann", SECRET], kwargs=KWARGS, options=options, app=app).save()


@pytest.mark.parametrize("command", [("show", "e"), ("show", "e", "--json"), ("list", "--json"), ("explain", "e")])
def test_no_command_shows_a_secret_argument(cli, entry, no_worker_is_awaited, command):
    output = cli(*command).output

    assert SECRET not in output
    assert "ann" in output or command[0] == "explain"


@pytest.fixture
def module(app, tmp_path, monkeypatch):
    """Write a module of tasks that the app includes, as most do."""

    def write(text: str) -> None:
        name = f"tasks_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "shop_of_this_test", SimpleNamespace(app=app))
        app.conf.include = [name]

    return write


LOGIN = """
from shop_of_this_test import app

@app.task(name="shop.included_login", shared=False)
def login(user, password): ...
"""


@pytest.mark.parametrize("place", ["show", "list", "the page"])
def test_a_secret_of_a_task_in_an_included_module_is_masked(cli, app, redis, module, place):
    """Its place among positional arguments has a name only where the module is imported."""
    Entry("e", "shop.included_login", schedule(60), args=["ann", SECRET], app=app).save()
    module(LOGIN)

    if place == "the page":
        with TestClient(web.app(app), client=("127.0.0.1", 50_000), base_url="http://localhost") as visitor:
            output = visitor.get("/entry", params={"name": "e"}).text + visitor.get("/api/entries").text
    else:
        output = cli(*{"show": ("show", "e"), "list": ("list", "--json")}[place]).output

    assert "ann" in output
    assert SECRET not in output


@pytest.mark.parametrize("does", ["print('flags: loaded')", "import sys; sys.exit(0)"])
def test_a_module_of_tasks_that_prints_or_exits_spoils_no_command(cli, app, redis, module, does):
    module(does)

    assert json.loads(cli("list", "--json").stdout)["entries"] == []


def test_a_request_does_not_wait_long_while_another_imports_the_tasks(app, redis, module, monkeypatch):
    """A module may wait for a server, and the host of the page has few threads."""
    monkeypatch.setattr("singlebeat.web.site.LOADS_WITHIN", 0.01)
    module("from shop_of_this_test import ask; ask()")
    answers = list[int]()

    def ask() -> None:
        other = Thread(target=lambda: answers.append(visitor.get("/").status_code))
        other.start()
        other.join()

    sys.modules["shop_of_this_test"].ask = ask
    with TestClient(web.app(app), client=("127.0.0.1", 50_000), base_url="http://localhost") as visitor:
        answers.append(visitor.get("/").status_code)

    assert answers == [503, 200]


@pytest.mark.parametrize("place", ["show", "list", "the page"])
def test_an_argument_is_masked_if_the_module_of_its_task_fails(cli, app, redis, module, place):
    """As one that sets signal handlers, in a thread of the page's host."""
    Entry("e", "shop.included_login", schedule(60), args=["ann", SECRET], app=app).save()
    module("raise ValueError" + LOGIN)

    if place == "the page":
        with TestClient(web.app(app), client=("127.0.0.1", 50_000), base_url="http://localhost") as visitor:
            output = visitor.get("/entry", params={"name": "e"}).text + visitor.get("/api/entries").text
    else:
        output = cli(*{"show": ("show", "e"), "list": ("list", "--json")}[place]).output

    assert "**" in output
    assert SECRET not in output


def test_a_queue_is_unknown_if_the_module_of_its_task_fails(cli, app, redis, module, findings, bench, monkeypatch):
    """The task may name another queue than the app's default one, and healthy workers read that."""
    high = Reader(frozenset({"high"}), frozenset({"shop.hi"}), 1, ())
    known = Workers({}, {"w1": high.tasks}, {"w1": ""}, {"w1": high}, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda _: known)
    for name, options in (("e", {}), ("named", {"queue": "unread"})):
        Entry(name, "shop.hi", schedule(60), options=options, app=app).save()
    bench.tick()
    module("raise ConnectionError('the database is away')")

    texts = [text for _, text in findings("queue")]

    assert ["unread" in text for text in texts] == [True]
    assert "-Q celery" not in cli("explain", "e").output


def test_a_page_is_mounted_before_it_imports_the_modules_of_tasks(app, redis, module):
    """They may import the module that mounts it, as is common with Flask and FastAPI."""
    Entry("e", "shop.included_login", schedule(60), args=["ann", SECRET], app=app).save()
    module(LOGIN.replace("import app", "import app, mounted"))  # which is defined once that module is imported
    page = web.app(app)
    sys.modules["shop_of_this_test"].mounted = page

    with TestClient(page, client=("127.0.0.1", 50_000), base_url="http://localhost") as visitor:
        output = visitor.get("/entry", params={"name": "e"}).text

    assert "ann" in output
    assert SECRET not in output


def test_a_module_of_tasks_that_fails_is_executed_once(cli, app, redis, module):
    module("import sys; print('executed', file=sys.stderr); raise ValueError")

    assert cli("list").stderr.count("executed") == 1


def test_what_a_child_of_a_module_of_tasks_prints_spoils_no_command(cli, app, redis, module, capfd):
    module("import subprocess; subprocess.run(['echo', 'v1.2'], check=True)")

    cli("list", "--json")

    seen = capfd.readouterr()
    assert ("v1.2" in seen.out, "v1.2" in seen.err) == (False, True)


def test_a_module_of_tasks_that_cannot_be_imported_is_named(cli, app, redis, module, findings, logged):
    module("import no_such_library")

    shown = cli("list", "--json")
    with TestClient(web.app(app), client=("127.0.0.1", 50_000), base_url="http://localhost") as visitor:
        visitor.get("/")

    assert json.loads(shown.stdout)["entries"] == []
    assert "Warning: a module of tasks cannot be imported here: ModuleNotFoundError: No module named" in shown.stderr
    assert [told["reason"] for told in logged("not_imported")] == [
        "ModuleNotFoundError: No module named 'no_such_library'"
    ]
    ((level, text),) = findings("modules of tasks")
    assert level == "warning"
    assert "no_such_library" in text
    for command in (("health",), ("pause", "--all"), ("resume", "--all"), ("status",)):
        assert "Warning" not in cli(*command, code=None).stderr, "they are to be quick: they import none"


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    "broken",
    [
        {"schedule": None},
        {"enabled": "perhaps"},
        {"task": 5, "args": ["ann"]},
        {"args": {"password": SECRET}},
        {"kwargs": {"password": {"__type__": "datetime", "year": SECRET}}},
        {"options": {"headers": {"x-secret": {"__type__": "uuid", "__value__": SECRET}}}},
    ],
)
def test_the_raw_strings_of_a_broken_entry_show_no_secret(cli, entry, redis, broken, options):
    definition = {**json.loads(entry.encode()), **broken}
    redis.hset("redbeat:e", "definition", json.dumps(definition))

    output = cli("show", "e", *options).output

    assert SECRET not in output
    assert "unusable" in output


def test_a_secret_that_cannot_be_decoded_is_in_no_log_and_no_reason(
    cli, bench, app, redis, no_worker_is_awaited, caplog
):
    redis.hset("redbeat:n", "definition", json.dumps({"task": "t", "schedule": 60, "kwargs": {"password": UNREADABLE}}))
    redis.zadd("redbeat::schedule", {"redbeat:n": 1})

    bench.tick()

    reason = redis.hgetall("redbeat::quarantine")["redbeat:n"]
    assert "'kwargs.password' has the __type__ 'date'" in reason
    shown = [cli(*command).output for command in (("explain", "n"), ("show", "n"), ("list",), ("history", "n"))]
    assert SECRET not in f"{reason} {caplog.text} {shown}"


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"link": json.dumps({"task": "t", "args": [], "kwargs": {"password": SECRET}, "options": {}})}},
        {"options": {"expires": f"redis://:{SECRET}@h"}},
        {"schedule": f"redis://:{SECRET}@h"},
        {"schedule": {"__type__": f"redis://:{SECRET}@h"}},
        {"schedule": {"__type__": "crontab", "timezone": f"redis://:{SECRET}@h"}},
        {"schedule": {"__type__": "interval", "every": 60, f"redis://:{SECRET}@h": 1}},
        {"options": {"queue": f"redis://:{SECRET}@h"}},
        {"options": {f"redis://:{SECRET}@h": 1}},
        {"policy": {"catch_up": f"redis://:{SECRET}@h"}},
        {"policy": {"jitter": {"password": SECRET}}},
        {f"redis://:{SECRET}@h": 1},
    ],
    ids=str,
)
def test_the_reason_of_a_wrong_part_shows_no_secret(cli, bench, redis, no_worker_is_awaited, caplog, fields):
    definition = {"task": "t", "schedule": 60, **fields}
    policy = definition.pop("policy", {})
    redis.hset("redbeat:n", mapping={"definition": json.dumps(definition), "policy": json.dumps(policy)})
    redis.zadd("redbeat::schedule", {"redbeat:n": 1})

    bench.tick()

    reason = redis.hget("redbeat::quarantine", "redbeat:n")
    commands = (("explain", "n"), ("show", "n"), ("list",), ("list", "--json"), ("doctor",), ("history", "n"))
    shown = [cli(*command, code=None).output for command in commands]
    assert SECRET not in f"{reason} {caplog.text} {shown}"


def test_a_definition_that_is_no_json_is_shown_up_to_its_first_secret(cli, entry, redis):
    redis.hset("redbeat:e", "definition", entry.encode()[:-1])

    output = cli("show", "e").output

    assert "shop.login" in output
    assert SECRET not in output


def test_an_export_keeps_secrets_because_it_must_restore_them(cli, entry, app, redis):
    dump = cli("export").stdout
    Schedule(app).delete("e")

    cli("import", "-", stdin=dump)

    assert Schedule(app).get("e").kwargs == KWARGS


def test_a_lock_shows_no_secret_argument(cli, login, redis):
    login.delay("ann", SECRET, more=KWARGS)

    assert SECRET not in cli("locks").output + cli("locks", "--json").output
    assert "ann" in cli("locks").output
    (record,) = [redis.hgetall(key) for key in redis.keys("SINGLETONLOCK_*") if redis.type(key) == "hash"]
    assert SECRET not in str(record)
