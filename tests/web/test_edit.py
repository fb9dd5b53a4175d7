"""The form of an entry: its preview, the diff before it is saved, and two people who edit one entry."""

from __future__ import annotations

import html
import json
import re
import sys
import time
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from urllib.parse import urlencode

import pytest
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, schedule
from kombu import Exchange, Queue
from redbeat.schedules import rrule

from singlebeat import Entry, Schedule, clocked
from singlebeat.beat.delivery import Reader
from singlebeat.beat.entries.schedule_json import encode_schedule
from singlebeat.diagnosis.workers import Workers
from singlebeat.web.security import COOKIE
from tests.support import APP

from .test_security import HOSTILE

PLAIN = f"{APP}.plain"
FIRST = datetime(2026, 1, 1, 9, tzinfo=UTC)
WHEN = {"year": 2026, "month": 1, "day": 2, "hour": 3, "minute": 4, "second": 5, "microsecond": 0, "timezone": "UTC"}


@pytest.fixture
def entries(app, redis) -> Schedule:
    """The entries of the app."""
    return Schedule(app)


@pytest.fixture
def page(visit):
    """A visitor who edits."""
    return visit()


def values(text: str) -> dict[str, Any]:
    """Return what a browser would send of the form of an entry, as it is shown."""
    form = text[text.index('id="edit"') :]
    found: dict[str, Any] = {}
    for tag in re.findall(r"<input [^>]*>", form):
        given = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        if given.get("type") in {"checkbox", "radio"} and " checked" not in tag:
            continue
        if "name" in given:
            text_ = html.unescape(given.get("value", "on"))
            # "If the value is a valid local date and time string, then set it to a normalized" one: the shortest.
            is_moment = given.get("type") == "datetime-local"
            found[given["name"]] = re.sub(r"(:\d\d):00$", r"\1", text_) if is_moment else text_
    for name, text_ in re.findall(r'<textarea [^>]*name="(\w+)"[^>]*>\n?(.*?)</textarea>', form, re.DOTALL):
        found[name] = html.unescape(text_)
    for name, options in re.findall(r'<select [^>]*name="(\w+)"[^>]*>(.*?)</select>', form, re.DOTALL):
        chosen = re.search(r"<option[^>]* selected>([^<]*)", options) or re.search(r"<option[^>]*>([^<]*)", options)
        found[name] = "" if 'value=""' in chosen[0] else chosen[1]
    return found


def stored(redis, name: str, field: str) -> dict[str, Any]:
    """Return a field of an entry as it is stored."""
    return json.loads(redis.hget(f"redbeat:{name}", field))


def save(page, path: str, **changes: str) -> Any:
    """Fill in the form of a page, check the changes, and save; return the answer."""
    answer = page.post("/edit", data=values(page.get(path).text) | changes | {"do": "review"})
    if 'value="save"' not in answer.text:
        return answer
    kept = answer.text[answer.text.index('action="/edit"') :]
    fields = {
        name: html.unescape(value)
        for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', kept)
    }
    return page.post("/edit", data=fields | {"do": "save"}, follow_redirects=False)


def test_a_new_entry_is_stored(page, entries):
    answer = save(
        page, "/edit", name="nightly/1", task=PLAIN, minute="30", hour="2", args='["x"]', timezone="Europe/Berlin"
    )

    assert answer.headers["location"] == "/entry?name=nightly%2F1&done=saved"
    entry = entries.get("nightly/1")
    assert entry.schedule == crontab(minute=30, hour=2)
    assert (entry.task, entry.args, str(entry.policy.timezone)) == (PLAIN, ["x"], "Europe/Berlin")


@pytest.mark.parametrize(
    "when",
    [
        schedule(90.5),
        schedule(7200),
        crontab(minute="*/5", day_of_week="mon-fri"),
        rrule(
            "MONTHLY",
            dtstart=FIRST,
            byweekday=0,
            bysetpos=1,
        ),
        rrule("YEARLY", dtstart=FIRST, byeaster=0),
    ],
    ids=["interval", "hours", "crontab", "rule", "rule-without-fields"],
)
def test_an_entry_that_is_saved_unchanged_stays_as_it_is(page, entries, redis, when):
    entries.upsert(
        "e", PLAIN, when, args=[1, {"a": None}], kwargs={"k": "ö"}, jitter=2.5, note="n", overlap="buffer_one"
    )
    before = entries.get("e")

    assert save(page, "/edit?name=e").status_code == 303
    after = entries.get("e")
    assert encode_schedule(after.schedule) == encode_schedule(before.schedule)
    assert (after.args, after.kwargs, after.policy, after.meta) == (
        before.args,
        before.kwargs,
        before.policy,
        before.meta,
    )


@pytest.fixture
def of_code(app, entries, redis) -> dict[str, Any]:
    """The item of an entry of ``beat_schedule`` with objects that JSON cannot hold; it is stored."""
    own = Queue("own", Exchange("own"), "own")
    item = {"task": PLAIN, "schedule": 3600, "args": [BeatLazyFunc(len, "abc"), 1]}
    item["options"] = {"queue": own, "priority": 1}
    app.conf.beat_schedule = {"e": item}
    Entry("e", app=app, **{**item, "schedule": schedule(3600)}).save()
    return item


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("note", "n"),
        ("args", '[{"__type__": "given"}, 2]'),
        ("options", '{"queue": {"__type__": "given"}, "priority": 7}'),
    ],
)
def test_what_the_code_gives_stays_when_the_rest_is_edited(page, entries, redis, of_code, field, text):
    """It is shown alike by each process."""
    shown = values(page.get("/edit?name=e").text)
    assert json.loads(shown["args"]) == [{"__type__": "given"}, 1]
    assert json.loads(shown["options"]) == {"queue": {"__type__": "given"}, "priority": 1}

    assert save(page, "/edit?name=e", **{field: text}).status_code == 303

    assert stored(redis, "e", "definition")["args"][0] == {"__type__": "given"}
    assert stored(redis, "e", "definition")["options"]["queue"] == {"__type__": "given"}
    entry = entries.get("e")
    assert entry.args == [of_code["args"][0], 2 if field == "args" else 1]
    assert entry.options == of_code["options"] | ({"priority": 7} if field == "options" else {})


@pytest.mark.parametrize(
    "args", ['[{"__type__": "given"}, 1, {"__type__": "given"}]', '[1, {"__type__": "given"}]'], ids=["no", "a plain"]
)
def test_a_mark_where_the_code_gives_no_object_is_refused(page, of_code, args):
    answer = save(page, "/edit?name=e", args=args)

    assert answer.status_code == 422
    assert "there is a BeatLazyFunc in its args, which the beat_schedule of this app must give" in answer.text


def test_an_entry_with_many_arguments_can_be_edited(page, entries):
    """The form has them twice, escaped."""
    entries.upsert("e", PLAIN, 60, args=[[{"id": at, "name": "Ж" * 10, "tags": ["a", "b"]} for at in range(1000)]])

    assert save(page, "/edit?name=e", note="n").status_code == 303

    assert (entries.get("e").policy.note, len(entries.get("e").args[0])) == ("n", 1000)


@pytest.mark.parametrize("path", ["/edit?name=e", "/edit?like=e"])
def test_a_field_that_is_left_keeps_what_its_text_does_not_show(page, redis, path):
    definition = {
        "task": PLAIN,
        "schedule": {"__type__": "clocked", "instant": "2030-01-01T08:00:00.123456Z"},
        "args": [{"__type__": "datetime", **WHEN}, 1e22],
        "kwargs": {},
        "options": {"expires": 1234567.5},
        "enabled": True,
    }
    policy = {"misfire_grace_time": 1234567, "jitter": 100000.5, "tags": ["billing, eu", " c "]}
    redis.hset("redbeat:e", mapping={"definition": json.dumps(definition), "policy": json.dumps(policy)})
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})
    name = "e" if "name=" in path else "f"

    save(page, path, name=name, note="new")

    assert stored(redis, name, "policy") == {**policy, "note": "new"}
    assert stored(redis, name, "definition") == {**definition, "name": name}


@pytest.mark.parametrize(
    ("broken", "healed"),
    [({"jitter": "5"}, {"jitter": 5}), ({"max_runs": 3.0}, {"max_runs": 3}), ({"run_on_start": "yes"}, {})],
    ids=str,
)
def test_a_broken_field_of_the_policy_becomes_what_its_text_shows(page, redis, broken, healed):
    definition = {"task": PLAIN, "schedule": {"__type__": "interval", "every": 60}}
    redis.hset("redbeat:e", mapping={"definition": json.dumps(definition), "policy": json.dumps(broken)})
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})

    assert save(page, "/edit?name=e").status_code == 303

    policy = json.loads(redis.hget("redbeat:e", "policy") or "{}")
    assert {name: value for name, value in policy.items() if name in healed} == healed


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        ({"schedule": {"__type__": "crontab", "minute": "99"}}, "schedule"),
        ({"schedule": {"__type__": "given", "class": "shop.Work"}}, "schedule"),
        ({"schedule": None}, "schedule"),
        ({"args": '["u"]'}, "args"),
        ({"kwargs": ["u"]}, "kwargs"),
        ({"options": {"queue": "q", "expires": "xx"}}, "options"),
        ({"task": 5}, "task"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/edit?name=e", "/edit?like=e"])
def test_what_the_form_cannot_read_must_be_given_anew(page, redis, path, broken, field):
    definition = {"task": PLAIN, "schedule": {"__type__": "interval", "every": 60}, **broken}
    redis.hset("redbeat:e", "definition", json.dumps(definition))
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})
    name = "e" if "name=" in path else "f"

    answer = save(page, path, name=name, note="new")

    assert answer.status_code == 422
    assert f'id="e-{field}"' in answer.text
    assert stored(redis, "e", "definition") == definition
    given = {"schedule": {"kind": "cron"}, "task": {"task": PLAIN}}.get(field) or {
        field: "[]" if field == "args" else "{}"
    }
    assert save(page, path, name=name, **given).status_code == 303


def test_a_schedule_without_its_package_is_not_replaced_by_another(page, redis, monkeypatch):
    monkeypatch.setitem(sys.modules, "ephem", None)
    monkeypatch.setattr("celery.schedules.ephem", None, raising=False)
    when = {"__type__": "solar", "event": "sunset", "lat": 52.5, "lon": 13.4}
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "schedule": when}))
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})

    answer = save(page, "/edit?name=e", note="new")

    assert answer.status_code == 422
    assert json.loads(values(answer.text)["json"]) == when
    assert stored(redis, "e", "definition")["schedule"] == when


@pytest.mark.parametrize(
    ("definition", "policy", "part"),
    [
        ({"enabled": "false"}, "", "enabled"),
        ({}, "x", "policy"),
        ({}, '{"overlap": "Skip", "tags": "billing", "jitter": 5}', "overlap tags"),
        ({}, '{"run_on_start": "false", "tags": "billing"}', "run_on_start tags"),
    ],
    ids=["enabled", "policy", "two parts", "two others"],
)
def test_what_a_saved_form_mends_is_among_the_changes(page, redis, definition, policy, part):
    broken = {"task": PLAIN, "schedule": {"__type__": "interval", "every": 60}, **definition}
    redis.hset("redbeat:e", mapping={"definition": json.dumps(broken), "policy": policy})
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})

    text = page.post("/edit", data=values(page.get("/edit?name=e").text) | {"do": "review"}).text
    assert save(page, "/edit?name=e").status_code == 303

    assert sorted(re.findall(r"<dt>(\w+)</dt>", text)) == part.split()
    assert stored(redis, "e", "definition")["enabled"] is (part != "enabled")


@pytest.mark.parametrize("path", ["/edit?name=e", "/edit?like=e"])
def test_a_rule_that_becomes_a_cron_keeps_the_zone_that_is_shown(page, entries, redis, path):
    rule = {"__type__": "rrule", "freq": "DAILY", "dtstart": FIRST.timestamp(), "dtstart_tz": "America/New_York"}
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "schedule": rule}))
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})
    name = "e" if "name=" in path else "f"

    assert save(page, path, name=name, kind="cron", hour="9", minute="0").status_code == 303

    assert str(entries.get(name).policy.timezone) == "America/New_York"


def test_a_note_is_shown_as_it_is(page, entries):
    entries.upsert("e", PLAIN, 60, note="release 2.0", jitter=2)

    form = values(page.get("/edit?name=e").text)

    assert (form["note"], form["jitter"]) == ("release 2.0", "2")


@pytest.mark.parametrize(
    ("zone", "times"),
    [("America/New_York", ["2026-06-30T13:00", "2026-07-02T13:00"]), (60, ["2026-06-30T14:00", "2026-07-02T14:00"])],
    ids=str,
)
def test_a_rule_stays_on_its_clock_when_another_part_is_changed(page, entries, redis, zone, times):
    start = datetime(2026, 1, 1, 14, tzinfo=UTC)
    rule = {"__type__": "rrule", "freq": "DAILY", "dtstart": start.timestamp(), "dtstart_tz": zone}
    redis.hset("redbeat:e", "definition", json.dumps({"task": PLAIN, "schedule": rule}))
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})
    form = values(page.get("/edit?name=e").text)

    if form["kind"] == "rule":
        changed = {"rule_interval": "2"}
    else:
        changed = {"json": json.dumps(json.loads(form["json"]) | {"interval": 2})}
    assert save(page, "/edit?name=e", **changed).status_code == 303

    timetable = entries.get("e").timetable
    after = datetime(2026, 6, 30, tzinfo=UTC)
    found = [each.astimezone(UTC).isoformat()[:16] for each in islice(timetable.runs(after, after), 2)]
    assert found == times


def test_line_breaks_stay_in_a_field_of_one_line_that_is_left(page, redis):
    definition = {"task": PLAIN, "schedule": {"__type__": "interval", "every": 60}}
    policy = {"note": "a\nb", "tags": ["x\ny"]}
    redis.hset("redbeat:e", mapping={"definition": json.dumps(definition), "policy": json.dumps(policy)})
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})
    form = values(page.get("/edit?name=e").text)

    assert not {"\n", "\r"} & {*form["note"], *form["tags"]}  # a browser would drop it
    assert save(page, "/edit?name=e", jitter="7").status_code == 303
    assert stored(redis, "e", "policy") == {**policy, "jitter": 7}


@pytest.mark.parametrize(
    "value",
    [
        {"__type__": "datetime"},
        {"__type__": "datetime", "year": 2026, "month": 13, "day": 1, "timezone": "UTC"},
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["args", "options"])
def test_a_value_of_a_type_that_cannot_be_read_is_an_error_of_its_field(page, entries, value, field):
    entries.upsert("e", PLAIN, 60)
    text = json.dumps([value] if field == "args" else {"headers": {"a": value}})

    for do in ("review", "preview", "save"):
        answer = page.post("/edit", data=values(page.get("/edit?name=e").text) | {field: text, "do": do})
        assert answer.status_code in {200, 422}
    assert entries.get("e").args == []


def test_numbers_instants_and_tags_that_are_typed_are_stored_as_typed(page, entries, redis):
    entries.upsert("e", PLAIN, 60, args=["x"], tags=["billing, eu", "c"])
    when = {"__type__": "datetime", **WHEN}

    assert values(page.get("/edit?name=e").text)["tags"] == '["billing, eu", "c"]'
    save(page, "/edit?name=e", tags='["billing, eu", "d"]', jitter="1234567.25", args=json.dumps([when]))

    assert stored(redis, "e", "policy") == {"jitter": 1234567.25, "tags": ["billing, eu", "d"]}
    assert entries.get("e").args == [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)]
    assert json.loads(values(page.get("/edit?name=e").text)["args"]) == [when]
    assert values(page.get("/edit?name=e").text)["jitter"] == "1234567.25"


def test_the_diff_names_each_changed_field(page, entries):
    entries.upsert("e", PLAIN, 60, jitter=5)

    text = page.post("/edit", data=values(page.get("/edit?name=e").text) | {"jitter": "7", "do": "review"}).text

    assert re.findall(r"<dt>(\w+)</dt>", text) == ["jitter"]
    assert re.search(r"<del><pre>5</pre></del><ins><pre>7</pre></ins>", text)
    assert entries.get("e").policy.jitter == 5


def test_secrets_are_not_in_the_form_and_stay_stored(page, entries):
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret", "n": 1})

    assert "s3cret" not in page.get("/edit?name=e").text
    assert "s3cret" not in page.get("/entry?name=e").text
    save(page, "/edit?name=e", jitter="7")

    entry = entries.get("e")
    assert (entry.kwargs, entry.policy.jitter) == ({"api_token": "s3cret", "n": 1}, 7)


def test_the_version_in_the_form_tells_no_secret(page, entries, redis):
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret"})
    first = values(page.get("/edit?name=e").text)["version"]

    redis.delete("redbeat::versions")  # all else stays as the user knows it

    assert values(page.get("/edit?name=e").text)["version"] != first


def test_hidden_arguments_are_in_no_page_and_stay_stored(visit, entries, redis):
    link = {"task": PLAIN, "args": ["private", 1], "kwargs": {}, "options": {"argsrepr": "private"}}
    entries.upsert("e", PLAIN, 60, args=["other"])
    options = {"link": [link], "link_error": ["private"]}
    entries.upsert("e", PLAIN, 60, args=["private"], kwargs={"n": "private"}, options=options)
    mistyped = {"task": PLAIN, "schedule": {"__type__": "interval", "every": 60}, "argz": ["private"]}
    redis.hset("redbeat:m", "definition", json.dumps(mistyped))  # as another program may
    redis.zadd("redbeat::schedule", {"redbeat:m": 1})
    entries.delete("m")
    page = visit(hide_arguments=True)

    for path in (
        "/",
        "/entry?name=e",
        "/edit?name=e",
        "/edit?like=e",
        "/history",
        "/changes",
        "/api/changes",
        "/api/entry?name=e",
    ):
        assert "private" not in page.get(path).text, path
    save(page, "/edit?name=e", jitter="7")

    entry = entries.get("e")
    assert (entry.args, entry.kwargs, entry.policy.jitter) == (["private"], {"n": "private"}, 7)
    assert entry.options == options


def test_a_mask_that_stands_for_nothing_is_an_error(page, entries):
    entries.upsert("e", PLAIN, 60, args=["u"], kwargs={"api_token": "s3cret"})

    for given in ({"args": '["new", "u", "**"]'}, {"kwargs": '{"password": "**"}'}):
        assert "none is at its place" in save(page, "/edit?name=e", **given).text
    assert entries.get("e").kwargs == {"api_token": "s3cret"}


def test_a_mask_in_the_form_takes_no_secret_of_another_element(page, entries):
    accounts = [{"user": "a", "password": "PA"}, {"user": "b", "password": "PB"}]
    entries.upsert("e", PLAIN, 60, kwargs={"accounts": accounts})

    answer = save(page, "/edit?name=e", kwargs='{"accounts": [{"user": "c", "password": "**"}]}')
    assert "give the value" in answer.text
    assert entries.get("e").kwargs == {"accounts": accounts}

    save(page, "/edit?name=e", kwargs='{"accounts": [{"user": "b", "password": "**"}]}')
    assert entries.get("e").kwargs == {"accounts": accounts[1:]}


@pytest.mark.parametrize("path", ["/edit?name=e", "/edit?like=e"])
def test_another_task_in_the_form_shows_no_positional_secret(page, entries, login, path):
    entries.upsert("e", login, 60, args=["a", "PA"])

    answer = save(page, path, name="e" if "name" in path else "f", task=PLAIN)

    assert "args.1 is **" in answer.text
    assert [entry.name for entry in entries.list()] == ["e"]
    assert entries.get("e").task == login


def test_a_copy_keeps_secrets_and_neither_past_nor_pause(page, entries):
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret"})
    entries.pause("e", "why")

    save(page, "/edit?like=e", name="f")

    assert entries.get("f").kwargs == {"api_token": "s3cret"}
    assert not entries.get("f").policy.paused
    assert entries.get("e").policy.paused


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"args": '["a",\n  oops]'}, "line 2, column 3"),
        ({"kwargs": "[]"}, "must be a JSON object"),
        ({"task": ""}, "name the task"),
        ({"kind": "cron", "minute": "61"}, "61"),
        ({"kind": "every", "every": "0"}, "positive"),
        ({"kind": "once", "once": "soon"}, "no date and time"),
        ({"kind": "json", "json": '{"a": 1}'}, "is no schedule"),
        ({"timezone": "Mars/Olympus"}, "IANA name"),
        ({"jitter": "much"}, "must be a number"),
        ({"kind": "rule", "rule_freq": "MONTHLY"}, "dtstart"),
    ],
)
def test_a_field_that_cannot_be_used_says_why_and_nothing_is_saved(page, entries, redis, changes, why):
    entries.upsert("e", PLAIN, 60)
    before = redis.hgetall("redbeat:e")

    answer = page.post("/edit", data=values(page.get("/edit?name=e").text) | changes | {"do": "save"})

    assert answer.status_code == 422
    assert why in html.unescape(answer.text)
    assert redis.hgetall("redbeat:e") == before


def test_a_name_that_is_taken_is_not_replaced(page, entries):
    entries.upsert("e", PLAIN, 60, args=["mine"])

    answer = page.post("/edit", data=values(page.get("/edit").text) | {"name": "e", "task": PLAIN, "do": "save"})

    assert answer.status_code == 409
    assert entries.get("e").args == ["mine"]


def test_of_two_people_who_edit_an_entry_the_second_sees_both(page, entries):
    entries.upsert("e", PLAIN, 60, args=["a"], jitter=5)
    form = values(page.get("/edit?name=e").text)
    save(page, "/edit?name=e", jitter="6", note="theirs")

    answer = page.post("/edit", data=form | {"args": '["b"]', "jitter": "7", "do": "save"})

    assert answer.status_code == 409
    assert (entries.get("e").args, entries.get("e").policy.jitter) == (["a"], 6)
    rows = re.findall(r'<th scope="row">(\w+)</th>(.*?)</tr>', answer.text, re.DOTALL)
    shown = {field: [html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", cells)] for field, cells in rows}
    assert shown == {"args": ['["a"]', '["b"]', '["a"]'], "jitter": ["5", "7", "6"], "note": ["", "", "theirs"]}


def test_of_two_people_the_second_sees_both_though_a_secret_has_changed(page, entries):
    """The mask in the form stands for what was stored then: no error of a field that was not touched."""
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret"})
    form = values(page.get("/edit?name=e").text)
    entries.upsert("e", PLAIN, 60, kwargs={"other": 1})

    answer = page.post("/edit", data=form | {"note": "mine", "do": "review"})

    assert answer.status_code == 409
    assert "s3cret" not in answer.text


@pytest.mark.parametrize(
    ("mine", "theirs", "merged"),
    [
        # Both have changed the zone of a time: the text is of a zone, and is kept with it.
        (
            {"timezone": "Asia/Tokyo"},
            {"timezone": "Europe/Berlin"},
            {"once": "2030-01-01T09:00", "timezone": "Asia/Tokyo"},
        ),
        (
            {"kind": "every", "every": "5"},
            {"timezone": "Europe/Berlin"},
            {"kind": "every", "timezone": "Europe/Berlin"},
        ),
        ({"note": "n"}, {"timezone": "Europe/Berlin"}, {"once": "2030-01-01T10:00", "timezone": "Europe/Berlin"}),
    ],
    ids=["both zones", "schedule and zone", "note and zone"],
)
def test_a_merge_keeps_a_time_with_the_zone_of_its_text(page, entries, mine, theirs, merged):
    entries.upsert("e", PLAIN, clocked(datetime(2030, 1, 1, 9, tzinfo=UTC)))
    form = values(page.get("/edit?name=e").text)
    entries.upsert("e", PLAIN, clocked(datetime(2030, 1, 1, 9, tzinfo=UTC)), **theirs)

    conflict = page.post("/edit", data=form | mine | {"do": "save"}).text

    end = conflict.index("Keep theirs where")
    kept = conflict[conflict.index('action="/edit"') : end]
    found = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', kept))
    assert {name: found[name] for name in merged} == merged


@pytest.mark.parametrize("button", [0, 1], ids=["merged", "mine"])
@pytest.mark.parametrize(
    ("field", "mine"), [("kwargs", '{"api_token": "**", "user": "ann"}'), ("args", '["a", {"password": "**"}]')]
)
def test_a_mask_in_a_merge_stands_for_no_secret_of_another(page, entries, button, field, mine):
    old = {"kwargs": {"api_token": "s3cret", "user": "al"}, "args": ["b", {"password": "s3cret"}]}
    entries.upsert("e", PLAIN, 60, **old)
    form = values(page.get("/edit?name=e").text)
    entries.upsert("e", PLAIN, 60, **json.loads(json.dumps(old).replace("s3cret", "s3cret of another")))
    conflict = page.post("/edit", data=form | {field: mine, "do": "save"}).text
    kept = conflict.split('action="/edit"')[1 + button]
    found = {
        name: html.unescape(value)
        for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', kept)
    }

    answer = page.post("/edit", data=found | {"do": "review"})

    assert answer.status_code == 422
    assert f'id="e-{field}"' in answer.text
    assert page.post("/edit", data=found | {"do": "save"}).status_code == 422
    given = found[field].replace("<give this anew>", '"new"')
    assert page.post("/edit", data=found | {field: given, "do": "save"}, follow_redirects=False).status_code == 303
    assert "new" in json.dumps(getattr(entries.get("e"), field))


@pytest.mark.parametrize("name", ["a\nb", "a\r\nb", "a\rb", "a\u2028b"], ids=ascii)
def test_an_entry_with_a_line_break_in_its_name_is_edited_itself(page, entries, name):
    for each in (name, "ab"):
        entries.upsert(each, PLAIN, 60)

    text = page.get("/edit", params={"name": name}).text
    found = re.search(r'name="name\*?" value="([^"]*)"', text)[1]

    assert found != "ab"
    sent = {key: value for key, value in values(text).items() if not key.startswith("name")} | {"note": "mine"}
    shown = re.search(r'<input type="hidden" (name="name\*?" value="[^"]*")', text)[1]
    key, value = re.match(r'name="(name\*?)" value="([^"]*)"', shown).groups()
    answer = page.post("/edit", data=sent | {key: html.unescape(value), "do": "save"}, follow_redirects=False)
    assert answer.status_code == 303
    assert [entries.get(each).policy.note for each in (name, "ab")] == ["mine", ""]


def test_a_rule_that_begins_in_the_hour_that_comes_twice_stays_there(page, entries, redis):
    start = datetime(2026, 11, 1, 6, 30, tzinfo=UTC)  # the second 01:30 in New York
    rule = {"__type__": "rrule", "freq": "HOURLY", "interval": 3, "dtstart": start.timestamp()}
    definition = {"task": PLAIN, "schedule": {**rule, "dtstart_tz": "America/New_York"}}
    redis.hset("redbeat:e", "definition", json.dumps(definition))
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})
    form = values(page.get("/edit?name=e").text)

    assert form["kind"] == "json"
    assert json.loads(form["json"])["dtstart"] == start.timestamp()


def test_a_time_in_the_hour_that_comes_twice_stays_there(page, entries):
    instant = datetime(2030, 10, 27, 1, 30, tzinfo=UTC)  # the second 02:30 in Berlin
    entries.upsert("e", PLAIN, clocked(instant), timezone="Europe/Berlin")

    assert save(page, "/edit?name=e", note="mine").status_code == 303

    assert entries.get("e").schedule.instant == instant


@pytest.mark.parametrize("path", ["/edit?name=e", "/edit?like=e"])
@pytest.mark.parametrize(
    "when", [clocked(FIRST.replace(year=2030)), rrule("DAILY", dtstart=FIRST, until=FIRST.replace(year=2040))]
)
def test_a_time_that_a_browser_shortens_is_not_changed(page, entries, redis, when, path):
    entries.upsert("e", PLAIN, when)
    before = stored(redis, "e", "definition")

    answer = page.post("/edit", data=values(page.get(path).text) | {"name": "e", "note": "mine", "do": "review"})

    if path == "/edit?name=e":
        assert re.findall(r"<dt>(\w+)</dt>", answer.text) == ["note"]
    save(page, path, name="f" if "like" in path else "e", note="mine")
    changed = stored(redis, "f" if "like" in path else "e", "definition")
    assert changed["schedule"] == before["schedule"]


@pytest.mark.parametrize(
    "when", [clocked(FIRST.replace(year=2030)), rrule("DAILY", dtstart=FIRST)], ids=["once", "rule"]
)
def test_a_merge_keeps_the_time_that_only_the_other_one_changed(page, entries, when):
    entries.upsert("e", PLAIN, when)
    form = values(page.get("/edit?name=e").text)
    moved = (
        clocked(FIRST.replace(year=2031)) if isinstance(when, clocked) else rrule("DAILY", dtstart=FIRST.replace(day=2))
    )
    entries.upsert("e", PLAIN, moved)

    conflict = page.post("/edit", data=form | {"note": "mine", "do": "save"}).text

    kept = conflict[conflict.index('action="/edit"') : conflict.index("Keep theirs where")]
    found = {
        name: html.unescape(value)
        for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', kept)
    }
    assert page.post("/edit", data=found | {"do": "save"}, follow_redirects=False).status_code == 303
    assert encode_schedule(entries.get("e").schedule) == encode_schedule(moved)
    assert entries.get("e").policy.note == "mine"


def merged_of(conflict: str) -> dict[str, str]:
    """Return the form that keeps theirs where nothing was changed."""
    kept = conflict[conflict.index('action="/edit"') : conflict.index("Keep theirs where")]
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', kept)
    return {name: html.unescape(value) for name, value in found}


@pytest.mark.parametrize(
    "when", [clocked(FIRST.replace(year=2031)), rrule("DAILY", dtstart=FIRST)], ids=["once", "rule"]
)
@pytest.mark.parametrize("before", [schedule(60), clocked(FIRST.replace(year=2030))], ids=["interval", "once"])
def test_a_merge_keeps_their_schedule_if_only_the_zone_is_mine(page, entries, before, when):
    entries.upsert("e", PLAIN, before, timezone="Europe/Berlin")
    form = values(page.get("/edit?name=e").text)
    entries.upsert("e", PLAIN, when, timezone="Europe/Berlin")
    theirs = values(page.get("/edit?name=e").text)

    merged = merged_of(page.post("/edit", data=form | {"timezone": "Asia/Tokyo", "do": "save"}).text)

    names = ("kind", "once", "rule_freq", "rule_dtstart")
    assert {name: merged[name] for name in names} == {name: theirs[name] for name in names}
    assert merged["timezone"] == "Asia/Tokyo"


def test_a_merge_keeps_their_arguments_though_a_mask_is_in_mine(page, entries):
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret", "n": 1})
    form = values(page.get("/edit?name=e").text)
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret of another", "n": 2})

    merged = merged_of(page.post("/edit", data=form | {"note": "mine", "do": "save"}).text)

    assert page.post("/edit", data=merged | {"do": "save"}, follow_redirects=False).status_code == 303
    assert (entries.get("e").kwargs, entries.get("e").policy.note) == (
        {"api_token": "s3cret of another", "n": 2},
        "mine",
    )


def test_an_instant_stays_when_a_zone_that_cannot_be_read_is_mended(page, entries, redis):
    definition = {"task": PLAIN, "schedule": {"__type__": "clocked", "instant": "2030-01-01T09:00:00+01:00"}}
    redis.hset("redbeat:e", mapping={"definition": json.dumps(definition), "policy": '{"timezone": "Mars"}'})
    redis.zadd("redbeat::schedule", {"redbeat:e": time.time() + 10**6})

    assert save(page, "/edit?name=e", timezone="America/New_York").status_code == 303

    assert entries.get("e").schedule.instant == datetime(2030, 1, 1, 8, tzinfo=UTC)


def test_half_of_a_surrogate_pair_stays_when_another_part_is_changed(page, entries, redis):
    entries.upsert("e", PLAIN, 60, args=["ö \udc80"], tags=["\udc80"], note="\udc80 n")

    assert save(page, "/edit?name=e", jitter="7").status_code == 303

    assert stored(redis, "e", "definition")["args"] == ["ö \udc80"]
    assert stored(redis, "e", "policy") == {"jitter": 7, "tags": ["\udc80"], "note": "\udc80 n"}
    form = values(page.get("/edit?name=e").text)
    save(page, "/edit?name=e", args=form["args"].replace("]", ", 2]"))
    assert stored(redis, "e", "definition")["args"] == ["ö \udc80", 2]


def test_arguments_that_are_masked_as_a_whole_stay_when_others_change(page, entries):
    entries.upsert("e", PLAIN, 60, kwargs={"redis://al:s3cret@host/0": 1})
    assert "s3cret" not in values(page.get("/edit?name=e").text)["kwargs"]

    assert save(page, "/edit?name=e", note="mine").status_code == 303

    assert (entries.get("e").kwargs, entries.get("e").policy.note) == ({"redis://al:s3cret@host/0": 1}, "mine")


def test_a_mask_in_a_copy_stands_for_the_secret_that_was_shown(page, entries):
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "s3cret", "user": "al"})
    form = values(page.get("/edit?like=e").text) | {"name": "f"}
    assert page.post("/edit", data=form | {"do": "save"}, follow_redirects=False).status_code == 303
    assert entries.get("f").kwargs["api_token"] == "s3cret"
    entries.upsert("e", PLAIN, 60, kwargs={"api_token": "of another", "user": "bob"})

    answer = page.post("/edit", data=form | {"name": "g", "do": "save"}, follow_redirects=False)

    assert answer.status_code == 422
    assert 'id="e-kwargs"' in answer.text
    again = values(answer.text) | {"kwargs": '{"api_token": "new"}', "do": "save"}
    assert page.post("/edit", data=again, follow_redirects=False).status_code == 303
    assert entries.get("g").kwargs == {"api_token": "new"}


def test_a_merge_keeps_what_only_the_other_one_changed(page, entries):
    entries.upsert("e", PLAIN, 60, args=["a"], jitter=5)
    form = values(page.get("/edit?name=e").text)
    save(page, "/edit?name=e", note="theirs")
    conflict = page.post("/edit", data=form | {"args": '["b"]', "do": "save"}).text
    merge = conflict[conflict.index('action="/edit"') : conflict.index("Keep theirs where")]
    kept = {name: html.unescape(value) for name, value in re.findall(r'name="([^"]+)" value="([^"]*)"', merge)}

    answer = page.post("/edit", data=kept | {"do": "save"}, follow_redirects=False)

    assert answer.status_code == 303, answer.text
    assert (entries.get("e").args, entries.get("e").policy.note) == (["b"], "theirs")


def test_a_write_between_check_and_save_is_a_conflict(page, entries, monkeypatch):
    """The version is compared again by the script that writes."""
    entries.upsert("e", PLAIN, 60)
    form = values(page.get("/edit?name=e").text)
    changed = Schedule.save

    def overtaken(self, entry: Entry):
        monkeypatch.setattr(Schedule, "save", changed)
        entries.upsert("e", PLAIN, 61)
        return changed(self, entry)

    monkeypatch.setattr(Schedule, "save", overtaken)
    answer = page.post("/edit", data=form | {"jitter": "7", "do": "save"})

    assert answer.status_code == 409
    assert entries.get("e").schedule == schedule(61)


def test_a_broken_entry_is_corrected_in_the_form(page, entries, redis):
    redis.hset("redbeat:e", "definition", json.dumps({"name": "e", "task": PLAIN, "schedule": "?", "args": ["kept"]}))
    redis.zadd("redbeat::schedule", {"redbeat:e": 1})

    save(page, "/edit?name=e", kind="every", every="60", unit="s")

    assert (entries.get("e").schedule, entries.get("e").args) == (schedule(60), ["kept"])


def test_the_preview_has_words_runs_and_the_shifts_of_the_clocks(page, entries):
    form = values(page.get("/edit").text) | {"minute": "30", "hour": "2", "timezone": "Europe/Berlin", "task": "t"}

    text = page.post("/preview", data=form).text

    assert text.count("<li>") == 5
    assert "02:30 does not exist" in text
    assert "02:30 comes twice" in text


def test_a_page_in_another_zone_reads_wall_clocks_as_beats_do(page, entries, redis):
    redis.set("redbeat::zone", "Europe/Berlin")  # the app is in UTC
    entries.upsert("night", PLAIN, crontab(minute="30", hour="2"))
    form = values(page.get("/edit").text) | {"task": PLAIN, "minute": "30", "hour": "2"}

    preview = page.post("/preview", data=form).text

    assert "02:30 does not exist" in preview
    assert len(re.findall(r"<li><time [^<]* 02:30:00 CES?T<", preview)) >= 4
    for text in (page.get("/entry?name=night").text, page.get("/edit?name=night").text):
        assert "Europe/Berlin" in text


@pytest.mark.parametrize("path", ["/edit?name=e", "/pause-all", "/backfill?name=e&start={0}T00:00&end={0}T01:00"])
def test_a_form_shows_its_wall_clocks_as_they_are_stored(page, entries, redis, monkeypatch, path):
    """A deploy may change the zone of beats while a form is open."""
    monkeypatch.setattr("singlebeat.web.poller.EVERY", 0.0)
    redis.set("redbeat::zone", "Europe/Berlin")
    entries.upsert("e", PLAIN, clocked(datetime(2100, 1, 1, tzinfo=UTC)) if "edit" in path else crontab(minute="*/20"))
    form = page.form(path.format(f"{datetime.now(UTC):%Y-%m-%d}"))
    redis.set("redbeat::zone", "America/New_York")

    answer = page.post(path.partition("?")[0], data=form)

    assert answer.status_code == 409
    assert "America/New_York by now, and this form shows them in Europe/Berlin" in answer.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('{"queue": "bills"}', "No worker that answers and reads queue bills knows the task"),
        ("{}", ""),
        ('{"queue": ["bills"]}', ""),
        ("[", ""),
    ],
)
def test_the_preview_says_if_the_readers_of_the_queue_lack_the_task(page, monkeypatch, options, said):
    queues = {"w1": ("celery", {PLAIN}), "w2": ("bills", {"other"})}
    readers = {name: Reader(frozenset({queue}), frozenset(tasks), 1, ()) for name, (queue, tasks) in queues.items()}
    known = {name: reader.tasks for name, reader in readers.items()}
    answers = Workers({}, known, dict.fromkeys(readers, "1"), readers, {}, (0.0, 0.0))
    monkeypatch.setattr(Workers, "ask", lambda _: answers)
    form = values(page.get("/edit").text) | {"name": "e", "task": PLAIN, "options": options}

    texts = [page.post("/preview", data=form).text]
    if options in {"{}", '{"queue": "bills"}'}:
        draft = {"task": PLAIN, "schedule": 60, "options": json.loads(options)}
        headers = {"X-Singlebeat-Token": page.cookies[COOKIE]}
        texts.append(page.post("/api/preview", json={"definition": draft}, headers=headers).json()["unknown_task"])

    for text in texts:
        assert ("drops the message" in text) is bool(said), text
        assert said in text


def test_the_preview_stores_nothing(page, redis):
    before = set(redis.keys("redbeat*"))
    page.post("/preview", data=values(page.get("/edit").text) | {"name": "e", "task": PLAIN})

    assert set(redis.keys("redbeat*")) == before


HOSTILE_SCHEDULES = [
    {"kind": "cron", "day_of_month": "1--100000000"},
    {"kind": "cron", "minute": "0-59/1," * 2000 + "0"},
    {"kind": "cron", "day_of_month": "30", "month_of_year": "2"},
    {"kind": "cron", "minute": "*/0"},
    {"kind": "every", "every": "1e-300"},
    {"kind": "every", "every": "1e300", "unit": "d"},
    {"kind": "every", "every": "9" * 5000},
    {"kind": "once", "once": "9999-12-31T23:59:59"},
    {"kind": "json", "json": "[" * 20_000},
    {"kind": "json", "json": '{"__type__": "interval", "every": 1e400}'},
    *(
        {"kind": "rule", "rule_dtstart": "1970-01-01T00:00:00", "rule_freq": freq, **parts}
        for freq in ("SECONDLY", "MINUTELY", "HOURLY", "DAILY", "YEARLY")
        for parts in (
            {"rule_bymonth": "2", "rule_bymonthday": "30"},
            {"rule_interval": "999999999"},
            {"rule_count": "999999999"},
            {"rule_bysetpos": "366", "rule_byweekday": "MO"},
        )
    ),
]


@pytest.mark.parametrize(
    "hostile", HOSTILE_SCHEDULES, ids=lambda each: "-".join(f"{k}={v[:12]}" for k, v in each.items())
)
def test_a_hostile_schedule_is_previewed_in_bounded_time(page, hostile):
    form = values(page.get("/edit").text) | {"name": "e", "task": PLAIN, **hostile}
    began = time.thread_time()

    assert page.post("/preview", data=form).status_code == 200
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("name", HOSTILE[:5], ids=["script", "quotes", "slashes", "scheme", "bidi"])
def test_an_entry_of_a_hostile_name_can_be_edited(page, entries, name):
    entries.upsert(name, PLAIN, 60)

    answer = save(page, "/edit?" + urlencode({"name": name}), jitter="7")

    assert answer.status_code == 303
    assert entries.get(name).policy.jitter == 7
