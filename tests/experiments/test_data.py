"""Real lengths in place of drawn ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.experiments.data import files_of, with_files
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


def test_parts_of_a_mix_are_served_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "alpaca.json").touch()
    parts = (MixPart(source="alpaca-like", weight=1.0), MixPart(source="sharegpt-vllm", weight=2.0))
    mix = with_files(SimulationSpec(workload=WorkloadSpec(mix=parts)), files_of(tmp_path)).workload.mix
    assert [(Path(part.source).name, part.weight) for part in mix] == [("alpaca.json", 1.0), ("sharegpt-vllm", 2.0)]


@pytest.mark.parametrize(
    ("names", "said"),
    [((), r"must have a file of alpaca\.\*, sharegpt"), (("alpaca.json", "alpaca.csv"), "one file of alpaca, not")],
)
def test_folder_without_or_with_several_files_of_a_data_set_is_refused(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=said):
        files_of(tmp_path)
