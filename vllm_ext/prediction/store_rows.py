"""The columns of a vector store: what is kept of each finished request, and how it is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_FIRST_ROWS = 256
_NORM_TOLERANCE = 1e-3


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
            prompts=None if self.prompts is None else tuple(self.prompts[row] for row in rows),
        )

    @classmethod
    def checked(
        cls,
        dim: int,
        vectors: ArrayLike,
        lengths: ArrayLike,
        models: Sequence[str] = (),
        times_s: ArrayLike = (),
        prompts: Sequence[str] | None = None,
    ) -> Entries:
        """Build from outside data.

        Args:
            dim: Width that the vectors must have.
            vectors: [n, dim] or [dim], normalised.
            lengths: [n], or one number beside one vector; whole numbers of at least 1.
            models: n names, or none.
            times_s: n finite times, or none.
            prompts: n texts, or None to keep none.

        Raises:
            ValueError: something has the wrong shape or value; the message names it.
        """
        matrix = normalised(dim, vectors)
        count = len(matrix)
        raw = np.atleast_1d(np.asarray(lengths))
        if raw.shape != (count,):
            raise ValueError(f"lengths: shape {raw.shape}, must be ({count},), one per vector")
        if count and (raw.dtype.kind not in "iu" or raw.min() < 1):
            raise ValueError(f"lengths={raw[:3]}...: must be whole numbers of at least 1 (tokens)")
        times = np.atleast_1d(np.asarray(times_s, dtype=np.float64))
        times = times if times.size else np.zeros(count)
        if times.shape != (count,) or not np.isfinite(times).all():
            raise ValueError(f"times_s: shape {times.shape}, must be ({count},) finite seconds, or nothing")
        names = _texts("models", models, count) if len(models) else ("",) * count
        texts = None if prompts is None else _texts("prompts", prompts, count)
        return cls(vectors=matrix, lengths=raw.astype(np.int64), times_s=times, models=names, prompts=texts)


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
        self._model_codes[slot] = self._code(entries.models[row])
        self.sequence[slot] = self._next_sequence
        self._next_sequence += 1
        if self._prompts is not None:
            self._prompts[slot] = "" if entries.prompts is None else entries.prompts[row]

    def entries(self) -> Entries:
        """Copy everything, oldest insertion first."""
        order = np.argsort(self.sequence[: self._size])
        return Entries(
            vectors=self.vectors[order],
            lengths=self.lengths[order],
            times_s=self.times_s[order],
            models=tuple(self.model(slot) for slot in order),
            prompts=None if self._prompts is None else tuple(self._prompts[slot] for slot in order),
        )

    def _make_room(self) -> None:
        if self._size < len(self.lengths):
            return
        rows = min(2 * self._size, self._capacity)
        for name in ("vectors", "lengths", "times_s", "sequence", "_model_codes"):
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


def _texts(field: str, texts: Sequence[str], count: int) -> tuple[str, ...]:
    if isinstance(texts, str) or len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{field}: {len(texts)} given, must be {count} texts, one per vector")
    return tuple(texts)
