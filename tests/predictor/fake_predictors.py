"""Predictors that misbehave on demand; imported by the predictor's process, by file name: no relative imports."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt

TOKENS = 7
FOREVER_S = 3600.0
GOOD = Prediction(LengthDistribution.point(TOKENS), "retrieval")


def odd(*quantiles: Any) -> Any:
    return GOOD._replace(distribution=SimpleNamespace(quantiles=lambda: quantiles))  # type: ignore[arg-type]


ODD: dict[str, list[Any]] = {
    "nan": [odd(*[math.nan] * 9)],
    "infinite": [odd(*range(1, 9), math.inf)],
    "zero": [odd(*range(9))],
    "descending": [odd(*range(9, 0, -1))],
    "eight": [odd(*range(1, 9))],
    "huge": [odd(*range(1, 9), 2**70)],
    "no distribution": [GOOD._replace(distribution=None)],  # type: ignore[arg-type]
    "no prediction": ["seven"],
    "too many": [GOOD, GOOD],
    "no source": [GOOD._replace(source=None)],  # type: ignore[arg-type]
    "empty source": [GOOD._replace(source="")],
    "broken source": [GOOD._replace(source="\ud800")],
    "long source": [GOOD._replace(source="x" * 65)],
}
"""What `Obedient` returns for a prompt of that text: no prediction, whatever it is."""


class Obedient:
    """Does what a prompt's text says, and else predicts 7 tokens; what it is asked and told goes to a file."""

    def __init__(self, config: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.jsonl"
        self._learned = 0
        self.note(pid=os.getpid())

    def predict(self, prompts: Sequence[Prompt]) -> list[Prediction | None]:
        self.note(asked=[prompt.text for prompt in prompts])
        found: list[Any] = []
        for text in (prompt.text for prompt in prompts):
            if text == "raise":
                raise RuntimeError("told to")
            if text == "hang":
                time.sleep(FOREVER_S)
            if text == "exit":
                os._exit(3)
            if text == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "sys.exit":
                sys.exit(4)
            found += ODD.get(text) or [None if text == "unknown" else GOOD]
        return found

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        for done in finished:
            if done.prompt.text == "learn raises":
                raise RuntimeError("not that one")
            if done.prompt.text == "learn hangs":
                time.sleep(FOREVER_S)
            if done.prompt.text == "learn exits":
                os._exit(3)
        self._learned += len(finished)
        for done in finished:
            self.note(learned=[done.prompt.text, done.tokens, done.aborted])
        self.note(upkeep=len(finished))

    def status(self) -> dict[str, Any]:
        return {"entries": self._learned, "examples": 11}

    def close(self) -> None:
        self.note(closed=self._learned)

    def note(self, **entry: Any) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class OddStatus(Obedient):
    """What it says of itself is nothing that could be sent."""

    def status(self) -> dict[str, Any]:
        return {"entries": math.nan, "examples": None}


class Raising(Obedient):
    """Whatever is done beside predicting fails, as with a full disk."""

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        raise OSError(28, "No space left on device")

    status = close = learn  # type: ignore[assignment]


class HangingStart(Obedient):
    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        time.sleep(FOREVER_S)


class SlowStart(Obedient):
    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        while not (folder / "go").exists():
            time.sleep(0.01)


class CrashingStart(Obedient):
    def __init__(self, config: Any, folder: Path) -> None:
        raise RuntimeError("this time")


class NoHub(Obedient):
    """Out of reach twice."""

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        if len((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()) < 3:
            raise ConnectionError("the hub is down")


def missing_package(config: Any, folder: Path) -> Obedient:
    raise ModuleNotFoundError("No module named 'sentence_transformers'")


def wrong_option(config: Any, folder: Path) -> Obedient:
    raise ValueError("model='\ud800': there is no such folder")
