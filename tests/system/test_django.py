"""A Django project as its users write one: settings in Celery's namespace, calls on commit, beat and worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT, wait_until

SITE = "tests.system.djangosite"

#: The databases that the settings of the project name.
SCHEDULE_DB, LOCK_DB = 1, 2


@pytest.fixture
def environment(server, redis, tmp_path):
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    site = {"DJANGO_SETTINGS_MODULE": f"{SITE}.settings", "SB_TEST_DJANGO_DB": str(tmp_path / "site.sqlite3")}
    return {**os.environ, **site, "SB_TEST_URL": server.celery_url, "PYTHONPATH": python_path}


@pytest.fixture
def run(environment):
    """Runs a script in a process of the project, and returns what it has printed in JSON."""

    def run(script: str) -> object:
        command = [sys.executable, "-c", f"import django; django.setup()\n{script}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


ON_COMMIT = """
import contextlib, json
from django.core.management import call_command
from django.db import transaction
from tests.system.djangosite import celery_app, models, tasks
from singlebeat.locks import backend_of

call_command("migrate", run_syncdb=True, verbosity=0)

def now():
    with celery_app.connection_for_read() as connection:
        queue = connection.default_channel.client.llen("celery")
    return [len(list(backend_of(celery_app).locks("site-lock:"))), queue]

seen = []
for task in (tasks.add_note, tasks.touch_note):
    with contextlib.suppress(RuntimeError), transaction.atomic():
        models.Note.objects.create(text="rolled back")
        task.delay_on_commit("rolled back")
        task.apply_async_on_commit(["rolled back"])
        raise RuntimeError
    seen.append(["rolled back", *now()])
    with transaction.atomic():
        task.delay_on_commit("committed")
        task.apply_async_on_commit(kwargs={"text": "committed"})
        seen.append(["before commit", *now()])
    seen.append(["after commit", *now()])
print(json.dumps(seen))
"""


def test_a_call_on_commit_takes_its_lock_at_commit_only(run):
    assert run(ON_COMMIT) == [
        ["rolled back", 0, 0],
        ["before commit", 0, 0],
        ["after commit", 1, 1],
        ["rolled back", 1, 1],
        ["before commit", 1, 1],
        ["after commit", 2, 2],
    ]


MISSPELT = """
import json
from django.conf import settings
from celery import Celery
from singlebeat.beat.scheduler import Scheduler
from singlebeat.config import Config
from singlebeat.errors import ConfigError
from tests.system.djangosite import celery_app

lease = Config.of(celery_app).singlebeat_lock_lease
settings.CELERY_SINGLEBEAT_LOCK_LEESE = 7
app = Celery()
app.config_from_object("django.conf:settings", namespace="CELERY")
try:
    Scheduler(app, lazy=True)
except ConfigError as exc:
    print(json.dumps([lease, str(exc)]))
"""


def test_a_misspelt_django_setting_is_an_error_with_the_right_name(run):
    assert run(MISSPELT) == [7.0, "unknown setting singlebeat_lock_leese; did you mean singlebeat_lock_lease?"]


LOAD = """
import json, logging
from django.conf import settings
from tests.system.djangosite import celery_app
from singlebeat.diagnosis.code import load_code

settings.LOGGING = {"version": 1}  # which disables all loggers that are there
host = logging.getLogger("host")
why = load_code(celery_app)
print(json.dumps([why, host.disabled, "tests.system.djangosite.tasks.add_note" in celery_app.tasks]))
"""


def test_the_page_in_django_leaves_the_log_of_its_host_alone(run):
    """Celery would set Django up once more."""
    assert run(LOAD) == ["", False, True]


SEND = """
import json
from django.core.management import call_command
from tests.system.djangosite import tasks

call_command("migrate", run_syncdb=True, verbosity=0)
tasks.plain_note.apply_async(["a"], task_id="plain")
for _ in range(2):  # by name: the worker takes the lock, and refuses the second of the same id
    tasks.add_note.app.send_task(tasks.add_note.name, ["a"], task_id="twice")
print(json.dumps("sent"))
"""


def test_beat_and_worker_run_a_project_with_all_settings_in_the_namespace(celery, server, redis, environment, run):
    run(SEND)
    worker = celery("worker", "-c", "1", app=SITE, env=environment).ready()
    worker.wait_for(r"twice\] has run already: this copy is dropped")
    celery("beat", app=SITE, env=environment)

    worker.wait_for(r"add_note\[\S+\] succeeded in .*: 2$")
    plain, first, copy, *rest = [match[0] for match in worker.matches("after .* the database is .*")]
    assert plain == "after plain the database is closed"
    assert first == copy == "after twice the database is closed"
    assert {line.rpartition(" ")[2] for line in rest} == {"closed"}
    with server.client(db=SCHEDULE_DB) as schedule, server.client(db=LOCK_DB) as locks:
        assert schedule.type("site:note") == "hash"
        assert wait_until(lambda: locks.keys("site-lock:*"))
    assert not redis.keys("*site*")
