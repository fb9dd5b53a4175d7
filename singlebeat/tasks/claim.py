"""Which lock a call takes before it is sent, and what becomes of a call that does not get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import LockBackendError
from ..locks.base import RUN_HEADER, Call, Holder, Ref, Ticket, Verdict, unusable
from ..locks.key import readable
from .policy import Lock, Overlap, encode_arguments, has_continuations
from .undo import undo_later

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
    key, must_be_sent = task.generate_lock(task.name, args, kwargs), has_continuations(options)
    otherwise, behind = unclaimed(task, task_id, key, overlap), f"{key}:next"
    if overlap is Overlap.ALLOW_ALL:
        return otherwise, ""

    def acquire(lock: str, *, payload: str = "", replace: str = "") -> Holder:
        wait, expiry = task.time_to_start(options), task.effective_lock_expiry
        if task.lock == Lock.UNTIL_EXPIRED and expiry:
            wait = expiry
        shown = options.get("argsrepr") or readable(args or (), kwargs or {})
        call = Call(Ref(lock, task_id), task.name, shown, wait, expiry, payload, replace)
        # Beat's ids are computed: the same one comes again if beat cannot know whether it was sent.
        again = RUN_HEADER in (options.get("headers") or {})
        backend = task.singleton_backend
        try:
            holder: Holder = backend.acquire_many([call], again=again)[0]
        except LockBackendError:
            undo_later(backend, call.ref)
            raise
        if holder.verdict is Verdict.UNUSABLE:
            raise LockBackendError(unusable(lock))
        return holder

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
            replaces = "holder" if overlap in {Overlap.CANCEL_OTHER, Overlap.TERMINATE_OTHER} else ""
            holder = acquire(key, replace=replaces)
            ticket = Ticket(task_id, key, key, waits=overlap is Overlap.BUFFER_ALL)
            otherwise = Ticket(task_id, key, waits=True)
    if holder.verdict is Verdict.ACQUIRED:
        return ticket, behind if task.lock == Lock.UNTIL_AND_WHILE_EXECUTING else key
    if holder.task_id == task_id:  # it was sent before
        return holder, ""
    if must_be_sent or overlap is Overlap.BUFFER_ALL:
        return replace(otherwise, waits_for=holder) if otherwise.waits else otherwise, ""
    if overlap in {Overlap.CANCEL_OTHER, Overlap.TERMINATE_OTHER}:
        task.app.control.revoke(holder.task_id, terminate=overlap is Overlap.TERMINATE_OTHER)
    elif overlap is not Overlap.BUFFER_ONE or (holder.state == "queued" and task.unique_on is None):
        return holder, ""
    serializer = options.get("serializer") or task.serializer
    payload = "" if task.unique_on is None else encode_arguments(args, kwargs, serializer)
    following = acquire(behind, payload=payload, replace="payload")
    if following.verdict is not Verdict.ACQUIRED:
        return following, ""
    return Ticket(task_id, key, behind, waits=True, waits_for=holder), behind
