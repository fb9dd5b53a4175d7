"""A private RabbitMQ server for one test process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from kombu import Connection

from tests.support import Server, _spawn, free_port, wait_until


def find_rabbitmq() -> tuple[str, str] | None:
    """Return RabbitMQ's start script and Erlang's port mapper, None where they are not installed."""
    # Debian's own script, on the PATH, starts it as another user.
    script, mapper = Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), shutil.which("epmd")
    return (str(script), mapper) if script.exists() and mapper else None


class RabbitMQ(Server):
    """A node on free ports of 127.0.0.1, with its own port mapper unless it joins the cluster of another node."""

    def __init__(self, joins: RabbitMQ | None = None) -> None:
        self._joins = joins
        self.directory = Path(tempfile.mkdtemp(prefix="sbmq"))
        self._processes: list[subprocess.Popen[Any]] = []
        self._environment: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The broker, in Celery's form."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> Self:
        """Start the server, also after ``kill``, and return when it takes connections."""
        found = find_rabbitmq()
        if found is None:
            raise RuntimeError("RabbitMQ is not installed: apt-get install rabbitmq-server")
        script, mapper = found
        is_new = not self._environment
        if is_new and self._joins is None:
            mapped = self._choose_ports()
            self._run([mapper, "-port", str(mapped), "-address", "127.0.0.1"])
        elif is_new:
            self._choose_ports()
        self._server = self._run([script])
        wait_until(lambda: self._answers(self._server), timeout=90, what="RabbitMQ to take connections")
        if is_new and self._joins is not None:
            for command in (["stop_app"], ["join_cluster", self._joins.name], ["start_app"]):
                self.control(*command)
        return self

    @property
    def name(self) -> str:
        """The node, as the others of its cluster name it."""
        return self._environment["RABBITMQ_NODENAME"]

    def kill(self) -> None:
        """End the server at once, as a crash would; durable queues and what it has confirmed outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def end(self) -> None:
        """End the server as a restart of its host does; ``start`` starts it again."""
        os.killpg(self._server.pid, signal.SIGTERM)
        try:
            self._server.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def _choose_ports(self) -> int:
        """Choose free ports for the server and its port mapper; return that of the mapper."""
        self.port, mapped = free_port(), free_port()
        (self.directory / "plugins").write_text("[].\n")
        self._environment = {
            **os.environ,
            "HOME": str(self.directory),  # for Erlang's cookie
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(mapped),
            "RABBITMQ_NODENAME": f"sb{os.getpid()}{'joined' if self._joins else ''}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(self.directory / "none"),
            # With little to do it shall not spin: +sbwt. And 127.0.0.1 only, for its distribution as well.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "true",  # then the script becomes the server, instead of watching over it
        }
        if self._joins is not None:
            same = ("HOME", "ERL_EPMD_PORT")
            self._environment |= {name: self._joins._environment[name] for name in same}
        return mapped

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Let the server take no messages for a while, as when memory or disk are short."""
        self.control("set_vm_memory_high_watermark", "0.000001")
        try:
            wait_until(lambda: "memory" in self.control("eval", "rabbit_alarm:get_alarms()."), what="the alarm")
            yield
        finally:
            self.control("set_vm_memory_high_watermark", "0.4")

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Let the server refuse connections for a while; durable queues and their messages outlive it."""
        self.control("stop_app")
        try:
            yield
        finally:
            self.control("start_app")

    def messages(self) -> dict[str, int]:
        """Return how many messages each queue has, those that a consumer has taken included."""
        rows = self.control("list_queues", "--silent", "--no-table-headers", "name", "messages").splitlines()
        return {name: int(count) for name, _, count in (row.partition("\t") for row in rows) if count.isdigit()}

    def await_blocked(self) -> None:
        """Return when a message is held in an alarm."""
        wait_until(lambda: "blocked" in self.control("list_connections", "state").split(), what="a held message")

    def end_connections(self) -> None:
        """Let the server end all connections."""
        self.control("close_all_connections", "by a test")

    def control(self, *command: str) -> str:
        """Return what ``rabbitmqctl`` prints."""
        control = Path(find_rabbitmq()[0]).with_name("rabbitmqctl")
        done = subprocess.run([str(control), *command], env=self._environment, check=True, capture_output=True)
        return done.stdout.decode()

    def _run(self, command: list[str]) -> subprocess.Popen[Any]:
        with (self.directory / "log").open("ab") as log:
            process = _spawn(command, stdout=log, env=self._environment, cwd=self.directory)
        self._processes.append(process)
        return process

    def _answers(self, server: subprocess.Popen[Any]) -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"RabbitMQ does not start:\n{(self.directory / 'log').read_text(errors='replace')}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            pass
        with suppress(OSError), Connection(self.url, connect_timeout=5) as connection:
            return bool(connection.connect())
        return False

    def stop(self) -> None:
        """End the server with all that it has started, and remove all it leaves."""
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
