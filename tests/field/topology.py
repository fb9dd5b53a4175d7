"""The servers of a run, and the links by which the fleet reaches them. A new topology is a new class here.

A worker's connection to a Redis broker has no link: kombu's transport loses a message whose ``BRPOP`` reply is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from redis import Redis
from redis.cluster import RedisCluster

from tests.field.journal import AOF, Journal, Journals
from tests.field.plan import DURATIONS
from tests.field.tap import Tap
from tests.proxy import Link, Network
from tests.rabbitmq.server import RabbitMQ
from tests.support import RedisServer, free_port
from tests.system.topologies import Cluster, Sentinels

#: Faults that kombu's own Redis transport does not survive in a worker: its broker is never read-only, nor full.
NOT_FOR_BROKERS = {"read_only", "out_of_memory"}

#: Faults that only RabbitMQ has.
OF_RABBITMQ = {"broker_alarm", "broker_ended"}

#: Faults that are left behind a failover: the links lead to no server, since sentinels say where the master is.
WITH_SENTINELS = ("failed_over", "beat_", "beats_", "worker_", "delivered_again")

#: Faults of a Cluster that keeps schedule and locks: its nodes say where each slot is, so no link leads to them.
WITH_CLUSTER = ("slot_moved", "broker_killed", "beat_", "beats_", "worker_", "delivered_again")

#: Settings with RabbitMQ as the broker. An exchange of this type lets the tap see each message. Without a limit of its
#: reads, a worker of Celery hangs for ever in events and goodbyes that it sends over a connection that is half open.
LIMITS = {"read_timeout": 5, "write_timeout": 5}
RABBITMQ: Mapping[str, Any] = {
    "broker_heartbeat": 8,
    "broker_transport_options": LIMITS,
    "task_default_exchange": "celery",
    "task_default_exchange_type": "topic",
    "task_default_routing_key": "celery",
}
SENDERS = {"broker_transport_options": {"confirm_publish": True, **LIMITS}}


@dataclass
class Topology:
    """Where schedule and locks, and messages, are kept."""

    server: RedisServer  #: schedule and locks
    broker: RedisServer | RabbitMQ
    network: Network
    seed: int
    conf: Mapping[str, Any] = field(default_factory=dict)  #: settings that it needs
    sentinels: Sentinels | None = None
    cluster: Cluster | None = None
    prefix: str = "redbeat:"  #: of the schedule's keys
    links: dict[str, list[Link]] = field(default_factory=dict)  #: by the name of a process

    @property
    def is_one(self) -> bool:
        """Whether all is on one server, so that each occurrence is published exactly once."""
        return self.server is self.broker

    def urls(self, process: str, *, is_worker: bool = False) -> Mapping[str, Any]:
        """Return the settings by which a process reaches the servers, through links of its own."""
        if self.sentinels is not None or self.cluster is not None:
            return self.direct()
        schedule = f"redis://127.0.0.1:{self._link(process, self.server)}"
        broker = schedule
        if isinstance(self.broker, RabbitMQ):
            broker = self.broker.url.replace(str(self.broker.port), str(self._link(process, self.broker)))
        elif is_worker:
            broker = self.broker.tcp_url
        elif not self.is_one:
            broker = f"redis://127.0.0.1:{self._link(process, self.broker)}"
        conf = {**self.conf, **SENDERS} if isinstance(self.broker, RabbitMQ) and process == "sender" else self.conf
        return {"broker_url": broker, "redbeat_redis_url": schedule, "singleton_backend_url": schedule, **conf}

    def direct(self) -> Mapping[str, Any]:
        """Return the settings by which the bed itself reaches the servers, through no link."""
        if self.sentinels is not None or self.cluster is not None:
            return self.conf
        broker = self.broker.url if isinstance(self.broker, RabbitMQ) else self.broker.tcp_url
        url = self.server.tcp_url
        return {"broker_url": broker, "redbeat_redis_url": url, "singleton_backend_url": url, **self.conf}

    def _link(self, process: str, server: RedisServer | RabbitMQ) -> int:
        links = self.links.setdefault(process, [])
        link = next((link for link in links if link.target == server.port), None)
        if link is None:
            name = f"{process} {server.port}"
            link = self.network.link(name, server.port, Random(f"{self.seed} {process} {len(links)}"))
            links.append(link)
        return link.port

    def fail_over(self) -> None:
        """Kill the master, and let its replica take its place, with all that the master has answered."""
        self.sentinels.fail_over()
        self.server = self.broker = self.sentinels.replica

    def client(self, **options: Any) -> Redis | RedisCluster:
        """Return a client of the servers of schedule and locks."""
        if self.cluster is None:
            return self.server.client(**options)
        return RedisCluster.from_url(self.server.tcp_url, decode_responses=True, socket_timeout=2)

    def journals(self) -> tuple[Journal | Journals, Journal | Tap]:
        """Return the journals of the schedule and of the messages, which may be one."""
        if self.cluster is not None:
            masters = self.cluster.nodes[:3]  # what is moved to another node is no decision there
            return Journals([Journal(node.directory, self.prefix) for node in masters]), Journal(self.broker.directory)
        # A replica writes all that its master has written.
        schedule = Journal(self.sentinels.replica.directory if self.sentinels else self.server.directory)
        if isinstance(self.broker, RabbitMQ):
            return schedule, Tap(self.broker)
        return schedule, schedule if self.is_one else Journal(self.broker.directory)


@contextmanager
def open_topology(name: str, seed: int, options: Mapping[str, Any], *, libfaketime: str = "") -> Iterator[Topology]:
    """Start the servers of a topology, of whose broker the fleet's settings have these transport options.

    With ``libfaketime``, the clock of the schedule's server can be set.

    ``one`` for all, or ``two``: schedule and locks, and the broker. That is RabbitMQ in ``rabbit``, and in ``quorum``
    with quorum queues. In ``sentinel``, one server for all has a replica, which takes its place. In
    ``cluster``, schedule and locks are in a Cluster that moves slots.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"no topology {name!r}: choose one of {', '.join(TOPOLOGIES)}")
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        if name == "sentinel":
            sentinels = stack.enter_context(Sentinels(*AOF))
            conf = {"broker_url": sentinels.url, "broker_transport_options": {**options, **sentinels.options}}
            conf |= {"redbeat_redis_url": None, "singleton_backend_url": None}
            yield Topology(sentinels.master, sentinels.master, network, seed, conf, sentinels)
            return
        if name == "cluster":
            cluster, prefix = stack.enter_context(Cluster("{redbeat}:", *AOF)), "{redbeat}:"
            broker = stack.enter_context(RedisServer(*AOF))
            conf = {
                "broker_url": broker.tcp_url,
                "redbeat_redis_url": cluster.url,
                "singleton_backend_url": cluster.url,
            }
            conf |= {"redbeat_key_prefix": prefix}
            yield Topology(cluster.nodes[0], broker, network, seed, conf, cluster=cluster, prefix=prefix)
            return
        server = stack.enter_context(RedisServer(*AOF, libfaketime=libfaketime))
        if name in WITH_RABBITMQ:
            conf = {**RABBITMQ, "task_default_queue_type": "quorum" if name == "quorum" else "classic"}
            yield Topology(server, stack.enter_context(RabbitMQ()), network, seed, conf)
        else:
            broker = server if name == "one" else stack.enter_context(RedisServer(*AOF))
            yield Topology(server, broker, network, seed)


WITH_RABBITMQ = ("rabbit", "quorum")
TOPOLOGIES = ("one", "two", *WITH_RABBITMQ, "sentinel", "cluster")


def faults_of(topology: str) -> list[str]:
    """Return the kinds of faults that can happen in a topology; those of an option only where it is asked for."""
    if topology == "sentinel":
        return [kind for kind in DURATIONS if kind.startswith(WITH_SENTINELS)]
    if topology == "cluster":
        return [kind for kind in DURATIONS if kind.startswith(WITH_CLUSTER)]
    never = {"failed_over", "slot_moved", "server_clock", "handed_over"} | (
        {"broker_killed", *NOT_FOR_BROKERS} if topology == "one" else set()
    )
    never |= {"delivered_again"} if topology in WITH_RABBITMQ else OF_RABBITMQ
    return [kind for kind in DURATIONS if kind not in never]


def read_only(server: RedisServer) -> None:
    """Make a server the replica of a master that is not there: it refuses writes, and keeps what it has."""
    server.client().replicaof("127.0.0.1", free_port())
