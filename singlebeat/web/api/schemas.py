"""JSON Schemas of our types, and of what the answers of the API hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from importlib import resources
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import singlebeat

from ...beat.entries.pauses import Pause
from ...beat.entries.state import State
from ...beat.explain import HeldLock
from ...beat.status import ScheduleStatus
from ...beat.store.history import End, Record
from ...diagnosis.doctor import Finding
from ...masking import MASK

__all__ = ("COMPONENTS", "array", "components", "record", "ref")

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INSTANT: Schema = {"type": "string", "format": "date-time"}
_PLAIN: Mapping[object, Schema] = {
    str: STRING,
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    datetime: INSTANT,
    NoneType: {"type": "null"},
    object: {},
    Any: {},
}


def ref(name: str) -> Schema:
    """Return the reference to a schema of the description."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items}


def record(meaning: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {
        **({"description": meaning} if meaning else {}),
        "type": "object",
        "required": [*properties],
        "additionalProperties": False,
        "properties": properties,
    }


def or_null(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def of_type(hint: Any) -> Schema:
    """Return the schema of what a value of a type becomes in JSON."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in {Union, UnionType}:
        return {"anyOf": [of_type(each) for each in args]}
    if origin is tuple and args[-1:] != (...,):
        return array({"anyOf": [of_type(each) for each in args]})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": of_type(args[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence | AbstractSet):
        return array(of_type(args[0]))
    if issubclass(hint, StrEnum):
        return {"enum": [*map(str, hint)]}
    hints = get_type_hints(hint, localns={"Pause": Pause})  # some modules import it for the type checker only
    names = [each.name for each in fields(hint)] if is_dataclass(hint) else list(hint._fields)
    meaning = (hint.__doc__ or "").partition("\n")[0]
    return record(meaning, **{name: of_type(hints[name]) for name in names})


def _stored(name: str) -> Schema:
    """Return the schema of a field of an entry's hash, with its references as they are in the description."""
    text = resources.files(singlebeat).joinpath(f"schemas/{name}.json").read_text("utf-8")
    found: Schema = json.loads(text.replace('"#/$defs/', f'"#/components/schemas/{name}/$defs/'))
    del found["$schema"]
    return found


def _definition() -> Schema:
    """Return the schema of a definition, in which masks may stand for arguments."""
    found = _stored("definition")
    mask = f'"{MASK}" in place of a value that is not shown keeps the stored one.'
    for name in ("args", "kwargs", "options"):
        found["properties"][name]["description"] += f" {mask}"
    return found


def _parts() -> Schema:
    """Return the schema of some parts of a definition."""
    found = _definition()
    properties = {name: ref(f"definition/properties/{name}") for name in found["properties"]}
    return {"description": "Parts of a definition.", "type": "object", "properties": properties}


_META = record(
    "The past of an entry.",
    last_run_at=or_null(INSTANT),
    total_run_count={"type": "integer"},
    since=or_null(INSTANT),
)

_ABOUT_ENTRY: dict[str, Schema] = {
    "name": STRING,
    "state": {"enum": [*map(str, State)]},
    "why": {**STRING, "description": "Why beat cannot use it; empty if it can."},
    "next": {**or_null(INSTANT), "description": "Next nominal time; it has passed if the entry is overdue."},
    "tags": array(STRING),
    "is_static": {"type": "boolean", "description": "It comes from beat_schedule, which replaces its definition."},
}

#: The schemas of the description by their names, each made when it is asked for.
COMPONENTS: Mapping[str, Any] = {
    "definition": _definition,
    "definition_parts": _parts,
    "policy": lambda: _stored("policy"),
    "Entry": lambda: record(
        "An entry; its ETag is the version of definition and policy.",
        **_ABOUT_ENTRY,
        words={**STRING, "description": "Its schedule in words."},
        definition={"anyOf": [ref("definition"), {"type": "null"}], "description": "null if it cannot be read."},
        policy={"anyOf": [ref("policy"), {"type": "null"}], "description": "null if it cannot be read."},
        problems={
            "type": "object",
            "additionalProperties": STRING,
            "description": "What is wrong with its parts; to change the entry, replace all of them.",
        },
        meta=or_null(_META),
    ),
    "Row": lambda: record(
        "An entry as lists show it.",
        **_ABOUT_ENTRY,
        task={**STRING, "description": "Empty if it cannot be read."},
        words=STRING,
        last_end=or_null(ref("End")),
        last_decision=or_null(ref("Record")),
    ),
    "Record": lambda: of_type(Record),
    "End": lambda: of_type(End),
    "Status": lambda: {
        **(status := of_type(ScheduleStatus)),
        "properties": {**status["properties"], "problem": {**STRING, "description": "Empty if all is well."}},
        "required": [*status["required"], "problem"],
    },
    "Finding": lambda: of_type(Finding),
    "Pause": lambda: of_type(Pause),
    "Lock": lambda: {
        **(lock := of_type(HeldLock)),
        "properties": {
            **lock["properties"],
            "key": {**STRING, "description": "Needs the role operate, else empty: it is a digest of the arguments."},
            "task": STRING,
            "args": {**STRING, "description": "The arguments as a string, without secret ones."},
            "entry": STRING,
            "seems_abandoned": {
                "type": "boolean",
                "description": "Its worker has died, or hangs, or could not free it.",
            },
        },
        "required": [*lock["required"], "task", "args", "entry", "seems_abandoned"],
    },
    "Change": lambda: record(
        "A change of an entry, or of a pause of many entries.",
        id=STRING,
        at=INSTANT,
        actor={**STRING, "description": "Who has made it; empty if unknown."},
        by={**STRING, "description": "By what means: api, cli, web, beat_schedule, or raw."},
        entry={**STRING, "description": "Empty for a pause of many entries."},
        action=STRING,
        note=STRING,
        differences={
            "type": "object",
            "additionalProperties": {**array(STRING), "minItems": 2, "maxItems": 2},
            "description": "The parts that differ, before and after, as JSON; empty if absent.",
        },
    ),
    "Problem": lambda: {
        "description": "An error (RFC 9457): the detail says what to do.",
        "type": "object",
        "required": ["title", "status", "detail"],
        "properties": {
            "title": STRING,
            "status": {"type": "integer"},
            "detail": STRING,
            "differences": {
                **array(STRING),
                "description": "Of a conflict: the parts of the entry that another process has changed.",
            },
        },
    },
}


@cache
def components() -> Mapping[str, Schema]:
    """Return all schemas of the description by name."""
    return {name: make() for name, make in COMPONENTS.items()}
