"""Makes HTML of templates: everything is escaped, and a template that names what is not there fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from functools import cache
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..beat.calendar.words import span
from . import squares
from .exchange import field_of_form

if TYPE_CHECKING:
    from ..beat.store.history import Record

__all__ = ("instant", "render", "zone_name", "zone_of")

#: Width of a square with its gap, in the units of the drawing.
STEP = 9

#: The shape of each square, besides its colour: no colour is without a sign.
SHAPES = {
    "ok": "M0 2h7v10H0z",
    "late": "M0 2h7v10H0zM2 0h3v1H2z",
    "failed": "M0 2h7v10H0zM1.2 4l4.6 6m0-6l-4.6 6",
    "open": "M.7 2.7h5.6v8.6H.7z",
    "skipped": "M0 8h7v4H0z",
    "missed": "M3 2h1v10H3z",
    "paused": "M1 4h1.6v6H1zM4.4 4H6v6H4.4z",
    "refused": "M.7 2.7h5.6v8.6H.7zM.7 11.3l5.6-8.6",
}


def instant(when: datetime | None, zone: tzinfo = UTC, now: datetime | None = None) -> Markup:
    """Return a moment as an element that a script of the page may show in another zone, and keep relative.

    Args:
        zone: in which it is written.
        now: write how far it is from this moment, and the moment itself in the tooltip.
    """
    if when is None:
        return Markup('<span class="none">–</span>')
    local = when.astimezone(zone)
    name = "Z" if zone is UTC or getattr(zone, "key", "") == "UTC" else f" {local.tzname()}"
    text = f"{local:%Y-%m-%d %H:%M:%S}{name}"
    if now is None:
        return Markup('<time datetime="{}">{}</time>').format(when.astimezone(UTC).isoformat(timespec="seconds"), text)
    ahead = (when - now).total_seconds()
    relative = "now" if abs(ahead) < 1 else f"in {span(round(ahead))}" if ahead > 0 else f"{span(round(ahead))} ago"
    return Markup('<time datetime="{}" title="{}" data-relative>{}</time>').format(
        when.astimezone(UTC).isoformat(timespec="seconds"), text, relative
    )


def strip(records: Sequence[Record], count: int) -> Markup:
    """Return the last decisions of an entry as a drawing, the latest one at its right end."""
    drawn, shown = [], [squares.square(record) for record in reversed(records[:count])]
    for at, each in enumerate(shown):
        x = (count - len(shown) + at) * STEP
        drawn.append(
            Markup('<g class="{}" transform="translate({} 0)"><title>{}</title><path d="{}"/></g>').format(
                each.word, x, each.title, SHAPES[each.word]
            )
        )
    counts = Counter(each.word for each in shown)
    label = ", ".join(f"{number} {word}" for word, number in counts.most_common()) or "none yet"
    return Markup('<svg class="strip" viewBox="0 0 {} 12" role="img" aria-label="Last decisions: {}">{}</svg>').format(
        count * STEP, label, Markup("").join(drawn)
    )


def iso(text: str | None) -> Markup:
    """Return a moment that a beat has written in ISO 8601; as it is if it is none."""
    try:
        return instant(datetime.fromisoformat(text or ""))
    except ValueError:
        return escape(text or "?")


def mark(record: Record) -> Markup:
    """Return the square of a decision, beside its word."""
    each = squares.square(record)
    return Markup(
        '<svg class="mark" viewBox="0 0 8 12" aria-hidden="true"><g class="{}"><path d="{}"/></g></svg>'
    ).format(each.word, SHAPES[each.word])


def shorten(text: object, most: int = 80) -> str:
    """Return a string that is cut after so many characters; names in Redis may be as long as it pleases a writer."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most - 1]}…"


def as_json(value: object) -> str:
    """Return a value as JSON for people."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def field(name: str, value: object) -> Markup:
    """Return the attributes of a field of a form that a user does not change."""
    return Markup('name="{}" value="{}"').format(*field_of_form(name, value))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("singlebeat.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        field=field, instant=instant, iso=iso, mark=mark, span=span, strip=strip, words=squares.WORDS, shapes=SHAPES
    )
    environment.globals.update(outcome=squares.outcome, outcome_of_end=squares.outcome_of_end)
    environment.filters.update(json=as_json, shorten=shorten)
    return environment


def render(template: str, context: Mapping[str, Any]) -> str:
    """Return a page as HTML; what cannot be encoded, as half a character of any writer to Redis, becomes a ``?``."""
    return _environment().get_template(template).render(context).encode(errors="replace").decode()


def zone_of(choice: str, own: tzinfo) -> tzinfo:
    """Return the zone in which times are written: that of the entry, or UTC; a script shows those of the reader."""
    return own if choice == "entry" else UTC


def zone_name(zone: tzinfo) -> str:
    """Return the name of a zone for people."""
    return zone.key if isinstance(zone, ZoneInfo) else "UTC" if zone is UTC else str(zone)
