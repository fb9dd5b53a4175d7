"""The author of a change to the schedule: who, and by what means."""

from __future__ import annotations

import getpass
import os
import socket
from typing import NamedTuple

__all__ = ("Author",)


class Author(NamedTuple):
    """Who changes the schedule, and by what means."""

    actor: str
    by: str  #: api, cli, web, beat_schedule, …

    @classmethod
    def of(cls, actor: str = "", by: str = "api") -> Author:
        """Return the author of the changes of this process.

        Args:
            actor: who makes them; by default the user of this process, and its host.
        """
        return cls(actor or f"{_user()}@{socket.gethostname()}", by)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # in a container, the user may have no name
        return str(os.getuid())
