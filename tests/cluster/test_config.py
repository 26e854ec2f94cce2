"""Flags of ``vllm serve`` become a file that Ray's own models read, or are refused in a line."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs

from tests.support.upstream import WITH_RAY
from vllm_ext import envs
from vllm_ext.cli.cluster import text_of
from vllm_ext.cli.main import main
from vllm_ext.cluster.config import (
    ENVIRONMENT,
    ClusterConfigError,
    ClusterOptions,
    Replica,
    replica_of,
    serve_config,
)
from vllm_ext.cluster.ray_support import VERIFIED, RayUnsupported, verify
from vllm_ext.tiny_model import build


@pytest.fixture(scope="module")
def model() -> str:
    return str(build())


def engine(*flags: str) -> Replica:
    return replica_of([*flags])


def llm(replica: Replica, **options: Any) -> dict[str, Any]:
    (found,) = serve_config(replica, ClusterOptions(**options))["applications"][0]["args"]["llm_configs"]
    return dict(found)


def test_what_was_typed_goes_to_the_engines_and_nothing_else(model: str) -> None:
    replica = engine(
        model, "--scheduler-cls", "alise+pensieve", "--kv-tier-gib", "2", "--max-num-seqs=16", "--enforce-eager",
        "--compilation-config", '{"mode": 0}', "--port", "8123", "--served-model-name", "tiny",
    )  # fmt: skip
    assert (replica.model, replica.name, replica.port) == (model, "tiny", 8123)
    assert replica.engine_kwargs == {
        "scheduler_cls": "alise+pensieve", "max_num_seqs": 16, "enforce_eager": True,
        "compilation_config": {"mode": 0}, "additional_config": {"vllm_ext": {"kv_tier": {"gib": 2.0}}},
    }  # fmt: skip
    found = llm(replica, replicas=3)
    assert found["model_loading_config"] == {"model_id": "tiny", "model_source": model}
    assert found["engine_kwargs"]["additional_config"]["vllm_ext"] == {"kv_tier": {"gib": 2.0}, "load_report": True}
    assert found["deployment_config"]["num_replicas"] == 3


def cudagraph_mode(args: AsyncEngineArgs) -> str:
    return str(args.compilation_config.cudagraph_mode.name)


def backend(args: AsyncEngineArgs) -> str:
    found = args.attention_backend or args.attention_config.backend
    return str(getattr(found, "name", found))


@pytest.mark.parametrize(
    ("flag", "value", "read"),
    [
        ("--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}', cudagraph_mode),
        ("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}', cudagraph_mode),
        ("--attention-config", '{"backend": "FLASH_ATTN"}', backend),
        ("--attention-backend", "FLASH_ATTN", backend),
    ],
)
def test_a_choice_is_the_same_when_a_replica_reads_it(
    model: str, flag: str, value: str, read: Callable[[AsyncEngineArgs], str]
) -> None:
    kwargs = engine(model, flag, value).engine_kwargs
    assert read(AsyncEngineArgs(**yaml.safe_load(yaml.safe_dump(kwargs)))) in value


def test_without_a_system_vllm_s_order_is_served_by_a_scheduler_that_reports(model: str) -> None:
    assert llm(engine(model))["engine_kwargs"] == {
        "scheduler_cls": "fcfs", "additional_config": {"vllm_ext": {"load_report": True}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data-parallel-size", "2"], "--data-parallel-size=2: must be 1: each replica is one engine"),
        (["--api-server-count", "3"], "--api-server-count=3: must be 1"),
        (["--headless"], "--headless=True: must be left out"),
        (["--uds", "/tmp/x"], "--uds='/tmp/x': must be left out"),
        (["--served-model-name", "a", "b"], "must be one name"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--hf-token", "hf_secret"], "--hf-token: must be left out: set HF_TOKEN"),
        (
            ["--enable-lora", "--lora-modules", "a=/x"],
            "Ray Serve takes adapters by its own lora_config",
        ),
        (["--distributed-executor-backend", "mp"], "Ray Serve chooses it"),
        (["--scheduler-cls", "mine.Scheduler"], "must be the name of a system"),
        (["--scheduler-cls", "alize"], "alize"),
        (["--scheduler-cls", "alise", "--kv-tier-gib", "-1"], "--kv-tier-gib -1.0: must be"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(model: str, flags: list[str], said: str) -> None:
    with pytest.raises(ClusterConfigError) as refused:
        engine(model, *flags)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 0}, "replicas=0: must be at least 1"),
        ({"router": "best"}, "router='best': must be one of"),
        ({"report_s": 9.0}, r"report_s=9\.0: must be from 0\.05 to 1"),
        ({"hang_s": float("nan")}, "hang_s=nan: must be at least 1"),
        ({"hang_s": float("inf")}, "hang_s=inf: must be at least 1, and finite"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterOptions(**options)


def test_engines_have_no_id_in_common_and_share_a_predictor_only_where_that_is_asked_for(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    connector = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'
    command = ["cluster", "serve", model, "--kv-transfer-config", connector, "--print-config",
               "--scheduler-cls", "fcfs"]  # fmt: skip
    environments = []
    predictor = ["--ext-prediction-sources", "hint,retrieval"]
    for flags in (predictor, ["--colocate-predictor", *predictor]):
        assert main([*command, *flags]) == 0
        (application,) = yaml.safe_load(capsys.readouterr().out)["applications"]
        (found,) = application["args"]["llm_configs"]
        assert found["engine_kwargs"]["kv_transfer_config"] == {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        }  # fmt: skip
        environments.append(found["runtime_env"]["env_vars"])
    assert [envs.COLOCATED_PREDICTOR in each for each in environments] == [False, True]


def test_a_predictor_to_share_has_to_be_asked_for(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "serve", model, "--colocate-predictor", "--print-config"]) == 2
    assert "--ext-prediction-sources=hint,history: must have 'retrieval'" in capsys.readouterr().err


def test_the_command_prints_a_file_that_is_read_again(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cluster", "serve", model, "--replicas", "2", "--router=home", "--max-num-seqs", "8", "--print-config"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    (application,) = yaml.safe_load(printed)["applications"]
    (found,) = application["args"]["llm_configs"]
    assert found["engine_kwargs"]["max_num_seqs"] == 8
    assert found["deployment_config"]["request_router_config"]["request_router_kwargs"] == {"policy": "home"}
    assert "export RAY_SERVE_ENABLE_HA_PROXY='1'" in printed


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve"], "MODEL is missing"),
        (["serve", "--max-num-seqs", "8"], "MODEL is missing"),
        (["serve", "m", "--replicas", "0"], "replicas=0: must be at least 1"),
        (["serve", "m", "--replicas", "x"], "--replicas"),
        (["status"], "invalid choice: 'status'"),
    ],
)
def test_a_wrong_command_is_a_line(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["cluster", *command])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "Triton" not in one]
    assert said in line


@WITH_RAY
def test_ray_reads_it_and_has_what_ours_override(model: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from ray.serve.llm import LLMConfig
    from ray.serve.schema import ServeDeploySchema

    verify()
    config = serve_config(engine(model, "--max-num-seqs", "8"), ClusterOptions(replicas=2))
    path = tmp_path / "serve.yaml"
    path.write_text(text_of(config), encoding="utf-8")
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    ServeDeploySchema.model_validate(read)
    (fields,) = read["applications"][0]["args"]["llm_configs"]
    made = LLMConfig.model_validate(fields)
    assert made.server_cls.__name__ == "Server"
    assert made.get_engine_config().engine_kwargs["max_num_seqs"] == 8


def test_another_ray_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    monkeypatch.setitem(VERIFIED, "ray.serve.llm:LLMServer.check_health", "0" * 16)
    monkeypatch.setitem(VERIFIED, "ray.serve.llm:LLMServer.no_such_method", "0" * 16)
    with pytest.raises(RayUnsupported, match=r"changed: LLMServer\.check_health, LLMServer\.no_such_method"):
        verify()


def test_a_ray_that_cannot_run_this_vllm_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pytest.importorskip("ray.serve.llm", reason="the extra ray is not installed")
    missing = "vllm.entrypoints.no_such_module"
    monkeypatch.setattr(llm.LLMServer, "_get_default_engine_class", lambda _: importlib.import_module(missing))
    with pytest.raises(RayUnsupported, match=rf"Ray .* can't run vLLM .* \(No module named '{missing}'\)"):
        verify()


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray.serve.llm", None)
    with pytest.raises(RayUnsupported, match=r"pip install 'vllm-ext\[ray\]'"):
        verify()


@WITH_RAY
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:65536"])
def test_a_cluster_that_is_not_there_is_one_line(address: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    assert main(["cluster", "serve", model, "--address", address]) == 3
    said = capsys.readouterr().err
    assert f"--address={address}: no Ray cluster answers there (" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("RAY_SERVE_ENABLE_HA_PROXY", None, "1"),
        ("RAY_SERVE_ENABLE_HA_PROXY", "0", "1"),
        ("RAY_SERVE_HAPROXY_RETRY_ON", None, "conn-failure"),
    ],
)
async def test_a_replica_names_what_ray_was_started_without(
    variable: str, value: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from vllm_ext.cluster.server import Server

    for name, usual in ENVIRONMENT.items():
        monkeypatch.setenv(name, usual)
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(RuntimeError, match=f"{variable}={value!r}: must be {wanted}.* before `ray start`"):
        await Server.start(object.__new__(Server))


@pytest.mark.parametrize(
    ("deployment", "replicas"),
    [
        ({"num_replicas": 64}, 64),
        ({"autoscaling_config": {"max_replicas": 8}}, 8),
        ({"num_replicas": "auto"}, 1),
        ({"num_replicas": None, "autoscaling_config": "auto"}, 1),
    ],
)
def test_a_replica_knows_how_many_there_are_at_most(deployment: dict[str, Any], replicas: int) -> None:
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from vllm_ext.cluster import server

    assert server._replicas(deployment) == replicas


async def test_a_report_has_the_latest_conversations_only() -> None:
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    from vllm_ext.cluster import server

    class Engines:
        def __len__(self) -> int:
            return 1

        async def ask(self, _utility: str, _each: Any) -> list[dict[str, Any]]:
            return [{"number": 7, "resident": {str(number): [number, 0] for number in range(300)}}]

    found = await server._first(Engines(), 100)  # type: ignore[arg-type]
    assert found["number"] == 7
    assert [*found["resident"]] == [str(number) for number in range(200, 300)]
