"""A year of ten entries in six zones, run by run; and the same year with Celery's and RedBeat's own entries.

Expected is what a cron that looks at the clock on the wall every minute would do. A run belongs to the last nominal
time before it: a nominal time without a run is lost, one with several has doubled ones, and a run that comes a minute
or more after its nominal time is late. ``python -m tests.unit.test_year`` prints the table of the docs, from what
the entries do with the versions that are installed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import version
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedule
from dateutil.rrule import MO
from redbeat.decoder import RedBeatJSONDecoder, RedBeatJSONEncoder
from redbeat.schedulers import RedBeatSchedulerEntry
from redbeat.schedules import rrule

from singlebeat.beat.calendar.recurrence import next_occurrence
from singlebeat.beat.entries.definition import decode_definition, encode_definition
from tests.support import page

START, END = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
MINUTE, QUARTER, HOUR, DAY = (timedelta(minutes=n) for n in (1, 15, 60, 24 * 60))
#: How long Celery and RedBeat sleep at most.
POLL = timedelta(minutes=5)


@dataclass(frozen=True)
class Plan:
    """An entry, what it asks for in words, and what its runs around both shifts are, as the wall clock shows them."""

    what: str
    zone: str
    when: BaseSchedule
    days: str  #: the days before the shifts
    shown: str

    @property
    def kind(self) -> str:
        return type(self.when).__name__.replace("schedule", "interval")


def new_york(*time: int) -> datetime:
    return datetime(*time, tzinfo=ZoneInfo("America/New_York"))  # type: ignore[arg-type, misc]


PLANS = {
    plan.what: plan
    for plan in [
        Plan("02:30", "Europe/Berlin", crontab(30, 2), "03-29 10-25", "29 02:30, 30 03:00, 25 02:30, 26 02:30"),
        Plan(
            "half hours from 0 to 4",
            "Europe/Berlin",
            crontab("*/30", "0-4"),
            "03-30T00:00/4h 10-26T00:00/4h",
            "30 01:30, 30 03:00, 30 03:30, 30 04:00, 30 04:30, "
            "26 02:30, 26 02:00, 26 02:30, 26 03:00, 26 03:30, 26 04:00, 26 04:30",
        ),
        Plan(
            "half past every hour",
            "America/New_York",
            crontab(30),
            "03-09T05:00/4h 11-02T04:00/4h",
            "09 00:30, 09 01:30, 09 03:30, 09 04:30, 02 00:30, 02 01:30, 02 01:30, 02 02:30",
        ),
        Plan("02:15", "Australia/Lord_Howe", crontab(15, 2), "10-04 04-05", "04 02:15, 05 02:30, 05 02:15, 06 02:15"),
        Plan(
            "every second hour",
            "Pacific/Chatham",
            crontab(0, "*/2"),
            "09-27T11:00/6h 04-05T11:00/6h",
            "28 00:00, 28 02:00, 28 04:00, 28 06:00, 06 02:00, 06 04:00",
        ),
        Plan("00:30", "America/Havana", crontab(30, 0), "03-08 11-01", "08 00:30, 09 01:00, 01 00:30, 02 00:30"),
        Plan(
            "half hours from 1 to 3",
            "Antarctica/Troll",
            crontab("*/30", "1-3"),
            "03-30T00:00/4h 10-26T00:00/5h",
            "30 03:00, 30 03:30, 26 02:30, 26 01:00, 26 01:30, 26 02:00, 26 02:30, 26 03:00, 26 03:30",
        ),
        Plan(
            "2 hours",
            "Europe/Berlin",
            schedule(2 * HOUR),
            "03-29T23:00/4h 10-25T23:00/4h",
            "30 01:00, 30 04:00, 26 02:00, 26 03:00",
        ),
        Plan(
            "daily at 09:00",
            "America/New_York",
            rrule("DAILY", dtstart=new_york(2024, 12, 30, 9)),
            "03-08 11-01",
            "08 09:00, 09 09:00, 01 09:00, 02 09:00",
        ),
        Plan(
            "first Monday at 09:00",
            "America/New_York",
            rrule("MONTHLY", dtstart=new_york(2024, 12, 2, 9), byweekday=MO(1)),
            "03-01/31d 11-01/30d",
            "03 09:00, 03 09:00",
        ),
    ]
}


# ---------------------------------------------------------------- what is expected


@cache
def minutes_of(zone: str) -> list[tuple[datetime, datetime]]:
    """Every minute of the year and the day before it, and what the clock on the wall shows then."""
    quarters = ((START - DAY + n * QUARTER) for n in range((END - START + DAY) // QUARTER))  # no clock shifts in one
    shown = ((moment, moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None)) for moment in quarters)
    return [(moment + n * MINUTE, wall + n * MINUTE) for moment, wall in shown for n in range(15)]


def expected(plan: Plan) -> list[datetime]:
    """The runs of the year, by looking at the clock every minute."""
    if plan.kind == "interval":
        return [START + n * plan.when.run_every for n in range(1, (END - START) // plan.when.run_every)]
    if plan.kind == "rrule":
        matches = first_monday if plan.what.startswith("first") else at_nine
        return [moment for moment, wall in minutes_of(plan.zone) if moment > START and matches(wall)]
    days = (plan.when.month_of_year, plan.when.day_of_month, plan.when.day_of_week)
    assert [len(values) for values in days] == [12, 31, 7]
    times = {(hour, minute) for hour in plan.when.hour for minute in plan.when.minute}
    pattern = f"{plan.when._orig_minute} {plan.when._orig_hour}"
    found, reached = [], minutes_of(plan.zone)[0][1] - MINUTE
    for moment, wall in minutes_of(plan.zone):
        if wall == reached + MINUTE or "*" in pattern:
            runs = (wall.hour, wall.minute) in times
        else:  # the clock has jumped: each time that it jumped over, once, and none that it has shown already
            new = (reached + n * MINUTE for n in range(1, (wall - reached) // MINUTE + 1))
            runs = any((each.hour, each.minute) in times for each in new)
        reached = max(reached, wall)
        if runs and moment > START:
            found.append(moment)
    return found


def at_nine(wall: datetime) -> bool:
    return (wall.hour, wall.minute) == (9, 0)


def first_monday(wall: datetime) -> bool:
    return at_nine(wall) and wall.weekday() == 0 and wall.day <= 7


# ---------------------------------------------------------------- the three of them


def ours(plan: Plan) -> list[datetime]:
    """The runs that we compute, for the entry as it comes back from Redis."""
    fields = {"task": "t", "args": [], "kwargs": {}, "options": {}, "schedule": plan.when}
    when = decode_definition(encode_definition(fields, {}), {})["schedule"]
    zone, found = ZoneInfo(plan.zone), []
    moment = next_occurrence(when, START, zone=zone)
    while moment is not None and moment < END:
        found.append(moment)
        moment = next_occurrence(when, moment, zone=zone)
    return found


class World:
    """A clock that is set by hand, and an app that lives by it."""

    def __init__(self, plan: Plan) -> None:
        self.zone, self.now = ZoneInfo(plan.zone), START
        self.app = Celery(set_as_current=False)
        self.app.conf.timezone = plan.zone
        self.app.conf.redbeat_redis_url = "redis://127.0.0.1:1"  # no server is there: nothing here connects
        walls = [moment.astimezone(self.zone).utcoffset() for moment in self._days()]
        shifts = [day for day, before, after in zip(self._days(), walls, walls[1:], strict=False) if before != after]
        self.critical = {(day + n * DAY).date() for day in shifts for n in (-1, 0, 1, 2)}

    def _days(self) -> Iterator[datetime]:
        return (START + n * DAY for n in range(366))

    def adopt(self, when: BaseSchedule) -> BaseSchedule:
        """Give a schedule this clock."""
        mine = object.__new__(type(when))  # RedBeat's rrule cannot be copied
        vars(mine).update(vars(when))
        mine.app, mine.nowfun = self.app, lambda: self.now.astimezone(self.zone)
        return mine

    def sleep(self, seconds: float) -> None:
        """Pass the time until the next tick: as beat does around the shifts, else in one go."""
        wait = timedelta(seconds=max(seconds, 0.001))
        self.now += min(wait, POLL) if self.now.date() in self.critical else wait


def of_celery(plan: Plan) -> list[datetime]:
    """The runs of Celery's own entry in Celery's loop."""
    world, found = World(plan), list[datetime]()
    entry = ScheduleEntry(
        "e", "t", schedule=world.adopt(plan.when), app=world.app, last_run_at=START.astimezone(world.zone)
    )
    while world.now < END:
        is_due, seconds = entry.is_due()
        if is_due:
            found.append(world.now)
            entry = entry.next()
        world.sleep(seconds)
    return found


def of_redbeat(plan: Plan) -> list[datetime]:
    """The runs of RedBeat's own entry in RedBeat's loop; what it stores goes through its own JSON."""
    world, found = World(plan), list[datetime]()

    def stored(value: object) -> object:
        return json.loads(json.dumps(value, cls=RedBeatJSONEncoder), cls=RedBeatJSONDecoder)

    entry = RedBeatSchedulerEntry("e", "t", world.adopt(stored(plan.when)), app=world.app)
    entry.last_run_at = stored(START.astimezone(world.zone))
    score = entry.score
    while world.now < END:
        if score > world.now.timestamp() + POLL.total_seconds():  # not among those that a tick looks at
            world.sleep(score - world.now.timestamp())
            continue
        is_due, seconds = entry.is_due()
        if is_due:
            found.append(world.now)
            entry.last_run_at = stored(entry._default_now())
            score = entry.score
        world.sleep(min(seconds, POLL.total_seconds()))
    return found


@dataclass(frozen=True)
class Tally:
    """What became of the nominal times of a year."""

    lost: int
    doubled: int
    late: int

    def __str__(self) -> str:
        return f"{self.lost} / {self.doubled} / {self.late}"

    @classmethod
    def of(cls, wanted: list[datetime], runs: list[datetime]) -> Tally:
        times, position, late = Counter[datetime](), 0, 0
        for run in runs:
            while position < len(wanted) and wanted[position] <= run:
                position += 1
            if position == 0:  # before the first one
                times[START] += 2
                continue
            nominal = wanted[position - 1]
            times[nominal] += 1
            late += times[nominal] == 1 and run - nominal >= MINUTE
        lost = sum(nominal not in times for nominal in wanted)
        return cls(lost, sum(times.values()) - len(times), late)


@cache
def wanted(what: str) -> list[datetime]:
    return expected(PLANS[what])


def others(plan: Plan) -> tuple[Tally | None, Tally]:
    """What becomes of an entry in Celery, which has no rrule, and in RedBeat."""
    celerys = None if plan.kind == "rrule" else Tally.of(wanted(plan.what), of_celery(plan))
    return celerys, Tally.of(wanted(plan.what), of_redbeat(plan))


@pytest.mark.parametrize("what", PLANS)
def test_a_year_of_runs_is_exact_to_the_minute(what: str) -> None:
    runs = ours(PLANS[what])

    assert runs == wanted(what)
    assert Tally.of(wanted(what), runs) == Tally(0, 0, 0)


@pytest.mark.parametrize("what", PLANS)
def test_both_days_of_a_shift_are_as_written_here(what: str) -> None:
    plan = PLANS[what]
    zone, runs, shown = ZoneInfo(plan.zone), ours(plan), list[str]()
    for day in plan.days.split():
        begin, _, length = day.partition("/")
        start = datetime.fromisoformat(f"2025-{begin}")
        span = timedelta(**{{"h": "hours", "d": "days"}[length[-1]]: int(length[:-1])}) if length else 2 * DAY
        first = start.replace(tzinfo=UTC if "T" in begin else zone).astimezone(UTC)
        last = first + span if "T" in begin else (start + span).replace(tzinfo=zone)
        shown += [f"{run.astimezone(zone):%d %H:%M}" for run in runs if first < run <= last]

    assert ", ".join(shown) == plan.shown


#: Every row of every table in the docs about quality.
DOCUMENTED = {tuple(re.split("  +", line)) for line in page("quality").splitlines() if "  " in line}

#: What becomes of them in Celery 5.7.0 (it has no rrule) and in RedBeat 2.4.2.
OTHERS = {
    "02:30": (Tally(0, 0, 1), Tally(0, 0, 2)),
    "half hours from 0 to 4": (Tally(2, 0, 0), Tally(3, 0, 1)),
    "half past every hour": (Tally(1, 0, 0), Tally(1, 0, 1)),
    "02:15": (Tally(0, 0, 1), Tally(0, 0, 2)),
    "every second hour": (Tally(0, 0, 0), Tally(0, 0, 1)),
    "00:30": (Tally(0, 0, 1), Tally(0, 0, 2)),
    "half hours from 1 to 3": (Tally(4, 0, 0), Tally(5, 0, 1)),
    "2 hours": (Tally(0, 0, 0), Tally(0, 0, 803)),
    "daily at 09:00": (None, Tally(0, 0, 239)),
    "first Monday at 09:00": (None, Tally(0, 40, 8)),
}


@pytest.mark.parametrize("what", PLANS)
def test_celery_and_redbeat_behave_as_in_the_table_of_the_docs(what: str) -> None:
    found = others(PLANS[what])

    assert row(PLANS[what], OTHERS[what]) in DOCUMENTED
    if (version("celery"), version("celery-redbeat")) == ("5.7.0", "2.4.2"):
        assert found == OTHERS[what]
    else:
        assert found[1] != Tally(0, 0, 0)


# ---------------------------------------------------------------- the table

HEAD = ("Entry", "Kind", "Zone", "Runs", "singlebeat", "Celery 5.7.0", "RedBeat 2.4.2")


def row(plan: Plan, others: tuple[Tally | None, Tally]) -> tuple[str, ...]:
    """Return the cells of an entry's row in the table of the docs."""
    tallies = ("–" if tally is None else str(tally) for tally in (Tally(0, 0, 0), *others))
    return (plan.what, plan.kind, plan.zone, str(len(wanted(plan.what))), *tallies)


def lines(rows: list[tuple[str, ...]]) -> list[str]:
    """Return a table as reStructuredText has it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]
    line = "  ".join("=" * width for width in widths)
    return [line, head, line, *body, line]


if __name__ == "__main__":
    print(*lines([HEAD, *(row(plan, others(plan)) for plan in PLANS.values())]), sep="\n")  # noqa: T201 - its purpose
