"""Past prompts by their embeddings, with the output lengths they had: the database of ALISE's retrieval.

Source: ALISE, Algorithm 1 and its "vector database". The paper leaves open how it stays small and fast; both are ours.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ext.prediction.store_ageing import Ageing, AgeOrder
from vllm_ext.prediction.store_index import (
    FLAT_LIMIT,
    NEAREST_LISTS,
    InvertedFile,
    Mask,
    Slots,
    Vectors,
    require_faiss,
    scan,
)
from vllm_ext.prediction.store_rows import Entries, Rows, normalised

INDEXES = ("auto", "flat", "ivf")
_FEWEST_FOR_LISTS = 256
_ROWS_PER_LOCK = 64
"""A reader waits for so many insertions at most, some 10 ms."""
_NEIGHBOURS_COMPARED = 8


class Neighbours(NamedTuple):
    """Entries near one query, nearest first, equally near ones in the order in which they were inserted; m <= k."""

    lengths: NDArray[np.int64]
    """[m], output tokens."""
    similarities: NDArray[np.float32]
    """[m], cosine, exact to float32."""
    times_s: NDArray[np.float64]
    """[m], when the requests finished, as the writer told it."""


class VectorStore:
    """Bounded, searchable set of (embedding, output length, model, time).

    Any number of threads may search while others add: a lock is held for one query or 64 insertions. Building the
    index (seconds at 100k entries, a few times until the store is full, then once per turnover) happens within the
    `add` that makes it due, without the lock: searches go on with the old index. So call `add` where a pause does no
    harm, never on an event loop.

    The same calls with the same seed give the same answers.
    """

    def __init__(
        self,
        dim: int,
        *,
        capacity: int = 100_000,
        index: Literal["auto", "flat", "ivf"] = "auto",
        seed: int = 0,
        ageing: Ageing | None = None,
        encoder: str = "",
        keep_prompts: bool = False,
    ) -> None:
        """Make an empty store.

        Args:
            dim: Width of the embeddings.
            capacity: Entries kept at most; one takes about 3 kB of memory at dim 384.
            index: ``flat`` compares with every entry, exact; ``ivf`` scans the nearest lists from 256 entries on;
                ``auto`` is flat up to `FLAT_LIMIT` entries and then ivf.
            seed: Of the index.
            ageing: Which entries go; None for the default.
            encoder: `Encoder.name`: embeddings of different encoders can't be compared.
            keep_prompts: Keep the texts given to `add`, in memory and in files. Off for privacy: they are ignored.

        Raises:
            ValueError: an argument is out of its range.
            ModuleNotFoundError: faiss is needed and not installed.
        """
        if dim < 1:
            raise ValueError(f"dim={dim!r}: must be at least 1")
        if capacity < 1:
            raise ValueError(f"capacity={capacity!r}: must be at least 1")
        if index not in INDEXES:
            raise ValueError(f"index={index!r}: must be one of {', '.join(INDEXES)}")
        self._flat_limit = {"auto": FLAT_LIMIT, "ivf": _FEWEST_FOR_LISTS - 1, "flat": capacity}[index]
        if capacity > self._flat_limit:
            require_faiss()
        self.dim, self.capacity, self.encoder = dim, capacity, encoder
        self._ageing = ageing or Ageing()
        self._seed = seed
        self._rows = Rows(dim, capacity, keep_prompts)
        self._order = AgeOrder()
        self._lists: InvertedFile | None = None
        self._unlisted: dict[int, None] = {}  # slots written since the lists were brought up to date
        # Nothing changes but under both locks: who holds one of them may read. _writing is taken first.
        self._writing = threading.Lock()  # one writer at a time, or one that copies everything
        self._lock = threading.Lock()  # a search, or a piece of a writer's work

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keeps_prompts(self) -> bool:
        """Whether texts are kept."""
        return self._rows.keeps_prompts

    @property
    def index(self) -> str:
        """The index in use now: ``flat`` or ``ivf``."""
        return "flat" if self._lists is None else "ivf"

    def add(
        self,
        vectors: ArrayLike,
        lengths: ArrayLike,
        models: Sequence[str] = (),
        times_s: ArrayLike = (),
        *,
        prompts: Sequence[str] | None = None,
        prompt_tokens: ArrayLike = (),
    ) -> None:
        """Insert finished requests one after the other, ageing as `Ageing` says.

        Args:
            vectors: [n, dim] or [dim], normalised.
            lengths: [n], true output lengths in tokens.
            models: n names, or none.
            times_s: n times in seconds since the epoch, or none. They don't decide what is oldest; the order of
                insertion does, until `absorb` puts all in the order of time.
            prompts: n texts, kept only by a store that was told to.
            prompt_tokens: n lengths of the prompts in tokens, or none.

        Raises:
            ValueError: wrong shape or value; nothing is inserted.
        """
        kept = prompts if self.keeps_prompts else None
        entries = Entries.checked(self.dim, vectors, lengths, models, times_s, kept, prompt_tokens)
        with self._writing:
            self._write(entries)

    def absorb(self, entries: Entries) -> int:
        """Insert what another store learned meanwhile, and order everything by time, as if it had been learned here.

        What was learned first goes first from then on, whoever learned it; an entry without a time, with time 0, is
        older than all with one. What would replace an entry as late as itself, or a later one, stays out: into a full
        store, whatever is not later than its oldest entry.

        Args:
            entries: Of a store with the same encoder; none of them is in this one.

        Returns:
            Entries inserted.

        Raises:
            ValueError: they are of another width; nothing is inserted.
        """
        if entries.vectors.shape[1] != self.dim:
            raise ValueError(f"vectors: width {entries.vectors.shape[1]}, must be {self.dim}")
        with self._writing:
            self._order_by_time()
            # The latest first: what an older one would replace then is older than all that came in before it.
            inserted = self._write(entries.take(np.argsort(-entries.times_s, kind="stable")), only_later=True)
            self._order_by_time()
        return inserted

    def search(
        self, vectors: ArrayLike, k: int, *, min_similarity: float = -1.0, model: str | None = None
    ) -> list[Neighbours]:
        """Find the k nearest entries of each query.

        Args:
            vectors: [n, dim] or [dim], normalised.
            k: Entries wanted; fewer come where the store has fewer, or where they are not similar enough. An inverted
                file may miss some (see `store_index.NPROBE`), and has no more than the lists it scans.
            min_similarity: ALISE's s0. An entry exactly as similar, in float32, is found.
            model: Only entries of that model; None for all.

        Returns:
            One `Neighbours` per query, empty where nothing is found.

        Raises:
            ValueError: wrong shape or value.
        """
        if k < 1:
            raise ValueError(f"k={k!r}: must be at least 1")
        if not np.isfinite(min_similarity):
            raise ValueError(f"min_similarity={min_similarity!r}: must be a finite number; -1 lets everything pass")
        return [self._search(query, k, np.float32(min_similarity), model) for query in normalised(self.dim, vectors)]

    def entries(self) -> Entries:
        """Return a copy of everything at one moment, oldest insertion first; searches go on, an `add` waits."""
        with self._writing:
            return self._rows.entries()

    def _search(self, query: Vectors, k: int, min_similarity: np.float32, model: str | None) -> Neighbours:
        with self._lock:
            rows = self._rows
            eligible = None if model is None else rows.of_model(model)
            if model is not None and eligible is None:
                slots, similarities = np.empty(0, np.intp), np.empty(0, np.float32)
            else:
                slots, similarities = self._nearest(query, k, eligible)
            passed = similarities >= min_similarity
            slots = slots[passed]
            return Neighbours(rows.lengths[slots], similarities[passed], rows.times_s[slots])

    def _nearest(
        self, query: Vectors, k: int, eligible: Mask | None = None, lists: int | None = None
    ) -> tuple[Slots, Vectors]:
        """Slots and similarities of the k nearest, ordered; the lock is held."""
        rows = self._rows
        if self._lists is None:
            slots = scan(rows.vectors[: len(rows)], query, k, eligible)
        else:
            slots = self._lists.candidates(rows.vectors[: len(rows)], query, k, eligible, lists)
        # Row by row in float64: unlike in a matrix product, equal vectors get equal similarities wherever they lie.
        exact = (rows.vectors[slots] * query.astype(np.float64)).sum(axis=1)
        similarities = np.clip(exact, -1, 1).astype(np.float32)
        order = np.lexsort((rows.sequence[slots], -similarities))[:k]
        return slots[order], similarities[order]

    def _write(self, entries: Entries, *, only_later: bool = False) -> int:
        """Insert one after the other and return how many; with ``only_later`` those that replace an older one."""
        inserted = 0
        for start in range(0, len(entries), _ROWS_PER_LOCK):
            end = min(start + _ROWS_PER_LOCK, len(entries))
            with self._lock:
                inserted += sum(self._insert(entries, row, only_later) for row in range(start, end))
                self._update_lists()
            # Many at once, as from a file, build the index once, unless the store is full and searches for each.
            if end == len(entries) or len(self) == self.capacity:
                self._renew_lists()
        return inserted

    def _insert(self, entries: Entries, row: int, only_later: bool) -> bool:
        key = self._key(entries, row)
        slot = self._slot_for(key, entries, row)
        if only_later and slot < len(self) and self._rows.times_s[slot] >= entries.times_s[row]:
            return False
        self._rows.write(slot, entries, row)
        self._order.put(slot, key)
        self._unlisted[slot] = None
        return True

    def _slot_for(self, key: bytes, entries: Entries, row: int) -> int:
        """Where an entry goes: a free slot, or that of the entry that ageing chooses."""
        copies = self._order.copies(key)
        if len(copies) >= self._ageing.max_copies:
            return copies[0]
        if len(self) < self.capacity:
            return len(self)
        redundant = self._redundant_to(entries, row)
        return self._order.oldest if redundant is None else redundant

    def _redundant_to(self, entries: Entries, row: int) -> int | None:
        if self._ageing.redundant_similarity > 1:
            return None
        self._update_lists()
        length, model = int(entries.lengths[row]), entries.models[row]
        slots, similarities = self._nearest(entries.vectors[row], _NEIGHBOURS_COMPARED, lists=NEAREST_LISTS)
        for slot in slots[similarities >= np.float32(self._ageing.redundant_similarity)].tolist():
            if self._rows.model(slot) == model and self._ageing.alike(int(self._rows.lengths[slot]), length):
                return int(slot)
        return None

    def _order_by_time(self) -> None:
        slots = self._rows.by_time()
        if (np.diff(self._rows.sequence[slots]) > 0).all():
            return
        self._order.arrange(slots.tolist())
        with self._lock:
            self._rows.renumber(slots)

    def _update_lists(self) -> None:
        if self._lists is not None and self._unlisted:
            slots = np.fromiter(self._unlisted, np.intp)
            self._lists.put(slots, self._rows.vectors[slots])
        self._unlisted.clear()

    def _renew_lists(self) -> None:
        """Build the lists anew if it is due. Only the writer calls this, so nothing is written meanwhile."""
        if len(self) > self._flat_limit and (self._lists is None or self._lists.stale):
            fresh = InvertedFile(self._rows.vectors[: len(self)], self._seed)
            with self._lock:
                self._lists = fresh

    @staticmethod
    def _key(entries: Entries, row: int) -> bytes:
        digest = hashlib.blake2b(entries.vectors[row].tobytes(), digest_size=16)
        digest.update(entries.models[row].encode("utf-8", "surrogatepass"))
        return digest.digest()
