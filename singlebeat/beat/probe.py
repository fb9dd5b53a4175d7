"""Whether a server does what schedule and locks need: asked by trying, on a key of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..connections import RedisError, ResponseError, schedule_client
from ..lua import script
from .keys import Keys

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("LOCK_COMMANDS", "SCHEDULE_COMMANDS", "acl_hint", "refusal", "schedule_refusal")

_EXPIRE = ("PEXPIRE", "60000")

#: What scripts and calls of the schedule run, with arguments behind the key.
SCHEDULE_COMMANDS: Sequence[Sequence[str]] = (
    ("SET", "1", "PX", "60000"),
    *(("GET",), ("INCR",), ("PTTL",), ("EXISTS",), ("DEL",)),
    *(("HSET", "a", "1"), _EXPIRE, ("HGET", "a"), ("HMGET", "a"), ("HGETALL",), ("HLEN",), ("HSCAN", "0")),
    *(("HDEL", "a"), ("UNLINK",)),
    *(("SADD", "a"), _EXPIRE, ("SMEMBERS",), ("SREM", "a"), ("DEL",)),
    *(("ZADD", "0", "a"), _EXPIRE, ("ZCARD",), ("ZCOUNT", "0", "1"), ("ZSCORE", "a"), ("ZMSCORE", "a"), ("ZRANK", "a")),
    *(("ZRANGE", "0", "-1"), ("ZRANGEBYSCORE", "0", "1"), ("ZSCAN", "0"), ("ZREMRANGEBYSCORE", "1", "2")),
    *(("ZREM", "a"), ("DEL",)),
    *(("XADD", "*", "a", "1"), _EXPIRE, ("XREVRANGE", "+", "-", "COUNT", "1"), ("DEL",)),
)

#: The same of the locks.
LOCK_COMMANDS: Sequence[Sequence[str]] = (
    *(("HSET", "a", "1"), _EXPIRE, ("PTTL",), ("HGET", "a"), ("HMGET", "a"), ("HDEL", "a"), ("UNLINK",)),
    *(("ZADD", "0", "a"), _EXPIRE, ("ZCARD",), ("ZSCORE", "a"), ("ZMSCORE", "a"), ("ZREMRANGEBYSCORE", "1", "2")),
    *(("ZRANGE", "0", "-1"), ("ZREM", "a"), ("EXISTS",), ("DEL",)),
)


def schedule_refusal(app: Celery) -> str:
    """Return what the schedule's server refuses, and what to do; empty if it does all that beat needs."""
    return refusal(schedule_client(app), Keys.of(app).doctor, SCHEDULE_COMMANDS)


def refusal(client: Any, key: str, commands: Sequence[Sequence[str]]) -> str:
    """Return what a server refuses, and what to do; empty if it runs all these commands.

    Args:
        key: to try them on; its value is lost.
    """
    try:
        refused = json.loads(script(__package__, "probe")(client, (key,), (json.dumps(commands),)))
    except ResponseError as exc:
        return f"it refuses the script that tries what is needed: {exc}{acl_hint(exc)}"
    except RedisError:  # it does not answer, which is another finding
        return ""
    # What it does not let us delete is of another type for the commands that follow.
    errors = {command: error for command, error in refused if "WRONGTYPE" not in error}
    for error in errors.values():
        for code, advice in _ADVICE.items():
            if code in error:
                return f"it refuses to write, so that no beat can lead or send: {error}. {advice}"
    denied = [command for command, error in errors.items() if _is_denied(error)]
    if denied and any("keys" in errors[command] for command in denied):
        return f"its user may not use the key {key}: grant all keys with that prefix (README, Rights)"
    if denied:
        names = ", ".join(sorted(denied))
        return f"the ACL of its user lacks {names}: grant {'+' + ' +'.join(sorted(denied)).lower()} (README, Rights)"
    return f"it refuses {next(iter(errors))}: {next(iter(errors.values()))}" if errors else ""


#: Errors that concern every write, and what to do.
_ADVICE = {
    "READONLY": "It is a replica: name the primary, or the Sentinels that know it",
    "OOM": "Its memory is full: free some, or raise maxmemory",
    "MISCONF": "It cannot save to its disk: see its log",
    "NOREPLICAS": "It has too few replicas (min-replicas-to-write)",
}


def acl_hint(exc: Exception) -> str:
    """Return what to add to an error of a server that does not let its user run a command; empty for any other."""
    return " (ACL LOG on the server names the command; README, Rights)" if _is_denied(str(exc)) else ""


def _is_denied(error: str) -> bool:
    return any(
        text in error.lower()
        # Of a call and of a command in a script, from Redis 6.2 on.
        for text in ("noperm", "no permissions to", "can't run this command", "can't access at least one of the keys")
    )
