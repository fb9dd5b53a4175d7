"""The servers of a run, and the links by which the fleet reaches them. A new topology is a new class here.

A worker's connection to its broker has no link: kombu's Redis transport loses a message whose ``BRPOP`` reply is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.field.journal import AOF, Journal
from tests.field.plan import DURATIONS
from tests.proxy import Link, Network
from tests.support import RedisServer, free_port

#: Faults that kombu's own Redis transport does not survive in a worker: its broker is never read-only, nor full.
NOT_FOR_BROKERS = {"read_only", "out_of_memory"}


@dataclass
class Topology:
    """Where schedule and locks, and messages, are kept."""

    server: RedisServer  #: schedule and locks
    broker: RedisServer
    network: Network
    seed: int
    links: dict[str, list[Link]] = field(default_factory=dict)  #: by the name of a process

    @property
    def is_one(self) -> bool:
        """Whether all is on one server, so that each occurrence is published exactly once."""
        return self.server is self.broker

    def urls(self, process: str, *, direct_broker: bool = False) -> Mapping[str, Any]:
        """Return the settings by which a process reaches the servers, through links of its own."""
        schedule = self._link(process, self.server)
        broker = self.broker.tcp_url
        if not direct_broker:
            broker = schedule if self.is_one else self._link(process, self.broker)
        return {"broker_url": broker, "redbeat_redis_url": schedule, "singleton_backend_url": schedule}

    def _link(self, process: str, server: RedisServer) -> str:
        links = self.links.setdefault(process, [])
        link = next((link for link in links if link.target == server.port), None)
        if link is None:
            name = f"{process} {server.port}"
            link = self.network.link(name, server.port, Random(f"{self.seed} {process} {len(links)}"))
            links.append(link)
        return f"redis://127.0.0.1:{link.port}"

    def journals(self) -> tuple[Journal, Journal]:
        """Return the journals of the schedule and of the messages, which may be one."""
        schedule = Journal(self.server.directory)
        return schedule, schedule if self.is_one else Journal(self.broker.directory)


@contextmanager
def open_topology(name: str, seed: int) -> Iterator[Topology]:
    """Start the servers of a topology: ``one`` for all, or ``two``: schedule and locks, and the broker."""
    if name not in TOPOLOGIES:
        raise ValueError(f"no topology {name!r}: choose one of {', '.join(TOPOLOGIES)}")
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        server = stack.enter_context(RedisServer(*AOF))
        broker = server if name == "one" else stack.enter_context(RedisServer(*AOF))
        yield Topology(server, broker, network, seed)


TOPOLOGIES = ("one", "two")


def faults_of(topology: str) -> list[str]:
    """Return the kinds of faults that can happen in a topology."""
    never = {"broker_killed", *NOT_FOR_BROKERS} if topology == "one" else set()
    return [kind for kind in DURATIONS if kind not in never]


def read_only(server: RedisServer) -> None:
    """Make a server the replica of a master that is not there: it refuses writes, and keeps what it has."""
    server.client().replicaof("127.0.0.1", free_port())
