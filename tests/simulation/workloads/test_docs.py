"""The page on workloads says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_ext import datasets
from vllm_ext.simulation import synthetic
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

PAGE = (Path(__file__).parents[3] / "docs" / "simulator-workloads.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def test_every_preset_and_format_is_on_the_page() -> None:
    listed = set(re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE))
    assert {*synthetic.PRESETS, *synthetic.CONVERSATIONS, *datasets.FORMATS} - {"auto"} <= listed


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_survive_json_and_can_be_built(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text(
        "".join(f'{{"prompt_tokens": 3, "output_tokens": 4, "timestamp": {t}}}\n' for t in (1, 2))
    )
    spec = WorkloadSpec.model_validate_json(example)
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec
    load = build(spec, max_model_len=32768)
    assert next(load.start()).arrival_s >= 0
