"""Checks whether a server allows the commands that schedule and locks need, by trying them on a separate key."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...broker import bounded
from ...config import Config
from ...connections import (
    RedisError,
    ResponseError,
    is_one_server,
    masked,
    schedule_client,
    schedule_place,
    what_it_does,
)
from ...errors import LockBackendError, SinglebeatError
from ...locks import backend_of
from ...locks.redis import WORKERS_KEY, RedisBackend
from ...lua import answered_scripts, script
from ...server_errors import advice_of_writes, denied_command, is_denied, is_full, is_key_denied, with_advice
from ..keys import Keys
from .spoilt import spoilt_keys, why_spoilt

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient

__all__ = (
    "CONFIRM",
    "HISTORY",
    "LOCKS",
    "SCHEDULE",
    "STANDBY",
    "TICKS",
    "Needs",
    "broker_refusal",
    "freezes_locks",
    "lock_place",
    "lock_refusal",
    "lock_server_says",
    "lock_trouble",
    "may_be_done",
    "refuses_writes",
    "schedule_error",
    "schedule_refusal",
    "schedule_server_says",
    "ticks_refusal",
)

_EXPIRE = ("PEXPIRE", "60000")


def _try_transaction(client: RedisClient, key: str) -> None:
    with client.pipeline() as pipe:  # in a cluster a pipeline is no transaction, and needs no right for one
        pipe.exists(key)
        pipe.execute()


#: Calls of locks and schedule besides the commands on keys, by the commands that they need.
_CALLS: Mapping[str, Callable[[RedisClient, str], object]] = {
    "ping": lambda client, _: client.ping(),  # redis-py's, after half a minute without a call
    "time": lambda client, _: client.time(),
    "scan": lambda client, key: client.scan(0, match=key, count=1),
    "evalsha": lambda client, key: client.evalsha("0" * 40, 1, key),
    "eval": lambda client, key: client.eval("return 0", 1, key),
}


@dataclass(frozen=True, slots=True)
class Needs:
    """The commands that a server must allow."""

    commands: Sequence[Sequence[str]]  #: of scripts and calls on a key, with their arguments after the key
    calls: Mapping[str, Callable[[RedisClient, str], object]]  #: the other ones
    purpose: str  #: the consequence if the server refuses writes, in words
    if_full: str = ""  #: the consequence if its memory is full, if that is another one


#: The commands that scripts and calls of the schedule run.
SCHEDULE = Needs(
    (
        ("SET", "1", "PX", "60000"),
        *(("GET",), ("INCR",), ("PTTL",), ("EXISTS",), ("DEL",)),
        *(("HSET", "a", "1"), _EXPIRE, ("HGET", "a"), ("HMGET", "a"), ("HGETALL",), ("HLEN",), ("HSCAN", "0")),
        *(("HDEL", "a"), ("UNLINK",)),
        *(("SADD", "a"), _EXPIRE, ("SMEMBERS",), ("SMISMEMBER", "a"), ("SREM", "a"), ("DEL",)),
        *(("ZADD", "0", "a"), _EXPIRE, ("ZCARD",), ("ZCOUNT", "0", "1"), ("ZSCORE", "a"), ("ZMSCORE", "a")),
        *(("ZRANK", "a"), ("ZRANGE", "0", "-1"), ("ZRANGEBYSCORE", "0", "1"), ("ZSCAN", "0")),
        *(("ZREMRANGEBYSCORE", "1", "2"), ("ZREM", "a"), ("DEL",)),
        *(("XADD", "*", "a", "1"), _EXPIRE, ("XREVRANGE", "+", "-", "COUNT", "1"), ("DEL",)),
    ),
    {**_CALLS, "info": lambda client, _: client.info("server"), "multi": _try_transaction, "exec": _try_transaction},
    "nothing is sent",
)

#: The commands of ``SCHEDULE`` without the calls that only tools make.
TICKS = Needs(SCHEDULE.commands, {name: _CALLS[name] for name in ("time", "eval", "evalsha")}, SCHEDULE.purpose)

#: The commands that end an occurrence's being pending: without one of them it would be sent again and again.
CONFIRM = Needs(
    (
        *(("HSET", "a", "1"), _EXPIRE, ("HMGET", "a"), ("EXISTS",), ("HDEL", "a"), ("DEL",)),
        *(("ZADD", "0", "a"), _EXPIRE, ("ZREM", "a"), ("DEL",)),
    ),
    TICKS.calls,
    SCHEDULE.purpose,
)

#: The commands with which a standby notes itself.
STANDBY = Needs(
    (("ZADD", "0", "a"), _EXPIRE, ("ZREMRANGEBYSCORE", "1", "2"), ("DEL",)), TICKS.calls, "no standby is noted"
)

#: The commands that write the history of all entries; beat sends without them.
HISTORY = Needs((("XADD", "*", "a", "1"), _EXPIRE, ("DEL",)), TICKS.calls, SCHEDULE.purpose)

#: The commands that scripts and calls of the locks run.
LOCKS = Needs(
    (
        *(("HSET", "a", "1"), _EXPIRE, ("PTTL",), ("HGET", "a"), ("HMGET", "a"), ("HDEL", "a"), ("UNLINK",)),
        *(("ZADD", "0", "a"), _EXPIRE, ("ZCARD",), ("ZSCORE", "a"), ("ZMSCORE", "a")),
        *(("ZREMRANGEBYSCORE", "1", "2"), ("ZRANGE", "0", "-1"), ("ZRANGEBYSCORE", "0", "1"), ("ZREM", "a")),
        *(("EXISTS",), ("DEL",)),
    ),
    _CALLS,
    "no lock is taken",
    # Scripts that first delete, as those of calls do, may write then; the one that starts a run may not.
    "runs start without their locks, or wait (singleton_on_backend_error)",
)

#: The commands with which kombu sends and receives on a Redis broker.
_BROKER = (
    *(("LPUSH", "_kombu", "a"), ("BRPOP", "_kombu", "1"), ("LLEN", "_kombu"), ("PUBLISH", "_kombu", "a")),
    *(("SADD", "_kombu", "a"), ("SMEMBERS", "_kombu"), ("HSET", "_kombu", "a", "1"), ("HDEL", "_kombu", "a")),
    *(("ZADD", "_kombu", "0", "a"), ("ZREM", "_kombu", "a"), ("PSUBSCRIBE", "_kombu")),
)


def schedule_refusal(
    app: Celery, error: Exception | None = None, *, needs: Needs = SCHEDULE, client: RedisClient = None
) -> str:
    """Return what the schedule's server refuses, and what to do; empty if it refuses nothing that is needed.

    Args:
        error: of a call that the server has refused.
        client: for the schedule's server; by default the app's.
    """
    return _refusal(client or schedule_client(app), Keys.of(app).doctor, needs, error)


def ticks_refusal(app: Celery, *, client: RedisClient = None) -> str:
    """Return what keeps beats from their work, with the server's name; empty if nothing does.

    These are commands that the schedule's server refuses, and keys that beat cannot use.
    """
    refused = schedule_refusal(app, needs=TICKS, client=client)
    if not refused:
        refused = "; ".join(map(str, spoilt_keys(client or schedule_client(app), Keys.of(app))))
    return f"the schedule's server {schedule_place(app)}: {refused}" if refused else ""


def lock_refusal(app: Celery, error: Exception | None = None) -> str:
    """Return what the locks' server refuses, and what to do; empty if nothing, or if the locks are not in Redis."""
    with suppress(SinglebeatError):
        backend = backend_of(app)
        if isinstance(backend, RedisBackend):
            refused = _refusal(backend.redis, f"{Config.of(app).singleton_key_prefix}{{doctor}}", LOCKS, error)
            return refused or _denied_workers(backend)
    return ""


def _denied_workers(backend: RedisBackend) -> str:
    try:
        backend.workers_seen()
    except LockBackendError as exc:
        return _KEY_DENIED.format(WORKERS_KEY) if is_key_denied(exc) else ""
    return ""


def lock_trouble(app: Celery) -> str:
    """Return that the locks' server does not answer, or refuses to write, with its name; empty if neither.

    Also empty if it is the schedule's server, of which the same is said.
    """
    try:
        place = lock_place(app)
        if is_one_server(place, schedule_place(app)):
            return ""
        backend_of(app).workers_seen()
    except LockBackendError as exc:
        return with_advice(exc)
    except SinglebeatError:  # the settings name no server
        return ""
    refused = lock_refusal(app)
    return f"the locks' server {place}: {refused}" if refuses_writes(refused) else ""


def broker_refusal(app: Celery) -> str:
    """Return which commands a broker that is Redis refuses to its user; empty if none, or for another broker.

    The commands are queued in a transaction that never ends: the server checks the rights, and runs nothing.

    Raises:
        Exception: the broker does not answer.
    """
    denied = set[str]()
    with bounded(app.connection_for_write(), Config.of(app).singlebeat_socket_timeout) as broker:
        if broker.transport.driver_name != "redis":
            return ""
        with broker.channel() as channel, channel.client.pipeline() as pipe:
            try:
                pipe.immediate_execute_command("MULTI")
                # Not as calls: redis-py takes the reply QUEUED for that of the command.
                pipe.connection.send_packed_command(pipe.connection.pack_commands(_BROKER))
                for _ in _BROKER:
                    try:
                        pipe.connection.read_response()
                    except ResponseError as exc:
                        denied.add(denied_command(str(exc)))
            except ResponseError as exc:  # of MULTI
                denied.add(denied_command(str(exc)))
            finally:
                pipe.connection.disconnect()
    denied.discard("")  # another error
    return _lacks(denied) if denied else ""


def _lacks(denied: Collection[str]) -> str:
    names = sorted(denied)
    return f"the ACL of its user lacks {', '.join(names).upper()}: grant +{' +'.join(names)} (docs, Rights)"


def lock_place(app: Celery) -> str:
    """Return where the locks are, for operators: a URL without its password, or the class of another backend."""
    backend = backend_of(app)
    return masked(backend.url) if isinstance(backend, RedisBackend) else type(backend).__name__


#: The command that shows what a call has changed whose reply is lost, by the script that it has called.
_SHOWN_BY = {"save": "changes", "delete": "changes", "pause": "changes", "propose": "history", "resign": "status"}


def schedule_server_says(app: Celery, exc: RedisError) -> str:
    """Return an error of the schedule's server, and what to do: name all missing rights, or all spoilt keys.

    If the reply to a change is lost, or that to a later call, it says so: a repetition could do the change twice.
    """
    refused = schedule_refusal(app, exc) if is_denied(exc) else ""
    said = refused or why_spoilt(schedule_client(app), Keys.of(app), exc) or with_advice(exc)
    called = {getattr(exc, "script", ""), *answered_scripts()} if what_it_does(exc) == "does not answer" else set()
    return f"{said}{may_be_done(called)}"


def may_be_done(called: Collection[str]) -> str:
    """Return what to add to an error after which a change may have been done; empty if no script has changed anything.

    Args:
        called: names of the scripts that were called.
    """
    shown_by = next((shows for name, shows in _SHOWN_BY.items() if name in called), "")
    done = ". It may have been done all the same: before you repeat it, see celery singlebeat "
    return f"{done}{shown_by}" if shown_by else ""


def schedule_error(app: Celery, exc: RedisError) -> str:
    """Return an error of the schedule's server for a log, with the server's name; does not ask the server."""
    return f"the schedule's server {schedule_place(app)} {what_it_does(exc)}: {with_advice(exc)}"


def lock_server_says(app: Celery, exc: LockBackendError) -> str:
    """Return an error of the locks' server, with its name, and what to do or which rights its user lacks."""
    refused = lock_refusal(app, exc) if is_denied(exc) else ""
    return f"the locks' server {lock_place(app)}: {refused}" if refused else with_advice(exc)


def _refusal(client: RedisClient, key: str, needs: Needs, error: Exception | None) -> str:
    """Return what a server refuses, and what to do; empty if it refuses nothing that is needed.

    Args:
        key: to try the commands on; its value is lost.
        error: of a call that the server has refused.
    """
    denied = {command for command in (denied_command(str(error)),) if command}
    try:
        denied |= set(_denied_calls(client, key, needs))
        errors = {} if denied & {"eval", "evalsha"} else _refused_commands(client, key, needs)
    except ResponseError as exc:  # the server refuses every command, even the login
        if is_key_denied(exc):
            return _KEY_DENIED.format(key)
        command = denied_command(str(exc))
        if not command:
            return f"it refuses the script that tries the needed commands: {with_advice(exc)}"
        denied, errors = denied | {command}, {}
    except RedisError:  # the server does not answer, which is another finding
        return ""
    for text in errors.values():
        if hint := advice_of_writes(text):
            purpose = (needs.if_full if is_full(text) else "") or needs.purpose
            return f"{_NO_WRITES}, so that {purpose}: {text.rstrip('.')}{hint}"
    if any(map(is_key_denied, errors.values())):
        return _KEY_DENIED.format(key)
    denied |= {command.lower() for command, text in errors.items() if is_denied(text)}
    if denied:
        return _lacks(denied)
    return f"it refuses {next(iter(errors))}: {next(iter(errors.values()))}" if errors else ""


def _denied_calls(client: RedisClient, key: str, needs: Needs) -> Iterator[str]:
    """Yield the commands of calls that a server does not let its user run.

    Raises:
        RedisError: it does not answer.
    """
    for call in dict.fromkeys(needs.calls.values()):
        try:
            call(client, key)
        except ResponseError as exc:  # other errors are expected, as of an unknown script
            if command := denied_command(str(exc)):
                yield command


def _refused_commands(client: RedisClient, key: str, needs: Needs) -> Mapping[str, str]:
    """Return the commands on keys that a server refuses, and its errors."""
    refused = json.loads(script(__package__, "probe")(client, (key,), (json.dumps(needs.commands),)))
    # If the server refuses to delete the key, the key is of another type for the commands that follow.
    return {command: error for command, error in refused if "WRONGTYPE" not in error}


_NO_WRITES = "it refuses to write"
_KEY_DENIED = "its user may not use the key {}: grant all keys with that prefix (docs, Rights)"


def refuses_writes(refused: str) -> bool:
    """Return whether a server refuses all writes, by what the functions above have returned."""
    return _NO_WRITES in refused


def freezes_locks(refused: str) -> bool:
    """Return whether no worker can renew or free a lock, by what the locks' server refuses."""
    return refuses_writes(refused) and not is_full(refused)
