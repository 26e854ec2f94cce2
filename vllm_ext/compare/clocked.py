"""A real engine whose time is that of its steps on another device.

On a small shared machine the wall clock of an engine is noise. Here vLLM's own engine core, model runner and block
tables serve the requests, and each step takes what a cost model says of its tokens and contexts, whatever it took here.
Requests are added when that clock is at their arrival. Of the API server, its tokenizer and the network there is none.

    python -m vllm_ext.compare.clocked < LINES    a process that serves what each line says; see `main`
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext import envs
from vllm_ext.compare.replay import answered, cache_salt, prompt_of, sampling
from vllm_ext.compare.watch import Timeline
from vllm_ext.report.scraped import Snapshot
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.simulation.engine.events import VirtualClock
from vllm_ext.simulation.measure.run_data import Decision
from vllm_ext.simulation.workloads.build import build as workload_of
from vllm_ext.simulation.workloads.requests import Workload
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
        self._scheduler, self._runs = scheduler, 0

    @property
    def max_model_len(self) -> int:
        """Longest context."""
        return int(self._engine.model_config.max_model_len)

    def serve(self, workload: Workload) -> dict[str, Any]:
        """Serve a workload to its end; return what `replay.observed` reads, by the clock."""
        engine, start, timeline, before = self._engine, self.clock(), Timeline(), _counters()
        self._runs += 1
        number = itertools.count()
        waiting = [(one.arrival_s, next(number), one) for one in workload.start()]
        heapq.heapify(waiting)
        sent = {}
        times: dict[str, list[float]] = {}
        tokens: dict[str, list[int]] = {}
        while waiting or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                self.clock.advance_to(max(self.clock(), start + waiting[0][0]))
            while waiting and start + waiting[0][0] <= self.clock():
                *_, one = heapq.heappop(waiting)
                sent[one.req_id], times[one.req_id], tokens[one.req_id] = one, [], []
                prompt, salt = prompt_of(one), cache_salt(f"run {self._runs}", one)
                asked = {"prompt_token_ids": prompt} if isinstance(prompt, list) else {"prompt": prompt}
                engine.add_request(one.req_id, {**asked, "cache_salt": salt}, sampling(one), priority=one.priority)
            for output in engine.step():
                (got,) = output.outputs
                if got.token_ids:
                    times[output.request_id].append(self.clock() - start)
                    tokens[output.request_id] += got.token_ids
                if output.finished:
                    one = sent[output.request_id]
                    for after in workload.after(one, self.clock() - start, answered(tokens[one.req_id])):
                        heapq.heappush(waiting, (after.arrival_s, next(number), after))
            kv_used = self._scheduler.kv_cache_manager.usage
            timeline.add(self.clock() - start, *self._scheduler.get_request_counts(), kv_used)
        timeline.count(before, _counters())
        rows = [(one, times[one.req_id]) for one in sent.values()]
        return {
            "req_ids": [*sent],
            "arrivals": [one.arrival_s for one, _ in rows],
            "ttfts": [each[0] - one.arrival_s if each else 0.0 for one, each in rows],
            "latencies": [each[-1] - one.arrival_s if each else 0.0 for one, each in rows],
            "itls": [[after - before for before, after in itertools.pairwise(each)] for _, each in rows],
            "output_lens": [len(each) for each in tokens.values()],
            "input_lens": [one.prompt_tokens for one, _ in rows],
            "queue_times": [0.0] * len(rows),
            "errors": ["" if each else "no token came" for _, each in rows],
            "timeline": timeline.kept(),
        }


def _counters() -> Snapshot:
    """Return what vLLM's own metrics of this process say."""
    from prometheus_client import generate_latest

    return Snapshot.parsed(generate_latest().decode(), 0.0)


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
        found = engine.serve(workload_of(WorkloadSpec.model_validate(asked["workload"])))
        Path(asked["out"]).write_text(json.dumps(found), encoding="utf-8")
        print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
