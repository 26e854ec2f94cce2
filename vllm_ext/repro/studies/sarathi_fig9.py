"""Sarathi-Serve, Figure 9: capacity of Mistral-7B (one A100) and Yi-34B (two), under strict and relaxed objectives.

Question: how many requests per second can a replica take before the 99th percentile of the time between tokens leaves
its objective, or requests queue?
Method: capacity is the highest Poisson rate whose P99 TBT meets the objective of the paper's Table 3 with a median
scheduling delay below 2 s, bisected to 5 %. ``sarathi`` fits its budget to every step and is told the objective only;
``sarathi-published`` has the paper's budgets (512 and 2048 tokens).

    vllm-ext repro sarathi-fig9 --quick
    vllm-ext repro sarathi-fig9 --jobs 2 --out benchmarks/results/repro/sarathi-fig9.json
"""

from __future__ import annotations

from vllm_ext.repro.bench import Bench
from vllm_ext.repro.studies import sarathi as base
from vllm_ext.repro.studies.sarathi_capacity import Published, measure
from vllm_ext.repro.study import Findings, Study

MISTRAL, YI = base.MISTRAL.model, base.YI.model
PUBLISHED = (
    Published(paper=2.6, model=MISTRAL, over=base.VLLM_2023, headline=True, where="abstract"),
    Published(paper=3.7, model=YI, over=base.VLLM_2023, headline=True, where="abstract of the published version"),
    Published(paper=2.8, model=YI, over=base.VLLM_2023, where="section 1"),
    Published(
        paper=2.7, model=YI, over=base.VLLM_2023, dataset="openchat_sharegpt4", slos=("relaxed",), where="section 5.1"
    ),
    Published(
        paper=3.2, model=MISTRAL, over=base.ORCA, dataset="openchat_sharegpt4", slos=("strict",), where="section 5.1"
    ),
    *(
        Published(paper=1.0, model=model, over=over, lowest=True, where="section 5.1: better in all cases")
        for model in (MISTRAL, YI)
        for over in (base.VLLM_2023, base.ORCA)
    ),
)


def run(bench: Bench) -> Findings:
    """Measure the figure; ``--quick``: Mistral-7B on arxiv_summarization only."""
    return measure(bench, (base.YI, base.MISTRAL), PUBLISHED, requests=512)


STUDY = Study(
    id="sarathi-fig9",
    paper=f"{base.PAPER}, Figure 9",
    title="Capacity under strict and relaxed P99-TBT objectives, Mistral-7B and Yi-34B",
    row="sarathi-published",
    differences=base.DIFFERENCES,
    run=run,
)
