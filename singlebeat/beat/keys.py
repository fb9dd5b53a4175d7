"""Every key of a schedule in Redis, with its type and what it holds; the reference in the docs prints these tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import EntryError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("ENTRY_FIELDS", "ENTRY_KEYS", "LEASE_KEYS", "OWN_KEYS", "Keys", "LeaseKeys", "check_encodable")

#: The fields of the hash of an entry, with what each holds.
ENTRY_FIELDS: Mapping[str, str] = {
    "definition": "The definition of the entry, as RedBeat writes it: JSON.",
    "meta": "Its past, as RedBeat writes it: JSON.",
    "policy": "Its policy, which you may write: JSON.",
    "pending": "The occurrence that is claimed and not yet confirmed: JSON.",
    "since": "The time from which its next time counts, after its times were changed or a pause has ended; and one "
    "that a clock which was ahead has sent.",
    "sent": "The nominal time of the last run of its schedule that was sent.",
    "history": "About the last four decisions about it.",
    "runs": "About the last four ends of its runs.",
    "recorded": "Digests of definition and policy, by which a change of another program is noticed that has no record.",
    "backfill": "How far a backfill has come.",
    "written": "The ids of the last calls that stored it: by them a repetition is told from another call.",
    "asked": "The ids of the last runs that were triggered or backfilled.",
    "dropped_by": "The apps that have dropped it from ``beat_schedule``: each of them gets it back as it was.",
}

#: The keys of entries: the Redis type and what each holds, by what follows the prefix.
ENTRY_KEYS: Mapping[str, tuple[str, str]] = {
    "<name>": ("hash", "An entry, with the fields of the table below."),
    ":parked:<name>": ("hash", "An entry that has left ``beat_schedule``. It expires after seven days."),
}

#: The keys of the schedule itself: the Redis type and what each holds, by their names.
OWN_KEYS: Mapping[str, tuple[str, str]] = {
    "schedule": (
        "zset",
        "The keys of entries, or their bare names, by the time of their next run in seconds since 1970. 0: now; "
        "negative: never, with -2 for quarantined entries: without a record in ``quarantine`` beat puts 0 there.",
    ),
    "placed": (
        "set",
        "Some members of the sorted set. If most of them have lost their places, and their entries have not gone, beat "
        "gives all entries without a place one.",
    ),
    "statics": ("set", "The names of the entries that come from ``beat_schedule``."),
    "owners": (
        "hash",
        "The apps from which each of these entries comes, one a line. The entry goes when the last app drops it.",
    ),
    "pending": ("zset", "The keys of entries with a pending occurrence, by the time when beat tries it again."),
    "quarantine": ("hash", "The entries that cannot be used: why, and since when."),
    "pauses": (
        "hash",
        "The pauses of many entries: ``all``, or ``tag:`` and the tag, with JSON: ``since`` and ``until`` when, ``by`` "
        "whom, a ``note``, and ``written``, ids of the last calls that wrote it; all of them are optional. A record is "
        "kept for seven days after its end.",
    ),
    "changes": (
        "stream",
        "One record per change of a definition, a policy or a pause of many entries: entry, actor, ``by`` what means, "
        "action, JSON of the fields ``before`` and ``after``, and a note. Without actor: another program has made it.",
    ),
    "history": (
        "stream",
        "One record per decision: entry, nominal time, decision, reason, task id, holder and its entry, leader, term.",
    ),
    "runs": ("stream", "One record per end of a run that beat has sent: outcome, start, duration, worker."),
    "clock": (
        "string",
        "The latest time by which a beat has decided, in seconds since 1970. Written every 10 s.",
    ),
    "lost": (
        "string",
        "When a beat has first noticed that the server has lost the schedule, or its last changes, and by what. Gone "
        "a day after the last loss, or when a program adds an entry.",
    ),
    "zone": (
        "string",
        "Celery's ``timezone`` of the last leader, in which the times of crontabs and rules were computed.",
    ),
    "versions": (
        "string",
        "A random secret, of which the page and its API make the versions of entries. Without it, a version would tell "
        "whether a masked argument is what a reader guesses.",
    ),
    "doctor": ("any", "Data on which ``doctor``, ``health`` and ``/readyz`` try commands, for a moment."),
}

#: The keys of leadership: the Redis type and what each holds, by their names.
LEASE_KEYS: Mapping[str, tuple[str, str]] = {
    "lock": ("string", "The leader's token."),
    "leader": (
        "hash",
        "Who leads: host, pid, app, ``version``, ``broker``, since when, for which term, how far its clock is "
        "``ahead``, why its ``beat_schedule`` may be ``incomplete``, its token and its lease. ``took``: the seconds of "
        "the renewal before the last one. The hash lives as long as the lock.",
    ),
    "term": ("string", "The number of the last term."),
    "standbys": (
        "zset",
        "The beats that stand by: host, pid, since when, app, version, broker, how far a wrong clock is ``ahead``, and "
        "why their ``beat_schedule`` may be ``incomplete``. "
        "Gone 5 s after their last campaign. With ``redbeat_lock_key`` None, the beats that share the work, with "
        "their ``zone``: written every second, and not counted after 5 s.",
    ),
    "resigned": ("string", "The beat that was made to resign. For 5 s it lets standbys go first."),
}

_OWN = tuple(OWN_KEYS)
#: Prefix of the names of parked entries in their keys.
_PARKED = ":parked:"
_LEASE = tuple(name for name in LEASE_KEYS if name != "lock")
#: The name of an entry whose key is one of the schedule itself of another app, whose prefix is longer.
_OF_OTHERS = re.compile(rf"::((?:{'|'.join((*_OWN, *_LEASE, 'lock'))})\Z|parked:)")


def check_encodable(what: str, text: str) -> None:
    """Check that a client can encode a string; bytes that are not UTF-8 can be.

    Args:
        what: the string is, for the error: entry, tag, note, task.

    Raises:
        EntryError: half of a surrogate pair is in it.
    """
    try:
        text.encode(errors="surrogateescape")  # as the client does
    except UnicodeEncodeError:
        raise EntryError(f"there can be no {what} {text!r}: half of a surrogate pair cannot be encoded") from None


@dataclass(frozen=True, slots=True)
class LeaseKeys:
    """The keys of leadership; ``lock`` is None if leadership is switched off."""

    lock: str | None
    leader: str
    term: str
    standbys: str
    resigned: str


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of a schedule."""

    prefix: str
    lock: str | None

    schedule: str = field(init=False)
    placed: str = field(init=False)
    statics: str = field(init=False)
    pending: str = field(init=False)
    quarantine: str = field(init=False)
    owners: str = field(init=False)
    pauses: str = field(init=False)
    changes: str = field(init=False)
    history: str = field(init=False)
    runs: str = field(init=False)
    clock: str = field(init=False)
    lost: str = field(init=False)
    zone: str = field(init=False)
    versions: str = field(init=False)
    doctor: str = field(init=False)
    own: frozenset[str | None] = field(init=False)  #: all keys of the schedule itself: no entry can have one of them

    def __post_init__(self) -> None:
        for name in _OWN:
            object.__setattr__(self, name, f"{self.prefix}:{name}")
        # Reserve the default lock key even if this app uses another one or none: other beats may lead under it.
        own = {f"{self.prefix}:{name}" for name in (*_OWN, *_LEASE, "lock")}
        object.__setattr__(self, "own", frozenset({*own, self.lock}))

    @classmethod
    def of(cls, app: Celery) -> Keys:
        """Return the keys of an app's schedule."""
        config = Config.of(app)
        return cls(config.redbeat_key_prefix, config.lock_key)

    @property
    def lease(self) -> LeaseKeys:
        """The keys of leadership."""
        return LeaseKeys(self.lock, *(f"{self.prefix}:{name}" for name in _LEASE))

    def named(self, name: str) -> str:
        """Return the key of the entry with a name.

        Raises:
            EntryError: the key is a key of the schedule itself, or no client can encode it.
        """
        key = self.prefix + name
        if key in self.own or name.startswith(_PARKED):
            raise EntryError(f"there can be no entry {name!r}, because {key!r} is a key of the schedule itself")
        check_encodable("entry", name)
        return key

    def check_other(self, name: str) -> None:
        """Check that the key of an entry cannot be one of the schedule itself of another app.

        That app's prefix begins with this one and ends with a colon: ``redbeat:a:`` beside ``redbeat:``.

        Raises:
            EntryError: it can; the name is that of an entry only if a definition is stored there.
        """
        if _OF_OTHERS.search(name):
            why = f"{self.prefix + name!r} is a key of the schedule of another app: choose another name"
            raise EntryError(f"there can be no entry {name!r}, for {why}")

    def is_possible(self, name: str) -> bool:
        """Return whether an entry can have a name."""
        try:
            self.named(name)
        except EntryError:
            return False
        return True

    def parked(self, name: str) -> str:
        """Return the key of the copy that is kept of an entry which has left ``beat_schedule``."""
        return self.prefix + _PARKED + name

    def entry(self, member: str) -> str:
        """Return the key of an entry from its member in the schedule, which may be its bare name."""
        return member if member.startswith(self.prefix) else self.prefix + member

    def bare(self, name: str) -> str:
        """Return the other member that an entry may have in the schedule: its bare name, or else its key.

        A bare name that begins with the prefix is the key of another entry.
        """
        return self.prefix + name if name.startswith(self.prefix) else name

    def name(self, member: str) -> str:
        """Return the name of an entry from its member in the schedule."""
        return member.removeprefix(self.prefix)
