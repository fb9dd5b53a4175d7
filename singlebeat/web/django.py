"""The page inside Django: ``path("beat/", include("singlebeat.web.django"))``.

Django's own sessions, permissions and CSRF protection decide. A user with the permission ``singlebeat.read``,
``singlebeat.operate`` or ``singlebeat.admin`` has that role. Superusers have all permissions, and other staff may read.

The setting ``SINGLEBEAT_WEB`` is a dictionary, all of it optional: ``app``, the dotted path of the Celery app, by
default the current one; ``resolve_user``, the dotted path of a function that returns the ``User`` of a request, or
None; ``users``, the path of a users file, for the bearer tokens of the API; ``read_only``; ``hide_arguments``.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any

from celery.app import app_or_default
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.http import HttpResponse, RawPostDataException
from django.middleware.csrf import get_token
from django.urls import re_path
from django.utils.module_loading import import_string
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.static import serve

from ..errors import ConfigError
from .exchange import LARGEST_BODY, PageReply, PageRequest
from .security import HEADERS, Gate, RefusedError, Role, User, Users
from .site import STATIC, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

__all__ = ("urlpatterns",)

#: Name of the field of a form that holds Django's token.
TOKEN_FIELD = "csrfmiddlewaretoken"  # noqa: S105 - its name

#: The options in ``SINGLEBEAT_WEB``.
OPTIONS = frozenset({"app", "resolve_user", "users", "read_only", "hide_arguments"})

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def _options() -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(settings, "SINGLEBEAT_WEB", {})
    for name in sorted(map(str, {*found} - OPTIONS)):
        near = get_close_matches(name, OPTIONS, n=1)
        raise ConfigError(f"SINGLEBEAT_WEB: there is no {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    return found


_making = RLock()


def _site() -> Site:
    with _making:  # two first requests may come at once
        return _made_site()


@cache
def _made_site() -> Site:
    options = _options()
    users = options.get("users")
    gate = Gate(users=Users.read(users) if users else None, read_only=bool(options.get("read_only")))
    app = import_string(options["app"]) if options.get("app") else app_or_default()
    return Site(app, gate, hide_arguments=bool(options.get("hide_arguments")), token_field=TOKEN_FIELD)


def user_of(request: HttpRequest) -> User | None:
    """Return the user of a session, with the highest role that Django's permissions give; None without a session."""
    found = getattr(request, "user", None)
    if found is None or not found.is_authenticated or not found.is_active:
        return None
    roles = [role for role in Role if role is not Role.NONE and found.has_perm(f"singlebeat.{role.name.lower()}")]
    least = Role.READ if found.is_staff else Role.NONE
    return User(found.get_username(), max(roles, default=least))


def answer(request: HttpRequest, path: str) -> HttpResponseBase:
    """Answer a request of a page or of the API."""
    request.get_host()  # raises for a name that is not in ALLOWED_HOSTS
    asked, site = _begun(request, path), _site()
    try:
        body = _body(request)
        asked = asked.with_query(request.META.get("QUERY_STRING", ""))
        scheme, _, given = asked.headers.get("authorization", "").partition(" ")
        if asked.is_of_api and scheme.lower() == "bearer" and site.gate.users is not None:
            user = site.gate.limited(site.gate.of_token(asked, site.gate.users, given))
            return _response(site.answer(asked.with_body(body), user), asked)
    except RefusedError as exc:
        return _response(site.refuse(asked, exc), asked)
    reply: HttpResponseBase = csrf_protect(_by_session)(request, asked, body)
    if asked.is_of_api and reply.status_code == 403 and "json" not in reply.headers["Content-Type"]:
        why = "a change by the API needs a bearer token, or, from a browser, Django's CSRF token in X-CSRFToken"
        return _response(site.refuse(asked, RefusedError(why)), asked)
    return reply


def _body(request: HttpRequest) -> bytes:
    """Return the body of a request, which is read before Django looks for its token there.

    Raises:
        RefusedError: the page has no such method, or the body is too large or of another kind.
    """
    if request.method not in METHODS:
        raise RefusedError(f"a page knows {', '.join(METHODS)} only", 405, {"Allow": ", ".join(METHODS)})
    length = request.headers.get("Content-Length") or "0"
    if not length.isdecimal() or len(length) > 19 or int(length) > LARGEST_BODY:
        raise RefusedError(f"the body is larger than {LARGEST_BODY // 1024} KiB", 413)
    try:
        body: bytes = request.body
    except RawPostDataException:  # a middleware has read it as a form of many parts
        raise RefusedError("a form must be sent as application/x-www-form-urlencoded", 415) from None
    return body


def _by_session(request: HttpRequest, asked: PageRequest, body: bytes) -> HttpResponseBase:
    """Answer a request of a browser that is signed in."""
    site, resolve = _site(), _options().get("resolve_user")
    asked = replace(asked, token=get_token(request), secret=request.META["CSRF_COOKIE"])
    try:
        user = (import_string(resolve) if resolve else user_of)(request)
        if user is None:
            if asked.method == "GET" and not (asked.is_of_api or asked.is_fragment):
                return redirect_to_login(request.get_full_path())
            return _response(site.refuse(asked, RefusedError("sign in", 401)), asked)
        asked = asked.with_body(body)
    except RefusedError as exc:
        return _response(site.refuse(asked, exc), asked)
    return _response(site.answer(asked, site.gate.limited(user)), asked)


def _begun(request: HttpRequest, path: str) -> PageRequest:
    """Return a request as the page sees it, without query and body."""
    return PageRequest(
        path=f"/{path}",
        method="GET" if request.method == "HEAD" else str(request.method),
        headers={name.lower(): value for name, value in request.headers.items()},
        cookies=request.COOKIES,
        client=request.META.get("REMOTE_ADDR", ""),
        root=request.path[: len(request.path) - len(path)].rstrip("/"),
        is_tls=request.is_secure(),
    )


def _response(reply: PageReply, asked: PageRequest) -> HttpResponse:
    response = HttpResponse(reply.body, status=reply.status, content_type=reply.kind, headers=dict(reply.headers))
    for name, value in reply.cookies.items():
        response.set_cookie(name, value, path=asked.root or "/", httponly=True, samesite="Strict", secure=asked.is_tls)
    return _with_headers(response)


def _with_headers(response: Any) -> Any:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def static(request: HttpRequest, path: str) -> HttpResponseBase:
    """Return a file that pages load."""
    response: HttpResponseBase = _with_headers(serve(request, path, document_root=str(STATIC)))
    return response


#: A request with a token of ours needs none of Django; ``answer`` lets Django check every other one.
page = csrf_exempt(answer)

# Django's LoginRequiredMiddleware is to leave these alone: a token is no login of Django's, and ``answer`` checks all.
page.login_required = static.login_required = False  # type: ignore[attr-defined]

urlpatterns = [
    re_path(r"^static/(?P<path>[\w.-]+)$", static),
    re_path(r"^(?P<path>.*)$", page),
]
