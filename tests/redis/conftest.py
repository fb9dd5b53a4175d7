"""Fixtures that tests of one process share: its commands, its beats, and its log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import Lease
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.beat.one_write import OneWrite
from singlebeat.cli import main
from tests.redis.bench import Bench
from tests.support import RedisServer


@pytest.fixture
def cli(app, redis, no_worker_is_awaited):
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
    monkeypatch.setattr("singlebeat.diagnosis.workers.TIMEOUT", 0.05)
    monkeypatch.setattr(
        "kombu.transport.redis.Transport.brpop_timeout", 0.05, raising=False
    )  # else a second, from 5.6 on


@pytest.fixture
def findings(cli, app):
    """Return level and text of each finding of the doctor about something."""

    def findings(about: str, *, app=app) -> list[tuple[str, str]]:
        rows = json.loads(cli("doctor", "--json", app=app, code=None).stdout, parse_constant=pytest.fail)
        return [(row["level"], row["text"]) for row in rows if f"{row['about']} ".startswith(f"{about} ")]

    return findings


@pytest.fixture
def probe(app, redis):
    """Return status and text that a beat serves at a path."""

    def probe(path: str = "/readyz", *, app=app) -> tuple[int, str]:
        answer = BeatMetrics(app, Lease(lambda: redis, Keys.of(app).lease, ttl=30)).answer(path)
        return answer.code, answer.body.decode().strip()

    return probe


@pytest.fixture
def bench_on(redis: Redis) -> Iterator[Callable[..., Bench]]:
    """Make a bench on a server, with settings; that of this test process is empty at first."""
    benches = []

    def make(server: RedisServer, **conf: Any) -> Bench:
        benches.append(Bench(server, **conf))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(server: RedisServer, redis: Redis, bench_on) -> Bench:
    """A bench on the server of this test process."""
    return bench_on(server)


@pytest.fixture
def several_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let beats claim, lock, send and confirm in writes of their own, as where the broker is on another server."""
    monkeypatch.setattr(OneWrite, "_may_be_possible", lambda _: False)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[..., list[dict[str, Any]]]:
    """Return the pairs of all lines about these events, with the level of each line."""

    def logged(*events: str) -> list[dict[str, Any]]:
        found = [(record.levelname, getattr(record, "singlebeat", {})) for record in caplog.records]
        return [{"level": level, **pairs} for level, pairs in found if pairs.get("event") in events]

    return logged
