"""An entry of the schedule: RedBeat's, read generously, and with its times computed right."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery.app import app_or_default
from celery.schedules import BaseSchedule, schedule
from celery.utils.saferepr import saferepr
from redbeat import RedBeatSchedulerEntry
from redbeat.decoder import RedBeatJSONDecoder, RedBeatJSONEncoder
from redbeat.schedulers import RedBeatConfig

from ..config import Config
from ..connections import schedule_client, schedule_url
from ..errors import EntryError
from ..locks import time_to_start
from .keys import Keys
from .recurrence import next_occurrence

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("PARKED", "Entry", "Meta", "prepare")

#: The score of an entry that is never due: it has no next occurrence, or it cannot be used.
PARKED = -1.0

DATETIME_FIELDS = ("year", "month", "day", "hour", "minute", "second", "microsecond")
CRONTAB_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")


class _Conf(RedBeatConfig):  # type: ignore[misc]
    """RedBeat's view of our settings, for what we inherit from it."""

    def __init__(self, app: Celery) -> None:
        config = Config.of(app)
        self.app = app
        self.key_prefix = config.redbeat_key_prefix
        self.schedule_key = f"{self.key_prefix}:schedule"
        self.statics_key = f"{self.key_prefix}:statics"
        self.redis_url = schedule_url(app)
        self.redis_use_ssl = config.redbeat_redis_use_ssl
        self.redbeat_redis_options = dict(config.redbeat_redis_options)
        self.lock_key = config.lock_key
        self.lock_timeout = config.redbeat_lock_timeout


def prepare(app: Celery) -> None:
    """Give an app the ``redbeat_conf`` that RedBeat's classes look for."""
    if not isinstance(getattr(app, "redbeat_conf", None), _Conf):
        app.redbeat_conf = _Conf(app)


class _Decoder(RedBeatJSONDecoder):  # type: ignore[misc]
    """Accepts what writers in other languages leave out or write in another way."""

    def dict_to_object(self, d: dict[str, Any]) -> Any:
        kind = d.get("__type__")
        if kind == "interval":
            return schedule(run_every=float(d["every"]), relative=bool(d.get("relative", False)))
        if kind == "crontab":
            fields = {name: _crontab_field(d[name]) for name in CRONTAB_FIELDS if d.get(name) is not None}
            d = {"__type__": kind, **fields}
        return super().dict_to_object(d)


def _crontab_field(value: Any) -> Any:
    # "[1-12]" is how RedBeat's own documentation writes a range.
    return value.strip().removeprefix("[").removesuffix("]") if isinstance(value, str) else value


def _loads(text: str, what: str) -> Any:
    try:
        return json.loads(text, cls=_Decoder)
    except RecursionError:
        raise EntryError(f"{what} is nested too deeply") from None
    except Exception as exc:  # the constructors that it names may raise anything, and it must harm nobody else
        raise EntryError(f"{what} cannot be read: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known about an entry's past."""

    last_run_at: datetime | None = None  #: nominal time of its last occurrence, in UTC; None: it has never run
    total_run_count: int = 0

    @classmethod
    def decode(cls, text: str | None) -> Meta:
        """Read the ``meta`` field of an entry.

        Raises:
            EntryError: it cannot be understood.
        """
        if not text:
            return cls()
        raw = _loads(text, "meta")
        if not isinstance(raw, Mapping):
            raise EntryError("meta is not a JSON object")
        last, count = raw.get("last_run_at"), raw.get("total_run_count", 0)
        if isinstance(last, str):
            last = _loads_instant(last)
        if last is not None and not isinstance(last, datetime):
            raise EntryError(f"meta: last_run_at is neither a datetime nor null: {last!r}")
        try:
            if last is not None:
                last = last.replace(tzinfo=last.tzinfo or UTC).astimezone(UTC)
            return cls(last, int(count) if isinstance(count, int | float) else 0)
        except (ValueError, OverflowError) as exc:
            raise EntryError(f"meta is out of range: {exc}") from exc

    def uncounted(self) -> Meta:
        """Return the past without its last run, which did not happen."""
        return replace(self, total_run_count=self.total_run_count - 1)

    def encode(self) -> str:
        """Return the ``meta`` field of an entry, in UTC: local time is ambiguous when clocks go back."""
        last = self.last_run_at
        if last is not None:
            fields = {name: getattr(last, name) for name in DATETIME_FIELDS}
            return json.dumps(
                {
                    "last_run_at": {"__type__": "datetime", **fields, "timezone": "UTC"},
                    "total_run_count": self.total_run_count,
                }
            )
        return json.dumps({"last_run_at": None, "total_run_count": self.total_run_count})


def _loads_instant(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as exc:
        raise EntryError(f"meta: last_run_at is no ISO 8601 date: {text!r}") from exc


class Entry(RedBeatSchedulerEntry):  # type: ignore[misc]
    """A schedule entry in Redis, with RedBeat's interface.

    >>> Entry("greet", "tasks.greet", schedule(60), args=["world"], app=app).save()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, app: Celery | None = None, **kwargs: Any) -> None:
        app = app_or_default(app)
        prepare(app)
        super().__init__(*args, app=app, **kwargs)

    def __copy__(self) -> Entry:
        # Celery's __reduce__ knows neither ``enabled`` nor RedBeat's order of arguments.
        entry = object.__new__(type(self))
        entry.__dict__.update(self.__dict__)
        return entry

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        entry = copy.copy(self)
        for name in ("args", "kwargs", "options"):
            setattr(entry, name, copy.deepcopy(getattr(self, name), memo))
        return entry

    def with_past(self, meta: Meta) -> Entry:
        """Return a copy with what is known about its past."""
        entry = copy.copy(self)
        entry.__dict__.update(last_run_at=meta.last_run_at, total_run_count=meta.total_run_count)
        return entry

    @classmethod
    def decode(cls, key: str, definition: str, app: Celery) -> Entry:
        """Read the ``definition`` field of an entry; what is missing gets its default, what is unknown is left alone.

        Raises:
            EntryError: it cannot be understood; the message says why.
        """
        raw = _loads(definition, "definition")
        if not isinstance(raw, Mapping):
            raise EntryError("definition is not a JSON object")
        task, when = raw.get("task"), raw.get("schedule")
        if not isinstance(task, str) or not task:
            raise EntryError("definition has no task, or it is not a text")
        if isinstance(when, int | float) and not isinstance(when, bool):
            try:
                when = schedule(run_every=float(when))
            except (ValueError, OverflowError) as exc:
                raise EntryError(f"definition has a schedule out of range: {exc}") from exc
        if not isinstance(when, BaseSchedule):
            raise EntryError(f"definition has a schedule of no known kind: {saferepr(when)}")
        if isinstance(when, schedule) and hasattr(when, "run_every") and when.run_every.total_seconds() <= 0:
            raise EntryError("definition has an interval that is not longer than 0 seconds")
        # The key is the identity, whatever the definition says about the name.
        name = key.removeprefix(Config.of(app).redbeat_key_prefix)
        return cls(
            name=name,
            task=task,
            schedule=when,
            args=_typed(raw.get("args"), list, "args"),
            kwargs=_typed(raw.get("kwargs"), dict, "kwargs"),
            options=_checked_options(_typed(raw.get("options"), dict, "options")),
            enabled=raw.get("enabled") in (None, True, 1),
            app=app,
        )

    def encode(self) -> str:
        """Return the ``definition`` field, in exactly RedBeat's form: it dies on any further field.

        Raises:
            EntryError: a value cannot be stored.
        """
        definition = {
            "name": self.name,
            "task": self.task,
            "args": self.args,
            "kwargs": self.kwargs,
            "options": self.options,
            "schedule": self.schedule,
            "enabled": self.enabled,
        }
        if not self.task or not isinstance(self.schedule, BaseSchedule):
            raise EntryError(f"entry {self.name!r} cannot be stored: it needs a task and a schedule")
        try:
            return json.dumps(definition, cls=RedBeatJSONEncoder)
        except (TypeError, ValueError) as exc:
            raise EntryError(f"entry {self.name!r} cannot be stored: {exc}") from exc

    @classmethod
    def from_key(cls, key: str, app: Celery | None = None) -> Entry:
        """Return the stored entry of a key.

        Raises:
            KeyError: there is none.
            EntryError: it cannot be understood.
        """
        app = app_or_default(app)
        definition, meta = schedule_client(app).hmget(key, "definition", "meta")
        if not definition:
            raise KeyError(key)
        return cls.decode(key, definition, app).with_past(Meta.decode(meta))

    @staticmethod
    def load_definition(key: str, app: Any = None, definition: str | None = None) -> Any:
        """Return the decoded ``definition`` of a key; KeyError if there is none."""
        definition = definition or schedule_client(app_or_default(app)).hget(key, "definition")
        if not definition:
            raise KeyError(key)
        return _loads(definition, "definition")

    @staticmethod
    def load_meta(key: str, app: Any = None) -> Any:
        """Return the decoded ``meta`` of a key."""
        return RedBeatSchedulerEntry.decode_meta(schedule_client(app_or_default(app)).hget(key, "meta"))

    @property
    def meta(self) -> Meta:
        """What is known about the entry's past."""
        last = self.last_run_at
        if last is not None:
            last = last.replace(tzinfo=last.tzinfo or UTC).astimezone(UTC)
        return Meta(last, self.total_run_count)

    @property
    def due_at(self) -> datetime | None:
        """The next time when the entry is due, now if it is overdue or has never run, None if there is none."""
        now = datetime.now(UTC)
        last = self.meta.last_run_at
        if last is None:
            return now
        following = next_occurrence(self.schedule, last, zone=self.app.timezone)
        return None if following is None else max(now, following)

    @property
    def score(self) -> float:
        """The entry's place in the schedule: seconds since 1970, or PARKED."""
        due_at = self.due_at
        return PARKED if due_at is None else due_at.timestamp()

    @property
    def rank(self) -> int | None:
        """How many entries are due before this one; None if it is not scheduled."""
        rank: int | None = schedule_client(self.app).zrank(self.app.redbeat_conf.schedule_key, self.key)
        return rank

    def save(self) -> Entry:
        """Store the entry; one that is there keeps what is known about its past.

        Raises:
            EntryError: a value cannot be stored.
        """
        definition = self.encode()
        with schedule_client(self.app).pipeline() as pipe:
            pipe.hset(self.key, "definition", definition)
            pipe.hsetnx(self.key, "meta", self.meta.encode())
            pipe.zadd(self.app.redbeat_conf.schedule_key, {self.key: self.score})
            pipe.execute()
        return self

    def delete(self) -> None:
        """Remove the entry."""
        keys = Keys.of(self.app)
        with schedule_client(self.app).pipeline() as pipe:
            pipe.zrem(keys.schedule, self.key, self.name)
            pipe.zrem(keys.pending, self.key, self.name)
            pipe.hdel(keys.quarantine, self.key, self.name)
            pipe.delete(self.key)
            pipe.execute()

    def reschedule(self, last_run_at: datetime | None = None) -> None:
        """Count the entry's time from another moment, by default from now."""
        self.last_run_at = last_run_at or datetime.now(UTC)
        self._store_meta()

    def _next_instance(self, last_run_at: datetime | None = None, only_update_last_run_at: bool = False) -> Entry:
        entry = copy.copy(self)
        entry.last_run_at = last_run_at or datetime.now(UTC)
        entry.total_run_count = self.total_run_count + (0 if only_update_last_run_at else 1)
        entry._store_meta()
        return entry

    __next__ = next = _next_instance

    def _store_meta(self) -> None:
        with schedule_client(self.app).pipeline() as pipe:
            pipe.hset(self.key, "meta", self.meta.encode())
            pipe.zadd(self.app.redbeat_conf.schedule_key, {self.key: self.score})
            pipe.execute()


def _typed(value: Any, kind: type, name: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise EntryError(f"definition: {name} is not a JSON {'object' if kind is dict else 'array'}")
    return value


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    headers = options.get("headers")
    if headers is not None and not isinstance(headers, dict):
        raise EntryError("definition: the option headers is not a JSON object")
    try:
        time_to_start(options, queued_ttl=0, now=datetime.min.replace(tzinfo=UTC))
    except (ValueError, TypeError, OverflowError) as exc:
        raise EntryError(f"definition: the options countdown, eta and expires make no sense: {exc}") from exc
    return options
