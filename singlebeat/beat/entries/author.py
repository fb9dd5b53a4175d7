"""The author of a change to the schedule: who, and by what means."""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from ...config import Config
from ...lua import script

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("BARE", "CALLED", "PERMITTED", "RECORD", "Author", "digests")


#: The scripts that those which change entries call.
PERMITTED, RECORD, BARE, CALLED = (script(__package__, name) for name in ("permitted", "record", "bare", "called"))


class Author(NamedTuple):
    """Who changes the schedule, and by what means; in the order in which the scripts take it."""

    actor: str
    by: str  #: api, cli, web, beat_schedule, …
    limit: int  #: changes that are kept

    @classmethod
    def of(cls, app: Celery, actor: str = "", by: str = "api") -> Author:
        """Return the author of the changes of this process.

        Args:
            actor: who makes them; by default the user of this process, and its host.
        """
        return cls(actor or f"{_user()}@{socket.gethostname()}", by, Config.of(app).singlebeat_changes_limit)


def _user() -> str:
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (OSError, KeyError, ImportError):  # in a container, the user may have no name
        return str(os.getuid())


def digests(definition: str, policy: str) -> str:
    """Return the field ``recorded`` of an entry whose last change is recorded. See ``record.lua``."""
    return "".join(
        hashlib.sha1(text.encode(errors="surrogateescape"), usedforsecurity=False).hexdigest()[:12]
        for text in (definition, policy)
    )
