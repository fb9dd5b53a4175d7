"""The verbs of a lock and their verdicts: what every lock backend does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from ..config import Config
from .key import check_sendable, done_key, turn_key

if TYPE_CHECKING:
    from celery import Celery

__all__ = (
    "HEADER",
    "MOST_WAITS",
    "RUN_HEADER",
    "BaseBackend",
    "Call",
    "Holder",
    "IfHeld",
    "Ref",
    "Renewal",
    "Ticket",
    "Verdict",
    "entry_of",
    "generation",
    "read_generation",
    "unusable",
    "without_deaths",
)

#: The message header that carries a lock's key and the task id that owns it.
HEADER = "singlebeat_lock"

#: The message header that tells a run which occurrence of which entry it is: ``self.request.singlebeat``.
RUN_HEADER = "singlebeat"

#: Retries that fit between two replacements of a task in its generation.
RETRIES_PER_REPLACEMENT = 1_000_000

#: Rejections of a message that fit between two retries: they are the decimals of its generation, thousandths.
REJECTIONS_PER_RETRY = 1_000

#: Of the headers in which RabbitMQ counts how often a message was dead-lettered.
DEATH_HEADERS = ("x-death", "x-first-death-", "x-last-death-")

#: Up to which the waits of a message are counted: far beyond the longest that they make it wait.
MOST_WAITS = 10

#: Renewals per lease: two may fail before a lock is in danger.
RENEWALS_PER_LEASE = 3

#: Seconds of a lock that user code takes without an expiry: until it is unlocked, as in celery-singleton.
UNTIL_UNLOCKED = 100 * 365 * 86_400.0


class Verdict(StrEnum):
    """What a lock's server answered."""

    ACQUIRED = "acquired"  #: the lock is queued under our task id
    WAITING = "waiting"  #: our task id has the place behind the holder
    RUNNING = "running"  #: our task id holds the lock, and its run has started
    STARTED = "started"  #: our run holds the lock
    HELD = "held"  #: another task id holds the lock
    COPY = "copy"  #: the same message runs elsewhere
    STALE = "stale"  #: a later generation of our task id holds the lock
    DONE = "done"  #: our task id has ended under this lock
    REPLACED = "replaced"  #: another call took the lock of our task id while it was queued
    ROTATED = "rotated"  #: the lock was handed over
    LOST = "lost"  #: the lock is not held as we thought
    UNUSABLE = "unusable"  #: what the lock's keys hold cannot be read; the holder's id is the reason
    LATE = "late"  #: the server came to the question when no caller waited for its reply any more


class IfHeld(StrEnum):
    """What a call does to the calls that hold the lock which it wants."""

    LEAVE = ""  #: nothing
    JOIN = "join"  #: one that has not started runs for it, with its arguments; else it waits behind
    REPLACE = "replace"  #: it waits behind one that runs; those that have not started never will


class Renewal(StrEnum):
    """What became of a lock that its worker wanted to keep."""

    RUNNING = "running"  #: renewed, and held by this delivery of the message
    QUEUED = "queued"  #: renewed; the message has not started yet
    OVER = "over"  #: the run ended or handed over
    LOST = "lost"  #: the lock expired, or somebody else holds it


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as its server answered."""

    verdict: Verdict
    task_id: str
    state: str  #: ``queued`` or ``running``
    since: datetime | None  #: when the state began, in UTC
    fence: int  #: the fencing number of the run: rises from run to run
    ttl: float  #: seconds until the lock ends if nobody renews it
    payload: str = ""  #: of a run that started: the arguments of the latest call that it stands for
    entry: str = ""  #: of the schedule, that has sent it; empty: a program has, or it is not known

    def __str__(self) -> str:
        since = f" since {self.since:%Y-%m-%d %H:%M:%S}Z" if self.since else ""
        by = f", of entry {self.entry}" if self.entry else ""
        return f"task {self.task_id}, {self.state or 'ended'}{since}{by}"


def generation(headers: Mapping[str, Any], *, rejections: int = 0) -> float:
    """Return the generation of a message, from its own headers: higher after each retry and each replace.

    Args:
        rejections: how often a worker has rejected the message and a dead letter exchange has sent it back.
    """
    replacements = _count(headers.get("replaced_task_nesting"))
    whole = replacements * RETRIES_PER_REPLACEMENT + _count(headers.get("retries"))
    return whole + min(rejections, REJECTIONS_PER_RETRY - 1) / REJECTIONS_PER_RETRY if rejections else whole


def read_generation(text: str) -> float:
    """Return a generation from the text in a lock's record; the text of the generation is the same again."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _rejections(headers: Mapping[str, Any]) -> int:
    """Return how often RabbitMQ has dead-lettered a message because a worker rejected it.

    Other deaths do not count: a message that expires in a queue, such as one of a delayed delivery, has not been run.
    """
    deaths = headers.get("x-death")
    known = [death for death in deaths if isinstance(death, Mapping)] if isinstance(deaths, list | tuple) else []
    return sum(max(0, _count(death.get("count"))) for death in known if death.get("reason") == "rejected")


def entry_of(headers: Mapping[str, Any]) -> str:
    """Return the name of the entry that has sent a message, by its headers; empty: a program has, or it is no name."""
    header = headers.get(RUN_HEADER)
    entry = header.get("entry") if isinstance(header, Mapping) else None
    try:
        name = entry if isinstance(entry, str) else ""
        check_sendable(name)
    except UnicodeEncodeError:  # anybody may write a message
        return ""
    return name


def without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return headers for a message that is sent anew: RabbitMQ drops one that seems to go in circles."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(DEATH_HEADERS)}


def _count(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):  # anybody may write a message, and none of them may stop a worker
        return 0


@dataclass(frozen=True, slots=True)
class Ref:
    """Names one claim to a lock: its key, the task id and generation that claim it, and the run."""

    key: str
    task_id: str
    generation: float = 0
    nonce: str = ""  #: names one delivery of the message; empty until a worker has received it


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a message knows about its locks; it travels in the header, and is never computed again."""

    task_id: str
    key: str  #: of the lock that the task holds while it runs
    queued: str = ""  #: key of the lock that it holds while it waits, which may be the same; empty: none
    waits: bool = False  #: when the lock is held at its start, it waits for its turn, where another would be skipped
    joinable: bool = False  #: calls with other arguments may join it: its lock has the latest of them
    waited: int = 0  #: how often it has waited, counted up to ``MOST_WAITS``
    rejections: int = 0  #: how often workers have rejected it and it has come back, part of its generation
    generation: float = 0
    nonce: str = ""
    serializer: str = ""  #: of the message, for its run: kombu tells it to the worker's main process only
    waits_for: Holder | None = field(default=None, compare=False)  #: at the call; the message does not tell

    @classmethod
    def of_message(cls, headers: Mapping[str, Any], task_id: str | None, *, delivered: bool = False) -> Ticket | None:
        """Return the ticket in a message's headers, or None; another task's is not ours, nor what no server takes.

        Args:
            delivered: the worker's main process has put its own ticket there, with all rejections so far.
        """
        header = headers.get(HEADER)
        if not isinstance(header, Mapping) or not header.get("key") or header.get("id") != task_id:
            return None
        rejections = max(0, _count(header.get("rejections"))) + (0 if delivered else _rejections(headers))
        ticket = cls(
            task_id=str(task_id),
            key=str(header["key"]),
            queued=str(header.get("queued", header["key"])),
            waits=bool(header.get("waits")),
            joinable=bool(header.get("joinable")),
            waited=max(0, min(_count(header.get("waited")), MOST_WAITS)),
            rejections=rejections,
            generation=generation(headers, rejections=rejections),
            nonce=str(header.get("nonce") or ""),
            serializer=str(header.get("serializer") or "") if delivered else "",
        )
        try:
            check_sendable(ticket.task_id, ticket.key, ticket.queued, ticket.nonce)
        except UnicodeEncodeError:
            return None
        return ticket

    def header(self) -> dict[str, Any]:
        """Return what the message carries under ``HEADER``."""
        header: dict[str, Any] = {"id": self.task_id, "key": self.key, "nonce": self.nonce}
        header["serializer"] = self.serializer
        header |= {"waits": self.waits, "joinable": self.joinable}
        header |= {"waited": self.waited, "rejections": self.rejections}
        header = {name: value for name, value in header.items() if value}
        return header if self.queued == self.key else {**header, "queued": self.queued}

    def delivered(self, nonce: str, *, serializer: str = "") -> Ticket:
        """Return the ticket of one delivery of the message."""
        return replace(self, nonce=nonce, serializer=serializer)

    @property
    def undelivered(self) -> Ticket:
        """The ticket of the message itself."""
        return replace(self, nonce="", serializer="")

    def successor(self, generation: float | None = None) -> Ticket:
        """Return the ticket of the message that a run leaves its lock to: it waits until that run has ended.

        Args:
            generation: of that message; default: the message is the retry of this one.
        """
        generation = math.floor(self.generation) + 1 if generation is None else generation
        return replace(self.undelivered, queued=self.key, waits=True, waited=0, rejections=0, generation=generation)

    @property
    def run(self) -> Ref:
        """The claim to the lock of the run."""
        return Ref(self.key, self.task_id, self.generation, self.nonce)

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Its claims to locks: the one of its run, then the one that it has while it waits, if that is another."""
        waiting = replace(self.run, key=self.queued)
        return (self.run,) if self.queued in {"", self.key} else (self.run, waiting)

    @property
    def turn(self) -> Ref | None:
        """The claim to its turn, of a message that waits by itself; it is freed with the lock of its run."""
        return replace(self.run, key=turn_key(self.key)) if self.waited else None


@dataclass(frozen=True, slots=True)
class Call:
    """A call that wants its lock before it is sent."""

    ref: Ref
    task: str
    arguments: str  #: for people
    ttl: float  #: seconds that the message may wait for its start
    expiry: float | None = None  #: seconds from now on after which the lock ends whatever happens
    payload: str = ""  #: its arguments for the run of a call that stands for it; empty: that has the same
    if_held: IfHeld = IfHeld.LEAVE
    entry: str = ""  #: of the schedule, that sends it, for people; empty: a program does


class BaseBackend(ABC):
    """Keeps the locks; durations are seconds, instants are of the server's clock, every verb is atomic."""

    #: Whether a call can replace another, and give it its arguments.
    replaces = True
    #: The worker whose messages this backend renews, as a lock's record names it; empty: it belongs to no worker.
    worker = ""

    @property
    def name(self) -> str:
        """What the user calls it."""
        return type(self).__name__

    @classmethod
    def of_app(cls, app: Celery, *, own_connections: bool = False) -> Self:
        """Return a backend for an app, made of ``singleton_backend_kwargs``; override it for one that takes more.

        Args:
            own_connections: share none with the rest of the process: it is for a thread beside it.
        """
        return cls(**Config.of(app).singleton_backend_kwargs)

    @abstractmethod
    def acquire_many(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Take the locks of calls that are about to be sent, in one round trip.

        The verdicts: ACQUIRED, WAITING, RUNNING, DONE, HELD, UNUSABLE.

        Args:
            may_be_resent: the task ids may have been sent before, so one that has ended is refused.
        """

    @abstractmethod
    def begin(
        self,
        ref: Ref,
        *,
        queued: str = "",
        turn_ttl: float = 0.0,
        lease: float,
        remember_for: float,
        task: str,
        arguments: str,
        expiry: float | None = None,
        entry: str = "",
    ) -> Holder:
        """Start a run: STARTED, or COPY, STALE, DONE, REPLACED, HELD, and then it must not start.

        Args:
            queued: key of the lock that the message holds while it waits, to be freed; empty: that of the run.
            turn_ttl: if the lock is held, the message will be sent again, and no newer call overtakes it for so long;
                0: it will not be sent again.
            lease: how long the lock outlives a worker that died.
            remember_for: how long the end of a run is remembered.
            entry: of the schedule, that has sent the message, for people; empty: a program has.
        """

    @abstractmethod
    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Hand the lock of a run over to a message of the same task id that waits. False if it was lost.

        Args:
            to: of its generation or a higher one, and of no delivery.
        """

    @abstractmethod
    def promise(self, run: Ref, *, to: Ref | None, ttl: float) -> bool:
        """Let a run leave its lock to its own retry when it ends; ``to`` None takes that back. False if it was lost.

        Args:
            ttl: how long the lock may then wait for the start of that message.
        """

    @abstractmethod
    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Keep the locks of living requests, in one round trip."""

    def note_sent(self, sent: Mapping[Ref, str], *, lease: float) -> None:
        """Keep the locks of messages that were sent, each with a note on where its message went, where that is kept."""
        self.renew_many(list(sent), lease=lease)

    @abstractmethod
    def finish_many(self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False) -> None:
        """Free the locks of requests that are over, in one round trip; only their own.

        Args:
            ran: they have run, even if their locks were lost or never taken: their ends are remembered in any case.
        """

    @abstractmethod
    def announce(self, worker: str, *, ttl: float) -> None:
        """Say that a worker lives which releases the locks of the tasks that it runs."""

    @abstractmethod
    def workers_seen(self) -> bool:
        """Tell whether such a worker was seen lately."""

    def retire(self, worker: str) -> None:  # noqa: B027 - a backend need not know of it
        """Say that a worker takes no further messages."""

    def workers(self) -> Mapping[str, float]:
        """Return the workers that have announced themselves, and seconds since then; none where that is not known."""
        return {}

    def suspect(self, place: str, lock: str) -> None:  # noqa: B027 - a backend need not know of it
        """Note at a key that the message of a lock may be gone: a call was refused because of it."""

    def suspects(self, place: str, count: int) -> Sequence[str]:
        """Return so many of the locks that were noted, and note them no longer."""
        return []

    def read(self, keys: Sequence[str]) -> Sequence[tuple[str, Mapping[str, str]]]:
        """Return those of some locks that are held, and their records; none where records cannot be read so."""
        return []

    def lock(self, lock: str, task_id: str, expiry: float | None = None) -> bool:
        """Take a lock for a task id; tell whether that id holds it now. For user code, as in celery-singleton.

        Args:
            expiry: seconds after which the lock ends whatever happens; None: it stays until it is unlocked.
        """
        call = Call(Ref(lock, task_id), "", "", expiry or UNTIL_UNLOCKED, expiry)
        return self.acquire_many([call])[0].verdict in {Verdict.ACQUIRED, Verdict.RUNNING}

    @abstractmethod
    def get(self, lock: str) -> str | None:
        """Return the task id that holds a lock, or None."""

    @abstractmethod
    def unlock(self, lock: str) -> None:
        """Free a lock, whoever holds it."""

    @abstractmethod
    def clear(self, key_prefix: str) -> None:
        """Free every lock under a prefix, whoever holds it."""

    @abstractmethod
    def locks(self, key_prefix: str) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield every lock under a prefix and its record.

        Beside the fields of the record: ``ttl``, the seconds that are left, and ``now``, the server's time in
        milliseconds, where they are known.
        """


def unusable(key: str, reason: str) -> str:
    """Return what to tell about a lock whose keys cannot be read, and why, in the server's words."""
    return f"the lock {key} is unusable: {reason}; it is a hash, {done_key(key)} beside it a zset: delete what is not"


def from_ms(milliseconds: str | int) -> datetime | None:
    """Return an instant from milliseconds since 1970, None for 0."""
    value = int(float(milliseconds))
    return datetime.fromtimestamp(value / 1000, UTC) if value else None
