"""The documentation names the devices and models there are, and a wrong one is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ext.simulation.cost.devices import DEVICES
from vllm_ext.simulation.cost.models import MODELS
from vllm_ext.simulation.workloads.synthetic import CONVERSATIONS, PRESETS

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import simulator_tables  # noqa: E402

PAGE = (ROOT / "docs" / "simulator-inputs.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("heading", "known"), [("Devices", DEVICES), ("Models", MODELS)])
def test_the_documentation_names_all_there_are(heading: str, known: Iterable[str]) -> None:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].split(". Peaks")[0]
    assert re.findall(r"`([^`]+)`", section) == [*known]


def test_the_page_of_tables_has_a_row_for_each() -> None:
    page = simulator_tables.page()
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == {*DEVICES, *MODELS, *PRESETS, *CONVERSATIONS}
    assert rows["h100"].startswith("989 | 79.6 | 3350 | 50 | 450 |")
    assert rows["qwen3-30b-a3b"].startswith(
        "48 | 2048 | 32 / 4 x 128 | 768 gated | 8 of 128 x 768 | 151936 | 30.53 | 3.35 | 96 |"
    )
    mean = float(rows["distribution-2"].split(" / ")[0])
    assert mean == pytest.approx(4096, rel=0.01)


@pytest.mark.parametrize(
    "field",
    [
        "gemm_efficiency",
        "memory_efficiency",
        "weight_efficiency",
        "attention_efficiency",
        "link_efficiency",
        "peak_flops",
        "tile_tokens",
    ],
)
def test_a_device_out_of_range_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}\n.*should be greater than .*input_value=0"):
        replace(DEVICES["h100"], **{field: 0})
