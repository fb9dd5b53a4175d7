"""The HTTP API: its description is valid, each answer is as described, and conflicts, masks and roles hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.schedules import crontab
from celery.schedules import schedule as interval
from jsonschema import Draft202012Validator, FormatChecker
from openapi_spec_validator import OpenAPIV31SpecValidator
from redis.exceptions import ConnectionError as RedisConnectionError

from singlebeat import Schedule
from singlebeat.beat.entries import save
from singlebeat.beat.entries.definition import MOST_NESTED
from singlebeat.beat.schedule import PROPOSE
from singlebeat.cli import COMMANDS
from singlebeat.connections import schedule_client
from singlebeat.lua import Script
from singlebeat.web.api.description import description
from singlebeat.web.api.operations import OPERATIONS
from singlebeat.web.security import COOKIE, Role, Users, hashed_password, hashed_token
from tests.proxy import LossyProxy
from tests.redis.conftest import bench, bench_on  # noqa: F401 - fixtures
from tests.support import APP, page, wait_until

from .conftest import HERE, Visitor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

USERS = "\n".join(
    (
        f"reader:read:{hashed_token('read')}",
        f"operator:operate:{hashed_token('operate')}",
        f"boss:admin:{hashed_token('admin')}",
        f"ann:admin:{hashed_password('a')}",
    )
)
PLAIN = f"{APP}.plain"
NIGHTLY = {"task": PLAIN, "schedule": {"__type__": "crontab", "minute": "0", "hour": "3"}}
DOCUMENT = json.loads(json.dumps(description("")))
FAR = ("198.51.100.7", 1)


class Client:
    """A program that holds a token, and checks each answer against the description."""

    def __init__(self, page: Visitor, token: str = "admin") -> None:
        self.page, self.token = page, token

    def __call__(self, method: str, path: str, body: object = None, status: int = 200, **given: Any) -> Any:
        headers = given.pop("headers", {}) | {"Authorization": f"Bearer {self.token}"}
        sent = {} if body is None else {"json": body}
        answer = self.page.request(method, f"/api{path}", params=given, headers=headers, **sent)
        assert answer.status_code == status, answer.text
        check(method, path, answer)
        return answer


def check(method: str, path: str, answer: Any) -> None:
    """Check that an answer is as the description says."""
    described = DOCUMENT["paths"][path][method.lower()]["responses"][str(answer.status_code)]
    if "content" not in described:
        assert answer.content == b""
        return
    (kind,) = described["content"]
    assert answer.headers["content-type"].partition(";")[0] == kind
    where = f"#/paths/{path.replace('/', '~1')}/{method.lower()}/responses/{answer.status_code}/content"
    pointer = f"{where}/{kind.replace('/', '~1')}/schema"
    schema = {"$schema": Draft202012Validator.META_SCHEMA["$id"], **DOCUMENT, "$ref": pointer}
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(answer.json())
    assert ("ETag" in described.get("headers", {})) == ("etag" in answer.headers)


@pytest.fixture
def client(visit) -> Client:
    """A client with all rights, on another machine."""
    return Client(visit(client=FAR, users=Users(USERS)))


@pytest.fixture
def schedule(app, redis) -> Schedule:
    """The entries of the app."""
    return Schedule(app, actor="test")


@pytest.fixture
def e(schedule):
    """An entry that is due at night, and has a secret argument."""
    return schedule.upsert("e", PLAIN, crontab(minute=0, hour=3), kwargs={"key": 1, "password": "geheim"}, tags=["t"])


# ------------------------------------------------------------------ the description


def test_the_description_is_valid_openapi():
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_the_description_is_served_with_the_place_of_the_page(visit):
    page = visit(client=FAR, users=Users(USERS))

    answer = page.get("/api/openapi.json", headers={"Authorization": "Bearer read"})

    assert answer.json()["servers"] == [{"url": "/api"}]
    assert answer.json()["paths"].keys() == DOCUMENT["paths"].keys()
    assert page.get("/api/openapi.json").status_code == 401


def _backfill(client: Client) -> None:
    until = datetime.now(UTC).replace(microsecond=0)
    body = {"start": (until - timedelta(days=3)).isoformat(), "end": until.isoformat()}
    planned = client("POST", "/backfill", {**body, "dry_run": True}, name="e").json()
    assert (len(planned["runs"]), planned["begun"]) == (3, False)
    assert client("POST", "/backfill", body, 202, name="e").json()["begun"]


def _revert(client: Client) -> None:
    before = client("GET", "/entry", name="e").json()
    client("PATCH", "/entry", {"policy": {"jitter": 7}}, name="e")
    (change, *_) = client("GET", "/changes", name="e").json()["changes"]
    assert (change["actor"], change["by"], list(change["differences"])) == ("boss", "api", ["jitter"])
    after = client("POST", "/revert", {"to": change["id"]}, name="e").json()
    assert (after["definition"], after["policy"]) == (before["definition"], before["policy"])


def _locks(client: Client) -> None:
    client.page.singleton.delay("geheim")  # type: ignore[attr-defined]
    (lock,) = client("GET", "/locks").json()["locks"]
    freed = client("POST", "/unlock", {"which": lock["task_id"], "force": True}).json()
    assert freed["key"] == lock["key"]
    assert client("GET", "/locks").json()["locks"] == []


@pytest.mark.parametrize(("matches", "status"), [(None, 409), ("*", 409), ("as read", 412)])
def test_an_overtaken_change_says_whether_its_condition_failed(client, app, e, monkeypatch, matches, status):
    """``*`` is any version of an entry that exists, and it exists."""
    stored, others = Schedule.save, list[Schedule]()

    def save_second(self: Schedule, entry: Any) -> Any:
        if not others:  # between reading and writing
            others.append(Schedule(app))
            others[0].upsert("e", PLAIN, crontab(minute=1, hour=3))
        return stored(self, entry)

    version = client("GET", "/entry", name="e").headers["ETag"]
    monkeypatch.setattr(Schedule, "save", save_second)
    headers = {"If-Match": version if matches == "as read" else matches} if matches else {}

    client("PATCH", "/entry", {"policy": {"note": "x"}}, status, name="e", headers=headers)

    assert len(others) == 1


def test_a_lock_that_is_not_freed_is_a_conflict(client, schedule):
    answer = client("POST", "/unlock", {"which": "none"}, 409)

    assert answer.json()["title"] == "The lock was not freed"


#: For each operation a way to let it succeed, on an app with the entry ``e``.
WAYS: dict[str, Callable[[Client], object]] = {
    "status": lambda client: client("GET", "/status"),
    "doctor": lambda client: client("GET", "/doctor"),
    "list_entries": lambda client: client("GET", "/entries", search="E", size=1),
    "get_entry": lambda client: client("GET", "/entry", name="e"),
    "put_entry": lambda client: client("PUT", "/entry", {"definition": NIGHTLY}, 201, name="new"),
    "patch_entry": lambda client: client("PATCH", "/entry", {"definition": {"enabled": False}}, name="e"),
    "delete_entry": lambda client: client("DELETE", "/entry", None, 204, name="e"),
    "preview": lambda client: client("POST", "/preview", {"definition": NIGHTLY}),
    "next_runs": lambda client: client("GET", "/next", name="e", count=3),
    "explain": lambda client: client("GET", "/explain", name="e"),
    "history": lambda client: client("GET", "/history"),
    "run": lambda client: client("POST", "/run", {"overlap": "allow_all"}, 202, name="e"),
    "pause": lambda client: client("POST", "/pause", {"note": "why"}, name="e"),
    "resume": lambda client: client("POST", "/resume", name="e"),
    "pauses": lambda client: client("GET", "/pauses"),
    "pause_many": lambda client: client("POST", "/pause-many", {"tag": "t", "until": "2999-01-01T00:00:00Z"}),
    "resume_many": lambda client: client("POST", "/resume-many", {"all": True}),
    "backfill": _backfill,
    "backfill_progress": lambda client: (_backfill(client), client("GET", "/backfill", name="e")),
    "changes": lambda client: client("GET", "/changes"),
    "revert": _revert,
    "locks": _locks,
    "unlock": _locks,
    "quarantine": lambda client: client("GET", "/quarantine"),
    "resign": lambda client: client("POST", "/resign"),
}


@pytest.mark.parametrize("operation", [each.id for each in OPERATIONS])
def test_each_operation_answers_as_it_is_described(client, app, redis, bench, e, operation):  # noqa: F811
    bench.tick()  # leads, and has decided about an entry
    bench.put("due")
    bench.make_due("due")
    bench.tick(2)
    redis.hset("redbeat:broken", "definition", "{")
    redis.zadd("redbeat::schedule", {"redbeat:broken": 1})
    bench.tick()
    client.page.singleton = app.tasks[f"{APP}.single"]  # type: ignore[attr-defined]

    WAYS[operation](client)


def test_an_error_is_a_problem_that_says_what_to_do(client, redis):
    problem = client("GET", "/entry", None, 404, name="none").json()

    assert problem["status"] == 404
    assert "there is no entry 'none'" in problem["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body", "given", "status"),
    [
        ("GET", "/entries", None, {"sort": "colour"}, 422),
        ("GET", "/entries", None, {"size": "many"}, 422),
        ("GET", "/entries", None, {"colour": "red"}, 422),
        ("GET", "/entry", None, {}, 422),
        ("GET", "/next", None, {"name": "e", "after": "noon"}, 422),
        ("POST", "/run", {"overlap": "whenever"}, {"name": "e"}, 422),
        ("POST", "/run", [], {"name": "e"}, 400),
        ("POST", "/pause-many", {}, {}, 422),
        ("POST", "/pause-many", {"tag": "t", "all": True}, {}, 422),
        ("PUT", "/entry", {"definition": {"task": "t"}}, {"name": "new"}, 422),
        ("PUT", "/entry", {"definition": {**NIGHTLY, "colour": "red"}}, {"name": "new"}, 422),
        ("PUT", "/entry", {"definition": NIGHTLY, "policy": {"jitters": 3}}, {"name": "new"}, 422),
        ("PATCH", "/entry", {"definition": {"schedule": "often"}}, {"name": "e"}, 422),
        ("POST", "/preview", {"definition": {"task": "t", "schedule": -1}}, {}, 422),
    ],
)
def test_what_cannot_be_used_is_refused_and_changes_nothing(client, redis, e, method, path, body, given, status):
    before = redis.hgetall("redbeat:e"), redis.zcard("redbeat::schedule")

    client(method, path, body, status, **given)

    assert (redis.hgetall("redbeat:e"), redis.zcard("redbeat::schedule")) == before


def test_a_body_that_is_no_json_is_refused(client):
    for content, kind, status in (
        ("{", "application/json", 400),
        ('{"a": NaN}', "application/json", 400),
        ("[" * 20_000, "application/json", 400),
        ("note=x", "application/x-www-form-urlencoded", 415),
        (json.dumps({"note": "x" * 1_100_000}), "application/json", 413),
    ):
        headers = {"Authorization": "Bearer admin", "Content-Type": kind}
        answer = client.page.post("/api/pause?name=e", content=content, headers=headers)
        assert answer.status_code == status, content[:20]
        check("POST", "/pause", answer)


def test_an_unknown_path_or_method_is_said_in_json(client):
    get = {"headers": {"Authorization": "Bearer admin"}}

    assert client.page.get("/api/colours", **get).json()["status"] == 404
    answer = client.page.get("/api/run", **get)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


# ------------------------------------------------------------------ versions


def test_a_change_of_an_old_version_is_refused_and_says_what_differs(client, schedule, e):
    version = client("GET", "/entry", name="e").headers["etag"]
    schedule.save(schedule.salvage("e").changed({"task": f"{APP}.single"}, {"jitter": 5}))

    for method, body in (("PUT", {"definition": NIGHTLY}), ("PATCH", {"policy": {"jitter": 9}}), ("DELETE", None)):
        answer = client(method, "/entry", body, 412, name="e", headers={"If-Match": version})
        assert answer.json()["differences"] == ["task", "jitter"]
    assert schedule.get("e").policy.jitter == 5


def test_a_change_of_the_present_version_is_stored(client, schedule, e):
    version = client("GET", "/entry", name="e").headers["etag"]

    answer = client("PATCH", "/entry", {"policy": {"jitter": 9}}, name="e", headers={"If-Match": version})

    assert schedule.get("e").policy.jitter == 9
    assert answer.headers["etag"] != version
    client("DELETE", "/entry", None, 204, name="e", headers={"If-Match": answer.headers["etag"]})


@pytest.mark.parametrize("version", ["*", '"old"'])
@pytest.mark.parametrize(
    ("method", "body"), [("PUT", {"definition": NIGHTLY}), ("PATCH", {"policy": {"jitter": 9}}), ("DELETE", None)]
)
def test_a_version_matches_no_entry_that_is_missing(client, schedule, version, method, body):
    answer = client(method, "/entry", body, 412, name="e", headers={"If-Match": version})

    assert answer.json()["detail"].startswith("there is no entry 'e'")
    assert [*schedule.list()] == []


@pytest.mark.parametrize("empty", ["", " ", ","])
@pytest.mark.parametrize(
    ("method", "body"), [("PUT", {"definition": NIGHTLY}), ("PATCH", {"policy": {"jitter": 9}}), ("DELETE", None)]
)
def test_an_empty_version_is_refused(client, schedule, e, empty, method, body):
    """A client whose variable is empty has a version in mind: it does not mean any."""
    answer = client(method, "/entry", body, 400, name="e", headers={"If-Match": empty})

    assert "write the ETag of the entry" in answer.json()["detail"]
    assert schedule.get("e").policy.jitter is None


@pytest.mark.parametrize("listed", ['"old", {}', '"old" , W/{},"other"', '"old"\n{}'])
def test_one_of_several_versions_suffices(client, schedule, e, listed):
    """The last case is a header that came twice, as the page joins its values."""
    version = client("GET", "/entry", name="e").headers["etag"]
    headers = [("If-Match", each) for each in listed.format(version).split("\n")]
    headers.append(("Authorization", "Bearer admin"))

    answer = client.page.request("DELETE", "/api/entry", params={"name": "e"}, headers=headers)

    assert answer.status_code == 204


def test_a_change_between_check_and_write_is_refused(client, schedule, e, monkeypatch):
    """The write itself compares what is stored; nothing may come in between."""
    version = client("GET", "/entry", name="e").headers["etag"]
    real = Schedule.save

    def save(self, entry):
        monkeypatch.setattr(Schedule, "save", real)
        schedule.save(schedule.salvage("e").changed({}, {"note": "faster"}))
        return real(self, entry)

    monkeypatch.setattr(Schedule, "save", save)
    answer = client("PUT", "/entry", {"definition": NIGHTLY}, 412, name="e", headers={"If-Match": version})

    assert answer.json()["differences"] == ["note"]
    assert schedule.get("e").policy.note == "faster"


def test_a_revert_of_an_old_version_is_refused(client, schedule, e):
    version = client("GET", "/entry", name="e").headers["etag"]
    schedule.pause("e", "why")
    to = {"to": schedule.changes("e")[0].id}

    client("POST", "/revert", to, 412, name="e", headers={"If-Match": version})
    assert schedule.get("e").policy.paused

    version = client("GET", "/entry", name="e").headers["etag"]
    client("POST", "/revert", to, name="e", headers={"If-Match": version})
    assert not schedule.get("e").policy.paused


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/pause", {"If-Match": '"of old"'}),
        ("POST", "/run", {"If-None-Match": "*"}),
        ("PUT", "/entry", {"If-None-Match": '"of old"'}),
    ],
)
def test_a_condition_that_is_not_heeded_is_refused(client, schedule, e, method, path, headers):
    before = schedule.get("e").encode()

    answer = client(method, path, {"definition": NIGHTLY} if method == "PUT" else {}, 400, name="e", headers=headers)

    assert next(iter(headers)) in answer.json()["detail"]
    assert (schedule.get("e").encode(), schedule.get("e").policy.paused) == (before, False)


def test_any_version_is_none_that_was_read_so_the_pause_stays(client, schedule, e):
    schedule.pause("e", "why")

    client("PUT", "/entry", {"definition": NIGHTLY}, name="e", headers={"If-Match": "*"})

    assert (schedule.get("e").policy.paused, schedule.get("e").policy.note) == (True, "why")


def test_an_entry_that_must_be_new_replaces_none(client, schedule, e):
    headers = {"If-None-Match": "*"}

    client("PUT", "/entry", {"definition": NIGHTLY}, 412, name="e", headers=headers)
    client("PUT", "/entry", {"definition": NIGHTLY}, 201, name="new", headers=headers)

    assert schedule.get("e").kwargs["password"] == "geheim"


def test_a_stored_entry_keeps_its_pause_and_its_past(client, schedule, e):
    schedule.pause("e", "why")

    client("PUT", "/entry", {"definition": {**NIGHTLY, "schedule": 60}}, name="e")

    assert (schedule.get("e").policy.paused, schedule.get("e").policy.note) == (True, "why")


def test_an_entry_that_is_resumed_while_it_is_stored_goes_on(client, schedule, e, monkeypatch):
    schedule.pause("e", "why")
    write = save._write

    def write_late(*args):
        monkeypatch.undo()
        assert schedule.resume("e")
        return write(*args)

    monkeypatch.setattr(save, "_write", write_late)
    client("PUT", "/entry", {"definition": {**NIGHTLY, "schedule": 60}}, name="e")

    assert (schedule.get("e").policy.paused, schedule.get("e").policy.note) == (False, "")
    assert schedule.get("e").schedule == interval(60)


def test_a_new_entry_runs_at_its_times_and_not_at_once(client, schedule):
    client("PUT", "/entry", {"definition": NIGHTLY}, 201, name="new")

    assert schedule.next_runs("new", 1)[0] > datetime.now(UTC)


def test_only_a_patch_keeps_what_is_not_given(client, schedule, e):
    client("PATCH", "/entry", {"definition": {"args": [3]}, "policy": {"jitter": 4}}, name="e")
    patched = schedule.get("e")
    assert (patched.args, patched.kwargs["key"], patched.policy.jitter) == ([3], 1, 4)
    assert list(patched.policy.tags) == ["t"]

    client("PATCH", "/entry", {"policy": {"jitter": None}}, name="e")
    assert schedule.get("e").policy.jitter is None

    client("PUT", "/entry", {"definition": NIGHTLY}, name="e")
    assert (schedule.get("e").args, schedule.get("e").kwargs) == ([], {})


def test_a_broken_entry_is_mended_only_as_a_whole(client, redis, schedule, e):
    redis.hset("redbeat:e", "definition", json.dumps({"task": 3, "schedule": "often", "args": [7]}))

    found = client("GET", "/entry", name="e").json()
    assert (found["definition"], found["state"], *sorted(found["problems"])) == (None, "unusable", "schedule", "task")

    problem = client("PATCH", "/entry", {"definition": {"task": PLAIN}}, 422, name="e").json()
    assert "schedule" in problem["detail"]
    client("PATCH", "/entry", {"definition": {"task": PLAIN, "schedule": 60}}, name="e")
    assert schedule.get("e").args == [7]


def test_a_change_whose_replies_are_all_lost_may_have_been_done(visit, server, bench_on):  # noqa: F811 - a fixture
    with LossyProxy(server) as proxy:
        bench = bench_on(server, redbeat_redis_url=proxy.url, singleton_backend_url=server.url)
        bench.put()
        client = Client(visit(client=FAR, users=Users(USERS), of=bench.app))
        proxy.meanwhile = lambda: proxy.lose_reply_of(PROPOSE)
        proxy.lose_reply_of(PROPOSE)

        answer = client("POST", "/run", {}, 503, name="e")

    assert answer.json()["detail"].endswith("before you repeat it, see celery singlebeat history")


# ------------------------------------------------------------------ masks


def test_a_secret_is_masked_and_survives_to_be_written_back(client, schedule, e):
    found = client("GET", "/entry", name="e").json()
    assert "geheim" not in json.dumps(found)

    found["policy"]["jitter"] = 3
    found["definition"]["kwargs"]["key"] = 2
    client("PUT", "/entry", found, name="e")

    assert schedule.get("e").kwargs == {"key": 2, "password": "geheim"}


def test_hidden_arguments_survive_to_be_written_back(visit, schedule, e):
    client = Client(visit(client=FAR, users=Users(USERS), hide_arguments=True))

    found = client("GET", "/entry", name="e").json()
    assert found["definition"]["kwargs"] == {"key": "**", "password": "**"}
    client("PUT", "/entry", found, name="e")

    assert schedule.get("e").kwargs == {"key": 1, "password": "geheim"}


def test_a_deletion_names_the_key_that_stays(client, redis):
    redis.lpush("redbeat:b", "mine")
    redis.zadd("redbeat::schedule", {"redbeat:b": 1})

    found = client("DELETE", "/entry", None, 200, name="b").json()

    assert found == {"name": "b", "deleted": True, "left": "redbeat:b"}
    assert redis.lrange("redbeat:b", 0, -1) == ["mine"]
    client("DELETE", "/entry", None, 404, name="b")


def test_an_entry_that_changes_meanwhile_is_not_deleted(client, schedule, e, monkeypatch):
    version, delete = client("GET", "/entry", name="e").headers["etag"], Schedule.delete

    def late(self: Schedule, name: str, **given: Any) -> bool:
        schedule.pause(name)
        return delete(self, name, **given)

    monkeypatch.setattr(Schedule, "delete", late)
    client("DELETE", "/entry", name="e", headers={"If-Match": version}, status=412)
    assert schedule.get("e").policy.paused
    monkeypatch.setattr(Schedule, "delete", delete)
    client(
        "DELETE",
        "/entry",
        name="e",
        headers={"If-Match": client("GET", "/entry", name="e").headers["etag"]},
        status=204,
    )


@pytest.mark.parametrize("depth", [MOST_NESTED, 900])
def test_a_body_that_is_nested_too_deeply_is_refused(client, schedule, depth):
    body = '{"definition": {"task": "t", "schedule": 1, "kwargs": {"x": ' + "[" * depth + "]" * depth + "}}}"
    headers = {"Authorization": "Bearer admin", "Content-Type": "application/json"}

    answer = client.page.put("/api/entry?name=deep", content=body, headers=headers)

    assert answer.status_code == 422
    assert f"nested too deeply: use at most {MOST_NESTED} arrays and objects" in answer.json()["detail"]
    assert client("GET", "/entry", name="deep", status=404)


def test_a_mask_without_a_version_ends_no_pause(client, schedule, e):
    schedule.upsert("e", PLAIN, 60, kwargs={"password": "s3cret"})
    schedule.pause("e", "maintenance")
    shown = client("GET", "/entry", name="e").json()["definition"]
    assert shown["kwargs"] == {"password": "**"}

    client("PUT", "/entry", {"definition": shown}, name="e")

    stored = schedule.get("e")
    assert (stored.policy.paused, stored.policy.note) == (True, "maintenance")
    assert stored.kwargs == {"password": "s3cret"}


def test_a_version_is_made_of_a_secret_that_no_reader_knows(client, visit, redis, e):
    """Else a reader could try what a masked argument is; all processes of a page agree on it."""
    first = client("GET", "/entry", name="e").headers["etag"]
    assert Client(visit(client=FAR, users=Users(USERS)))("GET", "/entry", name="e").headers["etag"] == first

    redis.delete("redbeat::versions")  # all else stays as a reader knows it

    assert client("GET", "/entry", name="e").headers["etag"] != first


def test_no_version_tells_that_two_entries_have_the_same_secret(client, schedule, e):
    schedule.upsert("f", PLAIN, crontab(minute=0, hour=3), kwargs=e.kwargs, tags=["t"])

    first, second = (client("GET", "/entry", name=name).headers["etag"].strip('"') for name in "ef")

    assert [at for at in range(0, len(first), 8) if first[at : at + 8] == second[at : at + 8]] == []


@pytest.mark.parametrize(
    ("method", "path", "given", "body"),
    [
        ("GET", "/next", {"after": "9999-01-01T00:00:00Z"}, None),
        ("POST", "/backfill", {}, {"start": "2026-01-01T00:00:00Z", "end": "2026-02-01T00:00:00Z", "dry_run": True}),
    ],
)
def test_a_question_for_very_many_times_is_refused_in_time(client, schedule, monkeypatch, method, path, given, body):
    monkeypatch.setattr("singlebeat.web.api.calls.CALCULATED_FOR", 0.05)
    schedule.upsert("often", PLAIN, crontab(), max_runs=10**9)

    assert "not calculated within 0.05 s" in client(method, path, body, 422, name="often", **given).json()["detail"]


def test_a_mask_that_stands_for_nothing_is_refused(client, schedule, e):
    body = {"definition": {**NIGHTLY, "kwargs": {"password": "**"}}}

    assert "kwargs.password" in client("PUT", "/entry", body, 422, name="new").json()["detail"]
    for parts in ({"args": ["**"]}, {"kwargs": {"conf": "**"}}, {"options": {"queue": "**"}}):
        said = client("PUT", "/entry", {"definition": {**NIGHTLY, **parts}}, 422, name="new").json()["detail"]
        assert "is **, which stands for a value that is stored, and none is at its place" in said
    schedule.upsert("open", PLAIN, 60, args=["**"])
    client("PUT", "/entry", client("GET", "/entry", name="open").json(), name="open")
    assert schedule.get("open").args == ["**"]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"api_key": "**", "conf": {"password": "**"}, "plain": 1},
        {"password": "**", "conf": "**", "plain": 1},
        {"password": "**", "conf": {"password": "**"}, "plain": "**"},
        {"password": "**", "conf": {"password": "**"}, "plain": 1, "other": ["**"]},
    ],
    ids=["renamed", "a whole that holds a secret", "a plain value", "a new list"],
)
def test_a_mask_at_another_place_overwrites_no_secret(client, schedule, method, kwargs):
    stored = {"password": "P1", "conf": {"password": "P2"}, "plain": 1}
    schedule.upsert("e", PLAIN, crontab(minute=0, hour=3), kwargs=stored)

    said = client(method, "/entry", {"definition": {**NIGHTLY, "kwargs": kwargs}}, 422, name="e").json()["detail"]

    assert "give the value" in said
    assert schedule.get("e").kwargs == stored


A, B = {"user": "a", "password": "PA"}, {"user": "b", "password": "PB"}


def shown(account: dict[str, Any]) -> dict[str, Any]:
    return {**account, "password": "**"}


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ([shown(A), shown(B)], [A, B]),
        ([shown(B)], [B]),
        ([shown(B), shown(A)], [B, A]),
        ([{"user": "c", "password": "PC"}, shown(A), 1], [{"user": "c", "password": "PC"}, A, 1]),
        ([{"user": "a", "password": "new"}, shown(B)], [{"user": "a", "password": "new"}, B]),
    ],
)
def test_a_mask_in_a_list_keeps_the_secret_of_what_stands_beside_it(client, schedule, given, stored):
    schedule.upsert("e", PLAIN, 60, kwargs={"accounts": [A, B]})

    client("PATCH", "/entry", {"definition": {"kwargs": {"accounts": given}}}, name="e")

    assert schedule.get("e").kwargs == {"accounts": stored}


@pytest.mark.parametrize(
    "given",
    [[{"user": "c", "password": "**"}, shown(B)], [shown(A), shown(A)], [{"password": "**"}], ["**"], [["**"]]],
)
def test_a_mask_takes_no_secret_of_another_element(client, schedule, given):
    schedule.upsert("e", PLAIN, 60, kwargs={"accounts": [A, B]})

    answer = client("PATCH", "/entry", {"definition": {"kwargs": {"accounts": given}}}, 422, name="e")

    assert "give the value" in answer.json()["detail"]
    assert schedule.get("e").kwargs == {"accounts": [A, B]}


@pytest.mark.parametrize(
    ("given", "stored"), [([3, 0], None), ([3], None), ([3, 3, 0], [1, 1, 0]), ([3, 3, 9], [1, 1, 9])]
)
def test_of_elements_that_are_shown_alike_all_keep_their_order_or_none(client, schedule, given, stored):
    secrets = iter(["P1", "P2"])
    schedule.upsert("e", PLAIN, 60, kwargs={"all": [{"password": "P1"}, {"password": "P2"}, 0]})
    sent = [{"password": "**"} if each == 3 else each for each in given]

    client("PATCH", "/entry", {"definition": {"kwargs": {"all": sent}}}, 200 if stored else 422, name="e")

    if stored:
        assert schedule.get("e").kwargs["all"] == [{"password": next(secrets)} if x == 1 else x for x in stored]


def test_a_signature_in_options_takes_no_secret_of_another_one(client, schedule, login):
    links = [{"task": login, "args": [user, secret], "kwargs": {}, "options": {}} for user, secret in ("aA", "bB")]
    schedule.upsert("e", PLAIN, 60, options={"link": links})
    found = client("GET", "/entry", name="e").json()["definition"]["options"]
    assert [each["args"] for each in found["link"]] == [["a", "**"], ["b", "**"]]

    client("PATCH", "/entry", {"definition": {"options": {"link": found["link"][1:]}}}, name="e")
    assert schedule.get("e").options["link"] == links[1:]

    found["link"][1]["args"][0] = "c"
    client("PATCH", "/entry", {"definition": {"options": {"link": found["link"][1:]}}}, 422, name="e")
    assert schedule.get("e").options["link"] == links[1:]


def test_a_positional_secret_keeps_its_place(client, schedule, login):
    schedule.upsert("e", login, 60, args=["a", "PA"])

    client("PATCH", "/entry", {"definition": {"args": ["b", "**"]}}, name="e")
    assert schedule.get("e").args == ["b", "PA"]

    for args in (["**"], ["**", "b"], ["a", "b", "**"]):
        client("PATCH", "/entry", {"definition": {"args": args}}, 422, name="e")
    assert schedule.get("e").args == ["b", "PA"]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize("task", [PLAIN, "unknown"])
def test_another_task_shows_no_positional_secret(client, schedule, login, method, task):
    """Its parameter has another name, or none that this process knows."""
    schedule.upsert("e", login, 60, args=["a", "PA"])
    sent = {"task": task, "schedule": 60, "args": ["a", "**"]}
    parts = [sent] if method == "PUT" else [sent, {"task": task}, {"task": task, "args": ["**", "**"]}]

    for definition in parts:
        answer = client(method, "/entry", {"definition": definition}, 422, name="e")
        assert "args.1" in answer.json()["detail"] or "args.0" in answer.json()["detail"]
    assert schedule.get("e").task == login

    client(method, "/entry", {"definition": {**sent, "args": ["a", "new"]}}, name="e")
    assert schedule.get("e").args == ["a", "new"]


def test_another_task_with_the_same_secret_keeps_it(client, app, schedule, login):
    app.task(name="sign_in", shared=False)(app.tasks[login].run)
    schedule.upsert("e", login, 60, args=["a", "PA"], kwargs={"token": "T"})

    client("PATCH", "/entry", {"definition": {"task": "sign_in"}}, name="e")

    assert (schedule.get("e").args, schedule.get("e").kwargs) == (["a", "PA"], {"token": "T"})
    assert client("GET", "/entry", name="e").json()["definition"]["args"] == ["a", "**"]


def test_hidden_arguments_of_another_task_stay_secret_elsewhere(visit, schedule, login):
    client = Client(visit(client=FAR, users=Users(USERS), hide_arguments=True))
    schedule.upsert("e", login, 60, args=["a", "PA"])

    client("PATCH", "/entry", {"definition": {"task": "unknown"}}, 422, name="e")
    client("PUT", "/entry", {"definition": {"task": "unknown", "schedule": 60, "args": ["**", "**"]}}, 422, name="e")

    assert schedule.get("e").task == login


def test_a_string_that_holds_a_secret_stays_stored(client, schedule, login):
    options = {"argsrepr": "('a', 'PA')", "kwargsrepr": "{'token': 'T'}"}
    schedule.upsert("e", login, 60, args=["a", "PA"], options=options)
    found = client("GET", "/entry", name="e").json()
    assert found["definition"]["options"] == {"argsrepr": "**", "kwargsrepr": "**"}

    client("PATCH", "/entry", {"policy": {"jitter": 3}}, name="e")
    client("PUT", "/entry", found, name="e")

    assert schedule.get("e").options == options
    client("PATCH", "/entry", {"definition": {"task": PLAIN, "args": []}}, 422, name="e")


def test_a_mask_below_a_secret_stands_for_nothing(client, schedule):
    schedule.upsert("e", PLAIN, 60, kwargs={"password": {"x": "P"}})

    for value in (["**"], {"x": "**"}):
        client("PATCH", "/entry", {"definition": {"kwargs": {"password": value}}}, 422, name="e")

    assert schedule.get("e").kwargs == {"password": {"x": "P"}}


def test_no_answer_shows_a_secret(client, schedule, app, e):
    schedule.save(schedule.salvage("e").changed({"kwargs": {"password": "geheim2"}}, {}))
    for path in ("/entries", "/changes", "/locks", "/history", "/quarantine", "/entry?name=e", "/explain?name=e"):
        answer = client.page.get(f"/api{path}", headers={"Authorization": "Bearer admin"})
        assert answer.status_code == 200
        assert "geheim" not in answer.text


# ------------------------------------------------------------------ who


@pytest.mark.parametrize("token", ["read", "operate", "admin"])
def test_a_role_may_do_what_the_description_says(visit, e, token):
    page = visit(client=FAR, users=Users(USERS))
    role = Role.named(token)

    for each in OPERATIONS:
        if role >= each.role:
            continue
        answer = page.request(
            each.method, f"/api{each.path}", params={"name": "e"}, headers={"Authorization": f"Bearer {token}"}
        )
        assert answer.status_code == 403, each.id
        check(each.method, each.path, answer)


def test_each_change_needs_more_than_the_role_read():
    assert [each.id for each in OPERATIONS if each.method != "GET" and each.role <= Role.READ] == []


def test_force_needs_an_admin(visit, app, redis):
    app.tasks[f"{APP}.single"].delay(1)
    client = Client(visit(client=FAR, users=Users(USERS)), "operate")
    (lock,) = client("GET", "/locks").json()["locks"]

    client("POST", "/unlock", {"which": lock["task_id"], "force": True}, 403)

    assert client("GET", "/locks").json()["locks"]


def test_a_reader_sees_no_key_of_a_lock(visit, app, redis):
    """It is a digest of the arguments, of which some may be masked."""
    app.tasks[f"{APP}.single"].delay(1)
    page = visit(client=FAR, users=Users(USERS))

    keys = [Client(page, role)("GET", "/locks").json()["locks"][0]["key"] for role in ("read", "operate")]

    assert keys[0] == ""
    assert keys[1].startswith("SINGLETONLOCK_")


def test_without_a_token_the_api_answers_401_in_json(visit):
    answer = visit(client=FAR, users=Users(USERS)).get("/api/status")

    check("GET", "/status", answer)
    assert answer.headers["www-authenticate"] == 'Bearer realm="singlebeat"'
    assert "set-cookie" not in answer.headers


def test_a_password_alone_changes_nothing(visit, schedule, e):
    """A browser sends it by itself, so another site could let it do so."""
    page = visit(client=FAR, users=Users(USERS))
    page.auth = ("ann", "a")

    assert page.get("/api/status").status_code == 200
    answer = page.post("/api/pause?name=e", json={})
    assert answer.status_code == 403
    check("POST", "/pause", answer)
    assert not schedule.get("e").policy.paused


def test_on_this_machine_a_change_needs_the_token_of_the_cookie(visit, schedule, e):
    page = visit(client=HERE)
    page.get("/")
    token = {"X-Singlebeat-Token": page.cookies[COOKIE]}

    assert page.post("/api/pause?name=e").status_code == 403
    assert page.post("/api/pause?name=e", headers={"X-Singlebeat-Token": "guess"}).status_code == 403
    assert page.post("/api/pause?name=e", headers={**token, "Origin": "http://evil.example"}).status_code == 403
    assert page.post("/api/pause?name=e", headers={**token, "Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert not schedule.get("e").policy.paused
    assert page.post("/api/pause?name=e", headers=token).status_code == 200
    assert schedule.get("e").policy.paused


def test_a_token_that_a_proxy_sends_exempts_from_nothing(visit, schedule, e):
    """Only the token of a users file proves that no browser was tricked."""
    page = visit(client=("10.0.0.1", 1), trust_proxy=["10.0.0.0/8"], user_header="X-User", default_role="admin")
    headers = {"X-User": "ann", "Authorization": "Bearer of-the-proxy"}

    assert page.get("/api/status", headers=headers).status_code == 200
    assert page.post("/api/pause?name=e", headers=headers).status_code == 403
    assert not schedule.get("e").policy.paused


def test_a_read_only_page_has_a_read_only_api(visit, schedule, e):
    client = Client(visit(client=FAR, users=Users(USERS), read_only=True))

    client("GET", "/status")
    client("POST", "/pause", {}, 403, name="e")
    client("DELETE", "/entry", None, 403, name="e")
    assert not schedule.get("e").policy.paused


def test_changes_by_the_api_count_for_the_limit(client, e):
    statuses = [
        client.page.post("/api/pause?name=e", headers={"Authorization": "Bearer admin"}).status_code for _ in range(121)
    ]

    assert (statuses[:120], statuses[120]) == ([200] * 120, 429)


def test_no_other_site_may_read_the_api(client):
    headers = {"Authorization": "Bearer read", "Origin": "http://evil.example"}

    for answer in (
        client.page.get("/api/status", headers=headers),
        client.page.options("/api/status", headers=headers),
    ):
        assert [name for name in answer.headers if name.startswith("access-control")] == []


# ------------------------------------------------------------------ effects


def test_a_run_is_requested_for_beat(client, redis, e):
    task = client("POST", "/run", {"overlap": "allow_all"}, 202, name="e").json()["task_id"]

    assert task in redis.hget("redbeat:e", "pending")
    assert '"allow_all"' in redis.hget("redbeat:e", "pending")


def test_a_backfill_hands_its_runs_to_beat_and_tells_how_far_it_is(client, bench):  # noqa: F811
    bench.put("e", every=60)
    bench.tick()
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    body = {"start": start.isoformat(), "end": (start + timedelta(minutes=3)).isoformat()}

    assert len(client("POST", "/backfill", body, 202, name="e").json()["runs"]) == 3

    def is_over() -> bool:
        bench.tick()
        return client("GET", "/backfill", name="e").json()["is_over"]

    wait_until(is_over, what="the end of the backfill")
    progress = client("GET", "/backfill", name="e").json()
    assert (progress["count"], progress["problem"]) == (3, "")
    bench.tick()  # sends the run that was handed over last
    assert [row["kind"] for row in bench.history].count("backfill") == 3


@pytest.mark.parametrize("handed_over", [0, 1])
def test_a_backfill_whose_reply_is_lost_says_what_to_read_first(client, bench, monkeypatch, handed_over):  # noqa: F811
    """Of one run: the reply that it is handed over is lost, or the one that the backfill is complete."""
    bench.put("e", every=60)
    bench.tick()
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    called, answered = Script.__call__, []

    def call(script, *args):
        reply = called(script, *args)
        if script.name == "propose" and reply != "pending":
            answered.append(reply)
            if len(answered) > handed_over:
                error = RedisConnectionError("cut off")
                error.script = script.name
                raise error
        return reply

    monkeypatch.setattr(Script, "__call__", call)
    body = {"start": start.isoformat(), "end": (start + timedelta(minutes=1)).isoformat()}
    client("POST", "/backfill", body, 202, name="e")

    def is_over() -> bool:
        bench.tick()
        return client("GET", "/backfill", name="e").json()["is_over"]

    wait_until(is_over, what="the end of the backfill")
    progress = client("GET", "/backfill", name="e").json()
    assert progress["count"] == handed_over
    assert progress["problem"].endswith(
        ": cut off. It may have been done all the same: before you repeat it, see celery singlebeat history"
    )
    shown = client.page.get("/entry?name=e", headers={"Authorization": "Bearer admin"}).text
    assert ("Repeat it to continue" in shown) is (not handed_over), "else all runs would be repeated"


def test_a_resume_says_whether_the_entry_was_paused(client, schedule, e):
    schedule.pause("e")

    assert client("POST", "/resume", name="e").json() == {"name": "e", "paused": False, "was_paused": True}
    assert client("POST", "/resume", name="e").json() == {"name": "e", "paused": False, "was_paused": False}


def test_a_pause_says_what_it_replaces_of_another_user(client, schedule, e):
    until = datetime(2999, 1, 1, tzinfo=UTC)
    schedule.pause("e", "ann's")
    schedule.pause_many(tag="t", note="ann's", until=until)

    answers = [client("POST", "/pause", {"note": note}, name="e").json() for note in ("ann's", "", "bob's")]
    assert [answer["replaced"] for answer in answers] == ["", "", "ann's"]
    first, second = (client("POST", "/pause-many", {"tag": tag}).json()["replaced"] for tag in ("t", "u"))
    assert (first["note"], datetime.fromisoformat(first["until"]), second) == ("ann's", until, None)


def test_a_pause_of_many_is_ended_by_its_tag_alone(client, schedule, e):
    client("POST", "/pause-many", {"tag": "t", "note": "migration"})

    assert client("POST", "/resume-many", {"all": True}).json()["was_paused"] is False
    assert [pause["note"] for pause in client("GET", "/pauses").json()["pauses"]] == ["migration"]
    assert client("POST", "/resume-many", {"tag": "t"}).json() == {"was_paused": True, "pauses": []}


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"health", "export", "import", "web"}))
def test_a_reader_of_a_text_finds_the_operation_of_a_command(command):
    assert f"/{command}" in DOCUMENT["paths"] or re.search(rf"\b{command}\b.*\(", DOCUMENT["info"]["description"])
    assert f"/{command}" in DOCUMENT["paths"] or f"``{command}``" in page("how-to/http-api")


def test_the_password_of_a_url_is_not_shown_and_not_lost(client, schedule):
    url = "https://ann:geheim@shop.test/hook"
    schedule.upsert("e", PLAIN, 60, kwargs={"hook": url})

    shown = client("GET", "/entry", name="e")
    assert shown.json()["definition"]["kwargs"] == {"hook": "**"}
    assert "geheim" not in client.page.get("/edit?name=e", headers={"Authorization": "Bearer admin"}).text
    client("PATCH", "/entry", {"definition": {"kwargs": {"hook": "**", "n": 1}}}, name="e")

    assert schedule.get("e").kwargs == {"hook": url, "n": 1}
    assert "geheim" not in client("GET", "/changes").text


def test_a_preview_says_the_runs_and_stores_nothing(client, redis):
    body = {"definition": {**NIGHTLY, "schedule": {"__type__": "crontab", "minute": "30", "hour": "2"}}}

    found = client("POST", "/preview", {**body, "policy": {"timezone": "Europe/Berlin"}}).json()

    assert len(found["runs"]) == 5
    assert found["effects"]
    assert redis.zcard("redbeat::schedule") == 0


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a/b?c=d#e", "%2e%2e/x", "\u202eright", "x" * 5_000])
def test_a_hostile_name_is_given_back_as_it_is(client, schedule, name):
    client("PUT", "/entry", {"definition": NIGHTLY}, 201, name=name)

    assert client("GET", "/entry", name=name).json()["name"] == name
    assert schedule.get(name).task == PLAIN


def test_an_unreachable_server_is_a_problem_503(visit, own_server):
    from tests.system.apps import make_app

    with make_app(own_server.celery_url, {"singlebeat_socket_timeout": 0.3}) as app:
        client = Client(visit(of=app, client=FAR, users=Users(USERS)))
        own_server.stop()
        client("GET", "/entry", None, 503, name="e")


def test_a_change_whose_answer_cannot_be_read_back_may_have_been_done(client, app, schedule, monkeypatch):
    client("PUT", "/entry", {"definition": NIGHTLY}, 201, name="e")
    server, called = schedule_client(app), Script.__call__
    answer, is_cut_off = server.execute_command, False

    def call(script, *args):
        nonlocal is_cut_off
        reply = called(script, *args)
        is_cut_off = script.name == "save"
        return reply

    def execute(*args, **options):
        if is_cut_off:
            raise RedisConnectionError("cut off")
        return answer(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Script, "__call__", call)
        patched.setattr(server, "execute_command", execute)
        problem = client("PATCH", "/entry", {"policy": {"jitter": 3}}, 503, name="e").json()

    assert "It may have been done all the same" in problem["detail"]
    assert schedule.get("e").policy.jitter == 3
