"""One write for everything about an occurrence: its claim, its lock, its message and the decision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from ...locks.base import Verdict
from ...locks.redis import SCRIPTS, RedisBackend, holder_of
from ...lua import packed, script
from ...outbox import SENT_FOR, SENT_KEY, database
from .claims import HISTORY_BYTES, ClaimVerdict

if TYPE_CHECKING:
    from ...locks.base import Call, Holder
    from ...outbox import Command, Marker
    from ..entries.occurrence import Decision
    from ..leadership.lease import Term
    from .claims import Claim, ClaimedOccurrence, Store

__all__ = ("DISPATCH", "UNRECORDED", "Answer", "Dispatch", "Dispatches", "Request")

#: The reply of ``dispatch.lua`` for an occurrence that is sent, and whose decision the server refuses to record.
UNRECORDED = "unrecorded"

DISPATCH = script(
    __package__, "dispatch", script(__package__, "claim"), SCRIPTS["acquire"], script(__package__, "confirm")
)


@dataclass(slots=True)
class Dispatch:
    """An occurrence, and all that is to be written about it."""

    claim: Claim | ClaimedOccurrence  #: the latter: it is claimed already
    claimed: ClaimedOccurrence
    decision: Decision
    call: Call | None = None  #: for its lock; None if it needs none
    only: Verdict = Verdict.ACQUIRED  #: the one answer to its call with which it is sent
    commands: Sequence[Command] = ()  #: that send its message; empty: it is not sent
    note: str = ""  #: for its lock


@dataclass(frozen=True, slots=True)
class Answer:
    """What has become of a dispatch."""

    verdict: ClaimVerdict | None  #: of its claim; None: the server refuses it
    holder: Holder | None  #: the answer to its call
    recorded: str  #: the reply of ``confirm.lua``, or ``UNRECORDED``; empty: it is not sent
    refusal: str  #: why the server refuses a step; empty if it refuses none

    @classmethod
    def of(cls, reply: Sequence[Any]) -> Answer:
        """Read the reply of ``dispatch.lua``."""
        verdict, holder, recorded, refusal = reply
        claimed = ClaimVerdict(verdict) if verdict else None
        return cls(claimed, holder_of(holder) if holder else None, recorded, refusal)


class Request(NamedTuple):
    """Keys and arguments of ``dispatch.lua``."""

    keys: Sequence[str]
    arguments: Sequence[str | int]


class Dispatches:
    """The dispatches of one beat.

    Args:
        markers: that of the broker, and that of the locks.
    """

    def __init__(self, store: Store, markers: tuple[Marker, Marker]) -> None:
        self.store, self.markers = store, markers
        self._sender, self._numbers = uuid4().hex, count(1)

    def request(self, dispatches: Sequence[Dispatch], term: Term, *, retry_at: datetime) -> Request:
        """Return a request to write dispatches."""
        store, keys, db = self.store, self.store.keys, database(self.store.client)
        fence, token = store.fence(term)
        touched = [marker.key for marker in self.markers]
        touched += (f"{SENT_KEY}{self._sender}", fence, keys.schedule, keys.pending, keys.history, keys.pauses)
        values: list[str | int] = [" ".join(marker.value for marker in self.markers)]
        values += ("" if marker.db == db else marker.db for marker in self.markers)
        values += (db, next(self._numbers), round(SENT_FOR * 1000), token, repr(retry_at.timestamp()))
        values += (int(bool(keys.lock)), store.history_limit, HISTORY_BYTES, packed(store.pauses.found))
        calls = [(each.call, each.only, each.note) for each in dispatches if each.call is not None]
        values.append(packed(each.claim.row for each in dispatches))
        values.append(RedisBackend.requests(calls))
        values.append(packed(each.claimed.confirmation(each.decision).row.values(term) for each in dispatches))
        values.append(packed((each.only if each.call is not None else "", len(each.commands)) for each in dispatches))
        touched += (each.claimed.stored.entry.key for each in dispatches)
        for call, *_ in calls:
            touched += RedisBackend.keys_of(call)
        for command in (command for each in dispatches for command in each.commands):
            touched.append(command.key)
            values += (command.name, command.argument)
        return Request(touched, values)

    def write(self, request: Request) -> list[Answer] | None:
        """Write a request, in one round trip; a repetition gives the same answers, and writes nothing.

        Returns:
            The answer to each dispatch; None if broker or locks are on another server, so that nothing was done.

        Raises:
            NoPermissionError: the user lacks a right for one of the keys, so that nothing was done.
        """
        self.store.report_progress()
        reply = DISPATCH(self.store.client, *request)
        return None if reply == "elsewhere" else [Answer.of(each) for each in json.loads(reply)]
