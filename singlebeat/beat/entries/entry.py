"""An entry of the schedule: RedBeat's format, read leniently, with correctly computed times."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Unpack
from uuid import uuid4

from celery.app import app_or_default
from celery.schedules import BaseSchedule
from kombu.utils.json import dumps
from redbeat import RedBeatSchedulerEntry
from redbeat.schedulers import RedBeatConfig

from ...config import Config
from ...connections import schedule_client, schedule_url
from ...errors import ConflictError, EntryError, UnknownEntryError
from ...lua import packed, script
from ..calendar.recurrence import is_known, next_occurrence, reads_clock
from ..calendar.zone import app_zone
from ..keys import Keys
from ..server_time import server_now
from .author import BARE, CALLED, PERMITTED, RECORD, Author
from .code_only import given_for, has_code, has_lazy
from .definition import Meta, decode_definition, encode_definition, loads_object, why_too_deep
from .fields import read_fields, write_fields, zone_of_beats
from .options import check_encoding
from .permission import check_allowed
from .policy import EntryPolicy, PolicyOptions
from .save import ATTEMPTS, save_entries
from .schedule_json import decode_schedule
from .timetable import PARKED, Timetable, is_listed_as_disabled, listed_policy, zone_of

if TYPE_CHECKING:
    from celery import Celery

    from ...locks.base import Options
    from ...locks.key import Arguments, NamedArguments
    from .definition import JsonObject

__all__ = ("NOTHING", "PARKED", "Entry", "Meta", "prepare")

DELETE = script(__package__, "delete", BARE, CALLED, PERMITTED, RECORD)

#: The ``version`` of an entry that must not exist yet.
NOTHING = ("", "")

#: The fields of an entry's hash that ``Entry.from_fields`` reads.
FIELDS = ("definition", "meta", "policy", "since", "sent")


class _Conf(RedBeatConfig):  # type: ignore[misc]
    """Our settings under RedBeat's names, for the methods that we inherit from RedBeat."""

    def __init__(self, app: Celery) -> None:
        config = Config.of(app)
        self.app = app
        self.key_prefix = config.redbeat_key_prefix
        self.schedule_key = f"{self.key_prefix}:schedule"
        self.statics_key = f"{self.key_prefix}:statics"
        self.redis_use_ssl = config.redbeat_redis_use_ssl
        self.redbeat_redis_options = dict(config.redbeat_redis_options)
        self.lock_key = config.lock_key
        self.lock_timeout = config.redbeat_lock_timeout

    @property
    def redis_url(self) -> str:
        """The URL of the schedule's server, which is not needed if the user has set ``app.redbeat_redis``."""
        return schedule_url(self.app)


def prepare(app: Celery) -> None:
    """Give an app the ``redbeat_conf`` that RedBeat's classes look for."""
    if not isinstance(getattr(app, "redbeat_conf", None), _Conf):
        app.redbeat_conf = _Conf(app)


class EntryOptions(PolicyOptions, total=False):
    """The keyword arguments of an entry: those of RedBeat's entry, and the fields of its policy."""

    name: str
    task: str
    schedule: BaseSchedule | timedelta | float  #: a number of seconds is an interval
    args: Arguments
    kwargs: NamedArguments
    options: Options
    enabled: bool
    last_run_at: datetime | None
    total_run_count: int


#: The fields that RedBeat takes by their places.
_POSITIONAL = ("name", "task", "schedule", "args", "kwargs", "enabled")


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse fields that no entry has, and values of wrong types.

    Raises:
        EntryError: the message names the field.
    """
    known = {*EntryOptions.__annotations__, "relative"}
    about = f"entry {fields.get('name')!r}:"
    for unknown in sorted(fields.keys() - known):
        near = get_close_matches(unknown, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise EntryError(f"{about} there is no field {unknown}{hint}")
    when = fields.get("schedule")
    if when is not None and not hasattr(when, "is_due") and not _is_interval(when):
        raise EntryError(f"{about} schedule must be a schedule or a number of seconds, not {when!r}")
    for name in ("kwargs", "options"):
        if not isinstance(fields.get(name) or {}, Mapping):
            raise EntryError(f"{about} {name} must be a dict, not {type(fields[name]).__name__}")


def _is_interval(when: object) -> bool:
    if isinstance(when, bool) or not isinstance(when, int | float | timedelta):
        return False
    try:
        _ = when if isinstance(when, timedelta) else timedelta(seconds=when)
    except (ValueError, OverflowError):
        return False
    return True


class Entry(RedBeatSchedulerEntry):  # type: ignore[misc]
    """A schedule entry in Redis, with RedBeat's interface; also takes the fields of ``EntryPolicy`` by name.

    >>> Entry("greet", "tasks.greet", schedule(60), args=["world"], jitter=5, app=app).save()  # doctest: +SKIP

    Raises:
        EntryError: a field of the policy is unknown or wrong, or contradicts another.
    """

    #: Definition and policy as they were last read or stored; None: ``save`` replaces any stored entry.
    version: tuple[str, str] | None = None

    #: Whether its past was read, from Redis or elsewhere: then the entry is not new.
    has_past = False

    #: A warning about unknown fields in its stored definition; empty if there are none.
    ignored = ""

    #: The zone in which beats read its wall clock, which may be another than that of this process; None: unknown.
    zone: tzinfo | None = None

    last_run_at: datetime | None
    _made_at: datetime | None = None
    _since: datetime | None = None
    _ahead: datetime | None = None
    _sent: datetime | None = None

    #: Key of the lock that all its runs acquire; None: unknown, or not always the same.
    lock_key: str | None = None

    def __init__(
        self,
        *positional: Any,
        app: Celery | None = None,
        policy: EntryPolicy | None = None,
        **options: Unpack[EntryOptions],
    ) -> None:
        app = app_or_default(app)
        prepare(app)
        kwargs: dict[str, Any] = {**options}
        wishes = {name: kwargs.pop(name) for name in EntryPolicy.names() & kwargs.keys()}
        if policy is not None and not isinstance(policy, EntryPolicy):
            hint = f": put {', '.join(map(str, policy))} beside task" if isinstance(policy, dict) else ""
            raise EntryError(f"policy must be an EntryPolicy, not a {type(policy).__name__}{hint}")
        self.policy = policy or EntryPolicy.of(wishes)
        # Celery would read the schedule's own clock: that is slow, and a user's own class may return anything.
        made_at = datetime.now(UTC)
        kwargs["last_run_at"] = kwargs.get("last_run_at") or made_at
        self._made_at = made_at
        _check_fields({**dict(zip(_POSITIONAL, positional, strict=False)), **kwargs})
        super().__init__(*positional, app=app, **kwargs)
        if policy is None and not wishes:
            self.policy = listed_policy(self.schedule) or self.policy
        if is_listed_as_disabled(self.schedule):
            self.enabled = False
        if self.policy.timezone is None and (zone := zone_of(self.schedule, app_zone(app))) is not None:
            # JSON would keep only the offset of the schedule's own zone.
            self.policy = replace(self.policy, timezone=zone)
        if why := self.policy.contradicts(self.options):
            raise EntryError(f"entry {self.name!r}: {why}")

    def __copy__(self) -> Entry:
        # Celery's __reduce__ knows neither ``enabled`` nor RedBeat's order of arguments.
        entry = object.__new__(type(self))
        entry.__dict__.update(self.__dict__)
        return entry

    def __deepcopy__(self, memo: dict[int, object]) -> Entry:
        entry = copy.copy(self)
        for name in ("args", "kwargs", "options"):
            setattr(entry, name, copy.deepcopy(getattr(self, name), memo))
        return entry

    def letting_pass(self, now: datetime) -> Entry:
        """Return a copy that does not make up for the times that have passed."""
        since = now
        with suppress(Exception):  # a user's own schedule may raise anything
            since = self.timetable.without_passed(self.meta.counts_from, now)
        return self.with_past(self.meta.counting_from(since, now))

    def with_past(self, meta: Meta) -> Entry:
        """Return a copy with the given past."""
        entry = copy.copy(self)
        past = {"last_run_at": meta.last_run_at, "total_run_count": meta.total_run_count}
        entry.__dict__.update(past, _since=meta.since, _ahead=meta.ahead, _sent=meta.sent, has_past=True)
        return entry

    def count_from(self, now: datetime) -> None:
        """Let an entry count from ``now`` if it still counts from its creation by the clock of this host."""
        if self._made_at is not None and self.last_run_at is self._made_at:
            self.last_run_at = self._made_at = now

    def _now(self) -> datetime:
        return server_now(schedule_client(self.app), Keys.of(self.app).schedule)

    @property
    def is_constant(self) -> bool:
        """Whether all its runs get the same arguments."""
        return not has_lazy(self.args) and not has_lazy(self.kwargs)

    @property
    def call_as_json(self) -> str:
        """Its task and arguments in kombu's JSON.

        Raises:
            Exception: JSON cannot have an argument.
        """
        return str(dumps([self.task, self.args or (), self.kwargs or {}]))

    @property
    def timetable(self) -> Timetable:
        """The entry's times."""
        return Timetable(self.name, self.schedule, self.policy, self.zone or app_zone(self.app))

    @property
    def reads_clock_of_app(self) -> bool:
        """Whether its times depend on the zone of its app."""
        return self.policy.timezone is None and reads_clock(self.schedule)

    @classmethod
    def decode(cls, key: str, definition: str, app: Celery) -> Entry:
        """Read the ``definition`` field of an entry. The name comes from the key, even if the definition has another.

        Raises:
            EntryError: the definition cannot be decoded; the message says why.
        """
        name = key.removeprefix(Config.of(app).redbeat_key_prefix)
        try:
            fields = decode_definition(definition, given_for(app, name))
            ignored = fields.pop("ignored")
            entry = cls(name=name, app=app, **fields)
        except EntryError:
            raise
        except Exception as exc:  # a user's own schedule may raise anything: this must not harm other entries
            raise EntryError(f"its definition cannot be used: {type(exc).__name__}: {exc}") from exc
        entry.ignored = ignored
        return entry

    @classmethod
    def allowed(cls, key: str, definition: str, app: Celery) -> Entry:
        """Read the ``definition`` field of an entry that is to run. Its times are not calculated: that may take long.

        Raises:
            EntryError: it cannot be decoded, or its task is not allowed.
        """
        entry = cls.decode(key, definition, app)
        check_allowed(entry, Config.of(app).singlebeat_allowed_tasks)
        return entry

    def check_stored(self, definition: str, now: datetime) -> None:
        """Check that a beat can use the entry as it is to be stored: an entry that can be built may have no JSON.

        Args:
            definition: the field to be stored.

        Raises:
            EntryError: it cannot be decoded, its task is not allowed, or its times cannot be calculated.
        """
        read = copy.copy(self)  # far cheaper than to build another one
        read.__dict__.update(decode_definition(definition, given_for(self.app, self.name)))
        read._check_usable(now)
        check_encoding(read.options)

    def _check_usable(self, now: datetime) -> None:
        check_allowed(self, Config.of(self.app).singlebeat_allowed_tasks)
        try:
            next_occurrence(self.schedule, now, zone=app_zone(self.app))
        except Exception as exc:  # a readable rule may still be invalid
            raise EntryError(f"its next run cannot be calculated: {type(exc).__name__}: {exc}") from exc

    def why_unusable(self, now: datetime) -> str:
        """Return why a beat could not use the entry, though it can be read; an empty string if it could."""
        try:
            self._check_usable(now)
        except EntryError as exc:
            return str(exc)
        return self.policy.contradicts(self.options)

    def encode(self) -> str:
        """Return the ``definition`` field, with exactly RedBeat's names: RedBeat crashes on any other name.

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
            is_data = is_known(self.schedule) and not any(map(has_code, (self.args, self.kwargs, self.options)))
            given = {} if is_data else given_for(self.app, self.name)
            return encode_definition(definition, given)
        except (TypeError, ValueError) as exc:
            raise EntryError(f"entry {self.name!r} cannot be stored: {exc}") from exc
        except RecursionError:
            raise EntryError(f"entry {self.name!r} cannot be stored: {why_too_deep('its definition')}") from None

    @classmethod
    def from_key(cls, key: str, app: Celery | None = None) -> Entry:
        """Return the stored entry of a key.

        Raises:
            UnknownEntryError: there is no such entry; this error is also a KeyError.
            EntryError: the entry cannot be decoded.
        """
        app = app_or_default(app)
        return cls.from_fields(key, *schedule_client(app).hmget(key, *FIELDS), app=app)

    @classmethod
    def from_fields(
        cls,
        key: str,
        definition: str | None,
        meta: str | None,
        policy: str | None,
        since: str | None = None,
        sent: str | None = None,
        *,
        app: Celery,
    ) -> Entry:
        """Return the entry of a key from the fields of its hash.

        Raises:
            UnknownEntryError: there is no definition; this error is also a KeyError.
            EntryError: the entry cannot be decoded.
        """
        if not definition:
            raise UnknownEntryError(f"there is no entry at {key!r}")
        entry = cls.decode(key, definition, app).with_past(Meta.decode(meta, since, sent))
        wishes = EntryPolicy.decode(policy)
        entry.policy = wishes if wishes.timezone else replace(wishes, timezone=entry.policy.timezone)
        entry.version = definition, policy or ""
        return entry

    @staticmethod
    def load_definition(key: str, app: Celery | None = None, definition: str | None = None) -> JsonObject:
        """Return the decoded ``definition`` of a key; KeyError if there is none."""
        definition = definition or schedule_client(app_or_default(app)).hget(key, "definition")
        if not definition:
            raise KeyError(key)
        raw = loads_object(definition, "definition")
        return {**raw, "schedule": decode_schedule(raw.get("schedule"))}

    @staticmethod
    def load_meta(key: str, app: Celery | None = None) -> Any:
        """Return the decoded ``meta`` of a key."""
        return RedBeatSchedulerEntry.decode_meta(schedule_client(app_or_default(app)).hget(key, "meta"))

    @property
    def meta(self) -> Meta:
        """The past of the entry."""
        last = self.last_run_at
        if last is not None:
            last = last.replace(tzinfo=last.tzinfo or UTC).astimezone(UTC)
        return Meta(last, self.total_run_count, self._since, self._ahead, self._sent)

    @property
    def due_at(self) -> datetime | None:
        """The next time when the entry is due, now if it is overdue or has never run, None if there is none."""
        return self.timetable.due_at(self.meta.counts_from, datetime.now(UTC))

    @property
    def score(self) -> float:
        """The entry's place in the schedule: seconds since 1970, or PARKED."""
        due_at = self.due_at
        return PARKED if due_at is None else due_at.timestamp()

    @property
    def rank(self) -> int | None:
        """The number of entries that are due before this one, None if this one is not scheduled."""
        rank: int | None = schedule_client(self.app).zrank(self.app.redbeat_conf.schedule_key, self.key)
        return rank

    def save(self) -> Entry:
        """Store the entry. An existing entry keeps its past, and also its next time if its times are unchanged.

        Raises:
            ConflictError: another program has changed the entry since it was read.
            EntryError: a value cannot be stored.
        """
        client, author = schedule_client(self.app), Author.of(self.app)
        results = save_entries(client, Keys.of(self.app), {self.name: self}, self._now(), author)
        for problem in results.values():
            if problem is not None:
                raise problem
        return self

    def delete(self) -> bool:
        """Remove the entry; return whether it existed. A key that holds something else stays.

        Raises:
            EntryError: its key is a key of the schedule itself, or of another app.
        """
        return self.delete_by(Author.of(self.app))

    def delete_by(self, author: Author, found: tuple[str, str] | None = None) -> bool:
        """Remove the entry, as ``delete`` does.

        Args:
            author: of this change, which is recorded.
            found: its definition and policy as they were read; None: delete it as it is.

        Raises:
            ConflictError: another process has changed it since it was read.
        """
        keys, self.version, client = Keys.of(self.app), None, schedule_client(self.app)
        key = keys.named(self.name)
        touched = [keys.schedule, keys.pending, keys.quarantine, keys.owners, keys.parked(self.name), keys.changes, key]
        call = uuid4().hex
        last = None  #: the id of the call that had stored the entry, as it was read before
        for _ in range(ATTEMPTS):
            # Checked first: the client repeats the deletion if its reply is lost, and then finds nothing.
            fields = read_fields(client, [key], "written")[0]
            is_entry = not isinstance(fields, str) and any(fields[:-1])
            stored = (fields[0] or "", fields[2] or "", fields[-1] or "") if is_entry else ("", "", "")
            if not stored[0]:
                keys.check_other(self.name)
            elif found is not None and found != stored[:2]:
                break
            written = stored[2].split()
            if last is not None and last not in written:  # the client repeats a deletion whose reply is lost
                raise ConflictError(
                    f"entry {self.name!r} is stored anew by another process, perhaps after this deletion: see celery "
                    "singlebeat changes before you repeat it"
                )
            last = written[0] if written else ""
            scores = client.zmscore(keys.schedule, [self.key, keys.bare(self.name)])
            removed = DELETE(client, touched, (self.name, *author, packed(stored), call))
            if removed >= 0:
                return bool(removed) or is_entry or any(score is not None for score in scores)
        raise ConflictError(f"another process has changed the entry {self.name!r}: read it again")

    def reschedule(self, last_run_at: datetime | None = None) -> None:
        """Count the next time of the entry from another moment, by default from now; its number of runs is kept.

        Raises:
            UnknownEntryError: the entry is not stored, or no longer; this error is also a KeyError.
            ConflictError: another process keeps changing the entry.
        """
        past = self._store_moment(last_run_at)
        self.last_run_at, self.total_run_count, self._since = past.last_run_at, past.total_run_count, None

    def _next_instance(self, last_run_at: datetime | None = None, only_update_last_run_at: bool = False) -> Entry:
        return self.with_past(self._store_moment(last_run_at, runs=0 if only_update_last_run_at else 1))

    __next__ = next = _next_instance

    def _store_moment(self, moment: datetime | None, *, runs: int = 0) -> Meta:
        """Let the stored entry count from a moment, and return its past; all else stays as it is stored.

        Args:
            runs: to add to their stored number.
        """
        keys, client, moment = Keys.of(self.app), schedule_client(self.app), moment or self._now()
        key = keys.named(self.name)
        for _ in range(ATTEMPTS):
            fields = read_fields(client, [key])[0]
            if isinstance(fields, str) or not fields[0]:
                keys.check_other(self.name)
                raise UnknownEntryError(f"there is no entry at {key!r}")
            definition, meta, policy, since, _, sent = fields
            entry = self.from_fields(key, definition, meta, policy, since, sent, app=self.app)
            entry.zone = zone_of_beats(client, keys)
            now = self._now()  # not by this host's clock
            entry._ahead = entry.meta.counting_from(None, now).ahead
            entry.last_run_at, entry._since = moment, None
            entry.total_run_count += runs
            due_at = entry.timetable.due_at(entry.meta.counts_from, now)
            place = repr(PARKED if due_at is None else due_at.timestamp())
            past = entry.meta.encode(), entry.meta.encode_since()
            row = (key, fields[:4], (definition, past[0], policy or "", past[1]), place)
            if write_fields(client, keys, [row], Author.of(self.app))[0]:
                return entry.meta
        raise ConflictError(f"entry {self.name!r} cannot be stored: another process keeps changing it; try again")
