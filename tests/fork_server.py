"""Starts Celery commands as forks of a process that has imported Celery: the imports are half the work of a start.

Each fork has the environment, directory and arguments of its command, and imports the app under test by itself. It
becomes a child of the test process, as if this had started it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

#: What a worker and a beat import.
IMPORTED = (
    *("celery.bin.celery", "celery.apps.worker", "celery.apps.beat", "celery.worker.consumer", "celery.events"),
    *("celery.concurrency.prefork", "celery.concurrency.thread", "celery.concurrency.solo", "celery.backends.redis"),
    *("kombu.transport.redis", "kombu.transport.virtual", "redbeat.schedulers", "singlebeat"),
)

#: How the variables begin that Python and the linker read as a process starts.
READ_AT_START = ("PYTHON", "LD_")

#: Pools that must patch modules before the imports.
PATCHES = ("gevent", "eventlet")

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_BYTES = 1 << 20


class Forked:
    """A Celery command that was forked; its methods are those of ``subprocess.Popen``."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._polling = threading.Lock()
        self.stdout = os.fdopen(output, "r", errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        with self._polling:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code as soon as the process has ended.

        Raises:
            subprocess.TimeoutExpired: it runs after so many seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)


def can_fork(args: tuple[str, ...], env: Mapping[str, str]) -> bool:
    """Return whether a fork of the server behaves as a process that starts with these arguments and variables."""
    given = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()}
    own = {name for name in env if name.startswith(READ_AT_START) and env[name] != given.get(name)}
    return sys.platform == "linux" and not own and not any(arg.endswith(PATCHES) for arg in args)


def fork(args: tuple[str, ...], *, env: Mapping[str, str], cwd: Path | str | None) -> Forked:
    """Start ``celery args`` in its own session; it dies with this process, even if this process is killed."""
    with _mutex:
        server = _server(os.getpid())
        output, its_output = os.pipe()
        request = {"args": args, "env": dict(env), "cwd": str(cwd or Path.cwd())}
        socket.send_fds(server, [json.dumps(request).encode()], [its_output])
        os.close(its_output)
        return Forked(int(server.recv(100)), output)


_mutex = threading.Lock()


@functools.cache
def _server(pid: int) -> socket.socket:
    """Return the connection to the server of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the child of a child that has ended becomes ours
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
    subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(pid)],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path()},
    )
    theirs.close()
    return ours


def python_path() -> str:
    """Return the path on which Celery commands find the tests' modules."""
    root = Path(__file__).parent.parent
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, (str(root / "tests/without_shell"), str(root), given)))


def _serve(requests: socket.socket, parent: int) -> None:
    """Fork for each request, until the parent has ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    while True:
        text, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 1)
        if not text:
            return
        if pid := os.fork():
            os.waitpid(pid, 0)
        elif os.fork():
            os._exit(0)
        else:
            while os.getppid() != parent:
                time.sleep(0.0001)
            requests.send(str(os.getpid()).encode())
            requests.close()
            _run(fds[0], parent, **json.loads(text))
        os.close(fds[0])


def _run(output: int, parent: int, args: list[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    """Become the process of a command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.chdir(cwd)
    before = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.path[:] = [cwd, *env["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if path not in before)]
    sys.argv = ["celery", *args]
    runpy.run_module("celery", run_name="__main__", alter_sys=True)
    raise SystemExit


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
