"""What an operator can ask in an incident, and a watch: what each tool says, and how long after its beginning."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

from celery import Celery
from click.testing import CliRunner

from singlebeat.cli import main
from tests.support import CeleryProcess, measured
from tests.system.singles import PATIENCE

#: Seconds between two rounds of questions.
PAUSE = 0.05


@dataclass(frozen=True)
class Said:
    """What a tool is to say.

    Args:
        ask: returns the tool's present answer.
        patterns: of which each is found in one and the same answer.
        never: a pattern that no answer holds on the way to it.
        gone: a pattern that this answer does not hold.
    """

    tool: str
    ask: Callable[[], str]
    patterns: tuple[str, ...]
    never: str = ""
    gone: str = ""

    @property
    def is_slow(self) -> bool:
        """Return whether an answer takes a second because workers are asked."""
        return self.tool.startswith(("doctor", "explain"))

    def found(self) -> str:
        """Ask; return where the first pattern is found, empty if one of them is not."""
        text = self.ask()
        assert not (self.never and re.search(self.never, text, re.MULTILINE)), f"{self.tool} says:\n{text}"
        matches = [re.search(pattern, text, re.MULTILINE) for pattern in self.patterns]
        is_gone = not (self.gone and re.search(self.gone, text, re.MULTILINE))
        return (matches[0][0] or "nothing") if is_gone and all(matches) else ""


class Incident:
    """A watch that runs from the beginning of an incident."""

    def __init__(self, title: str) -> None:
        self._title, self._began = title, time.monotonic()

    def until(self, *sayings: Said, timeout: float = PATIENCE) -> None:
        """Return when each tool has said its words; note after how many seconds it said them for the first time."""
        missing, deadline = list(sayings), time.monotonic() + timeout
        while missing:
            slow = [said for said in missing if said.is_slow]
            # Of the slow ones one after the other, so that all the others are asked in between.
            for said in [said for said in missing if not said.is_slow] + slow[:1]:
                missing.remove(said)
                if found := said.found():
                    after = time.monotonic() - self._began
                    measured(f"{self._title}: {said.tool} after {after:.1f} s: {found.splitlines()[0]}")
                else:
                    missing.append(said)
            if missing and time.monotonic() > deadline:
                answers = "\n\n".join(f"{said.tool}, not {said.patterns}:\n{said.ask()}" for said in missing)
                raise AssertionError(f"{self._title}: {timeout:g} s passed. {answers}")
            time.sleep(PAUSE if missing else 0)


class Tools:
    """The commands of an app, which run in this process; ``heard`` is all that they have printed."""

    def __init__(self, app: Celery) -> None:
        self.app, self.heard = app, ""

    def ask(self, *args: str) -> str:
        """Return what a command prints; its last line is the exit code."""
        done = CliRunner().invoke(main, args, obj=SimpleNamespace(app=self.app))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        text = f"{done.output}exit code {done.exit_code}"
        self.heard += f"{text}\n"
        return text

    def say(self, command: str, *patterns: str, code: int | None = 0, never: str = "", gone: str = "") -> Said:
        """Return that a command prints these patterns and ends with this code; None: with any."""
        ends = f"^exit code {'.' if code is None else code}$"
        return Said(command, lambda: self.ask(*command.split()), (*patterns, ends), never, gone)


@dataclass(eq=False)
class Beat:
    """A beat as a process: its log, and its probes and metrics over HTTP."""

    process: CeleryProcess
    port: int

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def leads(self) -> str:
        """How ``status`` and ``health`` name it as the leader, as a pattern."""
        return rf"pid {self.pid}, term \d+"

    def logs(self, *patterns: str, after: int = 0, never: str = "") -> Said:
        """Return that its log holds these patterns, from a position on."""
        return log(self.process, f"log of beat {self.pid}", *patterns, after=after, never=never)

    def ready(self, pattern: str, *, timeout: float = 5.0) -> Said:
        """Return that ``/readyz`` answers like this; the answer begins with the status."""
        return Said(f"/readyz of beat {self.pid}", lambda: self._get("/readyz", timeout), (pattern,))

    def metric(self, name: str, value: str) -> Said:
        """Return that a gauge or counter has a value like this."""
        pattern = rf"^singlebeat_{name} {value}$"
        return Said(f"/metrics of beat {self.pid}", lambda: self._get("/metrics", 5.0), (pattern,))

    def _get(self, path: str, timeout: float) -> str:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as answer:
                return f"{answer.status} {answer.read().decode()}"
        except HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()}"
        except (OSError, HTTPException):
            return "no answer"


def log(process: CeleryProcess, name: str, *patterns: str, after: int = 0, never: str = "") -> Said:
    """Return that the log of a process holds these patterns, from a position on."""
    return Said(name, lambda: "\n".join(process.lines[after:]), patterns, never)
