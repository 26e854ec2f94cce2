"""From findings to a result, its table and its place in the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_ext.experiments.experiment import Experiment, Findings, served
from vllm_ext.experiments.merge import REAL_LENGTHS
from vllm_ext.report.claim import Claim, PaperClaim
from vllm_ext.report.page import Chart, Page, Section, Verdict, facts_of
from vllm_ext.report.provenance import measured_at
from vllm_ext.report.results import Result, Workload
from vllm_ext.report.table import Table


def result(experiment: Experiment, findings: Findings, *, command: str, seed: int, quick: bool) -> Result:
    """Return the findings in the common format."""
    name, rows, sha256 = served(findings.workload)
    published = {
        "paper": experiment.paper,
        "row": experiment.row,
        "differences": list(experiment.differences),
        "tables": {title: table.cells() for title, table in _titled(findings.tables)},
    }
    return Result(
        name=experiment.id,
        command=command,
        config={
            **findings.config,
            **(published if experiment.paper else {}),
            "title": experiment.title,
            "plots": [plot.suffix for plot in findings.plots],
            "quick": quick,
        },
        details=findings.details,
        seed=seed,
        workload=Workload(name=name, rows=rows, sha256=sha256),
        metrics=findings.metrics,
        baselines=findings.baselines,
        claims=[_explained(one) for one in findings.claims],
    )


def _titled(tables: Sequence[Table]) -> Iterator[tuple[str, Table]]:
    """Yield tables with what they are called: their titles, or their numbers."""
    for at, table in enumerate(tables, start=1):
        yield table.title or f"Table {at}", replace(table, title="")


def _explained(claim: Claim) -> Claim:
    """Return a claim of which something is said where it missed: a goal of our own is explained by what is shown."""
    said = isinstance(claim, PaperClaim) or claim.met or claim.note
    return claim if said else replace(claim, why="see the tables")


def tables(experiment: Experiment, findings: Findings) -> list[object]:
    """Return what is shown on a terminal: the measurements, the claims, and what is not as in the paper."""
    measured = [*findings.tables, *_of_files(findings)]
    if not experiment.paper:
        return measured
    return [
        f"{experiment.id}: {experiment.title}\n{experiment.paper}; measured as {experiment.row}\n",
        *measured,
        "",
        _compared(findings.claims) or _NO_VERDICT,
        "\n".join(["\nnot as in the paper:", *(f"- {line}" for line in experiment.differences), ""]),
    ]


def _of_files(findings: Findings) -> list[str]:
    """Return a line on the files of ``--data``; none without it."""
    files = findings.config.get(REAL_LENGTHS)
    if files is None:
        return []
    served = f"real lengths are those of {', '.join(files)}"
    return ["\n" + (served if files else "no real lengths: this figure serves no data set of the folder of --data")]


def page(experiment: Experiment, findings: Findings, made: Result) -> Page:
    """Return what `tables` has and the figures, as a page."""
    verdicts = [Verdict(text=str(one), kind="met" if one.met else "missed") for one in made.claims]
    charts = [
        Chart(caption=f"{experiment.id}{plot.suffix}", draw=plot.draw,
              alt=f"{experiment.title}: figure {experiment.id}{plot.suffix}, of the values in the tables below")
        for plot in findings.plots
    ]  # fmt: skip
    sections = [Section(title="Figures", charts=charts)] if charts else []
    sections += [Section(title=title, table=table) for title, table in _titled(findings.tables)]
    sections += [Section(title="Files", text=line.strip()) for line in _of_files(findings)]
    if experiment.paper:
        compared = _compared(made.claims)
        beside = Section(title=f"Beside {experiment.paper}", table=compared, text="" if compared else _NO_VERDICT)
        sections.insert(0, beside)
        sections.append(Section(title="Not as in the paper", text="\n".join(experiment.differences)))
    return Page(
        title=f"{experiment.id}: {experiment.title}", verdicts=verdicts, sections=sections, command=made.command,
        facts=facts_of(made),
    )  # fmt: skip


_NO_VERDICT = "no verdict: the traces of --quick are too short to be held against the paper"
_HEADER = ("figure", "paper", "here", "verdict", "reason", "ours", "ours over tuned vLLM")


def _compared(claims: Sequence[Claim]) -> Table | None:
    """Return the paper's figures beside ours; None where there is nothing to compare."""
    rows = [_row(claim) for claim in claims if isinstance(claim, PaperClaim)]
    return Table(_HEADER, rows) if rows else None


def _row(claim: PaperClaim) -> tuple[object, ...]:
    reason = f"{claim.reason.text} ({claim.reason.shown_by})" if claim.reason else ""
    return claim.name, claim.paper, claim.measured, claim.verdict, reason, claim.ours, claim.tuned


def of_paper(kept: Sequence[Mapping[str, Any]]) -> list[PaperClaim]:
    """Return the paper's figures among the claims that a result keeps; all, of one from before there were verdicts."""
    judged = [one for one in kept if "verdict" in one] or kept
    return [PaperClaim.kept(one) for one in judged]


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
        try:
            parts.append(_section(json.loads(file.read_text(encoding="utf-8")), file.stem))
        except (KeyError, TypeError, ValueError) as error:
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
        raise ValueError(_NO_VERDICT)
    claims = of_paper(raw["claims"])
    rows = [(f"**{claim.name}**" if claim.headline else claim.name, *_row(claim)[1:]) for claim in claims]
    lines.append(Table(_HEADER, rows).markdown().rstrip())
    for title, (header, *cells) in config.get("tables", {}).items():
        lines += ["", f"**{title}**", "", Table(header, cells).markdown().rstrip()]
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
