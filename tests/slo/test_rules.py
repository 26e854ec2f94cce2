"""The example of a burn-rate alert: it is a rule file, asks for metrics that exist, and the page shows it as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vllm_ext.slo import metrics as slo_metrics

DOCS = Path(__file__).parents[2] / "docs"
RULES = DOCS / "examples" / "slo_burn_rate.rules.yml"


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_alerts_ask_for_what_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    alerts = [rule["expr"] for rule in rules() if "alert" in rule]
    used = {name for expr in alerts for name in re.findall(r"tier:\w+:\w+", expr)}
    assert len(alerts) == 2
    assert used == recorded


def test_what_is_recorded_is_a_share_of_a_counter_of_ours() -> None:
    counter = slo_metrics._metrics().requests
    name = f"{counter._name}_total"
    for rule in rules():
        if "record" not in rule:
            continue
        window = rule["record"].removeprefix("tier:vllm_ext_slo_missed:ratio_rate")
        calls = re.findall(r"rate\(([\w:]+)\{([^}]*)\}\[(\w+)\]\)", rule["expr"])
        assert [(metric, span) for metric, _, span in calls] == [(name, window)] * 2
        labels = {label for _, matchers, _ in calls for label in re.findall(r"(\w+)=", matchers)}
        assert labels == {"objective", "outcome"} <= set(counter._labelnames)
        assert 'outcome="met"' in calls[0][1]
        assert "outcome" not in calls[1][1]


def test_the_pages_name_every_metric() -> None:
    metrics = slo_metrics._metrics()
    for page in ("slo.md", "metrics.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        for counter in (metrics.requests, metrics.tokens, metrics.shed):
            assert f"`{counter._name}_total`" in text


def test_the_page_shows_the_alert_of_the_file() -> None:
    alert = next(rule for rule in rules() if rule.get("alert") == "SloBudgetBurnsFast")
    block = re.search(r"```yaml\n(.*?)```", (DOCS / "slo.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (shown,) = yaml.safe_load(block.group(1))
    assert shown == {key: alert[key] for key in shown}
