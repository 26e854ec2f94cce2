"""The predictor that ships: what similar prompts became, mixed with a regression on the prompt.

A neighbour of similarity s weighs exp((s - 1) / width), the regression 1: an identical prompt that was answered once
counts as much as all that the regression says. Before there is a regression, the newest lengths stand in.

Source: ALISE, section 3.1 and Algorithm 1, which takes one or the other by a threshold.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.prediction import regression
from vllm_ext.prediction.folder import REGRESSION, set_aside
from vllm_ext.prediction.neighbours import TAIL, Key, Near, Neighbours, by_group
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.prediction.regression import DEFAULT_WIDTH, LAST_ANSWERS, MOST_EXAMPLES, Examples, Observed, Ridge
from vllm_ext.prediction.store import Entries, NewEntry, Store, digest, joined

logger = logging.getLogger("vllm_ext.predictor")

RETRIEVAL, REGRESSED, BLEND = "retrieval", "regression", "blend"
"""Who predicts: similar prompts, the regression, or both."""
_VECTORS_KEPT = 16_384
_CONVERSATIONS = 65_536
_RECENT = 1000
"""Lengths that stand in for the regression."""
_FIRST_AT = regression.LEAST_EXAMPLES
_GROWTH = 1.2
_MOST_BETWEEN = 4096
"""Insertions after which the regression is fitted again, however many there were."""
_LEAST_WEIGHT = 0.01

Vector = npt.NDArray[np.float32]


class TextEncoder(Protocol):
    """What is needed of `encoder.Encoder`."""

    name: str
    dim: int

    def encode(self, texts: Sequence[str]) -> Vector:
        """Return unit vectors, [len(texts), dim]."""
        ...


class LearnedPredictor:
    """Encoder, store, neighbours and regression; as of `predictor.PromptPredictor`."""

    def __init__(self, config: PredictorConfig, folder: Path, encoder: TextEncoder | None = None) -> None:
        """Load the encoder, unless one is given, and what was learned before.

        Raises:
            ModuleNotFoundError: a package that the predictor needs is missing.
            ValueError: the encoder can't be loaded.
        """
        self._config, self._folder = config, folder
        self._encoder = _encoder(config) if encoder is None else encoder
        dim = self._encoder.dim
        self._store = Store(
            folder, dim, encoder=self._encoder.name, capacity=config.capacity, max_mib=config.max_mib,
            keep_prompts=config.keep_prompts,
        )  # fmt: skip
        self._neighbours = Neighbours(dim)
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._answers: OrderedDict[bytes, deque[int]] = OrderedDict()
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()  # of the vectors and answers
        self._encoder_lock = threading.Lock()
        self._last = self._opened = 0
        self._ridge = self._saved_regression()
        self._tried = 0 if self._ridge is None else self._ridge.inserted
        self._reload()
        self._fit_if_due()

    # --- the loop's thread ------------------------------------------------------------------------------------------

    def predict(self, prompts: Sequence[Prompt]) -> list[Prediction | None]:
        """Embed, search, regress and mix."""
        if not prompts:
            return []
        vectors = self._embedded([prompt.text for prompt in prompts])
        near = self._near(prompts, vectors)
        ridge = self._ridge
        distributions: Sequence[LengthDistribution | None] = [None] * len(prompts)
        if ridge is not None:
            distributions = ridge.distributions(self._asked(prompts, vectors))
        width = DEFAULT_WIDTH if ridge is None else ridge.width
        return [
            self._mixed(prompt, found, distribution, width)
            for prompt, found, distribution in zip(prompts, near, distributions, strict=True)
        ]

    def status(self) -> dict[str, int]:
        """Return the number of finished requests known, and how many the regression was fitted on."""
        ridge = self._ridge
        return {"entries": self._neighbours.rows, "examples": 0 if ridge is None else ridge.examples}

    def _mixed(
        self, prompt: Prompt, near: Near, distribution: LengthDistribution | None, width: float
    ) -> Prediction | None:
        weights = np.exp((near.similarities - 1) / width)
        if not len(weights) or weights.sum() < _LEAST_WEIGHT:
            return None if distribution is None else Prediction(distribution.capped(prompt.max_tokens), REGRESSED)
        other = distribution if distribution is not None else LengthDistribution.of(list(self._recent) or near.tokens)
        mixed = LengthDistribution.exact(near.tokens, weights).mixed(other, float(1 / (1 + weights.sum())))
        return Prediction(
            mixed.capped(prompt.max_tokens),
            RETRIEVAL if distribution is None else BLEND,
            neighbours=len(weights),
            similarity=float(near.similarities[0]),
        )

    def _near(self, prompts: Sequence[Prompt], vectors: Vector) -> list[Near]:
        groups: dict[Key, list[int]] = {}
        for at, prompt in enumerate(prompts):
            groups.setdefault((prompt.model, digest(prompt.salt)), []).append(at)
        found: dict[int, Near] = {}
        for key, rows in groups.items():
            tags = [prompts[at].tag for at in rows]
            found.update(
                zip(rows, self._neighbours.search(key, vectors[rows], self._config.neighbours, tags), strict=True)
            )
        return [found[at] for at in range(len(prompts))]

    def _asked(self, prompts: Sequence[Prompt], vectors: Vector) -> Examples:
        with self._lock:
            earlier = [list(self._answers.get(_conversation(prompt), ())) for prompt in prompts]
        return Examples(
            vectors,
            np.array([prompt.prompt_tokens for prompt in prompts], np.int64),
            np.array([regression.last_answers(each) for each in earlier], np.float64).reshape(-1, 2),
            np.array([prompt.turn for prompt in prompts], np.int64),
            [prompt.tag for prompt in prompts],
            [prompt.model for prompt in prompts],
        )

    @property
    def in_memory(self) -> str:
        """Why what is learned is not kept; empty if it is."""
        return self._store.in_memory

    # --- the learner's thread ---------------------------------------------------------------------------------------

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Store what ended, take over what others stored, and fit again where that is due.

        Some ended before they were embedded: under load the short ones, and a store without these would say that
        everything is long. A batch of them is embedded now; of more, an even choice, and the others are left out.
        """
        missing = list({done.prompt.text: None for done in finished if self._vector(done.prompt.text) is None})
        if missing:
            step = -(-len(missing) // self._config.batch_size)
            self._embedded(missing[::step])
        known = [(done, vector) for done in finished if (vector := self._vector(done.prompt.text)) is not None]
        self._store.add([_entry(done, vector) for done, vector in known])
        self._upkeep()

    def fit(self) -> None:
        """Fit the regression now, if there are enough examples and any is new."""
        if self._ridge is None or self._ridge.inserted != self._store.inserted():
            self._fit(self._store.inserted())

    def close(self) -> None:
        """Let go of the store; everything in it is written."""
        self._store.close()

    def _upkeep(self) -> None:
        if self._store.is_replaced():
            self._reload()
        if self._store.opened != self._opened:  # it was damaged: what is known of it stays in memory
            self._opened, self._last = self._store.opened, 0
        full: dict[Key, None] = {}
        for entries in self._store.since(self._last):
            self._last = int(entries.ids[-1])
            self._remember(entries)
            full.update(dict.fromkeys(self._neighbours.add(entries)))
        for key in full:
            entries = joined(list(self._store.since(0, key)), self._encoder.dim)
            self._neighbours.load(key, entries, by_group(entries).get(key))
        if self._neighbours.rows > 1.25 * self._config.capacity + TAIL:  # most of them are not in the store any more
            self._reload()
        self._fit_if_due()

    def _reload(self) -> None:
        self._opened = self._store.opened
        entries = joined(list(self._store.since(0)), self._encoder.dim)
        self._last = int(entries.ids[-1]) if len(entries) else 0
        with self._lock:
            self._answers.clear()
        self._recent.clear()
        self._remember(entries)
        self._neighbours.load_all(entries)

    def _remember(self, entries: Entries) -> None:
        known = ~entries.aborted
        self._recent.extend(entries.tokens[known][-_RECENT:].tolist())
        with self._lock:
            for at in np.flatnonzero(known).tolist():
                if conversation := entries.conversations[at]:
                    answers = self._answers.pop(conversation, None) or deque(maxlen=LAST_ANSWERS)
                    answers.append(int(entries.tokens[at]))
                    self._answers[conversation] = answers
            while len(self._answers) > _CONVERSATIONS:
                self._answers.popitem(last=False)

    def _fit_if_due(self) -> None:
        inserted = self._store.inserted()
        if inserted < self._tried:  # another file since
            self._tried = 0
        if (
            inserted < max(_FIRST_AT, min(_GROWTH * self._tried, self._tried + _MOST_BETWEEN))
            or inserted == self._tried
        ):
            return
        self._fit(inserted)

    def _fit(self, inserted: int) -> None:
        self._tried = inserted
        entries = self._store.newest(MOST_EXAMPLES)
        observed = Observed(entries.tokens, entries.aborted, _numbered(zip(entries.models, entries.salts, strict=True)))
        last = regression.last_of_each(entries.conversations, observed)
        examples = Examples(
            entries.vectors, entries.prompt_tokens, last, entries.turns, entries.tags, entries.models
        )  # fmt: skip
        found = regression.fit(
            examples, observed, encoder=self._encoder.name, inserted=inserted, seed=self._config.seed
        )  # fmt: skip
        if found is None:
            return
        self._ridge = found
        if not self._store.in_memory:
            try:
                found.save(self._folder / REGRESSION)
            except OSError as error:
                logger.warning("the regression can't be written (%s); it is fitted again at the next start", error)

    def _saved_regression(self) -> Ridge | None:
        path = self._folder / REGRESSION
        try:
            ridge = Ridge.load(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s can't be read (%s); it is fitted again", path, error)
            return None
        except ValueError as damage:
            try:
                set_aside(path, damage, logger)
            except OSError:
                logger.warning("%s is damaged (%s) and fitted again", path, damage)
            return None
        return ridge if ridge.encoder == self._encoder.name else None

    # --- vectors ----------------------------------------------------------------------------------------------------

    def _embedded(self, texts: Sequence[str]) -> Vector:
        """Return [n, dim]; a text that was embedded before is not embedded again."""
        keys = [_identity(text) for text in texts]
        with self._lock:
            known = {key: self._vectors[key] for key in keys if key in self._vectors}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if new:
            with self._encoder_lock:  # copies: a row that is kept would keep its whole batch
                known.update(zip(new, (row.copy() for row in self._encoder.encode(list(new.values()))), strict=True))
        with self._lock:
            for key in keys:
                self._vectors[key] = known[key]
                self._vectors.move_to_end(key)
            while len(self._vectors) > _VECTORS_KEPT:
                self._vectors.popitem(last=False)
        return np.stack([known[key] for key in keys])

    def _vector(self, text: str) -> Vector | None:
        with self._lock:
            return self._vectors.get(_identity(text))


def _encoder(config: PredictorConfig) -> TextEncoder:
    from vllm_ext.prediction.encoder import Encoder

    return Encoder(
        config.encoder,
        threads=config.threads,
        max_tokens=config.prompt_tokens,
        window=config.prompt_window,
        batch_size=config.batch_size,
    )


def _entry(done: FinishedPrompt, vector: Vector) -> NewEntry:
    prompt = done.prompt
    return NewEntry(
        prompt.text, vector, done.tokens, prompt.model, digest(prompt.salt), prompt.tag, _conversation(prompt),
        prompt.turn, prompt.prompt_tokens, done.aborted, done.time_s,
    )  # fmt: skip


def _identity(text: str) -> bytes:
    return digest(text) or b"empty"


def _conversation(prompt: Prompt) -> bytes:
    return digest(prompt.conversation, prompt.salt)


def _numbered(keys: Iterable[Key]) -> npt.NDArray[np.int64]:
    numbers: dict[Key, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
