"""A reader who does what a page says, block by block, on the server and with the processes of the tests."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from celery.bin.celery import celery as celery_command
from click.testing import CliRunner
from redis import Redis

from singlebeat import Schedule
from singlebeat.beat.status import ScheduleStatus
from tests.docs.output import is_logged, is_printed
from tests.docs.pages import Code, Command, Excerpt, Step
from tests.support import CeleryLauncher, CeleryProcess, RedisServer, wait_until

#: Seconds until a command prints what a page shows: until the processes have come so far.
PATIENCE = 30.0


@dataclass
class Reader:
    """A reader with the module ``shop``, in which all Python of the page runs, a folder, and the server's prompt.

    Args:
        values: what to type for a placeholder of the page, such as ``PID``.
        processes: the workers and beats that the reader has started, by the command's first words.
    """

    server: RedisServer
    redis: Redis
    celery: CeleryLauncher
    folder: Path
    shop: ModuleType
    values: dict[str, str] = field(default_factory=dict)
    processes: list[CeleryProcess] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    #: The database in which the client types.
    db: int = 0
    #: What the story adds to the app of the page.
    settings: str = ""
    #: Python before and after each block that runs in a process of its own; none if blocks run in the module.
    around: tuple[str, str] | None = None

    def save(self, source: str) -> None:
        """Save the module ``shop`` for the processes, and load it here."""
        source = self._with_addresses(f"{source}\n{self.settings}\n")
        (self.folder / "shop.py").write_text(source, "utf-8")
        exec(compile(source, "shop.py", "exec"), vars(self.shop))

    def store(self, lines: str) -> None:
        """Store an entry for each line, the JSON of a schedule or of arguments, as another language does."""
        for line in lines.splitlines():
            text, _, _ = line.partition(" //")
            value = json.loads(text)
            given = {"args": value, "schedule": 60} if isinstance(value, list) else {"schedule": value}
            definition = json.dumps({"task": "shop.bill", **given})
            self._ask_server("HSET", "redbeat:stored", "definition", definition)
            self._ask_server("ZADD", "redbeat::schedule", "0", "redbeat:stored")
            entry = Schedule(self.shop.app).get("stored")  # raises if it cannot be read
            assert not any(isinstance(each, dict) for each in entry.args)

    def close(self) -> None:
        """Close the app; a result unsubscribes when it is collected: not after the end of the server."""
        if app := getattr(self.shop, "app", None):
            app.close()
        vars(self.shop).clear()

    def run_python(self, source: str) -> None:
        """Run a block of Python."""
        source = self._with_addresses(source)
        if self.around is not None:
            subprocess.run([sys.executable, "-c", "\n".join((self.around[0], source, self.around[1]))], check=True)
        elif "app = Celery(" in source:
            self.save(source)
        else:
            exec(compile(source, "a block of the page", "exec"), vars(self.shop))

    def _with_addresses(self, source: str) -> str:
        return re.sub(r"redis://localhost\b(?!:)", self.server.url, source)

    def start(self, line: str) -> CeleryProcess:
        """Start a worker or a beat by its command line, as it stands."""
        _, _, app, *words = shlex.split(line)
        process = self.celery(*words, app=app, cwd=self.folder, defaults=False, env=self.environment)
        self.processes.append(process)
        return process

    @property
    def log(self) -> str:
        """The logs of all processes."""
        return "\n".join(process.text for process in self.processes)

    @staticmethod
    def knows(step: Step) -> bool:
        """Return whether a reader knows the program of a command, or the language of a block."""
        if isinstance(step, Command):
            return step.prompt == ">" or _program(step.text)[0] in _PROGRAMS
        return isinstance(step, Excerpt) or step.language in _LANGUAGES

    def follow(self, step: Step) -> None:
        """Do one step of a page, and check what the page shows."""
        if isinstance(step, Code):
            _LANGUAGES[step.language](self, step.text)
        elif isinstance(step, Excerpt):
            wait_until(lambda: is_logged(step.text, self.log), timeout=PATIENCE, what=f"these lines:\n{step.text}")
        elif step.output:
            self._until_printed(step)
        else:
            self.type(step)

    def _until_printed(self, step: Command) -> None:
        printed = ""

        def is_as_shown() -> bool:
            nonlocal printed
            printed = self.type(step)
            return is_printed(step.output, printed)

        try:
            wait_until(is_as_shown, timeout=PATIENCE)
        except AssertionError:
            raise AssertionError(f"$ {step.text}\nprints\n{printed}\nnot\n{step.output}") from None

    def type(self, step: Command) -> str:
        """Run a command, and return what it prints."""
        if step.prompt == ">":
            return self._ask_server(*shlex.split(step.text))
        program, rest = _program(step.text)
        for placeholder, value in self.values.items():
            rest = re.sub(rf"\b{placeholder}\b", value, rest)
        return _PROGRAMS[program](self, rest)

    def _ask_server(self, *words: str) -> str:
        with self.server.client(db=self.db) as client:
            return str(client.execute_command(*words))

    def _celery(self, line: str) -> str:
        words = shlex.split(line)
        if {"worker", "beat"} & set(words):
            process = self.start(f"celery {line}")
            if "worker" in words:
                process.ready()
            else:
                wait_until(lambda: ScheduleStatus.of(self.shop.app).leader, what="a leader")
            return ""
        words, _, target = (words[:-2], *words[-2:]) if ">" in words else (words, "", "")
        with chdir(self.folder):
            done = CliRunner().invoke(celery_command, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        # doctor finds something, and that of a test's server always.
        assert done.exit_code == 0 or "doctor" in words, f"$ celery {line}\n{done.output}"
        if target:
            (self.folder / target).write_text(done.stdout, "utf-8")
        return done.output

    def _python(self, line: str) -> str:
        return subprocess.run(
            [sys.executable, *shlex.split(line)], check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    def _curl(self, line: str) -> str:
        words = shlex.split(re.sub(r"\$(\w+)", lambda found: self.environment[found[1]], line))
        return subprocess.run(
            ["curl", "--silent", "--show-error", "--fail-with-body", *words],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout

    def _redis_cli(self, line: str) -> str:
        self.db = int(line.removeprefix("-n ") or 0)
        return ""  # what follows is typed at its own prompt

    def _kill(self, line: str) -> str:
        (process,) = (process for process in self.processes if line.endswith(f" {process.pid}"))
        process.send(signal.Signals(int(line.split(maxsplit=1)[0].removeprefix("-"))))
        process.wait()
        return ""


_LANGUAGES: dict[str, Callable[[Reader, str], None]] = {"python": Reader.run_python, "javascript": Reader.store}
_PROGRAMS: dict[str, Callable[[Reader, str], str]] = {
    "celery": Reader._celery,
    "python": Reader._python,
    "curl": Reader._curl,
    "redis-cli": Reader._redis_cli,
    "kill": Reader._kill,
}


def _program(line: str) -> tuple[str, str]:
    program, _, rest = line.removeprefix(".venv/bin/").partition(" ")
    return program, rest


def new_shop() -> ModuleType:
    """Return an empty module ``shop``, as which ``celery -A shop`` finds it."""
    module = ModuleType("shop")
    sys.modules["shop"] = module
    return module
