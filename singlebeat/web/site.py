"""The page without a framework: takes a request and its user, and returns an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..advice import sentence
from ..beat.calendar.words import in_words
from ..connections import RedisError
from ..diagnosis.code import LoadingError, load_code
from ..errors import ConflictError, SinglebeatError, UnknownEntryError
from ..log import Log
from ..lua import noting_answers
from . import edits
from .actions import ACTIONS, FORMS, SAID, Action, Form, Page
from .api.api import Api, refusal
from .board import Board, policy_of, raw_schedule, tags_of
from .exchange import PageReply
from .problems import problem_of
from .render import render, zone_name, zone_of
from .security import COOKIE, RefusedError, Role
from .views import VIEWS, View

if TYPE_CHECKING:
    from celery import Celery

    from .exchange import PageRequest
    from .security import Gate, User

__all__ = ("ASKING_WORKERS", "STATIC", "Site")

log = Log(__name__)

#: The files that pages load; they lie beside this one.
STATIC = Path(__file__).parent / "static"

#: In which zone times can be shown.
ZONES = ("entry", "mine", "utc")

#: Seconds for which a request waits for another one that imports the modules of tasks.
LOADS_WITHIN = 2.0

#: The paths for which the workers are asked, which takes seconds.
ASKING_WORKERS = frozenset({"/why", "/findings", "/free", "/api/explain", "/api/doctor", "/api/unlock"})

_FORMS = {**FORMS, "/edit": Form(edits.ask, Role.ADMIN)}
_ACTIONS = {
    **ACTIONS,
    "/edit": Action(edits.save, Role.ADMIN),
    "/preview": Action(edits.preview, Role.ADMIN, is_change=False),
}


class Site:
    """The page of one app.

    Args:
        hide_arguments: show no arguments of tasks.
        gate: counts the changes of users.
        token_field: name of the field of a form that holds the token against forged requests.
    """

    def __init__(self, app: Celery, gate: Gate, *, hide_arguments: bool = False, token_field: str = COOKIE) -> None:
        self.app, self.gate = app, gate
        self._said_why = ""  #: why the page does not know all tasks, as the log has it
        self.board = Board(app, hide_arguments=hide_arguments, read_only=gate.read_only)
        self.api = Api(self.board, gate)
        self.token_field = token_field

    @noting_answers()
    def answer(self, request: PageRequest, user: User) -> PageReply:
        """Answer a request of a user who was admitted; an error becomes a page that says what to do."""
        # Not when the page is mounted: the module that does that may be one which the modules of tasks import.
        try:
            why = load_code(self.app, patience=LOADS_WITHIN)
        except LoadingError:  # the page asks again; it may not hold all threads of its host
            return self.refuse(request, RefusedError("the modules of tasks are being imported: try again", 503), user)
        if why != self._said_why:
            self._said_why = why
            log.warning("the page does not know all tasks", event="not_imported", reason=why)
        try:
            user.check(Role.READ)  # before all else: an error shows the state of the schedule, too
            return self.api.answer(request, user) if request.is_of_api else self._answer(request, user)
        except RefusedError as exc:
            return self.refuse(request, exc, user)
        except (SinglebeatError, ValueError, RedisError) as exc:
            if isinstance(exc, RedisError) and request.is_fragment:  # the page keeps what it shows, its header says why
                context = {**self._common(request, user), "header": self.board.snapshot}
                return PageReply(render("status.html", context), headers={"HX-Reswap": "none"})
            problem = problem_of(self.app, exc)
            if isinstance(exc, UnknownEntryError) and request.is_fragment and request.form is None:
                # The entry was deleted meanwhile. The script swaps no other status in; what it shows asks for nothing.
                gone = self._fail(request, user, *problem._replace(status=200))
                return replace(gone, headers={"HX-Retarget": "#live", "HX-Reswap": "outerHTML"})
            return self._fail(request, user, *problem)

    def refuse(self, request: PageRequest, why: RefusedError, user: User | None = None) -> PageReply:
        """Answer a request that is refused; without a user, the answer shows nothing of the schedule."""
        if request.is_of_api:
            return refusal(why)
        context = {"title": "Refused", "text": str(why)}
        body = render("error.html", {**self._common(request, user), **context})
        return PageReply(body, why.status, headers=why.headers)

    def _answer(self, request: PageRequest, user: User) -> PageReply:
        if request.method not in {"GET", "POST"}:
            raise RefusedError("a page knows GET and POST only", 405, {"Allow": "GET, POST"})
        if request.form is not None:
            action = _ACTIONS.get(request.path)
            if action is None:
                return self._fail(request, user, 404, "There is no such page", request.path)
            user.check(action.role)
            self._check_clock(request)
            if action.is_change:
                self.gate.check_rate(user, request, changes=max(1, len(set(request.form.all("name")))))
            done = action.act(self.board, request, user)
            if action.is_change:
                self.board.poller.forget()
            return done if isinstance(done, PageReply) else self._show(request, user, done)
        if (form := _FORMS.get(request.path)) is not None:
            user.check(form.role)
            return self._show(request, user, form.show(self.board, request, user))
        view = VIEWS.get(request.path)
        if view is None:
            return self._fail(request, user, 404, "There is no such page", request.path)
        user.check(view.role)
        etag = self._etag(request, user) if request.is_fragment and view.is_live else ""
        if etag and request.headers.get("if-none-match") == etag:
            return PageReply(status=304, headers={"ETag": etag})
        shown = view.show(self.board, request, user)
        return shown if isinstance(shown, PageReply) else self._show(request, user, shown, view)

    def _check_clock(self, request: PageRequest) -> None:
        """Refuse a form that shows wall clocks in another zone than that in which they would be read now."""
        shown = request.changes.get("clock")
        if shown and shown != str(self.board.zone):
            text = f"beat reads wall clocks in {self.board.zone} by now, and this form shows them in {shown}"
            raise ConflictError(f"{text}: load it anew, and look at its times")

    def _etag(self, request: PageRequest, user: User) -> str:
        zone = request.cookies.get("singlebeat_zone", "")
        forms = request.secret or request.token
        about = (self.board.snapshot.stamp, request.path, request.query.pairs, user, forms, zone, __version__)
        return f'"{hashlib.sha256(repr(about).encode(errors="replace")).hexdigest()[:20]}"'

    def _common(self, request: PageRequest, user: User | None) -> dict[str, Any]:
        choice = request.cookies.get("singlebeat_zone", "entry")
        return {
            "request": request,
            "url": request.url,
            "user": user,
            "Role": Role,
            "app": self.app.main or "",
            "cookie": self.token_field,
            "read_only": self.gate.read_only,
            "hide_arguments": self.board.hide_arguments,
            "zones": ZONES,
            "zone_choice": choice if choice in ZONES else "entry",
            "zone_name": zone_name,
            "clock": lambda: str(self.board.zone),
            "zone_of": lambda entry: zone_of(choice, self.board.zone_of(entry)),
            "own_zone": self.board.zone_of,
            "tags": tags_of,
            "is_static": self.board.is_static,
            "policy_of": policy_of,
            "in_words": in_words,
            "raw": raw_schedule,
            "shown_call": self.board.shown_call,
            "masked_text": self.board.masked_text,
            "said": SAID,
            "differences": self.board.differences,
            "sentence": sentence,
            "many_paused": self.board.many_paused,
            "etag": "",
            "header": None,
            "now": None,
        }

    def _show(self, request: PageRequest, user: User, page: Page, view: View | None = None) -> PageReply:
        snapshot = self.board.snapshot
        etag = self._etag(request, user) if view is not None and view.is_live else ""
        context: Mapping[str, Any] = {
            **self._common(request, user),
            "header": snapshot,
            "etag": etag,
            "now": self.board.now if snapshot.state is not None else None,
            **page.context,
        }
        return PageReply(render(page.template, context), page.status, headers={"ETag": etag} if etag else {})

    def _fail(self, request: PageRequest, user: User, status: int, title: str, text: str) -> PageReply:
        context = {**self._common(request, user), "header": self.board.snapshot, "title": title, "text": text}
        return PageReply(render("error.html", context), status)
