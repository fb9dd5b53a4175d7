"""The repository's ``exampleconf.py`` does what its text says, in each of the ways in which it can be started."""

from __future__ import annotations

import shlex
import socket
from datetime import datetime
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support import CeleryProcess, free_port, measured, wait_until

GREETED = r"Task exampleconf\.greet\[\S+\] succeeded"
SKIPPED = (
    r"Scheduler: Skipping task report every two seconds \(exampleconf\.report\) "
    r'event=skipped_overlap .*holder=(\S+) reason="held by task \1, running since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"$'
)


def moment(line: str) -> datetime:
    """Return when a line was logged."""
    return datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f")  # noqa: DTZ007 - only differences count


def runs_and_skips(process: CeleryProcess, worker: CeleryProcess) -> None:
    """Wait until tasks ran and runs were skipped, and check what the log says about them."""
    worker.wait_for(GREETED)
    holder = process.wait_for(SKIPPED)[1]
    assert worker.matches(rf"Task exampleconf\.report\[{holder}\] received"), "no such task holds the lock"
    assert "Traceback" not in process.text + worker.text


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def shown_at(url: str) -> str:
    """Return what a page shows, an empty string until it is served."""
    try:
        return httpx.get(url).text
    except httpx.TransportError:
        return ""


@pytest.mark.parametrize("where", ["a server of the user's", "the embedded server"])
def test_beat_and_worker_in_one_run_a_task_soon_and_log_skipped_runs(where, celery, server):
    private = {"TMPDIR": celery.temporary, "XDG_RUNTIME_DIR": celery.temporary, "SINGLEBEAT_REDIS_URL": ""}
    env = private if where == "the embedded server" else {"SINGLEBEAT_REDIS_URL": server.url}

    both = celery("worker", "-B", app="exampleconf", env=env)

    succeeded = both.wait_for(GREETED)
    first = next(line for line in both.lines if line.startswith("[2"))
    took = (moment(succeeded.string) - moment(first)).total_seconds()
    measured(f"the first task succeeded {took:.1f} s after the first line of the log")
    assert took < 10
    runs_and_skips(both, both)
    line = both.wait_for(r"To look at it on a page: (celery -A exampleconf singlebeat web)$")[1]
    page = celery(*shlex.split(line)[3:], "--port", str(free_port()), app="exampleconf", defaults=False, env=env)
    url = page.wait_for(r"^The page: (http://127\.0\.0\.1:\d+/)$")[1]
    assert "report every two seconds" in wait_until(lambda: shown_at(url), what="the page")
    page.stop()
    sockets = list(Path(celery.temporary).glob("singlebeat-*/redis.sock"))
    assert len(sockets) == (where == "the embedded server")
    both.stop()
    for path in sockets:
        wait_until(lambda path=path: not answers(path), what="the end of the embedded server")


@pytest.mark.parametrize("by_name", [False, True], ids=["beat -A exampleconf", "--config exampleconf beat"])
def test_beat_dispatches_also_tasks_that_it_knows_by_name_only(by_name, celery, server):
    env = {"SINGLEBEAT_REDIS_URL": server.url}
    worker = celery("worker", app="exampleconf", env=env).ready()

    if by_name:
        beat = celery("--config", "exampleconf", "beat", "-l", "INFO", app="", defaults=False, env=env)
    else:
        beat = celery("beat", app="exampleconf", env=env)

    runs_and_skips(beat, worker)
