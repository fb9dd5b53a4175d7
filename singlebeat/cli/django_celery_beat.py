"""Converts the output of ``manage.py dumpdata django_celery_beat`` to the rows of ``export``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from ..errors import EntryError

__all__ = ("UNKNOWN_THERE", "is_dump", "rows_of")

MODEL = "django_celery_beat."

#: Seconds of each period of an interval.
PERIODS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1, "microseconds": 1e-6}

CRONTAB = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")

#: Fields that are options of ``apply_async``; an empty string means no option.
OPTIONS = ("queue", "exchange", "routing_key", "priority")

#: Fields of a policy for which django-celery-beat has none.
UNKNOWN_THERE = ("overlap", "misfire_grace_time", "jitter", "run_on_start", "tags")

_Row = Mapping[str, Any]


def is_dump(rows: Sequence[_Row]) -> bool:
    """Return whether rows are of a dump of Django, and not of ``export``."""
    return any("model" in row for row in rows)


def rows_of(dump: Sequence[_Row], now: datetime) -> Iterator[tuple[str, Callable[[], _Row]]]:
    """Yield the name of each periodic task, and a function that returns its row as ``export`` would print it.

    The function raises EntryError, KeyError, TypeError or ValueError if the task is invalid.
    """
    schedules = {(str(row.get("model")), str(row.get("pk"))): _fields(row) for row in dump}
    for row in dump:
        if row.get("model") == f"{MODEL}periodictask":
            fields = _fields(row)
            name = str(fields.get("name") or f"pk {row.get('pk')}")
            yield name, partial(_row, name, fields, schedules, now)


def _fields(row: _Row) -> _Row:
    fields = row.get("fields")
    return fields if isinstance(fields, Mapping) else {}


def _row(name: str, fields: _Row, schedules: Mapping[tuple[str, str], _Row], now: datetime) -> _Row:
    when, clock = _schedule(fields, schedules)
    options = {option: fields[option] for option in OPTIONS if fields.get(option) not in (None, "")}
    if headers := json.loads(fields.get("headers") or "{}"):
        options["headers"] = headers
    expires, start = _moment(fields.get("expires")), _moment(fields.get("start_time"))
    if expires:
        options["expires"] = expires
    is_clocked = when["__type__"] == "clocked"
    if is_clocked and start:  # django-celery-beat sends it at the later one of both
        when, start = {**when, "instant": max(when["instant"], start, key=datetime.fromisoformat)}, None
    last, count = _moment(fields.get("last_run_at")), fields.get("total_run_count") or 0
    if last and start and datetime.fromisoformat(start) <= now:
        start = None  # it has passed: django-celery-beat goes on from the last run
    elif last and start and when["__type__"] == "interval":  # it sends it once both have passed
        again = datetime.fromisoformat(last) + timedelta(seconds=when["every"])
        start = max(datetime.fromisoformat(start), again).isoformat()
    definition = {
        "task": fields["task"],
        "schedule": when,
        "args": json.loads(fields.get("args") or "[]"),
        "kwargs": json.loads(fields.get("kwargs") or "{}"),
        "options": options,
        "enabled": bool(fields.get("enabled", True)),
    }
    policy = {
        "timezone": clock,
        "start_time": start,
        "end_time": expires,
        "expires": None if expires else fields.get("expire_seconds") or None,
        "max_runs": 1 if fields.get("one_off") and not is_clocked else None,
        "note": fields.get("description") or "",
    }
    past, changed = {"last_run_at": last, "total_run_count": count}, _moment(fields.get("date_changed"))
    if last is None and is_clocked and changed is None:
        past = {}  # as for an entry that the import creates
    elif last is None and start is None:
        # django-celery-beat lets a task that has never run count from its last change. It changes a task of one time
        # once more when it has run it, and forgets that run: one that is enabled has not run.
        past["since"] = changed
        if is_clocked and changed and definition["enabled"]:
            before = datetime.fromisoformat(when["instant"]) - timedelta(seconds=1)
            past["since"] = min(datetime.fromisoformat(changed), before).isoformat()
    return {"name": name, "definition": definition, "policy": policy, "meta": past}


def _schedule(fields: _Row, schedules: Mapping[tuple[str, str], _Row]) -> tuple[_Row, str | None]:
    """Return the schedule of a task, and the name of its time zone or None."""
    for kind in ("interval", "crontab", "solar", "clocked"):
        if fields.get(kind) is None:
            continue
        found = schedules.get((f"{MODEL}{kind}schedule", str(fields[kind])))
        if found is None:
            raise EntryError(f"its {kind} schedule, number {fields[kind]}, is not in the dump: dump the whole app")
        if kind == "interval":
            period = found["period"]
            if period not in PERIODS:
                raise EntryError(f"its period is none of {', '.join(PERIODS)}: {period!r}")
            return {"__type__": kind, "every": found["every"] * PERIODS[period]}, None
        if kind == "crontab":
            return {"__type__": kind, **{name: found[name] for name in CRONTAB}}, found.get("timezone") or None
        if kind == "solar":
            event, place = found["event"], {"lat": float(found["latitude"]), "lon": float(found["longitude"])}
            return {"__type__": kind, "event": event, **place}, None
        return {"__type__": kind, "instant": _moment(found["clocked_time"])}, None
    raise EntryError("it has no schedule")


def _moment(text: str | None) -> str | None:
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    # With USE_TZ = False, django-celery-beat writes and reads its dates in UTC, not in the zone of Django.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
