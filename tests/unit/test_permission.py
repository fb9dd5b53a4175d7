"""``singlebeat_allowed_tasks``: the tasks that an entry names, wherever it names them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from singlebeat import Entry
from singlebeat.beat.entries.permission import check_allowed
from singlebeat.errors import EntryError
from tests.system.apps import make_app

PATTERNS = ("shop.*", "celery.map", "celery.group")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def app() -> Celery:
    return make_app("redis://nowhere")


def ok(app: Celery, **options: Any) -> Any:
    return app.signature("shop.ok", args=(1,), **options)


def bad(app: Celery, **options: Any) -> Any:
    return app.signature("admin.drop", args=(1,), **options)


def entry_of(app: Celery, task: str = "shop.ok", **fields: Any) -> Entry:
    """Return an entry that was stored as JSON and read again, as beat sees it."""
    definition = {"task": task, "schedule": 60, **json.loads(json.dumps(fields))}
    return Entry.decode("redbeat:e", json.dumps(definition), app)


#: A signature of a task, in everything that Celery makes of signatures.
CANVAS = {
    "itself": lambda s, app: s,
    "in a list": lambda s, app: [ok(app), s],
    "chain": lambda s, app: chain(ok(app), s),
    "group": lambda s, app: group([ok(app), s]),
    "chord, header": lambda s, app: chord([ok(app), s], ok(app)),
    "chord, body": lambda s, app: chord([ok(app), ok(app)], s),
    "chain of a group": lambda s, app: chain(ok(app), group([ok(app), s])),
    "map": lambda s, app: {**app.signature("celery.map"), "kwargs": {"task": s, "it": [1]}, "subtask_type": "xmap"},
    "as an option": lambda s, app: ok(app, options={"link": [s]}),
    "as the option of a group": lambda s, app: group([ok(app)], link_error=s),
}


@pytest.mark.parametrize(
    "text",
    [
        '{"task": "shop.login", "args": ["u", "s3cret"], "kwargs": {"password": "s3cret"}}',
        "x://u:s3cret@h",
        "password=s3cret",
    ],
)
def test_a_text_in_place_of_a_signature_is_refused_without_being_shown(app, text):
    for value in (text, [text]):
        with pytest.raises(EntryError, match="not among singlebeat_allowed_tasks") as refused:
            check_allowed(entry_of(app, options={"link_error": value}), PATTERNS)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [{"subtask_type": {"password": "s3cret"}}, {"subtask_type": "password=s3cret"}, {"task": ["s3cret"]}],
    ids=str,
)
def test_no_field_of_a_signature_that_cannot_be_checked_is_shown(app, wrong):
    value = {"task": "shop.bill", "args": [], "kwargs": {}, "options": {}, **wrong}

    with pytest.raises(EntryError) as refused:
        check_allowed(entry_of(app, options={"link_error": [value]}), PATTERNS)

    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("option", ["link", "link_error", "chain", "chord"])
@pytest.mark.parametrize("made", CANVAS.values(), ids=CANVAS)
def test_a_signature_in_the_options_is_found(app, option, made):
    def options(one: Any) -> Any:
        value = made(one, app)
        return {option: [value] if option == "chain" and isinstance(value, dict) else value}

    check_allowed(entry_of(app, options=options(ok(app))), PATTERNS)

    with pytest.raises(EntryError, match=r"makes task admin\.drop run, which is not among singlebeat_allowed_tasks"):
        check_allowed(entry_of(app, options=options(bad(app))), PATTERNS)


@pytest.mark.parametrize(
    ("task", "kwargs"),
    [
        ("celery.map", {"task": "{}", "it": [1]}),
        ("celery.group", {"tasks": ["{}"], "result": [], "group_id": "g", "partial_args": []}),
    ],
)
def test_a_signature_in_the_arguments_of_a_task_of_celery_is_found(app, task, kwargs):
    def filled(value: Any, sig: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(each, sig) for name, each in value.items()}
        if isinstance(value, list):
            return [filled(each, sig) for each in value]
        return sig if value == "{}" else value

    for good, wrong in ((ok(app), bad(app)), ("shop.ok", "admin.drop")):
        check_allowed(entry_of(app, task, kwargs=filled(kwargs, good)), PATTERNS)
        with pytest.raises(EntryError, match=r"admin\.drop"):
            check_allowed(entry_of(app, task, kwargs=filled(kwargs, wrong)), PATTERNS)
        with pytest.raises(EntryError, match="by name"):  # where a position decides what it is
            check_allowed(entry_of(app, task, args=list(filled(kwargs, good).values())), PATTERNS)


@pytest.mark.parametrize(
    "further",
    [
        {"link": [{"task": "admin.drop", "args": [], "kwargs": {}, "options": {}}]},
        {"headers": {"x": "y"}},
        {"kwargs": {"task": "admin.drop"}},
    ],
    ids=str,
)
def test_further_arguments_of_a_chord_are_refused(app, further):
    """Celery takes them for options of its tasks, or replaces the arguments of its tasks with them."""
    kwargs = {"header": [ok(app)], "body": ok(app), "kwargs": {}, "max_retries": 5}
    whole = {**kwargs, **further}

    for given, check in (
        (kwargs, nullcontext()),
        (whole, pytest.raises(EntryError, match=r"celery\.chord has the arg")),
    ):
        with check:
            check_allowed(entry_of(app, "celery.chord", kwargs=given), ("shop.*", "celery.chord"))
        with check:
            chord_ = {"task": "celery.chord", "args": [], "kwargs": given, "options": {}}
            check_allowed(entry_of(app, options={"link": {**chord_, "subtask_type": "chord"}}), PATTERNS)


@pytest.mark.parametrize(
    "called", ["celery.map", "celery.chord", {"task": "celery.group", "subtask_type": "group"}], ids=str
)
@pytest.mark.parametrize("task", ["celery.starmap", "celery.chunks"])
def test_a_call_of_celerys_own_tasks_for_each_item_is_refused(app, task, called):
    """Each item has the arguments of such a task, among them the tasks that it runs."""
    if isinstance(called, dict):
        called = {**called, "args": [], "kwargs": {"tasks": [ok(app)]}, "options": {}}
    entry = entry_of(app, task, kwargs={"task": called, "it": [["admin.drop", ["x"]]]})

    with pytest.raises(EntryError, match="calls a task of Celery"):
        check_allowed(entry, ("shop.*", "celery.*"))


@pytest.mark.parametrize("called", [["shop.ok"], [], 5, None], ids=str)
@pytest.mark.parametrize("task", ["celery.map", "celery.starmap", "celery.chunks"])
def test_a_call_of_what_is_no_task_for_each_item_is_refused(app, task, called):
    with pytest.raises(EntryError, match="cannot check"):
        check_allowed(entry_of(app, task, kwargs={"task": called, "it": [1]}), ("shop.*", "celery.*"))


@pytest.mark.parametrize("name", ["celery.chord_unlock", "celery.starmap", "celery.chunks", "celery.chord"])
def test_other_tasks_of_celery_that_run_tasks_name_them(app, name):
    with pytest.raises(EntryError, match="by name"):
        check_allowed(entry_of(app, name), ("celery.*",))


@pytest.mark.parametrize(
    "options",
    [
        {"link_error": 5},
        {"link_error": [None]},
        {"link_error": {"args": []}},
        {"link_error": {"task": 5}},
        {"link_error": {"task": "shop.ok", "options": []}},
        {"link_error": {"task": "shop.ok", "options": {"group_id": "g"}}},
        {"link_error": {"task": "shop.ok", "subtask_type": "group"}},
        {"link_error": {"task": "shop.ok", "link": {"task": "admin.drop"}}},
        {
            "link": {
                "task": "celery.chord",
                "subtask_type": "chord",
                "kwargs": {"header": [{"task": "shop.ok"}], "body": {"task": "shop.ok"}, "kwargs": {}},
                "options": {},
                "link": {"task": "admin.drop", "args": [], "kwargs": {}, "options": {}},
            }
        },
        {"link_error": {"task": "shop.ok", "subtask_type": "chain", "kwargs": {"tasks": [{"task": "admin.drop"}]}}},
        {"link_error": {"task": "celery.group", "subtask_type": "mine", "kwargs": {"tasks": []}}},
        {"link_error": {"task": "shop.ok", "subtask_type": {"__type__": "bytes", "__value__": "chain"}}},
        {"link_error": {"__type__": "bytes", "__value__": "admin.drop"}},
        {"link_error": [{"__type__": "interval", "every": 5}]},
        {"group_id": "another's"},
        {"replaced_task_nesting": 1},
        {"stamped_headers": ["task"], "task": "admin.drop"},
        {"route_name": "admin.drop"},
        {"reply_to": "celery"},
        {"correlation_id": "x"},
    ],
    ids=str,
)
def test_options_that_are_not_understood_are_refused(app, options):
    entry = entry_of(app, options=options)

    with pytest.raises(EntryError):
        check_allowed(entry, PATTERNS)
    check_allowed(entry, ("*",))


def test_options_of_a_message_are_understood(app):
    options = {
        "queue": "q", "countdown": 5, "priority": 3, "expires": 60, "serializer": "json", "headers": {"mine": 1},
        "time_limit": 5, "shadow": "s", "ignore_result": True, "link": None, "retry": False, "expire_seconds": 5,
    }  # fmt: skip

    check_allowed(entry_of(app, options=options), PATTERNS)


def test_signatures_that_are_nested_too_deeply_are_refused(app):
    entry, sig = entry_of(app), {"task": "shop.ok"}
    for _ in range(5000):
        sig = {"task": "shop.ok", "options": {"link": sig}}
    entry.options = {"link": sig}

    with pytest.raises(EntryError, match="nested too deeply"):
        check_allowed(entry, PATTERNS)


@pytest.mark.parametrize("name", ["task", "id", "lang", "compression", "retries", "singlebeat_lock", "callbacks"])
def test_a_header_that_celery_or_singlebeat_sets_is_refused(app, name):
    with pytest.raises(EntryError, match=f"the option headers has '{name}', which an entry must not set"):
        entry_of(app, options={"headers": {name: "admin.drop"}})


@pytest.mark.parametrize("name", ["content_type", "content_encoding", "result_cls", "producer", "args"])
def test_an_entry_does_not_say_how_its_message_is_sent_and_read(app, name):
    with pytest.raises(EntryError, match=f"an entry must not set the option {name}"):
        entry_of(app, options={name: "application/x-python-serialize"})
