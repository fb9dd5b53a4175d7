"""The harness does what the other tests rely on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, TimeoutError  # noqa: A004
from redis.retry import Retry

from tests.support import ROOT, RedisServer, alive, wait_until


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_begins_with_an_empty_server(turn, redis, server):
    with server.client(db=3) as other:
        assert (redis.dbsize(), other.dbsize()) == (0, 0)
        redis.set("left behind", turn)
        other.set("left behind", turn)


def test_a_killed_server_is_gone_until_it_is_restarted(own_server):
    client = own_server.client()
    client.set("key", "value")
    own_server.kill()
    with pytest.raises(ConnectionError):
        client.ping()

    own_server.restart()

    assert client.dbsize() == 0


def test_a_restart_ends_a_server_that_runs(own_server):
    before = own_server.pid

    own_server.restart()

    assert own_server.pid != before
    assert not alive(before)
    assert own_server.client().ping()


def test_a_paused_server_hangs_until_it_is_resumed(own_server):
    client = own_server.client(socket_timeout=0.1)
    assert own_server.client().ping()
    own_server.pause()
    with pytest.raises(TimeoutError):
        client.ping()

    own_server.resume()

    assert own_server.client().ping()


def test_a_server_can_ask_for_a_password_and_listen_on_a_port():
    with RedisServer(password="secret") as server:
        assert server.client().ping()
        with Redis.from_url(server.tcp_url) as by_port:
            assert by_port.ping()
        with Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()


def test_a_server_with_persistence_keeps_its_data():
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        server.client().set("key", "value")
        server.restart()
        assert server.client().get("key") == "value"


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="no-such-option"), RedisServer("--no-such-option", "1"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_no_server_survives_a_killed_test_run():
    code = "from tests.support import *; s = RedisServer().start(); print(s.pid, s.directory, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        pid, directory = child.stdout.readline().split()
        assert alive(int(pid))
        child.kill()

    wait_until(lambda: not alive(int(pid)), what="the end of the server")
    shutil.rmtree(directory)


def test_a_wait_in_vain_names_the_awaited_event():
    with pytest.raises(AssertionError, match=r"waited 0.02 s for the moon; the last value was 0"):
        wait_until(lambda: 0, timeout=0.02, what="the moon")


def test_the_oracle_sees_the_runs_of_a_worker(celery, oracle, app):
    worker = celery("worker", "-c", "2").ready()
    plain = app.tasks["tests.system.apps.plain"]
    for _ in range(2):
        plain.delay("a", seconds=60)
    oracle.wait_started(2)
    assert len(oracle.running("a")) == oracle.max_concurrent("a") == 2

    oracle.let_go("a", 2)

    runs = oracle.wait_ended(2)
    assert {run.id for run in runs} == {worker.wait_for(r"plain\[(.+?)\] succeeded", count=n)[1] for n in (1, 2)}
    assert oracle.running() == []
    assert worker.stop() == 0
    assert not any(alive(run.pid) for run in runs)


def test_a_killed_run_does_not_count_as_running(celery, oracle, app):
    celery("worker", "-c", "2").ready()
    plain = app.tasks["tests.system.apps.plain"]
    plain.delay("a", seconds=60)
    (run,) = oracle.wait_started(1)
    os.kill(run.pid, signal.SIGKILL)  # the other child goes on
    wait_until(lambda: not alive(run.pid), what="the death of the first")

    plain.delay("a")

    oracle.wait_ended(1)
    assert oracle.max_concurrent("a") == 1
    assert oracle.running() == []


def test_a_wait_for_a_line_ends_with_the_process(celery):
    process = celery("worker", "--no-such-option", defaults=False)

    with pytest.raises(AssertionError, match=r"the process ended(.|\n)*No such option"):
        process.wait_for("ready", timeout=60)

    assert process.wait() == 2


def test_a_stopped_process_leaves_no_child(celery):
    worker = celery("worker", "-c", "2").ready()
    worker.pause(group=True)

    worker.stop(grace=0)

    assert worker.returncode == -signal.SIGKILL
