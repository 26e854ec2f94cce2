#!/usr/bin/env python
"""Tell which papers' figures were measured with other sources than these, and repeat the smallest run to the digit.

python scripts/stale_results.py             lists them; what changed may have changed nothing that was measured
python scripts/stale_results.py --repeat    simulates the shortest run that a result keeps; 1: it differs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_ext.experiments.evidence import SAMPLE, kept_results, stale
from vllm_ext.report.kept_result import rounded
from vllm_ext.simulation.spec import SimulationSpec

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    """List, repeat; the exit status says whether what was repeated came out again."""
    results = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in kept_results(ROOT)}
    old = [name for name, result in results.items() if stale(result) is not False]
    print(f"{len(old)} of {len(results)} figures are of other sources: {', '.join(old) or '-'}")
    samples = {name: result["config"][SAMPLE] for name, result in results.items() if SAMPLE in result["config"]}
    if "--repeat" not in argv or not samples:
        return 0
    name = min(samples, key=lambda one: samples[one]["metrics"]["steps"])
    differing = differences(samples[name])
    for metric, (kept, now) in differing.items():
        print(f"{name}: {metric} was {kept}, and is {now}: measure it again, `vllm-ext repro {name}`")
    return 1 if differing else 0


def differences(sample: dict[str, dict[str, float]]) -> dict[str, tuple[float, float | None]]:
    """Return the metrics of a kept run that come out differently now: what they were, and what they are."""
    from vllm_ext.simulation.sweep.pools import simulate_point

    now = simulate_point(SimulationSpec.model_validate(sample["spec"]))
    kept = {name: value for name, value in sample["metrics"].items() if "wall" not in name}
    return {name: (value, now.get(name)) for name, value in kept.items() if rounded(now.get(name)) != rounded(value)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
