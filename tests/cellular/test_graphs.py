"""Cell graphs: what is refused, how subgraphs are found, and which rows of storage are shared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.cellular.graphs_of import cell, cells, chain, compiled, complete_tree, layers, translation, tree
from vllm_ext.cellular.cells import CellError, Port
from vllm_ext.cellular.graphs import CellGraph, CellTable, Data, GraphError, Node, Output, Zero
from vllm_ext.cellular.layout import compile_graph


def test_a_chain_of_any_length_is_one_node_that_keeps_its_state_in_one_row() -> None:
    graph = compiled(chain(30), cells())
    assert graph.times.tolist() == [30]
    assert [(region.kind, region.rows) for region in graph.regions] == [(0, 30), (1, 1)]
    assert (graph.in_first.tolist(), graph.in_next.tolist(), graph.in_step.tolist()) == ([[1, 0]], [[2, 1]], [[1, 0]])
    assert graph.out_first[0, 0] == 1


def test_a_complete_tree_of_16_leaves_has_17_subgraphs() -> None:
    """The paper's example, section 2.4.4; it says 31 internal nodes, which is all nodes of the tree."""
    graph = compiled(tree(complete_tree(16)), cells())
    names, sizes = np.unique(graph.subgraph, return_counts=True)
    assert sorted(sizes.tolist()) == [1] * 16 + [15]
    internal = int(names[sizes == 15][0])
    assert graph.external[internal] == 16
    assert len(graph.roots) == len(graph.ready) == 16


def test_a_tree_is_computed_in_the_rows_of_its_leaves() -> None:
    graph = compiled(tree(((1, 2), 3)), cells())
    assert [region.rows for region in graph.regions] == [3, 3]
    assert len(np.unique(graph.out_first[:, 0])) == 3


class Counted(list[Node]):
    """Nodes that count how often one of them is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Node]:
        for node in super().__iter__():
            self.looks += 1
            yield node

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def test_laying_a_tree_out_looks_equally_often_at_each_node_of_large_and_small_ones() -> None:
    looks = []
    for leaves in (16, 128):
        graph = tree(complete_tree(leaves))
        graph.nodes = counted = Counted(graph.nodes)
        compiled(graph, cells())
        looks.append(counted.looks / len(counted))
    assert looks[1] <= 1.1 * looks[0]


def test_a_value_that_two_nodes_read_is_not_overwritten() -> None:
    graph = CellGraph(data={"tokens": np.zeros(1, np.int64)})
    leaf = graph.add("leaf", {"token": Data("tokens")})
    once = graph.add("internal", {"h_left": Output(leaf, "h"), "h_right": Output(leaf, "h")})
    graph.result["h"] = Output(once, "h")
    made = compiled(graph, cells())
    assert made.out_first[once, 0] != made.out_first[leaf, 0]


def test_encoder_and_decoder_are_two_subgraphs_and_every_token_is_kept() -> None:
    graph = compiled(translation(3, 5), cells())
    assert graph.subgraph.tolist() == [0, 1]
    assert graph.external.tolist() == [0, 1]
    assert graph.out_step[1].tolist() == [0, 1, 0]
    assert graph.work == {0: 3, 1: 5}


def test_layers_of_one_cell_are_one_subgraph_and_each_can_end_the_request() -> None:
    graph = compiled(layers([False, True, True]), cells())
    assert graph.subgraph.tolist() == [0, 1, 1]
    assert (graph.roots.tolist(), graph.ready.tolist()) == ([0], [0])
    assert graph.exits.all()
    assert graph.in_first[0, 0] == -2  # the session's row 1
    assert [result.node for result in graph.results["h"]] == [0, 1, 2]


def broken(**change: object) -> CellGraph:
    fields = {"cell": "step", "inputs": {"token": Data("tokens", each=True), "h": Zero()}, "times": 3} | change
    graph = CellGraph(data={"tokens": np.arange(3)})
    graph.add(**fields)  # type: ignore[arg-type]
    return graph


def mixed() -> CellGraph:
    graph = translation(2, 3)
    graph.result["h"] = (Output(0, "h"), Output(1, "token"))
    return graph


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (CellGraph(), "nodes="),
        (broken(cell="lstm"), "cell='lstm' of node 0"),
        (broken(inputs={"token": Zero()}), "inputs="),
        (broken(times=0), "times=0 of node 0"),
        (broken(times=4), "row 3 of 3"),
        (broken(feedback={"x": "h"}), "feedback="),
        (broken(collect=["x"]), "outputs="),
        (broken(exits=True), r"exits=True of node 0 \(step\): must be of a cell with until"),
        (broken(inputs={"token": Data("words"), "h": Zero()}), "data='words'"),
        (broken(inputs={"token": Zero(), "h": Output(5, "h")}), "must be a node before it"),
        (broken(inputs={"token": Zero(), "h": Data("tokens")}), r"is int64\[\], must be float32\[2\]"),
        (CellGraph(data={"x": np.zeros((2, 9))}), "nodes="),
        (layers([True]), "held='h'"),
        (mixed(), "result='h': must be one output, or several of one kind"),
    ],
)
def test_a_graph_that_cannot_run_is_refused_by_name(graph: CellGraph, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        compile_graph(graph, cells())


def test_cells_of_one_name_and_senseless_batch_sizes_are_refused() -> None:
    one = cell("a", [Port("x")], [Port("y")])
    with pytest.raises(GraphError, match="different names"):
        CellTable([one, one])
    for sizes in ((), (0, 4), (4, 2)):
        with pytest.raises(CellError, match="batch_sizes"):
            cell("a", [Port("x")], [Port("y")], batch_sizes=sizes)
    with pytest.raises(CellError, match="until='y'"):
        cell("a", [Port("x")], [Port("y")], until="y")
    assert one.with_batches(24, 2).batch_sizes == (2, 4, 8, 16, 24)
