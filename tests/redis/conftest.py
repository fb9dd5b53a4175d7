"""Fixtures that tests of commands share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.beat import Service
from click.testing import CliRunner, Result

from singlebeat.cli import main


@pytest.fixture
def cli(app, redis):
    """Run a command, in this process."""

    def run(*args: str, code: int | None = 0, app=app, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(main, args, obj=SimpleNamespace(app=app), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code is None or result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def no_worker_is_awaited(monkeypatch):
    """Let commands ask no longer for workers, of which there are none."""
    monkeypatch.setattr("singlebeat.cli.workers.TIMEOUT", 0.05)


@pytest.fixture
def beat(app):
    """Make a beat in this process, which ticks when it is told to."""
    app.conf.singlebeat_watchdog_timeout = None
    scheduler = Service(app, scheduler_cls="singlebeat.Scheduler").get_scheduler()
    yield scheduler
    scheduler.close()
