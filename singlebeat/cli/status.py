"""Commands about the schedule as a whole: ``status``, ``health``, ``resign``."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..beat.leadership.lease import resign
from ..beat.page import off_by_name
from ..beat.status import MAX_LAG, WHY_UNSENT, ScheduleStatus, counted
from ..beat.store.probe import STANDBY, lock_trouble, refuses_writes, schedule_refusal, ticks_refusal
from ..connections import ResponseError
from ..diagnosis.leader import who
from .output import UNANSWERED, Seconds, command, fail, marked, printable, show_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

#: Seconds that ``resign`` waits for the next leader.
HANDOVER = 15.0

#: Most entries of which ``status`` looks at each, to count those that are paused by name or disabled.
MOST_COUNTED = 20_000


@command("status", needs_tasks=False)
def status_(app: Celery, as_json: bool) -> None:
    """Show the leader and the standbys, and how many entries are scheduled, overdue, pending and quarantined.

    It names each problem with the leader, the clocks and the server. In JSON, paused_by_name and disabled are null if
    these entries were not counted.
    """
    state = ScheduleStatus.of(app)
    if as_json:
        paused, disabled = _off(app, state) or (None, None)
        show_json({**asdict(state), "paused_by_name": paused, "disabled": disabled})
        return
    click.echo(printable(f"leader      {', '.join(filter(None, (who(state), state.renewed)))}"))
    refused = ticks_refusal(app)
    unnoted = ""
    if refused and not state.standbys and schedule_refusal(app, needs=STANDBY):
        what = "writes" if refuses_writes(refused) else "a command"
        unnoted = f", and none can note itself while the server refuses {what}"
    click.echo(f"{'beats' if state.is_shared or state.sharing else 'standbys':<12}{len(state.standbys)}{unnoted}")
    for standby in state.standbys:
        of_app = f", of app {standby['app']}" if standby.get("app", state.app) != state.app else ""
        click.echo(printable("  {host}, pid {pid}, since {since}".format_map(standby) + of_app))
    problems = (
        state.unlike,
        state.problem() if state.is_shared and not state.works else state.why_leaderless,
        state.redbeat_silent,
        state.sent_elsewhere,
        refused,
        lock_trouble(app),
        *state.incomplete,
    )
    for problem in filter(None, problems):
        click.echo(marked(f"problem     {problem}", "problem"))
    for text in state.other_brokers(standbys=True):
        click.echo(marked(f"broker      {text}", "warning"))
    for text, _ in state.wrong_clocks(standbys=True):
        click.echo(marked(f"clock       {text}", "warning"))
    if state.waits:
        click.echo(marked(f"clock       {state.waits}", "warning"))
    if state.lost:
        click.echo(marked(f"lost        {state.lost}", "warning"))
    if state.renewal:
        click.echo(f"renewal     {state.renewal}")
    click.echo(f"entries     {state.entries}")
    click.echo(f"overdue     {state.overdue}" + (f", the first by {state.entry_lag:.0f} s" if state.overdue else ""))
    waits = ", which wait for a beat of singlebeat" if state.redbeat_leads else ""
    if not waits and not state.works:
        waits = ", which wait for a beat to lead"
    waits = waits or f", claimed and not confirmed: {WHY_UNSENT}"
    late = f", the first late by {state.pending_lag:.0f} s" if state.pending_lag else ""
    click.echo(f"pending     {state.pending}{late}" + (waits if state.pending else ""))
    for line in _pauses(app, state):
        click.echo(line)
    click.echo(f"quarantine  {len(state.quarantine)}")
    for name, record in state.quarantine.items():
        click.echo(marked(f"  {name}: {record['reason']}", "problem"))


def _off(app: Celery, state: ScheduleStatus) -> tuple[int, int] | None:
    """Return how many entries are paused by name, and how many are disabled; None if that is not counted."""
    if state.entries <= MOST_COUNTED:
        with suppress(ResponseError):  # doctor names what the server refuses, and keys of wrong types
            return off_by_name(app)
    return None


def _pauses(app: Celery, state: ScheduleStatus) -> Iterator[str]:
    """Yield lines about the entries that are paused by name or disabled, and about pauses of many."""
    if state.entries > MOST_COUNTED:
        listed = "celery singlebeat list --state paused, or --state disabled"
        yield f"off         not counted of more than {MOST_COUNTED} entries ({listed})"
    counts = _off(app, state) or (0, 0)
    words = zip(("paused", "disabled"), (" by name", ""), counts, strict=True)
    off = [
        f"{counted(count, 'entry is', 'entries are')} {word}{how} (celery singlebeat list --state {word})"
        for word, how, count in words
        if count
    ]
    if off:
        yield f"off         {', '.join(off)}"
    for pause in state.pauses:
        yield marked(f"pause       {pause}", "warning")
    for selector, why in state.unreadable_pauses.items():
        yield marked(f"pause       {selector}: {why}", "problem")


@command(
    "health",
    click.option(
        "--role",
        type=click.Choice(["any", "leader"]),
        default="any",
        help="leader: a beat of this host must lead.",
    ),
    click.option(
        "--max-lag", type=Seconds(min=0), default=MAX_LAG, show_default=True, help="How late a run may be, in seconds."
    ),
    needs_tasks=False,
)
def health_(app: Celery, as_json: bool, role: str, max_lag: float) -> None:
    """Check whether a beat leads and keeps up, for probes.

    A server that refuses writes is unhealthy. A run that is claimed and not confirmed counts as late. A schedule
    that the server has lost is unhealthy while it has no entries. Exit code 0: healthy. 1: unhealthy. 2: Redis does not
    answer.
    """
    state = ScheduleStatus.of(app)
    wrong = ticks_refusal(app) or state.problem(max_lag) or state.sent_elsewhere
    if wrong:
        pass
    elif role == "leader" and state.is_shared:
        wrong = "no beat leads, all beats share the work (redbeat_lock_key is None): leave out --role leader"
    elif role == "leader" and state.leader.get("host") != socket.gethostname():
        wrong = f"no beat of this host leads: {who(state)}"
    elif state.lag > max_lag:
        # With a small --max-lag, the first entry may be too late for it, and not count as overdue yet.
        wrong = state.behind
    elif not state.entries:  # others may be missing, too, but beats work, and a probe must not restart them for that
        wrong = state.lost
    if as_json:
        found = {"healthy": not wrong, "problem": wrong, "lag": state.lag, "lost": state.lost, "leader": state.leader}
        show_json(found)
        raise SystemExit(1 if wrong else 0)
    if wrong:
        fail(wrong)
    click.echo(f"healthy: {printable(who(state))}")
    if state.lost:
        click.echo(marked(f"lost: {state.lost}", "warning"))


@command("resign", needs_tasks=False)
def resign_(app: Celery, as_json: bool) -> None:
    """End the current term of leadership: a standby leads next, or the same beat if there is no standby.

    The term goes on if no beat could lead, as when the server refuses writes.

    Use this command also after a beat of RedBeat was killed: its lock lasts for up to 25 minutes. Do not use it for a
    beat of RedBeat that lives, but stop that beat. It would end with an error in its next tick, and a message that it
    sends just now could be sent twice.
    """
    if refused := ticks_refusal(app):
        fail(f"no beat could lead next, so the present term goes on: {refused}", UNANSWERED)
    before, ended = ScheduleStatus.of(app), resign(app)
    if not ended:
        fail("no beat leads")
    deadline = time.monotonic() + HANDOVER
    while not (now := ScheduleStatus.of(app)).leader and time.monotonic() < deadline:
        time.sleep(0.1)
    if as_json:
        show_json({"before": before.leader, "now": now.leader})
        return
    click.echo(f"ended: {printable(who(before))}{os.linesep}leads: {printable(who(now))}")
