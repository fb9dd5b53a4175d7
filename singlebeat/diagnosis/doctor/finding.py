"""The findings of the checks, and the facts that several checks read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ...beat.entries.statics import Statics
from ...beat.result_backend import ResultBackendError, check_results, result_place
from ...beat.schedule import Schedule
from ...beat.status import ScheduleStatus
from ...beat.store.probe import lock_place, lock_refusal, lock_server_says, schedule_refusal
from ...config import Config
from ...connections import (
    RedisError,
    ResponseError,
    broker_place,
    is_one_server,
    schedule_client,
    schedule_place,
    schedule_server,
    what_it_does,
)
from ...errors import LockBackendError, SinglebeatError
from ...locks import backend_of
from ..workers import Backlog, BrokerError, NoQuestionsError, Survival, Workers

if TYPE_CHECKING:
    from celery import Celery

    from ...beat.entries.entry import Entry
    from ...beat.store.history import Record

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
    """The answers of the servers and of the workers, read once for all parts that need them.

    No part waits again for a server that did not answer.

    Raises:
        RedisError: the schedule's server did not answer an earlier part.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.error: RedisError | None = None  #: the error of the schedule's server, if it did not answer

    def is_away_with_schedule(self, place: str, *, master: str | None = None) -> bool:
        """Return whether a place is on the schedule's server, which did not answer.

        Args:
            master: the name that the sentinels of the place are asked for.
        """
        away = self.error is not None and what_it_does(self.error) == "does not answer"
        one_master = master is not None and master == schedule_server(self.app).options.get("master_name")
        return away and is_one_server(place, schedule_place(self.app), one_master=one_master)

    @property
    def is_result_backend_away_with_schedule(self) -> bool:
        """Return whether the result backend is on the schedule's server, which did not answer."""
        place = result_place(self.app).removeprefix("result backend ")
        if not place.startswith("sentinel://") or getattr(self.app, "redbeat_redis", None) is not None:
            return self.is_away_with_schedule(place)
        master = (self.app.conf.result_backend_transport_options or {}).get("master_name")
        return self.is_away_with_schedule(place, master=master)

    @cached_property
    def _locks(self) -> bool | SinglebeatError:
        try:
            place = lock_place(self.app)
            if self.is_away_with_schedule(place):
                return LockBackendError(f"the locks' server {place} does not answer: {self.error}")
            return backend_of(self.app).workers_seen()
        except SinglebeatError as exc:
            return exc

    @property
    def locks_error(self) -> SinglebeatError | None:
        """The error of the locks' server, or of its settings; None if it answers."""
        return self._locks if isinstance(self._locks, SinglebeatError) else None

    @property
    def workers_seen(self) -> bool:
        """Whether any worker with singlebeat was seen; True if the locks' server does not say."""
        return self._locks is not False

    @cached_property
    def _workers(self) -> Workers | BrokerError:
        if self.is_away_with_schedule(broker_place(self.app)):
            return BrokerError(f"does not answer: {self.error}")
        try:
            return Workers.ask(self.app)
        except BrokerError as exc:
            return exc

    @property
    def workers(self) -> Workers | None:
        """The answers of the workers; None if the broker does not answer, or refuses the questions."""
        return None if isinstance(self._workers, BrokerError) else self._workers

    @property
    def broker_error(self) -> BrokerError | None:
        """Why the workers could not be asked; None if they could."""
        return self._workers if isinstance(self._workers, BrokerError) else None

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
    def locks_refused(self) -> str:
        """What the locks' server refuses, and what to do; empty if it refuses nothing that is needed."""
        return lock_refusal(self.app)

    @property
    def broker_answers(self) -> bool:
        """Whether the broker answers, though it may refuse the questions to workers."""
        return self.broker_error is None or isinstance(self.broker_error, NoQuestionsError)

    @cached_property
    def backlog(self) -> Backlog:
        """Where messages may still wait."""
        return Backlog(self.app, self.workers)

    def where_waits(self, entry: Entry) -> str:
        """Return where the messages of an entry may still wait, in words; ask the workers only if that matters."""
        return self.backlog.of(entry)

    def what_survived(self, entry: Entry, runs: Sequence[Record]) -> tuple[str, str]:
        """Return what shows that a run of an entry has ended, and what shows that its workers live, in words."""
        return self._survival.of(entry, runs)

    @cached_property
    def _survival(self) -> Survival:
        return Survival(self.app, self.workers)

    @cached_property
    def results(self) -> str:
        """The error of the result backend; empty if the backend answers, or if the app has none."""
        if self.is_result_backend_away_with_schedule:
            return f"does not answer: {self.error}"
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
    def foreign(self) -> Mapping[str, Sequence[str]]:
        """The apps of the entries that other apps have installed and this app has not, by name."""
        return Statics(self.app, schedule_client(self.app)).foreign([entry.name for entry in self.usable])

    @cached_property
    def _examined(self) -> tuple[Sequence[Entry], Mapping[str, str]]:
        return Schedule(self.app).examine(datetime.fromtimestamp(self.state.now, UTC))
