"""The options of an entry's message, and of the signatures in it, that Celery or a worker cannot use with any value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeGuard

from celery.app.task import Context
from celery.utils.saferepr import saferepr
from kombu import Exchange, Queue
from kombu.compression import get_encoder
from kombu.serialization import registry

from ...errors import EntryError
from ...locks import seconds_until
from ...locks.base import HEADER, RUN_HEADER
from ...locks.key import check_sendable
from ...log import LONGEST_REASON

if TYPE_CHECKING:
    from ...locks.base import Options
    from ...locks.key import NamedArguments

__all__ = (
    "SIGNATURES",
    "cause",
    "check_encoding",
    "check_signatures",
    "check_values",
    "scalar",
    "shortened",
)

#: Options whose value is a signature or a list of signatures.
SIGNATURES = ("link", "link_error", "chain", "chord")

#: Headers that Celery (the attributes of its request), kombu or singlebeat sets: an entry's would replace them.
TAKEN_HEADERS = frozenset(
    {name for name in vars(Context) if not name.startswith("__")}
    | {"lang", "task", "argsrepr", "kwargsrepr", "compression", HEADER, RUN_HEADER}
)

#: The values that kombu accepts: any other raises a KeyError, which kombu takes for a lost connection to Redis.
DELIVERY_MODES = (1, 2, "transient", "persistent")


def check_values(options: Options) -> None:
    """Check the numbers, dates, names, headers and signatures among the options of a call, and in these signatures.

    The main process of a worker reads them. Celery's main process ends on some unreadable values.

    Raises:
        EntryError: an option has a value that Celery cannot use, or replaces a header that Celery or singlebeat sets.
    """
    _check_all(lambda: _options(options))


def check_signatures(task: str, kwargs: NamedArguments) -> None:
    """Check the options in signatures that are arguments of Celery's own tasks, such as a chain.

    Raises:
        EntryError: an option has a value that Celery cannot use.
    """
    if task.startswith("celery."):
        _check_all(lambda: _options_of({"task": task, "kwargs": kwargs}))


def check_encoding(options: Options) -> None:
    """Check that this process could serialize and compress a message with these options.

    Raises:
        EntryError: the serializer or the compression is unknown here.
    """
    for name, is_known in (("serializer", _is_serializer), ("compression", _is_compression)):
        if options.get(name) and not is_known(options[name]):
            value = saferepr(options[name], 80)
            raise EntryError(
                f"definition: the option {name} is {value}, which kombu does not know here: is it installed?"
            )


def _is_serializer(name: object) -> bool:
    return isinstance(name, str) and name in registry.name_to_type


def _is_compression(name: object) -> bool:
    try:
        get_encoder(name)
    except (KeyError, TypeError):
        return False
    return True


def _check_all(found: Callable[[], Iterator[Options]]) -> None:
    try:
        for options in found():
            for name, (is_usable, wanted) in _CHECKS.items():
                _check(name, options.get(name), is_usable, wanted)
            _check_stamps(options)
            _check_headers(options.get("headers"))
    except RecursionError:
        raise EntryError("definition: the signatures are nested too deeply") from None


def _check(name: str, value: object, is_usable: Callable[[object], bool], wanted: str) -> None:
    try:
        if value is None or is_usable(value):
            return
    except (ValueError, TypeError, OverflowError):
        pass
    what = "a string" if name in SIGNATURES and isinstance(value, str) else scalar(value)  # it may hold secrets
    raise EntryError(f"definition: the option {name} is {what}: use {wanted}")


def _check_headers(headers: object) -> None:
    if not isinstance(headers, dict | None):
        raise EntryError("definition: the option headers is not a JSON object")
    for name in headers or ():
        if name in TAKEN_HEADERS:
            raise EntryError(f"definition: the option headers has {name!r}, which an entry must not set")


def _check_stamps(options: Options) -> None:
    """Check that each stamped header has a value: its sender fails without, which may be the worker of a run."""
    for name in options.get("stamped_headers") or ():
        if name not in options:
            shown = shortened(name)
            raise EntryError(
                f"definition: the option stamped_headers names {shown}, which has no value: add the option {shown}, "
                "or leave the name out"
            )


def scalar(value: object) -> str:
    """Return a value for an error; of one that may hold secrets only its type, and of a schedule its kind."""
    if isinstance(value, Mapping):
        kind = value.get("__type__")
        fields = f"an object with the fields {saferepr([*value], 80)}"
        return f"of type {saferepr(kind, 80)}" if isinstance(kind, str) else fields
    if isinstance(value, str) and "://" in value:
        return "a string with a URL"
    return "an array" if isinstance(value, list | tuple) else saferepr(value, 80)


def shortened(value: object) -> str:
    """Return a name or a value for an error: its repr, of which no more than the beginning if it is long.

    The values of an object may be secret: they are not quoted.
    """
    if isinstance(value, dict) and value:
        return "an object"
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return "a list of lists or objects"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def cause(exc: Exception) -> str:
    """Return an error of a decoder or a constructor for the message of another error: its class, and what it says."""
    return f"{type(exc).__name__}: {exc}"[:LONGEST_REASON]


def _options(options: Options) -> Iterator[Options]:
    """Yield the options of a call, and those of the signatures in them."""
    yield options
    for name in SIGNATURES:
        yield from _options_of(options.get(name))


def _options_of(value: object) -> Iterator[Options]:
    """Yield the options of a signature or of a list of signatures, and those of the signatures in them."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _options_of(each)
    if not isinstance(value, Mapping):
        return
    options, kwargs, task = value.get("options"), value.get("kwargs"), value.get("task")
    if isinstance(options, Mapping):
        yield from _options(options)
    if value.get("subtask_type") == "chord":  # Celery makes options of its further fields
        yield from _options(value)
    if isinstance(task, str) and task.startswith("celery.") and isinstance(kwargs, Mapping):
        yield from _options_of([*kwargs.values()])
        if task == "celery.chord":  # it passes its further arguments on as options
            yield from _options(kwargs)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_limit(value: object) -> bool:
    return _is_number(value) and value >= 0


def _is_wait(value: object) -> bool:
    return _is_number(value) and _is_in_the_calendar(value)


def _is_moment(value: object) -> bool:
    return isinstance(value, str | datetime) and _is_in_the_calendar(value)


def _is_in_the_calendar(value: str | datetime | float) -> bool:
    now = datetime.now(UTC)
    _ = now + timedelta(seconds=seconds_until(value, now) or 0)  # Celery computes this date: it must not overflow
    return True


def _is_name(value: object) -> bool:
    if not isinstance(value, str):
        return False
    check_sendable(value)
    return True


def _is_place(value: object) -> bool:
    return _is_name(value) or isinstance(value, Exchange | Queue)  # that only beat_schedule can give


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_name, value)) and len({*value}) == len(value)


def _are_links(value: object) -> bool:
    links = value if isinstance(value, list | tuple) else [value]
    return all(_is_signature(link, is_alone=len(links) == 1) for link in links)


def _is_chain(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_signature(step) for step in value)


def _is_signature(value: object, *, is_alone: bool = True) -> bool:
    """Return whether Celery makes a signature of a value that it can send after a run.

    Celery takes the fields of an object as they are, and replaces only those of a chain, a group and the like. It
    puts the result before the ``args``, but not if the signature is immutable. It sends several links as a group, for
    which it copies ``args`` and ``kwargs``.
    """
    if not isinstance(value, Mapping) or not _is_name(value.get("task")):
        return False
    args, kwargs, options = value.get("args"), value.get("kwargs"), value.get("options")
    if not isinstance(args, list | tuple | None) or not isinstance(kwargs, Mapping | None):
        return False
    if not isinstance(options, Mapping):
        return False
    if value.get("subtask_type"):
        return kwargs is not None
    needs_args = not (is_alone and value.get("immutable"))
    return (args is not None or not needs_args) and (kwargs is not None or is_alone)


#: What Celery needs of a signature.
_SIGNATURE = "{task, args, kwargs, options}: the name of a task, an array and two objects"

_CHECKS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        ("time_limit", "soft_time_limit", "timeout", "confirm_timeout"), (_is_limit, "a number of seconds, 0 or more")
    ),
    "countdown": (_is_wait, "a number of seconds"),
    "eta": (_is_moment, "an ISO 8601 date"),
    "expires": (lambda value: _is_wait(value) or _is_moment(value), "a number of seconds or an ISO 8601 date"),
    "delivery_mode": (lambda value: value in DELIVERY_MODES, "one of 1, 2, transient, persistent"),
    **dict.fromkeys(("queue", "exchange"), (_is_place, "a name")),
    **dict.fromkeys(("routing_key", "shadow", "serializer"), (_is_name, "a name")),
    # Those of a signature that Celery has made; a worker that cannot read them ends.
    **dict.fromkeys(
        ("task_id", "root_id", "parent_id", "group_id", "reply_to", "correlation_id"), (_is_name, "a name")
    ),
    **dict.fromkeys(("argsrepr", "kwargsrepr"), (_is_name, "a string")),
    **dict.fromkeys(("retries", "group_index", "replaced_task_nesting"), (_is_count, "a whole number, 0 or more")),
    "link": (_are_links, f"signatures, each as {_SIGNATURE}"),
    "chain": (_is_chain, f"an array of signatures, each as {_SIGNATURE}"),
    "stamped_headers": (_are_names, "a list of names, each once"),
}
