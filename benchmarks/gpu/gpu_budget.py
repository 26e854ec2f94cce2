"""Which token budget serves chats best on this GPU, and does the simulator say the same?

One engine of Llama-3.1-8B's shape with random weights, vLLM's own scheduler, and room for 8,192 tokens a step,
compiled and with CUDA graphs as vLLM does unless told otherwise; where that fails, with graphs of decode alone. First
its steps are timed over a grid (`gpu_grid.py`), which also says at what rate it saturates. Then the same Poisson
arrivals, with lengths like ShareGPT's, are served with `max_num_scheduled_tokens` at 8,192, 512 and 1,024, one window
after the other, each drained before the next; requests that do not end in time are counted. The middle one comes last:
it is left out where the time is short. The grid is kept as `vllm serve --ext-profile` reads it, and as the simulator
does; `--simulate` serves the same arrivals there.

By a roofline of an H100 the grid takes 26 s; with three windows of 38 s, fits, and some 35 s until the engine has
started (import, weights, graphs, KV) that is 180 s. What is there is written after each cell and each window.

    python benchmarks/gpu/gpu_budget.py --out token_budget.json --profile profile.json
    python benchmarks/gpu/gpu_budget.py --simulate token_budget.json --out simulated.json      # needs no GPU
    python benchmarks/gpu/gpu_budget.py --dry                                                   # on the CPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_engine
import gpu_grid
import numpy as np
import on_gpu

from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.cost.step_shape import StepShape

BUDGETS = (8192, 512, 1024)
"""In the order of what their windows tell."""
LOAD = 0.5
"""Of the saturation that the grid implies, which is the device's alone: on an H200 the engine in this process could not
keep up with 0.8 of it."""
_SHAPE = "llama-8b"
_MAX_MODEL_LEN = 16384 + 512
COST_FILE = "step_cost.json"
"""Beside the profile: the simulator's cost model."""
_SEATS, _DRY_SEATS = 256, 8
"""Requests that run at once in a window; the grid needs more."""
_LEAST_GRID_S = 20.0
"""The grid gets them even if a window has to be left out for it: no model fits fewer cells."""
_FIT_S = 5.0
"""For the last cell, for both fits, and for the arrivals of the windows."""
_DRY_BUDGETS = (128, 32)
_DRY_GRID = gpu_grid.GridSpec(
    corners=((12, 32), (1, 32)), corner_tokens=(0, 64, 16), inner=((4, 64),), inner_tokens=(0, 16),
    alone=(64, 16, 32), runs=5,
)  # fmt: skip
_LONGEST = 8192
"""Tokens of a prompt or an output of the workload, at most."""


def workload(rate: float, seconds: float, seed: int, *, dry: bool) -> Any:
    """Return Poisson arrivals with lengths like ShareGPT's."""
    from vllm_ext.simulation.workloads.build import build
    from vllm_ext.simulation.workloads.spec import WorkloadSpec

    scale = {"scale_prompt": 0.1, "scale_output": 0.02} if dry else {}
    longest = 64 if dry else _LONGEST
    return build(
        WorkloadSpec(
            source="sharegpt-like",
            arrivals="poisson",
            rate_per_s=rate, duration_s=seconds, seed=seed,
            cap_prompt_tokens=longest, cap_output_tokens=longest, **scale,
        )
    )  # fmt: skip


class Watched:
    """Steps of a window: what the scheduler planned, and how long each call took."""

    def __init__(self, engine: gpu_engine.Engine) -> None:
        self._engine, self._schedule = engine, engine.scheduler.schedule
        engine.scheduler.schedule = self._noted
        self.rows: list[list[tuple[int, int]]] = []
        """Of each step: tokens of each request, and those that it held before."""
        self.seconds: list[float] = []

    def _noted(self, *args: Any) -> Any:
        output, requests = self._schedule(*args), self._engine.scheduler.requests
        planned = output.num_scheduled_tokens.items()  # among those that their requests have computed now
        self.rows.append([(tokens, requests[req_id].num_computed_tokens - tokens) for req_id, tokens in planned])
        return output

    def step(self) -> None:
        """Let the engine take a step."""
        began = self._engine.now()
        self._engine.step()
        self.seconds.append(self._engine.now() - began)

    def close(self) -> None:
        """Look no more."""
        self._engine.scheduler.schedule = self._schedule


def kinds(shapes: Iterable[StepShape], seconds: Sequence[float], cost: Fitted) -> dict[str, dict[str, float]]:
    """Return how many steps there were, their mean size and time, and what the cost model says of them.

    Args:
        shapes: Of steps in their order.
        seconds: Of the calls in which they ended, as many or fewer.
        cost: Fitted to the grid.
    """
    found: dict[str, dict[str, float]] = {}
    steps = [(shape, taken) for shape, taken in zip(shapes, seconds, strict=False) if shape.num_tokens]
    for kind, alone in (("decodes alone", True), ("with prompts", False)):
        chosen = [(shape, taken) for shape, taken in steps if (not shape.num_prefill_tokens) is alone]
        if chosen:
            found[kind] = {
                "steps": len(chosen),
                "mean_s": statistics.fmean(taken for _, taken in chosen),
                "mean_s_by_the_grid": statistics.fmean(cost.device_s(shape) for shape, _ in chosen),
                "mean_requests": statistics.fmean(shape.num_requests for shape, _ in chosen),
                "mean_tokens": statistics.fmean(shape.num_tokens for shape, _ in chosen),
            }
    return found


def served(
    engine: gpu_engine.Engine, requests: Sequence[Any], seconds: float, drain_s: float, cost: Fitted
) -> dict[str, Any]:
    """Serve arrivals as they come, stop after their time, drain, and return what the requests saw, and the steps."""
    began, watched = engine.now(), Watched(engine)
    waiting, ids = list(reversed(requests)), []
    while engine.now() - began < seconds + drain_s and (waiting or engine.is_busy):
        while waiting and waiting[-1].arrival_s <= engine.now() - began:
            one = waiting.pop()
            prompt = engine.prompt(len(ids), one.prompt_tokens)
            ids.append(engine.add(prompt, one.output_tokens, arrival_s=began + one.arrival_s))
        if engine.is_busy:
            watched.step()
        elif waiting:
            time.sleep(max(0.0, min(0.001, waiting[-1].arrival_s - (engine.now() - began))))
    taken = engine.now() - began
    watched.close()
    seen = [engine.seen[req_id] for req_id in ids]
    late = [req_id for req_id, one in zip(ids, seen, strict=True) if not one.ended]
    engine.abort(late)
    return {
        **summary(seen), "requests": len(requests), "unfinished": len(late) + len(waiting), "served_s": taken,
        "steps": kinds(map(StepShape.of_rows, watched.rows), watched.seconds[engine.in_flight :], cost),
    }  # fmt: skip


def summary(seen: Sequence[gpu_engine.Seen]) -> dict[str, float]:
    """Return latencies of requests that ended, in seconds, and their longest gaps between tokens."""
    ended = [one for one in seen if one.ended]
    if not ended:
        return {}
    e2e, ttft = np.array([one.e2e_s for one in ended]), np.array([one.ttft_s for one in ended])
    gaps = np.array([np.diff(one.token_times_s).max() for one in ended if len(one.token_times_s) > 1] or [0.0])
    return {
        "mean_e2e_s": float(e2e.mean()),
        "p99_e2e_s": float(np.quantile(e2e, 0.99)),
        "mean_ttft_s": float(ttft.mean()),
        "p90_ttft_s": float(np.quantile(ttft, 0.9)),
        "p99_longest_gap_s": float(np.quantile(gaps, 0.99)),
    }


class Run:
    """The measurement on one engine; what is there is written after every cell and every window."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from vllm_ext.step_time.profile import hardware_name

        self._args, dry = args, args.dry
        self._ends = time.perf_counter() + args.total_s
        self._budgets = _DRY_BUDGETS if dry else BUDGETS
        self._spec = _DRY_GRID if dry else gpu_grid.GridSpec()
        self.report = on_gpu.Report(args.out, name="token_budget", dry=dry)
        sizes: dict[str, Any] = {} if dry else {"max_model_len": _MAX_MODEL_LEN}
        if not (dry or args.eager):
            sizes["compilation_config"] = None  # vLLM's own
        self._engine = gpu_engine.Engine(
            "stock", _SHAPE, dry=dry, max_num_batched_tokens=max(self._budgets), max_num_seqs=self._spec.seats,
            **sizes, **gpu_grid.FILL,
        )  # fmt: skip
        scheduler = self._scheduler = self._engine.scheduler
        kv_tokens = scheduler.kv_cache_manager.block_pool.num_gpu_blocks * scheduler.block_size
        device = hardware_name("cpu" if dry else torch.cuda.get_device_name())
        self.found = self.report.found
        self.found |= {
            "device": device, "start_s": self._engine.start_s, "cudagraph_mode": self._engine.cudagraph_mode,
            "compilation_mode": self._engine.compilation_mode,
            "kv_tokens": kv_tokens, "block_size": scheduler.block_size, "max_num_seqs": _DRY_SEATS if dry else _SEATS,
            "max_model_len": scheduler.max_model_len, "async_scheduling": bool(self._engine.in_flight),
            "seed": args.seed, "load": LOAD, "window_s": args.window_s, "grid": [], "windows": {},
        }  # fmt: skip

    @property
    def _window_s(self) -> float:
        """Seconds that a window takes, at most."""
        return float(self._args.window_s + self._args.drain_s)

    def grid(self) -> None:
        """Time steps, and fit both models to them.

        Raises:
            ValueError: they are too few for that.
        """
        import vllm

        from vllm_ext.step_time.profile import EngineKey

        engine, found, grid = self._engine, self.found, gpu_grid.Grid(self._engine)
        began = engine.now()
        spare_s = self._ends - began - len(self._budgets) * self._window_s - _FIT_S
        for _ in grid.measure(self._spec):
            found |= {"grid": [asdict(cell) for cell in grid.cells], "grid_dropped": grid.dropped}
            found["grid_s"] = engine.now() - began
            self.report.write()
            if found["grid_s"] > max(_LEAST_GRID_S, min(self._args.grid_s, spare_s)):
                found["grid_cut_off"] = True
                break
        engine.abort_all()
        self._cost = gpu_grid.cost_of(grid.cells, f"{_SHAPE}, {found['device']}, vLLM {vllm.__version__}")
        if (path := self._args.profile) is not None:
            key = EngineKey(_SHAPE, found["device"], "float32" if self._args.dry else "bfloat16", 1)
            gpu_grid.save_profile(grid.cells, key, vllm.__version__, path)
            self._cost.save(path.with_name(COST_FILE))
            found["step_cost"] = json.loads(path.with_name(COST_FILE).read_text())

    def rate(self) -> float:
        """Return the requests per second of the windows."""
        sample = list(workload(50.0, 40.0, self._args.seed, dry=self._args.dry).start())
        prompt, output = (
            float(np.mean([getattr(one, name) for one in sample])) for name in ("prompt_tokens", "output_tokens")
        )
        seats, kv_tokens = self.found["max_num_seqs"], self.found["kv_tokens"]
        most = gpu_grid.saturation_per_s(self._cost, prompt=prompt, output=output, seats=seats, kv_tokens=kv_tokens)
        self.found |= {"mean_prompt_tokens": prompt, "mean_output_tokens": output, "saturation_per_s": most}
        self.found["rate_per_s"] = LOAD * most
        return LOAD * most

    def windows(self, rate: float) -> None:
        """Serve the same arrivals under each budget, as long as there is time for a whole window."""
        args, found = self._args, self.found
        self._scheduler.max_num_active_reqs = found["max_num_seqs"]
        for budget in self._budgets:
            if self._engine.now() + self._window_s > self._ends:
                found.setdefault("windows_left_out", []).append(budget)
                continue
            self._scheduler.max_num_scheduled_tokens = budget
            requests = list(workload(rate, args.window_s, args.seed, dry=args.dry).start())
            found["windows"][str(budget)] = served(self._engine, requests, args.window_s, args.drain_s, self._cost)
            print(budget, found["windows"][str(budget)], file=sys.stderr, flush=True)
            self.report.write()

    def measure(self) -> int:
        """Do all of it, and return the exit status: a cell that was dropped or a window left out is missing."""
        try:
            self.grid()
        except ValueError as error:
            print(f"gpu_budget: error: no model fits the grid: {error}", file=sys.stderr)
            return self.report.end(complete=False)
        self.windows(self.rate())
        return self.report.end(complete=not (self.found["grid_dropped"] or "windows_left_out" in self.found))


def simulated(found: dict[str, Any], cost_file: Path) -> dict[str, Any]:
    """Serve the same arrivals in the simulator, with the steps that were measured; return what each window saw.

    Raises:
        OSError: there is no file of costs.
        ValueError: it is damaged.
    """
    from vllm_ext.simulation.run import simulate
    from vllm_ext.simulation.spec import EngineSpec, SimulationSpec

    cost = Fitted.load(cost_file)
    said: dict[str, Any] = {}
    for budget, window in found["windows"].items():
        engine = EngineSpec(
            system="upstream-fcfs", max_num_seqs=found["max_num_seqs"], max_num_batched_tokens=int(budget),
            max_model_len=found["max_model_len"], block_size=found["block_size"],
            num_blocks=found["kv_tokens"] // found["block_size"], prefix_caching=False,
            async_scheduling=False,  # of a grid whose steps hold the host's time as well
        )  # fmt: skip
        arrivals = workload(found["rate_per_s"], found["window_s"], found["seed"], dry=found["dry"])
        data = simulate(SimulationSpec(engine=engine), workload=arrivals, cost=cost)
        e2e, ttft = data.requests.column("e2e_s"), data.requests.column("ttft_s")
        said[budget] = {
            "mean_e2e_s": float(e2e.mean()),
            "p99_e2e_s": float(np.quantile(e2e, 0.99)),
            "mean_ttft_s": float(ttft.mean()),
            "p90_ttft_s": float(np.quantile(ttft, 0.9)),
        }
        said[budget] |= {
            f"{name}_over_measured": value / window[name] for name, value in said[budget].items() if name in window
        }
    return said


def simulate(args: argparse.Namespace) -> int:
    """Simulate the windows that were measured, and return the exit status."""
    report = on_gpu.Report(args.out, name="token_budget_simulated")
    try:
        found = json.loads(args.simulate.read_text())
        report.found["windows"] = simulated(found, args.simulate.with_name(COST_FILE)) if found.get("windows") else {}
    except (OSError, ValueError) as error:
        print(f"gpu_budget: error: {error}", file=sys.stderr)
        return report.end(complete=False)
    if not report.found["windows"]:
        print(f"gpu_budget: error: --simulate={args.simulate.name}: no window was measured", file=sys.stderr)
    status = report.end(complete=bool(report.found["windows"]))
    print(json.dumps(report.found))
    return status


def main(argv: Sequence[str]) -> int:
    """Measure, or simulate what was measured."""
    parser = on_gpu.argument_parser(__doc__)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="where the fitted runtime model goes")
    parser.add_argument("--simulate", type=Path, metavar="FILE", help="a result; its profile's folder has the costs")
    parser.add_argument("--window-s", type=float, default=30.0, help="seconds of arrivals (default: %(default)s)")
    parser.add_argument("--drain-s", type=float, default=8.0, help="for what is left of them (default: %(default)s)")
    parser.add_argument("--grid-s", type=float, default=45.0, help="for the grid, at most (default: %(default)s)")
    parser.add_argument("--total-s", type=float, default=190.0, help="for all: the grid is cut short, and then windows "
                        "are left out, so that it lasts (default: %(default)s)")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="not compiled, and graphs of decode alone")
    if "--simulate" in argv:
        return simulate(parser.parse_args(argv))
    args, began = on_gpu.parsed(parser, argv), time.perf_counter()
    try:
        run = Run(args)
    except Exception as error:
        if args.dry or args.eager:
            raise
        print(f"gpu_budget: not compiled: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # Anew, since this process may hold a part of the device's memory.
        left = ["--eager", "--total-s", f"{args.total_s - (time.perf_counter() - began):.0f}"]
        os.execv(sys.executable, [sys.executable, __file__, *argv, *left])
    status = run.measure()
    print(json.dumps({name: value for name, value in run.found.items() if name != "grid"}))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
