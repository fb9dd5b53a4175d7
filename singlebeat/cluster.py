"""The client of a Redis Cluster, and the rules for which keys are on one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import TYPE_CHECKING, Any, Self

from redis import RedisCluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

if TYPE_CHECKING:
    from .clients import ClientOptions, RedisClient

__all__ = ("Cluster", "keeps_together", "same_slot")

#: A function that calls another one until it succeeds or the time is up, and returns its result.
Repeat = Callable[[Callable[[], object]], Any]


#: Commands that only the node of their key can answer. Others are tried again on another node.
OF_ONE_NODE = frozenset({"EVAL", "EVALSHA", "EVAL_RO", "EXISTS"})


class _HangsError(RedisTimeoutError):
    """A node does not answer in time; redis-py would retry its base class, and wait for as long each time."""


@contextmanager
def _as_redis_errors() -> Iterator[None]:
    try:
        yield
    except RedisClusterException as exc:
        raise RedisConnectionError(str(exc)) from exc


class Cluster(RedisCluster):
    """A client of a Redis Cluster that raises only RedisErrors, and retries pipelines like single calls.

    As the client of one server does, it connects on its first call; redis-py's own connects when it is made.

    Args:
        nodes: mappings with ``host`` and ``port``; one reachable node is enough.
        retries: number of retries of a call.
        repeated: function that retries a callable until it succeeds or the time is up; None: only ``retries`` counts.
    """

    _is_connected = False

    def __init__(
        self,
        nodes: Sequence[ClientOptions],
        *,
        retries: int,
        repeated: Repeat | None,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("db", 0):
            raise ValueError("a cluster has database 0 only")
        addresses = [(node.get("host", "localhost"), int(node.get("port", 6379))) for node in nodes]

        def connect() -> None:
            # New ones each time: redis-py replaces them by those that it finds.
            first = [ClusterNode(host, port) for host, port in addresses]  # type: ignore[no-untyped-call]
            super(Cluster, self).__init__(startup_nodes=first, retry=Retry(NoBackoff(), retries), **kwargs)

        self._repeated, self._connect = repeated, connect
        self._connecting = local()  # without a lock, for which each thread would wait as long as all before it

    def execute_command(self, *args: object, **kwargs: object) -> Any:
        """Send a command to its node or nodes."""
        return self._repeat(lambda: super(Cluster, self).execute_command(*args, **kwargs))  # type: ignore[no-untyped-call]

    def exists(self, *keys: Any) -> Any:
        """Return how many of the keys exist; redis-py would ask for a single key in a pipeline, again and again."""
        return self.execute_command("EXISTS", *keys) if len(keys) == 1 else super().exists(*keys)

    def _execute_command(self, target_node: object, *args: object, **kwargs: object) -> Any:
        """Send a command to one node, as redis-py calls it for each try.

        Raises:
            _HangsError: the node does not answer in time, and no other node could answer.
        """
        try:
            return super()._execute_command(target_node, *args, **kwargs)  # type: ignore[no-untyped-call]
        except RedisTimeoutError as exc:
            if args[0] in OF_ONE_NODE:
                raise _HangsError(str(exc)) from exc
            raise

    def close(self) -> None:
        """Close the connections to all nodes."""
        if self._is_connected:
            super().close()

    def pipeline(self, transaction: object = None, shard_hint: object = None) -> _Pipeline:
        """Return a pipeline without a transaction; scripts do the work that must be atomic."""
        return _Pipeline(super().pipeline, self._repeat, self.get_node_from_key)

    def _repeat(self, do: Callable[[], object]) -> Any:
        def converting() -> object:
            with _as_redis_errors():
                self._ensure_connected()
                return do()

        return self._repeated(converting) if self._repeated else converting()

    def __getattr__(self, name: str) -> Any:
        # Some methods of redis-py use attributes before they send a command, as exists() does.
        if self._is_connected or getattr(self._connecting, "now", False) or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with _as_redis_errors():
            self._ensure_connected()
        return getattr(self, name)

    def _ensure_connected(self) -> None:
        # Some versions of redis-py send a command within it.
        if self._is_connected or getattr(self._connecting, "now", False):
            return
        self._connecting.now = True
        try:
            self._connect()
        finally:
            self._connecting.now = False
        self._is_connected = True


class _Pipeline:
    """Commands that each attempt sends in a new pipeline, because redis-py's pipelines can be executed only once."""

    def __init__(self, new: Callable[[], RedisClient], repeat: Repeat, node_of: Callable[[str], object]) -> None:
        self._new, self._repeat, self._node_of = new, repeat, node_of
        self._commands: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name: str) -> Callable[..., _Pipeline]:
        def note(*args: object, **kwargs: object) -> _Pipeline:
            self._commands.append((name, args, kwargs))
            return self

        return note

    def execute(self, raise_on_error: bool = True) -> Any:
        """Send the commands and return their replies; with ``raise_on_error`` a server's error is raised."""
        commands, self._commands = self._commands, []

        def do() -> object:
            pipe = self._new()
            for name, args, kwargs in commands:
                getattr(pipe, name)(*args, **kwargs, **self._target(args))
            return pipe.execute(raise_on_error)

        return self._repeat(do)

    def _target(self, args: tuple[object, ...]) -> dict[str, object]:
        """Return the node of a script: redis-py would ask another node, which may hang, for the keys of the script."""
        return {"target_nodes": self._node_of(str(args[3]))} if args[:1] in {("EVAL",), ("EVAL_RO",)} else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._commands.clear()


def same_slot(client: RedisClient, keys: Sequence[str]) -> list[list[int]]:
    """Return the indexes of the keys in groups for one script each; in a cluster, a group is the keys of one slot."""
    if len(keys) == 1 or not isinstance(client, RedisCluster):  # the latter takes long: it is a protocol's check
        return [list(range(len(keys)))]
    groups: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(client.keyslot(key), []).append(index)  # type: ignore[no-untyped-call]
    return list(groups.values())


def keeps_together(prefix: str) -> bool:
    """Return whether a prefix has a hash tag, so that a cluster keeps all keys under the prefix on one node."""
    return key_slot(f"{prefix}a".encode()) == key_slot(f"{prefix}b".encode())
