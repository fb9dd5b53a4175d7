"""Objects that JSON cannot hold: the ``beat_schedule`` of an app supplies them, and Redis holds a mark for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule
from kombu import Exchange, Queue

from ...errors import EntryError
from ..calendar.recurrence import is_known

if TYPE_CHECKING:
    from celery import Celery

    from .definition import Fields

__all__ = (
    "MARK",
    "evaluate_lazy",
    "given_for",
    "has_code",
    "has_lazy",
    "insert_marks",
    "restore_objects",
    "restore_schedule",
)

#: The item of an entry in ``beat_schedule``, empty if there is none; its values may have any type.
Given = Mapping[str, object]

#: The mark that Redis holds in place of such an object.
MARK = {"__type__": "given"}


def given_for(app: Celery, name: str) -> Given:
    """Return the item of an entry in ``beat_schedule``, an empty mapping if there is none.

    The app must be finalized: its receivers of ``on_after_finalize`` may add entries.
    """
    given = (app.conf.beat_schedule or {}).get(name) or {}
    return given if isinstance(given, Mapping) else vars(given)  # a ScheduleEntry of Celery


def insert_marks(fields: Fields, given: Given) -> Fields:
    """Return a definition with marks for what only ``beat_schedule`` can give.

    It is a custom schedule, a ``BeatLazyFunc`` among the arguments, or a ``Queue`` or ``Exchange`` among the options.
    """
    when = fields["schedule"]
    if not given:
        return fields
    if when is given.get("schedule") and not is_known(when):
        when = {**MARK, "class": f"{type(when).__module__}.{type(when).__qualname__}"}

    def mark(what: str) -> Any:
        ours = dict(_items(given.get(what)))
        return _map(fields[what], lambda at, value: MARK if _is_code(value) and ours.get(at) == value else value)

    return {**fields, "schedule": when, **{what: mark(what) for what in ("args", "kwargs", "options")}}


def restore_schedule(when: object, given: Given) -> object:
    """Return a schedule, with a mark replaced by the schedule from ``beat_schedule``.

    Raises:
        EntryError: ``beat_schedule`` has no such schedule.
    """
    if not isinstance(when, Mapping) or when.get("__type__") != MARK["__type__"]:
        return when
    if not isinstance(given.get("schedule"), BaseSchedule):
        name = str(when.get("class"))[:200]
        raise EntryError(f"its schedule is a {name}, which the beat_schedule of this app must give")
    return given["schedule"]


def restore_objects(what: str, values: Any, given: Given) -> Any:
    """Return the arguments or options of an entry with each mark replaced by its object from ``beat_schedule``.

    Args:
        what: ``args``, ``kwargs`` or ``options``.
        given: the item of ``beat_schedule``, or an entry that has its objects.

    Raises:
        EntryError: ``beat_schedule`` lacks one of the objects.
    """
    marks = [at for at, value in _items(values) if value == MARK]
    if not marks:
        return values
    ours = dict(_items(given.get(what)))
    if not all(_is_code(ours.get(at)) for at in marks):  # the code may have changed since
        kind = "a Queue or an Exchange" if what == "options" else "a BeatLazyFunc"
        raise EntryError(f"there is {kind} in its {what}, which the beat_schedule of this app must give")
    return _map(values, lambda at, value: ours[at] if value == MARK else value)


def evaluate_lazy(values: Any) -> Any:
    """Return arguments with each ``BeatLazyFunc`` replaced by its result, as Celery's beat does for each message."""
    return _map(values, lambda _, value: value() if _is_lazy(value) else value)


def has_lazy(values: object) -> bool:
    """Return whether arguments contain a ``BeatLazyFunc``."""
    return bool(values) and any(_is_lazy(value) for _, value in _items(values))


def has_code(values: object) -> bool:
    """Return whether arguments or options contain an object that only code can give."""
    return bool(values) and any(_is_code(value) for _, value in _items(values))


def _is_lazy(value: object) -> bool:
    return isinstance(value, BeatLazyFunc)


def _is_code(value: object) -> bool:
    return isinstance(value, BeatLazyFunc | Exchange | Queue)


def _items(values: Any) -> Iterable[tuple[Any, object]]:
    if not values:
        return ()
    return values.items() if isinstance(values, Mapping) else enumerate(values)


def _map(values: Any, change: Callable[[Any, Any], object]) -> Any:
    changed = {at: change(at, value) for at, value in _items(values)}
    return changed if isinstance(values, Mapping) else [*changed.values()]
