"""What a user may do: functions of the board, the request with its form, and the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .exchange import PageReply
from .security import Role, User

if TYPE_CHECKING:
    from .board import Board
    from .exchange import PageRequest
    from .views import Page

__all__ = ("ACTIONS", "Action")


#: What the page says after a change.
SAID = {
    "requested": "A run was requested: the leading beat sends it.",
    "paused": "Paused: its times pass without a run.",
    "resumed": "Resumed: runs that were due meanwhile are not made up for.",
    "saved": "Saved: beats notice it within a second.",
    "deleted": "Deleted.",
    "freed": "The lock is free.",
    "resigned": "The term of leadership was ended: a standby leads next.",
    "backfilled": "The runs of the backfill were handed to beat.",
    "reverted": "Reverted.",
}


class Action(NamedTuple):
    """An action, and the least role that may take it; it answers with a page, or leads to another one."""

    act: Callable[[Board, PageRequest, User], Page | PageReply]
    role: Role
    is_change: bool = True  #: it changes more than what this browser shows


def leads_to(request: PageRequest, path: str, **query: object) -> PageReply:
    """Return the answer after a change, so that a reload does not repeat it."""
    return PageReply(status=303, headers={"Location": request.url(path, **query)})


def choose_zone(board: Board, request: PageRequest, user: User) -> PageReply:
    """Keep in which zone this browser shows times, and show the same page again."""
    choice, back = request.changes.get("zone"), request.changes.get("back")
    local = f"/{back.lstrip('/')}" if "\\" not in back and back.isprintable() else "/"
    return PageReply(
        status=303,
        headers={"Location": request.root + local},
        cookies={"singlebeat_zone": choice if choice in {"entry", "mine", "utc"} else "entry"},
    )


ACTIONS: Mapping[str, Action] = {
    "/zone": Action(choose_zone, Role.READ, is_change=False),
}
