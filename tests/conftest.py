"""Fixtures: a server for each test process, a flushed client for each test, real Celery processes, their oracle."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from hypothesis import settings
from redis import Redis

from singlebeat.locks import late_release
from tests import matrix, versions
from tests.support import ORACLE_DB, CeleryLauncher, Oracle, RedisServer

pytest.register_assert_rewrite("tests.both_backends")
pytest_plugins = ("tests.chaos_report",)

# redis-py asks for its own version, which takes milliseconds, for each client that is made.
importlib.metadata.version = functools.cache(importlib.metadata.version)

settings.register_profile("slow machines", deadline=None)
settings.load_profile("slow machines")


def pytest_configure() -> None:
    """Let signals end the processes of the tests even where they are ignored: by nohup, or in the background."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through thousands of collected tests, again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """The server of this test process; all its tests share it, so none may kill it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(name="redis")
def _redis(server: RedisServer, _client: Redis) -> Redis:
    """A client of ``server``, which is empty when the test begins."""
    _client.flushall()
    return _client


@pytest.fixture(scope="session")
def _client(server: RedisServer) -> Redis:
    return server.client()


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server for this test alone, which may kill, pause and restart it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def celery(server: RedisServer, redis: Redis, tmp_path: Path) -> Iterator[CeleryLauncher]:
    """Starts real Celery processes: ``celery("worker", "-c", "4").ready()``."""
    launcher = CeleryLauncher(server, f"{server.url}?db={ORACLE_DB}", tmp_path)
    yield launcher
    launcher.stop()


@pytest.fixture
def oracle(server: RedisServer, redis: Redis) -> Iterator[Oracle]:
    """What the tasks of ``celery``'s processes did; it outlives any ``own_server``."""
    with server.client(db=ORACLE_DB) as client:
        yield Oracle(client)


@pytest.fixture
def app(server: RedisServer, redis: Redis) -> Iterator[Celery]:
    """The app under test in this process, to send from; its worker is ``celery("worker")``."""
    from singlebeat.locks.memory import MemoryBackend
    from singlebeat.tasks.renewer import _renewers
    from tests.system.apps import make_app

    with make_app(server.celery_url) as app:
        yield app
        # Of a test that was a worker's main process: its thread goes on, but tells this server of no worker any more.
        _, renewer = _renewers.get(app, (0, None))
        if renewer is not None:
            renewer.backend = MemoryBackend()


@pytest.fixture(scope="session")
def libfaketime() -> str:
    """The library that gives a process that preloads it another clock."""
    found = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if found is None:
        pytest.skip("libfaketime is not installed")
    return str(found)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of the test, for what is its own where many tests share a worker."""
    return request.node.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the logs of a failed test's Celery processes."""
    report = yield
    for value in getattr(item, "funcargs", {}).values():
        launcher = getattr(value, "start", value)  # of a stage
        if report.failed and isinstance(launcher, CeleryLauncher):
            logs = [(f"log of celery {process.args[0]}", process.tail()) for process in launcher.processes]
            report.sections.extend(log for log in logs if log not in report.sections)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests whose ids begin alike, ``test_it[group: case]``, in one process: they share expensive fixtures."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group, separator, _ = nodeid.partition(": ")
            return group if separator and "[" in group else nodeid

    return Groups(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the tests have measured, cell by cell, and with what they ran."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    if cells := matrix.cells_of(reports):
        terminalreporter.section("when the lock of a task is free")
        for line in matrix.lines(cells):
            terminalreporter.write_line(line)
    outcomes = ("passed", "failed", "error", "xfailed")
    counts = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in outcomes}
    terminalreporter.section("tested together")
    for line in versions.lines(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _no_refused_calls_of_other_tests():
    """Keep what a test leaves to be freed, on a server that is gone, out of the next test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_release, "_releases", late_release._LateReleases())
        yield
