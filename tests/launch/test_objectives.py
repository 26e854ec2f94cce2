"""`--tbt-slo-ms 5x`: all processes of a server get milliseconds, by the profile of the engine that starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ext import tiny_model
from vllm_ext.config import ConfigError, SloConfig, parse
from vllm_ext.contract.objective import Slo
from vllm_ext.hooks import registry
from vllm_ext.simulation.engine.harness import make_request, make_scheduler
from vllm_ext.step_time import profile as module
from vllm_ext.step_time.profile import Profile, default_path, engine_key, save
from vllm_ext.step_time.runtime import Coefficients

FIVE_MS = 34.4
"""Five steps of 6.88288 ms: 1 ms, 32 decodes of 20 us, 131,072 tokens of context at 40 ns."""
COEFFICIENTS = Coefficients(1e-3, 2e-5, 3e-5, 4e-8, 5e-10)


@pytest.fixture(scope="module")
def model() -> str:
    registry.install("base")
    found = str(tiny_model.build(style="llama", seed=0))
    started(found)  # with the first configuration vLLM sets its logging up, which would take a test's lines from it
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cache_dir", lambda: tmp_path / "cache")


def started(model: str, *arguments: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", model, "--max-model-len", "128", "--dtype", "float32", "--enforce-eager"]
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *arguments])).create_engine_config()


def objectives(vllm_config: Any) -> SloConfig:
    return parse(vllm_config.additional_config["vllm_ext"]).slo


def measured(**key: Any) -> Profile:
    made = {"model": "org/model", "device": "Some GPU", **key}
    return Profile(
        **made, vllm_version="0.32.0", coefficients=COEFFICIENTS, num_steps=100, median_error=0.02, p90_error=0.1
    )


def test_the_profile_of_this_engine_tells_the_milliseconds_once(model: str, caplog: pytest.LogCaptureFixture) -> None:
    key = engine_key(started(model), current_platform.get_device_name())
    save(measured(**key._asdict()), default_path(key))
    with caplog.at_level(logging.INFO, logger="vllm.vllm_ext"):
        by_step = started(model, "--scheduler-cls", "sarathi", "--tbt-slo-ms", "5x", "--ext-profile", "auto")
    by_number = started(model, "--scheduler-cls", "sarathi", "--tbt-slo-ms", f"{FIVE_MS}", "--ext-profile", "auto")
    assert by_step.additional_config == by_number.additional_config
    assert objectives(by_step).tbt_ms == FIVE_MS
    said = [record.getMessage() for record in caplog.records if "tbt_ms" in record.getMessage()]
    assert said == ["slo.tbt_ms=5x is 34.4 ms, by the runtime model"]


def test_a_named_profile_tells_those_of_classes(model: str, tmp_path: Path) -> None:
    save(measured(), path := tmp_path / "profile.json")
    options = '{"vllm_ext": {"slo": {"classes": {"chat": {"tbt_ms": "5x"}, "batch": {"tbt_ms": 900}}}}}'
    found = started(model, "--scheduler-cls", "auto", "--ext-profile", str(path), "--additional-config", options)
    assert {name: one.tbt_ms for name, one in objectives(found).classes.items()} == {"chat": FIVE_MS, "batch": 900.0}


def test_without_a_profile_of_this_engine_it_does_not_start(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^vllm_ext\.slo\.tbt_ms='5x': needs measured step times: run `vllm-ext"):
        started(model, "--scheduler-cls", "sarathi", "--tbt-slo-ms", "5x", "--ext-profile", "auto")


OURS = "vllm_ext.scheduling.scheduler.SteeredScheduler"


def test_a_scheduler_that_no_front_end_checked_does_it_itself(tmp_path: Path) -> None:
    save(measured(), path := tmp_path / "profile.json")
    options = {"system": "sarathi", "slo": {"tbt_ms": "5x"}, "profile": str(path)}
    scheduler: Any = make_scheduler(OURS, additional_config={"vllm_ext": options})
    scheduler.add_request(make_request("r", 5))
    assert scheduler.tracked["r"].slo == Slo(tbt_s=FIVE_MS / 1000)
    with pytest.raises(ConfigError, match=r"tbt_ms='5x': needs measured step times"):
        make_scheduler(OURS, additional_config={"vllm_ext": {**options, "profile": None}})
