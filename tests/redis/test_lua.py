"""Scripts on a server: found again after it has forgotten them, and their rows of values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from singlebeat.clients import private
from singlebeat.locks.redis import SCRIPTS
from singlebeat.lua import Script, packed


@pytest.fixture
def script(redis: Redis) -> Script:
    """Frees locks; the contract is in its header."""
    redis.script_flush()
    return SCRIPTS["finish"]


@pytest.fixture
def calls_of(redis: Redis) -> Callable[[], Counter[str]]:
    """Counts the commands that the server has got, those of scripts as well."""
    redis.config_resetstat()

    def calls_of() -> Counter[str]:
        stats = redis.info("commandstats")
        return Counter({name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()})

    return calls_of


def free(script: Script, client: Redis, *numbers: int) -> list[str]:
    keys = [key for number in numbers for key in (f"{{{number}}}", f"{{{number}}}:done", f"{{{number}}}:turn")]
    return json.loads(script(client, keys, (1000, 0, 0, packed((f"task {number}", "0", "") for number in numbers))))


def hold(redis: Redis, *numbers: int) -> None:
    for number in numbers:
        record = {"id": f"task {number}", "gen": 0, "state": "queued", "nonce": ""}
        redis.hset(f"{{{number}}}", mapping=record)


def test_a_script_runs_on_a_server_that_has_never_seen_it(script, redis):
    hold(redis, 1)

    assert free(script, redis, 1) == ["released"]
    assert redis.script_exists(script.sha) == [True]


def test_a_call_survives_that_the_server_forgets(script, redis):
    hold(redis, 1, 2)
    assert free(script, redis, 1) == ["released"]

    redis.script_flush()

    assert free(script, redis, 2) == ["released"]


def test_a_script_that_the_server_forgot_is_executed_once(script, redis, calls_of):
    hold(redis, 1, 2)

    free(script, redis, 1, 2)

    assert calls_of()["del"] == 2


def test_a_known_script_is_not_sent_again(script, redis, calls_of):
    free(script, redis, 1)
    redis.config_resetstat()

    free(script, redis, 1, 2)

    assert {name: count for name, count in calls_of().items() if "eval" in name or "script" in name} == {"evalsha": 1}


def test_the_replies_are_in_the_order_of_the_rows(script, redis):
    hold(redis, 1, 3)

    assert free(script, redis, 3, 2, 1, 3) == ["released", "kept", "released", "kept"]


@pytest.mark.parametrize(
    "text", ["é ∑ 😀", 'quote " and \\ and /', "line\nbreak\0\x7f", b"\xff\xfe".decode(errors="surrogateescape")]
)
def test_any_bytes_pass_through_a_row_and_back(server, redis, text):
    with private(server.url, timeout=5) as client:
        keys, row = (
            ("{1}", "{1}:done", "{1}:next", "{1}:turn"),
            (text, 0, 1000, 0, "task", text, "", "", "", "", "", "queued"),
        )

        reply = json.loads(SCRIPTS["acquire"](client, keys, (0, 0, packed([row]))))

        assert client.hget("{1}", "args") == text
    assert reply[0][:2] == ["acquired", text]


def test_an_error_of_the_script_is_raised(script, redis):
    with pytest.raises(ResponseError, match="invalid token"):
        script(redis, ("{1}", "{1}:done", "{1}:turn"), (1000, 1, 0, "no JSON"))


def test_a_server_that_is_gone_is_an_error(script, own_server):
    client = own_server.client()
    free(script, client, 1)
    own_server.kill()

    with pytest.raises(RedisError):
        free(script, client, 1)


def test_a_script_holds_the_text_of_its_file(script):
    assert "\n--- finish: " in script.text
