"""The directives that print the reference from the code, so that no page can differ from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import Field, fields
from importlib import resources
from typing import TYPE_CHECKING, Any

from sphinx.util.docutils import SphinxDirective

import singlebeat
from singlebeat.config import Config

if TYPE_CHECKING:
    from docutils.nodes import Node
    from sphinx.application import Sphinx

#: The types of settings that users write otherwise than the code.
WRITTEN = {"_Options": "dict", "object": "type | str", "Overlap": "str", "tuple[str, ...]": "list of str"}


class Generated(SphinxDirective):
    """A directive that prints reStructuredText which it computes."""

    def run(self) -> list[Node]:
        """Return the nodes of the text."""
        return self.parse_text_to_nodes("\n".join(self.text()), allow_section_headings=True)

    def text(self) -> Iterator[str]:
        """Yield the lines of the text."""
        raise NotImplementedError


class Settings(Generated):
    """Prints the settings whose names begin with the argument."""

    required_arguments = 1

    def text(self) -> Iterator[str]:
        """Yield each setting with its type, default and meaning."""
        for setting in fields(Config):
            if setting.name.startswith(self.arguments[0]):
                yield f".. confval:: {setting.name}"
                yield f"   :type: {_type(setting)}"
                yield f"   :default: {setting.metadata['fallback'] or _literal(setting.default_factory())}"
                yield ""
                yield f"   {setting.metadata['doc']}"
                yield ""


class Policy(Generated):
    """Prints the fields of an entry's policy from their schema."""

    def text(self) -> Iterator[str]:
        """Yield each field with its meaning."""
        schema = json.loads(resources.files(singlebeat).joinpath("schemas/policy.json").read_text("utf-8"))
        for name, field in schema["properties"].items():
            yield from (f"``{name}``", f"   {field['description']}", "")


def _type(setting: Field[Any]) -> str:
    names = str(setting.type).split(" | ") if setting.type not in WRITTEN else [str(setting.type)]
    words = " or ".join(WRITTEN.get(name, name) for name in names).replace(" | ", " or ")
    return f"{words}, in {setting.metadata['unit']}" if setting.metadata["unit"] else words


def _literal(value: object) -> str:
    """Return a value as users write it."""
    if isinstance(value, float):
        return f"``{value:g}``"
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, str) else value
    return f"``{plain!r}``"


def setup(app: Sphinx) -> dict[str, object]:
    """Add the directives to Sphinx."""
    app.add_directive("policy", Policy)
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
