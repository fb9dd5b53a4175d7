"""Beat, worker and Singleton on real servers of every kind; sentinels are B5 of ``test_incidents.py``."""

from __future__ import annotations

import re
import threading

import pytest
import trustme
from celery import Celery
from celery.schedules import schedule
from redis import Redis, RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisError

from singlebeat import Schedule, Scheduler
from singlebeat.connections import private, schedule_client
from singlebeat.errors import ConfigError
from singlebeat.locks import backend_of
from singlebeat.locks.base import Call, Ref, Renewal, Verdict
from tests.support import APP, RedisServer, page, wait_until
from tests.system.apps import make_app
from tests.system.topologies import (
    COMMON,
    PASSWORD,
    Cluster,
    Sentinels,
    each_decided_and_started_once,
    prove,
    running,
    tls_port,
)

#: Rights besides.
IN_A_CLUSTER = "+cluster|slots +command"


def rights() -> list[str]:
    """Return the rules of the user that the docs recommend."""
    text = page("how-to/redis")
    found = re.search(r"ACL SETUSER singlebeat on >\S+ (.+?)\n\n", text, re.DOTALL)
    assert f"In a Cluster add\n``{IN_A_CLUSTER}``" in text
    return found[1].split()


def test_no_command_that_is_needed_is_newer_than_redis_6_2(redis):
    for command in (rule[1:] for rule in [*rights(), *IN_A_CLUSTER.split()] if rule.startswith("+")):
        since = re.search(r"'since'\W+([\d.]+)", str(redis.execute_command("COMMAND DOCS", command)))[1]
        assert tuple(map(int, since.split(".")[:2])) <= (6, 2), f"{command} came with {since}"


def test_a_cluster_keeps_the_schedule_on_one_node_and_the_locks_on_all(celery, oracle):
    with Cluster() as cluster:
        own_keys = ("~*user's*", "~*half{*")
        cluster.add_user("singlebeat", *rights(), "~{redbeat}:*", *IN_A_CLUSTER.split(), *own_keys)
        conf = {
            "redbeat_redis_url": cluster.url,
            "singleton_backend_url": cluster.url,
            "redbeat_key_prefix": "{redbeat}:",
        }
        with running(celery, conf) as (app, worker, beat):
            prove(app, oracle)
            take_locks_of_all_slots(app)
            history = cluster.master.client().xrange("{redbeat}::history")
            seen = oracle.started("tick")

            cluster.fail_over()

            oracle.wait_started(seen + 3, "tick", timeout=60)
            prove(app, oracle, "two")
            history = cluster.replica.client().xrange("{redbeat}::history")
            each_decided_and_started_once(oracle, history)
            app.redbeat_redis = RedisCluster.from_url(
                f"redis://127.0.0.1:{cluster.nodes[3].port}", decode_responses=True
            )
            assert schedule_client(app) is schedule_client(app, timeout=1) is app.redbeat_redis
            another = Celery("another", set_as_current=False)
            another.redbeat_redis = app.redbeat_redis
            with pytest.raises(ConfigError, match="hash tag"):
                schedule_client(another)
        assert beat.returncode is worker.returncode is None
        assert not beat.matches("Traceback")


def take_locks_of_all_slots(app: Celery) -> None:
    """Take, keep and free locks on all three nodes, some of them with keys of the user's own, in one call each."""
    backend = backend_of(app)
    own = [Ref("the user's", "id"), Ref("half{", "id"), Ref("the user's \udcff", "id")]
    prefix = "SINGLETONLOCK_of the test"  # an entry takes and frees locks all the while
    own.append(Ref(f"{prefix}{{3}}b", "in the slot of another"))
    refs = [Ref(f"{prefix}{{{n}}}", f"id {n}") for n in range(20)] + own
    assert len({key_slot(ref.key.encode(errors="surrogateescape")) // 5462 for ref in refs}) == 3

    def held(ids: str = "") -> list[Verdict]:
        calls = [Call(Ref(ref.key, ids or ref.task_id), "task", "", 60) for ref in refs]
        return [holder.verdict for holder in backend.acquire_many(calls, may_be_resent=True)]

    assert set(held()) == {Verdict.ACQUIRED}
    assert set(held("other")) == {Verdict.HELD}
    assert [holder.task_id for holder in backend.acquire_many([Call(Ref(r.key, "x"), "", "", 60) for r in refs])] == [
        ref.task_id for ref in refs
    ], "each call gets its own answer"
    assert set(backend.renew_many(refs, lease=60)) == {Renewal.QUEUED}
    backend.finish_many(refs[:11], remember_for=60, ran=True)
    assert held("other") == [Verdict.ACQUIRED] * 11 + [Verdict.HELD] * 13
    assert len(dict(backend.locks(prefix))) == 21
    backend.clear(prefix)
    assert not list(backend.locks(prefix))
    assert backend.get("the user's") == "id"


@pytest.mark.parametrize("servers", [Sentinels, Cluster])
def test_a_retry_period_carries_every_call_over_a_failover(servers):
    with servers() as several:
        client = private(several.url, timeout=10, options={**several.options, "retry_period": 60})
        client.set("{redbeat}:n", 0)
        calls = 0
        change = threading.Thread(target=several.fail_over)
        change.start()
        while change.is_alive():
            client.set("{redbeat}:n", calls)
            with client.pipeline() as pipe:
                pipe.get("{redbeat}:n").incr("{redbeat}:n")
                assert pipe.execute() == [str(calls), calls + 1]
            calls += 1

        assert int(client.get("{redbeat}:n")) == calls > 0
        assert several.replica.client().exists("{redbeat}:n")


def test_entries_in_a_cluster_can_be_edited_and_deleted_while_slots_move():
    with Cluster() as cluster:
        conf = {"redbeat_redis_url": cluster.url, "redbeat_key_prefix": "{redbeat}:"}
        with make_app(cluster.nodes[0].celery_url, conf) as app:
            entries = Schedule(app)
            for name in ("kept", "gone"):
                entries.upsert(name, f"{APP}.plain", schedule(60))
            cluster.move_slot()
            entries.pause("kept")
            entries.delete("gone")

            assert [entry.name for entry in entries.list()] == ["kept"]
            assert entries.get("kept").policy.paused


def test_a_prefix_without_a_hash_tag_is_one_error_line_in_a_cluster(celery):
    conf = {**COMMON, "redbeat_redis_url": "redis-cluster://127.0.0.1:1", "redbeat_key_prefix": "beat:"}
    beat = celery("beat", conf=conf)

    assert beat.wait() != 0

    assert beat.matches(
        r"^Error: redbeat_key_prefix 'beat:' needs a hash tag in a Redis Cluster.*: set it to '\{beat\}:'"
    )
    assert "Traceback" not in beat.text


def test_tls_with_a_certificate_on_both_sides(celery, oracle, server, tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("beat@example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "beat.pem")
    tls = {
        "ssl_cert_reqs": "required",
        "ssl_ca_certs": str(tmp_path / "ca.pem"),
        "ssl_certfile": str(tmp_path / "beat.pem"),
    }
    with tls_port(server, ca) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        conf = {"broker_url": url, "result_backend": url, "broker_use_ssl": tls, "redis_backend_use_ssl": tls}
        with running(celery, conf) as (app, _, _):
            prove(app, oracle)

        in_url = "&".join(f"{name}={value}" for name, value in tls.items())
        assert private(f"{url}?{in_url}", timeout=5).ping()
        assert private(f"redis://127.0.0.1:{port}", timeout=5, options={**tls, "ssl": True}).ping()
        trusting = {**tls, "ssl_cert_reqs": "CERT_NONE", "ssl_ca_certs": None}
        assert private(url, timeout=5, options=trusting).ping()
        for missing in ("ssl_certfile", "ssl_ca_certs"):
            with pytest.raises(RedisError):
                private(url, timeout=5, retries=0, options={**tls, missing: None}).ping()


def test_the_user_of_the_docs_may_do_all_that_is_needed_and_no_more(celery, oracle, own_server, redis):
    admin = own_server.client()
    admin.execute_command("ACL", "SETUSER", "singlebeat", "on", f">{PASSWORD}", *rights())
    url = f"unix://singlebeat:{PASSWORD}@{own_server.path}"
    conf = {"redbeat_redis_url": url, "singleton_backend_url": url, "singleton_key_prefix": "SINGLETONLOCK_"}
    with running(celery, conf) as (app, worker, beat):
        prove(app, oracle)
        for look in (["status"], ["list"], ["history"], ["locks"], ["health"], ["doctor"]):
            looked = celery("singlebeat", *look, conf={**COMMON, **conf})
            assert looked.wait() in {0, 1}, looked.text
            assert "NOPERM" not in looked.text
            assert "Traceback" not in looked.text
        backend_of(app).clear("SINGLETONLOCK_")
        beat.terminate()
        beat.wait()

    refused = [entry["object"] for entry in admin.acl_log() if entry["username"] == "singlebeat"]
    refused = [what for what in refused if not what.startswith("singlebeat:marker:")]  # calls are sent in two writes
    assert set(refused) <= {"config|get", "client|setinfo"}, "it does without an answer"
    assert not beat.matches("Traceback")
    assert not worker.matches("NOPERM")
    with private(url, timeout=5) as client:
        for forbidden in (("KEYS", "*"), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("GET", "elsewhere"), ("ACL", "LIST")):
            with pytest.raises(RedisError, match="permission"):
                client.execute_command(*forbidden)


def test_broker_results_schedule_and_locks_are_in_four_servers(celery, oracle):
    with RedisServer() as broker, RedisServer() as results, RedisServer() as beats, RedisServer() as locks:
        conf = {
            "broker_url": broker.celery_url,
            "result_backend": results.celery_url,
            "redbeat_redis_url": beats.url,
            "singleton_backend_url": locks.url,
        }
        with running(celery, conf) as (app, _, _):
            prove(app, oracle)

        kinds = [
            {
                re.sub(r"[-:_{].*", "", key)
                for key in server.client().scan_iter()
                if not key.startswith("singlebeat:marker:")
            }
            for server in (broker, results, beats, locks)
        ]
    assert kinds[2:] == [{"redbeat"}, {"SINGLETONLOCK", "singlebeat"}]
    assert not {"redbeat", "SINGLETONLOCK", "singlebeat"} & (kinds[0] | kinds[1])


def named(server: RedisServer) -> int:
    return sum(client["name"] == "ours" for client in server.client().client_list())


def test_the_connections_stay_as_many_over_1000_ticks_and_a_failover():
    with Sentinels() as sentinels:
        entry = {"task": f"{APP}.single", "schedule": schedule(0.02), "args": ["tick"]}
        options = {**sentinels.options, "client_name": "ours"}
        conf = {
            **COMMON,
            "broker_url": "memory://",
            "redbeat_redis_url": sentinels.url,
            "redbeat_redis_options": options,
            "singleton_backend_url": sentinels.url,
            "singleton_backend_kwargs": options,
            "beat_schedule": {"tick": entry},
            "singlebeat_watchdog_timeout": None,
            "redbeat_lock_timeout": 60,
        }
        with make_app("memory://", {**conf, "result_backend": None}) as app:
            scheduler = Scheduler(app)

            def connections() -> int:
                scheduler.tick()
                return named(sentinels.master)

            before = 3  # the third is of the thread that looks at what keeps the entry waiting
            wait_until(lambda: connections() == before, timeout=60, what="all connections")
            for _ in range(480):
                scheduler.tick()
            assert named(sentinels.master) == before

            sentinels.fail_over()
            wait_until(
                lambda: scheduler.tick() is not None and led(scheduler), timeout=60, what="beat on the next master"
            )
            for _ in range(500):
                scheduler.tick()

            assert named(sentinels.replica) <= before
            assert isinstance(schedule_client(app), Redis)
            scheduler.close()


def led(scheduler: Scheduler) -> bool:
    """Return whether the last tick of the beat reached the server."""
    return not scheduler._in_trouble
