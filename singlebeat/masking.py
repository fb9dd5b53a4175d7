"""Masks the values of arguments whose names say that they are secret, wherever arguments are shown.

What is stored is not masked: an entry and a message need their arguments.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from .config import Config

if TYPE_CHECKING:
    from celery import Celery, Task

__all__ = ("MASK", "holds_mask", "masked", "masked_arguments", "masked_text", "unmasked")

#: Stands for a value that is not shown.
MASK = "**"

#: Most characters of a string that is parsed, so that a hostile one takes little time.
MOST_PARSED = 20_000

#: The fields of a definition or a signature: their names are no names of arguments.
OF_CALL = frozenset({"name", "task", "schedule", "args", "kwargs", "options", "enabled", "subtask_type", "immutable"})

#: The name of a value in JSON, or in the repr of a dict.
_NAME = re.compile(r"""(?P<quote>["'])(?P<name>[^"'\\]{1,200})(?P=quote)\s*:""")


def masked(value: Any, app: Celery) -> Any:
    """Return a value in which secret arguments are masked: those whose names match ``singlebeat_masked_arguments``.

    Dictionaries, lists and tuples are masked to any depth. A dictionary that names a task and its args, such as a
    definition or a signature, is that call: see ``masked_arguments``.
    """
    patterns = Config.of(app).singlebeat_masked_arguments
    if not patterns:
        return value
    try:
        return _masked(value, patterns, app)
    except RecursionError:
        return MASK


def masked_arguments(task: str, args: Sequence[Any], app: Celery) -> list[Any]:
    """Return the positional arguments of a task with the secret ones masked.

    They have names only if the task is registered in this process. Otherwise only names inside of them count.
    """
    patterns = Config.of(app).singlebeat_masked_arguments
    try:
        return _positional(task, args, patterns, app) if patterns else list(args)
    except RecursionError:
        return [MASK] * len(args)


def masked_text(text: str, app: Celery, *, task: str = "") -> str:
    """Return JSON or a repr with secret arguments masked, unchanged if there are none.

    A string that cannot be parsed is cut off behind the first secret name, or behind ``args``, which have no names.

    Args:
        task: name of the task whose positional arguments the string shows, if it shows such.
    """
    patterns = Config.of(app).singlebeat_masked_arguments
    if not patterns:
        return text
    for parse, write in ((json.loads, json.dumps), (ast.literal_eval, repr)):
        try:
            value = parse(text) if len(text) <= MOST_PARSED else None
            if value is not None:
                is_args = task and isinstance(value, list | tuple)
                shown = type(value)(masked_arguments(task, value, app)) if is_args else masked(value, app)
                return text if shown == value else write(shown)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    if task and any(_secret_positions(task, app, patterns, 100)):
        return MASK
    secret = (found for found in _NAME.finditer(text) if found["name"] == "args" or _is_secret(found["name"], patterns))
    first = next(secret, None)
    return text if first is None else f"{text[: first.end()]} {MASK}…"


def holds_mask(value: Any) -> bool:
    """Return whether a value is a mask, or has one at any depth."""
    if isinstance(value, Mapping):
        return any(map(holds_mask, value.values()))
    return any(map(holds_mask, value)) if isinstance(value, list | tuple) else bool(value == MASK)


def unmasked(value: Any, stored: Any) -> Any:
    """Return a value with the stored one in the place of each mask; a mask without a stored value stays."""
    if value == MASK:
        return value if stored is None else stored
    if isinstance(value, dict) and isinstance(stored, Mapping):
        return {name: unmasked(each, stored.get(name)) for name, each in value.items()}
    if isinstance(value, list) and isinstance(stored, Sequence) and not isinstance(stored, str):
        return [unmasked(each, stored[at] if at < len(stored) else None) for at, each in enumerate(value)]
    return value


def _masked(value: Any, patterns: tuple[str, ...], app: Celery) -> Any:
    if isinstance(value, Mapping):
        task, args = value.get("task"), value.get("args")
        own = OF_CALL if isinstance(task, str) and isinstance(args, list | tuple) else frozenset()
        shown = {
            name: MASK if name not in own and _is_named(name, patterns) else _masked(each, patterns, app)
            for name, each in value.items()
        }
        if isinstance(task, str) and isinstance(args, list | tuple):
            shown["args"] = _positional(task, args, patterns, app)
        return shown
    if isinstance(value, list | tuple):
        shown_ = [_masked(each, patterns, app) for each in value]
        return shown_ if isinstance(value, list) else tuple(shown_)
    return value


def _positional(task: str, args: Sequence[Any], patterns: tuple[str, ...], app: Celery) -> list[Any]:
    are_secret = _secret_positions(task, app, patterns, len(args))
    return [
        MASK if is_secret else _masked(each, patterns, app)
        for each, is_secret in zip(args, chain(are_secret, repeat(False)), strict=False)
    ]


def _secret_positions(task: str, app: Celery, patterns: tuple[str, ...], count: int) -> Sequence[bool]:
    """Return for each positional argument of a task whether its name is secret, as far as the names are known."""
    registered = app.tasks.get(task) if count else None
    names, rest = _names(registered) if registered is not None else ((), "")
    found = [_is_secret(name, patterns) for name in names[:count]]
    return found + [True] * (count - len(found)) if rest and _is_secret(rest, patterns) else found


@lru_cache(maxsize=1024)
def _names(task: Task) -> tuple[Sequence[str], str]:
    """Return the names of a task's positional parameters, and of the one that takes further ones; empty for none."""
    try:
        parameters = inspect.signature(task.run).parameters.values()
    except (ValueError, TypeError):  # written in C
        return (), ""
    names = [each.name for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
    return names, next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), "")


def _is_named(name: object, patterns: tuple[str, ...]) -> bool:
    return isinstance(name, str) and _is_secret(name, patterns)


@lru_cache(maxsize=4096)
def _is_secret(name: str, patterns: tuple[str, ...]) -> bool:
    return any(pattern.match(name) for pattern in _compiled(patterns))


@lru_cache(maxsize=16)
def _compiled(patterns: tuple[str, ...]) -> Sequence[re.Pattern[str]]:
    return [re.compile(translate(pattern), re.IGNORECASE) for pattern in patterns]
