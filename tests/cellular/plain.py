"""The models in plain PyTorch, one request at a time: what the engine's answers are compared with."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from vllm_ext.cellular.models import Model, build
from vllm_ext.cellular.models.rnnt import BLANK
from vllm_ext.cellular.models.seq2seq import GO


class Plain:
    def __init__(self, model: Model, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.modules = {name: copy.deepcopy(module).to(dtype) for name, module in model.modules.items()}
        self.config = model.config

    def zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.zeros(1, self.config["hidden"], dtype=self.dtype)
        return state, state

    def lstm(self, tokens: list[int], cell: str = "step") -> tuple[torch.Tensor, torch.Tensor]:
        h, c = self.zeros()
        for token in tokens:
            h, c = self.modules[cell](torch.tensor([token]), h, c)
        return h, c

    def scores(self, request: dict[str, Any]) -> torch.Tensor:
        h, _ = self.tree(request["tree"]) if "tree" in request else self.lstm(request["tokens"])
        scores: torch.Tensor = self.modules["head"](h)[0]
        return scores

    def tree(self, tree: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tree, int):
            return self.modules["leaf"](torch.tensor([tree]))  # type: ignore[no-any-return]
        (h, c), (h_right, c_right) = map(self.tree, tree)
        return self.modules["internal"](h, c, h_right, c_right)  # type: ignore[no-any-return]

    def translate(self, tokens: list[int], steps: int) -> list[int]:
        h, c = self.lstm(tokens, "encoder")
        token, said = torch.tensor([GO]), []
        for _ in range(steps):
            h, c, token, done = self.modules["decoder"](token, h, c)
            said.append(int(token))
            if done:
                break
        return said

    def transcribe(self, audio: np.ndarray) -> list[list[int]]:
        decoder: Any = self.modules["decoder"]
        (h, c), chunks = self.zeros(), []
        said, *state = decoder.predictor(torch.tensor([BLANK]), *self.zeros())
        for chunk in audio:
            emitted: list[int] = []
            for features in chunk:
                frame, h, c = self.modules["encoder"](torch.tensor(features, dtype=self.dtype)[None, None], h, c)
                for _ in range(self.config["max_symbols"]):
                    token = decoder.joint(frame[:, 0], said).argmax(1)
                    if token == BLANK:
                        break
                    emitted.append(int(token))
                    said, *state = decoder.predictor(token, *state)
            chunks.append(emitted)
        return chunks


def random_tree(rng: np.random.Generator, depth: int, vocabulary: int = 32) -> Any:
    if depth == 0 or rng.random() < 0.2:
        return int(rng.integers(vocabulary))
    return [random_tree(rng, depth - 1, vocabulary), random_tree(rng, depth - 1, vocabulary)]


def lively(model: Model, factor: float = 5.0) -> Model:
    """Scale the random weights, so that what a model says depends on what it hears."""
    for module in model.modules.values():
        for weight in module.parameters():
            weight.mul_(factor)
    return model


def listening() -> Model:
    """Return an RNN-T with random weights whose chunks have symbols and blanks."""
    model = lively(build("rnnt", seed=1), 2.0)
    model.modules["decoder"].joint.emit.bias[BLANK] += 1.0  # type: ignore[index, union-attr, operator]
    return model
