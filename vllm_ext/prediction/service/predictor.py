"""What the predictor's process runs: an interface of four methods, and the predictor that comes with the package.

Another one is named by the option ``predictor.factory``: ``module:callable``, called with the options in the process
of the predictor. It is asked from one thread and told what finished from another.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.config_prediction import PredictorConfig
from vllm_ext.prediction import blend, store_files, tuned_encoder
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.folder import STORE, load_decoder
from vllm_ext.prediction.selection import features_for
from vllm_ext.prediction.service.refreshing import DecoderRefresh
from vllm_ext.prediction.service.shared_store import SharedStore, current_state

_VECTORS_KEPT = 16_384
_MIB = 2**20

Vector = npt.NDArray[np.float32]


class Prompt(NamedTuple):
    """A request whose length is asked for."""

    text: str
    max_tokens: int
    """The client's bound on the output."""
    model: str
    """Name of the model or adapter that answers."""
    prompt_tokens: int = 0
    """Length of the prompt in tokens of that model; 0 where unknown."""


class FinishedPrompt(NamedTuple):
    """A request that ended by itself."""

    prompt: Prompt
    tokens: int
    """True output length."""
    time_s: float
    """When, in seconds since the epoch."""


class PromptPredictor(Protocol):
    """What can be asked for output lengths."""

    def predict(self, prompts: Sequence[Prompt]) -> Sequence[Estimate | None]:
        """Return an estimate per prompt, None where there is nothing to go by.

        What it raises costs the batch its prediction, and no more.
        """
        ...

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Take in what finished; called from another thread than `predict`."""
        ...

    def save(self) -> None:
        """Keep what was learned; called from time to time and at the end, from the thread of `learn`."""
        ...

    def status(self) -> dict[str, int]:
        """Return ``entries`` and ``decoder_examples`` of `messages.Status`."""
        ...


class RetrievalPredictor:
    """Encoder, store of past prompts and decoder, combined by a strategy.

    Source: ALISE, section 3.1 and Algorithm 1.
    """

    def __init__(self, config: PredictorConfig, folder: Path) -> None:
        """Load the encoder and what was learned before.

        Raises:
            ModuleNotFoundError: a package that the predictor needs is missing.
            ValueError: an option is not allowed, or the encoder can't be loaded.
            OSError: the folder can't be read.
        """
        self._config = config
        self._folder = folder
        self._encoder = Encoder(
            config.encoder or tuned_encoder.usable(folder),
            threads=config.threads,
            max_tokens=config.prompt_tokens,
            window=config.prompt_window,  # type: ignore[arg-type]  # checked by the configuration
            batch_size=config.batch_size,
        )
        state = current_state(folder / STORE)  # before it is read: what comes in between is not known yet
        store = store_files.load(
            folder / STORE,
            self._encoder.dim,
            encoder=self._encoder.name,
            capacity=config.capacity,
            seed=config.seed,
            keep_prompts=config.keep_prompts,
        )
        self._shared = SharedStore(store, folder / STORE, max_bytes=config.max_mib * _MIB, state=state)
        self._decoder = load_decoder(folder, self._encoder.name)
        self._refresh = DecoderRefresh(folder, seed=config.seed) if config.refresh_decoder else None
        self._strategy = blend.strategy(config.strategy)
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._lock = threading.Lock()
        self._encoder_lock = threading.Lock()

    def predict(self, prompts: Sequence[Prompt]) -> list[Estimate | None]:
        """Embed, search, decode and combine."""
        vectors = self._embed([prompt.text for prompt in prompts])
        decoder = self._decoder
        decoded: Sequence[Estimate | None] = [None] * len(prompts)
        rule = self._strategy
        if decoder is not None:
            decoded = decoder.predict(vectors, features_for(decoder, [prompt.prompt_tokens for prompt in prompts]))
            rule = rule.suited(decoder.spec.kernel_width)
        found = []
        for prompt, vector, guess in zip(prompts, vectors, decoded, strict=True):
            (near,) = self._shared.store.search(
                vector, self._config.neighbours, min_similarity=0.0, model=prompt.model or None
            )
            found.append(rule.combine(near, guess, prompt.max_tokens))
        return found

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Insert what finished.

        Some finished before they were embedded: under load the short ones, and a store without these would say that
        everything is long. A batch of them is embedded now; of more, an even choice, and the others are left out.
        """
        missing = list({d.prompt.text: None for d in finished if self._vector(d.prompt.text) is None})
        if missing:
            step = -(-len(missing) // self._config.batch_size)
            self._embed(missing[::step])
        known = [(done, vector) for done in finished if (vector := self._vector(done.prompt.text)) is not None]
        if known:
            self._shared.add(
                np.stack([vector for _, vector in known]),
                np.array([done.tokens for done, _ in known], dtype=np.int64),
                [done.prompt.model for done, _ in known],
                np.array([done.time_s for done, _ in known]),
                prompts=[done.prompt.text for done, _ in known],
                prompt_tokens=[done.prompt.prompt_tokens for done, _ in known],
            )

    def save(self) -> None:
        """Write the store, and have the decoder trained again where that is due."""
        self._shared.save()
        if self._refresh is None:
            return
        if self._refresh.finished():
            self._decoder = load_decoder(self._folder, self._encoder.name) or self._decoder
        trained_on = 0 if self._decoder is None else self._decoder.spec.num_examples
        self._refresh.start_if_due(self._shared.inserted, trained_on)

    def close(self) -> None:
        """Stop a training that runs."""
        if self._refresh is not None:
            self._refresh.stop()

    def status(self) -> dict[str, int]:
        """Return the size of the store and what the decoder was trained on."""
        decoder = self._decoder
        return {
            "entries": len(self._shared.store),
            "decoder_examples": 0 if decoder is None else decoder.spec.num_examples,
        }

    def _embed(self, texts: Sequence[str]) -> Vector:
        """Return [n, dim]; a text that was embedded before is not embedded again."""
        keys = [_digest(text) for text in texts]
        with self._lock:
            known = {key: self._vectors[key] for key in keys if key in self._vectors}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if new:
            # Copies: a row that is kept would keep its whole batch.
            with self._encoder_lock:
                vectors = [vector.copy() for vector in self._encoder.encode(list(new.values()))]
            known.update(zip(new, vectors, strict=True))
        with self._lock:
            for key in keys:
                self._vectors[key] = known[key]
                self._vectors.move_to_end(key)
            while len(self._vectors) > _VECTORS_KEPT:
                self._vectors.popitem(last=False)
        return np.stack([known[key] for key in keys])

    def _vector(self, text: str) -> Vector | None:
        with self._lock:
            return self._vectors.get(_digest(text))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
