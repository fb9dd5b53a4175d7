"""Beats that stand by: who they are is known, and one of them leads after a leader that was made to resign."""

from __future__ import annotations

import json
import socket

import pytest
from celery import Celery
from celery.schedules import schedule

from singlebeat import Entry
from singlebeat.beat.status import ScheduleStatus
from tests.support import APP, CeleryProcess, wait_until

BEAT = ("beat", "-S", "singlebeat.Scheduler")


@pytest.fixture
def two(celery, app) -> list[CeleryProcess]:
    """A beat that leads, and one that stands by."""
    Entry("e", f"{APP}.plain", schedule(3600), args=["x"], app=app).save()
    beats = [celery(*BEAT)]
    beats[0].wait_for("this beat leads event=leadership_gained term=1")
    beats.append(celery(*BEAT))
    beats[1].wait_for("Standing by")
    return beats


def standbys(app: Celery) -> list[int]:
    return [int(standby["pid"]) for standby in ScheduleStatus.of(app).standbys]


def test_status_names_the_beats_that_stand_by(two, celery, app):
    leader, standby = two

    shown, as_json = celery("singlebeat", "status"), celery("singlebeat", "status", "--json")

    assert (shown.wait(60), as_json.wait(60)) == (0, 0)
    (record,) = json.loads(as_json.text)["standbys"]
    assert (record["host"], record["pid"]) == (socket.gethostname(), str(standby.pid))
    assert f"standbys    1\n  {record['host']}, pid {standby.pid}, since {record['since']}" in shown.text
    assert ScheduleStatus.of(app).leader["pid"] == str(leader.pid)


def test_a_closed_standby_leaves_the_list_at_once_and_a_dead_one_soon(two, celery, app, redis):
    closing = two[1]
    dying = celery(*BEAT)
    wait_until(lambda: set(standbys(app)) == {closing.pid, dying.pid}, timeout=30)

    closing.terminate()
    closing.wait()
    assert standbys(app) == [dying.pid]

    dying.kill()
    dying.wait()
    wait_until(lambda: standbys(app) == [])


def test_after_a_resignation_the_other_beat_leads(two, celery, app):
    leader, standby = two

    command = celery("singlebeat", "resign")

    assert command.wait(60) == 0
    assert f"pid {standby.pid}, term 2" in command.text
    standby.wait_for("this beat leads event=leadership_gained term=2")
    leader.wait_for("Standing by")
    wait_until(lambda: standbys(app) == [leader.pid])
    assert ScheduleStatus.of(app).leader["pid"] == str(standby.pid)


def test_after_a_resignation_the_only_beat_leads_again(celery, app):
    beat = celery(*BEAT, conf={"redbeat_lock_timeout": 3})
    beat.wait_for("this beat leads event=leadership_gained term=1")

    command = celery("singlebeat", "resign")

    assert command.wait(60) == 0
    beat.wait_for("this beat leads event=leadership_gained term=2")
    assert ScheduleStatus.of(app).leader["pid"] == str(beat.pid)
