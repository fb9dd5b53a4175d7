"""The commands that tools advise, as an operator can paste them into a shell."""

from __future__ import annotations

import shlex

__all__ = ("command_line",)


def command_line(verb: str, name: str, *more: str, option: str = "") -> str:
    """Return the command line of ``celery singlebeat`` for an entry, a lock or a task id.

    A name may begin with a hyphen, and must not be taken for an option.

    Args:
        verb: the command.
        more: arguments that follow the name.
        option: with its value.
    """
    named = shlex.join((name, *more))
    words = (option, "--", named) if name.startswith("-") else (named, option)
    return " ".join(("celery", "singlebeat", verb, *filter(None, words)))
