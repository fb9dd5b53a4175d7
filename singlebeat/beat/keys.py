"""Every key of a schedule in Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import Config

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Keys", "LeaseKeys")


@dataclass(frozen=True, slots=True)
class LeaseKeys:
    """The keys of leadership; ``lock`` None switches it off."""

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

    def __post_init__(self) -> None:
        for name in ("schedule", "statics", "owners", "pending", "quarantine", "history", "runs", "clock"):
            object.__setattr__(self, name, f"{self.prefix}:{name}")

    @classmethod
    def of(cls, app: Celery) -> Keys:
        """Return the keys of an app's schedule."""
        config = Config.of(app)
        return cls(config.redbeat_key_prefix, config.lock_key)

    @property
    def lease(self) -> LeaseKeys:
        """The keys of leadership."""
        return LeaseKeys(self.lock, *(f"{self.prefix}:{name}" for name in ("leader", "term", "standbys", "resigned")))

    def entry(self, member: str) -> str:
        """Return the key of an entry from its member in the schedule, which may be its bare name."""
        return member if member.startswith(self.prefix) else self.prefix + member

    def name(self, member: str) -> str:
        """Return the name of an entry from its member in the schedule."""
        return member.removeprefix(self.prefix)
