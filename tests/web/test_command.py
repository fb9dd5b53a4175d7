"""The command that serves the page, as a process of its own."""

from __future__ import annotations

import http.client
import os
import re
import resource
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest
from celery.schedules import schedule

from singlebeat import Entry
from singlebeat.web.security import hashed_token
from tests.support import free_port, wait_until

#: The celery command with shorter times between the checks of a connection.
QUICK = (
    "import singlebeat.web.connection as connection; connection.CHECKED_EVERY = 0.4\n"
    "from celery.__main__ import main; main()"
)

#: The beginning of a request, and nothing more.
UNFINISHED = b"GET / HTTP/1.1\r\nX: "


@pytest.fixture
def serve(server, redis, tmp_path) -> Iterator[Callable[..., int]]:
    """Start the command, and return its port. What the command logs is in the file ``log``.

    Args:
        quick: shorten the times between the checks of a connection.
        most_files: most files that the process may open.
    """
    source = f"from celery import Celery\napp = Celery('shop', broker={server.celery_url!r})\n"
    (tmp_path / "shop.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "PYTHONUNBUFFERED": "1"}

    @contextmanager
    def started(port: int, quick: bool, most_files: int) -> Iterator[None]:
        python = ("-c", QUICK) if quick else ("-m", "celery")
        command = [sys.executable, *python, "-A", "shop", "singlebeat", "web", "--port", str(port)]
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            try:
                if most_files:  # before it is so far that it opens any
                    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most_files, most_files))
                assert process.stdout.readline() == f"The page: http://127.0.0.1:{port}/\n"
                wait_until(partial(_is_reached, port), what="the page")
                yield
            finally:
                process.terminate()
                process.wait(10)

    with ExitStack() as stack:

        def serve(*, quick: bool = False, most_files: int = 0) -> int:
            port = free_port()
            stack.enter_context(started(port, quick, most_files))
            return port

        yield serve


def _is_reached(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionError:
        return False
    return True


def _get(port: int, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


def _answers(port: int) -> bool:
    with suppress(OSError):
        return "There is no entry yet" in _get(port)
    return False


def test_the_command_serves_the_page_until_it_is_told_to_end(serve):
    text = _get(serve())

    assert re.search(r'class="brand" [^>]*>singlebeat <small>shop</small>', text)
    assert "There is no entry yet" in text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "127.0.0.1:{}: Address already in use. Choose"),
        (("--host", "::1"), "[::1]:{}: "),
        (("--host", "localhost"), "localhost:{}: Address already in use. Choose"),
        (("--host", "198.51.100.7", "--users", "users"), "198.51.100.7:{}: Cannot assign requested address. Choose"),
        (("--host", "no.such.host.invalid", "--users", "users"), "no.such.host.invalid:{}: "),
    ],
    ids=["port", "IPv6", "name", "address", "host"],
)
def test_an_address_where_the_command_cannot_listen_is_one_error(server, tmp_path, options, why):
    (tmp_path / "users").write_text(f"boss:admin:{hashed_token('admin')}\n")
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = taken.getsockname()[1]
        with suppress(OSError):  # without IPv6 the error is another one
            stack.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6))
        options = ("-b", server.celery_url, "singlebeat", "web", "--port", str(port), *options)
        command = [sys.executable, "-m", "celery", *options]

        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"Error: the page cannot listen on {why.format(port)}")
    assert ended.stderr.endswith(". Choose another --port or --host\n")
    assert ended.stderr.count("\n") == 1


def test_unfinished_requests_keep_no_one_from_the_page(serve, tmp_path):
    """There are more of them than files that the process may open."""
    port = serve(most_files=512)

    with ExitStack() as stack:
        for _ in range(600):
            unfinished = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            unfinished.sendall(UNFINISHED)

        assert "There is no entry yet" in _get(port)

    assert "socket.accept()" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        UNFINISHED,
        b"POST /pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nname=",
    ],
    ids=["nothing", "head", "body"],
)
def test_a_connection_with_an_unfinished_request_is_closed(serve, begun, tmp_path):
    port = serve(quick=True)
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(begun)

        assert _read_all(client) == b""
    _get(port)  # what came before it is logged then
    assert (tmp_path / "log").read_text() == ""


def test_a_request_that_arrives_byte_by_byte_is_cut_off(serve):
    with socket.create_connection(("127.0.0.1", serve(quick=True)), 30) as client:
        client.sendall(UNFINISHED)

        wait_until(lambda: _is_cut_off(client), timeout=30, what="the end of the connection")


def test_a_client_that_reads_no_answer_is_cut_off(serve, app):
    """An answer that is longer than what the system keeps for both sides of a connection."""
    for number in range(20):
        Entry(f"e{number}", "t", schedule(60), kwargs={"text": "x" * 900_000}, app=app).save()
    port = serve(quick=True)
    assert len(_get(port, "/api/changes")) > 16_000_000
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /api/changes HTTP/1.1\r\nHost: localhost\r\n\r\n")

        wait_until(lambda: _is_cut_off(client), timeout=30, what="the end of the connection")


def test_of_requests_that_await_no_answer_the_first_is_answered_alone(serve):
    port = serve()
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)

        assert _read_all(client).count(b"HTTP/1.1 ") <= 1  # which the end of the connection may overtake

    with ExitStack() as stack:
        for _ in range(300):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            with suppress(ConnectionError):
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)

        # One connection more is too many while more are served than there may be.
        wait_until(lambda: _answers(port), timeout=30, what="an answer beside the others")


def test_a_connection_is_kept_for_requests_that_await_their_answers(serve):
    connection = http.client.HTTPConnection("127.0.0.1", serve(), timeout=30)
    connection.connect()
    kept = connection.sock
    for _ in range(3):
        connection.request("GET", "/")
        assert "There is no entry yet" in connection.getresponse().read().decode()
        assert connection.sock is kept
    connection.close()


def test_an_answer_that_takes_long_is_not_cut_off(serve):
    """To ask the workers takes a second, and there are none."""
    assert '"findings"' in _get(serve(quick=True), "/api/doctor")


@pytest.mark.parametrize("path", ["/api/status", "/static/htmx.min.js", "/pause"])
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(serve, path):
    """A proxy may take what follows for the body of it, and the page for another request."""
    lengths = "Content-Length: 5\r\nTransfer-Encoding: chunked"
    hidden = "GET /api/entries HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", serve()), 30) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lengths}\r\n\r\n0\r\n\r\n{hidden}".encode())

        answers = _read_all(client).decode()

    assert answers.startswith("HTTP/1.1 400 ")
    assert answers.count("HTTP/1.1") == 1
    assert answers.endswith("a request has Content-Length or Transfer-Encoding, not both")


def _read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection, or resets it."""
    found = b""
    try:
        while some := client.recv(4096):
            found += some
    except ConnectionError:
        pass
    return found


def _is_cut_off(client: socket.socket) -> bool:
    """Send a byte; return whether the server has closed the connection."""
    client.setblocking(False)
    try:
        client.send(b"x")
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return False
