"""Checks the promises on what was recorded: pure, and with no knowledge of singlebeat's code.

Each check yields ``Violation``s. What a fault excuses is said where it is excused, in the words of the guarantees.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, zip_longest
from statistics import median

from tests.field.journal import Decision, Message
from tests.field.plan import Given

#: Seconds by which the start of a run may be late without any fault, on a machine that is busy.
START_SLACK = 25.0

#: Seconds of the lease of a lock, and what of it a fault takes at least if the lock is to end before its run.
LEASE, ENDS_A_LEASE = 6.0, 2.5

#: Seconds in which a beat of singlebeat frees the lock of a run on a worker without singlebeat, which frees none: five
#: until the message counts as late, two searches and the pause between them, and the answers of the workers.
FREES_FOR_BARE = 35.0

#: The ends that a beat has recorded when it freed a lock.
FREED = {"message_lost", "ran_elsewhere"}

#: Seconds that the fleet needs after a fault: leases that end, timeouts, processes that start; after some, fewer.
RECOVERY = 10.0
RECOVERIES = {
    "delivered_again": 0.0,
    "slow_network": 2.0,
    "resets": 4.0,
    "connections_reset": 4.0,
    "half_open": 6.0,
    "beat_ended": 4.0,
    "slot_moved": 4.0,
    "beat_upgraded": 4.0,
}

#: Faults during which, and for ``RECOVERY`` after which, no beat may be able to decide or to send.
DELAYS_BEATS = re.compile(r"slow_network|resets|half_open|connections_reset|black_hole|refused|server_|read_only"
                          r"|out_of_memory|failed_over|slot_moved|broker_|beat")  # fmt: skip

#: Faults that end a worker, with its messages that were acknowledged early, or that kombu has taken and not yet kept.
ENDS_WORKERS = {"worker_killed", "worker_host_lost", "worker_cold", "worker_warm", "worker_upgraded"}


@dataclass(frozen=True)
class Violation:
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass
class Happened:
    """A fault, by the clock of the bed."""

    kind: str
    whom: str
    began: float
    ended: float = float("inf")
    weather: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} {self.whom} {self.ended - self.began:.1f} s at {self.began:.1f}"


@dataclass
class Edited:
    """What an operator did to an entry: some time between the two."""

    kind: str
    entry: str
    every: float
    began: float
    ended: float = float("inf")
    errors: int = 0
    error: str = ""
    until: float = 0.0


@dataclass
class Run:
    run: str
    task: str
    id: str
    name: str
    host: str
    pid: int
    started: float
    number: int = 0
    ended: float | None = None
    died: float | None = None
    seen_alive: float = 0.0

    @property
    def over(self) -> float:
        """When it was over: its end, or the last time at which its process was seen alive."""
        return self.seen_alive if self.ended is None else self.ended


@dataclass
class Call:
    """A call of a program; it was not answered if it has neither an id nor an error."""

    began: float
    task: str
    name: str
    number: int = 0
    ended: float | None = None
    id: str = ""
    is_duplicate: bool = False
    error: str = ""


@dataclass
class Exit:
    """The end of a process that was not ended on purpose, or that did not end when it was told to (code None)."""

    at: float
    name: str
    code: int | None
    log: str = ""


@dataclass
class Sample:
    at: float
    name: str
    pid: int
    memory: int
    threads: int
    files: int
    connections: int
    children: int = 0  #: memory of its child processes, in bytes


@dataclass
class Stored:
    """What a server keeps: the elements of all keys of a family, by its name."""

    at: float
    elements: Mapping[str, int]


@dataclass
class Naming:
    """What one tool said while a fault lasted."""

    fault: str
    kind: str
    whom: str
    tool: str
    text: str
    is_late: bool = False  #: the fault was over before the tool had answered


@dataclass
class Records:
    """All that is known of a run."""

    entries: Sequence[Given]
    is_one_server: bool = False
    bare: frozenset[str] = frozenset()  #: the processes without singlebeat: beats of RedBeat, workers of plain Celery
    redbeat_led: list[tuple[float, float]] = field(default_factory=list)  #: when a beat of RedBeat held the lock
    slack: float = 5.0  #: seconds by which a decision may be late without any fault, on a machine that is busy
    began: float = 0.0
    deleted: float = 0.0  #: all entries
    ended: float = 0.0
    faults: list[Happened] = field(default_factory=list)
    edits: list[Edited] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ends: list[dict[str, str]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    probes: list[tuple[float, str, str]] = field(default_factory=list)  #: time, worker, id
    exits: list[Exit] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    namings: list[Naming] = field(default_factory=list)
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unfinished: str = ""
    locks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    keys: int = 0

    # ------------------------------------------------ what is asked of it

    def windows(self, matches: Callable[[Happened], bool], *, after: float | None = None) -> list[tuple[float, float]]:
        """Return the times of these faults, joined where they meet, each with its recovery, or ``after`` seconds.

        A step of the server's clock excuses its own length before it and after it: entries wait until the server's
        clock has caught up, leases of its clock end so much earlier or later, and decisions are told by it.
        """
        faults = [fault for fault in self.faults if matches(fault)]
        behind = [RECOVERIES.get(fault.kind, RECOVERY) if after is None else after for fault in faults]
        steps = [abs(fault.weather.get("ahead", 0.0)) for fault in faults]
        times = [(f.began - step, f.ended + step + more) for f, step, more in zip(faults, steps, behind, strict=True)]
        return join(times)

    def is_bare(self, run: Run) -> bool:
        """Return whether a worker without singlebeat ran it."""
        return run.host.partition("@")[0] in self.bare

    def by_id(self) -> dict[str, list[Run]]:
        """Return the runs by the ids of their tasks."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            found[run.id].append(run)
        return found


def join(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return these times without those that meet."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(times):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def undisturbed(begin: float, end: float, windows: Iterable[tuple[float, float]]) -> float:
    """Return how much of a time lies outside of the windows, which do not overlap."""
    return max(0.0, end - begin - sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in windows))


def check(records: Records) -> list[Violation]:
    """Return all violations."""
    return [violation for each in CHECKS for violation in each(records)]


# ---------------------------------------------------------------- occurrences


SCHEDULED = {"scheduled", "catch_up"}
SENT = {"dispatched", "buffered"}


def occurrences_are_decided(records: Records) -> Iterator[Violation]:
    """Compute the nominal times of each entry anew, and demand that each is decided, by itself or by a later one.

    A later occurrence stands for those that beats could not decide in time: then a fault lay there, and its kind is
    ``catch_up``.
    """
    delays = records.windows(lambda fault: bool(DELAYS_BEATS.match(fault.kind)))
    by_entry = defaultdict(list)
    for decision in records.decisions:
        if decision.kind in SCHEDULED and decision.decision != "quarantined":
            by_entry[decision.entry].append(decision)
    for given in records.entries:
        for begin, end, every in _lives(records, given):
            decisions = [d for d in by_entry[given.name] if begin <= d.at <= end]
            yield from _gaps(given, every, begin, end, decisions, delays, records.slack)


def _lives(records: Records, given: Given) -> Iterator[tuple[float, float, float]]:
    """Yield the times between two edits of an entry, in which its nominal times are one grid, and their distance.

    They end where a beat of RedBeat leads: it counts an interval from its last run on.
    """
    edits = [e for e in records.edits if e.entry == given.name and e.kind not in {"backfill", "trigger"}]
    every = given.every
    for edit, following in zip_longest(edits, edits[1:]):
        every = edit.every or every
        if edit.kind != "delete":
            begin, end = edit.ended, following.began if following else records.deleted
            for led_from, led_until in records.redbeat_led:
                if begin < led_until and led_from < end:
                    yield begin, led_from, every
                    begin = led_until
            yield begin, end, every


def _gaps(
    given: Given,
    every: float,
    begin: float,
    end: float,
    decisions: Sequence[Decision],
    delays: Sequence[tuple[float, float]],
    slack: float,
) -> Iterator[Violation]:
    # By nominal time: one that waited for the broker may be decided after later ones. One that was due, or claimed,
    # before the edit has the times of before.
    previous = None
    since = [decision for decision in decisions if decision.nominal >= begin]
    for decision in sorted(since, key=lambda decision: decision.nominal):
        if previous is not None:
            steps = (decision.nominal - previous) / every
            if abs(steps - round(steps)) > 0.01 or round(steps) < 1:
                text = f"{given.name}: nominal time {decision.nominal:.3f} follows {previous:.3f}, every {every:g} s"
                yield Violation("calendar", text)
            if round(steps) > 1 and decision.kind != "catch_up":
                text = f"{given.name}: {decision.nominal:.3f} stands for {round(steps)} times and is {decision.kind}"
                yield Violation("catch-up", text)
        first = begin if previous is None else previous
        if (late := undisturbed(first + every, decision.at, delays)) > slack:
            text = (
                f"{given.name}: {first + every:.3f} was decided at {decision.at:.3f}, {late:.1f} s late without a fault"
            )
            yield Violation("lost or late", text)
        previous = decision.nominal
    if (late := undisturbed((previous or begin) + every, end, delays)) > slack:
        text = (
            f"{given.name}: no decision from {previous or begin:.3f} to {end:.3f}, {late:.1f} s of it without a fault"
        )
        yield Violation("lost or late", text)


def one_kind_of_beat_decides(records: Records) -> Iterator[Violation]:
    """No beat of singlebeat decides while a beat of RedBeat holds the lock."""
    for decision in records.decisions:
        if decision.is_beside_redbeat:
            yield Violation("beside RedBeat", f"{decision}")


def no_kind_of_beat_is_silent(records: Records) -> Iterator[Violation]:
    """Where beats of both kinds stand by for one another, an entry without lock is sent by one or the other."""
    delays = records.windows(lambda fault: bool(DELAYS_BEATS.match(fault.kind)))
    for given in records.entries if records.redbeat_led else ():
        if given.overlap != "allow_all" or given.edited or given.grace is not None:
            continue
        begin = next(edit.ended for edit in records.edits if edit.entry == given.name and edit.kind == "put")
        sent = sorted(m.at for m in records.messages if m.entry == given.name and m.is_original)
        for before, after in pairwise([begin, *sent, records.deleted]):
            if (late := undisturbed(before + given.every, after, delays)) > records.slack:
                led = [(round(since, 1), round(until, 1)) for since, until in records.redbeat_led if since < after]
                text = f"{given.name}: no message from {before:.0f} to {after:.0f}, {late:.1f} s of it without a fault"
                yield Violation("silent", f"{text}; a beat of RedBeat led {led[-2:]}")


def an_occurrence_has_one_id_and_one_decision(records: Records) -> Iterator[Violation]:
    ids: dict[tuple[str, float], set[str]] = defaultdict(set)
    for decision in records.decisions:
        if decision.kind in SCHEDULED and decision.decision != "quarantined":
            ids[decision.entry, decision.nominal].add(decision.id)
    for (entry, nominal), several in ids.items():
        if len(several) > 1:
            yield Violation("two ids", f"{entry} at {nominal:.3f}: {sorted(several)}")
    counts = Counter(d.id for d in records.decisions if d.decision != "quarantined" and d.kind in SCHEDULED)
    for id_, count in counts.items():
        if count > 1:
            yield Violation("decided twice", f"{id_} {count} times: {[d for d in records.decisions if d.id == id_]}")


def what_is_decided_is_sent(records: Records) -> Iterator[Violation]:
    """A message for each decision to send, no other one; on one server exactly one, in one transaction."""
    pushed: dict[str, list[Message]] = defaultdict(list)
    for message in records.messages:
        if message.is_original:
            pushed[message.id].append(message)
    sent = {d.id: d for d in records.decisions if d.decision in SENT}
    not_sent = {d.id: d for d in records.decisions if d.decision not in SENT}
    for id_, decision in sent.items():
        messages = pushed.get(id_, [])
        if not messages:
            yield Violation("not sent", f"{decision}")
        elif records.is_one_server and len(messages) > 1:
            yield Violation("sent twice", f"{decision}: {messages}")
        elif records.is_one_server and messages[0].transaction != decision.transaction:
            yield Violation("not one write", f"{decision}: {messages}")
    for id_, messages in pushed.items():
        if not messages[0].entry or messages[0].is_redbeats or id_ in sent:
            continue
        if not _may_have_no_decision(records, messages[0], not_sent.get(id_)):
            yield Violation("sent without a decision", f"{messages[0]}: {not_sent.get(id_)}")


def _may_have_no_decision(records: Records, message: Message, decision: Decision | None) -> bool:
    """Return whether a message may be sent without a decision to send it: where broker and schedule are two servers.

    Its entry may be deleted before its decision is recorded. And the reply of the broker may be lost: its beat does not
    know then that it is sent, and it may be too late, or its entry paused, when the broker answers.
    """
    if records.is_one_server:
        return False
    windows = records.windows(lambda fault: bool(DELAYS_BEATS.match(fault.kind)), after=2.0)
    if decision is None:
        deletions = [edit for edit in records.edits if edit.kind == "delete" and edit.entry == message.entry]
        return any(edit.ended > message.at and undisturbed(message.at, edit.began, windows) < 2 for edit in deletions)
    return decision.decision == "run_before" or any(begin - 1 < message.at < end for begin, end in windows)


def missed_occurrences_are_too_late(records: Records) -> Iterator[Violation]:
    graces = {given.name: given.grace for given in records.entries}
    for decision in records.decisions:
        grace = graces.get(decision.entry)
        late = decision.at - decision.nominal
        if decision.decision == "missed" and (grace is None or late < grace):
            yield Violation("missed in time", f"{decision}")
        if (
            decision.decision in SENT
            and decision.kind in SCHEDULED
            and grace is not None
            and late > grace + records.slack
        ):
            yield Violation("sent too late", f"{decision}, {late:.1f} s late")


def every_decision_has_a_reason(records: Records) -> Iterator[Violation]:
    for decision in records.decisions:
        if decision.decision in {"skipped_overlap", "missed", "publish_failed", "run_before"} and not decision.reason:
            yield Violation("no reason", f"{decision}")
        edits = [edit for edit in records.edits if edit.kind == "delete" and edit.entry == decision.entry]
        # A beat may read the place of an entry before its deletion, and the rest after it.
        is_deleted = any(edit.began < decision.at < edit.ended + 2 for edit in edits)
        if decision.decision == "publish_failed" or (decision.decision == "quarantined" and not is_deleted):
            yield Violation("refused", f"{decision}")


def a_pause_lasts(records: Records) -> Iterator[Violation]:
    """Nothing of the schedule is sent between the end of ``pause`` and the beginning of ``resume``."""
    for given in records.entries:
        edits = [edit for edit in records.edits if edit.entry == given.name]
        for edit, following in zip_longest(edits, edits[1:]):
            if edit.kind != "pause":
                continue
            end = following.began if following else records.deleted
            for decision in records.decisions:
                is_sent = decision.kind in SCHEDULED and decision.decision in SENT
                if decision.entry == given.name and is_sent and edit.ended + 0.05 < decision.at < end:
                    yield Violation("sent in a pause", f"{decision}, paused from {edit.ended:.3f} to {end:.3f}")


def backfills_are_whole(records: Records) -> Iterator[Violation]:
    for edit in records.edits:
        if edit.kind != "backfill" or edit.errors:  # after an error it has gone on, or begun anew
            continue
        done = {
            d.nominal
            for d in records.decisions
            if d.kind == "backfill" and d.entry == edit.entry and edit.began - 1 < d.at < edit.ended + 60
        }
        every = next(given.every for given in records.entries if given.name == edit.entry)
        wanted = {t for t in (n * every for n in range(int((edit.until - 8) / every), int(edit.until / every) + 2))
                  if edit.until - 8 < t <= edit.until}  # fmt: skip
        if edit.ended < float("inf") and edit.ended < records.deleted - 30 and not wanted <= done:
            yield Violation("backfill", f"{edit}: {sorted(wanted - done)} were not sent")


# ---------------------------------------------------------------- runs


def runs_of_one_singleton_do_not_overlap(records: Records) -> Iterator[Violation]:
    """Two runs under one lock are never at once, unless the first one's worker could not renew for its lease.

    Plain tasks that beat sends have the lock of their entry.
    """
    beside = {f"entry {given.name}" for given in records.entries if given.overlap == "allow_all"} | {"beside"}
    without_lock = _without_lock(records)
    # A run that was triggered or backfilled has its own overlap: buffer_all, which excludes as well.
    by_name: dict[str, list[Run]] = defaultdict(list)
    for run in records.runs:
        if run.name not in beside and not run.name.startswith("probe "):
            by_name[run.name].append(run)
    for name, runs in by_name.items():
        for number, run in enumerate(runs):
            for other in runs[number + 1 :]:
                if other.started >= run.over - 0.001 or without_lock & {run.run, other.run}:
                    continue
                if not _lease_may_have_ended(records, run, other.started):
                    yield Violation("overlap", f"{name}: {run} and {other}")


def _without_lock(records: Records) -> set[str]:
    """Return the runs that have no lock, or do not ask for it.

    RedBeat sends plain tasks without lock, and a worker without singlebeat does not ask for the lock that a message may
    have: that of a copy, of one that waits for its turn, or of one that RedBeat has sent.
    """
    plain = {f"entry {given.name}" for given in records.entries if given.task in {"plain", "late"}}
    waits = {f"entry {given.name}" for given in records.entries if given.overlap != "skip"} | {"in turn", "merged"}
    copied = {message.id for message in records.messages if not message.is_original}
    redbeats = {message.id for message in records.messages if message.is_redbeats}
    return {
        run.run
        for run in records.runs
        if (run.id in redbeats and run.name in plain)
        or (records.is_bare(run) and (run.id in redbeats | copied or run.name in waits))
    }


def _lease_may_have_ended(records: Records, run: Run, at: float) -> bool:
    host = run.host.partition("@")[0]

    def keeps_from_renewal(fault: Happened) -> bool:
        of_network = fault.kind in {"slow_network", "resets", "half_open", "connections_reset", "black_hole", "refused"}
        if of_network or fault.kind.startswith("worker_"):
            return fault.whom in {"", "workers", host}
        return fault.kind in {
            "server_killed",
            "server_hangs",
            "read_only",
            "out_of_memory",
            "failed_over",
            "slot_moved",
            "server_clock",
        }

    windows = records.windows(keeps_from_renewal, after=2.0)
    return any(
        min(end, at) - max(begin, run.started - LEASE) - 2.0 > ENDS_A_LEASE for begin, end in windows if begin < at
    )


def a_task_with_a_lock_runs_once(records: Records) -> Iterator[Violation]:
    """No id runs again after it has ended, nor while it runs, if it had a lock."""
    beside = {f"entry {given.name}" for given in records.entries if given.overlap == "allow_all"}
    without_lock = _without_lock(records)
    for id_, runs in records.by_id().items():
        if runs[0].name in beside or runs[0].name.startswith("probe "):
            continue
        ended = next((run for run in runs if run.ended is not None), None)
        if ended is None:
            continue
        for run in runs:
            # If the worker dies, or cannot reach the locks, between the body's end and that of its lock, the end is not
            # known: "effects happen exactly once" is not promised.
            # And no copy is refused by a worker that cannot reach the locks when it starts.
            begun = replace(run, ended=run.started)
            is_excused = _end_may_be_unknown(records, ended) or _end_may_be_unknown(records, begun)
            # A worker without singlebeat tells no end, and refuses no copy.
            is_excused |= records.is_bare(ended) or records.is_bare(run) or run.run in without_lock
            if run.started > ended.started and not is_excused:
                yield Violation("ran twice", f"{id_}: {ended} and {run}")


def _end_may_be_unknown(records: Records, run: Run) -> bool:
    host = run.host.partition("@")[0]
    for fault in records.faults:
        concerns = fault.whom in {"", "workers", host} and fault.kind != "delivered_again"
        if concerns and fault.began - 1 < run.over < fault.ended + RECOVERY and not fault.kind.startswith("beat"):
            return True
    return False


def messages_become_runs(records: Records) -> Iterator[Violation]:
    """Each message is run, or refused with a word about it; a death of its worker excuses early acknowledgement."""
    started = records.by_id()
    refused = {end["id"]: end["outcome"] for end in records.ends if "id" in end}
    text = {name: "\n".join(lines) for name, lines in records.logs.items()}
    for message in records.messages:
        if message.id in started or message.id in refused or not message.is_original:
            continue
        again = [other for other in records.messages if other.id == message.id]
        if any(_may_be_lost(records, other) for other in again):
            continue
        if any(re.search(rf"{message.id}.*(duplicate|replaced|revoked|Discarding)", log) for log in text.values()):
            continue
        yield Violation("never ran", f"{message}")


def _may_be_lost(records: Records, message: Message) -> bool:
    """Return whether Celery itself may have lost a message.

    That is with a worker that died and had acknowledged it, or between kombu's taking and keeping it.
    """
    if message.popped is not None and message.kept is None:
        return True
    if message.popped is None:
        return False
    ends = [fault for fault in records.faults if fault.kind in ENDS_WORKERS]
    last = message.acked or records.ended
    return any(message.popped - 2 < fault.began and last - 2 < fault.ended + 2 for fault in ends)


def no_run_is_taken_for_lost(records: Records) -> Iterator[Violation]:
    """A lock is not freed as that of a lost message while a worker that can be asked runs it, nor for no run."""
    started = records.by_id()
    for end in records.ends:
        if end["outcome"] not in FREED:
            continue
        at, runs = float(end["at"]), started.get(end["id"], ())
        if end["outcome"] == "ran_elsewhere" and not any(run.started < at for run in runs):
            yield Violation("taken for run", f"{end}")
        for run in runs:
            host = run.host.partition("@")[0]
            windows = records.windows(
                lambda fault, host=host: not fault.kind.startswith("beat") and fault.whom in {"", "workers", host}
            )
            if run.started < at - 0.5 and at < run.over and undisturbed(at - 0.5, at, windows):
                yield Violation("taken for lost", f"{end}: {run}")


def calls_are_sent(records: Records) -> Iterator[Violation]:
    """A call that was taken has one message; one that failed has none, or may have one if its reply was lost."""
    pushed = Counter(message.id for message in records.messages if message.is_original)
    for call in records.calls:
        # Where lock and message are two writes, the reply of the broker may be lost: kombu sends again, under one id.
        # Kombu alone sends a call that needs no lock.
        most = 1 if records.is_one_server and call.task != "beside" else 2
        if call.id and not call.is_duplicate and not 1 <= pushed[call.id] <= most:
            yield Violation("call", f"{call}: {pushed[call.id]} messages")


def the_last_arguments_run(records: Records) -> Iterator[Violation]:
    """Of calls that are merged, the last one that was taken has its arguments run, unless a run was lost after it."""
    taken = [call for call in records.calls if call.task == "merge" and call.id]
    runs = [run for run in records.runs if run.name == "merged"]
    if not taken:
        return
    last = max(taken, key=lambda call: call.number)
    if not any(run.number >= last.number for run in runs):
        harmful = [fault for fault in records.faults if fault.ended > last.began - 60]
        # A worker without singlebeat knows only the arguments of the message.
        if not harmful and not any(records.is_bare(run) for run in runs if run.id == last.id):
            yield Violation("last arguments", f"{last} was taken, and the last run was {runs[-1:]}")


# ---------------------------------------------------------------- locks


def skips_are_true(records: Records) -> Iterator[Violation]:
    """A run is skipped only while the holder of its lock is queued or runs, or was lost for less than its lease."""
    started = records.by_id()
    pushed: dict[str, list[Message]] = defaultdict(list)
    for message in records.messages:
        pushed[message.id].append(message)
    # While a beat of RedBeat leads, none of singlebeat frees locks.
    everything = join([*records.windows(lambda _: True), *records.redbeat_led])
    for decision in records.decisions:
        if decision.decision != "skipped_overlap":
            continue
        runs = started.get(decision.holder, [])
        if not runs or any(run.started > decision.at for run in runs):
            continue  # it waits; a lock without a message is found in the end
        over = max(run.over for run in runs)
        # A message that is delivered again holds its lock until it is refused or run.
        over = max([over, *(message.at for message in pushed[decision.holder] if not message.is_original)])
        bound = FREES_FOR_BARE if any(map(records.is_bare, runs)) else LEASE + 2
        if (stale := undisturbed(over, decision.at, everything)) > bound:
            text = f"{decision}: its holder was over {decision.at - over:.1f} s before, {stale:.1f} s of it calm"
            yield Violation("stale lock", text)


def locks_end(records: Records) -> Iterator[Violation]:
    """After all is over, no lock is left, but for those of messages that Celery has lost; each has an end.

    A worker without singlebeat frees no lock: it is left until a call meets it.
    """
    lost = {message.id for message in records.messages if _may_be_lost(records, message)}
    lost |= {run.id for run in records.runs if records.is_bare(run)}
    for key, lock in records.locks.items():
        if int(lock["pttl"]) == -1:
            yield Violation("lock without end", f"{key}: {lock}")
        elif lock["state"] == "running":
            yield Violation("lock left", f"{key}: {lock}")
        elif lock["id"] not in lost:
            yield Violation("lock without a message", f"{key}: {lock}")


# ---------------------------------------------------------------- processes


#: Last words of a worker that kombu ends when its broker dies while it has a message in hand (kombu 5.7.0).
KOMBUS = "AttributeError: 'NoneType' object has no attribute 'hostname'"


def processes_live(records: Records) -> Iterator[Violation]:
    for exit_ in records.exits:
        if exit_.code == 1 and exit_.name.startswith("worker") and KOMBUS in exit_.log:
            continue
        if exit_.name in records.bare:  # RedBeat ends when it loses its lock or its server
            continue
        how = "did not end when told to" if exit_.code is None else f"ended by itself with {exit_.code}"
        yield Violation("process", f"{exit_.name} {how}:\n{exit_.log}")
    if records.unfinished:
        yield Violation("no rest", records.unfinished)


def workers_work(records: Records) -> Iterator[Violation]:
    """Each worker runs what is in its own queue soon after the faults that concern it."""
    runs = records.by_id()
    for sent, worker, id_ in records.probes:
        windows = records.windows(
            lambda fault, worker=worker: not fault.kind.startswith("beat") and fault.whom in {"", "workers", worker},
        )
        run = runs.get(id_, [None])[0]
        began = run.started if run else records.ended
        if run is None and any(fault.ended > sent - 2 for fault in records.faults if fault.kind in ENDS_WORKERS):
            continue  # acknowledged early, or lost by kombu: Celery's
        if run is None and any(
            fault.began - 2 < sent < fault.ended + 60
            for fault in records.faults
            if fault.kind in {"server_killed", "broker_killed", "failed_over"}
        ):
            continue  # its server died while kombu took it
        if (late := undisturbed(sent, began, windows)) > START_SLACK:
            yield Violation("worker silent", f"{worker}: {id_}, sent at {sent:.1f}, started {late:.1f} s late")


def nothing_grows(records: Records) -> Iterator[Violation]:
    """Memory, threads, files and connections of a process stay what they were a minute after its start."""
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in records.samples:
        by_process[sample.name, sample.pid].append(sample)
    for (name, pid), samples in by_process.items():
        early = [sample for sample in samples if sample.at < samples[0].at + 60]
        late = [sample for sample in samples if sample.at > samples[-1].at - 60]
        for what, bound in (("threads", 10), ("files", 25), ("connections", 15), ("memory", 40 << 20)):
            before, after = (max(getattr(sample, what) for sample in part) for part in (early, late))
            if after > before + bound:
                text = f"{name} ({pid}): {before} {what} at first, {after} after {samples[-1].at - samples[0].at:.0f} s"
                yield Violation("growth", text)


#: Seconds of a process or a server that tell its slope, the first of them without those in which it comes to its size:
#: a process that runs tasks takes some 2,000 runs for that.
TELLS_A_SLOPE, COMES_TO_SIZE = 3300.0, 1200.0

#: What may be more after each hour, of a process and of a family of keys.
HOURLY = {"threads": 1.0, "files": 2.0, "connections": 2.0, "memory": float(8 << 20), "children": float(12 << 20)}
HOURLY_ELEMENTS = 20.0


def hourly(points: Iterable[tuple[float, float]]) -> float | None:
    """Return by how much a value rises in an hour, None if its time is too short to tell.

    This is the median of the slopes between all pairs (Theil, 1950), of the least value of each minute: faults and
    load raise a value for a while, a leak raises the least.
    """
    minutes: dict[int, float] = {}
    begin, last = None, 0.0
    for at, value in points:
        begin = at if begin is None else begin
        if at >= begin + COMES_TO_SIZE:
            minute, last = int(at // 60), at
            minutes[minute] = min(value, minutes.get(minute, value))
    if begin is None or last - begin < TELLS_A_SLOPE:
        return None
    slopes = [(minutes[b] - minutes[a]) / (b - a) for a, b in combinations(minutes, 2)]
    return median(slopes) * 60


def slopes(records: Records) -> Iterator[tuple[str, str, float, float]]:
    """Yield whose slope it is, of what, how much it is in an hour, and how much it may be."""
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in records.samples:
        by_process[sample.name, sample.pid].append(sample)
    for (name, pid), samples in by_process.items():
        for what, bound in HOURLY.items():
            if (slope := hourly((sample.at, getattr(sample, what)) for sample in samples)) is not None:
                yield f"{name} ({pid})", what, slope, bound
    for family in sorted({family for stored in records.stored for family in stored.elements}):
        points = [(stored.at, stored.elements.get(family, 0)) for stored in records.stored]
        if (slope := hourly(points)) is not None:
            usual = median(count for _, count in points)  # what is remembered for some minutes rises and falls
            yield "the server", family, slope, max(HOURLY_ELEMENTS, usual / 5)


def nothing_climbs(records: Records) -> Iterator[Violation]:
    """What a process has, and what the server keeps, does not rise for as long as the run lasts."""
    for whose, what, slope, bound in slopes(records):
        if slope > bound:
            yield Violation("slope", f"{whose}: {slope:.1f} {what} more in each hour, of {bound:g} at most")


# ---------------------------------------------------------------- silence

#: What must name a fault of more than ten seconds: patterns for doctor's findings, the log's events and the metrics.
NAMED: Mapping[str, Mapping[str, str]] = {
    "server": {
        "doctor": r"schedule's server|locks",
        "log": r"beat\d .*event=(trouble|unreachable|not_renewed)",
        "metrics": r"singlebeat_redis_up 0|singlebeat_locks_up 0|singlebeat_overdue_entries [1-9]",
    },
    "broker": {
        "doctor": r"broker",
        "log": r"beat\d .*event=unreachable",
        "metrics": r"singlebeat_pending_occurrences [1-9]|singlebeat_overdue_entries [1-9]",
    },
    "server_clock": {"doctor": r"clock"},
    "no beat": {"doctor": r"no beat leads|no leader"},
    "beats cut off": {
        "doctor": r"no beat leads|no leader",
        "log": r"beat\d .*event=(trouble|unreachable|not_renewed|leadership_lost)",
        "metrics": r"beat\d singlebeat_redis_up 0",
    },
    "beat cut off": {
        "log": r"{whom} .*event=(trouble|unreachable|not_renewed|leadership_lost)",
        "metrics": r"{whom} singlebeat_redis_up 0",
    },
    "worker cut off": {
        "log": r"{whom} .*event=(not_renewed|ends_not_recorded|lock_lost|postponed)",
        "metrics": r"{whom} singlebeat_locks_up 0",
    },
}


def situation(kind: str, whom: str) -> str:
    """Return under which name of ``NAMED`` a fault is, empty if it need not be named."""
    if kind in {"server_killed", "server_hangs", "read_only", "out_of_memory"}:
        return "server"
    if kind == "broker_killed":
        return "broker"
    if kind == "server_clock":
        return kind
    if kind == "beats_killed":
        return "no beat"
    if kind in {"black_hole", "refused"}:
        if whom == "beats":
            return "beats cut off"
        if whom == "":
            return "server"
        return "beat cut off" if whom.startswith("beat") else "worker cut off" if whom.startswith("worker") else ""
    return ""


def long_faults_are_named(records: Records) -> Iterator[Violation]:
    for naming in records.namings:
        pattern = NAMED.get(situation(naming.kind, naming.whom), {}).get(naming.tool)
        if pattern is None or naming.whom in records.bare:
            continue
        whom = r"worker\d" if naming.whom == "workers" else naming.whom
        text = _problems(naming.text) if naming.tool == "doctor" else naming.text
        if not naming.is_late and not re.search(pattern.replace("{whom}", whom), text):
            shown = "\n".join(naming.text.splitlines()[-25:])
            yield Violation("silence", f"{naming.tool} does not name {naming.fault}:\n{shown}")


def _problems(text: str) -> str:
    """Return doctor's findings that are not fine, or all it said where that is no JSON."""
    try:
        findings = json.loads(text[text.index("[") : text.rindex("]") + 1])
        return "\n".join(f"{row['about']}: {row['text']}" for row in findings if row["level"] != "fine")
    except ValueError:
        return text


CHECKS: Sequence[Callable[[Records], Iterator[Violation]]] = (
    occurrences_are_decided,
    one_kind_of_beat_decides,
    no_kind_of_beat_is_silent,
    an_occurrence_has_one_id_and_one_decision,
    what_is_decided_is_sent,
    missed_occurrences_are_too_late,
    every_decision_has_a_reason,
    a_pause_lasts,
    backfills_are_whole,
    runs_of_one_singleton_do_not_overlap,
    a_task_with_a_lock_runs_once,
    messages_become_runs,
    no_run_is_taken_for_lost,
    calls_are_sent,
    the_last_arguments_run,
    skips_are_true,
    locks_end,
    processes_live,
    workers_work,
    nothing_grows,
    nothing_climbs,
    long_faults_are_named,
)


def counts(records: Records) -> Mapping[str, int | float]:
    """Return what a run amounts to."""
    decisions = Counter(decision.decision for decision in records.decisions)
    delays = records.windows(lambda fault: bool(DELAYS_BEATS.match(fault.kind)))
    bare = {
        "seconds of RedBeat": round(sum(end - begin for begin, end in records.redbeat_led)),
        "RedBeat's terms": len(records.redbeat_led),
        "sent by RedBeat": sum(message.is_redbeats for message in records.messages),
        "bare runs": sum(map(records.is_bare, records.runs)),
        **Counter(end["outcome"] for end in records.ends if end["outcome"] in FREED),
    }
    return (bare if records.bare else {}) | {
        "seconds": round(records.deleted - records.began),
        "calm": round(undisturbed(records.began, records.deleted, delays)),
        "faults": len(records.faults),
        "edits": len(records.edits),
        "decisions": len(records.decisions),
        "sent": sum(decisions[word] for word in SENT),
        "skipped": decisions["skipped_overlap"],
        "missed": decisions["missed"],
        "paused": decisions["paused"],
        "messages": len(records.messages),
        "runs": len(records.runs),
        "killed runs": sum(run.ended is None for run in records.runs),
        "calls": len(records.calls),
        "failed calls": sum(bool(call.error) for call in records.calls),
    }


# ---------------------------------------------------------------- beside another scheduler


def standing(records: Records) -> Mapping[str, int | float]:
    """Return what messages and runs tell of a scheduler that records no decisions.

    ``lost`` are times without a fault for which an entry sent nothing, ``doubled`` messages that came more often than
    the entry's interval, ``overlaps`` runs of one Singleton that began beside another one, ``piled up`` the most
    messages of one entry that waited at once, ``silent`` the longest time without a fault in which one sent nothing.
    """
    delays = records.windows(lambda fault: bool(DELAYS_BEATS.match(fault.kind)))
    names = {f"entry {given.name}" for given in records.entries if given.overlap == "skip"} | {"asked", "asked late"}
    starts = {id_: min(run.started for run in runs) for id_, runs in records.by_id().items()}
    due, messages, lost, doubled, piled_up, silent = 0, 0, 0, 0, 0, 0.0
    for given in records.entries:
        begin = next(edit.ended for edit in records.edits if edit.entry == given.name and edit.kind == "put")
        sent = [message for message in records.messages if message.entry == given.name and message.is_original]
        sent.sort(key=lambda message: message.at)
        times = [begin, *(message.at for message in sent), records.deleted]
        due += int((records.deleted - begin) / given.every)
        messages += len(sent)
        for before, after in pairwise(times):
            late = undisturbed(before + given.every, after, delays)
            silent = max(silent, late)
            lost += round(late / given.every) if late > records.slack else 0
        doubled += _too_often(times[1:-1], given.every)
        ends = [(starts.get(message.id, records.ended), -1) for message in sent]
        piled_up = max(piled_up, *accumulate(step for _, step in sorted([*((m.at, 1) for m in sent), *ends])), 0)
    return {
        "faults": len(records.faults),
        "calm": round(undisturbed(records.began, records.deleted, delays)),
        "due": due,
        "messages": messages,
        "lost": lost,
        "doubled": doubled,
        "overlaps": sum(_begun_beside_another(records, name) for name in names),
        "piled up": piled_up,
        "silent": round(silent),
        "ended": sum(exit_.code is not None for exit_ in records.exits),
    }


def _too_often(times: Iterable[float], every: float) -> int:
    """Return how many of these whole seconds come sooner than allowed: one late and one in time may meet."""
    allowed, before, count = 2.0, 0.0, 0
    for at in times:
        allowed = min(2.0, allowed + (at - before) / every)
        before = at
        if allowed >= 1:
            allowed -= 1
        else:
            count += 1
    return count


def _begun_beside_another(records: Records, name: str) -> int:
    over, count = 0.0, 0
    for run in (run for run in records.runs if run.name == name):
        count += run.started < over - 0.001
        over = max(over, run.over)
    return count
