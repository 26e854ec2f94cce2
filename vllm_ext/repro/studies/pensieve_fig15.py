"""Pensieve, Figure 3.15: conversations with at least five turns.

Question: what becomes of the gain where more is said twice?
Method: that of Figure 3.12, without the conversations that have fewer turns.

    vllm-ext repro pensieve-fig15 --quick
    vllm-ext repro pensieve-fig15 --out benchmarks/results/repro/pensieve-fig15.json
"""

from __future__ import annotations

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import pensieve as base
from vllm_ext.repro.study import Findings, Study

GAINS = {
    base.Setting(model="opt-13b", min_turns=5): 1.3,
    base.Setting(model="llama-2-13b-gqa10", min_turns=5): 1.7,
}
"""The paper's, over stateless serving."""


def run(bench: Bench) -> Findings:
    """Measure both models."""
    return base.throughput(bench, GAINS, base.QUICK if bench.quick else base.MAIN)


STUDY = Study(
    id="pensieve-fig15",
    paper=f"{base.PAPER}, Figure 3.15",
    title="Throughput at equal P90 normalised latency, conversations of five turns or more",
    row="pensieve-published",
    differences=base.DIFFERENCES,
    run=run,
)
