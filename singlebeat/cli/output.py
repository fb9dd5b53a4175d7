"""The output of all commands: a table or JSON, one line for an error, an exit code."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

import click
from kombu.exceptions import OperationalError

from ..beat.store.probe import lock_server_says, may_be_done, schedule_server_says
from ..connections import RedisError, schedule_place
from ..diagnosis.code import load_code
from ..errors import ConfigError, LockBackendError, SinglebeatError
from ..lua import answered_scripts, noting_answers
from . import Reporting

if TYPE_CHECKING:
    from celery import Celery

__all__ = (
    "REFUSED",
    "UNANSWERED",
    "Seconds",
    "age",
    "command",
    "drop_output",
    "fail",
    "is_strict",
    "marked",
    "moment",
    "parse_instant",
    "printable",
    "progress",
    "show_json",
    "table",
)

#: A parameter of a command: what ``click.option`` and ``click.argument`` return.
Decorator = Callable[[Any], Any]

#: Exit codes besides 0: not found, conflict or unhealthy; usage error, wrong setting or unreachable server.
REFUSED, UNANSWERED = 1, 2

#: File descriptors, which child processes have, too.
STDOUT, STDERR = 1, 2

#: Columns of a terminal that does not say how wide it is.
WIDTH = 80

#: Maximum number of columns to which cells are padded in a column that is not cut.
WIDEST = 60

#: Minimum number of columns of a cell that is cut.
LEAST = 12

#: Seconds between two signs of progress.
PROGRESS_INTERVAL = 0.1


class Seconds(click.FloatRange):
    """The type of an option in seconds; it refuses nan, which FloatRange accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the value as a number of seconds."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


COLOURS = {"problem": "red", "warning": "yellow", "fine": "green"}


def command(
    name: str, *params: Decorator, needs_tasks: bool = True
) -> Callable[[Callable[..., object]], click.Command]:
    """Return a decorator that makes a command of a function with the parameters app, ``as_json`` and the given ones.

    Args:
        needs_tasks: the modules of the app's tasks are imported before, which may take seconds.
    """

    def make(function: Callable[..., object]) -> click.Command:
        @functools.wraps(function)
        @click.pass_context
        @noting_answers()
        def run(ctx: click.Context, /, **kwargs: object) -> None:
            if os.environ.get("NO_COLOR") or getattr(ctx.obj, "no_color", False):
                ctx.color = False  # for all output of click, which prints colours on terminals only
            try:
                if why := _prepare(ctx.obj.app, needs_tasks=needs_tasks):
                    click.echo(printable(f"Warning: a module of tasks cannot be imported here: {why}"), err=True)
                function(ctx.obj.app, **kwargs)
            except RedisError as exc:
                app = ctx.obj.app
                fail(f"the schedule's server {schedule_place(app)}: {schedule_server_says(app, exc)}", UNANSWERED)
            except LockBackendError as exc:
                fail(lock_server_says(ctx.obj.app, exc), UNANSWERED)
            except (ConfigError, OperationalError) as exc:
                hint = _NO_APP if ctx.find_root().params.get("app", "") is None else ""
                fail(f"{exc}{hint}", UNANSWERED)
            except SinglebeatError as exc:
                fail(str(exc))
            except OSError as exc:
                hint = may_be_done(answered_scripts())  # only the answer could not be written
                if isinstance(exc, BrokenPipeError) and not hint:  # click ends silently
                    raise
                drop_output()
                fail(f"{exc}{hint}", UNANSWERED)

        wrapped: Any = run
        for param in reversed((*params, click.option("--json", "as_json", is_flag=True, help="Answer in JSON."))):
            wrapped = param(wrapped)
        return click.command(name, cls=Reporting)(wrapped)

    return make


#: What to add to an error about settings if the celery command got no app, whose settings these would be.
_NO_APP = ". No app is named, so that these are Celery's defaults: celery -A APP singlebeat ..."


def _prepare(app: Celery, *, needs_tasks: bool) -> str:
    """Run the code of users that a command needs, and return why a module of tasks cannot be imported, if so."""
    with _printing_on_stderr():
        try:
            _ = app.conf.beat_schedule  # configures the app, which calls receivers of ``on_after_configure``
        except SystemExit as exc:
            fail(f"the app's configuration, or a receiver of on_after_configure, exits: {exc.code}", UNANSWERED)
        if needs_tasks:
            return load_code(app)
        with suppress(Exception, SystemExit):  # of a receiver, which may add entries to ``beat_schedule``
            app.finalize()
        return ""


@contextmanager
def _printing_on_stderr() -> Iterator[None]:
    """Keep what code of users or its child process prints out of the output that another program may read."""
    if sys.stdout is None or sys.stderr is None:  # it is closed, and the number may be that of a socket by now
        yield
        return
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def drop_output() -> None:
    """Drop the unwritten output, so that the interpreter does not try to write it again at its end."""
    with suppress(OSError, ValueError):  # in tests, standard output is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(text: str, code: int = REFUSED) -> NoReturn:
    """End the command with an error."""
    click.echo(f"Error: {printable(text)}", err=True)
    raise SystemExit(code)


def done(as_json: bool, text: str, **facts: object) -> None:
    """Print what a command has done, as a sentence or as JSON."""
    if as_json:
        show_json(facts)
    else:
        click.echo(printable(text))


def printable(text: object) -> str:
    """Return a string with its unprintable characters escaped; names in Redis may contain any character."""
    encoded = str(text).encode(errors="backslashreplace").decode()
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in encoded)


def show_json(value: object) -> None:
    """Print JSON, readable and in ASCII; numbers that JSON does not have (infinity, NaN) become strings."""
    if not is_strict(value):
        value = json.loads(json.dumps(value, default=_plain), parse_constant=str)
    click.echo(json.dumps(value, indent=2, default=_plain, allow_nan=False))


def is_strict(value: object) -> bool:
    """Return whether all numbers in a value are numbers that JSON has."""
    try:
        json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        return False
    return True


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def moment(when: datetime | None) -> str:
    """Return an instant for people, in UTC."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ") if when else "never"


def age(when: datetime | None, now: datetime) -> str:
    """Return the time since an instant, for people, in its largest unit."""
    if when is None:
        return "never"
    seconds = max(0, int((now - when).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def parse_instant(text: str | None) -> datetime | None:
    """Return the instant of a command line argument, which is in UTC unless it has an offset."""
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError outside of the years 1 to 9999 of UTC
        raise click.BadParameter(f"{text!r} is no date and time like 2026-12-01T09:00") from None


def marked(text: str, level: str) -> str:
    """Return a printable string in the colour of its level: ``problem``, ``warning`` or ``fine``."""
    return click.style(printable(text), fg=COLOURS[level])


class Progress:
    """Counts steps, and shows the count in a line on standard error.

    Args:
        what: the noun after the count, with the final number of steps, if it is known.
        shown: whether the line is shown.
    """

    def __init__(self, what: str, *, shown: bool) -> None:
        self._what, self._shown, self._done, self._shown_at = what, shown, 0, 0.0

    def __call__(self, count: int = 1) -> None:
        """Count steps."""
        self._done += count
        if self._shown and time.monotonic() - self._shown_at >= PROGRESS_INTERVAL:
            self._shown_at = time.monotonic()
            sys.stderr.write(f"\r{self._done:,}{self._what} ")
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line, until the next step."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextmanager
def progress(what: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Progress]:
    """Yield a function that counts steps, and show the count in a line on standard error.

    The line is shown on a terminal only, and removed at the end.

    Args:
        what: the noun after the count.
        total: the final number of steps, or None if it is not known.
        quiet: show nothing.
    """
    # None if the caller has closed standard error.
    shown = not quiet and sys.stderr is not None and sys.stderr.isatty()
    step = Progress(f"{'' if total is None else f' of {total:,}'} {what}", shown=shown)
    step(0)
    try:
        yield step
    finally:
        step.clear()


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, cut: Collection[int] = ()) -> None:
    """Print rows under titles, and cut the given columns as far as that fits the rows to the width of a terminal.

    All other cells are whole, for readers copy them: a row that is still too long goes on in the next line. A cell that
    is longer than ``WIDEST`` shifts the rest of its own row only. In a pipe or a file no cell is cut.

    Args:
        cut: columns whose cells may be cut, beginning with the widest.
    """
    texts = [[printable(cell) for cell in row] for row in rows]
    cut, screen = (cut, shutil.get_terminal_size((WIDTH, 0)).columns) if is_terminal() else ((), WIDEST)
    columns = enumerate(zip(titles, *texts, strict=True))
    widths = [min(screen if at in cut else WIDEST, max(map(_width, column))) for at, column in columns]
    room = screen - 2 * len(widths[1:])
    while sum(widths) > room and (broad := [at for at in cut if widths[at] > max(LEAST, len(titles[at]))]):
        widths[max(broad, key=lambda at: widths[at])] -= 1
    for number, row in enumerate([[*titles], *texts]):
        cells = (
            _fitted(cell, width) if at in cut else _padded(cell, width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        line = "  ".join(cells).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)


def is_terminal() -> bool:
    """Return whether standard output is a terminal, and not a pipe or a file."""
    return sys.stdout is not None and sys.stdout.isatty()  # None if the caller has closed standard output


def _width(text: str) -> int:
    """Return an upper bound for the terminal columns that a string takes."""
    return sum(map(_columns, text))


def _columns(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me"} and char != "\ufe0f":  # the emoji selector makes a character wider
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fitted(text: str, width: int) -> str:
    """Return a string that is cut or padded to exactly ``width`` columns."""
    if _width(text) > width:
        end, room = 0, width - 1 - _columns(text[0])
        while room >= 0:
            end += 1
            room -= _columns(text[end])
        text = text[:end] + "…"
    return _padded(text, width)


def _padded(text: str, width: int) -> str:
    """Return a string that is padded to at least ``width`` columns."""
    return text + " " * (width - _width(text))
