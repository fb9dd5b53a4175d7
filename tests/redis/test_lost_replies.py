"""A script whose reply is lost has run: the client sends it once more, and what it says then must be the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from singlebeat import Schedule, signals
from singlebeat.beat.entries.entry import DELETE
from singlebeat.beat.entries.fields import SAVE
from singlebeat.beat.entries.occurrence import Occurrence
from singlebeat.beat.entries.pauses import PAUSE
from singlebeat.beat.entries.statics import OWN, PARK, UNPARK
from singlebeat.beat.leadership.lease import resign
from singlebeat.beat.one_write import OneWrite
from singlebeat.beat.schedule import PROPOSE
from singlebeat.beat.store.changes import NOTICE
from singlebeat.beat.store.claims import SETTLE
from singlebeat.beat.store.dispatches import DISPATCH
from singlebeat.beat.store.probe import _SHOWN_BY
from singlebeat.connections import schedule_client
from singlebeat.lua import Script, packed, script
from tests.proxy import LossyProxy
from tests.redis.bench import Bench
from tests.support import APP, ROOT, RedisServer, connected, contents

PLAIN = "tests.system.apps.plain"
SCHEDULE, PENDING, HISTORY = "redbeat::schedule", "redbeat::pending", "redbeat::history"
LOCK, LEADER, TERM = "redbeat::lock", "redbeat::leader", "redbeat::term"
PAUSES, CHANGES = "redbeat::pauses", "redbeat::changes"
AUTHOR = ("ann", "cli", 10)
STANDBYS, RESIGNED = "redbeat::standbys", "redbeat::resigned"
HOUR = timedelta(hours=1)
DONE = "It may have been done all the same: before you repeat it, see"
#: The packages that hold the scripts of beat, by the names of these.
SCRIPTS = {path.stem: ".".join(path.relative_to(ROOT).parts[:-1]) for path in (ROOT / "singlebeat/beat").rglob("*.lua")}

# ---------------------------------------------------------------- each script, twice


def sha_of(redis: Redis, key: str = "redbeat:e") -> str:
    fields = redis.hmget(key, "definition", "meta", "policy", "since", "pending")
    return redis.eval("return redis.sha1hex(ARGV[1])", 0, "\0".join(field or "" for field in fields))


def claim(
    redis: Redis, *, token: str = "t", leads: int = 1, meta: str = "new", occurrence: str = ""
) -> tuple[list[str], list[Any]]:
    redis.hset("redbeat:e", mapping={"definition": "d", "meta": "m", "since": "s"})
    redis.zadd(SCHEDULE, {"redbeat:e": 5})
    redis.set(LOCK, token)
    row = ("redbeat:e", 5, sha_of(redis), "7.25", meta, "", occurrence)
    return [LOCK, SCHEDULE, PENDING, PAUSES, "redbeat:e"], [token, "30.123456", packed([row]), "[]", leads]


def retake(redis: Redis) -> tuple[list[str], list[Any]]:
    redis.set(LOCK, "t")
    redis.zadd(PENDING, {"redbeat:e": 5})
    return [LOCK, PENDING], ["t", "30.123456", packed([("redbeat:e", 5, "redbeat:e")])]


def confirm(redis: Redis, *, pending: str, limit: int = 10) -> tuple[list[str], list[Any]]:
    redis.hset("redbeat:e", mapping={"definition": "d", "history": '["1-0","then"]\n'})
    if pending:
        redis.hset("redbeat:e", "pending", pending)
        redis.zadd(PENDING, {"redbeat:e": 5})
    record = ["e", PLAIN, "2030-01-01", "scheduled", "paused", 'a "note"', "id", "3", "", "host:1", ""]
    since = ["s", "new"] if pending else []
    redis.hset("redbeat:e", "since", "s")
    return [PENDING, HISTORY, "redbeat:e"], [
        limit,
        600,
        packed([("redbeat:e", pending, "", since, record, "5.5" if pending else "")]),
    ]


def dispatch(redis: Redis, *, only: str = "acquired", fence: str = "t") -> tuple[list[str], list[Any]]:
    """A run with a lock, and one without."""
    keys, (_, retry_at, claims, pauses, leads) = claim(redis, occurrence="o")
    redis.set(LOCK, fence)
    redis.hset("redbeat:f", "definition", "d")
    redis.zadd(SCHEDULE, {"redbeat:f": 5})
    rows = [*json.loads(claims), ("redbeat:f", 5, sha_of(redis, "redbeat:f"), "7.25", "new", "", "p")]
    record = [PLAIN, "2030-01-01", "scheduled", "dispatched", "", "id", "3", "", "host:1", ""]
    decisions = [
        (f"redbeat:{name}", pending, "", [], [name, *record], "5.5") for name, pending in (("e", "o"), ("f", "p"))
    ]
    call = ("id", "0", 9000, 0, PLAIN, "", "", "", "e", only, "note")
    redis.mset({"broker": "1", "locks": "2"})
    where = ["broker", "locks", "sent", *keys[:3], HISTORY, PAUSES, "redbeat:e", "redbeat:f"]
    args = ["1 2", "", "", 0, "7", 9000, "t", retry_at, leads, 10, 600, pauses, packed(rows), packed([call])]
    messages = packed([(only, 1), ("", 1)])
    sent = ["lpush", "first", "lpush", "second"]
    return [*where, "lock", "done", "behind", "turn", "celery", "celery"], [*args, packed(decisions), messages, *sent]


def settle(redis: Redis, *, leads: int = 1) -> tuple[list[str], list[Any]]:
    """An entry with a decision that sends nothing, and one whose occurrence is claimed."""
    keys, (token, retry_at, claims, found, _) = claim(redis)
    redis.hset("redbeat:f", "definition", "d")
    redis.zadd(SCHEDULE, {"redbeat:f": 5})
    rows = [*json.loads(claims), ("redbeat:f", 5, sha_of(redis, "redbeat:f"), "7.25", "new", "", "p")]
    record = ["e", PLAIN, "2030-01-01", "scheduled", "paused", "", "id", "3", "", "host:1", ""]
    decisions = packed([("redbeat:e", "", "", [], record, ""), ()])
    args = [token, retry_at, packed(rows), found, leads, 10, 600, decisions]
    return [*keys[:4], HISTORY, "redbeat:e", "redbeat:f"], args


def save(
    redis: Redis, found: list[Any], fields: list[Any], *, token: str = "", unsent: object = False
) -> tuple[list[str], list[Any]]:
    redis.set(LOCK, "t")
    names = ("definition", "meta", "policy", "since")
    if stored := {name: value for name, value in zip(names, found, strict=True) if value}:
        redis.hset("redbeat:e", mapping=stored)
    redis.set("redbeat::lost", "then why")
    row = ("redbeat:e", "e", found, fields, "7", unsent)
    touched = [LOCK, SCHEDULE, CHANGES, "redbeat::lost", PENDING, "redbeat:e"]
    return touched, [token, *AUTHOR, "edit", "why", "call", packed([row])]


def record(redis: Redis, *, recorded: str = "", wanted: str = "d") -> tuple[list[str], list[Any]]:
    """Of what another program has changed; else a script that uses it has checked for a repetition before."""
    redis.hset("redbeat:e", mapping={"definition": "d", "policy": "p", "recorded": recorded})
    return [CHANGES, "redbeat:e"], ["", "raw", 10, "e", "edit", "", wanted, "p", "d", "p"]


def notice(redis: Redis, *, recorded: str = "") -> tuple[list[str], list[Any]]:
    keys, _ = record(redis, recorded=recorded)
    if not recorded:
        redis.hdel("redbeat:e", "recorded")
    return keys, [10, packed([("e", True)])]


def delete(redis: Redis) -> tuple[list[str], list[Any]]:
    parked(redis)
    redis.hset("redbeat::quarantine", "redbeat:e", "why")
    redis.zadd(SCHEDULE, {"redbeat:e": 5})
    redis.zadd(PENDING, {"redbeat:e": 5})
    keys = [SCHEDULE, PENDING, "redbeat::quarantine", "redbeat::owners", "redbeat::parked:e", CHANGES, "redbeat:e"]
    stored = [redis.hget("redbeat:e", name) or "" for name in ("definition", "policy", "written")]
    return keys, ["e", *AUTHOR, json.dumps(stored), "call"]


def propose(redis: Redis, *, task_id: str = "id", found: str = "", at: str = "") -> tuple[list[str], list[Any]]:
    redis.hset("redbeat:e", mapping={"definition": "d", **({"backfill": found} if found else {})})
    return ["redbeat:e", PENDING, CHANGES], ["redbeat:e", task_id, f'{{"id": "{task_id}"}}', found, at, "e", "0-0"]


def campaign(redis: Redis, *, leader: str = "") -> tuple[list[str], list[Any]]:
    if leader:
        redis.set(LOCK, leader)
    stands_by = ['{"host": "host", "ahead": 5}', 9000, '{"host": "host"}']
    return [LOCK, LEADER, TERM, STANDBYS, RESIGNED], ["t", 9000, "", *stands_by, "host:1", "host", "host", "pid", 1]


def resigned(redis: Redis) -> tuple[list[str], list[Any]]:
    redis.set(LOCK, "t")
    redis.hset(LEADER, mapping={"host": "host", "pid": 1})
    redis.zadd(STANDBYS, {"another": 9e15})
    return [LOCK, LEADER, STANDBYS, RESIGNED], ["t", "", 9000]


def renewed(redis: Redis) -> tuple[list[str], list[Any]]:
    redis.set(LOCK, "t")
    redis.set(TERM, 3)
    redis.hset(LEADER, "ahead", "5.0")
    return [LOCK, LEADER, TERM], ["t", 9000, 3, "ahead", "5.0"]


def parked(redis: Redis, *, token: str = "t") -> tuple[list[str], list[Any]]:
    redis.hset("redbeat:e", mapping={"definition": "d", "policy": "p"})
    redis.hset("redbeat::owners", "e", "app")
    redis.sadd("redbeat::statics", "e")
    redis.set(LOCK, "t")
    keys = [LOCK, SCHEDULE, PENDING, "redbeat::quarantine", "redbeat::statics", "redbeat::owners", CHANGES]
    return [*keys, "redbeat:e", "redbeat::parked:e"], [token, "app", 90_000, *AUTHOR, packed([("e", "app", "", True)])]


def unparked(redis: Redis, *, token: str = "t") -> tuple[list[str], list[Any]]:
    redis.hset("redbeat::parked:e", mapping={"definition": "d", "policy": "p", "dropped_by": "app"})
    redis.set(LOCK, "t")
    return [LOCK, CHANGES, PENDING, "redbeat:e", "redbeat::parked:e"], [token, "app", *AUTHOR, packed([("e", "s")])]


def owned(redis: Redis, *, token: str = "t") -> tuple[list[str], list[Any]]:
    redis.set(LOCK, "t")
    return [LOCK, "redbeat::statics", "redbeat::owners"], [token, packed(["e", "app"])]


def pause(redis: Redis, *, found: str = "") -> tuple[list[str], list[Any]]:
    redis.hset(PAUSES, mapping={"tag:over": "long ago", **({"all": found} if found else {})})
    over = packed(["tag:over", "long ago"])
    record = '{"until": "then", "written": "call"}'
    return [PAUSES, CHANGES], ["all", found, record, over, *AUTHOR, "pause", "why", "call"]


def placed(redis: Redis) -> tuple[list[str], list[Any]]:
    redis.set(LOCK, "t")
    redis.zadd(SCHEDULE, {"redbeat:e": 5})
    return [LOCK, SCHEDULE, "redbeat::zone"], ["t", "UTC", "3", "redbeat:e"]


CALLS: dict[str, Callable[[Redis], tuple[list[str], list[Any]]]] = {
    "campaign": campaign,
    "campaign, another leads": lambda redis: campaign(redis, leader="another"),
    "claim": lambda redis: claim(redis, occurrence="o"),
    "claim, no leadership": lambda redis: claim(redis, token="", leads=0, occurrence="o"),
    "claim, moved on": claim,
    "claim, moved on without a new past": lambda redis: claim(redis, meta="", token="", leads=0),
    "confirm": lambda redis: confirm(redis, pending="o"),
    "confirm, not claimed": lambda redis: confirm(redis, pending=""),
    "dispatch": dispatch,
    "dispatch, another lock than expected": lambda redis: dispatch(redis, only="waiting"),
    "dispatch, another leads": lambda redis: dispatch(redis, fence="another"),
    "bare": lambda _: (["redbeat:redbeat:e"], ["redbeat:e"]),
    "called": lambda _: ([CHANGES], ["call"]),
    "delete": delete,
    "note_time": lambda redis: (["redbeat::clock"], ["", "5.0"]),
    "notice": notice,
    "notice, changed": lambda redis: notice(redis, recorded="of another definition"),
    "fenced": lambda redis: (placed(redis)[0][:1], ["another"]),
    "own": owned,
    "own, another leads": lambda redis: owned(redis, token="another"),
    "park": parked,
    "park, another leads": lambda redis: parked(redis, token="another"),
    "pause": pause,
    "pause, ended": lambda redis: pause(redis, found='{"since": "now"}'),
    "pauses": lambda redis: (pause(redis)[0][:1], []),
    "permitted": lambda redis: (["redbeat:e"], ["HDEL"]),
    "place": placed,
    "probe": lambda _: (["redbeat::doctor"], ['[["SET", "1"], ["DEL"]]']),
    "propose": propose,
    "record": lambda redis: record(redis, recorded="of another definition"),
    "propose, first of a backfill": lambda redis: propose(redis, at="a"),
    "propose, next of a backfill": lambda redis: propose(redis, found="a", at="b"),
    "propose, end of a backfill": lambda redis: propose(redis, task_id="", found="a"),
    "read": lambda redis: (propose(redis)[0][:1], ["definition"]),
    "candidates": lambda redis: (["redbeat::quarantine", *propose(redis)[0][:1]], ["redbeat:", "e", "", "", ""]),
    "last_ends": lambda redis: (propose(redis)[0][:1], ["postponed"]),
    "last_records": lambda redis: (confirm(redis, pending="")[0][1:2], ["1-1"]),
    "members": lambda redis: (placed(redis)[0][1:2], ["all", "up", 10, "", ""]),
    "records": lambda redis: (confirm(redis, pending="")[0][1:2], ["", 10, "", "postponed"]),
    "renew": renewed,
    "resign": resigned,
    "retake": retake,
    "save, new": lambda redis: save(redis, [False] * 4, ["d", "m", "", ""]),
    "save, back": lambda redis: save(redis, [False] * 4, ["d", "m", "", ""], unsent=["id", "occurrence", "backfill"]),
    "save, edited": lambda redis: save(redis, ["d", "m", "p", False], ["new", "m", "p", "s"]),
    "save, paused": lambda redis: save(redis, ["d", "m", False, False], ["d", False, "p", False]),
    "save, another leads": lambda redis: save(redis, ["d", "m", "p", False], ["new", "m", "p", "s"], token="another"),
    "settle": settle,
    "time": lambda _: ([SCHEDULE], []),
    "unpark": unparked,
    "unpark, another leads": lambda redis: unparked(redis, token="another"),
    "window": lambda redis: (placed(redis)[0][1:2], [0, "6", 0, 10]),
    "witnesses": lambda redis: ([*placed(redis)[0][1:2], "redbeat::placed"], []),
    "save, resumed": lambda redis: save(redis, ["d", "m", "p", False], ["d", False, "", "s"]),
}


#: What they say decides about a line in the log, and nothing else.
SAY_SOMETHING_ELSE = {"note_time", "notice, changed", "notice", "park", "record", "unpark"}

#: The scripts that call others.
CALLING = {
    "delete": DELETE,
    "dispatch": DISPATCH,
    "notice": NOTICE,
    "own": OWN,
    "park": PARK,
    "pause": PAUSE,
    "propose": PROPOSE,
    "save": SAVE,
    "settle": SETTLE,
    "unpark": UNPARK,
}

WRITE_NOTHING = {
    *(
        "bare",
        "called",
        "candidates",
        "fenced",
        "last_ends",
        "last_records",
        "members",
        "pauses",
        "permitted",
        "probe",
        "read",
        "records",
        "renew",
        "time",
        "window",
        "witnesses",
    ),
}


def beat_script(name: str) -> Script:
    return CALLING.get(name) or script(SCRIPTS[name], name)


def without_time(call: str, reply: Any) -> Any:
    """Return what a script says but for the server's time."""
    return reply[:-2] if call.startswith(("campaign", "time")) else reply


def test_every_script_is_among_them():
    assert {call.split(",")[0] for call in CALLS} == SCRIPTS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_a_repeated_script_says_the_same_and_writes_nothing_more(redis, call):
    keys, args = CALLS[call](redis)
    run = beat_script(call.split(",")[0])
    before = contents(redis, but=[STANDBYS])
    first = without_time(call, run(redis, keys, args))
    after = contents(redis, but=[STANDBYS])

    assert (without_time(call, run(redis, keys, args)) == first) is (call not in SAY_SOMETHING_ELSE)
    assert contents(redis, but=[STANDBYS]) == after
    is_fenced = call.endswith(", another leads") and not call.startswith("dispatch")  # which keeps its reply
    assert (after == before) is (is_fenced or call in WRITE_NOTHING)


def test_an_occurrence_that_was_sent_meanwhile_is_not_proposed_again(redis):
    keys, args = propose(redis)
    run = beat_script("propose")
    run(redis, keys, args)
    redis.hdel("redbeat:e", "pending")
    redis.delete(PENDING)

    assert run(redis, keys, args) == "proposed"
    assert redis.hget("redbeat:e", "pending") is None


@pytest.mark.parametrize("others", [1, 20])
def test_an_occurrence_is_not_proposed_again_after_others_were(redis, others):
    for task_id in ("ours", *(str(uuid4()) for _ in range(others)), "ours"):
        keys, args = propose(redis, task_id=task_id)
        assert beat_script("propose")(redis, keys, args) == "proposed"
        pending = redis.hget("redbeat:e", "pending")
        redis.hdel("redbeat:e", "pending")
        redis.delete(PENDING)

    assert pending is None


def test_an_edit_is_stored_though_a_beat_has_claimed_the_entry_meanwhile(redis):
    keys, args = CALLS["save, edited"](redis)
    run = beat_script("save")
    run(redis, keys, args)
    redis.hset("redbeat:e", "meta", "claimed")
    redis.hdel("redbeat:e", "since")

    assert json.loads(run(redis, keys, args)) == [True]
    assert redis.hget("redbeat:e", "meta") == "claimed"


def _anew(schedule: Schedule) -> None:
    """Delete an entry, and store it as it was at first."""
    schedule.delete("e")
    put(schedule)


def _raw(schedule: Schedule) -> None:
    """Store an entry as another program does, again and again."""
    fields = {"definition": '{"task": "t", "schedule": {"__type__": "interval", "every": 60}}'}
    schedule._client.hset("redbeat:e", mapping=fields)
    schedule._client.zadd(SCHEDULE, {"redbeat:e": 5})


def _back(schedule: Schedule) -> None:
    """Delete an entry, and revert that and what was before."""
    schedule.delete("e")
    schedule.revert("e", schedule.changes("e")[0].id)
    put(schedule)
    schedule.resume("e")


def put(schedule: Schedule) -> None:
    schedule.upsert("e", f"{APP}.plain", 3600, args=["e"])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(lambda entries: entries.delete("e"), put, id="delete and add"),
        pytest.param(lambda entries: entries.pause("e"), lambda entries: entries.resume("e"), id="pause and resume"),
        pytest.param(
            lambda entries: entries.pause_many(tag="t"),
            lambda entries: entries.resume_many(tag="t"),
            id="pause and resume many",
        ),
        pytest.param(
            lambda entries: entries.upsert("e", f"{APP}.plain", 60, args=["other"]), put, id="edit and edit back"
        ),
        pytest.param(
            lambda entries: entries.trigger("e"), lambda entries: entries.delete("e"), id="trigger and delete"
        ),
        *(
            pytest.param(first, store, id=f"{what}, delete and {name}")
            for what, first in (
                ("trigger", lambda entries: entries.trigger("e")),
                ("pause", lambda entries: entries.pause("e")),
                ("edit", lambda entries: entries.upsert("e", f"{APP}.plain", 60, args=["other"])),
            )
            for name, store in (("add", _anew), ("revert", _back))
        ),
        pytest.param(lambda entries: entries.delete("e"), _raw, id="delete and raw"),
        pytest.param(
            lambda entries: entries.pause_many(),
            lambda entries: entries._client.delete(PAUSES),
            id="pause of many, and its raw end",
        ),
    ],
)
def test_a_copy_of_a_call_that_is_late_undoes_nothing(bench, redis, monkeypatch, first, then):
    """A network holds the first request back; the client repeats it, and others change the entry since then."""
    put(bench.schedule)
    if then is _raw:
        redis.delete("redbeat:e")
        then(bench.schedule)
    calls = list[tuple[Script, Any, Any]]()
    run = Script.__call__

    def noting(called: Script, client: Redis, keys: Any, args: Any) -> Any:
        calls.append((called, keys, args))
        return run(called, client, keys, args)

    with monkeypatch.context() as patch:
        patch.setattr(Script, "__call__", noting)
        first(bench.schedule)
    then(bench.schedule)
    before = contents(redis)

    for called, keys, args in calls:
        run(called, redis, keys, args)

    assert contents(redis) == before


# ---------------------------------------------------------------- a connection that ends before the reply


@pytest.fixture
def proxy(server: RedisServer, redis: Redis) -> Iterator[LossyProxy]:
    with LossyProxy(server) as proxy:
        yield proxy


@pytest.fixture
def bench(server: RedisServer, proxy: LossyProxy, bench_on) -> Bench:
    """A bench whose schedule lies behind the proxy; its broker and locks do not."""
    return bench_on(server, redbeat_redis_url=proxy.url, singleton_backend_url=server.url)


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [
        ("claim", {"e": "dispatched"}),
        ("settle", {"e": "dispatched", "paused": "paused", "late": "missed"}),
        ("confirm", {"e": "dispatched", "paused": "paused", "late": "missed"}),
    ],
)
def test_a_tick_does_its_work_though_a_reply_is_lost(bench, redis, proxy, caplog, monkeypatch, name, outcomes):
    told = []
    if name != "settle":  # as with another broker
        monkeypatch.setattr(OneWrite, "_may_be_possible", lambda _: False)
    wishes = {"e": {}, "paused": {"paused": True}, "late": {"misfire_grace_time": 1}}
    for entry in outcomes:
        bench.put(entry, **wishes[entry])
    proxy.lose_reply_of(beat_script(name))

    with connected(signals.occurrence_decided, lambda decision, **_: told.append(decision.outcome.value)):
        bench.tick()

    assert proxy.lost == 1
    assert len(bench.messages) == 1
    assert sorted(bench.decisions) == sorted(told) == sorted(outcomes.values())
    assert redis.exists(PENDING) == 0
    assert "Trouble" not in caplog.text
    assert [len(redis.hget(f"redbeat:{entry}", "history").splitlines()) for entry in outcomes] == [1] * len(outcomes)


@pytest.mark.parametrize(("outcome", "wish"), [("paused", {"paused": True}), ("missed", {"misfire_grace_time": 1})])
def test_what_is_not_sent_is_recorded_though_its_beat_dies(bench, monkeypatch, outcome, wish):
    """It dies as soon as the entry has moved on."""
    bench.put(**wish)
    scheduler = bench.scheduler()
    claim = scheduler.store.claim

    def die(*args: Any, **given: Any) -> None:
        claim(*args, **given)
        raise SystemExit

    monkeypatch.setattr(scheduler.store, "claim", die)
    with pytest.raises(SystemExit):
        scheduler.tick()

    assert bench.decisions == [outcome]


def test_a_beat_leads_from_its_next_tick_on_though_the_reply_is_lost(bench, proxy):
    bench.put()
    proxy.lose_reply_of(beat_script("campaign"))

    bench.tick(2)

    assert proxy.lost == 1
    assert len(bench.messages) == 1


def test_an_occurrence_is_retaken_though_the_reply_is_lost(bench, redis, proxy):
    bench.put()
    bench.tick()
    occurrence = Occurrence.of("redbeat:", "e", datetime.now(UTC))
    redis.hset("redbeat:e", "pending", occurrence.encode())
    redis.zadd(PENDING, {"redbeat:e": 0})
    proxy.lose_reply_of(beat_script("retake"))

    bench.tick()

    assert proxy.lost == 1
    assert len(bench.messages) == 2
    assert redis.exists(PENDING) == 0


def test_an_entry_is_saved_though_the_reply_is_lost(bench, proxy):
    bench.put()
    entry = bench.schedule.get("e")
    entry.args = ["changed"]
    proxy.lose_reply_of(beat_script("save"))

    bench.schedule.save(entry)

    assert proxy.lost == 1
    assert bench.schedule.get("e").args == ["changed"]


def test_an_entry_is_resumed_though_the_reply_is_lost(bench, proxy):
    bench.put(paused=True)
    proxy.lose_reply_of(beat_script("save"))

    bench.schedule.resume("e")

    assert proxy.lost == 1
    assert not bench.schedule.get("e").policy.paused


def test_an_entry_is_triggered_once_though_the_reply_is_lost(bench, proxy):
    bench.put(enabled=False)
    proxy.lose_reply_of(beat_script("propose"))

    task_id = bench.schedule.trigger("e")
    bench.tick()

    assert proxy.lost == 1
    assert bench.ids == [task_id]


def test_a_deleted_entry_was_there_though_the_reply_is_lost(bench, proxy):
    bench.put()
    proxy.lose_reply_of(beat_script("delete"))

    assert bench.schedule.delete("e") is True
    assert proxy.lost == 1


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_deletion_that_is_repeated_spares_what_another_has_added(bench, proxy, redis, cli, app, is_raw):
    bench.schedule.upsert("e", PLAIN, 60)
    if is_raw:
        redis.hdel("redbeat:e", "written")
    proxy.meanwhile = lambda: Schedule(app).upsert("e", PLAIN, 77)
    proxy.lose_reply_of(beat_script("delete"))

    said = cli("delete", "e", app=bench.app).output

    assert proxy.lost == 1
    assert "e: deleted" in said
    assert Schedule(app).get("e").schedule.run_every.total_seconds() == 77


@pytest.mark.parametrize("replace", [(), ("--replace",)], ids=["add", "replace"])
@pytest.mark.parametrize("adds", [False, True], ids=["deleted", "deleted and added"])
def test_an_addition_that_is_repeated_leaves_what_others_have_done(bench, proxy, app, cli, replace, adds):
    if replace:
        bench.schedule.upsert("e", PLAIN, 60)
    other = Schedule(app)

    def meanwhile() -> None:
        other.delete("e")
        if adds:
            other.upsert("e", PLAIN, 77)

    proxy.meanwhile = meanwhile
    proxy.lose_reply_of(SAVE)

    told = cli("add", "e", PLAIN, "--every", "30", *replace, app=bench.app, code=int(not adds)).output

    assert proxy.lost == 1
    assert adds or "there is no entry 'e'" in told
    names = [entry.schedule.run_every.total_seconds() for entry in other.list()]
    assert names == ([77] if adds else [])


def test_a_pause_that_is_repeated_spares_an_entry_of_the_same_name(bench, proxy, app):
    bench.schedule.upsert("e", PLAIN, 60)
    proxy.meanwhile = lambda: (Schedule(app).delete("e"), Schedule(app).upsert("e", PLAIN, 77))
    proxy.lose_reply_of(SAVE)

    bench.schedule.pause("e")

    assert proxy.lost == 1
    assert not Schedule(app).get("e").policy.paused


def test_an_entry_is_added_again_after_it_was_deleted(bench, app):
    for _ in range(3):
        bench.schedule.upsert("e", PLAIN, 60)
        assert bench.schedule.delete("e")
        bench.schedule.upsert("e", PLAIN, 60)
        assert bench.schedule.get("e")
        Schedule(app).delete("e")


def test_a_deletion_follows_a_change_at_the_same_time(bench, proxy, redis, app):
    """The entry is changed while it is read, before the deletion."""
    bench.schedule.upsert("e", PLAIN, 60)
    proxy.meanwhile = lambda: Schedule(app).pause("e")
    proxy.lose_next_reply(b"ZMSCORE")

    assert bench.schedule.delete("e") is True
    assert proxy.lost == 1
    assert redis.exists("redbeat:e") == 0


def test_a_term_was_ended_though_the_reply_is_lost(bench, redis, proxy):
    bench.tick()
    redis.zadd(STANDBYS, {'{"host": "another", "pid": "1", "since": ""}': (time.time() + 60) * 1000})
    proxy.lose_reply_of(beat_script("resign"))

    assert resign(bench.app) is True
    assert proxy.lost == 1


@pytest.mark.parametrize(
    ("script", "args", "shown_by"),
    [
        ("propose", ("trigger", "e"), "history"),
        ("save", ("edit", "e", "--set", "jitter=3"), "changes"),
        ("save", ("pause", "e"), "changes"),
        ("delete", ("delete", "e"), "changes"),
        ("pause", ("pause", "--all"), "changes"),
        ("resign", ("resign",), "status"),
    ],
)
def test_a_command_whose_replies_are_all_lost_may_have_been_done(bench, proxy, cli, script, args, shown_by):
    bench.put()
    bench.tick()
    lost = beat_script(script)
    proxy.meanwhile = lambda: proxy.lose_reply_of(lost)
    proxy.lose_reply_of(lost)

    said = cli(*args, app=bench.app, code=2).output

    assert proxy.lost > 1
    assert said.endswith(
        f". It may have been done all the same: before you repeat it, see celery singlebeat {shown_by}\n"
    )
    assert said.count("\n") == 1


def test_a_backfill_whose_replies_are_all_lost_may_have_been_done(bench, proxy, cli):
    bench.put(every=3600)
    bench.tick()
    end = datetime.now(UTC)
    proxy.meanwhile = lambda: proxy.lose_reply_of(beat_script("propose"))
    proxy.lose_reply_of(beat_script("propose"))

    said = cli("backfill", "e", (end - HOUR).isoformat(), end.isoformat(), app=bench.app, code=2).output

    assert f". {DONE} celery singlebeat history\n" in said


def test_a_command_that_could_only_read_was_not_done(bench, proxy, cli):
    bench.put()
    proxy.meanwhile = lambda: proxy.lose_next_reply(b"redbeat:e")
    proxy.lose_next_reply(b"redbeat:e")

    assert "may have been done" not in cli("trigger", "e", app=bench.app, code=2).output


@pytest.mark.parametrize(
    ("args", "shown_by"),
    [
        (("add", "new", PLAIN, "--every", "60"), "changes"),
        (("edit", "e", "--set", "jitter=3"), "changes"),
        (("pause", "e"), "changes"),
        (("delete", "e"), "changes"),
        (("pause", "--all"), "changes"),
        (("resign",), "status"),
    ],
)
def test_a_command_that_is_cut_off_after_its_change_says_so(bench, redis, cli, monkeypatch, args, shown_by):
    """It may read for its words what it has changed: each of its calls fails from the change on."""
    bench.put()
    bench.tick()
    client, called = schedule_client(bench.app), Script.__call__
    answer, is_cut_off = client.execute_command, False

    def call(script, *args):
        nonlocal is_cut_off
        reply = called(script, *args)
        is_cut_off = script.name in _SHOWN_BY
        return reply

    def execute(*args, **options):
        if is_cut_off:
            raise RedisConnectionError("cut off")
        return answer(*args, **options)

    monkeypatch.setattr(Script, "__call__", call)
    monkeypatch.setattr(client, "execute_command", execute)

    result = cli(*args, app=bench.app, code=None)

    assert is_cut_off
    hint = f". It may have been done all the same: before you repeat it, see celery singlebeat {shown_by}\n"
    assert result.exit_code == 0 or (result.exit_code == 2 and result.output.endswith(hint))
