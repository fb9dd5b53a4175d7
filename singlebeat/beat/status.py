"""The state of a schedule as a whole: the leader, the standbys, and overdue, pending and quarantined entries."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..advice import command_line, redis_command
from ..broker import is_one_broker, own_broker
from ..config import Config
from ..connections import ResponseError, schedule_client
from ..errors import EntryError
from ..lua import EVAL_READING
from ..server_errors import says_disk_full
from .calendar.zone import app_zone
from .entries.definition import LONGEST_STEP_BACK
from .entries.entry import Entry, Meta
from .entries.fields import BATCH, read_fields
from .entries.occurrence import Occurrence
from .entries.pauses import READ_PAUSES, Pauses
from .entries.statics import owner_of
from .keys import Keys
from .leadership.lease import STAY, ask_leader, leader_of, why_leaderless
from .server_time import DIFFERS_FROM, UNFIT_FROM, ServerTime

if TYPE_CHECKING:
    from celery import Celery

    from ..clients import RedisClient
    from .entries.fields import StoredFields
    from .entries.pauses import Pause
    from .entries.policy import EntryPolicy

__all__ = (
    "APART",
    "MAX_LAG",
    "NAMESAKE",
    "NO_BEAT",
    "OVERDUE_AFTER",
    "QUARANTINED_LATER",
    "QUEUES_APART",
    "REDBEAT_LEADS",
    "SEE_LOG",
    "WHY_UNSENT",
    "ScheduleStatus",
    "pending_occurrences",
    "quarantine_record",
    "to_delete",
)

#: How to divide the queues of two apps, and all that they share.
QUEUES_APART = "give each app queues of its own (task_default_queue)"
APART = (
    "give each app a prefix of its own (redbeat_key_prefix; and singleton_key_prefix, if they share the server of the "
    f"locks). If they share the broker, also {QUEUES_APART}: a worker drops the messages of tasks that it does not "
    "know. Let no entry run twice, and lose no pause and no entry of programs: export the entries of the app that "
    "moves, end its beats, delete its entries under the old prefix (celery singlebeat delete NAME), import those under "
    "the new one (import --from-now FILE), and then start its beats with it (docs, Several apps)"
)

#: What it means that two apps have entries of one name.
NAMESAKE = (
    "the beat_schedule of this app has an entry of that name, too, which does not run, because only the one of the "
    "other app is stored: rename one of them"
)

#: What a beat that stands by, or shares the work, may note of itself.
NOTED = ("app", "statics", "incomplete", "version", "broker", "ahead", "zone")

#: Seconds after its time from which an entry is overdue: the leader polls every second.
OVERDUE_AFTER = 5.0

#: Seconds by which an entry may be overdue before its schedule is not healthy.
MAX_LAG = 60.0

#: The fraction of its lease that a leader has left while it lives, which renews it after each third.
RENEWED = 0.6

#: Most entries that are read: to leave out those that RedBeat does not send yet, although their places have passed, and
#: to see whether an entry waits for a clock that was set back.
MOST_READ = 1000

#: The fate of an unusable entry that no beat has checked yet, in words.
QUARANTINED_LATER = "beat quarantines it when its time comes, unless it is corrected before"

#: The effects of a leader that is a beat of RedBeat, in words.
REDBEAT_LEADS = (
    "a beat of RedBeat leads. It knows no policy: it sends paused entries, and ignores overlap, misfire_grace_time, "
    "jitter, timezone, start_time, end_time and max_runs. It acquires no locks for plain tasks and records no history. "
    "Triggered and backfilled runs wait until a beat of singlebeat leads"
)

#: The effects of having no beat, and beats that no tool sees, in words.
NO_BEAT = (
    "singlebeat sends nothing until one is started (celery beat -S singlebeat.Scheduler). A beat that runs may be "
    "refused by the server: its log names the right that its user lacks. A celery beat without "
    "-S singlebeat.Scheduler is not seen here, nor is one with another redbeat_key_prefix or redbeat_redis_url than "
    "this process: stop it before you start one, or both send"
)

#: Why claimed occurrences stay pending while a beat leads, in words.
WHY_UNSENT = (
    "if they stay, the broker or the locks' server does not answer, or refuses a command (see doctor), or a database "
    "that tasks ask is away"
)

#: Where to look while a beat leads and does not send, in words: the server may refuse another user than the operator's.
SEE_LOG = (
    "If that lasts, see the log of beat: it names what a server refuses to its user, and entries whose own code is "
    "slow or fails (event=expensive, refused)"
)


def to_delete(app: str, names: Sequence[str]) -> str:
    """Return when and how to delete entries of an app of which no beat is known under this prefix.

    Args:
        app: their owner, which may have a prefix of its own by now.
    """
    runs, each = ("it runs", "it") if len(names) == 1 else ("they run", "each")
    delete = command_line("delete", names[0])
    return f"If app {app} has a prefix of its own now, {runs} twice: delete {each} here: {delete}"


def counted(number: int, one: str, many: str) -> str:
    """Return a number and the words for one or for many."""
    return f"{number} {one if number == 1 else many}"


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """A schedule at one moment by the server's clock; durations are seconds."""

    #: host, pid, since, term, app, statics, version, broker, by how much its clock is ahead of the server's, how long
    #: its last renewal ``took``; empty if no beat of ours leads; only its token if the record is spoilt
    leader: Mapping[str, str]
    #: the same, without a term, of each beat of ours that stands by or, where leadership is switched off, works; with
    #: its zone if it works
    standbys: Sequence[Mapping[str, str]]
    locked: bool  #: a beat leads, perhaps a beat of RedBeat, which leaves no name
    lease_left: float
    entries: int
    due: int  #: entries whose time has come
    overdue: int  #: due entries that wait longer than a working beat lets them
    lag: float  #: how late the most overdue entry, or the oldest pending occurrence, is
    pending: int  #: occurrences that are claimed and not confirmed
    quarantine: Mapping[str, Mapping[str, str]]  #: entry -> reason, since; empty if only their number was asked for
    quarantined: int = 0
    entry_lag: float = 0.0  #: how late the most overdue entry is
    pending_lag: float = 0.0  #: how late the oldest pending occurrence is; 0 while a beat of RedBeat leads
    is_shared: bool = False  #: leadership is switched off: all beats share the work
    silent: float | None = None  #: since a beat has last given a sign of life; None if no beat ever has
    now: float = 0.0  #: seconds since 1970
    host_ahead: float = 0.0  #: by which the clock of this host is ahead of the server's
    #: by which the server's clock is behind the latest time by which a beat has decided; 0 if no entry waits for that
    set_back: float = 0.0
    other_app: str = ""  #: app whose beat sends our entries; empty if there is none, or if we share on purpose
    app: str = ""  #: the name of this process's app
    broker: str = ""  #: the name of this process's broker
    zone: str = ""  #: in which beats read the wall clocks of entries without a ``timezone``; empty if unknown
    own_zone: str = ""  #: in which this process reads them
    pauses: Sequence[Pause] = ()  #: of many entries, those that last
    unreadable_pauses: Mapping[str, str] = field(default_factory=dict)  #: selector -> why; they pause nothing
    why_leaderless: str = ""  #: why no beat can lead, and what to do, if another program has spoilt a key of leadership
    lost: str = ""  #: what the server has lost, as a beat has noticed, and what to do; empty if no loss is known

    @property
    def works(self) -> bool:
        """Whether a beat leads or, where leadership is switched off, some beat works."""
        if self.is_shared:
            return bool(self.standbys or self.leader)
        return self.locked or bool(self.leader or self.sharing)

    @property
    def sharing(self) -> Sequence[Mapping[str, str]]:
        """The beats whose ``redbeat_lock_key`` is None: they share the work. Only these note their zone."""
        return [beat for beat in self.standbys if "zone" in beat]

    @property
    def standing_by(self) -> Sequence[Mapping[str, str]]:
        """The beats that lead next if the leader dies."""
        return [beat for beat in self.standbys if "zone" not in beat]

    @property
    def term(self) -> float:
        """The number of the present term; 0 if unknown."""
        return _number(self.leader.get("term"))

    @property
    def unlike(self) -> str:
        """That beats differ from one another, or from this process, in whether they have a lock, and what to do.

        Empty if they do not.
        """
        if not (self.leader if self.is_shared else self.sharing):
            return ""
        named = "; ".join(f"{beat.get('host', '?')}, pid {beat.get('pid', '?')}, {role}" for beat, role in self.beats)
        here = "is None" if self.is_shared else "is set"
        return (
            f"settings with and without a lock: {named}; redbeat_lock_key {here} in this process. Set redbeat_lock_key "
            "alike for all beats and tools: a beat that shares the work sends beside a leader, unfenced"
        )

    def pause_over(self, policy: EntryPolicy) -> Pause | None:
        """Return the first pause of many entries that covers an entry with a policy, None if there is none."""
        return next(iter(self.pauses_over(policy)), None)

    def pauses_over(self, policy: EntryPolicy) -> Sequence[Pause]:
        """Return the pauses of many entries that cover an entry with a policy."""
        return [pause for pause in self.pauses if pause.covers(policy)]

    @property
    def beats(self) -> Sequence[tuple[Mapping[str, str], str]]:
        """The records of all beats of ours, the leader first, and what each of them does."""
        leader = [(self.leader, "leads")] if self.leader else []
        shares = "shares the work"
        others = ((beat, shares if self.is_shared or "zone" in beat else "stands by") for beat in self.standbys)
        return [*leader, *others]

    @property
    def is_unused(self) -> bool:
        """Whether there is no entry, and no sign that any beat was ever there."""
        return not (self.works or self.entries or self.standbys or self.silent is not None)

    @property
    def redbeat_leads(self) -> bool:
        """Whether the lock has no name: a beat of RedBeat holds it."""
        return self.locked and not self.leader and not self.is_shared

    @property
    def overdue_entries(self) -> str:
        """How many entries are overdue, and by how much, in words."""
        return f"{counted(self.overdue, 'entry is', 'entries are')} overdue, the first by {self.entry_lag:.0f} s"

    @property
    def redbeat_silent(self) -> str:
        """Why a beat of RedBeat that holds the lock seems to be dead, and what to do; empty if it does not."""
        if not (self.redbeat_leads and self.overdue):
            return ""
        return (
            f"a beat of RedBeat holds the lock, which has no name, and {self.overdue_entries}: that beat was probably "
            "killed, or hangs. (If it lives, it has not noticed a new or changed entry yet: it polls every 300 s, or "
            f"as beat_max_loop_interval says.) Its lock ends by itself in {self.lease_left:.0f} s. If no process of "
            "RedBeat runs any more, end it now: celery singlebeat resign"
        )

    @property
    def leader_silent(self) -> str:
        """That the leader seems to be dead while entries are overdue, and what follows; empty if it does not."""
        lease = _number(self.leader.get("lease_ms")) / 1000
        if not self.overdue or self.lease_left >= lease * RENEWED:
            return ""
        next_ = "a standby takes over then" if self.standing_by else "no beat stands by: start one"
        return (
            f"the leader, {self.leader.get('host', '?')}, pid {self.leader.get('pid', '?')}, has not renewed the lock "
            f"for {lease - self.lease_left:.0f} s, and {self.overdue_entries}: it was killed, hangs, or does not reach "
            f"the schedule's server. Unless it renews the lock, that ends in {self.lease_left:.0f} s; {next_}"
        )

    @property
    def sent_elsewhere(self) -> str:
        """That a beat of another app sends entries to its own queues, and what to do; empty if no such beat does."""
        if not self.other_app:
            return ""
        return (
            f"a beat of app {self.other_app} {'shares the work' if self.is_shared else 'leads'}, and sends entries to "
            f"the queues of its own app, whose workers may drop them: {APART}. Or set singlebeat_other_app_check to "
            "ignore if they share the schedule on purpose"
        )

    @property
    def renewal_share(self) -> float:
        """The fraction of its lease that the leader's last renewal took; 0 if unknown."""
        lease_ms = _number(self.leader.get("lease_ms"))
        return _number(self.leader.get("took")) * 1000 / lease_ms if lease_ms > 0 else 0.0

    @property
    def renewal(self) -> str:
        """How long the leader's last renewal took, in words; empty if unknown."""
        if not self.renewal_share:
            return ""
        took, lease = _number(self.leader.get("took")), _number(self.leader.get("lease_ms")) / 1000
        return f"{took * 1000:.1f} ms, {self.renewal_share:.2%} of the lease of {lease:g} s"

    @property
    def renewed(self) -> str:
        """When the leader has last renewed its lease, in words; empty if unknown: it may have been killed since."""
        lease = _number(self.leader.get("lease_ms")) / 1000
        return f"renewed {max(0.0, lease - self.lease_left):.0f} s ago" if lease and self.lease_left else ""

    @property
    def behind(self) -> str:
        """How many entries and pending occurrences are late, and by how much, in words; empty if none is."""
        late = self.overdue or (self.due if self.entry_lag else 0)
        entries = replace(self, overdue=late).overdue_entries if late else ""
        return "; ".join(filter(None, (entries, self._unsent if self.pending_lag else "")))

    @property
    def _unsent(self) -> str:
        pending = counted(self.pending, "occurrence is", "occurrences are")
        return f"{pending} claimed and not confirmed, the first is late by {self.pending_lag:.0f} s: {WHY_UNSENT}"

    @property
    def unsent(self) -> str:
        """How many occurrences are pending, in words; empty if none is late by more than ``MAX_LAG``."""
        return self._unsent if self.pending_lag > MAX_LAG else ""

    def has_beat_of(self, owner: str) -> bool:
        """Return whether a beat of an app leads, stands by or works.

        Args:
            owner: the name under which the app owns entries.
        """
        return any(beat.get("app") == owner for beat, _ in self.beats)

    def is_led_by(self, owner: str) -> bool:
        """Return whether no beat of another app leads, which would send all entries to its own queues.

        Args:
            owner: the name under which an app owns entries.
        """
        return self.leader.get("app", "") in {"", owner}

    @property
    def waits(self) -> str:
        """Until when entries wait because the server's clock was set back, in words; empty if none waits for that."""
        if not self.set_back:
            return ""
        until = datetime.fromtimestamp(self.now + self.set_back, UTC)
        return (
            f"entries wait until {until:%Y-%m-%d %H:%M:%SZ}, for {self.set_back:.0f} s: the clock of the schedule's "
            "server was set back, or a server whose clock is behind has taken over, and times that beat has decided "
            "before are not decided twice"
        )

    def problem(self, max_lag: float = MAX_LAG) -> str:
        """Return why no beat looks after the schedule, or which wrong clock decides about it; empty if all is well.

        Args:
            max_lag: seconds by which entries may be overdue while a beat of RedBeat holds the lock.
        """
        if self.works and self.lag > max_lag and self.redbeat_silent:
            return self.redbeat_silent
        if self.works:
            wrong = next((text for text, ahead in self.wrong_clocks() if abs(ahead) > UNFIT_FROM), "")
            return wrong or (self.waits if self.set_back > UNFIT_FROM else "")
        if not self.is_shared:
            return self.why_leaderless or "no beat leads"
        since = "ever" if self.silent is None else f"for {self.silent:.0f} s"
        return f"no beat works: there was no sign of one {since}, and none leads (redbeat_lock_key is None)"

    def wrong_clocks(self, *, standbys: bool = False) -> Iterator[tuple[str, float]]:
        """Yield a sentence about each host whose clock differs from the server's, and the seconds that it is ahead.

        Args:
            standbys: include the hosts of the standbys.
        """
        here = {"host": socket.gethostname(), "ahead": str(self.host_ahead)}
        beats = [(beat, f"which {role}") for beat, role in self.beats if standbys or beat is self.leader]
        named = set[str]()
        for beat, role in (*beats, (here, "this host")):
            host, ahead = beat.get("host", "?"), _number(beat.get("ahead"))
            if abs(ahead) > DIFFERS_FROM and host not in named:
                named.add(host)
                yield f"the clock of {host}, {role}, is {ahead:+.1f} s off that of the schedule's server", ahead

    @property
    def other_zone(self) -> str:
        """That beats read wall clocks in another zone than this process, and what to do; empty if they do not."""
        if self.zone in {"", self.own_zone} or self.redbeat_leads:
            return ""
        return (
            f"beat reads wall clocks in {self.zone}, which counts, and this process in {self.own_zone}: set Celery's "
            "timezone alike for all beats and tools, or give entries a timezone of their own. Else a beat with the "
            "settings of this process would run them at other times"
        )

    @property
    def sends_elsewhere(self) -> bool:
        """Whether runs go to another broker than this process's, or to one that is named otherwise there."""
        return any(self.other_brokers())

    def other_brokers(self, *, standbys: bool = False) -> Iterator[str]:
        """Yield a sentence about each beat of our app that sends to another broker than this process.

        Args:
            standbys: include the standbys.
        """
        for beat, role in self.beats:
            sends = standbys or self.is_shared or beat is self.leader
            broker = beat.get("broker") or self.broker
            if sends and beat.get("app") == self.app and not is_one_broker(broker, self.broker):
                host, pid = beat.get("host", "?"), beat.get("pid", "?")
                yield (
                    f"the beat {host}, pid {pid}, which {role}, sends to the broker {broker}, "
                    f"and the broker of this process is {self.broker}. If these are two fleets, such as staging and "
                    "production, they share the prefix, and the workers of one get no messages: give each fleet a "
                    "prefix of its own (redbeat_key_prefix; and singleton_key_prefix, if they share the server of the "
                    "locks). If it is one broker, name it alike everywhere"
                )

    @property
    def incomplete(self) -> Iterator[str]:
        """Yield a sentence about each beat of our app that may lack entries of its code."""
        for beat, role in self.beats:
            if beat.get("app") == self.app and (why := beat.get("incomplete")):
                host, pid = beat.get("host", "?"), beat.get("pid", "?")
                yield (
                    f"the beat {host}, pid {pid}, which {role}, may lack entries of beat_schedule: {why}. It removes "
                    "none for that. Mend it, and restart that beat"
                )

    @classmethod
    def of(cls, app: Celery, *, names: bool = True, client: RedisClient = None) -> ScheduleStatus:
        """Read the state of an app's schedule, in two round trips: the first one asks for the server's time.

        If no beat leads, it takes one more.

        Args:
            names: read the names and reasons of quarantined entries, of which there may be thousands.
            client: for the schedule's server; by default the app's.

        Raises:
            RedisError: the schedule's server does not answer.
        """
        keys, server_time, client = Keys.of(app), ServerTime(quiet=True), client or schedule_client(app)
        server_time.ask(client, keys.schedule)
        now = server_time.timestamp()
        try:
            asked = _ask(client, keys, now, names=names)
        except ResponseError as exc:
            if not says_disk_full(exc):
                raise
            asked = _ask(client, keys, now, names=names, command=EVAL_READING)
        record, token, signs, ttl, entries, due, overdue, first, pending, quarantined, *rest = asked
        clock, lost, zone, many, *rest = rest
        leader = leader_of(record, token)
        leader = {name: "**" if name == "token" else value for name, value in leader.items()}  # who has it could lead
        pauses = Pauses.of(many)
        seen = {text: until / 1000 - STAY for text, until in signs}
        beats = [_decode_standby(text) for text, at in seen.items() if abs(now - at) < STAY]
        working = [leader, *(beat for beat in beats if keys.lock is None or "zone" in beat)]
        others = Config.of(app).singlebeat_other_app_check
        apps = {beat.get("app", "") for beat in working} - {"", owner_of(app)} if others != "ignore" else set()
        set_back = _number(clock) - now
        if not DIFFERS_FROM < set_back <= LONGEST_STEP_BACK.total_seconds():
            set_back = 0.0  # by more, no entry waits: the leader lets entries count from now
        if set_back and not _has_waiting(app, client, keys, now, now + set_back):
            set_back = 0.0  # nothing was decided while the clock was ahead
        records = {
            member.removeprefix(keys.prefix): quarantine_record(text)
            for member, text in (rest[0] if names else {}).items()
        }
        # Signs end, and a beat that leads gives none: the time by which a beat has last decided counts, too.
        # A time ahead is of a wrong clock: a working beat would have noted another one since.
        noted_at = max((at for at in (*seen.values(), _number(clock)) if at < now + STAY), default=0.0)
        if overdue and ttl > 0 and not leader:
            idle, first = _count_idle(app, client, keys, now)
            due, overdue = due - idle, overdue - idle
        entry_lag, pending_lag = now - first[0][1] if first else 0.0, 0.0
        if pending and (leader or ttl <= 0):  # RedBeat sends none of them
            pending_lag = max((now - due for due in _pending_dues(app, client, keys)), default=0.0)
        return cls(
            leader=leader,
            standbys=sorted(beats, key=lambda standby: standby["since"]),
            locked=ttl > 0,
            lease_left=max(0, ttl) / 1000,
            entries=entries,
            due=due,
            overdue=overdue,
            lag=max(0.0, entry_lag, pending_lag),
            entry_lag=entry_lag,
            pending_lag=max(0.0, pending_lag),
            pending=pending,
            quarantine=records,
            quarantined=len(records) if names else quarantined,
            is_shared=keys.lock is None,
            silent=max(0.0, now - noted_at) if noted_at else None,
            now=now,
            host_ahead=server_time.host_ahead,
            set_back=set_back,
            other_app=", ".join(sorted(apps)),
            app=owner_of(app),
            broker=own_broker(app),
            zone=zone or "",
            own_zone=str(app_zone(app)),
            pauses=pauses.lasting(datetime.fromtimestamp(now, UTC)),
            unreadable_pauses=pauses.problems,
            why_leaderless=why_leaderless(client, keys.lease) if keys.lock is not None and ttl <= 0 else "",
            lost=_in_words(lost, keys.lost) if lost else "",
        )


def _ask(client: RedisClient, keys: Keys, now: float, *, names: bool, command: str = "EVAL") -> Sequence[Any]:
    """Read all that the status of a schedule is made from, in one round trip.

    Args:
        names: read the records of quarantined entries.
        command: that runs a script which only reads.
    """
    with client.pipeline(transaction=False) as pipe:
        ask_leader(pipe, keys.lease)
        pipe.zrange(keys.lease.standbys, 0, -1, withscores=True)
        pipe.pttl(keys.lock or keys.lease.leader)
        pipe.zcard(keys.schedule)
        pipe.zcount(keys.schedule, 0, now)
        # A score of 0 means "at once", and says nothing about how late the entry is.
        pipe.zcount(keys.schedule, "(0", now - OVERDUE_AFTER)
        pipe.zrangebyscore(keys.schedule, "(0", now, start=0, num=1, withscores=True)
        pipe.zcard(keys.pending)
        pipe.hlen(keys.quarantine)
        pipe.get(keys.clock)
        pipe.get(keys.lost)
        pipe.get(keys.zone)
        pipe.execute_command(command, READ_PAUSES.text, 1, keys.pauses)
        if names:
            pipe.hgetall(keys.quarantine)
        replies: Sequence[Any] = pipe.execute()
    return replies


def _in_words(lost: str, key: str) -> str:
    """Return what the server has lost, and what to do.

    Args:
        lost: when a beat has noticed that, and by what.
        key: that holds it.
    """
    at, _, why = lost.partition(" ")
    return (
        f"the server has lost the schedule, or its last changes, as a beat noticed at {at}: {why}. Entries of "
        "beat_schedule are back, perhaps without their pauses. First pause again what was paused (celery singlebeat "
        "pause, with --all or --tag for many), then import the other entries from an export (celery singlebeat import "
        "--from-now FILE; without --from-now they run for times since the export, even if they have run then). An old "
        "snapshot also brings back entries that were deleted since, and pauses that have ended since: compare celery "
        "singlebeat list, delete those entries and resume these. "
        f"If nothing differs, {redis_command('DEL', key)} removes this note"
    )


def _has_waiting(app: Celery, client: RedisClient, keys: Keys, now: float, shown: float) -> bool:
    """Return whether an entry waits until the server's clock shows a time again by which beat has decided.

    Such an entry counts from a time that is yet to come. While the clock was ahead, beat moved it on beyond ``shown``.
    The first entries after that are read, ``MOST_READ`` at most.
    """
    members = client.zrangebyscore(keys.schedule, shown, "+inf", start=0, num=MOST_READ)
    found = [keys.entry(member) for member in members]
    rows = zip(found, read_fields(client, found), strict=True) if found else ()
    return any(_waits(app, key, fields, now + DIFFERS_FROM) for key, fields in rows)


def _waits(app: Celery, key: str, fields: StoredFields, now: float) -> bool:
    try:
        definition, meta, policy, since, *_ = fields
        counts_from = Meta.decode(meta, since).counts_from
        if counts_from is None or counts_from.timestamp() <= now:
            return False
        entry = Entry.from_fields(key, definition, meta, policy, since, app=app)
    except Exception:  # a user's own schedule may do anything
        return False
    return entry.enabled and not entry.policy.paused


def pending_occurrences(
    client: RedisClient, keys: Keys, *, most: int = MOST_READ
) -> Iterator[tuple[str, Occurrence, StoredFields]]:
    """Yield the key of each entry with a pending occurrence, that, and its fields.

    Args:
        most: entries that are read; 0: all.
    """
    found = [keys.entry(member) for member in client.zrange(keys.pending, 0, most - 1)]
    for at in range(0, len(found), BATCH):
        batch = found[at : at + BATCH]
        for key, fields in zip(batch, read_fields(client, batch), strict=True):
            with suppress(EntryError):  # beat quarantines its entry
                if not isinstance(fields, str) and fields[4]:
                    yield key, Occurrence.decode(fields[4]), fields


def _pending_dues(app: Celery, client: RedisClient, keys: Keys) -> Iterator[float]:
    """Yield when each pending occurrence of a schedule was due, in seconds since 1970."""
    for key, occurrence, (definition, meta, policy, since, *_) in pending_occurrences(client, keys):
        if not occurrence.is_scheduled:
            continue
        nominal = datetime.fromtimestamp(occurrence.nominal, UTC)
        try:  # jitter
            due = Entry.from_fields(key, definition, meta, policy, since, app=app).timetable.due(nominal)
        except Exception:  # a user's own schedule may do anything
            due = nominal
        yield due.timestamp()


def _count_idle(app: Celery, client: RedisClient, keys: Keys, now: float) -> tuple[int, Sequence[tuple[str, float]]]:
    """Return how many overdue entries RedBeat need not have sent, and the first entry that it should have sent.

    Where RedBeat leads, disabled entries keep places in the past. After a start of RedBeat, places are too early by the
    age of the last run (sibson/redbeat#210), so the time itself is computed. ``MOST_READ`` entries are read at most.
    """
    found = client.zrangebyscore(keys.schedule, "(0", now - OVERDUE_AFTER, start=0, num=MOST_READ, withscores=True)
    rows = read_fields(client, [keys.entry(member) for member, _ in found])
    times = [
        (member, _due_by_redbeat(app, keys.entry(member), place, fields))
        for (member, place), fields in zip(found, rows, strict=True)
    ]
    late = [(member, due) for member, due in times if due is not None and due <= now - OVERDUE_AFTER]
    return len(found) - len(late), [min(late, key=lambda each: each[1])] if late else []


def _due_by_redbeat(app: Celery, key: str, place: float, fields: StoredFields) -> float | None:
    """Return since when RedBeat should have sent an entry, in seconds since 1970; None if RedBeat never sends it.

    An unusable entry is due at its place: RedBeat removes it, or ends because of it.
    """
    try:
        definition, meta, *_ = fields
        entry = Entry.from_fields(key, definition, meta, None, app=app)  # RedBeat knows no policy
        if not entry.enabled:
            return None
        last = entry.meta.last_run_at
        nominal = place if last is None else entry.timetable.next(last)
    except Exception:  # a user's own schedule may do anything
        return place
    return nominal if nominal is None or isinstance(nominal, float) else max(place, nominal.timestamp())


def _decode_standby(text: str) -> Mapping[str, str]:
    try:
        raw: Any = json.loads(text)
        return {name: str(raw[name]) for name in ("host", "pid", "since")} | {
            name: str(raw[name]) for name in NOTED if name in raw
        }
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"host": text, "pid": "", "since": ""}


def _number(text: str | None) -> float:
    """Return a number that a beat has noted, 0 if there is none: another program may write there."""
    try:
        number = float(text or 0)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def quarantine_record(text: str) -> Mapping[str, str]:
    """Return reason and time of the record of a quarantined entry; any other string is the reason."""
    try:
        raw: Any = json.loads(text)
        return {"reason": str(raw["reason"]), "since": str(raw["since"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"reason": text, "since": ""}
