"""A real engine whose time is that of its steps on another device.

On a small shared machine the wall clock of an engine is noise. Here vLLM's own engine core, model runner and block
tables serve the requests, and each step takes what a cost model says of its tokens and contexts, whatever it took here.
Requests are added when that clock is at their arrival. Of the API server, its tokenizer and the network there is none.

    python -m vllm_ext.compare.clocked < LINES    a process that serves what each line says; see `main`
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext import envs
from vllm_ext.compare.replay import prompt_of
from vllm_ext.compare.watch import Timeline
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.measure.run_data import Decision
from vllm_ext.simulation.recorded import forced_length
from vllm_ext.simulation.workloads.build import build as workload_of
from vllm_ext.simulation.workloads.requests import SimRequest
from vllm_ext.simulation.workloads.spec import WorkloadSpec


def shape_of(step: Any) -> StepShape:
    """Return what a step of vLLM's scheduler computes."""
    did = Decision.of(step)
    return StepShape.of_rows((n, held) for (_, n), held in zip(did.scheduled, did.num_computed_tokens, strict=True))


class ClockedEngine:
    """vLLM's engine in this process, by a clock of its own."""

    def __init__(
        self, flags: Sequence[str], hardware: HardwareSpec, cost: CostSpec, noise: tuple[float, str] = (0.0, "")
    ) -> None:  # fmt: skip
        """Start it.

        Args:
            flags: What `vllm serve` takes, with ``--model``.
            hardware: On which the steps would run.
            cost: How long they would take there.
            noise: Standard deviation of the logarithm of a step's time, as no device takes the same twice; and a name
                that seeds it.
        """
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", envs.BENCH_FORCED_LENGTH: "1"}
        from vllm.engine.arg_utils import EngineArgs
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        # Those of the API server too, which a user's own command has, and which say nothing to an engine.
        args = make_arg_parser(FlexibleArgumentParser()).parse_args([*flags, "--no-async-scheduling"])
        self._engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
        scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self.clock = VirtualClock()
        if hasattr(scheduler, "clock"):
            self.clock = VirtualClock(scheduler.clock())  # which it may have seen
            scheduler.clock = self.clock
        costs, finish = build(hardware.resolve(), cost), scheduler.update_from_output
        spread, name = noise
        numbers = np.random.default_rng(list(name.encode()))

        def timed(step: Any, output: Any) -> Any:
            if step.num_scheduled_tokens:
                shape = shape_of(step)
                self.clock.advance((costs.device_s(shape) + costs.host_s(shape)) * numbers.lognormal(0.0, spread))
            return finish(step, output)

        scheduler.update_from_output = timed
        self._scheduler, self._preempted, preempt = scheduler, 0, scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._preempted += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    @property
    def max_model_len(self) -> int:
        """Longest context."""
        return int(self._engine.model_config.max_model_len)

    def serve(self, requests: Iterable[SimRequest]) -> dict[str, Any]:
        """Serve requests to their end; return what `replay.observed` reads, by the clock."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, start = self._engine, self.clock()
        timeline, preempted_before = Timeline(), self._preempted
        offered = sorted(requests, key=lambda one: one.arrival_s)
        waiting = offered[::-1]
        times: dict[str, list[float]] = {one.req_id: [] for one in offered}
        tokens = dict.fromkeys(times, 0)
        while waiting or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                self.clock.advance_to(max(self.clock(), start + waiting[-1].arrival_s))
            while waiting and start + waiting[-1].arrival_s <= self.clock():
                one = waiting.pop()
                told = {**(one.extra_args or {}), **forced_length.extra_args(min(one.output_tokens, one.max_tokens))}
                sampling = SamplingParams(
                    temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True, detokenize=False,
                    output_kind=RequestOutputKind.DELTA, extra_args=told,
                )  # fmt: skip
                prompt = prompt_of(one)
                engine.add_request(
                    one.req_id, {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt, sampling,
                    priority=one.priority,
                )  # fmt: skip
            for output in engine.step():
                if count := len(output.outputs[0].token_ids):
                    times[output.request_id].append(self.clock() - start)
                    tokens[output.request_id] += count
            kv_used = self._scheduler.kv_cache_manager.usage
            timeline.add(self.clock() - start, *self._scheduler.get_request_counts(), kv_used)
        timeline.preemptions = self._preempted - preempted_before
        rows = [(one, times[one.req_id]) for one in offered]
        return {
            "ttfts": [each[0] - one.arrival_s if each else 0.0 for one, each in rows],
            "latencies": [each[-1] - one.arrival_s if each else 0.0 for one, each in rows],
            "itls": [[after - before for before, after in itertools.pairwise(each)] for _, each in rows],
            "output_lens": [tokens[one.req_id] for one in offered],
            "input_lens": [one.prompt_tokens for one in offered],
            "queue_times": [0.0] * len(offered),
            "errors": ["" if each else "no token came" for _, each in rows],
            "timeline": timeline.kept(),
        }


def main() -> None:
    """Serve what standard input says, in lines of JSON.

    The first has ``flags``, ``hardware``, ``cost`` and ``noise``; the answer, on standard output, is
    ``{"max_model_len": N}``.
    Each further one has a ``workload`` and the file ``out`` that gets what came of it; the answer is ``{}``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes where its log goes
    first = json.loads(sys.stdin.readline())
    hardware, cost = HardwareSpec.model_validate(first["hardware"]), CostSpec.model_validate(first["cost"])
    engine = ClockedEngine(first["flags"], hardware, cost, tuple(first["noise"]))
    print(json.dumps({"max_model_len": engine.max_model_len}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        found = engine.serve(workload_of(WorkloadSpec.model_validate(asked["workload"])).start())
        Path(asked["out"]).write_text(json.dumps(found), encoding="utf-8")
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
