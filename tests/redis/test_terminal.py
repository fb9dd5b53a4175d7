"""What a command shows on a terminal, and what it does not show elsewhere: colours, progress, tables that fit."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery.schedules import schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wcwidth import wcswidth

from singlebeat import Entry, Schedule
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.beat.leadership.lease import Term
from singlebeat.beat.store.claims import Confirmation, Store
from singlebeat.cli import main
from singlebeat.cli.output import printable, table
from singlebeat.connections import schedule_client
from singlebeat.locks import backend_of
from singlebeat.locks.base import Call, Ref

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")

TASK = "tests.system.apps.plain"
RED, ANY_COLOUR, PROGRESS = "\x1b[31m", "\x1b[", "\r"

HOSTILE = {
    "long": "x" * 500,
    "wide": "毎時の請求書" * 50,
    "emoji": "🎉👩\u200d👩\u200d👧🏽❤\ufe0f🇩🇪" * 40,
    "combining": "é̂" * 100 + "नमस्ते",
    "controls": "\x1b[2J\x1b]0;owned\x07\r\n\t\x00\x9b1m\u202e\u2028",
    "not UTF-8": "\udcff\udc80" * 99,
    "spaces": "x" + " " * 199,
}


class Terminal:
    """Standard output or error of this process as a terminal, and what came there."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8", newline="")
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._follow)
        self._reader.start()

    def _follow(self) -> None:
        with suppress(OSError):  # EIO: the other end is closed
            while chunk := os.read(self._master, 65536):
                self._read.append(chunk)

    def close(self) -> str:
        """Return all that was written."""
        self.stream.close()
        self._reader.join(10)
        os.close(self._master)
        return b"".join(self._read).decode()


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def on_terminal(app, monkeypatch) -> Run:
    """Runs a command with standard output and error on a terminal each; returns what came there."""

    def run(*args: str, **context: Any) -> tuple[str, str]:
        out, err = Terminal(), Terminal()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", out.stream)
            patch.setattr(sys, "stderr", err.stream)
            with suppress(SystemExit):
                main.main(list(args), obj=SimpleNamespace(app=app, **context), standalone_mode=False)
        return out.close(), err.close()

    monkeypatch.delenv("NO_COLOR", raising=False)
    return run


@pytest.fixture
def bad(redis) -> None:
    """An entry that is quarantined: every table of entries shows it as a problem."""
    redis.hset("redbeat::quarantine", "redbeat:bad", json.dumps({"reason": "no task", "since": "today"}))


# ---------------------------------------------------------------- colours


@pytest.mark.parametrize("command", ["list", "status", "doctor"])
def test_colours_are_on_a_terminal_only(cli, on_terminal, bad, command):
    assert RED in on_terminal(command)[0]
    assert ANY_COLOUR not in cli(command, code=None).output
    assert ANY_COLOUR not in on_terminal(command, "--json")[0]


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_user_who_wants_no_colours_gets_none(on_terminal, bad, command, monkeypatch):
    assert ANY_COLOUR not in on_terminal(command, no_color=True)[0], "celery --no-color"
    monkeypatch.setenv("NO_COLOR", "1")
    assert ANY_COLOUR not in on_terminal(command)[0]


def test_a_problem_of_an_import_is_red_on_a_terminal(on_terminal, cli, tmp_path):
    file = tmp_path / "entries.json"
    file.write_text('[{"name": "e", "definition": {}}]')

    assert f"{RED}e: it has no name, or no definition" in on_terminal("import", str(file))[1]
    assert ANY_COLOUR not in cli("import", str(file), code=1).output


# ---------------------------------------------------------------- progress


@contextmanager
def confirming(app: Any, redis: Any) -> Iterator[None]:
    """Do what a beat does with the runs that a backfill hands over, and nothing else."""
    ended = threading.Event()

    def confirm() -> None:
        while not ended.wait(0.005):
            if pending := redis.hget("redbeat:e", "pending"):
                occurrence = Occurrence.decode(pending)
                decision = Decision("e", TASK, occurrence, DecisionType.DISPATCHED)
                (stored,) = Store(app, redis).due(datetime.now(UTC), all_pending=True).recovered
                Store(app, redis).confirm([Confirmation(stored, decision)], Term(1, ""))

    thread = threading.Thread(target=confirm)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


COMMANDS = {
    "export": (["export"], "of 3 entries read"),
    "import": (["import", "FILE"], "of 3 entries"),
    "backfill": (["backfill", "e", "2026-01-01", "2026-01-01T03:00"], "of 3 runs handed over"),
    "locks": (["locks"], "locks read"),
    "doctor": (["doctor"], "of 11 parts checked"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_operation_counts_on_a_terminal_and_leaves_nothing_of_it(
    cli, on_terminal, app, redis, tmp_path, name, monkeypatch
):
    monkeypatch.setattr("singlebeat.cli.output.PROGRESS_INTERVAL", 0)
    for entry in ("e", "f", "g"):
        Entry(entry, TASK, schedule(3600), app=app).save()
    file = tmp_path / "entries.json"
    file.write_text(cli("export").stdout)
    args, text = COMMANDS[name]
    args = [str(file) if arg == "FILE" else arg for arg in args]
    refs = [Ref(f"SINGLETONLOCK_{{{n}}}", str(n)) for n in range(3)]
    backend_of(app).acquire_many([Call(ref, "t", "", 60) for ref in refs])

    with confirming(app, redis):
        out, err = on_terminal(*args)
        assert re.search(rf"\r3 {text}|\r4 {text}", err), err
        assert _what_is_left(err) in {"", "e: 3 runs, each handed to beat when the last one is sent"}
        assert PROGRESS not in out.replace("\r\n", "\n"), "it is not among the results"

        assert PROGRESS not in on_terminal(*args, "--json")[1].replace("\r\n", "\n")
        assert PROGRESS not in cli(*args, code=None).output
        json.loads(cli(*args, "--json", code=None).stdout)


def _what_is_left(text: str) -> str:
    """Return what a terminal shows at last, of lines that are written over and cleared."""
    lines = [line.rpartition("\r")[2].removeprefix("\x1b[K") for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join(line for line in lines if line)


# ---------------------------------------------------------------- tables


@pytest.fixture
def taken_for_terminal(monkeypatch):
    """Let what is printed be taken for a terminal's, of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("singlebeat.cli.output.is_terminal", lambda: True)


def test_a_table_in_a_pipe_cuts_nothing(cli, app):
    name = "the name of an entry " * 9
    Entry(name, "a.module.and.its.task", schedule(3600), app=app, last_run_at=datetime.now(UTC)).save()

    title, row, _ = cli("list").output.splitlines()

    assert row.startswith(f"{name}  a.module.and.its.task")
    assert title.index("TASK") == 62, "a long cell widens its own row alone"


@pytest.mark.usefixtures("taken_for_terminal")
@pytest.mark.parametrize("what", HOSTILE)
def test_any_name_and_reason_is_whole_in_a_table_on_a_terminal(cli, app, redis, what):
    text = HOSTILE[what]
    name = text.removeprefix("\x00")
    Entry(name, text, schedule(3600), app=app, args=[text], last_run_at=datetime.now(UTC)).save()
    Entry("short", "task", schedule(3600), app=app, last_run_at=datetime.now(UTC)).save()
    occurrence = Occurrence.of("redbeat:", name, datetime(2030, 1, 1, 12, tzinfo=UTC))
    Store(app, schedule_client(app)).record([Decision(name, text, occurrence, DecisionType.MISSED, text)], Term(3, ""))
    backend_of(app).acquire_many([Call(Ref("SINGLETONLOCK_{a}", text), text, text, 60)])
    backend_of(app).acquire_many([Call(Ref("SINGLETONLOCK_{b}", "0b6f5c9e-8e0f-4d0c-9c3c-1c8b2d4f6a7e"), text, "", 60)])

    listed, history, of_one, locks, changes = (
        cli(*command).output for command in (["list"], ["history"], ["history", name], ["locks"], ["changes"])
    )

    for output in (listed, history, of_one, locks, changes):
        assert printable(name).rstrip() in output
        assert all(wcswidth(line) >= 0 for line in output.splitlines()), "a terminal can show each character"
    (record,) = Schedule(app).history(name, 1)
    assert history.splitlines()[1].endswith(printable(record.reason).rstrip())
    assert listed.splitlines()[0].split() == ["NAME", "TASK", "SCHEDULE", "LAST", "ENDED", "NEXT", "STATE"]
    assert "every 3600 s" in listed
    assert "active" in listed
    assert "2030-01-01 12:00:00Z" in history
    assert "missed" in history
    assert "queued" in locks


@pytest.mark.usefixtures("taken_for_terminal")
def test_the_id_that_holds_a_lock_is_whole_for_unlock_to_take(cli, app):
    holder = "0b6f5c9e-8e0f-4d0c-9c3c-1c8b2d4f6a7e"
    backend_of(app).acquire_many([Call(Ref("SINGLETONLOCK_{b}", holder), "a.module.and.its.task", "x" * 99, 60)])

    output = cli("locks").output

    assert holder in output
    assert max(map(wcswidth, output.splitlines())) <= 80


@pytest.mark.usefixtures("taken_for_terminal")
def test_a_name_and_an_id_can_be_copied_from_the_changes(cli, app):
    name = "a name of forty-five letters, which one types"
    Schedule(app, actor="an actor with a very long name@a.host.of.a.company.example.org").upsert(name, TASK, 60)
    (change,) = Schedule(app).changes(name)

    _, row = cli("changes").output.splitlines()

    assert row.startswith(f"{change.id}  ")
    assert f"  {name}  add" in row
    assert "an actor wi…" in row


cells = st.text(max_size=120) | st.sampled_from([*HOSTILE.values()])


@pytest.mark.usefixtures("taken_for_terminal")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.tuples(cells, cells, cells, cells, cells), max_size=4),
    cut=st.lists(st.integers(0, 4), unique=True, max_size=5),
)
def test_a_table_cuts_the_given_columns_alone(capsys, rows, cut):
    """60 tables; columns are cut to 12 at least, and no more than the width asks for."""
    titles = ("FIRST", "SECOND", "THIRD", "FOURTH, OR WHY", "E")
    table(titles, rows, cut=cut)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[0].split("  ")[0].strip() == "FIRST"
    for row, line in zip(rows, lines[1:], strict=True):
        assert wcswidth(line) >= 0
        assert all(printable(cell).rstrip() in line for at, cell in enumerate(row) if at not in cut)
        if all(wcswidth(printable(cells[at])) <= 5 for cells in rows for at in range(5) if at not in cut):
            assert wcswidth(line) <= 80


@pytest.mark.usefixtures("taken_for_terminal")
def test_a_table_gives_room_to_the_widest_columns(capsys):
    now = datetime(2030, 1, 1, tzinfo=UTC)
    table(("A", "B", "C"), [("x" * 60, now, "y" * 9), ("short", now + timedelta(days=1), "y")], cut=(0,))

    title, first, second = capsys.readouterr().out.splitlines()

    assert len(first) == 80
    assert first.startswith("x" * 40)
    assert "…  2030-01-01 00:00:00+00:00  yyyyyyyyy" in first
    assert first.index("2030") == second.index("2030") == title.index("B")


@pytest.mark.parametrize(("columns", "given"), [(200, ""), (100, ""), (100, "200")])
def test_a_table_is_as_wide_as_the_terminal(server, app, redis, columns, given):
    """The command runs on a terminal of its own; ``COLUMNS`` counts more than its width."""
    task = "a.module.with.a.long.name.and.its.task.which.takes.sixty.columns"
    Entry("e", task, schedule(3600), app=app, last_run_at=datetime.now(UTC)).save()
    env = {**os.environ, "SB_TEST_URL": server.celery_url, "COLUMNS": given}
    command = [sys.executable, "-m", "celery", "-A", "tests.system.apps", "singlebeat", "list"]
    terminal = Terminal()
    termios.tcsetwinsize(terminal.stream.fileno(), (25, columns))

    subprocess.run(command, stdout=terminal.stream, env=env, check=True, timeout=60)

    row = next(line for line in terminal.close().splitlines() if line.startswith("e "))
    if max(columns, int(given or 0)) == 200:
        assert task in row
    else:
        assert len(row.rstrip()) <= 100
        assert "…" in row
        assert "every 3600 s" in row
