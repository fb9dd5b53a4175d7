"""The entries in Redis: what is due, claim, confirm, statics, quarantine and history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from ..config import Config
from ..errors import EntryError
from ..lua import Script
from .entry import PARKED, Entry, Meta
from .lease import LeaseKeys
from .occurrence import Decision, Occurrence

if TYPE_CHECKING:
    from celery import Celery

    from .lease import Term

__all__ = ("Claim", "Claimed", "Due", "Keys", "Store", "Stored")

logger = get_logger("celery.beat")

#: Entries that one round trip reads or writes.
BATCH = 500

#: Decoded entries that are kept, by their raw definition.
CACHE_SIZE = 20_000

#: Entries in quarantine that are looked at again in one tick.
RECHECKED_PER_TICK = 100


@cache
def _script(name: str) -> Script:
    return Script(__package__, name)


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of a schedule."""

    prefix: str
    lock: str | None

    schedule: str = field(init=False)
    statics: str = field(init=False)
    pending: str = field(init=False)
    quarantine: str = field(init=False)
    history: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("schedule", "statics", "pending", "quarantine", "history"):
            object.__setattr__(self, name, f"{self.prefix}:{name}")

    @classmethod
    def of(cls, app: Celery) -> Keys:
        """Return the keys of an app's schedule."""
        config = Config.of(app)
        return cls(config.redbeat_key_prefix, config.lock_key)

    @property
    def lease(self) -> LeaseKeys:
        """The keys of leadership."""
        return LeaseKeys(self.lock, f"{self.prefix}:leader", f"{self.prefix}:term")

    def entry(self, member: str) -> str:
        """Return the key of an entry from its member in the schedule, which may be its bare name."""
        return member if member.startswith(self.prefix) else self.prefix + member


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as it was read."""

    member: str
    score: float
    sha: str  #: of its definition
    entry: Entry
    meta: Meta
    pending: str | None  #: JSON of its claimed occurrence


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
        self.history_limit = Config.of(app).singlebeat_history_limit
        self._decoded: dict[tuple[str, str], tuple[str, Entry]] = {}
        self._quarantined: dict[str, str] = {}

    def due(self, now: datetime, *, all_pending: bool) -> Due:
        """Read what is due: two round trips, however many entries there are.

        Args:
            all_pending: return every unconfirmed occurrence, not only those whose time to be tried has come.
        """
        keys, seconds = self.keys, now.timestamp()
        with self.client.pipeline(transaction=False) as pipe:
            pipe.zrangebyscore(keys.schedule, 0, seconds, start=0, num=BATCH, withscores=True)
            pipe.zrangebyscore(keys.schedule, f"({seconds!r}", "+inf", start=0, num=1, withscores=True)
            pipe.zrangebyscore(keys.pending, "-inf", "+inf" if all_pending else seconds, start=0, num=BATCH)
            pipe.hkeys(keys.quarantine)
            pipe.exists(keys.statics)
            members, upcoming, pending, quarantined, statics = pipe.execute()
        scores = dict(members)
        rechecked = quarantined[:RECHECKED_PER_TICK]
        wanted = list(dict.fromkeys([*scores, *pending, *rechecked]))
        stored = {item.member: item for item in self._read(wanted, scores, rechecked)}
        forgotten = [member for member in pending if member in stored and not stored[member].pending]
        if forgotten:  # the entry was deleted and made anew
            self.client.zrem(keys.pending, *forgotten)
        return Due(
            entries=[stored[member] for member in scores if member in stored],
            recovered=[stored[member] for member in pending if member in stored and stored[member].pending],
            next_score=upcoming[0][1] if upcoming else None,
            more=len(members) == BATCH,
            statics_gone=not statics,
        )

    def _read(
        self, members: Sequence[str], scores: Mapping[str, float], quarantined: Collection[str]
    ) -> Iterable[Stored]:
        if not members:
            return
        with self.client.pipeline(transaction=False) as pipe:
            for member in members:
                pipe.hmget(self.keys.entry(member), "definition", "meta", "pending")
            replies = pipe.execute(raise_on_error=False)
        for member, reply in zip(members, replies, strict=True):
            try:
                if isinstance(reply, Exception):
                    raise EntryError(f"its key holds something else than a hash: {reply}")  # noqa: TRY301
                definition, meta, pending = reply
                if not definition:
                    raise EntryError("its hash, or the definition in it, does not exist")  # noqa: TRY301
                sha, entry = self._decode(member, definition)
                stored = Stored(member, scores.get(member, PARKED), sha, entry, Meta.decode(meta), pending)
            except EntryError as exc:
                self._quarantine(member, str(exc))
            else:
                if member in quarantined:
                    self._restore(member)
                yield stored

    def _decode(self, member: str, definition: str) -> tuple[str, Entry]:
        found = self._decoded.get((member, definition))
        if found is None:
            if len(self._decoded) >= CACHE_SIZE:
                self._decoded.clear()
            sha = hashlib.sha1(definition.encode(), usedforsecurity=False).hexdigest()
            found = sha, Entry.decode(self.keys.entry(member), definition, self.app)
            self._decoded[member, definition] = found
        return found

    def _quarantine(self, member: str, reason: str) -> None:
        """Set an entry aside that cannot be used: kept, never due, looked at again until it is mended."""
        if self._quarantined.get(member) == reason:
            return
        logger.error("beat: Entry %s cannot be used and waits to be mended: %s", member, reason)
        self._quarantined[member] = reason
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with self.client.pipeline() as pipe:
            pipe.hset(self.keys.quarantine, member, json.dumps({"reason": reason, "since": since}))
            pipe.zadd(self.keys.schedule, {member: PARKED}, xx=True)
            pipe.zrem(self.keys.pending, member)
            pipe.execute()

    def _restore(self, member: str) -> None:
        logger.info("beat: Entry %s is mended", member)
        self._quarantined.pop(member, None)
        with self.client.pipeline() as pipe:
            pipe.hdel(self.keys.quarantine, member)
            pipe.zadd(self.keys.schedule, {member: 0}, xx=True)
            pipe.execute()

    def claim(self, claims: Sequence[Claim], term: Term, *, retry_at: datetime) -> list[Claimed]:
        """Move entries on, each in one step that nobody else can have taken; one round trip."""
        keys = self.keys
        calls = [
            (
                (keys.lock or keys.lease.leader, keys.schedule, keys.entry(claim.stored.member), keys.pending),
                (
                    term.token,
                    claim.stored.member,
                    repr(claim.stored.score),
                    claim.stored.sha,
                    repr(claim.next_score),
                    claim.meta.encode() if claim.meta else "",
                    claim.occurrence.encode() if claim.occurrence else "",
                    retry_at.timestamp(),
                ),
            )
            for claim in claims
        ]
        return [Claimed(reply) for reply in _checked(_script("claim").batch(self.client, calls))]

    def confirm(self, decisions: Sequence[tuple[Stored, Decision, Meta | None]], term: Term) -> None:
        """Record what became of claimed occurrences; one round trip."""
        keys = self.keys
        calls = [
            (
                (keys.entry(stored.member), keys.pending, keys.history),
                (
                    stored.member,
                    decision.occurrence.encode(),
                    meta.encode() if meta else "",
                    self.history_limit,
                    json.dumps(decision.fields(term.number)),
                ),
            )
            for stored, decision, meta in decisions
        ]
        _checked(_script("confirm").batch(self.client, calls))

    def postpone(self, members: Collection[str], retry_at: datetime) -> None:
        """Try unconfirmed occurrences again at another time."""
        if members:
            self.client.zadd(self.keys.pending, dict.fromkeys(members, retry_at.timestamp()), xx=True)

    def keep_statics(self, names: Collection[str]) -> None:
        """Remember which entries come from ``beat_schedule``, and remove those that have left it."""
        for name in set(self.client.smembers(self.keys.statics)) - set(names):
            logger.debug("beat: Removing old static schedule entry '%s'.", name)
            with self.client.pipeline() as pipe:
                pipe.zrem(self.keys.schedule, self.keys.prefix + name)
                pipe.delete(self.keys.prefix + name)
                pipe.srem(self.keys.statics, name)
                pipe.execute()
        if names:
            self.client.sadd(self.keys.statics, *names)

    def install(self, entries: Mapping[str, Entry], now: datetime) -> None:
        """Store entries that the app's configuration gives.

        One that is there keeps its past, and stays disabled if somebody has disabled it; one that is unchanged keeps
        its next time.
        """
        names = list(entries)
        for at in range(0, len(names), BATCH):
            self._install_batch({name: entries[name] for name in names[at : at + BATCH]}, now)

    def _install_batch(self, entries: Mapping[str, Entry], now: datetime) -> None:
        keys = self.keys
        with self.client.pipeline(transaction=False) as pipe:
            for name in entries:
                pipe.hmget(keys.prefix + name, "definition", "meta")
                pipe.zscore(keys.schedule, keys.prefix + name)
            replies = pipe.execute()
        with self.client.pipeline() as pipe:
            for (name, entry), (old, meta), score in zip(entries.items(), replies[::2], replies[1::2], strict=True):
                key = keys.prefix + name
                try:
                    stored = Entry.decode(key, old, self.app) if old else None
                    past = Meta.decode(meta) if meta else Meta(now)
                except EntryError:
                    stored, past = None, Meta(now)
                if stored is not None and not stored.enabled:
                    entry.enabled = False
                try:
                    definition = entry.encode()
                except EntryError as exc:
                    logger.error("beat: Cannot add the entry to the schedule: %s", exc)  # noqa: TRY400
                    continue
                if old != definition:
                    pipe.hset(key, "definition", definition)
                if not meta:
                    pipe.hset(key, "meta", past.encode())
                if score is None or stored is None or stored.schedule != entry.schedule:
                    pipe.zadd(keys.schedule, {key: entry.with_past(past).score})
            pipe.execute()


def _checked(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies
