"""How fast does KV move between a GPU and host memory, as it is and in 8 bits, against one large copy of pinned memory?

A job of scattered blocks of all layers (the shape of Llama-3.1-8B's KV) is stored into chunks of the pool in random
order, and loaded into other blocks; timed from its submission until it is through, and the median of some repeats is
taken. Throughput counts bytes of KV, whatever crosses the link: in 8 bits that is about half. The bytes are checked
first, those of 8 bits against the format's definition; where some are wrong, nothing is measured of that kind. The
result is written after every part. Besides:

- ``polled``: jobs of 4 GiB over the link, looked at only every 20 or 6 ms, as by an engine with steps of that length;
  timed on the device, from the first copy's start to the last one's end. With it, what a GiB of KV costs the thread
  that launches.
- kernels alone; jobs of one chunk, what they cost the engine's thread and when they are through; loads beside stores.
- what loads, and stores, cost a stream that multiplies matrices meanwhile.

Not measured on a device yet, so that no result is committed.

Needs a GPU, torch, Triton and numpy, but neither vLLM nor an installation:

    python benchmarks/gpu/kv_tier_cuda.py --quick
    python benchmarks/gpu/kv_tier_cuda.py --out benchmarks/results/kv_tier_cuda.json
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import checkout  # noqa: F401 - before all that it makes importable
import on_gpu
import torch
from findings import Findings
from kv_tier_cuda_parts import Shape, Tier, wrong_bytes

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kv.cuda.codec import Buffer, Piece, StagingSlot
from vllm_ext.kv.cuda.transfers import Ended
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Workload, command
from vllm_ext.report.table import Table

Metrics = dict[str, float]
_ONE_COPY = "one pinned copy"
_NAMES = {LOSSLESS: "raw", QUANTISED: "8bit"}
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one PCIe lane, by generation, after encoding."""
_LINK_BYTES = 2**28
_POLLED_BYTES = 2**32
"""Over the link, several times what may be on the device at once."""
_POLLED_MS = (20, 6)
_POLLED_GOAL = 0.9
_KERNEL_PIECES = 32
"""More than the device's cache holds."""
_TINY = Shape(blocks=16, layers=2, heads=1, head_dim=4, dtype=torch.float16)
"""For a try; Triton's interpreter does not round to bfloat16 as a GPU does."""


def seconds(work: Callable[[], object], sync: Callable[[], None], repeats: int) -> float:
    """Return the median time of some work, device included, after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        sync()
        started = time.perf_counter()
        work()
        sync()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def link(where: str, num_bytes: int, repeats: int) -> dict[str, float]:
    """Measure one large copy in each direction, and in both at once."""
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=where == "cuda") for _ in range(2)]
    device = [torch.zeros(num_bytes, dtype=torch.uint8, device=where) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if where == "cuda" else []
    sync = torch.cuda.synchronize if where == "cuda" else _nothing

    def out() -> None:
        host[0].copy_(device[0], non_blocking=True)

    def back() -> None:
        device[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        for number, copy in enumerate((out, back)):
            with torch.cuda.stream(streams[number] if streams else None):
                copy()

    found = {"store": seconds(out, sync, repeats), "load": seconds(back, sync, repeats)}
    together = seconds(both, sync, repeats)
    rates = {f"{name}_gb_per_s": num_bytes / took / 1e9 for name, took in found.items()}
    return {**rates, "each_of_both_gb_per_s": num_bytes / together / 1e9}


def throughput(tier: Tier, repeats: int) -> dict[str, float]:
    """Measure whole jobs, and the kernels alone."""

    def job(is_load: bool) -> None:
        tier.submit(is_load=is_load)
        tier.transfers.drain()

    name, total = _NAMES[tier.bits], tier.num_chunks * tier.kv_bytes_per_chunk
    found = {}
    for kind, is_load in (("store", False), ("load", True)):
        found[f"{name}_{kind}_gb_per_s"] = total / seconds(lambda: job(is_load), tier.sync, repeats) / 1e9  # noqa: B023
    tier.transfers.take_ended()
    return found | kernels(tier, repeats)


def kernels(tier: Tier, repeats: int) -> dict[str, float]:
    """Measure kernels on one buffer and, one after the other, the blocks of many pieces."""
    codec, buffer = tier.codec, tier.codec.new_buffer()
    pieces = list(tier.pieces(tier.chunks, tier.sources))[:_KERNEL_PIECES]
    slots = codec.new_slots(len(pieces))
    for slot, piece in zip(slots, pieces, strict=True):
        codec.fill_in(slot, piece)
    size = sum(len(piece.chunks) for piece in pieces) * tier.kv_bytes_per_chunk

    def all_pieces(step: Callable[[Piece, Buffer, StagingSlot], None]) -> None:
        for slot, piece in zip(slots, pieces, strict=True):
            step(piece, buffer, slot)

    steps = {"pack": codec.pack, "unpack": codec.unpack}
    return {
        f"{_NAMES[tier.bits]}_{kind}_kernel_gb_per_s": size
        / seconds(lambda: all_pieces(step), tier.sync, repeats)  # noqa: B023
        / 1e9
        for kind, step in steps.items()
    }


def polled(tier: Tier, repeats: int) -> dict[str, float]:
    """Measure large jobs that are looked at once in a while, and what it costs the thread to launch them."""
    times = -(-_POLLED_BYTES // (tier.num_chunks * tier.geometry.chunk_bytes)) if tier.where == "cuda" else 1
    total = times * tier.num_chunks * tier.kv_bytes_per_chunk
    found = {}
    for kind, is_load in (("store", False), ("load", True)):
        for period_ms in _POLLED_MS:
            runs = [_polled_once(tier, is_load, times, period_ms / 1e3) for _ in range(repeats + 1)][1:]
            took, launching = (statistics.median(values) for values in zip(*runs, strict=True))
            name = f"{_NAMES[tier.bits]}_{kind}_polled_{period_ms}ms"
            found[f"{name}_gb_per_s"] = total / took / 1e9
            found[f"{name}_launching_ms_per_gib"] = launching * 1e3 / (total / 2**30)
    return found


def _polled_once(tier: Tier, is_load: bool, times: int, period_s: float) -> tuple[float, float]:
    """Return seconds on the device, and those for which the thread was busy with it."""
    tier.sync()
    next_look = time.perf_counter()
    tier.submit(is_load=is_load, times=times)
    launching = time.perf_counter() - next_look
    ended: list[Ended] = []
    while not ended:
        next_look += period_s
        time.sleep(max(0.0, next_look - time.perf_counter()))
        called = time.perf_counter()
        ended = tier.transfers.take_ended()
        launching += time.perf_counter() - called
    if ended[0].seconds is None:
        raise RuntimeError("a copy failed")
    return ended[0].seconds, launching


def one_chunk(tier: Tier, repeats: int) -> dict[str, float]:
    """Measure jobs of one chunk."""
    found = {}
    for kind, is_load in (("store", False), ("load", True)):
        submitted, through = [], []
        for _ in range(20 * repeats if tier.where == "cuda" else 1):
            tier.sync()
            started = time.perf_counter()
            job = tier.submit(is_load=is_load, count=1)
            submitted.append(time.perf_counter() - started)
            tier.transfers.wait({job})
            through.append(time.perf_counter() - started)
        name = f"{_NAMES[tier.bits]}_{kind}_of_one_chunk"
        found[f"{name}_submit_us"] = statistics.median(submitted) * 1e6
        found[f"{name}_through_us"] = statistics.median(through) * 1e6
    tier.transfers.take_ended()
    return found


def load_beside_stores(tier: Tier, repeats: int) -> float:
    """Return the throughput of a load after which as much is stored, in GB/s."""
    taken = []
    for _ in range(repeats):
        tier.sync()
        started = time.perf_counter()
        load = tier.submit(is_load=True)
        tier.submit(is_load=False)
        ended: set[int] = set()
        while load not in ended:
            ended |= {job.job_id for job in tier.transfers.take_ended()}
        taken.append(time.perf_counter() - started)
        tier.transfers.drain()
    tier.transfers.take_ended()
    return tier.num_chunks * tier.kv_bytes_per_chunk / statistics.median(taken) / 1e9


def slowdown(tier: Tier, repeats: int, size: int, *, is_load: bool) -> float:
    """Return how much longer matrices take to multiply beside copies.

    The copies begin before, and take twice as long as the matrices do alone: none is left to itself.
    """
    a = torch.randn(size, size, dtype=torch.bfloat16, device=tier.where)

    def multiply(count: int) -> float:
        """Return seconds of the device."""
        started = tier.device.record(None)
        for _ in range(count):
            a @ a
        done = tier.device.record(None)
        tier.transfers.drain()
        tier.sync()
        return tier.device.elapsed_s(started, done)

    def beside() -> float:
        tier.submit(is_load=is_load, times=2)
        return multiply(count)

    copying = seconds(lambda: (tier.submit(is_load=is_load), tier.transfers.drain()), tier.sync, 1)
    multiply(10)
    count = max(10, int(copying / (multiply(10) / 10)))
    multiply(count)
    alone = statistics.median(multiply(count) for _ in range(repeats))
    beside()
    ratio = statistics.median(beside() for _ in range(repeats)) / alone
    tier.transfers.take_ended()
    return ratio


def pcie_limit_gb_per_s() -> float | None:
    """Return what the link to the first GPU can carry in one direction, or None where nobody says."""
    query = ["nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        generation, width = (int(value) for value in told.split(","))
        return _LANE_BYTES_PER_S[generation] * width / 1e9
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None


def parts(tier: Tier, repeats: int) -> dict[str, Callable[[], Metrics]]:
    """Return what is measured of a tier, the most telling first."""
    name, size = _NAMES[tier.bits], 4096 if tier.where == "cuda" else 64

    def beside(kind: str, is_load: bool) -> Metrics:
        return {f"{name}_compute_time_beside_{kind}_ratio": slowdown(tier, repeats, size, is_load=is_load)}

    return {
        "throughput": lambda: throughput(tier, repeats),
        "polled": lambda: polled(tier, repeats),
        "one chunk": lambda: one_chunk(tier, repeats),
        "compute beside stores": lambda: beside("stores", False),
        "compute beside loads": lambda: beside("loads", True),
        "loads beside stores": lambda: {f"{name}_load_before_stores_gb_per_s": load_beside_stores(tier, repeats)},
    }


def measure_tier(found: Findings, tier: Tier, repeats: int) -> None:
    """Measure a tier part by part, if its bytes are right."""
    name = _NAMES[tier.bits]
    wrong = found.attempt(f"{name} bytes", lambda: wrong_bytes(tier))
    if wrong:
        found.wrong.append(f"{wrong} bytes are wrong at {tier.bits} bits")
    elif wrong == 0:
        found.metrics[f"{name}_host_bytes_per_kv_byte"] = tier.geometry.chunk_bytes / tier.kv_bytes_per_chunk
        for part, work in parts(tier, repeats).items():
            found.metrics |= found.attempt(f"{name} {part}", work) or {}
            found.write()


def measure_other_tiers(found: Findings, tier_of: Callable[..., Tier], repeats: int) -> None:
    """Measure a tier whose loads wait behind stores, and one whose pool is not pinned."""

    def at_once(tier: Tier) -> Metrics:
        return {"raw_load_at_once_with_stores_gb_per_s": load_beside_stores(tier, repeats)}

    def pageable(tier: Tier) -> Metrics:
        return {"raw_pageable_store_gb_per_s": throughput(tier, repeats)["raw_store_gb_per_s"]}

    for part, work, options in (("at once", at_once, {"loads_first": False}), ("pageable", pageable, {"pins": False})):
        tier = tier_of(LOSSLESS, **options)
        found.metrics |= found.attempt(f"raw {part}", functools.partial(work, tier)) or {}
        found.attempt(f"end of raw {part}", tier.close)
        found.write()


def measure(shape: Shape, where: str, repeats: int, found: Findings) -> None:
    """Measure one large copy, and tiers; what fails, or is wrong, is found."""
    tier_of = functools.partial(Tier, shape, where=where, seed=found.seed)
    size = _LINK_BYTES if where == "cuda" else 2**10
    found.baselines[_ONE_COPY] = found.attempt(_ONE_COPY, lambda: link(where, size, repeats)) or {}
    found.write()
    for bits in (LOSSLESS, QUANTISED):
        if tier := found.attempt(f"{_NAMES[bits]} tier", functools.partial(tier_of, bits)):
            measure_tier(found, tier, repeats)
            found.attempt(f"end of the {_NAMES[bits]} tier", tier.close)
        del tier
    if not found.wrong:
        found.attempt("other tiers", lambda: measure_other_tiers(found, tier_of, repeats))


def claims(metrics: dict[str, float], copies: dict[str, float]) -> list[Claim]:
    """Return what copies were meant to reach."""
    found = []
    for name, goal in (("raw", 0.9), ("8bit", 1.6)):
        for kind in ("store", "load"):
            ratio = metrics[f"{name}_{kind}_gb_per_s"] / copies[f"{kind}_gb_per_s"]
            kernel = metrics[f"{name}_{'pack' if kind == 'store' else 'unpack'}_kernel_gb_per_s"]
            note = "" if ratio >= goal else f"the kernel alone moves {kernel:.0f} GB/s of KV"
            metric = f"{name}_{kind} / one pinned copy"
            found.append(Claim(name=metric, value=ratio, op=">=", goal=goal, facts=note))
    return found + [_polled_claim(metrics, copies, kind, period) for kind in ("store", "load") for period in _POLLED_MS]


def _polled_claim(metrics: dict[str, float], copies: dict[str, float], kind: str, period_ms: int) -> Claim:
    name = f"raw_{kind}_polled_{period_ms}ms"
    ratio = metrics[f"{name}_gb_per_s"] / copies[f"{kind}_gb_per_s"]
    note = "" if ratio >= _POLLED_GOAL else f"looked at all the time it is {metrics[f'raw_{kind}_gb_per_s']:.0f} GB/s"
    return Claim(name=f"{name} / one pinned copy", value=ratio, op=">=", goal=_POLLED_GOAL, facts=note)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and return the exit status: 1 if bytes are wrong, 3 if a part failed."""
    args = on_gpu.parsed(on_gpu.argument_parser(__doc__), argv)
    where = "cpu" if args.dry else "cuda"
    shape = _TINY if args.dry else Shape(blocks=512 if args.quick else 2048)
    repeats = 1 if args.dry else 3 if args.quick else 9
    config = {
        "layers": shape.layers, "heads": shape.heads, "head_dim": shape.head_dim, "block_size": shape.block_size,
        "blocks": shape.blocks, "dtype": str(shape.dtype), "repeats": repeats, "quick": args.quick, "dry": args.dry,
    }  # fmt: skip
    digest = hashlib.sha256(repr((sorted(config.items()), args.seed)).encode()).hexdigest()
    found = Findings(
        name="kv_tier_cuda", command=command(argv, __file__), config=config, seed=args.seed,
        workload=Workload(name="random KV", rows=shape.blocks, sha256=digest), out=args.out,
    )  # fmt: skip
    measure(shape, where, repeats, found)
    if not args.dry and (limit := pcie_limit_gb_per_s()) is not None:
        found.baselines["PCIe limit"] = dict.fromkeys(("store_gb_per_s", "load_gb_per_s"), limit)
    if not (args.dry or found.wrong or found.failed):
        found.claims = claims(found.metrics, found.baselines[_ONE_COPY])
    rows = [[name, value] for name, value in found.metrics.items()]
    rows += [[f"{kind}: {name}", value] for kind, values in found.baselines.items() for name, value in values.items()]
    return found.end([Table(("metric", "value"), rows)])


def _nothing() -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
