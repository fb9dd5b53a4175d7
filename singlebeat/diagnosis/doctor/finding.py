"""The findings of the checks, and the facts that several checks read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ...beat.result_backend import ResultBackendError, check_results
from ...beat.schedule import Schedule
from ...beat.status import ScheduleStatus
from ...beat.store.probe import lock_place, lock_refusal, lock_server_says, schedule_refusal
from ...config import Config
from ...connections import RedisError, ResponseError
from ...errors import LockBackendError

if TYPE_CHECKING:
    from celery import Celery

    from ...beat.entries.entry import Entry

#: Maximum number of entries that the findings of one check name.
MOST_NAMED = 10


class Finding(NamedTuple):
    """One result of a check, with the remedy."""

    level: str  #: problem, warning or fine
    about: str
    text: str


def of_locks(app: Celery, exc: LockBackendError) -> Finding:
    """Return the finding for an error of the locks' server."""
    refused = lock_refusal(app, exc) if isinstance(exc.__cause__, ResponseError) else ""
    if refused:
        return Finding("problem", f"locks' server {lock_place(app)}", refused)
    return Finding("problem", "locks", lock_server_says(app, exc))


class Read:
    """The state of the schedule and of the result backend, read once for all parts that need it.

    Raises:
        RedisError: the schedule's server did not answer an earlier part; no part waits for it again.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.error: RedisError | None = None  #: the error of the schedule's server, if it did not answer

    @cached_property
    def state(self) -> ScheduleStatus:
        """The state of the schedule as a whole."""
        if self.error is not None:
            raise self.error
        return ScheduleStatus.of(self.app)

    @cached_property
    def refused(self) -> str:
        """What the schedule's server refuses, and what to do; empty if it refuses nothing that is needed."""
        return schedule_refusal(self.app)

    @cached_property
    def results(self) -> str:
        """The error of the result backend; empty if the backend answers, or if the app has none."""
        try:
            check_results(self.app, timeout=Config.of(self.app).singlebeat_socket_timeout)
        except ResultBackendError as exc:
            return str(exc)
        return ""

    @property
    def usable(self) -> Sequence[Entry]:
        """The entries that can be read."""
        return self._examined[0]

    @property
    def unusable(self) -> Mapping[str, str]:
        """The reasons why beat cannot use entries that it has not quarantined yet, by name."""
        return {name: why for name, why in self._examined[1].items() if name not in self.state.quarantine}

    @cached_property
    def _examined(self) -> tuple[Sequence[Entry], Mapping[str, str]]:
        return Schedule(self.app).examine(datetime.fromtimestamp(self.state.now, UTC))
