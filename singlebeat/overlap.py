"""The overlap policies: the words for the treatment of duplicate calls."""

from __future__ import annotations

from enum import StrEnum

__all__ = ("Overlap",)


class Overlap(StrEnum):
    """The treatment of a duplicate: a call whose lock another call holds (Temporal's policies, and ``raise``)."""

    #: The duplicate is not sent. Its result is that of the other call. This is the default.
    SKIP = "skip"
    #: The duplicate is not sent. The caller gets a ``DuplicateTaskError``, whose ``task_id`` is the other call's.
    RAISE = "raise"
    #: If the other call runs, one more run follows it, with the latest arguments. If the other call has not started,
    #: that call is this run.
    BUFFER_ONE = "buffer_one"
    #: The duplicate waits for its turn. The call that has waited longest has the turn, as far as is known.
    BUFFER_ALL = "buffer_all"
    #: The duplicate takes the places of calls that have not started, which end ``REVOKED``. It runs after a call that
    #: runs.
    CANCEL_OTHER = "cancel_other"
    #: As ``cancel_other``, and a running call is terminated (``prefork`` pool), unless it makes the new one itself.
    TERMINATE_OTHER = "terminate_other"
    #: The duplicate runs beside the other call.
    ALLOW_ALL = "allow_all"
