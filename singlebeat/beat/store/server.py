"""The version and the settings of the schedule's server that matter to its safety."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...connections import RedisError, schedule_client

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient

__all__ = ("Server", "eviction_policy")


def eviction_policy(client: RedisClient) -> str | None:
    """Return a server's ``maxmemory-policy``, None if the server does not return it."""
    try:
        return str(client.info("memory").get("maxmemory_policy") or "") or None
    except RedisError:  # the user may not ask
        return None


@dataclass(frozen=True, slots=True)
class Server:
    """The schedule's server at one moment."""

    version: str  #: of Redis, or of the Redis with which Valkey claims to be compatible
    eviction: str | None  #: ``maxmemory-policy``; None if unknown
    kept: str | None  #: the data that survive a restart: everything, snapshots, nothing; None if unknown

    @classmethod
    def of(cls, app: Celery) -> Server:
        """Ask the server.

        Raises:
            RedisError: the server does not answer.
        """
        client = schedule_client(app)
        version = str(client.info("server").get("redis_version", "?"))  # first, for it raises
        eviction = eviction_policy(client)
        if client.info("persistence").get("aof_enabled"):
            return cls(version, eviction, "everything")
        try:
            kept = "snapshots" if client.config_get("save").get("save") else "nothing"
        except RedisError:  # the user may not ask
            kept = None
        return cls(version, eviction, kept)
