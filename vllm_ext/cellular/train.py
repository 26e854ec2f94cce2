"""Small models trained on the spot, on tasks made up for them, to have something to serve.

``lstm`` names the class of a sequence's first token, ``seq2seq`` reverses a sequence, ``treelstm`` says whether more
leaves of a tree are odd than even, ``rnnt`` transcribes noisy symbols, one per frame of audio or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vllm_ext.cellular.models import Model, build
from vllm_ext.cellular.models.rnnt import BLANK
from vllm_ext.cellular.models.seq2seq import EOS, GO

_BATCH = 64
_LONGEST = 8
Loss = tuple[torch.Tensor, torch.Tensor]
"""Logits and what they should say."""


def trained(kind: str, *, seed: int = 0, steps: int = 400, **sizes: int) -> tuple[Model, float]:
    """Return a model and the share of its last ten batches' answers that were right.

    Raises:
        ModelError: see `models.build`.
    """
    model = build(kind, seed=seed, **sizes)
    generator = torch.Generator().manual_seed(seed)
    parameters = [weight.requires_grad_(True) for module in model.modules.values() for weight in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    right = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - 0.9 * step / steps)
        logits, wanted = _TASKS[kind](model, generator)
        optimizer.zero_grad()
        cross_entropy(logits, wanted).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        right.append(float((logits.argmax(1) == wanted).float().mean()))
    for weight in parameters:
        weight.requires_grad_(False)
    return model, sum(right[-10:]) / len(right[-10:])


def _states(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(_BATCH, model.config["hidden"])
    return zeros, zeros


def _tokens(model: Model, generator: torch.Generator, first: int = 0) -> torch.Tensor:
    length = int(torch.randint(1, _LONGEST + 1, (), generator=generator))
    return torch.randint(first, model.config["vocabulary"], (length, _BATCH), generator=generator)


def _lstm(model: Model, generator: torch.Generator) -> Loss:
    tokens = _tokens(model, generator)
    h, c = _states(model)
    for token in tokens:
        h, c = model.modules["step"](token, h, c)
    return model.modules["head"](h), tokens[0] % model.config["classes"]


def _seq2seq(model: Model, generator: torch.Generator) -> Loss:
    tokens = _tokens(model, generator, first=EOS + 1)
    h, c = _states(model)
    for token in tokens:
        h, c = model.modules["encoder"](token, h, c)
    wanted = torch.cat((tokens.flip(0), torch.full((1, _BATCH), EOS)))
    decoder: Any = model.modules["decoder"]
    logits = []
    for token in torch.cat((torch.full((1, _BATCH), GO), wanted[:-1])):
        h, c = decoder.step(token, h, c)
        logits.append(decoder.project(h))
    return torch.cat(logits), wanted.flatten()


def _treelstm(model: Model, generator: torch.Generator) -> Loss:
    tokens = _tokens(model, generator)
    parts = [model.modules["leaf"](token) for token in tokens]
    while len(parts) > 1:
        place = int(torch.randint(len(parts) - 1, (), generator=generator))
        parts[place : place + 2] = [model.modules["internal"](*parts[place], *parts[place + 1])]
    odd = (tokens % 2).float().mean(0) > 0.5
    return model.modules["head"](parts[0][0]), odd.long()


def symbols(model: Model) -> torch.Tensor:
    """Return how each symbol of ``rnnt`` sounds; blank is silence."""
    shape = (model.config["vocabulary"], model.config["features"])
    sounds = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sounds[BLANK] = 0
    return sounds


def _rnnt(model: Model, generator: torch.Generator) -> Loss:
    spoken = _tokens(model, generator)
    sounds = symbols(model)[spoken]
    sounds = sounds + 0.3 * torch.randn(sounds.shape, generator=generator)
    encoder: Any = model.modules["encoder"]
    decoder: Any = model.modules["decoder"]
    (h, c), state, last = _states(model), _states(model), torch.full((_BATCH,), BLANK)
    said, *after = decoder.predictor(last, *state)
    logits, wanted = [], []
    for sound, symbol in zip(sounds, spoken, strict=True):
        h, c = encoder.step(sound, h, c)
        logits.append(decoder.joint(h, said))
        wanted.append(symbol)
        emits = symbol != BLANK
        last = torch.where(emits, symbol, last)
        state = tuple(torch.where(emits[:, None], new, old) for new, old in zip(after, state, strict=True))
        said, *after = decoder.predictor(last, *state)
        logits.append(decoder.joint(h, said)[emits])
        wanted.append(torch.full((int(emits.sum()),), BLANK))
    return torch.cat(logits), torch.cat(wanted)


_TASKS: dict[str, Callable[[Model, torch.Generator], Loss]] = {
    "lstm": _lstm, "seq2seq": _seq2seq, "treelstm": _treelstm, "rnnt": _rnnt,
}  # fmt: skip
