"""Every key of a schedule in Redis."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import EntryError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Keys", "LeaseKeys")

_OWN = ("schedule", "statics", "owners", "pending", "quarantine", "history", "runs", "clock", "alive", "zone", "doctor")
#: Prefix of the names of parked entries in their keys.
_PARKED = ":parked:"
_LEASE = ("leader", "term", "standbys", "resigned")
#: The name of an entry whose key is one of the schedule itself of another app, whose prefix is longer.
_OF_OTHERS = re.compile(rf"::((?:{'|'.join((*_OWN, *_LEASE, 'lock'))})\Z|parked:)")


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
    statics: str = field(init=False)
    pending: str = field(init=False)
    quarantine: str = field(init=False)
    owners: str = field(init=False)
    history: str = field(init=False)
    runs: str = field(init=False)
    clock: str = field(init=False)
    alive: str = field(init=False)
    zone: str = field(init=False)
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
        try:
            key.encode(errors="surrogateescape")  # as the client does: a name may be bytes that are not UTF-8
        except UnicodeEncodeError:
            raise EntryError(f"there can be no entry {name!r}: half of a surrogate pair cannot be encoded") from None
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

    def name(self, member: str) -> str:
        """Return the name of an entry from its member in the schedule."""
        return member.removeprefix(self.prefix)
