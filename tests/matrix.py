"""What tests have measured, as a table: rows and columns gathered from their reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: The name of the property of a test that is a cell of the table.
CELL = "matrix"

#: Lists of cells below the table, by the property that puts a cell there.
LISTS = {
    "lease": "Left to lease expiry:",
    "lapsed": "Ended with its lease while the broker had the message, and taken again by the next run:",
}


def cells_of(reports: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Return the cells that tests have recorded, each once."""
    cells: dict[tuple[str, str], Mapping[str, Any]] = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == CELL:
                cells[value["row"], value["column"]] = value
    return list(cells.values())


def lines(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the table and its lists as reStructuredText.

    A cell has ``row``, ``column``, ``text``, their places in ``order`` (two numbers), ``absent`` (why the row has
    nothing to say in other columns, by column), and perhaps a name of ``LISTS``.
    """
    found = sorted(cells, key=lambda cell: tuple(cell["order"]))
    rows = list(dict.fromkeys(cell["row"] for cell in found))
    columns = [name for _, name in sorted({(cell["order"][1], cell["column"]) for cell in found})]
    texts = {(cell["row"], cell["column"]): cell["text"] for cell in found}
    absent = {cell["row"]: cell["absent"] for cell in found}
    reasons: list[str] = []
    table = []
    for row in rows:
        line = [row]
        for column in columns:
            text = texts.get((row, column))
            reason = absent[row].get(column, "")
            if text is None and reason:
                if reason not in reasons:
                    reasons.append(reason)
                text = f"n/a {_mark(reasons.index(reason))}"
            line.append("–" if text is None else text)
        table.append(line)
    out = _simple_table(["seconds until the lock is free", *columns], table)
    if reasons:
        out += ["", "n/a, because", ""]
        out += [f"* {_mark(number)}: {reason}" for number, reason in enumerate(reasons)]
    for kind, title in LISTS.items():
        by_row: dict[str, list[str]] = {}
        for cell in found:
            if cell.get(kind):
                by_row.setdefault(cell["row"], []).append(cell["column"])
        if by_row:
            out += ["", title, ""]
            out += [f"* {row}: {', '.join(where)}" for row, where in by_row.items()]
    return out


def _mark(number: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[number % 26] * (1 + number // 26)


def _simple_table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(line[place]) for line in [head, *rows]) for place in range(len(head))]
    rule = "  ".join("=" * width for width in widths)

    def text(line: list[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()

    return [rule, text(head), rule, *map(text, rows), rule]
