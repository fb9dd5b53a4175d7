"""The entries of ``beat_schedule`` in Redis: installed and removed by the leader, in batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..log import Log
from .keys import Keys
from .save import save_entries

if TYPE_CHECKING:
    from celery import Celery

    from .entry import Entry

__all__ = ("Statics",)

log = Log("celery.beat")


class Statics:
    """The entries that an app's configuration gives.

    Args:
        client: the client for the schedule.
    """

    def __init__(self, app: Celery, client: Any) -> None:
        self.app, self.client, self.keys = app, client, Keys.of(app)
        self.owner = str(app.main or "celery")

    def keep(self, configured: Collection[str], stored: Collection[str]) -> None:
        """Remember which entries were stored from ``beat_schedule``, and remove those that have left it.

        One that is in there and could not be stored this time stays as it is.
        Those of another app under the same prefix stay; those that RedBeat has installed belong to whoever comes.
        """
        keys = self.keys
        owners: Mapping[str, str] = self.client.hgetall(keys.owners)
        known: Collection[str] = self.client.smembers(keys.statics)
        with self.client.pipeline() as pipe:
            for name in set(known) - set(configured):
                if owners.get(name, self.owner) == self.owner:
                    log.info("beat: Removing old static schedule entry '%(entry)s'.", event="entry_removed", entry=name)
                    pipe.zrem(keys.schedule, keys.prefix + name)
                    if keys.prefix + name not in keys.own:  # anybody may have added it
                        pipe.delete(keys.prefix + name)
                    pipe.zrem(keys.pending, keys.prefix + name)
                    pipe.hdel(keys.quarantine, keys.prefix + name)
                    pipe.srem(keys.statics, name)
                    pipe.hdel(keys.owners, name)
            if stored:
                pipe.sadd(keys.statics, *stored)
                pipe.hset(keys.owners, mapping=dict.fromkeys(stored, self.owner))
            pipe.execute()

    def install(self, entries: Mapping[str, Entry], now: datetime) -> list[str]:
        """Store entries, and return the names of those that could be stored.

        One that is there keeps its past, and stays disabled if somebody has disabled it; one that is unchanged keeps
        its next time.
        """
        results = save_entries(self.client, self.keys, entries, now, keep_disabled=True)
        for name, problem in results.items():
            if problem is not None:
                log.error(
                    "beat: Cannot add entry '%(entry)s' to the schedule", event="not_added", entry=name, reason=problem
                )
        return [name for name, problem in results.items() if problem is None]
