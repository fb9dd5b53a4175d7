"""The overlap policies: the words for the treatment of duplicate calls."""

from __future__ import annotations

from enum import StrEnum

__all__ = ("Overlap",)


class Overlap(StrEnum):
    """The treatment of a duplicate: a call whose lock another call holds (Temporal's policies, and ``raise``)."""

    SKIP = "skip"  #: the duplicate is not sent; its result is that of the other call
    RAISE = "raise"  #: the duplicate is not sent; the caller gets a DuplicateTaskError
    BUFFER_ONE = "buffer_one"  #: one more run follows a running call, with the latest arguments
    BUFFER_ALL = "buffer_all"  #: each duplicate waits for its turn
    CANCEL_OTHER = "cancel_other"  #: queued calls are revoked; the duplicate runs after a running call
    TERMINATE_OTHER = "terminate_other"  #: as cancel_other, and a running call is terminated
    ALLOW_ALL = "allow_all"  #: the duplicate runs beside the other call
