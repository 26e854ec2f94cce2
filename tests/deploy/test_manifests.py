"""The manifests have what Kubernetes and the chart ask for, and serve with flags that exist."""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.expressions import DEPLOY
from vllm_ext.cluster.config import ENVIRONMENT, ClusterOptions, Replica, serve_config
from vllm_ext.metrics import engine
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


def test_the_ray_service_says_what_the_command_prints_and_sets_the_environment_everywhere() -> None:
    """As `vllm-ext cluster serve MODEL --replicas 4 --scheduler-cls alise --kv-tier-gib 16 --print-config`."""
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    model, tier = "meta-llama/Llama-3.1-8B-Instruct", {"kv_tier": {"gib": 16.0}}
    kwargs = {"scheduler_cls": "alise", "additional_config": {"vllm_ext": tier}}
    replica = Replica(model=model, name=model, host="0.0.0.0", port=8000, engine_kwargs=kwargs, on_cpu=False)
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == serve_config(replica, ClusterOptions(replicas=4))
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == 4
    for pod in (cluster["headGroupSpec"]["template"], workers["template"]):
        (container,) = pod["spec"]["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == ENVIRONMENT
    (shm,) = workers["template"]["spec"]["volumes"]
    assert gib(container["resources"]["limits"]["memory"]) >= 16 + gib(shm["emptyDir"]["sizeLimit"]) + 16


def test_llm_d_reads_metrics_that_there_are_and_its_parts_fit_together() -> None:
    config = yaml.safe_load((DEPLOY / "llm-d-epp-config.yaml").read_text())
    plugins = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
    named = {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]}
    assert named | {config["saturationDetector"]["pluginRef"]} <= plugins.keys()
    (mapped,) = plugins["core-metrics-extractor"]["engineConfigs"]
    ours = {f"vllm_ext:load_{row.name}" for row in engine._LOAD_REPORT}
    assert mapped["queuedRequestsSpec"] in ours
    assert all(spec.startswith("vllm:") for name, spec in mapped.items() if name not in ("name", "queuedRequestsSpec"))
    assert plugins["utilization-detector"]["queueDepthThreshold"] > 1000, "tokens, not requests"
