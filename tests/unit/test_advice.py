"""Commands that tools print are pasted at 3 a.m.: the name of an entry or of a queue must run no other command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from singlebeat.advice import command_line, listed, quoted, redis_command, to_read
from tests.support import ODD_NAMES


def in_bash(text: str, at: Path) -> list[str]:
    """Return the words of a command after the first as bash takes them."""
    script = f"show() {{ printf '%s\\0' \"$@\"; }}\nshow {text.partition(' ')[2]}"
    found = subprocess.run([shutil.which("bash") or "bash", "-c", script], check=True, cwd=at, stdout=subprocess.PIPE)
    return found.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_pasted_into_a_shell_as_it_is(name, tmp_path):
    assert in_bash(f"celery {quoted(name)}", tmp_path) == [name]
    assert in_bash(command_line("explain", name), tmp_path)[-1] == name
    assert in_bash(to_read(name).removeprefix("start a "), tmp_path)[-1] == name
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_command_for_the_prompt_of_redis_runs_nothing_in_a_shell(name, tmp_path):
    words = in_bash(redis_command("ZADD", name, "0", name), tmp_path)

    assert len(words) == 3
    assert [*tmp_path.iterdir()] == []
    if name in {"plain", "two words", "Bob's report", "x; touch pwned #", "$(touch pwned)"}:
        assert words == [name, "0", name], "a shell takes the usual names, too"


def test_a_byte_that_is_no_utf8_is_advised_as_itself():
    assert redis_command("DEL", "a\udcff") == r'DEL "a\xff"'
    assert quoted("a\udcff'") == r"$'a\xff\x27'"
    assert quoted("\ud800") == r"$'\x3f'", "no name in Redis has it"


def test_a_queue_whose_name_has_a_comma_is_to_be_renamed():
    """-Q, and purge, would take other queues for it: one that has messages, for example."""
    assert to_read("celery,low").startswith("give the queue another name")


def test_a_list_names_the_first_few():
    assert listed([*"abcdefg"]) == "a, b, c, d, e and 2 more"
