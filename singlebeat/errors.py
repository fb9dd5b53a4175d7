"""Every error that singlebeat raises: one base, all of them picklable, each message says what to do."""

from __future__ import annotations

from click import ClickException

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
    """The base of all errors of singlebeat."""


class ConfigError(SinglebeatError, ClickException):
    """A setting is wrong; a ``ClickException``, so that the celery command prints it as one line."""


class DuplicateTaskError(SinglebeatError):
    """An equal call is queued or running, and the caller asked for an error (``raise_on_duplicate``)."""

    def __init__(self, message: str, task_id: str, holder: object = None) -> None:
        # Both in args: Celery pickles errors between processes, and pickle calls the class with args.
        super().__init__(message, task_id)
        self.message, self.task_id = message, task_id
        self.holder = holder  #: all that is known of it

    def __str__(self) -> str:
        return self.message


class EntryError(SinglebeatError):
    """What is given or stored as an entry cannot be one."""


class UnknownEntryError(EntryError, KeyError):
    """There is no entry of this name."""

    __str__ = Exception.__str__  # KeyError's puts the message into quotes


class ConflictError(EntryError):
    """Somebody else has changed the entry since it was read, or has an occurrence of it under way."""


class LockBackendError(SinglebeatError):
    """The server that keeps the locks cannot be reached, or does not do what it should."""


class UnusableLockError(LockBackendError):
    """The server answers, but this lock cannot be read: what is at one of its keys is none, or a right is missing."""
