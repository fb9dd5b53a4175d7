"""The directives that print the reference from the code, so that no page can differ from it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, fields
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import singlebeat
import singlebeat.beat.metrics
import singlebeat.tasks.metrics
from singlebeat import beat, signals, tasks
from singlebeat.beat.keys import ENTRY_FIELDS, ENTRY_KEYS, LEASE_KEYS, OWN_KEYS
from singlebeat.config import Config
from singlebeat.events import EVENTS
from singlebeat.exposition import BUILD, Metric
from singlebeat.locks.key import LOCK_FIELDS, LOCK_KEYS
from singlebeat.locks.modes import TOGETHER
from singlebeat.outbox import OUTBOX_KEYS
from singlebeat.overlap import Overlap
from singlebeat.run_results import OUTCOMES, UNSEEN
from singlebeat.web.api.operations import BY_PATH
from singlebeat.web.api.schemas import components

if TYPE_CHECKING:
    from docutils.nodes import Node
    from sphinx.application import Sphinx

    from singlebeat.web.api.operations import Operation
    from singlebeat.web.api.parameters import Parameter

#: The types of settings that users write otherwise than the code.
WRITTEN = {"_Options": "dict", "object": "type | str", "Overlap": "str", "tuple[str, ...]": "list of str"}


class Generated(SphinxDirective):
    """A directive that prints reStructuredText which it computes."""

    def run(self) -> list[Node]:
        """Return the nodes of the text; the page is read anew in each build, because the code may have changed."""
        self.env.note_reread()
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


class Events(Generated):
    """Prints the events of the log."""

    def text(self) -> Iterator[str]:
        """Yield a table of the events."""
        rows = (
            (f"``{name}``", " or ".join(map(logging.getLevelName, event.levels)), event.meaning)
            for name, event in EVENTS.items()
        )
        yield from _table(("Event", "Level", "Meaning"), rows, widths="23 15 62")


class Keys(Generated):
    """Prints the keys in Redis of the ``schedule``, of ``locks``, or of an ``outbox``."""

    required_arguments = 1

    def text(self) -> Iterator[str]:
        """Yield a table of the keys."""
        own = {f":{name}": stored for name, stored in {**LEASE_KEYS, **OWN_KEYS}.items()}
        keys = {
            "schedule": {f"redbeat:{name}": stored for name, stored in {**ENTRY_KEYS, **own}.items()},
            "locks": LOCK_KEYS,
            "outbox": OUTBOX_KEYS,
        }[self.arguments[0]]
        yield from _table(
            ("Key", "Type", "Holds"), ((f"``{key}``", *stored) for key, stored in keys.items()), widths="28 10 62"
        )


class Fields(Generated):
    """Prints the fields of the hash of an ``entry`` or a ``lock``."""

    required_arguments = 1

    def text(self) -> Iterator[str]:
        """Yield a table of the fields."""
        fields = {"entry": ENTRY_FIELDS, "lock": LOCK_FIELDS}[self.arguments[0]]
        yield from _table(
            ("Field", "Holds"), ((f"``{name}``", holds) for name, holds in fields.items()), widths="20 80"
        )


class Metrics(Generated):
    """Prints the metrics of a ``beat`` or a ``worker``."""

    required_arguments = 1

    def text(self) -> Iterator[str]:
        """Yield a table of the metrics."""
        metrics = {"beat": beat.metrics, "worker": tasks.metrics}[self.arguments[0]].METRICS
        rows = ((_with_labels(each), each.type, _meaning(each)) for each in (*metrics.values(), BUILD))
        yield from _table(("Metric", "Type", "Meaning"), rows, widths="45 10 45")


def _with_labels(metric: Metric) -> str:
    labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
    return f"``{metric.name}{labels}``"


def _meaning(metric: Metric) -> str:
    """Return the meaning of a metric, with the words of its labels."""
    words = (
        f" ``{label}``: {', '.join(f'``{word}``' for word in words)}."
        for label, words in metric.labels.items()
        if words
    )
    return f"{_literally(metric.meaning)}{''.join(words)}"


def _literally(text: str) -> str:
    """Return a plain text as reStructuredText, with the names of settings as literals."""
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", r"``\g<0>``", text)


class Alerts(Generated):
    """Prints the alert rules, each with its summary and what to do."""

    def text(self) -> Iterator[str]:
        """Yield a table of the alerts."""
        path = Path(self.env.srcdir, "deploy", "alerts.yml")
        self.env.note_dependency(str(path))
        (group,) = yaml.safe_load(path.read_text("utf-8"))["groups"]
        rows = (
            (
                f"``{rule['alert']}``",
                rule["labels"]["severity"],
                *(rule["annotations"][name].replace("`", "``") for name in ("summary", "action")),
            )
            for rule in group["rules"]
        )
        yield from _table(("Alert", "Severity", "What is wrong", "What to do"), rows, widths="22 10 28 40")


class Signals(Generated):
    """Prints the signals."""

    def text(self) -> Iterator[str]:
        """Yield each signal with its meaning, sender and arguments."""
        for name, described in signals.DESCRIPTIONS.items():
            yield from (f".. py:data:: singlebeat.signals.{name}", "", f"   {described.meaning}", "")
            for argument, meaning in {"sender": described.sender, **described.arguments}.items():
                yield f"   - ``{argument}``: {meaning}"
            yield ""


class Words(Generated):
    """Prints the words of an enumeration, with the comments of its members."""

    required_arguments = 1

    def text(self) -> Iterator[str]:
        """Yield a table of the words."""
        module, _, name = self.arguments[0].rpartition(".")
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        members = getattr(import_module(module), name)
        rows = ((f"``{each}``", " ".join(analyzer.attr_docs[name, each.name]).strip()) for each in members)
        yield from _table(("Word", "Meaning"), rows, widths="25 75")


class Pairs(Generated):
    """Prints which overlap policies are valid for each lock mode."""

    def text(self) -> Iterator[str]:
        """Yield a table of the lock modes."""
        rows = (
            (
                f"``{lock}``",
                "all" if words == set(Overlap) else ", ".join(f"``{each}``" for each in Overlap if each in words),
            )
            for lock, words in TOGETHER.items()
        )
        yield from _table(("``lock``", "``overlap``"), rows, widths="35 65")


class Outcomes(Generated):
    """Prints the words for the ends of runs."""

    def text(self) -> Iterator[str]:
        """Yield a table of the words."""
        rows = ((f"``{word}``", meaning) for word, meaning in {**OUTCOMES, **UNSEEN}.items())
        yield from _table(("Word", "Meaning"), rows, widths="25 75")


class Operations(Generated):
    """Prints the operations of the HTTP API."""

    def text(self) -> Iterator[str]:
        """Yield a section for each path, with its methods."""
        for path, methods in BY_PATH.items():
            yield from (f"``/api{path}``", "-" * (len(path) + 8), "")
            for method, operation in methods.items():
                yield from (f"**{method}** {_literally(operation.meaning)}", "")
                yield f"- Role: ``{operation.role.name.lower()}``. Answers: {_answers(operation)}."
                yield from (f"- {_parameter(each, 'query')}" for each in operation.query)
                yield from (f"- {_parameter(each, 'body')}" for each in operation.body)
                if operation.conditions:
                    yield f"- Headers: {', '.join(f'``{name}``' for name in operation.conditions)}."
                yield ""


def _answers(operation: Operation) -> str:
    schema = operation.answer or {}
    name = schema.get("$ref", "").rpartition("/")[2]
    fields = [name] if name else [f"``{each}``" for each in schema.get("properties", {})]
    statuses = " or ".join(f"``{status}``" for status in operation.status)
    return f"{statuses} with {', '.join(fields)}" if fields else statuses


def _parameter(parameter: Parameter, where: str) -> str:
    """Return what a client gives, and where."""
    required = "" if parameter.is_required else ", optional"
    words = f" {', '.join(f'``{word}``' for word in parameter.words if word)}." if parameter.words else ""
    default = "" if parameter.default in {None, "", False} else f" Default: ``{parameter.default}``."
    about = f"{parameter.kind} in the {where}{required}"
    return f"``{parameter.name}`` ({about}): {_literally(parameter.meaning)}{words}{default}"


class Schemas(Generated):
    """Prints what the objects of the HTTP API hold."""

    def text(self) -> Iterator[str]:
        """Yield a list of fields for each object."""
        for name, schema in components().items():
            if name[0].isupper():
                yield from (name, "~" * len(name), "", schema.get("description", ""), "")
                for field, value in schema["properties"].items():
                    meaning = value.get("description", "")
                    yield f"- ``{field}``{f': {_literally(meaning)}' if meaning else ''}"
                yield ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, widths: str) -> Iterator[str]:
    """Yield the lines of a table."""
    yield from (".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", "")
    for first, *others in (heads, *rows):
        yield f"   * - {first}"
        yield from (f"     - {cell}" for cell in others)
    yield ""


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
    printed = (Alerts, Events, Fields, Keys, Metrics, Operations, Outcomes, Pairs, Policy, Schemas, Settings, Signals)
    for directive in (*printed, Words):
        app.add_directive(directive.__name__.lower(), directive)
    return {"parallel_read_safe": True}
