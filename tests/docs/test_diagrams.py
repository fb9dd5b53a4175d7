"""The pictures of the docs: they can be drawn, have the colours of the theme, and show what the code does."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from xml.etree import ElementTree
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab

from singlebeat.beat.calendar.recurrence import next_occurrence
from singlebeat.beat.entries.occurrence import DecisionType
from singlebeat.locks.modes import LockMode
from singlebeat.overlap import Overlap
from tests.support import DOCUMENTS, ROOT, page

_spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs/diagrams.py")
diagrams = sys.modules["diagrams"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(diagrams)

#: A colour that does not follow the theme.
COLOUR = re.compile(r"#[0-9a-f]{3,8}\b|\b(rgb|hsl)a?\(|\b(black|white|gray|grey|red|green|blue)\b(?!-)", re.IGNORECASE)
HOUR, BERLIN = timedelta(hours=1), ZoneInfo("Europe/Berlin")


@dataclass(frozen=True)
class Picture:
    kind: str
    title: str
    ticks: str
    lines: list[str]

    def draw(self) -> str:
        draw = {"states": diagrams.states, "plot": diagrams.plot}.get(self.kind)
        return draw(self.lines, self.title) if draw else self._timeline()

    def _timeline(self) -> str:
        return diagrams.timeline(self.lines, self.title, self.ticks)


def pictures(text: str) -> list[Picture]:
    """Return the pictures of a page."""
    found = re.findall(r"^\.\. (timeline|states|plot):: (.+)\n(?:   :\w+: (.+)\n)*\n((?:   .+\n)+)", text, re.MULTILINE)
    return [Picture(kind, title, ticks, lines.splitlines()) for kind, title, ticks, lines in found]


ALL = [picture for path in DOCUMENTS for picture in pictures(path.read_text("utf-8"))]


@pytest.mark.parametrize("picture", ALL, ids=lambda picture: picture.title[:40])
def test_a_picture_can_be_drawn_in_the_colours_of_the_theme(picture):
    svg = picture.draw()

    (image,) = ElementTree.fromstring(svg)
    assert image.get("role") == "img"
    assert image.get("aria-label") == picture.title
    assert not COLOUR.search(re.sub(r">[^<]+<|aria-label=\"[^\"]*\"", "><", svg))
    _, _, width, height = map(float, image.get("viewBox").split())
    for shape in image.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(shape.get("x")) >= 0
        assert float(shape.get("x")) + float(shape.get("width")) <= width
        assert 0 <= float(shape.get("y")) < height


def test_the_style_names_no_colour_of_its_own():
    assert not COLOUR.search((ROOT / "docs/style.css").read_text("utf-8"))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("timeline", ["a = waits 0-1"]),
        ("timeline", ["a = sent 1 and more"]),
        ("states", ["a -> "]),
        ("plot", ["a = 1 2, 3"]),
    ],
)
def test_a_picture_that_cannot_be_read_is_an_error(kind, lines):
    with pytest.raises(ValueError, match=r"bars are|cannot be read|each line is"):
        Picture(kind, "a", "", lines).draw()


def test_a_plot_places_its_points_by_their_logarithms():
    svg = diagrams.plot(["few = 10 1, 100 10, 1000 100", "many = 10 10, 1000 10"], "a", "entries", "seconds")

    few, many = (re.findall(r"[ML]([\d.]+) ([\d.]+)", path) for path in re.findall(r'class="curve" d="([^"]+)"', svg))
    steps = [round(float(b) - float(a), 1) for (a, _), (b, _) in pairwise(few)]
    assert steps[0] == steps[1] > 0
    assert float(few[0][1]) > float(few[1][1]) > float(few[2][1])
    assert many[0][1] == many[1][1] == few[1][1]


def test_each_word_of_overlap_and_lock_has_its_picture():
    drawn = re.findall(r"^\*\*(\w+)\*\*\n\n\.\. timeline::", page("how-to/overlap"), re.MULTILINE)

    assert drawn == [word for words in (Overlap, LockMode) for word in drawn if word in set(words)]
    assert set(drawn) == {*Overlap, *LockMode}


def test_the_life_of_an_occurrence_ends_with_every_decision():
    (life, _) = (picture for picture in pictures(page("explanation/guarantees")) if picture.kind == "states")

    ends = [line.split(" = ")[0].strip() for line in life.lines if line.endswith(" last")]
    assert sorted(word for end in ends for word in end.split(", ")) == sorted(DecisionType)


def calendars() -> Iterator[tuple[str, datetime, list[float], float]]:
    """Yield each crontab that the docs draw: its fields, the beginning, and the half hours at which it is sent."""
    for picture in pictures(page("explanation/calendars")):
        (title, clocks), *entries = diagrams.rows(picture.lines)
        day = datetime.strptime(title, "Berlin, %d %B %Y").replace(tzinfo=UTC)
        for cron, marks in entries:
            yield cron, day, [mark.start for mark in marks], clocks[-1].end


@pytest.mark.parametrize(("cron", "begin", "sent", "last"), [*calendars()])
def test_the_drawn_runs_are_those_of_the_calendar(cron, begin, sent, last):
    half_hours, now = [], begin - timedelta(seconds=1)
    while (now := next_occurrence(crontab.from_string(cron), now, zone=BERLIN)) <= begin + last * HOUR / 2:
        half_hours.append((now - begin) / (HOUR / 2))

    assert half_hours == sent
