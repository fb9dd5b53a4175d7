"""``export`` and ``import``: nothing is lost on the way, and what cannot be brought over is named.

``django_celery_beat-2.9.0.json`` was printed by ``manage.py dumpdata django_celery_beat`` of that version.
"""

from __future__ import annotations

import json
import shlex
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule, solar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue
from redbeat import RedBeatSchedulerEntry
from redbeat.schedules import rrule

from singlebeat import Entry, Schedule, clocked
from singlebeat.beat.entries.definition import Meta
from singlebeat.beat.entries.occurrence import Kind, Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.timetable import Timetable
from singlebeat.errors import EntryError
from singlebeat.overlap import Overlap
from tests.system.apps import make_app

DUMP = Path(__file__).with_name("django_celery_beat-2.9.0.json")
TASK = "tests.system.apps.plain"
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize("options", [{"tag": "it's a tag"}, {"until": datetime(2100, 1, 1, tzinfo=UTC)}])
def test_an_export_names_the_pauses_of_many_that_it_lacks(app, redis, cli, bench, options):
    """The command that it names pauses the entries on an empty server."""
    bench.put("bill", tags=["it's a tag"])
    entries = Schedule(app)
    entries.pause_many(**options, note="the database moves")
    (pause,) = entries.pauses()
    export = cli("export")
    assert export.stderr.startswith(f"{pause}: this is not in the file. To pause them on another server")

    redis.flushall()
    command = shlex.split(export.stderr.partition("the import: celery singlebeat ")[2])
    cli(*command)
    cli("import", "-", stdin=export.stdout)
    bench.tick()

    (again,) = entries.pauses()
    assert (again.tag, again.until, again.note) == (pause.tag, pause.until, pause.note)
    assert (bench.names, bench.decisions) == ([], ["paused"])
    entries.resume_many(tag=options.get("tag"))
    assert cli("export").stderr == ""


def exported(cli: Any) -> list[dict[str, Any]]:
    return sorted(json.loads(cli("export").stdout), key=lambda row: row["name"])


# ---------------------------------------------------------------- from export

instants = st.datetimes(datetime(2000, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
#: Whatever lies before the next run: an entry that is overdue counts from the moment of its import in any case.
pasts = st.datetimes(datetime(2000, 1, 1), datetime(2026, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
seconds = st.floats(0.001, 1e6) | st.integers(1, 10**6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
schedules = st.one_of(
    st.builds(schedule, seconds, relative=st.booleans()),
    st.builds(
        crontab,
        minute=st.sampled_from(["*", "*/7", "0", "1-5", "0,30"]),
        hour=st.sampled_from(["*", "8-18", "3"]),
        day_of_week=st.sampled_from(["*", "mon-fri", "0", "5,6"]),
        day_of_month=st.sampled_from(["*", "1", "1-7"]),
        month_of_year=st.sampled_from(["*", "1", "*/2"]),
    ),
    st.builds(solar, st.sampled_from(["sunset", "dawn_civil"]), st.floats(-60, 60), st.floats(-180, 180)),
    st.builds(clocked, instants),
    st.builds(
        rrule,
        st.sampled_from(["DAILY", "MONTHLY", "HOURLY"]),
        dtstart=instants | instants.map(lambda moment: moment.astimezone(BERLIN)),
        interval=st.integers(1, 9),
        count=st.none() | st.integers(1, 9),
        byweekday=st.none() | st.just([0, 4]),
    ),
)
policies = st.fixed_dictionaries(
    {},
    optional={
        "timezone": st.sampled_from(["Europe/Berlin", "Asia/Kathmandu"]),
        "overlap": st.sampled_from([str(word) for word in Overlap if word is not Overlap.RAISE]),
        **dict.fromkeys(("misfire_grace_time", "jitter", "expires"), seconds),
        "start_time": pasts,
        "end_time": instants.filter(lambda moment: moment > datetime(2027, 1, 1, tzinfo=UTC)),
        "max_runs": st.integers(1, 99),
        **dict.fromkeys(("paused", "run_on_start"), st.booleans()),
        "note": st.text(max_size=9),
    },
)
entries = st.fixed_dictionaries(
    {
        "name": st.text(st.characters(exclude_categories=["Cs"]) | st.just("\udcff"), min_size=1, max_size=9).filter(
            lambda name: name[0] != ":" and name.strip()  # so begin the keys of the schedule itself
        ),
        "task": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9),
        "schedule": schedules,
        "args": st.lists(json_values, max_size=2),
        "kwargs": st.dictionaries(st.text(max_size=5), json_values, max_size=2),
        "options": st.fixed_dictionaries({}, optional={"queue": st.text(max_size=5), "priority": st.integers(0, 9)}),
        "enabled": st.booleans(),
        "policy": policies.map(EntryPolicy.of),
        "past": st.builds(Meta, st.none() | pasts, st.integers(0, 99), st.none() | pasts),
    }
).filter(lambda entry: not Timetable("", entry["schedule"], entry["policy"], UTC).why_without_time())


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(wanted=st.lists(entries, max_size=4, unique_by=lambda entry: entry["name"]))
def test_an_export_can_be_imported_elsewhere_unchanged(cli, app, redis, wanted):
    """20 schedules of up to four entries of every kind, with their policies and pasts."""
    redis.flushall()
    for fields in wanted:
        past = fields.pop("past")
        Entry(app=app, **fields).with_past(past).save()
    dump = cli("export").stdout
    before, members = exported(cli), redis.zrange("redbeat::schedule", 0, -1)
    redis.flushall()

    cli("import", "-", "--dry-run", stdin=dump)
    assert redis.dbsize() == 0
    cli("import", "-", stdin=dump)

    assert exported(cli) == before
    assert len(before) == len(wanted)
    assert sorted(redis.zrange("redbeat::schedule", 0, -1)) == sorted(members)


def test_entries_of_redbeat_are_exported_and_imported_elsewhere(cli, app, server, redis):
    with make_app(server.celery_url) as other:
        for name, when in {
            "i": schedule(5),
            "c": crontab(minute=5),
            "r": rrule("DAILY", dtstart=datetime.now(UTC)),
        }.items():
            RedBeatSchedulerEntry(name, TASK, when, args=["x"], kwargs={"a": 1}, app=other).save()
    before = exported(cli)
    assert [row["name"] for row in before] == ["c", "i", "r"]
    dump = cli("export").stdout
    redis.flushall()

    cli("import", "-", stdin=dump)

    assert exported(cli) == before


def test_a_change_of_times_is_exported_and_imported_elsewhere(cli, app, redis):
    Entry("e", TASK, schedule(3600), app=app, last_run_at=datetime.now(UTC) - timedelta(hours=2)).save()
    Schedule(app).upsert("e", TASK, 7200)
    past, due_at = Schedule(app).get("e").meta, redis.zscore("redbeat::schedule", "redbeat:e")
    dump = cli("export").stdout
    redis.flushall()

    cli("import", "-", stdin=dump)

    assert past.since
    assert Schedule(app).get("e").meta == past
    assert redis.zscore("redbeat::schedule", "redbeat:e") == due_at


def test_an_import_replaces_entries_and_keeps_their_past(cli, app):
    last = datetime.now(UTC) - timedelta(minutes=5)
    Entry("e", TASK, schedule(3600), app=app, last_run_at=last, total_run_count=7, paused=True, note="why").save()
    row = {"name": "e", "definition": {"task": "new", "schedule": 7200}, "meta": {"total_run_count": 99}}

    cli("import", "-", stdin=json.dumps([row]))

    entry = Schedule(app).get("e")
    assert (entry.task, entry.schedule) == ("new", schedule(7200))
    assert (entry.meta.last_run_at, entry.meta.total_run_count) == (last, 7)
    assert (entry.policy.paused, entry.policy.note) == (True, "why")


def test_an_imported_entry_does_not_run_on_start_again(cli, app, redis):
    entry = Entry("e", TASK, schedule(3600), app=app, run_on_start=True)
    entry.with_past(Meta(datetime.now(UTC), 1)).save()
    dump = cli("export").stdout
    redis.flushall()

    cli("import", "-", stdin=dump)

    assert redis.zscore("redbeat::schedule", "redbeat:e") > datetime.now(UTC).timestamp() + 3000


@pytest.mark.parametrize("from_now", [False, True])
def test_an_import_after_a_loss_names_or_leaves_what_has_passed(cli, bench, redis, from_now):
    """The file knows the past as of the export: the entries may have run since then."""
    bench.put("bill")
    bench.put("too late", misfire_grace_time=60)
    bench.put("paused", paused=True)
    bench.put("later", ago=timedelta())
    bench.put("soon", ago=timedelta(minutes=55))
    began = time.time()
    dump, option = cli("export").stdout, ["--from-now"] * from_now
    redis.flushall()

    tried = cli("import", "-", "--dry-run", *option, stdin=dump)
    done = cli("import", "-", *option, stdin=dump)
    names = json.loads(cli("import", "-", "--json", "--dry-run", *option, stdin=dump).stdout)["catch_up"]
    bench.tick()

    said = "1 of them runs at once, for times since the export, or without any run in the file: bill. They may"
    assert (said in tried.stderr, said in done.stderr) == (not from_now, not from_now)
    assert names == [], "it has its past by now"
    assert bench.names == ([] if from_now else ["bill"])
    assert bench.meta("bill").total_run_count == (7 if from_now else 8)
    if from_now:
        assert {bench.score(name) > datetime.now(UTC).timestamp() for name in ("bill", "too late", "later")} == {True}
        minutes = {name: round((bench.score(name) - began) / 60) for name in ("bill", "soon")}
        assert minutes == {"bill": 30, "soon": 5}, "an interval keeps its pace"


def test_every_unstorable_row_is_named_and_the_others_are_stored(cli, app, redis):
    good = {"definition": {"task": TASK, "schedule": 60}}
    redis.set("redbeat:a string", "x")
    rows = [
        {"name": "first", **good},
        {"name": "no task", "definition": {"schedule": 60}},
        {"name": "no definition"},
        good,
        {"name": 7, **good},
        {"name": "unknown wish", **good, "policy": {"jiter": 5}},
        {"name": "a past", **good, "meta": {"last_run_at": "yesterday"}},
        {"name": "deep", "definition": {"task": TASK, "schedule": 60, "args": json.loads("[" * 500 + "]" * 500)}},
        {"name": "a string", **good},
        {"name": "last", **good},
    ]

    result = cli("import", "-", stdin=json.dumps(rows), code=1)

    for line in (
        "no task: definition has no task",
        "no definition: it has no name, or no definition",
        "entry number 4: it has no name, or no definition",
        "entry number 5: it has no name, or no definition",
        "unknown wish: policy: there is no 'jiter'; did you mean 'jitter'?",
        "a past: meta: last_run_at is not an ISO 8601 date",
        "deep: definition is nested too deeply: use at most",
        "a string: entry 'a string' cannot be stored: its key holds something else",
    ):
        assert line in result.stderr
    assert {"first", "last"} <= {row["name"] for row in exported(cli)}
    answer = json.loads(cli("import", "-", "--json", stdin=json.dumps(rows), code=1).stdout)
    assert set(answer["stored"]) == {"first", "last"}
    assert len(answer["problems"]) == 8


def test_a_name_that_is_in_a_file_twice_is_named(cli, app):
    row = {"name": "twice", "definition": {"task": TASK, "schedule": 60}}
    rows = [row, {**row, "definition": {"task": "other", "schedule": 5}}, {**row, "name": "once"}]

    result = cli("import", "-", stdin=json.dumps(rows), code=1)

    assert "stored: 2 of 3" in result.stdout
    assert "twice: it is in the file more than once: only its first row counts" in result.stderr
    assert Schedule(app).get("twice").task == TASK


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_file_may_be_written_by_any_redirection(cli, app, tmp_path, encoding):
    file = tmp_path / "entries.json"
    file.write_text(json.dumps([{"name": "é", "definition": {"task": TASK, "schedule": 60}}]), encoding=encoding)

    cli("import", str(file))

    assert Schedule(app).get("é").task == TASK


@pytest.mark.parametrize("depth", [300, 1_000, 100_000])
@pytest.mark.parametrize("field", ["args", "kwargs"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_entry_nested_too_deeply_is_named_and_the_rest_stored(cli, app, redis, depth, field, encoding):
    begin, end = ("[", "]") if field == "args" else ('{"]\\"": ', "}")
    deep = begin * depth + '"}\\\\"' + end * depth
    definition = {"name": "x", "task": TASK, "schedule": 60.0}
    rows = [{"name": name, "definition": definition | {"kwargs": {"a": "[{"}}} for name in ("before", "deep", "after")]
    text = json.dumps(rows)
    at = text.index('"[{"', text.index('"deep"'))
    text = text[:at] + deep + text[at + len('"[{"') :]

    result = cli("import", "-", stdin=text.encode(encoding), code=1)

    assert result.stdout == "stored: 2 of 3\n"
    at_once, problem = result.stderr.splitlines()
    assert "2 of them run at once, for times since the export, or without any run in the file: before, after" in at_once
    assert problem == "deep: definition is nested too deeply: use at most 250 arrays and objects in one another"
    assert {entry.name for entry in Schedule(app).list()} == {"before", "after"}


def test_an_entry_that_beat_cannot_use_is_not_imported(cli, app, redis):
    """Nor said to be, in a dry run; a name that no client can send does not stop the rest."""
    good = {"task": TASK, "schedule": 60}
    definitions = {"bad\ud800": good, "inf": {**good, "args": [float("inf")]}, ":parked:x": good, "good": good}
    rows = json.dumps([{"name": name, "definition": definition} for name, definition in definitions.items()])

    for options in (["--dry-run"], []):
        answer = json.loads(cli("import", "-", "--json", *options, stdin=rows, code=1).stdout)
        assert (answer["stored"], set(answer["problems"])) == (["good"], {"bad\ud800", "inf", ":parked:x"})
        assert redis.exists("redbeat:good") == (not options)


def test_an_export_names_the_entries_that_it_leaves_out(cli, app, redis):
    Entry("good", TASK, schedule(60), app=app).save()
    redis.hset("redbeat:bad", "definition", "{")
    redis.zadd("redbeat::schedule", {"redbeat:bad": 0})

    result = cli("export", code=1)

    assert [row["name"] for row in json.loads(result.stdout)] == ["good"]
    assert result.stderr.startswith("bad: definition cannot be read")
    assert "bad: unusable: definition cannot be read" in cli("list").output
    assert set(json.loads(cli("list", "--json").stdout)["unusable"]) == {"bad"}


@pytest.mark.parametrize("placed", [True, False])
def test_an_export_names_the_unknown_fields_that_it_leaves_out(cli, app, redis, placed):
    entry = Entry("e", TASK, schedule(60), args=["x"], app=app).save()
    definition = json.loads(redis.hget(entry.key, "definition"))
    redis.hset(entry.key, "definition", json.dumps({**definition, "arg": [1], "foo": 1}))
    if not placed:
        redis.zrem("redbeat::schedule", entry.key)

    result = cli("export")

    (row,) = json.loads(result.stdout)
    assert row["definition"] == definition
    for field in ("arg", "foo"):
        assert f"the definition's field '{field}' is unknown and ignored" in result.stderr
    assert ("it has no place" in result.stderr) is not placed


# ---------------------------------------------------------------- from django-celery-beat


def row(model: str, pk: int, **fields: Any) -> dict[str, Any]:
    return {"model": f"django_celery_beat.{model}", "pk": pk, "fields": fields}


def test_a_dump_of_django_celery_beat_is_imported_whole(cli, app):
    stored = json.loads(cli("import", str(DUMP), "--json").stdout)["stored"]
    assert len(stored) == 9
    found = {entry.name: entry for entry in Schedule(app).list()}
    assert set(found) == set(stored)

    feed, mail, once, lamps, new_year = (found[name] for name in ("feed", "mail", "once", "lamps", "new year"))
    assert (feed.task, feed.schedule, feed.args, feed.kwargs) == (
        "shop.feed",
        schedule(7200),
        ["x", 1],
        {"a": {"b": None}},
    )
    assert feed.options == {"queue": "q", "priority": 0, "headers": {"h": 1}}
    assert feed.meta == Meta(datetime(2026, 11, 1, 7, 0, 0, 123000, tzinfo=UTC), 42)
    assert feed.policy.note == "every other hour"
    assert (found["often"].schedule, found["often"].enabled) == (schedule(1.5), False)
    end = datetime(2032, 1, 1, tzinfo=UTC)
    assert (mail.schedule, mail.policy.timezone) == (crontab(0, 9, day_of_week="mon-fri"), BERLIN)
    assert (mail.policy.start_time, mail.policy.end_time) == (datetime(2026, 12, 1, tzinfo=UTC), end)
    assert {**mail.options, "expires": datetime.fromisoformat(mail.options["expires"])} == {
        "exchange": "x",
        "routing_key": "r",
        "expires": end,
    }
    assert mail.meta == Meta(), "it has never run, and so runs at its start time"
    assert found["expire_seconds"].policy.expires == 90
    assert once.policy.max_runs == 1
    assert once.meta == Meta(since=datetime(2026, 11, 2, tzinfo=UTC)), "it counts from its last change"
    assert lamps.schedule == solar("sunset", 52.52, 13.405)
    assert (new_year.schedule, new_year.policy.max_runs) == (clocked("2031-01-01T08:00:00Z"), None)
    assert new_year.due_at == datetime(2031, 1, 1, 8, tzinfo=UTC)
    assert (found["done"].enabled, found["done"].due_at) == (False, None)
    assert "emoji \U0001f389 and 東京" in found


def test_a_later_dump_of_django_leaves_what_django_has_no_field_for(cli, app):
    cli("import", str(DUMP))
    given = {
        "overlap": "allow_all",
        "misfire_grace_time": "30",
        "jitter": "7",
        "run_on_start": "true",
        "tags": '["a", "b"]',
    }
    cli("edit", "feed", *(text for name, value in given.items() for text in ("--set", f"{name}={value}")))
    before = Schedule(app).get("feed").policy

    cli("import", str(DUMP))

    assert Schedule(app).get("feed").policy == before
    assert (before.overlap, before.jitter, before.tags) == ("allow_all", 7, ("a", "b"))


def test_a_later_dump_of_django_names_what_was_deleted_or_renamed_there(cli, app, bench):
    """Else a task that was renamed between two imports runs under both names."""
    dump = json.loads(DUMP.read_text("utf-8"))
    first = cli("import", "-", stdin=json.dumps(dump))
    for row in dump:
        if row["fields"].get("name") == "feed":
            row["fields"]["name"] = "Feed (EU)"
    bench.app.conf.beat_schedule = {"code": {"task": TASK, "schedule": 60}}
    bench.scheduler().tick()

    again = cli("import", "-", "--dry-run", stdin=json.dumps(dump))
    found = json.loads(cli("import", "-", "--json", stdin=json.dumps(dump)).stdout)

    assert "beat_schedule" not in first.output
    assert "1 entry is left as it is, in neither the file nor beat_schedule. Delete" in again.stderr
    assert "  feed\n" in again.stderr
    assert found["others"] == ["feed"]
    assert Schedule(app).get("feed").enabled


def test_an_imported_entry_runs_as_it_did_in_django(cli, app, bench, redis):
    dump = json.loads(DUMP.read_text("utf-8"))
    ago = (datetime.now(UTC) - timedelta(hours=3)).isoformat()
    for row in dump:
        if row["fields"].get("name") in {"feed", "mail"}:
            row["fields"].update(last_run_at=ago, start_time=None)
        if row["model"].endswith("crontabschedule"):
            row["fields"].update(minute="*", hour="*", day_of_week="*")
    cli("import", "-", stdin=json.dumps(dump))
    with app.connection_for_write() as connection:  # as a worker declares it
        Queue("mails", Exchange("x"), routing_key="r").bind(connection.default_channel).declare()
    bench.tick()

    (feed,) = (json.loads(text)["headers"] for text in redis.lrange("q", 0, -1))
    assert (feed["task"], feed["argsrepr"], feed["h"]) == ("shop.feed", "['x', 1]", 1)
    sent = {row["name"]: row for row in exported(cli)}
    assert sent["feed"]["meta"]["total_run_count"] == 43
    assert sent["mail"]["meta"]["total_run_count"] == 1
    assert not redis.exists("redbeat::quarantine")
    mail = next(record for record in Schedule(app).history("mail"))
    assert mail.decision == "dispatched"


def test_a_clocked_task_due_between_dump_and_import_is_sent_once(cli, app, redis, bench):
    """Its beat was stopped by then. A task that it has run is disabled, and keeps neither its run nor its number."""
    stored, ago, later, soon = (
        (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat() for seconds in (-90, -30, -20, 3600)
    )
    never = {
        "task": TASK,
        "args": '["x"]',
        "one_off": True,
        "last_run_at": None,
        "total_run_count": 0,
        "date_changed": stored,
    }
    dump = [
        row("clockedschedule", 1, clocked_time=ago),
        row("clockedschedule", 2, clocked_time=soon),
        row("periodictask", 1, name="due", clocked=1, **never),
        row("periodictask", 2, name="soon", clocked=2, **never),
        row("periodictask", 3, name="off", clocked=1, enabled=False, **never),
        row("periodictask", 4, name="ran", clocked=1, **(never | {"last_run_at": ago, "total_run_count": 1})),
        row("periodictask", 5, name="reset", clocked=1, enabled=False, **(never | {"date_changed": later})),
        row("periodictask", 6, name="bounded", clocked=2, start_time=stored, **never),
    ]
    for _ in range(2):  # it may be repeated
        cli("import", "-", stdin=json.dumps(dump))
        bench.tick()

    sent = [json.loads(text)["headers"]["singlebeat"] for text in redis.lrange("celery", 0, -1)]
    assert len(sent) == 1
    decided = [(record.entry, record.decision) for record in Schedule(app).history()]
    assert [entry for entry, decision in decided if decision == "dispatched"] == ["due"]
    for name in ("off", "reset"):
        cli("edit", name, "--enable")
    bench.tick()
    assert redis.llen("celery") == 1
    places = redis.zmscore("redbeat::schedule", ["redbeat:soon", "redbeat:bounded"])
    assert places == [datetime.fromisoformat(soon).timestamp()] * 2


def test_a_start_time_before_the_next_run_does_not_move_the_runs_of_a_dump(cli, app):
    """It was set after the last run. django-celery-beat goes on from that."""
    now = datetime.now(UTC)
    last, passed, before, ahead = (now + timedelta(minutes=minutes) for minutes in (-20, -5, 10, 90))
    task = {"task": TASK, "interval": 1, "args": '["x"]', "last_run_at": last.isoformat(), "total_run_count": 3}
    dump = [
        row("intervalschedule", 1, every=1, period="hours"),
        row("periodictask", 1, name="passed", start_time=passed.isoformat(), **task),
        row("periodictask", 2, name="ahead", start_time=ahead.isoformat(), **task),
        row("periodictask", 3, name="before the next run", start_time=before.isoformat(), **task),
    ]

    cli("import", "-", stdin=json.dumps(dump))

    entries = Schedule(app)
    assert [entries.get(name).policy.start_time for name in ("passed", "ahead")] == [None, ahead]
    for name, then in (("passed", last), ("before the next run", last), ("ahead", ahead - timedelta(hours=1))):
        assert next(iter(entries.next_runs(name, 1))) == then + timedelta(hours=1), name


@pytest.mark.parametrize("first", ["an old run", "no run"])
def test_a_later_dump_brings_the_runs_since_the_first(cli, app, redis, bench, first):
    now = datetime.now(UTC)
    old, new, ahead = ((now + timedelta(minutes=each)).isoformat() for each in (-180, -1, 60))
    times = [row("intervalschedule", 1, every=1, period="hours")]

    def dump(last: str | None, count: int) -> str:
        task = {"task": TASK, "interval": 1, "args": '["x"]', "date_changed": old}
        task |= {"last_run_at": last, "total_run_count": count}
        return json.dumps([*times, row("periodictask", 1, name="e", **task)])

    def past() -> tuple[str, int]:
        meta = Schedule(app).get("e").meta
        return meta.counts_from.isoformat(), meta.total_run_count

    cli("import", "-", stdin=dump(old if first == "an old run" else None, 3 if first == "an old run" else 0))
    cli("import", "-", stdin=dump(new, 5))
    assert past() == (new, 5)
    for other in (dump(old, 3), dump(ahead, 9)):
        cli("import", "-", stdin=other)
        assert past() == (new, 5)
    bench.tick()

    assert redis.llen("celery") == 0
    assert redis.zscore("redbeat::schedule", "redbeat:e") == (now + timedelta(minutes=59)).timestamp()


@pytest.mark.parametrize("ahead", ["9999-12-31T23:59:59Z", "2131-01-01T00:00:00Z"])
@pytest.mark.parametrize("is_dump", [True, False])
def test_a_past_of_a_wrong_clock_silences_no_imported_entry(cli, app, redis, bench, ahead, is_dump):
    times = row("intervalschedule", 1, every=1, period="hours")
    task = {"task": TASK, "interval": 1, "args": '["x"]', "last_run_at": ahead, "total_run_count": 3}
    rows = [times, row("periodictask", 1, name="e", **task)]
    if not is_dump:
        Entry("e", TASK, schedule(3600), args=["x"], app=app).save()
        (exported_row,) = exported(cli)
        Schedule(app).delete("e")
        rows = [{**exported_row, "meta": {"last_run_at": ahead, "total_run_count": 3}}]

    told = cli("import", "-", stdin=json.dumps(rows)).output

    assert "e: its past in the file lies ahead of the server's clock: it counts from now" in told
    meta = Schedule(app).get("e").meta
    assert (meta.last_run_at, meta.total_run_count) == (None, 3)
    assert redis.zscore("redbeat::schedule", "redbeat:e") == pytest.approx(time.time() + 3600, abs=60)
    assert "late place" not in cli("list").output


@pytest.mark.parametrize("kind", [Kind.SCHEDULED, Kind.MANUAL])
@pytest.mark.parametrize("when", ["interval", "rule", "once"])
def test_a_claimed_run_that_is_not_sent_is_made_up_for_after_an_import(cli, bench, redis, when, kind):
    """Its past counts it already."""
    nominal = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=5)
    every = {"interval": schedule(3600), "rule": rrule("HOURLY", dtstart=nominal - timedelta(days=1))}
    bench.put("e", every=every.get(when, clocked(nominal)), last_run_at=nominal)
    claimed = Occurrence.of("", "e", nominal, kind=kind)
    redis.hset("redbeat:e", "pending", claimed.encode())
    if when != "once":
        redis.hset("redbeat:e", "sent", repr((nominal - timedelta(hours=1)).timestamp()))
    redis.zadd("redbeat::pending", {"redbeat:e": 1})
    count = bench.meta("e").total_run_count

    answer = cli("export")
    redis.flushall()
    cli("import", "-", stdin=answer.stdout)
    for _ in range(2):
        bench.tick()

    is_made_up_for = kind is Kind.SCHEDULED
    assert [message.nominal for message in bench.messages] == [nominal] * is_made_up_for
    assert bench.meta("e").total_run_count == count
    assert ("a run that was asked for" in answer.stderr) is not is_made_up_for


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_task_of_one_time_that_was_changed_after_it_and_has_not_run_runs(cli, app, redis, bench, is_enabled):
    """Of an enabled one: django-celery-beat disables it when it runs."""
    now = datetime.now(UTC)
    times = row("clockedschedule", 1, clocked_time=(now - timedelta(seconds=9)).isoformat())
    task = {"task": TASK, "clocked": 1, "one_off": True, "args": '["x"]', "last_run_at": None, "total_run_count": 0}
    task |= {"date_changed": (now - timedelta(seconds=3)).isoformat(), "enabled": is_enabled, "expire_seconds": 0}

    cli("import", "-", stdin=json.dumps([times, row("periodictask", 1, name="e", **task)]))
    for _ in range(2):
        bench.tick()

    assert redis.llen("celery") == is_enabled


@pytest.mark.parametrize("way", ["import", "revert"])
def test_an_entry_that_comes_back_knows_its_last_sent_run(cli, bench, redis, way):
    """Later times were skipped: a task may work on what lies between its last run and this one."""
    bench.put("e")
    sent = datetime.now(UTC).replace(microsecond=0) - timedelta(days=2)
    redis.hset("redbeat:e", "sent", repr(sent.timestamp()))
    dump = cli("export").stdout
    bench.schedule.delete("e")

    if way == "import":
        cli("import", "-", stdin=dump)
    else:
        bench.schedule.revert("e", bench.schedule.changes("e", 1)[0].id)

    assert bench.schedule.get("e").meta.last_run == sent


@pytest.mark.parametrize("has_led", [False, True], ids=["no beat has led since", "a beat has led since"])
@pytest.mark.parametrize("was_sent", [False, True])
def test_an_exported_entry_knows_what_a_clock_ahead_has_sent(cli, app, redis, bench, has_led, was_sent):
    ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    Entry("e", TASK, clocked(ahead), app=app).save()
    redis.hset("redbeat:e", "meta", (past := Meta(ahead, 1)).encode())
    redis.hdel("redbeat:e", "since")
    if was_sent:
        redis.hset("redbeat:e", "sent", repr(ahead.timestamp()))
    if has_led:
        past = Entry.from_key("redbeat:e", app=app).meta.counting_from(datetime.now(UTC), datetime.now(UTC))
        redis.hset("redbeat:e", "since", past.encode_since())
    (row_of_entry,) = exported(cli)
    redis.flushall()

    cli("import", "-", stdin=json.dumps([row_of_entry]))

    meta = Schedule(app).get("e").meta
    assert meta.ahead == (ahead if was_sent else None)
    assert meta.counts_from < datetime.now(UTC)


def test_a_task_of_a_dump_may_start_in_the_year_1(cli, app, redis, bench):
    times = row("intervalschedule", 1, every=1, period="days")
    task = {"task": TASK, "interval": 1, "args": '["x"]', "start_time": "0001-01-01T00:00:00Z", "last_run_at": None}

    cli("import", "-", stdin=json.dumps([times, row("periodictask", 1, name="e", **task)]))
    bench.tick()

    assert redis.hgetall("redbeat::quarantine") == {}
    assert redis.llen("celery") == 1


def test_a_repeated_import_keeps_an_overdue_clocked_entry_due(cli, app, redis, bench):
    """A row without a past says nothing about runs."""
    instant = datetime.now(UTC) - timedelta(hours=1)
    past = instant - timedelta(hours=1)
    Entry("e", TASK, clocked(instant), args=["x"], app=app, last_run_at=past).save()
    (row,) = exported(cli)
    del row["meta"]

    cli("import", "-", stdin=json.dumps([row]))
    bench.tick()

    assert redis.llen("celery") == 1


def test_a_clocked_task_of_a_dump_waits_for_a_later_start_time(cli, app, redis, bench):
    """As by django-celery-beat, whether the import is before both or after both."""
    now = datetime.now(UTC)
    changed, before, after, later = ((now + timedelta(seconds=each)).isoformat() for each in (-90, -60, -30, 3600))
    never = {"task": TASK, "args": '["x"]', "one_off": True, "last_run_at": None, "date_changed": changed}
    dump = [
        row("clockedschedule", 1, clocked_time=before),
        row("periodictask", 1, name="passed", clocked=1, start_time=after, **never),
        row("periodictask", 2, name="ahead", clocked=1, start_time=later, **never),
    ]

    cli("import", "-", stdin=json.dumps(dump))
    bench.tick()

    assert [record.entry for record in Schedule(app).history()] == ["passed"]
    assert redis.zscore("redbeat::schedule", "redbeat:ahead") == datetime.fromisoformat(later).timestamp()


def test_a_task_of_one_run_that_is_scheduled_anew_runs_again(cli, app, redis, bench):
    """Django has no run of it then; the later dump is imported when its time has come."""
    now = datetime.now(UTC)

    def dump(changed: float, minutes: int, **fields: Any) -> str:
        at = {name: (now + timedelta(minutes=each)).isoformat() for name, each in (("a", changed), ("b", changed + 9))}
        task = {"task": TASK, "args": '["x"]', "one_off": True, "date_changed": at["a"], **fields}
        return json.dumps(
            [
                row("clockedschedule", 1, clocked_time=at["b"]),
                row("intervalschedule", 1, every=minutes, period="minutes"),
                row("periodictask", 1, name="clocked", clocked=1, **task),
                row("periodictask", 2, name="interval", interval=1, **task),
            ]
        )

    def sent() -> list[str]:
        redis.delete(*redis.keys("SINGLETONLOCK_*") or "-")  # no worker frees them
        bench.tick()
        return sorted(record.entry for record in Schedule(app).history() if record.decision == "dispatched")

    cli("import", "-", stdin=dump(-90, 60))
    assert sent() == ["clocked", "interval"]
    for _ in range(2):  # it may be repeated
        cli("import", "-", stdin=dump(-20, 10))
        assert sent() == ["clocked", "clocked", "interval", "interval"]
    cli("import", "-", stdin=dump(-9.5, 5, enabled=False))
    assert sent() == ["clocked", "clocked", "interval", "interval"]


@pytest.mark.parametrize(("seconds", "bound"), [(1, "start_time"), (-1, "end_time")])
def test_an_entry_whose_only_time_is_out_of_its_bounds_is_not_stored(cli, app, seconds, bound):
    instant = datetime(2131, 1, 1, tzinfo=UTC)
    bounds = {bound: instant + timedelta(seconds=seconds)}

    with pytest.raises(EntryError, match=f"cannot be stored: it would never run: its instant, .* {bound}"):
        Schedule(app).upsert("never", TASK, clocked(instant), **bounds)

    Schedule(app).upsert("never", TASK, clocked(instant), enabled=False, **bounds)


def test_every_task_of_a_dump_that_cannot_be_brought_over_is_named(cli, app):
    dump = [
        row("intervalschedule", 1, every=2, period="hours"),
        row("intervalschedule", 2, every=2, period="moons"),
        row("crontabschedule", 1, minute="99", hour="*", day_of_week="*", day_of_month="*", month_of_year="*"),
        row("solarschedule", 1, event="doomsday", latitude="1", longitude="1"),
        row("periodictask", 1, name="good", task="t", interval=1),
        row("periodictask", 2, name="moons", task="t", interval=2),
        row("periodictask", 3, name="gone", task="t", interval=9),
        row("periodictask", 4, name="never", task="t"),
        row("periodictask", 5, name="cron", task="t", crontab=1),
        row("periodictask", 6, name="sun", task="t", solar=1),
        row("periodictask", 7, name="args", task="t", interval=1, args="{"),
        row("periodictask", 8, name="no list", task="t", interval=1, args='"x"'),
        row("periodictask", 9, name="no task", interval=1),
        row("periodictask", 10, name="start", task="t", interval=1, start_time="soon"),
        row("periodictask", 11, task="t", interval=9),
        row("periodictask", 12, name="last", task="t", interval=1),
        {"model": "auth.user", "pk": 1, "fields": {}},
        {"model": "django_celery_beat.periodictask"},
        {"model": "django_celery_beat.periodictask", "pk": [1], "fields": [1]},
        row("periodictask", 13, name="odd", task="t", interval=[1]),
    ]

    answer = json.loads(cli("import", "-", "--json", stdin=json.dumps(dump), code=1).stdout)

    assert answer["stored"] == ["good", "last"]
    problems = answer["problems"]
    named = {"moons", "gone", "never", "cron", "sun", "args", "no list", "no task", "start", "odd"}
    assert set(problems) == named | {"pk 11", "pk None", "pk [1]"}
    assert "its period is none of days, hours" in problems["moons"]
    assert problems["gone"] == "its interval schedule, number 9, is not in the dump: dump the whole app"
    assert "doomsday" in problems["sun"]
    assert "args is not a JSON array" in problems["no list"]


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/Sao_Paulo"])
def test_dates_of_a_dump_without_offset_are_in_utc(cli, server, redis, zone):
    """With ``USE_TZ = False``, django-celery-beat writes and reads them so."""
    now = datetime.now(UTC).replace(tzinfo=None)
    dump = [
        row("clockedschedule", 1, clocked_time="2031-07-01T08:00:00"),
        row("intervalschedule", 1, every=3, period="hours"),
        row("periodictask", 1, name="once", task="t", clocked=1, one_off=True),
        row("periodictask", 2, name="ran", task="t", interval=1, last_run_at=now.isoformat(), total_run_count=1),
    ]
    with make_app(server.celery_url, {"timezone": zone}) as app:
        cli("import", "-", stdin=json.dumps(dump), app=app)

        entries = Schedule(app)
        assert entries.get("once").schedule == clocked("2031-07-01T08:00:00Z")
        assert next(iter(entries.next_runs("ran", 1))) == now.replace(tzinfo=UTC) + timedelta(hours=3)


@pytest.mark.parametrize("of_django", [True, False], ids=["from django-celery-beat", "by hand"])
def test_an_imported_instant_that_has_passed_never_runs(cli, app, of_django):
    """As with ``upsert``; one that lies ahead runs."""
    instants = {"passed": "2020-01-01T09:00:00Z", "ahead": "2131-01-01T09:00:00Z"}
    if of_django:
        rows = [row("clockedschedule", at, clocked_time=text) for at, text in enumerate(instants.values())]
        rows += [
            row("periodictask", at, name=name, task=TASK, clocked=at, one_off=True) for at, name in enumerate(instants)
        ]
    else:
        when = {name: {"__type__": "clocked", "instant": text} for name, text in instants.items()}
        rows = [{"name": name, "definition": {"task": TASK, "schedule": each}} for name, each in when.items()]

    cli("import", "-", stdin=json.dumps(rows))

    found = {entry.name: (entry.due_at, entry.last_run_at) for entry in Schedule(app).list()}
    assert found == {"passed": (None, None), "ahead": (datetime(2131, 1, 1, 9, tzinfo=UTC), None)}
    assert "never" in cli("next", "passed").output


@pytest.mark.parametrize("text", ["{}", "[1]", "\x00", '"x"', "[" * 100_000])
def test_a_file_that_is_neither_is_refused_in_one_line(cli, text):
    result = cli("import", "-", stdin=text, code=2)

    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1
