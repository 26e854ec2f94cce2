"""Rows that are the papers': all of a policy's parameters have a published value, and none of ours is left on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vllm_ext.config import AXES, ExtConfig
from vllm_ext.systems import System, build, known, resolve, table

PUBLISHED = [row for row in table(unserved=True) if "-published" in row.name]

ROWS = pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
BASE = System(name="base")


@ROWS
def test_every_field_of_every_policy_has_a_published_value(row: System) -> None:
    """A field that is added to a policy fails here until it is known what the paper has in its place."""
    for axis in AXES:
        factories: list[Any] = [getattr(row, axis), *(row.gates if axis == "admission" else ())]
        chosen = [factory for factory in factories if factory is not getattr(BASE, axis)]
        assert set(row.parameters.get(axis, {})) == {f.name for each in chosen for f in dataclasses.fields(each)}


@ROWS
def test_a_published_row_stands_beside_ours_and_differs_from_it(row: System) -> None:
    ours = resolve(row.name.partition("-published")[0])
    published, own = build(ExtConfig(system=row.name)), build(ExtConfig(system=ours.name))
    assert published.all != own.all
    same_policies = [type(policy) for policy in published.all] == [type(policy) for policy in own.all]
    assert same_policies == (ours.name != "alise")  # ours has another order, which preempts nobody
    assert row.paper == ours.paper


def test_which_papers_have_a_row() -> None:
    papers = {"alise", "sarathi", "accelgen", "past-future", "pensieve"}
    assert {name.removesuffix("-published") for name in known() if name.endswith("-published")} == papers
