"""Log lines: a sentence for people, then ``key=value`` pairs for machines. One event is one line without passwords."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any

from celery.utils.log import get_logger

from .native_threads import do_in_loop, is_native

__all__ = ("LONGEST_REASON", "Log", "printable", "utc_iso", "without_passwords")

#: Maximum length of a reason in the history.
LONGEST_REASON = 200

#: Most characters of a line in which passwords are looked for: a hostile one of 1,000,000 would take ten minutes.
LONGEST_LINE = 10_000

#: Matches from ``://user:`` to the last @ before a blank. If a password has a blank, it matches to the last @ of the
#: line; a port after the colon is no password. A user name may have ``@`` and ``/``, and JSON may escape slashes. And
#: what follows ``password=``, in the query of a URL or in what libpq takes.
_PASSWORD = re.compile(
    r"""(:\\{0,9}/\\{0,9}/[^:\s]*:)(?:\S*@|(?!\d{1,5}(?:[/?\s'")\]},;.]|$)).*@)"""
    r"""|(?i:([?&]password=)[^&\s'"]+|\b((?:pg)?passw(?:or)?d\s?=\s?)(?:\\?'[^']*'|\\?"[^"]*"|[^\s'")]+))"""
)
_QUOTE = re.compile(r"%\((\w+)\)")
_KEY = re.compile(r"(?<=\S)=")
_BARE = re.compile(r'[^\s"=\\]+')

_json = json.JSONEncoder(ensure_ascii=False).encode

_formatter = logging.Formatter()

#: Frames between the caller and the standard library's logger.
DEPTH = 3


class Log:
    """A writer of log lines to one of Celery's loggers; a line below the level costs only a check of the level.

    Each method takes a sentence, the name of the event, and pairs of data, which the sentence may quote:
    ``log.info("%(task)s[%(id)s] waits", event="postponed", task=name, id=task_id)``. Pairs with None or an empty string
    are left out. ``detail`` is not a pair: its lines follow the log line, indented. The pairs are also a dict, the
    attribute ``singlebeat`` of the record, for formatters that write JSON.
    """

    def __init__(self, name: str) -> None:
        self._logger = get_logger(name)
        self._logger.addFilter(_without_passwords_in_traceback)

    def debug(self, text: str, *, event: str, **pairs: object) -> None:
        """Log an event that matters only in the search for an error."""
        if self.wants(logging.DEBUG):
            self._write(logging.DEBUG, text, {"event": event, **pairs})

    def info(self, text: str, *, event: str, **pairs: object) -> None:
        """Log an expected event."""
        if self.wants(logging.INFO):
            self._write(logging.INFO, text, {"event": event, **pairs})

    def warning(self, text: str, *, event: str, **pairs: object) -> None:
        """Log an event that may need the attention of an operator."""
        if self.wants(logging.WARNING):
            self._write(logging.WARNING, text, {"event": event, **pairs})

    def error(self, text: str, *, event: str, **pairs: object) -> None:
        """Log a problem that an operator has to fix."""
        if self.wants(logging.ERROR):
            self._write(logging.ERROR, text, {"event": event, **pairs})

    def exception(self, text: str, *, event: str, **pairs: object) -> None:
        """Log an unexpected error, with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, text, {"event": event, **pairs}, exc_info=True)

    def critical(self, text: str, *, event: str, **pairs: object) -> None:
        """Log the reason why this process ends."""
        self._write(logging.CRITICAL, text, {"event": event, **pairs})

    def write(self, level: int, text: str, *, event: str, **pairs: object) -> None:
        """Log at the given level of ``logging``."""
        if self.wants(level):
            self._write(level, text, {"event": event, **pairs})

    def wants(self, level: int) -> bool:
        """Return whether lines of the given level are written."""
        return is_native() or bool(self._logger.isEnabledFor(level))

    def _write(self, level: int, text: str, pairs: dict[str, Any], *, exc_info: object = None) -> None:
        if is_native():  # loggers and handlers have locks, which a greenlet may hold
            error = exc_info and sys.exc_info()
            do_in_loop(lambda: self._write(level, text, pairs, exc_info=error))
            return
        detail = without_passwords(pairs.pop("detail", ""))
        facts = {name: _fact(value) for name, value in pairs.items() if value is not None and value != ""}
        tail = "".join(f" {name}={_encoded(fact)}" for name, fact in facts.items())
        # Indented, so that none of these lines can pass for a separate log line.
        tail += "".join(f"\n    {printable(line)}" for line in detail.splitlines())
        quoted = {name: _escaped_value(pairs[name]) for name in _quoted_names(text)}
        line = f"{text}%(_tail)s"
        self._logger.log(
            level,
            line,
            {**quoted, "_tail": tail},
            exc_info=exc_info,
            extra={"singlebeat": facts},
            stacklevel=DEPTH,
        )


def without_passwords(text: str) -> str:
    """Return a string without the passwords of the URLs in it; what is too long of a line is cut off."""
    if "/" not in text and "=" not in text:
        return text
    return "\n".join(map(_without_passwords, text.split("\n")))


def _without_passwords(line: str) -> str:
    if len(line) > LONGEST_LINE:  # at a blank, so that no password loses the @ that shows it
        line = f"{line[:LONGEST_LINE].rpartition(' ')[0]} …"
    return _PASSWORD.sub(lambda found: f"{found[1] or found[2] or found[3]}**{'@' * bool(found[1])}", line)


def _without_passwords_in_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and hasattr(record, "singlebeat"):  # other libraries write to Celery's loggers, too
        record.exc_text = without_passwords(_formatter.formatException(record.exc_info))
    return True


def printable(text: str) -> str:
    """Return a string on one line, with escapes for characters that are not printable."""
    return text if text.isprintable() else "".join(map(_escaped, text))


#: The last second before the year 10000: a later number is no time in seconds since 1970.
LAST_INSTANT = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


@lru_cache(maxsize=1024)  # many entries are due at the same times
def utc_iso(seconds: float) -> str:
    """Return a time in seconds since 1970 in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@cache
def _quoted_names(text: str) -> tuple[str, ...]:
    """Return the names of the pairs that a sentence quotes."""
    return tuple(_QUOTE.findall(text))


def _fact(value: object) -> float | str:
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, int) else without_passwords(str(value))


def _escaped_value(value: object) -> float | str:
    if isinstance(value, int | float):
        return value
    # A name may contain characters that look like a pair.
    return _KEY.sub(r"\\x3d", printable(without_passwords(str(value))))


def _encoded(fact: object) -> str:
    """Return a value as JSON; a string that needs no quotes has none."""
    if isinstance(fact, str) and fact.isprintable() and _BARE.fullmatch(fact):
        return fact
    return printable(_json(fact))


def _escaped(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
