"""The page: what beats, entries, runs and locks do, and the actions of an operator; needs the extra ``web``.

The page adds no rule of its own: each view reads, and each action calls, what the commands read and call. Its parts:

- ``exchange`` is a request and its answer, ``security`` decides who asks and what is admitted;
- ``views`` and ``actions`` are functions that know neither HTTP nor a framework, ``board`` is what they read;
- ``poller`` reads the state of the schedule once for all viewers;
- ``site`` leads a request to a view or an action, ``render`` and ``templates`` make HTML of the result;
- ``server`` is the adapter to ASGI, ``connection`` bounds the connections of the command ``web``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import os

    from celery import Celery
    from starlette.applications import Starlette

    from .security import Role, User, Users

__all__ = ("app",)


def app(
    celery_app: Celery,
    *,
    resolve_user: Callable[[Any], User | None] | None = None,
    users: Users | str | os.PathLike[str] | None = None,
    trust_proxy: Sequence[str] = (),
    user_header: str = "",
    default_role: Role | str | None = None,
    read_only: bool = False,
    hosts: Sequence[str] = (),
    hide_arguments: bool = False,
    nonce: Callable[[Any], str] | None = None,
) -> Starlette:
    """Return the page of a Celery app as an ASGI app, to be mounted in another one.

    Without ``resolve_user``, ``users`` and ``user_header``, it answers this machine only. A proxy or a tunnel on this
    machine counts as this machine: with one, name a users file.

    >>> fastapi_app.mount("/beat", singlebeat.web.app(celery_app, resolve_user=current_user))  # doctest: +SKIP

    Args:
        resolve_user: returns the ``User`` of the host's own request, or None for a request that is refused.
        users: a users file, for passwords and bearer tokens.
        trust_proxy: networks of proxies that name the client last in X-Forwarded-For.
        user_header: the header in which they name the user, too, in place of that of the client.
        default_role: of users whom the users file does not name; by default none, and without authentication admin.
        read_only: refuse all changes.
        hosts: names under which the page may be asked for, besides those of this machine; with ``resolve_user`` any.
        hide_arguments: show no arguments of tasks.
        nonce: returns the nonce of a request, where the host adds a Content-Security-Policy of its own.

    Raises:
        ConfigError: the extra ``web`` is not installed, or an argument is wrong.
    """
    try:
        from .server import make_app  # noqa: PLC0415 - an extra
        from .site import Site  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError(f"the page needs the extra web: pip install celery-singlebeat[web] ({exc})") from exc
    from .security import Gate, Role, Users  # noqa: PLC0415

    gate = Gate(
        users=users if isinstance(users, Users | None) else Users.read(users),
        proxies=trust_proxy,
        user_header=user_header,
        resolve_user=resolve_user,
        default_role=Role.named(default_role) if isinstance(default_role, str) else default_role,
        read_only=read_only,
        hosts=hosts,
    )
    return make_app(Site(celery_app, gate, hide_arguments=hide_arguments), gate, nonce=nonce)
