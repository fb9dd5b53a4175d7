"""The times of solar events, such as sunrise and sunset: computed by ephem, returned as nominal times."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery.schedules import BaseSchedule

__all__ = ("next_event",)

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)


def next_event(schedule: BaseSchedule, after: datetime) -> datetime | None:
    """
    Return the first event of a `celery.schedules.solar` after a moment, exact to a second. None if 400 days have none.

    Each day (UTC) is searched from its beginning, because the results of ephem differ by fractions of a second with
    the moment at which the search starts.
    """
    midnight = after.replace(hour=0, minute=0, second=0, microsecond=0) - SECOND
    for day in (midnight + count * DAY for count in range(400)):
        for event in _events(schedule, day, day + DAY):
            if event > after:
                return event
    return None


def _events(schedule: BaseSchedule, start: datetime, end: datetime) -> Iterator[datetime]:
    sun, how = schedule.ephem.Sun(), {"use_center": True} if schedule.use_center else {}
    search = getattr(schedule.cal, schedule.method)
    moment = schedule.ephem.Date(start)
    limit = schedule.ephem.Date(end)
    while moment < limit:
        try:
            moment = search(sun, start=moment, **how)
        except schedule.ephem.CircumpolarError:  # no such event on this day: it ends at solar midnight
            moment = schedule.cal.next_antitransit(sun, start=moment)
            continue
        if moment < limit:
            found = moment.datetime().replace(tzinfo=UTC)
            yield (found + SECOND / 2).replace(microsecond=0)
        moment = schedule.ephem.Date(moment + schedule.ephem.hour)
