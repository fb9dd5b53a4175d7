"""The keys in Redis: those of the tables that the docs print, with their types, and no others."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from kombu import Producer
from redis import Redis

from singlebeat.beat.keys import ENTRY_FIELDS, ENTRY_KEYS, LEASE_KEYS, OWN_KEYS
from singlebeat.beat.leadership.lease import resign
from singlebeat.errors import ConflictError
from singlebeat.locks import backend_of
from singlebeat.locks.acquire import keep
from singlebeat.locks.base import RUN_HEADER, Call, IfHeld, Ref
from singlebeat.locks.key import LOCK_FIELDS, LOCK_KEYS, beside, lock_key, suspects_key
from singlebeat.locks.redis import RedisBackend
from singlebeat.outbox import OUTBOX_KEYS
from singlebeat.run_results import flush_ends, record_end_of_message
from singlebeat.web.versions import version_of
from tests.redis.bench import HOUR, Bench
from tests.support import APP

PREFIX = "SINGLETONLOCK_"
#: Keys of locks, and of Celery's broker on the same server.
OTHER = re.compile(rf"{PREFIX}.*|singlebeat:workers$|celery$|_kombu\.|unacked")
#: ``doctor`` and probes try commands on this key and leave nothing there.
MOMENTARY = "doctor"


def pattern(key: str, **placeholders: str) -> str:
    """Return a key of a table as a regular expression."""
    named = re.split(r"<([a-z ]+)>", key)
    return "".join(placeholders[text.replace(" ", "_")] if at % 2 else re.escape(text) for at, text in enumerate(named))


def check_all(types: dict[str, str], table: dict[str, tuple[str, str]]) -> None:
    """Check that each key is in a table, by regular expressions, with its type, and that each of the table is there.

    Args:
        types: the type of each key in Redis.
    """
    seen = set()
    for key, its_type in types.items():
        found = next((each for each in table if re.fullmatch(each, key)), None)
        assert found is not None, f"{key}, a {its_type}, is in no table"
        assert its_type == table[found][0], key
        seen.add(found)

    assert set(table) - seen == set()


def types_of(redis: Redis) -> dict[str, str]:
    """Return the type of each key."""
    return {key: redis.type(key) for key in redis.scan_iter()}


@pytest.fixture
def lived(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The type of each key of a schedule that has had everything."""
    monkeypatch.setattr("singlebeat.beat.leadership.lease.STAY", 600.0)  # more than a slow machine may take
    redis, static = bench.redis, {"task": f"{APP}.plain", "schedule": HOUR, "args": ["static"]}
    backend_of(bench.app).announce("w1", ttl=600)
    leader = bench.scheduler(beat_schedule={"static": static, "gone": static})
    bench.put(jitter=5)
    redis.hset("redbeat:e", "dropped_by", "another app")
    redis.hset("redbeat:bad", "definition", "{")
    redis.zadd("redbeat::schedule", {"redbeat:bad": 0})
    leader.tick()
    leader._note_loss("a loss")
    (message,) = [message for message in bench.messages if message.run["entry"] == "e"]
    record_end_of_message(bench.app, {"id": message.id, RUN_HEADER: {"entry": "e"}}, "success")
    flush_ends(bench.app)
    leader.close()
    bench.scheduler(beat_schedule={"static": static}).tick()
    bench.scheduler().tick()
    bench.make_due()
    bench.schedule.pause("e")
    bench.schedule.resume("e")
    version_of(bench.schedule.salvage("e"))  # as the page makes it
    bench.schedule.pause_many(tag="of no entry")
    begin = datetime.now(UTC) - 2 * HOUR
    with suppress(ConflictError):  # no beat sends the first run
        bench.schedule.backfill("e", begin, begin + 2 * HOUR, timeout=0.01)
    for _ in range(2):
        bench.scheduler(redbeat_key_prefix="left:").tick()
    resign(bench.new_app(redbeat_key_prefix="left:"))
    bench.scheduler(redbeat_key_prefix="shared:", redbeat_lock_key=None).tick()
    return types_of(redis)


def test_a_schedule_has_the_keys_of_its_tables_and_no_others(lived):
    own = {name: key for name, key in {**OWN_KEYS, **LEASE_KEYS}.items() if name != MOMENTARY}
    table = {re.escape(f"redbeat::{name}"): key for name, key in own.items()}
    table |= {pattern(f"redbeat:{name}", name="[^:].*"): key for name, key in ENTRY_KEYS.items()}
    if hasattr(Producer, "batch"):  # kombu 5.7 is the first to hand out commands
        table |= {pattern(key, id="[0-9a-f]{32}"): stored for key, stored in OUTBOX_KEYS.items()}
    of_others = re.compile(r"^(left|shared):")

    check_all({of_others.sub("redbeat:", key): lived[key] for key in lived if not OTHER.match(key)}, table)


def test_an_entry_has_the_fields_of_its_table_and_no_others(lived, redis):
    assert set(redis.hkeys("redbeat:e")) == set(ENTRY_FIELDS)


def test_locks_have_the_keys_and_fields_of_their_tables_and_no_others(server, redis):
    backend, lock = RedisBackend(server.url), lock_key(PREFIX, "d1")
    backend.worker = "w1"
    first, second = Ref(lock, "a", nonce="n1"), Ref(lock, "b", nonce="n2")
    about = {"lease": 600.0, "remember_for": 600.0, "task": "t", "arguments": "1"}
    backend.announce("w1", ttl=600)

    def acquire(key: str, task_id: str, **options: IfHeld) -> None:
        backend.acquire_many([Call(Ref(key, task_id), "t", "1", 600.0, **options)])

    acquire(lock, "a")
    backend.begin(first, **about)
    backend.finish_many([first], remember_for=600.0, ran=True)
    acquire(lock, "b")
    keep(backend, {second: "{}"}, 600.0)
    backend.begin(second, **about)
    acquire(lock, "c", if_held=IfHeld.JOIN)
    backend.begin(Ref(lock, "d", nonce="n3"), turn_ttl=600.0, **about)
    acquire(beside(lock, "e"), "e")
    backend.renew_many([second], lease=600.0)
    backend.suspect(suspects_key(PREFIX), lock)

    placeholders = {"prefix": PREFIX, "lock": re.escape(lock), "task_id": "e"}
    check_all(types_of(redis), {pattern(key, **placeholders): stored for key, stored in LOCK_KEYS.items()})
    assert set(LOCK_FIELDS) <= set(redis.hkeys(lock))
