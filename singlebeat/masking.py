"""Masks the values of arguments whose names say that they are secret, wherever arguments are shown.

What is stored is not masked: an entry and a message need their arguments.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from .config import Config
from .errors import EntryError
from .missing_modules import is_maybe_missing

if TYPE_CHECKING:
    from celery import Celery, Task

__all__ = (
    "IN_TEXT",
    "MASK",
    "Faces",
    "MaskError",
    "masked",
    "masked_arguments",
    "masked_text",
    "unmasked",
)

#: Stands for a value that is not shown.
MASK = "**"

#: The types of values that hold no secret by themselves: most values of long arguments.
_PLAIN = frozenset({int, float, bool, type(None)})

#: Most characters of a string that is parsed, so that a hostile one takes little time.
MOST_PARSED = 20_000

#: Parameters of a task whose names are looked at, at most.
MOST_PARAMETERS = 100

#: The fields of a definition or a signature: their names are no names of arguments.
OF_CALL = frozenset({"name", "task", "schedule", "args", "kwargs", "options", "enabled", "subtask_type", "immutable"})

#: The fields of a call and of its options that may hold arguments, or further calls, as a string.
IN_TEXT = frozenset({"args", "kwargs", "argsrepr", "kwargsrepr", "link", "link_error", "chain", "chord"})

#: Celery's tasks that call another one for each item of their second argument, ``it``.
MAPPING = frozenset({"celery.map", "celery.starmap", "celery.chunks"})

#: The part of a URL before its password, or before its port: JSON may have escaped the slashes, and a repr the escapes.
#: A character that JSON has escaped. The password in the query of a URL.
_USER = re.compile(r":\\{0,9}/\\{0,9}/[^:\s]*:")
_NO_PORT = re.compile(_USER.pattern + r"(?!\d{1,5}(?:[/?]|$))")
_ESCAPED = re.compile(r"\\u00")
_WORD = re.compile(r"\S+")
_IN_QUERY = re.compile(r"[?&]password=", re.IGNORECASE)

#: The name of a value in JSON, in a repr, or in what is neither. Its quotes may be escaped, as of JSON in a string, and
#: the colon behind it may be missing. A long or escaped one could be any name.
_NAME = re.compile(
    r"""(?P<quote>\\{0,9}["'])"""
    r"""(?:(?P<name>(?:[^"'\\]|\\.){1,200}?)(?P=quote)(?=\s*[^\s,\]}])|(?P<long>(?:[^"'\\]|\\.){201}))"""
    r"""|\b(?P<bare>\w+)(?:\s*[:=]|\\{0,9}["'])""",
    re.DOTALL,
)

#: A string in Python, on one line.
_STRING = re.compile(rb"""[a-zA-Z]{0,2}(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")


def masked(value: Any, app: Celery) -> Any:
    """Return a value in which secret arguments are masked: those whose names match ``singlebeat_masked_arguments``.

    A string in which a URL has a password is secret, too. It is masked as a whole, so that ``unmasked`` can replace it.
    Dictionaries, lists and tuples are masked to any depth. A dictionary that names a task and its args, such as a
    definition or a signature, is that call: see ``masked_arguments``.
    """
    patterns = Config.of(app).singlebeat_masked_arguments
    if not patterns:
        return value
    try:
        return _masked(value, patterns, app, is_nested=False)
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

    A string that cannot be parsed is cut off behind the first secret name, behind ``args``, which have no names, before
    a string that is too long to be known as no name, or before the first password of a URL, that of a URL which is cut
    off, or the first character that JSON has escaped by its number: it may be of a URL.

    Args:
        task: name of the task whose positional arguments the string shows, if it shows such.
    """
    patterns = Config.of(app).singlebeat_masked_arguments
    if not patterns:
        return text
    for parse, write in ((_parsed, json.dumps), (_literal, repr)):
        try:
            value = parse(text) if len(text) <= MOST_PARSED else None
            if isinstance(value, str):  # which may hold JSON itself
                shown = masked_text(value, app, task=task)
                return text if shown == value else write(shown)
            if value is not None:
                is_args = task and isinstance(value, list | tuple)
                shown = type(value)(masked_arguments(task, value, app)) if is_args else masked(value, app)
                return text if shown == value else write(shown)
        except _RepeatedNameError:
            break
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    if task and any(_secret_positions(task, app, patterns, MOST_PARAMETERS)):
        return MASK
    secrets = (found for found in _NAME.finditer(text) if _may_be_secret(found, patterns))
    hidden = ((found["long"] or "\\" in (found["name"] or ""), found) for found in secrets)  # a name that may hold it
    secret = next((found.start() if is_hidden else found.end() for is_hidden, found in hidden), len(text))
    escaped = found.start() if (found := _ESCAPED.search(text)) else len(text)
    end = re.split(r"[\s@]", text[-MOST_PARSED:])[-1]  # where a URL may be cut off before the @ that shows a password
    cut_off = len(text) - (len(end) - found.start() if (found := _NO_PORT.search(end)) else 0)
    first = min(secret, escaped, cut_off, _password_of_url(text))
    return text if first == len(text) else f"{text[:first]} {MASK}…"


class _RepeatedNameError(Exception):
    """A part of a value is not in what was parsed."""


def _parsed(text: str) -> Any:
    """Return the value of JSON.

    Raises:
        _RepeatedNameError: an object has a name twice, of which a reader sees the last value alone.
    """
    return json.loads(text, object_pairs_hook=_without_repetition)


def _literal(text: str) -> Any:
    """Return the value of a repr, which has no two strings beside one another: Python would take them for one.

    Raises:
        ValueError, SyntaxError: it is none.
    """
    tree, lines = ast.parse(text, mode="eval"), text.encode().split(b"\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            written = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
            if not _STRING.fullmatch(written):
                raise ValueError
    return ast.literal_eval(tree)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedNameError
    return found


def _password_of_url(text: str) -> int:
    """Return where the first password of a URL in a string begins; the string's length if there is none.

    It reaches up to the last ``@`` before a blank, because passwords are often not quoted as a URL requires.
    """
    first = len(text)
    if "/" in text:
        if found := _IN_QUERY.search(text):
            first = found.end()
        for word in _WORD.finditer(text, 0, first):
            if found := _USER.search(word[0].rpartition("@")[0]):
                return word.start() + found.end()
    return first


def _may_be_secret(found: re.Match[str], patterns: tuple[str, ...]) -> bool:
    name = found["name"] or found["bare"] or ""
    return found["long"] is not None or "\\" in name or name == "args" or _is_secret(name, patterns)


def _holds_mask(value: Any) -> bool:
    """Return whether a value is a mask, or has one at any depth."""
    if isinstance(value, Mapping):
        return any(map(_holds_mask, value.values()))
    return any(map(_holds_mask, value)) if isinstance(value, list | tuple) else bool(value == MASK)


class MaskError(EntryError):
    """A mask cannot be replaced by a stored value; the message says why, and ``path`` where it stands."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is {MASK}, which stands for a value that is stored, {why}: give the value")
        self.path = path


class Faces(NamedTuple):
    """A value, as it is shown to a user, and as it is masked for all; None where there is none."""

    value: Any = None
    shown: Any = None
    masked: Any = None

    def at(self, key: object) -> Faces:
        """Return what lies under a name, or at an index; a mask hides all that lies below it."""
        return Faces(*(_below(each, key) for each in self))


def unmasked(value: Any, stored: Faces, sent: Any, path: str = "") -> Any:
    """Return a value with the stored one in the place of each mask that stands for it.

    A mask stands for the value that was shown as a mask under the same names. In a list, it does so only beside what
    was shown beside it: else the secret of one element could become that of another one.

    Args:
        value: as a user has sent it back.
        stored: the stored value.
        sent: the value as it will be stored, masked for all; MASK as long as that is not known.

    Raises:
        MaskError: a mask stands for no stored value, or for an uncertain one, or its value would be shown.
    """
    if isinstance(value, dict | list) and stored.shown == MASK:
        stored = Faces()
    if isinstance(value, dict):
        return {
            name: unmasked(each, stored.at(name), _below(sent, name), f"{path}.{name}") for name, each in value.items()
        }
    if isinstance(value, list):
        places = _places(value, stored.shown)
        if None in places and _holds_mask(stored.shown):
            why = "but its list or what stood beside it has changed, so it is not certain which"
            raise MaskError(f"{path}.{places.index(None)}".strip("."), why)
        return [
            unmasked(each, stored.at(places[at]), _below(sent, at), f"{path}.{at}") for at, each in enumerate(value)
        ]
    if value != MASK:
        return value
    if stored.shown != MASK:
        raise MaskError(path.strip("."), "and none is at its place")
    if stored.masked == MASK != sent and stored.value != MASK:  # which may be stored as it is
        raise MaskError(path.strip("."), "but would be shown there")
    return stored.value


def _below(value: Any, key: object) -> Any:
    if isinstance(value, str) and value == MASK:
        return MASK
    if isinstance(value, Mapping):
        return value.get(key)
    is_there = isinstance(value, list) and isinstance(key, int) and key < len(value)
    return value[key] if is_there else None


def _places(value: Sequence[Any], shown: Any) -> Sequence[int | None]:
    """Return the index of the stored element for each element of a list that was sent back; None if it is not certain.

    A mask keeps its index in a list of the same length. An element that holds masks is the stored one that was shown
    alike; of several that were shown alike, all must have been sent back, so that their order is certain.

    Args:
        shown: the stored list, as it was shown.
    """
    before = shown if isinstance(shown, list) else []
    texts, alike = [_text(each) if _holds_mask(each) else "" for each in value], defaultdict[str, list[int]](list)
    for at, each in enumerate(before):
        if _holds_mask(each):
            alike[_text(each)].append(at)
    counts, places = Counter(texts), list[int | None]()
    certain = {text: iter(found) for text, found in alike.items() if len(found) == counts[text]}
    for at, (each, text) in enumerate(zip(value, texts, strict=True)):
        if each == MASK:
            places.append(at if len(value) == len(before) and before[at] == MASK else None)
        else:  # without a mask, there is nothing to be replaced
            places.append(next(certain.get(text, iter(())), None) if text else at)
    return places


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _masked(value: Any, patterns: tuple[str, ...], app: Celery, task: str = "", *, is_nested: bool = True) -> Any:
    """Return a value with secret arguments masked.

    Args:
        task: whose options the value is; empty: it is something else.
        is_nested: whether it stands in another value: a call may be a signature then.
    """
    if isinstance(value, Mapping):
        are_urls = {name for name in value if isinstance(name, str) and _password_of_url(name) < len(name)}
        if are_urls and is_nested:
            return MASK
        name_of_task, args = value.get("task"), value.get("args")
        is_call = isinstance(name_of_task, str) and isinstance(args, list | tuple)
        own = OF_CALL if is_call else frozenset()
        task = name_of_task if isinstance(name_of_task, str) else task
        shown = {
            MASK if name in are_urls else name: MASK
            if name in are_urls or (name not in own and _is_named(name, patterns))
            else _in_text(each, patterns, app, task if name in {"args", "argsrepr"} else "")
            if name in IN_TEXT or (name == "options" and isinstance(each, str))
            else _masked(each, patterns, app, task if name == "options" else "")
            for name, each in value.items()
        }
        # Results and the arguments of a group may come before those of a signature.
        is_behind = is_nested and "schedule" not in value and not value.get("immutable")
        if is_call and args is not None:
            shown["args"] = _positional(task, args, patterns, app, is_behind=is_behind)
        if isinstance(name_of_task, str) and isinstance(value.get("kwargs"), list | tuple) and value["kwargs"]:
            shown["kwargs"] = MASK  # as pairs of names and values, say: it cannot be used
        if isinstance(name_of_task, Mapping | str) and "it" in value:  # the kwargs of one of MAPPING
            shown["it"] = _items(name_of_task, value["it"], patterns, app)
        kwargs = value.get("kwargs")
        if is_call and task in MAPPING and args and isinstance(kwargs, Mapping) and "it" in kwargs:
            shown["kwargs"] = {**_masked(kwargs, patterns, app), "it": _items(args[0], kwargs["it"], patterns, app)}
        return shown
    if isinstance(value, list | tuple):
        shown_ = [each if type(each) in _PLAIN else _masked(each, patterns, app) for each in value]
        return shown_ if isinstance(value, list) else tuple(shown_)
    return MASK if isinstance(value, str) and _password_of_url(value) < len(value) else value


def _in_text(value: Any, patterns: tuple[str, ...], app: Celery, task: str) -> Any:
    """Return the value of a field that may hold arguments or calls as strings: each one that has a secret is masked."""
    if isinstance(value, str):
        return value if masked_text(value, app, task=task) == value else MASK
    if isinstance(value, list) and not task:
        return [_in_text(each, patterns, app, task) for each in value]
    return _masked(value, patterns, app)


def _items(called: object, items: Any, patterns: tuple[str, ...], app: Celery) -> Any:
    """Return the items of one of ``MAPPING``, for the calls of a task or of a signature."""
    if not isinstance(items, list | tuple):
        return _masked(items, patterns, app)
    task = str(called.get("task") if isinstance(called, Mapping) else called)
    return [_item(task, each, patterns, app) for each in items]


def _item(task: str, item: Any, patterns: tuple[str, ...], app: Celery) -> Any:
    """Return an argument of ``map``, or the arguments of ``starmap``, for one call of a task."""
    first = _positional(task, [item], patterns, app)[0]
    return _positional(task, item, patterns, app) if isinstance(item, list) and first != MASK else first


def _positional(
    task: str, args: Sequence[Any], patterns: tuple[str, ...], app: Celery, *, is_behind: bool = False
) -> list[Any]:
    """Return positional arguments with the secret ones masked.

    Args:
        is_behind: others may come before them, so each may have the name of a later parameter.
    """
    are_secret = (_secret_behind if is_behind else _secret_positions)(task, app, patterns, len(args))
    shown = [
        MASK if is_secret else _masked(each, patterns, app)
        for each, is_secret in zip(args, chain(are_secret, repeat(False)), strict=False)
    ]
    if task in MAPPING and len(args) > 1:
        shown[1] = _items(args[0], args[1], patterns, app)
    return shown


def _secret_positions(task: str, app: Celery, patterns: tuple[str, ...], count: int) -> Sequence[bool]:
    """Return for each positional argument of a task whether its name is secret, as far as the names are known.

    All may be secret where the module is missing that names them.
    """
    if is_maybe_missing(app, task):
        return [True] * count
    registered = app.tasks.get(task) if count else None
    names, rest = _names(registered) if registered is not None else ((), "")
    found = [_is_secret(name, patterns) for name in names[:count]]
    return found + [True] * (count - len(found)) if rest and _is_secret(rest, patterns) else found


def _secret_behind(task: str, app: Celery, patterns: tuple[str, ...], count: int) -> Sequence[bool]:
    """Return the same for arguments before which others may come, as many as the task has further parameters."""
    registered = app.tasks.get(task) if count else None
    names, rest = _names(registered) if registered is not None else ((), "")
    found = _secret_positions(task, app, patterns, MOST_PARAMETERS)
    most = MOST_PARAMETERS if rest else max(0, len(names) - count)
    return [any(found[at : at + most + 1]) for at in range(count)]


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
