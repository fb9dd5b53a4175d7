"""Servers that are more than one: sentinels with their master, a cluster, TLS; beat and worker that use them."""

from __future__ import annotations

import gc
import selectors
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import trustme
from celery import Celery
from celery.schedules import schedule
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from singlebeat.errors import LockBackendError
from tests.support import (
    APP,
    CeleryLauncher,
    CeleryProcess,
    Oracle,
    RedisServer,
    free_port,
    server_binary,
    wait_until,
)
from tests.system.apps import make_app

MASTER = "the-master"
SENTINELS_PASSWORD = "sentinels-only"
PASSWORD = "hush-hush"


def _fail_over(master: RedisServer, replica: RedisServer) -> None:
    """Kill a master that has told its replica all that it has answered, and return when that has taken its place."""
    admin, client = master.client(), replica.client()
    admin.client_pause(60_000, all=False)

    def in_step() -> bool:
        state = admin.info("replication")
        return state["slave0"]["offset"] == state["master_repl_offset"]

    wait_until(in_step, what="the replica to have it all")
    master.kill()

    def leads() -> bool:
        with suppress(RedisError):  # sentinels end all its connections when they promote it
            return client.role()[0] == "master"
        return False

    wait_until(leads, timeout=60, what="the replica to be promoted")


class _Sentinel(RedisServer):
    """Watches a master; it has a password of its own."""

    def __init__(self, master: RedisServer) -> None:
        super().__init__(password=SENTINELS_PASSWORD)
        self._master = master.port

    def _command(self) -> list[str]:
        config = self.directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nunixsocket {self.path}\ndir {self.directory}\n"
            f"requirepass {SENTINELS_PASSWORD}\nsentinel sentinel-pass {SENTINELS_PASSWORD}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {self._master} 2\nsentinel auth-pass {MASTER} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {MASTER} 1000\nsentinel failover-timeout {MASTER} 3000\n"
        )
        return [server_binary(), str(config), "--sentinel"]


class Sentinels:
    """Three sentinels that watch a master and its replica.

    Args:
        args: further options of the master and of its replica.
    """

    def __init__(self, *args: str) -> None:
        self._args = args
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            options = ("--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0", *self._args)
            self.master = stack.enter_context(RedisServer(*options, password=PASSWORD))
            of = ("--replicaof", "127.0.0.1", str(self.master.port))
            self.replica = stack.enter_context(RedisServer(*options, *of, password=PASSWORD))
            self._sentinels = [stack.enter_context(_Sentinel(self.master)) for _ in range(3)]
            wait_until(self._agree, timeout=60, what="the sentinels to find each other")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _agree(self) -> bool:
        states = [sentinel.client().sentinel_master(MASTER) for sentinel in self._sentinels]
        return all((state["num-slaves"], state["num-other-sentinels"]) == (1, 2) for state in states)

    @property
    def url(self) -> str:
        """The sentinels in Celery's form."""
        return ";".join(f"sentinel://:{PASSWORD}@127.0.0.1:{sentinel.port}/0" for sentinel in self._sentinels)

    @property
    def options(self) -> dict[str, Any]:
        """What Celery's transport options say besides."""
        return {"master_name": MASTER, "sentinel_kwargs": {"password": SENTINELS_PASSWORD}}

    def fail_over(self) -> None:
        """Kill the master, and return when the replica has taken its place."""
        _fail_over(self.master, self.replica)


class _Node(RedisServer):
    """A node of a cluster."""

    def _command(self) -> list[str]:
        # The bus, by default the port + 10000, may be above the last port.
        bus = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "1000"]
        return [*super()._command(), *bus, "--repl-diskless-sync-delay", "0"]


class OneNode(_Node):
    """A whole cluster of one node, quick to start."""

    def start(self) -> Self:
        """Start it, and return when it keeps all slots."""
        super().start()
        client = self.client()
        if Cluster.info(client)["cluster_slots_assigned"] == "0":  # a restarted node knows them
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: Cluster.info(client)["cluster_state"] == "ok", timeout=60, what="the cluster to be whole")
        return self

    @property
    def cluster_url(self) -> str:
        """Its URL as a cluster."""
        return f"redis-cluster://127.0.0.1:{self.port}"


class Cluster:
    """Three masters; the one that keeps the slot of a key has a replica.

    Args:
        args: further options of all nodes.
    """

    def __init__(self, key: str = "{redbeat}:", *args: str) -> None:
        self._key, self._login, self._args = key, "", args
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.nodes = [stack.enter_context(_Node(*self._args)) for _ in range(4)]
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _join(self) -> None:
        clients = [node.client() for node in self.nodes]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number < 3:
                client.execute_command("CLUSTER ADDSLOTSRANGE", *((0, 5461), (5462, 10922), (10923, 16383))[number])
        bus = clients[0].config_get("cluster-port")["cluster-port"]
        for client in clients[1:]:
            client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, bus)
        wait_until(lambda: all(self._known(client) == 4 for client in clients), timeout=60, what="the nodes to meet")
        slot = clients[0].execute_command("CLUSTER KEYSLOT", self._key)
        self.master, self.replica = self.nodes[min(slot // 5462, 2)], self.nodes[3]
        clients[3].execute_command("CLUSTER REPLICATE", self.master.client().execute_command("CLUSTER MYID"))
        wait_until(self._ready, timeout=60, what="the cluster to be whole")

    def _known(self, client: Any) -> int:
        return int(self.info(client)["cluster_known_nodes"])

    @staticmethod
    def info(client: Any) -> dict[str, str]:
        """Return what a node says of its cluster."""
        info = client.execute_command("CLUSTER INFO")
        return info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.split())

    def _ready(self) -> bool:
        whole = all(self.info(node.client())["cluster_state"] == "ok" for node in self.nodes)
        return whole and self.replica.client().info("replication").get("master_link_status") == "up"

    def add_user(self, name: str, *rules: str) -> None:
        """Let a user with this name and ``PASSWORD`` do what the rules say; from now on ``url`` is theirs."""
        for node in self.nodes:
            node.client().execute_command("ACL", "SETUSER", name, "on", f">{PASSWORD}", *rules)
        self._login = f"{name}:{PASSWORD}@"

    @property
    def url(self) -> str:
        """Two of its nodes."""
        return ";".join(f"redis-cluster://{self._login}127.0.0.1:{node.port}" for node in self.nodes[:2])

    options: Mapping[str, Any] = {}

    def move_slot(self, key: str = "") -> None:
        """Move the slot of a key to another master, key by key, as a resharding does."""
        clients = [node.client() for node in self.nodes[:3]]
        slot = clients[0].execute_command("CLUSTER KEYSLOT", key or self._key)
        ids = [client.execute_command("CLUSTER MYID") for client in clients]
        source = next(at for at, client in enumerate(clients) if self._has(client, slot))
        target = (source + 1) % 3
        clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
        clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        while keys := clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            migrated = ("MIGRATE", "127.0.0.1", self.nodes[target].port, "", 0, 5000, "KEYS", *keys)
            clients[source].execute_command(*migrated)
        for client in (clients[target], clients[source], clients[3 - source - target]):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])

    @staticmethod
    def _has(client: Any, slot: int) -> bool:
        """Return whether a node is the master of a slot."""
        nodes = client.execute_command("CLUSTER NODES")
        (own,) = (node["slots"] for node in nodes.values() if "myself" in node["flags"])
        return any(int(slots[0]) <= slot <= int(slots[-1]) for slots in own)

    def fail_over(self) -> None:
        """Kill the master of the key's slot, and return when its replica has taken its place."""
        _fail_over(self.master, self.replica)


@contextmanager
def tls_port(server: RedisServer, ca: trustme.CA) -> Iterator[int]:
    """Open a port of 127.0.0.1 in front of a server that speaks TLS with any client with a certificate of the CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, context, server.path), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, context: ssl.SSLContext, path: Path) -> None:
    with suppress(OSError):
        while True:
            accepted, _ = listener.accept()
            threading.Thread(target=_relay, args=(accepted, context, path), daemon=True).start()


def _relay(accepted: socket.socket, context: ssl.SSLContext, path: Path) -> None:
    with suppress(OSError), accepted, socket.socket(socket.AF_UNIX) as behind:
        behind.connect(str(path))
        # One thread for both ways: a TLS connection must not be read and written at the same time.
        with context.wrap_socket(accepted, server_side=True) as front:
            front.setblocking(False)
            behind.setblocking(False)
            _pump(front, behind)


def _pump(front: ssl.SSLSocket, behind: socket.socket) -> None:
    with selectors.DefaultSelector() as ways:  # select() takes no file number above 1023
        for way in (front, behind):
            ways.register(way, selectors.EVENT_READ)
        _relay_both(ways, front, behind)


def _relay_both(ways: selectors.BaseSelector, front: ssl.SSLSocket, behind: socket.socket) -> None:
    while ways.select():
        for source, target in ((front, behind), (behind, front)):
            try:
                while data := source.recv(65536):
                    target.setblocking(True)
                    target.sendall(data)
                    target.setblocking(False)
                if data == b"":
                    return
            except (BlockingIOError, ssl.SSLWantReadError):
                continue


# ---------------------------------------------------------------- beat, worker and Singleton on them

TICK = {"task": f"{APP}.single", "schedule": schedule(0.5), "args": ["tick"]}

#: Quick to notice that a server is gone, and patient enough for a slow machine to find the next one.
COMMON = {
    "beat_schedule": {"tick": TICK},
    "singlebeat_socket_timeout": 2,
    "redbeat_lock_timeout": 5,
    # What a worker has taken from a Redis broker and not yet read is lost with that server: its lock ends by itself.
    "singlebeat_queued_ttl": 15,
    "broker_connection_max_retries": None,
    "redbeat_redis_url": None,
    "singleton_backend_url": None,
}


@contextmanager
def running(celery: CeleryLauncher, conf: Mapping[str, Any]) -> Iterator[tuple[Celery, CeleryProcess, CeleryProcess]]:
    """Start a worker and a beat; yields an app to send from, worker and beat."""
    conf = {**COMMON, **conf}
    worker, beat = celery("worker", "-c", "2", conf=conf), celery("beat", conf=conf)
    worker.ready()
    with make_app(celery.server.celery_url, conf) as app:
        yield app, worker, beat
        gc.collect()  # a result that is freed after its server has gone looks for it


def prove(app: Celery, oracle: Oracle, name: str = "one") -> None:
    """Let beat send, the worker run, and a call meet its equal."""
    single = app.tasks[f"{APP}.single"]
    oracle.wait_ended(oracle.ended("tick") + 2, "tick", timeout=60)
    first = single.delay(name, seconds=60)
    oracle.wait_started(1, name)
    again = single.delay(name, seconds=60)
    assert (first.is_duplicate, again.is_duplicate, again.id) == (False, True, first.id)
    oracle.let_go(name)
    assert first.get(timeout=60) == name
    assert oracle.started(name) == oracle.max_concurrent(name) == oracle.max_concurrent("tick") == 1


def each_decided_and_started_once(
    oracle: Oracle, history: list[tuple[str, Mapping[str, str]]], name: str = "tick"
) -> None:
    occurrences = [record["id"] for _, record in history]
    assert len(set(occurrences)) == len(occurrences) > 3
    started = [run.id for run in oracle.runs(name)]
    assert len(set(started)) == len(started) > 3


def ask(single: Any, name: str) -> str:
    """Return the id of the call that is queued or running, or of a new one; empty while no server answers."""
    try:
        return single.delay(name, seconds=60).id
    except (LockBackendError, OperationalError):
        return ""
