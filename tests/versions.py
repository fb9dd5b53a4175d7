"""What was tested together, as a row of the table in the docs."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version

from tests.support import server_binary

PACKAGES = ("celery", "kombu", "redis", "hiredis")
WIDTHS = (8, 7, 7, 9, 8, 14)
COLUMNS = ("Python", "Celery", "kombu", "redis-py", "hiredis", "Server", "Tests")


def lines(outcome: str) -> list[str]:
    """Return the head of the table and the row of this run."""
    cells = (platform.python_version(), *map(_version, PACKAGES), _server(), outcome)
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, (*WIDTHS, 0), strict=True)) for row in (COLUMNS, cells)
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "–"


def _server() -> str:
    told = subprocess.run([server_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    name, number = re.match(r"(\w+) server v=(\S+)", told).groups()  # type: ignore[union-attr]
    return f"{name} {number}"
