"""Which arguments are masked, wherever they are, and what is left as it is."""

from __future__ import annotations

import json
import time

import pytest
from celery import Celery

from singlebeat.locks.key import readable
from singlebeat.log import without_passwords
from singlebeat.masking import MASK, masked, masked_arguments, masked_text

SECRET = "hunter2"


@pytest.fixture
def app():
    app = Celery("masking", set_as_current=False)

    @app.task(name="login", shared=False)
    def login(user, password, *more_secrets, retries=3):
        pass

    @app.task(name="bound", bind=True, shared=False)
    def bound(self, api_token):
        pass

    @app.task(name="plain", shared=False)
    def plain(a, b):
        pass

    return app


def test_arguments_are_masked_by_their_names_at_any_depth(app):
    value = {
        "user": "ann",
        "PassWord": SECRET,
        "ftp_passwd": SECRET,
        "apiKey": SECRET,
        "stripe_api_key": SECRET,
        "headers": {"X-Api-Key": SECRET, "Authorization": SECRET, "Accept": "text"},
        "credentials": [SECRET],
        "nested": [{"api_token_2": {"a": SECRET}}, ({"client_secret": [SECRET]}, 1)],
    }

    assert masked(value, app) == {
        "user": "ann",
        "PassWord": MASK,
        "ftp_passwd": MASK,
        "apiKey": MASK,
        "stripe_api_key": MASK,
        "headers": {"X-Api-Key": MASK, "Authorization": MASK, "Accept": "text"},
        "credentials": MASK,
        "nested": [{"api_token_2": MASK}, ({"client_secret": MASK}, 1)],
    }
    assert value["PassWord"] == SECRET, "the value itself stays"


@pytest.mark.parametrize(
    ("task", "args", "expected"),
    [
        ("login", ["ann", SECRET], ["ann", MASK]),
        ("login", ["ann", SECRET, 1, 2], ["ann", MASK, MASK, MASK]),
        ("bound", [SECRET], [MASK]),
        ("plain", [{"token": SECRET}, 2], [{"token": MASK}, 2]),
        ("unknown", ["ann", {"token": SECRET}], ["ann", {"token": MASK}]),
        ("plain", [], []),
    ],
)
def test_positional_arguments_have_the_names_of_their_task(app, task, args, expected):
    assert masked_arguments(task, args, app) == expected


def test_a_definition_and_the_signatures_in_it_are_calls(app):
    signature = {"task": "login", "args": ["ann", SECRET], "kwargs": {"token": SECRET}, "options": {}}
    definition = {
        "task": "bound",
        "args": [SECRET],
        "kwargs": {"then": signature},
        "options": {"headers": {"x-token": SECRET}, "link": [signature]},
    }

    shown = masked(definition, app)

    assert SECRET not in json.dumps(shown)
    assert shown["kwargs"]["then"]["args"] == [MASK, MASK], "a result may come before them"
    assert shown["task"] == "bound"
    assert masked(signature, app)["args"] == ["ann", MASK]
    (immutable, definition) = masked([{**signature, "immutable": True}, {**signature, "schedule": 60}], app)
    assert (immutable["args"], definition["args"]) == (["ann", MASK], ["ann", MASK])


def test_the_patterns_are_a_setting(app):
    app.conf.singlebeat_masked_arguments = ["card", "*"]
    definition = {"task": "plain", "args": [1], "kwargs": {"a": 1}, "schedule": "daily"}

    assert masked(definition, app) == {"task": "plain", "args": [MASK], "kwargs": {"a": MASK}, "schedule": "daily"}

    other = Celery("unmasked", set_as_current=False)
    other.conf.singlebeat_masked_arguments = []
    assert masked({"password": SECRET}, other) == {"password": SECRET}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"kwargs": {"password": SECRET}, "task": "x", "schedule": "no schedule"}),
        repr({"password": SECRET, "n": 1}),
        '{"kwargs": {"password": "' + SECRET,
        '{"password"  :{"x": "' + SECRET + '"}, "b": }',
        "{'a': 1, 'api_token': '" + SECRET + "...",
        '["' + "x" * 30_000 + '", {"Password": "' + SECRET + '"}]',
        '{"a": ' + "[" * 100_000 + ', "password": "' + SECRET + '"',
        '{"kwargs": {"pass\\u0077ord": "' + SECRET + '"',
        '{"\\u0061rgs": ["ann", "' + SECRET + '"',
        "{kwargs: {password: " + SECRET + "}}",
        "<Login password='" + SECRET + "'>",
        '{"' + "y" * 300 + '_password": "' + SECRET + '"',
        '{"it\'s password": "' + SECRET + '"',
        '{"kwargs": {"password" "' + SECRET + '"}}',
        '{"kwargs": {"password"   =>"' + SECRET + '"}}',
        json.dumps(json.dumps({"password": SECRET})),
        json.dumps('{"password": "' + SECRET),
        '{"kwargs": {"password": "' + SECRET + '"}, "kwargs": {}}',
        json.dumps({"of": {f"redis://:{SECRET}@h": 1}}),
    ],
)
def test_strings_of_json_and_reprs_are_masked_even_broken_ones(app, text):
    assert SECRET not in masked_text(text, app)


@pytest.mark.parametrize(
    "fields",
    [
        {"kwargs": json.dumps({"password": SECRET})},
        {"args": json.dumps(["ann", SECRET])},
        {"args": [], "options": {"argsrepr": f"('ann', '{SECRET}')"}},
        {"args": [], "options": {"kwargsrepr": f"{{'password': '{SECRET}'}}"}},
        {"options": {"link": [json.dumps({"task": "login", "args": ["ann", SECRET]})]}},
        {"options": {"link": json.dumps({"task": "login", "args": ["ann", SECRET]})}},
        {"kwargs": [["password", SECRET]]},
        {"args": [], "options": {"link": [{"task": "login", "args": [SECRET], "kwargs": {}}]}},
        {"task": "celery.starmap", "kwargs": {"task": "login", "it": [["ann", SECRET]]}},
        {"task": "celery.starmap", "args": ["login"], "kwargs": {"it": [["ann", SECRET]]}},
        {"options": json.dumps({"link": {"task": "login", "args": [], "kwargs": {"password": SECRET}}})},
        {"task": "celery.starmap", "args": [{"task": "login", "args": []}, [["ann", SECRET]]]},
        {"kwargs": {"task": {"task": "bound", "args": []}, "it": [SECRET, SECRET]}},
        {"kwargs": {"task": {"task": "bound", "args": []}, "it": [[SECRET]]}},
        {"kwargs": {"task": {"task": "login", "args": []}, "it": [["ann", SECRET]]}},
    ],
)
def test_secrets_are_masked_in_other_ways_to_write_arguments(app, fields):
    shown = json.dumps(masked({"task": "login", **fields}, app))

    assert SECRET not in shown
    assert "login" in shown


def test_strings_and_calls_without_secrets_are_shown(app):
    link = {"task": "plain", "args": [1, "x"], "kwargs": {}}
    value = {
        "task": "plain",
        "args": ["note: a", "args"],
        "kwargs": {"task": link, "it": [[1, 2], 3], "chain": ["a"]},
        "options": {"link": [link], "argsrepr": "('x',)", "kwargsrepr": "{}", "headers": {"a": "b: c"}},
    }

    assert masked(value, app) == value


URLS = [
    f"redis://:{SECRET}@h:1/0",
    f"https://ann:{SECRET}@shop.test/x?a=b@c",
    f"amqp://ann:a/{SECRET}@h//",
    f"redis://:12/{SECRET}@h",
    f"unix:///run/s?db=1&password={SECRET}",
    f"see http://shop:80/a and ftp://ann:{SECRET}@h",
    f"unix:///run/s?PASSWORD={SECRET}",
    f"amqp://ann@shop.test:{SECRET}@h//",
    f"amqp://shop/ann:{SECRET}@h//",
]


@pytest.mark.parametrize("url", URLS)
def test_an_argument_that_is_a_url_with_a_password_is_masked(app, url):
    call = {"task": "plain", "args": [url, 1], "kwargs": {"of": [{"url": url}]}, "options": {"headers": {"to": url}}}

    shown = masked(call, app)

    assert shown["args"] == [MASK, 1]
    assert shown["kwargs"] == {"of": [{"url": MASK}]}
    assert masked({"of": {url: 1}, url: 2}, app)["of"] == MASK
    assert shown["options"] == {"headers": {"to": MASK}}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("text", ['{{"url": "{}"}}', "{{'url': '{}'}}", '"{}"', "{}", "<Job to='{}'", '{{"a": "{}", '])
def test_a_string_with_a_url_is_shown_without_its_password(app, url, text):
    assert SECRET not in masked_text(text.format(url), app)


@pytest.mark.parametrize(
    "text", ["redis://ann@h:1/0", "https://shop.test:80/x", "http://shop:80/x of ann@shop", "ann:x@h", "a://"]
)
def test_an_argument_that_is_a_url_without_a_password_is_shown(app, text):
    assert masked(text, app) == masked_text(text, app) == text


def test_a_hostile_string_is_masked_in_bounded_time(app):
    for text in ("://a:" * 50_000, "@ ://a:b" + "@ ://a:" * 50_000, "&password=" * 50_000):
        began = time.thread_time()
        masked({"a": text}, app)
        assert time.thread_time() - began < 2
    for text in ('"\\' * 50_000, "'\\'" * 50_000, "a" * 100_000, '"a" ' * 50_000, '"' + " " * 100_000, "x " * 50_000):
        began = time.thread_time()
        masked_text("{" + text, app)
        assert time.thread_time() - began < 2


@pytest.mark.parametrize("text", ['{"a":  1}', "{", "('an account',)", "", "null", "{'a': <object>}"])
def test_a_string_without_secrets_stays_as_it_is(app, text):
    assert masked_text(text, app) == text


def test_a_value_that_contains_itself_is_not_shown(app):
    value: list[object] = []
    value.append(value)

    assert masked({"a": value}, app) == MASK


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "'ann', '**', token='**', n=1"),
        ({"argsrepr": f"('ann', {SECRET!r})"}, "('ann', '**'), token='**', n=1"),
        (
            {"argsrepr": f"('ann', {SECRET!r}, ...", "kwargsrepr": f"{{'token': {SECRET!r}, 'n': 1}}"},
            "**, {'token': '**', 'n': 1}",
        ),
    ],
)
def test_the_record_of_a_lock_shows_no_secret(app, headers, expected):
    text = readable(["ann", SECRET], {"token": SECRET, "n": 1}, headers, app=app, task="login")

    assert text == expected


@pytest.mark.parametrize(
    "url", [r"https:\/\/u:hunter2@h", r"https\u003a//u:hunter2@h", r"https://u\u003ahunter2\u0040h"], ids=str
)
@pytest.mark.parametrize("broken", ['{"dsn": "%s", "schedule": {', '{"kwargs": "{\\"dsn\\": %s"', "%s"], ids=str)
def test_a_url_with_escapes_shows_no_password_in_broken_text(app, broken, url):
    assert SECRET not in masked_text(broken % url, app)


def test_an_argument_that_is_json_with_escaped_slashes_shows_no_password(app):
    assert SECRET not in str(masked({"kwargs": {"body": r'{"dsn": "https:\/\/u:hunter2@h"}'}}, app))


@pytest.mark.parametrize(
    "text",
    [
        r'"{\"password\": {\"x\": \"hunter2\"}}"…',
        r'"{\"b\": [[\"rediss://h/0?x=1&password=hunter2\", [\"see rediss://u:p@h\"',
    ],
)
def test_json_in_json_that_is_cut_off_shows_no_secret(app, text):
    assert SECRET not in masked_text(text, app)


@pytest.mark.parametrize("end", ["", "2", "/x"])
def test_a_url_that_is_cut_off_in_its_password_shows_none(app, end):
    text = '{"kwargs": {"x": "https://u:hunter2' + end

    assert SECRET not in masked_text(text, app)
    assert masked_text('{"kwargs": {"x": "https://h:80' + end, app).endswith(":80" + end)


@pytest.mark.parametrize("show", [str, repr, lambda text: repr(repr(text))], ids=["text", "repr", "twice"])
def test_a_url_with_escaped_slashes_in_a_repr_shows_no_password(app, show):
    text = show(r"https:\/\/u:hunter2@h")

    assert SECRET not in str(masked({"kwargs": {"body": text}}, app)) + without_passwords(text)


@pytest.mark.parametrize("more", ["", "x" * 300, 'a "quoted" text, ' * 30], ids=len)
@pytest.mark.parametrize("levels", range(5))
def test_a_secret_in_json_in_strings_is_not_in_broken_text(app, levels, more):
    text: object = {"user": "ann", "more": more, "password": SECRET}
    for _ in range(levels):
        text = {"kwargs": json.dumps(text)}

    whole = json.dumps(text)
    broken = [whole[:-1], whole.replace('password": ', 'password" '), whole.replace(": ", " ")]
    assert SECRET not in "".join(masked_text(each, app) for each in broken)


def test_a_name_of_an_argument_that_is_a_url_is_masked(app):
    assert SECRET not in masked_text(str({f"https://ann:{SECRET}@h": 1}), app)
