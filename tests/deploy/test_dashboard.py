"""The Grafana dashboard of the deployment kit, and its queries in a real Prometheus."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from singlebeat.beat.keys import Keys
from singlebeat.beat.leadership.lease import Lease
from singlebeat.beat.metrics import BeatMetrics
from singlebeat.exposition import serve
from singlebeat.tasks.metrics import WorkerMetrics
from singlebeat.tasks.renewer import Renewer
from tests.deploy.conftest import ALERTS, DASHBOARD, queries
from tests.support import _spawn, free_port, wait_until

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_every_query_is_promql():
    for query in queries():
        promql_parser.parse(query)


def test_the_panels_do_not_overlap():
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_panel_has_a_description_and_no_source_of_its_own():
    (variable,) = DASHBOARD["templating"]["list"]

    assert variable["name"] == "datasource"
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}, panel["title"]


@pytest.fixture
def scraped(app, server, redis) -> Iterator[list[str]]:
    """The addresses of the metrics of a beat that leads and of a worker."""
    lease = Lease(server.client, Keys.of(app).lease, ttl=60)
    assert lease.acquire() is not None
    metrics = [BeatMetrics(app, lease), WorkerMetrics(app, Renewer(app))]
    servers = [serve("127.0.0.1", 0, each.answer) for each in metrics]
    yield [f"127.0.0.1:{each.server_address[1]}" for each in servers]
    for each in servers:
        each.shutdown()
        each.server_close()
    lease.release()


class Prometheus:
    """A real Prometheus that scrapes five times a second, with the alert rules."""

    def __init__(self, program: str, directory: Path, targets: list[str]) -> None:
        config = {
            "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "shop", "static_configs": [{"targets": targets}]}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config), "utf-8")
        self.address = f"127.0.0.1:{free_port()}"
        self.log = (directory / "log").open("wb")
        self.process = _spawn(
            [
                program,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=self.log,
        )

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, text: str) -> list[Any]:
        try:
            return self.get("query", query=text)["result"]
        except OSError:  # it starts
            return []

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def prometheus(scraped, tmp_path) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: it is in Debian's package prometheus")
    started = Prometheus(program, tmp_path, scraped)
    yield started
    started.stop()


def test_prometheus_answers_every_query_with_a_series(prometheus):
    # A rate needs two samples of each target, and the first scrapes may fail.
    wait_until(lambda: len(prometheus.query("sum_over_time(up[1m]) > 1 and up == 1")) == 2, timeout=60)

    empty = [query for query in queries() if not prometheus.query(query.removesuffix(" > 0"))]
    wait_until(lambda: {group["evaluationTime"] > 0 for group in prometheus.get("rules")["groups"]} == {True})
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    assert empty == []
    assert {rule["health"] for rule in rules} == {"ok"}
