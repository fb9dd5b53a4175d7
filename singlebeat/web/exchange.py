"""What a host framework hands to the page, and what it gets back: the page itself knows no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import parse_qsl, unquote, urlencode

from .security import RefusedError

__all__ = ("LARGEST_BODY", "Fields", "PageReply", "PageRequest", "field_of_form")

#: Most bytes of the body of a request.
LARGEST_BODY = 1024 * 1024

#: Most fields of a query or a form: a page lists a hundred entries at most, each with a box to select it.
MOST_FIELDS = 500


class Fields:
    """The fields of a query or a form; a name may have several values.

    Args:
        pairs: names and values, in their order.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.pairs: Sequence[tuple[str, str]] = [*pairs]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the fields of an encoded query or form; bytes that are not UTF-8 stay, as they do in names.

        A field whose name ends with a star was encoded twice: see ``field_of_form``.

        Raises:
            ValueError: there are too many fields.
        """
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="surrogateescape")
        return cls(
            (name[:-1], unquote(value, errors="surrogateescape")) if name.endswith("*") else (name, value)
            for name, value in pairs
        )

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of a field, or the default."""
        return next((value for key, value in self.pairs if key == name), default)

    def all(self, name: str) -> Sequence[str]:
        """Return all values of a field."""
        return [value for key, value in self.pairs if key == name]

    def number(self, name: str, default: int, *, least: int = 1, most: int) -> int:
        """Return a whole number within bounds; the default if there is none."""
        text = self.get(name)
        return min(most, max(least, int(text))) if text.isascii() and text.isdecimal() and len(text) < 10 else default

    def encode(self, **changes: str) -> str:
        """Return the fields as a query, with some values replaced; an empty value removes its field."""
        kept = [(name, value) for name, value in self.pairs if name not in changes]
        return _encoded([*kept, *((name, value) for name, value in changes.items() if value)])


def _encoded(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a query; bytes of names that are not UTF-8 stay, and half a character becomes a ``?``."""
    try:
        return urlencode(pairs, errors="surrogateescape")
    except UnicodeEncodeError:
        return urlencode(pairs, errors="replace")


def field_of_form(name: str, value: object) -> tuple[str, str]:
    """Return the name and the value of a field of a form, as HTML can hold them.

    Bytes that are not UTF-8, and the ends of lines, are percent-encoded, under a name with a star: else a browser would
    send another value.
    """
    text = str(value)
    return (name, text) if text.isprintable() else (f"{name}*", _encoded([("", text)])[1:].replace("+", "%20"))


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request as the page sees it."""

    path: str  #: below the place where the page is mounted; begins with a slash
    query: Fields = field(default_factory=Fields)
    method: str = "GET"  #: in upper case; GET also for HEAD
    form: Fields | None = None  #: of a POST to a page
    body: bytes = b""  #: of a request to the API, JSON
    #: By their names in lower case; of one that was sent several times, each value in a line of its own.
    headers: Mapping[str, str] = field(default_factory=dict)
    http_version: str = "1.1"
    cookies: Mapping[str, str] = field(default_factory=dict)
    client: str = ""  #: address of the other end of the connection; empty if unknown
    root: str = ""  #: the path under which the page is mounted, without a slash at its end
    is_tls: bool = False
    token: str = ""  #: against forged requests: each form carries it
    secret: str = ""  #: of which a host makes such tokens; empty if the token itself stays the same
    nonce: str = ""  #: of the host's own Content-Security-Policy; empty if it has none

    @property
    def is_fragment(self) -> bool:
        """Whether only the live part of the page is asked for."""
        return self.headers.get("hx-request") == "true"

    @property
    def is_of_api(self) -> bool:
        """Whether the API is asked, which answers in JSON."""
        return self.path == "/api" or self.path.startswith("/api/")

    def with_query(self, text: str) -> Self:
        """Return the request with a query.

        Raises:
            RefusedError: the query cannot be read.
        """
        try:
            return replace(self, query=Fields.parse(text))
        except ValueError as exc:
            raise RefusedError(f"the query cannot be read: {exc}", 400) from None

    def with_body(self, body: bytes) -> Self:
        """Return the request with a body: the form of a page, or JSON for the API.

        Raises:
            RefusedError: the body is too large, of another kind, or cannot be read.
        """
        if self.method == "GET":
            return self
        kind, what = ("application/json", "body") if self.is_of_api else ("application/x-www-form-urlencoded", "form")
        if len(body) > LARGEST_BODY:
            raise RefusedError(f"the {what} is larger than {LARGEST_BODY // 1024} KiB", 413)
        given = self.headers.get("content-type", "").partition(";")[0].strip()
        if given != kind and (body or not self.is_of_api):
            raise RefusedError(f"the {what} must be sent as {kind}", 415)
        if self.is_of_api:
            return replace(self, body=body)
        try:
            return replace(self, form=Fields.parse(body.decode()))
        except ValueError as exc:
            raise RefusedError(f"the form cannot be read: {exc}", 400) from None

    @property
    def changes(self) -> Fields:
        """The form of a POST; empty fields for a GET."""
        return self.form if self.form is not None else Fields()

    def url(self, path: str, **query: object) -> str:
        """Return the address of another view; names of entries stand in the query, never in the path."""
        pairs = [(name, str(value)) for name, value in query.items() if value not in (None, "")]
        return f"{self.root}{path}" + (f"?{_encoded(pairs)}" if pairs else "")


@dataclass(frozen=True, slots=True)
class PageReply:
    """The answer to a request."""

    body: str | bytes = ""
    status: int = 200
    kind: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    cookies: Mapping[str, str] = field(default_factory=dict)  #: to set; the host adds SameSite=Strict and its own flags
