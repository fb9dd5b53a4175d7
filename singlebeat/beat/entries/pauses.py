"""Pauses of many entries: of all, or of those with a tag; kept under one key, so that no entry is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING
from uuid import uuid4

from ...advice import quoted
from ...errors import ConflictError, EntryError
from ...lua import packed, script
from ..calendar.zone import given_instant, in_utc
from ..keys import check_encodable
from .author import CALLED, PERMITTED
from .definition import loads_object

if TYPE_CHECKING:
    from ...clients import RedisClient
    from ..keys import Keys
    from .author import Author
    from .policy import EntryPolicy

__all__ = ("NO_PAUSES", "PAUSE", "READ_PAUSES", "Pause", "Pauses", "pause_many", "read_pauses", "resume_many")

#: The selector of all entries, and what the selector of the entries with a tag begins with.
_ALL, _TAG = "all", "tag:"

#: How long the record of a pause is kept after its end: the times that came in it must not be caught up, and perhaps no
#: beat has led since.
KEPT_FOR = timedelta(days=7)

#: How many times a pause is read and written, if another program keeps changing it in between.
_ATTEMPTS = 5

#: Reads the pauses, with the other things that a tick reads.
READ_PAUSES = script(__package__, "pauses")
PAUSE = script(__package__, "pause", CALLED, PERMITTED)


def _selector(tag: str | None) -> str:
    if tag is None:
        return _ALL
    if not tag.strip():  # most often an unset variable of a shell, which must not mean all entries
        raise EntryError("there can be no tag that is blank: leave it out to mean all entries")
    check_encodable("tag", tag)
    return _TAG + tag


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of all entries, or of those with a tag."""

    tag: str | None  #: None: all entries
    since: datetime | None  #: None if another program has written it without a time
    until: datetime | None  #: None: until it is ended
    note: str = ""
    by: str = ""  #: who has paused them; empty if unknown

    @classmethod
    def decode(cls, selector: str, record: str) -> Pause:
        """Read the record of a selector.

        Raises:
            EntryError: one of them cannot be decoded.
        """
        if selector != _ALL and not selector.removeprefix(_TAG).strip():
            raise EntryError("its tag is blank")
        if selector != _ALL and not selector.startswith(_TAG):
            raise EntryError(f"its selector is neither {_ALL!r} nor begins with {_TAG!r}")
        raw = loads_object(record, "it")
        texts = {name: _text(name, raw.get(name)) for name in ("since", "until", "note", "by")}
        since, until = (_instant(name, texts[name]) for name in ("since", "until"))
        return cls(None if selector == _ALL else selector[len(_TAG) :], since, until, texts["note"], texts["by"])

    def encode(self) -> str:
        """Return the record of the pause."""
        moments = {"since": self.since, "until": self.until}
        return json.dumps(
            {
                **{name: moment.isoformat() for name, moment in moments.items() if moment is not None},
                **{name: text for name, text in (("note", self.note), ("by", self.by)) if text},
            }
        )

    def lasts(self, now: datetime) -> bool:
        """Return whether the pause has not ended."""
        return self.until is None or now < self.until

    def ended_before(self, moment: datetime) -> bool:
        """Return whether the pause has ended before a moment."""
        return self.until is not None and self.until < moment

    def covers(self, policy: EntryPolicy) -> bool:
        """Return whether an entry with a policy is paused by it."""
        return self.tag is None or self.tag in policy.tags

    @property
    def reason(self) -> str:
        """Which entries are paused, and why, in words."""
        return f"{self.which} are paused" + (f": {self.note}" if self.note else "")

    @property
    def which(self) -> str:
        """The entries that are paused, in words."""
        return "all entries" if self.tag is None else f"entries with tag {self.tag}"

    @property
    def resumed_by(self) -> str:
        """The command that ends it."""
        return f"celery singlebeat resume {self._options}"

    @property
    def made_by(self) -> str:
        """The command that makes it, as on another server."""
        until = f" --until {self.until.isoformat()}" if self.until is not None else ""
        note = f" --note {quoted(self.note)}" if self.note else ""
        return f"celery singlebeat pause {self._options}{until}{note}"

    @property
    def _options(self) -> str:
        return "--all" if self.tag is None else f"--tag {quoted(self.tag)}"

    def __str__(self) -> str:
        since = f" since {_moment(self.since)}" if self.since is not None else ""
        until = f" until {_moment(self.until)}" if self.until is not None else ""
        by = f" by {self.by}" if self.by else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.which} are paused{since}{until}{by}{note}"


def _text(name: str, value: object) -> str:
    if not isinstance(value, str | None):
        raise EntryError(f"its {name} is no string: {value!r}")
    return value or ""


def _instant(name: str, text: str) -> datetime | None:
    try:
        return in_utc(datetime.fromisoformat(text)) if text else None
    except (ValueError, OverflowError):
        raise EntryError(f"its {name} is no date and time with offset: {text!r}") from None


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%SZ}"


@dataclass(frozen=True, slots=True)
class Pauses:
    """The pauses of many entries at one moment, those that have ended lately included."""

    found: Sequence[str] = ()  #: selector and record as they were read, alternating
    pauses: Sequence[Pause] = ()
    problems: Mapping[str, str] = field(default_factory=dict)  #: why a record cannot be read, by selector

    @classmethod
    def of(cls, reply: Sequence[str]) -> Pauses:
        """Return the pauses from the reply of ``pauses.lua``; those that cannot be read pause nothing."""
        return _decode(tuple(reply)) if reply else NO_PAUSES

    def over(self, policy: EntryPolicy, now: datetime, due: datetime | None = None) -> Pause | None:
        """Return a pause that covers an entry now, or an occurrence of the entry; None if there is none.

        The end of a pause makes up for no time before it, whether a beat led meanwhile or not.

        Args:
            due: when the run of the occurrence was due.
        """
        for pause in self.pauses:
            is_within = pause.lasts(now) or (due is not None and pause.until is not None and due < pause.until)
            if is_within and pause.covers(policy):
                return pause
        return None

    def left(self, before: EntryPolicy, after: EntryPolicy, now: datetime) -> datetime | None:
        """Return until when an entry was paused by pauses that do not cover its new policy; None if it was not."""
        ends = (pause.until or now for pause in self.pauses if pause.covers(before) and not pause.covers(after))
        return max((min(end, now) for end in ends), default=None)

    def lasting(self, now: datetime) -> Sequence[Pause]:
        """Return the pauses that have not ended."""
        return [pause for pause in self.pauses if pause.lasts(now)]


NO_PAUSES = Pauses()


@lru_cache(maxsize=16)
def _decode(found: tuple[str, ...]) -> Pauses:
    if len(found) == 1:
        return Pauses(problems={"": f"its key holds something else than a hash: {found[0]}"})
    pauses, problems = list[Pause](), dict[str, str]()
    for selector, record in sorted(_pairs(found)):
        try:
            pauses.append(Pause.decode(selector, record))
        except EntryError as exc:
            problems[selector] = str(exc)
    return Pauses(found, pauses, problems)


def _pairs(found: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(found[::2], found[1::2], strict=True)


def read_pauses(client: RedisClient, key: str) -> Pauses:
    """Read the pauses of many entries in one round trip.

    Args:
        key: of the pauses.
    """
    return Pauses.of(READ_PAUSES(client, [key], ()))


def pause_many(
    client: RedisClient,
    keys: Keys,
    now: datetime,
    author: Author,
    *,
    tag: str | None,
    note: str,
    until: datetime | None,
) -> Pause | None:
    """Pause all entries, or those with a tag; a pause that lasts is changed, keeps its beginning, and is returned.

    Args:
        author: of this change, which is recorded.
        note: the reason; if empty, a pause that lasts keeps its present note.
        until: when the pause ends by itself; None: never.

    Raises:
        EntryError: the tag is blank, ``until`` has passed or has no time zone, or a string cannot be encoded.
        ConflictError: another process keeps changing the pause.
    """
    check_encodable("note", note)
    until = None if until is None else given_instant("until", until)
    if until is not None and until <= now:
        raise EntryError(
            f"until is {_moment(until)}, which has passed: the time is {_moment(now)}. Use a later time, or leave "
            "until out for a pause without an end"
        )

    before: Pause | None = None

    def change(present: Pause | None) -> Pause:
        nonlocal before
        before = present
        if present is None:
            return Pause(tag, now, until, note, author.actor)
        return replace(present, until=until, note=note or present.note, by=author.actor)

    _change(client, keys, now, tag, change, (*author, "pause", note))
    return before


def resume_many(client: RedisClient, keys: Keys, now: datetime, author: Author, *, tag: str | None) -> bool:
    """End a pause of all entries, or of those with a tag; return whether there was one.

    Args:
        author: of this change, which is recorded.

    Raises:
        EntryError, ConflictError: as ``pause_many``.
    """

    def change(present: Pause | None) -> Pause | None:
        return None if present is None else replace(present, until=now)

    return _change(client, keys, now, tag, change, (*author, "resume", "")) is not None


def _change(
    client: RedisClient,
    keys: Keys,
    now: datetime,
    tag: str | None,
    change: Callable[[Pause | None], Pause | None],
    about: tuple[str | int, ...],
) -> Pause | None:
    """Change the pause of a tag, or of all entries, and return it; None if nothing was to be changed.

    Args:
        change: returns the new pause from the present one, which is None if no pause lasts.
        about: what is recorded of the change, as ``pause.lua`` takes it.
    """
    selector, call = _selector(tag), uuid4().hex
    for _ in range(_ATTEMPTS):
        pauses = read_pauses(client, keys.pauses)
        present = next((pause for pause in pauses.lasting(now) if pause.tag == tag), None)
        wanted = change(present)
        if wanted is None:
            return None
        rows = dict(_pairs(pauses.found))
        over = [text for old in pauses.pauses if old.ended_before(now - KEPT_FOR) for text in _row(old, rows)]
        found = rows.get(selector, "")
        # More than are written while a client repeats a call.
        record = {**json.loads(wanted.encode()), "written": f"{call} {_written(found)}"[:1000]}
        args = (selector, found, json.dumps(record), packed(over), *about, call)
        if PAUSE(client, [keys.pauses, keys.changes], args):
            return wanted
    raise ConflictError("the pause cannot be stored: another process keeps changing it; try again")


def _written(record: str) -> str:
    """Return the ids of the last calls that wrote a record; empty if none are known."""
    try:
        return str(loads_object(record or "{}", "it").get("written", ""))
    except EntryError:
        return ""


def _row(pause: Pause, rows: Mapping[str, str]) -> tuple[str, str]:
    selector = _selector(pause.tag)
    return selector, rows[selector]
