"""Pensieve, Figure 3.18: prompts and decodes in one step, or in steps of their own, Llama 2-13B.

Question: what is unified batching worth to a server that computes only a few tokens of most prompts?
Method: that of Figure 3.12, for Pensieve as it is, and with the schedule of vLLM 0.2 instead, which has prompts go
first, in steps without decodes. The paper shows the difference and states no number.

    vllm-ext repro pensieve-fig18 --quick
    vllm-ext repro pensieve-fig18 --out benchmarks/results/repro/pensieve-fig18.json
"""

from __future__ import annotations

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import pensieve as base
from vllm_ext.repro.study import Claim, Findings, Study

SETTING = base.Setting(model="llama-2-13b-gqa10")
SEPARATE = base.Contender(name="Pensieve, separate steps", system=f"vllm-2023+{base.ROW}", tier={}, start=1.2)
SHOWN = (base.VLLM_2023, base.STATELESS, SEPARATE, base.PENSIEVE)


def run(bench: Bench) -> Findings:
    """Measure both schedules."""
    return base.throughput(bench, {SETTING: None}, SHOWN, also=_claims)


def _claims(measured: base.Measured) -> list[Claim]:
    low = {load: measured.low[load, SEPARATE.name] / measured.low[load, base.PENSIEVE.name] for load in base.LOW_LOADS}
    return [
        Claim(
            name="throughput at equal P90 normalised latency, unified / separate steps (no number in the paper)",
            paper=1.0,
            ours=measured.ratio(base.PENSIEVE, SEPARATE),
            headline=True,
            note="P90 of separate steps over that of unified ones at fractions of the stateless rate: "
            + ", ".join(f"{load:g}: {ratio:.2f}" for load, ratio in low.items()),
        )
    ]


STUDY = Study(
    id="pensieve-fig18",
    paper=f"{base.PAPER}, Figure 3.18",
    title="Unified batches against separate steps of prompts and decodes",
    row="pensieve-published",
    differences=base.DIFFERENCES,
    run=run,
)
