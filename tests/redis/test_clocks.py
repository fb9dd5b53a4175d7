"""Beat decides by the server's clock; a host whose own clock is wrong is named."""

from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime, timedelta

import pytest
from celery.schedules import schedule

from singlebeat import Entry
from singlebeat.beat import server_time
from singlebeat.beat.server_time import ServerTime
from singlebeat.beat.status import ScheduleStatus
from tests.support import APP

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")

HERE = socket.gethostname()


class Clocks:
    """A monotonic clock, and that of a host which is ahead of the server's."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.now, self.ahead = 1_000.0, ahead

    def host(self) -> float:
        return 1_800_000_000.0 + self.now + self.ahead

    def shown(self, later: float = 0.0) -> tuple[int, int]:
        """What the server says, by a clock that is so much ahead of what it was."""
        seconds = 1_800_000_000.0 + self.now + later
        return int(seconds), round(seconds % 1 * 1e6)

    def server_time(self) -> ServerTime:
        return ServerTime(monotonic=lambda: self.now, wall=self.host)

    def ask(self, time: ServerTime, *, there: float = 0.0, back: float = 0.0, later: float = 0.0) -> None:
        """Let a question take so many seconds to the server, and the reply so many back."""
        asked = time.asked()
        self.now += there
        shown = self.shown(later)
        self.now += back
        time.heard(shown, asked)


@pytest.mark.parametrize("ahead", [7200, -600, 0])
def test_the_time_is_the_servers_under_any_clock_of_the_host(ahead):
    clocks = Clocks(ahead)
    time = clocks.server_time()
    assert time.timestamp() == clocks.host()

    clocks.ask(time)
    clocks.now += 100

    assert time.timestamp() == pytest.approx(clocks.host() - ahead)
    assert time.host_ahead == pytest.approx(ahead)


def test_a_step_of_the_hosts_own_clock_changes_no_time_and_is_seen():
    clocks = Clocks()
    time = clocks.server_time()
    clocks.ask(time)
    clocks.ahead = 7200

    assert time.timestamp() == pytest.approx(clocks.host() - 7200)
    clocks.ask(time)
    assert (time.timestamp(), time.host_ahead) == pytest.approx((clocks.host() - 7200, 7200))


@pytest.mark.parametrize(("there", "back"), [(4, 0), (0, 4), (2, 2)])
def test_a_slow_reply_neither_moves_the_time_nor_blames_the_host(there, back, caplog):
    clocks = Clocks()
    for first in (True, False):
        time = clocks.server_time()
        if not first:
            clocks.ask(time)
        clocks.ask(time, there=there, back=back)

        assert time.timestamp() == pytest.approx(clocks.host())
        assert time.host_ahead == pytest.approx(0, abs=1e-5)
    assert caplog.records == []


@pytest.mark.parametrize("later", [7200, -7200, 0.5])
def test_a_step_of_the_servers_clock_is_followed_at_once(later):
    clocks = Clocks()
    time = clocks.server_time()
    clocks.ask(time)

    clocks.ask(time, there=0.001, back=0.001, later=later)

    assert time.timestamp() == pytest.approx(clocks.host() + later, abs=0.002)


def test_a_host_that_differs_is_a_warning_when_it_begins_and_when_it_ends(caplog):
    clocks = Clocks()
    time = clocks.server_time()
    for ahead in (0, 1.9, -2.5, -2.5, -1.5, -2.5, 0.5, 0.5):
        clocks.ahead = ahead
        clocks.ask(time)

    told = [(record.levelname, record.singlebeat) for record in caplog.records]
    assert told == [
        ("WARNING", {"event": "clock_differs", "ahead": -2.5, "host": HERE}),
        ("WARNING", {"event": "clock_agrees"}),
    ]
    assert "differs by -2.5 s from that of the schedule's server" in caplog.text


# ---------------------------------------------------------------- what a beat does, and what tools say


@pytest.fixture
def beat_on(bench, monkeypatch):
    """Make the scheduler of a beat on a host whose clock is so much ahead."""

    def make(ahead: float = 0.0, host: str = HERE, **conf: object):
        scheduler = bench.scheduler(**conf)
        scheduler.server_time = ServerTime(wall=lambda: time.time() + ahead)
        tick = scheduler.tick

        def on_host() -> float:
            with monkeypatch.context() as patch:
                patch.setattr(socket, "gethostname", lambda: host)
                return tick()

        scheduler.tick = on_host
        return scheduler

    return make


def gauge(probe, name: str) -> float:
    """Return the value of a gauge whose name begins like this."""
    (line,) = [line for line in probe("/metrics")[1].splitlines() if line.startswith(name)]
    return float(line.split()[-1])


def near(moment: datetime | float, now: float) -> bool:
    seconds = moment if isinstance(moment, float) else moment.timestamp()
    return abs(seconds - now) < 60


@pytest.mark.parametrize("ahead", [7200, -7200])
def test_a_beat_with_a_wrong_clock_sends_entries_due_by_the_server(beat_on, bench, app, redis, ahead):
    for name, ago in (("due", 90), ("not yet", 0)):
        bench.put(name, ago=timedelta(minutes=ago))
    before = bench.score("not yet")
    beat = beat_on(ahead, beat_schedule={"new": {"task": f"{APP}.plain", "schedule": 3600}})

    beat.tick()

    (record,) = bench.history
    assert (record["entry"], record["decision"]) == ("due", "dispatched")
    assert bench.score("not yet") == before
    now = time.time()
    for name in ("new", "due"):
        assert 0 < bench.score(name) - now <= 3600
    assert near(Entry.from_key("redbeat:new", app=app).last_run_at, now)
    assert near(float(redis.get("redbeat::clock")), now)
    assert near(datetime.fromisoformat(redis.hget("redbeat::leader", "since")), now)


def test_a_standby_with_a_wrong_clock_that_takes_over_silences_no_entry(beat_on, bench, app):
    bench.put(every=1, ago=None, run_on_start=True)
    right, wrong = beat_on(), beat_on(7200)
    right.tick()
    wrong.tick()
    right.close()

    wrong.tick()
    wrong.close()
    beat_on().tick()

    assert bench.score() - time.time() < 2
    assert ScheduleStatus.of(app).overdue == 0


def test_leader_and_standbys_say_how_far_their_clocks_are_off(beat_on, findings, probe, app, cli):
    leader, standby, other = beat_on(7200, "web1"), beat_on(-600, "web2"), beat_on(1.5, "web3")
    for beat in (leader, standby, other, standby):
        beat.tick()

    off = dict(ScheduleStatus.of(app).wrong_clocks(standbys=True))
    assert {text: round(ahead) for text, ahead in off.items()} == {
        "the clock of web1, which leads, is +7200.0 s off that of the schedule's server": 7200,
        "the clock of web2, which stands by, is -600.0 s off that of the schedule's server": -600,
    }
    assert len(ScheduleStatus.of(app).standbys) == 2
    cli("doctor", code=1)
    assert [(level, text.partition(",")[0]) for level, text in findings("clock")] == [
        ("problem", "the clock of web1"),
        ("problem", "the clock of web2"),
    ]
    assert "clock       the clock of web1, which leads" in cli("status").output
    assert "the clock of web1, which leads, is +7200.0 s off" in cli("health", code=1).output
    code, text = probe()
    assert (code, "web1" in text) == (503, True)


def test_the_renewal_of_a_term_keeps_the_offset_of_the_clock(beat_on, redis):
    beat = beat_on(7200)
    beat.tick()
    redis.hdel("redbeat::leader", "ahead")

    assert beat.lease.renew()

    assert float(redis.hget("redbeat::leader", "ahead")) == pytest.approx(7200, abs=1)


@pytest.mark.parametrize(("off", "level", "code"), [(5, "warning", 0), (-5, "warning", 0), (100, "problem", 1)])
def test_this_host_is_named_and_is_not_healthy_from_a_minute_on(
    beat_on, findings, probe, cli, monkeypatch, off, level, code
):
    beat_on(0, "web1").tick()
    at = time.time
    monkeypatch.setattr(
        ServerTime.__init__, "__kwdefaults__", {**ServerTime.__init__.__kwdefaults__, "wall": lambda: at() + off}
    )

    ((found, text),) = findings("clock")

    assert (found, text.partition(",")[0]) == (level, f"the clock of {HERE}")
    cli("health", code=code)
    assert probe()[0] == (503 if code else 200)
    assert gauge(probe, "singlebeat_clock_ahead") == pytest.approx(off, abs=0.5)


def test_a_foreign_value_of_a_clock_ends_no_tool(beat_on, redis, app):
    beat_on().tick()
    for text in ("soon", "nan", ""):
        redis.hset("redbeat::leader", "ahead", text)
        redis.set("redbeat::clock", text)
        redis.zadd("redbeat::standbys", {json.dumps({"host": "h", "pid": 1, "since": "", "ahead": [text]}): 9e15})

        assert list(ScheduleStatus.of(app).wrong_clocks(standbys=True)) == []


# ---------------------------------------------------------------- the server's clock was set back


@pytest.fixture
def set_back(beat_on, bench):
    """Return a beat that has decided by a clock which was so many seconds ahead, and sees it set right."""

    def make(seconds: float):
        bench.put(every=2, ago=None, run_on_start=True)
        beat = beat_on()
        term = beat.lease.acquire()
        beat._tick(datetime.now(UTC) + timedelta(seconds=seconds), term)
        beat.tick()
        return beat, term

    return make


def test_every_tool_says_that_entries_wait_for_a_clock_that_was_set_back(set_back, findings, probe, redis, cli):
    set_back(7200)
    until = datetime.fromtimestamp(float(redis.get("redbeat::clock")), UTC)
    waits = f"entries wait until {until:%Y-%m-%d %H:%M:%SZ}, for 7"

    ((level, text),) = findings("clock")
    assert (level, text.startswith(waits)) == ("problem", True)
    assert "the clock of the schedule's server was set back" in text
    assert "trigger NAME" in text
    assert f"clock       {waits}" in cli("status").output
    assert waits in cli("health", code=1).output
    assert json.loads(cli("health", "--json", code=1).stdout)["healthy"] is False
    code, text = probe()
    assert (code, waits in text) == (503, True)
    assert 7100 < gauge(probe, "singlebeat_clock_set_back_seconds") <= 7200
    explained = cli("explain", "e").output
    assert f"It waits for the clock: {waits}" in explained
    assert "celery singlebeat trigger e" in explained


def test_a_clock_that_was_set_back_is_one_line_and_its_catching_up_another(set_back, logged, redis):
    beat, term = set_back(7200)
    until = datetime.fromtimestamp(float(redis.get("redbeat::clock")), UTC)
    beat.tick()
    (told,) = logged("clock_set_back", "clock_caught_up")
    assert (told["event"], "entries that were decided by then wait" in told["reason"]) == ("clock_set_back", True)
    assert datetime.fromisoformat(told["before"]) == pytest.approx(until, abs=timedelta(milliseconds=1))

    for seconds in (-1, 1, 2):
        beat._tick(until + timedelta(seconds=seconds), term)

    events = [each["event"] for each in logged("clock_set_back", "clock_caught_up")]
    assert events == ["clock_set_back", "clock_caught_up"]


def test_a_clock_that_was_set_back_by_seconds_is_no_problem_and_a_warning(set_back, logged, findings, probe, cli):
    set_back(50)

    assert [level for level, _ in findings("clock")] == ["warning"]
    cli("health")
    assert probe()[0] == 200
    assert logged("clock_set_back") == []


def test_a_leader_that_begins_while_entries_wait_says_so_as_well(set_back, beat_on, logged, caplog):
    set_back(7200)[0].close()
    caplog.clear()

    beat_on().tick()

    assert [each["event"] for each in logged("clock_set_back")] == ["clock_set_back"]


@pytest.mark.parametrize("noted", [None, "1e300"])
def test_no_tool_says_that_entries_wait_after_a_clock_was_days_ahead(set_back, findings, probe, redis, cli, noted):
    set_back(2 * 86_400)
    if noted:
        redis.set("redbeat::clock", noted)

    assert findings("clock") == []
    cli("health")
    assert (probe()[0], gauge(probe, "singlebeat_clock_set_back_seconds")) == (200, 0)
    assert "waits for the clock" not in cli("explain", "e").output


@pytest.mark.parametrize("entries", ["none", "due later", "paused", "stored since"])
def test_no_tool_says_that_entries_wait_if_none_does(beat_on, app, redis, cli, findings, probe, entries):
    """While the clock was ahead, beat has decided about no entry that goes on."""
    if entries == "due later":
        Entry("e", f"{APP}.plain", schedule(10_000), args=["e"], app=app).save()
    if entries == "paused":
        Entry("e", f"{APP}.plain", schedule(2), args=["e"], run_on_start=True, paused=True, app=app).save()
    beat = beat_on()
    beat._tick(datetime.now(UTC) + timedelta(hours=2), beat.lease.acquire())
    beat.tick()
    if entries == "stored since":
        Entry("e", f"{APP}.plain", schedule(2), args=["e"], run_on_start=True, app=app).save()
        Entry("rare", f"{APP}.plain", schedule(86_400), args=["e"], app=app).save()
        beat.tick()
        assert redis.llen("celery") == 1

    assert float(redis.get("redbeat::clock")) > time.time() + 7000, "the guard knows of it"
    assert findings("clock") == []
    assert "clock" not in cli("status").output
    cli("health")
    assert (probe()[0], gauge(probe, "singlebeat_clock_set_back_seconds")) == (200, 0)


def test_one_entry_that_waits_among_many_that_do_not_is_told(set_back, app, cli, findings, probe):
    set_back(7200)
    for number in range(20):
        Entry(f"soon {number}", f"{APP}.plain", schedule(600), args=["e"], app=app).save()
        Entry(f"rare {number}", f"{APP}.plain", schedule(86_400), args=["e"], app=app).save()

    assert [level for level, _ in findings("clock")] == ["problem"]
    cli("health", code=1)
    assert probe()[0] == 503

    cli("pause", "e")
    assert probe()[0] == 200


def test_an_occurrence_is_tried_again_at_once_after_the_clock_was_set_back(set_back, redis):
    beat, term = set_back(0)
    ahead = datetime.now(UTC) + timedelta(hours=2)
    beat._tick(ahead, term)
    redis.zadd("redbeat::pending", {"redbeat:e": ahead.timestamp() + 4})

    beat.clock.check(datetime.now(UTC), term)

    assert redis.zscore("redbeat::pending", "redbeat:e") == 0


def test_a_command_on_a_host_that_is_ahead_takes_no_moment_that_is_to_come(redis, monkeypatch):
    """A reply over a slow line tells an earlier time: a pause that has just ended would still seem to last."""
    ask = server_time.READ_CLOCK

    def slowly(*args: object) -> object:
        time.sleep(0.1)
        reply = ask(*args)
        time.sleep(0.1)
        return reply

    monkeypatch.setattr(server_time, "READ_CLOCK", slowly)
    ahead = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: ahead)
    first = server_time.server_now(redis, "redbeat::schedule")
    monkeypatch.setattr(server_time, "READ_CLOCK", ask)

    assert first < server_time.server_now(redis, "redbeat::schedule") < first + timedelta(seconds=30)
