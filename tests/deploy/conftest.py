"""The app of the deployment kit on real servers."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from celery import Celery, _state

from tests.support import ROOT, CeleryProcess, free_port

KIT = ROOT / "docs/deploy"
ALERTS = KIT / "alerts.yml"
DASHBOARD = json.loads((KIT / "grafana.json").read_text("utf-8"))


def queries() -> list[str]:
    """Return the queries of the dashboard, with Grafana's variable as Grafana fills it."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [target["expr"].replace("$__rate_interval", "1m") for target in targets]


@pytest.fixture
def shop_directory(tmp_path: Path) -> Path:
    """The directory in which the app of the kit is installed; its processes write nothing to it."""
    directory = tmp_path / "shop"
    directory.mkdir()
    shutil.copy(KIT / "shop.py", directory)
    return directory


@pytest.fixture
def shop_env(server, redis) -> dict[str, str]:
    """The environment of the app of the kit."""
    return {
        "REDIS_URL": server.celery_url,
        "BEAT_METRICS_PORT": str(free_port()),
        "WORKER_METRICS_PORT": str(free_port()),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture
def shop(celery, shop_directory, shop_env) -> Callable[..., CeleryProcess]:
    """Starts a process of the kit by its own command line."""

    def start(command: str, **env: str) -> CeleryProcess:
        program, *args = shlex.split(command)
        assert (Path(program).name, args[:2]) == ("celery", ["-A", "shop"])
        return celery(*args[2:], app="shop", cwd=shop_directory, env={**shop_env, **env}, defaults=False)

    return start


@pytest.fixture
def shop_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Celery]]:
    """Makes the app of the kit in this process, for an environment; no app of another test gets its tasks."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    made: list[Celery] = []

    def make(env: Mapping[str, str]) -> Celery:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        made.append(runpy.run_path(str(KIT / "shop.py"))["app"])
        return made[-1]

    yield make
    for app in made:
        app.close()
