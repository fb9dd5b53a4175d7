"""The settings of an entry beside its schedule: the ``policy`` field of its hash."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, tzinfo
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict
from zoneinfo import ZoneInfo

from ...errors import EntryError
from ...overlap import Overlap
from ..calendar.zone import in_utc, named_zone
from .definition import LONGEST_NAME, loads_object
from .options import shortened

if TYPE_CHECKING:
    from ...locks.base import Options

__all__ = ("EntryPolicy", "PolicyOptions")

#: Fields of a policy by name, each of the type of the field or of its JSON.
Wishes = Mapping[str, object]


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError("must be a positive number of seconds")
    return float(value)


def _zone(value: object) -> ZoneInfo:
    try:
        zone = named_zone(value) if isinstance(value, tzinfo) else ZoneInfo(str(value))
    except Exception:  # ZoneInfo raises five different errors for a wrong name
        zone = None
    if zone is None:
        raise ValueError("must be the IANA name of a time zone, like Europe/Berlin")
    return zone


def _overlap(value: object) -> Overlap:
    words = [word for word in Overlap if word is not Overlap.RAISE]
    if value not in words:
        raise ValueError(f"must be one of {', '.join(words)}")
    return Overlap(str(value))


def _instant(value: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        moment = in_utc(moment)
    except (ValueError, AttributeError, OverflowError):
        raise ValueError("must be a date and time with offset, like 2026-12-01T09:00:00+01:00") from None
    assert isinstance(moment, datetime)  # noqa: S101 - for the type checker
    return moment


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be a whole number, 1 or more")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - a wrong value, as far as the user is concerned
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")  # noqa: TRY004 - as above
    return value


def _tags(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(tag, str) and tag.strip() for tag in value):
        raise ValueError("must be a list of strings that are not blank")
    return tuple(dict.fromkeys(value))


def _wish(check: Callable[[object], object], default: object = None) -> Any:
    return field(default=default, metadata={"check": check})


class PolicyOptions(TypedDict, total=False):
    """The fields of an ``EntryPolicy`` as keyword arguments, each of the type of the field or of its JSON."""

    timezone: tzinfo | str | None
    overlap: Overlap | str | None
    misfire_grace_time: float | None
    jitter: float | None
    start_time: datetime | str | None
    end_time: datetime | str | None
    max_runs: int | None
    run_on_start: bool
    expires: float | None
    paused: bool
    note: str
    tags: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPolicy:
    """The settings of one entry beside its schedule, all optional; durations are in seconds, instants in UTC."""

    #: The zone on whose wall clock its schedule is read; None: the app's zone.
    timezone: ZoneInfo | None = _wish(_zone)
    #: What happens to an occurrence while an equal call is queued or running; None: as its task says, or ``skip``.
    overlap: Overlap | None = _wish(_overlap)
    #: How late an occurrence may be; a later one is recorded as missed. None: it runs however late it is, except that
    #: ``beat_cron_starting_deadline`` counts for a crontab.
    misfire_grace_time: float | None = _wish(_seconds)
    #: Longest delay after the nominal time. It is constant for an occurrence, and never reaches the next nominal time.
    jitter: float | None = _wish(_seconds)
    #: No nominal time is before it; an interval begins at it.
    start_time: datetime | None = _wish(_instant)
    #: No nominal time is after it, and a run that is late is not sent after it, but recorded as missed.
    end_time: datetime | None = _wish(_instant)
    #: Number of runs after which the entry is finished.
    max_runs: int | None = _wish(_count)
    #: A new entry runs at once, and then as scheduled.
    run_on_start: bool = _wish(_flag, default=False)
    #: Time after which a message that no worker has started is dropped.
    expires: float | None = _wish(_seconds)
    #: Its occurrences pass without a run.
    paused: bool = _wish(_flag, default=False)
    #: For operators: why it is paused, or another remark.
    note: str = _wish(_text, default="")
    #: Names of groups to which it belongs: many entries are paused or listed by a tag.
    tags: tuple[str, ...] = _wish(_tags, default=())

    @classmethod
    def of(cls, wishes: Wishes) -> EntryPolicy:
        """Return the policy with the given fields, by name.

        A value has the type of its field or of the field's JSON; None is the default.

        Raises:
            EntryError: a field is unknown or wrong, or two contradict each other; the message names them.
        """
        if not wishes:
            return _NO_WISHES
        values: dict[str, Any] = {}
        for name, value in wishes.items():
            if name not in _CHECKS:
                near = difflib.get_close_matches(str(name)[:LONGEST_NAME], _CHECKS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise EntryError(f"policy: there is no {shortened(name)}{hint}")
            if value is not None:
                try:
                    values[name] = _CHECKS[name](value)
                except ValueError as exc:
                    raise EntryError(f"policy: {name} {exc}, not {shortened(value)}") from None
        policy = cls(**values)
        if policy.start_time and policy.end_time and policy.end_time < policy.start_time:
            raise EntryError(f"policy: end_time {policy.end_time} is before start_time {policy.start_time}")
        return policy

    def contradicts(self, options: Options | None) -> str:
        """Return how the policy contradicts the options of its entry, an empty string if it does not."""
        if self.expires is not None and (options or {}).get("expires") is not None:
            return "expires is in its options as well as in its policy"
        return ""

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of all fields."""
        return _NAMES

    @classmethod
    def decode(cls, text: str | None) -> EntryPolicy:
        """Read the ``policy`` field of an entry.

        Raises:
            EntryError: the policy cannot be decoded.
        """
        if len(text or "") > LONGEST_KEPT:
            return _decode.__wrapped__(text)
        return _decode(text) if text else _NO_WISHES

    def encode(self) -> str:
        """Return the ``policy`` field of an entry; an empty string if all values are defaults."""
        if self == _NO_WISHES:
            return ""
        wishes = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                wishes[each.name] = value if isinstance(value, bool | int | float | tuple) else _readable(value)
        return json.dumps(wishes)


_CHECKS: Mapping[str, Callable[[object], object]] = {each.name: each.metadata["check"] for each in fields(EntryPolicy)}
_NAMES, _NO_WISHES = frozenset(_CHECKS), EntryPolicy()


#: Most characters of a policy that is kept decoded: notes may be long, and often be rewritten.
LONGEST_KEPT = 2_000


@lru_cache(maxsize=4096)
def _decode(text: str) -> EntryPolicy:
    return EntryPolicy.of(loads_object(text, "policy"))


def _readable(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
