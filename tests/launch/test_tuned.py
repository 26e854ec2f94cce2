"""`--ext-tuned`: what a plan found is set where nothing was given by hand, on the server that it was found for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__ as vllm_version

from vllm_ext import __version__, tiny_model
from vllm_ext.config import ConfigError, parse, tuned
from vllm_ext.config.tuned import Expected, For, Measured, Settings, Tuned, is_device
from vllm_ext.launch import tuned as launch_tuned
from vllm_ext.launch.arguments import SCHEDULER


@pytest.fixture(scope="module")
def model() -> str:
    found = str(tiny_model.build(style="llama", seed=0))
    plain(found)  # with the first configuration vLLM sets its logging up, which would take a test's lines from it
    return found


def file(folder: Path, model: str, *, settings: Settings | None = None, **made_for: Any) -> str:
    sizes = json.loads((Path(model) / "config.json").read_text())
    of = {"layers": sizes["num_hidden_layers"], "hidden": sizes["hidden_size"], "device": "cpu", **made_for}
    found = Tuned(
        made_for=For(model="tiny", **{"device_memory_gib": 16.0, "tensor_parallel_size": 1, **of}),
        settings=settings or Settings(
            scheduler_cls="alise", max_num_batched_tokens=64, max_num_seqs=8, options={"ordering": {"gamma": 1.0}}
        ),
        measured=Measured(command="vllm-ext plan --trace mine.jsonl", trace="mine.jsonl", trace_sha256="0" * 64,
                          costs="a cost model", vllm=vllm_version, vllm_ext=__version__, saturation_requests_per_s=4.0),
        expected=(Expected(load=0.9, mean_e2e=1.36, mean_e2e_low=1.3, mean_e2e_high=1.4, p99_e2e=1.2, p90_ttft=0.9),),
    )  # fmt: skip
    path = folder / "tuned.json"
    tuned.save(found, path)
    return str(path)


def started(model: str, path: str, *arguments: str) -> Any:
    return plain(model, "--ext-tuned", path, *arguments)


def plain(model: str, *arguments: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", model, "--max-model-len", "128", "--dtype", "float32", "--enforce-eager"]
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *arguments])).create_engine_config()


def test_what_was_found_is_set_and_said(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file(tmp_path, model)
    with caplog.at_level(logging.INFO, logger="vllm.vllm_ext"):
        config = started(model, path)
    found = config.scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs, found.scheduler_cls) == (64, 8, SCHEDULER)
    ours = parse(config.additional_config["vllm_ext"])
    assert (ours.system, ours.ordering) == ("alise", {"gamma": 1.0})
    (said,) = [record.getMessage() for record in caplog.records if "tuned.json sets" in record.getMessage()]
    assert (
        "sets --max-num-batched-tokens 64, --max-num-seqs 8, --scheduler-cls alise, vllm_ext.ordering.gamma=1.0; found"
        in said
    )
    assert "with vLLM" not in said
    assert "expected at 0.9 of 4 requests/s: mean end-to-end latency 1.36 times lower (1.30..1.40), P99 1.20" in said


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Return the line on what is set."""
    with caplog.at_level(logging.INFO, logger="vllm.vllm_ext"):
        yield lambda: next(line for line in map(logging.LogRecord.getMessage, caplog.records) if " sets " in line)


NOT_KNOWN = "; what to expect is not known: it was measured with the file's settings alone"


def test_options_given_by_hand_win(model: str, tmp_path: Path, told: Callable[[], str]) -> None:
    config = started(model, file(tmp_path, model), "--ext-optimise", "mean")
    assert parse(config.additional_config["vllm_ext"]).ordering == {"gamma": 0.5}
    assert (
        "--scheduler-cls alise; because of what is given by hand it does not set vllm_ext.ordering.gamma=1.0;" in told()
    )
    assert told().endswith(NOT_KNOWN)


def test_a_policy_s_option_by_hand_beside_the_file_ends_its_promise(
    model: str, tmp_path: Path, told: Callable[[], str]
) -> None:
    settings = Settings(scheduler_cls="alise")
    started(model, file(tmp_path, model, settings=settings), "--ext-optimise", "tail", "--ext-request-log-mib", "7")
    assert "sets --scheduler-cls alise; beside it vllm_ext.ordering.gamma=1.0 is given by hand; found" in told()
    assert told().endswith(NOT_KNOWN)


@pytest.mark.parametrize(("flags", "limits"), [
    (("--max-num-seqs", "128"), (None, 128)), (("--max-num-batched-tokens=32",), (32, None)),
    (("--max-num-seqs", "8"), (64, 8)),
])  # fmt: skip
def test_budget_and_seats_are_set_together_or_not_at_all(
    model: str, tmp_path: Path, told: Callable[[], str], flags: tuple[str, ...], limits: tuple[int | None, int | None]
) -> None:
    """vLLM refuses more seats than tokens: with either by hand and the other from the file the start failed."""
    before = plain(model, *flags).scheduler_config
    found = started(model, file(tmp_path, model), *flags).scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (
        limits[0] or before.max_num_batched_tokens, limits[1] or before.max_num_seqs,
    )  # fmt: skip
    both = "--max-num-batched-tokens 64, --max-num-seqs 8"
    assert (f"does not set {both};" in told()) is (None in limits)
    assert (f"sets {both}," in told()) is (None not in limits)
    assert told().endswith(NOT_KNOWN) is (None in limits)


@pytest.mark.parametrize("how", ["words", "one word", "underscores", "config file", "additional config"])
def test_a_flag_given_by_hand_wins_also_with_vllms_default(
    model: str, tmp_path: Path, told: Callable[[], str], how: str
) -> None:
    path = file(tmp_path, model, settings=Settings(watermark=0.05, kv_cache_dtype="fp8", max_num_seqs=8))
    words = {
        "words": ["--ext-tuned", path, "--watermark", "0.0", "--kv-cache-dtype", "auto"],
        "one word": [f"--ext-tuned={path}", "--watermark=0.0", "--kv-cache-dtype=auto"],
        "underscores": ["--ext_tuned", path, "--watermark", "0", "--kv_cache_dtype", "auto"],
        "config file": ["--config", str(tmp_path / "flags.yaml")],
        "additional config": ["--additional-config.vllm_ext.tuned", path, "--watermark", "0", "--kv-cache-dtype=auto"],
    }
    (tmp_path / "flags.yaml").write_text(f"ext-tuned: {path}\nwatermark: 0.0\nkv-cache-dtype: auto\n")
    config = plain(model, *words[how])
    assert (config.scheduler_config.watermark, config.cache_config.cache_dtype) == (0.0, "auto")
    assert config.scheduler_config.max_num_seqs == 8
    assert "tuned_except" not in str(config.additional_config)
    assert "does not set --watermark 0.05, --kv-cache-dtype fp8" in told()


def test_a_program_says_which_of_vllms_defaults_it_means(model: str, tmp_path: Path) -> None:
    path = file(tmp_path, model, settings=Settings(watermark=0.05, max_num_seqs=8))
    ours = {"tuned": path, "tuned_except": ["watermark"]}
    args = EngineArgs(model=model, dtype="float32", enforce_eager=True, additional_config={"vllm_ext": ours})
    found = args.create_engine_config().scheduler_config
    assert (found.watermark, found.max_num_seqs) == (0.0, 8)
    with pytest.raises(ConfigError, match=r"tuned_except=\['watermarks'\]: must be a list of some of max_num"):
        launch_tuned.of({"vllm_ext": {**ours, "tuned_except": ["watermarks"]}})


def test_another_system_by_hand_gets_neither_the_options_nor_the_promise_of_the_one_that_was_found(
    model: str, tmp_path: Path, told: Callable[[], str]
) -> None:
    ours = parse(started(model, file(tmp_path, model), "--scheduler-cls", "fcfs").additional_config["vllm_ext"])
    assert (ours.system, ours.ordering) == ("fcfs", {})
    assert "it does not set --scheduler-cls alise, vllm_ext.ordering.gamma=1.0;" in told()
    assert told().endswith(NOT_KNOWN)


def test_settings_found_with_another_vllm_say_so(model: str, tmp_path: Path, told: Callable[[], str]) -> None:
    path = Path(file(tmp_path, model))
    path.write_text(path.read_text().replace(f'"vllm": "{vllm_version}"', '"vllm": "0.11.0"'))
    started(model, str(path))
    assert f"; found with vLLM 0.11.0, this is {vllm_version}; expected at 0.9" in told()


def test_where_only_vllms_flags_were_found_vllm_schedules(model: str, tmp_path: Path) -> None:
    config = started(model, file(tmp_path, model, settings=Settings(max_num_batched_tokens=256, watermark=0.05)))
    assert config.scheduler_config.scheduler_cls is None
    assert "vllm_ext" not in config.additional_config
    assert config.scheduler_config.max_num_batched_tokens == 256


def test_kv_in_8_bits_is_set_where_it_was_allowed(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file(tmp_path, model, settings=Settings(kv_cache_dtype="fp8"))
    args = EngineArgs(model=model, additional_config={"vllm_ext": {"tuned": path}})
    found = launch_tuned.of(args.additional_config)
    assert found is not None
    with caplog.at_level(logging.INFO, logger="vllm.vllm_ext"), found.applied(args):
        assert args.kv_cache_dtype == "fp8"
        assert caplog.text == "", "vLLM sets logging up while the configuration is built: earlier lines are lost"
    assert "sets --kv-cache-dtype fp8;" in caplog.text
    assert args.kv_cache_dtype == "auto"


def test_the_arguments_may_be_used_again(model: str, tmp_path: Path) -> None:
    path = file(tmp_path, model)
    args = EngineArgs(
        model=model, max_model_len=128, dtype="float32", enforce_eager=True,
        additional_config={"vllm_ext": {"tuned": path}},
    )  # fmt: skip
    for _ in range(2):
        assert args.create_engine_config().scheduler_config.max_num_batched_tokens == 64
        assert (args.max_num_batched_tokens, args.scheduler_cls) == (None, None)
        assert args.additional_config == {"vllm_ext": {"tuned": path}}


@pytest.mark.parametrize(
    ("made_for", "said"),
    [
        ({"layers": 99}, "is for model tiny, not for"),
        ({"hidden": 1}, "is for model tiny, not for"),
        ({"device": "h100", "device_memory_gib": 80.0}, "is for device h100, not for"),
    ],
)
def test_settings_of_another_server_are_refused(
    model: str, tmp_path: Path, made_for: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="run vllm-ext plan for this server") as caught:
        started(model, file(tmp_path, model, **made_for))
    assert said in str(caught.value)


def test_another_number_of_devices_is_one_line_on_the_command_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        started(model, file(tmp_path, model), "--tensor-parallel-size", "2")
    assert stopped.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "tuned.json: is for --tensor-parallel-size 1, not for 2; run vllm-ext plan for this server" in said


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', "\xff"])
def test_a_damaged_file_is_one_line_and_status_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text, encoding="latin-1")
    for name in (path, tmp_path / "none.json", tmp_path):
        with pytest.raises(SystemExit) as stopped:
            started(model, str(name))
        assert stopped.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"--ext-tuned {name}: must be a file that vllm-ext plan --save wrote: " in said


@pytest.mark.parametrize(("name", "gib", "right"), [
    ("NVIDIA H100 80GB HBM3", 79.6, True), ("NVIDIA H100 PCIe", 94.0, False), ("NVIDIA A100-SXM4-80GB", 79.6, False),
])  # fmt: skip
def test_a_gpu_is_known_by_its_name_and_memory(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, name: str, gib: float, right: bool
) -> None:
    from vllm.platforms import current_platform

    from vllm_ext.launch.tuned import of

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: name, raising=False)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: int(gib * 2**30), raising=False)
    settings = of({"vllm_ext": {"tuned": file(tmp_path, model, device="h100", device_memory_gib=79.65)}})
    assert settings is not None
    if right:
        settings._check_device()
    else:
        with pytest.raises(ConfigError, match="is for device h100 of 80 GiB, not for"):
            settings._check_device()


@pytest.mark.parametrize(("name", "named", "same"), [
    ("NVIDIA A100-SXM4-80GB", "a100-80", True), ("NVIDIA A100-SXM4-80GB", "a10", False), ("NVIDIA A10G", "a10", True),
    ("NVIDIA L40S", "l4", False), ("NVIDIA H100 PCIe", "h100", True), ("whatever", "memory=80,bandwidth=1", True),
])  # fmt: skip
def test_a_device_is_known_by_the_name_it_has_in_the_table(name: str, named: str, same: bool) -> None:
    assert is_device(name, named) is same
