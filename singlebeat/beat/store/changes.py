"""The record of changes of entries: who has changed what; read from the schedule's server, and added to for others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ...connections import schedule_client
from ...locks.base import from_ms
from ...log import without_passwords
from ...lua import packed, script
from ...masking import masked, masked_text
from ..entries.author import RECORD
from ..keys import Keys

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient

__all__ = ("Change", "Changes", "notice")

#: Records of the stream that one round trip reads.
PAGE = 1000

NOTICE = script("singlebeat.beat.entries", "notice", RECORD)

#: The fields of a record that hold texts of the entry.
_TEXTS = ("definition", "policy")

#: The values of a part that mean the same as its absence.
_NOTHING: tuple[object, ...] = (None, [], {})


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an entry, or of a pause of many entries."""

    id: str
    at: datetime  #: when it was recorded
    actor: str  #: who has made it; empty: an unknown writer, another program
    by: str  #: by what means: api, cli, web, beat_schedule, or raw, for an unknown writer
    entry: str  #: empty: a pause of many entries
    action: str  #: add, edit, pause, resume, delete, revert, park, unpark
    #: Definition and policy before, as they were stored, if they were changed; an empty string if absent; of a removed
    #: entry also its past. Of a pause of many entries: its record by its selector.
    before: Mapping[str, str]
    after: Mapping[str, str]  #: the same after the change
    note: str = ""

    @property
    def differences(self) -> Mapping[str, tuple[object, object]]:
        """The parts that differ: of a definition and a policy by their names, with the values before and after.

        A value is None if the part was absent, and a part that cannot be read is named by its field.
        """
        found = dict[str, tuple[object, object]]()
        for name in self.before.keys() | self.after.keys():
            texts = self.before.get(name, ""), self.after.get(name, "")
            parts = [_parts(text) for text in texts]
            if name in {"meta", "since", "sent", "pending", "backfill"}:
                continue
            if name not in _TEXTS or None in parts:
                found[name] = texts[0] or None, texts[1] or None
                continue
            before, after = ({} if each is None else each for each in parts)
            for part in sorted(before.keys() | after.keys()):
                values = before.get(part), after.get(part)
                if part != "name" and values[0] != values[1] and not all(value in _NOTHING for value in values):
                    found[part] = values
        return found

    def masked_differences(self, app: Celery) -> Mapping[str, tuple[object, object]]:
        """Return the parts that differ, with secret arguments masked; a part of which only a secret differs as well."""
        shown = self.masked(app)
        return {
            without_passwords(part): (_value(shown.before, part), _value(shown.after, part))
            for part in self.differences
        }

    def masked(self, app: Celery) -> Change:
        """Return the change with secret arguments masked, to be shown."""
        before, after = (
            {name: _masked(text, app) for name, text in each.items()} for each in (self.before, self.after)
        )
        return replace(self, before=before, after=after)


def _masked(text: str, app: Celery) -> str:
    parts = _parts(text)
    return masked_text(text, app) if parts is None else json.dumps(masked(parts, app)) if text else ""


def _value(texts: Mapping[str, str], part: str) -> object:
    """Return a part of a definition or policy, or the text of a field; None if it is absent."""
    parts = [_parts(texts.get(name, "")) or {} for name in _TEXTS]
    return texts.get(part) or next((found[part] for found in parts if part in found), None)


def _parts(text: str) -> Mapping[str, object] | None:
    """Return the parts of a definition or policy, None if it cannot be read."""
    try:
        raw = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


class Changes:
    """The changes of an app's entries that the server still has."""

    def __init__(self, app: Celery) -> None:
        self.app, self.keys = app, Keys.of(app)

    def latest(self, name: str | None, count: int | None = None) -> Sequence[Change]:
        """Return the last changes of an entry, or of all entries, latest first.

        What an unknown writer has changed is known from the earlier changes of its entry, as far as these are there.

        Args:
            name: of the entry; None: all.
            count: most changes; None: all.
        """
        found = list[Change]()
        open_ = dict[tuple[str, str], int]()  # entry and field whose text before is not known yet: number of its change
        for change in self._stream(name):
            for field, text in change.after.items():
                number = open_.pop((change.entry, field), None)
                if number is not None:
                    found[number] = replace(found[number], before={**found[number].before, field: text})
            if count is None or len(found) < count:
                found.append(change)
                missing = change.after.keys() - change.before.keys()
                open_ |= {(change.entry, field): len(found) - 1 for field in missing}
            elif not open_:
                break
        return found

    def _stream(self, entry: str | None) -> Iterator[Change]:
        client, before = schedule_client(self.app), "+"
        while page := client.xrevrange(self.keys.changes, before, "-", count=PAGE):
            for at, fields in page:
                if entry in {None, fields.get("entry")}:
                    yield _change(at, fields)
            before = f"({page[-1][0]}"


def _change(at: str, fields: Mapping[str, str]) -> Change:
    texts = {name: fields.get(name, "") for name in ("entry", "actor", "by", "action", "note")}
    moment = from_ms(at.partition("-")[0]) or datetime.fromtimestamp(0, UTC)  # any program may add a record
    return Change(id=at, at=moment, before=_fields(fields.get("before")), after=_fields(fields.get("after")), **texts)


def _fields(text: str | None) -> Mapping[str, str]:
    """Return the fields of a record; empty if another program has written something else there."""
    parts = _parts(text or "") or {}
    return {str(name): value for name, value in parts.items() if isinstance(value, str)}


def notice(client: RedisClient, keys: Keys, limit: int, entries: Mapping[str, bool]) -> None:
    """Record what other programs have changed without a record, in one round trip.

    Args:
        limit: changes that are kept.
        entries: keys of those that are not stored as they were recorded, and whether one without a record is new.
    """
    rows = packed((keys.name(key), is_new) for key, is_new in entries.items())
    NOTICE(client, [keys.changes, *entries], (limit, rows))
