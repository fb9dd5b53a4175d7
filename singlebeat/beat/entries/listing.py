"""The entries of a schedule as a mapping, for tools that list what a beat will run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ...errors import EntryError
from ..keys import Keys
from .entry import Entry
from .fields import BATCH, read_fields
from .timetable import as_listed

if TYPE_CHECKING:
    from celery import Celery

    from ...clients import RedisClient
    from .fields import StoredFields

__all__ = ("Listing",)


class Listing(Mapping[str, Entry]):
    """All usable entries by name, read in batches on demand; changes of an entry are not stored.

    An entry of ``beat_schedule`` is returned as the code defines it, with its stored past. Until a beat leads, such an
    entry may be missing in Redis, or stored there as an older version of the code defined it.

    Args:
        client: the client for the schedule.
        configured: returns the entry that ``beat_schedule`` gives under a name, None if there is none.
    """

    def __init__(self, app: Celery, client: RedisClient, configured: Callable[[str], Entry | None]) -> None:
        self.app, self.client, self._keys = app, client, Keys.of(app)
        self._configured = configured
        self._batch: Mapping[str, Entry] = {}  #: the last batch that was read: a loop asks for its entries next

    def __getitem__(self, name: str) -> Entry:
        if name not in self._batch:
            self._batch = dict(self._read([name]))
        return self._batch[name]

    def __iter__(self) -> Iterator[str]:
        names = self._names()
        for at in range(0, len(names), BATCH):
            batch = self._batch = dict(self._read(names[at : at + BATCH]))
            yield from batch

    def __len__(self) -> int:
        return len(self._names())  # with unusable entries: to leave them out, all would have to be read

    def _names(self) -> list[str]:
        members = self.client.zrange(self._keys.schedule, 0, -1)
        return [*dict.fromkeys([*map(self._keys.name, members), *map(str, self.app.conf.beat_schedule)])]

    def _read(self, names: list[str]) -> Iterator[tuple[str, Entry]]:
        keys = [self._keys.prefix + name for name in names]
        for name, fields in zip(names, read_fields(self.client, keys), strict=True):
            given, stored = self._configured(name), self._stored(name, fields)
            # The value of the code, not of the operator: a tool may add the entry to beat_schedule again.
            wanted = given.enabled if given is not None else stored is None or stored.enabled
            if given is not None and stored is not None:
                past, enabled = stored.meta, given.enabled and stored.enabled
                given = given.with_past(past)
                given.enabled = enabled
            if (entry := given or stored) is not None:
                entry = copy.deepcopy(entry)
                entry.schedule = as_listed(entry.schedule, entry.policy, is_static=given is not None, enabled=wanted)
                yield name, entry

    def _stored(self, name: str, fields: StoredFields) -> Entry | None:
        if isinstance(fields, str):
            return None
        definition, meta, policy, since, _, sent = fields
        try:
            return Entry.from_fields(self._keys.prefix + name, definition, meta, policy, since, sent, app=self.app)
        except EntryError:  # not stored, or quarantined: beat logs the latter
            return None
