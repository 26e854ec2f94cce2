"""The dashboard is one that Grafana takes, and shows metrics that a server has."""

from __future__ import annotations

import re
from itertools import combinations

import jsonschema
import pytest

from tests.deploy.expressions import (
    DASHBOARD,
    PANELS,
    TARGET_LABELS,
    VARIABLES,
    dashboard_expressions,
    exported,
    grouped_by,
    selectors,
)

SOURCE = {"const": {"type": "prometheus", "uid": "${datasource}"}}
TEXT = {"type": "string", "minLength": 1}
GRID = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "h": {"type": "integer", "minimum": 1},
    },
    "required": ["x", "y", "w", "h"],
    "additionalProperties": False,
}
TARGET = {
    "type": "object",
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "expr": TEXT, "legendFormat": {"type": "string"}},
    "required": ["refId", "expr", "legendFormat"],
    "additionalProperties": False,
}
PANEL = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "type": {"enum": ["stat", "timeseries"]},
        "title": TEXT,
        "description": {"pattern": r"^[^\n]{20,160}\.$"},
        "gridPos": GRID,
        "datasource": SOURCE,
        "fieldConfig": {"required": ["defaults", "overrides"]},
        "options": {"required": ["reduceOptions"]},
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
    },
    "required": ["id", "type", "title", "description", "gridPos", "datasource", "fieldConfig", "targets"],
    "additionalProperties": False,
}
ROW = {"properties": {"type": {"const": "row"}, "gridPos": GRID}, "required": ["id", "type", "title", "gridPos"]}
VARIABLE = {
    "type": "object",
    "properties": {"name": TEXT, "label": TEXT, "query": TEXT, "datasource": SOURCE},
    "required": ["name", "type", "label", "query"],
}
SCHEMA = {
    "type": "object",
    "properties": {
        "uid": TEXT,
        "title": TEXT,
        "schemaVersion": {"const": 42},
        "panels": {"items": {"anyOf": [PANEL, ROW]}},
        "templating": {"properties": {"list": {"items": VARIABLE}}, "required": ["list"]},
    },
    "required": ["uid", "title", "schemaVersion", "time", "refresh", "templating", "panels"],
}
"""What Grafana 12 and 13 read of it, as far as the dashboard uses it."""


def test_it_has_the_fields_that_grafana_needs() -> None:
    jsonschema.validate(DASHBOARD, SCHEMA)


def test_ids_titles_and_lines_are_told_apart() -> None:
    for names in (
        [panel["id"] for panel in DASHBOARD["panels"]],
        [panel["title"] for panel in DASHBOARD["panels"]],
        *([target["refId"] for target in panel["targets"]] for panel in PANELS),
    ):
        assert len(names) == len(set(names))


def test_no_two_panels_overlap_and_all_fit() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    assert [title for title, at in places if at["x"] + at["w"] > 24] == []
    assert [
        (one, other)
        for (one, a), (other, b) in combinations(places, 2)
        if a["x"] < b["x"] + b["w"]
        and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"]
        and b["y"] < a["y"] + a["h"]
    ] == []


def test_variables_that_are_used_are_declared_and_the_others_are_not() -> None:
    declared = {one["name"] for one in DASHBOARD["templating"]["list"]}
    queries = [one["query"] for one in DASHBOARD["templating"]["list"]]
    lines = [target["expr"] for panel in PANELS for target in panel["targets"]]
    used = set(re.findall(r"\$(\w+)", " ".join([*queries, *lines])))
    assert used == VARIABLES.keys()
    assert declared == {*used, "datasource"} - {"__rate_interval"}


def test_every_panel_can_be_narrowed_to_a_model_and_a_server() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for name, matchers in selectors(target["expr"]):
                assert {"model_name": "$model_name", "instance": "$instance"}.items() <= matchers.items(), name


@pytest.mark.parametrize("line", dashboard_expressions())
def test_a_line_asks_for_series_and_labels_that_a_server_has(line: str) -> None:
    expression = dashboard_expressions()[line]
    series = exported()
    read = list(selectors(expression))
    assert read or expression == "vector(8192)"
    for name, matchers in read:
        assert name in series
        assert matchers.keys() <= series[name] | TARGET_LABELS, name
        assert grouped_by(expression) <= series[name] | TARGET_LABELS, name


def test_a_legend_names_labels_that_the_line_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped_by(target["expr"])
