"""`benchmarks/engine/clock_agreement.py`: both clocks get the same requests, and seconds are set beside each other."""

from __future__ import annotations

import json
from argparse import Namespace
from importlib import import_module as script
from pathlib import Path

import pytest

from tests.support.paper_servers import Paper
from vllm_ext.cli import compare


def test_seconds_of_one_clock_are_held_against_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper the engine's clock is right of `fcfs`, and a fifth too slow of `alise`."""
    backends = {"wall": Paper(noise=0.0), "engine": Paper(noise=0.0)}
    backends["engine"].slower["alise"] = 1.2

    def backend(args: Namespace, _: Path) -> Paper:
        return backends[args.clock]

    monkeypatch.setattr(compare, "_backend", backend)
    monkeypatch.setattr(compare, "_clock_notes", lambda _: ())  # which would read the steps
    out = tmp_path / "out.json"
    script("clock_agreement").main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {len(each.starts) for each in backends.values()} == {6}
    off = {claim["name"]: claim["value"] for claim in result["claims"] if "mean e2e" in claim["name"]}
    assert off["fcfs at 0.9: mean e2e, by which the engine's clock is off"] == 0
    assert off["alise at 0.9: mean e2e, by which the engine's clock is off"] >= 0.2
    asked = [
        {json.dumps(one.model_dump(mode="json")) for _, one in each.served if one.arrivals == "poisson"}
        for each in backends.values()
    ]
    assert asked[1] == asked[0]
