"""Log lines: one event, one line, pairs that parse back, and no password in any line."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from singlebeat import signals
from singlebeat.beat.decision_log import log_decision
from singlebeat.beat.entries.occurrence import Decision, DecisionType, Occurrence
from singlebeat.events import EVENTS
from singlebeat.log import Log, printable, without_passwords
from singlebeat.run_results import MESSAGE_LOST, RAN_ELSEWHERE
from tests.support import ROOT

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOGGER = "singlebeat.test_log"
PAIR = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"=\\]+)')
SECRET = "ge/h ei@m?"

#: Also what no text can hold: bytes that Redis has kept.
texts = (st.text(st.characters(), max_size=30)).filter(
    lambda text: "://" not in text
)  # a URL may have a password, which is masked
keys = st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(lambda name: name not in {"event", "detail", "text"})


class Lines(logging.Handler):
    """Keeps what would be written, as Celery would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(self.format(record) for record in self.records)


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    log = Log(LOGGER)
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield log
    logger.handlers.clear()


@pytest.fixture(name="lines")
def _lines(log) -> Lines:
    return captured()


def captured() -> Lines:
    """Return what is logged from now on."""
    logger, lines = logging.getLogger(LOGGER), Lines()
    logger.handlers[:] = [lines]
    return lines


def pairs(line: str) -> dict[str, str]:
    """Parse the pairs of a line, which fill it from the event to its end."""
    tail = line[line.index(" event=") :]
    assert "".join(match[0] for match in PAIR.finditer(tail)) == tail
    found = PAIR.findall(tail)
    assert len(dict(found)) == len(found), "a pair is there twice"
    return {name: json.loads(value) if value.startswith('"') else value for name, value in found}


# ---------------------------------------------------------------- rendering


@given(texts, st.dictionaries(keys, texts, max_size=4))
@example("x\n[INFO] beat: Acquired lock event=leadership_gained term=9", {"a": 'x" event=b\n', "b": "\udc80\x1b[0m"})
@example("event=x", {"a": " event=x", "b": "\u2028\u202e\x85"})
def test_any_pairs_parse_back_from_one_line(log, name, about):
    lines = captured()

    log.info("beat: %(entry)s is late", event="late", **{**about, "entry": name})

    text = lines.text
    assert len(text.splitlines()) == 1
    assert text.isprintable()
    about = {**about, "entry": name}
    assert pairs(text) == {"event": "late", **{key: value for key, value in about.items() if value}}
    assert text.index(" event=late") == text.index(" event="), "the name has forged a pair"


@given(texts)
def test_a_detail_of_many_lines_cannot_pass_for_a_log_line(log, detail):
    lines = captured()

    log.critical("beat: stuck", event="stuck", detail=detail)

    first, *rest = re.split(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", lines.text)
    assert first == "[CRITICAL] beat: stuck event=stuck"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_values_that_are_known_to_be_empty_are_left_out_and_zero_is_not(log, lines):
    log.info("it is", event="x", a=None, b="", c=0, d=False, e=0.12345, f=datetime(2026, 1, 2, tzinfo=UTC))

    assert lines.text == '[INFO] it is event=x c=0 d=false e=0.123 f="2026-01-02 00:00:00+00:00"'


def test_a_line_below_the_level_is_not_rendered(log, lines):
    class Dear:
        def __str__(self) -> str:
            raise AssertionError("it was made a text")

    logging.getLogger(LOGGER).setLevel(logging.WARNING)
    try:
        log.debug("it is %(dear)s", event="x", dear=Dear())
        log.info("it is %(dear)s", event="x", dear=Dear())
        log.write(logging.INFO, "it is %(dear)s", event="x", dear=Dear())
    finally:
        logging.getLogger(LOGGER).setLevel(logging.DEBUG)

    assert lines.records == []


def test_a_formatter_finds_pairs_and_callers_line_at_the_record(log, lines):
    for write in (log.debug, log.info, log.warning, log.error, log.critical):
        write("sent %(id)s in %(seconds).1f s", event="dispatched", id="a b", seconds=0.25, url="redis://:pw@h/1")

    for record in lines.records:
        expected = {"event": "dispatched", "id": "a b", "seconds": 0.25, "url": "redis://:**@h/1"}
        assert (record.singlebeat, record.filename) == (expected, "test_log.py")
        assert record.getMessage().startswith("sent a b in 0.2 s event=dispatched ")
    assert [record.levelname for record in lines.records] == ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


def test_an_unforeseen_error_has_its_traceback(log, lines):
    try:
        json.loads("{")
    except ValueError:
        log.exception("it failed", event="failed")

    assert lines.text.startswith("[ERROR] it failed event=failed\nTraceback")


# ---------------------------------------------------------------- secrets


def test_a_password_is_masked_in_tracebacks_of_an_error_and_its_cause(log, lines):
    def fail() -> None:
        try:
            os.stat("redis://:geheim@host")
        except OSError as exc:
            raise RuntimeError("redis://user:geheim@host") from exc

    try:
        fail()
    except RuntimeError:
        log.exception("it failed", event="failed")

    assert "geheim" not in lines.text
    assert "RuntimeError: redis://user:**@host" in lines.text
    assert "Error: [Errno 2] No such file or directory" in lines.text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:geheim@host:6379/0", "redis://:**@host:6379/0"),
        ("redis://user:geheim@host/0 and redis://b:geheim@host", "redis://user:**@host/0 and redis://b:**@host"),
        ("sentinel://:geheim@a:1;sentinel://:geheim@b:2", "sentinel://:**@b:2"),
        ("amqp://u:ge/h@eim?geheim#@h//", "amqp://u:**@h//"),
        ("redis://:ge heim@host", "redis://:**@host"),
        ("unix:///run/s?db=1&password=geheim&x=1", "unix:///run/s?db=1&password=**&x=1"),
        ("host=db password=geheim dbname=x", "host=db password=** dbname=x"),
        ("host=db PASSWORD='ge heim' dbname=x", "host=db PASSWORD=** dbname=x"),
        ("unix:///run/s?PASSWORD=geheim", "unix:///run/s?PASSWORD=**"),
        ("smtp://ann@example.org:geheim@mail", "smtp://ann@example.org:**@mail"),
        ("https://u/x:geheim@h", "https://u/x:**@h"),
        (r"https:\/\/u:geheim@h", r"https:\/\/u:**@h"),
        ("redis://host:6379/0 does not answer w1@host", "redis://host:6379/0 does not answer w1@host"),
        ("nothing to hide: a@b", "nothing to hide: a@b"),
    ],
)
def test_a_password_in_a_url_is_masked(url, shown):
    assert without_passwords(f"cannot use {url}") == f"cannot use {shown}"


@pytest.mark.parametrize("part", ["://a:", "://", "://a: "])
def test_a_huge_line_of_urls_takes_no_time_and_the_next_one_is_read(part):
    text = f"no redis://:geheim@h {part * 200_000}\nno redis://:geheim@i"

    first, second = without_passwords(text).split("\n")

    assert first.startswith("no redis://:**@h ")
    assert len(first) < 11_000
    assert second == "no redis://:**@i"


def test_a_password_is_masked_wherever_it_stands(log, lines):
    url = f"redis://user:{SECRET}@host/1"
    log.info("asking %(url)s", event="x", url=url, error=ConnectionError(f"no {url}"), detail=f"a\n  {url}\n")

    assert SECRET not in lines.text
    assert SECRET not in repr(vars(lines.records[0]))
    assert lines.text.count("redis://user:**@host/1") == 4


def test_a_password_does_not_get_into_the_history():
    decision = Decision("e", "t", Occurrence("i", 0.0), DecisionType.PUBLISH_FAILED, "no redis://:geheim@h/0")

    assert "no redis://:**@h/0" in decision.values(1, "h:1")


# ---------------------------------------------------------------- decisions


@pytest.mark.parametrize("outcome", [each for each in DecisionType if each is not DecisionType.QUARANTINED])
def test_every_decision_has_a_line_that_names_it(outcome, caplog):
    caplog.set_level("DEBUG", "celery.beat")
    occurrence = Occurrence("an-id", 1_800_000_000.0)

    log_decision(Decision("my entry", "shop.bill", occurrence, outcome, "it is so", "another"), 0.0)

    (record,) = caplog.records
    told = pairs(record.getMessage())
    lateness = told.pop("lateness")
    assert float(lateness) == record.singlebeat["lateness"]
    assert told == {
        "event": str(outcome),
        "entry": "my entry",
        "task": "shop.bill",
        "id": "an-id",
        "nominal": "2027-01-15T08:00:00.000+00:00",
        "kind": "scheduled",
        "holder": "another",
        "reason": "it is so",
    }


def test_an_escaped_string_is_readable():
    assert printable("Rechnung täglich 日") == "Rechnung täglich 日"
    assert printable("a\nb\x1b\udcff\U000e0001") == r"a\nb\u001b\udcff\udb40\udc01"


# ---------------------------------------------------------------- the package, and what is said about it


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted((ROOT / "singlebeat").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                yield path, node


def logged() -> Iterator[tuple[str, str]]:
    """Yield each event that the package names, with the method of its log or the function that it is given to."""
    for _, call in calls():
        for each in call.keywords:
            if each.arg == "event" and isinstance(each.value, ast.Constant):
                yield each.value.value, getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_every_line_of_the_package_is_written_by_its_log():
    loggers = {
        path.name
        for path, call in calls()
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in {"getLogger", "get_logger", "get_task_logger"}
    }

    assert loggers == {"log.py"}


def test_the_table_of_events_has_exactly_the_events_that_are_logged():
    assert set(EVENTS) == {event for event, _ in logged()} | {*DecisionType, MESSAGE_LOST, RAN_ELSEWHERE}


def test_events_are_logged_at_the_levels_of_their_table():
    """A level that is computed is one of several."""
    levels = {"exception": logging.ERROR, **{level.lower(): getattr(logging, level) for level in LEVELS}}
    found: dict[str, set[int]] = {}
    for event, method in logged():
        found.setdefault(event, set()).update({levels[method]} if method in levels else EVENTS[event].levels)

    assert found == {event: set(EVENTS[event].levels) for event in found}


@pytest.mark.parametrize("event", EVENTS)
def test_the_meaning_of_an_event_is_a_sentence(event):
    assert re.fullmatch(r"[A-Z`].*\.", EVENTS[event].meaning)


# ---------------------------------------------------------------- signals


def test_every_signal_is_described():
    assert set(signals.DESCRIPTIONS) == set(signals.__all__)
    for name in signals.__all__:
        assert getattr(signals, name).name == name


def test_signals_are_sent_with_the_arguments_of_their_description():
    sent: dict[str, set[str]] = {}
    for _, call in calls():
        for node in (call.func, *call.args):  # or ``partial`` gets the method
            if found := re.fullmatch(r"signals\.(\w+)\.send", ast.unparse(node)):
                sent.setdefault(found[1], set()).update(str(each.arg) for each in call.keywords)

    assert sent == {name: {"sender", *about.arguments} for name, about in signals.DESCRIPTIONS.items()}
