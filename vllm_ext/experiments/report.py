"""From findings to a result, its table and its place in the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_ext.experiments.experiment import Claim, Experiment, Findings, served
from vllm_ext.report.provenance import measured_at
from vllm_ext.report.results import Goal, Result, Workload, format_table


def result(experiment: Experiment, findings: Findings, *, command: str, seed: int, quick: bool) -> Result:
    """Return the findings in the common format; every claim is in ``config["claims"]``, headlines are goals."""
    fields = ("name", "paper", "ours", "ratio", "better", "reached", "headline", "note")
    name, rows, sha256 = served(findings.workload)
    return Result(
        name=experiment.id,
        command=command,
        config={
            **findings.config,
            "paper": experiment.paper,
            "title": experiment.title,
            "row": experiment.row,
            "differences": list(experiment.differences),
            "claims": [{field: getattr(claim, field) for field in fields} for claim in findings.claims],
            "plots": [plot.suffix for plot in findings.plots],
            "quick": quick,
        },
        details=findings.details,
        seed=seed,
        workload=Workload(name=name, rows=rows, sha256=sha256),
        metrics=findings.metrics,
        baselines=findings.baselines,
        goals=[_goal(claim) for claim in findings.claims if claim.headline],
    )


def tables(experiment: Experiment, findings: Findings) -> list[str]:
    """Return the texts for a terminal: the measurements, the claims, and what is not as in the paper."""
    claims = [
        (c.name, c.paper, c.ours, c.ratio, "yes" if c.reached else f"no: {c.note or 'see the differences'}")
        for c in findings.claims
    ]
    differences = "\n".join(f"- {line}" for line in experiment.differences)
    return [
        f"{experiment.id}: {experiment.title}\n{experiment.paper}; measured as {experiment.row}\n",
        format_table(findings.header, findings.rows),
        "\n" + format_table(("figure", "paper", "ours", "ours/paper", "reached"), claims),
        f"\nnot as in the paper:\n{differences}\n",
    ]


def documentation(files: Sequence[Path], experiments: Iterable[str] = ()) -> str:
    """Return docs/reproductions.md, made from result files.

    Args:
        files: One result each.
        experiments: All reproductions; those without a file are named.

    Raises:
        ValueError: a file is not the result of a reproduction.
    """
    missing = sorted(set(experiments) - {file.stem for file in files})
    parts = [_HEAD, _MISSING.format(", ".join(f"`{experiment}`" for experiment in missing))] if missing else [_HEAD]
    for file in sorted(files):
        raw = json.loads(file.read_text(encoding="utf-8"))
        try:
            parts.append(_section(raw, file.stem))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file.name} is not the result of a reproduction: {error!r}") from error
    return "\n".join(parts)


_HEAD = """# Reproductions

Figures and tables of the papers, measured again on the simulator: the schedulers are the ones that serve, the hardware
is a cost model ([simulator.md](simulator.md)). This page is made from the JSON files in `benchmarks/results/repro` by
`vllm-ext repro --document`; edit neither. Rates belong to the simulated hardware, so what is compared is ratios.
"""

_MISSING = """Without a result that a commit repeats, and so to be measured again (`vllm-ext repro ID`): {}.
"""


def _section(raw: dict[str, Any], stem: str) -> str:
    config = raw["config"]
    lines = [f"## {raw['name']}", "", f"{config['title']}. Source: {config['paper']}.", ""]
    lines += [f"`{raw['command']}`, commit {measured_at(raw)}.", ""]
    lines += [_said_of_row(raw), ""]
    if config["quick"]:
        lines += ["**Measured with `--quick`: shorter traces than those of the full run.**", ""]
    lines += ["| figure | paper | ours | ours / paper | reached |", "|---|---|---|---|---|"]
    for claim in config["claims"]:
        name = f"**{claim['name']}**" if claim["headline"] else claim["name"]
        reached = "yes" if claim["reached"] else f"no: {claim['note'] or 'see below'}"
        lines.append(f"| {name} | {claim['paper']:.4g} | {claim['ours']:.4g} | {claim['ratio']:.2f} | {reached} |")
    lines += ["", "Not as in the paper:", ""]
    lines += [f"- {difference}" for difference in config["differences"]]
    for suffix in config["plots"]:
        lines += ["", f"![{stem}{suffix}](../benchmarks/results/repro/{stem}{suffix}.png)"]
    return "\n".join([*lines, ""])


def _said_of_row(raw: dict[str, Any]) -> str:
    """Return which row of the systems table the section's numbers are of."""
    row = raw["config"].get("row")
    if row is not None:
        return f"The paper's system is the row `{row}`; ours stands beside it under its own name."
    system = raw["name"].rpartition("-")[0]
    return (
        f"The paper's system is our row `{system}` with the changes named below, not `{system}-published`, which this "
        "measurement is older than."
    )


def _goal(claim: Claim) -> Goal:
    return Goal(
        metric=claim.name,
        value=claim.ours,
        op=">=" if claim.better == "higher" else "<=",
        goal=claim.paper,
        note=claim.note or ("" if claim.reached else "see config.differences"),
    )
