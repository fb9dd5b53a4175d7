"""The alert rules of the deployment kit: whether they fire, and about which metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import ALERTS

#: Minutes for which ``promtool`` plays the series of a case, one sample each.
MINUTES = 90

BEAT = '{instance="beat-1"}'
STANDBY = '{instance="beat-2"}'
WORKER = '{instance="worker-1"}'

#: A fleet in which all is well: series and its values, as ``promtool`` writes them.
HEALTHY = {
    **{f"singlebeat_{name}{of}": "1x90" for of in (BEAT, STANDBY) for name in ("standbys", "redis_up")},
    **{f"singlebeat_{name}{BEAT}": "0x90" for name in ("redis_refuses", "schedule_lost")},
    **{f"singlebeat_tick_duration_seconds_count{of}": "0+60x90" for of in (BEAT, STANDBY)},
    **{f'singlebeat_build_info{{version="1.0",instance="{of}"}}': "1x90" for of in ("beat-1", "worker-1")},
    f"singlebeat_leader{BEAT}": "1x90",
    f"singlebeat_leader{STANDBY}": "0x90",
    f"singlebeat_redbeat_leads{BEAT}": "0x90",
    f"singlebeat_redbeat_leads{STANDBY}": "0x90",
    f"singlebeat_lag_seconds{BEAT}": "0x90",
    f"singlebeat_pending_occurrences{BEAT}": "0 1 0x88",
    f"singlebeat_quarantined_entries{BEAT}": "0x90",
    f"singlebeat_clock_ahead_seconds{BEAT}": "-0.1x90",
    f"singlebeat_clock_set_back_seconds{BEAT}": "0x90",
    'singlebeat_leadership_total{event="lost"}': "0 1x89",
    'singlebeat_decisions_total{decision="dispatched",kind="scheduled"}': "0+1x90",
    'singlebeat_decisions_total{decision="missed",kind="scheduled"}': "0x90",
    'singlebeat_decisions_total{decision="skipped_overlap",kind="scheduled"}': "0+0.1x90",
    'singlebeat_lateness_seconds_bucket{le="0.1"}': "0+1x90",
    'singlebeat_lateness_seconds_bucket{le="+Inf"}': "0+1x90",
    f"singlebeat_locks_up{WORKER}": "1x90",
    f"singlebeat_locks_lost_total{WORKER}": "0x90",
    'singlebeat_runs_total{outcome="success"}': "0+1x90",
    'singlebeat_runs_total{outcome="failure"}': "0x90",
    'singlebeat_runs_total{outcome="duplicate_refused"}': "0+0.1x90",
    'singlebeat_runs_total{outcome="postponed"}': "0+10x90",
    'singlebeat_start_delay_seconds_bucket{le="0.1"}': "0+1x90",
    'singlebeat_start_delay_seconds_bucket{le="+Inf"}': "0+1x90",
}

LATE = {'{le="0.1"}': "0x90", '{le="30"}': "0x90", '{le="60"}': "0x90", '{le="300"}': "0+1x90", '{le="+Inf"}': "0+1x90"}

#: Alert, series that differ from those of a healthy fleet (None is missing), and the minutes at which it does not fire
#: yet and does. What goes wrong, goes wrong at minute 10.
CASES: list[tuple[str, Mapping[str, str | None], int, int]] = [
    ("NoBeatLeads", {f"singlebeat_leader{BEAT}": "1x9 0x80"}, 10, 12),
    ("NoBeatLeads", {f"singlebeat_leader{BEAT}": None, f"singlebeat_leader{STANDBY}": None}, 0, 2),
    ("NoBeatStandsBy", {f"singlebeat_standbys{of}": "1x9 0x80" for of in (BEAT, STANDBY)}, 14, 16),
    ("BeatIsStuck", {f"singlebeat_tick_duration_seconds_count{BEAT}": "0+60x9 600x80"}, 11, 16),
    ("ScheduleUnreachable", {f"singlebeat_redis_up{BEAT}": "1x9 0x80"}, 10, 12),
    ("ScheduleUnreachable", {f"singlebeat_redis_refuses{BEAT}": "0x9 1x80"}, 10, 12),
    ("ScheduleIsLost", {f"singlebeat_schedule_lost{BEAT}": "0x9 1x80"}, 8, 10),
    ("BeatIsBehind", {f"singlebeat_lag_seconds{BEAT}": "0x9 61+60x80"}, 8, 10),
    ("MessagesAreNotSent", {f"singlebeat_pending_occurrences{BEAT}": "0x9 3x80"}, 14, 16),
    ("RunsAreMissed", {'singlebeat_decisions_total{decision="missed",kind="scheduled"}': "0x9 1x80"}, 9, 11),
    ("RunsPileUp", {'singlebeat_decisions_total{decision="skipped_overlap",kind="scheduled"}': "0x9 0+1x80"}, 12, 30),
    ("RunsAreLate", {f"singlebeat_lateness_seconds_bucket{le}": value for le, value in LATE.items()}, 0, 11),
    ("EntryIsBroken", {f"singlebeat_quarantined_entries{BEAT}": "0x9 1x80"}, 9, 10),
    ("LeadershipIsUnsteady", {'singlebeat_leadership_total{event="lost"}': "0x9 0+1x80"}, 10, 20),
    ("ClockIsWrong", {f"singlebeat_clock_ahead_seconds{BEAT}": "0x9 -3x80"}, 10, 12),
    ("EntriesWaitForTheClock", {f"singlebeat_clock_set_back_seconds{BEAT}": "0x9 3600-60x50"}, 9, 10),
    ("VersionsDiffer", {'singlebeat_build_info{version="1.1",instance="beat-2"}': "_x9 1x80"}, 60, 71),
    ("NoWorkerTells", {f"singlebeat_locks_up{WORKER}": None}, 4, 6),
    ("LocksAreUnreachable", {f"singlebeat_locks_up{WORKER}": "1x9 0x80"}, 10, 12),
    ("LocksAreLost", {f"singlebeat_locks_lost_total{WORKER}": "0x9 1x80"}, 9, 11),
    ("RunsFail", {'singlebeat_runs_total{outcome="failure"}': "0x9 1x80"}, 9, 11),
    ("RunsVanish", {'singlebeat_runs_total{outcome="worker_lost"}': "0x9 1x80"}, 9, 11),
    ("RunsStartLate", {f"singlebeat_start_delay_seconds_bucket{le}": value for le, value in LATE.items()}, 0, 11),
    ("RunsAreRefused", {'singlebeat_runs_total{outcome="duplicate_refused"}': "0x9 0+1x80"}, 12, 30),
    ("RunsWaitForOneAnother", {'singlebeat_runs_total{outcome="postponed"}': "0x9 0+200x80"}, 10, 20),
]

#: Alert and counter of what a process may have counted before it is first scraped.
AT_ONCE = {
    "RunsAreMissed": 'singlebeat_decisions_total{decision="missed",kind="scheduled"}',
    "LocksAreLost": f"singlebeat_locks_lost_total{WORKER}",
    "RunsFail": 'singlebeat_runs_total{outcome="failure"}',
    "RunsVanish": 'singlebeat_runs_total{outcome="worker_lost"}',
}


@pytest.fixture(scope="module")
def promtool() -> str:
    """The program of Prometheus that checks rules."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: it is in Debian's package prometheus")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_prometheus_accepts_the_rules(promtool):
    run(promtool, "check", "rules", "--lint-fatal", str(ALERTS))


def test_every_alert_has_a_case():
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]

    assert {rule["alert"] for group in groups for rule in group["rules"]} == {case[0] for case in CASES}


def test_each_alert_fires_when_something_is_wrong_and_not_before(promtool, tmp_path):
    def play(name: str, series: Mapping[str, str | None], *expected: tuple[str, int, int]) -> dict[str, object]:
        return {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": key, "values": value} for key, value in series.items() if value],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertstate="firing"{matcher}}})',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"value": count}] if count else [],
                }
                for matcher, minute, count in expected
            ],
        }

    def case(name: str, changes: Mapping[str, str | None], quiet: int, firing: int) -> dict[str, object]:
        matcher = f',alertname="{name}"'
        return play(name, {**HEALTHY, **changes}, (matcher, quiet, 0), (matcher, firing, 1))

    healthy = play("healthy", HEALTHY, *(("", minute, 0) for minute in (0, 15, 75, MINUTES)))
    redbeat = {f"singlebeat_leader{BEAT}": "0x90", f"singlebeat_redbeat_leads{BEAT}": "1x90"}
    migrating = play("RedBeat leads", {**HEALTHY, **redbeat}, (',alertname="NoBeatLeads"', 75, 0))

    def counted(name: str, what: str, values: str, created_s: int, *expected: tuple[int, int]) -> dict[str, object]:
        series, matcher = AT_ONCE[name], f',alertname="{name}"'
        played = {series: values, series.replace("_total", "_created"): f"{created_s}x90"}
        return play(f"{name} {what}", {**HEALTHY, **played}, *((matcher, *each) for each in expected))

    begun = [counted(name, "at once", "_x9 1x80", 9 * 60, (8, 0), (10, 1), (75, 0)) for name in AT_ONCE]
    gaps = [counted(name, "long ago", "1x9 stale _x9 1x70", -3600, (9, 0), (21, 0), (70, 0)) for name in AT_ONCE]
    cases = [healthy, migrating, *(case(*given) for given in CASES), *begun, *gaps]
    tests = {"rule_files": [str(ALERTS)], "tests": cases}
    path = Path(tmp_path, "tests.yml")
    path.write_text(json.dumps(tests), "utf-8")

    run(promtool, "test", "rules", str(path))
