"""What `vllm-ext compare` says of objectives, of little memory, of conversations and of preempted KV.

Question: with the real engine, who meets more objectives, who preempts less, and what is the KV of past turns worth?

Method: each comparison is a command line of `vllm-ext compare` (docs/comparing.md): the same requests for all servers,
the baseline twice, intervals from a paired bootstrap. *objectives* and *memory* go by the engine's clock: vLLM's
engine, its block tables and our plugin serve a tiny model on the CPU, and a step takes what the cost model says of
OPT-13B on an A100 with 40 GB, with as many KV blocks as fit there. So do *conversations*, where copies of KV take no
time by that clock: what is found is as it is, and latencies show the most that it can bring. *swapping* (what becomes
of KV that is preempted; ALISE, figure 8) goes by the wall clock, with `vllm serve` on this machine, because there
copies cost what they cost: run it where nobody else computes. What is printed is what `vllm-ext compare` prints, and
beside it which goals were met.

    python benchmarks/engine/comparisons.py memory --quick
    python benchmarks/engine/comparisons.py objectives --out benchmarks/results/compare_objectives.json
    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/comparisons.py swapping
"""

from __future__ import annotations

import json
import math
import operator
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_ext.cli import compare
from vllm_ext.compare.duel import HARDWARE
from vllm_ext.compare.observed import MEAN, ON_TIME, P99
from vllm_ext.compare.shown import Shown
from vllm_ext.report.claim import Claim
from vllm_ext.report.results import Result, argument_parser, command, emit
from vllm_ext.tiny_model import build

BASE = compare.UPSTREAM
GAPS, PREEMPTIONS, CACHED = "P99 longest gap", "preemptions", "cached"
BLOCK = 32
BLOCKS = HARDWARE.resolve().num_kv_blocks(BLOCK, max_num_batched_tokens=2048, max_num_seqs=256)
_ENGINE = f"--dtype float32 --enforce-eager --block-size {BLOCK} --kv-cache-memory-bytes 1073741824"
TIER_GIB = round(2 * BLOCKS * BLOCK * 2048 / 2**30, 3)
"""Host memory for twice as many tokens as the device has, of the tiny model's KV: 2 KiB a token."""
_CLOCK = ("--clock", "engine", "--model-costs", HARDWARE.model, "--device", HARDWARE.device)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A server's measure over another's, or less it, where the first is judged at the highest load."""

    server: str
    measure: str
    other: str = BASE
    op: str
    goal: float
    less: bool = False
    """Whether the difference is judged, not the ratio."""

    def judged(self, values: Mapping[str, Mapping[str, float]], load: float) -> Claim | None:
        """Return it with what was measured; None where one of the two was not."""
        ours, theirs = (values.get(name, {}).get(f"load_{load:g}.{self.measure}") for name in (self.server, self.other))
        if ours is None or theirs is None or (not theirs and not self.less):
            return None
        of = operator.sub if self.less else operator.truediv
        name = f"{self.server}: {self.measure} {'less' if self.less else 'over'} that of {self.other}"
        facts = f"{ours:.4g} and {theirs:.4g}"
        return Claim(name=name, value=of(ours, theirs), op=self.op, goal=self.goal, facts=facts)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A command line of `vllm-ext compare`, and what is expected of it."""

    servers: Mapping[str, str]
    """Flags of each, behind the baseline's, which has none of its own."""
    engine: str
    """Flags of all."""
    workload: Mapping[str, Any]
    given: Sequence[str]
    """Other flags."""
    columns: Mapping[str, str]
    """Measure -> its header, of the table that pages show."""
    ratio: str = MEAN
    """Measure of which the table says how many times better it is than the baseline's."""
    goals: Sequence[Goal] = ()
    quick: Sequence[str] = ("--requests", "20")
    tuned: bool = True
    """Whether the best of vLLM's own flags are a row."""

    def argv(self, model: str, *, quick: bool) -> list[str]:
        """Return the command line without the program's name."""
        systems = BASE if quick or not self.tuned else f"{BASE},{compare.TUNED}"
        chosen = dict([*self.servers.items()][:1] if quick else self.servers)
        own = [word for name, flags in chosen.items() for word in ("--server", f"{name}={flags}")]
        fields = [word for name, value in self.workload.items()
                  for word in ("--set", f"workload.{name}={json.dumps(value)}")]  # fmt: skip
        return [model, "--systems", systems, *own, *self.given, *(self.quick if quick else ()), *fields,
                "--", *shlex.split(f"{_ENGINE} {self.engine}")]  # fmt: skip

    def table(self, shown: Shown, values: Mapping[str, Mapping[str, float]]) -> list[list[Any]]:
        """Return header and rows."""
        better = {(one.server, one.load): one.ratio for one in shown.verdicts if one.measure == self.ratio}
        header = ["load", "", *self.columns.values(), f"{self.ratio}, times better (95 % interval)"]
        return [header] + [
            [f"{load:g}", row.name, *(f"{values[row.name].get(f'load_{load:g}.{name}', math.nan):.3g}"
                                     for name in self.columns), str(better.get((row.name, load), "-"))]
            for load in shown.asked.loads for row in shown.asked.rows if row.name in values
        ]  # fmt: skip


def _systems(*names: str) -> dict[str, str]:
    return {name: f"--scheduler-cls {name}" for name in names}


def _options(**sections: Any) -> str:
    return f"--additional-config {shlex.quote(json.dumps({'vllm_ext': sections}))}"


def model_flags(*, layers: int, kv_heads: int) -> str:
    """Return flags of a model with random weights whose prompts take time, so that KV is worth something."""
    fields = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 8,
              "num_key_value_heads": kv_heads, "head_dim": 64, "max_position_embeddings": 2048}  # fmt: skip
    return f"--load-format dummy --hf-overrides {shlex.quote(json.dumps(fields))}"


_PUBLISHED = "--scheduler-cls alise-published --ext-attention-kernel own"
"""The paper's order, which preempts; with our kernel, which alone reads records on the device."""


def _part(source: str, weight: float, tier: str, prompt: float, output: float) -> dict[str, Any]:
    return {"source": source, "weight": weight, "tier": tier, "scale_prompt": prompt, "scale_output": output}


def _tier(name: str, priority: int, ttft_s: float, tbt_s: float) -> dict[str, Any]:
    spread = {"low": 0.75, "high": 1.25}
    return {"name": name, "priority": priority, "ttft": {"base_s": ttft_s, **spread},
            "tbt": {"base_s": tbt_s, **spread}}  # fmt: skip


COMPARISONS: Mapping[str, Comparison] = {
    "objectives": Comparison(
        servers={
            **_systems("accelgen", "sarathi", "alise", "auto"),
            "vLLM, 256 tokens": "--max-num-batched-tokens 256",
            "vLLM, priorities": "--scheduling-policy priority",
        },
        engine=f"--max-model-len 2048 --max-num-batched-tokens 2048 --num-gpu-blocks-override {BLOCKS}",
        workload={
            # Multiples of what an idle server takes for the prompt, and of its decode step of some 25 ms: 5, 10 and 25
            # (Sarathi-Serve, section 5.1, takes 5 for strict objectives and 25 for relaxed ones).
            "mix": [
                _part("alpaca-like", 0.4, "assistant", 1.0, 1.0),
                _part("sharegpt-vllm", 0.35, "chat", 1.0, 0.3),
                _part("arxiv-summarization", 0.25, "document", 0.12, 0.25),
            ],
            "tiers": [_tier("assistant", 0, 0.5, 0.125), _tier("chat", 2, 2.0, 0.25), _tier("document", 1, 2.5, 0.625)],
            "announce_slo": True,
        },
        given=(*_CLOCK, "--loads", "0.9,1.2", "--requests", "300", "--budget-minutes", "90", "--precision", "0.1"),
        columns={
            ON_TIME: "share on time",
            "goodput": "on time per second",
            GAPS: "P99 of longest gaps, s",
            MEAN: "mean e2e, s",
            P99: "P99 e2e, s",
            PREEMPTIONS: "preemptions",
        },
        ratio=ON_TIME,
        goals=(
            Goal(server="accelgen", measure=ON_TIME, op=">=", goal=0.3, less=True),
            Goal(server="accelgen", measure=ON_TIME, other=compare.TUNED, op=">", goal=0.0, less=True),
            Goal(server="auto", measure=ON_TIME, other="accelgen", op=">=", goal=-0.02, less=True),
            Goal(server="sarathi", measure=GAPS, op="<", goal=1.0),
        ),
    ),
    "memory": Comparison(
        servers={
            **_systems("past-future", "alise", "auto"),
            "vLLM, watermark 5 %": "--watermark 0.05",
        },
        engine=f"--max-model-len 1024 --max-num-seqs 96 --num-gpu-blocks-override {BLOCKS}",
        # Past-Future's table 1 with an eighth of the lengths: prompts of 4 to 512 tokens, outputs of 256 to 512.
        workload={"source": "distribution-1", "scale_prompt": 0.125, "scale_output": 0.125},
        given=(*_CLOCK, "--loads", "2", "--requests", "200", "--budget-minutes", "60", "--precision", "0.1"),
        columns={PREEMPTIONS: "preemptions", MEAN: "mean e2e, s", P99: "P99 e2e, s", "mean TTFT": "mean TTFT, s"},
        goals=(
            Goal(server="past-future", measure=PREEMPTIONS, other="vLLM, watermark 5 %", op="<=", goal=0.2),
            Goal(server="past-future", measure=MEAN, other="vLLM, watermark 5 %", op="<=", goal=1.0),
        ),
        tuned=False,
    ),
    "conversations": Comparison(
        servers={
            "LRU, early": f"--scheduler-cls fcfs --kv-tier-gib {TIER_GIB} "
            + _options(kv_tier={"policy": "lru", "store": "early"}),
            "pensieve": f"--scheduler-cls pensieve --kv-tier-gib {TIER_GIB}",
            # Half the bytes: records of 8 bits take half of what KV in bf16 takes, and a quarter of that in fp32.
            "pensieve, 8 bits": f"--scheduler-cls pensieve --kv-tier-gib {TIER_GIB / 2} --kv-tier-bits 8",
        },
        engine=f"--max-model-len 2048 --max-num-batched-tokens 2048 --num-gpu-blocks-override {BLOCKS}",
        workload={"source": "pensieve-sharegpt", "min_turns": 3, "max_turns": 10, "think_s": 20.0},
        given=(*_CLOCK, "--loads", "0.8", "--requests", "40", "--budget-minutes", "60", "--precision", "0.1"),
        columns={CACHED: "share of prompts in cache", MEAN: "mean e2e, s", P99: "P99 e2e, s",
                 "mean TTFT": "mean TTFT, s", "P90 TTFT": "P90 TTFT, s"},
        goals=(
            Goal(server="pensieve", measure=CACHED, op=">=", goal=0.1, less=True),
            Goal(server="pensieve", measure=CACHED, other="LRU, early", op=">", goal=0.0, less=True),
            Goal(server="pensieve, 8 bits", measure=CACHED, other="pensieve", op=">=", goal=0.0, less=True),
            Goal(server="pensieve", measure=MEAN, op="<=", goal=1.0),
        ),
        tuned=False,
    ),
    "swapping": Comparison(
        servers={
            "Recompute": f"{_PUBLISHED} {_options(residency={'choose': 'recompute'})}",
            "Defer": f"{_PUBLISHED} {_options(admission={'preempt': False})}",
            "swap, 8 bits": f"{_PUBLISHED} "
            + _options(residency={"choose": "swap"}, kv_tier={"gib": 1.0, "bits": 8, "store": "ahead"}),
            "records, a fifth": f"{_PUBLISHED} {_options(kv_tier={'gib': 0.0, 'device_int8_share': 0.2})}",
        },
        engine=f"{model_flags(layers=4, kv_heads=8)} --max-model-len 1024 --max-num-seqs 48 "
        "--num-gpu-blocks-override 97",
        workload={"source": "sharegpt-like", "max_tokens": 512},
        given=("--loads", "1.5", "--requests", "120", "--budget-minutes", "40"),
        columns={"mean normalised": "s per output token", MEAN: "mean e2e, s", P99: "P99 e2e, s",
                 "mean TTFT": "mean TTFT, s", PREEMPTIONS: "preemptions"},
        ratio="mean normalised",
        goals=(
            Goal(server="swap, 8 bits", measure="mean normalised", other="Recompute", op="<=", goal=1.0),
            Goal(server="swap, 8 bits", measure="mean normalised", other="Defer", op="<=", goal=1.0),
            Goal(server="records, a fifth", measure="mean normalised", other="Recompute", op="<=", goal=1.0),
            Goal(server="records, a fifth", measure="mean normalised", other="swap, 8 bits", op="<=", goal=1.0),
        ),
        tuned=False,
    ),
}  # fmt: skip


def by_server(shown: Shown, made: Result) -> dict[str, Mapping[str, float]]:
    """Return what was measured of each server, of which a result keeps one's apart from the baselines'."""
    return {shown.asked.others[0].name: made.metrics, **made.baselines}


def main(argv: Sequence[str]) -> int:
    """Compare, judge the goals, print and write; the exit status is that of `vllm-ext compare`."""
    parser = argument_parser(__doc__)
    parser.add_argument("comparison", choices=sorted(COMPARISONS), help="which (default: %(default)s)",
                        nargs="?", default="memory")  # fmt: skip
    parser.add_argument("--cells", metavar="DIR", help="where runs are kept (default: that of vllm-ext compare)")
    args = parser.parse_args(argv)
    chosen = COMPARISONS[args.comparison]
    given = chosen.argv(str(build()), quick=args.quick)
    at = given.index("--")
    given[at:at] = ["--seed", str(args.seed), *(["--cells", args.cells] if args.cells else [])]

    def told(shown: Shown, made: Result) -> None:
        load = max(shown.asked.loads)
        values = by_server(shown, made)
        made = replace(made, name="comparisons", command=command(argv, __file__),
                       config={"compare": made.command, **made.config,
                               "tables": {args.comparison: chosen.table(shown, values)}},
                       claims=[one for goal in chosen.goals if (one := goal.judged(values, load))])  # fmt: skip
        emit(made, [shown.table(), *filter(None, [shown.by_class()]), "", *shown.words()], args.out)

    return compare.run(given, told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
