"""Pages of entries: order, conditions, cursors, and what other programs may have stored."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from singlebeat import Schedule, clocked
from singlebeat.beat import page as page_module
from singlebeat.beat.entries.state import State
from singlebeat.run_results import flush_ends, record_end_of_message
from tests.redis.test_refusals import rights

SCHEDULE = "redbeat::schedule"
SORTS = ("next", "name", "last", "lateness")


@pytest.fixture
def small_slices(monkeypatch):
    """Let every search need several slices."""
    monkeypatch.setattr(page_module, "SLICE", 3)
    monkeypatch.setattr(page_module, "RECORDS", 2)
    monkeypatch.setattr(page_module, "MOST_RECORDS", 4)


def end_run(bench, name: str, outcome: str = "success", number: int = 1) -> None:
    """Record the end of a run as a worker does."""
    headers = {"id": f"{name}-{number}", "singlebeat": {"entry": name}}
    record_end_of_message(bench.app, headers, outcome, worker="celery@here", began=datetime.now(UTC).timestamp())
    flush_ends(bench.app)


def names(bench, **conditions) -> list[str]:
    """Return the names on all pages."""
    found, cursor = [], ""
    while True:
        page = bench.schedule.page(cursor=cursor, **conditions)
        found += [row.name for row in page.rows]
        if not (cursor := page.cursor):
            return found


def place(redis, **scores: float) -> None:
    """Write places into the sorted set as any program may."""
    redis.zadd(SCHEDULE, {f"redbeat:{name}": score for name, score in scores.items()})


@pytest.fixture
def five(bench, redis):
    """Five entries, of which ``e`` is never due."""
    for name in "cadbe":
        bench.put(name, ago=None)
    place(redis, c=3e9, a=1e9, d=4e9, b=2e9, e=-1)
    return bench


@pytest.mark.parametrize("size", [1, 2, 5, 50])
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({"sort": "next"}, "abcde"),
        ({"sort": "next", "descending": True}, "dcbae"),
        ({"sort": "lateness"}, "dcbae"),
        ({"sort": "lateness", "descending": True}, "abcde"),
        ({"sort": "name"}, "abcde"),
        ({"sort": "name", "descending": True}, "edcba"),
    ],
)
def test_pages_of_any_size_follow_one_another_in_order(five, small_slices, order, expected, size):
    assert names(five, size=size, **order) == list(expected)


@pytest.mark.parametrize("size", [1, 2, 50])
def test_entries_are_sorted_by_their_last_ends(five, small_slices, redis, size):
    for name in "adb":
        end_run(five, name)
    end_run(five, "a", number=2)
    end_run(five, "d", "duplicate_refused", number=2)

    assert names(five, sort="last", size=size) == [*"abdce"]
    assert names(five, sort="last", size=size, descending=True) == [*"ecdba"]
    redis.delete("redbeat::runs")
    assert names(five, sort="last", size=size) == [*"abdce"], "the stream has dropped them"


def test_a_row_tells_the_last_end_and_the_last_decision(bench):
    bench.put("a", every=timedelta(hours=1))
    bench.tick()
    end_run(bench, "a", "failure")
    end_run(bench, "a", "duplicate_refused", number=2)

    (row,) = bench.schedule.page().rows

    assert (row.name, row.task, row.state, row.why, row.is_static) == ("a", row.entry.task, "active", "", False)
    assert (row.last_end.outcome, row.last_end.worker) == ("failure", "celery@here")
    assert row.last_decision.decision == "dispatched"
    assert row.next == row.place == bench.schedule.next_runs("a", 1)[0]


def test_a_row_tells_whether_beat_schedule_has_its_entry(bench):
    bench.put("dynamic")
    bench.scheduler(beat_schedule={"static": {"task": "t", "schedule": 60}}).tick()

    assert {row.name: row.is_static for row in bench.schedule.page().rows} == {"dynamic": False, "static": True}


@pytest.mark.parametrize("sort", SORTS)
def test_a_page_needs_no_more_rights_than_the_docs_name(bench, server, redis, sort):
    bench.put("a")
    end_run(bench, "a")
    commands = [f"+{command}" for command in rights()]
    redis.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["redbeat:*"], commands=commands)
    try:
        app = bench.new_app(redbeat_redis_url=server.url.replace("://", "://reader:pw@", 1))
        page = Schedule(app).page(sort=sort, search="a", state="active")
    finally:
        redis.acl_deluser("reader")

    assert [row.name for row in page.rows] == ["a"]


def test_a_page_counts_all_entries_that_have_a_place(five):
    page = five.schedule.page(size=2)

    assert (len(page.rows), page.total) == (2, 5)
    assert abs(page.now - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("sort", SORTS)
def test_each_state_has_its_entries(bench, redis, small_slices, sort):
    bench.put("active")
    bench.put("paused", paused=True)
    bench.put("disabled", enabled=False)
    bench.put("both", enabled=False, paused=True)
    bench.put("finished", max_runs=7)
    bench.put("once", every=clocked(datetime.now(UTC) - timedelta(days=1)), ago=timedelta(hours=1))
    for name in ("broken", "broken later", "gone"):
        bench.put(name)
        redis.hset(f"redbeat:{name}", "definition", "{")
    redis.delete("redbeat:gone")
    redis.zadd(SCHEDULE, {"redbeat:broken later": 4e9, "redbeat:gone": 4e9})
    bench.tick()

    found = {state: sorted(names(bench, state=state, sort=sort, size=1)) for state in State}

    assert found == {
        "active": ["active"],
        "paused": ["both", "paused"],
        "disabled": ["both", "disabled"],
        "finished": ["finished", "once"],
        "quarantined": ["broken"],
        "unusable": ["broken later", "gone"],
    }


@pytest.mark.parametrize("sort", SORTS)
def test_search_finds_a_string_in_name_or_task(bench, redis, small_slices, sort):
    for number in range(7):
        bench.put(f"other {number}")
    bench.put("Nightly Bill", task="shop.send")
    bench.put("morning", task="shop.BILLING", args=["x\\y"])
    bench.put("bühne", task="shop.büro")
    bench.put("as argument", args=["bill"])
    redis.hset("redbeat:raw", "definition", json.dumps({"task": "shop.büro2", "schedule": 60}, ensure_ascii=False))
    redis.zadd(SCHEDULE, {"redbeat:raw": 0})

    assert sorted(names(bench, search="bill", sort=sort)) == ["Nightly Bill", "morning"]
    assert sorted(names(bench, search="BüRO", sort=sort)) == ["bühne", "raw"]
    assert names(bench, search="BüHNE", sort=sort) == ["bühne"]
    assert names(bench, search="nothing", sort=sort) == []
    assert names(bench, search="%d+", sort=sort) == [], "it is no pattern"


def test_conditions_hold_together(bench, small_slices):
    bench.put("a bill", task="shop.bill", paused=True)
    bench.put("b bill", task="shop.bill")
    bench.put("c bill", task="shop.bill.more", paused=True)
    bench.put("d", task="shop.bill", paused=True)

    assert names(bench, task="shop.bill", sort="name") == ["a bill", "b bill", "d"]
    assert names(bench, task="shop.bill", state="paused", search="bill ") == []
    assert names(bench, task="shop.bill", state="paused", search=" BILL", sort="name") == ["a bill"]


def test_an_entry_by_its_bare_name_is_on_a_page(bench, redis):
    bench.put("a")
    redis.zrem(SCHEDULE, "redbeat:a")
    redis.zadd(SCHEDULE, {"a": 5})

    assert [row.state for row in bench.schedule.page().rows] == ["active"]
    assert names(bench, search="a", sort="name") == ["a"]


@pytest.mark.parametrize("sort", SORTS)
def test_no_stored_data_spoils_a_page(bench, redis, small_slices, sort):
    """Keys of other types, names in any bytes, and histories that are none."""
    bench.put("good")
    redis.set("redbeat:string", "x")
    redis.rpush("redbeat:list", "x")
    raw = bench.server.client(decode_responses=False)
    definition = redis.hget("redbeat:good", "definition")
    for name in (b"\xff\xfe", b"new\nline", b"<script>", b"redbeat:", b"", "\U0001f600".encode()):
        raw.hset(b"redbeat:" + name, "definition", definition)
        raw.zadd(SCHEDULE, {b"redbeat:" + name: 1})
    for number, text in enumerate(
        ('["x"]', '["1-1","i","success","","","much","w"]', "[1]", "{}", '["9-9",[],{},1,2,3,4]')
    ):
        redis.hset(
            f"redbeat:h{number}", mapping={"definition": definition, "runs": f"{text}\n", "history": f"{text}\n"}
        )
        redis.zadd(SCHEDULE, {f"redbeat:h{number}": "inf"})
    redis.zadd(SCHEDULE, {"redbeat:string": 2, "redbeat:list": "-inf", "redbeat:no hash": 1e300})
    redis.set("redbeat::runs", "no stream")
    redis.hset("redbeat::quarantine", "redbeat:good", "no JSON")

    found = names(bench, sort=sort, size=2)

    assert sorted(found) == sorted(
        bench.schedule.keys.name(member) for member in bench.schedule._client.zrange(SCHEDULE, 0, -1)
    )
    assert {"string", "list"} <= {*names(bench, sort=sort, state="unusable")}
    assert names(bench, sort=sort, search="STRING", task="") == ["string"]
    rows = {row.name: row for row in bench.schedule.page(sort=sort).rows}
    assert (rows["good"].state, rows["good"].why) == ("quarantined", "no JSON")
    assert {rows[name].state for name in ("string", "list", "no hash")} == {"unusable"}
    assert rows["string"].why.startswith("its key holds something else")
    assert rows["h1"].last_end is None


def test_entries_that_move_on_while_one_pages_by_name_are_all_seen_once(five, small_slices, redis):
    first = five.schedule.page(sort="name", size=2)
    place(redis, a=9e9, c=8e9, d=-1, e=1)

    second = five.schedule.page(sort="name", size=5, cursor=first.cursor)

    assert [row.name for row in (*first.rows, *second.rows)] == [*"abcde"]
    assert second.cursor == ""


def test_a_cursor_holds_its_place_when_its_entry_moves_or_goes(five, redis):
    first = five.schedule.page(size=2)
    place(redis, b=5e9)
    assert [row.name for row in five.schedule.page(cursor=first.cursor).rows] == [*"cdbe"]

    redis.zrem(SCHEDULE, "redbeat:b")
    assert [row.name for row in five.schedule.page(cursor=first.cursor).rows] == [*"cde"]


def test_entries_of_one_time_are_paged_through_by_their_bytes(bench, redis, small_slices):
    wanted = sorted(["Z", "a", "b", "ä", "aa", "_", "-", "a b"], key=str.encode)
    for name in wanted:
        bench.put(name)
        redis.zadd(SCHEDULE, {f"redbeat:{name}": 7})

    assert names(bench, size=1) == wanted
    assert names(bench, size=1, descending=True) == wanted[::-1]


def test_a_page_that_finds_little_ends_early_with_a_cursor(five, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_DECODED", 2)

    page = five.schedule.page(state="unusable")

    assert (list(page.rows), bool(page.cursor)) == ([], True)
    assert names(five, state="unusable") == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"size": 0}, "size"),
        ({"size": 1001}, "size"),
        ({"sort": "task"}, "sort"),
        ({"state": "on"}, "state"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": "é"}, "cursor"),
        ({"cursor": "W10="}, "cursor"),
        ({"cursor": "WyJuZXh0IiwgZmFsc2UsICJ4IiwgInkiXQ=="}, "cursor"),
    ],
)
def test_a_wrong_argument_of_a_page_is_named(five, wrong, named):
    with pytest.raises(ValueError, match=named):
        five.schedule.page(**wrong)


def test_the_cursor_of_another_order_is_refused(five):
    cursor = five.schedule.page(size=2).cursor

    with pytest.raises(ValueError, match="cursor"):
        five.schedule.page(sort="name", cursor=cursor)
    with pytest.raises(ValueError, match="cursor"):
        five.schedule.page(descending=True, cursor=cursor)


def test_an_empty_schedule_has_an_empty_page(bench):
    for sort in SORTS:
        page = Schedule(bench.app).page(sort=sort)
        assert (list(page.rows), page.cursor, page.total) == ([], "", 0)


# ---------------------------------------------------------------- the last decisions about the entries of a page


def decide(bench, name: str, times: int) -> None:
    """Let an entry run, and its runs end."""
    for number in range(times):
        bench.make_due(name)
        bench.tick()
        headers = {"id": bench.history[-1]["id"], "singlebeat": {"entry": name}}
        record_end_of_message(bench.app, headers, f"end {number}", worker="celery@here")
    flush_ends(bench.app)


def test_the_histories_of_several_entries_are_those_of_each(bench, redis):
    for name in ("busy", "rare", "never", "other"):
        bench.put(name, overlap="allow_all", ago=timedelta())
    decide(bench, "rare", 1)
    decide(bench, "busy", 9)
    decide(bench, "other", 2)

    found = bench.schedule.histories(["busy", "rare", "never"], 7)

    assert found == {name: bench.schedule.history(name, 7) for name in ("busy", "rare", "never")}
    assert [record.end.outcome for record in found["busy"]] == [f"end {number}" for number in range(8, 1, -1)]
    redis.delete("redbeat::history", "redbeat::runs")
    assert 0 < len(bench.schedule.histories(["busy"], 7)["busy"]) < 7, "its own"


def test_the_history_of_an_entry_that_keeps_all_of_it_costs_no_search(bench, redis):
    bench.put("rare", overlap="allow_all", ago=timedelta())
    decide(bench, "rare", 1)
    redis.config_resetstat()

    assert len(bench.schedule.histories(["rare", "unknown"], 30)["rare"]) == 1

    assert "cmdstat_xrevrange" not in redis.info("commandstats")


def test_histories_that_are_none_are_left_out(bench, redis):
    bench.put("good", overlap="allow_all", ago=timedelta())
    decide(bench, "good", 1)
    bench.put("bad")
    redis.hset("redbeat:bad", "history", '["1-1","no time","k","d","r","i","t","h","l","e"]\n' * 30)
    for number, line in enumerate(
        ('["x",1,2,3,4,5,6,7,8,9]', '["x","","","","","","","","",""]', '["1-1",[],{},1,2,3,4,5,6,7]')
    ):
        redis.hset(f"redbeat:bad{number}", "history", f"{line}\n" * 30)
    redis.set("redbeat:string", "x")

    found = bench.schedule.histories(["good", "bad", "bad0", "bad1", "bad2", "string", "redbeat:", ":schedule"], 30)

    assert {name: len(records) for name, records in found.items() if records} == {"good": 1}


# ---------------------------------------------------------------- the command


def listed(cli, *options: str) -> list[str]:
    return [row["name"] for row in json.loads(cli("list", "--json", *options).stdout)["entries"]]


def test_the_list_has_conditions_an_order_and_a_limit(bench, cli):
    bench.put("b bill", task="shop.bill")
    bench.put("a bill", task="shop.bill", paused=True)
    bench.put("c", task="shop.other")

    assert listed(cli, "--sort", "name") == ["a bill", "b bill", "c"]
    assert listed(cli, "--sort", "name", "--limit", "2") == ["a bill", "b bill"]
    assert listed(cli, "--search", "OTHER") == ["c"]
    assert listed(cli, "--task", "shop.bill", "--state", "paused") == ["a bill"]
    assert "NAME" in cli("list", "--search", "nothing").output
    assert cli("list", "--state", "on", code=2)


def test_the_list_tells_how_the_last_run_ended_and_when(bench, cli):
    bench.put("a")
    bench.put("never")
    end_run(bench, "a", "time_limit")

    rows = {row["name"]: row["last_end"] for row in json.loads(cli("list", "--json").stdout)["entries"]}

    assert (rows["a"]["outcome"], rows["a"]["worker"], rows["never"]) == ("time_limit", "celery@here", None)
    lines = {line.split()[0]: line for line in cli("list").output.splitlines()}
    assert re.search(r"time_limit \d+ s", lines["a"])
    assert " -  " in lines["never"]


def test_a_part_of_the_list_names_only_its_own_problems(bench, cli, redis):
    bench.put("good")
    for name in ("bad", "worse"):
        bench.put(name)
        redis.hset(f"redbeat:{name}", "definition", "{")
    bench.tick()

    output = cli("list", "--search", "bad").output

    assert "bad: quarantined" in output
    assert "worse" not in output
    assert "worse: quarantined" in cli("list").output
