"""Pensieve, Figure 3.13: throughput and latency of OPT-66B and Llama 2-70B on four GPUs.

Question: what becomes of the gain where models grow faster than their KV?
Method: that of Figure 3.12.

    vllm-ext repro pensieve-fig13 --quick
    vllm-ext repro pensieve-fig13 --out benchmarks/results/repro/pensieve-fig13.json
"""

from __future__ import annotations

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import pensieve as base
from vllm_ext.repro.study import Findings, Study

GAINS = {base.Setting(model="opt-66b"): 1.5, base.Setting(model="llama-2-70b"): 1.6}
"""The paper's, over stateless serving."""


def run(bench: Bench) -> Findings:
    """Measure both models."""
    return base.throughput(bench, GAINS, base.QUICK if bench.quick else base.MAIN)


STUDY = Study(
    id="pensieve-fig13",
    paper=f"{base.PAPER}, Figure 3.13",
    title="Throughput at equal P90 normalised latency, large models on four GPUs",
    row="pensieve-published",
    differences=base.DIFFERENCES,
    run=run,
)
