"""The learning curve: order of predicting and learning, trainings, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.prediction.evaluation import online
from vllm_ext.prediction.evaluation.learned import UNKNOWN, Knowledge
from vllm_ext.prediction.evaluation.online import learning_curve
from vllm_ext.prediction.evaluation.rows import EvaluationError

from .made_up import requests


def test_it_gets_better_with_what_was_served() -> None:
    first, last = learning_curve(requests(330), checkpoints=(0, 250))
    assert (first.served, first.requests, last.served, last.requests) == (0, 250, 250, 80)
    assert last.scores["shrunk"]["pinball"] < first.scores["shrunk"]["pinball"]
    assert last.scores["shrunk"]["tau"] > 0.6
    assert set(last.scores) == {"alise", "shrunk", "bucket-history", "history"}


def test_a_warm_start_knows_more_at_the_beginning() -> None:
    stream = requests(40, seed=1)
    (cold,) = learning_curve(stream, checkpoints=(0,))
    (warm,) = learning_curve(stream, warm=requests(300), checkpoints=(0,))
    assert warm.scores["shrunk"]["pinball"] < cold.scores["shrunk"]["pinball"]


def test_the_first_request_is_predicted_by_the_constant_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a request may be known when it is predicted."""
    seen: list[dict[str, int]] = []
    original = online._Server.serve

    def serve(self: online._Server, request: object) -> None:
        original(self, request)  # type: ignore[arg-type]
        seen.append({name: tokens[-1] for name, (tokens, _) in self.said.items()})

    monkeypatch.setattr(online._Server, "serve", serve)
    stream = requests(3)
    learning_curve(stream, checkpoints=(0,))
    assert set(seen[0].values()) == {UNKNOWN.tokens}
    assert seen[1]["history"] == stream.lengths[0]


def test_the_decoder_is_trained_at_200_entries_and_when_the_store_grew_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def note(self: Knowledge, vectors: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> bool:
        assert len(lengths) == len(tokens)
        trained.append(len(lengths))
        return False

    monkeypatch.setattr(Knowledge, "train_decoder", note)
    learning_curve(requests(700), checkpoints=(0,))
    assert trained == [200, 300, 450, 675]


def test_checkpoints_beyond_the_end_are_left_out() -> None:
    assert [s.served for s in learning_curve(requests(30), checkpoints=(0, 10, 1000))] == [0, 10]


@pytest.mark.parametrize("checkpoints", [(5, 10), (0, 10, 10), (0, 20, 10)])
def test_checkpoints_must_ascend_from_zero(checkpoints: tuple[int, ...]) -> None:
    with pytest.raises(EvaluationError, match="must ascend from 0"):
        learning_curve(requests(30), checkpoints=checkpoints)


def test_the_same_seed_gives_the_same_curve() -> None:
    stream = requests(230)
    assert learning_curve(stream, seed=3) == learning_curve(stream, seed=3)
