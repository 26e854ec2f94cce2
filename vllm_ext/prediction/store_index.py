"""Which stored vectors may be near a query: an exact scan while they are few, an inverted file (faiss) beyond.

An index proposes slots (rows of the store's matrix); the store computes the exact similarities of the proposed ones and
orders them. So an index can lose a neighbour, but never report a wrong similarity.

Why this split (CPU time, one core, dim 384; `benchmarks/prediction_store.py` repeats it): at 100k entries a scan reads
154 MB and takes 20 ms. On random vectors around 5,000 topics, IVF finds 93 % of the 10 nearest in 0.34 ms, replaces an
entry in 0.04 ms and is built in 3 s; HNSW (16 neighbours, search 64) finds 93 % in 0.32 ms, inserts in 0.26 ms, is
built in 25 s, and takes twice the memory of fp16 lists. On 100k vectors spread like embeddings, the store with IVF
finds 91 % (97 % of those of similarity 0.6 or more) in 0.62 ms, faiss' HNSW 76 % (91 %) in 0.23 ms. It's quicker
where less recall will do, but it can't remove, which a full store does with every insertion.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Slots = NDArray[np.intp]
Mask = NDArray[np.bool_]

FLAT_LIMIT = 4096
"""Entries up to which a scan stays below 1 ms on one core."""
NPROBE = 64
"""Lists an inverted file scans per query. Of 16,000 embedded prompts (alpaca, gsm8k, dolly, halueval) it finds 97.6 %
of the 10 nearest, and 99.9 % of those with a similarity of 0.6 or more; half as many lists find 95.2 % and 99.6 %."""
NEAREST_LISTS = 8
"""Lists in which an almost equal vector is looked for: it lies in the same one, or in one next to it."""
MAX_LISTS = 1024
"""More lists would make the search for the nearest lists dearer than the lists themselves at 100k entries."""
_ENTRIES_PER_LIST = 40
_TRAINING_ROUNDS = 6
_ROUNDING = 1e-5
"""A float32 product of normalised vectors depends on the row's place in the matrix by less than this."""
_HALF_ROUNDING = 6e-4
"""Error of an inner product with a normalised vector in fp16, 2**-11 at most, and some room."""
_SPARE = 24
_MOST_CANDIDATES = 1024
"""Candidates fetched because of ties, at most; a store keeps far fewer copies of one vector."""
_GATHER_LIMIT = 1024
"""Eligible entries up to which reading them one by one costs no more than an inverted file."""


def require_faiss() -> None:
    """Say early that the inverted file can't be built.

    Raises:
        ModuleNotFoundError: faiss is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec("faiss") is None:
        raise ModuleNotFoundError(
            f"a vector store of more than {FLAT_LIMIT} entries needs faiss: `pip install faiss-cpu`, or index='flat'"
        )


def _faiss() -> Any:
    """Import faiss when it is needed: a scheduler's process never does. Its stubs lack what it adds at run time."""
    return importlib.import_module("faiss")


def scan(vectors: Vectors, query: Vectors, k: int, eligible: Mask | None = None) -> Slots:
    """Return all slots that can be among the k nearest, and those as near as the k-th up to rounding.

    Args:
        vectors: [n, dim]
        query: [dim]
        k: At least 1.
        eligible: [n], True where an entry may be returned; None for all.

    Returns:
        Slots in ascending order; fewer than k where fewer are eligible.
    """
    if eligible is not None:
        slots = np.flatnonzero(eligible)
        return slots[scan(vectors[slots], query, k)]
    if len(vectors) <= k:
        return np.arange(len(vectors))
    similarities = vectors @ query
    kth = np.partition(similarities, len(vectors) - k)[len(vectors) - k]
    return np.flatnonzero(similarities >= kth - _ROUNDING)


class InvertedFile:
    """IVF over fp16 copies of the vectors: lists by nearest centroid, of which a query scans the nearest few.

    The ids are the store's slots. A slot can be replaced in place at any time (faiss finds it by a hash table), so
    nothing is marked as deleted. What ages are the centroids: `stale` says when to build a new file.
    """

    def __init__(self, vectors: Vectors, seed: int, nprobe: int = NPROBE) -> None:
        """Find centroids (k-means, cosine) and add all vectors; takes seconds for 100k.

        Threads are OpenMP's: set ``OMP_NUM_THREADS`` where the caller's cores are not its own.

        Args:
            vectors: [n, dim], normalised, n >= 1; slot i is row i.
            seed: Of the k-means; equal vectors and seed give an equal index.
            nprobe: Lists per query.
        """
        faiss = _faiss()
        size, dim = vectors.shape
        self.num_lists = min(MAX_LISTS, max(1, 2 ** round(math.log2(size / _ENTRIES_PER_LIST))))
        self.nprobe = min(nprobe, self.num_lists)
        settings = faiss.ClusteringParameters()
        settings.niter, settings.spherical, settings.seed = _TRAINING_ROUNDS, True, seed % 2**31
        settings.min_points_per_centroid, settings.max_points_per_centroid = 1, _ENTRIES_PER_LIST
        self._centroids = faiss.IndexFlatIP(dim)  # kept: the inverted file only points to it
        faiss.Clustering(dim, self.num_lists, settings).train(vectors, self._centroids)
        self._file = faiss.IndexIVFScalarQuantizer(
            self._centroids, dim, self.num_lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
        )
        self._file.is_trained = True  # fp16 has nothing to learn, and the centroids are there
        self._file.set_direct_map_type(faiss.DirectMap.Hashtable)
        self._file.add_with_ids(vectors, np.arange(size, dtype=np.int64))
        self._trained_size = len(vectors)
        self._replaced = 0

    def __len__(self) -> int:
        return int(self._file.ntotal)

    @property
    def stale(self) -> bool:
        """Whether the entries have become four times as many (until lists no longer grow), or changed once over."""
        grown = self.num_lists < MAX_LISTS and len(self) >= 4 * self._trained_size
        return grown or self._replaced >= max(len(self), self._trained_size)

    def put(self, slots: Slots, vectors: Vectors) -> None:
        """Insert vectors ([n, dim]) at slots ([n], distinct); a slot that is taken is replaced."""
        ids = np.asarray(slots, dtype=np.int64)
        if len(taken := ids[ids < len(self)]):
            self._replaced += int(self._file.remove_ids(taken))
        self._file.add_with_ids(vectors, ids)

    def candidates(
        self, vectors: Vectors, query: Vectors, k: int, eligible: Mask | None = None, lists: int | None = None
    ) -> Slots:
        """As `scan`, but entries of lists that are not scanned are missing.

        Few eligible entries are compared one by one. Otherwise as many more lists are scanned as eligible entries are
        thinner, since lists without any cost next to nothing. ``lists`` is the number to scan, if not the usual one.
        """
        lists, params = min(lists or self.nprobe, self.num_lists), {}
        if eligible is not None:
            count = int(np.count_nonzero(eligible))
            if count <= max(_GATHER_LIMIT, k):
                return scan(vectors, query, k, eligible)
            lists = min(self.num_lists, -(-lists * len(eligible) // count))
            params = {"sel": self._selector(eligible)}
        wanted, size = k + _SPARE, len(self)
        while True:
            near, found = self._search(query, min(wanted, size), lists, params)
            if len(found) < wanted or wanted >= min(size, max(k + _SPARE, _MOST_CANDIDATES)):
                return found
            if near[k - 1] - near[-1] > 2 * _HALF_ROUNDING:
                return found
            wanted *= 4

    def _search(self, query: Vectors, count: int, lists: int, params: dict[str, Any]) -> tuple[Vectors, Slots]:
        settings = _faiss().SearchParametersIVF(nprobe=lists, **params)
        similarities, ids = self._file.search(query[None], count, params=settings)
        found = ids[0] >= 0
        return similarities[0][found], ids[0][found]

    @staticmethod
    def _selector(eligible: Mask) -> Any:
        return _faiss().IDSelectorBitmap(np.packbits(eligible, bitorder="little"))
