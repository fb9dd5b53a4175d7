"""The interface of every lock backend: the verbs of a lock and their verdicts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from ..advice import command_line
from ..config import Config
from ..server_errors import is_key_denied
from .key import check_sendable, turn_key

if TYPE_CHECKING:
    from celery import Celery

    from ..outbox import Command, Marker

__all__ = (
    "HEADER",
    "LONGEST_WAIT",
    "MOST_WAITS",
    "RUN_HEADER",
    "BaseBackend",
    "Call",
    "Holder",
    "IfHeld",
    "Ref",
    "Renewal",
    "Sending",
    "Ticket",
    "Verdict",
    "entry_of",
    "generation",
    "read_generation",
    "unusable",
    "without_deaths",
)

#: The headers of a message. Any program may write them: each value is checked where it is read.
Headers = Mapping[str, object]

#: The options of a message, by the names of ``Task.apply_async``.
Options = Mapping[str, Any]

#: The message header that carries a ``Ticket``.
HEADER = "singlebeat_lock"

#: The message header that names the entry and the occurrence of a run: ``self.request.singlebeat``.
RUN_HEADER = "singlebeat"

#: Number of retries that a generation can count between two replacements of a task.
RETRIES_PER_REPLACEMENT = 1_000_000

#: Number of rejections that a generation can count between two retries, as thousandths.
REJECTIONS_PER_RETRY = 1_000

#: Prefixes of the headers in which RabbitMQ counts how often a message was dead-lettered.
DEATH_HEADERS = ("x-death", "x-first-death-", "x-last-death-")

#: Upper bound for the count of a message's waits; its delay reaches the maximum earlier.
MOST_WAITS = 10

#: Seconds of the longest wait of a message whose lock another call holds, until it asks again.
LONGEST_WAIT = 5.0

#: What ``no_lock.lua`` says of a key that holds no lock.
OTHER_DATA = "a hash of other data"

#: Most characters of a key in a message that the history keeps; of a longer key, the middle is left out.
LONGEST_SHOWN = 84

#: The latest time, in milliseconds since 1970, that a message may name: in the year 2286.
LATEST_MS = 10**13

#: Renewals per lease: two may fail before a lock is in danger.
RENEWALS_PER_LEASE = 3

#: Seconds of a lock that user code acquires without an expiry: until ``unlock``, as in celery-singleton.
UNTIL_UNLOCKED = 100 * 365 * 86_400.0


class Verdict(StrEnum):
    """The answer of a lock's server."""

    ACQUIRED = "acquired"  #: the lock is queued or timed under our task id
    WAITING = "waiting"  #: our task id waits in the place behind the holder
    RUNNING = "running"  #: our task id holds the lock, and its run has started
    STARTED = "started"  #: our run holds the lock
    HELD = "held"  #: another task id holds the lock, or a run of ours that the call replaces
    COPY = "copy"  #: another delivery of the same message runs
    STALE = "stale"  #: a later generation of our task id holds the lock
    DONE = "done"  #: our task id has ended under this lock
    REPLACED = "replaced"  #: another call has evicted our task id while it was queued
    ROTATED = "rotated"  #: the lock was handed over
    LOST = "lost"  #: the lock is not held as the caller assumed
    UNUSABLE = "unusable"  #: the lock's keys cannot be read; see ``Holder.reason``
    REFUSED = "refused"  #: the server refuses to send the message; see ``Holder.reason``
    LATE = "late"  #: the server ran the request when no caller waited for the reply any more


class IfHeld(StrEnum):
    """What a call does to the calls that already hold its lock."""

    LEAVE = ""  #: nothing
    JOIN = "join"  #: a queued call runs for it, with its arguments; without a queued call, it waits
    REPLACE = "replace"  #: it evicts queued calls, and waits behind a running call
    REPLACE_ALONE = "replace_alone"  #: the same, and no call joins it, because another one waits for it

    @property
    def replaces(self) -> bool:
        """Whether the call evicts queued calls."""
        return self in {IfHeld.REPLACE, IfHeld.REPLACE_ALONE}


class Renewal(StrEnum):
    """The outcome of a worker's renewal of a lock."""

    RUNNING = "running"  #: renewed, and held by this delivery of the message
    QUEUED = "queued"  #: renewed; no run holds the lock
    OVER = "over"  #: the run ended or handed its lock over
    LOST = "lost"  #: the lock expired, or another call or delivery holds it


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock, and the verdict of the lock's server."""

    verdict: Verdict
    task_id: str
    state: str  #: ``queued``, ``running`` or ``timed``
    since: datetime | None  #: when the state began, in UTC
    fence: int  #: the fencing number of the run: rises from run to run
    ttl: float  #: seconds until the lock ends unless it is renewed
    payload: str = ""  #: if the run started: the arguments of the latest call that it stands for
    entry: str = ""  #: name of the schedule's entry that sent it; empty: a program sent it, or unknown
    waits_since: float = 0.0  #: of HELD: since when the message waits, in seconds since 1970; 0 if unknown
    held_for: float = 0.0  #: of HELD, if the message has the turn: seconds since ``since``; else 0
    may_be_older: bool = False  #: of HELD: it had no lock when it started, so that a message without one may be newer
    has_heir: bool = False  #: of HELD: another call has the place behind it, so that a message without one is older
    reason: str = ""  #: of the verdicts UNUSABLE and REFUSED: the error, in the server's words

    def __str__(self) -> str:
        since = f" since {self.since:%Y-%m-%d %H:%M:%S}Z" if self.since else ""
        by = f", of entry {self.entry}" if self.entry else ""
        return f"task {self.task_id}, {self.state or 'ended'}{since}{by}"


def generation(headers: Headers, *, rejections: int = 0) -> float:
    """Return the generation of a message from its headers; each retry and each replace raises the generation.

    Args:
        rejections: how often a worker has rejected the message and a dead letter exchange has sent it back.
    """
    replacements = _count(headers.get("replaced_task_nesting"))
    whole = replacements * RETRIES_PER_REPLACEMENT + _count(headers.get("retries"))
    return whole + min(rejections, REJECTIONS_PER_RETRY - 1) / REJECTIONS_PER_RETRY if rejections else whole


def read_generation(text: str) -> float:
    """Return a generation from the string in a lock's record; ``str`` of the generation is that string."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _rejections(headers: Headers) -> int:
    """Return how often RabbitMQ has dead-lettered a message because a worker rejected it.

    Other deaths do not count: a message that expired in a queue, as in a delayed delivery, has not been run.
    """
    deaths = headers.get("x-death")
    known = [death for death in deaths if isinstance(death, Mapping)] if isinstance(deaths, list | tuple) else []
    return sum(max(0, _count(death.get("count"))) for death in known if death.get("reason") == "rejected")


def entry_of(headers: Headers) -> str:
    """Return the name of the entry that sent a message, from its headers; empty if there is no valid name."""
    header = headers.get(RUN_HEADER)
    entry = header.get("entry") if isinstance(header, Mapping) else None
    try:
        name = entry if isinstance(entry, str) else ""
        check_sendable(name)
    except UnicodeEncodeError:  # any program may write a message
        return ""
    return name


def without_deaths(headers: Headers | None) -> dict[str, object]:
    """Return headers for a resend without the dead-letter counts: RabbitMQ drops messages that seem to cycle."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(DEATH_HEADERS)}


def _count(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):  # any program may write a message, and no message may stop a worker
        return 0


def _pause(value: Any, generation: int) -> float:
    """Return the pause in a header, in seconds; 0 if it is another generation's."""
    try:
        of, seconds = value
        return min(max(0.0, float(seconds)), LONGEST_WAIT) if of == generation else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Ref:
    """The identity under which a message holds a lock: key, task id, generation, and the delivery that runs."""

    key: str
    task_id: str
    generation: float = 0
    nonce: str = ""  #: names one delivery of the message; empty until a worker has received the message


@dataclass(frozen=True, slots=True)
class Ticket:
    """The data of a message about its locks; the ticket travels in a header, and its keys are never computed again."""

    task_id: str
    key: str  #: key of the lock that the task holds while it runs
    queued: str = ""  #: key of the lock that the message holds while it is queued; may be the same; empty: none
    waits: bool = False  #: if the lock is held at its start, the message waits for its turn and is not skipped
    joinable: bool = False  #: calls with other arguments may join it; its lock has the latest arguments
    replaceable: bool = False  #: newer calls take its place while it has not started
    waited: int = 0  #: how often the message has waited, counted up to ``MOST_WAITS``
    waits_since: float = 0.0  #: since when it waits by the locks' server, in seconds since 1970; 0 if unknown
    pause: float = 0.0  #: seconds from when it was sent again to its ETA; 0 if it was not, and its ETA is a caller's
    rejections: int = 0  #: how often it came back after a worker's rejection; part of the generation
    generation: float = 0
    nonce: str = ""
    brought_by: str = ""  #: queue by which the message has come, if that is known; only the main process knows it
    waits_for: Holder | None = field(default=None, compare=False)  #: holder at the call; not in the message

    @classmethod
    def of_message(cls, headers: Headers, task_id: str | None, *, delivered: bool = False) -> Ticket | None:
        """Return the ticket in a message's headers, or None if it is missing, another task's, or not encodable.

        Args:
            delivered: whether the worker's main process wrote this ticket, which then counts all rejections so far.
        """
        header = headers.get(HEADER)
        if not isinstance(header, Mapping) or not header.get("key") or not task_id or header.get("id") != task_id:
            return None
        rejections = max(0, _count(header.get("rejections"))) + (0 if delivered else _rejections(headers))
        its_own = generation(headers, rejections=rejections)
        ticket = cls(
            task_id=str(task_id),
            key=str(header["key"]),
            queued=str(header.get("queued", header["key"])),
            waits=bool(header.get("waits")),
            joinable=bool(header.get("joinable")),
            replaceable=bool(header.get("replaceable")),
            waited=max(0, min(_count(header.get("waited")), MOST_WAITS)),
            waits_since=max(0, min(_count(header.get("waits_since")), LATEST_MS)) / 1000,
            pause=_pause(header.get("pause"), math.floor(its_own)),
            rejections=rejections,
            generation=its_own,
            nonce=str(header.get("nonce") or ""),
            brought_by=str(header.get("brought_by") or "") if delivered else "",
        )
        try:
            check_sendable(ticket.task_id, ticket.key, ticket.queued, ticket.nonce)
        except UnicodeEncodeError:
            return None
        return ticket

    def header(self) -> dict[str, object]:
        """Return the value of the message header ``HEADER``."""
        header: dict[str, object] = {"id": self.task_id, "key": self.key, "nonce": self.nonce}
        header |= {
            "brought_by": self.brought_by,
            "waits": self.waits,
            "joinable": self.joinable,
            "replaceable": self.replaceable,
        }
        header |= {"waited": self.waited, "rejections": self.rejections}
        header["waits_since"] = round(self.waits_since * 1000)
        # A retry of a plain task has this header, too, and an ETA of its own.
        header["pause"] = self.pause and [math.floor(self.generation), self.pause]
        header = {name: value for name, value in header.items() if value}
        return header if self.queued == self.key else {**header, "queued": self.queued}

    @property
    def is_private(self) -> bool:
        """Whether its lock refuses only copies of the call, and no equal call."""
        return self.key.endswith(f":{self.task_id}")

    @property
    def overtakes(self) -> bool:
        """Whether it takes its lock back from a newer call if the lock has ended while the message was queued."""
        is_retry = self.generation >= 1  # it waits for its turn behind a newer call that was sent
        return self.queued == self.key and not (self.joinable or self.replaceable or is_retry)

    def delivered(self, nonce: str, *, brought_by: str = "") -> Ticket:
        """Return the ticket of one delivery of the message."""
        return replace(self, nonce=nonce, brought_by=brought_by)

    @property
    def undelivered(self) -> Ticket:
        """Return the ticket of the message itself, which names no delivery."""
        return replace(self, nonce="", brought_by="")

    def successor(self, generation: float | None = None) -> Ticket:
        """Return the ticket of the message that inherits a run's lock; the message waits until the run has ended.

        Args:
            generation: generation of the new message; default: that of the next retry.
        """
        generation = math.floor(self.generation) + 1 if generation is None else generation
        return replace(
            self.undelivered,
            queued=self.key,
            waits=True,
            waited=0,
            waits_since=0.0,
            pause=0.0,
            rejections=0,
            generation=generation,
        )

    @property
    def run(self) -> Ref:
        """Return the ``Ref`` of the lock of the run."""
        return Ref(self.key, self.task_id, self.generation, self.nonce)

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Return the ``Ref`` of the run's lock, then that of the lock while queued, if it is another lock."""
        waiting = replace(self.run, key=self.queued)
        return (self.run,) if self.queued in {"", self.key} else (self.run, waiting)

    @property
    def turn(self) -> Ref | None:
        """Return the ``Ref`` of its turn if the message has waited, or None; the turn is freed with the run's lock."""
        return replace(self.run, key=turn_key(self.key)) if self.waited else None


@dataclass(frozen=True, slots=True)
class Call:
    """A call that needs its lock before it is sent."""

    ref: Ref
    task: str
    arguments: str  #: for people
    ttl: float  #: seconds that the message may wait for its start
    expiry: float | None = None  #: seconds from now until the lock ends in any case
    payload: str = ""  #: its arguments, for the run of a call that stands for it; empty: that run has the same
    if_held: IfHeld = IfHeld.LEAVE
    entry: str = ""  #: name of the schedule's entry that sends it, for people; empty: a program sends it
    note: str = ""  #: for the search for lost messages; empty: none
    state: str = "queued"  #: of its lock; ``timed`` if only time, or an unlock, ends the lock


@dataclass(frozen=True, slots=True)
class Sending:
    """A call, and the commands that send its message."""

    call: Call
    commands: Sequence[Command] = ()
    only: Verdict | str = ""  #: the verdict, ACQUIRED or WAITING, for which its message was made; empty: both

    def is_granted(self, verdict: Verdict) -> bool:
        """Return whether the message is sent with a verdict."""
        return verdict in {Verdict.ACQUIRED, Verdict.WAITING} and self.only in {"", verdict}


class BaseBackend(ABC):
    """A store of locks; durations are in seconds, times are the server's, and every verb is atomic."""

    #: Whether a call can evict another call, or give it new arguments.
    replaces = True
    #: Name of the worker whose locks this backend renews, for their records; empty: the backend is no worker's.
    worker = ""

    @property
    def name(self) -> str:
        """Return the name of the backend in messages."""
        return type(self).__name__

    @classmethod
    def of_app(cls, app: Celery, *, own_connections: bool = False) -> Self:
        """Return a backend for an app, built from ``singleton_backend_kwargs``; override it for other arguments.

        Args:
            own_connections: whether to share no connections with the rest of the process; for a separate thread.
        """
        return cls(**Config.of(app).singleton_backend_kwargs)

    @abstractmethod
    def acquire_many(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Acquire the locks of calls that are about to be sent, in one round trip.

        The verdicts are ACQUIRED, WAITING, RUNNING, DONE, HELD and UNUSABLE.

        Args:
            may_be_resent: whether an id that has ended is refused: it may have been sent before, or it was made for
                this call, so that the network has held the request back.
        """

    @property
    def sends(self) -> bool:
        """Whether it can send the message of a call together with the acquisition of its lock."""
        return False

    def ask(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Return what ``acquire_many`` would answer to calls, without places for them; calls that join have joined.

        Only a backend that ``sends`` is asked.
        """
        raise NotImplementedError(f"{self.name} sends no messages")

    def send(self, sendings: Sequence[Sending], broker: Marker) -> list[Holder] | None:
        """Acquire the locks of calls, and send the message of each call whose lock is granted, in one step.

        Returns:
            The holders; None if the broker is not on the server of the locks, so that nothing was done.
        """
        raise NotImplementedError(f"{self.name} sends no messages")

    @abstractmethod
    def begin(
        self,
        ref: Ref,
        *,
        queued: str = "",
        turn_ttl: float = 0.0,
        waits_since: float = 0.0,
        lease: float,
        remember_for: float,
        task: str,
        arguments: str,
        expiry: float | None = None,
        entry: str = "",
        note: str = "",
        overtakes: bool = False,
        yields: bool = False,
    ) -> Holder:
        """Try to start a run: with STARTED it runs; with COPY, STALE, DONE, REPLACED or HELD it must not start.

        Args:
            queued: key of the lock that the message holds while it is queued, to be freed; empty: that of the run.
            turn_ttl: seconds for which no newer call overtakes the message, which is sent again if the lock is held;
                0: the message is not sent again.
            waits_since: since when the message waits, as an earlier ``Holder`` said; 0 if unknown.
            lease: seconds that the lock outlives a worker that died.
            remember_for: seconds for which the end of a run is remembered.
            entry: name of the schedule's entry that sent the message, for people; empty: a program sent it.
            note: for the search for lost messages, if the message held no lock; empty: none.
            overtakes: the message takes the lock from a newer call that has not started.
            yields: the message is not sent again if another call has the place behind the holder.
        """

    @abstractmethod
    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Hand a run's lock over to a waiting message of the same task id; return False if the lock was lost.

        Args:
            to: that message, of the same or a higher generation, and with an empty nonce.
        """

    @abstractmethod
    def promise(self, run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
        """Promise a run's lock to its own retry, for when the run ends; return False if the lock was lost.

        Args:
            to: the retry; None takes the promise back.
            ttl: seconds that the lock may then wait for the start of the retry.
            note: on the retry, for the search for lost messages; empty: none.
        """

    @abstractmethod
    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Renew the locks of live requests, in one round trip.

        Args:
            lease: seconds that the locks outlive the worker; 0: they last as long as before, and a backend may record
                that their messages live.
        """

    def note_sent(self, sent: Mapping[Ref, str], *, lease: float) -> None:
        """Renew the locks of sent messages; a backend may store the note on where each message went."""
        self.renew_many(list(sent), lease=lease)

    @abstractmethod
    def finish_many(
        self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False, took: bool = False, unsent: bool = False
    ) -> Sequence[Ref]:
        """Free the locks of requests that are over, in one round trip; the locks of other requests stay.

        Args:
            ran: whether they have run; their ends are then remembered even if their locks were lost or never acquired.
            took: whether they have run, and had taken their locks.
            unsent: whether what follows them, such as the next step of a chain, may be unsent: another delivery of
                the message may run after a lease, until another call says that they are over.

        Returns:
            Those that had taken their locks, and did not hold them any more when their ends were first reported.
        """

    @abstractmethod
    def announce(self, worker: str, *, ttl: float) -> None:
        """Record that a worker is alive that releases the locks of its tasks."""

    @abstractmethod
    def workers_seen(self) -> bool:
        """Return whether such a worker was seen recently."""

    def retire(self, worker: str) -> None:  # noqa: B027 - a backend need not implement it
        """Record that a worker lives and takes no further messages."""

    def workers(self) -> Mapping[str, float]:
        """Return the workers that were announced, and the seconds since then; empty if the backend keeps none."""
        return {}

    def suspect(self, place: str, lock: str) -> None:  # noqa: B027 - a backend need not implement it
        """Record at the key ``place`` that the message of a lock may be lost; the lock has refused a call."""

    def suspects(self, place: str, count: int) -> Sequence[str]:
        """Return and remove up to ``count`` of the locks that ``suspect`` recorded."""
        return []

    def read(self, keys: Sequence[str]) -> Sequence[tuple[str, Mapping[str, str]]]:
        """Return the held locks among ``keys`` with their records; empty if the backend cannot read records."""
        return []

    def lock(self, lock: str, task_id: str, expiry: float | None = None) -> bool:
        """Acquire a lock for a task id; return whether that id holds it now. For user code, as in celery-singleton.

        Args:
            expiry: seconds until the lock ends in any case; None: the lock stays until it is unlocked.
        """
        call = Call(Ref(lock, task_id), "", "", expiry or UNTIL_UNLOCKED, expiry, state="timed")
        return self.acquire_many([call])[0].verdict in {Verdict.ACQUIRED, Verdict.RUNNING}

    @abstractmethod
    def get(self, lock: str) -> str | None:
        """Return the task id that holds a lock, or None."""

    @abstractmethod
    def unlock(self, lock: str, holder: str = "") -> None:
        """Free a lock, of any holder or of one task id alone."""

    @abstractmethod
    def clear(self, key_prefix: str) -> None:
        """Free every lock under a prefix, regardless of its holder."""

    @abstractmethod
    def locks(self, key_prefix: str) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Yield every lock under a prefix and its record.

        If they are known, the record also has ``ttl``, the seconds that are left, and ``now``, the server's time in
        milliseconds.
        """


def unusable(key: str, reason: str) -> str:
    """Return the message for a lock whose keys cannot be read: the cause first, because the history cuts its end.

    Args:
        reason: the server's words, or the field that is wrong.
    """
    if is_key_denied(reason):  # which has its own advice
        return f"the lock {key[:LONGEST_SHOWN]} is unusable: {reason}"
    shown = key if len(key) <= LONGEST_SHOWN else f"{key[: LONGEST_SHOWN // 2]}…{key[-LONGEST_SHOWN // 2 :]}"
    advice = f"delete the lock ({command_line('unlock --force', key)})"
    if OTHER_DATA in reason:
        return f"the lock {shown} is unusable: {reason}. Give the calls another key, or move the data away"
    if "WRONGTYPE" in reason:
        where = "it must be a hash, and its :done a zset"
        return f"the lock {shown} is unusable: {where} (WRONGTYPE): delete the wrong one"
    return f"the lock {shown} is unusable: {reason}; {advice}"


def from_ms(milliseconds: str | int) -> datetime | None:
    """Return the time for milliseconds since 1970, or None for 0 and for a time that no lock can have."""
    value = int(float(milliseconds))
    return datetime.fromtimestamp(value / 1000, UTC) if 0 < value <= LATEST_MS else None
