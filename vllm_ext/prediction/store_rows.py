"""The columns of a vector store: what is kept of each finished request, and how it is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ext.prediction.estimate import LONGEST_TOKENS

_FIRST_ROWS = 256
_NORM_TOLERANCE = 1e-3
_ROWS_AT_ONCE = 2048
"""Copied in one go: 2 ms, for which numpy may hold the interpreter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Entries:
    """Finished requests, in the order in which they were inserted; n of them."""

    vectors: NDArray[np.float32]
    """[n, dim], normalised embeddings of the prompts."""
    lengths: NDArray[np.int64]
    """[n], output tokens."""
    times_s: NDArray[np.float64]
    """[n], seconds since the epoch; 0 where it was not given."""
    models: tuple[str, ...]
    """Name of the model that answered; empty where it was not given."""
    prompt_tokens: NDArray[np.int64]
    """[n], lengths of the prompts in tokens; 0 where it was not given."""
    prompts: tuple[str, ...] | None = None
    """Texts, only of a store that was told to keep them."""

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, picked: NDArray[np.intp] | slice) -> Entries:
        """Return the picked entries, in the order of ``picked``."""
        rows = np.arange(len(self))[picked]
        return Entries(
            vectors=self.vectors[rows],
            lengths=self.lengths[rows],
            times_s=self.times_s[rows],
            models=tuple(self.models[row] for row in rows),
            prompt_tokens=self.prompt_tokens[rows],
            prompts=None if self.prompts is None else tuple(self.prompts[row] for row in rows),
        )

    def keys(self) -> list[bytes]:
        """Return what tells each observation from others: a digest of vector, length, time and model.

        Entries with equal keys are one observation that was learned twice: in copies of a store of which both went on.
        """
        times_s = self.times_s + 0.0  # so that there is one zero, not two
        numbers = np.stack((self.lengths, times_s.view(np.int64)), axis=1)
        return [
            hashlib.blake2b(vector.tobytes() + pair.tobytes() + _bytes_of(model), digest_size=16).digest()
            for vector, pair, model in zip(self.vectors, numbers, self.models, strict=True)
        ]

    @classmethod
    def checked(
        cls,
        dim: int,
        vectors: ArrayLike,
        lengths: ArrayLike,
        models: Sequence[str] = (),
        times_s: ArrayLike = (),
        prompts: Sequence[str] | None = None,
        prompt_tokens: ArrayLike = (),
    ) -> Entries:
        """Build from outside data.

        Args:
            dim: Width that the vectors must have.
            vectors: [n, dim] or [dim], normalised.
            lengths: [n], or one number beside one vector; whole numbers of 1 to `LONGEST_TOKENS`.
            models: n names, or none.
            times_s: n finite times, or none.
            prompts: n texts, or None to keep none.
            prompt_tokens: n whole numbers of 0 (unknown) to `LONGEST_TOKENS`, or none.

        Raises:
            ValueError: something has the wrong shape or value; the message names it.
        """
        matrix = normalised(dim, vectors)
        count = len(matrix)
        outputs = _tokens("lengths", lengths, count, least=1)
        given = np.atleast_1d(np.asarray(prompt_tokens))
        inputs = _tokens("prompt_tokens", given, count, least=0) if given.size else np.zeros(count, np.int64)
        times = np.atleast_1d(np.asarray(times_s, dtype=np.float64))
        times = times if times.size else np.zeros(count)
        if times.shape != (count,) or not np.isfinite(times).all():
            raise ValueError(f"times_s: shape {times.shape}, must be ({count},) finite seconds, or nothing")
        names = _texts("models", models, count) if len(models) else ("",) * count
        texts = None if prompts is None else _texts("prompts", prompts, count)
        return cls(vectors=matrix, lengths=outputs, times_s=times, models=names, prompt_tokens=inputs, prompts=texts)


def normalised(dim: int, vectors: ArrayLike) -> NDArray[np.float32]:
    """Return [n, dim] float32, contiguous.

    Raises:
        ValueError: another shape, a number that is not finite, or a vector whose length is not 1.
    """
    matrix = np.atleast_2d(np.ascontiguousarray(vectors, dtype=np.float32))
    if matrix.size == 0:
        return np.empty((0, dim), np.float32)
    if matrix.ndim != 2 or matrix.shape[1] != dim:
        raise ValueError(f"vectors: shape {np.shape(vectors)}, must be [n, {dim}] or [{dim}]")
    norms = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
    if (bad := ~(np.abs(norms - 1) <= _NORM_TOLERANCE)).any():
        row = int(np.argmax(bad))
        raise ValueError(f"vectors[{row}]: length {norms[row]:.6g}, must be 1 (normalise by the L2 norm, no NaN)")
    return matrix


class Rows:
    """Growable columns. A row is a slot that is written again when its entry goes; rows 0..len-1 are taken.

    No checks and no lock: both are the store's.
    """

    def __init__(self, dim: int, capacity: int, keep_prompts: bool) -> None:
        self._capacity = capacity
        self._size = 0
        self._next_sequence = 0
        rows = min(_FIRST_ROWS, capacity)
        self.vectors = np.zeros((rows, dim), np.float32)
        self.lengths = np.zeros(rows, np.int64)
        self.times_s = np.zeros(rows, np.float64)
        self.prompt_tokens = np.zeros(rows, np.int64)
        self.sequence = np.zeros(rows, np.int64)
        """Order of insertion."""
        self._model_codes = np.zeros(rows, np.int32)
        self._names: list[str] = []
        self._uses: list[int] = []
        self._codes: dict[str, int] = {}
        self._prompts: list[str] | None = [] if keep_prompts else None

    def __len__(self) -> int:
        return self._size

    @property
    def keeps_prompts(self) -> bool:
        """Whether the text of prompts is kept beside their embeddings."""
        return self._prompts is not None

    def model(self, slot: int) -> str:
        """Name of the model of an entry."""
        return self._names[int(self._model_codes[slot])]

    def of_model(self, model: str) -> NDArray[np.bool_] | None:
        """[len], True where the entry is of that model; None if none is."""
        code = self._codes.get(model)
        return None if code is None else self._model_codes[: self._size] == code

    def write(self, slot: int, entries: Entries, row: int) -> None:
        """Put one entry into a slot, the next free one (len) or one that is taken."""
        if slot == self._size:
            self._make_room()
            self._size += 1
            if self._prompts is not None:
                self._prompts.append("")
        else:
            self._release(int(self._model_codes[slot]))
        self.vectors[slot] = entries.vectors[row]
        self.lengths[slot] = entries.lengths[row]
        self.times_s[slot] = entries.times_s[row]
        self.prompt_tokens[slot] = entries.prompt_tokens[row]
        self._model_codes[slot] = self._code(entries.models[row])
        self.sequence[slot] = self._next_sequence
        self._next_sequence += 1
        if self._prompts is not None:
            self._prompts[slot] = "" if entries.prompts is None else entries.prompts[row]

    def entries(self) -> Entries:
        """Copy everything, oldest insertion first."""
        order = np.argsort(self.sequence[: self._size])
        vectors = np.empty((self._size, self.vectors.shape[1]), np.float32)
        for start in range(0, self._size, _ROWS_AT_ONCE):
            piece = slice(start, start + _ROWS_AT_ONCE)
            vectors[piece] = self.vectors[order[piece]]
        return Entries(
            vectors=vectors,
            lengths=self.lengths[order],
            times_s=self.times_s[order],
            models=tuple(self._names[code] for code in self._model_codes[order].tolist()),
            prompt_tokens=self.prompt_tokens[order],
            prompts=None if self._prompts is None else tuple(self._prompts[slot] for slot in order.tolist()),
        )

    def by_time(self) -> NDArray[np.intp]:
        """Return all taken slots, earliest entry first, of equal times in the order of insertion."""
        order: NDArray[np.intp] = np.lexsort((self.sequence[: self._size], self.times_s[: self._size]))
        return order

    def renumber(self, slots: NDArray[np.intp]) -> None:
        """Make an order of all taken slots the order of insertion."""
        self.sequence[slots] = np.arange(self._size)
        self._next_sequence = self._size

    def _make_room(self) -> None:
        if self._size < len(self.lengths):
            return
        rows = min(2 * self._size, self._capacity)
        for name in ("vectors", "lengths", "times_s", "prompt_tokens", "sequence", "_model_codes"):
            old: NDArray[Any] = getattr(self, name)
            new = np.zeros((rows, *old.shape[1:]), old.dtype)
            new[: self._size] = old
            setattr(self, name, new)

    def _code(self, model: str) -> int:
        """Number of a name; a number whose entries are all gone is given again, so that names can't pile up."""
        code = self._codes.get(model)
        if code is None:
            code = self._uses.index(0) if 0 in self._uses else len(self._names)
            self._names[code : code + 1] = [model]
            self._uses[code : code + 1] = [0]
            self._codes[model] = code
        self._uses[code] += 1
        return code

    def _release(self, code: int) -> None:
        self._uses[code] -= 1
        if not self._uses[code]:
            del self._codes[self._names[code]]


def _tokens(field: str, numbers: ArrayLike, count: int, *, least: int) -> NDArray[np.int64]:
    raw = np.atleast_1d(np.asarray(numbers))
    if raw.shape != (count,):
        raise ValueError(f"{field}: shape {raw.shape}, must be ({count},), one per vector")
    # Compared before the cast: an unsigned number may become a negative one.
    wrong = (raw < least) | (raw > LONGEST_TOKENS) if raw.dtype.kind in "iu" else np.ones(count, np.bool_)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{field}[{row}]={raw[row]}: must be a whole number of {least} to {LONGEST_TOKENS} (tokens)")
    return raw.astype(np.int64)


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _texts(field: str, texts: Sequence[str], count: int) -> tuple[str, ...]:
    if isinstance(texts, str) or len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{field}: {len(texts)} given, must be {count} texts, one per vector")
    return tuple(texts)
