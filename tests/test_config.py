"""Configuration: defaults, what is refused and under which name, flags, and the environment."""

from __future__ import annotations

import argparse
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext import config as ext_config
from vllm_ext import envs
from vllm_ext.config import FLAGS, KEY, ConfigError, ExtConfig, PredictionConfig, flags, merge_flags, parse, to_dict
from vllm_ext.launch import arguments
from vllm_ext.patches.cli_flags import add_flags
from vllm_ext.systems import build


def test_nothing_given_is_the_default() -> None:
    assert parse({}) == ExtConfig()


def test_options_are_read() -> None:
    found = parse(
        {
            "system": "alise",
            "ordering": {"age_limit_s": 3.0},
            "prediction": {"sources": ["history"], "window": 5},
            "modules": ["a.b"],
        }
    )
    assert found == ExtConfig(
        system="alise",
        ordering={"age_limit_s": 3.0},
        prediction=PredictionConfig(sources=("history",), window=5),
        modules=("a.b",),
    )


BAD = [
    ({"sytem": "alise"}, "sytem"),
    ({"prediction": {"windw": 3}}, "prediction.windw"),
    ({"prediction": 3}, "prediction"),
    ({"prediction": {"sources": "hint"}}, "prediction.sources"),
    ({"prediction": {"sources": ["guess"]}}, "prediction.sources"),
    ({"prediction": {"sources": ["hint", "hint"]}}, "prediction.sources"),
    ({"prediction": {"sources": [3]}}, "prediction.sources"),
    ({"prediction": {"sources": ["oracle"]}}, "prediction.sources"),
    ({"prediction": {"window": 0}}, "prediction.window"),
    ({"prediction": {"window": 1.5}}, "prediction.window"),
    ({"prediction": {"window": True}}, "prediction.window"),
    ({"prediction": {"prior_tokens": 0}}, "prediction.prior_tokens"),
    ({"prediction": {"quantile": 0}}, "prediction.quantile"),
    ({"prediction": {"quantile": 1.01}}, "prediction.quantile"),
    ({"prediction": {"quantile": math.nan}}, "prediction.quantile"),
    ({"system": ""}, "system"),
    ({"system": None}, "system"),
    ({"ordering": [1]}, "ordering"),
    ({"admission": {3: 4}}, "admission"),
    ({"budget": None}, "budget"),
    ({"residency": "x"}, "residency"),
    ({"modules": "a.b"}, "modules"),
    ({"modules": ["a/b.py"]}, "modules"),
    ({"modules": ["a..b"]}, "modules"),
    ({"metrics_interval_s": -1}, "metrics_interval_s"),
    ({"metrics_interval_s": math.inf}, "metrics_interval_s"),
    ({"metrics_interval_s": "1"}, "metrics_interval_s"),
    ({"record_capacity": 0}, "record_capacity"),
    ({"request_log": ""}, "request_log"),
    ({"request_log": "log.jsonl", "metrics_interval_s": 0}, "request_log"),
    ({"request_log": "log.jsonl", "request_log_mib": -1}, "request_log_mib"),
    ({"request_log": "log.jsonl", "request_log_files": 0}, "request_log_files"),
    ({"request_log": "log.jsonl", "request_log_sample": 0.0}, "request_log_sample"),
    ({"request_log": "log.jsonl", "request_log_sample": 1.5}, "request_log_sample"),
    ({"request_log_sample": 0.5}, "request_log_sample"),
    ({"request_log_prompts": True}, "request_log_prompts"),
    ({"profile": 3}, "profile"),
    ({"allow_oracle": 1}, "allow_oracle"),
]


@pytest.mark.parametrize(("raw", "field"), BAD, ids=[json.dumps(raw, default=str) for raw, _ in BAD])
def test_a_bad_option_is_refused_by_its_name(raw: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"vllm_ext.{field}=")


@pytest.mark.parametrize("raw", [None, [], "alise", 3], ids=repr)
def test_options_that_are_no_object_are_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match=r"^vllm_ext="):
        parse(raw)


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"metrics_interval_s"):
        parse({"metric_interval_s": 1})


def test_the_oracle_needs_permission() -> None:
    raw = {"prediction": {"sources": ["oracle"]}}
    assert parse({**raw, "allow_oracle": True}).prediction.sources == ("oracle",)


def test_a_config_does_not_share_its_parameters_with_what_was_parsed() -> None:
    raw: dict[str, Any] = {"ordering": {"x": [1]}}
    found = parse(raw)
    raw["ordering"]["x"].append(2)
    assert found.ordering == {"x": [1]}


def test_an_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("system", "x", "one of y")))  # noqa: S301 - our own bytes
    assert str(error) == "vllm_ext.system='x': one of y"


parameters = st.dictionaries(
    st.text(max_size=8), st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8), max_size=3
)
predictions = st.builds(
    PredictionConfig,
    sources=st.lists(st.sampled_from(["hint", "history"]), unique=True).map(tuple),
    window=st.integers(1, 10**6),
    prior_tokens=st.integers(1, 10**6),
    quantile=st.floats(0.001, 1.0),
)
configs = st.builds(
    ExtConfig,
    system=st.sampled_from(["fcfs", "alise", "fcfs+alise"]),
    ordering=parameters,
    admission=parameters,
    budget=parameters,
    residency=parameters,
    prediction=predictions,
    modules=st.lists(st.sampled_from(["a", "a.b_c"])).map(tuple),
    metrics_interval_s=st.floats(0.01, 100),
    request_log=st.none() | st.just("log.jsonl"),
    record_capacity=st.integers(1, 10**6),
    profile=st.none() | st.just("p.json"),
    allow_oracle=st.booleans(),
)


@given(configs)
def test_a_config_survives_the_way_through_json(config: ExtConfig) -> None:
    assert parse(json.loads(json.dumps(to_dict(config)))) == config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*to_dict(ExtConfig()), "unknown"]), json_values, max_size=3))
def test_any_json_is_parsed_or_refused_with_a_config_error(raw: dict[str, Any]) -> None:
    try:
        found = parse(raw)
    except ConfigError:
        return
    assert parse(to_dict(found)) == found


def given_flags(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def test_flags_set_their_options() -> None:
    given = given_flags(
        *("--ext-age-limit-s", "3", "--no-ext-preemption"),
        *("--ext-prediction-sources", "history, hint,", "--ext-modules", "a.b", "--ext-request-log", "f"),
        *("--ext-metrics-interval-s", "2", "--ext-profile", "p"),
    )
    merged = merge_flags({}, given)
    assert merged == {
        "ordering": {"age_limit_s": 3.0},
        "admission": {"preempt": False},
        "prediction": {"sources": ["history", "hint"]},
        "modules": ["a.b"],
        "request_log": "f",
        "metrics_interval_s": 2.0,
        "profile": "p",
    }
    parse(merged)


def test_flags_not_given_change_nothing() -> None:
    assert merge_flags({"ordering": {"x": 1}}, given_flags()) == {"ordering": {"x": 1}}


def test_a_flag_wins_over_the_option_and_leaves_its_neighbours_and_the_original() -> None:
    options = {"ordering": {"age_limit_s": 30.0, "num_levels": 2}}
    merged = merge_flags(options, given_flags("--ext-age-limit-s", "3"))
    assert merged == {"ordering": {"age_limit_s": 3.0, "num_levels": 2}}
    assert options == {"ordering": {"age_limit_s": 30.0, "num_levels": 2}}


def test_a_switched_off_preemption_is_not_an_absent_one() -> None:
    assert merge_flags({"admission": {"preempt": True}}, given_flags("--no-ext-preemption"))["admission"] == {
        "preempt": False
    }


def test_a_flag_below_an_option_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^vllm_ext.ordering=3"):
        merge_flags({"ordering": 3}, given_flags("--ext-age-limit-s", "2"))


@pytest.mark.parametrize("path", FLAGS)
def test_every_flag_leads_to_an_option(path: str) -> None:
    name = flags.names_of(path, FLAGS[path][0])[0]
    group, last = path.partition(".")[0], path.rpartition(".")[2]
    assert name.startswith("--ext-") or group in ("slo", "kv_tier"), "a name that vLLM may take one day"
    node = to_dict(ExtConfig())
    for key in path.split(".")[:-1]:
        node = node[key]
    assert group in ext_config.AXES or last in node
    assert FLAGS[path][1].description


def test_short_name_is_left_to_vllm_where_that_has_it() -> None:
    assert given_flags("--policy", "a.py:B", "--policy", "c.py:D")["ext_policy"] == ["c.py:D"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy")
    add_flags(parser)
    given = parser.parse_args(["--policy", "vllm's", "--ext-policy", "a.py:B"])
    assert (given.policy, given.ext_policy) == ("vllm's", ["a.py:B"])


def test_flags_are_added_to_a_parser_once() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    add_flags(parser)
    assert parser.format_help().count("--ext-age-limit-s") == 2  # usage and list


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_forced_lengths_are_switched_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv(envs.BENCH_FORCED_LENGTH, raising=False)
    if value is not None:
        monkeypatch.setenv(envs.BENCH_FORCED_LENGTH, value)
    assert envs.bench_forced_length() is expected


@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
def test_a_bad_environment_value_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(envs.BENCH_FORCED_LENGTH, value)
    with pytest.raises(ValueError, match=r"^VLLM_EXT_BENCH_FORCED_LENGTH=.*must be 0 or 1"):
        envs.bench_forced_length()


def test_policy_of_ones_own_needs_no_system(tmp_path: Path) -> None:
    """`vllm serve MODEL --policy FILE.py:CLASS` alone: the row of defaults, with the policy on its axis."""
    file = tmp_path / "mine.py"
    file.write_text("from vllm_ext.systems.upstream import Arrival\nclass Mine(Arrival):\n    pass\n")
    options = merge_flags({}, given_flags("--policy", f"{file}:Mine"))
    config, scheduler = arguments.validate(None, {KEY: options})
    assert (config.system, config.policies, scheduler) == ("fcfs", (f"{file}:Mine",), arguments.SCHEDULER)
    assert type(build(config).ordering).__name__ == "Mine"


@pytest.mark.parametrize(("what", "gamma"), [("normalised", 0.25), ("mean", 0.5), ("tail", 1.0)])
def test_what_is_to_be_short_sets_how_much_waiting_counts(what: str, gamma: float) -> None:
    assert merge_flags({}, given_flags("--ext-optimise", what)) == {"ordering": {"gamma": gamma}}


def test_what_can_be_short_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given_flags("--ext-optimise", "throughput")
    assert "'throughput': must be one of normalised, mean, tail" in capsys.readouterr().err
