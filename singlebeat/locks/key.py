"""The unique key of a call: the same for every way to write the same arguments, and different for any others."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json as kombu_json

from ..masking import masked, masked_arguments, masked_text

if TYPE_CHECKING:
    from celery import Celery

__all__ = (
    "LOCK_FIELDS",
    "LOCK_KEYS",
    "behind_key",
    "beside",
    "canonical",
    "check_sendable",
    "culprit",
    "digest",
    "done_key",
    "held_up_by",
    "is_encodable",
    "is_turn_key",
    "lock_key",
    "readable",
    "suspects_key",
    "turn_key",
)

#: The arguments of a call by position and by name, which may have any type.
Arguments = Sequence[object]
NamedArguments = Mapping[str, object]

#: The fields of a lock that other programs may read, with what each holds; the reference in the docs prints these
#: tables. There are more fields, which may change.
LOCK_FIELDS: Mapping[str, str] = {
    "id": "The id of the task that holds the lock.",
    "state": "``queued``: for its message; ``running``; ``timed``: for a fixed time, or until it is unlocked.",
    "task": "The name of the task.",
    "args": "The arguments of the call, for people.",
    "entry": "The entry that has sent the call; empty: a program has sent it.",
    "since": "Since when the lock is in this state, in milliseconds since 1970.",
    "fence": "The fencing number of the run.",
    "worker": "The worker that has renewed the lock last.",
    "renewed": "When that was, or when its waiting message asked for it last, in milliseconds since 1970.",
    "sent": "JSON with the ``broker`` of its message: transport, host, port, virtual host; and more, which may change.",
}

#: The keys of locks: the Redis type and what each holds.
LOCK_KEYS: Mapping[str, tuple[str, str]] = {
    "<lock>": ("hash", "A lock, with the fields of the table below."),
    "<lock>:done": ("zset", "The ids of the runs that ended under the lock lately, which must not run again."),
    "<lock>:next": (
        "hash",
        "The lock of the call that waits behind it (``buffer_one``, ``until_and_while_executing``).",
    ),
    "<lock>:turn": (
        "hash",
        "The lock of the next call that waits and runs by itself (``buffer_all``, a step of a chain).",
    ),
    "<lock>:<task id>": ("hash", "The lock of a run that has one of its own, beside the first."),
    "<prefix>:suspects": ("zset", "The locks that have refused a call, and whose messages may be lost."),
    "singlebeat:workers": (
        "zset",
        "The workers with singlebeat that were seen, each with its broker and the time: for a day, the last for 30 "
        "days. As long as there are any, beat locks plain tasks. All apps of a server and its database share the key.",
    ),
}

#: Maximum length of the arguments in a lock's record, which are for people.
READABLE_LENGTH = 200

#: Matches a key with a hash tag: a string between the first opening brace and the next closing brace that is not empty.
#: A cluster computes the slot of the key from the hash tag only.
_HASH_TAG = re.compile(r"[^{]*\{[^}]+\}", re.DOTALL)

#: Types whose values are equal exactly if their JSON is, within one type.
_PLAIN = frozenset({type(None), bool, int, str})

#: Made once, because making an encoder costs more than encoding a short string.
_encode_default = kombu_json.JSONEncoder().encode
_encode_sorted = json.JSONEncoder(sort_keys=True).encode


def canonical(
    bound: inspect.BoundArguments, defaults: NamedArguments, encoder: type | None = None
) -> tuple[list[object], dict[str, object]]:
    """Return the arguments in one form, however the call wrote them: by name where they have a name.

    What equals its default is left out, so that a task may get a further argument with a default and keep its keys.

    Args:
        bound: the arguments that the call gives.
        defaults: the values of those that it may leave out, by name, as they would be sent.
        encoder: as in ``digest``.
    """
    positional: list[object] = []
    named: dict[str, object] = {}
    for name, value in reversed(bound.arguments.items()):
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional.extend(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.POSITIONAL_ONLY and positional:
            positional.insert(0, value)  # keeps the places of those behind it
        elif name in defaults and _are_equal(value, defaults[name], encoder):
            continue
        elif kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return positional, named


def _are_equal(one: object, other: object, encoder: type | None) -> bool:
    if encoder is None and type(one) in _PLAIN and type(other) in _PLAIN:
        return type(one) is type(other) and one == other
    try:
        return _text(one, encoder) == _text(other, encoder)
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # what has no JSON, be it a default that no call can give, equals nothing
        return False


def digest(
    task: str, args: Arguments, kwargs: NamedArguments, *, scope: object = None, encoder: type | None = None
) -> str:
    """Return the SHA-256 of the canonical JSON of a call, in hex.

    Args:
        scope: further value that distinguishes calls, besides task and arguments.
        encoder: JSON encoder class for the arguments; default: kombu's, which knows UUID, datetime and Decimal.

    Raises:
        TypeError: an argument cannot be encoded; the message names it.
    """
    call = [task, list(args), dict(kwargs)] + ([scope] if scope else [])
    try:
        text = _text(call, encoder)
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:  # an object's own methods may raise any error
        raise TypeError(f"{task}: {culprit(args, kwargs, encoder)} cannot be part of a unique key: {exc}") from exc
    return hashlib.sha256(text.encode()).hexdigest()


def _text(value: object, encoder: type | None) -> str:
    # Encoded and decoded first, as in a message: dict keys become strings, which sender and worker sort alike.
    return _encode_sorted(json.loads(_encoded(value, encoder)))


def _encoded(value: object, encoder: type | None) -> str:
    return str(kombu_json.dumps(value, cls=encoder) if encoder else _encode_default(value))


def culprit(args: Arguments, kwargs: NamedArguments, encoder: type | None = None) -> str:
    """Return the name of the first argument that JSON cannot encode, for an error message."""
    for name, value in (*enumerate(args), *kwargs.items()):
        if not is_encodable(value, encoder):
            return f"argument {name!r}"
    return "the arguments"


def is_encodable(value: object, encoder: type | None = None) -> bool:
    """Return whether a value can be part of a unique key."""
    try:
        _encoded(value, encoder)
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # an object's own methods may raise any error
        return False
    return True


def lock_key(prefix: str, digest: str) -> str:
    """Return the key of a lock; the braces keep the lock and the keys beside it in one slot of a cluster."""
    return f"{prefix}{{{digest}}}"


def is_lock_key(key: str, prefix: str) -> bool:
    """Return whether a key is one that ``lock_key`` makes, or that stands beside it."""
    return re.fullmatch(r"\{[0-9a-f]{32,128}\}(:\w+)?", key.removeprefix(prefix)) is not None and key.startswith(prefix)


def beside(lock: str, name: str) -> str:
    """Return a key that belongs to a lock, in the same slot of a cluster."""
    return f"{lock}:{name}" if _HASH_TAG.match(lock) else f"{{{lock}}}:{name}"


def done_key(lock: str) -> str:
    """Return the key of the zset beside a lock that remembers which runs ended under the lock."""
    return beside(lock, "done")


def behind_key(lock: str) -> str:
    """Return the key of the place behind a lock, where one call waits for the end of the holder's run."""
    return beside(lock, "next")


def turn_key(lock: str) -> str:
    """Return the key of the turn of a lock: the call that waits for the end of the run and then runs by itself."""
    return beside(lock, "turn")


def suspects_key(prefix: str) -> str:
    """Return the key that records the locks whose messages may be lost."""
    return f"{prefix}:suspects"


def is_turn_key(key: str) -> bool:
    """Return whether a key has the form of ``turn_key``."""
    return key.endswith(":turn") and _HASH_TAG.match(key) is not None


def held_up_by(key: str) -> tuple[str, ...]:
    """Return the possible keys of the lock for which the call at a key waits; empty if it waits for none."""
    lock, _, name = key.rpartition(":")
    return (lock, lock[1:-1]) if name in {"next", "turn"} else ()


def check_sendable(*texts: str) -> None:
    """Refuse strings that no server accepts; such a string would fail one request for many locks.

    Raises:
        UnicodeEncodeError: UTF-8 cannot encode a string, though JSON can.
    """
    "".join(texts).encode(errors="surrogateescape")


def readable(
    args: Arguments,
    kwargs: NamedArguments,
    options: Mapping[str, object] | None = None,
    *,
    app: Celery | None = None,
    task: str = "",
) -> str:
    """Return the arguments for people, cut at 200 characters.

    Args:
        options: options of the call, or headers of its message; ``argsrepr`` and ``kwargsrepr`` are shown instead.
        app: of the task; masks secret arguments.
        task: its name.
    """
    options = options or {}
    if options.get("argsrepr"):
        text = str(options["argsrepr"])
        parts = [masked_text(text, app, task=task) if app is not None else text]
    else:
        parts = [_shown(value) for value in (args if app is None else masked_arguments(task, args, app))]
    if kwargs and options.get("kwargsrepr"):
        text = str(options["kwargsrepr"])
        parts.append(masked_text(text, app) if app is not None else text)
    else:
        parts += [f"{name}={_shown(value)}" for name, value in (kwargs if app is None else masked(kwargs, app)).items()]
    # The repr of an object may contain characters that UTF-8 cannot encode, and no server would accept them.
    text = ", ".join(parts)[: READABLE_LENGTH + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= READABLE_LENGTH else text[: READABLE_LENGTH - 1] + "…"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except SoftTimeLimitExceeded:
        raise
    except Exception:  # it is for people only, and a call must not fail because of it
        return f"<{type(value).__name__}>"
