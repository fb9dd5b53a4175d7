"""Checks beats: who leads and stands by, their clocks, apps and code."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from ... import __version__
from ...advice import listed
from ...beat.entries.statics import Statics, signature_of
from ...beat.keys import Keys
from ...beat.schedule import Schedule
from ...beat.server_time import UNFIT_FROM
from ...beat.status import APART, MAX_LAG, NAMESAKE, NO_BEAT, REDBEAT_LEADS, SEE_LOG, ScheduleStatus, counted, to_delete
from ...beat.store.history import History
from ...beat.store.probe import STANDBY, refuses_writes, schedule_refusal
from ...config import Config
from ...connections import RedisError, schedule_client
from ...failed_receivers import why_incomplete
from ...log import without_passwords
from ..code import load_code, statics_here
from ..facts import AGAIN, why_gone, why_outdated
from ..leader import who
from ..workers import refused_queues
from .finding import MOST_NAMED, Finding, Read

if TYPE_CHECKING:
    from celery import Celery

#: The fraction of its lease that a renewal may take before that is a warning.
SLOW_FROM = 0.1

#: How many entries of ``beat_schedule`` are examined that are stored otherwise: each takes a round trip.
MOST_COMPARED = 100

#: How many of the last decisions are read to see whether runs end, and how many runs must have been sent without that.
MOST_LATEST, LEAST_UNENDED = 100, 3


def check_beats(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check who leads, and by which clock, and what waits for that."""
    state = schedule.state
    for text, ahead in state.wrong_clocks(standbys=True):
        advice = f"{text}: set up NTP on both. Countdown, eta and expires of messages go by the clocks of their hosts"
        yield Finding("problem" if abs(ahead) > UNFIT_FROM else "warning", "clock", advice)
    if state.waits:
        advice = f"{state.waits}. To run one now: celery singlebeat trigger NAME. Set up NTP on that server"
        yield Finding("problem" if state.set_back > UNFIT_FROM else "warning", "clock", advice)
    if state.is_shared and not state.leader:  # else the settings are unlike
        yield Finding("warning", "redbeat_lock_key", "is None: no beat leads, all beats share the work unfenced")
    yield from _leadership(app, schedule)
    yield from _renewal(state)
    yield from _apps(app, schedule)
    yield from _versions(state)
    if state.lost:
        text = (
            f"{state.lost}. Let the server write to disk (appendonly yes), or refuse writes while its replicas lag "
            "behind (min-replicas-to-write)"
        )
        yield Finding("warning", "schedule", text)
    if not state.redbeat_leads and (pending := _pending(app)):  # RedBeat sends none of them
        why = (
            "the broker or the locks' server is away, or refuses them, or a database that their tasks ask is away: see "
            "the log of beat (event=unreachable, refused)"
        )
        if schedule.refused:
            why = "the schedule's server refuses a command that beat needs to send or to confirm them"
        elif schedule.broker_answers:
            waiting = [entry for entry in schedule.usable if entry.key in pending]
            why = listed([*refused_queues(app, waiting)]) or why
        text = f"{counted(len(pending), 'occurrence is', 'occurrences are')} claimed and not confirmed: {why}"
        if state.pending_lag:
            text += f". The first is late by {state.pending_lag:.0f} s"
        yield Finding("problem" if state.pending_lag > MAX_LAG else "warning", "beat", text)
    for name, record in state.quarantine.items():
        text = f"is quarantined since {record['since']} and does not run: {record['reason']}"
        yield Finding("problem", f"entry {name}", text)


def _leadership(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check that a beat leads, that it sends entries in time, and that a standby is there."""
    state, refused = schedule.state, schedule.refused
    if state.works and refuses_writes(refused):
        led = f"{who(state)}, leads" if state.leader or state.redbeat_leads else "beats share the work"
        text = f"{led} at this moment, and cannot send while the schedule's server refuses writes"
        yield Finding("problem", "beat", text)
    elif not state.works and refused:
        yield Finding("problem", "beat", f"{state.problem()}. The schedule's server may be why: {refused}")
    elif wrong := (not state.works and state.why_leaderless) or state.unlike:
        yield Finding("problem", "beat", wrong)
    elif not state.works and state.is_unused and not app.conf.beat_schedule:
        yield Finding("fine", "beat", "no beat was ever started, and no entry needs one")
    elif not state.works:
        yield Finding("problem", "beat", f"{state.problem()}: {NO_BEAT}")
    elif state.is_shared:
        named = ", ".join("{host} (pid {pid}, since {since})".format_map(beat) for beat in state.standbys)
        text = f"{len(state.standbys)} beats share the work{named and ': '}{named}. A beat that dies is missing here"
        text += " after 5 s, and doctor does not know how many beats you have started: probe the /healthz of each beat"
        yield Finding("fine" if len(state.standbys) > 1 else "warning", "beat", text)
    elif not state.standbys and (refused := refused and schedule_refusal(app, needs=STANDBY)):
        text = (
            "no standby is noted, but there may be one: the schedule's server refuses a command that a standby needs "
            f"to note itself. Correct that first: {refused}"
        )
        yield Finding("warning", "beat", text)
    elif not state.standbys:
        text = (
            "no standby is noted: when the leader is lost without one, nothing is sent until it is back; start a "
            "second beat. If one runs, it cannot note itself: its log and its /readyz say why"
        )
        yield Finding("warning", "beat", text)
    if state.redbeat_silent:
        yield Finding("problem", "beat", state.redbeat_silent)
    elif state.redbeat_leads:
        yield Finding("warning", "beat", REDBEAT_LEADS)
    elif state.leader_silent and not schedule.refused:
        yield Finding("problem", "beat", state.leader_silent)
    elif state.overdue:
        # It is said elsewhere.
        has_reason = schedule.refused or not schedule.broker_answers or schedule.locks_error or schedule.locks_refused
        see_log = "" if has_reason or not state.works else f". {SEE_LOG}"
        yield Finding("problem", "beat", f"{state.overdue_entries}{see_log}")


def _renewal(state: ScheduleStatus) -> Iterator[Finding]:
    """Say how far the leader is from the schedule's server, by the time that it takes to renew its lease."""
    if state.renewal:
        text, is_slow = f"the leader's last renewal of its term took {state.renewal}", state.renewal_share > SLOW_FROM
        why = (
            ": the schedule's server or the network is slow, or the leader's host is busy. A renewal fails if a reply "
            "takes a quarter of the lease, and another beat leads when none succeeds within the lease. Find out what "
            "is slow (redis-cli --latency on the leader's host), or raise redbeat_lock_timeout"
        )
        yield Finding("warning" if is_slow else "fine", "beat", f"{text}{why if is_slow else ''}")


def _versions(state: ScheduleStatus) -> Iterator[Finding]:
    """Compare the versions of singlebeat in the beats and in this process."""
    beats = [(beat.get("version") or "an older version", beat, role) for beat, role in state.beats]
    if {found for found, *_ in beats} - {__version__}:
        named = ((found, beat.get("host", "?"), beat.get("pid", "?"), role) for found, beat, role in beats)
        which = ", ".join(f"{found} on {host} (pid {pid}, which {role})" for found, host, pid, role in named)
        text = (
            f"{which}, {__version__} here: install the same version everywhere, because an older version may not "
            "understand the data of a newer version in messages and Redis"
        )
        yield Finding("warning", "versions of beats differ", text)


def _apps(app: Celery, schedule: Read) -> Iterator[Finding]:
    """Check for another app under the same prefix, and for two apps of the same name."""
    state = schedule.state
    about, check = f"redbeat_key_prefix {Config.of(app).redbeat_key_prefix}", Config.of(app).singlebeat_other_app_check
    statics = Statics(app, schedule_client(app))
    if check != "ignore":
        for other, names in statics.of_others().items():
            number = counted(len(names), "entry there is", "entries there are")
            text = f"{number} of app {other}, not of {statics.owner} ({listed(names)})"
            if not state.has_beat_of(other):
                text += f", and no beat of app {other} is known here. {to_delete(other, names)}. Else"
            sent = "the leader sends all of them to the queues of its own app"
            yield Finding("problem", about, f"{text}: {sent}; {APART}")
            for name in islice(filter(statics.given.__contains__, names), MOST_NAMED):
                yield Finding("problem", f"entry {name}", f"it is of app {other}, and {NAMESAKE}")
        for beat, role in state.beats:
            if beat.get("app", statics.owner) not in {statics.owner, ""}:
                text = f"the beat {beat['host']}, pid {beat['pid']}, which {role}, is of app {beat['app']}"
                yield Finding("problem", about, f"{text}, not of {statics.owner}; {APART}")
    yield from _elsewhere(app, schedule, about)
    yield from _code(app, schedule, statics, about)


def _code(app: Celery, schedule: Read, statics: Statics, about: str) -> Iterator[Finding]:
    """Check whether beats and this process have the same code, whole, and its entries are stored."""
    state = schedule.state
    ours = [beat for beat, _ in state.beats if beat.get("app") == statics.owner]
    theirs = sorted({beat.get("statics", "") for beat in ours if not beat.get("incomplete")} - {""})
    remedy = "Mend that; a page runs this code once, so start it again then"
    if why := load_code(app):
        text = "its tasks are not known here, nor their queues and parameters, and beat_schedule is not checked"
        text = f"one cannot be imported where doctor runs, so {text}: {why}. {remedy}"
        yield Finding("warning", "modules of tasks", text)
    if why := why_incomplete(app):
        text = f"it may lack entries where doctor runs, and is not checked: {without_passwords(why)}. {remedy}"
        yield Finding("warning", "beat_schedule", text)
    for text in state.incomplete:
        yield Finding("problem", "beat_schedule", text)
    here = statics_here(app) if theirs else ""
    if theirs and not (here or load_code(app) or why_incomplete(app)) and theirs != [signature_of(app)["statics"]]:
        number = theirs[0].partition(" ")[0]
        text = f"this process has none, and beats have some ({number}): whether they are stored is not checked here"
        yield Finding("warning", "beat_schedule", text)
    now = datetime.fromtimestamp(state.now, UTC)
    changed = [*islice(statics.outdated(now), MOST_COMPARED)] if here else []
    if differ := _differ(theirs, here, statics.owner):
        among = f" (stored otherwise than here: {listed([name for name, _ in changed])})" * bool(changed)
        text = (
            f"{differ}{among}: each beat that begins to lead stores its own, and removes the entries that its own "
            "lacks. That is right during a deploy. Else two apps have one name, or hosts run different code: "
            f'{APART}. Or give each a name (Celery("shop")). An entry with an rrule without dtstart, or with the time '
            "or the host among its arguments, differs in each process"
        )
        yield Finding("warning", about, text)
        changed = [(name, why) for name, why in changed if why]  # no code can store these
    if here:
        yield from _removed(app, statics, state, now)
        yield from _outdated(app, changed, {*schedule.unusable, *state.quarantine})


def _differ(theirs: Sequence[str], here: str, owner: str) -> str:
    """Return that the beats of an app, or they and this process, have different code; empty if not.

    Args:
        theirs: the numbers and digests of the entries in the code of the beats.
        here: the same of this process; empty if it has none.
    """
    if len(theirs) > 1:
        numbers = " and ".join(each.partition(" ")[0] for each in theirs)
        return f"beats of app {owner} differ in their beat_schedule ({numbers} entries)"
    if here and here not in theirs:
        numbers = f"{here.partition(' ')[0]} entries here, {theirs[0].partition(' ')[0]} there"
        return f"the beat_schedule of this process differs from that of the beats of app {owner} ({numbers})"
    return ""


def _elsewhere(app: Celery, schedule: Read, about: str) -> Iterator[Finding]:
    """Check for beats that send to another broker, or read wall clocks in another zone, than this process."""
    state = schedule.state
    is_lost = state.sends_elsewhere and _no_run_ends(app, state)
    for text in state.other_brokers(standbys=True):
        yield Finding("problem" if is_lost else "warning", about, text)
    if state.other_zone and (concerned := [each.name for each in schedule.usable if each.reads_clock_of_app]):
        yield Finding("warning", f"timezone of {listed(concerned)}", state.other_zone)


def _no_run_ends(app: Celery, state: ScheduleStatus) -> bool:
    """Return whether several runs were sent since the leader leads, and none of them has ended."""
    with suppress(RedisError, KeyError, ValueError):  # another part names the key; any program may add records
        since = datetime.fromisoformat(state.leader["since"])
        sent = [record for record in History(app).latest(MOST_LATEST) if record.is_sent and record.at >= since]
        return len(sent) >= LEAST_UNENDED and all(record.end is None for record in sent)
    return False


def _removed(app: Celery, statics: Statics, state: ScheduleStatus, now: datetime) -> Iterator[Finding]:
    """Check for entries of ``beat_schedule`` that are not stored: another program has removed them, or they are wrong.

    Each term installs them only once.
    """
    entries = Schedule(app)
    names = sorted(statics.unstored(now) - state.quarantine.keys())
    for name in names[:MOST_NAMED]:
        if why := statics.why_unstorable(name, now):
            why = f", for it cannot be stored: {why}"
        elif why := why_gone(entries, name).rstrip("."):
            why += ". Or let the next term install it: celery singlebeat resign"
        else:
            why = (
                ": the log of beat says why it could not be stored (event=not_added; event=trouble if the schedule's "
                "server refuses a command to beat's user). Beat tries it again"
            )
        text = f"it is in beat_schedule, and is not stored, so it does not run{why}"
        yield Finding("problem", f"entry {name}", text)
    if len(names) > MOST_NAMED:
        text = f"more than these {MOST_NAMED} of beat_schedule are not stored (celery singlebeat resign)"
        yield Finding("problem", "entries", text)


def _outdated(app: Celery, changed: Sequence[tuple[str, str]], unusable: Collection[str]) -> Iterator[Finding]:
    """Check entries that are not stored as ``beat_schedule`` gives them.

    Args:
        changed: their names, each with why it cannot be stored; empty if it can.
    """
    entries = Schedule(app)
    for name, why in changed[:MOST_NAMED]:
        level, text = why_outdated(entries, name, why, is_unusable=name in unusable)
        yield Finding(level, f"entry {name}", text)
    if len(changed) > MOST_NAMED:
        text = f"more than these {MOST_NAMED} are not stored as beat_schedule gives them"
        yield Finding("warning", "entries", text)


def _pending(app: Celery) -> frozenset[str]:
    """Return the keys of the entries whose occurrences stay claimed and unconfirmed.

    Each tick has such occurrences for a moment.
    """
    client, keys = schedule_client(app), Keys.of(app)
    before = set(client.zrange(keys.pending, 0, -1))
    if before:
        time.sleep(AGAIN)
        before.intersection_update(client.zrange(keys.pending, 0, -1))
    return frozenset(map(keys.entry, before))
