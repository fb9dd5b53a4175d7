"""That a stuck beat ends, whatever its loggers do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event

import pytest

from singlebeat.beat.leadership import watchdog
from singlebeat.beat.leadership.watchdog import Watchdog


class Handler(logging.Handler):
    """A handler that does with each record what a test gives it."""

    def __init__(self, do: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self.emit = do  # type: ignore[method-assign]


@pytest.fixture
def handle() -> Iterator[Callable[[Callable[[logging.LogRecord], object]], None]]:
    """Lets a function handle what beat logs."""
    logger, added = logging.getLogger("celery.beat"), list[Handler]()

    def handle(do: Callable[[logging.LogRecord], object]) -> None:
        added.append(Handler(do))
        logger.addHandler(added[-1])

    yield handle
    for handler in added:
        logger.removeHandler(handler)


def end_of_stuck_beat() -> int:
    """Return the exit code with which a beat without progress ends."""
    ends = SimpleQueue[int]()
    Watchdog(0.1, end=ends.put).progress()
    return ends.get(timeout=10)


def test_a_stuck_beat_logs_its_stacks_before_it_ends(handle):
    said = list[str]()
    handle(lambda record: said.append(record.getMessage()))

    assert end_of_stuck_beat() == 1

    (line,) = said
    assert "No progress for 0.1 s" in line
    assert "test_a_stuck_beat_logs_its_stacks_before_it_ends" in line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stuck_beat_ends_if_a_log_handler_fails(handle):
    def fail(record: logging.LogRecord) -> None:
        raise RuntimeError("no such host")

    handle(fail)

    assert end_of_stuck_beat() == 1


def test_a_stuck_beat_ends_if_a_log_handler_hangs(handle, monkeypatch):
    """As one that writes to a pipe that its reader has left full: it may be what the beat is stuck in."""
    monkeypatch.setattr(watchdog, "LOGGED_WITHIN", 0.1, raising=False)
    free = Event()
    handle(lambda _: free.wait())

    try:
        assert end_of_stuck_beat() == 1
    finally:
        free.set()
