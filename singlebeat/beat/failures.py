"""What fails when messages are sent: one message, or a server for all of them. It is logged once, or now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from celery.beat import SchedulingError
from kombu.exceptions import OperationalError
from kombu.utils.encoding import safe_repr
from redis.exceptions import ConnectionError as RedisConnectionError

from ..connections import DataError, RedisError, ResponseError, broker_place, what_it_does
from ..errors import LockBackendError, UnusableLockError
from ..log import Log
from ..rabbitmq_errors import is_of_one_message, may_pass, reaches_no_queue
from ..server_errors import with_advice
from .backoff import FIRST_RETRY, LAST_RETRY, Backoff
from .store.probe import lock_refusal, lock_server_says

if TYPE_CHECKING:
    from celery import Celery

    from .entries.entry import Entry
    from .message import Message

__all__ = (
    "BROKER",
    "LOCKS",
    "NO_QUEUE",
    "OWN_CODE",
    "Failures",
    "NoQueueError",
    "OwnCodeError",
    "UnreachableBrokerError",
    "causes",
    "in_words",
    "is_of_own_code",
    "is_refusal",
    "is_transient",
    "is_without_queue",
    "unsendable",
)

log = Log("celery.beat")

#: The servers without which messages are not sent, as the log names them.
BROKER, LOCKS, OWN_CODE = "the broker", "the locks' server", "what its own code asks"

#: Seconds between two tries of all commands that locks need, while the locks' server refuses one.
TRY_LOCKS_EVERY = 1.0

#: What to do about a message for which the broker has no queue.
NO_QUEUE = "start a worker that reads the queue, or correct exchange or routing_key"

#: Errors of an unreachable broker or locks' server.
UNREACHABLE = (OperationalError, RedisError, LockBackendError, OSError)

#: Errors of a database that is unreachable or locked: the names that PEP 249 gives them, in whichever library.
OF_DATABASES = frozenset({"OperationalError", "InterfaceError"})

#: Errors of a message that cannot be made, as with an option of the wrong type or an unknown compression.
UNUSABLE = (LookupError, TypeError, ValueError, DataError)


class UnreachableBrokerError(RedisConnectionError):
    """The broker is not reached, which ends a tick like an error of the schedule's server; the message names it."""


class OwnCodeError(SchedulingError):  # type: ignore[misc]
    """Code of the user has failed, as a route or an own ``apply_async``, before beat's producer was to send anything.

    Its cause is the error of that code.
    """


class NoQueueError(SchedulingError):  # type: ignore[misc]
    """No queue of Redis is bound to the exchange of a message with its routing key."""

    def __init__(self) -> None:
        super().__init__("no queue is bound to its exchange with its routing key")


def is_transient(exc: Exception) -> bool:
    """Return whether an attempt failed because of a server, so that a retry may succeed.

    The server is unreachable, or refuses what it may allow later. It may be one that code of the user asks.
    """
    return any(
        (isinstance(cause, UNREACHABLE) and not _is_of_message(cause))
        or _is_of_database(cause)
        or may_pass(cause)
        or is_without_queue(cause)
        for cause in causes(exc)
    )


def is_of_own_code(exc: BaseException) -> bool:
    """Return whether code of the user has failed, for which no server is away that beat needs itself."""
    met = list(causes(exc))
    of_locks = any(isinstance(cause, LockBackendError) for cause in met)
    return not of_locks and any(isinstance(cause, OwnCodeError) for cause in met)


def _is_of_database(exc: BaseException) -> bool:
    if isinstance(exc, OperationalError):  # kombu's error of that name wraps any other one
        return False
    return not OF_DATABASES.isdisjoint(kind.__name__ for kind in type(exc).__mro__)


def causes(exc: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes at any depth: Celery and kombu wrap the real error, sometimes twice.

    The causes of an error of one message say nothing about a server.
    """
    met = set[int]()  # a task's own code may raise an error from itself
    while exc is not None and id(exc) not in met:
        yield exc
        if _is_of_message(exc):
            return
        met.add(id(exc))
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)


def is_refusal(exc: Exception) -> bool:
    """Return whether a server has answered, and its answer is the error."""
    return any(what_it_does(cause) == "refuses" or may_pass(cause) for cause in causes(exc))


def _server_of(exc: BaseException) -> str:
    """Return the server that is behind the error of a message."""
    if is_of_own_code(exc):
        return OWN_CODE
    return LOCKS if any(isinstance(cause, LockBackendError) for cause in causes(exc)) else BROKER


def in_words(exc: Exception) -> str:
    """Return an error for a log: the name of the first cause as well if that has no words."""
    *_, cause = causes(exc)
    return with_advice(exc) if cause.args else f"{with_advice(exc).rstrip(': ')}: {type(cause).__name__}"


def unsendable(exc: Exception) -> str:
    """Return why a message can never be sent."""
    return str(safe_repr(exc.__cause__ or exc.__context__ or exc))


def is_without_queue(exc: BaseException) -> bool:
    """Return whether the broker has no queue for a message."""
    return isinstance(exc, NoQueueError) or reaches_no_queue(exc)


def _is_of_message(exc: BaseException) -> bool:
    """Return whether an error concerns one message or its lock: kombu takes some of these for errors of the broker."""
    if isinstance(exc, UnusableLockError):
        return True
    cause = exc.__cause__ if isinstance(exc, OperationalError) else None
    if isinstance(cause, OSError):  # the error of a wrong certificate is also a ValueError
        return False
    return isinstance(cause, UNUSABLE) or any(
        isinstance(each, ResponseError) and "WRONGTYPE" in str(each) for each in (exc, cause)
    )


class Failures:
    """The messages and the servers that have failed.

    Args:
        forget_broker: drops a connection to the broker that has failed.
    """

    def __init__(self, app: Celery, forget_broker: Callable[[], None]) -> None:
        self.app, self._forget_broker = app, forget_broker
        self.backoff = Backoff()
        self._unreachable = set[str]()  #: the servers that were logged as unreachable
        self._locks_refuse = False  #: the locks' server was logged as unreachable because it refuses
        self._try_locks_at = 0.0  #: monotonic: when the commands may be tried that the locks need
        self._outage: LockBackendError | None = None  #: the last one of the locks' server
        self._ask_again_at = 0.0  #: monotonic: when that server may be asked for locks again

    def is_refused(self, entry: Entry, exc: Exception) -> bool:
        """Return whether the message of one entry cannot be sent for now, and log it now and then.

        The broker answers and refuses it, or code of the user fails that has to do with it.
        """
        is_of_one = any(is_of_one_message(cause) or is_without_queue(cause) for cause in causes(exc))
        if not (is_of_one or is_of_own_code(exc)):
            return False
        if self.backoff.refused(entry.key):
            self._log_refusal(entry, exc)
        return True

    def note_lone(self, failed: Sequence[tuple[Message, Exception]]) -> None:
        """Log the messages that fail again and again, unless their server is known to be unreachable."""
        for message, exc in failed:
            if _server_of(exc) not in self._unreachable and self.backoff.fails_alone(message.entry.key):
                self._log_refusal(message.entry, exc)

    def _log_refusal(self, entry: Entry, exc: Exception) -> None:
        text = "beat: %(server)s answers, and does not take the message of %(entry)s, which stays pending"
        about = {"server": _server_of(exc), "entry": entry.name}
        if about["server"] == OWN_CODE:
            text = "beat: the message of %(entry)s stays pending, because its own code fails"
        advice = f": {NO_QUEUE}" if any(map(is_without_queue, causes(exc))) else ""
        log.error(text, event="refused", **about, reason=f"{in_words(exc)}{advice}")

    def note(self, exc: Exception, *keys: str) -> None:
        """Log that a server cannot be reached, once; drop the connection to the broker.

        Args:
            keys: of the entries whose messages have failed; none if the server has.
        """
        server = _server_of(exc)
        self._forget_broker()
        if self.backoff.failed(*keys) and server not in self._unreachable:
            self._unreachable.add(server)
            until = "takes it" if is_refusal(exc) else "answers"
            text = f"Scheduler: Message Error: due occurrences stay pending until %(server)s {until}"
            of_locks = next((cause for cause in causes(exc) if isinstance(cause, LockBackendError)), None)
            reason = f"{BROKER} {broker_place(self.app)}: {in_words(exc)}"
            if of_locks is not None:
                reason, self._locks_refuse = lock_server_says(self.app, of_locks), is_refusal(of_locks)
            log.error(text, event="unreachable", server=server, reason=reason)

    @contextmanager
    def asking_locks(self) -> Iterator[None]:
        """Ask the locks' server within it; leave a server that hangs alone for as long as it has kept us waiting.

        Entries that need no lock wait, too, so the next question must not follow at once.

        Raises:
            LockBackendError: the locks' server does not answer, or is left alone.
        """
        began = monotonic()
        if self._outage is not None and began < self._ask_again_at:
            raise self._outage.with_traceback(None)
        try:
            yield
        except LockBackendError as exc:
            waited = monotonic() - began
            if waited >= FIRST_RETRY:  # a shorter wait holds up no other entry
                self._outage, self._ask_again_at = exc, began + waited + min(waited, LAST_RETRY)
            raise

    def is_away(self, server: str) -> bool:
        """Return whether a server was logged as unreachable, and does not work again."""
        return server in self._unreachable

    def note_answer(self, server: str) -> None:
        """Log that a server works again, if it was logged as unreachable."""
        if server in self._unreachable and not (server == LOCKS and self._locks_still_refuse()):
            self._unreachable.remove(server)
            log.warning("Scheduler: %(server)s works again", event="recovered", server=server)

    def _locks_still_refuse(self) -> bool:
        """Return whether the locks' server still refuses a command that locks need: not every call needs each."""
        if self._locks_refuse and monotonic() >= self._try_locks_at:
            self._try_locks_at = monotonic() + TRY_LOCKS_EVERY
            self._locks_refuse = bool(lock_refusal(self.app))
        return self._locks_refuse
