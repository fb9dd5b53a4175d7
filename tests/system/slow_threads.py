"""The app of ``apps`` on a busy host: its threads free no lock and record no end before a process ends by itself."""

from __future__ import annotations

import time
from typing import Any

from singlebeat import run_results
from singlebeat.tasks import renewer
from tests.system.apps import app

__all__ = ("app",)

_write = run_results._Writer._write


def _write_late(*args: Any) -> None:
    time.sleep(0.5)
    _write(*args)


run_results._Writer._write = _write_late
renewer.GATHERING = 1.0
