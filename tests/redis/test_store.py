"""The entries in Redis: reading what is due, claim, confirm, quarantine and the entries of ``beat_schedule``."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule
from redbeat import RedBeatSchedulerEntry
from redis import ConnectionPool, Redis
from redis.connection import UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from singlebeat import Entry, Schedule, signals
from singlebeat.beat.entries import save
from singlebeat.beat.entries.entry import PARKED, Meta
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.entries.statics import Statics
from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.clock_guard import WRONG_PAST, Clock, Jump
from singlebeat.beat.leadership.lease import Term
from singlebeat.beat.store.claims import Claim, ClaimedOccurrence, ClaimVerdict, Confirmation, Due, Store, Stored
from singlebeat.beat.store.quarantine import QUARANTINED
from singlebeat.connections import schedule_client
from singlebeat.errors import ConfigError, EntryError
from tests.support import at_once, connected, contents
from tests.system.apps import make_app

TASK = "tests.system.apps.plain"
NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
RETRY_AT = NOW + timedelta(seconds=5)
ANOTHER_TICK = timedelta(microseconds=1)
OFF = Term(0, "")  # leadership is switched off
TERM = Term(3, "token of the third term")
SCHEDULE, PENDING = "redbeat::schedule", "redbeat::pending"
STATICS, OWNERS = "redbeat::statics", "redbeat::owners"
QUARANTINE, HISTORY, LOCK = "redbeat::quarantine", "redbeat::history", "redbeat::lock"
CHANGES = "redbeat::changes"


@pytest.fixture
def store(app: Celery, redis: Redis) -> Store:
    return Store(app, schedule_client(app))


@pytest.fixture
def put(app: Celery, redis: Redis) -> Callable[..., str]:
    """Write an entry as another program might; return its key."""

    def put(name: str = "e", *, score: float = NOW.timestamp(), definition: str | None = None, **fields: str) -> str:
        key = f"redbeat:{name}"
        definition = Entry(name, TASK, schedule(60), app=app).encode() if definition is None else definition
        redis.hset(key, mapping={"definition": definition, **fields})
        redis.zadd(SCHEDULE, {key: score})
        return key

    return put


def due(store: Store, *, now: datetime = NOW, all_pending: bool = False) -> Due:
    return store.due(now, all_pending=all_pending)


def claim_of(stored: Stored, *, nominal: datetime = NOW, count: int = 1) -> Claim:
    occurrence = Occurrence.of("redbeat:", stored.entry.name, nominal)
    return Claim(stored, LATER.timestamp(), Meta(nominal, count), occurrence)


def clock_of(app: Celery, client: Redis, progress: Callable[[], None] = lambda: None) -> Clock:
    return Clock(client, Keys.of(app), progress=progress)


# ---------------------------------------------------------------- what is due


def test_an_empty_schedule_has_nothing_due(store):
    assert due(store) == Due(entries=[], recovered=[], next_score=None, more=False, statics_gone=True)


def test_due_entries_come_in_the_order_of_their_times_with_the_next_time(store, put):
    at = NOW.timestamp()
    for name, score in {
        "late": at,
        "future": at + 9.5,
        "first": 0,
        "far": at + 99,
        "parked": PARKED,
        "b": at - 5,
    }.items():
        put(name, score=score)

    found = due(store)

    assert [(stored.entry.name, stored.score) for stored in found.entries] == [
        ("first", 0),
        ("b", at - 5),
        ("late", at),
    ]
    assert found.next_score == at + 9.5
    assert (found.recovered, found.more) == ([], False)


def test_a_read_entry_carries_all_that_is_needed_to_decide(store, put, app):
    put("e", meta=Meta(NOW, 4).encode(), policy='{"misfire_grace_time": 90, "jitter": null}')

    (stored,) = due(store).entries

    assert stored.member == stored.entry.key == "redbeat:e"
    assert (stored.meta, stored.pending, stored.policy) == (Meta(NOW, 4), None, EntryPolicy(misfire_grace_time=90.0))
    assert stored.entry.schedule == schedule(60)


class CountingConnection(UnixDomainSocketConnection):
    """Counts what it sends: one for each command alone, one for a whole pipeline."""

    sent = 0

    def send_packed_command(self, *args, **kwargs):
        type(self).sent += 1
        return super().send_packed_command(*args, **kwargs)


@pytest.fixture
def round_trips(server) -> Iterator[Callable[[Callable[[Redis], object]], int]]:
    pool = ConnectionPool(connection_class=CountingConnection, path=str(server.path), decode_responses=True)
    with Redis(connection_pool=pool) as client:

        def count(work: Callable[[Redis], object]) -> int:
            client.ping()
            before = CountingConnection.sent
            work(client)
            return CountingConnection.sent - before

        yield count


@pytest.mark.parametrize("number", [1, 40, 500])
def test_due_entries_take_two_round_trips_however_many_they_are(app, redis, put, round_trips, number):
    for at in range(number):
        put(f"e{at}", meta=Meta(NOW).encode())
    due(Store(app, redis))  # else the server does not know the script yet

    assert round_trips(lambda client: len(due(Store(app, client)).entries)) == 2


def test_nothing_due_takes_one_round_trip(app, put, round_trips):
    put(score=LATER.timestamp())

    assert round_trips(lambda client: due(Store(app, client))) == 1


def test_the_clock_is_checked_without_a_scan_of_entries_far_ahead(app, put, redis, round_trips):
    for at in range(40):
        put(f"e{at}", score=LATER.timestamp() + at * 10**6, meta=Meta(LATER + timedelta(days=at), 1).encode())
    clock_of(app, redis).check(NOW, TERM)  # else the server does not know the script yet
    redis.delete("redbeat::clock")

    assert round_trips(lambda client: clock_of(app, client).check(NOW, TERM)) == 3

    def check(client: Redis) -> None:
        clock = clock_of(app, client)
        for seconds in range(10):
            clock.check(NOW + timedelta(seconds=seconds), TERM)

    assert round_trips(check) == 1


@pytest.mark.parametrize("text", ["soon", "nan", "1e300", ""])
def test_a_stored_time_that_is_none_is_replaced(app, redis, text):
    redis.set("redbeat::clock", text)

    clock_of(app, redis).check(NOW, TERM)

    assert float(redis.get("redbeat::clock")) == NOW.timestamp()


def test_a_time_that_is_stored_as_another_type_is_replaced(app, redis):
    clock = clock_of(app, redis)
    clock.check(NOW, TERM)
    redis.delete("redbeat::clock")
    redis.hset("redbeat::clock", "any", "program")
    later = NOW + timedelta(minutes=1)

    with pytest.raises(ResponseError, match="WRONGTYPE"):  # said once, as trouble
        clock.check(later, TERM)

    assert clock.check(later, TERM) is None
    assert float(redis.get("redbeat::clock")) == later.timestamp()


@pytest.mark.parametrize(
    ("terms", "is_noticed"), [(0, True), (1, True), (2, False)], ids=["same term", "next term", "another led"]
)
def test_changes_that_the_server_has_forgotten_are_noticed_once(app, redis, terms, is_noticed):
    """A server that starts from a snapshot: what another leader has written since is not known to this one."""
    clock, minute = clock_of(app, redis), timedelta(minutes=1)
    assert clock.check(NOW, TERM) is None
    snapshot = redis.get("redbeat::clock")
    assert clock.check(NOW + minute, TERM) is None
    redis.set("redbeat::clock", snapshot)

    term = TERM if not terms else Term(TERM.number + terms, "later")

    assert clock.check(NOW + 2 * minute, term) == (NOW if is_noticed else None)
    assert clock.check(NOW + 3 * minute, term) is None


@pytest.mark.parametrize("terms", [0, 1], ids=["same term", "next term"])
def test_forgotten_changes_are_told_though_an_error_follows(app, redis, terms, monkeypatch):
    """They are told by the next check."""
    clock, minute = clock_of(app, redis), timedelta(minutes=1)
    clock.check(NOW, TERM)
    snapshot = redis.get("redbeat::clock")
    clock.check(NOW + minute, TERM)
    redis.set("redbeat::clock", snapshot)
    term = Term(TERM.number + terms, "later") if terms else TERM

    def fail(*_: object, **__: object) -> None:
        raise RedisConnectionError

    monkeypatch.setattr(clock.client, "zrangebyscore", fail)
    with pytest.raises(RedisConnectionError):
        clock.check(NOW + 2 * minute, term)
    monkeypatch.undo()

    assert clock.check(NOW + 2 * minute, term) == NOW
    assert clock.check(NOW + 3 * minute, term) is None


def test_a_request_that_the_network_delays_stores_no_old_time(app, redis):
    """The client has repeated it long ago: the old time would look as if the server had lost changes."""
    clock, minute, sent = clock_of(app, redis), timedelta(minutes=1), []
    with redis.monitor() as monitor:
        clock.check(NOW, TERM)
        clock.check(NOW + minute, TERM)
        redis.ping()
        for seen in iter(monitor.next_command, None):
            if seen["command"] == "PING":
                break
            if seen["command"].startswith("EVALSHA ") and "redbeat::clock" in seen["command"]:
                sent.append(seen["command"].split(" "))
    clock.check(NOW + 2 * minute, TERM)

    assert len(sent) == 2
    for command in sent:
        redis.execute_command(*command)

    assert clock.check(NOW + 3 * minute, TERM) is None


def test_a_leader_that_another_has_followed_stores_no_old_time(app, redis):
    """It was stopped amid its tick: its old time would look to the other as if the server had lost changes."""
    stopped, other, minute = clock_of(app, redis), clock_of(app, redis), timedelta(minutes=1)
    stopped.check(NOW, TERM)
    later = Term(TERM.number + 1, "later")
    other.check(NOW + minute, later)
    other.check(NOW + 2 * minute, later)

    stopped.check(NOW + minute, TERM)

    assert other.check(NOW + 3 * minute, later) is None


@pytest.mark.parametrize("terms", [0, 1])
def test_the_time_of_a_beat_beside_the_leader_is_no_loss(app, redis, terms):
    """A beat without leadership stores the time of its tick, too, perhaps a moment after the leader."""
    clock, minute = clock_of(app, redis), timedelta(minutes=1)
    clock.check(NOW, TERM)
    redis.set("redbeat::clock", repr((NOW - timedelta(milliseconds=20)).timestamp()))

    term = Term(TERM.number + 1, "later") if terms else TERM

    assert clock.check(NOW + minute, term) is None


@pytest.mark.parametrize("term", [TERM, OFF], ids=["leader", "shared"])
def test_a_server_that_comes_back_with_a_wrong_time_silences_no_entry(app, put, redis, term):
    """From a snapshot: the term of the leader goes on."""
    clock, ahead = clock_of(app, redis), NOW + timedelta(days=10)
    clock.check(NOW, term)
    put("e", score=(ahead + timedelta(hours=1)).timestamp(), meta=Meta(ahead, 1).encode())
    redis.set("redbeat::clock", repr(ahead.timestamp()))

    for seconds in (15, 16, 30):
        clock.check(NOW + timedelta(seconds=seconds), term)

    assert redis.zscore(SCHEDULE, "redbeat:e") == WRONG_PAST
    assert float(redis.get("redbeat::clock")) == NOW.timestamp() + 30


@pytest.mark.parametrize("another_led", [False, True])
def test_a_jump_of_the_clock_is_known_until_another_beat_leads(app, redis, another_led):
    """By the other, the clock may have been set right."""
    clock, later = clock_of(app, redis), NOW + timedelta(hours=5)
    clock.check(NOW, TERM)
    clock.check(later, TERM)
    assert clock.jump == Jump(NOW, later)
    redis.set("redbeat::clock", repr(NOW.timestamp()))

    clock.check(NOW + timedelta(minutes=1), Term(TERM.number + 1 + another_led, "later"))

    assert (clock.jump is None) is another_led


def test_a_scan_of_all_entries_reports_its_progress(app, put, redis):
    for at in range(1001):
        put(f"e{at}", definition="{}", score=NOW.timestamp() + 10**6)
    steps: list[None] = []
    clock = clock_of(app, redis, lambda: steps.append(None))

    clock.check(NOW, TERM)
    clock.check(NOW - timedelta(days=1), TERM)

    assert len(steps) >= 3, "one for each batch at least"


def test_claims_and_confirmations_take_one_round_trip_each(app, put, round_trips):
    taken = {}

    def take(client: Redis) -> None:
        store = Store(app, client)
        taken["claims"] = [claim_of(stored) for stored in due(store).entries]
        assert set(store.claim(taken["claims"], OFF, retry_at=RETRY_AT)) == {ClaimVerdict.CLAIMED}

    def confirm(client: Redis) -> None:
        Store(app, client).confirm([Confirmation(c.stored, dispatched(c)) for c in taken["claims"]], OFF)

    for nominal in (NOW, NOW):  # the first time, the server has to learn the scripts
        for at in range(40):
            put(f"e{at}", score=nominal.timestamp())
        counts = round_trips(take), round_trips(confirm)

    assert counts == (3, 1)  # two of them to read


def test_more_than_one_batch_is_read_batch_by_batch(store, put, redis):
    for at in range(501):
        put(f"e{at}", score=at + 1)

    first = due(store)
    redis.zrem(SCHEDULE, *(stored.member for stored in first.entries))
    second = due(store)

    assert (len(first.entries), first.more) == (500, True)
    assert ([stored.score for stored in second.entries], second.more) == ([501], False)


def test_a_bare_name_in_the_schedule_means_the_entry_of_that_name(store, put, redis):
    put("e")
    redis.delete(SCHEDULE)
    redis.zadd(SCHEDULE, {"e": NOW.timestamp()})

    (stored,) = due(store).entries

    assert (stored.member, stored.entry.name) == ("e", "e")
    assert store.claim([claim_of(stored)], OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]
    assert dict(redis.zrange(SCHEDULE, 0, -1, withscores=True)) == {"e": LATER.timestamp()}
    assert redis.zrange(PENDING, 0, -1) == ["redbeat:e"], "as of an entry with a place under its key"
    assert Meta.decode(redis.hget("redbeat:e", "meta")) == Meta(NOW, 1)


def test_an_occurrence_pending_under_both_members_is_recovered_once(store, put, redis):
    put("e", pending=Occurrence.of("redbeat:", "e", NOW).encode())
    redis.zadd(PENDING, {"redbeat:e": 1, "e": 2})

    recovered = due(store).recovered

    assert [stored.entry.name for stored in recovered] == ["e"]
    assert redis.zrange(PENDING, 0, -1) == [stored.member for stored in recovered]


@pytest.mark.parametrize("first", ["redbeat:e", "e"])
def test_an_entry_with_two_places_is_decided_about_once(store, put, redis, first):
    put("e", meta=Meta(NOW - timedelta(hours=1), 1).encode())
    redis.zadd(SCHEDULE, {"redbeat:e": 2, "e": 2} | {first: 1})

    (stored,) = due(store).entries
    claim = claim_of(stored)
    store.claim([claim], OFF, retry_at=RETRY_AT)
    store.confirm([claim.claimed.confirmation(Decision("e", TASK, claim.occurrence, DecisionType.DISPATCHED))], OFF)

    assert stored.member == first
    assert redis.zcard(PENDING) == 0
    (second,) = due(store).entries
    assert (second.member, second.pending) == (({"redbeat:e", "e"} - {first}).pop(), None)


def test_a_bare_name_that_an_older_beat_made_pending_is_dropped(store, put, redis):
    occurrence = Occurrence.of("redbeat:", "e", NOW)
    put("e", meta=Meta(NOW, 1).encode(), pending=occurrence.encode())
    redis.zadd(PENDING, {"e": 1})

    (stored,) = store.retake(due(store).recovered, OFF, retry_at=RETRY_AT)
    decision = Decision("e", TASK, occurrence, DecisionType.DISPATCHED)
    store.confirm([ClaimedOccurrence(stored, occurrence, stored.meta).confirmation(decision)], OFF)
    due(store, now=RETRY_AT)

    assert redis.hget("redbeat:e", "pending") is None
    assert redis.zcard(PENDING) == 0


def test_it_is_noticed_that_the_statics_are_gone(store, redis):
    assert due(store).statics_gone is True
    redis.sadd(STATICS, "e")

    assert due(store).statics_gone is False


def test_an_edited_definition_is_read_at_once(store, put, app):
    put()
    due(store)
    put(definition=Entry("e", TASK, schedule(5), app=app).encode())

    (stored,) = due(store).entries

    assert stored.entry.schedule == schedule(5)


def test_equal_definitions_of_two_entries_are_two_entries(store, put, app):
    text = Entry("any", TASK, schedule(60), app=app).encode()
    for name in ("a", "b"):
        put(name, definition=text)

    assert [stored.entry.name for stored in due(store).entries] == ["a", "b"]


# ---------------------------------------------------------------- claim


def test_a_claim_moves_the_entry_on_and_keeps_its_occurrence(store, put, redis):
    key = put(policy='{"note": "mine"}')
    (stored,) = due(store).entries
    claim = claim_of(stored, count=7)

    assert store.claim([claim], OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]

    assert redis.zscore(SCHEDULE, key) == LATER.timestamp()
    assert redis.zscore(PENDING, key) == RETRY_AT.timestamp()
    assert Occurrence.decode(redis.hget(key, "pending")) == claim.occurrence
    assert Meta.decode(redis.hget(key, "meta")) == Meta(NOW, 7)
    assert redis.hget(key, "policy") == '{"note": "mine"}'
    assert due(store).entries == []


def test_a_claim_without_an_occurrence_only_moves_the_entry_on(store, put, redis):
    key = put(meta=Meta(NOW, 2).encode())
    (stored,) = due(store).entries
    before = redis.hgetall(key)

    assert store.claim([Claim(stored, PARKED)], OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]

    assert redis.zscore(SCHEDULE, key) == PARKED
    assert redis.hgetall(key) == before
    assert redis.exists(PENDING) == 0


def test_times_are_kept_to_the_microsecond(store, put, redis):
    moment = NOW + timedelta(microseconds=123_457)
    put(score=moment.timestamp())
    (stored,) = due(store, now=LATER).entries
    claim = Claim(stored, (moment + timedelta(hours=2)).timestamp())

    assert store.claim([claim], OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]

    assert redis.zscore(SCHEDULE, "redbeat:e") == (moment + timedelta(hours=2)).timestamp()


def test_the_leader_claims(store, put, redis):
    put()
    redis.set(LOCK, TERM.token)

    assert store.claim([claim_of(s) for s in due(store).entries], TERM, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]


def test_an_unconfirmed_occurrence_does_not_keep_an_entry_from_moving_on(store, put, redis):
    key = put(pending='{"id": "x", "nominal": 1.0}')
    (stored,) = due(store).entries

    assert store.claim([Claim(stored, LATER.timestamp())], OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]

    assert redis.zscore(SCHEDULE, key) == LATER.timestamp()
    assert redis.hget(key, "pending") == '{"id": "x", "nominal": 1.0}'


REFUSALS = {
    "another leads": (ClaimVerdict.FENCED, TERM, lambda redis, app: redis.set(LOCK, "another's")),
    "no beat leads": (ClaimVerdict.FENCED, TERM, lambda redis, app: redis.delete(LOCK)),
    "its time was changed": (ClaimVerdict.MOVED, OFF, lambda redis, app: redis.zincrby(SCHEDULE, 0.001, "redbeat:e")),
    "it was parked": (ClaimVerdict.MOVED, OFF, lambda redis, app: redis.zadd(SCHEDULE, {"redbeat:e": PARKED})),
    "its definition was changed": (
        ClaimVerdict.MOVED,
        OFF,
        lambda redis, app: redis.hset("redbeat:e", "definition", Entry("e", TASK, schedule(5), app=app).encode()),
    ),
    "it was paused": (ClaimVerdict.MOVED, OFF, lambda redis, app: Schedule(app).pause("e")),
    "its policy was changed": (
        ClaimVerdict.MOVED,
        OFF,
        lambda redis, app: redis.hset("redbeat:e", "policy", '{"max_runs": 2}'),
    ),
    "another program has counted a run": (
        ClaimVerdict.MOVED,
        OFF,
        lambda redis, app: redis.hset("redbeat:e", "meta", Meta(NOW, 3).encode()),
    ),
    "it counts from another moment": (
        ClaimVerdict.MOVED,
        OFF,
        lambda redis, app: redis.hset("redbeat:e", "since", Meta(NOW, 2, NOW).encode_since()),
    ),
    "its hash was deleted": (ClaimVerdict.MOVED, OFF, lambda redis, app: redis.delete("redbeat:e")),
    "its definition was deleted": (ClaimVerdict.MOVED, OFF, lambda redis, app: redis.hdel("redbeat:e", "definition")),
    "it was unscheduled": (ClaimVerdict.MOVED, OFF, lambda redis, app: redis.zrem(SCHEDULE, "redbeat:e")),
    "it was deleted": (ClaimVerdict.MOVED, OFF, lambda redis, app: redis.delete("redbeat:e", SCHEDULE)),
    "its last occurrence is not confirmed": (
        ClaimVerdict.PENDING,
        OFF,
        lambda redis, app: redis.hset("redbeat:e", "pending", "{}") and redis.zadd(PENDING, {"redbeat:e": 5}),
    ),
}


@pytest.mark.parametrize("meanwhile", REFUSALS)
def test_a_refused_claim_writes_nothing(store, put, app, redis, meanwhile):
    verdict, term, happens = REFUSALS[meanwhile]
    put(meta=Meta(NOW, 2).encode())
    redis.set(LOCK, term.token)
    claims = [claim_of(stored) for stored in due(store).entries]
    happens(redis, app)
    before = contents(redis)

    assert store.claim(claims, term, retry_at=RETRY_AT) == [verdict]

    assert contents(redis) == before


def test_a_claim_is_refused_if_the_pending_run_is_confirmed_by_now(store, put, redis):
    """Whether that run counts was not known when the next one was decided on."""
    key = put(pending=Occurrence.of("redbeat:", "e", NOW - timedelta(minutes=1)).encode())
    claims = [claim_of(stored) for stored in due(store).entries]
    redis.hdel(key, "pending")
    before = contents(redis)

    assert store.claim(claims, OFF, retry_at=RETRY_AT) == [ClaimVerdict.MOVED]
    assert contents(redis) == before


def test_a_refused_claim_recovers_an_occurrence_lost_from_the_pending_set(store, put, redis):
    key = put(pending=Occurrence.of("redbeat:", "e", NOW - timedelta(minutes=1)).encode())
    claims = [claim_of(stored) for stored in due(store).entries]

    assert store.claim(claims, OFF, retry_at=RETRY_AT) == [ClaimVerdict.PENDING]

    assert redis.zscore(PENDING, key) == RETRY_AT.timestamp()
    assert [stored.member for stored in due(store, now=RETRY_AT).recovered] == [key]


def test_entries_behind_those_that_a_tick_has_passed_are_found(store, put):
    for name, seconds in {"a": 3, "b": 2, "c": 1}.items():
        put(name, score=NOW.timestamp() - seconds)

    assert [stored.entry.name for stored in store.due(NOW, all_pending=False, start=2).entries] == ["c"]


TEXTS = [b"\xc3\xa9 \xe2\x88\x91 \xf0\x9f\x98\x80", b'\\" \\\\ / \\/', b"\x7f", b"\\ud800 \\u0000", b"\xff\xfe"]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_an_entry_with_any_bytes_of_other_programs_is_claimed(store, put, redis, app, text):
    key = put(policy='{"note": "?"}', meta='{"last_run_at": null, "any": "?"}')
    definition = Entry("e", TASK, schedule(60), ["?"], app=app).encode()
    for field, value in {**redis.hgetall(key), "definition": definition}.items():
        redis.hset(key, field, value.encode().replace(b"?", text))

    claims = [claim_of(stored) for stored in due(store).entries]

    assert store.claim(claims, OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]


def test_a_refused_claim_does_not_hinder_the_others(store, put, redis):
    for name in ("a", "b", "c"):
        put(name)
    claims = [claim_of(stored) for stored in due(store).entries]
    redis.delete("redbeat:b")

    verdicts = store.claim(claims, OFF, retry_at=RETRY_AT)

    assert verdicts == [ClaimVerdict.CLAIMED, ClaimVerdict.MOVED, ClaimVerdict.CLAIMED]


def test_a_second_claim_of_the_same_occurrence_is_refused(store, put):
    put()
    claims = [claim_of(stored) for stored in due(store).entries]
    store.claim(claims, OFF, retry_at=RETRY_AT)

    assert store.claim(claims, OFF, retry_at=RETRY_AT + ANOTHER_TICK) == [ClaimVerdict.MOVED]


def test_of_two_claims_at_once_exactly_one_wins(app, put, server, redis):
    number = 300
    for at in range(number):
        put(f"e{at}")
    stores = [Store(app, server.client()) for _ in range(2)]
    read = [due(store).entries for store in stores]
    verdicts = []

    def take(store: Store, entries: list[Stored], retry_at: datetime) -> None:
        for at in range(0, number, 10):
            claims = [claim_of(stored) for stored in entries[at : at + 10]]
            verdicts.append(list(zip(claims, store.claim(claims, OFF, retry_at=retry_at), strict=True)))

    # One goes forward and one backward: they meet, wherever that is.
    at_once(
        lambda: take(stores[0], read[0], RETRY_AT),
        lambda: take(stores[1], read[1][::-1], RETRY_AT + ANOTHER_TICK),
    )

    all_of_them = [pair for batch in verdicts for pair in batch]
    won = Counter(claim.stored.member for claim, verdict in all_of_them if verdict is ClaimVerdict.CLAIMED)
    assert len(all_of_them) == 2 * number
    assert won == Counter(f"redbeat:e{at}" for at in range(number))
    assert redis.zcard(PENDING) == number


# ---------------------------------------------------------------- confirm, postpone, recover


def dispatched(claim: Claim, outcome: DecisionType = DecisionType.DISPATCHED, reason: str = "") -> Decision:
    return Decision(claim.stored.entry.name, TASK, claim.occurrence, outcome, reason)


@pytest.fixture
def claimed(put) -> Callable[..., Claim]:
    """Makes an entry and claims its occurrence."""

    def claimed(store: Store, name: str = "e") -> Claim:
        put(name)
        (stored,) = (stored for stored in due(store).entries if stored.entry.name == name)
        claim = claim_of(stored)
        assert store.claim([claim], OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED]
        return claim

    return claimed


def test_a_confirmed_occurrence_is_pending_no_longer_and_in_the_history(store, claimed, redis):
    claim = claimed(store)

    store.confirm([Confirmation(claim.stored, dispatched(claim, DecisionType.SKIPPED_OVERLAP, 'held "by" x'))], TERM)

    assert redis.hget("redbeat:e", "pending") is None
    assert redis.exists(PENDING) == 0
    assert Meta.decode(redis.hget("redbeat:e", "meta")) == claim.meta
    ((_, record),) = redis.xrange(HISTORY)
    assert record == {
        "entry": "e",
        "task": TASK,
        "nominal": "2030-01-01T12:00:00.000+00:00",
        "kind": "scheduled",
        "decision": "skipped_overlap",
        "reason": 'held "by" x',
        "id": claim.occurrence.id,
        "term": "3",
        "holder": "",
        "leader": f"{socket.gethostname()}:{os.getpid()}",
        "holder_entry": "",
    }


def test_a_confirmation_may_change_the_past(store, claimed, redis):
    claim = claimed(store)

    store.confirm([Confirmation(claim.stored, dispatched(claim), Meta(NOW, 0))], OFF)

    assert Meta.decode(redis.hget("redbeat:e", "meta")) == Meta(NOW, 0)


@pytest.mark.parametrize("kind", [DecisionType.SKIPPED_OVERLAP, DecisionType.DISPATCHED])
@pytest.mark.parametrize("edited", [False, True])
def test_only_what_was_sent_by_a_clock_ahead_is_remembered(store, claimed, redis, app, kind, edited):
    """The clock was set right while the occurrence was pending."""
    claim = claimed(store)
    ahead = replace(claim.meta, since=NOW - timedelta(hours=5), ahead=claim.meta.last_run_at)
    redis.hset("redbeat:e", "since", ahead.encode_since())
    stored = store.due(LATER, all_pending=True).recovered[0]
    assert stored.meta.ahead == claim.meta.last_run_at
    if edited:
        redis.hset("redbeat:e", "since", edit := replace(ahead, since=NOW - timedelta(hours=4)).encode_since())

    retaken = ClaimedOccurrence(stored, stored.pending, stored.meta)
    store.confirm([retaken.confirmation(dispatched(claim, kind))], OFF)

    if edited:
        assert redis.hget("redbeat:e", "since") == edit
    else:
        expected = ahead if kind is DecisionType.DISPATCHED else replace(ahead, ahead=None)
        found = Entry.from_key("redbeat:e", app=app).meta
        assert (found.since, found.ahead) == (expected.since, expected.ahead)


def test_a_confirmation_keeps_the_since_of_an_edit_meanwhile(store, claimed, redis, app):
    claim = claimed(store)
    Schedule(app).upsert("e", TASK, 7200)
    since = Entry.from_key("redbeat:e", app=app).meta.since

    store.confirm([Confirmation(claim.stored, dispatched(claim), Meta(NOW, 0))], OFF)

    assert since is not None
    assert Entry.from_key("redbeat:e", app=app).meta == Meta(NOW, 0, since)


def test_a_claim_removes_the_since_of_an_edit(store, put, redis):
    past = Meta(NOW - timedelta(hours=2), 4, NOW - timedelta(hours=1))
    put(meta=past.encode(), since=past.encode_since())
    (stored,) = due(store).entries
    assert stored.meta == past

    store.claim([claim_of(stored)], OFF, retry_at=RETRY_AT)

    assert set(redis.hkeys("redbeat:e")) == {"definition", "meta", "pending"}


def test_a_claim_may_only_set_from_when_on_the_next_run_counts(store, put, redis, app):
    past = Meta(NOW + timedelta(days=1), 4)
    put(meta=past.encode())
    (stored,) = due(store).entries

    store.claim([Claim(stored, LATER.timestamp(), replace(past, since=NOW))], OFF, retry_at=RETRY_AT)

    assert Entry.from_key("redbeat:e", app=app).meta == replace(past, since=NOW)


def test_a_second_confirmation_does_nothing(store, claimed, redis):
    claim = claimed(store)
    store.confirm([Confirmation(claim.stored, dispatched(claim))], OFF)
    before = contents(redis)

    store.confirm([Confirmation(claim.stored, dispatched(claim), Meta(LATER, 99))], OFF)

    assert contents(redis) == before


@pytest.fixture
def told(app):
    """The names of the entries of which a decision was told, in turn."""
    told = []
    with connected(signals.occurrence_decided, lambda entry, **_: told.append(entry), sender=app):
        yield told


def test_a_run_that_another_beat_has_confirmed_is_signalled_once(store, claimed, app, told):
    claim = claimed(store)
    store.confirm([Confirmation(claim.stored, dispatched(claim))], OFF)
    another = replace(OFF, leader="another:1")
    Store(app, schedule_client(app)).confirm([Confirmation(claim.stored, dispatched(claim))], another)

    assert told == ["e"]


def test_a_sent_run_of_a_deleted_entry_is_signalled(store, claimed, redis, told):
    claim = claimed(store)
    redis.delete("redbeat:e")

    store.confirm([Confirmation(claim.stored, dispatched(claim))], OFF)

    assert told == ["e"]


def test_a_late_confirmation_leaves_a_newer_occurrence_alone(store, claimed, redis):
    claim = claimed(store)
    redis.hset("redbeat:e", "pending", Occurrence.of("redbeat:", "e", LATER).encode())
    before = contents(redis)

    store.confirm([Confirmation(claim.stored, dispatched(claim), Meta(LATER, 99))], OFF)

    assert contents(redis) == before


def test_the_confirmation_of_a_deleted_entry_does_not_bring_it_back(store, claimed, redis):
    claim = claimed(store)
    redis.delete("redbeat:e")

    store.confirm([Confirmation(claim.stored, dispatched(claim), Meta(LATER, 99))], OFF)

    assert redis.exists("redbeat:e", HISTORY) == 0


def test_the_history_is_trimmed(server, redis, put):
    with make_app(server.celery_url, {"singlebeat_history_limit": 20}) as app:
        store = Store(app, redis)
        for at in range(400):
            put(f"e{at}")
        claims = [claim_of(stored) for stored in due(store).entries]
        store.claim(claims, OFF, retry_at=RETRY_AT)

        store.confirm([Confirmation(claim.stored, dispatched(claim)) for claim in claims], OFF)

    # Redis trims in whole blocks of up to 100 records.
    assert 20 <= redis.xlen(HISTORY) <= 120
    assert redis.xrevrange(HISTORY, count=1)[0][1]["entry"] == claims[-1].stored.entry.name


def test_a_history_of_nothing_is_not_written(server, redis, claimed):
    with make_app(server.celery_url, {"singlebeat_history_limit": 0}) as app:
        store = Store(app, redis)
        claim = claimed(store)

        store.confirm([Confirmation(claim.stored, dispatched(claim))], OFF)

    assert redis.exists(HISTORY, PENDING) == 0


def test_an_unconfirmed_occurrence_is_retaken_when_its_time_has_come(store, claimed):
    claim = claimed(store)

    assert due(store).recovered == []
    (stored,) = due(store, now=RETRY_AT).recovered
    assert stored.pending == claim.occurrence
    assert due(store, now=RETRY_AT).entries == []


def test_a_new_leader_retakes_all_unconfirmed_occurrences(store, claimed):
    claimed(store)

    assert [stored.entry.name for stored in due(store, all_pending=True).recovered] == ["e"]


def test_of_two_beats_that_retake_an_occurrence_one_gets_it(store, claimed, app):
    claimed(store)
    (seen,) = due(store, now=RETRY_AT).recovered
    (also_seen,) = due(Store(app, store.client), now=RETRY_AT).recovered

    assert store.retake([seen], OFF, retry_at=LATER) == [seen]
    assert store.retake([also_seen], OFF, retry_at=LATER + ANOTHER_TICK) == []
    assert due(store, now=RETRY_AT).recovered == []
    assert due(store, now=LATER).recovered != []


def test_only_the_leader_retakes_an_occurrence(store, claimed, redis):
    claimed(store)
    seen = due(store, all_pending=True).recovered
    redis.set(LOCK, "another's")
    before = contents(redis)

    assert store.retake(seen, TERM, retry_at=LATER) == []
    assert contents(redis) == before
    redis.set(LOCK, TERM.token)
    assert store.retake(seen, TERM, retry_at=LATER) == seen


def test_a_confirmed_occurrence_is_not_retaken(store, claimed, redis):
    claim = claimed(store)
    seen = due(store, all_pending=True).recovered
    store.confirm([Confirmation(claim.stored, dispatched(claim))], OFF)

    assert store.retake(seen, OFF, retry_at=LATER) == []
    assert redis.exists(PENDING) == 0


def test_a_decision_about_an_unclaimed_occurrence_is_recorded(store, put, redis):
    put()
    claim = claim_of(due(store).entries[0])

    store.record([dispatched(claim, DecisionType.PAUSED), dispatched(claim, DecisionType.MISSED, "why")], TERM)

    records = [record for _, record in redis.xrange(HISTORY)]
    assert [(r["decision"], r["reason"], r["term"]) for r in records] == [("paused", "", "3"), ("missed", "why", "3")]
    assert {r["id"] for r in records} == {claim.occurrence.id}


def test_a_postponed_occurrence_waits(store, claimed, redis):
    claimed(store)

    store.postpone({"redbeat:e": LATER, "redbeat:confirmed meanwhile": LATER})

    assert dict(redis.zrange(PENDING, 0, -1, withscores=True)) == {"redbeat:e": LATER.timestamp()}
    assert due(store, now=RETRY_AT).recovered == []
    assert due(store, now=LATER).recovered != []


def test_postponing_nothing_is_nothing(store, redis):
    store.postpone({})

    assert redis.dbsize() == 0


def test_an_entry_made_anew_has_no_unconfirmed_occurrence(store, claimed, put, redis):
    claimed(store)
    redis.delete("redbeat:e")
    put("e", score=LATER.timestamp())

    assert due(store, all_pending=True).recovered == []
    assert redis.exists(PENDING) == 0


# ---------------------------------------------------------------- quarantine


BROKEN = {
    "invalid JSON": ("{", "definition cannot be read"),
    "no schedule": ('{"task": "t"}', "a schedule of no known kind"),
    "no definition": (None, "does not exist"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_entry_that_cannot_be_used_is_kept_parked_and_explained(store, put, redis, caplog, kind):
    definition, reason = BROKEN[kind]
    put("good")
    key = put("bad", definition=definition or "", meta=Meta(NOW, 2).encode())
    if definition is None:
        redis.delete(key)
    before = redis.hgetall(key)

    found = due(store)

    assert [stored.entry.name for stored in found.entries] == ["good"]
    assert redis.hgetall(key) == before
    assert redis.zscore(SCHEDULE, key) == QUARANTINED
    why = json.loads(redis.hget(QUARANTINE, key))
    assert set(why) == {"reason", "since"}
    assert reason in why["reason"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(why["since"])) < timedelta(minutes=5)
    assert f"Entry {key} cannot be used" in caplog.text


def test_a_key_of_another_type_is_kept_and_explained(store, put, redis):
    put("good")
    redis.set("redbeat:bad", "a text")
    redis.zadd(SCHEDULE, {"redbeat:bad": 0})

    assert [stored.entry.name for stored in due(store).entries] == ["good"]

    assert redis.get("redbeat:bad") == "a text"
    assert "something else than a hash" in redis.hget(QUARANTINE, "redbeat:bad")


def test_bytes_that_are_no_string_harm_no_other_entry(store, put, server):
    put("good")
    put("bad")
    with server.client(decode_responses=False) as raw:
        raw.hset("redbeat:bad", "definition", b"\xff\xfe")

    assert [stored.entry.name for stored in due(store).entries] == ["good"]


def test_a_member_that_is_no_string_harms_no_other_entry(store, put, server):
    put("good")
    with server.client(decode_responses=False) as raw:
        raw.zadd(SCHEDULE, {b"redbeat:\xff": 0})

    assert [stored.entry.name for stored in due(store).entries] == ["good"]


def test_meta_that_cannot_be_read_sets_the_entry_aside(store, put, redis):
    put("good")
    put("bad", meta='{"last_run_at": "yesterday"}')

    assert [stored.entry.name for stored in due(store).entries] == ["good"]

    assert "yesterday" in redis.hget(QUARANTINE, "redbeat:bad")


@pytest.mark.parametrize(
    "policy", ["{", "[]", '{"misfire_grace_time": "long"}', '{"misfire_grace_time": 0}', "[" * 200_000]
)
def test_a_policy_that_cannot_be_read_sets_the_entry_aside(store, put, redis, policy):
    put("good")
    put("bad", policy=policy)

    assert [stored.entry.name for stored in due(store).entries] == ["good"]

    assert "policy" in redis.hget(QUARANTINE, "redbeat:bad")


def test_quarantine_is_said_once(store, put, caplog):
    put("bad", definition="{")

    for _ in range(3):
        due(store)

    assert caplog.text.count("cannot be used") == 1


def test_another_reason_is_said_again(store, put, redis, caplog):
    put("bad", definition="{")
    due(store)
    put("bad", definition="[]")
    due(store)

    assert caplog.text.count("cannot be used") == 2
    assert "not a JSON object" in redis.hget(QUARANTINE, "redbeat:bad")


def test_a_broken_entry_that_is_scheduled_again_is_parked_again(store, put, redis):
    put("bad", definition="{")
    due(store)

    put("bad", definition="{")
    due(store)

    assert redis.zscore(SCHEDULE, "redbeat:bad") == QUARANTINED


def test_a_recovered_entry_is_due_again_without_being_scheduled(store, put, app, redis, caplog):
    caplog.set_level("INFO")
    key = put("bad", definition="{")
    due(store)

    redis.hset(key, "definition", Entry("bad", TASK, schedule(60), app=app).encode())
    due(store)

    assert redis.exists(QUARANTINE) == 0
    assert f"Entry {key} is usable again" in caplog.text
    assert [stored.entry.name for stored in due(store).entries] == ["bad"]


@pytest.mark.parametrize("lost", ["all", "one"])
@pytest.mark.parametrize("restarted", [True, False], ids=["another beat", "the same beat"])
def test_quarantined_entries_are_checked_again_when_their_records_are_gone(app, put, redis, lost, restarted):
    store, keys = Store(app, redis), [put(name, definition="{") for name in ("bad", "mended")]
    put("finished", score=PARKED)
    due(store)
    due(store)
    redis.hset(keys[1], "definition", Entry("mended", TASK, schedule(60), app=app).encode())
    if lost == "all":
        redis.delete(QUARANTINE)
    else:
        redis.hdel(QUARANTINE, keys[1])
    if restarted:
        store = Store(app, redis)

    found = [stored.entry.name for _ in range(3) for stored in due(store).entries]

    assert set(found) == {"mended"}
    assert redis.hkeys(QUARANTINE) == [keys[0]]
    assert redis.zscore(SCHEDULE, "redbeat:finished") == PARKED


def test_every_recovered_entry_is_found_however_many_are_broken(store, put, app, redis):
    keys = [put(f"bad{at}", definition="{") for at in range(250)]
    due(store)
    assert redis.hlen(QUARANTINE) == 250
    good = Entry("good", TASK, schedule(60), app=app).encode()
    mended = set(redis.hkeys(QUARANTINE)[-3:])
    assert mended < set(keys)
    for key in mended:
        redis.hset(key, "definition", good)

    for _ in range(10):
        due(store)

    assert not mended & set(redis.hkeys(QUARANTINE))


@pytest.mark.parametrize("deleted_by", [Entry, RedBeatSchedulerEntry])
def test_a_deleted_entry_leaves_quarantine(store, put, app, redis, deleted_by):
    put("bad", definition="{")
    due(store)

    deleted_by("bad", TASK, schedule(60), app=app).delete()
    for _ in range(2):
        due(store)

    assert redis.exists(QUARANTINE) == 0


def test_an_entry_deleted_with_an_unconfirmed_occurrence_is_no_trouble(store, claimed, app, redis, caplog):
    claimed(store)
    Entry("e", TASK, schedule(60), app=app).delete()

    due(store, all_pending=True)

    assert redis.keys() == [CHANGES]
    assert caplog.records == []


def test_an_unconfirmed_occurrence_of_a_broken_entry_is_not_retaken(store, claimed, redis):
    claimed(store)
    redis.hset("redbeat:e", "definition", "{")

    assert due(store, all_pending=True).recovered == []
    assert redis.exists(PENDING) == 0


# ---------------------------------------------------------------- the entries of beat_schedule


@pytest.fixture
def install(app, redis) -> Callable[..., Mapping[str, EntryError | None]]:
    """Installs entries as a leader does with those of ``beat_schedule``."""

    def install(now: datetime | None = None, **schedules: object) -> Mapping[str, EntryError | None]:
        entries = {
            name: given if isinstance(given, Entry) else Entry(name, TASK, given, app=app)
            for name, given in schedules.items()
        }
        statics = Statics(app, schedule_client(app))
        problems = statics.install(entries, now or datetime.now(UTC))
        statics.keep(entries, [name for name, problem in problems.items() if problem is None])
        return problems

    return install


def test_a_new_static_entry_is_due_after_its_interval(install, redis, app):
    now = datetime.now(UTC)

    install(now, e=schedule(3600))

    assert redis.smembers(STATICS) == {"e"}
    past = Meta.decode(redis.hget("redbeat:e", "meta"))
    assert (abs(past.last_run_at - now) < timedelta(minutes=1), past.total_run_count) == (True, 0)
    assert redis.zscore(SCHEDULE, "redbeat:e") == (past.last_run_at + timedelta(hours=1)).timestamp()
    assert redis.hget("redbeat:e", "definition") == Entry("e", TASK, schedule(3600), app=app).encode()


def test_a_static_entry_keeps_its_past_and_its_change_counts_from_now(install, redis):
    now = datetime.now(UTC)
    past = Meta(now - timedelta(minutes=30), 12)
    install(e=schedule(3600))
    redis.hset("redbeat:e", "meta", past.encode())

    install(now, e=schedule(7200))

    assert Meta.decode(*redis.hmget("redbeat:e", "meta", "since")) == replace(past, since=now)
    assert redis.zscore(SCHEDULE, "redbeat:e") == (now + timedelta(hours=2)).timestamp()


def test_a_static_entry_stays_paused(install, redis, app):
    install(e=schedule(3600))
    entry = Entry.from_key("redbeat:e", app=app)
    entry.enabled = False
    entry.save()

    for _ in range(2):
        install(e=Entry("e", TASK, schedule(3600), args=["new"], app=app))

    definition = json.loads(redis.hget("redbeat:e", "definition"))
    assert (definition["enabled"], definition["args"]) == (False, ["new"])


@pytest.mark.parametrize("meanwhile", ["resume", "enable", "delete"])
@pytest.mark.parametrize("how", ["upsert", "save", "install"])
def test_an_entry_that_is_let_go_on_while_it_is_replaced_goes_on(install, app, monkeypatch, how, meanwhile):
    """What the first attempt took over from the stored entry has changed before the second one."""
    entries, write = Schedule(app), save._write
    install(e=schedule(3600))
    off = entries.get("e")
    off.enabled = meanwhile != "enable"
    entries.save(off)
    if meanwhile != "enable":
        entries.pause("e", "an audit")

    def write_late(*args: Any) -> Any:
        monkeypatch.undo()
        if meanwhile == "enable":
            on = entries.get("e")
            on.enabled = True
            entries.save(on)
        else:
            assert getattr(entries, meanwhile)("e")
        return write(*args)

    monkeypatch.setattr(save, "_write", write_late)
    new = Entry("e", TASK, schedule(60), app=app)
    if how == "upsert":
        entries.upsert("e", TASK, 60)
    elif how == "save":
        new.save()
    else:
        install(e=new)

    stored = entries.get("e")
    assert (stored.schedule, stored.enabled) == (schedule(60), True)
    assert (stored.policy.paused, stored.policy.note) == (False, "")


@pytest.mark.parametrize("why", ["wrong", "a conflict"])
def test_an_entry_that_was_not_stored_takes_nothing_over(app, monkeypatch, why):
    """Its caller mends it and saves it again; the pause that was stored then has ended."""
    entries = Schedule(app)
    entries.upsert("e", TASK, 60)
    entries.pause("e", "an audit")
    entry = Entry("e", TASK, schedule(30), args=[float("nan")] if why == "wrong" else [], app=app)
    if why == "a conflict":
        monkeypatch.setattr(save, "_write", lambda client, keys, wishes, *_: [*wishes])
    with pytest.raises(EntryError):
        entry.save()
    monkeypatch.undo()

    assert entries.resume("e")
    entry.args = []
    entry.save()

    assert not entries.get("e").policy.paused


def test_an_unchanged_static_entry_keeps_its_next_time(install, redis):
    install(e=schedule(3600))
    redis.zadd(SCHEDULE, {"redbeat:e": 12345.5})
    redis.hset("redbeat:e", "meta", '{"last_run_at": "2024-01-01T00:00:00Z", "of_mine": 1}')
    before = contents(redis)

    install(e=schedule(3600))

    assert contents(redis) == before


def test_other_arguments_do_not_change_the_next_time(install, redis, app):
    install(e=schedule(3600))
    redis.zadd(SCHEDULE, {"redbeat:e": 12345.5})

    install(e=Entry("e", TASK, schedule(3600), args=["new"], app=app))

    assert redis.zscore(SCHEDULE, "redbeat:e") == 12345.5
    assert json.loads(redis.hget("redbeat:e", "definition"))["args"] == ["new"]


@pytest.mark.parametrize("new", [schedule(7200), crontab(minute=0)], ids=str)
def test_a_changed_schedule_changes_the_next_time(install, redis, new):
    install(e=schedule(3600))
    redis.zadd(SCHEDULE, {"redbeat:e": 12345.5})

    install(e=new)

    assert redis.zscore(SCHEDULE, "redbeat:e") > datetime.now(UTC).timestamp()


def test_a_static_entry_that_was_unscheduled_is_scheduled_again(install, redis):
    install(e=schedule(3600))
    redis.delete(SCHEDULE)

    install(e=schedule(3600))

    assert redis.zscore(SCHEDULE, "redbeat:e") > datetime.now(UTC).timestamp()


@pytest.mark.parametrize("broken", [{"definition": "{"}, {"definition": "{", "meta": "["}, {"meta": "["}], ids=str)
def test_a_broken_static_entry_is_replaced(install, put, store, redis, broken):
    put("e", score=0, **broken)
    due(store)
    assert redis.hexists(QUARANTINE, "redbeat:e")

    install(e=schedule(3600))
    due(store)

    assert redis.exists(QUARANTINE) == 0
    assert json.loads(redis.hget("redbeat:e", "definition"))["task"] == TASK


@pytest.mark.parametrize(
    "definition", ['{"enabled": false}', '{"enabled": false, "schedule": {"__type__": "crontab", "minute": "99"}}']
)
def test_a_broken_static_entry_stays_disabled(install, put, app, definition):
    put("e", definition=definition, meta=Meta(NOW, 7).encode())

    install(e=schedule(3600))

    entry = Entry.from_key("redbeat:e", app=app)
    assert (entry.enabled, entry.meta.last_run_at, entry.total_run_count) == (False, NOW, 7)


def test_a_static_name_whose_key_is_no_hash_does_not_hinder_the_others(install, redis):
    redis.set("redbeat:taken", "a text")

    install(a=schedule(60), taken=schedule(60), z=schedule(60))

    assert redis.get("redbeat:taken") == "a text"
    assert redis.exists("redbeat:a", "redbeat:z") == 2


def test_a_static_entry_that_cannot_be_stored_does_not_hinder_the_others(install, redis, app):
    problems = install(a=schedule(60), bad=Entry("bad", TASK, schedule(60), args=[object()], app=app), z=schedule(60))

    assert set(redis.keys("redbeat:?*")) - {SCHEDULE, STATICS, OWNERS, CHANGES} == {"redbeat:a", "redbeat:z"}
    assert [name for name, problem in problems.items() if problem is None] == ["a", "z"]
    assert "entry 'bad' cannot be stored" in str(problems["bad"])


def test_static_entries_that_were_removed_go_and_others_stay(install, put, redis):
    put("foreign", score=5)
    install(a=schedule(60), b=schedule(60))

    install(b=schedule(60))

    assert set(redis.keys()) == {
        "redbeat:foreign",
        "redbeat:b",
        "redbeat::parked:a",
        SCHEDULE,
        STATICS,
        OWNERS,
        CHANGES,
    }
    assert redis.smembers(STATICS) == {"b"}
    assert set(redis.zrange(SCHEDULE, 0, -1)) == {"redbeat:foreign", "redbeat:b"}


def test_static_entries_of_another_app_under_the_same_prefix_stay(install, redis, server):
    install(mine=schedule(60))
    with Celery("another", broker=server.celery_url, set_as_current=False) as another:
        another.conf.redbeat_redis_url = server.url
        statics = Statics(another, redis)
        statics.install({"theirs": Entry("theirs", TASK, schedule(60), app=another)}, datetime.now(UTC))
        statics.keep(["theirs"], ["theirs"])

    install()

    assert redis.smembers(STATICS) == {"theirs"}
    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:theirs"]


def test_static_entries_that_redbeat_has_installed_are_pruned(install, put, redis):
    put("old")
    redis.sadd(STATICS, "old")

    install(new=schedule(60))

    assert redis.smembers(STATICS) == {"new"}
    assert redis.exists("redbeat:old") == 0


def test_the_last_static_entry_goes_too(install, redis):
    install(a=schedule(60))

    install()

    assert set(redis.keys()) == {"redbeat::parked:a", CHANGES}


def test_a_removed_static_entry_leaves_only_its_copy_behind(store, install, put, redis):
    install(pending=schedule(60), broken=schedule(60))
    redis.zadd(SCHEDULE, dict.fromkeys(["redbeat:pending", "redbeat:broken"], 1))
    store.claim([claim_of(s) for s in due(store).entries if s.entry.name == "pending"], OFF, retry_at=RETRY_AT)
    redis.hset("redbeat:broken", "definition", "{")
    due(store)
    assert redis.exists(PENDING, QUARANTINE) == 2

    install()

    assert set(redis.keys()) == {"redbeat::parked:pending", "redbeat::parked:broken", CHANGES}
    assert redis.hexists("redbeat::parked:pending", "pending"), "it was claimed, so nothing else would send it"


def test_a_static_entry_that_comes_back_is_as_it_was(install, redis, app):
    """As after a deploy that was rolled back."""
    then = datetime.now(UTC) - timedelta(days=1)
    install(then, e=schedule(3600), off=schedule(3600), other=schedule(60))
    Schedule(app).pause("e", "until the audit is over")
    off = Schedule(app).get("off")
    off.enabled = False
    off.save()
    redis.hset("redbeat:e", mapping={"meta": Meta(then, 7).encode(), "history": "a line"})
    install(then, other=schedule(60))
    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:other"]
    assert [entry.name for entry in Schedule(app).list()] == ["other"]
    assert redis.ttl("redbeat::parked:e") > 86_400
    now = datetime.now(UTC)

    install(now, e=schedule(3600), off=schedule(3600), other=schedule(60))

    entry = Schedule(app).get("e")
    assert (entry.policy.paused, entry.policy.note) == (True, "until the audit is over")
    hour = timedelta(hours=1)
    passed = then + (now - then) // hour * hour
    assert (entry.meta, redis.hget("redbeat:e", "history")) == (Meta(then, 7, since=passed), "a line")
    assert redis.zscore(SCHEDULE, "redbeat:e") == (passed + hour).timestamp(), "an interval keeps its pace"
    assert Schedule(app).get("off").enabled is False
    assert (redis.ttl("redbeat:e"), redis.hexists("redbeat:e", "dropped_by")) == (-1, False)
    assert not redis.keys("redbeat::parked:*")


def test_a_static_entry_that_comes_back_changed_keeps_its_past(install, redis, app):
    install(e=schedule(3600))
    redis.hset("redbeat:e", "meta", Meta(NOW, 7).encode())
    install()

    install(e=crontab(minute=0))

    entry = Schedule(app).get("e")
    assert (entry.schedule, entry.total_run_count) == (crontab(minute=0), 7)


@pytest.mark.parametrize("broken", [{"definition": "{"}, {"policy": "["}, {"meta": "["}], ids=str)
def test_a_broken_static_entry_comes_back_too(install, redis, app, broken):
    install(e=schedule(3600))
    redis.hset("redbeat:e", mapping=broken)
    install()

    install(e=schedule(3600))

    assert Schedule(app).get("e").schedule == schedule(3600)


def test_an_entry_that_was_added_meanwhile_stays_as_it_is(install, redis, app):
    install(e=schedule(3600))
    install()
    Schedule(app).upsert("e", TASK, 60, note="new")

    install(e=schedule(3600))

    assert Schedule(app).get("e").schedule == schedule(3600)
    assert not redis.exists("redbeat::parked:e"), "it would come back with an old past one day"


def test_a_deleted_entry_leaves_nothing_to_come_back(install, redis, app):
    install(e=schedule(3600))
    Schedule(app).pause("e")
    install()

    assert Schedule(app).delete("e")
    install(e=schedule(3600))

    assert not Schedule(app).get("e").policy.paused


@pytest.fixture
def install_as(redis, server) -> Iterator[Callable[..., Mapping[str, EntryError | None]]]:
    """Installs entries as the leader of another app under the same prefix."""
    apps = []

    def install(name: str, check: str = "warn", **entries: object) -> Mapping[str, EntryError | None]:
        app = Celery(name, broker=server.celery_url, set_as_current=False)
        apps.append(app)
        app.conf.singlebeat_other_app_check = check
        app.conf.redbeat_redis_url = server.url
        given = {each: Entry(each, task, schedule(60), app=app) for each, task in entries.items()}
        statics = Statics(app, redis)
        problems = statics.install(given, datetime.now(UTC))
        statics.keep(given, [name for name, problem in problems.items() if problem is None])
        return problems

    yield install
    for app in apps:
        app.close()


def test_an_entry_of_two_apps_goes_when_the_last_one_drops_it(install_as, redis):
    for app in ("shop", "crm", "shop"):
        install_as(app, both="cleanup")

    install_as("shop")
    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:both"]
    assert redis.smembers(STATICS) == {"both"}
    install_as("crm")
    assert redis.zrange(SCHEDULE, 0, -1) == []


@pytest.mark.parametrize("check", ["ignore", "warn"])
def test_apps_that_share_a_prefix_keep_entries_of_unknown_owners(install_as, redis, check):
    """Also once the owners of some entries are known again; an app alone has no others' entries to keep."""
    install_as("shop", check=check, mine="shop.bill", old="shop.bill")
    install_as("crm", check=check, theirs="crm.mail")
    redis.delete(OWNERS)

    for _ in range(2):
        install_as("shop", check=check, mine="shop.bill")

    left = {"mine", "old", "theirs"} if check == "ignore" else {"mine"}
    assert {member.removeprefix("redbeat:") for member in redis.zrange(SCHEDULE, 0, -1)} == left
    install_as("crm", check=check, theirs="crm.mail")
    install_as("crm", check=check)
    assert redis.zscore(SCHEDULE, "redbeat:theirs") is None, "it is known again whose entry it was"


def test_a_name_that_another_app_has_for_something_else_is_refused(install_as, redis):
    install_as("shop", both="shop.bill")

    problems = install_as("crm", both="crm.mail", mine="crm.mail")

    assert json.loads(redis.hget("redbeat:both", "definition"))["task"] == "shop.bill"
    assert "app shop has another entry of this name: rename one of them" in str(problems["both"])
    assert "HDEL redbeat::owners both: beat tries it again every minute" in str(problems["both"])
    assert set(redis.zrange(SCHEDULE, 0, -1)) == {"redbeat:both", "redbeat:mine"}
    install_as("shop", both="shop.bill", more="shop.bill")  # and changes it at will, as long as it is its own
    install_as("shop", both="shop.other")
    assert json.loads(redis.hget("redbeat:both", "definition"))["task"] == "shop.other"


def test_an_entry_of_another_app_does_not_come_back_under_its_name(install_as, redis, app):
    install_as("shop", both="shop.bill")
    Schedule(app).pause("both")
    install_as("shop")

    install_as("crm", both="crm.mail")

    assert not Schedule(app).get("both").policy.paused


def test_more_static_entries_than_one_batch_are_installed(install, redis):
    install(**{f"e{at}": schedule(3600) for at in range(501)})

    assert redis.zcard(SCHEDULE) == redis.scard(STATICS) == 501


# ---------------------------------------------------------------- without Redis


def test_without_redis_every_verb_says_so(own_server, app):
    store, statics = Store(app, own_server.client()), Statics(app, own_server.client())
    own_server.kill()
    stored = Stored("redbeat:e", 0, [], Entry("e", TASK, schedule(60), app=app), Meta(), EntryPolicy(), None)
    claim = claim_of(stored)

    for verb in (
        lambda: due(store),
        lambda: store.claim([claim], OFF, retry_at=RETRY_AT),
        lambda: store.confirm([Confirmation(stored, dispatched(claim))], OFF),
        lambda: store.postpone({"redbeat:e": LATER}),
        lambda: store.retake([stored], OFF, retry_at=LATER),
        lambda: store.record([dispatched(claim)], OFF),
        lambda: statics.install({"e": stored.entry}, NOW),
        lambda: statics.keep(["e"], ["e"]),
    ):
        with pytest.raises(RedisError):
            verb()


def test_a_server_that_has_forgotten_the_scripts_learns_them_again(store, put, redis):
    for name in ("a", "b"):
        put(name)
    claims = [claim_of(stored) for stored in due(store).entries]
    redis.script_flush()

    assert store.claim(claims, OFF, retry_at=RETRY_AT) == [ClaimVerdict.CLAIMED] * 2
    redis.script_flush()
    store.confirm([Confirmation(claim.stored, dispatched(claim)) for claim in claims], OFF)

    assert redis.xlen(HISTORY) == 2


def test_a_key_that_is_not_ours_survives_the_static_entry_of_its_name(install, redis):
    redis.set("redbeat:taken", "a text")
    install(taken=schedule(60))

    install()

    assert redis.get("redbeat:taken") == "a text"


# ---------------------------------------------------------------- a server that may evict keys


@pytest.mark.parametrize(("check", "level"), [("warn", "WARNING"), ("error", "ERROR")])
def test_a_server_that_may_evict_keys_is_reported(own_server, app, caplog, check, level):
    app.conf.redbeat_key_expiry_check = check
    client = own_server.client()
    client.config_set("maxmemory-policy", "allkeys-lru")

    Store(app, client).check_eviction()

    (record,) = caplog.records
    assert record.levelname == level
    assert "noeviction" in record.getMessage()


def test_a_server_that_may_evict_keys_ends_the_start_if_that_is_asked_for(own_server, app):
    app.conf.redbeat_key_expiry_check = "raise"
    client = own_server.client()
    client.config_set("maxmemory-policy", "volatile-ttl")

    with pytest.raises(ConfigError, match="noeviction"):
        Store(app, client).check_eviction()


def test_a_server_that_keeps_all_keys_is_not_talked_about(own_server, app, caplog):
    Store(app, own_server.client()).check_eviction()

    assert caplog.records == []
