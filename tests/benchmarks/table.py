"""What was measured, as a table in reStructuredText."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tests.benchmarks.case import Case, Line

HEADER = ("Measured", "Side", "Median", "Ratio", "Quartiles", "Of best", "Target")

#: Characters of the first column.
WIDTH = 34


def render(measured: Sequence[tuple[Case, Sequence[Line]]]) -> str:
    """Return a grid table: a case spans the rows of its sides, and their ratios are to the first of them."""
    blocks = [(textwrap.wrap(case.what, WIDTH), _cells(case, lines), case.target) for case, lines in measured]
    cells = [cells for _, block, _ in blocks for cells in block]
    widths = [
        WIDTH,
        *(max(len(row[at]) for row in [HEADER[1:-1], *cells]) for at in range(len(HEADER) - 2)),
        max(len(target) for target in [HEADER[-1], *(target for *_, target in blocks)]),
    ]
    lines = [_rule(widths), _row(HEADER, widths), _rule(widths, "=")]
    for titles, block, target in blocks:
        # Between two sides runs a rule that the first and the last column leave out.
        height = max(2 * len(block) - 1, len(titles))
        for at in range(height):
            title, goal = titles[at] if at < len(titles) else "", target if at == 0 else ""
            if at % 2 == 1 and at < 2 * len(block) - 1:
                lines.append(_inner_rule(title, goal, widths))
            else:
                values = block[at // 2] if at % 2 == 0 and at // 2 < len(block) else [""] * (len(HEADER) - 2)
                lines.append(_row([title, *values, goal], widths))
        lines.append(_rule(widths))
    return "\n".join(lines)


def _cells(case: Case, lines: Sequence[Line]) -> list[list[str]]:
    rows = []
    for at, line in enumerate(lines):
        low, high = line.quartiles
        if not case.compare:
            comparison = ["", "", ""]
        elif at == 0:
            comparison = ["1", "", "1"]
        else:
            comparison = [f"{line.ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{line.best:.2f}"]
        rows.append([line.label, case.show(line.median), *comparison])
    return rows


def _rule(widths: Sequence[int], dash: str = "-") -> str:
    return "+" + "+".join(dash * (width + 2) for width in widths) + "+"


def _inner_rule(title: str, goal: str, widths: Sequence[int]) -> str:
    middle = "+".join("-" * (width + 2) for width in widths[1:-1])
    return f"| {title:<{widths[0]}} +{middle}+ {goal:<{widths[-1]}} |"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)) + " |"
