"""The record of changes: each change has one, in the same step; and an entry goes back to what it was before one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from celery.schedules import schedule
from redbeat import RedBeatSchedulerEntry
from redis.exceptions import RedisError

from singlebeat import Entry, Schedule
from singlebeat.beat.entries.definition import Meta
from singlebeat.beat.entries.save import save_entries
from singlebeat.errors import ConflictError, EntryError, UnknownEntryError
from tests.redis.bench import HOUR, Bench
from tests.support import APP, at_once

CHANGES, SCHEDULE = "redbeat::changes", "redbeat::schedule"
TASK = f"{APP}.plain"


def add(bench: Bench, name: str = "e", **fields: Any) -> Entry:
    return bench.schedule.upsert(name, TASK, 3600, **fields)


def actions(bench: Bench, name: str | None = None) -> list[tuple[str, str]]:
    """Return entry and action of all changes, the first one first."""
    return [(change.entry, change.action) for change in reversed(bench.schedule.changes(name, 1000))]


# ---------------------------------------------------------------- what is recorded


def test_every_change_says_who_made_it_and_what_differs(bench):
    ann = Schedule(bench.app, actor="ann", by="web")
    ann.upsert("e", TASK, 60, args=["a"], jitter=5)
    ann.upsert("e", TASK, 60, args=["b"], jitter=5)
    ann.pause("e", "until Monday")
    ann.resume("e")
    ann.delete("e")
    changes = ann.changes("e")

    assert {(change.actor, change.by, change.entry) for change in changes} == {("ann", "web", "e")}
    assert [change.action for change in changes] == ["delete", "resume", "pause", "edit", "add"]
    delete, resume, pause, edit, added = (change.differences for change in changes)
    assert edit == {"args": (["a"], ["b"])}
    assert pause == {"paused": (None, True), "note": (None, "until Monday")}
    assert resume == {"paused": (True, None), "note": ("until Monday", None)}
    assert added["jitter"] == (None, 5.0)
    assert delete["task"] == (TASK, None)
    assert changes[2].note == "until Monday"
    assert changes[3].before.keys() == changes[3].after.keys() == {"definition"}  # only what has changed
    assert abs(changes[0].at - datetime.now(UTC)) < timedelta(minutes=1)


def test_the_default_actor_is_the_user_on_the_host(bench):
    add(bench)
    Entry("f", TASK, schedule(60), app=bench.app).save()
    Entry.from_key("redbeat:f", app=bench.app).delete()

    assert {change.by for change in bench.schedule.changes()} == {"api"}
    assert all(change.actor.partition("@")[0] and change.actor.partition("@")[2] for change in bench.schedule.changes())


def test_a_user_without_a_name_is_an_actor():
    """As in a container whose user is in no passwd."""
    without = "from singlebeat.beat.entries import author; author.getpass.getuser = lambda: {}['no']"
    code = f"{without}; print(author._user())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip().isdigit()


def test_what_changes_nothing_is_not_recorded(bench):
    entry = add(bench)
    add(bench)
    bench.schedule.save(entry)
    bench.schedule.resume("e")
    bench.make_due()
    bench.tick(3)

    assert actions(bench) == [("e", "add")]
    assert bench.schedule.delete("nobody") is False
    with pytest.raises(UnknownEntryError):
        bench.schedule.pause("nobody")
    assert actions(bench) == [("e", "add")]


def test_a_change_that_is_refused_is_not_recorded(bench):
    mine = add(bench)
    theirs = bench.schedule.get("e")
    theirs.args = ["theirs"]
    bench.schedule.save(theirs)
    mine.args = ["mine"]
    with pytest.raises(ConflictError):
        bench.schedule.save(mine)
    with pytest.raises(EntryError):
        add(bench, jitter=-1)

    assert actions(bench) == [("e", "add"), ("e", "edit")]


def test_beat_schedule_is_an_author(bench):
    static = {"task": TASK, "schedule": HOUR}
    bench.scheduler(beat_schedule={"static": static}).tick()
    for scheduler in bench.schedulers:
        scheduler.close()
    bench.scheduler(beat_schedule={}).tick()
    bench.schedulers[-1].close()
    bench.scheduler(beat_schedule={"static": static}).tick()
    changes = bench.schedule.changes("static")

    assert [change.action for change in changes] == ["unpark", "park", "add"]
    assert {change.by for change in changes} == {"beat_schedule"}


def test_pauses_of_many_are_recorded(bench):
    ann = Schedule(bench.app, actor="ann")
    ann.pause_many(tag="t", note="why")
    ann.resume_many(tag="t")
    ann.resume_many(tag="t")
    resume, pause = bench.schedule.changes()

    assert (resume.action, pause.action, pause.actor, pause.entry, pause.note) == ("resume", "pause", "ann", "", "why")
    assert pause.before == {"tag:t": ""}
    assert json.loads(pause.after["tag:t"])["by"] == "ann"
    assert resume.before == pause.after


@pytest.mark.parametrize(
    "verb",
    [
        lambda api: api.upsert("e", TASK, 60, args=["new"]),
        lambda api: api.pause("e"),
        lambda api: api.delete("e"),
        lambda api: api.pause_many(),
    ],
    ids=["save", "pause", "delete", "pause many"],
)
def test_a_change_that_cannot_be_recorded_is_not_made(bench, redis, verb):
    add(bench)
    redis.delete(CHANGES)
    redis.set(CHANGES, "mine")
    before = redis.hgetall("redbeat:e"), redis.zrange(SCHEDULE, 0, -1, withscores=True)
    with pytest.raises(RedisError, match="WRONGTYPE"):
        verb(bench.schedule)

    assert (redis.hgetall("redbeat:e"), redis.zrange(SCHEDULE, 0, -1, withscores=True)) == before
    assert not redis.exists("redbeat::pauses")


def test_beat_schedule_is_installed_though_it_cannot_be_recorded(server, redis, bench_on, cli):
    redis.set(CHANGES, "mine")
    bench = bench_on(server, beat_schedule={"e": {"task": TASK, "schedule": 1, "args": ["e"]}})
    bench.tick()
    bench.make_due()
    bench.tick()

    assert bench.names == ["e"]
    assert f"the key {CHANGES} is no stream" in " ".join(cli("health", app=bench.app, code=1).output.split())


def test_changes_are_bounded(server, redis, bench_on):
    bench = bench_on(server, singlebeat_changes_limit=100)
    for number in range(1000):
        add(bench, args=[number])

    assert 100 <= redis.xlen(CHANGES) <= 300
    assert bench.schedule.changes("e", 1)[0].differences == {"args": ([998], [999])}


def test_with_a_limit_of_0_nothing_is_recorded(server, redis, bench_on):
    bench = bench_on(server)
    add(bench)
    bench = bench_on(server, singlebeat_changes_limit=0)
    bench.schedule.pause("e")
    bench.schedule.pause_many()
    bench.redis.hset("redbeat:e", "policy", "")
    bench.make_due()
    bench.tick()

    assert actions(bench) == [("e", "add")]
    assert redis.hget("redbeat:e", "recorded") is None


def test_of_writers_at_once_each_change_is_recorded_as_it_happened(bench):
    """Each change begins where the one before it has ended."""
    add(bench)

    def write(number: int) -> None:
        for turn in range(10):
            try:
                bench.schedule.pause("e", f"{number} {turn}")
            except ConflictError:
                continue

    at_once(*(lambda number=number: write(number) for number in range(4)))
    changes = list(reversed(bench.schedule.changes("e", 1000)))

    assert len(changes) > 10
    for one, other in pairwise(changes[1:]):
        assert other.before["policy"] == one.after["policy"]
    assert bench.redis.hget("redbeat:e", "policy") == changes[-1].after["policy"]


# ---------------------------------------------------------------- other programs


def raw(bench: Bench, every: int = 5, name: str = "e") -> None:
    definition = {"task": TASK, "args": ["e"], "schedule": {"__type__": "interval", "every": every}}
    bench.redis.hset(f"redbeat:{name}", "definition", json.dumps(definition))


def test_a_change_that_gave_an_entry_its_first_policy_is_reverted(bench):
    """Another program has made it, so that its record has not what was before; that of the addition says it."""
    bench.schedule.upsert("e", TASK, 5)
    bench.redis.hset("redbeat:e", "policy", '{"paused": true}')
    bench.schedule.upsert("e", TASK, 7)
    noticed = next(change for change in bench.schedule.changes("e") if change.by == "raw")
    assert bench.schedule.get("e").policy.paused

    bench.schedule.revert("e", noticed.id)

    assert not bench.schedule.get("e").policy.paused
    assert bench.schedule.get("e").schedule.run_every == timedelta(seconds=5)


def test_a_change_back_to_what_beat_has_read_is_recorded(bench):
    """By another program, after an edit that beat has not read."""
    raw(bench)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(3)
    first = bench.redis.hget("redbeat:e", "definition")
    bench.schedule.upsert("e", TASK, 7, args=["edited"])
    bench.redis.hset("redbeat:e", "definition", first)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})

    bench.tick(3)

    last = bench.schedule.changes("e", 1)[0]
    assert (last.by, last.after["definition"]) == ("raw", first)


def test_beat_notices_a_change_of_an_unknown_writer(bench):
    add(bench)
    raw(bench)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(3)
    noticed, added = bench.schedule.changes("e")

    assert (noticed.actor, noticed.by, noticed.action, added.action) == ("", "raw", "edit", "add")
    assert noticed.before == {"definition": added.after["definition"]}
    assert noticed.after == {"definition": bench.redis.hget("redbeat:e", "definition")}
    bench.redis.hset("redbeat:e", "policy", '{"note": "mine"}')
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(3)
    assert bench.schedule.changes("e", 1)[0].differences == {"note": (None, "mine")}
    assert len(actions(bench)) == 3


def test_the_next_change_notices_that_of_an_unknown_writer(bench):
    add(bench)
    raw(bench)
    bench.schedule.pause("e")
    pause, noticed, _ = bench.schedule.changes("e")

    assert pause.differences == {"paused": (None, True)}
    assert (noticed.by, noticed.after) == ("raw", {"definition": bench.redis.hget("redbeat:e", "definition")})
    raw(bench, every=6)
    bench.schedule.delete("e")
    delete, noticed, *_ = bench.schedule.changes("e")
    assert (delete.action, noticed.by) == ("delete", "raw")


def test_an_entry_of_an_unknown_writer_is_added_by_it(bench):
    raw(bench)
    RedBeatSchedulerEntry("redbeats", TASK, schedule(5), app=bench.app).save()
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0, "redbeat:redbeats": 0})
    bench.tick(3)

    assert sorted(actions(bench)) == [("e", "add"), ("redbeats", "add")]
    assert {change.by for change in bench.schedule.changes()} == {"raw"}


def test_the_next_change_notices_an_entry_that_an_unknown_writer_has_added(bench):
    """Its namesake was deleted without a record: a revert brings nothing of it back."""
    add(bench)
    bench.redis.delete("redbeat:e")
    bench.redis.zrem(SCHEDULE, "redbeat:e")
    raw(bench)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 4e9})
    stored = bench.redis.hget("redbeat:e", "definition")
    bench.schedule.pause("e")
    pause, added, *_ = bench.schedule.changes("e")

    assert (pause.action, added.action, added.by) == ("pause", "add", "raw")
    assert added.after == {"definition": stored, "policy": ""}
    bench.schedule.revert("e", pause.id)
    assert json.loads(bench.redis.hget("redbeat:e", "definition"))["schedule"]["every"] == 5
    assert not bench.schedule.get("e").policy.paused


def test_entries_from_before_the_record_are_no_changes(bench):
    """As after an update: the record begins with what they are."""
    bench.put()
    bench.redis.delete(CHANGES)
    bench.redis.hdel("redbeat:e", "recorded")
    bench.tick(2)
    assert actions(bench) == []

    raw(bench)
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(2)
    (change,) = bench.schedule.changes("e")
    assert (change.by, change.before) == ("raw", {})


def test_an_unchanged_entry_costs_no_call(bench):
    add(bench)
    bench.make_due()
    bench.tick(2)
    bench.redis.config_resetstat()
    bench.tick(2)
    calls = bench.redis.info("commandstats")

    assert "cmdstat_xadd" not in calls
    assert calls["cmdstat_eval"]["calls"] == 8, "four that each tick reads with"


def test_runs_go_on_if_what_was_noticed_cannot_be_recorded(bench, logged):
    add(bench)
    bench.redis.delete(CHANGES)
    bench.redis.set(CHANGES, "mine")
    raw(bench)
    bench.make_due()
    bench.tick(3)

    assert bench.names == ["e"]
    assert [line["level"] for line in logged("unrecorded")] == ["WARNING"]
    assert logged("trouble") == []


def test_an_unusable_entry_of_an_unknown_writer_is_noticed(bench):
    add(bench)
    bench.redis.hset("redbeat:e", "definition", "{")
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    bench.tick(2)
    change = bench.schedule.changes("e", 1)[0]

    assert (change.by, change.after) == ("raw", {"definition": "{"})
    assert change.differences["definition"][1] == "{"


@pytest.mark.parametrize(
    "record",
    [
        {"mine": "1"},
        {"entry": "e"},
        {"entry": "e", "before": "{", "after": "[]"},
        {"entry": "e", "before": "[" * 100_000, "after": '{"definition": 7}'},
    ],
)
def test_a_record_of_another_program_does_not_hide_the_others(bench, cli, record):
    add(bench)
    bench.redis.xadd(CHANGES, record)
    bench.schedule.pause("e")

    assert [change.action for change in bench.schedule.changes()] == ["pause", "", "add"]
    cli("changes")
    cli("changes", "--json")
    bench.schedule.revert("e", bench.schedule.changes("e", 1)[0].id)
    assert not bench.schedule.get("e").policy.paused


def test_changes_says_in_words_what_pauses_of_many_are(bench, cli):
    cli("pause", "--tag", "b", "--note", "migration", "--until", "2090-01-01T10:00")
    cli("resume", "--tag", "b")

    resumed, paused = cli("changes").output.splitlines()[1:]

    assert resumed.endswith("resume  entries with tag b: resumed")
    words = r"entries with tag b are paused since \S+ \S+Z until 2090-01-01 10:00:00Z by \S+ \(migration\)$"
    assert re.search(words, paused)


# ---------------------------------------------------------------- revert


def test_an_entry_that_another_program_removed_comes_back(bench, cli):
    bench.put("d", tags=["t"])
    cli("edit", "d", "--every", "77")
    cli("pause", "d")
    bench.redis.delete("redbeat:d")
    bench.redis.zrem("redbeat::schedule", "redbeat:d")

    explained = cli("explain", "d", code=1).stderr

    assert "there is no entry 'd' under redbeat:. Another program has removed it; its last record is of " in explained
    command = re.search(r" \(pause\)\. To bring it back: celery singlebeat (revert d --to \S+)$", explained.strip())[1]
    assert command in cli("show", "d", code=1).stderr
    id_ = command.split()[-1]
    assert cli(*command.split()).output == f"d: as it was after change {id_}\n"
    entry = bench.schedule.get("d")
    assert (entry.schedule, entry.policy.paused, entry.policy.tags) == (schedule(77), True, ("t",))
    assert bench.schedule.changes("d")[0].note == f"to after {id_}"
    assert cli(*command.split()).output == f"d: as it was before change {id_}\n", "now the entry is there"
    assert bench.schedule.changes("d")[0].note == f"to before {id_}"


def test_an_entry_of_which_only_the_history_is_left_is_said_to_be_removed(bench, cli):
    bench.put("d")
    bench.tick()
    bench.redis.delete("redbeat:d", "redbeat::changes")
    bench.redis.zrem("redbeat::schedule", "redbeat:d")

    explained = cli("explain", "d", code=1).stderr

    assert re.search(
        r"Another program has removed it; its last record is of .*Z \(celery singlebeat history d\)", explained
    )


def test_a_revert_undoes_a_change_and_all_later_ones(bench):
    add(bench, args=["first"], jitter=5)
    add(bench, args=["second"], jitter=5)
    bench.schedule.pause("e")
    add(bench, args=["third"])
    _, _, second, first = (change.id for change in bench.schedule.changes("e"))
    entry = bench.schedule.revert("e", second)

    assert (entry.args, entry.policy.jitter, entry.policy.paused) == (["first"], 5.0, False)
    stored = bench.schedule.get("e")
    assert (stored.args, stored.policy) == (entry.args, entry.policy)
    with pytest.raises(EntryError, match="has added entry 'e'"):
        bench.schedule.revert("e", first)

    revert = bench.schedule.changes("e", 1)[0]
    assert (revert.action, revert.note) == ("revert", f"to before {second}")
    bench.schedule.revert("e", revert.id)  # which undoes it
    assert (bench.schedule.get("e").args, bench.schedule.get("e").policy.paused) == (["third"], True)


def test_a_deleted_entry_comes_back_with_its_past_and_catches_nothing_up(bench):
    bench.put(max_runs=9, tags=["t"])
    before = bench.schedule.get("e")
    bench.schedule.delete("e")
    bench.schedule.revert("e", bench.schedule.changes("e", 1)[0].id)
    bench.tick(2)
    entry = bench.schedule.get("e")

    assert bench.messages == []
    assert (entry.encode(), entry.policy, entry.total_run_count) == (before.encode(), before.policy, 7)
    assert bench.score() > datetime.now(UTC).timestamp()
    assert actions(bench) == [("e", "add"), ("e", "delete"), ("e", "revert")]


def test_a_revert_gives_back_what_was_not_sent_though_its_process_dies(bench, monkeypatch):
    """It dies as soon as the entry is stored: operators see the revert as made, and repeat nothing."""
    bench.put(ago=timedelta())
    task_id = bench.schedule.trigger("e")
    bench.redis.hset("redbeat:e", "backfill", "begun")
    bench.schedule.delete("e")
    (delete, *_) = bench.schedule.changes("e")

    def die(*args: Any, **given: Any) -> None:
        save_entries(*args, **given)
        raise SystemExit

    monkeypatch.setattr("singlebeat.beat.schedule.save_entries", die)
    with pytest.raises(SystemExit):
        bench.schedule.revert("e", delete.id)
    bench.tick(2)

    assert [message.headers["id"] for message in bench.messages] == [task_id]
    assert bench.redis.hget("redbeat:e", "backfill") == "begun"


def test_a_run_that_a_revert_has_given_back_is_not_given_back_again(bench):
    bench.put(ago=timedelta())
    bench.schedule.trigger("e")
    bench.schedule.delete("e")
    (delete, *_) = bench.schedule.changes("e")
    bench.schedule.revert("e", delete.id)
    bench.tick(2)
    assert len(bench.messages) == 1
    bench.redis.delete("redbeat:e")  # by another program, so without a record

    bench.schedule.revert("e", delete.id)
    bench.tick(2)

    assert len(bench.messages) == 1


def test_an_entry_reverted_to_before_an_earlier_change_has_its_past(bench):
    """Its deletion, which is undone with that change, has recorded the past."""
    bench.put(max_runs=9)
    before = bench.schedule.get("e")
    bench.schedule.pause("e")
    bench.schedule.delete("e")
    _, pause, _ = bench.schedule.changes("e")
    bench.schedule.revert("e", pause.id)
    bench.tick(2)
    entry = bench.schedule.get("e")

    assert bench.messages == []
    assert (entry.encode(), entry.policy, entry.total_run_count) == (before.encode(), before.policy, 7)


def test_an_entry_comes_back_with_its_own_past_of_several_of_its_name(bench):
    for count, args in ((3, "first"), (5, "second")):
        bench.put(args=[args], total_run_count=count, last_run_at=datetime.now(UTC) - HOUR)
        bench.schedule.pause("e")
        bench.schedule.delete("e")
    _, pause, _, delete, earlier_pause, _ = (change.id for change in bench.schedule.changes("e"))

    for to, args, count in ((pause, "second", 5), (delete, "first", 3), (earlier_pause, "first", 3)):
        entry = bench.schedule.revert("e", to)
        assert (entry.args, entry.total_run_count) == ([args], count)
        bench.redis.delete("redbeat:e")  # by another program, so without a record


def test_an_entry_that_left_beat_schedule_comes_back_by_a_revert(bench):
    """It is an entry of its own then, and no entry of ``beat_schedule``."""

    def deploy(**entries: Any) -> None:
        bench.scheduler(beat_schedule=entries).tick()
        bench.schedulers[-1].close()

    deploy(e={"task": TASK, "schedule": HOUR})
    bench.redis.hset("redbeat:e", "meta", Meta(datetime.now(UTC) - HOUR, 7).encode())
    deploy()
    (park, _) = bench.schedule.changes("e")
    entry = bench.schedule.revert("e", park.id)

    assert (park.action, entry.task, entry.total_run_count) == ("park", TASK, 7)
    assert bench.score() > datetime.now(UTC).timestamp()
    deploy()
    assert bench.schedule.get("e").total_run_count == 7
    deploy(e={"task": TASK, "schedule": HOUR})
    deploy()
    with pytest.raises(UnknownEntryError, match="parked until"):
        bench.schedule.get("e")


def test_a_revert_needs_no_record_of_what_the_change_left_alone(bench):
    """The records of its definition are gone: the change of its policy says nothing about it."""
    add(bench, args=["a"])
    bench.redis.delete(CHANGES)
    bench.schedule.pause("e")
    (change,) = bench.schedule.changes("e")
    assert bench.schedule.revert("e", change.id).args == ["a"]
    assert not bench.schedule.get("e").policy.paused


def test_a_revert_undoes_what_an_unknown_writer_did(bench):
    add(bench, args=["a"])
    raw(bench)
    bench.schedule.pause("e")
    pause, noticed, _ = bench.schedule.changes("e")

    assert bench.schedule.revert("e", noticed.id).args == ["a"]
    assert bench.schedule.revert("e", pause.id).args == ["e"]


@pytest.mark.parametrize("at", [0, 1], ids=["the pause after it", "what the unknown writer did"])
def test_a_revert_to_what_is_not_on_record_is_refused(bench, at):
    """The record of the entry before another program changed it was trimmed: nothing may be taken for it."""
    add(bench, args=["a"])
    bench.redis.delete(CHANGES)
    raw(bench)
    bench.schedule.pause("e")
    changes = bench.schedule.changes("e")

    if at == 0:
        assert bench.schedule.revert("e", changes[0].id).args == ["e"]
        return
    with pytest.raises(EntryError, match="is not on record"):
        bench.schedule.revert("e", changes[1].id)

    assert bench.schedule.get("e").policy.paused


def test_an_unknown_change_is_an_error_that_says_what_to_do(bench):
    add(bench)
    add(bench, "other")
    (other,) = bench.schedule.changes("other")
    for name, to in (("e", "1-1"), ("e", other.id), ("nobody", other.id), ("e", "")):
        with pytest.raises(EntryError, match=rf"no record of a change '{to}' of entry '{name}'.*singlebeat changes"):
            bench.schedule.revert(name, to)


def test_what_beat_could_not_use_is_not_restored(bench):
    bench.redis.hset("redbeat:e", "definition", "{")
    bench.redis.zadd(SCHEDULE, {"redbeat:e": 0})
    add(bench)
    change, _ = bench.schedule.changes("e")
    assert change.before["definition"] == "{"
    with pytest.raises(EntryError):
        bench.schedule.revert("e", change.id)

    assert bench.schedule.get("e").task == TASK


def test_a_revert_does_not_undo_what_another_program_does_meanwhile(bench, monkeypatch):
    from singlebeat.beat import schedule as module

    add(bench, args=["a"])
    add(bench, args=["b"])
    change = bench.schedule.changes("e", 1)[0]

    class Slow(module.Changes):
        def latest(self, *args: Any) -> Any:
            thread = threading.Thread(target=lambda: add(bench, args=["theirs"]))
            thread.start()
            thread.join()
            return super().latest(*args)

    monkeypatch.setattr(module, "Changes", Slow)
    with pytest.raises(ConflictError):
        bench.schedule.revert("e", change.id)
    assert bench.schedule.get("e").args == ["theirs"]


# ---------------------------------------------------------------- the commands


def test_commands_are_recorded_as_such_and_shown(bench, cli, tmp_path):
    cli("add", "e", TASK, "--every", "60")
    cli("edit", "e", "--every", "30")
    cli("pause", "e", "--note", "audit")
    exported = tmp_path / "entries.json"
    exported.write_text(cli("export").stdout)
    cli("resume", "e")
    cli("delete", "e")
    cli("import", str(exported))
    changes = json.loads(cli("changes", "e", "--json").stdout)

    assert {change["by"] for change in changes} == {"cli"}
    assert [change["action"] for change in changes] == ["add", "delete", "resume", "pause", "edit", "add"]
    assert changes[3]["differences"]["paused"] == [None, True]
    assert changes[4]["differences"].keys() == {"schedule"}, "an absent argument and an empty one are the same"
    text = cli("changes").output
    assert "paused: null -> true" in text
    assert "audit" in text
    assert cli("changes", "-n", "1").output.count("\n") == 2

    assert f"e: as it was before change {changes[1]['id']}\n" == cli("revert", "e", "--to", changes[1]["id"]).output
    assert "no record of a change" in cli("revert", "e", "--to", "1-1", code=1).output


def test_secret_arguments_are_masked_where_changes_are_shown(bench, cli):
    add(bench, kwargs={"api_token": "alpha7", "to": "you"})
    add(bench, kwargs={"api_token": "beta7", "to": "you"})
    bench.redis.hset("redbeat:e", "definition", '{"kwargs": {"api_token": "alpha7"')  # cut off
    bench.schedule.delete("e")
    add(bench, "f", args=["x"], note="password")
    shown = cli("changes").output + cli("changes", "--json").stdout

    assert "alpha7" not in shown
    assert "beta7" not in shown
    assert 'kwargs: {"api_token": "**", "to": "you"} -> {"api_token": "**", "to": "you"}' in shown
    assert bench.schedule.changes("e")[-2].differences["kwargs"][1]["api_token"] == "beta7"  # a revert restores it


def test_a_password_in_the_name_of_a_field_is_in_no_change(bench, cli):
    add(bench)
    raw = bench.redis.hget("redbeat:e", "definition")
    bench.redis.hset("redbeat:e", "definition", json.dumps(json.loads(raw) | {"redis://:s3cret@host": 1}))
    bench.schedule.delete("e")

    text = cli("changes").output + cli("changes", "--json").stdout
    parts = [part for change in bench.schedule.changes("e") for part in change.masked_differences(bench.app)]

    assert "s3cret" not in text + "".join(parts)
    assert "redis://:**@host" in parts


def test_a_hostile_name_is_shown_escaped(bench, cli):
    add(bench, "a\nb\x1b[31m", args=["\x1b[31m"])
    add(bench, "a\nb\x1b[31m", args=["\n"])

    assert "\x1b" not in cli("changes").output
    assert "a\\nb" in cli("changes").output


def test_an_entry_removed_by_another_program_comes_back_on_time(bench, redis):
    bench.schedule.upsert("nightly", f"{APP}.plain", schedule(HOUR))
    bench.tick()
    (change,) = bench.schedule.changes("nightly")
    redis.delete("redbeat:nightly")
    redis.zrem("redbeat::schedule", "redbeat:nightly")
    bench.schedule.revert("nightly", change.id)
    bench.tick(2)

    assert bench.names == []
    assert redis.zscore("redbeat::schedule", "redbeat:nightly") > datetime.now(UTC).timestamp() + 3000


def test_an_entry_that_was_just_stored_anew_can_be_triggered(bench):
    """Though the server's clock was set back since it was deleted: ids of changes go on from the latest one."""
    add(bench)
    bench.redis.xadd(CHANGES, {"entry": "e", "actor": "", "by": "", "action": "delete"}, id="9999999999999-0")
    for _ in range(20):
        bench.schedule.delete("e")
        add(bench)
        bench.schedule.trigger("e")
        bench.redis.hdel("redbeat:e", "pending")
