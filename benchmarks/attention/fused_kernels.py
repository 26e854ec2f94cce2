"""What could fused LayerNorm and ReLU kernels gain over the code that vLLM's compiler writes?

Question: ALISE (section 3.4) has kernels of its own for LayerNorm with the residual sum and for fc1 with ReLU. vLLM
compiles a model with Inductor, which fuses them as well. How far is Inductor's code from what no kernel can beat, and
how much of a layer's time is that?

Method: one layer of OPT without its attention: the residual sum and LayerNorm twice, and the four products with fc1's
ReLU, one thread, random numbers. Timed by turns are Inductor's code, PyTorch's operators one by one, and a floor: for
LayerNorm a copy that reads and writes as many bytes, for fc1 the product without ReLU. Reported are medians, ratios of
neighbouring turns with quartiles, and the share of the layer's time that a perfect kernel would save.

    python benchmarks/attention/fused_kernels.py --quick
    python benchmarks/attention/fused_kernels.py --out benchmarks/results/fused_kernels.json
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import layer_norm, linear, relu

from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.report.timing import Seconds, measure, ratio

HIDDEN, FFN = 2048, 8192
"""OPT-1.3B's."""
ROWS = (1, 32, 512)
INDUCTOR, ONE_BY_ONE, FLOOR = "Inductor", "one by one", "floor"
_CALLS = 20
"""Of a LayerNorm in a turn, which alone is too short for the clock."""
GOAL = 0.05
"""Of a layer's time, from which on a kernel of our own would be worth its upkeep."""

Subject = Callable[[], object]


def normalised(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return LayerNorm of the sum, and the sum; all [rows, hidden]."""
    summed = x + residual
    return layer_norm(summed, (x.shape[-1],), w, b, 1e-5), summed


def activated(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return fc1 and ReLU, [rows, ffn]."""
    return relu(linear(x, w, b))


def subjects(rows: int, generator: torch.Generator) -> dict[str, dict[str, Subject]]:
    """Return the ways to compute each part of a layer, checked against one another."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, residual, scale, shift = numbers(rows, HIDDEN), numbers(rows, HIDDEN), numbers(HIDDEN), numbers(HIDDEN)
    w1, b1, w2, wqkv = numbers(FFN, HIDDEN), numbers(FFN), numbers(HIDDEN, FFN), numbers(3 * HIDDEN, HIDDEN)
    wo, inner = numbers(HIDDEN, HIDDEN), numbers(rows, FFN)
    norm, act = torch.compile(normalised, dynamic=False), torch.compile(activated, dynamic=False)
    torch.testing.assert_close(norm(x, residual, scale, shift), normalised(x, residual, scale, shift))
    torch.testing.assert_close(act(x, w1, b1), activated(x, w1, b1))
    source, target = numbers(2 * rows, HIDDEN), torch.empty(2 * rows, HIDDEN)
    return {
        "LayerNorm": {
            INDUCTOR: lambda: norm(x, residual, scale, shift),
            ONE_BY_ONE: lambda: normalised(x, residual, scale, shift),
            FLOOR: lambda: target.copy_(source),
        },
        "fc1, ReLU": {
            INDUCTOR: lambda: act(x, w1, b1),
            ONE_BY_ONE: lambda: activated(x, w1, b1),
            FLOOR: lambda: linear(x, w1, b1),
        },
        "other products": {FLOOR: lambda: (linear(x, wqkv), linear(x, wo), linear(inner, w2))},
    }


def measured(parts: Mapping[str, Mapping[str, Subject]], repeats: int) -> dict[tuple[str, str], Seconds]:
    """Return CPU seconds of each way of each part, by turns; the first turn, which warms up, is left out."""

    def calls(subject: Subject, count: int) -> Subject:
        return lambda: [subject() for _ in range(count)]

    count = {part: _CALLS if part == "LayerNorm" else 1 for part in parts}
    ways = {(part, name): calls(way, count[part]) for part, found in parts.items() for name, way in found.items()}
    times = measure(ways, repeats + 1, time.process_time)
    return {key: took[1:] / count[key[0]] for key, took in times.items()}


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=31, help="turns of all ways (default: %(default)s)")
    args = parser.parse_args(argv)
    repeats, rows_list = (5, ROWS[:2]) if args.quick else (args.repeats, ROWS)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(args.seed)
    metrics: dict[str, float] = {}
    baselines: dict[str, dict[str, float]] = {ONE_BY_ONE: {}, FLOOR: {}}
    lines, claims = [], []
    for rows in rows_list:
        times = measured(subjects(rows, generator), repeats)
        total = 0.0
        saved = 0.0
        for (part, name), took in times.items():
            each = float(np.median(took))
            middle, low, high = ratio(times, (part, name), (part, FLOOR))
            count = 2 if part == "LayerNorm" else 1
            key = f"{rows}_rows.{part}"
            if name == INDUCTOR:
                total += count * each
                saved += count * float(np.median(took - times[part, FLOOR]))
                metrics |= {f"{key}_us": round(each * 1e6, 1), f"{key}_over_floor": round(middle, 3)}
            elif part == "other products":
                total += each
                metrics[f"{key}_us"] = round(each * 1e6, 1)
            else:
                baselines[name] |= {f"{key}_us": round(each * 1e6, 1), f"{key}_over_floor": round(middle, 3)}
            lines.append([rows, part, name, each * 1e6, middle, low, high])
        share = max(0.0, saved / total)
        metrics[f"{rows}_rows.saved_by_perfect_kernels"] = round(share, 4)
        metric = f"{rows} rows: share of a layer that perfect kernels would save"
        note = f"{saved * 1e6:.0f} of {total * 1e6:.0f} us"
        claims.append(Claim(name=metric, value=share, op="<=", goal=GOAL, facts=note))
    config = {"hidden": HIDDEN, "ffn": FFN, "rows": rows_list, "repeats": repeats, "dtype": "float32", "threads": 1}
    result = Result(
        name="fused_kernels",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(
            name="random numbers", rows=len(rows_list), sha256=hashlib.sha256(repr(config).encode()).hexdigest()
        ),
        metrics=metrics,
        baselines=baselines,
        claims=claims,
    )
    emit(result, [Table(["rows", "part", "way", "us", "over floor", "q1", "q3"], lines)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
