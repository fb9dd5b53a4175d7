"""Which lock a call takes before it is sent, and what becomes of a call that does not get it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import LockBackendError, UnusableLockError
from ..locks.base import RUN_HEADER, Call, Holder, Ref, Ticket, Verdict, generation, unusable
from ..locks.key import readable
from .policy import Lock, Overlap, encode_arguments, has_continuations
from .undo import never_mind, undo_later

__all__ = ("claim", "unclaimed")


def unclaimed(task: Any, task_id: str, key: str, overlap: Overlap) -> Ticket:
    """Return the ticket of a call that holds no lock while it waits, such as one that was sent by name."""
    if overlap is Overlap.ALLOW_ALL or task.lock in {Lock.UNTIL_EXECUTING, Lock.UNTIL_EXPIRED}:
        return Ticket(task_id, f"{key}:{task_id}")  # a lock of its own excludes nobody, and refuses copies of the call
    skipped = overlap in {Overlap.SKIP, Overlap.RAISE} and task.lock != Lock.UNTIL_AND_WHILE_EXECUTING
    return Ticket(task_id, key, waits=not skipped)


def claim(
    task: Any, task_id: str, args: Any, kwargs: Any, *, overlap: Overlap, options: Mapping[str, Any]
) -> tuple[Ticket | Holder, str]:
    """Take the lock that a call needs before it is sent.

    Returns:
        Its ticket and the key that was taken for it, or else who holds the lock and nothing.

    Raises:
        LockBackendError: the locks' server does not answer, or what is at the lock's key is no lock.
        TypeError, EncodeError: the arguments do not fit the task, or one of them cannot be encoded.
        ValueError: countdown, eta or expires among the options makes no sense.
        OperationalError: the broker does not take the message that revokes the holder.

    A task's own ``unique_on`` or ``generate_lock`` may raise anything.
    """
    key, must_be_sent = str(task.generate_lock(task.name, args, kwargs)), has_continuations(options)
    otherwise, behind = unclaimed(task, task_id, key, overlap), f"{key}:next"
    if overlap is Overlap.ALLOW_ALL:
        return otherwise, ""

    by_all_arguments = task.unique_on is None and task.has_pure_keys
    ends_other = overlap in {Overlap.CANCEL_OTHER, Overlap.TERMINATE_OTHER}
    serializer = options.get("serializer") or task.serializer
    # First: no other gives way to a call that cannot be sent.
    payload = encode_arguments(args, kwargs, serializer) if ends_other and not by_all_arguments else ""

    def acquire(lock: str, *, payload: str = "", replace: str = "") -> Holder:
        wait, expiry = task.time_to_start(options), task.effective_lock_expiry
        if task.lock == Lock.UNTIL_EXPIRED and expiry:
            wait = expiry
        shown = readable(args or (), kwargs or {}, options)
        call = Call(Ref(lock, task_id, generation(options)), task.name, shown, wait, expiry, payload, replace)
        # Beat's ids are computed: the same one comes again if beat cannot know whether it was sent.
        again = RUN_HEADER in (options.get("headers") or {})
        never_mind(call.ref)
        try:
            holder: Holder = task.singleton_backend.acquire_many([call], again=again)[0]
        except LockBackendError:
            if not again:
                undo_later(task.app, call.ref)
            raise
        if holder.verdict is Verdict.UNUSABLE:
            raise UnusableLockError(unusable(lock, holder.task_id))
        # Of a call that has ended, whoever holds the lock now is none of its business.
        return dataclasses.replace(holder, task_id=task_id) if holder.verdict is Verdict.DONE else holder

    match task.lock:
        case Lock.WHILE_EXECUTING:
            return otherwise, ""
        case Lock.UNTIL_EXECUTING:
            holder, ticket = acquire(key), Ticket(task_id, otherwise.key, key)
        case Lock.UNTIL_EXPIRED:
            holder, ticket = acquire(key), otherwise
        case Lock.UNTIL_AND_WHILE_EXECUTING:
            holder, ticket = acquire(behind), Ticket(task_id, key, behind, waits=True)
        case _:
            holder = acquire(key, replace="holder" if ends_other else "")
            ticket = Ticket(task_id, key, key, waits=overlap is Overlap.BUFFER_ALL)
            otherwise = Ticket(task_id, key, waits=True)
    if holder.verdict is Verdict.ACQUIRED:
        return ticket, behind if task.lock == Lock.UNTIL_AND_WHILE_EXECUTING else key
    if holder.task_id == task_id:  # it was sent before
        return holder, ""
    if must_be_sent or overlap is Overlap.BUFFER_ALL:
        return dataclasses.replace(otherwise, waits_for=holder) if otherwise.waits else otherwise, ""
    if not ends_other and (overlap is not Overlap.BUFFER_ONE or (holder.state == "queued" and by_all_arguments)):
        return holder, ""
    payload = "" if by_all_arguments else payload or encode_arguments(args, kwargs, serializer)
    following = acquire(behind, payload=payload, replace="payload")
    taken = Ref(behind, task_id, generation(options)) if following.verdict is Verdict.ACQUIRED else None
    if ends_other and following.verdict in {Verdict.ACQUIRED, Verdict.HELD}:
        _end(task, holder, terminate=overlap is Overlap.TERMINATE_OTHER, taken=taken)
    if taken is None:
        return following, ""
    return Ticket(task_id, key, behind, waits=True, waits_for=holder), behind


def _end(task: Any, holder: Holder, *, terminate: bool, taken: Ref | None) -> None:
    """End the run that holds a lock; only when the call that wants it has taken its place behind it."""
    try:
        task.app.control.revoke(holder.task_id, terminate=terminate)
    except BaseException:
        if taken is not None:
            with suppress(LockBackendError):  # then it ends by itself
                task.singleton_backend.finish_many([taken], memory=0)
        raise
