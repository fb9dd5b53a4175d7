"""The state of a schedule as a whole: who leads and stands by, what is overdue, pending and set aside."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..connections import schedule_client
from ..lua import script
from .keys import Keys
from .lease import STAY

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("State", "resign")

#: An entry whose time has passed by more than this is overdue: the leader looks every second.
OVERDUE_AFTER = 5.0

#: Overdue entries that are read to leave out those that RedBeat has disabled.
LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class State:
    """A schedule at one moment; durations are seconds."""

    leader: Mapping[str, str]  #: host, pid, since, term, app, statics; empty: nobody leads
    standbys: Sequence[Mapping[str, str]]  #: host, pid, since, app, statics of each beat of ours that stands by
    locked: bool  #: some beat leads, perhaps one of RedBeat, which leaves no name
    lease_left: float
    entries: int
    due: int  #: entries whose time has come
    overdue: int  #: of these, those that wait for longer than a beat that works lets them
    lag: float  #: how late the most overdue one is
    pending: int  #: occurrences that are claimed and not confirmed
    quarantine: Mapping[str, Mapping[str, str]]  #: entry -> reason, since; empty where only their number was wanted
    quarantined: int = 0

    @classmethod
    def of(cls, app: Celery, *, names: bool = True, client: Any = None) -> State:
        """Read the state of an app's schedule, in one round trip.

        Args:
            names: read why each entry is in quarantine, of which there may be thousands.
            client: for the schedule's server; by default the app's.

        Raises:
            RedisError: the schedule's server does not answer.
        """
        keys, now = Keys.of(app), time.time()
        with (client or schedule_client(app)).pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.lease.leader)
            # Without clocks: whoever stands by trims it, and it ends when nobody does.
            pipe.zrange(keys.lease.standbys, 0, -1)
            pipe.pttl(keys.lock or keys.lease.leader)
            pipe.zcard(keys.schedule)
            pipe.zcount(keys.schedule, 0, now)
            # A score of 0 means "now, whenever that is", and says nothing about how late it is.
            pipe.zcount(keys.schedule, "(0", now - OVERDUE_AFTER)
            pipe.zrangebyscore(keys.schedule, "(0", now, start=0, num=1, withscores=True)
            pipe.zcard(keys.pending)
            pipe.hlen(keys.quarantine)
            if names:
                pipe.hgetall(keys.quarantine)
            leader, standbys, ttl, entries, due, overdue, first, pending, quarantined, *rest = pipe.execute()
        if overdue and ttl > 0 and not leader:
            idle, first = _disabled(client or schedule_client(app), keys, now, overdue)
            due, overdue = due - idle, overdue - idle
        return cls(
            leader=leader,
            standbys=sorted((_named(text) for text in standbys), key=lambda standby: standby["since"]),
            locked=ttl > 0,
            lease_left=max(0, ttl) / 1000,
            entries=entries,
            due=due,
            overdue=overdue,
            lag=now - first[0][1] if first else 0.0,
            pending=pending,
            quarantine={
                member.removeprefix(keys.prefix): _record(text) for member, text in (rest[0] if names else {}).items()
            },
            quarantined=quarantined,
        )


def _disabled(client: Any, keys: Keys, now: float, overdue: int) -> tuple[int, Sequence[tuple[str, float]]]:
    """Return how many of the overdue entries are disabled, of ``LOOKED_AT`` at most, and the first that is not.

    Where RedBeat leads, the places of disabled entries stay behind; where a beat of ours does, they go on.
    """
    found = client.zrangebyscore(keys.schedule, "(0", now - OVERDUE_AFTER, start=0, num=LOOKED_AT, withscores=True)
    rows = json.loads(script(__package__, "read")(client, [keys.entry(member) for member, _ in found], ()))
    left = [place for place, fields in zip(found, rows, strict=True) if not _is_disabled(fields)]
    return len(found) - len(left), left[:1]


def _is_disabled(fields: Any) -> bool:
    try:
        return bool(json.loads(fields[0])["enabled"] is False)
    except (ValueError, TypeError, KeyError):
        return False


def resign(app: Celery) -> bool:
    """End the present term of leadership, so that a beat which stands by leads next; tell whether there was one.

    The beat whose term it was leads again at once where none stands by, and after ``STAY`` seconds if none leads then.
    What the leader has claimed is fenced by its term: nothing is decided twice.
    """
    keys = Keys.of(app)
    client = schedule_client(app)
    token = client.get(keys.lock) if keys.lock else None
    touched = (keys.lock or "", keys.lease.leader, keys.lease.standbys, keys.lease.resigned)
    return bool(token and script(__package__, "resign")(client, touched, (token, "", round(STAY * 1000))))


def _named(text: str) -> Mapping[str, str]:
    try:
        raw: Any = json.loads(text)
        return {name: str(raw[name]) for name in ("host", "pid", "since")} | {
            name: str(raw[name]) for name in ("app", "statics") if name in raw
        }
    except (ValueError, TypeError, KeyError):
        return {"host": text, "pid": "", "since": ""}


def _record(text: str) -> Mapping[str, str]:
    try:
        raw: Any = json.loads(text)
        return {"reason": str(raw["reason"]), "since": str(raw["since"])}
    except (ValueError, TypeError, KeyError):
        return {"reason": text, "since": ""}
