"""Says who leads, and what keeps beats from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..beat.store.probe import ticks_refusal

if TYPE_CHECKING:
    from celery import Celery

    from ..beat.status import ScheduleStatus

__all__ = ("refusal", "who")


def who(state: ScheduleStatus) -> str:
    """Return a description of the leader, for people."""
    if state.leader and "host" not in state.leader:
        why = "another program has removed or spoilt the leader's record"
        return f"unknown, because {why}: the next renewal of the term writes that again"
    if state.leader:
        return "{host}, pid {pid}, term {term}, since {since}".format_map({**_UNKNOWN, **state.leader})
    if state.is_shared or (state.sharing and not state.locked):
        since = "no beat was seen" if state.silent is None else f"a beat was last seen {state.silent:.0f} s ago"
        return f"none: beats share the work (redbeat_lock_key is None), {since}"
    if state.redbeat_leads:
        left = f"{state.lease_left:.0f} s"
        return f"a beat of RedBeat, which leaves no name; its lock ends in {left} if it is not renewed"
    return "none"


def refusal(app: Celery, state: ScheduleStatus) -> str:
    """Return what the schedule's server refuses if no beat leads or entries are overdue; empty if it refuses nothing.

    Raises:
        RedisError: the server does not answer.
    """
    return ticks_refusal(app) if state.overdue or not state.works else ""


_UNKNOWN = {"host": "?", "pid": "?", "term": "?", "since": "?"}
