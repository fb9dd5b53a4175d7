"""Leads a request under ``/api`` to an operation, and answers in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...beat.entries.definition import why_too_deep
from ...connections import RedisError
from ...errors import SinglebeatError
from ..exchange import PageReply
from ..problems import problem_of
from ..security import RefusedError, Role
from .calls import Call
from .description import description
from .entries import ChangedError
from .operations import BY_PATH, READ_ONLY
from .parameters import from_body, from_query

if TYPE_CHECKING:
    from ..board import Board
    from ..exchange import PageRequest
    from ..security import Gate, User
    from .operations import Operation

__all__ = ("Api", "refusal")

JSON, PROBLEM = "application/json", "application/problem+json"


class Api:
    """The operations of one app.

    Args:
        gate: counts the changes of users.
    """

    def __init__(self, board: Board, gate: Gate) -> None:
        self.board, self.gate = board, gate

    def answer(self, request: PageRequest, user: User) -> PageReply:
        """Answer a request of a user who was admitted."""
        try:
            return self._answer(request, user)
        except RefusedError as exc:
            return refusal(exc)
        except ChangedError as exc:
            status = 412 if exc.is_condition else 409
            return _problem(status, "Another process was faster", str(exc), differences=[*exc.differences])
        except RecursionError:
            return _problem(422, "That cannot be done", why_too_deep("the body"))
        except (SinglebeatError, ValueError, RedisError) as exc:
            return _problem(*problem_of(self.board.app, exc))

    def _answer(self, request: PageRequest, user: User) -> PageReply:
        path = request.path.removeprefix("/api")
        if path == "/openapi.json" and request.method == "GET":
            user.check(Role.READ)
            return PageReply(encoded(description(request.root)), kind=JSON)
        methods = BY_PATH.get(path)
        if methods is None:
            raise RefusedError(f"there is no {request.path}: {request.url('/api/openapi.json')} lists all paths", 404)
        operation = methods.get(request.method)
        if operation is None:
            allowed = ", ".join(sorted(methods))
            raise RefusedError(f"{request.path} knows {allowed} only", 405, {"Allow": allowed})
        user.check(operation.role)
        if operation.method != "GET":
            _check_conditions(request, operation)
        given = self._given(request, operation)
        is_change = operation.is_change and operation.method != "GET"
        if is_change:
            self.gate.check_rate(user, request)
        try:
            result = operation.call(Call(self.board, request, user, given))
        finally:
            if is_change:
                self.board.poller.forget()
        body = "" if result.value is None else encoded(result.value)
        return PageReply(body, result.status, JSON, result.headers)

    @staticmethod
    def _given(request: PageRequest, operation: Operation) -> Mapping[str, Any]:
        """Return the values of the parameters by name.

        Raises:
            RefusedError: the body is no JSON object.
            ValueError: a value is unknown, missing or wrong.
        """
        given = from_query(operation.query, request.query)
        body = _object(request.body) if request.body else {}
        if any(each.schema for each in operation.body):
            body = {name: value for name, value in body.items() if name not in READ_ONLY}
        return given | from_body(operation.body, body)


def _check_conditions(request: PageRequest, operation: Operation) -> None:
    """Refuse a condition that the operation does not heed: its client relies on it."""
    for name in ("If-Match", "If-None-Match"):
        given = request.headers.get(name.lower())
        if given is not None and name not in operation.conditions:
            raise RefusedError(
                f"{operation.method} {operation.path} does not heed the header {name}: leave it out", 400
            )
        if given is not None and name == "If-None-Match" and given.strip() != "*":
            raise RefusedError(
                "the header If-None-Match may only be *: store the entry if there is none of this name", 400
            )


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise RefusedError(f"the body is no JSON: {exc}", 400) from None
    if not isinstance(found, dict):
        raise RefusedError("the body is no JSON object", 400)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def refusal(why: RefusedError) -> PageReply:
    """Return the answer to a request that is refused."""
    titles = {401: "No valid token", 404: "There is no such path", 405: "There is no such method"}
    headers = dict(why.headers)
    if why.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="singlebeat"'
    return _problem(why.status, titles.get(why.status, "Refused"), str(why), headers=headers)


def _problem(
    status: int,
    title: str,
    text: str,
    *,
    differences: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> PageReply:
    found: dict[str, Any] = {"status": status, "title": title, "detail": text}
    if differences:
        found["differences"] = [*differences]
    return PageReply(encoded(found), status, PROBLEM, headers or {})


def encoded(value: object) -> str:
    """Return strict JSON in ASCII; numbers that JSON does not have (infinity, NaN) become strings."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value, default=_plain), parse_constant=str))


def _plain(value: Any) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
