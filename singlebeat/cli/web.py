"""The command ``web``: serves the page."""

from __future__ import annotations

import errno
import getpass
import secrets
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError
from ..web import app as page_of
from ..web.security import Role, hashed_password, hashed_token, is_loopback
from .output import UNANSWERED, command, fail

if TYPE_CHECKING:
    from celery import Celery

ROLES = [role.name.lower() for role in Role]


@command(
    "web",
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", type=click.IntRange(1, 65535), default=5556, show_default=True, help="Port to listen on."),
    click.option("--users", type=click.Path(dir_okay=False), help="Users file: a line NAME:ROLE:HASH for each user."),
    click.option(
        "--trust-proxy", multiple=True, metavar="NETWORK", help="Network of proxies whose X-Forwarded-For counts."
    ),
    click.option(
        "--user-header", default="", metavar="HEADER", help="The header in which a trusted proxy names the user."
    ),
    click.option("--role", type=click.Choice(ROLES), help="Role of users whom the users file does not name."),
    click.option("--read-only", is_flag=True, help="Refuse all changes."),
    click.option("--allow-host", multiple=True, metavar="NAME", help="A further name by which browsers ask."),
    click.option("--hide-arguments", is_flag=True, help="Show no arguments of tasks."),
    click.option("--add-user", metavar="NAME", help="Only print a line for the users file; asks for a password."),
    click.option("--add-token", metavar="NAME", help="Only print a new bearer token, and its line for the users file."),
    needs_tasks=False,  # the page imports them itself
)
def web_(
    app: Celery,
    as_json: bool,
    host: str,
    port: int,
    users: str | None,
    trust_proxy: tuple[str, ...],
    user_header: str,
    role: str | None,
    read_only: bool,
    allow_host: tuple[str, ...],
    hide_arguments: bool,
    add_user: str | None,
    add_token: str | None,
) -> None:
    """Serve the page: entries, runs, locks and beats, and what an operator does with them; needs the extra web.

    Without authentication it serves this machine only, and does not start on another address. A proxy or a tunnel on
    this machine counts as this machine: with one, name a users file. Roles: none, read, operate (run, pause, resume),
    admin.
    """
    if add_user or add_token:
        _print_line(add_user or add_token or "", role or "read", is_token=bool(add_token))
        return
    if not is_loopback(host) and not (users or user_header):
        raise ConfigError(
            f"the page would be open to all who reach {host}: name a users file with --users, or a proxy that "
            "authenticates with --trust-proxy and --user-header"
        )
    page = page_of(
        app,
        users=users,
        trust_proxy=trust_proxy,
        user_header=user_header,
        default_role=role,
        read_only=read_only,
        hosts=allow_host if is_loopback(host) or host in {"0.0.0.0", "::"} else (*allow_host, host),  # noqa: S104
        hide_arguments=hide_arguments,
    )
    import uvicorn  # noqa: PLC0415 - an extra

    from ..web.connection import Connection, most_at_once  # noqa: PLC0415 - as above

    shown, backlog = f"[{host}]" if ":" in host else host, max(1, most_at_once() // 2)
    try:
        sockets = _listen(host, port, backlog)
    except OSError as exc:
        why = str(exc.strerror).partition(" (")[0]  # without the address again
        fail(f"the page cannot listen on {shown}:{port}: {why}. Choose another --port or --host", UNANSWERED)
    click.echo(f"The page: http://{shown}:{port}/")
    config = uvicorn.Config(
        page,
        log_level="warning",
        # Its own headers would let a client choose the address from which it seems to come.
        proxy_headers=False,
        server_header=False,
        http=Connection,
        ws="none",
        backlog=backlog,  # asyncio accepts as many at once, before one of them is counted
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=sockets)


def _listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return a listening socket for each address of a host, but for those that this machine does not have.

    Raises:
        OSError: there is none, or another program listens there.
    """
    found, missing = list[socket.socket](), OSError()
    for family, *_, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        try:
            found.append(socket.create_server(address, family=family, backlog=backlog))
        except OSError as exc:
            if exc.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise
            missing = exc  # such as localhost's ::1 on a machine without IPv6
    if not found:
        raise missing
    return found


def _print_line(name: str, role: str, *, is_token: bool) -> None:
    """Print a line for the users file."""
    if ":" in name or not name.isprintable():
        raise ConfigError("the name of a user has no colon and no control character")
    if is_token:
        token = secrets.token_urlsafe(32)
        click.echo(f"The token, which is shown only now: {token}", err=True)
        click.echo(f"{name}:{role}:{hashed_token(token)}")
        return
    password = getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not password:
        raise ConfigError("the password is empty")
    click.echo(f"{name}:{role}:{hashed_password(password)}")
