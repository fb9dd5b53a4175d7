"""The compose file of the deployment kit, and the processes that it starts."""

from __future__ import annotations

import re
import shlex
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner
from compose_spec import PyCompose

from singlebeat.cli import main
from tests.deploy.conftest import ALERTS, KIT, queries
from tests.deploy.test_kubernetes import container
from tests.deploy.test_systemd import unit
from tests.support import RedisServer, free_port

TEXT = (KIT / "compose.yaml").read_text("utf-8")
SERVICES = yaml.safe_load(TEXT)["services"]

#: Of Kubernetes.
PROBES = [("beat", "livenessProbe"), ("beat", "readinessProbe"), ("worker", "readinessProbe")]

EXPRESSIONS = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]


@pytest.fixture
def kept() -> Iterator[RedisServer]:
    """The Redis of the compose file."""
    program, *options = SERVICES["redis"]["command"]
    assert program == "redis-server"
    with RedisServer(*options) as server:
        yield server


def test_compose_knows_every_field_of_the_file():
    PyCompose.from_yaml(TEXT).validate()


@pytest.mark.parametrize("name", ["beat", "worker"])
def test_all_platforms_start_the_same_command(name):
    command = SERVICES[name]["command"]

    assert command == container(name)["command"]
    assert command[1:] == shlex.split(unit(name)["ExecStart"])[1:]


def test_two_beats_wait_for_a_redis_that_answers():
    assert SERVICES["beat"]["deploy"]["replicas"] == 2
    for name in ("beat", "worker"):
        assert SERVICES[name]["depends_on"]["redis"]["condition"] == "service_healthy"
        assert SERVICES[name]["environment"] == {"REDIS_URL": "redis://redis:6379/0"}


def test_the_kit_runs(shop, shop_env, shop_app, kept):
    """Its processes answer the probes, doctor warns of nothing, and each metric of dashboard and alerts is served."""
    commands = {name: shlex.join(SERVICES[name]["command"]) for name in ("beat", "worker")}
    started = {name: shop(command, REDIS_URL=kept.celery_url) for name, command in commands.items()}
    second = shop(commands["beat"], REDIS_URL=kept.celery_url, BEAT_METRICS_PORT=str(free_port()))
    for beat in (started["beat"], second):
        beat.wait_for("this beat leads|Standing by")
    started["worker"].ready()

    def get(name: str, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{shop_env[f'{name.upper()}_METRICS_PORT']}{path}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()

    probes = {(name, container(name)[kind]["httpGet"]["path"]) for name, kind in PROBES}
    assert {get(*probe)[0] for probe in probes} == {200}

    _, *health = SERVICES["beat"]["healthcheck"]["test"]
    app = shop_app({"REDIS_URL": kept.celery_url})
    said = {
        name: CliRunner().invoke(main, args, obj=SimpleNamespace(app=app))
        for name, args in {"health": health[4:], "doctor": ["doctor"]}.items()
    }
    assert health[:4] == ["celery", "-A", "shop", "singlebeat"]
    assert [(answer.exit_code, answer.output) for answer in said.values() if answer.exit_code] == []
    assert "warning" not in said["doctor"].output, said["doctor"].output

    samples = "".join(get(name, "/metrics")[1] for name in started)
    known = set(re.findall(r"(?m)^(singlebeat_\w+)", samples))
    used = set(re.findall(r"\bsinglebeat_\w+", " ".join([*queries(), *EXPRESSIONS])))
    assert used - known == set()
