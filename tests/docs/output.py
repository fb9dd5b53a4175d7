"""Whether what was printed is what a page shows, but for times, ids, hosts and versions."""

from __future__ import annotations

import re

#: What differs from run to run, and what may stand there instead.
_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_VARIABLE = (
    ("id", _ID, _ID),
    ("cut_id", r"\b[0-9a-f]{4,}[0-9a-f-]*…", r"[0-9a-f-]+.*?"),
    ("cut", r"…", r".*?"),
    ("instant", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?"),
    ("clock", r"\d\d:\d\d:\d\d(?:,\d+)?", r"\d\d:\d\d:\d\d(?:,\d+)?"),
    ("duration", r"\b\d+ min(?: \d+ s)?\b", r"\d+ (?:min|s)(?: \d+ s)?"),
    ("seconds", r"\b\d+(?:\.\d+)?(?= ?s\b)", r"\d+(?:\.\d+)?"),
    ("milliseconds", r"\b[\d.]+(?= ms\b)", r"[\d.]+"),
    ("percent", r"\b[\d.]+(?=%)", r"[\d.]+"),
    ("lateness", r"(?<=lateness=)[\d.]+", r"[\d.]+"),
    ("process", r"(?<=pid )\d+", r"\d+"),
    ("child", r"(?<=ForkPoolWorker-)\d+", r"\d+"),
    ("version", r"\b\d+\.\d+\.\d+\b", r"[\d.]+"),
    ("url", r"redis://\S+?(?=:? )", r"\S+?"),
    ("host", r"(?<=@)vm\b|\bweb\d\b", r"[\w.-]+"),
    ("blank", r" {2,}", r" +"),
)
_TOKEN = re.compile("|".join(f"(?P<{name}>{shown})" for name, shown, _ in _VARIABLE))
_PRINTED = {name: printed for name, _, printed in _VARIABLE}


def pattern(shown: str, *, between: str = "\n") -> re.Pattern[str]:
    """Return the pattern of what may be printed where a page shows a text; one id stays the same id all over it.

    Args:
        between: the pattern of what may stand between two lines.
    """
    ids: dict[str, str] = {}
    lines = []
    for line in shown.splitlines():
        parts, end = [], 0
        for token in _TOKEN.finditer(line):
            kind = token.lastgroup
            parts.append(re.escape(line[end : token.start()]))
            end = token.end()
            if kind == "id" and token[0] in ids:
                parts.append(f"(?P={ids[token[0]]})")
            elif kind == "id":
                ids[token[0]] = f"id{len(ids)}"
                parts.append(f"(?P<{ids[token[0]]}>{_ID})")
            else:
                parts.append(_PRINTED[kind])
        lines.append("".join(parts) + re.escape(line[end:]))
    return re.compile(between.join(lines))


def is_printed(shown: str, printed: str) -> bool:
    """Return whether a command has printed what a page shows."""
    return pattern(shown).fullmatch(printed.strip()) is not None


def is_logged(shown: str, log: str) -> bool:
    """Return whether the lines that a page shows are in a log, in this order and among others."""
    return pattern(shown, between=r".*\n(?:.*\n)*?.*?").search(log) is not None
