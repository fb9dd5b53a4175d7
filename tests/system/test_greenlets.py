"""gevent and eventlet: what renews locks beside their loop shares nothing with it that has to be waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import trustme

from singlebeat.diagnosis.locks import every
from tests.support import APP, ROOT, RedisServer, until_answered, wait_until
from tests.system.topologies import Cluster, Sentinels, tls_port

LIBRARIES = ("gevent", "eventlet")

PATCHED = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}

#: Prints what a native thread has read, the hub of greenlets that it has made, and what it has imported.
SCRIPT = """
import json
import sys
from importlib.abc import MetaPathFinder
from singlebeat.clients import private
from singlebeat.native_threads import SimpleQueue, await_native, is_native, start_native_thread

url, options = sys.argv[1], json.loads(sys.argv[2])
imported, seen, done = [], [], SimpleQueue()

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if is_native():
            imported.append(name)

def hub():
    if "gevent" in sys.modules:
        from gevent._hub_local import get_hub_if_exists
        return get_hub_if_exists()
    from eventlet.hubs import _threadlocal
    return getattr(_threadlocal, "hub", None)

def talk():
    client = private(url, timeout=10, options=options)
    client.set("key", "value")
    seen.extend([client.get("key"), str(hub())])
    done.put(None)

private(url, timeout=10, options=options).get("key")  # as the loop has done before
sys.meta_path.insert(0, Finder())
start_native_thread(talk, "talk")
await_native(done, timeout=30)
print(json.dumps([*seen, imported]))
"""


def run_patched(library: str, script: str, *args: str, before: str = "") -> str:
    """Return what a script prints in a process that a library has patched before anything else but ``before``."""
    pytest.importorskip(library)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-c", f"{before}\n{PATCHED[library]}\n{script}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def over_socket(stack: ExitStack) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield stack.enter_context(RedisServer(socket=True)).url, {}


@contextmanager
def over_tcp(stack: ExitStack) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield stack.enter_context(RedisServer()).url, {}


@contextmanager
def over_tls(stack: ExitStack) -> Iterator[tuple[str, Mapping[str, Any]]]:
    ca = trustme.CA()
    server = stack.enter_context(RedisServer())
    port = stack.enter_context(tls_port(server, ca))
    certificate = stack.enter_context(ca.issue_cert("client").private_key_and_cert_chain_pem.tempfile())
    authority = stack.enter_context(ca.cert_pem.tempfile())
    yield f"rediss://127.0.0.1:{port}/0", {"ssl_certfile": certificate, "ssl_ca_certs": authority}


@contextmanager
def over_sentinels(stack: ExitStack) -> Iterator[tuple[str, Mapping[str, Any]]]:
    sentinels = stack.enter_context(Sentinels())
    yield sentinels.url, sentinels.options


@contextmanager
def over_cluster(stack: ExitStack) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield stack.enter_context(Cluster()).url, {}


Transport = Callable[[ExitStack], Any]
TRANSPORTS: tuple[Transport, ...] = (over_socket, over_tcp, over_tls, over_sentinels, over_cluster)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda each: each.__name__)
def test_a_native_thread_reaches_redis_without_greenlets(transport: Transport, library: str) -> None:
    with ExitStack() as stack, transport(stack) as (url, options):
        seen = json.loads(run_patched(library, SCRIPT, url, json.dumps(options)))
    assert seen == ["value", "None", []]


#: Prints where a line was written that a native thread has logged, and where its signal arrived.
VOICES = """
import logging
from celery.signals import worker_ready
from singlebeat.log import Log
from singlebeat.native_threads import SimpleQueue, await_native, do_in_loop, is_native, start_native_thread

class Handler(logging.Handler):
    def emit(self, record):
        heard.put(None)
        print(record.getMessage(), is_native())
        raise RuntimeError("a handler of a user")

def receive(**kwargs):
    heard.put(None)
    print("signal", is_native())

def talk():
    try:
        raise ValueError("as asked")
    except ValueError:
        log.exception("said", event="said", of=is_native())
    do_in_loop(lambda: worker_ready.send(sender=None))

heard, log = SimpleQueue(), Log("singlebeat.voices")
logging.getLogger("singlebeat.voices").addHandler(Handler())
worker_ready.connect(receive)
start_native_thread(talk, "talk")
await_native(heard, timeout=30)
heard.get()
await_native(heard, timeout=30)
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_loop_writes_the_log_lines_of_a_native_thread(library: str) -> None:
    """Loggers and handlers have locks, and receivers of signals are code of users."""
    said = run_patched(library, VOICES)
    assert said == "said event=said of=true False\nsignal False\n"


ASK_RESULTS = """
import sys
app = Celery(broker=sys.argv[1], backend=sys.argv[1])
check_results(app, timeout=60)
print("answers")
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_command_asks_for_results_though_its_tasks_have_patched_it(library, redis, server):
    """It imports these modules last."""
    imports = "from celery import Celery\nfrom singlebeat.beat.result_backend import check_results"

    assert run_patched(library, ASK_RESULTS, server.celery_url, before=imports) == "answers\n"


def test_greenlets_that_are_killed_while_they_begin_leave_no_lock(celery, app, redis):
    """Each call is revoked at another moment of its start. A worker of eventlet obeys one such revoke, and no other."""
    pytest.importorskip("gevent")
    worker = celery("worker", "-P", "gevent", "-c", "20").ready()
    until_answered(partial(app.control.broadcast, "ping"))
    for number in range(80):
        result = app.tasks[f"{APP}.single"].delay(f"{number}", 30)
        for _ in range(3 * (number % 20)):
            redis.ping()
        app.control.revoke(result.id, terminate=True)

    wait_until(lambda: not [*every(app)], timeout=20, what="the end of all locks")
    worker.terminate()
    assert worker.wait() == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_workers_of_greenlets_start_while_their_locks_are_renewed(library, celery):
    """Several, because the renewer and the consumer connect and import at the same time."""
    pytest.importorskip(library)
    workers = [celery("worker", "-P", library, "-c", "2") for _ in range(4)]
    for worker in workers:
        worker.ready()
    for worker in workers:
        worker.terminate()
    assert [worker.wait() for worker in workers] == [0] * len(workers)
