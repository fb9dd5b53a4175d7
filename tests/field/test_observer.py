"""The observer itself: records that are forged, each with one thing wrong, and the check that must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.field.compare import plan_of
from tests.field.journal import AOF, Decision, Journal, Message, message_of
from tests.field.observer import (
    Call,
    Edited,
    Exit,
    Happened,
    Naming,
    Records,
    Run,
    Sample,
    Stored,
    check,
    hourly,
    standing,
    undisturbed,
)
from tests.field.plan import RESOURCES, Given, make_plan
from tests.field.topology import faults_of
from tests.support import RedisServer

TICK = Given("tick", "skip", 2.0)
FREE = Given("free", "plain", 2.0, overlap="allow_all")
DATED = Given("dated", "plain", 2.0, overlap="allow_all", grace=3.0)


def forged(*, seconds: int = 60) -> Records:
    """Return the records of a run in which all is well: three entries every two seconds from 1000 on."""
    records = Records([TICK, FREE, DATED], is_one_server=True, began=1000.0, deleted=1000.0 + seconds)
    records.ended = records.deleted + 10
    for given in records.entries:
        records.edits.append(Edited("put", given.name, 2.0, 999.8, 1000.0))
        for nominal in range(1001, 1000 + seconds, 2):
            id_ = f"{given.name} {nominal}"
            at, transaction = nominal + 0.1, len(records.decisions)
            records.decisions.append(
                Decision(at, given.name, nominal, "scheduled", "dispatched", id_, transaction=transaction)
            )
            message = Message(at, id_, "t", is_original=True, entry=given.name, transaction=transaction)
            message.popped = message.kept = message.acked = at + 0.1
            records.messages.append(message)
            run = Run(id_, "t", id_, f"entry {given.name}", "worker0@host", 1, at + 0.2, ended=at + 0.5)
            records.runs.append(run)
        records.edits.append(Edited("delete", given.name, 0.0, records.deleted, records.deleted + 0.2))
    call = Call(1010.0, "merge", "merged", 7, 1010.1, "call")
    records.calls.append(call)
    records.messages.append(Message(1010.0, "call", "t", is_original=True, popped=1010.2, kept=1010.2, acked=1010.3))
    records.runs.append(Run("call", "t", "call", "merged", "worker0@host", 1, 1010.4, 7, 1010.9))
    records.probes.append((1020.0, "worker0", "probe"))
    records.runs.append(Run("probe", "t", "probe", "probe worker0", "worker0@host", 1, 1020.4, ended=1020.9))
    return records


def test_nothing_is_found_where_all_is_well():
    assert check(forged()) == []


def lose(records: Records) -> None:
    records.decisions = [d for d in records.decisions if not (d.entry == "tick" and 1020 < d.nominal < 1040)]
    records.messages = [m for m in records.messages if not (m.entry == "tick" and 1020 < m.at < 1040)]


def change(records: Records, **changes: object) -> None:
    records.decisions[5] = replace(records.decisions[5], **changes)


def add_message(records: Records) -> None:
    records.messages.append(replace(records.messages[5]))


def add_run(records: Records, after: float) -> None:
    run = records.runs[5]
    records.runs.append(replace(run, run="again", started=run.started + after, ended=run.started + after + 1))


def overlap(records: Records) -> None:
    run = records.runs[5]
    records.runs.append(replace(run, run="other", id="other", started=run.started + 0.1))


def skip_falsely(records: Records) -> None:
    """Skip the run at 1041 because of the one at 1011, which has ended at 1011.6."""
    at = next(i for i, d in enumerate(records.decisions) if d.id == "tick 1041")
    held = {"decision": "skipped_overlap", "reason": "held", "holder": "tick 1011"}
    records.decisions[at] = replace(records.decisions[at], **held)
    records.messages = [m for m in records.messages if m.id != "tick 1041"]


def pause(records: Records) -> None:
    records.edits[1:1] = [Edited("pause", "tick", 0, 1020.0, 1020.1), Edited("resume", "tick", 0, 1030.0, 1030.1)]


def backfill(records: Records) -> None:
    records.edits.append(Edited("backfill", "free", 0, 1012.0, 1012.1, until=1010.0))


def grow(records: Records) -> None:
    samples = [
        Sample(1000.0 + at, "beat0", 1, memory=10, threads=at, files=1, connections=1) for at in range(0, 300, 5)
    ]
    records.samples.extend(samples)


def climb(records: Records) -> None:
    """Three connections more in an hour, and each minute a fault that takes more for a while."""
    for at in range(0, 3600, 5):
        connections = 5 + at // 1000 + 20 * (at % 60 > 40)
        records.samples.append(Sample(1000.0 + at, "beat0", 1, memory=10, threads=1, files=1, connections=connections))
        records.stored.append(Stored(1000.0 + at, {"locks": 5}))


def pile_up(records: Records) -> None:
    records.stored += [Stored(1000.0 + at, {"locks": 5 + at // 60}) for at in range(0, 3600, 5)]


def hold(records: Records, **lock: str) -> None:
    records.locks = {"lock": {"id": "tick 1011", "state": "queued", "pttl": "1000", **lock}}


def unnamed(records: Records, tool: str) -> None:
    records.namings.append(Naming("server_hangs for 12 s", "server_hangs", "", tool, "[]"))


FAULTS: dict[str, Callable[[Records], object]] = {
    "lost or late": lose,
    "calendar": lambda records: change(records, nominal=1011.7),
    "two ids": lambda records: records.decisions.append(replace(records.decisions[5], id="other")),
    "decided twice": lambda records: records.decisions.append(records.decisions[5]),
    "not sent": lambda records: records.messages.pop(5),
    "sent twice": add_message,
    "not one write": lambda records: change(records, transaction=9999),
    "sent without a decision": lambda records: change(records, decision="skipped_overlap", reason="held"),
    "missed in time": lambda records: change(records, decision="missed", reason="late"),
    "no reason": lambda records: change(records, decision="missed"),
    "refused": lambda records: change(records, decision="publish_failed", reason="it cannot"),
    "sent in a pause": pause,
    "backfill": backfill,
    "overlap": overlap,
    "ran twice": lambda records: add_run(records, 1.0),
    "never ran": lambda records: records.runs.pop(5),
    "call": lambda records: records.calls.append(Call(1030.0, "skip", "asked", 0, 1030.1, "no message")),
    "last arguments": lambda records: records.calls.append(Call(1030.0, "merge", "merged", 8, 1030.1, "call")),
    "stale lock": skip_falsely,
    "lock left": lambda records: hold(records, state="running"),
    "lock without end": lambda records: hold(records, pttl="-1"),
    "lock without a message": hold,
    "process": lambda records: records.exits.append(Exit(1030.0, "beat0", 1)),
    "no rest": lambda records: setattr(records, "unfinished", "3 messages"),
    "worker silent": lambda records: records.runs.pop(),
    "growth": grow,
    "slope": pile_up,
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_check_finds_what_it_is_for(name):
    records = forged()

    FAULTS[name](records)

    assert name in {violation.check for violation in check(records)}


@pytest.mark.parametrize("tool", ["doctor", "log", "metrics"])
def test_silence_about_a_long_fault_is_found(tool):
    records = forged()

    unnamed(records, tool)

    assert [violation.check for violation in check(records)] == ["silence"]


def test_times_that_were_merged_without_a_word_are_found():
    records = forged()

    for each in (records.decisions, records.messages, records.runs):
        del each[5]

    assert [violation.check for violation in check(records)] == ["catch-up"]


def test_a_fault_excuses_what_was_late_through_it():
    records = forged()
    lose(records)
    records.runs = [run for run in records.runs if not (run.name == "entry tick" and 1020 < run.started < 1040)]
    later = next(i for i, d in enumerate(records.decisions) if d.entry == "tick" and d.nominal == 1041)
    records.decisions[later] = replace(records.decisions[later], kind="catch_up")

    records.faults.append(Happened("server_hangs", "", 1020.0, 1032.0))

    assert check(records) == []


def test_a_step_of_the_servers_clock_excuses_its_own_length():
    records = forged()
    lose(records)
    records.runs = [run for run in records.runs if not (run.name == "entry tick" and 1020 < run.started < 1040)]
    later = next(i for i, d in enumerate(records.decisions) if d.entry == "tick" and d.nominal == 1041)
    records.decisions[later] = replace(records.decisions[later], kind="catch_up")

    for ahead, found in ((-10.0, []), (10.0, []), (1.0, ["lost or late"])):
        records.faults = [Happened("server_clock", "", 1020.0, 1021.0, {"ahead": ahead})]
        assert [violation.check for violation in check(records)] == found


def test_nothing_is_edited_while_the_servers_clock_is_wrong():
    plan = make_plan(2, 600, topology="one", kinds=[*faults_of("one"), "server_clock"], clocks=False)

    steps = [fault for fault in plan.faults if fault.kind == "server_clock"]
    assert steps
    assert plan.edits
    assert not any(fault.at < edit.at < fault.over for fault in steps for edit in plan.edits)


def test_what_stands_beside_another_scheduler_is_counted():
    records = forged()
    found = standing(records)
    assert found["lost"] == found["doubled"] == found["overlaps"] == 0

    overlap(records)
    lose(records)
    for _ in range(3):
        add_message(records)

    found = standing(records)
    assert (found["lost"], found["doubled"], found["overlaps"], found["silent"]) == (10, 2, 1, 20)


def test_the_entry_of_a_message_of_redbeat_is_its_first_argument():
    headers = {"id": "1", "task": "t", "argsrepr": "['entry plain-1s', 0.05]"}

    assert message_of(headers, 1000.0).entry == "plain-1s"
    assert message_of({**headers, "singlebeat": {"entry": "tick"}}, 1000.0).entry == "tick"
    assert message_of({**headers, "argsrepr": "['asked', 1.0]"}, 1000.0).entry == ""


def test_redbeat_is_asked_for_what_it_can_do():
    plan = plan_of(7, 300, "one")

    assert {given.name for given in plan.entries} == {"plain-1s", "skip-1s", "skip-3s", "rule-2s", "rule-3s"}
    assert all(process.has_right_clock for process in (*plan.beats, *plan.workers))


def test_a_stopped_worker_excuses_an_overlap_only_after_its_lease():
    for seconds, found in ((8.0, []), (1.0, ["overlap"])):
        records = forged()
        run = next(run for run in records.runs if run.id == "tick 1011")
        other = next(run for run in records.runs if run.id == "tick 1021")
        run.ended = other.started + 0.1
        records.runs = [run for run in records.runs if run.name != "entry tick" or run.id in {"tick 1011", "tick 1021"}]
        records.decisions = [d for d in records.decisions if d.entry != "tick"]
        records.messages = [m for m in records.messages if m.entry != "tick"]
        records.edits = [edit for edit in records.edits if edit.entry != "tick"]
        records.faults.append(Happened("worker_stopped", "worker0", 1012.0, 1012.0 + seconds))

        assert [violation.check for violation in check(records)] == found


def test_a_slow_leak_is_found_among_the_peaks_of_faults():
    records = forged()

    climb(records)

    found = [violation for violation in check(records) if violation.check == "slope"]
    assert [violation.text.split(":")[0] for violation in found] == ["beat0 (1)"]


def test_peaks_of_faults_are_no_slope():
    points = [(at, 5.0 + 20 * (at % 60 > 40) + 50 * (1000 < at < 1400)) for at in range(0, 3600, 5)]

    assert hourly(points) == 0
    assert hourly(points[:100]) is None


def test_windows_are_left_out_of_a_time():
    assert undisturbed(10, 20, []) == 10
    assert undisturbed(10, 20, [(0, 12), (15, 16), (19, 40)]) == 6
    assert undisturbed(10, 20, [(0, 40)]) == 0


def test_the_same_seed_gives_the_same_plan():
    def plan(seed: int) -> object:
        return make_plan(seed, 300, topology="two", kinds=faults_of("two"), clocks=True)

    assert plan(1) == plan(1) != plan(2)


def test_each_process_is_upgraded_once_and_undisturbed():
    plan = make_plan(3, 300, topology="one", kinds=faults_of("one"), clocks=True, upgrades=True)

    upgraded = [fault for fault in plan.faults if fault.kind.endswith("_upgraded")]
    assert sorted(fault.whom for fault in upgraded) == sorted(each.name for each in (*plan.beats, *plan.workers))
    for fault in plan.faults:
        for other in upgraded:
            meets = fault.at < other.end + 10 and other.at < fault.end + 10
            assert fault is other or fault in upgraded or not (meets and RESOURCES[fault.kind] == RESOURCES[other.kind])


def test_a_run_has_one_failover_at_most():
    plans = [make_plan(seed, 600, topology="sentinel", kinds=faults_of("sentinel"), clocks=True) for seed in range(20)]

    assert {sum(fault.kind == "failed_over" for fault in plan.faults) for plan in plans} == {1}


def test_a_journal_outlives_its_server_and_reads_each_change_once():
    with RedisServer(*AOF) as server:
        journal, script = Journal(server.directory), "redis.call('LPUSH', KEYS[1], ARGV[1]) return redis.call('PING')"
        message = '{"headers": {"id": "%s", "task": "t"}, "properties": {}}'
        server.client().eval(script, 1, "celery", message % 1)
        journal.read()
        server.client().lpush("celery", message % 2, message % 3)
        server.restart()
        server.client().brpop("celery")
        journal.read()
        journal.read()

        assert [message.id for message in journal.messages] == ["1", "2", "3"]
        assert [message.popped is not None for message in journal.messages] == [True, False, False]
        assert journal.waiting() == 2


def mixed(led_from: float = 1020.5, led_until: float = 1030.5) -> Records:
    """Return the records of a run in which a beat of RedBeat has led for a while, and sent what was due then."""
    records = forged()
    records.bare = frozenset({"beat1", "worker1"})
    records.redbeat_led = [(led_from, led_until)]
    records.decisions = [d for d in records.decisions if not led_from < d.at < led_until]
    for message in records.messages:
        if message.entry and led_from < message.at < led_until:
            message.is_redbeats = True
    for run in records.runs:
        if led_from < run.started < led_until and run.name.startswith("entry"):
            run.host = "worker1@host"
    return records


def test_a_mixed_fleet_may_hand_over_the_lead():
    assert check(mixed()) == []


def decide_beside(records: Records) -> None:
    records.decisions[-1].is_beside_redbeat = True


def be_silent(records: Records) -> None:
    """Send nothing for nine seconds of RedBeat's."""
    records.messages = [m for m in records.messages if not (m.entry == "free" and 1021 < m.at < 1030)]


def lose_after(records: Records) -> None:
    records.decisions = [d for d in records.decisions if not (d.entry == "tick" and 1030 < d.nominal < 1040)]


def take_for_lost(records: Records) -> None:
    run = next(run for run in records.runs if run.id == "tick 1021")
    run.ended = 1050.0
    records.ends.append({"id": "tick 1021", "outcome": "message_lost", "at": "1040"})


def take_for_run(records: Records) -> None:
    records.ends.append({"id": "no run", "outcome": "ran_elsewhere", "at": "1040"})


def overlap_with_redbeats(records: Records) -> None:
    """Run a Singleton that RedBeat has sent, on a worker with singlebeat, and another one beside it."""
    of_redbeat, other = (run for run in records.runs if run.id in {"tick 1029", "tick 1031"})
    of_redbeat.host, of_redbeat.ended = other.host, other.started + 0.1


def free_too_late(records: Records) -> None:
    """Skip at 1059 because of the run on a bare worker that was over at 1013.6."""
    next(run for run in records.runs if run.id == "tick 1011").host = "worker1@host"
    at = next(i for i, d in enumerate(records.decisions) if d.id == "tick 1059")
    held = {"decision": "skipped_overlap", "reason": "held", "holder": "tick 1011"}
    records.decisions[at] = replace(records.decisions[at], **held)
    records.messages = [m for m in records.messages if m.id != "tick 1059"]


@pytest.mark.parametrize(
    ("does", "name"),
    [
        (decide_beside, "beside RedBeat"),
        (be_silent, "silent"),
        (lose_after, "lost or late"),
        (take_for_lost, "taken for lost"),
        (take_for_run, "taken for run"),
        (overlap_with_redbeats, "overlap"),
        (free_too_late, "stale lock"),
    ],
)
def test_each_check_finds_what_it_is_for_in_a_mixed_fleet(does, name):
    records = mixed()

    does(records)

    assert name in {violation.check for violation in check(records)}


def run_beside(records: Records, id_: str, following: str, host: str) -> None:
    first, other = (run for run in records.runs if run.id in {id_, following})
    first.host, first.ended = host, other.started + 0.1


@pytest.mark.parametrize("task", ["plain", "skip"])
def test_a_run_of_redbeats_has_a_lock_only_with_a_singleton_and_singlebeat(task):
    for host, found in (("worker1@host", []), ("worker0@host", ["overlap"] if task == "skip" else [])):
        records = mixed()
        records.entries = [replace(TICK, task=task), *records.entries[1:]]
        run_beside(records, "tick 1029", "tick 1031", host)

        assert [violation.check for violation in check(records)] == found


def test_a_copy_has_no_lock_on_a_worker_without_singlebeat():
    for is_copied, found in ((True, []), (False, ["overlap"])):
        records = mixed()
        run_beside(records, "tick 1011", "tick 1013", "worker1@host")
        if is_copied:
            message = next(message for message in records.messages if message.id == "tick 1011")
            records.messages.append(replace(message, is_original=False))

        assert [violation.check for violation in check(records)] == found


def test_a_bare_worker_excuses_the_copy_and_the_lock_of_its_run():
    for host, found in (("worker1@host", []), ("worker0@host", ["ran twice", "lock without a message"])):
        records = mixed()
        run = next(run for run in records.runs if run.id == "tick 1011")
        run.host = host
        records.runs.append(replace(run, run="again", host="worker0@host", started=1050.4, ended=1050.6))
        records.runs.sort(key=lambda run: run.started)
        hold(records)

        assert [violation.check for violation in check(records)] == found


def test_an_end_of_redbeat_by_itself_is_its_own():
    records = mixed()

    records.exits += [Exit(1030.0, "beat1", 1), Exit(1030.0, "beat0", 1)]

    assert [violation.text for violation in check(records)] == ["beat0 ended by itself with 1:\n"]


def test_a_bare_worker_knows_only_the_arguments_of_its_message():
    for host, found in (("worker1@host", []), ("worker0@host", ["last arguments"])):
        records = mixed()
        records.calls.append(Call(1030.0, "merge", "merged", 8, 1030.1, "call"))
        next(run for run in records.runs if run.id == "call").host = host

        assert [violation.check for violation in check(records)] == found


def test_a_bare_process_names_no_fault():
    for whom, found in (("beat1", []), ("beat0", ["silence"])):
        records = mixed()
        records.namings.append(Naming("black_hole", "black_hole", whom, "log", ""))

        assert [violation.check for violation in check(records)] == found


def test_a_mixed_plan_adds_a_bare_beat_and_a_bare_worker():
    kinds = [*faults_of("one"), "handed_over"]
    plan = make_plan(3, 300, topology="one", kinds=kinds, beats=2, workers=2, clocks=True, upgrades=True, mixed=True)

    assert [process.is_bare for process in plan.beats] == [process.is_bare for process in plan.workers]
    bare = [process for process in (*plan.beats, *plan.workers) if process.is_bare]
    assert [process.name for process in bare] == ["beat2", "worker2"]
    assert all(process.has_right_clock for process in bare), "RedBeat goes by the clock of its host"
    assert {fault.whom for fault in plan.faults} >= {"beat2", "worker2"}
    assert not any(fault.whom in {"beat2", "worker2"} for fault in plan.faults if fault.kind.endswith("_upgraded"))


def test_a_journal_tells_when_redbeat_leads():
    with RedisServer(*AOF) as server:
        journal, client = Journal(server.directory), server.client()
        decision = {"entry": "e", "nominal": "2026-01-01T00:00:00+00:00", "kind": "scheduled", "decision": "dispatched"}
        decision |= {"id": "1", "reason": "", "holder": "", "term": 1}

        client.hset("redbeat::leader", mapping={"pid": 1, "token": "ours"})
        client.set("redbeat::lock", "ours", px=60_000)
        client.xadd("redbeat::history", decision)
        client.delete("redbeat::lock")
        lock = client.lock("redbeat::lock", timeout=20)
        lock.acquire()
        client.xadd("redbeat::history", decision)
        lock.release()
        client.xadd("redbeat::history", decision)
        lock.acquire()
        client.pexpire("redbeat::lock", 40_000)
        journal.read()

        assert [each.is_beside_redbeat for each in journal.decisions] == [False, True, False]
        (begin, end), (_, until) = journal.redbeat_led
        assert end - begin <= 2 < 38 < until - end <= 41
