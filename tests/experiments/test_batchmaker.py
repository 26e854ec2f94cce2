"""BatchMaker's experiments: data, curves, and one figure on little data."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vllm_ext.experiments.batching import curves, workloads
from vllm_ext.experiments.batching.curves import Point, peak, reductions
from vllm_ext.experiments.batching.merging import merge_cells, merge_operators
from vllm_ext.experiments.data import Files, files_of
from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.papers import batchmaker, batchmaker_cell, batchmaker_trees
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore


def test_made_up_sentences_have_the_lengths_that_the_paper_states() -> None:
    lengths = np.array(workloads.pairs(20_000, 0).rows)[:, 0]
    assert lengths.mean() == pytest.approx(24, rel=0.03)
    assert np.percentile(lengths, 99) == pytest.approx(100, rel=0.1)
    assert 1 <= lengths.min() < lengths.max() <= 330
    assert workloads.pairs(50, 1).rows == workloads.pairs(50, 1).rows != workloads.pairs(50, 2).rows


def test_public_formats_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "pairs.tsv.gz", "wt") as file:
        file.write("en\tde\nIt is so .\tEs ist so .\na\tein b\n")
    assert workloads.read_pairs(tmp_path / "pairs.tsv.gz").rows == [[4, 4], [1, 2]]
    (tmp_path / "trees.txt").write_text("(3 (2 It) (4 (2 is) (3 it)))\n(1 no)\n")
    assert workloads.read_trees(tmp_path / "trees.txt").rows == [[0, [1, 2]], 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [("en\tde\nonly one\n", "x, line 2: 1 fields"), ("en\tde\n", "x: holds nothing")],
)
def test_bad_pairs_are_named_by_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(workloads.DataError, match=said):
        workloads.read_pairs(tmp_path / "x")


@pytest.mark.parametrize("line", ["(2 a) (2 b)", "(2 (2 a) (2 b) (2 c))", "(2 (2 a)", "(2 a))", "()"])
def test_bad_trees_are_named_by_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(f"(2 a)\n{line}\n")
    with pytest.raises(workloads.DataError, match="x, line 2"):
        workloads.read_trees(tmp_path / "x")


def test_sentences_are_cut_where_padded_batching_has_the_papers_peak(tmp_path: Path) -> None:
    served = batchmaker.sentences(_bench(tmp_path))[0].arrivals(1.0, 2_000, 0)
    lengths = [int(one.graph.times[0]) for one in served]
    assert 100 < max(lengths) <= batchmaker.LONGEST
    assert np.percentile(lengths, 99) < 110


def point(load: float, p90_ms: float) -> Point:
    return Point(load_per_s=load, served_per_s=load * 0.9, p50_ms=1.0, p90_ms=p90_ms, p99_ms=p90_ms)


def test_peak_is_of_sustained_loads_and_savings_are_of_loads_below_its_half() -> None:
    theirs = [point(10, 100), point(40, 200), point(100, 400), point(200, 900)]
    ours = [point(10, 50), point(40, 20), point(100, 20), point(200, 30)]
    assert peak(theirs) == 90
    assert reductions(ours, theirs) == pytest.approx([0.5, 0.9])
    assert peak(theirs[3:]) == 0


def test_merging_groups_by_depth_and_kind(tmp_path: Path) -> None:
    requests, _ = batchmaker_trees.tree_requests(_bench(tmp_path), fixed=True)
    graph = requests.arrivals(1.0, 1, 0)[0].graph
    assert [len(nodes) for nodes in merge_cells([graph, graph]).values()] == [32, 16, 8, 4, 2]
    assert len(merge_operators([graph, graph], operators=3)) == 31 * 3


def _bench(folder: Path, files: Files | None = None) -> Runner:
    store = PointStore(folder / "store").__enter__()
    return Runner(quick=True, seed=0, pool=InProcessPool(lambda _: {}), store=store, files=files)


def test_sentences_translations_and_trees_are_those_of_files(tmp_path: Path) -> None:
    long = " ".join(["a"] * (batchmaker.LONGEST + 1))
    (tmp_path / "wmt_en_de.tsv").write_text(f"en\tde\nIt is so .\tSo ist es\na\tein b\n{long}\ta\n", encoding="utf-8")
    (tmp_path / "sst.txt").write_text("(3 (2 It) (4 (2 is) (3 it)))\n(1 no)\n", encoding="utf-8")
    bench = _bench(tmp_path, files_of(tmp_path))
    requests, data = batchmaker.sentences(bench)
    assert (data.name, data.rows) == (f"wmt_en_de.tsv, at most {batchmaker.LONGEST}", 2)
    assert {int(one.graph.times[0]) for one in requests.arrivals(1.0, 50, 0)} == {4, 1}
    assert batchmaker.sentences(bench, 3)[1].rows == 1
    requests, _ = batchmaker_trees.translations(bench)
    assert {one.lengths[1] for one in requests.arrivals(1.0, 50, 0)} == {3, 2}
    requests, data = batchmaker_trees.tree_requests(bench)
    assert (data.name, data.rows) == ("sst.txt", 2)
    assert {len(one.graph.cell) for one in requests.arrivals(1.0, 50, 0)} == {5, 1}
    assert bench.files.served == {"wmt_en_de.tsv", "sst.txt"}


def test_equal_sentences_and_trees_are_of_no_file(tmp_path: Path) -> None:
    (tmp_path / "wmt.tsv").touch()
    (tmp_path / "sst.txt").touch()
    bench = _bench(tmp_path, files_of(tmp_path))
    batchmaker.sentences(bench, fixed=24)
    batchmaker_trees.tree_requests(bench, fixed=True)
    assert not bench.files.served


def test_eight_requests_come_and_go_as_in_the_papers_text(tmp_path: Path) -> None:
    found = batchmaker_cell.fig5(_bench(tmp_path))
    assert [claim.verdict for claim in found.claims] == ["matched"] * 4 + ["tendency"]
    assert all(claim.value == claim.goal for claim in found.claims[:4])
    assert [row[1:] for row in found.tables[0].rows][5] == (7, 3, 10, 5, 12)


def test_cellular_batching_beats_padding_on_little_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchmaker, "QUICK_LOADS", (2e3, 5e3))
    monkeypatch.setattr(batchmaker, "seconds", lambda _: 0.1)
    bench = _bench(tmp_path)
    manners = {"ours": batchmaker.cellular(), "padded": batchmaker.padded()}
    found = batchmaker.compared(bench, manners, batchmaker.sentences(bench)[0])
    assert 10 < found["ours"][1].p90_ms < 15
    assert found["ours"][1].p90_ms < found["padded"][1].p90_ms / 2


FIGURES = (batchmaker.fig7, batchmaker.fig8, batchmaker.fig11, batchmaker_trees.fig13, batchmaker_trees.fig14,
           batchmaker_trees.fig15)  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES, ids=lambda one: one.__name__)
def test_a_figure_has_the_papers_claims_and_its_reasons_name_rows(
    figure: Callable[[Runner], Findings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is served here: all manners have the same made-up latencies."""
    monkeypatch.setattr(curves, "curve", lambda *args, **_: [point(load, 1 + load / 100) for load in args[2]])
    found = figure(_bench(tmp_path))
    claims = [claim for claim in found.claims if isinstance(claim, PaperClaim)]
    assert len({claim.name for claim in claims}) == len(found.claims)
    assert 1 <= sum(claim.headline for claim in claims) <= 3
    told = [reason.shown_by for claim in claims for reason in claim.reasons.values()]
    named = {row for text in told for row in re.findall("rows? `(.*?)`", text)}
    assert named <= {row[0] for row in found.tables[0].rows}
