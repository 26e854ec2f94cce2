"""Real lengths in place of drawn ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_ext.cli import repro
from vllm_ext.experiments.data import PRESETS, Files, files_of, with_files
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.workloads.spec import MixPart, WorkloadSpec


def test_presets_of_a_data_set_are_served_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    file = tmp_path / "chats" / "sharegpt.jsonl.gz"
    file.touch()
    (tmp_path / "sharegpt_lengths").mkdir()
    files = files_of(tmp_path)
    workload = WorkloadSpec(source="sharegpt-vllm", max_tokens=1024, rate_per_s=3.0)
    served = with_files(SimulationSpec(workload=workload), files).workload
    assert served == workload.model_copy(update={"source": str(file), "sample": "with-replacement"})
    assert with_files(SimulationSpec(workload=WorkloadSpec(source="pensieve-sharegpt")), files).workload.conversations
    drawn = SimulationSpec(workload=WorkloadSpec(source="alpaca-vllm"))
    assert with_files(drawn, files) == drawn
    assert files.served == {"sharegpt.jsonl.gz"}


def test_parts_of_a_mix_are_served_from_files_too(tmp_path: Path) -> None:
    for name in ("alpaca.json", "sharegpt.json"):
        (tmp_path / name).touch()
    parts = (MixPart(source="alpaca-like", weight=1.0), MixPart(source="arxiv-summarization", weight=2.0))
    files = files_of(tmp_path)
    workload = with_files(SimulationSpec(workload=WorkloadSpec(mix=parts)), files).workload
    assert [(Path(part.source).name, part.weight) for part in workload.mix] == [
        ("alpaca.json", 1.0),
        ("arxiv-summarization", 2.0),
    ]
    assert files.served == {"alpaca.json"}, "the source that a mix stands in place of is not served"


@pytest.mark.parametrize(
    ("names", "served"),
    [
        (("alpaca.jsonl.gz", "alpaca_eval_lengths.csv", "alpaca_eval_outputs.jsonl.gz"), "alpaca.jsonl.gz"),
        (("alpaca_eval.json", "alpacas.json"), "alpaca_eval.json"),
        (("sharegpt.json",), None),
    ],
)
def test_file_that_has_just_the_data_sets_name_is_served_and_any_other_only_alone(
    tmp_path: Path, names: tuple[str, ...], served: str | None
) -> None:
    for name in names:
        (tmp_path / name).touch()
    file = files_of(tmp_path).of("alpaca")
    assert (file and file.name) == served


@pytest.mark.parametrize(
    "names", [("alpaca.json", "alpaca.csv", "alpaca_eval.json"), ("alpaca_eval.json", "alpaca_vicuna.csv")]
)
def test_several_files_of_a_data_set_are_refused_where_it_is_served(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in (*names, "wmt.tsv"):
        (tmp_path / name).touch()
    files = files_of(tmp_path)
    assert files.of("wmt") == tmp_path / "wmt.tsv"
    listed = ", ".join(str(tmp_path / name) for name in sorted(names[:2]))
    with pytest.raises(ValueError, match=f"one file of alpaca, or one that is named alpaca.*, not {listed}$"):
        with_files(SimulationSpec(workload=WorkloadSpec(source="alpaca-vllm")), files)
    assert files.served == {"wmt.tsv"}


def test_folder_without_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have a file of alpaca\.\*, sharegpt.*, wmt\.\*, sst\.\*$"):
        files_of(tmp_path)


def test_without_files_a_run_stays_as_it_is() -> None:
    spec = SimulationSpec(workload=WorkloadSpec(source="alpaca-vllm"))
    assert with_files(spec, Files({})) is spec


def test_help_names_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        repro.main(["--help"])
    assert {*PRESETS} <= {*re.findall(r"\w+", capsys.readouterr().out)}
