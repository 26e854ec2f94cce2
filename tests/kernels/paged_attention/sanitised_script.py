"""Calls the kernel built with sanitisers, all that it is given being allocations of exactly their size.

    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \\
        python sanitised_script.py LIBRARY FIELDS [--all] [--plant id|query|misaligned]

Prints the number of calls. The sanitisers end the process at their first finding. FIELDS is what ``struct Call`` has,
as JSON: ``[[name, name in ctypes], ...]``. A process of its own without torch, as all of it runs under the sanitisers.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DTYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 2: np.dtype(np.uint16)}
"""By the kernel's number; numpy has no bfloat16, of which this is the bits."""
DIMS = (32, 64, 96, 128, 192, 256, 512)
HEADS = ((1, 1), (1, 7), (2, 3), (1, 64), (8, 4), (3, 5))
"""KV heads, and query heads of each."""
BLOCKS = (32, 96)
OPTIONS = ((0, 0.0, 1), (1, 0.0, 2), (33, 3.0, 2), (31, 0.0, 1))
"""Window, softcap, threads."""
NUM_BLOCKS, NUM_RECORDS = 6, 4


@dataclass(frozen=True)
class Case:
    """Sizes of a call."""

    dtype: int
    dim: int
    kv_heads: int
    group: int
    block: int
    window: int
    softcap: float
    threads: int

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Tokens of the query, of the KV, and the position of the first, of each range."""
        n = self.block
        plain = [(0, 0), (1, 1), (1, 3 * n), (5, n + 1), (0, 33), (33, 2 * n - 1), (70, 70), (3, n)]
        return [*((q, kv, kv - q) for q, kv in plain), (9, 4, -5), (2, n, 1000), (4, 0, 2**31 - 1)]


def covering() -> Iterator[Case]:
    """Each type with each size of head and all options; heads and blocks by turns."""
    turns = zip(itertools.product(DTYPES, DIMS), itertools.cycle(HEADS), itertools.cycle(BLOCKS))
    for ((dtype, dim), heads, block), options in itertools.product(turns, OPTIONS):
        yield Case(dtype, dim, *heads, block, *options)


def every() -> Iterator[Case]:
    for dtype, dim, heads, block, options in itertools.product(DTYPES, DIMS, HEADS, BLOCKS, OPTIONS):
        yield Case(dtype, dim, *heads, block, *options)


@dataclass
class Memory:
    """Copies of arrays, with nothing but what the sanitiser watches around each."""

    libc: Any = field(default_factory=lambda: ctypes.CDLL(None))
    held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.libc.malloc.restype, self.libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self.libc.free.argtypes = [ctypes.c_void_p]

    def put(self, array: Any, *, shift: int = 0) -> int:
        """Return where a copy lies, ``shift`` bytes behind the start of its allocation."""
        place: int = self.libc.malloc(max(1, array.nbytes + shift)) + shift
        ctypes.memmove(place, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        self.held.append(place - shift)
        return place

    def clear(self) -> None:
        while self.held:
            self.libc.free(self.held.pop())


class Numbers:
    """Random arrays."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def normal(self, dtype: int, *shape: int) -> Any:
        found = self._random.standard_normal(shape).astype(np.float32)
        return (found.view(np.uint32) >> 16).astype(np.uint16) if dtype == 2 else found.astype(DTYPES[dtype])

    def ids(self, count: int) -> Any:
        return self._random.integers(0, NUM_BLOCKS + NUM_RECORDS, count).astype(np.int32)

    def records(self, case: Case) -> Any:
        """Return records: codes, then minima and scales of the channels."""
        codes, channels = case.kv_heads * 2 * case.block * case.dim, case.kv_heads * 2 * case.dim
        numbers = self.normal(case.dtype, NUM_RECORDS, 2 * channels).view(np.uint8)
        return np.hstack([self._random.integers(0, 256, (NUM_RECORDS, codes)).astype(np.uint8), numbers])


def attend(library: Any, call_type: Any, case: Case, numbers: Numbers, memory: Memory, plant: str) -> None:
    """Attend once; ``plant`` names what is told of the tensors that is not so."""
    q_len, kv_len, position = (np.array(column, np.int32) for column in zip(*case.ranges, strict=True))
    counts = -(-kv_len // case.block)
    tokens, ids = int(q_len.sum()), int(counts.sum())
    heads, width = case.kv_heads * case.group, case.kv_heads * case.group * case.dim
    page, records = case.kv_heads * 2 * case.block * case.dim, numbers.records(case)
    if plant == "id":
        kv_len[-1] += case.block
    if plant == "query":
        q_len[-1] += 1
    call = call_type(
        query=memory.put(numbers.normal(case.dtype, tokens, width)), query_stride=width,
        out=memory.put(numbers.normal(case.dtype, tokens, width)), out_stride=width,
        lse=memory.put(np.zeros((tokens, heads), np.float32)),
        pages=memory.put(numbers.normal(case.dtype, NUM_BLOCKS, page)), page_stride=page, num_blocks=NUM_BLOCKS,
        records=memory.put(records), record_bytes=records.shape[1], num_records=NUM_RECORDS,
        block_ids=memory.put(numbers.ids(ids)), num_block_ids=ids + (plant == "id"),
        first_block=memory.put(np.cumsum(counts, dtype=np.int64) - counts),
        q_start=memory.put(np.cumsum(q_len, dtype=np.int32) - q_len, shift=2 * (plant == "misaligned")),
        q_len=memory.put(q_len), q_position=memory.put(position), kv_len=memory.put(kv_len),
        num_ranges=len(q_len), num_tokens=tokens + (plant == "query"),
        num_heads=heads, num_kv_heads=case.kv_heads, head_dim=case.dim, block_size=case.block,
        window=case.window, scale=0.1, softcap=case.softcap, dtype=case.dtype, threads=case.threads,
    )  # fmt: skip
    assert library.attend(ctypes.byref(call)) == -1
    memory.clear()


def write(library: Any, case: Case, numbers: Numbers, memory: Memory) -> None:
    """Write tokens over block boundaries, padding and single ones into pages."""
    slots = np.array([*range(case.block - 9, case.block + 5), -1, 0, NUM_BLOCKS * case.block - 1], np.int64)
    width = case.kv_heads * case.dim
    key, value = (memory.put(numbers.normal(case.dtype, len(slots), width)) for _ in range(2))
    pages = memory.put(numbers.normal(case.dtype, NUM_BLOCKS, 2 * case.block * width))
    sizes = (NUM_BLOCKS, memory.put(slots), len(slots), case.kv_heads, case.dim, case.block)
    strides = (width, 2 * case.block * width)
    assert library.write_kv(
        key, strides[0], value, strides[0], pages, strides[1], *sizes, DTYPES[case.dtype].itemsize, case.threads
    ) == -1  # fmt: skip
    memory.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("fields")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--plant", default="")
    options = parser.parse_args()
    fields = [(name, getattr(ctypes, kind)) for name, kind in json.loads(options.fields)]
    call_type = type("Call", (ctypes.Structure,), {"_fields_": fields})
    library = ctypes.CDLL(options.library)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.attend.argtypes, library.attend.restype = [pointer], number
    library.write_kv.restype = number
    library.write_kv.argtypes = [pointer, number, pointer, number, pointer, number, number, pointer, *[number] * 6]
    numbers, memory, count = Numbers(), Memory(), 0
    for case in every() if options.all else covering():
        attend(library, call_type, case, numbers, memory, options.plant)
        write(library, case, numbers, memory)
        count += 1
    print(count)


if __name__ == "__main__":
    main()
