"""What is prediction quality worth to the scheduler? A part of prediction.py.

Tested prompts arrive at a simulated server (the real scheduler on a cost model); each carries its predicted length as
the client's hint ``osl``, and nothing else is known of its length. The same requests, in the same order and at the
same times, are served first come first served, and by ALISE's order with true lengths.

The load is the rate at which first come, first served reaches 200 ms per token, the constraint that ALISE's evaluation
quotes: beyond it latency explodes, far below it nobody waits and no order matters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from prediction_data import Cache, Part
from prediction_pairs import Flat, flat, tune

from vllm_ext.observability.results import format_table
from vllm_ext.prediction.evaluation.compare import Comparison, Setting, predictors
from vllm_ext.prediction.evaluation.proxy import ProxyRegressor
from vllm_ext.prediction.evaluation.rows import Examples, Ints, not_in
from vllm_ext.prediction.evaluation.tuned import Tuned
from vllm_ext.prediction.tuning_options import TuningOptions
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.metrics import summarise
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.run import simulate_parts
from vllm_ext.simulation.spec import EngineSpec, SimulationSpec, engine_blocks

PAIRS = (
    ("alpaca", "alpaca"),
    ("sharegpt", "sharegpt"),
    ("wildchat", "wildchat"),
    ("alpaca", "sharegpt"),
    ("sharegpt", "wildchat"),
    ("dolly", "alpaca"),
    ("gsm8k", "wildchat"),
)
"""Learned from and tested on; where ranking is good, and where it is poor."""
HINTED = ("shrunk", "alise", "bucket-history", "prompt-length")
FINE_TUNED = (Tuned.name, ProxyRegressor.name)
Floats = npt.NDArray[np.float64]
MODEL, DEVICE = "opt-13b", "v100"
LIMIT_MS = 200.0
"""Mean normalised latency of first come, first served at the load that is compared, per token."""
TOLERANCE = 0.1
"""Of that latency, relative."""
_TRIALS = 12
MAX_MODEL_LEN = 2048
NORMALISED = "normalised_latency_mean_ms_per_token"
FCFS, ORACLE, SYSTEM = "fcfs", "oracle-alise", "alise"


@dataclass(frozen=True)
class Requests:
    """A workload of requests that are at hand."""

    requests: Sequence[SimRequest]
    name: str = "tested prompts"
    sha256: str = ""

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.requests)

    def start(self) -> Iterator[SimRequest]:
        """Yield them by arrival."""
        return iter(self.requests)

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Nobody asks again."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Worth:
    """Mean normalised latency of one pair, ms per token; rates and latencies are means over the draws."""

    pair: str
    rate_per_s: float
    fcfs_ms: float
    oracle_ms: float
    by_predictor: dict[str, float]
    taus: dict[str, float]

    def gain(self, name: str) -> float:
        """Return how many times lower the latency is than first come, first served."""
        return self.fcfs_ms / self.by_predictor[name]


def measure(
    parts: Mapping[str, Part],
    setting: Setting,
    cache: Cache,
    options: TuningOptions,
    *,
    requests: int,
    draws: int,
    fine_tuned: Sequence[str] = FINE_TUNED,
) -> list[Worth]:
    """Learn and predict some pairs, and serve the tested requests with what was predicted.

    Args:
        parts: Data sets; pairs of `PAIRS` that are not among them are left out; of other sets two are taken.
        setting: What predictors share.
        cache: Has what proxies said, if the pairs were measured before.
        options: How proxies are tuned.
        requests: Served of each pair.
        draws: Of requests and arrivals, each served anew.
        fine_tuned: Which of `FINE_TUNED`, whose training takes minutes.
    """
    names = tuple(parts)
    pairs = [pair for pair in PAIRS if set(pair) <= parts.keys()] or [(names[0], names[0]), (names[0], names[-1])]
    found = []
    for train_name, test_name in pairs:
        train, test = parts[train_name].train, parts[test_name].test
        if train is None:
            continue
        comparison = Comparison(train=train, predictors=predictors(HINTED, setting))
        comparison.fit()
        said = comparison.predict(test) | {
            name: tune(name, parts, train_name, setting, cache, options).said[test_name] for name in fine_tuned
        }
        kept = not_in(test.prompts.texts, train.prompts.texts)
        reduced = {name: s.take(kept) for name, s in said.items()}
        taus = {name: scores["tau"] for name, scores in comparison.scores(reduced, test.take(kept)).items()}
        lengths = {name: predicted.tokens for name, predicted in reduced.items()}
        pair = f"{train_name}>{test_name}"
        served = [
            serve(pair, test.take(kept), lengths, taus, requests=requests, seed=setting.seed + draw)
            for draw in range(draws)
        ]
        found.append(mean(served))
    return found


def mean(served: Sequence[Worth]) -> Worth:
    """Return the mean over draws of one pair."""
    first = served[0]
    return replace(
        first,
        rate_per_s=float(np.mean([w.rate_per_s for w in served])),
        fcfs_ms=float(np.mean([w.fcfs_ms for w in served])),
        oracle_ms=float(np.mean([w.oracle_ms for w in served])),
        by_predictor={name: float(np.mean([w.by_predictor[name] for w in served])) for name in first.by_predictor},
    )


def serve(
    pair: str,
    test: Examples,
    said: Mapping[str, Ints],
    taus: Mapping[str, float],
    *,
    requests: int,
    seed: int,
) -> Worth:
    """Serve so many requests drawn from the tested ones.

    Args:
        pair: Name of what was learned from and tested on.
        test: The tested prompts.
        said: Predictor -> predicted lengths, [len(test)].
        taus: Predictor -> Kendall's tau.
        requests: How many are served.
        seed: Of the draw and of the arrivals.
    """
    rng = np.random.default_rng([seed, 5])
    drawn = rng.integers(len(test), size=requests)
    gaps = rng.exponential(size=requests)
    plain = [
        SimRequest(
            req_id=f"r{number}",
            arrival_s=0.0,
            prompt_tokens=min(int(test.prompts.tokens[row]), MAX_MODEL_LEN // 2),
            output_tokens=min(int(test.lengths[row]), MAX_MODEL_LEN // 2),
            max_tokens=MAX_MODEL_LEN // 2,
        )
        for number, row in enumerate(drawn)
    ]
    arrivals = np.cumsum(gaps)
    rate, timed, fcfs_ms = _saturated(plain, arrivals)
    found = {}
    for name, tokens in said.items():
        hinted = [
            replace(request, extra_args={"osl": int(tokens[row])}) for request, row in zip(timed, drawn, strict=True)
        ]
        found[name] = _run(SYSTEM, hinted)[NORMALISED]
    worth = Worth(
        pair=pair,
        rate_per_s=rate,
        fcfs_ms=fcfs_ms,
        oracle_ms=_run(ORACLE, timed)[NORMALISED],
        by_predictor=found,
        taus=dict(taus),
    )
    gains = ", ".join(f"{name} {worth.gain(name):.2f}" for name in found)
    print(f"{pair}: gain over fcfs: {gains}, oracle {worth.fcfs_ms / worth.oracle_ms:.2f}", file=sys.stderr, flush=True)
    return worth


def _saturated(plain: Sequence[SimRequest], arrivals: Floats) -> tuple[float, list[SimRequest], float]:
    """Return the rate at which first come, first served reaches the limit, the requests at it, and their latency.

    The same arrivals, faster or slower, so latency grows with the rate: it is bracketed by doubling, then bisected.
    """

    def at(rate: float) -> tuple[list[SimRequest], float]:
        times = (arrivals / rate).tolist()
        timed = [replace(request, arrival_s=time_s) for request, time_s in zip(plain, times, strict=True)]
        return timed, _run(FCFS, timed)[NORMALISED]

    low, high, rate = 0.0, float("inf"), 1.0
    for _ in range(_TRIALS):
        timed, latency_ms = at(rate)
        if abs(latency_ms / LIMIT_MS - 1) <= TOLERANCE:
            break
        low, high = (rate, high) if latency_ms < LIMIT_MS else (low, rate)
        rate = 2 * rate if high == float("inf") else rate / 2 if low == 0 else float(np.sqrt(low * high))
    return rate, timed, latency_ms


FACTS = {"model": MODEL, "device": DEVICE, "limit_ms_per_token": LIMIT_MS, "max_model_len": MAX_MODEL_LEN}
"""What shaped the measurement."""


def _run(system: str, requests: Sequence[SimRequest]) -> dict[str, float]:
    hardware = HardwareSpec(model=MODEL, device=DEVICE)
    options = {"prediction": {"sources": ["hint"]}} if system == SYSTEM else {}
    engine = EngineSpec(system=system, options=options, max_model_len=MAX_MODEL_LEN, prefix_caching=False)
    spec = SimulationSpec(engine=engine, hardware=hardware)
    data, _ = simulate_parts(
        spec,
        workload=Requests(requests),
        cost=build_cost(hardware, spec.cost),
        num_blocks=engine_blocks(spec),
    )
    return summarise(data)


def table(found: Sequence[Worth]) -> str:
    """Lay out the gain over first come, first served."""
    rows = [
        [w.pair, w.rate_per_s, w.fcfs_ms, name, w.taus.get(name), w.by_predictor[name], w.gain(name),
         w.fcfs_ms / w.oracle_ms]
        for w in found
        for name in w.by_predictor
    ]  # fmt: skip
    header = ["learned>tested", "req/s", "fcfs ms/token", "lengths by", "tau", "ms/token", "gain", "gain of oracle"]
    return (
        f"mean normalised latency where fcfs has about {LIMIT_MS:g} ms/token, simulated {MODEL} on {DEVICE}\n"
        + format_table(header, rows)
    )


def metrics(found: Sequence[Worth]) -> Flat:
    """Return the latencies under our predictors, and those of the others by their names."""
    return flat(
        (name, f"worth.{worth.pair}.{NORMALISED}", round(value, 2))
        for worth in found
        for name, value in {FCFS: worth.fcfs_ms, ORACLE: worth.oracle_ms, **worth.by_predictor}.items()
    )
