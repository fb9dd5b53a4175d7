"""Leadership: one beat leads for a term, under a lease that a separate thread renews."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from kombu.utils.uuid import uuid

from ...advice import redis_command
from ...connections import RedisError, ResponseError, schedule_client
from ...log import Log
from ...lua import script
from ..keys import Keys, LeaseKeys
from ..server_time import DIFFERS_FROM, ServerTime
from ..share import ALL, Share

__all__ = ("SHARE_EVERY", "SIGNS_KEPT", "STAY", "Lease", "Term", "ask_leader", "leader_of", "resign", "why_leaderless")

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient

log = Log("celery.beat")

#: Renewals per lease: two may fail before leadership is in danger.
RENEWALS_PER_LEASE = 3

#: The fraction of a lease, at its end, in which the leader trusts it no longer, because clocks run unevenly.
MARGIN = 0.1

#: Seconds for which a beat counts as alive after its last campaign, or after its last sign of life where leadership is
#: switched off. A standby makes several campaigns each second.
STAY = 5.0

#: Where leadership is switched off: seconds between two signs of life of a beat.
SHARE_EVERY = 1.0

#: Where leadership is switched off: seconds for which the last signs of life are kept when no beat gives one any more,
#: so that operators read since when.
SIGNS_KEPT = 300.0

#: Longest pause of campaigns in seconds after which this beat knows whether the lock has ended by itself.
LATEST_SEEN = 2.0

#: What PTTL returns of a key that lasts for ever.
NO_END = -1

#: The number of terms as ``campaign.lua`` counts them.
NUMBER = re.compile(r"0|[1-9][0-9]{0,12}")

#: The token of a beat of ours; RedBeat's have no dashes.
TOKEN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def ask_leader(pipe: RedisClient, keys: LeaseKeys) -> None:
    """Ask in a pipeline for the arguments of ``leader_of``."""
    pipe.hgetall(keys.leader)
    if keys.lock is None:
        pipe.hget(keys.leader, "token")
    else:
        pipe.get(keys.lock)


def leader_of(record: Mapping[str, str], token: str | None) -> Mapping[str, str]:
    """Return the record of the leader: empty if no beat of ours leads, and only its token if its record is spoilt.

    Another program may have removed the record, or written it: the leader writes it again when it renews its term.

    Args:
        record: as it is stored.
        token: that the lock holds; None if none is held. Where leadership is switched off: of the record.
    """
    if not token:
        return {}
    if record.get("token") == token and record.get("host") and record.get("pid"):
        return record
    return {"token": token} if TOKEN.fullmatch(token) else {}


def why_leaderless(client: RedisClient, keys: LeaseKeys) -> str:
    """Return why no beat can lead, and what to do, if another program has spoilt a key of leadership; else empty.

    Raises:
        RedisError: the server does not answer.
    """
    stop = "First stop the program that has written there"
    try:
        number = client.get(keys.term)
    except ResponseError as exc:
        if "WRONGTYPE" not in str(exc):
            raise
        what = "it is no string"
    else:
        if number is None or NUMBER.fullmatch(number):
            if keys.lock is None or client.pttl(keys.lock) != NO_END:
                return ""
            return (
                f"no beat can lead because of the key {keys.lock}: it has no end, so no beat has written it. celery "
                f"singlebeat resign removes it. {stop}"
            )
        what = f"it holds {number[:40]!r}, which is no number of a term"
    return (
        f"no beat can lead because of the key {keys.term}: {what}. {redis_command('DEL', keys.term)} removes it, "
        f"and the numbers of terms begin anew. {stop}"
    )


def identity() -> str:
    """Return host and pid of this process, as the history names a leader."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Term:
    """One unbroken period of leadership."""

    number: int  #: fencing number: a later term has a higher one; 0 where leadership is switched off
    token: str  #: the value of the lock during this term; empty where leadership is switched off
    lost: int = 0  #: number of an earlier term that the server has forgotten with its other data; 0 if none is known
    leader: str = field(default_factory=identity)  #: host and pid of the beat that leads
    expired: bool = False  #: it began when the lock of another beat had ended, which had not renewed it


class Lease:
    """This beat's leadership, which is acquired, renewed and given up; its loss is a state, not an error.

    Args:
        connect: returns a new client with its own connections and a short timeout, or the client that the user has set.
        ttl: seconds that leadership lasts after its last renewal.
        clock: monotonic seconds.
        about: strings stored with host and pid while this beat leads, stands by or shares the work: ``app``,
            ``statics``, ``version``, ``broker`` and, where leadership is switched off, ``zone``.
        server_time: learns the server's time from each campaign.
        says: returns an error of the server in words for the log.
    """

    def __init__(
        self,
        connect: Callable[[], RedisClient],
        keys: LeaseKeys,
        *,
        ttl: float,
        clock: Callable[[], float] = time.monotonic,
        about: Mapping[str, str] = MappingProxyType({}),
        server_time: ServerTime | None = None,
        says: Callable[[RedisError], str] = str,
    ) -> None:
        self.keys, self.ttl = keys, ttl
        self.server_time = server_time or ServerTime()
        self.took_s = 0.0  #: seconds that the last renewal took, or its failure; 0 if there was none
        self._connect, self._clock, self._about, self._says = connect, clock, about, says
        self._client: RedisClient = None
        self._term: Term | None = None
        self._token = ""  #: of campaigns that were not answered: the server may yet execute one of them
        self._last_token = ""  #: of the last campaign that was answered
        self._known = 0  #: number of the last known term, of this beat or another
        #: Number of a term that the server has forgotten, as the last look at the leader has shown; 0 if none is known.
        self.forgotten = 0
        self.spoilt = ""  #: why no beat can lead, as the last look at the leader has shown; empty if one can
        self._standby, self._since = "", ""
        self._record: Mapping[str, str | int] = {}  #: of this beat as the leader
        self._trusted_until = 0.0
        self._held_at, self._held_until = 0.0, math.inf  #: the last campaign that met a lock, and when that lock ends
        #: Our part of the work: all of it while we lead. Where leadership is switched off, beats share the work.
        self.share = ALL
        self._share_at = 0.0  #: when to give the next sign of life; 0: at once
        self._not_renewed = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def acquire(self) -> Term | None:
        """Return our term, campaigning for one if we have none; None while another beat leads.

        Raises:
            RedisError: the server does not answer, or another program has spoilt the number of terms.
        """
        if self._stopped:
            return None
        if self.keys.lock is None:
            self.give_sign()
            return Term(0, "")
        if (term := self.term()) is not None:
            return term
        if self._client is None:
            self._client = self._connect()
        # A new token only after an answer: a server that was frozen executes the campaigns that had reached it. With
        # another token, no process would know the token of the lock then.
        token, self._term = self._token or uuid(), None
        # The trusted time counts from before the call: a slow reply must not extend it.
        asked_at = self._clock()
        keys = (self.keys.lock, self.keys.leader, self.keys.term, self.keys.standbys, self.keys.resigned)
        host, pid, since = socket.gethostname(), os.getpid(), self._now()
        # The stored string must be the same at each campaign, because it is removed by its value.
        self._since = self._since or since
        before, self._standby = self._standby, self._encode_standby(host, pid)
        before, ttl_ms = before if before != self._standby else "", round(self.ttl * 1000)
        about = {name: self._about.get(name, "") for name in ("app", "statics", "incomplete", "version", "broker")}
        self._record = {"host": host, "pid": pid, "since": since, "token": token, "lease_ms": ttl_ms, **about}
        args = (token, ttl_ms, self._last_token, self._standby, round(STAY * 1000), before, identity())
        self._token = token  # from now on the lock may hold it, even if no reply arrives
        asked = self.server_time.asked()
        reply = script(__package__, "campaign")(self._client, keys, (*args, *self._fields()))
        number, *shown = map(int, reply)
        self.server_time.heard(shown[:2], asked)
        if number < 0:  # nothing was written: the token of the lock is the one that it was
            self.forget()
            raise ResponseError(why_leaderless(self._client, self.keys) or "its terms could not be read for a moment")
        self._last_token, self._token = token, ""
        if not number:
            self._held_at, self._held_until = asked_at, asked_at + (shown[2] / 1000 or math.inf)
            return None
        expired = self._held_until <= self._clock() and asked_at - self._held_at < LATEST_SEEN
        self._held_until = math.inf
        self._standby = self._since = ""
        self._trusted_until = asked_at + self.ttl * (1 - MARGIN)
        self._term = Term(number, token, self._known if number <= self._known else 0, expired=expired)
        self._known = number
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep_renewing, name="singlebeat-lease", daemon=True)
            self._thread.start()
        return self._term

    def _fields(self) -> Iterable[str | int]:
        """Return the fields of our record as the leader, names and values alternating."""
        ahead = f"{self.server_time.host_ahead:.1f}"
        return chain.from_iterable({**self._record, "ahead": ahead}.items())

    def _now(self) -> str:
        return self.server_time.now().isoformat(timespec="seconds")

    def give_sign(self) -> None:
        """Give a sign of life, where leadership is switched off, and share the work with the beats that do the same.

        Raises:
            RedisError: the server does not answer.
        """
        if self._clock() < self._share_at or self._stopped:
            return
        if self._client is None:
            self._client = self._connect()
        self._since = self._since or self._now()
        before, self._standby = self._standby, self._encode_standby(socket.gethostname(), os.getpid())
        now, key = self.server_time.timestamp() * 1000, self.keys.standbys
        until = now + STAY * 1000
        with self._client.pipeline(transaction=False) as pipe:
            if before != self._standby:
                pipe.zrem(key, before)
            pipe.zremrangebyscore(key, "-inf", now)
            # Signs from before the server's clock was set back, and not those that another beat gives at this moment.
            pipe.zremrangebyscore(key, f"({until + STAY * 1000!r}", "+inf")
            pipe.zadd(key, {self._standby: until})
            pipe.pexpire(key, round(SIGNS_KEPT * 1000))
            pipe.zrange(key, 0, -1)
            *_, signs = pipe.execute()
        others = frozenset(self._sharing(signs)) - {identity()}
        if others != self.share.others:
            for beat in sorted({*self.share.others} - others):
                text = "beat: %(beat)s shares the work no more: it has ended, hangs, or does not reach the server"
                log.warning(text, event="share_left", beat=beat)
            for beat in sorted(others - {*self.share.others}):
                log.info("beat: %(beat)s shares the work", event="share_joined", beat=beat)
            self.share = Share(identity(), others)
        self._share_at = self._clock() + SHARE_EVERY

    def _sharing(self, signs: Iterable[str]) -> Iterator[str]:
        """Yield host and pid of the beats that give signs of life in our zone: claims from another zone are refused."""
        for sign in signs:
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # another program may write there
                record = json.loads(sign)
                if record["zone"] == self._about["zone"]:
                    yield f"{record['host']}:{record['pid']}"

    def _encode_standby(self, host: str, pid: int) -> str:
        """Return the record of this beat as a standby, in JSON; it says how far the clock is off if that matters."""
        ahead = self.server_time.host_ahead
        off = {"ahead": round(ahead)} if abs(ahead) > DIFFERS_FROM else {}
        return json.dumps({"host": host, "pid": str(pid), "since": self._since, **self._about, **off})

    def term(self) -> Term | None:
        """Return the term under which this beat may act now, or None."""
        if self._stopped:
            return None
        if self.keys.lock is None:
            return Term(0, "")
        term = self._term
        return term if term is not None and self._clock() < self._trusted_until else None

    def owned(self) -> bool:
        """Return whether this beat leads now."""
        return self.term() is not None

    def renew(self) -> bool:
        """Prolong our term; return False if the term has ended.

        Raises:
            RedisError: the server does not answer; the term goes on until this beat trusts its lease no longer.
        """
        term = self._term
        if term is None or self.keys.lock is None:
            return term is not None
        asked_at = self._clock()
        keys = (self.keys.lock, self.keys.leader, self.keys.term)
        took = ("took", f"{self.took_s:.6f}")
        args = (term.token, round(self.ttl * 1000), term.number, "term", term.number, *took, *self._fields())
        try:
            is_renewed = script(__package__, "renew")(self._client, keys, args)
        finally:
            self.took_s = self._clock() - asked_at
        if is_renewed:
            self._known = term.number
            left = self._trusted_until - self._clock()
            self._trusted_until = asked_at + self.ttl * (1 - MARGIN)
            if left < self.ttl * MARGIN:
                log.warning(
                    "beat: Renewed the lock late: leadership was nearly lost", event="lease_nearly_lost", left=left
                )
            return True
        if self._term is term:
            self._term = None
        return False

    def forget(self) -> None:
        """Forget the known terms, because the server has: that their numbers begin anew is no sign of another loss."""
        self._known = 0

    def release(self) -> None:
        """Stop leading or standing by, for good; may be called in a signal handler, at any moment, and repeatedly.

        It acquires no thread lock and shares no connection with the rest of the process, so it waits for neither. But
        if the user has set ``app.redbeat_redis``, it waits as long as that client does, for its pool and the server.
        """
        leads = self._term is not None
        token, self._term, self._stopped = self._token or self._last_token, None, True
        if self.keys.lock is None and self._standby:
            with suppress(RedisError):  # the sign of life expires by itself
                self._connect().zrem(self.keys.standbys, self._standby)
                self._standby = ""
        if not token or self.keys.lock is None:
            return
        try:
            keys = (self.keys.lock, self.keys.leader, self.keys.standbys, self.keys.resigned)
            released = script(__package__, "resign")(self._connect(), keys, (token, self._standby, 0))
        except RedisError as exc:
            if leads:
                text = "beat: Could not release the lock, it ends within %(ttl)g s"
                log.warning(text, event="lock_kept", ttl=self.ttl, reason=self._says(exc))
        else:
            if released:
                log.info("beat: Released lock", event="lock_released", leader=identity())
        # Only now: a second signal interrupts this call, and ends the process when its own call returns.
        self._token = self._last_token = ""

    def leader(self) -> Mapping[str, str]:
        """Return the record of the leader as ``leader_of`` does."""
        client = self._client or self._connect()
        with client.pipeline(transaction=False) as pipe:
            ask_leader(pipe, self.keys)
            record = leader_of(*pipe.execute())
        self.forgotten, self.spoilt = 0, "" if record else why_leaderless(client, self.keys)
        if NUMBER.fullmatch(number := record.get("term", "")):
            known, self._known = self._known, int(number)
            self.forgotten = known if self._known < known else 0
        return record

    def _keep_renewing(self) -> None:
        pause = self.ttl / RENEWALS_PER_LEASE
        while not self._stopped:
            time.sleep(pause)
            try:
                if self.renew() and self._not_renewed:
                    self._not_renewed = False
                    log.warning("beat: Renewed the lock again", event="recovered")
            except RedisError as exc:
                if not self._not_renewed:
                    self._not_renewed = True
                    left = self._trusted_until - self._clock()
                    why = self._says(exc)
                    log.warning("beat: Could not renew the lock", event="not_renewed", left=left, reason=why)


def resign(app: Celery) -> bool:
    """End the present term of leadership, so that a standby leads next; return whether there was a term.

    The beat whose term it was leads again at once if there is no standby, and after ``STAY`` seconds if no standby
    leads by then. The claims of the old leader are fenced by its term, so no occurrence is decided twice.
    """
    keys = Keys.of(app)
    client = schedule_client(app)
    token = client.get(keys.lock) if keys.lock else None
    touched = (keys.lock or "", keys.lease.leader, keys.lease.standbys, keys.lease.resigned)
    return bool(token and script(__package__, "resign")(client, touched, (token, "", round(STAY * 1000))))
