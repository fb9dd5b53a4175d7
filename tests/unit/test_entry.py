"""Entries as others write them: what is understood, what is refused and why, and what we write ourselves."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from dateutil.rrule import FR, MO
from kombu.utils import json as kombu_json
from redbeat.decoder import RedBeatJSONDecoder
from redbeat.schedules import rrule

from singlebeat import Entry
from singlebeat.beat.entries.definition import MOST_NESTED, salvage_fields
from singlebeat.beat.entries.entry import PARKED, Meta
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.errors import EntryError

INTERVAL = {"__type__": "interval", "every": 60}
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(scope="module")
def app() -> Celery:
    app = Celery(set_as_current=False)
    app.conf.redbeat_redis_url = "redis://127.0.0.1:1"  # no server is there: nothing here connects
    return app


def decode(app: Celery, text: str | None = None, *, key: str = "redbeat:e", **fields: object) -> Entry:
    """Decode a definition of the least that is needed and the given fields, or a raw text."""
    definition = json.dumps({"task": "t", "schedule": INTERVAL, **fields}) if text is None else text
    return Entry.decode(key, definition, app)


def schedule_of(app: Celery, **fields: object) -> object:
    return decode(app, schedule=fields).schedule


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("by_place", [True, False])
@pytest.mark.parametrize("wrong", ["* * * * *", {"minute": 0}, True, float("nan"), float("inf"), 10**20], ids=repr)
def test_a_schedule_that_is_none_is_refused_with_its_value(app, wrong, by_place):
    with pytest.raises(EntryError, match=r"entry 'e': schedule must be a schedule or a number of seconds, not "):
        Entry("e", "t", wrong, app=app) if by_place else Entry(name="e", task="t", schedule=wrong, app=app)


@pytest.mark.parametrize("field", ["kwargs", "options"])
def test_fields_that_are_no_dicts_are_refused(app, field):
    with pytest.raises(EntryError, match=f"entry 'e': {field} must be a dict, not str"):
        Entry("e", "t", 60, app=app, **{field: "x"})


def test_a_field_that_no_entry_has_is_refused_with_the_nearest(app):
    with pytest.raises(EntryError, match=r"entry 'e': there is no field overlp; did you mean overlap\?"):
        Entry("e", "t", 60, app=app, overlp="skip")


def test_a_task_and_a_schedule_are_enough(app):
    entry = decode(app)

    assert (entry.name, entry.task, entry.schedule) == ("e", "t", schedule(60))
    assert (entry.args, entry.kwargs, entry.options, entry.enabled) == ([], {}, {}, True)
    assert entry.schedule.relative is False
    assert entry.app is app


@pytest.mark.parametrize("name", ["name", "args", "kwargs", "options", "enabled"])
def test_null_means_the_default(app, name):
    entry = decode(app, **{name: None})

    assert (entry.name, entry.args, entry.kwargs, entry.options, entry.enabled) == ("e", [], {}, {}, True)


def test_given_fields_are_kept(app):
    entry = decode(app, args=[1, "a"], kwargs={"x": None}, options={"queue": "q"}, enabled=False)

    assert (entry.args, entry.kwargs, entry.options) == ([1, "a"], {"x": None}, {"queue": "q"})
    assert entry.enabled is False


@pytest.mark.parametrize(("written", "enabled"), [(1, True), (0, False), (True, True), (False, False)])
def test_enabled_may_be_a_number(app, written, enabled):
    assert decode(app, enabled=written).enabled is enabled


def test_unknown_fields_are_left_alone_and_named(app):
    entry = decode(app, description="of mine", arg=["you"])

    assert entry.task == "t"
    assert entry.ignored == (
        "the definition's field 'description' is unknown and ignored; "
        "the definition's field 'arg' is unknown and ignored: did you mean 'args'?"
    )
    assert decode(app, name="e", relative=False, last_run_at=None, total_run_count=3).ignored == ""


def test_the_key_is_the_identity_beside_any_name(app):
    entry = decode(app, key="redbeat:real", name="other")

    assert (entry.name, entry.key) == ("real", "redbeat:real")


def test_a_prefix_without_a_colon_is_taken_off(app):
    app = Celery(set_as_current=False)
    app.conf.update(redbeat_redis_url="redis://127.0.0.1:1", redbeat_key_prefix="beats")

    entry = decode(app, key="beatsmine")

    assert (entry.name, entry.key) == ("mine", "beatsmine")


@pytest.mark.parametrize("every", [30, 30.0, "30", "30.0", " 30 "])
def test_an_interval_may_be_any_spelling_of_a_number(app, every):
    assert schedule_of(app, __type__="interval", every=every) == schedule(30)


@pytest.mark.parametrize("relative", [True, False, 1, 0, None])
def test_relative_is_kept_and_may_be_missing(app, relative):
    assert schedule_of(app, __type__="interval", every=30, relative=relative).relative is bool(relative)


def test_a_schedule_may_be_a_bare_number_of_seconds(app):
    assert decode(app, schedule=90).schedule == schedule(90)
    assert decode(app, schedule=0.5).schedule == schedule(0.5)


def test_crontab_fields_may_be_strings_numbers_lists_or_missing(app):
    found = schedule_of(app, __type__="crontab", minute=5, hour="*/6", day_of_month=[1, 15], day_of_week=None)

    assert found == crontab(minute=5, hour="*/6", day_of_month=[1, 15])


def test_brackets_around_a_crontab_range_are_understood(app):
    found = schedule_of(app, __type__="crontab", minute="0", hour="[8-10]", month_of_year=" [1-12] ")

    assert found == crontab(minute="0", hour="8-10", month_of_year="1-12")


@pytest.mark.parametrize(
    ("when", "why"),
    [
        (
            {"__type__": "crontab", "minutes": "0", "hours": "9"},
            r"the crontab has 'hours', 'minutes': its fields are minute",
        ),
        ({"__type__": "crontab", "minute": "3", "timezone": "UTC"}, "the crontab has 'timezone'"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": 1, "byhours": 9}, "the rrule has 'byhours': .*byhour"),
    ],
    ids=["crontab", "crontab with a zone", "rrule"],
)
def test_a_misspelled_field_of_a_schedule_is_refused_by_name(app, when, why):
    with pytest.raises(EntryError, match=why):
        decode(app, schedule=when)


def test_a_rule_may_have_weekdays_and_no_time_zone(app):
    days = [{"__type__": "weekday", "wkday": 0}, {"__type__": "weekday", "wkday": 4}]

    found = schedule_of(app, __type__="rrule", freq="WEEKLY", dtstart=1_700_000_000, byweekday=days)

    assert isinstance(found, rrule)
    assert found.dtstart == datetime.fromtimestamp(1_700_000_000, UTC)
    assert list(found.byweekday) == [MO, FR]


def test_types_in_arguments_are_read_as_redbeat_reads_them(app):
    moment = {"__type__": "datetime", "year": 2024, "month": 2, "day": 29, "timezone": 3600}
    mine = {"__type__": "money", "amount": 3}

    entry = decode(app, args=[moment, mine])

    assert entry.args == [datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=1))), mine]


# ---------------------------------------------------------------- the past


@pytest.mark.parametrize("text", [None, "", "{}", '{"last_run_at": null}'])
def test_an_entry_without_meta_has_never_run(text):
    assert Meta.decode(text) == Meta(None, 0)


@pytest.mark.parametrize(
    "text",
    [
        "2024-10-27T01:30:00Z",
        "2024-10-27T01:30:00",
        "2024-10-27 01:30",
        "2024-10-27T03:30:00+02:00",
        "20241027T013000Z",
    ],
)
def test_last_run_at_may_be_iso_8601(text):
    meta = Meta.decode(json.dumps({"last_run_at": text, "total_run_count": 7}))

    assert meta == Meta(datetime(2024, 10, 27, 1, 30, tzinfo=UTC), 7)
    assert meta.last_run_at.tzinfo is UTC


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"timezone": "UTC", "second": 0, "microsecond": 0},
        {"timezone": 7200, "hour": 3},
        {"timezone": "Asia/Tokyo", "hour": 10},
    ],
)
def test_last_run_at_may_lack_its_zone_seconds_and_microseconds(fields):
    raw = {"__type__": "datetime", "year": 2024, "month": 7, "day": 1, "hour": 1, "minute": 30, **fields}

    assert Meta.decode(json.dumps({"last_run_at": raw})).last_run_at == datetime(2024, 7, 1, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize(("written", "read"), [(3, 3), (3.0, 3), (None, 0), ("many", 0)])
def test_a_run_count_that_is_no_number_is_zero(written, read):
    assert Meta.decode(json.dumps({"total_run_count": written})).total_run_count == read


def test_from_when_on_it_counts_is_kept_apart_from_meta_and_read_in_it_too():
    past = Meta(datetime(2024, 1, 2, tzinfo=UTC), 7, datetime(2024, 1, 3, 4, 5, 6, 7, tzinfo=UTC))
    never = Meta(None, 0, past.since)
    in_meta = json.dumps({"last_run_at": "2024-01-02", "total_run_count": 7, "since": past.since.isoformat()})

    assert set(json.loads(past.encode())) == set(json.loads(never.encode())) == {"last_run_at", "total_run_count"}
    assert [Meta.decode(each.encode(), each.encode_since()) for each in (past, never)] == [past, never]
    assert Meta.decode(in_meta) == past
    assert Meta(past.last_run_at).encode_since() == ""


def test_from_when_on_it_counts_holds_for_the_last_run_that_it_names_only():
    moment = datetime(2024, 1, 2, tzinfo=UTC)
    later = Meta(moment + timedelta(hours=1), 8)

    assert Meta.decode(later.encode(), Meta(moment, 7, moment).encode_since()) == later
    assert Meta.decode("", Meta(None, 0, moment).encode_since()) == Meta()


@pytest.mark.parametrize("text", ["{", "[]", '{"since": 5}', '{"last_run_at": "yesterday"}'])
def test_a_broken_field_since_is_an_error_that_names_it(text):
    with pytest.raises(EntryError, match=r"^since"):
        Meta.decode(Meta().encode(), text)


def test_unknown_fields_of_meta_are_left_alone():
    assert Meta.decode('{"last_status": "ok", "total_run_count": 2}') == Meta(None, 2)


def test_letters_beyond_ascii_do_not_make_an_entry_too_long(app):
    """Others write them as they are; RedBeat and we escape them."""
    text = "Ж" * 200_000
    stored = json.dumps({"task": "t", "schedule": INTERVAL, "args": [text]}, ensure_ascii=False)

    entry = Entry.decode("e", stored, app)

    assert Entry.decode("e", entry.encode(), app).args == [text]
    assert "\\u0416" in Entry("e", "t", schedule(60), ["Ж"], app=app).encode()
    with pytest.raises(EntryError, match="more than 1000000"):
        Entry.decode("e", Entry("e", "t", schedule(60), [text + "\ud800"], app=app).encode(), app)


VALUES = [
    date(2026, 1, 2),
    time(3, 4, 5),
    datetime(2026, 1, 2, 3, 4),  # noqa: DTZ001 - so it reaches its task
    Decimal("1.50"),
    UUID(int=7),
    b"abc",
    b"\xff",
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_an_argument_reaches_its_task_as_it_does_from_plain_beat(app, value):
    """RedBeat passes it on unread in the form that is stored, but for a datetime."""
    deep = {"in": [value]}

    stored = Entry("e", "t", schedule(60), [value], {"deep": deep}, app=app).encode()

    assert kombu_json.loads(stored)["args"] == [value]
    entry = Entry.decode("e", stored, app)
    assert (entry.args, entry.kwargs) == ([value], {"deep": deep})
    assert type(entry.args[0]) is type(value)
    assert getattr(entry.args[0], "tzinfo", None) is None
    assert entry.encode() == stored
    if not isinstance(value, datetime):
        assert json.loads(stored, cls=RedBeatJSONDecoder)["args"] == json.loads(stored)["args"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"__type__": "model", "__value__": 1, "id": 2}, True),
        ({"__type__": "timedelta", "__value__": 5}, False),
        ({"__type__": ["x"], "__value__": 5}, False),
        ({"__type__": "date", "__value__": "2026-01-01", "more": 1}, True),
        ({"__type__": "date", "__value__": "soon"}, False),
        ({"__type__": "uuid", "__value__": []}, False),
    ],
    ids=str,
)
def test_a_value_that_no_worker_could_read_is_refused(app, written, read):
    stored = json.dumps({"task": "t", "schedule": {"__type__": "interval", "every": 60}, "args": [written]})

    if read:
        assert Entry.decode("e", stored, app).args == [written]
    else:
        with pytest.raises(EntryError, match=r"'args.0' has the __type__ .*, which its other fields do not fit"):
            Entry.decode("e", stored, app)


@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_in_the_repeated_hour_survives_in_an_argument(app, fold):
    moment = datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold)

    entry = Entry.decode("e", Entry("e", "t", schedule(60), args=[moment], app=app).encode(), app)

    assert entry.args[0].astimezone(UTC) == moment.astimezone(UTC)
    assert kombu_json.dumps(entry.args[0]) == kombu_json.dumps(moment), "as in a message, and so in the key of a lock"


@pytest.mark.parametrize("fold", [0, 1])
def test_the_repeated_hour_survives_a_round_trip(app, fold):
    moment = datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold)
    entry = Entry("e", "t", schedule(60), app=app, last_run_at=moment)

    text = entry.meta.encode()

    assert Meta.decode(text).last_run_at == moment.astimezone(UTC)
    assert json.loads(text)["last_run_at"]["timezone"] in ("UTC", 0)


def test_meta_is_written_with_redbeats_fields_only():
    written = json.loads(Meta(datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC), 9).encode())

    moment = {
        "year": 2024,
        "month": 1,
        "day": 2,
        "hour": 3,
        "minute": 4,
        "second": 5,
        "microsecond": 6,
        "timezone": "UTC",
    }
    assert written == {"last_run_at": {"__type__": "datetime", **moment}, "total_run_count": 9}


# ---------------------------------------------------------------- what is refused, and why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "definition cannot be read: JSONDecodeError"),
        ('{"task": "t", ', "definition cannot be read: JSONDecodeError"),
        ("[]", "definition is not a JSON object"),
        ("null", "definition is not a JSON object"),
        ("3", "definition is not a JSON object"),
        ("[" * 200_000, "definition is nested too deeply"),
        ('{"a":' * 200_000, "definition is nested too deeply"),
    ],
)
def test_a_string_that_is_no_definition_is_refused(app, text, why):
    with pytest.raises(EntryError, match=why):
        decode(app, text)


def nested(depth: int) -> list[Any]:
    """Return a list with arrays in one another."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("wrap", [lambda deep: {"args": deep}, lambda deep: {"options": {"headers": {"a": deep}}}])
@pytest.mark.parametrize("depth", [MOST_NESTED, 900])
def test_a_definition_is_refused_before_it_is_too_deep_for_a_worker(app, wrap, depth):
    """A worker cannot pickle it for its processes, and ends."""
    use = f"definition is nested too deeply: use at most {MOST_NESTED} arrays and objects in one another"

    with pytest.raises(EntryError, match=use):
        decode(app, **wrap(nested(depth)))
    fields, problems = salvage_fields(json.dumps({"task": "t", **wrap(nested(depth))}), {})

    assert fields["task"] == "t"
    assert use in problems[next(iter(wrap([])))]


def test_a_definition_may_be_wide_and_as_deep_as_said(app):
    wide = [[], {}] * MOST_NESTED

    assert decode(app, args=nested(MOST_NESTED - 1)).args == nested(MOST_NESTED - 1)
    assert decode(app, args=wide).args == wide


def test_an_entry_that_is_too_deep_for_json_is_refused_as_such(app):
    deep = Entry("deep", "t", 60, args=nested(5000), app=app)

    with pytest.raises(EntryError, match="definition is nested too deeply: use"):
        deep.check_stored(deep.encode(), datetime.now(UTC))  # newer Pythons encode it


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"task": None}, "has no task"),
        ({"task": ""}, "has no task"),
        ({"task": 3}, "has no task"),
        ({"task": "shop.\ud800"}, r"there can be no task 'shop.\\ud800': half of a surrogate pair cannot be encoded"),
        ({"args": "abc"}, "args is not a JSON array"),
        ({"args": {"x": 1}}, "args is not a JSON array"),
        ({"kwargs": [1]}, "kwargs is not a JSON object"),
        ({"options": "q"}, "options is not a JSON object"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(app, fields, why):
    with pytest.raises(EntryError, match=why):
        decode(app, **fields)


#: A signature of the least that Celery can always send.
SIGNATURE: Mapping[str, Any] = {"task": "t", "args": [], "kwargs": {}, "options": {}}

#: Options with values at which a worker, or Celery's way to it, fails.
UNUSABLE_OPTIONS = [
    *(("time_limit", value) for value in ("five", "300", True, -1, [1], {"a": 1})),
    *(
        (option, value)
        for option in ("soft_time_limit", "timeout", "confirm_timeout")
        for value in ("five", "300", True, -1, [1], {"a": 1})
    ),
    *((name, float(value)) for name in ("time_limit", "countdown", "expires") for value in ("inf", "nan")),
    ("time_limit", 10**400),
    *(("countdown", value) for value in ("5", True, [1], 1e18)),
    *(("eta", value) for value in (0, False, 5, "", "soon", [], {})),
    *(("expires", value) for value in ("", "60", "soon", [], {}, 1e18)),
    *(("delivery_mode", value) for value in ("x", 1.5, 300, [1], {"a": 1})),
    *(
        (name, value)
        for name in ("queue", "exchange", "routing_key", "shadow", "serializer")
        for value in (5, {"a": 1}, ["q"], True, "half of a pair: \ud800")
    ),
    *(("stamped_headers", value) for value in (5, "name", [1], ["x", "x"])),
    *(("link", value) for value in ("t", ["t"], {}, 5, [None], {"task": "t"}, [{**SIGNATURE, "task": None}])),
    *(("link", {**SIGNATURE, name: value}) for name in ("args", "kwargs", "options") for value in ("x", 5)),
    *(("link", {**SIGNATURE, name: None}) for name in ("args", "options")),
    *(("link", [SIGNATURE, {**SIGNATURE, name: None}]) for name in ("args", "kwargs", "options")),
    ("link", [SIGNATURE, {**SIGNATURE, "args": None, "immutable": True}]),
    ("link", {"task": "celery.chain", "subtask_type": "chain", "options": {}}),
    *(("chain", value) for value in ("t", ["t"], SIGNATURE, [3], [{"task": "t"}], [{"task": "t", "args": []}])),
]


@pytest.mark.parametrize(("name", "value"), UNUSABLE_OPTIONS)
def test_an_option_that_a_worker_cannot_read_is_refused(app, name, value):
    with pytest.raises(EntryError, match=f"definition: the option {name} is .*: use "):
        decode(app, options={name: value})


@pytest.mark.parametrize("options", [{"link": [{"task": "t"}]}, {"chain": ["t"]}, {"shadow": 5}], ids=str)
def test_an_option_of_a_linked_signature_is_checked_as_that_of_the_entry(app, options):
    with pytest.raises(EntryError, match=r"definition: the option (link|chain|shadow) is .*: use "):
        decode(app, options={"link": {**SIGNATURE, "options": options}})


@pytest.mark.parametrize(
    "options",
    [
        {"task_id": {"a": 1}},
        {"root_id": ["a"]},
        {"retries": "1"},
        {"headers": {"id": {"a": 1}}},
        {"headers": {"task": "x"}},
    ],
    ids=str,
)
def test_what_a_worker_cannot_read_of_a_link_is_refused(app, options):
    """Else each worker that gets the message ends."""
    with pytest.raises(EntryError, match="definition: the option"):
        decode(app, options={"link": [{**SIGNATURE, "options": options}]})


@pytest.mark.parametrize("where", ["the message", "a link"])
def test_a_stamped_header_without_a_value_is_refused(app, where):
    """Celery fails with a KeyError: in beat for the message itself, in the worker after the run for its link."""

    def stamped(**options):
        return options if where == "the message" else {"link": {**SIGNATURE, "options": options}}

    decode(app, options=stamped(stamped_headers=["x", "y"], x="1", y=None))

    with pytest.raises(EntryError, match="stamped_headers names 'y', which has no value: add the option 'y'"):
        decode(app, options=stamped(stamped_headers=["x", "y"], x="1"))


@pytest.mark.parametrize("option", ["link", "link_error", "chain", "chord"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda bad: [bad],
        lambda bad: [SIGNATURE, bad],
        lambda bad: [{**SIGNATURE, "options": {"link": [bad]}}],
        lambda bad: [{"task": "celery.group", "subtask_type": "group", "kwargs": {"tasks": [bad]}, "options": {}}],
        lambda bad: [
            {"task": "celery.chord", "subtask_type": "chord", "kwargs": {"header": [], "body": bad}, "options": {}}
        ],
    ],
    ids=["itself", "in a list", "nested", "in a group", "as the body of a chord"],
)
def test_an_option_of_a_signature_that_a_worker_cannot_read_is_refused(app, option, wrap):
    decode(app, options={option: wrap({**SIGNATURE, "options": {"time_limit": 5, "eta": None}})})

    with pytest.raises(EntryError, match="the option time_limit is 'five'"):
        decode(app, options={option: wrap({**SIGNATURE, "options": {"time_limit": "five"}})})


def test_a_further_field_of_a_chord_is_checked_as_its_option(app):
    """Celery makes options of such fields."""
    fields = {"subtask_type": "chord", "kwargs": {"header": [], "body": SIGNATURE}, "options": {}}

    with pytest.raises(EntryError, match="the option time_limit is 'five'"):
        decode(
            app,
            options={
                "link": [
                    {"task": "celery.chord", **fields, "link": {**SIGNATURE, "time_limit": 5}, "time_limit": "five"}
                ]
            },
        )


def test_a_signature_in_the_arguments_of_a_task_of_celery_is_checked_too(app):
    bad = {"task": "t", "options": {"eta": 0}}

    with pytest.raises(EntryError, match="the option eta is 0"):
        decode(app, task="celery.map", kwargs={"task": bad, "it": [1]})
    with pytest.raises(EntryError, match="the option eta is 0"):
        decode(app, task="celery.chord", kwargs={"header": [], "body": SIGNATURE, "eta": 0})
    assert decode(app, task="mine", kwargs={"task": bad}).kwargs == {"task": bad}


@pytest.mark.parametrize(
    "options",
    [
        {"time_limit": 300, "soft_time_limit": 2.5},
        {"time_limit": None, "soft_time_limit": 0},
        {"countdown": -5, "expires": 60.5},
        {"delivery_mode": 2},
        {"delivery_mode": "transient"},
        {"eta": "2030-01-01T00:00:00+00:00", "expires": "2030-01-02 00:00"},
        {"link": SIGNATURE, "link_error": "the name of a task", "chain": []},
        {"link": [SIGNATURE, SIGNATURE], "link_error": None, "chain": [SIGNATURE, {**SIGNATURE, "kwargs": None}]},
        {"link": [{"task": "t", "immutable": True, "options": {}}]},
        {"link": {"task": "celery.group", "subtask_type": "group", "kwargs": {"tasks": []}, "options": {}}},
        {"queue": "slow", "exchange": "", "routing_key": None, "stamped_headers": ["group"], "group": "a"},
        {"shadow": "another name", "serializer": "json"},
        {"shadow": None, "serializer": None},
    ],
    ids=str,
)
def test_options_that_a_worker_can_read_are_kept(app, options):
    assert decode(app, options=options).options == options


@pytest.mark.parametrize(
    "when", [None, True, [], "every day", {}, {"every": 3}, {"__type__": "lunar", "event": "dawn"}, {"__type__": 3}]
)
def test_a_schedule_of_no_known_kind_is_refused_and_shown(app, when):
    with pytest.raises(EntryError, match="a schedule of no known kind: ") as caught:
        decode(app, schedule=when)

    shown = [when.get("__type__")] if isinstance(when, dict) and isinstance(when.get("__type__"), str) else when
    assert all(repr(each) in str(caught.value) for each in (shown if isinstance(shown, dict | list) else [shown]))


def test_a_value_that_may_hold_a_secret_is_in_no_error(app):
    for wrong in (
        {"schedule": {"__type__": "lunar", "password": "s3cret"}},
        {"options": {"countdown": {"a": "s3cret"}}},
    ):
        with pytest.raises(EntryError) as caught:
            decode(app, **wrong)
        assert "s3cret" not in str(caught.value)


def test_a_value_of_a_type_that_the_app_has_registered_is_left_as_it_is(app, monkeypatch):
    monkeypatch.setitem(kombu_json._decoders, "model", str)
    data = {"__type__": "model", "__value__": 1}

    assert decode(app, args=[data]).args == [data]


@pytest.mark.parametrize(
    "data",
    [
        {"__type__": "interval", "every": "any"},
        {"__type__": "crontab"},
        {"__type__": "rrule", "freq": [{"__type__": "weekday", "wkday": 1}]},
        {"__type__": "given"},
    ],
    ids=lambda each: each["__type__"],
)
def test_arguments_that_look_like_a_schedule_are_data(app, data):
    """As for a task that stores entries."""
    entry = decode(app, args=[[data]], kwargs={"a": {"b": data}}, options={"headers": {"x": data}})

    assert (entry.args, entry.kwargs, entry.options) == ([[data]], {"a": {"b": data}}, {"headers": {"x": data}})
    assert json.loads(entry.encode())["args"] == [[data]]


@pytest.mark.parametrize("what", [schedule(60), crontab(), MO], ids=repr)
def test_a_schedule_among_the_arguments_cannot_be_stored(app, what):
    with pytest.raises(EntryError, match=r"entry 'e' cannot be stored: Object of type .* is not JSON serializable"):
        Entry("e", "t", schedule(60), [what], app=app).encode()


SECRETS = [
    {"__type__": "date", "__value__": "s3cret"},
    {"__type__": "uuid", "__value__": {"hex": "s3cret"}},
    {"__type__": "decimal", "__value__": "s3cret"},
    {"__type__": "base64", "__value__": "s3cret"},
    {"__type__": "datetime", "year": 2024, "month": 1, "day": 1, "timezone": "s3cret"},
    {"__type__": "datetime", "year": "s3cret"},
]


@pytest.mark.parametrize("secret", SECRETS, ids=lambda each: each["__type__"])
@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda secret: {"args": ["ann", secret]}, "args.1"),
        (lambda secret: {"kwargs": {"more": [{"password": secret}]}}, "kwargs.more.0.password"),
        (lambda secret: {"options": {"headers": {"x": secret}}}, "options.headers.x"),
        (lambda secret: {"kwarg": {"password": secret}}, "kwarg.password"),
    ],
    ids=["args", "kwargs", "options", "misspelled"],
)
def test_arguments_that_cannot_be_decoded_are_named_and_not_quoted(app, secret, wrap, where):
    with pytest.raises(EntryError) as caught:
        decode(app, **wrap(secret))

    assert f"'{where}' has the __type__ '{secret['__type__']}'" in str(caught.value)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
    _, problems = salvage_fields(json.dumps({"task": "t", **wrap(secret)}), {})
    assert "s3cret" not in str(problems)


@pytest.mark.parametrize(
    "text",
    [
        '{"task": "t", "kwargs": {"p": {"__type__": "datetime", "year": "s3cret"}}, "kwargs": {}}',
        '{"__type__": "datetime", "year": "s3cret", "kwargs": {}}',
        '{"schedule": %s, "kwargs": {"p": {"__type__": "datetime", "year": "s3cret"}}}' % ("[" * 300 + "]" * 300),
    ],
    ids=["given twice", "whole", "deep"],
)
def test_no_other_way_to_write_it_quotes_such_an_argument(app, text):
    with pytest.raises(EntryError, match="definition cannot be read: ") as caught:
        decode(app, text)

    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {f"field {number}": number for number in range(100_000)},
        {"x" * 5_000_000: 1},
        {"schedule": {"__type__": "crontab", **{f"field {number}": number for number in range(100_000)}}},
        {"schedule": {"__type__": "crontab", "minute": "5" * 5_000_000}},
        {"schedule": {"__type__": "x" * 5_000_000}},
        {"schedule": {"__type__": "given", "class": "x" * 5_000_000}},
        {"schedule": {"__type__": "clocked", "instant": "x" * 5_000_000}},
    ],
    ids=["many fields", "long field", "many of crontab", "long minute", "long kind", "long class", "long instant"],
)
def test_what_is_said_of_a_huge_definition_is_short(app, fields):
    try:
        said = decode(app, **fields).ignored
    except EntryError as exc:
        said = str(exc)

    assert 0 < len(said) < 1000


@pytest.mark.parametrize("wrong", ["x" * 5_000_000, {"a": ["x" * 5_000_000]}], ids=["string", "object"])
@pytest.mark.parametrize(
    "decode_text",
    [
        lambda wrong: EntryPolicy.decode(json.dumps({"jitter": wrong})),
        lambda wrong: EntryPolicy.decode(json.dumps({str(wrong): 1})),
        lambda wrong: Meta.decode(json.dumps({"last_run_at": wrong})),
        lambda wrong: Meta.decode("{}", json.dumps({"last_run_at": wrong})),
    ],
    ids=["option", "name", "meta", "since"],
)
def test_what_is_said_of_a_huge_policy_or_past_is_short(decode_text, wrong):
    with pytest.raises(EntryError) as caught:
        decode_text(wrong)

    assert len(str(caught.value)) < 500


def test_very_many_unknown_fields_are_counted(app):
    entry = decode(app, **{f"field {number}": number for number in range(40_000)})

    assert "'field 4' is unknown and ignored" in entry.ignored
    assert entry.ignored.endswith("; 39,995 more are unknown and ignored")


@pytest.mark.parametrize("every", [0, -5, "-5", 0.0])
def test_an_interval_must_be_longer_than_nothing(app, every):
    with pytest.raises(EntryError, match="not longer than 0 seconds"):
        decode(app, schedule={"__type__": "interval", "every": every})


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_bare_number_of_seconds_must_be_more_than_nothing(app, seconds):
    with pytest.raises(EntryError, match="not longer than 0 seconds"):
        decode(app, schedule=seconds)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 10**400, 1e30], ids=["inf", "nan", "10**400", "1e30"])
def test_a_bare_number_of_seconds_must_fit_into_the_calendar(app, seconds):
    with pytest.raises(EntryError):
        decode(app, schedule=seconds)


@pytest.mark.parametrize(
    ("when", "why"),
    [
        ({"__type__": "interval"}, "every"),
        ({"__type__": "interval", "every": None}, "every is None: use a number of seconds"),
        ({"__type__": "interval", "every": "soon"}, "every is 'soon': use a number of seconds"),
        ({"__type__": "interval", "every": [1]}, "every is an array: use a number of seconds"),
        ({"__type__": "interval", "every": float("inf")}, "every is inf: use a number of seconds"),
        ({"__type__": "interval", "every": float("nan")}, "every is nan: use a number of seconds"),
        ({"__type__": "interval", "every": 1e14}, "up to 86,399,999,999,999"),
        (float("inf"), "the schedule is inf: use a number of seconds, up to 86,399,999,999,999"),
        (10**400, "the schedule is 10000.*: use a number of seconds"),
        ({"__type__": "crontab", "hour": "25"}, "25"),
        (
            {"__type__": "crontab", "day_of_week": "1-7"},
            r"day_of_week is '1-7': Invalid end range: 7 > 6\. Sunday is 0, not 7\.",
        ),
        ({"__type__": "crontab", "day_of_week": 7}, r"'7' was found\. Sunday is 0, not 7\."),
        ({"__type__": "crontab", "day_of_week": "17"}, r"17 > 6\.$"),
        ({"__type__": "crontab", "minute": "x"}, "minute is 'x': "),
        ({"__type__": "crontab", "hour": "1,"}, "hour is '1,': empty part"),
        ({"__type__": "crontab", "hour": {"a": 1}}, "TypeError|ValueError|Parse"),
        ({"__type__": "crontab", "hour": 4.5}, r"ValueError: hour is 4\.5: "),
        ({"__type__": "crontab", "day_of_month": "[1-"}, "1-"),
        ({"__type__": "rrule"}, "freq"),
        ({"__type__": "rrule", "freq": "SOMETIMES"}, "definition has an invalid schedule: ValueError: an rrule needs"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": 1e30}, r"dtstart of an rrule is 1e\+30: use seconds since"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": float("nan")}, "dtstart of an rrule is nan"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": "x"}, "dtstart of an rrule is 'x'"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": 0, "until": 10**400}, "until of an rrule is 10000"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": 0, "dtstart_tz": 1e400}, "dtstart_tz of an rrule is inf"),
        ({"__type__": "rrule", "freq": "DAILY", "dtstart": 0, "dtstart_tz": "X"}, "dtstart_tz of an rrule is 'X'"),
        ({"__type__": "weekday", "wkday": 4}, "no known kind"),
        ({"__type__": "weekday", "wkday": 9}, "no known kind|cannot be read"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_reason(app, when, why):
    with pytest.raises(EntryError, match=why):
        decode(app, schedule=when)


@pytest.mark.parametrize(
    "fields",
    [
        {"month": 13},
        {"day": 31},
        {"year": 0},
        {"year": "2024"},
        {"month": None},
        {"timezone": "Mars/Olympus"},
        {"timezone": "../../etc/passwd"},
        {"timezone": 1e30},
        {"timezone": 90_000},
        {"timezone": []},
        {"fold": 1, "century": 21},
    ],
)
def test_an_impossible_date_is_refused(app, fields):
    moment = {"__type__": "datetime", "year": 2024, "month": 2, "day": 1, **fields}

    with pytest.raises(EntryError, match="definition cannot be read"):
        decode(app, args=[moment])
    with pytest.raises(EntryError, match="meta cannot be read"):
        Meta.decode(json.dumps({"last_run_at": moment}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "meta cannot be read"),
        ("[]", "meta is not a JSON object"),
        ('{"last_run_at": 1700000000}', "neither a datetime nor null"),
        ('{"last_run_at": "yesterday"}', "not an ISO 8601 date: 'yesterday'"),
        ("[" * 200_000, "meta is nested too deeply"),
    ],
)
def test_a_past_that_makes_no_sense_is_refused(text, why):
    with pytest.raises(EntryError, match=why):
        Meta.decode(text)


@pytest.mark.parametrize("count", ["NaN", "Infinity", "1e400"])
def test_a_run_count_beyond_numbers_is_an_entry_error_or_zero(count):
    try:
        meta = Meta.decode(f'{{"total_run_count": {count}}}')
    except EntryError:
        return
    assert meta.total_run_count == 0


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
def test_a_past_at_the_ends_of_the_calendar_is_an_entry_error(text):
    with pytest.raises(EntryError):
        Meta.decode(json.dumps({"last_run_at": text}))


def test_the_earliest_date_means_long_ago():
    # Writers in other languages say "never" so.
    assert Meta.decode('{"last_run_at": "0001-01-01T00:00:00Z"}').last_run_at == datetime(1, 1, 1, tzinfo=UTC)


# ---------------------------------------------------------------- what we write


def test_a_definition_is_written_with_redbeats_fields_only(app):
    entry = Entry("e", "t", schedule(60), args=[1], kwargs={"x": 2}, options={"queue": "q"}, enabled=False, app=app)

    assert json.loads(entry.encode()) == {
        "name": "e",
        "task": "t",
        "args": [1],
        "kwargs": {"x": 2},
        "options": {"queue": "q"},
        "schedule": {"__type__": "interval", "every": 60.0, "relative": False},
        "enabled": False,
    }


@pytest.mark.parametrize(
    "when",
    [
        schedule(0.25),
        schedule(timedelta(days=2), relative=True),
        crontab(minute=[0, 30], hour="*/4", day_of_week="mon-fri", day_of_month="1-7", month_of_year=1),
        rrule("MONTHLY", dtstart=datetime(2024, 1, 31, tzinfo=UTC), count=3, bymonthday=[-1]),
    ],
    ids=str,
)
def test_every_kind_of_schedule_survives_a_round_trip(app, when):
    entry = Entry("e", "t", when, args=[1], app=app)

    read = Entry.decode(entry.key, entry.encode(), app)

    assert read.encode() == entry.encode()
    assert type(read.schedule) is type(when)
    assert read.schedule == when
    assert getattr(read.schedule, "relative", None) == getattr(when, "relative", None)


def test_a_value_that_cannot_be_stored_is_named(app):
    entry = Entry("e", "t", schedule(60), args=[object()], app=app)

    with pytest.raises(EntryError, match=r"entry 'e' cannot be stored: .*object"):
        entry.encode()


def test_a_copy_keeps_all_and_shares_no_past(app):
    entry = Entry("e", "t", schedule(60), args=[1], kwargs={"x": 2}, options={"queue": "q"}, enabled=False, app=app)

    twin = copy.copy(entry)

    assert vars(twin) == vars(entry)
    assert (type(twin), twin.enabled, twin.app) == (Entry, False, app)
    twin.total_run_count = 5
    assert entry.total_run_count == 0


def test_another_past_leaves_the_entry_as_it_was(app):
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    entry = Entry("e", "t", schedule(60), enabled=False, app=app)
    before = dict(vars(entry))

    later = entry.with_past(Meta(moment, 4))

    assert vars(entry) == before
    assert (later.last_run_at, later.total_run_count, later.enabled) == (moment, 4, False)


def test_a_deep_copy_keeps_all(app):
    entry = Entry("e", "t", schedule(60), args=[1], options={"queue": "q"}, enabled=False, app=app)

    twin = copy.deepcopy(entry)

    assert (twin.encode(), twin.meta) == (entry.encode(), entry.meta)


# ---------------------------------------------------------------- its place in the schedule


def test_an_entry_that_has_never_run_is_due_now(app):
    entry = decode(app).with_past(Meta())

    before = datetime.now(UTC)
    assert before <= entry.due_at <= datetime.now(UTC)


def test_an_overdue_entry_is_due_now(app):
    entry = decode(app).with_past(Meta(datetime.now(UTC) - timedelta(days=3)))

    before = datetime.now(UTC)
    assert before <= entry.due_at <= datetime.now(UTC)


def test_the_score_is_exact(app):
    last = datetime(2999, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)

    assert decode(app).with_past(Meta(last)).score == (last + timedelta(seconds=60)).timestamp()


def test_an_entry_without_a_next_time_is_parked(app):
    once = rrule("DAILY", dtstart=datetime(2024, 1, 1, tzinfo=UTC), count=1)
    entry = Entry("e", "t", once, app=app, last_run_at=datetime(2024, 1, 2, tzinfo=UTC))

    assert entry.due_at is None
    assert entry.score == PARKED < 0
