"""What matters about the server that keeps the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...connections import RedisError, schedule_client

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient

__all__ = ("Server", "eviction_policy")


def eviction_policy(client: RedisClient) -> str | None:
    """Return a server's ``maxmemory-policy``, None if it does not tell."""
    try:
        return str(client.config_get("maxmemory-policy").get("maxmemory-policy") or "") or None
    except RedisError:  # not allowed to ask, or asked a server that does not know
        return None


@dataclass(frozen=True, slots=True)
class Server:
    """The schedule's server at one moment."""

    version: str  #: of Redis, or the one that Valkey says it is compatible with
    eviction: str | None  #: ``maxmemory-policy``; None: it does not tell
    kept: str | None  #: what outlives it: everything, snapshots, nothing; None: it does not tell

    @classmethod
    def of(cls, app: Celery) -> Server:
        """Ask the server.

        Raises:
            RedisError: it does not answer.
        """
        client = schedule_client(app)
        eviction = eviction_policy(client)
        try:
            appends = client.config_get("appendonly").get("appendonly") == "yes"
            kept = "everything" if appends else "snapshots" if client.config_get("save").get("save") else "nothing"
        except RedisError:  # not allowed to ask
            kept = None
        return cls(str(client.info("server").get("redis_version", "?")), eviction, kept)
