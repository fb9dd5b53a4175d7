"""The OpenAPI description, made from the table of operations."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ... import __version__
from .operations import BY_PATH, READ_ONLY
from .schemas import STRING, components, ref

if TYPE_CHECKING:
    from .operations import Operation
    from .parameters import Parameter

__all__ = ("description",)

#: The errors that an operation may answer with, by status: when, and for which operations.
ERRORS: Mapping[int, str] = {
    400: "The request cannot be read.",
    401: "No token was given, or it is wrong.",
    403: "The role of the user is too low, or the request was forged.",
    404: "There is no such entry.",
    409: "Another process was faster, or a lock is not free.",
    412: "The entry has another version than If-Match names, or there is none.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    422: "What was given cannot be used.",
    429: "Too many changes or wrong passwords in a minute.",
    503: "A server is unreachable, or refuses what is needed.",
}

_ABOUT = (
    "What operators do with the entries, runs and locks of a Celery app. Names of entries stand in the query. A change "
    "needs a bearer token; a browser that is signed in otherwise sends the token of its cookie in the header "
    "X-Singlebeat-Token. Arguments are masked as on the page. Some texts name commands, such as celery singlebeat "
    "changes: the operation has the same name, but for add, edit and delete (PUT, PATCH and DELETE /entry), list "
    "(/entries), show (/entry), trigger (/run), and pause and resume with --all or --tag (/pause-many, /resume-many)."
)


def description(root: str) -> Mapping[str, Any]:
    """Return the OpenAPI document.

    Args:
        root: the path under which the page is mounted.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "singlebeat", "version": __version__, "description": _ABOUT},
        "servers": [{"url": f"{root}/api"}],
        "security": [{"token": []}],
        "paths": {
            path: {method.lower(): _operation(each) for method, each in methods.items()}
            for path, methods in BY_PATH.items()
        },
        "components": {
            "schemas": components(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.meaning.partition(". ")[0].rstrip("."),
        "description": f"{operation.meaning} Role: {operation.role.name.lower()}.",
        "parameters": [*(_in_query(each) for each in operation.query), *map(_in_header, operation.conditions)],
        "responses": {
            **{str(status): _answer(operation, status) for status in operation.status},
            **{str(status): _problem(status) for status in errors_of(operation)},
        },
    }
    if operation.body:
        found["requestBody"] = {
            "required": any(each.is_required for each in operation.body),
            "content": {"application/json": {"schema": _body(operation)}},
        }
    return found


def _body(operation: Operation) -> Mapping[str, Any]:
    properties = {each.name: {**each.as_schema, "description": each.meaning} for each in operation.body}
    if any(each.schema for each in operation.body):
        properties |= {name: {"readOnly": True} for name in READ_ONLY}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [each.name for each in operation.body if each.is_required],
        "properties": properties,
    }


def errors_of(operation: Operation) -> list[int]:
    """Return the errors that an operation may answer with."""
    found = {400, 401, 403, 429, 503}
    if operation.query:
        found.add(422)
    if any(each.name == "name" for each in operation.query):
        found.add(404)
    if operation.method != "GET":
        found |= {409, 413, 415, 422}
    if operation.conditions:
        found.add(412)
    return sorted(found)


def _in_query(parameter: Parameter) -> Mapping[str, Any]:
    return {
        "name": parameter.name,
        "in": "query",
        "required": parameter.is_required,
        "description": parameter.meaning,
        "schema": parameter.as_schema,
    }


def _in_header(name: str) -> Mapping[str, Any]:
    meaning = {
        "If-Match": "Version of the entry, the ETag of its last answer, or several: the change is refused with 412 if "
        "the entry has another one, or if there is none. `*`: any version of an entry that exists.",
        "If-None-Match": "`*`: store the entry only if there is none of this name.",
    }
    return {"name": name, "in": "header", "required": False, "description": meaning[name], "schema": STRING}


def _answer(operation: Operation, status: int) -> Mapping[str, Any]:
    found: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if operation.answer is not None and status != HTTPStatus.NO_CONTENT:
        found["content"] = {"application/json": {"schema": operation.answer}}
    if operation.has_version:
        found["headers"] = {"ETag": {"description": "Version of definition and policy.", "schema": STRING}}
    return found


def _problem(status: int) -> Mapping[str, Any]:
    return {"description": ERRORS[status], "content": {"application/problem+json": {"schema": ref("Problem")}}}
