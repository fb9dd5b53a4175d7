"""Leadership: who leads, for how long that may be believed, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from redis import Redis
from redis.exceptions import LockError, RedisError, ResponseError

from singlebeat.beat.keys import LeaseKeys
from singlebeat.beat.leadership.lease import SHARE_EVERY, SIGNS_KEPT, STAY, Lease, Term, leader_of, resign
from tests.support import RedisServer, at_once, free_port, wait_until, without

KEYS = LeaseKeys("redbeat::lock", "redbeat::leader", "redbeat::term", "redbeat::standbys", "redbeat::resigned")

#: A lease that no test outlives, so that the renewing thread never wakes up in it.
LONG = 300.0


class Clock:
    """Monotonic seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease_on() -> Iterator[Callable[..., Lease]]:
    """Makes a lease on a server; all of them end with the test."""
    leases = []

    def make(server: RedisServer, *, ttl: float = LONG, keys: LeaseKeys = KEYS, **options) -> Lease:
        options.setdefault("connect", lambda: server.client(socket_timeout=1))
        leases.append(Lease(keys=keys, ttl=ttl, **options))
        return leases[-1]

    yield make
    for lease in leases:
        lease._stopped = True  # a release would need the server, which the test may have killed


@pytest.fixture
def make(server, redis, lease_on) -> Callable[..., Lease]:
    return lambda **options: lease_on(server, **options)


class SlowClient:
    """A client whose replies arrive late: the server has answered at once, but time has passed since."""

    def __init__(self, client: Redis, clock: Clock, seconds: float) -> None:
        self.client, self.clock, self.seconds = client, clock, seconds

    def __getattr__(self, name: str):
        method = getattr(self.client, name)

        def call(*args, **kwargs):
            try:
                return method(*args, **kwargs)
            finally:
                self.clock.advance(self.seconds)

        return call


# ---------------------------------------------------------------- one leads


def test_one_leads_and_the_other_does_not(make, redis):
    first, second = make(), make()

    term = first.acquire()

    assert term.number == 1
    assert redis.get(KEYS.lock) == term.token
    assert second.acquire() is None
    assert (first.term(), second.term()) == (term, None)
    assert (first.owned(), second.owned()) == (True, False)


def test_a_leader_continues_its_term(make, redis):
    lease = make()
    term = lease.acquire()

    assert lease.acquire() is lease.acquire() is term
    assert redis.get(KEYS.term) == "1"


def test_before_the_first_campaign_no_beat_leads_and_nothing_is_written(make, redis):
    lease = make()

    assert lease.term() is None
    assert lease.owned() is lease.renew() is False
    assert lease.leader() == {}
    assert redis.dbsize() == 0


def test_a_losing_campaign_writes_only_that_it_stands_by(make, redis):
    redis.set(KEYS.lock, "somebody", px=60_000)

    assert make().acquire() is None
    assert set(redis.keys()) == {KEYS.lock, KEYS.standbys}
    assert 0 < redis.pttl(KEYS.lock) <= 60_000


def test_the_leader_is_shown_to_everybody(make, redis):
    first, second = make(ttl=60), make()
    term = first.acquire()

    leader = second.leader()

    about = {"app", "statics", "incomplete", "version", "broker"}
    assert set(leader) == {*about, "host", "pid", "since", "term", "ahead", "token", "lease_ms"}
    assert leader["term"] == str(term.number)
    assert 0 < redis.pttl(KEYS.leader) <= 60_000


def test_many_campaigns_at_once_have_one_winner(make):
    leases = [make() for _ in range(8)]

    terms = at_once(*[lease.acquire for lease in leases])

    assert len(terms) == 8
    assert [term.number for term in terms if term is not None] == [1]


# ---------------------------------------------------------------- standing by


def standbys(redis: Redis) -> list[dict[str, str]]:
    return [json.loads(text) for text in redis.zrange(KEYS.standbys, 0, -1)]


def test_a_standby_is_listed_by_name_and_start(make, redis):
    leader, standby = make(), make()
    leader.acquire()
    assert standbys(redis) == []

    standby.acquire()
    (first,) = standbys(redis)
    assert set(first) == {"host", "pid", "since"}
    assert first["pid"] == str(os.getpid())

    redis.delete(KEYS.standbys)
    standby._since = "long ago"
    standby.acquire()
    assert standbys(redis) == [{**first, "since": "long ago"}], "each campaign says the same"


def test_a_leader_is_no_longer_a_standby(make, redis):
    leader, standby = make(), make()
    leader.acquire()
    standby.acquire()
    leader.release()

    standby.acquire()

    assert standby.owned()
    assert standbys(redis) == []


def test_a_closed_beat_is_no_longer_a_standby(make, redis):
    leader, standby = make(), make()
    leader.acquire()
    standby.acquire()

    standby.release()

    assert standbys(redis) == []
    assert leader.owned()
    assert redis.get(KEYS.lock) == leader.term().token


def test_a_place_among_the_standbys_ends_by_itself(make, redis, monkeypatch):
    leader, dead = make(), make()
    leader.acquire()
    dead.acquire()
    assert 0 < redis.pttl(KEYS.standbys) <= STAY * 1000
    (name,) = redis.zrange(KEYS.standbys, 0, -1)
    redis.zadd(KEYS.standbys, {name: redis.time()[0] * 1000})  # as after its stay

    other = make()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    other.acquire()

    assert [standby["host"] for standby in standbys(redis)] == ["elsewhere"]


def test_a_resigned_leader_lets_a_standby_lead_first(make, app, redis):
    leader, standby = make(), make()
    leader.acquire()
    standby.acquire()
    # Of this process are both, but the mark names the leader alone.
    redis.hset(KEYS.leader, "pid", "1")

    assert resign(app)

    assert redis.get(KEYS.resigned) == f"{socket.gethostname()}:1"
    assert 0 < redis.pttl(KEYS.resigned) <= STAY * 1000
    assert standby.acquire().number == 2
    assert not redis.exists(KEYS.resigned)


def test_a_resigned_leader_does_not_lead_before_its_wait_ends(make, app, redis):
    leader, standby = make(), make()
    leader.acquire()
    standby.acquire()

    resign(app)
    leader.renew()

    assert leader.acquire() is None
    redis.delete(KEYS.resigned)  # as its time to live does, if no standby has come
    assert leader.acquire().number == 2


def test_a_resigned_leader_without_a_standby_leads_again_at_once(make, app, redis):
    leader = make()
    leader.acquire()

    resign(app)
    leader.renew()

    assert leader.acquire().number == 2


# ---------------------------------------------------------------- trust


def test_trust_ends_before_the_lease_does(make, clock):
    lease = make(clock=clock)
    term = lease.acquire()

    clock.advance(LONG * 0.85)
    assert lease.term() == term
    clock.advance(LONG * 0.1)
    assert lease.term() is None
    assert lease.owned() is False


def test_renewing_prolongs_trust_and_lock(make, clock, redis):
    lease = make(clock=clock)
    term = lease.acquire()
    for key in (KEYS.lock, KEYS.leader):
        redis.pexpire(key, 1000)

    clock.advance(LONG * 0.8)
    assert lease.renew() is True

    clock.advance(LONG * 0.8)
    assert lease.term() == term
    assert redis.pttl(KEYS.lock) > LONG * 900
    assert redis.pttl(KEYS.leader) > LONG * 900
    assert redis.get(KEYS.term) == "1"


def test_a_slow_reply_does_not_stretch_trust(make, server, clock):
    lease = make(clock=clock, connect=lambda: SlowClient(server.client(), clock, LONG * 0.4))
    term = lease.acquire()

    assert lease.term() == term
    clock.advance(LONG * 0.55)
    assert lease.term() is None


def test_a_reply_slower_than_the_lease_gives_no_trust_at_all(make, server, clock):
    lease = make(clock=clock, connect=lambda: SlowClient(server.client(), clock, LONG))

    lease.acquire()

    assert lease.term() is None


def test_a_slow_renewal_does_not_stretch_trust(make, server, clock):
    client = SlowClient(server.client(), clock, 0)
    lease = make(clock=clock, connect=lambda: client)
    term = lease.acquire()
    client.seconds = LONG * 0.4

    assert lease.renew() is True

    assert lease.term() == term
    clock.advance(LONG * 0.55)
    assert lease.term() is None


def test_a_leftover_lock_of_the_own_last_term_does_not_block_a_beat(make, clock, redis):
    lease = make(clock=clock)
    old = lease.acquire()
    clock.advance(LONG * 0.95)
    assert lease.term() is None  # no renewal came through, but the lock is still there

    new = lease.acquire()

    assert new.number > old.number
    assert lease.term() == new
    assert redis.get(KEYS.lock) == new.token


@pytest.mark.parametrize("number", ["x", "", "1.5", "-3", "007", "9" * 14, "-99999999999999999999999"])
def test_no_beat_leads_by_a_spoilt_number_of_terms(make, redis, number):
    redis.set(KEYS.term, number)
    lease = make()

    with pytest.raises(ResponseError, match=f"{KEYS.term}: it holds '{number[:9]}.* DEL {KEYS.term}"):
        lease.acquire()

    assert redis.keys() == [KEYS.term]
    redis.delete(KEYS.term)
    assert lease.acquire() == lease.term()
    assert lease.term().number == 1


def test_terms_that_begin_anew_after_that_are_no_loss(make, redis):
    lease = make()
    assert [lease.acquire().number, redis.delete(KEYS.lock), lease.renew()] == [1, 1, False]
    redis.set(KEYS.term, "x")
    with pytest.raises(ResponseError, match="no number of a term"):
        lease.acquire()
    redis.delete(KEYS.term)

    assert lease.acquire().lost == 0


def test_a_repeated_campaign_notices_a_spoilt_number_of_terms(make, redis):
    lease = make()
    lease._token = lease.acquire().token  # as if the reply had been lost
    lease._term = None
    redis.set(KEYS.term, "x")

    with pytest.raises(ResponseError, match="no number of a term"):
        lease.acquire()


# ---------------------------------------------------------------- loss


@pytest.mark.parametrize("loss", ["deleted", "stolen"])
def test_a_lost_lock_ends_the_term_at_the_next_renewal(make, redis, loss):
    lease = make()
    lease.acquire()
    redis.delete(KEYS.lock)
    if loss == "stolen":
        redis.set(KEYS.lock, "thief", px=60_000)

    assert lease.renew() is False

    assert lease.term() is None
    assert redis.get(KEYS.lock) == {"deleted": None, "stolen": "thief"}[loss]


def test_a_renewal_does_not_prolong_anothers_lock(make, redis):
    lease = make()
    lease.acquire()
    redis.set(KEYS.lock, "thief", px=1000)
    redis.pexpire(KEYS.leader, 1000)

    lease.renew()

    assert redis.pttl(KEYS.lock) <= 1000
    assert redis.pttl(KEYS.leader) <= 1000


def test_a_new_campaign_has_a_higher_number_and_another_token(make, redis):
    lease = make()
    first = lease.acquire()
    redis.delete(KEYS.lock)
    lease.renew()

    second = lease.acquire()

    assert second.number == first.number + 1
    assert redis.get(KEYS.lock) == second.token != first.token
    assert lease.leader()["term"] == "2"


def test_numbers_rise_from_beat_to_beat(make):
    numbers = []
    for _ in range(3):
        lease = make()
        numbers.append(lease.acquire().number)
        lease.release()

    assert numbers == [1, 2, 3]


def test_a_lease_that_ran_out_unnoticed_is_followed_by_a_new_term(make, clock, redis):
    lease = make(clock=clock)
    first = lease.acquire()
    clock.advance(LONG)
    redis.delete(KEYS.lock)  # as its time to live has done

    second = lease.acquire()

    assert second.number == first.number + 1
    assert lease.term() == second


def test_the_lock_ends_by_itself(make, redis):
    make(ttl=60).acquire()

    assert 0 < redis.pttl(KEYS.lock) <= 60_000


HOUR = 3_600_000


def test_a_lock_outlives_no_lease_when_the_clock_is_set_back(make, redis):
    dead, standby = make(ttl=60), make()
    term = dead.acquire()
    for key in (KEYS.lock, KEYS.leader):
        redis.pexpire(key, HOUR)  # as it is when the server's clock was set back by an hour

    assert standby.acquire() is None

    assert redis.get(KEYS.lock) == term.token
    for key in (KEYS.lock, KEYS.leader):
        assert 0 < redis.pttl(key) <= 60_000
    assert dead.renew(), "if it lives after all"


def test_a_lock_of_redbeat_keeps_its_end_beside_leftover_records(make, redis):
    make(ttl=60).acquire()
    redis.set(KEYS.lock, "of RedBeat", px=HOUR)  # the record of ours is still there

    assert make().acquire() is None

    assert redis.pttl(KEYS.lock) > 60_000


def test_a_resigned_leader_waits_no_longer_after_the_clock_is_set_back(make, app, redis):
    leader, standby = make(), make()
    leader.acquire()
    standby.acquire()
    resign(app)
    leader.renew()

    redis.pexpire(KEYS.resigned, HOUR)

    assert leader.acquire().number == 2


# ---------------------------------------------------------------- release


def test_a_release_lets_another_lead_at_once(make, redis):
    first, second = make(), make()
    first.acquire()

    first.release()

    assert redis.exists(KEYS.lock, KEYS.leader) == 0
    assert second.acquire().number == 2


@pytest.mark.parametrize("leads", [True, False])
def test_a_lock_that_cannot_be_released_is_logged_by_its_leader_alone(make, monkeypatch, caplog, leads):
    first, second = make(), make()
    first.acquire()
    second.acquire()
    lease = first if leads else second
    monkeypatch.setattr(lease, "_connect", lambda: Redis(port=free_port()))

    lease.release()

    assert ("event=lock_kept" in caplog.text) == leads


def test_after_a_release_the_lease_never_leads_again(make, redis):
    lease = make()
    lease.acquire()

    lease.release()
    lease.release()

    assert lease.acquire() is lease.term() is None
    assert lease.owned() is lease.renew() is False
    assert redis.exists(KEYS.lock) == 0


def test_a_second_signal_amid_the_release_releases_as_well(make, redis):
    lease = make()
    lease.acquire()
    connect = lease._connect

    def interrupted() -> None:
        lease._connect = connect
        lease.release()
        raise SystemExit  # as the handler of a signal does

    lease._connect = interrupted
    with pytest.raises(SystemExit):
        lease.release()

    assert redis.exists(KEYS.lock, KEYS.leader) == 0


def test_a_release_before_any_term_writes_nothing(make, redis):
    redis.set(KEYS.lock, "somebody")
    lease = make()

    lease.release()

    assert redis.get(KEYS.lock) == "somebody"
    assert lease.acquire() is None


def test_a_release_of_an_old_term_does_not_touch_a_newer_one(make, redis):
    old, new = make(), make()
    old.acquire()
    redis.delete(KEYS.lock)
    term = new.acquire()

    old.release()

    assert redis.get(KEYS.lock) == term.token
    assert new.leader()["term"] == str(term.number)


def test_a_release_ends_the_renewing(make):
    lease = make(ttl=0.3)
    lease.acquire()
    thread = lease._thread
    assert thread.is_alive()

    lease.release()

    wait_until(lambda: not thread.is_alive(), what="the end of the thread")


def test_a_release_without_redis_says_that_the_lock_ends_by_itself(own_server, lease_on, caplog):
    lease = lease_on(own_server)
    lease.acquire()
    own_server.kill()

    lease.release()

    assert "Could not release the lock, it ends within 300 s" in caplog.text
    assert lease.term() is None


# ---------------------------------------------------------------- the thread


class CountingClient:
    """Counts the calls that have come back with an answer."""

    def __init__(self, client: Redis) -> None:
        self.client, self.calls, self.news = client, 0, threading.Condition()

    def evalsha(self, *args):
        reply = self.client.evalsha(*args)
        with self.news:
            self.calls += 1
            self.news.notify_all()
        return reply

    def __getattr__(self, name: str):
        return getattr(self.client, name)


def test_the_lease_is_kept_while_the_main_thread_is_blocked(make, server, redis):
    client = CountingClient(server.client())
    lease = make(ttl=2.5, connect=lambda: client)
    term, began = lease.acquire(), time.monotonic()

    with client.news:  # blocked, as in a publish that hangs, until the lease would be long over
        assert client.news.wait_for(lambda: client.calls > 2 and time.monotonic() - began > 1.2 * lease.ttl, timeout=30)

    assert lease.term() == term
    assert redis.get(KEYS.lock) == term.token


def test_a_stolen_lock_is_noticed_without_the_main_thread(make, redis):
    lease = make(ttl=0.9)
    lease.acquire()

    redis.set(KEYS.lock, "thief")

    wait_until(lambda: lease.term() is None, what="the end of the term")
    assert redis.get(KEYS.lock) == "thief"


# ---------------------------------------------------------------- without Redis


def test_without_redis_there_is_no_campaign(own_server, lease_on):
    own_server.kill()

    with pytest.raises(RedisError):
        lease_on(own_server).acquire()


def test_without_redis_the_term_ends_when_trust_does(own_server, lease_on, clock):
    lease = lease_on(own_server, clock=clock)
    term = lease.acquire()
    own_server.kill()

    with pytest.raises(RedisError):
        lease.renew()

    assert lease.term() == term
    clock.advance(LONG)
    assert lease.term() is None
    with pytest.raises(RedisError):
        lease.acquire()


def test_a_server_that_has_forgotten_everything_is_campaigned_for_again(own_server, lease_on):
    lease = lease_on(own_server)
    old = lease.acquire()
    own_server.restart()

    assert lease.renew() is False
    new = lease.acquire()

    assert new.token != old.token
    assert own_server.client().get(KEYS.lock) == new.token


def test_the_thread_outlives_an_outage(own_server, lease_on, caplog):
    lease = lease_on(own_server, ttl=3)
    lease.acquire()
    thread = lease._thread
    own_server.kill()
    wait_until(lambda: "Could not renew the lock" in caplog.text, what="a renewal that fails")

    wait_until(lambda: lease.term() is None, what="the end of the old term")
    own_server.restart()
    term = lease.acquire()
    assert caplog.text.count("Could not renew the lock") == 1

    assert lease._thread is thread
    lock = own_server.client()
    left = [lock.pttl(KEYS.lock)]

    def renewed() -> bool:
        left.append(lock.pttl(KEYS.lock))
        return left[-1] > left[-2]

    wait_until(lambda: renewed() or lease.term() != term, what="a renewal")
    assert lease.term() == term


def test_a_campaign_that_a_frozen_server_executes_late_begins_a_term(own_server, lease_on):
    """Only the first request is in the server's buffer: the later ones wait for the reply to their connections."""
    lease, redis = lease_on(own_server, connect=lambda: own_server.client(socket_timeout=0.2)), own_server.client()
    redis.set(KEYS.lock, "of a leader that dies", px=60_000)
    assert lease.acquire() is None
    redis.delete(KEYS.lock)

    own_server.pause()
    for _ in range(3):
        with pytest.raises(RedisError):
            lease.acquire()
    own_server.resume()
    wait_until(lambda: redis.get(KEYS.lock), what="the late campaign")
    redis.pexpire(KEYS.lock, 1000)
    term = lease.acquire()

    assert term.number == 1
    assert redis.get(KEYS.lock) == term.token
    assert redis.pttl(KEYS.lock) > LONG * 900, "trust counts from the campaign that was answered"
    assert redis.pttl(KEYS.leader) > LONG * 900


def test_a_term_that_a_late_campaign_follows_is_not_renewed(make, redis, clock):
    """A campaign was sent twice, its first try reached the server after the term of the second one had ended."""
    lease = make(clock=clock)
    term = lease.acquire()
    redis.incr(KEYS.term)  # as the late campaign has done, with the same token

    assert lease.renew() is False

    assert lease.acquire().number == term.number + 2


def test_a_term_that_was_given_up_is_not_renewed(own_server, lease_on, clock):
    """A campaign says that what is left of its term does not keep it out: it may reach the server at any time."""
    redis = own_server.client()
    lease = lease_on(own_server, clock=clock, connect=lambda: own_server.client(socket_timeout=0.2))
    term = lease.acquire()
    clock.advance(LONG * 0.95)
    redis.client_pause(60_000, all=False)
    with pytest.raises(RedisError):
        lease.acquire()
    redis.client_unpause()

    assert lease.renew() is False

    assert lease.acquire().number > term.number


@pytest.mark.parametrize("command", ["hset", "zrem", "pexpire", "incr", "set"])
def test_a_campaign_without_a_right_takes_no_lock(make, server, redis, command):
    with without(server, command) as url, Redis.from_url(url.replace("redis+socket", "unix")) as client:
        with pytest.raises(RedisError):
            make(connect=lambda: client).acquire()

        assert redis.exists(KEYS.lock) == 0
        assert redis.pttl(KEYS.leader) != -1, "no record of a leader may last for ever"
        assert not redis.exists(KEYS.term), "no term is counted"


def test_a_campaign_without_memory_writes_nothing(own_server, lease_on):
    redis = own_server.client()
    redis.config_set("maxmemory", "1")

    with pytest.raises(RedisError):
        lease_on(own_server).acquire()

    assert redis.dbsize() == 0


# ---------------------------------------------------------------- switched off


def test_without_a_lock_everybody_always_leads(make, redis, clock):
    keys = replace(KEYS, lock=None)
    one, other = (make(keys=keys, clock=clock) for _ in range(2))

    assert one.acquire() == other.acquire() == Term(0, "")
    clock.advance(10 * LONG)
    assert one.owned()
    assert other.owned()
    one.release()
    assert one.acquire() is None
    other.release()
    assert redis.dbsize() == 0


def test_beats_that_share_the_work_are_named_while_they_live(make, redis, clock, monkeypatch):
    keys, shown = replace(KEYS, lock=None), redis.time()
    one, other = (make(keys=keys, clock=clock) for _ in range(2))
    for lease in (one, other):
        lease.server_time.heard(shown, lease.server_time.asked())
    one.acquire()
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        other.acquire()
    assert {standby["host"] for standby in standbys(redis)} == {socket.gethostname(), "elsewhere"}
    assert 0 < redis.pttl(KEYS.standbys) <= SIGNS_KEPT * 1000

    one.acquire()
    sent = redis.info("commandstats")["cmdstat_zadd"]["calls"]
    one.acquire()
    assert redis.info("commandstats")["cmdstat_zadd"]["calls"] == sent, "between two signs of life it says nothing"

    (dead,) = [name for name in redis.zrange(KEYS.standbys, 0, -1) if "elsewhere" in name]
    redis.zadd(KEYS.standbys, {dead: 1000 * (redis.time()[0] + STAY + 2)})  # it has given one a moment later than we
    clock.advance(SHARE_EVERY)
    one.acquire()
    assert len(standbys(redis)) == 2
    for noted in (shown[0] - 1, shown[0] + 3600):  # its stay is over; the server's clock was set back
        redis.zadd(KEYS.standbys, {dead: noted * 1000})
        clock.advance(SHARE_EVERY)
        one.acquire()
        assert [standby["host"] for standby in standbys(redis)] == [socket.gethostname()]


# ---------------------------------------------------------------- RedBeat's protocol


def test_a_lock_of_redis_py_keeps_us_out(make, redis):
    lock = redis.lock(KEYS.lock, timeout=60)
    assert lock.acquire(blocking=False)
    lease = make()

    assert lease.acquire() is None
    lock.release()
    assert lease.acquire().number == 1


def test_our_lease_keeps_a_lock_of_redis_py_out(make, redis):
    lease = make()
    term = lease.acquire()
    lock = redis.lock(KEYS.lock, timeout=60)

    assert lock.acquire(blocking=False) is False
    assert redis.get(KEYS.lock) == term.token

    lease.release()
    assert lock.acquire(blocking=False)


def test_a_lock_of_redis_py_that_has_lost_to_us_cannot_touch_our_lease(make, redis):
    lock = redis.lock(KEYS.lock, timeout=60)
    lock.acquire(blocking=False)
    token = lock.local.token
    redis.delete(KEYS.lock)
    term = make().acquire()

    for touch in (lock.release, lock.reacquire, lambda: lock.extend(60)):
        lock.local.token = token  # a release forgets it
        with pytest.raises(LockError):
            touch()
    assert redis.get(KEYS.lock) == term.token


# ---------------------------------------------------------------- records that other programs spoil


def spoil(redis: Redis, key: str) -> None:
    redis.delete(key)
    redis.rpush(key, "mine")


@pytest.mark.parametrize("how", ["deleted", "of another type", "half of it"])
def test_the_next_renewal_makes_the_record_of_the_leader_whole(make, redis, how):
    beat = make(about={"app": "shop", "broker": "there"})
    beat.acquire()
    beat.renew()
    before = redis.hgetall(KEYS.leader)
    {
        "deleted": redis.delete,
        "of another type": lambda key: spoil(redis, key),
        "half of it": lambda key: redis.hdel(key, "host"),
    }[how](KEYS.leader)

    assert beat.renew()

    after = redis.hgetall(KEYS.leader)
    assert {**after, "took": ""} == {**before, "took": ""}
    assert after["app"] == "shop"
    assert 0 < redis.pttl(KEYS.leader) <= LONG * 1000


@pytest.mark.parametrize("how", ["deleted", "of another type"])
def test_a_term_goes_on_if_another_program_spoils_its_number(make, redis, how):
    beat, standby = make(), make()
    redis.set(KEYS.term, 6)
    beat.acquire()
    standby.acquire()
    standby.leader()
    redis.delete(KEYS.term) if how == "deleted" else spoil(redis, KEYS.term)
    standby.leader()
    assert standby.spoilt == "", "a beat leads"

    assert beat.renew()

    assert redis.get(KEYS.term) == "7"
    assert standby.leader()["term"] == "7"
    assert (standby.forgotten, standby.spoilt) == (0, "")


@pytest.mark.parametrize("how", ["of another type", "half of it"])
def test_a_spoilt_record_of_the_leader_hinders_no_campaign_and_no_end(make, app, redis, how):
    beat, standby = make(), make()
    beat.acquire()
    spoil(redis, KEYS.leader) if how == "of another type" else redis.hdel(KEYS.leader, "host", "token")

    assert standby.acquire() is None
    assert resign(app)
    assert standby.acquire() is not None
    assert standby.leader()["host"]


def test_only_a_record_with_the_token_of_the_lock_is_of_the_leader():
    token, record = "2f0b8a3e-0c4e-4a5e-9c56-1dc9c4123ccb", {"host": "h", "pid": "1"}

    assert leader_of({**record, "token": token}, token) == {**record, "token": token}
    assert leader_of({**record, "token": token}, None) == {}
    assert leader_of({**record, "token": "of before"}, "of-redbeat") == {}
    for spoilt in ({}, record, {"ahead": "0.0", "took": "0.1"}, {"token": token, "pid": "1"}):
        assert leader_of(spoilt, token) == {"token": token}


def test_the_lock_of_redis_py_is_not_taken_for_one_of_ours(make, redis):
    lock = redis.lock(KEYS.lock, timeout=60)
    lock.acquire(blocking=False)

    assert make().leader() == {}
