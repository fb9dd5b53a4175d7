"""What tools say: sentences, lists of names, and commands as an operator can paste them."""

from __future__ import annotations

import shlex
from collections.abc import Collection

__all__ = ("command_line", "listed", "quoted", "redis_command", "sentence", "to_read")

#: How many names a sentence lists.
NAMED = 5


def sentence(said: object) -> str:
    """Return a clause as the beginning of a sentence."""
    text = str(said)
    return text[:1].upper() + text[1:]


def listed(names: Collection[str]) -> str:
    """Return names as text for a sentence: only the first few, if there are many."""
    shown = ", ".join([*names][:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown


def command_line(verb: str, name: str, *more: str, option: str = "") -> str:
    """Return the command line of ``celery singlebeat`` for an entry, a lock or a task id.

    A name may begin with a hyphen, and must not be taken for an option.

    Args:
        verb: the command.
        more: arguments that follow the name.
        option: with its value.
    """
    named = " ".join(map(quoted, (name, *more)))
    words = (option, "--", named) if name.startswith("-") else (named, option)
    return " ".join(("celery", "singlebeat", verb, *filter(None, words)))


def redis_command(*words: str) -> str:
    """Return a command as the prompt of redis-cli takes it.

    A shell takes the same, unless a word has unusual characters; then it runs nothing else, either.
    """
    return " ".join(map(_at_the_prompt, words))


def to_read(queue: str) -> str:
    """Return what lets a worker read a queue, as a clause."""
    if "," in queue:
        return "give the queue another name, because the -Q of a worker takes a comma for the end of a name"
    return f"start a worker with -Q {quoted(queue)}"


def quoted(word: str) -> str:
    """Return a word as a shell takes it; one with characters that cannot be seen, as bash and zsh take it."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'{}'".format("".join(_hex(char) if char in "\\'" or not char.isprintable() else char for char in word))


def _at_the_prompt(word: str) -> str:
    if shlex.quote(word) == word:
        return word
    if word.isprintable() and not {"'", "\\"} & {*word}:
        return f"'{word}'"
    # A shell would put something else in the place of the last three.
    return '"{}"'.format("".join(_hex(char) if char in '"\\$`!' or not char.isprintable() else char for char in word))


def _hex(char: str) -> str:
    """Return a character as escapes of its bytes; half of a pair, which no name in Redis has, as a question mark."""
    of_name = "\udc80" <= char <= "\udcff"  # a byte that is no UTF-8
    return "".join(f"\\x{byte:02x}" for byte in char.encode(errors="surrogateescape" if of_name else "replace"))
