"""Any bytes in Redis: no tick dies, no key is written outside of the prefix, memory is bounded."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from singlebeat.beat.decide import claim_for
from singlebeat.beat.entries.entry import Entry, Meta
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.entries.pauses import Pause
from singlebeat.beat.entries.policy import EntryPolicy
from singlebeat.beat.leadership.lease import Term
from singlebeat.beat.store.claims import Confirmation, Store
from singlebeat.beat.store.quarantine import QUARANTINED
from singlebeat.errors import EntryError
from tests.system.apps import make_app

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
KINDS = (
    "interval",
    "crontab",
    "rrule",
    "solar",
    "datetime",
    "weekday",
    "os.system",
    "object",
    "__class__",
    "",
    None,
    7,
)
FIELDS = (
    "task",
    "schedule",
    "args",
    "kwargs",
    "options",
    "enabled",
    "name",
    "every",
    "minute",
    "hour",
    "relative",
    "freq",
    "dtstart",
    "count",
    "interval",
    "until",
    "event",
    "lat",
    "lon",
    "year",
    "month",
    "day",
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("*/0")
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=4)
        | st.builds(
            lambda kind, rest: {**rest, "__type__": kind},
            st.sampled_from(KINDS),
            st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
        )
    ),
    max_leaves=8,
)
definitions = (
    st.builds(
        lambda rest: json.dumps({"task": "t", "schedule": {"__type__": "interval", "every": 5}, **rest}),
        st.dictionaries(st.sampled_from(FIELDS), values, max_size=4),
    )
    | values.map(json.dumps)
    | st.text(max_size=30)
)
#: Their keys are the schedule's own. A tick writes the first ones, and may find any value in the others.
WRITTEN = [":schedule", ":placed", ":pending", ":quarantine", ":history"]
OWN = [*WRITTEN, ":statics", ":owners", ":runs", ":leader", ":term", ":standbys", ":resigned", ":lock"]
names = (
    st.text(min_size=1, max_size=12)
    | st.binary(min_size=1, max_size=8)
    | st.sampled_from(["redbeat:", "redbeat::schedule", "*", "{x}", "a\x00b", "\n", "../..", "%s", "celery"])
    | st.sampled_from(OWN)
)


def every_own_name(test: Any) -> Any:
    """Try each of these names in any case."""
    for name in OWN:
        test = example(name=name, fields={}, definition='{"task": "t", "schedule": 5}')(test)
    return test


EXAMPLES = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(definition=definitions)
def test_a_definition_is_read_or_refused(app, definition):
    """400 of them."""
    try:
        entry = Entry.decode("redbeat:e", definition, app)
    except EntryError:
        pass
    else:
        assert entry.task


#: The other fields of an entry, and of what is stored beside it: the parts that each needs, and those that it may have.
DECODERS: dict[str, tuple[Callable[[str], object], dict[str, object], Sequence[str]]] = {
    "pending": (Occurrence.decode, {"id": "x", "nominal": 0.0}, ["id", "nominal", "previous", "kind", "overlap"]),
    "meta": (Meta.decode, {"last_run_at": None}, ["last_run_at", "total_run_count"]),
    "since": (partial(Meta.decode, '{"last_run_at": null}'), {"since": None}, ["since", "last_run_at"]),
    "policy": (EntryPolicy.decode, {}, [*EntryPolicy.names()]),
    "a pause": (partial(Pause.decode, "all"), {}, [each.name for each in dataclasses.fields(Pause)]),
}
#: As of seconds to nanoseconds since 1970, and beyond: what overflows raises four kinds of errors.
magnitudes = st.sampled_from([sign * 10**digits for digits in (*range(8, 22), 300, 400) for sign in (1, -1)])


@pytest.mark.parametrize("field", DECODERS)
@settings(EXAMPLES, max_examples=200)
@given(data=st.data())
def test_a_field_is_read_or_refused(field, data):
    decode, least, parts = DECODERS[field]
    given_parts = data.draw(st.dictionaries(st.sampled_from(parts), magnitudes | values, min_size=1, max_size=2))
    with suppress(EntryError):
        decode(json.dumps(least | given_parts))


@settings(EXAMPLES, max_examples=200)
@example(name=b"\x80", fields={}, definition='{"task": "t", "schedule": 5}')
@every_own_name
@given(
    name=names,
    fields=st.dictionaries(
        st.sampled_from(["definition", "meta", "policy", "since", "pending"]), definitions, max_size=3
    ),
    definition=st.sampled_from(['{"task": "t", "schedule": 5}', None]),
)
def test_a_tick_survives_any_entry_and_writes_below_the_prefix_only(server, app, redis, name, fields, definition):
    """200 of them, from reading to the history."""
    redis.flushall()
    raw = server.client(decode_responses=False)
    if definition:
        fields = {**fields, "definition": definition}
    text = name if isinstance(name, bytes) else name.encode(errors="surrogatepass")
    key = b"redbeat:" + text
    if text in map(str.encode, WRITTEN):
        fields = {}
    for field, value in fields.items():
        raw.hset(key, field, value.encode(errors="surrogatepass"))
    before = raw.hgetall(key) if fields else {}
    raw.zadd("redbeat::schedule", {key: 1})
    raw.zadd("redbeat::pending", {key: 1})
    with make_app(server.celery_url, {"redbeat_lock_key": None}) as own:
        from singlebeat.connections import schedule_client

        store = Store(own, schedule_client(own))
        due = store.due(NOW, all_pending=True)
        claims = [claim_for(stored, NOW, zone=UTC, prefix="redbeat:") for stored in due.entries]
        store.claim(claims, Term(0, ""), retry_at=NOW)
        taken = [
            Confirmation(c.stored, Decision(c.stored.entry.name, "t", c.occurrence, DecisionType.DISPATCHED))
            for c in claims
            if c.occurrence
        ]
        store.confirm(taken, Term(0, ""))
        store.record(store.quarantine.decided(), Term(0, ""))

    if text in map(str.encode, OWN):
        assert due.entries == []
        assert raw.zscore("redbeat::schedule", key) == QUARANTINED
        assert not fields or raw.hgetall(key) == before
        assert raw.hkeys("redbeat::quarantine") == [key]
        assert raw.type("redbeat::history") in {b"none", b"stream"}
    assert all(each.startswith(b"redbeat:") for each in raw.keys("*"))
    assert raw.exists(key) or not fields


@pytest.mark.parametrize(
    "definition",
    ["[" * 200_000, '{"a":' * 100_000, '{"task": "' + "x" * 2_000_000 + '"', "9" * 100_000, '"' + "\\u0000" * 100_000],
    ids=["arrays", "objects", "long text", "long number", "zeros"],
)
def test_deep_and_huge_values_are_refused_in_bounded_memory(app, definition):
    tracemalloc.start()
    try:
        with pytest.raises(EntryError) as refused:
            Entry.decode("redbeat:e", definition, app)
        peak: Any = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 60_000_000
    assert len(str(refused.value)) < 1000
