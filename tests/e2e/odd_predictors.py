"""A predictor that does what the prompt tells it to, wrong things included; imported by the predictor's process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ext.contract.length_distribution import LEVELS, LengthDistribution, Prediction
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt

NAN: Any = SimpleNamespace(quantiles=lambda: [float("nan")] * len(LEVELS))
"""No distribution, as one of `LengthDistribution` can't be made of NaN."""


class Obedient:
    """Predicts 7 tokens, unless the prompt names a fault; writes what it is asked and told to a file."""

    def __init__(self, config: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.jsonl"
        self._learned = 0

    def predict(self, prompts: Sequence[Prompt]) -> list[Prediction | None]:
        for prompt in prompts:
            self._write({"asked": prompt.text, "max_tokens": prompt.max_tokens, "model": prompt.model})
            if "fault:raise" in prompt.text:
                raise RuntimeError("told to")
            if "fault:crash" in prompt.text:
                os._exit(1)
            if "fault:hang" in prompt.text:
                time.sleep(3600)
            if "fault:nan" in prompt.text:
                return [Prediction(NAN, "retrieval")] * len(prompts)
            if "fault:slow" in prompt.text:
                time.sleep(0.5)
        return [Prediction(LengthDistribution.through([7] * 6 + [9] * 3), "retrieval") for _ in prompts]

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        for done in finished:
            self._learned += 1
            aborted = {"aborted": True} if done.aborted else {}
            self._write({"finished": done.prompt.text, "tokens": done.tokens, **aborted})

    def close(self) -> None:
        self._write({"saved": self._learned})

    def status(self) -> dict[str, int]:
        return {"entries": self._learned, "examples": 0}

    def _write(self, entry: dict[str, Any]) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
