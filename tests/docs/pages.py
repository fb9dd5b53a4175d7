"""What a page of the docs shows: its blocks, the steps of its reader in them, and the literals in its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from docutils import nodes
from docutils.core import publish_doctree

from tests.support import DOCUMENTS, ROOT

#: The names of all pages, such as ``how-to/redis``.
PAGES = [path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/") for path in DOCUMENTS]


@dataclass(frozen=True)
class Block:
    """A literal block; its language is empty if it is only indented."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.language or 'no language'}: {self.text.splitlines()[0]}"


@dataclass(frozen=True)
class Command:
    """A command that a reader types at the prompt ``$`` of a shell, or at the prompt ``>`` of a client."""

    text: str
    prompt: str = "$"
    #: What the page says that it prints; empty where the page does not show it.
    output: str = ""


@dataclass(frozen=True)
class Excerpt:
    """Lines of the logs of the processes that run."""

    text: str


@dataclass(frozen=True)
class Code:
    """Python, or what the language says."""

    text: str
    language: str


Step = Command | Excerpt | Code


@cache
def _tree(name: str) -> nodes.document:
    path = dict(zip(PAGES, DOCUMENTS, strict=True))[name]
    # docutils leaves out the contents of Sphinx's directives, which hold no blocks, and its roles.
    quiet = {"report_level": 5, "halt_level": 6, "syntax_highlight": "none"}
    return publish_doctree(path.read_text("utf-8"), settings_overrides=quiet)


def blocks(name: str) -> list[Block]:
    """Return the blocks of a page."""
    return [
        Block(name, " ".join(set(node["classes"]) - {"code"}), node.astext())
        for node in _tree(name).findall(nodes.literal_block)
        if not isinstance(node.parent, nodes.system_message)
    ]


def python(name: str) -> list[str]:
    """Return the Python blocks of a page."""
    return [block.text for block in blocks(name) if block.language == "python"]


def literals(name: str) -> list[str]:
    """Return what the sentences and tables of a page set in type, each on one line."""
    return [" ".join(node.astext().split()) for node in _tree(name).findall(nodes.literal)]


def steps(block: Block) -> Iterator[Step]:
    """Split a block into what its reader does at once: each command has its output, and is without its remark."""
    if block.language == "bash":
        yield from map(Command, re.split(r" && |\n", block.text))
    elif block.language == "text":
        yield Excerpt(block.text)
    elif block.language == "console":
        yield from _typed(block.text)
    else:
        yield Code(block.text, block.language)


def _typed(text: str) -> Iterator[Step]:
    before, *typed = re.split(r"(?m)^(?=[$>] )", text)
    if before.strip():
        yield Excerpt(before.strip())
    for part in typed:
        line, _, output = part.partition("\n")
        if line.startswith(">"):  # its further lines are indented
            line, output = f"{line} {output}", ""
        command, _, _ = re.sub(r"\s+", " ", line[2:]).partition(" # ")
        for one in command.strip().split(" && "):
            # What is found in the logs is an excerpt of them.
            yield Excerpt(output.strip()) if one.startswith("grep ") else Command(one, line[0], output.strip())
