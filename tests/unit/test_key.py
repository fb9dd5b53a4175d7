"""The unique key: the same for every way to write a call, on both sides of the wire, and different for any other."""

from __future__ import annotations

import functools
import inspect
import json
import math
import string
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import pytest
from celery import Celery, Task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.utils import json as kombu_json
from pydantic import BaseModel
from redis.crc import key_slot

from singlebeat import Singleton
from singlebeat.locks.key import READABLE_LENGTH, canonical, digest, done_key, lock_key, readable


def key(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the digest of a call of a function."""
    signature = inspect.signature(function)
    defaults = {each.name: each.default for each in signature.parameters.values() if each.default is not each.empty}
    return digest("app.task", *canonical(signature.bind(*args, **kwargs), defaults))


def of(*args: Any, **kwargs: Any) -> str:
    """Return the digest of a call whose arguments are in their final form."""
    return digest("app.task", args, kwargs)


def over_the_wire(value: Any) -> Any:
    """Return an argument as the worker gets it."""
    return kombu_json.loads(kombu_json.dumps(value))


# ---------------------------------------------------------------- one call, many spellings


def two(x, y=2):
    pass


def test_positional_keyword_and_default_are_one_call():
    keys = {key(two, 1), key(two, 1, 2), key(two, 1, y=2), key(two, x=1), key(two, y=2, x=1)}

    assert len(keys) == 1
    assert keys.isdisjoint({key(two, 2), key(two, 1, 3), key(two, 2, 1), key(two, x=2, y=1)})


def test_the_order_of_keywords_does_not_matter():
    def task(**kwargs):
        pass

    assert key(task, a=1, b=2) == key(task, b=2, a=1)


def test_the_order_in_a_dict_does_not_matter_and_that_in_a_list_does():
    assert of({"a": 1, "b": {"c": 2, "d": 3}}) == of({"b": {"d": 3, "c": 2}, "a": 1})
    assert of(OrderedDict(b=1, a=2)) == of({"a": 2, "b": 1})
    assert of([1, 2]) != of([2, 1])


def test_varied_positional_arguments_stay_in_order():
    def task(first, *rest, last=0):
        pass

    assert key(task, 1, 2, 3) == key(task, 1, 2, 3, last=0)
    assert len({key(task, 1, 2, 3), key(task, 1, 3, 2), key(task, 2, 1, 3), key(task, 1, 2), key(task, 1)}) == 5


def test_a_positional_only_argument_has_its_default():
    def task(a=1, /, **kwargs):
        pass

    assert key(task) == key(task, 1)
    assert key(task, b=1) == key(task, 1, b=1)
    assert len({key(task, 1), key(task, 2), key(task, b=1), key(task, b=2), key(task, 2, b=1)}) == 5


def test_positional_only_arguments_do_not_run_into_varied_ones():
    def task(a, b=0, /, c=0, *rest):
        pass

    assert key(task, 1) == key(task, 1, 0, 0) == key(task, 1, c=0)
    assert len({key(task, 1, 2), key(task, 1, 0, 2), key(task, 1, 0, 0, 2), key(task, 2, 1)}) == 4


def test_keyword_only_arguments_have_their_defaults():
    def task(*, a, b=None):
        pass

    assert key(task, a=1) == key(task, a=1, b=None)
    assert key(task, a=1) != key(task, a=1, b=0)


# ---------------------------------------------------------------- tasks


@pytest.fixture
def app() -> Celery:
    return Celery(set_as_current=False)


def test_a_bound_task_is_called_without_its_self(app):
    @app.task(base=Singleton, bind=True, name="t", shared=False)
    def bound(self, x, y=2):
        pass

    @app.task(base=Singleton, name="t2", shared=False)
    def unbound(x, y=2):
        pass

    expected = bound.generate_lock("t", [1])
    assert {bound.generate_lock("t", [1, 2]), bound.generate_lock("t", [], {"y": 2, "x": 1})} == {expected}
    assert bound.generate_lock("t", [2]) != expected
    assert unbound.generate_lock("t", [1]) == expected


def test_a_release_may_add_an_argument_with_a_default(app):
    def old(x, y=2, /, *, z=3): ...

    def new(x, y=2, added=None, /, *, z=3, verbose=(False, {"deep": 1})): ...

    calls = [([1], {}), ([1, 2], {}), ([1, 3], {}), ([1, 2], {"z": 4}), ([2], {"z": 3})]
    given = [
        ([1, 2, 5], {}),
        ([1], {"verbose": [False, {"deep": 2}]}),
        ([1, 2, None], {"verbose": [False, {"deep": 1}]}),
    ]

    before, after = keys_of(app, old, *calls), keys_of(Celery(set_as_current=False), new, *calls, *given)
    assert after[: len(calls)] == before
    assert before[0] == before[1] == after[-1]
    assert len({*after}) == 6


def test_a_body_that_changes_its_default_changes_no_key(app):
    seen: list[Any] = []

    def task(x, acc=[], by={"at": [MISSING]}):  # noqa: B006
        acc.append(x)
        seen.append(acc)

    calls = ([1], {}), ([1, []], {}), ([1, [1]], {})
    other = Celery(set_as_current=False)
    before = keys_of(app, task, *calls), keys_of(other, task, *calls, unique_on=["x", "acc"])
    task(1)

    assert seen == [[1]]
    assert (keys_of(app, task, *calls), keys_of(other, task, *calls)) == before
    for without, empty, other_value in before:
        assert without == empty != other_value


def test_a_decorator_that_supplies_an_argument_says_so(app):
    def with_session(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function("session", *args, **kwargs)

        return wrapper

    def task(session, day="today", *, force=False): ...

    hidden = with_session(task)
    with pytest.raises(TypeError, match=r"missing a required argument: 'session'; a decorator .* set __signature__"):
        keys_of(app, hidden, ([], {}))
    plain = Celery(set_as_current=False)
    with pytest.raises(TypeError, match=r"'session'$"):
        keys_of(plain, task, ([], {}))
    said = with_session(task)
    said.__signature__ = inspect.signature(lambda day="today", *, force=False: None)
    short, long, other = keys_of(Celery(set_as_current=False), said, ([], {}), (["today"], {}), (["x"], {}))
    assert short == long != other


@pytest.mark.parametrize("default", [1, 1.0, True, "1", None, 0, "", (), -0.0, {}, Decimal(1)], ids=repr)
def test_only_what_has_the_same_json_equals_a_default(app, default):
    def task(x=default): ...

    values = [1, 1.0, True, "1", None, 0, "", [], -0.0, 0.0, False, {}]
    key, *keys = keys_of(app, task, ([], {}), *(([value], {}) for value in values))

    equal = [json.dumps(value) for value, found in zip(values, keys, strict=True) if found == key]
    assert equal == ([] if isinstance(default, Decimal) else [json.dumps(default)])
    assert len({key, *keys}) == len(values) + (not equal)


def test_a_decorated_task_keeps_its_signature(app):
    def decorated(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @app.task(base=Singleton, bind=True, name="t", shared=False, autoretry_for=(OSError,))
    @decorated
    def task(self, x, y=2):
        pass

    assert task.generate_lock("t", [1]) == task.generate_lock("t", [], {"x": 1, "y": 2})


def test_the_lock_of_a_task_is_under_the_prefix_and_named_by_the_digest(app):
    app.conf.singleton_key_prefix = "mine:"

    @app.task(base=Singleton, name="t", shared=False)
    def task(x, y=2):
        pass

    assert task.generate_lock("t", [1]) == f"mine:{{{digest('t', [], {'x': 1})}}}"


def test_a_task_may_encode_its_arguments_in_its_own_way(app):
    app.conf.singleton_json_encoder_class = f"{__name__}:SetEncoder"

    @app.task(base=Singleton, name="t", shared=False)
    def task(x):
        pass

    assert task.generate_lock("t", [{3, 1, 2}]) == task.generate_lock("t", [[1, 2, 3]])


class SetEncoder(json.JSONEncoder):
    def default(self, o):
        return sorted(o) if isinstance(o, set) else super().default(o)


# ---------------------------------------------------------------- both sides of the wire


class Point(NamedTuple):
    x: int
    y: int


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


MOMENT = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC)
NOT_PLAIN = [
    (1, (2, [3, (4,)])),
    Point(1, 2),
    {1: "a"},
    {2: "two", 10: "ten", 33: "more"},
    {-1: 0, 1: {7: 1, 20: (1,)}},
    {1: "number", "a": "text", None: "nothing", 1.5: "half"},
    {False: 0, True: 1},
    uuid.UUID("12345678123456781234567812345678"),
    MOMENT,
    MOMENT.replace(tzinfo=None),
    MOMENT.replace(tzinfo=timezone(timedelta(hours=5, minutes=30))),
    date(2026, 3, 29),
    time(1, 30),
    Decimal("1.10"),
    b"bytes",
    b"\xff\x00",
    Colour.RED,
    Level.HIGH,
    1.5,
    1e300,
    10**40,
    "ünïcode \N{SNOWMAN} \x00",
    {"deep": [{"er": (uuid.UUID(int=1), {5: [MOMENT, Decimal(1)], 30: None})}]},
]


@pytest.mark.parametrize("value", NOT_PLAIN, ids=repr)
def test_both_sides_of_the_wire_get_one_key(value):
    assert of(value) == of(over_the_wire(value))
    assert of(named=value) == of(named=over_the_wire(value))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)
KEYS = st.integers() | st.text(max_size=3) | st.booleans() | st.none()
ANY = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=5)
    | st.uuids()
    | st.datetimes()
    | st.decimals(allow_nan=False)
    | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANY)
def test_both_sides_of_the_wire_get_one_key_for_anything_that_can_be_sent(value):
    assert of(value) == of(over_the_wire(value))


# ---------------------------------------------------------------- different calls, different keys


def canonical_json(value: Any) -> str:
    """Spell a plain value out, with types, by rules of our own."""
    match value:
        case bool() | None | str():
            return f"{type(value).__name__}:{value!r}"
        case int():
            return f"int:{value}"
        case float():
            return f"float:{value!r}"
        case list():
            return f"[{','.join(map(canonical_json, value))}]"
        case dict():
            return f"{{{','.join(f'{k!r}={canonical_json(v)}' for k, v in sorted(value.items()))}}}"
    raise AssertionError(value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PLAIN, max_size=3), st.lists(PLAIN, max_size=3), st.data())
def test_keys_are_equal_exactly_if_the_calls_are(one, other, data):
    other = data.draw(st.sampled_from([other, list(one), [*one, *other], [one], one[:-1], list(reversed(one))]))

    assert (of(*one) == of(*other)) == (canonical_json(one) == canonical_json(other))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=2), PLAIN, max_size=3), st.dictionaries(st.text(max_size=2), PLAIN, max_size=3))
def test_keys_of_keyword_arguments_are_equal_exactly_if_the_calls_are(one, other):
    assert (digest("t", [], one) == digest("t", [], other)) == (canonical_json(one) == canonical_json(other))


def test_nothing_runs_together():
    calls = [
        ("t", [], {}),
        ("t", [[]], {}),
        ("t", [{}], {}),
        ("t", [None], {}),
        ("t", [""], {}),
        ("t", [0], {}),
        ("t", [False], {}),
        ("t", ["0"], {}),
        ("t", ["ab", "c"], {}),
        ("t", ["a", "bc"], {}),
        ("t", ["abc"], {}),
        ("t", ["a", ["bc"]], {}),
        ("t", ['a","bc'], {}),
        ("t", [1, 23], {}),
        ("t", [12, 3], {}),
        ("t", [1], {"a": 2}),
        ("t", [], {"a": 2}),
        ("t", [{"a": 2}], {}),
        ("t", [1, {"a": 2}], {}),
        ("t", [], {"a": 1, "b": 2}),
        ("t", [], {"a": {"b": 2}}),
        ("t", [[1, 2], [3]], {}),
        ("t", [[1], [2, 3]], {}),
        ("t1", [], {}),
        ("t", ["1"], {}),
        ("t", [1], {}),
    ]
    keys = [digest(*call) for call in calls]

    assert len(set(keys)) == len(calls)


def test_the_name_of_the_task_is_part_of_the_key():
    assert digest("a.b", ["c"], {}) != digest("a", ["b", "c"], {}) != digest("a.b.c", [], {})


def test_the_scope_is_part_of_the_key():
    keys = [
        digest("t", [], {}),
        digest("t", [], {}, scope="queue"),
        digest("t", [], {}, scope=["queue"]),
        digest("t", [], {}, scope={"queue": "a"}),
        digest("t", [], {}, scope={"queue": "b"}),
        digest("t", ["queue"], {}),
        digest("t", [], {"queue": "a"}),
    ]

    assert len(set(keys)) == len(keys)
    assert digest("t", [], {}, scope={"b": 1, "a": 2}) == digest("t", [], {}, scope={"a": 2, "b": 1})
    assert digest("t", [], {}, scope=None) == keys[0]


def test_a_key_is_the_same_in_every_process_and_release():
    assert digest("app.task", [], {}) == "ec498bb690edb60761cace8fdc14909c3c0338b42bfb8e980dd242473de5d734"


def test_a_key_is_a_sha256_in_hex():
    assert len(of(1)) == 64
    assert set(of(1)) <= set(string.hexdigits.lower())


# ---------------------------------------------------------------- what cannot be encoded


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ([1, object()], {}, "argument 1"),
        ([{"deep": [object()]}], {}, "argument 0"),
        ([1], {"fine": 1, "bad": {1, 2}}, "argument 'bad'"),
        ([{(1, 2): 3}], {}, "argument 0"),
        ([functools.partial(print)], {}, "argument 0"),
    ],
)
def test_an_argument_that_cannot_be_encoded_is_named(args, kwargs, named):
    with pytest.raises(TypeError, match=f"app.task: {named} cannot be part of a unique key"):
        digest("app.task", args, kwargs)


def test_an_argument_that_contains_itself_is_named():
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(TypeError, match="argument 'x'"):
        digest("app.task", [], {"x": loop})


def test_an_argument_is_named_by_its_parameter(app):
    @app.task(base=Singleton, name="t", shared=False)
    def task(x, y=2):
        pass

    with pytest.raises(TypeError, match="t: argument 'y' cannot"):
        task.generate_lock("t", [1, object()])


def test_an_encoder_of_the_users_own_is_asked_for_the_culprit_too():
    assert digest("t", [{1, 2}], {}, encoder=SetEncoder) == digest("t", [[1, 2]], {}, encoder=SetEncoder)
    with pytest.raises(TypeError, match="argument 1"):
        digest("t", [{1, 2}, object()], {}, encoder=SetEncoder)


def test_not_a_number_is_a_call_like_any_other():
    assert of(math.nan) == of(math.nan) == of(over_the_wire(math.nan))
    assert len({of(math.nan), of(math.inf), of(-math.inf)}) == 3


# ---------------------------------------------------------------- defaults that JSON cannot encode

MISSING = object()


def with_default(x: Any, y: Any = MISSING, *, z: Any = 3) -> None: ...


def positional(x: Any = MISSING, y: Any = 2, z: Any = MISSING, /, *rest: Any) -> None: ...


def keys_of(app: Celery, function: Callable[..., Any], *calls: tuple[list[Any], dict[str, Any]], **options: Any) -> Any:
    task = app.task(function, name="t", base=Singleton, shared=False, **options)
    return [task.generate_lock("t", args, kwargs) for args, kwargs in calls]


def test_a_default_without_json_differs_from_any_given_value(app):
    calls = [([1, given], {}) for given in (None, "y", "MISSING", 2, {}, [])]

    assert len({*keys_of(app, with_default, ([1], {}), ([2], {}), ([1], {"z": 4}), *calls)}) == 3 + len(calls)
    assert len({*keys_of(app, with_default, ([1], {}), ([], {"x": 1}), ([1], {"z": 3}))}) == 1


def test_calls_that_could_be_sent_keep_their_keys_beside_such_defaults(app):
    (found,) = keys_of(app, with_default, ([1, 2], {}))

    assert found == lock_key("SINGLETONLOCK_", digest("t", [], {"x": 1, "y": 2}))


def test_positional_only_defaults_without_json_stay_apart(app):
    calls = [([], {}), ([1], {}), ([1, 3], {}), ([1, 2, 3], {}), ([1, 2, 3, 4], {})]

    assert len({*keys_of(app, positional, *calls)}) == len(calls)
    assert len({*keys_of(app, positional, ([1], {}), ([1, 2], {}))}) == 1


@pytest.mark.parametrize("unique_on", [["x", "y"], "y", ["x", "y.name", "y"]], ids=str)
def test_unique_on_may_name_a_default_without_json(app, unique_on):
    default, again, none = keys_of(app, with_default, ([1], {}), ([1], {"z": 4}), ([1, None], {}), unique_on=unique_on)

    assert default == again != none


def test_a_given_argument_without_json_is_refused_beside_such_a_default(app):
    with pytest.raises(TypeError, match="t: argument 'x' cannot"):
        keys_of(app, with_default, ([object()], {}))
    with pytest.raises(TypeError, match="t: argument 'y' cannot"):
        keys_of(app, with_default, ([1, MISSING], {}))


@pytest.mark.skipif(not hasattr(Task, "_dump_pydantic_arguments"), reason="this Celery sends no models")
def test_a_model_as_default_equals_the_same_model_given(app):
    class Model(BaseModel):
        a: int = 1

    def body(model: Model = Model(a=7)) -> None: ...  # noqa: B008

    body.__annotations__["model"] = Model  # not as text: the class is local
    default, given, sent, other = keys_of(
        app, body, ([], {}), ([Model(a=7)], {}), ([], {"model": {"a": 7}}), ([Model(a=8)], {}), pydantic=True
    )

    assert default == given == sent != other


# ---------------------------------------------------------------- names of keys, and what people read


@pytest.mark.parametrize(
    "lock", ["P_{abc}", "{locks}:{abc}", "a lock of the user's own", "half{open", "{{twice}}", "ü{ü}"]
)
def test_a_lock_and_its_other_keys_share_a_slot(lock):
    assert key_slot(lock.encode()) == key_slot(done_key(lock).encode())


def test_the_names_of_locks_stay_as_they_are():
    assert lock_key("P_", "abc") == "P_{abc}"
    assert done_key("P_{abc}") == "P_{abc}:done"
    assert done_key("a lock of the user's own") == "{a lock of the user's own}:done"


def test_people_read_the_arguments_and_never_too_much():
    assert readable([1, "x"], {"y": None}) == "1, 'x', y=None"
    assert readable([], {}) == ""
    assert readable(["x" * (READABLE_LENGTH - 2)], {}) == f"'{'x' * (READABLE_LENGTH - 2)}'"
    cut = readable(["x" * (READABLE_LENGTH - 1)], {})
    assert len(cut) == READABLE_LENGTH
    assert cut.endswith("x…")
