"""The words for what becomes of a call that meets its equal."""

from __future__ import annotations

from enum import StrEnum

__all__ = ("Overlap",)


class Overlap(StrEnum):
    """What becomes of a call that meets its equal (Temporal's overlap policies, and ``raise``)."""

    SKIP = "skip"  #: it is not sent; its result is that of the other
    RAISE = "raise"  #: it is not sent; DuplicateTaskError
    BUFFER_ONE = "buffer_one"  #: it runs once more after the other, with the latest arguments
    BUFFER_ALL = "buffer_all"  #: each waits for its turn
    CANCEL_OTHER = "cancel_other"  #: the other is revoked; this one runs after it
    TERMINATE_OTHER = "terminate_other"  #: the other is terminated; this one runs after it
    ALLOW_ALL = "allow_all"  #: it runs beside the other
