"""Entries that are written without Python: the docs' commands as they stand, Perl and JavaScript."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from celery import Celery
from redis import Redis

from singlebeat import Schedule
from singlebeat.advice import redis_command
from tests.support import APP, ODD_NAMES, CeleryLauncher, Oracle, RedisServer, page, wait_until

SCHEDULE, HISTORY = "redbeat::schedule", "redbeat::history"
#: The instant in the docs' example.
ONCE = datetime(2030, 1, 1, 8, tzinfo=UTC)

#: Each reads commands, a JSON array of words per line, sends them as a client does, and prints the raw reply's line.
PERL = r"""
use strict; use warnings; use IO::Socket::UNIX; use JSON::PP;
$| = 1;
my $redis = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die $!;
while (my $line = <STDIN>) {
    my @words = @{decode_json($line)};
    print $redis "*" . @words . "\r\n", map { utf8::encode($_); "\$" . length($_) . "\r\n$_\r\n" } @words;
    print scalar(<$redis>);
}
"""
JAVASCRIPT = r"""
const redis = require("net").connect(process.argv[1]);
redis.on("data", reply => process.stdout.write(reply));
require("readline").createInterface({input: process.stdin}).on("line", line => {
  const words = JSON.parse(line).map(word => Buffer.from(word));
  redis.write(`*${words.length}\r\n`);
  for (const word of words) { redis.write(`$${word.length}\r\n`); redis.write(word); redis.write("\r\n"); }
}).on("close", () => redis.end());
"""

Send = Callable[..., str]


@contextmanager
def program(*command: str) -> Iterator[Send]:
    """A program that sends commands; calling it returns the line that the server has replied."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def send(*words: str) -> str:
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield send
        process.stdin.close()
        assert process.wait(10) == 0


@contextmanager
def command_line(path: Path) -> Iterator[Callable[[str], str]]:
    """Takes a command as one types it into redis-cli: the server reads such lines itself."""
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw", newline="\r\n") as file:
        connection.connect(str(path))

        def send(line: str) -> str:
            file.write(line + "\r\n")
            file.flush()
            return file.readline().strip()

        yield send


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_advised_command_means_at_the_prompt_what_it_says(name: str, server: RedisServer, redis: Redis) -> None:
    with command_line(server.path) as type_in:
        assert type_in(redis_command("HSET", "told", name, "1")) == ":1"

    assert redis.hgetall("told") == {name: "1"}


def documented_commands() -> list[str]:
    """Return what the docs let their reader type into redis-cli, without the remarks."""
    lines = re.findall(r"^ +> (.+)$", page("how-to/entries"), re.MULTILINE)
    return [re.sub(r"\s+#.*", "", line) for line in lines]


@pytest.fixture
def beat(celery: CeleryLauncher) -> None:
    celery("worker", "-c", "1", "-P", "threads")
    celery("beat").wait_for("this beat leads")


@pytest.mark.parametrize("command", [("perl", "-e", PERL), ("node", "-e", JAVASCRIPT)], ids=["Perl", "JavaScript"])
def test_another_language_inserts_pauses_resumes_and_deletes_an_entry(
    command: tuple[str, ...], beat: None, server: RedisServer, redis: Redis, oracle: Oracle
) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"there is no {command[0]} here")
    definition = f'{{"task": "{APP}.plain", "args": ["grüße"], "schedule": 0.5}}'

    def decided(decision: str, number: int = 1) -> Callable[[], bool]:
        return lambda: sum(r["decision"] == decision for _, r in redis.xrange(HISTORY)) >= number

    with program(*command, str(server.path)) as send:
        assert send("HSET", "redbeat:theirs", "definition", definition) == ":1"
        assert send("ZADD", SCHEDULE, "0", "redbeat:theirs") == ":1"
        oracle.wait_ended(2, "grüße")

        assert send("HSET", "redbeat:theirs", "policy", '{"paused": true, "note": "schön"}') == ":1"
        wait_until(decided("paused", 2), what="two decisions for a pause")
        assert {r["reason"] for _, r in redis.xrange(HISTORY) if r["decision"] == "paused"} == {"schön"}

        sent = redis.xlen(HISTORY)
        runs = oracle.started("grüße")
        assert send("HDEL", "redbeat:theirs", "policy") == ":1"
        oracle.wait_started(runs + 1, "grüße")
        wait_until(lambda: redis.xlen(HISTORY) > sent)  # it is written when the message is sent

        assert send("ZREM", SCHEDULE, "redbeat:theirs") == ":1"
        assert send("DEL", "redbeat:theirs") == ":1"
    assert_it_is_over(redis)


def test_the_commands_of_the_docs_work(
    beat: None, server: RedisServer, redis: Redis, oracle: Oracle, app: Celery
) -> None:
    commands = documented_commands()
    assert [command.split()[0] for command in commands][:2] == ["HSET", "ZADD"]
    assert commands[-1].split()[0] in {"ZREM", "DEL"}

    with command_line(server.path) as send:
        for command in commands:
            assert re.match(r"[:+$*]", send(command.replace("shop.greet", f"{APP}.plain"))), command
            if command.startswith("ZADD"):
                oracle.wait_ended(1, "you")
            if " redbeat:once" in command and command.startswith("ZADD"):
                wait_until(lambda: redis.zscore(SCHEDULE, "redbeat:once") == ONCE.timestamp(), what="its instant")
                monday = Schedule(app).get("monday").timetable.next(ONCE)
                assert monday.timestamp() == redis.zscore(SCHEDULE, "redbeat:monday")
                assert (monday.weekday(), monday.day, monday.hour) == (0, 7, 8)
            if '"paused"' in command:
                redis.zadd(SCHEDULE, {"redbeat:greet": 0}, xx=True)
                redis.hset("redbeat:greet", "meta", "")  # it has never run: that is due at once
                wait_until(
                    lambda: "paused" in [record["decision"] for _, record in redis.xrange(HISTORY)], what="a pause"
                )
    assert redis.zcard(SCHEDULE) == 0
    assert_it_is_over(redis)


def assert_it_is_over(redis: Redis) -> None:
    """A beat notices another entry, and nothing is left that it could run or complain about."""
    redis.hset("redbeat:last", "definition", f'{{"task": "{APP}.plain", "args": ["last"], "schedule": 60}}')
    redis.zadd(SCHEDULE, {"redbeat:last": 0})
    wait_until(lambda: "last" in [record["entry"] for _, record in redis.xrange(HISTORY)], what="the next decision")
    assert redis.zrange(SCHEDULE, 0, -1) == ["redbeat:last"]
    assert not redis.exists("redbeat::quarantine")
