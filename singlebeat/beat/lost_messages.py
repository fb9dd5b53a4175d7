"""The search for lost messages, on any broker: it finds and frees locks whose messages will never start.

A queue that was purged or deleted, a broker that has lost its data and a worker without singlebeat leave such locks
behind. The search reads the lock's own record, and asks the result backend, the queue and all workers. It asks twice
with a pause between, because a message may be on its way. In doubt a lock stays.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..advice import command_line, sentence
from ..broker import connection_for_control, is_one_broker, own_broker
from ..config import Config
from ..destination import queue_of_call
from ..errors import ConfigError, LockBackendError
from ..locks import backend_of, new_backend
from ..locks.acquire import UNSENT_TTL
from ..locks.base import LONGEST_WAIT, RUN_HEADER, BaseBackend, Ref, read_generation
from ..locks.key import behind_key, is_turn_key, suspects_key
from ..locks.redis import RETIRED
from ..log import Log, without_passwords
from ..run_results import MESSAGE_LOST, RAN_ELSEWHERE, record_end_of_message
from ..server_errors import with_advice
from .delivery import Delivery, Reader
from .result_backend import ResultBackendError, ask_results, stored_end

if TYPE_CHECKING:
    from celery import Celery
    from celery.backends.base import Backend
    from kombu import Connection


__all__ = (
    "FREES_NOW",
    "MOST",
    "Answers",
    "Found",
    "LostMessages",
    "Waiting",
    "count_messages",
    "examine",
    "free",
    "is_in_queue",
    "living_workers",
    "may_yet_start",
    "queue_here",
    "sent_to_another_broker",
)

log = Log("celery.beat")

#: Seconds between the two times that workers and queues are asked, and between two searches; less if
#: ``singlebeat_lost_after`` is short.
PAUSE, EVERY = 5.0, 10.0

#: Seconds to wait for the next answer of a worker.
TIMEOUT = 2.0

#: Seconds to wait for the answers of the result backend about all locks.
RESULTS_TIMEOUT = 10.0

#: Seconds after its last answer in which a worker that does not announce itself must answer again; less if
#: ``singlebeat_lost_after`` is less.
SEEN_FOR = 20.0

#: Seconds after which a message that waits for its turn has asked for its lock again, or is lost.
ASKED_AGAIN = 2 * LONGEST_WAIT

#: Seconds from which a time in the future means that the server's clock was set back; less is an inaccuracy.
AHEAD_FROM = 1.0

#: The words for the time of a lock that was queued or renewed in the future.
BEFORE_SET_BACK = "before the clock of the locks' server was set back"

#: Why it is not known whether a message waits in a queue.
BOUND = "it was sent to an exchange, and the broker's bindings decide on its queue"

#: The same if none of the known queues has it.
UNNOTED = "its sender has not noted its queue, which may be another than the known ones: a router chose it, or a retry"

#: What kombu, or an app as in Celery's manual, puts between a queue and a priority in Redis.
SEPARATORS = ("\x06\x16", ":")

#: Maximum number of messages in a queue in which a message is looked for.
MOST_READ = 1000

#: A lock in doubt, and one whose message waits where no worker reads it, is logged after so many times
#: ``singlebeat_lost_after``.
DOUBTED_AFTER = 10

#: Seconds until locks of the same queue that are in doubt are logged again, and until it is checked again who reads it.
DOUBTED_EVERY = 600.0

#: The end of a sentence about a command that frees a lock in doubt.
FREES_NOW = "frees it now; a message that starts later acquires the lock again"

#: The reason if a lock is not queued any more once its message has been searched for.
MOVED_ON = "it has started meanwhile, or its lock is free already"

#: Added to the reason if the lock of a lost message has the arguments of other calls.
JOINED_ARE_LOST = "the calls that have joined it are lost with it, and so are the latest arguments"

#: Most locks that one search asks about, the others wait for the next search; and that it leaves to beats of other
#: brokers: the same ones may come again, and must leave room for others.
MOST, MOST_OTHERS = 500, 250


#: The log message about a freed lock, by outcome.
_FREED = {
    MESSAGE_LOST: "beat: The message of a task is lost: its lock is free",
    RAN_ELSEWHERE: "beat: A task has ended, and its worker did not free its lock: it is free",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A lock whose message has not started, as its record describes it."""

    ref: Ref
    task: str
    since: float  #: when it was queued, in seconds since 1970
    age: float  #: seconds since it was queued; 0 if it is ahead
    left: float  #: seconds until it ends by itself; if it is ahead, without the seconds by which it is ahead
    is_noted: bool  #: its sender has stored where this message went
    queue: str  #: of the message; empty if unknown, or if the broker's bindings decide
    broker: str  #: the name of the broker that it was sent to; empty if unknown
    entry: str  #: that has sent the run; empty if unknown
    delay: float | None  #: seconds that the message had to wait before it could start; None if unknown
    worker: str  #: that has renewed the lock last; empty if the message has asked for the lock since then
    renewed: float | None  #: seconds since the last renewal or try; None if that says nothing about this message
    is_joined: bool = False  #: it has the arguments of calls that have joined it
    is_ahead: bool = False  #: its queued time lies in the future: the clock of the locks' server was set back since
    near: str = ""  #: a queue in which the message may be, if its queue is unknown

    @classmethod
    def of(cls, key: str, record: Mapping[str, str]) -> Waiting | None:
        """Return the lock that a record describes, or None if the record shows no waiting message."""
        if record.get("state") != "queued" or is_turn_key(key) or not {"now", "since", "ttl", "gen"} <= record.keys():
            return None
        now, since = float(record["now"]) / 1000, float(record["since"]) / 1000
        sent = _read_note(record)
        of_message = sent if sent.get("gen") == record["gen"] else {}
        renewed = float(record["renewed"]) / 1000 if record.get("renewed") else None
        ahead, left = since - now if since - now > AHEAD_FROM else 0.0, float(record["ttl"])
        # A renewal before the lock was queued may be of an earlier delivery of the message. A renewal in the future was
        # made before the clock was set back, and says nothing about now.
        is_renewed = renewed is not None and renewed <= now + AHEAD_FROM and (ahead > 0 or renewed >= since)
        return cls(
            Ref(key, record["id"], read_generation(record["gen"])),
            record.get("task", ""),
            since,
            max(0.0, now - since),
            left - ahead if left > ahead else left,  # the next call shortens the lock to this
            "queue" in of_message,
            str(of_message.get("queue") or ""),
            str(sent.get("broker") or ""),  # of each generation: a task retries in the broker of its worker
            record.get("entry", ""),
            _seconds(of_message.get("delay")),
            record.get("worker", ""),
            max(0.0, now - renewed) if renewed is not None and is_renewed else None,
            "joined" in record,
            ahead > 0,
            str(of_message.get("near") or ""),
        )


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _read_note(record: Mapping[str, str]) -> Mapping[str, Any]:
    try:
        sent = json.loads(record.get("sent") or "{}")
    except (ValueError, RecursionError):  # any program may write there
        return {}
    return sent if isinstance(sent, Mapping) else {}


class _Stays(NamedTuple):
    """Why a lock stays."""

    reason: str
    in_doubt: bool = False  #: whether its message may as well be lost
    queue: str = ""  #: in which its message certainly waits; empty if unknown


class Found(NamedTuple):
    """The finding about the message of a lock."""

    lock: Waiting
    outcome: str  #: MESSAGE_LOST or RAN_ELSEWHERE; empty if the message may yet start, so that its lock stays
    reason: str
    in_doubt: bool = False  #: whether a message that may yet start may as well be lost
    queue: str = ""  #: in which the message certainly waits; empty if unknown

    @property
    def way_out(self) -> str:
        """How to free the lock in doubt."""
        return f"{command_line('unlock --force', self.lock.ref.task_id)} {FREES_NOW}"

    def __str__(self) -> str:
        """Return a sentence without its full stop."""
        task = f"task {self.lock.ref.task_id}"
        queued = f"was queued {BEFORE_SET_BACK if self.lock.is_ahead else f'{self.lock.age:.0f} s ago'}"
        match self.outcome:
            case "" if self.reason == MOVED_ON:
                return f"{task} {queued}: {MOVED_ON}"
            case "":
                return f"{task} {queued}, and its lock is not freed: {self.reason}"
            case word if word == MESSAGE_LOST:
                return f"the message of {task} {queued} and is lost: {self.reason}"
            case _:
                return f"{task} has run, and its lock was not freed: {self.reason}"


@dataclass
class Answers:
    """The workers that have answered lately, by the time of their last answer."""

    last: dict[str, float] = field(default_factory=dict)

    def note(self, workers: Iterable[str]) -> None:
        """Note the workers that have answered now."""
        self.last |= dict.fromkeys(workers, time.monotonic())

    def lately(self, seconds: float) -> set[str]:
        """Return the workers that have answered within the last ``seconds``."""
        since = time.monotonic() - seconds
        self.last = {worker: moment for worker, moment in self.last.items() if moment >= since}
        return set(self.last)


def examine(
    app: Celery, locks: Sequence[Waiting], *, backend: BaseBackend | None = None, answers: Answers | None = None
) -> list[Found]:
    """Find out whether the messages of locks are gone; takes some seconds.

    Args:
        answers: earlier answers of workers; by default none.

    Raises:
        LockBackendError: the locks' server does not answer.
    """
    backend, answers = backend or backend_of(app), answers or Answers()
    found = {each.lock.ref: each for each in _examine_once(app, locks, backend, answers)}
    lost = [each.lock for each in found.values() if each.outcome == MESSAGE_LOST]
    if lost:
        time.sleep(min(PAUSE, (Config.of(app).singlebeat_lost_after or PAUSE) / 6))
        again = [each for lock in lost if (each := _reread(lock, backend)) is not None]
        gone = {lock.ref for lock in lost} - {lock.ref for lock in again}
        found |= {ref: Found(found[ref].lock, "", MOVED_ON) for ref in gone}
        found |= {each.lock.ref: each for each in _examine_once(app, again, backend, answers)}
    return [found[lock.ref] for lock in locks]


def free(app: Celery, found: Sequence[Found], *, backend: BaseBackend | None = None) -> list[Found]:
    """Free the locks whose messages are lost, record their ends, and return the findings about the freed locks.

    If such a message still reaches a worker, it runs, unless an equal call holds the lock by then.

    Raises:
        LockBackendError: the locks' server does not answer.
    """
    backend = backend or backend_of(app)
    over = [each for each in found if each.outcome]
    backend.finish_many([each.lock.ref for each in over], remember_for=0)  # a later holder of a lock keeps it
    held = {(key, record.get("id"), record.get("gen")) for key, record in backend.read([f.lock.ref.key for f in over])}
    freed = [f for f in over if (f.lock.ref.key, f.lock.ref.task_id, str(f.lock.ref.generation)) not in held]
    for each in freed:
        lock, outcome, reason = each.lock, each.outcome, each.reason
        if lock.is_joined and outcome == MESSAGE_LOST:
            reason = f"{reason}; {JOINED_ARE_LOST}"
        about = {"task": lock.task, "id": lock.ref.task_id, "entry": lock.entry, "reason": reason}
        log.warning(_FREED[outcome], event=outcome, **about)
        headers = {"id": lock.ref.task_id, RUN_HEADER: {"entry": lock.entry}}
        record_end_of_message(app, headers, outcome, reason)
    return freed


def _reread(lock: Waiting, backend: BaseBackend) -> Waiting | None:
    for key, record in backend.read([lock.ref.key]):
        now = Waiting.of(key, record)
        if now is not None and (now.ref, now.since) == (lock.ref, lock.since):
            return now
    return None


def _examine_once(app: Celery, locks: Sequence[Waiting], backend: BaseBackend, answers: Answers) -> Iterator[Found]:
    """Examine all locks once; yield the finding about each."""
    config = Config.of(app)
    ripe = list[Waiting]()
    for lock in locks:
        if reason := may_yet_start(lock, config):
            yield Found(lock, "", reason)
        else:
            ripe.append(lock)
    ended = _read_ends(app, ripe)
    yield from (Found(lock, RAN_ELSEWHERE, ended[lock.ref]) for lock in ripe if lock.ref in ended)
    open_ = [lock for lock in ripe if lock.ref not in ended]
    yield from (Found(lock, "", reason) for lock in open_ if (reason := sent_to_another_broker(app, lock)))
    if rest := [lock for lock in open_ if not sent_to_another_broker(app, lock)]:
        announced = _announced(app, backend)
        lately = answers.lately(min(SEEN_FOR, config.singlebeat_lost_after or SEEN_FOR))
        expected = _living(announced, config) | (lately - announced.keys())
        leaving = _living({worker: age - RETIRED for worker, age in announced.items() if age >= RETIRED}, config)
        try:
            with _Broker.reached(app) as broker:
                yield from list(_ask(app, rest, broker, expected, leaving, answers))
        except Exception as exc:  # a transport may raise anything
            log.debug("the broker cannot be asked for lost messages", event="not_asked", reason=exc)
            why = f"the broker cannot be asked for its message: {without_passwords(with_advice(exc))}"
            yield from (Found(lock, "", why) for lock in rest)


def _announced(app: Celery, backend: BaseBackend) -> Mapping[str, float]:
    """Return the workers that were announced, with the seconds since then."""
    return {name: age for each, age in backend.workers().items() if (name := _our_hostname(app, each))}


def living_workers(app: Celery, backend: BaseBackend) -> set[str]:
    """Return the workers with singlebeat that seem to live.

    Raises:
        LockBackendError: the locks' server does not answer.
    """
    return _living(_announced(app, backend), Config.of(app))


def _living(announced: Mapping[str, float], config: Config) -> set[str]:
    return {worker for worker, age in announced.items() if age < config.singlebeat_lock_lease}


def may_yet_start(lock: Waiting, config: Config) -> str:
    """Return why the message of a lock may yet start, by the lock's record; empty if the message is overdue."""
    patience, delay = config.singlebeat_lost_after or PAUSE, lock.delay or 0.0
    # Without its countdown or eta, as in records of older versions, only the lifetime of the lock tells of one.
    left = lock.left if lock.delay is None else 0.0
    lives_for = max(config.singlebeat_lock_lease, ASKED_AGAIN)
    if lock.renewed is not None and lock.renewed < lives_for:
        if not lock.worker:
            return f"its message asked for the lock {lock.renewed:.0f} s ago, and asks again"
        return (
            f"worker {lock.worker} had its message {lock.renewed:.0f} s ago, when it renewed the lock; if that worker "
            f"has died, its message counts as late in {lives_for - lock.renewed:.0f} s"
        )
    if lock.is_ahead:
        if delay or left > config.singlebeat_queued_ttl + AHEAD_FROM:
            return "its countdown or eta may not be over"
    elif lock.age < delay + patience:
        return f"its message counts as late only after {delay + patience:g} s"
    elif left > config.singlebeat_queued_ttl - patience:
        return "its countdown or eta is not over, or ended just now"
    if not lock.is_noted and lock.age + lock.left <= UNSENT_TTL + 1:
        return f"it is not known whether its message was sent; if not, the lock ends by itself in {lock.left:.0f} s"
    return ""


def sent_to_another_broker(app: Celery, lock: Waiting) -> str:
    """Return that a message was sent to another broker, and what to do; empty if it was not, or if that is unknown."""
    own = own_broker(app)
    if not lock.broker or is_one_broker(lock.broker, own):
        return ""
    return (
        f"it was sent to the broker {lock.broker}, and the broker of this process is {own}: ask with the settings of "
        f"its sender. If that broker is gone for good: {command_line('unlock --force', lock.ref.task_id)}"
    )


def queue_here(app: Celery, lock: Waiting) -> str:
    """Return the queue of a message; empty if it is unknown, or in another broker."""
    return "" if sent_to_another_broker(app, lock) else lock.queue


def _read_ends(app: Celery, locks: Sequence[Waiting]) -> Mapping[Ref, str]:
    """Return the ends that the result backend knows, by the locks of their messages."""
    ended: dict[Ref, str] = {}

    def ask(backend: Backend) -> None:
        for lock in locks:
            if lock.ref.generation >= 1:  # of a retry, which has the id of the run that has sent it and has returned
                continue
            end = stored_end(backend, lock.ref.task_id)
            # Another message with this task id may have run before.
            if end is not None and end.at is not None and end.at.timestamp() >= lock.since:
                reason = f"it ended with {end.status}, and its worker left its lock: it may lack singlebeat"
                ended[lock.ref] = f"{reason}: {end.error}" if end.error else reason

    try:
        if locks:
            ask_results(app, ask, timeout=RESULTS_TIMEOUT)
    except ResultBackendError as exc:  # then the ends of the other messages stay unknown
        log.debug("the result backend cannot be asked for lost messages", event="not_asked", reason=exc)
    return dict(ended)


def _ask(
    app: Celery, locks: Sequence[Waiting], broker: _Broker, expected: Set[str], leaving: Set[str], answers: Answers
) -> Iterator[Found]:
    """Ask the queues, and then the workers: a message that leaves its queue in between reaches a worker.

    Args:
        expected: the workers that seem to live; all of them must answer.
        leaving: the workers that shut down: they do not answer, and may still have messages.
    """
    stays = dict[Ref, _Stays | None]()
    for lock in locks:
        if lock.queue:
            stays[lock.ref] = broker.waits_in([lock.queue], lock.ref.task_id)
        elif lock.is_noted:
            stays[lock.ref] = _Stays(BOUND, True)
    open_ = [lock for lock in locks if not stays.get(lock.ref)]
    if any(not lock.queue for lock in open_):
        queues = {queue["name"] for reply in broker.ask("active_queues").values() for queue in reply or ()}
        queues |= {str(name) for name in app.amqp.queues}
        for lock in open_:
            if not lock.queue:
                own = _queue_of(app, lock.task)
                known = sorted((queues | {own or "", lock.near}) - {""})
                stays[lock.ref] = _Stays(BOUND, True) if own == "" else broker.waits_in(known, lock.ref.task_id)
        open_ = [lock for lock in open_ if not stays.get(lock.ref)]
    if open_:
        replies = broker.ask("query_task", ids=[lock.ref.task_id for lock in open_])
        answers.note(replies)
        silent = sorted(expected - replies.keys())
        for lock in open_:
            unnoted = None if lock.queue else _Stays(UNNOTED, True)
            stays[lock.ref] = _who_may_have(lock, replies, silent, leaving) or unnoted
    for lock in locks:
        gone = f"no worker that answers has its message, and it is not in its queue {lock.queue}"
        why = stays.get(lock.ref)
        yield Found(lock, "", *why) if why else Found(lock, MESSAGE_LOST, gone)


def _who_may_have(lock: Waiting, known: Mapping[str, Any], silent: Sequence[str], leaving: Set[str]) -> _Stays | None:
    """Return which worker has the message of a lock, or may have it; None if none has it.

    Args:
        known: the answers, by worker: the messages that it has.
        silent: the workers that seem to live, and do not answer.
        leaving: the workers that shut down.
    """
    if lock.worker in leaving - known.keys():
        return _Stays(f"worker {lock.worker} had its message, and shuts down: it gives the message back at its end")
    if has := next((worker for worker, reply in known.items() if lock.ref.task_id in (reply or {})), ""):
        return _Stays(f"worker {has} has its message")
    if not known:
        return _Stays("no worker answers, and one may have its message", in_doubt=not silent)
    if silent:
        return _Stays(f"worker {silent[0]}, which may have its message, does not answer")
    return None


def _queue_of(app: Celery, task: str) -> str | None:
    """Return the queue of a task for a call that names none; empty if the broker's bindings decide, None if unknown."""
    try:
        return queue_of_call(app, task, {})
    except Exception:  # a user's own router may raise anything
        return None


def _our_hostname(app: Celery, announced: str) -> str:
    """Return the hostname of a worker that has announced itself; empty if its broker is not ours."""
    hostname, _, broker = announced.partition(" ")
    return hostname if is_one_broker(broker, own_broker(app)) else ""


def count_messages(app: Celery, queue: str) -> int:
    """Return how many messages wait in a queue; 0 if the broker does not say."""
    try:
        with _Broker.reached(app) as broker:
            return broker.count(queue)
    except Exception as exc:  # a transport may raise anything
        log.debug("the broker cannot be asked for a queue", event="not_asked", reason=exc)
        return 0


def is_in_queue(app: Celery, queue: str, task_id: str) -> bool | None:
    """Return whether a queue has the message of a task at this moment; None if that is not known."""
    try:
        with _Broker.reached(app) as broker:
            return broker.has(queue, task_id) if broker.count(queue) else False
    except Exception as exc:  # a transport may raise anything
        log.debug("the broker cannot be asked for a queue", event="not_asked", reason=exc)
        return None


class _Broker:
    """A connection to the broker for questions, whose waits are bounded."""

    def __init__(self, app: Celery, connection: Connection) -> None:
        self._connection, self._counts = connection, dict[str, int]()
        self._messages = dict[str, Sequence[bytes]]()
        # The mailbox's own pool of producers has connections whose waits are not bounded.
        self._mailbox = copy.copy(app.control.mailbox)(connection)
        self._mailbox.producer_pool = None

    @classmethod
    @contextmanager
    def reached(cls, app: Celery) -> Iterator[_Broker]:
        """Yield a broker that answers."""
        with connection_for_control(app) as connection:
            # Connect first, because Celery would try for ever to send the question.
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=TIMEOUT)
            yield cls(app, connection)

    def ask(self, command: str, **arguments: object) -> Mapping[str, Any]:
        """Return the answers of all workers, by worker."""
        replies = self._mailbox.multi_call(command, arguments, timeout=TIMEOUT) or []
        return {worker: reply for each in replies for worker, reply in each.items()}

    def waits_in(self, queues: Iterable[str], task_id: str) -> _Stays | None:
        """Return in which of the queues the message of a task waits, or may wait; None if in none."""
        for queue in queues:
            if count := self.count(queue):
                found = self.has(queue, task_id)
                if found:
                    return _Stays(f"its message waits in queue {queue}", queue=queue)
                if found is None and count == 1:
                    return _Stays(f"1 message waits in queue {queue}, perhaps its own", True)
                if found is None:
                    return _Stays(f"{count} messages wait in queue {queue}, perhaps its own among them", True)
        return None

    def has(self, queue: str, task_id: str) -> bool | None:
        """Return whether a queue that is not empty has the message of a task; None if that is not known.

        It is known of a queue in Redis that is not long. The message has the id also outside of its encoded body.
        """
        if self._connection.transport.driver_name != "redis" or json.dumps(task_id) != f'"{task_id}"':
            return None
        if queue not in self._messages:
            self._messages[queue] = self._read(queue) if self.count(queue) <= MOST_READ else ()
        messages = self._messages[queue]
        return any(task_id.encode() in message for message in messages) if messages else None

    def _read(self, queue: str) -> Sequence[bytes]:
        """Return the messages in a queue in Redis, of all priorities; empty if there are too many, or by its ACL."""
        with self._connection.channel() as channel, channel.client.pipeline(transaction=False) as pipe:
            for key in _lists_of(channel, queue):
                # kombu puts its prefix before the keys of the commands that it uses itself.
                pipe.lrange(f"{channel.global_keyprefix}{key}", 0, MOST_READ)
            lists = pipe.execute(raise_on_error=False)
        if any(isinstance(each, Exception) or len(each) > MOST_READ for each in lists):
            return ()
        return [message for each in lists for message in each]

    def count(self, queue: str) -> int:
        """Return how many messages wait in a queue."""
        if queue not in self._counts:
            with self._connection.channel() as channel:
                self._counts[queue] = self._ask_count(channel, queue)
        return self._counts[queue]

    def _ask_count(self, channel: Any, queue: str) -> int:
        if self._connection.transport.driver_name == "redis":
            # kombu's passive declare looks for a list without the prefix of its keys, and finds none.
            with channel.client.pipeline(transaction=False) as pipe:
                for key in _lists_of(channel, queue):
                    pipe.llen(key)  # kombu puts its prefix before it
                return sum(pipe.execute())
        try:
            count: int = channel.queue_declare(queue=queue, passive=True).message_count
        except (*self._connection.channel_errors, *self._connection.connection_errors) as exc:
            if str(getattr(exc, "reply_code", "")) != "404":
                raise
            return 0  # there is no such queue
        return count


def _lists_of(channel: Any, queue: str) -> Sequence[str]:
    """Return the keys of Redis in which messages of a queue may be, of all priorities.

    The message may be of another app, with other priorities and another separator; those in Celery's manual are known.
    """
    own = {channel._q_for_pri(queue, priority) for priority in channel.priority_steps}
    others = {f"{queue}{separator}{priority}" for separator in SEPARATORS for priority in range(1, 10)}
    return sorted({queue} | own | others)


class LostMessages:
    """The search for lost messages of locks that keep runs waiting, in a thread beside the tick."""

    def __init__(self, app: Celery) -> None:
        self.app, self._patience = app, Config.of(app).singlebeat_lost_after
        self._suspects: dict[str, None] = {}
        self._news, self._stopped = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._answers, self._doubted, self._checked = Answers(), dict[str, float](), dict[str, float]()
        self._poll_at = time.monotonic() + EVERY

    def poll(self) -> None:
        """Start a search for the messages of locks that have refused calls, every few seconds; returns at once."""
        if self._patience is not None and time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + min(EVERY, self._patience / 3)
            self._wake()

    def suspect(self, *keys: str) -> None:
        """Search for the messages of these locks soon, if the locks are old enough; returns at once."""
        if not keys or self._patience is None or len(self._suspects) >= MOST:
            return
        self._suspects |= dict.fromkeys(keys)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="singlebeat-lost", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the search; may be called in a signal handler."""
        self._stopped = True

    def _run(self) -> None:
        backend: BaseBackend | None = None
        while not self._stopped:
            self._news.wait()
            self._news.clear()
            keys, self._suspects = list(self._suspects), {}
            try:
                backend = backend or new_backend(self.app, own_connections=True)
                refused = backend.suspects(suspects_key(Config.of(self.app).singleton_key_prefix), MOST)
                self.search(backend, [*keys, *refused, *map(behind_key, refused)])
            except (LockBackendError, ConfigError) as exc:
                log.debug("lost messages cannot be searched for", event="not_asked", reason=exc)
            except Exception:  # the outer edge of the thread, which must live as long as its beat
                log.exception("beat: The search for lost messages failed and goes on", event="search_failed")
            time.sleep(min(EVERY, (self._patience or EVERY) / 3))

    def search(self, backend: BaseBackend, keys: Sequence[str]) -> list[Found]:
        """Free the locks whose messages are lost, and return the findings about these; log those long in doubt.

        Args:
            keys: of the locks; beat and the caller of a task may both have named the same lock.

        Raises:
            LockBackendError: the locks' server does not answer.
        """
        waiting = [Waiting.of(key, record) for key, record in backend.read([*dict.fromkeys(keys)])]
        old = [lock for lock in waiting if lock is not None and not may_yet_start(lock, Config.of(self.app))]
        others = [lock.ref.key for lock in old if sent_to_another_broker(self.app, lock)]
        for key in others[:MOST_OTHERS]:  # a beat of that broker can ask
            backend.suspect(suspects_key(Config.of(self.app).singleton_key_prefix), key)
        found = examine(self.app, old, backend=backend, answers=self._answers)
        self._log_doubts(found)
        self._log_unread(found, backend)
        return free(self.app, found, backend=backend)

    def _log_doubts(self, found: Iterable[Found]) -> None:
        """Log which locks have been in doubt for long, by one example for each queue, now and then."""
        doubted = dict[str, list[Found]]()
        for each in found:
            if each.in_doubt and self._is_late(each.lock):
                doubted.setdefault(each.lock.queue, []).append(each)
        _forget(self._doubted)
        for queue, (first, *others) in doubted.items():
            if queue in self._doubted:
                continue
            self._doubted[queue] = time.monotonic()
            about = {"task": first.lock.task, "id": first.lock.ref.task_id, "entry": first.lock.entry}
            reason = f"{first.reason}. If it is lost, {first.way_out}"
            reason += f". So with {len(others)} more locks" if others else ""
            log.warning("beat: A lock stays, and its message may be lost", event="in_doubt", **about, reason=reason)

    def _log_unread(self, found: Iterable[Found], backend: BaseBackend) -> None:
        """Log the queues in which messages have waited for long, and which no worker reads, now and then."""
        late = {each.queue: each for each in found if each.queue and self._is_late(each.lock)}
        _forget(self._checked)
        queues = late.keys() - self._checked.keys()
        if not queues:
            return
        try:
            with _Broker.reached(self.app) as broker:
                replies = broker.ask("active_queues")
        except Exception as exc:  # a transport may raise anything
            log.debug("the workers cannot be asked for their queues", event="not_asked", reason=exc)
            return
        if living_workers(self.app, backend) - replies.keys():  # such a worker may read the queue
            return
        self._checked |= dict.fromkeys(queues, time.monotonic())
        names = {worker: frozenset(queue["name"] for queue in reply or ()) for worker, reply in replies.items()}
        readers = {worker: Reader(read, frozenset(), None, ()) for worker, read in names.items()}
        for queue in sorted(queues):
            delivery = Delivery.of(queue, readers)
            if delivery.unread:
                lock = late[queue].lock
                about = {"task": lock.task, "id": lock.ref.task_id, "entry": lock.entry, "queue": queue}
                reason = f"{delivery.unread}. {sentence(delivery.way_out)}"
                log.warning("beat: Messages wait in queue '%(queue)s'", event="unread", **about, reason=reason)

    def _is_late(self, lock: Waiting) -> bool:
        """Return whether a lock is queued for so long that its message is worth a line in the log."""
        return lock.age >= (lock.delay or 0.0) + DOUBTED_AFTER * (self._patience or PAUSE)


def _forget(noted: dict[str, float]) -> None:
    """Remove the queues that were noted so long ago that they are logged or checked again."""
    for queue in [queue for queue, at in noted.items() if at <= time.monotonic() - DOUBTED_EVERY]:
        del noted[queue]
