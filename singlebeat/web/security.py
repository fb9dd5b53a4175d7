"""Who may see and change what: roles, passwords and tokens, forged requests, hosts, headers and limits."""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import ipaddress
import os
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import ConfigError

if TYPE_CHECKING:
    from .exchange import PageRequest

__all__ = (
    "COOKIE",
    "HEADERS",
    "Gate",
    "RefusedError",
    "Role",
    "User",
    "Users",
    "hashed_password",
    "hashed_token",
    "is_loopback",
)

#: Name of the cookie and of the form field that hold the token against forged requests.
COOKIE = "singlebeat_token"

#: The header in which a request to the API holds that token, in lower case.
TOKEN_HEADER = "x-singlebeat-token"  # noqa: S105 - its name

#: On every answer: nothing is loaded from elsewhere, no script or style stands in a page, no page is kept or framed.
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",  # with none, browsers send Origin: null over plain HTTP
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
)

#: Hosts by which a browser on this machine asks.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")

#: Headers that a proxy adds, in lower case.
PROXY_HEADERS = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})

#: Changes that a user may make, and passwords of one name that a client may get wrong, within a minute.
MOST_CHANGES, MOST_FAILURES = 120, 10

#: Passwords of all names that a client may get wrong within a minute: behind an unknown proxy, all users are one.
MOST_FAILURES_OF_ALL = 100

#: Requests that wait until their passwords are checked: the other threads of a server answer verified users meanwhile.
MOST_WAITING = 16

TOO_MANY = "too many wrong passwords or tokens: wait a minute"

#: Verified passwords that are remembered, so that a page that polls does not compute a slow hash each time.
REMEMBERED = 256

#: The hash of a password: its salt and digest in base64.
_HASH = re.compile(r"scrypt\$(?:[A-Za-z0-9+/]{4})+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?\$[A-Za-z0-9+/=]+")

#: Cost of the hash of a password: 16 MiB and some 50 ms.
_SCRYPT = {"n": 2**14, "r": 8, "p": 1}


class Role(IntEnum):
    """What a user may do; each role may also do what a lower one may."""

    NONE = 0
    READ = 1
    OPERATE = 2  #: run, pause, resume, and free locks of dead workers
    ADMIN = 3  #: edit, delete, backfill, free a lock by force, resign

    @classmethod
    def named(cls, word: str) -> Role:
        """Return a role by its name in lower case.

        Raises:
            ConfigError: there is no such role.
        """
        try:
            return cls[word.strip().upper()]
        except KeyError:
            words = ", ".join(role.name.lower() for role in cls)
            raise ConfigError(f"{word!r} is no role: use one of {words}") from None


@dataclass(frozen=True, slots=True)
class User:
    """A person or a program that asks."""

    name: str
    role: Role
    #: Asked with a token that no browser sends by itself: such a request cannot be forged by another site.
    by_token: bool = False

    def may(self, role: Role) -> bool:
        """Return whether the user has a role, or a higher one."""
        return self.role >= role

    def check(self, role: Role) -> None:
        """Check that the user has a role, or a higher one.

        Raises:
            RefusedError: the user has not.
        """
        if not self.may(role):
            raise RefusedError(f"that needs the role {role.name.lower()}, and yours is {self.role.name.lower()}")


class RefusedError(Exception):
    """A request is refused; ``status`` and ``headers`` are those of the answer, the message is for the user."""

    def __init__(self, text: str, status: int = 403, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


def hashed_password(password: str, salt: bytes | None = None) -> str:
    """Return the hash of a password for a users file."""
    salt = secrets.token_bytes(16) if salt is None else salt
    made = hashlib.scrypt(password.encode(), salt=salt, maxmem=64 * 1024 * 1024, dklen=32, **_SCRYPT)
    return f"scrypt${base64.b64encode(salt).decode()}${base64.b64encode(made).decode()}"


def hashed_token(token: str) -> str:
    """Return the hash of a bearer token for a users file; a token is random, so a fast hash is enough."""
    return f"token${hashlib.sha256(token.encode()).hexdigest()}"


class Users:
    """The users of a file, with a line ``NAME:ROLE:HASH`` for each password, token, or user of a proxy.

    Args:
        text: of the file. Empty lines and lines that begin with # are skipped. The hash is that of
            ``hashed_password`` or ``hashed_token``, or empty for a user whom a proxy has authenticated.

    Raises:
        ConfigError: a line is wrong; the message has its number, and no hash.
    """

    def __init__(self, text: str) -> None:
        self.roles: dict[str, Role] = {}
        self._passwords: dict[str, str] = {}
        self._tokens: list[tuple[str, User]] = []
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._key = secrets.token_bytes(32)
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, _, rest = line.strip().partition(":")
            word, colon, hashed = rest.partition(":")
            if not name or not colon:
                raise ConfigError(f"line {number} of the users file is not NAME:ROLE:HASH")
            role = Role.named(word)
            if hashed.startswith("token$"):
                self._tokens.append((hashed, User(name, role, by_token=True)))
                continue
            self.roles[name] = role
            if hashed and not _HASH.fullmatch(hashed):
                raise ConfigError(f"line {number} of the users file has an unknown hash: make one with --add-user")
            if hashed:
                self._passwords[name] = hashed

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Users:
        """Return the users of a file.

        Raises:
            ConfigError: the file cannot be read, or a line is wrong.
        """
        try:
            return cls(Path(path).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the users file cannot be read: {exc}") from exc

    @property
    def has_passwords(self) -> bool:
        """Whether a browser can ask for a password."""
        return bool(self._passwords)

    def of_password(self, name: str, password: str) -> User | None:
        """Return the user of a password, or None; an unknown name takes as long as a wrong password."""
        stored = self._passwords.get(name)
        _, salt, _ = (stored or _hash_of_no_user()).split("$")
        made = hashed_password(password, base64.b64decode(salt))
        if not hmac.compare_digest(made, stored or _hash_of_no_user()) or stored is None:
            return None
        self._verified[self._digest(name, password)] = None
        if len(self._verified) > REMEMBERED:
            self._verified.popitem(last=False)
        return User(name, self.roles[name])

    def verified(self, name: str, password: str) -> User | None:
        """Return the user of a password that was found to be right lately, or None; that takes no time."""
        is_known = name in self._passwords and self._digest(name, password) in self._verified
        return User(name, self.roles[name]) if is_known else None

    def _digest(self, name: str, password: str) -> bytes:
        text = f"{name}\0{password}\0{self._passwords.get(name)}"
        return hmac.digest(self._key, text.encode(errors="surrogateescape"), "sha256")

    def of_token(self, token: str) -> User | None:
        """Return the user of a bearer token, or None; all tokens are compared, in constant time."""
        made, found = hashed_token(token), None
        for stored, user in self._tokens:
            if hmac.compare_digest(made, stored):
                found = user
        return found


@lru_cache(maxsize=1)
def _hash_of_no_user() -> str:
    """Return the hash that is computed for an unknown name; no password has it."""
    return hashed_password(secrets.token_urlsafe(32))


class Limit:
    """A limit of events per minute, for each key.

    Args:
        most: events within a minute.
        clock: monotonic seconds.
    """

    KEYS = 10_000

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._events: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: str, count: int = 1) -> bool:
        """Count events of a key if it may have them in this minute, and return whether it may."""
        with self._lock:
            events = self._events.setdefault(key, deque())
            self._events.move_to_end(key)
            if len(self._events) > self.KEYS:
                self._events.popitem(last=False)
            now = self._clock()
            while events and events[0] <= now - 60:
                events.popleft()
            if len(events) + count > self.most:
                return False
            events.extend([now] * count)
            return True

    def give_back(self, key: str) -> None:
        """Forget the last event of a key: it was none."""
        with self._lock:
            if events := self._events.get(key):
                events.pop()


def is_loopback(address: str) -> bool:
    """Return whether an address, or the name localhost, is of this machine only."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


@dataclass(frozen=True, slots=True)
class Gate:
    """Decides who asks, and whether a request is admitted.

    Without users, ``user_header`` and ``resolve_user``, only this machine is admitted, under a name of its own.
    """

    users: Users | None = None
    proxies: Sequence[str] = ()  #: networks whose X-Forwarded-For names the client
    user_header: str = ""  #: in which they name the user, too; empty if they do not
    #: Returns the user of the host's own request, or None.
    resolve_user: Callable[[Any], User | None] | None = None
    #: Of users without a line in the users file: those of a proxy; without authentication, of this machine.
    default_role: Role | None = None
    read_only: bool = False
    hosts: Sequence[str] = ()  #: further names under which the page is asked for; ``*`` for any
    changes: Limit = field(default_factory=lambda: Limit(MOST_CHANGES))
    failures: Limit = field(default_factory=lambda: Limit(MOST_FAILURES))
    failures_of_all: Limit = field(default_factory=lambda: Limit(MOST_FAILURES_OF_ALL))
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    _waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MOST_WAITING))

    def __post_init__(self) -> None:
        try:
            networks = [ipaddress.ip_network(network) for network in self.proxies]
        except ValueError as exc:
            raise ConfigError(f"a trusted proxy is a network like 10.0.0.0/8: {exc}") from None
        if inspect.iscoroutinefunction(self.resolve_user):
            raise ConfigError("resolve_user must be a plain function, which may block: it is called in a thread")
        if self.user_header and not networks:
            raise ConfigError("a user header is believed of trusted proxies only: name the networks of the proxies")
        if networks and not self.authenticates:
            raise ConfigError("a trusted proxy alone names no user: name a users file, or the header in which it does")

    @property
    def authenticates(self) -> bool:
        """Whether users are told apart."""
        return self.users is not None or bool(self.user_header) or self.resolve_user is not None

    def admit(self, request: PageRequest, host_request: object = None) -> User:
        """Return the user of a request.

        Args:
            host_request: the request of the host's framework, for ``resolve_user``.

        Raises:
            RefusedError: the request is refused.
        """
        self._check_host(request)
        user = self.limited(self._identify(request, host_request))
        if request.method not in {"GET", "HEAD"} and not (request.is_of_api and user.by_token):
            _check_origin(request)
            _check_token(request)
        return user

    def limited(self, user: User) -> User:
        """Return a user without a role that a read-only page refuses."""
        return replace(user, role=min(user.role, Role.READ)) if self.read_only else user

    def check_rate(self, user: User, request: PageRequest, *, changes: int = 1) -> None:
        """Count changes.

        Raises:
            RefusedError: with these, the user has made too many changes within a minute.
        """
        key = user.name or request.client
        if not self.changes.take(key, changes):
            raise RefusedError(f"these are more than {self.changes.most} changes in a minute: wait a moment", 429)

    def _check_host(self, request: PageRequest) -> None:
        """Check the name by which the page was asked for: another site may let its own name lead here."""
        if "*" in self.hosts or (self.resolve_user is not None and not self.hosts):
            return
        given = request.headers.get("host", "")
        name = given[: given.rfind(":")] if given.rpartition(":")[2].isdecimal() else given
        if name.lower() not in {*LOCAL_HOSTS, *(host.lower() for host in self.hosts)}:
            raise RefusedError("the page is not served under this host name: allow it with --allow-host", 421)

    def _identify(self, request: PageRequest, host_request: object) -> User:
        if self.resolve_user is not None:
            user = self.resolve_user(host_request)
            if user is None:
                raise RefusedError("you are not signed in", 403)
            return user
        if self._is_proxy(request.client):
            if self.user_header and (user := self._of_proxy(request)) is not None:
                return user
            request = replace(request, client=_forwarded_for(request) or request.client)
        if self.users is not None:
            return self._of_users(request, self.users)
        if self.user_header:
            raise RefusedError("the trusted proxy has named no user", 401)
        if not is_loopback(request.client) or _shows_proxy(request):
            said = "without authentication, the page answers browsers on this machine only, and without a proxy"
            raise RefusedError(f"{said}: name a users file", 403)
        return User("", Role.ADMIN if self.default_role is None else self.default_role)

    def _is_proxy(self, address: str) -> bool:
        with suppress(ValueError):
            found = ipaddress.ip_address(address)
            return any(found in ipaddress.ip_network(network) for network in self.proxies)
        return False

    def _of_proxy(self, request: PageRequest) -> User | None:
        name, *others = request.headers.get(self.user_header.lower(), "").split("\n")
        if others:
            said = f"{self.user_header} was sent {len(others) + 1} times: let the proxy replace that of the client"
            raise RefusedError(said, 400)
        if "," in name:  # a WSGI server joins headers of one name
            said = f"the name in {self.user_header} has a comma: let the proxy replace the header of the client"
            raise RefusedError(said, 400)
        if not name:
            return None
        roles = self.users.roles if self.users is not None else {}
        return User(name, roles.get(name, self.default_role or Role.NONE))

    def of_token(self, request: PageRequest, users: Users, token: str) -> User:
        """Return the user of a bearer token.

        Raises:
            RefusedError: there is none, or there were too many wrong ones.
        """
        user = users.of_token(token.strip())
        if user is None:
            if not self.failures.take(request.client):
                raise RefusedError(TOO_MANY, 429)
            raise RefusedError("wrong token", 401)
        return user

    def _of_users(self, request: PageRequest, users: Users) -> User:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        asks = {"WWW-Authenticate": 'Basic realm="singlebeat", charset="UTF-8"'} if users.has_passwords else {}
        if not given:
            raise RefusedError("sign in", 401, asks)
        if scheme.lower() == "bearer":
            return self.of_token(request, users, given)
        name = password = ""
        if scheme.lower() == "basic":
            with suppress(ValueError):  # no ASCII, no base64, or no UTF-8
                name, _, password = base64.b64decode(given, validate=True).decode().partition(":")
        user = users.verified(name, password) or self._of_guess(request.client, users, name, password)
        if user is None:
            raise RefusedError("wrong name or password", 401, asks)
        return user

    def _of_guess(self, client: str, users: Users, name: str, password: str) -> User | None:
        """Return the user of a password that may be a guess, or None.

        It is counted before it is checked, so that many at once are no more than one after the other.

        Raises:
            RefusedError: there were too many wrong ones, or too many wait.
        """
        if not self._waiting.acquire(blocking=False):
            raise RefusedError("too many passwords are checked right now: try again in a moment", 429)
        try:
            with self._one_at_a_time:  # each takes 16 MiB
                if (user := users.verified(name, password)) is not None:  # by the request before
                    return user
                # By name first: one that goes on with a wrong password must not use up what all have behind a proxy.
                of_name = f"{client} {name}"
                if not (self.failures.take(of_name) and self.failures_of_all.take(client)):
                    raise RefusedError(TOO_MANY, 429)
                if (user := users.of_password(name, password)) is not None:
                    self.failures.give_back(of_name)
                    self.failures_of_all.give_back(client)
                return user
        finally:
            self._waiting.release()


def _shows_proxy(request: PageRequest) -> bool:
    """Return whether a request shows a proxy: by a header, or by HTTP/1.0, which no browser speaks and nginx does."""
    return request.http_version == "1.0" or not PROXY_HEADERS.isdisjoint(request.headers)


def _forwarded_for(request: PageRequest) -> str:
    """Return the address of the client that a proxy had, which it names last; empty if it names none."""
    last = re.split(r"[,\n]", request.headers.get("x-forwarded-for", ""))[-1].strip()
    with suppress(ValueError):
        return str(ipaddress.ip_address(last))
    return ""


def _check_origin(request: PageRequest) -> None:
    """Check that a form was sent from a page of ours, as far as the browser says where it comes from."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_own = origin is None or _netloc(origin) == request.headers.get("host", "")
    # By our own Referrer-Policy, a browser sends the Origin "null" with our own forms.
    if site not in {None, "same-origin"} or not (is_own or (site == "same-origin" and origin == "null")):
        raise RefusedError("the form comes from another site, so nothing was changed", 403)


def _netloc(origin: str) -> str | None:
    """Return the host and the port of an origin, None if it cannot be read."""
    with suppress(ValueError):
        return urlsplit(origin).netloc
    return None


def _check_token(request: PageRequest) -> None:
    cookie = request.cookies.get(COOKIE, "")
    given = request.headers.get(TOKEN_HEADER, "") if request.is_of_api else request.changes.get(COOKIE)
    if not cookie or not hmac.compare_digest(cookie.encode(), given.encode(errors="surrogateescape")):
        if request.is_of_api:
            raise RefusedError("a change by the API needs a bearer token of a users file (--add-token makes one)", 403)
        raise RefusedError(
            "the form is older than your session, or your browser keeps no cookies, so nothing was changed: go back, "
            "reload the page, and send the form again",
            403,
        )
