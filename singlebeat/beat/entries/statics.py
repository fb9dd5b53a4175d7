"""The entries of ``beat_schedule`` in Redis: installed and removed by the leader, in batches."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ...advice import redis_command
from ...config import Config
from ...connections import RedisError
from ...errors import EntryError
from ...failed_receivers import why_incomplete
from ...log import Log, without_passwords
from ...lua import Script, packed, script
from ..keys import Keys
from .author import BARE, PERMITTED, RECORD, Author
from .definition import Meta
from .entry import Entry
from .fields import BATCH, FENCED, read_fields, replies_of
from .save import save_entries
from .timetable import is_listed_from_redis

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient
    from .fields import Fence, StoredFields

__all__ = ("OPERATORS", "Statics", "are_same_but_paused", "check_given", "is_from_code", "owner_of", "signature_of")

log = Log("celery.beat")

PARK = script(__package__, "park", BARE, FENCED, PERMITTED, RECORD)
UNPARK = script(__package__, "unpark", FENCED, PERMITTED, RECORD)
OWN = script(__package__, "own", FENCED)

#: How long an entry that has left ``beat_schedule`` is kept: a deploy may be rolled back.
KEPT_FOR = timedelta(days=7)

#: Fields of a policy that an operator sets, and that ``beat_schedule`` leaves alone.
OPERATORS = ("paused", "note")


def owner_of(app: Celery) -> str:
    """Return the name under which an app owns entries."""
    return " ".join(str(app.main or "celery").split("\n"))


def is_from_code(given: object) -> bool:
    """Return whether an item of ``beat_schedule`` comes from the code, and not from a tool that lists entries."""
    when = given.get("schedule") if isinstance(given, Mapping) else getattr(given, "schedule", None)
    return not is_listed_from_redis(when)


def _given(app: Celery) -> Mapping[str, Any]:
    """Return the items of an app's ``beat_schedule`` that come from the code, by name."""
    return {str(name): item for name, item in (app.conf.beat_schedule or {}).items() if is_from_code(item)}


def signature_of(app: Celery) -> Mapping[str, str]:
    """Return the identity of an app's beats: its name, the number and a digest of the entries in its code, and why
    entries may be missing there, if they may.

    The digest is of what a leader would store. An object that only the code can give counts as its mark.
    """
    given = _given(app)
    digest = hashlib.sha1(usedforsecurity=False)
    for name in sorted(given):
        digest.update(repr((name, *_as_stored(app, name, given[name]))).encode(errors="surrogatepass"))
    about = {"app": owner_of(app), "statics": f"{len(given)} {digest.hexdigest()[:8]}"}
    why = without_passwords(why_incomplete(app))
    return {**about, "incomplete": why} if why else about


def _as_stored(app: Celery, name: str, given: Any) -> tuple[str, str]:
    """Return definition and policy of an item of ``beat_schedule``, empty if it cannot be stored."""
    try:
        entry = _made(app, name, given)
        return entry.encode(), entry.policy.encode()
    except Exception:  # a schedule may raise any exception; the leader logs which entry is wrong
        return "", ""


def check_given(name: str, given: Any) -> None:
    """Refuse an item of ``beat_schedule`` that is neither an entry nor its fields.

    Raises:
        EntryError: it is neither. The message does not quote it: it may hold a secret.
    """
    try:
        dict(given)  # an entry can be read so, too
    except (TypeError, ValueError):
        raise EntryError(f"entry {name!r} must be a dict of its fields, not a {type(given).__name__}") from None


def _made(app: Celery, name: str, given: Any) -> Entry:
    check_given(name, given)
    return given if isinstance(given, Entry) else Entry(**dict(given, name=name, app=app))


class Statics:
    """The entries in the ``beat_schedule`` of an app.

    Args:
        client: the client for the schedule.
        fence: returns the fence of this beat if it leads. A write raises ``FencedError`` if another beat leads by then,
            which has installed its own entries.
    """

    def __init__(self, app: Celery, client: RedisClient, fence: Callable[[], Fence | None] = lambda: None) -> None:
        self._fence = fence
        self.app, self.client, self.keys = app, client, Keys.of(app)
        self.owner = owner_of(app)
        self._author = Author.of(app, by="beat_schedule")

    @property
    def given(self) -> Collection[str]:
        """The names of the entries in the ``beat_schedule`` of this app that come from the code."""
        return _given(self.app).keys()

    def is_paused(self, name: str) -> bool:
        """Return whether the ``beat_schedule`` of this app pauses or disables an entry of its own."""
        with suppress(Exception):  # it may be anything
            entry = _made(self.app, name, _given(self.app)[name])
            return entry.policy.paused or not entry.enabled
        return False

    def keep(self, configured: Collection[str], stored: Collection[str]) -> None:
        """Remember which entries were stored from ``beat_schedule``, and park those that have left it.

        None are parked if the code may have more, which a receiver that failed has not added.

        An entry of ``beat_schedule`` that could not be stored this time stays as it is. An entry that another app also
        has stays. Entries without a recorded owner (installed by RedBeat) count as ours, unless apps share the prefix
        on purpose: then they may be of another app, and another program may have removed the record.
        """
        owners, is_shared = self._owners(), Config.of(self.app).singlebeat_other_app_check == "ignore"
        known: Collection[str] = self.client.smembers(self.keys.statics)
        unknown = () if is_shared else (self.owner,)
        gone = [name for name in set(known) - set(configured) if self.owner in owners.get(name, unknown)]
        if gone and (why := why_incomplete(self.app)):
            text = "beat: Entries that beat_schedule has no more stay, because it may be incomplete"
            log.error(text, event="incomplete", entries=len(gone), reason=without_passwords(why))
            gone = []
        for at in range(0, len(gone), BATCH):
            self._park(gone[at : at + BATCH], owners)
        self._own([name for name in stored if name not in known or self.owner not in owners.get(name, ())], owners)

    def of_others(self) -> Mapping[str, Sequence[str]]:
        """Return by app the names of entries that other apps have installed and this app does not have."""
        found = defaultdict[str, list[str]](list)
        for name, apps in sorted(self._owners().items()):
            for app in apps if self.owner not in apps else ():
                found[app].append(name)
        return found

    def foreign(self, names: Collection[str]) -> Mapping[str, Sequence[str]]:
        """Return the apps that have installed an entry, by its name; entries that this app has, too, are left out.

        None are foreign if apps share the schedule on purpose.
        """
        if Config.of(self.app).singlebeat_other_app_check == "ignore":
            return {}
        return {name: apps for name, apps in self._owners(names).items() if self.owner not in apps}

    def unstored(self, now: datetime) -> Set[str]:
        """Return the names of entries in the ``beat_schedule`` of this app that should be stored, and are not.

        Another program has removed them, or they cannot be stored. One that was deleted on purpose is none of them.
        """
        names = sorted(_given(self.app))
        owners = self._owners(names)
        ours = [name for name in names if self.owner in owners.get(name, (self.owner,))]
        unstored = {name for name in ours if not self.keys.is_possible(name)}
        ours = [name for name in ours if name not in unstored]
        for at in range(0, len(ours), BATCH):
            batch = ours[at : at + BATCH]
            for name, fields in zip(
                batch, read_fields(self.client, [self.keys.prefix + name for name in batch]), strict=True
            ):
                is_taken = isinstance(fields, str)
                if is_taken or (not any(fields) and (name in owners or self.why_unstorable(name, now))):
                    unstored.add(name)
        return unstored

    def why_unstorable(self, name: str, now: datetime) -> str:
        """Return why an entry of ``beat_schedule`` cannot be stored; empty if it can."""
        try:
            if isinstance(read_fields(self.client, [self.keys.named(name)])[0], str):
                return f"the key {self.keys.prefix}{name} is in use for other data: rename the entry"
            entry = _made(self.app, name, _given(self.app)[name])
            author = self._author
            saved = save_entries(self.client, self.keys, {name: entry}, now, author, keep_disabled=True, dry_run=True)
        except RedisError:
            raise
        except Exception as exc:  # a schedule may raise any exception
            return str(exc) or type(exc).__name__
        return str(saved[name] or "")

    def outdated(self, now: datetime, among: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
        """Yield the name of each entry of this app that is stored otherwise than ``beat_schedule`` gives it, and why.

        The reason is empty if it can be stored as it is given.

        Args:
            among: only entries of these names; None: all.
        """
        given = _given(self.app)
        names = [name for name in given if among is None or name in among]
        owners = self._owners(names)
        yield from self._refused(names, owners)
        names = [name for name in names if self.owner in owners.get(name, ())]
        for at in range(0, len(names), BATCH):
            keys = [self.keys.prefix + name for name in names[at : at + BATCH]]
            for name, fields in zip(names[at:], read_fields(self.client, keys), strict=False):
                if isinstance(fields, str) or not fields[0]:
                    continue
                try:
                    is_same = _is_same(_made(self.app, name, given[name]), fields[0], fields[2])
                except Exception:  # a schedule may raise any exception
                    is_same = False
                if not is_same:
                    yield name, self.why_unstorable(name, now)

    def _refused(self, names: Collection[str], owners: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
        """Yield the names of entries that another app has stored differently, if apps share the prefix on purpose."""
        if Config.of(self.app).singlebeat_other_app_check != "ignore":  # it is said otherwise
            return
        given, made = _given(self.app), dict[str, Entry]()
        for name in names:
            if self.owner not in owners.get(name, (self.owner,)):
                with suppress(Exception):  # a schedule may raise any exception
                    made[name] = _made(self.app, name, given[name])
        yield from ((name, str(exc)) for name, exc in self._conflicts(made, owners).items())

    def stored(self, names: Collection[str]) -> Mapping[str, tuple[str, str]]:
        """Return definition and policy of entries as they are stored, by name; both are empty if there is none."""
        possible, found = [name for name in names if self.keys.is_possible(name)], dict[str, tuple[str, str]]()
        for at in range(0, len(possible), BATCH):
            batch = possible[at : at + BATCH]
            rows = read_fields(self.client, [self.keys.prefix + name for name in batch])
            for name, fields in zip(batch, rows, strict=True):
                found[name] = ("", "") if isinstance(fields, str) else (fields[0] or "", fields[2] or "")
        return found

    def install(
        self,
        entries: Mapping[str, Entry],
        now: datetime,
        *,
        owns: bool = True,
        over: Mapping[str, tuple[str, str]] | None = None,
    ) -> Mapping[str, EntryError | None]:
        """Store entries, and return by name why one could not be stored, None if it is.

        An existing entry keeps its past, and stays disabled if an operator has disabled it. An unchanged entry keeps
        its next time. A parked entry is restored, without a catch-up for the time in which it was parked.

        Args:
            owns: remember that new and restored ones come from ``beat_schedule``, before they are stored: if this beat
                ends in between, a later one knows it.
            over: as ``save_entries`` takes it. A parked entry that is restored is replaced in any case.
        """
        possible = [name for name in entries if self.keys.is_possible(name)]
        owners = self._owners(possible)
        results = dict[str, EntryError | None](self._conflicts(entries, owners))
        entries = {name: entry for name, entry in entries.items() if name not in results}
        possible = [name for name in possible if name not in results]
        absent = [name for name in possible if self.owner not in owners.get(name, ())]
        if owns:
            missing = {*self.missing(absent)}
            self._own(sorted(missing), owners)
            self._log_taken_over([name for name in absent if name not in missing and name not in owners])
        over = dict(over or {})
        # Not only of those that are absent: an earlier beat may have ended before this step, or the entry that was
        # stored meanwhile had an unsent run of its own.
        for at in range(0, len(possible), BATCH):
            for name in self._unpark(possible[at : at + BATCH], now):
                over.pop(name, None)
        author, fence = self._author, self._fence()
        saved = save_entries(self.client, self.keys, entries, now, author, keep_disabled=True, fence=fence, over=over)
        return {**results, **saved}

    def _log_taken_over(self, names: Sequence[str]) -> None:
        """Log those of some stored entries that have not come from any ``beat_schedule`` until now."""
        known = self.client.smembers(self.keys.statics) if names else ()
        for name in names:
            if name not in known:
                text = "beat: '%(entry)s' was stored by others; it is of the code now, and leaves the schedule with it"
                log.warning(text, event="taken_over", entry=name)

    def _own(self, names: Sequence[str], owners: Mapping[str, Sequence[str]]) -> None:
        """Remember that entries come from this app.

        Args:
            owners: as they were read.
        """
        for at in range(0, len(names), BATCH):
            ours = ((name, "\n".join(sorted({self.owner, *owners.get(name, ())}))) for name in names[at : at + BATCH])
            self._call(OWN, [self.keys.statics, self.keys.owners], packed(text for row in ours for text in row))

    def missing(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the names of entries that are not stored."""
        with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(self.keys.prefix + name)
            yield from (name for name, is_stored in zip(names, pipe.execute(), strict=True) if not is_stored)

    def are_gone(self, names: Collection[str]) -> bool:
        """Return whether none of some entries is stored."""
        keys = [self.keys.prefix + name for name in names]
        return not any(self.client.exists(*keys[at : at + BATCH]) for at in range(0, len(keys), BATCH))

    def _owners(self, names: Collection[str] | None = None) -> Mapping[str, Sequence[str]]:
        """Return the apps from which each entry comes, for all entries or for some."""
        if names is None:
            found = self.client.hgetall(self.keys.owners)
        else:
            names = [name for name in names if self.keys.is_possible(name)]
            found = dict(zip(names, self.client.hmget(self.keys.owners, names), strict=True)) if names else {}
        return {name: text.split("\n") for name, text in found.items() if text is not None}

    def _conflicts(self, entries: Mapping[str, Entry], owners: Mapping[str, Sequence[str]]) -> Mapping[str, EntryError]:
        """Return an error for each entry that another app has defined differently."""
        others = {name: {*owners.get(name, ())} - {self.owner} for name in entries}
        names = [name for name in entries if others[name]]
        refused = dict[str, EntryError]()
        for at in range(0, len(names), BATCH):
            batch = names[at : at + BATCH]
            for name, fields in zip(
                batch, read_fields(self.client, [self.keys.prefix + name for name in batch]), strict=True
            ):
                if not isinstance(fields, str) and fields[0] and not _is_same(entries[name], fields[0], fields[2]):
                    why = f"app {', '.join(sorted(others[name]))} has another entry of this name"
                    remove = redis_command("HDEL", self.keys.owners, name)
                    hint = f"rename one of them, or, if that app is gone, {remove}: beat tries it again every minute"
                    refused[name] = EntryError(f"{why}: {hint}")
        return refused

    def _park(self, names: Sequence[str], owners: Mapping[str, Sequence[str]]) -> None:
        keys, rows = self.keys, []
        touched = [keys.schedule, keys.pending, keys.quarantine, keys.statics, keys.owners, keys.changes]
        for name in names:
            found, key = owners.get(name, ()), keys.prefix + name
            left = "\n".join(owner for owner in found if owner != self.owner)
            rows.append((name, "\n".join(found), left, key not in keys.own))
            touched += [key, keys.parked(name)]
        args = (self.owner, round(KEPT_FOR.total_seconds() * 1000), *self._author, packed(rows))
        for name, reply in zip(names, self._call(PARK, touched, *args), strict=True):
            if reply == "parked":
                # A warning: a receiver that adds entries may have failed, which Celery logs nowhere at that time.
                text = "beat: Removing old static schedule entry '%(entry)s', which beat_schedule has no more"
                log.warning(text, event="entry_removed", entry=name)
            elif reply == "unsent":
                text = "beat: Removing old static schedule entry '%(entry)s', of which a run is not sent yet"
                why = "it is sent if the entry comes back within seven days"
                log.warning(text, event="entry_removed", entry=name, reason=why)

    def _call(self, what: Script, keys: Sequence[str], *args: str | int) -> Sequence[Any]:
        lock, token = self._fence() or (self.keys.schedule, "")
        return replies_of(what(self.client, [lock, *keys], [token, *args]))

    def _since(self, name: str, fields: StoredFields, now: datetime) -> str:
        """Return the field ``since`` of an entry that comes back, whose times that have passed are not made up for.

        It is empty if the entry has no past, or none that can be read.
        """
        definition, meta, policy, since, _, sent, *_ = fields
        if not meta:
            return ""
        key = self.keys.prefix + name
        with suppress(EntryError):
            return (
                Entry.from_fields(key, definition, meta, policy, since, sent, app=self.app)
                .letting_pass(now)
                .meta.encode_since()
            )
        with suppress(EntryError):
            return Meta.decode(meta, since, sent).counting_from(now, now).encode_since()
        return ""

    def _unpark(self, names: Sequence[str], now: datetime) -> Sequence[str]:
        """Put parked entries back, and return their names; entries that are stored again get their unsent runs."""
        parked = [self.keys.parked(name) for name in names]
        if not parked or not self.client.exists(*parked):  # the usual case, and far cheaper than to read them
            return ()
        read = zip(names, read_fields(self.client, parked), strict=True)
        found = [(name, fields) for name, fields in read if not isinstance(fields, str) and any(fields)]
        if not found:
            return ()
        touched = [self.keys.changes, self.keys.pending]
        touched += [key for name, *_ in found for key in (self.keys.prefix + name, self.keys.parked(name))]
        rows = packed((name, self._since(name, fields, now)) for name, fields in found)
        replies = self._call(UNPARK, touched, self.owner, *self._author, rows)
        back = [name for (name, *_), is_back in zip(found, replies, strict=True) if is_back]
        for name in back:
            log.info("beat: Static schedule entry '%(entry)s' is back.", event="entry_back", entry=name)
        return back


def _is_same(entry: Entry, definition: str, policy: str | None) -> bool:
    """Return whether an entry is stored as its app defines it, apart from the changes of an operator."""
    try:
        wanted, stored = json.loads(entry.encode()), json.loads(definition)
        wishes, stored_wishes = json.loads(entry.policy.encode() or "{}"), json.loads(policy or "{}")
        return bool(
            _without_state(wanted) == _without_state(stored)
            and {**wishes, **dict.fromkeys(OPERATORS)} == {**stored_wishes, **dict.fromkeys(OPERATORS)}
        )
    except (EntryError, ValueError, TypeError, AttributeError, RecursionError):
        return False


def are_same_but_paused(stored: tuple[str, str], before: tuple[str, str]) -> bool:
    """Return whether definition and policy of an entry are as before, apart from a pause of an operator."""
    wishes = []
    for _, policy in (stored, before):
        try:
            found = json.loads(policy or "{}")
        except (ValueError, RecursionError):
            found = policy
        wishes.append({**found, **dict.fromkeys(OPERATORS)} if isinstance(found, dict) else found)
    return stored[0] == before[0] and wishes[0] == wishes[1]


def _without_state(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Return a definition without what an operator sets, and without empty arguments."""
    return {name: value for name, value in fields.items() if name != "enabled" and value not in (None, [], {})}
