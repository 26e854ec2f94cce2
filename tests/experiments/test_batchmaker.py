"""BatchMaker's experiments: data, curves, and one figure on little data."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from vllm_ext.experiments.batching import workloads
from vllm_ext.experiments.batching.curves import Point, peak, reductions
from vllm_ext.experiments.batching.merging import merge_cells, merge_operators
from vllm_ext.experiments.papers import batchmaker, batchmaker_trees
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


def _bench(folder: Path) -> batchmaker.Runner:
    return batchmaker.Runner(quick=True, seed=0, pool=InProcessPool(lambda _: {}), store=PointStore(folder).__enter__())


def test_a_figure_on_little_data_has_the_papers_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchmaker, "QUICK_LOADS", (2e3, 5e3, 12e3))
    monkeypatch.setattr(batchmaker, "seconds", lambda _: 0.1)
    found = batchmaker.fig7(_bench(tmp_path))
    claims = {claim.name: claim for claim in found.claims}
    assert claims["LSTM: peak throughput, batchmaker / padded"].headline
    assert claims["P90 latency at 5K req/s (ms)"].value < 15
    assert found.metrics["batchmaker.load_5000.p90_ms"] < found.baselines["padded"]["load_5000.p90_ms"] / 2
