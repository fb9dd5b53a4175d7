"""The lock modes, and the valid combinations of lock modes and overlap policies."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TypeGuard

from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json as kombu_json

from ..errors import ConfigError
from ..overlap import Overlap
from .key import culprit

if TYPE_CHECKING:
    from celery import Task

    from .base import Options
    from .key import Arguments, NamedArguments
    from .task import LockableTask, SingletonTask

__all__ = (
    "LockMode",
    "Overlap",
    "check",
    "decode_arguments",
    "drops_by_default",
    "encode_arguments",
    "equal_calls_may_differ",
    "has_continuations",
    "is_singleton",
    "overlap_for",
    "pick",
    "signature_of",
)


class LockMode(StrEnum):
    """The time in which a call excludes its duplicates (the terms of sidekiq-unique-jobs)."""

    #: From the call to the end of its run, retries included. This is the default.
    UNTIL_EXECUTED = "until_executed"
    #: From the call to the start of its run.
    UNTIL_EXECUTING = "until_executing"
    #: For ``lock_expiry`` seconds from the call.
    UNTIL_EXPIRED = "until_expired"
    #: From the start to the end of its run, retries and their countdowns included.
    WHILE_EXECUTING = "while_executing"
    #: One call may run, and one more may wait.
    UNTIL_AND_WHILE_EXECUTING = "until_and_while_executing"


_AT_THE_CALL = {Overlap.SKIP, Overlap.RAISE, Overlap.ALLOW_ALL}

#: The overlap policies that are valid for each lock mode.
TOGETHER: Mapping[LockMode, set[Overlap]] = {
    LockMode.UNTIL_EXECUTED: set(Overlap),
    LockMode.UNTIL_EXECUTING: _AT_THE_CALL,
    LockMode.UNTIL_EXPIRED: _AT_THE_CALL,
    LockMode.WHILE_EXECUTING: {Overlap.SKIP, Overlap.BUFFER_ALL, Overlap.ALLOW_ALL},
    LockMode.UNTIL_AND_WHILE_EXECUTING: _AT_THE_CALL,
}

#: Options of a call for which other calls wait: they would wait for ever if the call were not sent.
CONTINUATIONS = ("chord", "group_id", "link", "link_error", "replaced_task_nesting")


def _overlap_of(word: str, lock: LockMode) -> Overlap:
    """Return an overlap policy by its word, if the policy is valid for a lock mode.

    Raises:
        ConfigError: there is no such policy, or it contradicts the lock.
    """
    try:
        overlap = Overlap(word)
    except ValueError:
        raise ConfigError(f"overlap must be one of {', '.join(Overlap)}, not {word!r}") from None
    if overlap not in TOGETHER[lock]:
        allowed = ", ".join(word for word in Overlap if word in TOGETHER[lock])
        raise ConfigError(f"overlap={overlap} contradicts lock={lock}: there it is one of {allowed}")
    return overlap


def overlap_for(task: SingletonTask, word: str | None = None) -> Overlap:
    """Return the policy of a call: its own word, else its task's, else the app's.

    Raises:
        ConfigError: the call's word is wrong, or contradicts the task's lock.
    """
    lock, config = LockMode(task.lock), task.singleton_config
    if word:
        return _overlap_of(word, lock)
    if task.overlap is not None:
        return Overlap(task.overlap)
    raises = config.singleton_raise_on_duplicate if task.raise_on_duplicate is None else task.raise_on_duplicate
    if raises and lock is not LockMode.WHILE_EXECUTING:
        return Overlap.RAISE
    try:
        return _overlap_of(config.singlebeat_overlap, lock)
    except ConfigError:  # the app's default applies only to the tasks that allow it
        return Overlap.SKIP


def is_singleton(task: object) -> TypeGuard[SingletonTask]:
    """Return whether a task has the options of a Singleton; one of celery-singleton's class has not."""
    return hasattr(task, "call_signature")


def drops_by_default(task: Task | None) -> bool:
    """Return whether a duplicate call is dropped though its task sets no policy, and the call could wait.

    Args:
        task: a Singleton, or else a task whose lock beat acquires: None, or a plain task.
    """
    if not is_singleton(task):
        return True
    if task.overlap is not None or task.raise_on_duplicate is not None:
        return False
    return overlap_for(task) in {Overlap.SKIP, Overlap.RAISE} and Overlap.BUFFER_ALL in TOGETHER[LockMode(task.lock)]


def check(task: type[SingletonTask], name: str) -> None:
    """Refuse options of a task class that are wrong or contradict each other.

    Raises:
        ConfigError: the message names the task and the option.
    """
    try:
        _check_lock(task)
        _check_unique_on(task.unique_on, task.call_signature)
    except ConfigError as exc:
        raise ConfigError(f"task {name}: {exc}") from None


def _check_lock(task: type[SingletonTask]) -> None:
    if task.lock not in list(LockMode):
        raise ConfigError(f"lock must be one of {', '.join(LockMode)}, not {task.lock!r}")
    lock, expiry = LockMode(task.lock), task.lock_expiry
    if expiry is not None and not hasattr(expiry, "__get__") and not _is_duration(expiry):
        raise ConfigError(f"lock_expiry must be a positive number of seconds, or None, not {expiry!r}")
    if lock is LockMode.UNTIL_EXPIRED and task.lock_expiry is None:
        raise ConfigError("lock=until_expired needs lock_expiry")
    if task.overlap is None:
        return
    overlap = _overlap_of(task.overlap, lock)
    if task.raise_on_duplicate is not None and task.raise_on_duplicate != (overlap is Overlap.RAISE):
        raise ConfigError(f"overlap={overlap} contradicts raise_on_duplicate={task.raise_on_duplicate}")


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_unique_on(unique_on: object, signature: inspect.Signature) -> None:
    if unique_on is None or callable(unique_on):
        return
    names = [unique_on] if isinstance(unique_on, str) else unique_on
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "unique_on must be a name of an argument, a list of such names, or a function of all arguments, "
            f"not {unique_on!r}"
        )
    parameters = signature.parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    for name in names:
        if name.partition(".")[0] not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise ConfigError(f"unique_on names {name!r}, which is no argument of the task; its arguments: {known}")


def signature_of(run: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a task's function as its callers see it."""
    function = run.__func__ if isinstance(run, staticmethod) else run
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        return inspect.signature(lambda *args, **kwargs: None)
    if isinstance(run, staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def pick(unique_on: Sequence[str] | str | Callable[..., object], bound: inspect.BoundArguments) -> dict[str, object]:
    """Return the values that make a call unique, by name.

    Args:
        unique_on: names of arguments, dotted paths into them (``"user.id"``), or a function of all arguments.
    """
    if callable(unique_on):
        return {"unique_on": unique_on(*bound.args, **bound.kwargs)}
    names = [unique_on] if isinstance(unique_on, str) else unique_on
    return {name: _follow(bound, name) for name in names}


def _follow(bound: inspect.BoundArguments, path: str) -> object:
    first, *rest = path.split(".")
    arguments = bound.arguments
    if first not in arguments:  # a name in **kwargs
        spare = [p.name for p in bound.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        arguments = arguments.get(spare[0], {}) if spare else {}
    value = arguments.get(first)
    for step in rest:
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
    return value


def has_continuations(options: Options) -> bool:
    """Return whether a chain, a chord, a group, a callback or a replaced task waits for this very call."""
    # The last step of a chain has an empty option ``chain``, a call outside of chains has None.
    return options.get("chain") is not None or any(options.get(name) for name in CONTINUATIONS)


def equal_calls_may_differ(task: LockableTask) -> TypeGuard[SingletonTask]:
    """Return whether calls of a task with different arguments may have the same lock."""
    return task.unique_on is not None or not task.has_pure_keys


def encode_arguments(task: SingletonTask, args: Arguments | None, kwargs: NamedArguments | None) -> str:
    """Return the arguments of a call as JSON, for the run of another call that stands for it.

    The format is JSON for every serializer of a task, because data from a lock must not choose its own decoder.

    Raises:
        TypeError: JSON cannot encode an argument; the message names the argument.
    """
    args, kwargs = task.as_sent(args, kwargs)
    try:
        return str(kombu_json.dumps([args, kwargs]))
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:  # an object's own methods may raise any error
        name = culprit(args, kwargs)
        raise TypeError(f"{task.name}: overlap=buffer_one keeps arguments as JSON, {name} has none: {exc}") from exc


def decode_arguments(text: str) -> tuple[list[object], dict[str, object]]:
    """Return the arguments in a string of ``encode_arguments``.

    Raises:
        ValueError: the text is not such a pair of arguments.
    """
    try:
        args, kwargs = kombu_json.loads(text)
    except Exception as exc:  # the decoder of a user's type may raise any error
        raise ValueError(f"the arguments are not valid JSON: {exc}") from exc
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("not a list of arguments and a dict of keyword arguments")  # noqa: TRY004 - it is data
    return args, kwargs
