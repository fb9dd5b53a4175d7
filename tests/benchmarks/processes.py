"""Processes under measurement: real ``celery`` commands, and sides that must not share theirs with the others."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.benchmarks.case import Side
from tests.benchmarks.stage import Stage
from tests.support import ROOT, CeleryProcess


@contextmanager
def celery(
    stage: Stage, *args: str, tasks: tuple[str, ...], conf: Mapping[str, Any] | None = None, bare: bool = False
) -> Iterator[CeleryProcess]:
    """Run a command as long as the block.

    Args:
        tasks: the tasks that its app has.
        bare: as where singlebeat is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="sb") as directory:
        path = [str(ROOT)]
        if bare:  # the ``celery`` command loads its plugins before it knows the app
            Path(directory, "singlebeat.py").write_text("raise ImportError('not installed here')\n")
            path.insert(0, directory)
        env = {
            "SB_BENCH_URL": stage.server.celery_url,
            "SB_BENCH_CONF": json.dumps(conf or {}),
            "SB_BENCH_TASKS": " ".join(tasks),
            "PYTHONPATH": os.pathsep.join(path),
        }
        # A log line for each message would be measured, too.
        quiet = () if args[0] == "singlebeat" else ("-l", "WARNING")
        process = CeleryProcess(*args, *quiet, app="tests.benchmarks.apps", env=env, cwd=directory)
        try:
            yield process
        finally:
            process.stop()


@contextmanager
def apart(prepare: Callable[[], AbstractContextManager[Side]]) -> Iterator[Side]:
    """Run a side in a process of its own, forked: what the other sides keep costs it neither caches nor collector.

    Args:
        prepare: makes the side ready, in that process.
    """
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe()
    process = fork.Process(target=_serve, args=(prepare, its), daemon=True)
    process.start()
    its.close()  # so that the end of the process ends our wait for it, too

    def side() -> float:
        ours.send(True)
        seconds, error = ours.recv()
        if error:
            raise RuntimeError(error)
        return float(seconds)

    try:
        yield side
    finally:
        with suppress(BrokenPipeError):  # after an error it has ended by itself
            ours.send(False)
        process.join()


def _serve(prepare: Callable[[], AbstractContextManager[Side]], asked: Connection) -> None:
    """Measure each time when asked to."""
    try:
        with prepare() as side:
            while asked.recv():
                asked.send((side(), ""))
    except Exception:
        asked.send((0.0, traceback.format_exc()))


def rss(process: CeleryProcess) -> float:
    """Return the bytes that a process has in memory."""
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, text=True, check=True)
    return int(found.stdout) * 1024.0
