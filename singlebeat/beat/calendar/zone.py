"""Converts the time zones that users give into zones that the arithmetic of wall clocks can use."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timezone, tzinfo
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from celery.utils.time import LocalTimezone
from dateutil import tz

from ...errors import ConfigError, EntryError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("app_zone", "given_instant", "in_utc", "known_zone", "named_zone", "zone_of_text")

#: Zones of dateutil that distinguish both passes of a repeated hour (PEP 495), which the arithmetic needs.
FOLDING = (tz.tzfile, tz.tzlocal, tz.tzrange)


def app_zone(app: Celery) -> tzinfo:
    """Return the zone in which an app's schedules are read.

    Raises:
        ConfigError: the setting ``timezone`` gives no usable zone.
    """
    try:
        zone = app.timezone
    except Exception:  # ZoneInfo raises five different errors for a name
        zone = None
    if type(zone) is ZoneInfo:  # the usual case; this function runs for each entry
        return zone
    found = known_zone(zone)
    if found is None:
        raise ConfigError(
            f"timezone is {app.conf.timezone!r}, which is neither a known IANA name, nor a zone with such a "
            "name or a fixed offset: use a name, like Europe/Berlin"
        )
    return found


def known_zone(zone: tzinfo | None) -> tzinfo | None:
    """Return the zone that implements PEP 495 for a given zone, or None if there is none.

    A zone of pytz, set by ``replace(tzinfo=...)``, makes a time wrong by an hour or more. So any zone that has a name
    is replaced by the ``ZoneInfo`` of this name.
    """
    if isinstance(zone, ZoneInfo | timezone):
        return zone
    if isinstance(zone, LocalTimezone):  # Celery's class, which ignores repeated hours
        zone = tz.tzlocal()
    if not isinstance(zone, tzinfo):
        return None
    if (named := _by_name(_name_of(zone))) is not None:
        return named
    try:
        offset = zone.utcoffset(None)
    except Exception:  # a user's own class
        offset = None
    if offset is not None:
        return timezone(offset)
    folding: tzinfo | None = zone if isinstance(zone, FOLDING) else None
    return folding


def named_zone(zone: tzinfo | None) -> ZoneInfo | None:
    """Return the ``ZoneInfo`` of a zone, None if the zone has no IANA name."""
    if zone is UTC:
        return ZoneInfo("UTC")
    found = known_zone(zone)
    return _by_name(found.key) if isinstance(found, ZoneInfo) else None


def in_utc(moment: datetime) -> datetime:
    """Return an instant in UTC.

    Raises:
        ValueError: ``moment`` has no time zone.
        OverflowError: ``moment`` lies outside of the years 1 to 9999.
    """
    if moment.tzinfo is UTC:
        return moment
    if moment.utcoffset() is None:
        msg = f"a time needs a time zone here, {moment!r} has none"
        raise ValueError(msg)
    return moment.astimezone(UTC)


def given_instant(name: str, moment: datetime) -> datetime:
    """Return an instant in UTC that a caller has given.

    Args:
        name: name of the argument, for the error message.

    Raises:
        EntryError: ``moment`` has no time zone, or lies outside of the years 1 to 9999.
    """
    try:
        return in_utc(moment)
    except ValueError:
        raise EntryError(f"{name} needs a time zone, {moment!r} has none") from None
    except OverflowError:
        raise EntryError(f"{name} lies outside of the years 1 to 9999 in UTC: {moment}") from None


def _name_of(zone: tzinfo) -> str:
    """Return the name of another library's zone: pytz has ``zone``, dateutil has the path of a file."""
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    return name or str(getattr(zone, "_filename", "")).rpartition("zoneinfo/")[2]


def zone_of_text(text: str) -> tzinfo | None:
    """Return the zone that ``str`` shows so: a name, an offset, or the zone of this host; None if it is not known."""
    if text == str(local := tz.tzlocal()):
        zone: tzinfo = local
        return zone
    with suppress(ValueError):
        return datetime.strptime(text, "UTC%z").tzinfo
    return _by_name(text)


def _by_name(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if name else None
    except Exception:  # ZoneInfo raises five different errors for a wrong name
        return None
