"""Scripts on a server: found again after it has forgotten them, and each call of a batch on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from singlebeat.lua import Script

#: Frees a lock; the contract is in its header.
KEYS = ("{lock}", "{lock}:done")


@pytest.fixture
def script(redis: Redis) -> Script:
    redis.script_flush()
    return Script("singlebeat.locks", "finish")


@pytest.fixture
def calls_of(redis: Redis) -> Callable[[], Counter[str]]:
    """Counts the commands that the server has got from its clients, scripts' own ones apart."""
    redis.config_resetstat()

    def calls_of() -> Counter[str]:
        stats = redis.info("commandstats")
        return Counter({name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()})

    return calls_of


def lock(number: int) -> tuple[tuple[str, str], tuple[str, int, str, int]]:
    """Return the call that frees lock ``number``."""
    return (f"{{{number}}}", f"{{{number}}}:done"), (f"task {number}", 0, "", 1000)


def hold(redis: Redis, *numbers: int) -> None:
    for number in numbers:
        record = {"id": f"task {number}", "gen": 0, "state": "queued", "nonce": "", "payload": number}
        redis.hset(f"{{{number}}}", mapping=record)


def released(number: int) -> list[str]:
    return ["released", str(number)]


def test_a_script_runs_on_a_server_that_has_never_seen_it(script, redis):
    hold(redis, 1)

    assert script(redis, *lock(1)) == released(1)
    assert redis.script_exists(script.sha) == [True]


def test_a_single_call_survives_that_the_server_forgets(script, redis):
    hold(redis, 1, 2)
    assert script(redis, *lock(1)) == released(1)

    redis.script_flush()

    assert script(redis, *lock(2)) == released(2)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_survives_that_the_server_forgets(script, redis, size):
    for _ in range(2):
        hold(redis, *range(size))

        assert script.batch(redis, [lock(number) for number in range(size)]) == [released(n) for n in range(size)]
        assert not redis.keys()

        redis.script_flush()


def test_each_call_of_a_batch_is_executed_once(script, redis, calls_of):
    hold(redis, *range(5))
    calls = [lock(number) for number in range(5)]

    assert script.batch(redis, calls) == [released(number) for number in range(5)]
    assert calls_of()["del"] == 5
    assert script.batch(redis, calls) == [["kept", ""]] * 5
    assert calls_of()["del"] == 5


def test_a_known_script_is_not_sent_again(script, redis, calls_of):
    script.batch(redis, [lock(1), lock(2)])
    redis.config_resetstat()

    script.batch(redis, [lock(1), lock(2)])
    script(redis, *lock(1))

    assert {name: count for name, count in calls_of().items() if "eval" in name or "script" in name} == {"evalsha": 3}


def test_an_empty_batch_asks_nobody(script):
    assert script.batch(None, []) == []


def test_the_replies_of_a_batch_are_in_its_order(script, redis):
    hold(redis, 1, 3)

    replies = script.batch(redis, [lock(number) for number in (3, 2, 1, 3)])

    assert replies == [released(3), ["kept", ""], released(1), ["kept", ""]]


@pytest.mark.parametrize("known", [True, False], ids=["known", "forgotten"])
def test_one_bad_call_does_not_hide_the_others(script, redis, known):
    hold(redis, 1, 3)
    redis.set("{2}", "of another kind")
    if known:
        redis.script_load(script.text)

    first, second, third = script.batch(redis, [lock(1), lock(2), lock(3)])

    assert (first, third) == (released(1), released(3))
    assert isinstance(second, ResponseError)
    assert "WRONGTYPE" in str(second)
    assert redis.keys() == ["{2}"]


def test_a_bad_call_alone_in_its_batch_is_its_reply_as_well(script, redis):
    redis.set("{2}", "of another kind")

    (reply,) = script.batch(redis, [lock(2)])

    assert isinstance(reply, ResponseError)


def test_a_bad_single_call_raises(script, redis):
    redis.set("{2}", "of another kind")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        script(redis, *lock(2))


def test_a_server_that_is_gone_is_an_error_of_the_whole_batch(script, own_server):
    client = own_server.client()
    script.batch(client, [lock(1), lock(2)])
    own_server.kill()

    with pytest.raises(RedisError):
        script.batch(client, [lock(1), lock(2)])


def test_a_script_says_what_is_in_its_file(script):
    assert script.text.startswith("--- finish: ")
    assert script.name == "finish"
    with pytest.raises(FileNotFoundError):
        Script("singlebeat.locks", "no such script")
