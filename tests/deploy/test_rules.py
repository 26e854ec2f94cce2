"""The rules ask for what a server exports, lead to a page, and fire when they should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.expressions import (
    RULES,
    TARGET_LABELS,
    dashboard_expressions,
    exported,
    grouped_by,
    rule_expressions,
    rules,
    selectors,
)
from tests.deploy.prometheus import promtool

PAGE = RULES.parents[2] / "docs" / "troubleshooting.md"
ALERTS = [rule for rule in rules() if "alert" in rule]


@pytest.mark.parametrize("name", rule_expressions())
def test_a_rule_asks_for_series_and_labels_that_a_server_has_or_that_are_recorded(name: str) -> None:
    recorded = {rule["record"]: grouped_by(rule["expr"]) for rule in rules() if "record" in rule}
    series = exported() | recorded
    series |= {f"vllm:kv_offload_disk_({kinds})_chunks_total": series[f"vllm:kv_offload_disk_{kind}_chunks_total"]
               for kinds in ("damaged|unreadable|unwritten",) for kind in kinds.split("|")}  # fmt: skip
    expression = rule_expressions()[name]
    read = list(selectors(expression)) + [(pattern, {}) for pattern in re.findall(r'__name__=~"([^"]+)"', expression)]
    read = [(each, matchers) for each, matchers in read if "__name__" not in expression or "(" in each]
    assert read
    for each, matchers in read:
        assert each in series
        assert matchers.keys() | grouped_by(expression) <= series[each] | TARGET_LABELS, each


def test_a_recorded_share_of_the_budget_is_over_the_window_that_its_name_says() -> None:
    shares = [rule for rule in rules() if rule.get("record", "").startswith("tier:vllm_ext_slo_missed")]
    assert len(shares) == 4
    for rule in shares:
        window = rule["record"].removeprefix("tier:vllm_ext_slo_missed:ratio_rate")
        assert re.findall(r"\[(\w+)\]", rule["expr"]) == [window] * 2
        assert [matchers.get("outcome") for _, matchers in selectors(rule["expr"])] == ["met", None]


def test_what_is_recorded_is_asked_for() -> None:
    asked = {name for rule in ALERTS for name, _ in selectors(rule["expr"])}
    assert {rule["record"] for rule in rules() if "record" in rule} <= asked


def test_every_alert_leads_to_a_heading_of_the_page() -> None:
    headings = {line[3:].lower().replace(" ", "-") for line in PAGE.read_text().splitlines() if line.startswith("## ")}
    page = "https://github.com/vllm-ext/vllm-ext/blob/main/docs/troubleshooting.md#"
    linked = {rule["annotations"]["runbook_url"] for rule in ALERTS}
    assert linked == {page + heading for heading in headings}
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in ALERTS)
    assert all(rule["annotations"]["summary"] for rule in ALERTS)


def test_every_alert_fires_in_a_case_of_the_unit_tests() -> None:
    wrong, well = yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
    fired = [re.findall(r'"(\w+)"', one["labels"])[0] for one in wrong["promql_expr_test"][0]["exp_samples"]]
    assert fired == [rule["alert"] for rule in ALERTS]
    assert well["promql_expr_test"][0]["exp_samples"] == []


def test_the_rules_are_prometheus_own_and_fire_when_they_should() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES.parent / "rules_test.yml"))


def test_promtool_reads_every_line_of_the_dashboard(tmp_path: Path) -> None:
    lines = [{"record": f"line{number}", "expr": each} for number, each in enumerate(dashboard_expressions().values())]
    file = tmp_path / "lines.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": lines}]}))
    assert f"{len(lines)} rules found" in promtool("check", "rules", str(file))
