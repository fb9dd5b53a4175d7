"""The readable parts of a broken entry: its broken fields can be replaced, and the rest is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import EntryError
from .code_only import given_for
from .definition import Meta, loads_object, salvage_fields
from .entry import Entry
from .policy import EntryPolicy
from .timetable import zone_of

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from celery import Celery

    from .definition import Fields
    from .policy import Wishes

__all__ = ("Salvage",)


@dataclass(frozen=True, slots=True)
class Salvage:
    """The readable parts of a stored entry."""

    name: str
    app: Celery
    texts: Mapping[str, str]  #: the fields of its hash as they are: definition, meta, policy, since
    fields: Fields  #: the readable fields of its definition
    wishes: Wishes  #: the fields of its policy, as in JSON
    meta: Meta | None
    problems: Mapping[str, str]  #: a field of the definition, policy, expires or meta -> what is wrong with it

    @classmethod
    def of(cls, name: str, found: Sequence[str | None], app: Celery) -> Salvage:
        """Return the readable parts of an entry.

        Args:
            found: the fields of its hash, as ``FIELDS`` names them.
        """
        texts = {
            field: text or "" for field, text in zip(("definition", "meta", "policy", "since"), found, strict=True)
        }
        fields, problems = salvage_fields(texts["definition"], given_for(app, name))
        wishes, meta = dict[str, object](), None
        try:
            wishes.update(loads_object(texts["policy"] or "{}", "policy"))
            policy = EntryPolicy.of(wishes)
        except EntryError as exc:
            problems["policy"] = str(exc)
        else:
            if why := policy.contradicts(fields.get("options")):
                problems["expires"] = why
        try:
            meta = Meta.decode(texts["meta"], texts["since"])
        except EntryError as exc:
            problems["meta"] = str(exc)
        return cls(name, app, texts, fields, wishes, meta, problems)

    @property
    def timezone(self) -> ZoneInfo | None:
        """The zone of the entry, None if it has none or if it cannot be read."""
        with suppress(EntryError):
            if (named := EntryPolicy.of({"timezone": self.wishes.get("timezone")}).timezone) is not None:
                return named
            return zone_of(self.fields["schedule"]) if "schedule" in self.fields else None
        return None

    def raw(self, field: str) -> object:
        """Return a field of its definition as the JSON has it, None if that cannot be read."""
        with suppress(ValueError, RecursionError):
            definition = json.loads(self.texts["definition"])
            return definition.get(field) if isinstance(definition, Mapping) else None
        return None

    def changed(self, fields: Fields, wishes: Wishes) -> Entry:
        """Return the entry with other fields and policy.

        Saving this entry fails if another program has changed the stored entry in between.

        Args:
            fields: new fields of the definition, with each unreadable one among them.
            wishes: new fields of the policy; None removes a field.

        Raises:
            EntryError: the resulting policy has a wrong field, or fields that contradict each other.
        """
        merged = {**self.wishes, **wishes}
        # None removes an unknown field that is stored. Any other unknown field stays here, so that it raises an error.
        wanted = {name: value for name, value in merged.items() if value is not None or name not in self.wishes}
        entry = Entry(self.name, app=self.app, policy=EntryPolicy.of(wanted), **{**self.fields, **fields})
        if self.meta is not None:
            entry = entry.with_past(self.meta)
        entry.version = self.texts["definition"], self.texts["policy"]
        return entry
