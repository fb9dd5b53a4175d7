"""What becomes of the lock of a request at its end; pure."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ("LockAction", "lock_action")


class LockAction(Enum):
    """What the worker does with a lock once Celery has reported an end of the request."""

    WAIT = auto()  #: nothing: another end will be reported, or the message is delivered again
    RELEASE = auto()  #: free it
    RELEASE_LATER = auto()  #: free it once the killed process is surely dead
    HAND_OVER = auto()  #: leave it to the next delivery of the message
    FORGET = auto()  #: renew it no more: the next delivery has it already


def lock_action(*, acknowledged: bool, acks_late: bool, cancelled: bool, past_limit: bool) -> LockAction:
    """Return what becomes of a lock when its request has ended.

    The rule: a run frees its lock when its body is over and the broker will not deliver the message again.

    Args:
        acknowledged: the broker has been told that the message is done.
        acks_late: the message is acknowledged after the run, not before.
        cancelled: Celery has cancelled the run, because the connection to the broker was lost or the worker shuts down.
        past_limit: the hard time limit has passed: Celery reports the end first, and kills the process then.
    """
    if cancelled and acks_late:
        # The broker has the message again, also if Celery has acknowledged it since.
        return LockAction.FORGET if acknowledged else LockAction.HAND_OVER
    if not acknowledged:
        return LockAction.WAIT
    return LockAction.RELEASE_LATER if past_limit else LockAction.RELEASE
