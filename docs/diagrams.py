"""The pictures of these pages, drawn from their text: ``timeline``, ``states`` and ``plot``.

All write SVG into the page itself, where it has the colours of the reader's theme, light or dark: it names
``currentColor`` and furo's variables, and no colour of its own.

A timeline has a line for each row, and each row has bars, from one time to another, and marks, at one time::

    .. timeline:: What the picture shows, for readers who cannot see it
       :ticks: 0 = 09:00, 5 = 10:00

       call 1 = queued 0-1, running 1-6
       call 2 = refused 3 "its result is that of call 1"

A picture of states has a line for each state, with its column and row, and for each transition. A state after which
nothing comes is ``last``::

    .. states:: What the picture shows

       due = 0, 0
       pending = 1, 0 last
       due -> pending "claim"

A plot has a curve for each line, with its name and its points; both axes are logarithmic::

    .. plot:: What the picture shows
       :x: entries
       :y: seconds

       singlebeat = 100 0.1, 1000 1.2
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives

#: Bars: how each kind of time looks.
BARS = ("queued", "running", "held", "leads", "stands-by", "clock")
#: Marks: what happens at a moment.
MARKS = ("sent", "refused", "ends", "due")

WIDTH, ROW, BAR = 640, 32, 20
ACROSS, DOWN, BOX = 176, 92, 34
#: Average width of a character of a label.
CHARACTER = 6.4


@dataclass(frozen=True)
class Item:
    """A bar of a row, or a mark where it has no end."""

    kind: str
    start: float
    end: float | None
    text: str

    PATTERN: ClassVar = re.compile(r'([\w-]+) (\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?(?: "([^"]*)")?(?:, |$)')

    @classmethod
    def of(cls, match: re.Match[str]) -> Item:
        """Return the item that the text of a picture names."""
        kind, start, end, text = match.groups()
        if kind not in (MARKS if end is None else BARS):
            raise ValueError(f"{match[0]}: bars are {', '.join(BARS)}, marks are {', '.join(MARKS)}")
        return cls(kind, float(start), end and float(end), text if text is not None else "" if end is None else kind)


def rows(lines: list[str]) -> list[tuple[str, list[Item]]]:
    """Return the name and the items of each row of a timeline."""
    found = []
    for line in filter(None, map(str.strip, lines)):
        name, _, text = line.partition(" = ")
        if Item.PATTERN.sub("", text):
            raise ValueError(f"cannot be read: {Item.PATTERN.sub('', text)}")
        found.append((name, [Item.of(match) for match in Item.PATTERN.finditer(text)]))
    return found


def ticks_of(text: str) -> dict[float, str]:
    """Return the labels of the time axis: ``0 = 09:00, 5 = 10:00``."""
    pairs = (part.split(" = ") for part in text.split(", ")) if text else ()
    return {float(at): label for at, label in pairs}


def timeline(lines: list[str], title: str, ticks: str = "") -> str:
    """Return the SVG of a timeline."""
    found, labels = rows(lines), ticks_of(ticks)
    last = max([item.end or item.start for _, items in found for item in items] + list(labels))
    left = max(len(name) for name, _ in found) * CHARACTER + 14
    scale = (WIDTH - left - (40 if labels else 20)) / last

    def x(at: float) -> float:
        return round(left + at * scale, 1)

    bottom = len(found) * ROW + 8
    parts = []
    for number, (name, items) in enumerate(found):
        top = number * ROW + 8
        parts.append(f'<text x="0" y="{top + 14}">{escape(name)}</text>')
        parts += [_drawn(item, x, top) for item in items]
    guides = "".join(f'<path class="guide" d="M{x(at)} 2V{bottom}"/>' for at in labels)
    axis = f'<path class="line" d="M{left:.1f} {bottom}H{WIDTH - 6}"/>'
    axis += f'<path class="arrow" d="M{WIDTH} {bottom}l-8 -4v8z"/>'
    for at, label in labels.items():
        axis += f'<text class="quiet" x="{x(at)}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>'
    if not labels:
        axis += f'<text class="quiet" x="{WIDTH}" y="{bottom + 16}" text-anchor="end">time</text>'
    return _svg(WIDTH, bottom + 22, title, guides + "".join(parts) + axis)


def _drawn(item: Item, x: Any, top: int) -> str:
    left, middle = x(item.start), top + BAR / 2
    if item.end is not None:
        width = round(x(item.end) - left, 1)
        text = item.text if len(item.text) * CHARACTER + 6 < width else ""
        box = f'x="{left}" y="{top}" width="{width}" height="{BAR}" rx="3"'
        return (
            f'<rect class="ground" {box}/><rect class="{item.kind}" {box}/>'
            f'<text x="{left + width / 2}" y="{top + 14}" text-anchor="middle">{escape(text)}</text>'
        )
    shapes = {
        "sent": f'<circle class="mark sent" cx="{left}" cy="{middle}" r="5"/>',
        "due": f'<circle class="mark due" cx="{left}" cy="{middle}" r="5"/>',
        "refused": f'<path class="mark refused" d="M{left - 5} {middle - 5}l10 10m0 -10l-10 10"/>',
        "ends": f'<path class="mark ends" d="M{left} {top - 3}v{BAR + 6}"/>',
    }
    return f'{shapes[item.kind]}<text class="quiet" x="{left + 10}" y="{top + 14}">{escape(item.text)}</text>'


STATE = re.compile(r"(.+?) = ([\d.]+), ([\d.]+)( last)?$")
TRANSITION = re.compile(r'(.+?) -> (.+?)(?: "([^"]*)")?$')


def states(lines: list[str], title: str) -> str:
    """Return the SVG of states and transitions."""
    text = list(filter(None, map(str.strip, lines)))
    boxes = {m[1]: (float(m[2]), float(m[3]), bool(m[4])) for line in text if (m := STATE.match(line))}
    arrows = [(m[1], m[2], m[3] or "") for line in text if (m := TRANSITION.match(line))]
    if len(boxes) + len(arrows) != len(text):
        raise ValueError("each line is: name = column, row; or: name -> name")
    widths = {name: len(name) * CHARACTER + 26 for name in boxes}
    top = 28 if all(source != target for source, target, _ in arrows) else 52
    centres = {name: (70 + column * ACROSS, top + row * DOWN) for name, (column, row, _) in boxes.items()}
    pairs = {(source, target) for source, target, _ in arrows}
    parts = [
        _arrow(centres, widths, source, target, label, bent=(target, source) in pairs)
        for source, target, label in arrows
    ]
    for name, (cx, cy) in centres.items():
        css = "state last" if boxes[name][2] else "state"
        left, top = round(cx - widths[name] / 2, 1), cy - BOX / 2
        parts.append(f'<rect class="{css}" x="{left}" y="{top}" width="{widths[name]:.1f}" height="{BOX}" rx="6"/>')
        parts.append(f'<text x="{cx}" y="{cy + 4}" text-anchor="middle">{escape(name)}</text>')
    width = max(cx + widths[name] / 2 for name, (cx, _) in centres.items()) + 10
    height = max(cy for _, cy in centres.values()) + BOX / 2 + 10
    return _svg(max(round(width), WIDTH), round(height), title, "".join(parts))


def _arrow(centres: Any, widths: Any, source: str, target: str, label: str, *, bent: bool) -> str:
    (x1, y1), (x2, y2) = centres[source], centres[target]
    if source == target:  # a loop above the box
        top = y1 - BOX / 2
        return (
            f'<path class="line" d="M{x1 - 16} {top}c-14 -24 46 -24 34 -4"/>'
            f'<path class="arrow" d="M{x1 + 16} {top}l-1 -9l8 4z"/>'
            f'<text class="quiet" x="{x1}" y="{top - 22}" text-anchor="middle">{escape(label)}</text>'
        )
    dx, dy = x2 - x1, y2 - y1
    length = (dx * dx + dy * dy) ** 0.5
    ux, uy = dx / length, dy / length
    shift = 8 if bent else 0
    x1, y1, x2, y2 = x1 - uy * shift, y1 + ux * shift, x2 - uy * shift, y2 + ux * shift

    def edge(name: str) -> float:
        """Return how far the edge of a box is from its centre, on this line."""
        by_width = widths[name] / 2 / abs(ux) if abs(ux) > 1e-6 else 1e9
        by_height = BOX / 2 / abs(uy) if abs(uy) > 1e-6 else 1e9
        return min(by_width, by_height)

    sx, sy = x1 + ux * edge(source), y1 + uy * edge(source)
    tx, ty = x2 - ux * (edge(target) + 2), y2 - uy * (edge(target) + 2)
    bx, by = tx - ux * 8, ty - uy * 8
    head = f"M{tx:.1f} {ty:.1f}L{bx - uy * 4:.1f} {by + ux * 4:.1f}L{bx + uy * 4:.1f} {by - ux * 4:.1f}z"
    mx, my = (sx + tx) / 2, (sy + ty) / 2
    if abs(uy) < 0.3:  # beside a level arrow: on the side to which it is shifted
        place = f'x="{mx:.1f}" y="{my + (16 if bent and dx > 0 else -7):.1f}" text-anchor="middle"'
    else:
        side, anchor = (-16, "end") if dx < -1 else (8, "start")
        place = f'x="{mx + side:.1f}" y="{my + 2:.1f}" text-anchor="{anchor}"'
    return (
        f'<path class="line" d="M{sx:.1f} {sy:.1f}L{bx:.1f} {by:.1f}"/><path class="arrow" d="{head}"/>'
        f'<text class="quiet" {place}>{escape(label)}</text>'
    )


CURVE = re.compile(r"(.+?) = (\d[\d.]* \d[\d.]*(?:, \d[\d.]* \d[\d.]*)*)$")


def plot(lines: list[str], title: str, x_label: str = "", y_label: str = "") -> str:
    """Return the SVG of curves on logarithmic axes."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in filter(None, map(str.strip, lines)):
        if not (match := CURVE.match(line)):
            raise ValueError(f"cannot be read: {line}; each line is: name = x y, x y")
        pairs = (part.split() for part in match[2].split(", "))
        curves[match[1]] = [(math.log10(float(x)), math.log10(float(y))) for x, y in pairs]
    across, up = zip(*(point for points in curves.values() for point in points), strict=True)
    powers = [range(math.floor(min(values)), math.ceil(max(values)) + 1) for values in (across, up)]
    left, top, width, height = 56.0, 24.0, WIDTH - 56.0 - 120.0, 220.0

    def at(point: tuple[float, float]) -> tuple[float, float]:
        shares = [(value - its[0]) / max(len(its) - 1, 1) for value, its in zip(point, powers, strict=True)]
        return round(left + shares[0] * width, 1), round(top + (1 - shares[1]) * height, 1)

    bottom, right = top + height, left + width
    parts = []
    for power in powers[0]:
        x, _ = at((power, powers[1][0]))
        parts.append(f'<path class="guide" d="M{x} {top}V{bottom}"/>')
        parts.append(f'<text class="quiet" x="{x}" y="{bottom + 16}" text-anchor="middle">{10.0**power:,g}</text>')
    for power in powers[1]:
        _, y = at((powers[0][0], power))
        parts.append(f'<path class="guide" d="M{left} {y}H{right}"/>')
        parts.append(f'<text class="quiet" x="{left - 6}" y="{y + 4}" text-anchor="end">{10.0**power:,g}</text>')
    free = 0.0  #: below the last name
    for name, points in sorted(curves.items(), key=lambda curve: at(curve[1][-1])[1]):
        places = [at(point) for point in points]
        parts.append(f'<path class="curve" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>')
        parts += [f'<circle class="mark sent" cx="{x}" cy="{y}" r="3"/>' for x, y in places]
        free = max(places[-1][1] + 4, free)
        parts.append(f'<text x="{places[-1][0] + 8}" y="{free:.1f}">{escape(name)}</text>')
        free += 14
    parts.append(f'<text class="quiet" x="{right}" y="{bottom + 32}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text class="quiet" x="0" y="{top - 10}">{escape(y_label)}</text>')
    return _svg(WIDTH, bottom + 40, title, "".join(parts))


def _svg(width: float, height: float, title: str, body: str) -> str:
    return (
        f'<div class="diagram"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg></div>'
    )


class _Picture(Directive):
    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        title = " ".join(self.arguments[0].split())
        try:
            self.state.document.settings.record_dependencies.add(__file__)
            html = self.draw(list(self.content), title)
        except ValueError as exc:
            raise self.error(f"{self.name}: {exc}") from exc
        return [nodes.raw("", html, format="html")]

    def draw(self, lines: list[str], title: str) -> str:
        raise NotImplementedError


class Timeline(_Picture):
    """The directive ``timeline``."""

    option_spec: ClassVar = {"ticks": directives.unchanged}

    def draw(self, lines: list[str], title: str) -> str:
        """Draw the lines, with the labels of the time axis."""
        return timeline(lines, title, self.options.get("ticks", ""))


class States(_Picture):
    """The directive ``states``."""

    def draw(self, lines: list[str], title: str) -> str:
        """Draw the lines."""
        return states(lines, title)


class Plot(_Picture):
    """The directive ``plot``."""

    option_spec: ClassVar = {"x": directives.unchanged, "y": directives.unchanged}

    def draw(self, lines: list[str], title: str) -> str:
        """Draw the curves, with the labels of the axes."""
        return plot(lines, title, self.options.get("x", ""), self.options.get("y", ""))


def setup(app: Any) -> dict[str, bool]:
    """Tell Sphinx of the directives and of their style."""
    app.add_directive("timeline", Timeline)
    app.add_directive("states", States)
    app.add_directive("plot", Plot)
    app.add_css_file("style.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
