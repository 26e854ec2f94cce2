"""Specifications: refused with the known names, and built into what they ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from pydantic import ValidationError

from vllm_ext.cli import simulate
from vllm_ext.config import ConfigError
from vllm_ext.simulation.cost.fitted import Fitted, StepCurve
from vllm_ext.simulation.cost.link import Direction
from vllm_ext.simulation.cost.roofline import Roofline
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, build, build_link, notes
from vllm_ext.simulation.cost.step_shape import StepShape
from vllm_ext.step_time.fit import TermSupport
from vllm_ext.step_time.profile import Profile, save

SHAPE = StepShape.of_decodes(7, 1000).plus(StepShape.of_chunk(513))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "gpt-5"}, r"model='gpt-5': .*the known: opt-2.7b, .*pythia-12b"),
        ({"device": "abacus"}, r"device='abacus'.*known: v100, .*cpu"),
        ({"device": "memory=80"}, r"device='memory=80': bandwidth, flops, link missing"),
    ],
)
def test_unknown_hardware_is_refused_with_the_known_ones(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HardwareSpec(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "fitted"}, "file=None: needed by kind='fitted'"),
        ({"kind": "constant", "file": "x.json"}, "file='x.json'"),
        ({"host_step_s": 0.1}, "host_step_s=0.1: kind='roofline' takes host_base_s"),
        ({"gemm_efficiency": 1.5}, "gemm_efficiency"),
        ({"kind": "constant", "step_s": 1e-7}, "step_s"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_cost_fields_that_do_not_belong_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CostSpec(**values)


def test_the_defaults_build_a_roofline_with_the_engines_own_time() -> None:
    cost = build(HardwareSpec().resolve(), CostSpec())
    assert isinstance(cost, Roofline)
    assert cost.host_s(SHAPE) == pytest.approx(541e-6 + 8 * 12.7e-6)


@pytest.mark.parametrize(
    "slower", [{"gemm_efficiency": 0.2}, {"memory_efficiency": 0.2}, {"attention_efficiency": 0.001}, {"unhidden": 1.0}]
)
def test_an_efficiency_given_replaces_the_devices(slower: dict[str, float]) -> None:
    usual, worse = build(HardwareSpec().resolve(), CostSpec()), build(HardwareSpec().resolve(), CostSpec(**slower))
    assert worse.device_s(SHAPE) > usual.device_s(SHAPE)


def test_without_graphs_a_decode_step_waits_for_its_launches() -> None:
    decode = StepShape.of_decodes(1, 10)
    small = HardwareSpec(model="opt-2.7b", device="h200").resolve()
    assert build(small, CostSpec(cuda_graphs=False)).device_s(decode) > build(small, CostSpec()).device_s(decode)


def test_fewer_bytes_per_weight_and_kv_element_are_faster() -> None:
    decode = StepShape.of_decodes(4, 2000)
    whole = build(HardwareSpec().resolve(), CostSpec()).device_s(decode)
    light = build(HardwareSpec(weight_dtype_bytes=1.0).resolve(), CostSpec()).device_s(decode)
    assert light < 0.7 * whole
    assert build(HardwareSpec(kv_dtype_bytes=1).resolve(), CostSpec()).device_s(decode) < whole


def test_constant_and_fitted_are_built_from_their_fields(tmp_path: Path) -> None:
    constant = build(HardwareSpec().resolve(), CostSpec(kind="constant", step_s=0.5, host_step_s=0.1))
    assert (constant.device_s(SHAPE), constant.host_s(SHAPE)) == (0.5, 0.1)
    path = tmp_path / "cost.json"
    Fitted(StepCurve(base_s=0.25)).save(path)
    fitted = build(HardwareSpec().resolve(), CostSpec(kind="fitted", file=str(path), host_step_s=0.1))
    assert (fitted.device_s(SHAPE), fitted.host_s(SHAPE)) == (0.25, 0.1)


def test_a_missing_file_is_an_error_when_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cost\.file=.*nowhere"):
        build(HardwareSpec().resolve(), CostSpec(kind="fitted", file=str(tmp_path / "nowhere.json")))


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    config = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 256,
              "vocab_size": 500, "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hardware = HardwareSpec(model=str(tmp_path), device="cpu", weight_dtype_bytes=4, kv_dtype_bytes=4)
    assert hardware.resolve().model.weight_bytes() == 4 * (2 * (4 * 64 * 64 + 2 * 64 * 256) + (500 + 130) * 64)
    assert build(hardware.resolve(), CostSpec()).device_s(SHAPE) > 0


def test_a_config_that_is_not_understood_is_refused_with_the_description(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    with pytest.raises(ValidationError, match=r"config\.json: field 'model_type': must be one of llama"):
        HardwareSpec(model=str(tmp_path))


def test_a_device_by_its_numbers_costs_what_the_tables_row_with_these_does() -> None:
    row = replace(HardwareSpec(device="l40s").resolve().device, link_latency_s=10e-6, gemm_efficiency=0.7)
    same = HardwareSpec(device="memory=44.98828125,bandwidth=864,flops=362.05,link=31.5").resolve().device
    assert replace(same, name=row.name, source=row.source) == row
    described = HardwareSpec(model="llama-3.1-8b", device=same.name)
    assert build(described.resolve(), CostSpec()).device_s(SHAPE) > 0
    assert HardwareSpec.model_validate_json(described.model_dump_json()) == described


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "some-lab/other"], "--model: hardware.model='some-lab/other': model='some-lab/other': not in the"),
        (["--device", "memory=80"], "--device: hardware.device='memory=80': device='memory=80': bandwidth, flops"),
    ],
    ids=["model", "device"],
)
def test_a_wrong_flag_is_one_line_and_status_2(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert simulate.main([*flags, "--print-spec"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("vllm-ext simulate: " + message)
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_split_the_heads_do_not_allow_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match="tensor_parallel=3: must divide the 40 heads"):
        build(HardwareSpec(tensor_parallel=3).resolve(), CostSpec())


def test_the_link_has_the_devices_rate_or_the_one_given() -> None:
    for cost, end in ((CostSpec(copy_overhead_s=0), 1.0), (CostSpec(copy_overhead_s=0, pcie_bytes_per_s=5e9), 5.0)):
        link = build_link(HardwareSpec(device="a100-40").resolve(), cost)
        link.submit(0.0, Direction.TO_HOST, 25 * 10**9)
        assert link.next_end_s() == pytest.approx(end)


def profile(folder: Path, **fields: Any) -> CostSpec:
    of = {"model": "facebook/opt-125m", "device": "NVIDIA GeForce GTX 1080", "tensor_parallel_size": 4, **fields}
    terms = [("base_s", 90, 0.01), ("pair_s", 0, 1.0), ("decode_s", 90, 0.3)]
    found = Profile(
        vllm_version="0.11.0", coefficients=(1e-3, 2e-5, 3e-5, 4e-8, 5e-10), num_steps=300, median_error=0.728,
        p90_error=2.0, terms=tuple(TermSupport(name=name, num_steps=n, uncertainty=u) for name, n, u in terms), **of,
    )  # fmt: skip
    save(found, folder / "rd.json")
    return CostSpec(kind="fitted", file=str(folder / "rd.json"))


def test_a_file_of_another_server_its_errors_and_what_it_lacks_are_told(tmp_path: Path) -> None:
    """Such a file was used without a word, with an error of 73 %."""
    about, differs = notes(HardwareSpec(model="opt-13b", device="a100-40"), profile(tmp_path))
    assert about == (
        "step times of rd.json: 300 steps of facebook/opt-125m on NVIDIA GeForce GTX 1080, vLLM 0.11.0, "
        "tensor-parallel size 4; error over steps held out 72.8% in the median, 200.0% in the P90; "
        "no steps tell pair_s: defaults are taken; too few or too like steps tell decode_s"
    )
    assert differs == (
        "step times of rd.json are of another server than is simulated: model facebook/opt-125m, not opt-13b; "
        "device NVIDIA GeForce GTX 1080, not a100-40; tensor-parallel size 4, not 1"
    )


@pytest.mark.parametrize(("model", "named"), [
    ("facebook/opt-13b", "opt-13b"),
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("/models/opt-13b/", "opt-13b"),
])  # fmt: skip
def test_the_server_that_is_simulated_is_known_by_its_names(tmp_path: Path, model: str, named: str) -> None:
    cost = profile(tmp_path, model=model, device="NVIDIA A100-SXM4-40GB", tensor_parallel_size=2)
    assert len(notes(HardwareSpec(model=named, device="a100-40", tensor_parallel=2), cost)) == 1
    assert len(notes(HardwareSpec(model=named, device="a100-40"), cost)) == 2
    assert len(notes(None, cost)) == 1
    assert notes(HardwareSpec(), CostSpec()) == []


def test_a_cost_file_without_a_name_of_its_server_says_how_far_it_is_off(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    Fitted(StepCurve(base_s=0.1)).save(path)
    cost = CostSpec(kind="fitted", file=str(path))
    assert notes(HardwareSpec(), cost) == ["step times of cost.json: nothing is known of its fit"]
