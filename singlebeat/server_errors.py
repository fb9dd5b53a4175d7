"""What to do about an error of a Redis server, by its words."""

from __future__ import annotations

import re

__all__ = (
    "NO_CONNECTION",
    "advice",
    "advice_of_writes",
    "denied_command",
    "is_crowded",
    "is_denied",
    "is_full",
    "is_key_denied",
    "is_login_refused",
    "says_disk_full",
    "with_advice",
)

#: Matches that refusal of a command, or of one in a pipeline.
_DISK_FULL = re.compile(r"(^|caused error: )MISCONF")

#: Errors that concern every write, and what to do.
_ADVICE = {
    "READONLY": "It is a replica: name the primary, or the Sentinels that know it",
    "OOM": "Its memory is full: free some, or raise maxmemory",
    "MISCONF": "It cannot save to its disk: see its log",
    "NOREPLICAS": "It has too few replicas (min-replicas-to-write)",
}

#: Errors of a login that is refused, and what to do.
_LOGIN = "Correct the user and the password in its URL or its options"
_NO_LOGIN = (
    *("WRONGPASS", "NOAUTH", "invalid username-password pair", "Authentication required"),
    "HELLO must be called with the client already authenticated",
)

#: What to do about a server that accepts no more connections.
NO_CONNECTION = (
    "Raise maxclients on that server, or end what holds so many connections (CLIENT LIST names them). Beats and "
    "workers that are connected work on: one that you start again before that finds no connection"
)

#: The codes of the same errors by the words that are left when redis-py has removed the code.
_WITHOUT_CODE = {
    "read only replica": "READONLY",
    "used memory > 'maxmemory'": "OOM",
    "unable to persist": "MISCONF",
    "Not enough good replicas": "NOREPLICAS",
}


def advice_of_writes(error: str) -> str:
    """Return the advice to add to an error that concerns every write; empty for any other error."""
    codes = (*_ADVICE, *_WITHOUT_CODE)
    code = next((code for code in codes if code in error), "")
    return f". {_ADVICE[_WITHOUT_CODE.get(code, code)]}" if code else ""


def advice(exc: Exception) -> str:
    """Return the advice to add to an error of a Redis server; empty if there is none."""
    if is_login_refused(exc):
        return f". {_LOGIN}"
    if is_crowded(exc):
        return f". {NO_CONNECTION}"
    return _acl_hint(exc) or advice_of_writes(str(exc))


def is_full(error: Exception | str) -> bool:
    """Return whether the server's memory is full, by its error; it refuses only what may need more, then."""
    return "used memory > 'maxmemory'" in str(error)


def is_crowded(error: Exception | str) -> bool:
    """Return whether a server accepts no more connections, by its error."""
    return "max number of clients" in str(error)


def is_login_refused(error: Exception | str) -> bool:
    """Return whether a server refuses user and password, by its error."""
    return any(text in str(error) for text in _NO_LOGIN)


def with_advice(exc: Exception) -> str:
    """Return an error of a server with the advice about it; an error of our own may have that in its words already."""
    text, _, _ = str(exc).partition(" : <redis.")  # redis-py adds the reprs of its clients, as of sentinels
    text, hint = text.rstrip("."), advice(exc)
    return text if hint in text else f"{text}{hint}"


def _acl_hint(exc: Exception) -> str:
    """Return the advice to add to an error of a user who may not run a command; empty for any other error."""
    if command := denied_command(str(exc)):
        return f": grant +{command} (docs, Rights)"
    if is_key_denied(exc):
        return ": grant all keys with the prefix of that key, which ACL LOG on the server names (docs, Rights)"
    # Redis before 7.2 does not name the command of a script.
    return (
        " (celery singlebeat doctor, or ACL LOG on the server, names the command; docs, Rights)"
        if is_denied(exc)
        else ""
    )


_COMMAND = re.compile(r"no permissions to run the '([^']+)' command")


def denied_command(error: str) -> str:
    """Return the command that the user may not run according to an error; empty if the error names none."""
    if "EXEC without MULTI" in error:  # the only trace in redis-py of a transaction whose MULTI was refused
        return "multi"
    found = _COMMAND.search(error)
    return found[1].lower() if found else ""


#: The errors of a user who may not use a key, of calls and of commands in scripts, from Redis 6.2 on.
_KEY_DENIED = (
    *("no permissions to access a key", "no permissions to access one of the keys"),
    "can't access at least one of the keys",
)


def is_key_denied(error: Exception | str) -> bool:
    """Return whether the user may not use a key, by an error of a Redis server, which does not name the key."""
    return any(text in str(error).lower() for text in _KEY_DENIED)


def is_denied(error: Exception | str) -> bool:
    """Return whether the user lacks a right, by an error of a Redis server."""
    return (
        bool(denied_command(str(error)))
        or is_key_denied(error)
        or any(text in str(error).lower() for text in ("noperm", "no permissions to", "can't run this command"))
    )


def says_disk_full(exc: Exception) -> bool:
    """Return whether a server refuses all scripts and pings because it cannot save to its disk, as Redis 7 does."""
    return _DISK_FULL.search(str(exc)) is not None
