"""The time by which leaders have decided; because of it, a clock that was wrong silences no entry for long."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from ...errors import EntryError
from ...log import LAST_INSTANT, Log
from ...lua import script
from ..entries.definition import LONGEST_STEP_BACK, Meta
from ..entries.fields import BATCH, read_fields
from ..entries.timetable import PARKED
from ..server_time import UNFIT_FROM

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..entries.fields import StoredFields
    from ..keys import Keys
    from .lease import Term

__all__ = ("WRONG_PAST", "Clock", "Jump", "latest_shown")

log = Log("celery.beat")

#: The place of an entry whose past comes from a clock that was further ahead than that, even if the past lies less far
#: ahead: the last time before an end, or before a night. A tick lets the entry count from now. No entry is due then.
WRONG_PAST = 1.0

#: How old the stored time may be. The next leader compares it in hours.
STORED_EVERY = timedelta(seconds=10)

#: Up to which age a stored time may have replaced a later one without a loss: a beat without leadership that shares the
#: work has read its clock a moment before the leader, and stored the time after it.
STORED_LATE = timedelta(seconds=1)

NOTE_TIME = script(__package__, "note_time")

LONG_AGO = datetime.min.replace(tzinfo=UTC)


class Jump(NamedTuple):
    """A step forward by which no beat has decided: the clock was behind before, or no beat led."""

    before: datetime
    after: datetime

    def __contains__(self, moment: object) -> bool:
        """Return whether a moment lies within it."""
        return isinstance(moment, datetime) and self.before < moment <= self.after


class Clock:
    """The latest time by which a leader has decided since it was last known to be right.

    While the clock is behind that time, by up to ``LONGEST_STEP_BACK``, entries that were decided by then wait.

    Args:
        client: the client for the schedule.
        progress: called at each step.
    """

    def __init__(self, client: RedisClient, keys: Keys, *, progress: Callable[[], None]) -> None:
        self.client, self.keys, self._progress = client, keys, progress
        self._term: Term | None = None
        self._latest = self._noted = LONG_AGO
        self._written: datetime | None = None  #: the time that this beat has stored last as the leader
        self._lost: datetime | None = None  #: the time since which the server has lost changes; to be returned once
        self._stored = ""  #: the time that is stored, as far as this beat knows
        self.jump: Jump | None = None  #: the last one of more than ``LONGEST_STEP_BACK``
        self._waits = False  #: it was logged that entries wait for the clock to catch up

    def check(self, now: datetime, term: Term) -> datetime | None:
        """Make entries due that a clock running hours ahead has moved on, so that a tick lets them count from now.

        Such a clock is detected by the latest time that this beat or an earlier leader has recorded. A scan of the
        entries is expensive: a million entries may rightly have times far ahead. Places that are no times are cheap to
        find.

        Returns:
            The time since which the server has lost changes; None if no loss is known. A server that starts from a
            snapshot, or takes over from another one, may have forgotten its last changes.
        """
        if term != self._term:
            self._begin(term)
        if now + LONGEST_STEP_BACK < self._latest:
            self._reschedule_ahead(now)
            self._latest, self.jump = now, None  # a jump was that of the wrong clock
        elif (self._latest - now).total_seconds() > UNFIT_FROM and not self._waits:
            self._waits = True
            about = {"before": self._latest, "now": now, "reason": "entries that were decided by then wait until then"}
            log.warning("beat: The clock was set back from %(before)s to %(now)s", event="clock_set_back", **about)
            self._retry_pending(now)
        elif LONG_AGO < self._latest < now - LONGEST_STEP_BACK:
            self.jump = Jump(self._latest, now)
        # The latest time, not the last: many small steps back are a large step.
        self._latest = max(self._latest, now)
        if self._waits and self._latest == now:
            self._waits = False
            log.warning("beat: The clock has caught up: no entry waits for it any longer", event="clock_caught_up")
        if abs(now - self._noted) >= STORED_EVERY:
            self._note(now, term)
        lost, self._lost = self._lost, None
        return lost

    def _begin(self, term: Term) -> None:
        """Read the stored time, because a term begins."""
        self._progress()
        self._stored = self.client.get(self.keys.clock) or ""
        self._latest = self._noted = shown = _moment(self._stored)
        is_next = self._term is not None and term.number == self._term.number + 1  # no other beat led in between
        self.jump = self.jump if is_next else None
        if is_next and not term.lost and self._has_lost(shown):
            self._lost = shown
        self._term, self._written = term, None

    def forget(self) -> None:
        """Forget what this beat has stored: its loss is known."""
        self._written = None

    def _has_lost(self, stored: datetime) -> bool:
        """Return whether a stored time shows that the server has lost what this beat has stored since."""
        return self._written is not None and LONG_AGO < stored < self._written - STORED_LATE

    def _note(self, now: datetime, term: Term) -> None:
        """Store the latest time, and compare the one that was stored before."""
        self._progress()
        before = _moment(self._store(repr(self._latest.timestamp())))
        if term.token and self._has_lost(before):
            self._lost = before
        self._correct_places()
        # The server has come back as it was when its clock was ahead. Beats that share the work note times, too.
        if (left := _moment(self._stored)) > self._latest + (timedelta() if term.token else LONGEST_STEP_BACK):
            self._latest = left
        self._noted, self._written = now, self._latest if term.token else None

    def _correct_places(self) -> None:
        """Make entries due whose places are no times."""
        keys, after_all = self.keys, (f"({LAST_INSTANT!r}", "+inf")
        places = self.client.zrangebyscore(keys.schedule, *after_all, start=0, num=BATCH, withscores=True)
        if places:
            self.client.zadd(keys.schedule, {member: 0 for member, _ in places}, xx=True)
        for member, score in places:
            about = {"entry": keys.name(member), "place": score, "reason": "no time in seconds since 1970"}
            log.warning("beat: The place of '%(entry)s' is corrected", event="place_corrected", **about)

    def _store(self, latest: str) -> str:
        """Store a time unless another beat has stored a later one; return the time that was stored before."""
        before = str(NOTE_TIME(self.client, [self.keys.clock], (self._stored, latest)))
        is_unknown = before not in {self._stored, latest}  # of another beat, or the server has lost ours
        self._stored = latest
        if is_unknown and _moment(before) > _moment(latest):  # that beat leads, and this one does no longer
            self._stored = before
        elif is_unknown:
            NOTE_TIME(self.client, [self.keys.clock], (before, latest))
        return before

    def _reschedule_ahead(self, now: datetime) -> None:
        about = {"before": self._latest, "now": now}
        log.warning("beat: The clock was set back from %(before)s to %(now)s", event="clock_set_back", **about)
        limit = (now + LONGEST_STEP_BACK).timestamp()
        waiting = self.client.zrangebyscore(self.keys.schedule, f"({limit!r}", "+inf")
        # The clock may have shown a time after their end.
        waiting += self.client.zrangebyscore(self.keys.schedule, PARKED, PARKED)
        for at in range(0, len(waiting), BATCH):
            self._progress()
            members = waiting[at : at + BATCH]
            entries = [self.keys.entry(member) for member in members]
            found = zip(members, read_fields(self.client, entries), strict=True)
            if ahead := [member for member, fields in found if _counts_from(fields, now) > now]:
                self.client.zadd(self.keys.schedule, dict.fromkeys(ahead, WRONG_PAST), xx=True)
        self._retry_pending(now)

    def _retry_pending(self, now: datetime) -> None:
        """Retry pending occurrences now: a clock that was ahead has put their next try far ahead."""
        if untried := self.client.zrangebyscore(self.keys.pending, f"({now.timestamp()!r}", "+inf"):
            self.client.zadd(self.keys.pending, dict.fromkeys(untried, 0), xx=True)


def latest_shown(client: RedisClient, keys: Keys) -> datetime:
    """Return the stored latest time by which a leader has decided; long ago if none is stored."""
    return _moment(client.get(keys.clock))


def _moment(text: str | None) -> datetime:
    try:
        return datetime.fromtimestamp(float(text or "nan"), UTC)
    except (ValueError, OverflowError, OSError):  # no beat has led yet, and any program may write there
        return LONG_AGO


def _counts_from(fields: StoredFields, now: datetime) -> datetime:
    """Return from when on the next time of an entry counts; now if the entry is unusable, which a tick logs."""
    try:
        if isinstance(fields, str):
            return now
        _, meta, _, since, *_ = fields
        return Meta.decode(meta or None, since or None).counts_from or now
    except EntryError:
        return now
