"""What the files of deploy/ ask Prometheus for, and what a server exports."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
sys.path.insert(0, str(ROOT / "scripts"))

import metrics_page  # noqa: E402

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "vllm-ext.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {"model_name": ".*", "instance": ".*", "target": "0.99", "token_budget": "8192", "__rate_interval": "1m"}
"""What Grafana would put in their place; the last is its own."""
TARGET_LABELS = {"instance"}
"""Labels that Prometheus adds."""


def rules() -> list[dict[str, Any]]:
    """All rules, of all groups."""
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def dashboard_expressions() -> dict[str, str]:
    """Expressions by panel and line, as Grafana sends them."""
    return {
        f"{panel['title']}/{target['refId']}": re.sub(r"\$(\w+)", lambda name: VARIABLES[name[1]], target["expr"])
        for panel in PANELS
        for target in panel["targets"]
    }


def rule_expressions() -> dict[str, str]:
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the metrics that an expression reads, each with its matchers: label to pattern."""
    for name, matchers in re.findall(r"([a-z_]\w*:\w[\w:]*)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)!?=~?"([^"]*)"', matchers))


def grouped_by(expression: str) -> set[str]:
    """Labels by which an expression aggregates or joins."""
    return {label for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in group.split(", ")}


@functools.cache
def exported() -> dict[str, set[str]]:
    """Series of a server, by name, each with its labels."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in (*(one[:3] for one in metrics_page.metrics()), *_of_vllm(), *_of_the_offloading()):
        if kind != "histogram":
            found[name] = {*labels}
        else:
            found |= {f"{name}_sum": {*labels}, f"{name}_count": {*labels}, f"{name}_bucket": {*labels, "le"}}
    return found


def _of_vllm() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The metrics that vLLM's logger makes: calls with a name and with what labels it has beside the usual."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_cls"):
            given = {one.arg: one.value for one in call.keywords}
            match given.get("name"):
                case ast.Constant(value=str(name)):
                    kind = call.func.attr.strip("_").removesuffix("_cls")
                    more = [node.value for node in ast.walk(given["labelnames"]) if isinstance(node, ast.Constant)]
                    labels = ("model_name", "engine", *map(str, more))
                    yield f"{name}_total" if kind == "counter" else name, kind, labels


def _of_the_offloading() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The counters of vLLM's offloading that the dashboard shows, ours of the disk among them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import _TransferMetricName

    from vllm_ext.kv.disk import tier

    names = [_TransferMetricName.STORE_BYTES, _TransferMetricName.LOAD_BYTES, *map(tier.counter_name, tier.COUNTERS)]
    for name in names:
        yield f"{name}_total", "counter", ("model_name", "engine")
