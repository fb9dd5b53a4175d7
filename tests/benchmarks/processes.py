"""Real ``celery`` processes under measurement."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
        process = CeleryProcess(*args, "-l", "WARNING", app="tests.benchmarks.apps", env=env, cwd=directory)
        try:
            yield process
        finally:
            process.stop()


def rss(process: CeleryProcess) -> float:
    """Return the bytes that a process has in memory."""
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, text=True, check=True)
    return int(found.stdout) * 1024.0
