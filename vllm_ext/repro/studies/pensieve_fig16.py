"""Pensieve, Figure 3.16: users who take 30, 60 or 120 seconds to answer, Llama 2-13B.

Question: what becomes of the gain where KV has to wait for longer?
Method: that of Figure 3.12. The paper states its gain for 60 seconds (Figure 3.12), and for 120.

    vllm-ext repro pensieve-fig16 --quick
    vllm-ext repro pensieve-fig16 --out benchmarks/results/repro/pensieve-fig16.json
"""

from __future__ import annotations

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import pensieve as base
from vllm_ext.repro.study import Findings, Study

MODEL = "llama-2-13b-gqa10"
GAINS = {
    base.Setting(model=MODEL, think_s=30.0): None,
    base.Setting(model=MODEL): 1.52,
    base.Setting(model=MODEL, think_s=120.0): 1.4,
}
"""The paper's, over stateless serving, by the mean time from an answer to the next turn."""
SHOWN = (base.VLLM_2023, base.STATELESS, base.LRU, base.PENSIEVE, base.OURS)


def run(bench: Bench) -> Findings:
    """Measure each reaction time."""
    return base.throughput(bench, GAINS, SHOWN)


STUDY = Study(
    id="pensieve-fig16",
    paper=f"{base.PAPER}, Figure 3.16",
    title="Throughput at equal P90 normalised latency by the users' reaction time",
    row="pensieve-published",
    differences=base.DIFFERENCES,
    run=run,
)
