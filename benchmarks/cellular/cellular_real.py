"""Real execution of manners of batching, for `cellular.py`: nothing is run from here.

A run is judged by the CPU time of the worker's thread, which foreign load on the machine does not change; latencies are
wall time and do change with it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.garbage import freeze
from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.models import Model, build
from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cellular.requests import Request
from vllm_ext.cellular.scheduler import Batching
from vllm_ext.experiments.batching.merging import MergedBatching, Merging
from vllm_ext.experiments.batching.padding import PaddedBatching

Make = Callable[[CellTable, Callable[[int], None]], Batching]
WAIT_S = 600.0
VOCABULARY = 1000
CHUNK_S = 0.08
"""Audio of a chunk."""
WARM_UP = 10
"""Chunks before the clock starts."""


def padded(max_batch: int, width: int = 10) -> Make:
    return lambda table, freed: PaddedBatching(table, freed, max_batch=max_batch, width=width)


def merged(table: CellTable, freed: Callable[[int], None]) -> Batching:
    """DyNet's and Fold's batches; merging itself costs nothing here, so that this is the best that either can do."""
    return MergedBatching(table, freed, merging=Merging(name="merged", node_s=0.0, overlapped=False))


def engine(model: Model, make: Make | None, max_batch: int, requests: int, cells: str | None = None) -> CellularEngine:
    sizes = dict.fromkeys((cell.name for cell in model.cells), max_batch)
    gc.unfreeze()  # else `freeze` keeps each engine before this one, with all that it stored
    gc.collect()
    options = EngineOptions(max_requests=requests + 1, max_batch=sizes, cells=cells)
    made = CellularEngine(model, options, batching=make)
    freeze()  # as `vllm-ext cellular serve` does
    return made


def cpu_s(one: CellularEngine) -> tuple[float, float]:
    """CPU seconds of the worker: of tasks, and of scheduling, registering and handing out."""
    return sum(sum(executor.times.computing) for executor in one.executors), one.scheduling_s


def values(handle: Request) -> list[torch.Tensor]:
    return list(handle.future.result(WAIT_S).values())


def saturated(
    model: Model,
    requests: Sequence[Mapping[str, Any]],
    manners: Mapping[str, Make | None],
    max_batch: int,
    repeats: int,
) -> dict[str, dict[str, float]]:
    """Serve all requests at once under each manner in turns, and check that all give the same answers.

    Raises:
        SystemExit: two manners differ by more than rounding.
    """
    rates: dict[str, list[float]] = {name: [] for name in manners}
    shares: dict[str, list[float]] = {name: [] for name in manners}
    task_s: dict[str, list[float]] = {name: [] for name in manners}
    first: list[list[torch.Tensor]] | None = None
    for _ in range(repeats):
        for name, make in manners.items():
            with engine(model, make, max_batch, len(requests)) as one:
                handles = [one.submit(request) for request in requests]
                answers = [values(handle) for handle in handles]
                computing, scheduling = cpu_s(one)
                tasks = sum(counts.tasks for counts in one.batching.counts)
            rates[name].append(len(requests) / (computing + scheduling))
            shares[name].append(scheduling / (computing + scheduling))
            task_s[name].append((computing + scheduling) / tasks)
            first = first or answers
            same(first, answers, name)
    return {
        name: {
            "requests_per_cpu_s": statistics.median(rates[name]),
            "requests_per_cpu_s_low": min(rates[name]),
            "requests_per_cpu_s_high": max(rates[name]),
            "scheduling_share": statistics.median(shares[name]),
            "task_cpu_ms": statistics.median(task_s[name]) * 1e3,
        }
        for name in manners
    }


def same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]], name: str) -> None:
    """The allowed error is generous for fp32 sums over some hundred steps; a wrong row is off by 0.1."""
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        for x, y in zip(a, b, strict=True):
            if x.shape != y.shape or not torch.allclose(x.float(), y.float(), atol=1e-4):
                raise SystemExit(f"cellular: {name} gives another answer to request {number}: {x} instead of {y}")


def sentences(lengths: Sequence[int], seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"tokens": rng.integers(0, VOCABULARY, length).tolist()} for length in lengths]


def ends(one: CellularEngine, requests: Sequence[Mapping[str, Any]], times: np.ndarray) -> np.ndarray:
    """Submit each request at its time, in seconds from now on, and return when it ended, on the same clock."""
    begin = time.monotonic()
    handles = []
    for at, request in zip(times.tolist(), requests, strict=True):
        if (pause := begin + at - time.monotonic()) > 0:
            time.sleep(pause)
        handles.append(one.submit(request))
    for handle in handles:
        values(handle)
    found: np.ndarray = np.array([handle.ended_s for handle in handles], float) - begin
    return found


def at_load(
    model: Model, requests: Sequence[Mapping[str, Any]], make: Make | None, max_batch: int, rate_per_s: float, seed: int
) -> dict[str, float]:
    """Serve Poisson arrivals and return latencies in wall time, from the intended arrival."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, len(requests)))
    with engine(model, make, max_batch, len(requests)) as one:
        latencies = (ends(one, requests, times) - times) * 1e3
    return {f"p{p}_ms": float(np.percentile(latencies, p)) for p in (50, 90, 99)}


def streams(
    model: Model, audio: np.ndarray, manners: Mapping[str, Make | None], repeats: int
) -> dict[str, dict[str, float]]:
    """Feed streams of audio at the speed of speech, and check that all manners hear the same.

    Args:
        model: An RNN-T.
        audio: [stream, chunk, frame, feature].
        manners: Name -> manner of batching.
        repeats: Turns.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in manners}
    heard: list[list[torch.Tensor]] | None = None
    for _ in range(repeats):
        for name, make in manners.items():
            with engine(model, make, 64, audio.shape[0] * audio.shape[1]) as one:
                said, latencies = _spoken(one, audio)
                computing, scheduling = cpu_s(one)
            heard = heard or said
            same(heard, said, name)
            seconds = audio.shape[0] * audio.shape[1] * CHUNK_S
            found[name].append({
                "chunk_p50_ms": float(np.percentile(latencies, 50)) * 1e3,
                "chunk_p99_ms": float(np.percentile(latencies, 99)) * 1e3,
                "cpu_s_per_audio_s": (computing + scheduling) / seconds,
            })  # fmt: skip
    return {name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()}


def _spoken(one: CellularEngine, audio: np.ndarray) -> tuple[list[list[torch.Tensor]], list[float]]:
    warm = one.open_session()  # what is done once per process or engine is not part of a stream
    for chunk in audio[0, :WARM_UP]:
        values(warm.submit({"audio": chunk}))
    warm.close()
    sessions = [one.open_session() for _ in audio]
    handles: list[list[Request]] = [[] for _ in audio]
    intended: list[list[float]] = [[] for _ in audio]
    begin = time.monotonic()
    for chunk in range(audio.shape[1]):
        for stream, session in enumerate(sessions):
            at = begin + (chunk + stream / len(sessions)) * CHUNK_S
            if (pause := at - time.monotonic()) > 0:
                time.sleep(pause)
            handles[stream].append(session.submit({"audio": audio[stream, chunk]}))
            intended[stream].append(at)
    said = [[values(handle)[0] for handle in one_stream] for one_stream in handles]
    latencies = [
        float(handle.ended_s or 0.0) - at
        for one_stream, times in zip(handles, intended, strict=True)
        for handle, at in zip(one_stream, times, strict=True)
    ]
    for session in sessions:
        session.close()
    return said, latencies


def speech(model: Model, streams_count: int, chunks: int, seed: int) -> np.ndarray:
    """Noisy symbols and silences, as the model was trained on."""
    from vllm_ext.cellular.train import symbols

    rng = np.random.default_rng(seed)
    spoken = rng.integers(0, model.config["vocabulary"], (streams_count, chunks, model.config["frames"]))
    sounds = symbols(model).numpy()[spoken]
    noisy: np.ndarray = (sounds + 0.3 * rng.normal(size=sounds.shape)).astype(np.float32)
    return noisy


def lstm(hidden: int) -> Model:
    return build("lstm", hidden=hidden, vocabulary=VOCABULARY, classes=0)
