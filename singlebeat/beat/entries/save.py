"""Stores entries in batches: an existing entry keeps its past, if no later one is given, and often its next time."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from ...connections import RedisError
from ...errors import ConflictError, EntryError
from ..calendar.clocked import comes_once
from ..calendar.recurrence import is_known
from ..calendar.zone import app_zone
from .code_only import given_for
from .definition import LONGEST_STEP_BACK, Meta, loads_object, salvage_fields
from .fields import BATCH, read_fields, write_fields, zone_of_beats
from .occurrence import Occurrence
from .pauses import Pauses, read_pauses
from .policy import EntryPolicy
from .schedule_json import have_same_times
from .timetable import PARKED, TICK

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys
    from .author import Author
    from .entry import Entry
    from .fields import Fence, StoredFields
    from .timetable import Timetable

__all__ = ("Unsent", "save_entries")

_T = TypeVar("_T")

#: How many times an entry is read and written, if another program keeps changing it in between.
ATTEMPTS = 5

#: Seconds by which the place of an entry may differ from its next time: a user's own schedule class may round.
PLACE_DIFFERS = 60.0

#: How many times of a schedule are compared with those of the schedule that replaces it.
MOST_COMPARED = 20

#: The fields of a policy that change the times of an entry.
TIMING = ("timezone", "start_time", "end_time", "jitter")


class Unsent(NamedTuple):
    """The work of a removed entry that was not sent, as ``save.lua`` takes it; each field is empty if there is none."""

    id: str = ""  #: of the pending occurrence
    pending: str = ""  #: the field of that occurrence
    backfill: str = ""  #: the field of an interrupted backfill

    @classmethod
    def of(cls, pending: str, backfill: str) -> Unsent:
        """Return what a removed entry has left; an occurrence that cannot be read could not be sent."""
        try:
            occurrence = Occurrence.decode(pending)
        except EntryError:
            return cls(backfill=backfill)
        return cls(occurrence.id, pending, backfill)


class _Fields(NamedTuple):
    """New fields of an entry, as ``save.lua`` takes them."""

    definition: str
    meta: str | Literal[False]
    policy: str
    since: str | Literal[False]
    sent: str | Literal[False]  #: of a past that comes from elsewhere


@dataclass(frozen=True, slots=True)
class _Wish:
    """A planned write of one entry, which is made only if the entry is unchanged since it was read."""

    member: str
    found: StoredFields  #: definition, meta, policy, since, sent
    #: The same fields to be stored; False: leave the field, a beat may write it meanwhile.
    fields: _Fields
    score: str  #: empty: leave it


def save_entries(
    client: RedisClient,
    keys: Keys,
    entries: Mapping[str, Entry],
    now: datetime,
    author: Author,
    *,
    action: str = "edit",
    note: str = "",
    keep_disabled: bool = False,
    dry_run: bool = False,
    fence: Fence | None = None,
    over: Mapping[str, tuple[str, str]] | None = None,
    unsent: Mapping[str, Unsent] | None = None,
) -> Mapping[str, EntryError | None]:
    """Store entries by name, and return the error of each entry, None if there is none.

    Each stored entry gets its new ``version``, and what it has taken over, such as a pause. So the next call detects a
    change that another program has made in between. The other entries stay as they are.

    Args:
        author: of the changes, which are recorded.
        action: as ``write_fields`` takes it.
        note: for operators, of the changes.
        keep_disabled: leave disabled entries disabled; paused entries stay paused in any case.
        dry_run: store nothing, and return the errors that storing would have.
        fence: as ``write_fields`` takes it.
        over: by name, definition and policy that are to be replaced: ``ConflictError`` if others are stored.
        unsent: by name, the unsent work of removed entries that come back; an existing entry gets none.

    Raises:
        FencedError: another beat leads; earlier batches are stored.
    """
    results: dict[str, EntryError | None] = {}
    names = list(entries)
    for at in range(0, len(names), BATCH):
        left: Sequence[str] = names[at : at + BATCH]
        for _ in range(ATTEMPTS):
            # Copies, which take over what is stored, such as a pause: that may have ended before the next attempt.
            planned = {name: copy.copy(entries[name]) for name in left}
            is_of_tool = fence is None  # a leader stores the entries of its app by its own clock
            wishes = _plan(client, keys, planned, results, now, keep_disabled, over or {}, is_of_tool=is_of_tool)
            left = () if dry_run else _write(client, keys, wishes, author, action, note, fence, unsent or {})
            for name in planned.keys() - set(left):
                if results[name] is not None or dry_run:
                    continue
                if name in wishes:
                    planned[name].version = wishes[name].fields.definition, wishes[name].fields.policy
                entries[name].__dict__.update(planned[name].__dict__)
            if not left:
                break
        for name in left:
            results[name] = ConflictError(f"entry {name!r} cannot be stored: another program keeps changing it")
    return results


def _plan(
    client: RedisClient,
    keys: Keys,
    entries: Mapping[str, Entry],
    results: dict[str, EntryError | None],
    now: datetime,
    keep_disabled: bool,
    over: Mapping[str, tuple[str, str]],
    *,
    is_of_tool: bool,
) -> Mapping[str, _Wish]:
    members = dict[str, str]()
    for name in entries:
        try:
            members[name] = keys.named(name)
        except EntryError as exc:
            results[name] = exc
    if not members:
        return {}
    found = read_fields(client, [*members.values()])
    scores = client.zmscore(keys.schedule, [*members.values(), *map(keys.bare, members)])
    scores = [key if key is not None else bare for key, bare in zip(scores, scores[len(members) :], strict=False)]
    pauses = cache(lambda: read_pauses(client, keys.pauses))  # asked only where an entry loses a tag
    zone = cache(lambda: zone_of_beats(client, keys))  # asked only where times change
    wishes = {}
    for (name, member), fields, score in zip(members.items(), found, scores, strict=True):
        entry = entries[name]
        try:
            if isinstance(fields, str):
                keys.check_other(name)
                raise EntryError(f"entry {name!r} cannot be stored: its key holds something else")  # noqa: TRY301
            definition, meta, policy, since, *_ = fields
            if not definition:
                keys.check_other(name)
                if not name.strip():  # most often an unset variable of a shell
                    raise EntryError(f"there can be no entry {name!r}: its name is blank")  # noqa: TRY301
            found_before = over.get(name, entry.version)
            if found_before is not None and found_before != (definition or "", policy or ""):
                raise ConflictError(f"entry {name!r} was changed since it was read: read it again")  # noqa: TRY301
            results[name] = None
            wanted = entry.encode()
            is_same = (wanted, entry.policy.encode()) == (definition, policy or "")
            stored = _read(Meta.decode, meta, since) if meta else None
            has_moved = _has_moved(entry, stored, score, now)
            is_kept = is_same and not has_moved and score is not None and stored is not None
            if is_kept and stored is not None and not _has_later_past(entry, stored, now):
                entry.version = wanted, policy or ""
            else:
                if is_of_tool and entry.reads_clock_of_app:
                    entry.zone = zone()
                wish = _wish(entry, wanted, member, fields, score, now, pauses, zone, keep_disabled, has_moved)
                _check(entry, wish, now)
                wishes[name] = wish
        except Exception as exc:  # a user's own schedule may raise anything: this must not harm other entries
            results[name] = _problem_of(name, exc)
    return wishes


def _problem_of(name: str, exc: Exception) -> EntryError:
    """Return why an entry cannot be stored; raise an error of a call of ours, as for the pauses."""
    if isinstance(exc, EntryError):
        return exc
    if hasattr(exc, "script") or isinstance(exc, RedisError):
        raise exc
    why = f"its next run cannot be calculated: {type(exc).__name__}: {exc}"
    return EntryError(f"entry {name!r} cannot be stored: {why}")


def _wish(
    entry: Entry,
    encoded: str,
    member: str,
    fields: StoredFields,
    score: float | None,
    now: datetime,
    pauses: Callable[[], Pauses],
    zone: Callable[[], tzinfo | None],
    keep_disabled: bool,
    has_moved: bool,
) -> _Wish:
    definition, meta, policy, since, _, sent, *_ = fields
    # Each is decoded on its own: a broken one is replaced, and the rest is kept.
    stored = _read(type(entry).decode, member, definition, entry.app) if definition else None
    wanted = _read(EntryPolicy.decode, policy or "")
    whole = _read(Meta.decode, meta, since, sent) if meta else None
    past = whole or (_read(Meta.decode, meta) if meta else None)
    has_run_since = past is not None and _has_later_past(entry, past, now)
    if has_run_since:
        past = entry.meta
    if stored is not None:
        when, enabled = stored.schedule, stored.enabled
    else:
        readable, _ = salvage_fields(definition, given_for(entry.app, entry.name)) if definition else ({}, {})
        when, enabled = readable.get("schedule"), readable.get("enabled", True)
    if keep_disabled and entry.enabled and not enabled:
        entry.enabled = False
        encoded = entry.encode()
    # A caller that has not read the entry does not know that it is paused.
    if entry.version is None and (pause := wanted or _pause(policy or "")).paused:
        entry.policy = replace(entry.policy, paused=True, note=pause.note)
    same_times = (
        when is not None
        and wanted is not None
        and not has_moved
        and have_same_times(when, entry.schedule)
        and all(getattr(wanted, name) == getattr(entry.policy, name) for name in TIMING)
        # An entry that was finished may go on now.
        and (wanted.max_runs == entry.policy.max_runs or score is None or score >= 0)
    )
    timetable, timetables = entry.timetable, _timetables(entry)
    was_off = not enabled or (wanted is not None and wanted.paused)
    was_off_until = None
    if was_off and entry.enabled and not entry.policy.paused:
        was_off_until = now
    elif wanted is not None and not {*wanted.tags} <= {*entry.policy.tags}:
        was_off_until = pauses().left(wanted, entry.policy, now)
    goes_on = was_off_until is not None
    if past is None:
        entry.count_from(now)
        at_once = entry.policy.run_on_start and not entry.has_past
        past = replace(entry.meta, last_run_at=None) if at_once else entry.meta
    elif definition and not has_run_since:
        if not same_times:
            before = None
            if stored is not None and wanted is not None:
                own = zone() or entry.timetable.zone
                before = replace(timetable, schedule=stored.schedule, policy=wanted, zone=own)
            found_from = (_counts_from(before, each, past, now, has_moved=has_moved) for each in timetables)
            past = past.counting_from(next((when for when in found_from if when != now), now), now)
        if was_off_until is not None:
            past = timetable.passed(past, was_off_until)
    is_broken = (definition and stored is None) or (meta and whole is None)
    moved = not same_times or goes_on or score is None or is_broken or has_run_since  # a broken entry may be parked
    found_due = (each.due_at(past.counts_from, now) for each in timetables)
    due_at = min((each for each in found_due if each is not None), default=None) if moved else None
    writes_past = moved or not meta
    brought = past.sent if not definition or has_run_since else None  # by a past that comes from elsewhere
    return _Wish(
        member,
        (definition, meta, policy, since, sent),
        _Fields(
            encoded,
            past.encode() if writes_past else False,
            entry.policy.encode(),
            past.encode_since() if writes_past else False,
            repr(brought.timestamp()) if brought is not None else False,
        ),
        repr(PARKED if due_at is None else due_at.timestamp()) if moved else "",
    )


def _timetables(entry: Entry) -> Sequence[Timetable]:
    """Return the times of an entry in the zone of beats, and in that of this process if it is another.

    A deploy may be about to change the zone of beats to that of this process. A beat may check an entry too early.
    """
    of_beats, zone = entry.timetable, app_zone(entry.app)
    return [of_beats] if str(of_beats.zone) == str(zone) else [of_beats, replace(of_beats, zone=zone)]


def _has_moved(entry: Entry, past: Meta | None, score: float | None, now: datetime) -> bool:
    """Return whether the place of an entry is yet to come, and is not its next time by the user's own schedule class.

    Redis knows the name of such a class only: its code or its parameters have changed.
    """
    if is_known(entry.schedule) or past is None or score is None or score <= now.timestamp():
        return False
    since = entry.timetable.since(past.counts_from)
    try:
        return since is not None and abs(entry.timetable.score(entry.timetable.next(since)) - score) > PLACE_DIFFERS
    except Exception:  # which is found when it is due
        return False


def _counts_from(
    before: Timetable | None, after: Timetable, past: Meta, now: datetime, *, has_moved: bool
) -> datetime | None:
    """Return from when an entry counts whose times change: the field ``since`` of its new past.

    That is now. But a run must not be lost whose time has passed, and is a time before and after the change: it is
    overdue, or jitter delays it. Then the entry counts from just before that time. If the change leaves the next time
    as it is, or if the clock was set back since the last run, the entry counts as before.

    Args:
        before: its timetable before the change, in the zone of the app at that time; None if it is unreadable.
        has_moved: its times before the change are not known.
    """
    if _waits_for_clock(after, past, now):
        return past.since
    if before is None or (before.policy.max_runs is not None and past.total_run_count >= before.policy.max_runs):
        return now  # an entry that was finished had no next time
    since = before.since(past.counts_from)
    if since is None:  # it has never run, and is due now
        return past.since if after.since(None) is None else now
    try:
        nominal = before.next(since)
        if has_moved and nominal is not None and nominal <= now:
            return now
        if nominal is not None and nominal == after.next(since):  # as of an interval, whose times depend on its past
            return past.since
        common = _latest_common(before, after, since, now)
        if common is not None and before.due(common) > now:  # an earlier one may be due already
            common = _latest_common(before, after, since, common - TICK) or common
        if common is not None and after.next(common - TICK) == common:  # not so of an interval
            return common - TICK
    except Exception:  # a rule that is invalid, or a user's own schedule: it had no next time
        return now
    return now


def _waits_for_clock(after: Timetable, past: Meta, now: datetime) -> bool:
    """Return whether the clock was set back since the last run, and the times until then, which are decided, go by.

    A schedule that has no later time is a new one: a time that comes once, or an end.
    """
    if past.counts_from is None or not now < past.counts_from <= now + LONGEST_STEP_BACK:
        return False
    try:
        return after.next(past.counts_from) is not None
    except Exception:  # a user's own schedule may raise anything, which is found when it is due
        return True


def _latest_common(before: Timetable, after: Timetable, since: datetime, until: datetime) -> datetime | None:
    """Return the last nominal time of two timetables later than ``since`` and not later than ``until``, or None."""
    for _ in range(MOST_COMPARED):
        earlier = before.latest(since, until)
        found = None if earlier is None else after.latest(since, earlier)
        if found is None or found == earlier:
            return found
        until = found
    return None


def _has_later_past(entry: Entry, stored: Meta, now: datetime) -> bool:
    """Return whether an entry that was read elsewhere has run there since the stored past.

    An entry with a limited number of runs that has none there, and counts from a moment since the stored past, was
    scheduled anew there. A moment that is yet to come is of a wrong clock.
    """
    if entry.version is not None or not entry.has_past:
        return False
    there, here = entry.meta.last_run_at, stored.counts_from
    is_limited = entry.policy.max_runs is not None or comes_once(entry.schedule)
    if there is None and is_limited and entry.enabled and not entry.meta.total_run_count and entry.meta.since != now:
        there = entry.meta.since  # an entry that counts from now has no past in its file
    return there is not None and there <= now and (here is None or there > here)


def _check(entry: Entry, wish: _Wish, now: datetime) -> None:
    """Read the fields to be stored as a beat will read them.

    Raises:
        EntryError: a beat could not use the entry.
    """
    definition, meta, policy, since, _ = wish.fields
    try:
        if "N" in definition or "I" in definition:  # perhaps NaN or Infinity
            json.loads(definition, parse_constant=_refuse)
        entry.check_stored(definition, now)
        if why := EntryPolicy.decode(policy).contradicts(entry.options):
            raise EntryError(why)  # noqa: TRY301
        if entry.enabled and (why := entry.timetable.why_without_time()):
            raise EntryError(why)  # noqa: TRY301
        if meta and since is not False:
            Meta.decode(meta, since)
    except (EntryError, ValueError) as exc:
        raise EntryError(f"entry {entry.name!r} cannot be stored: {exc}") from exc


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}: a number is too large, or is not a number")


def _read(decode: Callable[..., _T], *values: object) -> _T | None:
    """Return the decoded value, None if it cannot be decoded."""
    try:
        return decode(*values)
    except EntryError:
        return None


def _pause(policy: str) -> EntryPolicy:
    """Return the fields ``paused`` and ``note`` of a broken policy, as far as they are readable."""
    try:
        raw = loads_object(policy, "policy")
    except EntryError:
        return EntryPolicy()
    note = (_read(EntryPolicy.of, {"note": raw.get("note")}) or EntryPolicy()).note
    return EntryPolicy(paused=bool(raw.get("paused")), note=note)  # 1, too: not every language has true


def _write(
    client: RedisClient,
    keys: Keys,
    wishes: Mapping[str, _Wish],
    author: Author,
    action: str,
    note: str,
    fence: Fence | None,
    unsent: Mapping[str, Unsent],
) -> list[str]:
    """Write entries, and return the names of those that another program has changed meanwhile."""
    if not wishes:
        return []
    rows = [(w.member, w.found, w.fields, w.score, unsent.get(name, False)) for name, w in wishes.items()]
    saved = write_fields(client, keys, rows, author, action=action, note=note, fence=fence)
    return [name for name, done in zip(wishes, saved, strict=True) if not done]
