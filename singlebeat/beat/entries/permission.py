"""The tasks that an entry makes run, wherever it names them: ``singlebeat_allowed_tasks`` applies to all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from celery.utils.saferepr import saferepr

from ...errors import EntryError
from ...masking import MAPPING
from .options import SIGNATURES, shortened

if TYPE_CHECKING:
    from .definition import JsonObject
    from .entry import Entry

__all__ = ("check_allowed", "tasks_called")

#: Options that say how a message is sent and run. Any other may refer to further messages, which are not checked.
PLAIN_OPTIONS = frozenset(
    {
        *("countdown", "eta", "expires", "expire_seconds", "time_limit", "soft_time_limit", "ignore_result", "shadow"),
        *("queue", "exchange", "exchange_type", "routing_key", "priority", "delivery_mode", "mandatory"),
        *("serializer", "compression", "retry", "retry_policy", "timeout", "confirm_timeout"),
        *("task_id", "add_to_parent", "overlap", "interval", "max_retries"),
        "headers",  # checked with the definition
    }
)

#: Celery's tasks that run the tasks in their arguments: the names of these arguments, and of those that name no task.
RUN_BY_ARGUMENTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "celery.map": (("task",), ("it",)),
    "celery.starmap": (("task",), ("it",)),
    "celery.chunks": (("task",), ("it", "n")),
    "celery.chain": (("tasks",), ()),
    "celery.group": (("tasks",), ("result", "group_id", "partial_args", "add_to_parent")),
    # Others are options of the tasks in it.
    "celery.chord": (("header", "body"), ("partial_args", "interval", "countdown", "max_retries", "eager")),
    "celery.chord_unlock": (("callback",), ("group_id", "result", "interval", "max_retries")),
}

#: The kinds of signatures that contain others, and the name of the Celery task of each.
KINDS = {
    "chain": "celery.chain",
    "group": "celery.group",
    "chord": "celery.chord",
    "xmap": "celery.map",
    "xstarmap": "celery.starmap",
    "chunks": "celery.chunks",
}

#: The fields of a signature: Celery makes options of the others of a chord.
FIELDS = frozenset({"task", "args", "kwargs", "options", "subtask_type", "immutable"})

#: The kinds of signatures whose own task never runs: a worker sends the signatures in them.
STRUCTURES = frozenset({"chain", "group", "chord"})

#: A name of a task that may be shown.
PLAIN_NAME = re.compile(r"[\w.:-]{1,200}")


def check_allowed(entry: Entry, patterns: Sequence[str]) -> None:
    """Check the tasks that an entry makes run: its own, and those that its options and Celery's own tasks name.

    Raises:
        EntryError: a task matches no pattern, or the tasks cannot be determined.
    """
    if "*" in patterns:
        return
    if not _matches(entry.task, patterns):
        raise EntryError(f"its task {entry.task} is not among singlebeat_allowed_tasks")
    try:
        names = {*_tasks_of_call(entry.task, entry.args, entry.kwargs, entry.options)}
    except EntryError:
        raise
    except RecursionError:
        raise EntryError("its signatures are nested too deeply for singlebeat_allowed_tasks") from None
    except Exception as exc:  # any program may have written what a check does not expect
        why = f"singlebeat_allowed_tasks cannot check the tasks that it makes run: {type(exc).__name__}"
        raise EntryError(why) from exc
    for name in names:
        if not _matches(name, patterns):
            # Another text may be a signature as JSON, with secrets in it: Celery would take it for a name.
            shown = f"task {name}" if PLAIN_NAME.fullmatch(name) else "a task whose name is no plain one"
            raise EntryError(f"it makes {shown} run, which is not among singlebeat_allowed_tasks")


def tasks_called(entry: Entry) -> frozenset[str]:
    """Return the tasks that an entry makes run besides its own, as by ``link`` or a chain; empty if that is unknown."""
    try:
        return frozenset(_tasks_of_call(entry.task, entry.args, entry.kwargs, entry.options))
    except Exception:  # any program may have written what this does not expect
        return frozenset()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tasks_of_call(task: str, args: object, kwargs: object, options: object) -> Iterator[str]:
    """Yield the tasks that a call makes run besides itself."""
    if task in RUN_BY_ARGUMENTS:
        checked, harmless = RUN_BY_ARGUMENTS[task]
        for name in checked:
            # A positional value could become this argument, also by moving behind the result of the previous task.
            if args or not isinstance(kwargs, Mapping) or name not in kwargs:
                raise EntryError(f"{task} needs {name} by name, so that singlebeat_allowed_tasks can check it")
            yield from _tasks(kwargs[name])
        called = kwargs["task"] if isinstance(kwargs, Mapping) and task in MAPPING else ""
        if not isinstance(called, Mapping | str):
            raise _unchecked_error(called)
        if (called if isinstance(called, str) else called["task"]) in RUN_BY_ARGUMENTS:
            raise EntryError(
                f"{task} calls a task of Celery: singlebeat_allowed_tasks cannot check the tasks in its items"
            )
        for name, value in kwargs.items() if isinstance(kwargs, Mapping) else ():
            # The kwargs of a chord replace those of the signatures in it.
            if name not in {*checked, *harmless} and (name != "kwargs" or value):
                what = f"{task} has the argument {shortened(name)}"
                raise EntryError(f"{what}: singlebeat_allowed_tasks cannot check the tasks in it")
    if not isinstance(options, Mapping | None):
        raise _unchecked_error(options)
    for name, value in (options or {}).items():
        if name in SIGNATURES:
            yield from _tasks(value) if value is not None else ()
        elif name not in PLAIN_OPTIONS:
            raise EntryError(f"the option {name} is unknown: singlebeat_allowed_tasks cannot check the tasks in it")


def _tasks(value: object) -> Iterator[str]:
    """Yield the tasks of a signature, a list of signatures, or a string, which Celery takes for the name of a task."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tasks(each)
    elif isinstance(value, Mapping):
        yield from _tasks_of(value)
    else:
        raise _unchecked_error(value)


def _tasks_of(signature: JsonObject) -> Iterator[str]:
    task, kind = signature.get("task"), signature.get("subtask_type")
    if not isinstance(task, str) or not isinstance(kind, str | None) or (kind and KINDS.get(kind) != task):
        raise _unchecked_error(signature)
    for name in signature.keys() - FIELDS:
        raise EntryError(
            f"a signature has the field {shortened(name)}: singlebeat_allowed_tasks cannot check the tasks in it"
        )
    is_structure = kind in STRUCTURES
    if not is_structure:
        yield task
    # The args of a structure are further arguments of the signatures in it.
    args = None if is_structure else signature.get("args")
    yield from _tasks_of_call(task, args, signature.get("kwargs"), signature.get("options"))


def _unchecked_error(value: object) -> EntryError:
    # The message goes to logs: arguments may be secret.
    if isinstance(value, Mapping):
        shown: object = {name: _named(value[name]) for name in ("task", "subtask_type") if name in value}
    else:
        shown = _named(value)
    return EntryError(f"singlebeat_allowed_tasks cannot check the tasks in this value: {saferepr(shown)}")


def _named(value: object) -> object:
    """Return a name, a number or None as it is, of any other value its type."""
    is_plain = PLAIN_NAME.fullmatch(value) if isinstance(value, str) else isinstance(value, int | float | None)
    return value if is_plain else type(value)
