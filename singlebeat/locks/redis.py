"""Locks in Redis: one hash per unique call; every verb is one script and one round trip."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, cast

from redis.exceptions import NoPermissionError

from ..clients import is_cluster
from ..config import Config
from ..connections import RedisError, lock_server, masked, private, same_slot, shared, what_it_does
from ..errors import LockBackendError, UnusableLockError
from ..lua import Script, packed
from ..native_threads import is_native
from ..outbox import SENT_FOR, SENT_KEY, Marker, database, senders
from ..server_errors import with_advice
from .base import UNTIL_UNLOCKED, BaseBackend, Call, Holder, Ref, Renewal, Sending, Verdict, from_ms, unusable
from .key import behind_key, done_key, turn_key

if TYPE_CHECKING:
    from celery import Celery

    from ..clients import RedisClient

__all__ = ("SCRIPTS", "RedisBackend", "escaped", "holder_of")

#: Number of keys in one step of SCAN, and of locks that are read in one round trip.
SCAN_COUNT = 500

#: Seconds for which a suspicion is kept that the message of a lock is lost.
SUSPECTED_FOR = 600.0

#: Seconds for which a worker is named at most while others announce themselves.
NAMED_FOR = 24 * 3600.0

#: Age in seconds that is added to that of a worker which shuts down, or has ended: longer than a lease, at most a day.
RETIRED = 12 * 3600

#: Fields of a lock's record that are shown to people. Every record, and no other hash, has all of the first three.
SHOWN = (
    *("id", "gen", "state", "nonce", "fence", "task", "args", "since", "until", "entry"),
    *("worker", "renewed", "sent"),
)

#: Those that are numbers, and what a number looks like.
NUMBER_FIELDS = frozenset({"gen", "fence", "since", "until", "renewed"})
NUMBER = re.compile(r"(?=.{1,16}$)[0-9]+(\.[0-9]*)?")

# Read before there are threads and forks: reading a file of a package acquires a lock of the import system. A child
# that is forked meanwhile would wait for that lock for ever.
_NUMBERS, _SHORTEN = Script(__package__, "numbers"), Script(__package__, "shorten")
_WRONG_FIELD, _NO_LOCK = Script(__package__, "wrong_field", uses=[_NUMBERS]), Script(__package__, "no_lock")
SCRIPTS = {
    **{
        name: Script(__package__, name, uses=[_NUMBERS, _SHORTEN, _WRONG_FIELD, _NO_LOCK])
        for name in ("acquire", "begin")
    },
    **{name: Script(__package__, name, uses=[_NUMBERS]) for name in ("finish", "renew", "rotate")},
}
SCRIPTS |= {name: Script(__package__, name) for name in ("promise", "unlock")}
SCRIPTS["send"] = Script(__package__, "send", uses=[SCRIPTS["acquire"]])


def _lock_and_done(lock: str) -> tuple[str, ...]:
    return lock, done_key(lock)


def _keys_to_finish(lock: str) -> tuple[str, ...]:
    return lock, done_key(lock), turn_key(lock)


def _all_keys(lock: str) -> tuple[str, ...]:
    return lock, done_key(lock), behind_key(lock), turn_key(lock)


def _ms(seconds: float | None) -> int:
    # Capped, because a call with a time that the server cannot represent would fail all calls of the same request.
    return round(min(UNTIL_UNLOCKED, seconds or 0) * 1000)


class _ElsewhereError(Exception):
    """The broker is not on the server of the locks."""


class RedisBackend(BaseBackend):
    """A lock backend in a Redis or Valkey server.

    Args:
        url: URL in any form that Celery or redis-py accepts.
        timeout: seconds that one call may take.
        own_connections: whether to share no connections with the rest of the process; for a separate thread.
        kwargs: further arguments of the Redis client (``singleton_backend_kwargs``).
    """

    setting = ""  #: name of the setting that holds the URL, for errors

    def __init__(self, url: str, *, timeout: float = 5.0, own_connections: bool = False, **kwargs: Any) -> None:
        self.url, self.timeout, self.kwargs = url, timeout, kwargs
        self._connect = private if own_connections else shared
        self._client: tuple[tuple[int, bool], RedisClient] = ((0, False), None)  #: pid and kind of thread, client
        #: Seconds that the server's clock is ahead of our monotonic clock: a guess, until a reply has its time.
        self._ahead = time.time() - time.monotonic()

    @classmethod
    def of_app(cls, app: Celery, *, own_connections: bool = False) -> Self:
        """Return the backend of an app, on the server that its settings name.

        Raises:
            ConfigError: no setting names a Redis server; the message says which one to set.
        """
        config = Config.of(app)
        given = {"timeout": config.singlebeat_socket_timeout, "own_connections": own_connections}
        server = lock_server(app)
        backend = cls(server.url, **{**given, **server.options, **config.singleton_backend_kwargs})
        backend.setting = server.setting
        if own_connections:
            _ = backend.redis  # wrong options are an error at the start
        return backend

    @property
    def redis(self) -> RedisClient:
        """Return the client for this process and kind of thread: forked children and native threads need their own."""
        user = os.getpid(), is_native()
        known, client = self._client
        if known != user:
            client = self._connect(self.url, timeout=self.timeout, options=self.kwargs, setting=self.setting)
            self._client = user, client
        return client

    def acquire_many(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Acquire the locks of calls that are about to be sent.

        A server that runs the script only after the timeout leaves the locks alone: the caller has given up by then.
        """
        return self._acquire(calls, may_be_resent=may_be_resent)

    def are_free(self, calls: Sequence[Call]) -> bool:
        """Return whether no other call holds any of the locks, or waits for one: far cheaper than ``ask``."""
        keys = [key for call in calls for key in (call.ref.key, behind_key(call.ref.key), turn_key(call.ref.key))]
        with self._reaching():
            return not keys or not self.redis.exists(*keys)

    def _acquire(self, calls: Sequence[Call], only: str = "", *, may_be_resent: bool) -> list[Holder]:
        refs = [call.ref for call in calls]
        rows = [_row(call, only) for call in calls]
        return self._run_before_deadline(
            lambda deadline: self._run_many("acquire", refs, int(may_be_resent), deadline, rows=rows, keys_of=_all_keys)
        )

    @property
    def sends(self) -> bool:
        """Whether the locks are on one server, which may be the broker's."""
        return not is_cluster(self.url, self.kwargs)

    def ask(self, calls: Sequence[Call], *, may_be_resent: bool = False) -> list[Holder]:
        """Return what ``acquire_many`` would answer to calls, without taking places; calls that join have joined."""
        return self._acquire(calls, "nothing", may_be_resent=may_be_resent)

    @staticmethod
    def keys_of(call: Call) -> Sequence[str]:
        """Return the keys of a call as ``acquire.lua`` takes them, for a script that uses it."""
        return _all_keys(call.ref.key)

    @staticmethod
    def requests(calls: Iterable[tuple[Call, str, str]]) -> str:
        """Return calls, each with its ``only`` and its note, as ``acquire.lua`` takes them."""
        return packed(_row(*call) for call in calls)

    def send(self, sendings: Sequence[Sending], broker: Marker) -> list[Holder] | None:
        """Acquire the locks of calls, and send the message of each call whose lock is granted, in one step.

        A server that runs the script only after the timeout does nothing, as in ``acquire_many``.

        Returns:
            The holders; None if the broker is another server, so that nothing was done.
        """
        db = database(self.redis)
        keys = [broker.key, ""]
        values: list[str | int] = []
        for each in sendings:
            keys += (*self.keys_of(each.call), *(command.key for command in each.commands))
            values += (self.requests([(each.call, each.only, "")]), each.only, len(each.commands))
            values += (part for command in each.commands for part in (command.name, command.argument))
        where = broker.value, "" if broker.db == db else broker.db, db
        with senders.one() as sender:
            keys[1] = f"{SENT_KEY}{sender}"

            def run(deadline: int) -> list[Any]:
                args = (*where, senders.request(), _ms(SENT_FOR), 0, deadline, *values)
                reply = self._run("send", keys, args)
                if reply == "elsewhere":
                    raise _ElsewhereError
                found: list[Any] = json.loads(reply)
                return found

            try:
                return self._run_before_deadline(run)
            except _ElsewhereError:
                return None
            except LockBackendError as exc:
                if isinstance(exc.__cause__, NoPermissionError):  # the server has checked the keys first
                    return None
                raise

    def _run_before_deadline(self, run: Callable[[int], Sequence[Any]]) -> list[Holder]:
        """Run a script that writes nothing after a deadline, and return its replies.

        Args:
            run: function of the deadline: the server's time (ms) after which no caller waits for the reply.
        """
        for _ in range(2):  # the first reply corrects a wrong guess of the server's time
            holders = [holder_of(reply) for reply in run(_ms(time.monotonic() + self._ahead + self.timeout))]
            late = [holder.since.timestamp() for holder in holders if holder.verdict is Verdict.LATE and holder.since]
            if not late:
                return holders
            self._ahead = max(late) - time.monotonic()
        raise LockBackendError(f"the locks' server {masked(self.url)} takes longer than {self.timeout:g} s to answer")

    def begin(
        self,
        ref: Ref,
        *,
        queued: str = "",
        turn_ttl: float = 0.0,
        waits_since: float = 0.0,
        lease: float,
        remember_for: float,
        task: str,
        arguments: str,
        expiry: float | None = None,
        entry: str = "",
        note: str = "",
        overtakes: bool = False,
        yields: bool = False,
    ) -> Holder:
        """Start a run, or return the verdict that forbids the start.

        A server that runs the script only after the timeout leaves the lock alone, as in ``acquire_many``.
        """
        owner = (ref.task_id, str(ref.generation), ref.nonce)
        times = _ms(remember_for), _ms(turn_ttl)
        flags = int(overtakes), int(yields)
        args = (*owner, _ms(lease), _ms(expiry), task, arguments, *times, entry, _ms(waits_since), note, *flags)
        keys = (ref.key, done_key(ref.key), queued or ref.key, behind_key(ref.key), turn_key(ref.key))
        (holder,) = self._run_before_deadline(lambda deadline: [self._run("begin", keys, (*args, deadline))])
        if holder.verdict is Verdict.UNUSABLE:
            raise UnusableLockError(unusable(ref.key, holder.reason))
        return holder

    def rotate(self, ref: Ref, *, to: Ref, ttl: float, remember_for: float) -> bool:
        """Hand a run's lock over to a waiting message of the same task id."""
        args = (ref.task_id, ref.nonce, str(to.generation), _ms(ttl), _ms(remember_for))
        return holder_of(self._run("rotate", (ref.key, done_key(ref.key)), args)).verdict is Verdict.ROTATED

    def renew_many(self, refs: Sequence[Ref], *, lease: float) -> list[Renewal]:
        """Renew the locks of live requests."""
        return self._renew_many(refs, [""] * len(refs), lease=lease, worker=self.worker)

    def note_sent(self, sent: Mapping[Ref, str], *, lease: float) -> None:
        """Renew the locks of sent messages, and store the note on where each message went."""
        self._renew_many(list(sent), list(sent.values()), lease=lease, worker="")

    def _renew_many(self, refs: Sequence[Ref], notes: Sequence[str], *, lease: float, worker: str) -> list[Renewal]:
        rows = [(*request, note) for request, note in zip(_requests(refs), notes, strict=True)]
        replies = self._run_many("renew", refs, _ms(lease), rows=rows, last=(worker,), goes_on=True)
        return [Renewal(reply) for reply in replies]

    def promise(self, run: Ref, *, to: Ref | None, ttl: float, note: str = "") -> bool:
        """Promise a run's lock to its own retry, for when the run ends."""
        args = (run.task_id, run.nonce, str(to.generation) if to else "", _ms(ttl), note)
        return bool(self._run("promise", (run.key,), args))

    def finish_many(
        self, refs: Sequence[Ref], *, remember_for: float, ran: bool = False, took: bool = False, unsent: bool = False
    ) -> Sequence[Ref]:
        """Free the locks of requests that are over, and return those that have lost them before."""
        args = _ms(remember_for), 2 if took else int(ran), int(unsent)
        replies = self._run_many("finish", refs, *args, rows=_requests(refs), keys_of=_keys_to_finish, goes_on=True)
        return tuple(ref for ref, reply in zip(refs, replies, strict=True) if reply == "lost")

    def announce(self, worker: str, *, ttl: float) -> None:
        """Record that a worker is alive that releases the locks of its tasks; drop names that are old."""
        with self._reaching(WORKERS_KEY):
            seconds, _ = self.redis.time()
            with self.redis.pipeline(transaction=False) as pipe:
                pipe.zadd(WORKERS_KEY, {worker: seconds})
                pipe.zremrangebyscore(WORKERS_KEY, "-inf", seconds - min(ttl, NAMED_FOR))
                pipe.pexpire(WORKERS_KEY, _ms(ttl))
                pipe.zrangebyscore(WORKERS_KEY, seconds + 1, "+inf")
                *_, ahead = pipe.execute()
            if ahead:  # the server's clock was set back since then: those that live announce themselves again
                self.redis.zadd(WORKERS_KEY, dict.fromkeys(ahead, seconds), xx=True)

    def workers_seen(self) -> bool:
        """Return whether such a worker was seen recently."""
        with self._reaching(WORKERS_KEY):
            return bool(self.redis.exists(WORKERS_KEY))

    def retire(self, worker: str) -> None:
        """Record that a worker lives and takes no further messages; it still counts as seen."""
        with self._reaching(WORKERS_KEY):
            seconds, _ = self.redis.time()
            self.redis.zadd(WORKERS_KEY, {worker: seconds - RETIRED}, xx=True)

    def workers(self) -> Mapping[str, float]:
        """Return the workers that were announced recently, and the seconds since then."""
        with self._reaching(WORKERS_KEY):
            now, _ = self.redis.time()
            seen: list[tuple[str, float]] = self.redis.zrange(WORKERS_KEY, 0, -1, withscores=True)
            return {worker: max(0.0, now - at) for worker, at in seen}

    def suspect(self, place: str, lock: str) -> None:
        """Record at the key ``place`` that the message of a lock may be lost; the lock has refused a call."""
        with self._reaching(), self.redis.pipeline(transaction=False) as pipe:
            pipe.zadd(place, {lock: time.time()}, nx=True)
            pipe.pexpire(place, _ms(SUSPECTED_FOR))
            pipe.execute()

    def suspects(self, place: str, count: int) -> Sequence[str]:
        """Return and remove up to ``count`` of the locks that ``suspect`` recorded, the oldest first."""
        with self._reaching():
            noted: list[str] = self.redis.zrange(place, 0, count - 1)
            if noted:
                self.redis.zrem(place, *noted)
            return noted

    def get(self, lock: str) -> str | None:
        """Return the task id that holds a lock, or None."""
        with self._reaching():
            return cast("str | None", self.redis.hget(lock, "id"))

    def unlock(self, lock: str, holder: str = "") -> None:
        """Free a lock, of any holder or of one task id alone."""
        if holder:
            self._run("unlock", [lock], [holder])
            return
        with self._reaching():
            self.redis.delete(lock)

    def clear(self, key_prefix: str) -> None:
        """Free every lock under a prefix, regardless of its holder; which runs have ended stays known."""
        with self._reaching():
            for page in _pages(key for key, _ in self.locks(key_prefix)):
                pipe = self.redis.pipeline(transaction=False)
                for key in page:
                    pipe.unlink(key)
                pipe.execute()

    def locks(self, key_prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield every lock under a prefix and its record."""
        with self._reaching():
            for page in _pages(self._keys(key_prefix, "HASH")):
                yield from self._read(page)

    def read(self, keys: Sequence[str]) -> list[tuple[str, Mapping[str, str]]]:
        """Return the held locks among ``keys`` with their records."""
        with self._reaching():
            return list(self._read(keys))

    def holds(self, key: str) -> bool:
        """Return whether the locks' database has a key, of a lock or of anything else."""
        with self._reaching():
            return bool(self.redis.exists(key))

    def _read(self, keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the key and record of each lock among ``keys``; skip other hashes."""
        if not keys:
            return
        seconds, microseconds = self.redis.time()
        now = f"{seconds}{microseconds // 1000:03}"
        pipe = self.redis.pipeline(transaction=False)
        for key in keys:
            pipe.hmget(key, (*SHOWN, "payload"))
            pipe.pttl(key)
        replies = pipe.execute()
        for key, (*values, payload), ttl_ms in zip(keys, replies[::2], replies[1::2], strict=True):
            if all(values[:3]):
                shown = ((name, value) for name, value in zip(SHOWN, values, strict=True) if value is not None)
                # Any program may write a lock, as in numbers.lua.
                record = dict(shown)
                wrong = sorted(name for name in NUMBER_FIELDS & record.keys() if not NUMBER.fullmatch(record[name]))
                spoilt = {"spoilt": ", ".join(wrong)} if wrong else {}
                for name in wrong:
                    del record[name]
                joined = {"joined": "1"} if payload else {}  # the arguments themselves may be secret
                yield key, {**record, **spoilt, **joined, "ttl": str(max(0, ttl_ms) / 1000), "now": now}

    def _keys(self, key_prefix: str, kind: str) -> Iterator[str]:
        return cast(
            "Iterator[str]", self.redis.scan_iter(match=f"{escaped(key_prefix)}*", count=SCAN_COUNT, _type=kind)
        )

    def _run(self, name: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        with self._reaching():
            return SCRIPTS[name](self.redis, keys, args)

    def _run_many(
        self,
        name: str,
        refs: Sequence[Ref],
        *args: int,
        rows: Sequence[Sequence[str | int]],
        last: tuple[str, ...] = (),
        keys_of: Callable[[str], tuple[str, ...]] = _lock_and_done,
        goes_on: bool = False,
    ) -> list[Any]:
        """Run a script once for many locks, in a cluster once for each slot, with one row of values for each lock.

        Args:
            goes_on: if it fails for one slot, as while a node is away, still run it for the others before the error.
        """
        if not refs:
            return []
        replies, errors = dict[int, Any](), list[LockBackendError]()
        with self._reaching():
            groups = same_slot(self.redis, [ref.key for ref in refs])
        for group in groups:
            keys = [key for index in group for key in keys_of(refs[index].key)]
            try:
                found = json.loads(self._run(name, keys, (*args, packed(rows[index] for index in group), *last)))
            except LockBackendError as exc:
                errors.append(exc)
                if not goes_on:
                    break
            else:
                replies.update(zip(group, found, strict=True))
        if errors:
            raise errors[0]
        return [replies[index] for index in range(len(refs))]

    def _reaching(self, zset: str = "") -> _Reaching:
        return _Reaching(self.url, zset)


class _Reaching:
    """A context that converts the client's errors to LockBackendErrors, which name the server without its password.

    Args:
        zset: the key of the calls, if it is one that another program may have spoilt for all locks; else empty.
    """

    def __init__(self, url: str, zset: str) -> None:
        self.url, self.zset = url, zset

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if isinstance(exc, RedisError) and self.zset and "WRONGTYPE" in str(exc):
            raise UnusableLockError(
                f"the locks' server {masked(self.url)}: the key {self.zset} is no sorted set: another program has "
                f"written there. Stop that program, and remove the key, so that workers make it again: DEL {self.zset}"
            ) from exc
        if isinstance(exc, RedisError):
            raise LockBackendError(
                f"the locks' server {masked(self.url)} {what_it_does(exc)}: {with_advice(exc)}"
            ) from exc


#: Key of the zset of the workers with singlebeat, by the server's time when they were seen. It is outside of every
#: prefix of locks, so that it stays when locks are cleared.
WORKERS_KEY = "singlebeat:workers"


def _requests(refs: Sequence[Ref]) -> list[tuple[str, str, str]]:
    return [(ref.task_id, str(ref.generation), ref.nonce) for ref in refs]


def _row(call: Call, only: str = "", note: str = "") -> tuple[str | int, ...]:
    """Return a call as ``acquire.lua`` takes it."""
    owner, times = (call.ref.task_id, str(call.ref.generation)), (_ms(call.ttl), _ms(call.expiry))
    shown, about = (call.task, call.arguments), (call.entry, only, note or call.note, call.state)
    return (*owner, *times, *shown, call.payload, call.if_held, *about)


def holder_of(reply: Sequence[Any]) -> Holder:
    """Return the holder that a script of locks has replied."""
    verdict, task_id, state, since, fence, ttl_ms, *more = reply
    ttl = max(0, int(ttl_ms)) / 1000
    if verdict in {Verdict.UNUSABLE, Verdict.REFUSED}:
        return Holder(Verdict(verdict), "", "", None, 0, 0.0, reason=task_id)
    texts, waiting = more[:2], [int(ms) / 1000 for ms in more[2:4]]
    holder = Holder(Verdict(verdict), task_id, state, from_ms(since), int(float(fence)), ttl, *texts, *waiting)
    return replace(holder, may_be_older=more[4] == "older", has_heir=more[4] == "heir") if more[4:] else holder


def _pages(keys: Iterable[str]) -> Iterator[Sequence[str]]:
    rest = iter(keys)
    while page := list(islice(rest, SCAN_COUNT)):
        yield page


def escaped(prefix: str) -> str:
    """Return a prefix as a pattern for SCAN that matches exactly the prefix."""
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in prefix)
