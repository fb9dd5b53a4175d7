"""The page as an ASGI app, by itself or mounted in another one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .exchange import LARGEST_BODY, PageReply, PageRequest
from .security import COOKIE, HEADERS, Gate, RefusedError
from .site import ASKING_WORKERS, STATIC, Site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ("make_app",)

#: Most requests at once for which the workers are asked. Each occupies a thread for seconds, and anyio has 40 for all.
MOST_ASKING = 4

_asking: RunVar[CapacityLimiter] = RunVar("_asking")  # of an event loop, as anyio's own limiter


class _Guarded:
    """Adds the headers of every answer, and checks who asks before anything is answered."""

    def __init__(self, inner: ASGIApp) -> None:
        self.inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in given)]
            await send(message)

        inner: ASGIApp = _REFUSED if _is_ambiguous(scope) else self.inner
        await inner(scope, receive, guarded)


#: The answer to a request that a proxy before the page may have read as another one.
_REFUSED = Response(
    "a request has Content-Length or Transfer-Encoding, not both",
    400,
    headers={"Connection": "close"},
    media_type="text/plain",
)


def _is_ambiguous(scope: Scope) -> bool:
    """Return whether two headers of a request say where its body ends (RFC 9112, section 6.1)."""
    return {b"content-length", b"transfer-encoding"} <= {name.lower() for name, _ in scope.get("headers", ())}


def make_app(site: Site, gate: Gate, *, nonce: Callable[[Any], str] | None = None) -> Starlette:
    """Return the page as an ASGI app.

    Args:
        nonce: returns the nonce of a request by the host's own Content-Security-Policy.
    """

    async def page(request: Request) -> Response:
        asked = _begun(request, nonce(request) if nonce is not None else "")
        query = request.scope.get("query_string", b"").decode(errors="surrogateescape")
        try:
            asked = asked.with_query(query).with_body(await _body(request))
        except RefusedError as exc:
            if asked.is_of_api:
                return _response(site.refuse(asked, exc), asked)
            return Response(str(exc), exc.status, media_type="text/plain")
        except ClientDisconnect:  # while it sent the body
            return Response(status_code=400)
        return await to_thread.run_sync(answer, asked, request, limiter=_limiter(asked))

    def answer(asked: PageRequest, request: Request) -> Response:
        if asked.method == "GET" and not asked.is_of_api and _came_from_elsewhere(asked):
            return Response(headers={"Refresh": "0"})
        try:
            user = gate.admit(asked, request)
        except RefusedError as exc:
            return _response(site.refuse(asked, exc), asked)
        return _response(site.answer(asked, user), asked)

    page_app = Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=STATIC), name="static"),
            Route("/{path:path}", page, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ],
        middleware=[(_Guarded, (), {})],  # type: ignore[list-item]  # what Middleware is, too
    )
    page_app.state.site = site
    return page_app


async def _body(request: Request) -> bytes:
    """Return the body of a request, of one that is too large only the beginning."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            break
    return bytes(body)


def _limiter(asked: PageRequest) -> CapacityLimiter | None:
    """Return what limits the threads for a request, None for what limits those of all."""
    if asked.path not in ASKING_WORKERS:
        return None
    try:
        return _asking.get()
    except LookupError:
        _asking.set(found := CapacityLimiter(MOST_ASKING))
        return found


def _begun(request: Request, nonce: str) -> PageRequest:
    """Return a request as the page sees it, without query and body."""
    root = request.scope.get("root_path", "").rstrip("/")
    headers = {name: "\n".join(request.headers.getlist(name)) for name in request.headers}
    return PageRequest(
        path=request.scope["path"].removeprefix(root) or "/",  # its URL cannot be built of every query
        method="GET" if request.method == "HEAD" else request.method,
        headers=headers,
        http_version=request.scope.get("http_version", "1.1"),
        cookies=request.cookies,
        client=request.client.host if request.client is not None else "",
        root=root,
        # Any client may say so: it makes no more of its own cookie than one that is sent by TLS only.
        is_tls="https" in {request.scope.get("scheme", "http"), request.headers.get("x-forwarded-proto")},
        token=request.cookies.get(COOKIE) or secrets.token_urlsafe(24),
        nonce=nonce,
    )


def _came_from_elsewhere(asked: PageRequest) -> bool:
    """Return whether a link of another site led here: its request lacks our cookies, which a reload has."""
    return asked.headers.get("sec-fetch-site") == "cross-site" and asked.headers.get("sec-fetch-mode") == "navigate"


def _response(reply: PageReply, asked: PageRequest) -> Response:
    response = Response(reply.body, reply.status, headers=dict(reply.headers), media_type=reply.kind)
    cookies = dict(reply.cookies)
    if asked.cookies.get(COOKIE) != asked.token and not asked.is_of_api:
        cookies[COOKIE] = asked.token
    for name, value in cookies.items():
        response.set_cookie(name, value, path=asked.root or "/", httponly=True, samesite="strict", secure=asked.is_tls)
    return response
