"""Asks the workers of an app for their tasks, queues, versions and clocks."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.utils.time import rate

from ..beat.delivery import Busy, Delivery, Reader, queue_of
from ..beat.entries.statics import Statics
from ..beat.failures import NO_QUEUE
from ..beat.keys import Keys
from ..beat.lost_messages import count_messages, living_workers
from ..beat.result_backend import ResultBackendError, read_end
from ..beat.server_time import ServerTime
from ..beat.status import counted
from ..beat.store.probe import broker_refusal
from ..broker import bounded, naming_alarms
from ..config import Config
from ..connections import RedisError, broker_place, schedule_client, what_it_does
from ..errors import SinglebeatError
from ..locks import backend_of
from ..locks.redis import RETIRED
from ..log import without_passwords
from ..rabbitmq_errors import is_refused_queue
from ..server_errors import denied_command, is_denied, with_advice

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.entries.entry import Entry
    from ..beat.result_backend import StoredEnd
    from ..beat.store.history import Record

#: The answers to a question, by worker.
_Answers = Mapping[str, Any]

#: Seconds to wait for the answers of all workers.
TIMEOUT = 1.0

#: The questions to all workers. ``active_queues`` and ``stats`` give the queues and the slots of each worker.
QUESTIONS = ("registered", "active", "active_queues", "stats")

#: What precedes the rate limit of a task in the list of a worker.
RATE_LIMIT = "rate_limit="

#: The fraction of the lease for which a worker that reaches the locks' server may renew nothing.
UNHEARD = 0.4

#: Maximum number of queues that are checked for rights.
MOST_QUEUES = 20


class BrokerError(Exception):
    """The broker does not answer or refuses; the message follows the broker's name, with the cause and the remedy."""


class NoQuestionsError(BrokerError):
    """The broker's user lacks a right to ask the workers or to answer; beat and senders may have all that they need."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The answers of all workers that replied in time."""

    running: Mapping[str, str]  #: task id -> worker
    known_tasks: Mapping[str, frozenset[str]]  #: worker -> tasks, Celery's own among them
    versions: Mapping[str, str]  #: worker -> its singlebeat; empty: it has none, or no server for its locks
    readers: Mapping[str, Reader]  #: worker -> its queues, tasks and slots; without workers that answered only in part
    clocks: Mapping[str, float]  #: worker -> the time of its clock while it answered, in seconds since 1970
    asked: tuple[float, float]  #: begin and end of the questions, in seconds of this process's monotonic clock
    namesakes: frozenset[str] = frozenset()  #: names that several workers have: of each, one answer is known

    @classmethod
    def ask(cls, app: Celery) -> Workers:
        """Ask all workers, which takes ``TIMEOUT`` seconds.

        Raises:
            NoQuestionsError: the broker refuses the questions, or the answers of workers with the same user.
            BrokerError: the broker does not answer, or refuses.
        """
        try:
            with bounded(app.connection_for_write(), Config.of(app).singlebeat_socket_timeout) as connection:
                # First, because Celery would retry for ever to send the question.
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=TIMEOUT)
            began = time.monotonic()
            # In parallel, because each question takes the whole timeout.
            with ThreadPoolExecutor(len(QUESTIONS)) as pool:
                replies = [*pool.map(_asking(app), QUESTIONS)]
            answers = [dict(each) for each in replies]
            asked = began, time.monotonic()
            # A worker whose user may not send an answer is silent.
            refused = "" if any(answers) else broker_refusal(app)
        except Exception as exc:  # transports raise any exception
            why = without_passwords(with_advice(exc))
            if is_denied(exc):
                if not denied_command(str(exc)):  # of a script: Redis before 7.2 does not name it
                    with suppress(Exception):  # of the broker, which ``why`` is about
                        why = broker_refusal(app) or why
                raise NoQuestionsError(f"refuses the questions to workers: {why}") from exc
            raise BrokerError(f"{what_it_does(exc)}: {why}") from exc
        if refused:
            raise NoQuestionsError(f"refuses the questions to workers, or their answers: {refused}")
        known, active, queues, stats = answers
        # Every worker has Celery's own tasks, but does not list them.
        builtins = {name for name in app.tasks if name.startswith("celery.")}
        listed = {worker: dict(map(_name_and_rate_limit, tasks)) for worker, tasks in known.items()}
        known_tasks = {worker: frozenset(tasks) | builtins for worker, tasks in listed.items()}
        return cls(
            {run["id"]: worker for worker, runs in active.items() for run in runs},
            known_tasks,
            {worker: stat.get("singlebeat", {}).get("version", "") for worker, stat in stats.items()},
            {
                worker: Reader(
                    frozenset(queue["name"] for queue in queues[worker]),
                    known_tasks[worker],
                    _slots(stats[worker]),
                    [Busy(run["name"], run["id"], _started(run)) for run in active[worker]],
                    stats[worker].get("uptime"),
                    {task: limit for task, limit in listed[worker].items() if limit},
                )
                for worker in sorted(known.keys() & active.keys() & queues.keys() & stats.keys())
            },
            {worker: shown for worker, stat in stats.items() if (shown := stat.get("singlebeat", {}).get("time"))},
            asked,
            frozenset(worker for each in replies for worker, n in Counter(w for w, _ in each).items() if n > 1),
        )

    def wrong_clocks(self, ahead_of_us: float, *, more_than: float) -> Iterator[tuple[str, float]]:
        """Yield the workers whose clock is certainly wrong, with the seconds (about) that the clock is ahead.

        A worker reads its clock between the question and the answer, however slow it is. A right clock shows a time
        between the two.

        Args:
            ahead_of_us: seconds by which the right time is ahead of this process's monotonic clock.
            more_than: seconds by which a clock may be wrong.
        """
        began, ended = (moment + ahead_of_us for moment in self.asked)
        for worker, shown in sorted(self.clocks.items()):
            if not began - more_than <= shown <= ended + more_than:
                yield worker, shown - began


def delivery_of(app: Celery, queue: str, workers: Workers | None, *, locks_answer: bool = True) -> Delivery | None:
    """Return the delivery of a queue; None if the queue is unknown (empty), or if the workers could not be asked.

    Args:
        locks_answer: the locks' server can be asked which workers live, so which of them are silent.
    """
    if not queue or workers is None:
        return None
    delivery = Delivery.of(queue, workers.readers, silent_workers(app, workers) if locks_answer else ())
    if not delivery.unread:
        return delivery
    return replace(delivery, messages=count_messages(app, queue), other_apps=other_apps(app))


def other_apps(app: Celery) -> Sequence[str]:
    """Return the other apps that have entries in the schedule, or lead.

    None if apps share it on purpose, or if its server does not answer.
    """
    if Config.of(app).singlebeat_other_app_check == "ignore":
        return ()
    statics = Statics(app, schedule_client(app))
    with suppress(RedisError):
        leader = statics.client.hget(statics.keys.lease.leader, "app") or statics.owner
        return sorted({*statics.of_others(), leader} - {statics.owner})
    return ()


class Backlog:
    """Where messages of entries may still wait.

    Args:
        workers: the answers of the workers; None if they could not be asked.
    """

    def __init__(self, app: Celery, workers: Workers | None) -> None:
        self._app, self._workers, self._counts = app, workers, dict[str, int]()

    def count(self, queue: str) -> int:
        """Return how many messages wait in a queue; 0 if the broker does not say."""
        if queue not in self._counts:
            self._counts[queue] = count_messages(self._app, queue)
        return self._counts[queue]

    def of(self, entry: Entry) -> str:
        """Return the queue of an entry, in words, if messages wait there or may do so; empty if not, or if unknown."""
        queue = queue_of(self._app, entry)
        if queue is None or self._workers is None:
            return ""
        delivery = Delivery.of(queue, self._workers.readers)
        if count := self.count(queue):
            return f"queue {queue}, which has {counted(count, 'message', 'messages')}"
        if not delivery.readers:
            return f"queue {queue}, which no worker that answers reads"
        return f"queue {queue}, or at its workers: {delivery.full}" if delivery.full else ""


class Survival:
    """What shows that runs did not kill their workers.

    Args:
        workers: the answers of the workers; None if they could not be asked.
    """

    def __init__(self, app: Celery, workers: Workers | None) -> None:
        self._app, self._workers, self._results_answer = app, workers, True

    def of(self, entry: Entry, runs: Sequence[Record]) -> tuple[str, str]:
        """Return what shows that a run has ended, and what shows that the workers live, in words; empty if nothing.

        Args:
            runs: of the entry, the last one first.
        """
        end = self._stored_end(runs[0].task_id)
        ended = f"the result backend has the end of task {runs[0].task_id}, {end.how}" if end else ""
        return ended, self._lives(entry, runs[-1].at.timestamp())

    def _lives(self, entry: Entry, since: float) -> str:
        queue = queue_of(self._app, entry)
        if queue is None or self._workers is None:
            return ""
        readers = Delivery.of(queue, self._workers.readers).readers
        with suppress(RedisError):  # another part reports it
            asked_at = ahead_of_server(self._app) + self._workers.asked[1]
            # A worker rounds the time to a second.
            started = [asked_at - reader.up_s + 1 for reader in readers.values() if reader.up_s is not None]
            if readers and len(started) == len(readers) and max(started) < since:
                return f"each worker that answers and reads queue {queue} was started before these runs"
        return ""

    def _stored_end(self, task_id: str) -> StoredEnd | None:
        if self._results_answer:
            try:
                return read_end(self._app, task_id, timeout=Config.of(self._app).singlebeat_socket_timeout)
            except ResultBackendError:  # another part reports it
                self._results_answer = False
        return None


def ahead_of_server(app: Celery) -> float:
    """Return the seconds by which the time of the schedule's server is ahead of this process's monotonic clock.

    Raises:
        RedisError: the server does not answer.
    """
    server_time = ServerTime(quiet=True)
    server_time.ask(schedule_client(app), Keys.of(app).schedule)
    return server_time.timestamp() - time.monotonic()


def silent_workers(app: Celery, workers: Workers) -> Sequence[str]:
    """Return the workers with singlebeat that seem to live, and have not answered."""
    with suppress(SinglebeatError):  # another part reports an error of the locks' server
        return sorted(living_workers(app, backend_of(app)) - workers.known_tasks.keys())
    return ()


def leaving_workers(app: Celery) -> Sequence[str]:
    """Return the workers that shut down, or have ended less than a lease ago."""
    lease = Config.of(app).singlebeat_lock_lease
    return sorted(worker for worker, age in last_seen(app).items() if RETIRED <= age < RETIRED + lease)


def last_seen(app: Celery) -> Mapping[str, float]:
    """Return the workers with singlebeat that the locks' server saw lately, with the seconds since then.

    To those of a worker that shuts down, or has ended, ``RETIRED`` is added.
    """
    with suppress(SinglebeatError):  # another part reports an error of the locks' server
        return {each.partition(" ")[0]: age for each, age in backend_of(app).workers().items()}
    return {}


def unheard(app: Celery, workers: Workers) -> Sequence[str]:
    """Return the workers that answer and renew nothing at the locks' server, each with the time since they did."""
    least = Config.of(app).singlebeat_lock_lease * UNHEARD
    ages = {worker: age for worker, age in last_seen(app).items() if least < age < RETIRED}
    return [f"{worker} ({ages[worker]:.0f} s)" for worker in sorted(ages) if workers.versions.get(worker)]


def unknown_workers(app: Celery, workers: Workers) -> Sequence[str]:
    """Return the workers with singlebeat that answer, and that the locks' server has not seen since they started."""
    least, seen = Config.of(app).singlebeat_lock_lease * UNHEARD, last_seen(app)
    started = (name for name, reader in workers.readers.items() if reader.up_s is not None and reader.up_s > least)
    # One of that name may have shut down there before.
    unseen = (name for name in started if (age := seen.get(name)) is None or age > RETIRED + least)
    return sorted(name for name in unseen if workers.versions.get(name))


def refused_queues(app: Celery, entries: Collection[Entry]) -> Iterator[str]:
    """Yield a sentence for each queue of entries that the broker refuses or may lack, with the remedy or its words."""
    queues = sorted({queue for entry in entries if (queue := queue_of(app, entry))})
    with suppress(Exception), bounded(app.connection_for_write(), Config.of(app).singlebeat_socket_timeout) as broker:
        # An unreachable broker is reported by its own part.
        for queue in queues[:MOST_QUEUES]:
            try:
                with broker.channel() as channel:
                    channel.queue_declare(queue=queue, passive=True)
            except Exception as exc:  # transports raise any exception; most often there is no such queue yet
                if is_refused_queue(exc):
                    yield f"the broker {broker_place(app)} refuses queue {queue}: {exc}"
                elif is_denied(exc):
                    yield f"the broker {broker_place(app)} refuses queue {queue} to this user: grant the keys {queue}*"
        for entry in entries:
            if exchange := entry.options.get("exchange"):  # only a message finds out whether it reaches a queue
                key = entry.options.get("routing_key", "")
                yield f"maybe no queue is bound to exchange {exchange} with routing key {key!r}: {NO_QUEUE}"


def _asking(app: Celery) -> Callable[[str], Sequence[tuple[str, Any]]]:
    def ask(question: str) -> Sequence[tuple[str, Any]]:
        with naming_alarms(app) as connection:
            mailbox = copy.copy(app.control.mailbox)(connection)
            mailbox.producer_pool = None  # its connections name no alarm
            replies = mailbox.multi_call(question, timeout=TIMEOUT) or []
        return [about for reply in replies for about in reply.items()]

    return ask


def _name_and_rate_limit(listed_task: str) -> tuple[str, str]:
    """Return both of a task that a worker lists as "name [exchange=x rate_limit=1/m]"; the limit is empty if none."""
    name, _, options = listed_task.partition(" [")
    limits = [option.removeprefix(RATE_LIMIT) for option in options[:-1].split() if option.startswith(RATE_LIMIT)]
    return name, next((limit for limit in limits if _is_rate(limit)), "")


def _is_rate(limit: str) -> bool:
    """Return whether a text limits a rate; a routing key may look as if it did."""
    with suppress(ValueError, KeyError):
        return bool(rate(limit) > 0)
    return False


def _slots(stats: Mapping[str, Any]) -> int | None:
    """Return how many tasks a worker can run at once, or None if the worker does not report it."""
    with suppress(KeyError, TypeError, ValueError):
        return max(int(stats["pool"]["max-concurrency"]), int((stats.get("autoscaler") or {}).get("max", 0)))
    return None


def _started(run: Mapping[str, Any]) -> datetime | None:
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(run["time_start"], UTC)
    return None
