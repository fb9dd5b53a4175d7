"""A schedule and locks in a Redis Cluster: all that reads them, and what happens while the cluster is unreachable."""

from __future__ import annotations

from contextlib import closing
from unittest.mock import Mock

import pytest
from redis import RedisCluster
from redis.cluster import NodesManager
from redis.exceptions import TimeoutError as RedisTimeoutError
from starlette.testclient import TestClient

from singlebeat import web
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.clients import RedisError, private
from tests.support import wait_until
from tests.system.topologies import OneNode

TOOLS = ["status", "health", "doctor", "explain e", "list", "show e", "history", "changes", "locks"]
VIEWS = ["/", "/doctor", "/api/status", "/api/entries", "/api/doctor"]

pytestmark = pytest.mark.usefixtures("no_worker_is_awaited")


@pytest.fixture(scope="module")
def node():
    with OneNode() as node:
        yield node


@pytest.fixture
def bench(node, server, redis, bench_on):
    """A bench whose schedule and locks are in a cluster."""
    node.client().flushall()
    url = node.cluster_url
    return bench_on(server, redbeat_redis_url=url, singleton_backend_url=url, redbeat_key_prefix="{redbeat}:")


@pytest.fixture
def due(bench):
    """The same with an entry that has been sent, and its beat leads."""
    bench.put()
    bench.tick()
    return bench


@pytest.fixture(params=["down", "no cluster"])
def unreachable(request, bench_on, server, redis):
    """A bench whose cluster does not answer, or is a server without a cluster."""
    port = 1 if request.param == "down" else server.port
    url = f"redis-cluster://127.0.0.1:{port}"
    return bench_on(server, redbeat_redis_url=url, singleton_backend_url=url, redbeat_key_prefix="{redbeat}:")


def answer(bench, path):
    beat = bench.schedulers[0]
    return BeatMetrics(bench.app, beat.lease).answer(path)


@pytest.mark.parametrize("command", TOOLS)
def test_each_tool_works_in_a_cluster(due, cli, command):
    said = cli(*command.split(), app=due.app, code=None)

    assert said.exit_code in ({0, 1} if command in {"doctor", "health"} else {0}), said.output  # there is no worker
    assert "Error" not in said.output


@pytest.mark.parametrize("path", VIEWS)
def test_each_view_works_in_a_cluster(due, path):
    with TestClient(web.app(due.app), base_url="http://localhost", client=("127.0.0.1", 50_000)) as client:
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/readyz", "/metrics", "/healthz"])
def test_a_beat_serves_its_state_in_a_cluster(due, path):
    assert answer(due, path).code == 200


def test_the_doctor_names_a_spoilt_key_in_a_cluster(due, node, cli):
    node.client().delete("{redbeat}::history")
    node.client().set("{redbeat}::history", "other")

    assert "problem  key {redbeat}::history: it is no stream" in cli("doctor", app=due.app, code=1).output


def test_a_spoilt_key_in_a_cluster_is_trouble_and_no_end(due, node, caplog):
    node.client().delete("{redbeat}::schedule")
    node.client().set("{redbeat}::schedule", "other")

    due.tick()

    assert "the key {redbeat}::schedule is no sorted set" in caplog.text


@pytest.mark.parametrize("command", TOOLS)
def test_a_tool_says_in_one_line_that_the_cluster_is_unreachable(unreachable, cli, command):
    said = cli(*command.split(), app=unreachable.app, code=None)

    assert said.exit_code == 2
    assert said.output.count("Error: the") == 1


@pytest.mark.parametrize("path", VIEWS)
def test_a_view_of_an_unreachable_cluster_is_no_error_of_the_page(unreachable, path):
    with TestClient(web.app(unreachable.app), base_url="http://localhost", client=("127.0.0.1", 50_000)) as client:
        assert client.get(path).status_code in {200, 503}


def test_a_beat_waits_for_an_unreachable_cluster(unreachable, caplog):
    unreachable.tick(2)

    assert caplog.text.count("Trouble with Redis: trying again") == 1


def test_a_beat_that_starts_before_its_cluster_sends_later(bench, node, caplog):
    bench.put()
    another = bench.new_app()  # has another client: not connected yet, as in another process
    another.conf.singlebeat_socket_timeout = 4.5
    beat = bench.scheduler(app=another)
    node.kill()
    beat.tick()
    assert "Trouble with Redis: trying again" in caplog.text
    assert bench.messages == []

    node.start()
    bench.put()

    wait_until(lambda: beat.tick() and bench.names == ["e"], what="the message")


@pytest.mark.parametrize(("command", "args"), [("exists", ["key"]), ("eval", ["return 1", 1, "key"])])
def test_a_call_to_a_node_that_hangs_is_made_once(node, monkeypatch, command, args):
    calls, send = [], RedisCluster._execute_command
    client = private(node.cluster_url, timeout=0.2)
    client.get("key")
    monkeypatch.setattr(
        RedisCluster, "_execute_command", lambda *args, **kwargs: calls.append(1) or send(*args, **kwargs)
    )
    monkeypatch.setattr(NodesManager, "initialize", lambda *args, **kwargs: None)  # as if another node had answered
    node.pause()

    with closing(client), pytest.raises(RedisError):
        getattr(client, command)(*args)

    node.resume()
    assert len(calls) == 1


def test_a_client_connects_though_the_first_node_that_it_asks_hangs(node, monkeypatch):
    """Another node can answer."""
    tries, send = [], RedisCluster._execute_command

    def hang_at_first(*args, **kwargs):
        tries.append(args)
        if len(tries) == 1:
            raise RedisTimeoutError
        return send(*args, **kwargs)

    monkeypatch.setattr(RedisCluster, "_execute_command", hang_at_first)

    with closing(private(node.cluster_url, timeout=5)) as client:
        assert client.time()


def test_a_script_in_a_pipeline_asks_its_own_node_alone(node, monkeypatch):
    """Another node may hang."""
    client = private(node.cluster_url, timeout=5)
    client.get("key")
    monkeypatch.setattr(RedisCluster, "_get_command_keys", Mock(side_effect=AssertionError))

    with closing(client), client.pipeline() as pipe:
        pipe.execute_command("EVAL", "return KEYS[1]", 1, "key")
        assert pipe.execute() == ["key"]
