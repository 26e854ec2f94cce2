"""Pensieve, Figure 3.12: throughput and latency of OPT-13B and Llama 2-13B on one GPU.

Question: how many more turns are served at the same latency if conversations keep their KV in GPU and host memory?
Method: conversations with a minute between turns begin at a Poisson rate; for each system the rate is searched at which
the P90 normalised latency reaches a limit. Stateless serving is the paper's baseline; GPU cache alone, and what vLLM
0.32 can do, are beside it.

    vllm-ext repro pensieve-fig12 --quick
    vllm-ext repro pensieve-fig12 --out benchmarks/results/repro/pensieve-fig12.json
"""

from __future__ import annotations

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import pensieve as base
from vllm_ext.repro.study import Findings, Study

GAINS = {base.Setting(model="opt-13b"): 1.25, base.Setting(model="llama-2-13b-gqa10"): 1.52}
"""The paper's, over stateless serving."""


def run(bench: Bench) -> Findings:
    """Measure both models."""
    return base.throughput(bench, GAINS, base.QUICK if bench.quick else base.ALL)


STUDY = Study(
    id="pensieve-fig12",
    paper=f"{base.PAPER}, Figure 3.12",
    title="Throughput at equal P90 normalised latency, 13B models on one GPU",
    row="pensieve-published",
    differences=base.DIFFERENCES,
    run=run,
)
