"""Similar past prompts: a search index per model and salt, so that no answer ever crosses salts.

Each is an immutable faiss index, and a tail of what came since, which is searched as it is. The learner's thread makes
both; the loop's thread sees them by one reference. A tail that is full is built into the next index.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.store import Entries

Vectors = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Key = tuple[str, bytes]
"""Model, and digest of the salt."""

TAIL = 4096
"""Rows that are searched without an index, at most."""
LISTED_FROM = 16_384
"""Rows from which an index has inverted lists; below, each row is looked at."""
_LISTS = 512
_PROBED = 40
_PER_LIST = 40
"""Rows per list that its centres are computed from, at most."""
_MOST_GROUPS = 4096
"""Salts are the clients': a bound on what they can make us keep."""
_OTHER_TAG = 0.1
"""How much less similar a prompt of another application counts."""
_MORE = 3
"""As many times more are looked at where tags decide."""


class Near(NamedTuple):
    """What was found for one prompt, nearest first."""

    tokens: Ints
    """Output lengths, [k]."""
    similarities: npt.NDArray[np.float64]
    """Cosine similarities, less for another tag, [k]."""


class _Rows(NamedTuple):
    """What is known of rows beside their vectors, [n] each; those beyond `_View.filled` may be added to."""

    tokens: Ints
    tags: Ints


class _View(NamedTuple):
    """What a search sees of one group; never changed."""

    index: Any
    """Of faiss; None where the tail is all there is."""
    indexed: _Rows
    tail: Vectors
    tail_rows: _Rows
    filled: int
    """Rows of the tail that are filled."""

    @property
    def rows(self) -> int:
        """All that can be found."""
        return self.filled + len(self.indexed.tokens)


class Neighbours:
    """All groups. `add` and `load` are the learner's, `search` is the loop's."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._views: OrderedDict[Key, _View] = OrderedDict()
        self.rows = 0
        """In all groups."""

    def search(self, key: Key, vectors: Vectors, count: int, tags: Sequence[str]) -> list[Near]:
        """Return the nearest of a group for each vector, [n, dim], ``count`` at most.

        Args:
            key: Of the group.
            vectors: Of unit length.
            count: Neighbours.
            tags: Of the prompts that ask, [n]; those of the same tag go first, an empty one prefers none.
        """
        view = self._views.get(key)
        if view is None:
            return [_NOTHING] * len(vectors)
        wanted = count * _MORE if any(tags) else count
        similar, tokens, their_tags = _found(view, np.ascontiguousarray(vectors, np.float32), wanted)
        near = []
        for row, tag in enumerate(tags):
            scores = similar[row].astype(np.float64)
            if tag:
                scores = scores - _OTHER_TAG * (their_tags[row] != _tag(tag))
            best = np.argsort(-scores, kind="stable")[:count]
            best = best[np.isfinite(scores[best])]
            near.append(Near(tokens[row][best], np.minimum(scores[best], 1.0)))
        return near

    def add(self, entries: Entries) -> list[Key]:
        """Take in entries whose length is known; returns the groups whose tail is full, which `load` makes anew."""
        for key, picked in by_group(entries).items():
            self._set(key, _extended(self._views.get(key) or _empty(self._dim), entries, picked))
        return [key for key, view in self._views.items() if view.filled > TAIL]

    def load(self, key: Key, entries: Entries, picked: npt.NDArray[np.intp] | None) -> None:
        """Make a group anew from those entries that are picked; None if there are none."""
        view = None
        if picked is not None and len(picked) <= TAIL // 2:
            view = _extended(_empty(self._dim), entries, picked)
        elif picked is not None:
            tags = np.array([_tag(entries.tags[at]) for at in picked], np.int64)
            index = _build(entries.vectors, picked)
            view = _empty(self._dim)._replace(index=index, indexed=_Rows(entries.tokens[picked], tags))
        self._set(key, view)

    def load_all(self, entries: Entries) -> None:
        """Make every group anew; a group without entries goes."""
        groups = by_group(entries)
        for key in [*(key for key in self._views if key not in groups), *groups]:
            self.load(key, entries, groups.get(key))

    def clear(self) -> None:
        """Forget everything."""
        self._views, self.rows = OrderedDict(), 0

    def _set(self, key: Key, view: _View | None) -> None:
        before = self._views.get(key)
        self.rows += (0 if view is None else view.rows) - (0 if before is None else before.rows)
        if view is None:
            self._views.pop(key, None)
            return
        self._views[key] = view
        self._views.move_to_end(key)
        while len(self._views) > _MOST_GROUPS:
            self._set(next(iter(self._views)), None)


def _extended(view: _View, entries: Entries, picked: npt.NDArray[np.intp]) -> _View:
    """Return a view that sees more rows of the tail; those that searches hold see what they did."""
    count = view.filled + len(picked)
    tail, rows = view.tail, view.tail_rows
    if count > len(tail):
        room = max(count, len(tail) + len(tail) // 2)
        tail = np.empty((room, tail.shape[1]), np.float32)
        rows = _Rows(np.empty(room, np.int64), np.empty(room, np.int64))
        tail[: view.filled] = view.tail[: view.filled]
        rows.tokens[: view.filled] = view.tail_rows.tokens[: view.filled]
        rows.tags[: view.filled] = view.tail_rows.tags[: view.filled]
    tail[view.filled : count] = entries.vectors[picked]
    rows.tokens[view.filled : count] = entries.tokens[picked]
    rows.tags[view.filled : count] = [_tag(entries.tags[at]) for at in picked]
    return view._replace(tail=tail, tail_rows=rows, filled=count)


def _empty(dim: int) -> _View:
    nothing = _Rows(np.empty(0, np.int64), np.empty(0, np.int64))
    return _View(None, nothing, np.empty((0, dim), np.float32), nothing, 0)


_NOTHING = Near(np.empty(0, np.int64), np.empty(0, np.float64))


def _found(view: _View, vectors: Vectors, count: int) -> tuple[npt.NDArray[np.float32], Ints, Ints]:
    """Return similarities, lengths and tags, [n, up to 2 * count]; what is none has a similarity of -inf."""
    parts = []
    if view.index is not None:
        similar, at = view.index.search(vectors, min(count, len(view.indexed.tokens)))
        parts.append((np.where(at < 0, -np.inf, similar), view.indexed.tokens[at], view.indexed.tags[at]))
    if view.filled:
        similar = vectors @ view.tail[: view.filled].T
        few = min(count, view.filled)
        at = np.argpartition(similar, view.filled - few, axis=1)[:, view.filled - few :]
        parts.append((np.take_along_axis(similar, at, axis=1), view.tail_rows.tokens[at], view.tail_rows.tags[at]))
    similar, tokens, tags = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return similar, tokens, tags


def _build(vectors: npt.NDArray[np.float16], picked: npt.NDArray[np.intp]) -> Any:
    import faiss

    faiss.omp_set_num_threads(1)
    count, dim = len(picked), vectors.shape[1]
    index: Any
    if count < LISTED_FROM:
        index = faiss.index_factory(dim, "SQfp16", faiss.METRIC_INNER_PRODUCT)
        sample = picked[:1]  # nothing is learned of them
    else:
        lists = min(_LISTS, count // _PER_LIST)
        index = faiss.index_factory(dim, f"IVF{lists},SQfp16", faiss.METRIC_INNER_PRODUCT)
        index.cp.niter, index.cp.max_points_per_centroid = 6, _PER_LIST
        index.nprobe = max(1, _PROBED * lists // _LISTS)
        sample = picked[:: count // (lists * _PER_LIST)]
    index.train(vectors[sample].astype(np.float32))
    for start in range(0, count, TAIL):
        index.add(vectors[picked[start : start + TAIL]].astype(np.float32))
    return index


def by_group(entries: Entries) -> dict[Key, npt.NDArray[np.intp]]:
    """Return the rows of each group whose length is known."""
    groups: dict[Key, list[int]] = {}
    for at in np.flatnonzero(~entries.aborted).tolist():
        groups.setdefault((entries.models[at], entries.salts[at]), []).append(at)
    return {key: np.array(rows, dtype=np.intp) for key, rows in groups.items()}


def _tag(tag: str) -> int:
    return zlib.crc32(tag.encode("utf-8", "surrogatepass"))
