"""Pauses of many entries: of all, or of those with a tag; beats of this process decide about the entries."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.exceptions import RedisError

from singlebeat import Schedule
from singlebeat.beat.entries import pauses
from singlebeat.beat.entries.pauses import Pause, Pauses
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.one_write import OneWrite
from singlebeat.errors import ConflictError, EntryError
from tests.redis.bench import HOUR
from tests.support import at_once

PAUSES, SCHEDULE = "redbeat::pauses", "redbeat::schedule"


def ago(hours: float) -> str:
    """Return a moment in the past as another program writes it."""
    return (datetime.now(UTC) - hours * HOUR).isoformat()


def records(redis: Any) -> dict[str, Any]:
    """Return the stored records by selector."""
    return {selector: json.loads(text) for selector, text in redis.hgetall(PAUSES).items()}


# ---------------------------------------------------------------- what beat does


def test_a_pause_of_all_lets_times_pass_and_says_why(bench):
    bench.put()
    bench.schedule.pause_many(note="the database moves")
    bench.tick(2)
    (record,) = bench.history

    assert (record["decision"], record["reason"]) == ("paused", "all entries are paused: the database moves")
    assert bench.messages == []
    assert bench.meta().total_run_count == 7

    bench.schedule.resume_many()
    bench.tick(2)
    assert bench.decisions == ["paused"]  # what has passed is not made up for
    bench.make_due()
    bench.redis.delete(PAUSES)
    bench.tick()
    assert bench.names == ["e"]


def test_a_pause_of_a_tag_covers_the_entries_with_the_tag(bench):
    bench.put("bill", tags=["eu", "billing"])
    bench.put("other", tags=["bill"])
    bench.put("plain")
    bench.schedule.pause_many(tag="billing")
    bench.tick(2)

    assert sorted(bench.names) == ["other", "plain"]
    assert {(record["entry"], record["reason"]) for record in bench.history if record["decision"] == "paused"} == {
        ("bill", "entries with tag billing are paused")
    }


def test_a_pause_of_many_writes_nothing_into_entries(bench):
    entries = {name: bench.put(name, tags=["t"]).key for name in "ab"}
    before = [bench.redis.hgetall(key) for key in entries.values()]
    for verb in (bench.schedule.pause_many, bench.schedule.resume_many):
        verb()
        verb(tag="t")

    assert [bench.redis.hgetall(key) for key in entries.values()] == before


def test_times_without_a_beat_in_a_pause_are_not_caught_up(bench):
    """No beat led from the beginning of the pause to its end."""
    bench.put()
    bench.schedule.pause_many()
    bench.schedule.resume_many()
    bench.tick(2)

    assert bench.decisions == ["paused"]


@pytest.mark.parametrize("until", [{}, {"until": ago(0.75)}], ids=["lasts", "has-ended"])
def test_an_entry_that_leaves_a_pause_makes_up_for_no_time_in_it(bench, until):
    """No beat led meanwhile; one entry has had a time since the pause ended."""
    bench.put("within", every=2 * HOUR, ago=3 * HOUR, tags=["billing", "eu"])
    bench.put("after", tags=["billing"])
    bench.redis.hset(PAUSES, "tag:billing", json.dumps({"since": ago(3), **until}))
    for name in ("within", "after"):
        entry = bench.schedule.get(name)
        entry.policy = replace(entry.policy, tags=("eu",))
        bench.schedule.save(entry)
    bench.tick(2)

    assert bench.names == (["after"] if until else [])
    assert bench.score("within") > datetime.now(UTC).timestamp()


def test_a_run_that_is_due_after_a_pause_runs(bench):
    """Its nominal time was in the pause, and jitter has put it off."""
    entry = bench.put(every=2 * HOUR, ago=3.95 * HOUR, jitter=6840, tags=["t"])
    nominal = entry.last_run_at + 2 * HOUR
    due = entry.timetable.due(nominal)
    until = nominal + (due - nominal) / 2
    bench.redis.hset(PAUSES, "tag:t", json.dumps({"since": ago(3), "until": until.isoformat()}))
    bench.tick(2)

    assert nominal < until < due
    assert bench.decisions == ["dispatched"]


def test_a_pause_ends_by_itself_at_its_time(bench):
    """The time of one entry is half an hour ago, that of the other one is an hour ago."""
    bench.put("after")
    bench.put("within", every=2 * HOUR, ago=3 * HOUR)
    bench.redis.hset(PAUSES, "all", json.dumps({"since": ago(3), "until": ago(0.75)}))
    bench.tick(2)

    assert bench.names == ["after"]
    assert {(record["entry"], record["decision"]) for record in bench.history} == {
        ("after", "dispatched"),
        ("within", "paused"),
    }


def test_a_run_that_was_asked_for_runs_in_a_pause(bench):
    bench.put(ago=timedelta())
    bench.schedule.pause_many()
    asked = bench.schedule.trigger("e")
    bench.tick(2)

    assert bench.ids == [asked]


def test_a_pending_occurrence_is_left_out_in_a_pause(bench, monkeypatch):
    bench.put()
    scheduler = bench.scheduler()
    with monkeypatch.context() as patch:
        patch.setattr(OneWrite, "_may_be_possible", lambda _: False)
        patch.setattr(scheduler, "publish", lambda _: (_ for _ in ()).throw(OSError("no broker")))
        scheduler.tick()
    assert bench.pending() is not None
    bench.retry_now()
    bench.schedule.pause_many()
    scheduler.tick()

    assert bench.pending() is None
    assert bench.decisions == ["paused"]
    assert bench.meta().total_run_count == 7


@pytest.mark.parametrize("writes", ["one", "several"])
@pytest.mark.parametrize("change", ["begins", "ends"])
def test_a_pause_between_read_and_claim_is_heeded(bench, monkeypatch, request, writes, change):
    if writes == "several":
        request.getfixturevalue("several_writes")
    scheduler = bench.scheduler()
    scheduler.tick()  # the first one reads twice
    bench.put(tags=["t"])
    if change == "ends":
        bench.schedule.pause_many(tag="t")
    read = scheduler.store.due

    def due(*args: Any, **options: Any) -> Any:
        found = read(*args, **options)
        if change == "begins":
            bench.schedule.pause_many(tag="t")
        else:
            bench.redis.delete(PAUSES)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.store, "due", due)
        scheduler.tick()
    assert bench.decisions == bench.messages == []
    scheduler.tick()

    assert bench.decisions == (["paused"] if change == "begins" else ["dispatched"])


WRONG = {
    "no JSON": ("tag:t", "{"),
    "no object": ("tag:t", "[]"),
    "a deep one": ("tag:t", "[" * 100_000),
    "a number for a note": ("tag:t", '{"note": 7}'),
    "an end without offset": ("tag:t", '{"until": "2030-01-01T00:00"}'),
    "an end that is none": ("tag:t", '{"until": "tomorrow"}'),
    "an end beyond the calendar": ("tag:t", '{"until": "9999-12-31T23:59-01:00"}'),
    "an unknown selector": ("task:x", "{}"),
    "no tag": ("tag:", "{}"),
    "bytes": (b"tag:\xff", b"\xff"),
}


@pytest.mark.parametrize(("selector", "record"), WRONG.values(), ids=WRONG)
@pytest.mark.usefixtures("no_worker_is_awaited")
def test_an_unreadable_pause_stops_no_entry_and_doctor_names_it(bench, findings, logged, selector, record):
    bench.put("a", tags=["t"])
    bench.put("b", tags=["other"])
    bench.redis.hset(PAUSES, mapping={selector: record, "tag:other": "{}"})
    bench.tick(3)

    assert bench.names == ["a"]
    assert sorted(bench.decisions) == ["dispatched", "paused"]
    assert [line["level"] for line in logged("pause_unreadable")] == ["WARNING"]
    shown = selector.decode(errors="surrogateescape") if isinstance(selector, bytes) else selector
    ((level, text),) = [found for found in findings("pause") if "pauses nothing" in found[1]]
    assert level == "problem"
    assert f"To remove it: HDEL {PAUSES} " in text
    assert shown in Pauses.of([shown, "{"]).problems


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entries: entries.pause_many(tag="\ud800"), "there can be no tag '\\ud800'"),
        (lambda entries: entries.resume_many(tag="\ud800"), "there can be no tag '\\ud800'"),
        (lambda entries: entries.pause_many(note="\ud800"), "there can be no note '\\ud800'"),
        (lambda entries: entries.pause("e", "\ud800"), "there can be no note '\\ud800'"),
    ],
    ids=["tag", "tag of resume", "note", "note of an entry"],
)
def test_a_tag_or_note_that_cannot_be_encoded_is_named(bench, change, said):
    bench.put()

    with pytest.raises(EntryError) as caught:
        change(Schedule(bench.app))

    assert str(caught.value) == f"{said}: half of a surrogate pair cannot be encoded"


def test_a_key_of_pauses_that_is_no_hash_stops_no_entry(bench, cli):
    bench.put()
    bench.redis.set(PAUSES, "mine")
    bench.tick()

    assert bench.names == ["e"]
    assert "WRONGTYPE" in cli("status").output
    with pytest.raises(RedisError, match="WRONGTYPE"):
        bench.schedule.pause_many()
    assert bench.redis.get(PAUSES) == "mine"


def test_a_hundred_thousand_records_of_pauses_are_compared(bench):
    """Another program has filled the key: the tick is slow, and right."""
    bench.put(tags=["tag 99999"])
    rows = {f"tag:tag {number}": "{}" for number in range(100_000)}
    bench.redis.hset(PAUSES, mapping=rows)
    bench.tick()

    assert bench.decisions == ["paused"]


# ---------------------------------------------------------------- what programs do


def test_a_pause_that_lasts_keeps_its_beginning_and_its_note(bench):
    bench.schedule.pause_many(tag="t", note="why")
    ((_, before),) = records(bench.redis).items()
    until = datetime.now(UTC) + HOUR
    bench.schedule.pause_many(tag="t", until=until)
    (pause,) = bench.schedule.pauses()

    assert (pause.since.isoformat(), pause.note, pause.until) == (before["since"], "why", until)


def test_a_pause_says_by_whom_it_is(bench):
    from singlebeat import Schedule

    Schedule(bench.app, actor="ann").pause_many()
    (pause,) = bench.schedule.pauses()
    assert pause.by == "ann"

    Schedule(bench.app).pause_many(tag="t")
    assert "@" in bench.schedule.pauses()[1].by


def test_resume_ends_one_pause_and_says_whether_there_was_one(bench):
    bench.schedule.pause_many()
    bench.schedule.pause_many(tag="t")

    assert bench.schedule.resume_many() is True
    assert [pause.tag for pause in bench.schedule.pauses()] == ["t"]
    assert bench.schedule.resume_many() is False
    assert bench.schedule.resume_many(tag="unknown") is False


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tag": ""}, "no tag that is blank"),
        ({"tag": " "}, "no tag that is blank"),
        ({"until": datetime.now(UTC) - HOUR}, "has passed"),
        ({"until": datetime(2100, 1, 1)}, "until needs a time zone"),  # noqa: DTZ001
    ],
)
def test_a_pause_that_is_meant_otherwise_is_refused(bench, given, why):
    """An unset variable of a shell must not pause all entries."""
    with pytest.raises(EntryError, match=why):
        bench.schedule.pause_many(**given)

    assert bench.redis.exists(PAUSES) == 0


def test_pauses_that_ended_long_ago_are_forgotten(bench):
    old, late = ({"since": ago(400), "until": ago(hours)} for hours in (8 * 24, 6 * 24))
    bench.redis.hset(PAUSES, mapping={"tag:old": json.dumps(old), "tag:late": json.dumps(late), "tag:odd": "{"})
    bench.schedule.pause_many()

    assert bench.redis.hgetall(PAUSES).keys() == {"tag:late", "tag:odd", "all"}


def test_pauses_of_many_programs_at_once_are_all_kept(bench):
    """Two of them change one pause: the second one reads it again."""
    at_once(*(lambda tag=tag: bench.schedule.pause_many(tag=tag, note=tag) for tag in "aabbcc"))

    assert {pause.tag: pause.note for pause in bench.schedule.pauses()} == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("is_paused", [False, True], ids=["a pause is repeated", "a resume is repeated"])
def test_a_repetition_undoes_no_later_change_of_a_pause(bench, monkeypatch, is_paused):
    """The reply was lost, and another operator acts before the client calls again."""
    ann = Schedule(bench.new_app(), actor="ann")
    if is_paused:
        ann.pause_many(note="first")
    send = pauses.PAUSE

    def send_twice(client: Any, keys: Any, args: Any) -> Any:
        monkeypatch.setattr(pauses, "PAUSE", send)
        send(client, keys, args)
        (ann.pause_many if is_paused else ann.resume_many)()
        return send(client, keys, args)

    monkeypatch.setattr(pauses, "PAUSE", send_twice)
    bob = Schedule(bench.app, actor="bob")
    (bob.resume_many if is_paused else bob.pause_many)()

    assert [pause.by for pause in bob.pauses()] == (["ann"] if is_paused else [])
    assert [change.actor for change in bob.changes(count=2)] == ["ann", "bob"]


def test_a_pause_that_changes_each_time_is_a_conflict(bench, monkeypatch):
    read = pauses.read_pauses

    def read_and_change(client: Any, key: str) -> Pauses:
        found = read(client, key)
        client.hset(key, "all", json.dumps({"note": str(len(found.found)) + ago(0)}))
        return found

    monkeypatch.setattr(pauses, "read_pauses", read_and_change)
    with pytest.raises(ConflictError, match="keeps changing it"):
        bench.schedule.pause_many()


def test_tags_are_counted(bench):
    bench.put("a", tags=["x", "y"])
    bench.put("b", tags=["x"])
    bench.put("c")
    bench.redis.hset("redbeat:c", "policy", "{")

    assert bench.schedule.tags() == {"x": 2, "y": 1}


def test_a_record_of_a_pause_is_read_as_it_was_written():
    now = datetime.now(UTC)
    pause = Pause("t", now, now + HOUR, 'a "note"', "ann")

    assert Pauses.of(["tag:t", pause.encode()]).pauses == [pause]
    assert pause.covers(EntryPolicy(tags=("t",)))
    assert not pause.covers(EntryPolicy(tags=("tt",)))


# ---------------------------------------------------------------- what the commands say


@pytest.mark.usefixtures("no_worker_is_awaited")
def test_commands_name_the_pause_of_an_entry(bench, cli, findings):
    bench.put(tags=["billing"], ago=timedelta())
    assert cli("pause", "--tag", "billing", "--note", "audit").output.startswith("entries with tag billing are paused")
    (pause,) = bench.schedule.pauses()
    text = f"entries with tag billing are paused since {pause.since:%Y-%m-%d %H:%M:%SZ} by {pause.by} (audit)"

    assert f"pause       {text}\n" in cli("status").output
    assert json.loads(cli("status", "--json").stdout)["pauses"][0]["note"] == "audit"
    assert text in cli("list").output
    assert [row["state"] for row in json.loads(cli("list", "--json").stdout)["entries"]] == ["paused"]
    assert text in cli("show", "e").output
    shown = json.loads(cli("show", "e", "--json").stdout)
    assert (shown["state"], shown["pause"]["tag"]) == ("paused", "billing")
    resume = "celery singlebeat resume --tag billing"
    assert f"E{text[1:]}: its times pass without a run. To go on: {resume}" in cli("explain", "e").output
    ((level, found),) = findings("pause")
    assert (level, found) == ("warning", f"{text}: 1 entry is covered. To go on: {resume}")

    assert cli("resume", "--tag", "billing").output == "entries with tag billing: resumed\n"
    assert "pause " not in cli("status").output
    assert "It runs next" in cli("explain", "e").output
    assert cli("resume", "--tag", "billing").output == "entries with tag billing: they were not paused so\n"


def test_a_pause_of_all_until_a_time_of_day(bench, cli):
    cli("pause", "--all", "--until", "18:00")
    (pause,) = bench.schedule.pauses()
    assert (pause.until.hour, pause.until.minute) == (18, 0)
    assert timedelta() < pause.until - datetime.now(UTC) <= timedelta(days=1)

    cli("pause", "--all", "--until", "2100-01-01T00:00+01:00")
    assert bench.schedule.pauses()[0].until == datetime(2099, 12, 31, 23, tzinfo=UTC)


def test_a_pause_until_a_time_that_has_passed_says_what_to_do(bench, cli):
    said = cli("pause", "--all", "--until", "2000-01-01", code=2).output

    assert "until is 2000-01-01 00:00:00Z, which has passed: the time is 2" in said
    assert "Use a later time, or leave until out for a pause without an end" in said


def test_a_page_shows_the_entries_that_a_pause_of_many_covers_as_paused(bench):
    bench.put("a", tags=["t"])
    bench.put("b")
    bench.put("c", paused=True)
    bench.put("d", tags=["t"], enabled=False)
    bench.schedule.pause_many(tag="t")

    rows = {row.name: (row.state, row.pause is not None) for row in bench.schedule.page().rows}
    assert rows == {"a": ("paused", True), "b": ("active", False), "c": ("paused", False), "d": ("disabled", True)}
    assert {row.name for row in bench.schedule.page(state="paused").rows} == {"a", "c", "d"}
    assert {row.name for row in bench.schedule.page(state="active").rows} == {"b"}


def test_a_resumed_entry_that_a_tag_keeps_paused_is_named(bench, cli):
    bench.put(tags=["t"], paused=True)
    cli("pause", "--tag", "t")
    cli("pause", "--all")

    assert "celery singlebeat resume --all" in cli("resume", "e").output
    assert "celery singlebeat resume --tag t" in cli("resume", "--all").output
    assert "no entry has this tag now" in cli("pause", "--tag", "tt").output


def test_a_command_names_the_pause_that_it_replaces(bench, cli):
    bench.put()
    cli("pause", "e", "--note", "audit")
    assert "replaces" not in cli("pause", "e").output
    assert "e: paused; this replaces the note of its pause: audit" in cli("pause", "e", "--note", "lunch").output
    assert "replaces" not in cli("pause", "--all", "--note", "the database is restored").output

    said = cli("pause", "--all", "--until", "2100-01-01").output

    assert "; this replaces: all entries are paused since" in said
    assert "(the database is restored)" in said.partition("this replaces")[2]


@pytest.mark.parametrize("command", ["pause", "resume"])
@pytest.mark.parametrize("given", [(), ("e", "--all"), ("--all", "--tag", "t"), ("e", "--tag", "t")])
def test_exactly_one_of_name_tag_and_all_is_given(bench, cli, command, given):
    bench.put()

    assert "either the NAME" in cli(command, *given, code=2).output
    assert bench.redis.exists(PAUSES) == 0
