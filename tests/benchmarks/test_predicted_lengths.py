"""What the shipped predictor says of half of a file, once of its own requests and once of another's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any


def test_another_s_prediction_comes_with_the_same_requests(tmp_path: Path) -> None:
    """Both files have the same lengths in the same order; only what was said of them is another's."""
    predicted = importlib.import_module("predicted_lengths")
    prompts = [("Name", 5), ("Explain", 80), ("Write a story about", 400)]
    rows = [
        {"prompt": f"{prompts[n % 3][0]} thing {n}", "output": "so " * (prompts[n % 3][1] + n % 7)} for n in range(300)
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own, others = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in predicted.make(path, tmp_path / "made")
    )
    assert len(own) == 150
    lengths = [[(row["prompt_tokens"], row["output_tokens"]) for row in each] for each in (own, others)]
    assert lengths[0] == lengths[1]

    def median_error(each: list[dict[str, Any]]) -> float:
        errors = [abs(row["output_quantiles"][3] - row["output_tokens"]) / row["output_tokens"] for row in each]
        return sorted(errors)[len(errors) // 2]

    assert median_error(own) < 0.5 < median_error(others)
    assert sorted(str(row["output_quantiles"]) for row in own) == sorted(str(row["output_quantiles"]) for row in others)
