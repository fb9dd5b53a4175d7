"""The wishes of an entry: what is understood, what is refused and why, and what we write; and their JSON Schema."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from importlib import resources
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar
from dateutil.rrule import FR, MO
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from redbeat.schedules import rrule

from singlebeat import Entry, clocked
from singlebeat.beat.entries import policy
from singlebeat.beat.entries.definition import TAKEN_OPTIONS, decode_definition
from singlebeat.beat.entries.options import TAKEN_HEADERS
from singlebeat.beat.entries.policy import EntryPolicy, PolicyOptions
from singlebeat.errors import EntryError
from singlebeat.overlap import Overlap
from tests.support import DOCUMENTS

BERLIN = ZoneInfo("Europe/Berlin")
START = datetime(2026, 12, 1, 9, 0, tzinfo=BERLIN)
WISHES: dict[str, Any] = {
    "timezone": BERLIN,
    "overlap": Overlap.BUFFER_ALL,
    "misfire_grace_time": 90.0,
    "jitter": 2.5,
    "start_time": START.astimezone(UTC),
    "end_time": START.astimezone(UTC) + timedelta(days=1),
    "max_runs": 3,
    "run_on_start": True,
    "expires": 30.0,
    "paused": True,
    "note": "why",
    "tags": ("billing", "eu"),
}
WRITTEN = {
    **WISHES,
    "tags": ["billing", "eu"],
    "timezone": "Europe/Berlin",
    "overlap": "buffer_all",
    "start_time": "2026-12-01T08:00:00+00:00",
    "end_time": "2026-12-02T08:00:00+00:00",
}


def schema(name: str) -> Draft202012Validator:
    raw = json.loads(resources.files("singlebeat").joinpath(f"schemas/{name}.json").read_text("utf-8"))
    Draft202012Validator.check_schema(raw)
    return Draft202012Validator(raw)


POLICY, DEFINITION = schema("policy"), schema("definition")


@pytest.fixture(scope="module")
def app() -> Celery:
    app = Celery(set_as_current=False)
    app.conf.redbeat_redis_url = "redis://127.0.0.1:1"  # no server is there: nothing here connects
    return app


# ---------------------------------------------------------------- what is understood


def test_a_long_policy_is_not_kept():
    """Its note may often be rewritten, and what beat keeps must not grow with it."""
    before = policy._decode.cache_info().currsize

    found = [EntryPolicy.decode(json.dumps({"note": "x" * policy.LONGEST_KEPT + str(number)})) for number in range(3)]

    assert [each.note[-1] for each in found] == ["0", "1", "2"]
    assert policy._decode.cache_info().currsize == before


def test_nothing_is_wished_by_default():
    assert (
        EntryPolicy.decode(None)
        == EntryPolicy.decode("")
        == EntryPolicy.decode("{}")
        == EntryPolicy.of({})
        == EntryPolicy()
    )
    assert EntryPolicy().encode() == ""


def test_the_examples_have_every_wish():
    assert WISHES.keys() == WRITTEN.keys() == EntryPolicy.names() == {each.name for each in fields(EntryPolicy)}


@pytest.mark.parametrize("name", WISHES)
def test_a_wish_is_read_as_an_object_and_as_json(name):
    wished = EntryPolicy(**{name: WISHES[name]})

    assert EntryPolicy.of({name: WISHES[name]}) == wished
    assert EntryPolicy.decode(json.dumps({name: WRITTEN[name]})) == wished
    assert json.loads(wished.encode()) == {name: WRITTEN[name]}


@pytest.mark.parametrize("name", WISHES)
def test_null_is_the_default(name):
    assert EntryPolicy.decode(json.dumps({name: None})) == EntryPolicy()


@pytest.mark.parametrize(
    "written",
    ["2026-12-01T09:00:00+01:00", "2026-12-01T08:00:00Z", "2026-12-01 09:00+01:00", START, START.astimezone(UTC)],
)
def test_an_instant_is_kept_in_utc(written):
    assert EntryPolicy.of({"start_time": written}).start_time == START
    assert EntryPolicy.of({"start_time": written}).start_time.tzinfo is UTC


def test_a_whole_number_of_seconds_will_do():
    assert EntryPolicy.of({"jitter": 5}) == EntryPolicy(jitter=5.0)


def test_the_first_and_the_last_time_may_be_the_same():
    assert EntryPolicy.of({"start_time": START, "end_time": START}).end_time == START


# ---------------------------------------------------------------- what is refused

WRONG = {
    "timezone": ["", "Mars/Olympus", "../etc/passwd", 7, True, []],
    "overlap": ["raise", "sometimes", "", 0, False, []],
    "misfire_grace_time": [0, -1, "5", True, [5], float("inf"), float("nan")],
    "jitter": [0, -1, "5", False, {}],
    "start_time": ["", "tomorrow", "2026-12-01", "2026-12-01T09:00:00", 1780000000, True, []],
    "end_time": ["", "2026-12-01T09:00", 0, {}],
    "max_runs": [0, -1, 1.5, "3", True, [3]],
    "run_on_start": ["true", 1, 0, "", []],
    "expires": [0, -1, "5", True],
    "paused": ["true", 1, 0, ""],
    "note": [7, True, [], {}],
    "tags": [7, True, "billing", {}, ["billing", 7], [""], [" "]],
}
WRONG_PAIRS = [(name, value) for name, values in WRONG.items() for value in values]


def test_there_are_wrong_values_of_every_wish():
    assert WRONG.keys() == EntryPolicy.names()


@pytest.mark.parametrize(("name", "value"), WRONG_PAIRS)
def test_a_wrong_value_is_refused_by_name_with_the_right_form(name, value):
    with pytest.raises(EntryError, match=rf"^policy: {name} must be .+, not {re.escape(repr(value))}$"):
        EntryPolicy.of({name: value})
    with pytest.raises(EntryError, match=rf"^policy: {name} must be"):
        EntryPolicy.decode(json.dumps({name: value}))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"jiter": 5}', "policy: there is no 'jiter'; did you mean 'jitter'?"),
        ('{"time_zone": "UTC"}', "policy: there is no 'time_zone'; did you mean 'timezone'?"),
        ('{"x": 5}', "policy: there is no 'x'"),
        ("[]", "policy is not a JSON object"),
        ("5", "policy is not a JSON object"),
        ("{", "policy cannot be read: JSONDecodeError"),
        ("[" * 100_000, "policy is nested too deeply"),
        (
            '{"start_time": "2026-12-02T00:00Z", "end_time": "2026-12-01T00:00Z"}',
            "policy: end_time 2026-12-01 00:00:00+00:00 is before start_time 2026-12-02 00:00:00+00:00",
        ),
    ],
    ids=lambda value: value[:30],
)
def test_an_invalid_policy_is_refused_with_the_reason(written, message):
    with pytest.raises(EntryError) as caught:
        EntryPolicy.decode(written)

    assert str(caught.value).startswith(message)


def test_an_entry_refuses_them_as_well(app):
    with pytest.raises(EntryError, match="policy: jitter must be a positive number of seconds, not -1"):
        Entry("e", "t", schedule(60), jitter=-1, app=app)
    with pytest.raises(EntryError, match="expires is in its options as well as in its policy"):
        Entry("e", "t", schedule(60), options={"expires": 5}, expires=5, app=app)


# ---------------------------------------------------------------- what is written

instants = st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
seconds = st.floats(0.001, 1e9)
policies = st.builds(
    EntryPolicy,
    timezone=st.none() | st.sampled_from([BERLIN, ZoneInfo("UTC"), ZoneInfo("Australia/Lord_Howe")]),
    overlap=st.none() | st.sampled_from([word for word in Overlap if word is not Overlap.RAISE]),
    misfire_grace_time=st.none() | seconds,
    jitter=st.none() | seconds,
    start_time=st.none() | instants.filter(lambda moment: moment < datetime(2100, 1, 1, tzinfo=UTC)),
    end_time=st.none() | instants.filter(lambda moment: moment > datetime(2100, 1, 1, tzinfo=UTC)),
    max_runs=st.none() | st.integers(1, 2**40),
    run_on_start=st.booleans(),
    expires=st.none() | seconds,
    paused=st.booleans(),
    note=st.text(),
    tags=st.lists(st.text().filter(str.strip), unique=True).map(tuple),
)


@given(policies)
@settings(deadline=None)
def test_a_written_policy_is_read_unchanged_and_agrees_with_the_schema(policy):
    text = policy.encode()

    assert EntryPolicy.decode(text) == policy
    assert text == "" or POLICY.is_valid(json.loads(text))


# ---------------------------------------------------------------- the schemas


def test_the_schema_of_policies_knows_every_wish_with_a_description():
    properties = POLICY.schema["properties"]

    assert properties.keys() == EntryPolicy.names()
    assert all(len(each["description"]) > 10 for each in properties.values())
    assert set(properties["overlap"]["enum"]) == {None, *(word for word in Overlap if word is not Overlap.RAISE)}


@pytest.mark.parametrize("name", WISHES)
def test_the_schema_takes_each_wish_and_null(name):
    assert POLICY.is_valid({name: WRITTEN[name]})
    assert POLICY.is_valid({name: None})


@pytest.mark.parametrize(("name", "value"), WRONG_PAIRS)
def test_a_policy_that_its_schema_refuses_is_refused(name, value):
    """It cannot know every zone, and JSON has neither infinity nor NaN: those it may take."""
    known = name != "timezone" or not isinstance(value, str) or not value
    if known and value == value and value != float("inf"):
        assert not POLICY.is_valid({name: value})
    assert not POLICY.is_valid({"jiter": 5})
    assert not POLICY.is_valid([])


SCHEDULES = [
    schedule(60),
    schedule(0.5),
    schedule(timedelta(days=1), relative=True),
    crontab(),
    crontab(minute="*/15", hour="8-18", day_of_week="mon-fri"),
    crontab(minute=5, hour=[1, 2], day_of_month="1-7", month_of_year="jan"),
    rrule("WEEKLY", dtstart=datetime(2026, 1, 1, tzinfo=UTC), byweekday=[MO, FR], byhour=9, count=3),
    rrule("DAILY", dtstart=START, until=START + timedelta(days=9), interval=2),
    rrule("MONTHLY", dtstart=START, byweekday=[MO(1), FR(-1)], byhour={8, 9}, wkst=FR),
    crontab(minute={0, 30}, hour=range(8, 18), day_of_week=frozenset({1, 5})),
    clocked(START),
    solar("sunset", 52.5, 13.4),
]


@pytest.mark.parametrize("when", SCHEDULES, ids=str)
@pytest.mark.parametrize("enabled", [True, False])
def test_every_definition_that_we_write_agrees_with_the_schema(app, when, enabled):
    options = {"queue": "q", "countdown": 5, "headers": {"a": 1}}
    entry = Entry("e", "t", when, [1, START], {"x": None}, options=options, enabled=enabled, app=app)

    DEFINITION.validate(json.loads(entry.encode()))


INTERVAL = {"__type__": "interval", "every": 5}
LEAST = {"task": "t", "schedule": INTERVAL}
SUNSET = {"__type__": "solar", "event": "sunset", "lat": 52.5, "lon": 13.4}
RULE = {"__type__": "rrule", "freq": "MONTHLY", "dtstart": 1767225600}


@pytest.mark.parametrize(
    "definition",
    [
        LEAST,
        {**LEAST, "args": None, "kwargs": None, "options": None, "enabled": None, "name": None},
        {**LEAST, "enabled": 1, "note": "unknown names are ignored"},
        {**LEAST, "schedule": 5},
        {**LEAST, "schedule": 0.5},
        {**LEAST, "schedule": {"__type__": "crontab"}},
        {**LEAST, "schedule": {"__type__": "crontab", "minute": 5, "hour": [1, 2], "day_of_week": None}},
        {**LEAST, "schedule": {"__type__": "rrule", "freq": 3, "dtstart": 1767225600}},
        *({**LEAST, "schedule": {**RULE, "byweekday": day}} for day in ("-1SU", ["mo", 4, {"weekday": 2, "n": None}])),
        {**LEAST, "schedule": {**RULE, "dtstart_tz": "Europe/Berlin", "until": None, "bymonth": [3, 10], "wkst": "SU"}},
        {**LEAST, "schedule": {"__type__": "clocked", "instant": "2026-12-01 09:00+01:00"}},
        {**LEAST, "schedule": {"__type__": "solar", "event": "dawn_civil", "lat": -33, "lon": 151.2}},
    ],
    ids=str,
)
def test_a_definition_that_its_schema_takes_is_understood(definition):
    DEFINITION.validate(definition)

    assert decode_definition(json.dumps(definition), {})["task"] == "t"


@pytest.mark.parametrize(
    "definition",
    [
        {},
        [],
        "task",
        {"task": "t"},
        {"schedule": INTERVAL},
        *({**LEAST, "task": value} for value in ("", None, 7)),
        *({**LEAST, "schedule": value} for value in (None, "5", True, 0, -1, [], {}, {"every": 5})),
        *({**LEAST, "schedule": {**INTERVAL, "every": value}} for value in (0, -1, None, "x", [])),
        {**LEAST, "schedule": {"__type__": "interval"}},
        {**LEAST, "schedule": {"__type__": "sundial"}},
        *({**LEAST, "schedule": {"__type__": "crontab", "minute": value}} for value in ("", -1, 1.5)),
        *({**LEAST, "schedule": {"__type__": "rrule", **parts, "dtstart": 0}} for parts in ({}, {"freq": None})),
        *({**LEAST, "schedule": {**RULE, "freq": value}} for value in (7, "FORTNIGHTLY", 1.5)),
        *(
            {**LEAST, "schedule": {**RULE, "byweekday": [value]}}
            for value in (7, "XX", "0MO", {"weekday": 9}, {"n": 1})
        ),
        {**LEAST, "schedule": {**RULE, "byhour": ["nine"]}},
        *(
            {**LEAST, "schedule": {"__type__": "clocked", "instant": at}}
            for at in ("2026-12-01T09:00", 1780000000, None)
        ),
        {**LEAST, "schedule": {"__type__": "clocked"}},
        *({**LEAST, "schedule": {**SUNSET, **wrong}} for wrong in ({"event": "dusk"}, {"lat": 91}, {"lon": None})),
        *({**LEAST, "enabled": value} for value in ("yes", "", 2, [])),
        {**LEAST, "args": {}},
        {**LEAST, "args": "ab"},
        {**LEAST, "kwargs": []},
        {**LEAST, "options": []},
        {**LEAST, "options": {"headers": []}},
        *({**LEAST, "options": {"headers": {name: "x"}}} for name in ("task", "stamps", "compression", "singlebeat")),
        *({**LEAST, "options": {name: "x"}} for name in ("content_type", "result_cls", "args")),
    ],
    ids=str,
)
def test_a_definition_that_its_schema_refuses_is_refused(definition):
    assert not DEFINITION.is_valid(definition)
    with pytest.raises(EntryError):
        decode_definition(json.dumps(definition), {})


def examples() -> list[tuple[str, Any]]:
    """Return every definition, policy and schedule in JSON that the docs show."""
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    found: list[tuple[str, Any]] = []
    for line in text.splitlines():
        command, _, _ = line.strip().removeprefix("> ").partition("   #")
        if re.match(r"HSET \S+ (definition|policy) ", command):
            words = shlex.split(command)[2:]
            found += [(field, json.loads(text)) for field, text in zip(words[::2], words[1::2], strict=True)]
        elif line.strip().startswith('{"__type__"'):
            found.append(("definition", {"task": "t", "schedule": json.loads(line.partition(" //")[0])}))
        elif line.strip().startswith('[{"__type__"'):
            args = json.loads(line.partition(" //")[0])
            found.append(("definition", {"task": "t", "args": args, "schedule": {"__type__": "interval", "every": 5}}))
    return found


def test_the_schema_knows_the_headers_that_celery_sets(app):
    options = DEFINITION.schema["properties"]["options"]
    named = set(options["properties"]["headers"]["propertyNames"]["not"]["enum"])

    assert set(app.amqp.as_task_v2("id", "t").headers) <= named <= TAKEN_HEADERS
    assert set(options["propertyNames"]["not"]["enum"]) == TAKEN_OPTIONS


EXAMPLES = examples()


def test_the_docs_have_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize(("field", "raw"), EXAMPLES, ids=[json.dumps(raw)[:60] for _, raw in EXAMPLES])
def test_every_example_in_the_docs_agrees_with_its_schema_and_is_read(field, raw):
    {"definition": DEFINITION, "policy": POLICY}[field].validate(raw)

    assert decode_definition(json.dumps(raw), {}) if field == "definition" else EntryPolicy.decode(json.dumps(raw))


@pytest.mark.parametrize("kind", ["interval", "crontab", "rrule", "solar", "clocked", "given"])
def test_the_examples_in_the_schema_agree_with_it(kind):
    for example in DEFINITION.schema["$defs"][kind]["examples"]:
        DEFINITION.validate({"task": "t", "schedule": example})


def test_the_examples_of_instants_agree_with_the_schema():
    for name, example in product(("start_time", "end_time"), POLICY.schema["$defs"]["instant"]["examples"]):
        POLICY.validate({name: example})


def test_every_field_of_a_policy_has_a_typed_option():
    assert PolicyOptions.__annotations__.keys() == EntryPolicy.names()
