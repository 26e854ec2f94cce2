"""`vllm-ext options`: all there are, and nothing that a server would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ext.cli.main import main
from vllm_ext.cli.options import Option, options
from vllm_ext.config.flags import FLAGS, names_of
from vllm_ext.config.options import ExtConfig

FOUND = {one.name: one for one in options()}


def nested(config: Any) -> set[str]:
    names = set()
    for name, value in config:
        names |= {f"{name}.{inner}" for inner in nested(value)} if hasattr(value, "model_fields") else {name}
    return names


def test_every_option_and_every_flag_is_there_with_its_meaning() -> None:
    assert nested(ExtConfig()) <= FOUND.keys()
    for path, (flag, _) in FLAGS.items():
        assert FOUND[path].flags == ", ".join(names_of(path, flag))
    assert {name for name, one in FOUND.items() if not one.meaning or not one.allowed} == set()


def test_an_option_says_what_is_allowed() -> None:
    assert FOUND["system"] == Option(
        "system", "--scheduler-cls", "text", "fcfs", "Name of a system, or a composition such as ``fcfs+alise``."
    )
    assert FOUND["kv_tier.gib"].allowed == "number, auto"
    assert FOUND["kv_tier.bits"][1:4] == ("--kv-tier-bits", "16, 8", "")
    assert FOUND["kv_tier.salt_share"][2:4] == ("number > 0 and ≤ 1", "1.0")
    assert FOUND["kv_tier.prompt_only"].allowed == "true, false, auto"
    assert FOUND["ordering.gamma"].allowed == "normalised (0.25), mean (0.5), tail (1)"
    assert FOUND["slo.shed"].default == "false"
    assert FOUND["prediction.sources"].default == ", ".join(ExtConfig().prediction.sources)


def test_they_are_printed_as_text_and_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert "kv_tier.bits  (16, 8)\n    --kv-tier-bits\n    Bits per KV element" in text
    assert "policies  (list)\n    --ext-policy\n" in text
    assert main(["options", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# All options\n")
    assert "| `slo.shed` | `--ext-shed` | true, false | false | Answer a request with 503" in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(FOUND)
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}
