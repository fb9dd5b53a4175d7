"""The entries in Redis: what is due, claim, confirm and history."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .. import signals
from ..config import Config
from ..connections import RedisError
from ..errors import ConfigError, EntryError
from ..log import Log
from ..lua import packed, script
from .entry import Entry, Meta
from .keys import Keys
from .lease import identity
from .occurrence import Decision, Occurrence
from .policy import Policy
from .quarantine import Quarantine
from .recurrence import next_occurrence
from .timetable import PARKED

if TYPE_CHECKING:
    from celery import Celery

    from .lease import Term

__all__ = ("Claim", "Claimed", "Due", "Store", "Stored")

log = Log("celery.beat")

#: Entries that one round trip reads or writes.
BATCH = 500

#: What an entry keeps of its own history: about four records.
HISTORY_BYTES = 600

#: Decoded entries that are kept, by their raw definition.
CACHE_SIZE = 5_000


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as it was read."""

    member: str
    score: float
    fields: Sequence[str]  #: definition, meta, policy, since and pending as they were read; empty if not there
    entry: Entry
    meta: Meta
    policy: Policy
    pending: Occurrence | None  #: claimed, and not confirmed
    pending_score: float = 0.0  #: when that is to be tried again

    @property
    def found(self) -> Sequence[str]:
        """Definition, meta, policy and since: what its times depend on."""
        return self.fields[:4]

    @property
    def sha(self) -> str:
        """SHA-1 of all that a decision about it is made from: a claim is refused if any of that has changed."""
        raw = "\0".join(self.fields).encode(errors="surrogateescape")
        return hashlib.sha1(raw, usedforsecurity=False).hexdigest()

    def without_pending(self, meta: Meta) -> Stored:
        """Return it as it is stored once its pending occurrence is confirmed, with another past."""
        definition, _, policy, since, _ = self.fields
        return replace(self, fields=(definition, meta.encode(), policy, since, ""), meta=meta, pending=None)


@dataclass(frozen=True, slots=True)
class Due:
    """What a tick has to look at."""

    entries: Sequence[Stored]
    recovered: Sequence[Stored]  #: with an occurrence that was claimed and not confirmed
    next_score: float | None  #: when the next entry is due
    more: bool  #: there are more entries due than one batch holds
    statics_gone: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A wish to move an entry on, with or without taking its occurrence."""

    stored: Stored
    next_score: float
    meta: Meta | None = None
    occurrence: Occurrence | None = None
    decision: Decision | None = None  #: to be recorded at once, where no occurrence is taken


class Claimed(StrEnum):
    """What came of a claim."""

    CLAIMED = "claimed"
    FENCED = "fenced"
    MOVED = "moved"
    PENDING = "pending"


class Store:
    """The schedule of an app in Redis.

    Args:
        client: the client for the schedule.
    """

    def __init__(self, app: Celery, client: Any) -> None:
        self.app, self.client = app, client
        self.keys = Keys.of(app)
        self.allowed_tasks = Config.of(app).singlebeat_allowed_tasks
        self.history_limit = Config.of(app).singlebeat_history_limit
        self._decoded: dict[tuple[str, str], Entry] = {}
        self.quarantine = Quarantine(app, client, self.keys)

    def check_eviction(self) -> None:
        """Say so if the server may throw entries away when its memory is full.

        Raises:
            ConfigError: it may, and ``redbeat_key_expiry_check`` is ``raise``.
        """
        check = Config.of(self.app).redbeat_key_expiry_check
        if check == "ignore":
            return
        try:
            policy = str(self.client.config_get("maxmemory-policy").get("maxmemory-policy", ""))
        except RedisError:  # not allowed to ask, or asked a server that does not know
            return
        if policy in {"", "noeviction"}:
            return
        text = (
            f"the schedule's server may evict keys when its memory is full (maxmemory-policy {policy}): use noeviction"
        )
        if check == "raise":
            raise ConfigError(text)
        level = logging.ERROR if check == "error" else logging.WARNING
        log.write(level, "beat: The schedule is not safe", event="may_evict", reason=text)

    def due(self, now: datetime, *, all_pending: bool, start: int = 0) -> Due:
        """Read what is due: two round trips, however many entries there are.

        Args:
            start: leave out so many, those that have been due for the longest time.
            all_pending: return every unconfirmed occurrence, not only those whose time to be tried has come.
        """
        keys, seconds = self.keys, now.timestamp()
        with self.client.pipeline(transaction=False) as pipe:
            pipe.zrangebyscore(keys.schedule, 0, seconds, start=start, num=BATCH, withscores=True)
            pipe.zrangebyscore(keys.schedule, f"({seconds!r}", "+inf", start=0, num=1, withscores=True)
            bound = "+inf" if all_pending else seconds
            pipe.zrangebyscore(keys.pending, "-inf", bound, start=0, num=BATCH, withscores=True)
            pipe.hkeys(keys.quarantine)
            pipe.exists(keys.statics)
            members, upcoming, waiting, quarantined, statics = pipe.execute()
        scores, pending = dict(members), dict(waiting)
        rechecked = self.quarantine.to_recheck(quarantined)
        wanted = list(dict.fromkeys([*scores, *pending, *rechecked]))
        stored = {item.member: item for item in self._read(wanted, scores, rechecked, now)}
        # By entry: a bare name and its key are two members of one.
        waits = {keys.entry(member): member for member in pending if member in stored and stored[member].pending}
        forgotten = set(pending) - set(waits.values())
        if forgotten:  # the entry was deleted, or made anew
            self.client.zrem(keys.pending, *forgotten)
        return Due(
            entries=[stored[member] for member in scores if member in stored],
            recovered=[replace(stored[member], pending_score=pending[member]) for member in waits.values()],
            next_score=upcoming[0][1] if upcoming else None,
            more=len(members) == BATCH,
            statics_gone=not statics,
        )

    def _read(
        self, members: Sequence[str], scores: Mapping[str, float], quarantined: Collection[str], now: datetime
    ) -> Iterable[Stored]:
        if not members:
            return
        replies = json.loads(
            script(__package__, "read")(self.client, [self.keys.entry(member) for member in members], ())
        )
        for member, reply in zip(members, replies, strict=True):
            try:
                if isinstance(reply, str):
                    raise EntryError(f"its key holds something else than a hash: {reply}")  # noqa: TRY301
                definition, meta, policy, since, pending = reply
                if not definition and member not in scores and member not in quarantined:
                    continue  # deleted while its last occurrence waited
                if not definition:
                    raise EntryError("its hash, or the definition in it, does not exist")  # noqa: TRY301
                entry = self._decode(member, definition, now)
                taken = Occurrence.decode(pending) if pending else None
                score, past = scores.get(member, PARKED), Meta.decode(meta, since)
                wishes = Policy.decode(policy)
                if wishes.expires is not None and entry.options.get("expires") is not None:
                    raise EntryError("expires is in its options as well as in its policy")  # noqa: TRY301
                fields = [field or "" for field in reply]
                stored = Stored(member, score, fields, entry, past, wishes, taken)
                if why := self.quarantine.why(member, stored.found, now):
                    raise EntryError(why)  # noqa: TRY301
            except EntryError as exc:
                if member in quarantined and member not in scores and not self._is_scheduled(member):
                    self.quarantine.forget(member)
                else:
                    self.quarantine.put(member, str(exc), due=member in scores)
            else:
                if member in quarantined:
                    self.quarantine.lift(member, has_pending=taken is not None)
                yield stored

    def _is_scheduled(self, member: str) -> bool:
        return self.client.zscore(self.keys.schedule, member) is not None

    def _decode(self, member: str, definition: str, now: datetime) -> Entry:
        entry = self._decoded.get((member, definition))
        if entry is None:
            if len(self._decoded) >= CACHE_SIZE:
                self._decoded.clear()
            key = self.keys.entry(member)
            if key in self.keys.own:
                raise EntryError(f"its key is one of the schedule itself: ZREM {self.keys.schedule} {member}")
            entry = Entry.decode(key, definition, self.app)
            if not any(fnmatchcase(entry.task, pattern) for pattern in self.allowed_tasks):
                raise EntryError(f"its task {entry.task} is not among singlebeat_allowed_tasks")
            try:
                next_occurrence(entry.schedule, now, zone=self.app.timezone)
            except Exception as exc:  # a rule that can be read may still make no sense
                raise EntryError(f"its next run cannot be calculated: {type(exc).__name__}: {exc}") from exc
            self._decoded[member, definition] = entry
        return entry

    def claim(self, claims: Sequence[Claim], term: Term, *, retry_at: datetime) -> list[Claimed]:
        """Move entries on, each in one step that nobody else can have taken; one round trip."""
        if not claims:
            return []
        keys = self.keys
        touched = [keys.lock or keys.lease.leader, keys.schedule, keys.pending]
        wishes = []
        for claim in claims:
            stored = claim.stored
            touched.append(keys.entry(stored.member))
            wish = (stored.member, stored.score, stored.sha, repr(claim.next_score))
            past = (claim.meta.encode(), claim.meta.encode_since()) if claim.meta else ("", "")
            wishes.append((*wish, *past, claim.occurrence.encode() if claim.occurrence else ""))
        args = (term.token, repr(retry_at.timestamp()), packed(wishes))
        return [Claimed(verdict) for verdict in json.loads(script(__package__, "claim")(self.client, touched, args))]

    def confirm(self, decisions: Sequence[tuple[Stored, Decision, Meta | None]], term: Term) -> None:
        """Record what became of claimed occurrences; one round trip."""
        self._record([(s.member, d.occurrence.encode(), m.encode() if m else "", d) for s, d, m in decisions], term)

    def record(self, decisions: Sequence[Decision], term: Term) -> None:
        """Record decisions about occurrences that were not claimed; one round trip."""
        if self.history_limit or signals.occurrence_decided.receivers:
            self._record([(self.keys.prefix + decision.entry, "", "", decision) for decision in decisions], term)

    def _record(self, decisions: Sequence[tuple[str, str, str, Decision]], term: Term) -> None:
        if not decisions:
            return
        keys = [self.keys.pending, self.keys.history, *(self.keys.entry(member) for member, *_ in decisions)]
        leader = identity()
        rows = packed((*row, decision.values(term.number, leader)) for *row, decision in decisions)
        replies = script(__package__, "confirm")(self.client, keys, (self.history_limit, HISTORY_BYTES, rows))
        for (*_, decision), reply in zip(decisions, json.loads(replies), strict=True):
            if reply == "confirmed":  # and told, by whoever had taken it up
                continue
            signals.occurrence_decided.send(sender=self.app, entry=decision.entry, decision=decision)

    def retake(self, recovered: Sequence[Stored], term: Term, *, retry_at: datetime) -> list[Stored]:
        """Take up unconfirmed occurrences, and return those that nobody else has taken up; one round trip."""
        if not recovered:
            return []
        keys = self.keys
        wishes = packed((stored.member, stored.pending_score) for stored in recovered)
        touched, args = (keys.lock or keys.lease.leader, keys.pending), (term.token, repr(retry_at.timestamp()), wishes)
        replies = json.loads(script(__package__, "retake")(self.client, touched, args))
        return [stored for stored, taken in zip(recovered, replies, strict=True) if taken]

    def postpone(self, retries: Mapping[str, datetime]) -> None:
        """Try unconfirmed occurrences again at other times."""
        if retries:
            scores = {member: retry_at.timestamp() for member, retry_at in retries.items()}
            self.client.zadd(self.keys.pending, scores, xx=True)
