"""A schedule with a single due time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from celery.schedules import BaseSchedule, schedstate
from redbeat.schedules import rrule

from .zone import in_utc

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("clocked", "comes_once")


class clocked(BaseSchedule):  # type: ignore[misc]  # noqa: N801 - beside Celery's crontab and solar
    """A schedule that is due once, at an instant.

    >>> clocked("2026-12-01T09:00:00+01:00")
    <clocked: 2026-12-01T08:00:00Z>

    Args:
        instant: an aware datetime, or a string in ISO 8601 with an offset.

    Raises:
        ValueError: ``instant`` is neither.
    """

    def __init__(
        self, instant: datetime | str, *, nowfun: Callable[[], datetime] | None = None, app: Celery | None = None
    ) -> None:
        super().__init__(nowfun=nowfun, app=app)
        try:
            moment = datetime.fromisoformat(instant) if isinstance(instant, str) else instant
            self.instant = in_utc(moment)
        except (ValueError, AttributeError, OverflowError):
            raise ValueError(
                f"clocked needs a date and time with offset, like 2026-12-01T09:00:00+01:00, not {instant!r}"
            ) from None

    def remaining_estimate(self, last_run_at: datetime) -> timedelta | None:
        """Return the time that is left until the instant, None if the instant is not after the last run."""
        if self.maybe_make_aware(last_run_at) >= self.instant:
            return None
        left: timedelta = self.instant - self.maybe_make_aware(self.now())
        return left

    def is_due(self, last_run_at: datetime) -> tuple[bool, float | None]:
        """Return whether the instant has come since the last run, and the seconds until the next check, if any."""
        left = self.remaining_estimate(last_run_at)
        if left is None:
            return schedstate(is_due=False, next=None)  # type: ignore[no-any-return]
        is_due = left <= timedelta()
        return schedstate(is_due=is_due, next=None if is_due else left.total_seconds())  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<clocked: {self.isoformat()}>"

    def isoformat(self) -> str:
        """Return the instant in ISO 8601, in UTC."""
        return self.instant.isoformat().replace("+00:00", "Z")

    def __eq__(self, other: object) -> bool:
        return self.instant == other.instant if isinstance(other, clocked) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[datetime]]:
        return type(self), (self.instant,)


def comes_once(schedule: BaseSchedule) -> bool:
    """Return whether a schedule is known to have a single time: then no later run makes up for a lost run."""
    return isinstance(schedule, clocked) or (isinstance(schedule, rrule) and schedule.count == 1)
