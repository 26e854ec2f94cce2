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
from typing import Any

from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt

TOKENS, P90 = 7, 9
FOREVER_S = 3600.0


def good(tokens: Any = TOKENS, p90: Any = P90, source: Any = "retrieval") -> Estimate:
    return Estimate(tokens, p90, source)


ODD: dict[str, list[Any]] = {
    "nan": [good(tokens=math.nan)],
    "nan p90": [good(p90=math.nan)],
    "infinite": [good(p90=math.inf)],
    "zero": [good(tokens=0)],
    "negative": [good(tokens=-5)],
    "p90 below": [good(tokens=9, p90=7)],
    "too many": [good(), good()],
    "too few": [],
    "no estimate": ["seven"],
    "text": [good(tokens="7")],
    "no source": [good(source=None)],
    "empty source": [good(source="")],
    "broken source": [good(source="\ud800")],
    "long source": [good(source="x" * 65)],
}
"""What `Obedient` returns for a prompt of that text: no prediction, whatever it is."""


class Obedient:
    """Does what a prompt's text says, and else predicts 7 tokens; what it is asked and told goes to a file."""

    def __init__(self, config: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.jsonl"
        self._learned = 0

    def predict(self, prompts: Sequence[Prompt]) -> list[Estimate | None]:
        texts = [prompt.text for prompt in prompts]
        self.note(asked=texts)
        found: list[Any] = []
        for text in texts:
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
            if text == "slow":
                time.sleep(0.2)
            found += ODD.get(text) or [None if text == "unknown" else good()]
            if text == "too few":
                found.pop()
        return found

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        for done in finished:
            if done.prompt.text == "learn raises":
                raise RuntimeError("not that one")
            if done.prompt.text == "learn hangs":
                time.sleep(FOREVER_S)
        self._learned += len(finished)
        self.note(learned=[[*done.prompt[:4], done.tokens] for done in finished])

    def save(self) -> None:
        self.note(saved=self._learned)

    def status(self) -> dict[str, Any]:
        return {"entries": self._learned, "examples": 11}

    def note(self, **entry: Any) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class OddStatus(Obedient):
    """What it says of itself is nothing that could be sent."""

    def status(self) -> dict[str, Any]:
        return {"entries": math.nan, "examples": None}


class RaisingStatus(Obedient):
    def status(self) -> dict[str, Any]:
        raise RuntimeError("not now")


class RaisingSave(Obedient):
    def save(self) -> None:
        raise OSError(28, "No space left on device")


class RaisingClose(Obedient):
    def close(self) -> None:
        raise RuntimeError("can't let go")


class HangingStart(Obedient):
    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        self.note(loading=True)
        time.sleep(FOREVER_S)


class SlowStart(Obedient):
    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__(config, folder)
        while not (folder / "go").exists():
            time.sleep(0.01)


class CrashingStart(Obedient):
    def __init__(self, config: Any, folder: Path) -> None:
        raise RuntimeError("this time")


def missing_package(config: Any, folder: Path) -> Obedient:
    raise ModuleNotFoundError("No module named 'sentence_transformers'")


def wrong_option(config: Any, folder: Path) -> Obedient:
    raise ValueError(f"model='\ud800{'x' * 5000}': there is no such folder")
