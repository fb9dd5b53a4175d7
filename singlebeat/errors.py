"""The errors of singlebeat: one base class, all picklable, and each message says what to do."""

from __future__ import annotations

from click import ClickException

from .log import without_passwords

__all__ = (
    "ConfigError",
    "ConflictError",
    "DuplicateTaskError",
    "EntryError",
    "LockBackendError",
    "SinglebeatError",
    "UnknownEntryError",
    "UnusableLockError",
)


class SinglebeatError(Exception):
    """The base class of all errors of singlebeat."""


class ConfigError(SinglebeatError, ClickException):
    """A setting is invalid; a ``ClickException``, so that the celery command prints the error as one line."""


class DuplicateTaskError(SinglebeatError):
    """A call is a duplicate of a queued or running call, and the caller asked for an error.

    ``overlap="raise"`` and ``raise_on_duplicate`` ask for it. ``task_id`` is the id of the other call.
    """

    def __init__(self, message: str, task_id: str, holder: object = None) -> None:
        # Both in args: Celery pickles errors between processes, and pickle calls the class with args.
        super().__init__(message, task_id)
        self.message, self.task_id = message, task_id
        self.holder = holder  #: the ``Holder`` of the lock, or None

    def __str__(self) -> str:
        return self.message


class EntryError(SinglebeatError):
    """The given or stored data is not a valid entry; the message quotes from it, but no password of a URL."""

    def __init__(self, message: str) -> None:
        super().__init__(without_passwords(message))


class UnknownEntryError(EntryError, KeyError):
    """No entry has this name."""

    __str__ = Exception.__str__  # KeyError's puts the message into quotes


class ConflictError(EntryError):
    """Another process has changed the entry since it was read, or one of its occurrences or backfills is unfinished."""


class LockBackendError(SinglebeatError):
    """The locks' server is unreachable, or does not do what was asked."""


class UnusableLockError(LockBackendError):
    """The server answers, but the lock cannot be read: one of its keys has another type, or a permission is missing."""
