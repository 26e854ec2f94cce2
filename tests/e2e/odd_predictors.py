"""A predictor that does what the prompt tells it to, wrong things included; imported by the predictor's process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt


class Obedient:
    """Predicts 7 tokens, unless the prompt names a fault; writes what it is asked and told to a file."""

    def __init__(self, config: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.jsonl"
        self._learned = 0

    def predict(self, prompts: Sequence[Prompt]) -> list[Estimate | None]:
        for prompt in prompts:
            self._write({"asked": prompt.text, "max_tokens": prompt.max_tokens, "model": prompt.model})
            if "fault:raise" in prompt.text:
                raise RuntimeError("told to")
            if "fault:crash" in prompt.text:
                os._exit(1)
            if "fault:hang" in prompt.text:
                time.sleep(3600)
            if "fault:nan" in prompt.text:
                return [Estimate(float("nan"), float("nan"), "retrieval")] * len(prompts)  # type: ignore[arg-type]
            if "fault:slow" in prompt.text:
                time.sleep(0.5)
        return [Estimate(7, 9, "retrieval") for _ in prompts]

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        for done in finished:
            self._learned += 1
            self._write({"finished": done.prompt.text, "tokens": done.tokens})

    def save(self) -> None:
        self._write({"saved": self._learned})

    def status(self) -> dict[str, int]:
        return {"entries": self._learned, "examples": 0}

    def _write(self, entry: dict[str, Any]) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
