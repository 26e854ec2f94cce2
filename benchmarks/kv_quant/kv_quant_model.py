"""A small Llama trained on our own text, so that what 8-bit KV does to a model's output can be judged: `kv_quant.py`.

Text is this repository's documentation and Python; whole files, one in sixteen by a hash of their names, are held out.
The tokens are those of a byte-level BPE made of the training text. Training takes minutes and is done once: model,
tokenizer and tokens lie in the cache folder, complete or absent, under the hash of the recipe, and stay as they are
when the repository's text changes.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_ext.envs import cache_dir
from vllm_ext.quality.texts import spread, windows
from vllm_ext.tiny_model.cache import obtain

ROOT = Path(__file__).parents[2]
_FOLDERS = ("docs", "vllm_ext", "benchmarks", "kernels", "patches", "scripts", "tests")
_HELD_OUT_OF = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how long."""

    layers: int = 6
    hidden: int = 256
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    """Of hidden / heads channels each."""
    vocabulary: int = 2048
    tokens: int = 512
    """Of a training sequence, and of the longest that is judged."""
    batch: int = 8
    steps: int = 500
    warmup_steps: int = 50
    learning_rate: float = 2e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Folder of the model."""
        return f"kv-quant-{hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]}"


FULL = Recipe()
QUICK = Recipe(layers=2, hidden=128, intermediate=256, heads=2, kv_heads=1, vocabulary=1024, steps=40, warmup_steps=10)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model and what it is judged by."""

    recipe: Recipe
    model: LlamaForCausalLM
    held_out: torch.Tensor
    """Tokens of files that it was not trained on, one file after the other, shape [n], int64."""
    facts: dict[str, float]
    """Of the training: see `_train`."""
    text_sha256: str
    """Of the files trained on and held out."""


def trained(recipe: Recipe, folder: Path | None = None) -> Trained:
    """Return the model of a recipe, training it first if it is not in the cache.

    Args:
        recipe: What to train.
        folder: Where models are kept; by default the package's cache of this user.

    Raises:
        OSError: The folder can't be written.
        ValueError: There is not enough text to train or to judge on.
    """
    place = obtain((folder or cache_dir() / "kv-quant") / recipe.name, lambda fresh: _make(fresh, recipe))
    facts = json.loads((place / "facts.json").read_text(encoding="utf-8"))
    vocabulary = Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab_size()
    model = _empty(recipe, vocabulary)
    model.load_state_dict(load_file(place / "model.safetensors"), strict=False)  # what is tied is stored once
    model.tie_weights()
    held_out = load_file(place / "held_out.safetensors")["tokens"].long()
    sha256 = facts.pop("text_sha256")
    return Trained(recipe=recipe, model=model.eval(), held_out=held_out, facts=facts, text_sha256=sha256)


def texts(root: Path = ROOT) -> tuple[list[str], list[str], str]:
    """Return the texts to train on, those held out, and the SHA-256 of both."""
    paths = sorted(path for name in _FOLDERS for kind in ("*.md", "*.py") for path in (root / name).rglob(kind))
    kept: tuple[list[str], list[str]] = ([], [])
    digest = hashlib.sha256()
    for path in [*sorted(root.glob("*.md")), *paths]:
        name = path.relative_to(root).as_posix()
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_OF == 0
        text = path.read_text(encoding="utf-8")
        kept[held_out].append(text)
        digest.update(text.encode())
    return *kept, digest.hexdigest()


def _make(folder: Path, recipe: Recipe) -> None:
    training, held_out, sha256 = texts()
    tokenizer = _tokenizer(training, recipe.vocabulary)
    streams = [_stream(tokenizer, part) for part in (training, held_out)]
    for name, stream in zip(("training", "held-out"), streams, strict=True):
        if len(stream) < 8 * recipe.tokens:
            raise ValueError(f"{name} text has {len(stream)} tokens: {8 * recipe.tokens} are needed")
    torch.manual_seed(recipe.seed)
    model = _empty(recipe, tokenizer.get_vocab_size())
    facts: dict[str, Any] = _train(model, streams[0], recipe)
    facts |= {"train_perplexity": perplexity(model, streams[0], recipe), "text_sha256": sha256}
    facts |= {"held_out_perplexity": perplexity(model, streams[1], recipe), "held_out_tokens": len(streams[1])}
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_file({"tokens": streams[1].int()}, folder / "held_out.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _computes_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16: emulated, a step of training takes ten times as long as in fp32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _tokenizer(training: Sequence[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training, trainer)
    return tokenizer


def _stream(tokenizer: Tokenizer, parts: Sequence[str]) -> torch.Tensor:
    """Tokens of texts, one after the other, each begun by ``<end>``."""
    return torch.tensor([token for part in parts for token in (0, *tokenizer.encode(part).ids)])


def _empty(recipe: Recipe, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=recipe.hidden, intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.tokens, tie_word_embeddings=True, attention_bias=False,
        bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _train(model: LlamaForCausalLM, stream: torch.Tensor, recipe: Recipe) -> dict[str, float]:
    """Train with AdamW, products in bfloat16; return parameters, and tokens there are and seen."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    started = time.monotonic()
    model.train()
    for step in range(recipe.steps):
        starts = torch.randint(len(stream) - recipe.tokens, (recipe.batch,), generator=generator)
        rows = torch.stack([stream[start : start + recipe.tokens] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_computes_bfloat16()):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - started
            print(f"{seconds:5.0f} s: step {step} of {recipe.steps}, loss {loss:.3f}", file=sys.stderr, flush=True)
    model.eval()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "training_tokens": len(stream),
        "training_tokens_seen": recipe.steps * recipe.batch * recipe.tokens,
    }


def _rate(step: int, recipe: Recipe) -> float:
    """Of the learning rate: a linear rise, then a cosine down to a tenth."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: torch.Tensor, recipe: Recipe, sequences: int = 64) -> float:
    """Return the perplexity of up to so many sequences, evenly spread over a text, without KV of earlier ones."""
    losses = [model(input_ids=rows, labels=rows).loss for rows in _batches(stream, recipe, sequences)]
    return float(torch.stack(losses).double().mean().exp())


def sequences_of(stream: torch.Tensor, tokens: int, count: int) -> torch.Tensor:
    """Return up to ``count`` sequences that don't overlap, evenly spread over a text, shape [n, tokens]."""
    return spread(windows(stream, tokens), count)


def _batches(stream: torch.Tensor, recipe: Recipe, sequences: int) -> Iterator[torch.Tensor]:
    yield from sequences_of(stream, recipe.tokens, sequences).split(8)
