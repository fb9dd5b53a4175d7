"""What a client gives to an operation: named values of a query or a body, each with its type and its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..exchange import Fields

__all__ = ("Parameter", "from_body", "from_query")

Kind = Literal["string", "integer", "boolean", "instant", "object"]

_TYPES: Mapping[str, type] = {"string": str, "integer": int, "boolean": bool, "instant": str, "object": dict}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value that a client gives."""

    name: str
    meaning: str
    kind: Kind = "string"
    is_required: bool = False
    default: str | int | bool | None = None  #: None: the operation gets None
    words: Sequence[str] = ()  #: the only strings that are allowed
    least: int | None = None
    most: int | None = None
    schema: str = ""  #: of an object: its name among the schemas of the description

    @property
    def as_schema(self) -> dict[str, Any]:
        """Its JSON Schema."""
        if self.schema:
            return {"$ref": f"#/components/schemas/{self.schema}"}
        found: dict[str, Any] = {"type": "string" if self.kind == "instant" else self.kind}
        if self.kind == "instant":
            found["format"] = "date-time"
        bounds = {"default": self.default, "minimum": self.least, "maximum": self.most}
        found |= {name: value for name, value in bounds.items() if value is not None}
        if self.words:
            found["enum"] = [*self.words]
        return found

    def read(self, value: object) -> Any:
        """Return a given value, an instant as a datetime.

        Raises:
            ValueError: it is of another type, or out of bounds; the message names the parameter.
        """
        if not isinstance(value, _TYPES[self.kind]) or (self.kind == "integer" and isinstance(value, bool)):
            what = {"instant": "a date and time like 2026-12-01T09:00:00Z", "object": "a JSON object"}
            raise ValueError(f"{self.name} must be {what.get(self.kind, f'of type {self.kind}')}")
        if self.words and value not in self.words:
            raise ValueError(f"{self.name} is {value!r}: use one of {', '.join(filter(None, self.words))}")
        is_bounded = self.least is not None and self.most is not None
        if isinstance(value, int) and is_bounded and not (self.least or 0) <= value <= (self.most or 0):
            raise ValueError(f"{self.name} is {value}: use {self.least} to {self.most}")
        return self._instant(value) if self.kind == "instant" and isinstance(value, str) else value

    def read_text(self, text: str) -> Any:
        """Return a value of a query.

        Raises:
            ValueError: as ``read``.
        """
        if self.kind == "integer" and text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 12:
            return self.read(int(text))
        return self.read({"true": True, "false": False}.get(text, text) if self.kind == "boolean" else text)

    def _instant(self, text: str) -> datetime:
        try:
            when = datetime.fromisoformat(text)
            if when.tzinfo is None:
                raise ValueError("it has no offset")  # noqa: TRY301 - it gets its sentence below
            return when.astimezone(UTC)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.name} is no date and time with offset, like 2026-12-01T09:00:00Z") from None


def from_query(parameters: Sequence[Parameter], query: Fields) -> dict[str, Any]:
    """Return the values of a query by the names of its parameters.

    Raises:
        ValueError: one is unknown, missing or wrong; the message names it.
    """
    given = dict(reversed([*query.pairs]))
    return _read(parameters, given, lambda parameter, text: parameter.read_text(text))


def from_body(parameters: Sequence[Parameter], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a body by the names of its parameters; null means that a value is left out.

    Raises:
        ValueError: as ``from_query``.
    """
    given = {name: value for name, value in body.items() if value is not None}
    return _read(parameters, given, lambda parameter, value: parameter.read(value))


def _read(parameters: Sequence[Parameter], given: Mapping[str, Any], read: Any) -> dict[str, Any]:
    known = {parameter.name: parameter for parameter in parameters}
    if unknown := next((name for name in given if name not in known), None):
        raise ValueError(f"there is no {unknown!r} here: use {', '.join(known) or 'nothing'}")
    if missing := next((each.name for each in parameters if each.is_required and each.name not in given), None):
        raise ValueError(f"{missing} is missing")
    return {
        name: read(parameter, given[name]) if name in given else parameter.default for name, parameter in known.items()
    }
