"""What one run of the test bed consists of, made from a seed and nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

#: Seconds between the start of the fleet and the first fault, and between the last fault's end and the end of the run.
CALM = 4.0

#: Seconds that a fault of each kind may last. What is longer than ten seconds must be named by doctor, log and metrics.
DURATIONS: Mapping[str, tuple[float, float]] = {
    "slow_network": (4, 15),
    "resets": (3, 12),
    "half_open": (0, 0),
    "connections_reset": (0, 0),
    "black_hole": (1, 16),
    "refused": (1, 16),
    "server_killed": (0.2, 14),
    "server_hangs": (0.5, 16),
    "read_only": (1, 15),
    "out_of_memory": (1, 15),
    "failed_over": (0, 0),
    "slot_moved": (0, 0),
    "server_clock": (5, 40),
    "broker_killed": (0.2, 14),
    "broker_ended": (0.5, 10),
    "broker_alarm": (2, 12),
    "beat_killed": (0.2, 12),
    "beat_stopped": (0.5, 16),
    "beat_ended": (0.2, 4),
    "beats_killed": (0.5, 14),
    "beat_starved": (3, 12),
    "handed_over": (3, 9),
    "worker_killed": (0.2, 8),
    "worker_host_lost": (0.2, 8),
    "worker_stopped": (0.5, 16),
    "worker_warm": (0.2, 4),
    "worker_cold": (0.2, 4),
    "worker_starved": (3, 12),
    "delivered_again": (0, 0),
}

#: Kinds of faults of which a run has one at most: there is one replica.
ONCE = {"failed_over"}

#: Seconds by which the clock of the server steps: the entries wait as long when it is set back.
STEPS = (10.0, 30.0, 60.0, 120.0)

#: How long a process of the fleet is down while it gets the other release.
UPGRADED = (0.2, 3.0)

#: What a fault needs: two of them never at once on one of these.
RESOURCES: Mapping[str, str] = {
    **dict.fromkeys(("slow_network", "resets", "half_open", "connections_reset", "black_hole", "refused"), "network"),
    **dict.fromkeys(
        ("server_killed", "server_hangs", "read_only", "out_of_memory", "failed_over", "slot_moved", "server_clock"),
        "server",
    ),
    **dict.fromkeys(("broker_killed", "broker_ended", "broker_alarm"), "broker"),
    **dict.fromkeys(
        ("beat_killed", "beat_stopped", "beat_ended", "beats_killed", "beat_starved", "handed_over"), "beats"
    ),
    **dict.fromkeys(
        ("worker_killed", "worker_host_lost", "worker_stopped", "worker_warm", "worker_cold", "worker_starved"),
        "workers",
    ),
    "delivered_again": "messages",
    "beat_upgraded": "beats",
    "worker_upgraded": "workers",
}


@dataclass(frozen=True)
class Fault:
    """One fault: from ``at`` on, for ``seconds``; at once and over if that is 0."""

    kind: str
    at: float
    seconds: float
    whom: str = ""  #: the process or the link that it meets; empty: all
    weather: Mapping[str, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.at + self.seconds

    @property
    def waits(self) -> float:
        """Seconds for which entries may wait after it, since the server's clock was set back."""
        return abs(self.weather.get("ahead", 0.0))

    @property
    def over(self) -> float:
        return self.end + self.waits

    def __str__(self) -> str:
        how = " ".join(f"{key}={value:.3g}" for key, value in self.weather.items())
        return " ".join(filter(None, (f"{self.at:7.1f} s", self.kind, self.whom, f"for {self.seconds:.1f} s", how)))


@dataclass(frozen=True)
class Edit:
    """What an operator does to an entry; ``every`` is the new interval of one that is rescheduled or put again."""

    at: float
    kind: str
    entry: str
    every: float = 0.0


@dataclass(frozen=True)
class Given:
    """An entry of the schedule. Its nominal times are ``every`` seconds apart; ``anchor`` is one of them, if known."""

    name: str
    task: str
    every: float
    calendar: str = "interval"  #: or rrule, crontab
    overlap: str = "skip"
    seconds: float = 0.0  #: of the body
    grace: float | None = None  #: misfire_grace_time
    edited: bool = False


@dataclass(frozen=True)
class Process:
    """A process of the fleet; the clock of its host is ahead, and gains so many seconds in each second."""

    name: str
    pool: str = ""
    ahead: float = 0.0
    drift: float = 0.0
    is_bare: bool = False  #: without singlebeat: a beat of RedBeat, or a worker of plain Celery

    @property
    def has_right_clock(self) -> bool:
        return not (self.ahead or self.drift)

    def __str__(self) -> str:
        clock = "" if self.has_right_clock else f"({self.ahead:+g} s {self.drift:+g} s/s)"
        return " ".join(filter(None, (self.name, self.pool, clock, "bare" if self.is_bare else "")))


@dataclass(frozen=True)
class Plan:
    """What happens in a run of so many seconds, which begin when the fleet works."""

    seed: int
    seconds: float
    topology: str
    beats: Sequence[Process]
    workers: Sequence[Process]
    entries: Sequence[Given]
    faults: Sequence[Fault]
    edits: Sequence[Edit]
    releases: tuple[str, str] = ("new", "new")  #: at the start, and after the upgrade or its way back

    def lines(self) -> list[str]:
        fleet = ", ".join(map(str, (*self.beats, *self.workers)))
        releases = "" if len(set(self.releases)) == 1 else f", from the {self.releases[0]} release to the other one"
        return [
            f"seed {self.seed}, {self.seconds:.0f} s, topology {self.topology}",
            f"fleet: {fleet}; {len(self.entries)} entries, {len(self.edits)} edits{releases}",
            *map(str, self.faults),
        ]


POOLS = ("prefork", "threads", "gevent", "solo")

#: Clocks of beats' hosts that are wrong, or run too fast or too slowly: seconds ahead, and gained in each second.
CLOCKS = ((20.0, 0.0), (-20.0, 0.0), (0.0, 0.05), (0.0, -0.05), (3600.0, 0.0))

#: Of workers' hosts: kombu takes messages away from other workers by its own clock, after its visibility timeout.
WORKERS_CLOCKS = ((5.0, 0.0), (-5.0, 0.0))


def make_plan(
    seed: int,
    seconds: float,
    *,
    topology: str,
    kinds: Sequence[str],
    beats: int = 3,
    workers: int = 3,
    clocks: bool,
    gap: float = 20.0,
    longest: float = 20.0,
    upgrades: bool = False,
    mixed: bool = False,
) -> Plan:
    """Make the plan of a seed; the same arguments always give the same plan.

    Args:
        kinds: of faults that this topology knows.
        clocks: whether libfaketime is there.
        gap: most seconds between two faults that do not meet one another.
        longest: most seconds of a fault.
        upgrades: whether the fleet gets another release, one process after the other: the new one for the old one, or
            the old one for the new one.
        mixed: whether the fleet has a beat and a worker more, which are bare.
    """
    rng = random.Random(f"{seed} {topology}")

    def clock(choices: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return rng.choice(choices) if rng.random() < 0.3 and clocks else (0.0, 0.0)

    beat_names = [f"beat{n}" for n in range(beats + mixed)]
    worker_names = [f"worker{n}" for n in range(workers + mixed)]
    upgraded, releases = list[Fault](), ("new", "new")
    if upgrades:
        ours = beat_names[:beats], worker_names[:workers]
        upgraded, releases = _upgrades(random.Random(f"{seed} upgrades"), seconds, *ours)
    # A bare worker of the pool solo answers no question while it runs a task: of that one nothing is promised.
    bare_beats = [Process(name, is_bare=True) for name in beat_names[beats:]]
    bare_workers = [Process(name, POOLS[0], is_bare=True) for name in worker_names[workers:]]
    plan = Plan(
        seed=seed,
        seconds=seconds,
        topology=topology,
        beats=[*(Process(name, "", *clock(CLOCKS)) for name in beat_names[:beats]), *bare_beats],
        workers=[
            *(
                Process(name, POOLS[number % len(POOLS)], *clock(WORKERS_CLOCKS))
                for number, name in enumerate(worker_names[:workers])
            ),
            *bare_workers,
        ],
        entries=_entries(rng),
        faults=_without_conflicts(_faults(rng, seconds, kinds, beat_names, worker_names, gap, longest), upgraded),
        edits=_edits(rng, seconds),
        releases=releases,
    )
    return replace(plan, edits=[edit for edit in plan.edits if not _meets_a_step(edit, plan.faults)])


def _meets_a_step(edit: Edit, faults: Sequence[Fault]) -> bool:
    """Return whether an edit lies where the server's times are not those of the bed, by which its effect is judged."""
    steps = [fault for fault in faults if fault.kind == "server_clock"]
    return any(fault.at - fault.waits - 5 < edit.at < fault.over + 5 for fault in steps)


def _upgrades(
    rng: random.Random, seconds: float, beats: Sequence[str], workers: Sequence[str]
) -> tuple[list[Fault], tuple[str, str]]:
    """Return when which process gets the other release, beats or workers first or mixed, and the releases."""
    names = rng.choice(([*beats, *workers], [*workers, *beats], rng.sample([*beats, *workers], len(beats + workers))))
    step = (seconds - 2 * CALM) / (len(names) + 1)
    faults = []
    for number, name in enumerate(names):
        kind = "beat_upgraded" if name in beats else "worker_upgraded"
        at = CALM + (number + rng.uniform(0.5, 1.0)) * step
        faults.append(Fault(kind, at, rng.uniform(*UPGRADED), name))
    return faults, rng.choice((("old", "new"), ("new", "old")))


def _without_conflicts(faults: Sequence[Fault], upgraded: Sequence[Fault]) -> list[Fault]:
    """Return all of them, but those that need what is being upgraded. A warm shutdown takes its time."""

    def meets(fault: Fault, other: Fault) -> bool:
        is_same = RESOURCES[fault.kind] == RESOURCES[other.kind]
        return is_same and fault.at < other.end + 10 and other.at < fault.end + 10

    kept = [fault for fault in faults if not any(meets(fault, other) for other in upgraded)]
    return sorted([*kept, *upgraded], key=lambda fault: fault.at)


def _entries(rng: random.Random) -> list[Given]:
    entries = [
        Given("plain-1s", "plain", 1, overlap="allow_all", seconds=0.05),
        Given("plain-2s", "plain", 2, seconds=rng.choice((0.1, 2.5))),
        Given("late-2s", "late", 2, seconds=0.3),
        Given("skip-1s", "skip", 1, seconds=rng.choice((0.2, 1.5))),
        Given("skip-3s", "late_skip", 3, seconds=1),
        Given("one-2s", "skip", 2, overlap="buffer_one", seconds=rng.choice((0.5, 2.5))),
        Given("all-3s", "in_turn", 3, overlap="buffer_all", seconds=0.5),
        Given("beside-3s", "beside", 3, overlap="allow_all", seconds=1),
        Given("grace-1s", "plain", 1, overlap="allow_all", grace=3, seconds=0.05),
        Given("rule-2s", "plain", 2, "rrule", overlap="allow_all", seconds=0.05),
        Given("rule-3s", "skip", 3, "rrule", seconds=0.5),
        Given("minutely", "late", 60, "crontab", seconds=0.2),
    ]
    return [*entries, *(Given(f"edited-{n}", "plain", 1 + n % 2, overlap="allow_all", edited=True) for n in range(4))]


def _faults(
    rng: random.Random,
    seconds: float,
    kinds: Sequence[str],
    beats: Sequence[str],
    workers: Sequence[str],
    gap: float,
    longest: float,
) -> list[Fault]:
    faults: list[Fault] = []
    busy: dict[str, float] = {}
    at = CALM
    while True:
        kind = rng.choice([kind for kind in kinds if kind not in ONCE or not any(f.kind == kind for f in faults)])
        low, high = DURATIONS[kind]
        length = rng.uniform(low, high) if rng.random() < 0.7 else min(high, low * 1.5)
        length, resource = min(length, longest), RESOURCES[kind]
        start = max(at, busy.get(resource, 0.0) + 1)
        if start + length > seconds - CALM:
            return faults
        fault = Fault(kind, start, length, *_details(rng, kind, beats, workers, seconds))
        if fault.over > seconds - CALM:
            return faults
        faults.append(fault)
        busy[resource] = fault.over
        # Mostly one after the other, so that the fleet has recovered; sometimes two or three at once.
        length += fault.waits
        at = start + (rng.uniform(0, length) if rng.random() < 0.35 else length + rng.uniform(1, gap))


def _details(
    rng: random.Random, kind: str, beats: Sequence[str], workers: Sequence[str], seconds: float
) -> tuple[str, Mapping[str, float]]:
    if kind == "server_clock":
        steps = [step for step in STEPS if step <= max(STEPS[0], seconds / 10)]
        return "", {"ahead": rng.choice(steps) * rng.choice((-1, 1))}
    if RESOURCES[kind] == "network":
        whom = rng.choice(("", "beats", "workers", "sender", *beats, *workers))
        weather = {}
        if kind == "slow_network":
            weather = {"delay": rng.choice((0.001, 0.01, 0.05, 0.1, 0.2)), "jitter": rng.choice((0.0, 0.01, 0.1))}
        if kind == "resets":
            weather = {"resets": rng.choice((0.01, 0.05, 0.2))}
        return whom, weather
    if kind.startswith("worker_"):
        return rng.choice(workers), {}
    if kind.startswith("beat_"):
        return rng.choice(("the leader", *beats)), {}
    return "", {}


def _edits(rng: random.Random, seconds: float) -> list[Edit]:
    edits = []
    at = CALM
    paused: set[str] = set()
    while (at := at + rng.uniform(1, 5)) < seconds - CALM:
        entry = f"edited-{rng.randrange(4)}"
        if entry in paused:
            kind = "resume"
            paused.remove(entry)
        else:
            kind = rng.choice(("pause", "reschedule", "put_again", "backfill", "trigger"))
        if kind == "pause":
            paused.add(entry)
        if kind == "backfill":
            entry = "rule-2s"
        edits.append(Edit(at, kind, entry, rng.choice((1, 2, 3))))
    return edits
