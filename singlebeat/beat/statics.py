"""The entries of ``beat_schedule`` in Redis: installed and removed by the leader, in batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from ..errors import EntryError
from .entry import Entry, Meta
from .keys import Keys
from .store import BATCH

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Statics",)

logger = get_logger("celery.beat")


class Statics:
    """The entries that an app's configuration gives.

    Args:
        client: the client for the schedule.
    """

    def __init__(self, app: Celery, client: Any) -> None:
        self.app, self.client, self.keys = app, client, Keys.of(app)
        self.owner = str(app.main or "celery")

    def keep(self, names: Collection[str]) -> None:
        """Remember which entries come from ``beat_schedule``, and remove those that have left it.

        Those of another app under the same prefix stay; those that RedBeat has installed belong to whoever comes.
        """
        keys = self.keys
        owners: Mapping[str, str] = self.client.hgetall(keys.owners)
        known: Collection[str] = self.client.smembers(keys.statics)
        with self.client.pipeline() as pipe:
            for name in set(known) - set(names):
                if owners.get(name, self.owner) == self.owner:
                    logger.info("beat: Removing old static schedule entry '%s'.", name)
                    pipe.zrem(keys.schedule, keys.prefix + name)
                    pipe.delete(keys.prefix + name)
                    pipe.zrem(keys.pending, keys.prefix + name)
                    pipe.hdel(keys.quarantine, keys.prefix + name)
                    pipe.srem(keys.statics, name)
                    pipe.hdel(keys.owners, name)
            if names:
                pipe.sadd(keys.statics, *names)
                pipe.hset(keys.owners, mapping=dict.fromkeys(names, self.owner))
            pipe.execute()

    def install(self, entries: Mapping[str, Entry], now: datetime) -> list[str]:
        """Store entries, and return the names of those that could be stored.

        One that is there keeps its past, and stays disabled if somebody has disabled it; one that is unchanged keeps
        its next time.
        """
        names, installed = list(entries), list[str]()
        for at in range(0, len(names), BATCH):
            installed += self._install_batch({name: entries[name] for name in names[at : at + BATCH]}, now)
        return installed

    def _install_batch(self, entries: Mapping[str, Entry], now: datetime) -> list[str]:
        keys, installed = self.keys, list[str]()
        with self.client.pipeline(transaction=False) as pipe:
            for name in entries:
                pipe.hmget(keys.prefix + name, "definition", "meta")
                pipe.zscore(keys.schedule, keys.prefix + name)
            replies = pipe.execute(raise_on_error=False)
        with self.client.pipeline() as pipe:
            for (name, entry), found, score in zip(entries.items(), replies[::2], replies[1::2], strict=True):
                key = keys.prefix + name
                if isinstance(found, Exception):
                    logger.error("beat: Cannot add entry %r to the schedule: %s holds something else", name, key)
                    continue
                old, meta = found
                try:
                    stored = Entry.decode(key, old, self.app) if old else None
                    past = Meta.decode(meta) if meta else Meta(now)
                except EntryError:
                    stored, past, meta = None, Meta(now), None
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
                installed.append(name)
            pipe.execute()
        return installed
