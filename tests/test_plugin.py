"""The plugin in a real vLLM: inert until a system is chosen, then checked where the user sees it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.extent import HANG_S
from vllm_ext import envs, plugin, systems, tiny_model
from vllm_ext.config import ConfigError, ExtConfig, PredictionConfig, parse
from vllm_ext.hooks import registry
from vllm_ext.hooks.errors import UpstreamChanged
from vllm_ext.hooks.patch import Undo
from vllm_ext.launch import arguments, features
from vllm_ext.patches.additional_config import AdditionalConfig, with_options

STEERED = arguments.SCHEDULER
UPSTREAM = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_model.build(style="llama", seed=0))


@pytest.fixture(autouse=True)
def hooks_come_and_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the plugin as vLLM does; what a test installs beyond it is undone, so that no other test sees it."""
    plugin.register()
    undos: list[Undo] = []
    install = registry.install

    def recorded(name: str, *, check: bool = True) -> Undo:
        undos.append(install(name, check=check))
        return undos[-1]

    monkeypatch.setattr(registry, "install", recorded)
    yield
    for undo in reversed(undos):
        undo()


def make_args(model: str, **options: Any) -> EngineArgs:
    return EngineArgs(model=model, max_model_len=128, dtype="float32", enforce_eager=True, **options)


def make_config(model: str, usage: str | None = None, **options: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext

    return make_args(model, **options).create_engine_config(None if usage is None else UsageContext[usage])


def from_command_line(model: str, *arguments: str) -> AsyncEngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", model, "--max-model-len", "128", "--dtype", "float32", "--enforce-eager"]
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *arguments]))


def options_of(config: Any) -> ExtConfig:
    return parse(config.additional_config["vllm_ext"])


def test_registering_again_changes_nothing() -> None:
    before = EngineArgs.__dict__["create_engine_config"]
    plugin.register()
    assert EngineArgs.__dict__["create_engine_config"] is before


@pytest.mark.parametrize("additional", [{}, {"a": {"b": 1}}], ids=["nothing", "options of others"])
@pytest.mark.parametrize("scheduler", [None, UPSTREAM])
def test_invariant_8_without_a_choice_everything_is_as_upstream_makes_it(
    model: str, monkeypatch: pytest.MonkeyPatch, additional: dict[str, Any], scheduler: str | None
) -> None:
    def checked(*_: str) -> None:
        raise UpstreamChanged("looked at vLLM though nothing was chosen")

    original = EngineArgs.create_engine_config.__wrapped__  # type: ignore[attr-defined]
    plain = original(make_args(model, scheduler_cls=scheduler, additional_config=dict(additional)))
    monkeypatch.setattr(registry, "verify", checked)
    config = make_config(model, scheduler_cls=scheduler, additional_config=dict(additional))
    assert type(config.additional_config) is dict
    assert config.additional_config == plain.additional_config == additional
    assert config.compute_hash() == plain.compute_hash()
    assert config.scheduler_config.scheduler_cls == plain.scheduler_config.scheduler_cls == scheduler
    assert config.scheduler_config.get_scheduler_cls() is plain.scheduler_config.get_scheduler_cls()


@pytest.mark.parametrize("name", ["fcfs", "alise", "fcfs+alise"])
def test_a_system_is_chosen_by_name(model: str, name: str) -> None:
    args = make_args(model, scheduler_cls=name)
    config = args.create_engine_config()
    assert config.scheduler_config.scheduler_cls == STEERED
    assert options_of(config) == ExtConfig(system=name)
    assert args.scheduler_cls == name  # the same arguments may be used again
    assert options_of(args.create_engine_config()) == ExtConfig(system=name)


def test_a_system_is_chosen_in_additional_config_alone(model: str) -> None:
    config = make_config(model, additional_config={"vllm_ext": {"system": "alise"}})
    assert config.scheduler_config.scheduler_cls == STEERED


def test_our_scheduler_class_is_kept(model: str) -> None:
    options = {"vllm_ext": {"system": "alise"}}
    assert (
        make_config(model, scheduler_cls=STEERED, additional_config=options).scheduler_config.scheduler_cls == STEERED
    )


def test_a_hash_of_compiled_graphs_does_not_depend_on_our_options(model: str) -> None:
    plain = make_config(model)
    for options in ({}, {"ordering": {"gamma": 1.0}}, {"metrics_interval_s": 5, "record_capacity": 7}):
        config = make_config(model, scheduler_cls="alise", additional_config={"vllm_ext": options})
        assert config.compute_hash() == plain.compute_hash()


def test_options_of_others_stay_a_real_dictionary_and_in_the_hash(model: str) -> None:
    """Some models read their settings only if ``additional_config`` is a dict."""
    config = make_config(model, scheduler_cls="alise", additional_config={"gdn_prefill_backend": "triton"})
    assert type(config.additional_config) is dict
    assert config.additional_config["gdn_prefill_backend"] == "triton"
    assert options_of(config).system == "alise"
    assert config.compute_hash() != make_config(model, scheduler_cls="alise").compute_hash()


def test_the_configuration_survives_the_way_to_other_processes(model: str) -> None:
    config = make_config(model, scheduler_cls="alise", additional_config={"vllm_ext": {"ordering": {"gamma": 1.0}}})
    copy = pickle.loads(pickle.dumps(config))  # noqa: S301 - what vLLM does
    assert options_of(copy) == options_of(config)
    assert copy.compute_hash() == config.compute_hash()


def test_the_configuration_survives_being_validated_again(model: str) -> None:
    from vllm.config.utils import replace

    config = make_config(model, scheduler_cls="alise")
    again = replace(config, instance_id="other")
    assert type(again.additional_config) is AdditionalConfig
    assert again.additional_config.get("vllm_ext")["system"] == "alise"


def test_additional_config_hashes_what_is_not_ours() -> None:
    alone, first, second = with_options({}, {"x": 1}), AdditionalConfig({"a": 1}), AdditionalConfig({"a": 2})
    assert isinstance(alone, AdditionalConfig)
    assert alone.compute_hash() == "None"
    assert first.compute_hash() != second.compute_hash()
    assert first.compute_hash() == AdditionalConfig({"a": 1, "vllm_ext": {"x": 2}}).compute_hash()


REFUSED = {
    "unknown name": ({"scheduler_cls": "alize"}, "one of fcfs, fcfs-tuned, accelgen"),
    "unknown composition": ({"scheduler_cls": "fcfs+alize"}, "one of fcfs, fcfs-tuned, accelgen"),
    "unknown option": ({"scheduler_cls": "alise", "ext": {"orderin": {}}}, "vllm_ext.orderin="),
    "unknown parameter": (
        {"scheduler_cls": "alise", "ext": {"ordering": {"agelimit": 1}}},
        "vllm_ext.ordering.agelimit",
    ),
    "options without a system": (
        {"ext": {"ordering": {}}},
        "add --scheduler-cls NAME, one of fcfs, fcfs-tuned, accelgen",
    ),
    "options without a system for a foreign class": ({"scheduler_cls": UPSTREAM, "ext": {}}, "options need a system"),
    "options that are no object": ({"scheduler_cls": "alise", "ext": 3}, "must be an object"),
    "foreign class": ({"scheduler_cls": UPSTREAM, "ext": {"system": "alise"}}, "needs a subclass of vllm_ext"),
    "two systems": ({"scheduler_cls": "alise", "ext": {"system": "fcfs"}}, "contradicts --scheduler-cls alise"),
    "oracle without permission": ({"scheduler_cls": "oracle-alise"}, "offline benchmarks"),
    "module that is not there": ({"scheduler_cls": "alise", "ext": {"modules": ["no_such_module"]}}, "no_such_module"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_choice_is_refused_in_the_front_end(model: str, options: dict[str, Any], message: str) -> None:
    options = dict(options)
    if "ext" in options:
        options["additional_config"] = {"vllm_ext": options.pop("ext")}
    args = make_args(model, **options)
    before = args.scheduler_cls
    with pytest.raises(ConfigError) as caught:
        args.create_engine_config()
    assert message in str(caught.value)
    assert args.scheduler_cls == before


@pytest.mark.parametrize("system", ["fcfs", "alise"])
def test_vllms_priority_goes_with_every_system(model: str, system: str) -> None:
    config = make_config(model, scheduler_cls=system, scheduling_policy="priority")
    assert config.scheduler_config.policy == "priority"


ORACLES = {
    "system": {"scheduler_cls": "oracle-alise", "additional_config": {"vllm_ext": {"allow_oracle": True}}},
    "source": {
        "scheduler_cls": "alise",
        "additional_config": {"vllm_ext": {"allow_oracle": True, "prediction": {"sources": ["oracle"]}}},
    },
}


@pytest.mark.parametrize("options", ORACLES.values(), ids=ORACLES.keys())
def test_an_oracle_is_allowed_offline_and_never_in_a_server(model: str, options: dict[str, Any]) -> None:
    assert make_config(model, "LLM_CLASS", **options).scheduler_config.scheduler_cls == STEERED
    with pytest.raises(ConfigError, match="never for a server"):
        make_config(model, "OPENAI_API_SERVER", **options)


@pytest.mark.parametrize("usage", [None, "LLM_CLASS", "ENGINE_CONTEXT", "OPENAI_API_SERVER", "OPENAI_BATCH_RUNNER"])
def test_only_the_hooks_that_a_process_needs_are_installed(usage: str | None) -> None:
    groups = features.needed_groups(ExtConfig(), usage)
    assert ("http" in groups) == (usage in ("OPENAI_API_SERVER", "OPENAI_BATCH_RUNNER"))
    assert "hints" in groups
    assert "front-end" in groups
    assert "prediction" not in groups, "fcfs looks at no length"
    assert "front-end" not in features.needed_groups(ExtConfig(metrics_interval_s=0), usage)
    retrieval = PredictionConfig(sources=("retrieval", "history"))
    predicting = features.needed_groups(ExtConfig(system="alise", metrics_interval_s=0, prediction=retrieval), usage)
    assert {"prediction", "front-end"} <= set(predicting)
    assert "prediction" not in features.needed_groups(ExtConfig(system="alise"), usage)


@pytest.mark.parametrize(("system", "rank", "named"), [("alise", -1, True), ("alise", 1, False), ("fcfs", -1, False)])
def test_a_server_names_a_predictor_for_the_api_servers_that_it_starts(
    model: str, monkeypatch: pytest.MonkeyPatch, system: str, rank: int, named: bool
) -> None:
    """A new one each time: the environment may be that of another server."""
    monkeypatch.setenv(envs.PREDICTOR, "inherited")
    asked = {"vllm_ext": {"prediction": {"sources": ["retrieval", "history"]}}}
    args = make_args(model, scheduler_cls=system, additional_config=asked)
    args._api_process_count, args._api_process_rank = 2, rank
    args.create_engine_config()
    assert (envs.shared_predictor() != "inherited") == named


def test_a_changed_vllm_is_refused_only_if_a_system_is_chosen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ext.patches import scheduler_reliances

    one = dataclasses.replace(scheduler_reliances.HOOKS[0], verified={"0.0.1": "0" * 16})
    monkeypatch.setattr(scheduler_reliances, "HOOKS", (one,))
    assert make_config(model).scheduler_config.scheduler_cls is None
    with pytest.raises(
        UpstreamChanged, match=r"install a verified version of vLLM \(0\.0\.1\), or leave out --scheduler-cls"
    ):
        make_config(model, scheduler_cls="alise")


@pytest.mark.parametrize("system", ["alise", "auto"])
def test_flags_reach_the_options_and_win_over_json(model: str, system: str) -> None:
    json_options = json.dumps({"vllm_ext": {"ordering": {"gamma": 0.7, "theta": 0.0}}})
    args = from_command_line(
        model, "--scheduler-cls", system, "--additional-config", json_options, "--ext-optimise", "tail"
    )
    config = args.create_engine_config()
    assert options_of(config).ordering == {"gamma": 1.0, "theta": 0.0}


def test_dotted_options_reach_the_options(model: str) -> None:
    args = from_command_line(model, "--scheduler-cls", "alise", "--additional-config.vllm_ext.prediction.window", "7")
    assert options_of(args.create_engine_config()).prediction.window == 7


def test_arguments_turned_into_a_dictionary_keep_the_flags(model: str) -> None:
    """``vllm bench throughput`` builds its engine from ``asdict`` of the parsed arguments."""
    args = from_command_line(model, "--scheduler-cls", "auto", "--no-ext-preemption")
    again = AsyncEngineArgs(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)})
    assert options_of(again.create_engine_config()).admission == {"preempt": False}


def test_without_our_flags_the_parsed_arguments_are_untouched(model: str) -> None:
    assert from_command_line(model).additional_config == {}


def test_a_flag_without_a_system_says_what_is_missing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line(model, "--ext-optimise", "mean")
    assert "add --scheduler-cls NAME" in capsys.readouterr().err


def test_help_lists_the_systems_and_the_flags() -> None:
    text = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).format_help()
    assert "--ext-age-limit-s" in text
    unwrapped = "".join(text.split())  # long names are broken at their hyphens
    assert all(row.name in unwrapped for row in systems.table() if not row.oracle)
    assert "oracle-alise" not in unwrapped, "what a server refuses is not offered"


OFFLINE_HINTS = {"ttft_slo_ms": -1, "osl": 0, "conversation_id": ""}


@pytest.mark.parametrize(("key", "value"), OFFLINE_HINTS.items(), ids=OFFLINE_HINTS.keys())
def test_a_malformed_offline_hint_is_refused_by_its_name(model: str, key: str, value: Any) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    processor = InputProcessor(make_config(model, scheduler_cls="alise"))
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    processor.process_inputs("a", prompt, SamplingParams(extra_args={"other": -1, "osl": 3}), ("generate",))
    with pytest.raises(ValueError, match=f"^{key}=") as caught:
        processor.process_inputs("b", prompt, SamplingParams(extra_args={key: value}), ("generate",))
    assert isinstance(caught.value, VLLMValidationError)
    assert caught.value.parameter == key


def test_an_admin_endpoint_without_a_key_of_its_own_is_refused_before_anything_is_loaded(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_EXT_ADMIN_KEY", raising=False)
    options = {"scheduler_cls": "fcfs", "additional_config": {"vllm_ext": {"kv_tier": {"gib": 1.0, "admin": True}}}}
    with pytest.raises(ValueError, match="VLLM_EXT_ADMIN_KEY is not set"):
        make_config(model, "OPENAI_API_SERVER", **options)


def test_an_offline_life_that_may_not_be_set_is_refused(model: str) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    options = {"vllm_ext": {"kv_tier": {"gib": 1.0, "ttl_s": 60.0}}}
    processor = InputProcessor(make_config(model, scheduler_cls="fcfs", additional_config=options))
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    for salt, ttl_s, lawful in ((None, 5.0, False), ("salt", 61.0, False), ("salt", 60.0, True)):
        params = SamplingParams(extra_args={"kv_ttl_s": ttl_s})
        with contextlib.nullcontext() if lawful else pytest.raises(ValueError, match=r"^kv_ttl_s="):
            processor.process_inputs("a", {**prompt, **({"cache_salt": salt} if salt else {})}, params, ("generate",))


def test_an_objective_below_the_operators_bound_is_refused(model: str) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    options = {"vllm_ext": {"slo": {"least_tbt_ms": 20.0}}}
    processor = InputProcessor(make_config(model, scheduler_cls="sarathi", additional_config=options))
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    for asked_ms, lawful in ((0.001, False), (20.0, True)):
        params = SamplingParams(extra_args={"tbt_slo_ms": asked_ms})
        refused = pytest.raises(
            ValueError, match=r"^tbt_slo_ms=0.001: must be at least 20, this server's slo.least_tbt_ms"
        )
        with contextlib.nullcontext() if lawful else refused:
            processor.process_inputs("a", prompt, params, ("generate",))


FRESH = """
import sys
import vllm_ext.plugin

heavy = {"vllm", "torch", "numpy"} & set(sys.modules)
from vllm.engine.arg_utils import EngineArgs

del EngineArgs.from_cli_args  # as if a later vLLM had renamed it
before = EngineArgs.__dict__["create_engine_config"]
vllm_ext.plugin.register()
vllm_ext.plugin.register()
untouched = EngineArgs.__dict__["create_engine_config"] is before
print(f"{heavy=} {untouched=}")
"""


@pytest.fixture(scope="module")
def fresh() -> str:
    """What a process that imports us, then vLLM, and then finds that a symbol is missing says; vLLM takes long."""
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_vllm_without_our_symbols_runs_without_us_and_says_so_once(fresh: str) -> None:
    assert "untouched=True" in fresh
    assert fresh.count("vllm-ext is inactive") == 1


def test_importing_the_plugin_imports_nothing_heavy(fresh: str) -> None:
    assert "heavy=set()" in fresh


def test_a_bad_benchmark_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv("VLLM_EXT_BENCH_FORCED_LENGTH", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        plugin.register()


TIER = {"vllm_ext": {"kv_tier": {"gib": 2, "bits": 8, "policy": "lru", "store": "early"}}}


def test_a_kv_tier_is_vllms_connector_with_our_parts(model: str) -> None:
    found = make_config(model, scheduler_cls="fcfs", additional_config=TIER).kv_transfer_config
    assert found.kv_connector_module_path == "vllm_ext.kv.connector.tiered"
    assert found.kv_load_failure_policy == "recompute"
    assert found.kv_connector_extra_config["cpu_bytes_to_use"] == 2 * 2**30
    assert found.kv_connector_extra_config["eviction_policy"] == "lru"
    assert make_config(model, scheduler_cls="fcfs").kv_transfer_config is None


@pytest.mark.parametrize(("given", "size"), [(None, 64), (32, 32)])
def test_blocks_of_a_kv_tier_are_what_the_user_says_or_64_tokens(model: str, given: int | None, size: int) -> None:
    args = EngineArgs(model=model, scheduler_cls="fcfs", additional_config=TIER, block_size=given)
    assert args.create_engine_config().cache_config.block_size == size
    assert args.block_size == given, "the caller may build from the same arguments again"


def test_a_kv_tier_beside_another_connector_is_refused(model: str) -> None:
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match=r"vllm_ext.kv_tier.gib=2.0: not beside --kv-transfer-config"):
        make_config(model, scheduler_cls="fcfs", additional_config=TIER, kv_transfer_config=other)
