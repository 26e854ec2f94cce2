"""A transformer encoder with a linear head, fine-tuned as a whole in torch.

`encoder_tuning` makes encoders of it; the proxies that predictors are compared with are tuned by the same code.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.encoder import find_model, no_progress_bar
from vllm_ext.prediction.tuning_options import TuningOptions

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_INFERENCE_BATCH = 16
_LONGEST_TOKENS = 512
"""Positions that models of this kind have; windows are shorter."""
_SORTED_BATCHES = 8
"""Batches whose rows are sorted by length together, so that little padding is computed."""


class TuningError(ValueError):
    """A transformer can't be read or tuned; the message says why."""


class LengthTransformer:
    """An encoder's transformer with the mean over tokens and a linear layer on top."""

    def __init__(
        self,
        window_of: Callable[[str], str],
        outputs: int,
        *,
        model: str | None,
        seed: int,
        layers: int | None = None,
        bias: npt.NDArray[Any] | None = None,
    ) -> None:
        """Load the weights.

        Args:
            window_of: Cuts a text to what the encoder embeds of it.
            outputs: Width of the head.
            model: A folder or id of a hub, as of `Encoder`; None for the default model.
            seed: Of the head, the order and dropout.
            layers: Of the transformer, from the first, that are used, at least 1; None for all.
            bias: [outputs], what the head says before it is trained; None for 0.

        Raises:
            TuningError: the model can't be read, or has fewer layers.
        """
        import torch
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        try:
            source = str(find_model(model)[1])
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            self.source_layers = int(config.num_hidden_layers)
            """Of the model as it was read."""
            config.num_hidden_layers = _fewer(self.source_layers, layers)
            with _quiet(), torch.random.fork_rng(devices=[]):  # loading draws numbers
                transformer = AutoModel.from_pretrained(
                    source, config=config, use_safetensors=True, trust_remote_code=False
                )
                self._tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except TuningError:
            raise
        except (OSError, ValueError, AttributeError) as error:
            raise TuningError(f"model={model!r}: cannot be read as a transformer ({error})") from error
        self._window_of = window_of
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        head = torch.nn.utils.skip_init(torch.nn.Linear, transformer.config.hidden_size, outputs)
        with torch.no_grad():
            head.weight.copy_(0.02 * torch.randn(head.weight.shape, generator=generator))
            head.bias.copy_(torch.zeros(outputs) if bias is None else torch.from_numpy(bias))
        self._modules = torch.nn.ModuleDict({"transformer": transformer, "head": head}).float().eval()

    def compute_in(self, precision: Literal["float32", "bfloat16"]) -> None:
        """Change the precision of weights and arithmetic."""
        import torch

        self._modules.to(getattr(torch, precision))

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
        on_update: Callable[[int, float], None] | None = None,
    ) -> tuple[list[float], int]:
        """Fine-tune; the weights of the best epoch by held-out loss are kept.

        Args:
            texts: All of them.
            targets: [n], what the head shall say.
            fitted: Positions to learn from.
            held: Positions to stop early by.
            loss: Mean loss of outputs and targets, a tensor.
            options: How long and how fast.
            on_update: Told how many updates are done and the last held-out loss; what it raises ends the training.

        Returns:
            Held-out losses, before training and after each epoch, and the number of the epoch kept.

        Raises:
            TuningError: the loss is not finite any more.
        """
        import torch

        windows = [self._window_of(text) for text in texts]
        wanted = torch.from_numpy(targets)
        descent = _Descent(self._modules, options.updates(len(fitted)), options)

        def held_loss() -> float:
            outputs = torch.from_numpy(self.forward([windows[i] for i in held])).float()
            return float(loss(outputs, wanted[held]))

        losses, best, kept = [held_loss()], 0, copy.deepcopy(self._modules.state_dict())
        tell = on_update or (lambda _done, _loss: None)
        rng = np.random.default_rng([self._seed, 3])
        with torch.random.fork_rng(devices=[]):  # dropout knows no generator but the global one
            torch.manual_seed(self._seed)
            while len(losses) <= options.epochs and len(losses) - 1 - best < options.patience:
                self._modules.train()
                for batch in _batches(windows, fitted, options.batch_size, rng):
                    outputs = self._outputs(self._tokenised([windows[i] for i in batch]))
                    descent.step(loss(outputs, wanted[batch]))
                    tell(descent.done, losses[-1])
                self._modules.eval()
                losses.append(held_loss())
                if not math.isfinite(losses[-1]):
                    raise TuningError(f"learning_rate={options.learning_rate!r}: the training diverged")
                if losses[-1] < losses[best]:
                    best, kept = len(losses) - 1, copy.deepcopy(self._modules.state_dict())
        self._modules.load_state_dict(kept)
        return losses, best

    def save_encoder(self, folder: Path) -> None:
        """Write the transformer without its head as a sentence-transformers model that averages over tokens.

        Args:
            folder: Made here; must not exist.

        Raises:
            OSError: it can't be written.
        """
        from sentence_transformers import SentenceTransformer

        # Its own reader makes the modules of a plain transformer: mean pooling. Normalising is `Encoder`'s.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch, _quiet():
            self._modules["transformer"].save_pretrained(scratch)
            self._tokenizer.save_pretrained(scratch)
            model = SentenceTransformer(scratch, device="cpu", local_files_only=True, trust_remote_code=False)
        with _quiet():
            model.save(str(folder), create_model_card=False)

    def _tokenised(self, windows: list[str]) -> Any:
        return self._tokenizer(windows, padding=True, truncation=True, max_length=_LONGEST_TOKENS, return_tensors="pt")

    def _outputs(self, tokens: Any) -> Any:
        states = self._modules["transformer"](**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        return self._modules["head"]((states * mask).sum(1) / mask.sum(1).clamp(min=1))


class _Descent:
    """AdamW over all weights, with a rate that rises, then falls linearly to 0 at the last update."""

    def __init__(self, modules: Any, updates: int, options: TuningOptions) -> None:
        import torch

        rates = {"transformer": options.learning_rate, "head": options.head_learning_rate}
        self.done = 0
        """Updates made."""
        self._modules = modules
        self._optimiser = torch.optim.AdamW(
            [{"params": modules[name].parameters(), "lr": rate} for name, rate in rates.items()]
        )
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
        self.done += 1


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars, and without a report of every weight of the layers that are left out."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_progress_bar():
            yield
    finally:
        logging.set_verbosity(before)


def _fewer(there: int, wanted: int | None) -> int:
    if wanted is not None and not 1 <= wanted <= there:
        raise TuningError(f"layers={wanted!r}: must be 1 to {there}, which the model has")
    return there if wanted is None else wanted
