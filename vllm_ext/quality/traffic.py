"""How well output lengths of recorded traffic are predicted, replayed in order, without looking ahead.

A length is learned with those of the 64 requests that were asked for together, as where so many are under way. The
first 64, before which nothing has ended, are not judged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_ext import datasets
from vllm_ext.config.prediction import PredictionConfig, PredictorConfig
from vllm_ext.contract.length_distribution import Prediction
from vllm_ext.datasets import DatasetError
from vllm_ext.prediction import evaluate, rows
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt, PromptPredictor
from vllm_ext.prediction.query import LengthQuery
from vllm_ext.prediction.text import PromptText
from vllm_ext.systems.needs import can_predict_from_prompts

if TYPE_CHECKING:
    from vllm_ext.datasets import Dataset

SHOWN = ("tau", "coverage", "relative_error")
MIN_REQUESTS = 128
_UNDER_WAY = 64


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests in the order of their arrival."""

    dataset: Dataset
    finished: Sequence[FinishedPrompt]
    has_prompts: bool


class ServerHistory:
    """The server's own history, which goes by prompt length, as a predictor; see `PromptPredictor`."""

    def __init__(self) -> None:
        self._history = LengthHistory(PredictionConfig().window)

    def predict(self, prompts: Sequence[Prompt]) -> Sequence[Prediction | None]:
        """Return a prediction for each; None before anything ended."""
        found = [self._history.predict(_query(prompt)) for prompt in prompts]
        return [None if one is None else Prediction(one, self._history.name) for one in found]

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Remember lengths."""
        for done in finished:
            self._history.observe(_query(done.prompt), done.tokens)

    def status(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Nothing is kept."""


def read(path: Path, count: rows.TokenCounter, model: str) -> Traffic:
    """Read recorded requests.

    Args:
        path: What ``--trace`` takes, with lengths or answers.
        count: Counts tokens where the file has texts.
        model: Name of the model that answers.

    Raises:
        DatasetError: the file can't be read, says nothing of output lengths, or of less than `MIN_REQUESTS`.
    """
    found = _read(path, count, model)
    if len(found.finished) < MIN_REQUESTS:
        stated = f"{len(found.finished)} requests with their lengths"
        raise DatasetError(f"{found.dataset.name}: {stated}; at least {MIN_REQUESTS} are needed")
    return found


def _read(path: Path, count: rows.TokenCounter, model: str) -> Traffic:
    dataset = datasets.load(path)
    if any(row.prompt is not None for row in dataset.rows):
        found = rows.read(path, count, counter="tokens of the model", model=model, text=PromptText())
        return Traffic(dataset=dataset, finished=found.finished, has_prompts=True)
    finished = [
        FinishedPrompt(Prompt("", rows.UNBOUNDED, model, prompt_tokens=row.prompt_tokens or 0), row.output_tokens, 0.0)
        for row in dataset.rows
        if row.output_tokens
    ]
    return Traffic(dataset=dataset, finished=finished, has_prompts=False)


def judged(traffic: Traffic, progress: evaluate.Progress | None = None) -> tuple[dict[str, dict[str, float]], str]:
    """Return the measures of `evaluate` for the history and, where it can be judged, the predictor of prompts.

    Args:
        traffic: To replay.
        progress: Told how many requests the predictor of prompts has answered.

    Returns:
        Measures by predictor; and why the predictor of prompts is not among them, or nothing.
    """
    said = {"history": _replayed(ServerHistory(), traffic)}
    why = _why_not_prompts(traffic)
    if not why:
        from vllm_ext.prediction.encoder import Encoder
        from vllm_ext.prediction.learned import LearnedPredictor

        config = PredictorConfig(batch_size=512)
        encoder = Encoder(
            config.encoder, threads=config.threads, max_tokens=config.prompt_tokens, window=config.prompt_window
        )  # fmt: skip
        with (
            tempfile.TemporaryDirectory(prefix="vllm-ext-quality-") as place,
            closing(LearnedPredictor(config, Path(place), encoder)) as predictor,
        ):
            said["prompts"] = _replayed(predictor, traffic, progress)
    scores = {name: evaluate.scores(found) for name, found in said.items()}
    return {name: {measure: found[measure] for measure in SHOWN} for name, found in scores.items()}, why


def _replayed(predictor: PromptPredictor, traffic: Traffic, progress: evaluate.Progress | None = None) -> evaluate.Said:
    finished = traffic.finished
    said = evaluate.judge_online(predictor, evaluate.History(), finished, at_once=_UNDER_WAY, progress=progress)
    return said.where(np.arange(len(finished)) >= _UNDER_WAY)


def _why_not_prompts(traffic: Traffic) -> str:
    if not traffic.has_prompts:
        return f"{traffic.dataset.name} holds no prompts"
    return "" if can_predict_from_prompts(None) else "its encoder is not installed: pip install 'vllm-ext[prediction]'"


def _query(prompt: Prompt) -> LengthQuery:
    return LengthQuery(prompt.prompt_tokens, prompt.max_tokens)
