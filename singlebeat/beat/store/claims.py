"""The entries in Redis: reads due entries, and claims, retakes and confirms their occurrences."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ... import signals
from ...advice import redis_command
from ...config import Config
from ...connections import ResponseError
from ...errors import ConfigError, EntryError
from ...log import Log
from ...lua import packed, script
from ...server_errors import with_advice
from ..calculating_time import CalculatingTime
from ..calendar.zone import app_zone
from ..entries.author import digests
from ..entries.entry import Entry, Meta
from ..entries.fields import BATCH, read_fields
from ..entries.occurrence import Decision, Occurrence
from ..entries.pauses import NO_PAUSES, READ_PAUSES, Pauses
from ..entries.policy import EntryPolicy
from ..entries.timetable import PARKED
from ..keys import Keys
from ..server_time import READ_CLOCK, ServerTime
from ..share import ALL, Share
from .changes import notice
from .last_records import LastRecords
from .latest import Latest
from .quarantine import QUARANTINED, RECHECKED_PER_TICK, Quarantine
from .server import eviction_policy
from .spoilt import why_spoilt
from .unplaced import READ_WITNESSES, Witnesses

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient
    from ..entries.fields import StoredFields
    from ..leadership.lease import Term

__all__ = (
    "HISTORY_BYTES",
    "Claim",
    "ClaimVerdict",
    "ClaimedOccurrence",
    "Confirmation",
    "Due",
    "Store",
    "Stored",
)

log = Log("celery.beat")

#: Bytes that an entry keeps of its own history: about four records. It keeps the last three however long they are.
HISTORY_BYTES = 600

#: Where beats share the work: times ``BATCH``, so many rows of due entries a beat reads at once to find its own.
MOST_BATCHES = 4

SETTLE = script(__package__, "settle", script(__package__, "claim"), script(__package__, "confirm"))

#: Reads due entries where beats share the work.
WINDOW = script(__package__, "window")


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as it was read."""

    member: str
    score: float
    fields: Sequence[str]  #: definition, meta, policy, since and pending as they were read; empty if not there
    entry: Entry
    meta: Meta
    policy: EntryPolicy
    pending: Occurrence | None  #: claimed, and not confirmed
    pending_score: float = 0.0  #: when the pending occurrence is to be retried
    pauses: Pauses = NO_PAUSES  #: of many entries, as they were read with it
    error: Exception | None = None  #: why code of the user gives no arguments, or no lock key, for its next run

    @property
    def found(self) -> Sequence[str]:
        """Definition, meta, policy and since: the fields that its times depend on."""
        return self.fields[:4]

    @property
    def sha(self) -> str:
        """SHA-1 of all fields that a decision about it depends on: a claim is refused if any of them has changed."""
        raw = "\0".join(self.fields).encode(errors="surrogateescape")
        return hashlib.sha1(raw, usedforsecurity=False).hexdigest()

    def without_pending(self, meta: Meta) -> Stored:
        """Return the entry as it is stored once its pending occurrence is confirmed, with another past."""
        definition, _, policy, since, _ = self.fields
        since = since if meta.ahead == self.meta.ahead else meta.encode_since()
        return replace(self, fields=(definition, meta.encode(), policy, since, ""), meta=meta, pending=None)


@dataclass(frozen=True, slots=True)
class Due:
    """The entries and occurrences that a tick has to decide about."""

    entries: Sequence[Stored]
    recovered: Sequence[Stored]  #: entries with an occurrence that was claimed and not confirmed
    next_score: float | None  #: when the next entry is due
    more: bool  #: there are more entries due than one batch holds
    statics_gone: bool
    zone: str | None = None  #: of the app, in which the places of the schedule were computed; None if unknown
    witnesses: Witnesses = Witnesses(0, 0)  #: of the places of all entries
    passed: int = 0  #: entries in the parts of other beats that the next tick passes over, because they are so many


@dataclass(frozen=True, slots=True)
class Claim:
    """A request to move an entry on, with or without claiming its occurrence."""

    stored: Stored
    next_score: float
    meta: Meta | None = None
    occurrence: Occurrence | None = None
    decision: Decision | None = None  #: to be recorded in the same step, if no occurrence is claimed

    @property
    def row(self) -> tuple[str | float, ...]:
        """The claim as ``claim.lua`` takes it."""
        stored = self.stored
        past = (self.meta.encode(), self.meta.encode_since()) if self.meta else ("", "")
        occurrence = self.occurrence.encode() if self.occurrence else ""
        return (stored.member, stored.score, stored.sha, repr(self.next_score), *past, occurrence)

    @property
    def claimed(self) -> ClaimedOccurrence | None:
        """The occurrence that is to be sent once the claim is granted, None if there is none."""
        if self.occurrence is None:
            return None
        return ClaimedOccurrence(self.stored, self.occurrence, self.meta or self.stored.meta)


@dataclass(frozen=True, slots=True)
class ClaimedOccurrence:
    """An occurrence that is to be sent: claimed in this tick, or pending and retaken."""

    stored: Stored
    occurrence: Occurrence
    past: Meta  #: of its entry, in which it is counted

    @property
    def row(self) -> tuple[str | float, ...]:
        """A claim that ``claim.lua`` grants only if the occurrence is claimed already."""
        return ("", -1, "", "-1", "", "", self.occurrence.encode())

    def confirmation(self, decision: Decision) -> Confirmation:
        """Return the confirmation of a decision about it; an occurrence that was not sent is counted no longer."""
        return Confirmation(self.stored, decision, None if decision.is_sent else self.past.without(self.occurrence))


class _Row(NamedTuple):
    """A decision as ``confirm.lua`` takes it."""

    member: str
    decision: Decision
    occurrence: str = ""  #: that is pending; empty if none was claimed
    meta: str = ""  #: empty if it stays as it is
    since: tuple[str, ...] = ()  #: as it was read, and its new value; empty if it stays as it is

    def values(self, term: Term) -> tuple[object, ...]:
        """Return the row itself."""
        record = self.decision.values(term.number, term.leader)
        return (self.member, self.occurrence, self.meta, self.since, record, self.decision.sent)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The decision about a claimed occurrence, which is pending no longer."""

    stored: Stored
    decision: Decision
    past: Meta | None = None  #: of its entry, in which it is not counted; None if the past stays as it is

    @property
    def row(self) -> _Row:
        """The decision as ``confirm.lua`` takes it."""
        row = _Row(self.stored.entry.key, self.decision, self.decision.occurrence.encode())
        if self.past is None:
            return row
        is_sent_ahead = self.past.ahead == self.stored.meta.ahead
        since = () if is_sent_ahead else (self.stored.fields[3], self.past.encode_since())
        return row._replace(meta=self.past.encode(), since=since)


class ClaimVerdict(StrEnum):
    """The outcome of a claim."""

    CLAIMED = "claimed"
    FENCED = "fenced"
    MOVED = "moved"
    PENDING = "pending"


class Store:
    """The schedule of an app in Redis.

    Args:
        client: the client for the schedule.
        progress: called at each step and before each call to the server, because a call may be repeated for long.
        server_time: learns the server's time from each read of due entries.
    """

    def __init__(
        self,
        app: Celery,
        client: RedisClient,
        *,
        progress: Callable[[], object] = lambda: None,
        server_time: ServerTime | None = None,
    ) -> None:
        self.app, self.client, self.report_progress = app, client, progress
        self._time = server_time or ServerTime()
        self.keys = Keys.of(app)
        self.history_limit = Config.of(app).singlebeat_history_limit
        self._decoded = Latest[Entry]()  #: by definition
        self._changes_limit = Config.of(app).singlebeat_changes_limit
        self._compared = Latest[bool]()  #: by definition, policy and what was recorded
        self._unrecorded: dict[str, bool] = {}  #: by key, as ``notice`` takes them
        #: Of many entries, as they were read last: a claim is refused if they have changed since then.
        self.pauses = NO_PAUSES
        self.quarantine = Quarantine(app, client, self.keys, progress=progress)
        self.calculating_time = CalculatingTime()
        self.last_records = LastRecords(client, self.keys)

    def check_eviction(self) -> None:
        """Log it if the server may evict entries when its memory is full.

        Raises:
            ConfigError: the server may evict keys, and ``redbeat_key_expiry_check`` is ``raise``.
        """
        check = Config.of(self.app).redbeat_key_expiry_check
        if check == "ignore":
            return
        policy = eviction_policy(self.client)
        if policy in {None, "noeviction"}:
            return
        text = (
            f"the schedule's server may evict keys when its memory is full (maxmemory-policy {policy}): use noeviction"
        )
        if check == "raise":
            raise ConfigError(text)
        level = logging.ERROR if check == "error" else logging.WARNING
        log.write(level, "beat: The schedule is not safe", event="may_evict", reason=text)

    def due(self, now: datetime, share: Share = ALL, *, all_pending: bool, start: int = 0) -> Due:
        """Read due entries and pending occurrences in two round trips, however many entries there are.

        Args:
            share: our part of them; the others are left to the beats in whose parts they are.
            start: leave out this number of entries, those that have been due for the longest time.
            all_pending: return every pending occurrence, not only those whose time for a retry has come.
        """
        self.report_progress()
        keys, seconds, asked = self.keys, now.timestamp(), self._time.asked()
        most = BATCH * min(share.beats, MOST_BATCHES)
        with self.client.pipeline(transaction=False) as pipe:
            # Not eval(), which redis-py refuses in the pipelines of clusters.
            pipe.execute_command("EVAL", READ_CLOCK.text, 1, keys.schedule)
            if share.others:  # of these rows, only some are ours
                pipe.execute_command("EVAL", WINDOW.text, 1, keys.schedule, 0, repr(seconds), start, most)
            else:
                pipe.zrangebyscore(keys.schedule, 0, seconds, start=start, num=BATCH, withscores=True)
            pipe.zrangebyscore(keys.schedule, f"({seconds!r}", "+inf", start=0, num=share.beats, withscores=True)
            bound = "+inf" if all_pending else seconds
            pipe.zrangebyscore(keys.pending, "-inf", bound, start=0, num=BATCH, withscores=True)
            # Only some names: thousands of entries may stay in quarantine.
            pipe.hscan(keys.quarantine, self.quarantine.cursor, count=RECHECKED_PER_TICK)
            pipe.zcount(keys.schedule, QUARANTINED, QUARANTINED)
            pipe.hlen(keys.quarantine)
            pipe.exists(keys.statics)
            pipe.get(keys.zone)
            pipe.execute_command("EVAL", READ_PAUSES.text, 1, keys.pauses)
            pipe.execute_command("EVAL", READ_WITNESSES.text, 2, keys.schedule, keys.placed)
            self.last_records.ask(pipe)
            shown, members, upcoming, waiting, quarantined, parked, recorded, *rest = pipe.execute()
        statics, zone, pauses, witnesses, records = rest
        self._time.heard(shown, asked)
        self.last_records.heard(records)
        self._note_pauses(Pauses.of(pauses))
        if parked > recorded:
            self.quarantine.recheck_unrecorded()  # the next tick reads them
        if share.others:
            found = json.loads(members)
            members = [*zip(found[::2], map(float, found[1::2]), strict=True)]
        ours = [row for row in members if share.has(keys.entry(row[0]), seconds - row[1])]
        passed = len(members) - len(ours) if 2 * len(ours) * share.beats < len(members) else 0
        # By the time of the retry as well: each retry has another beat, because one may not reach the broker.
        retried = [row for row in waiting if share.has(f"{keys.entry(row[0])} {row[1]}", seconds - row[1])]
        # The next one that is ours, if it is among them: not every beat wakes up for every entry.
        upcoming = [row for row in upcoming if share.has(keys.entry(row[0]), 0)] or upcoming[-1:]
        scores, pending = dict(ours[:BATCH]), dict(retried)
        self.quarantine.cursor, rechecked = quarantined
        wanted = list(dict.fromkeys([*scores, *pending, *rechecked]))
        stored = {item.member: item for item in self._read(wanted, scores, rechecked, now)}
        # By entry: a bare name and a key may be two members of the same entry.
        waits = {keys.entry(member): member for member in pending if member in stored and stored[member].pending}
        forgotten = set(pending) - set(waits.values())
        if forgotten:  # their entries were deleted, or created again
            self.report_progress()
            self.client.zrem(keys.pending, *forgotten)
        # An entry with two places is decided about once: the next tick sees from its past that it has moved on.
        first = {keys.entry(member): member for member in reversed(scores)}
        return Due(
            entries=[stored[member] for member in scores if member in stored and member == first[keys.entry(member)]],
            recovered=[replace(stored[member], pending_score=pending[member]) for member in waits.values()],
            next_score=upcoming[0][1] if upcoming else None,
            more=len(members) == most or len(ours) > BATCH,
            statics_gone=not statics,
            zone=zone,
            witnesses=Witnesses.of(witnesses),
            passed=passed,
        )

    def _read(
        self, members: Sequence[str], scores: Mapping[str, float], quarantined: Collection[str], now: datetime
    ) -> Iterable[Stored]:
        if not members:
            return
        self.report_progress()
        replies = read_fields(self.client, [self.keys.entry(member) for member in members], "recorded")
        for member, reply in zip(members, replies, strict=True):
            self.report_progress()
            try:
                definition, meta, policy, since, pending, sent, recorded = self._fields_of(member, reply)
                if not definition and member not in scores and member not in quarantined:
                    continue  # deleted while its last occurrence waited
                if not definition:
                    raise EntryError("its hash, or the definition in it, does not exist")  # noqa: TRY301
                self._compare(member, definition, policy or "", meta, recorded)
                entry = self._decode(member, definition)
                taken = Occurrence.decode(pending) if pending else None
                score, past = scores.get(member, PARKED), Meta.decode(meta, since, sent)
                wishes = EntryPolicy.decode(policy)
                if why := wishes.contradicts(entry.options):
                    raise EntryError(why)  # noqa: TRY301
                fields = [field or "" for field in (definition, meta, policy, since, pending)]
                stored = Stored(member, score, fields, entry, past, wishes, taken, pauses=self.pauses)
                if member in quarantined and not self._check_times(stored, now, waits=member not in scores):
                    continue
                if why := self.quarantine.why_failing(member, stored.found, now):
                    raise EntryError(why)  # noqa: TRY301
            except EntryError as exc:
                if member in quarantined and member not in scores:
                    self.quarantine.keep(member, str(exc))
                else:
                    self.quarantine.add(member, str(exc), due=member in scores)
            else:
                if member in quarantined:
                    self.quarantine.readmit(member, has_pending=taken is not None)
                yield stored
        self.quarantine.settle()

    def _check_times(self, stored: Stored, now: datetime, *, waits: bool) -> bool:
        """Calculate the times of a quarantined entry if that is to be tried now; return False if a later tick does.

        Args:
            waits: whether a later tick may do it, because the entry is not due.
        """
        definition, time = stored.fields[0], self.calculating_time
        if self.quarantine.why_failing(stored.member, stored.found, now):
            return True
        if waits and not time.has_for(definition, stored.entry):
            return False
        with time.spent_on(definition, stored.entry):
            self.quarantine.try_times(stored.member, stored.found, stored.entry, now)
        return True

    def _compare(self, member: str, definition: str, policy: str, meta: str | None, recorded: str | None) -> None:
        """Find out whether an entry is stored as its last change was recorded, unless it is as it was read before.

        Args:
            recorded: digests of what was recorded, None if nothing was.
        """
        texts = definition, policy, recorded or ""
        if not self._changes_limit or self._compared.of(member, texts):
            return
        self._compared.keep(member, texts, True)
        if recorded != digests(definition, policy):
            self._unrecorded[self.keys.entry(member)] = _has_never_run(meta)

    def notice_changes(self) -> None:
        """Record the changes of other programs that the last reads have found; one round trip if there are any."""
        found, self._unrecorded = self._unrecorded, {}
        if not found:
            return
        self.report_progress()
        try:
            notice(self.client, self.keys, self._changes_limit, found)
        except ResponseError as exc:  # runs must not wait for that
            reason = why_spoilt(self.client, self.keys, exc) or with_advice(exc)
            log.warning("beat: A change of another program is not recorded", event="unrecorded", reason=reason)

    def _note_pauses(self, pauses: Pauses) -> None:
        """Remember the pauses of many entries, and log those that cannot be read, which pause nothing."""
        if pauses.problems != self.pauses.problems:
            for selector, why in pauses.problems.items():
                about = {"pause": selector, "reason": why}
                log.warning("beat: A pause of many entries cannot be read", event="pause_unreadable", **about)
        self.pauses = pauses

    def _fields_of(self, member: str, reply: StoredFields) -> StoredFields:
        if self.keys.entry(member) in self.keys.own:
            remove = redis_command("ZREM", self.keys.schedule, member)
            raise EntryError(f"its key belongs to the schedule itself: remove its place with {remove}")
        if isinstance(reply, str):
            raise EntryError(f"its key holds something else than a hash: {reply}")
        return reply

    def _decode(self, member: str, definition: str) -> Entry:
        entry = self._decoded.of(member, (definition,))
        if entry is None:
            entry = Entry.allowed(self.keys.entry(member), definition, self.app)
            self._decoded.keep(member, (definition,), entry)
            if entry.ignored:
                about = {"entry": entry.name, "reason": entry.ignored}
                log.warning("beat: Entry %(entry)s has an unknown field", event="field_ignored", **about)
        return entry

    def claim(self, claims: Sequence[Claim], term: Term, *, retry_at: datetime) -> list[ClaimVerdict]:
        """Move entries on, and record the decisions that claim no occurrence; one round trip.

        Each entry is moved on in one step that only one beat can take, with the record of its decision.
        """
        if not claims:
            return []
        self.report_progress()
        keys, (lock, token) = self.keys, self.fence(term)
        entries = [keys.entry(claim.stored.member) for claim in claims]
        rows, found = packed(claim.row for claim in claims), packed(self.pauses.found)
        args = (token, repr(retry_at.timestamp()), rows, found, int(bool(keys.lock)))
        touched = (lock, keys.schedule, keys.pending, keys.pauses)
        if self.history_limit and any(claim.decision for claim in claims):
            decisions = packed(
                _Row(key, claim.decision).values(term) if claim.decision else ()
                for key, claim in zip(entries, claims, strict=True)
            )
            recorded = (*args, self.history_limit, HISTORY_BYTES, decisions)
            reply = SETTLE(self.client, (*touched, keys.history, *entries), recorded)
        else:
            reply = script(__package__, "claim")(self.client, (*touched, *entries), args)
        verdicts = [ClaimVerdict(verdict) for verdict in json.loads(reply)]
        for claim, verdict in zip(claims, verdicts, strict=True):
            if verdict is ClaimVerdict.CLAIMED and claim.decision is not None:
                self.signal(claim.decision, "recorded")
        return verdicts

    def fence(self, term: Term) -> tuple[str, str]:
        """Return a key, and what it holds for as long as this beat may claim occurrences."""
        # Where leadership is switched off, beats of one zone share the work. A claim from another zone is refused.
        return (self.keys.lock, term.token) if self.keys.lock else (self.keys.zone, str(app_zone(self.app)))

    def confirm(self, confirmations: Sequence[Confirmation], term: Term) -> None:
        """Record the decisions about claimed occurrences, which are pending no longer; one round trip."""
        self._record([each.row for each in confirmations], term)

    def record(self, decisions: Sequence[Decision], term: Term) -> None:
        """Record decisions about entries that are not moved on; one round trip."""
        if self.history_limit or signals.occurrence_decided.receivers:
            self._record([_Row(self.keys.prefix + decision.entry, decision) for decision in decisions], term)

    def _record(self, rows: Sequence[_Row], term: Term) -> None:
        if not rows:
            return
        self.report_progress()
        keys = [self.keys.pending, self.keys.history, *(self.keys.entry(row.member) for row in rows)]
        values = packed(row.values(term) for row in rows)
        replies = script(__package__, "confirm")(self.client, keys, (self.history_limit, HISTORY_BYTES, values))
        for row, reply in zip(rows, json.loads(replies), strict=True):
            self.signal(row.decision, reply)

    def signal(self, decision: Decision, reply: str) -> None:
        """Send the signal about a decision, unless the beat that had retaken its occurrence has sent it."""
        if reply != "confirmed":
            signals.occurrence_decided.send(sender=self.app, entry=decision.entry, decision=decision)

    def retake(self, recovered: Sequence[Stored], term: Term, *, retry_at: datetime) -> list[Stored]:
        """Retake pending occurrences, and return those that no other beat has retaken before; one round trip."""
        if not recovered:
            return []
        self.report_progress()
        keys = self.keys
        wishes = packed((stored.member, stored.pending_score, keys.entry(stored.member)) for stored in recovered)
        touched, args = (keys.lock or keys.lease.leader, keys.pending), (term.token, repr(retry_at.timestamp()), wishes)
        replies = json.loads(script(__package__, "retake")(self.client, touched, args))
        return [stored for stored, taken in zip(recovered, replies, strict=True) if taken]

    def postpone(self, retries: Mapping[str, datetime]) -> None:
        """Set other times for the retries of pending occurrences, by the keys of their entries."""
        if retries:
            self.report_progress()
            scores = {key: retry_at.timestamp() for key, retry_at in retries.items()}
            self.client.zadd(self.keys.pending, scores, xx=True)


def _has_never_run(meta: str | None) -> bool:
    try:
        return not meta or not Meta.decode(meta).total_run_count
    except EntryError:
        return False
