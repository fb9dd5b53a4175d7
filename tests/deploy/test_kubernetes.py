"""The Kubernetes manifests of the deployment kit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import KIT

MANIFESTS = list(yaml.safe_load_all((KIT / "kubernetes.yaml").read_text("utf-8")))

#: The oldest one that has every field of the manifests, and the newest one whose schemas are installed.
VERSIONS = ["1.27", kubernetes_validate.latest_version()]


def manifest(kind: str, name: str) -> Mapping[str, Any]:
    (found,) = [each for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found["spec"]


def container(name: str) -> Mapping[str, Any]:
    (found,) = manifest("Deployment", f"shop-{name}")["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("given", MANIFESTS, ids=lambda given: f"{given['kind']} {given['metadata']['name']}")
def test_kubernetes_knows_every_field_of_a_manifest(given, version):
    kubernetes_validate.validate(given, version, strict=True)


@pytest.mark.parametrize("name", ["beat", "worker"])
def test_a_selector_finds_the_pods(name):
    spec = manifest("Deployment", f"shop-{name}")

    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def test_a_drained_node_leaves_a_beat():
    beats, budget = manifest("Deployment", "shop-beat"), manifest("PodDisruptionBudget", "shop-beat")
    (spread,) = beats["template"]["spec"]["topologySpreadConstraints"]

    assert beats["replicas"] - budget["maxUnavailable"] >= 1
    assert budget["selector"] == beats["selector"] == spread["labelSelector"]


@pytest.mark.parametrize("name", ["beat", "worker"])
def test_kubernetes_probes_the_port_that_the_app_serves(name, shop_app):
    given = container(name)
    conf = shop_app({each["name"]: each.get("value", "redis://redis/0") for each in given["env"]}).conf

    setting = "singlebeat_metrics_port" if name == "beat" else "singlebeat_worker_metrics_port"
    (port,) = given["ports"]
    assert (conf.singlebeat_metrics_host, conf[setting]) == ("0.0.0.0", port["containerPort"])
    probes = [probe for key, probe in given.items() if key.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
