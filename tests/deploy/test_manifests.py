"""The manifests have what Kubernetes and the chart ask for, and serve with flags that exist."""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.expressions import DEPLOY
from vllm_ext.systems import compose

OBJECTS: dict[str, dict[str, Any]] = {
    each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}
POD: dict[str, Any] = OBJECTS["Deployment"]["spec"]["template"]
CONTAINER: dict[str, Any] = POD["spec"]["containers"][0]
ENGINE: dict[str, Any] = yaml.safe_load((DEPLOY / "production-stack-values.yaml").read_text())["servingEngineSpec"]


def test_kinds_and_versions_are_those_of_kubernetes_and_the_operator() -> None:
    assert {kind: each["apiVersion"] for kind, each in OBJECTS.items()} == {
        "Deployment": "apps/v1",
        "Service": "v1",
        "PodMonitor": "monitoring.coreos.com/v1",
    }
    assert all(each["metadata"]["name"] == "vllm-ext" for each in OBJECTS.values())


def test_everything_selects_the_pods_and_their_port() -> None:
    labels = POD["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    (port,) = CONTAINER["ports"]
    assert str(port["containerPort"]) == CONTAINER["args"][CONTAINER["args"].index("--port") + 1]
    asked = [OBJECTS["Service"]["spec"]["ports"][0]["targetPort"]]
    asked += [each["port"] for each in OBJECTS["PodMonitor"]["spec"]["podMetricsEndpoints"]]
    asked += [CONTAINER[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness", "liveness")]
    assert set(asked) == {port["name"]}


def test_volumes_are_mounted_and_the_memory_holds_what_lies_in_it() -> None:
    volumes = {each["name"]: each for each in POD["spec"]["volumes"]}
    assert {each["name"] for each in CONTAINER["volumeMounts"]} == volumes.keys()
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    tier = int(CONTAINER["args"][CONTAINER["args"].index("--kv-tier-gib") + 1])
    limits, requests = CONTAINER["resources"]["limits"], CONTAINER["resources"]["requests"]
    assert gib(limits["memory"]) >= tier + gib(shm["sizeLimit"]) + 16
    assert limits.items() <= requests.items()


def gib(size: str) -> int:
    assert size.endswith("Gi")
    return int(size.removesuffix("Gi"))


def test_the_chart_gets_what_it_requires_and_no_default_that_undoes_the_tier() -> None:
    (model,) = ENGINE["modelSpec"]
    assert {"name", "repository", "tag", "modelURL", "replicaCount", "requestCPU", "requestMemory", "requestGPU"} <= (
        model.keys()
    )
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert model["vllmConfig"]["tensorParallelSize"] == 1
    assert model["requestMemory"] == model["limitMemory"]


def test_both_serve_a_system_that_exists_with_the_same_flags() -> None:
    arguments = CONTAINER["args"]
    flags = arguments[arguments.index("--scheduler-cls") :]
    assert ENGINE["modelSpec"][0]["vllmConfig"]["extraArgs"] == flags
    assert flags[1] in compose._SYSTEMS


def test_the_image_is_vllms_of_the_version_that_was_verified() -> None:
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    assert lines[0] == "FROM vllm/vllm-openai:v0.32.0"
    assert lines[1].startswith("RUN ")
