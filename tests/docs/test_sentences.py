"""The command lines in the sentences of README and docs can be parsed, and the files that they name are there."""

from __future__ import annotations

import importlib.util
import re
import shlex

import click
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.bin.celery import celery

from singlebeat.cli import main
from tests.docs.pages import PAGES, literals
from tests.support import ROOT

#: What a reader puts in the place of a word.
VALUES = {"START": "2026-11-01", "END": "2026-11-08"}

#: What stands before a command, and is none.
ENVIRONMENT = re.compile(r"^(\$ )?([A-Z_]+=\S+ )*(\.venv/bin/)?")


def command_lines(page: str) -> list[list[str]]:
    """Return the words of each command line; a name of a command alone is none."""
    found = [shlex.split(ENVIRONMENT.sub("", text)) for text in literals(page) if text.count("'") % 2 == 0]
    return [
        words for words in found if len(words) > 1 and (words[0] in {"celery", "python"} or words[0] in main.commands)
    ]


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse a command line without running it; what may be added to it may be missing."""
    words = [VALUES.get(word, word) for word in words]
    try:
        context = command.make_context(
            command.name, words, parent, obj=CLIContext(Celery(set_as_current=False), True, "")
        )
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        return
    rest = [*getattr(context, "_protected_args", ()), *context.args]  # click 9 has one list
    if isinstance(command, click.Group) and rest and rest != ["COMMAND"]:
        _, inner, words = command.resolve_command(context, rest)
        parse(inner, words, context)


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)])
def test_the_command_lines_in_the_sentences_of_a_page_are_right(page):
    for program, *words in command_lines(page):
        if program == "celery":
            parse(celery, words)
        elif program == "python":
            module, *paths = (
                word for word in words if word != "-m" and not word.startswith("-") and not word.isdigit()
            )
            assert importlib.util.find_spec(module), f"there is no module {module}"
            assert all((ROOT / path).exists() for path in paths)
        else:
            parse(main, [program, *words])


@pytest.mark.parametrize("line", ["celery singlebeat explode", "celery -A shop singlebeat edit e --disabled"])
def test_a_command_line_with_an_error_is_found(line):
    with pytest.raises(click.UsageError):
        parse(celery, line.split()[1:])


def test_each_test_that_a_page_names_exists():
    texts = [page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.rst")]
    named = [found for text in texts for found in re.findall(r"``(tests/\S+[.]py)``: ``(\w+)``", text)]

    assert len(named) > 10
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"
