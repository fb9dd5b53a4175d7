"""Calls with any arguments: each has a key under the prefix, or a TypeError says why not and nothing is left of it."""

from __future__ import annotations

import copy
import re
import time
import tracemalloc
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.exceptions import EncodeError

from singlebeat import Singleton
from singlebeat.locks.key import READABLE_LENGTH, readable

KEY = re.compile(r"SINGLETONLOCK_\{[0-9a-f]{64}\}")
EXAMPLES = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def failing(method: str) -> Any:
    """Return an object that raises when one of its methods is called."""

    def fail(self: object, *args: object) -> None:
        raise RuntimeError(method)

    return type("Failing", (), {method: fail})()


class AsJson:
    """Is encoded as something else, as models are; and shows bytes of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __json__(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return "\ud800"


class Unlisted(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("items")


def nested(depth: int, kind: type = list) -> Any:
    value: Any = kind()
    for _ in range(depth):
        value = {"x": value} if kind is dict else [value]
    return value


def around_itself(kind: type) -> Any:
    value: Any = kind()
    value.append(value) if kind is list else value.update(x=value)
    return value


METHODS = ("__repr__", "__str__", "__hash__", "__eq__", "__json__", "__getattr__", "__len__", "__iter__", "__bool__")
TRICKS = [
    {"__type__": kind, "__value__": value}
    for kind in ("datetime", "uuid", "decimal", "os.system", "bytes", "given", None)
    for value in ("x", {"hex": "zz"}, None, [])
]
ODD = [
    *map(failing, METHODS),
    *TRICKS,
    *(nested(depth, kind) for depth in (50, 100_000) for kind in (list, dict)),
    *(around_itself(kind) for kind in (list, dict)),
    *(AsJson(value) for value in (1, "\ud800", [1], object())),
    AsJson(failing("__json__")),
    Unlisted(a=1),
    10**5000,
    range(10**15),
    object,
    print,
    memoryview(b"x"),
    bytearray(b"x"),
    b"\xff",
    1j,
    {1: 2, "1": 3},
    {None: 1, True: 2},
    {b"x": 1},
    {(1, 2): 3},
    {float("nan"): 1},
    Decimal("sNaN"),
    UUID(int=7),
    datetime(2030, 1, 1, tzinfo=UTC),
    {1, 2},
    "SINGLETONLOCK_{x}",
    "\x00",
    "\ud800",
    "\udcff",
    "x" * 100_000,
]
#: By number: Hypothesis would ask for their representations.
odd = st.integers(0, len(ODD) - 1).map(lambda number: ODD[number])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5) | odd
keys = st.text(max_size=3) | st.integers() | st.floats() | st.booleans() | st.none() | st.binary(max_size=3)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


@pytest.fixture
def task(app) -> Any:
    """A Singleton with an argument, a default and any others."""

    def hostile(value: Any, more: Any = 2, *args: Any, **kwargs: Any) -> None: ...

    return app.task(hostile, base=Singleton, name="tests.hostile", shared=False)


def key_of(task: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return the key of a call, None if it is refused as the docstring says."""
    try:
        return task.generate_lock(task.name, args, kwargs)
    except TypeError as refused:
        return _checked(str(refused))


def _checked(reason: str) -> None:
    assert reason.startswith("tests.hostile: argument")
    assert len(reason) < 1000


@EXAMPLES
@given(value=values)
def test_a_call_has_a_key_or_is_refused_with_the_argument_named(task, value):
    """100 of them; and each way to write a call has the same key."""
    key = key_of(task, value)

    assert key is None or KEY.fullmatch(key)
    assert key == key_of(task, value)
    assert key == key_of(task, value=value)
    assert key == key_of(task, value, 2)
    assert key == key_of(task, value, more=2)
    if key is not None:
        assert key != key_of(task, [value])
        assert key != key_of(task, value, 3)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@EXAMPLES
@given(value=plain | st.sampled_from(TRICKS))
def test_equal_arguments_have_equal_keys(task, value):
    """100 of them, with the same keys of dicts in another order, too."""
    key = key_of(task, value)

    assert key
    assert key == key_of(task, copy.deepcopy(value))
    if isinstance(value, dict):
        assert key == key_of(task, dict(reversed(value.items())))


@EXAMPLES
@given(value=values)
def test_people_can_be_shown_any_arguments(value):
    """100 of them."""
    text = readable([value], {"x": value})

    assert len(text) <= READABLE_LENGTH
    text.encode()


@settings(EXAMPLES, max_examples=100)
@given(value=values)
def test_a_call_is_sent_under_its_lock_or_leaves_nothing(task, redis, value):
    """100 of them, to a real broker; no key lies outside of the prefix of locks and of what is the broker's."""
    redis.flushall()
    try:
        task.delay(value)
    except (TypeError, EncodeError):
        assert not redis.llen("celery")
    else:
        assert redis.llen("celery") == 1
    locks = redis.keys("SINGLETONLOCK_*")

    assert locks == [key_of(task, value)] * redis.llen("celery")
    others = {key for key in redis.scan_iter() if not key.startswith(("singlebeat:marker:", "singlebeat:sent:"))}
    assert others - {*locks} <= {
        "celery",
        "_kombu.binding.celery",
        "_kombu.binding_permanent.celery",
    }


def test_a_huge_argument_takes_time_and_memory_in_proportion(task):
    huge = [{"a": "x" * 100} for _ in range(5_000)]
    key_of(task, huge)
    tracemalloc.start()
    try:
        began = time.process_time()
        assert key_of(task, huge)
        readable([huge], {})
        taken, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 20_000_000, "its JSON is half a MB"
    assert taken < 30
