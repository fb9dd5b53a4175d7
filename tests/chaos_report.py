"""Shows what the chaos tests counted, as one table at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PROPERTY = "chaos"
COLUMNS = {
    "scenario": "scenario",
    "occurrences": "occurrences",
    "decided": "decided",
    "published": "published",
    "started": "started",
    "lost": "lost",
    "twice": "started twice",
    "remarks": "remarks",
}


@pytest.fixture
def chaos_report(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Takes one row of the table; it travels with the test's report, also from another process."""
    return lambda row: request.node.user_properties.append((PROPERTY, row))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table, as reStructuredText."""
    rows = [
        row
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if getattr(report, "when", "") == "call"
        for name, row in report.user_properties
        if name == PROPERTY
    ]
    if rows:
        terminalreporter.section("chaos")
        for line in table(sorted(rows, key=lambda row: row["scenario"])):
            terminalreporter.write_line(line)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as a simple table of reStructuredText."""
    cells = [list(COLUMNS.values()), *([str(row[name]) or "–" for name in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [rule, lines[0], rule, *lines[1:], rule]
