"""How every command answers: a table or JSON, one line for an error, an exit code."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import click
from kombu.exceptions import OperationalError

from ..connections import RedisError
from ..errors import ConfigError, LockBackendError, SinglebeatError

__all__ = ("REFUSED", "UNANSWERED", "command", "fail", "instant", "moment", "printable", "show_json", "table")

#: Exit codes besides 0: the answer is no; it could not be asked.
REFUSED, UNANSWERED = 1, 2

#: Columns of the narrowest terminal that a table has to fit.
WIDTH = 80


def command(name: str, *params: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command: its function gets the app, ``as_json`` and the parameters; errors become one line."""

    def make(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        @click.pass_context
        def run(ctx: click.Context, /, **kwargs: Any) -> None:
            try:
                function(ctx.obj.app, **kwargs)
            except (ConfigError, LockBackendError, RedisError, OperationalError) as exc:
                fail(str(exc), UNANSWERED)
            except SinglebeatError as exc:
                fail(str(exc))

        wrapped: Any = run
        for param in reversed((*params, click.option("--json", "as_json", is_flag=True, help="Answer in JSON."))):
            wrapped = param(wrapped)
        return click.command(name)(wrapped)

    return make


def fail(text: str, code: int = REFUSED) -> NoReturn:
    """End the command with an error."""
    click.echo(f"Error: {printable(text)}", err=True)
    raise SystemExit(code)


def printable(text: object) -> str:
    """Return a text without what a terminal, or its encoding, cannot take: names in Redis may hold anything."""
    encoded = str(text).encode(errors="backslashreplace").decode()
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in encoded)


def show_json(value: Any) -> None:
    """Print JSON, readable and in ASCII."""
    click.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def moment(when: datetime | None) -> str:
    """Return an instant for people, in UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ") if when else "never"


def instant(text: str | None) -> datetime | None:
    """Read an instant from the command line; one without offset is in UTC."""
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no date and time like 2026-12-01T09:00") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, wide: int = 0) -> None:
    """Print rows under titles, within 80 columns: the ``wide`` column gives way."""
    texts = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
    widths[wide] = max(len(titles[wide]), min(widths[wide], WIDTH - (sum(widths) - widths[wide]) - 2 * len(widths[1:])))
    for number, row in enumerate([[*titles], *texts]):
        cells = [_fitted(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)]
        line = "  ".join(cells).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
