"""Two apps under one prefix: each beat takes the other for its own, and its tools must say so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from singlebeat.cli import main
from tests.support import ROOT, wait_until

APP = """
import json, os
from celery import Celery
from celery.schedules import schedule

app = Celery(os.environ["NAME"], broker=os.environ["SB_TEST_URL"])
app.conf.redbeat_redis_url = os.environ["SB_TEST_URL"]
app.conf.beat_schedule = {os.environ["ENTRY"]: {"task": "work", "schedule": schedule(3600)}}
app.conf.update(json.loads(os.environ.get("CONF", "{}")))
"""


@pytest.fixture
def beat(celery, tmp_path: Path):
    """Start a beat of an app of a name with one entry."""
    (tmp_path / "shared.py").write_text(APP)

    def beat(name: str, entry: str, level: str = "INFO", **conf: object):
        env = {"NAME": name, "ENTRY": entry, "CONF": json.dumps(conf), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return celery("beat", "-S", "singlebeat.Scheduler", "-l", level, app="shared", env=env)

    return beat


@pytest.fixture
def doctor(server, monkeypatch):
    """Ask the doctor as an app of a name; return what it says about the prefix."""
    monkeypatch.setattr("singlebeat.cli.workers.TIMEOUT", 0.05)

    def doctor(name: str, **conf: object) -> list[str]:
        with Celery(name, broker=server.celery_url, set_as_current=False) as app:
            app.conf.update(redbeat_redis_url=server.url, singleton_backend_url=server.url, **conf)
            done = CliRunner().invoke(main, ["doctor", "--json"], obj=SimpleNamespace(app=app))
        rows = json.loads(done.stdout)
        return [f"{row['level']} {row['text']}" for row in rows if row["about"] == "redbeat_key_prefix redbeat:"]

    return doctor


def test_a_beat_says_when_it_meets_another_app(beat, doctor, redis):
    ops = beat("ops", "nightly")
    wait_until(lambda: redis.hexists("redbeat::owners", "nightly"), timeout=30)
    blog = beat("blog", "publish", level="WARNING")
    said = blog.wait_for("This beat of app blog stands by for a beat of app ops event=other_app").string
    assert "give each app a prefix of its own" in said

    (entries, leads) = doctor("blog")
    assert entries.startswith("problem 1 entries there are of app ops, not of blog")
    assert leads.startswith("problem the beat ")
    assert "which leads, is of app ops, not of blog" in leads
    (stands_by,) = doctor("ops")
    assert "which stands by, is of app blog, not of ops" in stands_by
    assert doctor("blog", singlebeat_other_app_check="ignore") == []

    refused = beat("news", "print", singlebeat_other_app_check="raise")
    assert refused.wait() != 0
    assert refused.matches("This beat of app news stands by for a beat of app ops: both have redbeat_key_prefix")

    ops.terminate()
    blog.wait_for("This beat of app blog leads over 1 entries of app ops: they go to its queues event=other_app")


def test_two_apps_of_one_name_are_seen_by_their_different_entries(beat, doctor):
    beat("shop", "nightly").wait_for("this beat leads")
    beat("shop", "publish").wait_for("Standing by")

    (differ,) = doctor("shop")

    assert differ.startswith("warning beats of app shop differ in their beat_schedule (1 and 1 entries)")


def test_a_beat_that_must_not_lead_over_another_app_gives_the_lead_back(beat, redis):
    ops = beat("ops", "nightly")
    wait_until(lambda: redis.hexists("redbeat::owners", "nightly"), timeout=30)
    ops.terminate()
    ops.wait()

    refused = beat("blog", "publish", singlebeat_other_app_check="raise")

    assert refused.wait() != 0
    assert refused.matches("This beat of app blog leads over 1 entries of app ops: they go to its queues: both have")
    assert not redis.exists("redbeat::lock")
    assert redis.smembers("redbeat::statics") == {"nightly"}
