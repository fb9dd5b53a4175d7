"""The logs of real processes: an id leads from beat to the end of a run, idleness is silent, no password is logged."""

from __future__ import annotations

from celery.schedules import schedule

from singlebeat import Entry
from tests.support import APP, RedisServer, wait_until
from tests.system.apps import make_app

BEAT = ("beat", "-S", "singlebeat.Scheduler")
SECRET = "geheimwort"
LEADS = r"this beat leads event=leadership_gained term=\d+ leader=\S+:\d+$"


def test_an_id_leads_from_beat_to_the_end_of_the_run(celery, app, oracle):
    Entry("e", f"{APP}.single", schedule(1), args=["e", 60], run_on_start=True, app=app).save()
    worker = celery("worker", "-c", "2").ready()
    beat = celery(*BEAT)

    sent = beat.wait_for(rf"Scheduler: Sending due task e \({APP}\.single\) event=dispatched entry=e task=\S+ id=(\S+)")
    task_id = sent[1]
    beat.wait_for(rf"Skipping task e .* event=skipped_overlap .* holder={task_id} reason=\"held by task {task_id}")
    oracle.let_go("e")
    worker.wait_for(rf"{task_id}\] succeeded")

    assert worker.matches(rf"{task_id}\] received")
    assert beat.matches(r" nominal=20\S+T\S+\+00:00 lateness=\d+\.\d+ kind=scheduled$")


def test_a_beat_and_a_worker_with_nothing_to_do_say_nothing(celery, app, redis):
    Entry("e", f"{APP}.plain", schedule(3600), run_on_start=False, app=app).save()
    redis.zadd("redbeat::schedule", {"redbeat:e": 4e9})
    worker = celery("worker", "-c", "1", conf={"singlebeat_lock_lease": 5}).ready()
    beat = celery(*BEAT, conf={"redbeat_lock_timeout": 10, "beat_max_loop_interval": 0.1})
    beat.wait_for(LEADS)
    wait_until(lambda: redis.exists("singlebeat:workers"), what="a worker that is seen")
    before = beat.position, worker.position

    def looks() -> int:
        return redis.info("commandstats")["cmdstat_zrangebyscore"]["calls"]

    wait_until(lambda: redis.pttl("redbeat::lock") < 9000, timeout=30, what="a lease that is not new")
    wait_until(lambda: redis.pttl("redbeat::lock") > 9000, timeout=30, what="a renewal")
    began = looks()
    wait_until(lambda: looks() >= began + 90, timeout=60, what="30 ticks")

    assert beat.lines[before[0] :] == []
    assert worker.lines[before[1] :] == []


def test_no_level_logs_a_password(celery, oracle):
    everything = ("-l", "DEBUG")
    conf = {"singlebeat_lock_lease": 1, "redbeat_lock_timeout": 2, "singlebeat_socket_timeout": 1}
    with RedisServer(password=SECRET) as own:
        url = f"redis://:{SECRET}@127.0.0.1:{own.port}/0"
        conf |= dict.fromkeys(("broker_url", "result_backend", "redbeat_redis_url", "singleton_backend_url"), url)
        with make_app(url) as app:
            Entry("e", f"{APP}.single", schedule(1), args=["e"], run_on_start=True, app=app).save()
        processes = [celery("worker", "-c", "1", *everything, conf=conf).ready(), celery(*BEAT, *everything, conf=conf)]
        oracle.wait_ended(1, "e")
        wrong = {**conf, **{name: value.replace("wort", "w0rt") for name, value in conf.items() if value == url}}
        processes += [celery(*BEAT, *everything, conf=wrong), celery("worker", *everything, conf=wrong)]
        broken = {**conf, "redbeat_redis_url": "redis://:geheim/wort@127.0.0.1/0"}
        processes += [celery(*BEAT, *everything, conf=broken), celery("singlebeat", "status", conf=broken)]
        processes[2].wait_for("WRONGPASS|invalid username-password|invalid password")
        processes[3].wait_for("WRONGPASS|invalid username-password|invalid password")
        processes[4].wait()
        processes[5].wait()
        own.kill()
        processes[0].wait_for("onnection to broker lost|Cannot connect")
        processes[1].wait_for("event=(trouble|unreachable)")
        celery.stop()

    for process in processes:
        told = [line for line in process.lines if "geheim" in line]
        assert told == [], process.args
    assert all("**@" in process.text for process in (processes[0], processes[1], processes[4])), "URLs are told"
